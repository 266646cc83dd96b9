"""Read the data of a run, set apart the rows that choose (`tune_share`), and encode all, with the tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.duplicates import TRAIN_SPLIT
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import pluralize
from bertkit.system.hub import READ
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.equal_rows import CheckedRows, check_rows, tabulate_splits
from bertkit.tasks.examples import MOST_TRIAL_ROWS, divide
from bertkit.tasks.task import TUNE
from bertkit.tasks.text import TextExamples
from bertkit.training.network import count_positions
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import holds_run, start_directory

FITTED_ROWS = 50_000  # training rows of a baseline, or words
FEW_SCORED = 20  # rows of dev, below which a warning is given

# --- The data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """The inputs of training beside the model, shared by all runs of a reusable task with the same `name_examples`."""

    # Examples from the task's `load` and `divide`, without "train", whose text may be large
    examples: Mapping[str, Any]
    tokenizer: Any
    data: Mapping[str, Any]  # encoded data set of each split
    settings: Mapping[str, Any]  # values of BertConfig that depend on the data
    # The commit of each data set on the Hub that was read, `datasets/owner/name`
    commits: Mapping[str, str] = field(default_factory=dict)
    # The repeated rows; only in the first of several processes
    checked: CheckedRows = field(default_factory=CheckedRows)
    # Texts of at most FITTED_ROWS training rows, as `choose_rows` chooses them, for the baseline of TF-IDF; only in
    # the first process
    texts: Sequence[tuple[str, ...]] = ()
    # (S,) an integer for each training row, equal for rows of one text or group; only in the first process
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pairs: bool = False  # whether the training rows are pairs of texts

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each split's data."""
        return {split: data.fingerprint() for split, data in self.data.items()}


def prepare(recipe: Recipe, report: Report = ignore, output: Path | None = None, goes_on: bool = False) -> Prepared:
    """Read and encode the data of a recipe.

    Args:
        output: The run directory; if given, its first files are written as soon as the tokenizer exists.
        goes_on: Whether the run there continues from a checkpoint, and therefore with its own tokenizer.
    """
    task, processes = TASKS[recipe.task], join_processes(recipe)
    length, usual = recipe.data.get("max_length"), task.recipe["data"].get("max_length")
    if length != usual and "max_length" not in recipe.given.get("data", {}):
        report(f"max_length is {length}, the model's positions, instead of {usual}")
    READ.clear()
    examples = task.load(recipe.data, report)
    commits, dev = dict(READ), next(iter(task.splits), "")
    examples = set_apart(recipe, examples)
    with processes.main_process_first():  # the others read the first one's vocabulary
        # A vocabulary left by an earlier start may be of other text, unless the run has a checkpoint with it.
        if output is not None and (goes_on or not processes.is_main_process) and holds_run(output, recipe):
            tokenizer = load_tokenizer(str(output))
        else:
            tokenizer = task.tokenize(recipe, examples, report)
        tokenizer.model_max_length = count_positions(recipe)  # plain transformers truncates to it
        if output is not None and processes.is_main_process:
            start_directory(output, recipe, tokenizer)
    rows = tabulate_splits(task, examples) if processes.is_main_process else {}
    checked, texts = check_rows(rows), []
    groups = np.array(rows[TRAIN_SPLIT].groups if TRAIN_SPLIT in rows else [], np.int64)
    if recipe.baseline and TRAIN_SPLIT in rows and "tfidf" in task.baselines:
        texts = list(rows[TRAIN_SPLIT].walk_texts(choose_rows(checked.keys[TRAIN_SPLIT], FITTED_ROWS)))
    if found := checked.summarize():
        report(f"{found}; bertkit doctor lists them")
    data = {}
    for split in ("train", TUNE, *task.splits, *task.unlabelled):
        if split in examples:
            data[split] = task.encode(examples[split], tokenizer, recipe, split, report)
    if task.metric and 0 < (scored := len(data.get(dev, ()))) < FEW_SCORED:
        report(f"warning: {dev} has {pluralize(scored, 'row')}, too few to tell a good model from a bad one; give more")
    settings = task.configure(recipe, tokenizer, examples)
    others = {split: texts for split, texts in examples.items() if split != "train"}
    train = examples.get("train")
    pairs = isinstance(train, TextExamples) and len(train.text) == 2
    return Prepared(others, tokenizer, data, settings, commits, checked, texts, groups, pairs)


def set_apart(recipe: Recipe, examples: dict[str, Any]) -> dict[str, Any]:
    """Return the examples of each split, with the rows that `trial_rows` or `tune_share` sets apart."""
    task = TASKS[recipe.task]
    dev = next(iter(task.splits), "")
    if rows := recipe.data.get("trial_rows"):
        share = min(rows / len(task.tabulate_examples(examples["train"])), MOST_TRIAL_ROWS)
        held, others = divide(task, examples["train"], share, "data.trial_rows of train")
        if isinstance(held, TextExamples) and "weight" in recipe.data:
            held = held.to_scored(recipe.data)
        return {"train": others, dev: held}
    if (share := recipe.data.get("tune_share")) and TUNE not in examples:
        tune, rest = divide(task, examples[dev], share)
        return examples | {TUNE: tune, dev: rest}
    return examples


def choose_rows(keys: np.ndarray, most: int) -> np.ndarray:
    """Return the numbers, in order, of the rows with the smallest keys (S,), which are hashes."""
    return np.sort(np.argsort(keys, kind="stable")[:most])


def name_examples(recipe: Recipe) -> str:
    """Return a name that two recipes share if they read the same examples and make the same tokenizer."""
    facts = [recipe.task, recipe.checkpoint, recipe.baseline, dict(recipe.data), dict(recipe.model)]
    return json.dumps(facts, sort_keys=True)
