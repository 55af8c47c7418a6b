"""The peers, training loops around `transformers`, do the work of rung 10 under the settings that they claim."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import load, made_up_gpu, watch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from measure import records

TEN = "speedup_10_fused_adamw.py"
SIZE = "--model nano --batch-size 2 --seq-len 16 --steps 13".split()


@pytest.fixture(scope="module", autouse=True)
def rung_10():
    """Return the steps of rung 10. Import at the first test, not at collection, what takes seconds to import."""
    global peers
    from measure import peers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
        return watch(TEN, *SIZE)


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_does_and_times_whole_steps_of_rung_10_compiled_in_bf16(peer, rung_10, monkeypatch, capsys):
    def saying(name, call):
        return lambda *args, **options: (events.append(name), call(*args, **options))[1]

    def look(head, inputs, logits):
        events.append("forward")
        assert logits.dtype == torch.bfloat16 and torch.get_float32_matmul_precision() == "high"  # TF32 on a GPU

    def build_and_look(name):
        model = build(name)
        model.lm_head.register_forward_hook(look)
        assert model.config._attn_implementation == "sdpa"  # as transformers takes by default
        return model

    def compile_model(model, **options):
        events.append("compile")
        plain = {"backend": "inductor", "mode": "default", "fullgraph": False}
        assert not {name: value for name, value in options.items() if value not in (None, plain.get(name))}
        assert torch._dynamo.config.assume_static_by_default  # no symbolic shapes
        return model

    def look_at_update(optimizer, *_):
        events.append("step")
        norm = torch.stack([p.grad.norm() for group in optimizer.param_groups for p in group["params"]]).norm().item()
        groups = [[sum(p.numel() for p in group["params"]), group] for group in optimizer.param_groups]
        updates.append((norm, [[size, *(group[name] for name in names)] for size, group in groups]))

    loader, events, updates = load(TEN).DataLoaderLite, [], []
    build, names = peers.build, ("lr", "weight_decay", "betas", "eps", "fused", "amsgrad", "maximize")
    # Step i takes (i + 1) / 4 s, and printing takes 100 s.
    clock = itertools.accumulate(itertools.chain.from_iterable((100, (i + 1) / 4) for i in range(99)))
    monkeypatch.setattr(torch, "compile", compile_model)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(peers, "build", build_and_look)
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=saying("clock", lambda: next(clock))))
    monkeypatch.setattr(loader, "next_batch", saying("next_batch", loader.next_batch))
    monkeypatch.setattr(torch.autograd, "backward", saying("backward", torch.autograd.backward))
    monkeypatch.setattr("sys.argv", ["peers.py", peer, *SIZE, "--device", "cpu"])
    with register_optimizer_step_pre_hook(look_at_update):
        peers.main()
    assert events.count("compile") == 1
    steps = "".join(f"{event} " for event in events if event != "compile").split("clock ")[1::2]
    # Trainer prefetches one batch, so the first step fetches two. It reads the clock again to log the run at the end.
    if peer == "trainer":
        assert steps.pop() == "" and steps[0].startswith("next_batch ")
        steps[0] = steps[0].removeprefix("next_batch ")
    assert [sorted(step.split()) for step in steps] == 13 * [["backward", "forward", "next_batch", "step"]]
    printed = capsys.readouterr().out
    run = records.parse(printed, steps=13)
    assert run["step_ms"] == [250.0 * (i + 1) for i in range(13)] and "|        128 tok/s" in printed  # 32 / 0.25
    assert "median of steps 6-12: 2500.00 ms, 13 tok/s" in printed and "| B 2 T 16\n" in printed
    assert run["losses"] == pytest.approx([step.losses[0] for step in rung_10], abs=4e-3)  # no padding rows, and bf16
    for (norm, theirs), step in zip(updates, rung_10, strict=True):
        assert norm == pytest.approx(step.norm, rel=1e-2) == pytest.approx(1, rel=1e-2)  # clipped to 1
        matrices = sum(p.numel() for p in step.before.values() if p.dim() == 2) - 47 * 32  # without padding rows
        sizes = matrices, sum(p.numel() for p in step.before.values() if p.dim() == 1)
        ours = [[size, *(group[name] for name in names)] for size, group in zip(sizes, step.groups, strict=True)]
        assert [group[1] for group in theirs] == pytest.approx([group[1] for group in ours])
        assert [[size, *others] for size, _, *others in theirs] == [[size, *others] for size, _, *others in ours]


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_waits_for_its_gpu_and_leaves_out_what_the_gpu_only_emulates_as_rung_10_does(peer, monkeypatch, capsys):
    def look(model, loader, steps, device, report, use_bf16):
        report.clock()
        report(1.0, 1.0)
        asked.append((device.type, steps, use_bf16))

    asked = []
    monkeypatch.setattr(peers, peer, look)
    monkeypatch.setattr("sys.argv", f"peers.py {peer} --model nano --batch-size 1 --seq-len 8".split())
    for capability, precision in ((7, 5), "float32"), ((8, 0), "bf16"):  # T4, A100
        with made_up_gpu(None, capability) as events:
            monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: events.append("clock")))  # noqa: B023
            peers.main()
        assert asked.pop() == ("cuda", 50, precision == "bf16") and events == ["synchronize", "clock"]
        assert records.precision_used("bf16", capsys.readouterr().out) == precision
