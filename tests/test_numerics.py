"""With the same weights and batch, each rung computes the same logits, loss and gradients as the previous rung.

The results match within 1e-5 in float32, unless a rung intentionally changes them by a known amount. Results in bf16
and fp16, and in TF32 on a GPU, are compared with a float64 reference. AdamW's updates are compared with the
published equations, and ten compiled steps are compared with ten eager steps.
"""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    CHECKPOINTING,
    CHUNKED,
    FP16,
    FP16_10,
    MUON,
    REGIONAL,
    ROOT,
    RUNGS,
    SCRIPTS,
    TRAIN,
    clips,
    load,
    nano,
    save_gpt2,
    since,
    versions,
    watch,
)
from torch import nn

from measure import device

pytestmark = pytest.mark.usefixtures("no_evaluation")
CAPABILITIES = dict(torch.cpu.get_capabilities())
BF16, TF32, FP16_SPACING = 2**-7, 2**-10, 2**-10  # the distance from 1 to the next number
FLOAT32 = 2**-20  # eight times the spacing of float32, because float32 matmuls also round their sums


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))[0]


@pytest.fixture(scope="module")
def steps(checkpoint, inductor_cache):
    """Return a function that trains a script from the checkpoint. It caches four runs, each of up to about 300 MB."""

    @functools.lru_cache(maxsize=4)
    def steps(script, number=3, **options):
        args = ["--init-from", checkpoint, "--steps", number, "--data", ROOT / "README.md"]
        args += ["--batch-size", 1, "--seq-len", 64]
        if script in since("ddp_run.py", among=list(RUNGS)):
            args += ["--total-batch-size", 64]
        if script == TRAIN:
            args += ["--warmup-steps", 10]
        return watch(script, *args, TORCHINDUCTOR_CACHE_DIR=inductor_cache, **options)

    return steps


@pytest.fixture(scope="module")
def exact(checkpoint):
    """Return the logits, loss and gradients of the first batch in float64."""
    module = load(SCRIPTS[1])
    model = module.GPT.from_pretrained(checkpoint).double()
    x, y = module.DataLoaderLite(ROOT / "README.md", 1, 64).next_batch()
    loss = model(x, y)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return SimpleNamespace(logits=model(x).detach(), loss=loss.item(), gradients=gradients)


@pytest.fixture(autouse=True)
def bf16(monkeypatch):
    """Make the rungs compute in bf16 on any CPU, even if that is slow."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**CAPABILITIES, "avx512_bf16": True})


def first_logits(step):
    """Return the logits of a step's first batch, (tokens, vocabulary).

    branches/chunked_loss.py computes them in chunks, and computes each chunk a second time in the backward pass.
    """
    return torch.cat([part.flatten(0, -2) for part in step.logits])[:64]


def error(ours, theirs):
    """Return the relative error of a tensor in the Euclidean norm."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


COMPILING = pytest.param(SCRIPTS[5], marks=pytest.mark.slow)


@pytest.mark.parametrize("script", [COMPILING if script == SCRIPTS[5] else script for script in since(1)])
def test_the_first_step_matches_the_previous_rung_in_float32(script, steps):
    """Logits, loss and gradients match within 1e-5, except for the known effects of three ideas."""
    compiled = script == SCRIPTS[5]
    before = steps(RUNGS[script].before, autocast=False)[0]
    after = steps(script, number=10 if compiled else 3, autocast=False, compiled=compiled)[0]
    loss, gradients, bound = 1e-5, dict(before.grads), 1e-5
    if script == SCRIPTS[1]:  # the gradient of the tied matrix is the sum of the two gradients
        gradients["transformer.wte.weight"] = gradients["transformer.wte.weight"] + gradients.pop("lm_head.weight")
    if script == SCRIPTS[7]:  # 47 padding rows, each the mean of the real rows, get at most 47/50304 of the probability
        loss, bound = math.log(50304 / 50257), 47 / 50257
    if script in (SCRIPTS[8], FP16):  # the global norm is clipped to 1
        norm = math.sqrt(sum(np.square(grad.double().numpy()).sum() for grad in gradients.values()))
        assert norm > 1.5
        gradients, bound = {name: grad / norm for name, grad in gradients.items()}, 1e-4  # the norm is in float32
    if script in clips():  # clipping hides a wrong scale of the gradient; the norm before clipping reveals it
        norm = float(before.printed["norm"]) if before.printed["norm"] else norm
        assert float(after.printed["norm"]) == pytest.approx(norm, rel=1e-4)
    if not compiled:
        assert error(first_logits(after)[:, :50257], first_logits(before)[:, :50257]) <= 1e-5
    assert after.losses[0] == pytest.approx(before.losses[0], abs=loss)
    assert after.grads.keys() == gradients.keys()
    for name, grad in gradients.items():
        assert error(after.grads[name][: len(grad)], grad) <= bound, name


