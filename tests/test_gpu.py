"""On a CUDA GPU, GPT-2 124M trains with the defaults.

These tests, and those marked `gpu` in other files, skip themselves without a GPU. None has run on one yet.
"""

import json
import math

import pytest
from conftest import ROOT, SCRIPTS, SUMMARY, since

pytestmark = pytest.mark.gpu


def arguments(script):
    return ["--total-batch-size", 8192] if script in since("ddp_run.py") else []  # half a million tokens take a while


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_gpt2_with_its_defaults(run, script):
    done = run(script, "--steps", 20, *arguments(script))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert " gpt2 1" in done.stdout and "B 4 T 1024" in done.stdout
    assert done.losses[0] == pytest.approx(math.log(50257), abs=0.25)
    assert done.losses[-1] < done.losses[0] - 1
    assert float(SUMMARY.search(done.stdout)["memory"]) > 124e6 * 16 / 2**30  # weights, gradients and two moments


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("script", ["speedup_10_fused_adamw.py", "ddp_run.py"])
def test_the_other_compile_modes_train_alike(run, script, mode):
    total = ["--total-batch-size", 4096] if script == "ddp_run.py" else []  # one micro-step
    default = run(script, "--steps", 5, *total)
    other = run(script, "--steps", 5, "--compile-mode", mode, *total, timeout=1200)
    assert other.returncode == 0, other.stderr
    assert other.losses == pytest.approx(default.losses, abs=0.02)


def test_nccl_with_one_rank_gives_the_curve_without_it(run):
    alone = run("ddp_run.py", "--steps", 5, "--total-batch-size", 8192)
    ranks = run("ddp_run.py", "--steps", 5, "--total-batch-size", 8192, torchrun=1)
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.losses == pytest.approx(alone.losses, abs=0.02)


@pytest.mark.parametrize("script", since("ddp_run.py"))
def test_a_run_goes_on_from_its_checkpoint(run, tmp_path, script):
    words = script, "--steps", 6, "--total-batch-size", 8192, "--save-every", 4, "--checkpoint-dir", tmp_path
    whole = run(*words, torchrun=1)
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "step_00000006.pt").unlink()
    rest = run(*words, "--resume", torchrun=1)
    assert rest.returncode == 0, rest.stderr
    assert rest.losses == pytest.approx(whole.losses[4:], abs=0.02)


def test_nothing_waits_for_the_gpu_between_micro_steps(run, tmp_path):
    (tmp_path / "watched.py").write_text(
        "import runpy, sys, torch, warnings\n"
        "warnings.simplefilter('always')\n"
        "torch.cuda.set_sync_debug_mode('warn')\n"
        f"sys.argv[0] = {str(ROOT / 'ddp_run.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )

    def waits(micro_steps):
        words = "--steps", 3, "--batch-size", 4, "--total-batch-size", micro_steps * 4096
        done = run("watched.py", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr.count("called a synchronizing CUDA operation")

    assert waits(8) == waits(1) > 0  # the loss and the norm are read once per step


def test_more_ranks_than_gpus_is_refused(run):
    import torch

    done = run("ddp_run.py", torchrun=torch.cuda.device_count() + 1)
    assert done.returncode != 0
    assert "ddp_run.py: error: there is no cuda:" in done.stderr


def test_out_of_memory_is_one_line(run):
    done = run("baseline.py", "--model", "gpt2-xl", "--batch-size", 300, "--steps", 1)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "baseline.py: error: out of memory with B 300 and T 1024: lower --batch-size or --seq-len"
    ]


def test_every_ceiling_is_measured(run):
    done = run("tools/roof.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row for row in found["matmul"] if row["error"]] == []
    ceilings = [found["ceilings_tflops"].get(precision) for precision in ("float32", "tf32", "bf16")]
    ceilings = [tflops for tflops in ceilings if tflops]  # a T4 has the first alone
    assert ceilings == sorted(ceilings)
    assert found["gpu"]["clock_mhz"] > 0 and found["gpu"]["power_limit_w"] > 0


@pytest.mark.parametrize("script", ["baseline.py", "speedup_06_flash_attn.py", "speedup_10_fused_adamw.py"])
def test_the_kernels_fill_the_step(run, script):
    done = run("tools/kernels.py", ROOT / script, "--steps", 9)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    groups = found["groups_ms"]
    assert (found["attention"] == "written out") == (script == "baseline.py")
    assert found["reserved_gib"] >= float(SUMMARY.search(done.stdout)["memory"])
    assert min(groups[kind] for kind in ("matmul", "attention", "softmax and loss", "optimizer")) > 0
    assert groups["idle"] < sum(groups.values()) / 2


@pytest.mark.parametrize("peer", ["plain", "compiled", "trainer"])
def test_a_peer_does_the_task_of_rung_10(run, peer):
    ours, theirs = run("speedup_10_fused_adamw.py", "--steps", 5), run("tools/peers.py", peer, "--steps", 5)
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.losses == pytest.approx(ours.losses, abs=0.02)
