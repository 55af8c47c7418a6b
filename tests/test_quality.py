"""The measured quality of each rung is the loss on text that the script did not train on, and evaluating is not timed.

The steps and seconds to a loss are checked on runs with known answers. The committed results cover every rung with five
seeds, and Muon and AdamW with three seeds at each of at least five learning rates.
"""

import itertools
import json
import math
from types import SimpleNamespace

import heldout
import numpy as np
import pytest
import quality
import torch
from conftest import MUON, ROOT, SCRIPTS, STEP, load, watch
from ladder import title

TEN = SCRIPTS[10]
SIZES = "--steps", 5, "--batch-size", 2, "--seq-len", 16, "--device", "cpu"


@pytest.fixture
def train(monkeypatch, capsys):
    """Return a function that runs heldout.train() in this process and returns (its result, what the script printed)."""

    def train(script, max_lr=None, steps=5):
        module = load(script)
        monkeypatch.setattr(heldout, "load", lambda _: module)
        # If an earlier test used AdamW, its step calls the hooks, and Muon's step would call them a second time.
        step = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", step.__wrapped__ if hasattr(step, "hooked") else step)
        with torch.compiler.set_stance("force_eager"):
            found = heldout.train(script, max_lr, [str(word) for word in ("--steps", steps, *SIZES[2:])])
        return found, capsys.readouterr().out

    return train


def test_the_text_is_split_without_loss_and_a_tenth_is_held_out(tmp_path):
    training, held_out = (path.read_bytes() for path in heldout.split(ROOT / "input.txt", tmp_path))
    assert training + held_out == (ROOT / "input.txt").read_bytes()
    assert len(held_out) / len(training + held_out) == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize("script", [SCRIPTS[0], TEN, MUON])
