"""Write the generated parts of README.md and docs/pages/:  python measure/publish.py [FOLDER]   (make figures)

Each generated part is between two comments in its file. Its contents come from ladder.toml, the scripts, measure/ and
results/. To choose the measurements to show, name their folders. The default is the latest measurement of each device
and model, GPUs first. Measurements made with --only appear only in docs/pages/results.md and on the pages of the
scripts that they include. This program also writes summary.txt in these folders, a text file for each measurement
of quality.py and startup.py, and the plots in docs/pages/img/. A second run with the same inputs changes no file.
"""

import argparse
import json
import re
from pathlib import Path

import floor
import quality
import render
import startup
from commands import TEN
from ladder import changed_lines, read_ladder, read_toml, title
from record import ROOT, read

OPENS = r"<!-- ([\w-]+), written by `make figures` -->\n"
BLOCK = re.compile(rf"({OPENS}).*?(<!-- end of \2 -->)", re.DOTALL)
IMAGES = Path("docs", "pages", "img")
LEARNED = "quality", "quality-optimizer", "muon"  # measurements that quality.py made
PROFILED = "cpu-amd-epyc-2026-11-23"  # the measurement that docs/pages/transformers.md explains
STARTED = "startup-nano", "startup-gpt2"  # measurements that startup.py made
FIRST = "T4", "L4", "RTX 4090", "RTX 5090", "A100 SXM 80 GB", "H100 SXM", "H200"  # the cards that the README lists


def table(rows):
    """Return a Markdown table of rows, each a dict of heading -> cell. Columns of numbers are right-aligned."""
    if not rows:
        return "None yet."
    numbers = [
        all(re.fullmatch("[0-9.,%×+−–/ ]*", cell) for cell in cells)
        for cells in zip(*map(dict.values, rows), strict=True)
    ]
    lines = [list(rows[0]), ["---:" if right else "---" for right in numbers]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*lines, *(row.values() for row in rows)])


def row_of(data, script):
    """Return a script's row in a measurement, or None."""
    return next((row for row in data["rows"] if row["name"] == script), None)


def over(ratio):
    """Format the range of a speed-up from record.faster, such as 1.03–1.15×, or one figure if both ends are equal."""
    if not ratio:
        return ""
    low, high = (f"{ratio[end]:.2f}" for end in ("low", "high"))
    return f"{low}–{high}×" if low != high else f"{ratio['median']:.2f}×"


def minutes(rung):
    """Return the reading time of a rung in minutes: 200 words per minute for its page, and 3 s per changed line.

    All lines of baseline.py count, because you read the whole file.
    """
    page = (ROOT / "docs" / "pages" / "rungs" / f"{Path(rung.file).stem}.md").read_text(encoding="utf-8")
    words = len(re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL).split())
    code = (ROOT / rung.file).read_text(encoding="utf-8")
    lines = sum(changed_lines(rung.before, rung.file)) if rung.before else code.count("\n")
    return max(1, round(words / 200 + lines * 3 / 60))


def ladder(data, log, counts):
    """Return the README's table of rungs, with the speed-ups in a public log and in our measurement."""
    steps = counts["gpt2", log["batch_size"], log["seq_len"]]
    beside = floor.beside(log["ms"], steps, floor.Card.read(log["card"]))
    public = {row["script"]: row["measured, × previous"] for row in beside}
    device, rows = "CPU" if data["machine"]["device"] == "cpu" else data["machine"]["name"], []
    for rung in read_ladder():
        if rung.part == "rung":
            gain = (row_of(data, rung.file) or {}).get("over_before")
            added, removed = changed_lines(rung.before, rung.file) if rung.before else (0, 0)
            rows.append(
                {
                    "rung": f"[{rung.number}]({rung.file})",
                    "idea": f"[{rung.idea}](docs/pages/rungs/{Path(rung.file).stem}.md)",
                    "kind": rung.kind,
                    f"{log['card']}, public log": public.get(rung.file, ""),
                    f"{device}, {data['settings']['model']}": over(gain),
                    "lines": f"+{added} −{removed}" if rung.before else "",
                    "minutes": f"{minutes(rung)}",
                }
            )
    return rows


