"""Pre-training: shards that lose nothing, scores that are right, a run that is killed, resumed, exported, reloaded."""

import contextlib
import copy
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import fineweb
import hellaswag
import numpy as np
import pandas
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from checkpoint import load_model
from conftest import BF16_CPU, ROOT, load, save_gpt2, watch
from fineweb import HEADER, Shard, write_shard

TRAIN = "pretrain/train.py"
EAGER = {"TORCH_COMPILE_DISABLE": "1"}  # test_everything_stays_compiled is about the compiler
END = 50256
train = load(TRAIN)
os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(ROOT / "tokenizer"))
encode = tiktoken.get_encoding("gpt2").encode_ordinary


@pytest.fixture(scope="session")
def documents():
    """A few thousand texts, some of them awkward."""
    parts = (ROOT / "input.txt").read_text(encoding="utf-8").split("\n\n")
    return [*parts, "", "<|endoftext|> in a text", "two\n\r\n\nlines and a tab\t", "Ünïcode 漢字 🙂\u2028"]


@pytest.fixture(scope="session")
def tokens(documents):
    """What their shards must hold together."""
    return np.array([token for text in documents for token in [END, *encode(text)]])


@pytest.fixture(scope="session")
def files(documents, tmp_path_factory):
    """The same documents as JSON lines, as two Parquet files, and as text files."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)]
    (folder / "all.jsonl").write_text("".join(rows), encoding="utf-8")
    for i, part in enumerate((documents[:3000], documents[3000:])):
        pandas.DataFrame({"text": part, "id": range(len(part))}).to_parquet(folder / f"{i}.parquet", row_group_size=700)
    for i, text in enumerate(documents[-30:]):
        name = "[1].txt" if i == 7 else f"{i:02d}.txt"  # no pattern, but a name
        (folder / name).write_bytes(text.encode())
    return folder


def shards(folder):
    return [Shard(path) for path in sorted(folder.glob("*.bin"))]


def joined(folder):
    return np.concatenate([shard[:] for shard in shards(folder)])


@pytest.mark.parametrize("kind", ["all.jsonl", "*.parquet", "*.txt"])
def test_no_document_is_lost_or_written_twice(run, files, documents, tokens, tmp_path, kind):
    inputs = sorted(files.glob(kind))
    if kind == "*.txt":
        tokens = [token for path in inputs for token in [END, *encode(path.read_bytes().decode())]]
    size = 50_000 if kind != "*.txt" else 500
    done = run("pretrain/fineweb.py", *inputs, "--out", tmp_path / "shards", "--shard-size", size)
    assert done.returncode == 0, done.stderr
    made = shards(tmp_path / "shards")
    assert [len(shard) for shard in made[:-1]] == [size] * (len(made) - 1) and 0 < len(made[-1]) <= size
    assert np.array_equal(joined(tmp_path / "shards"), tokens)
    count = 30 if kind == "*.txt" else len(documents)
    assert f"is complete: {count} documents, {len(tokens)} tokens, {len(made)} shards" in done.stdout


@pytest.mark.parametrize("kind", ["all.jsonl", "*.parquet"])
def test_a_killed_run_goes_on_to_the_same_shards(files, tmp_path, kind):
    """Killed with SIGKILL four times, at different moments of its work; the same command goes on."""
    out = tmp_path / "shards"
    command = [sys.executable, ROOT / "pretrain/fineweb.py", *sorted(files.glob(kind)), "--shard-size", "1000", "--out"]
    subprocess.run([*command, tmp_path / "undisturbed"], check=True, capture_output=True)
    for count in (1, 9, 40, 90):
        process = subprocess.Popen([*command, out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("*.bin"))) < count:
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
        assert len(list(out.glob("*.bin"))) < 300
    subprocess.run([*command, out], check=True, capture_output=True)
    names = sorted(path.name for path in (tmp_path / "undisturbed").glob("*.bin"))
    assert sorted(path.name for path in out.glob("*.bin")) == names and len(names) > 300
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name
    assert not list(out.glob("*.tmp"))


def test_less_than_one_shard_is_divided_and_a_second_run_does_nothing(run, files, tokens, tmp_path):
    arguments = ["pretrain/fineweb.py", files / "all.jsonl", "--out", tmp_path / "shards"]
    assert run(*arguments).returncode == 0
    validation, training = shards(tmp_path / "shards")
    assert len(validation) == math.ceil(len(tokens) / 10)
    assert np.array_equal(joined(tmp_path / "shards"), tokens)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.bin")}
    assert run(*arguments).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.bin")} == before
    (tmp_path / "shards" / "shard_000001.bin").unlink()  # "complete" would be untrue
    done = run(*arguments)
    assert done.returncode == 2 and "shard_000001.bin" in done.stderr and len(done.stderr.splitlines()) == 1


WRONG_CORPUS = {
    "no such file": (["nowhere.jsonl"], "nowhere.jsonl"),
    "two kinds": (["a.jsonl", "b.txt"], "all of one kind"),
    "an unknown kind": (["c.doc"], r"\.doc"),
    "no such column": (["a.jsonl", "--column", "body"], "body"),
    "a row without text": (["hole.jsonl"], "no text"),
    "not JSON": (["broken.jsonl"], "broken.jsonl"),
    "shards of something else": (["a.jsonl", "--out", "foreign"], "foreign.*something else"),
    "begun with other settings": (["a.jsonl", "--out", "begun", "--shard-size", "9"], "begun: its progress.json"),
    "a progress.json of another program": (["a.jsonl", "--out", "theirs"], "theirs: its progress.json"),
    "one shard alone": (["a.jsonl", "--shard-size", "12"], "12 tokens make no two shards"),
    "a shard of one token": (["a.jsonl", "--shard-size", "1"], "at least 2"),
}


@pytest.mark.parametrize("case", WRONG_CORPUS)
def test_what_is_wrong_with_a_corpus_is_one_line(case, tmp_path, monkeypatch, capfd):
    arguments, pattern = WRONG_CORPUS[case]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one two three four five six seven eight nine ten now"}))
    assert len(encode("one two three four five six seven eight nine ten now")) == 11
    (tmp_path / "hole.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.doc").write_text("text")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x.bin").write_bytes(b"theirs")
    (tmp_path / "begun").mkdir()
    fields = {"source": {}, "shards": 0, "tokens": 0, "documents": 0, "before": None, "skip": 0, "end": False}
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
    assert exit.value.code == (1 if "alone" in case else 2)  # there a shard was written already
    written = capfd.readouterr().err
    lines = [line for line in re.split(r"[\r\n]", written) if line and "tokens/s]" not in line]  # the progress bar
    assert len(lines) == 1 and re.match(f"fineweb.py: error: .*{pattern}", lines[0]), written
    assert {path: path.read_bytes() for path in here} == here


def test_a_hub_that_cannot_be_reached_is_one_line(run, tmp_path):
    done = run("pretrain/fineweb.py", "--out", tmp_path / "new", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "on the hub: " in done.stderr and "without a network, give files" in done.stderr


def damaged(name, data):
    """A shard's bytes with one thing wrong."""
    head, body = bytearray(data[: HEADER.size]), bytearray(data[HEADER.size :])
    if name == "cut short":
        return bytes(head + body[:-2])
    if name == "no header":
        return bytes(body)
    if name == "empty":
        return b""
    if name == "another vocabulary":
        struct.pack_into("<I", head, 12, 100277)
    if name == "another version":
        struct.pack_into("<I", head, 8, 2)
    if name == "a flipped bit":
        body[len(body) // 2] ^= 1
    return bytes(head + body)


DAMAGE = {
    "cut short": "is cut short or not whole: 3000 tokens, but 6062 bytes",
    "no header": "is not a shard",
    "empty": "is not a shard",
    "another vocabulary": "is of a vocabulary of 100277 tokens, not GPT-2's 50257",
    "another version": "has version 2",
    "a flipped bit": "is damaged",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_shard_that_is_not_whole_is_refused_by_name(name, tmp_path, run):
    for i in range(3):
        write_shard(tmp_path / f"shard_{i:06d}.bin", np.arange(3000) + i)
    path = tmp_path / "shard_000001.bin"
    path.write_bytes(damaged(name, path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(f"{path} {DAMAGE[name]}")):
        Shard(path)[:]
    if name == "a flipped bit":  # it is read when training comes to it; the other shard stays good
        loader = train.DataLoaderLite(tmp_path, 1, 100)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            for _ in range(60):
                loader.next_batch()
    else:
        done = run(TRAIN, "--data", tmp_path)
        assert done.returncode == 2
        assert re.fullmatch(f"train.py: error: --data .*{re.escape(str(path))}.*\n", done.stderr), done.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Shards of 100 (for validation), 1000, 1337, 1000 and 41 tokens, no two of which are the same."""
    folder = tmp_path_factory.mktemp("shards")
    start = 0
    for i, size in enumerate((100, 1000, 1337, 1000, 41)):
        write_shard(folder / f"shard_{i:06d}.bin", np.arange(start, start + size))
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
        return [int(token) for token in tokens if token in (100, 1100, 2437, 3437)]  # the first of each shard

    orders = {(seed, epoch): order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert all(sorted(order) == [100, 1100, 2437, 3437] for order in orders.values())
    assert len({tuple(orders[0, epoch]) for epoch in range(4)}) > 1
    assert len({tuple(orders[seed, 0]) for seed in range(4)}) > 1
    assert order(3, 2) == orders[3, 2]


def test_a_place_in_the_stream_is_one_number(corpus):
    first, second = (train.DataLoaderLite(corpus, 3, 11) for _ in range(2))
    for _ in range(150):  # over the end of an epoch, and of every shard
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


def nano(seed=0):
    """A nano model whose losses differ from token to token."""
    torch.manual_seed(seed)
    model = train.GPT(train.MODELS["nano"]).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.08)
    return model


@pytest.mark.parametrize("B, world_size", [(1, 1), (5, 1), (16, 1), (2, 3), (7, 4)])
@torch.no_grad()
def test_the_validation_loss_is_the_same_for_any_batch_and_number_of_ranks(corpus, B, world_size):
    model, T = nano(), 9
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
    assert train.validate(nano(), loader, torch.device("cpu"), limit=50)[1] == 45


@torch.no_grad()
def test_a_sample_is_what_its_seed_says():
    model, prompt = nano(), encode("To be, or not")
    one, two, other = (train.generate(model, prompt, seed, torch.device("cpu")) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.shape == (len(prompt) + 32,) and one[: len(prompt)].tolist() == prompt and one.max() < 50257
    for i in range(
        len(prompt), len(one)
    ):  # each token is one of the 50 that the model finds likeliest after the others
        assert one[i] in model(one[None, :i])[0, -1, :50257].topk(51).indices  # 51: rounding may change places
    assert len(set(one[len(prompt) :].tolist())) > 5


# HellaSwag


class Liker(torch.nn.Module):
    """A model to which every token costs 1 nat more than the token liked best, and that one nearly nothing."""

    def __init__(self, liked, cost=1.0):
        super().__init__()
        self.config = train.GPTConfig()
        self.liked, self.cost = liked, cost

    def forward(self, idx):
        logits = torch.full((*idx.shape, 50304), -20.0)
        logits[..., self.liked] = 0.0
        logits[..., encode(" dog")[0]] = -self.cost
        return logits


def example(endings, label, context="The cat", **more):
    return json.dumps({"ind": 1, "ctx": context, "endings": endings, "label": label} | more) + "\n"


@torch.compiler.set_stance("force_eager")  # the compiled one is run below, as a user runs it
def scores(path, model):
    by_sum, by_mean, n = hellaswag.count_right(model, hellaswag.read_examples(path), 1024, torch.device("cpu"))
    return by_sum, by_mean, n


def test_the_answers_of_examples_made_for_it_are_known(tmp_path):
    """To this model " cat" is nearly free, " dog" costs 1 nat, any other token 20."""
    long = "A much longer context, which costs a lot"
    lines = [  # and whether the sum, and the mean, finds the right one
        (example(["cat cat", "dog dog", "sun", "sun sun"], 0), True, True),
        (example(["sun", "dog dog", "cat cat", "sun sun"], 0), False, False),
        (example(["sun dog", "sun sun", "sun", "sun sun sun"], 2), True, False),  # 20 nats, not 21; but 10.5 each
        (example(["sun sun", "sun", "dog dog dog dog dog dog", "cat sun sun cat cat"], 2), True, True),
        (example(["dog dog dog", "cat sun cat cat cat cat cat cat cat cat cat cat", "sun", "sun"], 0), True, True),
        (example(["cat dog dog cat", "dog", "sun", "sun"], 0, context=long), False, True),  # 2 nats, 0.5 each
        (example(["cat", "dog dog dog dog dog dog dog dog", "sun", "sun"], 0, context=long), True, True),
    ]
    (tmp_path / "x.jsonl").write_text("".join(line for line, _, _ in lines))
    expected = sum(by_sum for _, by_sum, _ in lines), sum(by_mean for _, _, by_mean in lines), len(lines)
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == expected
    for line, by_sum, by_mean in lines:  # and each by itself
        (tmp_path / "x.jsonl").write_text(line)
        assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (by_sum, by_mean, 1), line


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def test_the_score_is_that_of_one_text_at_a_time(tmp_path):
    """A model with no pattern to it, against the definition: no batches, no filling up, no compiler."""
    rng = np.random.default_rng(0)
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()

    def text(n):
        return " ".join(rng.choice(words, n))

    rows = [
        ([text(rng.integers(1, 12)) for _ in range(4)], int(rng.integers(4)), text(rng.integers(1, 30)))
        for _ in range(25)
    ]
    (tmp_path / "x.jsonl").write_text("".join(example(endings, label, context) for endings, label, context in rows))
    model, right = nano(), np.zeros(2, dtype=int)
    for endings, label, context in rows:
        costs = []
        for ending in endings:
            before, after = encode(context), encode(" " + ending)
            logits = model(torch.tensor([before + after]))[0, :, :50257].double().log_softmax(-1)
            nats = -logits[torch.arange(len(before) - 1, len(before + after) - 1), after]
            costs.append((nats.sum().item(), nats.mean().item()))
        right += [min(range(4), key=lambda i: costs[i][kind]) == label for kind in (0, 1)]
    examples = hellaswag.read_examples(tmp_path / "x.jsonl")
    by_sum, by_mean, n = hellaswag.count_right(model, examples, 256, torch.device("cpu"))
    assert (by_sum, by_mean, n) == (*right, 25)
    parts = [hellaswag.count_right(model, examples, 700, torch.device("cpu"), rank, 3) for rank in range(3)]
    assert tuple(map(sum, zip(*parts, strict=True))) == (by_sum, by_mean, n)
    assert hellaswag.count_right(model, [], 700, torch.device("cpu")) == (0, 0, 0)


@torch.no_grad()
def test_a_text_longer_than_the_model_keeps_its_ending(tmp_path):
    long = " ".join(["sun"] * 1500)
    (tmp_path / "x.jsonl").write_text(example(["sun", "cat", "sun", "sun"], 1, context=long))
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (1, 1, 1)


@torch.no_grad()
def test_a_context_may_be_empty_and_a_line_may_hold_any_character(tmp_path):
    lines = [example(["sun", "cat", "sun", "sun"], 1, context=""), example(["sun", "cat\u2028", "sun", "sun"], 1)]
    text = "".join(json.dumps(json.loads(line), ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    assert len(hellaswag.read_examples(tmp_path / "x.jsonl")) == 2
    (tmp_path / "x.jsonl").write_text(lines[0])
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (1, 1, 1)
    (tmp_path / "x.jsonl").write_text(lines[0].replace('"label": 1', '"label": 0'))
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (0, 0, 1)


WRONG_EXAMPLE = {
    "not JSON": ('{"ctx": "The cat', "line 2 is no example of HellaSwag: JSONDecodeError"),
    "no context": ('{"endings": ["a", "b", "c", "d"], "label": 0}', "line 2 .*'ctx'"),
    "three endings": (example(["a", "b", "c"], 0), "line 2 .*3 endings"),
    "an ending longer than the model": (example(["a", "b", "c", "sun " * 1100], 0), r"line 2 .*, 110\d\]"),
    "no such label": (example(["a", "b", "c", "d"], 4), "line 2 .*label 4"),
    "a list": ("[1, 2]", "line 2 .*"),
}


@pytest.mark.parametrize("case", WRONG_EXAMPLE)
def test_a_line_that_is_no_example_is_named(case, tmp_path):
    line, pattern = WRONG_EXAMPLE[case]
    (tmp_path / "x.jsonl").write_text(example(["a", "b", "c", "d"], "2") + line + "\n")
    with pytest.raises(ValueError, match=pattern):
        hellaswag.read_examples(tmp_path / "x.jsonl")


# The run


def test_the_training_step_is_that_of_ddp_run(monkeypatch, tmp_path):
    """From the same weights, on the same batch, bit for bit: logits, loss, every gradient, every weight after it."""
    monkeypatch.setattr(train, "evaluate", lambda *args: (9.0, None, []))
    monkeypatch.setattr(train, "count_right", None)
    folder = save_gpt2(tmp_path / "gpt2")[0]
    args = ["--init-from", folder, "--steps", 3, "--total-batch-size", 4 * 64]
    before = watch("ddp_run.py", *args)
    after = watch(TRAIN, *args, "--data", ROOT / "input.txt", "--warmup-steps", 10)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(other.logits[0], one.logits[0])
        assert other.printed["loss"] == one.printed["loss"] and other.printed["norm"] == one.printed["norm"]
        for name, grad in one.grads.items():
            assert torch.equal(other.grads[name], grad), name
            assert torch.equal(other.after[name], one.after[name]), name


def test_the_defaults_are_the_recipe():
    assert 19073 * 524288 == pytest.approx(10e9, rel=1e-4)
    rates = [train.get_lr(step, 19073) for step in (0, 714, 715, 19073)]
    assert rates == pytest.approx([6e-4 / 715, 6e-4, 6e-4, 6e-5])
    source = (ROOT / TRAIN).read_text(encoding="utf-8")
    for option, default in ("steps", 19073), ("warmup-steps", 715), ("eval-every", 250):
        assert re.search(rf'"--{option}",.*default={default}\b', source), option


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """HellaSwag's format, from the text itself: the right ending is what follows there."""
    path = tmp_path_factory.mktemp("hellaswag") / "questions.jsonl"
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()
    rng, lines = np.random.default_rng(1), []
    for label in rng.integers(4, size=40):
        places = rng.integers(len(words) - 40, size=4)
        endings = [" ".join(words[place + 12 : place + 20]) for place in places]
        lines.append(example(endings, int(label), " ".join(words[places[label] : places[label] + 12])))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A sixth of the text: less to validate on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "input.txt").read_bytes()[:180_000])
    return path


@pytest.fixture(scope="session")
def arguments(text, questions):
    """What makes a run of 8 steps short, with an evaluation after every 3."""
    return [
        *("--data", text, "--steps", 8, "--eval-every", 3, "--save-every", 2, "--keep", 9),
        *("--batch-size", 16, "--seq-len", 64, "--total-batch-size", 2048, "--warmup-steps", 2),
        *("--hellaswag", questions, "--prompt", "ROMEO:"),
    ]


def records(path):
    """A log without its times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "sec"} for row in rows]


@pytest.fixture(scope="session")
def undisturbed(run, arguments, tmp_path_factory):
    """A whole run: its process, its folder of checkpoints, with a log and TensorBoard's files in it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    paths = ["--checkpoint-dir", folder / "ck", "--log-file", folder / "log.jsonl", "--tensorboard", folder / "tb"]
    done = run(TRAIN, *arguments, *paths, **EAGER)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done, folder


def test_what_a_run_prints_and_logs(undisturbed, text):
    done, folder = undisturbed
    log = records(folder / "log.jsonl")
    evaluated = [row for row in log if "val_loss" in row]
    assert [row["step"] for row in evaluated] == [0, 3, 6, 8]
    assert [row["step"] for row in log if "loss" in row] == list(range(8))
    assert evaluated[0]["val_loss"] == pytest.approx(math.log(50304), abs=0.25)
    assert evaluated[-1]["val_loss"] < evaluated[0]["val_loss"] - 0.5
    lines = done.stdout.splitlines()
    tokens = len(encode(text.read_text(encoding="utf-8")))
    assert f"loaded {tokens * 9 // 10} tokens, and {math.ceil(tokens / 10)} for validation" in lines
    assert f"1 epoch = {tokens * 9 // 10 // 1024} batches" in lines
    for row in evaluated:
        assert 0 <= row["hellaswag"] <= 1 and row["hellaswag"] * 40 == pytest.approx(round(row["hellaswag"] * 40))
        start = f"step {row['step']:4d} | val loss {row['val_loss']:.6f} | HellaSwag {row['hellaswag']:.4f} | "
        (place,) = [i for i, line in enumerate(lines) if line.startswith(start)]
        assert [json.loads(line) for line in lines[place + 1 : place + 5]] == row["samples"]
        assert len(set(row["samples"])) == 4 and all(text.startswith("ROMEO:") for text in row["samples"])
    assert lines[-1].startswith("median of steps 4-7: ")


def test_the_scores_are_those_of_the_saved_weights(undisturbed, text):
    """Not of the weights before or after."""
    _, folder = undisturbed
    loader = train.DataLoaderLite(text, 8, 64)
    for row in records(folder / "log.jsonl"):
        if "val_loss" in row and row["step"]:
            model = load_model(folder / "ck" / f"step_{row['step']:08d}.pt")
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16_CPU):
                total, count = train.validate(model, loader, torch.device("cpu"), 2**17)
            assert total / count == pytest.approx(row["val_loss"], abs=2e-3), row["step"]


