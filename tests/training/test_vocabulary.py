"""Other vocabularies for a checkpoint: what is kept answers as before, and what is dropped breaks into pieces."""

import json
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import bertkit
from bertkit import Predictor
from bertkit.data.tokenizer import SPECIAL_TOKENS, make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.inference import export as exports
from bertkit.model.config import BertConfig
from bertkit.training.vocabulary import change_vocabulary

ENGLISH = [
    "The weather in the mountains was better than we had expected this summer.",
    "She reads the newspaper every morning before the children go to school.",
    "There is a small house behind the station where the old teacher lived in 1987.",
    "Nobody knew whether the train would arrive before the evening.",
    "The children were waiting for their teacher at the station.",
    "We had expected a better house, but the mountains were worth it!",
]
OTHERS = [
    "Das Wetter in den Bergen war besser, als wir es diesen Sommer erwartet hatten.",
    "Sie liest jeden Morgen die Zeitung, bevor die Kinder zur Schule gehen.",
    "Le temps à la montagne était meilleur que nous ne l'avions espéré cet été.",
    "Elle lit le journal tous les matins avant que les enfants partent à l'école.",
    "Ο καιρός στα βουνά ήταν καλύτερος από ό,τι περιμέναμε αυτό το καλοκαίρι.",
    "Погода в горах была лучше, чем мы ожидали этим летом.",
    "Каждое утро она читает газету, прежде чем дети идут в школу.",
    "山里的天气比我们预期的要好。",
    "孩子们上学之前，她每天早上都看报纸。",
]
TEXTS = [*ENGLISH, *OTHERS]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def list_tokens():
    """Return a multilingual vocabulary whose special tokens are not the first, as in many on the Hub."""
    tokens = train_vocabulary(TEXTS * 3, size=700, cased=True)
    return [*(f"[unused{number}]" for number in range(5)), *tokens]


def write_model(folder, head, **values):
    """Write a tiny random multilingual model, with more rows than tokens."""
    tokens = list_tokens()
    values = {"vocab_size": len(tokens) + 3, "pad_token_id": tokens.index("[PAD]"), "initializer_range": 0.3} | values
    if head == "BertForSequenceClassification":
        values |= {"id2label": {0: "bad", 1: "good", 2: "so-so"}, "thresholds": None, "temperature": 1.5}
    torch.manual_seed(0)
    model = getattr(bertkit, head)(BertConfig(**SIZES | {"max_position_embeddings": 64} | values))
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(make_tokenizer(tokens, cased=True, max_length=64), folder)
    return folder


def load_stock(folder, head):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, getattr(transformers, head).from_pretrained(folder).eval()


