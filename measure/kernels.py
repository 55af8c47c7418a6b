"""Break the step time down by kind of kernel:  python -m measure.kernels speedup_05_compile.py --steps 10

This program runs the unmodified script under torch.profiler and profiles 3 steps after 5 warm-up steps. After the
script's output, it prints one line of JSON: milliseconds per step for each group, the attention kernel that ran, and
the peak memory that PyTorch reserved, in GiB. On a GPU, the program groups kernels by their names and by the operations
that launched them. The group "idle" is the time during which no kernel ran. On a CPU, it groups operations and sums
their self times, which exclude nested operations. The group "idle" is then the time spent in Python and dispatch.
"""

import functools
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 3
# A kernel belongs to the first group whose pattern matches. The name of a compiled kernel lists the operations
# that are fused into it.
GROUPS = {
    "optimizer": r"optimizer\.|adam|multi_tensor|_foreach_|vector_norm|lpnorm",
    # bmm: the batched matmuls of unfused attention
    "attention": r"flash|fmha|attention|sdpa|bmm",
    # nvjet: cuBLAS on Hopper and later; tem_fused: a matmul that Inductor generated and fused with later operations
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|tem_fused|^aten::_?(add|scaled_)?mm(_activation)?$",
    "softmax and loss": r"softmax|logsumexp|nll_loss|cross_entropy",
    "copies": r"memcpy|memset|direct_copy|aten::(copy_|_to_copy|clone|fill_|zero_|cat|stack)$|"
    r"fused__to_copy(_t|_view)*_\d+$",
    "normalisation and element-wise": "",
}
# cuDNN comes first because the names of its kernels also contain "flash".
ATTENTION = {
    "cuDNN": r"cudnn_attention|cudnn.*sdpa",
    "flash": r"flash_attention|flash_fwd",
    "memory-efficient": r"efficient_attention|fmha_cutlass",
    "math": r"attention_math",
}
NO_WORK = re.compile(r"CompiledFxGraph|^CompiledFunction|Torch-Compiled|Dynamo|^autograd::engine")


def group(name, path=""):
    """Return the group of a kernel or operation. `path` contains the names of the enclosing operations."""
    optimizer, *others = GROUPS
    if re.search(GROUPS[optimizer], f"{path} {name}", re.IGNORECASE):
        return optimizer
    return next(kind for kind in others if re.search(GROUPS[kind], name, re.IGNORECASE))


def nested(events):
    """Return a list of (event, names of the enclosing events in its thread, the event's self time in microseconds).

    Self time excludes nested events.
    """
    done, stacks = [], {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            stack[-1][2] -= event["dur"]
        stack.append([event, [around["name"] for around, *_ in stack], event["dur"]])
        done.append(stack[-1])
    return done


def attention(names):
    """Return the kind of kernel that computed attention, given the names of all operations and kernels."""
    ran = (kind for kind, pattern in ATTENTION.items() if any(re.search(pattern, name) for name in names))
    return next(ran, "written out")


def length(spans):
    """Return the total length of (start, end) spans. Overlapping time counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def in_steps(trace):
    """Return (the steps, the events within them) from a Chrome trace that torch.profiler wrote."""
    events = [event for event in trace if event.get("ph") == "X"]
    # A GPU trace also contains GPU ranges for the steps. They do not cover all kernels, so only CPU ranges are used.
    steps = [e for e in events if e["name"].startswith("ProfilerStep") and e["cat"] == "user_annotation"]
    start, end = min(step["ts"] for step in steps), max(step["ts"] + step["dur"] for step in steps)
    return steps, [e for e in events if start <= e["ts"] < end and not e["name"].startswith("ProfilerStep")]


def grouped(steps, events, gpu=False):
    """Return a dict of milliseconds per step by group. Raises ValueError if a GPU's trace contains no kernels."""
    whole = max(step["ts"] + step["dur"] for step in steps) - min(step["ts"] for step in steps)
    operations = nested(event for event in events if event.get("cat") in ("cpu_op", "user_annotation"))
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if gpu and not kernels:
        raise ValueError("the profiler recorded no kernels: this machine may not permit GPU profiling")
    total = dict.fromkeys(["matmul", "attention", "softmax and loss", "normalisation and element-wise"], 0.0)
    total |= {"optimizer": 0.0, "copies": 0.0}
    if kernels:
        launched_in = {event["args"]["External id"]: (event["name"], " ".join(path)) for event, path, _ in operations
                       if "External id" in event.get("args", {})}  # fmt: skip
        for kernel in kernels:
            operation, path = launched_in.get(kernel["args"].get("External id"), ("", ""))
            kind = group(kernel["name"], f"{path} {operation}")
            said = group(operation) if operation.startswith("aten::") else kind
            # Many kernels have generic names, and the names of cuBLAS kernels do not show whether a matmul belongs to
            # attention. In these two cases, use the group of the operation that launched the kernel.
            if kind == "normalisation and element-wise" or (kind, said) == ("matmul", "attention"):
                kind = said
            total[kind] += kernel["dur"]
        busy = length((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels)
    else:
        for event, path, own in operations:
            if not NO_WORK.search(event["name"]):
                total[group(event["name"], " ".join(path))] += own
        busy = sum(total.values())
    total["idle"] = max(0.0, whole - busy)
    return {kind: round(time / 1000 / len(steps), 4) for kind, time in total.items()}


def profile(run):
    """Call run(), which runs a script with the arguments in sys.argv, and return the dict that this program prints."""
    gpu = torch.accelerator.is_available() and not any(word.endswith("cpu") for word in sys.argv)
    if not gpu:
        # Without this option, compiled C++ code is one unnamed block in the trace. The option changes the key of
        # Inductor's cache, so the first profile on a CPU recompiles the model. On a GPU, the option stays off, so the
        # profile can reuse the kernels of earlier runs.
        torch._inductor.config.cpp.enable_kernel_profile = True
    with tempfile.TemporaryDirectory() as folder:
        path, devices = Path(folder, "trace.json"), set()
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=4, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        )

        def end_of_step(optimizer, *_):
            device = optimizer.param_groups[0]["params"][0].device
            devices.add(device)
            if gpu:
                torch.accelerator.synchronize(device)  # wait for queued kernels, which belong to this step
            profiler.step()

        with profiler, register_optimizer_step_post_hook(end_of_step):
            run()
        if profiler.step_num < 4 + 1 + STEPS:
            sys.exit("kernels.py: error: the profile needs at least 8 steps")
        steps, events = in_steps(json.loads(path.read_text())["traceEvents"])
        (device,) = devices
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        return {
            "groups_ms": grouped(steps, events, gpu),
            "attention": attention([event["name"] for event in events]),
            "reserved_gib": reserved and round(reserved / 2**30, 2),
        }


def run_script(path):
    """Run a script in this process as `python path` would: it can import the other files in its folder."""
    with mock.patch.object(sys, "path", [str(Path(path).resolve().parent), *sys.path]):
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    sys.argv.pop(0)
    if sys.argv[:1] == ["-m"]:  # as in python -m measure.peers
        sys.argv.pop(0)
        run = functools.partial(runpy.run_module, sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv and Path(sys.argv[0]).is_file():
        run = functools.partial(run_script, sys.argv[0])
    else:
        sys.exit(f"kernels.py: error: expected a script to run, not {' '.join(sys.argv[:1]) or 'nothing'}")
    try:
        found = profile(run)
    except ValueError as error:
        sys.exit(f"kernels.py: error: {error}")
    print(json.dumps(found))
