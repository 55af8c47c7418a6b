"""Generate text and print it:  python pretrain/sample.py checkpoints --prompt "ROMEO:" --samples 3

The model is a checkpoint, a folder of checkpoints, or GPT-2 weights, given by name (gpt2) or as a folder. A single
sample is printed word by word. Several samples are generated in one batch and printed at the end.
"""

import signal
import sys

import torch
from checkpoint import explain, load_model, model_parser
from export_hf import gpt2_tokenizer, to_hf
from transformers import TextStreamer
from unattended import allow_any_character, printing


def main():
    parser = model_parser(__doc__)
    parser.add_argument("--prompt", default="Hello, I'm a language model,", help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens per sample, default 100")
    parser.add_argument("--samples", type=int, default=1, help="number of samples, default 1")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1; 0 chooses the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="sample only from the k likeliest tokens, default 50")
    parser.add_argument("--top-p", type=float, default=1.0, help="use only the likeliest tokens, up to probability p")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    args = parser.parse_args()
    if min(args.tokens, args.samples, args.top_k) < 1 or not 0 <= args.seed < 2**64:
        parser.error("--tokens, --samples and --top-k must be at least 1, and --seed must be from 0 to 2**64 - 1")
    if not (args.temperature == 0 or args.temperature >= 1e-3) or not 0 < args.top_p <= 1:
        parser.error("--temperature must be 0 or at least 0.001, and --top-p must be above 0 and at most 1")
    if sys.stdout is None:
        parser.error("standard output is closed, so the text cannot be printed")
    allow_any_character()
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    tokenizer = gpt2_tokenizer()
    end = tokenizer.eos_token_id
    text = args.prompt.encode(errors="replace").decode()  # the prompt might not be valid UTF-8
    prompt = tokenizer.encode(text, split_special_tokens=True) or [end]
    try:
        model = to_hf(load_model(args.model, args.device)).to(args.device)
    except ValueError as error:
        parser.error(str(error))
    if len(prompt) + args.tokens > (positions := model.config.n_positions):
        parser.error(f"--prompt ({len(prompt)} tokens) plus --tokens {args.tokens} exceeds the {positions} positions")
    sampling = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    if args.samples == 1:
        sampling["streamer"] = TextStreamer(tokenizer, skip_special_tokens=True)
    torch.manual_seed(args.seed)
    try:
        with printing():
            prompts = torch.tensor([prompt] * args.samples, device=args.device)  # (samples, T)
            texts = model.generate(prompts, max_new_tokens=args.tokens, pad_token_id=end, **sampling)
            if args.samples > 1:
                print("\n\n".join(tokenizer.batch_decode(texts, skip_special_tokens=True)))
    except RuntimeError as error:
        sys.exit(f"{parser.prog}: error: {explain(error, '--samples or --tokens')}")


if __name__ == "__main__":
    main()
