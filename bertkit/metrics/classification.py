"""Scores of a person's own classes, independent labels or numbers, as functions.

Scores are fractions. Shape letters: S sequences, L labels.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bertkit.errors import UsageError
from bertkit.metrics.rows import (
    WeightedScore,
    measure_classes,
    measure_counts,
    measure_label,
    measure_mean,
    measure_ranking,
)

FIXED_THRESHOLD = 0.5  # the probability above which a label is predicted unless thresholds are tuned


def score_classes(
    predictions: np.ndarray, labels: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> dict[str, WeightedScore]:
    """Return the scores of a classifier that predicts one class for each row.

    Classes that are neither predicted nor correct anywhere do not enter macro averages. `roc_auc` and
    `average_precision` are those of class 1 if there are two classes, otherwise macro averages of one class against the
    others, over classes for which they are defined; they are left out if there is no such class.

    Args:
        predictions: (S,) the numbers of the predicted classes, that of no class being L.
        labels: (S,) the numbers of the correct classes.
        names: The name of each class.
        probabilities: (S, L).

    Returns:
        Overall scores, then `precision_…`, `recall_…` and `f1_…` of each class.
    """
    columns = np.arange(len(names))
    correct, predicted = labels[:, None] == columns, predictions[:, None] == columns  # (S, L)
    accuracy = measure_mean(predictions == labels)
    found = {"accuracy": accuracy, "micro_f1": accuracy}
    found |= measure_classes(predictions, labels, len(names))
    if probabilities is not None:
        ranked = slice(1, None) if len(names) == 2 else slice(None)
        found |= measure_ranking(probabilities[:, ranked], correct[:, ranked])
    return found | _measure_each(predicted, correct, names)


def score_labels(
    predicted: np.ndarray, correct: np.ndarray, names: Sequence[str], probabilities: np.ndarray | None = None
) -> dict[str, WeightedScore]:
    """Return the scores of a classifier that predicts each label independently.

    `roc_auc` and `average_precision` are macro averages over labels for which they are defined, and are left out if
    there is no such label.

    Args:
        predicted: (S, L) whether a label is predicted: its probability is above its threshold.
        correct: (S, L) bool.
        names: The name of each label.
        probabilities: (S, L).

    Returns:
        Overall scores (`exact_match`: the share of rows with all labels correct), `fixed_macro_f1` and
        `fixed_micro_f1` at FIXED_THRESHOLD, then `precision_…`, `recall_…` and `f1_…` of each label.
    """
    fixed = {} if probabilities is None else {"fixed_": probabilities > FIXED_THRESHOLD}
    averages = {
        f"{prefix}{name}": measure_counts(found & correct, found, correct, score)
        for prefix, found in {"": predicted, **fixed}.items()
        for name, score in (("macro_f1", "labels_f1"), ("micro_f1", "f1"))
    }
    return {
        **averages,
        "exact_match": measure_mean((predicted == correct).all(axis=1)),
        **({} if probabilities is None else measure_ranking(probabilities, correct)),
        **_measure_each(predicted, correct, names),
    }


@dataclass(frozen=True)
class ThresholdRule:
    """The choice of a threshold: for the highest F score, or for a least precision or recall."""

    score: str  # f, precision or recall
    value: float  # beta of the F score, or the least precision or recall
    label: int = 0  # the class of two that has the threshold

    @classmethod
    def parse(cls, text: str) -> "ThresholdRule":
        """Parse a rule such as f1, f0.5, precision=0.95 or recall=0.9."""
        plain = text.replace(" ", "").lower()
        name, _, value = plain.partition("=") if "=" in plain else (plain[:1], "", plain[1:])
        with suppress(ValueError):
            number = float(value)
            if 0 < number < (math.inf if name == "f" else 1) and name in ("f", "precision", "recall"):
                return cls(name, number)
        raise UsageError(
            f"threshold is {text!r} in [data]; give an F score, such as f1 or f0.5, or a share above 0 and below 1, "
            "such as precision=0.95 or recall=0.9"
        )

    def rate(self, right: np.ndarray, predicted: np.ndarray, positives: float) -> np.ndarray:
        """Return how good some thresholds are, from the right and the predicted rows above each; the best is highest.

        Where none reaches a least precision or recall, the nearest to it is best.
        """
        precision = np.divide(right, predicted, out=np.ones(len(right)), where=predicted > 0)
        recall = right / positives
        if self.score == "f":
            return (1 + self.value**2) * right / (predicted + self.value**2 * positives)
        kept, raised = (precision, recall) if self.score == "precision" else (recall, precision)
        kept = np.where((right > 0) | (self.score == "recall"), kept, 0.0)  # a threshold above all rows finds nothing
        is_reached = kept >= self.value
        return np.where(is_reached, 1 + raised, kept)


F1 = ThresholdRule("f", 1.0)


def tune_thresholds(
    probabilities: np.ndarray, labels: np.ndarray, rule: ThresholdRule = F1, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return for each label the best threshold by a rule, from an exact sweep over all distinct predictions.

    A label is predicted if its probability is above the threshold. Thresholds lie midway between two neighbouring
    probabilities, or at FIXED_THRESHOLD if that separates them. Among equally good ones the nearest to FIXED_THRESHOLD
    is taken; a label without positives keeps FIXED_THRESHOLD.

    Args:
        probabilities: (S, L).
        labels: (S, L), 0 or 1.
        weights: (S,) those of the rows; None: 1.

    Returns:
        (L,) thresholds, from 0 to 1.
    """
    weights = np.ones(len(labels), np.int64) if weights is None else weights
    columns = zip(probabilities.T, labels.T, strict=True)
    return np.array([_tune_threshold(*column, rule, weights) for column in columns])


def _tune_threshold(probabilities: np.ndarray, labels: np.ndarray, rule: ThresholdRule, weights: np.ndarray) -> float:
    """Return the threshold of one label, from probabilities, labels and weights (S,)."""
    positive = np.where(labels > 0, weights, 0)
    if not positive.any():
        return FIXED_THRESHOLD
    order = probabilities.argsort()
    ends, starts = np.unique(np.concatenate([[0.0], probabilities[order], [1.0]]), return_index=True)
    # A threshold in [low, high) predicts the sequences whose probability is at least `high`.
    low, high, first = ends[:-1], ends[1:], starts[1:] - 1
    right, predicted = (np.append(x[order][::-1].cumsum()[::-1], 0)[first] for x in (positive, weights))
    rates = rule.rate(right, predicted, positive.sum())
    middle = (low + high) / 2
    middle = np.where(middle < high, middle, low)  # between neighbouring floats the mean may be rounded up
    middle[(low <= FIXED_THRESHOLD) & (high > FIXED_THRESHOLD)] = FIXED_THRESHOLD
    best = middle[rates == rates.max()]
    return float(best[np.abs(best - FIXED_THRESHOLD).argmin()])


def name_each(key: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return a value of each label, as `<key>_<label>`."""
    return {f"{key}_{name}": value for name, value in zip(names, values, strict=True)}


def _measure_each(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, WeightedScore]:
    """Return precision, recall and F1 of each class or label as functions of the weights of the rows."""
    columns = zip(names, predictions.T, labels.T, strict=True)
    return {f"{key}_{name}": score for name, *column in columns for key, score in measure_label(*column).items()}
