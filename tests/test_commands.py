"""Commands in READMEs, pages, docstrings and `make help` work as written.

Long training runs are interrupted at their second step. A command is not run if it needs a GPU, the Hugging Face hub or
several minutes, or if another test file runs it. This test file lists the skipped commands by reason.
"""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import EAGER, ROOT, SCRIPTS, play, press_ctrl_c_at

FOLDERS = "branches pretrain measure dev docs notebooks".split()
PROGRAMS = "make python uv pip torchrun git source tensorboard ghp-import apt nvidia-smi code cp printf".split()

# The commands that test_a_command_works_as_written does not run, by reason. The test also skips the commands in SAME.
NOT_RUN = {
    "it is part of a sentence, not a whole command": [
        "git grep",
        "git restore",
        "torchrun --standalone --nproc_per_node=8",
        "make figures ARGS=results/FOLDER",  # runs publish.py, which test_publish.py tests with folders
        'make compare ARGS="results/ONE results/OTHER"',
        "make compare",
        "make plot",
        "make propagate",
        "python measure/compare.py results/FOLDER results/FOLDER",
        "python pretrain/hellaswag.py gpt2 --data FILE",
    ],
    "it installs packages or asks for them": [
        "uv run speedup_03_bf16.py",  # test_scripts.py runs the script without uv
        "pip install -r requirements.txt",
        "pip install -r requirements-dev.txt",  # `make test` runs it
        "pip install -r pretrain/requirements.txt",
        "pip install ghp-import",
        "apt install git build-essential python3-dev python3-venv",
    ],
    "it opens an editor": [
        "code --diff speedup_05_compile.py speedup_06_flash_attn.py",
    ],
    "it runs the tests": [
        "make test",
        "make test-all",
        "make test ARGS=tests/test_ladder.py",
        "make test ARGS=tests/test_model.py",
        'make test ARGS="tests/test_mistakes.py -k WORD"',
        'make test ARGS="-n 0 -m gpu"',
        "python -m pytest tests/test_model.py -v",
        "python tests/kills.py 50",  # test_ranks.py runs it with 3 kills
    ],
    "it needs a repository elsewhere": [
        "git clone ADDRESS ladder",
        "cd ladder",
        "ghp-import --no-jekyll --push docs/site",
    ],
    "test_docs.py, test_measure.py, test_memory.py or test_ranks.py runs it, or the same with more options": [
        "make docs",
        "make ladder",
        "make ladder ARGS=--branches",
        "make ladder ARGS=--profile",
        'make ladder ARGS="--repeat 3"',
        'make ladder ARGS="--repeat 3 --peers --profile"',
        "python docs/build_site.py",
        "python measure/measure.py",
        "python measure/peak.py baseline.py --steps 2",
        "python measure/publish.py [FOLDER]",
        "torchrun --standalone --nproc_per_node=2 measure/allreduce.py --step-ms 2900",
        "torchrun --standalone --nproc_per_node=2 measure/allreduce.py --model gpt2 --step-ms 2900",
    ],
    "another command is the same with more options": [
        "torchrun --standalone --nproc_per_node=2 ddp_run.py",
    ],
    "it needs a GPU, or many minutes of a CPU": [
        "nvidia-smi topo -m",
        "python measure/machine.py --device cuda",
        "python measure/roof.py --model gpt2 --batch-size 4",
        "python measure/peers.py plain",  # trains GPT-2 124M at B 4 and T 1024
        "python measure/peers.py compiled",
        "python measure/peers.py trainer",
        "python measure/attention.py",  # test_branches.py runs it with short sequences
        "python measure/startup.py",  # test_startup.py runs it with two scripts that do not compile
        "python measure/startup.py --model nano --steps 30",
        "python measure/losses.py",  # test_memory.py runs it with few tokens
        "python measure/memory.py --model gpt2-xl --batch-size 8",  # test_memory.py predicts nano
        "python measure/memory.py --model gpt2-xl --batch-size 8 --ranks 4 --checkpointing --gib 80",
        "python measure/attention.py --batch-size 32 --heads 8 --seq-lens 2048 --dtype fp16",
        'make ladder ARGS="--batch-size 16 --peers --profile --batches --budget 30"',
        "make ladder ARGS=--batches",
        'make ladder ARGS="--batch-size 16 --profile --batches"',
    ],
    "it needs several GPUs": [
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST_MACHINE:29500 --rdzv-id=1 "
        "pretrain/long_run.py --checkpoint-dir checkpoints --resume",  # test_ranks.py starts torchrun twice on a CPU
        "torchrun --standalone --nproc_per_node=2 branches/fsdp_run.py --model gpt2-xl",
        "torchrun --standalone --nproc_per_node=8 pretrain/train.py --batch-size 64 "
        "--hellaswag Rowan/hellaswag --checkpoint-dir runs/gpt2 --resume --log-file runs/gpt2.jsonl "
        "--tensorboard runs/tb",
        "torchrun --standalone --nproc_per_node=8 pretrain/train.py --batch-size 64 --checkpoint-dir runs/gpt2 "
        "--resume",
    ],
    "it downloads weights or data from the Hugging Face hub": [
        "hf download kjj0/finewebedu10B-gpt2 --repo-type dataset --local-dir shards/finewebedu10B",
        "python pretrain/fineweb.py",
        "python pretrain/hellaswag.py gpt2",
        "python pretrain/hellaswag.py checkpoints",
        "python pretrain/train.py --init-from gpt2 --steps 1 --hellaswag Rowan/hellaswag",
    ],
}
REASONS = {command: reason for reason, commands in NOT_RUN.items() for command in commands}

