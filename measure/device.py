"""Describe the hardware and the software as JSON:  python -m measure.device --device cuda

This is a separate program because a process that queries a GPU through PyTorch occupies some GPU memory until it exits.

The functions in this file also choose a device, read its clock speed and load, and measure how long statements take.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import time

import cpuinfo
import psutil
import pynvml
import torch
from torch.utils import collect_env
from torch.utils.benchmark import Timer

# ---- description


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


def precisions(device):
    """Return the names of the precisions that the scripts use on this device.

    On a CPU without bf16 instructions, the list contains only float32, because 16-bit matmuls would be emulated and
    could take minutes.
    """
    if device.type == "cpu":
        return ["float32", "bf16", "fp16"] if torch.cpu.get_capabilities().get("avx512_bf16") else ["float32"]
    if device.type != "cuda":
        return ["float32", "fp16"]
    capability = torch.cuda.get_device_capability(device)
    least = {"float32": (0, 0), "fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return [precision for precision, needs in least.items() if capability >= needs]


def describe(device):
    """Return a dict that describes the hardware and software. Memory is in GiB. Values that do not apply are None."""
    module = torch.get_device_module(device)
    cpu = cpuinfo.get_cpu_info().get("brand_raw") or platform.machine()
    cuda = device.type == "cuda"
    capability = ".".join(map(str, module.get_device_capability(device))) if cuda else None
    uuid = str(module.get_device_properties(device).uuid) if cuda else None
    if device.type == "cpu":  # the widest vector instructions, and whether they include bf16
        bf16 = torch.cpu.get_capabilities().get("avx512_bf16")
        capability = "AVX512_BF16" if bf16 else torch.backends.cpu.get_cpu_capability()
    return {
        "device": str(device),
        "name": module.get_device_name(device) if hasattr(module, "get_device_name") else cpu,
        "capability": capability,
        "device_memory_gib": round(module.mem_get_info(device)[1] / 2**30, 1) if cuda else None,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        "uuid": uuid,
        "id": hashlib.sha256((uuid or platform.node()).encode()).hexdigest()[:8],  # hashed for privacy
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


# ---- current state


def find_gpu(uuid):
    """Return the NVML handle of the GPU with this UUID, or None if NVML is unavailable or does not find the GPU."""
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return next((gpu for gpu in gpus if pynvml.nvmlDeviceGetUUID(gpu) == f"GPU-{uuid}"), None)
    except pynvml.NVMLError:
        return None


def reading(gpu):
    """Return a dict with the SM clock in MHz, the power and power limit in W, and the temperature in °C of a GPU.

    `gpu` is an NVML handle. A value that cannot be read is None. If `gpu` is None, the dict is empty.
    """
    if gpu is None:
        return {}

    def ask(what, *kind, unit=1):
        try:
            return round(what(gpu, *kind) / unit)
        except pynvml.NVMLError:
            return None

    return {
        "clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "power_w": ask(pynvml.nvmlDeviceGetPowerUsage, unit=1000),
        "power_limit_w": ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, unit=1000),
        "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    }


def load(gpu):
    """Return a description of the load from other programs, or None if it is low.

    A ladder script would count as another program, so call this function only while no ladder script runs.
    """
    cores = psutil.cpu_percent(interval=0.1) / 100 * psutil.cpu_count()
    said = [f"other programs use {cores:.1f} CPU cores"] if cores > min(1, psutil.cpu_count() / 4) else []
    if gpu is not None:
        try:
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
        except pynvml.NVMLError:
            others, memory = 0, 0.0
        said += [f"other processes use the GPU: {others}"] if others else []
        # In a container, other processes can be hidden, but their memory use is not. The driver alone uses less than
        # 2 GiB, so a higher value indicates that another process uses the GPU.
        said += [f"{memory:.0f} GiB of GPU memory is in use"] if memory > 2 else []
    return "; ".join(said) or None


# ---- time and memory


def seconds(stmt, device, min_run_time=0.1, **names):
    """Return the median run time of a Python statement in seconds. `names` contains the variables in the statement."""

    def clock():  # synchronizes `device`; Timer's default clock synchronizes the current GPU, which may be another GPU
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    timer = Timer(stmt, globals=names, timer=clock, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=min_run_time).median


def memory_in_use(function):
    """Run function() and return the CPU memory in use after each change, as a list of (time in ns, bytes)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    used = itertools.accumulate(event.nbytes() for event in events)  # nbytes() is negative if memory is freed
    return list(zip((event.start_ns() for event in events), used, strict=True))


def out_of_memory(error):
    """Return whether an error from torch, cuBLAS or the CPU's allocator reports that memory ran out."""
    words = "out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory"
    return any(said in str(error) for said in words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    add_device(parser)
    print(json.dumps(describe(parser.parse_args().device), indent=1))
