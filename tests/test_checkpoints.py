"""A run that is killed and resumed matches an uninterrupted run bit for bit, and its log holds what it computed.

A damaged file, a power cut, or a new run started in another run's folder does not destroy a good checkpoint.
"""

import contextlib
import errno
import functools
import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import unattended
from conftest import LONG, ROOT, RUNGS, TRAIN, Command, load, nano, save_gpt2, since, versions, watch

TEXT = ROOT / "README.md"  # a short text, which is tokenized quickly
SIZES = ["--seq-len", 32, "--batch-size", 2, "--total-batch-size", 128, "--seed", 7, "--data", TEXT]
SCHEDULE = ["--warmup-steps", 10, "--eval-every", 1000]  # flags that only pretrain/train.py has
pytestmark = pytest.mark.usefixtures("no_evaluation")
SAVING = since(LONG, among=list(RUNGS))
WEIGHTS = versions("main", among=since("ddp_run.py", among=list(RUNGS)))  # the scripts with --save


def train(steps, *args, script=LONG, model=("--model", "nano"), **environment):
    """Train briefly in this process without compiling and return the recorded steps."""
    return watch(script, *SIZES, *model, "--steps", steps, *args, *SCHEDULE * (script == TRAIN), **environment)


def curve(steps):
    return [(step.printed["step"], step.printed["loss"], step.printed["norm"]) for step in steps]


def records(log):
    """Return a log's training-step records, without its evaluation records."""
    return [record for record in map(json.loads, log.read_text().splitlines()) if "loss" in record]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


@pytest.fixture
def script():
    """Return the default script, which a test can override by parametrizing `script`."""
    return LONG


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that runs a script for 14 steps with checkpoints.

    It returns the recorded steps, the checkpoints' names and the folder, without the last checkpoint, as after a kill.
    """

    @functools.cache
    def whole(script):
        folder = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            words = "--checkpoint-dir", "saved", "--save-every", 6, "--keep", 3, "--log-file", "log.jsonl"
            steps = train(14, *words, script=script)
        found = names(folder / "saved")
        (folder / "saved" / "step_00000014.pt").unlink(missing_ok=True)
        for path in sorted(folder.glob("saved/step_*.pt"))[:1]:
            os.utime(path, (4e9, 4e9))  # as after a copy
        return steps, found, folder

    return whole


@pytest.fixture
def undisturbed(whole, script):
    return whole(script)[0]


@pytest.fixture
def saved(whole, script, tmp_path, monkeypatch):
    """Return a copy of the checkpoint folder of `whole`. Its parent, with log.jsonl, becomes the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole(script)[2], tmp_path, dirs_exist_ok=True)
    return tmp_path / "saved"


@pytest.fixture
def no_start(refused, script, monkeypatch):
    """Return a function that starts a run with SIZES and asserts that it is rejected."""
    module = load(script)
    monkeypatch.setitem(module.MODELS, "gpt2", module.GPTConfig(n_layer=1, n_head=1, n_embd=8))
    words = "--device", "cpu", *SIZES, "--model", "nano", "--steps", 14, *SCHEDULE * (script == TRAIN)
    return functools.partial(refused, script, *words)


@pytest.mark.parametrize("script", SAVING)
def test_a_checkpoint_contains_step_position_settings_weights_and_optimizer_state(whole, saved, tmp_path, script):
    steps, found, _ = whole(script)
    assert found == ["step_00000006.pt", "step_00000012.pt", "step_00000014.pt"]
    checkpoint = torch.load(saved / "step_00000006.pt", weights_only=True)
    assert (checkpoint["step"], checkpoint["position"], checkpoint["steps"]) == (6, 6 * 128, 14)
    tokens = load(script).DataLoaderLite(TEXT, 2, 32)
    task = {"--model": "nano", "--init-from": None, "--seq-len": 32, "--seed": 7, "--total-batch-size": 128}
    task |= {"tokens in --data": getattr(tokens, "size", None) or len(tokens.tokens)}
    assert checkpoint["task"] == task | ({"--warmup-steps": 10} if script == TRAIN else {})
    nano("speedup_10_fused_adamw.py").load_state_dict(checkpoint["model"])  # the names match the model's exactly
    assert all(torch.equal(checkpoint["model"][name], p) for name, p in steps[5].after.items())
    assert checkpoint["optim"]["state"].keys() == steps[5].after.keys()
    assert {float(state["step"]) for state in checkpoint["optim"]["state"].values()} == {6.0}
    header, *_ = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(header) == {"begun": checkpoint["begun"]} | checkpoint["task"]
    assert len(records(tmp_path / "log.jsonl")) == len(steps) == 14  # test_training.py compares their values


