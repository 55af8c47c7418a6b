"""Each script differs from the previous script by one idea only.

`ladder.toml` lists the definitions that may differ. All other lines are identical byte for byte, no diff exceeds its
line limit, and every script runs without the others. The tests also break each rule on purpose and check that the
violation is reported.
"""

import ast
import difflib
import io
import re
import shutil
import sys
import textwrap
import tokenize

import pytest
import unidiff
from conftest import FP16_10, LONG, ROOT, RUNGS, SCRIPTS, TRAIN

from dev import diff
from dev.ladder import changed_lines, parts, split

TRAILING = r", (?=[)\]}])"  # the trailing comma that is added when a line is split
DIFFS = [script for script, rung in RUNGS.items() if rung.before]


def source(script):
    return (ROOT / script).read_bytes().decode("utf-8")  # without translating line endings


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


# The maximum number of lines in main(). In scripts that are not listed, it is 50.
MAIN = {"baseline.py": 40, "ddp_run.py": 75, LONG: 90, "branches/fsdp_run.py": 93, FP16_10: 55, TRAIN: 108}


@pytest.mark.parametrize("script", RUNGS)
def test_main_tells_the_story_and_no_other_function_is_long(script):
    """Functions do not exceed their line limits. Except in train.py, main() checks only that the loss is finite."""
    tree = ast.parse(source(script))
    lines = {
        node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    assert lines.pop("main") <= MAIN.get(script, 50)
    assert max(lines.values()) <= 52
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


def test_the_ladder_has_the_twelve_files_that_people_type():
    ideas = "weight_tying tf32 bf16 residual_init compile flash_attn vocab_pad adamw_clip cosine_lr fused_adamw".split()
    rungs = [f"speedup_{number:02d}_{idea}.py" for number, idea in enumerate(ideas, start=1)]
    ladder = ["baseline.py", *rungs, "ddp_run.py"]
    assert [script for script in SCRIPTS if script in ladder] == ladder  # other scripts may come between them
    files = [path.relative_to(ROOT).as_posix() for folder in (".", "branches") for path in ROOT.glob(f"{folder}/*.py")]
    files.remove("branches/unattended.py")  # a link to the file in pretrain/
    assert set(files) == set(SCRIPTS) - {LONG}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_runs_alone(script):
    source = (ROOT / script).read_text(encoding="utf-8")
    most = {"baseline.py": 250, "ddp_run.py": 335}.get(script, 285 if "/" not in script else 460)
    assert len(source.splitlines()) <= most
    tree = ast.parse(source)
    used = (
        {"torch", "tiktoken", "numpy"} | ({"unattended"} if "_run" in script else set()) | set(sys.stdlib_module_names)
    )
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name == "transformers":
                assert node not in tree.body  # not at the top level; GPT.from_pretrained imports it
            else:
                assert name.split(".")[0] in used, name


@pytest.mark.parametrize("script", DIFFS)
def test_make_diff_shows_the_docstring_and_gits_diff_with_the_line_numbers_of_the_files(script):
    rung = RUNGS[script]
    shown, docstring = diff.show(rung), split(source(script))[0]
    assert shown.startswith(docstring)
    (patch,) = unidiff.PatchSet(shown[len(docstring) :])
    old, new = source(rung.before).splitlines(), source(script).splitlines()
    for line in (line for hunk in patch for line in hunk):
        assert line.source_line_no is None or old[line.source_line_no - 1] == line.value.rstrip("\n")
        assert line.target_line_no is None or new[line.target_line_no - 1] == line.value.rstrip("\n")
    assert (patch.added, patch.removed) == changed_lines(rung.before, script)
