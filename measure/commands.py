"""Define the rows of the `make ladder` table, build their commands, and run the commands.

The commands run without the environment variables in OVERRIDES.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import record
from record import ROOT

sys.path.append(str(ROOT / "dev"))
from ladder import read_ladder

# Scripts run without these environment variables, which some containers and job schedulers set. The variables can
# change a script's precision, disable the compiler, store compiled kernels in a folder that measure.py does not manage,
# or make ddp_run.py wait for other ranks.
OVERRIDES = """NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE
    TRITON_CACHE_DIR RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT""".split()
TEN = "speedup_10_fused_adamw.py"


@dataclass(frozen=True)
class Row:
    """A row of the table. `words` are the arguments for Python, before the options that command() adds.

    The table shows the row's speed-up over the row named `before`.
    """

    name: str
    words: tuple
    precision: str
    before: str | None
    kind: str  # rung, branch or peer
    accumulates: bool = False  # whether the script accepts --total-batch-size


PEERS = [
    Row("transformers, plain loop", ("measure/peers.py", "plain"), "float32", TEN, "peer"),
    Row("transformers, bf16, compiled", ("measure/peers.py", "compiled"), "bf16", TEN, "peer"),
    Row("transformers.Trainer", ("measure/peers.py", "trainer"), "bf16", TEN, "peer"),
]


def rows(peers=False, branches=False, only=()):
    """Return the rungs of ladder.toml in order, then the branches and the peers if requested.

    Peers are training loops that the table compares with the rungs.

    `only` contains short names (01 ... 10, ddp, fsdp, fp16). If it is not empty, these scripts and the scripts that
    they are compared with replace the full list of rungs. Raises ValueError for an unknown name.
    """
    ladder = [rung for rung in read_ladder() if rung.part in ("rung", "branch")]
    found = [
        Row(rung.file, (rung.file,), rung.precision, rung.before, rung.part, rung.kind == "scale") for rung in ladder
    ] + PEERS
    short = {rung.number: rung.file for rung in ladder}
    if unknown := set(only) - set(short):
        raise ValueError(f"--only {min(unknown)}: expected one of {', '.join(short)}")
    all_of = {"rung": not only, "branch": branches, "peer": peers}
    wanted = {row.name for row in found if all_of[row.kind]} | {short[name] for name in only}
    before = {row.before for row in found if row.name in wanted}
    return [row for row in found if row.name in wanted | before]


def command(row, settings, **changed):
    """Return a row's command as a list of arguments for Python. `changed` contains options to replace or add."""
    flags = {name: settings[name] for name in ("model", "batch_size", "seq_len", "steps", "device")} | changed
    if row.accumulates:  # one micro-batch per optimizer step, as in the other scripts
        flags["total_batch_size"] = flags["batch_size"] * flags["seq_len"]
    return [*row.words, *(str(w) for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v))]


def execute(words, cache, on_step=lambda: None):
    """Run Python with these arguments, call on_step() after each step, and return (stdout, stderr, exit status).

    `cache` is the folder in which torch.compile caches its kernels.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OVERRIDES}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    out = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            for line in child.stdout:
                out.append(line)
                if line.startswith("step "):
                    on_step()
            status = child.wait()
        finally:  # after Ctrl-C, the end of the budget or an error, the child must not keep training in the background
            if child.poll() is None:
                child.terminate()
                child.wait()
        errors.seek(0)
        return "".join(out), errors.read(), status


def ask(program, *words):
    """Run a program in measure/ and return the JSON that it prints.

    Raises ValueError if the program rejects its options, and RuntimeError if it fails for another reason.
    """
    with tempfile.TemporaryDirectory() as cache:
        text, errors, status = execute([f"measure/{program}", *words], cache)
    if status:
        why = record.parse(text, errors, status)["error"].rpartition(": error: ")[2]
        raise ValueError(why) if status == 2 else RuntimeError(why)
    return json.loads(text)
