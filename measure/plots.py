"""Plot the losses of runs from their logs. Other programs use this file to draw measurements and counts.

    python -m measure.plots runs/a.jsonl runs/b.jsonl   (make plot)

A log is a file that a script writes with --log-file. Each line is a JSON object with "step" and "loss" for a training
step, or "step" and "val_loss" for an evaluation. Lines without "step" are skipped. You can plot a log during the run.
The example above writes runs/a.svg. To choose a different file (.svg, .png or .pdf), use --out.
"""

import argparse
import io
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dev.ladder import title
from measure.records import speed_up

INK, RUNG, PEER = "#1f2328", "#3b78c4", "#c8702a"
ALT = {
    "tokens": "Training speed",
    "loss-steps": "Loss over steps",
}
# The groups of measure/kernels.py, with their colors. Matmul, loss and element-wise also differ in brightness.
GROUPS = {
    "matmul": "#1f4e9c",
    "attention": "#4fb3a0",
    "softmax and loss": "#b8551c",
    "normalization and element-wise": "#eedc82",
    "optimizer": "#7d3fa6",
    "copies": "#e77fa9",
    "idle": "#8b949e",
}
BRIGHT = "attention", "normalization and element-wise", "copies"  # text on these colors must be dark
POINTS = 200  # maximum number of points per training curve; in longer runs, each point is a mean of several steps
matplotlib.rcParams.update(
    {key: INK for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    | {"font.family": "sans-serif", "font.size": 10, "legend.frameon": False, "figure.constrained_layout.use": True}
    | {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    # Keep text as SVG text, and write identical files for identical plots.
    | {"svg.fonttype": "none", "svg.hashsalt": "ladder"}
)

# ---- a measurement


def about(data):
    s = data.settings
    return f"{s['model']}, B {s['batch_size']}, T {s['seq_len']}, on {'a CPU, ' * data.cpu}{data.host['name']}"


def tokens(data, wide=True):
    """Draw the speed of each script in a records.Measurement, for a wide or a narrow screen."""
    rows = [row for row in data.rows.values() if row["median_ms"]]
    figure = Figure(figsize=(10.0 if wide else 4.4, 1.4 + 0.32 * max(8, len(rows))))
    axes = figure.add_subplot(xlabel="tokens per second")
    names = [row["script"] if wide or row["kind"] == "peer" else title(row["script"]) for row in rows]
    speeds, colors = [row["tokens_per_s"] for row in rows], [PEER if row["kind"] == "peer" else RUNG for row in rows]
    heading = f"{ALT['tokens']} and speed-up over baseline\n{about(data)}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=12 if wide else 10)
    labels = [speed_up(row["over_baseline"]) for row in rows]
    if wide:
        labels = [f"{row['tokens_per_s']:,.0f} · {label}" for row, label in zip(rows, labels, strict=True)]
    axes.bar_label(axes.barh(names, speeds, color=colors, height=0.7), labels, padding=4)
    axes.set_xlim(0, 1.4 * max(speeds))
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 3))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    return figure


def figures(data):
    """Return {name: figure} for a records.Measurement, or {} if it has no successful run."""
    rows = [row for row in data.rows.values() if row["median_ms"]]
    if not rows:
        return {}
    losses = Figure(figsize=(10.0, 1.4 + 0.32 * max(8, len(rows))))
    axes = losses.add_subplot(title=f"{ALT['loss-steps']}\n{about(data)}", xlabel="step")
    axes.set_ylabel("loss, nats per token")
    for place, row in enumerate(rows):
        style = "-" if row["kind"] == "rung" and place < 10 else "--"
        axes.plot(row["runs"][0]["losses"], style, color=f"C{place % 10}", label=row["script"], linewidth=1.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return {"tokens": tokens(data), "loss-steps": losses}


# ---- counts


def three_counts(sums, data, wide=True):
    """Draw four bar plots of scripts: the step time in a records.Measurement, and three counts by kernel group.

    `sums` maps each script to {group: (FLOPs, bytes moved, kernels)} at the batch size of the measurement.
    """
    rows, columns = (1, 4) if wide else (4, 1)
    figure, kinds = Figure(figsize=(10.0, 3.5) if wide else (3.8, 10.4)), [kind for kind in GROUPS if kind != "idle"]
    names, B = [title(script) for script in sums], data.settings["batch_size"]
    plots = ("ms", 1, ",.0f"), ("TFLOP", 1e12, ".2f"), ("GB moved", 1e9, ".0f"), ("kernels", 1, ",.0f")
    for place, (what, unit, form) in enumerate(plots):
        axes, left = figure.add_subplot(rows, columns, place + 1), np.zeros(len(names))
        whose = f"our counts, batch {B}" if place else f"{data.host['name']}, batch {B}"
        axes.set_title(f"{what} per step\n{whose}", fontsize=10)
        if place:
            for kind in kinds:
                widths = np.array([step[kind][place - 1] / unit for step in sums.values()])
                shown = axes.barh(names, widths, left=left, color=GROUPS[kind], label=kind, height=0.7)
                left += widths
        else:
            left = np.array([data.rows[script]["median_ms"] for script in sums])
            shown = axes.barh(names, left, color=GROUPS["idle"], height=0.7)
        axes.bar_label(shown, [format(count, form) for count in left], padding=4)
        axes.set(xlim=(0, 1.45 * left.max()), xticks=[])
        axes.tick_params(labelleft=place % columns == 0)
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6 if wide else 2, fontsize=8)
    return figure


