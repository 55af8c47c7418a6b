"""Measure the time to all-reduce a model's gradients across the ranks that run this program.

    torchrun --standalone --nproc_per_node=2 measure/allreduce.py --model gpt2 --step-ms 2900

This program prints the all-reduce time and the bus bandwidth. With --step-ms, it also prints the estimated speed-up of
2, 4 and 8 GPUs that are connected by the same kind of link. The value of --step-ms is the step time of one GPU on the
whole batch.

In a ring all-reduce over n ranks, each rank sends and receives 2 (n - 1) / n times the size of the gradients. The bus
bandwidth is therefore 2 (n - 1) / n * bytes / seconds. It does not depend on n if the link is the bottleneck
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

BUCKET = 25 * 2**20  # bytes in each of DDP's gradient buckets


def speed_up(ranks, step_ms, gradient_bytes, bus_gb_s):
    """Return the speed-up of `ranks` GPUs over one GPU if communication does not overlap with computation.

    step_ms is the step time of one GPU on the whole batch, and bus_gb_s is the bus bandwidth in GB/s. In practice, DDP
    overlaps part of the all-reduce with the last backward pass, so the actual speed-up can be higher.
    """
    travel_ms = 2 * (ranks - 1) / ranks * gradient_bytes / bus_gb_s / 1e6
    return step_ms / (step_ms / ranks + travel_ms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--step-ms", type=float, help="step time of one process on the whole batch, in ms")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this program with torchrun: torchrun --standalone --nproc_per_node=2 measure/allreduce.py")
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
    # Give a Gloo thread time to release the last tensors. If it does so while Python shuts down, the process aborts.
    time.sleep(0.2)  # see https://github.com/pytorch/pytorch/pull/179291
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
