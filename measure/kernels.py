"""Profile the kernels of a training step:  python -m measure.kernels speedup_05_compile.py --steps 12

This program runs the unmodified script and profiles 3 steps with torch.profiler after 5 warm-up steps. After the
script's output, it prints one line of JSON, which `make ladder ARGS=--profile` stores:

    groups_ms       milliseconds per step for each group of kernels
    attention       the kind of kernel that computed attention
    reserved_gib    the peak memory that PyTorch reserved, in GiB
    step            the kernels of the step of median length, which `make timeline` shows

On a GPU, kernels are grouped by their names and by the operations that launched them. On a CPU, compiled functions
and most operations count as kernels, and a kernel includes the operations that it calls. Views and operations that only
call other operations are not kernels.

The group "idle" is the time during which no kernel ran. On a CPU, this time is spent on Python code, operator dispatch
and freeing memory.
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
    "normalization and element-wise": "",
}
# cuDNN comes first because the names of its kernels also contain "flash".
ATTENTION = {
    "cuDNN": r"cudnn_attention|cudnn.*sdpa",
    "flash": r"flash_attention|flash_fwd",
    "memory-efficient": r"efficient_attention|fmha_cutlass",
    "math": r"attention_math",
}
# _unsafe_view is a view, and masked_fill only calls two other operations, but their schemas do not say so.
NO_KERNELS = "aten::_unsafe_view", "aten::masked_fill"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # operations with this key only call other operations


def group(name, path=""):
    """Return the group of a kernel or operation. `path` contains the names of the enclosing operations."""
    optimizer, *others = GROUPS
    if re.search(GROUPS[optimizer], f"{path} {name}", re.IGNORECASE):
        return optimizer
    return next(kind for kind in others if re.search(GROUPS[kind], name, re.IGNORECASE))


@functools.cache
def computes(name):
    """Return whether a CPU event with this name is a kernel, as defined at the top of this file."""
    namespace, _, operation = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), operation, None) if operation.isidentifier() else None
    if name in NO_KERNELS or not isinstance(packet, torch._ops.OpOverloadPacket):
        return bool(re.match(r"graph_\d+_cpp_", name))
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    overloads = [one for one in overloads if torch._C._dispatch_has_kernel(one.name())]
    return not any(one.is_view or one.has_kernel_for_dispatch_key(COMPOSITE) for one in overloads)


def nested(events):
    """Return a list of (event, [the enclosing events in its thread, outermost first])."""
    done, stacks = [], {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        done.append((event, [*stack]))
        stack.append(event)
    return done


def short(name):
    """Return the name of a GPU kernel without parameters, PyTorch's namespace and most template arguments."""
    if name.startswith(("triton_", "Mem")):
        return name.partition(" (")[0]
    if cutlass := re.search(r"cutlass_\w+", name):
        return cutlass[0]
    name, again = name.replace("(anonymous namespace)::", ""), 1
    while again:
        name, again = re.subn("<[^<>]*>", "", name)  # the innermost template arguments
    return name.partition("(")[0].split()[-1].removeprefix("at::native::")[:120]


def kernels_of(events, gpu=False):
    """Return the kernels in a trace as a list of (start, duration, group, name), sorted by start, in microseconds.

    The name of a GPU kernel starts with the operation that launched it. If the same call has already launched a
    kernel, "+" precedes the name. Raises ValueError if a GPU's trace contains no kernels.
    """
    operations = nested(event for event in events if event["cat"] in ("cpu_op", "user_annotation"))
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    found, launched_in, launched = [], {}, set()
    if gpu and not on_gpu:
        raise ValueError("the profiler recorded no kernels: this machine may not permit GPU profiling")
    for event, around in operations:
        path = " ".join(one["name"] for one in around)
        first = next((one for one in (*around, event) if computes(one["name"])), None)
        if first is event and not on_gpu:
            name = event["name"].removeprefix("aten::")
            found.append((event["ts"], event["dur"], group(event["name"], path), name))
        if "External id" in event.get("args", {}):
            launched_in[event["args"]["External id"]] = first, f"{path} {event['name']}"
    for kernel in sorted(on_gpu, key=lambda kernel: kernel["ts"]):
        operation, path = launched_in.get(kernel["args"].get("External id"), (None, ""))
        kind, name = group(kernel["name"], path), short(kernel["name"])
        if operation:
            said = group(operation["name"])
            # Many kernels have generic names, and the names of cuBLAS kernels do not show whether a matmul belongs to
            # attention. In these two cases, use the group of the operation that launched the kernel.
            if kind == "normalization and element-wise" or (kind, said) == ("matmul", "attention"):
                kind = said
            again = "+ " * (id(operation) in launched)
            launched.add(id(operation))
            name = f"{again}{operation['name'].removeprefix('aten::')} {name}"
        found.append((kernel["ts"], kernel["dur"], kind, name))
    return found


