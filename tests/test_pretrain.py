"""A pre-training run evaluates, logs and saves as documented.

Each number that it prints and logs is recomputed from the weights that it saved. A run that is interrupted and resumed
reaches the same result as an uninterrupted run.
"""

import json
import math
import os
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint import load_model
from conftest import NO_SCORES, ROOT, TRAIN, encode, made_up_gpu, nano, play, uneven, write_questions
from fineweb import shard_path, write_shard
from hellaswag import count_right, read_examples


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import. HellaSwag is not compiled."""
    global train
    import train

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Return a folder of shards of uneven lengths. Seed 7 begins with another shard than the default seed."""
    folder, text = tmp_path_factory.mktemp("shards"), (ROOT / "input.txt").read_text(encoding="utf-8")
    tokens = np.array(encode(text[:40_000]))
    for i, part in enumerate(np.split(tokens, [1100, 3100, 6101, 9000])):
        write_shard(shard_path(folder, i), part)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("hellaswag") / "questions.jsonl", count=10)


@pytest.fixture(scope="module")
def arguments(shards, questions):
    """Return the arguments of an 8-step run that evaluates every 3 steps. Each step has two micro-steps."""
    return [
        *("--data", shards, "--steps", 8, "--eval-every", 3, "--save-every", 2, "--keep", 9, "--seed", 7),
        *("--batch-size", 4, "--seq-len", 32, "--total-batch-size", 256, "--warmup-steps", 2),
        *("--hellaswag", questions, "--prompt", "ROMEO:"),
    ]


def paths(folder):
    return "--checkpoint-dir", folder / "ck", "--log-file", folder / "log.jsonl", "--resume"


def records(folder):
    """Return the records of the log in a folder. The first one describes the run."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """Run train.py without interruption and return (its output, the folder of its output files)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return play(TRAIN, *arguments, *paths(folder), autocast=False), folder


def test_each_number_that_a_run_prints_and_logs_is_that_of_its_weights(undisturbed, shards, questions):
    printed, folder = undisturbed
    (_, *rows), lines, accuracies = records(folder), printed.splitlines(), []
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 6, 8]
    assert [row["step"] for row in rows if "loss" in row] == list(range(8)) and len(rows) == 12
    loader, examples = train.DataLoaderLite(shards, 4, 32, seed=7), read_examples(questions)
    assert loader.read(0, 9).tolist() != train.DataLoaderLite(shards, 4, 32).read(0, 9).tolist()
    for row in rows:
        step, path = row["step"], folder / "ck" / f"step_{row['step']:08d}.pt"
        model = nano(TRAIN, seed=7) if step == 0 else load_model(path) if path.exists() else None
        if "val_loss" in row:
            n = len(loader.validation[:]) // 32 * 32
            x, y = (torch.from_numpy(loader.validation[i : n + i].astype(int)) for i in (0, 1))
            with torch.no_grad():
                loss = F.cross_entropy(model(x.view(-1, 32)).flatten(0, 1), y)
            by_sum, by_mean, _ = count_right(model, examples, 256, torch.device("cpu"))
            accuracies.append((by_sum, by_mean))
            texts = [train.generate(model, encode("ROMEO:"), seed, torch.device("cpu")) for seed in range(7, 11)]
            scores = {"val_loss": pytest.approx(loss.item(), abs=1e-5), "hellaswag": by_mean / 10}
            scores |= {"samples": [loader.encoding.decode(text.tolist()) for text in texts]}
            assert row == {"step": step, "eval_sec": row["eval_sec"]} | scores
            text = f"step {step:4d} | val loss {row['val_loss']:.6f} | HellaSwag {row['hellaswag']:.4f} | "
            assert (line := f"{text}{row['eval_sec']:.1f} s") in lines
            place = lines.index(line)
            assert [json.loads(line) for line in lines[place + 1 : place + 5]] == row["samples"]
            assert len(set(row["samples"])) == 4 and all(text.startswith("ROMEO:") for text in row["samples"])
        else:
            text = f"step {step:4d} | loss {row['loss']:.6f} | lr {row['lr']:.4e} | norm {row['norm']:.4f} | "
            text += f"dt {1000 * row['sec']:8.2f} ms | {256 / row['sec']:10,.0f} tok/s"
            assert sum(line.startswith(text) for line in lines) == 1, text
            cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 6))
            assert row["lr"] == pytest.approx(6e-4 * (cosine if step > 1 else (step + 1) / 2))
        if "loss" in row and model:
            tokens = torch.from_numpy(loader.read(256 * step, 257).astype(int))
            loss = model(tokens[:-1].view(8, 32), tokens[1:].view(8, 32))
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            assert (row["loss"], row["norm"]) == pytest.approx((loss.item(), norm), abs=1e-4)
    assert any(by_sum != by_mean for by_sum, by_mean in accuracies), "the two accuracies cannot be told apart"
    saved = {path.name: torch.load(path, weights_only=True) for path in (folder / "ck").glob("*.pt")}
    assert f"loaded {loader.size} tokens, and 1100 for validation" in lines
    assert f"1 epoch = {loader.size // 128} batches" in lines
    # Checkpoints are saved at even steps and at evaluated steps. The best one is kept too.
    steps = {f"step_{step:08d}.pt": step for step in (0, 2, 3, 4, 6, 8)}
    steps |= {"best.pt": min((row["val_loss"], row["step"]) for row in rows if row["step"] and "val_loss" in row)[1]}
    assert {name: run["step"] for name, run in saved.items()} == steps
    assert all(run["position"] == 256 * run["step"] for run in saved.values() if run["step"])


