"""Tokenize texts into shards for train.py: FineWeb-Edu (Penedo et al. 2024) from Hugging Face, or your own files.

    python pretrain/fineweb.py                          writes 10 billion tokens of FineWeb-Edu to pretrain/fineweb10B
    python pretrain/fineweb.py --out shards *.parquet   reads your own files and writes to the folder shards

Your own files can be .parquet or .jsonl with a "text" column, or .txt with one document each. <|endoftext|> precedes
each document, and a document may continue in the next shard. If a run is killed, run the same command again to
continue.

Shards have llm.c's format (https://github.com/karpathy/llm.c): a header of 256 int32 values, then the tokens as uint16.
Both are little-endian. The header begins with the magic number 20240520, the version number 1 and the number of tokens.
The first shard is named *_val_* and is for validation. The remaining shards are named *_train_*. A .sha256 file next to
each shard stores its checksum in sha256sum's format.
"""

import argparse
import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

MAGIC, VERSION, HEADER_BYTES, VOCABULARY = 20240520, 1, 1024, 50257
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}  # load_dataset's builders
CHUNK = 1024  # documents to read and tokenize together


class DataError(ValueError):
    """Input data are missing, damaged or in the wrong format."""


class Shard:
    """A file of uint16 tokens, with len() and slicing. Raises DataError if the file is damaged or not a shard."""

    def __init__(self, path):
        self.path = Path(path)
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
        if header[:2].tobytes() == b"GPTSHARD":
            raise DataError(f"{path} has an old, unsupported format: run pretrain/fineweb.py into another folder")
        if len(header) < HEADER_BYTES // 4 or (header[0], header[1]) != (MAGIC, VERSION):
            raise DataError(f"{path} is not a shard of GPT-2 tokens in llm.c's format, version {VERSION}")
        self.count, size = int(header[2]), os.path.getsize(path)
        if self.count < 1 or size != HEADER_BYTES + 2 * self.count:
            raise DataError(f"{path} is cut short or damaged: {self.count} tokens, but {size} bytes")

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return self.tokens[place]

    @cached_property
    def tokens(self):
        """The memory-mapped tokens, checked on first use. Checking 10 billion tokens at start-up would read 20 GB."""
        checksum = Path(f"{self.path}.sha256")
        digest = hashlib.sha256(np.memmap(self.path, mode="r")).hexdigest() if checksum.exists() else None
        if digest and checksum.read_text(errors="replace").lower().split()[:1] != [digest]:
            raise DataError(f"{self.path} is damaged: its SHA-256 is not the one in {checksum}")
        tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=HEADER_BYTES)
        if (largest := tokens.max()) >= VOCABULARY:
            raise DataError(f"{self.path} contains the token {largest}, but GPT-2 has {VOCABULARY} tokens")
        return tokens


def read_shards(folder):
    """Return (first validation shard, all training shards) of a folder, sorted by file name. Raises DataError."""
    shards = {"val": [], "train": [], "other": []}
    for path in sorted(Path(folder).glob("*.bin")):
        kind = re.search(r"_(val|train)[_.]", path.name)
        shards[kind[1] if kind else "other"].append(Shard(path))
    if shards["other"] or not shards["val"] or not shards["train"]:
        train, val, other = (len(shards[kind]) for kind in ("train", "val", "other"))
        counts = f"{train} shards match *_train_*.bin, {val} match *_val_*.bin, {other} match neither"
        raise DataError(f"{folder}: {counts}; each name must match a pattern, and both kinds are needed")
    return shards["val"][0], shards["train"]


def shard_path(folder, number):
    return folder / f"shard_{'train' if number else 'val'}_{number:06d}.bin"


