"""The counted FLOPs and bytes of a step match formulas and hand calculations, and the committed counts the scripts.

The lower bound for a step is the sum, over its kernels, of compute time or memory time, whichever is longer.
"""

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import BF16_CPU, ROOT, load

from dev.ladder import find, read_ladder
from measure import counts, timeline
from measure.records import flops_per_token

RUNGS = {rung.number: rung for rung in read_ladder() if rung.kind != "scale"}
COMPILED = [pytest.param(name, marks=pytest.mark.slow) for name in "05 06 08 10 fused record peers".split()]
B, T = 4, 32


@pytest.mark.parametrize("number", ["baseline", "01", "02", "03", "04", *COMPILED])
def test_the_counts_match_the_formula_in_the_precision_of_the_rung_and_the_committed_ones(number, monkeypatch):
    peer, rung = number == "peers", RUNGS.get(number, counts.PEER)
    config = load("baseline.py").GPTConfig(n_layer=4, n_head=4, n_embd=128)
    monkeypatch.setitem(load(RUNGS["10"].file).MODELS, "nano", config)  # the peer imports it
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    expected = B * T * flops_per_token(config, T)
    # The formula counts 6 matmuls on all T * T scores. FlashAttention runs 2 matmuls forward and 5 backward, on the
    # T (T + 1) / 2 unmasked scores, or on all of them in the peer, which passes a mask instead of is_causal.
    if number >= "06" and number != "baseline":
        expected += L * B * C * 2 * (7 * (T * T if peer else T * (T + 1) // 2) - 6 * T * T)
    if number >= "07" and number != "baseline" and not peer:
        expected += 6 * B * T * C * (50304 - V)
    kernels = counts.step(rung, "nano", B, T)
    assert sum(kernel.flops for kernel in kernels) == expected
    assert {kernel.precision for kernel in kernels} == {rung.precision, ""}
    name = "counts-peer" if peer else "counts-beyond" if number > "baseline" else "counts"
    path, about = ROOT / "results" / f"{name}.json", ("gpt2", 16 if peer else 4, 1024)
    if counts.counted_with(path) != torch.__version__.partition("+")[0]:
        pytest.skip(f"{path.name} was counted with another version of torch")
    assert Counter(counts.step(rung, *about)) == counts.read_counts(path)[about][rung.file]


@pytest.mark.slow
def test_logits_of_more_than_a_billion_elements_are_counted_whole():
    """Inductor's own estimate stops at 10^9 elements."""
    kernels, logits = counts.step(RUNGS["10"], "nano", 48, 1024), 48 * 1024 * 50304 * 2  # bytes
    assert [round(k.bytes / logits) for k in kernels if k.bytes > 10**9] == [1, 1, 2, 1, 1]


def test_the_bytes_of_a_kernel_are_those_that_it_reads_and_writes():
    def listed(function):
        with counts.Recorder() as recorder:
            function()
        return recorder.kernels

    scores, mask = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bool)
    kernels = listed(lambda: F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1))
    n = scores.numel()  # the kernels: not, clone, masked_fill_, softmax
    assert [kernel.bytes for kernel in kernels] == [64 + 64, 2 * n + 2 * n, 2 * n + 64 + 2 * n, 2 * n + 2 * n]
    x, w = torch.zeros(8, 4), torch.zeros(4, 6)
    (kernel,) = listed(lambda: x @ w)
    assert kernel == ("aten::mm", "matmul", "float32", 2 * 8 * 4 * 6, 4 * (8 * 4 + 4 * 6 + 8 * 6))


# ---- the floor, a lower bound on the step time, and the tables

SLOW, FAST = counts.Kernel("mm", "matmul", "float32", 4 * 10**9, 10**9), counts.Kernel("add", "", "", 0, 3 * 10**9)
HALF = counts.Kernel("mm", "matmul", "bf16", 8 * 10**9, 5 * 10**9)


def test_the_lower_bound_sums_the_longer_of_compute_and_memory_time_per_kernel(tmp_path):
    roof = {"copy_gb_per_s": 1000, "matmul": [{"precision": "fp16", "tflops": 8}, {"precision": "fp8", "tflops": None}]}
    roof["matmul"] += [{"precision": "float32", "tflops": tflops} for tflops in (1.2, 2.0, 1.5)]
    (tmp_path / "roof.json").write_text(json.dumps(roof))
    card = counts.Card.read(str(tmp_path / "roof.json"))
    assert card == counts.Card({"float32": 2.0, "fp16": 8.0}, 1000)  # 2 and 8 TFLOP/s, 1 TB/s
    # This card has no bf16 peak, so its fp16 peak is used: 1 ms of FLOPs, 5 ms of memory traffic.
    assert card.floor_ms({SLOW: 1}) == card.floor_ms({SLOW._replace(precision="tf32"): 1}) == (2, 0)
    assert card.floor_ms({SLOW: 2, FAST: 3, HALF: 1}) == pytest.approx((2 * 2 + 3 * 3 + 5, 3 * 3 + 5))
    steps = {"a.py": {SLOW: 2}, "b.py": {FAST: 1}, "c.py": {HALF: 1}}
    first, *others = counts.beside({"a.py": 2008.0, "b.py": 6.04, "c.py": 4.0}, steps, card)
    assert list(first.values()) == ["a.py", "2,008", "4.0", "502.00", "", ""]  # ms, floor, ratio, gains over previous
    assert list(others[0].values()) == ["b.py", "6", "3.0", "2.01", "332.45×", "1.33×"]
    assert list(others[1].values()) == ["c.py", "4", "5.0", "0.80", "1.51×", "0.60×"]


