"""The model matches GPT-2 in its parameters, initialization and logits, and reproduces a published loss curve.

The logits are compared with `transformers`. Given only the seed of a public run, training reproduces the run's first 50
losses within 0.001. This comparison also tests the initial weights, the order of the data, and the optimizer.
"""

import json
import math

import pytest
import torch
from conftest import MODEL, ROOT, SCRIPTS, load, nano, save_gpt2, since, versions
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

LOADED = [script for script in SCRIPTS if script in {*MODEL, *versions("GPT.from_pretrained")}]


def full_size(script, name="gpt2"):
    """Return (a model of its full size, without values; its number of parameters)."""
    with torch.device("meta"):
        model = load(script).GPT(load(script).MODELS[name])
    return model, sum(p.numel() for p in model.parameters())


def test_all_sizes_are_the_published_ones():
    """With tied weights and no padding, they have the published parameter counts, and heads of size 64."""
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for name, size in published.items():
        model, found = full_size(SCRIPTS[1], name)
        assert found == size and model.config.n_embd == 64 * model.config.n_head and model.config.block_size == 1024


@pytest.mark.parametrize("script", MODEL)
def test_the_initial_weights_are_the_draws_of_the_published_curves(script):
    """The layers are built in the order of the published curves, and then drawn from N(0, 0.02) in the same order."""
    vocabulary, C, expected = 50304 if script in since(7) else 50257, 32, {}
    torch.manual_seed(1337)
    layers = {"transformer.wte": nn.Embedding(vocabulary, C), "transformer.wpe": nn.Embedding(1024, C)}
    sizes = {"ln_1": (), "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C)}
    sizes |= {"ln_2": (), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    for i in range(2):
        layers |= {f"transformer.h.{i}.{n}": nn.Linear(*s) if s else nn.LayerNorm(C) for n, s in sizes.items()}
    layers["transformer.ln_f"] = nn.LayerNorm(C)
    layers["lm_head"] = nn.Linear(C, vocabulary, bias=False)
    for name, layer in layers.items():
        norm, scaled = "ln_" in name, name.endswith("c_proj") and script in since(4)
        first = torch.ones(C) if norm else torch.randn(layer.weight.shape) * 0.02
        expected[f"{name}.weight"] = first / math.sqrt(2 * 2) if scaled else first
        if getattr(layer, "bias", None) is not None:
            expected[f"{name}.bias"] = torch.zeros_like(layer.bias)
    if script != "baseline.py":  # the shared matrix is drawn twice
        expected["transformer.wte.weight"] = expected.pop("lm_head.weight")
    found = dict(nano(script).named_parameters())
    assert list(found) == list(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_rung_04_in_float32_gives_the_published_losses(steps):
    """The published run had 50 steps of 4 sequences of 32 tokens, at a learning rate of 3e-4."""
    published = json.loads((ROOT / "tests" / "data" / "published_curve.json").read_text())["loss"]
    module, losses = load("speedup_04_residual_init.py"), []
    torch.manual_seed(1337)
    model = module.GPT(module.MODELS["gpt2"])
    loader = module.DataLoaderLite(ROOT / "input.txt", batch_size=4, seq_len=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*loader.next_batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(published[:steps], abs=1e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a GPT-2 from transformers whose residual stream is so small that LayerNorm's epsilon matters."""

    def shrink(model):
        for name, p in model.named_parameters():
            if "ln_" not in name and "c_attn" not in name and "c_fc" not in name:
                p *= 0.01

    return save_gpt2(tmp_path_factory.mktemp("gpt2"), shrink)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("script", LOADED)
def test_the_logits_match_transformers(script, checkpoint, ids):
    folder, theirs = checkpoint
    ours = load(script).GPT.from_pretrained(folder)
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids)
    scale = expected.std()
    torch.testing.assert_close(logits[..., :50257] / scale, expected / scale, atol=2e-5, rtol=1e-5)
    wte, head = ours.transformer.wte.weight, ours.lm_head.weight
    assert (
        torch.equal(wte, head)
        and (wte is head) == (script != "baseline.py")
        and len(wte) == (50304 if script in since(7) else 50257)
    )
    torch.testing.assert_close(wte[50257:], wte[:50257].mean(dim=0).expand(len(wte) - 50257, -1))


@pytest.mark.parametrize("script", LOADED)
def test_the_loss_is_the_mean_cross_entropy_also_for_logits_far_below_zero(script, tmp_path, ids):
    """GPT-2's logits are between -30 and -100.

    If the weights of the padded vocabulary ids were zeros, these ids would have logit 0 and nearly all the probability.
    """

    def lower(model):
        model.transformer.wte.weight[:, 0] = 1.0  # with the next line, this adds -60 to every logit
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, -60.0

    folder, theirs = save_gpt2(tmp_path, lower)
    targets = ids.roll(-1, dims=1)
    targets[:, ::2] = torch.arange(2)[:, None]  # include ids 0 and 1, because the loss must not ignore them
    ours = load(script).GPT.from_pretrained(folder)
    with torch.no_grad():
        logits, wanted, loss = ours(ids), theirs(ids).logits, ours(ids, targets).item()
    assert -65 < wanted.mean() < -55 and wanted.std() > 0.3
    assert loss == pytest.approx(F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item(), rel=1e-6)
    expected = F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(expected, abs=math.log(50304 / 50257) * (script in since(7)) + 2e-5)


def test_weights_that_are_not_gpt2s_are_one_clear_error(refused, tmp_path, checkpoint):
    other = [{"vocab_size": 50258}, {"tie_word_embeddings": False}, {"n_positions": 64}]
    other += [{"n_inner": 64}, {"add_cross_attention": True}]
    other += [{"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}]
    other += [{"layer_norm_epsilon": 1e-6}, {"scale_attn_weights": False}]
    short = "--batch-size", 1, "--steps", 1  # if the folder is wrongly accepted
    for number, config in enumerate(other):
        folder = save_gpt2(tmp_path / str(number), **config)[0]
        for script in ("baseline.py", "speedup_07_vocab_pad.py"):
            ((name, value),) = config.items()
            refused(script, "--init-from", folder, *short, says=f"{folder}: not GPT-2: {name} is {value}$")
    folder = save_gpt2(tmp_path / "same", n_inner=4 * 32)[0]  # the default, in a number
    load("baseline.py").GPT.from_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"other": weights.pop("transformer.wpe.weight")}, path, {"format": "pt"})
    refused("baseline.py", "--init-from", folder, says=f"{folder}: not GPT-2: transformer.wpe.weight is missing")
    refused("baseline.py", "--init-from", ROOT / "tests", says=f".*{ROOT / 'tests'}")
