"""Commands in READMEs, pages, docstrings and `make help` work as written.

A dozen are run: those of the README, and one or more per page. Long runs are interrupted at their second step. Of the
others, only the options are parsed.
"""

import argparse
import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import EAGER, ROOT, play, press_ctrl_c_at, run_guard

PROGRAMS = "make python uv torchrun".split()
TRAIN = "python pretrain/train.py --device cpu --data input.txt --steps 60 --warmup-steps 10 --eval-every 20 "
TRAIN += '--prompt "ROMEO:" --checkpoint-dir runs/first --log-file runs/first.jsonl'
LONG_RUN = "torchrun --standalone --nproc_per_node=2 pretrain/long_run.py --steps 5000 --checkpoint-dir checkpoints "
LONG_RUN += "--save-every 250 --resume --log-file log.jsonl"
BOOKS = "mkdir books; cp input.txt books"
RUN = {  # command -> the bash line that creates the files it needs; $TRAINED is the folder of the fixture `trained`
    "make run": "",
    ".venv/bin/python baseline.py": "",
    "make diff-06": "",
    'make counts ARGS="--model nano --seq-len 128"': "",
    'make quality ARGS="--seeds 3 --steps 50 --out runs/quality-50.json"': "",
    TRAIN: "",
    LONG_RUN: "",
    "python pretrain/fineweb.py --out shards/books books/*.txt": BOOKS,
    "python pretrain/export_hf.py runs/gpt2 my-gpt2": "mkdir runs; cp -r $TRAINED runs/gpt2",
    "make plot ARGS=log.jsonl": """echo '{"step": 0, "loss": 9.0}' > log.jsonl""",
    'make compare ARGS="results/cpu-amd-epyc-2026-11-22 results/cpu-amd-epyc-2026-11-23"': "",
}
LONG = {  # Ctrl-C stops a long command at the first line that matches a key; the output must then match the value
    r"^step +1 \| loss": r"median of steps ",  # the terminal prints ^C before it
    r"^counting speedup_01_weight_tying\.py, B \d+": "",
    r"^\d+ runs to go": "",
}


@pytest.fixture(scope="module")
def found():
    """Return {command: file} for the commands in the Markdown files, the programs' docstrings and `make help`."""
    found = {}

    def add(command, where):
        found.setdefault(" ".join(re.split(r"\s# ", command)[0].split()), where)

    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/pages/**/*.md")]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        text = re.sub(r"\[\[\[cog.*?\[\[\[end", "", text, flags=re.DOTALL)  # contains commands of older versions
        blocks = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
        for language, block in blocks.findall(text):
            for line in block.replace("\\\n", "").splitlines() if language in ("", "bash") else ():
                add(line, name)
        for span in re.findall(r"`([^`]+)`", blocks.sub("", text)):
            if span.split()[0] in PROGRAMS and " " in span:
                add(span, name)
    for path in [path for folder in (".", "*") for path in ROOT.glob(f"{folder}/*.py") if "tests" not in path.parts]:
        for line in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines():
            for part in re.split(r"  +", line):
                if re.match(rf"\(?({'|'.join(PROGRAMS)}) ", part) and part != line:
                    add(part.strip("()"), path.relative_to(ROOT).as_posix())
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for target, more in re.findall(r"^(make [\w-]+)(.*)", printed, re.MULTILINE):
        for end in ("", *re.findall(r' ARGS=(?:"[^"]*"|\S+)', more)):
            add(target + end, "make help")
    assert len(found) > 100  # a smaller number would mean that some files were not searched
    return found


def program_of(command):
    """Return (program, its arguments) of a documented command, or None if it runs none of the project's programs."""
    words = shlex.split(re.split(" [>|] ", command)[0])
    if words[0] == "make" and len(words) > 1:
        args = shlex.split(" ".join(word.removeprefix("ARGS=") for word in words[2:]))
        if words[1].startswith("diff-"):
            return "dev/diff.py", [words[1].removeprefix("diff-")]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        (recipe,) = re.findall(rf"^{words[1]}:.*((?:\n\t.*)*)", makefile, re.MULTILINE)
        program = re.search(r"\.venv/bin/python (?:(\S+\.py)|-m (\S+))", recipe)
        return (program[1] or f"{program[2].replace('.', '/')}.py", args) if program else None
    if words[1:3] == ["-m", "measure.kernels"]:  # which runs a script with the options
        return words[3], words[4:]
    if words[1:2] == ["-m"] and words[2].startswith(("dev.", "measure.")):
        return f"{words[2].replace('.', '/')}.py", words[3:]
    # If there are several, the first is a program such as kernels.py, which runs the next one with the options.
    place = max((place for place, word in enumerate(words) if word.endswith(".py")), default=None)
    if place and "-m" not in words and Path(words[0]).name in PROGRAMS:
        return words[place], words[place + 1 :]


class Parsed(BaseException):
    pass


def test_every_documented_option_exists(found, monkeypatch, capfd):
    wrong, parse_args = [], argparse.ArgumentParser.parse_args

    def parse_and_stop(*args):
        parse_args(*args)
        raise Parsed

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    parsed = 0
    for command, where in found.items():
        program, args = program_of(command) or ("", [])
        if args:
            monkeypatch.setattr("sys.argv", [program, *args])
            try:
                run_guard(program)
            except Parsed:
                parsed += 1
            except SystemExit as end:  # with status 0 after --help
                wrong += [(where, command, capfd.readouterr().err)] * bool(end.code)
    assert parsed > 90 and not [one for one in wrong if "argument --device: cuda" not in one[-1]], wrong


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run's output folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = "--steps", 1, "--batch-size", 1, "--seq-len", 16, "--total-batch-size", 16
    play("pretrain/long_run.py", *sizes, "--checkpoint-dir", folder)
    return folder


def bash(clone, *lines, **environment):
    """Run lines of bash in a clone as a reader does, but offline and without compilation, until Ctrl-C."""
    script = "\n".join(["set -e", "source .venv/bin/activate", *lines])
    home = {"HOME": str(clone.parent), "PYTHONPATH": str(ROOT / "tests" / "offline"), "CUDA_VISIBLE_DEVICES": ""}
    return press_ctrl_c_at("|".join(LONG), ["bash", "-c", script], clone, **home, **EAGER, **environment)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_works_as_written(command, found, clone, trained):
    assert command in found
    printed, status = bash(clone, RUN[command], command, TRAINED=str(trained))
    if status is None:
        start = next(start for start in LONG if re.search(start, printed, re.MULTILINE))
        assert re.search(LONG[start], printed, re.MULTILINE), printed
    else:
        assert status == 0, printed


@pytest.mark.slow
def test_three_commands_of_the_readme_lead_from_a_text_to_a_model_that_writes(clone):
    """The README's three commands, run in order with few steps and tokens, train on a text and write a sample."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```\n(.*?)```", readme, re.DOTALL) if "my.txt" in block]
    join, train, sample = block.splitlines()
    train += " --steps 1 --warmup-steps 1 --batch-size 1 --seq-len 16 --total-batch-size 16"
    printed, status = bash(clone, BOOKS, join, train, f"{sample} --tokens 5 --samples 1")
    assert status == 0, printed
    trained, _, written = printed.rpartition("Once upon a time")
    assert "step    0 | loss" in trained and len(written) > 1
