"""Texts to shards of GPT-2 tokens, for train.py: FineWeb-Edu (Penedo et al. 2024) from the hub, or files of your own.

    python pretrain/fineweb.py                          sample-10BT, 10 billion tokens, into pretrain/fineweb10B
    python pretrain/fineweb.py --out shards *.parquet   or *.jsonl, with the column "text", or *.txt, a document each

<|endoftext|> stands before each document, and a document may go on in the next shard. Shard 0 is for validation. A run
that was killed goes on where it was, by the same command.

A shard is a header of 64 bytes (magic, version, vocabulary, number of tokens, SHA-256 of the tokens; little-endian),
then the tokens as uint16.
"""

import argparse
import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import signal
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

HEADER = struct.Struct("<8sIIQ32s8x")
MAGIC, VERSION, VOCABULARY = b"GPTSHARD", 1, 50257
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}  # of load_dataset
CHUNK = 1024  # documents that are read, then tokenized, together


class DataError(ValueError):
    """A file that does not hold what it should."""


class Shard:
    """A file of tokens: len(shard), shard[start:end] -> uint16. Raises DataError if it is none, or damaged."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:8] != MAGIC:
            raise DataError(f"{path} is not a shard of fineweb.py")
        _, version, vocabulary, self.count, self.checksum = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(f"{path} has version {version} of the format, not {VERSION}")
        if vocabulary != VOCABULARY:
            raise DataError(f"{path} is of a vocabulary of {vocabulary} tokens, not GPT-2's {VOCABULARY}")
        if (size := os.path.getsize(path)) != HEADER.size + 2 * self.count:
            raise DataError(f"{path} is cut short or not whole: {self.count} tokens, but {size} bytes")

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return self.tokens[place]

    @cached_property
    def tokens(self):
        """Memory-mapped, and checked when first asked for: all shards at the start would be 20 GB to read."""
        tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=HEADER.size, shape=(self.count,))
        if hashlib.sha256(tokens).digest() != self.checksum:
            raise DataError(f"{self.path} is damaged: its checksum is another")
        return tokens


def replace(path, *pieces):
    """Write a file whole or not at all: it gets its name when all of it is on the disk. Raises OSError."""
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def write_shard(path, tokens):
    """Tokens (n,) uint16 to a file. Raises OSError."""
    tokens = np.ascontiguousarray(tokens, dtype="<u2")
    digest = hashlib.sha256(tokens).digest()
    replace(path, HEADER.pack(MAGIC, VERSION, VOCABULARY, len(tokens), digest), tokens)


def kind_of(files):
    """The builder for files that all have one ending. Raises ValueError for folders, other endings, or a mix."""
    if folders := [file for file in files if os.path.isdir(file)]:
        raise ValueError(f"{folders[0]} is a folder: name the files in it, as in {Path(folders[0], '*.jsonl')}")
    if unknown := [file for file in files if Path(file).suffix not in BUILDERS]:
        raise ValueError(f"{unknown[0]} is not a .txt, .jsonl or .parquet file")
    endings = sorted({Path(file).suffix for file in files})
    if len(endings) > 1:
        raise ValueError(f"the files end in {' and '.join(endings)}: give one kind only, the other to another --out")
    return BUILDERS[endings[0]]


def read_texts(files, column):
    """Each file as a row. Raises OSError, or ValueError for one that is not UTF-8."""
    for file in files:
        try:
            yield {column: Path(file).read_bytes().decode("utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: {error}") from None


def open_texts(files, dataset, name, column):
    """A stream of rows with the one column: of local files, all of one kind, or of a dataset on the hub."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # or each of its tries is a warning
    from datasets import IterableDataset, disable_progress_bars, load_dataset, logging

    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what is wrong is said once, by main()
    if not files:
        print(f"reading {dataset} {name} from the hub", flush=True)
        return load_dataset(dataset, name, split="train", streaming=True).select_columns(column)
    kind = kind_of(files)
    if kind == "text":
        return IterableDataset.from_generator(read_texts, gen_kwargs={"files": files, "column": column})
    names = [glob.escape(str(Path(file).resolve())) for file in files]  # load_dataset would take a [ for a pattern
    return load_dataset(kind, data_files=names, split="train", streaming=True).select_columns(column)


def tokenized(texts, column, pool):
    """(where the stream was before, tokens of each of the next CHUNK documents) until the stream ends.

    While one chunk is written the next one is being tokenized, by all cores: tiktoken lets go of Python's lock.
    """
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "tokenizer"))
    encoding = tiktoken.get_encoding("gpt2")

    def encode(row):
        if not isinstance(row[column], str):
            raise ValueError(f"a row has no text in the column {column}")
        tokens = encoding.encode_to_numpy(row[column], disallowed_special=())  # <|endoftext|> in a text is plain text
        return np.concatenate([[encoding.eot_token], tokens]).astype(np.uint16)

    rows, ahead = iter(texts), None
    while True:
        before = texts.state_dict()
        chunk = list(itertools.islice(rows, CHUNK))
        now, ahead = ahead, (before, pool.map(encode, chunk)) if chunk else None
        if now:
            yield now[0], list(now[1])
        if not chunk:
            return


