"""The state of the machine during a measurement: the GPU's clock, power and temperature, and other programs' load."""

import hashlib

import psutil
import pynvml


def short_hash(text):
    """A short id that distinguishes hosts or GPUs without revealing their names."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def gpu_id(properties):
    """The short_hash of a GPU, given what torch.cuda.get_device_properties returns."""
    return short_hash(f"GPU-{properties.uuid}")


def find_gpu(wanted):
    """NVML's handle of the GPU with this gpu_id. None for a CPU, another vendor's GPU, or without access to NVML."""
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return next((gpu for gpu in gpus if short_hash(pynvml.nvmlDeviceGetUUID(gpu)) == wanted), None)
    except pynvml.NVMLError:
        return None


def reading(gpu):
    """A dict of the SM clock in MHz, power and power limit in W, and temperature in °C; None without a GPU.

    A value that cannot be read is None.
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
    """A description of other load on the machine, or None. Call it only while no script of the ladder runs."""
    cores = psutil.cpu_percent(interval=0.1) / 100 * psutil.cpu_count()
    said = [f"other work uses {cores:.1f} CPU cores"] if cores > min(1, psutil.cpu_count() / 4) else []
    if gpu is not None:
        try:
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
        except pynvml.NVMLError:
            others, memory = 0, 0.0
        said += [f"other processes use the GPU: {others}"] if others else []
        # A container may not see other processes, but it sees their memory. The driver alone uses less than 2 GiB.
        said += [f"{memory:.0f} GiB of GPU memory are in use"] if memory > 2 else []
    return "; ".join(said) or None
