"""A model exported to Hugging Face format gives the same logits, and samples follow the model's probabilities."""

import signal
import sys

import pytest
import tiktoken
import torch
from checkpoint import config_of, load_model
from conftest import END, LONG, NO_SCORES, ROOT, TRAIN, Command, encode, load, nano, save_gpt2, uneven, watch


@pytest.fixture(scope="module", autouse=True)
def modules():
    """Import at the first test, not at collection, what takes seconds to import."""
    global export_hf, sample, train
    import export_hf
    import sample
    import train


SHORT = "--batch-size", 2, "--seq-len", 64, "--total-batch-size", 128, "--data", ROOT / "README.md"


@torch.no_grad()
def test_an_exported_model_has_the_logits_of_its_checkpoint_and_gpt2s_tokenizer(tmp_path, monkeypatch, refused):
    """A model is imported, trained at a rate of almost 0, exported and imported again. It keeps its number of heads.

    It has four heads, although the model of this hidden size in MODELS has two.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES | {"val_loss": 9.0})
    (folder, hf), new = save_gpt2(tmp_path / "gpt2", n_head=4), tmp_path / "parent" / "new"
    with torch.enable_grad():
        words = "--warmup-steps", 10**9, "--steps", 1, "--checkpoint-dir", tmp_path / "ck"
        watch(TRAIN, "--init-from", folder, *words, *SHORT)
    monkeypatch.setattr("sys.argv", ["export_hf.py", str(tmp_path / "ck"), str(new)])
    export_hf.main()
    idx = torch.tensor([encode((ROOT / "input.txt").read_text(encoding="utf-8")[:3000])[:512]])
    wanted, again = hf(idx).logits, AutoModelForCausalLM.from_pretrained(new)
    assert wanted.shape[-1] == 50257 and wanted.std() > 0.1
    torch.testing.assert_close(again.train()(idx).logits, wanted, atol=1e-4, rtol=1e-4)  # train(): it has no dropout
    for source in tmp_path / "ck", tmp_path / "ck" / "best.pt", new:
        model = load_model(source)
        assert model.config.n_head == 4
        torch.testing.assert_close(model(idx)[..., :50257], wanted, atol=1e-4, rtol=1e-4)
    assert all((new / name).exists() for name in ("model.safetensors", "vocab.json", "merges.txt"))
    tokenizer, text = AutoTokenizer.from_pretrained(new), "To be, or not\n\nto be: Ünïcode 漢字 🙂  "
    assert tokenizer(text)["input_ids"] == encode(text) and tokenizer.decode(encode(text)) == text
    assert tokenizer.eos_token_id == again.config.eos_token_id == END and tokenizer.model_max_length == 1024
    (tmp_path / "mine").mkdir()
    refused("pretrain/export_hf.py", tmp_path / "ck", tmp_path / "mine", says=".* already exists$")
    refused("pretrain/export_hf.py", new / "vocab.json", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "gpt2", "mine", "parent"]
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["new"] and not [*(tmp_path / "mine").iterdir()]


def test_the_file_or_the_latest_checkpoint_that_is_asked_for_is_loaded(tmp_path, refused):
    script = load(LONG)
    *_, last = watch("ddp_run.py", "--model", "nano", "--steps", 2, *SHORT, "--save", tmp_path / "weights.bin")
    model = load_model(tmp_path / "weights.bin")
    assert all(torch.equal(p, last.after[name]) for name, p in model.named_parameters())
    assert model.config == nano(LONG).config
    for name, seed in (("step_00000001.pt", 1), ("step_00000002.pt", 2), ("best.pt", 3)):
        torch.save({"model": nano(LONG, seed).state_dict(), "config": vars(nano(LONG).config)}, tmp_path / name)
    assert torch.equal(load_model(tmp_path).lm_head.weight, nano(LONG, 2).lm_head.weight)
    # A state dict does not contain the number of heads, so it is known only for the hidden sizes of MODELS.
    for config in [*script.MODELS.values(), script.GPTConfig(n_layer=6)]:
        with torch.device("meta"):
            state = script.GPT(config).state_dict()
        assert config_of(state) == config_of({"step": 3, "model": state}) == config
    torch.save(script.GPT(script.GPTConfig(n_layer=1, n_head=4, n_embd=64)).state_dict(), tmp_path / "x.pt")
    says = "the file does not contain the number of heads, and no GPT-2 has the hidden size 64"
    refused("pretrain/sample.py", tmp_path / "x.pt", says=f"{tmp_path}/x.pt: {says}")


def test_a_checkpoint_cannot_run_code(tmp_path):
    for name in "a model.pt", "best.pt", "step_00000001.pt":
        torch.save({"task": Command(tmp_path / "ran")}, tmp_path / name)
        with pytest.raises(ValueError):
            load_model(tmp_path / name if name == "a model.pt" else tmp_path)
        assert not (tmp_path / "ran").exists()


def padded():
    """Return a model in which padded vocabulary ids have the highest logits."""
    model = uneven()
    with torch.no_grad():
        model.lm_head.weight[50257:] *= 8
    assert (model(torch.tensor([encode("O Romeo, Romeo")]))[0].argmax(-1) >= 50257).any()
    return model


@torch.no_grad()
def draw(model, tokens, count, k, p=1.0, temperature=1.0, samples=1, generator=None):
    """Extend `tokens` by `count` sampled tokens per sample, from the definition of top-k and top-p sampling."""
    texts = torch.tensor([tokens] * samples)
    for _ in range(count):
        kept, ids = (model(texts)[:, -1, :50257] / temperature).softmax(-1).topk(k)  # in descending order
        kept /= kept.sum(-1, keepdim=True)
        kept[kept.cumsum(-1) - kept >= p] = 0
        if generator is None:  # transformers draws from the whole vocabulary
            kept, ids = torch.zeros(samples, 50257).scatter(1, ids, kept), torch.arange(50257).expand(samples, -1)
        texts = torch.cat([texts, ids.gather(1, torch.multinomial(kept, 1, generator=generator))], dim=1)
    return texts.tolist()


@pytest.mark.parametrize(
    "prompt, words, options",
    [
        ("O Romeo", ["--tokens", 20, "--seed", 7], {"count": 20, "k": 50}),
        ("", ["--tokens", 9, "--top-k", 400, "--temperature", 0.3], {"count": 9, "k": 400, "temperature": 0.3}),
        ("word " * 30, ["--tokens", 9, "--samples", 3, "--top-p", 0.5], {"count": 9, "k": 50, "p": 0.5, "samples": 3}),
        ("caf\udce9 漢, <|endoftext|> as text", ["--tokens", 25, "--temperature", 0], {"count": 25, "k": 1}),
    ],
)
def test_a_sample_is_drawn_with_the_options_that_are_given(prompt, words, options, monkeypatch, capsys):
    model, tokens, asked = padded(), encode(prompt.encode(errors="replace").decode()), []  # "?" replaces invalid UTF-8
    torch.manual_seed(7 if "--seed" in words else 1337)
    texts = draw(model, tokens or [END], **options)
    texts = [tiktoken.get_encoding("gpt2").decode(text[0 if tokens else 1 :]) for text in texts]
    monkeypatch.setattr(sample, "load_model", lambda *args: asked.append(args) or model)
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    monkeypatch.setattr("sys.argv", ["sample.py", "ck", "--device", "cpu:0", "--prompt", prompt, *map(str, words)])
    sample.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n" and asked == [("ck", "cpu:0")]
    assert len(set(texts)) == options.get("samples", 1)


def test_generate_draws_from_the_top_50_tokens_with_its_seed():
    model, prompt = padded(), encode("To be, or not")
    with torch.no_grad():
        model.lm_head.weight[END] *= 8  # the last token that may be drawn
    for seed in (1, 2):
        with torch.no_grad():
            sampled = train.generate(model, prompt, seed, torch.device("cpu"))
        wanted = draw(model, prompt, 32, 50, generator=torch.Generator().manual_seed(seed))
        assert sampled.tolist() == wanted[0] and len(set(wanted[0][-32:])) > 5


def test_sample_py_reports_a_user_error_in_one_line(refused, monkeypatch, tmp_path):
    torch.save(nano(LONG).state_dict(), tmp_path / "x.pt")
    for option, value in ("--tokens", 1024), ("--temperature", -1), ("--device", "abacus"):
        refused("pretrain/sample.py", tmp_path / "x.pt", option, value, says=f".*{option}")
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    words = "pretrain/sample.py", tmp_path / "x.pt", "--tokens", 2, "--device", "cpu"
    refused(*words, says="the result cannot be printed: No space left on device$")
