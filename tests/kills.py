"""Kill pretrain/long_run.py with SIGKILL at random moments, resume it, and compare it with an uninterrupted run.

    python tests/kills.py 50        prints a line per kill and a summary; exits with status 1 if a check fails

The run trains nano under torchrun with two ranks on the CPU or, with --device cuda, with one rank on a GPU. It saves a
checkpoint every 3 steps. Each kill is sent 1 to 6 steps after the checkpoint from which the run started. About a third
of the kills are delayed until a save begins. A resumed run must start from the last finished checkpoint. At the end,
the losses of all steps and the weights must match the uninterrupted run bit for bit. On a GPU, the order of atomic
additions varies, so differences up to a tolerance are allowed. A lost step would exceed the tolerance.
"""

import argparse
import contextlib
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


def start(folder, device, steps):
    ranks = 2 if device == "cpu" else 1
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc_per_node", ranks]
    command += [ROOT / "pretrain" / "long_run.py", "--model", "nano", "--seq-len", 32, "--batch-size", 2]
    command += ["--total-batch-size", 128, "--device", device, "--checkpoint-dir", folder, "--resume"]
    command += ["--save-every", EVERY, "--log-file", folder / "log.jsonl", "--steps", steps]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=subprocess.DEVNULL)


def kill(process):
    """Kill torchrun, its ranks and the compiler's worker processes together, as a power cut would."""
    victims = [process, *psutil.Process(process.pid).children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    for victim in victims:
        victim.wait()


def log(folder):
    """Return {step: loss} of a log's complete lines. Raise AssertionError if a step is missing or repeated."""
    path = folder / "log.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []  # skip the header and an incomplete last line
    found = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    assert list(found) == list(range(len(lines))), f"the log misses or repeats a step: {list(found)}"
    return found


def newest(folder):
    return max((int(path.stem[5:]) for path in folder.glob("step_*.pt")), default=0)


def written(folder, pattern):
    """Return (time, size) of the last write to a file: the log, or the unfinished checkpoint that a kill leaves."""
    found = [(0, 0)]
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # the checkpoint was finished and renamed in the meantime
            found.append((path.stat().st_mtime_ns, path.stat().st_size))
    return max(found)


def compare(calm, stormy, steps, exact):
    """Return the largest difference between two runs' losses, and the relative difference between their weights."""
    losses, others = log(calm), log(stormy)
    assert len(losses) == len(others) == steps, f"{len(losses)} and {len(others)} steps of {steps} are in the logs"
    one, other = (torch.load(run / f"step_{steps:08d}.pt", weights_only=True) for run in (calm, stormy))
    assert one["position"] == other["position"], "the runs end at different positions in the text"
    updates = {int(state["step"]) for state in other["optim"]["state"].values()}
    assert updates == {steps}, f"AdamW took {updates} steps of {steps}"
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
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, steps, while_saving = random.Random(args.seed), 8 * max(args.kills, 1), 0
    with tempfile.TemporaryDirectory() as folder:
        calm, stormy = Path(folder) / "calm", Path(folder) / "stormy"
        calm.mkdir(), stormy.mkdir()
        assert start(calm, args.device, steps).wait() == 0
        for number in range(1, args.kills + 1):
            before, logged, left = newest(stormy), written(stormy, "log.jsonl"), written(stormy, "*.pt.tmp")
            process = start(stormy, args.device, steps)
            in_a_save, more = chance.random() < 1 / 3, chance.randrange(2 * EVERY)
            # A new write to the log means that the run has resumed.
            while len(log(stormy)) <= before + more or written(stormy, "log.jsonl")[0] == logged[0]:
                assert process.poll() is None, f"the run exited before the kill, with status {process.returncode}"
                time.sleep(0.01)
            time.sleep(0 if in_a_save else chance.uniform(0, 0.05))
            while in_a_save and written(stormy, "*.pt.tmp")[0] <= left[0] and process.poll() is None:
                pass  # until part of a save is written
            assert process.poll() is None, f"the run exited before the kill, with status {process.returncode}"
            kill(process)
            reached, kept, (moment, size) = len(log(stormy)), newest(stormy), written(stormy, "*.pt.tmp")
            size *= moment > left[0]
            while_saving += size > 0
            assert kept >= before and reached - kept <= EVERY, f"the log has {reached} steps, the checkpoint {kept}"
            print(f"kill {number}: log {reached}, checkpoint {kept}, {size:,} bytes of the next one", flush=True)
        assert start(stormy, args.device, steps).wait() == 0
        loss, off = compare(calm, stormy, steps, exact=args.device == "cpu")
    print(f"{args.kills} kills, {while_saving} during a save: {steps} losses and the weights match", end=" ")
    print(f"an uninterrupted run; losses differ by at most {loss:.6f}, weights by {off:.1e}")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"kills.py: {error}")
