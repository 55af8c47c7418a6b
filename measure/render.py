"""From measurements to the README's table and docs/img/*.svg:  python measure/render.py [FOLDER]   (make figures)

Takes the named folders of results/, else the newest of each device and model, GPUs first, and also writes their
summary.txt. What it writes depends on nothing else, so a second run changes nothing.
"""

import argparse
import io
import os
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from record import ROOT, read, too_large
from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- measured, written by `make figures` from results/ -->\n", "<!-- end of what was measured -->\n"
RUNG, PEER, INK, PAPER = "#3b78c4", "#c8702a", "#1f2328", "#ffffff"
DARK = {INK: "#e6edf3", PAPER: "#0d1117"}
ALT = {
    "tokens": "Training speed",
    "kernels": "Where the time of a step goes",
    "memory": "Peak memory",
    "loss-steps": "Loss over steps",
    "loss-time": "Loss over time",
}
GROUPS = {  # of measure/kernels.py
    "matmul": "#3b78c4",
    "attention": "#2a9d8f",
    "softmax and loss": "#c8702a",
    "normalisation and element-wise": "#b8a038",
    "optimizer": "#9b5fc0",
    "copies": "#c2527a",
    "idle": "#8b949e",
}
matplotlib.rcParams.update(
    {name: INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    | {"svg.fonttype": "none", "svg.hashsalt": "ladder", "font.family": "sans-serif", "font.size": 10}
)


def times(ratio):
    """1.52× (1.50–1.55): the median over the passes, the least and the largest."""
    if not ratio:
        return ""
    spread = f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio["low"] != ratio["high"] else ""
    return f"{ratio['median']:.2f}×{spread}"


def cells(data):
    """The table: the names of its columns, then a row per script."""
    reserved = any(row["profile"] and row["profile"]["reserved_gib"] for row in data["rows"])
    head = ["script", "ms per step (quartiles)", "tokens/s", "× baseline", "× the one before"]
    head += ["peak GiB (reserved)" if reserved else "peak GiB", "first step, s", "model TFLOP/s", "of the roof"]
    fits = any(row["fit"] for row in data["rows"])
    table = [head + (["largest B", "tokens/s there"] if fits else [])]
    for row in data["rows"]:
        fit = row["fit"] or {}
        if row["median_ms"] is None:
            line = [row["name"], row["error"] or "not measured yet"] + [""] * (len(head) - 2)
        else:
            low, high = row["quartiles_ms"]
            line = [row["name"], f"{row['median_ms']:,.1f} ({low:,.1f}–{high:,.1f})", f"{row['tokens_per_s']:,.0f}"]
            line += [times(row["over_baseline"]), times(row["over_before"])]
            line += ["" if row[key] is None else f"{row[key]:.2f}" for key in ("peak_memory_gib", "first_step_s")]
            if row["profile"] and row["profile"]["reserved_gib"]:
                line[5] += f" ({row['profile']['reserved_gib']:.2f})"
            line += [*share(row, row["precision"])]
            if row["error"]:
                line[0] += f" (a pass failed: {row['error']})"
        if fits:
            speed = f"{fit['tokens_per_s']:,.0f}" if fit.get("tokens_per_s") else fit.get("error") or ""
            limit = too_large(fit.get("limit") or "")
            line += [f"{fit.get('batch_size') or ('none' if limit else '')}{'+' if limit == 'text' else ''}", speed]
        table.append(line)
    return table


def share(speed, precision):
    """Model TFLOP/s, and their share of the roof."""
    tflops = "" if speed["tflops"] is None else f"{speed['tflops']:.3g}"
    return tflops, "" if speed["roof_share"] is None else f"{speed['roof_share']:.0%} {precision}"


def batch_cells(data):
    """The table of batch sizes and compile modes, or nothing."""
    table = [["rung 10", "compile mode", "ms per step (one run)", "tokens/s", "model TFLOP/s", "MFU, of the roof"]]
    for cell in data["batches"]:
        line = [f"B {cell['batch_size']}", cell["compile_mode"]]
        if cell["run"]["error"]:
            table.append([*line, cell["run"]["error"], "", "", ""])
        else:
            line += [f"{cell['median_ms']:,.1f}", f"{cell['tokens_per_s']:,.0f}", *share(cell, cell["precision"])]
            table.append(line)
    return table if data["batches"] else []


def commits(data):
    """The commits of a measurement, short: 2e54cd5."""
    known = [commit.replace(commit[:40], commit[:7]) for commit in data["commits"] if commit]
    return f"Commit {' and '.join(known)}" if known else "Commit unknown"


def conditions(data):
    """What was measured where, how and when, in sentences."""
    m, s, hosts = data["machine"], data["settings"], data["hosts"]
    cpu = m["device"] == "cpu"
    capability = f", {m['capability']}" if m["capability"] not in (None, "DEFAULT") else ""  # of a CPU: AVX2, AVX512
    where = [f"CPU: {m['name']}{capability}" if cpu else m["name"]]
    for host in hosts:
        about = [f"{host['cores']} cores"] if cpu else [f"{host['device_memory_gib']} GiB", f"driver {host['driver']}"]
        about += [] if cpu else [f"CUDA {m['cuda']}", f"cuDNN {host['cudnn']}"]
        where[0] += ", " + ", ".join(about) if len(hosts) == 1 else ""
        where += [f"torch {m['torch']}, Python {host['python']}, {host['system']}, {host['memory_gib']} GiB of memory"]
        if len(hosts) > 1:
            where[-1] = f"On {host['cpu']}, {', '.join(about)}, {where[-1]}"
    whole = min((len({run["pass"] for run in row["runs"]}) for row in data["rows"] if row["kind"] != "peer"), default=0)
    passes = f"{whole} passes, interleaved, of" if whole > 1 else "one pass of" if whole else "part of a pass of"
    asked = f" (of {s['repeat']} that were asked for)" if whole < s["repeat"] else ""
    lines = [
        f"{'. '.join(where)}. {data['started'][:10]}.",
        f"{s['model']}, B {s['batch_size']}, T {s['seq_len']}; {passes} {s['steps']} steps{asked}: "
        f"`{data['command']}`. {commits(data)}.",
    ]
    if data["roof"]:
        best = ", ".join(f"{precision} {tflops:.3g}" for precision, tflops in data["roof"]["ceilings_tflops"].items())
        lines.append(f"The roof, measured: {best} TFLOP/s; copies {data['roof']['copy_gb_per_s']:.3g} GB/s.")
    runs = [run for row in data["rows"] for run in row["runs"]]
    clocks = [run["gpu"]["clock_mhz"] for run in runs if run["gpu"] and run["gpu"]["clock_mhz"]]
    if clocks:
        before = hosts[0]["gpu"] or {}
        start = f"{before['clock_mhz']} MHz before the first run, " if before.get("clock_mhz") else ""
        limit = f"; power limit {before['power_limit_w']} W" if before.get("power_limit_w") else ""
        lines.append(f"Clock: {start}{min(clocks)} to {max(clocks)} MHz under load{limit}.")
    profiled = [row for row in data["rows"] if row["profile"] and row["profile"]["attention"]]
    kernels = []
    for kind, group in groupby(profiled, key=lambda row: row["profile"]["attention"]):
        names = [row["name"].removeprefix("speedup_").removesuffix(".py") for row in group]
        kernels.append(f"{kind} ({names[0]}{f' to {names[-1]}' if len(names) > 1 else ''})")
    if kernels:
        lines.append(f"Attention: {'; '.join(kernels)}.")
    if busy := [run["busy"] for run in runs if run["busy"]]:
        lines.append(f"The machine was busy before {len(busy)} of {len(runs)} runs ({busy[0]}).")
    return lines


def markdown(table):
    """A table for the README."""
    head, *body = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([f"`{row[0]}`", *row[1:]] for row in body)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def plain(*parts):
    """Sentences and tables (lists of rows, the first of which is the head) as text for a terminal."""
    console = Console(width=250, no_color=True, file=open(os.devnull, "w"), record=True)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False, soft_wrap=True)
            continue
        table = Table(*part[0], box=None, pad_edge=False, padding=(0, 2))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in part[1:]:
            table.add_row(*row)
        console.print("", table, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def summary(data):
    """All that was measured, as text."""
    tables = [table for table in (cells(data), batch_cells(data)) if table]
    return plain(*conditions(data), *tables)


def bars(axes, rows, values, labels, unit):
    names, colours = [row["name"] for row in rows], [PEER if row["kind"] == "peer" else RUNG for row in rows]
    shown = axes.barh(names, values, color=colours, height=0.7)
    axes.bar_label(shown, labels, padding=4, color=INK)
    axes.set_xlabel(unit)
    axes.set_xlim(0, 1.4 * max(values))
    axes.invert_yaxis()


def curves(axes, rows, over):
    """The losses of each row's first good run, over what over() makes of the run."""
    for number, row in enumerate(rows):
        run = next(run for run in row["runs"] if not run["error"])
        x, losses = over(run)
        style = "-" if row["kind"] == "rung" and number < 10 else "--"
        axes.plot(x, losses, style, color=f"C{number % 10}", label=row["name"], linewidth=1.3)
    axes.set_ylabel("loss, nats per token")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def figures(data):
    """Name -> figure; only those that there is something to draw for."""
    rows = [row for row in data["rows"] if row["median_ms"]]
    title = f"{data['settings']['model']}, B {data['settings']['batch_size']}, T {data['settings']['seq_len']}"
    title += f", on {'a CPU, ' if data['machine']['device'] == 'cpu' else ''}{data['machine']['name']}"
    made = {}

    def figure(name, heading, rows, width=10.0):
        made[name] = Figure(figsize=(width, 1.4 + 0.32 * max(8, len(rows))), layout="constrained", facecolor=PAPER)
        axes = made[name].add_subplot(facecolor=PAPER)
        axes.set_title(f"{heading}\n{title}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        return axes

    if not rows:
        return made
    speeds = [row["tokens_per_s"] for row in rows]
    labels = [f"{speed:,.0f} · {times(row['over_baseline'])}" for speed, row in zip(speeds, rows, strict=True)]
    bars(figure("tokens", f"{ALT['tokens']}, and times baseline", rows), rows, speeds, labels, "tokens per second")
    remembered = [row for row in rows if row["peak_memory_gib"]]
    if remembered:
        memory = [row["peak_memory_gib"] for row in remembered]
        kind = "of the process" if data["machine"]["device"] == "cpu" else "of the GPU's allocator"
        axes = figure("memory", f"{ALT['memory']} {kind}", remembered)
        bars(axes, remembered, memory, [f"{gib:.2f}" for gib in memory], "GiB")
    axes = figure("loss-steps", ALT["loss-steps"], rows)
    curves(axes, rows, lambda run: (range(len(run["losses"])), run["losses"]))
    axes.set_xlabel("step")
    axes = figure("loss-time", ALT["loss-time"], rows)
    curves(axes, rows, lambda run: (np.cumsum([0, *run["times_ms"][1:]]) / 1000, run["losses"]))
    axes.set_xlabel("seconds of training, without the first step (compilation)")
    profiled = [row for row in data["rows"] if row["profile"] and row["profile"]["groups_ms"]]
    if profiled:
        axes, left = figure("kernels", ALT["kernels"], profiled), [0.0] * len(profiled)
        for kind, colour in GROUPS.items():
            widths = [row["profile"]["groups_ms"][kind] for row in profiled]
            axes.barh([row["name"] for row in profiled], widths, left=left, color=colour, label=kind, height=0.7)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        axes.set_xlabel("milliseconds per step, under the profiler")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        axes.invert_yaxis()
    return made


def svg(figure):
    """A figure as SVG, the same text each time."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def write_svg(figure, path):
    """A figure as an SVG file that is dark where the reader's browser is."""
    swap = "".join(f'[style*="{light}"]{{fill:{dark}}}' for light, dark in DARK.items())
    swap += f'[style*="stroke: {INK}"]{{stroke:{DARK[INK]}}}'
    swap = f"<style>@media (prefers-color-scheme: dark){{{swap.replace('}', ' !important}')}}}</style>"
    path.write_text(svg(figure).replace("</svg>", f"{swap}</svg>"), encoding="utf-8")


def draw(data, folder, prefix=""):
    """Write the figures of a measurement, and return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = figures(data)
    for name, figure in made.items():
        write_svg(figure, folder / f"{prefix}{name}.svg")
    return list(made)


def write(folder):
    """What stands beside a ladder.json: the table as summary.txt, which is also printed, and the plots."""
    data = read(folder / "ladder.json")
    text = summary(data)
    (folder / "summary.txt").write_text(text, encoding="utf-8")
    draw(data, folder)
    print(f"\n{text}\nplots: {folder}/*.svg")


def newest():
    """The folder with the newest finished measurement of each device and model: GPUs first, then by date."""
    found = {}
    for path in (ROOT / "results").glob("*/ladder.json"):
        data = read(path)
        if data["finished"] and not data["settings"]["only"]:
            age = data["machine"]["device"] != "cpu", data["finished"]
            key = data["machine"]["name"], data["settings"]["model"]
            found[key] = max(found.get(key, ((False, ""), None)), (age, path.parent))
    return [folder for _, folder in sorted(found.values(), reverse=True)]


def no_gpu(measured):
    """What a reader should know of results that are all of CPUs; else nothing."""
    if any(data["machine"]["device"] != "cpu" for data in measured):
        return ""
    return "No GPU has been measured for this repository yet, and what one gains cannot be read from a CPU."


def section(folders):
    """The README's part on what was measured: the first in full, links to the others. Writes its figures."""
    measured = {folder.name: read(folder / "ladder.json") for folder in folders}
    (name, data), *others = measured.items()
    where, *how = conditions(data)
    parts = [no_gpu(measured.values()), f"**{where}**", " ".join(how)]
    parts += [markdown(table) for table in (cells(data), batch_cells(data)) if table]
    made = draw(data, ROOT / "docs" / "img", f"{name}-")
    for stale in (path for figure in ALT for path in (ROOT / "docs" / "img").glob(f"*-{figure}.svg")):
        if stale.name not in [f"{name}-{figure}.svg" for figure in made]:
            stale.unlink()
    parts += [f"![{ALT[figure]}](docs/img/{name}-{figure}.svg)" for figure in made if figure in ("tokens", "kernels")]
    links = [f"[{ALT[f].lower()}](docs/img/{name}-{f}.svg)" for f in made if f not in ("tokens", "kernels")]
    parts.append(f"More: {', '.join(links)}, [all that was measured](results/{name}/ladder.json).")
    for name, data in others:
        link = f"[table](results/{name}/summary.txt), [all that was measured](results/{name}/ladder.json)"
        parts.append(f"Measured as well: {data['settings']['model']}. {conditions(data)[0]} {commits(data)}: {link}.")
    return "\n" + "".join(part.rstrip("\n") + "\n\n" for part in parts if part)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="*", type=Path, help="default: the newest of each device and model")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    try:
        if not (folders := [folder.resolve() for folder in args.folders] or newest()):
            raise ValueError("results/ holds no finished measurement: make ladder")
        if foreign := [folder for folder in folders if folder.parent != ROOT / "results"]:
            raise ValueError(f"{foreign[0]} is not in results/, where the README could link to it")
        text = readme.read_text(encoding="utf-8")
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        readme.write_text(text[:start] + section(folders) + text[end:], encoding="utf-8")
        for folder in folders:  # the README links to their tables
            text = summary(read(folder / "ladder.json"))
            (folder / "summary.txt").write_text(text, encoding="utf-8")
            print(text)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
