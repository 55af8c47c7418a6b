"""Export a checkpoint as a folder in Hugging Face format:  python pretrain/export_hf.py checkpoints my-gpt2

To load the folder, use AutoModelForCausalLM.from_pretrained("my-gpt2") or a training script's --init-from my-gpt2.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from checkpoint import load_model
from unattended import allow_any_character, printing

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
TOKENIZER = Path(__file__).resolve().parents[1] / "tokenizer"


def to_hf(model):
    """Convert a GPT to a transformers.GPT2LMHeadModel with a vocabulary of 50257 and, as in training, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    shape = {"n_positions": c.block_size, "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=50257, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shape))
    conv1d = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # stored as (out, in); transformers expects (in, out)
    state = {name: w.t() if name.endswith(conv1d) else w for name, w in model.state_dict().items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:50257]
    hf.load_state_dict(state)
    return hf.eval()


def gpt2_tokenizer():
    """Return GPT-2's tokenizer for transformers. The files in tokenizer/ are named as in tiktoken's cache."""
    from transformers import GPT2TokenizerFast

    names = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
    return GPT2TokenizerFast(*(str(TOKENIZER / name) for name in names), model_max_length=1024)


def export(model, folder):
    """Write the weights (safetensors), configuration and tokenizer to a new folder. Raises OSError, SafetensorError."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    to_hf(model).save_pretrained(folder)
    tokenizer = gpt2_tokenizer()
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json and merges.txt, which older programs read


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("model", help="a checkpoint, or a folder whose latest checkpoint is used")
    parser.add_argument("folder", type=Path, help="the output folder, which must not exist yet")
    args = parser.parse_args()
    allow_any_character()
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if args.folder.exists():
        parser.error(f"{args.folder} already exists")
    try:
        model = load_model(args.model)
    except ValueError as error:
        parser.error(str(error))
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.folder.parent) as unfinished:  # renamed when complete
            export(model, Path(unfinished) / "model")
            os.rename(Path(unfinished) / "model", args.folder)
    except Exception as error:  # safetensors raises its own exception types
        sys.exit(f"{parser.prog}: error: {args.folder}: {' '.join(str(error).split())}")
    with printing():
        print(f"exported {args.model} to {args.folder}, for transformers and --init-from")


if __name__ == "__main__":
    main()
