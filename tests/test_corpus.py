"""Tokenizing loses no document, and pre-training reads each training token once per epoch.

Held-out tokens are not used for training. After a power cut at any time, running the tokenizing program again produces
the same shards as an uninterrupted run. The shards are in llm.c's format. The validation loss does not depend on the
batch size or the number of ranks.
"""

import array
import json
import math
import os
import re
import signal
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import fineweb
import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from conftest import END, ROOT, encode, uneven
from fineweb import DataError, shard_path, write_shard


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global train
    import train


def stream(texts):
    """Return the tokens that the shards of these texts must contain, in order."""
    return [token for text in texts for token in [END, *encode(text)]]


def read(folder):
    """Return the tokens of each shard by file name, read by code written only from the format's description."""
    found = {}
    for path in sorted(folder.glob("*.bin"), key=lambda path: path.name[-10:]):
        with open(path, "rb") as file:
            header, body = array.array("i", file.read(1024)), array.array("H", file.read())
        assert header[:3].tolist() == [20240520, 1, len(body)] and not any(header[3:])
        found[path.name] = body.tolist()
    return found


def joined(folder):
    return [token for tokens in read(folder).values() for token in tokens]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    """Write rows to a Parquet file, with the types that pyarrow infers from them."""
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    return path


@pytest.fixture
def shard(monkeypatch, capfd):
    """Return a function that runs fineweb.py in this process and returns its output. Running it must succeed."""

    def shard(*words):
        monkeypatch.setattr("sys.argv", ["fineweb.py", *map(str, words)])
        capfd.readouterr()
        try:
            fineweb.main()
        except SystemExit as exit:
            pytest.fail(f"fineweb.py ended with {exit.code}: {capfd.readouterr().err}")
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return capfd.readouterr()

    return shard


def test_no_document_is_lost_or_written_twice(shard, tmp_path):
    """Other columns may hold anything. A JSON file may hold an array after a byte order mark, and empty lines."""
    texts, out = (ROOT / "input.txt").read_text(encoding="utf-8").split("\n\n"), tmp_path / "shards"
    texts += ["", " SolidGoldMagikarp", "<|endoftext|> in a text", "two\n\r\n\nlines and a tab\t", "Ünï 漢字 🙂\u2028"]
    rows = [{"text": "another column", "body": text} for text in texts[1500:-30]]
    inputs = [parquet(tmp_path / "a.parquet", rows), tmp_path / "b.jsonl", tmp_path / "c.json"]
    jsonl(inputs[1], [{"text": i if i % 2 else [i], "body": text} for i, text in enumerate(texts[:1500])])
    inputs[1].write_text(inputs[1].read_text().replace("\n", "\n\n"))
    inputs[2].write_bytes(b"\xef\xbb\xbf\n" + json.dumps([{"body": "array"}, {"body": "a \ud83d b"}]).encode())
    inputs += [tmp_path / f"[{i}].txt" for i in range(30)]  # names that look like glob patterns
    for path, text in zip(inputs[3:], texts[-30:], strict=True):
        path.write_bytes(text.encode())
    words = *inputs, "--out", out, "--shard-size", 50_000, "--column", "body"
    printed, made = shard(*words).out, read(out)
    tokens = stream([*texts[1500:-30], *texts[:1500], "array", "a \ufffd b", *texts[-30:]])
    assert joined(out) == tokens and len(made) == -(-len(tokens) // 50_000) == 7
    assert [len(part) for part in made.values()][:-1] == [50_000] * 6
    assert [*made] == [f"shard_{'train' if i else 'val'}_{i:06d}.bin" for i in range(7)]
    checksums = sorted(path.name for path in out.glob("*.sha256"))
    done = subprocess.run(["sha256sum", "-c", *checksums], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 7, done.stdout + done.stderr
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert shard(*words).out == printed == f"{out} is complete: {len(tokens)} tokens, 7 shards\n"
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before  # a second run does nothing


def test_a_power_cut_at_any_time_loses_no_document(shard, tmp_path, monkeypatch):
    """The same command continues from the disk, on which what was not flushed is zeros, and writes the same shards.

    A document that tiktoken cannot split is cut between tokens. If that does not help, it is left out and named.
    """
    encode("")  # sets tiktoken's folder
    gpt2 = tiktoken.get_encoding("gpt2")

    def encode_or_fail(text, **options):
        if "unsplittable" in text or len(text) > 150:
            raise ValueError("stack overflow")
        return gpt2.encode_to_numpy(text, **options)

    monkeypatch.setattr(fineweb, "CHUNK", 2)
    encoding = SimpleNamespace(encode_to_numpy=encode_or_fail, eot_token=END)
    monkeypatch.setattr(fineweb, "tiktoken", SimpleNamespace(get_encoding=lambda name: encoding))
    texts = ["one two", "three  " * 50, "unsplittable", "five " * 17, "four", "six", "unsplittable too", "seven " * 9]
    words = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts]), "--shard-size", 20, "--out"
    out, flushed, disks, fsync, replace = tmp_path / "shards", set(), [], os.fsync, os.replace

    def identity(status):
        return status.st_ino, status.st_size, status.st_mtime_ns

    def disk():
        files = [(path, path.stat()) for path in out.iterdir()]
        return {p.name: p.read_bytes() if identity(s) in flushed else bytes(s.st_size) for p, s in files}

    def flush(fd):
        disks.append(disk())
        fsync(fd)
        flushed.add(identity(os.fstat(fd)))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        patch.setattr(os, "replace", lambda *paths: disks.append(disk()) or replace(*paths))
        whole = shard(*words, out)
    disks.append(disk())
    assert len(disks) > 20 and joined(out) == stream(text for text in texts if "unsplittable" not in text)
    assert whole.out.endswith(f": {len(joined(out))} tokens, {len(read(out))} shards, 2 documents left out\n")
    found = re.findall(r"left out: (\S+), row (\d+): .*stack", whole.err)
    assert found == [(str(words[0]), "3"), (str(words[0]), "7")]
    for i, files in enumerate(disks):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        assert shard(*words, folder).out == whole.out.replace(str(out), str(folder)), i
        for path in out.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), (i, path)


