"""Train the GPT-2 of the transformers library with one of two training loops that a user might write.

    python -m measure.peers compiled   a minimal loop with bf16 and torch.compile
    python -m measure.peers trainer    transformers.Trainer with bf16, torch.compile and fused AdamW

Both loops use the batches, optimizer, clipping and learning-rate schedule of speedup_10_fused_adamw.py, and no dropout.
They start from that rung's initial weights, except for the rows that pad the vocabulary, because transformers has no
such rows. Their losses can therefore differ slightly from the rung's losses. Each loop prints lines in the rung's
format. Trainer uses all visible GPUs (see CUDA_VISIBLE_DEVICES).
"""

import argparse
import os
import sys
import tempfile
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import speedup_10_fused_adamw as rung
from dev.ladder import ROOT
from measure.device import add_device, out_of_memory, precisions

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
import transformers  # noqa: E402


def build(name):
    """Return a transformers GPT-2 with the initial weights of rung 10."""
    ours = rung.GPT(rung.MODELS[name])
    c = ours.config
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_positions": c.block_size}
    config = transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    theirs = model.state_dict()
    for key, w in ours.state_dict().items():
        conv1d = key.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))  # (in, out) in transformers
        theirs[key].copy_(w.t() if conv1d else w[: len(theirs[key])])
    return model.train()


def compiled(model, loader, steps, device, report, use_bf16):
    model.to(device)
    model.compile()
    optimizer = rung.GPT.configure_optimizers(model, lr=0.0)
    for step in range(steps):
        start = report.clock()
        x, y = (t.to(device) for t in loader.next_batch())
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
            loss = model(input_ids=x, labels=y, shift_labels=y).loss  # the loader has already shifted y
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rung.get_lr(step, steps)
        optimizer.step()
        report(report.clock() - start, loss.item())


class Rows(torch.utils.data.IterableDataset):
    """Yields the loader's batches row by row, because Trainer assembles its own batches."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        while True:
            for x, y in zip(*self.loader.next_batch(), strict=True):
                yield {"input_ids": x, "labels": y, "shift_labels": y}


def trainer(model, loader, steps, device, report, use_bf16):
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=loader.B,
            max_steps=steps,
            bf16=use_bf16,
            torch_compile=True,
            optim="adamw_torch_fused",
            learning_rate=1,  # LambdaLR multiplies it by get_lr()
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            remove_unused_columns=False,
        )
        it = transformers.Trainer(model=model, args=args, train_dataset=Rows(loader), callbacks=[report])
        it.pop_callback(transformers.PrinterCallback)
        optimizer = it.create_optimizer()
        it.lr_scheduler = LambdaLR(optimizer, lambda step: rung.get_lr(min(step, steps - 1), steps))
        it.train()


class Report(transformers.TrainerCallback):
    """Prints lines in the format of a rung. As in a rung, the step time includes fetching the batch."""

    def __init__(self, device, tokens):
        self.device, self.tokens, self.times = device, tokens, []

    def clock(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, seconds, loss):
        print(f"step {len(self.times):4d} | loss {loss:.6f} | dt {1000 * seconds:8.2f} ms", end=" | ")
        print(f"{self.tokens / seconds:10,.0f} tok/s", flush=True)
        self.times.append(seconds)

    def on_train_begin(self, *args, **kwargs):
        self.start = self.clock()

    def on_step_end(self, *args, **kwargs):
        self.seconds = self.clock() - self.start

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:  # Trainer's last log describes the whole run and has no "loss"
            self(self.seconds, logs["loss"])
            self.start = self.clock()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("peer", choices=["compiled", "trainer"])
    parser.add_argument("--model", choices=rung.MODELS, default="gpt2", help="default gpt2")
    parser.add_argument("--batch-size", type=int, default=4, help="batch size B, default 4")
    parser.add_argument("--seq-len", type=int, default=1024, help="sequence length T, default 1024")
    parser.add_argument("--steps", type=int, default=50, help="number of steps, default 50")
    add_device(parser)
    args = parser.parse_args()
    device, tokens = args.device, args.batch_size * args.seq_len
    if args.peer == "trainer" and device.index is not None:
        parser.error(f"--device {device}: use CUDA_VISIBLE_DEVICES to choose Trainer's GPU")
    torch.use_deterministic_algorithms(device.type == "cpu")  # as in the rungs
    torch.manual_seed(1337)
    model = build(args.model)
    try:
        loader = rung.DataLoaderLite(ROOT / "input.txt", args.batch_size, args.seq_len)
    except ValueError as error:
        parser.error(str(error))
    size = sum(p.numel() for p in model.parameters())
    print(f"device {device} | torch {torch.__version__} | {args.model} {size:,} parameters", end=" ")
    print(f"| B {loader.B} T {loader.T}")
    torch.set_float32_matmul_precision("high")
    for name, precision in ("TF32", "tf32"), ("bf16", "bf16"):
        if precision not in precisions(device):
            print(f"no {name} here")  # records.py searches for these words, which also begin rung 10's message
    report, train = Report(device, tokens), {"compiled": compiled, "trainer": trainer}[args.peer]
    try:
        train(model, loader, args.steps, device, report, "bf16" in precisions(device))
    except RuntimeError as error:  # report these errors in one line, as the rungs do
        if out_of_memory(error):
            sys.exit(f"{parser.prog}: error: out of memory with B {loader.B} and T {loader.T}")
        if isinstance(error, torch._dynamo.exc.ShortenTraceback):
            sys.exit(f"{parser.prog}: error: torch.compile failed: {' '.join(str(error).split())[:200]}")
        raise
    rung.print_summary(report.times, tokens, device)


if __name__ == "__main__":
    main()
