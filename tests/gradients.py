"""Started by torchrun: two steps of a script, in float32 and uncompiled, at one batch size after the other.

    torchrun ... tests/gradients.py OUT DEVICE SCRIPT BATCH_SIZE [BATCH_SIZE ...]

Rank 0 writes {batch size: (what main() printed, the gradients of each step before clipping)} to OUT.
"""

import contextlib
import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
from ladder import load

out, device, script, *sizes = sys.argv[1:]
clip, grads, found = nn.utils.clip_grad_norm_, [], {}
begin, (store, rank, world_size) = dist.init_process_group, next(dist.rendezvous("env://"))


def look(parameters, limit):
    parameters = list(parameters)
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]  # FSDP has slices
    grads.append([grad.detach().cpu().clone() for grad in whole])
    return clip(parameters, limit)


def meet(backend):
    """The ranks of one run could find addresses of the run before, under the same names."""
    begin(backend, store=dist.PrefixStore(f"run {len(found)}", store), rank=rank, world_size=world_size)


dist.init_process_group = meet
nn.utils.clip_grad_norm_ = look
nn.Module.compile = lambda *args, **kwargs: None
torch.autocast = lambda *args, **kwargs: contextlib.nullcontext()
torch.set_float32_matmul_precision = lambda precision: None  # no TF32
for size in sizes:
    sys.argv = [script, "--model", "nano", "--device", device, "--steps", "2", "--seq-len", "32", "--batch-size", size]
    sys.argv += ["--total-batch-size", "256"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load(script).main()
    found[int(size)] = printed.getvalue(), grads[:]
    grads.clear()
if rank == 0:
    torch.save(found, out)
