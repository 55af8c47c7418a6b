"""`make ladder` measures what it says and survives Ctrl-C; the published figures are those in `results/`.

Medians, ratios and shares are computed from logs with known answers, FLOPs are compared with PyTorch's counter, the
speed with an outside clock, and the peers with rung 10.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import kernels
import machine
import measure
import pytest
import render
import roof
import torch
from conftest import EAGER, ROOT, copy_project, load, made_up_gpu, play, press_ctrl_c_at, since
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode

MACHINE = {"device": "cpu", "name": "Made Up(R) 9000", "cpu": "Made Up", "capability": "AVX2", "cores": 2, "threads": 2}
MACHINE |= {"memory_gib": 8.0, "torch": "2", "python": "3", "system": "Linux"}
MACHINE |= dict.fromkeys(("device_memory_gib", "driver", "cuda"))

# ---- arithmetic


def log(times, losses=None, memory=1.5, rate=0):
    """What a script prints whose steps take these milliseconds."""
    lines = ["device cpu (made up) | torch 2 | nano 7,000,000 parameters | B 4 T 128", "loaded 338025 tokens"]
    for step, ms in enumerate(times):
        loss = losses[step] if losses else 10 - step / 100
        lines.append(f"step {step:4d} | loss {loss:.6f} | lr 6.0000e-04 | dt {ms:8.2f} ms | {rate:10,.0f} tok/s")
    return "\n".join([*lines, f"median of steps 0-1: 1.00 ms, 1 tok/s, peak memory {memory:.2f} GiB\n"])


def record(name, passes, before=None, precision="float32", errors=(), memory=1.5):
    """A row of ladder.json that ran with these times, a list per pass."""
    runs = []
    for number, times in enumerate(passes):
        error = dict(errors).get(number)
        run = measure.parse(log(times, memory=memory), error or "", 1 if error else 0, len(times))
        about = {"pass": number, "started": "2026-01-02T03:04:05+00:00", "cold": number == 0, "process_s": 9.0}
        runs.append(about | run)
    row = {"name": name, "kind": "rung", "before": before, "precision": precision, "command": f"python {name}"}
    return row | {"runs": runs, "profile": None, "fit": None}


def measurement(*rows, **ceilings):
    settings = {"model": "nano", "batch_size": 4, "seq_len": 128, "steps": 20, "device": "cpu", "repeat": 2}
    data = {
        "settings": settings | {"peers": False, "profile": False, "fit": False},
        "machine": dict(MACHINE),
        "commit": None,
        "sources_sha256": "",
        "command": "python tools/measure.py",
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:14:05+00:00",
        "roof": {"flops_per_token": 2_000_000_000, "ceilings_tflops": ceilings, "copy_gb_per_s": 20.0, "matmul": []},
        "rows": list(rows),
    }
    measure.summarise(data)
    return data


SLOW, FAST = [900.0] * 10 + [100.0] * 10, [900.0] * 10 + [50.0] * 10


def test_a_log_is_read_as_printed():
    run = measure.parse(log([12.5, 7.25], [10.5, 9.25], memory=2.75), steps=2)
    known = {"times_ms": [12.5, 7.25], "losses": [10.5, 9.25], "peak_memory_gib": 2.75, "parameters": 7_000_000}
    assert run == known | {"error": None}


def test_the_steps_that_count_are_those_of_the_scripts():
    assert measure.steady(list(range(20))) == list(range(10, 20))
    assert measure.steady(list(range(50))) == list(range(10, 50))
    assert measure.steady(list(range(19))) == list(range(9, 19))
    assert measure.steady([5.0]) == [5.0]


def test_known_times_give_known_medians_ratios_and_shares():
    uneven = [900.0] * 10 + [40, 40, 40, 50, 50, 50, 50, 60, 60, 80.0]
    data = measurement(
        record("a", [SLOW]), record("b", [uneven], before="a", precision="bf16"), float32=40.0, bf16=50.0
    )
    a, b = data["rows"]
    assert (a["median_ms"], a["quartiles_ms"], a["tokens_per_s"]) == (100, [100, 100], 5120)  # 4 * 128 / 0.1 s
    assert (b["median_ms"], b["quartiles_ms"], b["tokens_per_s"]) == (50, [42.5, 57.5], 10240)
    assert b["over_baseline"] == b["over_before"] == {"median": 2, "low": 2, "high": 2}
    assert a["over_baseline"]["median"] == 1 and a["over_before"] is None
    assert a["first_step_s"] == 0.9 and a["peak_memory_gib"] == 1.5 and a["parameters"] == 7_000_000
    assert a["tflops"] == 5120 * 2e9 / 1e12 and b["tflops"] == 2 * a["tflops"]
    assert a["roof_share"] == pytest.approx(0.256, rel=1e-3)  # 10.24 TFLOP/s of 40
    assert b["roof_share"] == pytest.approx(0.4096, rel=1e-3)


def test_a_ratio_is_taken_within_a_pass_and_its_spread_is_that_of_the_passes():
    # the machine is half as fast in the second pass: across the passes b would seem between 1 and 4 times as fast
    slower = [2 * ms for ms in SLOW], [2 * ms for ms in FAST]
    data = measurement(record("a", [SLOW, slower[0], SLOW]), record("b", [FAST, slower[1], [40.0] * 20], before="a"))
    assert data["rows"][1]["over_before"] == {"median": 2, "low": 2, "high": 2.5}


def test_a_pass_that_failed_is_left_out_of_both_sides():
    errors = [(0, "a.py: error: out of memory with B 4 and T 128")]
    data = measurement(record("a", [SLOW, SLOW]), record("b", [[1.0] * 20, FAST], "a", errors=errors))
    assert data["rows"][1]["over_before"]["high"] == 2
    assert data["rows"][1]["error"].startswith("a.py: error: out of memory")
    assert data["rows"][1]["first_step_s"] is None  # only the pass that failed was cold
    assert "a pass failed" in render.summary(data)


def test_a_rung_that_fails_is_a_row_that_says_why():
    errors = [(0, "warning\nb.py: error: out of memory with B 4 and T 128: lower --batch-size\n")]
    data = measurement(record("a", [SLOW]), record("b", [[]], "a", errors=errors), record("c", [FAST], "b"))
    a, b, c = data["rows"]
    assert b["error"] == "b.py: error: out of memory with B 4 and T 128: lower --batch-size"
    assert b["median_ms"] is None and b["tokens_per_s"] is None and b["over_baseline"] is None
    assert c["over_before"] is None and c["over_baseline"]["median"] == 2
    for text in (render.summary(data), render.markdown(data)):
        assert "out of memory with B 4 and T 128" in text


@pytest.mark.parametrize(
    "status, errors, said",
    [
        (1, "Traceback\n  ...\nValueError: why\n", "ValueError: why"),
        # torchrun's report comes after
        (1, "x.py: error: no compiler\n=====\nroot cause\n", "x.py: error: no compiler"),
        (-9, "half a line", "killed by SIGKILL"),
        (3, "", "status 3"),
    ],
)
def test_why_a_run_failed(status, errors, said):
    assert measure.parse(log([1.0]), errors, status, 1)["error"] == said


def test_a_log_cut_in_half_keeps_its_whole_lines():
    whole = log(SLOW)
    for length in range(len(whole)):
        run = measure.parse(whole[:length], steps=20)
        assert run["times_ms"] == SLOW[: len(run["times_ms"])]
        assert len(run["losses"]) == len(run["times_ms"])
        if len(run["times_ms"]) < 20:
            assert run["error"] == f"ended after {len(run['times_ms'])} of 20 steps"


def test_steps_of_zero_length_are_no_speed():
    data = measurement(record("a", [SLOW]), record("b", [[5.0] * 10 + [0.0] * 10], "a"))
    assert "no length" in data["rows"][1]["error"]
    assert data["rows"][1]["tokens_per_s"] is None


def test_a_precision_that_the_device_lacks_is_not_held_against_it():
    lines = "no TF32 here: it takes a GPU\nno bf16 here: it takes a GPU that\n"
    assert measure.precision_used("bf16", "") == "bf16"
    assert measure.precision_used("tf32", lines) == measure.precision_used("bf16", lines) == "float32"
    assert measure.precision_used("bf16", "no bf16 here") == "tf32"


@pytest.mark.parametrize("start", [1, 4, 16, 4096])
@pytest.mark.parametrize("limit", [0, 1, 3, 8, 9, 27, 28, 512, 10**9])
def test_the_largest_size_that_fits_is_found_in_few_trials(limit, start):
    grid, trials = measure.sizes_up_to(4096), []

    def fits(size):
        trials.append(size)
        return size <= limit

    assert measure.largest(fits, grid, grid.index(start)) == max((size for size in grid if size <= limit), default=None)
    assert len(trials) == len(set(trials)) <= 12
    assert grid[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16] and grid[-1] == 4096


# ---- the roof


@pytest.mark.parametrize("script", ["baseline.py", "speedup_04_residual_init.py"])
def test_the_flops_of_a_token_are_those_that_pytorch_counts(script):
    module = load(script)
    config = module.GPTConfig(block_size=64, vocab_size=517, n_layer=3, n_head=2, n_embd=48)
    x = torch.randint(517, (2, 64))
    with FlopCounterMode(display=False) as counter:
        module.GPT(config)(x, x).backward()
    assert counter.get_total_flops() == roof.flops_per_token(config, 64) * x.numel()


def test_a_ceiling_is_operations_over_seconds(monkeypatch):
    monkeypatch.setattr(roof, "seconds", lambda *args, **names: 0.5)
    config = SimpleNamespace(n_embd=32, vocab_size=100, n_layer=1)
    found = roof.measure(config, tokens=64, device=torch.device("cpu"))
    row = next(row for row in found["matmul"] if (row["precision"], row["name"]) == ("float32", "lm_head"))
    assert row["shape"] == (64, 32, 100) and row["tflops"] == pytest.approx(2 * 64 * 32 * 100 / 0.5 / 1e12, rel=1e-3)
    assert found["ceilings_tflops"]["float32"] == pytest.approx(2 * 2048**3 / 0.5 / 1e12, rel=1e-3)  # the large square
    assert found["copy_gb_per_s"] == pytest.approx(2 * 2**28 / 0.5 / 1e9, rel=1e-3)  # read and written


def test_a_product_is_timed_with_the_device_waited_for(monkeypatch):
    events = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(roof.time, "perf_counter", lambda: events.append("clock") or 0.25 * len(events))
    assert roof.seconds("work()", SimpleNamespace(type="cuda"), work=lambda: None) > 0
    assert events[0::2] == ["wait"] * (len(events) // 2) and events[1::2] == ["clock"] * (len(events) // 2)


def test_the_roof_has_as_many_threads_as_the_scripts():
    seen, threads = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        roof.seconds("seen.append(threads())", torch.device("cpu"), seen=seen, threads=torch.get_num_threads)
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {2}


def test_the_machine_is_described_with_all_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 80 * 2**30))  # free, and in all
    with made_up_gpu():
        found = machine.describe(torch.device("cuda"))
    assert (found["name"], found["device_memory_gib"], found["capability"]) == ("Made Up GPU", 80.0, "9.0")


# ---- where the time goes


def span(name, start, length, category="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "tid": 1, "cat": category, "args": args}


def test_operations_of_a_cpu_are_grouped_by_the_time_spent_in_themselves():
    step = [
        span("ProfilerStep#5", 0, 10_000, "user_annotation"),
        span("aten::linear", 1000, 3000),
        span("aten::addmm", 1500, 2000),
        span("aten::bmm", 4000, 500),
        span("aten::_log_softmax", 4500, 500),
        span("aten::gelu", 5000, 250),
        span("aten::copy_", 5250, 250),
        span("graph_0_cpp_fused__to_copy_add_native_layer_norm_2", 5500, 500),
        span("Optimizer.step#AdamW.step", 8000, 1500, "user_annotation"),
        span("aten::mul_", 8500, 500),
        span("aten::mm", 20_000, 5000),  # after the last step
    ]
    assert kernels.grouped(step) == {
        "matmul": 2.0,
        "attention": 0.5,
        "softmax and loss": 0.5,
        "normalisation and element-wise": 0.25 + 0.5 + 1.0,  # linear's own time is in here
        "optimizer": 1.5,
        "copies": 0.25,
        "idle": 10 - 0.5 - 0.5 - 2 - 1 - 1.5 - 0.25 - 0.5 - 0.25,
    }


def test_kernels_of_a_gpu_are_grouped_by_their_name_and_by_what_launched_them():
    gemm = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
    launches = ["aten::mm", "aten::bmm", "aten::_softmax", "aten::copy_", "aten::gelu", "aten::_foreach_mul_"]
    events = [span(f"ProfilerStep#{n}", 10_000 * n, 10_000, "user_annotation") for n in (0, 1)]
    events += [span(name, 100 * i, 50, **{"External id": i}) for i, name in enumerate(launches)]
    kernel = [
        (gemm, 1000, 0),
        (gemm, 200, 1),  # the same kernel, but attention's
        ("void cunn_SoftMaxForward", 300, 2),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", 400, 3),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", 500, 4),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 600, 5),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", 700, None),
        ("triton_per_fused__to_copy_native_layer_norm_4", 800, None),
        ("triton_poi_fused__to_copy_1", 900, None),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", 1100, None),
    ]
    for at, (name, length, external) in enumerate(kernel):
        events.append(
            span(name, 2000 + at, length, "kernel", **{"External id": external} if external is not None else {})
        )
    events.append(span("Memcpy HtoD (Pinned -> Device)", 19_000, 50, "gpu_memcpy"))
    events.append(span("ProfilerStep#1", 10_000, 3_000, "gpu_user_annotation"))  # as the GPU saw it
    found = kernels.grouped(events)
    assert found == {  # of two steps
        "matmul": 0.5,
        "attention": 0.65,
        "softmax and loss": 0.5,
        "normalisation and element-wise": 0.65,
        "optimizer": 0.3,
        "copies": 0.675,
        "idle": 10 - 3.275,
    }


@pytest.mark.slow
def test_the_time_of_a_real_step_is_all_there(run):
    done = run("tools/kernels.py", ROOT / "baseline.py", "--steps", measure.PROFILED_STEPS)
    assert done.returncode == 0, done.stderr
    groups = json.loads(done.stdout.splitlines()[-1])
    printed = [float(step["ms"]) for step in done.steps[5:8]]
    assert min(printed) / 1.25 < sum(groups.values()) < 1.25 * max(printed)
    assert groups["idle"] < sum(groups.values()) / 5
    assert min(groups[kind] for kind in ("matmul", "softmax and loss", "optimizer", "attention")) > 0
    assert list(groups) == list(render.GROUPS)


# ---- peers


UPDATES = """
import json, runpy, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook

