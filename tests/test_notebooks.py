"""The notebooks are up to date, show each rung and run without errors on a CPU, with the packages that they find.

They are executed from top to bottom with few steps. A simulated GPU checks what they would run on a T4. They have not
been tried in Colab or Kaggle, or on a T4.
"""

import re
import subprocess
import venv
from types import SimpleNamespace

import build_notebooks
import cells
import nbformat
import pytest
import torch
from bs4 import BeautifulSoup
from conftest import FP16, FP16_10, ROOT, RUNGS, browsing, copy_project, made_up_gpu
from ladder import PLAIN_GIT, code_diff
from nbclient import NotebookClient

LADDER = list(RUNGS)[:11]  # baseline.py to rung 10
P100, V100, T4, A100 = (6, 0), (7, 0), (7, 5), (8, 0)  # compute capabilities


def read(name, root=ROOT):
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def fresh(monkeypatch):
    """Empty the list of runs, and return a list of what show() displays, as (template, its values)."""
    shown = []
    monkeypatch.setattr(cells, "runs", {})
    monkeypatch.setattr(cells, "show", lambda name, **values: shown.append((name, values)))
    return shown


@pytest.mark.parametrize("name", build_notebooks.NOTEBOOKS)
def test_a_notebook_is_valid_up_to_date_and_without_output(name):
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == build_notebooks.notebook(name), "the notebook is stale or was edited by hand: make notebook"
    notebook = read(name)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code(notebook))


@pytest.mark.parametrize("name", build_notebooks.NOTEBOOKS)
def test_a_notebook_has_no_link_that_works_only_in_the_repository(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]*)\)|(?:href|src)=[\"']([^\"']*)", text)
    assert not [link for pair in links for link in pair if link and not link.startswith("https://")]
    assert "badge" not in text


def test_the_ladder_has_each_rung_with_idea_diff_run_and_exercise():
    text = "\n".join(cell.source for cell in read("ladder").cells)
    places = [text.index(f'cells.run("{script}", steps=STEPS)') for script in LADDER]
    assert places == sorted(places)
    for script in [*LADDER, FP16_10]:
        about = build_notebooks.page(RUNGS[script])
        assert len(re.findall(r"[.:?] [A-Z]|\.$", about["idea"].replace("\n", " "))) == 2, script
        for part in about.values():
            assert part in text, script
        if RUNGS[script].before:
            assert text.index(about["idea"]) < text.index(f'cells.show_diff("{script}")') < text.index(about["answer"])
    for number in "02", "03", "04", "05", "06", "07", "10":  # said before the rung runs
        (script,) = (script for script in LADDER if RUNGS[script].number == number)
        assert text.index(f"## {number} ") < text.rindex("**On a T4**", 0, text.index(f'cells.run("{script}"'))


@pytest.mark.parametrize(
    "capability, scripts, trained",
    [
        (T4, [*LADDER[:3], FP16, *LADDER[4:], FP16_10], FP16_10),
        (V100, [*LADDER[:3], FP16, *LADDER[4:], FP16_10], FP16_10),
        (A100, LADDER, "ddp_run.py"),
        (P100, LADDER, "ddp_run.py"),  # it has no fp16 tensor cores
    ],
)
def test_fp16_stands_in_on_a_gpu_that_has_it_but_no_bf16(monkeypatch, capability, scripts, trained):
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


def test_a_cpu_has_neither_a_stand_in_nor_a_compute_capability():
    if not torch.cuda.is_available():
        assert cells.compute_capability() is None and not cells.fp16_only()


