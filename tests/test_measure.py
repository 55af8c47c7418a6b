"""`make ladder` measures correctly, stays within its time budget, and can continue a measurement on a different host.

Medians, ratios and percentages of peak are checked on logs with known answers. The measured speed is checked against an
external clock. The peers (training loops around `transformers`) are compared with rung 10 in their losses, gradient
norms and optimizer settings.
"""

import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import compare
import pytest
import record
import render
import torch
from conftest import EAGER, ROOT, copy_project, load, made_up_gpu, play, press_ctrl_c_at, since
from torch.optim.optimizer import register_optimizer_step_pre_hook

import measure

MACHINE = {"device": "cpu", "name": "Made Up(R) 9000", "cpu": "Made Up", "capability": "AVX2", "cores": 2, "threads": 2}
MACHINE |= {"memory_gib": 8.0, "torch": "2", "python": "3", "system": "Linux"}
MACHINE |= dict.fromkeys(("device_memory_gib", "driver", "cuda", "cudnn", "gpu_id"))
GPU = MACHINE | {"device": "cuda", "threads": 2, "device_memory_gib": 80.0, "driver": "1", "cuda": "1", "cudnn": 91501}
HOST = {"id": "0", "gpu": None} | {key: value for key, value in MACHINE.items() if key not in measure.MACHINE}

# ---- arithmetic


def log(times, losses=None, memory=1.5, rate=0):
    """Return the output of a script whose steps take `times` milliseconds."""
    lines = ["device cpu (made up) | torch 2 | nano 7,000,000 parameters | B 4 T 128", "loaded 338025 tokens"]
    for step, ms in enumerate(times):
        loss = losses[step] if losses else 10 - step / 100
        lines.append(f"step {step:4d} | loss {loss:.6f} | lr 6.0000e-04 | dt {ms:8.2f} ms | {rate:10,.0f} tok/s")
    return "\n".join([*lines, f"median of steps 0-1: 1.00 ms, 1 tok/s, peak memory {memory:.2f} GiB\n"])


def made(name, passes, before=None, precision="float32", errors=(), memory=1.5, hosts=None):
    """Return a row of ladder.json with the step times in `passes`, one list per pass."""
    runs = []
    for number, times in enumerate(passes):
        error = dict(errors).get(number)
        run = record.parse(log(times, memory=memory), error or "", 1 if error else 0, len(times))
        about = {"pass": number, "started": "2026-01-02T03:04:05+00:00", "host": (hosts or "0" * 9)[number]}
        about |= {"busy": None, "cold": number == 0, "process_s": 9.0, "gpu": None}
        runs.append(about | run)
    row = {"name": name, "kind": "rung", "before": before, "precision": precision, "command": f"python {name}"}
    return row | {"runs": runs, "profile": None, "fit": None}


def measurement(*rows, **ceilings):
    settings = {"model": "nano", "batch_size": 4, "seq_len": 128, "steps": 20, "device": "cpu", "repeat": 2, "only": []}
    data = {
        "settings": settings | dict.fromkeys(("peers", "branches", "profile", "batches", "fit"), False),
        "machine": {key: MACHINE[key] for key in measure.MACHINE},
        "sources_sha256": "",
        "command": "python measure/measure.py",
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:14:05+00:00",
        "complete": True,
        "commits": ["0123456789" * 4],
        "hosts": [dict(HOST)],
        "roof": {"flops_per_token": 2_000_000_000, "ceilings_tflops": ceilings, "copy_gb_per_s": 20.0, "matmul": []},
        "rows": list(rows),
        "batches": [],
    }
    data["roof"]["gpu"] = None
    record.summarise(data)
    return data


SLOW, FAST = [900.0] * 10 + [100.0] * 10, [900.0] * 10 + [50.0] * 10


def test_a_log_is_read_as_printed():
    run = record.parse(log([12.5, 7.25], [10.5, 9.25], memory=2.75), steps=2)
    known = {"times_ms": [12.5, 7.25], "losses": [10.5, 9.25], "peak_memory_gib": 2.75, "parameters": 7_000_000}
    assert run == known | {"error": None}


def test_the_median_covers_the_same_steps_as_in_the_scripts():
    assert record.steady(list(range(20))) == list(range(10, 20))
    assert record.steady(list(range(50))) == list(range(10, 50))
    assert record.steady(list(range(19))) == list(range(9, 19))
    assert record.steady([5.0]) == [5.0]


def test_a_ratio_is_of_two_runs_on_one_host():
    data = measurement(made("a", [SLOW, SLOW]), made("b", [FAST, [10.0] * 20], before="a", hosts="01"))
    assert data["rows"][1]["over_before"] == {"median": 2, "low": 2, "high": 2}


def test_known_times_give_known_medians_ratios_and_shares():
    uneven = [900.0] * 10 + [40, 40, 40, 50, 50, 50, 50, 60, 60, 80.0]
    data = measurement(made("a", [SLOW]), made("b", [uneven], before="a", precision="bf16"), float32=40.0, bf16=50.0)
    a, b = data["rows"]
    assert (a["median_ms"], a["quartiles_ms"], a["tokens_per_s"]) == (100, [100, 100], 5120)  # 4 * 128 / 0.1 s
    assert (b["median_ms"], b["quartiles_ms"], b["tokens_per_s"]) == (50, [42.5, 57.5], 10240)
    assert b["over_baseline"] == b["over_before"] == {"median": 2, "low": 2, "high": 2}
    assert a["over_baseline"]["median"] == 1 and a["over_before"] is None
    assert a["first_step_s"] == 0.9 and a["peak_memory_gib"] == 1.5 and a["parameters"] == 7_000_000
    assert a["tflops"] == 5120 * 2e9 / 1e12 and b["tflops"] == 2 * a["tflops"]
    assert a["roof_share"] == pytest.approx(0.256, rel=1e-3)  # 10.24 TFLOP/s of 40
    assert b["roof_share"] == pytest.approx(0.4096, rel=1e-3)


