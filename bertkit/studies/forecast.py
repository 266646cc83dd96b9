"""The expected cost of a study: that of its runs, measured once for those that differ only in length, rate or seed."""

import json
from pathlib import Path

from bertkit.errors import UsageError
from bertkit.studies.cells import list_cells, list_pretrainings
from bertkit.studies.runner import make_jobs
from bertkit.studies.spec import Study
from bertkit.studies.workers import RunJob
from bertkit.system.progress import describe_duration, ignore
from bertkit.tasks import TASKS
from bertkit.training.arguments import make_arguments
from bertkit.training.cost import Costs, measure_costs
from bertkit.training.plan import forecast_run
from bertkit.training.prepare import prepare

FREE = ("num_train_epochs", "max_steps", "learning_rate", "seed")  # keys of [train] that change no cost of an update


def forecast_study(study: Study, output: Path) -> list[str]:
    """Return lines with the expected cost of all runs, one after another, and what is not known."""
    pretrainings, cells = list_pretrainings(study), list_cells(study, output)
    first, rest = make_jobs(study, pretrainings, cells, output)
    known: dict[str, Costs | None] = {}
    updates, operations, seconds, unknown = 0, 0.0, 0.0, 0
    for job in (first | rest).values():
        name = name_costs(job)
        if name not in known:
            known[name] = find_costs(job)
        if (costs := known[name]) is None:
            unknown += 1
            continue
        args = make_arguments(TASKS[job.task], job.recipe, Path(job.output))
        found = forecast_run(TASKS[job.task], job.recipe, costs, args)
        updates, operations = updates + found.updates, operations + found.operations
        seconds += found.training + found.evaluation
    lines = []
    if updates:
        lines.append(
            f"expected here, one run after another: {describe_duration(seconds)}; {updates:,} updates, "
            f"{operations:.2e} floating-point operations"
        )
    if unknown:
        lines.append(f"cost unknown of {unknown:,} runs, whose data or models do not exist yet")
    return lines


def name_costs(job: RunJob) -> str:
    """Return a name that jobs share if their updates cost the same, apart from the number of their sequences."""
    train = {key: value for key, value in job.recipe["train"].items() if key not in FREE}
    return json.dumps([job.task, job.recipe | {"train": train, "batch_size": 0}], sort_keys=True)


def find_costs(job: RunJob) -> Costs | None:
    """Return the costs of a job, or None if its data or its model cannot be read, or nothing is trained."""
    task = TASKS[job.task]
    try:
        prepared = prepare(task, job.recipe | {"data": task.shorten(job.recipe["data"])}, ignore)
        return measure_costs(task, job.recipe, prepared) if "train" in prepared.data else None
    except UsageError:
        return None
