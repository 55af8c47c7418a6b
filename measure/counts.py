"""Count the FLOPs, bytes and kernels of a training step:  python -m measure.counts --batch-size 4   (make counts)

This program runs two steps of each unmodified rung on fake tensors and counts the operations of the second step. Fake
tensors have shapes but no values, so you need no GPU. The same version of torch always gives the same counts. With
--card NAME, the program also prints the floor of each rung on that GPU: an estimated lower bound on the step time. The
floor is a sum over all kernels of the step. Each kernel contributes the longer of two times, FLOPs / peak and bytes /
bandwidth.

What is counted:
* FLOPs: only matmuls are counted, with the formulas of torch.utils.flop_counter. For flash attention, the count
  includes the scores that the backward pass recomputes. It excludes the masked triangle, which flash attention skips.
* Bytes: each kernel is assumed to read or write each operand once, and no data is assumed to stay in the cache between
  kernels. For a table lookup, only the rows that are read are counted.
* Kernels: each operation that is not a view counts as one kernel. In practice, PyTorch launches two or three CUDA
  kernels for each sum over rows and for each LayerNorm backward pass. It launches several for each AdamW or clipping
  operation over all parameters.
* Device: the steps run on the CPU but follow PyTorch's rules for CUDA. With these rules, softmax runs in float32 under
  autocast, and AdamW and clipping use one operation for all parameters. Inductor, the compiler behind torch.compile,
  schedules kernels for an A100 but does not pad matmuls.
* Floor: the peaks and bandwidths in cards.toml come from data sheets. Nothing is fitted to measured step times. The
  floor assumes that each kernel reaches the peak or the full bandwidth, and that no time passes between kernels. A step
  can still be faster than its floor, mainly because kernels read earlier results from the cache, or because the GPU
  runs at a higher clock than its data sheet states.
"""

import argparse
import contextlib
import copy
import functools
import io
import json
import os
import pkgutil
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry as FLOPS
from torch.utils.flop_counter import register_flop_formula

from baseline import MODELS
from dev.ladder import ROOT, Rung, read_ladder, read_toml
from measure.kernels import group, run_script
from measure.records import OVERRIDES, options, peaks, save, text

PEER = Rung("measure/peers.py compiled", "transformers, compiled", "", "peer", precision="bf16")
aten = torch.ops.aten
NOT_KERNELS = {aten._unsafe_view.default, aten.lift_fresh.default}  # views that their schemas do not mark as views
HOST = {aten._foreach_add_.Tensor}  # not counted: AdamW's step counters are on the CPU unless AdamW is fused
ONLY_WRITTEN = {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}  # they overwrite a tensor without reading it
SCHEDULES = {}  # key of a compiled graph -> its kernels, which rungs 07 to 10 share
INSTEAD = {"tf32": "float32", "bf16": "fp16", "fp16": "float32"}  # precision -> substitute on a GPU that lacks it


# ---- the kernels of a step


