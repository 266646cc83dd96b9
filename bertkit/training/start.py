"""The start of a training as a model of its own, and which of start and end is delivered.

A training that starts from a solved head (`bertkit.training.facts`) only has to improve on it. Where it does not, the
start is the better model, and it is delivered.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import take_values
from bertkit.model.checkpoint import fold_targets
from bertkit.reports.tables import name_limits
from bertkit.tasks.finetuning import KEPT, START_GAIN
from bertkit.tasks.task import TUNE, Task
from bertkit.training.prepare import Prepared
from bertkit.training.run_dir import START
from bertkit.training.trainer import BertTrainer

SURE = 0.8  # how sure it must be that a start is better than the end
SUMMARIES = "summaries.npz"  # beside the model of a start: its answers to dev and to the rows that choose


def list_scored(task: Task, prepared: Prepared) -> list[str]:
    """Return the splits that a start is scored on; the first one decides between start and end."""
    return [split for split in (TUNE, next(iter(task.splits))) if split in prepared.data]


class BeforeTraining(TrainerCallback):
    """Calls a function before the first update, where a Trainer has prepared the model for its processes already."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step == 0:
            self.function()


def save_start(task: Task, trainer: BertTrainer, prepared: Prepared, output: Path) -> None:
    """Write the model before the first update, and its answers to dev and to the rows that choose."""
    splits = list_scored(task, prepared)
    compute_metrics, trainer.compute_metrics = trainer.compute_metrics, None  # each split has its own labels
    summaries = {split: trainer.predict(prepared.data[split]).predictions for split in splits}
    trainer.compute_metrics = compute_metrics
    if trainer.is_world_process_zero():
        temporary = output / f".{START}"
        for folder in (temporary, output / START):
            shutil.rmtree(folder, ignore_errors=True)
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(temporary)
        np.savez(temporary / SUMMARIES, **summaries)
        temporary.rename(output / START)
    trainer.accelerator.wait_for_everyone()


def read_start(output: Path) -> dict[str, np.ndarray]:
    """Return the answers of the start by split; empty without a start."""
    path = output / START / SUMMARIES
    if not path.exists():
        return {}
    with np.load(path) as found:
        return dict(found)


def load_start(model: nn.Module, output: Path) -> nn.Module:
    """Return the start of a trained model, whose classifier computes the numbers of a regression themselves."""
    start = type(model).from_pretrained(output / START)
    fold_targets(start)
    return start


def keep_better(
    task: Task,
    trainer: BertTrainer,
    prepared: Prepared,
    output: Path,
    predict: Callable[[Any], np.ndarray],
) -> dict[str, Any]:
    """Compare the end of a training with its start, give the model the better weights, and return the comparison.

    The start is kept if it is better at 80 %: dev is often small, and the end nearly always better in truth.
    """
    starts, splits = read_start(output), list_scored(task, prepared)
    data = prepared.data[splits[0]]
    both = [
        task.score(task.decode(summaries, data).rows)[task.metric] for summaries in (starts[splits[0]], predict(data))
    ]
    before, after = (take_values({"score": score})["score"] for score in both)
    gain = compare_methods(both[:1], both[1:], task.tabulate_examples(prepared.examples[splits[0]]).groups)
    limits = dict(zip(name_limits(START_GAIN), (gain.low, gain.high), strict=True))
    is_worse = gain.value < 0 and gain.p < 1 - SURE
    kept = "start" if is_worse or np.isnan(after) else "end"
    if kept == "start":
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.load_state_dict(load_start(model, output).state_dict())
    trainer.accelerator.wait_for_everyone()  # the first process deletes the start
    gains = {START_GAIN: gain.value, **limits}
    return {
        KEPT: kept,
        "start_score": before,
        "end_score": after,
        **{name: value / both[0].points for name, value in gains.items()},
    }