def replace(path, data):
    """Write a temporary file and rename it to `path` once all data are on disk. Raises OSError."""
    unfinished = Path(f"{path}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_shard(path, tokens):
    """Write a checksum file, then a shard of tokens (n,), each below 50257. Raises OSError."""
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    data = header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes()
    replace(Path(f"{path}.sha256"), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    replace(path, data)


def open_rows(files, columns, dataset=None, **config):
    """Return a stream of rows with these columns from local files of one kind or, without files, from a hub dataset.

    Raises DataError with a one-line message if a file is missing or the dataset cannot be loaded from the hub.
    """
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= quiet | {"HF_HUB_VERBOSITY": "error"}  # otherwise, each retry prints a warning
    from datasets import IterableDataset, load_dataset, logging

    def whole_texts():  # instead of load_dataset, which would change line endings
        for file in files:
            try:
                yield {columns[0]: Path(file).read_bytes().decode("utf-8")}
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: {error}") from None

    logging.set_verbosity(logging.CRITICAL)  # the caller reports errors
    if files and Path(files[0]).suffix == ".txt":
        return IterableDataset.from_generator(whole_texts)
    for file in files:
        if not os.path.isfile(file):
            raise DataError(f"{file} is not a file")
    if files:
        names = [glob.escape(str(Path(file).resolve())) for file in files]  # for load_dataset, [ begins a pattern
        dataset, config = BUILDERS.get(Path(files[0]).suffix, "json"), {"data_files": names, "split": "train"}
    try:
        return load_dataset(dataset, streaming=True, **config).select_columns(columns)
    except Exception as error:  # load_dataset raises many exception types
        if files:
            raise
        hint = "without a network, give local files (the dataset's own files work unchanged)"
        raise DataError(f"loading from the hub failed; {hint}: {' '.join(str(error).split())[:200]}") from None


def tokenized(texts, column):
    """Yield (the stream's state before a chunk, the chunk's tokens as uint16). A chunk is up to CHUNK documents.

    Raises ValueError if a row has no text.
    """
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / "tokenizer")
    encoding, rows, pool = tiktoken.get_encoding("gpt2"), iter(texts), ThreadPoolExecutor()

    def encode(text):
        tokens = encoding.encode_to_numpy(text, disallowed_special=())  # treat <|endoftext|> as plain text
        return np.append(encoding.eot_token, tokens).astype(np.uint16)

    while True:
        before = texts.state_dict()
        chunk = [row[column] for row in itertools.islice(rows, CHUNK)]
        if not all(isinstance(text, str) for text in chunk):
            raise ValueError(f"a row has no text in the column {column}")
        if not chunk:
            return
        yield before, np.concatenate(list(pool.map(encode, chunk)))  # on all cores: tiktoken releases the GIL


def write(args, done):
    """Write the remaining shards and update progress.json. `done` is from begin(). Raises OSError, ValueError."""
    texts = open_rows(args.files, [args.column], args.dataset, name=args.name, split="train")
    if done["before"]:
        texts.load_state_dict(done["before"])
    size, skip, pieces = args.shard_size, done["skip"], []

    def finish(parts, **where):
        for part in parts:
            write_shard(shard_path(args.out, done["shards"]), part)
            done.update(shards=done["shards"] + 1, tokens=done["tokens"] + len(part))
        done.update(where)
        replace(args.out / "progress.json", json.dumps(done).encode())

    with tqdm(unit=" tokens", unit_scale=True, initial=done["tokens"]) as bar:
        for before, tokens in tokenized(texts, args.column):
            pieces.append(tokens[skip:])  # earlier shards contain the skipped tokens
            bar.update(len(tokens) - skip)
            skip = 0
            if sum(map(len, pieces)) >= size:
                joined = np.concatenate(pieces)
                full, rest = np.split(joined, [len(joined) // size * size])
                pieces = [rest]  # tokens that do not fill a shard yet
                finish(full.reshape(-1, size), before=before, skip=len(tokens) - len(rest))
    rest = np.concatenate([np.empty(0, np.uint16), *pieces])
    cut = 0 if done["shards"] else -(-len(rest) // 10)  # no shard is full: hold out a tenth for validation
    parts = [part for part in np.split(rest, [cut]) if len(part)]
    if done["shards"] + len(parts) < 2:
        raise ValueError(f"{done['tokens'] + len(rest)} tokens do not fill two shards of {size}, one for validation")
    finish(parts, end=True)


def begin(args):
    """Return the progress of the run in args.out. Raises OSError, or ValueError if a different command began it."""
    source = vars(args) | {"out": None, "files": [[file, os.path.getsize(file)] for file in args.files]}
    done = {"source": source, "shards": 0, "tokens": 0, "before": None, "skip": 0, "end": False}
    shards, progress = [Shard(path) for path in sorted(args.out.glob("*.bin"))], args.out / "progress.json"
    if progress.exists():
        theirs = json.loads(progress.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict) or theirs.keys() != done.keys() or theirs["source"] != source:
            raise ValueError("its progress.json is from other files or settings: use another folder")
        for number in range(theirs["shards"]):
            Shard(shard_path(args.out, number))  # raises OSError if missing, because a single shard cannot be recreated
        return theirs
    if shards:
        raise ValueError("it contains shards from another source: use another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    replace(progress, json.dumps(done).encode())
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=".txt, .jsonl or .parquet; default: the dataset on the hub")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("fineweb10B"), help="default fineweb10B")
    parser.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu", help="default HuggingFaceFW/fineweb-edu")
    parser.add_argument("--name", default="sample-10BT", help="the dataset's configuration, default sample-10BT")
    parser.add_argument("--column", default="text", help="the column with the text, default text")
    parser.add_argument("--shard-size", type=int, default=100_000_000, help="tokens per shard, default 100 million")
    args = parser.parse_args()
    if not 2 <= args.shard_size < 2**31:
        parser.error("--shard-size must be at least 2 and less than 2**31")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    for file in args.files:
        if not os.path.isfile(file):
            parser.error(f"{file} is not a file")
        if Path(file).suffix not in BUILDERS:
            parser.error(f"{file} is not a .txt, .jsonl or .parquet file")
    if len({BUILDERS[Path(file).suffix] for file in args.files}) > 1:
        parser.error("give files of one kind only, and use another --out for the rest")
    try:
        done = begin(args)
    except (OSError, ValueError) as error:
        parser.error(f"--out {args.out}: {error}")
    try:
        if not done["end"]:
            write(args, done)
    except Exception as error:  # the hub and the libraries raise many exception types
        if not any(args.out.glob("*.bin")):
            (args.out / "progress.json").unlink()
            with contextlib.suppress(OSError):
                args.out.rmdir()  # only works if the folder is empty
        where = " ".join(args.files[:3]) or f"{args.dataset} on the hub"
        reason = " ".join(str(error).split())[:300] or "it contains no text"
        parser.exit(1 if done["shards"] else 2, f"{parser.prog}: error: {where} to {args.out}: {reason}\n")
    print(f"{args.out} is complete: {done['tokens']} tokens, {done['shards']} shards")


if __name__ == "__main__":
    main()
