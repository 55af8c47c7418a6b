"""The HellaSwag score matches a direct computation that processes one text at a time."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import EAGER, LONG, ROOT, encode, play, question, uneven, write_questions


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global hellaswag, train
    import hellaswag
    import train


class Liker(torch.nn.Module):
    """A model whose logit is 0 for the liked token, -`cost` for " dog" and -20 for other tokens."""

    def __init__(self, liked, cost=1.0):
        super().__init__()
        self.config = train.GPTConfig()
        self.liked, self.cost = liked, cost

    def forward(self, idx):
        logits = torch.full((*idx.shape, 50304), -20.0)
        logits[..., self.liked] = 0.0
        logits[..., encode(" dog")[0]] = -self.cost
        return logits


@torch.compiler.set_stance("force_eager")  # a different test runs the compiled model, as users do
def scores(path, model):
    by_sum, by_mean, n = hellaswag.count_right(model, hellaswag.read_examples(path), 1024, torch.device("cpu"))
    return by_sum, by_mean, n


def test_the_answers_of_examples_made_for_it_are_known(tmp_path):
    """Hand-made examples get the right scores. The " cat" logit is 1 above the " dog" logit and 20 above the rest."""
    long = "A much longer context, which costs a lot"
    lines = [  # (example, whether the sum picks the right ending, whether the mean picks it)
        (question(["cat cat", "dog dog", "sun", "sun sun"], 0), True, True),
        (question(["sun", "dog dog", "cat cat", "sun sun"], 0), False, False),
        # The negated logits of "sun" and "sun dog" have the sums 20 and 21 and the means 20 and 10.5.
        (question(["sun dog", "sun sun", "sun", "sun sun sun"], 2), True, False),
        (
            question(["sun sun", "sun", "dog dog dog dog dog dog", "cat sun sun cat cat"], "2"),
            True,
            True,
        ),  # as a string
        (
            question(["dog dog dog", "cat sun cat cat cat cat cat cat cat cat cat cat", "sun", "sun"], 0),
            True,
            True,
        ),
        # The negated logits of "cat dog dog cat" and "dog" have the sums 2 and 1 and the means 0.5 and 1.
        (question(["cat dog dog cat", "dog", "sun", "sun"], 0, context=long), False, True),
        (question(["cat", "dog dog dog dog dog dog dog dog", "sun", "sun"], 0, context=long), True, True),
    ]
    (tmp_path / "x.jsonl").write_text("".join(line for line, _, _ in lines))
    expected = sum(by_sum for _, by_sum, _ in lines), sum(by_mean for _, _, by_mean in lines), len(lines)
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == expected
    for line, by_sum, by_mean in lines:  # score each line by itself
        (tmp_path / "x.jsonl").write_text(line)
        assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (by_sum, by_mean, 1), line


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def test_the_score_matches_one_text_at_a_time(tmp_path):
    """A random model's score matches the definition, applied to one text at a time without padding or compilation."""
    rng = np.random.default_rng(0)
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()

    def text(n):
        return " ".join(rng.choice(words, n))

    rows = [
        ([text(rng.integers(1, 12)) for _ in range(4)], int(rng.integers(4)), text(rng.integers(1, 30)))
        for _ in range(12)
    ]
    (tmp_path / "x.jsonl").write_text("".join(question(endings, label, context) for endings, label, context in rows))
    model, right = uneven(), np.zeros(2, dtype=int)
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
    assert (by_sum, by_mean, n) == (*right, 12)
    parts = [hellaswag.count_right(model, examples, 700, torch.device("cpu"), rank, 3) for rank in range(3)]
    assert tuple(map(sum, zip(*parts, strict=True))) == (by_sum, by_mean, n)
    assert hellaswag.count_right(model, [], 700, torch.device("cpu")) == (0, 0, 0)


@torch.no_grad()
def test_a_text_longer_than_the_model_keeps_its_ending(tmp_path):
    long = " ".join(["sun"] * 1500)
    (tmp_path / "x.jsonl").write_text(question(["sun", "cat", "sun", "sun"], 1, context=long))
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (1, 1, 1)