class Kernel(NamedTuple):
    """An operation, or several fused operations. `precision` is "" if the kernel is not a matmul."""

    name: str
    group: str
    precision: str
    flops: int
    bytes: int


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)
def attention_flops(q, k, v, dropout=0.0, is_causal=False, products=2, **_):
    """Return the FLOPs of the matmuls in attention. `q` is the shape of the queries, (..., T, head size).

    `products` is the number of matmuls. Causal attention computes only T (T + 1) / 2 of the T * T scores.
    """
    *heads, T, size = q
    return products * 2 * torch.Size(heads).numel() * size * (T * (T + 1) // 2 if is_causal else T * T)


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def attention_backward_flops(grad, q, k, v, out, logsumexp, dropout, is_causal, **_):
    """Return the FLOPs of five matmuls: the recomputed scores, and the gradients of the probabilities, v, q and k."""
    return attention_flops(q, k, v, is_causal=is_causal, products=5)


def product(func, args, kwargs, out, float32):
    """Return (name, FLOPs, precision) of an operation. If it is not a matmul, FLOPs is 0 and precision is ""."""
    name, formula = f"aten::{func.overloadpacket.__name__}", FLOPS.get(func.overloadpacket)
    if not formula:
        return name, 0, ""
    dtype = next(t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, float32)
    return name, formula(*args, **kwargs, out_val=out), precision


def nbytes(tensor):
    """Return a tensor's size in bytes. For an expanded tensor, this is the size of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def traffic(func, args, kwargs, out):
    """Return the number of bytes that an operation reads and writes."""
    values = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    read, written = {}, 0
    for argument in func._schema.arguments:
        tensors = [t for t in tree_leaves(values.get(argument.name)) if isinstance(t, torch.Tensor)]
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed and func is aten._fused_adamw_.default and argument.name == "grads":
            changed = False  # AdamW changes the gradients only if a gradient scaler is used
        written += sum(map(nbytes, tensors)) if changed else 0
        if not (changed and func in ONLY_WRITTEN):
            read |= {id(t): nbytes(t) for t in tensors}  # a tensor that is passed twice is counted once
    if func is aten.embedding.default:
        read[id(args[0])] = nbytes(out)
    if func is aten.nll_loss_forward.default:
        read[id(args[0])] = args[1].numel() * args[0].element_size()
    if func is aten.nll_loss_backward.default:
        del read[id(args[1])]  # the kernel needs only the shape of the log-probabilities
    returns = func._schema.returns
    outs = [out] if len(returns) == 1 else out or ()
    new = [one for one, about in zip(outs, returns, strict=True) if about.alias_info is None]
    return sum(read.values()) + written + sum(nbytes(t) for t in tree_leaves(new) if isinstance(t, torch.Tensor))


class Recorder(TorchDispatchMode):
    """Records each operation as a kernel. `float32` is the precision of float32 matmuls: "float32" or "tf32"."""

    def __init__(self, float32="float32"):
        super().__init__()
        self.float32, self.kernels, self.path = float32, [], ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            return 1.0  # for loss.item(), because a fake loss has no value
        if func is aten.masked_fill.Scalar:
            with self:
                return args[0].clone().masked_fill_(*args[1:])  # PyTorch's masked_fill runs these two operations
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "aten" and not func.is_view and func not in NOT_KERNELS | HOST:
            name, flops, precision = product(func, args, kwargs, out, self.float32)
            size = traffic(func, args, kwargs, out)
            self.kernels.append(Kernel(name, group(name, self.path), precision, flops, size))
        return out


# ---- run an unmodified script on fake tensors


@contextlib.contextmanager
def patched(values):
    """Replace attributes while this context is active. `values` maps full names, such as sys.argv, to new values."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")  # mock.patch(name) fails on Python 3.10
            stack.enter_context(mock.patch.object(pkgutil.resolve_name(owner), attribute, value))
        yield


def fake_compile(inner, fullgraph=True):
    """Return a replacement for torch.nn.Module.compile.

    `inner` compiles a graph, as Inductor's compile_fx_inner does. With `fullgraph`, a graph break is an error.
    """
    from torch._inductor.compile_fx import compile_fx

    def compile(module, **_):
        backend = functools.partial(compile_fx, inner_compile=inner)
        call = torch.compile(module._call_impl, backend=backend, fullgraph=fullgraph, dynamic=False)

        def without_mode(*args, **kwargs):
            with _pop_mode_temporarily():  # Dynamo does not compile under an unknown dispatch mode
                return call(*args, **kwargs)

        module._compiled_call_impl = without_mode

    return compile


def run_fake(script, flags, mode, patches, cuda=True, environment=None):
    """Run `script` on fake tensors, with the options in the dict `flags` and under the dispatch mode `mode`.

    `script` may include arguments, separated by spaces. `patches` maps full names, such as torch.nn.Module.compile, to
    replacements. `environment` contains additional environment variables. The script always runs on the CPU. If
    `cuda` is True, patches select the code that PyTorch would use on a GPU, such as a float32 softmax under autocast.
    Raises SystemExit for a rejected option.
    """
    softmax, from_numpy, fake = torch.nn.functional.softmax, torch.from_numpy, FakeTensorMode()
    capabilities = {**torch.cpu.get_capabilities(), "avx512_bf16": True}  # on a CPU, the rungs need this for bf16

    def in_float32(x, *args, **kwargs):
        return softmax(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    script, *words = script.split()
    words += options(flags)
    patches = {
        "sys.argv": [script, *words, "--device", "cpu"],
        "sys.stdout": io.StringIO(),
        "torch.Tensor.__format__": lambda tensor, form: "",
        "torch.from_numpy": lambda array: fake.from_tensor(from_numpy(array)),
        "torch.nn.Module.to": lambda module, device: module,
        "torch.nn.utils.clip_grad._has_foreach_support": lambda tensors, device: True,  # as for real tensors
    } | patches
    if cuda:
        patches |= {
            "torch.cpu.get_capabilities": lambda: capabilities,
            "torch.nn.functional.softmax": in_float32,
            "torch.use_deterministic_algorithms": lambda mode, warn_only=False: None,
            "torch.optim.adam._default_to_fused_or_foreach": lambda *_, **__: (False, True),
        }
    environment = {name: value for name, value in os.environ.items() if name not in OVERRIDES} | (environment or {})
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # as in the rungs on a GPU; determinism changes compiled kernels
    torch._dynamo.reset()
    try:
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            patched(patches),
            torch._dynamo.config.patch(disable=False),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            fake,
            mode,
        ):
            run_script(ROOT / script)
    finally:
        torch.use_deterministic_algorithms(deterministic)


