"""The ladder as ladder.toml lists it, and how many lines each script changes."""

import importlib
import os
import re
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
MARKS = re.compile("^(<<<<<<<|=======|>>>>>>>)( |$)", re.MULTILINE)  # of a conflict, as git leaves them


@dataclass(frozen=True)
class Rung:
    """A row of ladder.toml, which says what each field is. `before` is None for the foot of the ladder alone."""

    file: str
    title: str
    idea: str
    part: str
    before: str | None = None
    touches: Sequence[str] = ()
    limit: int = 0
    run: str = ""
    kind: str = ""
    precision: str = ""

    @property
    def number(self):
        """What people call it: 02 for speedup_02_tf32.py, ddp for ddp_run.py, fsdp for branches/fsdp_run.py."""
        return Path(self.file).stem.removeprefix("speedup_").split("_")[0]


def read_toml(name):
    """The tables of a file of the project. Raises ValueError if it is not TOML."""
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError("Python 3.10 reads TOML with tomli: pip install tomli") from None
    return toml.loads((ROOT / name).read_text(encoding="utf-8"))


def read_ladder():
    """The rungs in order. Raises ValueError for a row that is not as ladder.toml says it should be."""
    rungs, tables = {}, read_toml("ladder.toml")  # rungs by file
    if unknown := tables.keys() - set(PARTS):
        raise ValueError(f"ladder.toml: [[{min(unknown)}]]: a table is one of {', '.join(PARTS)}")
    for part, row in [(name, row) for name in PARTS for row in tables.get(name, [])]:
        row = {"before": list(rungs)[-1] if part == "rung" and rungs else None, "kind": ""} | row
        try:
            if row["before"] not in (rungs or [None]):
                raise ValueError(f"{row['before']}, which it is a diff from, is not above it")
            if row["file"] in rungs:
                raise ValueError("it has two rows")
            if rungs:
                row = {"precision": rungs[row["before"]].precision} | row
                if not (isinstance(row["touches"], list) and isinstance(row["limit"], int)):
                    raise ValueError("touches is a list, limit a number")
            for field, allowed in ("precision", PRECISIONS), ("kind", KINDS):
                if row[field] not in allowed:
                    raise ValueError(f"{field} is one of {', '.join(filter(None, allowed))}")
            rungs[row["file"]] = Rung(part=part, **row)
        except (KeyError, TypeError, ValueError) as error:  # a field too few, too many, or wrong
            raise ValueError(f"ladder.toml: {row.get('file')}: {error}") from None
    return list(rungs.values())


@cache
def title(script):
    """What tables, plots and menus call a script: 05 torch.compile, for speedup_05_compile.py."""
    (rung,) = (rung for rung in read_ladder() if rung.file == script)
    return f"{rung.number} {rung.title}" if rung.number.isdigit() else rung.title


def split(source):
    """A script as (its docstring, all that follows). The docstring is each file's own; a diff is of what follows."""
    head, mark, rest = source.partition('\n"""\n')
    return head + mark, rest


def code_diff(before, after, *options, root=ROOT):
    """What `git diff` prints of two scripts without their docstrings: lines are counted from the docstring's end.

    Raises ValueError for a script with the marks of a conflict, which git would take for code.
    """
    with tempfile.TemporaryDirectory() as folder:
        for script in (before, after):
            text = (root / script).read_bytes().decode()
            if MARKS.search(text):
                raise ValueError(f"{script} still has the marks of a conflict, from <<<<<<< to >>>>>>>")
            path = Path(folder) / script
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(split(text)[1].encode())
        command = ["git", "diff", "--no-index", *options, before, after]
        return subprocess.run(command, cwd=folder, env=PLAIN_GIT, capture_output=True, encoding="utf-8").stdout


def changed_lines(before, after, root=ROOT):
    """How many lines git counts as added and removed between two scripts, docstrings left out."""
    printed = code_diff(before, after, "--numstat", root=root)
    added, removed = printed.split("\t")[:2] if printed else (0, 0)
    return int(added), int(removed)
