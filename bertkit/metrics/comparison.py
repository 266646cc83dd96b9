"""The difference of two methods on the same rows: its 95 % interval, its p-value, and the rows that would be enough.

The rows are sampled by a Bayesian bootstrap (Rubin 1981), the same weights for all runs, so the difference is paired.
Two corrections keep the share of false differences at its level.

Few rows that differ: with four gains and no loss, no bootstrap sample is below 0, although a fair coin gives four heads
or four tails once in eight. Therefore one row more counts on either side, of the size of the rows that differ: with b
losses and c gains an accuracy has risen with the probability that Beta(c + 1, b + 1) is above 1/2. Verdicts are then
nearly those of McNemar's mid-p test (Fagerland et al. 2013, "The McNemar test for binary matched-pairs data", BMC
Medical Research Methodology 13). One row on the other side alone would give the exact test, which tells fewer
differences than its level allows.

Seeds: a method is drawn again with every seed. Runs of one method differ by their seeds and by the rows at hand; the
second part is known from the bootstrap, and is subtracted from the variance between the runs. The rest is the variance
of the seeds, for which the samples are widened to t variates, with degrees of freedom as in Welch's test: the variance
between the runs has one less than the runs, that of the rows has any number (Satterthwaite 1946). As there, the sum has
at least as many as the mean with the fewest; runs that agree by chance would otherwise leave hardly any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binomtest, t

from bertkit.metrics.intervals import LEVEL, WEIGHTS_A_BLOCK
from bertkit.metrics.rows import RowScore

COMPARISON_SAMPLES = 10_000  # of the bootstrap
EFFECTS = 64  # rows whose effect is computed
POWER = 0.8  # the chance of telling the difference, with the rows that are called enough


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
        freedom: The degrees of freedom of the verdict's t variates; infinite if no variance between runs counts.
    """

    value: float
    low: float
    high: float
    p: float
    rows: int
    row_error: float
    seed_error: float | None = None
    freedom: float = np.inf


