"""Rung 09, learning-rate schedule (quality): a linear warm-up to twice rung 08's rate, then a cosine decay.

In the first steps, AdamW's moments are noisy because they cover few gradients. The learning rate therefore starts low
and rises over 10 steps. The warm-up allows a peak of 6e-4 instead of 3e-4. The cosine then lowers the rate to a tenth
of the peak. Smaller updates reduce the effect of gradient noise. A lower loss may be due to the rate or the schedule.

When it does not help: the change does not reduce the step time. The rate and thus a step's loss depend on --steps.

    make diff-09    shows what this file changes
"""

import argparse
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024  # maximum sequence length, in tokens
    vocab_size: int = 50304  # 256 bytes, 50,000 merges, <|endoftext|>, and 47 unused ids to reach a multiple of 128
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # C in the shapes below; B is the batch size, T is the sequence length


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token attends to later tokens (Vaswani et al. 2017). (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # one matmul computes query, key and value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, n_head, T, head_size) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, n_head, T, head_size)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers with GPT-2's tanh approximation of GELU between them. (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP. Each reads a normalized copy of the residual stream and adds its output to the stream."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019) without dropout, with the parameter names of the Hugging Face checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)  # token embeddings
        self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)  # position embeddings
        self.transformer.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter; its gradients from both layers are summed
        self.apply(self._init_weights)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith("c_proj.weight"):  # in attention and in the MLP; both write to the residual stream
                    p /= math.sqrt(2 * config.n_layer)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """Map token ids (B, T) to logits (B, T, vocab_size) or, with targets (B, T), to mean cross-entropy in nats."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))  # (B, T, vocab_size)
        return logits if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, lr):
        """Return AdamW with GPT-3's values: weight decay on matrices (2-D), none on biases and LayerNorm weights."""
        decay = {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        no_decay = {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([decay, no_decay], lr=lr, betas=(0.9, 0.95), eps=1e-8)

    @classmethod
    def from_pretrained(cls, source):
        """Load GPT-2 weights in Hugging Face format from a folder or the hub. Raises UserError if they do not fit."""
        os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
        from transformers import GPT2Config, GPT2LMHeadModel

        hf, info = GPT2LMHeadModel.from_pretrained(source, output_loading_info=True)
        c, gpt2 = hf.config, GPT2Config(n_inner=hf.config.n_inner and 4 * hf.config.n_embd).to_dict()  # GPT-2's values
        fixed = ("vocab_size", "n_positions", "n_inner", "activation", "layer_norm", "tie_word", "scale_", "add_cross")
        differ = [f"{k} is {v}" for k, v in c.to_dict().items() if k.startswith(fixed) and v != gpt2.get(k)]
        if problems := differ + [f"{n} is missing" for n in info["missing_keys"]]:
            raise UserError(f"{source}: not GPT-2: {problems[0]}")
        state = {n: w.t() if ".h." in n and w.dim() == 2 else w for n, w in hf.state_dict().items()}  # were (in, out)
        wte = state["transformer.wte.weight"]  # pad with the mean: GPT-2's logits are negative, so 0 would win
        padding = wte.mean(dim=0).expand(GPTConfig.vocab_size - len(wte), -1)
        state["transformer.wte.weight"] = state["lm_head.weight"] = torch.cat([wte, padding])
        model = cls(GPTConfig(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd))
        model.load_state_dict(state)
        return model


MODELS = {  # with the parameter counts from rung 01 on
    "gpt2": GPTConfig(),  # 124M parameters
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "nano": GPTConfig(n_layer=4, n_head=4, n_embd=128),  # small enough for a CPU
}
ROOT = next((p for p in Path(__file__).resolve().parents if (p / "tokenizer").is_dir()), Path())  # repository folder


class DataLoaderLite:
    """Endless consecutive batches from a UTF-8 text. Raises UserError if the text is unreadable or too short."""

    def __init__(self, path, batch_size, seq_len):
        self.B, self.T, self.position = batch_size, seq_len, 0
        os.environ["TIKTOKEN_CACHE_DIR"] = str(ROOT / "tokenizer")  # otherwise, tiktoken downloads the vocabulary
        try:
            text = Path(path).read_bytes().decode("utf-8")
            self.tokens = tiktoken.get_encoding("gpt2").encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except (OSError, ValueError) as error:  # not a file, not UTF-8, or a text that tiktoken cannot split
            raise UserError(f"{path}: {error}") from None
        if (most := max(len(self.tokens) - 1, 0) // self.T) < self.B:
            raise UserError(f"{path}: {len(self.tokens)} tokens allow --batch-size {most} at most, with T {self.T}")

    def next_batch(self):
        """Return x and y, both (B, T) and int64, on the CPU. y contains the token that follows each token of x."""
        if self.position + self.B * self.T + 1 > len(self.tokens):
            self.position = 0
        tokens = torch.from_numpy(self.tokens[self.position : self.position + self.B * self.T + 1].astype(np.int64))
        self.position += self.B * self.T
        return tokens[:-1].view(self.B, self.T), tokens[1:].view(self.B, self.T)


def get_lr(step, steps, max_lr=6e-4, warmup_steps=10):
    """Return a step's learning rate: linear warm-up, then cosine decay (Loshchilov & Hutter 2017) to max_lr / 10."""
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps  # + 1, because step 0 with a rate of 0 would change nothing
    progress = (step - warmup_steps) / (steps - warmup_steps)  # from 0 to just under 1
    return max_lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def main():
    args = parse_args()
    device, B, T = torch.device(args.device), args.batch_size, args.seq_len
    torch.use_deterministic_algorithms(device.type == "cpu")  # makes losses repeatable on a CPU; would be slow on a GPU
    torch.manual_seed(args.seed)
    model = GPT.from_pretrained(args.init_from) if args.init_from else GPT(MODELS[args.model])
    loader = DataLoaderLite(args.data, B, T)
    print_header(args, model, loader)
    ampere_or_later = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.set_float32_matmul_precision("high" if ampere_or_later else "highest")  # "high" is TF32, "highest" is float32
    if not ampere_or_later:
        print("no TF32 here: this script uses it on NVIDIA GPUs with compute capability 8.0 or later")
    use_bf16 = ampere_or_later or (device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False))
    if not use_bf16:
        print("no bf16 here: this script uses it on NVIDIA GPUs from compute capability 8.0 and CPUs with AVX512_BF16")

    model.to(device)
    model.compile(mode=args.compile_mode)  # like torch.compile(model), but in place; compilation happens in step 0
    print("compiling: the first step takes 20 to 35 s on an H200, 25 to 60 s on two CPU cores", flush=True)
    optimizer = model.configure_optimizers(lr=0.0)  # the loop sets the learning rate
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda device: None  # no-op on a CPU
    times = []  # seconds per step
    try:
        for step in range(args.steps):
            synchronize(device)
            start = time.perf_counter()
            x, y = (t.to(device) for t in loader.next_batch())
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                loss = model(x, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
            lr = get_lr(step, args.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            synchronize(device)  # Python only queues the GPU's work; the timer would otherwise stop too early
            times.append(time.perf_counter() - start)
            print(f"step {step:4d} | loss {loss.item():.6f} | lr {lr:.4e} | norm {norm:.4f}", end=" | ")
            print(f"dt {1000 * times[-1]:8.2f} ms | {B * T / times[-1]:10,.0f} tok/s", flush=True)
            if not math.isfinite(loss.item()):
                raise UserError(f"the loss is not finite at step {step}")
    finally:  # runs after Ctrl-C as well
        print_summary(times, B * T, device)


# From here on: arguments, printing and errors.


def parse_args():
    """Parse the command line; some defaults depend on the device. Exits with a one-line error for a bad argument."""
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    devices = sorted({"cpu", accelerator, *(f"{accelerator}:{i}" for i in range(torch.accelerator.device_count()))})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)  # short errors
    parser.add_argument("--model", choices=MODELS, help="default gpt2; nano on a CPU")
    parser.add_argument("--init-from", metavar="NAME_OR_DIR", help="Hugging Face GPT-2 weights, instead of --model")
    parser.add_argument("--batch-size", type=int, default=4, help="B, sequences per batch, default 4")
    parser.add_argument("--seq-len", type=int, help="T, tokens per sequence, default 1024; 128 with nano")
    parser.add_argument("--steps", type=int, default=50, help="default 50")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", choices=devices, default=accelerator, help=f"default {accelerator}")
    parser.add_argument("--data", default=ROOT / "input.txt", help="UTF-8 text, default input.txt")
    parser.add_argument("--compile-mode", choices=["default", "reduce-overhead", "max-autotune"], default="default")
    args = parser.parse_args()
    args.model = None if args.init_from else args.model or ("nano" if args.device == "cpu" else "gpt2")
    args.seq_len = args.seq_len or (128 if args.model == "nano" else 1024)
    if min(args.batch_size, args.steps, args.seq_len) < 1 or args.seq_len > 1024:
        parser.error("need at least 1 for --batch-size, --steps and --seq-len, and at most 1024 for --seq-len")
    return args


def print_header(args, model, loader):
    """Print the device, the model, the batch size and the length of the text."""
    if (args.model, args.device) == ("nano", "cpu"):
        print("nano (4 layers, hidden size 128) is the default model on a CPU; --model gpt2 trains GPT-2")
    chip = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else platform.machine()
    about = f"{args.init_from or args.model} {sum(p.numel() for p in model.parameters()):,} parameters"
    print(f"device {args.device} ({chip}) | torch {torch.__version__} | {about} | B {loader.B} T {loader.T}")
    print(f"loaded {len(loader.tokens)} tokens\n1 epoch = {(len(loader.tokens) - 1) // (loader.B * loader.T)} batches")


def print_summary(times, tokens_per_step, device):
    """Print the median step time, tokens per second and, on CUDA, PyTorch's peak allocated memory."""
    if times:
        first = 10 if len(times) >= 20 else len(times) // 2  # exclude warm-up
        median = np.median(times[first:])
        print(f"median of steps {first}-{len(times) - 1}: {1000 * median:.2f} ms", end=", ")
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        print(f"{tokens_per_step / median:,.0f} tok/s" + (f", peak memory {peak:.2f} GiB" if peak else ""), flush=True)


class UserError(ValueError):
    """An error that the user can fix. The script prints its message on one line, without a traceback."""


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError, RuntimeError, KeyboardInterrupt) as error:  # Ctrl-C has no text
        if isinstance(error, RuntimeError) and type(error).__name__ not in ("OutOfMemoryError", "InductorError"):
            raise  # a bug; these two are for a lack of memory and, from rung 05 on, of a C++ compiler
        why = "out of memory: lower --batch-size or --seq-len" if isinstance(error, torch.OutOfMemoryError) else error
        sys.exit(f"{Path(__file__).name}: error: {str(why).splitlines()[0]}" if str(error) else 1)
