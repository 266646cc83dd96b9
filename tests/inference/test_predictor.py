"""Prediction on new text equals plain transformers and the predictions of runs, in every input format."""

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModelForNextSentencePrediction, AutoTokenizer, pipeline

import bertkit
from bertkit.data.formats.rows import Line, check_output, read_inputs
from bertkit.data.labels import PAIR_NAMES
from bertkit.data.tagging import split_words
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference import predictor as module
from bertkit.inference.batching import count_characters, cut_into_chunks
from bertkit.inference.predictor import Predictor, write_file, write_lines
from bertkit.model import heads, pretraining_heads
from bertkit.model.config import BertConfig
from bertkit.system.progress import ignore
from bertkit.tasks.ner import NER
from bertkit.tasks.squad import SQUAD
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import FILLERS, WORDS, write_checkpoint, write_conll, write_squad

Exact = partial(Predictor, precision="fp32")
TEXTS = [*FILLERS, *sorted(set(WORDS.values()))]


def write_head(folder, head, seed=3, **values):
    """Return a tiny random model with a head, whose outputs are far apart."""
    write_checkpoint(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(seed)
    size = {"vocab_size": len(load_tokenizer(str(folder))), "max_position_embeddings": 128}
    model = getattr(bertkit, head)(BertConfig(**sizes | size | {"initializer_range": 0.3} | values))
    model.save_pretrained(folder)
    return folder


def make_texts(count, longest=20, seed=0):
    """Return texts of very different lengths."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(TEXTS, draw.integers(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    labels = {0: "bad", 1: "so-so", 2: "good"}
    return write_head(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", id2label=labels)


# --- Classes ----------------------------------------------------------------------------------------------------------


def test_classes_are_those_of_the_stock_pipeline_in_the_order_of_the_inputs(classifier):
    texts = make_texts(70)
    stock = pipeline("text-classification", model=str(classifier), top_k=None)(texts)
    results = Exact(classifier)(texts)
    assert len({result["label"] for result in results}) > 1
    for result, expected in zip(results, stock, strict=True):
        assert result["label"] == expected[0]["label"]
        assert result["probability"] == max(result["probabilities"].values())
        scores = {found["label"]: found["score"] for found in expected}
        assert result["probabilities"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("names", PAIR_NAMES)
def test_pairs_are_those_of_the_stock_pipeline_by_any_of_their_names(names, classifier):
    pairs = list(zip(make_texts(12), make_texts(12, seed=1), strict=True))
    inputs = [dict(zip(names, pair, strict=True)) for pair in pairs]
    stock = pipeline("text-classification", model=str(classifier))
    expected = stock([{"text": first, "text_pair": second} for first, second in pairs])
    results = Exact(classifier, pairs=True)(inputs)
    assert [(x["label"], pytest.approx(x["score"], abs=1e-5)) for x in expected] == [
        (x["label"], x["probability"]) for x in results
    ]
    assert Exact(classifier)(pairs) == results, "two texts without names are a pair as well"


def test_texts_and_pairs_may_stand_side_by_side_unless_the_task_says_which(classifier):
    texts, pairs = make_texts(5), list(zip(make_texts(5), make_texts(5, seed=2), strict=True))
    mixed = Exact(classifier)([x for both in zip(texts, pairs, strict=True) for x in both])
    for one, other in zip(mixed[::2], Exact(classifier)(texts), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    with pytest.raises(UsageError, match="input 1: unexpected text_pair; this model takes one text"):
        Exact(classifier, pairs=False)([texts[0], pairs[0]])
    with pytest.raises(UsageError, match=r"input 0: expected 2 texts \(text and text_pair\), got 1;"):
        Exact(classifier, pairs=True)(texts)


def test_a_regression_gives_scores(tmp_path):
    folder = write_head(tmp_path, "BertForSequenceClassification", num_labels=1, problem_type="regression")
    texts = make_texts(6)
    stock = pipeline("text-classification", model=str(folder), function_to_apply="none")(texts)
    scores = [result["score"] for result in Exact(folder)(texts)]
    assert scores == pytest.approx([found["score"] for found in stock], abs=1e-5)
    assert np.ptp(scores) > 0.01


@pytest.mark.parametrize("count", [1, 3])
def test_several_labels_a_text_have_a_probability_each(count, tmp_path):
    values = {"num_labels": count, "problem_type": "multi_label_classification"}
    folder = write_head(tmp_path, "BertForSequenceClassification", seed=1, **values)
    texts, predictor = make_texts(6), Exact(folder)
    stock = pipeline("text-classification", model=str(folder), top_k=None)(texts)
    for result, found in zip(predictor(texts), stock, strict=True):
        chances = {entry["label"]: entry["score"] for entry in found}
        assert result["probabilities"] == pytest.approx(chances, abs=1e-5)
        assert result["labels"] == [label for label in sorted(chances) if chances[label] > 0.5]
    assert 0 < sum(len(result["labels"]) for result in predictor(texts)) < 6 * count
    result = {"labels": ["a", "c"], "probabilities": {"a": 0.9, "b": 0.2, "c": 0.514}}
    assert predictor.describe(result) == "a (90.0%), c (51.4%)"
    assert predictor.describe({"labels": [], "probabilities": {"a": 0.1}}) == "(no label)"


def test_a_regression_on_several_scores_names_each(tmp_path):
    folder = write_head(tmp_path, "BertForSequenceClassification", num_labels=2, problem_type="regression")
    texts, predictor = make_texts(6), Exact(folder)
    stock = pipeline("text-classification", model=str(folder), function_to_apply="none", top_k=None)(texts)
    for result, found in zip(predictor(texts), stock, strict=True):
        assert result["scores"] == pytest.approx({entry["label"]: entry["score"] for entry in found}, abs=1e-5)
    assert predictor.describe({"scores": {"a": 0.25, "b": -3.0}}) == "a 0.250, b -3.000"


def test_a_text_that_is_too_long_is_cut_as_in_training(classifier):
    text = " ".join(FILLERS * 40)
    cut = AutoTokenizer.from_pretrained(classifier)(text, truncation=True, max_length=128, return_tensors="pt")
    logits = heads.BertForSequenceClassification.from_pretrained(classifier).eval()(**cut).logits
    (result,) = Exact(classifier)([text])
    assert list(result["probabilities"].values()) == pytest.approx(logits.softmax(-1)[0].tolist(), abs=1e-5)


def test_results_do_not_depend_on_their_neighbours(classifier, monkeypatch):
    texts = make_texts(40)
    together = Exact(classifier)(texts)
    monkeypatch.setattr(module, "INPUTS_A_CHUNK", 7)
    for one, other in zip(together, Exact(classifier)(texts), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


def test_a_stream_is_read_a_chunk_at_a_time(classifier, monkeypatch):
    monkeypatch.setattr(module, "INPUTS_A_CHUNK", 4)
    taken = []

    def feed():
        for number in range(100):
            taken.append(number)
            yield FILLERS[number % len(FILLERS)]

    results = Exact(classifier).stream(feed())
    assert not taken
    for count in range(1, 10):
        next(results)
        assert len(taken) == -(-count // 4) * 4


def test_a_chunk_ends_where_it_is_long_enough():
    inputs = ["abcde", {"question": "ab", "context": "cde"}, "f", {"context": "g", "endings": ["12345678", "h"]}, "i"]
    assert [len(chunk) for chunk in cut_into_chunks((Line(given, "x") for given in inputs), 9, 10)] == [2, 2, 1]
    assert [len(chunk) for chunk in cut_into_chunks(inputs, 9, 10)] == [2, 2, 1]
    assert count_characters({"context": "abcde", "endings": ["x", "yz", ""], "start": "d"}) == 5 + (3 + 3) + 1 + 3


# --- Answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["squad1", "squad2"])
def squad_run(request, tmp_path_factory):
    """Return a run's directory, its dev file and whether there may be no answer."""
    folder = tmp_path_factory.mktemp(request.param)
    task, data = SQUAD[request.param], write_squad(folder / "data", version=int(request.param[-1]))
    start = write_checkpoint(folder / "start")
    options = {"dir": str(data), "max_length": 48, "doc_stride": 16, "max_query_length": 12}
    recipe = {"checkpoint": str(start), "batch_size": 8, "precision": "fp32", "data": options}
    run(Recipe.make(task, recipe, {"train": {"max_steps": 30, "learning_rate": 3e-3}}), output=folder / "run")
    version = "2.0" if request.param == "squad2" else "1.1"
    return folder / "run", data / f"dev-v{version}.json", request.param == "squad2"


def list_questions(path):
    articles = json.loads(path.read_text())["data"]
    return [
        {"id": question["id"], "question": question["question"], "context": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def test_answers_are_those_of_the_run_with_its_tau(squad_run):
    folder, path, may_be_silent = squad_run
    questions = list_questions(path)
    results = Exact(folder)(questions)
    expected = json.loads((folder / "predictions" / "predictions.json").read_text())
    assert {result["id"]: result["answer"] for result in results} == expected
    assert len(set(expected.values())) > 1
    odds = (
        json.loads((folder / "predictions" / "null_odds.json").read_text())
        if may_be_silent
        else dict.fromkeys(expected)
    )
    for question, result in zip(questions, results, strict=True):
        best = result["best"]
        assert question["context"][best["start"] : best["end"]] == best["text"]
        assert result["answer"] in ("", best["text"])
        assert ("tau" in result) == may_be_silent
        if may_be_silent:
            assert result["null_score"] - best["score"] == pytest.approx(odds[question["id"]], abs=1e-3)
            assert bool(result["answer"]) == (best["score"] - result["null_score"] > result["tau"])
    if may_be_silent:
        assert len({bool(result["answer"]) for result in results}) == 2, "some are answered and some are not"


def test_an_empty_context_has_no_answer(squad_run):
    with pytest.raises(UsageError, match="input 0: context is empty"):
        Exact(squad_run[0])([{"question": "who?", "context": " "}])


# --- Tags -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["", "sum-all"])
def ner_run(request, tmp_path_factory):
    """Return a run's directory and its data."""
    folder = tmp_path_factory.mktemp("ner")
    data = write_conll(folder / "data")
    start = write_checkpoint(folder / "start")
    options = {"dir": str(data), "max_length": 40, "features": request.param, "features_dir": str(folder / "kept")}
    recipe = {"checkpoint": str(start), "batch_size": 8, "precision": "fp32", "data": options | {"context": False}}
    if request.param:
        recipe["model"] = {"bilstm_hidden_size": 16}
    train = {"max_steps": 90, "learning_rate": 1e-2 if request.param else 3e-3}
    run(Recipe.make(NER, recipe, {"train": train}), output=folder / "run")
    return folder / "run", data


def test_tags_of_words_are_those_of_the_run(ner_run):
    folder, _ = ner_run
    blocks = (folder / "predictions" / "dev.conll").read_text().split("\n\n")
    rows = [[line.split(" ") for line in block.splitlines() if not line.startswith("-DOC")] for block in blocks]
    rows = [block for block in rows if block]
    results = Exact(folder)([{"words": [row[0] for row in block]} for block in rows])
    kinds = [[tag[2:] or tag for tag in result["tags"]] for result in results]
    assert kinds == [[row[2][2:] or row[2] for row in block] for block in rows]
    assert len({kind for found in kinds for kind in found}) > 1


def test_entities_stand_where_they_say(ner_run):
    texts = ["good, word-bad.  so (good)", "word", ""]
    results = Exact(ner_run[0])(texts)
    assert any(result["entities"] for result in results)
    for text, result in zip(texts, results, strict=True):
        assert len(result["tags"]) == len(split_words(text))
        for found in result["entities"]:
            assert text[found["start"] : found["end"]] == found["text"]
        assert [text[start:end] for start, end in result["places"]] == [text[x:y] for x, y in split_words(text)]
    text, found = next((text, result) for text, result in zip(texts, results, strict=True) if result["entities"])
    given = [text[start:end] for start, end in split_words(text)]
    (words,) = Exact(ner_run[0])([{"words": given}])
    assert "places" not in words
    assert words["tags"] == found["tags"]
    assert len(words["entities"]) == len(found["entities"])
    assert all(" ".join(given[x["start"] : x["end"]]) == x["text"] for x in words["entities"])


def test_a_long_text_is_tagged_whole_and_each_part_sees_its_neighbours(ner_run):
    words = ["good", "bad", "so", "word"] * 30  # 120 tokens, three times as many as fit
    predictor = Exact(ner_run[0])
    (result,) = predictor([" ".join(words)])
    assert len(result["tags"]) == len(words)
    data, lengths, *_ = NER.encode_inputs([predictor.read(" ".join(words))], predictor.settings)
    assert len(data) > 3
    assert (lengths <= 40).all()
    assert (lengths > np.diff(data.ends, prepend=0) + 2).all(), "no window is without context"
    assert [word for sentence in data.text.sentences for word in sentence.words] == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("EU rejects the U.N.'s call.", ["EU", "rejects", "the", "U.N.'s", "call", "."]),
        ("(Blackburn, 1996-08-22)", ["(", "Blackburn", ",", "1996-08-22", ")"]),
        ("我在北京 2024 年", ["我", "在", "北", "京", "2024", "年"]),
        ("naïve café\u200b!", ["naïve", "café", "!"]),
        ("東京タワーへAdaと", [*"東京タワーへ", "Ada", "と"]),
        ("ที่ลี่ 10 ព្រះ", ["ที่", "ลี่", "10", "ព្", "រះ"]),
        ("  ", []),
    ],
)
def test_texts_are_cut_into_words_as_in_conll(text, words):
    assert [text[start:end] for start, end in split_words(text)] == words


def test_a_word_longer_than_the_model_is_truncated(ner_run):
    words = ["so", "-".join(["good"] * 30), "bad"]
    (result,) = Exact(ner_run[0])([{"words": words}])
    assert len(result["tags"]) == 3


# --- Endings, masks, next sentences -----------------------------------------------------------------------------------


def test_endings_are_scored_as_by_the_model_whatever_their_number(tmp_path):
    folder = write_head(tmp_path, "BertForMultipleChoice")
    model, tokenizer = heads.BertForMultipleChoice.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    endings = make_texts(6, 12)
    inputs = [
        {"context": FILLERS[0], "start": FILLERS[1], "endings": endings[:4]},
        {"sent1": FILLERS[0], "sent2": FILLERS[1], **{f"ending{number}": x for number, x in enumerate(endings[:4])}},
        [FILLERS[2], *endings],
    ]
    results = Exact(folder)(inputs)
    assert results[0] == results[1]
    for result, (context, start, given) in zip(
        results[1:], [(FILLERS[0], FILLERS[1], endings[:4]), (FILLERS[2], "", endings)], strict=True
    ):
        pairs = [[context] * len(given), [f"{start} {ending}".strip() for ending in given]]
        batch = tokenizer(*pairs, padding=True, return_tensors="pt")
        logits = model(**{name: column[None] for name, column in batch.items()}).logits[0]
        assert result["probabilities"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert result["ending"] == int(logits.argmax())


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForPreTraining"])
def test_masks_are_filled_as_by_the_stock_pipeline(head, tmp_path):
    folder = write_head(tmp_path, head)
    texts = [f"{FILLERS[0]} [MASK] {FILLERS[1]}", f"[MASK] {FILLERS[2]}", f"{FILLERS[3]} {FILLERS[4]} [MASK]."]
    # A bare pretraining checkpoint is a masked LM to the pipeline.
    stock = pipeline("fill-mask", model=str(folder), top_k=4)
    for result, expected in zip(Exact(folder, top=4)(texts), stock(texts), strict=True):
        (mask,) = result["masks"]
        assert [found["word"] for found in mask["words"]] == [found["token_str"] for found in expected]
        chances = [found["probability"] for found in mask["words"]]
        assert chances == pytest.approx([found["score"] for found in expected], abs=1e-5)
    two = Exact(folder)([f"[MASK] {FILLERS[0]} [MASK]"])[0]["masks"]
    assert len(two) == 2


def test_a_pretraining_s_model_takes_texts_as_long_as_its_longest_phase(tmp_path):
    folder = write_head(tmp_path / "run", "BertForMaskedLM")
    phases = "[[phase]]\nshare = 0.9\nmax_length = 16\n[[phase]]\nshare = 0.1\nmax_length = 48\n"
    (folder / "recipe.toml").write_text(f'task = "pretrain"\n[data]\nmax_length = 128\n{phases}')
    predictor = Exact(folder)
    assert len(predictor(["[MASK]" + " good" * 45])[0]["masks"]) == 1
    with pytest.raises(UsageError, match="the input has 49 tokens, but the model takes at most 48; shorten it"):
        predictor(["[MASK]" + " good" * 46])


def test_a_mask_is_filled_with_a_token_that_there_is(tmp_path):
    """Vocabulary sizes are often rounded up: the model has scores for tokens that the tokenizer lacks."""
    folder = write_head(tmp_path, "BertForMaskedLM", vocab_size=500)
    model = pretraining_heads.BertForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.cls.predictions.bias[450:] += 9.0
    model.save_pretrained(folder)
    (mask,) = Exact(folder, top=3)([f"{FILLERS[0]} [MASK]"])[0]["masks"]
    assert len(mask["words"]) == 3
    assert all(found["word"] in load_tokenizer(str(folder)).get_vocab() for found in mask["words"])
    assert sum(found["probability"] for found in mask["words"]) < 0.1, "the others keep theirs"


@pytest.mark.parametrize("head", ["BertForNextSentencePrediction", "BertForPreTraining"])
def test_next_sentences_are_judged_as_by_stock_transformers(head, tmp_path):
    folder = write_head(tmp_path, head)
    pairs = list(zip(make_texts(6, 9), make_texts(6, 9, seed=1), strict=True))
    model = AutoModelForNextSentencePrediction.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder))
    expected = [model(**tokenizer(*pair, return_tensors="pt")).logits.softmax(-1)[0, 0].item() for pair in pairs]
    results = Exact(folder)(pairs)
    assert [result["next_sentence"] for result in results] == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 0.01


