"""Training by the clock: the schedule, its record, and the end in time."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler

from bertkit.errors import UsageError
from bertkit.training import pace
from bertkit.training.pace import END_SECONDS, KeepTime, OutOfTime, Pace, TimeLimit

ON_CPU = SimpleNamespace(world_size=1, device=torch.device("cpu"))


class World:
    """A machine whose time passes as the test says; it stands for the clock and for the time module."""

    def __init__(self, limit):
        self.limit, self.now = limit, 0.0

    @property
    def left(self):
        return self.limit - self.now

    def monotonic(self):
        return self.now


def train_by(world, durations, row_seconds=0.0, rows=0, first=1.0, most=100_000):
    """Train as the Trainer does, with updates of given seconds; return the updates and the pace."""
    found = Pace()
    keeper = KeepTime(TimeLimit(world, {0: first}, row_seconds), found, [rows], 0, most)
    state, control = TrainerState(max_steps=most), TrainerControl()
    keeper.on_train_begin(ON_CPU, state, control)
    while state.global_step < state.max_steps and not control.should_training_stop:
        world.now += durations(world.now)
        state.global_step += 1
        control.should_training_stop = state.global_step >= state.max_steps  # as DefaultFlowCallback
        keeper.on_step_end(ON_CPU, state, control)
    return state.global_step, found


@settings(deadline=None)
@given(st.lists(st.floats(0.2, 3.0), min_size=1, max_size=8), st.floats(60, 3000), st.floats(0, 30))
def test_the_training_ends_in_time_and_wastes_little_whatever_the_machine_does(speeds, limit, rows):
    """The machine has another speed in each part of the time; the end takes as long as a slow one needs."""
    assume(limit > 3 * (rows + END_SECONDS) + 30)
    world = World(limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", world)
        slow = lambda now: speeds[min(int(now / limit * len(speeds)), len(speeds) - 1)]  # noqa: E731
        updates, found = train_by(world, slow, row_seconds=1.0, rows=rows)
    assert updates > 0
    last = slow(world.now - 1e-9)
    end = (rows + END_SECONDS) * max(last, 1.0)
    assert world.now + rows + END_SECONDS <= limit + last  # at most the update that was in progress
    since = world.now % (limit / len(speeds))  # the machine has had this speed
    if since > pace.MEASURED_SECONDS + 2 * pace.MEASURED_UPDATES * last:
        assert world.now + end <= limit + last
    if len(set(speeds)) == 1 and last >= 1:
        allowance = max(15.0, 0.05 * limit)
        assert limit - world.now - end <= allowance + 2 * last
        assert found.find_share(updates) == pytest.approx(1.0, abs=0.02)


def test_the_share_follows_the_time_when_the_machine_becomes_slower():
    """For half of the time updates take 1 s, then 4 s: about half of the schedule is done at the change."""
    world = World(4000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", world)
        updates, found = train_by(world, lambda now: 1.0 if now < 2000 else 4.0)
    assert found.find_share(2000) == pytest.approx(0.5, abs=0.02)
    assert updates == pytest.approx(2000 + 500, rel=0.02)
    assert found.find_share(updates) == pytest.approx(1.0, abs=0.01)


def test_a_new_plan_changes_no_share_before_it():
    found = Pace()
    found.plan(0, 1000, 0.7)
    before = [found.find_share(update) for update in range(401)]
    found.plan(400, 500, 0.9)
    assert [found.find_share(update) for update in range(401)] == before
    assert found.find_share(450) == pytest.approx((before[400] + 0.9) / 2)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "polynomial"])
def test_an_even_pace_gives_the_schedule_of_transformers(name, tmp_path):
    args = TrainingArguments(str(tmp_path), lr_scheduler_type=name, warmup_steps=0.1, use_cpu=True)
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=1.0) for _ in range(2)]
    ours = Pace([[0.0, 0.0, 1 / 50]]).make_scheduler(args, optimizers[0])
    stock = get_scheduler(name, optimizers[1], num_warmup_steps=5, num_training_steps=50)
    for _ in range(50):
        assert ours.get_last_lr()[0] == pytest.approx(stock.get_last_lr()[0], abs=1e-5)
        for each in (*optimizers, ours, stock):
            each.step()


def test_other_splits_are_left_out_when_the_time_is_over():
    """They count at the mean speed of the training, what is needed at its last speed."""
    world = World(100.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", world)
        keeper = KeepTime(TimeLimit(world, {0: 1.0}, 0.1), Pace(), [20], 100, 1000)
        state = TrainerState(max_steps=1000)
        keeper.on_train_begin(ON_CPU, state, TrainerControl())
        for world.now in (2.0, 4.0, 6.0, 7.0, 8.0, 9.0):
            state.global_step += 1
            keeper.on_step_end(ON_CPU, state, TrainerControl())
        assert keeper.slowness == pytest.approx((7 + 10) / (5 + 10))  # without the first update
        keeper.seconds = 1.0
        assert keeper.count_fitting(state) == pytest.approx(91 - 2 * (2 + END_SECONDS) - 10 * 17 / 15)
        world.now = 95.0
        keeper.on_prediction_step(ON_CPU, state, TrainerControl())  # needed
        keeper.on_predict(ON_CPU, state, TrainerControl())
        with pytest.raises(OutOfTime):
            keeper.on_prediction_step(ON_CPU, state, TrainerControl())
        world.now = 85.0
        keeper.on_prediction_step(ON_CPU, state, TrainerControl())


def test_too_little_time_is_an_error():
    with pytest.raises(UsageError, match="the time is over before the first update; give a longer --budget"):
        train_by(World(4.0), lambda now: 1.0)


def test_the_reserve_grows_with_a_slow_machine_up_to_what_may_be_unused():
    limit = TimeLimit(World(600.0), {0: 1.0}, row_seconds=0.01)
    assert limit.allowance == 30
    needed = 100 * 0.01 + END_SECONDS
    assert limit.reserve(100) == pytest.approx(2 * needed)
    assert limit.reserve(100, slowness=3.0, saving=1.0) == pytest.approx(3 * needed + 2)
    assert limit.reserve(100_000) == pytest.approx(1000 + END_SECONDS + 0.6 * 30)
    assert math.isclose(limit.reserve(100, slowness=0.5), limit.reserve(100))
