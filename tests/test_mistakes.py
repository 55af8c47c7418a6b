"""If a mistake from `dev/mistakes.toml` is planted in a copy of the project, a test fails.

That file lists common mistakes, their consequences and the tests that must fail. `make test` plants each mistake in one
of the scripts that contain the affected lines, chosen in rotation. `make test-all` plants each mistake in all of these
scripts.
"""

import importlib

import pytest
from conftest import ROOT, RUNGS, copy_project, since, versions
from ladder import read_toml
from test_ladder import parts

MISTAKES = [mistake for mistakes in read_toml("dev/mistakes.toml").values() for mistake in mistakes]


def plant(mistake, source):
    """Return the source with the mistake planted, or None if a line to change does not occur exactly once."""
    for right, wrong in mistake["edits"]:
        if source.count(right) != 1:
            return None
        source = source.replace(right, wrong)
    return source


def looked_at(check):
    """Return the scripts with which a test is parametrized."""
    file, name = check.split("[")[0].split(".py::")
    for mark in getattr(importlib.import_module(file), name).pytestmark:
        if mark.name == "parametrize" and mark.args[0].startswith("script"):  # "script" or "script, case"
            return {
                script if isinstance(script, str) else getattr(script, "values", script)[0] for script in mark.args[1]
            }


def places(mistake):
    """Return the files in which to plant a mistake: one per group of scripts whose edited definitions are identical."""
    file, check, edits = mistake["file"], mistake["check"], mistake["edits"]
    if "{script}" not in check:
        return [file]
    sources = {script: (ROOT / script).read_text(encoding="utf-8") for script in since(file, among=list(RUNGS))}
    able = [script for script in sources if script in looked_at(check) and plant(mistake, sources[script])]
    edited = [name for name, (_, text) in parts(sources[file]).items() if any(right in text for right, _ in edits)]
    return sorted({file, *versions(*edited, among=able)}, key=list(RUNGS).index)


CASES = []
for number, mistake in enumerate(MISTAKES):
    scripts = places(mistake)
    for script in scripts:
        later = () if script == scripts[number % len(scripts)] else pytest.mark.slow
        CASES.append(pytest.param(mistake, script, id=f"{mistake['name']}, in {script}", marks=later))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("mistakes") / "ladder")


@pytest.mark.parametrize("mistake, script", CASES)
def test_a_mistake_is_caught(mistake, script, project, verdict):
    right = (ROOT / script).read_text(encoding="utf-8")
    wrong = plant(mistake, right)
    assert wrong, f"{script} does not contain each of these lines exactly once"
    (project / script).write_text(wrong, encoding="utf-8")
    status, seen = verdict(project, project / "tests" / mistake["check"].format(script=script))
    (project / script).write_text(right, encoding="utf-8")
    ((when, failure),) = seen.failed
    assert (status, when) == (1, "call") and isinstance(failure, (AssertionError, pytest.fail.Exception))
