"""Calibration of a classifier: errors of its probabilities, one temperature, and label sets by conformal prediction.

`scale_logits` alone applies a temperature: logits that have passed it give calibrated probabilities, and the
same labels. The temperature is that of Guo et al. (2017, "On Calibration of Modern Neural Networks", ICML).

Label sets are split conformal, with the score of LAC (Sadinle, Lei and Wasserman 2019, "Least Ambiguous Set-Valued
Classifiers With Bounded Error Levels", Journal of the American Statistical Association 114): 1 minus the probability
of the correct label. These sets have the fewest labels on average of all with the same coverage; APS (Romano, Sesia and
Candès 2020) has larger ones, which cover more than asked unless they are drawn at random. The price is that a set is
empty where no label is likely enough.

Labels are (S,) the correct classes, whose probabilities add up to 1, or (S, L), 0 or 1 for each of several labels.
Shape letters: S rows, L labels, R samples.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bertkit.errors import UsageError
from bertkit.metrics.rows import WeightedScore, measure_gaps, measure_mean

BINS = 15  # bins of equal width, each with its upper edge
EDGES = np.linspace(0, 1, BINS + 1)[1:-1]  # between bins
TEMPERATURES = (0.1, 10.0)  # least and highest
DIGITS = 4  # digits of a temperature
FOLDS = 5  # parts of the rows; each tries a temperature that is fitted on the others
ROUNDING = 1e-9  # in products of a coverage and a number of rows


# --- Probabilities ----------------------------------------------------------------------------------------------------


def scale_logits(logits: np.ndarray, temperature: float | None) -> np.ndarray:
    """Return logits divided by a temperature; None leaves them unchanged.

    The quotients are float64, so that different logits of a model stay different and the likeliest label the same.
    """
    return logits if temperature is None else logits.astype(np.float64) / temperature


def compute_probabilities(logits: np.ndarray, several: bool) -> np.ndarray:
    """Return the probabilities (S, L) of classes, or of several labels."""
    from scipy.special import expit, softmax

    logits = logits.astype(np.float64)
    return expit(logits) if several else softmax(logits, axis=1)


def choose_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return `fit_temperature`, or 1 where the rows do not show that it lowers the log loss of other rows.

    The gain is that of temperatures fitted on the other FOLDS - 1 parts of the rows; its mean must be above its
    standard error. If all rows are right, the best temperature is 0, even if the model errs elsewhere.

    Args:
        logits: (S, L), finite.
    """
    logits = logits.astype(np.float64)
    right = logits.argmax(axis=1) == labels if labels.ndim == 1 else (logits > 0) == labels
    if right.all() or len(labels) == 1:
        return 1.0
    parts, gains = np.arange(len(labels)) % FOLDS, np.zeros(len(labels))
    for part in range(min(FOLDS, len(labels))):
        here, others = parts == part, parts != part
        tempered = scale_logits(logits[here], fit_temperature(logits[others], labels[others]))
        gains[here] = measure_losses(logits[here], labels[here]) - measure_losses(tempered, labels[here])
    holds = gains.mean() > gains.std() / math.sqrt(len(gains))
    return fit_temperature(logits, labels) if holds else 1.0


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the lowest log loss, within TEMPERATURES and rounded to DIGITS.

    The loss is a convex function of the reciprocal, over which scipy's bounded method searches.

    Args:
        logits: (S, L), finite.
    """
    from scipy.optimize import minimize_scalar

    logits = logits.astype(np.float64)
    least, highest = TEMPERATURES
    found = minimize_scalar(
        lambda sharpness: float(measure_losses(sharpness * logits, labels).mean()),
        bounds=(1 / highest, 1 / least),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return round(1 / float(found.x), DIGITS)


def measure_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (S,) the cross entropy of each row, or its mean binary cross entropy over several labels."""
    from scipy.special import logsumexp

    if labels.ndim == 1:
        return logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
    return np.logaddexp(0, (1 - 2 * labels) * logits).mean(axis=1)


