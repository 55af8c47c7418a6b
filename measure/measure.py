"""The whole ladder, measured on this machine:  python measure/measure.py   (make ladder)

Runs each script as a user does, in a process of its own, all with the same B, T and model, and reads the lines that it
prints. Writes results/<device>-<date>/ladder.json, the table as summary.txt, and plots. --repeat R goes over the ladder
R times, up and down in turns (A B C, C B A, A B C ...), so that a machine that drifts favours no rung; a speed-up is
the median over the passes of the quotient within a pass. What matters most is measured first: the peak of the device,
one pass over the ladder, the profile, the table of batch sizes, the peers, further passes, the largest batch.

A measurement that was cut, by Ctrl-C or by --budget, is kept: the same command continues it and retries what failed.
It may continue on another host with the same GPU, torch and CUDA. Each pass belongs to one host: of a pass that was
cut, the runs of another host are repeated here, last of all.
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

PROFILED_STEPS = 12  # 4 to settle, 1 to warm the profiler, 3 looked at; fp16 leaves out updates that overflow
FIT_STEPS = 10
BATCHES = list(itertools.product((4, 16, 64), ("default", "reduce-overhead")))
MACHINE = ("device", "name", "capability", "torch", "cuda", "threads")  # the same in all of a measurement


class TimeUp(Exception):
    """The budget is spent."""


def largest(fits, start=16):
    """The largest power of two that fits, or 0: 16, 64 and 128 are tried first, then on by doubling or halving."""
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
    """A ladder.json in the making. Each run is saved before the next begins."""

    def __init__(self, path, data, plan, host, progress, caches):
        self.path, self.data, self.plan, self.host, self.progress = path, data, plan, host, progress
        self.settings, self.caches, self.commit = data["settings"], caches, record.commit()
        self.records = {row["name"]: row for row in data["rows"]}
        self.gpu, self.tried = gauge.find_gpu(host["gpu_id"]), set()
        self.bar, self.stage = progress.add_task(""), ""

    def stages(self):
        """(title, jobs), the most important first. A job is (its method, its arguments); done ones are left out."""
        ladder = [row for row in self.plan if row.kind != "peer"]
        peers = [row for row in self.plan if row.kind == "peer"]
        ten = next((row for row in rows() if row.name == TEN), None)
        batches = [(ten, *cell) for cell in BATCHES] if self.settings["batches"] else []
        yield "peak", self.left([(self.roof, None)])
        yield "pass 1", self.passing(0, ladder)
        yield "profile", self.profiling(ladder)
        yield "batch sizes", self.left([(self.batch, *cell) for cell in batches])
        yield "pass 1", self.passing(0, peers)
        yield "profile", self.profiling(peers)
        for number in range(self.settings["repeat"]):
            yield f"pass {number + 1}", self.passing(number, self.plan)
        yield "largest batch", self.left([(self.fit, row) for row in self.plan if self.settings["fit"]])
        for number in range(self.settings["repeat"]):
            yield f"pass {number + 1} on one host", self.of_other_hosts(number)

    def left(self, jobs):
        """Of these jobs the ones with no result, or with one that failed before this call."""
        results = [(job, self.result(*job)) for job in jobs]
        return [job for job, found in results if (not found or found.get("error")) and job not in self.tried]

    def result(self, do, row, *more):
        """What a job has in the record, or None."""
        if do == self.roof:
            return self.data["roof"]
        if do == self.measure:
            return next((run for run in self.records[row.name]["runs"] if run["pass"] == more[0]), None)
        if do == self.batch:
            cells = {(cell["batch_size"], cell["compile_mode"]): cell["run"] for cell in self.data["batches"]}
            return cells.get(more)
        return self.records[row.name]["profile" if do == self.profile else "fit"]

    def passing(self, number, plan):
        """Of a pass what is left. Every second pass goes down the ladder."""
        return self.left([(self.measure, row, number) for row in (reversed(plan) if number % 2 else plan)])

    def of_other_hosts(self, number):
        """Of a pass that two hosts have parts of, what was not measured on this one."""
        runs = [(row, self.result(self.measure, row, number)) for row in self.plan]
        hosts = {row: run["host"] for row, run in runs if run and not run["error"]}
        cut = len(set(hosts.values())) > 1
        return [(self.measure, row, number) for row, host in hosts.items() if cut and host != self.host["id"]]

    def profiling(self, plan):
        wanted = [row for row in plan if self.settings["profile"] and row.words[0].endswith(".py")]
        return self.left([(self.profile, row) for row in wanted])

    def go(self):
        """Do all that is left. Raises RuntimeError if every script failed."""
        for title, jobs in self.stages():
            for at, job in enumerate(jobs):
                do, row, *more = job
                self.stage = f"{title}, {at + 1}/{len(jobs)}"
                self.progress.reset(self.bar, description=self.stage)
                do(row, *more)
                self.tried.add(job)
            measured = {row.name for do, row, *_ in self.tried if do == self.measure}
            if measured and all(self.records[name]["median_ms"] is None for name in measured):
                raise RuntimeError("every script failed")

    def state(self):
        """Which rows each pass has, and what is left."""
        lines = []
        for number in range(self.settings["repeat"]):
            runs = {row.name: self.result(self.measure, row, number) for row in self.plan}
            done = [name for name, run in runs.items() if run and not run["error"]]
            names = "" if len(done) in (0, len(runs)) else f": {', '.join(done)}"
            lines.append(f"pass {number + 1}: {len(done)} of {len(runs)} rows{names}")
        return [*lines, f"left: {', '.join(dict.fromkeys(title for title, jobs in self.stages() if jobs))}"]

    # -- one run of each kind

    def cache(self, row, *more):
        """The folder where torch.compile keeps a row's kernels."""
        return self.caches / re.sub(r"\W+", "_", " ".join([row.name, *map(str, more)]))

    def run(self, row, cache, fresh=True, **changed):
        """(the run, what the script wrote to stdout). A script that fails, in whatever way, is a run with an error.

        A fresh run finds nothing in its cache: its first step compiles everything.
        """
        if fresh:
            shutil.rmtree(cache, ignore_errors=True)
        steps = changed.get("steps", self.settings["steps"])
        self.progress.reset(self.bar, total=steps, description=f"{self.stage}: {row.name}")
        busy, cold, count, gpu = gauge.busy(self.gpu), not cache.exists(), 0, None
        cache.mkdir(exist_ok=True, parents=True)

        def on_step():
            nonlocal count, gpu
            count += 1
            gpu = gauge.reading(self.gpu) if count == steps // 2 + 1 else gpu  # under load
            self.progress.advance(self.bar)

        about = {"started": record.now(), "host": self.host["id"], "busy": busy, "cold": cold}
        start = time.perf_counter()
        text, errors, status = execute(command(row, self.settings, **changed), cache, on_step)
        about |= {"process_s": round(time.perf_counter() - start, 2), "gpu": gpu}
        return about | record.parse(text, errors, status, steps), text

    def save(self):
        if self.host["id"] not in (host["id"] for host in self.data["hosts"]):
            self.data["hosts"].append(self.host)
        if self.commit not in self.data["commits"]:
            self.data["commits"].append(self.commit)
        record.summarise(self.data)
        if all(other["runs"] for other in self.data["rows"] if other["kind"] != "peer"):
            self.data["finished"] = self.data["finished"] or record.now()  # there is a whole table
        record.save(self.path, self.data)

    def next(self, title, row, result):
        """Save, and say what a row came to."""
        self.save()
        self.say(f"{title}  {row.name}: {result}")

    def say(self, text):
        self.progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def roof(self, _):
        flags = ("model", "batch-size", "seq-len", "device")
        try:
            self.data["roof"] = ask("roof.py", *(f"--{flag}={self.settings[flag.replace('-', '_')]}" for flag in flags))
        except RuntimeError as error:  # the speeds hold without it
            self.say(f"no peak: {error}")
        self.save()

    def measure(self, row, number):
        kept = self.records[row.name]
        run, text = self.run(row, self.cache(row), fresh=number == 0)
        others = [other for other in kept["runs"] if other["pass"] != number]
        kept["runs"] = sorted([*others, {"pass": number} | run], key=lambda run: run["pass"])
        kept["precision"] = record.precision_used(row.precision, text)
        busy = f" (busy: {run['busy']})" if run["busy"] else ""
        title = f"pass {number + 1}/{self.settings['repeat']}"
        self.next(title, row, (run["error"] or f"{record.median_ms(run):,.2f} ms") + busy)

    def profile(self, row):
        words = command(row, self.settings, steps=PROFILED_STEPS)
        text, errors, status = execute(["measure/kernels.py", *words], self.cache(row))
        error = record.parse(text, errors, status, PROFILED_STEPS)["error"]
        found = dict.fromkeys(("groups_ms", "attention", "reserved_gib"))
        if not error:  # a library may print something after it
            found = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith('{"groups_ms"')))
        self.records[row.name]["profile"] = {"host": self.host["id"]} | found | {"error": error}
        self.next("profile", row, error or f"{sum(found['groups_ms'].values()):,.2f} ms")

    def batch(self, row, size, mode):
        run, text = self.run(row, self.cache(row, size, mode), batch_size=size, compile_mode=mode)
        cell = {"batch_size": size, "compile_mode": mode}
        others = [other for other in self.data["batches"] if {k: other[k] for k in cell} != cell]
        cell |= {"precision": record.precision_used(row.precision, text), "run": run}
        self.data["batches"] = sorted([*others, cell], key=lambda cell: (cell["batch_size"], cell["compile_mode"]))
        self.next(f"B {size}, {mode}", row, run["error"] or f"{record.median_ms(run):,.2f} ms")

    def fit(self, row):
        """The largest micro-batch of a power of two that the device holds, and the speed with it."""
        done = [self.records[other.name]["fit"] or {} for other in self.plan[: self.plan.index(row)]]
        sizes = [fit["batch_size"] for fit in done if fit.get("batch_size")]
        nothing = dict.fromkeys(("batch_size", "limit", "median_ms", "tokens_per_s", "peak_memory_gib", "error"))
        fit = nothing | {"host": self.host["id"]}

        def fits(size):
            run, _ = self.run(row, self.cache(row, size), batch_size=size, steps=FIT_STEPS)
            if not run["error"]:
                found = record.speed(self.data, size, record.median_ms(run), row.precision)
                fit.update({k: found[k] for k in ("median_ms", "tokens_per_s")} | {"batch_size": size})
                fit["peak_memory_gib"] = run["peak_memory_gib"]
            elif record.too_large(run["error"]):
                fit["limit"] = run["error"]
            else:
                raise RuntimeError(run["error"])
            return not run["error"]

        try:
            largest(fits, sizes[-1] if sizes else 16)  # the next will be near
        except RuntimeError as error:  # it says nothing of what fits
            fit |= nothing | {"error": str(error)}
        self.records[row.name]["fit"] = fit
        found = f"B {fit['batch_size']}, {fit['tokens_per_s']:,.0f} tok/s" if fit["batch_size"] else "none fits"
        self.next("largest batch", row, fit["error"] or found)


