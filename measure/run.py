"""Measure the whole ladder on this machine:  python -m measure.run   (make ladder)

This program runs each script in a separate process and parses the lines that the script prints. In a pass, each script
runs once, with the same model, batch size B and sequence length T. With --peers, training loops around `transformers`
run right after rung 10. Each finished run is logged as a line of runs.jsonl in results/<device>-<date>/. With
--profile, the kernels of one step of each script are also written to kernels.json in that folder. At the end, the
program prints the tables and draws the plots.

--repeat R makes R passes over the ladder. Every second pass runs in reverse order (A B C, C B A, A B C ...) to reduce
the effect of drift in the machine's speed. A speed-up is the ratio of two step times in the same pass. For each script,
the table shows the median of these speed-ups. The runs are ordered by importance: the device's peak, one pass over the
ladder, the profile, the batch sizes, and the other passes.

If Ctrl-C, a crash or --budget ends a measurement early, all completed runs are kept. To continue, run the command again
within a day, or name the folder with --out. The program then skips the successful runs in the log and retries the
failed runs. You can also add options, such as --peers, or more passes.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dev.ladder import ROOT, read_ladder
from measure import device, plots, records, timeline
from measure.records import OVERRIDES, PEERS, TEN

# kernels.py needs 8 optimizer updates: 4 before the profiler starts, 1 for its warm-up, and 3 that are profiled. The
# other 4 steps make up for updates that fp16 skips.
PROFILED_STEPS = 12
BATCHES = list(itertools.product((1, 4, 16, 64), ("default", "reduce-overhead")))
SAME_HOST = ("id", "device", "name", "capability", "torch", "cuda", "threads")  # must not change within a measurement
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # Ctrl-C, shutdown, end of the budget


def execute(words, cache, on_step=lambda: None):
    """Run Python with these arguments, call on_step() after each step, and return (stdout, stderr, exit status).

    `cache` is the folder in which torch.compile caches its kernels.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    command, out = [sys.executable, *map(str, words)], []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in child.stdout:
                out.append(line)
                if line.startswith("step "):
                    on_step()
            status = child.wait()
        finally:  # after Ctrl-C, the end of the budget or an error, the child must not keep training in the background
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        errors.seek(0)
        return "".join(out), errors.read(), status


def ask(module, *words):
    """Run a module of measure/ in a separate process and return the JSON that it prints.

    Raises ValueError if the module rejects its options, and RuntimeError if it fails for another reason.
    """
    with tempfile.TemporaryDirectory() as cache:
        text, errors, status = execute(["-m", f"measure.{module}", *words], cache)
    if status:
        why = records.parse(text, errors, status)["error"].rpartition(": error: ")[2]
        raise ValueError(why) if status == 2 else RuntimeError(why)
    return json.loads(text)


def scripts(peers=False, branches=False, only=()):
    """Return the scripts to measure as a list of (name, kind, precision), with the peers right after rung 10.

    `only` contains short names (01 ... 10, ddp, fsdp, bf16). If `only` is not empty, the list contains these scripts
    and the scripts that they are compared with, instead of all rungs. Raises ValueError for an unknown name.
    """
    ladder = {rung.number: rung for rung in read_ladder() if rung.part in ("rung", "branch")}
    if unknown := set(only) - ladder.keys():
        raise ValueError(f"--only {min(unknown)}: expected one of {', '.join(ladder)}")
    all_of = {"rung": not only, "branch": branches}
    wanted = {rung.file for rung in ladder.values() if all_of[rung.part] or rung.number in only}
    wanted |= {rung.before for rung in ladder.values() if rung.file in wanted} | ({TEN} if peers else set())
    found = []
    for rung in ladder.values():
        found += [(rung.file, rung.part, rung.precision)] if rung.file in wanted else []
        if rung.file == TEN and peers:
            found += [(name, "peer", precision) for name, (_, precision) in PEERS.items()]
    return found


