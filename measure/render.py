"""Make tables and plots from measurements, for `make ladder`, publish.py and the site."""

import io
from itertools import groupby
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from floor import totals
from ladder import read_ladder, short, title
from matplotlib.figure import Figure
from record import ROOT, read, too_large
from rich.console import Console
from rich.table import Table

PARTS = Path(__file__).with_name("parts")  # Jinja templates, and the style of the plots
RUNG, PEER = "#3b78c4", "#c8702a"
COUNTED = "gpt2", 4, 1024  # model, B and T of the counts to show, from results/counts.json
ALT = {
    "tokens": "Training speed",
    "kernels": "Where the step time goes",
    "memory": "Peak memory",
    "loss-steps": "Loss over steps",
    "loss-time": "Loss over time",
}
GROUPS = {  # the groups of measure/kernels.py, with their colours
    "matmul": "#3b78c4",
    "attention": "#2a9d8f",
    "softmax and loss": "#c8702a",
    "normalisation and element-wise": "#b8a038",
    "optimizer": "#9b5fc0",
    "copies": "#c2527a",
    "idle": "#8b949e",
}
matplotlib.rc_file(PARTS / "plots.mplstyle")
JINJA = jinja2.Environment(
    loader=jinja2.FileSystemLoader(PARTS), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def part(name, **values):
    """Return a template from measure/parts/, filled in with these values."""
    return JINJA.get_template(name).render(**values)


def number(value, form, after=""):
    """Format a number, for example with ",.1f", and append `after`. Return an empty string for None."""
    return "" if value is None else format(value, form) + after


def times(ratio):
    """Format the result of record.faster: the median speed-up and its range, such as 1.52× (1.50–1.55)."""
    if not ratio:
        return ""
    low, high = (f"{ratio[end]:.2f}" for end in ("low", "high"))
    return f"{ratio['median']:.2f}×{f' ({low}–{high})' if low != high else ''}"


def label(data):
    """Return the device and the model of a measurement, such as "CPU: AMD EPYC, nano"."""
    device = data["machine"]
    return f"{'CPU: ' if device['device'] == 'cpu' else ''}{device['name']}, {data['settings']['model']}"


def step(row):
    """Return the median step time in ms and the quartiles, such as 471.5 (390.9–526.1)."""
    low, high = row["quartiles_ms"]
    return f"{row['median_ms']:,.1f} ({low:,.1f}–{high:,.1f})"


def cells(data):
    """Return the table of scripts as a list of rows, each a dict of heading -> cell."""
    reserved = any(row["profile"] and row["profile"]["reserved_gib"] for row in data["rows"])
    fits, table = any(row["fit"] for row in data["rows"]), []
    for row in data["rows"]:
        done, profile, fit = row["median_ms"] is not None, row["profile"] or {}, row["fit"] or {}
        error = f" (a pass failed: {row['error']})" if done and row["error"] else ""
        before = f" over {short(row['before'])}" if row["kind"] != "rung" and row["over_before"] else ""
        held = f" ({profile['reserved_gib']:.2f})" if profile.get("reserved_gib") else ""
        table.append(
            {
                "script": row["name"] + error,
                "ms per step (quartiles)": step(row) if done else row["error"] or "not measured yet",
                "tokens/s": number(row["tokens_per_s"], ",.0f"),
                "× baseline": times(row["over_baseline"]),
                "× previous": times(row["over_before"]) + before,
                "peak GiB (reserved)" if reserved else "peak GiB": number(row["peak_memory_gib"], ".2f", held),
                "first step, s": number(row["first_step_s"], ".2f"),
                "model TFLOP/s": number(row["tflops"], ".3g"),
                "of measured peak": number(row["roof_share"], ".0%", f" {row['precision']}"),
            }
        )
        if fits:
            limit = too_large(fit.get("limit") or "")
            largest = fit.get("batch_size") or ("none" if limit else "")
            table[-1]["largest B"] = f"{largest}{'+' if limit == 'text' else ''}"
            table[-1]["tokens/s at largest B"] = number(fit.get("tokens_per_s"), ",.0f") or fit.get("error") or ""
    return table


def batch_cells(data):
    """Return the table of batch sizes and compile modes in the format of cells(). The table may be empty."""
    return [
        {
            "rung 10": f"B {cell['batch_size']}",
            "compile mode": cell["compile_mode"],
            "ms per step (one run)": cell["run"]["error"] or number(cell["median_ms"], ",.1f"),
            "tokens/s": number(cell["tokens_per_s"], ",.0f"),
            "model TFLOP/s": number(cell["tflops"], ".3g"),
            "of measured peak": number(cell["roof_share"], ".0%", f" {cell['precision']}"),
        }
        for cell in data["batches"]
    ]


def commits(data):
    """Return the abbreviated commits of a measurement as text, such as "Commit 2e54cd5"."""
    known = [commit.replace(commit[:40], commit[:7]) for commit in data["commits"] if commit]
    return f"Commit {' and '.join(known)}" if known else "Commit unknown"


def conditions(data):
    """Return the machine, settings and date of a measurement as a list of paragraphs."""
    rows, kernels = data["rows"], []
    profiled = [row for row in rows if row["profile"] and row["profile"]["attention"]]
    for kind, group in groupby(profiled, key=lambda row: row["profile"]["attention"]):
        kernels.append((kind, [row["name"].removeprefix("speedup_").removesuffix(".py") for row in group]))
    passes = [len({run["pass"] for run in row["runs"]}) for row in rows if row["kind"] != "peer"] or [0]
    runs = [run for row in rows for run in row["runs"]]
    said = part("conditions.txt", **data, commit=commits(data), kernels=kernels, passes=passes, runs=runs)
    return [" ".join(paragraph.split()) for paragraph in said.split("\n\n") if paragraph.strip()]


def plain(lines, *tables):
    """Return lines followed by tables, as text for a terminal."""
    console = Console(width=250, file=io.StringIO(), force_terminal=False, markup=False, highlight=False)
    console.print(*lines, sep="\n", soft_wrap=True)
    for rows in filter(None, tables):
        table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row.values())
        console.print("", table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def summary(data):
    """Return the conditions and tables of a measurement as text."""
    return plain(conditions(data), cells(data), batch_cells(data))


def bars(axes, rows, key, labels):
    colours = [PEER if row["kind"] == "peer" else RUNG for row in rows]
    shown = axes.barh([row["name"] for row in rows], [row[key] for row in rows], color=colours, height=0.7)
    axes.bar_label(shown, labels, padding=4)
    axes.set_xlim(0, 1.4 * max(row[key] for row in rows))
    axes.invert_yaxis()


def stacks(axes, names, rows, height):
    """Draw a stacked bar for each row: its step time by group of kernels."""
    left = np.zeros(len(rows))
    for kind, colour in GROUPS.items():
        widths = [row["profile"]["groups_ms"][kind] for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=kind, height=height)
        left += widths
    axes.set_xlabel("milliseconds per step, under the profiler")
    axes.invert_yaxis()


def good(row):
    """Return the runs of a row that finished without an error."""
    return [run for run in row["runs"] if not run["error"]]


def curves(axes, rows, over):
    """Plot the losses of each row's first successful run. over(run) returns the x values."""
    for place, row in enumerate(rows):
        run = good(row)[0]
        style = "-" if row["kind"] == "rung" and place < 10 else "--"
        axes.plot(over(run), run["losses"], style, color=f"C{place % 10}", label=row["name"], linewidth=1.3)
    axes.set_ylabel("loss, nats per token")


def three_counts(steps, log, wide=True):
    """Draw four bar plots of the scripts in `steps`: the step time in a public log, and three counts by kernel group.

    The counts are FLOPs, bytes moved and kernels, at the batch size of the log. The plots are in one row, or in one
    column for a narrow screen.
    """
    rows, columns = (1, 4) if wide else (4, 1)
    figure, kinds = Figure(figsize=(10.0, 3.5) if wide else (3.8, 10.4)), [kind for kind in GROUPS if kind != "idle"]
    names = [title(script) for script in steps]
    plots = ("ms", 1, ",.0f"), ("TFLOP", 1e12, ".2f"), ("GB moved", 1e9, ".0f"), ("kernels", 1, ",.0f")
    for place, (what, unit, form) in enumerate(plots):
        whose = (
            f"our counts, batch {log['batch_size']}"
            if place
            else f"{log['card']}, batch {log['batch_size']}, public log"
        )
        axes, left = figure.add_subplot(rows, columns, place + 1), np.zeros(len(names))
        axes.set_title(f"{what} per step\n{whose}", fontsize=10)
        if place:
            for kind in kinds:
                widths = np.array([totals(step, kind)[place - 1] / unit for step in steps.values()])
                shown = axes.barh(names, widths, left=left, color=GROUPS[kind], label=kind, height=0.7)
                left += widths
        else:
            left = np.array([log["ms"].get(script, 0) for script in steps])
            shown = axes.barh(names, left, color=GROUPS["idle"], height=0.7)
        axes.bar_label(shown, [format(count, form) if count else "not in the log" for count in left], padding=4)
        axes.set(xlim=(0, 1.45 * left.max()), xticks=[])
        axes.tick_params(labelleft=place % columns == 0)
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6 if wide else 2, fontsize=8)
    return figure


