"""The site shows git's diffs, the measured figures and correct arithmetic, and works in a browser.

Chromium opens every page from disk, and one page of each kind from a server. No page has a console error or overflows
on a phone or a desktop, and axe finds no serious accessibility violation.
"""

import functools
import http.server
import json
import re
import subprocess
import threading
from urllib.parse import unquote, urljoin, urlparse

import floor
import pytest
import render
from conftest import ROOT, RUNGS, browsing, copy_project, give_packages
from ladder import PLAIN_GIT, changed_lines, read_toml, split

pytest.importorskip("zensical", reason="Zensical takes Python 3.11 or later")
import build_site as docs  # noqa: E402
from bs4 import BeautifulSoup  # noqa: E402

SCRIPTS = list(RUNGS)
PAIRS = [(before, after) for i, after in enumerate(SCRIPTS) for before in SCRIPTS[:i]]
RUNG_PAGES = [docs.page(script) for script in SCRIPTS]
SIDE_PAGES = """
    index counts compare mistakes options where log scale pretrain card results quality measuring memory beyond checked
    transformers
""".split()
SIDE_PAGES = [f"{name}.html" for name in SIDE_PAGES]
PAGES = [*SIDE_PAGES, *RUNG_PAGES, *(docs.pair_page(*pair) for pair in PAIRS)]
SHOWN = [*SIDE_PAGES, *RUNG_PAGES, docs.pair_page(SCRIPTS[0], SCRIPTS[10]), docs.pair_page(SCRIPTS[0], SCRIPTS[12])]
NEAR = [pair if RUNGS[pair[1]].before == pair[0] else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
LADDERS = list(render.newest())  # the names of the results that the pages of the ladder show
RESULTS = render.newest() | render.newest(partial=True)
WHOLE = next(name for name, data in RESULTS.items() if data["complete"])  # a result with several passes and a profile


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    docs.build(folder)
    return folder


@pytest.fixture(scope="module")
def soup(site):
    @functools.cache
    def read(page):
        return BeautifulSoup((site / page).read_text(encoding="utf-8"), "html.parser")

    return read


def text_of(diff, side=None):
    """Return the text of a diff in the inline view, or of one side ("old" or "new")."""
    wanted = {
        None: "pre.at, .block.same > .new .line, .block:not(.same) .line",
        "old": ".old .line",
        "new": ".new .line",
    }
    return "".join(part.text for part in diff.select(wanted[side]))


def git(*args):
    command = ["git", "diff", "--no-index", *args]
    return subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, encoding="utf-8").stdout


def test_every_page_is_there_and_no_other(site):
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert found == set(PAGES)
    assert (site / ".nojekyll").exists()  # makes GitHub Pages serve the folder unchanged


@pytest.mark.parametrize("before, after", NEAR)
def test_the_diff_of_a_page_is_gits(soup, before, after):
    printed = git(before, after)
    pages = [docs.pair_page(before, after)] + [docs.page(after)] * (RUNGS[after].before == before)
    for page in pages:
        (diff,) = soup(page).select(".diff")
        # A page has each unchanged line twice. Screen readers must read it only once.
        assert all(twice.get("aria-hidden") == "true" for twice in diff.select(".block.same > .old"))
        assert text_of(diff) == printed
        body = printed[printed.index("@@") :].splitlines(keepends=True)
        for side, sign in (("old", "+"), ("new", "-")):
            assert text_of(diff, side) == "".join(line for line in body if line[0] not in ("@", sign))
        numbers = [(line.get("data-old"), line.get("data-new")) for line in diff.select(".block.same > .new .line")]
        old, new = ((ROOT / script).read_text(encoding="utf-8").splitlines() for script in (before, after))
        assert all(old[int(a) - 1] == new[int(b) - 1] for a, b in numbers)


@pytest.mark.parametrize("before, after", NEAR)
def test_the_docstring_is_folded_away_and_nothing_else(soup, before, after):
    (diff,) = soup(docs.pair_page(before, after)).select(".diff")
    (folded,) = diff.select("details")
    assert not folded.has_attr("open")
    ends = [split((ROOT / script).read_text(encoding="utf-8"))[0].count("\n") for script in (before, after)]
    assert all(int(line["data-old"]) <= ends[0] for line in folded.select("del"))
    assert all(int(line["data-new"]) <= ends[1] for line in folded.select("ins"))
    shown = [len(diff.select(tag)) - len(folded.select(tag)) for tag in ("ins", "del")]
    assert tuple(shown) == changed_lines(before, after)


def test_the_listing_of_baseline_is_the_file(soup):
    source = (ROOT / "baseline.py").read_text(encoding="utf-8")
    listing = soup(docs.page("baseline.py")).select_one('details:has([aria-label="baseline.py"])')
    assert "".join(line.text for line in listing.select(".line")) == source
    assert listing.summary.text == f"baseline.py, all {source.count(chr(10))} lines"


