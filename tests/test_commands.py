"""Commands in READMEs, pages, docstrings and `make help` work as written, and defaults are what is said of them.

Some are run, and long runs are interrupted at their second step. Of the others, only the options are parsed.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EAGER, ROOT, RUNGS, TRAIN, load, made_up_gpu, press_ctrl_c_at, run_guard

from dev.puzzle import read_puzzles

RUN = {  # the beginning of a command -> the bash line that creates the files it needs
    "make run": "",
    'make quality ARGS="--seeds 3': "",
    "python pretrain/train.py --device cpu --data input.txt --steps 60": "",
    "python pretrain/fineweb.py --out shards/books": "mkdir books; cp input.txt books",
    "make plot ARGS=log.jsonl": """echo '{"step": 0, "loss": 9.0}' > log.jsonl""",
    'make compare ARGS="results/cpu-': "",
}


@pytest.fixture(scope="module")
def found():
    """Return {command: file} for the commands in the Markdown files, docstrings, puzzles and `make help`."""
    help = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {"make help": re.sub(r'^(make \S+)(.*?)( ARGS=(?:".*?"|\S+))', r"\1\n\1\3  ", help, flags=re.MULTILINE)}
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/pages/**/*.md")]:
        text = re.sub(r"\[\[\[cog.*?\[\[\[end", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        spans = re.findall(r"`([^`]+)`", re.sub("^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE))
        texts[path] = "\n".join([re.sub(r"\\\n *", "", text), *(" ".join(span.split()) for span in spans)])
    for path in [path for folder in (".", "*") for path in ROOT.glob(f"{folder}/*.py")]:
        texts[path] = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for number, mistake in read_puzzles().items():
        story = re.sub(r"\{script\}|\{folder\}/tiny.py", mistake["file"], mistake["puzzle"]["story"])
        texts[f"puzzle {number}"] = re.sub(r"\\\n *", "", story)
    found = {}
    for where, text in texts.items():
        for line in (line.strip() for line in re.split(r"\n|  +|\s# ", text)):
            if re.match(r"\(?(\w+=(\$\(.*\)|\S+) )*(make|(\.venv/bin/)?(python|torchrun)|uv) ", line):
                found.setdefault(line.strip("()"), where)
    return found


MAKE = dict(run="speedup_10_fused_adamw.py", ladder="measure.run", plot="measure.plots", compare="measure.tables")
MAKE |= {
    "timeline": "measure.timeline",
    "diff": "dev.diff",
    "puzzle": "dev.puzzle",
    "counts": "measure.counts",
    "quality": "measure.quality",
    "propagate": "dev.propagate",
}


def program_of(command):
    """Return (program, its arguments) of a documented command, or None if it runs none of the project's programs."""
    words = shlex.split(re.split(" [>|] ", command)[0])
    if words[0] == "make":
        shown = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
        options = shlex.split(" ".join(word.removeprefix("ARGS=") for word in words[2:]))
        (target, _, number), words = words[1].partition("-"), shlex.split(shown.stdout.splitlines()[-1])
        if target in MAKE:
            expected = [MAKE[target], *filter(None, [number]), *options]
            assert words[-len(expected) :] == expected
    if words[1:2] == ["-m"] and re.match(r"(dev|measure)\.(?!kernels$)", words[2]):
        return f"{words[2].replace('.', '/')}.py", words[3:]
    place = max((place for place, word in enumerate(words) if word.endswith(".py")), default=None)
    if place and "pytest" not in words:
        return words[place], words[place + 1 :]  # of two, such as kernels.py, the last one has the options


