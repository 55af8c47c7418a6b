"""The training loop handles the timer, the seed, gradients, clipping and the learning rate correctly.

The tests record the calls in the loop and the changes to the weights. The timer is read after the device has finished,
which is also tested on a simulated GPU. The gradients are zero at the start of each step and are all-reduced once per
step. The printed speed, gradient norm and learning rate are the values of that step.
"""

import contextlib
import functools
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    FP16S,
    LONG,
    MUON,
    REGIONAL,
    ROOT,
    RUNGS,
    SCRIPTS,
    SUMMARY,
    TRAIN,
    clips,
    load,
    made_up_gpu,
    nano,
    play,
    since,
    versions,
    watch,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytestmark = pytest.mark.usefixtures("no_evaluation")
LOOPS = versions("main", among=list(RUNGS))
FSDP = "branches/fsdp_run.py"
ACCUMULATE = since("ddp_run.py", among=list(RUNGS))
SAVING = since(LONG, among=list(RUNGS))
V100, T4, A100, H100 = (7, 0), (7, 5), (8, 0), (9, 0)  # compute capabilities
WORK = {"synchronize", "next_batch", "zero_grad", "forward", "backward", "step"}

TEXT = ROOT / "tests" / "data" / "published_curve.json"  # a short text that edits to the project do not change


def train(script, steps, *args, batch=2, length=16, total=None, **options):
    """Train nano briefly and return the recorded steps."""
    args += ("--data", TEXT, "--steps", steps, "--batch-size", batch, "--seq-len", length)
    if script in ACCUMULATE:
        args += ("--total-batch-size", total or batch * length)
    return watch(script, *args, *["--warmup-steps", 10] * (script == TRAIN), **options)


def record(script, device):
    """Train for two steps and return (the recorded steps, the calls and clock readings of main() in order)."""
    module, events = load(script), []
    forward = module.GPT.forward

    def look(model, *args):
        left_over = any(p.grad is not None and p.grad.any() for p in model.parameters())
        events.append("forward, with gradients there" if left_over else "forward")
        return forward(model, *args)

    gpu = made_up_gpu(events) if device == "cuda" else contextlib.nullcontext()
    with gpu, pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (module.DataLoaderLite, "next_batch"),
            (torch.optim.AdamW, "zero_grad"),
            (torch.autograd, "backward"),
        ):
            call = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, f=call, event=name, **k: (events.append(event), f(*a, **k))[1])
        patch.setattr(module.GPT, "forward", look)
        reading = {"perf_counter": lambda: events.append(time.perf_counter()) or events[-1], "time": time.time}
        clock = SimpleNamespace(**reading)
        patch.setattr(module, "time", clock)
        hook = register_optimizer_step_pre_hook(lambda *_: events.append("step"))
        try:
            steps = train(script, 2, "--model", "nano", total=64, device=device)  # two micro-steps in ddp_run.py
        finally:
            hook.remove()
    return steps, events


@pytest.fixture(scope="module")
def recorded():
    return functools.cache(functools.partial(record, device="cpu"))


@pytest.fixture(scope="module")
def on_a_gpu():
    return functools.cache(functools.partial(record, device="cuda"))


@pytest.mark.parametrize("script", LOOPS)
def test_a_seed_fixes_the_run(script, recorded):
    runs = {1337: recorded(script)[0], 7: train(script, 2, "--seed", 7, total=64)}
    for seed, steps in runs.items():
        expected = dict(nano(script, seed).named_parameters())
        assert steps[0].before.keys() == expected.keys()
        assert all(torch.equal(steps[0].before[name], p) for name, p in expected.items())
    losses = [[step.losses for step in steps] for steps in (*runs.values(), train(script, 2, total=64))]
    assert losses[0] == losses[2] != losses[1]


