"""Columns that give the label away, against leave-one-out means by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.analysis.doctor import GIVEN_AWAY, divide_numbers, explain_answers

SMALL = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=30)


def explain_by_force(codes, values):
    """Return the share of the variance of values (S, L) that the means of the others of a group explain."""
    errors = []
    for row, code in enumerate(codes):
        others = [other for other in range(len(codes)) if codes[other] == code and other != row]
        expected = values[others].mean(0) if others else values.mean(0)
        errors.append(((values[row] - expected) ** 2).sum())
    total = ((values - values.mean(0)) ** 2).sum()
    return 1 - sum(errors) / total if total else 0.0


@given(rows=SMALL)
def test_the_share_is_that_of_brute_force(rows):
    codes, answers = (np.array(column) for column in zip(*rows, strict=True))
    assert explain_answers(codes, answers) == pytest.approx(explain_by_force(codes, np.eye(3)[answers]))
    numbers = answers.astype(np.float32)
    assert explain_answers(codes, numbers) == pytest.approx(explain_by_force(codes, numbers[:, None].astype(float)))


def test_a_name_for_every_row_gives_nothing_away_but_a_sorted_number_does():
    rng = np.random.default_rng(0)
    answers, rows = np.repeat([0, 1], 500), np.arange(1000)
    names, shuffled = [f"row {row}" for row in rows], rng.permutation(1000)
    assert explain_answers(divide_numbers(rows, names), answers) < 0.01
    assert explain_answers(divide_numbers(rows, [str(row) for row in rows]), answers) > GIVEN_AWAY
    assert explain_answers(divide_numbers(rows, [str(row) for row in shuffled]), answers) < 0.2


def test_a_column_that_is_wrong_in_a_few_rows_gives_the_label_away():
    answers = np.arange(1000) % 2
    column = answers.copy()
    column[:10] = 1 - column[:10]
    assert GIVEN_AWAY < explain_answers(column, answers) < 1
    column[:100] = 1 - answers[:100]
    assert explain_answers(column, answers) < GIVEN_AWAY
