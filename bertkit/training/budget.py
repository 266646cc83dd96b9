"""Train within a limit of time: the recipe is fitted to it, and the run's own recipe records the result."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import msgspec

from bertkit.errors import UsageError, explain_damage
from bertkit.system.clock import Clock, parse_duration
from bertkit.system.differences import refuse_other
from bertkit.system.files import write_json
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.training.arguments import make_arguments
from bertkit.training.callbacks import Progress
from bertkit.training.cost import Costs
from bertkit.training.pace import LEAST_FITTING, TimeLimit, TooShort
from bertkit.training.plan import find_costs
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import Recipe, list_decisive, load_recipe, resolve
from bertkit.training.run import run
from bertkit.training.run_dir import RECIPE_FILE, has_begun

CLOCK_FILE = ".time_used.json"  # hidden: they are written before the run has begun
COST_FILE = ".measured_costs.json"
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
COUNTING = ("warmup_stable_decay", "inverse_sqrt")  # schedules with parts that are counted in updates


class MeasuredCosts(msgspec.Struct, frozen=True):
    """The measured seconds of a training, as in TimeLimit."""

    update_seconds: dict[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0, le=1e9)]]
    row_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def set_clock(budget: str, given: Mapping[str, Any], begun: float | None = None) -> Clock:
    """Return the clock of a budget, such as 20m.

    Args:
        given: The recipe that a person has given.
        begun: As for `Clock`.

    Raises:
        UsageError: The budget is not a duration, or updates are given too.
    """
    clock = Clock(parse_duration(budget), begun)
    if "max_steps" in given.get("train", {}):
        raise UsageError("--budget decides the number of updates; leave out train.max_steps (or --steps)")
    return clock


def train_within(
    recipe: Recipe,
    *,
    output: Path,
    clock: Clock,
    report: Report = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Train by a recipe in the time of the clock, and return the scores; an unfinished run continues in what is left.

    The costs are measured first. The run's recipe is fitted to them, and finally names the updates that were done.

    Raises:
        UsageError: As for `run`, or the time is too short.
        Interrupted: As for `run`.
    """
    begun = load_recipe(output / RECIPE_FILE) if has_begun(output) else None
    if begun is not None:
        check_same(recipe, begun, output)
        if begun.pace:  # trained, if not yet scored
            return run(begun, output=output, report=report, progress=progress)
    is_main = join_processes(recipe).is_main_process
    try:
        with clock.keep(output / CLOCK_FILE) if is_main else nullcontext():
            fitted, costs = (begun, read_costs(output)) if begun else plan_time(recipe, output, clock, report)
            limit = TimeLimit(clock, costs.update_seconds, costs.row_seconds)
            if is_main:
                write_json(msgspec.to_builtins(costs, str_keys=True), output / COST_FILE)
            metrics = run(fitted, output=output, report=report, progress=progress, limit=limit)
    except TooShort:
        if is_main and not has_begun(output):  # so that it can start again with more time
            for name in (CLOCK_FILE, COST_FILE):
                (output / name).unlink(missing_ok=True)
            with suppress(OSError):
                output.rmdir()
        raise
    if unreached := len(fitted.phase) - len(load_recipe(output / RECIPE_FILE).phase):
        report(f"the machine was slower than measured: the last {unreached} of the [[phase]] tables were not reached")
    return metrics


def read_costs(output: Path) -> MeasuredCosts:
    """Read the measured costs of a run that has begun.

    Raises:
        UsageError: The file is lost or damaged.
    """
    path = output / COST_FILE
    with explain_damage(path, output):
        found = msgspec.json.decode(path.read_bytes(), type=MeasuredCosts)
        if 0 not in found.update_seconds:
            raise ValueError("the seconds of the first update are missing")
        return found