def test_what_cannot_be_filled_or_judged_is_said(tmp_path):
    folder = write_head(tmp_path, "BertForPreTraining")
    results = list(Exact(folder).stream(["good", "[MASK] " + " ".join(FILLERS * 40), "good [MASK]", ("a", "b")]))
    assert "there is no [MASK] to fill in and no text_pair" in results[0]["error"]
    assert "tokens, but the model takes at most 128; shorten it" in results[1]["error"]
    assert "next_sentence" not in results[2]
    assert results[3].keys() == {"masks", "next_sentence"}
    assert results[3]["masks"] == []


# --- Invalid models and inputs ----------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_head_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"has the head BertModel, which does not predict classes.*bertkit features"):
        Exact(write_checkpoint(tmp_path))


def test_weights_that_are_missing_are_not_drawn(classifier, tmp_path):
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(UsageError, match=r"lacks weights of its BertForSequenceClassification: classifier"):
        Exact(folder)


@pytest.mark.parametrize(
    "setting", [{"return_dict": False}, {"output_attentions": True}, {"output_hidden_states": True}]
)
def test_what_a_configuration_returns_changes_nothing(setting, classifier, tmp_path):
    folder = shutil.copytree(classifier, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | setting))
    assert Exact(folder)(["good"]) == Exact(classifier)(["good"])


