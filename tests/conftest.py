"""Shared helpers: the list of scripts, and functions that import a script, record its steps or run it as users do."""

import ast
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests do not use the Hugging Face hub
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # quiet, as in the scripts
os.environ |= {"MAKEFLAGS": "--no-print-directory", "ARGS": ""}  # instead of those of the `make` that runs the tests
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread each: `make test` runs several processes
os.environ |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a file that is changed twice in a second could match older bytecode
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests that run in parallel leave a GPU alone
# By default, glibc returns freed blocks to the system, and reallocating them takes a third of nano's step time.
# These higher thresholds make glibc keep freed blocks for reuse.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**27), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
import numpy as np
import pytest
import tiktoken
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from dev.ladder import PLAIN_GIT, ROOT, read_ladder

RUNGS = {rung.file: rung for rung in read_ladder()}
LONG, TRAIN = "pretrain/long_run.py", "pretrain/train.py"
SCRIPTS = [script for script in RUNGS if script != TRAIN]  # train.py is tested mainly in test_pretrain.py
END = 50256  # the token <|endoftext|>
BF16_CPU = torch.cpu.get_capabilities().get("avx512_bf16", False)  # on other CPUs, the scripts use float32
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
NO_SCORES = {"val_loss": float("inf"), "hellaswag": None, "samples": [], "eval_sec": 0.0}
SIDE = SimpleNamespace(fp16="branches/fp16.py", muon="branches/muon.py", record="branches/record.py")
SIDE.stream, SIDE.fused, SIDE.queued = "branches/bf16_stream.py", "branches/fused_loss.py", "branches/queued_steps.py"
NANO = '"nano": GPTConfig(n_layer=4, n_head=4, n_embd=128)'
SMALL = '"nano": GPTConfig(n_layer=2, n_head=2, n_embd=32)'  # for tests that do not depend on the model size
STEP = re.compile(
    r"step (?P<step>[ \d]{4}) \| loss (?P<loss>\d+\.\d{6}) \| "
    r"(?:lr (?P<lr>\d\.\d{4}e-\d\d) \| )?(?:norm (?P<norm>\d+\.\d{4}|inf|nan) \| )?"
    r"dt (?P<ms>[ \d]{5,}\.\d\d) ms \| (?P<rate>[ \d,]{10}) tok/s"
    r"(?: \| (?P<left>\d+\.\d) min left)?(?: \| scale (?P<scale>\d+))?(?P<skipped> \| skipped)?"
)
SUMMARY = re.compile(
    r"median of steps (?P<first>\d+)-(?P<last>\d+): (?P<ms>\d+\.\d\d) ms, (?P<rate>[\d,]+) tok/s"
    r"(?:, peak memory (?P<memory>\d+\.\d\d) GiB)?"
)


# The slowest test files. Starting them first lets all workers finish at about the same time.
LONGEST = "commands mistakes puzzles scripts memory measure docs notebooks peers ranks pretrain numerics model".split()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (LONGEST + [item.path.stem[5:]]).index(item.path.stem[5:]))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        if item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason='parallel tests would share one GPU: make test ARGS="-n 0 -m gpu"'))


def since(rung, end=None, among=SCRIPTS):
    """Return the script `rung` and the scripts built on it, without `end` and the scripts built on `end`.

    `rung` and `end` are numbers or file names.
    """
    first, last = (SCRIPTS[which] if isinstance(which, int) else which for which in (rung, end))

    def builds_on(script, base):
        while script and script != base:
            script = RUNGS[script].before
        return script is not None

    return [script for script in among if builds_on(script, first) and not (last and builds_on(script, last))]


def versions(*definitions, among=SCRIPTS):
    """Return the first script and the scripts that change one of these definitions or a method of one.

    Testing these is enough. In every other script, these definitions are identical to those in the previous script;
    test_ladder.py checks this byte for byte.
    """

    def differs(rung):
        return not rung.before or any(f"{name}.".startswith(f"{one}.") for name in rung.touches for one in definitions)

    return [script for script in among if differs(RUNGS[script])]


# The first script and the scripts that change a definition used by the forward pass.
MODEL = versions("GPTConfig", "MODELS", "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward")


def load(script):
    """Import a script and shrink its nano to the size of SMALL.

    A module that ran `from <script> import MODELS` before this call still has the full-size nano.
    """
    package = Path(script).parent.name in ("dev", "measure")
    module = importlib.import_module(script.removesuffix(".py").replace("/", ".") if package else Path(script).stem)
    if hasattr(module, "GPTConfig"):
        small = module.GPTConfig(n_layer=2, n_head=2, n_embd=32)
        if module.MODELS["nano"] != small:
            module.MODELS = module.MODELS | {"nano": small}
    return module


