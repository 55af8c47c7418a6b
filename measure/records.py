"""Read and write runs.jsonl, the log of a measurement, and compute medians, speed-ups and shares of measured peaks.

Each finished run of a script is one line of JSON in results/<device>-<date>/runs.jsonl, with these keys:

    script      path of the script, name of a peer (a training loop around `transformers`), or "roof"
    kind        rung, branch, peer, roof (the peaks of the device), profile, or batch (rung 10 at another batch size)
    pass        1, 2, ... for rungs, branches and peers; otherwise null
    settings    model, batch_size, seq_len, steps, the precision that the device could use, compile_mode for a batch
    source      hash of the program and of input.txt; null before 2026-11-28
    command     the command that started the measurement
    commit      the git commit, with a note if tracked files differed from it
    host        the hardware and the versions of the software
    gpu         load before the run; clock, power and temperature of a GPU before the run and in the middle of it
    started     time in UTC
    step_ms, losses, peak_gib    as the script printed them; null for a roof and a profile
    figures     results of a roof or a profile; otherwise null
    error       why the run failed, or null

No value is derived from other values in the log. If a run appears twice, the later line is used.
"""

import datetime
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pandas as pd

from baseline import MODELS
from dev.ladder import ROOT, read_ladder, short

KEYS = set(
    "script kind pass settings source command commit host gpu started step_ms losses peak_gib figures error".split()
)
TEN = "speedup_10_fused_adamw.py"
PEERS = {"transformers, compiled": ("compiled", "bf16"), "transformers.Trainer": ("trainer", "bf16")}
# These environment variables, which some containers and job schedulers set, are removed before a script runs. They can
# change the script's precision, disable the compiler, move compiled kernels to a folder that run.py does not manage,
# or make ddp_run.py wait for other ranks.
OVERRIDES = """NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE
    TRITON_CACHE_DIR RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT""".split()
STEP = re.compile(r"^step +(\d+) \| loss (\d+\.\d+) \|.* dt +(\d+\.\d+) ms \| +[\d,]+ tok/s\b", re.MULTILINE)
MEMORY = re.compile(r"^median of steps .* peak memory (\d+\.\d+) GiB$", re.MULTILINE)

# ---- one run


def parse(text, errors="", status=0, steps=None):
    """Return step_ms, losses, peak_gib and error of a script's run as a dict.

    If the run failed, its completed steps are included. `text` is stdout, `errors` is stderr, and `steps` is the
    expected number of steps.
    """
    found, memory = STEP.findall(text), MEMORY.search(text)
    run = {"step_ms": [float(ms) for _, _, ms in found], "losses": [float(loss) for _, loss, _ in found]}
    run |= {"peak_gib": float(memory[1]) if memory else None, "error": None}
    if status:
        said = [line.strip() for line in errors.splitlines() if line.strip()]
        said = [line for line in said if ": error: " in line] or said  # ignore the report that torchrun adds
        killed = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        run["error"] = said[-1] if said and status > 0 else killed
        if run["error"].startswith("ModuleNotFoundError"):
            run["error"] += ": pip install -r requirements-dev.txt"
    elif steps is not None and len(found) != steps:
        run["error"] = f"ended after {len(found)} of {steps} steps"
    elif not found or min(steady(run["step_ms"])) <= 0:
        run["error"] = "a step took no time: the clock is too coarse" if found else "the script printed no steps"
    return run


def steady(times):
    """Return the step times after the warm-up: all but the first 10, or the second half if there are fewer than 20."""
    return times[10 if len(times) >= 20 else len(times) // 2 :]


def median_ms(run):
    return float(pd.Series(steady(run["step_ms"])).median())


def precision_used(wanted, said):
    """Return the precision that a script used.

    `wanted` is its precision in ladder.toml. `said` is its output, which mentions each unsupported precision.
    """
    if wanted == "bf16" and "no bf16 here" in said:
        wanted = "tf32"
    return "float32" if wanted == "tf32" and "no TF32 here" in said else wanted


def commit():
    """Return the hash of the current git commit, with a note if tracked files differ from it.

    If git or the repository is missing, the result is None.
    """
    if not shutil.which("git"):
        return None
    words = "git describe --always --exclude=* --abbrev=40".split()
    said = subprocess.run([*words, "--dirty= and uncommitted changes"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or None


def source(*files):
    """Return a hash of the contents of these files and of input.txt."""
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in (*files, "input.txt"))).hexdigest()[:16]


def now(days=0):
    """Return the UTC time `days` days from now, such as 2026-11-28T09:30:00+00:00."""
    time = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days)
    return time.isoformat(timespec="seconds")


