"""A learning-rate schedule that follows the clock, and a record of it that repeats the run without one.

As in academic-budget BERT (Izsak et al. 2021), warm-up and decay go by time: the schedule ends when the time is over,
however fast the machine is meanwhile. The share of the schedule that is done is a straight line between replannings, so
that a few numbers in the recipe (`pace`) repeat every learning rate exactly.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from bertkit.errors import UsageError
from bertkit.system.clock import Clock
from bertkit.training.callbacks import may_ask
from bertkit.training.processes import take_first

RESOLUTION = 1_000_000  # updates of the schedule that gives the shape
PLANNED_PART = 4  # each plan holds for 1/4 of the updates that are left
PLANNED_TO_END = 8  # updates that are planned to the end at once
LEAST_UNUSED = 15.0  # seconds of a budget that may be left over
UNUSED_SHARE = 0.05  # or this share of it, if that is more
MEASURED_SECONDS = 8.0  # at least, to say how long an update takes: other work comes and goes
MEASURED_UPDATES = 4  # likewise
SPARE_SHARE = 0.6  # of them, for a machine that becomes slower after the last update
LEAST_FITTING = 10  # updates that must fit into the time at the start
END_SECONDS = 4.0  # for scores, their intervals, the card and the exit, beside predictions and checkpoints
LAST_SECONDS = 8.0  # before the end, when predictions that are not needed are broken off


class TooShort(UsageError):
    """The time is too short for a training."""


class OutOfTime(Exception):
    """The time is over before a split is predicted that is not needed for the score; raised in all processes."""


@dataclass
class Pace:
    """The share of the schedule that is done after each update.

    Attributes:
        segments: The first update of each segment, the share there, and the share that each of its updates adds.
    """

    segments: list[list[float]] = field(default_factory=list)

    def find_share(self, update: int) -> float:
        """Return the share of the schedule that is done after an update."""
        if not self.segments:
            return 0.0
        start, share, slope = self.segments[max(bisect_right(self.segments, update, key=itemgetter(0)) - 1, 0)]
        return min(share + slope * (update - start), 1.0)

    def plan(self, update: int, end: int, share: float) -> None:
        """Replace what comes after `update` by a segment that has done `share` after update `end`."""
        done = self.find_share(update)
        kept = [segment for segment in self.segments if segment[0] < update]
        self.segments = [*kept, [float(update), done, (share - done) / (end - update)]]

    def make_scheduler(self, args: TrainingArguments, optimizer: Optimizer) -> LambdaLR:
        """Return the scheduler of the arguments, stretched over the shares that are done."""
        shape = get_scheduler(
            args.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)], lr=optimizer.defaults["lr"]),
            num_warmup_steps=args.get_warmup_steps(RESOLUTION),
            num_training_steps=RESOLUTION,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        factor = shape.lr_lambdas[0]
        return LambdaLR(optimizer, lambda update: factor(self.find_share(update) * RESOLUTION))


@dataclass(frozen=True)
class TimeLimit:
    """The time that a training may take.

    Attributes:
        clock: The time of the whole command.
        update_seconds: First update of each part of the training -> seconds of an update there, as measured before.
        row_seconds: Seconds in which a sequence was predicted then.
    """

    clock: Clock
    update_seconds: Mapping[int, float]
    row_seconds: float

    def expect(self, update: int) -> float:
        """Return the expected seconds of an update."""
        return self.update_seconds[max(first for first in self.update_seconds if first <= update)]

    @property
    def allowance(self) -> float:
        """Return the seconds that may be left over at the end."""
        return max(LEAST_UNUSED, UNUSED_SHARE * self.clock.limit)

    def reserve(self, rows: int, slowness: float = 1.0, saving: float = 0.0, spare: float = SPARE_SHARE) -> float:
        """Return the seconds to leave for the end of a run: predictions, checkpoints and files.

        Args:
            rows: Sequences that must be predicted at the end.
            slowness: How much longer the machine takes now than when it was measured.
            saving: Seconds of a checkpoint; the model is written twice and read once more.
            spare: Share of the allowance for a machine that becomes slower; one that is slow already uses some of it.
        """
        needed = rows * self.row_seconds + END_SECONDS
        return max(needed * slowness, needed + min(needed, spare * self.allowance)) + 2 * saving


class KeepTime(TrainerCallback):
    """Plans the schedule by the time that is left, and ends the training in time.

    Args:
        needed: Sequences of each split that must be predicted after the training, for the score.
        others: Sequences of the other splits; what remains of them is left out if the machine becomes too slow.
        most: Updates after which the training ends in any case.
    """

    def __init__(self, limit: TimeLimit, pace: Pace, needed: Sequence[int], others: int, most: int) -> None:
        self.limit = limit
        self.pace = pace
        self.needed = needed
        self.others = others
        self.most = most
        self.predicted = 0  # splits
        self.first = 0  # the update after which the training begins
        self.begun = 0.0  # the time at which updates began to be measured
        self.taken, self.expected = 0.0, 0.0  # seconds of its updates, and those that were measured before
        self.seconds = 0.0  # of an update, as last measured
        self.saving = 0.0  # seconds of the last checkpoint
        self.next = 0  # the update of the next plan
        self.marks: deque[tuple[int, float]] = deque()  # the last updates and their times
        self.until = 0.0  # the time at which the next update of a plan is due

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.first, self.begun = state.global_step, time.monotonic()
        self.seconds, self.marks = self.limit.expect(self.first), deque([(self.first, self.begun)])
        self.plan(args, state)

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.measure(state.global_step)
        if control.should_training_stop:
            return
        asks = may_ask(args, state) or self.seconds > 1
        if state.global_step >= self.next or (asks and take_first(self.is_late(state))):
            self.plan(args, state)
        if state.global_step >= state.max_steps:
            control.should_training_stop = control.should_save = True

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.saving = time.monotonic() - self.marks[-1][1]
        self.begun += self.saving
        self.marks = deque((step, then + self.saving) for step, then in self.marks)

    def on_prediction_step(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.predicted >= len(self.needed) and take_first(self.is_over):
            raise OutOfTime

    def on_predict(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.predicted += 1

    def measure(self, step: int) -> None:
        """Measure the last updates, and all of them; without checkpoints and the slow first update."""
        now = time.monotonic()
        if step == self.first + 1:
            self.begun, self.marks = now, deque([(step, now)])
            return
        self.taken = now - self.begun
        self.expected += self.limit.expect(step - 1)
        self.marks.append((step, now))
        while len(self.marks) > MEASURED_UPDATES + 1 and now - self.marks[1][1] >= MEASURED_SECONDS:
            self.marks.popleft()
        first, then = self.marks[0]
        if now - then >= MEASURED_SECONDS:
            self.seconds = (now - then) / (step - first)

    def plan(self, args: TrainingArguments, state: TrainerState) -> None:
        """Plan the next updates; `state.max_steps` is the expected end."""
        step, now = state.global_step, time.monotonic()
        left = min(take_first(int(self.count_fitting(state))), self.most - step)
        if left <= 0 and step == 0:
            left = take_first(int(self.count_fitting(state, spare=0.0)))
        if left <= 0 and step == 0:
            raise TooShort("the time is over before the first update; give a longer --budget")
        state.max_steps = step + max(left, 0)
        if left > 0:
            stretch = left if left <= PLANNED_TO_END else left // PLANNED_PART
            done = self.pace.find_share(step)
            self.pace.plan(step, step + stretch, done + (1 - done) * stretch / left)
            self.next, self.until = step + stretch, now + stretch * self.seconds

    def is_late(self, state: TrainerState) -> bool:
        """Return whether updates take longer than planned, or no further one fits into the time."""
        return time.monotonic() > self.until or self.count_fitting(state) < 1

    def count_fitting(self, state: TrainerState, spare: float = SPARE_SHARE) -> float:
        """Return how many more updates fit into the time."""
        slowness = self.seconds / self.limit.expect(state.global_step)
        reserve = self.limit.reserve(sum(self.needed), slowness, self.saving, spare)
        reserve += self.others * self.limit.row_seconds * self.slowness
        return (self.limit.clock.left - reserve) / self.seconds

    @property
    def slowness(self) -> float:
        """Return how much longer than measured updates take on average, as far as they tell it.

        The measurement counts as much as updates of the time that it is used for.
        """
        known = self.others * self.limit.row_seconds
        return (self.taken + known) / (self.expected + known) if self.expected else 1.0

    @property
    def is_over(self) -> bool:
        """Return whether what is left of the time is needed for the end of the run."""
        return self.limit.clock.left < LAST_SECONDS * max(self.slowness, 1.0)