def compare_methods(
    firsts: Sequence[RowScore], seconds: Sequence[RowScore], samples: int = COMPARISON_SAMPLES, seed: int = 0
) -> Contrast:
    """Return how many points the second method is above the first one on the same rows.

    Args:
        firsts: The score of each run of the first method; the runs differ in their seed.
        seconds: The same of the second method.
    """
    scores = [*firsts, *seconds]
    flat = np.stack([score.rows.reshape(len(score), -1) for score in scores])  # (M, S, V), M = all runs
    # Equal rows become one, whose weight is a sum of exponential variates.
    _, places, counts = np.unique(np.concatenate(flat, axis=1), axis=0, return_index=True, return_counts=True)
    scores = [score.take(places) for score in scores]
    rng, size, blocks, sums = np.random.default_rng(seed), max(WEIGHTS_A_BLOCK // len(places), 1), [], []
    for start in range(0, samples, size):
        weights = rng.standard_gamma(counts[:, None], (len(places), min(size, samples - start))).T  # (R, S)
        blocks.append(_score_runs(scores, weights))
        sums.append(weights.sum(1))
    sampled = np.concatenate(blocks, axis=1)  # (M, R)
    runs = _score_runs(scores, counts[None])[:, 0]  # (M,)
    count = len(firsts)
    value = float(runs[count:].mean() - runs[:count].mean())
    differences = sampled[count:].mean(0) - sampled[:count].mean(0)  # (R,)
    if (flat != flat[0]).any():
        gains, losses = rng.standard_exponential((2, samples))
        effect = _find_effect(scores[:count], scores[count:], counts, rng)
        differences = differences + effect * (gains - losses) * len(flat[0]) / np.concatenate(sums)
    row_error, freedom = float(differences.std()), np.inf
    seed_error = 0.0 if len(runs) > 2 else None
    if seed_error is not None and row_error:
        seed_error, between = _find_seed_error(np.split(runs, [count]), np.split(sampled, [count]))
        total = row_error**2 + seed_error**2
        wider = np.sqrt(total) / row_error
        if between:
            fewest = min(number for number in (count, len(runs) - count) if number > 1)
            freedom = float(np.clip(total**2 / between, fewest - 1, 1e9))
            wider = wider / np.sqrt(rng.chisquare(freedom, samples) / freedom)
        differences = value + wider * (differences - value)
    low, high = np.quantile(differences, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    p = min(2 * (int(beyond) + 1) / (samples + 1), 1.0)
    return Contrast(value, low, high, p, int(counts.sum()), row_error, seed_error, freedom)


def _score_runs(scores: Sequence[RowScore], weights: np.ndarray) -> np.ndarray:
    """Return (M, R) the points of each run with each of the weights."""
    return np.stack([score.points * score.score(weights) for score in scores])


def _find_effect(
    firsts: Sequence[RowScore], seconds: Sequence[RowScore], counts: np.ndarray, rng: np.random.Generator
) -> float:
    """Return the root mean square of the points that the difference loses if a differing row becomes as in the other.

    Runs are paired in order. At most EFFECTS distinct rows are drawn, by their counts (S,).
    """
    pairs = [(firsts[place % len(firsts)], score) for place, score in enumerate(seconds)]
    differs = np.any([(first.rows != second.rows).reshape(len(counts), -1).any(1) for first, second in pairs], axis=0)
    places = np.flatnonzero(differs)
    if not len(places):  # only runs of the same method differ
        return 0.0
    if len(places) > EFFECTS:
        places = rng.choice(places, EFFECTS, p=counts[places] / counts[places].sum())
        times = np.ones(EFFECTS)
    else:
        times = counts[places]
    weights = np.concatenate([np.tile(counts, (len(places), 1)), np.eye(len(places))], axis=1)  # (D, S + D)
    weights[np.arange(len(places)), places] -= 1
    lost = [second.score(counts[None]) - second.extend(first.rows[places]).score(weights) for first, second in pairs]
    squares = (seconds[0].points * np.mean(lost, axis=0)) ** 2  # (D,)
    return float(np.sqrt(np.average(squares, weights=times)))


def _find_seed_error(runs: Sequence[np.ndarray], sampled: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the standard error of the difference that the seeds cause, and the sum of Satterthwaite's formula.

    The sum has the squared variance of each mean over its degrees of freedom; it is small where the variance is known.

    A method with a single run is assumed to vary as the other one does.

    Args:
        runs: The points of the runs of each method.
        sampled: The same (runs, R) of each sample of the rows.
    """
    counts = [len(found) for found in runs]
    if 1 in counts:
        place = int(np.argmax(counts))
        runs, sampled, scales = [runs[place]], [sampled[place]], [1 / counts[0] + 1 / counts[1]]
    else:
        scales = [1 / count for count in counts]
    error, between = 0.0, 0.0
    for found, drawn, scale in zip(runs, sampled, scales, strict=True):
        variance = found.var(ddof=1)
        by_rows = drawn.var(axis=0, ddof=1).mean() - variance
        error += scale * max(variance - by_rows, 0.0)
        between += (scale * variance) ** 2 / (len(found) - 1)
    return float(np.sqrt(error)), float(between)


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def estimate_rows(contrast: Contrast, comparisons: int = 1) -> tuple[int | None, float]:
    """Return about how many rows would tell a difference that is not told yet, and how much more of everything would.

    The chance of telling it is then POWER. With `comparisons`, the level is divided among them, as for the smallest p.

    Returns:
        The number of rows, above that at hand, with the same runs; None where the seeds alone hide the difference. Then
        the factor, above 1, by which both the rows and the runs of each method, with their degrees of freedom, would
        have to grow.
    """
    seed_variance = (contrast.seed_error or 0.0) ** 2
    total = np.sqrt(contrast.row_error**2 + seed_variance)
    ratio = abs(contrast.value) / total

    def find_bound(factor: float) -> float:
        """Return the difference in standard errors that is told; the samples are skewed, so it is above `ratio`."""
        freedom = contrast.freedom * factor
        return max(t.ppf(1 - (1 - LEVEL) / 2 / comparisons, freedom), ratio) + t.ppf(POWER, freedom)

    def find_factor(factor: float) -> float:
        return (find_bound(factor) / ratio) ** 2

    largest = np.log(find_factor(1.0))
    factor = float(np.exp(brentq(lambda power: power - np.log(find_factor(np.exp(power))), 0, largest)))
    room = (contrast.value / find_bound(1.0)) ** 2 - seed_variance
    needed = contrast.rows * contrast.row_error**2 / room if room > 0 else None
    return None if needed is None else max(int(float(f"{needed:.1e}")), contrast.rows + 1), factor


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
