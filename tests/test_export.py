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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a model for 8 steps and return the folder with its checkpoint."""
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
        assert torch.equal(hf.train()(idx).logits, theirs)  # hf.train() applies no dropout
    assert theirs.shape[-1] == 50257 and theirs.std() > 0.1
    assert all((exported / name).exists() for name in ("model.safetensors", "vocab.json", "merges.txt"))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "To be, or not\n\nto be: Ünïcode 漢字 🙂  "
    assert tokenizer(text)["input_ids"] == encode(text) and tokenizer.decode(encode(text)) == text
    assert tokenizer.eos_token_id == hf.config.eos_token_id == END and tokenizer.model_max_length == 1024


def test_init_from_takes_it_back(exported, trained, monkeypatch):
    """A run starts from the exported weights. Only the weights of the 47 padded vocabulary ids are new."""
    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES)
    (step,) = watch(TRAIN, "--init-from", exported, "--steps", 1, *SHORT)
    wanted = load_model(trained).state_dict()
    assert all(torch.equal(p[:50257], wanted[name][:50257]) for name, p in step.before.items())
    assert len(step.before) == len(dict(load_model(trained).named_parameters()))


def test_the_export_touches_no_folder_that_is_there(refused, trained, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused("pretrain/export_hf.py", trained, tmp_path / "mine", says=".* already exists$")
    refused("pretrain/export_hf.py", tmp_path / "mine" / "notes.txt", tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin"])
def test_a_file_of_save_is_read_too(tmp_path, name):
    config = nano(LONG).config
    words = "--model", "nano", "--steps", 2, *SHORT, "--save", tmp_path / name
    *_, last = watch("ddp_run.py", *words)
    model = load_model(tmp_path / name)
    assert all(torch.equal(p, last.after[name]) for name, p in model.named_parameters())
    assert model.config == config


def test_weights_without_a_configuration_have_the_heads_of_gpt2_or_are_refused(tmp_path, refused):
    """A state dict does not contain the number of heads, so it is known only for the hidden sizes of MODELS."""
    script = load(LONG)
    for config in [*script.MODELS.values(), script.GPTConfig(n_layer=6)]:
        with torch.device("meta"):
            state = script.GPT(config).state_dict()
        assert config_of(state) == config_of({"step": 3, "model": state}) == config
    torch.save(script.GPT(script.GPTConfig(n_layer=1, n_head=4, n_embd=64)).state_dict(), tmp_path / "x.pt")
    says = "the file does not contain the number of heads, and no GPT-2 has the hidden size 64"
    refused("pretrain/sample.py", tmp_path / "x.pt", says=f"{tmp_path}/x.pt: {says}")
    refused("pretrain/export_hf.py", tmp_path / "x.pt", tmp_path / "new", says=f"{tmp_path}/x.pt: {says}")


@torch.no_grad()
def test_a_model_keeps_its_number_of_heads_from_import_to_export(tmp_path, monkeypatch):
    """Four heads, although the model of this hidden size in MODELS has two."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(train, "evaluate", lambda *args: NO_SCORES | {"val_loss": 9.0})
    folder, hf = save_gpt2(tmp_path / "gpt2", n_head=4)
    with torch.enable_grad():
        words = "--warmup-steps", 10**9, "--steps", 1  # the learning rate is almost 0
        watch(TRAIN, "--init-from", folder, *words, "--checkpoint-dir", tmp_path / "ck", *SHORT)
    export_hf.export(load_model(tmp_path / "ck"), tmp_path / "new")
    idx = torch.tensor([encode("To be, or not to be, that is the question")])
    wanted = hf(idx).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()(idx).logits, wanted)
    for model in load_model(tmp_path / "ck"), load_model(tmp_path / "ck" / "best.pt"), load_model(tmp_path / "new"):
        assert model.config.n_head == 4
        torch.testing.assert_close(model(idx)[..., :50257], wanted)


def test_a_folder_gives_its_latest_checkpoint_not_the_best(tmp_path):
    for name, seed in (("step_00000001.pt", 1), ("step_00000002.pt", 2), ("best.pt", 3)):
        torch.save({"model": nano(LONG, seed).state_dict(), "config": vars(nano(LONG).config)}, tmp_path / name)
    wanted = nano(LONG, 2).lm_head.weight
    assert torch.equal(load_model(tmp_path).lm_head.weight, wanted)


def test_a_run_without_a_saved_step_is_one_line(tmp_path, refused):
    torch.save({"begun": 1.0, "step": 0, "config": {}}, tmp_path / "step_00000000.pt")
    refused("pretrain/sample.py", tmp_path, says=f"{tmp_path}: no step of this run has been saved yet")


