"""The loader returns consecutive batches, starts over at the end of the text, and divides batches among ranks."""

import hashlib
import os

import numpy as np
import pytest
import tiktoken
import torch
from conftest import ROOT, RUNGS, TRAIN, load, since, versions

BATCH, LENGTH = 3, 5
LOADERS = versions("DataLoaderLite")
# Only ALL_LOADERS includes the loader of train.py, which never reaches an end and holds out a tenth of a text.
ALL_LOADERS = versions("DataLoaderLite", among=list(RUNGS))


@pytest.fixture(scope="module")
def short_text(tmp_path_factory):
    """Return a text file of about 100 tokens: six batches of 15 tokens and a remainder."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_bytes((ROOT / "input.txt").read_bytes()[:320])
    return path


@pytest.fixture(scope="module")
def tokens(short_text):
    os.environ["TIKTOKEN_CACHE_DIR"] = str(ROOT / "tokenizer")
    tokens = tiktoken.get_encoding("gpt2").encode_ordinary(short_text.read_text(encoding="utf-8"))
    assert 91 < len(tokens) < 120 and len(tokens) % 15 not in (0, 1)
    return tokens


@pytest.mark.parametrize("script", ALL_LOADERS)
def test_batches_are_consecutive_shifted_and_start_over(script, short_text, tokens):
    loader = load(script).DataLoaderLite(short_text, BATCH, LENGTH)
    size, whole, epochs = BATCH * LENGTH, (len(tokens) - 1) // (BATCH * LENGTH), 2
    if script == TRAIN:
        tokens, whole, epochs = 3 * tokens[: len(tokens) * 9 // 10], 2 * whole, 1
    for epoch in range(epochs):
        for batch in range(whole):
            x, y = loader.next_batch()
            assert x.dtype == y.dtype == torch.int64
            assert x.shape == y.shape == (BATCH, LENGTH)
            assert x.flatten().tolist() == tokens[batch * size : (batch + 1) * size], (epoch, batch)
            assert y.flatten().tolist() == tokens[batch * size + 1 : (batch + 1) * size + 1], (epoch, batch)


@pytest.mark.parametrize("script", LOADERS)
def test_a_text_of_exactly_one_batch_is_enough_and_one_token_less_is_not(script, short_text, tokens):
    DataLoaderLite, length = load(script).DataLoaderLite, len(tokens) - 1
    loader = DataLoaderLite(short_text, 1, length)
    assert torch.equal(loader.next_batch()[0], loader.next_batch()[0])
    with pytest.raises(ValueError, match=f"{length + 1} tokens allow --batch-size 0 at most, with T {length + 1}"):
        DataLoaderLite(short_text, 1, length + 1)


@pytest.mark.parametrize("script", LOADERS)
def test_a_last_batch_that_ends_with_the_text_is_read(script, tmp_path):
    path = tmp_path / "31 tokens.txt"
    path.write_text(" ".join(map(str, range(31))))
    loader = load(script).DataLoaderLite(path, BATCH, LENGTH)
    assert len(loader.tokens) == 2 * BATCH * LENGTH + 1
    first, second, third = (loader.next_batch()[1] for _ in range(3))
    assert second[-1, -1] == loader.tokens[-1]
    assert torch.equal(third, first)


@pytest.mark.parametrize("script", versions("DataLoaderLite", among=since("ddp_run.py", among=list(RUNGS))))
def test_two_ranks_share_out_the_batches_of_one(short_text, tokens, script):
    DataLoaderLite = load(script).DataLoaderLite
    one = DataLoaderLite(short_text, BATCH, LENGTH)
    ranks = [DataLoaderLite(short_text, BATCH, LENGTH, rank, 2) for rank in (0, 1)]
    rounds = (len(tokens) - 1) // (2 * BATCH * LENGTH)
    first = [one.next_batch() for _ in range(2 * rounds)]
    first += [one.next_batch() for _ in range(2 * rounds)] if script == TRAIN else first
    for epoch in range(2):
        for turn in range(rounds):
            for rank in (0, 1):
                for mine, alone in zip(ranks[rank].next_batch(), first.pop(0), strict=True):
                    assert torch.equal(mine, alone), (epoch, turn, rank)


def test_a_text_without_a_batch_for_each_rank_is_too_short(short_text, tokens):
    length = (len(tokens) - 1) // 2
    load("ddp_run.py").DataLoaderLite(short_text, 1, length, rank=1, world_size=2)
    with pytest.raises(ValueError, match=f"{len(tokens)} tokens allow --batch-size 0 at most, with T {length}"):
        load("ddp_run.py").DataLoaderLite(short_text, 1, length, rank=1, world_size=3)


@pytest.mark.parametrize("script", ALL_LOADERS)
def test_every_id_of_the_vocabulary_is_read_as_it_is(script, tmp_path, monkeypatch):
    """Token ids above 32,767 (the signed 16-bit maximum) are read unchanged. <|endoftext|> is read as ordinary text."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(ROOT / "tokenizer"))
    encoding = tiktoken.get_encoding("gpt2")
    text = " SolidGoldMagikarp<|endoftext|>" + encoding.decode([*range(32000, 34000), *range(50000, 50256)])
    expected = encoding.encode_ordinary(text)
    assert expected[0] > 32767 and 50256 not in expected and sum(token > 32767 for token in expected) > 1000
    (tmp_path / "rare.txt").write_bytes(text.encode())
    x, y = load(script).DataLoaderLite(tmp_path / "rare.txt", 10, len(expected) // 20).next_batch()
    assert x.flatten().tolist() == expected[: x.numel()] and y[-1, -1] == expected[x.numel()]


@pytest.mark.parametrize("script", LOADERS)
def test_the_text_is_338025_tokens_kept_as_uint16(script):
    tokens = load(script).DataLoaderLite(ROOT / "input.txt", 4, 1024).tokens
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.uint16
    assert len(tokens) == 338_025


@pytest.mark.parametrize("script", ALL_LOADERS)
def test_the_text_is_read_byte_for_byte(tmp_path, script):
    path = tmp_path / "mixed.txt"
    path.write_bytes("Ünïcode, \r\nWindows lines\r\nand <|endoftext|> as plain text".encode() * 3)
    loader = load(script).DataLoaderLite(path, 1, 4)
    tokens = [*loader.shards[0], *loader.validation] if script == TRAIN else loader.tokens
    assert tiktoken.get_encoding("gpt2").decode_bytes([int(token) for token in tokens]) == path.read_bytes()


def test_the_files_are_the_published_ones():
    known = {
        "input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "tokenizer/6d1cbeee0f20b3d9449abfede4726ed8212e3aee": (
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
        ),
        "tokenizer/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": (
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
        ),
    }
    for name, digest in known.items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.slow
def test_a_folder_that_the_machine_sets_for_tiktoken_is_not_used(run, tmp_path):
    """Some container images set TIKTOKEN_CACHE_DIR to a folder without GPT-2's files."""
    done = run("baseline.py", "--steps", 1, "--batch-size", 1, TIKTOKEN_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])