def work_of(script):
    if script in ACCUMULATE:
        return ["zero_grad", *2 * ["next_batch", "forward", "backward"]]
    return ["next_batch", "zero_grad", "forward", "backward"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("script", LOOPS)
def test_the_clock_is_read_when_the_device_has_finished(script, device, recorded, on_a_gpu):
    events = (recorded if device == "cpu" else on_a_gpu)(script)[1]
    found = ["clock" if isinstance(event, float) else event.split(",")[0] for event in events]
    found = [event for event in found if event in {"clock", *WORK}]
    wait = ["synchronize"] * (device == "cuda")
    assert found == 2 * [*wait, "clock", *work_of(script), "step", *wait, "clock"]


@pytest.mark.parametrize("script", LOOPS)
def test_python_waits_for_a_gpu_at_the_end_of_a_step_alone(script, on_a_gpu):
    """Except for the copies of each batch, Python waits for a GPU only at the end of a step."""
    events = [event for event in on_a_gpu(script)[1] if event in WORK or event in ("wait", "copy")]
    steps = "/".join(events).split("synchronize")[1::2]  # the timed part of each step
    assert len(steps) == 2
    for step in steps:
        before, after = step.split("step")
        assert "wait" not in before
        assert before.count("copy") == (4 if script in ACCUMULATE else 2)


def precision_of(script):
    """Return (whether a script allows TF32, the dtype of its logits, whether it uses deterministic algorithms)."""
    (step,) = train(script, 1, "--model", "nano", batch=1, length=8, device="cuda")
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision() == "high", step.logits[0].dtype, deterministic


@pytest.mark.parametrize("script", LOOPS)
def test_a_gpu_computes_in_the_fastest_type_that_it_has(script):
    """GPUs of compute capability 8.0 or higher use TF32 from rung 02 on and bf16 from rung 03 on.

    The two fp16 scripts use fp16 instead of bf16. No script uses the slow deterministic kernels on a GPU.
    """
    for capability in V100, T4, A100, H100:
        ampere = capability >= A100
        tf32 = script in since(2, among=list(RUNGS)) and ampere
        dtype = torch.bfloat16 if ampere and script in since(3, among=list(RUNGS)) else torch.float32
        dtype = torch.float16 if script in FP16S else dtype
        with made_up_gpu(None, capability):
            assert precision_of(script) == (tf32, dtype, False), capability
    train(script, 1, batch=1, length=8)
    assert torch.are_deterministic_algorithms_enabled()  # makes runs on a CPU repeatable


@pytest.mark.parametrize("script", since(2, among=list(RUNGS)))
def test_what_a_gpu_does_not_have_is_said_in_a_line_and_left_out(script):
    words = "--model", "nano", "--steps", 1, "--batch-size", 1, "--seq-len", 8, "--data", ROOT / "README.md"
    words += ("--total-batch-size", 8) if script in ACCUMULATE else ()
    for capability, count in (T4, 1), (A100, 0):
        with made_up_gpu(None, capability):
            printed = play(script, *words, device="cuda")
        assert printed.count("no TF32 here: this script uses it on NVIDIA GPUs") == count
        bf16 = script in since(3, among=list(RUNGS)) and script not in FP16S
        assert printed.count("no bf16 here: this script uses it on NVIDIA GPUs") == count * bf16


@pytest.mark.parametrize("script", LOOPS)
def test_of_two_gpus_the_one_that_was_asked_for_is_used_and_named(script, monkeypatch):
    """With a T4 as the current GPU and an A100 as cuda:1, `--device cuda:1` uses only the A100 and prints its name."""
    used, to = [], load(script).GPT.to
    monkeypatch.setattr(load(script).GPT, "to", lambda model, device: used.append(device) or to(model, device))
    words = "--model", "nano", "--steps", 1, "--batch-size", 1, "--seq-len", 8, "--data", ROOT / "README.md"
    words += ("--total-batch-size", 8) if script in ACCUMULATE else ()
    with made_up_gpu(None, T4, A100), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda, "get_device_name", lambda device: used.append(device) or f"GPU {torch.device(device).index}"
        )
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: used.append(device) or 2**30)
        patch.setattr(torch.accelerator, "synchronize", used.append)
        printed = play(script, *words, device="cuda:1")
    assert "device cuda:1 (GPU 1) | " in printed and {str(device) for device in used} == {"cuda:1"}
    assert not [line for line in printed.splitlines() if line.startswith(("no TF32", "no bf16"))]


@pytest.mark.parametrize("script", LOOPS)
def test_the_summary_is_the_median_of_the_steady_steps(script, monkeypatch):
    took = [90, 50, 70, 10, 40, 22]  # milliseconds
    reads = [read for ms in took for read in (0, ms / 1000)]
    clock = iter(reads)
    monkeypatch.setattr(load(script), "time", SimpleNamespace(perf_counter=lambda: next(clock), time=time.time))
    words = "--model", "nano", "--steps", 6, "--batch-size", 2, "--seq-len", 16, "--data", ROOT / "README.md"
    words += ("--total-batch-size", 64) if script in ACCUMULATE else ()
    with made_up_gpu():
        last = play(script, *words, device="cuda").splitlines()[-1]
    tokens = 64 if script in ACCUMULATE else 32
    assert last == f"median of steps 3-5: 22.00 ms, {tokens / 0.022:,.0f} tok/s, peak memory 3.00 GiB"