def speeds(published, counts, only=None):
    """Return the table of public speeds.

    If `only` lists cards, the table contains only the fastest PyTorch run of GPT-2 124M on each of them.
    """
    flops = floor.totals(counts[render.COUNTED]["baseline.py"])[0] / (4 * 1024)  # per token, including masked scores
    peaks, rows = read_toml("measure/cards.toml"), {}
    for one in published:
        plain = one.get("plain", True)
        if only and not (one["card"] in only and plain and one["ran"].startswith("PyTorch")):
            continue
        speed, size = one["tokens_per_s"], one.get("batch_size")
        peak = peaks.get(one.get("peak", one["card"]), {}).get(one["precision"])
        row = {"card": one["card"], "tokens/s": f"{speed:,}", "B": render.number(size, "d")}
        row["ms"] = f"{1000 * size * 1024 / speed:,.0f}" if size else ""
        row["MFU"] = f"{speed * flops / peak / 1e12:.0%}" if peak and plain else ""
        row |= {} if only else {"what ran": one["ran"]}
        row["measured by"] = f"[{one['source']}]({one['url']})" if "url" in one else one["source"]
        # If `only` is given, each run replaces the card's earlier run, and public.toml lists a card's fastest run last.
        rows[one["card"] if only else len(rows)] = row
    return list(rows.values())


def counted(counts):
    """Return the table of counts for GPT-2: one row per rung, with the counts at each B."""
    tables = [floor.cells(steps) for steps in counts.values()]
    sizes = " / ".join(str(batch_size) for _, batch_size, _ in counts)
    return [
        {"rung": title(rows[0]["script"])}
        | {f"{what}, B {sizes}": " / ".join(row[what] for row in rows) for what in list(rows[0])[1:]}
        for rows in zip(*tables, strict=True)
    ]


def floors(steps):
    """Return the table of floors (lower bounds on the step time) in ms.

    It has a row per script in `steps` and a column per card in cards.toml.
    """
    cards = {name: floor.Card.read(name) for name in read_toml("measure/cards.toml")}
    return [
        {"floor, ms": title(script)} | {name: f"{card.floor_ms(step)[0]:.1f}" for name, card in cards.items()}
        for script, step in steps.items()
    ]


def beside(measured, logs, counts):
    """Yield (log, its table of step times and floors, two lists of rungs) for each log.

    One list is sorted by measured speed-up, and the other by the speed-up according to the floor. Each list
    leaves out the rungs whose speed-up over the log's previous rung is below 1.02.
    Public logs come first, followed by our measurements on GPUs. The floors for our GPUs use their measured peaks.
    """
    logs = [(log, floor.Card.read(log["card"])) for log in logs]
    for data in measured.values():
        about = {key: data["settings"][key] for key in ("model", "batch_size", "seq_len")}
        steps = counts.get(tuple(about.values()), {})
        done = {row["name"]: row["median_ms"] for row in data["rows"] if row["median_ms"]}
        if data["machine"]["device"] != "cpu" and data["roof"] and steps.keys() & done.keys():
            about |= {
                "about": render.label(data),
                "url": "",
                "outdated": [row["name"] for row in data["rows"] if not row["over_before"]],
                "ms": {script: done[script] for script in steps if script in done},
            }
            logs.append((about, floor.Card(data["roof"]["ceilings_tflops"], data["roof"]["copy_gb_per_s"])))
    for log, card in logs:
        rows = floor.beside(log["ms"], counts["gpt2", log["batch_size"], log["seq_len"]], card)
        for row in rows:
            row["measured, × previous"] *= row["script"] not in log.get("outdated", ())
        orders = []
        for gain in ("measured, × previous", "floor, × previous"):
            gained = [row for row in rows if row["measured, × previous"] and float(row[gain][:-1]) >= 1.02]
            gained.sort(key=lambda row: -float(row[gain][:-1]))
            orders.append(", ".join(title(row["script"])[:2] for row in gained))
        yield log, [row | {"script": title(row["script"])} for row in rows], orders


