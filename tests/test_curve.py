"""The curve that a public run printed, from its seed alone: weights, data order, model and optimizer are all in it."""

import json

import pytest
import torch
from conftest import ROOT, load


def test_rung_04_in_float32_gives_the_published_losses():
    published = json.loads((ROOT / "tests" / "data" / "published_curve.json").read_text())["loss"]
    module = load("speedup_04_residual_init.py")
    torch.manual_seed(1337)
    model = module.GPT(module.MODELS["gpt2"])
    loader = module.DataLoaderLite(ROOT / "input.txt", batch_size=4, seq_len=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in published:
        optimizer.zero_grad()
        loss = model(*loader.next_batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    worst = max(abs(ours - theirs) for ours, theirs in zip(losses, published, strict=True))
    print(f"largest difference from the published curve: {worst:.1e}")
    assert len(losses) == 50
    assert losses == pytest.approx(published, abs=1e-3)
