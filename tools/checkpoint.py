"""Load a GPT from a checkpoint of ddp_run.py or pretrain/train.py, or from GPT-2's weights."""

import re
from pathlib import Path

import torch
from ladder import load


def load_model(source):
    """The GPT of a checkpoint, of the newest in a folder of them, or of a name or folder in Hugging Face format.

    It is on the CPU, in float32, its vocabulary padded to 50304. Raises ValueError, in one line, if there is none.
    """
    script, path = load("ddp_run.py"), Path(source)
    try:
        if path.is_dir() and any(path.glob("step_*.pt")):
            checkpoint = script.load_checkpoint(path)
        elif path.suffix == ".pt" or (path / "best.pt").exists():
            path = path if path.suffix == ".pt" else path / "best.pt"
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        else:
            return script.GPT.from_pretrained(source).eval()
        numbers = re.findall(r"(\w+)=(\d+)", checkpoint["task"]["--model"])  # of "GPTConfig(block_size=1024, ...)"
        model = script.GPT(script.GPTConfig(**{name: int(number) for name, number in numbers}))
        model.load_state_dict(checkpoint["model"])
        return model.eval()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source}: it is no checkpoint of this project: {error!r}") from None
    except Exception as error:  # a damaged file raises a dozen kinds
        name = "" if isinstance(error, script.UserError) else f"{source}: "
        raise ValueError(name + " ".join(str(error).split())[:300]) from None