def say(optimizer, *_):
    groups = sorted(
        [g["weight_decay"], g["lr"], *g["betas"], g["eps"], bool(g["fused"]), sum(p.numel() for p in g["params"])]
        for g in optimizer.param_groups
    )
    squares = sum(p.grad.double().pow(2).sum().item() for g in optimizer.param_groups for p in g["params"])
    print(json.dumps([groups, squares**0.5]))

register_optimizer_step_pre_hook(say)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def updates(run, small, tmp_path_factory):
    """Run a script and return it with what its optimizer was given at each step."""
    folder = tmp_path_factory.mktemp("updates")
    (folder / "updates.py").write_text(UPDATES)

    def call(script, *words, **environment):
        arguments = [*words, "--model", "nano", "--batch-size", 2, "--seq-len", 32, "--steps", 14]
        path = f"{ROOT / 'tests' / 'offline'}{os.pathsep}{small / 'tools'}"
        done = run("updates.py", small / script, *arguments, folder=folder, PYTHONPATH=path, **environment)
        assert done.returncode == 0, done.stderr
        done.updates = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(done.updates) == len(done.losses) == 14
        return done

    return call


@pytest.fixture(scope="module")
def rung_10(updates):
    return updates("speedup_10_fused_adamw.py", **EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["plain", "compiled", "trainer"])
