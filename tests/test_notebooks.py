"""The notebooks' cells run from top to bottom on a CPU, with few steps, and their charts show what was measured.

They have not been tried in Colab or Kaggle, or on a T4. `test_docs.py` checks that their diffs are up to date.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, SIDE, copy_project, made_up_gpu


def read(name):
    import nbformat

    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Return a function that executes a notebook, in whose shell the nth script trains at 1000 n² tokens per second."""
    import matplotlib.pyplot as plt

    commands, chart = [], []

    def show():
        ax = plt.gca()
        assert ax.get_xlabel() == "tokens per second" and ax.yaxis_inverted()
        names, labels = ([text.get_text() for text in texts] for texts in (ax.get_yticklabels(), ax.texts))
        chart[:] = names, [bar.get_width() for bar in ax.patches], labels
        plt.close()

    def execute(name, fails=None):
        """Return (the commands, the last chart's names, its widths, its labels)."""

        def shell(command):
            commands.append(command.removesuffix(" 2>&1 | tee runs/log.txt").partition(" ")[2])
            rate = f"median of steps 6-11: 2.00 ms, {1000 * len(commands) ** 2:,} tok/s, peak memory 3.00 GiB\n"
            Path("runs/log.txt").write_text("step 1 | 7 tok/s\n" + rate * (len(commands) != fails))

        names = {"shell": shell, "_exit_code": 0}
        for cell in read(name).cells:
            if cell.cell_type == "code":
                source = re.sub(r"^%pip.*", "", cell.source, flags=re.MULTILINE)
                exec(re.sub(r"^( *)!(.*)", r"\1shell(f'''\2''')", source, flags=re.MULTILINE), names)
        return commands, *chart

    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", show)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ladder.toml").touch()
    return execute


@pytest.mark.parametrize("capability, fp16", [(None, False), ((6, 0), False), ((7, 5), True), ((8, 0), False)])
def test_each_bar_shows_the_script_that_ran_and_its_speed_up_over_the_bar_above(execute, monkeypatch, capability, fp16):
    """On a GPU that has fp16 but no bf16, the last script is rung 10 in fp16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    with made_up_gpu(None, capability) if capability else contextlib.nullcontext():
        (*runs, train, sample), names, widths, labels = execute("ladder")
    scripts = SCRIPTS[:11] + [SIDE.fp16] * fp16
    assert runs == [f"{script} --steps 12" for script in scripts] and names == scripts
    assert widths == [1000 * n**2 for n in range(1, len(scripts) + 1)]
    assert labels[:3] == ["1,000", "4,000 (4.00×)", "9,000 (2.25×)"]
    tokens = 4096 if capability else 512  # per step; the training takes a minute
    script = SIDE.fp16 if fp16 else f"ddp_run.py --total-batch-size {tokens}"
    assert train == f'{script} --data "input.txt" --steps {round(60 * widths[-1] / tokens)} --save weights.pt'
    assert sample.startswith("pretrain/sample.py weights.pt ")


def test_a_script_that_fails_leaves_no_older_speed_and_each_diff_is_above_its_run(execute):
    with pytest.raises(AssertionError, match="speedup_02_tf32.py did not finish"):
        execute("ladder", fails=3)
    text = "\n".join(cell.source for cell in read("ladder").cells)
    found = re.findall(r"print\(in_notebook\(diff\('(.*?)'\)|^## (\d\d) |^chart\(\"speedup_(\d\d)", text, re.MULTILINE)
    assert ["".join(one) for one in found[:-1]] == [f"{n:02d}" for n in range(1, 11) for _ in range(3)]


def test_the_lesson_compares_equal_work_and_its_arithmetic_is_right(execute, capsys):
    commands, names, _, labels = execute("lesson")
    sizes = [(5, 1024, 4), (6, 1024, 4), (5, 256, 16), (6, 256, 16)]  # rung, T, B
    assert commands == [f"{SCRIPTS[rung]} --seq-len {T} --batch-size {B} --steps 12" for rung, T, B in sizes]
    assert names == [f"rung {rung:02d}, T {T}" for rung, T, _ in sizes] and labels[1] == "4,000 (4.00×)"
    said = capsys.readouterr().out
    assert "T 1024:   50.3 million scores,  4.0 times as many" in said  # 4 * 12 * 1024², over 4 * 4 * 1024 * 768
    assert float(re.search("largest difference: (.+)", said)[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name, runs", [("ladder", 11), ("lesson", 4)])
def test_a_notebook_runs_from_top_to_bottom_on_a_cpu(name, runs, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    root, notebook = copy_project(tmp_path / "ladder"), read(name)
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 12", "STEPS = 2").replace("MINUTES = 1 ", "MINUTES = 0.05 ")
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(root / "notebooks")}}).execute()
    assert str(notebook).count("'image/png'") == runs  # each run draws the chart
    assert name == "lesson" or "The king" in str(notebook.cells[-2])
