"""Tokenizing loses no document, and pre-training reads each training token once per epoch.

Held-out tokens are not used for training. If the tokenizing program is killed, running it again produces the same
shards as an uninterrupted run. The shards are in llm.c's format. The validation loss does not depend on the batch size
or the number of ranks.
"""

import array
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import fineweb
import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from conftest import END, NO_SCORES, ROOT, TRAIN, encode, uneven, watch
from fineweb import HEADER_BYTES, Shard, shard_path, write_shard


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global train
    import train


@pytest.fixture(scope="session")
def documents():
    """Return a few thousand documents, including an empty document, rare tokens and unusual characters."""
    parts = (ROOT / "input.txt").read_text(encoding="utf-8").split("\n\n")
    return [
        *parts,
        "",
        " SolidGoldMagikarp",
        "<|endoftext|> in a text",
        "two\n\r\n\nlines and a tab\t",
        "Ünïcode 漢字 🙂\u2028",
    ]


@pytest.fixture(scope="session")
def tokens(documents):
    """Return the tokens that the shards of these documents must contain, in order."""
    return np.array([token for text in documents for token in [END, *encode(text)]])


@pytest.fixture(scope="session")
def files(documents, tmp_path_factory):
    """Return a folder with the documents as JSON Lines and as two Parquet files, and the last 30 also as text files."""
    import pandas

    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)]
    (folder / "all.jsonl").write_text("".join(rows), encoding="utf-8")
    for i, part in enumerate((documents[:3000], documents[3000:])):
        pandas.DataFrame({"text": part, "id": range(len(part))}).to_parquet(folder / f"{i}.parquet", row_group_size=700)
    for i, text in enumerate(documents[-30:]):
        name = "[1].txt" if i == 7 else f"{i:02d}.txt"  # a file name that looks like a glob pattern
        (folder / name).write_bytes(text.encode())
    return folder


def shards(folder):
    """Return the shards in a folder, sorted by number."""
    return [Shard(path) for path in sorted(folder.glob("*.bin"), key=lambda path: path.stem.split("_")[-1])]


def joined(folder):
    return np.concatenate([shard[:] for shard in shards(folder)])


@pytest.fixture
def shard(monkeypatch, capfd):
    """Return a function that runs fineweb.py in this process and returns its output."""

    def shard(*words):
        monkeypatch.setattr("sys.argv", ["fineweb.py", *map(str, words)])
        capfd.readouterr()
        fineweb.main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return capfd.readouterr().out

    return shard


@pytest.mark.parametrize("kind", ["all.jsonl", "*.parquet", "*.txt"])
def test_no_document_is_lost_or_written_twice(shard, files, tokens, tmp_path, kind):
    inputs = sorted(files.glob(kind))
    if kind == "*.txt":
        tokens = [token for path in inputs for token in [END, *encode(path.read_bytes().decode())]]
    size = 50_000 if kind != "*.txt" else 500
    printed = shard(*inputs, "--out", tmp_path / "shards", "--shard-size", size)
    made = shards(tmp_path / "shards")
    assert [len(shard) for shard in made[:-1]] == [size] * (len(made) - 1) and 0 < len(made[-1]) <= size
    assert np.array_equal(joined(tmp_path / "shards"), tokens)
    assert f"is complete: {len(tokens)} tokens, {len(made)} shards" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all.jsonl", "*.parquet"])
def test_a_killed_run_completes_the_same_shards(files, tmp_path, kind):
    """After an early and a late kill, running fineweb.py again produces the same shards as an uninterrupted run."""
    out = tmp_path / "shards"
    inputs = sorted(files.glob(kind)) * 3  # a longer input, so that the kills come before the end
    command = [sys.executable, ROOT / "pretrain/fineweb.py", *inputs, "--shard-size", "1000", "--out"]
    subprocess.run([*command, tmp_path / "undisturbed"], check=True, capture_output=True)
    for count in (1, 60):
        process = subprocess.Popen([*command, out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("*.bin"))) < count:
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    subprocess.run([*command, out], check=True, capture_output=True)
    names = sorted(path.name for path in (tmp_path / "undisturbed").glob("*.bin*"))
    assert sorted(path.name for path in out.glob("*.bin*")) == names and len(names) > 1800  # half are checksum files
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    assert not list(out.glob("*.tmp"))


