"""Load a GPT from a checkpoint of pretrain/, from a file of --save, or from GPT-2's weights."""

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


def load_model(source):
    """The GPT of a checkpoint, of the newest in a folder of them, of a file of --save, or of GPT-2's weights.

    It is on the CPU, in float32, its vocabulary padded to 50304. Raises ValueError, in one line, if there is none.
    """
    path = Path(source)
    try:
        if path.is_dir() and any(path.glob("step_*.pt")):
            saved = long_run.load_checkpoint(path)
        elif path.is_file() or path.suffix == ".pt" or (path / "best.pt").exists():
            path = path / "best.pt" if path.is_dir() else path
            saved = torch.load(path, map_location="cpu", weights_only=True)
        else:
            return long_run.GPT.from_pretrained(source).eval()
        state = saved.get("model", saved)  # --save writes the weights and nothing else
        model = long_run.GPT(config_of(state))
        model.load_state_dict(state)
        return model.eval()
    except (AttributeError, KeyError) as error:
        raise ValueError(f"{source}: it holds no weights of a GPT: {error!r}") from None
    except Exception as error:  # a damaged file raises a dozen kinds
        name = "" if isinstance(error, long_run.UserError) else f"{source}: "
        raise ValueError(name + " ".join(str(error).split())[:300]) from None
