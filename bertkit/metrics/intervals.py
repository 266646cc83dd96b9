"""The 95 % interval of a score over its rows, and that of the difference of two models on the same rows.

The interval of a score is the bias-corrected and accelerated bootstrap (BCa; Efron 1987, "Better Bootstrap Confidence
Intervals", Journal of the American Statistical Association 82), with three exceptions. The share of right rows, such as
the accuracy, has Wilson's interval (1927, "Probable Inference, the Law of Succession, and Statistical Inference", same
journal 22), which needs no samples and has a width at 0 and 1. Other scores that only a few rows decide (all or almost
all rows right, a handful of rows) have the interval with added rows that is described next. And the calibration error
is a sum of absolute values, whose estimate is too high by what chance adds to values near 0; its limits are found by
inverting tests. How often each holds is measured by tests/metrics/simulate_intervals.py.

The interval of a difference is a Bayesian bootstrap (Rubin 1981, "The Bayesian Bootstrap", Annals of Statistics 9): the
weights of the rows are exponential variates, so that their shares have a flat Dirichlet distribution. Alone it would
say that what was never seen cannot be: two models that agree on all rows would have an interval of width 0. Therefore
each limit has one row more, of the same random weight: for the lower limit one that the first model gets right and the
second wrong, for the upper limit the reverse. With b losses and no gains among S rows, the accuracy that is lost has
then the distribution Beta(b + 1, S - b), whose quantile is the exact limit of Clopper and Pearson (1934, "The Use of
Confidence or Fiducial Limits Illustrated in the Case of the Binomial", Biometrika 26). For other scores the added row
is the most harmful one of a few (`RowScore.errors`); how often such limits hold is measured by
tests/metrics/simulate_proof.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertkit.metrics.rows import RowScore

LEVEL = 0.95  # of intervals; half of the rest is beyond each limit
BOOTSTRAP_SAMPLES = 5_000  # of a bootstrap
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


@dataclass(frozen=True)
class Difference:
    """The points of a table that a second model scores above the first one on the same rows.

    Attributes:
        low: The lower limit of the interval.
        high: Its upper limit.
        sampled_low: The lower limit without the added row.
        rows: The number of rows (texts, questions, documents).
    """

    value: float
    low: float
    high: float
    sampled_low: float
    rows: int


@dataclass(frozen=True)
class Verdict:
    """Whether a loss is known to be within a bound.

    Attributes:
        needed: About how many rows would prove it; None if it is decided, or more rows would rather refute it.
    """

    state: Literal["proved", "refused", "undecidable"]
    rows: int
    needed: int | None = None

    def describe(self) -> str:
        """Return the verdict in words."""
        if self.state != "undecidable":
            return self.state
        ending = "more would probably refuse" if self.needed is None else f"about {self.needed:,} would do"
        return f"undecidable with {self.rows:,} rows; {ending}"


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


def compare_rows(first: RowScore, second: RowScore, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> Difference:
    """Return how many points the second model is above the first one on the same rows, with its 95 % interval.

    The result depends on the seed by the error of a quantile of INTERVAL_SAMPLES values.
    """
    outside = (1 - LEVEL) / 2
    # Equal rows become one, whose weight is a sum of exponential variates.
    both = np.concatenate([score.rows.reshape(len(score), -1) for score in (first, second)], axis=1)
    _, places, counts = np.unique(both, axis=0, return_index=True, return_counts=True)
    total, first, second = len(first), first.take(places), second.take(places)
    # Rows that turn from right to wrong, and from wrong to right.
    before = np.concatenate([first.errors[:, 0], first.errors[:, 1]])  # (2C, ...)
    after = np.concatenate([second.errors[:, 1], second.errors[:, 0]])
    added = np.concatenate([np.tile(counts, (len(before), 1)), np.eye(len(before))], axis=1)  # (2C, S + 2C)
    effects = _subtract(first.extend(before), second.extend(after), added)
    worst, best = [effects.argmin()], [effects.argmax()]
    pairs = [(first.extend(before[place]), second.extend(after[place])) for place in (worst, best)]
    rng, size = np.random.default_rng(seed), max(WEIGHTS_A_BLOCK // (len(places) + 1), 1)
    found = []
    for start in range(0, samples, size):
        shape = len(places) + 1, min(size, samples - start)
        weights = rng.standard_gamma(np.append(counts, 1)[:, None], shape).T  # (R, S + 1)
        sampled = _subtract(first, second, weights[:, :-1])
        found.append([sampled, *(_subtract(*pair, weights) for pair in pairs)])
    sampled, lows, highs = np.concatenate(found, axis=1)  # (R,) each
    value = _subtract(first, second, counts[None])[0]
    limits = np.quantile(lows, outside), np.quantile(highs, 1 - outside), np.quantile(sampled, outside)
    return Difference(float(value), *map(float, limits), total)


def judge(difference: Difference, max_loss: float) -> Verdict:
    """Return whether the second model is known to lose at most `max_loss` points.

    It is proved if the lower limit is within the bound, and refused if the upper limit is beyond it. Otherwise the
    interval of M rows around the same difference is estimated: with t = sqrt(N / M) the part of the sample shrinks by
    t, that of the added row by t². M is the number at which it would be proved.
    """
    if difference.low >= -max_loss:
        return Verdict("proved", difference.rows)
    if difference.high < -max_loss:
        return Verdict("refused", difference.rows)
    room = difference.value + max_loss
    if room <= 0:
        return Verdict("undecidable", difference.rows)
    sampled, added = difference.value - difference.sampled_low, max(difference.sampled_low - difference.low, 0.0)
    # The positive root of added t² + sampled t = room, in the form that has no division by 0 for added = 0.
    shrinkage = 2 * room / (sampled + np.sqrt(sampled**2 + 4 * added * room))
    needed = difference.rows / shrinkage**2
    return Verdict("undecidable", difference.rows, int(float(f"{needed:.1e}")))  # two digits


def _subtract(first: RowScore, second: RowScore, weights: np.ndarray) -> np.ndarray:
    """Return (R,) how many points the second score is above the first one."""
    return first.points * (second.score(weights) - first.score(weights))
