"""Every number that readers see in a table, a plot or a summary follows from the logs as it should.

The logs here are made up, so that all figures differ, and the expected values are worked out by hand. The last tests
check the committed results, and public figures that appear in several places.
"""

import json
import math
import re

import pytest
from conftest import ROOT, RUNGS, SCRIPTS, SIDE

from dev.ladder import read_toml
from measure import counts, memory, plots, records, tables
from measure.records import PEERS, TEN

LADDER, PEER = SCRIPTS[:12], "transformers, compiled"
BASE, ONE, TWO, THREE, FOUR, FIVE, SIX = LADDER[:7]
CPU = {"id": "0123abcd", "device": "cpu", "name": "Made Up(R) 9000", "capability": "AVX2", "torch": "2.2", "cuda": None}
CPU |= {"python": "3.3", "cores": 4, "threads": 5, "system": "Linux", "memory_gib": 6.6, "cudnn": 10, "driver": None}
GPU = CPU | {"device": "cuda", "name": "Made Up GPU", "device_memory_gib": 77.5, "driver": "8", "cuda": "9"}
CPU |= {"device_memory_gib": None}
PRECISIONS = {script: rung.precision for script, rung in RUNGS.items()} | dict.fromkeys(PEERS, "bf16")
SLOW, FAST = [900.0] * 10 + [100.0] * 10, [900.0] * 10 + [50.0] * 10


def line(script, times, number=1, kind="rung", host=CPU, day=2, loss=9.0, memory=None, error=None, **settings):
    """Return a line of a log: a run of `script` in pass `number` whose steps took `times` milliseconds."""
    settings = {"model": "nano", "batch_size": 4, "seq_len": 128, "steps": len(times)} | settings
    about = {"script": script, "kind": kind, "pass": number, "command": "python -m measure.run", "source": "0"}
    about |= {"settings": settings | {"precision": PRECISIONS.get(script)}, "host": host, "figures": None}
    about |= {"commit": "01234567" * 5}
    about |= {"gpu": {"before": {"load": None}, "middle": None}, "started": f"2026-12-0{day}T03:04:05+00:00"}
    losses = [loss - step / 100 for step in range(len(times))]
    return about | {"step_ms": times, "losses": losses, "peak_gib": memory, "error": error}


def rows(*lines):
    return records.Measurement("made-up", lines).rows


def test_a_failed_run_is_shown_and_left_out_of_the_figures():
    oom = "a.py: error: out of memory: lower --batch-size or --seq-len"
    lines = [line(BASE, SLOW), line(BASE, SLOW, 2), line(ONE, [1.0] * 20, error=oom), line(ONE, FAST, 2)]
    data = records.Measurement("made-up", [*lines, line(TWO, [], error=oom, steps=20)])
    one, two = data.rows[ONE], data.rows[TWO]
    assert one["over_before"]["high"] == 2 and one["error"] == two["error"] == oom
    assert one["first_step_s"] is two["median_ms"] is two["over_baseline"] is two["tokens_per_s"] is None
    said = records.summary(data)
    assert said.count(oom) == 2 and f"{ONE} (a pass failed)" in said and re.search(rf"{TWO} +failed", said)
    again = rows(line(ONE, [1.0] * 20, error=oom), line(ONE, FAST))  # tried again: it worked
    assert again[ONE]["error"] is None and again[ONE]["median_ms"] == 50


def test_a_speed_up_is_of_two_runs_on_one_host_after_the_last_change_of_their_scripts():
    elsewhere = line(ONE, [10.0] * 20, 2, host=CPU | {"cpu": "another"})
    found = rows(line(BASE, SLOW), line(BASE, SLOW, 2), line(ONE, FAST), elsewhere)
    assert found[ONE]["over_before"] == {"median": 2, "low": 2, "high": 2}
    before, eight = LADDER[7:9]  # ladder.toml: rung 08 changed on 2026-11-28
    for day, gain in ("2026-11-27T23:59", None), ("2026-11-28T00:01", {"median": 2, "low": 2, "high": 2}):
        lines = [line(name, times) | {"started": day} for name, times in ((BASE, SLOW), (before, SLOW), (eight, FAST))]
        row = rows(*lines, line(ONE, SLOW))[eight]  # a run of another script was added later
        assert row["over_before"] == gain and row["over_baseline"]["median"] == 2


