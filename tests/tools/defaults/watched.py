"""Run bertkit's command line, and keep the answers of a training's start and end, and of their mean weights.

    python -m tests.tools.defaults.watched classify --data FILE --output RUN

RUN/predictions gets dev-start, dev-end and dev-mean beside the table of dev that is delivered.
"""

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bertkit.tasks.task import Task
from bertkit.training import run, start
from bertkit.training.predictions import TABLE_SUFFIX, join_rows, pack_table
from bertkit.training.prepare import Prepared
from bertkit.training.run_dir import PREDICTIONS
from bertkit.training.trainer import BertTrainer


def keep_all(
    task: Task,
    trainer: BertTrainer,
    prepared: Prepared,
    output: Path,
    predict: Callable[[Any], np.ndarray],
) -> dict[str, Any]:
    """Write the three tables, then compare start and end as a run does."""
    data, model = prepared.data["dev"], trainer.accelerator.unwrap_model(trainer.model)
    end = {name: weight.clone() for name, weight in model.state_dict().items()}
    answers = {"start": start.read_start(output)["dev"], "end": predict(data)}
    model.load_state_dict(average(start.load_start(model, output).state_dict(), end))
    answers["mean"] = trainer.predict(data).predictions
    model.load_state_dict(end)
    (output / PREDICTIONS).mkdir(exist_ok=True)
    for name, summaries in answers.items():
        examples = task.tabulate_examples(prepared.examples["dev"])
        rows = join_rows(task.decode(summaries, data).rows, examples, prepared.tokenizer, task=task.name, split="dev")
        (output / PREDICTIONS / f"dev-{name}{TABLE_SUFFIX}").write_bytes(pack_table(rows))
    return start.keep_better(task, trainer, prepared, output, predict)


def average(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of two models' weights."""
    return {name: (one[name] + other[name]) / 2 if one[name].is_floating_point() else one[name] for name in one}


if __name__ == "__main__":
    run.keep_better = keep_all
    runpy.run_module("bertkit", run_name="__main__")
