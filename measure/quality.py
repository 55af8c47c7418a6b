"""Measure what each rung learns on the small model nano:  python measure/quality.py   (make quality)

Each script trains once per seed, on the first nine tenths of input.txt. A seed sets the initial weights; all runs read
the same batches. heldout.py evaluates a run ten times on text from the last tenth. The evaluations are not timed. The
table compares each rung with the rung before, at the same seed: how many steps and seconds does it need to reach the
held-out loss that the rung before has at the end? Losses between two evaluations are interpolated. Seconds are steps
times the run's median step time, so they exclude the compilation.

With --max-lr, each script runs at each of these learning rates, and each row is compared with the best rate of the
first script. A run whose loss diverges is shown as such. Each finished run is saved. If you stop the measurement, the
same command continues it.
"""

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import record
import render
from commands import ask, execute
from ladder import read_ladder, title
from matplotlib.figure import Figure
from record import ROOT, median_ms, parse, rounded

TIE = 0.0005  # nats per token: a loss that is higher by less counts as equal, because rounding alone can change it
# By default, glibc returns freed memory to the system. Reallocating it would take a third of nano's step time on a CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**27), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


def train(script, max_lr, seed, settings, cache):
    """Run heldout.py once. Returns the run as a dict, without losses if it diverges. Raises RuntimeError on failure."""
    options = ["--model", settings["model"], "--steps", settings["steps"], "--device", settings["device"]]
    rate = ["--max-lr", max_lr] if max_lr else []
    words = ["measure/heldout.py", script, *rate, *options, "--seed", seed]
    text, errors, status = execute([str(word) for word in words], cache)
    run = {"script": script, "max_lr": max_lr, "seed": seed}
    if status:
        error = parse(text, errors, status)["error"]
        if "the loss is not finite" in error:
            return run | {"steps": [], "losses": [], "ms": None}
        at = f" with --max-lr {max_lr:g}, seed {seed}" if max_lr else f", seed {seed}"
        raise RuntimeError(f"{script}{at}: {error}")
    found = json.loads(text.splitlines()[-1])
    return run | {
        "steps": found["steps"],
        "losses": [round(loss, 4) for loss in found["losses"]],
        "ms": rounded(median_ms({"times_ms": found["ms"]})),
    }


def steps_to(run, loss):
    """Return the number of steps that a run takes to reach a held-out loss, or infinity."""
    steps, losses = run["steps"], run["losses"]
    after = next((place for place, one in enumerate(losses) if one <= loss + TIE), None)
    if after is None:
        return np.inf
    if after == 0:
        return float(steps[0])
    fraction = (losses[after - 1] - loss) / (losses[after - 1] - losses[after])
    return steps[after - 1] + min(fraction, 1) * (steps[after] - steps[after - 1])


def compare(data):
    """Return a list of dicts, one per script and learning rate, in the order of the settings.

    Each row has "times", the median step times in ms, and "losses", the losses at the end, with one value per seed. A
    row is compared with its "other" row: the rung before or, if the measurement has learning rates, the best row of the
    first script. "differences" are the losses at the end minus those of the other row at the same seed. "steps" and
    "seconds" are what the row needs to reach these losses of the other row. "gain" is the time that the other row takes
    for all its steps, divided by "seconds". The times and losses of runs that diverged are infinite. A loss that a run
    does not reach has infinite "steps" and a "gain" of minus infinity.
    """
    rows = []
    for script, max_lr in itertools.product(data["settings"]["scripts"], data["settings"]["max_lr"]):
        runs = [run for run in data["runs"] if (run["script"], run["max_lr"]) == (script, max_lr)]
        runs.sort(key=lambda run: run["seed"])
        rows.append({"script": script, "max_lr": max_lr, "runs": runs})
        rows[-1]["times"] = [run["ms"] or np.inf for run in runs]
        rows[-1]["losses"] = [run["losses"][-1] if run["losses"] else np.inf for run in runs]
    first = best([row for row in rows if row["script"] == rows[0]["script"]])
    before = {rung.file: rung.before for rung in read_ladder()}
    for row in rows:
        other = first if row["max_lr"] else next((r for r in rows if r["script"] == before[row["script"]]), None)
        row |= {"other": other, "differences": [], "steps": [], "seconds": [], "gain": []}
        if other and other is not row:
            row["differences"] = [mine - its for mine, its in zip(row["losses"], other["losses"], strict=True)]
            row["steps"] = [steps_to(run, loss) for run, loss in zip(row["runs"], other["losses"], strict=True)]
            row["seconds"] = [steps * ms / 1000 for steps, ms in zip(row["steps"], row["times"], strict=True)]
            whole = [data["settings"]["steps"] * ms / 1000 for ms in other["times"]]
            row["gain"] = [
                its / mine if np.isfinite(mine) else -np.inf for its, mine in zip(whole, row["seconds"], strict=True)
            ]
    return rows


