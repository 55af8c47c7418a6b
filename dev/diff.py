"""Show how a script differs from the script that it builds on:  python -m dev.diff 02   (make diff-02)

The example above prints the docstring of speedup_02_tf32.py. It then prints git's diff from speedup_01_weight_tying.py
to this script, without either docstring.
On a terminal, the diff is a coloured word diff, or a coloured line diff if the script replaces several adjacent lines.
If the output is a file or a pipe, the diff is a plain line diff.
"""

import argparse
import os
import re
import sys

from dev.ladder import ROOT, code_diff, read_ladder, split


def show(rung):
    """Return a rung's docstring and its diff, with line numbers that count from the start of each file.

    Raises OSError or ValueError.
    """
    before, after = (split((ROOT / file).read_text(encoding="utf-8"))[0] for file in (rung.before, rung.file))
    old, new = before.count("\n"), after.count("\n")
    options = ["--color=never"]
    if sys.stdout.isatty():
        removed = re.findall(r"^@@ -\d+,(\d+)", code_diff(rung.before, rung.file, "-U0"), re.MULTILINE)
        several = any(int(lines) > 1 for lines in removed)  # a word diff of several replaced lines is hard to read
        options = ["--color=always"] if several else ["--word-diff=color"]

    def in_the_file(hunk):
        return f"@@ -{int(hunk[1]) + old}{hunk[2]} +{int(hunk[3]) + new}"

    return after + re.sub(r"@@ -(\d+)(\S*) \+(\d+)", in_the_file, code_diff(rung.before, rung.file, *options))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("rung", help="01, 02 ... 10, ddp, long, train, or a side rung, such as muon")
    name = parser.parse_args().rung
    try:
        rungs = {rung.number: rung for rung in read_ladder() if rung.before}
        if name not in rungs:
            raise ValueError(f"there is no rung {name}: expected one of {', '.join(rungs)}")
        text = show(rungs[name])
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # a program such as `head` has closed the pipe, so discard the remaining output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