# ---- a made-up world: measurements of two devices, counts, predictions and public figures

PREDICTION = {"date": "2026-01-02", "device": "Made Up GPU", "model": "gpt2", "seq_len": 1024, "batch_size": 2}
PREDICTIONS = [PREDICTION | {"ms": {SIX: [90, 100], FIVE: [300, 400], TEN: [59, 61], SIDE.stream: [50.5, 55]}}]
PREDICTIONS += [
    PREDICTION | {"batch_size": 8, "ms": {TEN: [98, 98]}},
    PREDICTION | {"device": "B", "ms": {SIX: [1, 2]}},
]
LOG = {"about": "a log", "url": "W", "card": "A100", "batch_size": 4, "seq_len": 1024, "ms": {FIVE: 90.5, SIX: 60}}
SXM = {"card": "A100 SXM 80 GB", "peak": "A100", "precision": "bf16", "source": "V"}
SPEEDS = [{"card": "T4", "batch_size": 4, "precision": "fp16", "source": "S", "url": "U", "ran": "PyTorch a"}]
SPEEDS[0]["tokens_per_s"] = 20_000
SPEEDS += [SXM | {"tokens_per_s": 110_000, "ran": "PyTorch b"}, SXM | {"tokens_per_s": 120_000, "ran": "llm.c"}]
SPEEDS += [SXM | {"tokens_per_s": 130_000, "ran": "PyTorch c", "plain": False}]
SPEEDS += [
    SXM | {"card": "Made Up GPU", "tokens_per_s": speed, "batch_size": 8, "ran": "d"} for speed in (120_500, 119_000)
]
SPEEDS += [SPEEDS[-1] | {"tokens_per_s": 150_000, "plain": False}]
CARDS = {"T4": {"float32": 8, "fp16": 50, "gb_per_s": 500}, "A100": {"float32": 20, "bf16": 250, "gb_per_s": 1000}}
TOML = {"results/predictions.toml": {"prediction": PREDICTIONS}, "measure/cards.toml": CARDS}
TOML |= {"results/public.toml": {"log": [LOG], "speed": SPEEDS}}


def counted(precision, tflop, gb, attention_gb, times):
    """Return the counts of a step with one matmul, and with `times` kernels of attention."""
    matmul = counts.Kernel("mm", "matmul", precision, tflop * 1e12, gb * 1e9)
    return {matmul: 1, counts.Kernel("softmax", "attention", "", 0, attention_gb * 1e9): times}


COUNTS = {
    ("gpt2", B, 1024): {BASE: counted("float32", *base), FIVE: counted("bf16", *five), SIX: counted("bf16", *six)}
    for B, base, five, six in (
        (4, (4.096, 60, 10, 4), (2, 30, 4, 3), (1.5, 30, 0.5, 2)),
        (16, (16, 240, 40, 4), (8, 30, 4, 3), (6, 40, 1, 2)),
        (2, (3, 20, 5, 4), (2, 4, 2, 3), (1.5, 4, 0.6, 2)),
    )
}


BEYOND = {
    ("gpt2", B, 1024): {TEN: counted("bf16", tflop, ten, 1, 2), SIDE.stream: counted("bf16", tflop, stream, 1, 2)}
    for B, tflop, ten, stream in ((4, 2, 40, 30), (2, 1, 20, 16), (8, 4, 32, 22))
}
PEER_COUNTS = dict(zip((TEN, PEER), list(COUNTS["gpt2", 4, 1024].values())[1:], strict=True))


def fit(unit, name, script, model, ranks, logits, activations, peak, measured=None):
    row = {"name": name, "script": script, "model": model, "batch_size": 2, "seq_len": 1024, "ranks": ranks}
    row |= {"parts": {"logits": logits * unit, "activations": activations * unit}, "checkpointing": False}
    return row | {"peak": peak * unit, "measured": measured and measured * unit}


FITS = {"memory.json": [fit(2**30, "Fused", TEN, "gpt2", 1, 3, 2.5, 18)]}
FITS |= {"memory-cpu.json": [fit(2**20, "Fused", TEN, "nano", 1, 30, 20, 300, 400)]}
FITS |= {"memory-ranks.json": [fit(2**20, "DDP", "ddp_run.py", "nano", 2, 50, 40, 220, 200)]}


