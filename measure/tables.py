"""Compute the generated parts of README.md and docs/pages/, draw their plots, and print results:

    python -m measure.tables --plots                        draws docs/pages/img/ (make figures)
    python -m measure.tables results/FOLDER                 prints its tables (make compare)
    python -m measure.tables results/FOLDER results/FOLDER  compares the two (make compare)

Comments in the pages contain calls to part(), counts_of(), measured() and pretrained(). `make figures` runs cog, which
writes the result of each call, in Markdown, below the call. The Markdown is computed from ladder.toml, the scripts and
results/. The pages show the latest measurement of each device and model, GPUs first. An incomplete measurement
appears only in docs/pages/results.md and on the pages of its scripts. --plots also deletes all other SVG files in
docs/pages/img/.

With two folders, the table compares the scripts that were measured in both. If the two interquartile ranges of
a script overlap, the difference in step time may be noise.
"""

import argparse
import json
import re
import textwrap
from functools import cache
from pathlib import Path

from dev.ladder import ROOT, changed_lines, find, read_ladder, read_toml, short, title
from measure import counts, memory, plots, quality, records, timeline
from measure.records import TEN, batch_cells, cells, conditions, number, speed_up, step

IMAGES = Path("docs", "pages", "img")
COUNTED = "gpt2", 4, 1024  # model, B and T of the counts to show, from results/counts.json
LEARNED = "quality", "quality-optimizer", "muon", "quality-beyond"  # made by quality.py; all but the last are plotted
PRETRAINED = "pretrain-nano-cpu-amd-epyc-2026-11-22"  # a run of pretrain/train.py
BEYOND = ROOT / "results" / "counts-beyond.json"  # counts of rung 10 and of the side rungs for speed that build on it
STEPS = "The kernels of one training step of each script, in order, measured on {}"
LAYER = "The kernels of one layer in rungs 04 and 10, forward and backward, measured on {}"

# ---- what the pages show


@cache
def recorded():
    """Return all measurements in results/."""
    return [records.load(path.parent) for path in (ROOT / "results").glob("*/runs.jsonl")]


def newest(partial=False):
    """Return {folder name: Measurement} with the latest measurement of each device and model.

    By default, only measurements of all rungs from baseline.py to rung 10 are used. With `partial`, only the others are
    used. GPT-2 on GPUs comes first, then other models on GPUs, then CPUs. In each group, the latest measurement comes
    first.
    """
    found, shown = [], {}
    for data in recorded():
        if data.runs and data.whole != partial:
            gpt2 = not data.cpu and data.settings["model"] == "gpt2"
            found.append((not data.cpu, gpt2, data.finished, data.name, data))
    for *_, name, data in sorted(found, key=lambda one: one[:4], reverse=True):
        shown.setdefault((data.host["name"], data.settings["model"]), (name, data))
    return dict(shown.values())


def table(rows, code=False):
    """Return a Markdown table of rows, each a dict {heading: cell}. Columns of numbers are right-aligned.

    With `code`, the first column is shown as code, and all others are right-aligned.
    """
    if not rows:
        return "None yet."
    lines, columns = [list(row.values()) for row in rows], zip(*map(dict.values, rows), strict=True)
    numbers = [all(re.fullmatch("[0-9.,()%×+−–/ ]*", cell) for cell in cells) for cells in columns]
    if code:
        lines = [[f"`{first}`", *(cell.replace("|", "/") for cell in others)] for first, *others in lines]
        numbers = [False, *[True] * (len(numbers) - 1)]
    heads = [list(rows[0]), ["---:" if right else "---" for right in numbers]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in heads + lines)


def percent(ratio):
    return f"{round(ratio, 3) + 0.0:+.1%}".replace("-", "−")  # + 0.0, because -0.0 prints as -0.0


def two_sizes(alt, folder, name):
    """Return a picture with a variant for a narrow screen. `folder` is the path from the page to docs/pages/img/."""
    narrow = f'<source media="(max-width: 600px)" srcset="{folder}{name}-narrow.svg">'
    return f'<picture>{narrow}<img alt="{alt}" src="{folder}{name}.svg"></picture>'


