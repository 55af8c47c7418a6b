"""Text from a model, printed token by token:  python pretrain/sample.py checkpoints --prompt "ROMEO:" --samples 3

The model is a checkpoint, a folder of them, or GPT-2's weights by name (gpt2) or as a folder. Several samples are made
at the same time; the first is printed as it comes, the others after it.
"""

import argparse
import codecs
import os
import signal
import sys
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from checkpoint import load_model


def attention(attn, x, cache, start):
    """CausalSelfAttention for tokens from `start` on, x (B, T, C), beside those whose keys and values are kept.

    cache: (2, B, n_head, positions, head_size), keys and values; those of x are written into it. -> (B, T, C)
    """
    B, T, C = x.shape
    qkv = attn.c_attn(x).view(B, T, 3, attn.n_head, C // attn.n_head)
    q, *new = qkv.permute(2, 0, 3, 1, 4)  # (B, n_head, T, head_size) each
    cache[:, :, :, start : start + T] = torch.stack(new)
    k, v = cache[:, :, :, : start + T]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)  # later on one token, which may see all
    return attn.c_proj(y.transpose(1, 2).reshape(B, T, C))


def next_logits(model, idx, caches, start):
    """Logits of what follows the tokens idx (B, T), which stand at `start`. Writes into the caches. -> (B, 50257)"""
    pos = torch.arange(start, start + idx.size(1), device=idx.device)  # (T,)
    x = model.transformer.wte(idx) + model.transformer.wpe(pos)  # (B, T, C)
    for block, cache in zip(model.transformer.h, caches, strict=True):
        x = x + attention(block.attn, block.ln_1(x), cache, start)
        x = x + block.mlp(block.ln_2(x))
    return model.lm_head(model.transformer.ln_f(x[:, -1]))[:, :50257]


def probabilities(logits, temperature, top_k, top_p):
    """Logits (B, V) to probabilities (B, V): divided by the temperature; of those the top_k likeliest; of those the
    fewest that reach top_p together (nucleus sampling, Holtzman et al. 2020)."""
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0, however low the temperature
    logits, tokens = logits.sort(dim=-1, descending=True)
    logits[:, top_k:] = -torch.inf
    p = logits.softmax(dim=-1)
    p[p.cumsum(dim=-1) - p >= top_p] = 0  # what stands before a token is enough; the first always stays
    return torch.zeros_like(p).scatter(1, tokens, p / p.sum(dim=-1, keepdim=True))


@torch.no_grad()
def generate(model, prompt, samples, new_tokens, seed=1337, temperature=1.0, top_k=50, top_p=1.0):
    """Yields the next token of each sample, (samples,), up to new_tokens times or until all have ended.

    prompt is a list of token ids. Temperature 0 takes the likeliest token. After <|endoftext|> a sample has only that.
    """
    device, config, end = model.lm_head.weight.device, model.config, 50256
    positions, head_size = len(prompt) + new_tokens, config.n_embd // config.n_head
    caches = torch.empty((config.n_layer, 2, samples, config.n_head, positions, head_size), device=device)
    generator = torch.Generator().manual_seed(seed)
    idx, start = torch.tensor(prompt, device=device).repeat(samples, 1), 0
    ended = torch.zeros(samples, dtype=torch.bool, device=device)
    for _ in range(new_tokens):
        logits = next_logits(model, idx, caches, start)
        if temperature == 0:
            tokens = logits.argmax(dim=-1)
        else:  # drawn on the CPU: a seed has the same text on every device, up to rounding
            p = probabilities(logits, temperature, top_k, top_p)
            tokens = torch.multinomial(p.cpu(), 1, generator=generator).squeeze(1).to(device)
        tokens[ended] = end
        ended |= tokens == end
        yield tokens
        if ended.all():
            return
        idx, start = tokens.unsqueeze(1), start + idx.size(1)


def main():
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("model", help="a checkpoint, a folder of them, or GPT-2 weights in Hugging Face format")
    parser.add_argument("--prompt", default="Hello, I'm a language model,", help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens, default 100")
    parser.add_argument("--samples", type=int, default=1, help="default 1")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1; 0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="only the k likeliest tokens, default 50")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest that reach p together, default 1")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", default=accelerator, help=f"default {accelerator}")
    args = parser.parse_args()
    if min(args.tokens, args.samples, args.top_k) < 1 or not 0 <= args.seed < 2**64:
        parser.error("--seed must be 0 to 2**64 - 1; --tokens, --samples and --top-k at least 1")
    if not (args.temperature >= 0 and 0 < args.top_p <= 1):
        parser.error("--temperature must be at least 0, --top-p above 0 and at most 1")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "tokenizer"))
    encoding = tiktoken.get_encoding("gpt2")
    prompt = encoding.encode_ordinary(args.prompt) or [encoding.eot_token]
    try:
        model = load_model(args.model)
    except ValueError as error:
        parser.error(str(error))
    if len(prompt) + args.tokens > model.config.block_size:
        positions = f"the model's {model.config.block_size} positions"
        parser.error(
            f"--prompt has {len(prompt)} tokens: with {args.tokens} new ones, --tokens, it is over {positions}"
        )
    try:
        model.to(args.device)
    except (AssertionError, RuntimeError) as error:  # torch's way to say that there is no such device
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    sys.stdout.reconfigure(errors="replace")
    rows, decoder = [[] for _ in range(args.samples)], codecs.getincrementaldecoder("utf-8")("replace")
    print(args.prompt, end="", flush=True)
    options = args.seed, args.temperature, args.top_k, args.top_p
    try:
        for tokens in generate(model, prompt, args.samples, args.tokens, *options):
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if encoding.eot_token not in row:
                    row.append(token)
            if rows[0][-1] != encoding.eot_token:  # a character may take several tokens
                print(decoder.decode(encoding.decode_single_token_bytes(tokens[0].item())), end="", flush=True)
    except RuntimeError as error:
        if any(s in str(error) for s in ("out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory")):
            sys.exit(f"{parser.prog}: error: out of memory: lower --samples or --tokens")
        raise
    print(decoder.decode(b"", final=True))
    for row in rows[1:]:
        print(f"\n{args.prompt}{encoding.decode([token for token in row if token != encoding.eot_token])}")


if __name__ == "__main__":
    main()
