"""The sizes of a search: how long its trials are, and how much time is kept for the last training."""

from math import ceil
from typing import Annotated

import msgspec
import numpy as np

from bertkit.studies.trials import REDUCTION
from bertkit.system.clock import Clock
from bertkit.system.progress import describe_duration
from bertkit.training.pace import LEAST_FITTING, TimeLimit, TooShort
from bertkit.training.recipe import Recipe

STAGES = (1 / 9, 1 / 3)  # of a trial's updates, after which it is scored
LEAST_SCORED = 50  # updates before a score
COMPLETED = 3  # whole trials for which there must be time
SequenceCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
FINAL_SHARES = (0.1, 0.5)  # of the time: what is kept for the last training at least, and at most


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of a search.

    Attributes:
        rows, held: Sequences that a trial is trained on, and that it is scored on.
        all_rows, end_rows: Sequences that the last training uses, and that are predicted after it.
        sequences: Sequences of a trial's training; 0: its epochs or max_steps decide.
        stages: Shares of a trial's updates after which it is scored.
        sequence_seconds, update_seconds, row_seconds: Seconds of training on a sequence, of the rest of an update, and
            of predicting a sequence; 0 without a clock.
        final_seconds: The fewest and the most seconds that are kept for the last training.
    """

    rows: SequenceCount
    held: SequenceCount
    all_rows: SequenceCount
    end_rows: SequenceCount
    sequences: SequenceCount = 0
    stages: tuple[Annotated[float, msgspec.Meta(gt=0, lt=1)], ...] = ()
    sequence_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    row_seconds: Seconds = 0.0
    final_seconds: tuple[Seconds, Seconds] = (0.0, 0.0)

    def count_updates(self, recipe: Recipe) -> int:
        """Return the updates of a trial."""
        train = recipe.train
        if not self.sequences and train.get("max_steps", -1) > 0:
            return train["max_steps"]
        return max(ceil((self.sequences or self.rows * train["num_train_epochs"]) / recipe.batch_size), 1)

    def has_trials(self, recipe: Recipe) -> bool:
        """Return whether there is time for trials that are long enough to be compared.

        Args:
            recipe: The task's own values.
        """
        return not self.sequences or self.count_updates(recipe) >= LEAST_SCORED

    def time_training(self, sequences: float, batch_size: int) -> float:
        """Return the seconds of training on some sequences."""
        return sequences * (self.sequence_seconds + self.update_seconds / batch_size)

    def time_trial(self, recipe: Recipe) -> float:
        """Return the seconds of a whole trial, apart from its start."""
        size = recipe.batch_size
        return self.time_training(self.count_updates(recipe) * size, size) + self.held * self.row_seconds

    def time_final(self, recipe: Recipe) -> float:
        """Return the seconds that are kept for the last training."""
        epochs = recipe.train["num_train_epochs"]
        least, most = self.final_seconds
        return min(max(self.time_training(self.all_rows * epochs, recipe.batch_size), least), most)

    def limit(self, clock: Clock, batch_size: int) -> TimeLimit:
        """Return the limit of the last training."""
        return TimeLimit(clock, {0: self.time_training(batch_size, batch_size)}, self.row_seconds)

    def set_stages(self, epochs: float, batch_size: int) -> "Sizes":
        """Return the sizes with the stages that the shortest trials can have."""
        fewest = (self.sequences or self.rows * epochs) / batch_size
        stages = tuple(share for share in STAGES if share * fewest >= LEAST_SCORED)
        return msgspec.structs.replace(self, stages=stages)

    def fit(self, clock: Clock, recipe: Recipe, epochs: float, batch_size: int) -> "Sizes":
        """Return the sizes that fit into the time.

        Args:
            recipe: The task's own values.
            epochs, batch_size: Those of the longest trials.

        Raises:
            TooShort: The time is too short for any training.
        """
        size = recipe.batch_size
        left = clock.left - self.limit(clock, size).reserve(self.end_rows)
        least = LEAST_FITTING * self.time_training(size, size)
        if left < least:
            minutes = ceil((clock.limit - left + least) / 60) + 1
            raise TooShort(
                f"the time is too short: reading, evaluation and {LEAST_FITTING} updates take about "
                f"{describe_duration(clock.limit - left + least)} here; give --budget {minutes}m or more"
            )
        fitted = msgspec.structs.replace(self, final_seconds=tuple(share * left for share in FINAL_SHARES))
        longest = (left - fitted.time_final(recipe)) / COMPLETED - self.held * self.row_seconds  # of a trial's training
        if self.time_training(self.rows * epochs, batch_size) <= longest:
            return fitted
        return msgspec.structs.replace(fitted, sequences=max(int(longest / self.time_training(1, size)), 1))

    def describe_time(self, clock: Clock, recipe: Recipe) -> str:
        """Return in a line what the time allows."""
        size, one = recipe.batch_size, self.time_trial(recipe)
        reserve = self.limit(clock, size).reserve(self.end_rows)
        left = clock.left - reserve
        parts = np.diff([0.0, *self.stages, 1.0])
        part = float(parts @ float(REDUCTION) ** -np.arange(len(parts)))  # of a trial, on average
        free = left - self.time_final(recipe)
        count = 1 + int((free - one) / (one * part)) if free > one else 0
        training = left - (one + (count - 1) * one * part if count else 0)
        updates = int(training / self.time_training(size, size))
        return (
            f"in {describe_duration(clock.limit)} fit about {count} trials, then a training of about {updates:,} "
            f"updates in {describe_duration(training)}, and {describe_duration(reserve)} for evaluation and saving"
        )
