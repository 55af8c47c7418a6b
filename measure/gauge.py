"""Read the state of the machine: the GPU's clock, power and temperature, and the load from other programs."""

import hashlib

import psutil
import pynvml


def short_hash(text):
    """Return a short id that distinguishes hosts or GPUs without revealing their names."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def gpu_id(properties):
    """Return the short_hash of a GPU's UUID, given the result of torch.cuda.get_device_properties."""
    return short_hash(f"GPU-{properties.uuid}")


def find_gpu(wanted):
    """Return the NVML handle of the GPU whose gpu_id is `wanted`, or None if NVML is unavailable or lacks this GPU."""
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return next((gpu for gpu in gpus if short_hash(pynvml.nvmlDeviceGetUUID(gpu)) == wanted), None)
    except pynvml.NVMLError:
        return None


def reading(gpu):
    """Return the SM clock in MHz, power and power limit in W, and temperature in °C as a dict.

    A value that cannot be read is None. If `gpu` is None, the result is None.
    """
    if gpu is None:
        return None

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


def busy(gpu):
    """Return a description of the load from other programs, or None if it is low.

    The load from a ladder script would count as well, so call this function only while no ladder script runs.
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
        # A container may hide other processes but not their memory use. The driver alone uses less than 2 GiB, so a
        # higher value indicates that another process uses the GPU.
        said += [f"{memory:.0f} GiB of GPU memory is in use"] if memory > 2 else []
    return "; ".join(said) or None
