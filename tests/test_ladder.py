"""Each script differs from the previous script by one idea only.

`ladder.toml` lists the definitions that may differ. All other lines are identical byte for byte, no diff exceeds its
line limit, and every script runs without the others. The tests also break each rule on purpose and check that the
violation is reported.
"""

import ast
import contextlib
import difflib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize

import pytest
import unidiff
from conftest import LONG, ROOT, RUNGS, SCRIPTS, TRAIN, copy_project
from ladder import changed_lines, split

TRAILING = r", (?=[)\]}])"  # the trailing comma that is added when a line is split
DIFFS = [script for script, rung in RUNGS.items() if rung.before]


def source(script):
    return (ROOT / script).read_bytes().decode("utf-8")  # without translating line endings


def parts(text):
    """Return {name: (syntax tree, text)} of a script's definitions, in order. Classes are split into head and methods.

    Each text begins where the previous text ends, so every byte after the docstring is in exactly one text.
    """
    body = ast.parse(text).body
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    lines, start, found = text.splitlines(keepends=True), body.pop(0).end_lineno, {}
    for node in body:
        methods = [child for child in getattr(node, "body", []) if isinstance(child, ast.FunctionDef)]
        if not isinstance(node, ast.ClassDef) or not methods:
            pieces = [(name_of(node), node, node.end_lineno)]
        else:
            node.body = [child for child in node.body if child not in methods]
            pieces = [(node.name, node, node.body[-1].end_lineno if node.body else node.lineno)]
            pieces += [(f"{node.name}.{method.name}", method, method.end_lineno) for method in methods]
        for name, piece, end in pieces:
            tree, before = found.get(name, ("", ""))
            found[name] = tree + ast.dump(piece), before + "".join(lines[start:end])
            start = end
    assert "".join(lines[start:]) == "", "the main guard is not the end"
    return found


def name_of(node):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "imports"
    return getattr(node, "name", None) or ast.unparse(node).splitlines()[0].split(" = ")[0]


def code(text):
    """Return the code of each line without comments or white space."""
    lines = [""] * len(text.splitlines())
    layout = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines[token.start[0] - 1] += token.string + " "
    return lines


def variables(text):
    """Return the names that a definition binds: its arguments, variables and attributes."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in stored}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def complaints(rung, before, after):
    """Yield each difference between the texts `before` and `after` that the rung's row does not allow."""
    old, new = parts(before), parts(after)
    changed = {name for name in old | new if old.get(name, " ")[0] != new.get(name, " ")[0]}
    yield from (f"{name} differs, and its row does not say so" for name in changed - set(rung.touches))
    yield from (f"{name} is the same, and its row says that it differs" for name in set(rung.touches) - changed)
    for name in (old.keys() & new.keys()) - changed:
        if old[name][1] != new[name][1]:
            yield f"{name}: only comments or layout differ"
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield "definitions were moved"

    before, after = split(before)[1], split(after)[1]
    lines, bare = (before.splitlines(), after.splitlines()), (code(before), code(after))
    removed, added = set(), set()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if tag != "equal":
            minus, plus = "".join(bare[0][i:j]), "".join(bare[1][k:m])
            if re.sub(TRAILING, "", minus) == re.sub(TRAILING, "", plus):
                yield f"only comments or layout differ at: {(lines[0][i:j] + lines[1][k:m])[0].strip()}"
            removed |= set(lines[0][i:j])
            added |= set(lines[1][k:m])
    yield from (f"moved: {line.strip()}" for line in removed & added if line.strip())
    for name in changed & old.keys() & new.keys():
        was, now = variables(old[name][1]), variables(new[name][1])
        for lost, gained in ((x, y) for x in was - now if x for y in now - was if y):
            if gained != "_" and {re.sub(rf"\b{lost}\b", gained, line) for line in removed} & added:
                yield f"{name}: {lost} was renamed {gained}"