def figures(data):
    """Return {name: figure} for the figures that the measurement has data for."""
    rows, made = [row for row in data["rows"] if row["median_ms"]], {}
    if not rows:
        return made
    heading = part("title.txt", **data)

    def axes(name, rows, unit, more=""):
        made[name] = Figure(figsize=(10.0, 1.4 + 0.32 * max(8, len(rows))))
        return made[name].add_subplot(title=f"{ALT[name]}{more}\n{heading}", xlabel=unit)

    labels = [f"{row['tokens_per_s']:,.0f} · {times(row['over_baseline'])}" for row in rows]
    bars(axes("tokens", rows, "tokens per second", " and speed-up over baseline"), rows, "tokens_per_s", labels)
    if remembered := [row for row in rows if row["peak_memory_gib"]]:
        whose = " of the process" if data["machine"]["device"] == "cpu" else " of the GPU's allocator"
        labels = [f"{row['peak_memory_gib']:.2f}" for row in remembered]
        bars(axes("memory", remembered, "GiB", whose), remembered, "peak_memory_gib", labels)
    curves(axes("loss-steps", rows, "step"), rows, lambda run: range(len(run["losses"])))
    seconds = axes("loss-time", rows, "seconds of training, without the first step (compilation)")
    curves(seconds, rows, lambda run: np.cumsum([0, *run["times_ms"][1:]]) / 1000)
    if profiled := [row for row in data["rows"] if row["profile"] and row["profile"]["groups_ms"]]:
        stacks(axes("kernels", profiled, ""), [row["name"] for row in profiled], profiled, height=0.7)
    for name in made.keys() & {"loss-steps", "loss-time", "kernels"}:
        made[name].axes[0].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return made


