"""The counted FLOPs, bytes and kernels of a step match formulas, hand calculations and PyTorch's profiler.

The committed counts at B 4 match the current scripts. The lower bound for a step is the sum, over its kernels, of
compute time or memory time, whichever is longer.
"""

import functools
import json
import runpy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, load
from torch.optim.optimizer import register_optimizer_step_post_hook

from dev.ladder import read_ladder
from measure import counts
from measure.records import flops_per_token

RUNGS = {rung.number: rung for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale"}
NUMBERS = "baseline 01 02 03 04".split()
NUMBERS += [pytest.param(number, marks=pytest.mark.slow) for number in ("05", "08", "10")]  # compiled
B, T = 4, 32


def listed(function):
    """Return the kernels that a function runs."""
    with counts.Recorder() as recorder:
        function()
    return recorder.kernels


@functools.cache
def step(number, cuda=True):
    """Return the kernels of one training step of a rung's nano model."""
    return counts.step(RUNGS[number], "nano", B, T, cuda)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_flops_match_the_formula_in_the_precision_of_the_rung(number):
    config = load("baseline.py").GPTConfig(n_layer=4, n_head=4, n_embd=128)  # nano
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    expected = B * T * flops_per_token(config, T)
    # The formula counts 6 matmuls on all T * T scores. FlashAttention runs 2 matmuls forward and 5 backward, on the
    # T (T + 1) / 2 unmasked scores.
    if "06" <= number <= "99":
        expected += L * B * C * 2 * (7 * T * (T + 1) // 2 - 6 * T * T)
    if "07" <= number <= "99":
        expected += 6 * B * T * C * (50304 - V)
    assert sum(kernel.flops for kernel in step(number)) == expected
    assert {kernel.precision for kernel in step(number)} == {RUNGS[number].precision, ""}


# ---- bytes, computed by hand


def test_the_bytes_of_the_masked_softmax_and_of_a_product():
    scores, mask = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bool)
    kernels = listed(lambda: F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1))
    n = scores.numel()  # the kernels: not, clone, masked_fill_, softmax
    assert [kernel.bytes for kernel in kernels] == [64 + 64, 2 * n + 2 * n, 2 * n + 64 + 2 * n, 2 * n + 2 * n]
    x, w = torch.zeros(8, 4), torch.zeros(4, 6)
    (kernel,) = listed(lambda: x @ w)
    assert kernel == ("aten::mm", "matmul", "float32", 2 * 8 * 4 * 6, 4 * (8 * 4 + 4 * 6 + 8 * 6))


@pytest.mark.parametrize(("fused", "passes"), [(False, 20), (True, 7)])
def test_the_bytes_of_adamw(fused, passes):
    """Fused AdamW reads 4 values per parameter and writes 3. The 8 kernels of unfused AdamW read and write 20."""
    weights = [torch.zeros(3, 5, requires_grad=True), torch.zeros(7, requires_grad=True)]
    optimizer = torch.optim.AdamW(weights, fused=fused, foreach=not fused)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kernels = listed(optimizer.step)
    counters = 2 * 4 * 3 if fused else 0  # step counters: one kernel reads and writes them, the other only reads them
    assert sum(kernel.bytes for kernel in kernels) == 4 * passes * (3 * 5 + 7) + counters
    assert len(kernels) == (2 if fused else 8)


def test_only_the_rows_and_values_that_are_read_count():
    logits, targets = torch.zeros(6, 50, requires_grad=True), torch.arange(6)
    kernels = {kernel.name: kernel.bytes for kernel in listed(lambda: F.cross_entropy(logits, targets).backward())}
    assert kernels["aten::nll_loss_forward"] == 6 * 4 + 6 * 8 + 2 * 4
    assert kernels["aten::nll_loss_backward"] == 4 + 6 * 8 + 4 + 6 * 50 * 4
    table, ids = torch.zeros(1000, 8), torch.zeros(2, 3, dtype=torch.int64)
    (kernel,) = listed(lambda: F.embedding(ids, table).view(6, 8).t()[1:])  # the views count nothing
    assert kernel.bytes == 6 * 8 + 2 * (6 * 8 * 4)
    (kernel,) = listed(lambda: torch.zeros(5, 1).expand(5, 4).neg())[1:]  # reads 5 stored values and writes 20
    assert kernel.bytes == 4 * 5 + 4 * 5 * 4


