"""On a CUDA GPU, `measure/` measures every peak and groups the kernels of a step.

The losses of the peers (training loops around `transformers`) match the losses of rung 10 within 0.02.
"""

import json
import os

import pytest
from conftest import ROOT, SUMMARY, trouble

from measure import records

pytestmark = pytest.mark.gpu


def test_every_peak_is_measured(run, measured):
    done = run("-m measure.roof")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row for row in found["matmul"] if row["error"]] == []
    best = records.peaks(found)
    peaks = [best[precision] for precision in ("float32", "tf32", "bf16") if precision in best]  # a T4: only float32
    assert peaks == sorted(peaks)
    assert found["gpu"]["clock_mhz"] > 0 and found["gpu"]["power_limit_w"] > 0
    measured(f"{best} TFLOP/s, copies {found['copy_gb_per_s']} GB/s, under load {found['gpu']}")


@pytest.mark.parametrize("script", ["baseline.py", "speedup_06_flash_attn.py", "speedup_10_fused_adamw.py"])
def test_the_kernels_fill_the_step(run, script, measured):
    done = run("-m measure.kernels", ROOT / script, "--steps", 9)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    groups = found["groups_ms"]
    assert (found["attention"] == "written out") == (script == "baseline.py")
    assert found["reserved_gib"] >= float(SUMMARY.search(done.stdout)["memory"])
    assert min(groups[kind] for kind in ("matmul", "attention", "softmax and loss", "optimizer")) > 0
    measured(f"attention {found['attention']}, ms {groups}, {found['reserved_gib']} GiB reserved")


@pytest.fixture(scope="module")
def rung_10(run):
    return run("speedup_10_fused_adamw.py", "--steps", 5).losses


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_does_the_task_of_rung_10(run, peer, rung_10, measured):
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # Trainer would use every visible GPU
    done = run("-m measure.peers", peer, "--steps", 5, CUDA_VISIBLE_DEVICES=first)
    assert (done.returncode, trouble(done.stderr)) == (0, []), done.stderr
    assert done.losses == pytest.approx(rung_10, abs=0.02)
    measured(f"losses {done.losses}, rung 10 {rung_10}; {done.stdout.splitlines()[-1]}")


def test_the_bench_counts_the_memory_of_attention(run, measured):
    done = run("-m measure.attention", "--seq-lens", 512, 1024)
    assert done.returncode == 0 and "nan" not in done.stdout, done.stderr
    measured(done.stdout)
