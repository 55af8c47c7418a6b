"""Write the generated parts of README.md and docs/pages/, or print results:

    python -m measure.tables --pages                        (make figures)
    python -m measure.tables results/FOLDER                 prints its tables (make compare)
    python -m measure.tables results/FOLDER results/FOLDER  compares the two (make compare)

Each generated part is between two comments in its file. Its contents come from ladder.toml, the scripts and results/.
The pages show the latest measurement of each device and model, GPUs first. Measurements of only some scripts appear
only in docs/pages/results.md and on the pages of these scripts. --pages also draws the plots in docs/pages/img/,
and deletes other SVG files there.

With two folders, the table contains the scripts that were measured in both. It shows their median step times with
quartiles, how many times as fast the second measurement is, and whether the quartiles overlap. If they overlap, the
difference may be noise.
"""

import argparse
import json
import re
from pathlib import Path

from dev.ladder import ROOT, changed_lines, read_ladder, read_toml, title
from measure import counts, memory, plots, quality, records
from measure.records import TEN, batch_cells, cells, conditions, number, speed_up, step

OPENS = r"<!-- ([\w-]+), written by `make figures` -->\n"
BLOCK = re.compile(rf"({OPENS}).*?(<!-- end of \2 -->)", re.DOTALL)
IMAGES = Path("docs", "pages", "img")
COUNTED = "gpt2", 4, 1024  # model, B and T of the counts to show, from results/counts.json
LEARNED = "quality", "quality-optimizer", "muon"  # measurements that quality.py made
PROFILED = "cpu-amd-epyc-2026-11-28"  # the measurement that docs/pages/transformers.md explains
PEER = "transformers, compiled"
FIRST = "T4", "L4", "RTX 4090", "RTX 5090", "A100 SXM 80 GB", "H100 SXM", "H200"  # the cards that the README lists

# ---- what the pages show


def newest(partial=False):
    """Return {folder name: Measurement} with the latest measurement of each device and model.

    By default, only measurements of all rungs from baseline.py to rung 10 count. With `partial`, only the others count.
    GPT-2 on GPUs comes first, then other models on GPUs, then CPUs. In each group, the latest measurement comes first.
    """
    found, shown = [], {}
    for path in (ROOT / "results").glob("*/runs.jsonl"):
        data = records.load(path.parent)
        if data.runs and data.whole != partial:
            gpt2 = not data.cpu and data.settings["model"] == "gpt2"
            found.append((not data.cpu, gpt2, data.finished, data.name, data))
    for *_, name, data in sorted(found, key=lambda one: one[:4], reverse=True):
        shown.setdefault((data.host["name"], data.settings["model"]), (name, data))
    return dict(shown.values())


def table(rows, code=False):
    """Return a Markdown table of rows, each a dict of heading -> cell. Columns of numbers are right-aligned.

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
    return f"{ratio:+.1%}".replace("-", "−")


def three_counts(folder, log):
    """Return the picture of the counts. `folder` is the path from the page to docs/pages/."""
    alt = f"For each rung: ms per step in {log['short']}, and the TFLOP, GB moved and kernels of one step"
    narrow = f'<source media="(max-width: 600px)" srcset="{folder}img/counts-narrow.svg">'
    return f'<picture>\n{narrow}\n<img alt="{alt}" src="{folder}img/counts.svg">\n</picture>'


def picture(data, log):
    """Return the README's picture with what the ladder gains on our GPU. Without a GPU, it shows the counts."""
    base, ten, s = data.rows["baseline.py"], data.rows[TEN], data.settings
    if data.cpu or not ten["over_baseline"]:
        return three_counts("docs/pages/", log)
    gib = [row["peak_gib"] for row in (base, ten) if row["peak_gib"]]
    memory = f", and its peak memory from {gib[0]:.2f} to {gib[1]:.2f} GiB" if len(gib) == 2 else ""
    alt = f"Tokens per second of each script, measured on {data.label}"
    return f"""![{alt}](docs/pages/img/{data.name}-tokens.svg)

**What you gain**: on this GPU, rungs 01 to 10 cut a step of `{s["model"]}` at batch size (B) {s["batch_size"]} from
{base["median_ms"]:,.1f} to {ten["median_ms"]:,.1f} ms ({ten["over_baseline"]["median"]:.2f}×){memory}."""