def write(args, done, progress):
    """Shard after shard, from where `done` says that the last run was; `progress` is written after each."""
    texts = open_texts(args.files, args.dataset, args.name, args.column)
    if done["before"]:
        texts.load_state_dict(done["before"])
    shard, filled = np.empty(args.shard_size, dtype=np.uint16), 0
    documents, skip = done["documents"], done["skip"]

    def finish(*parts):
        for part in parts:
            write_shard(args.out / f"shard_{done['shards']:06d}.bin", part)
            done.update(shards=done["shards"] + 1, tokens=done["tokens"] + len(part))
        replace(progress, json.dumps(done).encode())

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(unit=" tokens", unit_scale=True, initial=done["tokens"]) as bar,
    ):
        for before, chunk in tokenized(texts, args.column, pool):
            tokens = np.concatenate(chunk)
            while skip < len(tokens):  # what a shard holds already is skipped: a document may go on in the next one
                bar.set_description(f"shard {done['shards']}")
                part = tokens[skip : skip + args.shard_size - filled]
                shard[filled : filled + len(part)] = part
                filled, skip = filled + len(part), skip + len(part)
                bar.update(len(part))
                if filled == args.shard_size:
                    done.update(before=before, skip=skip, documents=documents)
                    finish(shard)
                    filled = 0
            documents, skip = documents + len(chunk), 0
    cut = 0 if done["shards"] else -(-filled // 10)  # less than a shard in all: a tenth is for validation
    parts = [part for part in (shard[:cut], shard[cut:filled]) if len(part)]
    if done["shards"] + len(parts) < 2:
        raise ValueError(
            f"{done['tokens'] + filled} tokens make no two shards of {args.shard_size}, one for validation"
        )
    done.update(documents=documents, end=True)
    finish(*parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=".txt, .jsonl or .parquet; without any, the dataset on the hub")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("fineweb10B"), help="default fineweb10B")
    parser.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu", help="default HuggingFaceFW/fineweb-edu")
    parser.add_argument("--name", default="sample-10BT", help="the dataset's configuration, default sample-10BT")
    parser.add_argument("--column", default="text", help="default text")
    parser.add_argument("--shard-size", type=int, default=100_000_000, help="tokens per shard, default 100 million")
    args = parser.parse_args()
    if args.shard_size < 2:
        parser.error("--shard-size must be at least 2")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    progress = args.out / "progress.json"
    try:
        source = {"files": [[file, os.path.getsize(file)] for file in args.files], "column": args.column}
        if args.files:
            kind_of(args.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    source |= {"shard_size": args.shard_size, "chunk": CHUNK}
    source |= {} if args.files else {"dataset": args.dataset, "name": args.name}
    done = {"source": source, "shards": 0, "tokens": 0, "documents": 0, "before": None, "skip": 0, "end": False}
    new = [folder for folder in (args.out, *args.out.parents) if not folder.exists()]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if progress.exists():
            theirs = json.loads(progress.read_text(encoding="utf-8"))
            if not isinstance(theirs, dict) or theirs.keys() != done.keys() or theirs["source"] != source:
                raise ValueError("its progress.json is of other files or settings: use another folder")
            done = theirs
            for number in range(done["shards"]):
                Shard(args.out / f"shard_{number:06d}.bin")  # one that is gone cannot be made again by itself
        elif any(args.out.glob("*.bin")):
            raise ValueError("it has shards of something else: use another folder")
        replace(progress, json.dumps(done).encode())
    except (OSError, ValueError) as error:
        parser.error(f"--out {args.out}: {error}")
    try:
        if not done["end"]:
            write(args, done, progress)
    except Exception as error:  # the hub, the files and the libraries raise a dozen kinds
        if done["shards"] == 0 and not any(args.out.glob("*.bin")):
            progress.unlink()
            with contextlib.suppress(OSError):
                for folder in new:  # they are empty, unless the disk was full
                    folder.rmdir()
        where = " ".join(args.files[:3]) or f"{args.dataset} on the hub"
        hint = "" if args.files else " (without a network, give files: the dataset's Parquet files work unchanged)"
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            where, hint = args.out, ""
        reason = " ".join(str(error).split())[:300]
        parser.exit(1 if done["shards"] else 2, f"{parser.prog}: error: {where}: {reason}{hint}\n")
    print(f"{args.out} is complete: {done['documents']} documents, {done['tokens']} tokens, {done['shards']} shards")


if __name__ == "__main__":
    main()