@pytest.mark.parametrize("script", DIFFS)
def test_a_rung_differs_from_the_one_before_in_its_idea_alone(script):
    rung = RUNGS[script]
    found = list(complaints(rung, source(rung.before), source(script)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("script", DIFFS)
def test_its_diff_is_within_its_limit(script):
    assert 1 <= sum(changed_lines(RUNGS[script].before, script)) <= RUNGS[script].limit


@pytest.mark.parametrize("script", DIFFS)
def test_its_docstring_names_the_diff_and_how_to_start_it(script):
    docstring = ast.get_docstring(ast.parse(source(script))) + "\n"
    assert f"\n    make diff-{RUNGS[script].number}  " in docstring and RUNGS[script].run in docstring


@pytest.mark.parametrize("script", DIFFS)
def test_its_docstring_gives_its_kind_and_when_it_does_not_help(script):
    idea, *rest = ast.get_docstring(ast.parse(source(script))).splitlines()
    assert (f" ({RUNGS[script].kind}): " in idea) == bool(RUNGS[script].kind)
    assert any(line.startswith("When it does not help: ") for line in rest)


# The maximum number of lines in main(). In scripts that are not listed, it is 65.
MAIN = {"baseline.py": 45, "ddp_run.py": 90, LONG: 90, "branches/fsdp_run.py": 90, TRAIN: 110}


@pytest.mark.parametrize("script", RUNGS)
def test_main_tells_the_story_and_no_other_function_is_long(script):
    """Functions do not exceed their line limits. Except in train.py, main() checks only that the loss is finite."""
    tree = ast.parse(source(script))
    lines = {
        node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    assert lines.pop("main") <= MAIN.get(script, 65)
    assert max(lines.values()) <= 50
    (main,) = (node for node in tree.body if getattr(node, "name", "") == "main")
    kinds = [type(node) for node in ast.walk(main)]
    assert kinds.count(ast.Try) == 1 and ast.ExceptHandler not in kinds
    assert kinds.count(ast.Raise) == (2 if script == TRAIN else 1)  # train.py also checks the length of the prompt


FETCH = "            x, y = (t.to(device) for t in loader.next_batch())\n"
ZERO = "            optimizer.zero_grad()\n"
STEPS = '    parser.add_argument("--steps", type=int, default=50, help="default 50")\n'
SEED = '    torch.use_deterministic_algorithms(device.type == "cpu")'
REASON = "  # makes losses repeatable on a CPU; would be slow on a GPU\n"
LAYOUT = "only comments or layout differ"
BREACHES = {
    "an idea elsewhere": ("05_compile", re.escape("idx.size(1)"), "idx.shape[1]", "GPT.forward differs"),
    "a constant": ("02_tf32", "std=0.02", "std=0.2", "GPT._init_weights differs"),
    "a class attribute": ("03_bf16", "n_layer: int = 12", "n_layer: int = 24", "GPTConfig differs"),
    "a table": ("04_residual_init", "n_layer=36", "n_layer=35", "MODELS differs"),
    "an import": ("06_flash_attn", "import math\n", "import json\nimport math\n", "imports differs"),
    "a function renamed": ("09_cosine_lr", "print_header", "describe", "describe differs"),
    "a function added": ("04_residual_init", "def main", "def more():\n    pass\n\n\ndef main", "more differs"),
    "a variable renamed": ("06_flash_attn", r"\btext\b", "string", "DataLoaderLite.__init__ differs"),
    "a variable renamed beside the idea": ("08_adamw_clip", r"\bloader\b", "batches", "loader was renamed batches"),
    "a variable renamed and used once more": (
        "08_adamw_clip",
        r"(?s)\bloader\b( = .*?\n)(\n    model.to)",
        r"batches\1    assert batches\n\2",
        "loader was renamed batches",
    ),
    "an argument renamed beside the idea": ("06_flash_attn", r"\bx\b", "z", "x was renamed z"),
    "a function moved": ("07_vocab_pad", r"(?s)(class MLP.*?)(class Block.*?)(class GPT\()", r"\2\1\3", "were moved"),
    "a line moved beside the idea": ("08_adamw_clip", re.escape(FETCH + ZERO), ZERO + FETCH, "moved: "),
    "a line wrapped": ("01_weight_tying", r"(return self.c_proj\()(.*)\)\n", r"\1\n\2,)\n", LAYOUT),
    "a line wrapped beside the idea": ("02_tf32", re.escape(STEPS), STEPS.replace("(", "(\n"), LAYOUT),
    "a comment changed": ("10_fused_adamw", "# token embeddings", "# embeddings of tokens", LAYOUT),
    "a comment wrapped beside the idea": ("05_compile", re.escape(SEED + REASON), f"    {REASON[2:]}{SEED}\n", LAYOUT),
    "a space at a line's end": ("03_bf16", "class Block.*", r"\g<0> ", LAYOUT),
    "the idea lost": ("01_weight_tying", r" +self.transformer.wte.weight = .*\n", "", "is the same, and its row says"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_seen(breach):
    name, pattern, replacement, expected = BREACHES[breach]
    rung = RUNGS[f"speedup_{name}.py"]
    text = source(rung.file)
    broken = re.sub(pattern, replacement, text)
    assert broken != text
    found = list(complaints(rung, source(rung.before), broken))
    assert any(expected in complaint for complaint in found), found


def test_a_diff_over_its_limit_is_seen(tmp_path):
    rung = RUNGS["speedup_02_tf32.py"]
    shutil.copy(ROOT / rung.before, tmp_path)
    text = source(rung.file).replace("def main():\n", "def main():\n" + "    pass\n" * 3)
    (tmp_path / rung.file).write_text(text)
    assert sum(changed_lines(rung.before, rung.file, tmp_path)) == 7 > rung.limit
    assert changed_lines(rung.before, rung.before, tmp_path) == (0, 0)


TWELFTH = '''"""Rung 11, cooler start (speed): a trial.

When it does not help: never.

    make diff-11    shows what this file changes
"""
'''
ROW = """
[[rung]]
file = "speedup_11_trial.py"
title = "Trial"
before = "speedup_10_fused_adamw.py"
kind = "speed"
idea = "a trial"
touches = ["main"]
limit = 2
"""


def test_a_new_idea_takes_a_file_and_a_row(tmp_path, verdict):
    """Adding a file, a row and a page and running `make figures` is enough for the tests to check a new rung."""
    root = tmp_path / "ladder"
    copy_project(root)
    idea = split(source("speedup_10_fused_adamw.py"))[1].replace("optimizer.zero_grad()", "optimizer.zero_grad(True)")
    (root / "speedup_11_trial.py").write_text(TWELFTH + idea, encoding="utf-8")
    with (root / "ladder.toml").open("a", encoding="utf-8") as file:
        file.write(ROW)
    (root / "docs" / "pages" / "rungs" / "speedup_11_trial.md").write_text("# 11 trial\n", encoding="utf-8")
    subprocess.run([sys.executable, "measure/publish.py"], cwd=root, check=True, capture_output=True)
    readme = (root / "README.md").read_text(encoding="utf-8")
    idea = "[a trial](docs/pages/rungs/speedup_11_trial.md)"
    assert f"| [11](speedup_11_trial.py) | {idea} | speed |  |  | +1 −1 | 1 |" in readme

    def proofs(which):
        return verdict(root, root / "tests" / "test_ladder.py", root / "tests" / "test_training.py", "-k", which)

    status, seen = proofs("trial and not compile")
    assert status == 0, seen.failed
    for test in ("within_its_limit", "idea_alone", "counted_per_second"):
        assert any(name.endswith(f"{test}[speedup_11_trial.py]") for name in seen.passed), test
    (root / "ladder.toml").write_text(source("ladder.toml") + ROW.replace('["main"]', "[]"), encoding="utf-8")
    status, seen = proofs("alone and trial")
    assert status == 1 and "main differs, and its row does not say so" in str(seen.failed)


@pytest.mark.parametrize(
    "row, text",
    [
        ('file = "nowhere.py"\ntitle = "None"\nidea = "none"\ntouches = []\nlimit = 1', "nowhere.py"),
        ('file = "new.py"\ntitle = "None"\nidea = "none"\ntouches = []\nlimit = 1\nspeed = "twice"', "new.py: "),
        (
            'file = "new.py"\ntitle = "None"\nidea = "none"\nbefore = "above.py"',
            "new.py: its previous script, above.py, is not listed",
        ),
        ('file = "new.py"\nidea = "none"\ntouches = "main"\nlimit = 1', "touches must be a list"),
        ('file = "new.py"\nidea = "none"\ntouches = []', "new.py: 'limit'"),
        ('file = "new.py"\nidea = "none"\ntouches = []\nlimit = 1\nkind = "fun"', "kind must be one of speed, memory"),
        ('file = "ddp_run.py"\nidea = "none"', "listed twice"),
        ('file = "new.py"\nidea = "none"\ntouches = []\nlimit = 1\npart = "branch"', "multiple values"),
        (
            'file = "new.py"\nidea = "none"\ntouches = []\nlimit = 1\n[[rungs]]',
            "the table must be one of rung, pretrain",
        ),
        ("file = ", "Invalid value"),
    ],
)
def test_a_wrong_row_is_one_clear_error(row, text, tmp_path):
    copy_project(tmp_path, "dev")
    for folder in ("branches", "pretrain"):
        (tmp_path / folder).mkdir()
    for file in ("ladder.toml", *RUNGS):
        shutil.copy(ROOT / file, tmp_path / file)
    with (tmp_path / "ladder.toml").open("a", encoding="utf-8") as file:
        file.write(f"\n[[rung]]\n{row}\n")
    done = subprocess.run([sys.executable, "dev/diff.py", "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("diff.py: error: ") and text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_ladder_has_the_twelve_files_that_people_type():
    ideas = "weight_tying tf32 bf16 residual_init compile flash_attn vocab_pad adamw_clip cosine_lr fused_adamw".split()
    rungs = [f"speedup_{number:02d}_{idea}.py" for number, idea in enumerate(ideas, start=1)]
    ladder = ["baseline.py", *rungs, "ddp_run.py"]
    assert [script for script in SCRIPTS if script in ladder] == ladder  # other scripts may come between them
    files = [path.relative_to(ROOT).as_posix() for folder in (".", "branches") for path in ROOT.glob(f"{folder}/*.py")]
    assert set(files) == set(SCRIPTS) - {LONG}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_runs_alone(script):
    source = (ROOT / script).read_text(encoding="utf-8")
    most = 320 if script.startswith(("baseline", "speedup")) else 380 if script == "ddp_run.py" else 490
    assert len(source.splitlines()) <= most
    tree = ast.parse(source)
    used = {"torch", "tiktoken", "numpy"} | set(sys.stdlib_module_names)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name == "transformers":
                assert node not in tree.body  # not at the top level; GPT.from_pretrained imports it
            else:
                assert name.split(".")[0] in used, name


@pytest.mark.parametrize(
    "number, text",
    [
        ("03", "torch.autocast"),
        ("10", "fused=True"),
        ("ddp", "DistributedDataParallel"),
        ("fsdp", "fully_shard"),
        ("fp16", "GradScaler"),
        ("fp16-10", "GradScaler"),
        ("chunked", "loss_sum"),
        ("activation", "checkpoint(block"),
        ("long", "told_to_stop"),
        ("train", "validate"),
    ],
)
def test_make_diff_shows_a_rung_in_colour_on_a_terminal(number, text):
    terminal, inside = pty.openpty()
    os.set_blocking(terminal, False)
    with open(inside, "wb") as stdout:  # the loop below keeps emptying the terminal's 4 kB buffer
        child = subprocess.Popen(["make", "--no-print-directory", f"diff-{number}"], cwd=ROOT, stdout=stdout)
    printed = b""
    while True:
        ended = child.poll() is not None
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(terminal, 4096):
                printed += part
        if ended:
            break
    os.close(terminal)
    assert child.returncode == 0
    docstring, diff = printed.decode().replace("\r\n", "\n").split("\x1b", 1)
    assert docstring.startswith('"""') and "+++ b/" in diff
    assert re.search(rf"\x1b\[32m[^\x1b]*{re.escape(text)}", diff)  # printed in green
    by_words = "\x1b[31m-" not in diff
    assert by_words == (number in ("03", "10", "activation"))


@pytest.mark.parametrize("script", DIFFS)
def test_a_diff_in_a_file_has_no_colour_and_the_line_numbers_of_the_files(script):
    rung = RUNGS[script]
    done = subprocess.run([sys.executable, "dev/diff.py", rung.number], cwd=ROOT, capture_output=True, text=True)
    docstring = split(source(script))[0]
    assert done.returncode == 0 and done.stdout.startswith(docstring) and "\x1b" not in done.stdout
    (patch,) = unidiff.PatchSet(done.stdout[len(docstring) :])
    old, new = source(rung.before).splitlines(), source(script).splitlines()
    for line in (line for hunk in patch for line in hunk):
        assert line.source_line_no is None or old[line.source_line_no - 1] == line.value.rstrip("\n")
        assert line.target_line_no is None or new[line.target_line_no - 1] == line.value.rstrip("\n")
    assert (patch.added, patch.removed) == changed_lines(rung.before, script)


def test_diff_refuses_a_rung_that_is_not_there_and_ends_with_its_reader():
    done = subprocess.run(["make", "diff-99"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.startswith("diff.py: error: there is no rung 99: expected one of 01, 02, ")
    done = subprocess.run(["make", "diff-"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "'diff-'" in done.stderr and "diff-.o" not in done.stderr
    done = subprocess.run("python dev/diff.py train | head -1", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith('"""') and done.stderr == ""


def test_the_marks_of_a_conflict_are_not_counted_as_lines(tmp_path):
    root = copy_project(tmp_path / "ladder")
    path, readme = root / "speedup_02_tf32.py", (root / "README.md").read_bytes()
    path.write_text(path.read_text(encoding="utf-8").replace("def main():", "<<<<<<< ours\ndef main():"))
    for words in (["measure/publish.py"], ["dev/diff.py", "02"], ["dev/diff.py", "03"]):
        done = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True)
        assert done.returncode != 0 and len(done.stderr.splitlines()) == 1
        assert "error: speedup_02_tf32.py still has conflict markers" in done.stderr
    assert (root / "README.md").read_bytes() == readme
