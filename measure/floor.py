"""The floor, a lower bound on the time of a counted step, on a GPU of cards.toml or on one that roof.py measured.

For each kernel the floor takes the longer of FLOPs / peak and bytes / bandwidth, and adds up these times. The figures
in cards.toml are from data sheets. No parameter is fitted, and the floor includes neither the time between kernels nor
the gap between a kernel and the peak. A step can be faster than its floor mainly if kernels find the results of earlier
kernels in the cache, or if the card clocks higher than its data sheet states.
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

INSTEAD = {"tf32": "float32", "bf16": "fp16", "fp16": "float32"}  # the substitute on a device without this precision


class Kernel(NamedTuple):
    """An operation, or several that the compiler fused. `precision` describes a matmul's factors, or is ""."""

    name: str
    group: str
    precision: str
    flops: int
    bytes: int


@dataclass
class Card:
    """A GPU: TFLOP/s of matrix products by precision, and memory bandwidth in GB/s."""

    tflops: dict
    gb_per_s: float

    @classmethod
    def read(cls, name):
        """The GPU with this name in cards.toml ("RTX" is optional), or the one in this file with roof.py's output.

        Raises OSError or ValueError.
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
        raise ValueError(f"--card {name}: the file is not what roof.py printed")

    def floor_ms(self, step):
        """(the floor of a step, the part of it in memory-bound kernels), both in ms."""
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
    """The counts as {(model, B, T): {script: step}}. A step is a Counter of kernels."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {
        (one["model"], one["batch_size"], one["seq_len"]): {
            script: Counter({Kernel(*kernel): count for *kernel, count in rows})
            for script, rows in one["scripts"].items()
        }
        for one in data["counts"]
    }


def counted_with(path=ROOT / "results" / "counts.json"):
    """The version of torch that the counts were made with."""
    return json.loads(path.read_text(encoding="utf-8"))["torch"]


def totals(step, group=None):
    """(FLOPs, bytes, number of kernels) of a step, or of one group of its kernels."""
    rows = [(kernel, count) for kernel, count in step.items() if group in (None, kernel.group)]
    sums = (sum(getattr(kernel, what) * count for kernel, count in rows) for what in ("flops", "bytes"))
    return *sums, sum(count for _, count in rows)


def cells(steps, card=None):
    """The table of {script: step}: a list of rows, each a dict of heading -> cell."""
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
    """The table of {script: measured ms} next to a card's floor: a list of rows, each a dict of heading -> cell."""
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