def ladder(data, log, steps):
    """Return the README's table of rungs, with the speed-ups in a public log and in our measurement."""
    beside = counts.beside(log["ms"], steps, counts.Card.read(log["card"]))
    public = {row["script"]: row["measured, × previous"] for row in beside}
    device, rows = "CPU" if data.cpu else data.host["name"], []
    for rung in [rung for rung in read_ladder() if rung.part == "rung"]:
        added, removed = changed_lines(rung.before, rung.file) if rung.before else (0, 0)
        rows.append(
            {
                "rung": f"[{rung.number}]({rung.file})",
                "idea": f"[{rung.idea}](docs/pages/rungs/{Path(rung.file).stem}.md)",
                "kind": rung.kind,
                f"{log['card']}, public log": public.get(rung.file, ""),
                f"{device}, {data.settings['model']}": speed_up(data.rows.get(rung.file, {}).get("over_before")),
                "lines": f"+{added} −{removed}" if rung.before else "",
            }
        )
    old = " Rungs without a value have changed since our measurement." if data.outdated(data.changed) else ""
    cpu = " CPU results do not predict GPU speed-ups." if data.cpu else ""
    return f"""{table(rows)}

The two columns with × show the speed-up over the previous measured rung, in
[{log["short"]}](docs/pages/counts.md#beside-measured-steps) and in our measurement ({data.label}; range over the
passes).{old}{cpu}"""


def speeds(published, steps, only=None):
    """Return the table of public speeds. MFU is the fraction of the data sheet's peak.

    If `only` lists cards, the table contains only the fastest PyTorch run of GPT-2 124M on each of them.
    """
    flops = counts.totals(steps["baseline.py"])[0] / (4 * 1024)  # per token, including masked scores
    peaks, rows = read_toml("measure/cards.toml"), {}
    for one in published:
        plain = one.get("plain", True)
        if only and not (one["card"] in only and plain and one["ran"].startswith("PyTorch")):
            continue
        speed, size = one["tokens_per_s"], one.get("batch_size")
        peak = peaks.get(one.get("peak", one["card"]), {}).get(one["precision"])
        row = {"card": one["card"], "tokens/s": f"{speed:,}", "B": number(size, "d")}
        row["ms"] = f"{1000 * size * 1024 / speed:,.0f}" if size else ""
        row["MFU"] = f"{speed * flops / peak / 1e12:.0%}" if peak and plain else ""
        row |= {} if only else {"what ran": one["ran"]}
        row["measured by"] = f"[{one['source']}]({one['url']})" if "url" in one else one["source"]
        # If `only` is given, each run replaces the card's earlier run, and public.toml lists a card's fastest run last.
        rows[one["card"] if only else len(rows)] = row
    return list(rows.values())


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


def results(measured, drawn):
    """Return the content of docs/pages/results.md: all results. Only the first result has plots."""
    said = [] if any(not data.cpu for data in measured.values()) else ["We have not measured a GPU yet."]
    for name, data in measured.items():
        first, *others = conditions(data)
        said.append(f"## {data.label}{'' if data.whole else ', some scripts'}\n\n**{first}** {' '.join(others)}")
        said += [table(rows, code=True) for rows in (cells(data), batch_cells(data)) if rows]
        images = {kind: f"img/{name}-{kind}.svg" for kind in plots.ALT if f"{name}-{kind}" in drawn}
        said += [f"![{plots.ALT[kind]}]({images[kind]})" for kind in ("tokens", "kernels") if kind in images]
        more = [kind for kind in images if kind not in ("tokens", "kernels")]
        if more:
            said.append(f"More plots: {', '.join(f'[{plots.ALT[kind].lower()}]({images[kind]})' for kind in more)}.")
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
    """Return the table of floors (lower bounds on the step time) in ms, with a row per script and a column per card."""
    cards = {name: counts.Card.read(name) for name in read_toml("measure/cards.toml")}
    return [
        {"floor, ms": title(script)} | {name: f"{card.floor_ms(step)[0]:.1f}" for name, card in cards.items()}
        for script, step in steps.items()
    ]


def beside(measured, logs, found):
    """Return, for each log, its table of step times and floors.

    Public logs come first, followed by our measurements on GPUs. The floors for our GPUs use their measured peaks.
    """
    logs, said = [(log, counts.Card.read(log["card"])) for log in logs], []
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
            if "gains" in log:  # of our measurements: ratios within a pass
                row["measured, × previous"] = log["gains"][row["script"]]
            row["script"] = title(row["script"])
        source = f" ([source]({log['url']}))" if log.get("url") else ""
        said += [f"**{log['about']}**{source}, B {log['batch_size']}:", table(rows)]
    return "\n\n".join(said)