def test_a_peer_does_the_task_of_rung_10(peer, updates, rung_10):
    done = updates("tools/peers.py", peer, **EAGER if peer == "trainer" else {})  # one that is compiled will do
    assert done.losses == pytest.approx(rung_10.losses, abs=4e-3)  # 47 rows of padding, bf16
    assert rung_10.losses[-1] < rung_10.losses[0] - 0.05
    for (theirs, their_norm), (ours, our_norm) in zip(done.updates, rung_10.updates, strict=True):
        ours[1][-1] -= 47 * 32  # the padding, in the group that decays
        assert theirs[0] == pytest.approx(ours[0]) and theirs[1] == pytest.approx(ours[1])
        assert their_norm == pytest.approx(our_norm, rel=1e-2) == pytest.approx(1, rel=1e-2)  # clipped
        ours[1][-1] += 47 * 32


@pytest.fixture(scope="module")
def watched():
    """Peer -> (what it did in order, the type of each step's logits), on a CPU that has bf16, nothing compiled."""

    @functools.cache
    def watched(peer):
        peers, rung, events, dtypes = load("tools/peers.py"), load("speedup_10_fused_adamw.py"), [], []
        build, loader = peers.build, rung.DataLoaderLite
        said = {"clock": time.perf_counter, "next_batch": loader.next_batch, "backward": torch.autograd.backward}

        def saying(name):
            return lambda *args, **options: (events.append(name), said[name](*args, **options))[1]

        def forward(head, inputs, logits):
            events.append("forward")
            dtypes.append(logits.dtype)

        def build_and_look(name):
            model = build(name)
            model.lm_head.register_forward_hook(forward)
            return model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda *args, **options: (events.append("compile"), args[0])[1])
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
            patch.setattr(peers, "build", build_and_look)
            patch.setattr(peers, "time", SimpleNamespace(perf_counter=saying("clock")))
            patch.setattr(loader, "next_batch", saying("next_batch"))
            patch.setattr(torch.autograd, "backward", saying("backward"))
            words = f"peers.py {peer} --model nano --batch-size 2 --seq-len 16 --steps 3 --device cpu"
            patch.setattr("sys.argv", words.split())
            hook = register_optimizer_step_pre_hook(lambda *_: events.append("step"))
            try:
                peers.main()
            finally:
                hook.remove()
        return events, dtypes

    return watched