def command(script, flags):
    """Return Python's command-line arguments for running a script or a peer with these options."""
    words = ["-m", "measure.peers", PEERS[script][0]] if script in PEERS else [script]
    if script in {rung.file for rung in read_ladder() if rung.kind == "scale"}:
        # One micro-batch per optimizer step, as in the other scripts.
        flags = flags | {"total_batch_size": flags["batch_size"] * flags["seq_len"]}
    return [*words, *records.options(flags)]


def plan(args):
    """Return the runs of a measurement in order, each a dict with the script, kind, pass, source and settings."""
    todo, settings = [], {key: getattr(args, key) for key in ("model", "batch_size", "seq_len", "steps")}

    def add(script, kind, precision, pass_number=None, **more):
        files = ["measure/roof.py"] if script == "roof" else ["measure/peers.py", TEN] if script in PEERS else [script]
        files += ["measure/kernels.py"] if kind == "profile" else []
        run = {"script": script, "kind": kind, "pass": pass_number}
        run["settings"] = settings | {"precision": precision} | more
        todo.append(run | {"source": records.source(*files)})

    found = scripts(args.peers, args.branches, args.only)
    add("roof", "roof", None)
    for script, kind, precision in found:
        add(script, kind, precision, 1)
    if args.profile:
        for script, _, precision in found:
            add(script, "profile", precision, steps=PROFILED_STEPS)
    for size, mode in BATCHES if args.batches else ():
        (ten,) = (rung for rung in read_ladder() if rung.file == TEN)
        add(TEN, "batch", ten.precision, batch_size=size, compile_mode=mode)
    for number in range(2, args.repeat + 1):
        for script, kind, precision in found if number % 2 else reversed(found):
            add(script, kind, precision, number)
    return todo


def execute_run(run, args, gpu, cache, on_step):
    """Execute a run of the plan, and return the resulting fields of its log line as a dict.

    These include the settings, with the precision that the device could use.
    """
    settings, before = run["settings"], device.reading(gpu) | {"load": device.load(gpu)}
    line, middle, steps = {"gpu": {"before": before, "middle": None}, "started": records.now()}, [], settings["steps"]
    line |= {"settings": settings, "step_ms": None, "losses": None, "peak_gib": None, "figures": None, "error": None}

    def count():
        on_step()
        middle.append(device.reading(gpu) if len(middle) == steps // 2 else None)  # while the GPU is under load

    flags = {key: value for key, value in settings.items() if key != "precision"} | {"device": args.device}
    try:
        if run["kind"] == "roof":
            flags.pop("steps")
            line["figures"] = ask("roof", *records.options(flags))
            line["gpu"]["middle"] = line["figures"].pop("gpu")
        else:
            profiler = ["-m", "measure.kernels"] if run["kind"] == "profile" else []
            text, errors, status = execute(profiler + command(run["script"], flags), cache, count)
            parsed = records.parse(text, errors, status, steps)
            line["gpu"]["middle"] = next(filter(None, middle), None)
            line["settings"] = settings | {"precision": records.precision_used(settings["precision"], text)}
            if not profiler:
                line |= parsed
            elif not parsed["error"]:  # a library may print lines after the JSON
                found = [said for said in text.splitlines() if said.startswith('{"groups_ms"')]
                line["figures"] = json.loads(found[-1])
            line["error"] = parsed["error"]
    except (RuntimeError, ValueError) as error:  # the other runs do not depend on this run
        line["error"] = str(error)
    return line


def one_line(line):
    """Return a short description of a log line for the terminal."""
    load, name = line["gpu"]["before"]["load"], f"{line['kind']}  {line['script']}"
    s, figures = line["settings"], line["figures"]
    if line["kind"] == "batch":
        name = f"B {s['batch_size']}, {s['compile_mode']}  {line['script']}"
    elif line["pass"]:
        name = f"pass {line['pass']}  {line['script']}"
    if line["error"]:
        said = line["error"]
    elif line["kind"] == "roof":
        said = ", ".join(f"{kind} {tflops:.3g} TFLOP/s" for kind, tflops in records.peaks(figures).items())
    else:
        said = f"{sum(figures['groups_ms'].values()) if figures else records.median_ms(line):,.2f} ms"
    return f"{name}: {said}{f' (busy: {load})' if load else ''}"


def difference(lines, todo, host):
    """Describe the first difference between an earlier measurement and the planned measurement.

    If there is none, return an empty string.
    """
    settings = todo[0]["settings"]  # the settings of the roof, which all runs share
    sources = {(run["script"], run["kind"]): run["source"] for run in todo}
    for line in lines:
        if key := next((key for key in SAME_HOST if line["host"].get(key) != host[key]), None):
            return "on a different machine" if key == "id" else f"with a different {key}"
        if line["kind"] not in ("profile", "batch") and line["settings"] | {"precision": None} != settings:
            return "with different settings"
        if line["source"] != sources.get((line["script"], line["kind"]), line["source"]):
            return f"with a different {line['script']}"
    return ""


def choose_folder(out, todo, host):
    """Return (folder, its lines): an earlier measurement to continue, or a new folder.

    Without `out`, an earlier measurement of the same device and settings is continued if its last run is less than a
    day old and `todo` contains all its scripts. Raises ValueError if `out` contains a different measurement.
    """
    name = f"{'cpu ' if host['device'] == 'cpu' else ''}{host['name']}".lower()
    first = ROOT / "results" / f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}-{records.now()[:10]}"
    yesterday = records.now(days=-1)
    for folder in [out] if out else sorted(first.parent.glob(f"{first.name[:-10]}*")):
        if not (folder / "runs.jsonl").exists():
            continue
        lines = records.read(folder / "runs.jsonl")
        differs = difference(lines, todo, host)
        if out and differs:
            raise ValueError(f"{out} was measured {differs}: use another folder")
        recent = any((line["started"] or "") > yesterday for line in lines)
        if out or not differs and recent and {line["script"] for line in lines} <= {run["script"] for run in todo}:
            return folder, lines
    free = itertools.chain([first], (Path(f"{first}-{number}") for number in itertools.count(2)))
    return out or next(folder for folder in free if not folder.exists()), []