# ---- compiled rungs: Inductor schedules the graphs but generates no code


class Scheduled(BaseException):
    """Stops Inductor and holds the scheduled kernels.

    It derives from BaseException because Inductor would wrap an Exception.
    """


def moved(node, graph):
    """Return the number of bytes that `node`, a node of Inductor's scheduler for `graph`, reads and writes.

    If Inductor counts a fused node as a whole, it counts every row of a lookup table. If it counts the operations of a
    node separately, it counts only the rows that are read. This function therefore uses the smaller count for each
    buffer. For fused and external kernels, Inductor counts at most 10^9 elements per buffer. At T 1024, the logits
    exceed this limit from B 20 on, so this function corrects their count.
    """
    sizes, parts = node.get_read_write_buffer_accesses(True, True), node.get_nodes()
    for name, size in sizes.items():
        elements = int(graph.get_numel(name))
        if elements > 10**9 and size >= 10**9 * graph.get_dtype(name).itemsize:
            sizes[name] = elements * graph.get_dtype(name).itemsize
    if len(parts) == 1:
        return sum(sizes.values())
    each = [part.get_read_write_buffer_accesses(True, True) for part in parts]
    return sum(min(size, sum(one.get(name, 0) for one in each)) for name, size in sizes.items())


def schedule(float32, cuda, graph):
    """Schedule a graph and raise Scheduled with its kernels. This function replaces GraphLowering.codegen."""
    from torch._inductor.utils import get_fused_kernel_name

    graph.init_wrapper_code()
    graph._update_scheduler()
    kernels, together = [], []
    for node in graph.scheduler.nodes:
        size, parts = moved(node, graph), node.get_nodes()
        if node.is_extern():
            together = []
        elif size and not cuda:  # on a CPU, Inductor puts all nodes between two external kernels into one C++ function
            size += kernels.pop().bytes if together else 0
            parts = together = together + list(parts)
        name, flops, precision = f"triton_{get_fused_kernel_name(parts, 'original_aten')}_0", 0, ""
        if not size or (cuda and "attention_for_cpu" in name and not node.is_extern()):
            continue  # no kernel on a GPU: a view, an extra output, or a layout change for the CPU's attention
        if node.is_extern():
            origins = parts[0].node.origins
            for call in (n for n in origins if getattr(n.target, "overloadpacket", None) in FLOPS):
                args, kwargs = map_arg((call.args, call.kwargs), lambda one: one.meta["val"])
                name, flops, precision = product(call.target, args, kwargs, call.meta["val"], float32)
        kernels.append(Kernel(name, group(name), precision, flops, size))
    raise Scheduled(kernels)


def to_cuda(gm, inputs):
    """Move a graph of fake tensors and the list of its inputs to the device cuda:0, in place."""
    device = torch.device("cuda:0")
    move = functools.partial(tree_map_only, torch.Tensor, lambda t: t.to(device))
    with detect_fake_mode(inputs):
        inputs[:] = move(inputs)
        for node in gm.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = move(node.meta["val"])
            if "device" in node.kwargs:
                node.update_kwarg("device", device)