def ours(measured):
    """Return the table of our measurements of rung 10, with the percentage of the measured peak."""
    rows = []
    for data in measured.values():
        row, settings = row_of(data, TEN), data["settings"]
        if row and row["median_ms"]:
            rows.append(
                {
                    "device": render.label(data),
                    "B": str(settings["batch_size"]),
                    "T": str(settings["seq_len"]),
                    "ms": f"{row['median_ms']:,.1f}",
                    "tokens/s": f"{row['tokens_per_s']:,.0f}",
                    "of the measured peak": render.number(row["roof_share"], ".0%"),
                }
            )
    return rows


def two(measured):
    """Return the rows of baseline.py and rung 10 in the first suitable measurement.

    The measurement must have both rows and use the default settings of its device.
    """
    for data in measured.values():
        defaults = ("nano", 4, 128) if data["machine"]["device"] == "cpu" else ("gpt2", 4, 1024)
        rows = [row_of(data, script) for script in ("baseline.py", TEN)]
        here = tuple(data["settings"][key] for key in ("model", "batch_size", "seq_len"))
        if here == defaults and all(row and row["median_ms"] for row in rows):
            return {"data": data, "base": rows[0], "ten": rows[1]}
    return {"data": None}


def fits(name):
    """Return the rows of a file in results/ that memory.py wrote, each with its peak in bytes."""
    rows = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))["rows"]
    return [row | {"peak": sum(row["parts"].values())} for row in rows]


def fit_measured():
    """Return a table of predicted and measured peaks on a CPU, in MiB."""
    table = []
    for row in (*fits("memory-cpu.json"), *fits("memory-ranks.json")):
        name = row["name"] + (f", {row['ranks']} ranks" if row["ranks"] > 1 else "")
        line = {"step": f"{row['model']}, B {row['batch_size']}", "script": name}
        sizes = {part: row["parts"][part] for part in ("logits", "activations")}
        sizes |= {"predicted, MiB": row["peak"], "measured, MiB": row["measured"]}
        line |= {heading: f"{size / 2**20:,.0f}" for heading, size in sizes.items()}
        table.append(line | {"error": f"{row['peak'] / row['measured'] - 1:+.1%}".replace("-", "−")})
    return table


def fit_gpu(measured):
    """Yield (measurement, its table of predicted and measured peaks in GiB) for each measurement on a GPU."""
    predicted = fits("memory.json")
    for data in measured.values():
        here, rows = [data["settings"][key] for key in ("model", "batch_size", "seq_len")], []
        for one in predicted if data["machine"]["device"] != "cpu" else []:
            peak = (row_of(data, one["script"]) or {}).get("peak_memory_gib")
            if peak and [one[key] for key in ("model", "batch_size", "seq_len")] == here:
                sizes = {"predicted, GiB": f"{one['peak'] / 2**30:.2f}", "measured, GiB": f"{peak:.2f}"}
                error = f"{one['peak'] / 2**30 / peak - 1:+.1%}".replace("-", "−")
                rows.append({"script": one["name"]} | sizes | {"error": error})
        if rows:
            yield data, rows


def fit():
    """Return a table of predicted peaks on a GPU in GiB, with a row per script and a column per batch size."""
    rows = fits("memory.json")
    sizes, table = sorted({row["batch_size"] for row in rows}), {}
    for row in rows:
        line = table.setdefault(row["name"], {"script": row["name"]})
        line[f"B {row['batch_size']}"] = f"{row['peak'] / 2**30:.1f}"
        if row["batch_size"] == sizes[-1]:
            line |= {
                f"{part}, B {sizes[-1]}": f"{row['parts'][part] / 2**30:.1f}" for part in ("logits", "activations")
            }
    return list(table.values())


