"""From a run of pretrain/train.py to pretrain/README.md and docs/img/:  python tools/curve.py results/FOLDER

The folder has the run's log as log.jsonl, and machine.json, which tools/machine.py printed. What is written depends on
nothing else, so a second run changes nothing.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
from ladder import ROOT
from matplotlib.figure import Figure
from render import PAPER, PEER, RUNG, write_svg

README = ROOT / "pretrain" / "README.md"
BEGIN, END = "<!-- a run, written by `python tools/curve.py` from results/ -->\n", "<!-- end of the run -->\n"
WINDOW = 50  # steps: the training loss of a single batch says little


def read(folder):
    """(machine, records of training, records of evaluation) of a run. Raises OSError or ValueError."""
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    training = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "val_loss" in record]
    if len(training) < WINDOW or len(evaluations) < 2:
        raise ValueError(f"{folder} has {len(training)} steps and {len(evaluations)} evaluations: too few to draw")
    if evaluations[0]["val_loss"] <= min(record["val_loss"] for record in evaluations[1:]):
        raise ValueError(f"{folder} has its best validation loss before the first step: there is nothing to show")
    return machine, training, evaluations


def draw(training, evaluations):
    """Training and validation loss over steps, the best validation loss marked."""
    best = min(evaluations, key=lambda record: record["val_loss"])
    losses = np.array([record["loss"] for record in training])
    means = np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")
    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor=PAPER)
    axes = figure.add_subplot(facecolor=PAPER)
    axes.plot(np.arange(len(means)) + WINDOW, means, color=RUNG, label=f"training, mean of {WINDOW} steps", linewidth=1)
    steps, scores = zip(*((record["step"], record["val_loss"]) for record in evaluations), strict=True)
    axes.plot(steps, scores, color=PEER, label="validation", marker=".")
    axes.annotate(
        f"best: {best['val_loss']:.3f} at step {best['step']}",
        (best["step"], best["val_loss"]),
        xytext=(0, 40),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "-", "color": PEER},
    )
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy in nats")
    axes.set_ylim(top=min(axes.get_ylim()[1], losses[0]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def section(folder):
    """What pretrain/README.md says of a run. Writes the figure that it shows."""
    machine, training, evaluations = read(folder)
    name, image = folder.name, ROOT / "docs" / "img" / f"{folder.name}.svg"
    write_svg(draw(training, evaluations), image)
    best = min(evaluations, key=lambda record: record["val_loss"])
    first, last = evaluations[0], evaluations[-1]
    late = np.mean([record["loss"] for record in training[-WINDOW:]])
    at_best = np.mean([record["loss"] for record in training if best["step"] - WINDOW <= record["step"] < best["step"]])
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}" if machine["device"] == "cpu" else ""
    text = f"""
**{machine["name"]}{threads}. torch {machine["torch"]}, Python {machine["python"]}, {machine["system"]}.**

![Training and validation loss](../{image.relative_to(ROOT).as_posix()})

| | step | training loss, last {WINDOW} steps | validation loss |
| --- | ---: | ---: | ---: |
| before | {first["step"]} | | {first["val_loss"]:.3f} |
| best | {best["step"]} | {at_best:.3f} | {best["val_loss"]:.3f} |
| end | {last["step"]} | {late:.3f} | {last["val_loss"]:.3f} |

"""
    for title, record in ("before", first), ("at the best validation loss", best), ("at the end", last):
        text += f"A sample {title}, step {record['step']}:\n\n````text\n{record['samples'][0]}\n````\n\n"
    return text + f"All of it: [log](../results/{name}/log.jsonl), [machine](../results/{name}/machine.json).\n\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, help="a folder of results/")
    folder = parser.parse_args().folder.resolve()
    try:
        if folder.parent != ROOT / "results":
            raise ValueError(f"{os.path.relpath(folder)} is not in results/, where the README could link to it")
        text = README.read_text(encoding="utf-8")
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        README.write_text(text[:start] + section(folder) + text[end:], encoding="utf-8")
    except (KeyError, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
