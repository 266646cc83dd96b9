"""Train within a limit of time: the recipe is fitted to it, and the run's own recipe says what came out of it."""

from collections.abc import Mapping
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError
from bertkit.system.clock import Clock
from bertkit.system.differences import find_differences, name_differences
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks.task import Task
from bertkit.training.arguments import complete, make_arguments
from bertkit.training.callbacks import Progress
from bertkit.training.cost import Costs
from bertkit.training.pace import TimeLimit
from bertkit.training.plan import find_costs
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, list_decisive, merge, read_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import RECIPE_FILE, has_begun

CLOCK_FILE = ".time_used.json"  # hidden: it is written before the run has begun
MOST_TIMES = 4  # the updates that a faster machine may reach, as a multiple of those expected
CHECKPOINTS = 10  # of a run
LOGS = 100  # of a run
WITHOUT_EPOCHS = {  # a schedule by epochs or updates does not fit a length that is not known
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "save_strategy": "steps",
    "logging_strategy": "steps",
}
FITTED = (*WITHOUT_EPOCHS, "max_steps", "warmup_steps", "save_steps", "logging_steps")  # keys of [train]
LEAST_FITTING = 10


def train_within(
    task: Task,
    *recipes: Mapping[str, Any],
    output: Path,
    clock: Clock,
    report: Report = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Train `task` in the time of the clock, and return its scores; an unfinished run continues with the time left.

    The costs are measured first. The run's recipe is fitted to them, and finally names the updates that were done.

    Raises:
        UsageError: As for `run`, or the time is too short.
        Interrupted: As for `run`.
    """
    given = complete(task, *recipes)
    recipe = read_recipe(output / RECIPE_FILE) if has_begun(output) else None
    if recipe is not None:
        check_same(given, recipe, output)
        if "pace" in recipe:  # it has been trained
            return run(task, recipe, output=output, report=report, progress=progress)
    is_main = join_processes(given).is_main_process
    with clock.keep(output / CLOCK_FILE) if is_main else nullcontext():
        report("measuring some updates")
        limit, updates = plan_time(task, given, output, clock)
        recipe = recipe or fit(task, given, updates)
        return run(task, recipe, output=output, report=report, progress=progress, limit=limit)


def plan_time(task: Task, recipe: Recipe, output: Path, clock: Clock) -> tuple[TimeLimit, int]:
    """Measure a recipe's costs, and return the limit of its training and the updates that fit into the time.

    Raises:
        UsageError: The costs cannot be measured, or fewer than LEAST_FITTING updates fit.
    """
    costs = find_costs(task, recipe, output)
    if isinstance(costs, str):
        raise UsageError(costs)
    processes = make_arguments(task, recipe, output).world_size
    shares = [phase["share"] for phase in recipe.get("phase", [])] or [1.0]
    seconds = [recipe["batch_size"] * part.seconds / processes + part.fixed for part in costs.parts]
    mean = sum(share * each for share, each in zip(shares, seconds, strict=True))
    split = next(iter(task.splits))
    end = TimeLimit(clock, {0: mean}, measure_rows(costs, split)).reserve(costs.rows[split])
    updates = int((clock.left - end) / mean)
    if updates < LEAST_FITTING:
        least = clock.used + end + LEAST_FITTING * mean
        raise UsageError(
            f"the time allows {max(updates, 0)} updates of {mean:.1f} s beside evaluation and saving; give --budget at "
            f"least {ceil(least)}s"
        )
    firsts = [round(updates * sum(shares[:number])) for number in range(len(shares))]
    return TimeLimit(clock, dict(zip(firsts, seconds, strict=True)), measure_rows(costs, split)), updates


def measure_rows(costs: Costs, split: str) -> float:
    """Return the seconds in which a sequence of a split is predicted."""
    return costs.evaluation[split] / costs.rows[split]


def fit(task: Task, recipe: Recipe, updates: int) -> Recipe:
    """Return a recipe for a training by the clock, of about `updates` updates and at most MOST_TIMES as many."""
    train = recipe["train"]
    total = train["max_steps"] if train.get("max_steps", -1) > 0 else updates
    warmup = train.get("warmup_steps", 0)
    fitted = WITHOUT_EPOCHS | {
        "max_steps": updates,
        "warmup_steps": warmup if warmup < 1 else min(warmup / total, 0.99),
        "save_steps": ceil(updates / CHECKPOINTS),
        "logging_steps": ceil(updates / LOGS),
    }
    return task.set_updates(merge(recipe, {"patience": 0, "train": fitted}), MOST_TIMES * updates)


def check_same(given: Recipe, fitted: Recipe, output: Path) -> None:
    """Check that the run in a directory is that of a recipe, apart from what was fitted to the time.

    Raises:
        UsageError: It is another run.
    """
    parts = []
    for recipe in (given, fitted):
        kept = {key: value for key, value in list_decisive(recipe).items() if key not in ("pace", "phase", "patience")}
        kept["train"] = {key: value for key, value in kept["train"].items() if key not in FITTED}
        parts.append(kept | {"lengths": [phase["max_length"] for phase in recipe.get("phase", [])]})
    if differences := find_differences(*parts[::-1]):
        raise UsageError(
            f"{output} belongs to another run ({name_differences(differences)}); name another directory with --output"
        )


def describe_time(task: Task, recipe: Recipe, output: Path, clock: Clock) -> list[str]:
    """Return in lines what the time allows.

    Raises:
        UsageError: As for `plan_time`.
    """
    limit, updates = plan_time(task, recipe, output, clock)
    seconds = sum(limit.update_seconds.values()) / len(limit.update_seconds)
    return [
        f"{describe_duration(clock.limit)} allow about {updates:,} updates of {recipe['batch_size']} sequences "
        f"({seconds:.2g} s each), evaluation and saving included"
    ]
