"""Measure the peak memory of a script's last step:  python measure/peak.py baseline.py --steps 2

This program runs the script with its arguments and prints JSON after the script's own output: the largest number of
bytes that PyTorch's allocator had handed out at any time during the last step. On CUDA, the allocator keeps this count.
On a CPU, this program adds up the allocations that torch.profiler records, which makes the steps slower. Memory that
libraries allocate by themselves, such as the CUDA context, is not included.

memory.py runs this program to check its predictions. With --checkpointing, each block is checkpointed as in
branches/activation_checkpointing.py.
"""

import argparse
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from device import memory_in_use
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model):
    """Make each block of a GPT keep only its input and recompute its activations in the backward pass."""
    block = type(model.transformer.h[0])
    forward = block.forward
    block.forward = lambda self, x: checkpoint(forward, self, x, use_reentrant=False)


def last_step(script, cuda):
    """Run a script with the arguments in sys.argv and return the peak memory of its last step in bytes."""
    ends, peaks = [], []

    def end_of_step(optimizer, *_):
        ends.append(time.time_ns())
        if cuda:
            device = optimizer.param_groups[0]["params"][0].device
            peaks.append(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    def run():
        runpy.run_path(script, run_name="__main__")

    register_optimizer_step_post_hook(end_of_step)
    in_use = run() if cuda else memory_in_use(run)
    if len(ends) < 2:
        sys.exit("peak.py: error: the script must run at least 2 steps")
    return peaks[-1] if cuda else max(size for ns, size in in_use if ends[-2] < ns <= ends[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="as in the script")
    parser.add_argument("script", help="the script to run, before its arguments")
    args, others = parser.parse_known_args()
    if not Path(args.script).is_file():
        parser.error(f"expected a script to run, not {args.script}")
    if args.checkpointing:
        to = torch.nn.Module.to

        def checkpointed(model, *args):
            checkpoint_blocks(model)
            return to(model, *args)

        torch.nn.Module.to = checkpointed
    sys.argv = [args.script, *others, "--device", args.device]
    peak = last_step(args.script, args.device.startswith("cuda"))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"peak_bytes": peak}), file=sys.__stdout__)
