"""A model exported to Hugging Face keeps its logits; samples are what `transformers` would write."""

import copy
import signal
import sys

import export_hf
import pytest
import torch
from checkpoint import config_of, load_model
from conftest import LONG, NO_SCORES, ROOT, load, nano, save_gpt2, watch
from test_checkpoints import Command
from test_corpus import END, TRAIN, encode, train, uneven

sample = load("pretrain/sample.py")


SHORT = "--batch-size", 2, "--seq-len", 64, "--total-batch-size", 128, "--data", ROOT / "README.md"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoint of a model that has learned a little."""
    folder = tmp_path_factory.mktemp("trained")
    watch(LONG, "--model", "nano", "--steps", 8, "--checkpoint-dir", folder, *SHORT)
    return folder


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["export_hf.py", str(trained), str(folder)])
        export_hf.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return folder


def test_an_exported_model_has_the_same_logits_and_gpt2s_tokenizer(trained, exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf = AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = load_model(trained)
    idx = torch.tensor([encode((ROOT / "input.txt").read_text(encoding="utf-8")[:3000])[:512]])
    with torch.no_grad():
        theirs = hf(idx).logits
        torch.testing.assert_close(theirs, ours(idx)[..., :50257], atol=1e-5, rtol=1e-5)
        assert torch.equal(hf.train()(idx).logits, theirs)  # no dropout for whoever trains it on, either
    assert theirs.shape[-1] == 50257 and theirs.std() > 0.1
    assert (exported / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "To be, or not\n\nto be: Ünïcode 漢字 🙂  "
    assert tokenizer(text)["input_ids"] == encode(text) and tokenizer.decode(encode(text)) == text
    assert tokenizer.eos_token_id == hf.config.eos_token_id == END and tokenizer.model_max_length == 1024


def test_init_from_takes_it_back(exported, trained, monkeypatch):
    """A run begins with the exported weights; only the 47 rows of padding are new."""
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    (step,) = watch(TRAIN, "--init-from", exported, "--steps", 1, *SHORT)
    wanted = load_model(trained).state_dict()
    assert all(torch.equal(p[:50257], wanted[name][:50257]) for name, p in step.before.items())
    assert len(step.before) == len(dict(load_model(trained).named_parameters()))


def test_the_export_touches_no_folder_that_is_there(refused, trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused("pretrain/export_hf.py", trained, tmp_path / "mine", says=".* exists already$")
    refused("pretrain/export_hf.py", tmp_path / "mine" / "notes.txt", tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin"])
def test_a_file_of_save_is_read_too(tmp_path, name):
    words = "--model", "nano", "--steps", 2, *SHORT, "--save", tmp_path / name
    *_, last = watch("ddp_run.py", *words)
    model = load_model(tmp_path / name)
    assert all(torch.equal(p, last.after[name]) for name, p in model.named_parameters())
    assert model.config == nano(LONG).config


def test_the_number_of_heads_is_that_of_the_model_as_wide():
    """A state dict does not hold it. In a model of another width each head has 64 columns, as in GPT-2's."""
    script = load(LONG)
    configs = [*script.MODELS.values(), script.GPTConfig(n_layer=6), script.GPTConfig(n_layer=2, n_head=8, n_embd=512)]
    configs.append(script.GPTConfig(n_layer=1, n_head=1, n_embd=48))
    for config in configs:
        with torch.device("meta"):
            assert config_of(script.GPT(config).state_dict()) == config