@pytest.mark.parametrize("script", SAVING)
def test_a_resumed_run_matches_an_uninterrupted_run_bit_for_bit(saved, undisturbed, tmp_path, script):
    log = tmp_path / "log.jsonl"
    steps = train(14, "--checkpoint-dir", saved, "--resume", "--log-file", log.name, script=script)
    assert curve(steps) == curve(undisturbed)[12:]
    for resumed, original in zip(steps, undisturbed[12:], strict=True):
        assert all(torch.equal(resumed.before[name], p) for name, p in original.before.items())
        assert all(torch.equal(resumed.after[name], p) for name, p in original.after.items())
    logged = [(f"{row['step']:4d}", f"{row['loss']:.6f}", f"{row['norm']:.4f}") for row in records(log)]
    assert logged == curve(undisturbed)
    assert names(saved) == ["step_00000012.pt", "step_00000014.pt"]  # --keep is 2 by default


@pytest.mark.parametrize("script", SAVING)
def test_a_resume_with_more_steps_follows_their_schedule_whatever_the_micro_batches(saved, undisturbed, script):
    for path in saved.glob("step_*.pt"):  # before November 28, 2026, checkpoints contained no "config"
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["config"]
        torch.save(checkpoint, path)
    words = "--checkpoint-dir", saved, "--resume", "--batch-size", 4
    steps = train(20, *words, script=script)
    assert float(steps[0].printed["loss"]) == pytest.approx(float(undisturbed[12].printed["loss"]), abs=1e-4)
    for step, progress in zip(steps, (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), strict=True):
        assert step.groups[0]["lr"] == pytest.approx(6e-5 + 2.7e-4 * (1 + math.cos(math.pi * progress)))
    checkpoint = torch.load(saved / "step_00000020.pt", weights_only=True)
    assert (checkpoint["steps"], checkpoint["config"]["n_head"]) == (20, 2)
    assert train(13, *words, script=script) == []


def cut_off(state, file):
    """Write a part of a file in place of torch.save(), and end the run as a kill would."""
    Path(getattr(file, "name", file)).write_bytes(pickle.dumps(len(state)))
    raise KeyboardInterrupt


@pytest.mark.parametrize("script", WEIGHTS)
def test_save_leaves_the_final_weights_or_fails_before_training_if_it_can(tmp_path, script, refused, monkeypatch):
    path, words = tmp_path / "weights.pt", ["--device", "cpu", *SIZES, *SCHEDULE * (script == TRAIN)]
    path.write_text("of an earlier run")
    with monkeypatch.context() as patch:
        patch.setattr(load(script).DataLoaderLite, "next_batch", lambda loader: pytest.fail("it trained"))
        for place in (tmp_path / "nowhere" / "weights.pt", tmp_path):
            refused(script, *words, "--save", place, says=f"--save {place}: no such folder")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut_off)
        train(2, "--save", path, script=script)
    assert path.read_text() == "of an earlier run"
    *_, last = train(2, "--save", path, script=script)
    weights = torch.load(path, weights_only=True)
    assert {p.device.type for p in weights.values()} == {"cpu"} and names(tmp_path) == ["weights.pt"]
    model = nano(since(7)[0])
    model.load_state_dict(weights)  # fails unless the names match the model's exactly
    assert all(torch.equal(p, last.after[name]) for name, p in model.named_parameters())


