"""A run that is killed and resumed matches an uninterrupted run bit for bit.

A damaged file, a full disk, or a new run started in another run's folder does not destroy a good checkpoint.
"""

import contextlib
import errno
import functools
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import unattended
from conftest import (
    EAGER,
    LONG,
    ROOT,
    RUNGS,
    STEP,
    SUMMARY,
    TRAIN,
    Command,
    load,
    nano,
    restore_signals,
    save_gpt2,
    since,
    versions,
    watch,
)

SIZES = ["--model", "nano", "--seq-len", 32, "--batch-size", 2, "--total-batch-size", 128]
SIZES += ["--data", ROOT / "README.md"]  # a short text, which is tokenized quickly
SCHEDULE = ["--warmup-steps", 10, "--eval-every", 1000]  # flags that only pretrain/train.py has
pytestmark = pytest.mark.usefixtures("no_evaluation")
SAVING = since(LONG, among=list(RUNGS))
WEIGHTS = versions("main", among=since("ddp_run.py", among=list(RUNGS)))  # the scripts with --save


def train(steps, *args, script=LONG, **environment):
    """Train briefly in this process without compiling and return the recorded steps."""
    return watch(script, *SIZES, "--steps", steps, *args, *SCHEDULE * (script == TRAIN), **environment)


def curve(steps):
    return [(step.printed["step"], step.printed["loss"], step.printed["norm"]) for step in steps]


def records(log):
    """Return a log's training-step records, without its evaluation records."""
    return [record for record in map(json.loads, log.read_text().splitlines()) if "loss" in record]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def save(folder, keep=1, **run):
    """Save a checkpoint of a tiny model."""
    args = SimpleNamespace(rank=0, log_file=None, checkpoint_dir=folder, keep=keep)
    unattended.save_checkpoint(args, run, (torch.nn.Linear(1, 1).state_dict(), {}), None)


@pytest.fixture
def script():
    """Return the default script, which a test can override by parametrizing `script`."""
    return LONG


@pytest.fixture(scope="module")
def whole():
    """Return a function that runs a script for 8 steps without interruption and returns the recorded steps."""
    return functools.cache(lambda script: train(8, script=script))


@pytest.fixture
def undisturbed(whole, script):
    return whole(script)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Return a function that runs a script for 8 steps, with checkpoints at steps 3 and 6, and returns the folder.

    The checkpoint of step 8 is deleted, as if the run had been killed before its last save.
    """

    @functools.cache
    def left(script):
        folder = tmp_path_factory.mktemp("left")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            words = "--checkpoint-dir", "saved", "--save-every", 3, "--keep", 3, "--log-file", "log.jsonl"
            train(8, *words, script=script)
        (folder / "saved" / "step_00000008.pt").unlink(missing_ok=True)
        return folder

    return left


@pytest.fixture
def saved(left, script, tmp_path, monkeypatch):
    """Return a copy of the checkpoint folder of `left`. Its parent, with log.jsonl, becomes the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(left(script), tmp_path, dirs_exist_ok=True)
    return tmp_path / "saved"


@pytest.fixture
def no_start(refused, script, monkeypatch):
    """Return a function that starts a run with SIZES and asserts that it is rejected."""
    module = load(script)
    monkeypatch.setitem(module.MODELS, "gpt2", module.GPTConfig(n_layer=1, n_head=1, n_embd=8))
    return functools.partial(refused, script, "--device", "cpu", *SIZES, "--steps", 8, *SCHEDULE * (script == TRAIN))


@pytest.mark.parametrize("script", SAVING)
def test_a_checkpoint_holds_all_that_the_training_is(tmp_path, script):
    saved = tmp_path / "saved"
    train(6, "--checkpoint-dir", saved, script=script)
    checkpoint = torch.load(max(saved.glob("step_*.pt")), weights_only=True)
    assert checkpoint["step"] == 6
    assert checkpoint["position"] == 6 * 128
    assert checkpoint["task"].items() >= {"--model": "nano", "--seq-len": 32, "--total-batch-size": 128}.items()
    model = nano("speedup_10_fused_adamw.py")
    model.load_state_dict(checkpoint["model"])  # fails unless the names match the model's exactly
    assert checkpoint["optim"]["state"].keys() == dict(model.named_parameters()).keys()
    assert {float(state["step"]) for state in checkpoint["optim"]["state"].values()} == {6.0}


