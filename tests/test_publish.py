"""The generated text and plots in the README and the pages match the scripts and `results/`.

Gains and percentages are recomputed.
"""

import functools
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import publish
import pytest
import record
import render
from conftest import ROOT, RUNGS, copy_project
from ladder import changed_lines, read_toml

PUBLIC = read_toml("results/public.toml")


@functools.cache
def written():
    """Return the newly generated parts of the README and the pages. Another test checks that the files contain them."""
    return publish.parts(render.newest(), render.newest(partial=True))[0]


def block(name):
    """Return the rows of a part's table, each as a list of cells."""
    lines = [line for line in written()[name].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_pages_and_their_figures_match_the_results(tmp_path):
    shown = [
        f"results/{name}"
        for name in re.findall(r"`results/([^/`]+)/` contains", (ROOT / "docs/pages/results.md").read_text())
    ]
    assert shown  # only these folders are tested: others may contain a reader's own measurements
    root = copy_project(tmp_path / "project")
    images = root / publish.IMAGES
    shutil.rmtree(images)
    images.mkdir()
    for folder in shown:
        (root / folder / "summary.txt").unlink()
    for path in (root / "README.md", *root.glob("docs/pages/*.md")):  # empty all generated parts
        text = path.read_text(encoding="utf-8")
        path.write_text(publish.BLOCK.sub(r"\1\n\3", text), encoding="utf-8")
    done = subprocess.run([sys.executable, "measure/publish.py", *shown], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in (
        ROOT / "README.md",
        *ROOT.glob("docs/pages/*.md"),
        *(ROOT / folder / "summary.txt" for folder in shown),
    ):
        assert (root / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), f"{path} is behind: make figures"
    drawn, kept = (
        {path.name: path.read_bytes() for path in folder.glob("*.svg")} for folder in (images, ROOT / publish.IMAGES)
    )
    assert drawn.keys() == kept.keys()
    if sys.version_info >= (3, 11):  # figures may differ: older Python versions use a different matplotlib version
        assert drawn == kept, "make figures"


def test_the_table_of_rungs_has_what_git_a_public_log_and_our_result_say():
    data, log = next(iter(render.newest().values())), PUBLIC["log"][0]
    over, ms = {row["name"]: row["over_before"] for row in data["rows"]}, [None]
    rungs = [rung for rung in RUNGS.values() if rung.part == "rung"]
    for rung, (number, idea, kind, public, ours, lines, minutes) in zip(rungs, block("ladder"), strict=True):
        page = ROOT / idea.rpartition("(")[2].rstrip(")")
        assert number == f"[{rung.number}]({rung.file})" and idea.startswith(f"[{rung.idea}](") and kind == rung.kind
        assert page.stem == rung.file.removesuffix(".py") and page.is_file()
        if rung.before:
            assert lines == "+{} −{}".format(*changed_lines(rung.before, rung.file))
            ratio = over.get(rung.file)
            ends = list(dict.fromkeys(f"{ratio[end]:.2f}" for end in ("low", "high"))) if ratio else []
            assert ours == ("–".join(ends) + "×" if ends else "")
        if (now := log["ms"].get(rung.file)) is not None:
            assert public == (f"{ms[-1] / now:.2f}×" if ms[-1] else "")
            ms.append(now)
        else:
            assert public == ""
        assert 1 <= int(minutes) <= 20
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
    assert [row[0] for row in shown] == list(publish.FIRST)
    assert all(row[:5] in [line[:5] for line in page] for row in shown)


@pytest.mark.parametrize(
    "finished, shown", [("2026-11-27T23:59", [1.5, None, None]), ("2026-11-28T00:01", [1.5, 2.5, 3.5])]
)
def test_a_speed_up_from_before_a_script_changed_is_left_out(finished, shown, monkeypatch):
    changes = {"a.py": "", "b.py": "2026-11-28", "c.py": ""}
    rungs = [SimpleNamespace(file=name, changed=date) for name, date in changes.items()]
    monkeypatch.setattr(render, "read_ladder", lambda: rungs)
    rows = [("a.py", None, 1.5), ("b.py", "a.py", 2.5), ("c.py", "b.py", 3.5)]
    rows = [{"name": name, "before": before, "over_before": gain} for name, before, gain in rows]
    data = render.current({"finished": finished, "started": "2026-11-20T00:00", "rows": rows})
    assert [row["over_before"] for row in data["rows"]] == shown


def cpu():
    return record.read(ROOT / "results" / "cpu-amd-epyc-2026-11-23" / "ladder.json")  # three passes of nano


def test_the_speeds_of_rung_10_and_of_the_two_commands_are_the_measured_ones():
    rows = [row for data in render.newest().values() for row in data["rows"]]
    tens = [row for row in rows if row["name"] == "speedup_10_fused_adamw.py" and row["median_ms"]]
    for ten, cells in zip(tens, block("ours"), strict=True):
        share = f"{ten['roof_share']:.0%}" if ten["roof_share"] else ""
        assert cells[3:] == [f"{ten['median_ms']:,.1f}", f"{ten['tokens_per_s']:,.0f}", share]
    rows = {row["name"]: row for row in cpu()["rows"]}
    two = publish.parts({"cpu": cpu()})[0]["two"].replace("\n", " ")
    ten, base = rows["speedup_10_fused_adamw.py"], rows["baseline.py"]
    assert f"took {ten['first_step_s']:.0f} s for its first step, which includes compilation" in two
    assert f"then {ten['median_ms']:.0f} ms per step" in two
    assert f"`baseline.py` took {base['median_ms']:.0f} ms per step" in two
