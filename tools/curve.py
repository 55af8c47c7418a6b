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


def read(folder):
    """(machine, evaluations with the mean training loss since the one before). Raises OSError, ValueError."""
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    evaluations = [record for record in records if "val_loss" in record]
    for before, record in zip(evaluations, evaluations[1:], strict=False):
        record["loss"] = np.mean([losses[step] for step in range(before["step"], record["step"])])
    if len(evaluations) < 3 or best(evaluations) is evaluations[0]:
        raise ValueError(f"{folder} has {len(evaluations)} evaluations, or none is better than the first")
    return machine, evaluations


def best(evaluations):
    return min(evaluations, key=lambda record: record["val_loss"])


def draw(evaluations):
    """Training and validation loss over steps, from the second evaluation on, the best validation loss marked."""
    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor=PAPER)
    axes = figure.add_subplot(facecolor=PAPER)
    steps = [record["step"] for record in evaluations[1:]]
    for key, colour, label in ("val_loss", PEER, "validation"), ("loss", RUNG, "training, mean since the point before"):
        axes.plot(steps, [record[key] for record in evaluations[1:]], color=colour, label=label, marker=".")
    lowest = best(evaluations)
    axes.annotate(
        f"best: {lowest['val_loss']:.3f} at step {lowest['step']}",
        (lowest["step"], lowest["val_loss"]),
        xytext=(0, 40),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "-", "color": PEER},
    )
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy in nats")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def section(folder):
    """What pretrain/README.md says of a run. Writes the figure that it shows."""
    machine, evaluations = read(folder)
    name, image = folder.name, ROOT / "docs" / "img" / f"{folder.name}.svg"
    write_svg(draw(evaluations), image)
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}" if machine["device"] == "cpu" else ""
    text = f"""
**{machine["name"]}{threads}. torch {machine["torch"]}, Python {machine["python"]}, {machine["system"]}.**

![Training and validation loss](../{image.relative_to(ROOT).as_posix()})

| step | training loss, mean since the row above | validation loss |
| ---: | ---: | ---: |
"""
    for record in evaluations:
        training = f"{record['loss']:.3f}" if "loss" in record else ""
        text += f"| {record['step']} | {training} | {record['val_loss']:.3f} |\n"
    for title, record in (
        ("before the first step", evaluations[0]),
        ("at the best validation loss", best(evaluations)),
        ("at the end", evaluations[-1]),
    ):
        text += f"\nA sample {title}, step {record['step']}:\n\n````text\n{record['samples'][0]}\n````\n"
    return text + f"\nAll of it: [log](../results/{name}/log.jsonl), [machine](../results/{name}/machine.json).\n\n"


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