def test_best_and_last_are_kept(undisturbed):
    _, folder = undisturbed
    scores = {row["step"]: row["val_loss"] for row in records(folder / "log.jsonl") if "val_loss" in row}
    assert sorted(path.name for path in (folder / "ck").glob("*.pt")) == [
        "best.pt", *(f"step_{step:08d}.pt" for step in (2, 3, 4, 6, 8))  # every second, and what was evaluated
    ]  # fmt: skip
    best = torch.load(folder / "ck" / "best.pt", weights_only=True)
    assert best["step"] == min(scores, key=scores.get)


def test_the_best_stays_the_best_when_the_loss_rises(monkeypatch, tmp_path, capsys):
    losses = iter([9.0, 8.0, 7.0, 7.5, 7.2])
    monkeypatch.setattr(train, "evaluate", lambda *args: (next(losses), None, []))
    folder = save_gpt2(tmp_path / "gpt2")[0]
    args = ["--init-from", folder, "--total-batch-size", 64, "--batch-size", 1, "--data", ROOT / "input.txt"]
    watch(TRAIN, *args, "--steps", 4, "--eval-every", 1, "--checkpoint-dir", tmp_path / "ck")
    assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == 2
    assert next(losses, None) is None
    losses = iter([7.1, 6.9])  # and a resumed run knows it
    watch(TRAIN, *args, "--steps", 5, "--eval-every", 1, "--checkpoint-dir", tmp_path / "ck", "--resume")
    assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == 5
    for path in (tmp_path / "ck").glob("step_*.pt"):
        path.unlink()
    with pytest.raises(SystemExit) as exit:  # what is left is the best, and a new run would write over it
        watch(TRAIN, *args, "--steps", 1, "--checkpoint-dir", tmp_path / "ck")
    assert exit.value.code == 2 and "--resume" in capsys.readouterr().err
    assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == 5