def spread(values, form, never=""):
    """Return the median of the values and their range, such as 78 (71–90). `never` replaces infinite values."""
    if not values:
        return ""
    values = np.median(values), min(values), max(values)
    middle, low, high = (format(value, form) if np.isfinite(value) or not never else never for value in values)
    return f"{middle} ({low}–{high})" if low != high else middle


def cells(data):
    """Return the table of rows as a list of dicts of heading -> cell."""
    table, last = [], data["settings"]["steps"]
    for row in compare(data):
        line = {"script": title(row["script"])} | ({"rate": f"{row['max_lr']:g}"} if row["max_lr"] else {})
        table.append(
            line
            | {
                "ms per step": spread(row["times"], ".0f", "diverged"),
                f"held-out loss after {last} steps": spread(row["losses"], ".3f", "diverged"),
                "difference": spread([round(one, 3) + 0.0 for one in row["differences"]], "+.3f", "diverged")
                .replace("–", " to ")
                .replace("-", "−"),
                "steps to the other's loss": spread(row["steps"], ".0f", f">{last}"),
                "seconds to it": spread(row["seconds"], ".1f", "not reached"),
                "speed-up in time": spread(row["gain"], ".2f", "not reached"),
            }
        )
    return table


def conditions(data):
    """Return the machine, settings and date of a measurement as two lines."""
    settings = data["settings"]
    return [
        f"{data['command']}, {data['date']}",
        f"{settings['model']}, {settings['steps']} steps, {settings['seeds']} seeds, {data['device']}, "
        f"torch {data['torch']}, {settings['jobs']} runs at a time",
    ]


def summary(data):
    """Return the conditions and the table of a measurement as text."""
    return render.plain(conditions(data), cells(data))


def best(rows):
    """Return the row with the lowest mean loss at the end."""
    return min(rows, key=lambda row: np.mean(row["losses"]))