def profiles():
    """Return the profiles of rung 10 and compiled transformers in PROFILED as Markdown.

    The profile of ddp_run.py, which does the same work as rung 10 on one device, shows the noise.
    """
    data, lines = read(ROOT / "results" / PROFILED / "ladder.json"), []
    rows = [row_of(data, script) for script in (TEN, "ddp_run.py", "transformers, bf16, compiled")]
    groups = [row["profile"]["groups_ms"] | {"a step, not profiled": row["median_ms"]} for row in rows]
    for kind in groups[0]:
        ten, ddp, peer = (group[kind] for group in groups)
        line = {"ms per step": kind, "rung 10": f"{ten:.1f}", "`ddp_run.py`": f"{ddp:.1f}"}
        more = f"{peer - ten:+.1f}".replace("-", "−")
        lines.append(line | {"`transformers`": f"{peer:.1f}", "difference from rung 10": more})
    s = data["settings"]
    about = f"{render.label(data)}, B {s['batch_size']}, T {s['seq_len']}, torch {data['machine']['torch']}"
    return f"{about}, `results/{PROFILED}/`:\n\n{table(lines)}"


def peer_counted():
    """Return the counts of rung 10 and of compiled transformers as a table, with a row per group of kernels."""
    (steps,) = floor.read_counts(ROOT / "results" / "counts-peer.json").values()
    lines = []
    for kind in [*(kind for kind in render.GROUPS if kind != "idle"), None]:
        totals = [floor.totals(step, kind) for step in steps.values()]
        line = {"rung 10 / `transformers`": kind or "a step"}
        for unit, place, form in (("TFLOP", 0, ".2f"), ("GB moved", 1, ".2f"), ("kernels", 2, "d")):
            size = {"TFLOP": 1e12, "GB moved": 1e9}.get(unit, 1)
            line[unit] = " / ".join(format(total[place] / size if size > 1 else total[place], form) for total in totals)
        lines.append(line)
    return table(lines)


