"""The README, the pages and the notebooks contain the current diffs and figures, and every page opens in a browser.

Lines of arithmetic are recomputed. Measured numbers in hand-written sentences are compared with results/.
"""

import functools
import http.server
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, RUNGS, copy_project, only_committed_results

from dev.ladder import PLAIN_GIT, changed_lines, read_toml
from measure import counts, records, tables
from measure.records import TEN

PAGES = sorted((ROOT / "docs" / "pages").glob("**/*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def check(root):
    """Run the cog command of `make figures` in a copy of the project, but only compare what it would write."""
    shown = subprocess.run(
        ["make", "--dry-run", "figures"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (words,) = (shlex.split(line) for line in shown.splitlines() if "cogapp" in line)
    options = [sys.executable, *words[1 : words.index("-r")], "--check", "--diff"]
    return subprocess.run([*options, *words[words.index("-r") + 1 :]], cwd=root, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    return only_committed_results(copy_project(tmp_path / "project"))


def test_the_diffs_and_tables_of_pages_and_notebooks_are_up_to_date(project):
    done = check(project)
    assert done.returncode == 0, f"make figures\n{done.stdout}{done.stderr}"
    for name, old, new in [  # a changed result and a changed script
        (f"results/{next(iter(tables.newest()))}/runs.jsonl", r'"peak_gib": [\d.]+', '"peak_gib": 77.77'),
        ("speedup_02_tf32.py", "ampere_or_later =", "ampere ="),
    ]:
        text, changes = re.subn(old, new, (project / name).read_text(encoding="utf-8"))
        assert changes
        (project / name).write_text(text, encoding="utf-8")
    done = check(project)
    assert done.returncode
    assert re.search(r"^\+.*77\.77", done.stdout, re.MULTILINE) and re.search(
        r"^\+\+ .*ampere =", done.stdout, re.MULTILINE
    )


def test_the_address_in_pyproject_fills_the_notebooks(project):
    pyproject = project / "pyproject.toml"
    text = re.sub(r"\n\[project\.urls\]\n[^\[]*", "\n", pyproject.read_text(encoding="utf-8"))
    text = text.replace("\n[dep", '\n[project.urls]\nRepository = "https://github.com/some/where.git"\n\n[dep', 1)
    pyproject.write_text(text, encoding="utf-8")
    changed = re.findall(r"^\+(?!\+)(.*)", check(project).stdout, re.MULTILINE)
    lesson, *changed = changed
    assert "(https://github.com/some/where/blob/main/notebooks/lesson.ipynb) is a lesson" in lesson  # on rung 06's page
    assert [line.strip() for line in changed] == [
        part
        for name in ("ladder", "lesson")
        for part in (
            '"[Open in Colab](https://colab.research.google.com/github/some/where/blob/main/notebooks/'
            f'{name}.ipynb)\\n",',
            '"REPOSITORY = \\"https://github.com/some/where\\"\\n",',
        )
    ]


def test_the_diff_of_a_page_is_gits():
    """A page shows git's diff with its line numbers, without the docstring."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for after, rung in RUNGS.items():
        if before := rung.before:
            command = ["git", "diff", "--no-index", before, after]
            done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, encoding="utf-8")
            (block,) = re.findall(
                f"^From `{before}` to `{after}`: .*?^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE
            )
            head, lines = block.split("\n", 1)
            old, new = map(int, re.match(r"@@ -(\d+),\d+ \+(\d+)", head).groups())
            first = lines.splitlines()[0][1:]
            assert first == (ROOT / before).read_text("utf-8").splitlines()[old - 1]
            assert first == (ROOT / after).read_text("utf-8").splitlines()[new - 1]
            assert done.stdout.endswith(lines)
            changed = [line for line in lines.splitlines() if line[0] in "+-"]
            added, removed = (sum(line[0] == sign for line in changed) for sign in "+-")
            assert (added, removed) == changed_lines(before, after)
            assert f"From `{before}` to `{after}`: +{added} −{removed} lines" in text


NUMBER = re.compile(r"([\d.,]*\d) ?(bytes|kB|MB|GB/s|GB|GiB|GFLOP|TFLOP/s|TFLOP|ms|s|%)?(?![\w/])")
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "GB/s": 1e9, "GiB": 2**30, "ms": 1e-3, "s": 1, "%": 0.01, "": 1}
UNITS |= {"GFLOP": 1e9, "TFLOP": 1e12, "TFLOP/s": 1e12}


def hand_written(page):
    """Return a page without generated blocks, as (its paragraphs, its lines of arithmetic)."""
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    sums = [line for language, block in blocks.findall(text) if language == "text" for line in block.splitlines()]
    return [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=[*|])", blocks.sub("", text))], sums


def equations():
    """Yield (page, line) for every line of arithmetic in the pages."""
    for page in PAGES:
        yield from ((page.stem, line) for line in hand_written(page)[1] if " = " in line)


def is_true(line):
    """Return whether both sides of a line such as `label: 4 × 1,024 × 2 bytes = 8.19 kB` agree to the digits shown."""
    left, right = line.split(": ", 1)[1].split(" = ")
    left = NUMBER.sub(lambda n: f"({n[1].replace(',', '')} * {UNITS[n[2] or '']})", left)
    assert re.fullmatch(r"[\d.e+*/() ×−-]+", left), left
    digits, unit = NUMBER.fullmatch(right).groups()
    value = eval(left.replace("×", "*").replace("−", "-")) / UNITS[unit or ""]
    return abs(value - float(digits.replace(",", ""))) <= 0.51 * 10.0 ** -len(digits.partition(".")[2])


def test_the_arithmetic_on_the_pages_is_right():
    lines = list(equations())
    assert len(lines) > 50 and not [(page, line) for page, line in lines if not is_true(line)]


def test_wrong_arithmetic_is_seen():
    assert is_true("logits: 4 × 1,024 × 50,257 × 4 bytes = 823 MB")
    for wrong in ("832 MB", "823 GB", "824 MB"):
        assert not is_true(f"logits: 4 × 1,024 × 50,257 × 4 bytes = {wrong}")


def measured_phrases():
    """Return {page: its phrases with measured numbers}, recomputed from results/."""
    first, second = (records.load(ROOT / "results" / f"nvidia-h200-2026-11-27{end}") for end in ("", "-2"))
    ten, eight_bits, regional = TEN, "branches/fp8_head.py", "branches/regional_compile.py"
    rungs = dict(zip(["baseline", *(f"{number:02d}" for number in range(1, 11))], RUNGS, strict=False))
    ms = {number: first.rows[script]["median_ms"] for number, script in rungs.items()}
    later = {script: second.rows[script]["median_ms"] for script in (ten, regional)}
    start = {script: second.rows[script]["runs"][0]["step_ms"][0] / 1000 for script in (ten, regional)}
    profiles = {script: second.rows[script]["profile"]["groups_ms"] for script in (ten, eight_bits, regional)}
    left, peak, copies = profiles[ten], first.peaks, first.roof["copy_gb_per_s"]
    loss = {script: profiles[script]["softmax and loss"] for script in profiles}
    casts = {script: loss[script] + profiles[script]["copies"] for script in profiles}
    (again,) = (
        row["median_ms"] for row in second.batches if (row["batch_size"], row["compile_mode"]) == (16, "default")
    )
    runs = json.loads((ROOT / "results" / "muon.json").read_text(encoding="utf-8"))["runs"]
    muon, adamw = (
        statistics.median(one["ms"] for one in runs if one["script"] == name) for name in ("branches/muon.py", ten)
    )
    colab, _, t4 = read_toml("results/public.toml")["log"]
    lecture = read_toml("results/public.toml")["log"][1]["ms"]
    steps = counts.read_counts()["gpt2", 16, 1024]
    floor, _ = counts.Card.read("A100").floor_ms(steps[rungs["06"]])
    kernels = counts.totals(steps[rungs["06"]])[2]
    card = counts.Card(peak, copies)
    here = {number: card.floor_ms(steps[rungs[number]])[0] for number in ("04", "05")}
    about = f"reads and writes about {round(copies, -2):,.0f} GB/s"
    return {
        "baseline": [f"{peak['float32']:.1f} TFLOP/s in float32 matmuls and {copies:,.0f} GB/s in copies on an H200"],
        "speedup_01_weight_tying": [f"a baseline step takes {round(ms['baseline'], -1):.0f} ms on an H200", about],
        "speedup_02_tf32": [
            f"up to {peak['float32']:.1f} TFLOP/s in float32 matmuls on an H200, and up to {peak['tf32']:.0f} in TF32",
            f"The step of rung 01 takes {ms['01']:.0f} ms there",
        ],
        "speedup_03_bf16": [
            f"up to {peak['tf32']:.0f} TFLOP/s in TF32 matmuls on an H200, and up to {peak['bf16']:.0f} in bf16",
            f"The step of rung 02 takes {ms['02']:.0f} ms there",
        ],
        "speedup_05_compile": [
            f"The step of rung 04 takes {ms['04']:.0f} ms there",
            f"falls from {here['04']:.1f} to {here['05']:.1f} ms",
            about,
        ],
        "speedup_06_flash_attn": [
            f"the {ms['05']:.0f} ms of rung 05",
            f"the peak memory of {first.rows[rungs['05']]['peak_gib']:.0f} GiB",
            about,
        ],
        "speedup_10_fused_adamw": [f"The step of rung 09 takes {ms['09']:.0f} ms there at B 16", about],
        "regional_compile": [
            f"the first step of rung 10 took {start[ten]:.1f} s on an H200",
            f"the first step took {start[regional]:.1f} s.",
            f"take {casts[regional]:.1f} instead of {casts[ten]:.1f} ms per step",
            f"({start[ten]:.2f} s − {start[regional]:.2f} s) / ({later[regional]:.2f} ms − {later[ten]:.2f} ms)",
        ],
        "fp8_head": [
            f"A step of rung 10 took {later[ten]:.1f} ms.",
            f"the matmuls took {left['matmul'] - profiles[eight_bits]['matmul']:.1f} ms less",
            f"the softmax and the loss took {loss[eight_bits] - loss[ten]:.1f} ms more",
            f"another run of rung 10 took {again:.1f} ms",
        ],
        "results": [
            f"the median step takes {muon:.0f} ms with Muon and {adamw:.0f} ms with AdamW",
            f"{ms['06']:.1f} ms − {ms['07']:.1f} ms = ",
            f"step: {later[ten]:.1f} ms + 1.57 ms",
            f"step: {later[ten]:.1f} ms + {left['attention']:.1f} ms",
            f"in rung 10, it takes {left['attention']:.1f} ms",
            f"adds up to {sum(left.values()):.1f} ms per step: {left['matmul']:.1f} ms in matmuls, "
            f"{left['normalisation and element-wise']:.1f} ms in normalization and element-wise kernels, "
            f"{left['attention']:.1f} ms in attention, and {left['idle']:.1f} ms with no kernel running",
        ],
        "counts": [
            f"launching the {kernels} kernels of rung 06 takes {5 * kernels / 1000:.0f} ms",
            f"the lecture's step is {lecture[rungs['06']] - floor:.0f} ms longer than its floor",
            f"from {colab['ms'][rungs['01']]} ms for rung 01 to {colab['ms'][ten]} ms for rung 10",
            f"from {t4['ms'][rungs['01']]:,} ms in float32 to {t4['ms'][ten]} ms with fused AdamW",
        ],
    }


NOT_MEASURED = {  # page: numbers that are assumptions, or that the page computes or takes from a data sheet
    "baseline": ["19.5 TFLOP/s in float32", "1,555 GB/s (40 GB)"],
    "ddp_run": ["NVLink gives an A100 300 GB/s"],
    "fp16_rung_10": ["8.1 TFLOP/s in float32, 65 TFLOP/s in fp16, and 320 GB/s"],
    "fsdp_run": ["24 GiB (25.8 GB)"],
    "running": ["takes 10 ms, in float32", "3.50 TFLOP in 10 ms would require 350 TFLOP/s", "about half a GiB"],
    "speedup_07_vocab_pad": ["2 bytes = 1.54 GiB"],
}


def test_measured_numbers_in_sentences_match_the_results():
    """No sentence has a measured number that is not in measured_phrases(), unless it links to a source."""
    said, missing, unknown = measured_phrases(), [], []
    for page in PAGES:
        paragraphs, sums = hand_written(page)
        phrases = said.pop(page.stem, [])
        missing += [(page.stem, one) for one in phrases if not any(one in text for text in [*paragraphs, *sums])]
        for text in paragraphs:
            for phrase in [*phrases, *NOT_MEASURED.get(page.stem, [])]:
                text = text.replace(phrase, "")
            found = re.findall(r"[\d.,]*\d (?:ms|GiB|MiB|GB/s|TFLOP/s|tokens/s)\b", text)
            if found and "https://" not in text and not text.startswith("| "):
                unknown.append((page.stem, found, text))
    assert not said and not missing and not unknown


def test_rates_in_the_arithmetic_are_measured_or_from_a_data_sheet():
    rates = {
        f"{rate:,}" for card in read_toml("measure/cards.toml").values() for rate in card.values() if rate != str(rate)
    }
    for folder in ("nvidia-h200-2026-11-27", "nvidia-h200-2026-11-27-2"):
        data = records.load(ROOT / "results" / folder)
        measured = [*data.peaks.values(), data.roof["copy_gb_per_s"], round(data.roof["copy_gb_per_s"], -2)]
        rates |= {form.format(rate) for rate in measured for form in ("{:.1f}", "{:,.0f}")}
    rates.add("300")  # NVLink 3, GB/s
    for page in PAGES:
        for line in hand_written(page)[1]:
            assert set(re.findall(r"([\d.,]+) (?:TFLOP|GB)/s", line)) <= rates, (page.stem, line)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, which fails on a broken link or anchor, and serve it. Return (folder, address)."""
    pytest.importorskip("zensical", reason="Zensical needs Python 3.11 or later")
    docs = copy_project(tmp_path_factory.mktemp("site"), "docs")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=docs, check=True, capture_output=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=docs / "site")
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield docs / "site", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_page_is_in_the_menu():
    def files(menu):
        for one in menu:
            yield from files(one.values()) if isinstance(one, dict) else files(one) if isinstance(one, list) else [one]

    named = [page.relative_to(ROOT / "docs" / "pages").as_posix() for page in PAGES]
    assert sorted(files(read_toml("docs/zensical.toml")["project"]["nav"])) == sorted(named)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_every_page_opens_without_an_error_a_request_elsewhere_or_sideways_scrolling(site):
    from playwright.sync_api import sync_playwright

    folder, address = site
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        tab, wrong = browser.new_page(), []
        tab.on("console", lambda message: message.type == "error" and wrong.append((tab.url, message.text)))
        tab.on("pageerror", lambda error: wrong.append((tab.url, str(error))))
        tab.on("request", lambda request: request.url.startswith((address, "blob:")) or wrong.append(request.url))
        opened = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("index.html"))
        assert len(opened) == len(PAGES)
        for page in opened:
            tab.goto(f"{address}/{page}")
            tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            for width in (390, 1440):
                tab.set_viewport_size({"width": width, "height": 900})
                if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    wrong.append((page, f"is wider than {width} pixels"))
            if pieces := [text for text in ("[[[", "```", "](") if text in tab.inner_text("article")]:
                wrong.append((page, f"shows Markdown: {pieces}"))
    assert not wrong
