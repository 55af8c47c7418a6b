"""The HellaSwag score matches a direct computation that processes one text at a time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, encode, made_up_gpu, question, uneven, write_questions


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global checkpoint, hellaswag
    import checkpoint
    import hellaswag


class Liker:
    """A model whose logit is 0 for " cat", -1 for " dog", -20 for other tokens and 20 for the padded vocabulary ids."""

    config = SimpleNamespace(block_size=1024)

    def __call__(self, idx):
        logits = torch.full((*idx.shape, 50304), -20.0)
        logits[..., encode(" cat")[0]] = 0.0
        logits[..., encode(" dog")[0]] = -1.0
        logits[..., 50257:] = 20.0
        return logits


@torch.compiler.set_stance("force_eager")  # a different test runs the compiled model, as users do
def scores(path, model):
    return hellaswag.count_right(model, hellaswag.read_examples(path), 256, torch.device("cpu"))


def test_hand_made_examples_get_the_expected_scores(tmp_path):
    """Hand-made examples get the right scores, also without a context or with one that is longer than the model."""
    for line, by_sum, by_mean in (  # (example, whether the sum picks the right ending, whether the mean picks it)
        (question(["cat", "dog dog dog", "sun", "sun"], "0", "A longer context, which costs a lot"), 1, 1),
        (question(["sun", "dog dog", "cat cat", "sun sun"], 0), 0, 0),
        # The negated logits of "sun" and "sun dog" have the sums 20 and 21 and the means 20 and 10.5.
        (question(["sun dog", "sun sun", "sun", "sun sun sun"], 2), 1, 0),
        # The negated logits of "cat dog dog cat" and "dog" have the sums 2 and 1 and the means 0.5 and 1.
        (question(["cat dog dog cat", "dog", "sun", "sun"], 0, context="A longer context, which costs a lot"), 0, 1),
        (question(["sun", "cat\u2028", "sun", "cat"], 3, context=""), 1, 1),
        (question(["sun", "cat", "sun", "sun"], 1, context=" ".join(["sun"] * 1500)), 1, 1),
    ):
        text = json.dumps(json.loads(line), ensure_ascii=False)  # a line may contain any character
        (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
        assert scores(tmp_path / "x.jsonl", Liker()) == (by_sum, by_mean, 1), line


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def test_the_score_matches_one_text_at_a_time(tmp_path):
    """The score of a model with large padded logits is that of the definition, without padding or compilation."""
    rng = np.random.default_rng(0)
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()

    def text(n):
        return " ".join(rng.choice(words, n))

    model, lines, right = uneven(), [], 0
    model.lm_head.weight[50257:] *= 8
    for _ in range(13):
        context, endings = text(rng.integers(1, 30)), [text(rng.integers(1, 12)) for _ in range(4)]
        costs = []
        for ending in endings:
            before, after = encode(context), encode(" " + ending)
            logits = model(torch.tensor([before + after]))[0, :, :50257].double().log_softmax(-1)
            nats = -logits[torch.arange(len(before) - 1, len(before + after) - 1), after]
            costs.append((nats.sum().item(), nats.mean().item()))
        by_sum, by_mean = (min(range(4), key=lambda i: costs[i][kind]) for kind in (0, 1))
        right += by_sum == by_mean
        lines.append(question(endings, by_mean, context))  # so that the mean is right in every example
    (tmp_path / "x.jsonl").write_text("".join(lines))
    assert 0 < right < 13
    examples = hellaswag.read_examples(tmp_path / "x.jsonl")
    assert hellaswag.count_right(model, examples, 256, torch.device("cpu")) == (right, 13, 13)
    parts = [hellaswag.count_right(model, examples, 700, torch.device("cpu"), rank, 3) for rank in range(3)]
    assert [*map(sum, zip(*parts, strict=True))] == [right, 13, 13]


def test_an_example_with_an_impossible_label_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text(question(["a", "b", "c", "d"], 2) + question(["a", "b", "c", "d"], 4))
    with pytest.raises(ValueError, match="x.jsonl, row 2: .*label 4"):
        hellaswag.read_examples(tmp_path / "x.jsonl")


def test_options_take_effect_and_acc_and_acc_norm_are_not_swapped(monkeypatch, capsys, tmp_path):
    """On a GPU, the model that is asked for is evaluated in bf16, by default on the public questions."""
    asked, path = [], write_questions(tmp_path / "x.jsonl", count=3)

    def count_right(model, examples, batch_tokens, device):
        asked.append((model, len(examples), batch_tokens, str(device), torch.is_autocast_enabled("cpu")))
        return 7, 9, 40

    monkeypatch.setattr(checkpoint, "load_model", lambda *args: asked.append(args) or "model")
    monkeypatch.setattr(hellaswag, "count_right", count_right)
    monkeypatch.setattr(hellaswag, "hub_files", lambda *args: asked.append(args) or [path, path])
    for words in ["--device", "cuda"], ["--device", "cpu", "--data", str(path), "--batch-tokens", "640"]:
        monkeypatch.setattr("sys.argv", ["hellaswag.py", "ck", *words])
        with made_up_gpu():
            hellaswag.main()
        text = "ck | HellaSwag, completion style | acc 0.1750 | acc_norm 0.2250 | 40 examples\n"
        assert capsys.readouterr().out == text
    public = ("Rowan/hellaswag", "validation"), ("ck", "cuda"), ("model", 6, 16384, "cuda", True)
    assert asked == [*public, ("ck", "cpu"), ("model", 3, 640, "cpu", False)]