# Scripts without checkpoints do not check the gradient: if it is not finite, the next loss is not finite either.
@pytest.mark.parametrize("script, what", [*((s, "loss") for s in LOOPS), *((s, "gradient") for s in SAVING)])
def test_a_value_that_is_not_finite_stops_the_run_and_is_not_saved(script, what, tmp_path, monkeypatch, refused):
    def forward(model, *args):
        zero = 0 * model.lm_head.weight.sum()
        return zero + math.inf if what == "loss" else zero.sqrt()  # the slope of sqrt at 0 is infinite

    monkeypatch.setattr(load(script).GPT, "forward", forward)
    words = ["--steps", 2, "--batch-size", 1, "--seq-len", 8, "--data", ROOT / "README.md"]
    words += ["--total-batch-size", 8] * (script in ACCUMULATE)
    words += ["--checkpoint-dir", tmp_path, "--save-every", 1] * (script in SAVING)
    words += ["--save", tmp_path / "weights.pt"] * (script == "ddp_run.py")
    printed = refused(script, "--device", "cpu", *words, says="the loss .*is not finite at step 0")
    assert SUMMARY.search(printed)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step_00000000.pt"] * (script in SAVING)


@pytest.mark.parametrize("script", versions("main", among=ACCUMULATE))
def test_a_step_takes_half_a_million_tokens_unless_told(script, monkeypatch, refused):
    module = load(script)

    def stop(loader):
        raise module.UserError("stop here")

    monkeypatch.setitem(module.MODELS, "gpt2", module.GPTConfig(n_layer=1, n_head=1, n_embd=8))
    monkeypatch.setattr(module.DataLoaderLite, "next_batch", stop)
    for model, sizes in (
        ("gpt2", "524288 tokens per step = 128 micro-steps * B 4 * T 1024 * 1 ranks"),
        ("nano", "4096 tokens per step = 8 micro-steps * B 4 * T 128 * 1 ranks"),
    ):
        words = "--device", "cpu", "--model", model, "--data", ROOT / "input.txt"
        assert sizes in refused(script, *words, says="stop here")


@pytest.mark.parametrize("script", LOOPS)
def test_tokens_are_counted_per_second(script, recorded):
    steps, events = recorded(script)
    tokens = 64 if script in ACCUMULATE else 32
    clock = [event for event in events if isinstance(event, float)]
    for step, start, end in zip(steps, clock[::2], clock[1::2], strict=True):
        seconds, rate = float(step.printed["ms"]) / 1000, float(step.printed["rate"].replace(",", ""))
        assert seconds == pytest.approx(end - start, abs=1e-5)
        assert rate == pytest.approx(tokens / seconds, rel=1e-2, abs=0.51)  # the rate is printed without decimals


@pytest.mark.parametrize("script", LOOPS)
def test_each_step_starts_without_the_gradients_of_the_last(script, recorded):
    passes = [event for event in recorded(script)[1] if str(event).startswith("forward")]
    later = ["forward, with gradients there"] * (script in ACCUMULATE)  # the second micro-step accumulates
    assert passes == 2 * ["forward", *later]


@pytest.mark.parametrize("script", versions("main", among=since(5, among=list(RUNGS))))
def test_the_compile_mode_reaches_the_compiler(script, monkeypatch):
    modes = []
    for part in load(script).GPT, load(script).Block:  # regional_compile.py compiles each of nano's two blocks
        monkeypatch.setattr(part, "compile", lambda model, mode, **options: modes.append(mode))
    for arguments, mode in ((), "default"), (("--compile-mode", "max-autotune"), "max-autotune"):
        train(script, 1, *arguments, batch=1, length=8)
        assert modes == [mode] * (1 + (script == REGIONAL))
        modes.clear()


