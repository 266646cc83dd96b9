"""The least confidence of an answer: its levels, its bound, and how often the accuracy that was asked for holds."""

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from bertkit.metrics.selective import bound_accuracy, choose_confidence, list_levels

SPLITS = 1000


def test_levels_are_fixed_and_end_at_what_the_likeliest_class_has_at_least():
    assert list_levels(2) == [0.999, 0.995, *(percent / 100 for percent in range(99, 49, -1))]
    assert list_levels(3)[-1] == 0.34


@pytest.mark.parametrize(("right", "rows"), [(59, 59), (95, 100), (0, 7), (1, 1)])
def test_the_bound_is_that_of_clopper_and_pearson(right, rows):
    low, _ = proportion_confint(right, rows, alpha=0.1, method="beta")
    assert bound_accuracy(right, rows) == pytest.approx(low)


def test_a_worked_example():
    """59 right rows of 0.95 ** 59 = 0.0485 are just enough for 95 %; 58 are too few, even if all are right."""
    for rows, least in ((59, 0.5), (58, None)):
        found = choose_confidence(np.full(rows, 1.0), np.ones(rows, bool), 0.95, 2, range(rows))
        assert (found.least, found.rows) == (least, rows)


def test_the_last_level_before_the_first_failure_is_taken():
    """At 0.9 and above all 100 are right; at 0.8 there are 100 wrong ones; that 0.7 would pass again does not count."""
    confidences = np.repeat([0.9, 0.8, 0.7], [100, 100, 100_000])
    right = np.repeat([True, False, True], [100, 100, 100_000])
    found = choose_confidence(confidences, right, 0.95, 2, range(len(right)))
    assert found.least == 0.81
    assert found.reached == pytest.approx(0.05 ** (1 / 100))


def test_one_row_of_a_group_counts():
    found = choose_confidence(np.ones(590), np.ones(590, bool), 0.95, 2, np.repeat(range(59), 10).tolist())
    assert (found.least, found.rows) == (0.5, 59)
    found = choose_confidence(np.ones(590), np.ones(590, bool), 0.95, 2, np.repeat(range(58), 11)[:590].tolist())
    assert found.least is None


@pytest.mark.parametrize("rows", [500, 3000])
@pytest.mark.parametrize("falls", [True, False])
def test_the_accuracy_that_was_asked_for_holds_in_94_of_100_splits(rows, falls):
    """The risk falls with confidence, or the accuracy is 0.5 points below the target at every confidence.

    A split without an answer counts as held. The true accuracy of what is answered is the mean of the true rates over
    the uniform confidences at or above the level that was chosen.
    """
    rng, target, held = np.random.default_rng(rows + falls), 0.95, 0

    def rate(confidences):
        return 0.8 + 0.2 * (confidences - 0.5) / 0.5 if falls else np.full(len(confidences), target - 0.005)

    for _ in range(SPLITS):
        confidences = rng.uniform(0.5, 1, rows)
        right = rng.random(rows) < rate(confidences)
        least = choose_confidence(confidences, right, target, 2, range(rows)).least
        held += least is None or rate(np.linspace(least, 1, 1001)).mean() >= target
    assert held >= 0.94 * SPLITS