def plan_time(recipe: Recipe, output: Path, clock: Clock, report: Report = ignore) -> tuple[Recipe, MeasuredCosts]:
    """Measure a recipe's costs, and return the recipe fitted to the time; the same in all processes.

    Raises:
        UsageError: The costs cannot be measured.
        TooShort: Fewer than LEAST_FITTING updates fit.
    """
    report("measuring some updates")
    costs = find_costs(recipe, output)
    if isinstance(costs, str):
        raise UsageError(costs)
    processes = make_arguments(recipe, output).world_size
    shares = [phase["share"] for phase in recipe.phase] or [1.0]
    seconds = [recipe.batch_size * part.seconds / processes + part.fixed for part in costs.parts]
    mean = sum(share * each for share, each in zip(shares, seconds, strict=True))
    split = next(iter(TASKS[recipe.task].splits))
    end = TimeLimit(clock, {0: mean}, time_row(costs, split)).reserve(costs.rows[split])
    left, mean, seconds, row = take_first((clock.left - end, mean, seconds, time_row(costs, split)))
    updates = int(left / mean)
    if updates < LEAST_FITTING:
        least = clock.limit - left + LEAST_FITTING * mean
        raise TooShort(
            f"the time allows {max(updates, 0)} updates of {mean:.2g} s beside evaluation and saving; give --budget "
            f"{ceil(least / 60) + 1}m or more"
        )
    firsts = [0, *(round(updates * share) for share in accumulate(shares))][:-1]
    return fit(recipe, updates), MeasuredCosts(dict(zip(firsts, seconds, strict=True)), row)


def time_row(costs: Costs, split: str) -> float:
    """Return the seconds in which a sequence of a split is predicted."""
    return costs.evaluation[split] / costs.rows[split]


def scale_warmup(recipe: Recipe, updates: int) -> float:
    """Return the warm-up as a share of the updates; without max_steps it counts `updates`."""
    train = recipe.train
    warmup, total = train.get("warmup_steps", 0), train.get("max_steps", -1)
    return warmup if warmup < 1 else min(warmup / (total if total > 0 else updates), 0.99)


def fit(recipe: Recipe, updates: int) -> Recipe:
    """Return a recipe for a training by the clock, of about `updates` updates and at most MOST_TIMES as many.

    Raises:
        UsageError: The schedule counts updates.
    """
    if (name := recipe.train.get("lr_scheduler_type")) in COUNTING:
        raise UsageError(
            f"lr_scheduler_type = {name!r} counts updates, which --budget does not know; choose another one"
        )
    fitted = WITHOUT_EPOCHS | {
        "max_steps": updates,
        "warmup_steps": scale_warmup(recipe, updates),
        "save_steps": ceil(updates / CHECKPOINTS),
        "logging_steps": ceil(updates / LOGS),
    }
    return resolve(recipe.override(patience=0, train=fitted), MOST_TIMES * updates, pace=[])


def check_same(given: Recipe, fitted: Recipe, output: Path) -> None:
    """Check that the run in a directory is that of a recipe, apart from what was fitted to the time.

    Raises:
        UsageError: It is another run, or one without a budget.
    """
    parts = []
    for recipe in (fitted, given):
        decisive = list_decisive(recipe.to_dict())
        kept = {key: value for key, value in decisive.items() if key not in ("pace", "phase", "patience")}
        kept["train"] = {key: value for key, value in kept["train"].items() if key not in FITTED}
        lengths = [phase["max_length"] for phase in recipe.phase]
        parts.append(kept | {"lengths": lengths[: len(fitted.phase)]})  # others were not reached
    refuse_other(f"{output} belongs to another run", *parts)
    if fitted.pace is None or "max_steps" not in fitted.train:
        raise UsageError(f"{output} has a run without --budget; name another directory with --output")


def describe_time(recipe: Recipe, output: Path, clock: Clock) -> list[str]:
    """Return in lines what the time allows.

    Raises:
        UsageError: As for `plan_time`.
    """
    fitted, costs = plan_time(recipe, output, clock)
    updates = fitted.train["max_steps"] // MOST_TIMES
    each = ", then ".join(f"{seconds:.2g} s" for seconds in costs.update_seconds.values())
    return [
        f"in {describe_duration(clock.limit)} fit about {updates:,} updates of {recipe.batch_size} sequences "
        f"({each} each), with evaluation and saving"
    ]
