"""Show how a script differs from the script that it builds on:  python -m dev.diff 02   (make diff-02)

The example above prints the docstring of speedup_02_tf32.py, then git's diff from speedup_01_weight_tying.py to this
script, without the docstrings.
On a terminal, you get a colored word diff, or a colored line diff if the script replaces several adjacent lines.
In a file or a pipe, you get a plain line diff.

`make figures` calls the functions from diff() to colab() to generate parts of the pages and the notebooks.
"""

import argparse
import json
import os
import re
import sys

from dev.ladder import ROOT, changed_lines, code_diff, find, read_ladder, read_toml, split


def docstring(script):
    return split((ROOT / script).read_text(encoding="utf-8"))[0]


def numbered(rung, *options):
    """Return git's diff of a rung, without the docstrings and the lines before ---.

    The line numbers are those of the complete files. Raises OSError or ValueError.
    """
    old, new = (docstring(script).count("\n") for script in (rung.before, rung.file))

    def in_the_file(hunk):
        return f"@@ -{int(hunk[1]) + old}{hunk[2]} +{int(hunk[3]) + new}"

    lines = code_diff(rung.before, rung.file, *options).split("\n", 2)[2]  # without `diff --git` and `index`
    return re.sub(r"@@ -(\d+)(\S*) \+(\d+)", in_the_file, lines)


def show(rung):
    """Return a rung's docstring and diff, in color if stdout is a terminal. Raises OSError or ValueError."""
    options = ["--color=never"]
    if sys.stdout.isatty():
        removed = re.findall(r"^@@ -\d+,(\d+)", code_diff(rung.before, rung.file, "-U0"), re.MULTILINE)
        several = any(int(lines) > 1 for lines in removed)  # a word diff of several replaced lines is hard to read
        options = ["--color=always"] if several else ["--word-diff=color"]
    return docstring(rung.file) + numbered(rung, *options)


def diff(number, context=3):
    """Return a rung's diff as Markdown. `number` is the rung's short name, such as 02 or muon."""
    rung = find(number)
    added, removed = changed_lines(rung.before, rung.file)
    kind = f" Kind: {rung.kind}." if rung.kind else ""
    hunks = numbered(rung, f"-U{context}").partition("\n@@ ")
    return f"""
From `{rung.before}` to `{rung.file}`: +{added} −{removed} lines (`make diff-{number}`).{kind}

```diff
@@ {hunks[2]}```
"""


def listing(script):
    """Return a whole script as Markdown."""
    return f"\n```python\n{(ROOT / script).read_text(encoding='utf-8')}```\n"


def in_notebook(text):
    """Return text as the lines of a notebook cell, in JSON."""
    return "\n".join(f"{json.dumps(line, ensure_ascii=False)}," for line in text.splitlines(keepends=True))


def address():
    """Return the repository's address from pyproject.toml, or an empty string if there is none."""
    return read_toml("pyproject.toml")["project"].get("urls", {}).get("Repository", "").removesuffix(".git")


def notebook(name):
    """Return a link to a notebook, or only its path if the repository has no address."""
    file = f"notebooks/{name}.ipynb"
    return f"[`{file}`]({address()}/blob/main/{file})" if address() else f"`{file}`"


def repository():
    """Return a line of Python that sets REPOSITORY to the repository's address."""
    return f'REPOSITORY = "{address()}"\n'


def colab(name):
    """Return a link that opens a notebook in Colab, or an empty line if the repository is not on GitHub."""
    _, found, path = address().partition("https://github.com/")
    page = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{name}.ipynb"
    return f"[Open in Colab]({page})\n" if found else "\n"


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
