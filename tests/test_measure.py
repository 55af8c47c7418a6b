"""`make ladder` measures correctly, and a measurement that is interrupted can be continued, also on a different host.

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
from conftest import EAGER, ROOT, SCRIPTS, load, made_up_gpu, play, press_ctrl_c_at, since
from torch.optim.optimizer import register_optimizer_step_pre_hook

import measure

LADDER = SCRIPTS[:12]
MACHINE = {"device": "cpu", "name": "Made Up(R) 9000", "cpu": "Made Up", "capability": "AVX2", "cores": 2, "threads": 2}
MACHINE |= {"memory_gib": 8.0, "torch": "2", "python": "3", "system": "Linux"}
MACHINE |= dict.fromkeys(("device_memory_gib", "driver", "cuda", "cudnn", "gpu_id"))
GPU = MACHINE | {"device": "cuda", "threads": 2, "device_memory_gib": 80.0, "driver": "1", "cuda": "1", "cudnn": 91501}

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
        "hosts": [{"id": "0", "gpu": None} | {k: v for k, v in MACHINE.items() if k not in measure.MACHINE}],
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


def test_a_log_cut_in_half_keeps_its_whole_lines():
    whole = log(SLOW)
    for length in range(len(whole)):
        run = record.parse(whole[:length], steps=20)
        assert run["times_ms"] == SLOW[: len(run["times_ms"])]
        assert len(run["losses"]) == len(run["times_ms"])
        if len(run["times_ms"]) < 20:
            assert run["error"] == f"ended after {len(run['times_ms'])} of 20 steps"


def test_a_precision_that_the_device_lacks_is_not_held_against_it():
    lines = "no TF32 here: it takes a GPU\nno bf16 here: it takes a GPU that\n"
    assert record.precision_used("bf16", "") == "bf16"
    assert record.precision_used("tf32", lines) == record.precision_used("bf16", lines) == "float32"
    assert record.precision_used("bf16", "no bf16 here") == "tf32"


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
@pytest.mark.parametrize("peer", ["compiled", "trainer"])
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
            patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
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


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peers_step_is_timed_with_its_batch(peer, watched):
    steps = "".join(f"{event} " for event in watched(peer)[0] if event != "compile").split("clock ")[1::2]
    # Trainer prefetches one batch, so the first step fetches two. It reads the clock again to log the run at the end.
    if peer == "trainer":
        assert steps.pop() == "" and steps[0].startswith("next_batch ")
        steps[0] = steps[0].removeprefix("next_batch ")
    assert [sorted(step.split()) for step in steps] == 3 * [["backward", "forward", "next_batch", "step"]]


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_named_compiled_bf16_is_compiled_and_in_bf16(peer, watched):
    events, dtypes = watched(peer)
    assert events.count("compile") == 1
    assert dtypes == 3 * [torch.bfloat16]


def test_the_peers_have_the_attention_that_transformers_takes_by_default():
    from transformers import GPT2Config, GPT2LMHeadModel

    kind = load("measure/peers.py").build("nano").config._attn_implementation
    assert kind == GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)])  # V100, T4, A100
@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_leaves_out_what_a_gpu_only_emulates_as_rung_10_does(peer, capability, monkeypatch, capsys):
    peers = load("measure/peers.py")

    def look(model, loader, steps, device, report, use_bf16):
        report(1.0, 1.0)
        asked.append(use_bf16)

    asked = []
    monkeypatch.setattr(peers, "trainer" if peer == "trainer" else "plain", look)  # plain() also runs "compiled"
    monkeypatch.setattr("sys.argv", f"peers.py {peer} --model nano --batch-size 1 --seq-len 8".split())
    with made_up_gpu(None, capability):
        peers.main()
    printed = capsys.readouterr().out
    assert asked == [capability >= (8, 0)]
    assert record.precision_used("bf16", printed) == ("bf16" if asked[0] else "float32")


def test_a_peers_clock_waits_for_the_gpu():
    report = load("measure/peers.py").Report(torch.device("cuda"), tokens=32)
    with made_up_gpu() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: events.append("clock"))
        report.clock()
    assert events == ["synchronize", "clock"]


# ---- a measurement of made-up scripts

GROUPS = ["matmul", "attention", "softmax and loss", "normalisation and element-wise", "optimizer", "copies", "idle"]
PROFILE = {"groups_ms": dict.fromkeys(GROUPS, 1.0), "attention": "flash", "reserved_gib": 2.5}
SETTINGS = {"model": "nano", "batch_size": 2, "seq_len": 16, "steps": 1, "device": "cpu"}


@pytest.mark.parametrize("script", [SCRIPTS[10], "ddp_run.py", "branches/fsdp_run.py"])
def test_a_row_counts_the_tokens_that_its_script_trains_on(script):
    (row,) = (row for row in measure.rows(branches=True) if row.words[0] == script)
    printed = play(*measure.command(row, SETTINGS))
    ms, rate = re.search(r"dt +(\S+) ms \| +(\S+) tok/s", printed).groups()
    assert float(rate.replace(",", "")) * float(ms) / 1000 == pytest.approx(2 * 16, rel=0.05)


def test_a_script_runs_without_variables_that_change_its_precision_or_its_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("RANK", "1")
    look = "import os; print(*map(os.environ.get, ('NVIDIA_TF32_OVERRIDE', 'RANK', 'TORCHINDUCTOR_CACHE_DIR')))"
    assert measure.execute(["-c", look], tmp_path) == (f"None None {tmp_path}\n", "", 0)


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


EVERYTHING = "--only 05 --repeat 2 --peers --profile --batches".split()


@pytest.mark.parametrize("cut", [2, 13, 25])
def test_a_measurement_interrupted_and_moved_to_other_hosts_is_complete(in_process, tmp_path, cut):
    whole = in_process.call(*EVERYTHING, out=tmp_path / "whole")
    assert whole["complete"] and len(whole["hosts"]) == 1 and len(in_process.state.ran) > 25
    for call in range(3):
        in_process.call(*EVERYTHING, cut=cut if call == 0 else 5, host=f"host {call}")
    data = in_process.call(*EVERYTHING, host="the last")
    assert alike(data) == alike(whole)
    for number in range(2):
        assert len({run["host"] for row in data["rows"] for run in row["runs"] if run["pass"] == number}) == 1


def test_the_passes_are_interleaved_and_the_same_command_continues_without_repeating(in_process):
    in_process.call("--repeat", 2, cut=5)
    first = in_process.state.ran[:5]
    data = in_process.call("--repeat", 2)
    assert len(data["hosts"]) == 1 and data["complete"]
    ran = [words.split()[0] for words in first + in_process.state.ran]
    assert ran == [*LADDER, *reversed(LADDER)]
    assert in_process.call("--repeat", 2) == data and not in_process.state.ran  # nothing is left to measure


def test_a_script_that_fails_is_a_row_and_is_tried_again(in_process, monkeypatch):
    execute = measure.execute

    def fail(words, *more):
        if words[0] == SCRIPTS[3]:
            return "", f"{words[0]}: error: out of memory with B 4 and T 1024: lower it", 1
        return execute(words, *more)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "execute", fail)
        data = in_process.call("--repeat", 1)
    assert [row["name"] for row in data["rows"] if row["error"]] == [SCRIPTS[3]]
    data = in_process.call("--repeat", 1)
    assert [words.split()[0] for words in in_process.state.ran] == [SCRIPTS[3]]
    assert [row["error"] for row in data["rows"]] == [None] * 12


@pytest.mark.parametrize("words, says", [(["--repeat", 3], "settings"), (["--steps", 5], "settings")])
def test_another_measurement_is_never_written_over(in_process, tmp_path, capsys, words, says):
    in_process.call("--repeat", 1)
    before = (tmp_path / "out" / "ladder.json").read_bytes()
    with pytest.raises(SystemExit):
        in_process.call(*words)
    assert f"has a measurement with different {says}: use another folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "ladder.json").read_bytes() == before


@pytest.mark.parametrize("visible, second", [(None, "1"), ("4,7", "7"), ("MIG-4ab, MIG-7cd", "MIG-7cd")])
def test_only_the_chosen_gpu_is_visible(in_process, monkeypatch, visible, second):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    ask = measure.ask
    on_second = {"machine.py": {"device": "cuda:1"}}
    monkeypatch.setattr(measure, "ask", lambda tool, *words: ask(tool, *words) | on_second.get(tool, {}))
    in_process.call("--only", "baseline", "--repeat", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == second and "--device cuda" in in_process.state.ran[0]


@pytest.mark.parametrize("other", [{"torch": "3"}, {"name": "Another GPU"}])
def test_another_gpu_or_torch_is_another_measurement(in_process, monkeypatch, capsys, other):
    in_process.call("--repeat", 2, cut=5)
    ask = measure.ask
    monkeypatch.setattr(measure, "ask", lambda *words: ask(*words) | other)
    with pytest.raises(SystemExit):
        in_process.call("--repeat", 2)
    assert "has a measurement with different machine: use another folder" in capsys.readouterr().err


def test_every_first_pass_compiles_with_nothing_in_the_cache_and_no_other(in_process, tmp_path):
    (tmp_path / "out-cache" / "baseline_py" / "kernels").mkdir(parents=True)  # left by an earlier run: must not be used
    data = in_process.call("--repeat", 2, "--profile", cut=30)
    data = in_process.call("--repeat", 2, "--profile")
    assert [[run["cold"] for run in row["runs"]] for row in data["rows"]] == [[True, False]] * 12
    assert {row["first_step_s"] for row in data["rows"]} == {0.999}


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


def test_the_table_of_batch_sizes_has_the_share_of_the_peak(in_process):
    data = in_process.call("--only", "10", "--batches", "--repeat", 1)
    lines = [list(cells.values()) for cells in render.batch_cells(data)]
    assert [line[:2] for line in lines] == [[f"B {size}", mode] for size, mode in measure.BATCHES]
    ms, tokens = 37.5, record.rounded(64 * 1024 / 0.0375)
    tflops = tokens * 2e9 / 1e12
    assert lines[-1][2:] == [f"{ms}", f"{tokens:,.0f}", f"{tflops:.3g}", f"{tflops / 0.5:.0%} bf16"]
    ran = [
        re.search(r"--batch-size (\d+) --seq-len 1024 .*--compile-mode (\S+)", line) for line in in_process.state.ran
    ]
    assert [(int(found[1]), found[2]) for found in ran if found] == measure.BATCHES
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


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/ladder.json")), ids=lambda path: path.parent.name)
def test_committed_results_are_valid_and_add_up(path):
    data = record.read(path)
    text = json.dumps(data)
    record.summarise(data)
    assert json.dumps(data) == text


# ---- the real scripts


@pytest.mark.slow
def test_make_ladder_measures_the_real_scripts_and_continues_after_ctrl_c(clone):
    """The scripts are not compiled, and the peak is that of a smaller matmul, to save time."""
    # Edit the scripts to turn off compilation, because measure.py unsets TORCH_COMPILE_DISABLE.
    for script in (*since(5), "measure/peers.py", "measure/roof.py"):
        text = (clone / script).read_text(encoding="utf-8").replace("torch_compile=True", "torch_compile=False")
        text = text.replace("model.compile(", "dict(").replace("square=2048", "square=1024")
        (clone / script).write_text(text, encoding="utf-8")
    flags = "--model nano --device cpu --batch-size 1 --seq-len 16 --steps 2 --only baseline --peers --profile"
    command = ["make", "ladder", f"ARGS={flags}"]
    printed, _ = press_ctrl_c_at("pass 1/1  baseline.py: ", command, clone)
    assert re.search(r"^pass 1: \d of 5 rows: baseline.py", printed, re.MULTILINE)
    assert "\nnot finished: run the same command again\n" in printed
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "pass 1/1  baseline.py" not in done.stdout and "pass 1/1  transformers.Trainer: " in done.stdout
    (path,) = [path for path in clone.glob("results/*/ladder.json") if not (ROOT / path.relative_to(clone)).exists()]
    data = record.read(path)
    for row in data["rows"]:
        assert row["error"] is None and len(row["runs"]) == 1 and len(row["runs"][0]["times_ms"]) == 2, row["name"]
        assert 0 < row["roof_share"] < 1, row["name"]
        assert list(row["profile"]["groups_ms"]) == GROUPS, row["name"]
    rest = 1024 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert [row["parameters"] for row in data["rows"][:2]] == [2 * 50257 * 32 + rest, 50304 * 32 + rest]
    assert data["roof"]["flops_per_token"] == 6 * (2 * 12 * 32**2 + 50257 * 32) + 2 * 12 * 32 * 16
    assert data["finished"] and data["machine"]["torch"] == torch.__version__
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    assert data["commits"][0].startswith(head)


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
