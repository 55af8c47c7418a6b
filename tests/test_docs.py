"""The README, the pages and the notebooks contain the current diffs, tables and plots.

Lines of arithmetic are recomputed. Measured numbers in hand-written sentences are compared with results/, and public
figures that appear in several places with each other.
"""

import json
import re
import shlex
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT, RUNGS, copy_project, only_committed_results

from dev.ladder import read_toml
from measure import counts, records, tables, timeline
from measure.records import TEN

PAGES = sorted((ROOT / "docs" / "pages").glob("**/*.md"))


def check(root):
    """Run the cog command of `make figures` in a copy of the project, but only compare what it would write."""
    shown = subprocess.run(["make", "-n", "figures"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (words,) = (shlex.split(line) for line in shown.splitlines() if "cogapp" in line)
    options = [sys.executable, *words[1 : words.index("-r")], "--check", "--diff"]
    return subprocess.run([*options, *words[words.index("-r") + 1 :]], cwd=root, capture_output=True, text=True)


def test_what_make_figures_writes_is_up_to_date_and_follows_the_results_and_the_scripts(tmp_path):
    project = only_committed_results(copy_project(tmp_path / "project"))
    done = check(project)
    assert done.returncode == 0, f"make figures\n{done.stdout}{done.stderr}"
    images = project / tables.IMAGES
    for path in images.glob("*.svg"):
        path.write_text("stale")
    (images / "unused.svg").touch()
    subprocess.run([sys.executable, "-m", "measure.tables", "--plots"], cwd=project, check=True)
    drawn, kept = ({path.name: path.read_bytes() for path in at.glob("*.svg")} for at in (images, ROOT / tables.IMAGES))
    assert drawn.keys() == kept.keys() and b"stale" not in drawn.values()
    if sys.version_info >= (3, 11):  # plots may differ: older Python versions use a different matplotlib version
        assert drawn == kept, "make figures"

    for name, old, new in [
        (f"results/{next(iter(tables.newest()))}/runs.jsonl", r'"peak_gib": [\d.]+', '"peak_gib": 77.77'),
        ("speedup_02_tf32.py", "ampere_or_later =", "ampere ="),
    ]:
        text, changes = re.subn(old, new, (project / name).read_text(encoding="utf-8"))
        assert changes
        (project / name).write_text(text, encoding="utf-8")
    done = check(project)
    assert done.returncode
    for line in (r"\| .*77\.77", r"\+ .*ampere ="):
        assert re.search(rf"^\+{line}", done.stdout, re.MULTILINE), line


def test_every_script_has_its_diff_on_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)  # test_ladder.py compares diffs with git's
    shown = re.findall(r"^From `(.*)` to `(.*)`: .*\n\n```diff\n", text, re.MULTILINE)
    assert {after: before for before, after in shown} == {name: r.before for name, r in RUNGS.items() if r.before}


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link_or_anchor(tmp_path):
    pytest.importorskip("zensical", reason="Zensical needs Python 3.11 or later")
    docs = copy_project(tmp_path, "docs")
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=docs, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


NUMBER = re.compile(r"([\d.,]*\d) ?(bytes|kB|MB|GB/s|GB|GiB|GFLOP|TFLOP/s|TFLOP|ms|s|%)?(?![\w/])")
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "GB/s": 1e9, "GiB": 2**30, "ms": 1e-3, "s": 1, "%": 0.01, "": 1}
UNITS |= {"GFLOP": 1e9, "TFLOP": 1e12, "TFLOP/s": 1e12}


def hand_written(page):
    """Return a page without generated blocks, as (its paragraphs, its lines of arithmetic)."""
    text = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    sums = [line for language, block in blocks.findall(text) if language == "text" for line in block.splitlines()]
    return [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=[*|])", blocks.sub("", text))], sums


def is_true(line):
    """Return whether both sides of a line such as `label: 4 × 1,024 × 2 bytes = 8.19 kB` agree to the digits shown."""
    left, right = line.split(": ", 1)[1].split(" = ")
    left = NUMBER.sub(lambda n: f"({n[1].replace(',', '')} * {UNITS[n[2] or '']})", left)
    assert re.fullmatch(r"[\d.e+*/() ×−-]+", left), left
    digits, unit = NUMBER.fullmatch(right).groups()
    value = eval(left.replace("×", "*").replace("−", "-")) / UNITS[unit or ""]
    return abs(value - float(digits.replace(",", ""))) <= 0.51 * 10.0 ** -len(digits.partition(".")[2])


