"""Count the FLOPs, bytes and kernels of a training step:  python measure/counts.py --batch-size 4   (make counts)

This program runs two steps of each unmodified rung on fake tensors and counts the second step. Fake tensors have shapes
but no values, so counting needs no GPU and performs no arithmetic. Runs with the same version of torch give the same
counts. With --card NAME, it also prints the floor of each rung on that GPU. The floor is an estimated lower bound on
the step time. The lower bound of a kernel is the longer of two times, FLOPs / peak and bytes / bandwidth. The floor is
the sum of these bounds over all kernels of the step.

What is counted:
* FLOPs: only matmuls are counted, with the formulas of torch.utils.flop_counter. The count includes the scores that
  flash attention recomputes in its backward pass, and excludes the masked triangle that flash attention skips.
* Bytes: each kernel is assumed to read or write each operand once, without a cache between kernels. For a table lookup,
  only the rows that are read are counted.
* Kernels: each operation that is not a view counts as one kernel. In practice, CUDA launches two or three kernels for
  each sum over rows and for each backward pass of LayerNorm. It launches several kernels for each AdamW or clipping
  operation over all parameters.
* Device: the steps run on the CPU but follow PyTorch's rules for CUDA. Softmax is float32 under autocast, and AdamW
  and clipping use one operation for all parameters. Inductor schedules kernels for an A100 but does not pad matmuls.
"""

import argparse
import contextlib
import copy
import functools
import os
import shlex
import sys
from collections import Counter as Counted
from pathlib import Path
from unittest import mock

import fake
import torch
from floor import Card, Kernel, cells
from kernels import group
from record import ROOT, save
from render import plain
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes as post_grad_passes
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_fused_kernel_name
from torch.fx.node import map_arg
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry as FLOPS
from torch.utils.flop_counter import register_flop_formula

sys.path.append(str(ROOT))
from ladder import Rung, read_ladder

from baseline import MODELS

