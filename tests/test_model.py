"""The model of every script: its parameters, how they start, what is tied, and what a token can see."""

import math

import pytest
import torch
from conftest import SCRIPTS, load, nano, since
from torch import nn

GPT2_PARAMETERS = {"baseline.py": 163_037_184} | dict.fromkeys(since(1, 7), 124_439_808)
GPT2_PARAMETERS |= dict.fromkeys(since(7), 124_475_904)


@pytest.mark.parametrize("script", SCRIPTS)
def test_gpt2_has_the_published_number_of_parameters(script):
    module = load(script)
    with torch.device("meta"):
        model = module.GPT(module.MODELS["gpt2"])
    assert sum(p.numel() for p in model.parameters()) == GPT2_PARAMETERS[script]


def test_the_larger_models_are_the_published_ones():
    """Their parameters, tied and unpadded; every head of every GPT-2 is 64 wide."""
    module = load("speedup_01_weight_tying.py")
    published = {"gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for name, size in published.items():
        with torch.device("meta"):
            model = module.GPT(module.MODELS[name])
        assert sum(p.numel() for p in model.parameters()) == size
        assert model.config.n_embd == 64 * model.config.n_head


@pytest.mark.parametrize("script", SCRIPTS)
def test_modules_are_built_in_the_order_of_the_published_curves(script):
    names = [name for name, _ in nano(script).named_parameters()]
    block = (
        "ln_1 ln_1 attn.c_attn attn.c_attn attn.c_proj attn.c_proj ln_2 ln_2 mlp.c_fc mlp.c_fc mlp.c_proj mlp.c_proj"
    )
    expected = ["transformer.wte.weight", "transformer.wpe.weight"]
    for layer in range(4):
        for i, part in enumerate(block.split()):
            expected.append(f"transformer.h.{layer}.{part}.{('weight', 'bias')[i % 2]}")
    expected += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert names == expected + ["lm_head.weight"] * (script == "baseline.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_parameter_starts_as_the_contract_says(script):
    model = nano(script)
    for name, p in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            assert torch.equal(p, torch.ones_like(p)), name
        elif name.endswith("bias"):
            assert torch.equal(p, torch.zeros_like(p)), name
        else:
            residual = name.endswith("c_proj.weight") and script in since(4)
            std = 0.02 / math.sqrt(2 * 4) if residual else 0.02
            error = 4 / math.sqrt(2 * p.numel())  # four standard errors of a standard deviation
            assert p.std().item() == pytest.approx(std, rel=error), name
            assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_head_and_the_embedding_are_one_matrix_and_stay_so(script):
    model = nano(script)
    tied = script != "baseline.py"

    def one_storage():
        return model.transformer.wte.weight.data_ptr() == model.lm_head.weight.data_ptr()

    assert one_storage() == tied
    model.load_state_dict(nano(script, seed=1).state_dict())
    assert one_storage() == tied
    model.to(torch.float64)  # like .to(device), it replaces the storage of every parameter
    assert one_storage() == tied
    model.compile()
    assert one_storage() == tied
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()
    ids = torch.zeros(1, 4, dtype=torch.long)
    model.forward(ids, ids).backward()
    assert (model.transformer.wte.weight.grad is model.lm_head.weight.grad) == tied


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_later_token_never_changes_an_earlier_logit(script):
    model, vocabulary = nano(script), 50257
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (2, 16))
    with torch.no_grad():
        before = model(ids)
        changed = ids.clone()
        changed[:, 10] = (changed[:, 10] + 1) % vocabulary
        after = model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert all(not torch.equal(before[:, t], after[:, t]) for t in range(10, 16))  # and every later one


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loss_is_the_mean_cross_entropy_of_the_targets(script):
    model = nano(script)
    nn.init.constant_(model.transformer.ln_f.weight, 10.0)  # logits all alike would hide what is averaged
    torch.manual_seed(0)
    ids, targets = torch.randint(50257, (2, 3, 8))
    logits, loss = model(ids), model(ids, targets)
    assert logits.shape == (3, 8, model.config.vocab_size)
    chosen = torch.log_softmax(logits.double(), dim=-1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5)