def write_head_with(folder, **config):
    """Return a classifier of three classes with a changed config.json."""
    write_head(folder, "BertForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"})
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "labels",
    [{"0": "a", "1": "b", "3": "c"}, {"0": "a", "1": "a", "2": "b"}, {"0": "a", "1": [], "2": None}],
)
def test_classes_without_names_of_their_own_are_refused(labels, tmp_path):
    folder = write_head_with(tmp_path, id2label=labels, label2id={})
    with pytest.raises(UsageError, match="must give each class a different name"):
        Exact(folder)


def test_a_vocabulary_larger_than_the_model_is_refused(classifier, tmp_path):
    folder = write_head(tmp_path, "BertForSequenceClassification", vocab_size=10)
    with pytest.raises(UsageError, match=r"the tokenizer has .* tokens, but .* only 10; use the checkpoint's own"):
        Exact(folder)


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ("data = 3", "'int'"),
        ('[data]\nmax_length = "x"', "`str`"),
        ("[data]\nmax_length = 0", ">= 1"),
        ("phase = 3", "'int'"),
        ("[[phase]]\nx = 1", "max_length"),
    ],
)
def test_a_damaged_recipe_beside_the_weights_is_one_line(recipe, named, tmp_path):
    folder = write_head(tmp_path, "BertForSequenceClassification")
    (folder / "recipe.toml").write_text(recipe + "\n")
    with pytest.raises(UsageError, match=rf"^the run's recipe.toml is damaged \(.*{named}"):
        Exact(folder)


