"""Code imports only from permitted folders, pinned versions are within their ranges, and links lead to files."""

import ast
import itertools
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from dev.ladder import PLAIN_GIT, read_toml

LADDER = "the ladder"  # the scripts in the root folder
MAY_READ = {
    LADDER: set(),
    "branches": {"branches"},
    "pretrain": {"pretrain"},
    "dev": {"dev", LADDER},
    "measure": {"measure", "dev", LADDER},
    "tests": {"tests", "measure", "dev", "pretrain", "branches", LADDER},
}


@pytest.fixture(scope="module")
def tracked():
    """Return the files that git tracks and the new files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def part(file):
    """Return the top-level folder of a file, or LADDER for a file in the root folder."""
    return Path(file).parts[0] if "/" in file else LADDER


def reads(source, files, folder=None):
    """Return the top-level folders from which a program in `folder` imports, with LADDER for the root folder."""
    files = sorted(files, key=lambda file: part(file) == folder)  # of two files with one name, its own folder's
    homes = {Path(file).stem: part(file) for file in files if file.endswith(".py") and file.count("/") <= 1}
    homes |= {folder: folder for folder in ("dev", "measure")}
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        found |= {homes[name.split(".")[0]] for name in names if name.split(".")[0] in homes}
    return found


def test_a_folder_imports_only_from_those_that_it_may_read(tracked):
    programs = [file for file in tracked if file.endswith(".py")]
    assert {part(file) for file in programs} == set(MAY_READ)
    for file in programs:
        too_much = reads((ROOT / file).read_text(encoding="utf-8"), programs, part(file)) - MAY_READ[part(file)]
        assert not too_much, f"{file} imports from {too_much}"


def test_an_import_that_points_the_wrong_way_is_seen(tracked):
    assert reads("from conftest import ROOT", tracked) == {"tests"}
    assert reads("from measure.run import execute", tracked) == {"measure"}
    assert reads("def later():\n    import speedup_02_tf32, torch", tracked) == {LADDER}


def test_no_program_changes_where_python_looks_for_modules(tracked):
    # Tests do, because they run scripts in a process; and kernels.py does what Python does before it runs a script.
    found = [
        file
        for file in tracked
        if file.endswith(".py") and re.search(r"sys\.path\b|\bsys, \"path\"", (ROOT / file).read_text("utf-8"))
    ]
    assert [file for file in found if not file.startswith("tests/")] == ["measure/kernels.py"]


def test_uv_and_pip_take_the_versions_that_the_tests_run_with():
    """Each pinned version is within its range in pyproject.toml, which pins torch to the same version."""
    project = read_toml("pyproject.toml")
    ranges = [*project["project"]["dependencies"], *itertools.chain(*project["dependency-groups"].values())]
    files = "requirements.txt", "requirements-dev.txt", "pretrain/requirements.txt", "docs/requirements.txt"
    lines = [
        line for file in files for line in (ROOT / file).read_text().splitlines() if "==" in line.partition("#")[0]
    ]
    pins = [Requirement(line) for line in lines]
    for needed in map(Requirement, ranges):
        versions = [next(iter(pin.specifier)).version for pin in pins if pin.name == needed.name]
        assert versions and all(needed.specifier.contains(version) for version in versions), needed
    assert project["tool"]["uv"]["constraint-dependencies"] == [str(pin) for pin in pins if pin.name == "torch"]
    assert {pin.name for pin in pins} == {needed.name for needed in map(Requirement, ranges)}


def test_every_link_of_a_readme_leads_to_a_file(tracked):
    broken = []
    for name in tracked:
        if name.endswith(".md"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
                if "{" not in link and not link.startswith("http") and not (ROOT / name).parent.joinpath(link).exists():
                    broken.append((name, link))
    assert not broken
