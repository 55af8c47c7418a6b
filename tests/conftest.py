"""What the tests share: the list of scripts, a script as a module, watched from inside, or run as a user runs it."""

import contextlib
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # make test runs two tests at once: more threads wait for each other
import pytest
import torch
from ladder import PLAIN_GIT, ROOT, load, read_ladder
from torch import nn

RUNGS = {rung.file: rung for rung in read_ladder()}
# pretrain/train.py reads other data, and has tests of its own: test_pretrain.py
SCRIPTS = [rung.file for rung in RUNGS.values() if rung.part != "pretrain"]
BF16_CPU = torch.backends.cpu.get_cpu_capability() == "AVX512"  # elsewhere the scripts use float32
FP16 = "branches/fp16_grad_scaler.py"
STEP = re.compile(
    r"step (?P<step>[ \d]{4}) \| loss (?P<loss>\d+\.\d{6}) \| "
    r"(?:lr (?P<lr>\d\.\d{4}e-\d\d) \| )?(?:norm (?P<norm>\d+\.\d{4}|inf|nan) \| )?"
    r"dt (?P<ms>[ \d]{5}\.\d\d) ms \| (?P<rate>[ \d,]{10}) tok/s"
    r"(?: \| (?P<left>\d+\.\d) min left)?(?: \| scale (?P<scale>\d+))?(?P<skipped> \| skipped)?"
)
SUMMARY = re.compile(
    r"median of steps (?P<first>\d+)-(?P<last>\d+): (?P<ms>\d+\.\d\d) ms, (?P<rate>[\d,]+) tok/s, "
    r"peak memory (?P<memory>\d+\.\d\d) GiB"
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        if item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason='two tests at once on one GPU: make test ARGS="-n 0 -m gpu"'))


def since(rung, end=None, among=SCRIPTS):
    """The scripts that stand on a rung, given by its number or its file, and not on another one."""
    first, last = (SCRIPTS[which] if isinstance(which, int) else which for which in (rung, end))

    def stands_on(script, base):
        while script and script != base:
            script = RUNGS[script].before
        return script is not None

    return [script for script in among if stands_on(script, first) and not (last and stands_on(script, last))]


def clips():
    """The scripts that clip the gradient and print its norm."""
    return [*since(8), FP16]


def nano(script, seed=1337):
    """The nano model of a script, as the script itself would begin to train it."""
    module = load(script)
    torch.manual_seed(seed)
    return module.GPT(module.MODELS["nano"])


