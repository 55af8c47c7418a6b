"""The losses of one or more logs are plotted correctly, even while a log is being written."""

import json
import math

import plot
import pytest
from conftest import ROOT


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


def test_a_long_run_is_shown_as_means(tmp_path):
    log = write(tmp_path / "a.jsonl", [float(step % 5) for step in range(1000)])
    curves, _ = shown({"a": plot.read(log)})
    assert curves == {"a, training, mean of 5 steps": ([5 * n + 2 for n in range(200)], [2] * 200)}


def test_several_runs_are_drawn_in_their_own_colours(tmp_path):
    runs = {name: plot.read(write(tmp_path / name, [loss, 3.0], [(1, 4.0)])) for name, loss in (("a", 5.0), ("b", 6.0))}
    curves, _ = shown(runs)
    assert [curves[f"{name}, training"][1] for name in "ab"] == [[5, 3], [6, 3]]
    colours = [line.get_color() for line in plot.draw(runs).axes[0].lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]


def test_a_log_may_be_growing_and_its_run_may_have_diverged(tmp_path):
    log = write(tmp_path / "a.jsonl", [9.0, 8.0, math.nan], more='{"step": 3, "lo')
    assert [row["step"] for row in plot.read(log)] == [0, 1, 2]
    assert shown({"a": plot.read(log)})[1] == pytest.approx(1.02 * 8)


def test_a_log_from_anywhere_becomes_a_picture(run, tmp_path):
    log = write(tmp_path / "a.jsonl", [9.0, 8.0], [(2, 8.5)])
    for words, picture in (([log], "a.svg"), ([log, log, "--out", tmp_path / "b.png"], "b.png")):
        done = run("measure/plot.py", *words)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / picture}\n"), done.stderr
        assert (tmp_path / picture).stat().st_size > 5000
    assert "prefers-color-scheme: dark" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("none.jsonl", None, "No such file"),
        ("text.jsonl", "step 0 | loss 9\nstep 1 | loss 8\n", "line 1 is not JSON"),
        ("scores.jsonl", '{"step": 0, "val_loss": 9.0}\n', "no line has"),
        ("words.jsonl", '{"step": 0, "loss": "nine"}\n', "nine"),
        ("list.jsonl", "[1]\n", "no line has"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused_in_one_line(refused, tmp_path, name, text, says):
    if text:
        (tmp_path / name).write_text(text)
    refused("measure/plot.py", tmp_path / name, says=f".*{says}")
    assert not list(tmp_path.glob("*.svg"))


def test_a_kind_of_picture_that_is_not_known_is_refused_and_a_log_is_not_overwritten(refused, tmp_path):
    log = write(tmp_path / "a.jsonl", [9.0, 8.0])
    before = log.read_bytes()
    refused("measure/plot.py", log, "--out", log, says=".*not supported")
    assert log.read_bytes() == before


def test_the_run_in_results_has_turned_up_at_its_end():
    """The validation loss in the committed log is lowest neither at the first evaluation nor at the last."""
    (log,) = (ROOT / "results").glob("pretrain-*/log.jsonl")
    _, scores = plot.curve(plot.read(log), "val_loss")
    assert 0 < scores.argmin() < len(scores) - 1
