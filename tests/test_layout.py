"""Code imports only from permitted folders, pinned versions agree everywhere, and links lead to files."""

import itertools
import re

from conftest import ROOT
from packaging.requirements import Requirement

from dev.ladder import read_toml


def test_a_folder_imports_only_from_those_that_it_may_read():
    folders = ".", "branches", "pretrain", "dev", "measure", "tests"
    modules = {folder: {path.stem for path in (ROOT / folder).glob("*.py")} | {folder} for folder in folders}
    for folder, others in {"pretrain": [], "dev": ["."], "measure": ["dev", "."]}.items():
        forbidden = set().union(*(modules[other] for other in folders if other not in others)) - modules[folder]
        for path in (ROOT / folder).glob("*.py"):
            names = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert not forbidden & set(names), path


def test_the_versions_that_are_installed_tested_and_promised_agree():
    """Each pinned version is within its range in pyproject.toml, and the prose states the same versions."""
    project = read_toml("pyproject.toml")
    ranges = [*project["project"]["dependencies"], *itertools.chain(*project["dependency-groups"].values())]
    files = "requirements.txt", "requirements-dev.txt", "pretrain/requirements.txt", "docs/requirements.txt"
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    pins = [Requirement(line) for line in lines if re.match(r"[\w-]+==", line)]
    for needed in map(Requirement, ranges):
        versions = [next(iter(pin.specifier)).version for pin in pins if pin.name == needed.name]
        assert versions and all(needed.specifier.contains(version) for version in versions), needed
    assert {pin.name for pin in pins} == {needed.name for needed in map(Requirement, ranges)}
    (torch,) = (str(pin) for pin in pins if pin.name == "torch")
    assert project["tool"]["uv"]["constraint-dependencies"] == [torch]
    tested, oldest = torch[7:].rpartition(".")[0], ranges[0].removeprefix("torch>=")
    said = [("README.md", f"You need Python {project['project']['requires-python'][2:]} or later")]
    said += [("docs/pages/running.md", f"torch {oldest} or later"), ("notebooks/ladder.ipynb", f"PyTorch {tested}.")]
    said += [("notebooks/ladder.ipynb", f"older than {oldest},"), ("notebooks/lesson.ipynb", f"older than {oldest},")]
    assert [(name, text) for name, text in said if text not in (ROOT / name).read_text(encoding="utf-8")] == []


def test_every_link_of_a_readme_leads_to_a_file():
    broken = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md"), *ROOT.glob("docs/pages/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
            if "{" not in link and not link.startswith("http") and not (page.parent / link).exists():
                broken.append((page, link))
    assert not broken
