"""What is learned: the contract that every task fulfils and that `bertkit.training.run` works with.

A Task is a frozen value made of plain functions; there is no class to inherit from. It binds data, head, score and the
paper's hyper-parameters, and never builds a Trainer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from torch import Tensor

from bertkit.reports.tables import ScoreRow
from bertkit.system.progress import Report

LONGEST_SHOWN = 80  # characters of a text among the examples


def repeat_run(output: Path, ending: str, *settings: str) -> str:
    """The options that do a run again with these settings changed, in a directory beside its own with this ending."""
    given = "".join(f" --set {quote(setting)}" for setting in settings)
    return f"--recipe {quote(f'{output}/recipe.toml')}{given} --output {quote(f'{output}-{ending}')}"


def use_transformers(program: str) -> str:
    """The command that runs a line of Python in which plain transformers loads what a run has made."""
    return f"python -c {quote(program)}  # plain transformers loads it"


def accept_nothing(*_: Any) -> dict:
    """An empty dictionary: what an optional function of a Task gives when there is nothing to say."""
    return {}


@dataclass(frozen=True)
class Task:
    """One task of the paper.

    name: as in `recipe.task` and on the command line.
    recipe: the paper's recipe, complete; its `[data]` table lists every option of the task with its default.
    stable: what `preset = "stable"` changes in it.
    metric: the key in `score`'s answer that the paper reports; metrics.json repeats it as `score`. Empty for data
        without labels, which are only predicted.
    check: (recipe) -> nothing. Raises UsageError for options that make no sense, before anything is read.
    overrides: (what is given of a recipe) -> what this changes in the task's own: other options may need another rate.
    pretrain_on: (recipe) -> the recipe of a training that comes before this one, which then starts from its model;
        empty if there is none.
    head: `[data]` options -> the name of a head class in `bertkit.model`.
    load: (`[data]` options, report) -> split name -> examples: "train" (a task without it is only predicted), the first
        of `splits`, and what there is of the others and of `unlabelled`. Raises UsageError for wrong files.
    tokenize: (recipe, examples by split, report) -> the tokenizer.
    configure: (recipe, tokenizer, examples by split) -> values for BertConfig beside those of `[model]`, labels for
        example; tokenizer and examples are None in a dry run.
    encode: (examples of a split, tokenizer, recipe, split) -> a map-style data set whose columns are arguments of the
        head's `forward`; its `fingerprint()` is a text that tells it from other data.
    describe: (the data set of a split, split) -> lines about what became of the examples.
    collate: a list of the data set's items (or what its `__getitems__` gives) -> a batch of tensors.
    summarize: (the head's outputs, batch) -> (B, ...) what `score` needs of each sequence.
    score: (summaries (S, ...) of a split in order, its data set) -> named scores.
    tuned_config: (metrics) -> values for BertConfig that the evaluation decides.
    baseline: (training data set, evaluation data set) -> named scores of knowing nothing.
    table: the scores to show at the end.
    examples: (model, tokenizer, examples by split) -> some predictions to look at, one line each.
    diagnose: (metrics) -> lines to print below the table.
    suggest: (run directory, its recipe) -> commands to try next, as a shell takes them.
    starter: (what the command line gave) -> the recipe where nobody names one, small enough for a laptop.
    splits: evaluated at the end, the first one also during training; split name -> how its scores are called, "{}"
        standing for a score's name.
    unlabelled: splits that are predicted at the end.
    predict: (summaries, data set, split) -> name of a file below `predictions/` -> its text; for `splits` and
        `unlabelled`.
    title: what its data are called.
    copies: split -> data set, configuration and split of its copy on the Hub.
    command: what runs it, after `bertkit`; the task's name if empty.
    folder: of the task's data below the root that a study is given.
    pairs: whether an input is a pair of texts; None where that is not for the task to say.
    reusable: whether encoded data serve every run with the same `[data]`, `[model]` and checkpoint.
    evaluation_options: arguments for the head's `forward` in evaluation.
    lower_is_better: whether a smaller `metric` is better.
    """

    name: str
    recipe: Mapping[str, Any]
    metric: str
    check: Callable[[Mapping[str, Any]], None]
    head: Callable[[Mapping[str, Any]], str]
    load: Callable[[Mapping[str, Any], Report], dict[str, Any]]
    tokenize: Callable[[Mapping[str, Any], Mapping[str, Any], Report], Any]
    configure: Callable[[Mapping[str, Any], Any, Mapping[str, Any]], dict[str, Any]]
    encode: Callable[[Any, Any, Mapping[str, Any], str], Any]
    collate: Callable[[Any], dict[str, Tensor]]
    summarize: Callable[[Any, Mapping[str, Tensor]], Tensor]
    score: Callable[[np.ndarray, Any], dict[str, float]]
    overrides: Callable[[Mapping[str, Any]], Mapping[str, Any]] = accept_nothing
    pretrain_on: Callable[[Mapping[str, Any]], dict[str, Any]] = accept_nothing
    describe: Callable[[Any, str], list[str]] = lambda data, split: []
    tuned_config: Callable[[Mapping[str, Any]], dict[str, Any]] = accept_nothing
    baseline: Callable[[Any, Any], dict[str, float]] = accept_nothing
    table: tuple[ScoreRow, ...] = ()
    examples: Callable[[Any, Any, Mapping[str, Any]], list[str]] | None = None
    diagnose: Callable[[Mapping[str, Any]], list[str]] = lambda metrics: []
    suggest: Callable[[Path, Mapping[str, Any]], list[str]] = lambda output, recipe: []
    starter: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"dev": "{}"})
    unlabelled: tuple[str, ...] = ()
    predict: Callable[[np.ndarray, Any, str], dict[str, str]] = accept_nothing
    title: str = "held-out text"
    copies: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    command: str = ""
    folder: str = ""
    pairs: bool | None = None
    reusable: bool = True
    stable: Mapping[str, Any] = field(default_factory=dict)
    evaluation_options: Mapping[str, Any] = field(default_factory=dict)
    lower_is_better: bool = False

    def find_row(self, key: str) -> ScoreRow:
        """The line of the table with this score."""
        return next((row for row in self.table if row.key == key), ScoreRow(key, key))

    def list_rows(self, metrics: Mapping[str, Any]) -> list[ScoreRow]:
        """The lines of the table that there are scores for, the paper's metric among them, with known baselines."""
        rows = {row.key: row for row in self.table}
        if self.metric:
            rows.setdefault(self.metric, self.find_row(self.metric))
        return [
            replace(row, baselines={words: known for words, known in row.baselines.items() if known in metrics})
            for key, row in rows.items()
            if key in metrics
        ]
