"""What every bench measures with."""

import gc

import numpy as np
import pytest

from bertkit.bench import measure
from bertkit.bench.measure import BERTKIT, REFERENCE, alternate, compare, measure_peak, measure_seconds


def test_the_sides_take_turns_without_garbage_collection():
    calls = []
    sides = {name: lambda name=name: calls.append((name, gc.isenabled())) for name in (BERTKIT, REFERENCE)}
    seconds = alternate(sides, 3)
    assert calls == [(BERTKIT, False), (REFERENCE, False)] * 3
    assert gc.isenabled()
    assert {name: len(found) for name, found in seconds.items()} == {BERTKIT: 3, REFERENCE: 3}


def test_what_a_side_makes_is_taken_and_freed_off_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    class Slow:
        def __del__(self) -> None:
            clock[0] += 100

    def make() -> Slow:
        clock[0] += 2
        return Slow()

    taken = []

    def take(name: str, made: Slow) -> None:
        clock[0] += 30
        taken.append((name, type(made), gc.isenabled()))

    assert alternate({BERTKIT: make}, 2, take=take) == {BERTKIT: [2, 2]}
    assert taken == [(BERTKIT, Slow, True)] * 2
    assert clock == [2 * 132]


def test_a_side_that_fails_leaves_garbage_collection_on():
    with pytest.raises(ZeroDivisionError):
        measure_seconds(lambda: 1 / 0)
    assert gc.isenabled()


def test_the_ratio_is_the_median_of_the_rounds():
    seconds = {BERTKIT: [1.0, 2.0, 4.0], "another": [2.0, 2.0, 2.0], REFERENCE: [9.0, 10.0, 8.0]}
    assert compare(seconds) == 5.0  # of 9, 5 and 2
    assert compare(seconds, "another") == 4.5


def test_the_peak_counts_what_numpy_held_at_a_time():
    def hold() -> None:
        for _ in range(3):
            np.zeros(1_000_000, np.float64)

    assert 8e6 <= measure_peak(hold) < 9e6
