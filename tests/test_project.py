"""The project as a reader finds it: the files that people type, each on its own, and make's way to a diff."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS


def test_the_ladder_has_the_twelve_files_that_people_type():
    ideas = "weight_tying tf32 bf16 residual_init compile flash_attn vocab_pad adamw_clip cosine_lr fused_adamw".split()
    rungs = [f"speedup_{number:02d}_{idea}.py" for number, idea in enumerate(ideas, start=1)]
    ladder = ["baseline.py", *rungs, "ddp_run.py"]
    assert [script for script in SCRIPTS if script in ladder] == ladder
    files = [path.relative_to(ROOT).as_posix() for folder in (".", "branches") for path in ROOT.glob(f"{folder}/*.py")]
    assert set(files) == set(SCRIPTS) | {"branches/attention_bench.py"}  # which trains nothing: test_branches.py


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_stands_alone(script):
    source = (ROOT / script).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= (320 if script.startswith(("baseline", "speedup")) else 410)
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


@pytest.mark.parametrize(
    "number, text",
    [
        ("03", "torch.autocast"),
        ("10", "fused=True"),
        ("ddp", "DistributedDataParallel"),
        ("fsdp", "fully_shard"),
        ("fp16", "GradScaler"),
        ("train", "validate"),
    ],
)
def test_make_diff_shows_a_rung_against_the_one_before(number, text):
    done = subprocess.run(["make", "--no-print-directory", f"diff-{number}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    docstring, diff = done.stdout.split("\x1b", 1)
    assert docstring.startswith('"""') and "+++ b/" in diff
    assert re.search(rf"\x1b\[32m[^\x1b]*{re.escape(text)}", diff)  # in green


def test_make_diff_refuses_a_rung_that_is_not_there():
    done = subprocess.run(["make", "diff-99"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "there is no rung 99" in done.stderr
