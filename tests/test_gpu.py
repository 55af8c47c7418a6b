"""On a CUDA GPU, scripts train, compile in every mode and resume, and `measure/` measures. Skipped without a GPU."""

import json
import math
import os

import pytest
from conftest import LONG, ROOT, RUNGS, SCRIPTS, SUMMARY, since, trouble

from measure import counts, records, timeline

pytestmark = pytest.mark.gpu
TEN = "speedup_10_fused_adamw.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_gpt2_with_its_defaults(run, script):
    total = ["--total-batch-size", 8192] if script in since("ddp_run.py") else []  # the default, 524288, is slow
    done = run(script, "--steps", 20, *total)
    assert (done.returncode, trouble(done.stderr)) == (0, []), done.stderr
    assert done.losses[0] == pytest.approx(math.log(50257), abs=0.25) and done.losses[-1] < done.losses[0] - 1
    assert float(SUMMARY.search(done.stdout)["memory"]) > 124e6 * 16 / 2**30  # weights, gradients, AdamW's two moments


@pytest.fixture(scope="module")
def rung_10(run):
    return run(TEN, "--steps", 5).losses


@pytest.mark.parametrize("how", ["reduce-overhead", "max-autotune", "compiled", "trainer"])
def test_another_compile_mode_and_a_peer_train_alike(run, rung_10, how):
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # Trainer would use every visible GPU
    words = ["-m measure.peers", how] if how in ("compiled", "trainer") else [TEN, "--compile-mode", how]
    done = run(*words, "--steps", 5, CUDA_VISIBLE_DEVICES=first)
    assert done.returncode == 0 and done.losses == pytest.approx(rung_10, abs=0.02), done.stderr


def test_every_peak_is_measured_and_the_kernels_fill_the_step(run):
    done = run("-m measure.roof")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row for row in found["matmul"] if row["error"]] == []
    peaks = [records.peaks(found).get(precision, 9e9) for precision in ("float32", "tf32", "bf16")]  # a T4: float32
    assert peaks == sorted(peaks) and found["gpu"]["clock_mhz"] > 0 and found["gpu"]["power_limit_w"] > 0
    for script in "baseline.py", TEN:
        done = run("-m measure.kernels", ROOT / script, "--steps", 9)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert (found["attention"] == "written out") == (script == "baseline.py")
        assert found["reserved_gib"] >= float(SUMMARY.search(done.stdout)["memory"])
        assert min(found["groups_ms"][kind] for kind in ("matmul", "attention", "softmax and loss", "optimizer")) > 0
        if script == "baseline.py":  # the names of compiled kernels depend on the version of torch
            listed = timeline.slowest(found["step"], counts.step(RUNGS[script], "gpt2", 4, 1024))
            times = [(float(row["ms"].replace(",", "")), row["MB"]) for row in listed]
            assert sum(ms for ms, size in times if size) > 0.9 * sum(ms for ms, _ in times), listed  # counted, too


def test_a_run_resumes_from_its_checkpoint(run, tmp_path):
    words = LONG, "--steps", 6, "--total-batch-size", 8192, "--save-every", 4, "--checkpoint-dir", tmp_path
    whole = run(*words, torchrun=1)
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "step_00000006.pt").unlink()
    rest = run(*words, "--resume", torchrun=1)
    assert len(rest.losses) == 2 and rest.losses == pytest.approx(whole.losses[4:], abs=0.02), rest.stderr
