"""What the tests share: the list of scripts, a script as a module, watched from inside, or run as a user runs it."""

import ast
import contextlib
import functools
import importlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # as the scripts set them
os.environ |= {"MAKEFLAGS": "", "ARGS": ""}  # or a make that a test runs takes the ARGS of `make test`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # make test runs several tests at once: more threads wait for each other
# Without these glibc gives freed blocks back to the system, and fetching them again takes a third of a step of nano
os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**27), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
import pytest
import torch
from ladder import PLAIN_GIT, ROOT, read_ladder
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

RUNGS = {rung.file: rung for rung in read_ladder()}
LONG, TRAIN = "pretrain/long_run.py", "pretrain/train.py"
SCRIPTS = [script for script in RUNGS if script != TRAIN]  # which evaluates: most of its tests are in test_pretrain.py
BF16_CPU = torch.backends.cpu.get_cpu_capability() == "AVX512"  # elsewhere the scripts use float32
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
NO_SCORES = {"val_loss": float("inf"), "hellaswag": None, "samples": [], "eval_sec": 0.0}
FP16 = "branches/fp16_grad_scaler.py"
NANO = '"nano": GPTConfig(n_layer=4, n_head=4, n_embd=128)'
SMALL = '"nano": GPTConfig(n_layer=2, n_head=2, n_embd=32)'  # for what does not depend on the size
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


def claim(file):
    """What a test file shows: the first line of its docstring."""
    return ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))).splitlines()[0]


class Progress:
    """In place of dots: which claim is being tested and how much is left, every 20 seconds at least."""

    def __init__(self, terminal):
        self.terminal, self.seen, self.finished, self.start, self.last = terminal, set(), 0, time.monotonic(), 0.0

    def pytest_sessionstart(self, session):
        self.session = session
        self.terminal.write_line("collecting the tests of all claims")

    def pytest_runtest_logstart(self, nodeid):
        file, seconds = nodeid.split("::")[0], time.monotonic() - self.start
        if file not in self.seen or seconds > self.last + 20:
            self.seen.add(file)
            self.last, left = seconds, f"{self.session.testscollected - self.finished:,} tests left"
            minutes, seconds = divmod(int(seconds), 60)
            self.terminal.write_line(f"{minutes:3}:{seconds:02}  {left:>16}  {Path(file).name}: {claim(file)}")

    def pytest_runtest_logreport(self, report):
        self.finished += report.when == "teardown"
        if report.failed:
            self.terminal.write_line(f"FAILED  {report.nodeid}")

    def pytest_report_teststatus(self, report):
        if report.when == "call" or not report.passed:
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            return outcome, "", outcome.upper()


@pytest.hookimpl(trylast=True)  # pytest makes its reporter first
def pytest_configure(config):
    if not hasattr(config, "workerinput") and config.get_verbosity() == 0:
        config.pluginmanager.register(Progress(config.pluginmanager.get_plugin("terminalreporter")))


# The files that take longest. They begin first, so that all workers end together.
LONGEST = [f"test_{name}.py" for name in "commands mistakes scripts measure docs ranks pretrain numerics model".split()]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (LONGEST + [item.path.name]).index(item.path.name))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        if item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason='several tests at once on one GPU: make test ARGS="-n 0 -m gpu"'))


def since(rung, end=None, among=SCRIPTS):
    """The scripts that stand on a rung, given by its number or its file, and not on another one."""
    first, last = (SCRIPTS[which] if isinstance(which, int) else which for which in (rung, end))

    def stands_on(script, base):
        while script and script != base:
            script = RUNGS[script].before
        return script is not None

    return [script for script in among if stands_on(script, first) and not (last and stands_on(script, last))]


def versions(*definitions, among=SCRIPTS):
    """Of some scripts, those in which one of these definitions, or a method of one, is not that of the file before.

    What is true of them is true of all: test_ladder.py checks that the others have the same text, byte for byte.
    """

    def differs(rung):
        return not rung.before or any(f"{name}.".startswith(f"{one}.") for name in rung.touches for one in definitions)

    return [script for script in among if differs(RUNGS[script])]


# All that a forward pass is made of.
MODEL = versions("GPTConfig", "MODELS", "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward")


def clips():
    """The scripts that clip the gradient and print its norm."""
    return [*since(8), FP16]


