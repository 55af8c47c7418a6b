"""The model matches GPT-2 in its parameters, initialization and logits, and reproduces a published loss curve.

The logits are compared with `transformers`. Given only the seed of a public run, training reproduces the run's first 50
losses within 0.001. This comparison also tests the initial weights, the order of the data, and the optimizer.
"""

import json
import math

import pytest
import torch
from conftest import MODEL, ROOT, SCRIPTS, STEP, load, nano, play, save_gpt2, since, versions
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOADED = [script for script in SCRIPTS if script in {*MODEL, *versions("GPT.from_pretrained")}]
GPT2_PARAMETERS = {"baseline.py": 163_037_184} | dict.fromkeys(since(1, 7), 124_439_808)
GPT2_PARAMETERS |= dict.fromkeys(since(7), 124_475_904)


@pytest.mark.parametrize("script", MODEL)
def test_gpt2_has_the_published_number_of_parameters(script):
    module = load(script)
    with torch.device("meta"):
        model = module.GPT(module.MODELS["gpt2"])
    assert sum(p.numel() for p in model.parameters()) == GPT2_PARAMETERS[script]


def test_the_larger_models_are_the_published_ones():
    """With tied weights and no padding, the larger models have the published parameter counts and heads of size 64."""
    module = load("speedup_01_weight_tying.py")
    published = {"gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for name, size in published.items():
        with torch.device("meta"):
            model = module.GPT(module.MODELS[name])
        assert sum(p.numel() for p in model.parameters()) == size
        assert model.config.n_embd == 64 * model.config.n_head


@pytest.mark.parametrize("script", MODEL)
def test_modules_are_built_in_the_order_of_the_published_curves(script):
    names = [name for name, _ in nano(script).named_parameters()]
    block = (
        "ln_1 ln_1 attn.c_attn attn.c_attn attn.c_proj attn.c_proj ln_2 ln_2 mlp.c_fc mlp.c_fc mlp.c_proj mlp.c_proj"
    )
    expected = ["transformer.wte.weight", "transformer.wpe.weight"]
    for layer in range(2):
        for i, part in enumerate(block.split()):
            expected.append(f"transformer.h.{layer}.{part}.{('weight', 'bias')[i % 2]}")
    expected += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert names == expected + ["lm_head.weight"] * (script == "baseline.py")


@pytest.mark.parametrize("script", MODEL)
def test_every_parameter_starts_as_the_contract_says(script):
    model = nano(script)
    for name, p in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            assert torch.equal(p, torch.ones_like(p)), name
        elif name.endswith("bias"):
            assert torch.equal(p, torch.zeros_like(p)), name
        else:
            residual = name.endswith("c_proj.weight") and script in since(4)
            std = 0.02 / math.sqrt(2 * 2) if residual else 0.02
            error = 4 / math.sqrt(2 * p.numel())  # four standard errors of the estimated standard deviation
            assert p.std().item() == pytest.approx(std, rel=error), name
            assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name


@pytest.mark.parametrize("script", MODEL)
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


@pytest.mark.parametrize("script", MODEL)
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
    assert all(not torch.equal(before[:, t], after[:, t]) for t in range(10, 16))  # every later logit changes


@pytest.mark.parametrize("script", since(6, 8))  # all versions of the model that use flash attention
def test_flash_attention_is_given_no_matrix_of_tokens_by_tokens(script):
    """Attention creates neither T × T scores nor a T × T mask. With a mask, PyTorch would use a slower kernel."""
    T, sizes = 256, []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            out = call(*args, **kwargs or {})
            sizes.extend(tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
            return out

    attention = load(script).CausalSelfAttention(load(script).GPTConfig(n_head=2, n_embd=32))
    with Sizes():
        attention(torch.randn(1, T, 32))
    assert 3 * 32 * T <= max(sizes) < T * T


@pytest.mark.parametrize("script", MODEL)
def test_the_loss_is_the_mean_cross_entropy_of_the_targets(script):
    model = nano(script)
    # Spread the logits: at initialization they are nearly equal, which would hide errors in the averaging.
    nn.init.constant_(model.transformer.ln_f.weight, 10.0)
    torch.manual_seed(0)
    ids, targets = torch.randint(50257, (2, 3, 8))
    targets[:, ::2] = torch.arange(3)[:, None]  # include ids 0 to 2, because the loss must not ignore them
    logits, loss = model(ids), model(ids, targets)
    assert logits.shape == (3, 8, model.config.vocab_size)
    chosen = torch.log_softmax(logits.double(), dim=-1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


@pytest.fixture(scope="module")
def first_losses():
    """Return a function that computes the first losses of rung 04 in float32 on the batches of the published curve."""
    module = load("speedup_04_residual_init.py")
    torch.manual_seed(1337)
    model = module.GPT(module.MODELS["gpt2"])
    loader = module.DataLoaderLite(ROOT / "input.txt", batch_size=4, seq_len=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []

    def first(number):
        while len(losses) < number:
            optimizer.zero_grad()
            loss = model(*loader.next_batch())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[:number]

    return first


@pytest.mark.parametrize("number", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_rung_04_in_float32_gives_the_published_losses(first_losses, number):
    published = json.loads((ROOT / "tests" / "data" / "published_curve.json").read_text())["loss"]
    assert len(published) == 50
    assert first_losses(number) == pytest.approx(published[:number], abs=1e-3)


# Weights from a folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("script", LOADED)
def test_the_logits_match_transformers(script, checkpoint, ids):
    folder, theirs = checkpoint
    ours = load(script).GPT.from_pretrained(folder)
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids)
    assert expected.std() > 0.3  # equal logits would make the comparison meaningless
    torch.testing.assert_close(logits[..., :50257], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("script", LOADED)
def test_the_head_is_the_embedding(script, checkpoint):
    model = load(script).GPT.from_pretrained(checkpoint[0])
    wte, head = model.transformer.wte.weight, model.lm_head.weight
    assert torch.equal(wte, head)
    assert (wte.data_ptr() == head.data_ptr()) == (script != "baseline.py")  # baseline.py keeps a separate head


@pytest.mark.parametrize("script", [SCRIPTS[7]])
def test_the_padding_rows_are_the_mean_of_the_others(script, checkpoint):
    wte = load(script).GPT.from_pretrained(checkpoint[0]).transformer.wte.weight
    assert wte.shape == (50304, 32)
    torch.testing.assert_close(wte[50257:], wte[:50257].mean(dim=0).expand(47, -1))


@pytest.mark.parametrize("script", LOADED)
def test_the_loss_is_right_if_logits_are_far_below_zero_like_gpt2s(script, tmp_path, ids):
    """The loss is correct for logits as low as GPT-2's, which are between -30 and -100.

    If the weights of the padded vocabulary ids were zeros, these ids would have logit 0 and nearly all the probability.
    """

    def lower(model):
        model.transformer.wte.weight[:, 0] = 1.0  # with the next line, this adds -60 to every logit
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, -60.0

    folder, theirs = save_gpt2(tmp_path, lower)
    targets = ids.roll(-1, dims=1)
    with torch.no_grad():
        logits = theirs(ids).logits
        assert -65 < logits.mean() < -55
        expected = F.cross_entropy(logits.view(-1, 50257), targets.view(-1)).item()
        loss = load(script).GPT.from_pretrained(folder)(ids, targets).item()
    assert loss == pytest.approx(expected, abs=math.log(50304 / 50257) + 1e-4)


def test_a_run_starts_from_the_folder_and_takes_its_shape(checkpoint):
    printed = play("speedup_04_residual_init.py", "--init-from", checkpoint[0], "--steps", 1, "--batch-size", 1)
    size = sum(p.numel() for p in checkpoint[1].parameters())
    assert f" {checkpoint[0]} {size:,} parameters | B 1 T 1024" in printed
    assert abs(float(STEP.search(printed)["loss"]) - math.log(50257)) > 0.1  # random weights would start at this loss


def test_a_folder_with_other_or_no_weights_is_one_clear_error(refused, tmp_path):
    folder, _ = save_gpt2(tmp_path / "gpt2")
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"other": weights.pop("transformer.wpe.weight")}, path, {"format": "pt"})
    refused("baseline.py", "--init-from", folder, says=f"{folder}: not GPT-2: transformer.wpe.weight is missing")
    path.unlink()
    refused("baseline.py", "--init-from", folder, says=f".*{folder}")


def test_weights_that_do_not_fit_are_one_clear_error(refused, tmp_path, checkpoint):
    other = [{"vocab_size": 50258}, {"tie_word_embeddings": False}, {"n_positions": 64}]
    other += [{"n_inner": 64}, {"add_cross_attention": True}]
    other += [{"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}]
    other += [{"layer_norm_epsilon": 1e-6}, {"scale_attn_weights": False}]
    for number, config in enumerate(other):
        folder = save_gpt2(tmp_path / str(number), **config)[0]
        for script in ("baseline.py", "speedup_07_vocab_pad.py"):
            # If the folder is wrongly accepted, these options keep the run short.
            words = "--init-from", folder, "--batch-size", 1, "--steps", 1
            ((name, value),) = config.items()
            refused(script, *words, says=f"{folder}: not GPT-2: {name} is {value}$")
    load("baseline.py").GPT.from_pretrained(save_gpt2(tmp_path / "same", n_inner=4 * 32)[0])  # the default, in a number
    refused("baseline.py", "--init-from", ROOT / "tests", says=f".*{ROOT / 'tests'}")
