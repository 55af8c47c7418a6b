"""The pictures and the table of a step's kernels show what the profiler recorded.

The steps here are made up, so the answers are known. test_device.py checks how a step is read from a trace.
"""

import re
from types import SimpleNamespace

import pytest
from conftest import ROOT, SCRIPTS, SIDE
from matplotlib.colors import to_hex

from measure import counts, plots, records, timeline
from measure.counts import Kernel

BASE, FOUR, FIVE, SIX, TEN = SCRIPTS[0], *SCRIPTS[4:7], SCRIPTS[10]
SETTINGS = {"model": "nano", "batch_size": 3, "seq_len": 64}
HOST = {"name": "Made Up(R) 9000", "torch": "2.2"}


def step(*kernels, ms=0.1):
    """Return a step. Each kernel is (start in microseconds, duration, group, name)."""
    names = sorted({tuple(kernel[2:]) for kernel in kernels})
    rows = [[start, duration, names.index((kind, name))] for start, duration, kind, name in sorted(kernels)]
    return {"ms": ms, "names": names, "kernels": rows}


def measurement(**more):
    roof = {"copy_gb_per_s": 100.0}
    about = {"settings": SETTINGS, "host": HOST, "cpu": True, "name": "made-up", "roof": roof, "peaks": {"bf16": 2.0}}
    return SimpleNamespace(**about | {"rows": {}, "finished": "2026"} | more)


def drawn(axes, across=False):
    """Return [(color, begin, end), ...] of the blocks in a plot, in order."""
    found = []
    for strip in (one for one in axes.get_lines() if one.get_linewidth() > 5 and one.get_color() != "white"):
        times = list(strip.get_ydata() if across else strip.get_xdata())
        found += [(to_hex(strip.get_color()), *map(float, times[at : at + 2])) for at in range(0, len(times), 3)]
    return sorted(found, key=lambda one: one[1:])


def test_a_strip_shows_two_streams_a_gap_and_the_share_of_kernels_below_a_pixel():
    kernels = [(0, 40, "attention", "bmm"), (30, 30, "matmul", "mm")]
    kernels += [(35, 10, "optimizer", "inside"), (80, 20, "copies", "c")]
    found = timeline.parts(step(*kernels), 0, 100, 10)
    assert found == 4 * ["attention"] + 2 * ["matmul"] + 2 * ["idle"] + 2 * ["copies"]
    assert timeline.parts(step(*kernels), 50, 90, 4) == ["matmul", "idle", "idle", "copies"]
    short = [(at, 6, "optimizer", "x") for at in range(0, 100, 10)] + [
        (at, 3, "copies", "y") for at in range(6, 100, 10)
    ]
    found = timeline.parts(step(*short), 0, 100, 10)
    assert {kind: found.count(kind) for kind in set(found)} == {"optimizer": 6, "copies": 3, "idle": 1}


def test_the_strips_have_their_own_lengths_groups_and_names_in_the_panel_of_their_script():
    steps = {
        TEN: step((0, 20_000, "optimizer", "a"), (20_000, 10_000, "softmax and loss", "b"), ms=40.0),
        BASE: step((100_000, 100_000, "matmul", "mm"), ms=400.0),
        FIVE: step((0, 40_000, "copies", "c"), ms=80.0),
        "transformers": step(ms=1000.0),
    }
    colors = plots.GROUPS
    for wide in True, False:
        figure = timeline.ladder(steps, measurement(), wide)
        upper, lower = figure.axes
        assert drawn(upper) == [(colors["matmul"], pytest.approx(100, abs=2), pytest.approx(200, abs=2))]
        expected = [("optimizer", 0, 20), ("copies", 0, 40), ("softmax and loss", 20, 30)]
        expected = [(colors[kind], pytest.approx(a, abs=0.5), pytest.approx(b, abs=0.5)) for kind, a, b in expected]
        assert drawn(lower) == expected
        names = ["05 torch.compile", "10 Fused AdamW"]
        if wide:
            assert [label.get_text() for label in lower.get_yticklabels()] == names
        texts = [text.get_text() for text in lower.texts if text.get_text().endswith(" ms")]
        assert texts == (["80.0 ms", "40.0 ms"] if wide else [f"{names[0]}: 80.0 ms", f"{names[1]}: 40.0 ms"])
        shaded = upper.patches[0].get_extents().transformed(upper.transData.inverted())
        assert (shaded.x0, shaded.x1) == pytest.approx(lower.get_xlim())  # the part that the second panel enlarges