@pytest.mark.parametrize("name", ["best.pt", "step_00000001.pt", "a model.pt"])
def test_a_checkpoint_cannot_run_code(tmp_path, name):
    torch.save({"task": Command(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(ValueError):
        load_model(tmp_path / name if name == "a model.pt" else tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder, hf = save_gpt2(tmp_path_factory.mktemp("small") / "gpt2")
    return load_model(folder), hf, folder


@pytest.mark.parametrize("length", [1, 7, 30])
def test_greedy_text_is_that_of_transformers(small, length):
    model, hf, _ = small
    prompt = torch.randint(0, 50257, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = hf.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False, pad_token_id=END)[0, length:]
    ours = torch.stack(list(sample.generate(model, prompt, 2, 25, temperature=0)), dim=1)
    assert len(set(expected.tolist())) > 3
    assert ours.tolist() == [expected.tolist()] * 2


def test_text_ends_where_transformers_ends_it(small, tmp_path):
    model, hf, folder = small
    prompt = [11, 22, 33]
    first = [tokens.item() for tokens in sample.generate(model, prompt, 1, 20, temperature=0)]
    place = next(i for i in range(2, 20) if first[i] not in first[:i])
    weight = (ending := copy.deepcopy(hf)).lm_head.weight.data  # a token and the end of the text change places
    weight[[first[place], END]] = weight[[END, first[place]]]
    ending.save_pretrained(tmp_path)
    expected = ending.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=END)[0, 3:]
    ours = [tokens.item() for tokens in sample.generate(load_model(tmp_path), prompt, 1, 20, temperature=0)]
    assert ours == expected.tolist() == [*first[:place], END]


def test_the_cache_changes_no_logit(small):
    model, _, _ = small
    idx = torch.randint(0, 50257, (3, 40), generator=torch.Generator().manual_seed(1))
    caches = torch.empty(2, 2, 3, 2, 40, 16)
    with torch.no_grad():
        expected = model(idx)[..., :50257]
        for start, end in [(0, 13), *((i, i + 1) for i in range(13, 40))]:
            logits = sample.next_logits(model, idx[:, start:end], caches, start)
            torch.testing.assert_close(logits, expected[:, end - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature, top_k, top_p", [(1, 50257, 1), (0.7, 20, 1), (1.3, 50257, 0.6), (0.9, 40, 0.8)])
def test_the_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(5, 50257, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = LogitsProcessorList([TemperatureLogitsWarper(float(temperature)), TopKLogitsWarper(top_k)])
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    expected = theirs(None, logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(sample.probabilities(logits, temperature, top_k, top_p), expected)


def test_no_sample_is_a_row_of_padding():
    """Not even where the model finds these likelier than any token."""
    model = uneven()
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 50.0
        model.lm_head.weight[:, 0] = -1.0
        model.lm_head.weight[50257:, 0] = 1.0
        assert model(torch.tensor([[5, 6]])).argmax() % 50304 >= 50257
        assert train.generate(model, [5, 6], 1, torch.device("cpu")).max() < 50257
    for temperature in (0, 1):
        assert all(token < 50257 for token in sample.generate(model, [5, 6], 1, 10, temperature=temperature))


def test_samples_are_drawn_with_their_probabilities(small):
    model, _, _ = small
    first = next(sample.generate(model, [5, 6], 500, 1, top_k=3))
    with torch.no_grad():
        p = sample.probabilities(model(torch.tensor([[5, 6]]))[:, -1, :50257], 1.0, 3, 1.0)[0]
    counts = torch.bincount(first, minlength=50257) / 500
    assert (counts - p).abs().max() < 0.09 and (counts > 0).sum() == 3


@pytest.mark.slow
def test_the_samples_of_a_command(run, small, monkeypatch, capsys):
    words = "pretrain/sample.py", small[2], "--prompt", "O Romeo 漢", "--tokens", 20, "--samples", 3, "--device", "cpu"

    def here(*more):
        monkeypatch.setattr("sys.argv", [*map(str, words), *more])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        sample.main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return capsys.readouterr().out

    done = run(*words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert here() == done.stdout != here("--seed", "7")
    assert done.stdout.count("O Romeo 漢") == 3
    assert len({text for text in done.stdout.split("O Romeo 漢")}) == 4


def test_a_sample_is_printed_as_it_comes(small, monkeypatch, capsys):
    """Before the next token is computed, and no half of a character."""
    printed, forward = [], sample.next_logits

    def look(*args):
        printed.append(capsys.readouterr().out)
        logits = forward(*args)
        return torch.zeros_like(logits).index_fill_(1, torch.tensor(next(wanted)), 1.0)

    wanted = iter([[token] for token in encode("🙂 and 漢字")])
    count = len(encode("🙂 and 漢字"))
    monkeypatch.setattr(sample, "next_logits", look)
    monkeypatch.setattr(sample, "load_model", lambda name: small[0])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    monkeypatch.setattr("sys.argv", ["sample.py", "x", "--temperature", "0", "--tokens", str(count), "--prompt", "Oh "])
    sample.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed.append(capsys.readouterr().out)
    assert printed[0] == "Oh " and "".join(printed) == "Oh 🙂 and 漢字\n"
    assert len([text for text in printed if text]) >= 5


WRONG_SAMPLE = {
    "a prompt longer than the model": (["--prompt", "word " * 1100], "1101 tokens.*1024 positions"),
    "too many tokens": (["--tokens", "1024"], "1024 positions"),
    "no tokens": (["--tokens", "0"], "at least 1"),
    "temperature": (["--temperature", "-1"], "--temperature"),
    "top-p": (["--top-p", "0"], "--top-p"),
    "device": (["--tokens", "5", "--device", "abacus"], "abacus"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLE)
def test_what_is_wrong_with_a_sample_is_one_line(case, refused, small):
    arguments, pattern = WRONG_SAMPLE[case]
    refused("pretrain/sample.py", small[2], *arguments, says=pattern)


@torch.no_grad()
def test_a_sample_is_what_its_seed_says():
    model, prompt = uneven(), encode("To be, or not")
    one, two, other = (train.generate(model, prompt, seed, torch.device("cpu")) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.shape == (len(prompt) + 32,) and one[: len(prompt)].tolist() == prompt and one.max() < 50257
    for i in range(
        len(prompt), len(one)
    ):  # each token is one of the 50 that the model finds likeliest after the others
        assert one[i] in model(one[None, :i])[0, -1, :50257].topk(51).indices  # 51: rounding may change places
    assert len(set(one[len(prompt) :].tolist())) > 5