def profiles():
    """Return the profiles of rung 10 and compiled transformers in PROFILED as Markdown.

    The profile of ddp_run.py, which does the same work as rung 10 on one device, shows the noise.
    """
    data, lines = records.load(ROOT / "results" / PROFILED), []
    rows = [data.rows[script] for script in (TEN, "ddp_run.py", PEER)]
    groups = [row["profile"]["groups_ms"] | {"a step, not profiled": row["median_ms"]} for row in rows]
    for kind in groups[0]:
        ten, ddp, peer = (group[kind] for group in groups)
        line = {"ms per step": kind, "rung 10": f"{ten:.1f}", "`ddp_run.py`": f"{ddp:.1f}"}
        more = f"{round(peer - ten, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0, because -0.0 prints as -0.0
        lines.append(line | {"`transformers`": f"{peer:.1f}", "difference from rung 10": more})
    s = data.settings
    about = f"{data.label}, B {s['batch_size']}, T {s['seq_len']}, torch {data.host['torch']}"
    return f"{about}, `results/{PROFILED}/`:\n\n{table(lines)}"


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
    """Return a table of predicted and measured peaks on a CPU, in MiB."""
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
    """Return the predicted and measured peaks on our GPUs in GiB."""
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
    """Return a table of predicted peaks on a GPU in GiB, with a row per script and a column per batch size."""
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
    """Return a measurement in results/ that quality.py made."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def learned(name):
    """Return a measurement that quality.py made as Markdown."""
    data = saved(name)
    line, about = quality.conditions(data)
    command, _, date = line.rpartition(", ")
    return f"`{command}`, {date}: {about}.\n\n{table(quality.cells(data))}"


# ---- the pages


def parts(measured, partial):
    """Return ({name: Markdown of a part}, {name: figure}) for whole and partial measurements."""
    public, found = read_toml("results/public.toml"), counts.read_counts()
    logs, data = public["log"], next(iter(measured.values()))
    steps = found["gpt2", logs[0]["batch_size"], logs[0]["seq_len"]]
    figures = {f"{data.name}-{kind}": figure for kind, figure in plots.figures(data).items()}
    sums = {script: {kind: counts.totals(step, kind) for kind in plots.GROUPS} for script, step in steps.items()}
    figures |= {"counts": plots.three_counts(sums, logs[0])}
    figures |= {"counts-narrow": plots.three_counts(sums, logs[0], wide=False)}
    figures |= {name: plots.held_out(quality.compare(saved(name))) for name in LEARNED}
    return {name: learned(name) for name in LEARNED} | {
        "picture": picture(data, logs[0]),
        "counts": three_counts("", logs[0]),
        "ladder": ladder(data, logs[0], steps),
        "cards": table(speeds(public["speed"], found[COUNTED], FIRST)),
        "speeds": table(speeds(public["speed"], found[COUNTED])),
        "ours": table(ours(measured)),
        "counted": table(counted(found)) + f"\n\nCounted with torch {counts.counted_with()}.",
        "floors": table(floors(found["gpt2", 16, 1024])),
        "beside": beside(measured, logs, found),
        "fit": fit(),
        "fit_measured": fit_measured(),
        "fit_gpu": fit_gpu(measured),
        "profiles": profiles(),
        "peer_counted": peer_counted(),
        "results": results(measured | partial, figures),
        "log": printed(data),
    }, figures


def with_parts(path, texts):
    """Return a file's text with updated parts. Raises ValueError if a part is unknown or has no end comment."""
    text = path.read_text(encoding="utf-8")
    named, whole = re.findall(OPENS, text), [found[2] for found in BLOCK.finditer(text)]
    if unknown := set(named) - texts.keys():
        raise ValueError(f"{path.relative_to(ROOT)}: there is no part {min(unknown)}, only {', '.join(texts)}")
    if named != whole:
        raise ValueError(f"{path.relative_to(ROOT)}: a part has no end comment: {', '.join(set(named) - set(whole))}")
    return BLOCK.sub(lambda found: f"{found[1]}\n{texts[found[2]].strip()}\n\n{found[3]}", text)


def write_pages():
    """Write the parts and the plots. Raises ValueError if results/ has no measurement of the whole ladder."""
    measured = newest()
    if not measured:
        raise ValueError("results/ has no measurement of the whole ladder: run make ladder")
    texts, figures = parts(measured, newest(partial=True))
    written = {path: with_parts(path, texts) for path in (ROOT / "README.md", *ROOT.glob("docs/pages/**/*.md"))}
    written |= {ROOT / IMAGES / f"{name}.svg": plots.svg(figure) for name, figure in figures.items()}
    for path, text in written.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    for stale in set((ROOT / IMAGES).glob("*.svg")) - written.keys():
        stale.unlink()


def compare(first, second):
    """Return a table of the scripts in both measurements: a list of rows, each a dict of heading -> cell.

    Raises ValueError if the measurements differ in what they measured.
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
    parser.add_argument("--pages", action="store_true", help="write the pages")
    args = parser.parse_args()
    if args.pages == bool(args.folders) or len(args.folders) > 2:
        parser.error("expected one folder, two folders, or --pages")
    try:
        if args.pages:
            write_pages()
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
        print(f"\n{records.text(rows) or 'No script was measured in both results.'}")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
