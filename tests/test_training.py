"""One run through main() per loop shows that each option reaches its use and that each printed field is true.

Most runs use a simulated GPU, the second of two, and a clock with known readings. test_ranks.py trains with several
processes.
"""

import contextlib
import functools
import json
import math
import platform
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import (
    BF16_CPU,
    LONG,
    NO_SCORES,
    ROOT,
    RUNGS,
    SIDE,
    SUMMARY,
    TRAIN,
    encode,
    load,
    made_up_gpu,
    nano,
    play,
    save_gpt2,
    since,
    versions,
    watch,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytestmark = pytest.mark.usefixtures("no_evaluation")
ALL = list(RUNGS)
LOOPS = versions("main", among=ALL)
QUEUES = SIDE.queued, SIDE.record  # they read the clock after step 0, after every ten steps and at the end
FSDP = "branches/fsdp_run.py"
ACCUMULATE = since("ddp_run.py", among=ALL)
RANKED = versions("main", among=ACCUMULATE)
SAVING = since(LONG, among=ALL)
T4, A100 = (7, 5), (8, 0)
TOOK = [90, 50, 70, 10, 40, 22, 35, 61, 28, 47, 55, 31, 33]  # seconds per step, according to the simulated clock
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16}
TEXT = (ROOT / "input.txt").read_text(encoding="utf-8")[:2150]  # its tokens do not divide evenly into batches


def batches(script, size):
    """Return the batches of TEXT, as lists of size + 1 tokens."""
    tokens = encode(TEXT)
    if script == TRAIN:  # an endless stream; a tenth of the text is held out
        tokens = 9 * tokens[: len(tokens) * 9 // 10]
    return 9 * [tokens[start : start + size + 1] for start in range(0, len(tokens) - size, size)]


def words_for(script, B=1, T=8, micro=1, steps=1, data=ROOT / "README.md"):
    words = ["--batch-size", B, "--seq-len", T, "--steps", steps, "--data", data]
    words += ["--total-batch-size", B * T * micro] * (script in ACCUMULATE)
    return words + ["--warmup-steps", 10] * (script == TRAIN)


def record(script, device, folder):
    """Train for 13 steps with options that are not the defaults, and return all that was seen."""
    module, events = load(script), []
    seen = SimpleNamespace(script=script, device=device, events=events, log=folder / "log.jsonl")
    seen.batches, seen.settings, seen.norms, seen.used, seen.printed = [], set(), [], set(), []
    seen.micro, seen.loss = 2 if script in ACCUMULATE else 1, None
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    forward, backward, autocast, to = module.GPT.forward, torch.autograd.backward, torch.autocast, module.GPT.to
    seen.reads = [[0], [*range(1, 11)], [11, 12]] if script in QUEUES else [[step] for step in range(len(TOOK))]
    seen.took = [sum(TOOK[step] for step in read) / len(read) for read in seen.reads for _ in read]
    starts = [sum(TOOK[: read[0]]) + 5 * read[0] for read in seen.reads]  # 5 s or more between two reads
    spans = zip(starts, seen.reads, strict=True)
    clock = iter([at for start, read in spans for at in (start, start + sum(TOOK[step] for step in read))] + [9999])

    def look(model, x, y):
        left_over = any(p.grad is not None and p.grad.any() for p in model.parameters())
        events.append("forward" if left_over == (len(seen.batches) % seen.micro > 0) else "forward, with old gradients")
        seen.model = model
        seen.settings.add((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))
        seen.batches.append((x.clone(), y.clone()))
        factor = 1 if script == SIDE.fp16 else 3
        factor = 0.01 if len(seen.batches) > 7 * seen.micro else factor  # the norm falls below 1
        if seen.loss is not None:
            seen.loss.data.fill_(0.0)  # a CUDA graph overwrites its outputs in the next step
        seen.loss = forward(model, x, y) * factor
        return seen.loss

    def backward_and_look(*args, **options):
        events.append("backward")
        backward(*args, **options)
        seen.norms.append(torch.stack([p.grad.norm() for p in seen.model.parameters()]).norm().item())

    def on(name, value):
        return lambda device="cuda:0": seen.used.add(str(device)) or events.append(name) or value

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if device != "cpu":
            stack.enter_context(made_up_gpu(events, T4, A100))
            autocast = torch.autocast  # the simulated GPU's
            patch.setattr(torch.accelerator, "synchronize", on("synchronize", None))
            patch.setattr(torch.cuda, "max_memory_allocated", on("memory", 12_345_678_901))
            patch.setattr(torch.cuda, "get_device_name", on("name", "GPU 1"))
        patch.setattr(module.GPT, "to", lambda model, *on: seen.used.add(str(on[0])) or to(model, *on))
        patch.setattr(torch, "autocast", lambda on, *a, **kw: seen.used.add(on) or autocast(on, *a, **kw))
        for owner, name in (module.DataLoaderLite, "next_batch"), (torch.optim.AdamW, "zero_grad"):
            call = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, f=call, event=name, **k: (events.append(event), f(*a, **k))[1])
        patch.setattr(module.GPT, "forward", look)
        patch.setattr(torch.autograd, "backward", backward_and_look)
        patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or next(clock)))
        patch.setattr(load(TRAIN), "evaluate", lambda *args: NO_SCORES | {"eval_sec": 30.0})
        patch.setitem(module.MODELS, "gpt2-medium", module.GPTConfig(**TINY))
        patch.setattr("conftest.play", lambda *a, **k: seen.printed.append(play(*a, **k)) or seen.printed[0])
        stack.callback(register_optimizer_step_pre_hook(lambda *_: events.append("step")).remove)
        words = words_for(script, 3, 16, seen.micro, len(TOOK), folder / "text.txt")
        seen.name = save_gpt2(folder)[0] if device == "cpu" and script != SIDE.fp16 else "gpt2-medium"
        words += ["--model" if seen.name == "gpt2-medium" else "--init-from", seen.name]
        words += ["--log-file", seen.log] * (script in SAVING) + ["--eval-every", 5] * (script == TRAIN)
        seen.steps = watch(script, *words, "--seed", 7, device=device)
    torch.manual_seed(7)
    fresh = module.GPT(module.GPTConfig(**TINY))
    seen.initial = fresh if seen.name == "gpt2-medium" else module.GPT.from_pretrained(folder)
    return seen


