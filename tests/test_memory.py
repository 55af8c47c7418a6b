"""The predicted peak memory of a step matches the measured peak, and each memory rung frees what it claims to free."""

import json

import pytest
import torch
from conftest import CHECKPOINTING, CHUNKED, RUNGS, load, play
from torch.testing._internal.two_tensor import TwoTensor

from measure import attention, memory
from measure.records import TEN

FSDP = "branches/fsdp_run.py"


def predict(script, batch_size=2, seq_len=64, ranks=1, cuda=False, model="nano"):
    return memory.predict(RUNGS[script], batch_size, model, seq_len, ranks, cuda=cuda)


def measure(script, batch_size=2, seq_len=64, ranks=1, device="cpu", model="nano"):
    return memory.measure(RUNGS[script], batch_size, model, seq_len, device, ranks)


def test_the_prediction_matches_the_measured_peak():
    assert sum(predict("baseline.py").values()) == pytest.approx(measure("baseline.py"), rel=0.03)


def test_the_published_predictions_are_near_the_measurements():
    rows = [*memory.fits("memory-cpu.json"), *memory.fits("memory-ranks.json")]
    found = [(row["script"], row["checkpointing"]) for row in rows if row["ranks"] == 1]
    assert found == 4 * [(TEN, False), (CHUNKED, False), (CHUNKED, True), (CHECKPOINTING, False)]
    for row in rows:
        assert row["peak"] == pytest.approx(row["measured"], rel=0.03 if row["ranks"] == 1 else 0.1), row["name"]


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["baseline.py", TEN, CHUNKED, CHECKPOINTING])
def test_the_prediction_matches_the_peak_on_a_gpu(script, measured):
    predicted = sum(predict(script, 16, 1024, cuda=True).values())
    peak = measure(script, 16, 1024, device="cuda")
    measured(f"predicted {predicted / memory.GIB:.2f} GiB, measured {peak / memory.GIB:.2f} GiB")
    assert predicted == pytest.approx(peak, rel=0.15)


def test_the_parts_are_the_tensors_of_a_step():
    """The baseline's peak is at the head in the backward pass, with three float32 tensors of the size of the logits."""
    parts = predict("baseline.py", 4, 256)
    module = load("baseline.py")
    with torch.device("meta"):
        weights = list(module.GPT(module.GPTConfig(n_layer=4, n_head=4, n_embd=128)).parameters())
    number, mask = sum(p.numel() for p in weights), 4 * 1024 * 1024
    assert parts["weights"] == 4 * number
    assert parts["moments"] == 2 * 4 * number + 4 * len(weights)  # each parameter has a step counter
    assert parts["logits"] == 3 * 4 * 4 * 256 * 50257  # log-probabilities, their gradient, and the logits' gradient
    assert parts["activations"] > mask  # the bool masks of four blocks, which are buffers, not weights


@pytest.mark.slow
def test_all_logits_never_exist_in_the_compiled_chunked_loss():
    before = torch._inductor.config.score_fusion_memory_threshold
    assert 0 < predict(CHUNKED, 4, 256)["logits"] <= 2 * (4 * 256 // 4) * 50304
    assert torch._inductor.config.score_fusion_memory_threshold == before  # the script's setting ends with the script


def test_checkpointed_blocks_keep_only_their_inputs():
    """With many small blocks, checkpointing reduces the peak of both passes to less than half."""
    peaks = []
    for script in (TEN, CHECKPOINTING):
        module = load(script)
        model = module.GPT(module.GPTConfig(vocab_size=16, n_layer=12, n_head=2, n_embd=32))
        x, y = torch.zeros(2, 4, 128, dtype=torch.int64)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        peaks.append(attention.peak_bytes(lambda: model(x, y).backward(), torch.device("cpu")))  # noqa: B023
    assert peaks[1] < peaks[0] / 2


def test_ddp_copies_the_gradients():
    model, buckets = torch.nn.Linear(3, 4), []
    stand_in = memory.Buckets(model, buckets)
    assert [bucket.shape for bucket in buckets] == [p.shape for p in model.parameters()]
    assert list(stand_in.parameters()) == list(model.parameters())  # the buckets are not parameters


@pytest.mark.slow
def test_the_prediction_matches_the_peak_of_two_processes():
    """FSDP2 shards the weights and the moments. Its prediction is a few per cent too low on a CPU."""
    parts = predict(FSDP, seq_len=1024, ranks=2)
    assert sum(parts.values()) == pytest.approx(measure(FSDP, seq_len=1024, ranks=2), rel=0.1)
    assert parts["moments"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_a_tensor_made_of_tensors_counts_once():
    """FSDP2's weights and moments are DTensors. A DTensor has the size of the unsharded tensor, but no memory."""
    with memory.Live() as live:
        pair = TwoTensor(torch.zeros(10), torch.zeros(10)) + 1
    assert live.peak == 4 * (10 + 10 + 10 + 10) and live.now == 4 * (10 + 10)
    live.resize(pair.a.untyped_storage()._cdata, 0)  # how FSDP2 frees the unsharded weights of a block
    assert live.now == 4 * 10


def test_the_largest_batch_is_the_largest_that_fits():
    for gib, expected in (0.9, 0), (1.26, 4), (40, 314):  # the peak is constant up to B 2
        assert memory.largest(lambda B: {"weights": max(1.0, 0.75 + 0.125 * B) * memory.GIB}, gib) == expected


def test_the_table_and_the_file_agree(tmp_path):
    words = "--model", "nano", "--seq-len", 64, "--only", "baseline", "--checkpointing", "--gib", 0.5
    printed = play("measure/memory.py", *words, "--out", tmp_path / "memory.json")
    data = json.loads((tmp_path / "memory.json").read_text())
    assert [row["name"] for row in data["rows"]] == ["Baseline", "Baseline + checkpointing"]
    lines = [line.split() for line in printed.splitlines()]
    for row in data["rows"]:
        sizes = [*row["parts"].values(), sum(row["parts"].values())]
        shown = [*row["name"].split(), *(f"{size / memory.GIB:.2f}" for size in sizes), str(row["largest"])]
        assert shown in lines and row["largest"] > 2
    assert sum(data["rows"][1]["parts"].values()) < sum(data["rows"][0]["parts"].values())
