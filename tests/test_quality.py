"""The quality of a rung is its loss on text that it did not train on, compared at the same seed and learning rates."""

import itertools
import json
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, SIDE, STEP, load, made_up_gpu, watch

from measure import plots, quality, records, tables

BASE, ONE, TEN = SCRIPTS[0], SCRIPTS[1], SCRIPTS[10]
SIZES = "--model nano --steps 5 --batch-size 2 --seq-len 16".split()


@pytest.fixture
def train(monkeypatch, capsys):
    """Return a function that runs `measure.quality train` in this process. It returns (its result, its output)."""

    def train(script, *options, device="cpu"):
        # If an earlier test used AdamW, its step calls the hooks, and Muon's step would call them a second time.
        step = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", step.__wrapped__ if hasattr(step, "hooked") else step)
        monkeypatch.setattr("sys.argv", ["quality.py", "train", script, *options, *SIZES, "--device", device])
        load(script), torch.set_float32_matmul_precision("highest")
        with torch.compiler.set_stance("force_eager"):
            quality.main()
        printed = capsys.readouterr().out
        return json.loads(printed.splitlines()[-1]), printed

    by_name = SimpleNamespace(import_module=lambda name: load(f"{name.replace('.', '/')}.py"))
    monkeypatch.setattr(quality, "importlib", by_name)
    yield train
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("script", [BASE, TEN, SIDE.muon])
def test_measuring_quality_does_not_change_training_and_evaluates_held_out_text(script, train, tmp_path):
    found, printed = train(script, "--seed", "7")
    training, held_out = quality.split(ROOT / "input.txt", tmp_path)
    text = (ROOT / "input.txt").read_bytes()
    assert training.read_bytes() + held_out.read_bytes() == text
    assert held_out.stat().st_size / len(text) == pytest.approx(0.1, abs=0.001)
    alone = watch(script, *SIZES, "--seed", 7, "--data", training)
    assert [match["loss"] for match in STEP.finditer(printed)] == [step.printed["loss"] for step in alone]
    assert (found["steps"], len(found["ms"])) == ([1, 2, 3, 4, 5], 5)
    module = load(script)
    model, loader = module.GPT(module.MODELS["nano"]), module.DataLoaderLite(held_out, 2, 16)
    count = (len(loader.tokens) - 1) // 32
    batches = [loader.next_batch() for _ in range(count)][:: count // 8]
    for step, loss in zip(alone, found["losses"], strict=True):
        model.load_state_dict(step.after, strict=False)  # a tied head has no entry of its own
        assert loss == pytest.approx(np.mean([model(x, y).item() for x, y in batches]), abs=1e-5)


@pytest.mark.parametrize("script, autocast", [(SCRIPTS[2], False), (SCRIPTS[3], True)])
def test_a_rung_trains_in_its_precision_before_and_after_an_evaluation_in_float32(script, autocast, train, monkeypatch):
    module, used = load(script), []
    forward = module.GPT.forward

    def look(*inputs):
        used.append((torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
        return forward(*inputs)

    monkeypatch.setattr(module.GPT, "forward", look)
    with made_up_gpu(None, (8, 0)):
        found, _ = train(script, device="cuda")
        assert torch.get_float32_matmul_precision() == "high"
    assert [key for key, _ in itertools.groupby(used)] == 5 * [(True, "high", autocast), (False, "highest", False)]
    assert len(found["losses"]) == 5


def test_evaluations_are_not_timed(train, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(quality, "evaluate", lambda *_: len([next(clock) for _ in range(10_000)]))  # takes 10,000 s
    monkeypatch.setattr(quality.time, "perf_counter", lambda: next(clock))
    found, _ = train(BASE)
    assert found["losses"] == [10_000] * 5 and 1000 <= min(found["ms"]) <= max(found["ms"]) < 1000 * 10_000


def test_a_learning_rate_reaches_the_schedule(train):
    assert float(STEP.search(train(TEN, "--max-lr", "2e-3")[1])["lr"]) == 2e-4  # step 1 of 10 of the warm-up


@pytest.fixture
def measure(monkeypatch, tmp_path, capsys):
    """Return a function that runs measure.quality on made-up runs. It returns (data, the runs' commands, its output).

    `losses` are the final losses of the seeds by script and learning rate. Halfway, the loss is 9.
    """

    def measure(losses, words):
        def execute(arguments, cache):
            ran.append(" ".join(map(str, arguments)))
            script, rate, seed = re.search(r"train (\S+)(?: --max-lr (\S+))? --seed (\d)", ran[-1]).groups()
            if (script, rate) not in losses:
                return "", "a.py: error: the loss is not finite at step 3", 1
            found = {"steps": [50, 100], "losses": [9.0, losses[script, rate][int(seed)]]}
            found["ms"] = [500.0] * 10 + [(20.0 if script == BASE else 10.0) + int(seed)] * 90
            return f"text\n{json.dumps(found)}\n", "", 0

        ran, out = [], tmp_path / "quality.json"
        monkeypatch.setattr(quality, "execute", execute)
        monkeypatch.setattr("sys.argv", ["quality.py", *words.split(), "--out", str(out)])
        quality.main()
        return json.loads(out.read_text()), ran, " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(quality, "ask", lambda *_: {"device": "cuda", "name": "Made Up GPU", "torch": "9.9"})
    monkeypatch.setattr(records, "now", lambda: "2026-05-06T07:08:09+00:00")
    return measure


def test_a_rung_is_compared_with_the_rung_before_at_the_same_seed(measure, monkeypatch, tmp_path):
    losses = {(BASE, None): (8.0, 8.1, 8.2), (ONE, None): (7.0, 7.5, 8.5)}
    about = "--model gpt2 --steps 100 --device cuda"
    words = f"--scripts {BASE} {ONE} {about} --seeds 3"
    data, ran, printed = measure(losses, words)
    runs = [(BASE, 0), (ONE, 0), (ONE, 1), (BASE, 1), (BASE, 2), (ONE, 2)]  # every second seed in reverse order
    assert ran == [f"-m measure.quality train {script} --seed {seed} {about}" for script, seed in runs]
    one = {"script": ONE, "max_lr": None, "seed": 0, "steps": [50, 100], "losses": [9.0, 7.0], "ms": 10.0}
    assert data["runs"].pop(1) == one
    (tmp_path / "quality.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit):  # another measurement
        measure(losses, words.replace("--steps 100", "--steps 50"))
    data, again, _ = measure(losses, words)  # goes on with the missing run
    assert again == ran[1:2] and len(data["runs"]) == 6
    # 75, 80 and more than 100 steps of 10, 11 and 12 ms, instead of 100 steps of 20, 21 and 22 ms
    row = "01 Weight tying | 11 (10–12) | 7.500 (7.000–8.500) | −0.600 (−1.000 to +0.300) | 80 (75–>100) | "
    row += "0.9 (0.8–not reached) | 2.39 (not reached–2.67)"
    assert row.replace(" | ", " ") in printed
    monkeypatch.setattr(tables, "saved", lambda name: data)
    page = tables.learned("quality")
    assert row in page and "| Baseline | 21 (20–22) | 8.100 (8.000–8.200) |  |" in page and f"{words} --out" in page
    assert "2026-05-06: gpt2, 100 steps, 3 seeds, Made Up GPU, torch 9.9, 1 runs at a time." in page
    left, right = plots.held_out(quality.compare(data)).axes
    assert [list(line.get_ydata()) for line in left.lines] == [[9, pytest.approx(8.1)], [9, pytest.approx(23 / 3)]]
    assert [list(line.get_xdata()) for line in right.lines] == [[1.05, 2.1], [0.55, 1.1]]  # seconds


def test_ctrl_c_in_the_first_run_starts_no_other(measure, monkeypatch):
    ran = []

    def run(*job):
        ran.append(job)
        if len(ran) == 1:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        return {"losses": []}

    monkeypatch.setattr(quality, "run", run)
    with pytest.raises(SystemExit, match="run the same command again to continue"):
        measure({}, f"--scripts {BASE} {ONE} --seeds 10")
    assert len(ran) == 1


def test_with_learning_rates_a_row_is_compared_with_the_best_rate_of_the_first_script(measure):
    losses = {(TEN, "0.001"): (8.0, 8.2), (TEN, "0.002"): (7.4, 7.6)}
    losses |= {(SIDE.muon, "0.001"): (7.5, 7.5), (SIDE.muon, "0.002"): (7.0, 7.0)}
    words = f"--scripts {TEN} {SIDE.muon} --max-lr 1e-3 2e-3 3e-3 --steps 100 --seeds 2 --jobs 2"
    data, ran, printed = measure(losses, words)
    assert len(ran) == len(data["runs"]) == 12 and "diverged" in printed  # at 3e-3
    rows = quality.compare(data)
    assert [row["other"] is rows[1] for row in rows] == [True] * 6 and rows[1]["steps"].size == 0
    assert rows[4]["differences"] == pytest.approx([-0.4, -0.6]) and quality.best(rows) is rows[4]