def compiler(recorder, fullgraph, cuda=True):
    """Return a replacement for torch.nn.Module.compile.

    With this replacement, each call to a compiled module records the kernels that Inductor would run. See
    fake_compile() for `fullgraph`. If `cuda` is False, the modules are compiled for the CPU.
    """
    from torch._inductor import compile_fx
    from torch._inductor.runtime.hints import DeviceProperties

    a100 = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)  # 108 SMs, capability 8.0, limits per SM
    post_grad_passes = compile_fx._recursive_post_grad_passes

    def inner(gm, inputs, **options):
        key = cuda, str(gm.graph), *((t.shape, t.dtype) for t in inputs)
        mine, inputs = copy.deepcopy(gm), list(inputs)

        def passes(graph, **how):
            post_grad_passes(graph, **how)
            to_cuda(graph, inputs)

        patches = {"graph.GraphLowering.codegen": lambda graph: schedule(recorder.float32, cuda, graph)}
        for_cuda = {
            "compile_fx._recursive_post_grad_passes": passes,
            "compile_fx._check_triton_bf16_support": lambda graph: None,
            "scheduler.has_triton": lambda: True,
            "runtime.hints.DeviceProperties.create": lambda device: a100,
        }
        patches |= for_cuda if cuda else {}
        patches = {f"torch._inductor.{name}": value for name, value in patches.items()}
        with patched(patches), torch._inductor.config.patch(fx_graph_cache=False):
            try:
                if key not in SCHEDULES:
                    compile_fx.compile_fx_inner(mine, inputs, **options)
            except Scheduled as end:
                (SCHEDULES[key],) = end.args

        def run(args):
            values, before = list(args), len(recorder.kernels)
            args.clear()
            out = gm(*values)
            recorder.kernels[before:] = SCHEDULES[key]  # replaces the operations that gm() recorded
            return out

        run._boxed_call = True
        return run

    return fake_compile(inner, fullgraph)


def step(rung, model, batch_size, seq_len, cuda=True):
    """Return the kernels of a rung's second step, in order.

    If `cuda` is True, patches select the code that PyTorch would use on a GPU.
    """
    recorder, steps = Recorder("float32" if rung.precision == "float32" else "tf32"), []

    def begin_update(*_):
        recorder.path = "optimizer."

    def end_update(*_):
        steps.append(recorder.kernels)
        recorder.kernels, recorder.path = [], ""

    flags = {"model": model, "batch_size": batch_size, "seq_len": seq_len, "steps": 2}
    if rung.kind == "scale":
        flags["total_batch_size"] = batch_size * seq_len  # one micro-batch per step, as in the other scripts
    patches = {"torch.nn.Module.compile": compiler(recorder, rung is not PEER, cuda)}
    with register_optimizer_step_pre_hook(begin_update), register_optimizer_step_post_hook(end_update):
        run_fake(rung.file, flags, recorder, patches, cuda)
    return steps[-1]


# ---- the floor and the tables


@dataclass
class Card:
    """A GPU's peak matmul TFLOP/s by precision, and its memory bandwidth in GB/s."""

    tflops: dict
    gb_per_s: float

    @classmethod
    def read(cls, name):
        """Return a Card. `name` is a GPU in cards.toml ("RTX" is optional) or a file with the output of measure.roof.

        Raises ValueError if `name` is neither, and OSError if the file cannot be read.
        """
        cards = read_toml("measure/cards.toml")
        for known, card in cards.items():
            if name.lower() in (known.lower(), known.lower().removeprefix("rtx ")):
                return cls(card, card["gb_per_s"])
        if not Path(name).is_file():
            raise ValueError(f"--card {name}: expected a file with measure.roof's output, or one of {', '.join(cards)}")
        try:
            roof = json.loads(Path(name).read_text(encoding="utf-8"))
            tflops, gb_per_s = peaks(roof), roof["copy_gb_per_s"]
            if min(tflops["float32"], *tflops.values(), gb_per_s) > 0:
                return cls(tflops, gb_per_s)
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(f"--card {name}: the file does not contain the output of measure.roof")

    def floor_ms(self, step):
        """Return (the floor of a step, the part of the floor that is due to memory-bound kernels), both in ms."""
        whole = waiting = 0.0
        for kernel, count in step.items():
            precision = kernel.precision
            while precision and precision not in self.tflops:
                precision = INSTEAD[precision]
            multiply = kernel.flops / self.tflops[precision] / 1e9 if precision else 0.0
            move = kernel.bytes / self.gb_per_s / 1e6
            whole += count * max(multiply, move)
            waiting += count * move if move > multiply else 0.0
        return whole, waiting