@pytest.mark.parametrize(
    ("head", "given"),
    [
        ("BertForSequenceClassification", "good"),
        ("BertForTokenClassification", "good bad"),
        ("BertForQuestionAnswering", ("who?", "good")),
        ("BertForMultipleChoice", ("good", "bad", "so")),
        ("BertForMaskedLM", "[MASK] good"),
        ("BertForNextSentencePrediction", ("good", "bad")),
    ],
)
def test_a_model_that_has_diverged_says_so(head, given, tmp_path):
    folder = write_head(tmp_path, head)
    assert Exact(folder)([given])
    model = getattr(bertkit, head).from_pretrained(folder)
    model.bert.encoder.layer[1].output.dense.bias.data.fill_(float("nan"))
    model.save_pretrained(folder)
    with pytest.raises(UsageError, match=r"^the model's outputs are NaN or infinite: training has diverged; lower"):
        Exact(folder)([given])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"txt": "good"}, "text is missing; the input has txt: give text as a string"),
        (
            {"t\x1b[31m\n" + 999 * "x": "good"},
            rf"text is missing; the input has t\[31m {'x' * 94}: give text as a string",
        ),
        ({"text": 3}, "text is '3', not a string"),
        ({}, "text is missing; the input has nothing: give text as a string"),
        ([], r"expected 1 text \(text\), got 0; give them in order"),
        (["a", "b", "c"], r"expected 1 text \(text\), got 3; give them in order"),
        (3, "got int; give a text, a list of texts or a mapping"),
        (b"good", "got bytes; give"),
        ({("text", "b"): 1}, r"text is missing; the input has \('text', 'b'\): give text as a string"),
    ],
)
def test_an_input_that_is_none_is_named(given, message, classifier):
    with pytest.raises(UsageError, match=f"^input 1: {message}"):
        Exact(classifier)(["good", given])