def test_the_arithmetic_on_the_pages_is_right_with_rates_that_were_measured_or_are_in_a_data_sheet():
    for right, result in (True, "823 MB"), (False, "832 MB"), (False, "823 GB"), (False, "785 MB"):
        assert is_true(f"logits: 4 × 1,024 × 50,257 × 4 bytes = {result}") == right
    rates, lines = {"300"}, 0  # NVLink 3, GB/s
    rates |= {f"{rate:,}" for card in read_toml("measure/cards.toml").values() for rate in list(card.values())[:-1]}
    for folder in ("nvidia-h200-2026-11-27", "nvidia-h200-2026-11-27-2"):
        data = records.load(ROOT / "results" / folder)
        measured = [*data.peaks.values(), data.roof["copy_gb_per_s"], round(data.roof["copy_gb_per_s"], -2)]
        rates |= {form.format(rate) for rate in measured for form in ("{:.1f}", "{:,.0f}")}
    for page in PAGES:
        sentences, sums = hand_written(page)
        for line in [*sums, *(text for text in sentences if "https://" not in text and text[:1] != "|")]:
            assert set(re.findall(r"([\d.,]+) (?:TFLOP|GB)/s", line)) <= rates, (page.stem, line)
        for line in sums:
            assert " = " not in line or is_true(line), (page.stem, line)
            lines += " = " in line
    assert lines > 50
    links = re.findall(
        r"\| .*, (\S+) GB/s \| (\S+) ms \| (\S+) ms \| (\S+) ms \|", (PAGES[0].parent / "scale.md").read_text()
    )
    for rate, *times in links:
        expected = [2 * (n - 1) / n * 4 * 124_475_904 / float(rate) / 1e6 for n in (2, 4, 8)]  # GPUs
        assert [float(ms) for ms in times] == pytest.approx(expected, abs=0.051), rate
    assert len(links) == 5


