"""A pre-training run evaluates, logs and saves as documented.

A run that is killed and resumed reaches the same result as an uninterrupted run. The training step matches `ddp_run.py`
bit for bit.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint import load_model
from conftest import BF16_CPU, EAGER, NO_SCORES, ROOT, TRAIN, encode, play, save_gpt2, trouble, watch, write_questions
from fineweb import shard_path, write_shard


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global train
    import train


def test_the_training_step_matches_ddp_run(monkeypatch, tmp_path):
    """Given the same weights and batches, logits, loss, gradients and updated weights match ddp_run.py bit for bit."""
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    monkeypatch.setattr(train, "count_right", None)
    folder = save_gpt2(tmp_path / "gpt2")[0]
    args = ["--init-from", folder, "--steps", 3, "--seq-len", 64, "--total-batch-size", 4 * 64]
    before = watch("ddp_run.py", *args)
    after = watch(TRAIN, *args, "--data", ROOT / "input.txt", "--warmup-steps", 10)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(other.logits[0], one.logits[0])
        assert other.printed["loss"] == one.printed["loss"] and other.printed["norm"] == one.printed["norm"]
        for name, grad in one.grads.items():
            assert torch.equal(other.grads[name], grad), name
            assert torch.equal(other.after[name], one.after[name]), name


def test_the_defaults_are_the_recipe(monkeypatch):
    assert 19073 * 524288 == pytest.approx(10e9, rel=1e-4)
    rates = [train.get_lr(step, 19073) for step in (0, 714, 715, 19073)]
    assert rates == pytest.approx([6e-4 / 715, 6e-4, 6e-4, 6e-5])
    monkeypatch.setattr("sys.argv", ["train.py", "--model", "gpt2", "--batch-size", "8"])
    args = train.parse_args()
    assert (args.steps, args.total_batch_size, args.warmup_steps, args.eval_every) == (19073, 524288, 715, 250)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Return a file with the first 40,000 bytes of input.txt, which are enough for a quick validation."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "input.txt").read_bytes()[:40_000])
    return path


@pytest.fixture(scope="session")
def arguments(text, tmp_path_factory):
    """Return the arguments of an 8-step run that evaluates every 3 steps."""
    questions = write_questions(tmp_path_factory.mktemp("hellaswag") / "questions.jsonl", count=10)
    return [
        *("--data", text, "--steps", 8, "--eval-every", 3, "--save-every", 2, "--keep", 9),
        *("--batch-size", 8, "--seq-len", 64, "--total-batch-size", 1024, "--warmup-steps", 2),
        *("--hellaswag", questions, "--prompt", "ROMEO:"),
    ]


def records(path):
    """Return the records of a log without their times."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key not in ("sec", "eval_sec", "begun")} for row in rows]


