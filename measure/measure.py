"""Measure the whole ladder on this machine:  python measure/measure.py   (make ladder)

This program runs each script in its own process, as a user would, and parses the lines that the script prints. A
pass runs each script once, with the same model, batch size B and sequence length T. The program writes ladder.json, the
table as summary.txt, and plots to results/<device>-<date>/.

--repeat R makes R passes over the ladder. Every second pass runs in reverse order (A B C, C B A, A B C ...), to reduce
the effect of drift in the machine's speed. A speed-up is the ratio of two step times in the same pass. For each script,
the table shows the median of these speed-ups. The most important results are measured first: the device's peak, one
pass over the ladder, the profile, the batch sizes, the peers, further passes, and the largest batch.

If Ctrl-C or --budget ends a measurement early, all completed runs are kept. To continue the measurement and retry
failed runs, run the command again. You can continue on a different host if its GPU model, torch version and CUDA
version are the same. All runs of a pass must come from one host. If two hosts measured parts of a pass, the current
host therefore repeats the other host's runs after all other jobs.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import gauge
import record
import render
from commands import TEN, ask, command, execute, rows
from record import ROOT
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# kernels.py counts optimizer updates: 4 before the profiler starts, 1 for its warm-up, and 3 profiled. The 4 spare
# steps make up for the updates that fp16 skips.
PROFILED_STEPS = 12
FIT_STEPS = 10
BATCHES = list(itertools.product((1, 4, 16, 64), ("default", "reduce-overhead")))
MACHINE = ("device", "name", "capability", "torch", "cuda", "threads")  # must not change during a measurement
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # Ctrl-C, shutdown, end of the budget


def largest(fits, start=16):
    """Return the largest power of two below 8192 for which fits(size) is true, or 0 if there is none.

    The search begins at `start`, a power of two, and doubles or halves the size. After 16, it can try 64 before 32.
    """
    fit, miss, size = 0, 8192, start
    while fit < size < miss:
        if fits(size):
            fit = size
            size *= 4 if size == 16 and miss > 64 else 2
        else:
            miss = size
            size = 2 * fit or size // 2
    return fit


class Measurement:
    """A measurement in progress. Each result is saved in ladder.json before the next run begins.

    A job is a tuple of a method, a row of the table and further arguments. The method writes the job's result into
    self.data, and returns a message to print, or None.
    """

    def __init__(self, path, data, plan, host, progress, caches):
        self.path, self.data, self.plan, self.host, self.progress = path, data, plan, host, progress
        self.settings, self.caches, self.commit = data["settings"], caches, record.commit()
        self.ladder = [row for row in plan if row.kind != "peer"]
        self.records = {row["name"]: row for row in data["rows"]}
        self.gpu, self.tried = gauge.find_gpu(host["gpu_id"]), set()
        self.bar, self.stage = progress.add_task(""), ""

    def stages(self):
        """Yield (title, jobs) for each requested stage, most important first.

        A job can appear in two stages; left() keeps it only in the first one.
        """
        profiled = [row for row in self.plan if self.settings["profile"] and row.words[0].endswith(".py")]
        ten = [row for row in rows() if self.settings["batches"] and row.name == TEN]
        yield "peak", [(self.roof, None)]
        yield "pass 1", [(self.measure, row, 0) for row in self.ladder]
        yield "profile", [(self.profile, row) for row in profiled if row in self.ladder]
        yield "batch sizes", [(self.batch, row, *cell) for row in ten for cell in BATCHES]
        yield "pass 1", [(self.measure, row, 0) for row in self.plan]
        yield "profile", [(self.profile, row) for row in profiled]
        for number in range(1, self.settings["repeat"]):
            plan = reversed(self.plan) if number % 2 else self.plan
            yield f"pass {number + 1}", [(self.measure, row, number) for row in plan]
        yield "largest batch", [(self.fit, row) for row in self.plan if self.settings["fit"]]

    def left(self):
        """Return {job: title of its stage} for the remaining jobs, in order.

        A job remains if it has no result or if it failed in an earlier call of measure.py. If two hosts have measured
        parts of a pass, the other host's jobs are added at the end, because this host must repeat them.
        """
        left = {}
        for title, jobs in self.stages():
            for job in jobs:
                found = self.result(*job)
                if job not in self.tried and (not found or found.get("error")):
                    left.setdefault(job, title)
        for number in range(self.settings["repeat"]):
            runs = [(row, self.result(self.measure, row, number)) for row in self.plan]
            hosts = {row: run["host"] for row, run in runs if run and not run["error"]}
            elsewhere = [row for row, host in hosts.items() if host != self.host["id"]]
            if len(set(hosts.values())) > 1:
                left |= {(self.measure, row, number): f"pass {number + 1} on one host" for row in elsewhere}
        return left

    def result(self, do, row, *more):
        """Return the result of the job (do, row, *more) from self.data, or None if it has no result yet."""
        if do == self.roof:
            return self.data["roof"]
        if do == self.measure:
            return next((run for run in self.records[row.name]["runs"] if run["pass"] == more[0]), None)
        if do == self.batch:
            cells = {(cell["batch_size"], cell["compile_mode"]): cell["run"] for cell in self.data["batches"]}
            return cells.get(more)
        return self.records[row.name]["profile" if do == self.profile else "fit"]

    def go(self):
        """Run all remaining jobs. Raises SystemExit if every script of the ladder fails in pass 1."""
        while left := self.left():
            job, title = next(iter(left.items()))
            do, row, *more = job
            self.stage = f"{title}, {len(left)} to go"
            self.progress.reset(self.bar, description=self.stage)
            said = do(row, *more)
            self.tried.add(job)
            self.save()
            if said:
                self.progress.console.print(said, highlight=False, markup=False, soft_wrap=True)
            tried = self.tried.issuperset((self.measure, row, 0) for row in self.ladder)
            if tried and not any(self.records[row.name]["median_ms"] for row in self.ladder):
                sys.exit("measure.py: error: every script failed")

    def save(self):
        if self.host["id"] not in (host["id"] for host in self.data["hosts"]):
            self.data["hosts"].append(self.host)
        if self.commit not in self.data["commits"]:
            self.data["commits"].append(self.commit)
        record.summarise(self.data)
        if all(self.records[row.name]["runs"] for row in self.ladder):
            self.data["finished"] = self.data["finished"] or record.now()  # finished: each script has a run
        self.data["complete"] = not self.left()
        record.save(self.path, self.data)

    def state(self):
        """Return lines that list the measured rows of each pass and the remaining stages."""
        lines = []
        for number in range(self.settings["repeat"]):
            runs = {row.name: self.result(self.measure, row, number) for row in self.plan}
            done = [name for name, run in runs.items() if run and not run["error"]]
            names = "" if len(done) in (0, len(runs)) else f": {', '.join(done)}"
            lines.append(f"pass {number + 1}: {len(done)} of {len(runs)} rows{names}")
        return [*lines, f"left: {', '.join(dict.fromkeys(self.left().values()))}"]

    # -- two helpers, and then one method for each kind of job

    def cache(self, row, *more):
        """Return the folder in which torch.compile caches a row's kernels."""
        return self.caches / re.sub(r"\W+", "_", " ".join([row.name, *map(str, more)]))

    def run(self, row, fresh=True, **changed):
        """Run a row's script and return (the run as a dict, the script's stdout).

        `changed` contains options that replace those in the settings. If the script fails, the dict contains the error.
        A fresh run starts with an empty cache, so its first step includes the compilation.
        """
        cache = self.cache(row, *changed.values())
        if fresh:
            shutil.rmtree(cache, ignore_errors=True)
        steps = changed.get("steps", self.settings["steps"])
        self.progress.reset(self.bar, total=steps, description=f"{self.stage}: {row.name}")
        about = {"host": self.host["id"], "busy": gauge.busy(self.gpu), "cold": not cache.exists(), "gpu": None}
        about["started"], start = record.now(), time.perf_counter()
        cache.mkdir(exist_ok=True, parents=True)

        def on_step():
            self.progress.advance(self.bar)
            if self.progress.tasks[0].completed == steps // 2 + 1:
                about["gpu"] = gauge.reading(self.gpu)  # while the GPU is under load

        text, errors, status = execute(command(row, self.settings, **changed), cache, on_step)
        about["process_s"] = round(time.perf_counter() - start, 2)
        return about | record.parse(text, errors, status, steps), text

    def roof(self, _):
        flags = ("model", "batch-size", "seq-len", "device")
        try:
            self.data["roof"] = ask("roof.py", *(f"--{flag}={self.settings[flag.replace('-', '_')]}" for flag in flags))
        except RuntimeError as error:  # the step times are valid even without the peak
            return f"peak not measured: {error}"

    def measure(self, row, number):
        kept = self.records[row.name]
        run, text = self.run(row, fresh=number == 0)
        others = [other for other in kept["runs"] if other["pass"] != number]
        kept["runs"] = sorted([*others, {"pass": number} | run], key=lambda run: run["pass"])
        kept["precision"] = record.precision_used(row.precision, text)
        busy = f" (busy: {run['busy']})" if run["busy"] else ""
        result = run["error"] or f"{record.median_ms(run):,.2f} ms"
        return f"pass {number + 1}/{self.settings['repeat']}  {row.name}: {result}{busy}"

    def profile(self, row):
        words = command(row, self.settings, steps=PROFILED_STEPS)
        text, errors, status = execute(["measure/kernels.py", *words], self.cache(row))
        error = record.parse(text, errors, status, PROFILED_STEPS)["error"]
        found = dict.fromkeys(("groups_ms", "attention", "reserved_gib"))
        if not error:  # search from the end, because a library may print lines after the JSON
            found = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith('{"groups_ms"')))
        self.records[row.name]["profile"] = {"host": self.host["id"]} | found | {"error": error}
        result = error or f"{sum(found['groups_ms'].values()):,.2f} ms"
        return f"profile  {row.name}: {result}"

    def batch(self, row, size, mode):
        run, text = self.run(row, batch_size=size, compile_mode=mode)
        cell = {"batch_size": size, "compile_mode": mode}
        others = [other for other in self.data["batches"] if {k: other[k] for k in cell} != cell]
        cell |= {"precision": record.precision_used(row.precision, text), "run": run}
        self.data["batches"] = sorted([*others, cell], key=lambda cell: (cell["batch_size"], cell["compile_mode"]))
        result = run["error"] or f"{record.median_ms(run):,.2f} ms"
        return f"B {size}, {mode}  {row.name}: {result}"

    def fit(self, row):
        """Find the largest power-of-two micro-batch that fits on the device, and measure its speed."""
        fits = [kept["fit"] for kept in self.data["rows"] if kept["fit"] and kept["fit"]["batch_size"]]
        fit = dict.fromkeys(("batch_size", "limit", "median_ms", "tokens_per_s", "peak_memory_gib", "error"))
        fit["host"], runs = self.host["id"], {}

        def holds(size):
            runs[size], _ = self.run(row, batch_size=size, steps=FIT_STEPS)
            error = runs[size]["error"]
            if error and not record.too_large(error):  # the run failed for a reason other than the batch size
                raise RuntimeError(error)
            return not error

        try:
            size = largest(holds, fits[-1]["batch_size"] if fits else 16)  # start at another row's result
            fit["limit"] = next((run["error"] for run in reversed(runs.values()) if run["error"]), None)
        except RuntimeError as error:
            size, fit["error"] = 0, str(error)
        said = fit["error"] or "no batch size fits"
        if size:
            speed = record.speed(self.data, size, record.median_ms(runs[size]), row.precision)
            fit |= {"batch_size": size, "peak_memory_gib": runs[size]["peak_memory_gib"]}
            fit |= {key: speed[key] for key in ("median_ms", "tokens_per_s")}
            said = f"B {size}, {fit['tokens_per_s']:,.0f} tok/s"
        self.records[row.name]["fit"] = fit
        return f"largest batch  {row.name}: {said}"