def picture(measured, folder):
    """Return the picture for the front pages, and a paragraph about the speed-up."""
    data = measured[0]
    base, ten, s = data.rows["baseline.py"], data.rows[TEN], data.settings
    gib = [row["peak_gib"] for row in (base, ten) if row["peak_gib"]]
    shown = two_sizes(f"Tokens per second of each script, measured on {data.label}", folder, "tokens")
    if not data.cpu and data.name == getattr(profiled()[0], "name", None):
        shown = two_sizes(STEPS.format(data.label), folder, "steps")
    changed = [short(script) for script in data.rows if data.outdated([script])]
    since = f"; rungs {' and '.join(changed)} have changed since then" if changed else ""
    speeds = f"{ten['tokens_per_s']:,.0f} instead of {base['tokens_per_s']:,.0f} tokens/s"
    memory = f", and cut its peak memory from {gib[0]:.2f} to {gib[1]:.2f} GiB" if len(gib) == 2 else ""
    said = f"""**What you gain**: on an {data.host["name"]}, rungs 01 to 10 make `{s["model"]}` {gain(ten)} as fast at
        batch size (B) {s["batch_size"]}, {speeds}{memory} ({data.finished[:10]}, torch {data.host["torch"]}{since}).
        Each speed-up is the median of the ratios within a pass (one run of every script), so it can differ from the
        ratio of the tokens/s.
        {fastest(data)}"""
    for one in [one for one in measured[1:2] if one.cpu]:
        small = f"the small model `{one.settings['model']}`"
        said += f" On a CPU ({one.host['name']}), {small} becomes {gain(one.rows[TEN])} as fast."
    return f"{shown}\n\n{textwrap.fill(' '.join(said.split()), 144, break_on_hyphens=False)}"


def gain(row):
    return f"{row['over_baseline']['median']:.2f}×"


def fastest(data):
    """Return sentences with our highest speed of rung 10 and the highest public speed on the GPU of `data`.

    If either is unknown, return "".
    """
    name, public = data.host["name"], read_toml("results/public.toml")["speed"]
    ours = [row for one in recorded() if one.host["name"] == name for row in one.batches if row["tokens_per_s"]]
    public = [one for one in public if one.get("plain", True) and name.endswith(one["card"])]
    if not (ours and public):
        return ""
    best, theirs = (max(rows, key=lambda row: row["tokens_per_s"]) for rows in (ours, public))
    return f"""In one run with `--batch-size {best["batch_size"]} --compile-mode {best["compile_mode"]}`, rung 10
        reached {best["tokens_per_s"]:,.0f} tokens/s. The highest public figure that we know of for plain GPT-2 124M
        on this GPU is {theirs["tokens_per_s"]:,} ({theirs["ran"]}, B {theirs["batch_size"]})."""


def ladder(data):
    """Return the README's table of rungs, with the speed-ups in a measurement."""
    device, rows = "CPU" if data.cpu else data.host["name"], []
    for rung in [rung for rung in read_ladder() if rung.part == "rung"]:
        added, removed = changed_lines(rung.before, rung.file) if rung.before else (0, 0)
        ratio = data.rows.get(rung.file, {}).get("over_before")
        rows.append(
            {
                "rung": f"[{rung.number}]({rung.file})",
                "idea": f"[{rung.idea}](docs/pages/rungs/{Path(rung.file).stem}.md)",
                "kind": rung.kind + ", on a GPU" * rung.gpu,
                f"{device}": f"{ratio['median']:.2f}×{', on one GPU' * (rung.kind == 'scale')}" if ratio else "",
                "lines of code": f"+{added} −{removed}" if rung.before else "",
            }
        )
    said = "× is the speed-up over the previous rung when we measured it."
    said += " It is missing if either has changed since then." * data.outdated(data.changed)
    return f'{table(rows)}\n\n{said} Rungs marked "on a GPU" are not meant to speed up a CPU.'


def speeds(published, steps):
    """Return the table of public speeds. MFU (model FLOPs utilization) is relative to the data sheet's peak."""
    flops = counts.totals(steps["baseline.py"])[0] / (4 * 1024)  # per token, including masked scores
    peaks, rows = read_toml("measure/cards.toml"), []
    for one in published:
        speed, size = one["tokens_per_s"], one.get("batch_size")
        peak = peaks.get(one.get("peak", one["card"]), {}).get(one["precision"])
        row = {"card": one["card"], "tokens/s": f"{speed:,}", "B": number(size, "d")}
        row["ms"] = f"{1000 * size * 1024 / speed:,.0f}" if size else ""
        row["MFU"] = f"{speed * flops / peak / 1e12:.0%}" if peak and one.get("plain", True) else ""
        row["what ran"] = one["ran"]
        row["measured by"] = f"[{one['source']}]({one['url']})" if "url" in one else one["source"]
        rows.append(row)
    return rows


