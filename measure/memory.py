"""Predict the peak memory of each script:  python -m measure.memory --model gpt2-xl --batch-size 8

This program runs two steps of each unmodified script on fake tensors, which have shapes and lifetimes but no values. It
adds up the sizes of the tensors that are alive, and prints the peak of this sum in the second step, divided into
weights, gradients and so on. You need no GPU and little memory. The prediction for a compiled script takes about half a
minute with GPT-2, and about two minutes with GPT-2 XL. The program covers all rungs and side rungs except Muon.

What is predicted:
* Eager scripts follow PyTorch's rules for CUDA or, with --device cpu, those for the CPU.
* For compiled scripts, torch.compile generates CPU code, whose kernels are replaced by functions that do nothing. The
  compiler can fuse operations slightly differently for a GPU.
* --ranks N predicts the peak of rank 0 when ddp_run.py or fsdp_run.py runs on N ranks, with two micro-steps per step.
  PyTorch's fake process group replaces the other ranks. DDP cannot run on fake tensors, so the program only allocates
  DDP's gradient buckets, which together are as large as the gradients.
* Not included: the CUDA context, cuBLAS workspaces, and fragmentation.

With --measure, the program also measures each peak in a separate process: python -m measure.memory peak SCRIPT. On
CUDA, PyTorch's allocator reports the peak. On a CPU, the process adds up the allocations that torch.profiler records.
The profiler makes the steps slower.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from baseline import MODELS
from dev.ladder import ROOT, read_ladder, title
from measure.counts import fake_compile, run_fake
from measure.device import memory_in_use
from measure.kernels import run_script
from measure.records import TEN, now, options, parse, save, text
from measure.run import ask, execute

CHECKPOINTED = "branches/activation_checkpointing.py"
VOCABULARY = (50257, 50304)
PARTS = ("weights", "gradients", "moments", "logits", "activations")
GIB = 2**30
compiled_graphs = {}  # graph and sizes of its inputs -> the compiled graph, which rungs 07 to 10 share


class Live(TorchDispatchMode):
    """Tracks the total size of the storages that are alive, and lists the storages that were alive at its peak."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.alive = {}  # address of a storage -> (serial number, bytes, whether it contains logits)
        self.serial, self.now, self.buckets = itertools.count(), 0, []
        self.begin()

    def begin(self):
        self.peak, self.at_peak = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0  # 1.0 for loss.item(); 0 for a count of stop signals
        if func is run_and_save_rng_state:  # the compiler saves the random state before an attention that it recomputes
            out = torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **kwargs)
        elif func is run_with_rng_state:
            out = args[1](*args[2:], **kwargs)
        else:
            out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out

    def add(self, tensor):
        if is_traceable_wrapper_subclass(tensor):  # a DTensor: only its local shard takes memory
            for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(inner, torch.Tensor):  # skip its DeviceMesh
                    self.add(inner)
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.alive:
            logits = tensor.dim() > 1 and tensor.size(-1) in VOCABULARY and tensor.stride(-1) == 1
            self.alive[address] = next(self.serial), 0, logits
            weakref.finalize(storage, self.remove, address)
            self.resize(address, storage.nbytes())

    def resize(self, address, size):
        serial, before, logits = self.alive[address]
        self.alive[address] = serial, size, logits
        self.now += size - before
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.alive)

    def remove(self, address):
        self.now -= self.alive.pop(address)[1]

    def composition(self, optimizer):
        """Return {part: bytes} at the peak of the step that `optimizer` has just finished."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        known = {
            "weights": weights,
            "gradients": [*(p.grad for p in weights), *self.buckets],
            "moments": tree_leaves([list(state.values()) for state in optimizer.state.values()]),
        }
        part_of = {}
        for part, tensors in known.items():
            for tensor in tensors:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2's weights are DTensors
                part_of[self.alive[local.untyped_storage()._cdata][0]] = part
        parts = Counter(dict.fromkeys(PARTS, 0))
        for serial, size, logits in self.at_peak.values():
            parts[part_of.get(serial, "logits" if logits else "activations")] += size
        return dict(parts)


# Inductor's code calls two C++ functions that create real tensors. These replacements create fake tensors.


def empty_strided(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


def reinterpret(tensor, size, stride, offset=0):
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def compiler(live, fullgraph):
    """Return a replacement for torch.nn.Module.compile that runs Inductor's code with kernels that do nothing."""
    from torch._inductor.compile_fx import compile_fx_inner

    def inner(gm, inputs, **options):
        sizes = [(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in inputs]
        key = str([gm.graph, sizes, torch._inductor.config.get_hash()])
        if key not in compiled_graphs:
            compiled_graphs[key] = compile_fx_inner(gm, inputs, **options)

        def run(args):
            with live:
                return compiled_graphs[key](args)

        run._boxed_call = True
        return run

    return fake_compile(inner, fullgraph)


class Buckets(torch.nn.Module):
    """Replaces DistributedDataParallel and allocates its buckets, which together are as large as the gradients."""

    def __init__(self, module, buckets):
        super().__init__()
        buckets += [torch.zeros_like(p) for p in module.parameters()]
        self.module, self.no_sync = module, contextlib.nullcontext

    def forward(self, *inputs):
        return self.module(*inputs)


def as_rank_0(ranks, live):
    """Return (environment, patches). With these, a script runs as rank 0 of `ranks` without the other processes."""
    begin, mesh = dist.init_process_group, dist.init_device_mesh

    def fake_group(*_):
        begin("fake", rank=0, world_size=ranks, store=FakeStore())

    def real_mesh(*args, **kwargs):
        with _disable_current_modes():  # a mesh reads its ranks from a tensor
            return mesh(*args, **kwargs)

    def everywhere_the_same(found, mine):
        found[:] = [mine] * len(found)

    environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    return {name: str(value) for name, value in environment.items()}, {
        "torch.distributed.init_process_group": fake_group,
        "torch.distributed.init_device_mesh": real_mesh,
        "torch.distributed.all_gather_object": everywhere_the_same,
        "torch.nn.parallel.DistributedDataParallel": lambda module: Buckets(module, live.buckets),
    }


def flags_of(rung, model, batch_size, seq_len, ranks):
    flags = {"model": model, "batch_size": batch_size, "seq_len": seq_len, "steps": 2}
    if rung.kind == "scale":  # two micro-steps, so that the gradients exist during a forward pass
        flags["total_batch_size"] = 2 * batch_size * seq_len * ranks
    return flags


def checkpoint_blocks(model):
    """Let each block of a GPT store only its input and recompute its activations in the backward pass."""
    block = type(model.transformer.h[0])
    forward = block.forward
    block.forward = lambda self, x: checkpoint(forward, self, x, use_reentrant=False)


def predict(rung, batch_size, model, seq_len, ranks=1, checkpointing=False, cuda=True):
    """Return {part: bytes} at the peak of a script's second step. Raises SystemExit if the script rejects an option."""
    live, steps = Live(), []

    def end_of_step(optimizer, *_):
        steps.append(live.composition(optimizer))
        live.begin()

    def to(model, device):
        if checkpointing:
            checkpoint_blocks(model)
        return model

    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage, size):
        resize(storage, size)
        if storage._cdata in live.alive:
            live.resize(storage._cdata, size)

    flags = flags_of(rung, model, batch_size, seq_len, ranks)
    tokens = np.zeros(flags.get("total_batch_size", batch_size * seq_len) + 1, dtype=np.uint32)
    environment, patches = as_rank_0(ranks, live) if ranks > 1 else ({}, {})
    patches |= {
        "torch.nn.Module.compile": compiler(live, fullgraph=rung.kind != "scale"),
        "torch.nn.Module.to": to,
        "torch._inductor.async_compile.AsyncCompile.cpp_pybinding": lambda *_: lambda *args: None,
        "torch._C._dynamo.guards._empty_strided_cpu": empty_strided,
        "torch._C._dynamo.guards._reinterpret_tensor": reinterpret,
        "torch.UntypedStorage.resize_": resize_and_count,  # how FSDP2 frees and allocates unsharded weights
        "tiktoken.Encoding.encode_to_numpy": lambda *_, **__: tokens,  # input.txt can be too short for the batch
    }
    with register_optimizer_step_post_hook(end_of_step), tempfile.TemporaryDirectory() as cache:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache}  # keep the empty kernels out of the user's cache
        run_fake(rung.file, flags, live, patches, cuda, environment)
    return steps[-1]