def save_gpt2(folder, change=None, **config):
    """A small random GPT-2 of transformers, saved to a folder: (the folder, the model)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
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

    events: list = field(default_factory=list)  # sync, clock, batch, zero_grad, forward, backward, step: as they came
    logits: list = field(default_factory=list)  # of each micro-step, where it is not compiled
    losses: list = field(default_factory=list)
    before: dict = field(default_factory=dict)  # name -> weight, as the optimizer found it
    grads: dict = field(default_factory=dict)  # name -> gradient, as the optimizer was given it
    after: dict = field(default_factory=dict)  # name -> weight, as the optimizer left it
    groups: list = field(default_factory=list)  # the settings of the optimizer's groups
    clock: list = field(default_factory=list)  # what it read, in seconds
    printed: dict = field(default_factory=dict)  # the fields of the printed line

    @property
    def norm(self):
        return torch.stack([grad.norm() for grad in self.grads.values()]).norm().item()


def watch(script, *args, device="cpu", compiled=False, autocast=True, **environment):
    """Run a script's main() in this process and return its steps; unless told, torch.compile is left out."""
    module, steps, models = load(script), [Step()], []

    def seen(event, function):
        def call(*args, **kwargs):
            steps[-1].events.append(event)
            return function(*args, **kwargs)

        return call

    def forward(model, *inputs):
        models[:] = [model]
        steps[-1].events.append("forward")
        if not compiled:  # a hook would be compiled, too, and change what the graph returns
            keep = steps[-1].logits
            hook = model.lm_head.register_forward_hook(lambda _, inputs, logits: keep.append(logits.detach().clone()))
        loss = nn.Module.__call__(model, *inputs)
        if not compiled:
            hook.remove()
        steps[-1].losses.append(loss.item())
        return loss

    def update(optimizer, *args, **kwargs):
        if not models:
            return original(optimizer, *args, **kwargs)  # set_state_dict makes the moments by a step of no length
        step, parameters = steps[-1], dict(models[0].named_parameters())
        step.events.append("step")
        step.groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        step.before = {name: p.detach().clone() for name, p in parameters.items()}
        step.grads = {name: p.grad.clone() for name, p in parameters.items()}
        original(optimizer, *args, **kwargs)
        step.after = {name: p.detach().clone() for name, p in parameters.items()}

    def clock():
        now, step = time.perf_counter(), steps[-1]
        step.events.append("clock")
        step.clock.append(now)
        if len(step.clock) == 2:
            steps.append(Step())
        return now

    original, output = torch.optim.AdamW.step, io.StringIO()
    torch.set_float32_matmul_precision("highest")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(module.GPT, "__call__", forward)
        patch.setattr(torch.optim.AdamW, "step", update)
        patch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
        for kind in (torch.cpu, torch.accelerator):
            patch.setattr(kind, "synchronize", seen("sync", kind.synchronize))
        patch.setattr(module.DataLoaderLite, "next_batch", seen("batch", module.DataLoaderLite.next_batch))
        patch.setattr(torch.optim.AdamW, "zero_grad", seen("zero_grad", torch.optim.AdamW.zero_grad))
        patch.setattr(torch.Tensor, "backward", seen("backward", torch.Tensor.backward))
        if not compiled:
            patch.setattr(nn.Module, "compile", lambda *args, **kwargs: None)
        if not autocast:
            patch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr("sys.argv", [script, "--device", device, *map(str, args)])
        try:
            module.main()
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # main() sets its own
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    steps.pop()  # what came after the last step's second clock
    steps = [step for step in steps if "forward" in step.events]  # pretrain/train.py times its evaluations, too
    for step, line in zip(steps, STEP.finditer(output.getvalue()), strict=True):
        assert step.after, "no step of AdamW was seen"
        step.printed = line.groupdict()
    return steps


@pytest.fixture(scope="session")
def inductor_cache(request, tmp_path_factory):
    """Where torch.compile keeps what it made. All runs share it, as they do on a user's machine."""
    folder = tmp_path_factory.getbasetemp()
    return str((folder.parent if hasattr(request.config, "workerinput") else folder) / "inductor")  # of both workers


def copy_project(folder):
    """Copy the project's files, but nothing that was built, cached or made by the README's commands."""
    made = ".*", "__pycache__", "site", "runs", "checkpoints", "shards", "fineweb10B", "my-gpt2"
    return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*made)))


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


@pytest.fixture
def clone(tmp_path):
    """The project in a repository of its own, with the packages that `make` has installed."""
    if not (ROOT / ".venv" / "dev").exists():
        pytest.skip("make test has not made .venv")
    folder = copy_project(tmp_path / "ladder")
    commit_all(folder)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory, inductor_cache):
    """Run a script (or a list of words) in a process of its own: no network, an empty home, another folder."""

    def run(script, *args, torchrun=None, restarts=0, folder=ROOT, timeout=600, **environment):
        home = tmp_path_factory.mktemp("home")
        command = [sys.executable, str(folder / script), *map(str, args)]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
            launcher += [f"--max-restarts={restarts}"]
            command[1:1] = launcher
        env = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS")}
        env |= {"HOME": str(home), "PYTHONPATH": str(ROOT / "tests" / "offline")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": inductor_cache} | environment
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=timeout)
        done.left_behind = sorted(path.name for path in home.iterdir())
        done.steps = [match.groupdict() for match in STEP.finditer(done.stdout)]
        done.losses = [float(step["loss"]) for step in done.steps]
        return done

    return run