# BEFORE maps a command pattern to the bash lines that create the files the command needs.
# $TRAINED is the folder that the fixture `trained` returns.
PARQUET = 'python -c \'import pandas; pandas.DataFrame({{"text": ["To be"] * 99}}).to_parquet("{}")\''
BEFORE = {
    r"--data my\.txt": "cp input.txt my.txt",
    r"sample\.py runs/mine": "mkdir runs; cp -r $TRAINED runs/mine",
    r"sample\.py runs/first|tensorboard --logdir runs/first": "mkdir runs; cp -r $TRAINED runs/first",
    r"(sample|export_hf)\.py runs/gpt2": "mkdir runs; cp -r $TRAINED runs/gpt2",
    r"(sample|export_hf)\.py checkpoints": "cp -r $TRAINED checkpoints",
    r"sample\.py weights\.pt": "cp $TRAINED/best.pt weights.pt",
    r"--init-from my-gpt2": "python pretrain/export_hf.py $TRAINED my-gpt2",
    r"corpus/\*\.jsonl": """mkdir corpus; for n in {1..99}; do echo '{"text": "Not to be"}'; done > corpus/a.jsonl""",
    r"books/\*\.txt": "mkdir books; cp input.txt books",
    r"--data shards/books": "python pretrain/fineweb.py --out shards/books input.txt",
    r"--data shards/finewebedu10B": "python pretrain/fineweb.py --out shards/finewebedu10B input.txt",
    r"shards \*\.parquet": PARQUET.format("a.parquet"),
    r"10BT/\*\.parquet": f"mkdir 10BT; {PARQUET.format('10BT/a.parquet')}",
    r"> runs/machine": "mkdir runs",
    r"plot\.py runs/nano": "mkdir runs; cp results/pretrain-nano-cpu-amd-epyc-2026-11-22/log.jsonl runs/nano.jsonl",
    r"--card roof\.json": """echo '{"ceilings_tflops": {"float32": 1}, "copy_gb_per_s": 1}' > roof.json""",
    r"plot ARGS=log": """echo '{"step": 0, "loss": 9.0}' > log.jsonl""",
    r"runs/a\.jsonl": """mkdir runs; for run in a b; do echo '{"step": 0, "loss": 9.0}' > runs/$run.jsonl; done""",
    r"reset --soft": "git -c user.name=Test -c user.email=test@localhost commit -q --allow-empty -m more",
    r"propagate\.py .*speedup_11_my_idea|make diff-11": "cp speedup_10_fused_adamw.py speedup_11_my_idea.py\n"
    "sed -i s/0.95/0.96/ speedup_11_my_idea.py\n"
    'sed -i \'s/^file = "ddp_run.py"/file = "speedup_11_my_idea.py"\\ntitle = ""\\nidea = ""\\n'
    'touches = ["main"]\\nlimit = 2\\n\\n[[rung]]\\n&/\' ladder.toml',
}

# Ctrl-C stops a long command at the first line that matches a key of LONG. The output must then match the key's value.
LONG = {
    r"^step +1 \|": r"^median of steps ",
    r"^pass 1/\d  baseline\.py: \S+ ms\b": r"^not finished: run the same command again$",
    r"^counting speedup_01_weight_tying\.py, B \d+$": "",
    r"^\d+ runs to go$": "",
    r"http://localhost:\d+": "",
}


