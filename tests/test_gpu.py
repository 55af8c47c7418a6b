"""On a CUDA GPU, every script trains GPT-2 124M with the default B and T.

These tests, and the tests marked `gpu` in other files, are skipped without a GPU. Each test prints a line
with its measurements.
"""

import math

import pytest
from conftest import SCRIPTS, SUMMARY, since, trouble


@pytest.mark.gpu
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_gpt2_with_its_defaults(run, script, measured):
    total = ["--total-batch-size", 8192] if script in since("ddp_run.py") else []  # the default, 524288, is slow
    done = run(script, "--steps", 20, *total)
    assert (done.returncode, trouble(done.stderr)) == (0, []), done.stderr
    assert " gpt2 1" in done.stdout and "B 4 T 1024" in done.stdout
    assert done.losses[0] == pytest.approx(math.log(50257), abs=0.25)
    assert done.losses[-1] < done.losses[0] - 1
    assert float(SUMMARY.search(done.stdout)["memory"]) > 124e6 * 16 / 2**30  # weights, gradients, AdamW's two moments
    warnings = f"; {len(done.stderr.splitlines())} lines on stderr" if done.stderr else ""
    measured(f"loss {done.losses[0]:.4f} to {done.losses[-1]:.4f}, {done.stdout.splitlines()[-1]}{warnings}")
