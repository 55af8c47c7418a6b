"""List the bug-finding puzzles, or begin, check or explain a puzzle:  python -m dev.puzzle 07   (make puzzle-07)

A puzzle consists of a script with a planted mistake and a description of the mistake's effect. The example above writes
the script to puzzles/07/ and prints the description. `--check` tests whether you have fixed this script.

The puzzles are defined in the tables named `puzzle` in dev/mistakes.toml.
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
    """Return {number: mistake} for the mistakes that are puzzles, sorted by number (such as "07")."""
    mistakes = [mistake for group in read_toml("dev/mistakes.toml").values() for mistake in group]
    found = {f"{mistake['puzzle']['number']:02d}": mistake for mistake in mistakes if "puzzle" in mistake}
    return dict(sorted(found.items()))


def plant(mistake, file):
    """Return the text of a script with a planted mistake.

    Raises ValueError unless each text to replace occurs exactly once.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    for old, new in mistake["edits"]:
        if text.count(old) != 1:
            raise ValueError(
                f"{file} was edited where this mistake is planted: git restore {file}, or edit dev/mistakes.toml too"
            )
        text = text.replace(old, new)
    return text


def place(number, mistake):
    """Return the path of a puzzle's script."""
    return PUZZLES / number / Path(mistake["file"]).name


def progress(number):
    """Return the lines of a puzzle's progress.txt: "hint" for each hint given, and "solved" for each passed check."""
    path = PUZZLES / number / "progress.txt"
    return path.read_text().split() if path.exists() else []


def note(number, word):
    (PUZZLES / number).mkdir(parents=True, exist_ok=True)
    with open(PUZZLES / number / "progress.txt", "a") as file:
        print(word, file=file)


def explanation(mistake):
    return f"the bug: {mistake['name']}\nits effect: {mistake['harm']}"


def show_list(found):
    for number, mistake in found.items():
        puzzle, begun = mistake["puzzle"], place(number, mistake).exists()
        state = "solved" if "solved" in progress(number) else "begun" if begun else ""
        print(f"{number}  {puzzle['title']:36} {puzzle['difficulty']:8} {state}".rstrip())
        print(f"    {puzzle['symptom']}")
    print("\nTo begin a puzzle: make puzzle-01")


def puzzles():
    """Return the list of puzzles in Markdown."""
    lines = ["\n| puzzle | symptom | difficulty |", "| --- | --- | --- |"]
    for number, puzzle in ((number, mistake["puzzle"]) for number, mistake in read_puzzles().items()):
        lines.append(f"| {number} {puzzle['title']} | {puzzle['symptom']} | {puzzle['difficulty']} |")
    return "\n".join([*lines, ""])


def begin(number, mistake, again=False):
    """Write a puzzle's script, unless it already exists, and print the description."""
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
    print(f"{shown} {state}. Fix the bug there.\nDo not look at the diff from {mistake['file']}: it shows the bug.\n")
    for option, (_, what) in ACTIONS.items():
        print(f"    make puzzle-{number} ARGS=--{option:8} {what}")


def begin_again(number, mistake):
    begin(number, mistake, again=True)


def hint(number, mistake):
    """Print the hints given so far, and the next hint if there is one."""
    note(number, "hint")
    hints, given = mistake["puzzle"]["hints"], progress(number).count("hint")
    for place, text in enumerate(hints[:given], 1):
        print(f"hint {place} of {len(hints)}: {text}")


def answer(number, mistake):
    """Print the bug, its effect, and the diff that fixes it."""
    wrong, right = plant(mistake, mistake["file"]), (ROOT / mistake["file"]).read_text(encoding="utf-8")
    names = place(number, mistake).relative_to(ROOT).as_posix(), mistake["file"]
    diff = difflib.unified_diff(wrong.splitlines(), right.splitlines(), *names, lineterm="")
    print(explanation(mistake), "", *diff, sep="\n")


def check(number, mistake):
    """Run the test for a mistake on a puzzle's script and print the result. Return 0 if the test passed, else 1."""
    script = place(number, mistake)
    if not script.exists():
        raise ValueError(f"puzzle {number} is not begun: make puzzle-{number}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", f"tests/{mistake['check'].format(script=mistake['file'])}"]
        # With the puzzle's folder first, the tests import its script instead of the repository's.
        command += ["-o", f"pythonpath={script.parent.relative_to(ROOT)} . branches pretrain", "-p", "no:cacheprovider"]
        command += ["--assert=plain", "--tb=native", "--timeout=300", f"--basetemp={folder}/tmp"]
        command += [f"--junitxml={folder}/report.xml"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}  # the test simulates a GPU
        done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        path = Path(folder, "report.xml")
        report = path.read_bytes() if path.exists() else b"<none/>"
    if done.returncode == 0:
        note(number, "solved")
        print(f"solved\n{explanation(mistake)}")
        return 0
    found = next((one for one in ElementTree.fromstring(report).iter() if one.tag in ("failure", "error")), None)
    if found is not None and re.match("AssertionError|Failed: (?!Timeout)", found.get("message")):
        print(
            f"not solved; the symptom was: {mistake['puzzle']['symptom']}\nfor a hint: make puzzle-{number} ARGS=--hint"
        )
        return 1
    text = done.stdout + done.stderr if found is None else found.text
    print(text[max(text.find(f'  File "{ROOT}/tests'), 0) :])  # without pytest's own frames
    print("not solved; an error ended the test")
    return 1


ACTIONS = {  # option -> (its function, what it does)
    "check": (check, "test your script"),
    "hint": (hint, "get a hint"),
    "answer": (answer, "see the bug, its effect and the diff"),
    "again": (begin_again, "restore the bug and discard your changes"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("number", nargs="?", help="a puzzle, such as 07; without a number, list the puzzles")
    options = parser.add_mutually_exclusive_group()
    for option, (action, what) in ACTIONS.items():
        options.add_argument(f"--{option}", dest="action", action="store_const", const=action, help=what)
    args = parser.parse_args()
    try:
        found, number = read_puzzles(), (args.number or "").zfill(2)
        if args.number and number not in found:
            raise ValueError(f"there is no puzzle {args.number}: expected 01 to {max(found)}")
        if args.action and not args.number:
            raise ValueError("which puzzle? For example: make puzzle-07 ARGS=--check")
        sys.exit((args.action or begin)(number, found[number]) if args.number else show_list(found))
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
