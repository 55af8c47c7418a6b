"""The predicted peak memory of a step matches the measured peak, and each memory rung frees what it claims to free."""

import json

import attention
import publish
import pytest
import torch
from conftest import CHECKPOINTING, CHUNKED, RUNGS, load, play
from torch.testing._internal.two_tensor import TwoTensor

B, T = 2, 64


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global memory
    import memory


def flags(script, batch_size=B, seq_len=T, ranks=1):
    return memory.options(RUNGS[script], "nano", batch_size, seq_len, ranks)


def test_the_prediction_matches_the_measured_peak():
    measured = memory.measure(RUNGS["baseline.py"], flags("baseline.py"), "cpu")
    parts = memory.predict(RUNGS["baseline.py"], flags("baseline.py"), cuda=False)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.03)


def test_the_published_predictions_are_near_the_measurements():
    rows = [*publish.fits("memory-cpu.json"), *publish.fits("memory-ranks.json")]
    for model, batch_size in ("nano", 4), ("gpt2", 1):
        found = [
            (row["script"], row["checkpointing"])
            for row in rows
            if (row["model"], row["batch_size"]) == (model, batch_size)
        ]
        assert found == [(memory.TEN, False), (CHUNKED, False), (CHUNKED, True), (CHECKPOINTING, False)]
    for row in rows:
        assert row["peak"] == pytest.approx(row["measured"], rel=0.03 if row["ranks"] == 1 else 0.1), row["name"]


@pytest.mark.slow
def test_the_published_predictions_are_those_of_the_current_script():
    parts = memory.predict(RUNGS[CHUNKED], flags(CHUNKED, batch_size=1, seq_len=1024), cuda=False)
    (row,) = (
        row
        for row in publish.fits("memory-cpu.json")
        if (row["name"], row["model"], row["batch_size"]) == ("Chunked loss", "nano", 1)
    )
    assert row["parts"] == pytest.approx(parts, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["baseline.py", "speedup_10_fused_adamw.py", CHUNKED, CHECKPOINTING])
def test_the_prediction_matches_the_peak_on_a_gpu(script, measured):
    sizes = flags(script, batch_size=16, seq_len=1024)
    predicted, peak = sum(memory.predict(RUNGS[script], sizes).values()), memory.measure(RUNGS[script], sizes, "cuda")
    measured(f"predicted {predicted / memory.GIB:.2f} GiB, measured {peak / memory.GIB:.2f} GiB")
    assert predicted == pytest.approx(peak, rel=0.15)


def test_the_parts_are_the_tensors_of_a_step():
    """The baseline's peak is at the head in the backward pass, with three float32 tensors of the size of the logits."""
    parts = memory.predict(RUNGS["baseline.py"], flags("baseline.py", batch_size=4, seq_len=256), cuda=False)
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
    parts = memory.predict(RUNGS[CHUNKED], flags(CHUNKED, batch_size=4, seq_len=256), cuda=False)
    assert 0 < parts["logits"] <= 2 * (4 * 256 // 4) * 50304
    assert torch._inductor.config.score_fusion_memory_threshold == before  # the script's setting ends with the script


def test_checkpointed_blocks_keep_only_their_inputs():
    """With many small blocks, checkpointing reduces the peak of both passes to less than half."""
    peaks = []
    for script in ("speedup_10_fused_adamw.py", CHECKPOINTING):
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
    sizes = flags("branches/fsdp_run.py", seq_len=1024, ranks=2)
    parts = memory.predict(RUNGS["branches/fsdp_run.py"], sizes, ranks=2, cuda=False)
    measured = memory.measure(RUNGS["branches/fsdp_run.py"], sizes, "cpu", ranks=2)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.1)
    assert parts["moments"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_a_tensor_made_of_tensors_counts_once():
    """FSDP2's weights and moments are DTensors. A DTensor has the size of the unsharded tensor, but no memory."""
    with memory.Live() as live:
        pair = TwoTensor(torch.zeros(10), torch.zeros(10)) + 1
    assert live.peak == 4 * (10 + 10 + 10 + 10) and live.now == 4 * (10 + 10)
    del pair


def test_a_storage_that_is_resized_changes_the_sum():
    """FSDP2 frees and allocates the unsharded weights of a block by resizing their storage."""
    with memory.Live() as live:
        tensor = torch.zeros(1000)
    live.resize(tensor.untyped_storage()._cdata, 0)
    assert (live.now, live.peak) == (0, 4000)


def test_the_table_and_the_file_agree(tmp_path):
    words = "--model", "nano", "--seq-len", T, "--only", "baseline", "--checkpointing", "--gib", 1
    printed = play("measure/memory.py", *words, "--out", tmp_path / "memory.json")
    data = json.loads((tmp_path / "memory.json").read_text())
    assert [row["name"] for row in data["rows"]] == ["Baseline", "Baseline + checkpointing"]
    for row in data["rows"]:
        (line,) = (line for line in printed.splitlines() if line.split("  ")[0] == row["name"])
        cells = [*row["parts"].values(), sum(row["parts"].values())]
        assert line.split()[-len(cells) - 1 :] == [*(f"{size / memory.GIB:.2f}" for size in cells), "fits"]
    assert sum(data["rows"][1]["parts"].values()) < sum(data["rows"][0]["parts"].values())