def runs_left(todo, lines):
    """Return the runs of the plan that have no line in the log, or only lines with an error."""
    done = {records.key(line) for line in lines if not line["error"]}
    return [run for run in todo if records.key(run) not in done]


def fail_if_all_failed(lines):
    ran = [line for line in lines if line["pass"]]
    if ran and all(line["error"] for line in ran):
        raise RuntimeError("every script failed")


def run_missing(todo, lines, folder, args, about, gpu):
    """Execute the runs that are missing from `lines`, and append the line of each run to the log and to `lines`.

    `about` contains the keys that are the same in all lines. Raises OSError if the log cannot be written, and
    RuntimeError if every script fails.
    """
    left, bar = runs_left(todo, lines), (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    earlier = len(lines)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches,  # a folder of compiled kernels per script
        Progress(*bar, transient=True) as progress,
    ):
        task = progress.add_task("")
        for number, run in enumerate(left, start=1):
            if run["pass"] != 1:  # stop after the first pass if every script failed
                fail_if_all_failed(lines[earlier:])
            settings, stage = run["settings"], f"pass {run['pass']}/{args.repeat}" if run["pass"] else run["kind"]
            progress.reset(task, total=settings["steps"], description=f"{number}/{len(left)}  {stage}: {run['script']}")
            name = f"{run['script']} {settings['batch_size']} {settings.get('compile_mode', '')}"
            cache = Path(caches, re.sub(r"\W+", "_", name))
            line = run | about | execute_run(run, args, gpu, cache, lambda: progress.advance(task))
            step = (line["figures"] or {}).pop("step", None)
            if step and run["script"] not in PEERS:
                timeline.write(folder, run["script"], step)
            records.append(folder / "runs.jsonl", line)
            lines.append(line)
            progress.console.print(one_line(line), highlight=False, markup=False, soft_wrap=True)
    fail_if_all_failed(lines[earlier:])