def load(script):
    """A script as a module. Its nano is that of SMALL; a tool that imported MODELS from it keeps the real one."""
    module = importlib.import_module(Path(script).stem)
    if hasattr(module, "MODELS"):
        small = module.GPTConfig(n_layer=2, n_head=2, n_embd=32)
        if module.MODELS["nano"] != small:
            module.MODELS = module.MODELS | {"nano": small}
    return module


def nano(script, seed=1337):
    """The nano model of a script, as the script itself would begin to train it."""
    module = load(script)
    torch.manual_seed(seed)
    return module.GPT(module.MODELS["nano"])


def save_gpt2(folder, change=None, **config):
    """A small random GPT-2 of transformers, saved to a folder: (the folder, the model)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT2LMHeadModel(GPT2Config(**shape | config)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # biases too: zeros would hide one that is lost
            p.normal_(mean=float("ln_" in name and name.endswith("weight")), std=0.2)
        if change:
            change(model)
    model.save_pretrained(folder)
    return folder, model


@dataclass
class Step:
    """A step of main(), seen from inside."""

    logits: list = field(default_factory=list)  # of each micro-step, where it is not compiled
    losses: list = field(default_factory=list)
    before: dict = field(default_factory=dict)  # name -> weight, as the optimizer found it
    grads: dict = field(default_factory=dict)  # name -> gradient, as the optimizer was given it
    after: dict = field(default_factory=dict)  # name -> weight, as the optimizer left it
    groups: list = field(default_factory=list)  # the settings of the optimizer's groups
    printed: dict = field(default_factory=dict)  # the fields of the printed line

    @property
    def norm(self):
        return torch.stack([grad.norm() for grad in self.grads.values()]).norm().item()


def play(script, *args, device="cpu", compiled=False, autocast=True, full=False, **environment):
    """Run a script's main() in this process and return what it printed.

    Unless told, torch.compile is left out. With `full`, nano is as large as in a process of its own.
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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # main() may set its own
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return output.getvalue()


def watch(script, *args, compiled=False, **options):
    """Run a script's main() in this process, as `play` does, and return its steps."""
    steps, model = [Step()], None

    def forward(called, *inputs):
        nonlocal model
        if not torch.is_grad_enabled():
            return nn.Module.__call__(called, *inputs)  # pretrain/train.py evaluates
        model, logits = called, steps[-1].logits
        if not compiled:  # a hook would be compiled, too, and change what the graph returns
            hook = model.lm_head.register_forward_hook(lambda *seen: logits.append(seen[-1].detach().clone()))
        loss = nn.Module.__call__(model, *inputs)
        if not compiled:
            hook.remove()
        steps[-1].losses.append(loss.detach().clone())
        return loss

    def before(optimizer, *_):
        if model:  # else set_state_dict makes the moments by a step of no length
            steps[-1].groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            steps[-1].before = {name: p.detach().clone() for name, p in model.named_parameters()}
            steps[-1].grads = {name: p.grad.clone() for name, p in model.named_parameters()}

    def after(*_):
        if model:
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
    steps.pop()  # the one that did not come
    for step, line in zip(steps, STEP.finditer(printed), strict=True):
        step.losses, step.printed = [loss.item() for loss in step.losses], line.groupdict()
    return steps


