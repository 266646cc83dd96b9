"""Scores as functions of the weights of their rows, for intervals (`bertkit.metrics.intervals`).

A row is the unit of sampling: a text, a question, a document. The scores of many weighted samples are computed at once;
where all weights are 1 they equal the task's. They are 0 where undefined. Shape letters: R samples, S rows, L labels.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np


@dataclass(frozen=True, eq=False)
class WeightedScore:
    """A score of a model on some rows."""

    rows: np.ndarray  # (S, ...) values of each row
    rate: str  # the name of one of RATES, which computes the score
    points: float = 100.0  # the points of a table in 1.0 of the score: 100 for a fraction, 1 for a percentage
    row_weights: np.ndarray | None = None  # (S,) by which all other weights are multiplied; None: 1

    def __len__(self) -> int:
        return len(self.rows)

    def count_successes(self) -> tuple[int, int] | None:
        """Return how many rows are right, and of how many, if the score is the share of right ones among some rows."""
        if self.row_weights is not None or self.rate not in QUOTIENTS:
            return None
        if not np.isin(parts := QUOTIENTS[self.rate](self.rows), (0, 1)).all():
            return None
        right, counted = parts.sum(0).astype(int).tolist()
        return right, counted

    @property
    def is_additive(self) -> bool:
        """Return whether two rows may be replaced by their sum."""
        return self.rate in ("mean", "percentage", "gaps") or self.rate in COUNT_SCORES

    def score(self, weights: np.ndarray) -> np.ndarray:
        """Return the score (R,) of each sample, from weights (R, S) of at least 0."""
        return RATES[self.rate](self.rows, weights if self.row_weights is None else weights * self.row_weights)

    def judge_rows(self) -> np.ndarray:
        """Return (S,) how right each row is: from 0 to 1, or the negative error of a number. Not for rankings."""
        if self.rate in NUMBER_RATES or self.rate in ORDINAL_RATES:
            return -np.abs(self.rows[:, 0] - self.rows[:, 1])
        if self.rate in COUNT_SCORES:
            right, found, wanted = self.rows.sum(2).T  # (S,) each
            return _divide(2 * right, found + wanted, 1.0)  # neither predicted nor correct: right
        return self.rows[:, 0]

    def take(self, numbers: np.ndarray) -> "WeightedScore":
        """Return the same score of some of the rows."""
        weights = None if self.row_weights is None else self.row_weights[numbers]
        return replace(self, rows=self.rows[numbers], row_weights=weights)

    def flatten(self) -> np.ndarray:
        """Return (S, V) all that differs between rows: their values and their own weights."""
        values = self.rows.reshape(len(self), -1)
        return values if self.row_weights is None else np.column_stack([values, self.row_weights])

    def join(self, groups: Sequence[Hashable]) -> "WeightedScore":
        """Return the same score with a row for each group (S,).

        A score that is not additive, such as a correlation, is returned as it is.
        """
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        if not self.is_additive or len(numbers) == len(groups):
            return self
        rows, values = np.zeros((len(numbers), *self.rows.shape[1:])), self.rows
        if self.row_weights is not None:
            values = values * self.row_weights.reshape(-1, *[1] * (values.ndim - 1))
        np.add.at(rows, [numbers[group] for group in groups], values)
        return replace(self, rows=rows, row_weights=None)


def take_values(measured: Mapping[str, WeightedScore | float]) -> dict[str, float]:
    """Return the values of scores, those at weights of 1; a number, such as a count, is its own value."""
    return {
        name: float(score.score(np.ones((1, len(score))))[0]) if isinstance(score, WeightedScore) else score
        for name, score in measured.items()
    }


# --- Means ------------------------------------------------------------------------------------------------------------


def measure_mean(values: np.ndarray, counted: np.ndarray | None = None, percent: bool = False) -> WeightedScore:
    """Return the mean of values (S,) from 0 to 1 over the rows where `counted` (S,); None: over all."""
    counted = np.ones(len(values)) if counted is None else counted.astype(np.float64)
    rows = np.stack([values * counted, counted], axis=1)  # (S, 2)
    rate, points = ("percentage", 1.0) if percent else ("mean", 100.0)
    return WeightedScore(rows, rate, points)


def _rate_mean(rows: np.ndarray, weights: np.ndarray, scale: float) -> np.ndarray:
    sums = weights @ rows  # (R, 2)
    return _divide(scale * sums[:, 0], sums[:, 1])


def measure_gaps(gaps: np.ndarray) -> WeightedScore:
    """Return the sum over K columns of the absolute mean of gaps (S, K) from -1 to 1."""
    return WeightedScore(np.append(gaps, np.ones((len(gaps), 1)), axis=1), "gaps")  # (S, K + 1)


def _rate_gaps(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    sums = weights @ rows  # (R, K + 1)
    return _divide(np.abs(sums[:, :-1]).sum(1), sums[:, -1])


# --- Counts: how often each label is right, predicted and correct -----------------------------------------------------


def measure_counts(right: np.ndarray, found: np.ndarray, wanted: np.ndarray, score: str) -> WeightedScore:
    """Return one of COUNT_SCORES.

    Args:
        right: (S, L) how often a label is both predicted and correct.
        found: (S, L) how often it is predicted.
        wanted: (S, L) how often it is correct.
    """
    return WeightedScore(np.stack([right, found, wanted], axis=1).astype(np.float64), score)  # (S, 3, L)


def measure_classes(predictions: np.ndarray, references: np.ndarray, classes: int) -> dict[str, WeightedScore]:
    """Return `macro_f1`, `weighted_f1` and `matthews_correlation` of classes, from predictions and references (S,).

    A prediction that is none of the classes is wrong, and no class of its own.
    """
    found, wanted = (numbers[:, None] == np.arange(classes) for numbers in (predictions, references))  # (S, L)
    names = ("macro_f1", "weighted_f1", "matthews_correlation")
    return {name: measure_counts(found * wanted, found, wanted, name) for name in names}


def measure_label(found: np.ndarray, wanted: np.ndarray) -> dict[str, WeightedScore]:
    """Return `precision`, `recall` and `f1` of one label that is predicted (S,) and correct (S,) for some rows."""
    rows = (found & wanted)[:, None], found[:, None], wanted[:, None]
    return {name: measure_counts(*rows, name) for name in ("precision", "recall", "f1")}


COUNT_SCORES = ("precision", "recall", "f1", "macro_f1", "labels_f1", "weighted_f1", "matthews_correlation")


def _rate_counts(rows: np.ndarray, weights: np.ndarray, score: str) -> np.ndarray:
    """Return a score of COUNT_SCORES (R,); precision, recall and F1 are over all labels together."""
    right, found, wanted = np.moveaxis(np.tensordot(weights, rows, 1), 1, 0)  # (R, L) each
    each = _divide(2 * right, found + wanted)  # (R, L) the F1 of each label
    match score:
        case "precision":
            return _divide(right.sum(1), found.sum(1))
        case "recall":
            return _divide(right.sum(1), wanted.sum(1))
        case "f1":
            return _divide(2 * right.sum(1), (found + wanted).sum(1))
        case "macro_f1":  # the mean over the labels that occur
            return _divide(each.sum(1), ((found + wanted) > 0).sum(1))
        case "labels_f1":  # the mean over all labels
            return each.mean(1)
        case "weighted_f1":
            return _divide((each * wanted).sum(1), wanted.sum(1))
    total = wanted.sum(1)
    # The sum of x (total - x) is exactly 0 for a single class, total² - sum of x² is not.
    spreads = [(counts * (counts.sum(1, keepdims=True) - counts)).sum(1) for counts in (found, wanted)]
    return _divide(right.sum(1) * total - (found * wanted).sum(1), np.sqrt(spreads[0] * spreads[1])).clip(-1, 1)


# --- Numbers ----------------------------------------------------------------------------------------------------------


def measure_numbers(values: np.ndarray, labels: np.ndarray) -> dict[str, WeightedScore]:
    """Return `pearson`, `spearmanr`, `rmse` and `r2` of values (S,) against labels (S,)."""
    rows = np.stack([values, labels], axis=1).astype(np.float64)  # (S, 2)
    return {name: WeightedScore(rows, name, 1.0 if name in ("rmse", "r2") else 100.0) for name in NUMBER_RATES}


def _rate_pearson(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _correlate(*rows.T[:, None], weights)


def _rate_spearman(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    ranks = (_sum_below(column, weights, 0.5, column) for column in rows.T)  # (R, S) each; tied rows share the middle
    return _correlate(*ranks, weights)


def _rate_rmse(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.sqrt(_divide(weights @ (rows[:, 0] - rows[:, 1]) ** 2, weights.sum(1)))


def _rate_r2(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    labels = rows[:, 1] - rows[0, 1]
    left = weights @ (rows[:, 0] - rows[:, 1]) ** 2
    spread = weights @ labels**2 - _divide((weights @ labels) ** 2, weights.sum(1))
    return np.where(spread > 0, 1 - _divide(left, spread), 0.0)


NUMBER_RATES = {"pearson": _rate_pearson, "spearmanr": _rate_spearman, "rmse": _rate_rmse, "r2": _rate_r2}


def measure_ordinals(predictions: np.ndarray, labels: np.ndarray, values: np.ndarray) -> dict[str, WeightedScore]:
    """Return `quadratic_kappa` and `mae` of ordered classes, from predictions and labels (S,).

    Cohen's kappa has quadratic weights by the position of the classes in their order, as in scikit-learn; the mean
    absolute error is by their values.

    Args:
        values: (L,) the numbers that the classes are, ascending.
    """
    rows = np.stack([predictions, labels], axis=1).astype(np.float64)  # (S, 2)
    return {
        "quadratic_kappa": WeightedScore(rows, "quadratic_kappa"),
        "mae": WeightedScore(values[rows.astype(int)], "mae", 1.0),
    }


def _rate_kappa(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    observed = weights @ (rows[:, 0] - rows[:, 1]) ** 2
    sums = weights @ rows  # (R, 2)
    expected = weights @ (rows**2).sum(1) - 2 * _divide(sums.prod(1), weights.sum(1))
    return np.where(expected > 0, 1 - _divide(observed, expected), 0.0)


def _rate_mae(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _divide(weights @ np.abs(rows[:, 0] - rows[:, 1]), weights.sum(1))


ORDINAL_RATES = {"quadratic_kappa": _rate_kappa, "mae": _rate_mae}


def _correlate(values: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the Pearson correlation (R,) of values and labels, (1, S) or (R, S) each."""
    centred = []
    for column in (values, labels):
        column = column - column[:, :1]  # a constant column becomes exactly 0
        centred.append(column - (_divide((weights * column).sum(1), weights.sum(1)))[:, None])  # (R, S)
    first, second = centred
    weighted = weights * first
    spreads = np.einsum("rs,rs->r", weighted, first), np.einsum("rs,rs,rs->r", weights, second, second)
    return _divide(np.einsum("rs,rs->r", weighted, second), np.sqrt(spreads[0] * spreads[1])).clip(-1, 1)  # rounding


