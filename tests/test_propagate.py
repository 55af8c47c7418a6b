"""An edit to a shared line is copied to every script that builds on the edited script.

If there is a conflict, no change is lost.
"""

import subprocess
import sys

import pytest
from conftest import RUNGS, commit_all, copy_project, since

from dev import propagate

SCRIPTS = sorted(RUNGS, key="branches/fp16_grad_scaler.py".__eq__)  # as printed: fp16, built on rung 03, comes last
SHARED = "# token embeddings\n", "# one row for each token of the vocabulary\n"  # (old, new): a line in all scripts
GONE = "att = q @ k", "att = k @ q"  # (old, new): a line that rung 06 removes


@pytest.fixture
def clone(tmp_path):
    """Return a git repository with a committed copy of the project."""
    clone = Clone(copy_project(tmp_path / "ladder"))
    commit_all(clone.root)
    return clone


class Clone:
    def __init__(self, root):
        self.root = root

    def propagate(self, *args):
        command = [sys.executable, "-m", "dev.propagate", *args]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True)

    def texts(self):
        return {script: (self.root / script).read_text(encoding="utf-8") for script in SCRIPTS}

    def edit(self, script, old, new):
        text = (self.root / script).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (self.root / script).write_text(text.replace(old, new), encoding="utf-8")


def above(number):
    """Return the scripts built on a rung, without the rung itself."""
    return since(number, among=SCRIPTS)[1:]


def says(scripts, what):
    return [f"{script}: {what}" for script in scripts]


def test_an_edit_reaches_every_later_file_and_nothing_else_changes(clone):
    before = clone.texts()
    clone.edit("speedup_03_bf16.py", *SHARED)
    done = clone.propagate("speedup_03_bf16.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == says(above(3), "carried")
    after = {script: text.replace(*SHARED) for script, text in before.items() if script in since(3, among=SCRIPTS)}
    assert clone.texts() == before | after
    assert clone.propagate("speedup_03_bf16.py").stdout.splitlines() == says(above(3), "had it")
    assert clone.texts() == before | after


def test_files_above_a_conflict_wait_and_continue_after_it(clone):
    before = clone.texts()
    clone.edit("baseline.py", *GONE)
    clone.edit("baseline.py", *SHARED)
    check = clone.propagate("--check", "baseline.py").stdout.splitlines()
    assert check[5:7] == [f"{SCRIPTS[6]}: lags behind, and will conflict", f"{SCRIPTS[7]}: lags behind"]
    done = clone.propagate("baseline.py")
    assert done.returncode == 1
    *waiting, fp16 = SCRIPTS[7:]  # fp16_grad_scaler.py is built on rung 03, so a conflict in rung 06 does not block it
    assert done.stdout.splitlines()[:-2] == [
        *says(SCRIPTS[1:6], "carried"),
        f"{SCRIPTS[6]}: CONFLICT, marked in the file",
        *says(waiting, "blocked by a conflict"),
        f"{fp16}: carried",
    ]
    assert done.stdout.splitlines()[-1].split() == ["python", "-m", "dev.propagate", SCRIPTS[6]]
    texts = clone.texts()
    assert all(texts[script] == before[script] for script in waiting)
    assert SHARED[1] in texts[fp16]
    marked = texts[SCRIPTS[6]]
    assert marked.count("<<<<<<< ") == marked.count(">>>>>>> ") == 1
    assert "scaled_dot_product_attention" in marked and GONE[1] in marked and SHARED[1] in marked

    refused = clone.propagate(SCRIPTS[6])  # before the conflict is resolved
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"propagate.py: error: {SCRIPTS[6]} still has conflict markers\n"
    refused = clone.propagate("baseline.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{SCRIPTS[6]} still has conflict markers: resolve them" in refused.stderr
    clone.edit(SCRIPTS[6], f"<<<<<<< {SCRIPTS[6]}\n", "")  # resolved only in part: the other markers remain
    assert clone.propagate(SCRIPTS[6]).returncode == 2
    assert f"{SCRIPTS[6]}: has conflict markers" in clone.propagate("--check", "baseline.py").stdout
    start, end = marked.index("<<<<<<< "), marked.index(">>>>>>> ")
    ours = marked[start:end].split("=======\n")[0].split("\n", 1)[1]
    (clone.root / SCRIPTS[6]).write_text(marked[:start] + ours + marked[end:].split("\n", 1)[1], encoding="utf-8")
    done = clone.propagate(SCRIPTS[6])
    assert done.stdout.splitlines() == says(above(6), "carried")
    later = {script: text.replace(*SHARED) for script, text in before.items() if script in since(6, among=SCRIPTS)}
    assert clone.texts() == texts | later
    assert clone.propagate("--check", SCRIPTS[6]).returncode == 0
    check = clone.propagate("--check", "baseline.py")
    has_it = says(SCRIPTS[1:], "has it")
    has_it[5] = f"{SCRIPTS[6]}: has lines of its own where the edit conflicts"
    assert (check.returncode, check.stdout.splitlines()) == (0, has_it)
    clone.edit(SCRIPTS[6], *SHARED[::-1])  # revert the part that merged cleanly
    clone.edit(SCRIPTS[6], "import sys\n", "import sys  # work in progress\n")
    assert f"{SCRIPTS[6]}: differs, and has uncommitted" in clone.propagate("--check", "baseline.py").stdout


@pytest.mark.parametrize("where", [SCRIPTS[6], SCRIPTS[11]])
def test_it_refuses_a_later_file_with_changes_of_its_own(clone, where):
    clone.edit("baseline.py", *SHARED)
    clone.edit(where, "import sys\n", "import sys  # work in progress\n")
    before = clone.texts()
    done = clone.propagate("baseline.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"propagate.py: error: {where} has uncommitted changes of its own ")
    assert len(done.stderr.splitlines()) == 1
    assert clone.texts() == before
    lag = clone.propagate("--check", "baseline.py").stdout.splitlines()
    assert f"{where}: differs, and has uncommitted changes of its own" in lag


def test_docstrings_are_not_propagated(clone):
    clone.edit("baseline.py", "the start of the ladder", "the ground")
    assert "nothing to carry" in clone.propagate("baseline.py").stdout
    clone.edit("baseline.py", *SHARED)
    clone.edit(SCRIPTS[3], "Rung 03", "Step 03")  # a local edit that must not be carried
    assert clone.propagate("baseline.py").returncode == 0
    assert clone.texts()[SCRIPTS[3]].startswith('"""Step 03')
    assert [script for script, text in clone.texts().items() if "the ground" in text] == ["baseline.py"]


def test_a_file_that_cannot_be_written_is_whole_and_nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("old")

    def fail(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(propagate, "ROOT", tmp_path)
    monkeypatch.setattr(propagate.Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        propagate.write("script.py", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("script.py", "old")]
