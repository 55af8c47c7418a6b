"""`make ladder` logs what happened, its tables follow from the log, and an interrupted measurement goes on.

Medians, ratios and percentages of peak are checked on logs with known answers. The measured speed is checked against an
external clock.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, play, press_ctrl_c_at, since

from measure import counts, device, kernels, plots, records, run, tables

LADDER = SCRIPTS[:12]
HOST = {"id": "0123abcd", "device": "cpu", "name": "Made Up(R) 9000", "capability": "AVX2", "torch": "2", "cuda": None}
HOST |= {"python": "3", "cores": 2, "threads": 2, "system": "Linux", "memory_gib": 8.0}
HOST |= dict.fromkeys(("device_memory_gib", "driver", "cudnn"))
GPU = HOST | {"device": "cuda", "uuid": "1", "device_memory_gib": 80.0, "driver": "1", "cuda": "1", "cudnn": 91501}
FLOPS = records.flops_per_token(records.MODELS["nano"], 128)  # per token; test_device.py compares it with PyTorch's

# ---- the log


def output(times, losses=None, memory=1.5):
    """Return the output of a script whose steps take `times` milliseconds."""
    lines = ["device cpu (made up) | torch 2 | nano 7,000,000 parameters | B 4 T 128", "loaded 338025 tokens"]
    for step, ms in enumerate(times):
        loss = losses[step] if losses else 10 - step / 100
        lines.append(f"step {step:4d} | loss {loss:.6f} | lr 6.0000e-04 | dt {ms:8.2f} ms | {9:10,.0f} tok/s")
    return "\n".join([*lines, f"median of steps 0-1: 1.00 ms, 1 tok/s, peak memory {memory:.2f} GiB\n"])


def line(script, times, number=1, precision="float32", error=None, memory=1.5, host=HOST, kind="rung", **settings):
    """Return a line of a log: a run of `script` in pass `number` whose steps took `times` milliseconds."""
    settings = {"model": "nano", "batch_size": 4, "seq_len": 128, "steps": len(times)} | settings
    about = {"script": script, "kind": kind, "pass": number, "settings": settings | {"precision": precision}}
    about |= {"source": "0", "command": "python -m measure.run", "commit": "0123456789" * 4, "host": host}
    about |= {"gpu": {"before": {"load": None}, "middle": None}, "started": "2026-12-02T03:04:05+00:00"}
    return about | records.parse(output(times, memory=memory), error or "", 1 if error else 0) | {"figures": None}


def roof(**peaks):
    rows = [{"precision": name, "name": "square", "shape": [8, 8, 8], "tflops": one} for name, one in peaks.items()]
    figures = {"copy_gb_per_s": 20.0, "matmul": [{**row, "tflops": row["tflops"] / 2} for row in rows] + rows}
    return line("roof", [1.0], None, kind="roof") | {"figures": figures}


def measured(*lines, **peaks):
    """Return the rows of a Measurement."""
    return records.Measurement("made-up", [*([roof(**peaks)] if peaks else []), *lines]).rows


BASE, ONE, TWO = SCRIPTS[:3]
SLOW, FAST = [900.0] * 10 + [100.0] * 10, [900.0] * 10 + [50.0] * 10


def test_a_log_is_read_as_printed():
    found = records.parse(output([12.5, 7.25], [10.5, 9.25], memory=2.75), steps=2)
    assert found == {"step_ms": [12.5, 7.25], "losses": [10.5, 9.25], "peak_gib": 2.75, "error": None}
    assert records.parse(output([12.5, 7.25]), steps=3)["error"] == "ended after 2 of 3 steps"


def test_the_median_covers_the_same_steps_as_in_the_scripts():
    assert records.steady(list(range(20))) == list(range(10, 20))
    assert records.steady(list(range(50))) == list(range(10, 50))
    assert records.steady(list(range(19))) == list(range(9, 19))
    assert records.steady([5.0]) == [5.0]


def test_a_line_that_a_kill_cut_in_half_is_dropped_and_nothing_else(tmp_path):
    path, first, second = tmp_path / "runs.jsonl", line(BASE, SLOW), line(ONE, FAST)
    records.append(path, first)
    whole = path.read_bytes()
    records.append(path, second)
    both = path.read_bytes()
    assert records.read(path) == [first, second]
    for length in range(len(whole), len(both), 10):
        path.write_bytes(both[:length])
        assert records.read(path) == [first]
        records.append(path, second)
        assert path.read_bytes() == both
    path.write_bytes(b'{"script": \n' + whole)
    with pytest.raises(ValueError, match="line 1 is not a run"):
        records.read(path)
    path.write_bytes(whole)
    records.append(path, line(BASE, SLOW, 2, seq_len=64))
    with pytest.raises(ValueError, match="runs.jsonl: its runs have different settings"):
        records.load(tmp_path)


# ---- what is derived from it


def test_known_times_give_known_medians_ratios_and_shares():
    uneven = [900.0] * 10 + [40, 40, 40, 50, 50, 50, 50, 60, 60, 80.0]
    slower = [800.0] * 10 + [80.0] * 10
    rows = measured(line(BASE, SLOW), line(ONE, slower), line(TWO, uneven, precision="bf16"), float32=40.0, bf16=50.0)
    base, one, two = rows.values()
    assert (base["median_ms"], base["quartiles_ms"], base["tokens_per_s"]) == (100, [100, 100], 5120)  # 4 * 128 / 0.1 s
    assert (two["median_ms"], two["quartiles_ms"], two["tokens_per_s"]) == (50, [42.5, 57.5], 10240)
    assert base["over_baseline"]["median"] == 1 and base["over_before"] is None
    assert two["over_baseline"] == {"median": 2, "low": 2, "high": 2}
    assert two["over_before"] == {"median": 1.6, "low": 1.6, "high": 1.6}
    assert (base["first_step_s"], one["first_step_s"], base["peak_gib"]) == (0.9, 0.8, 1.5)
    assert base["tflops"] == pytest.approx(5120 * FLOPS / 1e12, rel=1e-4)
    assert base["peak_share"] == pytest.approx(5120 * FLOPS / 40e12, rel=1e-4)
    assert two["peak_share"] == pytest.approx(10240 * FLOPS / 50e12, rel=1e-4)
    shown = records.cells(records.Measurement("made-up", [line(BASE, SLOW), line(ONE, slower), line(TWO, uneven)]))[2]
    assert list(shown.values())[:5] == [TWO, "50.0 (42.5–57.5)", "10,240", "2.00×", "1.60×"]


def test_a_ratio_is_taken_within_a_pass_and_its_spread_over_the_passes():
    # The machine is half as fast in the second pass. A comparison of a run from the first pass with a run from the
    # second would show the second script to be 1 or 4 times as fast as the first.
    slow = [SLOW, [2 * ms for ms in SLOW], SLOW]
    fast = [FAST, [2 * ms for ms in FAST], [40.0] * 20]
    lines = [line(BASE, times, number) for number, times in enumerate(slow, start=1)]
    rows = measured(*lines, *(line(ONE, times, number) for number, times in enumerate(fast, start=1)))
    assert rows[ONE]["over_before"] == {"median": 2, "low": 2, "high": 2.5}
    assert rows[ONE]["median_ms"] == 50 and rows[BASE]["median_ms"] == 100


def test_a_ratio_is_of_two_runs_on_one_host():
    lines = line(BASE, SLOW), line(BASE, SLOW, 2), line(ONE, FAST)
    rows = measured(*lines, line(ONE, [10.0] * 20, 2, host=HOST | {"cpu": "another"}))
    assert rows[ONE]["over_before"] == {"median": 2, "low": 2, "high": 2}


def test_a_failed_run_is_shown_and_left_out_of_the_figures():
    oom = "a.py: error: out of memory: lower --batch-size or --seq-len"
    lines = line(BASE, SLOW), line(BASE, SLOW, 2), line(ONE, [1.0] * 20, error=oom), line(ONE, FAST, 2)
    data = records.Measurement("made-up", [*lines, line(TWO, [], error=f"warning\n{oom}\n", steps=20)])
    one, two = data.rows[ONE], data.rows[TWO]
    assert one["over_before"]["high"] == 2 and one["error"] == two["error"] == oom
    assert one["first_step_s"] is None  # the run that compiled failed
    assert two["median_ms"] is two["over_baseline"] is two["tokens_per_s"] is None
    said = records.summary(data)
    assert said.count(oom) == 2 and f"{ONE} (a pass failed)" in said and re.search(rf"{TWO} +failed", said)
    again = records.Measurement(
        "made-up", [line(ONE, [1.0] * 20, error=oom), line(ONE, FAST)]
    )  # tried again: it worked
    assert again.rows[ONE]["error"] is None and again.rows[ONE]["median_ms"] == 50


def test_a_precision_that_the_device_lacks_is_not_held_against_it():
    lines = "no TF32 here: it takes a GPU\nno bf16 here: it takes a GPU that\n"
    assert records.precision_used("bf16", "") == "bf16"
    assert records.precision_used("tf32", lines) == records.precision_used("bf16", lines) == "float32"
    assert records.precision_used("bf16", "no bf16 here") == "tf32"


@pytest.mark.parametrize(("day", "gain"), [("2026-11-27T23:59", None), ("2026-11-28T00:01", 2)])
def test_a_speed_up_from_before_a_script_changed_is_left_out(day, gain):
    before, eight = SCRIPTS[7:9]  # ladder.toml: rung 08 changed on 2026-11-28
    lines = [line(script, times) | {"started": day} for script, times in ((BASE, SLOW), (before, SLOW), (eight, FAST))]
    row = measured(*lines, line(ONE, SLOW))[eight]  # a run of another script was added later
    assert (row["over_before"] or {}).get("median") == gain and row["over_baseline"]["median"] == 2


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/runs.jsonl")), ids=lambda path: path.parent.name)
def test_committed_results_are_logs_of_runs_on_one_machine(path):
    data = records.load(path.parent)
    assert {str(one["host"]) for one in data.lines} == {str(data.host)} and data.host["torch"] and data.roof
    for one in data.runs:
        assert one["error"] is None and len(one["step_ms"]) == len(one["losses"]) == one["settings"]["steps"]
        assert min(one["step_ms"]) > 0 and one["losses"][-1] < one["losses"][0] and one["started"] and one["commit"]
    assert all(0 < row["peak_share"] < 1 for row in data.rows.values())


def test_the_newest_of_each_device_and_model_is_shown_gpus_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "recorded", tables.recorded.__wrapped__)  # without the cache
    for name, kind, model, day, scripts in (
        ("old", "cpu", "nano", 1, LADDER),
        ("new", "cpu", "nano", 2, LADDER),
        ("large", "cpu", "gpt2", 3, LADDER),
        ("gpu", "cuda", "gpt2", 1, LADDER),
        ("small", "cuda", "nano", 3, LADDER),
        ("part", "cuda", "gpt2", 2, LADDER[4:6]),
    ):
        (tmp_path / "results" / name).mkdir(parents=True)
        host = HOST | {"device": kind, "name": kind}
        for script in scripts:
            one = line(script, SLOW, host=host, model=model) | {"started": f"2026-01-0{day}T00:00:00+00:00"}
            records.append(tmp_path / "results" / name / "runs.jsonl", one)
    assert list(tables.newest()) == ["gpu", "small", "large", "new"]
    assert list(tables.newest(partial=True)) == ["part"]


def test_two_measurements_are_compared_script_by_script(tmp_path, capsys, monkeypatch):
    for folder, last in (("first", [90.0] * 5 + [110.0] * 5), ("second", [40.0] * 5 + [60.0] * 5)):
        (tmp_path / folder).mkdir()
        for one in line(BASE, [100.0] * 20), line(ONE, last * 2), line(TWO, SLOW, error="x" * (folder == "first")):
            records.append(tmp_path / folder / "runs.jsonl", one)
    monkeypatch.setattr("sys.argv", ["tables.py", str(tmp_path / "first"), str(tmp_path / "second")])
    tables.main()
    printed = capsys.readouterr().out
    assert re.search(rf"{BASE} .* 1\.00× +yes$", printed, re.MULTILINE)
    assert re.search(rf"{ONE} .* 2\.00× +no$", printed, re.MULTILINE)
    assert "They differ in" not in printed and TWO not in printed and printed.count("Commit 0123456.") == 2


@pytest.mark.parametrize("key, other", [("device", "cuda"), ("model", "gpt2"), ("batch_size", 64), ("seq_len", 16)])
def test_a_gpu_is_not_compared_with_a_cpu_nor_other_work(key, other):
    changed = {"host": HOST | {key: other}} if key == "device" else {key: other}
    first, second = (records.Measurement("x", [line(BASE, SLOW, **more)]) for more in ({}, changed))
    with pytest.raises(ValueError, match=f"the measurements differ in {key}: their step times are not comparable"):
        tables.compare(first, second)


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


def profile(script, ms=1.0):
    groups = {kind: ms * place for place, kind in enumerate(plots.GROUPS)}
    figures = {"groups_ms": groups, "attention": "flash", "reserved_gib": 2.5}
    return line(script, [1.0], None, kind="profile") | {"figures": figures}


def test_a_figure_shows_each_row_under_its_own_name():
    lines = line(BASE, SLOW, memory=3.0), line(ONE, FAST), profile(BASE, 2.0), profile(ONE)
    data = records.Measurement("made-up", [*lines])
    figures = plots.figures(data)
    _, narrow = shown(plots.tokens(data, wide=False))
    assert [[name, *bars.values()] for name, bars in narrow.items()] == [
        ["Baseline", (0, 5120)],
        ["01 Weight tying", (0, 10240)],
    ]
    unit, speeds = shown(figures["tokens"])
    assert unit == "tokens per second" and [[*bars.values()] for bars in speeds.values()] == [[(0, 5120)], [(0, 10240)]]
    assert list(speeds) == [BASE, ONE]
    assert [text.get_text() for text in figures["tokens"].axes[0].texts] == ["5,120 · 1.00×", "10,240 · 2.00×"]
    unit, curves = shown(figures["loss-steps"])
    assert unit == "step" and curves == {name: (list(range(20)), lines[0]["losses"]) for name in (BASE, ONE)}
    unit, kinds = shown(figures["kernels"])
    assert unit.startswith("milliseconds per step")
    for name, ms in (BASE, 2.0), (ONE, 1.0):
        lefts = [sum(ms * i for i in range(kind)) for kind in range(len(plots.GROUPS))]
        assert kinds[name] == {kind: (lefts[i], ms * i) for i, kind in enumerate(plots.GROUPS)}


def test_a_rungs_page_shows_its_measurements_and_what_was_predicted(monkeypatch):
    four, five, six = SCRIPTS[4:7]

    def runs(script, *times, **more):
        return [line(script, [900.0] * 10 + [ms] * 10, number, **more) for number, ms in enumerate(times, start=1)]

    host = GPU | {"name": "Made Up GPU"}
    gpu = [*runs(BASE, 800.0, 800.0, host=host), *runs(five, 200.0, 210.0, host=host, memory=7.25)]
    gpu += runs(six, 100.0, 140.0, host=host, memory=2.5)
    again = [*runs(five, 201.0, 211.0, host=host), *runs(six, 101.0, 141.0, host=host)]  # is not shown
    cpu = [*runs(four, 300.0, 300.0), *runs(five, 250.0, 260.0), *runs(six, 240.0, 265.0)]
    found = {name: records.Measurement(name, lines) for name, lines in (("gpu", gpu), ("cpu", cpu), ("again", again))}
    monkeypatch.setattr(tables, "measurements", lambda: found)
    predicted = {"date": "2026-01-02", "device": host["name"], "model": "nano", "seq_len": 128}
    predictions = [predicted | {"batch_size": 4, "ms": {six: [90, 100], five: [205, 300]}}]
    predictions += [
        predicted | {"batch_size": 8, "ms": {six: [150, 150]}},
        predicted | {"batch_size": 4, "ms": {five: [250, 300]}},
    ]
    monkeypatch.setattr(tables, "read_toml", lambda name: {"prediction": predictions})
    monkeypatch.setattr(tables, "recorded", lambda: [found["gpu"]])
    rows, *predicted = tables.measured("06").strip().split("\n\n")
    assert rows.splitlines()[2:] == [
        "| Made Up GPU, nano, B 4, T 128 | 205.0 → 120.0 | 1.75× (1.50–2.00) | 7.25 → 2.50 | 9.8100 → 9.8100 |",
        "| CPU: Made Up(R) 9000, nano, B 4, T 128 | 255.0 → 252.5 | 1.01× (0.98–1.04), inconclusive | "
        "1.50 → 1.50 | 9.8100 → 9.8100 |",
    ]
    about = "Predicted on 2026-01-02 for Made Up GPU at B"
    assert predicted == [f"{about} 4: 90 to 100 ms per step; our latest measurement: 120.0 ms, 20% above this."]
    assert "our latest measurement: 205.0 ms, as predicted." in tables.measured("05")
    assert "our latest measurement: 205.0 ms, 18% below this." in tables.measured("05")
    assert tables.measured("09").strip() == "We have not measured the speed of this script yet."


def test_a_rungs_page_shows_its_counts_beside_those_of_the_rung_before(monkeypatch):
    def step(matmul_flops, attention_bytes, times):
        matmul = counts.Kernel("mm", "matmul", "bf16", matmul_flops, 30e9)
        return {matmul: 1, counts.Kernel("softmax", "attention", "", 0, attention_bytes): times}

    steps = {SCRIPTS[5]: step(2e12, 4e9, 3), SCRIPTS[6]: step(1.5e12, 0.5e9, 2)}
    monkeypatch.setattr(counts, "read_counts", lambda: {tables.COUNTED: steps})
    lines = tables.counts_of("06").strip().splitlines()
    assert (
        lines[0]
        == "| [counted](../counts.md), a step of `gpt2`, B 4, T 1024 | 05 torch.compile | 06 Flash attention | change |"
    )
    assert lines[2:6] == [
        "| TFLOP | 2.00 | 1.50 | −25.0% |",
        "| GB moved | 42.0 | 31.0 | −26.2% |",
        "| GB moved: attention | 12.0 | 1.0 | −91.7% |",  # matmuls move the same in both and have no row
        "| kernels | 4 | 3 | −25.0% |",
    ]


# ---- a measurement of made-up scripts

SETTINGS = {"model": "nano", "batch_size": 2, "seq_len": 16, "steps": 1, "device": "cpu"}


@pytest.mark.parametrize("script", [SCRIPTS[10], "ddp_run.py", "branches/fsdp_run.py"])
def test_a_row_counts_the_tokens_that_its_script_trains_on(script):
    printed = play(*run.command(script, SETTINGS))
    ms, rate = re.search(r"dt +(\S+) ms \| +(\S+) tok/s", printed).groups()
    assert float(rate.replace(",", "")) * float(ms) / 1000 == pytest.approx(2 * 16, rel=0.05)


def test_a_script_runs_without_variables_that_change_its_precision_or_its_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("RANK", "1")
    look = "import os; print(*map(os.environ.get, ('NVIDIA_TF32_OVERRIDE', 'RANK', 'TORCHINDUCTOR_CACHE_DIR')))"
    assert run.execute(["-c", look], tmp_path) == (f"None None {tmp_path}\n", "", 0)


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """Return a namespace with `call`, which runs run.py in this process on fake scripts and returns the log's lines.

    `cut` is the number of the run during which run.py is stopped, as by Ctrl-C or at the end of its time budget. `ran`
    lists the commands that were executed.
    """
    state = SimpleNamespace(left=None, ran=[], caches=[], host=GPU)

    def ask(module, *words):
        return state.host | {} if module == "device" else roof(bf16=0.5)["figures"] | {"gpu": {"clock_mhz": 1}}

    def execute(words, cache, on_step=None):
        state.ran.append(shlex.join(words))
        state.left = state.left and state.left - 1
        if state.left == 0:
            signal.raise_signal(signal.SIGALRM)
        cold = not cache.exists()
        cache.mkdir(exist_ok=True)
        state.caches.append(cache.name)
        script = next(word for word in reversed(words) if word in SCRIPTS or word in ("compiled", "trainer"))
        steps = int(words[words.index("--steps") + 1])
        printed = output([999.0 if cold else 99.0] + [len(script) * 1.5] * (steps - 1))
        return printed + json.dumps(profile(script)["figures"]) * ("measure.kernels" in words), "", 0

    def call(*words, out=tmp_path / "out", cut=None):
        state.left, state.ran, state.caches = cut, [], []
        monkeypatch.setattr("sys.argv", ["run.py", *map(str, ["--steps", 4, "--out", out, *words])])
        before = {number: signal.getsignal(number) for number in run.STOPS}
        try:
            run.main()
        except SystemExit as end:
            if end.code != 0:  # status 0 means that the time budget is spent
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return records.read(out / "runs.jsonl")

    for owner, name, value in (
        (run, "ask", ask),
        (run, "execute", execute),
        (records, "commit", lambda: None),  # as on a machine without git
        (device, "load", lambda gpu: None),
        (device, "find_gpu", lambda uuid: None),
        (plots, "draw", lambda data, folder: None),
    ):
        monkeypatch.setattr(owner, name, value)
    return SimpleNamespace(call=call, state=state)


EVERYTHING = "--only 05 --repeat 2 --peers --profile --batches".split()


def alike(lines):
    return [{key: value for key, value in line.items() if key not in ("started", "step_ms")} for line in lines]


@pytest.mark.parametrize("cut", [2, 9, 20])
def test_a_measurement_goes_on_where_it_was_killed_and_repeats_nothing(in_process, tmp_path, cut):
    whole, ran = in_process.call(*EVERYTHING, out=tmp_path / "whole"), in_process.state.ran
    assert [line["error"] for line in whole] == [None] * (len(ran) + 1)
    killed = in_process.call(*EVERYTHING, cut=cut)
    assert len(killed) == cut and in_process.state.ran == ran[:cut]
    with open(tmp_path / "out" / "runs.jsonl", "ab") as log:
        log.write(b'{"script": "baseline.py", "kin')  # as a kill while it writes leaves it
    assert alike(in_process.call(*EVERYTHING)) == alike(whole)
    assert in_process.state.ran == ran[cut - 1 :]
    in_process.call(*EVERYTHING)
    assert not in_process.state.ran


def test_the_passes_are_interleaved_and_the_peers_come_right_after_rung_10(in_process):
    in_process.call("--repeat", 3, "--peers")
    names = [re.match(r"-m \S+ \S+|\S+", words)[0] for words in in_process.state.ran]
    peers = ["-m measure.peers compiled", "-m measure.peers trainer"]
    first = [*LADDER[:11], *peers, *LADDER[11:]]
    assert names == [*first, *reversed(first), *first]


def test_options_can_be_added_to_a_measurement(in_process):
    in_process.call("--only", "01", "--repeat", 1)
    lines = in_process.call("--only", "01", "--repeat", 2, "--profile")
    assert [line["kind"] for line in lines] == ["roof", "rung", "rung", "profile", "profile", "rung", "rung"]
    assert [line["pass"] for line in lines] == [None, 1, 1, None, None, 2, 2]


def test_a_script_that_fails_is_a_line_and_is_tried_again(in_process, monkeypatch):
    execute, oom = run.execute, f"{SCRIPTS[3]}: error: out of memory: lower --batch-size"
    with monkeypatch.context() as patch:
        patch.setattr(
            run, "execute", lambda words, *more: ("", oom, 1) if words[0] == SCRIPTS[3] else execute(words, *more)
        )
        lines = in_process.call("--repeat", 1)
    assert [line["script"] for line in lines if line["error"] == oom] == [SCRIPTS[3]] and len(lines) == 13
    lines = in_process.call("--repeat", 1)
    assert [words.split()[0] for words in in_process.state.ran] == [SCRIPTS[3]] and not lines[-1]["error"]


def test_if_everything_fails_so_does_the_measurement_and_it_can_be_repeated(in_process, monkeypatch, capsys):
    ask = run.ask
    with monkeypatch.context() as patch:
        patch.setattr(run, "execute", lambda *_: ("", "ModuleNotFoundError: No module named 'tiktoken'", 1))
        patch.setattr(run, "ask", lambda module, *words: ask(module) if module == "device" else int("no roof"))
        with pytest.raises(SystemExit) as end:
            in_process.call("--repeat", 3, "--only", "01")
    printed = capsys.readouterr()
    assert end.value.code == 2 and "run.py: error: every script failed" in printed.err
    assert "No module named 'tiktoken': pip install -r requirements-dev.txt" in printed.out
    lines = in_process.call("--repeat", 1, "--only", "01")
    assert [line["error"] is None for line in lines] == 3 * [False] + 3 * [True]


def test_a_full_disk_at_the_first_run_is_one_line(in_process, tmp_path, monkeypatch, capsys):
    def fill(path, line):
        path.write_text('{"script": "ro')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "append", fill)
    with pytest.raises(SystemExit) as end:
        in_process.call("--repeat", 1)
    assert end.value.code == 2 and "run.py: error: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["settings", "a script", *run.SAME_HOST])
def test_another_measurement_is_never_mixed_in(in_process, tmp_path, monkeypatch, capsys, change):
    in_process.call("--repeat", 1)
    before, words = (tmp_path / "out" / "runs.jsonl").read_bytes(), ["--repeat", 1]
    if change == "settings":
        words += ["--batch-size", 5]
    elif change == "a script":
        monkeypatch.setattr(records, "source", lambda *files: str(files))
    else:
        in_process.state.host = GPU | {change: "other"}
    with pytest.raises(SystemExit):
        in_process.call(*words)
    said = {"settings": "with different settings", "a script": "with a different roof", "id": "on a different machine"}
    said = said.get(change, f"with a different {change}")
    assert f"was measured {said}: use another folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "runs.jsonl").read_bytes() == before and not in_process.state.ran


def test_an_edited_script_has_another_source(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "input.txt").write_text("text")
    (tmp_path / "a.py").write_text("1")
    before = records.source("a.py")
    (tmp_path / "a.py").write_text("2")
    assert records.source("a.py") != before


def test_every_first_pass_compiles_with_nothing_in_the_cache_and_each_script_has_its_own(in_process):
    lines = in_process.call("--repeat", 2, "--profile", "--batches")
    first = [line["step_ms"][0] for line in lines if line["pass"] == 1 or line["kind"] == "batch"]
    assert set(first) == {999.0} and len(first) == 12 + 8
    assert {line["step_ms"][0] for line in lines if line["pass"] == 2} == {99.0}
    assert len(set(in_process.state.caches)) == 12 + 8


def test_the_batch_sizes_are_measured_and_shown_with_the_share_of_the_peak(in_process, tmp_path):
    in_process.call("--only", "10", "--batches", "--repeat", 1, "--model", "nano", "--seq-len", 128)
    cells = [list(row.values()) for row in records.batch_cells(records.load(tmp_path / "out"))]
    assert [row[:2] for row in cells] == [[f"B {size}", mode] for size, mode in run.BATCHES]
    tokens = records.rounded(64 * 128 / 0.0375)  # the made-up script takes 1.5 ms per letter of its name
    assert cells[-1][2:4] == ["37.5", f"{tokens:,.0f}"] and cells[-1][5] == f"{tokens * FLOPS / 0.5e12:.0%} bf16"
    ran = [re.search(r"--batch-size (\d+) .*--compile-mode (\S+)", words) for words in in_process.state.ran]
    assert [(int(found[1]), found[2]) for found in ran if found] == run.BATCHES


@pytest.mark.parametrize("visible, second", [(None, "1"), ("4,7", "7"), ("MIG-4ab, MIG-7cd", "MIG-7cd")])
def test_only_the_chosen_gpu_is_visible(in_process, monkeypatch, visible, second):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    in_process.state.host = GPU | {"device": "cuda:1"}
    in_process.call("--only", "baseline", "--repeat", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == second and "--device cuda" in in_process.state.ran[0]


def test_clock_and_load_are_read_before_each_run_and_in_its_middle(in_process, monkeypatch):
    execute, steps = run.execute, []

    def with_steps(words, cache, on_step):
        for step in range(4):
            steps.append(step)
            on_step()
        return execute(words, cache)

    monkeypatch.setattr(device, "reading", lambda gpu: {"clock_mhz": 1000 + len(steps)})
    monkeypatch.setattr(device, "load", lambda gpu: "other programs use 1.0 CPU cores")
    monkeypatch.setattr(run, "execute", with_steps)
    roof, base = in_process.call("--only", "baseline", "--repeat", 1)
    assert roof["gpu"]["before"]["clock_mhz"] == 1000 and roof["gpu"]["middle"] == {"clock_mhz": 1}
    assert base["gpu"]["before"] == {"clock_mhz": 1000, "load": "other programs use 1.0 CPU cores"}
    assert base["gpu"]["middle"] == {"clock_mhz": 1003}  # after the third of four steps


def test_the_budget_is_in_minutes_and_leaves_time_for_the_table(in_process, monkeypatch):
    timers = []
    monkeypatch.setattr(signal, "setitimer", lambda kind, seconds: timers.append(seconds))
    in_process.call("--only", "baseline", "--repeat", 1, "--budget", 4)
    assert timers == [4 * 60 - 15, 0]


@pytest.mark.parametrize(
    "host, found", [(HOST | {"uuid": None}, ("cpu", "nano", 128, 20, 1)), (GPU, ("cuda", "gpt2", 1024, 50, 3))]
)
def test_the_defaults_depend_on_the_device(host, found, monkeypatch):
    monkeypatch.setattr(run, "ask", lambda *_: dict(host))
    monkeypatch.setattr("sys.argv", ["run.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    _, args, _ = run.arguments()
    run.fill_defaults(args, run.describe_host(args)[0])
    assert (args.device, args.model, args.seq_len, args.steps, args.repeat) == found and args.batch_size == 4


def test_without_out_a_measurement_of_the_last_day_is_continued_and_no_other(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    lines = in_process.call("--only", "01", "--repeat", 1)
    host, results, today = lines[0]["host"], tmp_path / "results", records.now()[:10]
    todo = [line | {"settings": line["settings"] | {"precision": None}} for line in lines]

    def write(name, days, **changed):
        (results / name).mkdir(parents=True)
        for one in lines:
            records.append(results / name / "runs.jsonl", one | {"started": records.now(days)} | changed)

    assert run.choose_folder(None, todo, host) == (results / f"made-up-r-9000-{today}", [])
    write("made-up-r-9000-2026-01-01", -2)
    assert run.choose_folder(None, todo, host) == (results / f"made-up-r-9000-{today}", [])
    write(f"made-up-r-9000-{today}", 0, source="an edited script")
    assert run.choose_folder(None, todo, host) == (results / f"made-up-r-9000-{today}-2", [])
    write("made-up-r-9000-2026-01-02", -0.5)
    folder, found = run.choose_folder(None, todo, host)
    assert folder.name == "made-up-r-9000-2026-01-02" and len(found) == len(lines)


def test_a_script_does_not_outlive_the_measurement(tmp_path):
    ids = []

    def press_ctrl_c():
        ids.append(int((tmp_path / "id").read_text()))
        raise KeyboardInterrupt

    wait = f"import os, time; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid()))\n"
    wait += "print('step    0', flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run.execute(["-c", wait], tmp_path, press_ctrl_c)
    with pytest.raises(ProcessLookupError):
        os.kill(ids[0], 0)


# ---- the real scripts


@pytest.mark.slow
def test_make_ladder_measures_the_real_scripts_and_continues_after_ctrl_c(clone):
    """The scripts are not compiled, and the peak is that of a smaller matmul, to save time."""
    # Edit the scripts to turn off compilation, because run.py unsets TORCH_COMPILE_DISABLE.
    for script in (*since(5), "measure/peers.py", "measure/roof.py"):
        text = (clone / script).read_text(encoding="utf-8").replace("torch_compile=True", "torch_compile=False")
        text = text.replace("model.compile(", "dict(").replace("square=2048", "square=1024")
        (clone / script).write_text(text, encoding="utf-8")
    flags = "--model nano --device cpu --batch-size 1 --seq-len 16 --steps 2 --only baseline --peers --profile"
    command = ["make", "ladder", f"ARGS={flags}"]
    printed, _ = press_ctrl_c_at("pass 1  baseline.py: ", command, clone)
    assert "\n7 of 9 runs are left: run the same command again\n" in printed
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "pass 1  baseline.py" not in done.stdout and "pass 1  transformers.Trainer: " in done.stdout
    (path,) = [path for path in clone.glob("results/*/runs.jsonl") if not (ROOT / path.relative_to(clone)).exists()]
    data = records.load(path.parent)
    assert len(data.rows) == 4 and data.host["torch"] == torch.__version__
    for row in data.rows.values():
        assert row["error"] is None and [len(one["step_ms"]) for one in row["runs"]] == [2], row["script"]
        assert 0 < row["peak_share"] < 1 and list(row["profile"]["groups_ms"]) == list(plots.GROUPS), row["script"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    assert data.lines[0]["commit"].startswith(head)


@pytest.mark.slow
def test_the_measured_speed_agrees_with_an_outside_clock():
    """Step times agree with the intervals between printed lines in at least one of three tries.

    Three tries are allowed because other processes may slow down the machine.
    """
    command = [sys.executable, ROOT / "speedup_04_residual_init.py", "--steps", "20"]
    for _ in range(3):
        printed, came = "", []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for said in child.stdout:
                printed += said
                came += [time.perf_counter()] * said.startswith("step ")
        inside, outside = sum(records.parse(printed, steps=20)["step_ms"][5:]) / 1000, came[-1] - came[4]
        if inside == pytest.approx(outside, rel=0.05):
            return
    pytest.fail(f"the steps say that they took {inside:.2f} s, and their lines came within {outside:.2f} s")


def test_a_script_that_is_profiled_or_counted_finds_the_files_beside_it(tmp_path, capsys):
    (tmp_path / "script.py").write_text("import beside_the_script")
    (tmp_path / "beside_the_script.py").write_text("print('found')")
    kernels.run_script(tmp_path / "script.py")
    assert capsys.readouterr().out == "found\n" and str(tmp_path) not in sys.path
