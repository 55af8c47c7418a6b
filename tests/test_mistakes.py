"""If a mistake from `dev/mistakes.toml` is planted in a copy of the project, the test that is named there fails.

`make test-all` plants all of them. `make test` plants about twenty, which change with each commit.
"""

import multiprocessing
import re
import subprocess
from xml.etree import ElementTree

import pytest
from conftest import ROOT, copy_project

from dev.ladder import read_toml
from dev.puzzle import plant

MISTAKES = [mistake for mistakes in read_toml("dev/mistakes.toml").values() for mistake in mistakes]
PLANTINGS = [(mistake, file) for mistake in MISTAKES for file in [mistake["file"], *mistake.get("also", [])]]
TURNS = round(len(PLANTINGS) / 20)
COMMITS = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
CASES = [
    pytest.param(
        *planting,
        id=f"{planting[0]['name']}, in {planting[1]}",
        marks=[pytest.mark.slow] * ((number - int(COMMITS or 0)) % TURNS != 0),
    )
    for number, planting in enumerate(PLANTINGS)
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("mistakes") / "ladder")


@pytest.fixture(scope="module")
def start():
    """Return a function that makes a process in which the libraries are already imported."""
    context = multiprocessing.get_context("forkserver")
    libraries = ["pytest", "tiktoken", "transformers", "pandas", "matplotlib.figure", "torch._inductor.compile_fx"]
    context.set_forkserver_preload([*libraries, "torch.distributed.checkpoint.state_dict"])
    return context.Process


@pytest.mark.parametrize("mistake, file", CASES)
def test_a_mistake_is_caught(mistake, file, project, start, tmp_path):
    right, wrong = (ROOT / file).read_text(encoding="utf-8"), plant(mistake, file)
    report = tmp_path / "report.xml"
    words = [f"{project}/tests/{mistake['check'].format(script=file)}", f"-c{project}/pyproject.toml", "-qx"]
    words += ["--assert=plain", "-pno:unraisableexception", f"--basetemp={tmp_path}/tmp", f"--junitxml={report}"]
    (project / file).write_text(wrong, encoding="utf-8")
    child = start(target=pytest.main, args=(words,))
    try:
        child.start()
        child.join()
    finally:
        child.kill()
        (project / file).write_text(right, encoding="utf-8")
    results = ElementTree.parse(report).iter()
    (found,) = [result for result in results if result.tag in ("failure", "error", "skipped")]
    assert found.tag == "failure" and re.match("AssertionError|Failed: (?!Timeout)", found.get("message")), found.attrib
