"""The side rungs compute what they claim. The fp16 scripts skip a step if a gradient overflows.

test_numerics.py compares the updates of Muon, and the precision of fp16, with references.
"""

import functools
import math

import pytest
import torch
from conftest import CHUNKED, FP8, FP16S, SCRIPTS, STEP, load, nano, play


@pytest.mark.parametrize("script", FP16S)
def test_a_step_with_an_overflowing_gradient_is_skipped_and_marked(script, monkeypatch):
    """The other steps change the weights. In a public notebook without scaler.step(), the loss stays at 10.93.

    In this test, the scale doubles after two steps without an overflow. By default, GradScaler waits 2,000 steps.
    """
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, growth_interval=2))
    forward, weights = load(script).GPT.forward, []

    def forward_and_blow_up(model, *inputs):
        weights.append([p.detach().clone() for p in model.parameters()])
        # With this factor, the gradient overflows fp16 when multiplied by the scale of 65536. The loss stays finite.
        return forward(model, *inputs) * (1e5 if len(weights) == 2 else 1)

    monkeypatch.setattr(load(script).GPT, "forward", forward_and_blow_up)
    printed = play(script, "--steps", 6, "--batch-size", 1, "--seq-len", 16)
    lines = [match.groupdict() for match in STEP.finditer(printed)]
    assert [line["scale"] for line in lines] == ["65536", "32768", "32768", "65536", "65536", "131072"]
    assert [bool(line["skipped"]) for line in lines] == [False, True, False, False, False, False]
    assert [math.isfinite(float(line["norm"])) for line in lines] == [True, False, True, True, True, True]
    moved = [any(map(lambda a, b: not torch.equal(a, b), *pair)) for pair in zip(weights, weights[1:], strict=False)]
    assert moved == [True, False, True, True, True]


def test_the_gradients_of_the_float8_head_are_off_by_its_rounding():
    torch.manual_seed(0)
    x, w, grad = torch.randn(64, 32), torch.randn(48, 32) / 50, torch.randn(64, 48).softmax(dim=-1) / 64
    logits = load(FP8).Float8Linear.apply(x.requires_grad_(), w.requires_grad_())
    assert 0.01 < (logits.detach() - x @ w.T).norm() / (x @ w.T).norm() < 0.08
    for ours, theirs in zip(torch.autograd.grad(logits, (x, w), grad.bfloat16()), (grad @ w, grad.T @ x), strict=True):
        assert 0.01 < (ours - theirs).norm() / theirs.norm() < 0.08


def test_a_smaller_last_chunk_counts_by_its_tokens():
    idx, targets = torch.randint(50257, (2, 3, 7))  # of these 21 tokens, the last of the four chunks has only 3
    losses = [nano(script)(idx, targets).item() for script in (SCRIPTS[10], CHUNKED)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