def test_a_pair_of_which_a_text_is_missing_is_named(classifier):
    message = "^input 0: the input has text; this model takes two texts: give text and text_pair$"
    with pytest.raises(UsageError, match=message):
        Exact(classifier, pairs=True)([{"text": "good"}])


@pytest.mark.parametrize(
    "given",
    [
        {"endings": ["good"]},
        {"endings": "good bad"},
        {"endings": ["good", 3]},
        {"endings": ["good", "bad"], "start": 3},
        {"ending0": "good"},
        {},
    ],
)
def test_endings_that_are_none_are_named(given, tmp_path):
    folder = write_head(tmp_path, "BertForMultipleChoice")
    message = "^input 0: endings must be a list of at least two strings, and start must be a string; correct them$"
    with pytest.raises(UsageError, match=message):
        Exact(folder)([{"context": "so"} | given])


@pytest.mark.parametrize("words", [3, ["good", 3], None])
def test_words_that_are_none_are_named(words, tmp_path):
    folder = write_head(tmp_path, "BertForTokenClassification")
    message = "^input 0: words must be a list of strings; for a single string use the key text$"
    with pytest.raises(UsageError, match=message):
        Exact(folder)([{"words": words}])


# --- Files ------------------------------------------------------------------------------------------------------------


def test_lines_are_read_in_each_form(tmp_path, monkeypatch):
    forms = {
        "a.jsonl": '{"text": "good"}\n"bad"\n\n{"text": "so"}\n',
        "a.tsv": '\ufefftext\tx\ngood\t1\nbad\t"2\nso\t\n',
        "a.txt": "good\r\nbad\r\n\r\nso",
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        inputs = [line.value for line in read_inputs(str(tmp_path / name))]
        empty = [""] * (name == "a.txt")  # each line of a text is answered
        found = [given if isinstance(given, str) else given["text"] for given in inputs]
        assert found == ["good", "bad", *empty, "so"]


def test_standard_input_is_text_but_for_lines_that_begin_as_json(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b'good\n\n{"text": "bad"}\n"so"\n[so]\n{so}\n'))
    monkeypatch.setattr("sys.stdin", stdin)
    lines = list(read_inputs("-"))
    assert [line.value for line in lines[:5]] == ["good", "", {"text": "bad"}, "so", "[so]"]
    assert "is not a JSON" in str(lines[5].value)
    assert [line.place for line in lines] == [f"standard input, line {number}" for number in range(1, 7)]