def test_words_are_marked_where_a_line_changed(soup):
    diff = soup(docs.page("speedup_08_adamw_clip.py")).select_one(".diff")
    old, new = ("".join(word.text for word in diff.select(f".block:not(.same) {tag} .word")) for tag in ("del", "ins"))
    assert ", betas=(0.9, 0.95" in new and " | norm {norm:.4f}" in new
    assert "betas" not in old and "AdamW" not in old + new


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rungs_page_has_all_that_a_reader_looks_for(soup, script):
    article = soup(docs.page(script)).select_one("article")
    assert article.h1.find(string=True).strip() == docs.title(script)
    idea = article.select_one("h1 ~ p").text
    assert len(re.findall(r"\.(?:\s|$)", re.sub(r"1\.0 ", "", idea))) == 2, idea  # the idea has two sentences
    headings = [heading.find(string=True).strip() for heading in article.find_all("h2")]
    assert [name in headings for name in ("Predicted and measured", "Run it", "Exercise", "Sources")] == [True] * 4
    (commands,) = [code.text for code in article.select("pre > code") if script in code.text]
    assert re.search(rf"^(python|torchrun .*) {re.escape(script)}", commands, re.MULTILINE)
    if RUNGS[script].before:
        assert f"In a terminal: make diff-{RUNGS[script].number}." in article.text
    for exercise in (exercises := article.select("details.question")):
        assert not exercise.has_attr("open") and "?" in exercise.summary.text
    assert exercises
    assert len(article.select('h2#sources + ul a[href^="https://"]')) >= 2
    article = BeautifulSoup(str(article), "html.parser")  # a copy, to be reduced to its prose
    for part in article.select("h1, .facts, .diff, .results, h2#sources + ul, h2#run-it + div, .headerlink"):
        part.decompose()
    words = len(re.findall(r"[\w,.']*\w", article.text))
    assert 300 <= words <= 600, words


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rungs_page_begins_with_its_numbers(site, soup, script):
    """The page begins with the rung's kind, changed lines, reading time, predicted and measured gain, and file."""
    rung, facts = RUNGS[script], soup(docs.page(script)).select_one("h1 + .facts")
    shown = {term.text: term.find_next("dd").text for term in facts.select("dt")}
    assert shown.get("kind", "") == rung.kind
    if rung.before:
        added, removed = changed_lines(rung.before, script)
        assert shown["changed lines"] == f"+{added} −{removed}"
    assert shown["to read"] == f"{docs.minutes(rung)} minutes"
    assert re.search(r"\d|below|bf16|n×", shown["predicted"])
    rows = [docs.row_of(data, script) for data in RESULTS.values()]
    gains = [docs.over(row["over_before"]) or f"{row['median_ms']:,.0f} ms" for row in rows if row and row["median_ms"]]
    assert shown["measured"].startswith(gains[0] if gains else "not yet")
    assert (site / "rungs" / facts.a["href"]).read_bytes() == (ROOT / script).read_bytes()


def test_a_result_without_a_time_for_the_baseline_has_no_number():
    """In such a result, baseline.py failed or, with --only, was not measured."""
    site, data = docs.Site(), next(iter(RESULTS.values()))
    for rows in [], [docs.row_of(data, "baseline.py") | {"median_ms": None, "over_before": None}]:
        site.results = {"made up": data | {"rows": rows}}
        assert "<dd>not yet</dd>" in site.head(RUNGS["baseline.py"])


NUMBER = re.compile(r"([\d.,]*\d) ?(bytes|kB|MB|GB/s|GB|GiB|GFLOP|TFLOP/s|TFLOP|ms|s|%)?(?![\w/])")
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "GB/s": 1e9, "GiB": 2**30, "ms": 1e-3, "s": 1, "%": 0.01, "": 1}
UNITS |= {"GFLOP": 1e9, "TFLOP": 1e12, "TFLOP/s": 1e12}


