"""Scores of classes, labels and numbers: worked values, scikit-learn, thresholds by brute force, what is undefined."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit, softmax
from sklearn import metrics

from bertkit.metrics.classification import score_classes, score_labels, tune_thresholds
from bertkit.metrics.rows import measure_numbers, take_values
from bertkit.metrics.table import make_rows
from bertkit.tasks.kinds import SEVERAL_LABELS, SINGLE_LABEL, Gold, get_kind

pytestmark = pytest.mark.filterwarnings("error")
NAMES = ["good", "so so", "{}% “bad”\n"]
RANKED = {"roc_auc", "average_precision"}


def score(
    logits: np.ndarray, labels: np.ndarray, names: list[str], thresholds: list[float] | None = None
) -> dict[str, float]:
    """Return the scores of a prediction table without the errors of probabilities."""
    kind = SINGLE_LABEL if labels.ndim == 1 else SEVERAL_LABELS
    found = take_values(kind.measure(kind.decode(logits, names, Gold(labels), {"thresholds": thresholds}).rows))
    return {name: value for name, value in found.items() if name not in ("ece", "brier")}


def draw_scores(seed: int, shape: tuple[int, int], independent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 logits of this shape with some ties, and labels that they partly predict."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=shape).round(1).astype(np.float32)
    noisy = logits + rng.normal(size=shape)
    return logits, (noisy > 0.5).astype(np.int64) if independent else noisy.argmax(axis=1)


# --- One class


def test_an_answer_that_is_no_class_is_wrong_and_no_class():
    """As scikit-learn's macro F1 over the classes alone."""
    right, given = ["a", "b", "a", "b"], ["a", "b", "none", ""]
    rows = make_rows({"label": right, "prediction": given}, names=["a", "b"])
    found = take_values(get_kind(rows).measure(rows))
    assert found["accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(right, given, labels=["a", "b"], average="macro"))


def test_scores_of_classes_of_a_worked_example():
    """Six sequences, correct a a a b b c, predicted a a b b c b, each with one logit of 1 and two of 0.

    a has precision 2/2, recall 2/3, F1 4/5; b has 1/3, 1/2, 2/5; c has 0. Three of six are right.
    Matthews, from three right of six, predicted 2, 3, 1 and correct 3, 2, 1:
    (3 * 6 - 2 * 3 - 3 * 2 - 1 * 1) / sqrt((36 - 4 - 9 - 1) * (36 - 9 - 4 - 1)) = 5/22.
    ROC of a: of its 3, 2 are above the other 3 and 1 ties with them, 5/6; of b: 1 + 1 + 1/2 + 1/2 and 1/2 + 1/2 of
    2 * 4 pairs, 1/2; of c: 4 ties in 5 pairs, 2/5.
    Average precision of a: 2/3 * 2/2 + 1/3 * 3/6 = 5/6; of b: 1/2 * 1/3 + 1/2 * 2/6 = 1/3; of c: 1/6.
    """
    predictions = np.array([0, 0, 1, 1, 2, 1])
    found = score_classes(predictions, np.array([0, 0, 0, 1, 1, 2]), ["a", "b", "c"], np.eye(3)[predictions])
    each = {"a": (1.0, 2 / 3, 4 / 5), "b": (1 / 3, 1 / 2, 2 / 5), "c": (0.0, 0.0, 0.0)}
    assert take_values(found) == pytest.approx(
        {
            "accuracy": 1 / 2,
            "macro_f1": (4 / 5 + 2 / 5) / 3,
            "micro_f1": 1 / 2,
            "weighted_f1": (3 * 4 / 5 + 2 * 2 / 5) / 6,
            "matthews_correlation": 5 / 22,
            "roc_auc": (5 / 6 + 1 / 2 + 2 / 5) / 3,
            "average_precision": (5 / 6 + 1 / 3 + 1 / 6) / 3,
        }
        | {f"precision_{name}": values[0] for name, values in each.items()}
        | {f"recall_{name}": values[1] for name, values in each.items()}
        | {f"f1_{name}": values[2] for name, values in each.items()}
    )


@pytest.mark.parametrize("count", [2, 3])
def test_scores_of_classes_are_those_of_scikit_learn(count):
    logits, labels = draw_scores(count, (60, count), independent=False)
    names = NAMES[:count]
    found = score(logits, labels, names)
    probabilities, predictions = softmax(logits.astype(np.float64), axis=1), logits.argmax(axis=1)
    ranked = probabilities[:, 1] if count == 2 else probabilities
    expected = {
        "accuracy": metrics.accuracy_score(labels, predictions),
        "matthews_correlation": metrics.matthews_corrcoef(labels, predictions),
        "roc_auc": metrics.roc_auc_score(labels, ranked, multi_class="ovr"),
        "average_precision": metrics.average_precision_score(labels, ranked),
    }
    averages = ("macro", "micro", "weighted")
    expected |= {f"{kind}_f1": metrics.f1_score(labels, predictions, average=kind) for kind in averages}
    report = metrics.classification_report(labels, predictions, target_names=names, output_dict=True)
    keys = {"precision": "precision", "recall": "recall", "f1": "f1-score", "count": "support"}
    expected |= {f"{key}_{name}": report[name][theirs] for key, theirs in keys.items() for name in names}
    assert found == pytest.approx(expected)
    assert {type(value) for value in found.values()} <= {float, int}


def test_scores_that_a_class_without_sequences_leaves_undefined():
    """The third class does not occur: averages are over the other two; with one class no ranking is defined."""
    logits, labels = draw_scores(0, (40, 2), independent=False)
    three = np.concatenate([logits, np.full((40, 1), -9.0, np.float32)], axis=1)
    found, two = score(three, labels, NAMES), score(logits, labels, NAMES[:2])
    assert found["macro_f1"] == two["macro_f1"]
    assert found["f1_" + NAMES[2]] == found["count_" + NAMES[2]] == 0
    ranked = softmax(three.astype(np.float64), axis=1)
    each = [metrics.roc_auc_score(labels == number, ranked[:, number]) for number in (0, 1)]
    assert found["roc_auc"] == pytest.approx(np.mean(each))
    alone = score(logits, np.zeros(40, int), NAMES[:2])
    assert not RANKED & alone.keys()
    assert alone["matthews_correlation"] == 0


# --- Independent labels


def test_a_label_that_is_nowhere_counts_0_in_the_mean():
    """As in scikit-learn; a class that is nowhere does not count."""
    labels = np.array([[True, False], [False, False]])
    assert metrics.f1_score(labels, labels, average="macro", zero_division=0) == 0.5
    assert take_values(score_labels(labels, labels, NAMES[:2]))["macro_f1"] == 0.5


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("thresholds", [None, [0.3, 0.5, 0.7]])
def test_scores_of_labels_are_those_of_scikit_learn(count, thresholds):
    logits, labels = draw_scores(count, (60, count), independent=True)
    names = NAMES[:count]
    found = score(logits, labels, names, thresholds and thresholds[:count])
    probabilities = expit(logits.astype(np.float64))
    limits = np.array([found[f"threshold_{name}"] for name in names])
    assert limits.tolist() == (thresholds or tune_thresholds(probabilities, labels).tolist())[:count]
    predicted = probabilities > limits
    expected = {
        "exact_match": (predicted == labels).all(axis=1).mean(),
        "roc_auc": metrics.roc_auc_score(labels, probabilities, average="macro"),
        "average_precision": metrics.average_precision_score(labels, probabilities, average="macro"),
    }
    for prefix, over in (("", predicted), ("fixed_", probabilities > 0.5)):
        f1 = [metrics.f1_score(*columns) for columns in zip(labels.T, over.T, strict=True)]
        expected[f"{prefix}macro_f1"] = np.mean(f1)
        expected[f"{prefix}micro_f1"] = metrics.f1_score(labels.ravel(), over.ravel())
    for name, limit, one, other in zip(names, limits, labels.T, predicted.T, strict=True):
        rates = {"precision": metrics.precision_score, "recall": metrics.recall_score, "f1": metrics.f1_score}
        expected |= {f"{key}_{name}": rate(one, other) for key, rate in rates.items()}
        expected |= {f"count_{name}": one.sum(), f"threshold_{name}": limit}
    assert found == pytest.approx(expected)


def test_scores_that_a_label_without_positives_leaves_undefined():
    """Its F1 is 0; rankings are averages over the others, and a label that all sequences have has no ROC."""
    logits, labels = draw_scores(0, (40, 3), independent=True)
    labels[:, 1], labels[:, 2] = 0, 1
    found = score(logits, labels, NAMES)
    assert found["f1_so so"] == 0
    assert found["threshold_so so"] == 0.5
    probabilities = expit(logits.astype(np.float64))
    assert found["roc_auc"] == pytest.approx(metrics.roc_auc_score(labels[:, 0], probabilities[:, 0]))
    mean = (metrics.average_precision_score(labels[:, 0], probabilities[:, 0]) + 1) / 2
    assert found["average_precision"] == pytest.approx(mean)
    assert not RANKED & score(logits, np.zeros_like(labels), NAMES).keys()


@pytest.mark.parametrize(
    ("probabilities", "labels", "threshold"),
    [
        ([0.1, 0.2, 0.6, 0.9], [0, 1, 1, 1], 0.15),  # every threshold from 0.1 to 0.2 is right for all four
        ([0.1, 0.4, 0.6, 0.9], [0, 0, 1, 1], 0.5),  # not 0.5 because it is the middle: it separates 0.4 and 0.6
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 0, 0], 0.5),
        ([0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1], 0.05),
        ([0.9, 0.7, 0.7, 0.6], [1, 1, 0, 0], 0.65),  # F1 4/5 with both at 0.7, 2/3 with neither
        ([0.0, 0.0], [1, 1], 0.5),  # no threshold from 0 to 1 finds them
        ([0.25, 0.5, 0.5], [0, 1, 1], 0.375),  # 0.5 itself is not above 0.5
    ],
)
def test_thresholds_of_worked_examples(probabilities, labels, threshold):
    found = tune_thresholds(np.array(probabilities)[:, None], np.array(labels)[:, None])
    assert found.tolist() == pytest.approx([threshold])


