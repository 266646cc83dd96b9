"""Explanations: exact on a linear model, equal to captum's on stock BERT, complete, and about the words of the text."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertkit.analysis import explanation as module
from bertkit.analysis.explanation import GradientPath, Logit, attribute, describe_words, explain, list_parts
from bertkit.analysis.report import read_explanations
from bertkit.cli.console import Screen
from bertkit.inference.predictor import Predictor
from bertkit.model.onnx_model import OnnxModel
from bertkit.reports.html import render
from tests.official import FILLERS
from tests.world import Exact, write_head

LONG_TEXT = " ".join(f"word{number}" for number in range(90))  # 180 tokens or more; the model has 128 positions
SENTENCE = "good word12 , bad word3 ."


def explain_one(predictor, given):
    """Return the result and its explanation.

    The attributions add up to the logit's rise above the baseline, within the error that the entry states.
    """
    (result,) = explain(predictor, [given])
    for entry in result["explanation"]:
        total = sum(word["attribution"] for word in entry["words"])
        assert abs(total - (entry["logit"] - entry["baseline"])) <= entry["error"] * abs(entry["logit"]) + 1e-5
        assert entry["error"] < module.MOST_ERROR
    return result, result["explanation"]


# --- The integral -----------------------------------------------------------------------------------------------------


class LinearModel(nn.Module):
    """Two logits, each a sum of products of the embeddings with a vector; with `power` 2 the sum is squared."""

    device = torch.device("cpu")

    def __init__(self, power=1):
        super().__init__()
        self.table, self.vectors, self.power = nn.Embedding(9, 5), nn.Linear(5, 2, bias=False), power

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, token_type_ids):
        return {"logits": self.vectors(self.table(input_ids)).sum(1) ** self.power}  # (B, 2)


def follow(model, ids, label):
    item = {"input_ids": np.array(ids), "token_type_ids": np.zeros(len(ids), np.int64)}
    path = GradientPath(
        SimpleNamespace(model=model, tokenizer=SimpleNamespace(mask_token_id=8)), item, np.array(ids) < 2
    )
    path.logits.append(Logit(0, "logits", (label,)))
    value, baseline, error, (found,) = attribute([path])
    return value, baseline, error, found


def test_attributions_to_a_linear_model_are_its_products():
    model = LinearModel()
    value, baseline, error, found = follow(model, [0, 5, 6, 5, 1], label=1)
    with torch.no_grad():
        products = model.table.weight @ model.vectors.weight[1]  # (V,)
    rises = (products[[0, 5, 6, 5, 1]] - products[[0, 8, 8, 8, 1]]).numpy()
    assert found == pytest.approx(rises, abs=1e-5)
    assert (found[0], found[-1]) == (0, 0), "the baseline keeps the special tokens"
    assert value - baseline == pytest.approx(rises.sum(), abs=1e-5)
    assert error < 1e-4


def test_attributions_to_a_squared_sum_are_the_products_times_the_ends():
    """The integral of d(s²) = 2 s ds on a straight line is the rise of a token times the sum of both ends."""
    model = LinearModel(power=2)
    _, _, _, found = follow(model, [0, 5, 6, 7, 1], label=0)
    with torch.no_grad():
        products = model.table.weight @ model.vectors.weight[0]
    ends = products[[0, 5, 6, 7, 1]], products[[0, 8, 8, 8, 1]]
    expected = (ends[0] - ends[1]) * (ends[0].sum() + ends[1].sum())
    assert found == pytest.approx(expected.numpy(), abs=1e-4)


def test_attributions_to_bert_are_those_of_captum_on_the_stock_model(classifier, monkeypatch):
    from captum.attr import IntegratedGradients

    monkeypatch.setattr(module, "FIRST_STEPS", 200)
    result, (entry,) = explain_one(Exact(classifier), SENTENCE)
    stock = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    masked = torch.full_like(ids, tokenizer.mask_token_id)
    masked[:, [0, -1]] = ids[:, [0, -1]]
    embedded, hidden = (stock.get_input_embeddings()(x).detach() for x in (ids, masked))
    label = list(stock.config.id2label.values()).index(result["label"])
    found = IntegratedGradients(lambda x: stock(inputs_embeds=x).logits).attribute(
        embedded, hidden, target=label, n_steps=200
    )
    tokens = found[0].sum(-1)[1:-1].tolist()
    pieces = tokenizer.convert_ids_to_tokens(ids[0].tolist())[1:-1]
    assert pieces == ["good", "word", "##1", "##2", "[UNK]", "bad", "word", "##3", "."]
    own = [word["attribution"] for word in entry["words"]]
    assert entry["logit"] == pytest.approx(stock(ids).logits[0, label].item(), abs=1e-4)
    expected = [tokens[0], sum(tokens[1:4]), *tokens[4:6], sum(tokens[6:8]), tokens[8]]
    assert own == pytest.approx(expected, abs=1e-3 * max(map(abs, expected)))


# --- Targets and words ------------------------------------------------------------------------------------------------


def test_words_are_those_of_the_text_and_pieces_are_summed(classifier):
    text = "Good  word12’s “bad”\t🙂🙂 Ünaïve\u0301 \x00 U.N. 好好."
    _, (entry,) = explain_one(Exact(classifier), text)
    assert [text[word["start"] : word["end"]] for word in entry["words"]] == [word["text"] for word in entry["words"]]
    assert [word["text"] for word in entry["words"]] == (
        ["Good", "word12’s", "“", "bad", "”", "🙂🙂", "Ünaïve\u0301", "U.N", ".", "好", "好", "."]
    )
    assert {word["field"] for word in entry["words"]} == {"text"}


def test_a_class_of_a_pair_is_explained_by_the_words_of_both_texts(classifier):
    result, (entry,) = explain_one(Exact(classifier, pairs=True), [SENTENCE, "so word4"])
    assert entry["target"] == result["label"]
    fields = [(word["field"], word["text"]) for word in entry["words"]][-3:]
    assert fields == [("text", "."), ("text_pair", "so"), ("text_pair", "word4")]


def test_every_predicted_label_and_score_is_explained(tmp_path):
    values = {"num_labels": 3, "problem_type": "multi_label_classification"}
    predictor = Exact(write_head(tmp_path / "labels", "BertForSequenceClassification", seed=1, **values))
    predictor.settings.model.config.thresholds = [0.0, 0.0, 1.0]
    result, entries = explain_one(predictor, SENTENCE)
    assert [entry["target"] for entry in entries] == result["labels"] == ["LABEL_0", "LABEL_1"]
    for entry in entries:
        chance = result["probabilities"][entry["target"]]
        assert entry["logit"] == pytest.approx(np.log(chance / (1 - chance)), abs=1e-4)
    values = {"num_labels": 1, "problem_type": "regression"}
    predictor = Exact(write_head(tmp_path / "score", "BertForSequenceClassification", **values))
    result, (entry,) = explain_one(predictor, SENTENCE)
    assert (entry["target"], entry["logit"]) == ("score", pytest.approx(result["score"], abs=1e-4))


@pytest.mark.parametrize("pooling", ["mean", "max", None])
def test_a_long_text_is_explained_by_what_was_read_of_it(pooling, tmp_path):
    """All windows decide with the mean, one with the maximum; without pooling the text is truncated."""
    values = {"id2label": {0: "bad", 1: "good"}} | ({"window_pooling": pooling} if pooling else {})
    result, (entry,) = explain_one(Exact(write_head(tmp_path, "BertForSequenceClassification", **values)), LONG_TEXT)
    words = [word["text"] for word in entry["words"]]
    assert (len(words) == 90) == (pooling == "mean")
    assert " ".join(words) in LONG_TEXT
    assert (pooling == "max") or LONG_TEXT.startswith(" ".join(words))
    logits = np.log(list(result["probabilities"].values()))
    assert entry["target"] == result["label"]
    assert entry["logit"] >= logits.max(), "a softmax lowers every logit by the same"


# --- In words ---------------------------------------------------------------------------------------------------------


def make_words(*parts, field="text"):
    return [
        {"field": field, "text": text, "start": start, "end": start + len(text), "attribution": value}
        for text, start, value in parts
    ]


def test_an_explanation_in_words_names_the_largest_and_keeps_the_spaces():
    words = make_words(("Not", 0, -1.0), ("bad", 4, 2.0), ("!", 7, 0.0))
    assert describe_words(words) == "bad +2.00, Not -1.00, ! +0.00"
    assert list(list_parts(words)) == [("Not", -0.5), (" ", 0.0), ("bad", 1.0), ("", 0.0), ("!", 0.0)]
    both = [*make_words(("a", 0, 0.0)), *make_words(("b", 0, 0.0), field="text_pair")]
    assert "".join(text for text, _ in list_parts(both)) == "a  |  b"
    assert list(list_parts([])) == []


def test_the_command_line_explains_in_json_and_in_words(classifier, call, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = call("predict", classifier, SENTENCE, "--explain")
    label, words = out.splitlines()
    assert code == 0
    assert words.startswith(f"  {label.split()[0]}: ")
    assert len(re.findall(r" [+-]\d+\.\d\d\b", words)) == module.MOST_NAMED_WORDS
    Path("in.jsonl").write_text(json.dumps({"id": 3, "text": SENTENCE}))
    code, _, _ = call("predict", classifier, "--input", "in.jsonl", "--output", "out.jsonl", "--explain")
    result = json.loads(Path("out.jsonl").read_text())
    assert (code, result["id"], result["explanation"][0]["target"]) == (0, 3, result["label"])
    code, _, err = call("predict", classifier, "--input", "in.jsonl", "--output", "out.csv", "--explain")
    assert (code, err.count("\n")) == (2, 1)
    assert "--output that ends in .jsonl" in err


def test_a_terminal_with_colours_shows_the_whole_text_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = make_words(("Not", 0, -1.0), ("b\x1bad", 4, 2.0))
    Screen().show_explanation([{"target": "good", "words": words}])
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "\x1b[30;48;2;90;160;255mb\\u001bad\x1b[0m" in line


def test_what_cannot_be_explained_is_one_line(classifier, tmp_path, monkeypatch, refused):
    exported = Exact(classifier)
    model = OnnxModel.__new__(OnnxModel)
    model.head = "BertForSequenceClassification"
    object.__setattr__(exported.settings, "model", model)
    choices = Exact(write_head(tmp_path, "BertForMultipleChoice"))
    for predictor in (Predictor(classifier, precision="bf16"), exported, choices):
        with refused():
            next(explain(predictor, FILLERS))
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.delitem(sys.modules, "captum.attr", raising=False)
    with refused():
        next(explain(Exact(classifier), FILLERS))


def test_the_page_shows_the_explanations_beside_a_runs_predictions(tmp_path):
    words = make_words(("Not", 0, -1.0), ("<bad>", 4, 2.0), ("\ud800", 9, 0.5))
    lines = [{"label": "x", "explanation": [{"target": "good", "words": words}]}, {"other": 1}]
    (tmp_path / "predictions").mkdir()
    file = tmp_path / "predictions" / module.EXPLANATIONS
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (one,) = read_explanations(file)
    page = render([{"name": "a", "kind": "run", "id": "run-1", "explanations": [one]}])
    assert '<span class="against" style="--share: 0.500">Not</span> <span class="for"' in page
    assert "&lt;bad&gt;" in page
    assert "(&lt;bad&gt; +2.00, Not -1.00, ? +0.50)" in page