def is_as_precise(step, exact, dtype, spacing):
    """Assert that a step's results are off by about the rounding error of `dtype`, whose spacing at 1 is `spacing`.

    Rounding changes a number near 1 by up to half the spacing. The errors of several layers accumulate.
    """
    assert step.logits[0].dtype == dtype
    off = error(step.logits[0].cpu(), exact.logits)
    assert off <= 2 * spacing and (off >= spacing / 4 or spacing == FLOAT32)
    assert step.losses[0] == pytest.approx(exact.loss, rel=max(spacing / 8, 1e-6))  # the loss is float32
    for name, grad in exact.gradients.items():
        scale = float(step.printed["norm"] or 1)  # clipping divided the gradients by this
        assert error(step.grads[name].cpu() * scale, grad) <= 4 * spacing, name
        assert step.grads[name].dtype == step.after[name].dtype == torch.float32


@pytest.mark.parametrize("script", since(1, 7))
def test_the_error_matches_the_precision(script, steps, exact):
    precision = (torch.bfloat16, BF16) if script in since(3) else (torch.float32, FLOAT32)
    precision = (torch.float16, FP16_SPACING) if script == FP16 else precision
    is_as_precise(steps(script, number=1)[0], exact, *precision)


@pytest.mark.parametrize("script", since(7))
def test_later_rungs_compute_in_their_precision_too(script, steps):
    (step,) = steps(script, number=1)
    dtype = torch.float16 if script == FP16_10 else torch.bfloat16
    assert {logits.dtype for logits in step.logits} == {dtype}
    assert {grad.dtype for grad in step.grads.values()} == {torch.float32}


