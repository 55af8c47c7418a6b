"""The side rungs and the comparison of attention implementations compute what they claim.

The fp16 script skips a step if a gradient overflows. Muon's update is nearly orthogonal and matches that of PyTorch's
Muon. With regional compilation, all blocks share the code of one. The float8 products are off by the rounding of
float8. All attention implementations agree up to rounding.
"""

import functools
import math

import pytest
import torch
from conftest import FP8, FP16_10, FP16S, MUON, REGIONAL, SCRIPTS, STEP, load, made_up_gpu, nano, play

from measure import attention as bench


def train(script, monkeypatch, steps, blow_up=()):
    """Run an fp16 script and return (the printed steps, the weights after each AdamW step and at the end).

    In the steps listed in `blow_up`, the loss is multiplied by 1e5, which makes the gradient overflow.
    """
    module, left, calls = load(script), [], []
    forward, step = module.GPT.forward, torch.optim.AdamW.step

    def forward_and_blow_up(model, *inputs):
        loss = forward(model, *inputs)
        calls.append(model)
        # With this factor, the gradient overflows fp16 when multiplied by the scale of 65536. The loss stays finite.
        return loss * (1e5 if len(calls) - 1 in blow_up else 1)

    def step_and_look(optimizer, *args, **kwargs):
        step(optimizer, *args, **kwargs)
        left.append([p.detach().clone() for p in calls[0].parameters()])

    monkeypatch.setattr(module.GPT, "forward", forward_and_blow_up)
    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_look)
    printed = play(script, "--steps", steps, "--batch-size", 1, "--seq-len", 16)
    left.append([p.detach().clone() for p in calls[0].parameters()])
    return [match.groupdict() for match in STEP.finditer(printed)], left


@pytest.mark.parametrize("script", FP16S)
def test_a_step_whose_gradient_overflows_is_skipped_and_said(script, monkeypatch):
    lines, left = train(script, monkeypatch, 4, blow_up=(1, 3))
    assert [bool(line["skipped"]) for line in lines] == [False, True, False, True]
    assert [line["scale"] for line in lines] == ["65536", "32768", "32768", "16384"]
    assert not math.isfinite(float(lines[1]["norm"])) and math.isfinite(float(lines[2]["norm"]))
    if script == FP16_10:  # its fused AdamW is called in each step and skips the update itself
        assert all(torch.equal(a, b) for n in (1, 3) for a, b in zip(left[n - 1], left[n], strict=True))
        left = left[1:3] + left[4:]
    assert len(left) == 2 + 1  # AdamW took steps 0 and 2; the third entry was added at the end of the run
    assert any(not torch.equal(a, b) for a, b in zip(left[0], left[1], strict=True))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(left[1], left[2], strict=True))


@pytest.mark.parametrize("script", FP16S)
def test_a_growing_scale_is_not_a_skipped_step(script, monkeypatch):
    """A growing scale is not reported as a skipped step.

    In this test, the scale doubles after every 2 steps without an overflow. By default, GradScaler waits 2,000 steps.
    """
    monkeypatch.setattr(
        torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=1024.0, growth_interval=2)
    )
    lines, _ = train(script, monkeypatch, 4)
    assert [line["scale"] for line in lines] == ["1024", "2048", "2048", "4096"]
    assert not any(line["skipped"] for line in lines)


@pytest.mark.parametrize("script", FP16S)
def test_it_learns(script, monkeypatch):
    """The loss falls within 30 steps. Without the call to scaler.step(optimizer), it would not.

    In a public notebook without this call, the loss stays at 10.93 for 50 steps.
    """
    lines, _ = train(script, monkeypatch, 30)
    losses = [float(line["loss"]) for line in lines]
    assert not any(line["skipped"] for line in lines)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.1


def test_fp16_saves_its_float32_weights_and_fails_before_training_if_it_cannot(tmp_path, monkeypatch):
    words = FP16_10, "--steps", 1, "--batch-size", 1, "--seq-len", 16
    play(*words, "--save", tmp_path / "w.pt")
    saved = torch.load(tmp_path / "w.pt", weights_only=True)
    assert saved.keys() == nano(FP16_10).state_dict().keys()
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    monkeypatch.setattr(load(FP16_10).DataLoaderLite, "next_batch", lambda loader: pytest.fail("it trained"))
    with pytest.raises(SystemExit):
        play(*words, "--save", tmp_path / "missing" / "w.pt")


SHAPE = 2, 3, 33, 8


