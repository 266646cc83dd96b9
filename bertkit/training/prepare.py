"""The data of a run, read and encoded, and the tokenizer and the settings that they decide."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bertkit.data.tokenizer import load_tokenizer
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import TUNE, Task
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import holds_run, start_directory

# --- The data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What training needs beside the model; it serves every run of the same `name_data`.

    examples: as the task's `load` and `divide` give them, but for "train", whose text may be large.
    data: split -> the encoded data set.
    settings: BertConfig's values that the data decide.
    """

    examples: Mapping[str, Any]
    tokenizer: Any
    data: Mapping[str, Any]
    settings: Mapping[str, Any]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Split -> what tells its data from any others."""
        return {split: data.fingerprint() for split, data in self.data.items()}


def prepare(
    task: Task, recipe: Recipe, report: Report = ignore, output: Path | None = None, goes_on: bool = False
) -> Prepared:
    """The data of a complete recipe, read and encoded; with `output` the run directory is begun as soon as it can be.

    Args:
        goes_on: whether the run there continues from a checkpoint, and so with its own tokenizer.

    Raises:
        UsageError: wrong or missing files, or a tokenizer that cannot be loaded.
    """
    processes = join_processes(recipe)
    examples = task.load(recipe["data"], report)
    if (share := recipe["data"].get("tune_share")) and TUNE not in examples:
        dev = next(iter(task.splits))
        examples[TUNE], examples[dev] = task.divide(examples[dev], share)
    with processes.main_process_first():  # the others read the first one's vocabulary
        # What another start has left may be of another text, unless the run has come to a checkpoint with it.
        if output is not None and (goes_on or not processes.is_main_process) and holds_run(output, recipe):
            tokenizer = load_tokenizer(str(output))
        else:
            tokenizer = task.tokenize(recipe, examples, report)
        if output is not None and processes.is_main_process:
            start_directory(output, recipe, tokenizer)
    data = {}
    for split in ("train", TUNE, *task.splits, *task.unlabelled):
        if split in examples:
            data[split] = task.encode(examples[split], tokenizer, recipe, split)
            for line in task.describe(data[split], split):
                report(line)
    settings = task.configure(recipe, tokenizer, examples)
    return Prepared({split: texts for split, texts in examples.items() if split != "train"}, tokenizer, data, settings)


def name_data(task: Task, recipe: Recipe) -> str:
    """Return a name that two complete recipes share if what `prepare` makes of one serves the other."""
    return name_examples(task, recipe) if task.reusable else json.dumps(recipe, sort_keys=True)


def name_examples(task: Task, recipe: Recipe) -> str:
    """Return a name that two complete recipes share if they read the same examples and make the same tokenizer."""
    parts = {"task": task.name} | {key: recipe.get(key) for key in ("checkpoint", "data", "model")}
    return json.dumps(parts, sort_keys=True)
