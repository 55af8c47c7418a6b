"""On each tested user error, a script prints one line to stderr, exits with a non-zero status, and changes no file."""

import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import EAGER, ROOT, RUNGS, SCRIPTS, load, play, since, versions

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
    "T -1": (["--seq-len", "-1"], "at least 1"),
    "B 0": (["--batch-size", "0"], "at least 1"),
    "B -4": (["--batch-size", "-4"], "at least 1"),
    "B too large": (["--batch-size", "1000000"], "(338025 tokens, but B 1000000|not a multiple of .* = 128000000)"),
    "no steps": (["--steps", "0"], "at least 1"),
    "negative steps": (["--steps", "-1"], "at least 1"),
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


def test_a_missing_gpu_is_called_that_under_torchrun_too(monkeypatch, refused):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    refused("ddp_run.py", "--device", "cuda:99", says="cuda:99: PyTorch .* finds only .*cpu")


@pytest.mark.parametrize("script", ["baseline.py", "ddp_run.py", "pretrain/train.py"])
def test_a_script_that_is_copied_without_the_tokenizer_asks_for_it(script, tmp_path, monkeypatch, refused):
    copy = tmp_path / script
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / script, copy)
    monkeypatch.setattr(load(script), "__file__", str(copy))
    says = rf"{tmp_path}/tokenizer is missing: copy the tokenizer/ folder along with this script"
    refused(script, "--device", "cpu", "--data", ROOT / "input.txt", says=says)


def test_a_reader_that_leaves_ends_the_run_without_a_word(tmp_path):
    """If the reader of a run's output exits, as `head` does, the run ends with status 1 and prints no error."""
    command = f"{sys.executable} {ROOT / 'baseline.py'} --batch-size 1 --seq-len 8 --steps 1000 | head -n 5"
    words = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (1, "", 5)


@pytest.mark.parametrize("script", ["baseline.py", "ddp_run.py"])
def test_a_full_disk_under_stdout_is_one_line(script, tmp_path):
    words = [sys.executable, ROOT / script, "--batch-size", "1", "--seq-len", "8", "--device", "cpu", "--steps", "1"]
    words += ["--total-batch-size", "8"] if script == "ddp_run.py" else []
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | EAGER
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=tmp_path, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, f"{script}: error: [Errno 28] No space left on device\n")


def test_the_header_is_there_before_the_first_step_ends(tmp_path, run):
    """The header is printed before the first step ends, even if stdout is a pipe, as in `| tee log`."""
    text = (ROOT / "baseline.py").read_text(encoding="utf-8").replace("loss = model(x, y)", "os._exit(7)")
    (tmp_path / "baseline.py").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer").symlink_to(ROOT / "tokenizer")
    done = run("baseline.py", "--data", ROOT / "README.md", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 7 and "1 epoch = " in done.stdout


@pytest.mark.slow
def test_a_missing_file_in_a_process_of_its_own(run):
    one_line(run("baseline.py", "--data", "nowhere.txt"), "baseline.py", 1, "nowhere.txt")


@pytest.mark.slow
@pytest.mark.parametrize("script, B", [("baseline.py", 300), ("ddp_run.py", 40)])
def test_out_of_memory_names_b_and_t_and_the_flags(script, B, tmp_path, run):
    # A process with 6 GiB of address space has no room for the 5 GB of attention scores in baseline.py
    # or the 8 GB of logits in ddp_run.py.
    shutil.copy(ROOT / "tests" / "offline" / "sitecustomize.py", tmp_path)
    limit = f"\nimport resource\nresource.setrlimit(resource.RLIMIT_AS, ({6 * 2**30}, {resource.RLIM_INFINITY}))\n"
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(limit)
    arguments = ["--batch-size", B, "--seq-len", 1024, "--steps", 1]
    if script == "ddp_run.py":
        arguments += ["--total-batch-size", B * 1024]
    done = run(script, *arguments, PYTHONPATH=str(tmp_path), **EAGER)
    one_line(done, script, 1, f"out of memory with B {B} and T 1024: lower --batch-size or --seq-len")


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
@pytest.mark.parametrize("script", versions("main", among=list(RUNGS)))
def test_out_of_memory_is_one_line_wherever_it_comes_from(script, source, monkeypatch, refused):
    monkeypatch.setattr(load(script).GPT, "forward", fail_with(OUT_OF_MEMORY[source]))
    words = ["--device", "cpu", "--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", 8]
    words += ["--total-batch-size", 8] if script in since("ddp_run.py", among=list(RUNGS)) else []
    refused(script, *words, says="out of memory with B 1 and T 8: lower --batch-size or --seq-len")


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("source", ["the allocator", "cuBLAS", None])
@pytest.mark.parametrize("script", ["speedup_05_compile.py", "ddp_run.py"])
def test_out_of_memory_in_the_compiler_is_reported_as_out_of_memory(script, source, monkeypatch):
    """An out-of-memory error during compilation is reported as out of memory.

    Inductor runs candidate kernels on the GPU. If a kernel runs out of memory, Inductor raises a compiler error. Other
    errors during compilation are reported as compile failures.
    """
    error = OUT_OF_MEMORY[source] if source else NotImplementedError("no such kernel")
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.compile_to_module", fail_with(error))
    words = ["--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", 8]
    words += ["--total-batch-size", 8] if script == "ddp_run.py" else []
    with pytest.raises(RuntimeError) as raised, torch._inductor.utils.fresh_inductor_cache():
        play(script, *words, compiled=True)
    torch._dynamo.reset()
    monkeypatch.setattr("sys.argv", [script, *map(str, words)])
    said = "torch.compile failed: NotImplementedError: no such kernel"
    line = load(script).exit_message(raised.value)
    assert line.startswith(f"{script}: error: {'out of memory with B 1 and T 8: ' if source else said}")


@pytest.mark.parametrize("script", ["speedup_05_compile.py", "ddp_run.py"])
def test_a_bug_in_a_compiled_model_keeps_its_traceback(script, monkeypatch):
    """An error in the model's code keeps its traceback. Only the compiler's own errors are shortened to one line."""
    monkeypatch.setattr(load(script).MLP, "forward", lambda self, x: self.c_fc(self.c_fc(x)))
    words = ["--data", ROOT / "README.md", "--batch-size", 1, "--seq-len", 8]
    words += ["--total-batch-size", 8] if script == "ddp_run.py" else []
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        play(script, *words, compiled=True)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        load(script).exit_message(raised.value)


@pytest.mark.slow
def test_no_compiler(run, tmp_path):
    done = run(
        "speedup_05_compile.py", "--steps", 1, PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    one_line(done, "speedup_05_compile.py", 1, r"torch\.compile failed: .*No working C\+\+ compiler")