def curves(data):
    """Return a figure: the mean held-out loss of each row over the steps and over the seconds, with the seeds' range.

    If the measurement has learning rates, the figure shows each script at its best rate. It omits rows that diverged.
    """
    figure = Figure(figsize=(10.0, 4.6))
    left, right = figure.subplots(1, 2, sharey=True)
    rows = compare(data)
    if rows[0]["max_lr"]:
        rows = [best([row for row in rows if row["script"] == script]) for script in data["settings"]["scripts"]]
    rows = [row for row in rows if np.inf not in row["losses"]]
    for place, row in enumerate(rows):
        steps = np.array(row["runs"][0]["steps"])
        losses = np.array([run["losses"] for run in row["runs"]])
        rate = f", rate {row['max_lr']:g}" if row["max_lr"] else ""
        # The work is the same at every rate.
        times = [run["ms"] for run in data["runs"] if run["script"] == row["script"] and run["ms"]]
        style = {"color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}
        for axes, x in ((left, steps), (right, steps * np.median(times) / 1000)):
            axes.plot(x, losses.mean(0), label=title(row["script"]) + rate, linewidth=1.3, **style)
            axes.fill_between(x, losses.min(0), losses.max(0), alpha=0.15, color=style["color"], linewidth=0)
    early = [np.mean([run["losses"][len(run["losses"]) // 4] for run in row["runs"]]) for row in rows]
    left.set_ylim(top=max(early, default=None))  # hides the first drop
    left.set(xlabel="step", ylabel="held-out loss, nats per token", title="Held-out loss over steps")
    right.set(xlabel="seconds of training, without compilation", title="Held-out loss over time")
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def measure(data, out):
    """Run what is missing in `data`, one seed after the other, and save each run."""
    settings = data["settings"]
    rows = list(itertools.product(settings["scripts"], settings["max_lr"]))
    plan = [(*row, seed) for seed in range(settings["seeds"]) for row in (reversed(rows) if seed % 2 else rows)]
    done = {(run["script"], run["max_lr"], run["seed"]) for run in data["runs"]}
    os.environ |= KEEP_MEMORY
    if settings["jobs"] > 1 and settings["device"] == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // settings["jobs"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(settings["jobs"]) as pool:
        try:
            futures = [pool.submit(train, *job, settings, cache) for job in plan if job not in done]
            print(f"{len(futures)} runs to go", flush=True)
            for number, future in enumerate(as_completed(futures), start=1):
                run = future.result()
                data["runs"].append(run)
                data["runs"].sort(key=lambda run: plan.index((run["script"], run["max_lr"], run["seed"])))
                record.save(out, data)
                rate = f" at {run['max_lr']:g}" if run["max_lr"] else ""
                said = f"{run['losses'][-1]:.3f}, {run['ms']:.0f} ms" if run["losses"] else "diverged"
                print(f"{number}/{len(futures)}  {run['script']}{rate}, seed {run['seed']}: {said}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    render.write_svg(curves(data), out.with_suffix(".svg"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    rungs = [rung.file for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale"]
    parser.add_argument("--scripts", nargs="+", default=rungs, help="default: baseline.py to rung 10")
    parser.add_argument("--max-lr", nargs="+", type=float, default=[None], help="learning rates for get_lr()")
    parser.add_argument("--model", default="nano", help="default nano")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, default 5")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, or cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, default 1; more than 1 affects the times")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quality.json", help="default runs/quality.json")
    args = parser.parse_args()
    if min(args.steps, args.seeds, args.jobs) < 1:
        parser.error("--steps, --seeds and --jobs must be at least 1")
    known = [rung.file for rung in read_ladder()]
    if unknown := [script for script in args.scripts if script not in known]:
        parser.error(f"there is no script {unknown[0]}, only {', '.join(known)}")
    if args.max_lr != [None] and min(args.max_lr) <= 0:
        parser.error("--max-lr must be more than 0")
    if len({*args.scripts}) < len(args.scripts) or len({*args.max_lr}) < len(args.max_lr):
        parser.error("--scripts or --max-lr has the same value twice")
    try:
        machine = ask("machine.py", *(["--device", args.device] if args.device else []))
        settings = {key: getattr(args, key) for key in ("scripts", "max_lr", "model", "steps", "seeds", "jobs")}
        settings["device"] = machine["device"]
        line = shlex.join(["python", "measure/quality.py", *sys.argv[1:]])
        data = {"command": line, "date": record.now()[:10], "commit": record.commit(), "device": machine["name"]}
        programs = [[script] for script in (*args.scripts, "measure/heldout.py")]
        data |= {
            "torch": machine["torch"],
            "sources_sha256": record.sources(programs),
            "settings": settings,
            "runs": [],
        }
        if args.out.exists():
            earlier = json.loads(args.out.read_text(encoding="utf-8"))
            if any(earlier.get(key) != data[key] for key in ("device", "torch", "sources_sha256", "settings")):
                parser.error(f"{args.out} has a different measurement: use another --out")
            data = earlier
        measure(data, args.out)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit("quality.py: stopped: run the same command again to continue")
    print("\n" + summary(data), end="")
    print(f"\n{args.out}, {args.out.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
