"""What sample.py, hellaswag.py and export_hf.py share: a model, from wherever it is, on a device."""

import argparse
from pathlib import Path

import long_run
import torch


def config_of(state):
    """The GPTConfig that a state dict fits. Raises KeyError if it is of no GPT.

    Its shapes do not say how many heads there are: as many as in the --model of this width, else one for every 64
    columns, as in all models of GPT-2.
    """
    n_embd = state["transformer.wte.weight"].size(1)
    n_layer = sum(name.endswith(".ln_1.weight") for name in state)
    n_head = next((config.n_head for config in long_run.MODELS.values() if config.n_embd == n_embd), n_embd // 64 or 1)
    return long_run.GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)


def load_model(source, device="cpu"):
    """The GPT of a checkpoint, of the newest in a folder of them, of a file of --save, or of GPT-2's weights.

    It is in float32, its vocabulary padded to 50304. Raises ValueError, in one line, if model or device is not there.
    """
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # torch's way to say that there is no such device
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    path = Path(source)
    try:
        if path.is_dir() and any(path.glob("step_*.pt")):
            saved = long_run.load_checkpoint(path)
        elif path.is_file() or path.suffix == ".pt" or (path / "best.pt").exists():
            path = path / "best.pt" if path.is_dir() else path
            saved = torch.load(path, map_location="cpu", weights_only=True)
        else:
            return long_run.GPT.from_pretrained(source).eval().to(device)
        state = saved.get("model", saved)  # --save writes the weights and nothing else
        model = long_run.GPT(config_of(state))
        model.load_state_dict(state)
        return model.eval().to(device)
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{source}: it holds no weights of a GPT: {error!r}") from None
    except Exception as error:  # a damaged file raises a dozen kinds
        name = "" if isinstance(error, long_run.UserError) else f"{source}: "
        raise ValueError(name + " ".join(str(error).split())[:300]) from None


def model_parser(doc):
    """A command line that takes a model and a device."""
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], usage=argparse.SUPPRESS)  # keeps errors short
    parser.add_argument("model", help="a checkpoint, a folder of them, or GPT-2 weights in Hugging Face format")
    parser.add_argument("--device", default=accelerator, help=f"default {accelerator}")
    return parser


def explain(error, too_large):
    """A line on what the user can do about a RuntimeError. Raises any other error again."""
    if any(s in str(error) for s in ("out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory")):
        return f"out of memory: lower {too_large}"
    if isinstance(error, torch._dynamo.exc.ShortenTraceback):
        return f"torch.compile failed: {' '.join(str(error).split())[:200]}"
    raise error
