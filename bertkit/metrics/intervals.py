"""The 95 % interval of a score over its rows, and that of the difference of two methods on the same rows.

Rows are sampled by a Bayesian bootstrap (Rubin 1981, "The Bayesian Bootstrap", Annals of Statistics 9): their weights
are exponential variates, so that their shares have a flat Dirichlet distribution. A row is what is drawn together: a
text, or all questions on a context.

The interval of a score has the percentiles of its samples. The share of right ones among independent rows, such as the
accuracy, has the exact interval of Clopper and Pearson (1934, Biometrika 26). The calibration error has none: chance
raises it, by more than an interval of it is wide.

The interval of a difference is Student's, around the difference of the means over the runs. Its variance is that of the
rows, the same samples for all runs, and from two runs of a method on that of the seeds: the variance between the runs
over their number, with degrees of freedom as in Welch's test. One run a method says nothing about seeds, so that the
rows alone count. With few rows that differ, this would tell differences that are none: four gains and no loss come up
once in eight. Therefore the variance is that of two more differing rows, one for each method, and the p-value of D
differing rows is at least that of D coins that all show one side. For accuracies the verdicts are then close to those
of McNemar's mid-p test (Fagerland et al. 2013, BMC Medical Research Methodology 13).

How often the intervals hold is measured by tests/metrics/simulate_intervals.py and tests/analysis/simulate_compare.py:
93 % or more with 300 rows, except where a macro F1 has classes of fewer than ten rows (92 %; 85 % with three rows).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, norm, t

from bertkit.metrics.rows import RowScore

LEVEL = 0.95  # of intervals; half of the rest is beyond each limit
OUTSIDE = (1 - LEVEL) / 2
BOOTSTRAP_SAMPLES = 2_000
LEAST_SAMPLES = 500  # where all samples together would have more values than MOST_VALUES
MOST_VALUES = 1 << 26
WEIGHTS_A_BLOCK = 1 << 18  # computed at once: 2 MB, which stays in the cache
LEAST_SPREAD = 1e-9  # of samples; a smaller one is rounding
POWER = 0.8  # the chance of telling the difference, with the rows that are called enough


class Interval(NamedTuple):
    """The 95 % interval of a score, in the unit of the score."""

    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """The points of a table that a second method scores above the first one on the same rows.

    Attributes:
        value: The difference of the means over the runs.
        low: The lower limit of the interval.
        high: Its upper limit.
        p: The two-sided p-value of no difference.
        rows: The number of rows (texts, questions, documents).
        row_error: The standard error that the rows cause.
        seed_error: The one that the seeds cause; None if both methods have a single run.
    """

    value: float
    low: float
    high: float
    p: float
    rows: int
    row_error: float
    seed_error: float | None = None


def find_interval(score: RowScore, seed: int = 0) -> Interval | None:
    """Return the 95 % interval of a score: its range over other rows of the same source, for the same model.

    None for the calibration error, and for a score that is the same in every sample, unless it is the best possible,
    whose lower limit is that of the share of right rows.
    """
    if score.rate == "gaps":
        return None
    best = 100.0 if score.rate == "percentage" else 1.0
    if (successes := score.count_successes()) is not None:
        return find_share_interval(*successes, best)
    (merged,), counts = merge_rows([score])
    sampled = np.concatenate([merged.score(weights) for weights in draw_weights(counts, seed)])
    if np.ptp(sampled) > LEAST_SPREAD:
        return Interval(*np.quantile(sampled, (OUTSIDE, 1 - OUTSIDE)).tolist())
    return find_share_interval(len(score), len(score), best) if abs(sampled[0] - best) <= LEAST_SPREAD else None


def find_share_interval(right: int, counted: int, scale: float) -> Interval:
    """Return the 95 % interval of the share `right / counted`, which is from 0 to `scale`."""
    limits = binomtest(right, counted).proportion_ci(LEVEL) if counted else (0.0, 1.0)
    return Interval(*(scale * limit for limit in limits))


def compare_methods(firsts: Sequence[RowScore], seconds: Sequence[RowScore], seed: int = 0) -> Contrast:
    """Return how many points the second method is above the first one on the same rows.

    Args:
        firsts: The score of each run of the first method; the runs differ in their seed.
        seconds: The same of the second method.
    """
    scores, counts = merge_rows([*firsts, *seconds])
    samples = [rate_runs(scores, weights) for weights in draw_weights(counts, seed)]
    parts = [len(firsts)]
    runs = np.split(rate_runs(scores, counts[None])[:, 0], parts)
    before, after = np.split(np.concatenate(samples, axis=1), parts)  # (M, R) each
    value = float(runs[1].mean() - runs[0].mean())
    values = np.stack([score.rows.reshape(len(counts), -1) for score in scores])  # (M, U, V)
    differing = counts[(values != values[0]).any(axis=(0, 2))].sum()
    row_error = float(np.std(after.mean(0) - before.mean(0)) * np.sqrt(1 + 2 / max(differing, 1)))
    seeds = list_seed_variances(runs)
    variance = row_error**2 + sum(part for part, _ in seeds)
    freedom = variance**2 / between if (between := sum(part**2 / free for part, free in seeds)) else np.inf
    rows, least = int(counts.sum()), min(2.0 ** (1 - int(differing)), 0.9)
    error = max(np.sqrt(variance), abs(value) / t.isf(least / 2, freedom))
    seed_error = float(np.sqrt(sum(part for part, _ in seeds))) if seeds else None
    if not error:
        return Contrast(value, value, value, 1.0, rows, 0.0, seed_error)
    width = t.ppf(1 - OUTSIDE, freedom) * error
    p = float(2 * t.sf(abs(value) / error, freedom))
    return Contrast(value, float(value - width), float(value + width), p, rows, row_error, seed_error)


def list_seed_variances(runs: Sequence[np.ndarray]) -> list[tuple[float, int]]:
    """Return the variances of the mean scores that the seeds cause, with their degrees of freedom.

    A method with a single run is assumed to vary as the other one does; the list is empty if both have one.

    Args:
        runs: The points of the runs of each method.
    """
    several = [found for found in runs if len(found) > 1]
    shares = [1 / len(found) for found in several] if len(several) == 2 else [sum(1 / len(found) for found in runs)]
    return [(share * float(found.var(ddof=1)), len(found) - 1) for share, found in zip(shares, several, strict=False)]


def merge_rows(scores: Sequence[RowScore]) -> tuple[list[RowScore], np.ndarray]:
    """Return scores of the same rows for the distinct rows (U) only, and the number (U,) of each."""
    flat = np.concatenate([score.rows.reshape(len(score), -1) for score in scores], axis=1)
    _, first, counts = np.unique(flat, axis=0, return_index=True, return_counts=True)
    return [score.take(first) for score in scores], counts


def draw_weights(counts: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Yield the weights (r, U) of the distinct rows in the samples, some samples at a time."""
    rng = np.random.default_rng(seed)
    samples = min(BOOTSTRAP_SAMPLES, max(LEAST_SAMPLES, MOST_VALUES // len(counts)))
    size = max(WEIGHTS_A_BLOCK // len(counts), 1)
    for start in range(0, samples, size):
        yield rng.standard_gamma(counts, (min(size, samples - start), len(counts)))


def rate_runs(scores: Sequence[RowScore], weights: np.ndarray) -> np.ndarray:
    """Return (M, R) the points of each run with each of the weights (R, U)."""
    return np.stack([score.points * score.score(weights) for score in scores])


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def estimate_factor(contrast: Contrast, comparisons: int = 1) -> float:
    """Return how many times as many rows, and runs of each method, would tell the difference with a chance of POWER.

    With `comparisons`, the level is divided among them, as for the smallest p.
    """
    needed = norm.ppf(1 - OUTSIDE / comparisons) + norm.ppf(POWER)
    return float((needed / contrast.value) ** 2 * (contrast.row_error**2 + (contrast.seed_error or 0.0) ** 2))


def adjust_p_values(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for several comparisons (Holm 1979, "A Simple Sequentially Rejective … Procedure")."""
    order = np.argsort(values, kind="stable")
    scaled = np.asarray(values)[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def compute_mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p-value of McNemar's exact test, from whether each row (S,) is right with each of two models."""
    gains, losses = int((second & ~first).sum()), int((first & ~second).sum())
    return float(binomtest(gains, gains + losses).pvalue) if gains + losses else 1.0