def ours(measured):
    """Return the table of our measurements of rung 10, with the percentage of the measured peak."""
    return [
        {
            "device": data.label,
            "B": str(data.settings["batch_size"]),
            "T": str(data.settings["seq_len"]),
            "ms": f"{row['median_ms']:,.1f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "of the measured peak": number(row["peak_share"], ".0%"),
        }
        for data in measured.values()
        if (row := data.rows[TEN])["median_ms"]
    ]


def results(measured):
    """Return the results section of docs/pages/results.md."""
    said = []
    for place, (name, data) in enumerate(measured.items()):
        first, *others = conditions(data)
        said.append(f"## {data.label}{'' if data.whole else ', some scripts'}\n\n**{first}** {' '.join(others)}")
        said += [table(rows, code=True) for rows in (cells(data), batch_cells(data)) if rows]
        if place == 0:
            said.append(two_sizes("Training speed", "img/", "tokens"))
            said.append("[Loss over steps](img/loss-steps.svg)")
        said.append(f"`results/{name}/runs.jsonl` contains the time and loss of every step.")
    return "\n\n".join(said)


def printed(data):
    """Return, as Markdown, the first and last step lines that baseline.py printed in a measurement."""
    run, tokens = data.rows["baseline.py"]["runs"][0], data.settings["batch_size"] * data.settings["seq_len"]
    lines = [
        f"step {number:4d} | loss {loss:.6f} | dt {ms:8.2f} ms | {1000 * tokens / ms:10,.0f} tok/s"
        for number, (loss, ms) in enumerate(zip(run["losses"], run["step_ms"], strict=True))
    ]
    shown = "\n".join([*lines[:3], "...", *lines[-2:]])
    return f"`baseline.py` printed these lines ({data.label}):\n\n```text\n{shown}\n```"


# ---- counts and memory


def counted(found):
    """Return the table of counts for GPT-2: one row per rung, with the counts at each B."""
    tables = [counts.cells(steps) for steps in found.values()]
    sizes = " / ".join(str(batch_size) for _, batch_size, _ in found)
    return [
        {"rung": title(rows[0]["script"])}
        | {f"{what}, B {sizes}": " / ".join(row[what] for row in rows) for what in list(rows[0])[1:]}
        for rows in zip(*tables, strict=True)
    ]


def floors(steps):
    """Return the table of floors in ms, with a row per script and a column per card."""
    cards = {name: counts.Card.read(name) for name in read_toml("measure/cards.toml")}
    return [
        {"floor, ms": title(script)} | {name: f"{card.floor_ms(step)[0]:.1f}" for name, card in cards.items()}
        for script, step in steps.items()
    ]


def beside(measured, logs, found):
    """Return, for each log, its table of step times and floors.

    The floors for our GPUs use their measured peaks. Logs without a URL are left out.
    """
    logs, said = [(log, counts.Card.read(log["card"])) for log in logs if log["url"]], []
    for data in measured.values():
        about = {key: data.settings[key] for key in ("model", "batch_size", "seq_len")}
        steps = found.get(tuple(about.values()), {})
        done = {script: row["median_ms"] for script, row in data.rows.items() if row["median_ms"]}
        if not data.cpu and data.roof and steps.keys() & done.keys():
            about |= {"about": data.label, "ms": {script: done[script] for script in steps if script in done}}
            about["gains"] = {script: speed_up(row["over_before"]) for script, row in data.rows.items()}
            logs.append((about, counts.Card(data.peaks, data.roof["copy_gb_per_s"])))
    for log, card in logs:
        rows = counts.beside(log["ms"], found["gpt2", log["batch_size"], log["seq_len"]], card)
        for row in rows:
            if "gains" in log:  # our measurements have ratios within a pass
                row["measured, × previous"] = log["gains"][row["script"]]
            row["script"] = title(row["script"])
        source = f" ([source]({log['url']}))" if "url" in log else ""
        said += [f"**{log['about']}**{source}, B {log['batch_size']}:", table(rows)]
    return "\n\n".join(said)


