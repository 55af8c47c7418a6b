"""With the same weights and batch, each rung computes the same logits, loss and gradients as the previous rung.

The results match within 1e-5 in float32, unless a rung intentionally changes them by a known amount. Results in bf16
and fp16, and in TF32 on a GPU, are compared with a float64 reference. Errors are relative to each row of a matrix,
because the rows of frequent tokens would hide errors in the small rows of rare ones. AdamW's updates are compared with
the published equations, and ten compiled steps are compared with ten eager steps.
"""

import functools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, RUNGS, SCRIPTS, SIDE, STEP, load, play, save_gpt2, since, versions, watch
from torch.utils._python_dispatch import TorchDispatchMode

from measure import device

pytestmark = pytest.mark.usefixtures("no_evaluation")
CAPABILITIES = dict(torch.cpu.get_capabilities())
BF16, TF32, FP16_SPACING = 2**-7, 2**-10, 2**-10  # the distance from 1 to the next number
FLOAT32 = 2**-20  # eight times the spacing of float32, because float32 matmuls also round their sums
ALL = list(RUNGS)
PLAIN_HEAD = [script for script in ALL if script not in (SIDE.fused, SIDE.record)]  # the others call lm_head to train


def words(script, steps, length):
    """Return the options of a short run with one micro-step of one sequence."""
    args = ["--steps", steps, "--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", length]
    args += ["--total-batch-size", length] if script in since("ddp_run.py", among=ALL) else []
    return args + (["--warmup-steps", 10] if "train.py" in script else [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))[0]


@pytest.fixture(scope="module")
def steps(checkpoint, inductor_cache):
    """Return a function that trains a script from the checkpoint. It caches four runs, each of up to about 300 MB."""

    @functools.lru_cache(maxsize=4)
    def steps(script, number=3, **options):
        args = "--init-from", checkpoint, *words(script, number, 64)
        return watch(script, *args, TORCHINDUCTOR_CACHE_DIR=inductor_cache, **options)

    return steps


@pytest.fixture(scope="module")
def exact(checkpoint):
    """Return a function that computes the logits, loss and gradients of the first batch in float64."""

    @functools.cache
    def exact(script):
        module = load(script)
        model = module.GPT.from_pretrained(checkpoint).double()
        x, y = module.DataLoaderLite(ROOT / "README.md", 1, 64).next_batch()
        loss = model(x, y)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return SimpleNamespace(logits=model(x).detach(), loss=loss.item(), gradients=gradients)

    return exact


