"""Benchmark the unfused attention of rung 05 and each kernel of F.scaled_dot_product_attention.

    python -m measure.attention

For each sequence length T, the table shows the time of the forward pass alone, and the time and the peak memory of the
forward and backward passes together. Each time is the median of 3 interleaved rounds, followed by the lowest and the
highest time. Speed-ups are relative to the unfused attention, which stores a score matrix that grows quadratically with
T. FlashAttention (Dao et al. 2022) and similar kernels do not store the whole matrix at once. `make diff-06` shows how
rung 06 calls such kernels.
"""

import argparse
import functools
import math
import platform
import warnings

import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure.device import add_device, memory_in_use, out_of_memory, precisions, seconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}


@functools.cache
def causal_mask(T, device):
    """Return a bool mask of shape (T, T). An entry is True if the row's token may attend to the column's token.

    The mask is built only once, as in the model, so the timings exclude its construction.
    """
    return torch.ones(T, T, dtype=torch.bool, device=device).tril()


def written_out(q, k, v):
    """Compute causal attention as in rung 05. q, k, v and the result have shape (B, n_head, T, head_size)."""
    mask = causal_mask(q.size(2), q.device)
    att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))  # (B, n_head, T, T)
    att = att.masked_fill(~mask, float("-inf"))
    return F.softmax(att, dim=-1) @ v


fused = functools.partial(F.scaled_dot_product_attention, is_causal=True)
ATTENTION = {  # a kernel that does not support the device or the dtype raises RuntimeError, which bench() catches
    "written out": written_out,
    "math": sdpa_kernel(SDPBackend.MATH)(fused),
    "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(fused),
    "memory-efficient": sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)(fused),
    "cuDNN": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(fused),
}


def passes(attention, q, k, v):
    """Return two functions to time: one runs the forward pass, the other the forward and backward passes."""

    @torch.no_grad()
    def forward():
        return attention(q, k, v)

    def both():
        return torch.autograd.grad(attention(q, k, v), (q, k, v), torch.ones_like(q))

    return forward, both


def peak_bytes(function, device):
    """Return the peak memory of function() in bytes, excluding inputs, or nan if PyTorch cannot track the memory."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        function()
        return module.max_memory_allocated(device) - before
    return max(size for _, size in memory_in_use(function)) if device.type == "cpu" else math.nan


def bench(q, k, v):
    """Return a DataFrame of strings, with a row per kind of attention."""
    table, functions = {}, {}
    for kind, attention in ATTENTION.items():
        forward, both = passes(attention, q, k, v)
        try:
            both()  # not timed, because the first call loads kernels
            table[kind] = {"MiB": f"{peak_bytes(both, q.device) / 2**20:.1f}"}
            functions |= {(kind, "forward"): forward, (kind, "both passes"): both}
        except RuntimeError as error:
            table[kind] = {"MiB": "out of memory" if out_of_memory(error) else "kernel not available"}
    rounds = [{key: 1000 * seconds("f()", q.device, 0.2, f=call) for key, call in functions.items()} for _ in range(3)]
    times = pd.DataFrame(rounds)
    for (kind, heading), ms in times.items():
        table[kind][f"{heading}, ms"] = f"{ms.median():.3f} ({ms.min():.3f}-{ms.max():.3f})"
        if ("written out", heading) in functions:  # otherwise, the unfused attention ran out of memory
            table[kind][f"{heading}, speed-up"] = f"{times['written out', heading].median() / ms.median():.2f} x"
    return pd.DataFrame.from_dict(table, orient="index")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="sequence lengths")
    parser.add_argument("--batch-size", type=int, default=4, help="batch size B, default 4")
    parser.add_argument("--heads", type=int, default=12, help="number of heads, default 12 as in GPT-2 124M")
    parser.add_argument("--head-size", type=int, default=64, help="dimension of each head, default 64")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the first of these that the device supports")
    add_device(parser)
    args = parser.parse_args()
    B, n_head, head_size, device = args.batch_size, args.heads, args.head_size, args.device
    if min(B, n_head, head_size, *args.seq_lens) < 1:
        parser.error("every number must be at least 1")
    dtype = args.dtype or next(name for name in DTYPES if name in precisions(device))
    module = torch.get_device_module(device)
    chip = module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()
    print(f"device {device} ({chip}) | torch {torch.__version__} | {dtype} | B {B}, {n_head} heads of {head_size}")
    warnings.filterwarnings("ignore")  # the table already shows which kernels are not available
    for T in args.seq_lens:
        shape = B, n_head, T, head_size
        try:
            q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3))
        except RuntimeError as error:
            parser.error(f"cannot create inputs with T {T}: {' '.join(str(error).split())[:200]}")
        print(f"\nT {T}", bench(q, k, v).to_string(na_rep=""), sep="\n", flush=True)


if __name__ == "__main__":
    main()