@pytest.mark.parametrize("script", WEIGHTS)
def test_save_leaves_the_final_weights_for_every_script_of_this_shape(tmp_path, script):
    path = tmp_path / "weights.pt"
    path.write_text("of an earlier run")
    *_, last = train(2, "--save", path, script=script)
    assert names(tmp_path) == ["weights.pt"]
    weights = torch.load(path, weights_only=True)
    assert {p.device.type for p in weights.values()} == {"cpu"}
    for other in since(7):
        model = nano(other)
        model.load_state_dict(weights)  # fails unless the names match the model's exactly
        assert all(torch.equal(p, last.after[name]) for name, p in model.named_parameters())


def full_disk():
    """Limit file sizes to 1 MiB to simulate a full disk, and return a function that lifts the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("script", WEIGHTS)
def test_save_writes_a_whole_file_or_fails_before_training_if_it_can(tmp_path, script, refused, monkeypatch):
    words = "--device", "cpu", *SIZES, "--steps", 2, *SCHEDULE * (script == TRAIN)
    path = tmp_path / "weights.pt"
    path.write_text("of an earlier run")
    missing = tmp_path / "nowhere" / "weights.pt"
    with monkeypatch.context() as patch:
        patch.setattr(load(script).DataLoaderLite, "next_batch", lambda loader: pytest.fail("it trained"))
        for place in (missing, tmp_path):
            refused(script, *words, "--save", place, says=f"--save {place}: no such folder, or not a file")
    end = full_disk()
    try:
        with pytest.raises((OSError, RuntimeError)):
            train(2, "--save", path, script=script)
    finally:
        end()
    assert path.read_text() == "of an earlier run"


@pytest.mark.parametrize("script", SAVING)
def test_a_resumed_run_matches_an_uninterrupted_run_bit_for_bit(saved, undisturbed, tmp_path, script):
    log = tmp_path / "log.jsonl"
    steps = train(8, "--checkpoint-dir", saved, "--resume", "--log-file", log.name, "--save-every", 3, script=script)
    assert curve(steps) == curve(undisturbed)[6:]
    for resumed, original in zip(steps, undisturbed[6:], strict=True):
        assert all(torch.equal(resumed.before[name], p) for name, p in original.before.items())
        assert all(torch.equal(resumed.after[name], p) for name, p in original.after.items())
    assert [record["step"] for record in records(log)] == list(range(8))
    assert records(log)[7].keys() == {"step", "loss", "lr", "norm", "sec"}
    assert [f"{record['loss']:.6f}" for record in records(log)] == [loss for _, loss, _ in curve(undisturbed)]


def test_other_micro_batches_continue_with_the_same_text(saved, undisturbed):
    (step, _) = train(8, "--checkpoint-dir", saved, "--resume", "--batch-size", 4)
    assert float(step.printed["loss"]) == pytest.approx(float(undisturbed[6].printed["loss"]), abs=1e-4)


def test_resume_starts_without_a_checkpoint_and_stops_if_all_steps_are_done(undisturbed, tmp_path):
    arguments = "--checkpoint-dir", tmp_path / "new" / "folder", "--resume", "--log-file", tmp_path / "log.jsonl"
    assert curve(train(8, *arguments)) == curve(undisturbed)
    assert train(8, *arguments) == []  # as when a scheduler restarts a finished job
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == list(range(8))


@pytest.mark.parametrize("keep", [1, 2])
def test_it_keeps_the_newest(tmp_path, keep):
    train(8, "--checkpoint-dir", tmp_path, "--save-every", 2, "--keep", keep)
    assert names(tmp_path) == ["step_00000006.pt", "step_00000008.pt"][-keep:]


def test_the_newest_is_found_whatever_the_number_of_its_digits(tmp_path):
    for step in (999, 1000, 20_000):
        save(tmp_path, keep=2, step=step)
        for path in sorted(tmp_path.iterdir())[:-1]:
            os.utime(path, (4e9, 4e9))  # as after a copy
        assert unattended.load_checkpoint(tmp_path)["step"] == step


def test_a_checkpoint_from_a_gpu_loads_without_one_and_is_shared_by_the_ranks(tmp_path, monkeypatch):
    """A GPU checkpoint is loaded to the CPU, so loading needs no GPU and ranks do not all use GPU 0."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(tmp_path, step=1)
    try:
        weight = unattended.load_checkpoint(tmp_path)["model"]["weight"]
    except OSError as error:
        pytest.fail(str(error))
    assert weight.device.type == "cpu"
    maps = Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/step_00000001.pt" in maps  # mapped into memory, not copied


