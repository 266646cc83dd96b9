"""The 95 % interval of a score over its rows.

It is the bias-corrected and accelerated bootstrap (BCa; Efron 1987, "Better Bootstrap Confidence Intervals", Journal of
the American Statistical Association 82), with three exceptions. The share of right rows, such as the accuracy, has
Wilson's interval (1927, "Probable Inference, the Law of Succession, and Statistical Inference", same journal 22), which
needs no samples and has a width at 0 and 1. The calibration error is a sum of absolute values, whose estimate is too
high by what chance adds to values near 0; its limits are found by inverting tests. Other scores that only a few rows
decide (all or almost all rows right, a handful of rows) have a Bayesian bootstrap (Rubin 1981, "The Bayesian
Bootstrap", Annals of Statistics 9), whose limits have one row more: the most harmful or the most helpful one of a few
(`RowScore.errors`). How often each holds is measured by tests/metrics/simulate_intervals.py.

The difference of models on the same rows is in `bertkit.metrics.comparison`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bertkit.metrics.rows import RowScore

LEVEL = 0.95  # of intervals; half of the rest is beyond each limit
WEIGHTS_A_BLOCK = 1 << 18  # computed at once: 2 MB, which stays in the cache
INTERVAL_SAMPLES = 2_000  # of the interval of a score
LEAST_SAMPLES = 500  # the same, where there are more values than
MOST_VALUES = 1 << 27  # in all samples together
GROUPS = 256  # of rows that the jackknife leaves out together, where there are more distinct rows
FEW_ROWS = 10  # decide a score: too few for BCa
HALVINGS = 20


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of a score, in the unit of the score."""

    low: float
    high: float


