"""The quality of a rung is its loss on text that it did not train on, compared at the same seed and learning rates."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MUON, ROOT, SCRIPTS, STEP, load, made_up_gpu, watch

from measure import quality

TEN = SCRIPTS[10]
SIZES = "--model nano --steps 5 --batch-size 2 --seq-len 16".split()


@pytest.fixture
def train(monkeypatch, capsys):
    """Return a function that runs quality.train() in this process and returns (its result, what the script printed)."""

    def train(script, max_lr=None, device="cpu"):
        # If an earlier test used AdamW, its step calls the hooks, and Muon's step would call them a second time.
        step = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", step.__wrapped__ if hasattr(step, "hooked") else step)
        with torch.compiler.set_stance("force_eager"):
            found = quality.train(load(script), max_lr, [*SIZES, "--device", device])
        return found, capsys.readouterr().out

    yield train
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("script", [SCRIPTS[0], TEN, MUON])
def test_a_script_trains_as_ever_and_is_evaluated_on_the_held_out_text(script, train, tmp_path):
    found, printed = train(script)
    training, held_out = quality.split(ROOT / "input.txt", tmp_path)
    text = (ROOT / "input.txt").read_bytes()
    assert training.read_bytes() + held_out.read_bytes() == text
    assert held_out.stat().st_size / len(text) == pytest.approx(0.1, abs=0.001)
    alone = watch(script, *SIZES, "--data", training)
    assert [match["loss"] for match in STEP.finditer(printed)] == [step.printed["loss"] for step in alone]
    assert (found["steps"], len(found["ms"])) == ([1, 2, 3, 4, 5], 5)
    module = load(script)
    model, loader = module.GPT(module.MODELS["nano"]), module.DataLoaderLite(held_out, 2, 16)
    count = (len(loader.tokens) - 1) // 32
    batches = [loader.next_batch() for _ in range(count)][:: count // 8]
    for step, loss in zip(alone, found["losses"], strict=True):
        model.load_state_dict(step.after, strict=False)  # a tied head has no entry of its own
        assert loss == pytest.approx(np.mean([model(x, y).item() for x, y in batches]), abs=1e-5)


def test_a_tf32_rung_trains_in_tf32_between_evaluations_in_float32(train, monkeypatch):
    module, used = load(SCRIPTS[2]), set()
    forward, state = module.GPT.forward, lambda: (torch.is_grad_enabled(), torch.get_float32_matmul_precision())
    monkeypatch.setattr(module.GPT, "forward", lambda *inputs: used.add(state()) or forward(*inputs))
    with made_up_gpu(None, (8, 0)):
        train(SCRIPTS[2], device="cuda")
    assert used == {(True, "high"), (False, "highest")}  # with gradients, and without


def test_evaluations_are_not_timed(train, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(quality, "evaluate", lambda *_: len([next(clock) for _ in range(10_000)]))  # takes 10,000 s
    monkeypatch.setattr(quality.time, "perf_counter", lambda: next(clock))
    found, _ = train(SCRIPTS[0])
    assert found["losses"] == [10_000] * 5 and max(found["ms"]) < 1000 * 10_000


def test_a_learning_rate_reaches_the_schedule(train):
    assert float(STEP.search(train(TEN, 2e-3)[1])["lr"]) == pytest.approx(2e-3 / 10)  # step 1 of 10 of the warm-up


def test_steps_to_a_loss_are_interpolated():
    run = {"steps": [10, 20, 30], "losses": [6.0, 5.0, 5.2]}
    for loss, steps in (5.5, 15), (5.0, 20), (4.9, np.inf), (4.9999, 20):  # the last one may be due to rounding
        assert quality.steps_to(run, loss) == pytest.approx(steps)


def measured(rates, losses):
    """Return a measurement of rungs 00 and 01 with two seeds. `losses` are the final losses, halfway it is 9."""
    ms = {SCRIPTS[0]: 20.0, SCRIPTS[1]: 10.0}
    settings = {"scripts": [*ms], "max_lr": rates, "steps": 100, "seeds": 2, "jobs": 1, "device": "cuda"}
    runs = [
        {"script": script, "max_lr": rate, "seed": seed, "steps": [50, 100], "losses": [9, loss], "ms": ms[script]}
        for (script, rate, seed), loss in zip(itertools.product(ms, rates, range(2)), losses, strict=True)
    ]
    return {"settings": settings, "runs": runs}


def test_a_rung_is_compared_with_the_rung_before_or_the_best_rate_at_the_same_seed():
    data = measured([None], [8.0, 8.1, 7.0, 8.5])
    base, one = quality.compare(data)
    assert base["other"] is None and base["steps"].size == 0
    assert one["other"] is base and one["differences"] == pytest.approx([-1.0, 0.4])
    assert one["steps"] == pytest.approx([75, np.inf]) and one["seconds"] == pytest.approx([0.75, np.inf])
    assert one["gain"] == pytest.approx([2.0 / 0.75, -np.inf])  # rung 00 takes 100 steps of 20 ms
    assert quality.cells(data)[1]["difference"] == "−0.300 (−1.000 to +0.400)"
    rows = quality.compare(measured([1e-3, 2e-3], [8.0, 8.2, 7.4, 7.6, 7.5, 7.5, 7.0, 7.0]))
    assert [row["other"] is rows[1] for row in rows] == [True] * 4 and rows[1]["steps"].size == 0
    assert rows[3]["differences"] == pytest.approx([-0.4, -0.6]) and quality.best(rows) is rows[3]


def test_a_measurement_continues_without_repeating_a_run(monkeypatch, tmp_path):
    data, trained = measured([None], [7.9, 8.1, 7.0, 8.5]), []
    missing = data["runs"].pop(1)
    monkeypatch.setattr(quality, "run", lambda *job: trained.append(job[:3]) or missing)
    quality.measure(data, tmp_path / "quality.json")
    quality.measure(json.loads((tmp_path / "quality.json").read_text()), tmp_path / "quality.json")
    assert trained == [(SCRIPTS[0], None, 1)]


@pytest.mark.slow
def test_a_small_measurement_ends_with_a_table_and_a_plot(tmp_path):
    words = [*"--steps 2 --seeds 1 --device cpu --scripts".split(), *SCRIPTS[:2], "--out", tmp_path / "quality.json"]
    done = subprocess.run([sys.executable, "-m", "measure.quality", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "01 Weight tying" in done.stdout and (tmp_path / "quality.svg").exists()


def test_the_published_results_have_enough_seeds_and_rates():
    adamw, several = SCRIPTS[7:11], [TEN, MUON]
    for name, scripts, seeds in ("quality", SCRIPTS[:8], 5), ("quality-optimizer", adamw, 5), ("muon", several, 3):
        data = json.loads((ROOT / "results" / f"{name}.json").read_text())
        found = {(run["script"], run["max_lr"], run["seed"]) for run in data["runs"]}
        assert found == set(itertools.product(scripts, data["settings"]["max_lr"], range(seeds)))
    for script in several:  # if the best rate were the first or the last, a rate outside the range could be better
        rows = [row for row in quality.compare(data) if row["script"] == script]
        assert len(rows) >= 5 and quality.best(rows) not in (rows[0], rows[-1])