def measurement(host, ms, again, day, peaks, **settings):
    """Return the lines of a measurement with two passes. `again` has the times of the second pass that differ."""
    matmul = [{"precision": kind, "tflops": tflops} for kind, best in peaks for tflops in (best / 2, best, best / 4)]
    roof = line("roof", [], None, "roof", host, day, **settings) | {
        "figures": {"copy_gb_per_s": 2000.0, "matmul": matmul}
    }
    lines = [roof | {"gpu": {"before": {"clock_mhz": 1100, "power_limit_w": 550}, "middle": {"clock_mhz": 999}}}]
    for number, times in (1, ms), (2, ms | again):
        for place, (script, one) in enumerate(times.items()):
            steps = [1530.0 + 10 * place - 300 * number] + [999.0] * 9 + [one] * 10
            run = line(script, steps, number, "peer" if script in PEERS else "rung", host, day - 1 + number, **settings)
            run["losses"] = [loss - place / 10 + number for loss in run["losses"]]
            run["peak_gib"] = 29.3 - place + number / 4 if host is GPU else None
            load = "a browser" if (place, number) == (3, 2) else None
            before = {"clock_mhz": 1200, "power_w": 44, "power_limit_w": 555, "load": load}
            lines.append(run | {"gpu": {"before": before, "middle": {"clock_mhz": 1500 + place, "power_w": 66}}})
    return lines


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Make measure.tables read made-up files. Return {name: Measurement}."""
    ms = dict(zip([*LADDER, PEER], (800, 625, 400, 320, 310, 160, 128, 100, 80, 64, 40, 50, 62.5), strict=True))
    settings = {"host": GPU, "model": "gpt2", "batch_size": 2, "seq_len": 1024}
    settings |= {"peaks": (("float32", 40.0), ("tf32", 100.0), ("bf16", 200.0))}
    slow = {name: 2 * one for name, one in ms.items()} | {BASE: 1680, ONE: 1200, PEER: 160.3}  # the GPU throttles
    gpu = measurement(ms=ms, again=slow, day=2, **settings)
    del settings["peaks"]
    for script, matmul, idle, reserved in (
        (TEN, 20.04, 5.0, 21.5),
        ("ddp_run.py", 21.1, 4.0, 21.75),
        (PEER, 26.6, 3, 22),
    ):
        groups = dict.fromkeys(plots.GROUPS, 1.0) | {"matmul": matmul, "idle": idle}
        figures = {"groups_ms": groups, "attention": "flash", "reserved_gib": reserved}
        gpu.append(line(script, [1.0], None, "profile", **settings) | {"figures": figures})
    for mode, one in ("default", 100.0), ("reduce-overhead", 64.0):
        batch = settings | {"batch_size": 8, "compile_mode": mode}
        gpu.append(line(TEN, [999.0] * 10 + [one] * 10, None, "batch", **batch))
    old = {script: one if script == TWO else one / 2 if script == ONE else 2 * one for script, one in ms.items()}
    old = measurement(ms=old, again={}, day=1, peaks=(("float32", 30.0), ("bf16", 150.0)), **settings)
    cpu = dict.fromkeys(LADDER, 300.0) | {FIVE: 250.0, SIX: 240.0, TEN: 100.0}
    cpu = measurement(CPU, cpu, {FIVE: 260.0, SIX: 265.0}, 4, (("float32", 0.5), ("bf16", 0.9)))
    for name, lines in ("gpu", gpu), ("old", old), ("cpu", cpu):
        path = tmp_path / "results" / name / "runs.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for owner, name, value in (
        (tables, "ROOT", tmp_path),
        (tables, "IMAGES", tmp_path / "img"),
        (tables, "LEARNED", ()),  # test_quality.py checks these numbers
        (tables, "PRETRAINED", "trained"),
        (tables, "recorded", tables.recorded.__wrapped__),  # without the cache
        (tables, "measurements", tables.measurements.__wrapped__),
        (tables, "profiled", tables.profiled.__wrapped__),
        (tables, "read_toml", TOML.get),
        (counts, "read_toml", TOML.get),
        (counts, "read_counts", lambda *path: {(): COUNTS, (tables.BEYOND,): BEYOND}.get(path, {0: PEER_COUNTS})),
        (memory, "fits", FITS.get),
    ):
        monkeypatch.setattr(owner, name, value)
    return tables.measurements()


def cells(markdown):
    """Return the rows of a Markdown table without the bars at their ends."""
    return [row.strip("| ") for row in markdown.splitlines() if row.startswith("|")]


SUMMARY = """
script ms per step (quartiles) tokens/s × baseline × previous peak GiB (reserved) first step, s model TFLOP/s
speedup_02_tf32.py 600.0 (400.0–800.0) 3,413 2.05× (2.00–2.10) 1.53× (1.50–1.56) 27.80 1.25 2.92 3% tf32
speedup_10_fused_adamw.py 60.0 (40.0–80.0) 34,133 20.50× (20.00–21.00) 1.60× 19.80 (21.50) 1.33 29.2 15% bf16
compiled 111.4 (62.5–160.3) 18,384 11.64× (10.48–12.80) 0.57× (0.50–0.64) over 10 17.80 (22.00) 1.35 15.7 8% bf16
B 8 default 100.0 81,920 70 35% bf16
B 8 reduce-overhead 64.0 128,000 109 55% bf16
Made Up GPU, 77.5 GiB, driver 8, CUDA 9, cuDNN 10. torch 2.2, Python 3.3, Linux, 6.6 GiB of memory. 2026-12-02 to
2026-12-03. gpt2, B 2, T 1024; 2 interleaved passes of 20 steps: `python -m measure.run`. Commit 0123456.
Measured peak: float32 40, tf32 100, bf16 200 TFLOP/s; copies 2,000 GB/s.
Clock: 1100 MHz before the first run, 1500 to 1512 MHz under load; power limit 550 W.
Attention: flash (10_fused_adamw to transformers, compiled).
The machine was busy before 1 of 26 runs (a browser)."""
COMPARED = """
baseline.py 1,600.0 (1,600.0–1,600.0) 1,240.0 (800.0–1,680.0) 1.29× yes
speedup_01_weight_tying.py 312.5 (312.5–312.5) 912.5 (625.0–1,200.0) 0.34× no
Linux, 6.6 GiB of memory. 2026-12-01 to 2026-12-02. gpt2, B 2, T 1024; 2 interleaved passes of 20 steps
second: Made Up GPU, 77.5 GiB, driver 8"""


def test_the_summary_of_a_measurement_and_its_comparison_with_an_older_one(world, capsys, monkeypatch, tmp_path):
    for folders, expected in (["gpu"], SUMMARY), (["old", "gpu"], COMPARED):
        monkeypatch.setattr("sys.argv", ["tables.py", *(str(tmp_path / "results" / folder) for folder in folders)])
        tables.main()
        printed = capsys.readouterr().out
        for said in expected.strip().splitlines():
            assert said in " ".join(printed.split()), said
    assert "differ" not in printed
    with pytest.raises(ValueError, match="the measurements differ in device, model, batch_size, seq_len: "):
        tables.compare(*world.values())


PARTS = """
picture: on an Made Up GPU, rungs 01 to 10 make `gpt2` 20.50× as fast at batch size (B) 2
picture: 34,133 instead of 1,652 tokens/s
picture: and cut its peak memory from 29.80 to 19.80 GiB (2026-12-03, torch 2.2).
picture: On a CPU (Made Up(R) 9000), the small model `nano` becomes 3.00× as fast.
picture: In one run with `--batch-size 8 --compile-mode reduce-overhead`, rung 10 reached 128,000 tokens/s.
picture: The highest public figure that we know of for plain GPT-2 124M on this GPU is 120,500 (d, B 8).
front: rungs 01 to 10 make `gpt2` 20.50× as fast at batch size (B) 2
ladder: | rung | idea | kind | Made Up GPU | lines of code |
ladder: (docs/pages/rungs/speedup_01_weight_tying.md) | memory | 1.34× | +1 −0 |
ladder: (docs/pages/rungs/speedup_02_tf32.md) | speed, on a GPU | 1.53× | +4 −0 |
ladder: (docs/pages/rungs/speedup_06_flash_attn.md) | speed | 1.25× | +1 −5 |
ours: | Made Up GPU, gpt2 | 2 | 1024 | 60.0 | 34,133 | 15% |
ours: | CPU: Made Up(R) 9000, nano | 4 | 128 | 100.0 | 5,120 | 25% |
results: | `baseline.py` | 1,240.0 (800.0–1,680.0) | 1,652 | 1.00× |  | 29.80 | 1.23 | 1.41 | 4% float32 |
results: **CPU: Made Up(R) 9000, AVX2, 4 cores. torch 2.2, Python 3.3
results: | `speedup_10_fused_adamw.py` | 100.0 (100.0–100.0) | 5,120 | 3.00× | 3.00× |  | 1.33 | 0.226 | 25% bf16 |
log: `baseline.py` printed these lines (Made Up GPU, gpt2):
log: step    0 | loss 10.000000 | dt  1230.00 ms |      1,665 tok/s
log: step   19 | loss 9.810000 | dt   800.00 ms |      2,560 tok/s
speeds: | T4 | 20,000 | 4 | 205 | 40% | PyTorch a | [S](U) |
speeds: | A100 SXM 80 GB | 120,000 |  |  | 48% | llm.c | V |
speeds: | A100 SXM 80 GB | 130,000 |  |  |  | PyTorch c | V |
counted: | rung | TFLOP, B 4 / 16 / 2 | GB moved, B 4 / 16 / 2 | kernels, B 4 / 16 / 2 |
counted: | 06 Flash attention | 1.50 / 6.00 / 1.50 | 31.0 / 42.0 / 5.2 | 3 / 3 / 3 |
floors: | floor, ms | T4 | A100 |
floors: | 06 Flash attention | 124.0 | 42.0 |
beside: | script | measured, ms | floor, ms | measured / floor | measured, × previous | floor, × previous |
beside: | 06 Flash attention | 60 | 31.0 | 1.94 | 1.51× | 1.35× |
beside: | 06 Flash attention | 192 | 8.1 | 23.70 | 1.25× | 1.60× |
peer_counted: | attention | 0.00 / 0.00 | 12.00 / 1.00 | 3 / 2 |
peer_counted: | a step | 2.00 / 1.50 | 42.00 / 31.00 | 4 / 3 |
beyond: Made Up GPU, gpt2, B 2 / 8, T 1024:
beyond: | script | GB moved | floor, ms | predicted, ms | measured, ms |
beyond: | 10 Fused AdamW | 22.0 / 34.0 | 11.0 / 21.0 | 59 to 61 / 98 | 60.0 / 100.0 |
beyond: | bf16 residual stream | 18.0 / 24.0 | 9.0 / 21.0 | 50.5 to 55 / – |  |
fit: | script | B 2 | logits, B 2 | activations, B 2 |
fit: | Fused | 18.0 | 3.0 | 2.5 |
fit_gpu: | script | predicted, GiB | measured, GiB | error |
fit_gpu: | Fused | 18.00 | 19.80 | −9.1% |
fit_measured: | step | script | logits | activations | predicted, MiB | measured, MiB | error |
fit_measured: | nano, B 2 | Fused | 30 | 20 | 300 | 400 | −25.0% |
fit_measured: | nano, B 2 | DDP, 2 ranks | 50 | 40 | 220 | 200 | +10.0% |"""


def test_a_page_shows_the_numbers_of_the_measurements_the_counts_and_the_public_figures(world):
    found = tables.parts.__wrapped__()
    for said in PARTS.strip().splitlines():
        name, row = said.split(": ", 1)
        assert row in found[name].replace("\n", " "), said
    gpu, cpu = found["results"].split("\n## ")
    assert list(world) == ["gpu", "cpu"] and "`results/gpu/runs.jsonl`" in gpu and "`results/cpu/runs.jsonl`" in cpu


def test_a_rungs_page_shows_its_measurements_predictions_and_counts_beside_the_rung_before(world):
    shown, *predicted = tables.measured("06").strip().split("\n\n")
    assert cells(shown)[2:] == [
        "Made Up GPU, gpt2, B 2, T 1024 | 240.0 → 192.0 | 1.25× | 24.80 → 23.80 | 9.3100 → 9.2100",
        "CPU: Made Up(R) 9000, nano, B 4, T 128 | 255.0 → 252.5 | 1.01× (0.98–1.04), inconclusive |  | 9.3100 → 9.2100",
    ]
    about, ours = "Predicted on 2026-01-02 for Made Up GPU at B", "ms per step; our latest measurement:"
    other = "Predicted on 2026-01-02 for B at B 2: 1 to 2 ms per step; not measured yet."
    assert predicted == [f"{about} 2: 90 to 100 {ours} 192.0 ms, 92% above this range.", other]
    assert f"{about} 2: 300 to 400 {ours} 240.0 ms, 20% below this range." in tables.measured("05")
    assert f"{about} 2: 59 to 61 {ours} 60.0 ms, as predicted." in tables.measured("10")
    assert f"{about} 8: 98 {ours} 100.0 ms, 2% above this range." in tables.measured("10")
    assert tables.measured("muon").strip() == "We have not measured the speed of this script yet."
    assert tables.measured("bf16").endswith(f"yet.\n\n{about} 2: 50.5 to 55 ms per step; not measured yet.\n")
    assert cells(tables.counts_of("bf16"))[3] == "GB moved | 42.0 | 32.0 | −23.8%"
    heading, _, *rest = cells(tables.counts_of("06"))
    assert heading.endswith("`gpt2`, B 4, T 1024 | 05 torch.compile | 06 Flash attention | change")
    assert rest == [
        "TFLOP | 2.00 | 1.50 | −25.0%",
        "GB moved | 42.0 | 31.0 | −26.2%",
        "GB moved: attention | 12.0 | 1.0 | −91.7%",  # matmuls move the same in both and have no row
        "kernels | 4 | 3 | −25.0%",
    ]


# ---- plots, and the page about a long run


def write(folder, losses, scores=(), more=""):
    """Write a log as pretrain/train.py does: a header, a row per step and a row per evaluation. Return what is read."""
    found = [{"begun": "2026-11-25"}] + [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    found += [{"step": step, "val_loss": score, "samples": [f"written at {step}"]} for step, score in scores]
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found) + more)
    return plots.read(folder / "log.jsonl")


def curves(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def bars(axes):
    """Return {name on the y axis: [(start, length) of its bars]}, and the labels at the bars' ends."""
    names, found = [label.get_text() for label in axes.get_yticklabels()], {}
    for container in axes.containers:
        for name, bar in zip(names, container, strict=False):
            found.setdefault(name, []).append((bar.get_x(), bar.get_width()))
    return found, [text.get_text() for text in axes.texts if text.get_text()]


