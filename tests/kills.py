"""Kill pretrain/long_run.py with SIGKILL at random moments, resume it, and compare it with an uninterrupted run.

    python tests/kills.py 50        prints a line per kill and a summary; exits with status 1 if a check fails

The run trains nano under torchrun with two ranks on the CPU. With --ranks 1, it uses one rank; with --device cuda, it
uses one rank on a GPU. It saves a checkpoint every 3 steps. Each kill is sent 1 to 6 steps after the checkpoint from
which the run started. About a third of the kills are delayed until a save begins. A resumed run must start from the
last finished checkpoint. At the end, the losses of all steps and the weights must match the uninterrupted run bit for
bit. On a GPU, the order of atomic additions varies, so differences up to a tolerance are allowed. A lost step would
exceed the tolerance.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT, EVERY = Path(__file__).resolve().parent.parent, 3
LOSS, WEIGHTS = 0.004, 1.5e-3  # tolerances on a GPU: rounding stays below them, and a lost step exceeds them


def start(folder, args, steps):
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc_per_node", args.ranks]
    command += [ROOT / "pretrain" / "long_run.py", "--model", "nano", "--seq-len", 32, "--batch-size", 2]
    command += ["--total-batch-size", 128, "--device", args.device, "--checkpoint-dir", folder, "--resume"]
    command += ["--save-every", EVERY, "--log-file", folder / "log.jsonl", "--steps", steps]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=subprocess.DEVNULL)


def family(process):
    """Return the processes of a run: torchrun, its ranks and the compiler's worker processes."""
    return [process, *psutil.Process(process.pid).children(recursive=True)]


def kill(processes):
    """Kill the processes together, as a power cut would."""
    for victim in processes:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            pass
    for victim in processes:
        victim.wait()


def log(folder):
    """Return {step: loss} of a log's complete lines. Raise AssertionError if a step is missing or repeated."""
    path = folder / "log.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []  # skip the header and an incomplete last line
    found = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    assert list(found) == list(range(len(lines))), f"the log misses or repeats a step: {list(found)}"
    return found


def changed(folder):
    """Return the time of the log's last write. A new value after a restart means that the run has resumed."""
    path = folder / "log.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def newest(folder):
    return max((int(path.stem[5:]) for path in folder.glob("step_*.pt")), default=0)


def unfinished(folder):
    """Return (last write time, bytes) of an unfinished checkpoint, which remains after a kill until the next save."""
    found = []
    for path in folder.glob("*.pt.tmp"):
        try:
            found.append((path.stat().st_mtime_ns, path.stat().st_size))
        except FileNotFoundError:  # the checkpoint was finished and renamed in the meantime
            pass
    return max(found, default=(0, 0))


def compare(calm, stormy, exact):
    """Return the largest difference between two runs' losses, and the relative difference between their weights.

    Raise AssertionError if a step is missing or the runs differ by more than the tolerance.
    """
    losses, others = log(calm), log(stormy)
    assert losses.keys() == others.keys(), "the logs contain different steps"
    one, other = (torch.load(run / f"step_{len(losses):08d}.pt", weights_only=True) for run in (calm, stormy))
    assert one["position"] == other["position"], "the runs end at different positions in the text"
    updates = {int(state["step"]) for state in other["optim"]["state"].values()}
    assert updates == {len(losses)}, f"AdamW took {updates} steps of {len(losses)}"
    loss = max(abs(losses[step] - others[step]) for step in losses)
    w, v = (torch.cat([p.double().flatten() for p in saved["model"].values()]) for saved in (one, other))
    off = ((w - v).norm() / w.norm()).item()
    assert loss <= (0 if exact else LOSS), f"a loss differs by {loss}"
    assert off <= (0 if exact else WEIGHTS), f"the weights differ by {off:.1e}"
    return loss, off


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.ranks = args.ranks if args.device == "cpu" else 1
    chance, steps = random.Random(args.seed), 8 * max(args.kills, 1)
    with tempfile.TemporaryDirectory() as folder:
        calm, stormy = Path(folder) / "calm", Path(folder) / "stormy"
        calm.mkdir(), stormy.mkdir()
        assert start(calm, args, steps).wait() == 0
        done = while_saving = 0
        while done < args.kills:
            before, written, left = newest(stormy), changed(stormy), unfinished(stormy)
            process = start(stormy, args, steps)
            in_a_save, more, wait = chance.random() < 1 / 3, chance.randrange(2 * EVERY), chance.uniform(0, 0.05)
            patience = time.monotonic() + 300
            while (len(log(stormy)) <= before + more or changed(stormy) == written) and process.poll() is None:
                assert time.monotonic() < patience, "the run did not reach the step in 300 s"
                time.sleep(0.01)
            victims = family(process)  # the run has logged a step, so its ranks have started
            if in_a_save:
                while unfinished(stormy)[0] <= left[0] and process.poll() is None:  # until part of a save is written
                    pass
            else:
                time.sleep(wait)
            if process.poll() is not None:
                raise AssertionError(f"the run exited before the kill, with status {process.returncode}")
            kill(victims)
            done += 1
            reached, kept, (moment, size) = len(log(stormy)), newest(stormy), unfinished(stormy)
            size *= moment > left[0]
            while_saving += size > 0
            assert kept >= before and reached - kept <= EVERY, f"the log has {reached} steps, the checkpoint {kept}"
            print(
                f"kill {done}: {reached} steps in the log, {kept} in the checkpoint, {size:,} bytes of the next one",
                flush=True,
            )
        assert start(stormy, args, steps).wait() == 0
        assert len(log(calm)) == steps, f"the uninterrupted run has {len(log(calm))} of {steps} steps"
        loss, off = compare(calm, stormy, exact=args.device == "cpu")
    print(f"{done} kills, {while_saving} during a save:", end=" ")
    print(f"{steps} losses and the weights match an uninterrupted run; ", end="")
    print(f"losses differ by at most {loss:.6f}, weights by {off:.1e}")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"kills.py: {error}")