class OnTheCpu(TorchFunctionMode):
    """What is sent to a GPU stays on the CPU. `events` gets what Python would have to wait for."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_function__(self, call, types, args=(), kwargs=None):
        def here(value):
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        name, gpu = getattr(call, "__name__", ""), any(here(value) is not value for value in args)
        if name == "to" and gpu:
            self.events.append("copy")
        if name in ("item", "tolist", "cpu", "numpy"):
            self.events.append("wait")
        return call(*map(here, args), **{key: here(value) for key, value in (kwargs or {}).items()})


@contextlib.contextmanager
def made_up_gpu(events=None, capability=(9, 0), *others):
    """In this context torch finds a GPU for each of these compute capabilities; they compute on the CPU.

    `events` gets their synchronisations, and the copies and reads of an OnTheCpu.
    """
    capabilities = [capability, *others]

    def capability_of(device=0):  # the first GPU is the current one
        return capabilities[getattr(device, "index", device) or 0]

    events, autocast = [] if events is None else events, torch.autocast
    with pytest.MonkeyPatch.context() as patch, OnTheCpu(events):
        for owner, name, value in (
            (torch.accelerator, "is_available", True),
            (torch.accelerator, "current_accelerator", torch.device("cuda")),
            (torch.accelerator, "device_count", len(capabilities)),
            (torch.accelerator, "current_stream", SimpleNamespace(is_capturing=lambda: False)),
            (torch.cuda, "get_device_name", "Made Up GPU"),
            (torch.cuda, "get_device_properties", SimpleNamespace(uuid="1234-5678")),
            (torch.cuda, "max_memory_allocated", 3 * 2**30),
            (torch.cuda, "mem_get_info", (20 * 2**30, 80 * 2**30)),  # free, and in all
        ):
            patch.setattr(owner, name, lambda *args, value=value, **options: value)
        patch.setattr(torch.cuda, "get_device_capability", capability_of)
        patch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True: including_emulation or capability_of() >= (8, 0),
        )
        patch.setattr(torch.cuda, "set_device", lambda device: events.append(f"set_device {device}"))
        patch.setattr(torch.accelerator, "synchronize", lambda *device: events.append("synchronize"))
        patch.setattr(torch, "autocast", lambda device, **options: autocast("cpu", **options))
        patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, enabled=False))
        yield events


@pytest.fixture
def no_evaluation(monkeypatch):
    """pretrain/train.py evaluates nothing."""
    monkeypatch.setattr(load(TRAIN), "evaluate", lambda *args: NO_SCORES)


@pytest.fixture
def refused(monkeypatch, capfd):
    """Run a script in this process, which must end with one line on stderr that says why: what it printed."""

    def refused(script, *args, says="", lines=1):
        module = load(script)
        guard = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body[-1]
        assert ast.unparse(guard.test) == "__name__ == '__main__'"
        monkeypatch.setattr("sys.argv", [script, *map(str, args)])
        monkeypatch.setattr(nn.Module, "compile", lambda *args, **kwargs: None)
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            exec(compile(ast.Module(guard.body, []), module.__file__, "exec"), vars(module))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # main() may set its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code, (printed, written) = exit.value.code, capfd.readouterr()
        if isinstance(code, str):  # Python prints it, and the status is 1
            code, written = 1, f"{written}{code}\n"
        assert code in (1, 2) and len(written.splitlines()) == lines, written
        assert re.match(rf"{Path(script).name}: error: .*{says}", written.splitlines()[-1], re.IGNORECASE), written
        return printed

    return refused


@pytest.fixture
def measured(request):
    """Write a line to the terminal on what a test has measured, whatever else pytest shows."""
    reporter, capture = map(request.config.pluginmanager.get_plugin, ("terminalreporter", "capturemanager"))

    def measured(text):
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"{request.node.name}: {text}")

    return measured


def trouble(errors):
    """Of what a process wrote to stderr the lines that matter: an error, or a warning about a line of this project."""
    ours = rf"{re.escape(str(ROOT))}/(?!\S*(?:site|dist)-packages/)"
    return [
        line for line in errors.splitlines() if re.search(rf"\b\w*(Error|Exception)\b|: error: |Traceback|{ours}", line)
    ]


@pytest.fixture(scope="session")
def inductor_cache(request, tmp_path_factory):
    """Where torch.compile keeps what it made, from one `make test` to the next if pytest has a cache."""
    cache = getattr(request.config, "cache", None)
    return str(cache.mkdir("inductor") if cache else tmp_path_factory.mktemp("inductor"))


def copy_project(folder, part=""):
    """Copy the project, or one folder of it, but nothing that was built, cached or made by the README's commands.

    The folder that pytest renames to .pytest_cache comes and goes while the tests of another process begin.
    """
    made = ".*", "__pycache__", "pytest-cache-files-*", "site", "runs", "checkpoints", "shards", "fineweb10B", "my-gpt2"
    return Path(shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns(*made)))


class Seen:
    """What came of tests: the names of those that passed, and of each failure (setup or call, the exception)."""

    def __init__(self):
        self.passed, self.failed = [], []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is None:
            self.passed += [item.nodeid] * (call.when == "call")
        else:
            self.failed.append((call.when, call.excinfo.value))


@pytest.fixture
def verdict(monkeypatch, tmp_path):
    """Run tests of a copy of the project, in this process, and return (pytest's status, what was Seen).

    The copy's modules are imported anew; torch and all that is installed are not.
    """

    def modules_of(root):
        files = {name: Path(getattr(module, "__file__", None) or "/") for name, module in sys.modules.items()}
        inside = [name for name, file in files.items() if file.is_relative_to(root) and ".venv" not in file.parts]
        return {name: sys.modules[name] for name in inside}

    def verdict(root, *words):
        seen, ours, path = Seen(), modules_of(ROOT), list(sys.path)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        deterministic = torch.are_deterministic_algorithms_enabled()
        for name in ours:
            del sys.modules[name]
        # To rewrite asserts takes longer than most tests do, and so does the garbage that the others wait for
        plugins = "unraisableexception", "threadexception", "faulthandler", "cacheprovider", "xdist"
        words = *words, "-qx", "--assert=plain", f"--basetemp={tmp_path / 'tmp'}", "-c", root / "pyproject.toml"
        words += tuple(f"-pno:{name}" for name in plugins)
        with monkeypatch.context() as patch:
            patch.chdir(root)
            patch.setattr(sys, "path", [entry for entry in path if ".venv" in entry or not entry.startswith(str(ROOT))])
            patch.setattr(sys, "dont_write_bytecode", True)
            signal.signal(signal.SIGALRM, signal.default_int_handler)  # Ctrl-C, if a mistake makes it run on and on
            signal.alarm(300)
            status = pytest.main([str(word) for word in words], plugins=[seen])
            signal.alarm(0)
        for name in modules_of(root):
            del sys.modules[name]
        sys.modules.update(ours)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return status, seen

    return verdict


def commit_all(folder):
    """Make a folder a git repository with all its files in the first commit."""
    for words in ("init -q", "add .", "-c user.name=Test -c user.email=test@localhost commit -qm all"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True, capture_output=True, env=PLAIN_GIT)


def press_ctrl_c_at(pattern, command, folder, **environment):
    """Run a command, as a terminal does, and press Ctrl-C at the first line that matches, if there is one.

    Returns (what it printed to stdout and stderr, its status, or None if Ctrl-C was pressed).
    """
    child = subprocess.Popen(
        command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip

    def kill_in(seconds):
        timer = threading.Timer(seconds, lambda: os.killpg(child.pid, signal.SIGKILL))
        timer.start()
        return timer

    limit = kill_in(900)
    printed, pressed = "", False
    try:
        for line in child.stdout:
            printed += line
            if not pressed and re.search(pattern, line):
                pressed = True
                os.killpg(child.pid, signal.SIGINT)
                limit.cancel()
                limit = kill_in(120)  # TensorBoard ends at once, or in rare cases not at all
        status = child.wait()
    finally:
        limit.cancel()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    return printed, None if pressed else status


def give_packages(folder):
    """Give a copy of the project the packages that `make` has installed, so that `make` finds them there."""
    if not (ROOT / ".venv" / "dev").exists():
        pytest.skip("make test has not made .venv")
    (folder / ".venv").symlink_to(ROOT / ".venv")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A copy of the project whose nano is that of SMALL."""
    folder = copy_project(tmp_path_factory.mktemp("small") / "ladder")
    for script in RUNGS:
        text = (folder / script).read_text(encoding="utf-8")
        assert text.count(NANO) == 1
        (folder / script).write_text(text.replace(NANO, SMALL), encoding="utf-8")
    return folder


@pytest.fixture
def clone(small, tmp_path):
    """The small project, a tenth of its text, in a repository of its own, with the packages that `make` installed."""
    folder = Path(shutil.copytree(small, tmp_path / "ladder"))
    (folder / "input.txt").write_bytes((ROOT / "input.txt").read_bytes()[:100_000])
    commit_all(folder)
    give_packages(folder)
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory, inductor_cache):
    """Run a script (or a list of words) in a process of its own: no network, an empty home, another folder."""

    def run(script, *args, torchrun=None, restarts=0, folder=ROOT, timeout=600, **environment):
        home = tmp_path_factory.mktemp("home")
        command = [sys.executable, str(folder / script), *map(str, args)]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
            command[1:1] = [*launcher, f"--nproc_per_node={torchrun}", f"--max-restarts={restarts}"]
        kept = r"PATH|OMP_NUM_THREADS|MALLOC_.*|LD_LIBRARY_PATH|(CUDA|NCCL|TRITON)_.*"  # from LD_ on for a GPU
        env = {name: value for name, value in os.environ.items() if re.fullmatch(kept, name)}
        packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the user's own
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tests" / "offline"), *packages]))}
        env |= {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": inductor_cache} | environment
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=timeout)
        done.left_behind = sorted(path.name for path in home.iterdir())
        done.steps = [match.groupdict() for match in STEP.finditer(done.stdout)]
        done.losses = [float(step["loss"]) for step in done.steps]
        return done

    return run
