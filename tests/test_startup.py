"""The first steps of two scripts are compared with empty caches and in turns.

The step at which the slower starter catches up is checked on runs with known answers.
"""

import json
import subprocess
import sys

import pytest
import startup
from conftest import ROOT

SCRIPTS = "baseline.py", "speedup_01_weight_tying.py"


def runs(script, *pairs):
    return [{"script": script, "first_s": first, "ms": ms} for first, ms in pairs]


def table(slow, fast):
    """Return the table of two scripts, each with a run per (seconds of the first step, ms of a later step)."""
    both = [*runs(SCRIPTS[0], *slow), *runs(SCRIPTS[1], *fast)]
    return startup.cells({"settings": {"scripts": SCRIPTS}, "runs": both})


def test_the_slower_starter_is_ahead_from_the_step_at_which_the_total_times_are_equal():
    slow, fast = {"first_s": 60.0, "ms": 100.0}, {"first_s": 20.0, "ms": 300.0}
    steps = startup.ahead(slow, fast)
    total = [run["first_s"] + (steps - 1) * run["ms"] / 1000 for run in (slow, fast)]
    assert steps == 201 and total[0] == pytest.approx(total[1]) == 80
    assert startup.ahead(fast, slow) == 201  # in either order
    assert startup.ahead(slow, fast | {"ms": 90.0}) is None  # the faster starter also has the shorter steps


def test_the_table_shows_medians_ranges_and_who_is_ahead_when():
    one, two = table([(60, 100), (58, 100), (64, 100)], [(20, 300), (18, 300), (20, 300)])
    assert one["first step, s"] == "60.0 (58.0–64.0)" and one["ms per later step"] == "100"
    assert (one["shorter total time"], two["shorter total time"]) == ("from step 201 (201–221)", "at first")
    one, two = table([(60, 100), (58, 310)], [(20, 300), (18, 300)])  # noise: in one pair, the steps do not differ
    assert (one["shorter total time"], two["shorter total time"]) == ("not reached in every pair of runs", "at first")


def test_two_scripts_run_in_turns_and_the_runs_are_saved(tmp_path):
    words = *SCRIPTS, "--batch-size", 1, "--seq-len", 8, "--steps", 3, "--repeat", 2, "--out", tmp_path / "runs.json"
    command = [sys.executable, "measure/startup.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "runs.json").read_text())
    assert [run["script"] for run in data["runs"]] == [*SCRIPTS, *reversed(SCRIPTS)]
    assert all(run["first_s"] > 0 and run["ms"] > 0 for run in data["runs"])
    assert done.stdout.endswith(startup.summary(data)) and "3 steps, 2 runs of each script" in done.stdout


def test_every_run_starts_with_an_empty_cache(monkeypatch):
    caches = []

    def execute(words, cache):
        caches.append(cache)
        assert not list(startup.Path(cache).iterdir())
        (startup.Path(cache) / "kernel").touch()
        return "".join(f"step {n:4d} | loss 1.000000 | dt {100:8.2f} ms | {5:10,} tok/s\n" for n in range(3)), "", 0

    monkeypatch.setattr(startup, "execute", execute)
    settings = {"model": "nano", "batch_size": 1, "seq_len": 8, "steps": 3, "device": "cpu", "repeat": 2}
    startup.measure(settings | {"scripts": SCRIPTS})
    assert len(set(caches)) == 4


@pytest.mark.parametrize(
    "words, says",
    [
        (["baseline.py"], "expected two of baseline.py, "),
        (["baseline.py", "mine.py"], "expected two of baseline.py, "),
        (["baseline.py", "baseline.py"], "expected two of baseline.py, "),
        ([*SCRIPTS, "baseline.py"], "expected two of baseline.py, "),
        ([*SCRIPTS, "--steps", "1"], "need at least 2 for --steps"),
        ([*SCRIPTS, "--out", "."], "--out .: cannot write a file there"),
        ([*SCRIPTS, "--model", "gpt9", "--steps", "2"], "invalid choice: 'gpt9'"),
    ],
)
def test_a_wrong_command_is_one_line(words, says):
    done = subprocess.run([sys.executable, "measure/startup.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
