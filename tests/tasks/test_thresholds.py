"""The threshold of two classes: its choice, its scores, and the same decision wherever the model is used."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import fbeta_score, precision_score, recall_score

import bertkit
from bertkit.inference.evaluate import evaluate
from bertkit.inference.predictor import Predictor
from bertkit.metrics.classification import ThresholdRule, tune_thresholds
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import read_table
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_reviews
from tests.tasks.conftest import make_small

ROWS = 240


def rate(rule: ThresholdRule, labels: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    """Return what a rule prefers the highest of: whether its least value is reached, and the other score."""
    precision, recall = (float(f(labels, predicted, zero_division=0)) for f in (precision_score, recall_score))
    if rule.score == "f":
        return 1.0, float(fbeta_score(labels, predicted, beta=rule.value, zero_division=0))
    kept, raised = (precision, recall) if rule.score == "precision" else (recall, precision)
    return (1.0, raised) if kept >= rule.value else (0.0, kept)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 19), st.booleans()), min_size=2, max_size=30),
    st.sampled_from(("f1", "f0.5", "f2", "precision=0.9", "precision=0.999", "recall=0.9", "recall=0.5")),
)
def test_no_threshold_is_better_by_its_rule(rows, text):
    """All that divide the rows in another way are tried, with scikit-learn's scores."""
    probabilities, labels = np.array([row[0] / 20 for row in rows]), np.array([row[1] for row in rows])
    if not labels.any():
        return
    rule = ThresholdRule.parse(text)
    (chosen,) = tune_thresholds(probabilities[:, None], labels[:, None].astype(float), rule)
    edges = [0.0, *np.unique(probabilities), 1.0]
    others = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    best = max(rate(rule, labels, probabilities > threshold) for threshold in others)
    assert rate(rule, labels, probabilities > chosen) == pytest.approx(best)


@pytest.mark.parametrize("text", ["f", "f0", "f-1", "accuracy=0.9", "precision=1", "recall=0", "precision=high", "0.5"])
def test_a_wrong_rule_is_one_line(text, refused):
    with refused():
        ThresholdRule.parse(text)


@pytest.fixture(scope="module")
def finished(bert, tmp_path_factory):
    """A run that has learned little, whose threshold is therefore not 0.5."""
    folder = tmp_path_factory.mktemp("threshold")
    table = write_reviews(folder / "reviews.csv", ROWS)
    data = {"text": ["body"], "label": ["dear"], "threshold": "precision=0.9", "positive": "0"}
    recipe = Recipe.make(CLASSIFICATION, make_small(bert, table, data, num_train_epochs=1.0))
    return folder, run(recipe, output=folder / "run")


def test_the_threshold_is_chosen_on_dev_and_its_scores_stand_beside_those_at_a_half(finished):
    folder, metrics = finished
    rows = read_table(folder / "run" / "predictions" / "dev.parquet").to_pandas()
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["thresholds"] == [metrics["threshold_0"], 0.0]
    assert metrics["threshold_1"] == 0.0
    above = rows["probability_0"] > metrics["threshold_0"]
    assert (rows["prediction"] == np.where(above, "0", "1")).all()
    assert metrics["accuracy"] == pytest.approx((rows["prediction"] == rows["label"]).mean())
    usual = np.where(rows["probability_0"] >= rows["probability_1"], "0", "1")
    assert metrics["fixed_accuracy"] == pytest.approx((usual == rows["label"]).mean())
    assert metrics["chosen_on_dev"] == "thresholds"
    assert metrics["asked_precision"] == 0.9
    card = (folder / "run" / "README.md").read_text()
    assert f"A text is '0' if the probability of '0' is above {metrics['threshold_0']:.3f}; plain transformers" in card


def test_all_ways_decide_alike(finished):
    folder, metrics = finished
    rows = read_table(folder / "run" / "predictions" / "dev.parquet").to_pandas()
    texts, expected = rows["body"].tolist(), rows["prediction"].tolist()
    predictor = Predictor(folder / "run", precision="fp32")
    assert [result["label"] for result in predictor(texts)] == expected
    results = bertkit.load(str(folder / "run")).predict(pd.DataFrame({"body": texts}))
    assert results["label"].tolist() == expected
    assert results["probability"].tolist() == pytest.approx(
        [row[f"probability_{label}"] for label, (_, row) in zip(expected, rows.iterrows(), strict=True)], abs=1e-4
    )
    (found,) = [split for split in evaluate(str(folder / "run"), None, None) if split.name == "dev"]
    assert found.metrics["accuracy"] == pytest.approx(metrics["accuracy"])
    assert found.rows.column("prediction").to_pylist() == expected


def test_the_rarer_class_of_train_has_the_threshold(tmp_path, bert):
    table = write_reviews(tmp_path / "reviews.csv", ROWS)
    rows = pd.read_csv(table)
    data = {"text": ["body"], "label": ["slow"], "threshold": "f1"}
    recipe = Recipe.make(CLASSIFICATION, make_small(bert, table, data, num_train_epochs=1.0))
    metrics = run(recipe, output=tmp_path / "run")
    rarer, other = sorted(("0", "1"), key=lambda name: (rows["slow"].astype(str) == name).sum())
    assert metrics[f"threshold_{other}"] == 0.0 < metrics[f"threshold_{rarer}"]


def test_what_has_no_threshold_is_refused(tmp_path, bert, refused):
    table = write_reviews(tmp_path / "reviews.csv", 60)
    for label, change in (
        ("stars", {"threshold": "f1"}),
        ("price", {"threshold": "f1"}),
        ("dear", {"threshold": "f1", "positive": "yes"}),
        ("dear", {"positive": "1"}),
        ("tags", {"threshold": "f1", "positive": "slow"}),
    ):
        data = {"text": ["body"], "label": [label], **change}
        with refused():
            CLASSIFICATION.load(Recipe.make(CLASSIFICATION, make_small(bert, table, data)).data, str)


def test_a_precision_that_is_not_reached_is_told():
    metrics = {"threshold_a": 0.7, "threshold_b": 0.0, "asked_precision": 0.95, "precision_a": 0.8, "macro_f1": 0.5}
    assert not [x for x in CLASSIFICATION.comment(metrics) if x.startswith("no threshold")], "other rows have chosen"
    metrics["chosen_on_dev"] = "thresholds"
    assert "no threshold of 'a' has a precision of 95.0%: the nearest has 80.0%" in CLASSIFICATION.comment(metrics)
    assert not [x for x in CLASSIFICATION.comment(metrics | {"precision_a": 0.96}) if x.startswith("no threshold")]
