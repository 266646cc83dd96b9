"""Scores of a person's own classes, independent labels or numbers, as functions.

Scores are fractions. Shape letters: S sequences, L labels.
"""

from collections.abc import Sequence

import numpy as np

from bertkit.metrics.rows import (
    RowScore,
    measure_classes,
    measure_counts,
    measure_label,
    measure_mean,
    measure_numbers,
    measure_ranking,
    take_values,
)

FIXED_THRESHOLD = 0.5  # the probability above which a label is predicted unless thresholds are tuned


def score_classes(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Return the scores of a classifier that predicts one class per sequence, the one with the highest logit.

    They are the values of `measure_class_scores`, whose arguments are the same, and `count_…`, the correct sequences of
    each class.
    """
    counts = np.bincount(labels, minlength=len(names)).tolist()
    return take_values(measure_class_scores(logits, labels, names)) | _name_each("count", names, counts)


def measure_class_scores(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, RowScore]:
    """Return the scores of a classifier as functions of the weights of the rows.

    Classes that are neither predicted nor correct anywhere do not enter macro averages. `roc_auc` and
    `average_precision` are those of class 1 if there are two classes, otherwise macro averages of one class against the
    others, over classes for which they are defined; they are left out if there is no such class.

    Args:
        logits: (S, L), finite.
        labels: (S,) the numbers of the correct classes.
        names: The name of each class.

    Returns:
        Overall scores, then `precision_…`, `recall_…` and `f1_…` of each class.
    """
    from scipy.special import softmax

    predictions = logits.argmax(axis=1)
    probabilities = softmax(logits.astype(np.float64), axis=1)  # (S, L)
    correct = labels[:, None] == np.arange(len(names))  # (S, L)
    predicted = predictions[:, None] == np.arange(len(names))
    ranked = slice(1, None) if len(names) == 2 else slice(None)
    accuracy = measure_mean(predictions == labels)
    return {
        "accuracy": accuracy,
        "micro_f1": accuracy,
        **measure_classes(predictions, labels, len(names)),
        **measure_ranking(probabilities[:, ranked], correct[:, ranked]),
        **_measure_each(predicted, correct, names),
    }


def score_labels(
    logits: np.ndarray, labels: np.ndarray, names: Sequence[str], thresholds: np.ndarray | None = None
) -> dict[str, float]:
    """Return the scores of a classifier that predicts each label independently.

    They are the values of `measure_label_scores`, whose arguments are the same, with `count_…` (sequences with the
    label) and `threshold_…` of each label.
    """
    from scipy.special import expit

    if thresholds is None:
        thresholds = tune_thresholds(expit(logits.astype(np.float64)), labels)
    return {
        **take_values(measure_label_scores(logits, labels, names, thresholds)),
        **_name_each("count", names, labels.astype(int).sum(0).tolist()),
        **_name_each("threshold", names, np.asarray(thresholds).tolist()),
    }


def measure_label_scores(
    logits: np.ndarray, labels: np.ndarray, names: Sequence[str], thresholds: np.ndarray | None = None
) -> dict[str, RowScore]:
    """Return the scores of a classifier of independent labels as functions of the weights of the rows.

    A label is predicted if its probability is above its threshold. `roc_auc` and `average_precision` are macro averages
    over labels for which they are defined, and are left out if there is no such label.

    Args:
        logits: (S, L), finite.
        labels: (S, L), 0 or 1.
        names: The name of each label.
        thresholds: (L,) probabilities; None: tuned on these data, and the same whatever the weights are.

    Returns:
        Overall scores (`exact_match`: the share of sequences with all labels correct), `fixed_macro_f1` and
        `fixed_micro_f1` at FIXED_THRESHOLD, then `precision_…`, `recall_…` and `f1_…` of each label.
    """
    from scipy.special import expit

    probabilities, correct = expit(logits.astype(np.float64)), labels.astype(bool)  # (S, L)
    predicted = probabilities > (tune_thresholds(probabilities, labels) if thresholds is None else thresholds)
    averages = {
        f"{prefix}{name}": measure_counts(found & correct, found, correct, score)
        for prefix, found in (("", predicted), ("fixed_", probabilities > FIXED_THRESHOLD))
        for name, score in (("macro_f1", "labels_f1"), ("micro_f1", "f1"))
    }
    return {
        **averages,
        "exact_match": measure_mean((predicted == correct).all(axis=1)),
        **measure_ranking(probabilities, correct),
        **_measure_each(predicted, correct, names),
    }


def tune_thresholds(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return for each label the threshold with the best F1, from an exact sweep over all distinct predictions.

    A label is predicted if its probability is above the threshold. Thresholds lie midway between two neighbouring
    probabilities, or at FIXED_THRESHOLD if that separates them. Among equally good ones the nearest to FIXED_THRESHOLD
    is taken; a label without positives keeps FIXED_THRESHOLD.

    Args:
        probabilities: (S, L).
        labels: (S, L), 0 or 1.

    Returns:
        (L,) thresholds, from 0 to 1.
    """
    return np.array([_tune_threshold(*columns) for columns in zip(probabilities.T, labels.T, strict=True)])


def score_numbers(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return `pearson`, `spearmanr`, `rmse` and `r2` of values (S,) against labels (S,).

    Correlations are 0 where undefined, and so is `r2` with a single label.
    """
    return take_values(measure_numbers(values, labels))


def _tune_threshold(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold of one label, from probabilities (S,) and labels (S,)."""
    if not labels.any():
        return FIXED_THRESHOLD
    order = probabilities.argsort()
    ends, starts = np.unique(np.concatenate([[0.0], probabilities[order], [1.0]]), return_index=True)
    # A threshold in [low, high) predicts the sequences whose probability is at least `high`.
    low, high, first = ends[:-1], ends[1:], starts[1:] - 1
    found = np.concatenate([labels[order].astype(np.int64)[::-1].cumsum()[::-1], [0]])[first]
    f1 = 2 * found / (len(labels) - first + labels.sum())
    middle = (low + high) / 2
    middle = np.where(middle < high, middle, low)  # between neighbouring floats the mean may be rounded up
    middle[(low <= FIXED_THRESHOLD) & (high > FIXED_THRESHOLD)] = FIXED_THRESHOLD
    best = middle[f1 == f1.max()]
    return float(best[np.abs(best - FIXED_THRESHOLD).argmin()])


def _name_each(key: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {f"{key}_{name}": value for name, value in zip(names, values, strict=True)}


def _measure_each(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, RowScore]:
    """Return precision, recall and F1 of each class or label as functions of the weights of the rows."""
    columns = zip(names, predictions.T, labels.T, strict=True)
    return {f"{key}_{name}": score for name, *column in columns for key, score in measure_label(*column).items()}
