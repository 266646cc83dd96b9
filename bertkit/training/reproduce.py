"""Repeat a finished run from its directory and compare scores and weights.

On one machine with the same packages a run on a CPU is repeated bit for bit. On another machine, or with other
packages, sums are rounded in another order; the differences between both `environment.json` are listed with the
differing results.

Left out: ensembles, which train nothing; best/, an earlier update of the same training.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bertkit.errors import UsageError, as_usage_error
from bertkit.system.differences import describe_differences
from bertkit.system.hub import pin
from bertkit.system.progress import Report, ignore
from bertkit.tasks.finetuning import SEARCHED
from bertkit.training.callbacks import Progress
from bertkit.training.recipe import load_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import (
    ENVIRONMENT,
    FIRST,
    METRICS_FILE,
    RECIPE_FILE,
    check_finished,
    read_environment,
    read_metrics,
)


@dataclass(frozen=True)
class Comparison:
    """The differences between a run and its repetition; all fields are empty if there are none."""

    scores: dict[str, tuple[Any, Any]]  # name -> both values
    # Name -> the largest absolute difference; infinite if it is missing in one run or the shapes differ
    weights: dict[str, float]
    # Lines `key: before -> now` on machine, software, data and the weights before the first update
    environment: list[str]

    @property
    def is_exact(self) -> bool:
        """Return whether all results are the same, whatever the environment."""
        return not (self.scores or self.weights)


def reproduce(
    folder: str | Path, output: str | Path, report: Report = ignore, progress: Progress = ignore
) -> Comparison:
    """Repeat the run in `folder` in the directory `output`, and compare both.

    Paths in the recipe are relative to the working directory, as in the first run. Models and data sets of the Hub are
    read at the commits of the first run. An interrupted repetition continues, and a finished one is not repeated.

    Raises:
        Interrupted: SIGTERM or SIGINT was received; a checkpoint was saved.
    """
    folder, output = Path(folder), Path(output)
    check_finished(folder)
    if output.resolve() == folder.resolve():
        raise UsageError(f"{output} is the run itself; name another directory with --output")
    recipe = load_recipe(folder / RECIPE_FILE)
    with pin(read_environment(folder).get("commits", {})):
        run(recipe, output=output, report=report, progress=progress)
    return compare_runs(folder, output)


def compare_runs(before: Path, now: Path) -> Comparison:
    """Compare two finished runs; scores that only the second run has are not compared."""
    one, two = (read_metrics(folder / METRICS_FILE) for folder in (before, now))
    one.pop(SEARCHED, None)  # a repetition has the values that a search chose, and makes none
    scores = {name: (one[name], two.get(name)) for name in one if one[name] != two.get(name)}
    return Comparison(scores, compare_weights(before, now), list(compare_environments(before, now)))


def compare_environments(before: Path, now: Path) -> Iterator[str]:
    """Yield the differences in machine, software, data and initial weights of two runs and those before them."""
    if all((folder / FIRST / ENVIRONMENT).exists() for folder in (before, now)):
        yield from (f"{FIRST}: {line}" for line in compare_environments(before / FIRST, now / FIRST))
    yield from describe_differences(*map(read_environment, (before, now)))


def compare_weights(before: Path, now: Path) -> dict[str, float]:
    """Return the largest absolute difference of each weight that is not equal in two models, by name."""
    one, two = map(read_weights, (before, now))
    found = {}
    for name in one | two:
        if name not in one or name not in two or one[name].shape != two[name].shape:
            found[name] = math.inf
        elif not torch.equal(one[name], two[name]):
            found[name] = (one[name].double() - two[name].double()).abs().max().item()
    return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a finished run from all of its shards."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with as_usage_error(str(path)):
            found |= load_file(path)
    return found