def test_a_run_killed_before_its_first_save_restarts_its_log(undisturbed, tmp_path, monkeypatch):
    log = tmp_path / "logs" / "log.jsonl"
    arguments = "--checkpoint-dir", tmp_path / "new" / "folder", "--resume", "--log-file", log

    def killed(*args):
        assert [record["step"] for record in records(log)] == [0, 1, 2]  # each line is in the file at once
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load(LONG), "save_checkpoint", killed)
        train(14, *arguments, "--save-every", 3)
    assert curve(train(14, *arguments)) == curve(undisturbed)
    assert train(14, *arguments) == []  # as when a scheduler restarts a finished job
    assert [record["step"] for record in records(log)] == list(range(14))


def test_after_a_power_cut_every_checkpoint_is_complete_and_the_log_reaches_it(tmp_path, monkeypatch):
    """What a power cut leaves is what fsync() has seen."""
    log, disk, seen = tmp_path / "log.jsonl", {}, []
    fsync, replace = os.fsync, os.replace

    def sync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        disk[path] = Path(path).read_bytes()
        fsync(fd)

    def rename(old, new):
        assert disk.get(str(old)) == Path(old).read_bytes() and not Path(new).exists()
        replace(old, new)
        checkpoint = torch.load(new, weights_only=True)
        seen.append(checkpoint["step"])
        lines = disk.get(str(log), b"")[: checkpoint["log"]].count(b"\n")
        assert len(disk.get(str(log), b"")) >= checkpoint["log"] and lines == (seen[-1] and 1 + seen[-1])

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    train(5, "--checkpoint-dir", tmp_path / "saved", "--save-every", 2, "--log-file", log)
    assert seen == [0, 2, 4, 5]


def test_a_kill_or_a_full_disk_while_saving_loses_only_that_checkpoint(saved, undisturbed, tmp_path, monkeypatch):
    at_the_kill, words = tmp_path / "at the kill", ["--resume", "--checkpoint-dir"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut_off)
        patch.setattr(Path, "unlink", lambda path, **_: shutil.copytree(saved, at_the_kill))  # a kill deletes nothing
        train(14, *words, saved, "--save-every", 1)
    assert names(at_the_kill) == ["step_00000006.pt", "step_00000012.pt", "step_00000013.pt.tmp"]

    def full(state, file):
        try:
            raise OSError(errno.ENOSPC, "No space left")
        except OSError:
            raise RuntimeError("unexpected pos") from None  # as torch.save() does

    with monkeypatch.context() as patch, pytest.raises(OSError, match="13.pt cannot be written: .*No space left"):
        patch.setattr(torch, "save", full)
        train(14, *words, saved, "--save-every", 1)
    assert names(saved) == ["step_00000006.pt", "step_00000012.pt"]  # and no unfinished one
    assert curve(train(14, *words, at_the_kill)) == curve(undisturbed)[12:]
    assert names(at_the_kill) == ["step_00000012.pt", "step_00000014.pt"]


def test_a_checkpoint_from_a_gpu_loads_without_one_and_is_shared_by_the_ranks(tmp_path, monkeypatch, capfd):
    """A GPU checkpoint is loaded to the CPU, so loading needs no GPU and ranks do not all use GPU 0."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"weight": torch.zeros(1)}, tmp_path / "step_00000001.pt")
    with contextlib.suppress(OSError):
        weight = unattended.load_checkpoint(tmp_path)["weight"]
    assert capfd.readouterr().err == "" and weight.device.type == "cpu"
    assert f"{tmp_path}/step_00000001.pt" in Path("/proc/self/maps").read_text()  # mapped into memory, not copied


def test_a_checkpoint_that_cannot_be_read_runs_no_code_and_is_skipped(saved, undisturbed, no_start):
    """A run with --keep 1 deletes neither the user's files nor its new checkpoint."""
    path, words = saved / "step_00000012.pt", ("--checkpoint-dir", saved, "--resume")
    for name in ("step_best.pt", "step_6.pt", "weights.pt"):
        shutil.copy(path, saved / name)
    torch.save(torch.load(path, weights_only=True) | {"args": Command(saved / "ran")}, path)
    assert curve(train(9, *words, "--keep", 1)) == curve(undisturbed)[6:9]
    before = ["step_00000009.pt", "step_00000012.pt", "step_6.pt", "step_best.pt", "weights.pt"]
    assert names(saved) == before  # no "ran"
    for name in before[:2]:
        os.truncate(saved / name, 0)
    no_start(*words, says="no checkpoint in .* can be read", lines=3)
    assert names(saved) == before