def find_interval(score: RowScore, seed: int = 0) -> Interval:
    """Return the 95 % interval of a score: its range over other rows of the same source, for the same model.

    The result depends on the seed by the error of a quantile of INTERVAL_SAMPLES values, or fewer for scores with very
    many values.
    """
    if (successes := score.count_successes()) is not None:
        return find_wilson(*successes, 100 / score.points)
    merged, numbers, counts = merge_rows(score)
    rng = np.random.default_rng(seed)
    influences = find_influences(merged, numbers, rng)
    value = merged.score(counts[None])[0]
    samples = min(INTERVAL_SAMPLES, max(LEAST_SAMPLES, MOST_VALUES // merged.rows.size))
    if count_deciding(influences) < FEW_ROWS:
        low, high = _bound(merged, counts, samples, rng)
    elif score.rate == "gaps":
        low, high = invert_tests(merged, numbers, samples, rng)
    else:
        low, high = find_bca(value, resample(merged, numbers, samples, rng), influences)
    return Interval(float(min(low, value)), float(max(high, value)))


def merge_rows(score: RowScore) -> tuple[RowScore, np.ndarray, np.ndarray]:
    """Return a score of the distinct rows (U), the distinct row (S,) of each row, and the number (U,) of each."""
    flat = score.rows.reshape(len(score), -1)
    _, places, numbers, counts = np.unique(flat, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return score.take(places), numbers.reshape(-1), counts


def resample(merged: RowScore, numbers: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the score (R,) of samples with replacement; the other arguments are the result of `merge_rows`."""
    return np.concatenate([merged.score(weights) for weights in draw_samples(numbers, samples, rng)])


def draw_samples(numbers: np.ndarray, samples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield how often each distinct row is in each sample with replacement, some samples (R, U) at a time."""
    counts = np.bincount(numbers)
    total, distinct = len(numbers), len(counts)
    for size in _divide_samples(samples, distinct):
        if 8 * distinct < total:  # a binomial variate takes as long as about 8 drawn rows
            weights = rng.multinomial(total, counts / total, size)
        else:
            drawn = numbers[rng.integers(total, size=(size, total))] + distinct * np.arange(size)[:, None]  # (R, S)
            weights = np.bincount(drawn.ravel(), minlength=size * distinct).reshape(size, distinct)
        yield weights.astype(np.float64)


def find_influences(merged: RowScore, numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return how much a row, or a random group of rows, raises the score above the mean of the jackknife (J,).

    Equal rows have equal influences, which are computed once.
    """
    total, distinct = len(numbers), len(merged)
    counts = np.bincount(numbers)
    if distinct <= GROUPS:
        left_out, times = np.eye(distinct), counts
    else:
        places = rng.permutation(total) % GROUPS * distinct + numbers
        left_out = np.bincount(places, minlength=GROUPS * distinct).reshape(GROUPS, distinct)  # (J, U)
        times = np.ones(GROUPS, int)
    scores = np.concatenate([merged.score(part) for part in _divide_rows(counts - left_out)])
    return np.repeat(np.average(scores, weights=times) - scores, times)


def count_deciding(influences: np.ndarray) -> float:
    """Return how many rows decide the score: J for equal absolute influences, 1 if only one row has any, 0 for none."""
    squares = influences**2
    return float(squares.sum() ** 2 / fourth) if (fourth := (squares**2).sum()) > 0 else 0.0


def find_bca(value: float, sampled: np.ndarray, influences: np.ndarray) -> np.ndarray:
    """Return the limits of the BCa interval, from the score of the samples (R,) and the influences (J,)."""
    from scipy.special import ndtr, ndtri

    outside, least = (1 - LEVEL) / 2, 0.5 / len(sampled)
    below = ((sampled < value).mean() + (sampled <= value).mean()) / 2
    bias = ndtri(np.clip(below, least, 1 - least))
    acceleration = (influences**3).sum() / (6 * (influences**2).sum() ** 1.5)
    shifted = bias + ndtri([outside, 1 - outside])
    return np.quantile(sampled, ndtr(bias + shifted / (1 - acceleration * shifted)))


def invert_tests(merged: RowScore, numbers: np.ndarray, samples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the limits of the sum of absolute values of the mean gaps.

    True gaps in the proportions of the measured ones are assumed: t times as large, with the noise of the samples. The
    limits belong to the smallest and the largest t for which the measured sum would not be an exception.
    """
    outside, sums = (1 - LEVEL) / 2, merged.rows[numbers].sum(0)  # (K + 1,), the last one for the weights
    gaps = sums[:-1] / sums[-1]
    sampled = np.concatenate([weights @ merged.rows for weights in draw_samples(numbers, samples, rng)])  # (R, K + 1)
    noise, value = sampled[:, :-1] / sampled[:, -1:] - gaps, np.abs(gaps).sum()

    def find_size(share: float) -> float:
        """Return the t at which this share of the sums is below the measured one."""
        low, high = 0.0, 2.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if quantile(middle, share) < value else (low, middle)
        return low

    def quantile(size: float, share: float) -> float:
        return float(np.quantile(np.abs(size * gaps + noise).sum(1), share))

    return value * find_size(1 - outside), value * find_size(outside)


def find_wilson(right: float, counted: int, scale: float) -> Interval:
    """Return the 95 % interval of the share `right / counted` (Wilson 1927), which is from 0 to `scale`."""
    from scipy.special import ndtri

    if not counted:
        return Interval(0.0, scale)
    share, z = right / counted, ndtri((1 + LEVEL) / 2)
    middle = (share + z**2 / (2 * counted)) / (1 + z**2 / counted)
    half = z * np.sqrt(share * (1 - share) / counted + (z / (2 * counted)) ** 2) / (1 + z**2 / counted)
    low, high = middle - half if right else 0.0, middle + half if right < counted else 1.0  # exactly
    return Interval(scale * float(low), scale * float(high))


def _bound(merged: RowScore, counts: np.ndarray, samples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the limits of a Bayesian bootstrap with the most harmful and the most helpful added row."""
    outside, added = (1 - LEVEL) / 2, merged.errors.reshape(-1, *merged.rows.shape[1:])  # (2C, ...)
    weights = np.concatenate([np.tile(counts, (len(added), 1)), np.eye(len(added))], axis=1)
    effects = merged.extend(added).score(weights)
    worst, best = (merged.extend(added[[place]]) for place in (effects.argmin(), effects.argmax()))
    found = []
    for size in _divide_samples(samples, len(merged) + 1):
        weights = rng.standard_gamma(np.append(counts, 1), (size, len(merged) + 1))  # (R, U + 1)
        found.append([worst.score(weights), best.score(weights)])
    lows, highs = np.concatenate(found, axis=1)  # (R,) each
    return float(np.quantile(lows, outside)), float(np.quantile(highs, 1 - outside))


def _divide_samples(samples: int, rows: int) -> list[int]:
    size = max(WEIGHTS_A_BLOCK // rows, 1)
    return [min(size, samples - start) for start in range(0, samples, size)]


def _divide_rows(weights: np.ndarray) -> list[np.ndarray]:
    return np.array_split(weights, -(-weights.size // WEIGHTS_A_BLOCK))