def test_less_than_one_shard_is_divided_and_a_second_run_does_nothing(shard, refused, files, tokens, tmp_path):
    arguments = files / "all.jsonl", "--out", tmp_path / "shards"
    shard(*arguments)
    validation, training = shards(tmp_path / "shards")
    assert len(validation) == math.ceil(len(tokens) / 10)
    assert np.array_equal(joined(tmp_path / "shards"), tokens)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.bin")}
    shard(*arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.bin")} == before
    (tmp_path / "shards" / "shard_train_000001.bin").unlink()  # a shard is missing
    refused("pretrain/fineweb.py", *arguments, says=".*shard_train_000001.bin")


def parquet(path, rows):
    """Write rows to a Parquet file, with the types that pyarrow infers from them."""
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("file", [parquet, jsonl])
def test_other_columns_may_hold_anything(shard, tmp_path, file):
    """Only the text is read. Types that differ between files or rows, or a file without rows, do not stop the run."""
    texts = ["2024-01-01", "not a date", "null", "To be"]
    rows = [
        [{"text": texts[0], "url": None, "date": "2024-01-01", "score": 1}],
        [{"text": text, "url": "x", "date": "unknown", "score": "n/a", "more": [{"a": 1}]} for text in texts[1:]],
    ]
    files = [file(tmp_path / f"{i}.{file.__name__}", part) for i, part in enumerate([rows[0], [], rows[1]])]
    if file is jsonl:  # two types in one file, and empty lines; or an array of rows after a byte order mark
        files = [jsonl(tmp_path / "one.jsonl", rows[0] + rows[1])]
        files[0].write_text(files[0].read_text().replace("\n", "\n\n"))
        files.append(tmp_path / "array.json")
        files[1].write_bytes(b"\xef\xbb\xbf\n" + json.dumps([{"text": "array"}, {"text": "of rows"}]).encode())
        texts += ["array", "of rows"]
    shard(*files, "--out", tmp_path / "shards")
    assert joined(tmp_path / "shards").tolist() == [token for text in texts for token in [END, *encode(text)]]


def test_a_dataset_on_the_hub_is_read_file_by_file(shard, tmp_path):
    """hub_files() finds the files of a configuration, and read_rows() reads addresses, also of compressed files."""
    import fsspec

    (tmp_path / "hub").mkdir()
    parquet(tmp_path / "hub" / "a.parquet", [{"text": "one two", "id": 1}, {"text": "three", "id": 2}])
    parquet(tmp_path / "hub" / "b.parquet", [{"text": "four", "id": "five"}])
    head = "---\nconfigs:\n- {config_name: small, data_files: [{split: train, path: [a.parquet, b.parquet]}]}\n"
    (tmp_path / "hub" / "README.md").write_text(head + "- {config_name: other, data_files: x.parquet}\n---\n")
    shard("--dataset", tmp_path / "hub", "--name", "small", "--out", tmp_path / "shards")
    wanted = [END, *encode("one two"), END, *encode("three"), END, *encode("four")]
    assert joined(tmp_path / "shards").tolist() == wanted
    with fsspec.open("memory://c.jsonl.gz", "wb", compression="gzip") as file:
        file.write(b'{"text": "six"}\n{"text": "seven"}\n')
    files = [tmp_path / "hub" / "a.parquet", "memory://c.jsonl.gz"]
    rows = [(i, row, values["text"]) for i, row, values in fineweb.read_rows(files, {"text": str}, (0, 1))]
    assert rows == [(0, 1, "three"), (1, 0, "six"), (1, 1, "seven")]


def test_a_document_that_tiktoken_cannot_split_is_cut_between_tokens(shard, tmp_path):
    spaces, other = " " * 2_000_000, "\u3000\n" * 600_000
    texts = ["one", f"a{spaces}b", f"{other}c\x1c d", "two"]
    shard(jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts]), "--out", tmp_path / "shards")
    parts = [["one"], ["a", spaces[1:], " b"], [other[:-1], "\nc\x1c d"], ["two"]]  # tiktoken can split these
    wanted = [token for pieces in parts for token in [END, *(t for piece in pieces for t in encode(piece))]]
    for text in texts[1:3]:
        with pytest.raises(ValueError, match="stack"):
            tiktoken.get_encoding("gpt2").encode_to_numpy(text)
    assert joined(tmp_path / "shards").tolist() == wanted and len(wanted) > 3_000_000