def attention(names):
    """Return the kind of kernel that computed attention, given the names of all operations and kernels."""
    ran = (kind for kind, pattern in ATTENTION.items() if any(re.search(pattern, name) for name in names))
    return next(ran, "written out")


def length(spans):
    """Return the total length of (start, end) spans. Overlaps are counted only once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def in_steps(trace, gpu=False):
    """Return a list of (start, duration, kernels) for the steps of a Chrome trace that torch.profiler wrote.

    A kernel belongs to the step in which it starts. See kernels_of() for the format of the kernels and for exceptions.
    """
    events = [event for event in trace if event.get("ph") == "X"]
    # A GPU trace also contains GPU ranges for the steps. The GPU ranges do not cover all kernels, so use CPU ranges.
    steps = [e for e in events if e["name"].startswith("ProfilerStep") and e["cat"] == "user_annotation"]
    kernels = kernels_of([e for e in events if not e["name"].startswith("ProfilerStep")], gpu)
    steps = sorted((step["ts"], step["dur"]) for step in steps)
    return [(at, long, [kernel for kernel in kernels if at <= kernel[0] < at + long]) for at, long in steps]


def grouped(steps):
    """Return a dict of milliseconds per step by group, given the result of in_steps().

    Overlapping kernels are each counted in full.
    """
    kinds = "matmul", "attention", "softmax and loss", "normalization and element-wise", "optimizer", "copies", "idle"
    total = dict.fromkeys(kinds, 0.0)
    for _, whole, kernels in steps:
        for _, duration, kind, _ in kernels:
            total[kind] += duration
        total["idle"] += max(0.0, whole - length((start, start + duration) for start, duration, *_ in kernels))
    return {kind: round(time / 1000 / len(steps), 4) for kind, time in total.items()}


def median_step(steps):
    """Return the step of median length as a dict that can be written as JSON.

    "ms" is the length of the step. Each kernel is [start, duration, position of its name in "names"]. Times are in
    microseconds, and starts are relative to the start of the step. Each name is [group, short name].
    """
    start, whole, kernels = sorted(steps, key=lambda step: step[1])[len(steps) // 2]
    names = list(dict.fromkeys(tuple(kernel[2:]) for kernel in kernels))
    rows = [[round(at - start, 1), round(long, 1), names.index((kind, name))] for at, long, kind, name in kernels]
    return {"ms": round(whole / 1000, 3), "names": names, "kernels": rows}


def profile(run):
    """Call run(), which runs a script with the arguments in sys.argv, and return the dict that this program prints."""
    gpu = torch.accelerator.is_available() and not any(word.endswith("cpu") for word in sys.argv)
    if not gpu:
        # Without this option, compiled C++ code is one unnamed block in the trace. With the option, Inductor's
        # cache keys differ, so the model is recompiled for the first profile on a CPU. On a GPU, the option stays off,
        # so the profile can reuse the kernels of earlier runs.
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
        trace = json.loads(path.read_text())["traceEvents"]
        steps, (device,) = in_steps(trace, gpu), devices
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        return {
            "groups_ms": grouped(steps),
            "attention": attention([event["name"] for event in trace if event.get("ph") == "X"]),
            "reserved_gib": reserved and round(reserved / 2**30, 2),
            "step": median_step(steps),
        }


def run_script(path):
    """Run a script in this process. As with `python path`, the script can import the other files in its folder."""
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