def test_what_the_device_supports_is_printed(monkeypatch, capsys):
    if not torch.accelerator.is_available():
        cells.describe_device()
        assert "no GPU. On this CPU" in capsys.readouterr().out
        with made_up_gpu(), pytest.MonkeyPatch.context() as patch:  # undone before the made-up GPU's own patches
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
            cells.describe_device()
        assert "mps. We have not tested the scripts on this kind of GPU." in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, tf32, compiles in (T4, "no", "yes"), (A100, "yes", "yes"), (P100, "no", "no"):
        with made_up_gpu(None, capability), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 2**30))
            cells.describe_device()
        said = capsys.readouterr().out
        assert "Made Up GPU, 16.0 GiB" in said and f"capability {capability[0]}.{capability[1]}" in said
        assert f"TF32 (02): {tf32} | bf16 (03): {tf32} | torch.compile (05): {compiles}" in said


def test_a_run_prints_the_scripts_lines_and_adds_a_bar(fresh, capsys):
    options = {"steps": 2, "seq_len": 16, "model": "nano", "device": "cpu"}
    cells.run("baseline.py", **options)
    cells.run("speedup_01_weight_tying.py", **options)
    said = capsys.readouterr().out
    assert "$ python baseline.py --steps 2 --model nano --device cpu --seq-len 16\n" in said
    assert len(re.findall("^step ", said, re.MULTILINE)) == 4
    (name, first), (_, second) = fresh
    assert name == "bars.html" and first["line"] == re.search("median of steps 1-1.*", said)[0]
    assert [row["label"] for row in second["rows"]] == ["Baseline, T 16", "01 Weight tying, T 16"]
    assert [row["marked"] for row in second["rows"]] == [False, True]


def test_a_script_that_fails_says_why_and_leaves_the_chart_as_it_was(fresh, monkeypatch, capsys):
    cells.run("baseline.py", steps=0)
    said = capsys.readouterr().out
    assert "baseline.py: error: need at least 1 for --batch-size and --steps" in said
    assert said.endswith("baseline.py failed with exit status 2\n")
    summary = "median of steps 6-11: 100.00 ms, 5,120 tok/s\n"  # a script prints it also when it fails later
    monkeypatch.setattr(cells, "stream", lambda *words: (summary, 1))
    cells.run("baseline.py", steps=12)
    assert not fresh and not cells.runs


def test_a_speed_up_is_over_the_nearest_rung_that_ran_with_the_same_length(fresh):
    cells.runs |= {
        (LADDER[2], None): (100.0, 40_000),
        (FP16, None): (50.0, 80_000),
        (LADDER[4], None): (80.0, 50_000),  # rung 04, whose previous rung did not run
        (LADDER[4], 256): (20.0, 50_000),
        (FP16_10, None): (10.0, 400_000),
    }
    cells.chart(FP16_10, None, "the line")
    ((_, values),) = fresh
    assert [row["note"] for row in values["rows"]] == ["", "2.00× over 02", "1.25× over 02", "", "8.00× over 04"]
    assert values["most"] == 400_000


def test_training_takes_as_many_steps_as_fit_in_the_time(fresh, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cells, "stream", lambda *words, every: asked.append((words, every)))
    cells.train("ddp_run.py", "my.txt", 10, "weights.pt")
    cells.runs[LADDER[10], None] = 250.0, 16_384
    cells.train(FP16_10, "my.txt", 10, "weights.pt")  # the speed of rung 10 in float32 is of no use for fp16
    said = capsys.readouterr().out
    assert not asked and "First run the cell of speedup_10" in said and f"First run the cell of {FP16_10}" in said
    cells.train("ddp_run.py", "my.txt", 10, "weights.pt")
    cells.runs[FP16_10, None] = 500.0, 8_192
    cells.train(FP16_10, "my.txt", 10, "weights.pt")
    (ddp, every), (fp16, _) = asked
    assert ddp[1:5] == ("--data", "my.txt", "--steps", 2400) and every == 120 and "--total-batch-size" in ddp
    assert fp16 == (FP16_10, "--data", "my.txt", "--steps", 1200, "--save", "weights.pt")