@pytest.mark.parametrize("has", [{"avx512_f": True}, {"avx512_f": True, "avx512_bf16": False}, {"bf16": True}])
def test_a_cpu_without_bf16_instructions_of_x86_computes_in_float32(has, monkeypatch):
    """Many CPUs with AVX-512 emulate bf16, which makes rung 03 slower than rung 02. ARM's bf16 is not measured."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    (step,) = watch(SCRIPTS[3], "--steps", 1, "--batch-size", 1, "--seq-len", 8, "--data", ROOT / "README.md")
    assert step.logits[0].dtype == torch.float32
    assert device.precisions(torch.device("cpu")) == ["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("script", since(1, 7))
def test_the_error_matches_the_precision_on_a_gpu(script, steps, exact, measured):
    if script == FP16:
        precision = torch.float16, FP16_SPACING
    elif torch.cuda.get_device_capability() < (8, 0):
        precision = torch.float32, FLOAT32
    elif script in since(3):
        precision = torch.bfloat16, BF16
    else:
        precision = torch.float32, TF32 if script in since(2) else FLOAT32
    (step,) = steps(script, number=1, device="cuda")
    is_as_precise(step, exact, *precision)
    measured(f"{precision[0]}, logits off by {error(step.logits[0].cpu(), exact.logits):.1e}, relatively")


def test_residual_init_divides_the_projections_and_nothing_else():
    before, after = (dict(nano(SCRIPTS[number]).named_parameters()) for number in (3, 4))
    for name, p in before.items():
        expected = p / math.sqrt(2 * 2) if name.endswith("c_proj.weight") else p
        assert torch.equal(after[name], expected), name


def adamw(steps, settings):
    """Yield the weights after each step, computed in float64 by algorithm 2 of Loshchilov & Hutter 2019.

    `settings` maps a step number (from 1) and a parameter's number of dimensions to (lr, betas, weight decay).
    """
    m, v = ({name: np.zeros(p.shape) for name, p in steps[0].before.items()} for _ in range(2))
    for t, step in enumerate(steps, start=1):
        expected = {}
        for name, g in step.grads.items():
            p, g = step.before[name].double().numpy(), g.double().numpy()
            lr, (beta1, beta2), decay = settings(t, g.ndim)
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            update = m[name] / (1 - beta1**t) / (np.sqrt(v[name] / (1 - beta2**t)) + 1e-8)
            expected[name] = p - lr * (update + decay * p)
        yield expected


@pytest.mark.parametrize("script", versions("main", "GPT.configure_optimizers", among=list(RUNGS)))
def test_the_weights_move_as_the_equations_of_adamw_say(script, steps):
    def builds_on(rung):
        return script in since(rung, among=list(RUNGS))

    def settings(t, dimensions):
        lr = (3.6e-3 if script == MUON else 6e-4) * t / 10 if builds_on(9) else 3e-4  # the first warm-up steps
        betas = (0.9, 0.95) if builds_on(8) else (0.9, 0.999)
        decay = (0.1 if dimensions == 2 else 0.0) if builds_on(8) else 0.01
        return lr, betas, decay

    run = steps(script, autocast=False)
    assert {bool(group["fused"]) for step in run for group in step.groups} == {builds_on(10)}
    for step, expected in zip(run, adamw(run, settings), strict=True):
        for name, p in step.after.items():
            if script == MUON and ".h." in name and p.dim() == 2:
                continue  # the next test checks these
            np.testing.assert_allclose(p.numpy(), expected[name], rtol=2**-22, atol=1e-9, err_msg=name)


def test_the_matrices_of_the_blocks_move_as_the_equations_of_muon_say(steps):
    """Compare with float64 and an SVD. The scale 0.2 * sqrt(longer side) is equation 4 of Liu et al. 2025."""
    run, mean = steps(MUON, autocast=False), {}
    for t, step in enumerate(run, start=1):
        matrices = [name for name, p in step.before.items() if ".h." in name and p.dim() == 2]
        assert len(matrices) == 2 * 4
        for name in matrices:
            p, g = step.before[name].double().numpy(), step.grads[name].double().numpy()
            mean[name] = 0.95 * mean.get(name, 0) + 0.05 * g
            u, s, vh = np.linalg.svd(0.95 * mean[name] + 0.05 * g, full_matrices=False)
            s /= np.sqrt((s**2).sum())
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            lr = 3.6e-3 * t / 10
            expected = p - lr * (0.2 * max(p.shape) ** 0.5 * (u * s) @ vh + 0.1 * p)
            moved = np.linalg.norm(expected - p)
            assert np.linalg.norm(step.after[name].double().numpy() - expected) <= 1e-3 * moved, name


def test_fused_adamw_moves_the_weights_as_the_plain_one_does(steps):
    """Given the same gradients, fused and plain AdamW produce the same weights within 1e-6 for three steps."""
    run = steps(SCRIPTS[10], autocast=False)
    weights = {name: nn.Parameter(p.clone()) for name, p in run[0].before.items()}
    groups = [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in weights.values()]
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False)
    for step in run:
        for name, p in weights.items():
            p.grad = step.grads[name]
        for group in plain.param_groups:
            group["lr"] = step.groups[0]["lr"]
        plain.step()
        for name, p in weights.items():
            assert error(step.after[name], p.detach()) <= 1e-6, name


@pytest.mark.slow
def test_ten_compiled_steps_match_eager(steps):
    def seen(name, p):
        """Return a parameter without the key bias, which may differ between the runs.

        The key bias does not change the softmax, so its exact gradient is zero. The computed gradient contains only
        rounding errors, which AdamW normalizes to full-size updates.
        """
        return torch.cat([p[:32], p[64:]]) if name.endswith("c_attn.bias") else p

    eager = steps(SCRIPTS[4], number=10, autocast=False)
    compiled = steps(SCRIPTS[5], number=10, autocast=False, compiled=True)
    for one, other in zip(eager, compiled, strict=True):
        assert other.losses == pytest.approx(one.losses, abs=1e-5)
        for name in one.after:
            assert error(other.grads[name], one.grads[name]) <= 1e-5, name
            assert error(seen(name, other.after[name]), seen(name, one.after[name])) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("script", [CHUNKED, CHECKPOINTING, REGIONAL])
def test_a_compiled_side_rung_matches_eager_rung_10(script, steps):
    eager, compiled = steps(SCRIPTS[10], autocast=False), steps(script, autocast=False, compiled=True)
    assert [step.losses for step in compiled] == [pytest.approx(step.losses, abs=1e-5) for step in eager]
    assert compiled[0].grads.keys() == eager[0].grads.keys()
    for name, grad in eager[0].grads.items():
        assert error(compiled[0].grads[name], grad) <= 1e-5, name


@pytest.mark.parametrize("length", [1, 7, 8])
def test_chunks_of_any_size_give_the_same_loss_and_gradients(length):
    """B * T is 3, 21 and 24 here. With 21, the last of the four chunks is smaller."""
    idx, targets = torch.randint(50257, (2, 3, length), generator=torch.Generator().manual_seed(0))
    losses, grads = [], []
    for script in (SCRIPTS[10], CHUNKED):
        model = nano(script)
        losses.append(model(idx, targets))
        losses[-1].backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-5)
    for name, grad in grads[0].items():
        assert error(grads[1][name], grad) <= 1e-5, name