def test_times_and_memory_in_sentences_and_arithmetic_are_the_measured_ones():
    """They are recomputed from results/. Numbers that a page derives itself are literals below."""
    first, second = (records.load(ROOT / "results" / f"nvidia-h200-2026-11-27{end}") for end in ("", "-2"))
    fp8, regional = "branches/fp8_head.py", "branches/regional_compile.py"  # scripts that are gone
    rungs = dict(zip([0, *(f"{number:02d}" for number in range(1, 11))], RUNGS, strict=False))
    ms = {number: first.rows[script]["median_ms"] for number, script in rungs.items()}
    ten, reg, eight = (second.rows[script]["median_ms"] for script in (TEN, regional, fp8))
    gib, gib_reg, gib_8 = (second.rows[script]["peak_gib"] for script in (TEN, regional, fp8))
    start, start_reg = (second.rows[script]["runs"][0]["step_ms"][0] / 1000 for script in (TEN, regional))
    left, left_8, left_reg = (second.rows[script]["profile"]["groups_ms"] for script in (TEN, fp8, regional))
    highs = [high for _, high in list(read_toml("results/predictions.toml")["prediction"][-1]["ms"].values())[:3]]
    matmul, loss, attention = (left[kind] for kind in ("matmul", "softmax and loss", "attention"))
    batches = {(b["batch_size"], b["compile_mode"]): b["median_ms"] for b in second.batches}
    rate = max(b["tokens_per_s"] for b in second.batches if b["compile_mode"] == "default")
    record = (PAGES[0].parent / "rungs" / "record.md").read_text(encoding="utf-8")
    assert f"{rate:,.0f} tokens per second at B 64" in " ".join(record.split())
    pretrain = (PAGES[0].parent / "pretrain.md").read_text(encoding="utf-8")
    assert (
        pretrain.count(f"{rate:,.0f} tokens per second") == 1 and pretrain.count(f"10,000,000,000 / {rate:,.0f}") == 3
    )
    reduce = [2 * (n - 1) / n * 4 * 124_475_904 / 450e6 for n in (2, 8)]  # ms, over NVLink 4
    one, again, big = (batches[size, "default"] for size in (1, 16, 64))
    graphs = batches[64, "reduce-overhead"]
    trained = json.loads((ROOT / "results" / "muon.json").read_text(encoding="utf-8"))["runs"]
    muon, adamw = (statistics.median(r["ms"] for r in trained if r["script"] == s) for s in ("branches/muon.py", TEN))
    cpu = records.load(ROOT / "results" / "cpu-amd-epyc-2026-11-29-2").rows
    cpu = [
        cpu[name]["profile"]["groups_ms"]["softmax and loss"] for name in ("transformers, compiled", TEN, "ddp_run.py")
    ]
    steps = timeline.read(ROOT / "results" / "cpu-amd-epyc-2026-11-29-2")
    noise = " ".join(f"{steps[rungs[number]]['ms']:.1f} ms" for number in ("01", "02"))
    colab, lecture, t4 = (log["ms"] for log in read_toml("results/public.toml")["log"])
    steps = counts.read_counts()["gpt2", 16, 1024]
    kernels, floor = counts.totals(steps[rungs["06"]])[2], counts.Card.read("A100").floor_ms(steps[rungs["06"]])[0]
    five = counts.Card(first.peaks, first.roof["copy_gb_per_s"]).floor_ms(steps[rungs["05"]])[0]
    expected = f"""
beyond {eight:.1f} ms {ten:.1f} ms {again:.1f} ms {matmul - left_8["matmul"]:.1f} ms
beyond {left_8["softmax and loss"] - loss:.1f} ms {gib:.2f} GiB {gib_8:.2f} GiB
bf16_stream {ten:.1f} ms
counts {5 * kernels / 1000:.0f} ms {lecture[rungs["06"]] - floor:.0f} ms
counts {colab[rungs["01"]]} ms {colab[TEN]} ms {t4[rungs["01"]]:,} ms {t4[TEN]} ms
results {muon:.0f} ms {adamw:.0f} ms {" ".join(f"{ms:.1f} ms" for ms in cpu)}
results {attention:.1f} ms {sum(left.values()):.1f} ms {matmul:.1f} ms
results {left["normalization and element-wise"]:.1f} ms {attention:.1f} ms {left["idle"]:.1f} ms {loss:.1f} ms
results {ms["06"]:.1f} ms {ms["07"]:.1f} ms {ten:.1f} ms 1.57 ms 0.193 ms 1.3 ms
results {ten:.1f} ms {attention:.1f} ms 0.193 ms 1.3 ms
ddp_run 1.35 s 1.35 s 2.91 ms
fsdp_run 24 GiB
fused_loss {ten:.1f} ms
pretrain {reduce[0]:.1f} ms {reduce[1]:.1f} ms
queued_steps {sum(left.values()):.1f} ms {left["idle"]:.1f} ms {ten:.1f} ms {one:.1f} ms
queued_steps {sum(left.values()):.1f} ms {left["idle"]:.1f} ms
record {big:.1f} ms {graphs:.1f} ms {" ".join(f"{big:.1f} ms {high} ms" for high in highs)}
speedup_01_weight_tying {round(ms[0], -1):.0f} ms
speedup_02_tf32 {ms["01"]:.0f} ms
speedup_03_bf16 {ms["02"]:.0f} ms
speedup_04_residual_init 24 s 4.9 s
speedup_05_compile {ms["04"]:.0f} ms {five:.1f} ms {start:.1f} s {start_reg:.1f} s
speedup_05_compile {left_reg["copies"]:.1f} ms {left["copies"]:.1f} ms {reg:.1f} ms {ten:.1f} ms
speedup_05_compile {gib:.2f} GiB {gib_reg:.2f} GiB
speedup_06_flash_attn {ms["05"]:.0f} ms {first.rows[rungs["05"]]["peak_gib"]:.0f} GiB
speedup_10_fused_adamw {ms["09"]:.0f} ms
scale {lecture[TEN]} ms 2.88 s
timeline {noise}"""
    found = []
    for page in PAGES:
        for text in [
            text for part in hand_written(page) for text in part if "https://" not in text and text[:1] != "|"
        ]:
            found += [(page.stem, one) for one in re.findall(r"[\d.,]*\d (?:ms|s|GiB)\b(?! =)", text.split(" = ")[0])]
    lines = [line.split(" ", 1) for line in expected.strip().splitlines()]
    pairs = [(stem, number) for stem, numbers in lines for number in re.findall(r"\S+ \S+", numbers)]
    for stem in {stem for stem, _ in found + pairs}:
        assert [one for name, one in found if name == stem] == [one for name, one in pairs if name == stem], stem
