"""Several processes compute the same results as one process, and all of them exit if one dies.

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
import threading
import time
from types import SimpleNamespace

import allreduce
import kills
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import LONG, ROOT, STEP, load, play, since, watch
from torch import nn

PLAIN = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}  # use one thread and do not compile
SIZES = ["--model", "nano", "--seq-len", "32", "--batch-size", "2", "--total-batch-size", "256"]
FAULTY = """
# Run long_run.py. One rank fails in its fourth step, unless torchrun has restarted it.
import os, runpy, signal, sys, torch
count, update = 0, torch.optim.AdamW.step
def step(optimizer, *args, **kwargs):
    global count
    count += 1
    if count == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {fault}
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
    os.environ |= {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_RUN_ID": "7"}
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
        start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver", daemon=True)
        processes, patience = start(train_two_steps, words, nprocs=ranks, join=False), time.monotonic() + 300
        while not processes.join(timeout=1):
            assert time.monotonic() < patience
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


@pytest.mark.gpu
@pytest.mark.parametrize("script", since("ddp_run.py"))
def test_one_rank_of_nccl_has_the_gradients_of_gloo(gradients, script, measured):
    on_cpu, on_gpu = gradients(1, 8, 4, 1)[8], gradients(1, 8, 2, script=script, device="cuda")
    same(on_cpu, on_gpu, tolerance=1e-3)
    pairs = zip(on_cpu[1][0], on_gpu[8][1][0], strict=True)
    measured(
        f"a gradient is off by {max(((g - e).norm() / e.norm()).item() for e, g in pairs):.1e}, relatively, at most"
    )


@pytest.fixture(scope="module")
def calm(run, small):
    """Return the step, loss and norm of eight uninterrupted steps on two ranks."""
    done = run("ddp_run.py", *SIZES, "--steps", 8, torchrun=2, folder=small, **PLAIN)
    assert len(done.losses) == 8
    return curve(done)


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
    words = *words, tmp_path / "whole", "--resume"
    slices = run("branches/fsdp_run.py", *words, torchrun=2, folder=small, **PLAIN)
    assert slices.returncode == 0, slices.stderr
    assert slices.losses == pytest.approx(expected[6:], abs=2e-4)


@pytest.fixture
def faulty(tmp_path, run, small):
    """Return a function that runs long_run.py on two ranks, of which the second fails."""

    def with_fault(fault, *args, restarts=0):
        path = tmp_path / "faulty.py"
        path.write_text(FAULTY.format(fault=fault, script=str(small / LONG)))
        # Without this setting, restarted ranks may try to connect to the failed ranks (pytorch/pytorch#135712).
        environment = PLAIN | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return run(path, *SIZES, *args, torchrun=2, restarts=restarts, timeout=120, **environment)

    return with_fault


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, cause",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL)"),
        ("raise ValueError('a bad batch')", "a bad batch"),
    ],
)
def test_a_failing_rank_stops_the_others_and_is_named(faulty, tmp_path, fault, cause):
    done = faulty(fault, "--steps", 1000, "--checkpoint-dir", tmp_path / "saved")
    assert done.returncode != 0
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]
    # Failure times are in whole seconds, so torchrun may report a consequence of rank 1's failure as the root cause.
    # The test therefore searches all reported failures for rank 1.
    _, *failures = re.split(r"\n *\[\d\]:\n", done.stderr)
    failed = [failure for failure in failures if re.search(r"rank +: 1 ", failure)]
    assert len(failed) == 1 and cause in failed[0], done.stderr
    assert len(done.losses) in (3, 4)


@pytest.mark.slow
def test_max_restarts_resumes_from_the_newest_checkpoint(faulty, calm, tmp_path):
    saving = "--checkpoint-dir", tmp_path / "saved", "--save-every", 2, "--resume", "--log-file", tmp_path / "log.jsonl"
    done = faulty("os.kill(os.getpid(), signal.SIGKILL)", "--steps", 8, *saving, restarts=1)
    assert done.returncode == 0, done.stderr
    assert re.search("[24] of 8 steps are done", done.stdout)  # rank 0 may save step 4 before it is stopped
    steps = {step: (step, loss, norm) for step, loss, norm in curve(done)}  # repeated steps count once
    assert list(steps.values()) == calm
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1 + 8