def begin(this, plan, name, out, line):
    """(the folder, its measurement): one that is not complete is continued, else a new one begins.

    Raises ValueError where `out`, the folder that the user named, holds another.
    """
    results, today = ROOT / "results", str(datetime.datetime.now(datetime.timezone.utc).date())
    for folder in [out] if out else sorted(path.parent for path in results.glob(f"{name}-*/ladder.json")):
        if (folder / "ladder.json").exists():
            data = record.read(folder / "ladder.json")
            other = [key for key in this if data[key] != this[key]]
            if not other and (out or not data["complete"] or data["finished"].startswith(today)):
                return folder, data
            if out:
                raise ValueError(f"{out} holds a measurement with other {' and '.join(other)}: name another folder")
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
    """(the parser, its arguments, the command without what does not change what is measured)."""
    how = argparse.ArgumentParser(add_help=False)
    how.add_argument("--budget", type=float, metavar="MINUTES", help="end by then, with what matters most")
    how.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled kernels there for the next call")
    how.add_argument("--out", type=Path, help="folder, default results/<device>-<date>")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS, parents=[how])
    parser.add_argument("--model", help="default gpt2; nano on a CPU")
    parser.add_argument("--batch-size", type=int, default=4, help="B, default 4")
    parser.add_argument("--seq-len", type=int, help="T, default 1024; 128 with nano")
    parser.add_argument("--steps", type=int, help="per run, default 50; 20 on a CPU")
    parser.add_argument("--repeat", type=int, help="passes over the ladder, default 3; 1 on a CPU")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, else cpu")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NN", help="these rungs and the one before each: 05 06"
    )
    parser.add_argument("--peers", action="store_true", help="also transformers' training loops, and torchrun")
    parser.add_argument("--branches", action="store_true", help="also the scripts in branches/")
    parser.add_argument("--profile", action="store_true", help="also where the time of a step goes, in which kernels")
    parser.add_argument("--batches", action="store_true", help="also rung 10 at B 4, 16 and 64 in two compile modes")
    parser.add_argument("--fit", action="store_true", help="also the largest micro-batch that fits, and its speed")
    args = parser.parse_args()
    if any(n is not None and n < 1 for n in (args.batch_size, args.seq_len, args.steps, args.repeat)):
        parser.error("--batch-size, --seq-len, --steps and --repeat must be at least 1")
    if args.budget is not None and args.budget <= 0:
        parser.error("--budget must be more than 0")
    return parser, args, shlex.join(["python", "measure/measure.py", *how.parse_known_args()[1]])


