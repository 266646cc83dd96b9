"""The calibration of a run's classifier on the rows that decide, and its file `calibration.json` for label sets."""

from typing import Any

import msgspec
import numpy as np

from bertkit.errors import UsageError
from bertkit.metrics.calibration import choose_temperature, scale_logits, score_conformity
from bertkit.system.hub import find_file
from bertkit.tasks.task import Task, check_finite
from bertkit.tasks.text import TextSequences
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import CALIBRATION_FILE, read_record

STEP = 1e-6  # to which conformity scores are rounded up, so that label sets never become smaller


class Conformity(msgspec.Struct):
    """The content of CALIBRATION_FILE."""

    split: str  # the split that has decided
    scores: list[float]  # the conformity scores of its rows, sorted


def calibrate(
    task: Task, recipe: Recipe, logits: np.ndarray, data: Any, split: str
) -> tuple[float | None, Conformity | None]:
    """Return the temperature and the conformity scores on the rows that decide.

    Both are None if the task does not predict classes; the temperature also without `calibrate`.
    """
    if (classes := take_classes(task, data)) is None:
        return None, None
    temperature = choose_temperature(check_finite(logits), classes) if recipe.calibrate else None
    scores = score_conformity(scale_logits(check_finite(logits), temperature), classes)
    return temperature, Conformity(split, np.round(np.ceil(scores / STEP) * STEP, 6).tolist())


def take_classes(task: Task, data: Any) -> np.ndarray | None:
    """Return the correct classes (S,), or (S, L) 0 or 1 for each of several labels; None without."""
    if not task.is_classifier or (data.labels.ndim == 1 and data.labels.dtype.kind == "f"):
        return None
    if isinstance(data, TextSequences) and data.space.is_soft:  # the right ones are unknown
        return None
    return data.labels


def load_conformity(run: str) -> Conformity:
    """Load the conformity scores of a run, an export, or a model on the Hub."""
    path = find_file(run, CALIBRATION_FILE)
    if path is None:
        raise UsageError(
            f"{run} has no {CALIBRATION_FILE}, which label sets need; bertkit writes it for the last model of a "
            "classifier (not for best/, numbers, answers and names): train it again, or leave out the coverage"
        )
    return read_record(path, Conformity, "restore it, or train again")
