"""The measurements that all benchmarks share."""

import gc
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertkit.bench import measure
from bertkit.bench.measure import (
    BERTKIT,
    REFERENCE,
    Measurement,
    Timed,
    alternate,
    count_flops,
    count_tokens,
    measure_peak,
    time_call,
)
from bertkit.model.checkpoint import make_config
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS


def test_the_sides_take_turns_without_garbage_collection():
    calls = []
    sides = {
        name: partial(time_call, lambda name=name: calls.append((name, gc.isenabled())))
        for name in (BERTKIT, REFERENCE)
    }
    seconds, made = alternate(sides, 3, ignore)
    assert calls == [(BERTKIT, False), (REFERENCE, False)] * 3
    assert gc.isenabled()
    assert {name: len(found) for name, found in seconds.items()} == {BERTKIT: 3, REFERENCE: 3}
    assert made == {BERTKIT: [None] * 3, REFERENCE: [None] * 3}


def test_what_a_side_makes_is_counted_and_freed_off_the_clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    class Slow:
        def __del__(self) -> None:
            clock[0] += 100

    def make() -> Slow:
        clock[0] += 2
        return Slow()

    def keep(made: Slow) -> tuple[type, bool]:
        clock[0] += 30
        return type(made), gc.isenabled()

    seconds, made = alternate({BERTKIT: partial(time_call, make, keep)}, 2, ignore)
    assert seconds == {BERTKIT: [2, 2]}
    assert made == {BERTKIT: [(Slow, True)] * 2}
    assert clock == [2 * 132]


def test_a_side_may_have_a_clock_of_its_own():
    assert alternate({BERTKIT: lambda: Timed(7.0, "made")}, 1, ignore) == ({BERTKIT: [7.0]}, {BERTKIT: ["made"]})


def test_a_side_that_fails_leaves_garbage_collection_on():
    with pytest.raises(ZeroDivisionError):
        time_call(lambda: 1 / 0)
    assert gc.isenabled()


def test_the_ratio_is_the_median_of_the_rounds():
    seconds = {BERTKIT: [1.0, 2.0, 4.0], "another": [2.0, 2.0, 2.0], REFERENCE: [9.0, 10.0, 8.0]}
    measured = Measurement(seconds, dict.fromkeys(seconds, 6))
    assert measured.compare(REFERENCE) == 5.0  # of 9, 5 and 2
    assert measured.compare("another") == 1.0
    assert measured.rates == {BERTKIT: 3.0, "another": 3.0, REFERENCE: pytest.approx(6 / 9)}
    assert measured.find_fastest(["another", REFERENCE]) == "another"
    more = Measurement(seconds, {BERTKIT: 12, "another": 6, REFERENCE: 6})
    assert more.compare(REFERENCE) == 10.0  # twice the work in the same seconds


def test_the_peak_counts_what_numpy_held_at_a_time():
    def hold() -> None:
        for _ in range(3):
            np.zeros(1_000_000, np.float64)

    assert 8e6 <= measure_peak(hold) < 9e6


def test_the_operations_of_a_worked_example():
    """H 2, intermediate 8, a layer, V 5, three tokens of which one is decoded; backwards twice that."""
    config = make_config(
        {
            "hidden_size": 2,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "vocab_size": 5,
        }
    )
    dense = 3 * (4 * 2 * 2 * 2 + 2 * 2 * 2 * 8)  # tokens x (query, key, value, output; up and down)
    scores = 2 * 2 * 3 * 3 * 2  # two products, multiply and add, 3 x 3 pairs, H
    decoder, pooler = 2 * 2 * 2 + 2 * 2 * 5, 2 * 2 * 2
    assert count_flops(config, torch.tensor([3]), 1) == 3 * (dense + scores + decoder + pooler)
    two = count_flops(config, torch.tensor([3, 3]), 2)
    assert two == 2 * count_flops(config, torch.tensor([3]), 1)
    assert two < count_flops(config, torch.tensor([6]), 2) + 3 * pooler  # attention is quadratic in the length


def test_real_tokens_are_counted_and_labels_of_tokens():
    rows = [
        {"input_ids": np.arange(length), "token_type_ids": np.zeros(length, np.int64), "labels": 1}
        for length in (3, 5, 4)
    ]
    lengths, targets = count_tokens(TASKS["rte"], rows, 2)
    assert (lengths.tolist(), targets) == ([3, 5, 4], 0)
    labels = torch.tensor([[-100, 7, -100], [4, -100, 0]])
    task = SimpleNamespace(collate=lambda items: {"attention_mask": torch.ones(2, 3, dtype=int), "labels": labels})
    lengths, targets = count_tokens(task, [None] * 4, 2)
    assert (lengths.tolist(), targets) == ([3, 3, 3, 3], 6)