def arguments():
    """Return (parser, parsed arguments, this command without --budget and --out)."""
    how = argparse.ArgumentParser(add_help=False)  # options that are not part of the recorded command
    how.add_argument("--budget", type=float, metavar="MINUTES", help="stop after this time and keep the completed runs")
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
        help="only these scripts (such as 05 06 muon), and the scripts that they are compared with",
    )
    parser.add_argument("--peers", action="store_true", help="also measure loops built on transformers")
    parser.add_argument("--branches", action="store_true", help="also measure the scripts in branches/")
    parser.add_argument("--profile", action="store_true", help="also break the step time down by kind of kernel")
    parser.add_argument(
        "--batches", action="store_true", help="also measure rung 10 at B 1, 4, 16, 64 in 2 compile modes"
    )
    args = parser.parse_args()
    if any(n is not None and n < 1 for n in (args.batch_size, args.seq_len, args.steps, args.repeat)):
        parser.error("--batch-size, --seq-len, --steps and --repeat must be at least 1")
    if args.budget is not None and args.budget <= 0:
        parser.error("--budget must be more than 0")
    return parser, args, shlex.join(["python", "-m", "measure.run", *how.parse_known_args()[1]])


def describe_host(args):
    """Return (the host, the GPU's NVML handle or None), and hide the other GPUs."""
    host = ask("device", *(["--device", args.device] if args.device else []))
    if host["device"].startswith("cuda"):  # transformers.Trainer uses all visible GPUs
        seen, index = os.environ.get("CUDA_VISIBLE_DEVICES"), int(host["device"].partition(":")[2] or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[index].strip() if seen else str(index)
        host["device"] = "cuda"
    uuid = host.pop("uuid")
    return host, device.find_gpu(uuid)


def fill_defaults(args, host):
    """Set the options that depend on the device."""
    args.device, cpu = host["device"], host["device"] == "cpu"
    args.model = args.model or ("nano" if cpu else "gpt2")
    args.seq_len = args.seq_len or (128 if args.model == "nano" else 1024)
    args.steps, args.repeat = args.steps or (20 if cpu else 50), args.repeat or (1 if cpu else 3)


def report(folder, todo, lines):
    """Print the tables and the number of runs left, and draw the plots."""
    if lines:
        data = records.load(folder)
        print(f"\n{records.summary(data)}")
    if left := len(runs_left(todo, lines)):
        print(f"{left} of {len(todo)} runs are left: run the same command again", flush=True)
    if lines:
        for name, figure in (plots.figures(data) | timeline.pictures(data, timeline.read(folder))).items():
            plots.write_svg(figure, folder / f"{name}.svg")
        print(f"plots: {folder}/*.svg")


def stop(signum, _):
    """Handle a signal in STOPS: raise SystemExit, which makes execute() stop the running script."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the table
    sys.exit(0 if signum == signal.SIGALRM else 128 + signum)


def main():
    parser, args, command_line = arguments()
    for signum in STOPS:
        signal.signal(signum, stop)
    if args.budget:  # leave a few seconds for the table and the plots
        signal.setitimer(signal.ITIMER_REAL, 60 * args.budget - min(15, 15 * args.budget))
    try:
        host, gpu = describe_host(args)
        fill_defaults(args, host)
        todo = plan(args)
        folder, lines = choose_folder(args.out, todo, host)
        done = "" if runs_left(todo, lines) else " (measured already: move the folder away to measure again)"
        print(f"{args.model}, B {args.batch_size}, T {args.seq_len} -> {folder}{done}", flush=True)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{folder}: cannot write there")
        try:
            about = {"command": command_line, "commit": records.commit(), "host": host}
            run_missing(todo, lines, folder, args, about, gpu)
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            if new and not any(folder.iterdir()):
                folder.rmdir()
            report(folder, todo, lines)
    except SystemExit as end:
        if end.code == 0:
            print("the budget is spent")
        raise
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