@torch.no_grad()
def test_a_context_may_be_empty_and_a_line_may_hold_any_character(tmp_path):
    lines = [
        question(["sun", "cat", "sun", "sun"], 1, context=""),
        question(["sun", "cat\u2028", "sun", "sun"], 1),
    ]
    text = "".join(json.dumps(json.loads(line), ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    assert len(hellaswag.read_examples(tmp_path / "x.jsonl")) == 2
    (tmp_path / "x.jsonl").write_text(lines[0])
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (1, 1, 1)
    (tmp_path / "x.jsonl").write_text(lines[0].replace('"label": 1', '"label": 0'))
    assert scores(tmp_path / "x.jsonl", Liker(encode(" cat")[0])) == (0, 0, 1)


WRONG_EXAMPLE = {
    "an empty file": ("", "x.jsonl contains no examples$"),
    "not JSON": ('{"ctx": "The cat', "x.jsonl, row 2: Unterminated string|x.jsonl, row 2: Invalid control character"),
    "no context": ('{"endings": ["a", "b", "c", "d"], "label": 0}', "x.jsonl, row 2: the column ctx is missing$"),
    "three endings": (question(["a", "b", "c"], 0), "x.jsonl, row 2: 3 endings"),
    "an ending longer than the model": (
        question(["a", "b", "c", "sun " * 1100], 0),
        r"x.jsonl, row 2: .*, 110\d\]",
    ),
    "no such label": (question(["a", "b", "c", "d"], 4), "x.jsonl, row 2: .*label 4"),
    "a list": ("[1, 2]", "x.jsonl, row 2: list instead of an object$"),
}


@pytest.mark.parametrize("case", WRONG_EXAMPLE)
def test_an_invalid_example_is_refused_in_one_line(case, tmp_path):
    line, pattern = WRONG_EXAMPLE[case]
    (tmp_path / "x.jsonl").write_text(question(["a", "b", "c", "d"], 2) + line + "\n" if line else "")
    with pytest.raises(ValueError, match=pattern):
        hellaswag.read_examples(tmp_path / "x.jsonl")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("hellaswag") / "questions.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train for two steps and return the folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    short = "--batch-size", 1, "--seq-len", 16, "--total-batch-size", 16, "--data", ROOT / "README.md"
    play(LONG, "--steps", 2, "--save-every", 1, "--checkpoint-dir", folder, *short, full=True)
    return folder


@pytest.mark.slow
def test_a_checkpoint_a_folder_of_them_and_an_export_score_alike(run, trained, questions, tmp_path):
    """hellaswag.py computes the same score for a folder of checkpoints, a checkpoint in it, and an export of it.

    The run on the folder is compiled.
    """
    assert run("pretrain/export_hf.py", trained, tmp_path / "model").returncode == 0
    lines = []
    for model, how in (trained, {}), (trained / "step_00000002.pt", EAGER), (tmp_path / "model", EAGER):
        done = run("pretrain/hellaswag.py", model, "--data", questions, "--batch-tokens", 1024, **how)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        lines.append(done.stdout.split(" | ", 1)[1])
    assert len(set(lines)) == 1
    assert re.fullmatch(r"HellaSwag, completion style \| acc 0\.\d{4} \| acc_norm 0\.\d{4} \| 40 examples\n", lines[0])


@pytest.mark.parametrize("script", ["pretrain/sample.py", "pretrain/hellaswag.py"])
@pytest.mark.parametrize("what", ["a hub that cannot be reached", "text", "foreign"])
def test_a_model_that_cannot_be_had_is_one_line(refused, script, what, tmp_path, questions):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    model = "gpt2" if "hub" in what else tmp_path / f"{what}.pt"
    more = ["--data", questions] if "hellaswag" in script else []
    refused(script, model, *more, says=".*couldn't connect to " if "hub" in what else "")
