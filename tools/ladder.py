"""The ladder as ladder.toml lists it. Run as a program, it writes the README's table from it."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("rung", "pretrain", "branch")  # the tables of ladder.toml
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
KINDS = ("", "speed", "memory", "quality", "scale")
PLAIN_GIT = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # a diff is the same for all
BEGIN, END = "<!-- the ladder, written by `make readme` from ladder.toml -->\n", "<!-- end of the ladder -->\n"
HEAD = """
| file | kind | idea | lines | why it helps | when it does not |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Rung:
    """A row of ladder.toml, which says what each field is. `before` is None for the foot of the ladder alone."""

    file: str
    idea: str
    part: str
    before: str | None = None
    touches: Sequence[str] = ()
    limit: int = 0
    kind: str = ""
    precision: str = ""
    why: str = ""
    when_not: str = ""


def read_toml(name):
    """The tables of a file of the project. Raises ValueError if it is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


def read_ladder():
    """The rungs in order. Raises ValueError for a row that is not as ladder.toml says it should be."""
    rungs, tables = [], read_toml("ladder.toml")
    if unknown := tables.keys() - set(PARTS):
        raise ValueError(f"ladder.toml: [[{min(unknown)}]]: a table is one of {', '.join(PARTS)}")
    for part, row in [(name, row) for name in PARTS for row in tables.get(name, [])]:
        above = [rung.file for rung in rungs]
        row = {"before": above[-1] if part == "rung" and above else None} | row
        row.setdefault("precision", next((r.precision for r in rungs if r.file == row["before"]), ""))
        try:
            if row["before"] not in (above or [None]):
                raise ValueError(f"{row['before']}, which it is a diff from, is not above it")
            if row["file"] in above:
                raise ValueError("it has two rows")
            if above and not (isinstance(row["touches"], list) and isinstance(row["limit"], int)):
                raise ValueError("touches is a list, limit a number")
            if row["precision"] not in PRECISIONS:
                raise ValueError(f"precision is one of {', '.join(PRECISIONS)}")
            if row.get("kind", "") not in KINDS:
                raise ValueError(f"kind is one of {', '.join(KINDS[1:])}")
            rungs.append(Rung(part=part, **row))
        except (KeyError, TypeError, ValueError) as error:  # a field too few, too many, or wrong
            raise ValueError(f"ladder.toml: {row.get('file')}: {error}") from None
    return rungs


@cache
def load(script):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def split(source):
    """A script as (its docstring, all that follows). The docstring is each file's own; a diff is of what follows."""
    head, mark, rest = source.partition('\n"""\n')
    return head + mark, rest


def changed_lines(before, after, root=ROOT):
    """How many lines git counts as added and removed between two scripts, docstrings left out."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder) / side for side in ("before", "after")]
        for side, script in zip(sides, (before, after), strict=True):
            side.write_text(split((root / script).read_text(encoding="utf-8"))[1], encoding="utf-8")
        command = ["git", "diff", "--no-index", "--numstat", *sides]
        printed = subprocess.run(command, env=PLAIN_GIT, capture_output=True, text=True).stdout
    added, removed = printed.split("\t")[:2] if printed else (0, 0)
    return int(added), int(removed)


def table():
    """The README's table, in Markdown."""
    rows = []
    for rung in read_ladder():
        lines = ""
        if rung.before:
            added, removed = changed_lines(rung.before, rung.file)
            lines = f"+{added} −{removed} in {', '.join(f'`{name}`' for name in rung.touches)}"
        cells = f"[`{rung.file}`]({rung.file})", rung.kind, rung.idea, lines, rung.why, rung.when_not
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows) + "\n"


def with_table(readme):
    """The README's text with the table as it is now."""
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:start] + table() + readme[end:]


if __name__ == "__main__":
    path = ROOT / "README.md"
    try:
        readme = with_table(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"ladder.py: error: {error}")
    path.write_text(readme, encoding="utf-8")
