"""The whole ladder, measured on this machine:  python tools/measure.py   (make ladder)

Runs each script as a user does, in a process of its own, all with the same B, T and model, and reads the lines that it
prints. Writes results/<device>-<date>/ladder.json, the table as summary.txt, and plots. --repeat R goes over the ladder
R times, up and down in turns (A B C, C B A, A B C ...), so that a machine that drifts favours no rung; a speed-up is
the median over the passes of the quotient within a pass. Ctrl-C keeps what was measured: the same command goes on from
there, and tries again what failed.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import render
from ladder import ROOT, read_ladder
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

STEP = re.compile(r"^step +(\d+) \| loss (\d+\.\d+) \|.* dt +(\d+\.\d+) ms \| +[\d,]+ tok/s\b", re.MULTILINE)
MEMORY = re.compile(r"^median of steps .* peak memory (\d+\.\d+) GiB$", re.MULTILINE)
PARAMETERS = re.compile(r"^device .* ([\d,]+) parameters \| B \d+ T \d+$", re.MULTILINE)
ROOF_FLAGS = ("model", "batch-size", "seq-len", "device")
# Set by some containers and by nobody who reads the table: they would change what a script computes in.
OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
PROFILED_STEPS = 9  # 4 to settle, 1 to warm the profiler, 3 looked at, and the last ends them


@dataclass(frozen=True)
class Row:
    """A line of the table. `words` follow the Python interpreter's name in its command."""

    name: str
    words: tuple
    precision: str
    before: str | None
    kind: str  # rung, branch or peer


def rows(peers, branches):
    """The rungs of ladder.toml in order; if asked for, its branches, and then the peers: what others would run."""
    parts = ("rung", "branch") if branches else ("rung",)
    ladder = [rung for rung in read_ladder() if rung.part in parts]
    found = [Row(rung.file, (rung.file,), rung.precision, rung.before, rung.part) for rung in ladder]
    if peers:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "ddp_run.py")
        ten = "speedup_10_fused_adamw.py"
        for name, words, precision, before in (
            ("ddp_run.py under torchrun", torchrun, "bf16", "ddp_run.py"),
            ("transformers, plain loop", ("tools/peers.py", "plain"), "float32", ten),
            ("transformers, bf16, compiled", ("tools/peers.py", "compiled"), "bf16", ten),
            ("transformers.Trainer", ("tools/peers.py", "trainer"), "bf16", ten),
        ):
            found.append(Row(name, words, precision, before, "peer"))
    return found


def command(row, settings, **changed):
    """The words of a row's command after the interpreter's name."""
    flags = {name: settings[name] for name in ("model", "batch_size", "seq_len", "steps", "device")} | changed
    if row.words[-1] in (rung.file for rung in read_ladder()):
        source = (ROOT / row.words[-1]).read_text(encoding="utf-8")
        if '"--total-batch-size"' in source:  # one micro-batch per step, as in all the others
            flags["total_batch_size"] = flags["batch_size"] * flags["seq_len"]
    return [*row.words, *(str(w) for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v))]


def execute(words, cache, on_step=lambda: None):
    """Run Python with these words. Returns what it wrote to stdout, to stderr, and its status."""
    environment = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    out = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            for line in child.stdout:
                out.append(line)
                if line.startswith("step "):
                    on_step()
            status = child.wait()
        finally:  # Ctrl-C, or an error here: nothing goes on training behind the user's back
            if child.poll() is None:
                child.terminate()
                child.wait()
        errors.seek(0)
        return "".join(out), errors.read(), status