def print_peak(script, *options):
    """Run a script with these options for at least 2 steps, and print the peak of its last step in bytes as JSON.

    With "--checkpointing" as the last option, each block is checkpointed as in branches/activation_checkpointing.py.
    """
    cuda, ends, peaks, to = "cuda" in options, [], [], torch.nn.Module.to

    def end_of_step(optimizer, *_):
        ends.append(time.time_ns())
        if cuda:
            device = optimizer.param_groups[0]["params"][0].device
            peaks.append(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    def checkpointed(model, *args):
        checkpoint_blocks(model)
        return to(model, *args)

    def run():
        run_script(script)

    if options[-1] == "--checkpointing":
        torch.nn.Module.to, options = checkpointed, options[:-1]
    sys.argv = [script, *options]
    register_optimizer_step_post_hook(end_of_step)
    in_use = run() if cuda else memory_in_use(run)
    if os.environ.get("RANK", "0") == "0":
        peak = peaks[-1] if cuda else max(size for ns, size in in_use if ends[-2] < ns <= ends[-1])
        print(json.dumps({"peak_bytes": peak}))


def measure(rung, batch_size, model, seq_len, device, ranks=1, checkpointing=False):
    """Return the peak memory of a script's second step on this machine in bytes.

    Raises RuntimeError if the script fails.
    """
    flags = flags_of(rung, model, batch_size, seq_len, ranks) | {"device": device}
    words = ["-m", "measure.memory", "peak", rung.file, *options(flags), *["--checkpointing"] * checkpointing]
    if ranks > 1:
        words = f"-m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node={ranks}".split() + words
    with tempfile.TemporaryDirectory() as cache:
        printed, errors, status = execute(words, cache)
    if error := parse(printed, errors, status, 2)["error"]:
        raise RuntimeError(f"{rung.file}: {error}")
    return json.loads(printed.splitlines()[-1])["peak_bytes"]


def peak(row):
    return sum(row["parts"].values())


def largest(at, gib):
    """Return a batch size whose predicted peak is just under `gib` GiB, or 0 if B 1 does not fit.

    at(B) returns the parts of the peak at B. Each guess is a step of the secant method.
    """

    def left(B):
        return gib * GIB - sum(at(B).values())

    good, other = 1, 4
    if left(1) < 0:
        return 0
    while left(good) == left(other):  # equal if the peak is in the optimizer step, as it can be at a small B
        good, other = other, 2 * other
    while more := int(left(good) * (other - good) / (left(good) - left(other))):
        good, other = (good + more, good) if left(good + more) >= 0 else (good, good + more)
    return good


def fits(name):
    """Return the rows of a file in results/ that this program wrote, each with its peak in bytes."""
    rows = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))["rows"]
    return [row | {"peak": peak(row)} for row in rows]


