"""Pre-training: ddp_run.py on shards of tokens, with validation, samples and HellaSwag along the way.

All three stay inside torch.compile and are shared by the ranks, because each is a forward pass of one fixed shape:
shorter inputs are padded, and no token sees a later one. The defaults are the recipe of GPT-2 124M on 10B tokens.

When it does not help: to measure speed. An evaluation takes time that no printed step shows.

    torchrun --standalone --nproc_per_node=8 pretrain/train.py --batch-size 64 --checkpoint-dir runs/gpt2 --resume
    make diff-train    shows what this file changes
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from fineweb import Shard
from hellaswag import count_right, read_examples
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


@dataclass
class GPTConfig:
    block_size: int = 1024  # longest sequence, in tokens
    vocab_size: int = 50304  # 256 bytes, 50,000 merges, <|endoftext|>, and 47 unused, up to a multiple of 128
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which no token sees a later one (Vaswani et al. 2017). (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value from one matmul
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
    """Attention, then MLP: each reads a normalized copy of the residual stream and adds to it."""

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
        self.transformer.wte = nn.Embedding(config.vocab_size, config.n_embd)  # token embeddings
        self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)  # position embeddings
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
        """Fused AdamW. Only matrices (2-D) decay; biases and LayerNorm parameters (1-D) do not. The loop sets lr."""
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @classmethod
    def from_pretrained(cls, source):
        """Load GPT-2 in Hugging Face format, from a folder or from the hub. Raises UserError for any other model."""
        os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
        try:
            from transformers import GPT2LMHeadModel

            hf, info = GPT2LMHeadModel.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True)
        except Exception as error:  # transformers, safetensors and the hub each raise their own kinds
            hub = "" if "Repo id" in str(error) else f", and loading from the Hugging Face hub failed: {error}"
            raise UserError(f"{source}: {error if Path(source).exists() else 'no such folder' + hub}") from None
        c, bad_keys = hf.config, (info["missing_keys"] or info["mismatched_keys"])
        found = c.vocab_size, c.n_positions, c.n_inner or 4 * c.n_embd, c.activation_function, c.layer_norm_epsilon
        found += c.tie_word_embeddings, c.scale_attn_weights, c.add_cross_attention, c.scale_attn_by_inverse_layer_idx
        if bad_keys or found != (50257, 1024, 4 * c.n_embd, "gelu_new", 1e-5, True, True, False, False):
            raise UserError(f"{source}: not GPT-2 (50257 tokens, 1024 positions, tied head, tanh GELU)")
        conv1d = ("c_attn.weight", "c_fc.weight", "c_proj.weight")  # stored (in, out); nn.Linear wants (out, in)
        state = {name: w.t() if name.endswith(conv1d) else w for name, w in hf.state_dict().items()}
        wte = state["transformer.wte.weight"]  # the new rows are its mean: zeros would beat GPT-2's negative logits
        padding = wte.mean(dim=0).expand(GPTConfig.vocab_size - len(wte), -1)
        state["transformer.wte.weight"] = state["lm_head.weight"] = torch.cat([wte, padding])
        model = cls(GPTConfig(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd))
        model.load_state_dict(state)
        return model


MODELS = {  # parameters are counted with a tied head (rung 01)
    "gpt2": GPTConfig(),  # 124M parameters
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "nano": GPTConfig(n_layer=4, n_head=4, n_embd=128),  # for a CPU
}


class DataLoaderLite:
    """Endless batches of shards (fineweb.py) or of a UTF-8 text. Raises UserError if it is neither, or too short."""

    def __init__(self, path, batch_size, seq_len, rank=0, world_size=1, seed=1337):
        self.B, self.T, self.position = batch_size, seq_len, batch_size * seq_len * rank
        self.rank, self.world_size = rank, world_size  # the ranks take turns: each reads every world_size-th batch
        self.seed = seed
        tokenizer = Path(__file__).resolve().parent / "tokenizer"  # GPT-2's vocabulary, or tiktoken would download it
        if not tokenizer.is_dir() and "TIKTOKEN_CACHE_DIR" not in os.environ:
            raise UserError(f"there is no {tokenizer}: copy the folder tokenizer/ together with this script")
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(tokenizer))
        self.encoding = tiktoken.get_encoding("gpt2")
        if Path(path).is_dir():
            shards = [Shard(file) for file in sorted(Path(path).glob("*.bin"))]
            self.validation, self.shards = shards[0] if shards else [], shards[1:]
        else:
            try:
                text = Path(path).read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: {error} (pretrain/fineweb.py makes shards)") from None
            tokens = np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)
            self.validation, self.shards = tokens[len(tokens) * 9 // 10 :], [tokens[: len(tokens) * 9 // 10]]
        self.size = sum(len(shard) for shard in self.shards)
        need = self.B * self.T * self.world_size + 1
        if self.size < need:
            sizes = f"B {self.B}, T {self.T}, {world_size} ranks"
            raise UserError(f"{path}: {self.size} tokens, but {sizes} need {need}")
        if len(self.validation) < self.T + 1:
            raise UserError(f"{path}: {len(self.validation)} tokens for validation, T {self.T} needs {self.T + 1}")

    def read(self, start, n):
        """n tokens of an endless stream, from a place in it: in each epoch all shards, in an order of its own. (n,)

        Raises ValueError for a damaged shard.
        """
        epoch, start = divmod(start, self.size)
        pieces = []
        for i in np.random.default_rng((self.seed, epoch)).permutation(len(self.shards)):
            if start < len(self.shards[i]) and n:
                pieces.append(self.shards[i][start : start + n])
                n -= len(pieces[-1])
            start = max(0, start - len(self.shards[i]))
        return np.concatenate([*pieces, self.read((epoch + 1) * self.size, n)] if n else pieces)

    def next_batch(self):
        """x and y, int64, (B, T) each, on the CPU. y holds the token that follows each token of x."""
        tokens = torch.from_numpy(self.read(self.position, self.B * self.T + 1).astype(np.int64))
        self.position += self.B * self.T * self.world_size
        return tokens[:-1].view(self.B, self.T), tokens[1:].view(self.B, self.T)


def validate(model, loader, device, limit):
    """This rank's share of the first `limit` tokens held out: the sum of their cross-entropies, and their number."""
    B, T, total, count = loader.B, loader.T, 0.0, 0
    sequences = min(len(loader.validation) - 1, limit) // T
    for first in range(loader.rank * B, sequences, loader.world_size * B):
        rows = min(B, sequences - first)
        tokens = torch.from_numpy(loader.validation[first * T : (first + rows) * T + 1].astype(np.int64))
        x, y = torch.zeros((B, T), dtype=torch.int64), torch.full((B, T), -100)  # cross_entropy's ignore_index
        x[:rows], y[:rows] = tokens[:-1].view(rows, T), tokens[1:].view(rows, T)
        loss = model(x.to(device), y.to(device)).item()  # the mean over the targets that count
        total, count = total + loss * rows * T, count + rows * T
    return total, count