def commands():
    """Return {command: file} for the commands in the Markdown files, the programs' docstrings and `make help`."""
    found = {}

    def add(command, where):
        found.setdefault(" ".join(re.split(r"\s# ", command)[0].split()), where)

    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/pages/**/*.md")]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        generated = r"<!-- (results|losses|quality|muon|startup), .*?<!-- end of"
        text = re.sub(generated, "", text, flags=re.DOTALL)
        blocks = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
        for language, block in blocks.findall(text):
            assert language in ("", "bash", "text", "python"), f"{name}: ```{language}"
            for line in block.replace("\\\n", "").splitlines():
                if language in ("", "bash"):
                    add(line, name)
        for span in re.findall(r"`([^`]+)`", blocks.sub("", text)):
            if span.split()[0] in PROGRAMS and " " in span:
                add(span, name)
    for path in [path for folder in (".", *FOLDERS) for path in ROOT.glob(f"{folder}/*.py")]:
        for line in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines():
            for part in re.split(r"  +", line):
                if re.match(rf"\(?({'|'.join(PROGRAMS)}) ", part) and part != line:
                    add(part.strip("()"), path.relative_to(ROOT).as_posix())
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for line in printed.splitlines():
        target, more = re.match(r"(make \S+)(.*)", line).groups()
        for end in ("", *re.findall(r' ARGS=(?:"[^"]*"|\S+)', more)):
            add(target + end, "make help")
        for target in re.findall(r"\bdiff-\w+", more):
            add(f"make {target}", "make help")
    return found


FOUND = commands()
SAME = {f"python {script}" for script in SCRIPTS[1:]}  # test_scripts.py runs each of them
RUN = [command for command in FOUND if command not in REASONS.keys() | SAME]


def test_a_command_that_is_not_run_is_still_there():
    assert REASONS.keys() - FOUND.keys() == set()
    assert [pattern for pattern in BEFORE if not any(re.search(pattern, command) for command in FOUND)] == []
    assert len(FOUND) > 100  # a smaller number would mean that some files were not searched
    assert {Path(where).parts[0] for where in FOUND.values()} >= {"README.md", "CONTRIBUTING.md", "docs", "make help"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a run's output folder with a checkpoint, best.pt and TensorBoard's folder."""
    folder = tmp_path_factory.mktemp("trained")
    sizes = "--steps", 1, "--batch-size", 1, "--seq-len", 16, "--total-batch-size", 16
    play("pretrain/long_run.py", *sizes, "--checkpoint-dir", folder)
    shutil.copy(folder / "step_00000001.pt", folder / "best.pt")
    (folder / "tb").mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_works_as_written(command, clone, trained):
    before = [text for pattern, text in BEFORE.items() if re.search(pattern, command)]
    script = "\n".join(["set -e", "source .venv/bin/activate", *before, command])
    env = {"HOME": str(clone.parent), "PYTHONPATH": str(ROOT / "tests" / "offline"), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"TRAINED": str(trained)} | EAGER  # not compiled; test_scripts.py runs compiled scripts
    printed, status = press_ctrl_c_at("|".join(LONG), ["bash", "-c", script], clone, **env)
    if status is None:
        start = next(start for start in LONG if re.search(start, printed, re.MULTILINE))
        assert re.search(LONG[start], printed, re.MULTILINE), printed
    elif command.startswith("git diff --no-index"):
        assert status == 1 and printed.startswith("diff --git "), printed
    else:
        assert status == 0 and not command.startswith("make ladder"), printed


def test_three_commands_of_the_readme_lead_from_a_text_to_a_model_that_writes(clone):
    """The README's three commands, run in order with few steps and tokens, train on a text and write a sample."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```\n(.*?)```", readme, re.DOTALL) if "my.txt" in block]
    join, train, sample = block.splitlines()
    train += " --steps 2 --warmup-steps 1 --batch-size 1 --seq-len 16 --total-batch-size 16"
    script = "\n".join(["set -e", BEFORE[r"books/\*\.txt"], join, train, f"{sample} --tokens 5 --samples 1"])
    home = {"HOME": str(clone.parent), "PYTHONPATH": str(ROOT / "tests" / "offline"), "CUDA_VISIBLE_DEVICES": ""}
    path = f"{clone}/.venv/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=clone,
        env=os.environ | home | EAGER | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    trained, _, written = done.stdout.rpartition("Once upon a time")
    assert "step    1 | loss" in trained and len(written) > 1


def test_the_page_lists_each_claim_and_its_file():
    page = (ROOT / "docs" / "pages" / "checked.md").read_text(encoding="utf-8")
    files = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("tests/test_*.py")}
    claims = {(" ".join(ast.get_docstring(tree).split()), f"`{name}`") for name, tree in files.items()}
    rows = re.findall(r"^\| (.+) \| (`test_\w+\.py`) \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(claims)