def test_a_folder_is_continued_only_if_it_is_whole_and_from_the_same_files(shard, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = jsonl(Path("x.jsonl"), [{"text": "one two three"}] * 9), "--out", "shards"
    shard(*words)
    assert joined(Path("shards")) == stream(["one two three"] * 9)
    assert [*map(len, read(Path("shards")).values())] == [4, 32]  # not a whole shard: it holds out a tenth, rounded up
    Path("shards/shard_train_000001.bin").unlink()
    refused("pretrain/fineweb.py", *words, says=".*shard_train_000001.bin")
    for more in ["--shard-size", 9], ["--column", "id"]:
        refused("pretrain/fineweb.py", *words, *more, says=".*its progress.json is from other files, settings")
    Path("shards/progress.json").unlink()
    refused("pretrain/fineweb.py", *words, says=".*shards from another source")
    monkeypatch.setattr(fineweb, "tqdm", lambda real=fineweb.tqdm, **words: real(**words | {"disable": True}))
    new = "pretrain/fineweb.py", "--out", "new"
    refused(
        *new, parquet(Path("a.parquet"), [{"text": "one"}, {"text": None}]), says=".*row 2: the column text is null"
    )
    refused(*new, words[0], "--shard-size", 36, says=".*: 36 tokens do not fill a shard of 36 and part of a second")


def test_a_dataset_on_the_hub_is_read_file_by_file(shard, tmp_path, monkeypatch):
    """By default, it is the public dataset, and the shards are written to the folder that train.py reads."""
    (tmp_path / "hub").mkdir()
    parquet(tmp_path / "hub" / "a.parquet", [{"text": "one two", "id": 1}, {"text": "three", "id": 2}])
    parquet(tmp_path / "hub" / "b.parquet", [{"text": "four", "id": "five"}])
    head = "---\nconfigs:\n- {config_name: small, data_files: [{split: train, path: [a.parquet, b.parquet]}]}\n"
    (tmp_path / "hub" / "README.md").write_text(head + "- {config_name: other, data_files: x.parquet}\n---\n")
    shard("--dataset", tmp_path / "hub", "--name", "small", "--out", tmp_path / "shards")
    assert joined(tmp_path / "shards") == stream(["one two", "three", "four"])
    asked, done = {}, {"shards": 0, "tokens": 0, "left_out": 0, "end": True}
    monkeypatch.setattr(fineweb, "begin", lambda args: asked.update(vars(args)) or done)
    shard()
    public = {"dataset": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "column": "text", "shard_size": 10**8}
    assert asked == public | {"files": [], "out": train.parse_args().data}


def test_any_string_is_cut_between_tokens():
    rng = np.random.default_rng(0)
    alphabet = list("ab'!1\n\t\x1c\x1f\x85\xa0\u3000\u2028漢🙂s") + [" "] * 6 + ["\r\n", "'s", "\u200b"]
    texts = ["".join(rng.choice(alphabet, size=14)) for _ in range(3000)]
    cut = [fineweb.BOUNDARY.split(text) for text in texts]
    assert sum(map(len, cut)) > 6000
    for text, pieces in zip(texts, cut, strict=True):
        assert [token for piece in pieces for token in encode(piece)] == encode(text), repr(text)


def public(tokens):
    """Return the bytes of a shard in the format that llm.c's data_common.py describes."""
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_shard_that_is_not_whole_is_refused_by_name(checksum, tmp_path):
    for i in range(3):
        write_shard(shard_path(tmp_path, i), np.arange(3000) + i)
    path = shard_path(tmp_path, 1)
    data, damage = path.read_bytes(), {"is cut short or damaged": public(range(3000))[:-2]}
    if checksum:
        damage["is damaged: its SHA-256"] = data[:4000] + bytes([data[4000] ^ 1]) + data[4001:]
    else:
        Path(f"{path}.sha256").unlink()
        damage["contains the token 50257"] = public([*range(2999), 50257])
    for says, damaged in damage.items():
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{path} {says}"):
            loader = train.DataLoaderLite(tmp_path, 1, 100)
            for _ in range(60):  # a checksum is verified when the shard is first read
                loader.next_batch()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder of public shards, without checksums. No token occurs twice. The first 100 are for validation."""
    folder, start = tmp_path_factory.mktemp("shards"), 0
    for i, size in enumerate((100, 1000, 1337, 1000, 41)):
        name = f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin"
        (folder / name).write_bytes(public(range(start, start + size)))
        start += size
    return folder


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_token_is_read_once_per_epoch_whatever_the_ranks(corpus, world_size):
    loaders = [train.DataLoaderLite(corpus, 2, 7, rank, world_size) for rank in range(world_size)]
    batches = []
    for _ in range(math.ceil(3 * 3378 / (14 * world_size)) + 1):
        for loader in loaders:
            x, y = loader.next_batch()
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (2, 7)
            assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
            batches.append((x.flatten().tolist(), y[-1, -1].item()))
    assert all(batch[1] == following[0][0] for batch, following in zip(batches, batches[1:], strict=False))
    seen = [token for batch, _ in batches for token in batch]
    epochs = [tuple(seen[epoch * 3378 : (epoch + 1) * 3378]) for epoch in range(3)]
    assert all(sorted(epoch) == [*range(100, 3478)] for epoch in epochs) and len(set(epochs)) == 3  # in another order
    assert seen == train.DataLoaderLite(corpus, 2, 7).read(0, len(seen)).tolist()


def test_the_last_tenth_of_a_text_is_held_out():
    loader = train.DataLoaderLite(ROOT / "input.txt", 2, 64)
    text = encode((ROOT / "input.txt").read_text(encoding="utf-8"))
    assert loader.read(0, loader.size).tolist() + loader.validation.tolist() == text
    assert len(loader.validation) == math.ceil(len(text) / 10)


@pytest.mark.parametrize("B, world_size", [(5, 1), (2, 3), (7, 4)])
@torch.no_grad()
def test_the_validation_loss_is_the_same_for_any_batch_and_number_of_ranks(corpus, B, world_size):
    model, T = uneven(), 9
    tokens = torch.arange(100)
    expected = []
    for first in range(0, 99 // T * T, T):
        logits = model(tokens[None, first : first + T])
        expected += F.cross_entropy(logits[0], tokens[first + 1 : first + T + 1], reduction="none").tolist()
    assert np.std(expected) > 0.1 and len(expected) == 99
    loaders = [train.DataLoaderLite(corpus, B, T, rank, world_size) for rank in range(world_size)]
    for limit, wanted in (1000, expected), (50, expected[:45]):
        parts = [train.validate(model, loader, torch.device("cpu"), limit) for loader in loaders]
        total, count = map(sum, zip(*parts, strict=True))
        assert count == len(wanted) and total / count == pytest.approx(np.mean(wanted), abs=1e-5)
