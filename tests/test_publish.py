"""The generated text and plots in the README and the pages match the scripts and `results/`.

Gains, percentages and reading times are recomputed. GPU results are shown first. If publishing fails, no file is
changed. The README has at most 140 lines and 1,400 words.
"""

import copy
import functools
import re
import shutil
import subprocess
import sys

import floor
import publish
import pytest
import record
import render
from conftest import ROOT, RUNGS, copy_project
from ladder import changed_lines, read_toml

README = (ROOT / "README.md").read_text(encoding="utf-8")
COUNTS = floor.read_counts()
PUBLIC = read_toml("results/public.toml")
PAGES = "README.md", "docs/pages"  # publish.py updates this file and this folder
CPU = record.read(ROOT / "results" / "cpu-amd-epyc-2026-11-23" / "ladder.json")  # three passes of nano


@functools.cache
def written():
    """Return the newly generated parts of the README and the pages. Another test checks that the files contain them."""
    return publish.parts(render.newest(), render.newest(partial=True))[0]


def block(name):
    """Return the rows of a part's table, each as a list of cells."""
    lines = [line for line in written()[name].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 140 and len(README.split()) <= 1400


def test_each_part_is_in_a_file_and_each_comment_has_a_part():
    files = [ROOT / "README.md", *ROOT.glob("docs/pages/**/*.md")]
    named = re.findall(r"<!-- (\w+), written by", "".join(file.read_text(encoding="utf-8") for file in files))
    assert sorted(named) == sorted(written())


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
    for name in ("a-users-own.svg", "an-older-one-tokens.svg"):
        (images / name).touch()
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
    assert (images / "a-users-own.svg").exists()
    (images / "a-users-own.svg").unlink()
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


def test_reading_takes_a_minute_for_200_words_and_3_seconds_for_a_changed_line(tmp_path, monkeypatch):
    rung = RUNGS["speedup_09_cosine_lr.py"]
    page = tmp_path / "docs" / "pages" / "rungs" / "speedup_09_cosine_lr.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- {{ site.diff() }} -->\n" + "word " * 450)
    shutil.copy(ROOT / rung.file, tmp_path)
    assert sum(changed_lines(rung.before, rung.file)) == 15
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    assert publish.minutes(rung) == 3  # 2.25 minutes for words, 0.75 for lines
    page.write_text("word")
    assert publish.minutes(rung) == 1


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


def as_gpu():
    data = copy.deepcopy(CPU)
    data["machine"] |= {"device": "cuda", "name": "NVIDIA H200", "cuda": "1"}
    data["hosts"][0] |= {"device_memory_gib": 16.0, "driver": "1", "cudnn": 91501}
    data["settings"] |= {"model": "gpt2", "batch_size": 16, "seq_len": 1024}
    data["roof"] = {"ceilings_tflops": {"float32": 50.0, "tf32": 400.0, "bf16": 700.0}, "copy_gb_per_s": 4000.0}
    return data


def test_a_gpus_result_is_the_first_picture_beside_the_floor_of_its_own_peak():
    data = as_gpu()
    texts, figures = publish.parts({"made-up": data} | render.newest())
    assert "pages/img/made-up-tokens.svg)" in texts["picture"] and "made-up-tokens" in figures
    assert "counts.svg" not in texts["picture"] and "no GPU" not in texts["picture"] and "counts.svg" in texts["counts"]
    assert "| NVIDIA H200, gpt2 |" in texts["ladder"] and "A CPU does not predict" not in texts["ladder"]
    assert texts["results"].index("## NVIDIA H200, gpt2") < texts["results"].index("## CPU: ")
    *public, (log, rows, _) = publish.beside({"made-up": data}, PUBLIC["log"], COUNTS)
    assert len(public) == len(PUBLIC["log"]) and log["about"] == "NVIDIA H200, gpt2"
    step = COUNTS["gpt2", 16, 1024]["speedup_05_compile.py"]
    measured = next(row["median_ms"] for row in data["rows"] if row["name"] == "speedup_05_compile.py")
    least, _ = floor.Card(data["roof"]["ceilings_tflops"], 4000.0).floor_ms(step)
    assert [row["script"] for row in rows] == [publish.title(script) for script in COUNTS["gpt2", 16, 1024]]
    assert rows[5]["floor, ms"] == f"{least:,.1f}" and rows[5]["measured / floor"] == f"{measured / least:.2f}"


def test_rows_that_failed_and_a_gpu_without_a_roof_are_written_as_they_are():
    data = as_gpu()
    data["roof"] = None
    row = next(row for row in data["rows"] if row["name"] == "speedup_05_compile.py")
    for key in ("median_ms", "quartiles_ms", "tokens_per_s", "over_baseline", "over_before"):
        row[key] = None
    row["error"] = "out of memory | lower it"
    texts, _ = publish.parts({"made-up": data})
    assert "| `speedup_05_compile.py` | out of memory / lower it |" in texts["results"]
    (cells,) = [line for line in texts["ladder"].splitlines() if line.startswith("| [05]")]
    assert "| speed | 2.60× |  | +5 −0 |" in cells and "None" not in "".join(texts.values())


