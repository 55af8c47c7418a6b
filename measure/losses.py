"""Compare ways to compute the loss from the last hidden states:  python measure/losses.py

Each way maps hidden states x (B * T, C), the output head's weight (vocab_size, C) and targets (B * T,) to the mean
cross-entropy, compiled under bf16 autocast as in rung 10. The table shows the loss and its absolute error, the relative
error of the gradients dx and dW (all compared with float64), and the peak memory (without the inputs) and the time of
the forward and the backward pass together. F.linear_cross_entropy needs torch 2.13.
"""

import argparse
import functools
import shlex
import statistics
import sys

import torch
import torch.nn.functional as F
from attention import peak_bytes
from commands import ask
from device import add_device, out_of_memory, seconds
from record import now
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
    """Compute the loss with PyTorch's function. Without allow_retain_graph, it warns, which breaks a compiled graph."""
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
    # Inputs with the magnitudes that they have at the start of training.
    x, weight = torch.randn(args.rows, args.width), 0.02 * torch.randn(args.vocab_size, args.width)
    inputs = [one.to(args.device).requires_grad_() for one in (x, weight)]
    targets = torch.randint(args.vocab_size, (args.rows,), device=args.device)
    exact = step(all_logits, *(one.detach().double().requires_grad_() for one in inputs), targets)
    torch._inductor.config.score_fusion_memory_threshold = 1000  # as in branches/chunked_loss.py
    table, steps = [], {}
    for name, way in WAYS.items():
        if way not in (all_logits, chunks) and not hasattr(F, "linear_cross_entropy"):
            continue
        row = {"way": name} | dict.fromkeys(("loss", "error", "error of dx", "error of dW", "peak, MiB", "ms"), "")
        table.append(row)
        run = functools.partial(step, torch.compile(way, fullgraph=True), *inputs, targets)
        try:
            loss, *gradients = run()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["loss"] = "out of memory"
            continue
        row |= {"loss": f"{loss.item():.4f}", "error": f"{abs(loss.item() - exact[0].item()):.4f}"}
        for column, ours, theirs in zip(("error of dx", "error of dW"), gradients, exact[1:], strict=True):
            row[column] = f"{((ours.double() - theirs).norm() / theirs.norm()).item():.1e}"
        del loss, gradients, ours
        row["peak, MiB"] = f"{peak_bytes(run, args.device) / 2**20:.0f}"
        steps[name] = run
    rounds = [{name: 1000 * seconds("f()", args.device, f=run) for name, run in steps.items()} for _ in range(3)]
    for row in (row for row in table if row["way"] in steps):
        times = [times[row["way"]] for times in rounds]
        row["ms"] = f"{statistics.median(times):.0f} ({min(times):.0f}-{max(times):.0f})"
    chip = ask("machine.py", "--device", str(args.device))["name"]
    said = f"{args.rows} rows, C {args.width}, vocabulary {args.vocab_size}, {chip}, torch {torch.__version__}"
    line = f"{shlex.join(['python', 'measure/losses.py', *sys.argv[1:]])}, {now()[:10]}"
    print(plain([line, said, f"exact loss {exact[0].item():.4f}"], table), end="")


if __name__ == "__main__":
    main()