def test_a_layer_is_between_its_matmuls_and_both_scripts_have_the_same_scale():
    def rung(layers, length):
        """Return a step of matmuls, each of which takes `length` and has one kernel after it."""
        found, more = [], {7: 10, 11: 16}  # the last matmuls of layers 1 and 2 launch a second kernel
        for number in range(12 * layers + 3):
            at = 2 * length * number
            found.append((at, length, "matmul", f"mm {number}"))
            found += [(at + length, more[number], "matmul", "+ mm splitKreduce")] if number in more else []
            found += [(at + 1.25 * length, length / 2, "copies", "c")]
        return step(*found, ms=(12 * layers + 3) * 2 * length / 1000)

    four, ten = rung(4, 100), rung(4, 60)
    # 16 matmuls of the forward pass, 3 of the head; the backward pass begins with layer 3. Layer 2 is the median one.
    assert timeline.layer_times(four, 4) == ((7 * 200 + 110, 11 * 200 + 116), (26 * 200 + 100, 34 * 200 + 100))
    assert timeline.layer_times(four, 5) is None
    figure = timeline.layer({FOUR: four, TEN: ten}, measurement())
    assert [axes.get_title("left") for axes in figure.axes] == [
        "04 forward: 0.81 ms",
        "10 forward: 0.49 ms",
        "04 backward: 1.60 ms",
        "10 backward: 0.96 ms",
    ]
    assert [axes.get_ylim()[0] for axes in figure.axes] == [0.806, 0.806, 1.6, 1.6]
    mm = [block[1:] for block in drawn(figure.axes[1], across=True) if block[0] == plots.GROUPS["matmul"]]
    expected = [(0.05, 0.11), (0.17, 0.23), (0.29, 0.35), (0.41, 0.486)]
    assert mm == [pytest.approx(block, abs=0.005) for block in expected]
    texts = [text.get_text() for text in figure.axes[1].texts if "mm" in text.get_text()]
    assert texts == ["60 mm 8", "60 mm 9", "60 mm 10", "60 mm 11", "16 mm splitKreduce"]


def test_a_long_kernel_is_named_in_each_column_that_it_crosses():
    figure = timeline.whole(step((10_000, 25_000, "matmul", "mm"), ms=40.0), TEN, measurement())
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [[], *([["25,000 mm"]] * 3)]
    assert [drawn(axes, across=True)[0][1:] for axes in figure.axes[1:]] == [
        (0, 10),
        (0, 10),
        pytest.approx((0, 5), abs=0.05),
    ]


STEP = step(
    (0, 4000, "matmul", "mm nvjet"),
    (4000, 1000, "matmul", "+ mm splitKreduce"),
    (5000, 10, "copies", "mm Memset"),
    (5010, 1990, "matmul", "+ mm nvjet"),
    (7000, 5000, "matmul", "mm nvjet"),
    (13_000, 600, "normalization and element-wise", "graph_0_cpp_fused__to_copy_gelu_view_3"),
    (14_000, 500, "attention", "_scaled_dot_product_cudnn_attention sdpa"),
    (15_000, 800, "optimizer", "mul_ vectorized"),
    (15_000, 100, "copies", "_to_copy vectorized"),
    (3900, 90, "copies", "_to_copy Memcpy HtoD"),  # in another stream
    ms=20.0,
)
COUNTED = [
    Kernel("aten::mm", "matmul", "bf16", 6 * 10**9, 10**8),  # 3 ms at 2 TFLOP/s
    Kernel("aten::mm", "matmul", "bf16", 10**9, 10**8),  # 1 ms at 100 GB/s
    Kernel("aten::mm", "matmul", "bf16", 6 * 10**9, 10**8),
    Kernel("triton_fused__to_copy_gelu_view_0", "normalization and element-wise", "", 0, 3 * 10**7),
    Kernel("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", "bf16", 10**9, 10**6),
    Kernel("aten::mul", "optimizer", "", 0, 10**7),
    Kernel("aten::mul", "optimizer", "", 0, 10**7),
    Kernel("aten::_to_copy", "copies", "", 0, 10**5),
]
TABLE = """
mm nvjet | matmul | 2 | 10.00 | 50% | 12.0 | 200.0 | 6.00 | 1.7
mm nvjet | matmul | 1 | 2.00 | 10% | 1.0 | 100.0 | 1.00 | 2.0
mul_ vectorized | optimizer | 1 | 0.80 | 4% |  |  |  |
fused gelu | element-wise | 1 | 0.60 | 3% |  | 30.0 | 0.30 | 2.0
cudnn_attention sdpa | attention | 1 | 0.50 | 2% | 1.0 | 1.0 | 0.50 | 1.0
to_copy vectorized | copies | 1 | 0.10 | 0% |  | 0.1 | 0.00 |
to_copy Memcpy HtoD | copies | 1 | 0.09 | 0% |  |  |  |
"""