def beyond(data):
    """Return the counts, floors, predictions and step times of the side rungs beyond rung 10 as a table.

    The floors use the measured peaks of `data`. Each cell is empty or has one value per batch size.
    """
    card, found, lines = counts.Card(data.peaks, data.roof["copy_gb_per_s"]), counts.read_counts(BEYOND), []
    sizes = [size for size in found if size != COUNTED]
    for script in found[COUNTED]:
        made = {}  # (model, B, T) -> the prediction for it
        for one in read_toml("results/predictions.toml")["prediction"]:
            if script in one["ms"] and one["device"] == data.host["name"]:
                made[one["model"], one["batch_size"], one["seq_len"]] = one
        steps, made = [found[size][script] for size in sizes], [made.get(size) for size in sizes]
        row = {
            "GB moved": [f"{counts.totals(step)[1] / 1e9:.1f}" for step in steps],
            "floor, ms": [f"{card.floor_ms(step)[0]:.1f}" for step in steps],
            "predicted, ms": [interval(one["ms"][script]) if one else "" for one in made],
            "measured, ms": [number(latest(script, one), ".1f") if one else "" for one in made],
        }
        cells = {what: " / ".join(value or "–" for value in values) * any(values) for what, values in row.items()}
        lines.append({"script": title(script)} | cells)
    return f"{data.label}, B {' / '.join(str(size[1]) for size in sizes)}, T 1024:\n\n{table(lines)}"


def peer_counted():
    """Return the counts of rung 10 and of compiled transformers as a table, with a row per group of kernels."""
    (steps,) = counts.read_counts(ROOT / "results" / "counts-peer.json").values()
    lines = []
    for kind in [*(kind for kind in plots.GROUPS if kind != "idle"), None]:
        flops, moved, kernels = zip(*(counts.totals(step, kind) for step in steps.values()), strict=True)
        line = {"rung 10 / `transformers`": kind or "a step"}
        line["TFLOP"] = " / ".join(f"{one / 1e12:.2f}" for one in flops)
        line["GB moved"] = " / ".join(f"{one / 1e9:.2f}" for one in moved)
        lines.append(line | {"kernels": " / ".join(map(str, kernels))})
    return table(lines)


def fit_measured():
    """Return a table of the predicted and measured peak memory on a CPU, in MiB."""
    lines = []
    for row in (*memory.fits("memory-cpu.json"), *memory.fits("memory-ranks.json")):
        name = row["name"] + (f", {row['ranks']} ranks" if row["ranks"] > 1 else "")
        line = {"step": f"{row['model']}, B {row['batch_size']}", "script": name}
        sizes = {part: row["parts"][part] for part in ("logits", "activations")}
        sizes |= {"predicted, MiB": row["peak"], "measured, MiB": row["measured"]}
        line |= {heading: f"{size / 2**20:,.0f}" for heading, size in sizes.items()}
        lines.append(line | {"error": percent(row["peak"] / row["measured"] - 1)})
    return table(lines)


def fit_gpu(measured):
    """Return the predicted and measured peak memory on our GPUs, in GiB."""
    said = []
    for data in [data for data in measured.values() if not data.cpu]:
        here, rows = [data.settings[key] for key in ("model", "batch_size", "seq_len")], []
        for one in memory.fits("memory.json"):
            peak = data.rows.get(one["script"], {}).get("peak_gib")
            plain = not one["checkpointing"] and one["ranks"] == 1
            if peak and plain and [one[key] for key in ("model", "batch_size", "seq_len")] == here:
                sizes = {"predicted, GiB": f"{one['peak'] / 2**30:.2f}", "measured, GiB": f"{peak:.2f}"}
                rows.append({"script": one["name"]} | sizes | {"error": percent(one["peak"] / 2**30 / peak - 1)})
        if rows:
            torch = data.host["torch"]
            said.append(f"{data.label}, B {here[1]}, T {here[2]}, measured with torch {torch}:\n\n{table(rows)}")
    return "\n\n".join(said) or "We have not measured a GPU yet."