def test_a_ratio_is_taken_within_a_pass_and_its_spread_over_the_passes():
    # The machine is half as fast in the second pass. A comparison of a run from the first pass with a run from the
    # second would show b to be 1 or 4 times as fast as a.
    slower = [2 * ms for ms in SLOW], [2 * ms for ms in FAST]
    data = measurement(made("a", [SLOW, slower[0], SLOW]), made("b", [FAST, slower[1], [40.0] * 20], before="a"))
    assert data["rows"][1]["over_before"] == {"median": 2, "low": 2, "high": 2.5}


def test_a_pass_that_failed_is_left_out_of_both_sides():
    errors = [(0, "a.py: error: out of memory with B 4 and T 128")]
    data = measurement(made("a", [SLOW, SLOW]), made("b", [[1.0] * 20, FAST], "a", errors=errors))
    assert data["rows"][1]["over_before"]["high"] == 2
    assert data["rows"][1]["error"].startswith("a.py: error: out of memory")
    assert data["rows"][1]["first_step_s"] is None  # the only cold pass failed
    assert "a pass failed" in render.summary(data)


def test_a_failed_rung_is_a_row_with_its_error():
    errors = [(0, "warning\nb.py: error: out of memory with B 4 and T 128: lower --batch-size\n")]
    data = measurement(made("a", [SLOW]), made("b", [[]], "a", errors=errors), made("c", [FAST], "b"))
    a, b, c = data["rows"]
    assert b["error"] == "b.py: error: out of memory with B 4 and T 128: lower --batch-size"
    assert b["median_ms"] is None and b["tokens_per_s"] is None and b["over_baseline"] is None
    assert c["over_before"] is None and c["over_baseline"]["median"] == 2
    for text in (render.summary(data), render.part("table.md", table=render.cells(data))):
        assert "out of memory with B 4 and T 128" in text


@pytest.mark.parametrize(
    "status, errors, said",
    [
        (1, "Traceback\n  ...\nValueError: why\n", "ValueError: why"),
        # the expected message is the script's error, although torchrun's report follows it
        (1, "x.py: error: no compiler\n=====\nroot cause\n", "x.py: error: no compiler"),
        (-9, "half a line", "killed by SIGKILL"),
        (3, "", "status 3"),
    ],
)
def test_why_a_run_failed(status, errors, said):
    assert record.parse(log([1.0]), errors, status, 1)["error"] == said


def test_a_log_cut_in_half_keeps_its_whole_lines():
    whole = log(SLOW)
    for length in range(len(whole)):
        run = record.parse(whole[:length], steps=20)
        assert run["times_ms"] == SLOW[: len(run["times_ms"])]
        assert len(run["losses"]) == len(run["times_ms"])
        if len(run["times_ms"]) < 20:
            assert run["error"] == f"ended after {len(run['times_ms'])} of 20 steps"


def test_steps_of_zero_length_are_no_speed():
    data = measurement(made("a", [SLOW]), made("b", [[5.0] * 10 + [0.0] * 10], "a"))
    assert "took no time" in data["rows"][1]["error"]
    assert data["rows"][1]["tokens_per_s"] is None


def test_a_precision_that_the_device_lacks_is_not_held_against_it():
    lines = "no TF32 here: it takes a GPU\nno bf16 here: it takes a GPU that\n"
    assert record.precision_used("bf16", "") == "bf16"
    assert record.precision_used("tf32", lines) == record.precision_used("bf16", lines) == "float32"
    assert record.precision_used("bf16", "no bf16 here") == "tf32"


@pytest.mark.parametrize("start", [1, 16, 32, 4096])
@pytest.mark.parametrize("limit", [0, 1, 3, 16, 40, 64, 127, 128, 10**9])
def test_the_largest_size_that_fits_is_found_in_few_trials(limit, start):
    trials = []

    def fits(size):
        trials.append(size)
        return size <= limit

    assert measure.largest(fits, start) == max((2**n for n in range(13) if 2**n <= limit), default=0)
    assert len(trials) == len(set(trials)) <= 14
    if start == 16:
        assert trials == [16, 64, 128, 256, 512, 1024, 2048, 4096][: len(trials)] or limit < 64


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
    """Return a function that runs a script and returns its process.

    The process's `updates` attribute lists the optimizer's settings and the gradient norm for each step.
    """
    folder = tmp_path_factory.mktemp("updates")
    (folder / "updates.py").write_text(UPDATES)

    def call(script, *words, **environment):
        arguments = [*words, "--model", "nano", "--batch-size", 2, "--seq-len", 32, "--steps", 14]
        path = f"{ROOT / 'tests' / 'offline'}{os.pathsep}{small / 'measure'}"
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
    done = updates("measure/peers.py", peer, **EAGER if peer == "trainer" else {})  # compiling one peer is enough
    assert done.losses == pytest.approx(rung_10.losses, abs=4e-3)  # padding rows and bf16 change the losses slightly
    assert rung_10.losses[-1] < rung_10.losses[0] - 0.05
    for (theirs, their_norm), (ours, our_norm) in zip(done.updates, rung_10.updates, strict=True):
        ours[1][-1] -= 47 * 32  # the peer has no padding rows; do not count ours in the weight-decay group
        assert theirs[0] == pytest.approx(ours[0]) and theirs[1] == pytest.approx(ours[1])
        assert their_norm == pytest.approx(our_norm, rel=1e-2) == pytest.approx(1, rel=1e-2)  # clipped to 1
        ours[1][-1] += 47 * 32


@pytest.fixture(scope="module")
def watched():
    """Return a function that runs a peer and returns (its calls in order, the dtype of each step's logits).

    The peer runs uncompiled, as if the CPU supported bf16.
    """

    @functools.cache
    def watched(peer):
        peers, rung, events, dtypes = load("measure/peers.py"), load("speedup_10_fused_adamw.py"), [], []
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
    # Trainer prefetches one batch, so the first step fetches two. It reads the clock again to log the run at the end.
    if peer == "trainer":
        assert steps.pop() == "" and steps[0].startswith("next_batch ")
        steps[0] = steps[0].removeprefix("next_batch ")
    assert [sorted(step.split()) for step in steps] == 3 * [["backward", "forward", "next_batch", "step"]]


