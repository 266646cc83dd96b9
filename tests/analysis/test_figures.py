"""Plots and tables of predictions: what they show follows from the prediction table."""

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import confusion_matrix

from bertkit.analysis.report import (
    MOST_CONFUSED,
    draw_figures,
    plot_reliability,
    tabulate_confusion,
)
from bertkit.data.labels import REGRESSION
from bertkit.metrics.table import LABEL, NAMES, PREDICTION, make_rows
from bertkit.tasks.result import tabulate_logits


def read_matrix(table):
    """Return the labels and the counts of a confusion matrix."""
    counts = [[int(cell.lines[0][0].replace(",", "")) for cell in row[1:]] for row in table.rows]
    return list(table.heads[1:]), np.array(counts)


def test_rare_labels_share_a_row_and_a_column():
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(np.arange(MOST_CONFUSED + 2), 9), [0, 5] * 2])
    labels = labels[(labels != 3) | (np.arange(len(labels)) % 2 == 0)]  # 3 has fewer rows, and 20 and 21 come last
    answers = rng.permutation(labels)
    names, counts = read_matrix(tabulate_confusion(answers, labels, [f"n{n}" for n in range(MOST_CONFUSED + 2)], "dev"))
    kept = [*range(3), *range(4, MOST_CONFUSED + 1)]
    assert names == [*(f"n{label}" for label in kept), "(others)"]
    assert counts.sum() == len(labels)
    assert np.array_equal(counts[:-1, :-1], confusion_matrix(labels, answers)[np.ix_(kept, kept)])


def test_reliability_bars_stay_between_0_and_100_percent():
    """A single row that is right says little: its interval is from 2.5 to 100 %."""
    stated = np.array([0.65] * 3 + [0.75] + [0.99] * 40)
    labels = np.array([1] * 3 + [0] + [0] * 39 + [1])
    series = plot_reliability(np.stack([stated, 1 - stated], axis=1), labels, "dev").series[-1]
    limits = [(y - below, y + above) for (_, y), (below, above) in zip(series.points, series.spreads, strict=True)]
    assert limits[1] == pytest.approx((2.5, 100), abs=0.01)
    assert all(0 <= low <= y <= high <= 100 for (_, y), (low, high) in zip(series.points, limits, strict=True))


def test_numbers_and_answers_that_must_exist_have_no_figures():
    numbers = tabulate_logits(np.ones((3, 1)), np.ones(3), (), REGRESSION)
    answers = make_rows({LABEL: pa.array([["a"]], NAMES), PREDICTION: ["a"], "em": [1.0], "f1": [1.0]})
    assert draw_figures(numbers, "dev") == draw_figures(answers, "dev") == []