def test_an_interrupted_run_gives_the_same_results(undisturbed, arguments, tmp_path, monkeypatch, refused):
    real, words = train.evaluate, (*arguments, *paths(tmp_path))
    turns = iter([real])  # the second evaluation is interrupted
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(train, "evaluate", lambda *args: next(turns)(*args))
        play(TRAIN, *words, autocast=False)
    batches, next_batch = iter(range(5)), train.DataLoaderLite.next_batch  # steps 3 and 4, and half of step 5
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(train.DataLoaderLite, "next_batch", lambda self: (next(batches), next_batch(self))[1])
        play(TRAIN, *words, autocast=False)
    play(TRAIN, *words, autocast=False)
    ours, theirs = ([row | {"sec": 0, "eval_sec": 0} for row in records(at)[1:]] for at in (tmp_path, undisturbed[1]))
    assert ours == theirs  # equal losses, norms, rates, scores and samples
    # With another number of steps, the text goes on, and the learning rate follows the new schedule.
    seen = []
    monkeypatch.setattr(train.DataLoaderLite, "next_batch", lambda self: seen.append(self.position) or next_batch(self))
    assert "\nmedian of steps 9-9: " in play(TRAIN, *words, "--steps", 10, autocast=False)
    *_, one, two = (row for row in records(tmp_path) if "loss" in row)
    rates = [6e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * progress / 8))) for progress in (6, 7)]
    assert [one["step"], two["step"]] == [8, 9] and [one["lr"], two["lr"]] == pytest.approx(rates)
    assert seen == [256 * 8, 256 * 8 + 128, 256 * 9, 256 * 9 + 128]
    words += "--device", "cpu", "--warmup-steps", 20
    refused(TRAIN, *words, says="with other settings: --warmup-steps 2, not 20$")


def test_three_ranks_evaluate_to_the_same_scores_as_one(monkeypatch, shards, questions):
    """Three ranks share 34 sequences, 10 questions and 4 samples. Together they find what one rank finds."""
    model, parts = uneven(), []

    def gather(out, mine):
        parts.append(mine)
        out[:] = (3 * parts)[:3]

    def scores(rank, ranks):
        loader = train.DataLoaderLite(shards, 4, 32, rank, ranks)
        found = train.evaluate(model, loader, examples, encode("ROMEO:"), 7, torch.device("cpu"), 2**17)
        return found | {"eval_sec": 0}

    examples = read_examples(questions)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    one, (*_, three) = scores(0, 1), [scores(rank, 3) for rank in range(3)]  # the last rank has the parts of all
    assert three == one | {"val_loss": pytest.approx(one["val_loss"], abs=1e-5)} and 0 < one["hellaswag"] < 1