def saved(name):
    """Return a measurement in results/ that quality.py or startup.py made."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def described(data, program):
    """Return, as Markdown, a measurement that quality.py or startup.py made. `program` is that module."""
    line, about = program.conditions(data)
    command, _, date = line.rpartition(", ")
    return f"`{command}`, {date}: {about}.\n\n{table(program.cells(data))}"


def printed(data):
    """Return, as Markdown, the first and last step lines that baseline.py printed in a measurement."""
    run, settings = render.good(row_of(data, "baseline.py"))[0], data["settings"]
    steps = zip(range(len(run["losses"])), run["losses"], run["times_ms"], strict=True)
    tokens = settings["batch_size"] * settings["seq_len"]
    return render.part("log.md", label=render.label(data), steps=list(steps), tokens=tokens)


def parts(measured, partial=()):
    """Return ({name: Markdown of a part}, {name: figure}). Raises ValueError if baseline.py has no result.

    `partial` contains measurements made with --only. Of the parts, only that of the page of results shows them.
    """
    public, counts = read_toml("results/public.toml"), floor.read_counts()
    logs = public["log"]
    steps = counts["gpt2", logs[0]["batch_size"], logs[0]["seq_len"]]
    name, data = next(iter(measured.items()))
    if not (whole := [one for one in measured.values() if (row_of(one, "baseline.py") or {}).get("median_ms")]):
        raise ValueError("results/ has no finished measurement of baseline.py: run make ladder")
    outdated = any(rung.changed > (data["finished"] or data["started"]) for rung in read_ladder())
    figures = {f"{name}-{kind}": figure for kind, figure in render.figures(data).items()}
    figures |= {"counts": render.three_counts(steps, logs[0])}
    figures |= {"counts-narrow": render.three_counts(steps, logs[0], wide=False)}
    figures |= {name: quality.curves(saved(name)) for name in LEARNED}
    texts = {name: described(saved(name), quality) for name in LEARNED} | {
        "picture": render.part(
            "picture.md", folder="docs/pages/", logs=logs, speeds=public["speed"], result=name, data=data, drawn=figures
        ),
        "counts": render.part("picture.md", folder="", logs=logs, data=None, drawn=figures),
        "two": render.part("two.md", **two(measured)),
        "ladder": render.part(
            "ladder.md", table=table, rows=ladder(data, logs[0], counts), log=logs[0], data=data, outdated=outdated
        ),
        "cards": table(speeds(public["speed"], counts, FIRST)),
        "speeds": table(speeds(public["speed"], counts)),
        "ours": table(ours(measured)),
        "counted": table(counted(counts)) + f"\n\nCounted with torch {floor.counted_with()}.",
        "floors": table(floors(counts["gpt2", 16, 1024])),
        "beside": render.part("beside.md", logs=list(beside(measured, logs, counts)), table=table),
        "fit": table(fit()),
        "fit_measured": table(fit_measured()),
        "fit_gpu": render.part("fit_gpu.md", table=table, found=list(fit_gpu(measured))),
        "losses": f"```console\n{(ROOT / 'results' / 'losses.txt').read_text(encoding='utf-8').strip()}\n```",
        "profiles": profiles(),
        "peer_counted": peer_counted(),
        "startup": "\n\n".join(described(saved(name), startup) for name in STARTED),
        "results": render.part("results.md", results=measured | dict(partial), drawn=figures, ALT=render.ALT),
        "log": printed(whole[0]),
    }
    return texts, figures


def with_parts(path, texts):
    """Return a file's text with updated parts. Raises ValueError if a part is unknown or has no end comment."""
    text = path.read_text(encoding="utf-8")
    named, whole = re.findall(OPENS, text), [found[2] for found in BLOCK.finditer(text)]
    if unknown := set(named) - texts.keys():
        raise ValueError(f"{path.relative_to(ROOT)}: there is no part {min(unknown)}, only {', '.join(texts)}")
    if named != whole:
        raise ValueError(f"{path.relative_to(ROOT)}: a part has no end comment: {', '.join(set(named) - set(whole))}")
    return BLOCK.sub(lambda found: f"{found[1]}\n{texts[found[2]].strip()}\n\n{found[3]}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="*", type=Path, help="default: the latest results of each device and model")
    args = parser.parse_args()
    try:
        folders = [folder.resolve() for folder in args.folders]
        if foreign := [folder for folder in folders if folder.parent != ROOT / "results"]:
            raise ValueError(f"{foreign[0]} is not in results/")
        found = {folder.name: render.current(read(folder / "ladder.json")) for folder in folders}
        found = found or render.newest() | render.newest(partial=True)
        partial = {name: data for name, data in found.items() if data["settings"]["only"]}
        measured = {name: data for name, data in found.items() if name not in partial}
        if not measured:
            raise ValueError("results/ has no finished measurement of the ladder: run make ladder")
        texts, figures = parts(measured, partial)
        written = {path: with_parts(path, texts) for path in (ROOT / "README.md", *ROOT.glob("docs/pages/**/*.md"))}
        written |= {ROOT / IMAGES / f"{name}.svg": render.svg_file(figure) for name, figure in figures.items()}
        written |= {ROOT / "results" / name / "summary.txt": render.summary(data) for name, data in found.items()}
        written |= {ROOT / "results" / f"{name}.txt": quality.summary(saved(name)) for name in LEARNED}
        written[ROOT / "results" / "startup.txt"] = "\n".join(startup.summary(saved(name)) for name in STARTED)
        for stale in {path for kind in render.ALT for path in (ROOT / IMAGES).glob(f"*-{kind}.svg")} - written.keys():
            stale.unlink()
        for path, text in written.items():
            path.write_text(text, encoding="utf-8", newline="\n")
        print(*map(render.summary, found.values()), sep="\n")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
