"""Tokenize FineWeb-Edu (Penedo et al. 2024) from Hugging Face, or your own files, into shards for train.py.

    python pretrain/fineweb.py                          writes 10 billion tokens of FineWeb-Edu to pretrain/fineweb10B
    python pretrain/fineweb.py --out shards *.parquet   reads your own files and writes to the folder shards

Your own files can be .parquet or .jsonl files with a "text" column, or .txt files with one document each. Other columns
are ignored. If the program is killed, run the same command again to continue.

In the shards, the token <|endoftext|> precedes each document. A document may continue in the next shard.

Shards have llm.c's format (https://github.com/karpathy/llm.c): a header of 256 int32 values, then the tokens as uint16.
Both are little-endian. The header begins with the magic number 20240520, the version number 1 and the number of tokens.
The first shard, for validation, is named *_val_*. The other shards are named *_train_*. A .sha256 file next to each
shard stores the shard's checksum in sha256sum's format.
"""

import argparse
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
KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
CHUNK = 1024  # documents to read and tokenize together
# Splitting before the last of several spaces does not change the tokens.
# Python's \s matches \x1c to \x1f, but tiktoken's \s does not.
BOUNDARY = re.compile(r"(?<=\s)(?=[^\S\x1c-\x1f]\S)")


class DataError(ValueError):
    """Raised if input data are missing, damaged or in the wrong format."""


class Shard:
    """The uint16 tokens of a shard, with len() and slicing. Raises DataError if the file is damaged or not a shard."""

    def __init__(self, path):
        self.path = Path(path)
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
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
            raise DataError(f"{self.path} is damaged: its SHA-256 does not match {checksum}")
        tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=HEADER_BYTES)
        if (largest := tokens.max()) >= VOCABULARY:
            raise DataError(f"{self.path} contains the token {largest}, but GPT-2 has {VOCABULARY} tokens")
        return tokens


def read_shards(folder):
    """Return a folder's first validation shard and its training shards, in order of file name. Raises DataError."""
    shards = {"val": [], "train": [], "other": []}
    for path in sorted(Path(folder).glob("*.bin")):
        kind = re.search(r"_(val|train)[_.]", path.name)
        shards[kind[1] if kind else "other"].append(Shard(path))
    if shards["other"] or not shards["val"] or not shards["train"]:
        train, val, other = (len(shards[kind]) for kind in ("train", "val", "other"))
        counts = f"{train} shards match *_train_*.bin, {val} match *_val_*.bin, {other} match neither"
        raise DataError(f"{folder}: {counts}; a folder needs both kinds and no others (pretrain/fineweb.py makes them)")
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
    """Write a checksum file, then a shard of the tokens (n,), which must be below 50257. Raises OSError."""
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    data = header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes()
    replace(Path(f"{path}.sha256"), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    replace(path, data)


def hub_files(dataset, split, **config):
    """Return the addresses (hf://...) of a dataset's files on the hub. Raises DataError with a one-line message."""
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}  # otherwise, each retry warns
    from datasets import load_dataset_builder

    try:
        return [str(file) for file in load_dataset_builder(dataset, **config).config.data_files[split]]
    except Exception as error:  # load_dataset_builder raises many exception types
        hint = "without a network, download the dataset's files on another machine and pass them"
        raise DataError(f"loading from the hub failed; {hint}: {' '.join(str(error).split())[:200]}") from None


def rows_of(file, name, columns):
    """Return an iterator over the rows (dicts) of an open file. From a Parquet file, only `columns` are read."""
    kind = KINDS.get(Path(str(name).removesuffix(".gz")).suffix)  # files on the hub may be compressed
    if kind == "parquet":
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(file).iter_batches(CHUNK, columns=list(columns))
        return itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    if kind == "json":
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"[")  # otherwise, a row per line
        file.seek(0)
        return iter(json.loads(file.read())) if is_array else (json.loads(line) for line in file if line.strip())
    if kind == "text":
        return iter([{column: file.read().decode("utf-8") for column in columns}])
    raise ValueError(f"the extension is not one of {', '.join(KINDS)}")


def read_rows(files, columns, start=(0, 0)):
    """Yield (file index, row index, the row as a dict) for each row, beginning at `start` (file index, row index).

    `files` contains paths or addresses from hub_files(). `columns` maps each required column to its type. Raises
    DataError, which names the file and the row, if a file cannot be read or a value has the wrong type.
    """
    import fsspec

    for i, name in [*enumerate(files)][start[0] :]:
        row = 0
        try:
            with fsspec.open(name, compression="infer") if "://" in str(name) else open(name, "rb") as file:
                for values in rows_of(file, name, columns):
                    if not isinstance(values, dict):
                        raise ValueError(f"{type(values).__name__} instead of an object")
                    for column, kind in columns.items():
                        if not isinstance(value := values.get(column), kind):
                            found = "null" if value is None else type(value).__name__
                            raise ValueError(f"the column {column} is {found if column in values else 'missing'}")
                    if (i, row) >= tuple(start):
                        yield i, row, values
                    row += 1
        except Exception as error:  # the hub and the libraries raise many exception types
            where = name if isinstance(error, OSError) else f"{name}, row {row + 1}"
            reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or str(error)
            raise DataError(f"{where}: {' '.join(reason.split())[:300]}") from None