@pytest.fixture(autouse=True)
def bf16(monkeypatch):
    """Make the rungs compute in bf16 on any CPU, even if that is slow."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**CAPABILITIES, "avx512_bf16": True})


def error(ours, theirs, rows=False):
    """Return the relative error of a tensor in the Euclidean norm, or the largest of its rows."""
    off, size = (t.double().norm(dim=-1 if rows else None) for t in (ours.double() - theirs, theirs))
    return (off / size.clamp(min=1e-30)).max().item()


@pytest.mark.parametrize("script", since(1))
def test_the_first_step_matches_the_previous_rung_in_float32(script, steps):
    """Logits, loss and gradients match within 1e-5, except for the known effects of three ideas."""
    before, after = (steps(one, autocast=False)[0] for one in (RUNGS[script].before, script))
    loss, gradients, bound = 1e-5, dict(before.grads), 1e-5
    if script == SCRIPTS[1]:  # the gradient of the tied matrix is the sum of the two gradients
        gradients["transformer.wte.weight"] = gradients["transformer.wte.weight"] + gradients.pop("lm_head.weight")
    if script == SCRIPTS[7]:  # 47 padding rows, each the mean of the real rows, get at most 47/50304 of the probability
        loss, bound = math.log(50304 / 50257), 47 / 50257
    if script == SCRIPTS[8]:  # the global norm is clipped to 1
        norm = math.sqrt(sum(np.square(grad.double().numpy()).sum() for grad in gradients.values()))
        assert norm > 1.5
        gradients, bound = {name: grad / norm for name, grad in gradients.items()}, 1e-4  # the norm is in float32
    if after.printed["norm"]:  # clipping hides a wrong scale of the gradient; the norm before clipping reveals it
        norm = float(before.printed["norm"]) if before.printed["norm"] else norm
        assert float(after.printed["norm"]) == pytest.approx(norm, rel=1e-4)
    if script in PLAIN_HEAD:
        assert error(after.logits[0][..., :50257], before.logits[0][..., :50257], rows=True) <= 1e-5
    assert after.losses[0] == pytest.approx(before.losses[0], abs=loss)
    assert after.grads.keys() == gradients.keys()
    for name, grad in gradients.items():
        ours = after.grads[name][: len(grad)]
        assert error(ours, grad) <= bound and error(ours, grad, rows=True) <= 10 * bound, name


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("script", [*since(1, 7), SIDE.fp16, SIDE.stream, SIDE.record])
def test_the_error_matches_the_precision(script, place, steps, exact):
    """A step's results are off by about the rounding error of its precision, also in the rows with small gradients.

    Rounding changes a number near 1 by up to half the spacing. The errors of several layers accumulate.
    """
    gpu, ampere = place == "cuda", place == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    dtype, spacing = torch.float32, TF32 if gpu and ampere and script in since(2) else FLOAT32
    if script == SIDE.fp16:
        dtype, spacing = torch.float16, FP16_SPACING
    elif script in since(3) and ampere:
        dtype, spacing = torch.bfloat16, BF16
    (step,), reference = steps(script, number=1, device=place), exact(SCRIPTS[7 if "branches" in script else 1])
    for logits in step.logits:
        assert logits.dtype == dtype
        off = error(logits.cpu(), reference.logits)
        assert off <= 2 * spacing and (off >= spacing / 4 or spacing == FLOAT32)
    assert len(step.logits) == (script != SIDE.record)
    assert step.losses[0] == pytest.approx(reference.loss, rel=max(spacing / 8, 1e-6))  # the loss is float32
    for name, expected in reference.gradients.items():
        grad = step.grads[name].cpu() * float(step.printed["norm"] or 1)  # clipping divided the gradients by the norm
        assert error(grad, expected) <= 4 * spacing and error(grad, expected, rows=True) <= 32 * spacing, name
        assert grad.dtype == step.after[name].dtype == torch.float32


class Operations(TorchDispatchMode):
    """Count the operations that compute something, by name and by the dtype of the result."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = call(*args, **kwargs or {})
        first, name = result[0] if isinstance(result, tuple) else result, call.overloadpacket.__name__
        if not call.is_view and name not in ("arange", "clone", "_unsafe_view", "bitwise_not"):
            self.seen[name, first.dtype] += 1
        return result


@pytest.mark.parametrize("script", versions("main", "GPT.forward", "CausalSelfAttention", among=PLAIN_HEAD))
def test_only_matmuls_are_rounded_and_attention_has_no_mask_where_it_is_fused(script, monkeypatch):
    """The loss stays in float32, and so do the residual stream and LayerNorm, except in one. A mask is slower."""
    forward, runs, layers, exact = load(script).GPT.forward, [], 2, torch.float32

    def record(*args):
        with Operations() as operations:
            runs.append(operations.seen)
            return forward(*args)

    monkeypatch.setattr(load(script).GPT, "forward", record)
    play(script, *words(script, 1, 8))
    half = torch.bfloat16 if script in since(3, among=ALL) else exact
    half = torch.float16 if script == SIDE.fp16 else half
    stream = half if script == SIDE.stream else exact
    expected = Counter({("embedding", exact): 2, ("add", exact): 1, ("native_layer_norm", stream): 5, ("mm", half): 1})
    expected += Counter({("add", stream): 2 * layers, ("addmm", half): 4 * layers, ("gelu", half): layers})
    expected += Counter({("_log_softmax", exact): 1, ("nll_loss_forward", exact): 1})
    if half != exact:  # of each block, four weights, four biases and the results of both LayerNorms; of the head, two
        casts = 8 * layers + 2 if script == SIDE.stream else 10 * layers + 2
        expected += Counter({("_to_copy", half): casts, ("_to_copy", exact): 1})  # the logits, for the loss
    if script in since(6, among=ALL):
        expected["_scaled_dot_product_flash_attention_for_cpu", half] = layers
    else:
        expected += Counter([(name, half) for name in ("bmm", "bmm", "div", "masked_fill", "_softmax")] * layers)
    assert runs == [expected]