def test_standard_input_that_is_closed_is_one_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="standard input is closed; pipe the inputs to it or name a file"):
        list(read_inputs("-"))


@pytest.mark.parametrize("name", ["a.txt", "link.txt", "twin.txt", "sub/../a.txt", "-"])
def test_an_output_that_is_the_input_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("good\n")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "twin.txt").hardlink_to(tmp_path / "a.txt")
    with (tmp_path / "a.txt").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(UsageError, match="is also the input and would be overwritten; name another file with"):
            check_output("-" if name == "-" else "a.txt", tmp_path / ("a.txt" if name == "-" else name))
        check_output("-", tmp_path / "b.txt")
        check_output("-", Path(os.devnull))


def test_the_command_does_not_replace_its_input(call, classifier, tmp_path):
    (tmp_path / "a.txt").write_text("good\n")
    code, _, err = call("predict", classifier, "--input", "a.txt", "--output", "./a.txt")
    assert (code, err.count("\n")) == (2, 1)
    assert (tmp_path / "a.txt").read_text() == "good\n"


BAD = [
    ("a.jsonl", b'"x"\n{"id": NaN}\n{"id": 1e999}\n"z"\n', {1: "line 2: text is missing", 2: "line 3 is not a JSON"}),
    (
        "a.jsonl",
        b'{"text": "x"}\n{"text": \n"y"\n3\n',
        {1: "line 2 is not a JSON", 3: "line 4 is not a JSON object or string"},
    ),
    ("a.jsonl", b'"x"\n\xff\xfe\n"y"\n' + b"[" * 100_000, {1: "line 2 is not UTF-8", 3: "line 4 is not a JSON"}),
    (
        "a.tsv",
        b"text\tid\nx\t1\ny\nz\t2\t3\nw\t4\n",
        {1: "line 3 has 1 cell, but the header 2", 2: "line 4 has 3"},
    ),
    ("a.txt", b"x\ny\0\nz\nw\n", {1: "line 2 has a NUL byte"}),
    ("a.jsonl", b'"x"\n\n\n{"txt": "y"}\n"z"\n{"text": "w"}\n', {1: "line 4: text is missing"}),
    (
        "a.jsonl",
        b'"x"\n{"id": "\\ud800", "text": "y"}\n"\\udc00"\n"z"\n',
        {1: "surrogate pair", 2: "line 3 is not a JSON"},
    ),
]


@pytest.mark.parametrize(("name", "content", "wrong"), BAD)
def test_a_bad_line_is_named_and_does_not_stop_the_others(name, content, wrong, tmp_path, classifier):
    (tmp_path / name).write_bytes(content)
    lines = []
    results = Exact(classifier).stream(read_inputs(str(tmp_path / name)))
    errors = write_file(results, tmp_path / "out.jsonl", lines.append, write_lines).errors
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == 4
    assert errors == len(wrong)
    for place, result in enumerate(found):
        assert ("error" in result) == (place in wrong)
        if place in wrong:
            assert wrong[place] in result["error"]
            assert any(wrong[place] in line for line in lines)
        else:
            assert result["label"]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no /proc")
