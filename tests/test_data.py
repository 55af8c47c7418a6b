"""The loader returns consecutive batches, starts over at the end of the text, and divides batches among ranks."""

import hashlib
import os

import pytest
import tiktoken
import torch
from conftest import ROOT, RUNGS, TRAIN, encode, load, since, versions

BATCH, LENGTH = 3, 5
SIZE = BATCH * LENGTH
LOADERS = versions("DataLoaderLite")
# Only these include the loader of train.py, which never reaches an end and holds out a tenth of a text.
ALL_LOADERS = versions("DataLoaderLite", among=list(RUNGS))
RANKED = versions("DataLoaderLite", among=since("ddp_run.py", among=list(RUNGS)))
CASES = [(1, script) for script in ALL_LOADERS] + [(ranks, script) for ranks in (2, 3) for script in RANKED]


@pytest.mark.parametrize("ranks, script", CASES)
def test_the_ranks_read_consecutive_shifted_batches_and_start_over(ranks, script, tmp_path):
    """The text is eleven batches and a remainder, which neither two nor three ranks can divide evenly."""
    path, rounds = tmp_path / "short.txt", 11 // ranks
    path.write_bytes((ROOT / "input.txt").read_bytes()[:590])
    tokens = encode(path.read_text())
    assert 11 * SIZE + 2 < len(tokens) < 12 * SIZE
    stream = 4 * tokens[: len(tokens) * 9 // 10] if script == TRAIN else tokens
    places = [(rank, ranks) if script in RANKED else () for rank in range(ranks)]
    loaders = [load(script).DataLoaderLite(path, BATCH, LENGTH, *place) for place in places]
    for turn in range(3 * rounds):
        for rank, loader in enumerate(loaders):
            start = ((turn if script == TRAIN else turn % rounds) * ranks + rank) * SIZE
            for shift, found in enumerate(loader.next_batch()):
                assert found.dtype == torch.int64 and found.shape == (BATCH, LENGTH)
                assert found.flatten().tolist() == stream[start + shift : start + shift + SIZE], (turn, rank, shift)


@pytest.mark.parametrize("script", LOADERS)
def test_a_text_is_read_to_its_last_token_and_must_have_a_batch_for_each_rank(script, tmp_path):
    path = tmp_path / "31 tokens.txt"
    path.write_text(" ".join(map(str, range(31))))
    DataLoaderLite, tokens = load(script).DataLoaderLite, encode(path.read_text())
    assert len(tokens) == 2 * SIZE + 1
    loader = DataLoaderLite(path, BATCH, LENGTH)
    first, second, third = (loader.next_batch()[1] for _ in range(3))
    assert second[-1, -1] == tokens[-1] and torch.equal(third, first)
    for ranks in (1, 2, 3) if script in RANKED else (1,):
        place, most = (0, ranks) if script in RANKED else (), 6 // ranks
        loader = DataLoaderLite(path, most, LENGTH, *place)
        assert torch.equal(loader.next_batch()[0], loader.next_batch()[0])
        with pytest.raises(ValueError, match=f"31 tokens allow --batch-size {most} at most, with T {LENGTH}"):
            DataLoaderLite(path, most + 1, LENGTH, *place)


@pytest.mark.parametrize("script", ALL_LOADERS)
def test_every_byte_and_every_id_is_read_as_it_is(script, tmp_path, monkeypatch):
    """Token ids above 32,767, the signed 16-bit maximum, are read unchanged, and <|endoftext|> as ordinary text.

    A TIKTOKEN_CACHE_DIR of the machine is not used: some container images set one without GPT-2's files.
    """
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(ROOT / "tokenizer"))
    encoding = tiktoken.get_encoding("gpt2")
    text = " SolidGoldMagikarp<|endoftext|>Ünïcode, \r\nWindows lines\r\n"
    text += encoding.decode([*range(32000, 34000), *range(50000, 50256)])
    expected = encoding.encode_ordinary(text)
    assert expected[0] > 32767 and 50256 not in expected and sum(token > 32767 for token in expected) > 1000
    (tmp_path / "rare.txt").write_bytes(text.encode())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    x, y = load(script).DataLoaderLite(tmp_path / "rare.txt", 10, len(expected) // 20).next_batch()
    assert x.flatten().tolist() == expected[: x.numel()] and y[-1, -1] == expected[x.numel()]
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(ROOT / "tokenizer")


def test_the_text_is_the_published_one():
    digest = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    assert hashlib.sha256((ROOT / "input.txt").read_bytes()).hexdigest() == digest