def compute_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    return 2 * int((predicted & labels).sum()) / max(1, int(predicted.sum() + labels.sum()))


examples = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        arrays(np.float64, count, elements=st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]) | st.floats(0, 1)),
        arrays(np.bool_, count),
    )
)


@given(examples)
def test_no_threshold_is_better_and_no_better_one_is_nearer(example):
    """Brute force over a threshold at every probability, and over 0.5."""
    probabilities, labels = example
    (threshold,) = tune_thresholds(probabilities[:, None], labels[:, None])
    assert 0 <= threshold < 1
    values = {float(limit): compute_f1(probabilities > limit, labels) for limit in (0.0, 0.5, *probabilities)}
    mine = compute_f1(probabilities > threshold, labels)
    assert mine == max(values.values())
    if values[0.5] == mine:
        assert threshold == 0.5
    # Others that predict as well lie farther from 0.5, except within the same gap between two probabilities.
    for limit, value in values.items():
        if value == mine and ((probabilities > limit) != (probabilities > threshold)).any():
            above = probabilities[probabilities > limit].min(initial=1.0)
            assert abs(threshold - 0.5) <= abs((max(limit, 0.0) + above) / 2 - 0.5)


def test_scores_of_numbers_are_those_of_scipy_and_scikit_learn():
    """Values 1 2 4 against 1 3 3: squared errors 0, 1, 1; both means are 7/3.

    Deviations times 3 are -4 -1 5 and -4 2 2: sums of products 24, of squares 42 and 24, so Pearson is
    24 / sqrt(42 * 24) and r2 is 1 - 2 / (24 / 9). The ranks are 1 2 3 and
    1 2.5 2.5: 1.5 / sqrt(2 * 1.5).
    """
    found = take_values(measure_numbers(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 3.0])))
    expected = {"pearson": math.sqrt(24 / 42), "spearmanr": math.sqrt(3) / 2, "rmse": math.sqrt(2 / 3), "r2": 1 / 4}
    assert found == pytest.approx(expected)
    assert {type(value) for value in found.values()} == {float}