def look(args):
    """(settings, the machine, the host, a name for the folder). Raises RuntimeError, ValueError."""
    found = ask("machine.py", *(["--device", args.device] if args.device else []))
    cpu = found["device"] == "cpu"
    if cpu and args.fit:
        raise ValueError("--fit takes a GPU: on a CPU the largest batch would take the machine's memory from all else")
    if found["device"].startswith("cuda"):  # that GPU alone: Trainer would take every one it sees
        seen, index = os.environ.get("CUDA_VISIBLE_DEVICES"), int(found["device"].partition(":")[2] or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[index].strip() if seen else str(index)
        found["device"] = "cuda"
    model = args.model or ("nano" if cpu else "gpt2")
    settings = {
        "model": model,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len or (128 if model == "nano" else 1024),
        "steps": args.steps or (20 if cpu else 50),
        "device": found["device"],
        "repeat": args.repeat or (1 if cpu else 3),
        "only": sorted(set(args.only)),
    } | {name: getattr(args, name) for name in ("peers", "branches", "profile", "batches", "fit")}
    machine = {key: found[key] for key in MACHINE} | ({} if cpu else {"threads": None})
    host = {key: value for key, value in found.items() if key not in MACHINE}
    known = [platform.node(), *(host[key] for key in ("gpu_id", "driver", "cpu", "cores"))]
    host = {"id": gauge.short_hash(json.dumps(known)), **host}
    host["gpu"] = gauge.reading(gauge.find_gpu(host["gpu_id"]))  # before any load
    name = re.sub(r"[^a-z0-9]+", "-", f"{'cpu ' if cpu else ''}{machine['name']}".lower()).strip("-")
    return settings, machine, host, name


def main():
    started = time.monotonic()
    parser, args, line = arguments()
    # the table and the plots take some seconds
    ends = started + (60 * args.budget - min(15, 15 * args.budget) if args.budget else float("inf"))

    def stop(number, _):
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(other, signal.SIG_IGN)  # the table is written
        if number == signal.SIGALRM:
            raise TimeUp
        sys.exit(128 + number)  # the child is ended, the file is whole

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    try:
        settings, machine, host, name = look(args)
        plan = rows(args.peers, args.branches, args.only)
        sources = record.sources(row.words for row in plan)
        this = {"settings": settings, "machine": machine, "sources_sha256": sources}
        folder, data = begin(this, plan, name, args.out, line)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))

    next_time = (
        "what failed is tried again" if any(r["error"] for r in data["rows"]) else "move it away to measure anew"
    )
    done = f" (measured already: {next_time})" if data["complete"] else ""
    print(f"{settings['model']}, B {settings['batch_size']}, T {settings['seq_len']} -> {folder}{done}", flush=True)
    bar = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    try:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
            Progress(*bar, transient=True) as progress,
        ):
            caches = args.cache.resolve() if args.cache else Path(temporary)
            measurement = Measurement(folder / "ladder.json", data, plan, host, progress, caches)
            try:
                if args.budget:
                    signal.setitimer(signal.ITIMER_REAL, max(ends - time.monotonic(), 0.001))
                measurement.go()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeUp:
                measurement.say("the budget is spent")
            data["complete"] = not any(jobs for _, jobs in measurement.stages())
            record.summarise(data)
            record.save(folder / "ladder.json", data)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except RuntimeError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    finally:
        if (folder / "ladder.json").exists():
            render.write(folder)
            if not data["complete"]:
                how_far = "there is more to measure" if data["finished"] else "not finished"
                print(*measurement.state(), f"{how_far}: run the same command again", sep="\n")
        elif new:
            shutil.rmtree(folder)  # nothing was measured


if __name__ == "__main__":
    main()
