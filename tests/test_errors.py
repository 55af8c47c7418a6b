"""On each tested user error, a script prints one line to stderr, exits with a non-zero status, and changes no file."""

import re
import resource
import shutil

import pytest
import torch
from conftest import ROOT, RUNGS, SCRIPTS, load, since, versions

WRONG = {
    "no such file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "named like an error": (["--data", "x/gloo/out of memory"], "(?<!read: )x/gloo/out of .*No such"),
    "a folder": (["--data", "."], "directory"),
    "empty": (["--data", "empty.txt"], "0 tokens, but B 4.* T 128.* need 513"),
    "too short": (["--data", "short.txt"], "10 tokens, but B 4.* T 128.* need 513"),
    "binary": (["--data", "binary.bin"], "utf-8"),
    "not UTF-8": (["--data", "latin1.txt"], "utf-8"),
    "T over 1024": (["--seq-len", "1025"], "1 to 1024 for --seq-len"),
    "T 0": (["--seq-len", "0"], "at least 1"),
    "B 0": (["--batch-size", "0"], "at least 1"),
    "B too large": (["--batch-size", "1000000"], "(338025 tokens, but B 1000000|not a multiple of .* = 128000000)"),
    "no steps": (["--steps", "0"], "at least 1"),
    "steps no number": (["--steps", "many"], "many"),
    "seed": (["--seed", str(2**64)], "--seed"),
    "no such device": (["--device", "cuda:99"], "cuda:99: PyTorch .* finds only .*cpu"),
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


@pytest.mark.parametrize("script", ["baseline.py", "ddp_run.py", "pretrain/train.py"])
def test_a_script_that_is_copied_without_the_tokenizer_asks_for_it(script, tmp_path, monkeypatch, refused):
    copy = tmp_path / script
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, copy)
    monkeypatch.setattr(load(script), "__file__", str(copy))
    says = rf"{tmp_path}/tokenizer is missing: copy the tokenizer/ folder along with this script"
    refused(script, "--device", "cpu", "--data", ROOT / "input.txt", says=says)


@pytest.mark.slow
def test_a_missing_file_in_a_process_of_its_own(run):
    one_line(run("baseline.py", "--data", "nowhere.txt"), "baseline.py", 1, "nowhere.txt")


@pytest.mark.slow
def test_out_of_memory_names_b_and_t_and_the_flags(tmp_path, run):
    # A process with 6 GiB of address space has no room for the 5 GB of attention scores.
    shutil.copy(ROOT / "tests" / "offline" / "sitecustomize.py", tmp_path)
    limit = f"\nimport resource\nresource.setrlimit(resource.RLIMIT_AS, ({6 * 2**30}, {resource.RLIM_INFINITY}))\n"
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(limit)
    done = run("baseline.py", "--batch-size", 300, "--seq-len", 1024, "--steps", 1, PYTHONPATH=str(tmp_path))
    one_line(done, "baseline.py", 1, "out of memory with B 300 and T 1024: lower --batch-size or --seq-len")


OUT_OF_MEMORY = {  # the messages of PyTorch 2.13
    "the allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ..."),
    "the driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported ..."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm(...)`"),
    "cuBLAS at its first call": RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(...)`"
    ),
    "a CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you ..."),
}


def fail_with(error):
    def fail(*args, **options):
        raise error

    return fail


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("source", OUT_OF_MEMORY)
@pytest.mark.parametrize("script", versions("exit_message", among=list(RUNGS)))
def test_out_of_memory_is_one_line_wherever_it_comes_from(script, source, monkeypatch, refused):
    monkeypatch.setattr(load(script).GPT, "forward", fail_with(OUT_OF_MEMORY[source]))
    words = ["--device", "cpu", "--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", 8]
    words += ["--total-batch-size", 8] if script in since("ddp_run.py", among=list(RUNGS)) else []
    refused(script, *words, says="out of memory with B 1 and T 8: lower --batch-size or --seq-len")


@pytest.mark.slow
def test_no_compiler(run, tmp_path):
    done = run(
        "speedup_05_compile.py", "--steps", 1, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    one_line(done, "speedup_05_compile.py", 1, r"torch\.compile failed: .*No working C\+\+ compiler")
