"""Print a description of this machine as JSON:  python measure/machine.py --device cuda

measure.py runs this as a separate program because a process that queries a GPU through PyTorch occupies some of the
GPU's memory until the process exits.
"""

import argparse
import json
import os
import platform

import cpuinfo
import psutil
import torch
from device import add_device
from gauge import gpu_id
from torch.utils import collect_env


def describe(device):
    """Return a dict that describes the hardware and software. Memory is in GiB. Values that do not apply are None."""
    module = torch.get_device_module(device)
    cpu = cpuinfo.get_cpu_info().get("brand_raw") or platform.machine()
    cuda = device.type == "cuda"
    capability = ".".join(map(str, module.get_device_capability(device))) if cuda else None
    if device.type == "cpu":  # the widest vector instructions, and whether they include bf16
        bf16 = torch.cpu.get_capabilities().get("avx512_bf16")
        capability = "AVX512_BF16" if bf16 else torch.backends.cpu.get_cpu_capability()
    return {
        "device": str(device),
        "name": module.get_device_name(device) if hasattr(module, "get_device_name") else cpu,
        "device_memory_gib": round(module.mem_get_info(device)[1] / 2**30, 1) if cuda else None,
        "capability": capability,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        "gpu_id": gpu_id(module.get_device_properties(device)) if cuda else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    add_device(parser)
    print(json.dumps(describe(parser.parse_args().device), indent=1))