def test_any_string_is_cut_between_tokens():
    rng = np.random.default_rng(0)
    alphabet = list("ab'!1\n\t\x1c\x1f\x85\xa0\u3000\u2028漢🙂s") + [" "] * 6 + ["\r\n", "'s", "\u200b"]
    texts = ["".join(rng.choice(alphabet, size=14)) for _ in range(3000)]
    cut = [fineweb.BOUNDARY.split(text) for text in texts]
    assert sum(map(len, cut)) > 6000
    for text, pieces in zip(texts, cut, strict=True):
        assert [token for piece in pieces for token in encode(piece)] == encode(text), repr(text)


def test_a_document_that_cannot_be_tokenized_is_left_out_and_named(shard, tmp_path, monkeypatch):
    """The run goes on, and what it prints and counts is the same after a restart."""
    monkeypatch.setattr(fineweb, "BOUNDARY", re.compile("(?!)"))  # never matches, so the cut does not help
    monkeypatch.setattr(fineweb, "CHUNK", 2)
    rows = [
        {"text": text} for text in ("one", "two", " " * 2_000_000 + "b", "three " * 50, "four", " " * 2_000_000 + "c")
    ]
    words = jsonl(tmp_path / "x.jsonl", rows), "--shard-size", 20, "--out", tmp_path / "shards"
    monkeypatch.setattr(fineweb.tqdm, "write", lambda bar, text, **_: print(text))
    wanted = [END, *encode("one"), END, *encode("two"), END, *encode("three " * 50), END, *encode("four")]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fineweb.tqdm, "write", lambda *args, **_: exec("raise KeyboardInterrupt"))
        shard(*words)
    for _ in range(2):  # the second time, all is done
        printed = shard(*words)
        assert joined(tmp_path / "shards").tolist() == wanted
        assert f"is complete: {len(wanted)} tokens, 3 shards, 2 documents left out\n" in printed
        if "left out: " in printed:
            found = re.findall(r"(?m)^left out: (\S+), row (\d+): .*stack", printed)
            assert found == [(str(words[0]), "3"), (str(words[0]), "6")]


def test_a_lone_surrogate_becomes_a_replacement_character(shard, tmp_path):
    (tmp_path / "x.jsonl").write_text(r'{"text": "a \ud83d b"}' + "\n" + r'{"text": "\ud83d\ude42"}')
    shard(tmp_path / "x.jsonl", "--out", tmp_path / "shards")
    assert joined(tmp_path / "shards").tolist() == [END, *encode("a \ufffd b"), END, *encode("🙂")]


def test_ctrl_c_and_a_changed_input_are_no_success(shard, tmp_path, monkeypatch, refused):
    words = jsonl(tmp_path / "x.jsonl", [{"text": "one two three"}] * 9), "--out", tmp_path / "shards"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(fineweb, "write", lambda *args: os.kill(os.getpid(), signal.SIGINT))
        shard(*words)
    assert exit.value.code == 130
    jsonl(words[0], [{"text": "one two three"}] * 10)
    refused("pretrain/fineweb.py", *words, says="its progress.json is from other files")