def test_a_cpu_without_bf16_instructions_of_x86_computes_in_float32(monkeypatch):
    """Many CPUs with AVX-512 emulate bf16, which makes rung 03 slower than rung 02. ARM's bf16 is not measured."""
    for has in {"avx512_f": True}, {"avx512_f": True, "avx512_bf16": False}, {"bf16": True}:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
        (step,) = watch(SCRIPTS[3], *words(SCRIPTS[3], 1, 8))
        assert step.logits[0].dtype == torch.float32
        assert device.precisions(torch.device("cpu")) == ["float32"]


@pytest.mark.parametrize("script", versions("main", "GPT.configure_optimizers", among=ALL))
def test_the_weights_move_as_the_published_equations_say(script, steps):
    """Compare with float64. AdamW is algorithm 2 of Loshchilov & Hutter 2019.

    Muon's singular values are those of an SVD. The scale 0.2 * sqrt(longer side) is equation 4 of Liu et al. 2025.
    """
    gpt3, schedule, fused = (script in since(rung, among=ALL) for rung in (8, 9, 10))
    beta1, beta2 = (0.9, 0.95) if gpt3 else (0.9, 0.999)
    run, m, v = steps(script, autocast=False), Counter(), Counter()
    assert {(bool(group["fused"]), group["eps"]) for step in run for group in step.groups} == {(fused, 1e-8)}
    for t, step in enumerate(run, start=1):
        lr = (3.6e-3 if script == SIDE.muon else 6e-4) * t / 10 if schedule else 3e-4  # the first warm-up steps
        for name in step.grads:
            p, g, after = (found[name].double().numpy() for found in (step.before, step.grads, step.after))
            decay = (0.1 if g.ndim == 2 else 0.0) if gpt3 else 0.01
            if script == SIDE.muon and ".h." in name and g.ndim == 2:
                m[name] = 0.95 * m[name] + 0.05 * g
                u, s, vh = np.linalg.svd(0.95 * m[name] + 0.05 * g, full_matrices=False)
                s /= np.sqrt((s**2).sum())
                for _ in range(5):
                    s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
                expected = p - lr * (0.2 * max(p.shape) ** 0.5 * (u * s) @ vh + decay * p)
                assert np.linalg.norm(after - expected) <= 1e-3 * np.linalg.norm(expected - p), name
                continue
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            update = m[name] / (1 - beta1**t) / (np.sqrt(v[name] / (1 - beta2**t)) + 1e-8)
            np.testing.assert_allclose(after, p - lr * (update + decay * p), rtol=2**-22, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("script", versions("main", "get_lr", among=since(9, among=ALL)))
def test_a_run_warms_up_for_10_steps_and_falls_to_a_tenth_at_its_own_last_step(script):
    printed = [float(step["lr"]) for step in STEP.finditer(play(script, *words(script, 14, 8)))]
    peak = 3.6e-3 if script == SIDE.muon else 6e-4
    falls = [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5)]  # cosines of 0, 45, 90, 135 degrees
    assert printed == pytest.approx([peak * part for part in [*np.arange(1, 11) / 10, *falls]], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPTS[5], SIDE.fused, "branches/activation_checkpointing.py"])
def test_ten_compiled_steps_match_eager(script, steps):
    def seen(name, p):
        """Leave out the key bias. Its exact gradient is zero, and AdamW normalizes the rounding errors of the other."""
        return torch.cat([p[:32], p[64:]]) if name.endswith("c_attn.bias") else p

    eager = steps(RUNGS[script].before, number=10, autocast=False)
    compiled = steps(script, number=10, autocast=False, compiled=True)
    for one, other in zip(eager, compiled, strict=True):
        assert other.losses == pytest.approx(one.losses, abs=1e-5)
        for name in one.after:
            assert error(other.grads[name], one.grads[name]) <= 1e-5, name
            assert error(seen(name, other.after[name]), seen(name, one.after[name])) <= 1e-6, name
