"""Evaluate a model on HellaSwag (Zellers et al. 2019): is the correct ending the likeliest of four?

    python pretrain/hellaswag.py gpt2               evaluates GPT-2 weights, given by name or as a folder
    python pretrain/hellaswag.py checkpoints        evaluates the latest checkpoint in a folder, or a .pt file
    python pretrain/hellaswag.py gpt2 --data FILE   reads the public hellaswag_val.jsonl instead of the copy on the hub

The evaluation uses the completion style: each text is the unmodified context, a space and the unmodified ending. The
score of an ending is the sum of its tokens' log-likelihoods (acc) or their mean (acc_norm). Guessing scores 25 %.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from fineweb import KINDS, DataError, hub_files, read_rows


def read_examples(source):
    """Return the examples in a JSONL file or in a dataset on the hub.

    Each example is (context tokens, four lists of ending tokens, index of the correct ending). Raises DataError with a
    one-line message if an example cannot be read.
    """
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / "tokenizer")
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    files = [source] if Path(source).exists() or Path(source).suffix in KINDS else hub_files(source, "validation")
    examples = []
    for i, row, values in read_rows(files, {"ctx": str, "endings": list, "label": (int, str)}):
        try:
            label, endings = int(values["label"]), [encode(" " + ending) for ending in values["endings"]]
            if len(endings) != 4 or label not in range(4) or max(map(len, endings)) > 1023:
                raise ValueError(f"{len(endings)} endings, label {label}, tokens {[*map(len, endings)]}")
        except (TypeError, ValueError) as error:
            raise DataError(f"{files[i]}, row {row + 1}: {error}") from None
        examples.append((encode(values["ctx"]) or [50256], endings, label))
    if not examples:
        raise DataError(f"{source} contains no examples")
    return examples


@torch.compile(dynamic=False)
def negative_log_likelihood(model, idx, targets):
    """Return each row's loss in nats, summed over targets other than -100. idx, targets: (rows, T) -> (rows,)."""
    logits = model(idx)[..., :50257]  # (rows, T, 50257), without the vocabulary's padding
    return F.cross_entropy(logits.reshape(-1, 50257), targets.view(-1), reduction="none").view_as(targets).sum(dim=1)


@torch.no_grad()
def count_right(model, examples, batch_tokens, device, rank=0, world_size=1):
    """Return three counts: correct answers by summed score, correct answers by mean score, and all examples.

    Each rank evaluates and counts only every world_size-th example. All batches have the same shape, so
    torch.compile compiles only once. Each row has room for the longest text, up to the model's block_size. A batch
    has about `batch_tokens` tokens.
    """
    if not examples:
        return 0, 0, 0
    longest = max(len(context) + len(ending) for context, endings, _ in examples for ending in endings)
    T = min(-(-longest // 64) * 64, model.config.block_size)
    rows = max(1, batch_tokens // T)
    mine = examples[rank::world_size]
    texts = [(context, ending) for context, endings, _ in mine for ending in endings]
    sums = []
    for first in range(0, len(texts), rows):
        idx = torch.zeros((rows, T), dtype=torch.int64)
        targets = torch.full((rows, T), -100)
        for row, (context, ending) in enumerate(texts[first : first + rows]):
            tokens = torch.tensor((context + ending)[-T - 1 :])  # cut the beginning of a long text
            idx[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, len(tokens) - 1 - len(ending) : len(tokens) - 1] = tokens[-len(ending) :]
        sums += negative_log_likelihood(model, idx.to(device), targets.to(device)).float().tolist()
    sums = np.array(sums[: len(texts)]).reshape(-1, 4)
    means = sums / np.array([len(ending) for _, ending in texts]).reshape(-1, 4)
    labels = np.array([label for _, _, label in mine], dtype=int)
    return int((sums.argmin(axis=1) == labels).sum()), int((means.argmin(axis=1) == labels).sum()), len(mine)


def main():
    from checkpoint import explain, load_model, model_parser  # train.py imports this file without checkpoint.py
    from unattended import allow_any_character, printing

    allow_any_character()
    parser = model_parser(__doc__)
    parser.add_argument("--data", default="Rowan/hellaswag", help="JSONL file or dataset, default Rowan/hellaswag")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens per batch, default 16384")
    args = parser.parse_args()
    if args.batch_tokens < 1:
        parser.error("--batch-tokens must be at least 1")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    try:
        examples, model = read_examples(args.data), load_model(args.model, args.device)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device(args.device)
    use_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
            by_sum, by_mean, n = count_right(model, examples, args.batch_tokens, device)
    except RuntimeError as error:
        sys.exit(f"{parser.prog}: error: {explain(error, '--batch-tokens')}")
    accuracy = f"acc {by_sum / n:.4f} | acc_norm {by_mean / n:.4f}"
    with printing():
        print(f"{args.model} | HellaSwag, completion style | {accuracy} | {n} examples")


if __name__ == "__main__":
    main()