@pytest.mark.parametrize("script", versions("main", among=since(5, among=list(RUNGS))))
def test_a_step_runs_compiled(script, monkeypatch):
    ran = []

    def compiler(graph, inputs):
        run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # a graph with checkpoints needs AOTAutograd
        return lambda *args: (ran.append(graph), run(*args))[1]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    train(script, 2, batch=1, length=8, compiled=True)
    assert len(ran) == 2 * (1 + (script == REGIONAL))  # regional_compile.py compiles each of nano's two blocks


@pytest.mark.parametrize("script", since(5, 8))  # all compiled versions of the model
def test_a_compiled_step_returns_the_loss_and_nothing_else(script):
    model, returned = nano(script), []

    def look(graph, inputs):
        returned.append([node.meta["example_value"].shape for node in graph.graph.output_node().args[0]])
        return graph

    model.compile(backend=look)
    model(*torch.zeros(2, 1, 8, dtype=torch.int64))
    assert returned == [[()]]  # one graph, which returns one number


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("script", versions("parse_args", among=ACCUMULATE))
def test_cuda_graph_modes_are_refused_with_gradient_accumulation(script, mode, monkeypatch, refused):
    words = "--device", "cpu", "--batch-size", 1, "--seq-len", 8, "--compile-mode", mode
    monkeypatch.setattr("sys.argv", [script, *map(str, words), "--total-batch-size", "8"])
    assert load(script).parse_args().compile_mode == mode
    says = f"--compile-mode {mode} allows one micro-step: set --total-batch-size 8$"
    refused(script, *words, "--total-batch-size", 16, says=says)


@pytest.mark.parametrize("script", [*clips(), TRAIN])
def test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step(script, recorded):
    for step in recorded(script)[0]:
        assert float(step.printed["norm"]) > 1.5  # the gradient is large enough to be clipped
        assert step.norm == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("script", [*clips(), TRAIN])
def test_a_norm_under_1_is_left_alone(script, monkeypatch):
    forward = load(script).GPT.forward

    def flatter(*args):
        return forward(*args) / 100

    monkeypatch.setattr(load(script).GPT, "forward", flatter)
    (step,) = train(script, 1, batch=1)
    assert 0 < float(step.printed["norm"]) < 0.5
    assert step.norm == pytest.approx(float(step.printed["norm"]), abs=1e-4)


