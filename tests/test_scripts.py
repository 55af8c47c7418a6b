"""Every script runs from start to end, prints correct values, and reduces the loss.

The scripts run on one rank, and `ddp_run.py` also runs on two. A compiled run has the losses of an eager one, up to
rounding.
"""

import functools
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    BF16_CPU,
    EAGER,
    FP8,
    FP16_10,
    FP16S,
    LONG,
    MUON,
    REGIONAL,
    ROOT,
    SCRIPTS,
    STEP,
    SUMMARY,
    clips,
    play,
    press_ctrl_c_at,
    since,
)

PARAMETERS = {"baseline.py": 13_790_208} | dict.fromkeys(since(1, 7), 7_357_312) | dict.fromkeys(since(7), 7_363_328)


STEPS = 4
# The scripts that are also run in a process of their own, compiled: each compiled version of the model, each optimizer
# and each loop.
COMPILED = [SCRIPTS[6], SCRIPTS[7], SCRIPTS[10], "ddp_run.py", LONG, MUON, FP8, FP16_10]


def sizes(script):
    """Return flags that shorten a run: fewer micro-steps, or a smaller batch in fp16, which is slow on a CPU."""
    if script in FP16S:
        return ["--batch-size", 2, "--seq-len", 64]
    return ["--total-batch-size", 1024] * (script in since("ddp_run.py"))


def losses(printed):
    return [float(step["loss"]) for step in STEP.finditer(printed)]


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """Return a function that runs a script in a separate process and returns its output.

    A script of the root folder is copied to a folder with nothing but the text and the tokenizer.
    """

    @functools.cache
    def alone(script):
        folder = ROOT
        if "/" not in script:
            folder = Path(shutil.copytree(ROOT / "tokenizer", tmp_path_factory.mktemp("alone") / "tokenizer")).parent
            for name in (script, "input.txt"):
                shutil.copy(ROOT / name, folder)
        done = run(script, "--steps", STEPS, *sizes(script), folder=folder)
        assert (done.returncode, done.stderr, done.left_behind) == (0, "", []), done.stderr
        return done.stdout

    return alone


@pytest.fixture(scope="module")
def printed(alone):
    """Return a function that runs a script, in this process and without compiling if it is not one of two."""

    @functools.cache
    def printed(script):
        if script in ("baseline.py", SCRIPTS[5]):
            return alone(script)
        return play(script, "--steps", STEPS, *sizes(script), full=True)

    return printed


