"""The notebooks are up to date, and their cells run on a CPU; on a T4, they would run fp16 in place of bf16.

They are executed from top to bottom with few steps. They have not been tried in Colab or Kaggle, or on a T4.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import FP16, FP16_10, ROOT, RUNGS, copy_project, made_up_gpu

NOTEBOOKS = "ladder", "lesson"
LADDER = list(RUNGS)[:11]  # baseline.py to rung 10
T4, A100 = (7, 5), (8, 0)  # compute capabilities


def read(name):
    import nbformat

    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_up_to_date_and_without_output(name):
    import build_notebooks

    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == build_notebooks.notebook(name), "the notebook is stale or was edited by hand: make notebook"
    assert not any(cell.outputs or cell.execution_count for cell in code(read(name)))


@pytest.mark.parametrize(
    "capability, scripts, trained",
    [(T4, [*LADDER[:3], FP16, *LADDER[4:], FP16_10], FP16_10), (A100, LADDER, "ddp_run.py")],
)
def test_fp16_stands_in_on_a_gpu_that_has_it_but_no_bf16(monkeypatch, capability, scripts, trained):
    import cells

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran, diffs = [], []
    with made_up_gpu(None, capability):
        fake = SimpleNamespace(
            fp16_only=cells.fp16_only,
            run=lambda script, steps: ran.append(script),
            show_diff=diffs.append,
            train=lambda script, text, minutes, weights: ran.append(f"train {script}"),
        )
        names = {"cells": fake, "STEPS": 12, "TEXT": "input.txt", "MINUTES": 1}
        for cell in code(read("ladder")):
            if re.search(r"cells\.(run|show_diff|train)\(", cell.source):
                exec(cell.source, names)
    assert ran == [*scripts, f"train {trained}"]
    assert set(scripts) - set(diffs) == {"baseline.py"}


def test_a_speed_up_is_over_the_nearest_rung_that_ran_with_the_same_length(monkeypatch):
    import cells

    shown = []
    runs = {
        (LADDER[2], None): (100.0, 40_000),
        (FP16, None): (50.0, 80_000),
        (LADDER[4], None): (80.0, 50_000),  # rung 04, whose previous rung did not run
        (LADDER[4], 256): (20.0, 50_000),
        (FP16_10, None): (10.0, 400_000),
    }
    monkeypatch.setattr(cells, "runs", runs)
    monkeypatch.setattr(cells, "show", lambda name, **values: shown.append(values))
    cells.chart(FP16_10, None, "the line")
    (values,) = shown
    assert [row["note"] for row in values["rows"]] == ["", "2.00× over 02", "1.25× over 02", "", "8.00× over 04"]
    assert values["most"] == 400_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom_on_a_cpu(name, tmp_path, monkeypatch):
    from bs4 import BeautifulSoup
    from nbclient import NotebookClient

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    root, notebook = copy_project(tmp_path / "ladder"), read(name)
    for cell in code(notebook):
        cell.source = cell.source.replace("STEPS = 12", "STEPS = 2").replace("MINUTES = 1 ", "MINUTES = 0.05 ")
    where = {"metadata": {"path": str(root / "notebooks")}}
    NotebookClient(notebook, timeout=900, resources=where).execute()  # raises an exception if a cell fails
    html = [out.data["text/html"] for cell in code(notebook) for out in cell.outputs if "data" in out]
    charts = [BeautifulSoup(text, "html.parser") for text in html if "<table>" in text]
    runs = 11 if name == "ladder" else 4
    for number, chart in enumerate(charts[:runs], start=1):  # each run adds a row to the chart
        assert len(chart.select("tr")) == 1 + number and "median of steps 1-1" in chart.select_one(".line").text
    assert len(charts) == runs + (name == "ladder")  # the last chart of the ladder shows the public figures
    said = "".join(out.get("text", "") for cell in code(notebook) for out in cell.outputs)
    if name == "ladder":
        assert (root / "weights.pt").exists() and "The king" in said
    else:
        assert float(re.search("largest difference: (.+)", said)[1]) < 1e-5
