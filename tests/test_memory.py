"""The predicted peak memory of a step matches the measured peak, and each memory rung frees what it claims to free."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import LONG, ROOT, RUNGS, SCRIPTS, SIDE, load, play

from measure import attention, memory
from measure.records import TEN


def predict(script, batch_size=2, seq_len=64, ranks=1, cuda=False):
    return memory.predict(RUNGS[script], batch_size, "nano", seq_len, ranks, cuda=cuda)


def test_a_prediction_matches_the_measured_peak_and_the_tensors_of_a_step(tmp_path):
    words = "--model", "nano", "--seq-len", 64, "--batch-size", 2, "--only", "baseline", "--measure"
    play("measure/memory.py", *words, "--out", tmp_path / "memory.json")
    (row,) = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert sum(row["parts"].values()) == pytest.approx(row["measured"], rel=0.03)
    # At T 256, the peak is at the head in the backward pass, with three float32 tensors of the size of the logits.
    parts, module = predict("baseline.py", 4, 256), load("baseline.py")
    with torch.device("meta"):
        weights = list(module.GPT(module.GPTConfig(n_layer=4, n_head=4, n_embd=128)).parameters())
    number, masks = sum(p.numel() for p in weights), 4 * 1024 * 1024  # the bool masks of four blocks
    assert parts["weights"] == 4 * number
    assert parts["moments"] == 2 * 4 * number + 4 * len(weights)  # each parameter has a step counter
    assert parts["logits"] == 3 * 4 * 4 * 256 * 50257  # log-probabilities, their gradient, and the logits' gradient
    assert predict("baseline.py", 1, 8)["activations"] >= masks  # buffers, not weights
    assert predict("ddp_run.py", 4, 256, ranks=2)["gradients"] >= 2 * 4 * 7_363_328  # of the first micro-step, twice


def test_the_printed_and_written_figures_are_the_predicted_and_measured_bytes_in_gib(monkeypatch, tmp_path):
    def predict(rung, batch_size, model, seq_len, ranks, checkpointing, cuda):
        asked.add((model, seq_len, cuda))
        quarters = 1, 2 * ranks, 3, 4 + 4 * checkpointing, 8 * batch_size  # of a GiB
        return {part: quarter * 2**28 for part, quarter in zip(memory.PARTS, quarters, strict=True)}

    def measure(rung, batch_size, device, model, seq_len, ranks, checkpointing):
        asked.add((model, seq_len, device))
        return (4 + 2 * batch_size - ranks) * 2**30 - checkpointing * 2**31

    asked, out = set(), tmp_path / "memory.json"
    monkeypatch.setattr(memory, "predict", predict)
    monkeypatch.setattr(memory, "measure", measure)
    monkeypatch.setattr(memory, "ask", lambda *words: {"name": " ".join(words)})
    words = "--model", "gpt2-xl", "gpt2-large", "--seq-len", 99, "--batch-size", 2, 1, "--checkpointing", "--ranks", 3
    printed = play("measure/memory.py", *words, "--only", "01", "ddp", "--gib", 20.5, "--measure", "--out", out)
    assert asked == {(model, 99, how) for model in ("gpt2-xl", "gpt2-large") for how in (False, "cpu")}
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0].startswith("gpt2-xl, B 2, T 99: GiB ") and lines[0].endswith("3 ranks, to fit in 20.5 GiB")
    assert lines[2:7] == [
        "script weights gradients moments logits activations peak, GiB measured error largest B",
        "01 Weight tying 0.25 0.50 0.75 1.00 4.00 6.50 7.00 -7.1% 9",
        "01 Weight tying + checkpointing 0.25 0.50 0.75 2.00 4.00 7.50 5.00 +50.0% 8",
        "DDP on several GPUs 0.25 1.50 0.75 1.00 4.00 7.50 5.00 +50.0% 8",
        "DDP on several GPUs + checkpointing 0.25 1.50 0.75 2.00 4.00 8.50 3.00 +183.3% 8",
    ]
    found = json.loads(out.read_text())
    assert (found["machine"], found["device"]) == ("device --device cpu", "cpu") and len(found["rows"]) == 16
    row = found["rows"][5]  # of rung 01 with checkpointing at B 1
    assert [*row["parts"].values(), row["measured"]] == [size * 2**28 for size in (1, 2, 3, 8, 8, 12)]
    asked.clear()
    printed = play("measure/memory.py", "--only", "01", device="cuda")
    assert asked == {("gpt2", 1024, True)} and printed.split()[-2:] == ["8.00", "10.50"]  # activations with B 4, peak
    play("measure/memory.py", "--out", out)
    assert {row["script"] for row in json.loads(out.read_text())["rows"]} == {*SCRIPTS} - {LONG, SIDE.muon}
    for gib, expected in (0.9, 0), (1.26, 4), (40, 314):  # the peak is constant up to B 2
        assert memory.largest(lambda B: {"weights": max(1.0, 0.75 + 0.125 * B) * 2**30}, gib) == expected


@pytest.mark.slow
def test_only_a_quarter_of_the_logits_exist_in_the_compiled_fused_loss_and_fsdp_shards_the_moments(tmp_path):
    source, logits = (ROOT / SIDE.fused).read_text(encoding="utf-8"), 2 * 4 * 256 * 50304
    for chunks in 1, 4:
        path = tmp_path / f"{chunks}.py"
        path.write_text(source.replace("loss_chunks: int = 1 ", f"loss_chunks: int = {chunks} "), encoding="utf-8")
        parts = memory.predict(replace(RUNGS[SIDE.fused], file=str(path)), 4, "nano", 256, cuda=False)
        assert 0 < parts["logits"] <= logits / chunks
    fsdp = "branches/fsdp_run.py"
    parts = predict(fsdp, seq_len=1024, ranks=2)  # on a CPU, a few per cent too low
    assert sum(parts.values()) == pytest.approx(memory.measure(RUNGS[fsdp], 2, "nano", 1024, "cpu", 2), rel=0.1)
    assert parts["moments"] == pytest.approx(2 * parts["weights"], rel=0.01)
    assert parts["weights"] == pytest.approx(4 * 7_363_328 / 2, rel=0.01)


def test_checkpointed_blocks_keep_only_their_inputs():
    """With many small blocks, checkpointing reduces the peak of both passes to less than half."""
    peaks = []
    for script in (TEN, "branches/activation_checkpointing.py"):
        module = load(script)
        model = module.GPT(module.GPTConfig(vocab_size=16, n_layer=12, n_head=2, n_embd=32))
        x, y = torch.zeros(2, 4, 128, dtype=torch.int64)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        peaks.append(attention.peak_bytes(lambda: model(x, y).backward(), torch.device("cpu")))  # noqa: B023
    assert peaks[1] < peaks[0] / 2
