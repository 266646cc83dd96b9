"""Score a trained model: predictions and scores of every split, with what the first of them decides.

Left out: what is done with them (`bertkit.training.run`, `bertkit.training.outputs`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit.data.splits import name_split
from bertkit.errors import pluralize
from bertkit.metrics.calibration import compute_probabilities, measure_calibration, scale_logits
from bertkit.metrics.intervals import BOOTSTRAP_SAMPLES, Interval, estimate_interval, limit_samples
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.metrics.table import LABEL, read_decided
from bertkit.reports.tables import WITHOUT_LEAKS, name_limits
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import TUNE, Task
from bertkit.training.calibration import Conformity, calibrate, take_classes
from bertkit.training.predictions import GROUP, format_table, join_rows
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe

JUDGED = (LABEL, "em", "f1", "best_em", "best_f1", "none_em", "none_f1")  # columns that need right answers


@dataclass
class Evaluation:
    """The scores of a model."""

    metrics: dict[str, Any] = field(default_factory=dict)  # the scores of all splits, as in metrics.json
    files: dict[str, str | bytes] = field(default_factory=dict)  # the predictions: name -> content
    tuned: dict[str, float] | None = None  # the scores of the tune split; None without one
    decided: dict[str, Any] | None = None  # values of BertConfig that the first split has decided; None before it
    temperature: float | None = None  # that of the first split; None without `calibrate`
    # The conformity scores of the first split; None if the model is not a classifier
    conformity: Conformity | None = None
    rows: pa.Table | None = None  # the prediction table of the first of the task's splits; None before it


def score_splits(
    task: Task, recipe: Recipe, predict: Callable[[Any], np.ndarray], prepared: Prepared, report: Report
) -> Evaluation:
    """Return the scores and predictions of every split there is; the first one decides for those after it.

    Args:
        predict: Returns the summaries of a data set.
    """
    found = Evaluation()
    there = [split for split in (TUNE, *task.splits, *task.unlabelled) if prepared.data.get(split) is not None]
    if there:
        report("predicting " + ", ".join(f"{split} ({len(prepared.data[split]):,} sequences)" for split in there))
    for split in there:
        data = prepared.data[split]
        given = predict(data)
        if is_first := found.decided is None:
            found.temperature, found.conformity = calibrate(task, recipe, given, data, split)
        answers = task.decode(scale_logits(given, found.temperature), data, found.decided)
        if is_first and (target := recipe.data.get("target_accuracy")):
            groups = task.tabulate_examples(prepared.examples[split]).groups
            answers = answers.abstain(target, groups)
            found.metrics |= answers.abstention
        rows = answers.rows
        if split == TUNE:
            found.tuned = take_values(task.score(rows))
            found.metrics["tune_score"] = found.tuned[task.metric]
        if is_first:
            found.decided = dict(read_decided(rows))
            if found.temperature is not None:
                found.decided["temperature"] = found.temperature
        if split == TUNE:
            continue
        found.files |= task.format_predictions(answers, data, split)
        examples = task.tabulate_examples(prepared.examples[split])
        rows = join_rows(rows, examples, prepared.tokenizer, task=task.name, split=split)
        if pattern := task.splits.get(split):
            found.rows = rows if split == next(iter(task.splits)) else found.rows
            found.metrics |= score_rows(task, rows, pattern, prepared.checked.list_leaks(split), report)
            if found.temperature is not None:
                classes = take_classes(task, data)
                scores = take_values(measure_calibration(compute_probabilities(given, classes.ndim == 2), classes))
                found.metrics |= {f"uncalibrated_{pattern.format(name)}": value for name, value in scores.items()}
        else:
            rows = rows.drop_columns([name for name in JUDGED if name in rows.column_names])
        found.files |= format_table(rows, name_split(split))
    return found


def score_rows(
    task: Task, rows: pa.Table, pattern: str, leaks: np.ndarray, report: Report = ignore
) -> dict[str, float]:
    """Return the scores of a split with labels, their limits, and those without leaked rows, by their numbers."""
    measured = {pattern.format(name): score for name, score in task.score(rows).items()}
    scores = {name: score for name, score in measured.items() if isinstance(score, WeightedScore)}
    if slow := [name for name, score in scores.items() if limit_samples(score) < BOOTSTRAP_SAMPLES]:
        names, size = ", ".join(slow), f"{pluralize(len(rows), 'row')} and this number of labels"
        report(f"fewer than {BOOTSTRAP_SAMPLES:,} samples, or no interval, for {names}: {size} would take too long")
    found = add_limits(measured, rows.column(GROUP).to_numpy() if GROUP in rows.column_names else None)
    if len(leaks):
        weights = np.ones((1, len(rows)))
        weights[0, leaks] = 0
        found |= {f"{name}{WITHOUT_LEAKS}": float(score.score(weights)[0]) for name, score in scores.items()}
    return found


def add_limits(
    measured: Mapping[str, WeightedScore | float], groups: Sequence[Hashable] | None = None
) -> dict[str, float]:
    """Return the values of scores, each followed by the limits of its 95 % interval if it has one.

    The score of a label may have the name of another one's limit (`f1_risk_low`); it is kept.

    Args:
        groups: (S,) the group of each row; None: each row is one.
    """
    intervals: dict[int, Interval | None] = {}
    values, found = take_values(measured), {}
    for name, score in measured.items():
        found[name] = values[name]
        if isinstance(score, WeightedScore):
            if id(score) not in intervals:  # some scores have several names
                intervals[id(score)] = estimate_interval(score, groups)
            found |= zip(name_limits(name), intervals[id(score)] or (), strict=False)
    return found | values