# --- Errors of probabilities ------------------------------------------------------------------------------------------


def measure_calibration(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, WeightedScore]:
    """Return `ece`, the expected calibration error, and `brier`, the Brier score, both from 0 to 1.

    The calibration error compares the highest probability of each row with how often it is right, in BINS bins: the
    mean of |share right - mean probability|, weighted by the rows in each bin. For several labels each label of each
    row counts with its own probability. The Brier score is half the sum of squared errors of a row's probabilities,
    which for two classes is the squared error of either; for several labels it is the mean squared error.

    Args:
        probabilities: (S, L).
    """
    stated, right = list_statements(probabilities, labels)  # (S, K)
    gaps = np.zeros((len(labels), BINS))
    np.add.at(
        gaps, (np.arange(len(labels))[:, None], np.searchsorted(EDGES, stated)), (right - stated) / stated.shape[1]
    )
    squares = (probabilities - mark_correct(labels, probabilities.shape[1])) ** 2  # (S, L)
    brier = squares.sum(axis=1) / 2 if labels.ndim == 1 else squares.mean(axis=1)
    return {"ece": measure_gaps(gaps), "brier": replace(measure_mean(brier), points=1.0)}


def bin_probabilities(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the data of a reliability diagram: mean probability, share right and number of each bin with any.

    Args:
        probabilities: (S, L).
    """
    stated, right = (values.ravel() for values in list_statements(probabilities, labels))
    bins = np.searchsorted(EDGES, stated)
    counts = np.bincount(bins, minlength=BINS)
    filled = np.flatnonzero(counts)
    sums = (np.bincount(bins, values, minlength=BINS)[filled] for values in (stated, right))
    probability, share = (total / counts[filled] for total in sums)
    return probability, share, counts[filled]


def list_statements(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities that are compared with what happened, and whether it happened.

    They are those of the likeliest classes (S, 1), or of each of several labels (S, L).
    """
    if labels.ndim == 2:
        return probabilities, labels.astype(np.float64)
    best = probabilities.argmax(axis=1)
    return probabilities.max(axis=1, keepdims=True), (best == labels).astype(np.float64)[:, None]


def mark_correct(labels: np.ndarray, count: int) -> np.ndarray:
    """Return (S, L) 1 at the correct labels and 0 at the others."""
    return np.eye(count)[labels] if labels.ndim == 1 else labels.astype(np.float64)


# --- Label sets -------------------------------------------------------------------------------------------------------


def score_conformity(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (S,) the conformity scores of rows, sorted: 1 minus the probability of the correct label.

    For several labels the least likely correct one counts, so that a set contains all correct labels of a row; the
    score of a row without labels is 0.

    Args:
        logits: (S, L), finite.
    """
    probabilities = compute_probabilities(logits, several=labels.ndim == 2)
    is_correct = mark_correct(labels, probabilities.shape[1]) > 0
    return np.sort(1 - np.where(is_correct, probabilities, 1.0).min(axis=1))


def choose_limit(scores: Sequence[float], coverage: float) -> float:
    """Return the highest conformity score of a label in a label set that has this coverage.

    A set with all labels up to the k-th of N scores contains the correct label of another row from the same source
    with a probability of k / (N + 1), or more if scores are equal.

    Args:
        scores: Sorted.
        coverage: The least probability.
    """
    if not 0 < coverage < 1:
        raise UsageError(f"coverage is {coverage:g}; give a share between 0 and 1, such as 0.95")
    rank = math.ceil((len(scores) + 1) * coverage - ROUNDING)
    if rank > len(scores):
        needed = math.ceil(coverage / (1 - coverage) - ROUNDING)
        raise UsageError(
            f"a coverage of {coverage:g} needs {needed:,} or more rows that decide (dev, or its tune_share), got "
            f"{len(scores):,}; lower the coverage, or train again with more"
        )
    return float(scores[rank - 1])
