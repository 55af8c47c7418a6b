"""Load a model and parse the common options, for sample.py, hellaswag.py and export_hf.py."""

import argparse
from pathlib import Path

import long_run
import torch
from unattended import load_checkpoint


def config_of(saved):
    """Return the GPTConfig of a checkpoint or of a state dict. Raises KeyError if `saved` is not from a GPT.

    State dicts and old checkpoints do not contain the number of heads. This number is taken from the entry of
    MODELS with the same n_embd. Raises ValueError if there is no such entry.
    """
    if "config" in saved:
        return long_run.GPTConfig(**saved["config"])
    state = saved.get("model", saved)
    n_embd = state["transformer.wte.weight"].size(1)
    n_layer = sum(name.endswith(".ln_1.weight") for name in state)
    heads = {config.n_embd: config.n_head for config in long_run.MODELS.values()}
    if n_embd not in heads:
        raise ValueError(f"the file does not contain the number of heads, and no GPT-2 has the hidden size {n_embd}")
    return long_run.GPTConfig(n_layer=n_layer, n_head=heads[n_embd], n_embd=n_embd)


def load_model(source, device="cpu"):
    """Return a GPT in float32 with its vocabulary padded to 50304 tokens.

    `source` is a checkpoint, a file written by --save, GPT-2 weights in Hugging Face format, or a folder of
    checkpoints. From a folder of checkpoints, the latest checkpoint is loaded, or best.pt if there is no other. Raises
    ValueError with a one-line message if the model cannot be loaded or the device is missing.
    """
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # torch raises these for a missing device
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    path = Path(source)
    try:
        if path.is_dir() and any(path.glob("step_*.pt")):
            saved = load_checkpoint(path)
        elif path.is_file() or path.suffix == ".pt" or (path / "best.pt").exists():
            path = path / "best.pt" if path.is_dir() else path
            saved = torch.load(path, map_location="cpu", weights_only=True)
        else:
            return long_run.GPT.from_pretrained(source).eval().to(device)
        if "begun" in saved and "model" not in saved:
            raise ValueError("no step of this run has been saved yet")
        model = long_run.GPT(config_of(saved))
        model.load_state_dict(saved.get("model", saved))  # --save writes only the weights
        return model.eval().to(device)
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{source} does not contain the weights of a GPT: {error!r}") from None
    except Exception as error:  # torch.load raises many exception types for a damaged file
        name = "" if str(source) in str(error) else f"{source}: "
        name += "" if path.exists() else "no such file or folder here. "
        raise ValueError(name + " ".join(str(error).split())[:300]) from None


def model_parser(doc):
    """Return an argument parser for a model and a device. `doc` is the script's docstring."""
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], usage=argparse.SUPPRESS)  # keeps errors short
    parser.add_argument("model", help="a checkpoint, a folder of checkpoints, or GPT-2 weights in Hugging Face format")
    parser.add_argument("--device", default=accelerator, help=f"default {accelerator}")
    return parser


def explain(error, too_large):
    """Return a one-line message if the user can fix the RuntimeError. Otherwise, re-raise it.

    `too_large` lists the options that the user should lower if memory runs out.
    """
    if any(s in str(error) for s in ("out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory")):
        return f"out of memory: lower {too_large}"
    if isinstance(error, torch._dynamo.exc.ShortenTraceback):
        return f"torch.compile failed: {' '.join(str(error).split())[:200]}"
    raise error
