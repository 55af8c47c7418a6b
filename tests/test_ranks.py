"""Several processes compute the same results as one process, also after a rank is killed.

The tests use 1, 2 and 4 ranks, several splits of a batch, DDP and FSDP2. The gradients match the gradients of a single
process within 1e-5. A run that is killed three times with SIGKILL ends with the losses and weights of an uninterrupted
run (`python tests/kills.py 50` kills it fifty times).
"""

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import LONG, ROOT, STEP, load, play, watch
from torch import nn

PLAIN = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}  # use one thread and do not compile
SIZES = ["--model", "nano", "--seq-len", "32", "--batch-size", "2", "--total-batch-size", "256"]
FAULTY = """
# Run long_run.py. One rank is killed in its fourth step, unless torchrun has restarted it.
import os, runpy, signal, sys, torch
count, update = 0, torch.optim.AdamW.step
def step(optimizer, *args, **kwargs):
    global count
    count += 1
    if count == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return update(optimizer, *args, **kwargs)
torch.optim.AdamW.step = step
sys.argv[0] = {script!r}
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def curve(done):
    return [(step["step"], step["loss"], step["norm"]) for step in done.steps]


def train_two_steps(rank, ranks, port, out, script, device, sizes):
    """Run one rank of a script for two steps at each batch size in turn, in float32 and uncompiled.

    Rank 0 writes {batch size: (the output of main(), the gradients of each step before clipping)} to `out`.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    clip, begin, store = nn.utils.clip_grad_norm_, dist.init_process_group, next(dist.rendezvous("env://"))[0]
    grads, found = [], {}

    def look(parameters, limit):
        parameters = list(parameters)
        # FSDP shards the gradients; full_tensor() gathers them.
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]
        grads.append([grad.detach().cpu().clone() for grad in whole])
        return clip(parameters, limit)

    def meet(backend):
        """Initialize the process group with a new store prefix for each run.

        With the old prefix, ranks could find the addresses of the previous run.
        """
        begin(backend, store=dist.PrefixStore(f"run {len(found)}", store), rank=rank, world_size=ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", meet)
        patch.setattr(nn.utils, "clip_grad_norm_", look)
        patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # no TF32
        for size in sizes:
            words = "--model", "nano", "--steps", 2, "--seq-len", 32, "--batch-size", size, "--total-batch-size", 256
            found[size] = play(script, *words, device=device, autocast=False), grads[:]
            grads.clear()
            if dist.is_initialized():  # not with one rank, which trains alone
                dist.destroy_process_group()
    if rank == 0:
        torch.save(found, out)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Return a function that trains on several ranks and returns {batch size: (output of main(), gradients)}."""

    @functools.cache
    def at(ranks, *sizes, script="ddp_run.py", device="cpu"):
        out = tmp_path_factory.mktemp("gradients") / "out.pt"
        words = ranks, free_port(), out, script, device, sizes
        torch.multiprocessing.start_processes(train_two_steps, words, ranks, daemon=True, start_method="forkserver")
        return torch.load(out)

    return at


def same(one, many, tolerance=1e-5):
    """Assert that the runs `many` match the run `one` in each step's loss, norm and gradients within a tolerance."""
    for (printed, grads), (expected, wanted) in zip(many.values(), [one] * len(many), strict=True):
        ours, theirs = (list(STEP.finditer(text)) for text in (printed, expected))
        assert len(ours) == len(theirs) == len(grads) == len(wanted) == 2
        for step, other in zip(ours, theirs, strict=True):
            assert float(step["loss"]) == pytest.approx(float(other["loss"]), rel=tolerance)
            assert float(step["norm"]) == pytest.approx(float(other["norm"]), rel=tolerance, abs=1.01e-4)  # 4 decimals
        for step, other in zip(grads, wanted, strict=True):
            for grad, expected in zip(step, other, strict=True):
                assert (grad - expected).norm() <= tolerance * expected.norm()
            norm, expected = (torch.stack([g.norm() for g in grads]).norm() for grads in (step, other))
            assert norm.item() == pytest.approx(expected.item(), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, sizes", [(1, (4, 1)), (2, (4, 2, 1)), (4, (2, 1))])
def test_every_split_gives_the_gradients_of_one_process_on_the_whole_batch(gradients, ranks, sizes):
    same(gradients(1, 8, 4, 1)[8], {size: gradients(ranks, *sizes)[size] for size in sizes})


@pytest.mark.slow
@pytest.mark.parametrize("ranks, sizes", [(2, (4, 1)), (4, (2,))])
def test_slices_give_the_gradients_of_the_whole(gradients, ranks, sizes):
    same(gradients(1, 8, 4, 1)[8], gradients(ranks, *sizes, script="branches/fsdp_run.py"))


@pytest.fixture(scope="module")
def calm(run, small):
    """Return the step, loss and norm of eight uninterrupted steps on two ranks."""
    done = run("ddp_run.py", *SIZES, "--steps", 8, torchrun=2, folder=small, **PLAIN)
    assert len(done.losses) == 8
    return curve(done)


@pytest.mark.slow
def test_ranks_that_no_torchrun_started_train_together(small, calm):
    """As Slurm's srun starts them: two processes with the four variables set, but not LOCAL_RANK."""
    command = [sys.executable, small / "ddp_run.py", *SIZES, "--steps", "8", "--device", "cpu"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=os.environ | PLAIN | place | {"RANK": str(r)}, **pipes) for r in (0, 1)]
    (out, waiting), (silence, _) = (process.communicate() for process in both)
    assert [(m["step"], m["loss"], m["norm"]) for m in STEP.finditer(out)] == calm and silence == ""
    assert f"rank 0: waiting for 2 ranks at 127.0.0.1:{place['MASTER_PORT']}\n" in waiting


@pytest.mark.slow
def test_shards_train_like_the_whole_model_and_either_resumes_the_other(run, small, calm, tmp_path):
    """Sharded training matches the losses of unsharded training, and each resumes from a checkpoint of the other.

    The sharded runs have two ranks. All runs use bf16 if the CPU supports it. The first sharded run is compiled.
    """
    words = *SIZES, "--steps", 8, "--save-every", 6, "--checkpoint-dir"
    expected = [float(loss) for _, loss, _ in calm]
    slices = run("branches/fsdp_run.py", *words, tmp_path / "slices", torchrun=2, folder=small)
    assert slices.returncode == 0, slices.stderr
    assert slices.losses == pytest.approx(expected, abs=2e-4)
    (tmp_path / "slices" / "step_00000008.pt").unlink()
    whole = watch(LONG, *words, tmp_path / "slices", "--resume")
    assert [float(step.printed["loss"]) for step in whole] == pytest.approx(expected[6:], abs=2e-4)

    watch(LONG, *words, tmp_path / "whole")
    (tmp_path / "whole" / "step_00000008.pt").unlink()
    (tmp_path / "whole" / "lock").unlink()  # held by this process, in which the run took place
    words = *words, tmp_path / "whole", "--resume"
    slices = run("branches/fsdp_run.py", *words, torchrun=2, folder=small, **PLAIN)
    assert slices.returncode == 0, slices.stderr
    assert slices.losses == pytest.approx(expected[6:], abs=2e-4)


@pytest.mark.slow
def test_max_restarts_resumes_from_the_newest_checkpoint(run, small, calm, tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY.format(script=str(small / LONG)))
    # Without this setting, restarted ranks may try to connect to the failed ranks (pytorch/pytorch#135712).
    environment = PLAIN | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    saving = "--checkpoint-dir", tmp_path / "saved", "--save-every", 2, "--resume", "--log-file", tmp_path / "log.jsonl"
    done = run(path, *SIZES, "--steps", 8, *saving, torchrun=2, restarts=1, **environment)
    assert done.returncode == 0, done.stderr
    assert re.search("[24] of 8 steps are done", done.stdout)  # rank 0 may save step 4 before it is stopped
    steps = {step: (step, loss, norm) for step, loss, norm in curve(done)}  # repeated steps count once
    assert list(steps.values()) == calm
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1 + 8


@pytest.mark.slow
def test_ranks_with_different_folders_are_refused(run, small, tmp_path):
    """A run on two machines without a shared disk is rejected: rank 0 finds a checkpoint, but rank 1 finds none."""
    watch(LONG, *SIZES, "--steps", 2, "--checkpoint-dir", tmp_path / "0" / "saved")
    (tmp_path / "0" / "saved" / "lock").unlink()  # held by this process, in which the run took place
    (tmp_path / "1").mkdir()
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"os.chdir(os.path.join({str(tmp_path)!r}, os.environ['RANK']))\n"
        f"sys.argv[0] = {str(small / LONG)!r}\n"
        "sys.path[0] = os.path.dirname(sys.argv[0])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = *SIZES, "--steps", 4, "--checkpoint-dir", "saved", "--resume"
    done = run(script.name, *arguments, folder=tmp_path, torchrun=2)
    assert done.returncode != 0
    assert "the ranks do not see the same saved: they would resume at steps [2, 0]" in done.stderr


@pytest.fixture
def agents(small, tmp_path):
    """Return a function that simulates two machines by two connected torchrun processes with one rank each."""

    def start(*args):
        port = free_port()
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv-id=7"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        command += [small / LONG, *SIZES, "--checkpoint-dir", tmp_path / "saved", "--save-every", 1000]
        command = [str(word) for word in (*command, "--resume", *args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return [subprocess.Popen(command, env=os.environ | PLAIN, **pipes) for _ in range(2)]

    return start


@pytest.mark.slow
def test_two_machines_train_stop_and_resume_as_one(calm, agents, tmp_path):
    both = agents("--steps", 8)
    texts = [agent.communicate()[0] for agent in both]
    assert [agent.returncode for agent in both] == [0, 0], texts
    steps = [(m["step"], m["loss"], m["norm"]) for m in STEP.finditer("".join(texts))]
    assert steps == calm  # the joined output lists each step once, because only rank 0 prints

    shutil.rmtree(tmp_path / "saved")
    words = "--steps", 10000, "--log-file", tmp_path / "log.jsonl"
    both = agents(*words)
    while not (tmp_path / "log.jsonl").exists() or (tmp_path / "log.jsonl").read_text().count("\n") < 4:
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)  # SIGTERM to one machine: both must finish the step, and rank 0 must save
    texts = [agent.communicate()[0] for agent in both]
    assert all(agent.returncode != 0 for agent in both), texts
    stopped = max(int(path.stem[5:]) for path in (tmp_path / "saved").glob("step_*.pt"))
    assert 3 <= stopped < 10000

    both = agents("--steps", stopped + 1)
    texts = [agent.communicate()[0] for agent in both]
    assert [agent.returncode for agent in both] == [0, 0], texts
    assert [int(m["step"]) for m in STEP.finditer("".join(texts))] == [stopped]


def test_slurm_starts_a_torchrun_per_machine_and_queues_again_what_it_must_stop(tmp_path, monkeypatch):
    """slurm.sbatch starts one torchrun per machine and requeues a stopped job. Stubs replace Slurm and torchrun."""
    for name, body in {
        "scontrol": "[ $1 = show ] && echo node1 && echo node2",
        "srun": 'exec "$@"',
        "torchrun": "trap 'echo saved >> calls; exit 1' TERM; [ -e quick ] && exit 3; while true; do sleep 0.1; done",
    }.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> calls\n{body}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    calls = tmp_path / "calls"
    with subprocess.Popen(["bash", ROOT / "pretrain" / "slurm.sbatch"], env=environment) as job:
        while "torchrun" not in (calls.read_text() if calls.exists() else ""):
            time.sleep(0.05)
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 0
    show, srun, torchrun, saved, requeue = calls.read_text().splitlines()
    assert (show, saved, requeue) == ("scontrol show hostnames node[1-2]", "saved", "scontrol requeue 7")
    assert "--nnodes=2" in torchrun and "--rdzv-endpoint=node1:29500" in torchrun and "--resume" in torchrun
    monkeypatch.setattr("sys.argv", [LONG, *torchrun.split(LONG)[1].split()])
    assert load(LONG).parse_args().resume

    (tmp_path / "quick").touch()  # a run that fails is not requeued
    calls.unlink()
    assert subprocess.run(["bash", ROOT / "pretrain" / "slurm.sbatch"], env=environment).returncode == 3
    assert "requeue" not in calls.read_text()


@pytest.mark.slow
def test_three_kills(run, small):
    """After three kills, a run ends with the losses and weights of an uninterrupted run.

    `python tests/kills.py 50` repeats the check with fifty kills.
    """
    done = run("tests/kills.py", 3, "--seed", 1, folder=small, **PLAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^3 kills, [0-3] during a save: 24 losses and the weights match an uninterrupted run; .* by 0.0e\+00$",
        done.stdout,
        re.M,
    )


@pytest.mark.gpu
def test_three_kills_on_a_gpu(run, measured):
    done = run("tests/kills.py", 3, "--device", "cuda", "--seed", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    measured(done.stdout.splitlines()[-1])
