"""Figures of a classifier's predictions for the report page, and the rows that it fits worst.

The form of the figures is that of `bertkit.analysis.page`. Shape letters: S sequences, L labels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from bertkit.data.labels import REGRESSION, SINGLE
from bertkit.metrics.calibration import bin_probabilities, measure_losses, score_calibration

MOST_CONFUSED = 20  # labels of a confusion matrix
MOST_TRACED = 10  # curves
TRACED_POINTS = 200  # per curve


def confuse(answers: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix as a figure, with correct labels by row.

    Beyond the MOST_CONFUSED most frequent labels the others share a row and a column.

    Args:
        answers: (S,) predicted classes.
        labels: (S,) correct classes.
        names: The name of each class.
    """
    kept = find_frequent(np.bincount(labels, minlength=len(names)), MOST_CONFUSED)
    places = np.full(len(names), len(kept))
    places[kept] = np.arange(len(kept))
    shown = [names[label] for label in kept] + ["(others)"] * (len(kept) < len(names))
    counts = np.zeros((len(shown), len(shown)), int)
    np.add.at(counts, (places[labels], places[answers]), 1)
    return {"kind": "matrix", "title": "Confusion matrix", "labels": shown, "counts": counts.tolist()}


def trace_precision(
    probabilities: np.ndarray, predicted: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> dict[str, Any]:
    """Return precision over recall in percent as a figure, with a curve for each of the MOST_TRACED frequent labels.

    A curve has the best precision at TRACED_POINTS recalls at most. Labels without positives have none.

    Args:
        probabilities: (S, L).
        predicted: (S, L) bool, whether a label is predicted: the marked point of its curve.
        labels: (S, L) bool, whether a label is correct.
        names: The name of each label.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    counts = labels.sum(axis=0)
    curves, averages = {}, []
    for label in find_frequent(counts, MOST_TRACED):
        if not counts[label]:
            continue
        right = labels[:, label]
        precision, recall, _ = precision_recall_curve(right, probabilities[:, label])
        precision, recall = precision[-2::-1], recall[-2::-1]  # from the likeliest on, without scikit-learn's (0, 1)
        places = np.unique(np.searchsorted(recall, np.linspace(0, 1, TRACED_POINTS)))
        found = right[predicted[:, label]]
        point = (found.sum() / counts[label], found.mean() if len(found) else 0.0)
        curves[names[label]] = {
            "xs": (100 * recall[places]).round(2).tolist(),
            "ys": (100 * precision[places]).round(2).tolist(),
            "point": [round(100 * float(value), 2) for value in point],
        }
        averages.append(f"{names[label]} {100 * average_precision_score(right, probabilities[:, label]):.1f}")
    words = f"average precision {', '.join(averages)}; each dot is the label as predicted"
    axes = {"xlabel": "recall (%)", "ylabel": "precision (%)"}
    return {"kind": "curves", "title": "Precision over recall", "words": words, "curves": curves} | axes


def draw_reliability(logits: np.ndarray, labels: np.ndarray, temperature: float | None) -> dict[str, Any]:
    """Return the reliability diagram as a figure: how often labels of a probability are right, both in percent.

    Args:
        logits: (S, L), divided by the temperature if there is one.
        labels: (S,) classes, or (S, L) several labels.
        temperature: The temperature of calibrated probabilities, which are shown beside those without it.
    """
    shown = {"this model": logits}
    if temperature is not None:
        shown = {"calibrated": logits, "as trained": logits * temperature}
    curves, errors = {}, []
    for name, values in shown.items():
        stated, right, counts = bin_probabilities(values, labels)
        columns = (100 * stated).round(2).tolist(), (100 * right).round(2).tolist(), counts.tolist()
        curves[name] = dict(zip(("xs", "ys", "counts"), columns, strict=True))
        errors.append(f"{name} {100 * score_calibration(values, labels)['ece']:.1f} %")
    words = f"calibration error: {', '.join(errors)}; bars are 95 % intervals"
    axes = {"xlabel": "probability (%)", "ylabel": "how often right (%)"}
    return {"kind": "reliability", "title": "Reliability", "words": words, "curves": curves} | axes


def list_figures(
    logits: np.ndarray, labels: np.ndarray, names: Sequence[str], kind: str, thresholds: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Return the figures of a split's logits (S, L), with labels as `LabelSpace.read` returns them; none of numbers."""
    if kind == REGRESSION:
        return []
    logits = logits.astype(np.float64)  # as for the scores and thresholds
    if kind == SINGLE:
        answers, columns = logits.argmax(axis=1), np.arange(len(names))
        curves = trace_precision(
            softmax(logits, axis=1), answers[:, None] == columns, labels[:, None] == columns, names
        )
        return [confuse(answers, labels, names), curves]
    probabilities = expit(logits)
    return [trace_precision(probabilities, probabilities > np.asarray(thresholds), labels.astype(bool), names)]


def find_losses(logits: np.ndarray, labels: np.ndarray, kind: str) -> np.ndarray:
    """Return (S,) the loss of each sequence, without class weights, from logits (S, L) and its labels.

    It is the cross entropy, the mean binary cross entropy of several labels, or the squared error of a number.
    """
    if kind == REGRESSION:
        return (logits[:, 0] - labels) ** 2
    return measure_losses(logits, labels)


def find_frequent(counts: np.ndarray, most: int) -> list[int]:
    """Return the places of the largest counts, in their order; of equal ones the first."""
    return sorted(np.argsort(-counts, kind="stable")[:most].tolist())