# ---- kernels


def test_the_kernels_of_a_step_are_those_that_the_profiler_sees(monkeypatch):
    """The kernels counted for the baseline's nano step on a CPU match those that PyTorch's profiler records."""
    profiler, steps = torch.profiler.profile(), []

    def end_of_step(*_):
        steps.append(profiler.stop() if steps else profiler.start())

    flags = f"--model nano --device cpu --steps 2 --batch-size {B} --seq-len {T}"
    monkeypatch.setattr("sys.argv", ["baseline.py", *flags.split()])
    with register_optimizer_step_post_hook(end_of_step):
        runpy.run_path(str(ROOT / "baseline.py"), run_name="__main__")
    torch.use_deterministic_algorithms(False)
    counted = Counter(kernel.name for kernel in step("baseline", cuda=False))
    # Autograd accumulates two gradients in place, but not for the fake tensors that the program uses. The test
    # therefore treats add_ as add.
    counted["aten::add"] += counted.pop("aten::add_")
    seen, others = Counter(), set()
    for event in profiler.events():
        names = []  # the operation and its callers; skip it if a caller is counted
        while event:
            names.append("aten::add" if event.name == "aten::add_" else event.name)
            event = event.cpu_parent
        if not counted.keys() & set(names[1:]):
            (seen.update if names[0] in counted else others.update)(names[:1])
    assert seen == counted
    views = "_unsafe_view as_strided detach expand permute reshape select slice t transpose unbind view lift_fresh"
    callers = "cross_entropy_loss embedding_backward layer_norm linear log_softmax masked_fill matmul nll_loss"
    callers += " nll_loss_nd softmax to item _local_scalar_dense"
    others = {name.removeprefix("aten::") for name in others if name.startswith("aten::")}
    assert others - {*views.split(), *callers.split()} == set()


def test_softmax_is_float32_under_autocast_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    scores = 4 * B * 4 * T * T
    for cuda, size in (True, 2 * scores), (False, scores):
        assert Counter(k.bytes for k in step("03", cuda) if k.name == "aten::_softmax") == {size: 4}


# ---- the floor: a lower bound on the step time


def test_the_floor_is_for_each_kernel_the_longer_of_the_two():
    card = counts.Card({"float32": 2.0, "fp16": 8.0}, 1000)  # 2 and 8 TFLOP/s, 1 TB/s
    slow, fast = counts.Kernel("mm", "matmul", "float32", 4 * 10**9, 10**9), counts.Kernel("add", "", "", 0, 3 * 10**9)
    # This card has no bf16 peak, so its fp16 peak is used: 1 ms of FLOPs, 5 ms of memory traffic.
    half = counts.Kernel("mm", "matmul", "bf16", 8 * 10**9, 5 * 10**9)
    assert card.floor_ms({slow: 1}) == card.floor_ms({slow._replace(precision="tf32"): 1}) == (2, 0)
    assert card.floor_ms({slow: 2, fast: 3, half: 1}) == pytest.approx((2 * 2 + 3 * 3 + 5, 3 * 3 + 5))
    rows = counts.beside({"a.py": 8.0, "b.py": 6.0}, {"a.py": {slow: 2}, "b.py": {fast: 1}}, card)
    assert [list(row.values()) for row in rows] == [
        ["a.py", "8", "4.0", "2.00", "", ""],
        ["b.py", "6", "3.0", "2.00", "1.33×", "1.33×"],
    ]