@pytest.mark.parametrize("name", ["a.jsonl", "a.tsv"])
def test_a_file_whose_content_does_not_come_is_one_line(name, tmp_path):
    """Reading into address 0 fails like a bad sector."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(UsageError) as error:
        list(read_inputs(str(tmp_path / name)))
    assert str(error.value) == f"{tmp_path / name} cannot be read (Input/output error); check its path and permissions"


def test_nothing_is_left_of_an_output_that_fails(tmp_path, classifier):
    def fail():
        yield {"label": "x"}
        raise UsageError("no more")

    with pytest.raises(UsageError, match="no more"):
        write_file(fail(), tmp_path / "out.jsonl", ignore, write_lines)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_file([], tmp_path / "file" / "out.jsonl", ignore, write_lines)


@pytest.mark.slow
def test_a_stream_is_written_behind_what_is_there(classifier, tmp_path):
    log = tmp_path / "log.txt"
    for output in ("/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"):
        log.write_text("precious\n")
        command = [sys.executable, "-m", "bertkit", "predict", str(classifier), "good", "--precision", "fp32"]
        with log.open("a") as stream:
            subprocess.run([*command, "--output", output], stdout=stream, check=True)
        first, result, said = log.read_text().splitlines()
        assert first == "precious"
        assert json.loads(result) == Exact(classifier)(["good"])[0]
        assert said == f"1 result in {output}"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_standard_output_that_is_full_or_closed_is_no_traceback(classifier):
    command = [sys.executable, "-m", "bertkit", "predict", str(classifier), "good"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "(No space left on device); free some space or redirect the output, and try again"
    assert done.stderr == f"bertkit: cannot write to standard output {said}\n"
    closed = subprocess.run(f"{shlex.join(command)} >&-", shell=True, stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "there.jsonl")
    write_file([{"label": "x"}], tmp_path / "link.jsonl", ignore, write_lines)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "there.jsonl").read_text() == '{"label": "x"}\n'
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit((tmp_path / "pipe").read_text)
        write_file([{"label": "y"}], tmp_path / "pipe", ignore, write_lines)
        assert reader.result(timeout=10) == '{"label": "y"}\n'
    assert (tmp_path / "pipe").is_fifo()


# --- Truncated inputs -------------------------------------------------------------------------------------------------


def count_cut(predictor, *inputs):
    return ["cut" in result for result in predictor(list(inputs))]


def test_what_is_cut_says_so_and_what_just_fits_does_not(classifier):
    room = 128  # tokens; each word is one, and [CLS] and [SEP] are two, or three of a pair
    predictor = Exact(classifier)
    fits, over = " ".join(["good"] * (room - 2)), " ".join(["good"] * (room - 1))
    pair = [" ".join(["good"] * 60), " ".join(["bad"] * 65)]
    assert count_cut(predictor, "good", fits, over, pair, [pair[0], pair[1] + " bad"]) == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_endings_and_questions_that_are_cut_say_so(tmp_path, squad_run):
    folder = write_head(tmp_path, "BertForMultipleChoice")
    context = " ".join(["good"] * 100)
    long, short = {"endings": ["bad", "bad " * 26], "context": context}, {"endings": ["bad"] * 3, "context": context}
    just = {"endings": ["bad", "bad " * 25], "context": context}
    assert count_cut(Exact(folder), short, long, just, short) == [False, True, False, False]
    ask = {"context": " ".join(FILLERS * 20)}
    questions = [ask | {"question": " ".join(["good"] * count)} for count in (3, 12, 13)]
    assert count_cut(Exact(squad_run[0]), *questions) == [False, False, True]


def test_nothing_is_cut_of_text_that_is_tagged(ner_run):
    assert count_cut(Exact(ner_run[0]), "good " * 200, "good") == [False, False]


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_answers_texts_in_words(call, classifier):
    code, out, err = call("predict", classifier, "good", "bad bad")
    expected = [f"{x['label']}  ({x['probability']:.1%})" for x in Predictor(classifier)(["good", "bad bad"])]
    assert (code, out.splitlines(), err) == (0, expected, "")


def test_the_command_answers_a_file_line_by_line_and_counts_what_is_wrong_and_cut(call, classifier, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"id": 7, "text": "good"}\n\n{"txt": "x"}\n' + json.dumps("good " * 200) + "\n")
    code, out, err = call("predict", classifier, "--input", source)
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [sorted(result) for result in results] == [
        ["id", "label", "probabilities", "probability"],
        ["error"],
        ["cut", "label", "probabilities", "probability"],
    ]
    assert err.splitlines() == [
        f"bertkit: {source}, line 3: text is missing; the input has txt: give text as a string",
        "bertkit: 1 of 3 inputs are too long for this model and were truncated: number 3",
        "bertkit: 1 input cannot be predicted; the output gives the reason for each",
    ]
    code, out, _ = call("predict", classifier, "--input", source, "--output", tmp_path / "out.jsonl")
    assert code == 2
    assert out.splitlines()[-1] == f"2 results in {tmp_path / 'out.jsonl'}, 1 invalid input"
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == results


def test_the_command_reads_standard_input(call, classifier, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"good\nbad\n")))
    code, out, err = call("predict", classifier, "--input", "-")
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == Predictor(classifier)(["good", "bad"])


@pytest.mark.slow
def test_what_somebody_types_is_answered_line_by_line(classifier):
    """In a terminal the second line is written only after the first answer has arrived."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "bertkit", "predict", str(classifier), "--input", "-"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True) as process:
        try:
            for text in ("good", "bad"):
                os.write(ours, f"{text}\n".encode())
                found = json.loads(process.stdout.readline())
                assert [found] == Predictor(classifier)([text])
            os.write(ours, b"\x04")
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the inputs either as TEXT or with --input FILE"),
        (["good", "--input", "-"], "give the inputs either as TEXT or with --input FILE"),
        (["--input", "no.jsonl"], "there is no file no.jsonl; name a file with --input, or - for standard input"),
        (["--input", "."], ". is a folder; name a file with --input, or - for standard input"),
        (["good", "--pair"], "expected a multiple of 2 texts (text and text_pair), got 1; give them in order"),
        (["good", "--precision", "fp8"], 'precision = "fp8"; expected one of auto, fp32, bf16, fp16'),
    ],
)
def test_a_wrong_command_is_one_line(arguments, words, call, classifier):
    code, _, err = call("predict", classifier, *arguments)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_texts_one_after_the_other_are_inputs_of_the_model(classifier, squad_run, tmp_path):
    assert Exact(classifier).group(["a", "b"]) == [["a"], ["b"]]
    assert Exact(classifier, pairs=True).group(["a", "b"]) == [["a", "b"]]
    assert Exact(squad_run[0]).group(["q", "c", "q", "d"]) == [["q", "c"], ["q", "d"]]
    choice = write_head(tmp_path, "BertForMultipleChoice")
    assert Exact(choice).group(["c", "a", "b", "d"]) == [["c", "a", "b", "d"]]


