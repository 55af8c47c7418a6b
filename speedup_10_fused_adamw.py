"""Speed-up 10, fused AdamW: one kernel updates many tensors, and only matrices decay.

AdamW as it comes runs a kernel per operation of its formula, over many tensors at a time; each kernel is a trip
through memory. fused=True does the whole formula in one: every number is read once and written once. Weight decay 0.1
now acts on the matrices and embeddings alone; pulling biases and LayerNorm gains to zero regularises nothing.

    git diff --no-index --word-diff speedup_09_cosine_lr.py speedup_10_fused_adamw.py
"""

import argparse
import math
import os
import platform
import signal
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
    block_size: int = 1024  # longest sequence, in tokens
    vocab_size: int = 50304  # 256 bytes, 50,000 merges, <|endoftext|>, and 47 rows up to a multiple of 128
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token sees a later one (Vaswani et al. 2017). (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, n_head, T, head_size) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, n_head, T, head_size)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers around a GELU, in the tanh form that GPT-2 was trained with. (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then MLP: each reads a normalised copy of the residual stream and adds to it."""

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
    """GPT-2 (Radford et al. 2019) without dropout, its parameters named as in the Hugging Face checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)  # of tokens
        self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)  # of positions
        self.transformer.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.transformer.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter: both gradients add up in it
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # attention's and the MLP's: both end in the residual stream
                p.data /= math.sqrt(2 * config.n_layer)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size) or, given targets (B, T), the mean cross-entropy in nats."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))  # (B, T, vocab_size)
        return logits if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        """Fused AdamW in two groups: matrices and embeddings decay, biases and LayerNorm parameters do not."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)

    @classmethod
    def from_pretrained(cls, name_or_dir):
        """Weights in Hugging Face format, from a folder or the hub. Raises ValueError for weights not GPT-2's."""
        os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
        from transformers import GPT2LMHeadModel

        hf, info = GPT2LMHeadModel.from_pretrained(name_or_dir, output_loading_info=True, ignore_mismatched_sizes=True)
        if info["missing_keys"] or info["mismatched_keys"] or not hf.config.tie_word_embeddings:
            raise ValueError("not GPT-2: a parameter is missing or of another shape, or the head is not tied")
        conv1d = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # stored (in, out); nn.Linear wants (out, in)
        state = {name: w.t() if name.endswith(conv1d) else w for name, w in hf.state_dict().items()}
        for name in ("transformer.wte.weight", "lm_head.weight"):  # pad by their mean: zeros would outscore GPT-2
            padding = state[name].mean(dim=0).expand(GPTConfig.vocab_size - 50257, -1)
            state[name] = torch.cat([state[name], padding])
        c = hf.config
        model = cls(GPTConfig(c.n_positions, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd))
        model.load_state_dict(state)
        return model


MODELS = {
    "gpt2": GPTConfig(),  # 124M parameters
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "nano": GPTConfig(n_layer=4, n_head=4, n_embd=128),  # for a CPU
}


class DataLoaderLite:
    """Consecutive batches of a UTF-8 text, tokenized once. Raises ValueError if it is no text, or under one batch."""

    def __init__(self, path, batch_size, seq_len):
        self.B, self.T, self.position = batch_size, seq_len, 0
        text = Path(path).read_bytes().decode("utf-8")
        if "\0" in text:
            raise ValueError("it holds NUL bytes: is it binary, or UTF-16?")
        # GPT-2's vocabulary is beside this script: without it, or a folder that you set, tiktoken would download it
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parent / "tokenizer"))
        self.tokens = np.array(tiktoken.get_encoding("gpt2").encode_ordinary(text), dtype=np.uint16)
        need = self.B * self.T + 1
        if len(self.tokens) < need:
            raise ValueError(f"{len(self.tokens)} tokens, but B {self.B} and T {self.T} need {need}")

    def next_batch(self):
        """x and y, int64, (B, T) each, on the CPU. y is x shifted by one."""
        if self.position + self.B * self.T + 1 > len(self.tokens):
            self.position = 0
        tokens = torch.from_numpy(self.tokens[self.position : self.position + self.B * self.T + 1].astype(np.int64))
        self.position += self.B * self.T
        return tokens[:-1].view(self.B, self.T), tokens[1:].view(self.B, self.T)