def test_an_evaluation_on_a_gpu_has_the_precision_of_training_and_no_gradient(arguments, monkeypatch):
    """Its inputs are copied to the GPU, and it leaves TF32 and bf16 switched on for the steps that follow."""
    seen, last, forward = [], 0, train.GPT.forward

    def look(model, idx, targets=None):
        nonlocal last
        copies, last = events.count("copy") - last, events.count("copy")
        settings = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")
        seen.append((torch.is_grad_enabled(), copies, *settings))
        return forward(model, idx, targets)

    monkeypatch.setattr(train.GPT, "forward", look)
    with made_up_gpu() as events:
        play(TRAIN, *arguments, "--model", "nano", "--steps", 2, "--eval-every", 1, device="cuda")
    evaluation = [(False, 2, "high", True)] * (9 + 20) + [(False, 1, "high", True)] * 4 * 32
    steps = [(True, 2, "high", True)] * 2
    expected = evaluation + steps + evaluation + steps + evaluation
    assert seen[1:] == expected[1:]  # the first follows the copies of the weights


def test_the_best_is_kept_and_the_remaining_time_includes_the_evaluations(monkeypatch, tmp_path):
    """The shortest evaluation counts: the first one also compiles. The best loss so far is kept when a run resumes."""
    shown, limits, words = [], [], ("--batch-size", 1, "--seq-len", 8, "--data", ROOT / "README.md")

    def evaluate(*args):
        limits.append(args[-1])
        loss, minutes = shown.pop(0)
        return NO_SCORES | {"val_loss": loss, "eval_sec": 60.0 * minutes, "samples": ["漢字"]}

    def minutes_left(steps, every, *evaluations):
        shown[:] = evaluations
        printed = play(
            TRAIN, *words, "--total-batch-size", 8, "--steps", steps, "--eval-every", every, *paths(tmp_path)
        )
        assert printed.count('\n    "漢字"\n') == len(evaluations) and not shown and "HellaSwag" not in printed
        left = re.findall(r"(?m)^step +(\d+) \| loss .* (\d+)\.\d min left$", printed)
        return {int(step): int(minutes) for step, minutes in left}

    def best():
        return torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"]

    written, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: written.append(os.path.basename(new)) or replace(old, new))
    monkeypatch.setattr(train, "evaluate", evaluate)
    left = minutes_left(8, 3, (1.0, 100), (8.0, 10), (7.0, 20), (7.5, 20))  # the loss of step 0 does not count
    assert left == {1: 300, 2: 300, 3: 20, 4: 20, 5: 20, 6: 10, 7: 10} and best() == 6
    assert minutes_left(10, 9, (7.1, 20), (7.1, 20), (7.05, 20)) == {9: 10} and best() == 6
    minutes_left(11, 99, (7.1, 20), (6.9, 20))
    assert best() == 11
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8").count('"samples": ["漢字"]') == 7  # readable there too
    with pytest.raises(IndexError):  # the next evaluation is not in the list
        play(TRAIN, *words, "--total-batch-size", 8000)
    assert set(limits[:-1]) == {2**17} and limits[-1] == 20 * 8000  # held-out tokens
    assert written.count("best.pt") >= 3  # complete before it has its name
    for path in (tmp_path / "ck").glob("step_*.pt"):
        path.unlink()
    with pytest.raises(OSError, match="best.pt of another run"):  # this run would overwrite best.pt
        minutes_left(1, 1, (7.1, 20), (7.1, 20))


@pytest.mark.slow
def test_two_processes_train_and_evaluate_together_compiled(run, small, undisturbed, arguments, questions, tmp_path):
    done = run(TRAIN, *arguments, "--steps", 1, *paths(tmp_path), torchrun=2, folder=small)
    assert done.returncode == 0, done.stderr
    one, two = (re.findall(r"(?m)^step +(\d+) \| val loss (\S+) ", text) for text in (undisturbed[0], done.stdout))
    assert [step for step, _ in two] == ["0", "1"] and float(two[0][1]) == pytest.approx(float(one[0][1]), abs=2e-3)
    for script, *more in (("pretrain/sample.py",), ("pretrain/hellaswag.py", "--data", questions)):
        done = run(script, tmp_path / "ck", *more, folder=small)
        assert (done.returncode, done.stderr) == (0, "") and len(done.stdout) > 50
