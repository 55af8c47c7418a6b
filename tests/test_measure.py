"""`make ladder` runs what it was asked to, logs what happened, and resumes after an interruption."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, RUNGS, SCRIPTS, SIDE, commit_all, play

from measure import counts, device, plots, records, run, timeline

FOUR, FIVE, TEN = SCRIPTS[4], SCRIPTS[5], SCRIPTS[10]
HOST = {"id": "0123abcd", "device": "cpu", "name": "Made Up(R) 9000", "capability": "AVX2", "torch": "2", "cuda": None}
HOST |= {"python": "3", "cores": 2, "threads": 2, "system": "Linux", "memory_gib": 8.0, "uuid": None}
HOST |= {"device_memory_gib": None}
GPU = HOST | {"device": "cuda:1", "uuid": "1", "device_memory_gib": 80.0, "driver": "1", "cuda": "1", "cudnn": 91501}
ROOF = {"copy_gb_per_s": 20.0, "matmul": [{"precision": "bf16", "name": "square", "shape": [8, 8, 8], "tflops": 0.5}]}
PROFILE = {"groups_ms": dict.fromkeys(plots.GROUPS, 1.25), "attention": "flash", "reserved_gib": 2.5}
STEP = {"ms": 9.5, "names": [["matmul", "mm"]], "kernels": [[0.5, 8.5, 0]]}


def output(times, losses, memory=1.5):
    """Return the output of a script whose steps take `times` milliseconds."""
    steps = [
        f"step {step:4d} | loss {loss:.6f} | lr 6.0000e-04 | norm 2.5803 | dt {ms:8.2f} ms | {9:10,.0f} tok/s"
        for step, (ms, loss) in enumerate(zip(times, losses, strict=True))
    ]
    return "\n".join([*steps, f"median of steps 0-1: 1.00 ms, 1 tok/s, peak memory {memory:.2f} GiB\n"])


def test_a_log_has_what_was_printed_and_its_median_is_of_the_same_steps_as_in_the_scripts():
    found = records.parse(output([12.5, 7.25], [10.5, 9.25], memory=2.75), steps=2)
    assert found == {"step_ms": [12.5, 7.25], "losses": [10.5, 9.25], "peak_gib": 2.75, "error": None}
    assert records.parse(output([12.5, 7.25], [1, 2]), steps=3)["error"] == "ended after 2 of 3 steps"
    for count, first in (20, 10), (50, 10), (19, 9), (1, 0):  # `first` is in the median
        assert records.steady(list(range(count))) == list(range(first, count))


def test_a_line_that_a_kill_cut_in_half_is_dropped_and_a_finished_run_is_on_the_disk(tmp_path, monkeypatch):
    path, first, second = tmp_path / "runs.jsonl", dict.fromkeys(records.KEYS, 1), dict.fromkeys(records.KEYS, 2)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    records.append(path, first)
    whole = path.read_bytes()
    records.append(path, second)
    both = path.read_bytes()
    assert records.read(path) == [first, second] and synced == [len(whole), len(both)]
    for length in range(len(whole), len(both), 10):
        path.write_bytes(both[:length])
        assert records.read(path) == [first]
        records.append(path, second)
        assert path.read_bytes() == both
    path.write_bytes(b'{"script": \n' + whole)
    with pytest.raises(ValueError, match="line 1 is not a run"):
        records.read(path)


@pytest.mark.parametrize("script", [TEN, "ddp_run.py", "branches/fsdp_run.py"])
def test_a_row_counts_the_tokens_that_its_script_trains_on(script):
    printed = play(*run.command(script, {"model": "nano", "batch_size": 2, "seq_len": 16, "steps": 1, "device": "cpu"}))
    ms, rate = re.search(r"dt +(\S+) ms \| +(\S+) tok/s", printed).groups()
    assert float(rate.replace(",", "")) * float(ms) / 1000 == pytest.approx(2 * 16, rel=0.05)


def test_a_script_runs_without_variables_that_change_it_and_does_not_outlive_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("RANK", "1")
    look = "import os; print(*map(os.environ.get, ('NVIDIA_TF32_OVERRIDE', 'RANK', 'TORCHINDUCTOR_CACHE_DIR')))"
    assert run.execute(["-c", look], tmp_path) == (f"None None {tmp_path}\n", "", 0)
    ids, wait = [], f"import os, time; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid()))\n"

    def press_ctrl_c():
        ids.append(int((tmp_path / "id").read_text()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.execute(["-c", f"{wait}print('step    0', flush=True); time.sleep(600)"], tmp_path, press_ctrl_c)
    with pytest.raises(ProcessLookupError):
        os.kill(ids[0], 0)


# ---- a measurement of made-up scripts


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Return a namespace with `call`, which runs run.py in this process on fake scripts and returns the log's lines.

    `cut` is the number of the run during which run.py is stopped, as by Ctrl-C or at the end of its time budget. `ran`
    lists the commands that were executed, and `asked` the modules that were asked. The scripts in `fail` fail.
    """
    state = SimpleNamespace(host=GPU, fail=(), timers=[], drawn=[])

    def ask(module, *words):
        state.asked.append(shlex.join(map(str, (module, *words))))
        return state.host | {} if module == "device" else ROOF | {"gpu": {"clock_mhz": 1}}

    def execute(words, cache, on_step):
        state.ran.append(shlex.join(map(str, words)))
        if len(state.ran) == state.cut:
            signal.raise_signal(signal.SIGALRM)
        cold = not cache.exists()
        cache.mkdir(exist_ok=True)
        state.caches.append(cache.name)
        state.steps, count = 0, int(words[words.index("--steps") + 1])
        for state.steps in range(1, count + 1):
            on_step()
        state.steps = 0
        if set(words) & set(state.fail):
            return "", "a.py: error: out of memory: lower --batch-size", 1
        script = next(place for place, name in enumerate([*SCRIPTS, "compiled", "trainer"]) if name in words)
        printed = output(
            [999.0 if cold else 99.0] + [30.0 + script] * (count - 1), [9 - n / 8 for n in range(count)], script
        )
        profile = PROFILE | {"step": STEP | {"ms": 9.5 + script}}
        printed += json.dumps(profile) * ("measure.kernels" in words)
        return ("no bf16 here: it takes a GPU that has it\n" if FIVE in words else "") + printed, "", 0

    def call(*words, out="out", cut=None):
        state.cut, state.ran, state.caches, state.asked, state.steps = cut, [], [], [], 0
        folder = tmp_path / str(out)
        monkeypatch.setattr("sys.argv", ["run.py", *map(str, ["--out", folder][: 2 * bool(out)]), *map(str, words)])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4ab, MIG-7cd")
        before = {number: signal.getsignal(number) for number in run.STOPS}
        try:
            run.main()
        except SystemExit as end:
            if end.code != 0:  # status 0 means that the time budget is spent
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return records.read(folder / "runs.jsonl") if out else None

    for owner, name, value in (
        (run, "ask", ask),
        (run, "execute", execute),
        (records, "commit", lambda: "01234567"),
        (device, "load", lambda gpu: "a browser" if gpu == ("1",) else None),
        (device, "reading", lambda gpu: {"clock_mhz": 1000 + state.steps}),
        (device, "find_gpu", lambda *uuid: uuid),
        (plots, "write_svg", lambda figure, path: state.drawn.append(path.name)),
        (signal, "setitimer", lambda kind, seconds: state.timers.append(seconds)),
    ):
        monkeypatch.setattr(owner, name, value)
    return SimpleNamespace(call=call, state=state)