WRONG_CORPUS = {
    "no such file": (["nowhere.jsonl"], r"\S*nowhere.jsonl is not a file"),
    "no text": (["empty.jsonl"], "0 tokens do not fill a shard of 100000000 and part of a second one"),
    "a folder": (["foreign"], r"\S*foreign is not a file"),
    "an unknown kind": (["c.doc"], r"\S*c\.doc is not a \.txt, \.jsonl or \.parquet file"),
    "no such column": (["a.jsonl", "--column", "body"], "a.jsonl, row 1: the column body is missing$"),
    "no such column in Parquet": (["a.parquet", "--column", "body"], "a.parquet, row 1: the column body is missing$"),
    "a null": (["hole.jsonl"], "hole.jsonl, row 2: the column text is null$"),
    "a null in Parquet": (["hole.parquet"], "hole.parquet, row 2: the column text is null$"),
    "a number": (["hole.parquet", "--column", "id"], "hole.parquet, row 1: the column id is int$"),
    "a list": (["list.json"], "list.json, row 2: list instead of an object$"),
    "not JSON": (["broken.jsonl"], "broken.jsonl, row 2: Expecting value$"),
    "no Parquet": (["broken.parquet"], "broken.parquet, row 1: .*Parquet"),
    "a file that is not a shard": (["a.jsonl", "--out", "foreign"], r"--out \S*foreign: \S*x.bin is not a shard"),
    "shards of something else": (["a.jsonl", "--out", "public"], "public.*another source"),
    "begun with other settings": (["a.jsonl", "--out", "begun", "--shard-size", "9"], "begun: its progress.json"),
    "a progress.json of another program": (["a.jsonl", "--out", "theirs"], "theirs: its progress.json"),
    "one shard alone": (
        ["a.jsonl", "--shard-size", "12"],
        "12 tokens do not fill a shard of 12 and part of a second one",
    ),
    "a shard of one token": (["a.jsonl", "--shard-size", "1"], "at least 2"),
    "more tokens than the header can count": (["a.jsonl", "--shard-size", str(2**31)], "less than 2"),
}


@pytest.mark.parametrize("case", WRONG_CORPUS)
def test_what_is_wrong_with_a_corpus_is_one_line(case, tmp_path, monkeypatch, capfd):
    arguments, pattern = WRONG_CORPUS[case]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one two three four five six seven eight nine ten now"}))
    assert len(encode("one two three four five six seven eight nine ten now")) == 11
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "hole.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    parquet(tmp_path / "a.parquet", [{"text": "one"}])
    parquet(tmp_path / "hole.parquet", [{"text": "one", "id": 1}, {"text": None, "id": 2}])
    (tmp_path / "list.json").write_text('[{"text": "one"}, ["two"]]')
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "broken.parquet").write_text("text")
    (tmp_path / "c.doc").write_text("text")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.bin").write_bytes(b"theirs")
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "x_train_000001.bin").write_bytes(public([1, 2, 3]))
    (tmp_path / "begun").mkdir()
    fields = {"source": {}, "shards": 0, "tokens": 0, "start": [0, 0], "skip": 0, "left_out": 0, "end": False}
    (tmp_path / "begun" / "progress.json").write_text(json.dumps(fields))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "progress.json").write_text("[1]")
    here = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = [str(tmp_path / a) if (tmp_path / a).exists() or a.startswith("nowhere") else a for a in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "new")]
    monkeypatch.setattr("sys.argv", ["fineweb.py", *arguments])
    with pytest.raises(SystemExit) as exit:
        fineweb.main()
    # A run whose case contains "alone" fails only after it has written a shard.
    assert exit.value.code == (1 if "alone" in case else 2)
    written = capfd.readouterr().err
    lines = [line for line in re.split(r"[\r\n]", written) if line and "tokens/s]" not in line]  # not the progress bar
    assert len(lines) == 1 and re.match(f"fineweb.py: error: .*{pattern}", lines[0]), written
    assert {path: path.read_bytes() for path in here} == here
    assert (tmp_path / "new").exists() == ("alone" in case)