def parse(text, errors="", status=0, steps=None):
    """A run, from what a script printed. What it printed before it failed stays; a line cut in half is left out."""
    found = STEP.findall(text)
    memory, parameters = MEMORY.search(text), PARAMETERS.search(text)
    run = {
        "times_ms": [float(ms) for _, _, ms in found],
        "losses": [float(loss) for _, loss, _ in found],
        "peak_memory_gib": float(memory[1]) if memory else None,
        "parameters": int(parameters[1].replace(",", "")) if parameters else None,
        "error": None,
    }
    if status:
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        said = [line for line in said if ": error: " in line] or said  # torchrun adds a report of its own
        killed = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        run["error"] = said[-1] if said and status > 0 else killed
    elif steps is not None and len(found) != steps:
        run["error"] = f"ended after {len(found)} of {steps} steps"
    elif not found or min(steady(run["times_ms"])) <= 0:
        run["error"] = "a step of no length: the clock is too coarse for it" if found else "it printed no step"
    return run


def steady(times):
    """The steps that count, by the scripts' own rule: the first 10 are left out, under 20 steps the first half."""
    return times[10 if len(times) >= 20 else len(times) // 2 :]


def medians(row):
    """Pass -> median of its steady steps in ms, for the runs that succeeded."""
    return {run["pass"]: float(np.median(steady(run["times_ms"]))) for run in row["runs"] if not run["error"]}


def faster(row, other):
    """How many times as fast as another row: the median, least and largest quotient over the passes both ran in."""
    mine, its = medians(row), medians(other) if other else {}
    quotients = [its[number] / mine[number] for number in mine if number in its]
    if not quotients:
        return None
    return {"median": rounded(np.median(quotients)), "low": rounded(min(quotients)), "high": rounded(max(quotients))}


def rounded(number):
    return float(f"{number:.5g}")


def precision_used(wanted, said):
    """A rung's precision on this device: where it cannot, the script says so and goes on with the one below."""
    if wanted == "bf16" and "no bf16 here" in said:
        wanted = "tf32"
    return "float32" if wanted == "tf32" and "no TF32 here" in said else wanted


def summarise(data):
    """Write into every row what follows from its runs."""
    by_name = {row["name"]: row for row in data["rows"]}
    tokens = data["settings"]["batch_size"] * data["settings"]["seq_len"]
    for row in data["rows"]:
        good = [run for run in row["runs"] if not run["error"]]
        failed = [run["error"] for run in row["runs"] if run["error"]]
        row["error"] = failed[-1] if failed else None
        row |= dict.fromkeys(("median_ms", "quartiles_ms", "tokens_per_s", "over_baseline", "over_before"))
        row |= dict.fromkeys(("peak_memory_gib", "parameters", "first_step_s", "tflops", "roof_share"))
        if not good:
            continue
        pooled = [ms for run in good for ms in steady(run["times_ms"])]
        median = float(np.median(list(medians(row).values())))
        row["median_ms"] = rounded(median)
        row["quartiles_ms"] = [rounded(q) for q in np.percentile(pooled, [25, 75])]
        row["tokens_per_s"] = rounded(1000 * tokens / median)
        row["over_baseline"] = faster(row, data["rows"][0])
        row["over_before"] = faster(row, by_name.get(row["before"]))
        row["peak_memory_gib"] = max((run["peak_memory_gib"] for run in good if run["peak_memory_gib"]), default=None)
        row["parameters"] = good[0]["parameters"]
        cold = [run["times_ms"][0] for run in good if run["cold"]]
        row["first_step_s"] = rounded(cold[0] / 1000) if cold else None
        if data["roof"]:
            flops = data["roof"]["flops_per_token"]
            row["tflops"] = rounded(row["tokens_per_s"] * flops / 1e12)
            if ceiling := data["roof"]["ceilings_tflops"].get(row["precision"]):
                row["roof_share"] = rounded(row["tflops"] / ceiling)


def largest(fits, sizes, start):
    """The last of the ascending sizes that fits, or None: ever longer strides from sizes[start], then halving."""
    fit, miss, at, stride = -1, len(sizes), start, 1  # the last index known to fit, the first known not to
    while miss - fit > 1:
        if fits(sizes[at]):
            fit = at
        else:
            miss = at
        if fit >= 0 and miss < len(sizes):
            at = (fit + miss) // 2
        else:
            at = min(at + stride, len(sizes) - 1) if fit >= 0 else max(at - stride, 0)
            stride *= 2
    return sizes[fit] if fit >= 0 else None


def sizes_up_to(top):
    """Batch sizes worth trying: 1 to 8, then four to an octave (10, 12, 14, 16, 20, 24, 28, 32, 40 ...)."""
    grid, octave = list(range(1, 8)), 8
    while octave <= top:
        grid += [octave * quarters // 4 for quarters in (4, 5, 6, 7)]
        octave *= 2
    return [size for size in grid if size <= top]


class Measurement:
    """A ladder.json in the making. Each run is saved before the next begins."""

    def __init__(self, path, data, progress, caches):
        self.path, self.data, self.progress, self.caches = path, data, progress, caches
        self.settings, self.plan = data["settings"], rows(data["settings"]["peers"], data["settings"]["branches"])
        rounds = self.settings["repeat"] + self.settings["profile"] + self.settings["fit"]
        self.task, self.done = progress.add_task("", total=rounds * len(self.plan)), 0

    def cache(self, row):
        """Where torch.compile keeps a row's kernels: empty before its first run, whose first step compiles them all."""
        return Path(self.caches) / re.sub(r"\W", "_", row.name)

    def run(self, row, title, **changed):
        """(the run, what the script wrote to stdout). A script that fails, in whatever way, is a run with an error."""
        steps = changed.get("steps", self.settings["steps"])
        cold, started, start, count = not self.cache(row).exists(), now(), time.perf_counter(), 0
        self.cache(row).mkdir(exist_ok=True)

        def on_step():
            nonlocal count
            count += 1
            words = f"{title}  {row.name}  step {count}/{steps}"
            self.progress.update(self.task, description=words, completed=self.done + count / steps)

        self.progress.update(self.task, description=f"{title}  {row.name}")
        text, errors, status = execute(command(row, self.settings, **changed), self.cache(row), on_step)
        run = parse(text, errors, status, steps)
        return {"started": started, "cold": cold, "process_s": round(time.perf_counter() - start, 2)} | run, text

    def next(self, title, row, result):
        """Save, and say what a row came to."""
        self.data["finished"] = None
        summarise(self.data)
        render.save(self.path, self.data)
        self.progress.console.print(f"{title}  {row.name}: {result}", highlight=False, markup=False, soft_wrap=True)

    def each(self, down=False):
        """The rows with their records, the bar moved on after each."""
        pairs = list(zip(self.plan, self.data["rows"], strict=True))
        for row, record in reversed(pairs) if down else pairs:
            yield row, record
            self.done += 1
            self.progress.update(self.task, completed=self.done)

    def roof(self):
        if not self.data["roof"]:
            self.progress.update(self.task, description="the roof")
            flags = (f"--{flag}={self.settings[flag.replace('-', '_')]}" for flag in ROOF_FLAGS)
            try:
                self.data["roof"] = ask("roof.py", *flags)
            except RuntimeError as error:  # the speeds hold without it
                self.progress.console.print(f"no roof: {error}", highlight=False, markup=False, soft_wrap=True)

    def passes(self):
        """Raises RuntimeError if every script failed in a whole pass: another pass would end the same way."""
        for number in range(self.settings["repeat"]):
            title = f"pass {number + 1}/{self.settings['repeat']}"
            for row, record in self.each(down=number % 2 == 1):
                if any(run["pass"] == number and not run["error"] for run in record["runs"]):
                    continue
                run, text = self.run(row, title)
                others = [other for other in record["runs"] if other["pass"] != number]
                record["runs"] = sorted([*others, {"pass": number} | run], key=lambda run: run["pass"])
                record["precision"] = precision_used(row.precision, text)
                self.next(title, row, run["error"] or f"{medians(record)[number]:,.2f} ms")
            if all(row["median_ms"] is None for row in self.data["rows"]):
                raise RuntimeError("every script failed")

    def profiles(self):
        for row, record in self.each():
            if not row.words[0].endswith(".py") or (record["profile"] and not record["profile"]["error"]):
                continue
            self.progress.update(self.task, description=f"profile  {row.name}")
            words = command(row, self.settings, steps=PROFILED_STEPS)
            text, errors, status = execute(["tools/kernels.py", *words], self.cache(row))
            error = parse(text, errors, status, PROFILED_STEPS)["error"]
            groups = None if error else json.loads(text.splitlines()[-1])
            record["profile"] = {"groups_ms": groups, "error": error}
            self.next("profile", row, error or f"{sum(groups.values()):,.2f} ms")

    def fits(self):
        start = self.settings["batch_size"]
        for row, record in self.each():
            if not record["fit"] or record["fit"]["error"]:
                record["fit"] = fit = self.fit(row, start)
                self.next("fit", row, fit["error"] or f"B {fit['batch_size']}, {fit['tokens_per_s']:,.0f} tok/s")
            start = record["fit"]["batch_size"] or start  # the next row's will be near

    def fit(self, row, start):
        """The largest micro-batch that the device holds, and the speed with it."""
        fit = dict.fromkeys(("batch_size", "limit", "median_ms", "tokens_per_s", "peak_memory_gib", "error"))

        def fits(size):
            error = self.run(row, f"fit  B {size}", batch_size=size, steps=2)[0]["error"]
            fit["limit"] = error or fit["limit"]
            return not error

        grid = sizes_up_to(4096)
        size = largest(fits, grid, grid.index(max(size for size in grid if size <= start)))
        while size:
            run, _ = self.run(row, f"fit  B {size}", batch_size=size)
            if not run["error"]:
                median = float(np.median(steady(run["times_ms"])))
                speed = rounded(1000 * size * self.settings["seq_len"] / median)
                found = {"median_ms": rounded(median), "tokens_per_s": speed, "peak_memory_gib": run["peak_memory_gib"]}
                return fit | found | {"batch_size": size}
            size = max((smaller for smaller in grid if smaller < size), default=None)  # it fitted for 2 steps only
        return fit | {"error": fit["limit"]}


def ask(tool, *words):
    """What a tool of the project prints as JSON. Raises ValueError if it refuses its arguments, else RuntimeError."""
    with tempfile.TemporaryDirectory() as cache:
        text, errors, status = execute([f"tools/{tool}", *words], cache)
    if status:
        why = parse(text, errors, status)["error"].rpartition(": error: ")[2]
        raise ValueError(why) if status == 2 else RuntimeError(why)
    return json.loads(text)


def commit():
    """The commit that is measured, marked where a tracked file differs from it; None where git does not know."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode == 0
    return head.stdout.strip() + ("" if clean else " and uncommitted changes") if head.returncode == 0 else None


def sources():
    """A hash of all that is measured and measures: results of other sources are another measurement."""
    files = [ROOT / rung.file for rung in read_ladder()]
    files += [ROOT / "ladder.toml", ROOT / "input.txt", *sorted((ROOT / "tools").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def begin(this, name, out):
    """(the folder, its measurement): one that was interrupted is gone on with, else a new one begins.

    Raises ValueError where `out`, the folder that the user named, holds another.
    """
    results, today = ROOT / "results", str(datetime.datetime.now(datetime.timezone.utc).date())
    for folder in [out] if out else sorted(path.parent for path in results.glob(f"{name}-*/ladder.json")):
        if (folder / "ladder.json").exists():
            data = render.read(folder / "ladder.json")
            other = [key for key in this if data[key] != this[key]]
            if not other and (out or not data["finished"] or data["finished"].startswith(today)):
                return folder, data
            if out:
                raise ValueError(f"{out} holds a measurement with other {' and '.join(other)}: name another folder")
    free = itertools.chain([results / f"{name}-{today}"], (results / f"{name}-{today}-{n}" for n in itertools.count(2)))
    folder = out or next(folder for folder in free if not folder.exists())
    records = []
    for row in rows(this["settings"]["peers"], this["settings"]["branches"]):
        words = shlex.join(["python", *command(row, this["settings"])])
        about = {"name": row.name, "kind": row.kind, "before": row.before, "precision": row.precision}
        records.append(about | {"command": words, "runs": [], "profile": None, "fit": None})
    line = shlex.join(["python", "tools/measure.py", *sys.argv[1:]])
    return folder, this | {
        "commit": commit(),
        "command": line,
        "started": now(),
        "finished": None,
        "roof": None,
        "rows": records,
    }


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", help="default gpt2; nano on a CPU")
    parser.add_argument("--batch-size", type=int, default=4, help="B, default 4")
    parser.add_argument("--seq-len", type=int, help="T, default 1024; 128 with nano")
    parser.add_argument("--steps", type=int, help="per run, default 50; 20 on a CPU")
    parser.add_argument("--repeat", type=int, help="passes over the ladder, default 3; 1 on a CPU")
    parser.add_argument("--device", help="default: the accelerator that PyTorch finds, else cpu")
    parser.add_argument("--peers", action="store_true", help="also transformers' training loops, and torchrun")
    parser.add_argument("--branches", action="store_true", help="also the scripts in branches/")
    parser.add_argument("--profile", action="store_true", help="also where the time of a step goes")
    parser.add_argument("--fit", action="store_true", help="also the largest micro-batch that fits, and its speed")
    parser.add_argument("--out", type=Path, help="folder, default results/<device>-<date>")
    args = parser.parse_args()
    if any(n is not None and n < 1 for n in (args.batch_size, args.seq_len, args.steps, args.repeat)):
        parser.error("--batch-size, --seq-len, --steps and --repeat must be at least 1")
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))  # the child is ended, the file is whole

    try:
        machine = ask("machine.py", *(["--device", args.device] if args.device else []))
        cpu = machine["device"] == "cpu"
        if cpu and args.fit:
            raise ValueError(
                "--fit takes a GPU: on a CPU the largest batch would take the machine's memory from all else"
            )
        if machine["device"].startswith("cuda"):  # that GPU alone: Trainer would take every one it sees
            seen, index = os.environ.get("CUDA_VISIBLE_DEVICES"), int(machine["device"].partition(":")[2] or 0)
            os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[index] if seen else str(index)
            machine["device"] = "cuda"
        model = args.model or ("nano" if cpu else "gpt2")
        settings = {
            "model": model,
            "batch_size": args.batch_size,
            "seq_len": args.seq_len or (128 if model == "nano" else 1024),
            "steps": args.steps or (20 if cpu else 50),
            "device": machine["device"],
            "repeat": args.repeat or (1 if cpu else 3),
            "peers": args.peers,
            "branches": args.branches,
            "profile": args.profile,
            "fit": args.fit,
        }
        name = re.sub(r"[^a-z0-9]+", "-", f"{'cpu ' if cpu else ''}{machine['name']}".lower()).strip("-")
        this = {"settings": settings, "machine": machine, "sources_sha256": sources()}
        folder, data = begin(this, name, args.out)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))

    done = ""
    if data["finished"]:
        again = any(row["error"] for row in data["rows"])
        done = f" (measured already: {'what failed is tried again' if again else 'move it away to measure anew'})"
    print(f"{settings['model']}, B {settings['batch_size']}, T {settings['seq_len']} -> {folder}{done}", flush=True)
    bar = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    try:
        with (
            tempfile.TemporaryDirectory() as caches,
            Progress(*bar, transient=True, speed_estimate_period=3600) as progress,
        ):
            measurement = Measurement(folder / "ladder.json", data, progress, caches)
            measurement.roof()
            measurement.passes()
            if args.profile:
                measurement.profiles()
            if args.fit:
                measurement.fits()
        data["finished"] = data["finished"] or now()
        render.save(folder / "ladder.json", data)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except RuntimeError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    finally:
        if (folder / "ladder.json").exists():
            render.write(folder)
            if not data["finished"]:
                print("not finished: run the same command again to continue")
        elif new:
            folder.rmdir()  # nothing was measured


if __name__ == "__main__":
    main()