PEER = Rung("measure/peers.py compiled", "transformers, compiled", "", "peer", precision="bf16")
aten = torch.ops.aten
NOT_KERNELS = {aten._unsafe_view.default, aten.lift_fresh.default}  # views that their schemas do not mark as views
HOST = {aten._foreach_add_.Tensor}  # not counted: increments AdamW's step counters, on the CPU unless AdamW is fused
ONLY_WRITTEN = {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}  # they overwrite a tensor without reading it
SCHEDULES = {}  # key of a compiled graph -> its kernels
A100 = DeviceProperties("cuda", 0, 108, 80, 8, 65536, 2048, 1024, 32)  # 108 SMs, capability 8.0, limits per SM


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu)
def attention_flops(q, k, v, dropout=0.0, is_causal=False, products=2, **_):
    """Return the FLOPs of attention's matmuls. q is a shape (..., T, head size).

    `products` is the number of matmuls. Causal attention computes only T (T + 1) / 2 of the T * T scores.
    """
    *heads, T, size = q
    return products * 2 * torch.Size(heads).numel() * size * (T * (T + 1) // 2 if is_causal else T * T)


@register_flop_formula(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def attention_backward_flops(grad, q, k, v, out, logsumexp, dropout, is_causal, **_):
    """Return the FLOPs of five matmuls: the recomputed scores, and the gradients of the probabilities, v, q and k."""
    return attention_flops(q, k, v, is_causal=is_causal, products=5)


def product(func, args, kwargs, out, float32):
    """Return (name, FLOPs, precision) of an operation. FLOPs and precision are 0 and "" if it is not a matmul."""
    name, formula = f"aten::{func.overloadpacket.__name__}", FLOPS.get(func.overloadpacket)
    if not formula:
        return name, 0, ""
    dtype = next(t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, float32)
    return name, formula(*args, **kwargs, out_val=out), precision


def nbytes(tensor):
    """Return a tensor's size in bytes.

    For an expanded tensor, this is the size of its storage, which is smaller than its shape suggests.
    """
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
            read |= {id(t): nbytes(t) for t in tensors}  # a tensor that is passed twice counts once
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


class Counter(TorchDispatchMode):
    """Records operations in this mode as kernels. `float32` is the precision of float32 matmuls, float32 or tf32."""

    def __init__(self, float32="float32"):
        super().__init__()
        self.float32, self.kernels, self.paused, self.path = float32, [], False, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            return 1.0  # for loss.item(), because a fake loss has no value
        if func is aten.masked_fill.Scalar:
            with self:
                return args[0].clone().masked_fill_(*args[1:])  # PyTorch's masked_fill runs these two operations
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kernel = func.namespace == "aten" and not func.is_view and func not in NOT_KERNELS | HOST
        if kernel and not self.paused:
            name, flops, precision = product(func, args, kwargs, out, self.float32)
            size = traffic(func, args, kwargs, out)
            self.kernels.append(Kernel(name, group(name, self.path), precision, flops, size))
        return out


# ---- compiled rungs: Inductor schedules the graphs but generates no code


class Scheduled(BaseException):
    """Stops Inductor and carries the scheduled kernels. Inductor would wrap an Exception but not a BaseException."""


def moved(node):
    """Return the number of bytes that an Inductor scheduler node reads and writes.

    Inductor's count for a fused node includes all rows of a lookup table. Its counts for the operations in that node
    include only the rows that are read. This function therefore uses the smaller count for each buffer.
    """
    sizes, parts = node.get_read_write_buffer_accesses(True, True), node.get_nodes()
    if len(parts) == 1:
        return sum(sizes.values())
    each = [part.get_read_write_buffer_accesses(True, True) for part in parts]
    return sum(min(size, sum(one.get(name, 0) for one in each)) for name, size in sizes.items())


def schedule(float32, graph):
    """Schedule a graph and raise Scheduled with its kernels. This function replaces GraphLowering.codegen."""
    graph.init_wrapper_code()
    graph._update_scheduler()
    kernels = []
    for node in graph.scheduler.nodes:
        size, parts = moved(node), node.get_nodes()
        name, flops, precision = f"triton_{get_fused_kernel_name(parts, 'original_aten')}_0", 0, ""
        if not size or ("attention_for_cpu" in name and not node.is_extern()):
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


def compiler(counter, fullgraph):
    """Return a replacement for torch.nn.Module.compile.

    With this replacement, each call of a compiled module records the kernels that Inductor would run. With `fullgraph`,
    code outside a graph is an error.
    """

    def inner(gm, inputs, **options):
        key = str(gm.graph), *((t.shape, t.dtype) for t in inputs)  # rungs 07 to 10 share a key and a schedule
        mine, inputs = copy.deepcopy(gm), list(inputs)

        def passes(graph, **how):
            post_grad_passes(graph, **how)
            to_cuda(graph, inputs)

        with contextlib.ExitStack() as patches:
            for name, value in {
                "graph.GraphLowering.codegen": lambda graph: schedule(counter.float32, graph),
                "compile_fx._recursive_post_grad_passes": passes,
                "compile_fx._check_triton_bf16_support": lambda graph: None,
                "scheduler.has_triton": lambda: True,
                "runtime.hints.DeviceProperties.create": lambda device: A100,
            }.items():
                patches.enter_context(mock.patch(f"torch._inductor.{name}", value))
            try:
                if key not in SCHEDULES:
                    compile_fx_inner(mine, inputs, **options)
            except Scheduled as end:
                (SCHEDULES[key],) = end.args

        def run(args):
            counter.kernels += SCHEDULES[key]
            counter.paused, values = True, list(args)
            args.clear()
            try:
                return gm(*values)
            finally:
                counter.paused = False

        run._boxed_call = True
        return run

    return fake.compiler(inner, fullgraph)


def step(rung, model, batch_size, seq_len, cuda=True):
    """Return the kernels of a rung's second step, in order.

    The step follows PyTorch's rules for CUDA, or its rules for the CPU if `cuda` is False. Raises SystemExit if the
    script rejects the batch size or the sequence length.
    """
    counter, steps = Counter("float32" if rung.precision == "float32" else "tf32"), []

    def begin_update(*_):
        counter.path = "optimizer."

    def end_update(*_):
        steps.append(counter.kernels)
        counter.kernels, counter.path = [], ""

    flags = {"model": model, "batch_size": batch_size, "seq_len": seq_len, "steps": 2}
    hooks = register_optimizer_step_pre_hook(begin_update), register_optimizer_step_post_hook(end_update)
    try:
        fake.run(rung.file, flags, counter, compiler(counter, rung is not PEER), cuda)
    finally:
        for hook in hooks:
            hook.remove()
    return steps[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default gpt2")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4], metavar="B", help="batch sizes, default 4")
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length T, default 1024")
    parser.add_argument(
        "--card", help="also print the floor on this GPU: a name in measure/cards.toml, or a file with roof.py's output"
    )
    parser.add_argument("--peer", action="store_true", help="count only rung 10 and the compiled loop of peers.py")
    parser.add_argument("--out", type=Path, help="also write the counts to this file as JSON")
    args = parser.parse_args()
    try:
        card = Card.read(args.card) if args.card is not None else None
        if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
            raise ValueError(f"--out {args.out}: cannot write a file there")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    rungs = [rung for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale"]
    rungs = [rungs[-1], PEER] if args.peer else rungs
    version, counts = torch.__version__.partition("+")[0], []
    for batch_size in args.batch_size:
        about, steps = {"model": args.model, "batch_size": batch_size, "seq_len": args.seq_len}, {}
        for rung in rungs:
            print(f"counting {rung.file}, B {batch_size}", file=sys.stderr)
            steps[rung.file] = Counted(step(rung, **about))
        rows = {script: [[*kernel, count] for kernel, count in found.items()] for script, found in steps.items()}
        counts.append(about | {"scripts": rows})
        said = f"{args.model}, B {batch_size}, T {args.seq_len}: counts of one step, torch {version}"
        print(plain([said], cells(steps, card)), flush=True)
    if args.out:
        command = shlex.join(["python", "measure/counts.py", *sys.argv[1:]])
        save(args.out, {"command": command, "torch": version, "counts": counts}, r"\[[^][{}]+\]")  # one kernel per line


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
