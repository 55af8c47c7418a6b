"""Compute the floor, an estimated lower bound on the step time, for a GPU in cards.toml or one measured by roof.py.

A kernel's lower bound is the longer of two times, FLOPs / peak and bytes / bandwidth. The floor is the sum of these
bounds over all kernels that counts.py counted. The figures in cards.toml come from data sheets. No parameter is fitted
to measured step times. The floor does not include the time between kernels, and it assumes that each kernel reaches the
peak or the full bandwidth. A measured step can still be faster than its floor, mainly because kernels read the results
of earlier kernels from the cache, or because the GPU runs at a higher clock than its data sheet states.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from record import ROOT

sys.path.append(str(ROOT / "dev"))
from ladder import read_toml

INSTEAD = {"tf32": "float32", "bf16": "fp16", "fp16": "float32"}  # precision -> substitute if a GPU does not support it


class Kernel(NamedTuple):
    """An operation, or several fused operations. `precision` is "" if the kernel is not a matmul."""

    name: str
    group: str
    precision: str
    flops: int
    bytes: int


@dataclass
class Card:
    """A GPU's peak matmul TFLOP/s by precision, and its memory bandwidth in GB/s."""

    tflops: dict
    gb_per_s: float

    @classmethod
    def read(cls, name):
        """Return a Card, given a GPU's name in cards.toml ("RTX" is optional) or the path of roof.py's saved output.

        Raises ValueError if `name` is neither, and OSError if a file cannot be read.
        """
        cards = read_toml("measure/cards.toml")
        for known, card in cards.items():
            if name.lower() in (known.lower(), known.lower().removeprefix("rtx ")):
                return cls(card, card["gb_per_s"])
        if not Path(name).is_file():
            raise ValueError(f"--card {name}: expected a file with roof.py's output, or one of {', '.join(cards)}")
        try:
            roof = json.loads(Path(name).read_text(encoding="utf-8"))
            tflops, gb_per_s = roof["ceilings_tflops"], roof["copy_gb_per_s"]
            if min(tflops["float32"], *tflops.values(), gb_per_s) > 0:
                return cls(tflops, gb_per_s)
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        raise ValueError(f"--card {name}: the file does not contain the output of roof.py")

    def floor_ms(self, step):
        """Return (the floor of a step, the part of the floor that is due to memory-bound kernels), both in ms."""
        whole = waiting = 0.0
        for kernel, count in step.items():
            precision = kernel.precision
            while precision and precision not in self.tflops:
                precision = INSTEAD[precision]
            multiply = kernel.flops / self.tflops[precision] / 1e9 if precision else 0.0
            move = kernel.bytes / self.gb_per_s / 1e6
            whole += count * max(multiply, move)
            waiting += count * move if move > multiply else 0.0
        return whole, waiting


def read_counts(path=ROOT / "results" / "counts.json"):
    """Return {(model, batch size, sequence length): {script: step}}. Each step is a Counter of kernels."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {
        (one["model"], one["batch_size"], one["seq_len"]): {
            script: Counter({Kernel(*kernel): count for *kernel, count in rows})
            for script, rows in one["scripts"].items()
        }
        for one in data["counts"]
    }


def counted_with(path=ROOT / "results" / "counts.json"):
    """Return the version of torch that produced the counts."""
    return json.loads(path.read_text(encoding="utf-8"))["torch"]


def totals(step, group=None):
    """Return (FLOPs, bytes, number of kernels) for a step or for one group of its kernels."""
    rows = [(kernel, count) for kernel, count in step.items() if group in (None, kernel.group)]
    sums = (sum(getattr(kernel, what) * count for kernel, count in rows) for what in ("flops", "bytes"))
    return *sums, sum(count for _, count in rows)


def cells(steps, card=None):
    """Return a table of counts with a row per script in `steps`, as a list of dicts of heading -> cell."""
    table = []
    for script, step in steps.items():
        flops, moved, kernels = totals(step)
        row = {"script": script, "TFLOP": f"{flops / 1e12:#.3g}", "GB moved": f"{moved / 1e9:.1f}"}
        row |= {"kernels": f"{kernels:,}"}
        if card:
            whole, waiting = card.floor_ms(step)
            row |= {"floor, ms": f"{whole:.1f}", "memory-bound share": f"{waiting / whole:.0%}"}
        table.append(row)
    return table


def beside(measured, steps, card):
    """Return a table that compares measured step times with floors, as a list of dicts of heading -> cell.

    `measured` is {script: ms}.
    """
    table, before = [], None
    for script, ms in measured.items():
        floor, _ = card.floor_ms(steps[script])
        gains = [f"{old / new:.2f}×" for old, new in zip(before, (ms, floor), strict=True)] if before else ["", ""]
        row = {"script": script, "measured, ms": f"{round(ms, 1):,g}", "floor, ms": f"{floor:,.1f}"}
        row |= {"measured / floor": f"{ms / floor:.2f}"}
        row |= {"measured, × previous": gains[0], "floor, × previous": gains[1]}
        before = ms, floor
        table.append(row)
    return table
