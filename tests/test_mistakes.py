"""The mistakes that people make are caught: each is planted in a copy of the project, and a test must fail.

`docs/mistakes.toml` holds them, with the test that must fail and what comes of each.
"""

import re

import pytest
from conftest import copy_project
from ladder import read_toml


@pytest.mark.parametrize("mistake", read_toml("docs/mistakes.toml")["mistake"], ids=lambda mistake: mistake["name"])
def test_a_mistake_is_caught(mistake, tmp_path, verdict):
    root = copy_project(tmp_path / "ladder")
    source = (root / mistake["script"]).read_text(encoding="utf-8")
    for right, wrong in mistake["edits"]:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    (root / mistake["script"]).write_text(source, encoding="utf-8")
    status, report = verdict(root, "-x", root / "tests" / mistake["check"])
    assert status == 1, report  # a test failed
    assert re.search('<failure message="assert|<(failure|error) message="[^"]*AssertionError', report), report