def nano(script, seed=1337):
    """Return a script's nano model, initialized from the seed as in the script."""
    module = load(script)
    torch.manual_seed(seed)
    return module.GPT(module.MODELS["nano"])


def encode(text):
    """Return the GPT-2 tokens of a text."""
    os.environ["TIKTOKEN_CACHE_DIR"] = str(ROOT / "tokenizer")
    return tiktoken.get_encoding("gpt2").encode_ordinary(text)


def uneven():
    """Return a nano model whose loss differs from token to token."""
    model = nano(TRAIN, seed=0).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


class Command:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def question(endings, label, context="The cat", **more):
    return json.dumps({"ind": 1, "ctx": context, "endings": endings, "label": label} | more) + "\n"


def write_questions(path, count=40):
    """Write questions from input.txt in HellaSwag's format. The right ending is the text that follows the context."""
    words = (ROOT / "input.txt").read_text(encoding="utf-8").split()
    rng, lines = np.random.default_rng(1), []
    for label in rng.integers(4, size=count):
        places = rng.integers(len(words) - 40, size=4)
        endings = [" ".join(words[place + 12 : place + 20]) for place in places]
        lines.append(question(endings, int(label), " ".join(words[places[label] : places[label] + 12])))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def save_gpt2(folder, change=None, **config):
    """Save a small GPT-2 from transformers with random weights to a folder and return (the folder, the model)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT2LMHeadModel(GPT2Config(**shape | config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # biases of 0 would hide a failure to load them
            p.normal_(mean=float("ln_" in name and name.endswith("weight")), std=0.2)
        if change:
            change(model)
    model.save_pretrained(folder)
    return folder, model


@dataclass
class Step:
    """The tensors and printed fields that were recorded during one step of main()."""

    logits: list = field(default_factory=list)  # one tensor per micro-step; empty in a compiled run
    losses: list = field(default_factory=list)
    before: dict = field(default_factory=dict)  # name -> weight before the optimizer step
    grads: dict = field(default_factory=dict)  # name -> gradient passed to the optimizer
    after: dict = field(default_factory=dict)  # name -> weight after the optimizer step
    groups: list = field(default_factory=list)  # the settings of the optimizer's parameter groups
    printed: dict = field(default_factory=dict)  # the fields of the step's printed line

    @property
    def norm(self):
        return torch.stack([grad.norm() for grad in self.grads.values()]).norm().item()


def restore_signals():
    """Undo the handlers that a script's main() may have set."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def play(script, *args, device="cpu", compiled=False, autocast=True, full=False, **environment):
    """Run a script's main() in this process and return its output.

    The model is compiled only if `compiled` is set. With `full`, nano has its full size instead of the size of SMALL.
    """
    module, output = load(script), io.StringIO()
    torch.set_float32_matmul_precision("highest")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        if not compiled:
            patch.setattr(nn.Module, "compile", lambda *args, **kwargs: None)
        if not autocast:
            patch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
        if full:
            patch.setitem(module.MODELS, "nano", module.GPTConfig(n_layer=4, n_head=4, n_embd=128))
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr("sys.argv", [script, "--device", device, *map(str, args)])
        try:
            module.main()
        finally:
            restore_signals()
    return output.getvalue()


def run_guard(script):
    """Run the lines below `if __name__ == "__main__":` in this process, without importing the script again."""
    module = load(script)
    guard = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body[-1]
    assert ast.unparse(guard.test) == "__name__ == '__main__'"
    exec(compile(ast.Module(guard.body, []), module.__file__, "exec"), vars(module))


def watch(script, *args, compiled=False, **options):
    """Run a script's main() in this process, as `play` does, and return the recorded steps."""
    steps, model, depth = [Step()], None, 0

    def forward(called, *inputs):
        nonlocal model
        if not torch.is_grad_enabled():
            return nn.Module.__call__(called, *inputs)  # not recorded: an evaluation in pretrain/train.py
        model, logits = called, steps[-1].logits
        if not compiled:  # in a compiled run, the hook would be compiled and change the graph's outputs
            hook = model.lm_head.register_forward_hook(lambda *seen: logits.append(seen[-1].detach().clone()))
        loss = nn.Module.__call__(model, *inputs)
        if not compiled:
            hook.remove()
        steps[-1].losses.append(loss.detach().clone())
        return loss

    def before(optimizer, *_):
        nonlocal depth
        depth += 1  # in branches/muon.py, an optimizer's step calls the step of its base class
        if model and depth == 1:  # not in set_state_dict's step at learning rate 0, which only creates AdamW's moments
            steps[-1].groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            steps[-1].before = {name: p.detach().clone() for name, p in model.named_parameters()}
            steps[-1].grads = {name: p.grad.clone() for name, p in model.named_parameters()}

    def after(*_):
        nonlocal depth
        depth -= 1
        if model and depth == 0:
            steps[-1].after = {name: p.detach().clone() for name, p in model.named_parameters()}
            steps.append(Step())

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load(script).GPT, "__call__", forward)
            printed = play(script, *args, compiled=compiled, **options)
    finally:
        for hook in hooks:
            hook.remove()
    steps.pop()  # the last entry is empty: it was added after the final step
    for step, line in zip(steps, STEP.finditer(printed), strict=True):
        step.losses, step.printed = [loss.item() for loss in step.losses], line.groupdict()
    return steps


