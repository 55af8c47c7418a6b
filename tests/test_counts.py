"""The counted FLOPs, bytes and kernels of a step match formulas, hand calculations and PyTorch's profiler.

The committed counts at B 4 match the current scripts. The lower bound for a step is the sum, over its kernels, of
compute time or memory time, whichever is longer.
"""

import json
import re
import runpy
import sys
from collections import Counter

import floor
import pytest
import render
import roof
import torch
import torch.nn.functional as F
from conftest import ROOT, load
from ladder import read_ladder
from torch.optim.optimizer import register_optimizer_step_post_hook

RUNGS = {rung.number: rung for rung in read_ladder() if rung.part == "rung" and rung.kind != "scale"}
EAGER = ["baseline", "01", "02", "03", "04"]
COMPILED = [pytest.param(number, marks=pytest.mark.slow) for number in ("05", "08", "10")]
B, T = 4, 32


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global counts
    import counts


def listed(function):
    """Return the kernels that counts.Counter records while a function runs."""
    with counts.Counter() as counter:
        function()
    return counter.kernels


@pytest.fixture(scope="module")
def step():
    """Return a function that counts the kernels of one training step of a rung's nano model and caches the result."""
    done = {}

    def step(number, cuda=True):
        if (number, cuda) not in done:
            done[number, cuda] = counts.step(RUNGS[number], "nano", B, T, cuda)
        return done[number, cuda]

    return step


# ---- FLOPs


@pytest.mark.parametrize("number", EAGER + COMPILED)
def test_the_flops_match_the_formula_except_where_stated(number, step):
    config = load("baseline.py").GPTConfig(n_layer=4, n_head=4, n_embd=128)  # nano
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    expected = B * T * roof.flops_per_token(config, T)
    # The formula counts 6 matmuls on all T * T scores. FlashAttention runs 2 matmuls forward and 5 backward, on the
    # T (T + 1) / 2 unmasked scores.
    if "06" <= number <= "99":
        expected += L * B * C * 2 * (7 * T * (T + 1) // 2 - 6 * T * T)
    if "07" <= number <= "99":
        expected += 6 * B * T * C * (50304 - V)
    assert sum(kernel.flops for kernel in step(number)) == expected


@pytest.mark.parametrize("number", EAGER + COMPILED)
def test_products_are_made_in_the_rungs_precision(number, step):
    assert {kernel.precision for kernel in step(number)} == {RUNGS[number].precision, ""}


# ---- bytes, computed by hand


def test_the_bytes_of_a_product():
    x, w = torch.zeros(8, 4), torch.zeros(4, 6, dtype=torch.float32)
    (kernel,) = listed(lambda: x @ w)
    assert kernel == ("aten::mm", "matmul", "float32", 2 * 8 * 4 * 6, 4 * (8 * 4 + 4 * 6 + 8 * 6))


def test_the_bytes_of_the_masked_softmax():
    scores, mask = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bool)
    kernels = listed(lambda: F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1))
    n = scores.numel()
    assert [(kernel.name, kernel.bytes) for kernel in kernels] == [
        ("aten::bitwise_not", 64 + 64),
        ("aten::clone", 2 * n + 2 * n),  # masked_fill runs this kernel and the next
        ("aten::masked_fill_", 2 * n + 64 + 2 * n),
        ("aten::_softmax", 2 * n + 2 * n),
    ]


@pytest.mark.parametrize(("fused", "passes"), [(False, 20), (True, 7)])
def test_the_bytes_of_adamw(fused, passes):
    """Fused AdamW reads 4 values per parameter (weight, gradient and two moments) and writes 3.

    Unfused AdamW runs 8 kernels, which read and write a total of 20 values per parameter.
    """
    weights = [torch.zeros(3, 5, requires_grad=True), torch.zeros(7, requires_grad=True)]
    optimizer = torch.optim.AdamW(weights, fused=fused, foreach=not fused)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kernels = listed(optimizer.step)
    counters = 2 * 4 * 3 if fused else 0  # step counters: one kernel reads and writes them, the other only reads them
    assert sum(kernel.bytes for kernel in kernels) == 4 * passes * (3 * 5 + 7) + counters
    assert len(kernels) == (2 if fused else 8)