@pytest.fixture(scope="session")
def undisturbed(run, small, arguments, tmp_path_factory):
    """Run train.py without interruption and return (its process, the folder of its output files)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    paths = ["--checkpoint-dir", folder / "ck", "--log-file", folder / "log.jsonl"]
    done = run(TRAIN, *arguments, *paths, folder=small, **EAGER)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done, folder


@pytest.mark.slow
def test_what_a_run_prints_and_logs(undisturbed, text):
    done, folder = undisturbed
    log = records(folder / "log.jsonl")
    evaluated = [row for row in log if "val_loss" in row]
    assert [row["step"] for row in evaluated] == [0, 3, 6, 8]
    assert [row["step"] for row in log if "loss" in row] == list(range(8))
    assert evaluated[0]["val_loss"] == pytest.approx(math.log(50304), abs=0.25)
    assert evaluated[-1]["val_loss"] < evaluated[0]["val_loss"] - 0.05
    lines = done.stdout.splitlines()
    tokens = len(encode(text.read_text(encoding="utf-8")))
    assert f"loaded {tokens * 9 // 10} tokens, and {math.ceil(tokens / 10)} for validation" in lines
    assert f"1 epoch = {tokens * 9 // 10 // 512} batches" in lines
    for row in evaluated:
        assert 0 <= row["hellaswag"] <= 1 and row["hellaswag"] * 10 == pytest.approx(round(row["hellaswag"] * 10))
        start = f"step {row['step']:4d} | val loss {row['val_loss']:.6f} | HellaSwag {row['hellaswag']:.4f} | "
        (place,) = [i for i, line in enumerate(lines) if line.startswith(start)]
        assert [json.loads(line) for line in lines[place + 1 : place + 5]] == row["samples"]
        assert len(set(row["samples"])) == 4 and all(text.startswith("ROMEO:") for text in row["samples"])
    assert lines[-1].startswith("median of steps 4-7: ")


@pytest.mark.slow
def test_the_saved_weights_reproduce_the_scores(undisturbed, text):
    """The weights saved at a step reproduce the validation loss logged at that step."""
    _, folder = undisturbed
    loader = train.DataLoaderLite(text, 8, 64)
    for row in records(folder / "log.jsonl"):
        if "val_loss" in row and row["step"]:
            model = load_model(folder / "ck" / f"step_{row['step']:08d}.pt")
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=BF16_CPU):
                total, count = train.validate(model, loader, torch.device("cpu"), 2**17)
            assert total / count == pytest.approx(row["val_loss"], abs=2e-3), row["step"]


@pytest.mark.slow
def test_best_and_last_are_kept(undisturbed):
    _, folder = undisturbed
    scores = {row["step"]: row["val_loss"] for row in records(folder / "log.jsonl") if "val_loss" in row}
    assert sorted(path.name for path in (folder / "ck").glob("*.pt")) == [
        "best.pt", *(f"step_{step:08d}.pt" for step in (0, 2, 3, 4, 6, 8))  # even steps and evaluated steps
    ]  # fmt: skip
    best = torch.load(folder / "ck" / "best.pt", weights_only=True)
    assert best["step"] == min(scores, key=scores.get)


def test_the_best_stays_the_best_when_the_loss_rises(monkeypatch, tmp_path):
    losses = iter([1.0, 8.0, 7.0, 7.5, 7.2])  # that of step 0 does not count
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES | {"val_loss": next(losses, 5.0)})
    folder = save_gpt2(tmp_path / "gpt2")[0]
    args = ["--init-from", folder, "--total-batch-size", 64, "--batch-size", 1, "--seq-len", 64]
    args += ["--data", ROOT / "input.txt"]
    watch(TRAIN, *args, "--steps", 4, "--eval-every", 1, "--checkpoint-dir", tmp_path / "ck")
    assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == 2
    # A resumed run keeps the best loss so far, even if it evaluates at different steps.
    for steps, every, later, best in (5, 1, [7.1, 7.05], 2), (6, 1, [7.1, 6.9], 6), (8, 8, [6.9, 6.95], 6):
        losses = iter(later)
        words = "--steps", steps, "--eval-every", every, "--checkpoint-dir", tmp_path / "ck"
        watch(TRAIN, *args, *words, "--resume")
        assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == best
    for path in (tmp_path / "ck").glob("step_*.pt"):
        path.unlink()
    for words in [], ["--resume"]:
        with pytest.raises(OSError, match="best.pt of another run"):  # this run would overwrite best.pt
            watch(TRAIN, *args, "--steps", 1, "--checkpoint-dir", tmp_path / "ck", *words)
    assert torch.load(tmp_path / "ck" / "best.pt", weights_only=True)["step"] == 6


def test_the_seed_orders_the_shards(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    for i in range(5):
        write_shard(shard_path(tmp_path, i), np.arange(1000) + 1000 * i)
    words = "--batch-size", 1, "--seq-len", 8, "--total-batch-size", 8, "--data", tmp_path, "--steps", 1
    batches, next_batch = [], train.DataLoaderLite.next_batch
    monkeypatch.setattr(
        train.DataLoaderLite, "next_batch", lambda self: batches.append(next_batch(self)) or batches[-1]
    )
    for seed in (7, 8, 9):
        play(TRAIN, *words, "--seed", seed)
    wanted = [train.DataLoaderLite(tmp_path, 1, 8, seed=seed).read(0, 8).tolist() for seed in (7, 8, 9)]
    assert [x[0].tolist() for x, _ in batches] == wanted and len({row[0] for row in wanted}) > 1


@pytest.mark.parametrize("option, default, other", [("--seed", 1337, 7), ("--warmup-steps", 715, 20)])
def test_a_run_resumes_with_the_same_batches_and_rates_or_is_refused(
    monkeypatch, tmp_path, refused, option, default, other
):
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    args = ["--device", "cpu", "--batch-size", 1, "--seq-len", 8, "--total-batch-size", 8, "--data", ROOT / "README.md"]
    args += ["--checkpoint-dir", tmp_path / "ck"]
    watch(TRAIN, *args[2:], "--steps", 1)
    says = f"checkpoints of another run: {option} {default}, not {other}$"
    refused(TRAIN, *args, "--steps", 2, "--resume", option, other, says=says)


def test_a_restarted_run_leaves_nothing_of_the_first_try(monkeypatch, tmp_path):
    """After a restart, the log continues from the checkpoint's step, even with non-ASCII samples."""
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES | {"samples": ["漢字 🙂"]})
    args = ["--batch-size", 1, "--seq-len", 8, "--total-batch-size", 8, "--data", ROOT / "README.md", "--resume"]
    args += ["--checkpoint-dir", tmp_path / "ck", "--log-file", tmp_path / "log.jsonl"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "save_checkpoint", lambda *args: exec("raise KeyboardInterrupt"))
        watch(TRAIN, *args, "--steps", 3, "--save-every", 2)
    watch(TRAIN, *args, "--steps", 3, "--save-every", 2)
    (tmp_path / "ck" / "step_00000003.pt").unlink()
    watch(TRAIN, *args, "--steps", 3, "--save-every", 2)
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r'{"(step|begun)": [^{]*}', line) for line in lines)  # one complete record per line
    log = records(tmp_path / "log.jsonl")
    assert [row["step"] for row in log if "loss" in row] == [0, 1, 2]
    assert [row["samples"] for row in log if "samples" in row] == 2 * [["漢字 🙂"]]
    assert sum('["漢字 🙂"]' in line for line in lines) == 2  # readable in the file


