"""Trainer callbacks: progress, checkpoints, early stopping, a stop by a signal, a NaN or infinite loss."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from bertkit.errors import UsageError
from bertkit.system.progress import Report, ShareDone
from bertkit.training.processes import take_first
from bertkit.training.run_dir import append_log, list_checkpoints, write_log

SECONDS_OF_SPEED = 30.0  # after which the speed of earlier updates hardly counts any more
Progress = Callable[[int, int, Mapping[str, float]], None]  # updates done, all updates, the latest log entry


def refuse_divergence(what: str, update: int, args: TrainingArguments) -> NoReturn:
    """Stop a training run that has reached NaN or infinite values; all processes call this together."""
    kept = f"{args.output_dir} has no checkpoint yet"
    if whole := list_checkpoints(Path(args.output_dir)):
        kept = f"checkpoints in {args.output_dir} are kept, the last one is from update {max(whole)}"
    raise UsageError(
        f"{what} after update {update}; lower learning_rate or raise warmup_steps in [train], or set precision = "
        f'"fp32"; {kept}'
    )


class StopOnSignal(TrainerCallback):
    """Reports progress, and stops on a signal or on a NaN or infinite loss."""

    def __init__(self, output: Path, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.signalled = 0  # the number of the signal that this process has received
        self.agreed = 0  # the number of the signal on which all processes have agreed

    def on_log(self, args, state: TrainerState, control: TrainerControl, logs=None, **kwargs) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            refuse_divergence(f"the loss is {loss}", state.global_step, args)
        if state.is_world_process_zero:
            append_log(state.log_history[-1], self.output)
            self.progress(state.global_step, state.max_steps, logs or {})

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, self.output)  # from now on the directory belongs to this run

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if may_ask(args, state):  # all processes have to stop after the same update
            self.agreed = self.ask_all(args)
        if self.agreed:
            control.should_training_stop = control.should_save = True
        elif state.is_world_process_zero and state.global_step % max(1, state.max_steps // 200) == 0:
            self.progress(state.global_step, state.max_steps, {})

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # The Trainer also calls this when it is stopped in the middle of an epoch. An evaluation would advance the
        # random state, and the checkpoint that was just written would be overwritten with it.
        if self.agreed and not is_at_end(state):
            control.should_evaluate = control.should_save = False

    def ask_all(self, args) -> int:
        """Return the signal that any process has received, or 0. All processes must call this together."""
        if args.world_size == 1:
            return self.signalled
        flag = torch.tensor(self.signalled, device=args.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return int(flag)


def is_at_end(state: TrainerState) -> bool:
    """Return whether an epoch (up to rounding) or the training ends after this update."""
    return state.global_step >= state.max_steps or abs(state.epoch - round(state.epoch)) < 1e-6


class PredictionProgress(TrainerCallback):
    """Reports the progress of a long prediction, measured on the first process."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.batches = 0
        self.share = ShareDone(report, "predicted")

    def on_prediction_step(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.batches += 1
        if state.is_world_process_zero:
            self.share.note(self.batches, len(kwargs["eval_dataloader"]))

    def on_evaluate(self, args, state: TrainerState, control: TrainerControl, metrics, **kwargs) -> None:
        self.batches, self.share = 0, ShareDone(self.report, "predicted")

    on_predict = on_evaluate


class Milestones(TrainerCallback):
    """Saves checkpoints after given updates, and delays every checkpoint at the end of an epoch past its evaluation.

    A resumed run would skip the evaluation, and the random numbers that it draws, after a checkpoint before it. A
    stopped run may therefore need the time of an evaluation to end.

    Args:
        pause: Seconds after a checkpoint, or the start, in which planned ones are left out.
    """

    def __init__(self, updates: Collection[int], pause: float = 0.0) -> None:
        self.updates = updates
        self.pause = pause
        self.saved = time.monotonic()
        self.waits = False  # whether a save is delayed until the end of the epoch

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.saved = time.monotonic()

    on_save = on_train_begin

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.pause and control.should_save and not control.should_training_stop:  # as at the end, or by a signal
            control.should_save = not take_first(time.monotonic() - self.saved < self.pause)
        control.should_save |= state.global_step in self.updates
        self.waits = control.should_save and args.save_strategy != SaveStrategy.BEST and is_at_end(state)
        control.should_save &= not self.waits

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        control.should_save |= self.waits
        self.waits = False


class StopAfter(TrainerCallback):
    """Ends the training after an update, which may lie before the end of its schedule; nothing is evaluated there.

    Args:
        update: The update; 0: none.
    """

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        control.should_training_stop |= self.is_due(state)

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.is_due(state):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.is_due(state):  # the Trainer also calls this in the middle of an epoch
            control.should_evaluate = control.should_save = False

    def is_due(self, state: TrainerState) -> bool:
        """Return whether the update is done."""
        return 0 < self.update <= state.global_step


class Deadline(StopAfter):
    """Ends the training in time if the machine has become slower than it was when it was measured.

    Args:
        clock: A `budget.Clock`.
        measured: The measured costs.
        update: The update after which it has ended the training already; 0: none.
    """

    def __init__(self, clock: Any, measured: Any, update: int) -> None:
        super().__init__(update)
        self.clock = clock
        self.measured = measured
        self.saving = measured.saving
        self.taken = self.expected = SECONDS_OF_SPEED  # seconds of the latest updates, beginning with the measurement
        self.before = 0.0  # the end of the last update, evaluation or checkpoint

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        share, now = state.global_step / state.max_steps, time.monotonic()
        expected = next(seconds for end, seconds in self.measured.parts if share <= end + 1e-9)
        if self.before:  # the first update of a start takes longer
            kept = math.exp((self.before - now) / SECONDS_OF_SPEED)
            self.taken, self.expected = kept * self.taken + now - self.before, kept * self.expected + expected
        self.before = now
        asks = may_ask(args, state) or expected > 1  # equal in all processes, or they would wait for each other
        if not self.update and asks and state.global_step < state.max_steps:
            evaluation = self.measured.evaluation if args.eval_strategy != "no" else 0.0
            slowness = max(self.taken / self.expected, 1.0)
            end = max(slowness * self.measured.end, self.measured.longest_end)
            needed = slowness * (expected + evaluation) + end + 2 * self.saving
            if take_first(self.clock.left < needed):
                self.update = state.global_step
        super().on_step_end(args, state, control, **kwargs)

    def on_evaluate(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.before = time.monotonic()

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.saving = time.monotonic() - self.before
        self.before = time.monotonic()


def may_ask(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether processes ask each other after this update: on a GPU rarely, because it makes them wait."""
    return args.world_size == 1 or args.device.type == "cpu" or state.global_step % 16 == 0


class StopEarly(TrainerCallback):
    """Ends the training after `patience` evaluations in a row without a better score.

    It keeps no state of its own: the log decides, so a resumed run ends after the same update.
    """

    def __init__(self, patience: int, name: str, lower_is_better: bool) -> None:
        self.patience = patience
        self.name = name
        self.lower_is_better = lower_is_better

    def on_evaluate(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        control.should_training_stop |= self.is_due(state)

    on_train_begin = on_evaluate  # the last run may have been killed after its last evaluation

    def is_due(self, state: TrainerState) -> bool:
        """Return whether the best score is `patience` evaluations old, the first of equal ones."""
        sign = -1 if self.lower_is_better else 1
        scores = [sign * entry[key] for entry in state.log_history if (key := f"eval_{self.name}") in entry]
        scores = [-math.inf if math.isnan(score) else score for score in scores]
        return bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= self.patience