def get_lr(step, steps, max_lr=6e-4, warmup_steps=10):
    """The learning rate at a step: linear warm-up, then a cosine (Loshchilov & Hutter 2017) to a tenth at `steps`."""
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)  # 0 to 1
    return max_lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def peak_memory(device):
    """Bytes: on a GPU the most that its allocator gave out, elsewhere the most that the process held."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).max_memory_allocated(device)
    if sys.platform == "win32":
        return math.nan  # nobody counts
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main():
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    devices = {"cpu", accelerator} | {f"{accelerator}:{i}" for i in range(torch.accelerator.device_count())}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)  # one-line errors
    parser.add_argument("--model", choices=MODELS, help="default gpt2; nano on a CPU")
    parser.add_argument("--batch-size", type=int, default=4, help="B, sequences, default 4")
    parser.add_argument("--seq-len", type=int, help="T, tokens per sequence, default 1024; 128 with nano")
    parser.add_argument("--steps", type=int, default=50, help="default 50")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", choices=sorted(devices), default=accelerator, help=f"default {accelerator}")
    parser.add_argument("--data", default=Path(__file__).with_name("input.txt"), help="UTF-8 text, default input.txt")
    parser.add_argument("--init-from", metavar="NAME_OR_DIR", help="GPT-2 weights in Hugging Face format")
    parser.add_argument("--compile-mode", choices=["default", "reduce-overhead", "max-autotune"], default="default")
    args = parser.parse_args()
    sizes = args.batch_size, args.seq_len, args.steps
    if any(n is not None and n < 1 for n in sizes) or not 0 <= args.seed < 2**64:
        parser.error("--batch-size, --seq-len and --steps must be at least 1, --seed 0 to 2**64 - 1")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C: no traceback, and the summary below is printed

    device = torch.device(args.device)
    if device.type == "cpu" and not args.model and not args.init_from:
        print("on a CPU the model is nano, 4 layers 128 wide, at T 128 (--model gpt2 trains GPT-2 all the same)")
        args.model = "nano"
    torch.utils.deterministic.fill_uninitialized_memory = False  # the next line would fill it with NaN: that costs time
    torch.use_deterministic_algorithms(device.type == "cpu")  # one seed, one curve; on a GPU it would cost speed
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        torch.set_float32_matmul_precision("high")
    else:
        print("no TF32 here: it takes an NVIDIA GPU of compute capability 8.0 or later")
    use_bf16 = device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    if device.type == "cuda":
        use_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if not use_bf16:
        print("no bf16 here: it takes compute capability 8.0 or later, or AVX-512 on a CPU; older hardware emulates it")
    torch.manual_seed(args.seed)
    if args.init_from:
        try:
            model = GPT.from_pretrained(args.init_from)
            if args.model and model.config != MODELS[args.model]:
                raise ValueError(f"its shape is not that of --model {args.model}")
        except Exception as error:  # the hub, the files and the library raise a dozen kinds
            parser.error(f"--init-from {args.init_from}: {' '.join(str(error).split())}")
    else:
        model = GPT(MODELS[args.model or "gpt2"])
    B, T = args.batch_size, args.seq_len or (128 if model.config == MODELS["nano"] else model.config.block_size)
    if T > model.config.block_size:
        parser.error(f"--seq-len {T} is more than the model's {model.config.block_size} positions")
    try:
        loader = DataLoaderLite(args.data, B, T)
    except (OSError, ValueError) as error:
        parser.error(f"--data {args.data}: {error}")

    module = torch.get_device_module(device)
    chip = module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()
    name, size = args.init_from or args.model or "gpt2", sum(p.numel() for p in model.parameters())
    print(f"device {device} ({chip}) | torch {torch.__version__} | {name} {size:,} parameters | B {B} T {T}")
    print(f"loaded {len(loader.tokens)} tokens\n1 epoch = {(len(loader.tokens) - 1) // (B * T)} batches")

    # Python only queues the GPU's work: a clock that does not wait for it reads how fast it is queued
    synchronize = torch.cpu.synchronize if device.type == "cpu" else torch.accelerator.synchronize
    times = []  # seconds per step
    try:
        model.to(device)
        model.compile(mode=args.compile_mode)
        optimizer = model.configure_optimizers()
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
            synchronize(device)
            times.append(time.perf_counter() - start)
            print(f"step {step:4d} | loss {loss.item():.6f} | lr {lr:.4e} | norm {norm:.4f}", end=" | ")
            print(f"dt {1000 * times[-1]:8.2f} ms | {B * T / times[-1]:10,.0f} tok/s", flush=True)
            if not math.isfinite(loss.item()):
                sys.exit(f"{parser.prog}: error: the loss is not finite at step {step}")
    except RuntimeError as error:
        if any(s in str(error) for s in ("out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory")):
            sys.exit(f"{parser.prog}: error: out of memory with B {B} and T {T}: lower --batch-size or --seq-len")
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            sys.exit(f"{parser.prog}: error: torch.compile failed: {' '.join(str(error).split())[:200]}")
        raise
    finally:
        if times:
            first = 10 if len(times) >= 20 else len(times) // 2  # leave out compilation, allocator, autotuning
            median = float(np.median(times[first:]))
            print(f"median of steps {first}-{len(times) - 1}: {1000 * median:.2f} ms", end=", ")
            print(f"{B * T / median:,.0f} tok/s, peak memory {peak_memory(device) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