def test_the_loss_reads_a_log_probability_of_each_token_forward_and_none_backward():
    logits, targets = torch.zeros(6, 50, requires_grad=True), torch.arange(6)
    kernels = {kernel.name: kernel.bytes for kernel in listed(lambda: F.cross_entropy(logits, targets).backward())}
    assert kernels["aten::nll_loss_forward"] == 6 * 4 + 6 * 8 + 2 * 4
    assert kernels["aten::nll_loss_backward"] == 4 + 6 * 8 + 4 + 6 * 50 * 4


def test_a_lookup_counts_only_its_rows_and_a_view_counts_nothing():
    table, ids = torch.zeros(1000, 8), torch.zeros(2, 3, dtype=torch.int64)
    (kernel,) = listed(lambda: F.embedding(ids, table).view(6, 8).t()[1:])
    assert kernel.bytes == 6 * 8 + 2 * (6 * 8 * 4)
    (kernel,) = listed(lambda: torch.zeros(5, 1).expand(5, 4).neg())[1:]  # reads 5 stored values and writes 20
    assert kernel.bytes == 4 * 5 + 4 * 5 * 4


# ---- kernels


def test_the_kernels_of_a_step_are_those_that_the_profiler_sees(step, monkeypatch):
    """The kernels counted for the baseline's nano step on a CPU match those that PyTorch's profiler records."""
    profiler, steps = torch.profiler.profile(), []

    def end_of_step(*_):
        steps.append(profiler.stop() if steps else profiler.start())

    flags = f"--model nano --device cpu --steps 2 --batch-size {B} --seq-len {T}"
    monkeypatch.setattr(sys, "argv", ["baseline.py", *flags.split()])
    hook = register_optimizer_step_post_hook(end_of_step)
    try:
        runpy.run_path(str(ROOT / "baseline.py"), run_name="__main__")
    finally:
        hook.remove()
        torch.use_deterministic_algorithms(False)
    counted = Counter(kernel.name for kernel in step("baseline", cuda=False))
    # Autograd accumulates two gradients in place, but not for the fake tensors that the counter uses. The test
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
    callers = (
        "cross_entropy_loss embedding_backward layer_norm linear log_softmax masked_fill matmul nll_loss nll_loss_nd"
    )
    callers += " softmax to item _local_scalar_dense"
    others = {name.removeprefix("aten::") for name in others if name.startswith("aten::")}
    assert others - {*views.split(), *callers.split()} == set()


