"""Checkpoints, signals and the log of a long run. Failures raise OSError, whose message the scripts print on one line.

branches/unattended.py is a symbolic link to this file, because fsdp_run.py also imports this module.
"""

import contextlib
import fcntl
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STOPPING = b"stopping after this step, which may compile first; a second Ctrl-C stops at once and saves nothing\n"


def allow_any_character():
    """Make print() escape characters that the terminal cannot show, for example in a path, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if standard output is closed
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def printing():
    """Context manager for printing a program's result. Exits with a one-line error if the result cannot be printed."""
    try:
        yield
        print(end="", flush=True)  # does nothing if standard output is closed
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what Python would write at exit
        if not isinstance(error, BrokenPipeError):  # a reader such as head has closed the pipe
            sys.exit(f"{Path(sys.argv[0]).name}: error: the result cannot be printed: {error.strerror}")


def try_lock(fd):
    """Lock an open file until this process ends. Return False if another process has locked it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:  # on some network file systems
        print(f"--checkpoint-dir cannot be locked ({error.strerror}): start only one run in it", file=sys.stderr)
    return True


def lock_folder(folder, rank):
    """Create a checkpoint folder and lock it for this run. All ranks call this function. Only rank 0 holds the lock.

    If the folder cannot be created or another run holds the lock, rank 0 raises OSError, and the other ranks raise
    SystemExit. After a restart by torchrun, the old rank 0 may still be saving, so the new rank 0 waits up to a minute.
    """
    error = [None]
    if rank == 0:
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        deadline = time.monotonic() + (60 if restarted else 0)
        try:
            str(folder).encode()  # torch.load(mmap=True) needs a path in UTF-8
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / "lock", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)  # never closed
            while not try_lock(fd):
                if time.monotonic() >= deadline:
                    raise BlockingIOError(f"another run is using {folder}")
                time.sleep(1)
        except OSError as problem:
            error = [problem]
        except UnicodeEncodeError:
            error = [OSError(f"--checkpoint-dir {str(folder)!a} is not UTF-8")]
    if dist.is_initialized():
        dist.broadcast_object_list(error)
    if error[0]:
        raise error[0] if rank == 0 else SystemExit(1)  # only rank 0 prints the error


def open_run(args, task, config):
    """Return the state of the run in --checkpoint-dir, or of a new run. All ranks call this function.

    `task` maps the names of the settings that must not change on resume to their values. `config` is the model's
    configuration. The state of a resumed run contains "model" and "optim". Raises OSError if the folder belongs to
    another run.
    """
    folder, run = args.checkpoint_dir, {"task": task, "config": config, "steps": args.steps, "step": 0, "log": 0}
    run["begun"] = time.time()  # identifies the run in its log
    if folder:
        lock_folder(folder, args.rank)
    saved = load_checkpoint(folder) if folder else None
    if folder and not saved and (folder / "best.pt").exists():
        raise OSError(f"{folder} contains the best.pt of another run: use another folder")
    if saved and saved.get("step", 1) and not args.resume:
        raise OSError(f"{folder} has checkpoints: --resume continues from them, and a new run needs another folder")
    run = ({"config": config} | saved) if saved and args.resume else run  # old checkpoints contain no "config"
    theirs = run.get("task", {}) | run["config"]
    for name, value in (task | config).items():
        if theirs.get(name) != value:
            raise OSError(f"{folder} was saved with other settings: {name} {theirs.get(name)}, not {value}")
    if dist.is_initialized():
        steps = [0] * args.world_size
        dist.all_gather_object(steps, run["step"])
        if len(set(steps)) > 1:
            raise OSError(f"the ranks do not see the same {folder}: they would resume at steps {steps}")
    if folder and not run["step"] and args.rank == 0:
        save_whole(folder / "step_00000000.pt", run)  # no weights; "begun" identifies the log of a run killed early
    if folder:
        print(f"{run['step']} of {args.steps} steps are done, in {folder}", flush=True)
    if run["steps"] != args.steps and run["step"] < args.steps:
        print(f"--steps was {run['steps']}: the learning rate now follows the schedule for {args.steps} steps")
    return run | {"steps": args.steps}


def load_checkpoint(folder):
    """Return the latest readable checkpoint, or None. Raises OSError if every checkpoint is damaged."""
    paths = sorted(folder.glob("step_????????.pt"), reverse=True)
    for path in paths:
        try:  # weights_only prevents code execution; with mmap, the ranks on one machine share one copy
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch.load raises many exception types for a damaged file
            print(f"{path} cannot be read: {repr(error)[:200]}", file=sys.stderr)
    if paths:
        raise OSError(f"no checkpoint in {folder} can be read")


def save_checkpoint(args, run, state_dicts, log):
    """On rank 0, save step_N.pt and delete all but the latest --keep checkpoints. Raises OSError."""
    if args.rank == 0:
        if args.log_file:
            os.fsync(log.fileno())  # otherwise, a power cut could leave the log shorter than the checkpoint records
            run["log"] = log.tell()
        path = args.checkpoint_dir / f"step_{run['step']:08d}.pt"
        save_whole(path, run | dict(zip(("model", "optim"), state_dicts, strict=True)))
        print(f"saved {path}", flush=True)
        paths = sorted(old for old in path.parent.glob("step_????????.pt") if old <= path)  # later files are damaged
        for old in [*paths[: -args.keep], *path.parent.glob("*.pt.tmp")]:  # .tmp: left by a kill during a save
            old.unlink()


def save_whole(path, contents):
    """Save `contents` for torch.load() under a temporary name, then rename the file. Raises OSError."""
    unfinished = Path(f"{path}.tmp")
    try:
        with open(unfinished, "wb") as file:
            torch.save(contents, file)
            file.flush(), os.fsync(file.fileno())  # otherwise, a power cut could leave an empty file at `path`
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # on a full disk, torch.save turns the OSError into a RuntimeError
        raise OSError(f"{path} cannot be written: {error.__context__ or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


class Output(io.TextIOBase):
    """Standard output. A failed write, for example after Ctrl-C has ended tee, is recorded as a signal."""

    def __init__(self, stream, signals):
        self.stream, self.signals = stream, signals

    def attempt(self, call, *args):
        try:
            call(*args)
        except OSError:
            self.signals.append(signal.SIGPIPE)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def write(self, text):
        self.attempt(self.stream.write, text)

    def flush(self):
        self.attempt(self.stream.flush)


def catch_signals(alone):
    """Install signal handlers, and return the list to which they add Ctrl-C, SIGTERM, SIGHUP and failed output.

    Signals that are ignored, such as SIGHUP under nohup, stay ignored. If the run is one process (`alone`), the first
    Ctrl-C prints a message, and the second raises KeyboardInterrupt. Under torchrun, neither happens, because one
    Ctrl-C causes several signals.
    """
    signals = []
    if sys.stdout:
        sys.stdout = Output(sys.stdout, signals)

    def note(number, frame):
        signals.append(number)
        if alone and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with contextlib.suppress(OSError, AttributeError):  # not print(): the signal may have interrupted a print()
                os.write(sys.stderr.fileno(), STOPPING)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)
    return signals


def open_log(args, run):
    """Return the log, truncated to its length at the checkpoint. Raises OSError if the file is not this run's log."""
    if not args.log_file or args.rank > 0:
        return open(os.devnull, "w")
    header = json.dumps({"begun": run["begun"]} | run["task"]) + "\n"  # unique to this run
    args.log_file.parent.mkdir(parents=True, exist_ok=True)
    if run["log"] > (args.log_file.stat().st_size if args.log_file.exists() else 0):
        raise OSError(f"{args.log_file} is not the log of this run: it lacks the steps before the checkpoint")
    log = open(args.log_file, "a+", buffering=1, encoding="utf-8", errors="replace")
    log.seek(0)
    if not header.startswith(log.readline()):  # a kill may have truncated the header
        raise OSError(f"{args.log_file} is not the log of this run: use another file")
    log.seek(log.truncate(run["log"]))  # truncate() returns the new length
    if not run["log"]:
        log.write(header)
    return log
