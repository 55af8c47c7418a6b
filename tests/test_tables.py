"""The generated text and plots in the README and the pages match the scripts and `results/`.

Gains and percentages are recomputed. The losses of one or more logs are plotted correctly, even while a log is being
written.
"""

import functools
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, RUNGS, copy_project

from dev.ladder import changed_lines, read_toml
from measure import plots, records, tables

PUBLIC = read_toml("results/public.toml")


@functools.cache
def written():
    """Return the newly generated parts of the README and the pages. Another test checks that the files contain them."""
    return tables.parts(tables.newest(), tables.newest(partial=True))[0]


def block(name):
    """Return the rows of a part's table, each as a list of cells."""
    lines = [line for line in written()[name].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_pages_and_their_figures_match_the_results(tmp_path):
    root, pages = (
        copy_project(tmp_path / "project"),
        ["README.md", *(f"docs/pages/{name}" for name in ("*.md", "*/*.md"))],
    )
    shown = set(re.findall(r"`results/([^/`]+)/runs.jsonl`", (ROOT / "docs/pages/results.md").read_text()))
    shown.add(tables.PROFILED)
    for log in root.glob("results/*/runs.jsonl"):  # other folders may contain a reader's own measurements
        if log.parent.name not in shown:
            log.unlink()
    images = root / tables.IMAGES
    shutil.rmtree(images)
    images.mkdir()
    for path in (path for name in pages for path in root.glob(name)):  # empty all generated parts
        path.write_text(tables.BLOCK.sub(r"\1\n\3", path.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "measure.tables", "--pages"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in (path for name in pages for path in ROOT.glob(name)):
        assert (root / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), f"{path} is behind: make figures"
    drawn, kept = (
        {path.name: path.read_bytes() for path in folder.glob("*.svg")} for folder in (images, ROOT / tables.IMAGES)
    )
    assert drawn.keys() == kept.keys()
    if sys.version_info >= (3, 11):  # figures may differ: older Python versions use a different matplotlib version
        assert drawn == kept, "make figures"


def test_the_table_of_rungs_has_what_git_a_public_log_and_our_result_say():
    data, log = next(iter(tables.newest().values())), PUBLIC["log"][0]
    ms, rungs = [None], [rung for rung in RUNGS.values() if rung.part == "rung"]
    for rung, (number, idea, kind, public, ours, lines) in zip(rungs, block("ladder"), strict=True):
        page = ROOT / idea.rpartition("(")[2].rstrip(")")
        assert number == f"[{rung.number}]({rung.file})" and idea.startswith(f"[{rung.idea}](") and kind == rung.kind
        assert page.stem == rung.file.removesuffix(".py") and page.is_file()
        if rung.before:
            assert lines == "+{} −{}".format(*changed_lines(rung.before, rung.file))
            ratio = data.rows[rung.file]["over_before"]
            ends = [f"{ratio[end]:.2f}" for end in ("median", "low", "high")] if ratio else []
            assert re.findall(r"[\d.]+", ours) == (ends if len(set(ends)) > 1 else ends[:1])
        if (now := log["ms"].get(rung.file)) is not None:
            assert public == (f"{ms[-1] / now:.2f}×" if ms[-1] else "")
            ms.append(now)
        else:
            assert public == ""
    assert len(ms) - 1 == len(log["ms"]) == 9


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
    def median(script, folder, kind="rung"):
        times = [
            sorted(line["step_ms"][10:])
            for line in records.read(ROOT / "results" / folder / "runs.jsonl")
            if (line["script"], line["kind"]) == (script, kind)
        ]
        middles = sorted((run[len(run) // 2 - 1] + run[len(run) // 2]) / 2 for run in times)
        return (middles[(len(middles) - 1) // 2] + middles[len(middles) // 2]) / 2

    ten, gpu = "speedup_10_fused_adamw.py", "nvidia-h200-2026-11-27"
    base, ms = median("baseline.py", gpu), median(ten, gpu)
    shown = re.search(r"B\) 16 from ([\d.]+) to ([\d.]+) ms \(([\d.]+)×\)", " ".join(written()["picture"].split()))
    assert list(map(float, shown.groups())) == [pytest.approx(base, abs=0.06), pytest.approx(ms, abs=0.06), 10.66]
    (row,) = (row for row in block("ours") if row[0] == "NVIDIA H200, gpt2")
    assert row[1:3] == ["16", "1024"] and float(row[3]) == pytest.approx(ms, abs=0.06)
    assert int(row[4].replace(",", "")) == pytest.approx(16 * 1024 / ms * 1000, rel=1e-4)


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