def test_the_bars_and_curves_of_the_plots_have_their_own_names_and_numbers(world, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "svg", lambda figure: drawn.append(figure) or "")
    write(tmp_path / "results" / "trained", [9.0, 8.0])
    (tmp_path / "img").mkdir()
    tables.draw_plots()
    tokens, losses, narrow, wide, column, _ = drawn
    found, labels = bars(tokens.axes[0])
    assert list(found) == [*LADDER, PEER] and found[BASE] == [(0, 1651.6)] and found[TEN] == [(0, 34133)]
    assert labels[::12] == ["1,652 · 1.00×", "18,384 · 11.64× (10.48–12.80)"]
    found, labels = bars(narrow.axes[0])
    assert found["01 Weight tying"] == [(0, 2244.4)] and labels[10] == "20.50× (20.00–21.00)"
    assert curves(losses.axes[0])[ONE] == (list(range(20)), [9.0 - step / 100 - 0.1 + 1 for step in range(20)])
    for figure in (wide, column):
        shown = [bars(axes)[1] for axes in figure.axes]
        assert shown == [["1,240", "240", "192"], ["3.00", "2.00", "1.50"], ["40", "10", "5"], ["5", "4", "3"]]
    assert bars(column.axes[2])[0]["05 torch.compile"][:2] == [(0, 4), (4, 6)]  # GB: matmul, attention


