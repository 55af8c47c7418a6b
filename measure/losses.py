"""Compare ways to compute the loss from the last hidden states:  python measure/losses.py

Each way maps hidden states x (B * T, C), the output head's weight (vocab_size, C) and targets (B * T,) to the mean
cross-entropy, compiled as a whole under bf16 autocast, as in rung 10. The table shows the loss, its error and the error
of both gradients relative to float64, the peak memory of the forward and the backward pass without the inputs, and the
time of both. F.linear_cross_entropy needs torch 2.13.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from attention import peak_bytes
from commands import ask
from device import add_device, out_of_memory, seconds
from render import plain
from torch.utils.checkpoint import checkpoint


def all_logits(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets)


def chunks(x, weight, targets):
    """Compute the loss of a quarter of the rows at a time, as branches/chunked_loss.py does."""

    def loss_sum(x, targets):
        return F.cross_entropy(F.linear(x, weight), targets, reduction="sum")

    parts = zip(x.chunk(4), targets.chunk(4), strict=True)
    return sum(checkpoint(loss_sum, *part, use_reentrant=False) for part in parts) / targets.numel()


def library(x, weight, targets, **options):
    """Compute the loss with PyTorch's function. Without allow_retain_graph, a compiled graph cannot contain it."""
    how = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, **options) if options else None
    return F.linear_cross_entropy(x, weight, targets, options=how)


WAYS = {
    "all logits": all_logits,
    "4 chunks": chunks,
    "linear_cross_entropy": library,
    "the same, 4 chunks": lambda x, w, t: library(x, w, t, batch_chunk_size=len(t) // 4),
    "the same, bf16 inputs": lambda x, w, t: library(x.bfloat16(), w.bfloat16(), t, batch_chunk_size=len(t) // 4),
    "the same, automatic chunks": lambda x, w, t: library(x.bfloat16(), w.bfloat16(), t, batch_chunk_size=None),
}


def step(way, x, weight, targets):
    """Return (loss, gradient of x, gradient of the weight)."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.dtype == torch.float32):
        loss = way(x, weight, targets)
    return loss, *torch.autograd.grad(loss, (x, weight))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=4096, help="B * T, default 4096")
    parser.add_argument("--width", type=int, default=768, help="C, default 768")
    parser.add_argument("--vocab-size", type=int, default=50304, help="default 50304")
    add_device(parser)
    args = parser.parse_args()
    if min(args.rows // 4, args.width, args.vocab_size) < 1:
        parser.error("need at least 4 for --rows, and 1 for --width and --vocab-size")
    torch.manual_seed(0)
    # Inputs with the sizes that they have at the start of training.
    x, weight = torch.randn(args.rows, args.width), 0.02 * torch.randn(args.vocab_size, args.width)
    inputs = [one.to(args.device).requires_grad_() for one in (x, weight)]
    targets = torch.randint(args.vocab_size, (args.rows,), device=args.device)
    exact = step(all_logits, *(one.detach().double().requires_grad_() for one in inputs), targets)
    torch._inductor.config.score_fusion_memory_threshold = 1000  # as in branches/chunked_loss.py
    table = []
    for name, way in WAYS.items():
        row = {"way": name} | dict.fromkeys(("loss", "error", "error of dx", "error of dW", "peak, MiB", "ms"), "")
        table.append(row)
        compiled = torch.compile(way, fullgraph=True)
        try:
            loss, *gradients = step(compiled, *inputs, targets)
        except (AttributeError, TypeError, RuntimeError) as error:
            reason = "out of memory" if out_of_memory(error) else "not in this torch version, or not compilable"
            row["loss"] = reason
            continue
        row |= {"loss": f"{loss.item():.4f}", "error": f"{abs(loss.item() - exact[0].item()):.4f}"}
        for column, ours, theirs in zip(("error of dx", "error of dW"), gradients, exact[1:], strict=True):
            row[column] = f"{((ours.double() - theirs).norm() / theirs.norm()).item():.1e}"
        del loss, gradients, ours
        row["peak, MiB"] = f"{peak_bytes(lambda: step(compiled, *inputs, targets), args.device) / 2**20:.0f}"  # noqa: B023
        times = [seconds("f()", args.device, f=lambda: step(compiled, *inputs, targets)) for _ in range(3)]  # noqa: B023
        row["ms"] = f"{1000 * statistics.median(times):.0f} ({1000 * min(times):.0f}-{1000 * max(times):.0f})"
    chip = ask("machine.py", "--device", str(args.device))["name"]
    said = f"{args.rows} rows, C {args.width}, vocabulary {args.vocab_size}, {chip}, torch {torch.__version__}"
    print(plain([said, f"exact loss {exact[0].item():.4f}"], table), end="")


if __name__ == "__main__":
    main()