def equations():
    """Yield (page, line) for every line of arithmetic in the rung pages and in the README of the notebooks."""
    for path in (*sorted((ROOT / "docs" / "pages" / "rungs").glob("*.md")), ROOT / "notebooks" / "README.md"):
        for block in re.findall(r"^```text\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            yield from ((path.stem, line) for line in block.splitlines())


def is_true(line):
    """Return whether both sides of a line such as `label: 4 × 1,024 × 2 bytes = 8.19 kB` agree to the digits shown."""
    left, right = line.split(": ", 1)[1].split(" = ")
    left = NUMBER.sub(lambda n: f"({n[1].replace(',', '')} * {UNITS[n[2] or '']})", left)
    assert re.fullmatch(r"[\d.e+*/() ×−-]+", left), left
    digits, unit = NUMBER.fullmatch(right).groups()
    value = eval(left.replace("×", "*").replace("−", "-")) / UNITS[unit or ""]
    return abs(value - float(digits.replace(",", ""))) <= 0.51 * 10.0 ** -len(digits.partition(".")[2])


@pytest.mark.parametrize("page, line", list(equations()))
def test_the_arithmetic_is_right(page, line):
    assert is_true(line)


def test_wrong_arithmetic_is_seen():
    assert is_true("logits: 4 × 1,024 × 50,257 × 4 bytes = 823 MB")
    for wrong in ("832 MB", "823 GB", "824 MB"):
        assert not is_true(f"logits: 4 × 1,024 × 50,257 × 4 bytes = {wrong}")


@pytest.mark.parametrize("script", list(docs.Site().steps[render.COUNTED]))
def test_a_rungs_page_shows_its_three_counts_first(soup, script):
    steps, before = docs.Site().steps[render.COUNTED], RUNGS[script].before
    rows = {}
    for row in soup(docs.page(script)).select_one("article table").select("tbody tr"):
        what, *cells = [cell.text for cell in row.select("td")]
        rows[what] = cells
    for what, form, place in (("FLOPs, TFLOP", "{:.2f}", 0), ("bytes moved, GB", "{:.1f}", 1), ("kernels", "{}", 2)):
        unit = {0: 1e12, 1: 1e9, 2: 1}[place]
        figures = [floor.totals(steps[one])[place] for one in (before, script) if one]
        shown = [form.format(figure / unit if unit > 1 else figure) for figure in figures]
        if before:
            change = f"{100 * (figures[1] / figures[0] - 1):+.1f}%".replace("-", "−")
            small = "same" if figures[0] == figures[1] else "under 0.1%"
            shown.append(change if abs(figures[1] / figures[0] - 1) >= 0.0005 else small)
        assert rows[what] == shown
    changed = {row.removeprefix("bytes: ").removesuffix(", GB") for row in rows if row.startswith("bytes: ")}
    if before:
        moved = {kind: [floor.totals(steps[one], kind)[1] for one in (before, script)] for kind in render.GROUPS}
        least = floor.totals(steps[before])[1] / 100
        assert changed == {kind for kind, (old, new) in moved.items() if abs(old - new) >= least}


def check_findings(page, script, name, data):
    """Assert that a rung's page shows its measured figures beside the predicted figures."""
    (section,) = page.select(f'.result[data-result="{name}"]')
    rows = [[cell.text.strip() for cell in row.select("td")] for row in section.select("tbody tr")]
    assert all(predicted for predicted, _ in rows)
    speed, memory, loss = (measured for _, measured in rows)
    measured = {row["name"]: row for row in data["rows"] if row["median_ms"]}
    row, before = measured.get(script), measured.get(RUNGS[script].before)
    if not row:
        failed = next((row["error"] for row in data["rows"] if row["name"] == script), "not measured")
        assert [speed, memory, loss] == [failed, "not measured", "not measured"] and not section.select("svg")
        return
    losses = [next(run["losses"][-1] for run in one["runs"] if not run["error"]) for one in (before, row) if one]
    assert f"{row['median_ms']:,.1f} ms per step" in speed
    peak = row["peak_memory_gib"]
    assert (f"{peak:.2f} GiB" if peak else "not measured") in memory
    assert loss.startswith(" to ".join(f"{loss:.4f}" for loss in losses))
    if before and (ratio := row["over_before"]):
        assert speed.startswith(render.times(ratio))
        assert ("inconclusive" in speed) == (ratio["low"] < 1 < ratio["high"])
    assert ("×" in speed) == bool(before)
    profiled = all(one["profile"] and one["profile"]["groups_ms"] for one in (before, row) if one)
    assert len(section.select("figure[role=img][aria-label] svg")) == 2 + profiled


def test_the_front_page_is_the_readme(soup):
    """The front page has the README's headings, page links and tables, and its picture."""
    page, readme = soup("index.html").select_one("article"), (ROOT / "README.md").read_text(encoding="utf-8")
    headings = [heading.find(string=True).strip() for heading in page.find_all("h2")]
    assert headings == [*re.findall(r"^## (.+)$", readme, re.MULTILINE), "On this site"]
    linked = {link["href"] for link in page.select("a[href]")}
    for name, anchor in re.findall(r"\]\(docs/pages/([\w/]+)\.md(#[\w-]+)?\)", readme):
        assert f"{name}.html{anchor}" in linked
    pictures = page.select("figure[role=img][aria-label] svg")
    # Until a GPU is measured, the picture is counts.svg, which has a wide and a narrow version.
    assert len(pictures) == (2 if "counts.svg" in readme else 1)
    assert len(page.select("table")) == len(re.findall(r"^\| ---", readme, re.MULTILINE)) == 2


def test_no_page_shows_the_note_for_github(soup):
    assert not [page for page in [*SIDE_PAGES, *RUNG_PAGES] if "On GitHub, this page lacks" in soup(page).text]


def test_a_page_has_its_figures_in_it_and_no_two_elements_with_one_id(soup):
    for page in ("index.html", "counts.html", "results.html"):
        ids = [found["id"] for found in soup(page).select("[id]")]
        assert len(ids) == len(set(ids)), page
        assert soup(page).select("article figure svg") and not soup(page).select("article img")
        assert "currentColor" in str(soup(page).select_one("article figure svg"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_rungs_page_shows_what_was_measured_beside_what_was_predicted(soup, script):
    shown = {}  # the name of the first result per device and model
    for name, data in RESULTS.items():
        row = docs.row_of(data, script)
        if row and (row["median_ms"] or row["error"]):
            shown.setdefault((data["machine"]["name"], data["settings"]["model"]), name)
    shown = list(shown.values()) or list(RESULTS)[:1]
    page = soup(docs.page(script))
    assert [section["data-result"] for section in page.select("section.result")] == shown
    for name in shown:
        check_findings(page, script, name, RESULTS[name])


def test_the_page_on_pre_training_shows_the_run_in_results(soup):
    page, (folder,) = soup("pretrain.html"), (ROOT / "results").glob("pretrain-*")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = {row["step"]: row for row in rows if "val_loss" in row}
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    best = min(scores.values(), key=lambda row: row["val_loss"])
    (table,) = (table for table in page.select(".results table"))
    shown = [[cell.text for cell in row.select("th, td")] for row in table.select("tbody tr")]
    for before, step, cells in zip([None, *scores], scores, shown, strict=False):
        since = [losses[at] for at in range(before, step)] if before is not None else []
        mean = f"{sum(since) / len(since):.3f}" if since else ""
        assert cells == [str(step), mean, f"{scores[step]['val_loss']:.3f}"]
    assert len(shown) == len(scores)
    label = page.select_one(".results figure[role=img]")["aria-label"]
    assert f"{best['val_loss']:.3f} at step {best['step']}" in label and page.select(".results figure svg")
    samples = [code.text for code in page.select(".results pre code")]
    assert samples == [row["samples"][0] for row in (scores[0], best, scores[max(scores)])]


def test_every_mistake_is_on_its_page(soup):
    page, kinds = soup("mistakes.html"), read_toml("dev/mistakes.toml")
    groups = [heading.find(string=True).strip() for heading in page.select("article h2")]
    assert list(kinds) == ["silent", "slow", "unsafe"]
    assert groups == ["Silently wrong", "Slower than it looks", "Unsafe"]
    assert docs.TOPICS[0] == kinds["silent"][0]["topic"]  # the page of rung 01 states that its mistake comes first
    mistakes = [
        (group, mistake)
        for group, kind in zip(groups, kinds, strict=True)
        for mistake in sorted(kinds[kind], key=lambda mistake: docs.TOPICS.index(mistake["topic"]))
    ]
    for shown, (group, mistake) in zip(page.select("details.quote"), mistakes, strict=True):
        assert shown.find_previous("h3").find(string=True).strip() == mistake["topic"]
        assert shown.find_previous("h2").find(string=True).strip() == group
        assert shown.summary.text.lower() == f"{mistake['name']}. {mistake['harm']}.".lower()
        assert f"tests/{mistake['check'].replace('{script}', mistake['file'])}" in shown.text
        assert shown.select(".gd, .gi")
        changed = [(right, wrong) for right, wrong in mistake["edits"] if right.count("\n") == wrong.count("\n") == 0]
        assert all(wrong.strip() in shown.text for _, wrong in changed)


@pytest.mark.parametrize("pages", [SHOWN, pytest.param(PAGES, marks=pytest.mark.slow)], ids=["of each kind", "all"])
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site, soup, pages):
    broken, ids = [], functools.cache(lambda page: {found["id"] for found in soup(page).select("[id]")})
    for page in pages:
        for element in soup(page).select("[href], [src]"):
            link = element.get("href") or element.get("src")
            target = urlparse(urljoin(f"file:///{page}", link))
            if target.scheme == "https" and element.name == "a":
                continue  # an external link, which the tests cannot follow offline
            path = unquote(target.path).lstrip("/")
            ok = target.scheme == "file" and (site / path).is_file() and not link.startswith("/")
            if not (ok and (not target.fragment or target.fragment in ids(path))):
                broken.append((page, link))
    assert not broken


def test_search_knows_each_page_but_not_each_pair(site):
    found = {item["location"].split("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    assert found == {*SIDE_PAGES, *RUNG_PAGES}


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_with_all_that_it_loads_is_under_a_mebibyte(site, soup, page):
    loads = [
        element.get("href") or element["src"] for element in soup(page).select("link[href], script[src], img[src]")
    ]
    files = {(site / page).parent / link.split("?")[0] for link in loads if not link.endswith(".html")}
    files |= {site / page, site / "search.js", *site.glob("assets/javascripts/workers/*.js")}
    assert sum(file.resolve().stat().st_size for file in files) < 2**20


OVERFLOW = """() => document.documentElement.scrollWidth > innerWidth ? ["the page"] :
    [...document.querySelectorAll("article *")].filter(element => {
        const box = element.getBoundingClientRect()
        if (box.right <= innerWidth + 1 && box.left >= -1 || !element.textContent.trim()) return false
        for (let above = element.parentElement; above !== document.body; above = above.parentElement)
            if (["auto", "scroll"].includes(getComputedStyle(above).overflowX)) return false
        return true
    }).map(element => element.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """Build a site with `make docs` from a made-up GPU result and a new rung, and return (its folder, the result).

    The result contains a failed script and failed passes, but no measured peak.
    """
    root = copy_project(tmp_path_factory.mktemp("docs") / "ladder")
    data = json.loads((ROOT / "results" / WHOLE / "ladder.json").read_text(encoding="utf-8"))
    data["finished"] = "2099-01-01T00:00:00+00:00"  # later than our measurement of this GPU, which it replaces
    data["machine"] |= {"device": "cuda", "name": "NVIDIA H200", "cuda": "1", "threads": None}
    data["hosts"][0] |= {"device_memory_gib": 16.0, "driver": "1", "cudnn": 91501}
    data["settings"] |= {"model": "gpt2", "batch_size": 16, "seq_len": 1024, "repeat": 1}
    speed = {"median_ms": 130.0, "tokens_per_s": 5e5, "tflops": None, "roof_share": None}
    cell = {"batch_size": 64, "compile_mode": "default", "precision": "bf16", "run": dict(data["rows"][10]["runs"][0])}
    del cell["run"]["pass"]
    data["roof"], data["batches"] = None, [cell | speed]
    for row in data["rows"]:
        row["roof_share"] = row["tflops"] = None
        row["runs"][0] |= {"error": "out of memory", "times_ms": [], "losses": []}
    failed = next(row for row in data["rows"] if row["name"] == "speedup_05_compile.py")
    for key in ("median_ms", "quartiles_ms", "tokens_per_s", "over_baseline", "over_before"):
        failed[key] = None
    failed["error"] = "out of memory with B 64 and T 1024: lower --batch-size or --seq-len. " * 3 + "The end."
    data["rows"][1]["error"], data["rows"][2]["fit"] = (
        "the first pass failed",
        {"host": "0", "batch_size": 96, "error": None},
    )
    data["rows"][2]["fit"] |= dict.fromkeys(("limit", "median_ms", "tokens_per_s", "peak_memory_gib"))
    (root / "results" / "made-up").mkdir()
    (root / "results" / "made-up" / "ladder.json").write_text(json.dumps(data), encoding="utf-8")
    add_rung(root)
    give_packages(root)
    done = subprocess.run(["make", "docs"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root / "docs" / "site", data


def add_rung(root):
    """Insert a rung before ddp_run.py as CONTRIBUTING.md describes.

    In the results, ddp_run.py is still compared with rung 10.
    """
    ladder = (root / "ladder.toml").read_text(encoding="utf-8")
    row = '[[rung]]\nfile = "speedup_11_new.py"\ntitle = "New"\nidea = "new"\ntouches = []\nlimit = 0\n\n'
    parts = ladder.rpartition('[[rung]]\nfile = "ddp_run.py"')
    (root / "ladder.toml").write_text(f"{parts[0]}{row}{parts[1]}{parts[2]}", encoding="utf-8")
    new = (root / SCRIPTS[10]).read_text(encoding="utf-8").replace("Rung 10", "Rung 11")
    (root / "speedup_11_new.py").write_text(new, encoding="utf-8")
    (root / "docs" / "pages" / "rungs" / "speedup_11_new.md").write_text("# New\n", encoding="utf-8")
    path = root / "results" / WHOLE / "ladder.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["rows"].append(data["rows"][10] | {"name": "speedup_11_new.py", "before": SCRIPTS[10]})
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.slow
def test_a_gpus_result_comes_first_also_with_failed_runs_and_no_peak(made_up):
    folder, data = made_up
    pages = [BeautifulSoup((folder / page).read_text(encoding="utf-8"), "html.parser") for page in RUNG_PAGES]
    others = [name for name in RESULTS if RESULTS[name]["machine"]["name"] != "NVIDIA H200"]
    assert [result["data-result"] for result in pages[0].select(".result")] == ["made-up", *others]
    for script, page in zip(SCRIPTS, pages, strict=True):
        if script != "ddp_run.py" and docs.row_of(data, script):  # the new rung, which RUNGS lacks, precedes ddp_run.py
            check_findings(page, script, "made-up", data)
    assert "A pass failed: the first pass failed" in pages[1].text
    said = "Predicted on 2026-11-23 for NVIDIA H200, B {}, T 1024: {} ms per step; measured: {} ms, {}."
    assert said.format(64, "124 to 132", "130.0", "as predicted") in pages[10].text
    found = data["rows"][7]["median_ms"]
    assert said.format(16, "33 to 36", f"{found:,.1f}", f"{found / 36 - 1:+.0%}") in pages[7].text
    assert "not measured yet" in pages[7].text  # the prediction for B 64
    assert "One pass does not show the spread" in pages[1].text
    assert "The largest batch size that ran was 96" in pages[2].text


@pytest.mark.slow
def test_a_rung_that_was_not_there_when_it_was_measured_has_a_page(made_up):
    folder, _ = made_up
    assert (folder / "rungs" / "speedup_11_new.html").exists()
    page = BeautifulSoup((folder / "rungs" / "ddp_run.html").read_text(encoding="utf-8"), "html.parser")
    assert not [cell.text for cell in page.select(".measured td") if "×" in cell.text and "ms per step" in cell.text]


@pytest.mark.slow
def test_a_mistake_in_a_page_is_one_line_and_leaves_the_site_that_was_there(tmp_path):
    root = copy_project(tmp_path / "ladder")
    (root / "docs" / "site").mkdir()
    (root / "docs" / "site" / "index.html").write_text("the last one")
    mistakes, page = root / "dev" / "mistakes.toml", root / "docs" / "pages" / "rungs" / "baseline.md"
    planted, text = (path.read_text(encoding="utf-8") for path in (mistakes, page))
    stale = planted.replace("edits = [['self.transformer.wte.weight = ", "edits = [['not.there = ", 1)
    harmless = re.sub('(?<="attention has no causal mask"\n)harm = .*\n', "", planted)
    for path, wrong, error in (
        (mistakes, stale, "does not contain its lines exactly once"),
        (mistakes, harmless, "attention has no causal mask: it has no harm"),
        (page, f"{text}\n<!-- {{{{ site.nothing }}}} -->", "nothing"),
        (page, f"{text}\n{{{{ site.rungs }}}}", "baseline.md: write a call as <!-- {{"),
        (page, f"{text}\n[a link](nowhere.md)", "nowhere"),
        (page, None, "baseline.md is missing"),
        (page.with_name("speedup_11_new.md"), "# New\n", "speedup_11_new.md belongs to no rung and has no line in nav"),
    ):
        right = path.read_bytes() if path.exists() else None
        path.unlink() if wrong is None else path.write_text(wrong, encoding="utf-8")
        done = subprocess.run([docs.sys.executable, "docs/build_site.py"], cwd=root, capture_output=True, text=True)
        assert done.returncode == 1 and len(done.stdout.splitlines()) < 4
        assert re.fullmatch(rf"build_site\.py: error: .*{error}.*\n", done.stderr), done.stderr
        assert (root / "docs" / "site" / "index.html").read_text() == "the last one"
        path.unlink() if right is None else path.write_bytes(right)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve the site under a path, as GitHub Pages does, without logging requests."""

    def translate_path(self, path):
        assert path.startswith("/ladder/"), path
        return super().translate_path(path.removeprefix("/ladder"))

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def urls(site):
    """Yield the URLs of the site on disk and on a local server."""
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"file": f"{site.as_uri()}/", "http": f"http://127.0.0.1:{server.server_port}/ladder/"}
        server.shutdown()


@pytest.fixture(params=["file"])
def base(request, urls):
    return urls[request.param]


# Storage, search and loading may behave differently on pages opened from disk than on pages from a server, so their
# tests use both. Other tests open the pages from disk only.
from_both = pytest.mark.parametrize("base", ["file", "http"], indirect=True)


@pytest.fixture
def tab(browser, base):
    """Yield a browser tab, and assert at the end that it had no errors, failed requests or external requests."""
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        page, wrong = context.new_page(), []
        page.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        left = "net::ERR_ABORTED"  # not an error: the test left the page before the request finished
        page.on("requestfailed", lambda request: request.failure == left or wrong.append(request.url))
        page.on("request", lambda request: request.url.startswith((base, "blob:")) or wrong.append(request.url))
        page.on("response", lambda response: response.status < 400 or wrong.append(response.url))
        page.set_default_timeout(20_000)
        yield page
        assert not wrong


@browsing
@from_both
def test_every_page_loads_and_nothing_overflows(tab, base):
    for page in PAGES if base.startswith("file:") else SHOWN:
        tab.set_viewport_size({"width": 320, "height": 900})
        tab.goto(base + page)
        assert tab.locator("h1").count() == 1
        for width in (320, 390, 1440) if page in SHOWN else (320,):
            tab.set_viewport_size({"width": width, "height": 900})
            assert not tab.evaluate(OVERFLOW), (page, width)
            if page in SHOWN:
                tab.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
                for view in ("sides", "inline"):
                    tab.evaluate("view => document.documentElement.dataset.view = view", view)
                    assert not tab.evaluate(OVERFLOW), (page, width, view)
    tab.evaluate("document.querySelector('article p').style.width = '3000px'")
    assert tab.evaluate(OVERFLOW)  # the check detects an element that is too wide


@browsing
@pytest.mark.parametrize("width", [390, 1440])
def test_a_long_error_does_not_widen_a_page(browser, made_up, width):
    with browser.new_page(viewport={"width": width, "height": 900}) as page:
        page.goto((made_up[0] / docs.page("speedup_05_compile.py")).as_uri())
        assert page.get_by_text("The end.").first.is_visible() and not page.evaluate(OVERFLOW)


@browsing
def test_the_picture_is_the_one_for_the_window(tab, base):
    for width, shown in (390, "narrow"), (1440, "wide"):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.goto(base + "counts.html")
        assert [figure.get_attribute("class") for figure in tab.locator(".plots figure:visible").all()] == [shown]
        sizes = tab.locator(".plots figure:visible svg text").evaluate_all(
            "texts => texts.map(text => text.getBoundingClientRect().height)"
        )
        assert min(sizes) >= 9  # pixels; smaller text would be hard to read


@browsing
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser, urls, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme) as context:
        page, found = context.new_page(), []
        sides = "index.html", "compare.html", "card.html", "mistakes.html"
        for name in (*sides, RUNG_PAGES[6], SHOWN[-1]):  # one page of each kind
            page.goto(urls["file"] + name)
            page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
            page.wait_for_timeout(300)  # wait until the theme's colours have faded in
            for violation in axe.run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    found.append((name, violation["id"], [node["html"][:200] for node in violation["nodes"][:3]]))
        assert not found


@browsing
def test_the_switch_shows_a_diff_side_by_side_and_is_remembered(tab, base):
    tab.goto(base + docs.page("speedup_06_flash_attn.py"))
    gone, come = (tab.locator(f".diff > .block:not(.same) {tag}").last for tag in ("del", "ins"))
    same = tab.locator(".diff > .block.same > .old").first

    def places():
        return gone.bounding_box(), come.bounding_box()

    (left, right), inline = places(), tab.get_by_role("radio", name="inline")
    assert left["x"] == right["x"] and left["y"] < right["y"] and inline.is_checked() and not same.is_visible()
    inline.focus()
    tab.keyboard.press("ArrowRight")  # the arrow keys move between radio buttons
    left, right = places()
    assert left["x"] + left["width"] <= right["x"] and same.is_visible()
    assert tab.get_by_role("radio", name="side by side").is_checked()
    tab.goto(base + docs.pair_page(SCRIPTS[0], SCRIPTS[6]))
    left, right = places()
    assert left["x"] + left["width"] <= right["x"]
    tab.set_viewport_size({"width": 390, "height": 900})  # too narrow for two columns
    left, right = places()
    assert left["x"] == right["x"] and left["y"] < right["y"] and not inline.is_visible()
    tab.set_viewport_size({"width": 1440, "height": 900})
    tab.get_by_text("inline", exact=True).click()
    left, right = places()
    assert left["x"] == right["x"]


@browsing
@pytest.mark.parametrize("script", [6, 11, 12])
def test_paired_lines_are_side_by_side(tab, base, script):
    tab.goto(base + docs.page(SCRIPTS[script]))
    tab.get_by_text("side by side", exact=True).click()
    tops = tab.evaluate(
        """() => [...document.querySelectorAll(".diff > .block")].flatMap(block => {
            const sides = ["old", "new"].map(side => [...block.querySelectorAll(`.${side} .line`)])
            const partner = (line, at) => block.matches(".same") ? sides[1][at]
                : sides[1].find(other => other.style.getPropertyValue("--row") === line.style.getPropertyValue("--row"))
            return sides[0].map((line, at) => [line, partner(line, at)]).filter(pair => pair[1])
        }).map(pair => pair.map(line => Math.round(line.getBoundingClientRect().top)))"""
    )
    assert len(tops) > 10 and all(left == right for left, right in tops)
    lines = {line.inner_text().strip()[1:].strip(): line for line in tab.locator(".diff .block:not(.same) .line").all()}
    for old, new in [
        ("y = F.softmax", "y = F.scaled_dot"),
        ("for step in range(args", 'for step in range(run["step"]'),
    ]:
        pair = [line for text, line in lines.items() if text.startswith((old, new))]
        assert not pair or pair[0].bounding_box()["y"] == pair[1].bounding_box()["y"]
    assert script == 11 or pair or SCRIPTS[script].startswith("speedup_06")


@browsing
@from_both
def test_a_page_that_one_comes_back_to_shows_what_its_buttons_say(tab, base):
    tab.goto(base + RUNG_PAGES[3])
    tab.get_by_role("link", name=docs.title(SCRIPTS[6])).first.click()
    tab.locator(".choice[data-choice=result] label").last.click()
    tab.go_back()
    tab.wait_for_url(base + RUNG_PAGES[3])
    checked = tab.locator(".choice[data-choice=result] input:checked").get_attribute("value")
    assert tab.locator(".result:visible").get_attribute("data-result") == checked == LADDERS[-1]
    tab.locator(".choice[data-choice=result] label").first.click()
    assert tab.locator(".result:visible").get_attribute("data-result") == LADDERS[0]
    tab.goto(base + docs.pair_page(SCRIPTS[0], SCRIPTS[10]))
    tab.locator("select[name=after]").select_option(docs.title(SCRIPTS[5]))
    tab.get_by_role("button", name="Compare").click()
    tab.wait_for_url(base + docs.pair_page(SCRIPTS[0], SCRIPTS[5]))
    tab.go_back()
    tab.wait_for_url(base + docs.pair_page(SCRIPTS[0], SCRIPTS[10]))
    assert tab.locator("select[name=after]").input_value() == "speedup_10_fused_adamw"


@browsing
@from_both
def test_what_was_chosen_is_there_before_the_page_is_painted(tab, base):
    """The script in the page's head shows the chosen result without relying on event handlers."""
    tab.goto(base + RUNG_PAGES[0])
    tab.locator(".choice[data-choice=result] label").last.click()
    tab.add_init_script("addEventListener = document.addEventListener = () => {}")  # no event handler runs
    tab.goto(base + docs.page("speedup_05_compile.py"))
    assert tab.locator(".result:visible").get_attribute("data-result") == LADDERS[-1]


@browsing
def test_what_is_copied_from_the_inline_view_is_gits_text(tab, base):
    before, after = "speedup_08_adamw_clip.py", "speedup_09_cosine_lr.py"
    tab.goto(base + docs.page(after))
    tab.evaluate(
        """document.querySelector('.diff details').open = true
        const range = document.createRange(), pres = document.querySelectorAll('.diff pre')
        range.setStartBefore(pres[0])
        range.setEndAfter(pres[pres.length - 1])
        getSelection().addRange(range)"""
    )
    copied = [line for line in tab.evaluate("getSelection().toString()").splitlines() if line.strip()]
    assert copied == [line for line in git(before, after).splitlines() if line.strip()]


@browsing
@from_both
def test_the_chooser_shows_one_result_and_is_remembered(tab, base):
    for page in (RUNG_PAGES[6], docs.page("speedup_05_compile.py"), docs.page("baseline.py")):
        tab.goto(base + page)
        if page == RUNG_PAGES[6]:
            assert tab.locator(".result:visible").count() == 1
            tab.locator(".choice[data-choice=result] label").last.click()
        (shown,) = tab.locator(".result:visible").all()
        assert shown.get_attribute("data-result") == LADDERS[-1]


@browsing
@from_both
def test_a_keyboard_walks_up_the_ladder_and_down(tab, base):
    tab.goto(base + RUNG_PAGES[0])
    for page in RUNG_PAGES[1:]:
        tab.keyboard.press("n")
        tab.wait_for_url(base + page)
    tab.keyboard.press("p")
    tab.wait_for_url(base + RUNG_PAGES[-2])
    tab.get_by_role("link", name="Next").click()
    tab.wait_for_url(base + RUNG_PAGES[-1])


@browsing
@from_both
@pytest.mark.parametrize("words, script", [("Loshchilov cosine", 9), ("TensorFloat", 2), ("_orig_mod", 5)])
def test_search_finds_a_rung(tab, base, words, script):
    tab.goto(base + "index.html")
    tab.keyboard.press("/")
    tab.locator("input[role=combobox]").fill(words)
    found = tab.locator(f'a[href*="{docs.page(SCRIPTS[script])}"] mark').first  # the highlighted search term
    found.click()
    tab.wait_for_url(re.compile(re.escape(base + docs.page(SCRIPTS[script]))))
    tab.locator("article mark:visible").first.wait_for()  # if the term is in a folded section, the section must open


@browsing
def test_any_two_scripts_can_be_compared(tab, base):
    tab.goto(base + "compare.html")
    tab.locator("select[name=before]").select_option(docs.title(SCRIPTS[10]))  # later script: the form must swap
    tab.locator("select[name=after]").select_option(docs.title(SCRIPTS[0]))
    tab.get_by_role("button", name="Compare").click()
    tab.wait_for_url(base + docs.pair_page("baseline.py", "speedup_10_fused_adamw.py"))
    assert text_of(BeautifulSoup(tab.content(), "html.parser").select_one(".diff")) == git(SCRIPTS[0], SCRIPTS[10])
    tab.locator("select[name=before]").select_option(docs.title("branches/fsdp_run.py"))
    tab.locator("select[name=after]").select_option(docs.title("branches/fsdp_run.py"))
    tab.get_by_role("button", name="Compare").click()
    assert tab.locator("select[name=after]").evaluate("select => select.validationMessage")
    tab.locator("select[name=after]").select_option(docs.title("ddp_run.py"))
    tab.get_by_role("button", name="Compare").click()
    tab.wait_for_url(base + docs.pair_page("ddp_run.py", "branches/fsdp_run.py"))
    tab.goto(base + "compare.html")
    tab.get_by_role("link", name="02 TF32 matmuls to 03 bfloat16 autocast").click()
    tab.wait_for_url(base + docs.pair_page("speedup_02_tf32.py", "speedup_03_bf16.py"))


@browsing
def test_paper_is_light(tab, base):
    tab.emulate_media(color_scheme="dark")
    tab.goto(base + docs.page("speedup_06_flash_attn.py"))
    colour = "getComputedStyle(document.querySelector('.diff del')).backgroundColor"
    dark = tab.evaluate(colour)
    tab.emulate_media(media="print", color_scheme="dark")
    light = tab.evaluate(colour)
    assert [min(map(int, re.findall(r"\d+", shown)[:3])) > 128 for shown in (dark, light)] == [False, True]


@browsing
def test_a_rung_is_handed_out_on_two_sheets(tab, base):
    """A rung's page fits on two sheets when printed, without buttons, the docstring's diff or the exercise's answer."""
    tab.goto(base + docs.page("speedup_06_flash_attn.py"))
    sheets = len(re.findall(rb"/Type\s*/Page\b", tab.pdf(format="A4")))
    tab.emulate_media(media="print")
    assert sheets == 2 and not tab.locator(".choice:visible, .folded:visible, .question p:visible").count()
    assert tab.locator(".diff ins:visible, .question summary:visible").count() > 1


@browsing
@from_both
def test_a_command_is_copied_at_a_click(tab, base):
    tab.goto(base + docs.page("speedup_06_flash_attn.py"))
    tab.locator("h2#run-it + div button").click()
    tab.get_by_text("Copied to clipboard").wait_for()


@browsing
@pytest.mark.parametrize("width", [390, 1440])
def test_the_header_ends_with_the_search_box(tab, base, width):
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(base + "compare.html")
    box = tab.locator(".md-search__button" if width > 400 else "label[for=__search]").bounding_box()
    assert width - 32 < box["x"] + box["width"] <= width


@browsing
def test_the_table_of_all_pairs_is_whole_on_a_wide_screen(tab, base):
    tab.goto(base + "compare.html")
    assert tab.evaluate(
        "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.scroll'))"
    )


@browsing
def test_light_and_dark_can_be_switched(tab, base):
    tab.goto(base + docs.page("speedup_03_bf16.py"))
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(background)
    tab.locator('label[title="Switch to dark"]').click()
    tab.wait_for_function(f"{background} !== {light!r}")
    assert "255" in light and max(map(int, re.findall(r"\d+", tab.evaluate(background))[:3])) < 60


@browsing
def test_a_page_can_be_read_without_javascript(browser, urls):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(urls["file"] + docs.page("speedup_05_compile.py"))
        assert page.get_by_text("model.compile(mode=args.compile_mode)").first.is_visible()
        assert page.locator(".result:visible").count() == len(LADDERS)
        page.locator("details.question summary").first.click()
        assert page.locator("details.question p").last.is_visible()
