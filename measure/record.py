"""Parse a script's output, compute figures from its runs, and read and write ladder.json."""

import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import jsonschema
import numpy as np

ROOT = Path(__file__).resolve().parents[1]

STEP = re.compile(r"^step +(\d+) \| loss (\d+\.\d+) \|.* dt +(\d+\.\d+) ms \| +[\d,]+ tok/s\b", re.MULTILINE)
MEMORY = re.compile(r"^median of steps .* peak memory (\d+\.\d+) GiB$", re.MULTILINE)
PARAMETERS = re.compile(r"^device .* ([\d,]+) parameters \| B \d+ T \d+$", re.MULTILINE)


def parse(text, errors="", status=0, steps=None):
    """Parse a script's output and return the results as a dict. The completed steps of a failed run are included.

    `text` is stdout, `errors` is stderr, and `steps` is the expected number of steps.
    """
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
        said = [line for line in said if ": error: " in line] or said  # ignore the report that torchrun adds
        killed = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        run["error"] = said[-1] if said and status > 0 else killed
    elif steps is not None and len(found) != steps:
        run["error"] = f"ended after {len(found)} of {steps} steps"
    elif not found or min(steady(run["times_ms"])) <= 0:
        run["error"] = "a step took no time: the clock is too coarse" if found else "the script printed no steps"
    return run


def too_large(error):
    """Return the limit that a failed run's batch exceeded: "memory", or "text" for the length of the training text.

    For any other error, the result is None.
    """
    if any(words in error for words in ("out of memory", "ALLOC_FAILED", "cublasCreate")):  # PyTorch's, and cuBLAS's
        return "memory"
    return "text" if " tokens allow --batch-size " in error else None  # in DataLoaderLite's message


def steady(times):
    """Return the step times after the warm-up: all but the first 10, or the second half if there are fewer than 20."""
    return times[10 if len(times) >= 20 else len(times) // 2 :]


def median_ms(run):
    return float(np.median(steady(run["times_ms"])))


def medians(row):
    """Return {(pass, host): median step time in ms} for the runs that succeeded."""
    return {(run["pass"], run["host"]): median_ms(run) for run in row["runs"] if not run["error"]}


def faster(row, other):
    """Return the median, lowest and highest speed-up of one row over another.

    Each speed-up compares two successful runs in the same pass on the same host. Without such runs, the result is None.
    """
    mine, its = medians(row), medians(other) if other else {}
    quotients = [its[number] / mine[number] for number in mine if number in its]
    if not quotients:
        return None
    return {"median": rounded(np.median(quotients)), "low": rounded(min(quotients)), "high": rounded(max(quotients))}


def rounded(number):
    return float(f"{number:.5g}")


def precision_used(wanted, said):
    """Return the precision that a rung used.

    `wanted` is the rung's precision in ladder.toml. `said` is the rung's output, which reports each unsupported
    precision.
    """
    if wanted == "bf16" and "no bf16 here" in said:
        wanted = "tf32"
    return "float32" if wanted == "tf32" and "no TF32 here" in said else wanted


def speed(data, batch_size, median, precision):
    """Return tokens/s, model TFLOP/s and the fraction of the measured peak for a median step time in ms."""
    found = {"median_ms": rounded(median), "tflops": None, "roof_share": None}
    found["tokens_per_s"] = rounded(1000 * batch_size * data["settings"]["seq_len"] / median)
    if data["roof"]:
        found["tflops"] = rounded(found["tokens_per_s"] * data["roof"]["flops_per_token"] / 1e12)
        if ceiling := data["roof"]["ceilings_tflops"].get(precision):
            found["roof_share"] = rounded(found["tflops"] / ceiling)
    return found


def summarise(data):
    """Recompute the figures of each row and each batch size from the runs, and write them into `data`."""
    by_name = {row["name"]: row for row in data["rows"]}
    baseline = next((row for row in data["rows"] if row["before"] is None), None)
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
        row |= speed(data, data["settings"]["batch_size"], median, row["precision"])
        row["quartiles_ms"] = [rounded(q) for q in np.percentile(pooled, [25, 75])]
        row["over_baseline"] = faster(row, baseline)
        row["over_before"] = faster(row, by_name.get(row["before"]))
        row["peak_memory_gib"] = max((run["peak_memory_gib"] for run in good if run["peak_memory_gib"]), default=None)
        row["parameters"] = good[0]["parameters"]
        cold = [run["times_ms"][0] for run in good if run["cold"]]
        row["first_step_s"] = rounded(cold[0] / 1000) if cold else None
    for cell in data["batches"]:
        cell |= dict.fromkeys(("median_ms", "tokens_per_s", "tflops", "roof_share"))
        if not cell["run"]["error"]:
            cell |= speed(data, cell["batch_size"], median_ms(cell["run"]), cell["precision"])


def read(path):
    """Return a ladder.json as a dict. Raises OSError, or ValueError if it violates results/ladder.schema.json."""
    schema = json.loads((ROOT / "results" / "ladder.schema.json").read_text(encoding="utf-8"))
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        jsonschema.validate(data, schema)
    except jsonschema.ValidationError as error:
        raise ValueError(f"{path} is not a measurement: {error.json_path}: {error.message[:200]}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a measurement: {error}") from None
    return data


def save(path, data, in_one_line=r"\[[-\d\s.,e]+\]"):
    """Write a ladder.json, with each list of numbers on one line. After a crash, the old or the new file is intact."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(in_one_line, lambda found: re.sub(r"\s+", " ", found[0]), text)
    new = Path(path).with_suffix(".new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def commit():
    """Return the hash of the current git commit, with a note if tracked files differ from it.

    If git or the repository is missing, the result is None.
    """
    if not shutil.which("git"):
        return None
    words = "git describe --always --exclude=* --abbrev=40".split()
    said = subprocess.run([*words, "--dirty= and uncommitted changes"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or None


def sources(commands):
    """Return a hash of the programs in these commands and of input.txt.

    If the hash changes, measure.py begins a new measurement.
    """
    files = {word for words in commands for word in words if word.endswith(".py")}
    return hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in (*sorted(files), "input.txt"))).hexdigest()


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
