"""Scores: worked values, direct formulas, what is undefined, bad input, and the modules of `evaluate` offline."""

import math
import socket
import warnings

import datasets
import evaluate
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bertkit.errors import UsageError
from bertkit.metrics import METRICS, compute_scores, make_metric

CLASSES = ("accuracy", "f1", "matthews_correlation")
NUMBERS = ("pearson", "spearmanr")
SCORES = [0.5, 1.0, 2.5, 4.0, 4.75]
binary_pairs = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)
number_pairs = st.integers(2, 20).flatmap(
    lambda count: arrays(np.float64, (count, 2), elements=st.integers(-50, 50).map(lambda value: value / 10))
)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def score(name: str, predictions: object, references: object) -> float:
    return compute_scores([name], predictions, references)[name]


# --- worked examples


# Of the pairs (prediction, reference): three (1, 1), one (0, 0), two (1, 0), one (0, 1): TP 3, TN 1, FP 2, FN 1.
# accuracy (3 + 1) / 7; precision 3/5 and recall 3/4: f1 = 2 * 3 / (2 * 3 + 2 + 1) = 2/3;
# Matthews (3 * 1 - 2 * 1) / sqrt(5 * 4 * 3 * 2) = 1 / sqrt(120).
@pytest.mark.parametrize(
    ("name", "value"), [("accuracy", 4 / 7), ("f1", 2 / 3), ("matthews_correlation", 1 / math.sqrt(120))]
)
def test_classes_worked_by_hand(name, value):
    predictions, references = [1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]
    assert score(name, predictions, references) == pytest.approx(value, abs=1e-15)


# Means 2.5 and 4; deviations (-1.5, -0.5, 0.5, 1.5) and (-3, -1, -2, 6): products sum to 4.5 + 0.5 - 1 + 9 = 13,
# squares to 5 and 50: Pearson 13 / sqrt(250). Ranks (1, 2, 3, 4) and (1, 3, 2, 4): Spearman 1 - 6 * 2 / (4 * 15) = 0.8.
@pytest.mark.parametrize(("name", "value"), [("pearson", 13 / math.sqrt(250)), ("spearmanr", 0.8)])
def test_numbers_worked_by_hand(name, value):
    assert score(name, [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 10.0]) == pytest.approx(value, abs=1e-15)


def test_spearman_gives_equal_values_the_mean_of_their_ranks():
    """Ranks (1.5, 1.5, 3) and (1, 2, 3): deviations (-.5, -.5, 1) and (-1, 0, 1): 1.5 / sqrt(1.5 * 2)."""
    assert score("spearmanr", [7, 7, 9], [0, 1, 2]) == pytest.approx(1.5 / math.sqrt(3))


def test_accuracy_and_matthews_of_three_classes():
    """Matthews, Gorodkin's form: (c s - sum p_k t_k) / sqrt((s² - sum p_k²)(s² - sum t_k²)), here with s = 4, c = 3,
    p = (1, 1, 2), t = (1, 2, 1): (12 - 5) / sqrt(10 * 10).
    """
    predictions, references = [0, 1, 2, 2], [0, 1, 1, 2]
    assert compute_scores(["accuracy", "matthews_correlation"], predictions, references) == {
        "accuracy": 0.75,
        "matthews_correlation": pytest.approx(0.7),
    }


def test_f1_is_that_of_class_one_also_among_other_ids():
    """Of class 1: one right, one missed, one wrong."""
    assert score("f1", [1, 1, 0, 2], [1, 0, 1, 2]) == 0.5
    assert score("f1", [0, 0, 1, 0], [0, 0, 1, 1]) != score("f1", [1, 1, 0, 1], [1, 1, 0, 0])


# --- direct formulas


@given(binary_pairs)
def test_classes_follow_from_the_confusion_matrix(pairs):
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (1, 0), (0, 1)))
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert compute_scores(CLASSES, *zip(*pairs, strict=True)) == pytest.approx(
        {
            "accuracy": (tp + tn) / len(pairs),
            "f1": 2 * tp / (2 * tp + fp + fn) if tp else 0.0,
            "matthews_correlation": (tp * tn - fp * fn) / root if root else 0.0,
        }
    )


