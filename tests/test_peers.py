"""The peers, training loops around `transformers`, do the work of rung 10 under the settings that they claim.

They are compared with rung 10 in their losses, gradient norms and optimizer settings.
"""

import functools
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import EAGER, ROOT, load, made_up_gpu
from torch.optim.optimizer import register_optimizer_step_pre_hook

from measure import records


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global peers
    from measure import peers


UPDATES = """
import json, runpy, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook

def say(optimizer, *_):
    groups = sorted(
        [g["weight_decay"], g["lr"], *g["betas"], g["eps"], bool(g["fused"]), sum(p.numel() for p in g["params"])]
        for g in optimizer.param_groups
    )
    squares = sum(p.grad.double().pow(2).sum().item() for g in optimizer.param_groups for p in g["params"])
    print(json.dumps([groups, squares**0.5]))

register_optimizer_step_pre_hook(say)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def updates(run, small, tmp_path_factory):
    """Return a function that runs a script and returns its process.

    The process's `updates` attribute lists the optimizer's settings and the gradient norm for each step.
    """
    folder = tmp_path_factory.mktemp("updates")
    (folder / "updates.py").write_text(UPDATES)

    def call(script, *words, **environment):
        arguments = [*words, "--model", "nano", "--batch-size", 2, "--seq-len", 32, "--steps", 14]
        path = f"{ROOT / 'tests' / 'offline'}{os.pathsep}{small}"
        done = run("updates.py", script, *arguments, folder=folder, PYTHONPATH=path, **environment)
        assert done.returncode == 0, done.stderr
        done.updates = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(done.updates) == len(done.losses) == 14
        return done

    return call


@pytest.fixture(scope="module")
def rung_10(updates, small):
    return updates(small / "speedup_10_fused_adamw.py", **EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_does_the_task_of_rung_10(peer, updates, rung_10, small):
    done = updates(
        small / "measure" / "peers.py", peer, **EAGER if peer == "trainer" else {}
    )  # compiling one peer is enough
    assert done.losses == pytest.approx(rung_10.losses, abs=4e-3)  # padding rows and bf16 change the losses slightly
    assert rung_10.losses[-1] < rung_10.losses[0] - 0.05
    for (theirs, their_norm), (ours, our_norm) in zip(done.updates, rung_10.updates, strict=True):
        ours[1][-1] -= 47 * 32  # the peer has no padding rows; do not count ours in the weight-decay group
        assert theirs[0] == pytest.approx(ours[0]) and theirs[1] == pytest.approx(ours[1])
        assert their_norm == pytest.approx(our_norm, rel=1e-2) == pytest.approx(1, rel=1e-2)  # clipped to 1
        ours[1][-1] += 47 * 32


@pytest.fixture(scope="module")
def watched():
    """Return a function that runs a peer and returns (its calls in order, the dtype of each step's logits).

    The peer runs uncompiled, as if the CPU supported bf16.
    """

    @functools.cache
    def watched(peer):
        rung, events, dtypes = load("speedup_10_fused_adamw.py"), [], []
        build, loader = peers.build, rung.DataLoaderLite
        said = {"clock": time.perf_counter, "next_batch": loader.next_batch, "backward": torch.autograd.backward}

        def saying(name):
            return lambda *args, **options: (events.append(name), said[name](*args, **options))[1]

        def forward(head, inputs, logits):
            events.append("forward")
            dtypes.append(logits.dtype)

        def build_and_look(name):
            model = build(name)
            model.lm_head.register_forward_hook(forward)
            return model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda *args, **options: (events.append("compile"), args[0])[1])
            patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
            patch.setattr(peers, "build", build_and_look)
            patch.setattr(peers, "time", SimpleNamespace(perf_counter=saying("clock")))
            patch.setattr(loader, "next_batch", saying("next_batch"))
            patch.setattr(torch.autograd, "backward", saying("backward"))
            words = f"peers.py {peer} --model nano --batch-size 2 --seq-len 16 --steps 3 --device cpu"
            patch.setattr("sys.argv", words.split())
            hook = register_optimizer_step_pre_hook(lambda *_: events.append("step"))
            try:
                peers.main()
            finally:
                hook.remove()
        return events, dtypes

    return watched


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peers_step_is_timed_with_its_batch(peer, watched):
    steps = "".join(f"{event} " for event in watched(peer)[0] if event != "compile").split("clock ")[1::2]
    # Trainer prefetches one batch, so the first step fetches two. It reads the clock again to log the run at the end.
    if peer == "trainer":
        assert steps.pop() == "" and steps[0].startswith("next_batch ")
        steps[0] = steps[0].removeprefix("next_batch ")
    assert [sorted(step.split()) for step in steps] == 3 * [["backward", "forward", "next_batch", "step"]]


@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_named_compiled_bf16_is_compiled_and_in_bf16(peer, watched):
    events, dtypes = watched(peer)
    assert events.count("compile") == 1
    assert dtypes == 3 * [torch.bfloat16]


def test_the_peers_have_the_attention_that_transformers_takes_by_default():
    from transformers import GPT2Config, GPT2LMHeadModel

    kind = peers.build("nano").config._attn_implementation
    assert kind == GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)])  # V100, T4, A100
@pytest.mark.parametrize("peer", ["compiled", "trainer"])
def test_a_peer_leaves_out_what_a_gpu_only_emulates_as_rung_10_does(peer, capability, monkeypatch, capsys):
    def look(model, loader, steps, device, report, use_bf16):
        report(1.0, 1.0)
        asked.append(use_bf16)

    asked = []
    monkeypatch.setattr(peers, peer, look)
    monkeypatch.setattr("sys.argv", f"peers.py {peer} --model nano --batch-size 1 --seq-len 8".split())
    with made_up_gpu(None, capability):
        peers.main()
    printed = capsys.readouterr().out
    assert asked == [capability >= (8, 0)]
    assert records.precision_used("bf16", printed) == ("bf16" if asked[0] else "float32")


def test_a_peers_clock_waits_for_the_gpu():
    report = peers.Report(torch.device("cuda"), tokens=32)
    with made_up_gpu() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: events.append("clock"))
        report.clock()
    assert events == ["synchronize", "clock"]
