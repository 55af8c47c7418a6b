"""Measure the peak memory of a script's last step:  python measure/peak.py speedup_10_fused_adamw.py --steps 2

This program runs the script with its arguments and prints JSON after the script's own output: the largest number of
bytes that PyTorch's allocator had handed out at any time during the last step. On CUDA, the allocator keeps this count.
On a CPU, this program adds up the allocations that torch.profiler records, which makes the steps slower. Memory that
libraries allocate by themselves, such as the CUDA context, is not included.

memory.py runs this program to check its predictions. With --checkpointing before the script's name, each block of the
model is checkpointed as in branches/activation_checkpointing.py.
"""

import itertools
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model):
    """Make each block of a GPT keep only its input and recompute its activations in the backward pass."""
    block = type(model.transformer.h[0])
    forward = block.forward
    block.forward = lambda self, x: checkpoint(forward, self, x, use_reentrant=False)


def last_step(script, device):
    """Run a script with the arguments in sys.argv and return the peak memory of its last step in bytes."""
    ends, peaks = [], []

    def end_of_step(*_):
        ends.append(time.time_ns())
        if device == "cuda":
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    register_optimizer_step_post_hook(end_of_step)
    if device == "cuda":
        runpy.run_path(script, run_name="__main__")
        return peaks[-1]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        runpy.run_path(script, run_name="__main__")
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    used = itertools.accumulate(event.nbytes() for event in events)  # nbytes() is negative if memory is freed
    start, end = ends[-2:]
    return max(size for size, event in zip(used, events, strict=True) if start < event.start_ns() <= end)


if __name__ == "__main__":
    sys.argv.pop(0)
    if sys.argv[:1] == ["--checkpointing"]:
        sys.argv.pop(0)
        to = torch.nn.Module.to

        def checkpointed(model, *args):
            checkpoint_blocks(model)
            return to(model, *args)

        torch.nn.Module.to = checkpointed
    if not sys.argv or not Path(sys.argv[0]).is_file():
        sys.exit(f"peak.py: error: expected a script to run, not {' '.join(sys.argv[:1]) or 'nothing'}")
    cuda = torch.cuda.is_available() and "cpu" not in sys.argv
    peak = last_step(sys.argv[0], "cuda" if cuda else "cpu")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"peak_bytes": peak}), file=sys.__stdout__)