@pytest.mark.parametrize("script", versions("get_lr", among=since(9, among=list(RUNGS))))
def test_the_learning_rate_warms_up_and_falls_along_a_cosine(script):
    unit = 3.6e-4 if script == MUON else 6e-5  # a tenth of the highest rate

    def get_lr(step, steps):
        return load(script).get_lr(step, steps, warmup_steps=10) / unit

    assert get_lr(0, 50) == pytest.approx(1)
    assert get_lr(9, 50) == pytest.approx(10)
    assert get_lr(10, 50) == pytest.approx(10)
    assert get_lr(30, 50) == pytest.approx((10 + 1) / 2)  # halfway
    assert get_lr(49, 50) == pytest.approx(1 + 0.5 * (1 + math.cos(math.pi * 39 / 40)) * 9)
    assert get_lr(50, 50) == pytest.approx(1)
    rates = [get_lr(step, 50) for step in range(50)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert [get_lr(step, 3) for step in range(3)] == pytest.approx([1, 2, 3])  # a run shorter than its warm-up


@pytest.mark.parametrize("script", versions("main", among=since(9, among=list(RUNGS))))
def test_the_printed_rate_is_the_one_the_step_is_taken_with(script, recorded):
    for number, step in enumerate(recorded(script)[0]):
        lr = load(script).get_lr(number, 2, warmup_steps=10)
        assert {group["lr"] for group in step.groups} == {lr}
        assert float(step.printed["lr"]) == pytest.approx(lr, rel=1e-4)


@pytest.mark.parametrize("script", [SCRIPTS[8]])
def test_only_matrices_decay(script):
    module = load(script)
    with torch.device("meta"):
        model = module.GPT(module.MODELS["gpt2"])
    decay, rest = (group["params"] for group in model.configure_optimizers(lr=1.0).param_groups)
    assert (len(decay), sum(p.numel() for p in decay)) == (50, 124_354_560)
    assert (len(rest), sum(p.numel() for p in rest)) == (98, 121_344)
    names = {p: name for name, p in model.named_parameters()}
    assert all(names[p].endswith("weight") and "ln_" not in names[p] for p in decay)
    assert all(names[p].endswith("bias") or "ln_" in names[p] for p in rest)


@pytest.mark.parametrize("script", versions("main", among=ACCUMULATE))
def test_micro_steps_add_up_to_the_gradient_of_the_whole_batch(script):
    whole = train(script, 2, batch=8, length=32, autocast=False)
    for batch in (4, 2, 1):
        parts = train(script, 2, batch=batch, length=32, total=256, autocast=False)
        for one, many in zip(whole, parts, strict=True):
            assert len(many.losses) == 8 // batch
            assert float(many.printed["loss"]) == pytest.approx(float(one.printed["loss"]), abs=1e-5)
            assert float(many.printed["norm"]) == pytest.approx(float(one.printed["norm"]), rel=1e-4)
            for name, grad in one.grads.items():
                assert (many.grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}


@contextlib.contextmanager
def rank(number, world_size=2):
    """Make a script run as one of several ranks within this context. The simulated ranks return the same values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, dist = torch.distributed.init_process_group, torch.distributed

    class Alike(DistributedDataParallel):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            self.register_comm_hook(None, self.answer)

        @staticmethod
        def answer(state, bucket):
            mean = torch.futures.Future()
            mean.set_result(bucket.buffer())
            return mean

    with pytest.MonkeyPatch.context() as patch:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size} | ADDRESS
        for name, value in place.items():
            patch.setenv(name, str(value))
        store = {"store": FakeStore(), "rank": number, "world_size": world_size}
        patch.setattr(dist, "get_default_backend_for_device", lambda device: "fake")
        patch.setattr(dist, "init_process_group", lambda backend: begin(backend, **store))
        patch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(world_size))
        patch.setattr(dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), [mine] * world_size))
        patch.setattr(dist, "broadcast_object_list", lambda objects: None)
        patch.setattr(torch.nn.parallel, "DistributedDataParallel", Alike)
        patch.setattr(dist, "init_device_mesh", lambda *args: None)
        patch.setattr(load(FSDP), "fully_shard", lambda part, mesh: part)  # no sharding: tensors stay whole
        patch.setattr(torch.Tensor, "full_tensor", lambda tensor: tensor, raising=False)
        patch.setattr("sys.stdout", sys.stdout)  # restores stdout at exit: main() silences ranks other than 0
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


RANKED = versions("main", among=ACCUMULATE)
DDP = [script for script in RANKED if "FSDP" not in RUNGS[script].idea]


@pytest.mark.parametrize("script", RANKED)
def test_the_printed_loss_is_the_mean_over_the_ranks(script):
    with rank(0):
        steps = train(script, 2, total=128)  # two micro-steps on each of two ranks
    for step in steps:
        assert float(step.printed["loss"]) == pytest.approx(sum(step.losses) / 2, abs=1e-5)


SIZES = "--batch-size", 2, "--seq-len", 16, "--total-batch-size", 64, "--data", ROOT / "README.md"


@pytest.mark.parametrize("script", RANKED)
def test_one_rank_alone_prints_and_writes(script, tmp_path):
    for number in (1, 0):
        folder = tmp_path / str(number)
        (folder / "saved").mkdir(parents=True)
        words = "--save", folder / "weights.pt"
        if script in SAVING:
            words += "--checkpoint-dir", folder / "saved", "--save-every", 1, "--log-file", folder / "log.jsonl"
        with rank(number):
            printed = play(script, *SIZES, "--steps", 2, *words)
        files = [path.name for path in folder.rglob("*") if path.is_file()]
        assert [bool(printed), bool(files)] == 2 * [number == 0]


@pytest.mark.parametrize("script", DDP)
def test_weights_are_saved_under_plain_names_by_several_ranks_too(script, tmp_path):
    with rank(0):
        play(script, *SIZES, "--steps", 1, "--save", tmp_path / "weights.pt")
    assert torch.load(tmp_path / "weights.pt", weights_only=True).keys() == nano(script).state_dict().keys()


@pytest.mark.parametrize("script", [script for script in RANKED if script in SAVING])
def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(script, tmp_path, monkeypatch):
    """A signal to a different rank reaches this rank through the all-reduce, and both stop after the same step."""
    with rank(0), monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(not tensor.is_floating_point()))
        play(script, *SIZES, "--steps", 4, "--checkpoint-dir", tmp_path)
    assert exit.value.code == 1
    assert sorted(path.name for path in tmp_path.glob("*.pt"))[-1] == "step_00000001.pt"


@pytest.mark.parametrize("script", RANKED)
def test_each_rank_has_its_own_gpu_and_text_also_after_a_resume(script, tmp_path, monkeypatch):
    module, models, reads = load(script), [], []
    to, next_batch = module.GPT.to, module.DataLoaderLite.next_batch

    def look(loader):
        x, y = next_batch(loader)
        reads.append(x[0, 0].item())
        return x, y

    monkeypatch.setattr(module.GPT, "to", lambda model, device: (models.append(str(device)), to(model, device))[1])
    text = module.DataLoaderLite(ROOT / "README.md", 2, 16)
    text = getattr(text, "tokens", None) if script != TRAIN else text.shards[0]
    expected = [int(text[place]) for place in (32, 96, 160)]
    monkeypatch.setattr(module.DataLoaderLite, "next_batch", look)
    words = *SIZES, "--model", "nano", *(("--checkpoint-dir", tmp_path / "saved") if script in SAVING else ())
    with made_up_gpu(None, H100, H100) as events, rank(1):
        play(script, *words, "--steps", 2, device="cuda")
    assert "set_device cuda:1" in events and models == ["cuda:1"] and reads == expected[:2]
    if script in SAVING:
        with made_up_gpu(None, H100, H100), rank(0):
            play(script, *words, "--steps", 2, device="cuda")
        reads.clear()
        with made_up_gpu(None, H100, H100), rank(1):
            play(script, *words, "--steps", 3, "--resume", device="cuda")
        assert reads == expected[2:]


@pytest.mark.parametrize("script", RANKED)
def test_a_rank_without_a_gpu_is_refused(script, refused):
    with made_up_gpu(None, H100, H100), rank(2, world_size=4):
        refused(script, *SIZES, says="cuda:2 for rank 2: PyTorch finds only cpu, cuda, cuda:0, cuda:1")


@pytest.mark.parametrize("script", [script for script in versions("parse_args") if script in ACCUMULATE])
def test_the_ranks_are_what_the_environment_says(script, monkeypatch, refused):
    """The variables count whoever set them: torchrun, or a line in a script for srun or mpirun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    four = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    monkeypatch.setattr("sys.argv", [script, "--model", "nano", "--total-batch-size", "4096"])
    for given, expected in (
        ({}, (0, 1, "cuda")),
        ({"WORLD_SIZE": "1"}, (0, 1, "cuda")),
        (four | {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, "cuda")),
        (four, (3, 4, "cuda:1")),  # without LOCAL_RANK, rank 3 is the second on a machine with two GPUs
        (four | {"LOCAL_RANK": "0"}, (3, 4, "cuda:0")),
    ):
        with made_up_gpu(None, H100, H100), pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            args = load(script).parse_args()
        assert (args.rank, args.world_size, args.device) == expected, given
    for name in four:  # half set: training alone would go unnoticed
        with pytest.MonkeyPatch.context() as patch:
            for other in four:
                patch.setenv(other, four[other] * (other != name))  # a variable that is empty is not set
            refused(script, "--device", "cpu", says=f"{name} not set: set all of RANK, WORLD_SIZE, MASTER_ADDR")


def test_two_gpus_and_one_process_are_pointed_to_torchrun():
    with made_up_gpu(None, H100, H100):
        printed = play("ddp_run.py", *SIZES, "--steps", 1, device="cuda")
    assert "2 GPUs found, 1 used: torchrun --nproc_per_node=auto uses all of them\n" in printed


@pytest.mark.parametrize("script", DDP)
def test_gradients_travel_once_per_step_in_the_last_backward_pass(script, monkeypatch):
    """DDP all-reduces each gradient once per step, in the last backward pass."""
    seen, sent = [], []

    class Watched(DistributedDataParallel):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            self.register_comm_hook(None, self.send)

        def forward(self, *args):
            seen.append("forward ")
            return super().forward(*args)

        @staticmethod
        def send(state, bucket):
            seen.append("send ")
            sent.append(bucket.buffer().numel())
            mean = torch.futures.Future()
            mean.set_result(bucket.buffer())
            return mean

    with rank(0):
        monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Watched)
        train(script, 3, total=2 * 4 * 2 * 16)
    assert re.fullmatch("((forward ){4}(send )+){3}", "".join(seen)), seen
    assert sum(sent) == 3 * sum(p.numel() for p in nano(script).parameters())  # each gradient once per step
