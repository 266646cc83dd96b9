"""The hash behind all random numbers of pretraining: its published values and its uniformity."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.pretraining.rng import draw_below, draw_bits, draw_key, draw_uniform, permute
from tests.data.conftest import is_uniform


def test_draws_are_splitmix64():
    """The first outputs for seed 1234567, as published with the algorithm; every version must return them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draw_bits(np.array([1234567], np.uint64), np.arange(4)).tolist() == expected
    assert draw_uniform(np.array([1234567], np.uint64), 1)[0] == (3203168211198807973 >> 11) / 2**53
    assert draw_below(np.array([1234567], np.uint64), 1, 1000)[0] == 1000 * (3203168211198807973 >> 11) // 2**53
    assert draw_below(np.array([1234567], np.uint64), 1, 0)[0] == 0


def test_keys_differ_by_every_number_and_its_position():
    grid = np.arange(30)
    keys = draw_key(grid[:, None, None], grid[:, None], grid)  # (30, 30, 30)
    assert np.unique(keys).size == 30**3
    assert draw_key(1, 2, 3)[0] == keys[1, 2, 3]
    assert draw_key(-1)[0] not in keys


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_permutation_takes_every_position_once(count, seed):
    found = permute(draw_key(seed), np.arange(count), count)
    assert sorted(found.tolist()) == list(range(count))
    some = np.arange(count)[:: max(1, count // 5)][::-1]
    np.testing.assert_array_equal(permute(draw_key(seed), some, count), found[some])


def test_every_position_is_sent_everywhere_alike():
    """Chi-square of the image of 0 under 100,000 keys, and of the image of 1 given that of 0."""
    keys, count = draw_key(np.arange(100_000)), 40
    first, second = (permute(keys, np.full(len(keys), position), count) for position in (0, 1))
    assert (first != second).all()
    for found in (first, second, (second - first - 1) % count):
        observed = np.bincount(found, minlength=count)
        observed = observed[observed > 0]  # the distance of two images has one value less
        assert len(observed) >= count - 1
        assert is_uniform(observed)


def test_a_batch_may_hold_the_end_of_one_permutation_and_the_beginning_of_the_next():
    keys, counts = draw_key(np.array([7, 7, 8])), np.array([10, 10, 1000])
    found = permute(keys, np.array([8, 9, 0]), counts)
    assert found[:2].tolist() == permute(keys[:1], np.array([8, 9]), 10).tolist()
    assert found[2] == permute(keys[2:], np.array([0]), 1000)[0]
