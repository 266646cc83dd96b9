"""Not answering: the confidence that is chosen, the same answers wherever the model is used, and what is said."""

import json

import numpy as np
import pandas as pd
import pytest

import bertkit
from bertkit.inference.evaluate import evaluate
from bertkit.inference.predictor import Predictor
from bertkit.metrics.selective import choose_confidence
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import read_table
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_reviews
from tests.tasks.conftest import make_small

TARGET = 0.6


def finish(bert, folder, target, rows=400, epochs=4.0):
    table = write_reviews(folder / "reviews.csv", rows)
    data = {"text": ["body"], "label": ["stars"], "target_accuracy": target, "dev_share": 0.4}
    lines = []
    recipe = Recipe.make(CLASSIFICATION, make_small(bert, table, data, num_train_epochs=epochs))
    return run(recipe, output=folder / "run", report=lines.append)


@pytest.fixture(scope="module")
def finished(bert, tmp_path_factory):
    """A run that has learned something, but not all."""
    folder = tmp_path_factory.mktemp("abstention")
    return folder / "run", finish(bert, folder, TARGET)


def test_the_confidence_is_that_of_dev_and_the_share_is_that_of_the_rows(finished):
    folder, metrics = finished
    rows = read_table(folder / "predictions" / "dev.parquet")
    frame = rows.to_pandas()
    confidences = frame[[name for name in frame if name.startswith("probability_")]].max(axis=1).to_numpy()
    right = (frame["prediction"] == frame["label"]).to_numpy()
    choice = choose_confidence(confidences, right, TARGET, 3, frame["group"].tolist())
    assert json.loads((folder / "config.json").read_text())["least_confidence"] == choice.least is not None
    assert (metrics["least_confidence"], metrics["deciding_rows"]) == (choice.least, choice.rows)
    assert 0 < metrics["answered"] == pytest.approx((confidences >= choice.least).mean())
    assert metrics["answered_accuracy"] == pytest.approx(right[confidences >= choice.least].mean())
    assert {"test_answered", "test_answered_accuracy"} <= metrics.keys()
    assert metrics["chosen_on_dev"] == "least_confidence"
    said = f"Answers {metrics['answered']:.0%} of the texts, those with a probability of at least {choice.least:g}; at"
    assert said in (folder / "README.md").read_text()


def test_all_ways_leave_the_same_texts_unanswered(finished):
    folder, metrics = finished
    frame = read_table(folder / "predictions" / "dev.parquet").to_pandas()
    confidences = frame[[name for name in frame if name.startswith("probability_")]].max(axis=1)
    abstained = (confidences < metrics["least_confidence"]).tolist()
    expected = np.where(abstained, None, frame["prediction"]).tolist()
    texts = frame["body"].tolist()
    predictor = Predictor(folder, precision="fp32")
    results = predictor(texts)
    assert [result["abstained"] for result in results] == abstained
    assert [result["label"] for result in results] == expected
    assert {type(result["probability"]) for result in results} == {float}, "it stays as it is"
    table = bertkit.load(str(folder)).predict(pd.DataFrame({"body": texts}))
    assert table["abstained"].tolist() == abstained
    assert table["label"].tolist() == [label or "" for label in expected]
    said = [predictor.describe(result) for result in results]
    assert [line.startswith("(no answer") for line in said] == abstained
    (found,) = [split for split in evaluate(str(folder), None, None) if split.name == "dev"]
    assert found.metrics["answered"] == pytest.approx(metrics["answered"])


def test_what_is_not_reached_is_told_and_all_are_answered(tmp_path, bert):
    metrics = finish(bert, tmp_path, 0.999, rows=120)
    assert "answered" not in metrics
    assert metrics["reached_accuracy"] < 0.999
    line = f"no confidence has an accuracy of 99.9% for sure: {metrics['reached_accuracy']:.1%} is reached"
    assert line in CLASSIFICATION.comment(metrics)
    assert "abstained" not in Predictor(tmp_path / "run")(["good"])[0]


def test_what_has_no_such_confidence_is_refused(tmp_path, bert, refused):
    table = write_reviews(tmp_path / "reviews.csv", 60)
    for label, change in (
        ("price", {}),
        ("tags", {}),
        ("dear", {"threshold": "f1"}),
        ("dear", {"target_accuracy": 1.0}),
        ("dear", {"target_accuracy": -0.5}),
    ):
        data = {"text": ["body"], "label": [label], "target_accuracy": 0.9, **change}
        with refused():
            CLASSIFICATION.load(Recipe.make(CLASSIFICATION, make_small(bert, table, data)).data, str)