def test_it_trains_alone_if_torchrun_has_not_started_it(monkeypatch):
    """A script started without torchrun trains alone, even if a cluster sets RANK and WORLD_SIZE."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    printed = play("ddp_run.py", *SIZES, "--steps", 1)
    assert "* 1 ranks" in printed and "median of steps 0-0" in printed


def test_a_port_in_use_is_one_line(refused, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place["TORCHELASTIC_RUN_ID"] = "7"
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        refused("ddp_run.py", "--device", "cpu", says=f".*{port}.*EADDRINUSE")


@pytest.mark.slow
def test_ranks_with_different_folders_are_refused(run, small, tmp_path):
    """A run on two machines without a shared disk is rejected: rank 0 finds a checkpoint, but rank 1 finds none."""
    watch(LONG, *SIZES, "--steps", 2, "--checkpoint-dir", tmp_path / "0" / "saved")
    (tmp_path / "1").mkdir()
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"os.chdir(os.path.join({str(tmp_path)!r}, os.environ['RANK']))\n"
        f"sys.argv[0] = {str(small / LONG)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = *SIZES, "--steps", 4, "--checkpoint-dir", "saved", "--resume"
    done = run(script.name, *arguments, folder=tmp_path, torchrun=2)
    assert done.returncode != 0
    assert "the ranks do not see the same saved: they would resume at steps [2, 0]" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("advice", ["--local-addr=localhost", None])
def test_torchrun_works_on_a_machine_that_does_not_know_its_own_name_if_told_its_address(advice, small, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nsocket.getfqdn = lambda name='': 'no-such-host.invalid'\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [advice] * bool(advice) + [str(small / "ddp_run.py"), *SIZES, "--device", "cpu", "--steps", "2"]
    env = os.environ | PLAIN | {"PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as child:
        patience = threading.Timer(300, os.killpg, (child.pid, signal.SIGKILL))
        patience.start()
        lines = iter(child.stdout.readline, "")
        said = next(
            (line for line in lines if re.search("median of steps|no-such-host.* cannot be retrieved", line)), ""
        )
        patience.cancel()
        os.killpg(child.pid, signal.SIGKILL)  # otherwise, torchrun would retry for minutes
    assert said and ("median of steps" in said) == bool(advice), said


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
    texts = [agent.communicate(timeout=200)[0] for agent in both]
    assert [agent.returncode for agent in both] == [0, 0], texts
    steps = [(m["step"], m["loss"], m["norm"]) for m in STEP.finditer("".join(texts))]
    assert steps == calm  # the joined output lists each step once, because only rank 0 prints

    shutil.rmtree(tmp_path / "saved")
    words = "--steps", 10000, "--log-file", tmp_path / "log.jsonl"
    both = agents(*words)
    patience = time.monotonic() + 300
    while not (tmp_path / "log.jsonl").exists() or (tmp_path / "log.jsonl").read_text().count("\n") < 4:
        assert time.monotonic() < patience
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)  # SIGTERM to one machine: both must finish the step, and rank 0 must save
    texts = [agent.communicate(timeout=120)[0] for agent in both]
    assert all(agent.returncode != 0 for agent in both), texts
    stopped = max(int(path.stem[5:]) for path in (tmp_path / "saved").glob("step_*.pt"))
    assert 3 <= stopped < 10000

    both = agents("--steps", stopped + 1)
    texts = [agent.communicate(timeout=200)[0] for agent in both]
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


def test_the_arithmetic_of_the_all_reduce():
    assert allreduce.speed_up(2, step_ms=1000, gradient_bytes=5e8, bus_gb_s=10) == pytest.approx(1000 / (500 + 50))
    assert allreduce.speed_up(8, step_ms=1000, gradient_bytes=5e8, bus_gb_s=10) == pytest.approx(1000 / (125 + 87.5))


def test_the_bandwidth_of_a_bus_does_not_depend_on_the_number_of_ranks(monkeypatch, capsys):
    """Bus bandwidth is the number of bytes that each rank sends per second.

    In a ring of 4, each rank sends 2 × 3/4 of the gradients. In this test, an all-reduce takes 0.5 s.
    """
    clock = iter([read for _ in range(15) for read in (0.0, 0.5)])
    for name, answer in ("init_process_group", None), ("get_rank", 0), ("get_world_size", 4), ("barrier", None):
        monkeypatch.setattr(dist, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(allreduce, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.argv", ["allreduce.py", "--model", "gpt2", "--device", "cpu"])
    allreduce.main()
    megabytes = 4 * 124_475_904 / 1e6
    printed = capsys.readouterr().out
    assert f"gpt2: {megabytes:,.1f} MB of gradients between 4 ranks" in printed
    assert f"500.00 ms (quartiles 500.00-500.00), bus {1.5 * megabytes / 1000 / 0.5:.2f} GB/s" in printed


@pytest.mark.slow
def test_the_all_reduce_is_measured(run):
    done = run("measure/allreduce.py", "--model", "nano", "--step-ms", 1000, torchrun=2)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    found = re.fullmatch(
        r"nano: 29\.5 MB of gradients between 2 ranks on cpu, torch \S+: (\S+) ms \(.*\), bus (\S+) GB/s", first
    )
    assert float(found[2]) == pytest.approx(29.453312 / float(found[1]), rel=0.02, abs=0.006)
    assert [line.split(" GPUs: ")[0] for line in rest] == ["2", "4", "8"]
    done = run("measure/allreduce.py")
    assert done.returncode == 2 and "start this program with torchrun" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_kills(run, small, ranks):
    """After three kills, a run ends with the losses and weights of an uninterrupted run.

    `python tests/kills.py 50` repeats the check with fifty kills.
    """
    done = run("tests/kills.py", 3, "--seed", 1, "--ranks", ranks, timeout=900, folder=small, **PLAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^3 kills, [0-3] during a save: 24 losses and the weights match an uninterrupted run; .* by 0.0e\+00$",
        done.stdout,
        re.M,
    )


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """Return a function that trains nano for 24 steps, with perturbed gradients or without the update of one step."""

    @functools.cache
    def spoilt(rounding=0.0, lost=None):
        count, update, generator = 0, torch.optim.AdamW.step, torch.Generator().manual_seed(0)

        def step(optimizer, *args, **kwargs):
            nonlocal count
            count += 1
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad.mul_(1 + rounding * torch.randn(p.grad.shape, generator=generator))
            return None if count - 1 == lost else update(optimizer, *args, **kwargs)

        folder = tmp_path_factory.mktemp("spoilt")
        words = "--seq-len", 32, "--batch-size", 2, "--total-batch-size", 128, "--steps", 24
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", step)
            play(LONG, *words, "--checkpoint-dir", folder, "--log-file", folder / "log.jsonl", full=True)
        return folder

    return spoilt


@pytest.mark.slow
@pytest.mark.parametrize("lost", [3, 22, 23])
def test_the_tolerance_of_a_gpu_lets_rounding_pass_and_no_lost_step(spoilt, lost, monkeypatch):
    loss, weights = kills.compare(spoilt(), spoilt(rounding=1e-6), exact=False)
    assert 0 < loss < kills.LOSS / 4 and 0 < weights < kills.WEIGHTS / 2
    with pytest.raises(AssertionError, match="differ"):
        kills.compare(spoilt(), spoilt(rounding=1e-6), exact=True)
    with pytest.raises(AssertionError, match="AdamW took .23. steps of 24"):
        kills.compare(spoilt(), spoilt(lost=lost), exact=False)
    monkeypatch.setattr(kills, "int", lambda steps: 24, raising=False)  # disables the check of the step count
    with pytest.raises(AssertionError, match="differ"):
        kills.compare(spoilt(), spoilt(lost=lost), exact=False)


@pytest.mark.gpu
def test_three_kills_on_a_gpu(run, measured):
    done = run("tests/kills.py", 3, "--device", "cuda", "--seed", 1, timeout=450)
    assert done.returncode == 0, done.stdout + done.stderr
    measured(done.stdout.splitlines()[-1])
