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


def git(*command):
    """What git prints, and its status. Raises ValueError, with git's own words, where it did not do its work."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True)
    if done.returncode > 127 or (done.returncode and command[0] != "merge-file"):  # which counts conflicts
        raise ValueError(done.stderr.decode())
    return done.stdout.decode(), done.returncode


def read(file):
    return (ROOT / file).read_bytes().decode()  # byte for byte: no line ending is translated


def write(file, text):
    """The whole file or nothing, whatever happens on the way."""
    with tempfile.NamedTemporaryFile(dir=(ROOT / file).parent, delete=False) as new:
        try:
            new.write(text.encode())
            new.close()
            shutil.copymode(ROOT / file, new.name)
            os.replace(new.name, ROOT / file)
        except BaseException:
            os.unlink(new.name)
            raise


def is_new(file):
    return not git("ls-tree", "--name-only", "HEAD", "--", file)[0]


def at_head(file, before):
    """The text of a file at HEAD. A file that HEAD has not is an edit of the one before it."""
    return git("show", f"HEAD:./{before[file] if is_new(file) else file}")[0]


def merge(file, text, source, base, edited):
    """The text of a file with its neighbour's edit, base -> edited, and whether there is a conflict in it."""
    docstring, ours = split(text)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, side) for side in ("ours", "base", "theirs")]
        for path, side in zip(paths, (ours, split(base)[1], split(edited)[1]), strict=True):
            path.write_bytes(side.encode())
        labels = "-L", file, "-L", f"{source} at HEAD", "-L", f"{source} as edited"
        merged, conflicts = git("merge-file", "-p", *labels, *paths)
    return docstring + merged, conflicts > 0


def way(file, before, down):
    """The pairs (from, to) in the order in which an edit of a file travels."""
    reached, pairs = [file], []
    while down and before[reached[-1]]:
        pairs.append((reached[-1], before[reached[-1]]))
        reached.append(before[reached[-1]])
    for target, source in before.items():
        if source in reached and target not in reached:
            pairs.append((source, target))
            reached.append(target)
    return pairs


def plan(file, before, down):
    """The files that an edit is to reach, in order: (file before, file, what is to be done, its text with the edit)."""
    edits = {file: (file, at_head(file, before), read(file))}  # file -> the edit it passes on: whose, from, to
    waiting = set()  # for a conflict to be mended
    for source, target in way(file, before, down):
        head, now = at_head(target, before), read(target)
        merged, conflict = merge(target, now, *edits[source])
        own = split(now)[1] != split(head)[1]
        if MARKS.search(now):
            todo = "mend"
        elif merged == now:
            todo = "nothing"
        elif own:
            todo = "refuse"
        elif source in waiting:
            todo = "wait"
        else:
            todo = "mark" if conflict else "carry"
        if todo in ("mark", "mend", "wait"):
            waiting.add(target)
        edits[target] = edits[source]
        if todo == "carry" or (own and todo != "mend"):
            edits[target] = target, head, merged if todo == "carry" else now
        yield source, target, todo, merged


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)  # one-line errors
    parser.add_argument("file", metavar="FILE", help="a script of the ladder")
    parser.add_argument("--down", action="store_true", help="into the earlier files as well")
    parser.add_argument("--check", action="store_true", help="say which files lag behind, and change nothing")
    args = parser.parse_args()
    try:
        before = {rung.file: rung.before for rung in read_ladder()}
        file = args.file if args.file in before else Path(os.path.relpath(args.file, ROOT)).as_posix()
        if file not in before:
            raise ValueError(f"{args.file} is not in ladder.toml")
        if MARKS.search(read(file)):
            raise ValueError(f"{file} still has the marks of a conflict")
        if args.down and is_new(file):
            raise ValueError(f"{file} is new: its idea goes up, not down")
        edited = split(read(file))[1] != split(at_head(file, before))[1]
        steps = list(plan(file, before, args.down)) if edited else []
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    if not edited:
        print(f"{file} is as it was committed, docstring aside: nothing to carry")
        print("(an edit that is committed already: git reset --soft HEAD~1 takes the commit back and leaves the edit)")
    elif not steps:
        print(f"no script stands on {file}: nothing to carry it into")
    if args.check:
        says = dict(nothing="has it", carry="lags behind", wait="lags behind", mark="lags behind, and will conflict")
        says |= dict(refuse="differs, and has uncommitted changes of its own", mend="has the marks of a conflict")
        for _, target, todo, _ in steps:
            print(f"{target}: {says[todo]}")
        sys.exit(any(todo != "nothing" for _, _, todo, _ in steps))
    if marked := [target for _, target, todo, _ in steps if todo == "mend"]:
        parser.error(f"{marked[0]} still has the marks of a conflict: mend it, and go on from there")
    if own := [target for _, target, todo, _ in steps if todo == "refuse"]:
        hint = "if they are an edit carried before, git restore it and the files above it"
        parser.error(f"{own[0]} has uncommitted changes of its own ({hint})")
    says = dict(nothing="had it", carry="carried", mark="CONFLICT, marked in the file", wait="waits for a conflict")
    for _, target, todo, text in steps:
        try:
            if todo in ("carry", "mark"):
                write(target, text)
        except OSError as error:
            parser.error(f"{target} could not be written, the files listed above were: {error}")
        print(f"{target}: {says[todo]}")
    waits = {source for source, _, todo, _ in steps if todo == "wait"}
    for source, target, todo, _ in steps:
        if todo == "mark":
            print(f"Mend {target} from <<<<<<< to >>>>>>>{', then go on with:' if target in waits else ''}")
            if target in waits:
                print(f"    python dev/propagate.py {'--down ' if before[source] == target else ''}{target}")
    sys.exit(any(todo == "mark" for _, _, todo, _ in steps))


if __name__ == "__main__":
    main()
