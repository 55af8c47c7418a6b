"""The ladder as a text: short adjacent diffs, files that stand alone, a README that counts right."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

LIMITS = dict(zip(SCRIPTS[1:], [6, 6, 6, 25, 6, 25, 6, 25, 25, 40, 110], strict=True))
PAIRS = list(zip(SCRIPTS, SCRIPTS[1:], strict=False))


def changed_lines(before, after, tmp_path):
    """Lines that git counts as added and removed, the docstrings left out."""
    sides = []
    for script in (before, after):
        source = (ROOT / script).read_text(encoding="utf-8")
        end = ast.parse(source).body[0].end_lineno
        side = tmp_path / script
        side.write_text("\n".join(source.splitlines()[end:]) + "\n", encoding="utf-8")
        sides.append(side)
    done = subprocess.run(["git", "diff", "--no-index", "--numstat", *sides], capture_output=True, text=True)
    added, removed, _ = done.stdout.split("\t")
    return int(added), int(removed)


def test_the_ladder_is_the_twelve_files_that_people_type():
    ideas = "weight_tying tf32 bf16 residual_init compile flash_attn vocab_pad adamw_clip cosine_lr fused_adamw".split()
    rungs = [f"speedup_{number:02d}_{idea}.py" for number, idea in enumerate(ideas, start=1)]
    assert SCRIPTS == ["baseline.py", *rungs, "ddp_run.py"]


@pytest.mark.parametrize("before, after", PAIRS)
def test_an_adjacent_diff_is_short(before, after, tmp_path):
    assert 1 <= sum(changed_lines(before, after, tmp_path)) <= LIMITS[after]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_stands_alone(script):
    source = (ROOT / script).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 320
    tree = ast.parse(source)
    used = {"torch", "tiktoken", "numpy"} | set(sys.stdlib_module_names)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name == "transformers":
                assert node not in tree.body  # only inside GPT.from_pretrained
            else:
                assert name.split(".")[0] in used, name


@pytest.mark.parametrize("before, after", PAIRS)
def test_the_docstring_names_the_diff(before, after):
    docstring = ast.get_docstring(ast.parse((ROOT / after).read_text(encoding="utf-8")))
    assert f"git diff --no-index --word-diff {before} {after}" in docstring


def test_the_readme_counts_the_changed_lines_right(tmp_path):
    rows = re.findall(
        r"^\| \[`(\w+\.py)`\]\(\1\) \|.*\| \+(\d+) −(\d+) ", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    expected = [(after, *map(str, changed_lines(before, after, tmp_path))) for before, after in PAIRS]
    assert rows == expected


@pytest.mark.parametrize(
    "number, text", [("03", "torch.autocast"), ("10", "fused=True"), ("ddp", "DistributedDataParallel")]
)
def test_make_diff_shows_a_rung_against_the_one_before(number, text):
    done = subprocess.run(["make", "--no-print-directory", f"diff-{number}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    docstring, diff = done.stdout.split("\x1b", 1)
    assert docstring.startswith('"""') and "+++ b/" in diff
    assert re.search(rf"\x1b\[32m[^\x1b]*{re.escape(text)}", diff)  # in green


def test_make_diff_refuses_a_rung_that_is_not_there():
    done = subprocess.run(["make", "diff-11"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "there is no rung 11" in done.stderr