# ---- losses


def held_out(rows):
    """Draw the mean held-out loss of each row over steps and over seconds, with the range over the seeds.

    `rows` comes from quality.compare(). If the rows have learning rates, each script is drawn at its best rate. Rows
    with a run that diverged are left out.
    """
    figure = Figure(figsize=(10.0, 4.6))
    left, right = figure.subplots(1, 2, sharey=True)
    done = [row for row in rows if np.inf not in row["losses"]]
    best = {}
    for row in done:
        kept = best.setdefault(row["script"], row)
        best[row["script"]] = min(kept, row, key=lambda one: np.mean(one["losses"]))
    for place, (script, row) in enumerate(best.items()):
        steps = np.array(row["runs"][0]["steps"])
        losses = np.array([run["losses"] for run in row["runs"]])
        rate = f", rate {row['max_lr']:g}" if row["max_lr"] else ""
        # The rate does not change the work of a step, so the times of all rates are pooled.
        ms = np.median([run["ms"] for one in rows if one["script"] == script for run in one["runs"] if run["ms"]])
        style = {"color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}
        for axes, x in ((left, steps), (right, steps * ms / 1000)):
            axes.plot(x, losses.mean(0), label=title(script) + rate, linewidth=1.3, **style)
            axes.fill_between(x, losses.min(0), losses.max(0), alpha=0.15, color=style["color"], linewidth=0)
    early = [np.mean([run["losses"][len(run["losses"]) // 4] for run in row["runs"]]) for row in best.values()]
    left.set_ylim(top=max(early, default=None))  # hides the initial drop of the loss
    left.set(xlabel="step", ylabel="held-out loss, nats per token", title="Held-out loss over steps")
    right.set(xlabel="seconds of training, without compilation", title="Held-out loss over time")
    if best:
        right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def read(path):
    """Return the rows of a log as dicts. Raises OSError or, if the file is not a log with losses, ValueError."""
    lines, rows = Path(path).read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:
            if number < len(lines):  # the last line may be incomplete because the run is still writing it
                raise ValueError(f"{path}: line {number} is not JSON") from None
    rows = [row for row in rows if isinstance(row, dict) and "step" in row]
    if not any("loss" in row for row in rows):
        raise ValueError(f'{path}: no line has "step" and "loss"')
    return rows


def curve(rows, key):
    """Return two arrays, the steps and the losses, from the rows that have a loss under this key."""
    found = [(row["step"], row[key]) for row in rows if key in row]
    return np.array(found, dtype=float).reshape(-1, 2).T


def losses(runs):
    """Return a figure of the losses over the steps, given {name: rows}.

    Solid lines show the training loss, and dashed lines the validation loss, whose lowest value is in the legend. The
    y-axis ends just above the largest loss after the first 5 % of each run, so that the initial drop does not make the
    rest look flat.
    """
    figure, top = Figure(figsize=(8, 4.5)), 0.0
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy, nats per token")
    for number, (name, rows) in enumerate(runs.items()):
        steps, values = curve(rows, "loss")
        size = -(-len(values) // POINTS)
        middles, means = ([part.mean() for part in np.split(of, range(size, len(of), size))] for of in (steps, values))
        label = f"{name}, training" + f", mean of {size} steps" * (size > 1)
        axes.plot(middles, means, color=f"C{number}", label=label)
        late = [mean for step, mean in zip(middles, means, strict=True) if step >= steps[-1] / 20]
        evaluated, scores = curve(rows, "val_loss")
        if len(scores):
            best = scores.argmin()
            label = f"{name}, validation, lowest {scores[best]:.3f} at step {evaluated[best]:.0f}"
            axes.plot(evaluated, scores, "--", color=f"C{number}", marker=".", label=label)
            late += list(scores[evaluated >= steps[-1] / 20])
        top = np.nanmax([top, *late])
    axes.set_ylim(top=1.02 * top)
    axes.legend()
    return figure


# ---- files


def svg(figure):
    """Return a figure as SVG text."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def write_svg(figure, path):
    path.write_text(svg(figure), encoding="utf-8", newline="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log with one JSON object per line")
    parser.add_argument("--out", type=Path, help="default: the first log's name with the suffix .svg")
    args = parser.parse_args()
    out = args.out or args.logs[0].with_suffix(".svg")
    try:
        figure = losses({str(path): read(path) for path in args.logs})
        if out.suffix == ".svg":
            write_svg(figure, out)
        else:
            figure.savefig(out)
    except (OSError, TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(out)


if __name__ == "__main__":
    main()