def generate(model, prompt, seed, device):
    """32 tokens after the token ids of a prompt, by top-k sampling with k = 50. -> (T,), the prompt included"""
    idx = torch.tensor([prompt + [0] * 32])  # (1, T), one shape throughout
    generator = torch.Generator().manual_seed(seed % 2**64)
    for i in range(len(prompt), idx.size(1)):
        logits = model(idx.to(device))[0, i - 1, :50257]  # (vocab_size,): the zeros from i on are not seen
        weights, tokens = (t.cpu() for t in logits.float().softmax(dim=-1).topk(50))
        idx[0, i] = tokens[torch.multinomial(weights, 1, generator=generator)]
    return idx[0]


@torch.no_grad()
def evaluate(model, loader, examples, prompt, seed, device, limit):
    """All ranks together: the validation loss, HellaSwag's acc_norm (None without examples) and four samples."""
    rank, world_size = loader.rank, loader.world_size
    sums = validate(model, loader, device, limit)
    right = count_right(model, examples, loader.B * loader.T, device, rank, world_size)[1:]
    texts = [generate(model, prompt, seed + i, device).tolist() for i in range(rank, 4, world_size)]
    parts = [(*sums, *right, [loader.encoding.decode(text) for text in texts])]
    if world_size > 1:
        mine, parts = parts[0], [None] * world_size
        dist.all_gather_object(parts, mine)
    losses, counts, right, seen, samples = zip(*parts, strict=True)
    samples = [samples[i % world_size][i // world_size] for i in range(4)]
    return sum(losses) / sum(counts), sum(right) / sum(seen) if examples else None, samples


def get_lr(step, steps, max_lr=6e-4, warmup_steps=715):
    """The learning rate at a step: linear warm-up, then a cosine (Loshchilov & Hutter 2017) to a tenth at `steps`."""
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps  # + 1, or step 0 would change nothing
    progress = (step - warmup_steps) / (steps - warmup_steps)  # from 0 to just under 1
    return max_lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def parse_args():
    """The command line, with the defaults for this machine. A wrong argument ends the script with one line."""
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    devices = {"cpu", accelerator} | {f"{accelerator}:{i}" for i in range(torch.accelerator.device_count())}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)  # keeps errors short
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", choices=MODELS, help="default gpt2; nano on a CPU")
    weights.add_argument("--init-from", metavar="NAME_OR_DIR", help="GPT-2 weights in Hugging Face format")
    parser.add_argument("--batch-size", type=int, default=4, help="B, sequences, default 4")
    parser.add_argument("--seq-len", type=int, help="T, tokens per sequence, default 1024; 128 with nano")
    parser.add_argument("--steps", type=int, default=19073, help="default 19073: 10B tokens")
    parser.add_argument("--seed", type=int, default=1337, help="default 1337")
    parser.add_argument("--device", default=accelerator, help=f"default {accelerator}")
    parser.add_argument("--data", default=Path(__file__).with_name("fineweb10B"), help="shards or text, fineweb10B")
    parser.add_argument("--compile-mode", choices=["default", "reduce-overhead", "max-autotune"], default="default")
    parser.add_argument("--total-batch-size", type=int, help="tokens per step, default 524288; 4096 with nano")
    parser.add_argument("--checkpoint-dir", metavar="DIR", type=Path, help="folder to save in; without it, no saving")
    parser.add_argument("--save-every", metavar="N", type=int, default=250, help="steps, and at the end; default 250")
    parser.add_argument("--keep", metavar="K", type=int, default=2, help="the newest checkpoints, default 2")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--log", "--log-file", metavar="FILE.jsonl", help="append a JSON record per step")
    parser.add_argument("--warmup-steps", metavar="N", type=int, default=715, help="default 715")
    parser.add_argument("--eval-every", metavar="N", type=int, default=250, help="steps, and at the end; default 250")
    parser.add_argument("--prompt", default="Hello, I'm a language model,", help="what the samples begin with")
    parser.add_argument("--hellaswag", metavar="FILE.jsonl", help="or its name on the hub, Rowan/hellaswag")
    parser.add_argument("--tensorboard", metavar="DIR", help="folder for TensorBoard's event files")
    args = parser.parse_args()
    if args.device not in devices:
        found = f"PyTorch {torch.__version__} finds only {', '.join(sorted(devices))}"
        parser.error(f"--device {args.device}: {found}; to use a GPU, install its driver and a PyTorch build for it")
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    args.ddp = bool({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys())  # torchrun sets them in each process
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.ddp and args.device != "cpu":
        if args.device != accelerator:
            parser.error(f"--device {args.device}: CUDA_VISIBLE_DEVICES tells torchrun which GPUs to take")
        args.device = f"{accelerator}:{os.environ.get('LOCAL_RANK', args.rank)}"
        if args.device not in devices:
            parser.error(f"there is no {args.device} for rank {args.rank}: lower --nproc_per_node")
    if not args.init_from and not args.model:
        args.model = "nano" if args.device == "cpu" else "gpt2"
    if args.seq_len is None:
        args.seq_len = 128 if args.model == "nano" else 1024
    if args.total_batch_size is None:
        args.total_batch_size = 4096 if args.model == "nano" else 524288
    sizes = args.batch_size, args.steps, args.total_batch_size, args.save_every, args.keep
    sizes += args.warmup_steps, args.eval_every
    if min(sizes) < 1 or not 1 <= args.seq_len <= 1024 or not 0 <= args.seed < 2**64:
        parser.error("--seq-len must be 1 to 1024, --seed 0 to 2**64 - 1, every other number at least 1")
    if args.total_batch_size % (args.batch_size * args.seq_len * args.world_size):
        micro_step = f"B {args.batch_size} * T {args.seq_len} * {args.world_size} ranks"
        parser.error(f"--total-batch-size {args.total_batch_size} is no multiple of {micro_step}")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        parser.error("--tensorboard: it takes pip install tensorboard")
    return args


def main():
    args = parse_args()
    ddp, rank, world_size = args.ddp, args.rank, args.world_size
    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w")  # rank 0 alone prints
    device, B, T, total = torch.device(args.device), args.batch_size, args.seq_len, args.total_batch_size
    accumulation = total // (B * T * world_size)  # micro-steps per step
    torch.use_deterministic_algorithms(device.type == "cpu")  # the same seed repeats the losses; slow on a GPU
    ampere_or_later = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.set_float32_matmul_precision("high" if ampere_or_later else "highest")  # TF32, or plain float32
    if not ampere_or_later:
        print("no TF32 here: this script uses it on NVIDIA GPUs of compute capability 8.0 or later")
    use_bf16 = ampere_or_later or (device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512")
    if not use_bf16:
        print("no bf16 here: this script uses it on NVIDIA GPUs of compute capability 8.0 or later, and with AVX-512")

    torch.manual_seed(args.seed)
    model = GPT.from_pretrained(args.init_from) if args.init_from else GPT(MODELS[args.model])
    loader = DataLoaderLite(args.data, B, T, rank, world_size, args.seed)
    try:
        examples = read_examples(args.hellaswag) if args.hellaswag else []
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"--hellaswag {args.hellaswag}: {error}") from None
    prompt = loader.encoding.encode_ordinary(args.prompt) or [loader.encoding.eot_token]
    if len(prompt) + 32 > model.config.block_size:
        raise UserError(f"--prompt: {len(prompt)} tokens and 32 new ones are over {model.config.block_size} positions")
    print_header(args, model, loader)
    module = torch.get_device_module(device)
    if ddp:
        module.set_device(device)
        dist.init_process_group(dist.get_default_backend_for_device(device))
    model.to(device)
    mode = args.compile_mode if accumulation == 1 else "default"  # CUDA graphs cannot accumulate
    model.compile(mode=mode, dynamic=False)  # else an evaluation would change the graph that training runs
    limit = max(20 * total, 2**17)  # tokens to validate on: 10,485,760 in the recipe
    raw_model = model  # validation, samples and HellaSwag have no gradients to send
    print("compiling: the first step takes about a minute", flush=True)
    optimizer = model.configure_optimizers()
    task = {"--model": str(model.config), "--seq-len": T, "--total-batch-size": total, "--data": loader.size}
    task |= {"--seed": args.seed, "--warmup-steps": args.warmup_steps}  # the seed orders the shards
    folder, saved, signals = args.checkpoint_dir, {"step": 0, "task": task}, []
    begun = args.resume and (folder / "unfinished.tmp").exists()  # a run here was killed: its log may be ahead
    saved = (folder and load_checkpoint(folder)) or saved
    if not args.resume and (saved["step"] or folder and (folder / "best.pt").exists()):
        raise UserError(f"{folder} has checkpoints: --resume goes on from them, another folder begins anew")
    if other := dict(saved["task"].items() - task.items()):
        raise UserError(f"{folder} has checkpoints of another task, with {other}")
    if ddp:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        dist.all_gather_object(steps := [0] * world_size, saved["step"])
        if len(set(steps)) > 1:
            raise UserError(f"the ranks do not see the same {folder}: they would go on from steps {steps}")
    log = open(args.log if args.log and rank == 0 else os.devnull, "a+", buffering=1, newline="")
    log.seek(0)
    lines = log.readlines()
    if lines and not (saved["args"]["log"] == str(args.log) if saved["step"] else begun):
        raise UserError(f"{args.log} is not the log of this run")
    again = [line for line in lines if not line.endswith("\n") or json.loads(line)["step"] >= saved["step"]]
    if again:  # the steps since the checkpoint
        log.truncate(len("".join(lines)) - len("".join(again)))
    generators = [torch.default_generator, *getattr(module, "default_generators", ())]
    if saved["step"]:
        print(f"going on at step {saved['step']} of {args.steps}, from {folder}")
        set_state_dict(model, optimizer, model_state_dict=saved.pop("model"), optim_state_dict=saved.pop("optim"))
        loader.position = saved["position"] + B * T * rank
        list(map(torch.Generator.set_state, generators, saved["rng"]))  # the CPU's, and those of the GPUs
    best, writer = saved.get("best", math.inf), None
    if args.tensorboard and rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.tensorboard, purge_step=saved["step"] if args.resume else None)
    if folder:
        open(folder / "unfinished.tmp", "wb").close()  # if nothing can be written here, say so now
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: signals.append(number))

    times = []  # seconds per step
    try:
        for step in range(saved["step"], args.steps + 1):
            if step % args.eval_every == 0 or step == args.steps:
                start = time.perf_counter()
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                    val_loss, accuracy, samples = evaluate(
                        raw_model, loader, examples, prompt, args.seed, device, limit
                    )
                print(f"step {step:4d} | val loss {val_loss:.6f}", end=" | ")
                print(f"HellaSwag {accuracy:.4f}" if examples else "no HellaSwag", end=" | ")
                print(f"{time.perf_counter() - start:.1f} s", *map(json.dumps, samples), sep="\n    ", flush=True)
                record = {"step": step, "val_loss": val_loss, "hellaswag": accuracy, "samples": samples}
                print(json.dumps(record), file=log)
                if writer:
                    writer.add_scalar("loss/validation", val_loss, step)
                    writer.add_text("samples", "\n\n".join(samples), step)
                    if examples:
                        writer.add_scalar("HellaSwag", accuracy, step)
                if step and val_loss < best:
                    best = val_loss
                    if folder and rank == 0:
                        keep_best(folder, step)
            if step == args.steps:
                break
            synchronize(device)
            start = time.perf_counter()
            optimizer.zero_grad(set_to_none=not ddp)  # DDP's gradients are views of what it sends
            report = torch.zeros(2, device=device)  # the loss, mean over micro-steps and ranks; signals that came
            for micro_step in range(accumulation):
                x, y = (t.pin_memory() if device.type == "cuda" else t for t in loader.next_batch())
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)  # queued: Python goes on
                with nullcontext() if not ddp or micro_step == accumulation - 1 else model.no_sync():
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                        micro_loss = model(x, y)
                    (micro_loss / accumulation).backward()  # they add up on each rank; the last averages over ranks
                report[0] += micro_loss.detach() / accumulation / world_size
            report[1] = len(signals)
            if ddp:
                dist.all_reduce(report)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
            lr = get_lr(step, args.steps, warmup_steps=args.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            synchronize(device)
            times.append(time.perf_counter() - start)
            loss, stop = report.tolist()
            left = f"{np.median(times[-10:]) * (args.steps - step - 1) / 60:.1f} min left"
            print(f"step {step:4d} | loss {loss:.6f} | lr {lr:.4e} | norm {norm:.4f}", end=" | ")
            print(f"dt {1000 * times[-1]:8.2f} ms | {total / times[-1]:10,.0f} tok/s | {left}", flush=True)
            if writer:
                writer.add_scalar("loss/training", loss, step)
                writer.add_scalar("learning rate", lr, step)
                writer.add_scalar("gradient norm", norm.item(), step)
                writer.add_scalar("tokens per second", total / times[-1], step)
            if not math.isfinite(loss + norm.item()):
                raise UserError(f"the loss or the gradient is not finite at step {step}")
            print(json.dumps({"step": step, "loss": loss, "lr": lr, "norm": norm.item(), "sec": times[-1]}), file=log)
            due = (step + 1) % args.save_every == 0 or (step + 1) % args.eval_every == 0  # what is evaluated is saved
            if folder and (due or step + 1 == args.steps or stop):
                state = {"step": step + 1, "position": loader.position, "rng": [g.get_state() for g in generators]}
                state |= {"task": task, "args": {name: str(value) for name, value in vars(args).items()}, "best": best}
                state["model"], state["optim"] = get_state_dict(model, optimizer)
                if writer:
                    writer.flush()  # or a kill would lose steps that are not taken again
                if rank == 0:
                    save_checkpoint(folder, args.keep, state)
            if stop:
                sys.exit(1)
    finally:  # also after Ctrl-C
        if writer:
            with suppress(OSError):  # a full disk, which exit_message() reports
                writer.close()
        print_summary(times, total, device, saved["step"])


def print_header(args, model, loader):
    """Print the device, the model, the batch size and the length of the text."""
    if (args.model, args.device) == ("nano", "cpu"):
        print("nano, 4 layers and 128 wide, is the default model on a CPU; --model gpt2 trains GPT-2")
    module = torch.get_device_module(args.device)
    chip = module.get_device_name(args.device) if hasattr(module, "get_device_name") else platform.machine()
    about = f"{args.init_from or args.model} {sum(p.numel() for p in model.parameters()):,} parameters"
    print(f"device {args.device} ({chip}) | torch {torch.__version__} | {about} | B {loader.B} T {loader.T}")
    print(f"loaded {loader.size} tokens, and {len(loader.validation)} for validation")
    print(f"1 epoch = {loader.size // (loader.B * loader.T * args.world_size)} batches", flush=True)
    accumulation = args.total_batch_size // (loader.B * loader.T * args.world_size)
    print(f"{args.total_batch_size} tokens per step = {accumulation} micro-steps", end=" ")
    print(f"* B {loader.B} * T {loader.T} * {args.world_size} ranks", flush=True)


def synchronize(device):
    """Wait for the device. Python only queues a GPU's work; without this, the clock would stop before it is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def print_summary(times, tokens_per_step, device, start):
    """Print the median step, tokens per second and, on a GPU, the most memory that PyTorch allocated."""
    if times:
        first = 10 if len(times) >= 20 else len(times) // 2  # leave out compilation and other warm-up
        median = float(np.median(times[first:]))
        print(f"median of steps {start + first}-{start + len(times) - 1}: {1000 * median:.2f} ms", end=", ")
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        print(f"{tokens_per_step / median:,.0f} tok/s" + (f", peak memory {peak:.2f} GiB" if peak else ""), flush=True)


def save_checkpoint(folder, keep, checkpoint):
    """Write folder/step_N.pt, whole or not at all, then delete all but the `keep` newest. Raises OSError."""
    with open(folder / "unfinished.tmp", "wb") as file:
        torch.save(checkpoint, file)
        file.flush(), os.fsync(file.fileno())  # else a power cut could leave the name below on an empty file
    os.replace(file.name, folder / f"step_{checkpoint['step']:08d}.pt")
    for old in sorted(folder.glob("step_*.pt"), key=lambda path: (path.stat().st_mtime, path.name))[:-keep]:
        old.unlink()


def keep_best(folder, step):
    """Make the checkpoint of a step folder/best.pt, too. Raises OSError."""
    source, unfinished = folder / f"step_{step:08d}.pt", folder / "unfinished.tmp"
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)  # a second name for the same file: nothing is written
    except OSError:  # not every file system can do that
        shutil.copyfile(source, unfinished)
    os.replace(unfinished, folder / "best.pt")


def load_checkpoint(folder):
    """The newest checkpoint that can be read, or None. Raises OSError, or UserError if there are only damaged ones."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("step_*.pt"), reverse=True)
    for path in paths:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)  # weights_only: it cannot run code
        except Exception as error:  # a damaged file raises a dozen kinds
            print(f"{path} cannot be read: {repr(error)[:200]}", file=sys.stderr)
    if paths:
        raise UserError(f"no checkpoint in {folder} can be read")


