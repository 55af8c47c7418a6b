"""The notebooks' cells run from top to bottom on a CPU, with few steps and without errors.

They have not been tried in Colab or Kaggle, or on a T4. `test_docs.py` checks that their diffs are up to date.
"""

import contextlib
import re

import pytest
import torch
from conftest import ROOT, RUNGS, copy_project, made_up_gpu

NOTEBOOKS = "ladder", "lesson"


def read(name):
    import nbformat

    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs(name):
    assert not any(cell.outputs or cell.execution_count for cell in code(read(name)))


def test_the_notebook_has_the_diff_and_the_run_of_each_rung():
    text = "\n".join(cell.source for cell in read("ladder").cells)
    for rung in [rung for rung in RUNGS.values() if rung.part == "rung" and rung.number != "ddp"]:
        assert f"{rung.file} --steps" in text or f'"{rung.file}"' in text
        assert not rung.before or f"diff('{rung.number}')" in text


def test_both_notebooks_set_up_in_the_same_way():
    cells = [[cell.source for cell in code(read(name))][1:4] for name in NOTEBOOKS]
    assert cells[0] == cells[1]


@pytest.mark.parametrize("capability, expected", [(None, False), ((6, 0), False), ((7, 5), True), ((8, 0), False)])
def test_fp16_stands_in_on_a_gpu_that_has_it_but_no_bf16(monkeypatch, capability, expected):
    (cell,) = (cell.source for cell in code(read("ladder")) if "fp16_only =" in cell.source)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    names = {}
    with made_up_gpu(None, capability) if capability else contextlib.nullcontext():
        exec(re.sub(r"^%pip.*", "", cell, flags=re.MULTILINE), names)
    assert names["fp16_only"] == expected
    stand_ins = [cell.source for cell in code(read("ladder")) if re.search(r"\bfp16_only\b(?! =)", cell.source)]
    assert len(stand_ins) == 3 and "branches/fp16_grad_scaler.py" in stand_ins[0]


@pytest.mark.slow
@pytest.mark.parametrize("name, runs", [("ladder", 11), ("lesson", 4)])
def test_a_notebook_runs_from_top_to_bottom_on_a_cpu(name, runs, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    root, notebook = copy_project(tmp_path / "ladder"), read(name)
    for cell in code(notebook):
        cell.source = cell.source.replace("STEPS = 12", "STEPS = 2").replace("MINUTES = 1 ", "MINUTES = 0.05 ")
    where = {"metadata": {"path": str(root / "notebooks")}}
    NotebookClient(notebook, timeout=900, resources=where).execute()  # raises an exception if a cell fails
    outputs = [out for cell in code(notebook) for out in cell.outputs]
    assert sum("image/png" in out.get("data", ()) for out in outputs) == runs  # each run draws the chart
    said = "".join(out.get("text", "") for out in outputs)
    assert said.count("median of steps 1-1") == runs  # the training of the ladder has more steps
    if name == "ladder":
        assert (root / "weights.pt").exists() and "The king" in said
    else:
        assert float(re.search("largest difference: (.+)", said)[1]) < 1e-5


@pytest.mark.slow
def test_a_cell_fails_if_its_script_fails(tmp_path):
    """The charts read the summary of the last run, so a run that failed must not leave an older summary."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    root, notebook = copy_project(tmp_path / "ladder"), read("ladder")
    (root / "runs").mkdir()
    (root / "runs" / "log.txt").write_text("median of steps 1-1: 1.00 ms, 1,000 tok/s\n")
    (root / "baseline.py").write_text("raise SystemExit('baseline.py: error: made up')\n")
    with pytest.raises(CellExecutionError, match="baseline.py did not finish"):
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(root / "notebooks")}}).execute()
