"""The expected cost of a study: that of its runs, measured once for those that differ only in length, rate or seed."""

import json
from collections import Counter
from pathlib import Path

from bertkit.studies.cells import list_cells, list_pretrainings
from bertkit.studies.runner import make_jobs
from bertkit.studies.spec import Study
from bertkit.system.progress import Report
from bertkit.tasks import TASKS
from bertkit.training.arguments import make_arguments
from bertkit.training.cost import Costs
from bertkit.training.plan import Forecast, add_forecasts, find_costs, forecast
from bertkit.training.recipe import Recipe

# Keys that change no cost of an update, apart from the number of its sequences.
WITHOUT_COST = {"train": ("num_train_epochs", "max_steps", "learning_rate", "seed"), "data": ("fold",)}


def forecast_study(study: Study, output: Path, report: Report) -> None:
    """Report the expected cost of all runs, one after another, and what is not known."""
    pretrainings, cells = list_pretrainings(study), list_cells(study, output)
    first, rest = make_jobs(study, pretrainings, cells, output)
    known: dict[str, Costs | str] = {}
    found: list[Forecast] = []
    unknown = Counter[str]()
    for place, job in (first | rest).items():
        for recipe in filter(None, [TASKS[job.recipe.task].pretrain_on(job.recipe), job.recipe]):
            name = name_costs(recipe)
            if name not in known:
                report(f"measuring some updates of {place}")
                known[name] = find_costs(recipe, Path(job.output))
            costs = known[name]
            if isinstance(costs, str):
                unknown[costs] += 1
            else:
                found.append(forecast(recipe, costs, make_arguments(recipe, Path(job.output))))
    if found:
        report(f"{len(found):,} runs, one after another:")
        for line in add_forecasts(found).describe():
            report(line)
    for reason, count in unknown.items():
        report(f"{count:,} runs: {reason}")


def name_costs(recipe: Recipe) -> str:
    """Return a name that recipes share if a sequence and an optimizer step cost the same."""
    whole = recipe.to_dict() | {"batch_size": 0}
    for table, keys in WITHOUT_COST.items():
        whole[table] = {key: value for key, value in whole[table].items() if key not in keys}
    return json.dumps(whole, sort_keys=True)
