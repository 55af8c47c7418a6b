"""Measure the all-reduce of a model's gradients between the ranks that run this program.

    torchrun --standalone --nproc_per_node=2 measure/allreduce.py --model gpt2 --step-ms 2900

It prints the time of the all-reduce and the bus bandwidth. --step-ms is the time in milliseconds that one GPU needs for
a step of all tokens. With it, the program also prints the speed-up that follows for 2, 4 and 8 such GPUs on this kind
of link.

In a ring each rank sends and receives 2 (n - 1) / n of the bytes, so bus bandwidth = 2 (n - 1) / n * bytes / seconds.
This figure does not depend on n if the link is the limit
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from record import ROOT

sys.path.append(str(ROOT))
from ddp_run import GPT, MODELS

BUCKET = 25 * 2**20  # bytes in one of DDP's gradient buckets


def speed_up(ranks, step_ms, gradient_bytes, bus_gb_s):
    """The speed-up of `ranks` GPUs over one, if no communication overlaps with computation.

    step_ms is one GPU's time for all tokens; bus_gb_s is in GB/s. DDP overlaps part of the all-reduce with the last
    backward pass.
    """
    travel_ms = 2 * (ranks - 1) / ranks * gradient_bytes / bus_gb_s / 1e6
    return step_ms / (step_ms / ranks + travel_ms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--step-ms", type=float, help="step time of one process on all tokens, as ddp_run.py prints it")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc_per_node=2 measure/allreduce.py")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        size = 4 * sum(p.numel() for p in GPT(MODELS[args.model]).parameters())
    buckets = [torch.ones(min(BUCKET, size - at) // 4, device=args.device) for at in range(0, size, BUCKET)]
    synchronize = torch.cuda.synchronize if args.device == "cuda" else torch.cpu.synchronize
    times = []
    for _ in range(15):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        synchronize()
        times.append(1000 * (time.perf_counter() - start))
    # A Gloo thread releases the last tensors a moment later, and aborts if Python is already shutting down:
    time.sleep(0.2)  # https://github.com/pytorch/pytorch/pull/179291
    dist.destroy_process_group()
    if rank > 0:
        return
    low, median, high = np.percentile(times[5:], [25, 50, 75])
    bus = 2 * (ranks - 1) / ranks * size / median / 1e6
    print(f"{args.model}: {size / 1e6:,.1f} MB of gradients between {ranks} ranks on {args.device}", end=", ")
    print(f"torch {torch.__version__}: {median:.2f} ms (quartiles {low:.2f}-{high:.2f}), bus {bus:.2f} GB/s")
    for n in (2, 4, 8) if args.step_ms and ranks > 1 else ():
        print(f"{n} GPUs: about {speed_up(n, args.step_ms, size, bus):.2f} x the speed of one")


if __name__ == "__main__":
    sys.exit(main())