def test_resuming_with_other_settings_fails_and_names_the_setting(saved, tmp_path, no_start):
    (tmp_path / "other.txt").write_text("To be, or not to be, that is the question. " * 100)
    before = {path: path.read_bytes() for path in saved.glob("*.pt")}
    for change, says in (
        (["--seq-len", 64], "--seq-len 32, not 64$"),
        (["--total-batch-size", 256], "--total-batch-size 128, not 256$"),
        (["--model", "gpt2", "--batch-size", 1], "--model nano, not gpt2$"),
        (["--seed", 1337], "--seed 7, not 1337$"),
        (["--data", "other.txt"], r"tokens in --data \d+, not \d+$"),
    ):
        no_start("--checkpoint-dir", saved, "--resume", *change, says=f"with other settings: {says}")
    assert {path: path.read_bytes() for path in saved.glob("*.pt")} == before
    save_gpt2(tmp_path / "gpt2"), save_gpt2(tmp_path / "other", n_head=4)  # which has the same shapes
    train(1, "--checkpoint-dir", "new", model=("--init-from", "gpt2"))
    with pytest.raises(OSError, match="with other settings: --init-from gpt2, not other"):
        train(2, "--checkpoint-dir", "new", "--resume", model=("--init-from", "other"))
    shutil.rmtree("gpt2"), os.rename("other", "gpt2")
    with pytest.raises(OSError, match="with other settings: n_head 2, not 4"):
        train(2, "--checkpoint-dir", "new", "--resume", model=("--init-from", "gpt2"))


def test_a_run_does_not_change_the_files_of_another_run(saved, tmp_path, no_start):
    log, notes, other = tmp_path / "log.jsonl", tmp_path / "notes.txt", tmp_path / "other"
    notes.write_text("To be, or not to be")
    (tmp_path / "short.jsonl").write_text(log.read_text()[:500])  # the steps before the checkpoint are missing
    train(3, "--checkpoint-dir", other, "--log-file", tmp_path / "other.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    no_start("--checkpoint-dir", saved, says="has checkpoints: --resume")
    no_start("--log-file", log, says="not the log of this run")
    # The first run that is rejected in a new folder leaves no state, so the second one is rejected as well.
    new, short, none = tmp_path / "new", tmp_path / "short.jsonl", tmp_path / "none.jsonl"
    for folder, file in (new, log), (new, log), (new, notes), (other, log), (saved, short), (saved, none):
        no_start("--checkpoint-dir", folder, "--resume", "--log-file", file, says=f".*{file.name} is not the log of")
    no_start("--checkpoint-dir", notes, says=".*notes.txt")
    os.mkfifo("pipe")  # opening it would wait for ever
    no_start("--checkpoint-dir", saved, "--resume", "--log-file", "pipe", says=".*not a regular file")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.parent != new} == before


def send_in_the_second_step(monkeypatch, script, *numbers):
    """Make a run send itself signals, and return a list with an item for each batch that it reads, two per step."""
    loader, batches = load(script).DataLoaderLite, []
    next_batch = loader.next_batch

    def send(*args):
        batches.append(args)
        for number in numbers if len(batches) == 3 else ():
            os.kill(os.getpid(), number)
        return next_batch(*args)

    monkeypatch.setattr(loader, "next_batch", send)
    return batches


