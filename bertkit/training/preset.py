"""Decide rate, epochs and optimizer from the training rows and the size of the model (`preset = "auto"`).

The paper's few epochs at a low rate are for thousands of rows. On fewer rows fine-tuning fails mostly because it is too
short and Adam's bias is not corrected (Mosbach et al. 2021, Zhang et al. 2021): a training therefore has at least
ENOUGH_UPDATES updates, in at least LEAST_EPOCHS epochs (the middle of A.3's range) and at most MOST_EPOCHS (20 in
Mosbach et al.). The rate is inversely proportional to the hidden size: 4e-5 for BERT-base, inside A.3's range, and
higher for smaller models, as in Turc et al. 2019. There is no early stop: the rate falls to zero over all updates.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from bertkit.model.checkpoint import load_config
from bertkit.system.progress import Report, ignore
from bertkit.tasks.finetuning import ENOUGH_UPDATES
from bertkit.training.recipe import Recipe

LEAST_EPOCHS, MOST_EPOCHS = 3, 20
RATE_TIMES_HIDDEN = 0.03
COMPARED = 0.2  # share of the log whose losses are compared with as many before
LEAST_LOSS = 0.25  # of the loss at the start: below it the rows are learned


def settle(recipe: Recipe, rows: int, report: Report = ignore) -> Recipe:
    """Return a recipe with the values that its preset leaves to the data; another preset leaves none.

    Args:
        rows: The number of training sequences.
    """
    if recipe.preset != "auto" or recipe.is_solved:
        return recipe
    hidden, epochs = load_config(recipe.checkpoint).hidden_size, ceil(ENOUGH_UPDATES * recipe.batch_size / rows)
    measured_in_updates = recipe.train.get("max_steps", -1) > 0
    found = {
        "optim": "adamw_torch",  # corrects the bias
        "learning_rate": float(f"{RATE_TIMES_HIDDEN / hidden:.2g}"),
        "num_train_epochs": float(min(max(epochs, LEAST_EPOCHS), MOST_EPOCHS)),
    }
    if measured_in_updates:
        del found["num_train_epochs"]
    if left := {key: value for key, value in found.items() if key not in recipe.train}:
        words = ", ".join(f"{key} {value}" for key, value in left.items())
        report(f"preset auto, for {rows:,} training sequences and a hidden size of {hidden}: {words}")
    return recipe.override(train=left, settled=[*recipe.settled, *left])


def is_learned(log: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the training loss at the end was a small part of that at the start."""
    losses = [entry["loss"] for entry in log if "loss" in entry]
    part = int(COMPARED * len(losses))
    return part >= 2 and bool(np.mean(losses[-part:]) < LEAST_LOSS * np.mean(losses[:part]))


def is_falling(log: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the training loss was still falling at the end, by Welch's test at 1 %."""
    from scipy.stats import ttest_ind  # takes a second

    losses = [entry["loss"] for entry in log if "loss" in entry]
    part = int(COMPARED * len(losses))
    if part < 2 or is_learned(log):
        return False
    before, last = losses[-2 * part : -part], losses[-part:]
    return bool(ttest_ind(before, last, alternative="greater", equal_var=False).pvalue < 0.01)
