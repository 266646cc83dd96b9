"""The difference of two models on the same rows, its 95 % interval, and what it proves about a loss.

The interval is a Bayesian bootstrap (Rubin 1981, "The Bayesian Bootstrap", Annals of Statistics 9): the weights of the
rows are exponential variates, so that their shares have a flat Dirichlet distribution. Alone it would say that what was
never seen cannot be: two models that agree on all rows would have an interval of width 0. Therefore each limit has one
row more, of the same random weight: for the lower limit one that the first model gets right and the second wrong, for
the upper limit the reverse. With b losses and no gains among S rows, the accuracy that is lost has then the
distribution Beta(b + 1, S - b), whose quantile is the exact limit of Clopper and Pearson (1934, "The Use of Confidence
or Fiducial Limits Illustrated in the Case of the Binomial", Biometrika 26). For other scores the added row is the most
harmful one of a few (`RowScore.errors`); how often such limits hold is measured by tests/metrics/simulate_proof.py.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bertkit.metrics.rows import RowScore

LEVEL = 0.95  # of intervals; half of the rest is beyond each limit
BOOTSTRAP_SAMPLES = 5_000  # of a bootstrap
WEIGHTS_A_BLOCK = 1 << 20  # computed at once: 8 MB


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


def compare_rows(first: RowScore, second: RowScore, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> Difference:
    """Return how many points the second model is above the first one on the same rows, with its 95 % interval.

    The result depends on the seed by the error of a quantile of `samples` values.
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