def test_every_documented_option_exists_and_help_tells_its_default(found, monkeypatch, capfd):
    wrong, parsed, parse_args = [], [], argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args):
        for action in parser._actions:
            said = re.search(r"default:? ([^\s,;]+)|\((\S+)\)$", (action.help or "").replace(" million", "000000"))
            value = action.default[0] if isinstance(action.default, list) and action.default else action.default
            value = f"{value:g}" if isinstance(value, float) else str(value)
            if said and action.default and not f"/{value}".endswith(f"/{said[said.lastindex]}"):
                wrong.append((program, action.option_strings, action.help, value))
        parse_args(parser, *args)
        raise SystemExit(parser)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for command, where in found.items():
        program, args = program_of(command) or ("", [])
        if args:
            monkeypatch.setattr("sys.argv", [program, *args])
            try:
                run_guard(program)
            except SystemExit as end:
                if isinstance(end.code, argparse.ArgumentParser):
                    parsed.append(program)
                elif end.code:  # after --help, it is 0
                    wrong.append((where, command, capfd.readouterr().err))
    assert len(parsed) > 90 and not [one for one in wrong if "argument --device: cuda" not in one[-1]], wrong


def test_the_tables_of_options_state_the_defaults_of_every_script(monkeypatch):
    def table(page):
        """Return {option: [its default on a GPU, its default on a CPU]}."""
        text, said = (ROOT / "docs" / "pages" / f"{page}.md").read_text(encoding="utf-8"), {}
        text = text.replace("the GPU that PyTorch finds, else", "`cuda`;").replace("19,073", "19073").replace("`", "")
        for names, cell in re.findall(r"^\| (--.*?) \| .* \| ?(.*?) ?\|$", text, re.MULTILINE):
            names = names.split(", ")
            for name, default in zip(names, cell.split(", ", len(names) - 1), strict=True):
                on_gpu, _, on_cpu = default.partition(":")[0].partition("; ")
                said[name] = [on_gpu or "none", on_cpu.partition(" ")[0] or on_gpu or "none"]
        return said

    for script in RUNGS:
        said = table("running") | (table("pretrain") if script == TRAIN else {})
        monkeypatch.setattr("sys.argv", [script])
        on_cpu = vars(load(script).parse_args())
        with made_up_gpu():
            on_gpu = vars(load(script).parse_args())
        for name in on_cpu.keys() - {"rank", "world_size"}:
            values = [options[name] or "none" for options in (on_gpu, on_cpu)]
            values = [str(one.relative_to(ROOT)) if isinstance(one, Path) else str(one) for one in values]
            assert said["--" + name.replace("_", "-")] == values, (script, name)


@pytest.mark.slow
@pytest.mark.parametrize("start", RUN)
def test_a_command_works_as_written(start, found, clone):
    """It is run as a reader runs it, but offline and without compilation, until Ctrl-C in a long run."""
    command = min((command for command in found if command.startswith(start)), key=len)
    script = "\n".join(["set -e", "source .venv/bin/activate", RUN[start], command])
    env = {"HOME": str(clone.parent), "PYTHONPATH": str(ROOT / "tests" / "offline"), "CUDA_VISIBLE_DEVICES": ""} | EAGER
    printed, status = press_ctrl_c_at(r"^step +1 \| loss|^\d+ runs to go", ["bash", "-c", script], clone, **env)
    assert status == 0 or (status is None and re.search("median of steps|runs to go", printed)), printed


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_prints_the_progress_of_large_downloads_and_if_it_fails_all_that_pip_prints(status, tmp_path):
    said = ["Collecting torch", "  Downloading torch-2.13.0-cp311.whl (526.6 MB)"]
    said += ["Progress 0 of 526574961", "Progress 526574961 of 526574961", "Downloading tiny-1.0.whl (9 kB)"]
    said += ["Progress 9000 of 9000", "Installing collected packages: tiny, torch", "ERROR: no space left"]
    made_up = f"import sys\nif '-r' in sys.argv:\n    print(*{said}, sep='\\n')\n    sys.exit({status})\n"
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(made_up)
    command, env = [sys.executable, "-m", "dev.install", "requirements.txt"], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    shown = "torch-2.13.0: 527 of 527 MB\npip has downloaded the packages and is installing them\n"
    everything = "".join(f"{line}\n" for line in said if not line.startswith("Progress"))
    assert (done.returncode, done.stdout.lstrip(), done.stderr) == (status, shown, everything * status)