# --- Rankings ---------------------------------------------------------------------------------------------------------


def measure_ranking(scores: np.ndarray, labels: np.ndarray) -> dict[str, WeightedScore]:
    """Return `roc_auc` and `average_precision`, means over the labels where they are defined, if there are any.

    Args:
        scores: (S, L).
        labels: (S, L), True where a label is correct.
    """
    rows = np.stack([scores, labels], axis=1).astype(np.float64)  # (S, 2, L)
    positives, negatives = labels.any(axis=0), ~labels.all(axis=0)
    defined = {"roc_auc": positives & negatives, "average_precision": positives}
    return {name: WeightedScore(rows, name) for name, found in defined.items() if found.any()}


def _rate_ranking(rows: np.ndarray, weights: np.ndarray, rate: Callable[..., np.ndarray]) -> np.ndarray:
    found = np.stack([rate(*column, weights) for column in rows.transpose(2, 1, 0)])  # (L, R)
    defined = ~np.isnan(found)
    return _divide(np.where(defined, found, 0.0).sum(0), defined.sum(0))


def _rate_roc(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weight of pairs in the right order as a share, ties being half right; NaN where undefined."""
    asked, positive = scores[labels > 0], weights[:, labels > 0]  # (P,) and (R, P)
    below = _sum_below(scores, weights, 0.5, asked) - _sum_below(
        asked, positive, 0.5, asked
    )  # weights of negative rows
    total = positive.sum(1)
    return _divide((positive * below).sum(1), total * (weights.sum(1) - total), np.nan)


def _rate_precisions(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean precision among the rows with at least the score of each positive one; NaN where undefined."""
    asked, positive = -scores[labels > 0], weights[:, labels > 0]  # (P,) and (R, P)
    right, found = _sum_below(asked, positive, 1.0, asked), _sum_below(-scores, weights, 1.0, asked)
    precisions = np.zeros(weights.shape)
    precisions[:, labels > 0] = positive * _divide(right, found)
    return _divide(precisions.sum(1), positive.sum(1), np.nan)


RANKING_RATES = {"roc_auc": _rate_roc, "average_precision": _rate_precisions}


def _sum_below(values: np.ndarray, weights: np.ndarray, own: float, asked: np.ndarray) -> np.ndarray:
    """Return for each value asked for (P,) the weight (R, P) of rows with a smaller value, and a share of equal ones.

    Args:
        values: (S,), the ones asked for among them.
    """
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    places, kept = np.searchsorted(distinct, asked), np.zeros(len(distinct) + 1, bool)
    kept[places] = kept[places + 1] = kept[0] = True  # the others are added to their neighbours: fewer, longer sums
    kept = kept[:-1]
    equal = np.add.reduceat(weights.take(order, axis=1), starts[kept], axis=1)  # (R, U); take is faster than an index
    return (np.cumsum(equal, axis=1) - (1 - own) * equal).take(np.cumsum(kept)[places] - 1, axis=1)


def _divide(values: np.ndarray, by: np.ndarray, undefined: float = 0.0) -> np.ndarray:
    return np.divide(values, by, out=np.full(np.shape(values), undefined), where=by > 0)


# Name -> a function that returns scores (R,) from rows (S, ...) and their weights (R, S).
RATES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": partial(_rate_mean, scale=1.0),
    "percentage": partial(_rate_mean, scale=100.0),
    "gaps": _rate_gaps,
    **{name: partial(_rate_counts, score=name) for name in COUNT_SCORES},
    **NUMBER_RATES,
    **ORDINAL_RATES,
    **{name: partial(_rate_ranking, rate=rate) for name, rate in RANKING_RATES.items()},
}
# Rate of a quotient of two sums -> what each row adds to numerator and denominator, (S, 2).
QUOTIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": np.asarray,
    "percentage": np.asarray,
    "precision": lambda rows: rows[:, [0, 1]].sum(2),
    "recall": lambda rows: rows[:, [0, 2]].sum(2),
}
