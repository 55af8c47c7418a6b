"""Plot the loss of one run or several from their logs:  python measure/plot.py runs/a.jsonl runs/b.jsonl   (make plot)

A log has a JSON object in each line, with "step" and "loss" for a training step, "step" and "val_loss" for an
evaluation, as --log-file writes it; other JSON is skipped. The run may still be writing it. The plot goes to
runs/a.svg, or where --out says (.svg, .png, .pdf).
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from render import write_svg

POINTS = 200  # at most, of a curve of training losses: each is a mean of so many steps as that takes


def read(path):
    """The rows of a log in order, as dicts. Raises OSError, or ValueError if it is not a log with losses."""
    lines, rows = Path(path).read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError:
            if number < len(lines):  # else it is being written
                raise ValueError(f"{path}: line {number} is not JSON") from None
    rows = [row for row in rows if isinstance(row, dict) and "step" in row]
    if not any("loss" in row for row in rows):
        raise ValueError(f'{path}: no line has "step" and "loss"')
    return rows


def curve(rows, key):
    """(steps, losses), two arrays, of the rows that have a loss under this key."""
    found = [(row["step"], row[key]) for row in rows if key in row]
    return np.array(found, dtype=float).reshape(-1, 2).T


def draw(runs):
    """The losses of {name: rows} over the steps: training as a line, validation dashed, its lowest in the legend.

    The top of the plot is the largest loss after the first twentieth of a run, whose fall would flatten all the rest.
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
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log in JSON lines")
    parser.add_argument("--out", type=Path, help="default: the first log's name, with .svg at its end")
    args = parser.parse_args()
    out = args.out or args.logs[0].with_suffix(".svg")
    try:
        figure = draw({str(path): read(path) for path in args.logs})
        if out.suffix == ".svg":
            write_svg(figure, out)  # dark where the reader's browser is
        else:
            figure.savefig(out)
    except (OSError, TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(out)


if __name__ == "__main__":
    main()
