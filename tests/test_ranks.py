"""Several processes compute the same results as one process, also after a rank is stopped or killed.

Three ranks that share a text match one process within 1e-5 in every gradient, with DDP and FSDP2, and each resumes a
checkpoint of the other. A run that is killed three times with SIGKILL ends with the losses and weights of an
uninterrupted run.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import LONG, NO_SCORES, ROOT, STEP, TRAIN, load, made_up_gpu, play, watch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

PLAIN = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}  # use one thread and do not compile
SIZES = ["--model", "nano", "--seq-len", "32", "--batch-size", "2", "--total-batch-size", "256"]
FSDP = "branches/fsdp_run.py"
# A name of a run -> the script that begins it, and the script that resumes it after a signal in its second step
RUNS = {"ddp": ["ddp_run.py"], "ddp then fsdp": [LONG, FSDP], "fsdp then ddp": [FSDP, LONG], "train": [TRAIN, TRAIN]}


def work(number, ranks, folder):
    """Run everything in RUNS for three steps as one of several ranks, in float32 and uncompiled.

    The last process trains alone, with the batches of all ranks and micro-steps in one. Each process saves the
    gradients that reached the optimizer and the weights after each step. No LOCAL_RANK is set, as under srun.
    """
    alone, begin, found, meetings = number == ranks, dist.init_process_group, {}, itertools.count()
    if not alone:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "here", "MASTER_PORT": "1"}
        store = dist.FileStore(f"{folder}/store", ranks)

    def meet(backend):  # with the store prefix of an earlier run, ranks could find that run's addresses
        begin(backend, store=dist.PrefixStore(f"run {next(meetings)}", store), rank=number, world_size=ranks)

    def whole(tensor):  # FSDP shards parameters and gradients; full_tensor() gathers them
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    def look(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.param_groups[0]["lr"]:  # not set_state_dict's step, which only creates AdamW's moments
            steps.append([whole(p.grad) for p in parameters])
            if len(steps) == 3 and number >= ranks - 1 and len(scripts) == 2:  # in the second step, of the last rank
                for sent in [signal.SIGTERM] if alone else 2 * [signal.SIGINT]:  # one Ctrl-C under torchrun
                    os.kill(os.getpid(), sent)

    def look_again(optimizer, *_):
        if optimizer.param_groups[0]["lr"]:
            steps.append([whole(p) for group in optimizer.param_groups for p in group["params"]])

    register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(look_again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", meet)
        patch.setattr(load(TRAIN), "evaluate", lambda *args: NO_SCORES)
        for name, scripts in RUNS.items():
            steps, printed, own = [], "", folder / str(alone) / name
            words = ["--model", "nano", "--steps", 3, "--seq-len", 32, "--batch-size", 12 if alone else 2]
            words += ["--total-batch-size", 384, "--data", folder / "text.txt"]
            for script in scripts:
                more = ["--warmup-steps", 10] if script == TRAIN else []
                if len(scripts) == 2:
                    more += ["--checkpoint-dir", own, "--log-file", own / "log.jsonl", "--resume"]
                more += ["--save", folder / f"{number} {name}.save"]
                with contextlib.suppress(SystemExit):
                    printed = play(script, *words, *more, autocast=False)
                if dist.is_initialized():
                    dist.destroy_process_group()
            found[name] = steps, printed
    torch.save(found, folder / f"{number}.pt")


def test_three_ranks_train_stop_and_resume_like_one_process_on_the_whole_batch(tmp_path):
    # 945 tokens, of which train.py holds out a tenth: all start over before the third step of 384 tokens.
    (tmp_path / "text.txt").write_bytes((ROOT / "input.txt").read_bytes()[:3390])
    torch.multiprocessing.set_forkserver_preload(["pytest", "torch.distributed.fsdp", "torch._dynamo", "tiktoken"])
    try:
        torch.multiprocessing.start_processes(work, (3, tmp_path), 4, daemon=True, start_method="forkserver")
    except torch.multiprocessing.ProcessException as error:
        pytest.fail(str(error))
    *ranks, one = (torch.load(tmp_path / f"{number}.pt") for number in range(4))
    saved = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*.save")}
    assert saved.keys() == {f"{number} {name}" for number in (0, 3) for name in RUNS}  # only rank 0 writes
    for name in RUNS:  # whole tensors, without DDP's prefix
        shapes = ({key: p.shape for key, p in saved[f"{number} {name}"].items()} for number in (0, 3))
        assert next(shapes) == next(shapes)
    for name, (expected, printed) in one.items():
        rows = [list(STEP.finditer(text)) for text in (printed, ranks[0][name][1])]
        if len(RUNS[name]) == 2:
            logs = [(tmp_path / str(alone) / name / "log.jsonl").read_text() for alone in (True, False)]
            rows = [[json.loads(line) for line in log.splitlines() if '"norm"' in line] for log in logs]
        assert len(expected) == 6 and len(rows[0]) == 3  # each run did the three steps, in spite of the signal
        for row, other in zip(*rows, strict=True):
            assert int(row["step"]) == int(other["step"]) and float(row["lr"]) == float(other["lr"])
            assert float(row["loss"]) == pytest.approx(float(other["loss"]), abs=1e-5)
            assert float(row["norm"]) == pytest.approx(float(other["norm"]), abs=1.01e-4)  # printed with 4 decimals
        for steps in (rank[name][0] for rank in ranks):
            for i, (found, wanted, same) in enumerate(zip(steps, expected, ranks[0][name][0], strict=True)):
                for tensor, other, first in zip(found, wanted, same, strict=True):
                    assert torch.equal(tensor, first), name  # the ranks agree bit for bit
                    # Of the weights, only the matrices: AdamW enlarges the rounding of the biases' small gradients.
                    if i % 2 == 0 or tensor.dim() == 2:
                        assert (tensor - other).norm() <= 1e-5 * other.norm(), name


def test_slurm_starts_a_torchrun_per_machine_and_queues_again_what_it_must_stop(tmp_path, monkeypatch):
    """slurm.sbatch starts one torchrun per machine and requeues a stopped job. Stubs replace Slurm and torchrun."""
    lines = (ROOT / "pretrain" / "slurm.sbatch").read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]  # Slurm reads no further
    options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=?(\S*)", "\n".join(header)))
    assert "requeue" in options and options["open-mode"] == "append"  # the log of the first part is kept
    seconds = re.fullmatch(r"B:TERM@(\d+)", options["signal"])  # to the batch script
    assert seconds and int(seconds[1]) >= 60  # there is time for a step and a save
    assert options["ntasks-per-node"] == "1"  # torchruns
    trap = "trap 'sleep 0.5; echo saved $TORCH_DISABLE_SHARE_RDZV_TCP_STORE >> calls; exit 1' TERM"
    run = "[ -e quick ] && exit 3; while true; do sleep 0.1; done"
    show = "[ $1 = show ] && echo node1 && echo node2"
    for stub, first, body in ("scontrol", "", show), ("srun", "", 'exec "$@"'), ("torchrun", trap, run):
        (tmp_path / stub).write_text(f'#!/bin/bash\n{first}\necho {stub} "$@" >> calls\n{body}\n')
        (tmp_path / stub).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": options["nodes"], "SLURM_JOB_ID": "7"}
    calls = tmp_path / "calls"
    with subprocess.Popen(["bash", ROOT / "pretrain" / "slurm.sbatch"], env=environment) as job:
        caught = 0  # a bit for each signal that the script catches
        while "torchrun" not in (calls.read_text() if calls.exists() else "") or not caught >> signal.SIGTERM - 1 & 1:
            assert job.poll() is None
            caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{job.pid}/status").read_text())[1], 16)
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 0
    show, srun, torchrun, *end = calls.read_text().splitlines()
    assert (show, end) == ("scontrol show hostnames node[1-2]", ["saved 1", "scontrol requeue 7"])
    gpus = int(options["gpus-per-node"])
    expected = f"--nnodes=2 --nproc_per_node={gpus} --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --rdzv-id=7"
    assert set(expected.split()) <= set(torchrun.split())
    place = {"RANK": 15, "LOCAL_RANK": 7, "WORLD_SIZE": 2 * gpus, "MASTER_ADDR": "node1", "MASTER_PORT": 29500}
    for variable, value in place.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr("sys.argv", [LONG, *torchrun.split(LONG)[1].split()])
    with made_up_gpu(None, *gpus * [(9, 0)]):
        args = load(LONG).parse_args()  # exits if a batch does not fit the number of ranks
    assert args.device == "cuda:7" and args.resume and args.save_every < args.steps and args.log_file

    (tmp_path / "quick").touch()  # a run that fails is not requeued
    calls.unlink()
    assert subprocess.run(["bash", ROOT / "pretrain" / "slurm.sbatch"], env=environment).returncode == 3
    assert "requeue" not in calls.read_text()


@pytest.mark.slow
def test_compiled_shards_under_torchrun_train_like_the_whole_model(run, small):
    """Both runs use bf16 if the CPU supports it."""
    sharded = run(FSDP, *SIZES, "--steps", 8, torchrun=2, folder=small)
    assert sharded.returncode == 0, sharded.stderr
    whole = watch(LONG, *SIZES, "--steps", 8)
    assert sharded.losses == pytest.approx([float(step.printed["loss"]) for step in whole], abs=2e-4)


@pytest.mark.slow
def test_a_run_that_was_killed_three_times_ends_like_one_that_was_not(small, tmp_path):
    """SIGKILL ends torchrun and both ranks, at about the time of a save in the second case."""

    def start(folder):
        words = ["torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc_per_node=2", small / LONG]
        words += [*SIZES, "--device", "cpu", "--steps", 40, "--checkpoint-dir", folder, "--save-every", 3, "--resume"]
        words = [str(word) for word in (*words, "--log-file", folder / "log.jsonl")]
        return subprocess.Popen([sys.executable, "-m", *words], env=os.environ | PLAIN, stdout=subprocess.DEVNULL)

    def rows(folder):
        log = folder / "log.jsonl"
        lines = log.read_text().split("\n")[1:-1] if log.exists() else []  # without an incomplete last line
        return [(row["step"], row["loss"], row["norm"]) for row in map(json.loads, lines)]

    killed, calm = tmp_path / "killed", tmp_path / "calm"
    for count in 2, 9, 14:
        process = start(killed)
        while len(rows(killed)) < count:
            assert process.poll() is None, "the run ended before the kill"
            time.sleep(0.01)
        assert len(rows(killed)) < 40
        victims = [process, *psutil.Process(process.pid).children(recursive=True)]
        for call in "kill", "wait":
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(victim, call)()
    assert [start(folder).wait() for folder in (killed, calm)] == [0, 0]
    assert rows(killed) == rows(calm) and len(rows(calm)) == 40
    one, other = (torch.load(folder / "step_00000040.pt", weights_only=True) for folder in (killed, calm))
    assert one["position"] == other["position"]
    assert all(torch.equal(p, other["model"][name]) for name, p in one["model"].items())
