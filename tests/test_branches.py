"""The side rungs compute what they claim. In fp16, a step is skipped if a gradient overflows.

test_numerics.py compares the updates of Muon, and the precision of fp16, with references.
"""

import functools
import math
import subprocess
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, SIDE, STEP, load, nano, play

from dev.ladder import split
from measure.records import TEN


def test_a_step_with_an_overflowing_gradient_is_skipped_and_marked(monkeypatch):
    """The other steps change the weights. In a public notebook without scaler.step(), the loss stays at 10.93.

    In this test, the scale doubles after two steps without an overflow. By default, GradScaler waits 2,000 steps.
    """
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, growth_interval=2))
    forward, weights = load(SIDE.fp16).GPT.forward, []

    def forward_and_blow_up(model, *inputs):
        weights.append([p.detach().clone() for p in model.parameters()])
        # With this factor, the gradient overflows fp16 when multiplied by the scale of 65536. The loss stays finite.
        return forward(model, *inputs) * (1e5 if len(weights) == 2 else 1)

    monkeypatch.setattr(load(SIDE.fp16).GPT, "forward", forward_and_blow_up)
    printed = play(SIDE.fp16, "--steps", 6, "--batch-size", 1, "--seq-len", 16)
    lines = [match.groupdict() for match in STEP.finditer(printed)]
    assert [line["scale"] for line in lines] == ["65536", "32768", "32768", "65536", "65536", "131072"]
    assert [bool(line["skipped"]) for line in lines] == [False, True, False, False, False, False]
    assert [math.isfinite(float(line["norm"])) for line in lines] == [True, False, True, True, True, True]
    moved = [any(map(lambda a, b: not torch.equal(a, b), *pair)) for pair in zip(weights, weights[1:], strict=False)]
    assert moved == [True, False, True, True, True]


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_fused_loss_and_its_gradients_are_those_of_rung_10_for_any_chunks_and_scale(chunks):
    """Of 21 tokens, the last of four chunks has only 3. ddp_run.py divides the loss by the number of micro-steps."""
    idx, targets = torch.randint(50257, (2, 3, 7))
    found = []
    for script in TEN, SIDE.fused:
        model = nano(script)
        model.config = replace(model.config, loss_chunks=chunks) if script == SIDE.fused else model.config
        loss = model(idx, targets)
        (loss / 3).backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    for ten, fused in zip(*found, strict=True):
        assert (fused - ten).norm() <= 1e-5 * ten.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(idx, targets).grad_fn.saved_tensors[1].dtype == torch.float32  # the sum over the chunks


def test_the_record_is_the_three_side_rungs_in_one_file(tmp_path):
    ten, *others, record = (
        split((ROOT / name).read_text())[1] for name in (TEN, SIDE.stream, SIDE.fused, SIDE.queued, SIDE.record)
    )
    merged, base, other = (tmp_path / name for name in ("merged", "base", "other"))
    merged.write_text(ten), base.write_text(ten)
    for script in others:
        other.write_text(script)
        subprocess.run(["git", "merge-file", merged, base, other], check=True)
    assert merged.read_text() == record