def test_softmax_is_float32_under_autocast_on_a_gpu(step, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    scores = 4 * B * 4 * T * T
    assert Counter(k.bytes for k in step("03") if k.name == "aten::_softmax") == {2 * scores: 4}
    assert Counter(
        k.bytes for k in counts.step(RUNGS["03"], "nano", B, T, cuda=False) if k.name == "aten::_softmax"
    ) == {scores: 4}


# ---- the floor: a lower bound on the step time


def test_the_floor_is_for_each_kernel_the_longer_of_the_two():
    card = floor.Card({"float32": 2.0, "fp16": 8.0}, 1000)  # 2 and 8 TFLOP/s, 1 TB/s
    slow, fast = floor.Kernel("mm", "matmul", "float32", 4 * 10**9, 10**9), floor.Kernel("add", "", "", 0, 3 * 10**9)
    # This card has no bf16 peak, so its fp16 peak is used: 1 ms of FLOPs, 5 ms of memory traffic.
    half = floor.Kernel("mm", "matmul", "bf16", 8 * 10**9, 5 * 10**9)
    assert card.floor_ms({slow: 1}) == (2, 0)
    assert card.floor_ms({slow: 2, fast: 3, half: 1}) == pytest.approx((2 * 2 + 3 * 3 + 5, 3 * 3 + 5))
    assert card.floor_ms({slow._replace(precision="tf32"): 1}) == (2, 0)


def test_a_card_is_one_of_the_table_or_what_roof_py_printed(tmp_path):
    assert floor.Card.read("4090") == floor.Card.read("RTX 4090") == floor.Card.read("rtx 4090")
    roof = tmp_path / "roof.json"
    roof.write_text(json.dumps({"ceilings_tflops": {"float32": 1.5}, "copy_gb_per_s": 20, "matmul": []}))
    for precision in ("float32", "tf32", "bf16"):  # roof.json has only a float32 peak, which is used for all
        assert floor.Card.read(str(roof)).floor_ms({floor.Kernel("mm", "", precision, 3 * 10**9, 0): 1}) == (2, 0)
    for wrong in ({"ceilings_tflops": []}, {"copy_gb_per_s": 0}, {"copy_gb_per_s": None}, {"ceilings_tflops": {}}):
        roof.write_text(json.dumps({"ceilings_tflops": {"float32": 1.5}, "copy_gb_per_s": 20} | wrong))
        with pytest.raises(ValueError, match="does not contain the output of roof.py"):
            floor.Card.read(str(roof))


def test_what_is_printed_and_written_is_what_was_counted(step, monkeypatch, capsys, tmp_path):
    two, out = [RUNGS["baseline"], RUNGS["01"]], tmp_path / "counts.json"
    monkeypatch.setattr(counts, "read_ladder", lambda: two)
    flags = ["--model", "nano", "--seq-len", str(T), "--batch-size", str(B), "2", "--card", "A100", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["counts.py", *flags])
    counts.main()
    read, printed = floor.read_counts(out), capsys.readouterr().out
    steps = {rung.file: Counter(step(rung.number)) for rung in two}
    assert list(read) == [("nano", B, T), ("nano", 2, T)] and read["nano", B, T] == steps
    for row in floor.cells(steps, floor.Card.read("A100")):
        assert re.search(" +".join(map(re.escape, row.values())), printed)


# ---- the pages


def test_the_bytes_that_rung_05_names_are_the_counted_ones():
    steps = floor.read_counts()[render.COUNTED]
    now, before = (floor.totals(steps[RUNGS[number].file])[1] / 1e9 for number in ("05", "04"))
    assert f"moves {now:.0f} GB instead of {before:.0f} GB" in (ROOT / RUNGS["05"].file).read_text()


# ---- the committed counts


@pytest.mark.parametrize("number", EAGER + COMPILED)
def test_the_committed_counts_match_the_scripts(number):
    """A new count matches results/counts.json. The test is skipped if the file is from a different torch version."""
    data = json.loads((ROOT / "results" / "counts.json").read_text())
    if data["torch"] != torch.__version__.partition("+")[0]:
        pytest.skip(f"counted with torch {data['torch']}")
    committed = floor.read_counts()[("gpt2", 4, 1024)][RUNGS[number].file]
    assert Counter(counts.step(RUNGS[number], "gpt2", 4, 1024)) == committed


@pytest.mark.slow
def test_compiled_transformers_computes_every_score_and_otherwise_does_the_work_of_rung_10(step, monkeypatch):
    """The page on transformers explains the difference: the library passes a mask instead of is_causal."""
    ten = load(RUNGS["10"].file)  # peers.py imports this module, and another test may have loaded it with a small nano
    monkeypatch.setitem(ten.MODELS, "nano", ten.GPTConfig(n_layer=4, n_head=4, n_embd=128))
    groups = [
        {kind: floor.totals(Counter(kernels), kind) for kind in ("matmul", "attention", "softmax and loss")}
        for kernels in (step("10"), counts.step(counts.PEER, "nano", B, T))
    ]
    ours, theirs = groups
    config = load("baseline.py").GPTConfig(n_layer=4, n_head=4, n_embd=128)  # nano
    layers, width = config.n_layer, config.n_embd
    assert ours["attention"][0] == layers * 7 * 2 * B * width * T * (T + 1) // 2
    assert theirs["attention"][0] == layers * 7 * 2 * B * width * T * T
    assert theirs["matmul"][0] == pytest.approx(ours["matmul"][0], rel=0.002)  # the vocabulary is not padded
    assert theirs["softmax and loss"][1] == pytest.approx(ours["softmax and loss"][1], rel=0.002)


def test_the_committed_counts_of_rung_10_beside_transformers_are_those_of_the_ladder():
    ((about, steps),) = floor.read_counts(ROOT / "results" / "counts-peer.json").items()
    ten, peer = steps
    assert (ten, peer) == ("speedup_10_fused_adamw.py", counts.PEER.file)
    assert steps[ten] == floor.read_counts()[about][ten]
