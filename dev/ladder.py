"""Read ladder.toml, split scripts into docstring and code, and count the lines that each script changes."""

import ast
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
PLAIN_GIT = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # ignore the user's settings
MARKS = re.compile("^(<<<<<<<|=======|>>>>>>>)( |$)", re.MULTILINE)  # git's conflict markers


@dataclass(frozen=True)
class Rung:
    """A row of ladder.toml. Comments in that file describe the fields. `before` is None only for the first script."""

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
    changed: str = ""
    gpu: bool = False

    @property
    def number(self):
        return short(self.file)


def read_toml(name):
    """Return a TOML file as a dict. `name` is relative to the root of the repository.

    Raises OSError, or ValueError if the file is not valid TOML.
    """
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ValueError("Python 3.10 needs tomli to read TOML: pip install tomli") from None
    return toml.loads((ROOT / name).read_text(encoding="utf-8"))


def read_ladder():
    """Return the rungs in order. Raises ValueError if a row breaks the rules in ladder.toml."""
    rungs, tables = {}, read_toml("ladder.toml")  # `rungs` maps a file to its Rung
    if unknown := tables.keys() - set(PARTS):
        raise ValueError(f"ladder.toml: [[{min(unknown)}]]: the table must be one of {', '.join(PARTS)}")
    for part, row in [(name, row) for name in PARTS for row in tables.get(name, [])]:
        row = {"before": list(rungs)[-1] if part == "rung" and rungs else None, "kind": ""} | row
        try:
            if row["before"] not in (rungs or [None]):
                raise ValueError(f"its previous script, {row['before']}, is not listed above it")
            if row["file"] in rungs:
                raise ValueError("it is listed twice")
            if rungs:
                row = {"precision": rungs[row["before"]].precision} | row
                if not (isinstance(row["touches"], list) and isinstance(row["limit"], int)):
                    raise ValueError("touches must be a list, and limit must be a number")
            for field, allowed in ("precision", PRECISIONS), ("kind", KINDS):
                if row[field] not in allowed:
                    raise ValueError(f"{field} must be one of {', '.join(filter(None, allowed))}")
            rungs[row["file"]] = Rung(part=part, **row)
        except (KeyError, TypeError, ValueError) as error:  # a missing, unknown or invalid field
            raise ValueError(f"ladder.toml: {row.get('file')}: {error}") from None
    return list(rungs.values())


def find(number):
    """Return the rung with the given short name, such as 02, ddp or muon."""
    (rung,) = (rung for rung in read_ladder() if rung.number == number)
    return rung


def short(script):
    """Return a script's short name: 02 for speedup_02_tf32.py, ddp for ddp_run.py, bf16 for branches/bf16_stream.py."""
    return Path(script).stem.removeprefix("speedup_").split("_")[0]


@cache
def title(script):
    """Return a script's name in tables, plots and menus, such as 05 torch.compile for speedup_05_compile.py."""
    (rung,) = (rung for rung in read_ladder() if rung.file == script)
    return f"{rung.number} {rung.title}" if rung.number.isdigit() else rung.title


def split(source):
    """Return (docstring, code) of a script. Diffs compare only the code, because each file has its own docstring."""
    head, mark, rest = source.partition('\n"""\n')
    return head + mark, rest


def parts(text):
    """Return {name: (syntax tree, text)} of a script's definitions, in order.

    A class is split into its methods and everything before them. Each text begins where the previous text ends, so
    every byte after the docstring is in exactly one text. Raises ValueError if the script has no docstring, or has a
    comment after its last definition.
    """
    body, lines, found = ast.parse(text).body, text.splitlines(keepends=True), {}
    if not ast.get_docstring(ast.parse(text)):
        raise ValueError("no docstring")
    start = body.pop(0).end_lineno
    for node in body:
        name = getattr(node, "name", None) or ast.unparse(node).splitlines()[0].split(" = ")[0]
        name = "imports" if isinstance(node, (ast.Import, ast.ImportFrom)) else name
        methods = [child for child in getattr(node, "body", []) if isinstance(child, ast.FunctionDef)]
        pieces = [(name, node, node.end_lineno)]
        if isinstance(node, ast.ClassDef) and methods:
            node.body = [child for child in node.body if child not in methods]
            pieces = [(name, node, node.body[-1].end_lineno if node.body else node.lineno)]
            pieces += [(f"{name}.{method.name}", method, method.end_lineno) for method in methods]
        for name, piece, end in pieces:
            tree, before = found.get(name, ("", ""))
            found[name] = tree + ast.dump(piece), before + "".join(lines[start:end])
            start = end
    if lines[start:]:
        raise ValueError(f"after the last definition: {lines[start].strip()}")
    return found


def code_diff(before, after, *options, root=ROOT):
    """Return the output of `git diff` for two scripts without their docstrings.

    In the output, line 1 is the first line after the docstring. Raises ValueError if a script has conflict markers,
    because git would treat the markers as code.
    """
    with tempfile.TemporaryDirectory() as folder:
        for script in (before, after):
            text = (root / script).read_bytes().decode()
            if MARKS.search(text):
                raise ValueError(f"{script} still has conflict markers, from <<<<<<< to >>>>>>>")
            path = Path(folder) / script
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(split(text)[1].encode())
        command = ["git", "diff", "--no-index", *options, before, after]
        return subprocess.run(command, cwd=folder, env=PLAIN_GIT, capture_output=True, encoding="utf-8").stdout


def changed_lines(before, after, root=ROOT):
    """Return git's counts of the lines added and removed between two scripts, without their docstrings."""
    printed = code_diff(before, after, "--numstat", root=root)
    added, removed = printed.split("\t")[:2] if printed else (0, 0)
    return int(added), int(removed)