class OnTheCpu(TorchFunctionMode):
    """Run GPU work on the CPU. Record in `events` what is pinned, copied to a GPU, or would wait for a GPU."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_function__(self, call, types, args=(), kwargs=None):
        def here(value):
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        name, kwargs = getattr(call, "__name__", ""), kwargs or {}
        gpu = any(here(value) is not value for value in (*args, *kwargs.values()))
        if name == "pin_memory":
            self.events.append("pin")
            return args[0]
        if name == "to" and gpu:
            self.events.append("copy")
        if name in ("item", "tolist", "cpu", "numpy"):
            self.events.append("wait for the loss" if args[0].requires_grad else "wait")
        made = call(*map(here, args), **{key: here(value) for key, value in kwargs.items()})
        if gpu and isinstance(made, torch.Tensor):
            made.on_gpu = True  # for a test of what is given to NCCL
        return made


@contextlib.contextmanager
def made_up_gpu(events=None, capability=(9, 0), *others):
    """Make torch find a GPU of each given compute capability within this context, and run the GPUs' work on the CPU.

    `events` receives the synchronize and set_device calls, and the copies and waits that OnTheCpu records.
    """
    capabilities = [capability, *others]

    def capability_of(device=0):  # by default, the current device, which is GPU 0
        return capabilities[getattr(device, "index", device) or 0]

    def wait(device=None):
        events.append("synchronize")

    def has_bf16(including_emulation=True):
        return including_emulation or capability_of() >= (8, 0)

    events, autocast = [] if events is None else events, torch.autocast
    with pytest.MonkeyPatch.context() as patch, OnTheCpu(events):
        for owner, name, value in (
            (torch.accelerator, "is_available", True),
            (torch.accelerator, "current_accelerator", torch.device("cuda")),
            (torch.accelerator, "device_count", len(capabilities)),
            (torch.accelerator, "current_stream", SimpleNamespace(is_capturing=lambda: False, synchronize=wait)),
            (torch.cuda, "get_device_name", "Made Up GPU"),
            (torch.cuda, "get_device_properties", SimpleNamespace(uuid="1234-5678")),
            (torch.cuda, "max_memory_allocated", 3 * 2**30),
            (torch.cuda, "mem_get_info", (20 * 2**30, 80 * 2**30)),  # free bytes, total bytes
        ):
            patch.setattr(owner, name, lambda *args, value=value, **options: value)
        patch.setattr(torch.cuda, "get_device_capability", capability_of)
        patch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
        patch.setattr(torch.cuda, "set_device", lambda device: events.append(f"set_device {device}"))
        patch.setattr(torch.accelerator, "synchronize", wait)
        patch.setattr(torch.cuda, "synchronize", wait)
        patch.setattr(torch, "autocast", lambda device, *args, **options: autocast("cpu", *args, **options))
        patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, enabled=False))
        yield events


@pytest.fixture
def no_evaluation(monkeypatch):
    """Replace evaluate() in pretrain/train.py with a function that returns NO_SCORES."""
    monkeypatch.setattr(load(TRAIN), "evaluate", lambda *args: NO_SCORES)


@pytest.fixture
def refused(monkeypatch, capfd):
    """Return a function that runs a script in this process and asserts that it exits with an error.

    By default, the error must be the only line on stderr. The function returns the script's output on stdout.
    """

    def refused(script, *args, says="", lines=1):
        monkeypatch.setattr("sys.argv", [script, *map(str, args)])
        monkeypatch.setattr("sys.stdout", sys.stdout)  # restores stdout at the end: main() may replace it
        monkeypatch.setattr(nn.Module, "compile", lambda *args, **kwargs: None)
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            run_guard(script)
        restore_signals()
        code, (printed, written) = exit.value.code, capfd.readouterr()
        if isinstance(code, str):  # do what Python does: print it on stderr and exit with status 1
            code, written = 1, f"{written}{code}\n"
        assert code in (1, 2) and len(written.splitlines()) == lines, written
        assert re.match(rf"{Path(script).name}: error: .*{says}", written.splitlines()[-1], re.IGNORECASE), written
        return printed

    return refused


def trouble(errors):
    """Return the lines of a process's stderr that report errors, or warnings about this project's code."""
    ours = rf"{re.escape(str(ROOT))}/(?!\S*(?:site|dist)-packages/)"
    bad = re.compile(rf"\b\w*(Error|Exception)\b|: error: |Traceback|{ours}")
    return [line for line in errors.splitlines() if bad.search(line)]


@pytest.fixture(scope="session")
def inductor_cache(request, tmp_path_factory):
    """Return the folder of torch.compile's cache. If pytest's cache is enabled, the folder persists between runs."""
    cache = getattr(request.config, "cache", None)
    return str(cache.mkdir("inductor") if cache else tmp_path_factory.mktemp("inductor"))


def copy_project(folder, part=""):
    """Copy the project, or one of its folders, without built files, cached files or output of the README's commands.

    Folders named pytest-cache-files-* are skipped because another test process may rename one during the copy.
    """
    made = (
        ".* __pycache__ pytest-cache-files-* site runs checkpoints weights.pt shards fineweb10B my-gpt2 puzzles".split()
    )
    return Path(shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns(*made)))


def only_committed_results(root):
    """From a copy of the project, delete a reader's measurements that are neither committed nor on the pages."""
    pages = (root / "docs" / "pages" / "results.md").read_text(encoding="utf-8")
    if not (ROOT / ".git").exists():  # as in a ZIP file from GitHub
        return root
    command = ["git", "ls-files", "results/*/runs.jsonl"]
    listed = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, text=True, check=True).stdout.split()
    for log in root.glob("results/*/runs.jsonl"):
        name = log.relative_to(root).as_posix()
        if name not in listed and f"`{name}`" not in pages:
            log.unlink()
    return root