@pytest.mark.slow
def test_uv_runs_a_script_without_an_environment(tmp_path):
    """`uv run` installs the torch version of the tests, but no development packages such as pytest or matplotlib."""
    for name in ("pyproject.toml", "input.txt", SCRIPTS[3]):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tokenizer", tmp_path / "tokenizer")
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV" and not name.startswith("UV_PR")}
    env |= {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    words = [sys.executable, "-m", "uv", "run", SCRIPTS[3], "--device", "cpu", "--model", "nano", "--steps", "2"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and SUMMARY.search(done.stdout), done.stderr
    assert f"| torch {torch.__version__.partition('+')[0]}" in done.stdout
    (packages,) = (tmp_path / ".venv").glob("lib/*/site-packages")
    assert (packages / "tiktoken").is_dir() and not any((packages / name).exists() for name in ("pytest", "matplotlib"))


@pytest.mark.parametrize("script", [SCRIPTS[5], *(pytest.param(s, marks=pytest.mark.slow) for s in COMPILED)])
def test_a_compiled_run_has_the_losses_of_an_eager_one(alone, script):
    eager = play(script, "--steps", STEPS, *sizes(script), full=True)
    assert losses(alone(script)) == pytest.approx(losses(eager), abs=1e-2 if BF16_CPU else 1e-4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_printed_lines_follow_the_contract(printed, script):
    lines = printed(script).splitlines()
    B, T = (2, 64) if script in FP16S else (4, 128)  # 4 and 128 are nano's defaults
    tokens = B * T
    if script in since(2):
        assert lines.pop(0).startswith("no TF32 here")
    if script in set(since(3)) - {*FP16S} and not BF16_CPU:
        assert lines.pop(0).startswith("no bf16 here")
    if script == FP8:
        assert lines.pop(0).startswith("no float8 here")
    assert lines.pop(0) == "nano (4 layers, hidden size 128) is the default model on a CPU; --model gpt2 trains GPT-2"
    assert re.fullmatch(
        rf"device cpu \(.+\) \| torch \S+ \| nano {PARAMETERS[script]:,} parameters \| B {B} T {T}", lines.pop(0)
    )
    assert lines.pop(0) == "loaded 338025 tokens"
    assert lines.pop(0) == f"1 epoch = {(338025 - 1) // tokens} batches"
    if script in since("ddp_run.py"):
        assert lines.pop(0) == "1024 tokens per step = 2 micro-steps * B 4 * T 128 * 1 ranks"
        tokens = 1024
    if script in since(5):
        takes = "about half a minute" if script == REGIONAL else "about a minute"
        assert lines.pop(0) == f"compiling: the first step takes {takes}"

    times = []
    for number, line in enumerate(lines[:STEPS]):
        step = STEP.fullmatch(line)
        assert step, line
        assert int(step["step"]) == number
        assert (step["norm"] is not None) == (script in clips())
        assert (step["lr"] is not None) == (script in since(9))
        assert (step["left"] is not None) == (script in since(LONG) and int(step["step"]) > 0)
        assert step["scale"] == ("65536" if script in FP16S else None) and not step["skipped"]
        ms, rate = float(step["ms"]), float(step["rate"].replace(",", ""))
        assert rate == pytest.approx(tokens / (ms / 1000), rel=1e-3, abs=1)  # tokens per second, not per step
        times.append(ms)
    summary = SUMMARY.fullmatch(lines[STEPS])
    assert summary, lines[STEPS]
    assert (summary["first"], summary["last"]) == ("2", "3")  # below 20 steps, the median skips the first half
    assert float(summary["ms"]) == pytest.approx(statistics.median(times[2:]), abs=0.02)
    assert float(summary["rate"].replace(",", "")) == pytest.approx(
        tokens / float(summary["ms"]) * 1000, rel=1e-3, abs=1
    )
    assert summary["memory"] is None  # only a GPU's allocator reports it
    assert len(lines) == STEPS + 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_loss_matches_a_uniform_guess_and_the_last_is_lower(printed, script):
    first, *_, last = losses(printed(script))
    assert first == pytest.approx(math.log(50257), abs=0.25)
    assert last < first - 0.1


def test_from_20_steps_on_the_median_leaves_out_10():
    printed = play("baseline.py", "--steps", 20, "--batch-size", 1, "--seq-len", 8)
    assert SUMMARY.search(printed)["first"] == "10"


def test_ctrl_c_prints_the_summary_so_far(tmp_path):
    command = [sys.executable, str(ROOT / "baseline.py"), "--device", "cpu", "--steps", "1000"]
    printed, _ = press_ctrl_c_at("^step +1 .*tok/s", command, tmp_path)
    steps = len(losses(printed))
    assert 2 <= steps < 1000 and SUMMARY.search(printed.splitlines()[-1])["last"] == str(steps - 1)


WORDS = "ddp_run.py", "--steps", 5, "--total-batch-size", 2048


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def two_ranks(run, small, request):
    return run(*WORDS, torchrun=2, folder=small, **EAGER if request.param == "eager" else {})


def test_two_ranks_print_once_the_curve_of_one(two_ranks):
    one, two = play(*WORDS), two_ranks.stdout
    assert two_ranks.returncode == 0
    waiting = sorted(re.sub(r":\d+$", "", line) for line in two_ranks.stderr.splitlines())
    assert waiting == [f"rank {rank}: waiting for 2 ranks at localhost" for rank in (0, 1)]
    assert len(losses(two)) == 5 and len(two.splitlines()) == len(one.splitlines())
    for alone, together in zip(STEP.finditer(one), STEP.finditer(two), strict=True):
        assert float(together["loss"]) == pytest.approx(float(alone["loss"]), abs=1e-4)
        assert float(together["norm"]) == pytest.approx(float(alone["norm"]), rel=1e-2)
        rate = 2048 / float(together["ms"]) * 1000
        assert float(together["rate"].replace(",", "")) == pytest.approx(rate, rel=1e-2, abs=0.51)
    assert "1 epoch = 660 batches\n2048 tokens per step = 4 micro-steps * B 4 * T 128 * 1 ranks" in one
    assert "1 epoch = 660 batches\n2048 tokens per step = 2 micro-steps * B 4 * T 128 * 2 ranks" in two