def tokenized(rows, column):
    """Tokenize rows in chunks of up to CHUNK documents. A document's place is (file index, row index).

    For each chunk, yield the place of its first document, the uint16 tokens of its documents and a list with
    (place, exception) for each document that failed.
    """
    os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(__file__).resolve().parents[1] / "tokenizer")
    encoding, pool = tiktoken.get_encoding("gpt2"), ThreadPoolExecutor()

    def encode(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a lone surrogate becomes U+FFFD
        try:
            tokens = encoding.encode_to_numpy(text, disallowed_special=())  # treat <|endoftext|> as plain text
        except ValueError:  # tiktoken cannot split a million spaces from the word that follows them
            pieces = BOUNDARY.split(text)
            tokens = np.concatenate([encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces])
        return np.append(encoding.eot_token, tokens).astype(np.uint16)

    while chunk := list(itertools.islice(rows, CHUNK)):
        done = [pool.submit(encode, values[column]) for *_, values in chunk]  # on all cores: tiktoken releases the GIL
        failed = [(place, one.exception()) for (*place, _), one in zip(chunk, done, strict=True) if one.exception()]
        tokens = [one.result() for one in done if not one.exception()]
        yield chunk[0][:2], np.concatenate([np.empty(0, np.uint16), *tokens]), failed


def write(args, done):
    """Write the remaining shards and update progress.json. `done` comes from begin(). Raises OSError, ValueError."""
    files = args.files or hub_files(args.dataset, "train", name=args.name)
    rows = read_rows(files, {args.column: str}, done["start"])
    size, skip, left_out, pieces = args.shard_size, done["skip"], done["left_out"], []

    def finish(parts, **where):
        for part in parts:
            write_shard(shard_path(args.out, done["shards"]), part)
            done.update(shards=done["shards"] + 1, tokens=done["tokens"] + len(part))
        done.update(where)
        replace(args.out / "progress.json", json.dumps(done).encode())

    with tqdm(unit=" tokens", unit_scale=True, initial=done["tokens"], disable=not sys.stderr) as bar:
        for start, tokens, failed in tokenized(rows, args.column):
            pieces.append(tokens[skip:])  # earlier shards contain the skipped tokens
            bar.update(len(tokens) - skip)
            skip = 0
            if sum(map(len, pieces)) >= size:
                joined = np.concatenate(pieces)
                full, rest = np.split(joined, [len(joined) // size * size])
                pieces = [rest]  # tokens that do not fill a shard yet
                finish(full.reshape(-1, size), start=start, skip=len(tokens) - len(rest), left_out=left_out)
            for (i, row), error in failed:
                bar.write(f"left out: {files[i]}, row {row + 1}: {error}", file=sys.stderr)
            left_out += len(failed)
    rest = np.concatenate([np.empty(0, np.uint16), *pieces])
    cut = 0 if done["shards"] else -(-len(rest) // 10)  # no shard is full: hold out a tenth, rounded up
    parts = [part for part in np.split(rest, [cut]) if len(part)]
    if done["shards"] + len(parts) < 2:
        raise ValueError(f"{done['tokens'] + len(rest)} tokens do not fill a shard of {size} and part of a second one")
    finish(parts, end=True, left_out=left_out)


def begin(args):
    """Return the progress of the run in args.out. Raises OSError, or ValueError if another run wrote to args.out."""
    source = vars(args) | {"out": None, "files": [[file, os.path.getsize(file)] for file in args.files]}
    done = {"source": source, "shards": 0, "tokens": 0, "start": [0, 0], "skip": 0, "left_out": 0, "end": False}
    shards, progress = [Shard(path) for path in sorted(args.out.glob("*.bin"))], args.out / "progress.json"
    if progress.exists():
        theirs = json.loads(progress.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict) or theirs.keys() != done.keys() or theirs["source"] != source:
            raise ValueError("its progress.json is from other files, settings or version: use another folder")
        for number in range(theirs["shards"]):
            Shard(shard_path(args.out, number))  # raises OSError if the shard is missing
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
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")  # if the terminal cannot show a path
    for file in args.files:
        if not os.path.isfile(file):
            parser.error(f"{file} is not a file")
        if Path(file).suffix not in KINDS:
            parser.error(f"{file} is not a .txt, .jsonl or .parquet file")
    try:
        done = begin(args)
    except (OSError, ValueError) as error:
        parser.error(f"--out {args.out}: {error}")
    try:
        if not done["end"]:
            write(args, done)
    except Exception as error:  # the hub and the libraries raise many exception types
        if not any(args.out.glob("*.bin")):
            (args.out / "progress.json").unlink()  # no shard was written, so leave no folder behind
            if not any(args.out.iterdir()):
                args.out.rmdir()
        reason = " ".join(str(error).split())[:300]
        parser.exit(1 if done["shards"] else 2, f"{parser.prog}: error: --out {args.out}: {reason}\n")
    less = f", {done['left_out']} documents left out" if done["left_out"] else ""
    print(f"{args.out} is complete: {done['tokens']} tokens, {done['shards']} shards{less}")


if __name__ == "__main__":
    main()
