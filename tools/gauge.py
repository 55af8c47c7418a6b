"""The state of the machine during a measurement: the GPU's clock, power and temperature, and other work on it."""

import hashlib

import psutil
import pynvml


def short_hash(text):
    """Tells two hosts or GPUs apart without naming them."""
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
    asked = {
        "clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "power_w": lambda: round(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "power_limit_w": lambda: round(pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except pynvml.NVMLError:
            found[name] = None
    return found


def busy(gpu):
    """What else the machine is doing, in words, or None. Call it while no script of the ladder runs."""
    cpu, others = psutil.cpu_percent(interval=0.1), []
    if gpu is not None:
        try:
            others = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        except pynvml.NVMLError:
            pass
    said = [f"other work takes {cpu:.0f} % of the CPU"] if cpu > 25 else []
    said += [f"other processes use the GPU: {len(others)}"] if others else []
    return "; ".join(said) or None
