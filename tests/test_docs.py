"""The site shows git's diffs, the measured figures and correct arithmetic, and every page opens in a browser."""

import functools
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, RUNGS

from dev.ladder import PLAIN_GIT

SCRIPTS = list(RUNGS)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def docs():
    pytest.importorskip("zensical", reason="Zensical takes Python 3.11 or later")
    from docs import build_site

    return build_site


@pytest.fixture(scope="module")
def results():
    from measure import tables

    return tables.newest() | tables.newest(partial=True)


@pytest.fixture(scope="module")
def site(docs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    docs.build(folder)
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Return the pages of the site, with one of those that compare two scripts: they are made from one template."""
    found = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    pairs = [page for page in found if page.startswith("compare/")]
    return sorted({*found} - {*pairs[1:]})


@pytest.fixture(scope="module")
def soup(site):
    from bs4 import BeautifulSoup

    @functools.cache
    def read(page):
        return BeautifulSoup((site / page).read_text(encoding="utf-8"), "html.parser")

    return read


@pytest.mark.slow
def test_the_diff_of_a_page_is_gits(docs, soup):
    for after, rung in RUNGS.items():
        if before := rung.before:
            command = ["git", "diff", "--no-index", before, after]
            done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, encoding="utf-8")
            (diff,) = soup(docs.page(after)).select(".diff")
            shown = diff.select("pre.at, .block.same > .new .line, .block:not(.same) .line")
            assert "".join(part.text for part in shown) == done.stdout


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


def test_the_arithmetic_on_the_pages_is_right():
    lines = list(equations())
    assert len(lines) > 50 and not [(page, line) for page, line in lines if not is_true(line)]


def test_wrong_arithmetic_is_seen():
    assert is_true("logits: 4 × 1,024 × 50,257 × 4 bytes = 823 MB")
    for wrong in ("832 MB", "823 GB", "824 MB"):
        assert not is_true(f"logits: 4 × 1,024 × 50,257 × 4 bytes = {wrong}")


@pytest.mark.slow
def test_a_rungs_page_shows_what_was_measured_beside_what_was_predicted(docs, results, soup):
    from measure import records

    for script in SCRIPTS:
        for section in soup(docs.page(script)).select("section.result"):
            rows = [[cell.text.strip() for cell in row.select("td")] for row in section.select("tbody tr")]
            speed, memory, loss = (measured for _, measured in rows)
            data = results[section["data-result"]]
            row, before = data.rows.get(script), data.rows.get(RUNGS[script].before)
            if not row:
                assert [memory, loss] == ["not measured", "not measured"]
                continue
            before = before if row["over_before"] else None  # one of the two has changed since the measurement
            pair = [one for one in (before, row) if one]
            losses = [one["runs"][0]["losses"][-1] for one in pair]
            assert loss.startswith(" to ".join(f"{loss:.4f}" for loss in losses))
            assert f"{row['median_ms']:,.1f} ms per step" in speed
            peak = row["peak_gib"]
            assert (f"{peak:.2f} GiB" if peak else "not measured") in memory
            if before and (ratio := row["over_before"]):
                assert speed.startswith(records.speed_up(ratio))
                assert ("inconclusive" in speed) == (ratio["low"] < 1 < ratio["high"])


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_every_page_opens_without_an_error_a_request_elsewhere_or_sideways_scrolling(site, pages):
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        tab, wrong = browser.new_page(), []
        tab.on("console", lambda message: message.type == "error" and wrong.append((tab.url, message.text)))
        tab.on("pageerror", lambda error: wrong.append((tab.url, str(error))))
        tab.on("request", lambda request: request.url.startswith(("file:", "blob:")) or wrong.append(request.url))
        for page in pages:
            tab.goto((site / page).as_uri())
            for width in (390, 1440):
                tab.set_viewport_size({"width": width, "height": 900})
                if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    wrong.append((page, f"is wider than {width} pixels"))
    assert not wrong