def begin(this, plan, name, out, line):
    """Return (folder, data) of an earlier measurement to continue, or of a new measurement.

    `this` contains the settings, the machine and a hash of the scripts. An earlier measurement is continued only if it
    has the same values. If `out` is None, it must also be incomplete or have been finished today.

    Raises ValueError if `out` contains a different measurement.
    """
    results, today = ROOT / "results", str(datetime.datetime.now(datetime.timezone.utc).date())
    for folder in [out] if out else sorted(path.parent for path in results.glob(f"{name}-*/ladder.json")):
        if (folder / "ladder.json").exists():
            data = record.read(folder / "ladder.json")
            other = [key for key in this if data[key] != this[key]]
            if not other and (out or not data["complete"] or data["finished"].startswith(today)):
                return folder, data
            if out:
                raise ValueError(f"{out} has a measurement with different {' and '.join(other)}: use another folder")
    free = itertools.chain([results / f"{name}-{today}"], (results / f"{name}-{today}-{n}" for n in itertools.count(2)))
    folder = out or next(folder for folder in free if not folder.exists())
    records = []
    for row in plan:
        words = shlex.join(["python", *command(row, this["settings"])])
        about = {"name": row.name, "kind": row.kind, "before": row.before, "precision": row.precision}
        records.append(about | {"command": words, "runs": [], "profile": None, "fit": None})
    start = {"command": line, "started": record.now(), "finished": None, "complete": False, "commits": []}
    data = this | start | {"hosts": [], "roof": None, "rows": records, "batches": []}
    record.summarise(data)
    return folder, data