RUNS = [(script, "cuda:1") for script in LOOPS]
RUNS += [(script, "cpu") for script in ("baseline.py", "ddp_run.py", TRAIN, SIDE.fp16)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def seen(request, tmp_path_factory):
    with contextlib.redirect_stderr(sys.stdout):
        return record(*request.param, tmp_path_factory.mktemp("run"))


def test_the_options_reach_the_model_the_batches_and_the_precision(seen):
    """The A100 is GPU 1, so a script that asks for the capability of GPU 0, a T4, computes in float32."""
    first, initial = seen.steps[0].before, dict(seen.initial.named_parameters())
    assert {p.dtype for p in first.values()} == {torch.float32} and first.keys() == initial.keys()
    assert all(torch.equal(first[name], p) for name, p in initial.items())
    assert len(seen.steps) == len(TOOK) == len(seen.batches) / seen.micro
    for (x, y), tokens in zip(seen.batches, batches(seen.script, 3 * 16)[: len(seen.batches)], strict=True):
        assert x.shape == y.shape == (3, 16) and [*x.flatten(), y[-1, -1]] == tokens
        assert torch.equal(y.flatten()[:-1], x.flatten()[1:])
    gpu = seen.device != "cpu"
    bf16 = seen.script in since(3, among=ALL) and (gpu or BF16_CPU)
    dtype = torch.float16 if seen.script == SIDE.fp16 else torch.bfloat16 if bf16 else torch.float32
    dtypes = {logits.dtype for step in seen.steps for logits in step.logits}
    assert dtypes == {dtype} or seen.script == SIDE.record and not dtypes  # it does not call lm_head
    assert seen.settings == {("high" if gpu and seen.script in since(2, among=ALL) else "highest", not gpu)}
    assert {torch.device(device).type for device in seen.used} == {torch.device(seen.device).type}
    assert {device for device in seen.used if ":" in device} == ({"cuda:1"} if gpu else set())


def test_a_step_is_timed_as_a_whole_and_the_device_is_waited_for_at_its_end_alone(seen):
    wait = ["synchronize"] * (seen.device != "cpu")
    work = ["next_batch", "zero_grad", "forward", "backward"]
    work = work if seen.micro == 1 else ["zero_grad", *seen.micro * ["next_batch", "forward", "backward"]]
    log = "/".join(seen.events).replace("wait for the loss/clock", "synchronize/clock")  # loss.item() waits, too
    events = [event for event in log.split("/") if event.split()[0] not in ("copy", "pin", "wait", "memory", "name")]
    if seen.script in QUEUES:
        timed = [["clock", *len(read) * [*work, "step"], *wait, "clock"] for read in seen.reads]
        assert events == [*sum(timed, []), "clock"]
        copied = [part.rpartition("clock")[2] for part in "/".join(seen.events).split("synchronize")[:-1]]
        assert ["wait" in part for part in copied] == [False, False, False]  # Python never waits within ten steps
        assert [part.count("pin/copy/pin/copy") for part in copied] == [1, 10, 2]
        return
    assert events == len(TOOK) * [*wait, "clock", *work, "step", *wait, "clock"]
    for step in log.split("synchronize")[1::2] if wait else ():  # the timed part of each step
        before = step.split("step")[0]
        assert "wait" not in before and before.count("copy") == 2 * seen.micro


def test_printed_and_logged_fields_are_what_was_computed(seen):
    script, printed, tokens = seen.script, seen.printed[0], encode(TEXT)
    scales = [float(step.printed["scale"] or 1) for step in seen.steps]  # of the loss in fp16
    norms = [norm / scale for norm, scale in zip(seen.norms[seen.micro - 1 :: seen.micro], scales, strict=True)]
    count, each, gpu = sum(p.numel() for p in seen.steps[0].before.values()), 48 * seen.micro, seen.device != "cpu"
    held_out = math.ceil(len(tokens) / 10) if script == TRAIN else 0
    chip, version = "GPU 1" if gpu else platform.machine(), torch.__version__
    about = f"device {seen.device} ({chip}) | torch {version} | {seen.name} {count:,} parameters | B 3 T 16\n"
    about += f"loaded {len(tokens) - held_out} tokens" + f", and {held_out} for validation" * (script == TRAIN)
    assert f"{about}\n1 epoch = {(len(tokens) - held_out - 1) // 48} batches\n" in printed
    assert f"\n{each} tokens per step = 2 micro-steps * B 3 * T 16 * 1 ranks\n" in printed or seen.micro == 1
    lines = seen.log.read_text().splitlines()[1:] if script in SAVING else []
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    for number, step in enumerate(seen.steps):
        shown, loss, norm = step.printed, statistics.mean(step.losses), None
        assert (shown["step"].strip(), float(shown["loss"])) == (str(number), pytest.approx(loss, abs=1e-5))
        took = seen.took[number]
        assert float(shown["ms"]) == 1000 * took and shown["rate"].strip() == f"{each / took:,.0f}"
        lr = load(script).get_lr(number, 13, warmup_steps=10) if script in since(9, among=ALL) else 3e-4
        assert [group["lr"] for group in step.groups] == pytest.approx(len(step.groups) * [lr])
        assert shown["lr"] == (f"{lr:.4e}" if script in since(9, among=ALL) else None)
        if shown["norm"]:
            norm = norms[number]  # before clipping
            assert float(shown["norm"]) == pytest.approx(norm, abs=1e-4)
            assert step.norm == pytest.approx(min(norm, 1), rel=1e-4)  # clipped as a whole, if at all
        if script in SAVING:
            row = {"step": number, "loss": loss, "lr": lr, "norm": norm, "sec": TOOK[number]}
            assert rows[number] == pytest.approx(row, rel=1e-5)
        if script in SAVING and number:
            left = statistics.median(TOOK[max(1, number - 9) : number + 1]) * (12 - number)
            left += 30 * sum(other > number for other in (5, 10, 13)) * (script == TRAIN)  # three more evaluations
            assert float(shown["left"]) == pytest.approx(left / 60, abs=0.051)
        assert (shown["norm"] is not None) == (script in since(8, among=ALL))
    assert norms[0] > 1.2 and norms[-1] < 0.5
    median = statistics.median(seen.took[6:])  # 35, or 41.8 s
    summary = f"median of steps 6-12: {1000 * median:.2f} ms"
    summary += f", {each / median:,.0f} tok/s" + ", peak memory 11.50 GiB" * gpu
    assert printed.splitlines()[-1] == summary


@pytest.mark.parametrize("script", [script for script in since(2, among=LOOPS) if script != SIDE.record])
def test_a_gpu_that_only_emulates_bf16_computes_in_float32(script):
    with made_up_gpu(None, T4):
        (step,) = watch(script, "--model", "nano", *words_for(script), device="cuda")
    assert step.logits[0].dtype == (torch.float16 if script == SIDE.fp16 else torch.float32)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("script", RANKED)
def test_micro_steps_add_up_to_one_step_on_the_whole_batch(script):
    """Both steps have the loss, the norm and the gradient, after clipping, of the weights before them."""
    loader, model = load("speedup_10_fused_adamw.py").DataLoaderLite(ROOT / "README.md", 4, 8), nano(script)
    for step in watch(script, *words_for(script, B=1, micro=4, steps=2), autocast=False):
        for name, p in model.named_parameters():
            p.data, p.grad = step.before[name], None
        loss = model(*loader.next_batch())
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        assert float(step.printed["loss"]) == pytest.approx(loss.item(), rel=1e-4)
        assert float(step.printed["norm"]) == pytest.approx(norm, rel=1e-4) and norm > 1
        for name, p in model.named_parameters():
            torch.testing.assert_close(step.grads[name], p.grad / norm, rtol=1e-3, atol=1e-5)


# Scripts without checkpoints do not check the gradient: if it is not finite, the next loss is not finite either.
@pytest.mark.parametrize("script, what", [*((s, "loss") for s in LOOPS), *((s, "gradient") for s in SAVING)])
def test_a_value_that_is_not_finite_stops_the_run_and_is_not_saved(script, what, tmp_path, monkeypatch, refused):
    def forward(model, *args):
        zero = 0 * model.lm_head.weight.sum()
        return zero + math.inf if what == "loss" else zero.sqrt()  # the slope of sqrt at 0 is infinite

    monkeypatch.setattr(load(script).GPT, "forward", forward)
    words = words_for(script, steps=2)
    words += ["--checkpoint-dir", tmp_path, "--save-every", 1] * (script in SAVING)
    words += ["--save", tmp_path / "weights.pt"] * (script in ("ddp_run.py", SIDE.fp16))
    assert SUMMARY.search(refused(script, "--device", "cpu", *words, says="the loss .*is not finite at step 0"))
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step_00000000.pt"] * (script in SAVING)


@pytest.mark.parametrize("script", versions("main", among=since(5, among=ALL)))
def test_the_compiler_is_called_with_the_mode_and_nothing_else(script, monkeypatch):
    """`dynamic=True` would make the code slower, and a compiled copy of the model would not be used."""
    calls = []
    monkeypatch.setattr(load(script).GPT, "compile", lambda model, *args, **options: calls.append((args, options)))
    for mode in "default", "max-autotune":
        play(script, *words_for(script), *["--compile-mode", mode] * (mode != "default"))
        expected = {"mode": mode} | ({"dynamic": False} if script == TRAIN else {})
        assert calls == [((), expected)]
        calls.clear()


@pytest.mark.parametrize("script", [*since(5, 8), "ddp_run.py", TRAIN, SIDE.record])  # all compiled models
def test_a_step_runs_one_graph_of_fixed_shapes_that_returns_the_loss_and_nothing_else(script, monkeypatch):
    ran, returned, inputs = [], [], []

    def compiler(graph, examples):
        returned.append([node.meta["example_value"].shape for node in graph.graph.output_node().args[0]])
        inputs.extend(examples)
        return lambda *args: (ran.append(graph), graph(*args))[1]

    torch._dynamo.reset()  # after runs of other sizes, it would make the shapes symbolic
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    play(script, *words_for(script, steps=2), compiled=True)
    assert returned == [[()]] and len(ran) == 2  # one graph, which returns one number and runs in each step
    assert all(type(size) is int for example in inputs for size in getattr(example, "shape", [example]))


# ---- several ranks


PASSES = []  # one entry per forward pass of DDP


class Alone(torch.nn.Module):
    """A stand-in for DDP that notes in which forward passes DDP would prepare to send gradients."""

    def __init__(self, model):
        super().__init__()
        self.module, self.sends = model, True

    def forward(self, *args):
        PASSES.append(self.sends)
        return self.module(*args)

    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        yield
        self.sends = True


@pytest.mark.parametrize("number", [1, 0])
@pytest.mark.parametrize("script", RANKED)
def test_a_rank_has_its_own_gpu_stops_with_the_others_and_writes_if_it_is_rank_0(script, number, tmp_path, monkeypatch):
    """A signal reaches another rank in step 0. DDP sends gradients in the last backward pass of a step alone."""
    used, to, saving = [], load(script).GPT.to, script in SAVING

    def reduce(tensor):
        assert getattr(tensor, "on_gpu", False), "NCCL refuses a tensor on the CPU"
        tensor.add_(not tensor.is_floating_point())

    monkeypatch.setattr(load(script).GPT, "to", lambda model, device: used.append(str(device)) or to(model, device))
    monkeypatch.setattr("sys.stdout", sys.stdout)  # main() silences ranks other than 0
    monkeypatch.setattr(dist, "init_process_group", used.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *group: number)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), [mine] * len(out)))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects: None)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Alone)
    monkeypatch.setattr(dist, "init_device_mesh", lambda *args: None)
    monkeypatch.setattr(load(FSDP), "fully_shard", lambda part, mesh: part)  # no sharding: tensors stay whole
    monkeypatch.setattr(torch.Tensor, "full_tensor", lambda tensor: tensor, raising=False)
    place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    words = words_for(script, micro=8, steps=2) + ["--model", "nano"]
    words += ["--checkpoint-dir", tmp_path, "--log-file", tmp_path / "log.jsonl"] * saving
    PASSES.clear()
    stops = pytest.raises(SystemExit, match="1") if saving else contextlib.nullcontext()
    with made_up_gpu(None, A100, A100) as events, stops:
        play(script, *words, device="cuda", **place)
    assert f"set_device cuda:{number}" in events and used == ["nccl", f"cuda:{number}"]
    assert PASSES == (1 if saving else 2) * [False, False, False, True] or script == FSDP
    written = ["lock", "log.jsonl", "step_00000000.pt", "step_00000001.pt"] * (saving and number == 0)
    assert sorted(path.name for path in tmp_path.rglob("*")) == written


@pytest.mark.parametrize("script", [script for script in versions("parse_args") if script in ACCUMULATE])
def test_rank_and_device_come_from_the_environment(script, monkeypatch, refused):
    """The variables count whoever set them: torchrun, or a line in a script for srun or mpirun."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    four = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for given, expected in (
        (dict.fromkeys(four, ""), (0, 1, "cuda")),  # a variable that is empty is not set
        (four | {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, "cuda")),
        (four, (3, 4, "cuda:1")),  # without LOCAL_RANK, rank 3 is the second on a machine with two GPUs
        (four | {"LOCAL_RANK": "0"}, (3, 4, "cuda:0")),
        (four | {"LOCAL_RANK": "2"}, "cuda:2 for rank 3: PyTorch finds only cpu, cuda, cuda:0, cuda:1"),
        *((four | {name: ""}, f"{name} not set: set all of RANK, WORLD_SIZE, MASTER_ADDR") for name in four),
    ):
        monkeypatch.setattr("sys.argv", [script])
        with made_up_gpu(None, A100, A100), pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            if isinstance(expected, str):  # half set: training alone would go unnoticed
                refused(script, says=expected)
            else:
                args = load(script).parse_args()
                assert (args.rank, args.world_size, args.device) == expected, given