def test_a_card_is_one_of_the_table_or_what_roof_printed(tmp_path):
    assert counts.Card.read("4090") == counts.Card.read("RTX 4090") == counts.Card.read("rtx 4090")
    roof, good = tmp_path / "roof.json", {"copy_gb_per_s": 20}
    good["matmul"] = [{"precision": "float32", "tflops": 1.2}, {"precision": "float32", "tflops": 1.5}]
    good["matmul"] += [{"precision": "fp8", "tflops": None}]
    roof.write_text(json.dumps(good))
    assert counts.Card.read(str(roof)) == counts.Card({"float32": 1.5}, 20)
    for wrong in ({"matmul": []}, {"matmul": None}, {"copy_gb_per_s": 0}, {"copy_gb_per_s": None}):
        roof.write_text(json.dumps(good | wrong))
        with pytest.raises(ValueError, match="does not contain the output of measure.roof"):
            counts.Card.read(str(roof))


def test_what_is_printed_and_written_is_what_was_counted(monkeypatch, capsys, tmp_path):
    two, out = [RUNGS["baseline"], RUNGS["01"]], tmp_path / "counts.json"
    monkeypatch.setattr(counts, "read_ladder", lambda: two)
    flags = f"--model nano --seq-len {T} --batch-size {B} 2 --card A100 --out {out}"
    monkeypatch.setattr("sys.argv", ["counts.py", *flags.split()])
    counts.main()
    read, printed = counts.read_counts(out), capsys.readouterr().out
    steps = {rung.file: Counter(step(rung.number)) for rung in two}
    assert list(read) == [("nano", B, T), ("nano", 2, T)] and read["nano", B, T] == steps
    lines = [line.split() for line in printed.splitlines()]
    assert all(list(row.values()) in lines for row in counts.cells(steps, counts.Card.read("A100")))


# ---- the committed counts


def test_the_bytes_that_rung_05_names_are_the_counted_ones():
    steps = counts.read_counts()["gpt2", 4, 1024]
    now, before = (counts.totals(steps[RUNGS[number].file])[1] / 1e9 for number in ("05", "04"))
    assert f"moves {now:.0f} GB instead of {before:.0f} GB" in (ROOT / RUNGS["05"].file).read_text()


@pytest.mark.parametrize("number", NUMBERS)
def test_the_committed_counts_match_the_scripts(number):
    """A new count matches results/counts.json. The test is skipped if the file is from a different torch version."""
    if counts.counted_with() != torch.__version__.partition("+")[0]:
        pytest.skip(f"counted with torch {counts.counted_with()}")
    committed = counts.read_counts()["gpt2", 4, 1024][RUNGS[number].file]
    assert Counter(counts.step(RUNGS[number], "gpt2", 4, 1024)) == committed


@pytest.mark.slow
def test_compiled_transformers_computes_every_score_and_otherwise_does_the_work_of_rung_10(monkeypatch):
    """The page on transformers explains the difference: the library passes a mask instead of is_causal."""
    ten = load(RUNGS["10"].file)  # peers.py imports this module, and another test may have loaded it with a small nano
    config = ten.GPTConfig(n_layer=4, n_head=4, n_embd=128)
    monkeypatch.setitem(ten.MODELS, "nano", config)
    kinds, theirs = ("matmul", "attention", "softmax and loss"), counts.step(counts.PEER, "nano", B, T)
    ours, theirs = ({kind: counts.totals(Counter(one), kind) for kind in kinds} for one in (step("10"), theirs))
    assert ours["attention"][0] == config.n_layer * 7 * 2 * B * config.n_embd * T * (T + 1) // 2
    assert theirs["attention"][0] == config.n_layer * 7 * 2 * B * config.n_embd * T * T
    assert theirs["matmul"][0] == pytest.approx(ours["matmul"][0], rel=0.002)  # the vocabulary is not padded
    assert theirs["softmax and loss"][1] == pytest.approx(ours["softmax and loss"][1], rel=0.002)


def test_the_committed_counts_of_rung_10_beside_transformers_are_those_of_the_ladder():
    ((about, steps),) = counts.read_counts(ROOT / "results" / "counts-peer.json").items()
    assert steps[RUNGS["10"].file] == counts.read_counts()[about][RUNGS["10"].file]
