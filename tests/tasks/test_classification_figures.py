"""Figures of a classifier's predictions, and the rows with the highest loss."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_score, recall_score
from torch.nn import functional as F

from bertkit.data.labels import REGRESSION, SEVERAL, SINGLE
from bertkit.metrics.classification import score_labels
from bertkit.tasks.classification_figures import (
    MOST_CONFUSED,
    MOST_TRACED,
    TRACED_POINTS,
    confuse,
    find_losses,
    list_figures,
    trace_precision,
)


def test_a_confusion_matrix_has_correct_labels_by_row():
    figure = confuse(np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), ("no", "yes"))
    assert figure["labels"] == ["no", "yes"]
    assert figure["counts"] == [[1, 1], [0, 2]]


def test_rare_labels_share_a_row_and_a_column():
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(np.arange(MOST_CONFUSED + 2), 9), [0, 5] * 2])
    labels = labels[(labels != 3) | (np.arange(len(labels)) % 2 == 0)]  # 3 has fewer rows, and 20 and 21 come last
    answers = rng.permutation(labels)
    figure = confuse(answers, labels, [f"n{label}" for label in range(MOST_CONFUSED + 2)])
    kept = [*range(3), *range(4, MOST_CONFUSED + 1)]
    assert figure["labels"] == [*(f"n{label}" for label in kept), "(others)"]
    assert np.sum(figure["counts"]) == len(labels)
    expected = confusion_matrix(labels, answers)[np.ix_(kept, kept)]
    assert np.array_equal(np.array(figure["counts"])[:-1, :-1], expected)


def test_a_curve_passes_each_correct_row():
    """Rows in the order of their probability: right, wrong, right, right, wrong.

    The precision is 1/1 at the first right row, 2/3 at the second and 3/4 at the third. Above 0.7 there are the first
    two rows: recall 1/3, precision 1/2.
    """
    probabilities, right = np.array([[0.9, 0.8, 0.7, 0.6, 0.5]]).T, np.array([[1, 0, 1, 1, 0]], bool).T
    figure = trace_precision(probabilities, probabilities > 0.7, right, ["a"])
    curve = figure["curves"]["a"]
    assert curve["xs"] == [33.33, 66.67, 100]
    assert curve["ys"] == [100, 66.67, 75]
    assert curve["point"] == [33.33, 50]
    assert "a 80.6" in figure["words"], "the mean of the three precisions"


def test_figures_of_many_rows_and_labels_stay_small():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 30, 3000)
    names = [f"n{label}" for label in range(31)]
    logits = rng.normal(size=(3000, 31)).astype(np.float32)
    matrix, curves = list_figures(logits, labels, names, SINGLE, None)
    assert len(matrix["labels"]) == MOST_CONFUSED + 1
    assert len(curves["curves"]) == MOST_TRACED
    assert all(len(curve["xs"]) <= TRACED_POINTS for curve in curves["curves"].values())
    assert len(json.dumps([matrix, curves])) < 50_000


def test_points_are_the_scores_of_the_predictions():
    rng = np.random.default_rng(0)
    labels = (rng.random((300, 3)) < [0.5, 0.1, 0.0]).astype(np.float32)
    logits = (rng.normal(size=(300, 3)) + labels).astype(np.float32)
    names = ("a", "b", "never")
    scores = score_labels(logits, labels, names)
    (figure,) = list_figures(logits, labels, names, SEVERAL, [scores[f"threshold_{name}"] for name in names])
    assert list(figure["curves"]) == ["a", "b"], "a label without positives has no curve"
    for name, curve in figure["curves"].items():
        assert curve["point"] == pytest.approx(
            [100 * scores[f"{key}_{name}"] for key in ("recall", "precision")], abs=0.01
        )
    classes = labels[:, 0].astype(int)
    _, figure = list_figures(logits[:, :2], classes, names[:2], SINGLE, None)
    answers = logits[:, :2].argmax(1)
    expected = [100 * score(classes, answers) for score in (recall_score, precision_score)]
    assert figure["curves"]["b"]["point"] == pytest.approx(expected, abs=0.01)
    assert list_figures(logits[:, :1], labels[:, 0], ("score",), REGRESSION, None) == []


def test_losses_are_those_of_torch():
    rng = np.random.default_rng(0)
    logits, classes = 5 * rng.normal(size=(20, 3)), rng.integers(0, 3, 20)
    labels = rng.integers(0, 2, (20, 3)).astype(np.float64)
    given = torch.tensor(logits)
    for kind, right, expected in (
        (SINGLE, classes, F.cross_entropy(given, torch.tensor(classes), reduction="none")),
        (SEVERAL, labels, F.binary_cross_entropy_with_logits(given, torch.tensor(labels), reduction="none").mean(1)),
        (REGRESSION, labels[:, 0], F.mse_loss(given[:, 0], torch.tensor(labels[:, 0]), reduction="none")),
    ):
        np.testing.assert_allclose(find_losses(logits, right, kind), expected.numpy())