@pytest.mark.parametrize("peer", ["plain", "compiled", "trainer"])
def test_a_peers_step_is_timed_with_its_batch(peer, watched):
    steps = "".join(f"{event} " for event in watched(peer)[0] if event != "compile").split("clock ")[1::2]
    if peer == "trainer":  # it fetches one batch ahead, the first two in the first step; after the last it logs the run
        assert steps.pop() == "" and steps[0].startswith("next_batch ")
        steps[0] = steps[0].removeprefix("next_batch ")
    assert [sorted(step.split()) for step in steps] == 3 * [["backward", "forward", "next_batch", "step"]]


@pytest.mark.parametrize("peer, fast", [("plain", False), ("compiled", True), ("trainer", True)])
def test_a_peer_is_compiled_and_in_bf16_if_it_says_so(peer, fast, watched):
    events, dtypes = watched(peer)
    assert events.count("compile") == int(fast)
    assert dtypes == 3 * [torch.bfloat16 if fast else torch.float32]


def test_the_peers_have_the_attention_that_transformers_takes_by_default():
    from transformers import GPT2Config, GPT2LMHeadModel

    kind = load("tools/peers.py").build("nano").config._attn_implementation
    assert kind == GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)).config._attn_implementation == "sdpa"


def test_a_peers_clock_waits_for_the_gpu():
    report = load("tools/peers.py").Report(torch.device("cuda"), tokens=32)
    with made_up_gpu() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: events.append("clock"))
        report.clock()
    assert events == ["synchronize", "clock"]


# ---- a measurement of made-up scripts

SCRIPT = """
import os, sys, time, pathlib
name, here = pathlib.Path(__file__).name, pathlib.Path(__file__).parent
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
B, T, steps = (int(flags[f"--{flag}"]) for flag in ("batch-size", "seq-len", "steps"))
with open(here / "order.txt", "a") as file:
    print(name, B, steps, file=file)
if B * T + 1 > 10_000:
    sys.exit(print(f"{name}: error: 10000 tokens are too few", file=sys.stderr) or 2)
broken = here / f"{name}.broken"
if broken.exists() or B > LIMIT:
    print(f"{name}: error: out of memory with B {B} and T {T}: lower it", file=sys.stderr)
    status = int(broken.read_text()) if broken.exists() else 1
    sys.exit(status) if status > 0 else os.kill(os.getpid(), -status)
print(f"device cpu (made up) | torch 2 | nano 1,000 parameters | B {B} T {T}")
for step in range(steps):
    print(f"step {step:4d} | loss {9 - step / 10:.6f} | dt {TIME * B:8.2f} ms | {1:10,.0f} tok/s", flush=True)
    while (here / f"{name}.slow").exists():
        time.sleep(0.01)
print(f"median of steps 0-1: 1.00 ms, 1 tok/s, peak memory {B:.2f} GiB")
"""
GROUPS = dict.fromkeys(render.GROUPS, 1.0)