# --- Weighted rows


def test_a_score_of_weighted_rows_of_a_worked_example():
    """Classes a a b, predicted a b b, with weights 2 1 1.

    Accuracy is 3/4. a is predicted with weight 2 and correct with weight 3, both with weight 2: F1 = 4/5. b is
    predicted with weight 2 and correct with weight 1, both with weight 1: F1 = 2/3. Their mean is 11/15, weighted by
    3 and 1 it is 23/30. Matthews: (3 * 4 - 2 * 3 - 2 * 1) / sqrt((16 - 4 - 4) * (16 - 9 - 1)) = 4 / sqrt(48).
    """
    measured = score_classes(np.array([0, 1, 1]), np.array([0, 0, 1]), ["a", "b"])
    found = {name: score.score(np.array([[2.0, 1.0, 1.0]]))[0] for name, score in measured.items()}
    assert found["accuracy"] == found["micro_f1"] == 3 / 4
    assert found["macro_f1"] == pytest.approx(11 / 15)
    assert found["weighted_f1"] == pytest.approx(23 / 30)
    assert found["matthews_correlation"] == pytest.approx(4 / 48**0.5)
    assert (found["precision_b"], found["recall_b"]) == (1 / 2, 1.0)


def test_constant_numbers_have_no_correlation():
    for values, labels in ((np.full(5, 0.1), np.arange(5) / 3), (np.full(5, 0.1), np.full(5, 0.7))):
        found = measure_numbers(values, labels)
        for name in ("pearson", "spearmanr"):
            assert found[name].score(np.random.default_rng(0).random((4, 5))).tolist() == [0] * 4
    assert take_values(measure_numbers(np.array([1.0, 2.0]), np.array([3.0, 3.0])))["r2"] == 0.0
