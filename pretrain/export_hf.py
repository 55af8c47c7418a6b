"""A checkpoint as a folder in Hugging Face format:  python pretrain/export_hf.py checkpoints my-gpt2

AutoModelForCausalLM.from_pretrained("my-gpt2") loads it, and so does --init-from my-gpt2 of every script here.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from checkpoint import load_model

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
TOKENIZER = Path(__file__).resolve().parents[1] / "tokenizer"


def to_hf(model):
    """A GPT as a transformers.GPT2LMHeadModel: the vocabulary cut back to 50257, no dropout, as it was trained."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    shape = {"n_positions": c.block_size, "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=50257, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shape))
    conv1d = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # stored (in, out), as the reverse of from_pretrained
    state = {name: w.t() if name.endswith(conv1d) else w for name, w in model.state_dict().items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:50257]
    hf.load_state_dict(state)
    return hf.eval()


def gpt2_tokenizer():
    """GPT-2's tokenizer for transformers, from the files of tokenizer/, which have tiktoken's names."""
    from transformers import GPT2TokenizerFast

    names = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    return GPT2TokenizerFast(*(str(TOKENIZER / name) for name in names), model_max_length=1024)


def export(model, folder):
    """Weights (safetensors), configuration and GPT-2's tokenizer, to a new folder. Raises OSError, SafetensorError."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    to_hf(model).save_pretrained(folder)
    tokenizer = gpt2_tokenizer()
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json and merges.txt, which older programs read


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("model", help="a checkpoint, or a folder of them: the newest is taken")
    parser.add_argument("folder", type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if args.folder.exists():
        parser.error(f"{args.folder} exists already")
    try:
        model = load_model(args.model)
    except ValueError as error:
        parser.error(str(error))
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.folder.parent) as unfinished:  # it gets its name when it is whole
            export(model, Path(unfinished) / "model")
            os.rename(Path(unfinished) / "model", args.folder)
    except Exception as error:  # safetensors has kinds of its own
        sys.exit(f"{parser.prog}: error: {args.folder}: {' '.join(str(error).split())}")
    print(f"{args.folder} holds {args.model}, as transformers and --init-from read it")


if __name__ == "__main__":
    main()
