"""Each script differs from the previous script by one idea only.

`ladder.toml` lists the definitions that may differ. All other lines are identical byte for byte, no diff exceeds its
line limit, and no script imports another. The numbers in the docstrings are right.
"""

import ast
import difflib
import json
import re
import sys
from math import log, log2, sqrt

import numpy as np
import pytest
import torch
import unidiff
from conftest import ROOT, RUNGS, SCRIPTS, SIDE, load

from dev import diff
from dev.ladder import changed_lines, parts, read_toml, split
from measure import counts, records, tables
from measure.records import TEN

DIFFS = [script for script, rung in RUNGS.items() if rung.before]


def source(script):
    return (ROOT / script).read_bytes().decode("utf-8")  # without translating line endings


@pytest.mark.parametrize("script", DIFFS)
def test_a_rung_differs_from_the_one_before_in_its_idea_alone(script):
    """The definitions in its row differ, by a diff whose limit leaves no room for other changes, such as new names."""
    rung = RUNGS[script]
    old, new = parts(source(rung.before)), parts(source(script))
    changed = {name for name in old | new if old.get(name, " ")[0] != new.get(name, " ")[0]}
    assert changed == set(rung.touches)
    shared = old.keys() & new.keys()
    assert [name for name in shared - changed if old[name][1] != new[name][1]] == []  # in comments or layout
    assert [name for name in old if name in shared] == [name for name in new if name in shared]
    assert 1 <= sum(changed_lines(rung.before, script)) <= rung.limit
    texts = [split(source(file))[1].splitlines() for file in (rung.before, script)]
    lines = [re.sub(r"\s*#.*", "", line) for line in difflib.unified_diff(*texts, n=0, lineterm="")]
    removed, added = ({line[1:] for line in lines if line[0] == sign} for sign in "-+")
    assert removed & added <= {"", "-- ", "++ "}  # otherwise, a line was moved, or only its comment differs


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_imports_no_other(script):
    text = source(script)
    assert len(text.splitlines()) <= {"baseline.py": 250, "ddp_run.py": 335}.get(script, 460 if "/" in script else 285)
    used = {"torch", "tiktoken", "numpy", *sys.stdlib_module_names} | ({"unattended"} if "_run" in script else set())
    for indent, name in re.findall(r"^( *)(?:from|import) (\w+)", split(text)[1], re.MULTILINE):
        assert name in used or (indent and name == "transformers"), name  # GPT.from_pretrained imports transformers


@pytest.mark.parametrize("script", DIFFS)
def test_make_diff_turns_the_script_before_into_this_one(monkeypatch, capsys, script):
    """The docstring names the command. It prints the docstring, and a patch with the line numbers of the files."""
    (name,) = re.findall(r"^    make diff-(\S+)    shows what this file changes$", source(script), re.MULTILINE)
    monkeypatch.setattr("sys.argv", ["diff.py", name])
    diff.main()
    shown, docstring = capsys.readouterr().out, split(source(script))[0]
    assert shown.startswith(docstring)
    (patch,) = unidiff.PatchSet(shown[len(docstring) :])
    old, new = source(RUNGS[script].before).splitlines(), source(script).splitlines()
    for hunk in reversed(patch):
        before, after = ([line[1:-1] for line in lines] for lines in (hunk.source, hunk.target))
        assert new[hunk.target_start - 1 :][: len(after)] == after
        assert old[hunk.source_start - 1 :][: len(before)] == before
        old[hunk.source_start - 1 : hunk.source_start - 1 + len(before)] = after
    assert split("\n".join(old))[1] == split("\n".join(new))[1]
    assert (patch.source_file, patch.target_file) == (f"a/{RUNGS[script].before}", f"b/{script}")