@pytest.mark.parametrize("script", versions("main", among=SAVING))
def test_a_signal_lets_the_step_end_and_be_saved_unless_it_is_ignored(tmp_path, script):
    """nohup ignores SIGHUP."""
    for number, steps in ("SIGTERM", 8), ("SIGINT", 8), ("SIGHUP", 8), ("SIGTERM", 2), ("SIGHUP", 3):
        folder = tmp_path / f"{number} {steps}"
        stops = pytest.raises(SystemExit) if steps == 8 else contextlib.suppress(SystemExit)  # 2: in the last step
        with pytest.MonkeyPatch.context() as patch:
            batches = send_in_the_second_step(patch, script, signal.Signals[number])
            not_caught = signal.SIG_IGN if steps == 3 else lambda *_: pytest.fail("the step was not ended")
            signal.signal(signal.Signals[number], not_caught)
            with stops as exit:
                train(steps, "--checkpoint-dir", folder, "--save", folder.with_suffix(".pt"), script=script)
        assert steps < 8 or exit.value.code == 1
        last = 3 if steps == 3 else 2
        assert len(batches) == 2 * last and names(folder)[-1] == f"step_{last:08d}.pt"
        assert folder.with_suffix(".pt").exists() == (steps < 8)


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch, capfd):
    batches = send_in_the_second_step(monkeypatch, LONG, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(8, "--checkpoint-dir", tmp_path)
    assert len(batches) == 3 and names(tmp_path) == ["step_00000000.pt"]
    assert capfd.readouterr().err.startswith("stopping after this step")


def test_output_that_fails_lets_the_step_end_and_be_saved(tmp_path, monkeypatch):
    """Ctrl-C also ends a tee that the output goes to, and a print may come before the signal of a closed terminal."""

    class Gone(io.StringIO):
        def write(self, text):
            if text.startswith("step    1"):
                raise OSError(errno.EIO, "gone")
            return super().write(text)

        def fileno(self):
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr("conftest.io", SimpleNamespace(StringIO=Gone))
    with pytest.raises(SystemExit):
        train(8, "--checkpoint-dir", tmp_path)
    assert names(tmp_path) == ["step_00000000.pt", "step_00000002.pt"]


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX | {more})
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(saved):
    """Return a process that holds the lock of the folder `saved`, as another run does."""
    command = [sys.executable, "-c", HOLD.format(more=0), str(saved / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_folder_has_one_run_at_a_time(saved, other_run, no_start, undisturbed, monkeypatch):
    """A run that torchrun has restarted waits up to a minute for the old rank 0."""
    waits, last = [], 100

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == last:
            other_run.kill()  # leaves no lock
            other_run.wait()

    monkeypatch.setattr(unattended, "time", SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits), time=time.time))
    before = {path: path.read_bytes() for path in saved.parent.rglob("*.*")}
    words = "--checkpoint-dir", saved, "--log-file", "log.jsonl"
    for more, restarts, seconds in ([], "0", 0), (["--resume"], "0", 0), (["--resume"], "2", 60):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        no_start(*words, *more, says=f"another run is using {saved}$")
        assert sum(waits) == seconds
    assert {path: path.read_bytes() for path in saved.parent.rglob("*.*")} == before
    last = 63
    assert curve(train(14, *words, "--resume")) == curve(undisturbed)[12:] and len(waits) == last
    words = sys.executable, "-c", HOLD.format(more="fcntl.LOCK_NB"), saved / "lock"
    assert (
        b"BlockingIOError" in subprocess.run(words, capture_output=True).stderr
    )  # this process, in which the run took place, holds the lock until it ends


def test_all_ranks_end_if_another_run_has_the_lock_or_they_see_different_folders(saved, other_run, monkeypatch):
    """Rank 0 sends its verdict to the others and reports it. Another rank receives it, and does not need the lock."""
    sent = []
    monkeypatch.setattr(unattended.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(unattended.dist, "broadcast_object_list", lambda verdict: sent.append(verdict[0]))
    with pytest.raises(OSError, match="another run is using"):
        unattended.lock_folder(saved, rank=0)
    unattended.lock_folder(saved, rank=1)
    assert [str(verdict) for verdict in sent] == [f"another run is using {saved}", "None"]
    monkeypatch.setattr(unattended.dist, "all_gather_object", lambda steps, own: steps.__setitem__(slice(2), [own, 0]))
    args = SimpleNamespace(checkpoint_dir=saved, rank=1, world_size=2, resume=True, steps=14)
    with pytest.raises(OSError, match=r"do not see the same .*: they would resume at steps \[12, 0\]"):
        unattended.open_run(args, {}, {})
    monkeypatch.setattr(unattended.dist, "broadcast_object_list", lambda verdict: verdict.__setitem__(0, sent[0]))
    with pytest.raises(SystemExit) as exit:
        unattended.lock_folder(saved, rank=1)
    assert exit.value.code == 1