def test_a_script_trains_as_ever_and_is_evaluated_on_the_held_out_text(script, train, tmp_path):
    found, printed = train(script)
    training, held_out = heldout.split(ROOT / "input.txt", tmp_path)
    alone = watch(script, *SIZES, "--data", training)
    assert [match["loss"] for match in STEP.finditer(printed)] == [step.printed["loss"] for step in alone]
    assert (found["steps"], len(found["ms"])) == ([1, 2, 3, 4, 5], 5)
    module = load(script)
    model, loader = module.GPT(module.MODELS["nano"]), module.DataLoaderLite(held_out, 2, 16)
    count = (len(loader.tokens) - 1) // 32
    batches = [loader.next_batch() for _ in range(count)][:: count // 8]
    for step, loss in zip(alone, found["losses"], strict=True):
        model.load_state_dict(step.after, strict=False)  # a tied head has no entry of its own
        with torch.no_grad():
            assert loss == pytest.approx(np.mean([model(x, y).item() for x, y in batches]), abs=1e-5)


def test_evaluations_are_not_timed(train, monkeypatch):
    clock = itertools.count()
    evaluate = heldout.evaluate

    def slow(*args):
        for _ in range(10_000):
            next(clock)
        return evaluate(*args)

    monkeypatch.setattr(heldout, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(heldout, "evaluate", slow)
    found, _ = train(SCRIPTS[0])
    assert len(found["losses"]) == 5 and max(found["ms"]) < 1000 * 10_000


def test_a_learning_rate_reaches_the_schedule(train):
    for rate in (1e-3, 2e-3):
        _, printed = train(TEN, rate)
        assert [float(match["lr"]) for match in STEP.finditer(printed)][0] == pytest.approx(rate / 10)


def test_steps_to_a_loss_are_interpolated():
    run = {"steps": [10, 20, 30], "losses": [6.0, 5.0, 5.2]}
    assert quality.steps_to(run, 5.5) == pytest.approx(15)
    assert quality.steps_to(run, 5.0) == pytest.approx(20)
    assert quality.steps_to(run, 4.9) == math.inf
    assert quality.steps_to(run, 4.9999) == pytest.approx(20)  # a difference that rounding alone can cause


def measured(rates, losses):
    """Return a measurement of rungs 00 and 01 with two seeds. `losses` are the final losses, halfway it is 9."""
    settings = {"scripts": SCRIPTS[:2], "max_lr": rates, "model": "nano", "steps": 100, "seeds": 2, "jobs": 1}
    runs, jobs = [], itertools.product(SCRIPTS[:2], rates, range(2))
    for (script, rate, seed), loss in zip(jobs, losses, strict=True):
        ms = 20.0 if script == SCRIPTS[0] else 10.0
        runs.append({"script": script, "max_lr": rate, "seed": seed, "steps": [50, 100], "losses": [9, loss], "ms": ms})
    return {"settings": settings, "runs": runs}


def test_a_rung_is_compared_with_the_rung_before_at_the_same_seed():
    base, one = quality.compare(measured([None], [8.0, 8.1, 7.0, 8.5]))
    assert base["other"] is None and base["steps"] == []
    assert one["other"] is base and one["differences"] == pytest.approx([-1.0, 0.4])
    assert one["steps"] == [pytest.approx(75), math.inf]
    assert one["seconds"] == [pytest.approx(0.75), math.inf]
    assert one["gain"] == [pytest.approx(2.0 / 0.75), -math.inf]  # rung 00 takes 100 steps of 20 ms
    _, row = quality.cells(measured([None], [8.0, 8.1, 7.0, 8.5]))
    assert (row["script"], row["difference"]) == (title(SCRIPTS[1]), "−0.300 (−1.000 to +0.400)")
    assert (row["steps to the other's loss"], row["seconds to it"]) == (
        ">100 (75–>100)",
        "not reached (0.8–not reached)",
    )


def test_with_learning_rates_each_row_is_compared_with_the_best_of_the_first_script():
    rows = quality.compare(measured([1e-3, 2e-3], [8.0, 8.2, 7.4, 7.6, 7.5, 7.5, 7.0, 7.0]))
    assert [row["other"] is rows[1] for row in rows] == [True] * 4 and rows[1]["steps"] == []
    assert rows[3]["differences"] == pytest.approx([-0.4, -0.6])
    assert quality.best(rows) is rows[3]
    assert len(quality.curves(measured([1e-3], [8, 8, 7, 7])).axes[0].lines) == 2


def test_a_measurement_continues_where_it_ended(monkeypatch, tmp_path, capsys):
    trained, out = [], tmp_path / "quality.json"

    def pretend(script, max_lr, seed, settings, cache):
        trained.append((script, seed))
        return {"script": script, "max_lr": max_lr, "seed": seed, "steps": [50, 100], "losses": [9, 7], "ms": 1.0}

    monkeypatch.setattr(quality, "train", pretend)
    monkeypatch.setattr(quality.render, "write_svg", lambda *_: None)
    data = measured([None], [7.9, 8.1, 7.0, 8.5])
    data["settings"]["device"] = "cuda"
    del data["runs"][1], data["runs"][-1]
    quality.measure(data, out)
    assert sorted(trained) == [(SCRIPTS[0], 1), (SCRIPTS[1], 1)]
    assert len(json.loads(out.read_text())["runs"]) == 4 and "2 runs to go" in capsys.readouterr().out
    quality.measure(data, out)
    assert len(trained) == 2


@pytest.mark.slow
def test_a_small_measurement_ends_with_a_table_and_a_plot(run, tmp_path):
    out = tmp_path / "quality.json"
    words = "--scripts", SCRIPTS[0], SCRIPTS[1], "--steps", 2, "--seeds", 1, "--device", "cpu"
    done = run("measure/quality.py", *words, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "01 Weight tying" in done.stdout and out.with_suffix(".svg").exists()
    assert [run["script"] for run in json.loads(out.read_text())["runs"]] == SCRIPTS[:2]


def test_the_published_results_have_enough_seeds_and_rates():
    names = "quality", "quality-optimizer", "muon"
    data, later, muon = (json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in names)
    assert (data["settings"]["scripts"], later["settings"]["scripts"]) == (SCRIPTS[:8], SCRIPTS[7:11])
    assert min(data["settings"]["seeds"], later["settings"]["seeds"]) >= 5
    assert muon["settings"]["scripts"] == [TEN, MUON]
    assert len(muon["settings"]["max_lr"]) >= 5 and muon["settings"]["seeds"] >= 3
    for measurement in (data, later, muon):
        settings = measurement["settings"]
        jobs = itertools.product(settings["scripts"], settings["max_lr"], range(settings["seeds"]))
        assert {(run["script"], run["max_lr"], run["seed"]) for run in measurement["runs"]} == set(jobs)
    for script in (TEN, MUON):  # otherwise, a rate outside the range could be better
        rows = [row for row in quality.compare(muon) if row["script"] == script]
        assert quality.best(rows)["max_lr"] not in (min(muon["settings"]["max_lr"]), max(muon["settings"]["max_lr"]))