def public(tokens, magic=20240520, version=1, **_):
    """Return the bytes of a shard in the format that llm.c's data_common.py describes."""
    return struct.pack("<256i", magic, version, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_a_public_shard_is_trained_on(tmp_path, monkeypatch):
    """train.py accepts training and validation shards with the hub's file names and without checksum files."""
    folder = tmp_path / "finewebedu10B"
    folder.mkdir()
    held_out, text = np.array_split(encode((ROOT / "input.txt").read_text(encoding="utf-8")[:60_000]), [3000])
    (folder / "finewebedu_val_000000.bin").write_bytes(public(held_out))
    (folder / "finewebedu_train_000001.bin").write_bytes(public(text))
    loader = train.DataLoaderLite(folder, 4, 64)
    assert loader.size == len(text) and np.array_equal(loader.validation[:], held_out)
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    words = "--model", "nano", "--batch-size", 4, "--seq-len", 64, "--total-batch-size", 256
    for i, step in enumerate(watch(TRAIN, "--data", folder, "--steps", 2, *words)):
        targets = torch.from_numpy(text[256 * i + 1 : 256 * (i + 1) + 1])
        loss = F.cross_entropy(step.logits[0].flatten(0, 1).float(), targets).item()
        assert float(step.printed["loss"]) == pytest.approx(loss, abs=2e-3), i


def test_anybody_can_read_what_is_written(shard, files, tokens, tmp_path):
    """Code written only from the format's description can read the shards, and sha256sum confirms their checksums."""
    shard(files / "all.jsonl", "--out", tmp_path, "--shard-size", 50_000)
    kinds, found = [], []
    for path in sorted(tmp_path.glob("*.bin"), key=lambda path: path.name[-10:]):
        with open(path, "rb") as file:
            header, body = array.array("i", file.read(1024)), array.array("H", file.read())
        assert header[:3].tolist() == [20240520, 1, len(body)] and not any(header[3:])
        kinds.append(path.name.split("_")[1])
        found += body
    assert kinds == ["val"] + ["train"] * (len(kinds) - 1) and len(kinds) > 3
    assert found == tokens.tolist()
    checksums = sorted(path.name for path in tmp_path.glob("*.sha256"))
    done = subprocess.run(["sha256sum", "-c", *checksums], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == len(kinds), done.stdout + done.stderr


def damaged(name, data):
    """Return a shard's bytes with the damage that `name` describes."""
    if name == "cut short":
        return data[:-2]
    if name == "empty":
        return b""
    if name == "no tokens":
        return public([])
    if name == "another magic number":
        return public(range(3000), magic=20240801)  # llm.c's magic number for the Llama 3 vocabulary
    if name == "another version":
        return public(range(3000), version=2)
    if name == "another vocabulary":
        return public([*range(2999), 50257])
    return data[:4000] + bytes([data[4000] ^ 1]) + data[4001:]


DAMAGE = {
    "cut short": "is cut short or damaged: 3000 tokens, but 7022 bytes",
    "empty": "is not a shard of GPT-2 tokens",
    "no tokens": "is cut short",
    "another magic number": "is not a shard of GPT-2 tokens",
    "another version": "is not a shard of GPT-2 tokens in llm.c's format, version 1",
    "a flipped bit": "is damaged: its SHA-256 is not the one in ",
    "another vocabulary": "contains the token 50257, but GPT-2 has 50257",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_shard_that_is_not_whole_is_refused_by_name(name, tmp_path, refused):
    for i in range(3):
        write_shard(shard_path(tmp_path, i), np.arange(3000) + i)
    path = shard_path(tmp_path, 1)
    path.write_bytes(damaged(name, path.read_bytes()))
    if name == "another vocabulary":
        Path(f"{path}.sha256").unlink()
    with pytest.raises(ValueError, match=re.escape(f"{path} {DAMAGE[name]}")):
        Shard(path)[:]
    if name in ("a flipped bit", "another vocabulary"):  # train.py detects these only when it reads the shard
        loader = train.DataLoaderLite(tmp_path, 1, 100)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            for _ in range(60):
                loader.next_batch()
    else:
        refused(TRAIN, "--data", tmp_path, says=re.escape(str(path)))


@pytest.mark.parametrize("names", [["x_train_1", "x_train_2"], ["x_val_0"], ["x_val_0", "x_train_1", "y_values_2"], []])
def test_shards_without_train_or_val_in_their_names_are_refused(names, tmp_path, refused):
    for name in names:
        write_shard(tmp_path / f"{name}.bin", np.arange(3000))
    words = "--data", tmp_path, "--steps", 1, "--total-batch-size", 512  # keeps a run that is not rejected short
    refused(TRAIN, *words, says=rf"{re.escape(str(tmp_path))}: \d shards match .* both")


def test_a_shard_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A shard is flushed to disk before it is renamed to its final name. Its checksum file is written before the shard.

    Without the flush, a power cut could leave a file of the right size that is full of zeros.
    """
    path, events, fsync, replace = shard_path(tmp_path, 1), [], os.fsync, os.replace

    def look(name, real, *args):
        events.append((name, sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir())))
        real(*args)

    monkeypatch.setattr(os, "fsync", lambda *args: look("fsync", fsync, *args))
    monkeypatch.setattr(os, "replace", lambda *args: look("replace", replace, *args))
    write_shard(path, np.arange(3000))
    line = len(f"{'0' * 64}  {path.name}\n")
    checksum = [(f"{path.name}.sha256.tmp", line)]
    whole = [(f"{path.name}.sha256", line), (f"{path.name}.tmp", HEADER_BYTES + 2 * 3000)]
    assert events == [("fsync", checksum), ("replace", checksum), ("fsync", whole), ("replace", whole)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder of shards of 100 (validation), 1000, 1337, 1000 and 41 tokens. No token occurs twice."""
    folder = tmp_path_factory.mktemp("shards")
    start = 0
    for i, size in enumerate((100, 1000, 1337, 1000, 41)):
        write_shard(shard_path(folder, i), np.arange(start, start + size))
        start += size
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_token_is_read_once_per_epoch_whatever_the_ranks(corpus, world_size):
    loaders = [train.DataLoaderLite(corpus, 2, 7, rank, world_size) for rank in range(world_size)]
    stream = []
    for _ in range(math.ceil(3 * 3378 / (14 * world_size)) + 1):
        for loader in loaders:
            x, y = loader.next_batch()
            assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (2, 7)
            assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
            stream.append((x.flatten().tolist(), y[-1, -1].item()))
    assert all(batch[1] == following[0][0] for batch, following in zip(stream, stream[1:], strict=False))
    seen = [token for batch, _ in stream for token in batch]
    epochs = [seen[i * 3378 : (i + 1) * 3378] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(100, 3478))
    alone = train.DataLoaderLite(corpus, 2, 7)
    assert seen == alone.read(0, len(seen)).tolist()


def test_each_epoch_and_each_seed_orders_the_shards_anew(corpus):
    def order(seed, epoch):
        tokens = train.DataLoaderLite(corpus, 1, 1, seed=seed).read(3378 * epoch, 3378)
        return [int(token) for token in tokens if token in (100, 1100, 2437, 3437)]  # the first token of each shard

    orders = {(seed, epoch): order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert all(sorted(order) == [100, 1100, 2437, 3437] for order in orders.values())
    assert len({tuple(orders[0, epoch]) for epoch in range(4)}) > 1
    assert len({tuple(orders[seed, 0]) for seed in range(4)}) > 1
    assert order(3, 2) == orders[3, 2]


def test_a_place_in_the_stream_is_one_number(corpus):
    first, second = (train.DataLoaderLite(corpus, 3, 11) for _ in range(2))
    for _ in range(150):  # reads past the end of every shard and of an epoch
        first.next_batch()
    second.position = first.position
    for _ in range(150):
        for ours, theirs in zip(second.next_batch(), first.next_batch(), strict=True):
            assert torch.equal(ours, theirs)


def test_of_a_text_the_last_tenth_is_held_out():
    loader = train.DataLoaderLite(ROOT / "input.txt", 2, 64)
    text = encode((ROOT / "input.txt").read_text(encoding="utf-8"))
    assert loader.read(0, loader.size).tolist() + loader.validation.tolist() == text
    assert len(loader.validation) == math.ceil(len(text) / 10)


@pytest.mark.parametrize("B, world_size", [(1, 1), (5, 1), (16, 1), (2, 3), (7, 4)])
@torch.no_grad()
def test_the_validation_loss_is_the_same_for_any_batch_and_number_of_ranks(corpus, B, world_size):
    model, T = uneven(), 9
    tokens = torch.arange(100)
    expected = []
    for first in range(0, 99 // T * T, T):
        logits = model(tokens[None, first : first + T])
        expected += F.cross_entropy(logits[0], tokens[first + 1 : first + T + 1], reduction="none").tolist()
    assert np.std(expected) > 0.1
    parts = [
        train.validate(model, train.DataLoaderLite(corpus, B, T, rank, world_size), torch.device("cpu"), 1000)
        for rank in range(world_size)
    ]
    total, count = map(sum, zip(*parts, strict=True))
    assert count == len(expected) == 99
    assert total / count == pytest.approx(np.mean(expected), abs=1e-5)


@torch.no_grad()
def test_validation_stops_at_its_limit(corpus):
    loader = train.DataLoaderLite(corpus, 4, 9)
    assert train.validate(uneven(), loader, torch.device("cpu"), limit=50)[1] == 45