class UserError(ValueError):
    """An error that the user can fix. It ends the script with one line instead of a traceback."""


def exit_message(error):
    """What to call sys.exit() with: one line if the user can fix the error, or 1. Raises any other error again."""
    text = " ".join(str(error).split())
    no_memory = ["out of memory", "ALLOC_FAILED", "cublasCreate", "can't allocate memory"]
    if isinstance(error, RuntimeError) and any(words in text for words in no_memory):
        args = parse_args()  # once more, for B and T
        text = f"out of memory with B {args.batch_size} and T {args.seq_len}: lower --batch-size or --seq-len"
    elif isinstance(error, torch._dynamo.exc.ShortenTraceback):  # compiler errors, such as a missing g++
        text = f"torch.compile failed: {text[:200]}"
    elif isinstance(error, OSError) and not error.filename:  # stdout failed, and Python would try it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in text):
        time.sleep(5)  # torchrun names the rank that ends first: let it be the one that failed
        text = f"rank {os.environ.get('RANK')} lost another, whose error is the one to read: {text}"
    elif isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):  # torch.save met a full disk
        text = f"{parse_args().checkpoint_dir}: {error.__context__}"
    elif not isinstance(error, (OSError, ValueError, KeyboardInterrupt)):
        raise error
    silent = isinstance(error, (BrokenPipeError, KeyboardInterrupt))  # a reader such as head has left, or Ctrl-C
    return 1 if silent else f"{Path(sys.argv[0]).name}: error: {text}"


if __name__ == "__main__":
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_message(error))
    if dist.is_initialized():  # main() has freed the model, which could deadlock as the last to hold Gloo's group
        dist.destroy_process_group()