def arguments():
    """Return (parser, parsed arguments, this command without --budget, --cache and --out)."""
    how = argparse.ArgumentParser(add_help=False)
    how.add_argument("--budget", type=float, metavar="MINUTES", help="stop after this time and keep the completed runs")
    how.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled kernels in this folder for later calls")
    how.add_argument("--out", type=Path, help="folder for the results, default results/<device>-<date>")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS, parents=[how])
    parser.add_argument("--model", help="default gpt2, or nano on a CPU")
    parser.add_argument("--batch-size", type=int, default=4, help="batch size B, default 4")
    parser.add_argument("--seq-len", type=int, help="sequence length T, default 1024, or 128 with nano")
    parser.add_argument("--steps", type=int, help="steps per run, default 50, or 20 on a CPU")
    parser.add_argument("--repeat", type=int, help="passes over the ladder, default 3, or 1 on a CPU")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, or cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NN",
        help="only these rungs (such as 05 06), and the script that each is compared with",
    )
    parser.add_argument("--peers", action="store_true", help="also measure loops built on transformers")
    parser.add_argument("--branches", action="store_true", help="also measure the scripts in branches/")
    parser.add_argument("--profile", action="store_true", help="also break the step time down by kind of kernel")
    parser.add_argument(
        "--batches", action="store_true", help="also measure rung 10 at B 1, 4, 16, 64 in 2 compile modes"
    )
    parser.add_argument("--fit", action="store_true", help="also measure the largest micro-batch that fits")
    args = parser.parse_args()
    if any(n is not None and n < 1 for n in (args.batch_size, args.seq_len, args.steps, args.repeat)):
        parser.error("--batch-size, --seq-len, --steps and --repeat must be at least 1")
    if args.budget is not None and args.budget <= 0:
        parser.error("--budget must be more than 0")
    return parser, args, shlex.join(["python", "measure/measure.py", *how.parse_known_args()[1]])


