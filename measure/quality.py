"""Measure the held-out loss of each rung with the small model nano:  python -m measure.quality   (make quality)

Each script trains once per seed on the first nine tenths of input.txt. The seed sets the initial weights. All runs read
the same batches. Each run is a separate process, `python -m measure.quality train SCRIPT`. The scripts are not
modified: PyTorch calls a hook after each optimizer step. About ten times per run, this hook computes the held-out loss
in float32, on about eight batches spread over the last tenth of the text. The step times do not include these
evaluations.

For each rung, the table shows how many steps and seconds a run needs to reach the final held-out loss of the previous
rung with the same seed. Losses between two evaluations are interpolated. The seconds are the number of steps times the
run's median step time, so they exclude compilation.

With --max-lr, each script runs at each given peak learning rate. Each row of the table is compared with the row of the
first script at its best rate. Runs that diverged are marked. Each finished run is saved. To continue a stopped
measurement, run the same command again.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dev.ladder import ROOT, read_ladder, title
from measure import plots, records
from measure.run import ask, execute

EVALUATIONS, BATCHES = 10, 8
TIE = 0.0005  # nats per token: a loss this close above another counts as equal, because rounding alone can change it
# By default, glibc returns freed memory to the system. Reallocating it would take a third of nano's step time on a CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**27), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


def split(path, folder):
    """Write the first nine tenths and the rest of a text to two files in a folder, and return their paths."""
    text = Path(path).read_bytes()
    end = text.index(b"\n", len(text) * 9 // 10)
    training, held_out = Path(folder, "training.txt"), Path(folder, "held_out.txt")
    training.write_bytes(text[:end])
    held_out.write_bytes(text[end:])
    return training, held_out


def evaluate(model, batches):
    """Return the mean loss of the batches in nats per token, computed in float32 by the uncompiled model."""
    device, precision = next(model.parameters()).device, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        losses = [type(model).forward(model, x.to(device), y.to(device)).item() for x, y in batches]
    torch.set_float32_matmul_precision(precision)
    return np.mean(losses)


def train(module, max_lr, options):
    """Run an imported script with these options. If max_lr is not None, it replaces the peak rate in get_lr().

    Returns a dict: "steps" are the optimizer steps after which the model was evaluated, "losses" are the held-out
    losses in nats per token, and "ms" are the times of all steps without the evaluations. Raises ValueError if max_lr
    is given but the script has no get_lr().
    """
    found, kept = {"steps": [], "losses": [], "ms": []}, {"at": time.perf_counter()}
    print_header, changes = module.print_header, {}
    if max_lr is not None:
        if not hasattr(module, "get_lr"):
            raise ValueError(f"--max-lr: {module.__name__} has no get_lr()")
        changes["get_lr"] = functools.partial(module.get_lr, max_lr=max_lr)

    def header(args, model, loader):
        print_header(args, model, loader)
        held_out = module.DataLoaderLite(texts[1], loader.B, loader.T)
        count = (len(held_out.tokens) - 1) // (loader.B * loader.T)
        batches = [held_out.next_batch() for _ in range(count)][:: max(1, count // BATCHES)]
        kept.update(model=model, batches=batches, last=args.steps, every=max(1, args.steps // EVALUATIONS))

    def after_step(*_):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        found["ms"].append(1000 * (time.perf_counter() - kept["at"]))
        step = len(found["ms"])
        if step % kept["every"] == 0 or step == kept["last"]:
            found["steps"].append(step)
            found["losses"].append(evaluate(kept["model"], kept["batches"]))
        kept["at"] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(module, print_header=header, **changes):
        texts = split(ROOT / "input.txt", folder)
        hook = register_optimizer_step_post_hook(after_step)
        with mock.patch.object(sys, "argv", [module.__file__, *options, f"--data={texts[0]}"]):
            module.main()
        hook.remove()
    return found


def name(run):
    rate = f" --max-lr {run['max_lr']:g}" if run["max_lr"] else ""
    return f"{run['script']}{rate} --seed {run['seed']}"


def run(script, max_lr, seed, settings, cache):
    """Train once in a new process. Returns the run as a dict, without losses if training diverges.

    Raises RuntimeError if the process fails.
    """
    words = ["-m", "measure.quality", "train", script, *(["--max-lr", max_lr] if max_lr else []), "--seed", seed]
    words += [word for name in ("model", "steps", "device") for word in (f"--{name}", settings[name])]
    text, errors, status = execute(words, cache)
    found = {"script": script, "max_lr": max_lr, "seed": seed, "steps": [], "losses": [], "ms": None}
    if status:
        error = records.parse(text, errors, status)["error"]
        if "the loss is not finite" in error:
            return found
        raise RuntimeError(f"{name(found)}: {error}")
    printed = json.loads(text.splitlines()[-1])
    found["steps"], found["losses"] = printed["steps"], [round(loss, 4) for loss in printed["losses"]]
    return found | {"ms": records.rounded(records.median_ms({"step_ms": printed["ms"]}))}


def measure(data, out):
    """Execute the runs that are missing from `data`, one seed after the other, and save each run."""
    settings = data["settings"]
    rows = list(itertools.product(settings["scripts"], settings["max_lr"]))
    plan = [(*row, seed) for seed in range(settings["seeds"]) for row in (reversed(rows) if seed % 2 else rows)]
    done = [(run["script"], run["max_lr"], run["seed"]) for run in data["runs"]]
    plan = [job for job in plan if job not in done]
    print(f"{len(plan)} runs to go", flush=True)
    os.environ |= KEEP_MEMORY
    if settings["jobs"] > 1 and settings["device"] == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // settings["jobs"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def run_and_save(job):
        new = run(*job, settings, cache)
        with lock:
            data["runs"].append(new)
            records.save(out, data)
            said = f"{new['losses'][-1]:.3f}, {new['ms']:.0f} ms" if new["losses"] else "diverged"
            print(f"{len(data['runs']) - len(done)}/{len(plan)}  {name(new)}: {said}", flush=True)

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(settings["jobs"]) as pool:
        # Without threads, Ctrl-C stops the measurement at any time. With threads, it takes effect once all are queued.
        list((pool.map if settings["jobs"] > 1 else map)(run_and_save, plan))


def steps_to(run, loss):
    """Return the number of steps that a run takes to reach a held-out loss, or infinity if it never does."""
    steps, losses = run["steps"], run["losses"]
    after = next((place for place, one in enumerate(losses) if one <= loss + TIE), None)
    if after is None:
        return np.inf
    if after == 0:
        return float(steps[0])
    fraction = (losses[after - 1] - loss) / (losses[after - 1] - losses[after])
    return steps[after - 1] + min(fraction, 1) * (steps[after] - steps[after - 1])


def best(rows):
    return min(rows, key=lambda row: np.mean(row["losses"]))


def compare(data):
    """Return a list of dicts, one per script and learning rate, in the order of the settings.

    Each row has arrays with one value per seed. "times" are the median step times in ms, and "losses" are the final
    held-out losses. Both are infinite for runs that diverged. Each row is compared with its "other" row: the previous
    rung's or, with --max-lr, the row of the first script at its best rate. "differences" are the row's losses minus
    the other row's losses. "steps" and "seconds" are the steps and time that the runs need to reach those losses.
    "gain" is the speed-up: the time of all steps of the other row, divided by "seconds". If a loss is not reached,
    "steps" and "seconds" are infinite, and "gain" is minus infinity. If a row is not compared with another row, the
    arrays of the comparison are empty.
    """
    rows, last = [], data["settings"]["steps"]
    for script, max_lr in itertools.product(data["settings"]["scripts"], data["settings"]["max_lr"]):
        runs = [run for run in data["runs"] if (run["script"], run["max_lr"]) == (script, max_lr)]
        runs.sort(key=lambda run: run["seed"])
        times = np.array([run["ms"] or np.inf for run in runs])
        losses = np.array([run["losses"][-1] if run["losses"] else np.inf for run in runs])
        rows.append({"script": script, "max_lr": max_lr, "runs": runs, "times": times, "losses": losses})
    first = best([row for row in rows if row["script"] == rows[0]["script"]])
    before = {rung.file: rung.before for rung in read_ladder()}
    for row in rows:
        other = first if row["max_lr"] else next((r for r in rows if r["script"] == before[row["script"]]), None)
        row |= {"other": other, **{name: np.array([]) for name in ("differences", "steps", "seconds", "gain")}}
        if other and other is not row:
            with np.errstate(invalid="ignore"):  # both runs of a seed may have diverged
                row["differences"] = row["losses"] - other["losses"]
                row["steps"] = np.array([steps_to(*pair) for pair in zip(row["runs"], other["losses"], strict=True)])
                row["seconds"] = row["steps"] * row["times"] / 1000
                gain = last * other["times"] / 1000 / row["seconds"]
            row["gain"] = np.where(np.isfinite(row["seconds"]), gain, -np.inf)
    return rows


def spread(values, form, never):
    """Return the median of the values and their range, such as 78 (71–90). `never` is the text for infinite values."""
    if not len(values):
        return ""
    values = np.median(values), min(values), max(values)
    middle, low, high = (format(value, form) if np.isfinite(value) else never for value in values)
    return f"{middle} ({low}–{high})" if low != high else middle


def cells(data):
    """Return the rows of compare() as a table."""
    table, last = [], data["settings"]["steps"]
    for row in compare(data):
        rate = {"rate": f"{row['max_lr']:g}"} if row["max_lr"] else {}
        difference = spread(row["differences"].round(3) + 0.0, "+.3f", "diverged")  # + 0.0, because -0.0 prints as -0
        table.append(
            {
                "script": title(row["script"]),
                **rate,
                "ms per step": spread(row["times"], ".0f", "diverged"),
                f"held-out loss after {last} steps": spread(row["losses"], ".3f", "diverged"),
                "difference": difference.replace("–", " to ").replace("-", "−"),
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


def start(out, settings):
    """Return the measurement in the file `out`, or a new measurement if the file does not exist.

    Raises ValueError if the file has different settings, or if the scripts, the device or the PyTorch version has
    changed since it was written.
    """
    machine = ask("device", *(["--device", settings["device"]] if settings["device"] else []))
    data = {
        "command": shlex.join(["python", "-m", "measure.quality", *sys.argv[1:]]),
        "date": records.now()[:10],
        "commit": records.commit(),
        "device": machine["name"],
        "torch": machine["torch"],
        "source": records.source(*settings["scripts"], "measure/quality.py"),
        "settings": settings | {"device": machine["device"]},
        "runs": [],
    }
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else data
    if any(earlier.get(key) != data[key] for key in ("device", "torch", "source", "settings")):
        raise ValueError(f"{out} contains a different measurement: use another --out")
    return earlier


def main():
    scripts = [rung.file for rung in read_ladder()]
    rungs = [rung.file for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    if sys.argv[1:2] == ["train"]:
        parser.add_argument("train")
        parser.add_argument("script", choices=scripts)
        parser.add_argument("--max-lr", type=float)
        args, options = parser.parse_known_args()
        try:
            module = importlib.import_module(args.script.removesuffix(".py").replace("/", "."))
            return print(json.dumps(train(module, args.max_lr, options)))
        except (OSError, ValueError) as error:
            parser.error(str(error))
    files = {"choices": scripts, "metavar": "SCRIPT"}
    parser.add_argument("--scripts", nargs="+", default=rungs, help="default: baseline.py to rung 10", **files)
    parser.add_argument("--max-lr", nargs="+", type=float, default=[], help="peak learning rates for get_lr()")
    parser.add_argument("--model", default="nano", help="default nano")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, default 5")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, or cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, default 1; more than 1 affects step times")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quality.json", help="default runs/quality.json")
    args = parser.parse_args()
    if min(args.steps, args.seeds, args.jobs, *(args.max_lr or [1])) <= 0:
        parser.error("every number must be more than 0")
    if len({*args.scripts}) < len(args.scripts) or len({*args.max_lr}) < len(args.max_lr):
        parser.error("--scripts or --max-lr has the same value twice")
    try:
        settings = {key: getattr(args, key) for key in ("scripts", "model", "steps", "seeds", "jobs", "device")}
        data = start(args.out, settings | {"max_lr": args.max_lr or [None]})
        measure(data, args.out)
        plots.write_svg(plots.held_out(compare(data)), args.out.with_suffix(".svg"))
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit("quality.py: stopped: run the same command again to continue")
    print("", *conditions(data), "", pd.DataFrame(cells(data)).to_string(index=False), sep="\n")
    print(f"\n{args.out}, {args.out.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