EVERYTHING = "--steps 4 --only 05 --repeat 3 --peers --profile --batches".split()
OPTIONS = "--model gpt2 --batch-size 3 --seq-len 64 --device cuda:1".split()


def test_every_option_reaches_the_scripts_and_each_run_is_logged_as_it_was(made_up, tmp_path, capsys):
    lines, state = made_up.call(*EVERYTHING, *OPTIONS, "--budget", 4), made_up.state
    roof, *lines = lines
    flags = "--model gpt2 --batch-size 3 --seq-len 64"
    assert state.asked == ["device --device cuda:1", f"roof {flags} --device cuda"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-7cd"  # transformers.Trainer would use every GPU
    assert state.timers == [4 * 60 - 15, 0]  # leaves time for the table
    names = [FOUR, FIVE, TEN, "-m measure.peers compiled", "-m measure.peers trainer"]
    ran = [f"{name} {flags} --steps 4 --device cuda" for name in names]
    profiles = [f"-m measure.kernels {name} {flags} --steps 12 --device cuda" for name in names]
    modes = "default", "reduce-overhead"
    sizes = [(size, mode) for size in (1, 4, 16, 64) for mode in modes]
    batches = [f"--model gpt2 --batch-size {B} --seq-len 64 --steps 4 --compile-mode {mode}" for B, mode in sizes]
    batches = [f"{TEN} {batch} --device cuda" for batch in batches]
    assert state.ran == [*ran, *profiles, *batches, *ran[::-1], *ran]
    # each script and batch size compiles with nothing in its cache, and finds its own kernels there later
    assert len(set(state.caches)) == 5 + 8
    first = [line["step_ms"][0] for line in lines if line["kind"] != "profile"]
    assert first == [999.0] * 5 + [999.0] * 8 + [99.0] * 10

    kinds = 3 * ["rung"] + 2 * ["peer"]
    assert [line["kind"] for line in lines] == [*kinds, *["profile"] * 5, *["batch"] * 8, *kinds[::-1], *kinds]
    assert [line["pass"] for line in lines] == [1] * 5 + [None] * 13 + [2] * 5 + [3] * 5
    settings = {"model": "gpt2", "batch_size": 3, "seq_len": 64, "steps": 4}
    host = GPU | {"device": "cuda"}
    del host["uuid"]
    about = {"commit": "01234567", "host": host, "error": None, "command": "python -m measure.run "}
    about["command"] += " ".join([*EVERYTHING, *OPTIONS])  # without --out and --budget
    before = {"clock_mhz": 1000, "load": "a browser"}
    about["gpu"] = {"before": before, "middle": {"clock_mhz": 1003}}  # after the third of four steps
    five = {"script": FIVE, "kind": "rung", "pass": 1, "figures": None, "settings": settings | {"precision": "tf32"}}
    five |= {"step_ms": [999.0, 35.0, 35.0, 35.0], "losses": [9.0, 8.875, 8.75, 8.625], "peak_gib": 5.0}
    assert lines[1] == lines[1] | about | five  # made-up rung 05 takes 35 ms and 5 GiB, and prints that it lacks bf16
    assert lines[6]["figures"] == PROFILE and lines[6]["step_ms"] is lines[6]["peak_gib"] is None
    assert (lines[6]["script"], lines[6]["settings"]["steps"]) == (FIVE, 12)
    steps = timeline.read(tmp_path / "out")  # the kernels have a file of their own
    assert [(script, step["ms"]) for script, step in steps.items()] == [(FOUR, 13.5), (FIVE, 14.5), (TEN, 19.5)]
    assert steps[TEN] == STEP | {"ms": 19.5}
    assert {"tokens.svg", "steps.svg", "steps-narrow.svg"} < set(state.drawn)
    assert lines[17]["settings"] == settings | {"batch_size": 64, "compile_mode": modes[1], "precision": "bf16"}
    roof_line = {"figures": ROOF, "settings": settings | {"precision": None}, "step_ms": None}
    assert roof == roof | about | roof_line | {"gpu": {"before": before, "middle": {"clock_mhz": 1}}}
    printed = capsys.readouterr().out
    for said in (
        "roof  roof: bf16 0.5 TFLOP/s (busy: a browser)",
        f"pass 1  {FIVE}: 35.00 ms (busy: a browser)",
        f"profile  {FIVE}: 8.75 ms (busy: a browser)",  # seven groups of 1.25 ms
        f"B 64, reduce-overhead  {TEN}: 40.00 ms (busy: a browser)",
    ):
        assert said in printed
    made_up.call("--only", "muon", "--profile", "--repeat", 1, out="muon")
    assert set(timeline.read(tmp_path / "muon")) == {TEN, SIDE.muon}


def alike(lines):
    return [{key: value for key, value in line.items() if key not in ("started", "step_ms")} for line in lines]


@pytest.mark.parametrize("cut", [2, 9])
def test_a_killed_measurement_resumes_and_repeats_no_run(made_up, tmp_path, cut):
    whole, ran = made_up.call(*EVERYTHING, out=tmp_path / "whole"), made_up.state.ran
    killed = made_up.call(*EVERYTHING, cut=cut)
    assert len(killed) == cut and made_up.state.ran == ran[:cut]
    with open(tmp_path / "out" / "runs.jsonl", "ab") as log:
        log.write(b'{"script": "baseline.py", "kin')  # as a kill while it writes leaves it
    assert alike(made_up.call(*EVERYTHING)) == alike(whole) and made_up.state.ran == ran[cut - 1 :]
    lines = made_up.call(*EVERYTHING, "--repeat", 4)  # options can be added to a measurement
    assert len(made_up.state.ran) == 5 and lines[-1]["pass"] == 4


def test_a_script_that_fails_is_a_line_and_is_tried_again(made_up, capsys):
    made_up.state.fail = {FIVE}
    lines = made_up.call("--repeat", 1)
    assert [line["script"] for line in lines if line["error"]] == [FIVE] and len(lines) == 13
    assert lines[6]["error"] == "a.py: error: out of memory: lower --batch-size"
    with pytest.raises(SystemExit) as end:  # if everything fails, so does the measurement, after one pass
        made_up.call()
    assert end.value.code == 2 and "run.py: error: every script failed" in capsys.readouterr().err
    assert made_up.state.ran == [f"{FIVE} --model gpt2 --batch-size 4 --seq-len 1024 --steps 50 --device cuda"]
    made_up.state.fail = ()
    assert not made_up.call("--repeat", 1)[-1]["error"] and len(made_up.state.ran) == 1
    made_up.call()  # a GPU gets three passes
    assert len(made_up.state.ran) == 24
    lines = made_up.call("--branches", "--repeat", 1)
    branches = [(rung.file, "branch") for rung in RUNGS.values() if rung.part == "branch"]
    assert [(line["script"], line["kind"]) for line in lines if line["kind"] == "branch"] == branches


def test_another_measurement_is_never_mixed_in(made_up, tmp_path, monkeypatch, capsys):
    made_up.call("--repeat", 1)
    before = (tmp_path / "out" / "runs.jsonl").read_bytes()
    cases = [([], {key: "other"}, f"a different {key}") for key in run.SAME_HOST[1:]]
    for words, changed, said in (["--batch-size", 5], {}, "different settings"), *cases, ([], {}, "a different roof"):
        if said == "a different roof":  # the program has another hash
            monkeypatch.setattr(records, "source", lambda *files: "0")
        made_up.state.host = GPU | changed
        with pytest.raises(SystemExit):
            made_up.call("--repeat", 1, *words)
        assert f"was measured with {said}: use another folder" in capsys.readouterr().err
        assert (tmp_path / "out" / "runs.jsonl").read_bytes() == before and not made_up.state.ran


def test_without_out_a_measurement_of_the_last_day_is_continued_and_no_other(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    made_up.state.host, flags = HOST, "--model nano --batch-size 4 --seq-len 128 --steps 20 --device cpu"
    for day, words, folder, ran in (
        (1, [], "2026-01-01", [f"{script} {flags}" for script in SCRIPTS[:2]]),  # a CPU gets one pass
        (1, [], "2026-01-01", []),
        (1, ["--batch-size", 5], "2026-01-01-2", None),
        (1, ["--only", "02"], "2026-01-01-3", None),  # otherwise, a pass would mix runs of different hours
        (3, [], "2026-01-03", None),
    ):
        monkeypatch.setattr(records, "now", lambda days=0, day=day: f"2026-01-{day + days:02d}T10:00:00+00:00")
        made_up.call("--only", "01", *words, out=None)
        assert ran == made_up.state.ran or (ran is None and len(made_up.state.ran) == 2)
        assert (tmp_path / "results" / f"cpu-made-up-r-9000-{folder}" / "runs.jsonl").exists()


def test_a_measurement_names_its_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    for text, end in ("one", ""), ("two", " and uncommitted changes"):
        (tmp_path / "file").write_text(text)
        if text == "one":
            commit_all(tmp_path)
        assert re.fullmatch(f"[0-9a-f]{{40}}{end}", records.commit())


# ---- the real scripts


@pytest.mark.slow
def test_make_ladder_measures_a_real_script(tmp_path):
    words = f"--model nano --device cpu --batch-size 1 --seq-len 16 --steps 2 --only 01 --profile --out {tmp_path}"
    shown = subprocess.run(["make", "-n", "ladder", f"ARGS={words}"], cwd=ROOT, capture_output=True, text=True).stdout
    command = [sys.executable, *shlex.split(shown.splitlines()[-1])[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    data = records.load(tmp_path)
    assert list(data.rows) == SCRIPTS[:2] and data.host["torch"] == torch.__version__
    for row in data.rows.values():
        assert row["error"] is None and [len(one["step_ms"]) for one in row["runs"]] == [2], row["script"]
        assert 0 < row["peak_share"] < 1 and list(row["profile"]["groups_ms"]) == list(plots.GROUPS), row["script"]
    for script, step in timeline.read(tmp_path).items():
        counted = counts.step(RUNGS[script], "nano", 1, 16, cuda=False)
        found = timeline.slowest(step, counted)  # the profile and the counts have the same kernels
        assert [row["MB"] for row in found if row["kernel"] != "local_scalar_dense"].count("") == 0, (script, found)