@torch.no_grad()
def answer(tokenizer, model, texts):
    """Return the pieces of texts, and the model's first output at the real tokens of each."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    output = model(**batch)[0]
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [row[:length] if output.dim() > 2 else row for row, length in zip(output, lengths, strict=True)]
    return [tokenizer.tokenize(text) for text in texts], rows


HEADS = ("BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "BertModel")


@pytest.mark.parametrize("head", HEADS)
def test_texts_whose_pieces_are_kept_have_the_same_pieces_and_outputs(tmp_path, head):
    lines = []
    folder = write_model(tmp_path / "bert", head)
    change_vocabulary(str(folder), ENGLISH, tmp_path / "made", report=lines.append)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    old, model = load_stock(folder, head)
    new, trimmed = load_stock(tmp_path / "made", head)
    changed = {"vocab_size": len(new), "pad_token_id": new.pad_token_id}
    assert config == before | changed
    assert 0 < new.pad_token_id < old.pad_token_id or len(new) < len(old)
    assert len(new) == len(trimmed.get_input_embeddings().weight) < len(old) / 1.5
    tokens = sorted(new.get_vocab(), key=new.get_vocab().get)
    places = old.convert_tokens_to_ids(tokens)
    assert places == sorted(places), "in their old order"
    texts = [*ENGLISH, "The teacher was waiting in the mountains.", "A xylophone, 2035?"]
    ours = getattr(bertkit, head).from_pretrained(tmp_path / "made").eval()
    for tokenizer, network in ((new, trimmed), (new, ours)):
        pieces, found = answer(tokenizer, network, texts)
        expected_pieces, expected = answer(old, model, texts)
        assert pieces[: len(ENGLISH)] == expected_pieces[: len(ENGLISH)]
        kept = [index for index, each in enumerate(pieces) if each == expected_pieces[index]]
        assert len(kept) >= len(ENGLISH)
        for index in kept:
            has_tokens = "LM" in head or "PreTraining" in head
            wanted = expected[index][..., places] if has_tokens else expected[index]
            assert (found[index] - wanted).abs().max() < 1e-6
    assert lines[-1].startswith(f"{len(old):,} tokens before, {len(new):,} after; ")


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory):
    """The old and the new tokenizer in plain transformers."""
    folder = tmp_path_factory.mktemp("trimmed")
    change_vocabulary(str(write_model(folder / "bert", "BertModel")), ENGLISH, folder / "made")
    return [transformers.AutoTokenizer.from_pretrained(folder / name) for name in ("bert", "made")]


CHARACTERS = sorted(set("".join(TEXTS)))


@given(st.lists(st.sampled_from([*CHARACTERS, *" ".join(TEXTS).split()])).map("".join))
def test_other_words_break_into_pieces_and_are_not_unknown(trimmed, text):
    old, new = (tokenizer.tokenize(text) for tokenizer in trimmed)
    spelled = ["".join(token.removeprefix("##") for token in tokens) for tokens in (old, new)]
    assert ("[UNK]" in old) is ("[UNK]" in new)
    if "[UNK]" not in old:
        assert spelled[0] == spelled[1]
        assert len(new) >= len(old)


def test_special_tokens_and_single_characters_are_kept(trimmed):
    old, new = (tokenizer.get_vocab().keys() for tokenizer in trimmed)
    single = {token for token in old if len(token.removeprefix("##")) == 1}
    assert {"山", "ж", "##ж", "7", "##7"} <= single
    assert new >= single | set(SPECIAL_TOKENS)
    assert not {"[unused0]", "Каждое"} & new
    assert "station" in new


def hold_out(lines):
    return [line for line in lines if zlib.crc32(line.encode()) % 10 == 0]


def count_pieces(tokenizer, lines):
    words = sum(len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(line)) for line in lines)
    return sum(len(tokenizer.tokenize(line)) for line in lines) / words


def test_a_line_says_what_changes_for_lines_that_chose_nothing(tmp_path):
    """Equal lines are on the same side; the output has the pieces of all lines."""
    folder = write_model(tmp_path / "bert", "BertModel")
    draw = np.random.default_rng(0)
    words = " ".join(ENGLISH[:4] + OTHERS[:2]).split()
    lines = [" ".join(draw.choice(words, 4)) for _ in range(12)] * 2 + [" ".join(draw.choice(words, 9)) for _ in "abc"]
    held_out, chosen = hold_out(lines), [line for line in lines if line not in hold_out(lines)]
    assert len(held_out) > 1
    said = []
    change_vocabulary(str(folder), lines, tmp_path / "all", report=said.append)
    few = []
    change_vocabulary(str(folder), chosen, tmp_path / "part", report=few.append)
    assert few[0] == "no line is held out, because the text has few different ones"
    old, new, part = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("bert", "all", "part"))
    kept = np.mean([old.tokenize(line) == part.tokenize(line) for line in held_out])
    assert 0 < kept < 1
    figures = f"{count_pieces(old, held_out):.3f} before, {count_pieces(part, held_out):.3f} after"
    assert said[0] == f"{len(held_out)} held-out lines: {kept:.1%} keep all pieces; pieces per word: {figures}"
    assert [new.tokenize(line) for line in lines] == [old.tokenize(line) for line in lines]
    sizes = [
        sum(x.nbytes for x in load_file(tmp_path / name / "model.safetensors").values()) for name in ("bert", "all")
    ]
    shown = "{:.1f} MB of weights before, {:.1f} MB after".format(*(size / 1e6 for size in sizes))
    assert said[1] == f"{len(old)} tokens before, {len(new)} after; {shown}"


def test_words_that_break_into_most_pieces_are_added_as_the_mean_of_their_pieces(tmp_path):
    folder = write_model(tmp_path / "bert", "BertForMaskedLM")
    text = ["The stationmaster reads newspapers!"] * 5 + ["Un thermomètre, stationmaster.", "xylophones"] * 2
    said = []
    change_vocabulary(str(folder), text, tmp_path / "made", words=3, report=said.append)
    old, model = load_stock(folder, "BertForMaskedLM")
    new, extended = load_stock(tmp_path / "made", "BertForMaskedLM")
    words = Counter(word for line in text for word, _ in old.backend_tokenizer.pre_tokenizer.pre_tokenize_str(line))
    saved = {word: count * (len(old.tokenize(word)) - 1) for word, count in words.items()}
    wanted = sorted(saved, key=lambda word: (-saved[word], word))[:3]
    assert saved[wanted[-1]] > sorted(saved.values())[-4], "there is no tie"
    assert list(new.get_vocab().items() - old.get_vocab().items())
    assert new.convert_ids_to_tokens(range(len(old), len(new))) == wanted
    assert not set(wanted) & set(new.added_tokens_encoder), "plain WordPiece tokens"
    lines = (tmp_path / "made" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert lines[-3:] == wanted
    assert [new.tokenize(word) for word in wanted] == [[word] for word in wanted]
    assert new.tokenize("newspapersx") == ["newspapers", *old.tokenize("ax")[1:]], "longest match first"
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"):
        rows, former = extended.state_dict()[name], model.state_dict()[name]
        assert torch.equal(rows[: len(old)], former[: len(old)])
        for index, word in enumerate(wanted, len(old)):
            pieces = old.convert_tokens_to_ids(old.tokenize(word))
            torch.testing.assert_close(rows[index], former[pieces].mean(0))
    ours = bertkit.BertForMaskedLM.from_pretrained(tmp_path / "made").eval()
    _, found = answer(new, ours, text)
    _, expected = answer(new, extended, text)
    assert all((one - other).abs().max() < 1e-4 for one, other in zip(found, expected, strict=True))


def test_other_ids_and_lengths_are_kept_with_the_checkpoint(tmp_path):
    tokens = list_tokens()
    numbers = {"eos_token_id": tokens.index("[SEP]"), "bos_token_id": tokens.index("[CLS]")}
    folder = write_model(tmp_path / "bert", "BertLMHeadModel", is_decoder=True, **numbers)
    (folder / "recipe.toml").write_text("[data]\nmax_length = 20\n")
    change_vocabulary(str(folder), ENGLISH, tmp_path / "made")
    new = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["bos_token_id"] == new.cls_token_id != numbers["bos_token_id"]
    assert config["eos_token_id"] == new.sep_token_id
    assert (tmp_path / "made" / "recipe.toml").read_text() == (folder / "recipe.toml").read_text()


def test_a_multilingual_model_is_trimmed_fine_tuned_and_exported(call, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "MOST_SECONDS", 0.01)
    write_model(tmp_path / "bert", "BertForMaskedLM")
    (tmp_path / "english.txt").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    draw = np.random.default_rng(0)
    words = " ".join(ENGLISH).split()
    rows = [(" ".join(draw.choice(words, 6)), label) for _ in range(20) for label in ("worse", "better")]
    lines = [f'"{text} {label}",{label}' for text, label in rows]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    steps = (
        ("vocab", "english.txt", "--trim", "bert", "--output", "small"),
        ("classify", "--data", "reviews.csv", "--model", "small", "--output", "run", "--no-baseline", "--epochs", "2"),
        ("export", "run", "--output", "onnx"),
    )
    for step in steps:
        code, _, err = call(*step)
        assert (code, err) == (0, "")
    texts = [*ENGLISH, "Das Wetter ist better!"]
    expected, found = Predictor("run", precision="fp32")(texts), Predictor("onnx")(texts)
    assert [result["label"] for result in found] == [result["label"] for result in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-4)
    size = json.loads((tmp_path / "run" / "config.json").read_text())["vocab_size"]
    assert size == len(transformers.AutoTokenizer.from_pretrained(tmp_path / "small")) < len(list_tokens())


def drop_unknown(folder):
    """Remove [UNK] from a vocabulary, as a program does that keeps only the tokens of a text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens = [token for token in content["model"]["vocab"] if token != "[UNK]"]
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
    for token in content["added_tokens"]:
        token["id"] = tokens.index(token["content"])
    path.write_text(json.dumps(content), encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")


def test_what_has_no_such_vocabulary_is_refused(tmp_path, refused):
    folder = write_model(tmp_path / "bert", "BertModel")
    with refused():
        change_vocabulary(str(folder), ["\u200b", ""], tmp_path / "made")
    short = write_model(tmp_path / "short", "BertModel", vocab_size=20)
    with refused():
        change_vocabulary(str(short), ENGLISH, tmp_path / "made")
    (short / "model.safetensors").rename(short / "model-00001-of-00001.safetensors")
    with refused():
        change_vocabulary(str(short), ENGLISH, tmp_path / "made")
    drop_unknown(folder)
    with refused():
        change_vocabulary(str(folder), ENGLISH, tmp_path / "made")
    (folder / "tokenizer.json").unlink()
    with refused():
        change_vocabulary(str(folder), ENGLISH, tmp_path / "made")
    assert not (tmp_path / "made").exists()
