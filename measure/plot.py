"""Plot the loss of one or more runs from their logs:  python measure/plot.py runs/a.jsonl runs/b.jsonl   (make plot)

A log is a file that a script wrote with --log-file. It contains one JSON object per line: "step" and "loss" for a
training step, or "step" and "val_loss" for an evaluation. JSON lines without "step" are skipped. You can plot a log
while the run is still writing it. The example above writes runs/a.svg. To choose a different file (.svg, .png, .pdf),
use --out.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from render import write_svg

POINTS = 200  # maximum number of points per training curve; in longer runs, each point is a mean of several steps


def read(path):
    """Return the rows of a log as dicts. Raises OSError, or ValueError if the file is not a log with losses."""
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


def draw(runs):
    """Return a figure of the losses over the steps, given {name: rows}.

    The training loss is a solid line. The validation loss is a dashed line, and the legend shows its lowest value. The
    y-axis ends just above the largest loss after the first 5 % of each run. If the axis included the initial drop, the
    rest of the curves would look flat.
    """
    figure, top = Figure(figsize=(8, 4.5)), 0.0
    axes = figure.add_subplot(xlabel="step", ylabel="cross-entropy, nats per token")
    for number, (name, rows) in enumerate(runs.items()):
        steps, losses = curve(rows, "loss")
        size = -(-len(losses) // POINTS)
        middles, means = ([part.mean() for part in np.split(of, range(size, len(of), size))] for of in (steps, losses))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log with one JSON object per line")
    parser.add_argument("--out", type=Path, help="default: the first log's name with the suffix .svg")
    args = parser.parse_args()
    out = args.out or args.logs[0].with_suffix(".svg")
    try:
        figure = draw({str(path): read(path) for path in args.logs})
        if out.suffix == ".svg":
            write_svg(figure, out)  # an SVG that follows the browser's dark mode
        else:
            figure.savefig(out)
    except (OSError, TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(out)


if __name__ == "__main__":
    main()
