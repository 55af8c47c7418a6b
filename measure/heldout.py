"""Train a script and evaluate it on text that it does not train on:  python measure/heldout.py baseline.py --steps 100

The script trains on the first nine tenths of input.txt. Ten times during the run, a hook that PyTorch calls after an
optimizer step computes the loss of about eight batches, spread over the last tenth, in float32. The script itself is
unchanged. All options but --max-lr, the highest learning rate of get_lr() (from rung 09 on), go to the script.

After the script's output, this program prints one line of JSON: the optimizer steps of the evaluations, their losses in
nats per token, and the milliseconds of each step. A step's time excludes the evaluations.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from record import ROOT
from torch.optim.optimizer import register_optimizer_step_post_hook

EVALUATIONS, BATCHES = 10, 8


def load(script):
    """Import a script as a module, without running it."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def split(path, folder):
    """Write the first nine tenths of a text and the rest into two files in a folder, and return their paths."""
    text = Path(path).read_bytes()
    end = text.index(b"\n", len(text) * 9 // 10)
    training, held_out = Path(folder, "training.txt"), Path(folder, "held_out.txt")
    training.write_bytes(text[:end])
    held_out.write_bytes(text[end:])
    return training, held_out


def evaluate(model, batches):
    """Return the mean loss of the batches, in nats per token, in float32 and without the compiled code."""
    device, precision = next(model.parameters()).device, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        losses = [type(model).forward(model, x.to(device), y.to(device)).item() for x, y in batches]
    torch.set_float32_matmul_precision(precision)
    return sum(losses) / len(losses)


def train(script, max_lr, words):
    """Run a script with the options `words` and return the dict that this program prints."""
    module, kept = load(script), {"at": time.perf_counter()}
    found = {"steps": [], "losses": [], "ms": []}
    print_header = module.print_header

    def header(args, model, loader):
        print_header(args, model, loader)
        kept.update(model=model, last=args.steps, every=max(1, args.steps // EVALUATIONS))
        held_out = module.DataLoaderLite(texts[1], loader.B, loader.T)
        count = (len(held_out.tokens) - 1) // (loader.B * loader.T)
        kept["batches"] = [held_out.next_batch() for _ in range(count)][:: max(1, count // BATCHES)]

    def after_step(*_):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        found["ms"].append(1000 * (time.perf_counter() - kept["at"]))
        if len(found["ms"]) % kept["every"] == 0 or len(found["ms"]) == kept["last"]:
            found["steps"].append(len(found["ms"]))
            found["losses"].append(evaluate(kept["model"], kept["batches"]))
        kept["at"] = time.perf_counter()

    with contextlib.ExitStack() as changes:
        texts = split(ROOT / "input.txt", changes.enter_context(tempfile.TemporaryDirectory()))
        changes.enter_context(mock.patch.object(module, "print_header", header))
        changes.enter_context(mock.patch.object(sys, "argv", [script, *words, f"--data={texts[0]}"]))
        if max_lr:
            rates = max_lr, *module.get_lr.__defaults__[1:]
            changes.enter_context(mock.patch.object(module.get_lr, "__defaults__", rates))
        changes.callback(register_optimizer_step_post_hook(after_step).remove)
        try:
            module.main()
        except (OSError, ValueError) as error:
            sys.exit(f"heldout.py: error: {error}")
        except KeyboardInterrupt:
            sys.exit(1)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("script", help="a script of the ladder, such as baseline.py")
    parser.add_argument("--max-lr", type=float, help="default: the script's own")
    args, words = parser.parse_known_args()
    if not (ROOT / args.script).is_file():
        parser.error(f"there is no script {args.script}")
    if args.max_lr is not None and (args.max_lr <= 0 or not hasattr(load(args.script), "get_lr")):
        parser.error("--max-lr needs a rate above 0 and a script with get_lr()")
    if any(word.startswith("--data") for word in words):
        parser.error("--data: the text is always input.txt")
    print(json.dumps(train(args.script, args.max_lr, words)))