@pytest.mark.parametrize("peer, fast", [("plain", False), ("compiled", True), ("trainer", True)])
def test_a_peer_named_compiled_bf16_is_compiled_and_in_bf16(peer, fast, watched):
    events, dtypes = watched(peer)
    assert events.count("compile") == int(fast)
    assert dtypes == 3 * [torch.bfloat16 if fast else torch.float32]


def test_the_peers_have_the_attention_that_transformers_takes_by_default():
    from transformers import GPT2Config, GPT2LMHeadModel

    kind = load("measure/peers.py").build("nano").config._attn_implementation
    assert kind == GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)])  # V100, T4, A100
@pytest.mark.parametrize("peer", ["plain", "compiled", "trainer"])
def test_a_peer_leaves_out_what_a_gpu_only_emulates_as_rung_10_does(peer, capability, monkeypatch, capsys):
    peers = load("measure/peers.py")

    def look(model, loader, steps, device, report, use_bf16):
        report(1.0, 1.0)
        asked.append(use_bf16)

    asked = []
    monkeypatch.setattr(peers, "trainer" if peer == "trainer" else "plain", look)
    monkeypatch.setattr("sys.argv", f"peers.py {peer} --model nano --batch-size 1 --seq-len 8".split())
    with made_up_gpu(None, capability):
        peers.main()
    printed, fast = capsys.readouterr().out, peer != "plain"
    assert asked == [fast and capability >= (8, 0)]
    used = record.precision_used("bf16", printed) if fast else "float32"
    assert used == ("bf16" if asked[0] else "float32")
    assert ("no bf16 here\n" in printed) == ("no TF32 here\n" in printed) == (fast and capability < (8, 0))


@pytest.mark.parametrize(
    "words", ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "CUDA out of memory. Tried to"]
)
def test_a_peer_out_of_memory_prints_one_line(words, monkeypatch, capsys):
    peers = load("measure/peers.py")

    def fail(*args):
        raise RuntimeError(words)

    monkeypatch.setattr(peers, "plain", fail)
    monkeypatch.setattr("sys.argv", "peers.py plain --model nano --batch-size 1 --seq-len 8 --device cpu".split())
    with pytest.raises(SystemExit) as exit:
        peers.main()
    assert exit.value.code == "peers.py: error: out of memory with B 1 and T 8"
    assert record.too_large(exit.value.code) == "memory"


def test_a_peers_clock_waits_for_the_gpu():
    report = load("measure/peers.py").Report(torch.device("cuda"), tokens=32)
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
    sys.exit(print(f"{name}: error: 10000 tokens, but B {B} and T {T} need more", file=sys.stderr) or 2)
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
PROFILE = {"groups_ms": GROUPS, "attention": "flash", "reserved_gib": 2.5}


