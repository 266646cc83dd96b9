"""transformers' Trainer, with what bertkit adds to it.

Losses are divided by the labels of the whole update, and their parts logged; a run reports how far it is, marks its
checkpoints, and stops on a signal or on a loss that is no number. All the rest is the Trainer's.
"""

import ctypes
import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from bertkit.directory import mark_complete, write_log
from bertkit.errors import UsageError
from bertkit.tasks.task import Report, Task

TRIM_EVERY = 20  # updates on a CPU; it takes a fraction of a second
Progress = Callable[[int, int, Mapping[str, float]], None]  # updates done, of how many, the latest log entry


class Interrupted(Exception):
    """The run was asked to stop (SIGTERM or Ctrl-C), has written a checkpoint, and can be continued.

    number: of the signal.
    """

    def __init__(self, number: int, update: int) -> None:
        super().__init__(f"stopped after update {update:,}; the same command continues")
        self.number = number


class Diverged(UsageError):
    """The loss is no number any more; all processes of a run see it."""


def train(trainer: Trainer, checkpoint: Path | None, report: Report) -> None:
    """Trains to the end, from a checkpoint if there is one.

    Raises:
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
    """
    if checkpoint:
        report(f"continues after {checkpoint.name}")
    start = time.monotonic()
    with stop_on_signal(trainer) as watcher:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if number := watcher.agreed or watcher.ask_all(trainer.args):  # a signal may come after the last update
        raise Interrupted(number, trainer.state.global_step)
    report(f"trained for {describe_duration(time.monotonic() - start)}")


class BertTrainer(Trainer):
    """The Trainer, with losses divided by the labels of the whole update and every part of the loss logged.

    A head counts its own labels (`count_labels`); the counts of all micro-batches and processes are added before the
    first of them is computed, so that no loss or gradient depends on how an update is cut.
    """

    def __init__(self, *args, task: Task, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.task = task
        self.parts: dict[str, Tensor] = {}  # sums of the loss's parts since the last log, of this process

    def get_batch_samples(self, epoch_iterator, num_batches, device) -> tuple[list, dict[str, Tensor]]:
        """The micro-batches of one update, and the label counts of all of it."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        head = self.accelerator.unwrap_model(self.model)
        counts: dict[str, Tensor] = {}
        for sample in samples:
            for name, count in head.count_labels(**sample).items():
                counts[name] = counts.get(name, 0) + count
        counts = {name: self.accelerator.reduce(count.to(device), "sum") for name, count in counts.items()}
        return samples, {name: count.clamp(min=1) for name, count in counts.items()}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> Any:
        """This micro-batch's share of the update's loss (times the processes, over which gradients are averaged)."""
        outputs = model(**inputs, **(num_items_in_batch or {}))
        for name, value in outputs.items():
            if name.endswith("_loss"):
                self.parts[name] = self.parts.get(name, 0) + value.detach()
        loss = outputs["loss"] * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the parts of the loss, each its mean over the updates since the last log."""
        if "loss" in logs:
            updates = self.state.global_step - self.logged_at
            for name, total in self.parts.items():
                logs[name] = self.accelerator.reduce(total, "sum").item() / updates
            self.parts, self.logged_at = {}, self.state.global_step
        super().log(logs, start_time)

    def _get_eval_sampler(self, eval_dataset) -> None:
        """None: in order, as scores and files take the predictions; the Trainer's own sorts with group_by_length."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, Tensor, Tensor]:
        """The task's summary of a batch; it stands for the labels too, which the Trainer wants to see."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, **self.task.evaluation_options)
        summary = self.task.summarize(outputs, inputs)
        return None, summary, summary[:, :1]

    def train(self, resume_from_checkpoint=None, **kwargs) -> Any:
        self.logged_at = 0 if resume_from_checkpoint is None else int(str(resume_from_checkpoint).rpartition("-")[2])
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)


class Watcher(TrainerCallback):
    """Reports progress, marks complete checkpoints, stops on a signal or on a loss that is no number."""

    def __init__(self, output: Path, progress: Progress) -> None:
        self.output = output
        self.progress = progress
        self.signalled = 0  # the signal's number
        self.agreed = 0  # the same, once all processes know

    def on_log(self, args, state: TrainerState, control: TrainerControl, logs=None, **kwargs) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after update {state.global_step}; lower learning_rate or raise warmup_steps in "
                f'[train], or set precision = "fp32"; checkpoints in {self.output} are kept'
            )
        if state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps, logs or {})

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, self.output)
            mark_complete(self.output / f"checkpoint-{state.global_step}")

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, self.output)  # from now on the directory is this run's

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # All processes have to stop after the same update. On a GPU they ask each other less often: it waits for them.
        if args.world_size == 1 or args.device.type == "cpu" or state.global_step % 16 == 0:
            self.agreed = self.ask_all(args)
        if self.agreed:
            control.should_save = control.should_training_stop = True
            args.save_total_limit = None  # the Trainer would end by deleting all checkpoints but the best
        elif state.is_world_process_zero and state.global_step % max(1, state.max_steps // 200) == 0:
            self.progress(state.global_step, state.max_steps, {})
        if args.device.type == "cpu" and state.global_step % TRIM_EVERY == 0:
            trim_memory()

    def ask_all(self, args) -> int:
        """The signal that any of the processes has got, or 0; all of them have to ask."""
        if args.world_size == 1:
            return self.signalled
        flag = torch.tensor(self.signalled, device=args.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return int(flag)


class stop_on_signal:
    """In this context SIGTERM and the first Ctrl-C let the update finish, write a checkpoint and end the training."""

    def __init__(self, trainer: Trainer) -> None:
        self.watcher = next(x for x in trainer.callback_handler.callbacks if isinstance(x, Watcher))
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Watcher:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.previous[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread: there signals cannot be caught
                break
        return self.watcher

    def _note(self, number: int, frame: Any) -> None:
        self.watcher.signalled = number
        signal.signal(number, self.previous[number])  # a second one is not held back

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def trim_memory() -> None:
    """Hands the free pages of the heap back to the system, where the C library can (glibc).

    Batches of ever other lengths leave gaps between blocks: by the hundredth update most of the heap may be such gaps.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def describe_duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 5 min 40 s, 3 h 12 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
