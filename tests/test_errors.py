"""On each tested user error, a script prints one line to stderr, exits with a non-zero status, and changes no file."""

import re

import pytest
import torch
from conftest import ROOT, RUNGS, SCRIPTS, TRAIN, load, run_guard, since

WRONG = {
    "no such file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "a folder": (["--data", "."], "directory"),
    "empty": (["--data", "empty.txt"], "empty.txt: 0 tokens allow --batch-size 0 at most"),
    "too short": (["--data", "short.txt"], "10 tokens allow --batch-size 0 at most, with T 128"),
    "binary": (["--data", "binary.bin"], "utf-8"),
    "not UTF-8": (["--data", "latin1.txt"], "utf-8"),
    "a long run of spaces": (["--data", "spaces.txt"], "spaces.txt: .*tokenizing"),
    "T over 1024": (["--seq-len", "1025"], "at most 1024 for --seq-len"),
    "T negative": (["--seq-len", "-1"], "at least 1"),
    "B 0": (["--batch-size", "0"], "at least 1"),
    "B too large": (["--batch-size", "1000000"], "(338025 tokens allow --batch-size 2640 |multiple of .* 128000000)"),
    "no steps": (["--steps", "0"], "at least 1"),
    "steps no number": (["--steps", "many"], "many"),
    "no such device": (["--device", "cuda:99"], "--device: invalid choice: .cuda:99. .choose from .*cpu"),
    "unknown device": (["--device", "abacus"], "abacus"),
    "unknown model": (["--model", "gpt5"], "gpt5"),
    "unknown flag": (["--learning-rate", "1"], "--learning-rate"),
}
WRONG_TOTAL = {
    "does not divide": (["--total-batch-size", "1000"], "1000 is not a multiple of B . T . ranks = 512"),
    "less than one micro-batch": (["--total-batch-size", "256"], "256 is not a multiple"),
    "total -512": (["--total-batch-size", "-512"], "-512 is not a multiple"),
}


def one_line(done, script, status, pattern):
    assert done.returncode == status, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.match(rf"{script}: error: .*{pattern}", done.stderr, re.IGNORECASE), done.stderr


@pytest.fixture
def folder(tmp_path):
    """Yield a folder of user files, and assert after the test that it is unchanged."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("To be, or not to be, that is")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "spaces.txt").write_text(" " * 1_000_000 + "x")
    (tmp_path / "latin1.txt").write_bytes("fianc\xe9e ".encode("latin-1") * 4000)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    yield tmp_path
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


CASES = [(script, case) for case in WRONG for script in ("baseline.py", "ddp_run.py")]
CASES += [(script, case) for case in WRONG_TOTAL for script in since("ddp_run.py")] + [
    (script, "no such file") for script in SCRIPTS[1:]
]


@pytest.mark.parametrize("script, case", dict.fromkeys(CASES))
def test_bad_input(script, case, folder, monkeypatch, refused):
    arguments, pattern = (WRONG | WRONG_TOTAL)[case]
    monkeypatch.chdir(folder)
    refused(script, "--steps", 1, *arguments, says=pattern)


@pytest.mark.slow
def test_a_missing_file_in_a_process_of_its_own(run):
    one_line(run("baseline.py", "--data", "nowhere.txt"), "baseline.py", 1, "nowhere.txt")


def fail_with(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("script", ["baseline.py", "ddp_run.py", TRAIN])
def test_out_of_memory_is_one_line_that_names_the_flags(script, monkeypatch, refused):
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ...")
    monkeypatch.setattr(load(script).GPT, "forward", fail_with(lack))
    words = ["--device", "cpu", "--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", 8]
    words += ["--total-batch-size", 8] if script in since("ddp_run.py", among=list(RUNGS)) else []
    refused(script, *words, says="out of memory: lower --batch-size or --seq-len")


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, type("TorchRuntimeError", (RuntimeError,), {})])
def test_a_bug_keeps_its_traceback(kind, monkeypatch):
    monkeypatch.setattr(load("baseline.py").GPT, "forward", fail_with(kind("a bug")))
    monkeypatch.setattr("sys.argv", ["baseline.py", "--device", "cpu", "--steps", "1"])
    with pytest.raises(kind, match="a bug"):
        run_guard("baseline.py")


@pytest.mark.slow
def test_no_compiler(run, tmp_path):
    done = run(
        "speedup_05_compile.py", "--steps", 1, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    one_line(done, "speedup_05_compile.py", 1, r"InvalidCxxCompiler: No working C\+\+ compiler")
