"""Find the bug: list the puzzles, or begin, check or explain one:  python -m dev.puzzle 07   (make puzzle-07)

A puzzle is a script with one planted mistake, and a description of what its user saw. The example above writes the
script to puzzles/07/ and prints the description. `--check` runs the test that catches the mistake on this script.

Puzzles are the tables named `puzzle` in dev/mistakes.toml.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from dev.ladder import ROOT, read_toml

PUZZLES = ROOT / "puzzles"


def read_puzzles():
    """Return {number: mistake} of the mistakes that are puzzles, in order. A number has two digits, such as "07"."""
    mistakes = [mistake for group in read_toml("dev/mistakes.toml").values() for mistake in group]
    found = {f"{mistake['puzzle']['number']:02d}": mistake for mistake in mistakes if "puzzle" in mistake}
    return dict(sorted(found.items()))


def plant(mistake, file):
    """Return the text of a script with a mistake. Raises ValueError unless each text to replace occurs exactly once."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for old, new in mistake["edits"]:
        if text.count(old) != 1:
            raise ValueError(f"{file} does not contain this text exactly once: {old}")
        text = text.replace(old, new)
    return text


def place(number, mistake):
    """Return the path of a puzzle's script."""
    return PUZZLES / number / Path(mistake["file"]).name


def progress(number):
    """Return the lines noted for a puzzle: "hint" for each hint, and "solved"."""
    path = PUZZLES / number / "progress.txt"
    return path.read_text().split() if path.exists() else []


def explanation(mistake):
    return f"the bug: {mistake['name']}\nits harm: {mistake['harm']}"


def note(number, word):
    (PUZZLES / number).mkdir(parents=True, exist_ok=True)
    with open(PUZZLES / number / "progress.txt", "a") as file:
        print(word, file=file)


def show_list():
    for number, mistake in read_puzzles().items():
        puzzle, begun = mistake["puzzle"], place(number, mistake).exists()
        state = "solved" if "solved" in progress(number) else "begun" if begun else ""
        print(f"{number}  {puzzle['title']:36} {puzzle['difficulty']:8} {state}".rstrip())
        print(f"    {puzzle['symptom']}")
    print("\nTo begin one: make puzzle-01")


def puzzles():
    """Return the list of puzzles in Markdown."""
    lines = ["\n| puzzle | what its user saw | difficulty |", "| --- | --- | --- |"]
    for number, puzzle in ((number, mistake["puzzle"]) for number, mistake in read_puzzles().items()):
        lines.append(f"| {number} {puzzle['title']} | {puzzle['symptom']} | {puzzle['difficulty']} |")
    return "\n".join([*lines, ""])


def begin(number, mistake, again):
    """Write a puzzle's script, unless there is one already, and print the description."""
    puzzle, script, text = mistake["puzzle"], place(number, mistake), plant(mistake, mistake["file"])
    shown, state = script.relative_to(ROOT).as_posix(), "is as you left it"
    if again or not script.exists():
        state = "has the bug"
        script.parent.mkdir(parents=True, exist_ok=True)
        (script.parent / "progress.txt").unlink(missing_ok=True)
        script.write_text(text, encoding="utf-8")
        if "experiment" in puzzle:
            (script.parent / "experiment.py").write_text(puzzle["experiment"].lstrip(), encoding="utf-8")
    print(f"Puzzle {number}: {puzzle['title']} ({puzzle['difficulty']})\n\n{puzzle['symptom']}\n")
    print(puzzle["story"].replace("{script}", shown).replace("{folder}", f"puzzles/{number}"))
    print(f"{shown} {state}. Mend it there. Its diff from {mistake['file']} would show the bug.\n")
    words = {"check": "test your script", "hint": "get a hint", "answer": "see the bug", "again": "restore the bug"}
    for option, what in words.items():
        print(f"    make puzzle-{number} ARGS=--{option:8} {what}")


def check(number, mistake):
    """Run the test of a mistake on a puzzle's script and print the result. Return whether the test passed."""
    script = place(number, mistake)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", f"tests/{mistake['check'].format(script=mistake['file'])}"]
        # With the puzzle's folder first, the tests import its script instead of the repository's.
        command += ["-o", f"pythonpath={script.parent.relative_to(ROOT)} . branches pretrain", "-p", "no:cacheprovider"]
        command += [
            "--assert=plain",
            "--tb=native",
            "--timeout=300",
            f"--basetemp={folder}/tmp",
            f"--junitxml={folder}/report.xml",
        ]
        hidden = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # as on a machine without a GPU
        done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
        report = ElementTree.parse(f"{folder}/report.xml") if Path(folder, "report.xml").exists() else None
    if done.returncode == 0:
        note(number, "solved")
        print(f"solved\n{explanation(mistake)}")
        return True
    (found, *_) = [one for one in report.iter() if one.tag in ("failure", "error")] if report else [None]
    if found is not None and re.match("AssertionError|Failed: (?!Timeout)", found.get("message")):
        print(f"not solved; the symptom was: {mistake['puzzle']['symptom']}")
    else:
        text = found.text if found is not None else done.stdout + done.stderr
        print(text[max(text.find(f'  File "{ROOT}/tests'), 0) :])  # without pytest's own frames
        print("not solved; an error ended the test")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("number", nargs="?", help="a puzzle, such as 07; without a number, all puzzles are listed")
    options = parser.add_mutually_exclusive_group()
    options.add_argument("--check", action="store_true", help="test your script")
    options.add_argument("--hint", action="store_true", help="print a hint, and the next time a second one")
    options.add_argument("--answer", action="store_true", help="print the bug, its harm and its diff")
    options.add_argument("--again", action="store_true", help="restore the script with the bug; your changes are lost")
    args, found = parser.parse_args(), read_puzzles()
    if args.number is None:
        if args.check or args.hint or args.answer or args.again:
            parser.error("which puzzle? For example: make puzzle-07 ARGS=--check")
        return show_list()
    number = args.number.zfill(2)
    if number not in found:
        parser.error(f"there is no puzzle {args.number}: expected 01 to {max(found)}")
    mistake = found[number]
    if args.check:
        if not place(number, mistake).exists():
            parser.error(f"puzzle {number} is not begun: make puzzle-{number}")
        sys.exit(0 if check(number, mistake) else 1)
    if args.hint:
        note(number, "hint")
        for hint in mistake["puzzle"]["hints"][: progress(number).count("hint")]:
            print(f"hint: {hint}")
    elif args.answer:
        wrong, right = plant(mistake, mistake["file"]), (ROOT / mistake["file"]).read_text(encoding="utf-8")
        print(explanation(mistake), end="\n\n")
        names = place(number, mistake).relative_to(ROOT).as_posix(), mistake["file"]
        print("\n".join(difflib.unified_diff(wrong.splitlines(), right.splitlines(), *names, lineterm="")))
    else:
        begin(number, mistake, args.again)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