@pytest.mark.parametrize("name", ["best.pt", "step_00000001.pt", "a model.pt"])
def test_a_checkpoint_cannot_run_code(tmp_path, name):
    torch.save({"task": Command(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(ValueError):
        load_model(tmp_path / name if name == "a model.pt" else tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("small") / "gpt2")[0]


@pytest.fixture
def write(monkeypatch, capsys):
    """Return a function that runs sample.py on a model in this process and returns its output."""

    def write(model, *words):
        monkeypatch.setattr(sample, "load_model", lambda source, device: model)
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        monkeypatch.setattr("sys.argv", ["sample.py", "x", "--device", "cpu", *map(str, words)])
        sample.main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return capsys.readouterr().out

    return write


@torch.no_grad()
def likeliest(model, tokens, count):
    """Extend `tokens` by the most likely next token, `count` times, using our GPT class without a key-value cache."""
    for _ in range(count):
        tokens = [*tokens, model(torch.tensor([tokens]))[0, -1, :50257].argmax().item()]
    return tokens


@pytest.mark.parametrize("prompt", ["", "O Romeo 漢, <|endoftext|> as text", "caf\udce9", "word " * 30])
def test_greedy_text_is_the_models_likeliest(write, prompt):
    model, tokens = uneven(), encode(prompt.encode(errors="replace").decode())  # "?" replaces invalid UTF-8
    text = likeliest(model, tokens or [END], 25)[0 if tokens else 1 :]
    assert END not in text[len(tokens) :] and len(set(text[len(tokens) :])) > 3
    text = tiktoken.get_encoding("gpt2").decode(text)
    assert write(model, "--prompt", prompt, "--tokens", 25, "--temperature", 0, "--samples", 2) == f"{text}\n\n{text}\n"


@torch.no_grad()
def test_text_ends_at_the_end_token_of_the_model(write):
    model = uneven()
    first = likeliest(model, encode("O Romeo"), 20)[2:]
    place = next(i for i in range(2, 20) if first[i] not in first[:i])
    weight = model.lm_head.weight.data  # swap two rows: the end-of-text token is now likeliest at `place`
    weight[[first[place], END]] = weight[[END, first[place]]]
    text = tiktoken.get_encoding("gpt2").decode([*encode("O Romeo"), *first[:place]])
    assert write(model, "--prompt", "O Romeo", "--tokens", 20, "--temperature", 0) == f"{text}\n"


@torch.no_grad()
def test_no_sample_is_a_row_of_padding(write):
    """No padded vocabulary id is sampled, even if the model gives these ids the highest logits."""
    model = uneven()
    model.transformer.ln_f.bias[0] = 50.0
    model.lm_head.weight[:, 0] = -1.0
    model.lm_head.weight[50257:, 0] = 1.0
    assert model(torch.tensor([[5, 6]])).argmax() % 50304 >= 50257
    assert train.generate(model, [5, 6], 1, torch.device("cpu")).max() < 50257
    for temperature in (0, 1):
        assert write(model, "--tokens", 10, "--temperature", temperature)  # decoding a padded id would fail


def test_each_option_of_sampling_has_its_effect(write):
    """Options that leave one likely token give the greedy text. Different values or seeds give different texts."""
    model, short = uneven(), ("--prompt", "O Romeo", "--tokens", 12)
    greedy = write(model, *short, "--temperature", 0)
    for option in (["--top-k", 1], ["--top-p", 1e-6], ["--temperature", 1e-3]):
        assert write(model, *short, *option) == greedy, option
    texts = [
        write(model, *short, *more)
        for more in ([], ["--seed", 7], ["--temperature", 0.9, "--seed", 3], ["--top-k", 5000])
    ]
    assert len({greedy, *texts}) == 5 and texts[0] == write(model, *short)
    several = write(model, *short, "--samples", 3).split("O Romeo")
    assert several[0] == "" and len(set(several)) == 4


def test_a_result_without_an_output_is_no_failure(small, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["export_hf.py", str(small), str(tmp_path / "new")])
    monkeypatch.setattr(sys, "stdout", None)  # closed
    export_hf.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (tmp_path / "new" / "config.json").exists()


def test_text_that_cannot_be_printed_is_one_line(refused, small, monkeypatch):
    words = "pretrain/sample.py", small, "--tokens", 2, "--device", "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        refused(*words, says="standard output is closed")
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    refused(*words, says="the result cannot be printed: No space left on device$")


WRONG_SAMPLE = {
    "a prompt longer than the model": (["--prompt", "word " * 1100], "1101 tokens.*1024 positions"),
    "too many tokens": (["--tokens", "1024"], "1024 positions"),
    "no tokens": (["--tokens", "0"], "at least 1"),
    "temperature": (["--temperature", "-1"], "--temperature"),
    "a temperature near 0": (["--temperature", "1e-30"], "--temperature"),
    "top-p": (["--top-p", "0"], "--top-p"),
    "device": (["--tokens", "5", "--device", "abacus"], "abacus"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLE)
def test_what_is_wrong_with_a_sample_is_one_line(case, refused, small):
    arguments, pattern = WRONG_SAMPLE[case]
    refused("pretrain/sample.py", small, *arguments, says=pattern)


@torch.no_grad()
def test_a_sample_is_what_its_seed_says():
    model, prompt = uneven(), encode("To be, or not")
    one, two, other = (train.generate(model, prompt, seed, torch.device("cpu")) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert one.shape == (len(prompt) + 32,) and one[: len(prompt)].tolist() == prompt and one.max() < 50257
    # Each token must be among the model's 50 most likely tokens at that position.
    for i in range(len(prompt), len(one)):
        assert one[i] in model(one[None, :i])[0, -1, :50257].topk(51).indices  # 51: rounding may swap 50th and 51st
    assert len(set(one[len(prompt) :].tolist())) > 5
