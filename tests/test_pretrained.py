"""GPT.from_pretrained of every script against transformers' own GPT-2, on small random models saved to a folder."""

import math

import pytest
import torch
from conftest import ROOT, SCRIPTS, load, save_gpt2, since


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def ids():
    return torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_logits_are_those_of_transformers(script, checkpoint, ids):
    folder, theirs = checkpoint
    ours = load(script).GPT.from_pretrained(folder)
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids)
    assert expected.std() > 0.3  # logits all alike would prove nothing
    torch.testing.assert_close(logits[..., :50257], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_head_is_the_embedding(script, checkpoint):
    model = load(script).GPT.from_pretrained(checkpoint[0])
    wte, head = model.transformer.wte.weight, model.lm_head.weight
    assert torch.equal(wte, head)
    assert (wte.data_ptr() == head.data_ptr()) == (script != "baseline.py")  # baseline.py has a copy of its own


@pytest.mark.parametrize("script", since(7))
def test_the_padding_rows_are_the_mean_of_the_others(script, checkpoint):
    wte = load(script).GPT.from_pretrained(checkpoint[0]).transformer.wte.weight
    assert wte.shape == (50304, 32)
    torch.testing.assert_close(wte[50257:], wte[:50257].mean(dim=0).expand(47, -1))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loss_is_right_where_logits_are_far_below_zero_as_gpt2s_are(script, tmp_path, ids):
    """GPT-2's logits lie around -30 to -100. Padding rows of zeros score 0 and would take all the probability."""

    def lower(model):
        model.transformer.wte.weight[:, 0] = 1.0  # one feature that every token shares
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, -60.0

    folder, theirs = save_gpt2(tmp_path, lower)
    targets = ids.roll(-1, dims=1)
    with torch.no_grad():
        logits = theirs(ids).logits
        assert -65 < logits.mean() < -55
        expected = torch.nn.functional.cross_entropy(logits.view(-1, 50257), targets.view(-1)).item()
        loss = load(script).GPT.from_pretrained(folder)(ids, targets).item()
    assert loss == pytest.approx(expected, abs=math.log(50304 / 50257) + 1e-4)


def test_a_run_starts_from_the_folder_and_takes_its_shape(run, checkpoint):
    done = run("speedup_04_residual_init.py", "--init-from", checkpoint[0], "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "B 4 T 64" in done.stdout  # as long as the checkpoint's positions allow
    scratch = math.log(50257)
    assert abs(done.losses[0] - scratch) > 0.1  # such weights do not begin at a guess


def test_nano_weights_fit_nano_and_gpt2_weights_do_not(run, tmp_path):
    folder, _ = save_gpt2(tmp_path / "nano", n_layer=4, n_head=4, n_embd=128, n_positions=1024)
    done = run("baseline.py", "--model", "nano", "--init-from", folder, "--steps", 1)
    assert done.returncode == 0, done.stderr
    assert "B 4 T 128" in done.stdout


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def other_shapes(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"n_embd": 32', '"n_embd": 64'))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [garbage, cut_short, other_shapes, no_weights])
def test_a_damaged_folder_is_one_clear_error(run, tmp_path, damage):
    folder, _ = save_gpt2(tmp_path / "gpt2")
    damage(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(run("baseline.py", "--init-from", folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_that_do_not_fit_are_one_clear_error(run, tmp_path, checkpoint):
    refused(
        run("baseline.py", "--model", "nano", "--init-from", checkpoint[0]), "its shape is not that of --model nano"
    )
    for script in ("baseline.py", "speedup_07_vocab_pad.py"):
        refused(run(script, "--init-from", save_gpt2(tmp_path / "vocabulary", vocab_size=1000)[0]), "size mismatch")
    refused(run("baseline.py", "--init-from", save_gpt2(tmp_path / "untied", tie_word_embeddings=False)[0]), "not tied")
    refused(run("baseline.py", "--init-from", checkpoint[0], "--seq-len", 65), "64 positions", flag="--seq-len 65 ")
    refused(run("baseline.py", "--init-from", tmp_path / "nowhere"))
    refused(run("baseline.py", "--init-from", ROOT / "tests"))


def refused(done, text="", flag="--init-from "):
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert ": error: " + flag in done.stderr and text in done.stderr, done.stderr
