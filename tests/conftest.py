"""What the tests share: the list of scripts, a script as a module, and a script run as a user runs it."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from ladder import ROOT, read_ladder

RUNGS = {rung.file: rung for rung in read_ladder()}
SCRIPTS = list(RUNGS)
STEP = re.compile(
    r"step (?P<step>[ \d]{4}) \| loss (?P<loss>\d+\.\d{6}) \| "
    r"(?:lr (?P<lr>\d\.\d{4}e-\d\d) \| )?(?:norm (?P<norm>\d+\.\d{4}) \| )?"
    r"dt (?P<ms>[ \d]{5}\.\d\d) ms \| (?P<rate>[ \d,]{10}) tok/s"
)
SUMMARY = re.compile(
    r"median of steps (?P<first>\d+)-(?P<last>\d+): (?P<ms>\d+\.\d\d) ms, (?P<rate>[\d,]+) tok/s, "
    r"peak memory (?P<memory>\d+\.\d\d) GiB"
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


def since(number, end=None):
    """The scripts that stand on a rung of the ladder, and not on a later one: 0 is baseline.py, 11 is ddp_run.py."""

    def stands_on(script, rung):
        return script == SCRIPTS[rung] or (script is not None and stands_on(RUNGS[script].before, rung))

    return [script for script in SCRIPTS if stands_on(script, number) and not (end and stands_on(script, end))]


@cache
def load(script):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def nano(script, seed=1337):
    """The nano model of a script, as the script itself would begin to train it."""
    module = load(script)
    torch.manual_seed(seed)
    return module.GPT(module.MODELS["nano"])


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Run a script (or a list of words) in a process of its own: no network, an empty home, another folder."""
    compiled = tmp_path_factory.mktemp("inductor")  # what torch.compile made is shared, as on a user's machine

    def run(script, *args, torchrun=None, folder=ROOT, timeout=600, **environment):
        home = tmp_path_factory.mktemp("home")
        command = [sys.executable, str(folder / script), *map(str, args)]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
            command[1:1] = launcher
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT / "tests" / "offline")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "OMP_NUM_THREADS": "2"} | environment
        done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=timeout)
        done.left_behind = sorted(path.name for path in home.iterdir())
        done.steps = [match.groupdict() for match in STEP.finditer(done.stdout)]
        done.losses = [float(step["loss"]) for step in done.steps]
        return done

    return run
