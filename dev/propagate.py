"""Carry an edit to one script into the scripts that build on this script.

    python -m dev.propagate speedup_03_bf16.py            into every later file
    python -m dev.propagate --down speedup_03_bf16.py     into the earlier files as well
    python -m dev.propagate --check speedup_03_bf16.py    only list which files lack the edit

The edit is the file's diff against HEAD or, for a new file, the diff from the previous script. A three-way merge
carries the edit from each script to the adjacent scripts, so each script keeps its own change. A conflict in a script
stops the edit only on paths through this script. Docstrings do not change, because each script has its own. The exit
status is 1 if a file lacks the edit or has a conflict, 2 after an error, and otherwise 0.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dev.ladder import MARKS, ROOT, read_ladder, split

OWN = "has uncommitted changes of its own (if an earlier run made them, git restore all files that this run changed)"
SAYS = {  # state of a script that the edit reaches -> (message of --check, message of a run)
    "same": ("has the edit", "already had the edit"),
    "clean": ("lacks the edit", "edit carried"),
    "conflict": ("lacks the edit, which will conflict", "CONFLICT, marked in the file"),
    "wait": ("lacks the edit", "edit blocked by a conflict"),
    # If a script has one of the next three states, the run ends before it changes any file.
    "marked": ("has conflict markers", "still has conflict markers: resolve the conflict, then propagate this file"),
    "mended": ("has lines of its own where the edit conflicts", OWN),
    "own": ("differs, and has uncommitted changes of its own", OWN),
}


def git(*command):
    """Run git and return (its output, its exit status). Raises ValueError with git's own message if git fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True)
    # For merge-file, an exit status of up to 127 is the number of conflicts, so it is not an error.
    if done.returncode > 127 or (done.returncode and command[0] != "merge-file"):
        raise ValueError(done.stderr.decode())
    return done.stdout.decode(), done.returncode


def is_new(script):
    return not git("ls-tree", "--name-only", "HEAD", "--", script)[0]


def at_head(script, before):
    """Return a script's code at HEAD. For a new script, return the code of the previous script."""
    return split(git("show", f"HEAD:./{before[script] if is_new(script) else script}")[0])[1]


def read(script):
    """Return (docstring, code) of a script, with its line endings unchanged."""
    return split((ROOT / script).read_bytes().decode())


def write(script, text):
    """Replace a script's text. If writing fails, the old file stays intact."""
    path, new = ROOT / script, ROOT / f"{script}.propagate.tmp"
    try:
        new.write_bytes(text.encode())
        shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def merge(script, code, edit, *options):
    """Merge an edit into a script's code and return (merged code, number of conflicts).

    `edit` is (adjacent script, its old code, its new code).
    """
    whose, *sides = edit
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, side in zip(paths, (code, *sides), strict=True):
            path.write_bytes(side.encode())
        labels = "-L", script, "-L", f"{whose} at HEAD", "-L", f"{whose} as edited"
        return git("merge-file", "-p", *options, *labels, *paths)


def plan(source, edit, before, down, came_from=None, waiting=False):
    """Yield (adjacent script, script, state, merged code) for each script that the edit reaches.

    The edit reaches the script through the adjacent script. The state is a key of SAYS. `waiting` is True if a conflict
    in `source`, or in a script between the edited script and `source`, blocks the edit.
    """
    neighbours = [before[source]] if down and before[source] else []
    neighbours += [script for script in before if before[script] == source]
    for script in neighbours:
        if script == came_from:
            continue
        head, now = at_head(script, before), read(script)[1]
        merged, conflicts = merge(script, now, edit)
        if MARKS.search(now):
            state = "marked"
        elif merged == now:
            state = "same"
        elif now != head:  # mended: the edit conflicts with HEAD, but the file has all that merges cleanly
            mended = merge(script, head, edit)[1] and merge(script, now, edit, "--ours")[0] == now
            state = "mended" if mended else "own"
        elif waiting:
            state = "wait"
        else:
            state = "conflict" if conflicts else "clean"
        yield source, script, state, merged
        after = merged if state == "clean" else now
        passed_on = edit if after == head or state == "marked" else (script, head, after)
        yield from plan(script, passed_on, before, down, source, state in ("conflict", "wait", "marked"))


def propagate(name, down, check):
    """Carry a script's edit into the scripts that the edit reaches, and return whether work remains.

    If `check` is set, only list the state of each of these scripts. Raises OSError or ValueError.
    """
    before = {rung.file: rung.before for rung in read_ladder()}
    file = name if name in before else Path(os.path.relpath(name, ROOT)).as_posix()
    if file not in before:
        raise ValueError(f"{name} is not in ladder.toml")
    head, now = at_head(file, before), read(file)[1]
    if MARKS.search(now):
        raise ValueError(f"{file} still has conflict markers")
    if down and is_new(file):
        raise ValueError(f"{file} is new: --down would add its change to the earlier files")
    if now == head:
        print(f"{file} has no uncommitted change outside its docstring: nothing to carry")
        print("(if you have committed the edit, git reset --soft HEAD~1 undoes the commit and keeps the edit)")
        return False
    steps = list(plan(file, (file, head, now), before, down))
    if not steps:
        print(f"no script builds on {file}: nothing to change")
    if check:
        for _, script, state, _ in steps:
            print(f"{script}: {SAYS[state][0]}")
        return any(state not in ("same", "mended") for _, _, state, _ in steps)
    for _, script, state, _ in steps:
        if state in ("marked", "mended", "own"):
            raise ValueError(f"{script} {SAYS[state][1]}")
    for _, script, state, code in steps:
        try:
            if state in ("clean", "conflict"):
                write(script, read(script)[0] + code)
        except OSError as error:
            raise ValueError(f"{script} could not be written, but the files above were: {error}") from None
        print(f"{script}: {SAYS[state][1]}")
    waited_for = {source for source, _, state, _ in steps if state == "wait"}
    conflicts = [(source, script) for source, script, state, _ in steps if state == "conflict"]
    for source, script in conflicts:
        print(f"Resolve the conflict in {script} (<<<<<<< to >>>>>>>){', then run:' if script in waited_for else ''}")
        if script in waited_for:
            print(f"    python -m dev.propagate {'--down ' if before[source] == script else ''}{script}")
    return bool(conflicts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("file", metavar="FILE", help="a script of the ladder")
    parser.add_argument("--down", action="store_true", help="carry the edit into the earlier files as well")
    parser.add_argument("--check", action="store_true", help="only list which files lack the edit")
    args = parser.parse_args()
    try:
        sys.exit(propagate(args.file, args.down, args.check))
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
