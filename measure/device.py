"""Helpers for the programs that measure a GPU or CPU: the --device option, supported precisions, and timing."""

import argparse
import itertools
import os
import time

import torch
from torch.utils.benchmark import Timer


def usable(name):
    """Return the torch.device with this name. Raises ArgumentTypeError if this machine does not have the device."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # torch raises these for a missing device
        raise argparse.ArgumentTypeError(f"{name}: {str(error).splitlines()[0]}") from None
    return device


def add_device(parser):
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", type=usable, default=accelerator, help=f"default {accelerator}")


def out_of_memory(error):
    """Return whether an error from torch, cuBLAS or the CPU's allocator reports that memory ran out."""
    words = "out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory"
    return any(said in str(error) for said in words)


def precisions(device):
    """Return the names of the precisions that the scripts use on this device.

    On a CPU without bf16 instructions, the list contains only float32, because 16-bit matmuls are emulated there and
    can take minutes.
    """
    if device.type == "cpu":
        return ["float32", "bf16", "fp16"] if torch.cpu.get_capabilities().get("avx512_bf16") else ["float32"]
    if device.type != "cuda":
        return ["float32", "fp16"]
    capability = torch.cuda.get_device_capability(device)
    least = {"float32": (0, 0), "fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return [precision for precision, needs in least.items() if capability >= needs]


def memory_in_use(function):
    """Run function() and return [(time in ns, bytes)]: the CPU memory in use after each change."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    used = itertools.accumulate(event.nbytes() for event in events)  # nbytes() is negative if memory is freed
    return list(zip((event.start_ns() for event in events), used, strict=True))


def seconds(stmt, device, min_run_time=0.1, **names):
    """Return the median run time of a Python statement in seconds. `names` contains the variables that it uses.

    The statement is repeated for at least min_run_time seconds.
    """

    def clock():  # synchronizes `device`; Timer's default clock synchronizes the current GPU, which may differ
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    timer = Timer(stmt, globals=names, timer=clock, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median
