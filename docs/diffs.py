"""Read git's diff of two scripts as lines with syntax highlighting, for the site and the notebooks."""

import difflib
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product, zip_longest

import unidiff
from markupsafe import Markup, escape
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

from dev.ladder import PLAIN_GIT, ROOT, split

WORD = re.compile(r"\w+| {4}|.")


@dataclass
class Line:
    """A line of a diff. `old` and `new` are its line numbers on each side, or None if that side lacks the line."""

    sign: str
    old: int | None
    new: int | None
    text: str
    tokens: tuple
    marked: frozenset = frozenset()  # positions of the characters that the paired line lacks
    row: int = 0  # row within its block in the side-by-side view


def source(script):
    return (ROOT / script).read_text(encoding="utf-8")


@cache
def highlighted(source):
    """Return Python source as a list of lines, each a tuple of (CSS class, text) pairs."""
    lines = [[]]
    for kind, value in lex(source, PythonLexer(stripnl=False, ensurenl=False)):
        first, *others = value.split("\n")
        lines[-1].append((STANDARD_TYPES.get(kind, ""), first))
        lines += [[(STANDARD_TYPES.get(kind, ""), text)] for text in others]
    return [tuple(line) for line in lines]


@cache  # saves time, because most lines appear in many diffs
def paint(tokens, marked=frozenset()):
    """Return a line's tokens as HTML, with the marked characters in separate spans."""
    html, start = Markup(), 0
    for css, text in tokens:
        for word, run in groupby(enumerate(text, start), key=lambda one: one[0] in marked):
            part = escape("".join(character for _, character in run))
            if word:
                part = Markup('<span class="word">{}</span>').format(part)
            html += Markup('<span class="{}">{}</span>').format(css, part) if css else part
        start += len(text)
    return html


def pair(old, new):
    """Pair removed lines with added lines, most similar first, and set each line's row. Paired lines share a row."""
    words = [[[word for word in WORD.findall(line.text) if word.strip()] for line in side] for side in (old, new)]
    alike = {
        (i, j): difflib.SequenceMatcher(None, gone, come, autojunk=False).ratio()
        for (i, gone), (j, come) in product(enumerate(words[0]), enumerate(words[1]))
    }
    pairs = []
    for i, j in sorted(alike, key=alike.get, reverse=True):
        if alike[i, j] >= 0.6 and all((i - a) * (j - b) > 0 for a, b in pairs):  # pairs must not cross
            pairs.append((i, j))
            mark(old[i], new[j])
    rows, a, b = [], 0, 0
    for i, j in [*sorted(pairs), (len(old), len(new))]:
        rows += zip_longest(old[a:i], new[b:j])
        rows += zip(old[i : i + 1], new[j : j + 1], strict=True)
        a, b = i + 1, j + 1
    for row, lines in enumerate(rows, start=1):
        for line in filter(None, lines):
            line.row = row


def mark(old, new):
    """Mark the words that differ between two lines."""
    gone, come = (list(WORD.finditer(line.text)) for line in (old, new))
    texts = [[word[0] for word in words] for words in (gone, come)]
    first = len(os.path.commonprefix(texts))
    last = len(os.path.commonprefix([words[first:][::-1] for words in texts]))
    texts = [words[first : len(words) - last] for words in texts]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind != "equal":
            for line, words in (old, gone[first + a : first + b]), (new, come[first + c : first + d]):
                line.marked = line.marked.union(*(range(*word.span()) for word in words))


def blocks(lines):
    """Group lines into changed and unchanged blocks -> [(whether changed, lines on the left, lines on the right)]."""
    found = []
    for changed, run in groupby(lines, key=lambda line: line.sign != " "):
        run = list(run)
        old, new = ([line for line in run if line.sign != sign] for sign in "+-")
        if changed:
            pair(old, new)
        found.append((changed, old, new))
    return found


def read_diff(before, after):
    """Return git's diff of two scripts as a dict of the header, the docstring's hunks and the code's hunks.

    The docstring's hunks have the key "folded", and the code's hunks have the key "shown". Each hunk is a tuple of
    its @@ line and its blocks. If a hunk changes only the docstring, its context lines stay with it, even if they
    are code. The user's git settings are ignored. Raises ValueError if the scripts are identical or git fails.
    """
    command = ["git", "diff", "--no-index", before, after]
    done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, encoding="utf-8")
    if done.returncode != 1:
        raise ValueError(done.stderr.strip() or f"{before} and {after} are identical")
    sources = source(before), source(after)
    old_end, new_end = (split(text)[0].count("\n") for text in sources)
    old_tokens, new_tokens = ([(), *highlighted(text)] for text in sources)  # line numbers start at 1
    folded, shown = [], []
    for hunk in unidiff.PatchSet(done.stdout)[0]:
        lines, inside, outside = [], [], []
        for one in hunk:
            old, new = one.source_line_no, one.target_line_no
            tokens = new_tokens[new] if new else old_tokens[old]
            lines.append(Line(one.line_type, old, new, one.value.rstrip("\n"), tokens))
            (inside if 0 < (old or 0) <= old_end or 0 < (new or 0) <= new_end else outside).append(lines[-1])
        if all(line.sign == " " for line in outside):
            inside, outside = lines, []
        head = str(hunk).split("\n", 1)[0]
        if inside:
            folded.append((head, blocks(inside)))
        if outside:
            shown.append(("" if inside else head, blocks(outside)))
    return {"header": done.stdout[: done.stdout.index("@@ ")], "folded": folded, "shown": shown}