def test_the_speeds_of_rung_10_and_of_the_two_commands_are_the_measured_ones():
    rows = [row for data in render.newest().values() for row in data["rows"]]
    tens = [row for row in rows if row["name"] == "speedup_10_fused_adamw.py" and row["median_ms"]]
    for ten, cells in zip(tens, block("ours"), strict=True):
        share = f"{ten['roof_share']:.0%}" if ten["roof_share"] else ""
        assert cells[3:] == [f"{ten['median_ms']:,.1f}", f"{ten['tokens_per_s']:,.0f}", share]
    rows = {row["name"]: row for row in CPU["rows"]}
    two = publish.parts({"cpu": CPU})[0]["two"].replace("\n", " ")
    ten, base = rows["speedup_10_fused_adamw.py"], rows["baseline.py"]
    assert f"took {ten['first_step_s']:.0f} s for its first step, which includes compilation" in two
    assert f"then {ten['median_ms']:.0f} ms per step" in two
    assert f"`baseline.py` took {base['median_ms']:.0f} ms per step" in two


def test_what_make_run_takes_is_said_only_of_a_result_with_its_defaults():
    gpu = as_gpu()
    assert publish.two({"gpu": gpu, "cpu": CPU})["data"] is CPU
    assert publish.two({"gpu": gpu}) == {"data": None} and "took" not in publish.parts({"gpu": gpu})[0]["two"]
    gpu["settings"]["batch_size"] = 4
    assert publish.two({"gpu": gpu, "cpu": CPU})["data"] is gpu


def test_one_pass_has_no_range():
    assert publish.over({"median": 1.25, "low": 1.25, "high": 1.25}) == "1.25×" and publish.over(None) == ""


def test_a_gpu_on_which_no_script_ran_has_no_picture():
    gpu = as_gpu()
    for row in gpu["rows"]:
        row["error"], row["profile"] = "out of memory", None
        for key in ("median_ms", "quartiles_ms", "tokens_per_s", "over_baseline", "over_before", "roof_share"):
            row[key] = None
        for run in row["runs"]:
            run |= {"error": "out of memory", "times_ms": [], "losses": []}
    texts, figures = publish.parts({"gpu": gpu, "cpu": CPU})
    assert "counts.svg" in texts["picture"] and not [name for name in figures if name.startswith("gpu-")]
    assert publish.parts({"gpu": gpu, "cpu": CPU | {"rows": CPU["rows"][:1]}})[0]["ours"] == "None yet."
    assert "gpu-" not in texts["results"] and len(list(publish.beside({"gpu": gpu}, PUBLIC["log"], COUNTS))) == 3


def test_an_error_in_a_table_changes_nothing(tmp_path):
    root = copy_project(tmp_path / "project")

    def written():
        return {
            path: path.read_bytes()
            for name in PAGES
            for path in (root / name, *(root / name).rglob("*"))
            if path.is_file()
        }

    before = written()
    (root / "docs" / "pages" / "rungs" / "baseline.md").unlink()
    done = subprocess.run([sys.executable, "measure/publish.py"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("publish.py: error: ") and "baseline.md" in done.stderr
    (root / "results" / "empty").mkdir()
    (root / "results" / "empty" / "ladder.json").write_text("{}")
    (root / "elsewhere").mkdir()
    for folder, said in (
        ("results/empty", "is not a measurement"),
        ("results/nowhere", "No such file"),
        ("elsewhere", "is not in results/"),
    ):
        done = subprocess.run([sys.executable, "measure/publish.py", folder], cwd=root, capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("publish.py: error: ") and said in done.stderr
    del before[root / "docs" / "pages" / "rungs" / "baseline.md"]
    assert written() == before and len(before) > 20


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("<!-- speeds,", "<!-- speed,", "there is no part speed"),
        ("<!-- end of speeds -->", "", "a part has no end comment: speeds"),
    ],
)
def test_a_comment_that_is_wrong_is_one_clear_error(tmp_path, old, new, said):
    root = copy_project(tmp_path / "project")
    page = root / "docs" / "pages" / "card.md"
    page.write_text(page.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    before = page.read_bytes(), (root / "README.md").read_bytes()
    done = subprocess.run([sys.executable, "measure/publish.py"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"publish.py: error: docs/pages/card.md: {said}" in done.stderr
    assert (page.read_bytes(), (root / "README.md").read_bytes()) == before


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/pages/**/*.md")), ids=lambda path: path.stem)
def test_a_page_reads_well_on_github(path):
    """Site-only markup is inside comments, and a page that uses it states what is missing on GitHub."""
    text = re.sub("^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    shown = re.sub("<!--.*?-->", "", text, flags=re.DOTALL)
    assert not re.search(r"\{\{|\{%|\{ ?[.#]|^\?\?\?|^!!!", shown, re.MULTILINE)
    assert path.stem == "index" or ("site." in text) == ("On GitHub, this page lacks" in shown)
