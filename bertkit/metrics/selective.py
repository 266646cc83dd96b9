"""Selective prediction: a classifier answers only where it is confident enough for an accuracy that is asked for.

The least confidence is chosen by fixed-sequence testing (Angelopoulos et al. 2021, "Learn then Test: Calibrating
Predictive Algorithms to Achieve Risk Control"): the levels are fixed before any row is seen and tested from the highest
down, so that one error rate of 5 % holds for all tests together, and the last level before the first failure is taken.

Shape letters: S rows.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

ERROR = 0.05  # probability with which the accuracy of the answers may be below the target


@dataclass(frozen=True)
class Abstention:
    """The choice of a least confidence, on some rows."""

    target: float  # the accuracy that is asked for
    least: float | None  # confidence below which there is no answer; None: no level reaches the target
    rows: int  # rows that have decided
    reached: float  # the highest lower bound of the accuracy at the levels that were tested


def list_levels(classes: int) -> list[float]:
    """Return the confidences that are tested, from 0.999 down to the least that the likeliest class can have."""
    least = math.ceil(100 / classes)
    return [0.999, 0.995, *(percent / 100 for percent in range(99, least - 1, -1))]


def bound_accuracy(right: int, rows: int) -> float:
    """Return the one-sided 95 % lower bound of an accuracy (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return float(beta.ppf(ERROR, right, rows - right + 1)) if right else 0.0


def choose_confidence(
    confidences: np.ndarray, right: np.ndarray, target: float, classes: int, groups: Sequence[Hashable]
) -> Abstention:
    """Choose the least confidence at which the answers reach an accuracy with 95 % certainty.

    Levels with so few rows that they fail even if all are right are skipped. One row of a group counts, drawn at
    random, because the others are not independent of it.

    Args:
        confidences: (S,) the probability of the likeliest class.
        right: (S,) whether it is right.
        groups: (S,) the group of each row.
    """
    order = np.random.default_rng(0).permutation(len(confidences))
    drawn = {groups[number]: number for number in order.tolist()}
    rows = np.array(sorted(drawn.values()))
    confidences, right = confidences[rows], right[rows]
    enough, least, reached = math.log(ERROR) / math.log(target), None, 0.0
    for level in list_levels(classes):
        is_answered = confidences >= level
        if is_answered.sum() < enough:
            continue
        bound = bound_accuracy(int(right[is_answered].sum()), int(is_answered.sum()))
        reached = max(reached, bound)
        if bound < target:
            break
        least = level
    return Abstention(target, least, len(rows), reached)
