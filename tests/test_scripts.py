"""Every script runs from start to end as users start it, prints the lines of the contract, and reduces the loss.

On a user error, it prints one line to stderr, exits with a non-zero status, and changes no file.
"""

import math
import re
import shutil
import statistics
import sys

import pytest
import torch
from conftest import BF16_CPU, LONG, ROOT, SCRIPTS, SIDE, STEP, SUMMARY, load, play, press_ctrl_c_at, since

PARAMETERS = {"baseline.py": 13_790_208} | dict.fromkeys(since(1, 7), 7_357_312) | dict.fromkeys(since(7), 7_363_328)
STEPS = 4
# These are also run compiled, in a process of their own: each version of the model, each optimizer and each loop.
MORE = [SCRIPTS[6], SCRIPTS[7], SCRIPTS[10], "ddp_run.py", LONG, SIDE.muon, SIDE.fp16, SIDE.record]
ALONE = ["baseline.py", SCRIPTS[5], *(pytest.param(script, marks=pytest.mark.slow) for script in MORE)]


def sizes(script):
    """Return flags that shorten a run: fewer micro-steps, or a smaller batch in fp16, which is slow on a CPU."""
    if script == SIDE.fp16:
        return ["--batch-size", 2, "--seq-len", 64]
    return ["--total-batch-size", 1024] * (script in since("ddp_run.py"))


def losses(printed):
    return [float(step["loss"]) for step in STEP.finditer(printed)]


@pytest.mark.parametrize("script", ALONE)
def test_a_script_runs_in_a_process_of_its_own_with_the_losses_of_an_eager_run(run, script, tmp_path):
    """A script of the root folder is copied to a folder with nothing but the text and the tokenizer."""
    if "/" not in script:
        shutil.copytree(ROOT / "tokenizer", tmp_path / "tokenizer")
        for name in (script, "input.txt"):
            shutil.copy(ROOT / name, tmp_path)
    done = run(script, "--steps", STEPS, *sizes(script), folder=ROOT if "/" in script else tmp_path)
    errors = re.sub(r".*site-packages/torch/.*\n(  .*\n)?", "", done.stderr)  # PyTorch's own warnings
    assert (done.returncode, errors, done.left_behind) == (0, "", []), errors
    eager = play(script, "--steps", STEPS, *sizes(script), full=True)
    assert done.losses == pytest.approx(losses(eager), abs=1e-2 if BF16_CPU or script == SIDE.fp16 else 1e-4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_and_prints_the_lines_of_the_contract(script):
    printed = play(script, "--steps", STEPS, *sizes(script), full=True)
    B, T = (2, 64) if script == SIDE.fp16 else (4, 128)  # 4 and 128 are nano's defaults
    accumulates = script in since("ddp_run.py")
    expected = ["nano .* is the default model on a CPU; --model gpt2 .*"]
    expected += [rf"device cpu \(.+\) \| torch \S+ \| nano {PARAMETERS[script]:,} parameters \| B {B} T {T}"]
    expected += ["loaded 338025 tokens", f"1 epoch = {338024 // (B * T)} batches"]
    expected += [r"1024 tokens per step = 2 micro-steps \* B 4 \* T 128 \* 1 ranks"] * accumulates
    expected += ["compiling: the first step takes .*"] * (script in since(5))
    lines = [line for line in printed.splitlines() if not re.match("no (TF32|bf16) here", line)]
    for line, pattern in zip(lines, [*expected, *STEPS * [STEP.pattern], SUMMARY.pattern], strict=True):
        assert re.fullmatch(pattern, line)
    assert " here: " not in printed[: printed.index("device cpu")]
    assert ("no TF32 here" in printed) == (script in since(2))
    assert ("no bf16 here" in printed) == (script in since(3) and script != SIDE.fp16 and not BF16_CPU)
    steps, summary = list(STEP.finditer(printed)), SUMMARY.search(printed)
    for number, step in enumerate(steps):
        assert (int(step["step"]), step["norm"] is not None) == (number, script in since(8))
        assert step["scale"] == ("65536" if script == SIDE.fp16 else None) and not step["skipped"]
    assert (summary["first"], summary["last"]) == ("2", "3")  # below 20 steps, the median skips the first half
    assert float(summary["ms"]) == pytest.approx(statistics.mean(float(step["ms"]) for step in steps[2:]), abs=0.02)
    assert losses(printed)[0] == pytest.approx(math.log(50257), abs=0.25)  # a uniform guess
    assert losses(printed)[-1] < losses(printed)[0] - 0.1


def test_from_20_steps_on_the_median_leaves_out_10():
    printed = play("baseline.py", "--steps", 20, "--batch-size", 1, "--seq-len", 8)
    assert SUMMARY.search(printed)["first"] == "10"


def test_ctrl_c_prints_the_summary_so_far(tmp_path):
    command = [sys.executable, str(ROOT / "baseline.py"), "--device", "cpu", "--steps", "1000"]
    printed, _ = press_ctrl_c_at("^step +1 .*tok/s", command, tmp_path)
    steps = len(losses(printed))
    assert 2 <= steps < 1000 and SUMMARY.search(printed.splitlines()[-1])["last"] == str(steps - 1)


BOTH, DDP = ("baseline.py", "ddp_run.py"), since("ddp_run.py")
WRONG = [  # scripts, arguments, the error
    (SCRIPTS, ["--data", "nowhere.txt"], "nowhere.txt"),
    (BOTH, ["--data", "latin1.txt"], "utf-8"),
    (BOTH, ["--seq-len", "1025"], "at most 1024 for --seq-len"),
    (BOTH, ["--batch-size", "0"], "at least 1"),
    (BOTH, ["--batch-size", "1000000"], "(338025 tokens allow --batch-size 2640 |multiple of .* 128000000)"),
    (BOTH, ["--device", "cuda:99"], "--device: invalid choice: .cuda:99. .choose from .*cpu"),
    (DDP, ["--total-batch-size", "1000"], "1000 is not a multiple of B . T . ranks = 512"),
    (DDP, ["--total-batch-size", "1024", "--compile-mode", "reduce-overhead"], "one micro-step: .*-batch-size 512$"),
]
CASES = [pytest.param(s, *case, id=f"{s}-{case[0][0]}={case[0][1]}") for scripts, *case in WRONG for s in scripts]


@pytest.mark.parametrize("script, arguments, error", CASES)
def test_bad_input(script, arguments, error, tmp_path, monkeypatch, refused):
    (tmp_path / "latin1.txt").write_bytes("fianc\xe9e ".encode("latin-1") * 4000)
    monkeypatch.chdir(tmp_path)
    refused(script, "--device", "cpu", "--steps", 1, *arguments, says=error)
    assert [path.name for path in tmp_path.iterdir()] == ["latin1.txt"]


def test_out_of_memory_names_the_options_that_need_less(monkeypatch, refused):
    def forward(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")

    for script in BOTH:
        monkeypatch.setattr(load(script).GPT, "forward", forward)
        refused(script, "--device", "cpu", says="out of memory: lower --batch-size or --seq-len$")
