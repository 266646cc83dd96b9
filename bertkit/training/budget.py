"""Train within a limit of time (`--budget`).

Measured costs decide `max_steps`, so that the training on its ordinary schedule, its evaluations and its end fit into
the time. The recipe in the run's directory has this number, and repeats the run without a clock. A deadline ends the
training earlier if the machine becomes slower.
"""

from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from bertkit.errors import UsageError
from bertkit.system.differences import refuse_other
from bertkit.system.files import write_json
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import list_phases
from bertkit.training.baselines import fit_baselines
from bertkit.training.callbacks import Deadline, Progress
from bertkit.training.clock import Clock
from bertkit.training.costs import Measured, expect, measure
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.preset import settle
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import Recipe, list_decisive, load_recipe, resolve
from bertkit.training.run import run
from bertkit.training.run_dir import RECIPE_FILE, has_begun, read_record

CLOCK_FILE, MEASURED_FILE = ".time_used.json", ".measured.json"  # hidden: written before the run has begun
PROBE_SHARE = 0.05  # share of a budget for timed updates
SPARE_SHARE = 0.05  # of the time for training, for a slower machine
LEAST_UPDATES = 20  # updates in a training, unless all epochs have fewer


class TooShort(UsageError):
    """The time is too short for a training."""


def fit(recipe: Recipe, measured: Measured, clock: Clock, output: Path) -> Recipe:
    """Return a recipe with the number of updates that fits; its length is exceeded only if it has no epochs.

    Raises:
        TooShort: LEAST_UPDATES updates do not fit.
    """
    planned, each = expect(recipe, measured, output)[0], measured.update * recipe.batch_size / measured.batch_size
    left = (1 - SPARE_SHARE) * take_first(clock.left - measured.longest_end - 2 * measured.saving)
    updates = planned if "num_train_epochs" in recipe.train else max(int(left / each), 0)
    while updates >= (least := min(LEAST_UPDATES, planned)):
        fitted = resolve(recipe, updates, planned)
        if (needed := sum(expect(fitted, measured, output)[1:])) <= left:
            return fitted
        updates = max(int(updates * left / needed), 0)
    minutes = ceil((clock.limit - left + 2 * least * each) / 60) + 1
    allowed = f"the time allows {updates} updates of {each:.2g} s beside evaluation and saving"
    raise TooShort(f"{allowed}; give --budget {minutes}m or more")


def leave_out_evaluations(recipe: Recipe) -> Recipe:
    """Return a recipe for fine-tuning without evaluations during the training, where they decide nothing."""
    is_needed = recipe.patience or any(map(recipe.train.get, ("load_best_model_at_end", "eval_on_start")))
    if is_needed or "num_train_epochs" not in recipe.train or "eval_strategy" in recipe.given.get("train", {}):
        return recipe
    return recipe.override(train={"eval_strategy": "no"})


def train_within(
    recipe: Recipe,
    *,
    output: Path,
    clock: Clock,
    report: Report = ignore,
    progress: Progress = ignore,
    prepared: Prepared | None = None,
) -> dict[str, Any]:
    """Train by a recipe in the time of the clock, as `run`; an unfinished run continues in the rest."""
    if recipe.is_solved:  # as long as the encoder takes for all rows, whatever the clock
        return run(recipe, output=output, report=report, progress=progress, prepared=prepared)
    path, is_main = output / MEASURED_FILE, join_processes(recipe).is_main_process
    if has_begun(output):
        if not path.exists():
            raise UsageError(f"{output} has a run without --budget; name another directory with --output")
        fitted, measured, prepared = load_recipe(output / RECIPE_FILE), read_record(path, Measured), None
        recipe = leave_out_evaluations(recipe.adopt(fitted))
        again = resolve(recipe, fitted.train["max_steps"], expect(recipe, measured, output)[0])
        both = (list_decisive(each.override(stop_after=0).to_dict()) for each in (fitted, again))
        refuse_other(f"{output} belongs to another run", *both)
    else:
        prepared = prepared or prepare(recipe, report)
        recipe = leave_out_evaluations(settle(recipe, len(prepared.data["train"]), report))
        if is_main:
            fit_baselines(TASKS[recipe.task], recipe, prepared, ignore)  # the cache keeps them for the run
        report("measuring some updates")
        measured = measure(recipe, prepared, PROBE_SHARE * clock.left)
        fitted = fit(recipe, measured, clock, output)
        if hasattr(prepared.data["train"], "phases"):  # the samples of a pretraining follow its length
            prepared.data["train"].phases = list_phases(fitted)
        if is_main:
            output.mkdir(parents=True, exist_ok=True)
            write_json(msgspec.to_builtins(measured), path)
    stop = Deadline(clock, measured, fitted.stop_after)
    return run(fitted, output=output, report=report, progress=progress, prepared=prepared, stop=stop)
