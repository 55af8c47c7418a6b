"""The training loop of the scripts, watched from inside: what the optimizer is given, and when."""

import math
import re
import socket

import pytest
import torch
from conftest import SCRIPTS, clips, load, nano, since, watch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def train(script, steps, *args, batch=4, length=32, total=None, **environment):
    """The steps of a short run of nano."""
    args += ("--steps", steps, "--batch-size", batch, "--seq-len", length)
    if script in since("ddp_run.py"):
        args += ("--total-batch-size", total or batch * length)
    return watch(script, *args, **environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_starts_from_the_weights_of_its_seed(script):
    for arguments, seed in ((), 1337), (("--seed", 7), 7):
        (step,) = train(script, 1, *arguments, batch=1, length=8)
        expected = dict(nano(script, seed).named_parameters())
        assert step.before.keys() == expected.keys()
        assert all(torch.equal(step.before[name], p) for name, p in expected.items())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_clock_is_read_when_the_device_has_finished(script):
    work = ["batch", "zero_grad"] if script in since(0, "ddp_run.py") else ["zero_grad", "batch"]
    for step in train(script, 2, batch=1, length=8):
        assert step.events == ["sync", "clock", *work, "forward", "backward", "step", "sync", "clock"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_are_counted_per_second(script):
    tokens = 64 if script in since("ddp_run.py") else 32  # two micro-steps
    for step in train(script, 2, batch=2, length=16, total=tokens):
        seconds, rate = float(step.printed["ms"]) / 1000, float(step.printed["rate"].replace(",", ""))
        assert seconds == pytest.approx(step.clock[1] - step.clock[0], abs=1e-5)
        assert rate == pytest.approx(tokens / seconds, rel=1e-2, abs=0.51)  # it is printed without decimals


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_step_starts_without_the_gradients_of_the_last(script, monkeypatch):
    forward, left_over = load(script).GPT.forward, []

    def look(model, *args):
        left_over.append(any(p.grad is not None and p.grad.any() for p in model.parameters()))
        return forward(model, *args)

    monkeypatch.setattr(load(script).GPT, "forward", look)
    train(script, 3, batch=2, length=16)
    assert left_over == [False] * 3


@pytest.mark.parametrize("script", since(5))
def test_the_compile_mode_reaches_the_compiler(script, monkeypatch):
    modes = []
    monkeypatch.setattr(load(script).GPT, "compile", lambda model, mode: modes.append(mode))
    for arguments, mode in ((), "default"), (("--compile-mode", "max-autotune"), "max-autotune"):
        train(script, 1, *arguments, batch=1, length=8)
        assert modes.pop() == mode


@pytest.mark.parametrize("script", since(5))
def test_a_compiled_step_returns_the_loss_and_nothing_else(script):
    model, returned = nano(script), []

    def look(graph, inputs):
        returned.append([node.meta["example_value"].shape for node in graph.graph.output_node().args[0]])
        return graph

    model.compile(backend=look)
    model(*torch.zeros(2, 1, 8, dtype=torch.int64))
    assert returned == [[()]]  # one graph, and of it one number


def test_modes_with_cuda_graphs_are_not_used_where_gradients_add_up(monkeypatch):
    modes = []
    monkeypatch.setattr(load("ddp_run.py").GPT, "compile", lambda model, mode: modes.append(mode))
    for total in (8, 16):
        train("ddp_run.py", 1, "--compile-mode", "reduce-overhead", batch=1, length=8, total=total)
    assert modes == ["reduce-overhead", "default"]


@pytest.mark.parametrize("script", clips())
def test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step(script):
    for step in train(script, 3):
        assert float(step.printed["norm"]) > 1.5  # the norm before clipping, and there was something to clip
        assert step.norm == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("script", clips())
def test_a_norm_under_1_is_left_alone(script, monkeypatch):
    forward = load(script).GPT.forward

    def flatter(*args):
        return forward(*args) / 100

    monkeypatch.setattr(load(script).GPT, "forward", flatter)
    (step,) = train(script, 1)
    assert 0 < float(step.printed["norm"]) < 0.5
    assert step.norm == pytest.approx(float(step.printed["norm"]), abs=1e-4)


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
def test_the_printed_rate_is_the_one_the_step_is_taken_with(script):
    get_lr = load(script).get_lr
    for number, step in enumerate(train(script, 14, batch=2, length=8)):
        assert {group["lr"] for group in step.groups} == {get_lr(number, 14)}
        assert float(step.printed["lr"]) == pytest.approx(get_lr(number, 14), rel=1e-4)


@pytest.mark.parametrize("script", since(10))
def test_only_matrices_decay(script):
    module = load(script)
    with torch.device("meta"):
        model = module.GPT(module.MODELS["gpt2"])
    decay, rest = (group["params"] for group in model.configure_optimizers().param_groups)
    assert (len(decay), sum(p.numel() for p in decay)) == (50, 124_354_560)
    assert (len(rest), sum(p.numel() for p in rest)) == (98, 121_344)
    names = {p: name for name, p in model.named_parameters()}
    assert all(names[p].endswith("weight") and "ln_" not in names[p] for p in decay)
    assert all(names[p].endswith("bias") or "ln_" in names[p] for p in rest)


@pytest.mark.parametrize("batch", [4, 2, 1])
def test_micro_steps_add_up_to_the_gradient_of_the_whole_batch(batch):
    whole = train("ddp_run.py", 2, batch=8, autocast=False)
    parts = train("ddp_run.py", 2, batch=batch, total=256, autocast=False)
    for one, many in zip(whole, parts, strict=True):
        assert len(many.losses) == 8 // batch
        assert float(many.printed["loss"]) == pytest.approx(float(one.printed["loss"]), abs=1e-5)
        assert float(many.printed["norm"]) == pytest.approx(float(one.printed["norm"]), rel=1e-4)
        for name, grad in one.grads.items():
            assert (many.grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_gradients_travel_once_per_step_in_the_last_backward_pass(monkeypatch):
    """In a process group of one rank: what DDP sends, and when, does not depend on who else there is."""
    seen, sent = [], []

    class Watched(DistributedDataParallel):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            self.register_comm_hook(torch.distributed.group.WORLD, self.send)

        def forward(self, *args):
            seen.append("forward ")
            return super().forward(*args)

        @staticmethod
        def send(group, bucket):
            seen.append("send ")
            sent.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Watched)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    train("ddp_run.py", 3, batch=2, total=4 * 2 * 32, **ranks)
    assert re.fullmatch("((forward ){4}(send )+){3}", "".join(seen)), seen
    assert sum(sent) == 3 * sum(p.numel() for p in nano("ddp_run.py").parameters())  # each gradient once per step