def test_the_public_figures_stand_beside_this_gpu_only_if_it_trained_gpt2(fresh, monkeypatch, capsys):
    cells.beside_public_figures()
    assert "Run a script first" in capsys.readouterr().out and fresh.pop()[1]["rows"]
    cells.runs[LADDER[10], None] = 8.0, 500_000
    if not torch.accelerator.is_available():
        cells.beside_public_figures()
        assert "not comparable with GPT-2" in capsys.readouterr().out
        assert not any(row.get("marked") for row in fresh.pop()[1]["rows"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with made_up_gpu():
        cells.beside_public_figures()
    rows = fresh.pop()[1]["rows"]
    assert [row["speed"] for row in rows] == sorted(row["speed"] for row in rows)
    assert [row["label"] for row in rows if row.get("marked")] == ["Made Up GPU, here"]
    assert ("T4", 16_200) in [(row["label"], row["speed"]) for row in rows]


@pytest.mark.parametrize("script", [LADDER[1], LADDER[6], FP16_10])
def test_the_diff_in_a_cell_is_gits(monkeypatch, script):
    displayed = []
    monkeypatch.setattr(cells, "display", displayed.append)
    cells.show_diff(script)
    soup = BeautifulSoup(displayed[0].data, "html.parser")
    for copy in soup.select(".same .old, details"):  # the first is hidden; git's diff below is without the docstring
        copy.decompose()
    changed = ["".join(line.strings).rstrip("\n") for line in soup.select("del, ins")]
    expected = code_diff(RUNGS[script].before, script).splitlines()
    expected = [line for line in expected if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert sorted(changed) == sorted(expected)


@browsing
@pytest.mark.parametrize(
    "theme", ['data-jp-theme-light="true"', 'data-jp-theme-light="false"', 'theme="dark"', 'class="vscode-dark"', ""]
)
def test_a_diff_and_a_chart_have_contrast_in_each_theme(monkeypatch, browser, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    displayed = []
    monkeypatch.setattr(cells, "display", displayed.append)
    monkeypatch.setattr(cells, "runs", {(LADDER[0], None): (20.0, 200_000), (LADDER[1], None): (10.0, 400_000)})
    cells.show_diff(LADDER[6])
    cells.chart(LADDER[1], None, "median of steps 6-11")
    with browser.new_page() as page:
        dark = "dark" in theme or "false" in theme
        html = "".join(output.data for output in displayed).replace("<details>", "<details open>")
        page.set_content(f'<html lang="en"><body {theme} style="background: {"#111" if dark else "#fff"}">{html}')
        found = axe.run(page, options={"runOnly": ["color-contrast"]}).response
        assert not found["violations"] and not found["incomplete"] and len(found["passes"][0]["nodes"]) > 20
        light = page.locator(".ladder").first.evaluate("one => getComputedStyle(one).backgroundColor")
        assert light == ("rgb(30, 33, 41)" if dark else "rgb(255, 255, 255)")


def test_the_lessons_exercise_has_the_answer_that_it_gives(capsys):
    """Without the factor, the result is wrong, less so with larger tiles, and right with one tile."""
    (cell,) = (cell.source for cell in code(read("lesson")) if "rescale" in cell.source)

    def difference(tile, source):
        assert "1024, 64, 128" in source
        exec(source.replace("1024, 64, 128", f"1024, 64, {tile}"), {})
        return float(capsys.readouterr().out.removeprefix("largest difference: "))

    assert difference(128, cell) < 1e-6
    wrong = cell.replace("total * rescale", "total")
    errors = [difference(tile, wrong) for tile in (128, 256, 512, 1024)]
    assert wrong != cell and errors == sorted(errors, reverse=True) and errors[2] > 0.01 > 1e-6 > errors[3]


def environment(folder, **installed):
    """Return the Python of a new environment in which pip believes that these packages are installed."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    words = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    for name, version in installed.items():
        info = folder / site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("pip")
    return python


def versions(python):
    said = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True).stdout
    return dict(line.split("==") for line in said.splitlines())


COLAB = {"numpy": "2.0.2", "transformers": "4.57.1", "jinja2": "3.1.6", "pygments": "2.19.2", "torch": "2.9.0+cu126"}


@pytest.mark.slow  # it installs packages
def test_the_install_cell_adds_what_is_missing_and_changes_nothing_else(tmp_path):
    """Torch and NumPy have other versions than ours, and pip's records are all that the test needs of them."""
    python = environment(tmp_path / "colab", **COLAB, tomli="2.2.1")
    before = versions(python)
    for words in ["installing tiktoken>=", "unidiff>=", "done in "], ["nothing to install"]:
        done = subprocess.run([python, "notebooks/install.py"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in words)
    after = versions(python)
    assert before.items() <= after.items() and {"tiktoken", "unidiff"} <= after.keys() - before.keys()


@pytest.mark.slow
def test_a_package_that_would_replace_numpy_is_not_installed(tmp_path):
    """Transformers needs a newer NumPy than the one that is there: pip refuses, and NumPy stays."""
    installed = COLAB | {
        "torch": "2.6.0+cu124",
        "numpy": "1.16.0",
        "tiktoken": "0.12.0",
        "unidiff": "0.7.5",
        "tomli": "2.2.1",
    }
    del installed["transformers"]
    python = environment(tmp_path / "old", **installed)
    done = subprocess.run([python, "notebooks/install.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "install.py: error: pip could not install transformers" in done.stderr
    assert "torch 2.6.0+cu124 is older than 2.7, so some scripts may fail" in done.stdout
    assert versions(python)["numpy"] == "1.16.0"


def execute(notebook, folder):
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(out.get("text", "") for out in cell.outputs) for cell in code(notebook)]


def test_the_first_cells_clone_the_repository(tmp_path):
    """In Colab, the notebook is alone in an empty folder."""
    root = copy_project(tmp_path / "origin")
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "all"],
    ):
        subprocess.run(["git", *words], cwd=root, env=PLAIN_GIT, check=True)
    notebook = read("lesson")
    notebook.cells = code(notebook)[:4]
    notebook.cells[0].source = notebook.cells[0].source.replace('REPOSITORY = ""', f'REPOSITORY = "file://{root}"')
    (tmp_path / "empty").mkdir()
    said = execute(notebook, tmp_path / "empty")
    assert "nothing to install" in said[2] and f"torch {torch.__version__}" in said[3]
    assert (tmp_path / "empty" / "ladder" / "baseline.py").exists()


def test_without_an_address_the_first_cells_say_what_to_set(tmp_path):
    notebook = read("lesson")
    notebook.cells = code(notebook)[:2]
    with pytest.raises(Exception, match="There is no copy of the repository here: check REPOSITORY"):
        execute(notebook, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", build_notebooks.NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom_on_a_cpu(name, tmp_path):
    root = copy_project(tmp_path / "ladder")
    notebook = read(name)
    for cell in code(notebook):
        cell.source = cell.source.replace("STEPS = 12", "STEPS = 2").replace("MINUTES = 1 ", "MINUTES = 0.05 ")
    said = execute(notebook, root / "notebooks")  # raises an exception if a cell fails
    html = [out.data["text/html"] for cell in code(notebook) for out in cell.outputs if "data" in out]
    charts = [BeautifulSoup(text, "html.parser") for text in html if "<table>" in text]
    runs = [*LADDER, None] if name == "ladder" else [None] * 4  # the last chart shows the public figures
    assert len(charts) == len(runs) and len(html) - len(charts) == (10 if name == "ladder" else 1)
    for number, (script, chart) in enumerate(zip(runs, charts, strict=True), start=1):
        if script or name == "lesson":
            assert len(chart.select("tr")) == 1 + number and "median of steps 1-1" in chart.select_one(".line").text
            assert len(chart.select("tr.marked")) == 1
    if name == "ladder":
        assert "saved the weights to weights.pt" in "".join(said) and (root / "weights.pt").exists()
        assert "The king" in said[-2] and said[-1] == "weights.pt is only on this machine\n"
    else:
        assert float(re.search("largest difference: (.+)", said[-1])[1]) < 1e-5
