"""The training loop of the scripts, watched from inside: what the optimizer is given, and when."""

import math
import signal

import pytest
import torch
from conftest import SCRIPTS, STEP, load, since


@pytest.fixture
def watch(monkeypatch, capsys):
    """Run a script's main() here, uncompiled, and return its printed steps and what each AdamW step saw."""

    def watch(script, steps, batch=4, length=32, total=None):
        seen = []
        step = torch.optim.AdamW.step

        def record(optimizer, *a, **kw):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])).item()
            seen.append({"groups": groups, "norm": norm})
            return step(optimizer, *a, **kw)

        monkeypatch.setattr(torch.optim.AdamW, "step", record)
        monkeypatch.setattr(torch.nn.Module, "compile", lambda *a, **kw: None)
        args = ["--steps", steps, "--batch-size", batch, "--seq-len", length, "--device", "cpu"]
        if script == "ddp_run.py":
            args += ["--total-batch-size", total or batch * length]
        monkeypatch.setattr("sys.argv", [script, *map(str, args)])
        load(script).main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return [match.groupdict() for match in STEP.finditer(capsys.readouterr().out)], seen

    return watch


@pytest.mark.parametrize("script", since(8))
def test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step(watch, script):
    printed, seen = watch(script, steps=3)
    for line, step in zip(printed, seen, strict=True):
        assert float(line["norm"]) > 1.5  # the norm before clipping, and there was something to clip
        assert step["norm"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_step_starts_without_the_gradients_of_the_last(watch, script, monkeypatch):
    forward, left_over = load(script).GPT.forward, []

    def look(model, *args):
        left_over.append(any(p.grad is not None and p.grad.any() for p in model.parameters()))
        return forward(model, *args)

    monkeypatch.setattr(load(script).GPT, "forward", look)
    watch(script, steps=3, batch=2, length=16)
    assert left_over == [False] * 3


@pytest.mark.parametrize("script", since(8))
def test_a_norm_under_1_is_left_alone(watch, script, monkeypatch):
    forward = load(script).GPT.forward

    def flatter(*args):
        logits, loss = forward(*args)
        return logits, loss / 100

    monkeypatch.setattr(load(script).GPT, "forward", flatter)
    printed, seen = watch(script, steps=1)
    assert 0 < float(printed[0]["norm"]) < 0.5
    assert seen[0]["norm"] == pytest.approx(float(printed[0]["norm"]), abs=1e-4)


@pytest.mark.parametrize("script", since(9))
def test_the_learning_rate_warms_up_and_falls_along_a_cosine(script):
    get_lr = load(script).get_lr
    assert get_lr(0, 50) == pytest.approx(6e-5)
    assert get_lr(9, 50) == pytest.approx(6e-4)
    assert get_lr(10, 50) == pytest.approx(6e-4)
    assert get_lr(30, 50) == pytest.approx((6e-4 + 6e-5) / 2)  # half way
    assert get_lr(49, 50) == pytest.approx(6e-5 + 0.5 * (1 + math.cos(math.pi * 39 / 40)) * 5.4e-4)
    assert get_lr(50, 50) == pytest.approx(6e-5)
    rates = [get_lr(step, 50) for step in range(50)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert [get_lr(step, 3) for step in range(3)] == pytest.approx([6e-5, 12e-5, 18e-5])  # a run within the warm-up


@pytest.mark.parametrize("script", since(9))
def test_the_printed_rate_is_the_one_the_step_is_taken_with(watch, script):
    printed, seen = watch(script, steps=14, batch=2, length=8)
    get_lr = load(script).get_lr
    for number, (line, step) in enumerate(zip(printed, seen, strict=True)):
        assert {group["lr"] for group in step["groups"]} == {get_lr(number, 14)}
        assert float(line["lr"]) == pytest.approx(get_lr(number, 14), rel=1e-4)


def test_the_optimizer_settings_of_each_rung(watch):
    def groups(number):
        return watch(since(number)[0], steps=1, length=8)[1][0]["groups"]

    (group,) = groups(7)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.9, 0.999), 0.01)
    (group,) = groups(8)
    assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.9, 0.95), 1e-8)
    for number in (10, 11):
        decay, rest = groups(number)
        assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
        for group in (decay, rest):
            assert (group["betas"], group["eps"], group["fused"]) == ((0.9, 0.95), 1e-8, True)


@pytest.mark.parametrize("script", since(10))
def test_only_matrices_decay(script, capsys):
    module = load(script)
    model = module.GPT(module.MODELS["gpt2"])
    decay, rest = (group["params"] for group in model.configure_optimizers().param_groups)
    assert (len(decay), sum(p.numel() for p in decay)) == (50, 124_354_560)
    assert (len(rest), sum(p.numel() for p in rest)) == (98, 121_344)
    names = {p: name for name, p in model.named_parameters()}
    assert all(names[p].endswith("weight") and "ln_" not in names[p] for p in decay)
    assert all(names[p].endswith("bias") or "ln_" in names[p] for p in rest)
    printed = capsys.readouterr().out
    assert "weight decay: 50 tensors with 124,354,560 parameters" in printed
    assert "no weight decay: 98 tensors with 121,344 parameters" in printed


@pytest.mark.parametrize("batch", [4, 2, 1])
def test_micro_steps_add_up_to_the_gradient_of_the_whole_batch(watch, batch):
    whole, _ = watch("ddp_run.py", steps=3, batch=8, total=256)
    parts, _ = watch("ddp_run.py", steps=3, batch=batch, total=256)
    assert [float(line["loss"]) for line in parts] == pytest.approx([float(line["loss"]) for line in whole], abs=1e-3)
    assert [float(line["norm"]) for line in parts] == pytest.approx([float(line["norm"]) for line in whole], rel=1e-2)