def correlate(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation by its definition; 0 if one of them is constant."""
    first, second = first - first.mean(), second - second.mean()
    root = math.sqrt((first @ first) * (second @ second))
    return first @ second / root if root > 1e-9 else 0.0


def rank(values: np.ndarray) -> np.ndarray:
    """One half more than the smaller values and half of the equal ones."""
    return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) + 1) / 2


@given(number_pairs)
def test_correlations_follow_from_their_definitions(pairs):
    predictions, references = pairs.T
    scores = compute_scores(NUMBERS, predictions, references)
    assert scores["pearson"] == pytest.approx(correlate(predictions, references), abs=1e-9)
    assert scores["spearmanr"] == pytest.approx(correlate(rank(predictions), rank(references)), abs=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_gold_answers_score_one_and_values_are_plain_floats(name):
    gold = [0, 1, 1, 0, 1] if name in CLASSES else SCORES
    assert score(name, gold, gold) == pytest.approx(1.0, abs=1e-12)
    assert type(score(name, gold, gold)) is float
    assert type(score(name, gold[:1] * 5, gold)) is float


# --- undefined values


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [
        ("matthews_correlation", [1, 1, 1], [0, 1, 1]),
        ("matthews_correlation", [0, 1, 1], [1, 1, 1]),
        ("matthews_correlation", [1, 1, 1], [1, 1, 1]),
        ("f1", [0, 0, 0], [0, 0, 0]),
        ("f1", [0, 0, 0], [0, 1, 0]),
        ("f1", [0, 1, 0], [0, 0, 0]),
        ("pearson", [0.1, 0.1, 0.1], [1, 2, 3]),
        ("pearson", [1, 2, 3], [2, 2, 2]),
        ("pearson", [1], [1]),
        ("spearmanr", [0.1, 0.1, 0.1], [1, 2, 3]),
        ("spearmanr", [1], [1]),
    ],
)
def test_what_is_undefined_is_zero_without_a_warning(name, predictions, references):
    assert score(name, predictions, references) == 0.0


def test_nearly_constant_predictions_warn_of_nothing():
    assert -1 <= score("pearson", [1.0, 1.0 + 1e-15, 1.0], [1, 2, 3]) <= 1


# --- bad input


@pytest.mark.parametrize(
    ("names", "predictions", "references", "message"),
    [
        (
            ["acuracy"],
            [1],
            [1],
            r"unknown metric 'acuracy'; the metrics are accuracy, f1, matthews_correlation, pearson",
        ),
        (["f1"], [1, 0], [1], r"predictions \(2\) and references \(1\) do not fit; give one prediction for each"),
        (["f1"], [[1, 0]], [[1, 0]], r"predictions \(1, 2\) and references \(1, 2\) do not fit"),
        (["f1"], [], [], r"no predictions to score; give at least one"),
        (["accuracy"], [1, math.nan], [1, 0], r"prediction 2 of 2 is nan, .* lower learning rate"),
        (["pearson"], [1, 2, -math.inf], [1, 0, 2], r"prediction 3 of 3 is -inf"),
        (["spearmanr"], [1, 2], [math.nan, 0], r"reference 1 of 2 is nan"),
        (["f1"], [0, 0.75], [0, 1], r"prediction 2 of 2 is 0\.75, which is no class id"),
    ],
)
def test_bad_input_is_one_line(names, predictions, references, message):
    with pytest.raises(UsageError, match=message) as raised:
        compute_scores(names, predictions, references)
    assert "\n" not in str(raised.value)


# --- modules of evaluate


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("names", [*[(name,) for name in METRICS], ("accuracy", "f1"), NUMBERS])
def test_module_in_two_batches_is_the_pure_function(names):
    generator = np.random.default_rng(0)
    if set(names) <= set(CLASSES):
        predictions, references = generator.integers(0, 2, (2, 40))
    else:
        predictions, references = generator.normal(size=(2, 40))
    expected = compute_scores(names, predictions, references)
    metric = make_metric(*names)
    for part in (slice(0, 15), slice(15, 40)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == expected
    assert metric.compute(predictions=predictions.tolist(), references=references.tolist()) == expected
    for prediction, reference in zip(predictions, references, strict=True):
        metric.add(prediction=prediction, reference=reference)
    assert metric.compute() == expected


def test_module_describes_itself():
    metric = make_metric("accuracy", "f1")
    assert isinstance(metric, evaluate.Metric)
    assert metric.features == datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("int64")))
    assert make_metric("pearson").features["predictions"] == datasets.Value("float64")
    assert "GLUE" in metric.description
    assert "wang2019glue" in metric.citation
    assert "class id" in metric.inputs_description
    assert metric.info.config_name == "accuracy+f1"


def test_module_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    metric = make_metric("accuracy")
    metric.add_batch(predictions=[1, 0], references=[1, 1])
    assert metric.compute() == {"accuracy": 0.5}
    assert list(tmp_path.iterdir()) == []


def test_two_modules_do_not_mix():
    first, second = make_metric("accuracy"), make_metric("accuracy")
    first.add_batch(predictions=[1], references=[1])
    second.add_batch(predictions=[1], references=[0])
    assert (first.compute(), second.compute()) == ({"accuracy": 1.0}, {"accuracy": 0.0})


def test_bad_input_to_a_module():
    with pytest.raises(UsageError, match="no metric given; the metrics are accuracy"):
        make_metric()
    with pytest.raises(UsageError, match="unknown metric 'mcc'"):
        make_metric("accuracy", "mcc")
    with pytest.raises(UsageError, match="prediction 1 of 2 is inf"):
        make_metric("pearson").compute(predictions=[math.inf, 0.0], references=[1.0, 2.0])
    with pytest.raises(ValueError, match="Mismatch in the number of predictions"):
        make_metric("accuracy").compute(predictions=[1, 0], references=[1])