def test_what_an_evaluation_prints(monkeypatch, tmp_path):
    """It is announced, its samples are readable, and the remaining minutes include the evaluations to come.

    The second of four evaluations takes the least time, because the first one also compiles.
    """
    seconds = iter([6000.0, 600.0, 1200.0, 1200.0, 6000.0, 6000.0, 6000.0])
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES | {"samples": ["漢字"], "eval_sec": next(seconds)})
    words = "--batch-size", 1, "--seq-len", 8, "--total-batch-size", 8, "--data", ROOT / "README.md"
    words += "--checkpoint-dir", tmp_path / "ck"
    printed = play(TRAIN, *words, "--steps", 8, "--eval-every", 3)
    assert re.findall(r"(?m)^step +(\d+) \| (.*evaluating)$", printed) == [
        ("0", "compiling and evaluating"), ("3", "evaluating"), ("6", "evaluating"), ("8", "evaluating")
    ]  # fmt: skip
    left = re.findall(r"(?m)^step +(\d+) \| loss .* (\d+)\.\d min left$", printed)
    assert left == [(str(i), str(minutes)) for i, minutes in enumerate([300, 300, 20, 20, 20, 10, 10], start=1)]
    assert printed.count('\n    "漢字"\n') == 4 and "HellaSwag" not in printed
    printed = play(TRAIN, *words, "--steps", 10, "--eval-every", 9, "--resume")  # remembers the shortest evaluation
    assert re.findall(r"(?m)^step +(\d+) \| loss .* (\d+)\.\d min left$", printed) == [("9", "10")]