def read_counts(path=ROOT / "results" / "counts.json"):
    """Return {(model, batch size, sequence length): {script: step}}. Each step is a Counter of kernels."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return {
        (one["model"], one["batch_size"], one["seq_len"]): {
            script: Counter({Kernel(*kernel): count for *kernel, count in rows})
            for script, rows in one["scripts"].items()
        }
        for one in data["counts"]
    }


def counted_with(path=ROOT / "results" / "counts.json"):
    """Return the version of torch that produced the counts."""
    return json.loads(path.read_text(encoding="utf-8"))["torch"]


def totals(step, group=None):
    """Return (FLOPs, bytes, number of kernels) for a step or for one group of its kernels."""
    rows = [(kernel, count) for kernel, count in step.items() if group in (None, kernel.group)]
    sums = (sum(getattr(kernel, what) * count for kernel, count in rows) for what in ("flops", "bytes"))
    return *sums, sum(count for _, count in rows)


def cells(steps, card=None):
    """Return a table of counts with a row per script in `steps`."""
    table = []
    for script, step in steps.items():
        flops, moved, kernels = totals(step)
        row = {"script": script, "TFLOP": f"{flops / 1e12:#.3g}", "GB moved": f"{moved / 1e9:.1f}"}
        row["kernels"] = f"{kernels:,}"
        if card:
            whole, waiting = card.floor_ms(step)
            row |= {"floor, ms": f"{whole:.1f}", "memory-bound share": f"{waiting / whole:.0%}"}
        table.append(row)
    return table


def beside(measured, steps, card):
    """Return a table of measured step times ({script: ms}) and floors."""
    table, before = [], (None, None)
    for script, ms in measured.items():
        now = ms, card.floor_ms(steps[script])[0]
        gains = [f"{old / new:.2f}×" if old else "" for old, new in zip(before, now, strict=True)]
        row = {"script": script, "measured, ms": f"{round(ms, 1):,g}", "floor, ms": f"{now[1]:,.1f}"}
        row |= {"measured / floor": f"{ms / now[1]:.2f}"}
        table.append(row | {"measured, × previous": gains[0], "floor, × previous": gains[1]})
        before = now
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default gpt2")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4], metavar="B", help="batch sizes, default 4")
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length T, default 1024")
    parser.add_argument(
        "--card", help="also print the floor on this GPU: a name in measure/cards.toml, or a file from measure.roof"
    )
    parser.add_argument("--only", nargs="+", metavar="NN", help="only these scripts, such as 10 fused peers")
    parser.add_argument("--out", type=Path, help="also write the counts to this file as JSON")
    args = parser.parse_args()
    ladder = [rung for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale" or rung.kind == "speed"]
    ladder = {rung.number: rung for rung in [*ladder, PEER]}
    only = args.only or [number for number, rung in ladder.items() if rung.part == "rung"]
    if unknown := set(only) - ladder.keys():
        parser.error(f"--only {min(unknown)}: expected one of {', '.join(ladder)}")
    try:
        card = Card.read(args.card) if args.card is not None else None
        if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
            raise ValueError(f"--out {args.out}: cannot write a file there")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    version, counts = torch.__version__.partition("+")[0], []
    for batch_size in args.batch_size:
        about, steps = {"model": args.model, "batch_size": batch_size, "seq_len": args.seq_len}, {}
        for rung in [rung for number, rung in ladder.items() if number in only]:
            print(f"counting {rung.file}, B {batch_size}", file=sys.stderr)
            steps[rung.file] = Counter(step(rung, **about))
        rows = {script: [[*kernel, count] for kernel, count in found.items()] for script, found in steps.items()}
        counts.append(about | {"scripts": rows})
        said = f"{args.model}, B {batch_size}, T {args.seq_len}: counts of one step, torch {version}"
        print(f"{said}\n\n{text(cells(steps, card))}\n", flush=True)
    if args.out:
        command = shlex.join(["python", "-m", "measure.counts", *sys.argv[1:]])
        save(args.out, {"command": command, "torch": version, "counts": counts}, r"\[[^][{}]+\]")  # one kernel per line


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