def svg(figure):
    """Return a figure as SVG text. Equal figures produce equal text."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def svg_file(figure):
    """Return a figure as the text of an SVG file that follows the browser's dark mode."""
    dark = (PARTS / "dark.css").read_text(encoding="utf-8").strip()
    return svg(figure).replace("</svg>", f"<style>{dark}</style></svg>")


def write_svg(figure, path):
    path.write_text(svg_file(figure), encoding="utf-8", newline="\n")


def draw(made, folder):
    """Write the result of figures() into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in made.items():
        write_svg(figure, folder / f"{name}.svg")


def write(folder):
    """Write summary.txt and the plots into the folder of a ladder.json, and print the summary."""
    data = read(folder / "ladder.json")
    text = summary(data)
    (folder / "summary.txt").write_text(text, encoding="utf-8")
    draw(figures(data), folder)
    print(f"\n{text}\nplots: {folder}/*.svg")


def current(data):
    """Return a measurement without the speed-ups over the previous script that a later edit of a script invalidates."""
    changed = {rung.file: rung.changed for rung in read_ladder()}
    for row in data["rows"]:
        if max(changed.get(row["name"], ""), changed.get(row["before"], "")) > (data["finished"] or data["started"]):
            row["over_before"] = None
    return data


def newest(partial=False):
    """Return {folder name: measurement} with the latest finished measurement of each device and model.

    With `partial`, only measurements made with --only count; otherwise, only the others. GPT-2 on GPUs comes first,
    then other models on GPUs, then CPUs. In each group, the latest measurement comes first.
    """
    found, shown = [], {}
    for path in (ROOT / "results").glob("*/ladder.json"):
        data = current(read(path))
        if data["finished"] and bool(data["settings"]["only"]) == partial:
            gpu, model = data["machine"]["device"] != "cpu", data["settings"]["model"]
            found.append((gpu, gpu and model == "gpt2", data["finished"], path.parent.name, data))
    for *_, name, data in sorted(found, key=lambda one: one[:4], reverse=True):
        shown.setdefault((data["machine"]["name"], data["settings"]["model"]), (name, data))
    return dict(shown.values())


JINJA.filters["number"] = number
JINJA.globals.update(commits=commits, cells=cells, batch_cells=batch_cells, conditions=conditions, label=label)
