"""The generated text and plots in the README and the pages match the scripts and `results/`.

Gains and percentages are recomputed. The losses of one or more logs are plotted correctly, even while a log is being
written.
"""

import functools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT, RUNGS, copy_project, only_committed_results

from dev.ladder import changed_lines, read_toml
from measure import plots, records, tables
from measure.records import TEN

PUBLIC = read_toml("results/public.toml")
BASE = "baseline.py"


@functools.cache
def written():
    """Return the generated parts of the README and the pages. `test_docs.py` checks that the files contain them."""
    return tables.parts()


def block(name):
    """Return the rows of a part's table, each as a list of cells."""
    lines = [line for line in written()[name].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_plots_of_the_pages_match_the_results(tmp_path):
    """The plots are drawn from results/, and others are deleted. `test_docs.py` checks the tables."""
    root = only_committed_results(copy_project(tmp_path / "project"))
    shutil.rmtree(root / tables.IMAGES)
    (root / tables.IMAGES).mkdir()
    (root / tables.IMAGES / "stale.svg").touch()
    subprocess.run([sys.executable, "-m", "measure.tables", "--plots"], cwd=root, check=True)
    drawn, kept = ({path.name: path.read_bytes() for path in (at / tables.IMAGES).glob("*.svg")} for at in (root, ROOT))
    assert drawn.keys() == kept.keys()
    if sys.version_info >= (3, 11):  # plots may differ: older Python versions use a different matplotlib version
        assert drawn == kept, "make figures"


def test_the_run_of_nano_is_shown_with_its_losses_and_its_best_sample():
    log = [json.loads(line) for line in (ROOT / "results" / tables.PRETRAINED / "log.jsonl").open(encoding="utf-8")]
    found, text = [row for row in log if "val_loss" in row], tables.pretrained()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| 1"]
    assert len(cells) == 5 and [row for row in cells if row[0] == "11,880"]
    for step, training, validation in cells:
        step, before = int(step.replace(",", "")), int(step.replace(",", "")) - 1188
        losses = [row["loss"] for row in log if "loss" in row and before <= row["step"] < step]
        assert len(losses) == 1188 and float(training) == pytest.approx(sum(losses) / 1188, abs=6e-4)
        assert f"{next(row['val_loss'] for row in found if row['step'] == step):.3f}" == validation
    assert "lowest validation loss (step 8,316)" in text and min(row["val_loss"] for row in found) == next(
        row["val_loss"] for row in found if row["step"] == 8316
    )
    assert found[7]["samples"][0].strip() in text and found[-1]["samples"][0].strip() in text


def test_the_table_of_rungs_has_what_git_and_our_result_say():
    data = next(iter(tables.newest().values()))
    rungs = [rung for rung in RUNGS.values() if rung.part == "rung"]
    for rung, (number, idea, kind, ours, lines) in zip(rungs, block("ladder"), strict=True):
        page = ROOT / idea.rpartition("(")[2].rstrip(")")
        assert number == f"[{rung.number}]({rung.file})" and idea.startswith(f"[{rung.idea}](")
        assert kind == rung.kind + (", on a GPU" if rung.number in ("02", "07") else "")
        assert page.stem == rung.file.removesuffix(".py") and page.is_file()
        if rung.before:
            assert lines == "+{} −{}".format(*changed_lines(rung.before, rung.file))
            ratio = data.rows[rung.file]["over_before"]
            ends = [f"{ratio[end]:.2f}" for end in ("median", "low", "high")] if ratio else []
            assert re.findall(r"[\d.]+", ours) == (ends if len(set(ends)) > 1 else ends[:1])


def test_mfu_uses_the_peak_in_the_data_sheet():
    page = block("speeds")
    flops = 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024  # per token
    peaks = {"T4": 65, "L4": 121, "RTX 4090": 165.2, "RTX 5090": 209.5, "A100": 312, "H100": 989, "H200": 989}
    shares = 0
    for one, (card, speed, size, ms, mfu, ran, source) in zip(PUBLIC["speed"], page, strict=True):
        assert (card, speed, ran) == (one["card"], f"{one['tokens_per_s']:,}", one["ran"])
        assert source == (f"[{one['source']}]({one['url']})" if "url" in one else one["source"])
        assert size == str(one.get("batch_size", ""))
        if size:
            assert int(ms) == round(int(size) * 1024 / one["tokens_per_s"] * 1000)
        peak = peaks.get(card.partition(" SXM")[0].partition(" PCIe 80")[0])
        share = f"{100 * one['tokens_per_s'] * flops / peak / 1e12:.0f}" if peak and one.get("plain", True) else ""
        assert mfu.removesuffix("%") == share
        shares += bool(mfu)
    assert shares > 8
    shown = block("cards")
    assert [row[0] for row in shown] == list(tables.FIRST)
    assert all(row[:5] in [line[:5] for line in page] for row in shown)


def test_the_speeds_in_the_readme_are_the_measured_ones():
    name, data = next(iter(tables.newest().items()))
    lines = [line for line in records.read(ROOT / "results" / name / "runs.jsonl") if line["kind"] == "rung"]
    found = {(line["script"], line["pass"]): statistics.median(line["step_ms"][10:]) for line in lines}
    of = {script: {number: ms for (of, number), ms in found.items() if of == script} for script in (BASE, TEN)}
    base, ten = (statistics.median(times.values()) for times in of.values())
    ratio = statistics.median(of[BASE][number] / of[TEN][number] for number in of[BASE].keys() & of[TEN].keys())
    B, T = data.settings["batch_size"], data.settings["seq_len"]
    shown = re.search(
        rf"\(B\) {B} from ([\d,.]+) to ([\d,.]+) ms \(([\d.]+)×\)", " ".join(written()["picture"].split())
    )
    numbers = [float(number.replace(",", "")) for number in shown.groups()]
    assert numbers == [pytest.approx(base, abs=0.06), pytest.approx(ten, abs=0.06), pytest.approx(ratio, abs=0.006)]
    (row,) = (row for row in block("ours") if row[0] == data.label)
    assert row[1:3] == [str(B), str(T)] and float(row[3].replace(",", "")) == pytest.approx(ten, abs=0.06)
    assert int(row[4].replace(",", "")) == pytest.approx(B * T / ten * 1000, rel=1e-4)


# ---- the plot of a log


def write(path, losses, scores=(), more=""):
    """Write a log as pretrain/train.py does: a header, a row per step and a row per evaluation."""
    rows = [{"begun": "2026-11-25"}] + [{"step": step, "loss": loss, "sec": 0.1} for step, loss in enumerate(losses)]
    rows += [{"step": step, "val_loss": score, "samples": ["x"]} for step, score in scores]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + more)
    return path


def shown(runs):
    """Return ({label: (steps, losses)} of a plot's curves, the upper end of its y axis)."""
    (axes,) = plots.losses(runs).axes
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    return curves, axes.get_ylim()[1]


def test_training_and_validation_curves_have_their_own_names(tmp_path):
    log = write(tmp_path / "a.jsonl", [10.0, 9.0, 6.0, 4.0], [(0, 11.0), (2, 7.0), (4, 8.0)])
    curves, top = shown({"a": plots.read(log)})
    assert curves == {
        "a, training": ([0, 1, 2, 3], [10, 9, 6, 4]),
        "a, validation, lowest 7.000 at step 2": ([0, 2, 4], [11, 7, 8]),
    }
    assert top == pytest.approx(1.02 * 9)  # the axis limit ignores step 0


def test_a_log_may_be_growing_and_its_run_may_have_diverged(tmp_path):
    log = write(tmp_path / "a.jsonl", [9.0, 8.0, math.nan], more='{"step": 3, "lo')
    assert [row["step"] for row in plots.read(log)] == [0, 1, 2]
    assert shown({"a": plots.read(log)})[1] == pytest.approx(1.02 * 8)