def table(rows):
    """Return the table of rows, in GiB."""
    lines = []
    for row in rows:
        line = {"script": row["name"]} | {part: f"{row['parts'][part] / GIB:.2f}" for part in PARTS}
        line["peak, GiB"] = f"{peak(row) / GIB:.2f}"
        if row["measured"]:
            line |= {"measured": f"{row['measured'] / GIB:.2f}", "error": f"{peak(row) / row['measured'] - 1:+.1%}"}
        lines.append(line | ({} if row["largest"] is None else {"largest B": str(row["largest"])}))
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["gpt2"], help="models, default gpt2")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4], metavar="B", help="batch sizes, default 4")
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length T, default 1024")
    parser.add_argument(
        "--ranks", type=int, default=1, help="number of processes of ddp_run.py and fsdp_run.py, default 1"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="also predict each script with checkpointed blocks"
    )
    parser.add_argument("--only", nargs="+", metavar="NN", help="only these scripts, such as 10 fused fsdp")
    parser.add_argument("--gib", type=float, help="also print the largest batch size that fits in this many GiB")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="follow PyTorch's rules for this device, default cuda"
    )
    parser.add_argument(
        "--measure", action="store_true", help="also run the scripts on the device and measure the peak"
    )
    parser.add_argument("--out", type=Path, help="also write the results to this file as JSON")
    args = parser.parse_args()
    # Muon is left out because it frees its gradients, which composition() needs after the step.
    ladder = [rung for rung in read_ladder() if rung.part != "pretrain" and rung.number != "muon"]
    only = args.only or [rung.number for rung in ladder]
    if unknown := set(only) - {rung.number for rung in ladder}:
        parser.error(f"--only {min(unknown)}: expected one of {', '.join(rung.number for rung in ladder)}")
    if min(*args.batch_size, args.ranks) < 1 or not 1 <= args.seq_len <= 1024:
        parser.error("--batch-size and --ranks must be at least 1, and --seq-len must be 1 to 1024")
    if args.gib is not None and not args.gib > 0:
        parser.error("--gib must be more than 0")
    if args.measure and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--measure: PyTorch finds no GPU; to measure on the CPU, add --device cpu")
    if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
        parser.error(f"--out {args.out}: cannot write a file there")
    found = []
    for model, batch_size in itertools.product(args.model, args.batch_size):
        rows = []
        for rung, checkpointing in itertools.product(ladder, (False, True)):
            if rung.number not in only or (checkpointing and not args.checkpointing):
                continue
            if checkpointing and rung.file in (TEN, CHECKPOINTED):  # CHECKPOINTED is TEN with checkpointed blocks
                continue
            name = title(rung.file) + (" + checkpointing" if checkpointing else "")
            if sys.stderr.isatty():
                print(f"{model}, B {batch_size}: {name}", file=sys.stderr)
            how = {"model": model, "seq_len": args.seq_len, "checkpointing": checkpointing}
            how["ranks"] = args.ranks if rung.kind == "scale" else 1
            at = functools.cache(functools.partial(predict, rung, **how, cuda=args.device == "cuda"))
            row = {"batch_size": batch_size, "script": rung.file, "name": name} | how
            row |= {"parts": at(batch_size), "measured": None}
            row["largest"] = largest(at, args.gib) if args.gib else None
            try:
                row["measured"] = measure(rung, batch_size, device=args.device, **how) if args.measure else None
            except RuntimeError as error:
                sys.exit(f"memory.py: error: {error}")
            rows.append(row)
        said = f"{model}, B {batch_size}, T {args.seq_len}: GiB at the peak of a step, torch {torch.__version__}"
        said += f", {args.ranks} ranks" if args.ranks > 1 else ""
        said += f", to fit in {args.gib:g} GiB" if args.gib else ""
        print(f"{said}\n\n{text(table(rows))}\n", flush=True)
        found += rows
    if args.out:
        command = shlex.join(["python", "-m", "measure.memory", *sys.argv[1:]])
        about = {"command": command, "torch": torch.__version__, "date": now()[:10], "device": args.device}
        about["machine"] = ask("device", "--device", args.device)["name"] if args.measure else None
        save(args.out, about | {"rows": found})


if __name__ == "__main__":
    try:
        print_peak(*sys.argv[2:]) if sys.argv[1:2] == ["peak"] else main()
    except KeyboardInterrupt:
        sys.exit(130)