def options(flags):
    """Convert {"batch_size": 4, ...} to a list of command-line arguments: --batch-size 4 ..."""
    return [str(word) for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]


# ---- the log


def read(path):
    """Return the lines of a runs.jsonl as dicts. An incomplete last line, left by a killed process, is skipped.

    Raises OSError or, if another line is not a run, ValueError.
    """
    lines = []
    for number, text in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(text))
            if KEYS - lines[-1].keys():
                raise ValueError
        except (AttributeError, ValueError):
            raise ValueError(f"{path}: line {number} is not a run") from None
    return lines


def append(path, line):
    """Remove an incomplete last line, left by a killed process, from a runs.jsonl, and append a run."""
    with open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def key(line):
    """Return a tuple that identifies a run within its measurement."""
    settings = {name: value for name, value in line["settings"].items() if name != "precision"}
    return line["script"], line["kind"], line["pass"], json.dumps(settings, sort_keys=True)


def save(path, data, in_one_line=r"\[[-\d\s.,e]+\]"):
    """Write a JSON file with each list of numbers on one line. After a crash, the file has its old or new content."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(in_one_line, lambda found: re.sub(r"\s+", " ", found[0]), text)
    new = Path(path).with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


# ---- values computed from the log


def flops_per_token(config, seq_len):
    """Return the FLOPs per token of one training step of a GPT-2 model.

    Each parameter in a matmul needs 6 FLOPs: 2 in the forward pass and 4 in the backward pass (Kaplan et al. 2020).
    With hidden size C and vocabulary size V, each layer has 12 C^2 such parameters, and the head has V * C. With L
    layers and sequence length T, the two attention matmuls with T x T scores add 12 * L * C * T FLOPs, including the
    masked half. The sum excludes embedding lookups. It also excludes work that only some implementations do:
    multiplying the rows that pad the vocabulary, and recomputing the attention scores.
    """
    L, C = config.n_layer, config.n_embd
    return 6 * (12 * L * C * C + config.vocab_size * C) + 12 * L * C * seq_len


def peaks(figures):
    """Return {precision: the highest TFLOP/s of its matmuls}, given the results of measure.roof."""
    found = {}
    for row in figures["matmul"]:
        if row["tflops"]:
            found[row["precision"]] = max(row["tflops"], found.get(row["precision"], 0))
    return found


def rounded(number):
    return float(f"{number:.5g}")


class Measurement:
    """A measurement: the lines of a runs.jsonl, and the values that the tables and plots show.

    `rows` maps each script to a dict with its successful runs and the values computed from them: median_ms,
    quartiles_ms, tokens_per_s, tflops, peak_share (of the measured peak at its precision), over_baseline and
    over_before (see ratio()), peak_gib, first_step_s (including compilation), profile and error. Unknown values are
    None. `batches` lists similar dicts for rung 10 at other batch sizes. `roof` contains the output of measure.roof.
    `whole` is True if every rung from baseline.py to rung 10 has a successful run.
    """

    def __init__(self, name, lines):
        self.name, self.lines = name, list({key(line): line for line in lines}.values())
        self.runs = [line for line in self.lines if line["kind"] in ("rung", "branch", "peer")]
        self.host, self.started = self.lines[0]["host"], self.lines[0]["started"]
        self.finished = max(line["started"] or "" for line in self.lines)
        self.settings = (self.runs or self.lines)[0]["settings"]
        if any(run["settings"] | {"precision": 0} != self.settings | {"precision": 0} for run in self.runs):
            raise ValueError("its runs have different settings")
        self.roof = next((line["figures"] for line in self.lines if line["kind"] == "roof"), None)
        self.peaks = peaks(self.roof) if self.roof else {}
        ladder, good = read_ladder(), [run for run in self.runs if not run["error"]]
        self.before = {rung.file: rung.before for rung in ladder}
        self.changed = {rung.file: rung.changed for rung in ladder}
        whole = {rung.file for rung in ladder if rung.part == "rung" and rung.kind != "scale"}
        self.whole = whole <= {run["script"] for run in good}
        step_times = pd.DataFrame(
            [(run["script"], run["pass"], str(run["host"]), median_ms(run)) for run in good],
            columns=["script", "pass", "host", "ms"],
        ).pivot(index=["pass", "host"], columns="script", values="ms")  # a row per pass and host, a column per script
        order = {rung.file: place for place, rung in enumerate(ladder)} | dict.fromkeys(PEERS, len(ladder) + 1)
        scripts = sorted({run["script"]: 0 for run in self.runs}, key=lambda script: order.get(script, len(ladder)))
        self.rows = {script: self.row(script, step_times) for script in scripts}
        self.batches = [self.batch(line) for line in self.lines if line["kind"] == "batch"]
        self.batches.sort(key=lambda row: (row["batch_size"], row["compile_mode"]))

    def row(self, script, step_times):
        runs = [run for run in self.runs if run["script"] == script]
        done, failed = [run for run in runs if not run["error"]], [run for run in runs if run["error"]]
        alone = script.removesuffix(" under torchrun")  # a suffix in older measurements
        before = self.before.get(script, alone if alone in self.before else TEN)
        row = {"script": script, "kind": runs[0]["kind"], "before": before, "runs": done}
        row |= {"error": failed[-1]["error"] if failed else None, "profile": self.profile(script)}
        row |= dict.fromkeys(("median_ms", "quartiles_ms", "over_baseline", "over_before", "peak_gib"))
        row |= dict.fromkeys(("tokens_per_s", "tflops", "peak_share", "precision", "first_step_s"))
        if not done:
            return row
        pooled = pd.Series(list(itertools.chain(*(steady(run["step_ms"]) for run in done))))
        row |= self.speed(done[0]["settings"], step_times[script].median())
        row["quartiles_ms"] = [rounded(q) for q in pooled.quantile([0.25, 0.75])]
        row["over_baseline"] = ratio(step_times, "baseline.py", script)
        row["over_before"] = None if self.outdated([script, before]) else ratio(step_times, before, script)
        row["peak_gib"] = max((run["peak_gib"] for run in done if run["peak_gib"]), default=None)
        first = [run["step_ms"][0] for run in done if run["pass"] == 1]
        row["first_step_s"] = rounded(first[0] / 1000) if first else None
        return row

    def batch(self, line):
        row = {key: line["settings"][key] for key in ("batch_size", "compile_mode")} | {"error": line["error"]}
        row |= dict.fromkeys(("median_ms", "tokens_per_s", "tflops", "peak_share", "precision"))
        return row if line["error"] else row | self.speed(line["settings"], median_ms(line))

    def speed(self, settings, ms):
        """Return tokens/s, model TFLOP/s and the share of the measured peak for a median step time in ms."""
        row = {"median_ms": rounded(ms), "precision": settings["precision"], "tflops": None, "peak_share": None}
        row["tokens_per_s"] = rounded(1000 * settings["batch_size"] * settings["seq_len"] / ms)
        if self.roof:
            flops = flops_per_token(MODELS[settings["model"]], settings["seq_len"])
            row["tflops"] = rounded(row["tokens_per_s"] * flops / 1e12)
            if peak := self.peaks.get(settings["precision"]):
                row["peak_share"] = rounded(row["tflops"] / peak)
        return row

    def profile(self, script):
        profiles = [line for line in self.lines if line["kind"] == "profile" and line["script"] == script]
        return profiles[0]["figures"] if profiles else None

    def outdated(self, scripts):
        """Return whether one of these scripts has changed since its last run."""
        last = {run["script"]: run["started"] for run in self.runs}
        return any(self.changed.get(script, "") > last.get(script, "9") for script in scripts)

    @property
    def cpu(self):
        return self.host["device"] == "cpu"

    @property
    def label(self):
        """The device and the model, such as "CPU: AMD EPYC, nano"."""
        return f"{'CPU: ' if self.cpu else ''}{self.host['name']}, {self.settings['model']}"


def ratio(step_times, other, script):
    """Return the median, lowest and highest speed-up of `script` over `other` as a dict.

    Each speed-up is the ratio of the two median step times in the same pass on the same host. `step_times` has a row
    per pass and host. If no pass ran both scripts, the result is None.
    """
    if other not in step_times:
        return None
    quotients = (step_times[other] / step_times[script]).dropna()
    if quotients.empty:
        return None
    found = quotients.median(), quotients.min(), quotients.max()
    return dict(zip(("median", "low", "high"), map(rounded, found), strict=True))


def load(folder):
    """Return the Measurement in a folder. Raises OSError or, if the log is empty or invalid, ValueError."""
    path = Path(folder) / "runs.jsonl"
    if not (lines := read(path)):
        raise ValueError(f"{path}: no run has finished")
    try:
        return Measurement(Path(folder).resolve().name, lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# ---- tables


def number(value, form, after=""):
    """Format a number, for example with ",.1f", and append `after`."""
    return "" if value is None else format(value, form) + after


def speed_up(found):
    """Format the result of ratio(): the median and its range, such as 1.52× (1.50–1.55)."""
    if not found:
        return ""
    low, high = (f"{found[end]:.2f}" for end in ("low", "high"))
    return f"{found['median']:.2f}×{f' ({low}–{high})' if low != high else ''}"


def step(row):
    """Return the median step time in ms and the quartiles, such as 471.5 (390.9–526.1)."""
    low, high = row["quartiles_ms"]
    return f"{row['median_ms']:,.1f} ({low:,.1f}–{high:,.1f})"


def cells(data):
    """Return the table of scripts. A table is a list of dicts {heading: cell}."""
    table, reserved = [], any((row["profile"] or {}).get("reserved_gib") for row in data.rows.values())
    for row in data.rows.values():
        done, profile = row["median_ms"] is not None, row["profile"] or {}
        error = " (a pass failed)" if done and row["error"] else ""
        gone = " (since removed)" if row["script"].endswith(".py") and not (ROOT / row["script"]).exists() else ""
        before = f" over {short(row['before'])}" if row["kind"] != "rung" and row["over_before"] else ""
        held = f" ({profile['reserved_gib']:.2f})" if profile.get("reserved_gib") else ""
        table.append(
            {
                "script": row["script"] + gone + error,
                "ms per step (quartiles)": step(row) if done else "failed",
                "tokens/s": number(row["tokens_per_s"], ",.0f"),
                "× baseline": speed_up(row["over_baseline"]),
                "× previous": speed_up(row["over_before"]) + before,
                "peak GiB (reserved)" if reserved else "peak GiB": number(row["peak_gib"], ".2f", held),
                "first step, s": number(row["first_step_s"], ".2f"),
                "model TFLOP/s": number(row["tflops"], ".3g"),
                "of measured peak": number(row["peak_share"], ".0%", f" {row['precision']}"),
            }
        )
    return table


def batch_cells(data):
    """Return the table of batch sizes and compile modes."""
    return [
        {
            "rung 10": f"B {row['batch_size']}",
            "compile mode": row["compile_mode"],
            "ms per step (one run)": "failed" if row["error"] else number(row["median_ms"], ",.1f"),
            "tokens/s": number(row["tokens_per_s"], ",.0f"),
            "model TFLOP/s": number(row["tflops"], ".3g"),
            "of measured peak": number(row["peak_share"], ".0%", f" {row['precision']}"),
        }
        for row in data.batches
    ]


def conditions(data):
    """Return the machine, the settings, the peaks and the load of a measurement as a list of paragraphs."""
    host, s, runs = data.host, data.settings, data.runs
    memory = f"{host['device_memory_gib'] or 'unknown'} GiB"
    driver = f", driver {host['driver']}, CUDA {host['cuda']}, cuDNN {host['cudnn']}" if host["cuda"] else ""
    vectors = f", {host['capability']}" if host["capability"] not in (None, "DEFAULT") else ""  # such as AVX2 or AVX512
    name = f"CPU: {host['name']}{vectors}, {host['cores']} cores" if data.cpu else f"{host['name']}, {memory}{driver}"
    versions = f"torch {host['torch']}, Python {host['python']}, {host['system']}, {host['memory_gib']} GiB of memory"
    passes = [len(row["runs"]) for row in data.rows.values() if row["kind"] != "peer"] or [0]
    low, high = min(passes), max(passes)
    said = f"{high} interleaved" if low == high else f"{low} to {high} interleaved"
    said = ("one pass" if low else "part of a pass") if high <= 1 else f"{said} passes"
    said += f" of {s['steps']} steps" + (" per script" if high > 1 and low != high else "")
    commands = " and ".join(f"`{line}`" for line in dict.fromkeys(line["command"] for line in runs))
    commits = dict.fromkeys(line["commit"] for line in runs if line["commit"])
    commits = " and ".join(one.replace(one[:40], one[:7]) for one in commits) or "unknown"
    about = f"{s['model']}, B {s['batch_size']}, T {s['seq_len']}; {said}: {commands}. Commit {commits}."
    first, last = data.started[:10], data.finished[:10]
    paragraphs = [f"{name}. {versions}. {first}{f' to {last}' if first != last else ''}.", about]
    if data.roof:
        rates = [f"{name} {tf:,.0f}" if tf >= 1000 else f"{name} {tf:.3g}" for name, tf in data.peaks.items()]
        copies = data.roof["copy_gb_per_s"]
        copies = f"{copies:,.0f}" if copies >= 100 else f"{copies:.3g}"
        paragraphs.append(f"Measured peak: {', '.join(rates)} TFLOP/s; copies {copies} GB/s.")
    clocks = [clock for line in runs if (clock := ((line["gpu"] or {}).get("middle") or {}).get("clock_mhz"))]
    if clocks:
        first = next((line["gpu"]["before"] for line in data.lines if line["gpu"] and line["gpu"]["before"]), {})
        cold = f"{first['clock_mhz']} MHz before the first run, " if first.get("clock_mhz") else ""
        limit = f"; power limit {first['power_limit_w']} W" if first.get("power_limit_w") else ""
        paragraphs.append(f"Clock: {cold}{min(clocks)} to {max(clocks)} MHz under load{limit}.")
    profiled = [row for row in data.rows.values() if (row["profile"] or {}).get("attention")]
    kinds = []
    for kind, rows in itertools.groupby(profiled, key=lambda row: row["profile"]["attention"]):
        names = [row["script"].removeprefix("speedup_").removesuffix(".py") for row in rows]
        kinds.append(f"{kind} ({names[0]}{f' to {names[-1]}' if len(names) > 1 else ''})")
    if kinds:
        paragraphs.append(f"Attention: {'; '.join(kinds)}.")
    failed = [f"{line['kind']} {line['script']}: {line['error']}" for line in data.lines if line["error"]]
    paragraphs += [f"Failed: {'; '.join(failed)}."] if failed else []
    busy = [load for line in runs if (load := ((line["gpu"] or {}).get("before") or {}).get("load"))]
    if busy:
        paragraphs.append(f"The machine was busy before {len(busy)} of {len(runs)} runs ({busy[0]}).")
    return paragraphs


def text(rows):
    """Return a table as text for a terminal."""
    return pd.DataFrame(rows).to_string(index=False) if rows else ""


def summary(data):
    """Return the conditions and the tables of a measurement as text."""
    return (
        "\n\n".join(["\n".join(conditions(data)), *filter(None, (text(cells(data)), text(batch_cells(data))))]) + "\n"
    )