def test_the_table_has_the_counts_and_the_floor_of_each_kernel_or_none_if_they_do_not_match():
    table = timeline.slowest(STEP, COUNTED, counts.Card({"float32": 1.0, "bf16": 2.0}, 100.0))
    assert "\n".join(" | ".join(row.values()).rstrip() for row in table) == TABLE.strip()
    many = step(*((place, place + 1, "copies", f"copy{place}") for place in range(30)))
    assert [row["kernel"] for row in timeline.slowest(many, [])] == [f"copy{place}" for place in range(29, 9, -1)]


def test_make_timeline_reads_the_latest_measurement_of_the_script_and_draws(tmp_path, monkeypatch, capsys):
    found, asked = {}, []
    for name, cpu, finished in ("a", True, "4"), ("b", True, "6"), ("c", False, "7"), ("d", True, "5"):
        found[tmp_path / "results" / name] = measurement(name=name, cpu=cpu, finished=finished)
        (tmp_path / "results" / name).mkdir(parents=True)
        timeline.write(tmp_path / "results" / name, TEN, STEP)
    timeline.write(tmp_path / "results" / "a", SIX, STEP | {"ms": 30.0})
    timeline.write(tmp_path / "results" / "a", SIDE.muon, STEP)
    monkeypatch.setattr(timeline, "ROOT", tmp_path)
    monkeypatch.setattr(records, "load", lambda folder: found[folder])
    monkeypatch.setattr(counts, "step", lambda *rung, **how: asked.append((rung[0].file, how)) or COUNTED)
    for words, cpu, said in (
        ([TEN], False, "one step: 20.0 ms"),
        ([SIX], True, "one step: 30.0 ms"),
        ([TEN, "--results", str(tmp_path / "results" / "d")], True, "matmul 12.0 ms, attention 0.5 ms, loss 0.0 ms"),
        ([SIDE.muon], None, "one step: 20.0 ms"),  # cannot be counted
    ):
        monkeypatch.setattr("sys.argv", ["timeline.py", *words])
        timeline.main()
        printed = capsys.readouterr().out
        assert said in printed and "mm nvjet" in printed
        assert re.search(r"copies 0.2 ms, no kernel runs (6.1|16.1) ms", printed)
        assert (tmp_path / printed.splitlines()[-1]).stat().st_size > 1000
        assert asked == ([] if cpu is None else [(words[0], SETTINGS | {"cuda": not cpu})])
        asked.clear()
    for words, said in (
        ([FIVE], "no measurement in results/ has the kernels of speedup_05_compile.py"),
        (["gpt.py"], "gpt.py: expected a script of the ladder"),
        ([SIX, "--results", str(tmp_path / "results" / "d")], "has no kernels of speedup_06_flash_attn.py"),
        ([TEN], "kernels.json: not JSON"),
    ):
        if "JSON" in said:
            (tmp_path / "results" / "b" / "kernels.json").write_text('{"a": ')  # damaged
        monkeypatch.setattr("sys.argv", ["timeline.py", *words])
        with pytest.raises(SystemExit) as end:
            timeline.main()
        error = capsys.readouterr().err.strip()
        assert end.value.code == 2 and said in error and "\n" not in error
    with pytest.raises(ValueError, match="not JSON"):
        timeline.write(tmp_path / "results" / "b", TEN, STEP)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/kernels.json")), ids=lambda path: path.parent.name)
def test_committed_kernels_are_those_of_profiled_scripts_and_small_in_pictures(path):
    data, steps = records.load(path.parent), timeline.read(path.parent)
    assert set(steps) == {script for script, row in data.rows.items() if row["profile"] and row["kind"] != "peer"}
    assert path.stat().st_size < 300_000
    for script, one in steps.items():
        starts = [start for start, *_ in one["kernels"]]
        assert starts == sorted(starts) and 0 <= starts[0] and starts[-1] < 1000 * one["ms"], script
        assert {kind for kind, _ in one["names"]} < set(plots.GROUPS), script
    for name, figure in timeline.pictures(data, steps).items():
        assert len(plots.svg(figure)) < 200_000, name