def test_the_rows_are_the_twelve_scripts_and_what_is_asked_for():
    ladder = """
        baseline.py speedup_01_weight_tying.py speedup_02_tf32.py speedup_03_bf16.py speedup_04_residual_init.py
        speedup_05_compile.py speedup_06_flash_attn.py speedup_07_vocab_pad.py speedup_08_adamw_clip.py
        speedup_09_cosine_lr.py speedup_10_fused_adamw.py ddp_run.py
    """.split()
    branches = ["branches/fsdp_run.py", "branches/fp16_grad_scaler.py"]
    peers = ["ddp_run.py under torchrun", "transformers, plain loop", "transformers, bf16, compiled"]
    peers.append("transformers.Trainer")
    for wanted, row_names in (
        ({"peers": False, "branches": False}, ladder),
        ({"peers": False, "branches": True}, ladder + branches),
        ({"peers": True, "branches": False}, ladder + peers),
        ({"peers": True, "branches": True}, ladder + branches + peers),
    ):
        assert [row.name for row in measure.rows(**wanted)] == row_names


SETTINGS = {"model": "nano", "batch_size": 2, "seq_len": 16, "steps": 1, "device": "cpu"}
SCRIPTS = [row.words[0] for row in measure.rows(peers=False, branches=True)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_row_counts_the_tokens_that_its_script_trains_on(script):
    (row,) = (row for row in measure.rows(peers=False, branches=True) if row.words[0] == script)
    printed = play(*measure.command(row, SETTINGS))
    ms, rate = re.search(r"dt +(\S+) ms \| +(\S+) tok/s", printed).groups()
    assert float(rate.replace(",", "")) * float(ms) / 1000 == pytest.approx(2 * 16, rel=0.05)


@pytest.fixture
def made_up(tmp_path):
    """A project of three made-up scripts, c.py out of memory from B 13 on, with its own roof, machine and profiler."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "results").mkdir()
    (tmp_path / "input.txt").touch()
    shutil.copy(ROOT / "results" / "ladder.schema.json", tmp_path / "results")
    rows = "".join(
        f'[[rung]]\nfile = "{name}.py"\nidea = ""\ntouches = []\nlimit = 1\nprecision = "float32"\n' for name in "abc"
    )
    (tmp_path / "ladder.toml").write_text(rows)
    for name, ms, limit in (("a", 8, 9), ("b", 4, 9), ("c", 2, 12)):
        (tmp_path / f"{name}.py").write_text(SCRIPT.replace("TIME", str(ms)).replace("LIMIT", str(limit)))
    ceiling = measurement(record("a", [SLOW]), float32=0.5)["roof"]
    (tmp_path / "tools" / "roof.py").write_text(f"print('''{json.dumps(ceiling)}''')")
    (tmp_path / "tools" / "machine.py").write_text(f"print('''{json.dumps(MACHINE)}''')")
    (tmp_path / "tools" / "kernels.py").write_text(
        "import json, runpy, sys\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"print(json.dumps({GROUPS}))\n"
    )

    def call(*arguments):
        words = [sys.executable, "tools/measure.py", "--model", "nano", "--steps", "4", *map(str, arguments)]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    def order():
        lines = (tmp_path / "order.txt").read_text().splitlines()
        (tmp_path / "order.txt").write_text("")
        return [line.split(".")[0] for line in lines]

    def result(folder=None):
        (path,) = (folder or tmp_path / "results").glob("**/ladder.json")
        return path, render.read(path)  # which validates it

    return SimpleNamespace(folder=tmp_path, call=call, order=order, result=result)


def test_the_passes_are_interleaved_and_all_is_written(made_up):
    done = made_up.call("--repeat", 2, "--profile")
    assert (done.returncode, done.stderr) == (0, "")
    assert made_up.order() == list("abccba" + "abc")  # the last three under the profiler
    path, data = made_up.result()
    assert path.parent.name.startswith("cpu-made-up-r-9000-20")
    assert [row["tokens_per_s"] for row in data["rows"]] == [4 * 128 / 0.032, 4 * 128 / 0.016, 4 * 128 / 0.008]
    assert [row["over_baseline"]["median"] for row in data["rows"]] == [1, 2, 4]
    assert [row["profile"]["groups_ms"] for row in data["rows"]] == [GROUPS] * 3
    assert data["finished"] and data["rows"][0]["runs"][1]["pass"] == 1
    assert data["rows"][0]["runs"][0]["cold"] and not data["rows"][0]["runs"][1]["cold"]
    plots = {f"{name}.svg" for name in ("tokens", "memory", "loss-steps", "loss-time", "kernels")}
    assert {file.name for file in path.parent.iterdir()} == plots | {"ladder.json", "summary.txt"}
    assert (path.parent / "summary.txt").read_text() in done.stdout
    again = made_up.call("--repeat", 2, "--profile")
    assert again.returncode == 0 and made_up.order() == []  # nothing was left to do
    assert made_up.result()[1] == data


@pytest.mark.parametrize("broken", [{"a": 2}, {"b": 1, "c": -9}])
def test_a_script_that_fails_is_a_row_and_is_tried_again(made_up, broken):
    for name, status in broken.items():
        (made_up.folder / f"{name}.py.broken").write_text(str(status))
    done = made_up.call("--repeat", 2, "--profile")
    assert (done.returncode, done.stderr) == (0, "") and made_up.order() == list("abccba" + "abc")
    for name, status in broken.items():
        said = f"{name}.py: error: out of memory with B 4 and T 128" if status > 0 else "killed by SIGKILL"
        assert f"pass 1/2  {name}.py: {said}" in done.stdout
    _, data = made_up.result()
    assert [row["name"][0] for row in data["rows"] if row["error"]] == list(broken) and data["finished"]
    for name in broken:
        (made_up.folder / f"{name}.py.broken").unlink()
    done = made_up.call("--repeat", 2, "--profile")
    again = list(broken)
    assert done.returncode == 0 and made_up.order() == again + again[::-1] + again
    assert "measured already: what failed is tried again" in done.stdout
    assert [row["error"] or row["profile"]["error"] for row in made_up.result()[1]["rows"]] == [None] * 3


def test_all_failing_is_a_failure_after_one_pass(made_up):
    done = made_up.call("--repeat", 3, "--profile", "--batch-size", 100)
    assert done.returncode == 1 and done.stderr == "measure.py: error: every script failed\n"
    assert done.stdout.count("a.py: error: 10000 tokens are too few") == 2  # as it happened, and in the table
    assert made_up.order() == list("abc")


@pytest.mark.parametrize(
    "sent, status", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(made_up, sent, status):
    (made_up.folder / "b.py.slow").touch()
    words = [sys.executable, "tools/measure.py", "--model", "nano", "--steps", "4"]
    child = subprocess.Popen(words, cwd=made_up.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "pass 1/1  a.py" not in child.stdout.readline():
        assert child.poll() is None
    while "b.py" not in (made_up.folder / "order.txt").read_text():
        time.sleep(0.01)
    os.kill(child.pid, sent)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == status and "Traceback" not in errors
    _, data = made_up.result()
    assert [len(row["runs"]) for row in data["rows"]] == [1, 0, 0] and not data["finished"]
    (made_up.folder / "b.py.slow").unlink()
    assert made_up.order() == list("ab")
    assert made_up.call().returncode == 0 and made_up.order() == list("bc")
    assert made_up.result()[1]["finished"]


def test_an_interrupted_measurement_shows_what_it_has(made_up):
    (made_up.folder / "c.py.slow").touch()
    words = [sys.executable, "tools/measure.py", "--model", "nano", "--steps", "4"]
    child = subprocess.Popen(words, cwd=made_up.folder, stdout=subprocess.PIPE, text=True)
    while "pass 1/1  b.py" not in child.stdout.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    printed, _ = child.communicate(timeout=60)
    assert re.search(r"^b\.py .* 2\.00×", printed, re.MULTILINE)
    assert re.search(r"^c\.py +not measured yet", printed, re.MULTILINE)
    assert printed.endswith("not finished: run the same command again to continue\n")


def test_another_measurement_is_never_written_over(made_up):
    assert made_up.call().returncode == 0
    path, _ = made_up.result()
    before = path.read_bytes()
    done = made_up.call("--repeat", 5, "--out", path.parent)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "holds a measurement with other settings: name another folder" in done.stderr
    assert path.read_bytes() == before
    assert made_up.call("--repeat", 5).returncode == 0  # by itself it takes a free folder
    other = path.parent.with_name(f"{path.parent.name}-2")
    assert made_up.result(other)[1]["settings"]["repeat"] == 5
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch-size", 0], "at least 1"),
        (["--steps", "many"], "many"),
        (["--fit"], "--fit takes a GPU"),
        (["--out", "a.py"], "a.py"),
        (["--out", "broken"], "ladder.json is no measurement"),
        (["--out", "foreign"], "ladder.json is no measurement"),
    ],
)
def test_a_mistake_is_one_line(made_up, arguments, said):
    for name, text in (("broken", '{"settings": {'), ("foreign", '{"speed": "fast"}')):
        (made_up.folder / name).mkdir()
        (made_up.folder / name / "ladder.json").write_text(text)
    done = made_up.call(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("measure.py: error: ") and said in done.stderr
    assert (made_up.folder / "broken" / "ladder.json").read_text() == '{"settings": {'
    assert [path.name for path in (made_up.folder / "results").iterdir()] == ["ladder.schema.json"]


def test_one_gpu_alone_is_measured_and_nothing_overrides_its_precision(made_up, monkeypatch):
    machine = MACHINE | {"device": "cuda:1", "device_memory_gib": 80.0, "driver": "1", "cuda": "1"}
    (made_up.folder / "tools" / "machine.py").write_text(f"print('''{json.dumps(machine)}''')")
    look = "import os, sys\nopen('seen.txt', 'a').write(f'{dict(os.environ)} {sys.argv}\\n')\n"
    (made_up.folder / "a.py").write_text(look + (made_up.folder / "a.py").read_text())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert made_up.call("--repeat", 1).returncode == 0
    seen = (made_up.folder / "seen.txt").read_text()
    assert "'CUDA_VISIBLE_DEVICES': '7'" in seen and "'--device', 'cuda'" in seen
    assert "NVIDIA_TF32_OVERRIDE" not in seen


def test_other_sources_are_another_measurement(made_up):
    assert made_up.call().returncode == 0
    with (made_up.folder / "b.py").open("a") as file:
        file.write("# edited\n")
    made_up.order()
    assert made_up.call().returncode == 0 and made_up.order() == list("abc")


def test_fit_finds_the_largest_batch_and_measures_there(made_up):
    gpu = MACHINE | {"device": "cuda", "device_memory_gib": 80.0, "driver": "1", "cuda": "1"}
    (made_up.folder / "tools" / "machine.py").write_text(f"print('''{json.dumps(gpu)}''')")
    (made_up.folder / "c.py").write_text((made_up.folder / "c.py").read_text().replace("B > 12", "B > 10**9"))
    done = made_up.call("--fit", "--repeat", 1)
    assert done.returncode == 0, done.stderr
    fits = [row["fit"] for row in made_up.result()[1]["rows"]]
    # the grid's last up to 9; 78 * 128 + 1 tokens are the text
    assert [fit["batch_size"] for fit in fits] == [8, 8, 64]
    assert all("out of memory with B 10 and T 128" in fit["limit"] for fit in fits[:2])
    assert fits[2]["limit"] == "c.py: error: 10000 tokens are too few"
    assert [fit["tokens_per_s"] for fit in fits] == [16_000, 32_000, 64_000]
    assert fits[2]["peak_memory_gib"] == 64
    trials = [line for line in made_up.folder.joinpath("order.txt").read_text().splitlines() if line.startswith("b")]
    assert len(trials) == 4  # the pass, 8, 10, and the measurement at 8: it starts where a.py ended


# ---- figures


def test_the_newest_of_each_device_and_model_is_shown_gpus_first(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "ladder.schema.json", tmp_path / "results")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    for name, device, model, day, finished in (
        ("old", "cpu", "nano", 1, True),
        ("new", "cpu", "nano", 2, True),
        ("stopped", "cpu", "nano", 4, False),
        ("large", "cpu", "gpt2", 3, True),
        ("gpu", "cuda", "gpt2", 1, True),
    ):
        data = measurement(record("a.py", [SLOW]))
        data["machine"]["device"], data["machine"]["name"], data["settings"]["model"] = device, device, model
        data["finished"] = f"2026-01-0{day}T00:00:00+00:00" if finished else None
        (tmp_path / "results" / name).mkdir()
        render.save(tmp_path / "results" / name / "ladder.json", data)
    assert [folder.name for folder in render.newest()] == ["gpu", "large", "new"]


def shown(figure):
    """What a reader sees of a figure: (the label of x, {bar or curve: its lengths or points})."""
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    bars = {}
    for container in axes.containers:
        for name, bar in zip(names, container, strict=True):
            bars.setdefault(name, {})[container.get_label()] = (bar.get_x(), bar.get_width())
    return axes.get_xlabel(), lines or bars


def test_a_figure_shows_each_row_under_its_own_name():
    data = measurement(record("a.py", [SLOW], memory=3.0), record("b.py", [FAST], "a.py"), float32=0.5)
    for row, ms in zip(data["rows"], (2.0, 1.0), strict=True):
        row["profile"] = {"groups_ms": {kind: ms * i for i, kind in enumerate(render.GROUPS)}, "error": None}
    figures = render.figures(data)
    unit, speeds = shown(figures["tokens"])
    assert unit == "tokens per second" and [[*bars.values()] for bars in speeds.values()] == [[(0, 5120)], [(0, 10240)]]
    assert list(speeds) == ["a.py", "b.py"]
    assert [text.get_text() for text in figures["tokens"].axes[0].texts] == ["5,120 · 1.00×", "10,240 · 2.00×"]
    unit, memory = shown(figures["memory"])
    assert unit == "GiB" and [[*bars.values()] for bars in memory.values()] == [[(0, 3)], [(0, 1.5)]]
    assert [text.get_text() for text in figures["memory"].axes[0].texts] == ["3.00", "1.50"]
    unit, curves = shown(figures["loss-steps"])
    losses = data["rows"][0]["runs"][0]["losses"]
    assert unit == "step" and curves == {name: (list(range(20)), losses) for name in ("a.py", "b.py")}
    unit, curves = shown(figures["loss-time"])
    assert unit.startswith("seconds") and list(curves) == ["a.py", "b.py"]
    assert (curves["a.py"][0][0], curves["a.py"][0][-1]) == (0, pytest.approx(9 * 0.9 + 10 * 0.1))
    assert (curves["b.py"][0][0], curves["b.py"][0][-1]) == (0, pytest.approx(9 * 0.9 + 10 * 0.05))
    unit, kinds = shown(figures["kernels"])
    assert unit.startswith("milliseconds per step")
    for name, ms in ("a.py", 2.0), ("b.py", 1.0):
        lefts = [sum(ms * i for i in range(kind)) for kind in range(len(render.GROUPS))]
        assert kinds[name] == {kind: (lefts[i], ms * i) for i, kind in enumerate(render.GROUPS)}


def test_drawing_again_changes_nothing(tmp_path):
    data = measurement(record("a.py", [SLOW]), record("b.py", [FAST], "a.py"), float32=0.5)
    data["rows"][0]["profile"] = {"groups_ms": GROUPS, "error": None}
    for folder in ("first", "second"):
        names = render.draw(data, tmp_path / folder)
        assert names == ["tokens", "memory", "loss-steps", "loss-time", "kernels"]
    for path in (tmp_path / "first").iterdir():
        svg = path.read_text()
        assert svg == (tmp_path / "second" / path.name).read_text()
        assert "prefers-color-scheme: dark" in svg
        for unit in {"tokens": ["tokens per second"], "memory": ["GiB"], "kernels": ["milliseconds per step"]}.get(
            path.stem, ["nats per token", "step"]
        ):
            assert unit in svg


def test_the_readme_and_its_figures_are_those_of_the_results(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\((results/[^)]+)/ladder.json\)", readme)  # a reader may have measured since
    assert shown
    figures = (ROOT / "docs" / "img").glob("*.svg")
    kept = {path: path.read_bytes() for path in figures if not path.name.startswith("pretrain-")}  # tools/curve.py's
    start, end = readme.index(render.BEGIN) + len(render.BEGIN), readme.index(render.END)
    copy = copy_project(tmp_path / "project")
    shutil.rmtree(copy / "docs")
    (copy / "docs" / "img").mkdir(parents=True)
    (copy / "docs" / "img" / "a-users-own.svg").touch()
    (copy / "docs" / "img" / "an-older-one-tokens.svg").touch()
    words = [sys.executable, "tools/render.py", *shown]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (copy / "README.md").read_text(encoding="utf-8")[start:end] == readme[start:end]
    assert (copy / "docs" / "img" / "a-users-own.svg").exists()
    (copy / "docs" / "img" / "a-users-own.svg").unlink()
    drawn = {ROOT / path.relative_to(copy): path.read_bytes() for path in (copy / "docs" / "img").iterdir()}
    assert sorted(drawn) == sorted(kept)
    if sys.version_info >= (3, 11):  # before it another matplotlib draws
        assert drawn == kept


def test_render_refuses_what_is_no_measurement(tmp_path):
    copy = copy_project(tmp_path / "project")
    (copy / "results" / "empty").mkdir()
    (copy / "results" / "empty" / "ladder.json").write_text("{}")
    (copy / "elsewhere").mkdir()

    def written():
        return {path: path.read_bytes() for path in (copy / "README.md", *(copy / "docs" / "img").iterdir())}

    before = written()
    for folder, said in (
        ("results/empty", "is no measurement"),
        ("results/nowhere", "No such file"),
        ("elsewhere", "is not in results/"),
    ):
        done = subprocess.run([sys.executable, "tools/render.py", folder], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("render.py: error: ") and said in done.stderr
        assert written() == before and len(before) > 5


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/ladder.json")), ids=lambda path: path.parent.name)
def test_committed_results_are_valid_and_add_up(path):
    data = render.read(path)
    text = json.dumps(data)
    measure.summarise(data)
    assert json.dumps(data) == text


# ---- the real thing


@pytest.mark.slow
def test_make_ladder_measures_every_row(clone):
    """With all that a CPU can do, on the real scripts, uncompiled: ended by Ctrl-C halfway, and then continued.

    Rungs 01, 02 and 04 to 09 are left out, which a measurement treats as it does the others.
    """
    ladder, left_out = clone / "ladder.toml", r'\[\[rung\]\]\nfile = "speedup_0[124-9].*?(?=\[\[rung\]\])'
    ladder.write_text(re.sub(left_out, "", ladder.read_text(encoding="utf-8"), flags=re.DOTALL), encoding="utf-8")
    for script in (*since(5), "tools/peers.py"):  # a measurement drops TORCH_COMPILE_DISABLE, which would change it
        text = (clone / script).read_text(encoding="utf-8").replace("torch_compile=True", "torch_compile=False")
        (clone / script).write_text(text.replace("model.compile(", "dict("), encoding="utf-8")
    flags = "--model nano --device cpu --batch-size 1 --seq-len 16 --steps 2 --peers --branches --profile"
    command = ["make", "ladder", f"ARGS={flags}"]
    printed, _ = press_ctrl_c_at("pass 1/1  baseline.py: ", command, clone)
    assert "\nnot finished: run the same command again to continue\n" in printed
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "pass 1/1  baseline.py" not in done.stdout and "pass 1/1  speedup_03_bf16.py: " in done.stdout
    (path,) = [path for path in clone.glob("results/*/ladder.json") if not (ROOT / path.relative_to(clone)).exists()]
    data = render.read(path)
    rows = [row.name for row in measure.rows(peers=True, branches=True)]
    assert [row["name"] for row in data["rows"]] == [name for name in rows if not re.match("speedup_0[124-9]", name)]
    for row in data["rows"]:
        assert row["error"] is None and len(row["runs"]) == 1 and len(row["runs"][0]["times_ms"]) == 2, row["name"]
        ceiling = data["roof"]["ceilings_tflops"].get(row["precision"])  # a CPU may have none for fp16
        assert 0 < row["roof_share"] < 1 if ceiling else row["precision"] == "fp16", row["name"]
        under_torchrun = row["name"] == "ddp_run.py under torchrun"
        assert under_torchrun or list(row["profile"]["groups_ms"]) == list(render.GROUPS), row["name"]
    rest = 1024 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert [row["parameters"] for row in data["rows"][:2]] == [2 * 50257 * 32 + rest, 50257 * 32 + rest]
    assert data["roof"]["flops_per_token"] == 6 * (2 * 12 * 32**2 + 50257 * 32) + 2 * 12 * 32 * 16
    assert data["rows"][0]["roof_share"] and data["finished"] and data["machine"]["torch"] == torch.__version__
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    assert data["commit"].startswith(head)


@pytest.mark.slow
def test_a_model_that_no_script_knows_is_refused_before_anything_is_measured(tmp_path):
    words = [sys.executable, "tools/measure.py", "--model", "gpt5", "--device", "cpu", "--out", tmp_path / "out"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        "measure.py: error: argument --model: invalid choice: 'gpt5'"
    )
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_measured_speed_agrees_with_an_outside_clock():
    """The lines come as far apart as the steps say they took. The machine is shared: one try of three must agree."""
    command = [sys.executable, ROOT / "speedup_04_residual_init.py", "--steps", "20"]
    for _ in range(3):
        printed, came = "", []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                printed += line
                came += [time.perf_counter()] * line.startswith("step ")
        inside, outside = sum(measure.parse(printed, steps=20)["times_ms"][5:]) / 1000, came[-1] - came[4]
        if inside == pytest.approx(outside, rel=0.05):
            return
    pytest.fail(f"the steps say that they took {inside:.2f} s, and their lines came within {outside:.2f} s")