def test_training_and_validation_curves_have_their_own_names_and_the_page_their_means(world, tmp_path):
    log = write(tmp_path / "results" / "trained", [10.0, 9.0, 6.0, 4.0, 3.0, 2.0], [(2, 11.0), (4, 7.25), (6, 8.5)])
    assert curves(plots.losses({"a": log}).axes[0]) == {
        "a, training": ([0, 1, 2, 3, 4, 5], [10, 9, 6, 4, 3, 2]),
        "a, validation, lowest 7.250 at step 4": ([2, 4, 6], [11, 7.25, 8.5]),
    }
    long = write(tmp_path / "long", [float(step // 2) for step in range(400)])
    ((name, (steps, means)),) = curves(plots.losses({"b": long}).axes[0]).items()  # each point is the mean of two steps
    assert name == "b, training, mean of 2 steps" and (steps[1], means[1], means[-1]) == (2.5, 1, 199)
    log = write(tmp_path / "growing", [9.0, 8.0, math.nan], more='{"step": 3, "lo')  # the run has diverged
    assert [row["step"] for row in log] == [0, 1, 2]
    assert plots.losses({"c": log}).axes[0].get_ylim()[1] == pytest.approx(1.02 * 8)  # without the loss of step 0
    about = {"name": "Made Up(R) 9000", "torch": "2.2", "python": "3.3", "system": "Linux"}
    (tmp_path / "results" / "trained" / "machine.json").write_text(json.dumps(about))
    text = tables.pretrained()
    assert cells(text)[2:] == ["2 |  | 11.000", "4 | 5.000 | 7.250", "6 | 2.500 | 8.500"]
    assert "lowest validation loss (step 4):\n\n```text\nwritten at 4\n```" in text
    assert "at the end (step 6):\n\n```text\nwritten at 6\n```" in text


def test_the_readme_shows_the_kernels_of_a_step_once_a_gpu_has_been_profiled_whole(world, tmp_path):
    def shown(name, scripts):
        steps = {script: {"ms": 9.0, "names": [["matmul", "mm"]], "kernels": [[0, 9000, 0]]} for script in scripts}
        (tmp_path / "results" / name / "kernels.json").write_text(json.dumps(steps))
        assert tables.kernels("layer") == "We have not profiled all rungs yet."  # these steps have one matmul
        parts = tables.picture(list(world.values()), "img/"), tables.kernels("steps")
        return [re.findall(r'measured on (.*?)" src="img/(\w+)', text) for text in parts]

    gpu, cpu = "Made Up GPU, gpt2", "CPU: Made Up(R) 9000, nano"
    assert shown("gpu", [TEN]) == [[(gpu, "tokens")], []]  # not of all rungs
    assert shown("cpu", LADDER[:11]) == [[(gpu, "tokens")], [(cpu, "steps")]]
    assert shown("gpu", LADDER) == [[(gpu, "steps")], [(gpu, "steps")]]


# ---- what is committed


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/runs.jsonl")), ids=lambda path: path.parent.name)
def test_committed_results_are_logs_of_runs_on_one_machine(path):
    data = records.load(path.parent)
    assert {str(one["host"]) for one in data.lines} == {str(data.host)} and data.host["torch"] and data.roof
    for one in data.runs:
        assert one["error"] is None and len(one["step_ms"]) == len(one["losses"]) == one["settings"]["steps"]
        assert min(one["step_ms"]) > 0 and one["losses"][-1] < one["losses"][0] and one["started"] and one["commit"]
    assert all(0 < row["peak_share"] < 1 for row in data.rows.values())


def test_public_figures_agree_with_a_second_source():
    public = read_toml("results/public.toml")
    speeds, again = {one["ran"]: one["tokens_per_s"] for one in public["speed"]}, []
    for ran, speed in speeds.items():  # some entries also give the time or the total that the speed comes from
        gpus = int((re.search(r"(\d+) GPUs", ran) or "01")[1])
        for ms, tokens in re.findall(r"(\S+) ms per ([\d,]+) tokens", ran.replace("per step", "per 4,096 tokens")):
            again.append((speed, 1000 * int(tokens.replace(",", "")) / float(ms.replace(",", "")) / gpus))
        for total, unit in re.findall(r"\((\S+)([Mk]) tokens/s", ran):
            again.append((speed, float(total) * {"M": 1e6, "k": 1e3}[unit] / gpus))
    assert len(again) == 6
    again.append((public["speed"][0]["tokens_per_s"], 4096 * 1000 / public["log"][2]["ms"][LADDER[7]]))  # T4
    for speed, other in again:
        assert speed == pytest.approx(other, rel=0.005)
