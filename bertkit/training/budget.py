"""Train within a limit of time (`--budget`).

Measured costs decide `max_steps`, so that the training on its ordinary schedule, its evaluations and its end fit into
the time. The recipe in the run's directory has this number, and repeats the run without a clock.

The faster of several timings counts. A timing while other work runs is too slow, and one that is ten times too slow
left two thirds of the time unused and a model that had learned nothing. A timing that is too fast costs less: the
deadline ends the training, which then lacks only the last part of its falling rate.
"""

from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from bertkit.errors import UsageError
from bertkit.system.files import write_json
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.pretraining import list_phases
from bertkit.training.baselines import fit_baselines
from bertkit.training.callbacks import Deadline, Progress
from bertkit.training.clock import Clock
from bertkit.training.costs import Costs, estimate, measure
from bertkit.training.facts import describe_rows
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import Recipe, list_settled, load_recipe, resolve
from bertkit.training.run import run
from bertkit.training.run_dir import RECIPE_FILE, has_begun, read_record

CLOCK_FILE, MEASURED_FILE = ".time_used.json", ".measured.json"  # hidden: written before the run has begun
PROBE_SHARE = 0.05  # share of a budget for timed updates
SPARE_SHARE = 0.05  # share of the time for training, kept for a slower machine
LEAST_UPDATES = 20  # updates in a training, unless all epochs have fewer
LEAST_SOLVED, LEAST_SHARE = 60, 0.5  # least updates, or least share of its length, of a training from a solved head


class TooShort(UsageError):
    """The time is too short for a training."""


def fit(recipe: Recipe, measured: Costs, clock: Clock, output: Path) -> Recipe:
    """Return a recipe with the number of updates that fits; its length is exceeded only if it has no epochs.

    Raises:
        TooShort: Too few updates fit for a training to be worth it.
    """
    planned = estimate(recipe, measured, output)[0]
    each = measured.seconds_per_update * recipe.batch_size / measured.batch_size
    left = (1 - SPARE_SHARE) * take_first(clock.left - measured.longest_end - 2 * measured.saving)
    updates = planned if "num_train_epochs" in recipe.train else max(int(left / each), 0)
    least = min(LEAST_UPDATES, planned)
    if recipe.starts_solved:
        least = min(LEAST_SOLVED, ceil(LEAST_SHARE * planned))
    while updates >= least:
        fitted = resolve(recipe, limit_updates(recipe, updates, planned))
        if (needed := sum(estimate(fitted, measured, output)[1:])) <= left:
            return fitted
        updates = max(int(updates * left / needed), 0)
    minutes = ceil((clock.limit - left + 2 * least * each) / 60) + 1
    allowed = f"the time allows {updates} updates of {each:.2g} s beside evaluation and saving"
    raise TooShort(f"{allowed}; give --budget {minutes}m or more")


def measure_again(recipe: Recipe, prepared: Prepared, clock: Clock, output: Path) -> Costs:
    """Measure the costs of a recipe; the faster of this and an earlier measurement counts, and is kept for the next."""
    path = output / MEASURED_FILE
    earlier = [read_record(path, Costs)] if path.exists() else []
    measured = measure(recipe, prepared, PROBE_SHARE * clock.left)
    measured = min([measured, *earlier], key=lambda each: each.seconds_per_update / each.batch_size)
    factor = recipe.batch_size / measured.batch_size  # the search before may have measured another size
    parts = [(end, factor * seconds) for end, seconds in measured.parts]
    measured = msgspec.structs.replace(measured, batch_size=recipe.batch_size, parts=parts)
    if join_processes(recipe).is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        write_json(msgspec.to_builtins(measured), path)
    return measured


def limit_updates(recipe: Recipe, updates: int, planned: int) -> dict[str, Any]:
    """Return what follows from a number of updates that only a timing tells.

    A warm-up keeps its share. For a task without epochs, a fifth of the updates lies between two evaluations and
    between two checkpoints, and a hundredth between two lines of the log, unless a person gave fewer.

    Args:
        planned: The updates of the recipe itself.
    """
    facts: dict[str, Any] = {"max_steps": updates}
    if (warmup := recipe.train.get("warmup_steps", 0)) >= 1:
        facts["warmup_steps"] = min(warmup / planned, 0.99)
    if "num_train_epochs" not in recipe.train:
        given, fifth = recipe.given.get("train", {}), ceil(updates / 5)
        between = {"eval_steps": fifth, "save_steps": fifth, "logging_steps": ceil(updates / 100)}
        facts |= {key: steps for key, steps in between.items() if given.get(key, updates) >= updates}
    return facts


def leave_out_evaluations(recipe: Recipe) -> dict[str, Any]:
    """Return that a fine-tuning has no evaluations during the training, where they decide nothing."""
    is_needed = recipe.patience or any(map(recipe.train.get, ("load_best_model_at_end", "eval_on_start")))
    is_needed = is_needed or "eval_strategy" in recipe.given.get("train", {})
    return {} if is_needed or "num_train_epochs" not in recipe.train else {"eval_strategy": "no"}


def train_within(
    recipe: Recipe,
    *,
    output: Path,
    clock: Clock,
    report: Report = ignore,
    progress: Progress = ignore,
    prepared: Prepared | None = None,
) -> dict[str, Any]:
    """Train by a recipe in the time of the clock, as `run`; an unfinished run continues in the rest.

    Where the head is solved before the training and the time is too short for one, the solved head is the result.
    """
    news = {"output": output, "report": report, "progress": progress}
    if recipe.is_solved:  # as long as the encoder takes for all rows, whatever the clock
        return run(recipe, prepared=prepared, **news)
    path = output / MEASURED_FILE
    if has_begun(output):
        if not path.exists():
            raise UsageError(f"{output} has a run without --budget; name another directory with --output")
        begun, measured, prepared = load_recipe(output / RECIPE_FILE), read_record(path, Costs), None
        recipe = resolve(recipe, list_settled(begun))
        recipe = resolve(recipe, leave_out_evaluations(recipe))
        if begun.is_solved:
            return run(resolve(recipe, {"freeze": "encoder"}), **news)
        planned, _, _ = estimate(recipe, measured, output)
        facts = limit_updates(recipe, begun.train["max_steps"], planned)
        fitted = resolve(recipe, facts | {"stop_after": begun.stop_after})
    else:
        prepared = prepared or prepare(recipe, report)
        recipe = resolve(recipe, describe_rows(recipe, len(prepared.data["train"]), report, prepared.pairs))
        recipe = resolve(recipe, leave_out_evaluations(recipe))
        if join_processes(recipe).is_main_process:
            fit_baselines(TASKS[recipe.task], recipe, prepared, ignore)  # the cache keeps them for the run
        report("measuring some updates")
        measured = measure_again(recipe, prepared, clock, output)
        try:
            fitted = fit(recipe, measured, clock, output)
        except TooShort as reason:
            if not recipe.starts_solved:
                raise
            report(f"nothing is trained and the solved head is the result: {reason}")
            return run(resolve(recipe, {"freeze": "encoder"}), prepared=prepared, **news)
        if hasattr(prepared.data["train"], "phases"):  # the samples of a pretraining follow its length
            prepared.data["train"].phases = list_phases(fitted)
    stop = Deadline(clock, measured, fitted.stop_after)
    return run(fitted, prepared=prepared, stop=stop, **news)
