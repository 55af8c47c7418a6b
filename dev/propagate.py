"""Carry an edit of one script into the scripts that stand on it.

    python dev/propagate.py speedup_03_bf16.py            into every later file
    python dev/propagate.py --down speedup_03_bf16.py     into the earlier files as well
    python dev/propagate.py --check speedup_03_bf16.py    only say which files lag behind

The edit is the file's diff from HEAD; of a new file, its diff from the one before it. It goes from neighbour to
neighbour by three-way merge, so each file keeps its idea. A file with a conflict holds up those that stand on it and no
others. Docstrings are each file's own: they stay.
Status 0; 1 where a file lags behind or has a conflict; 2 for an error.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ladder import MARKS, ROOT, read_ladder, split

OWN = "has uncommitted changes of its own (if they are an edit carried before, git restore it and the files above it)"
SAYS = {  # of a script that an edit reaches: what --check says, and what a run says
    "same": ("has it", "had it"),
    "clean": ("lags behind", "carried"),
    "conflict": ("lags behind, and will conflict", "CONFLICT, marked in the file"),
    "wait": ("lags behind", "waits for a conflict"),
    # with one of these a run ends before it has changed anything
    "marked": ("has the marks of a conflict", "still has the marks of a conflict: mend it, and go on from there"),
    "mended": ("has lines of its own where the edit conflicts", OWN),
    "own": ("differs, and has uncommitted changes of its own", OWN),
}


def git(*command):
    """What git prints, and its status. Raises ValueError, with git's own words, where it did not do its work."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True)
    if done.returncode > 127 or (done.returncode and command[0] != "merge-file"):  # which counts conflicts
        raise ValueError(done.stderr.decode())
    return done.stdout.decode(), done.returncode


def is_new(script):
    return not git("ls-tree", "--name-only", "HEAD", "--", script)[0]


def at_head(script, before):
    """Its code at HEAD. A script that HEAD has not is an edit of the one before it."""
    return split(git("show", f"HEAD:./{before[script] if is_new(script) else script}")[0])[1]


def read(script):
    """(its docstring, its code), byte for byte: no line ending is translated."""
    return split((ROOT / script).read_bytes().decode())


def write(script, text):
    """The whole file or nothing, whatever happens on the way."""
    path, new = ROOT / script, ROOT / f"{script}.propagate.tmp"
    try:
        new.write_bytes(text.encode())
        shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def merge(script, code, edit, *options):
    """The code of a script with its neighbour's edit (whose, from, to), and the number of conflicts in it."""
    whose, *sides = edit
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
        for path, side in zip(paths, (code, *sides), strict=True):
            path.write_bytes(side.encode())
        labels = "-L", script, "-L", f"{whose} at HEAD", "-L", f"{whose} as edited"
        return git("merge-file", "-p", *options, *labels, *paths)


def plan(source, edit, before, down, came_from=None, waiting=False):
    """All that an edit reaches from a script: (from which neighbour, script, its state, its code with the edit)."""
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
        elif now != head:  # mended: what was committed would conflict, and all else of the edit is there
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
    """Carry the edit of a script, or look who lags behind, and say so. Returns whether something is left to do."""
    before = {rung.file: rung.before for rung in read_ladder()}
    file = name if name in before else Path(os.path.relpath(name, ROOT)).as_posix()
    if file not in before:
        raise ValueError(f"{name} is not in ladder.toml")
    head, now = at_head(file, before), read(file)[1]
    if MARKS.search(now):
        raise ValueError(f"{file} still has the marks of a conflict")
    if down and is_new(file):
        raise ValueError(f"{file} is new: its idea goes up, not down")
    if now == head:
        print(f"{file} is as it was committed, docstring aside: nothing to carry")
        print("(an edit that is committed already: git reset --soft HEAD~1 takes the commit back and leaves the edit)")
        return False
    steps = list(plan(file, (file, head, now), before, down))
    if not steps:
        print(f"no script stands on {file}: nothing to carry it into")
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
            raise ValueError(f"{script} could not be written, the files listed above were: {error}") from None
        print(f"{script}: {SAYS[state][1]}")
    waited_for = {source for source, _, state, _ in steps if state == "wait"}
    conflicts = [(source, script) for source, script, state, _ in steps if state == "conflict"]
    for source, script in conflicts:
        print(f"Mend {script} from <<<<<<< to >>>>>>>{', then go on with:' if script in waited_for else ''}")
        if script in waited_for:
            print(f"    python dev/propagate.py {'--down ' if before[source] == script else ''}{script}")
    return bool(conflicts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)  # one-line errors
    parser.add_argument("file", metavar="FILE", help="a script of the ladder")
    parser.add_argument("--down", action="store_true", help="into the earlier files as well")
    parser.add_argument("--check", action="store_true", help="say which files lag behind, and change nothing")
    args = parser.parse_args()
    try:
        sys.exit(propagate(args.file, args.down, args.check))
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
