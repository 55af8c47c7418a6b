"""The training loop, seen from inside: clock, seed, gradients, clipping, learning rate.

The clock is read after the device has finished, gradients start from zero and travel once per step, and the printed
rate, norm and learning rate are the ones used.
"""

import functools
import math
import re
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, clips, load, nano, since, versions, watch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook


def train(script, steps, *args, batch=2, length=16, total=None, **environment):
    """The steps of a short run of nano."""
    args += ("--data", ROOT / "README.md", "--steps", steps, "--batch-size", batch, "--seq-len", length)
    if script in since("ddp_run.py"):
        args += ("--total-batch-size", total or batch * length)
    return watch(script, *args, **environment)


@pytest.fixture(scope="module")
def recorded():
    """Script -> (the steps of a short run, what main() did in order: the names of its calls, what its clock read)"""

    @functools.cache
    def recorded(script):
        module, events = load(script), []
        forward = module.GPT.forward

        def look(model, *args):
            left_over = any(p.grad is not None and p.grad.any() for p in model.parameters())
            events.append("forward, with gradients there" if left_over else "forward")
            return forward(model, *args)

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (torch.cpu, "synchronize"),
                (torch.accelerator, "synchronize"),
                (module.DataLoaderLite, "next_batch"),
                (torch.optim.AdamW, "zero_grad"),
                (torch.Tensor, "backward"),
            ):
                call = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, f=call, name=name, **k: (events.append(name), f(*a, **k))[1])
            patch.setattr(module.GPT, "forward", look)
            clock = SimpleNamespace(perf_counter=lambda: events.append(time.perf_counter()) or events[-1])
            patch.setattr(module, "time", clock)
            hook = register_optimizer_step_pre_hook(lambda *_: events.append("step"))
            steps = train(script, 2, total=64)  # in ddp_run.py two micro-steps
            hook.remove()
        return steps, events

    return recorded


@pytest.mark.parametrize("script", versions("main"))
def test_a_run_is_that_of_its_seed(script, recorded):
    runs = {1337: recorded(script)[0], 7: train(script, 2, "--seed", 7, total=64)}
    for seed, steps in runs.items():
        expected = dict(nano(script, seed).named_parameters())
        assert steps[0].before.keys() == expected.keys()
        assert all(torch.equal(steps[0].before[name], p) for name, p in expected.items())
    losses = [[step.losses for step in steps] for steps in (*runs.values(), train(script, 2, total=64))]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("script", versions("main"))
def test_the_clock_is_read_when_the_device_has_finished(script, recorded):
    found = ["clock" if isinstance(event, float) else event.split(",")[0] for event in recorded(script)[1]]
    work = ["next_batch", "zero_grad", "forward", "backward"]
    if script in since("ddp_run.py"):
        work = ["zero_grad", *2 * ["next_batch", "forward", "backward"]]
    assert found == 2 * ["synchronize", "clock", *work, "step", "synchronize", "clock"]


@pytest.mark.parametrize("script", versions("main"))
def test_tokens_are_counted_per_second(script, recorded):
    steps, events = recorded(script)
    tokens = 64 if script in since("ddp_run.py") else 32
    clock = [event for event in events if isinstance(event, float)]
    for step, start, end in zip(steps, clock[::2], clock[1::2], strict=True):
        seconds, rate = float(step.printed["ms"]) / 1000, float(step.printed["rate"].replace(",", ""))
        assert seconds == pytest.approx(end - start, abs=1e-5)
        assert rate == pytest.approx(tokens / seconds, rel=1e-2, abs=0.51)  # it is printed without decimals


@pytest.mark.parametrize("script", versions("main"))
def test_each_step_starts_without_the_gradients_of_the_last(script, recorded):
    passes = [event for event in recorded(script)[1] if str(event).startswith("forward")]
    later = ["forward, with gradients there"] * (script in since("ddp_run.py"))  # the second micro-step adds to them
    assert passes == 2 * ["forward", *later]


@pytest.mark.parametrize("script", versions("main", among=since(5)))
def test_the_compile_mode_reaches_the_compiler(script, monkeypatch):
    modes = []
    monkeypatch.setattr(load(script).GPT, "compile", lambda model, mode: modes.append(mode))
    for arguments, mode in ((), "default"), (("--compile-mode", "max-autotune"), "max-autotune"):
        train(script, 1, *arguments, batch=1, length=8)
        assert modes.pop() == mode


@pytest.mark.parametrize("script", since(5, 8))  # all versions of the model that are compiled
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
def test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step(script, recorded):
    for step in recorded(script)[0]:
        assert float(step.printed["norm"]) > 1.5  # the norm before clipping, and there was something to clip
        assert step.norm == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("script", clips())
def test_a_norm_under_1_is_left_alone(script, monkeypatch):
    forward = load(script).GPT.forward

    def flatter(*args):
        return forward(*args) / 100

    monkeypatch.setattr(load(script).GPT, "forward", flatter)
    (step,) = train(script, 1, batch=1)
    assert 0 < float(step.printed["norm"]) < 0.5
    assert step.norm == pytest.approx(float(step.printed["norm"]), abs=1e-4)


@pytest.mark.parametrize("script", versions("get_lr", among=since(9)))
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


@pytest.mark.parametrize("script", versions("main", among=since(9)))
def test_the_printed_rate_is_the_one_the_step_is_taken_with(script, recorded):
    get_lr = load(script).get_lr
    for number, step in enumerate(recorded(script)[0]):
        assert {group["lr"] for group in step.groups} == {get_lr(number, 2)}
        assert float(step.printed["lr"]) == pytest.approx(get_lr(number, 2), rel=1e-4)


@pytest.mark.parametrize("script", [SCRIPTS[10]])
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


def test_micro_steps_add_up_to_the_gradient_of_the_whole_batch():
    whole = train("ddp_run.py", 2, batch=8, length=32, autocast=False)
    for batch in (4, 2, 1):
        parts = train("ddp_run.py", 2, batch=batch, length=32, total=256, autocast=False)
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
    train("ddp_run.py", 3, total=4 * 2 * 16, **ranks)
    torch.distributed.destroy_process_group()
    assert re.fullmatch("((forward ){4}(send )+){3}", "".join(seen)), seen
    assert sum(sent) == 3 * sum(p.numel() for p in nano("ddp_run.py").parameters())  # each gradient once per step
