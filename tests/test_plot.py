"""The losses of one or more logs are plotted correctly, even while a log is being written."""

import json
import math

import plot
import pytest


def write(path, losses, scores=(), more=""):
    """Write a log as pretrain/train.py does: a header, a row per step and a row per evaluation."""
    rows = [{"begun": "2026-11-25"}] + [{"step": step, "loss": loss, "sec": 0.1} for step, loss in enumerate(losses)]
    rows += [{"step": step, "val_loss": score, "samples": ["x"]} for step, score in scores]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + more)
    return path


def shown(runs):
    """Return ({label: (steps, losses)} of a plot's curves, the upper end of its y axis)."""
    (axes,) = plot.draw(runs).axes
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    return curves, axes.get_ylim()[1]


def test_training_and_validation_curves_have_their_own_names(tmp_path):
    log = write(tmp_path / "a.jsonl", [10.0, 9.0, 6.0, 4.0], [(0, 11.0), (2, 7.0), (4, 8.0)])
    curves, top = shown({"a": plot.read(log)})
    assert curves == {
        "a, training": ([0, 1, 2, 3], [10, 9, 6, 4]),
        "a, validation, lowest 7.000 at step 2": ([0, 2, 4], [11, 7, 8]),
    }
    assert top == pytest.approx(1.02 * 9)  # the axis limit ignores step 0


def test_a_log_may_be_growing_and_its_run_may_have_diverged(tmp_path):
    log = write(tmp_path / "a.jsonl", [9.0, 8.0, math.nan], more='{"step": 3, "lo')
    assert [row["step"] for row in plot.read(log)] == [0, 1, 2]
    assert shown({"a": plot.read(log)})[1] == pytest.approx(1.02 * 8)