def test_the_rows_are_the_twelve_scripts_and_what_is_asked_for():
    ladder = """
        baseline.py speedup_01_weight_tying.py speedup_02_tf32.py speedup_03_bf16.py speedup_04_residual_init.py
        speedup_05_compile.py speedup_06_flash_attn.py speedup_07_vocab_pad.py speedup_08_adamw_clip.py
        speedup_09_cosine_lr.py speedup_10_fused_adamw.py ddp_run.py
    """.split()
    names = (
        "fsdp_run fp16_grad_scaler chunked_loss activation_checkpointing muon regional_compile fp8_head fp16_rung_10"
    )
    branches = [f"branches/{name}.py" for name in names.split()]
    peers = ["ddp_run.py under torchrun", "transformers, plain loop", "transformers, bf16, compiled"]
    peers.append("transformers.Trainer")
    for wanted, row_names in (
        ({}, ladder),
        ({"branches": True}, ladder + branches),
        ({"peers": True}, ladder + peers),
        ({"peers": True, "branches": True}, ladder + branches + peers),
        ({"only": ["05", "06"]}, ladder[4:7]),  # 04 is added as the previous rung of 05
        ({"only": ["baseline", "fp16"]}, [ladder[0], ladder[3], branches[1]]),
        ({"only": ["chunked", "activation"]}, [ladder[10], *branches[2:4]]),
        ({"only": ["ddp"], "peers": True}, ladder[10:] + peers),
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
    """Create a project of three fake scripts with a fake peak, machine and profiler.

    c.py runs out of memory for batch sizes above 12.
    """
    for folder in ("measure", "dev"):
        copy_project(tmp_path, folder)
    (tmp_path / "results").mkdir()
    (tmp_path / "input.txt").touch()
    shutil.copy(ROOT / "results" / "ladder.schema.json", tmp_path / "results")
    rows = "".join(
        f'[[rung]]\nfile = "{name}.py"\ntitle = ""\nidea = ""\ntouches = []\nlimit = 1\nprecision = "float32"\n'
        for name in "abc"
    )
    (tmp_path / "ladder.toml").write_text(rows)
    for name, ms, limit in (("a", 8, 9), ("b", 4, 9), ("c", 2, 12)):
        (tmp_path / f"{name}.py").write_text(SCRIPT.replace("TIME", str(ms)).replace("LIMIT", str(limit)))
    ceiling = measurement(made("a", [SLOW]), float32=0.5)["roof"]
    (tmp_path / "measure" / "roof.py").write_text(f"print('''{json.dumps(ceiling)}''')")

    def on(found):
        (tmp_path / "measure" / "machine.py").write_text(f"print('''{json.dumps(found)}''')")

    on(MACHINE)
    (tmp_path / "measure" / "kernels.py").write_text(
        "import json, runpy, sys\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        f"print(json.dumps({PROFILE}))\n"
    )

    def call(*arguments):
        words = [sys.executable, "measure/measure.py", "--model", "nano", "--steps", "4", *map(str, arguments)]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    def order():
        lines = (tmp_path / "order.txt").read_text().splitlines()
        (tmp_path / "order.txt").write_text("")
        return [line.split(".")[0] for line in lines]

    def result(folder=None):
        (path,) = (folder or tmp_path / "results").glob("**/ladder.json")
        return path, record.read(path)  # record.read() also validates the file

    return SimpleNamespace(folder=tmp_path, call=call, order=order, result=result, on=on)


def test_the_passes_are_interleaved_and_all_is_written(made_up):
    done = made_up.call("--repeat", 2, "--profile")
    assert (done.returncode, done.stderr) == (0, "")
    assert made_up.order() == list("abc" + "abc" + "cba")  # first pass, profiles, second pass in reverse
    path, data = made_up.result()
    assert path.parent.name.startswith("cpu-made-up-r-9000-20")
    assert [row["tokens_per_s"] for row in data["rows"]] == [4 * 128 / 0.032, 4 * 128 / 0.016, 4 * 128 / 0.008]
    assert [row["over_baseline"]["median"] for row in data["rows"]] == [1, 2, 4]
    assert [row["profile"] | PROFILE for row in data["rows"]] == [row["profile"] for row in data["rows"]]
    assert data["finished"] and data["rows"][0]["runs"][1]["pass"] == 1
    assert data["rows"][0]["runs"][0]["cold"] and not data["rows"][0]["runs"][1]["cold"]
    plots = {f"{name}.svg" for name in ("tokens", "memory", "loss-steps", "loss-time", "kernels")}
    assert {file.name for file in path.parent.iterdir()} == plots | {"ladder.json", "summary.txt"}
    assert (path.parent / "summary.txt").read_text() in done.stdout
    again = made_up.call("--repeat", 2, "--profile")
    assert again.returncode == 0 and made_up.order() == []  # nothing was left to do
    assert made_up.result()[1] == data


@pytest.mark.parametrize("git", [None, "exit 128"])
def test_without_git_the_commit_is_unknown_and_all_is_measured(made_up, monkeypatch, git):
    (made_up.folder / "bin").mkdir()
    if git:
        (made_up.folder / "bin" / "git").write_text(f"#!/bin/sh\n{git}\n")
        (made_up.folder / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(made_up.folder / "bin"))
    done = made_up.call("--profile")
    assert (done.returncode, done.stderr) == (0, "") and "Commit unknown" in done.stdout
    data = made_up.result()[1]
    assert data["complete"] and data["commits"] == [None]


@pytest.mark.parametrize("broken", [{"a": 2}, {"b": 1, "c": -9}])
def test_a_script_that_fails_is_a_row_and_is_tried_again(made_up, broken):
    for name, status in broken.items():
        (made_up.folder / f"{name}.py.broken").write_text(str(status))
    done = made_up.call("--repeat", 2, "--profile")
    assert (done.returncode, done.stderr) == (0, "") and made_up.order() == list("abc" + "abc" + "cba")
    for name, status in broken.items():
        said = f"{name}.py: error: out of memory with B 4 and T 128" if status > 0 else "killed by SIGKILL"
        assert f"pass 1/2  {name}.py: {said}" in done.stdout
    _, data = made_up.result()
    assert [row["name"][0] for row in data["rows"] if row["error"]] == list(broken) and data["finished"]
    for name in broken:
        (made_up.folder / f"{name}.py.broken").unlink()
    done = made_up.call("--repeat", 2, "--profile")
    again = list(broken)
    assert done.returncode == 0 and made_up.order() == again + again + again[::-1]
    assert "measured already: failed runs are retried" in done.stdout
    assert [row["error"] or row["profile"]["error"] for row in made_up.result()[1]["rows"]] == [None] * 3


def test_all_failing_is_a_failure_after_one_pass(made_up):
    done = made_up.call("--repeat", 3, "--profile", "--batch-size", 100)
    assert done.returncode == 1 and done.stderr == "measure.py: error: every script failed\n"
    assert (
        done.stdout.count("a.py: error: 10000 tokens, but B 100 and T 128 need more") == 2
    )  # printed when the error occurred, and again in the table
    assert made_up.order() == list("abc")
    made_up.call("--repeat", 3, "--profile", "--batch-size", 100)
    assert made_up.order() == list("abc")  # running the command again tries each script once more


@pytest.mark.parametrize(
    "sent, status", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ctrl_c_keeps_the_measurements_and_the_same_command_continues(made_up, sent, status):
    (made_up.folder / "b.py.slow").touch()
    words = [sys.executable, "measure/measure.py", "--model", "nano", "--steps", "4"]
    child = subprocess.Popen(words, cwd=made_up.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "pass 1/1  a.py" not in child.stdout.readline():
        assert child.poll() is None
    while "b.py" not in (made_up.folder / "order.txt").read_text():
        time.sleep(0.01)
    os.kill(child.pid, sent)
    printed, errors = child.communicate(timeout=60)
    assert child.returncode == status and "Traceback" not in errors
    assert re.search(r"^a\.py .* 1\.00×", printed, re.MULTILINE)
    assert re.search(r"^c\.py +not measured yet", printed, re.MULTILINE)
    assert "pass 1: 1 of 3 rows: a.py\nleft: pass 1\nnot finished: run the same command again" in printed
    _, data = made_up.result()
    assert [len(row["runs"]) for row in data["rows"]] == [1, 0, 0] and not data["finished"]
    (made_up.folder / "b.py.slow").unlink()
    assert made_up.order() == list("ab")
    assert made_up.call().returncode == 0 and made_up.order() == list("bc")
    assert made_up.result()[1]["finished"]


@pytest.mark.slow
def test_the_budget_ends_a_run_that_is_too_long_and_what_was_measured_stays(made_up):
    (made_up.folder / "b.py.slow").touch()
    done = made_up.call("--repeat", 2, "--budget", 0.15)
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("the budget is spent", "pass 1: 1 of 3 rows: a.py", "pass 2: 0 of 3 rows", "left: pass 1, pass 2"):
        assert f"{line}\n" in done.stdout
    assert done.stdout.endswith("not finished: run the same command again\n")
    data = made_up.result()[1]
    assert [len(row["runs"]) for row in data["rows"]] == [1, 0, 0] and not data["finished"] and not data["complete"]
    (made_up.folder / "b.py.slow").unlink()
    made_up.order()
    assert made_up.call("--repeat", 2).returncode == 0 and made_up.order() == list("bccba")
    data = made_up.result()[1]
    assert data["finished"] and data["complete"]
    assert data["command"] == "python measure/measure.py --model nano --steps 4 --repeat 2"


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Return a namespace with `call`, which runs measure.py in this process on fake scripts and returns the record.

    `cut` is the number of runs after which measure.py is stopped, as by Ctrl-C or at the end of its time budget. Each
    `host` has a different CPU and driver.
    """
    state = SimpleNamespace(clock=0.0, host="one", left=None, ran=[])

    def ask(tool, *words):
        if tool == "roof.py":
            return measurement(made("a", [SLOW]), bf16=0.5)["roof"]
        return GPU | {"cpu": f"CPU of {state.host}", "driver": state.host}

    def execute(words, cache, on_step=None):
        state.left = state.left and state.left - 1
        if state.left == 0:
            signal.raise_signal(signal.SIGALRM)
        state.clock += 1
        state.ran.append(shlex.join(words))
        cold = cache.exists() and not list(cache.iterdir())
        (cache / "kernels").mkdir(exist_ok=True)
        script = next(word for word in reversed(words) if word.endswith(".py"))
        steps = int(words[words.index("--steps") + 1])
        printed = log([999.0 if cold else 99.0] + [len(script) * 1.5] * (steps - 1))
        return printed + (json.dumps(PROFILE) if "kernels.py" in words[0] else ""), "", 0

    def call(*words, out=tmp_path / "out", cut=None, host="one"):
        state.left, state.host, state.ran = None if cut is None else cut + 1, host, []
        words = ["measure.py", "--steps", 4, "--cache", f"{out}-cache", "--out", out, *words]
        monkeypatch.setattr("sys.argv", [*map(str, words)])
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        try:
            measure.main()
        except SystemExit as end:
            if end.code != 0:  # status 0 means that the time budget is spent
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return record.read(out / "ladder.json")

    for owner, name, value in (
        (measure, "ask", ask),
        (measure, "execute", execute),
        (record, "commit", lambda: "0" * 40),
        (measure.gauge, "busy", lambda gpu: None),
        (measure, "time", SimpleNamespace(monotonic=lambda: state.clock, perf_counter=lambda: state.clock)),
        (render, "write", lambda folder: None),
    ):
        monkeypatch.setattr(owner, name, value)
    return SimpleNamespace(call=call, state=state)


def alike(data):
    """Return a record without its times and hosts."""
    if isinstance(data, dict):
        timed = "started", "finished", "host", "hosts", "process_s"
        return {key: alike(value) for key, value in data.items() if key not in timed}
    return [alike(value) for value in data] if isinstance(data, list) else data


EVERYTHING = "--only 05 --repeat 2 --peers --profile --batches --fit".split()


def test_a_measurement_interrupted_and_moved_to_other_hosts_is_complete(in_process, tmp_path):
    whole = in_process.call(*EVERYTHING, out=tmp_path / "whole")
    runs = len(in_process.state.ran)
    assert whole["complete"] and len(whole["hosts"]) == 1 and runs > 40
    for cut in range(0, runs, 4):
        out = tmp_path / f"cut-{cut}"
        for call in range(3):
            in_process.call(*EVERYTHING, out=out, cut=cut if call == 0 else 5, host=f"host {call}")
        data = in_process.call(*EVERYTHING, out=out, host="the last")
        assert alike(data) == alike(whole), cut
        for number in range(2):
            assert len({run["host"] for row in data["rows"] for run in row["runs"] if run["pass"] == number}) == 1
        assert {run["host"] for row in data["rows"] for run in row["runs"]} <= {host["id"] for host in data["hosts"]}
        shutil.rmtree(out)


def test_on_another_host_what_has_no_figure_comes_first(in_process):
    words = "--repeat", 1
    in_process.call(*words, cut=5)
    data = in_process.call(*words, host="another", cut=10)
    assert all(row["runs"] for row in data["rows"]) and data["finished"] and not data["complete"]
    assert [script.split()[0] for script in in_process.state.ran[7:]] == [row["name"] for row in data["rows"][:3]]
    assert data["rows"][5]["over_before"] is None  # no ratio, because the two rungs ran on different hosts
    assert in_process.call(*words, host="another")["complete"]


def test_on_hosts_that_are_always_new_every_pass_comes_to_its_end(in_process):
    for host in range(12):
        data = in_process.call("--repeat", 2, "--peers", host=f"host {host}", cut=5)
    assert all(len(row["runs"]) == 2 for row in data["rows"]) and not data["complete"]
    assert data["rows"][-1]["over_before"] is None  # no ratio, because rung 10 ran on a different host
    data = in_process.call("--repeat", 2, "--peers", host="the last")
    assert data["complete"] and data["rows"][-1]["over_before"]


def test_the_same_host_continues_where_it_stopped(in_process):
    in_process.call("--repeat", 2, cut=5)
    data = in_process.call("--repeat", 2)
    assert len(data["hosts"]) == 1 and data["complete"] and len(in_process.state.ran) == 24 - 5
    assert in_process.call("--repeat", 2, host="another") == data  # nothing is left to measure


@pytest.mark.parametrize("other", [{"torch": "3"}, {"cuda": "2"}, {"name": "Another GPU"}])
def test_another_gpu_torch_or_cuda_is_another_measurement(in_process, monkeypatch, capsys, other):
    in_process.call("--repeat", 2, cut=5)
    ask = measure.ask
    monkeypatch.setattr(measure, "ask", lambda *words: ask(*words) | other)
    with pytest.raises(SystemExit):
        in_process.call("--repeat", 2)
    assert "has a measurement with different machine: use another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "runs, expected",
    [
        (4, {"ladder": 4}),
        (13, {"ladder": 12, "profile": 1}),
        (28, {"ladder": 12, "profile": 12, "batches": 4}),
        (36, {"ladder": 12, "profile": 12, "batches": 8, "peers": 4}),
        (40, {"ladder": 12, "profile": 15, "batches": 8, "peers": 5}),  # the second pass, reversed, starts with a peer
        (55, {"ladder": 24, "profile": 15, "batches": 8, "peers": 8}),
    ],
)
def test_what_a_budget_is_spent_on_first_is_worth_most(in_process, runs, expected):
    data = in_process.call("--repeat", 2, "--peers", "--profile", "--batches", cut=runs)
    ran = {kind: 0 for kind in ("ladder", "profile", "batches", "peers")}
    for line in in_process.state.ran:
        kind = "profile" if "kernels.py" in line else "batches" if "--compile-mode" in line else "ladder"
        ran["peers" if re.match("measure/peers.py|-m torch", line) else kind] += 1
    assert ran == dict.fromkeys(ran, 0) | expected
    assert bool(data["finished"]) == (ran["ladder"] >= 12) and data["complete"] == (runs == 55)


def test_every_first_pass_compiles_with_nothing_in_the_cache_and_no_other(in_process, tmp_path):
    (tmp_path / "out-cache" / "baseline_py" / "kernels").mkdir(parents=True)  # left by an earlier run: must not be used
    data = in_process.call("--repeat", 2, "--profile", cut=30)
    data = in_process.call("--repeat", 2, "--profile")
    assert [[run["cold"] for run in row["runs"]] for row in data["rows"]] == [[True, False]] * 12
    assert {row["first_step_s"] for row in data["rows"]} == {0.999}


def test_another_measurement_is_never_written_over(made_up):
    assert made_up.call().returncode == 0
    path, _ = made_up.result()
    before = path.read_bytes()
    done = made_up.call("--repeat", 5, "--out", path.parent)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has a measurement with different settings: use another folder" in done.stderr
    assert path.read_bytes() == before
    assert made_up.call("--repeat", 5).returncode == 0  # without --out, measure.py creates a new folder
    other = path.parent.with_name(f"{path.parent.name}-2")
    assert made_up.result(other)[1]["settings"]["repeat"] == 5
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch-size", 0], "at least 1"),
        (["--steps", "many"], "many"),
        (["--fit"], "--fit needs a GPU"),
        (["--budget", 0], "--budget must be more than 0"),
        (["--only", "a", "z"], "--only z: expected one of a, b, c"),
        (["--out", "a.py"], "a.py"),
        (["--out", "broken"], "ladder.json is not a measurement"),
        (["--out", "foreign"], "ladder.json is not a measurement"),
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


@pytest.mark.parametrize(
    "visible, second",
    [(None, "1"), ("4,7", "7"), ("4, 7", "7"), ("GPU-4ab,GPU-7cd", "GPU-7cd"), ("MIG-4ab,MIG-7cd", "MIG-7cd")],
)
def test_one_gpu_alone_is_measured_and_nothing_overrides_its_precision(made_up, monkeypatch, visible, second):
    machine = MACHINE | {"device": "cuda:1", "device_memory_gib": 80.0, "driver": "1", "cuda": "1"}
    (made_up.folder / "measure" / "machine.py").write_text(f"print('''{json.dumps(machine)}''')")
    look = "import os, sys\nopen('seen.txt', 'a').write(f'{dict(os.environ)} {sys.argv}\\n')\n"
    (made_up.folder / "a.py").write_text(look + (made_up.folder / "a.py").read_text())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert made_up.call("--repeat", 1).returncode == 0
    seen = (made_up.folder / "seen.txt").read_text()
    assert f"'CUDA_VISIBLE_DEVICES': '{second}'" in seen and "'--device', 'cuda'" in seen
    assert "NVIDIA_TF32_OVERRIDE" not in seen


def test_other_sources_are_another_measurement(made_up):
    assert made_up.call().returncode == 0
    with (made_up.folder / "b.py").open("a") as file:
        file.write("# edited\n")
    made_up.order()
    assert made_up.call().returncode == 0 and made_up.order() == list("abc")


def test_fit_finds_the_largest_batch_and_measures_there(made_up):
    gpu = MACHINE | {"device": "cuda", "device_memory_gib": 80.0, "driver": "1", "cuda": "1"}
    (made_up.folder / "measure" / "machine.py").write_text(f"print('''{json.dumps(gpu)}''')")
    (made_up.folder / "c.py").write_text((made_up.folder / "c.py").read_text().replace("B > 12", "B > 10**9"))
    done = made_up.call("--fit", "--repeat", 1)
    assert done.returncode == 0, done.stderr
    fits = [row["fit"] for row in made_up.result()[1]["rows"]]
    assert [fit["batch_size"] for fit in fits] == [8, 8, 64]  # the 10,000 tokens are enough for at most B 78
    assert all("out of memory with B 16 and T 128" in fit["limit"] for fit in fits[:2])
    assert fits[2]["limit"] == "c.py: error: 10000 tokens, but B 128 and T 128 need more"
    assert [fit["tokens_per_s"] for fit in fits] == [16_000, 32_000, 64_000]
    assert fits[2]["peak_memory_gib"] == 64
    trials = [line for line in made_up.folder.joinpath("order.txt").read_text().splitlines() if line.startswith("b")]
    assert len(trials) == 3  # the pass, then B 8 and B 16: the search starts at a.py's largest batch size, 8


@pytest.mark.parametrize(
    "most, error, cell",
    [
        (32, "a.py: error: out of memory with B {B} and T 1024: lower --batch-size or --seq-len", "32"),
        (0, "a.py: error: out of memory with B {B} and T 1024: lower --batch-size or --seq-len", "none"),
        (64, "a.py: error: 338025 tokens, but B {B} and T 1024 need many", "64+"),
        (32, "a.py: error: torch.compile failed: no kernel", ""),
        (0, "a.py: error: torch.compile failed: no kernel", ""),
        (32, "killed by SIGKILL", ""),
    ],
)
def test_a_batch_that_does_not_fit_is_told_from_a_run_that_fails(in_process, monkeypatch, most, error, cell):
    """The largest batch size has a "+" if the text is too short for a larger one.

    If a run fails because of neither text nor memory, no batch size is shown, and the run is retried.
    """
    execute = measure.execute

    def limited(words, cache, on_step=None):
        size = int(words[words.index("--batch-size") + 1])
        tried.append(size)
        failed = cache.name != "baseline_py" and size > most
        if failed and "SIGKILL" in error:
            return "", "", -9
        return ("", error.format(B=size), 1) if failed else execute(words, cache, on_step)

    tried = []
    monkeypatch.setattr(measure, "execute", limited)
    data = in_process.call("--only", "baseline", "--repeat", 1, "--fit")
    fit, failed = data["rows"][0]["fit"], cell == ""
    cells = render.cells(data)[0]
    size, speed = cells["largest B"], cells["tokens/s at largest B"]
    assert size == cell and (speed == fit["error"]) == bool(fit["error"]) == failed
    assert fit["batch_size"] == (int(cell.strip("+")) if cell not in ("", "none") else None)
    tried.clear()
    in_process.call("--only", "baseline", "--repeat", 1, "--fit")
    assert bool(tried) == failed


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
        ("small", "cuda", "nano", 3, True),
        ("part", "cuda", "gpt2", 2, True),
    ):
        data = measurement(made("a.py", [SLOW]))
        data["machine"]["device"], data["machine"]["name"], data["settings"]["model"] = device, device, model
        data["settings"]["only"] = ["05"] if name == "part" else []
        data["finished"] = f"2026-01-0{day}T00:00:00+00:00" if finished else None
        (tmp_path / "results" / name).mkdir()
        record.save(tmp_path / "results" / name / "ladder.json", data)
    assert list(render.newest()) == ["gpu", "small", "large", "new"]


def shown(figure):
    """Return a figure's content: (the label of the x axis, {bar or curve: its lengths or points})."""
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    bars = {}
    for container in axes.containers:
        for name, bar in zip(names, container, strict=True):
            bars.setdefault(name, {})[container.get_label()] = (bar.get_x(), bar.get_width())
    return axes.get_xlabel(), lines or bars


def test_a_table_shows_its_conditions():
    data = measurement(made("a.py", [SLOW]), made("b.py", [FAST], "a.py"), bf16=0.5)
    data["machine"] |= {"device": "cuda", "name": "NVIDIA H200", "cuda": "13.0", "torch": "2.11", "threads": None}
    data["hosts"][0] |= {"device_memory_gib": 139.8, "driver": "580", "cudnn": 91501}
    data["hosts"][0]["gpu"] = {"clock_mhz": 345, "power_w": 80, "power_limit_w": 700, "temperature_c": 30}
    for row, clock, kernel in zip(data["rows"], (1980, 1755), ("written out", "cuDNN"), strict=True):
        row["runs"][0]["gpu"] = data["hosts"][0]["gpu"] | {"clock_mhz": clock}
        row["profile"] = PROFILE | {"host": "0", "attention": kernel, "error": None}
    data["rows"][1]["runs"][0]["busy"] = "other processes use the GPU: 1"
    said = " ".join(render.conditions(data))
    for words in (
        "NVIDIA H200, 139.8 GiB, driver 580, CUDA 13.0, cuDNN 91501. torch 2.11,",
        "one pass of 20 steps (2 requested): `python measure/measure.py`. Commit 0123456.",
        "Clock: 345 MHz before the first run, 1755 to 1980 MHz under load; power limit 700 W.",
        "Attention: written out (a); cuDNN (b).",
        "The machine was busy before 1 of 2 runs (other processes use the GPU: 1).",
    ):
        assert words in said
    assert render.cells(data)[0]["peak GiB (reserved)"] == "1.50 (2.50)"
    data["rows"][0]["runs"].append(data["rows"][0]["runs"][0] | {"pass": 1})
    assert "T 128; 1 to 2 interleaved passes of 20 steps per script (2 requested):" in " ".join(render.conditions(data))
    data["hosts"].append(data["hosts"][0] | {"id": "1", "cpu": "Another", "driver": "590"})
    said = render.conditions(data)[0]
    assert "On Made Up, 139.8 GiB, driver 580" in said and "On Another, 139.8 GiB, driver 590" in said


def test_a_commit_that_git_did_not_know_is_said():
    assert render.commits({"commits": [None]}) == "Commit unknown"
    commits = ["0123456789" * 4, "abcdef0123" * 4 + " and uncommitted changes"]
    assert render.commits({"commits": commits}) == "Commit 0123456 and abcdef0 and uncommitted changes"


def test_the_table_of_batch_sizes_has_the_share_of_the_peak(in_process):
    data = in_process.call("--only", "10", "--batches", "--repeat", 1)
    lines = [list(cells.values()) for cells in render.batch_cells(data)]
    assert [line[:2] for line in lines] == [[f"B {size}", mode] for size, mode in measure.BATCHES]
    ms, tokens = 37.5, record.rounded(64 * 1024 / 0.0375)
    tflops = tokens * 2e9 / 1e12
    assert lines[-1][2:] == [f"{ms}", f"{tokens:,.0f}", f"{tflops:.3g}", f"{tflops / 0.5:.0%} bf16"]
    assert sum("--batch-size 64 --seq-len 1024" in line for line in in_process.state.ran) == 2
    assert "B 16  reduce-overhead" in re.sub("  +", "  ", render.summary(data))


def test_two_measurements_are_compared_row_by_row(tmp_path, capsys, monkeypatch):
    for folder, times in (("first", ([90.0] * 5 + [110.0] * 5) * 2), ("second", ([40.0] * 5 + [60.0] * 5) * 2)):
        rows = made("a.py", [[100.0] * 20]), made("b.py", [times], "a.py"), made(f"{folder}.py", [SLOW], "a.py")
        (tmp_path / folder).mkdir()
        record.save(tmp_path / folder / "ladder.json", measurement(*rows))
    monkeypatch.setattr("sys.argv", ["compare.py", str(tmp_path / "first"), str(tmp_path / "second")])
    compare.main()
    printed = capsys.readouterr().out
    assert re.search(r"^a\.py .* 1\.00× +yes$", printed, re.MULTILINE)
    assert re.search(r"^b\.py .* 2\.00× +no$", printed, re.MULTILINE)
    assert "They differ in" not in printed
    assert "first.py" not in printed and printed.count("Commit 0123456.") == 2


@pytest.mark.parametrize("key, other", [("device", "cuda"), ("model", "gpt2"), ("batch_size", 64), ("seq_len", 16)])
def test_a_gpu_is_not_compared_with_a_cpu_nor_other_work(key, other, tmp_path, monkeypatch, capsys):
    for folder in "first", "second":
        data = measurement(made("a.py", [SLOW]))
        data["settings"] |= {key: other} if folder == "second" else {}
        (tmp_path / folder).mkdir()
        record.save(tmp_path / folder / "ladder.json", data)
    monkeypatch.setattr("sys.argv", ["compare.py", str(tmp_path / "first"), str(tmp_path / "second")])
    with pytest.raises(SystemExit) as exit:
        compare.main()
    said = f"compare.py: error: the measurements differ in {key}: their step times are not comparable\n"
    assert (exit.value.code, capsys.readouterr().err) == (2, said)


def test_a_figure_shows_each_row_under_its_own_name():
    data = measurement(made("a.py", [SLOW], memory=3.0), made("b.py", [FAST], "a.py"), float32=0.5)
    for row, ms in zip(data["rows"], (2.0, 1.0), strict=True):
        groups = {kind: ms * i for i, kind in enumerate(render.GROUPS)}
        row["profile"] = PROFILE | {"host": "0", "groups_ms": groups, "error": None}
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
    data = measurement(made("a.py", [SLOW]), made("b.py", [FAST], "a.py"), float32=0.5)
    data["rows"][0]["profile"] = PROFILE | {"host": "0", "error": None}
    for folder in ("first", "second"):
        figures = render.figures(data)
        assert figures.keys() == render.ALT.keys()
        render.draw(figures, tmp_path / folder)
    for path in (tmp_path / "first").iterdir():
        svg = path.read_text()
        assert svg == (tmp_path / "second" / path.name).read_text()
        assert "prefers-color-scheme: dark" in svg
        for unit in {"tokens": ["tokens per second"], "memory": ["GiB"], "kernels": ["milliseconds per step"]}.get(
            path.stem, ["nats per token", "step"]
        ):
            assert unit in svg


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/ladder.json")), ids=lambda path: path.parent.name)
def test_committed_results_are_valid_and_add_up(path):
    data = record.read(path)
    text = json.dumps(data)
    record.summarise(data)
    assert json.dumps(data) == text


# ---- the real scripts


@pytest.mark.slow
def test_make_ladder_measures_every_row(clone):
    """`make ladder` with --peers, --branches and --profile measures the real scripts, even if interrupted once.

    The scripts are not compiled. Rungs 01, 02 and 04 to 09 are left out to save time.
    """
    ladder, left_out = clone / "ladder.toml", r'\[\[rung\]\]\nfile = "speedup_0[124-9].*?(?=\[\[rung\]\])'
    ladder.write_text(re.sub(left_out, "", ladder.read_text(encoding="utf-8"), flags=re.DOTALL), encoding="utf-8")
    # Edit the scripts to turn off compilation, because measure.py unsets TORCH_COMPILE_DISABLE.
    for script in (*since(5), "measure/peers.py"):
        text = (clone / script).read_text(encoding="utf-8").replace("torch_compile=True", "torch_compile=False")
        (clone / script).write_text(text.replace("model.compile(", "dict("), encoding="utf-8")
    flags = "--model nano --device cpu --batch-size 1 --seq-len 16 --steps 2 --peers --branches --profile"
    command = ["make", "ladder", f"ARGS={flags}"]
    printed, _ = press_ctrl_c_at("pass 1/1  baseline.py: ", command, clone)
    assert re.search(r"^pass 1: \d of 16 rows: baseline.py", printed, re.MULTILINE)
    assert "\nnot finished: run the same command again\n" in printed
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "pass 1/1  baseline.py" not in done.stdout and "pass 1/1  speedup_03_bf16.py: " in done.stdout
    (path,) = [path for path in clone.glob("results/*/ladder.json") if not (ROOT / path.relative_to(clone)).exists()]
    data = record.read(path)
    rows = [row.name for row in measure.rows(peers=True, branches=True)]
    assert [row["name"] for row in data["rows"]] == [name for name in rows if not re.match("speedup_0[124-9]", name)]
    for row in data["rows"]:
        assert row["error"] is None and len(row["runs"]) == 1 and len(row["runs"][0]["times_ms"]) == 2, row["name"]
        ceiling = data["roof"]["ceilings_tflops"].get(row["precision"])  # a CPU may have no peak for fp16
        assert 0 < row["roof_share"] < 1 if ceiling else row["precision"] == "fp16", row["name"]
        under_torchrun = row["name"] == "ddp_run.py under torchrun"
        assert under_torchrun or list(row["profile"]["groups_ms"]) == list(render.GROUPS), row["name"]
    rest = 1024 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert [row["parameters"] for row in data["rows"][:2]] == [2 * 50257 * 32 + rest, 50257 * 32 + rest]
    assert data["roof"]["flops_per_token"] == 6 * (2 * 12 * 32**2 + 50257 * 32) + 2 * 12 * 32 * 16
    assert data["rows"][0]["roof_share"] and data["finished"] and data["machine"]["torch"] == torch.__version__
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    assert data["commits"][0].startswith(head)


@pytest.mark.slow
def test_an_unknown_model_is_refused_before_anything_is_measured(tmp_path):
    words = [sys.executable, "measure/measure.py", "--model", "gpt5", "--device", "cpu", "--out", tmp_path / "out"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        "measure.py: error: argument --model: invalid choice: 'gpt5'"
    )
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_measured_speed_agrees_with_an_outside_clock():
    """Step times agree with the intervals between printed lines in at least one of three tries.

    Three tries are allowed because other processes may slow down the machine.
    """
    command = [sys.executable, ROOT / "speedup_04_residual_init.py", "--steps", "20"]
    for _ in range(3):
        printed, came = "", []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                printed += line
                came += [time.perf_counter()] * line.startswith("step ")
        inside, outside = sum(record.parse(printed, steps=20)["times_ms"][5:]) / 1000, came[-1] - came[4]
        if inside == pytest.approx(outside, rel=0.05):
            return
    pytest.fail(f"the steps say that they took {inside:.2f} s, and their lines came within {outside:.2f} s")