def test_words_of_a_result_are_one_line(squad_run):
    said = Exact(squad_run[0]).describe({"answer": "a\nb", "best": {"text": "a\nb", "score": 1.0}})
    assert said == "a b  (score 1.00)"


def test_every_kind_of_result_has_words(squad_run, ner_run, tmp_path):
    said = []
    for head in ("BertForMultipleChoice", "BertForPreTraining", "BertForNextSentencePrediction"):
        predictor = Exact(write_head(tmp_path / head, head), top=2)
        texts = {"BertForMultipleChoice": ["good", "bad", "so"]}.get(head, ["good [MASK]", "bad"])
        said.append(predictor.describe(predictor([texts])[0]))
    assert re.fullmatch(r"ending [12]  \(\d+\.\d%\)", said[0])
    assert re.fullmatch(r"\S+ \d+%, \S+ \d+%; follows: \d+\.\d%", said[1])
    assert re.fullmatch(r"follows: \d+\.\d%", said[2])
    answers, tags = Exact(squad_run[0]), Exact(ner_run[0])
    described = answers.describe(answers([("who?", " ".join(FILLERS))])[0])
    assert re.search(r"  \((score -?\d+\.\d\d|\d+\.\d\d (above|below) the threshold(, best span '.+')?)\)$", described)
    result = tags(["good bad word"])[0]
    assert tags.describe(result) == (", ".join(f"{x['text']}: {x['type']}" for x in result["entities"]) or "(nothing)")
    assert answers.describe({"error": "x"}) == "error: x"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_precision_is_that_of_training_unless_another_is_asked_for(classifier, has_bf16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    predictor, exact = Predictor(classifier), Exact(classifier)
    assert (predictor.precision, exact.precision) == ("bf16" if has_bf16 else "fp32", "fp32")
    found, expected = ([x["probability"] for x in side(TEXTS)] for side in (predictor, exact))
    assert found == pytest.approx(expected, abs=0.05)
    assert (found == expected) is not has_bf16


def test_the_rows_of_a_frame_are_inputs_whose_texts_are_the_columns_of_the_run(tmp_path):
    """A DataFrame by itself is a sequence of the names of its columns."""
    folder = write_head(tmp_path, "BertForSequenceClassification", text_columns=["body"])
    frame = pandas.DataFrame({"title": "bad", "body": ["good", math.nan, "bad so"], "stars": [1, 2, 3]})
    predictor = Exact(folder)
    expected = predictor(["good", "", "bad so"])
    assert predictor(frame) == predictor(datasets.Dataset.from_pandas(frame)) == expected
    assert predictor(frame["body"].fillna("")) == expected
    with pytest.raises(UsageError, match="input 0: the input has title, stars, but not body; give it"):
        predictor(frame.drop(columns="body"))
    with pytest.raises(UsageError, match="inputs must be a list, got dict"):
        predictor(frame.to_dict("list"))


def test_the_predictor_is_a_public_name_and_takes_lists(classifier):
    assert bertkit.Predictor is Predictor
    for one in ("good", {"text": "good"}):
        with pytest.raises(
            UsageError, match=r"inputs must be a list, got (str|dict); give \[input\], a list of inputs or a DataFrame"
        ):
            Exact(classifier)(one)