def test_the_numbers_in_docstrings_and_the_sizes_beside_the_models_are_right():
    """They are recomputed from shapes, from PyTorch's own values, from data sheets and from results/."""

    def model(number, name="gpt2"):
        with torch.device("meta"):
            return list(load(SCRIPTS[number]).GPT(load(SCRIPTS[number]).MODELS[name]).parameters())

    untied, tied, padded = (sum(p.numel() for p in model(number)) for number in (0, 1, 7))
    matrices = sum(p.dim() == 2 for p in model(8))
    single, bf16, fp16 = (round(-log2(torch.finfo(t).eps)) for t in (torch.float32, torch.bfloat16, torch.float16))
    a100, t4 = (read_toml("measure/cards.toml")[card] for card in ("A100", "T4"))
    gb = [counts.totals(step)[1] / 1e9 for step in counts.read_counts()["gpt2", 4, 1024].values()]
    beyond = counts.read_counts(tables.BEYOND)["gpt2", 16, 1024].items()
    ten, stream, fused, _, record = (counts.totals(step)[1] / 1e9 for _, step in beyond)
    loss, loss_fused = (counts.totals(dict(beyond)[s], "softmax and loss")[1] / 1e9 for s in (TEN, SIDE.fused))
    h200 = records.load(ROOT / "results" / "nvidia-h200-2026-11-27-2").rows[TEN]
    predicted = read_toml("results/predictions.toml")["prediction"]
    (low, high), *_ = (one["ms"][SIDE.record] for one in predicted if SIDE.record in one["ms"])
    adamw, scale = torch.optim.AdamW([torch.zeros(1)]).defaults, torch.amp.GradScaler("cpu").get_scale()
    beta2, peak = adamw["betas"][1], max(load(SCRIPTS[9]).get_lr(step, 50) for step in range(50))
    runs = json.loads((ROOT / "results" / "quality.json").read_text(encoding="utf-8"))["runs"]
    three, four = (np.array([run["losses"][-1] for run in runs if run["script"] == SCRIPTS[n]]) for n in (3, 4))
    said = f"""baseline: {untied:,} parameters in all ... ln(50257) = {log(50257):.2f}
    01: from {untied:,} to {tied:,}, which saves {1 - tied / untied:.0%}
    02: is {a100["tf32"] / a100["float32"]:.0f} times as high ... ({a100["tf32"]} and {a100["float32"]} TFLOP/s)
    03: all {15 - bf16} exponent bits, but only {bf16} of the {single} ... ({a100["bf16"]} and {a100["tf32"]} TFLOP/s)
    04: 0.02 / sqrt(24), about {0.02 / sqrt(2 * 12):.3f} ... held-out loss was {np.median(three - four):.3f} lower
    05: moves {gb[5]:.0f} GB instead of {gb[4]:.0f} GB ... {4 * 1024 * 50257 * 2 / 1e9:.1f} GB in bf16
    06: takes {4 * 12 * 1024**2 * 2 / 1e6:.0f} MB per layer
    07: takes {50257 * 2:,} bytes ... 50304 = {50304 / 128:.0f} * 128 also ... The {50304 - 50257} extra
    08: {1 / (1 - beta2):.0f} at PyTorch's default beta2 of {beta2}, only {1 / (1 - 0.95):.0f} at 0.95
    08: from {adamw["weight_decay"]} to ... the {matrices} matrices ... for the {len(model(8)) - matrices} bias
    09: a peak of {1e4 * peak:.0f}e-4 instead of 3e-4
    10: {28 * padded / 1e9:.1f} GB instead of {80 * padded / 1e9:.0f} GB.
    ddp: ({4 * padded / 1e6:.0f} MB for 124M parameters)
    long: a checkpoint takes {3 * 4 * padded / 1e9:.1f} GB
    fp16: ({t4["fp16"]} and {t4["float32"]} TFLOP/s) ... by {scale:.0f}
    bf16: moves {stream:.1f} GB instead of {ten:.1f} GB ... only {bf16 + 1} significant bits
    fused: moves {loss_fused:.1f} GB ... move {loss:.1f} GB ... the loss by {scale:.0f}
    queued: for {h200["profile"]["groups_ms"]["idle"]:.1f} ms
    record: moves {record:.1f} GB instead of {ten:.1f} GB ... {low} to {high} ms ... takes {h200["median_ms"]:.1f} ms
    activation: {16 * 1024 * 768 * 4 / 1e6:.0f} MB per block"""
    texts = {rung.number: " ".join(ast.get_docstring(ast.parse(source(rung.file))).split()) for rung in RUNGS.values()}
    phrases = [(name, phrase) for name, line in re.findall("(.*?): (.*)", said) for phrase in line.split(" ... ")]
    assert [(name, phrase) for name, phrase in phrases if phrase not in texts[name.strip()]] == []
    for name, millions in re.findall(r'^    "(gpt2.*?)": .*  # (\d+)M', source(SCRIPTS[1]), re.MULTILINE):
        assert round(sum(p.numel() for p in model(1, name)) / 1e6) == int(millions)


def test_speed_rungs_state_the_latest_step_times_on_our_gpu_and_the_first_steps_that_compile():
    measured = [data for data in tables.measurements().values() if data.whole]
    (h200,) = (data for data in measured if data.host["name"] == "NVIDIA H200")
    for rung in [rung for rung in RUNGS.values() if rung.part == "rung" and rung.kind == "speed"]:
        before, after = (h200.rows[script]["median_ms"] for script in (rung.before, rung.file))
        said = f"On an H200 at B {h200.settings['batch_size']}, a step took {before:.1f} ms before this change and "
        said += f"{after:.1f} ms after it"
        said += " (" if h200.outdated([rung.before, rung.file]) else "."  # in brackets: what has changed since then
        assert said in " ".join(split(source(rung.file))[0].split()), rung.file
    h200, cpu = (
        [data.rows[script]["first_step_s"] for data in measured if data.cpu == cpu for script in SCRIPTS[5:11]]
        for cpu in (False, True)
    )
    low, high, slow, slower = (5 * round(seconds / 5) for times in (h200, cpu) for seconds in (min(times), max(times)))
    said = f"the first step takes {low} to {high} s on an H200, {slow} to {slower} s on two CPU cores"
    assert all(said in source(script) for script in RUNGS if script not in SCRIPTS[:5])
