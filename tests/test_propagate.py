"""An edit to a shared line is copied to every script that builds on the edited script.

If there is a conflict, no change is lost.
"""

import subprocess
import sys

from conftest import RUNGS, SCRIPTS, commit_all, copy_project, since

SHARED = "# token embeddings\n", "# one row for each token of the vocabulary\n"  # (old, new): a line in all scripts
GONE = "att = q @ k", "att = k @ q"  # (old, new): a line that rung 06 removes


def test_an_edit_reaches_every_later_file_and_a_conflict_loses_nothing(tmp_path):
    commit_all(root := copy_project(tmp_path / "ladder"))

    def texts():
        return {script: (root / script).read_text(encoding="utf-8") for script in RUNGS}

    def edit(script, old, new):
        (root / script).write_text(texts()[script].replace(old, new), encoding="utf-8")

    def propagate(*args):
        """Return (the exit status, the text of every script)."""
        done = subprocess.run([sys.executable, "-m", "dev.propagate", *args], cwd=root, capture_output=True)
        return done.returncode, texts()

    edit(SCRIPTS[3], *SHARED)
    edit(SCRIPTS[5], "Rung 05", "Step 05")  # docstrings are neither carried nor overwritten
    before = texts()
    carried = before | {script: before[script].replace(*SHARED) for script in since(3, among=RUNGS)}
    assert carried != before and propagate("--check", SCRIPTS[3]) == (1, before)
    assert propagate(SCRIPTS[3]) == propagate(SCRIPTS[3]) == (0, carried)

    for script in RUNGS:
        edit(script, *SHARED[::-1])
    before, six, later = texts(), SCRIPTS[6], set(since(6, among=RUNGS))
    edit("baseline.py", *GONE)
    edit("baseline.py", *SHARED)
    edit("ddp_run.py", "import sys\n", "import sys  # work in progress\n")
    edited = texts()
    assert propagate("baseline.py") == (2, edited)  # otherwise, it would mix two edits of ddp_run.py
    edit("ddp_run.py", "import sys  # work in progress\n", "import sys\n")
    status, after = propagate("baseline.py")
    assert status == 1 and all(part in after[six] for part in ("scaled_dot_product", GONE[1], SHARED[1]))
    assert {script for script in RUNGS if SHARED[1] in after[script]} == RUNGS.keys() - later | {six}
    assert all(after[script] == before[script] for script in later - {six})
    assert propagate(six) == propagate("baseline.py") == (2, after)  # before the conflict is resolved
    (root / six).write_text(before[six].replace(*SHARED), encoding="utf-8")
    assert propagate(six) == (0, after | {script: before[script].replace(*SHARED) for script in later})