def commit_all(folder):
    """Create a git repository in a folder and commit all its files."""
    for words in ("init -q", "add .", "-c user.name=Test -c user.email=test@localhost commit -qm all"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True, capture_output=True, env=PLAIN_GIT)


def press_ctrl_c_at(pattern, command, folder, **environment):
    """Run a command in a terminal and press Ctrl-C at the first line that matches the pattern.

    Return (the output, the exit status, or None after Ctrl-C). By default, background jobs ignore Ctrl-C.
    """
    import pexpect

    words = {"cwd": folder, "env": os.environ | environment, "encoding": "utf-8", "timeout": None}
    terminal, output = pexpect.spawn(command[0], command[1:], **words, preexec_fn=restore_signals), io.StringIO()
    terminal.logfile_read = output
    pressed = terminal.expect([re.compile(pattern, re.MULTILINE), pexpect.EOF]) == 0
    if pressed:
        terminal.sendintr()
        terminal.expect(pexpect.EOF)
    terminal.close()
    return output.getvalue().replace("\r\n", "\n"), None if pressed else terminal.exitstatus


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Return a copy of the project in which nano has the size of SMALL in every script."""
    folder = copy_project(tmp_path_factory.mktemp("small") / "ladder")
    for script in RUNGS:
        text = (folder / script).read_text(encoding="utf-8")
        assert text.count(NANO) == 1
        (folder / script).write_text(text.replace(NANO, SMALL), encoding="utf-8")
    return folder


@pytest.fixture
def clone(small, tmp_path):
    """Return a git repository of the `small` project with about a tenth of input.txt and a link to .venv."""
    if not (ROOT / ".venv" / "dev").exists():
        pytest.skip(".venv is missing: make test creates it")
    folder = Path(shutil.copytree(small, tmp_path / "ladder"))
    (folder / "input.txt").write_bytes((ROOT / "input.txt").read_bytes()[:100_000])
    commit_all(folder)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory, inductor_cache):
    """Return a function that runs a script in a separate process, offline and in an empty home folder.

    The returned CompletedProcess has three more attributes: `left_behind` (the names of the files left in the home
    folder), `steps` (the printed steps) and `losses`.
    """

    def run(script, *args, torchrun=None, restarts=0, folder=ROOT, **environment):
        home = tmp_path_factory.mktemp("home")
        program = script.split() if str(script).startswith("-m ") else [str(folder / script)]
        command = [sys.executable, *program]
        command += map(str, args)
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
            command[1:1] = [*launcher, f"--nproc_per_node={torchrun}", f"--max-restarts={restarts}"]
        # GPU runs need LD_LIBRARY_PATH and the variables of CUDA, NCCL and Triton.
        kept = r"PATH|OMP_NUM_THREADS|MALLOC_.*|LD_LIBRARY_PATH|(CUDA|NCCL|TRITON)_.*"
        env = {name: value for name, value in os.environ.items() if re.fullmatch(kept, name)}
        packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # keep the user's entries
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests" / "offline"), str(ROOT), *packages]))}
        env |= {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": inductor_cache} | environment
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True)
        done.left_behind = sorted(path.name for path in home.iterdir())
        done.steps = [match.groupdict() for match in STEP.finditer(done.stdout)]
        done.losses = [float(step["loss"]) for step in done.steps]
        return done

    return run