def damage(path, how):
    if how == "cut short":
        os.truncate(path, path.stat().st_size - 1000)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "of another program":
        path.write_text("To be, or not to be")
    elif how == "no zip":
        path.write_bytes(bytes(5000))
    else:  # a checkpoint that runs a command when it is unpickled
        checkpoint = torch.load(path, weights_only=True)
        torch.save(checkpoint | {"args": Command(path.parent / "ran")}, path)


@pytest.mark.parametrize("how", ["cut short", "empty", "of another program", "no zip", "code"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(saved, undisturbed, capfd, how):
    damage(saved / "step_00000006.pt", how)
    steps = train(8, "--checkpoint-dir", saved, "--resume")
    assert not (saved / "ran").exists()
    assert curve(steps) == curve(undisturbed)[3:]
    written = capfd.readouterr().err
    assert len(written.splitlines()) == 1 and written.startswith(f"{saved / 'step_00000006.pt'} cannot be read: ")


def test_a_run_does_not_start_if_all_checkpoints_are_damaged(saved, no_start):
    for path in saved.iterdir():
        path.write_bytes(b"")
    before = names(saved)
    no_start("--checkpoint-dir", saved, "--resume", says="no checkpoint in .* can be read", lines=3)
    assert names(saved) == before


@pytest.mark.parametrize("script", SAVING)
@pytest.mark.parametrize(
    "change, pattern",
    [
        (["--seq-len", 64], "of another run: --seq-len 32, not 64$"),
        (["--total-batch-size", 256], "of another run: --total-batch-size 128, not 256$"),
        (["--model", "gpt2", "--batch-size", 1], "of another run: --model nano, not gpt2$"),
        (["--seed", 7], "of another run: --seed 1337, not 7$"),
        (["--data", "other.txt"], r"of another run: tokens in --data \d+, not \d+$"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_another_task_is_refused_by_name(saved, monkeypatch, tmp_path, change, pattern, no_start, script):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("To be, or not to be, that is the question. " * 100)
    before = {path: path.read_bytes() for path in saved.iterdir() if path.suffix == ".pt"}
    no_start("--checkpoint-dir", saved, "--resume", *change, says=pattern)
    assert {path: path.read_bytes() for path in saved.iterdir() if path.suffix == ".pt"} == before


@pytest.mark.parametrize("script", SAVING)
def test_what_another_run_left_is_not_touched(saved, tmp_path, no_start, script):
    before = names(saved), (tmp_path / "log.jsonl").read_bytes()
    no_start("--checkpoint-dir", saved, says="has checkpoints: --resume")
    no_start("--log-file", tmp_path / "log.jsonl", says="not the log of this run")
    new = "--checkpoint-dir", tmp_path / "new", "--resume"
    for _ in range(2):  # the first rejected run leaves no state, so the second run is rejected as well
        no_start(*new, "--log-file", tmp_path / "log.jsonl", says="not the log of this run")
    train(3, "--checkpoint-dir", tmp_path / "other", "--log-file", tmp_path / "other.jsonl", script=script)
    other = "--checkpoint-dir", tmp_path / "other", "--resume"
    no_start(*other, "--log-file", "log.jsonl", says="not the log of this run")
    assert (names(saved), (tmp_path / "log.jsonl").read_bytes()) == before
    torch.save({"weights": torch.zeros(3)}, tmp_path / "new" / "step_00000009.pt")  # a file from a different program
    no_start("--checkpoint-dir", tmp_path / "new", says="has checkpoints: --resume")
    no_start(*new, says="of another run: --model None, not nano")
    (tmp_path / "new" / "step_00000009.pt").unlink()
    (tmp_path / "notes.txt").write_text("To be, or not to be")
    no_start(*new, "--log-file", tmp_path / "notes.txt", says="notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "To be, or not to be"


def killed(*args):
    raise KeyboardInterrupt  # ends the run at this call, as a kill would


def test_a_run_killed_before_its_first_save_restarts_its_log(undisturbed, tmp_path, monkeypatch):
    arguments = "--checkpoint-dir", tmp_path / "saved", "--resume", "--log-file", tmp_path / "log.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(load(LONG), "save_checkpoint", killed)
        train(3, *arguments)
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [0, 1, 2]
    assert curve(train(8, *arguments)) == curve(undisturbed)
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == list(range(8))


def test_a_log_without_the_steps_of_the_checkpoint_is_refused_unchanged(saved, tmp_path, no_start):
    log = tmp_path / "log.jsonl"
    whole = log.read_text()
    for left in ("", whole[: len(whole) // 2]):
        log.write_text(left)
        no_start("--checkpoint-dir", saved, "--resume", "--log-file", log.name, says="log.jsonl is not the log of this")
        assert log.read_text() == left
    no_start("--checkpoint-dir", saved, "--resume", "--log-file", "new.jsonl", says="new.jsonl is not the log of this")
    assert not (tmp_path / "new.jsonl").exists()
    train(7, "--checkpoint-dir", saved, "--resume")  # without --log-file, the damaged log is not read
    log.write_text(whole)
    train(8, "--checkpoint-dir", saved, "--resume", "--log-file", log.name)
    assert [record["step"] for record in records(log)] == [*range(6), 7]
    assert json.loads(log.read_text().splitlines()[0])["--model"] == "nano"


def test_model_and_init_from_are_told_apart(saved, tmp_path):
    """Resuming fails if --init-from replaces --model or names a different folder of weights."""
    words = [word for word in SIZES if word not in ("--model", "nano")]
    save_gpt2(tmp_path / "nano"), save_gpt2(tmp_path / "other")
    with pytest.raises(OSError, match="of another run: --model nano, not None"):
        watch(LONG, *words, "--init-from", "nano", "--steps", 8, "--checkpoint-dir", saved, "--resume")
    watch(LONG, *words, "--init-from", "nano", "--steps", 1, "--checkpoint-dir", "new")
    with pytest.raises(OSError, match="of another run: --init-from nano, not other"):
        watch(LONG, *words, "--init-from", "other", "--steps", 8, "--checkpoint-dir", "new", "--resume")


def test_a_signal_in_the_last_step_still_ends_the_run_normally(tmp_path, monkeypatch):
    monkeypatch.setattr(load(LONG), "catch_signals", lambda alone: [signal.SIGTERM])
    assert len(train(1, "--checkpoint-dir", tmp_path / "saved", "--save", tmp_path / "weights.pt")) == 1
    assert names(tmp_path) == ["saved", "weights.pt"]


def test_a_log_that_a_kill_cut_short_is_mended(saved, undisturbed, tmp_path):
    log = tmp_path / "log.jsonl"
    os.truncate(log, log.stat().st_size - 5)
    train(8, "--checkpoint-dir", saved, "--resume", "--log-file", log.name)
    assert [record["step"] for record in records(log)] == list(range(8))


def test_a_checkpoint_of_a_model_with_other_heads_is_refused(tmp_path, monkeypatch):
    """If other weights of the same shapes replace those of --init-from, a resumed run would train another model."""
    monkeypatch.chdir(tmp_path)
    words = *[word for word in SIZES if word not in ("--model", "nano")], "--init-from", "gpt2"
    save_gpt2(tmp_path / "gpt2", n_head=4)
    watch(LONG, *words, "--steps", 1, "--checkpoint-dir", "saved")
    save_gpt2(tmp_path / "gpt2", n_head=2)
    with pytest.raises(OSError, match="of another run: n_head 4, not 2"):
        watch(LONG, *words, "--steps", 2, "--checkpoint-dir", "saved", "--resume")


def test_a_checkpoint_without_a_configuration_is_resumed(saved, undisturbed):
    """Before November 28, 2026, checkpoints did not contain it."""
    for path in saved.glob("step_*.pt"):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["config"]
        torch.save(checkpoint, path)
    assert curve(train(8, "--checkpoint-dir", saved, "--resume")) == curve(undisturbed)[6:]
    assert torch.load(saved / "step_00000008.pt", weights_only=True)["config"]["n_head"] == 2


@pytest.mark.parametrize("folder", ["/proc/checkpoints", "file"])
def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path, folder, no_start):
    (tmp_path / "file").write_text("mine")
    no_start("--checkpoint-dir", tmp_path / folder, says=f".*{folder}")
    no_start("--log-file", "/proc/log.jsonl", says="proc")
    no_start("--checkpoint-dir", tmp_path / "n\udcff", says=r"--checkpoint-dir '.*n\\udcff' is not UTF-8$")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_stops_the_run_and_the_last_good_checkpoint_resumes_it(saved, undisturbed, no_start):
    end = full_disk()
    try:
        no_start(
            "--checkpoint-dir",
            saved,
            "--resume",
            "--save-every",
            1,
            says=f"{saved}/step_00000007.pt cannot be written: .*File too large",
        )
    finally:
        end()
    assert names(saved) == ["step_00000003.pt", "step_00000006.pt"]  # the partial file was removed
    assert curve(train(8, "--checkpoint-dir", saved, "--resume")) == curve(undisturbed)[6:]


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("script", versions("main", among=SAVING))
def test_a_signal_lets_the_step_end_and_be_saved(tmp_path, monkeypatch, number, script):
    batches = send_in_the_second_step(monkeypatch, script, number)
    signal.signal(number, lambda *_: pytest.fail("the step was not ended"))
    with pytest.raises(SystemExit) as exit:
        train(8, "--checkpoint-dir", tmp_path, script=script)
    assert exit.value.code == 1 and len(batches) == 4 and names(tmp_path)[-1] == "step_00000002.pt"


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, monkeypatch):
    """nohup ignores SIGHUP."""
    batches = send_in_the_second_step(monkeypatch, LONG, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(SystemExit):
        train(3, "--checkpoint-dir", tmp_path)
    assert len(batches) == 6


def test_the_first_ctrl_c_says_what_it_does_and_the_second_stops_at_once(tmp_path, monkeypatch, capfd):
    batches = send_in_the_second_step(monkeypatch, LONG, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(8, "--checkpoint-dir", tmp_path)
    assert len(batches) == 3 and names(tmp_path) == ["step_00000000.pt"]
    assert capfd.readouterr().err.startswith("stopping after this step, which may compile first; a second Ctrl-C")


@pytest.mark.parametrize("gone", [errno.EIO, errno.EPIPE])
def test_output_that_fails_lets_the_step_end_and_be_saved(tmp_path, monkeypatch, gone):
    """Ctrl-C also ends a tee that the output goes to, and a print may come before the signal of a closed terminal."""

    class Gone(io.StringIO):
        def write(self, text):
            if text.startswith("step    1"):
                raise OSError(gone, os.strerror(gone))
            return super().write(text)

        def fileno(self):
            return spare

    spare = os.open(tmp_path / "spare", os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr("sys.stdout", Gone())
    monkeypatch.setattr("sys.argv", [LONG, "--device", "cpu", *map(str, SIZES), "--checkpoint-dir", str(tmp_path)])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)
    with pytest.raises(SystemExit):
        load(LONG).main()
    restore_signals()
    assert names(tmp_path)[1:] == ["step_00000000.pt", "step_00000002.pt"]


@pytest.mark.parametrize("script", [LONG, TRAIN])
def test_without_checkpoints_ctrl_c_stops_at_once(monkeypatch, script):
    batches = send_in_the_second_step(monkeypatch, script, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(8, script=script)
    assert len(batches) == 3


def test_a_line_of_the_log_is_in_the_file_at_once(tmp_path):
    args = SimpleNamespace(log_file=tmp_path / "new" / "log.jsonl", rank=0)
    log = unattended.open_log(args, {"begun": 1.0, "task": {}, "log": 0})
    print("a line", file=log)
    assert args.log_file.read_text() == '{"begun": 1.0}\na line\n'


def test_one_ctrl_c_under_torchrun_is_several_signals(monkeypatch):
    monkeypatch.setattr("sys.stdout", sys.stdout)
    signals = unattended.catch_signals(alone=False)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    restore_signals()
    assert signals == [signal.SIGINT] * 3


def test_a_run_that_was_stopped_names_the_way_to_go_on(tmp_path, monkeypatch):
    send_in_the_second_step(monkeypatch, LONG, signal.SIGTERM)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        monkeypatch.setattr("sys.argv", [LONG, "--device", "cpu", *map(str, SIZES), "--checkpoint-dir", str(tmp_path)])
        monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)
        load(LONG).main()
    restore_signals()
    assert "\nstopped after step 1: to continue, run the same command with --resume\n" in printed.getvalue()


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(saved):
    """Return a process that holds the lock of the folder `saved`, as another run does."""
    command = [sys.executable, "-c", HOLD, str(saved / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("script", SAVING)
def test_a_folder_has_one_run_at_a_time(saved, other_run, no_start, undisturbed, script, monkeypatch):
    before = {path: path.read_bytes() for path in saved.parent.rglob("*.*")}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # the first start by torchrun does not wait
    monkeypatch.setattr(unattended.time, "sleep", lambda seconds: pytest.fail("it waited"))
    words = "--checkpoint-dir", saved, "--log-file", "log.jsonl"
    for more in [], ["--resume"]:
        no_start(*words, *more, says=f"another run is using {saved}$")
    assert {path: path.read_bytes() for path in saved.parent.rglob("*.*")} == before
    other_run.kill()  # leaves no lock
    other_run.wait()
    assert curve(train(8, *words, "--resume", script=script)) == curve(undisturbed)[6:]
    hold = subprocess.run([sys.executable, "-c", HOLD.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB"), saved / "lock"])
    assert hold.returncode == 1  # this process, in which the run took place, holds the lock until it ends


def test_after_a_restart_a_run_waits_for_the_old_rank_0(saved, other_run, undisturbed, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            other_run.kill()
            other_run.wait()

    monkeypatch.setattr(unattended.time, "sleep", wait)
    steps = train(8, "--checkpoint-dir", saved, "--resume", script=LONG, TORCHELASTIC_RESTART_COUNT="1")
    assert curve(steps) == curve(undisturbed)[6:] and waits == [1, 1, 1]


def test_a_restarted_run_waits_for_a_minute_at_most(saved, other_run, no_start, monkeypatch):
    clock = [0.0]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setattr(unattended.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(unattended.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    no_start("--checkpoint-dir", saved, "--resume", says=f"another run is using {saved}$")
    assert clock == [60.0]


def test_all_ranks_end_if_another_run_has_the_lock(saved, other_run, monkeypatch):
    """Rank 0 sends its verdict to the others and reports it. Another rank receives it, and does not need the lock."""
    sent = []
    monkeypatch.setattr(unattended.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(unattended.dist, "broadcast_object_list", lambda verdict: sent.append(verdict[0]))
    with pytest.raises(OSError, match="another run is using"):
        unattended.lock_folder(saved, rank=0)
    unattended.lock_folder(saved, rank=1)
    assert [str(verdict) for verdict in sent] == [f"another run is using {saved}", "None"]
    monkeypatch.setattr(unattended.dist, "broadcast_object_list", lambda verdict: verdict.__setitem__(0, sent[0]))
    with pytest.raises(SystemExit) as exit:
        unattended.lock_folder(saved, rank=1)
    assert exit.value.code == 1


def test_a_file_system_without_locks_is_one_line_and_no_obstacle(saved, undisturbed, monkeypatch, capfd):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(unattended.fcntl, "lockf", no_locks)
    assert curve(train(8, "--checkpoint-dir", saved, "--resume")) == curve(undisturbed)[6:]
    assert capfd.readouterr().err.splitlines() == [
        "--checkpoint-dir cannot be locked (No locks available): start only one run in it"
    ]


@pytest.mark.parametrize("kind", ["/dev/null", "pipe", "folder"])
def test_a_log_that_is_no_regular_file_is_refused_before_anything_is_made(tmp_path, no_start, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    path = tmp_path / kind  # tmp_path / "/dev/null" is /dev/null
    no_start("--checkpoint-dir", tmp_path / "new", "--log-file", path, says=f"--log-file {path}: not a regular file")
    assert not (tmp_path / "new").exists()


def test_a_terminal_without_a_paths_characters_is_no_obstacle(monkeypatch):
    """Every program in pretrain/ that prints a path calls allow_any_character()."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    unattended.allow_any_character()
    print("runs/café")
    assert written.getvalue() == b"runs/caf\\xe9\n"
    monkeypatch.setattr(sys, "stdout", None)  # closed
    unattended.allow_any_character()


@pytest.mark.slow
def test_two_signals_stop_a_process_and_save_its_run(tmp_path):
    command = [sys.executable, ROOT / LONG, *SIZES, "--steps", 1000, "--checkpoint-dir", tmp_path / "saved"]
    with subprocess.Popen(map(str, command), stdout=subprocess.PIPE, text=True, env=os.environ | EAGER) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if STEP.match(line) and STEP.match(line)["step"] == "   2":
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)  # as if the scheduler and torchrun had each sent a signal
    assert process.returncode == 1
    steps = [match.groupdict() for match in STEP.finditer("".join(lines))]
    assert 3 <= len(steps) <= 10
    assert SUMMARY.search("".join(lines))["last"] == str(len(steps) - 1)
    assert names(tmp_path / "saved") == ["step_00000000.pt", f"step_{len(steps):08d}.pt"]
    assert f"saved {tmp_path / 'saved'}/step_{len(steps):08d}.pt\n" in lines


def test_a_kill_while_saving_loses_only_that_checkpoint(saved, undisturbed, tmp_path, monkeypatch):
    at_the_kill = tmp_path / "at the kill"

    def cut(state, file):
        file.write(pickle.dumps(state["step"]))
        file.flush()
        shutil.copytree(saved, at_the_kill)  # the state after a kill: a partial file remains
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut)
        train(8, "--checkpoint-dir", saved, "--resume", "--save-every", 1)
    assert names(at_the_kill) == ["step_00000003.pt", "step_00000006.pt", "step_00000007.pt.tmp"]
    assert curve(train(8, "--checkpoint-dir", at_the_kill, "--resume")) == curve(undisturbed)[6:]
    assert names(at_the_kill) == ["step_00000006.pt", "step_00000008.pt"]


def test_a_damaged_checkpoint_is_not_one_of_those_kept(saved):
    damage(saved / "step_00000006.pt", "cut short")
    train(4, "--checkpoint-dir", saved, "--resume", "--keep", 1)
    assert "step_00000004.pt" in names(saved)


def test_what_a_user_puts_beside_the_checkpoints_stays(saved):
    """A run with --keep 1 deletes neither the user's files nor its new checkpoint.

    In this test, all earlier files are dated in the future, and the checkpoint of a later step is damaged.
    """
    for name in ("step_best.pt", "step_6.pt", "weights.pt"):
        shutil.copy(saved / "step_00000006.pt", saved / name)
    damage(saved / "step_00000006.pt", "cut short")
    for path in saved.iterdir():
        os.utime(path, (4e9, 4e9))
    train(5, "--checkpoint-dir", saved, "--resume", "--keep", 1)
    assert names(saved) == ["step_00000005.pt", "step_00000006.pt", "step_6.pt", "step_best.pt", "weights.pt"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events, path = [], tmp_path / "step_00000001.pt"

    def look(name, real, *args):
        size = (tmp_path / "step_00000001.pt.tmp").stat().st_size
        events.append((name, path.exists()))
        real(*args)
        assert name == "fsync" or path.stat().st_size == size  # the file was complete before the rename

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, functools.partial(look, name, getattr(os, name)))
    save(tmp_path, step=1)
    assert events == [("fsync", False), ("replace", False)]
    assert torch.load(path, weights_only=True)["step"] == 1 and names(tmp_path) == [path.name]
