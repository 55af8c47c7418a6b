"""The device that is measured, for the programs that run on it: the option --device, and the time of a statement."""

import argparse
import time

import torch
from torch.utils.benchmark import Timer


def usable(name):
    """The torch.device of that name. Raises ArgumentTypeError for one that this machine does not have."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # torch's way to say that there is no such device
        raise argparse.ArgumentTypeError(f"{name}: {str(error).splitlines()[0]}") from None
    return device


def add_device(parser):
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser.add_argument("--device", type=usable, default=accelerator, help=f"default {accelerator}")


def out_of_memory(error):
    """Whether this is how torch, cuBLAS or the CPU's allocator says so."""
    words = "out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory"
    return any(said in str(error) for said in words)


def seconds(stmt, device, min_run_time=0.1, **names):
    """The median time of a statement."""

    def clock():  # Timer's own waits for the current GPU, which may be another
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    timer = Timer(stmt, globals=names, timer=clock, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median