def scalars(folder):
    """Tag -> [(step, value)] of TensorBoard's files, without the speed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Scalars("tokens per second")) == 8 and "samples/text_summary" in events.Tags()["tensors"]
    tags = [tag for tag in events.Tags()["scalars"] if tag != "tokens per second"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_tensorboard_has_what_the_log_has(undisturbed):
    _, folder = undisturbed
    seen, log = scalars(folder / "tb"), records(folder / "log.jsonl")
    for tag, key in (
        *(("loss/training", "loss"), ("learning rate", "lr"), ("gradient norm", "norm")),
        *(("loss/validation", "val_loss"), ("HellaSwag", "hellaswag")),
    ):
        wanted = [(row["step"], row[key]) for row in log if key in row]
        assert [step for step, _ in seen[tag]] == [step for step, _ in wanted], tag
        assert [value for _, value in seen[tag]] == pytest.approx([value for _, value in wanted], rel=1e-6), tag
    assert len(seen) == 5


def test_a_run_killed_while_it_evaluates_and_while_it_trains_is_the_undisturbed_one(
    run, undisturbed, arguments, tmp_path
):
    done, whole = undisturbed
    out = tmp_path / "out.txt"
    paths = [
        "--checkpoint-dir",
        tmp_path / "ck",
        "--log-file",
        tmp_path / "log.jsonl",
        "--tensorboard",
        tmp_path / "tb",
    ]
    command = [sys.executable, ROOT / TRAIN, *arguments, *paths, "--resume"]
    env = os.environ | EAGER
    for wait_for, more in (
        ("step    2 |", 0.3),
        ("step    4 |", 0),
        ("step    5 |", 0.1),
    ):  # before 3 and 6 it evaluates
        with out.open("w") as file:
            process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, env=env)
            patience = time.monotonic() + 400
            while process.poll() is None and wait_for not in out.read_text(encoding="utf-8"):
                assert time.monotonic() < patience, out.read_text(encoding="utf-8")
                time.sleep(0.01)
            time.sleep(more)
            process.kill()
            assert process.wait() == -signal.SIGKILL, out.read_text(encoding="utf-8")
    last = run(TRAIN, *arguments, *paths, "--resume", **EAGER)
    assert last.returncode == 0, last.stderr
    assert records(tmp_path / "log.jsonl") == records(whole / "log.jsonl")  # losses, scores and samples
    assert scalars(tmp_path / "tb") == scalars(whole / "tb")
    for name in ("step_00000008.pt", "best.pt"):
        ours, theirs = (torch.load(folder / "ck" / name, weights_only=True) for folder in (tmp_path, whole))
        assert ours["step"] == theirs["step"] and ours["position"] == theirs["position"]
        for key, tensor in theirs["model"].items():
            assert torch.equal(ours["model"][key], tensor), key


def test_two_ranks_find_what_one_finds(run, undisturbed, arguments):
    """The same weights at step 0: the same loss, HellaSwag score and samples, from half the work each."""
    done = run(TRAIN, *arguments, "--steps", 1, "--model", "nano", torchrun=2, **EAGER)
    assert done.returncode == 0, done.stderr
    one, two = (
        re.findall(r"(?m)^step +(\d+) \| val loss (\S+) \| HellaSwag (\S+) .*\n((?: {4}.*\n){4})", text)
        for text in (undisturbed[0].stdout, done.stdout)
    )
    assert [evaluation[0] for evaluation in two] == ["0", "1"]
    assert float(two[0][1]) == pytest.approx(float(one[0][1]), abs=1e-5)
    assert two[0][2:] == one[0][2:]


@pytest.mark.parametrize("ranks", [None, 2])
def test_everything_stays_compiled(run, arguments, tmp_path, ranks):
    """A graph each for training, validation, HellaSwag and samples, however often it is evaluated; also under DDP."""
    (tmp_path / "count.py").write_text(
        "import json, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'pretrain')!r})\n"
        "import train\n"
        "from torch._dynamo.utils import counters\n"
        "evaluate, seen = train.evaluate, []\n"
        "def counting(*args):\n"
        "    found = evaluate(*args)\n"
        "    seen.append(counters['stats']['unique_graphs'])\n"
        "    return found\n"
        "train.evaluate = counting\n"
        "train.main()\n"
        f"path = pathlib.Path({str(tmp_path)!r}, os.environ.get('RANK', '0'))\n"
        "path.write_text(json.dumps([seen, dict(counters['graph_break'])]))\n"
    )
    done = run("count.py", *arguments, "--eval-every", 1, "--steps", 3, folder=tmp_path, torchrun=ranks)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks or 1):
        graphs, breaks = json.loads((tmp_path / str(rank)).read_text())
        assert graphs[0] == 3 and len(graphs) == 4  # before the first step: all but training's
        assert graphs[1] == graphs[2] == graphs[3] > 3 and breaks == {}
        assert graphs[1] == 4 or ranks  # DDP cuts training's where its buckets end


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [None, 1])
def test_a_run_on_a_gpu_evaluates_and_goes_on(run, arguments, tmp_path, ranks):
    paths = ["--checkpoint-dir", tmp_path / "ck", "--resume"]
    done = run(TRAIN, *arguments, *paths, "--model", "nano", "--steps", 6, torchrun=ranks)
    assert done.returncode == 0, done.stderr
    again = run(TRAIN, *arguments, *paths, "--model", "nano", "--steps", 8, torchrun=ranks)
    assert again.returncode == 0 and "going on at step 6" in again.stdout, again.stderr
    scores = [float(score) for score in re.findall(r"val loss (\S+)", done.stdout + again.stdout)]
    assert scores[0] == pytest.approx(math.log(50304), abs=0.25) and scores[-1] < scores[0] - 0.5
    for script, *more in (("tools/sample.py",), ("pretrain/hellaswag.py", "--data", arguments[-3])):
        done = run(script, tmp_path / "ck", *more)
        assert done.returncode == 0 and done.stderr == "", done.stderr


# To Hugging Face and back, and samples


@pytest.fixture(scope="module")
def exported(run, undisturbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    done = run("tools/export_hf.py", undisturbed[1] / "ck", folder)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return folder


def test_an_exported_model_has_the_same_logits_and_gpt2s_tokenizer(undisturbed, exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf = AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = load_model(undisturbed[1] / "ck")
    idx = torch.tensor([encode((ROOT / "input.txt").read_text(encoding="utf-8")[:3000])[:512]])
    with torch.no_grad():
        theirs = hf(idx).logits
        torch.testing.assert_close(theirs, ours(idx)[..., :50257], atol=1e-5, rtol=1e-5)
    assert theirs.shape[-1] == 50257 and theirs.std() > 0.1
    assert (exported / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "To be, or not\n\nto be: Ünïcode 漢字 🙂  "
    assert tokenizer(text)["input_ids"] == encode(text) and tokenizer.decode(encode(text)) == text
    assert tokenizer.eos_token_id == hf.config.eos_token_id == END and tokenizer.model_max_length == 1024


def test_init_from_takes_it_back(run, exported, undisturbed, arguments):
    """It goes on where it was: the first loss is that of a trained model."""
    last = [row for row in records(undisturbed[1] / "log.jsonl") if "val_loss" in row][-1]
    done = run(TRAIN, *arguments[:2], "--init-from", exported, *arguments[8:], "--steps", 1, **EAGER)
    assert done.returncode == 0, done.stderr
    found = float(re.search(r"step    0 \| val loss (\S+)", done.stdout)[1])
    assert found == pytest.approx(last["val_loss"], abs=47 / 50257 + 2e-3)  # 47 rows of padding are new


def test_the_export_touches_no_folder_that_is_there(run, undisturbed, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = run("tools/export_hf.py", undisturbed[1] / "ck", tmp_path / "mine")
    assert done.returncode == 2 and re.fullmatch("export_hf.py: error: .* exists already\n", done.stderr)
    done = run("tools/export_hf.py", tmp_path / "mine" / "notes.txt", tmp_path / "new")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_hellaswag_scores_a_checkpoint_and_a_folder_alike(run, undisturbed, exported, questions):
    lines = []
    for model in (undisturbed[1] / "ck", undisturbed[1] / "ck" / "step_00000008.pt", exported):
        done = run("pretrain/hellaswag.py", model, "--data", questions, "--batch-tokens", 1024)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        lines.append(done.stdout.split(" | ", 1)[1])
    assert len(set(lines)) == 1
    assert re.fullmatch(r"HellaSwag, completion style \| acc 0\.\d{4} \| acc_norm 0\.\d{4} \| 40 examples\n", lines[0])


sample = load("tools/sample.py")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder, hf = save_gpt2(tmp_path_factory.mktemp("small") / "gpt2")
    return load_model(folder), hf, folder


@pytest.mark.parametrize("length", [1, 7, 30])
def test_greedy_text_is_that_of_transformers(small, length):
    model, hf, _ = small
    prompt = torch.randint(0, 50257, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = hf.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False, pad_token_id=END)[0, length:]
    ours = torch.stack(list(sample.generate(model, prompt, 2, 25, temperature=0)), dim=1)
    assert len(set(expected.tolist())) > 3
    assert ours.tolist() == [expected.tolist()] * 2


def test_text_ends_where_transformers_ends_it(small, tmp_path):
    model, hf, folder = small
    prompt = [11, 22, 33]
    first = [tokens.item() for tokens in sample.generate(model, prompt, 1, 20, temperature=0)]
    place = next(i for i in range(2, 20) if first[i] not in first[:i])
    weight = (ending := copy.deepcopy(hf)).lm_head.weight.data  # a token and the end of the text change places
    weight[[first[place], END]] = weight[[END, first[place]]]
    ending.save_pretrained(tmp_path)
    expected = ending.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=END)[0, 3:]
    ours = [tokens.item() for tokens in sample.generate(load_model(tmp_path), prompt, 1, 20, temperature=0)]
    assert ours == expected.tolist() == [*first[:place], END]


def test_the_cache_changes_no_logit(small):
    model, _, _ = small
    idx = torch.randint(0, 50257, (3, 40), generator=torch.Generator().manual_seed(1))
    caches = torch.empty(2, 2, 3, 2, 40, 16)
    with torch.no_grad():
        expected = model(idx)[..., :50257]
        for start, end in [(0, 13), *((i, i + 1) for i in range(13, 40))]:
            logits = sample.next_logits(model, idx[:, start:end], caches, start)
            torch.testing.assert_close(logits, expected[:, end - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 50257, 1), (0.7, 20, 1), (1.3, 50257, 0.6), (0.9, 40, 0.8)])
def test_the_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(5, 50257, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = LogitsProcessorList([TemperatureLogitsWarper(float(temperature)), TopKLogitsWarper(top_k)])
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    expected = theirs(None, logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(sample.probabilities(logits, temperature, top_k, top_p), expected)


def test_samples_are_drawn_with_their_probabilities(small):
    model, _, _ = small
    first = next(sample.generate(model, [5, 6], 2000, 1, top_k=3))
    with torch.no_grad():
        p = sample.probabilities(model(torch.tensor([[5, 6]]))[:, -1, :50257], 1.0, 3, 1.0)[0]
    counts = torch.bincount(first, minlength=50257) / 2000
    assert (counts - p).abs().max() < 0.06 and (counts > 0).sum() == 3


def test_the_samples_of_a_command(run, small):
    folder = small[2]
    args = ["tools/sample.py", folder, "--prompt", "O Romeo 漢", "--tokens", 20, "--samples", 3]
    one, two, other = run(*args), run(*args), run(*args, "--seed", 7)
    assert one.returncode == 0 and one.stderr == "", one.stderr
    assert one.stdout == two.stdout != other.stdout
    assert one.stdout.count("O Romeo 漢") == 3
    assert len({text for text in one.stdout.split("O Romeo 漢")}) == 4


def test_a_sample_is_printed_as_it_comes(small, monkeypatch, capsys):
    """Before the next token is computed, and no half of a character."""
    printed, forward = [], sample.next_logits

    def look(*args):
        printed.append(capsys.readouterr().out)
        logits = forward(*args)
        return torch.zeros_like(logits).index_fill_(1, torch.tensor(next(wanted)), 1.0)

    wanted = iter([[token] for token in encode("🙂 and 漢字")])
    count = len(encode("🙂 and 漢字"))
    monkeypatch.setattr(sample, "next_logits", look)
    monkeypatch.setattr(sample, "load_model", lambda name: small[0])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    monkeypatch.setattr("sys.argv", ["sample.py", "x", "--temperature", "0", "--tokens", str(count), "--prompt", "Oh "])
    sample.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed.append(capsys.readouterr().out)
    assert printed[0] == "Oh " and "".join(printed) == "Oh 🙂 and 漢字\n"
    assert len([text for text in printed if text]) >= 5


WRONG_SAMPLE = {
    "a prompt longer than the model": (["--prompt", "word " * 1100], "1101 tokens.*1024 positions"),
    "too many tokens": (["--tokens", "1024"], "1024 positions"),
    "no tokens": (["--tokens", "0"], "at least 1"),
    "temperature": (["--temperature", "-1"], "--temperature"),
    "top-p": (["--top-p", "0"], "--top-p"),
    "device": (["--device", "abacus"], "abacus"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLE)
def test_what_is_wrong_with_a_sample_is_one_line(case, run, undisturbed):
    arguments, pattern = WRONG_SAMPLE[case]
    done = run("tools/sample.py", undisturbed[1] / "ck", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(f"sample.py: error: .*{pattern}.*\n", done.stderr), done.stderr


@pytest.mark.parametrize("script", ["tools/sample.py", "pretrain/hellaswag.py"])
@pytest.mark.parametrize("what", ["a hub that cannot be reached", "text", "foreign"])
def test_a_model_that_cannot_be_had_is_one_line(run, script, what, tmp_path, questions):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    model = "gpt2" if "hub" in what else tmp_path / f"{what}.pt"
    more = ["--data", questions] if "hellaswag" in script else []
    done = run(script, model, *more, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert ("without a network, give a folder" in done.stderr) == ("hub" in what)


WRONG_RUN = {
    "no shards": (["--data", "nowhere"], "--data nowhere: .*No such file"),
    "an empty folder": (["--data", "empty"], "--data empty: 0 tokens"),
    "no training shard": (["--data", "one"], "--data one: 0 tokens"),
    "an empty validation shard": (["--data", "hollow"], "--data hollow: 0 tokens for validation"),
    "a text too short to hold some out": (["--data", "short.txt"], r"1\d\d tokens for validation, but T 500"),
    "a prompt longer than 1024": (["--prompt", "word " * 1100], "--prompt: 1101 tokens"),
    "HellaSwag that is not JSON": (["--hellaswag", "broken.jsonl"], "--hellaswag broken.jsonl: line 1 is no example"),
    "HellaSwag that is not there": (["--hellaswag", "nowhere.jsonl"], "--hellaswag nowhere.jsonl: .*No such file"),
    "HellaSwag on a hub that cannot be reached": (["--hellaswag", "Rowan/hellaswag"], "without a network give a JSONL"),
    "no evaluation": (["--eval-every", "0"], "at least 1"),
    "no warm-up": (["--warmup-steps", "0"], "at least 1"),
}


@pytest.mark.parametrize("case", WRONG_RUN)
def test_what_is_wrong_with_a_run_is_one_line(case, tmp_path, monkeypatch, capfd):
    arguments, pattern = WRONG_RUN[case]
    for name in ("empty", "one", "hollow"):
        (tmp_path / name).mkdir()
    write_shard(tmp_path / "one" / "shard_000000.bin", np.arange(9000))
    write_shard(tmp_path / "hollow" / "shard_000000.bin", np.arange(0))
    write_shard(tmp_path / "hollow" / "shard_000001.bin", np.arange(9000))
    (tmp_path / "short.txt").write_text("word " * 1500)
    (tmp_path / "broken.jsonl").write_text("not JSON\n")
    monkeypatch.chdir(tmp_path)
    more = ["--seq-len", "500", "--batch-size", "1"] if "short" in case else []
    data = [] if "--data" in arguments else ["--data", str(ROOT / "input.txt")]
    if "hub" in case:

        def unreachable(*args, **kwargs):
            raise ConnectionError("Couldn't reach it")

        monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr("sys.argv", ["train.py", *arguments, *data, *more])
    with pytest.raises(SystemExit) as exit, contextlib.redirect_stdout(None):
        train.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert exit.value.code == 2
    written = capfd.readouterr().err
    assert len(written.splitlines()) == 1 and re.search(f"train.py: error: .*{pattern}", written), written


def test_pretrain_starts_in_a_folder_of_its_own(run, tmp_path):
    """Its three files and the tokenizer are all that it takes to get as far as its data."""
    for name in ("train.py", "fineweb.py", "hellaswag.py"):
        shutil.copy(ROOT / "pretrain" / name, tmp_path)
    shutil.copytree(ROOT / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "short.txt").write_text("To be, or not to be")
    done = run("train.py", "--data", tmp_path / "short.txt", folder=tmp_path)
    assert done.returncode == 2 and "6 tokens, but B 4" in done.stderr, done.stderr


# The run that is committed


def test_the_readme_shows_the_run_in_results(monkeypatch, tmp_path):
    import curve
    from render import write_svg

    (folder,) = (ROOT / "results").glob("pretrain-*")
    monkeypatch.setattr(curve, "write_svg", lambda figure, path: write_svg(figure, tmp_path / path.name))
    section = curve.section(folder)
    readme = (ROOT / "pretrain" / "README.md").read_text(encoding="utf-8")
    if readme.split(curve.BEGIN)[1].split(curve.END)[0] != section:
        pytest.fail(f"pretrain/README.md is behind: python tools/curve.py results/{folder.name}")
    scores = {row["step"]: row["val_loss"] for row in records(folder / "log.jsonl") if "val_loss" in row}
    best = min(scores, key=scores.get)
    assert 0 < best < max(scores) and scores[max(scores)] > scores[best]  # it has turned up
    for step in (0, best, max(scores)):
        assert re.search(rf"\| {step} \| .*\| {scores[step]:.3f} \|", section), step
    (image,) = re.findall(r"\.\./(docs/img/\S+\.svg)", section)
    for text in (
        (ROOT / image).read_text(encoding="utf-8"),
        (tmp_path / f"{folder.name}.svg").read_text(encoding="utf-8"),
    ):
        assert f"best: {scores[best]:.3f} at step {best}" in text


@pytest.mark.parametrize("wrong", ["elsewhere", "results/nowhere", "results/cpu-amd-epyc-2026-11-22"])
def test_the_curve_refuses_what_is_no_run_in_one_line(run, tmp_path, wrong):
    readme = (ROOT / "pretrain" / "README.md").read_bytes()
    done = run("tools/curve.py", tmp_path if wrong == "elsewhere" else ROOT / wrong)
    assert done.returncode == 2 and re.fullmatch("curve.py: error: .*\n", done.stderr), done.stderr
    assert (ROOT / "pretrain" / "README.md").read_bytes() == readme
