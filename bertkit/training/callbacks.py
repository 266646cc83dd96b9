"""What happens between the updates of a training: progress, checkpoints, a stop by a signal, a NaN or infinite loss."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from bertkit.errors import UsageError
from bertkit.system.memory import UPDATES_BETWEEN_LOOKS, Heap, keep_memory
from bertkit.system.progress import Report, describe_duration
from bertkit.training.run_dir import list_checkpoints, write_log

SECONDS_OF_SILENCE = 15  # at least, while it predicts
Progress = Callable[[int, int, Mapping[str, float]], None]  # updates done, of how many, the latest log entry


class Diverged(UsageError):
    """The loss is no number any more; all processes of a run see it."""


def explain_divergence(what: str, update: int, args: TrainingArguments) -> str:
    """What to do about a training that has come to infinities or NaN."""
    kept = f"{args.output_dir} has no checkpoint yet"
    if whole := list_checkpoints(Path(args.output_dir)):
        kept = f"checkpoints in {args.output_dir} are kept, the last is of update {max(whole)}"
    return (
        f"{what} after update {update}; lower learning_rate or raise warmup_steps in [train], or set precision = "
        f'"fp32"; {kept}'
    )


def explain_stop(update: int, saved: int) -> str:
    """Say after which update a run was stopped, and where it goes on: at the last checkpoint (0: there is none)."""
    where = "" if saved == update else f" after update {saved:,}" if saved else " from the beginning"
    return f"stopped after update {update:,}; the same command continues{where}"


class StopOnSignal(TrainerCallback):
    """Reports progress, stops on a signal or on a loss that is no number."""

    def __init__(self, output: Path, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.signalled = 0  # the signal's number
        self.agreed = 0  # the same, once all processes know
        self.heap = Heap()

    def on_log(self, args, state: TrainerState, control: TrainerControl, logs=None, **kwargs) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise Diverged(explain_divergence(f"the loss is {loss}", state.global_step, args))
        if state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, logs or {})

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, self.output)  # from now on the directory is this run's
        if args.device.type == "cpu":
            keep_memory()

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # All processes have to stop after the same update. On a GPU they ask each other less often: it waits for them.
        if args.world_size == 1 or args.device.type == "cpu" or state.global_step % 16 == 0:
            self.agreed = self.ask_all(args)
        if self.agreed:
            control.should_training_stop = control.should_save = True
        elif state.is_world_process_zero and state.global_step % max(1, state.max_steps // 200) == 0:
            self.progress(state.global_step, state.max_steps, {})
        if args.device.type == "cpu" and state.global_step % UPDATES_BETWEEN_LOOKS == 0:
            self.heap.look()

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # The Trainer comes here too when it was stopped in the middle. An evaluation would move the random state, and
        # the checkpoint that was just written would be written again with it.
        if self.agreed and not is_at_end(state):
            control.should_evaluate = control.should_save = False

    def ask_all(self, args) -> int:
        """The signal that any of the processes has got, or 0; all of them have to ask."""
        if args.world_size == 1:
            return self.signalled
        flag = torch.tensor(self.signalled, device=args.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return int(flag)


def is_at_end(state: TrainerState) -> bool:
    """Whether an epoch, but for rounding, or the training ends after this update."""
    return state.global_step >= state.max_steps or abs(state.epoch - round(state.epoch)) < 1e-6


def ends_epoch(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the checkpoint of this update is saved where the epoch ends, after its evaluation.

    Saved before it, a run that goes on would do without that evaluation and its random numbers; saved before and after,
    the second writing would put the first at risk. Whoever stops a run has to give it the time of an evaluation.
    """
    return args.save_strategy != SaveStrategy.BEST and is_at_end(state)


class PredictionProgress(TrainerCallback):
    """Says now and then how far a long prediction is, of the share of the first process."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.batches = 0
        self.begun = self.said = 0.0

    def on_prediction_step(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        now, total = time.monotonic(), len(kwargs["eval_dataloader"])
        self.batches += 1
        if self.batches == 1:
            self.begun = self.said = now  # the first batch takes longer than the others
        elif state.is_world_process_zero and now - self.said >= SECONDS_OF_SILENCE:
            self.said = now
            left = (now - self.begun) / (self.batches - 1) * (total - self.batches)
            self.report(f"  {self.batches / total:.0%} predicted, {describe_duration(left)} left")

    def on_evaluate(self, args, state: TrainerState, control: TrainerControl, metrics, **kwargs) -> None:
        self.batches = 0

    on_predict = on_evaluate


class Milestones(TrainerCallback):
    """Save after certain updates, and every checkpoint where an epoch ends after its evaluation (see `ends_epoch`)."""

    def __init__(self, updates: Collection[int]) -> None:
        self.updates = updates
        self.waits = False  # for the end of the epoch

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        control.should_save |= state.global_step in self.updates
        self.waits = control.should_save and ends_epoch(args, state)
        control.should_save &= not self.waits

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        control.should_save |= self.waits
        self.waits = False