def look(args, plan):
    """Return (the values that must not change during a measurement, the host, the folder's name without the date).

    Raises ValueError if an option cannot be used on this machine, or RuntimeError if machine.py fails.
    """
    found = ask("machine.py", *(["--device", args.device] if args.device else []))
    cpu = found["device"] == "cpu"
    if cpu and args.fit:
        raise ValueError("--fit needs a GPU: on a CPU the largest batch would exhaust the machine's memory")
    if found["device"].startswith("cuda"):  # hide the other GPUs, because transformers.Trainer uses all visible GPUs
        seen, index = os.environ.get("CUDA_VISIBLE_DEVICES"), int(found["device"].partition(":")[2] or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[index].strip() if seen else str(index)
        found["device"] = "cuda"
    settings = {key: value for key, value in vars(args).items() if key not in ("budget", "cache", "out")}
    settings["model"] = args.model or ("nano" if cpu else "gpt2")
    settings["seq_len"] = args.seq_len or (128 if settings["model"] == "nano" else 1024)
    settings["steps"] = args.steps or (20 if cpu else 50)
    settings["repeat"] = args.repeat or (1 if cpu else 3)
    settings |= {"device": found["device"], "only": sorted(set(args.only))}
    machine = {key: found[key] for key in MACHINE} | ({} if cpu else {"threads": None})
    host = {key: value for key, value in found.items() if key not in MACHINE}
    known = [platform.node(), *(host[key] for key in ("gpu_id", "driver", "cpu", "cores"))]
    host = {"id": gauge.short_hash(json.dumps(known)), **host}
    host["gpu"] = gauge.reading(gauge.find_gpu(host["gpu_id"]))  # before the first run
    name = re.sub(r"[^a-z0-9]+", "-", f"{'cpu ' if cpu else ''}{machine['name']}".lower()).strip("-")
    sources = record.sources(row.words for row in plan)
    return {"settings": settings, "machine": machine, "sources_sha256": sources}, host, name


def resume(folder, data, plan, host, cache):
    """Run the remaining jobs of a measurement. The table is written even if a job fails or is interrupted."""
    new, bar = not folder.exists(), (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    folder.mkdir(parents=True, exist_ok=True)
    failed = any(row["error"] for row in data["rows"])
    next_time = "failed runs are retried" if failed else "move the folder away to measure again"
    done = f" (measured already: {next_time})" if data["complete"] else ""
    settings = data["settings"]
    print(f"{settings['model']}, B {settings['batch_size']}, T {settings['seq_len']} -> {folder}{done}", flush=True)
    try:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
            Progress(*bar, transient=True) as progress,
        ):
            caches = cache.resolve() if cache else Path(temporary)
            measurement = Measurement(folder / "ladder.json", data, plan, host, progress, caches)
            measurement.go()
            signal.setitimer(signal.ITIMER_REAL, 0)
    except SystemExit as end:
        if end.code == 0:
            print("the budget is spent")
        raise
    finally:
        if (folder / "ladder.json").exists():
            render.write(folder)
            if not data["complete"]:
                how_far = "there is more to measure" if data["finished"] else "not finished"
                print(*measurement.state(), f"{how_far}: run the same command again", sep="\n")
        elif new:
            shutil.rmtree(folder)  # nothing was measured


def stop(number, _):
    """Handle a signal in STOPS: raise SystemExit, which makes execute() stop the running script.

    ladder.json stays intact, because record.save() replaces the whole file in one operation.
    """
    for other in STOPS:
        signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt writing the table
    sys.exit(0 if number == signal.SIGALRM else 128 + number)


def main():
    parser, args, line = arguments()
    for number in STOPS:
        signal.signal(number, stop)
    if args.budget:  # leave a few seconds to write the table and the plots
        signal.setitimer(signal.ITIMER_REAL, 60 * args.budget - min(15, 15 * args.budget))
    try:
        plan = rows(args.peers, args.branches, args.only)
        this, host, name = look(args, plan)
        folder, data = begin(this, plan, name, args.out, line)
        resume(folder, data, plan, host, args.cache)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