class Alike(torch.nn.Module):
    """A model that assigns the same logit to all tokens and a higher logit to the padded vocabulary ids."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, idx, targets=None):
        self.seen.append((idx.clone(), torch.is_grad_enabled()))
        logits = torch.zeros(*idx.shape, 50304)
        logits[..., 50257:] = 20.0
        return logits if targets is None else F.cross_entropy(logits[..., :50257].view(-1, 50257), targets.view(-1))


def test_an_evaluation_needs_no_gradient_and_its_samples_are_four_texts():
    """An evaluation computes no gradient, reads the first held-out tokens and samples no padded vocabulary ids."""
    model, loader = Alike(), train.DataLoaderLite(ROOT / "README.md", 4, 16)
    scores = train.evaluate(model, loader, [], encode("To be"), 1337, torch.device("cpu"), 100)
    assert scores["val_loss"] == pytest.approx(math.log(50257), abs=1e-4) and scores["hellaswag"] is None
    assert len(set(scores["samples"])) == 4 and all(sample.startswith("To be") for sample in scores["samples"])
    assert not any(gradient for _, gradient in model.seen)
    held_out = loader.validation[:97]
    assert model.seen[0][0].flatten().tolist() == held_out[:64].tolist()  # only the first held-out tokens
    assert model.seen[1][0][:2].flatten().tolist() == held_out[64:96].tolist()


@pytest.mark.slow
def test_a_run_killed_while_it_evaluates_and_while_it_trains_is_the_undisturbed_one(
    run, small, undisturbed, arguments, tmp_path
):
    done, whole = undisturbed
    out = tmp_path / "out.txt"
    paths = ["--checkpoint-dir", tmp_path / "ck", "--log-file", tmp_path / "log.jsonl"]
    command = [sys.executable, small / TRAIN, *arguments, *paths, "--resume"]
    env = os.environ | EAGER
    # The run evaluates before step 3. The first kill comes 0.3 s after step 2, so it can hit this evaluation.
    for wait_for, more in ("step    2 |", 0.3), ("step    4 |", 0):
        with out.open("w") as file:
            process = subprocess.Popen([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT, env=env)
            while process.poll() is None and wait_for not in out.read_text(encoding="utf-8"):
                time.sleep(0.01)
            time.sleep(more)
            process.kill()
            assert process.wait() == -signal.SIGKILL, out.read_text(encoding="utf-8")
    last = run(TRAIN, *arguments, *paths, "--resume", folder=small, **EAGER)
    assert last.returncode == 0, last.stderr
    assert records(tmp_path / "log.jsonl") == records(whole / "log.jsonl")  # equal losses, scores and samples
    for name in ("step_00000008.pt", "best.pt"):
        ours, theirs = (torch.load(folder / "ck" / name, weights_only=True) for folder in (tmp_path, whole))
        assert ours["step"] == theirs["step"] and ours["position"] == theirs["position"]
        for key, tensor in theirs["model"].items():
            assert torch.equal(ours["model"][key], tensor), key


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(run, small, undisturbed, arguments):
    """At step 0, two ranks that share the work compute the same loss, HellaSwag score and samples as one rank."""
    done = run(TRAIN, *arguments, "--steps", 1, torchrun=2, folder=small, **EAGER)
    assert done.returncode == 0, done.stderr
    one, two = (
        re.findall(r"(?m)^step +(\d+) \| val loss (\S+) \| HellaSwag (\S+) .*\n((?: {4}.*\n){4})", text)
        for text in (undisturbed[0].stdout, done.stdout)
    )
    assert [evaluation[0] for evaluation in two] == ["0", "1"]
    assert float(two[0][1]) == pytest.approx(float(one[0][1]), abs=1e-5)
    assert two[0][2:] == one[0][2:]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [None, 1])
def test_a_run_on_a_gpu_evaluates_and_continues(run, arguments, tmp_path, ranks, measured):
    pytest.importorskip("datasets")  # reads HellaSwag
    paths = ["--checkpoint-dir", tmp_path / "ck", "--resume"]
    done = run(TRAIN, *arguments, *paths, "--model", "nano", "--steps", 6, torchrun=ranks)
    assert done.returncode == 0, done.stderr
    again = run(TRAIN, *arguments, *paths, "--model", "nano", "--steps", 8, torchrun=ranks)
    assert again.returncode == 0 and "6 of 8 steps are done" in again.stdout, again.stderr
    scores = [float(score) for score in re.findall(r"val loss (\S+)", done.stdout + again.stdout)]
    assert scores[0] == pytest.approx(math.log(50304), abs=0.25) and scores[-1] < scores[0] - 0.5
    for script, *more in (("pretrain/sample.py",), ("pretrain/hellaswag.py", "--data", arguments[-3])):
        done = run(script, tmp_path / "ck", *more)
        assert (done.returncode, trouble(done.stderr)) == (0, []), done.stderr
    measured(f"validation losses {scores}; {done.stdout.strip()}")


WRONG_RUN = {
    "no shards": (["--data", "fineweb10B"], r"fineweb10B: .*No such file.* \(pretrain/fineweb.py makes it\)$"),
    "no text": (["--data", "my.txt"], r"my.txt: .*No such file or directory: 'my.txt'$"),
    "a validation shard too short": (["--data", "shards"], "shards: 100 tokens for validation, but T 500 needs 501"),
    "a text too short to hold some out": (["--data", "short.txt"], r"1\d\d tokens for validation, but T 500"),
    "a prompt longer than 1024": (["--prompt", "word " * 1100], "--prompt: 1101 tokens"),
    "HellaSwag that is not JSON": (
        ["--hellaswag", "broken.jsonl"],
        "broken.jsonl, row 1: Expecting value$",
    ),
    "HellaSwag that is not there": (
        ["--hellaswag", "nowhere.jsonl"],
        "nowhere.jsonl: No such file or directory$",
    ),
    "HellaSwag on no hub": (
        ["--hellaswag", "Rowan/hellaswag"],
        "the hub failed; without a network, pass the dataset's files",
    ),
    "no evaluation": (["--eval-every", "0"], "at least 1"),
}


@pytest.mark.parametrize("case", WRONG_RUN)
def test_what_is_wrong_with_a_run_is_one_line(case, tmp_path, monkeypatch, refused):
    arguments, pattern = WRONG_RUN[case]
    (tmp_path / "shards").mkdir()
    for number, size in enumerate((100, 9000)):
        write_shard(shard_path(tmp_path / "shards", number), np.arange(size))
    (tmp_path / "short.txt").write_text("word " * 1500)
    (tmp_path / "broken.jsonl").write_text("not JSON\n")
    monkeypatch.chdir(tmp_path)
    more = ["--seq-len", "500", "--batch-size", "1", "--total-batch-size", "500"] if "short" in case else []
    data = [] if "--data" in arguments else ["--data", str(ROOT / "input.txt")]
    if "hub" in case:

        def unreachable(*args, **kwargs):
            raise ConnectionError("Couldn't reach it")

        monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    refused(TRAIN, *arguments, *data, *more, says=pattern)