def fit():
    """Return a table of predicted peak memory on a GPU, in GiB, with a row per script and a column per batch size."""
    rows = memory.fits("memory.json")
    sizes, lines = sorted({row["batch_size"] for row in rows}), {}
    for row in rows:
        line = lines.setdefault(row["name"], {"script": row["name"]})
        line[f"B {row['batch_size']}"] = f"{row['peak'] / 2**30:.1f}"
        if row["batch_size"] == sizes[-1]:
            more = {part: f"{row['parts'][part] / 2**30:.1f}" for part in ("logits", "activations")}
            line |= {f"{part}, B {sizes[-1]}": size for part, size in more.items()}
    return table(list(lines.values()))


# ---- what the rungs learn


def saved(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def profiled():
    """Return (measurement, {script: step}) for the first measurement with the kernels of baseline.py to rung 10.

    See kernels.median_step() for the format of a step. Without such a measurement, return (None, {}).
    """
    rungs = [rung.file for rung in read_ladder() if rung.part == "rung"]
    for name, data in measurements().items():
        steps = timeline.read(ROOT / "results" / name)
        if set(rungs) - {"ddp_run.py"} <= steps.keys():
            return data, {script: steps[script] for script in rungs if script in steps}
    return None, {}


def kernels(name):
    """Return Markdown with a picture from timeline.py and a line about its measurement. `name` is steps or layer."""
    data, steps = profiled()
    if not data or (name == "layer" and not timeline.compared(data, steps)):
        return "We have not profiled all rungs yet."
    alt = {"steps": STEPS, "layer": LAYER}[name]
    about = f"{data.label}, B {data.settings['batch_size']}, T {data.settings['seq_len']}, torch {data.host['torch']}"
    return f"{two_sizes(alt.format(data.label), 'img/', name)}\n\n{about}: `results/{data.name}/kernels.json`."


def learned(name):
    """Return a measurement of quality.py as Markdown. The table of a measurement without a plot has no time columns."""
    data = saved(name)
    line, about = quality.conditions(data)
    command, _, date = line.rpartition(", ")
    rows = quality.cells(data)
    if name == LEARNED[-1]:
        shown = [head for head in rows[0] if head in ("script", "difference") or "held-out" in head]
        rows = [{head: row[head] for head in shown} for row in rows]
    return f"`{command}`, {date}: {about}.\n\n{table(rows)}"


# ---- the page of a rung


@cache
def measurements():
    """Return {folder name: Measurement} for the pages. Raises ValueError if none contains the whole ladder."""
    if not (measured := newest()):
        raise ValueError("results/ has no measurement of the whole ladder: run make ladder")
    return measured | newest(partial=True)


def counts_of(number):
    """Return a table of the counts of a rung and the previous rung, without groups of kernels that hardly differ."""
    rung, steps, rows = find(number), counts.read_counts()[COUNTED] | counts.read_counts(BEYOND)[COUNTED], []
    names = [script for script in (rung.before, rung.file) if script]
    per = "B {1}, T {2}".format(*COUNTED)

    def add(what, figures, form):
        row = {f"[counted](../counts.md), a step of `{COUNTED[0]}`, {per}": what}
        row |= {title(name): format(figure, form) for name, figure in zip(names, figures, strict=True)}
        if rung.before:
            first, last = figures
            change = last / first - 1 if first else 0
            row["change"] = percent(change) if abs(change) >= 0.0005 else "same" if first == last else "under 0.1%"
        rows.append(row)

    flops, moved, kernels = zip(*(counts.totals(steps[name]) for name in names), strict=True)
    add("TFLOP", [one / 1e12 for one in flops], ".2f")
    add("GB moved", [one / 1e9 for one in moved], ".1f")
    for kind in plots.GROUPS:
        group = [counts.totals(steps[name], kind)[1] for name in names]
        if max(group) - min(group) >= 0.01 * moved[0] or len(group) == 1 and group[0]:
            add(f"GB moved: {kind}", [one / 1e9 for one in group], ".1f")
    add("kernels", kernels, ",")
    return f"\n{table(rows)}\n"


def measured(number):
    """Return the measurements of a rung and the previous rung, and the predictions for the rung.

    A measurement of only some scripts appears if no other measurement for its device and model has the rung.
    """
    rung, rows, said = find(number), {}, []
    for data in measurements().values():
        row, here = data.rows.get(rung.file), (data.host["name"], data.settings["model"])
        if here in rows or not row or not (row["median_ms"] or row["error"]):
            continue
        ratio = row["over_before"]  # None if one of the two scripts has changed since the measurement
        pair = [one for one in (ratio and data.rows.get(rung.before), row) if one and one["median_ms"]]
        rows[here] = {
            "measurement": f"{data.label}, B {data.settings['batch_size']}, T {data.settings['seq_len']}",
            "ms per step, previous → this": " → ".join(f"{one['median_ms']:,.1f}" for one in pair) or row["error"],
            "speed-up": speed_up(ratio) + ", inconclusive" * bool(ratio and ratio["low"] < 1 < ratio["high"]),
            "peak GiB": " → ".join(f"{one['peak_gib']:.2f}" for one in pair if one["peak_gib"]),
            "training loss, last step": " → ".join(f"{one['runs'][0]['losses'][-1]:.4f}" for one in pair),
        }
    for one in read_toml("results/predictions.toml")["prediction"]:
        if rung.file in one["ms"]:
            about = f"Predicted on {one['date']} for {one['device']} at B {one['batch_size']}"
            said.append(f"{about}: {interval(one['ms'][rung.file])} ms per step; {outcome(rung.file, one)}.")
    shown = table(list(rows.values())) if rows else "We have not measured the speed of this script yet."
    return "\n" + "\n\n".join([shown, *said]) + "\n"


def interval(found):
    """Format a prediction, a list of two numbers, such as 48 to 52."""
    return " to ".join(f"{ms:,}" for ms in dict.fromkeys(found))


def latest(script, prediction):
    """Return the latest median step time in ms of a script on the device and at the sizes of a prediction, or None."""
    wanted, times = [prediction[key] for key in ("device", "model", "seq_len", "batch_size")], []
    for data in recorded():
        settings = data.settings
        rows = [row | {"batch_size": settings["batch_size"]} for row in data.rows.values() if row["script"] == script]
        rows += [row for row in data.batches if row["compile_mode"] == "default"] if script == TEN else []
        for row in rows:
            here = [data.host["name"], settings["model"], settings["seq_len"], row["batch_size"]]
            if here == wanted and row["median_ms"]:
                times.append((data.finished, row["median_ms"]))
    return max(times)[1] if times else None


def outcome(script, prediction):
    """Describe how the latest measurement of a script compares with a prediction."""
    (low, high), ms = prediction["ms"][script], latest(script, prediction)
    if not ms:
        return "not measured yet"
    miss = ms / low - 1 if ms < low else ms / high - 1 if ms > high else 0
    side = f"{abs(miss):.0%} {'above' if miss > 0 else 'below'} this range" if abs(miss) > 0.005 else "as predicted"
    return f"our latest measurement: {ms:,.1f} ms, {side}"


def pretrained():
    """Return the machine, losses and samples of our run of pretrain/train.py."""
    folder = ROOT / "results" / PRETRAINED
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    log = plots.read(folder / "log.jsonl")
    found, (steps, losses), rows = [row for row in log if "val_loss" in row], plots.curve(log, "loss"), []
    for before, row in zip([None, *found], found, strict=False):
        since = losses[(steps >= before["step"]) & (steps < row["step"])].mean() if before else None
        rows.append(
            {
                "step": f"{row['step']:,}",
                "mean training loss since the previous row": number(since, ".3f"),
                "validation loss": f"{row['val_loss']:.3f}",
            }
        )
    best = min(found, key=lambda row: row["val_loss"])
    about = f"{machine['name']}, 1 thread. torch {machine['torch']}, Python {machine['python']}, {machine['system']}."
    said = [about, "![Training and validation loss of the run](img/pretrained.svg)", table(rows)]
    for when, row in ("at the lowest validation loss", best), ("at the end", found[-1]):
        said.append(f"A sample {when} (step {row['step']:,}):\n\n```text\n{row['samples'][0].strip()}\n```")
    return "\n" + "\n\n".join(said) + "\n"


# ---- the pages


@cache
def parts():
    """Return {name: Markdown of a part}."""
    measured = measurements()
    whole = {name: data for name, data in measured.items() if data.whole}
    public, found, data = read_toml("results/public.toml"), counts.read_counts(), next(iter(whole.values()))
    alt = f"For each rung: ms per step on {data.label}, and the TFLOP, GB moved and kernels of one step"
    return {name: learned(name) for name in LEARNED} | {
        "picture": picture(list(whole.values()), "docs/pages/img/"),
        "front": picture(list(whole.values()), "img/"),
        "counts": two_sizes(alt, "img/", "counts"),
        "ladder": ladder(data),
        "speeds": table(speeds(public["speed"], found[COUNTED])),
        "ours": table(ours(whole)),
        "counted": table(counted(found)) + f"\n\nCounted with torch {counts.counted_with()}.",
        "floors": table(floors(found["gpt2", 16, 1024])),
        "beside": beside(whole, public["log"], found),
        "fit": fit(),
        "fit_measured": fit_measured(),
        "fit_gpu": fit_gpu(whole),
        "steps": kernels("steps"),
        "layer": kernels("layer"),
        "peer_counted": peer_counted(),
        "beyond": beyond(data),
        "results": results(measured),
        "log": printed(data),
    }


def part(name):
    """Return a part of a page, with the blank lines that separate it from the comments around it."""
    return f"\n{parts()[name]}\n"


def draw_plots():
    """Draw the plots of the pages."""
    data, found = next(iter(measurements().values())), counts.read_counts()
    if not (steps := found.get(tuple(data.settings[key] for key in ("model", "batch_size", "seq_len")))):
        raise ValueError(f"results/counts.json has no counts for the settings of results/{data.name}: run make counts")
    sums = {script: {kind: counts.totals(step, kind) for kind in plots.GROUPS} for script, step in steps.items()}
    figures = plots.figures(data) | {name: plots.held_out(quality.compare(saved(name))) for name in LEARNED[:-1]}
    figures |= timeline.pictures(*profiled())
    figures["tokens-narrow"] = plots.tokens(data, wide=False)
    figures["counts"], figures["counts-narrow"] = (plots.three_counts(sums, data, wide) for wide in (True, False))
    figures["pretrained"] = plots.losses({"this run": plots.read(ROOT / "results" / PRETRAINED / "log.jsonl")})
    written = {ROOT / IMAGES / f"{name}.svg": plots.svg(figure) for name, figure in figures.items()}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    for stale in set((ROOT / IMAGES).glob("*.svg")) - written.keys():
        stale.unlink()


def compare(first, second):
    """Return a table of the scripts in both measurements.

    Raises ValueError if the measurements differ in device, model, batch size or sequence length.
    """
    mine, its = ({"device": one.host["device"]} | one.settings for one in (first, second))
    if differ := [key for key in ("device", "model", "batch_size", "seq_len") if mine[key] != its[key]]:
        raise ValueError(f"the measurements differ in {', '.join(differ)}: their step times are not comparable")
    rows = []
    for script, row in first.rows.items():
        other = second.rows.get(script)
        if not (other and other["median_ms"] and row["median_ms"]):
            continue
        (low, high), (other_low, other_high) = row["quartiles_ms"], other["quartiles_ms"]
        rows.append(
            {
                "script": script,
                "first, ms per step (quartiles)": step(row),
                "second, ms per step (quartiles)": step(other),
                "times as fast": f"{row['median_ms'] / other['median_ms']:.2f}×",
                "quartiles overlap": "yes" if low <= other_high and other_low <= high else "no",
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="*", type=Path, help="one or two folders in results/")
    parser.add_argument("--plots", action="store_true", help="draw the plots of the pages")
    args = parser.parse_args()
    if args.plots == bool(args.folders) or len(args.folders) > 2:
        parser.error("expected one folder, two folders, or --plots")
    try:
        if args.plots:
            draw_plots()
            return
        found = [records.load(folder) for folder in args.folders]
        if len(found) == 1:
            print(records.summary(found[0]), end="")
            return
        rows = compare(*found)
        for place, data in zip(("first", "second"), found, strict=True):
            print(f"{place}: {' '.join(conditions(data)[:2])}")
        if differ := [key for key, value in found[0].host.items() if value != found[1].host.get(key) and key != "id"]:
            print(f"They differ in {', '.join(differ)}: a difference in time may have causes other than the scripts.")
        print(f"\n{records.text(rows) or 'No script was measured in both folders.'}")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
