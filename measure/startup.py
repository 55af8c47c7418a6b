"""Compare how two scripts start and how fast they then run:  python measure/startup.py --model nano --steps 30

The scripts run in turns (A B, B A, A B ...), each time with an empty cache for compiled code, so the first step
includes the whole compilation. The table shows medians over the runs, with the range. It also shows the step from
which the slower starter has the shorter total time. --out saves the runs as JSON.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import numpy as np
import record
import render
from commands import TEN, ask, execute
from ladder import read_ladder, title

REGIONAL = "branches/regional_compile.py"


def median_and_range(values, spec):
    """Return the median of the values and their range, such as 20.1 (19.8–23.0)."""
    low, median, high = (format(value, spec) for value in np.percentile(values, [0, 50, 100]))
    return f"{median} ({low}–{high})" if low != high else median


def ahead(first, second):
    """Return the number of steps at which two runs have taken the same total time, or None if there is none.

    A run is a dict with "first_s", the seconds of its first step, and "ms", the milliseconds of a later step.
    """
    saved_s, lost_ms = first["first_s"] - second["first_s"], second["ms"] - first["ms"]
    return 1 + 1000 * saved_s / lost_ms if saved_s * lost_ms > 0 else None


def cells(data):
    """Return the table of two scripts as a list of dicts of heading -> cell."""
    runs = [[run for run in data["runs"] if run["script"] == script] for script in data["settings"]["scripts"]]
    table = [
        {
            "script": title(runs_of_script[0]["script"]),
            "first step, s": median_and_range([run["first_s"] for run in runs_of_script], ".1f"),
            "ms per later step": median_and_range([run["ms"] for run in runs_of_script], ",.0f"),
            "shorter total time": "",
        }
        for runs_of_script in runs
    ]
    steps = [ahead(*pair) for pair in zip(*runs, strict=True)]
    slow = max((0, 1), key=lambda place: np.median([run["first_s"] for run in runs[place]]))
    since = "not reached in every pair of runs" if None in steps else f"from step {median_and_range(steps, ',.0f')}"
    table[slow]["shorter total time"], table[1 - slow]["shorter total time"] = since, "at first"
    return table


def conditions(data):
    """Return the command, the machine and the settings of a measurement as two lines."""
    s = data["settings"]
    about = (
        f"{s['model']}, B {s['batch_size']}, T {s['seq_len']}: {s['steps']} steps, {s['repeat']} runs of each script"
    )
    return [f"{data['command']}, {data['date']}", f"{about}, {data['device']}, torch {data['torch']}"]


def summary(data):
    """Return the conditions and the table of a measurement as text."""
    return render.plain(conditions(data), cells(data))


def measure(settings):
    """Run both scripts in turns. Returns a list of runs. Raises RuntimeError if a script fails."""
    names, found = ("model", "batch_size", "seq_len", "steps", "device"), []
    flags = [str(word) for name in names for word in (f"--{name.replace('_', '-')}", settings[name])]
    for number in range(settings["repeat"]):
        for script in settings["scripts"][:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as cache:
                run = record.parse(*execute([script, *flags], cache), settings["steps"])
            if run["error"]:
                raise RuntimeError(f"{script}: {run['error']}")
            first, ms = record.rounded(run["times_ms"][0] / 1000), record.rounded(record.median_ms(run))
            found.append({"script": script, "first_s": first, "ms": ms})
            print(
                f"{number + 1}/{settings['repeat']}  {script}: first step {first:.1f} s, later steps {ms:,.0f} ms",
                flush=True,
            )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    known = [rung.file for rung in read_ladder()]
    parser.add_argument("scripts", nargs="*", default=[TEN, REGIONAL], help=f"default {TEN} {REGIONAL}")
    parser.add_argument("--model", default="nano", help="default nano")
    parser.add_argument("--batch-size", type=int, default=4, help="batch size B, default 4")
    parser.add_argument("--seq-len", type=int, default=128, help="sequence length T, default 128")
    parser.add_argument("--steps", type=int, default=30, help="steps per run, default 30")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each script, default 3")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, or cpu")
    parser.add_argument("--out", type=Path, help="also write the runs to this file as JSON")
    args = parser.parse_args()
    if len(args.scripts) != 2 or len({*args.scripts} & {*known}) != 2:
        parser.error(f"expected two of {', '.join(known)}")
    if args.steps < 2 or args.repeat < 1:
        parser.error("need at least 2 for --steps and 1 for --repeat")
    if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
        parser.error(f"--out {args.out}: cannot write a file there")
    try:
        machine = ask("machine.py", *(["--device", args.device] if args.device else []))
        settings = {name: value for name, value in vars(args).items() if name != "out"} | {"device": machine["device"]}
        data = {"command": shlex.join(["python", "measure/startup.py", *sys.argv[1:]]), "date": record.now()[:10]}
        data |= {"commit": record.commit(), "device": machine["name"], "torch": machine["torch"], "settings": settings}
        data |= {"runs": measure(settings)}
        if args.out:
            args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print("\n" + summary(data), end="")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
