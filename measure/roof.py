"""Measure the peak speed of this device:  python -m measure.roof --model gpt2 --batch-size 4

This program prints the TFLOP/s of matmuls and the GB/s of a memory copy as JSON. It times matmuls in each precision
that the device supports, with the shapes of GPT-2's linear layers and one large square shape. For the copy, both the
bytes read and the bytes written are counted. All inputs are random, because a kernel can run faster on zeros.

In each round, torch.utils.benchmark measures the median time of each operation. The device is synchronized before each
reading of the clock. Each result is the best of three rounds, because interference lowers the speed. On a GPU, the
program first runs matmuls for 10 seconds, because a cold GPU can exceed the clock that it sustains during training.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

from baseline import MODELS
from measure.device import add_device, find_gpu, precisions, reading, seconds


def products(config, tokens, square):
    """Return the shapes of the matmuls to measure, as {name: (m, k, n)} for (m, k) @ (k, n).

    They cover the forward pass of each linear layer, and one square matmul.
    """
    C = config.n_embd
    own = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    own["lm_head"] = (C, config.vocab_size)
    return {name: (tokens, *shape) for name, shape in own.items()} | {"square": (square, square, square)}


def check_tf32(device):
    """Raise RuntimeError if float32 matmuls do not use TF32, which rounds 1 + 2^-12 to 1."""
    x = torch.full((1024, 1024), 1 + 2**-12, device=device)
    if (x @ torch.eye(1024, device=device) != 1).any():
        raise RuntimeError("PyTorch used plain float32 although TF32 was enabled")


def warm_up(device, seconds=10):
    """Run matmuls to bring a GPU to the clock and temperature of training. Return device.reading() under load."""
    gpu = find_gpu(torch.cuda.get_device_properties(device).uuid)
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16 if "bf16" in precisions(device) else torch.float16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(50):
            x @ x
        under_load = reading(gpu)  # while the queued matmuls run
        torch.accelerator.synchronize(device)
    return under_load


def multiply(precision, shape, device):
    """Return the TFLOP/s of one matmul.

    Raises RuntimeError, AttributeError or ValueError if the matmul is unsupported.
    """
    m, k, n = shape
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision == "tf32":
        check_tf32(device)
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if precision == "fp8":  # one scale per tensor; dimensions must be multiples of 16, so n is rounded down
        x, w = x.to(torch.float8_e4m3fn), w[: n // 16 * 16].to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        stmt = "torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)"
        names = {"torch": torch, "one": one}
    else:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        x, w = x.to(dtype), w.to(dtype)
        stmt, names = "linear(x, w)", {"linear": F.linear}
    return 2 * m * k * w.size(0) / seconds(stmt, device, x=x, w=w, **names) / 1e12


def measure(config, tokens, device):
    """Return the bandwidth and a row per matmul as a dict. If a matmul is unsupported, its row contains the reason."""
    shapes = products(config, tokens, square=2048 if device.type == "cpu" else 8192)
    matmul = [
        {"precision": precision, "name": name, "shape": shape, "tflops": None, "error": None}
        for precision in precisions(device)
        for name, shape in shapes.items()
    ]
    source = torch.randn(2**26, device=device)  # 256 MiB, chosen to exceed the caches
    target, copied = torch.empty_like(source), []
    under_load = warm_up(device) if device.type == "cuda" else None
    for _ in range(3):
        for row in matmul:
            try:
                tflops = float(f"{multiply(row['precision'], row['shape'], device):.4g}")
                row |= {"tflops": max(tflops, row["tflops"] or 0), "error": None}
            except (RuntimeError, AttributeError, ValueError) as error:
                row["error"] = None if row["tflops"] else str(error).splitlines()[0]
        copied.append(seconds("target.copy_(source)", device, source=source, target=target))
    copy = float(f"{2 * source.nbytes / min(copied) / 1e9:.4g}")
    return {"copy_gb_per_s": copy, "gpu": under_load, "matmul": matmul}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default gpt2")
    parser.add_argument("--batch-size", type=int, default=4, help="batch size B, default 4")
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length T, default 1024")
    add_device(parser)
    args = parser.parse_args()
    if args.batch_size < 1 or args.seq_len < 1:
        parser.error("--batch-size and --seq-len must be at least 1")
    print(json.dumps(measure(MODELS[args.model], args.batch_size * args.seq_len, args.device), indent=1))
