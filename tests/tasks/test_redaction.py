"""Redacted names: what replaces them, the threshold for a recall, its scores, and what has none."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.inference.evaluate import evaluate
from bertkit.inference.predictor import Predictor
from bertkit.metrics.ner import choose_redaction, count_redacted, find_entities
from bertkit.tasks.ner import NER
from bertkit.tasks.redaction import describe_redaction, redact, tag_likely
from bertkit.training.predictions import read_table
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_conll, write_treebank
from tests.tasks.conftest import make_small

ASKED = 0.9


def restore(result, content):
    """Put the names back, as the page says; `content` tells the type only."""
    redacted = result["redacted"]
    for entity in result["entities"]:
        start, name = entity["start"], content[entity["start"] : entity["end"]]
        size = len(entity["placeholder"]) if isinstance(content, str) else 1
        redacted = redacted[:start] + name + redacted[start + size :]
    return redacted


def mark(text, *names):
    """Return the entities of a text in which the names occur in this order."""
    entities, behind = [], 0
    for name, kind in names:
        start = text.index(name, behind)
        behind = start + len(name)
        entities.append({"text": name, "type": kind, "start": start, "end": behind})
    return entities


# --- The text ---------------------------------------------------------------------------------------------------------


def test_names_become_types_or_numbers_of_a_document():
    text = "Ada met Bob\tin  PARIS; ada (Paris) was Bob's, Ada’s Paris’."
    names = [("Ada", "PER"), ("Bob", "PER"), ("PARIS", "LOC"), ("ada", "PER"), ("Paris", "LOC"), ("Bob", "PER")]
    entities = mark(text, *names, ("Ada", "PER"), ("Paris", "ORG"))
    types, numbered = (redact(text, entities, form) for form in ("types", "numbered"))
    assert types["redacted"] == "[PER] met [PER]\tin  [LOC]; [PER] ([LOC]) was [PER]'s, [PER]’s [ORG]’."
    assert (
        numbered["redacted"] == "[PER-1] met [PER-2]\tin  [LOC-1]; [PER-1] ([LOC-1]) was [PER-2]'s, [PER-1]’s [ORG-1]’."
    )
    assert restore(types, text) == restore(numbered, text) == text


@pytest.mark.parametrize("form", ["types", "numbered"])
def test_a_text_without_names_stays(form):
    for text in ("", "  [PER-1] \n", "no name"):
        assert redact(text, [], form) == {"redacted": text, "entities": []}


def test_neighbours_of_two_types_and_words_in_a_list():
    entities = mark("Ada London", ("Ada", "PER"), ("London", "LOC"))
    assert redact("Ada London", entities, "types")["redacted"] == "[PER] [LOC]"
    words = ["Ada", "King", "left"]
    found = redact(words, [{"text": "Ada King", "type": "PER", "start": 0, "end": 2}], "numbered")
    assert found["redacted"] == ["[PER-1]", "left"]
    assert restore(found, words) == words


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=4), st.sampled_from(["", "A", "B"])), max_size=8))
def test_names_can_be_put_back_into_any_text(pieces):
    text, entities = "", []
    for piece, kind in pieces:
        if kind and piece:
            entities.append({"text": piece, "type": kind, "start": len(text), "end": len(text) + len(piece)})
        text += piece
    for form in ("types", "numbered"):
        found = redact(text, entities, form)
        assert restore(found, text) == text
        pairs = {((e["type"], e["text"].casefold()), e["placeholder"]) for e in found["entities"]}
        assert len(dict(pairs)) == len(pairs), "a name has one placeholder"
        if form == "numbered":
            assert len({placeholder for _, placeholder in pairs}) == len(pairs), "and a placeholder one name"


def test_neighbours_of_one_type_are_one_name():
    tags = tag_likely([0.5, 0.3, 0.9, 0.2, 0.3, -1.0, 0.4], ["A", "A", "B", "B", "B", "A", "A"], 0.3)
    assert tags == ["B-A", "I-A", "B-B", "O", "B-B", "O", "B-A"]
    assert tag_likely([-1.0, 0.0], ["", "A"], 0.0) == ["O", "B-A"], "a word without a token stays at every threshold"


# --- The threshold ----------------------------------------------------------------------------------------------------

WORD = st.tuples(st.integers(-1, 9), st.sampled_from(["O", "B-A", "I-A"]))


def list_redacted(shares, gold, threshold):
    """Return whether each name is redacted, and each other word, by a loop over the words."""
    names, others = [], []
    for row, entities in zip(shares, gold, strict=True):
        inside = set()
        for first, end, _ in entities:
            inside |= set(range(first, end))
            names.append(all(row[number] >= threshold and row[number] >= 0 for number in range(first, end)))
        others += [row[x] >= threshold and row[x] >= 0 for x in range(len(row)) if x not in inside]
    return names, others


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(WORD, max_size=6), min_size=1, max_size=6), st.sampled_from([0.2, 0.5, 0.7, 0.9, 0.99]))
def test_the_threshold_is_the_highest_with_the_recall(sentences, recall):
    shares = [[value / 10 if value >= 0 else -1.0 for value, _ in words] for words in sentences]
    gold = [find_entities([tag for _, tag in words]) for words in sentences]
    chosen = choose_redaction(shares, gold, recall)
    names, others = list_redacted(shares, gold, chosen)
    counts = count_redacted(shares, gold, chosen)
    sums = [int(column.sum()) for column in counts.values()]
    assert sums == [sum(names), len(names), sum(others), len(others)]
    if not names:
        assert chosen == 0.5
        return
    rates = {step / 10: np.mean(list_redacted(shares, gold, step / 10)[0]) for step in range(11)}
    enough = [threshold for threshold, rate in rates.items() if rate >= recall]
    if max(rates.values()) == 0:
        assert chosen == 0.5
    else:
        best = max(enough, default=max(t for t, rate in rates.items() if rate == max(rates.values())))
        assert list_redacted(shares, gold, best) == (names, others)
        assert chosen <= best


@pytest.fixture(scope="module")
def finished(bert, tmp_path_factory):
    """A run that has learned some names."""
    folder = tmp_path_factory.mktemp("redaction")
    data = {"max_length": 40, "threshold": f"recall={ASKED}"}
    lines = []
    recipe = Recipe.make(NER, make_small(bert, write_conll(folder / "ner"), data, max_steps=30))
    return folder / "run", run(recipe, output=folder / "run", report=lines.append)


def test_the_threshold_is_that_of_dev_with_its_scores(finished):
    folder, metrics = finished
    threshold = json.loads((folder / "config.json").read_text())["redaction_threshold"]
    assert threshold == metrics["redaction_threshold"]
    assert metrics["chosen_on_dev"] == "redaction_threshold"
    for split, prefix in (("dev", ""), ("test", "test_")):
        frame = read_table(folder / "predictions" / f"{split}.parquet").to_pandas()
        names = frame["redacted_names"].sum() / frame["all_names"].sum()
        others = frame["redacted_others"].sum() / frame["all_others"].sum()
        assert metrics[f"{prefix}redaction_recall"] == pytest.approx(names)
        assert metrics[f"{prefix}redaction_others"] == pytest.approx(others)
        low, high = (metrics[f"{prefix}redaction_recall_{end}"] for end in ("low", "high"))
        assert low <= names <= high
        assert frame["all_names"].sum() == sum(len(find_entities(list(tags))) for tags in frame["label"])
    assert metrics["redaction_recall"] >= ASKED == metrics["asked_recall"]
    (line, *_) = describe_redaction(metrics)
    assert line[:1].upper() + line[1:] in (folder / "README.md").read_text()
    assert f"{threshold:.3g}" in line


def test_evaluate_repeats_the_scores(finished):
    folder, metrics = finished
    for split in evaluate(str(folder), None, None):
        prefix = "" if split.name == "dev" else f"{split.name}_"
        names = {name.removeprefix(prefix) for name in metrics if name.startswith(f"{prefix}redaction")} | {"f1"}
        assert {"redaction_recall", "redaction_recall_low", "redaction_others"} <= names
        for name in names:
            assert split.metrics[name] == pytest.approx(metrics[f"{prefix}{name}"]), name


def test_without_redaction_the_threshold_changes_nothing(finished, bert, tmp_path):
    folder, metrics = finished
    data = {"max_length": 40}
    recipe = Recipe.make(NER, make_small(bert, folder.parent / "ner", data, max_steps=30))
    others = run(recipe, output=tmp_path / "run")
    added = {name for name in metrics if "redaction" in name or "asked" in name} | {"chosen_on_dev"}
    assert {name: value for name, value in metrics.items() if name not in added} == others
    for file in ("predictions/dev.conll", "model.safetensors"):
        assert (folder / file).read_bytes() == (tmp_path / "run" / file).read_bytes()
    assert "redaction_threshold" not in json.loads((tmp_path / "run" / "config.json").read_text())
    texts = ["good bad so word1", "word2"]
    assert Predictor(folder, precision="fp32")(texts) == Predictor(tmp_path / "run", precision="fp32")(texts)


def test_a_recall_that_is_not_reached_is_told():
    shares, gold = [[0.9, -1.0]], [[(0, 1, "A"), (1, 2, "A")]]
    threshold = choose_redaction(shares, gold, 0.99)
    assert count_redacted(shares, gold, threshold)["redacted_names"].tolist() == [1]
    metrics = {"redaction_threshold": threshold, "redaction_recall": 0.5, "redaction_others": 0.0, "asked_recall": 0.99}
    assert len(describe_redaction(metrics)) == 1, "other rows have chosen"
    metrics["chosen_on_dev"] = "redaction_threshold"
    assert describe_redaction(metrics)[1] == "no threshold redacts 99.0% of the names: the nearest redacts 50.0%"
    assert len(describe_redaction(metrics | {"redaction_recall": 0.99})) == 1
    assert math.isclose(threshold, 0.45)


def test_what_has_no_threshold_is_refused(tmp_path, bert, refused):
    folder, treebank = write_conll(tmp_path / "ner"), write_treebank(tmp_path / "treebank")
    for place, threshold in ((folder, "f1"), (folder, "precision=0.9"), (folder, "high"), (treebank, "recall=0.9")):
        with refused():
            NER.load(Recipe.make(NER, make_small(bert, place, {"threshold": threshold})).data, str)
