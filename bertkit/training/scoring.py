"""Score a trained model: predictions and scores of every split, with what the first of them decides.

Left out: what is done with them (`bertkit.training.run`, `bertkit.training.outputs`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bertkit.metrics.calibration import temper
from bertkit.metrics.intervals import Interval, find_interval
from bertkit.metrics.rows import RowScore
from bertkit.reports.tables import WITHOUT_LEAKS, name_limits
from bertkit.system.progress import Report
from bertkit.tasks.task import TUNE, Task
from bertkit.training.calibration import Calibration, calibrate
from bertkit.training.pace import OutOfTime
from bertkit.training.prepare import Prepared
from bertkit.training.recipe import Recipe
from bertkit.training.scored_rows import ROWS, measure_split, pack_rows


@dataclass
class Evaluation:
    """The scores of a model.

    Attributes:
        metrics: The scores of all splits, as in metrics.json.
        files: The predictions: name -> content.
        tuned: The scores of the tune split; None without one.
        decided: Values of BertConfig that the first split has decided; None before it.
        calibration: That of the first split; None before it.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str | bytes] = field(default_factory=dict)
    tuned: dict[str, float] | None = None
    decided: dict[str, Any] | None = None
    calibration: Calibration | None = None


def score_splits(
    task: Task, recipe: Recipe, predict: Callable[[Any], np.ndarray], prepared: Prepared, report: Report
) -> Evaluation:
    """Return the scores and predictions of every split there is; the first one decides for those after it.

    Args:
        predict: Returns the summaries of a data set; it may raise OutOfTime, and then the split is left out.
    """
    found = Evaluation()
    for split in (TUNE, *task.splits, *task.unlabelled):
        if (data := prepared.data.get(split)) is None:
            continue
        report(f"predicting {split}, {len(data):,} sequences")
        try:
            given = predict(data)
        except OutOfTime:
            report(f"the time is over: {split} is left out; bertkit predict makes its predictions")
            continue
        found.calibration = found.calibration or calibrate(task, recipe, given, data, split)
        summaries = temper(given, found.calibration.temperature)
        if split == TUNE:
            found.tuned = task.score(summaries, data)
            found.decided = task.tuned_config(found.tuned, data) | found.calibration.config
            found.metrics["tune_score"] = found.tuned[task.metric]
            continue
        decided = found.decided or found.calibration.config
        found.files |= task.format_predictions(summaries, data, split, decided)
        if pattern := task.splits.get(split):
            found.metrics |= score_split(task, found, summaries, prepared, split)
            found.metrics |= found.calibration.score_before(given, task.find_classes(data), pattern)
    return found


def score_split(
    task: Task, found: Evaluation, summaries: np.ndarray, prepared: Prepared, split: str
) -> dict[str, float]:
    """Return the scores of a split with labels, their limits, and those without leaked rows; keep its rows."""
    data, decided, pattern = prepared.data[split], found.decided, task.splits[split]
    scores, measured = task.score(summaries, data, decided), task.measure_rows(summaries, data, decided)
    if (score := measured.get(task.metric)) is not None:
        rows = measure_split(task, score, summaries, data, prepared.examples[split], prepared.tokenizer, decided)
        found.files[f"{split}{ROWS}"] = pack_rows(rows)
    found.decided = decided or task.tuned_config(scores, data) | found.calibration.config
    without = {}
    if len(leaks := prepared.checked.find_leaks(split)):
        without = task.score_without(leaks, summaries, data, found.decided)
    named = ({pattern.format(key): value for key, value in part.items()} for part in (scores, measured))
    return add_limits(*named) | {f"{pattern.format(key)}{WITHOUT_LEAKS}": value for key, value in without.items()}


def add_limits(scores: Mapping[str, float], measured: Mapping[str, RowScore]) -> dict[str, float]:
    """Return the scores, each followed by the limits of its 95 % interval if it is measured.

    The score of a label may have the name of another one's limit (`f1_risk_low`); it is kept.
    """
    intervals: dict[int, Interval | None] = {}
    found: dict[str, float] = {}
    for key, value in scores.items():
        found[key] = value
        if (score := measured.get(key)) is not None:
            if id(score) not in intervals:  # some scores have several names
                intervals[id(score)] = find_interval(score)
            found |= zip(name_limits(key), intervals[id(score)] or (), strict=False)
    return found | scores