def test_what_is_printed_and_written_is_what_was_counted(monkeypatch, capsys, tmp_path):
    def count(rung, model, batch_size, seq_len):
        return batch_size * [HALF] + seq_len * [FAST] + [dear] * (rung.number == "01")

    def call(*words):
        monkeypatch.setattr("sys.argv", ["counts.py", "--model", "gpt2-xl", *map(str, words), "--out", str(out)])
        counts.main()
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        return [row for row in rows if row[:1] in ([base], [one])], counts.read_counts(out)

    monkeypatch.setattr(counts, "step", count)
    dear, out = SLOW._replace(flops=195 * 10**9), tmp_path / "counts.json"
    base, one = RUNGS["baseline"].file, RUNGS["01"].file
    rows, written = call("--batch-size", 2, 3, "--seq-len", 3, "--card", "A100")
    # TFLOP, GB, kernels, ms, memory-bound share: a kernel HALF takes 5/1.555 ms on an A100, FAST 3/1.555, dear 10 ms.
    assert rows[0::2] == [[base, "0.0160", "19.0", "5", "12.2", "100%"], [base, "0.0240", "24.0", "6", "15.4", "100%"]]
    assert rows[1::2] == [[one, "0.211", "20.0", "6", "22.2", "55%"], [one, "0.219", "25.0", "7", "25.4", "61%"]]
    assert list(written) == [("gpt2-xl", 2, 3), ("gpt2-xl", 3, 3)]
    assert list(written["gpt2-xl", 3, 3]) == [rung.file for rung in RUNGS.values() if rung.part == "rung"]
    assert written["gpt2-xl", 3, 3][one] == {HALF: 3, FAST: 3, dear: 1}
    assert list(call("--only", "peers", "10")[1]["gpt2-xl", 4, 1024]) == [RUNGS["10"].file, "measure/peers.py compiled"]


def test_the_data_sheets_agree_with_cores_clocks_and_memory_buses():
    """NVIDIA's other tables: cores, boost clock in GHz, bits of the bus, Gbit/s per pin; fp16's factor over float32."""
    known = {"T4": (2560, 1.59, 256, 10, 8), "RTX 3080": (8704, 1.71, 320, 19, 2), "L4": (7424, 2.04, 192, 12.5, 4)}
    known |= {"RTX 3090": (10496, 1.695, 384, 19.5, 2), "RTX 4090": (16384, 2.52, 384, 21, 2)}
    known |= {"RTX 5090": (21760, 2.407, 512, 28, 2), "A100": (6912, 1.41, 5120, 2.43, 16)}
    known |= {"H100": (16896, 1.98, 5120, 5.23, 14.8), "H200": (16896, 1.98, 6144, 6.25, 14.8)}
    for name, (cores, ghz, bits, gbit, factor) in known.items():
        card = counts.Card.read(name.lower().removeprefix("rtx "))
        found, rate = card.tflops | {"GB/s": card.gb_per_s}, 2 * cores * ghz / 1000
        assert [found["float32"], found["fp16"]] == pytest.approx([rate, factor * rate], rel=0.01), name
        assert found.get("bf16", found["fp16"]) == found["fp16"], name
        assert found["GB/s"] == pytest.approx(bits * gbit / 8, rel=0.01), name
    with pytest.raises(ValueError, match="--card A10: "):  # not the A100
        counts.Card.read("A10")


@pytest.mark.skipif(not BF16_CPU, reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("number", ["03", pytest.param("ddp", marks=pytest.mark.slow)])
def test_the_counts_for_a_cpu_have_the_kernels_that_ran_on_one(number):
    rung = find(number)
    calls = timeline.calls(timeline.read(ROOT / "results" / "cpu-amd-epyc-2026-11-29-2")[rung.file])
    if number == "ddp":
        counts.step(rung, "nano", 4, 128)  # must not leave its schedules for the CPU
    counted = counts.step(rung, "nano", 4, 128, cuda=False)
    ran = Counter(timeline.key(name) for name, *_ in calls)
    both = ran.items() & Counter(timeline.key(kernel.name) for kernel in counted).items()
    matched = sum(long for name, _, _, long in calls if timeline.key(name) in dict(both))
    assert matched > 0.97 * sum(long for *_, long in calls), ran.keys() - dict(both)