@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (64, 64)])
def test_muon_keeps_the_singular_vectors_and_makes_the_singular_values_about_1(shape):
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(-1, 1, min(shape))  # the largest is 100 times the smallest
    update = u.T @ load(MUON).orthogonalize(u @ values.diag() @ vh) @ vh.T
    assert (update - update.diagonal().diag()).abs().max() < 1e-3
    assert 0.65 < update.diagonal().min() and update.diagonal().max() < 1.25


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (64, 64)])
def test_muon_moves_a_matrix_as_pytorchs_muon_does(shape):
    """PyTorch orthogonalizes in bf16, so the two differ by about 1%."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    group = {"params": [ours], "weight_decay": 0.1, "momentum": 0.95}
    optimizers = [
        load(MUON).Muon([group], lr=0.02, fused=True),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(5):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()


def test_all_blocks_run_the_code_compiled_for_one(monkeypatch):
    compile, graphs, calls = torch.nn.Module.compile, [], []

    def backend(graph, _):
        graphs.append(len(graph.graph.find_nodes(op="placeholder")))
        return lambda *inputs: calls.append(1) or graph.forward(*inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode: compile(module, backend=backend))
    play(REGIONAL, "--steps", 3, "--batch-size", 1, "--seq-len", 16, compiled=True)
    assert graphs == [1 + 12]  # the inputs of one graph: x and the parameters of a block
    assert len(calls) == 3 * 2  # 3 steps of 2 blocks


def rounding(ours, exact):
    """Return the relative error of a tensor in the Euclidean norm."""
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("x_size, w_size", [(1, 0.02), (1e-3, 1), (300, 1e-4)])
def test_float8_products_are_off_by_the_rounding_of_float8(x_size, w_size):
    """The gradient of the logits is that of a mean loss. Tensors of any magnitude fit the narrow range of float8."""
    torch.manual_seed(0)
    x, w = (torch.randn(4096, 32) * x_size).requires_grad_(), (torch.randn(64, 32) * w_size).requires_grad_()
    logits = load(FP8).Float8Linear.apply(x, w)
    assert logits.dtype == torch.bfloat16
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = exact[0] @ exact[1].T
    grad = (torch.randn(4096, 64).softmax(-1) - torch.nn.functional.one_hot(torch.randint(64, (4096,)), 64)) / 4096
    logits.backward(grad.bfloat16())
    expected.backward(grad.double())
    assert 0.01 < rounding(logits.detach(), expected.detach()) < 0.05
    for ours, theirs in zip((x, w), exact, strict=True):
        assert ours.grad.dtype == torch.float32 and 0.01 < rounding(ours.grad, theirs.grad) < 0.08


def test_with_a_float8_head_loss_and_gradients_are_those_of_rung_10_up_to_rounding():
    found = []
    for script in (SCRIPTS[10], FP8):
        module = load(script)
        torch.manual_seed(0)
        model = module.GPT(module.GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=32))
        model.use_fp8 = True  # rung 10 ignores it
        x, y = torch.randint(256, (2, 4, 32), generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        found.append((loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}))
        assert model(x).shape == (4, 32, 256)
    (exact, gradients), (loss, ours) = found
    assert loss == pytest.approx(exact, abs=0.01) and loss != exact
    assert ours.keys() == gradients.keys()
    for name, grad in gradients.items():
        assert rounding(ours[name], grad) < 0.1, name


@pytest.mark.parametrize("capability, length, used", [((8, 0), 16, False), ((8, 9), 16, True), ((8, 9), 17, False)])
def test_the_head_is_in_float8_where_the_gpu_supports_it(monkeypatch, capability, length, used):
    apply, calls = load(FP8).Float8Linear.apply, []
    monkeypatch.setattr(load(FP8).Float8Linear, "apply", lambda *inputs: calls.append(1) or apply(*inputs))
    with made_up_gpu(capability=capability):
        printed = play(FP8, "--steps", 1, "--batch-size", 1, "--seq-len", length, device="cuda")
    assert ("no float8 here" not in printed) == bool(calls) == used


@pytest.mark.parametrize("kind", bench.ATTENTION)
def test_every_attention_computes_the_same(kind):
    torch.manual_seed(0)
    exact = [torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = bench.written_out(*exact)
    gradients = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    inputs = [tensor.detach().float().requires_grad_() for tensor in exact]
    try:
        forward, both = bench.passes(bench.ATTENTION[kind], *inputs)
        torch.testing.assert_close(forward().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    except RuntimeError as error:
        if kind in ("written out", "math", "flash"):
            raise
        pytest.skip(f"no {kind} kernel here: {str(error)[:60]}")
    for ours, theirs in zip(both(), gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
