"""The state of the machine during a measurement: the GPU's clock, power and temperature, and other work on it."""

import hashlib

import psutil
import pynvml


def short_hash(text):
    """A short id that tells hosts or GPUs apart without naming them."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def gpu_id(properties):
    """Of what torch.cuda.get_device_properties returns."""
    return short_hash(f"GPU-{properties.uuid}")


def find_gpu(wanted):
    """NVML's handle of the GPU with this gpu_id, or None: a CPU, another vendor, or no access."""
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return next((gpu for gpu in gpus if short_hash(pynvml.nvmlDeviceGetUUID(gpu)) == wanted), None)
    except pynvml.NVMLError:
        return None


def reading(gpu):
    """SM clock in MHz, power and its limit in W, temperature in °C; None for what cannot be read, and without a GPU."""
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
    """What else the machine is doing, in words, or None. Call it while no script of the ladder runs."""
    cores = psutil.cpu_percent(interval=0.1) / 100 * psutil.cpu_count()
    said = [f"other work takes {cores:.1f} CPU cores"] if cores > min(1, psutil.cpu_count() / 4) else []
    if gpu is not None:
        try:
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
        except pynvml.NVMLError:
            others, memory = 0, 0.0
        said += [f"other processes use the GPU: {others}"] if others else []
        # a container may not see the processes of others; 2 GiB is more than the driver takes for itself
        said += [f"{memory:.0f} GiB of the GPU's memory are taken"] if memory > 2 else []
    return "; ".join(said) or None
