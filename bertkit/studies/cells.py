"""The cells of a study: the runs that a specification asks for, their directories, and where each one starts."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bertkit.errors import UsageError, locate_refusal, pluralize
from bertkit.model.checkpoint import make_config
from bertkit.model.config import BertConfig
from bertkit.studies.spec import LONGEST_DIRECTORY, PRETRAIN, Column, Study, Variant, name_directory, set_axis
from bertkit.studies.tables import name_axes, show_value
from bertkit.system.progress import Report, describe_duration
from bertkit.tasks import TASKS
from bertkit.tasks.option import reads_own_data
from bertkit.tasks.task import Task
from bertkit.training import costs
from bertkit.training.facts import describe_rows
from bertkit.training.recipe import Recipe, RecipePart, make_first, merge, resolve
from bertkit.training.run_dir import FIRST

TEXT_FOLDER = "text"  # holds the corpus, below data_root
WITHOUT_COST = ("learning_rate", "seed", "max_steps", "num_train_epochs")  # keys that change no cost of a sequence


@dataclass(frozen=True)
class Pretraining:
    """A pretraining that rows start from."""

    rows: tuple[str, ...]  # names of these rows
    recipe: Recipe  # the recipe
    directory: str  # the run directory, relative to the study's
    steps: tuple[int, ...] = ()  # updates before the last one whose models rows start from


@dataclass(frozen=True)
class Cell:
    """A combination of row, column and setting, with one run per seed."""

    row: str
    column: Column
    setting: Mapping[str, Any]  # mapping from axis to value
    recipe: Recipe  # the recipe, with the first seed
    directory: str  # the cell's directory, relative to the study's
    runs: Mapping[int, str]  # mapping from seed to run directory, relative to the study's; columns may share runs
    # Directory of the pretraining that the runs start from, relative to the study's; empty without one
    origin: str = ""
    # The run directories that an ensemble combines, relative to the study's; `runs` has the result
    members: tuple[str, ...] = ()
    is_pretraining: bool = False  # whether the only run is that pretraining itself


# --- Pretrainings -----------------------------------------------------------------------------------------------------


def list_pretrainings(study: Study) -> list[Pretraining]:
    """Return the pretrainings that rows start from; rows with the same recipe share one."""
    groups: dict[str, tuple[Recipe, list[str]]] = {}
    for name, row in study.rows.items():
        if row.pretrain is not None:
            text = locate_data(study.data_root, TEXT_FOLDER, PRETRAIN, row.pretrain)
            recipe = complete_at(join(PRETRAIN, name), PRETRAIN, row.pretrain, text)
            groups.setdefault(json.dumps(recipe.to_dict(), sort_keys=True), (recipe, []))[1].append(name)
    found = []
    for recipe, names in groups.values():
        steps = {study.rows[name].step for name in names} - {0, recipe.train["max_steps"]}
        found.append(Pretraining(tuple(names), recipe, join(PRETRAIN, names[0]), tuple(sorted(steps))))
    return found


def complete_at(directory: str, task: str, *parts: RecipePart, config: BertConfig | None = None) -> Recipe:
    """Make the recipe of the runs in a directory."""
    with locate_refusal(directory):
        return Recipe.make(TASKS[task], *parts, config=config)


def name_folder(task: Task) -> str:
    """Return the folder of a task's data below the root of a study, as its command is called; empty for own data."""
    return task.command.split()[0] if task.copies else ""


def locate_data(root: str, folder: str, task: str, recipe: RecipePart) -> RecipePart:
    """Return a recipe that names a task's folder below the root, or the root if that is a file and the task reads one.

    It is empty if the given recipe names its data itself.
    """
    key = "corpus" if folder == TEXT_FOLDER else "dir"
    reads_file = reads_own_data(TASKS[task].options)
    if not root or recipe.get("data", {}).get(key) or not (folder or reads_file):
        return {}
    path = Path(root) if reads_file and Path(root).is_file() else Path(root, folder)
    if not path.exists():
        raise UsageError(f"there is no folder {path} for {task}; give the folder that holds it with --data ROOT")
    return {"data": {key: [str(path)] if folder == TEXT_FOLDER else str(path)}}


def start_from(origin: Pretraining, step: int, output: Path) -> tuple[RecipePart, BertConfig]:
    """Return the recipe that starts from a pretraining, and the configuration that its model will have."""
    checkpoint = output / origin.directory / (name_step(step) if step in origin.steps else "")
    settings = TASKS[PRETRAIN].configure(origin.recipe, None, None)
    return {"checkpoint": str(checkpoint)}, make_config(origin.recipe.model | settings)


def name_step(step: int) -> str:
    """Return the name of the folder that keeps a pretraining's model after `step` updates."""
    return f"step-{step}"


# --- Cells ------------------------------------------------------------------------------------------------------------


def list_cells(study: Study, output: str | Path = "") -> list[Cell]:
    """Return all cells, ordered by row, column and setting; the last axis changes fastest.

    Args:
        output: The study's directory, in which the recipes look for their pretrainings.
    """
    origins = {row: origin for origin in list_pretrainings(study) for row in origin.rows}
    cells = []
    for row, column in itertools.product(study.variants, study.columns):
        members = row.ensemble or [row.name]
        groups = [list_group(study, name, column, origins.get(name), Path(output)) for name in members]
        cells += map(partial(gather_members, study, row), zip(*groups, strict=True)) if row.ensemble else groups[0]
    return cells


def gather_members(study: Study, row: Variant, parts: Sequence[Cell]) -> Cell:
    """Return the cell of an ensemble, with the same setting as the cells of its members."""
    members = (list(part.runs.values())[:number] for part, number in zip(parts, row.ensemble.values(), strict=True))
    directory = "/".join(filter(None, (name_directory(row.name), parts[0].directory.partition("/")[2])))
    found = replace(parts[0], row=row.name, directory=directory, runs={study.seeds[0]: directory}, origin="")
    return replace(found, members=tuple(itertools.chain(*members)))


def list_group(study: Study, name: str, column: Column, origin: Pretraining | None, output: Path) -> list[Cell]:
    """Return the cells of a row and a column, one for each setting.

    A column of the pretraining task has one cell, that of the row's pretraining, or none if the row starts from a step
    or has no pretraining.
    """
    row, task = study.rows[name], TASKS[column.task]
    if study.pretrains and column.task == PRETRAIN:
        if origin is None or row.step in origin.steps:
            return []
        runs = {origin.recipe.train["seed"]: origin.directory}
        return [Cell(name, column, {}, origin.recipe, origin.directory, runs, is_pretraining=True)]
    start, config = start_from(origin, row.step, output) if origin else ({}, None)
    settings = [dict(zip(study.grid, values, strict=True)) for values in itertools.product(*study.grid.values())]
    # Columns of the same task with the same recipe in this row share the runs of the first one.
    own = merge(column.recipe, row.recipe)
    home = next(c.name for c in study.columns if c.task == column.task and merge(c.recipe, row.recipe) == own)
    above = join(name if len(study.rows) > 1 else "", home)
    cells = []
    for setting, setting_name in zip(settings, name_settings(settings), strict=True):
        directory = "/".join(filter(None, (above, setting_name)))
        parts = [study.recipe, column.recipe, row.recipe, *(set_axis(axis, value) for axis, value in setting.items())]
        data = locate_data(study.data_root, name_folder(task), task.name, merge(*parts))
        seed = {"train": {"seed": study.seeds[0]}}
        recipe = complete_at(directory, column.task, *parts, seed, data, start, config=config)
        runs = {seed: f"{directory}/seed-{seed}" for seed in study.seeds}
        if len(study.seeds) == 1:
            runs = dict.fromkeys(study.seeds, directory)
        cells.append(Cell(name, column, setting, recipe, directory, runs, origin.directory if origin else ""))
    return cells


def join(*names: str) -> str:
    """Join names to a relative directory; names without usable characters are skipped."""
    return "/".join(name_directory(name) for name in names if name_directory(name))


def name_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a directory name for each setting, such as `learning_rate-5e-05_batch_size-16`.

    Settings are numbered instead if these names are not unique or are too long.
    """
    keys = name_axes(list(settings[0]))
    words = [
        [re.sub(r"[^\w.+-]+", "-", show_value(value)).lower() for value in setting.values()] for setting in settings
    ]
    names = ["_".join(f"{key}-{word}" for key, word in zip(keys, some, strict=True)) for some in words]
    if len(set(names)) < len(names) or max(len(name.encode()) for name in names) > LONGEST_DIRECTORY:
        return [f"setting-{number}" for number in range(1, len(names) + 1)]
    return names


def describe_plan(study: Study) -> list[str]:
    """Describe the plan in lines: each pretraining, each cell with runs of its own, and the totals."""
    pretrainings, cells = list_pretrainings(study), list_cells(study)
    lines = []
    for origin in pretrainings:
        kept = f", kept after {', '.join(f'{step:,}' for step in origin.steps)}" if origin.steps else ""
        rows = f", for {'; '.join(origin.rows)}" if origin.rows != ("",) else ""
        lines.append(f"{origin.directory}: {origin.recipe.train['max_steps']:,} updates{kept}{rows}")
    own: dict[str, Cell] = {}
    for cell in cells:
        if not cell.is_pretraining:
            own.setdefault(cell.directory, cell)
    for directory, cell in own.items():
        start = f", from {cell.recipe.checkpoint}" if cell.origin else ""
        runs = f"{'seeds' if len(cell.runs) > 1 else 'seed'} {', '.join(map(str, cell.runs))}"
        lines.append(f"{directory}, {f'of {len(cell.members)} runs' if cell.members else runs}{start}")
    runs = sum(len(cell.runs) for cell in own.values()) + len(pretrainings)
    before = f", {len(pretrainings)} of them pretrainings" if pretrainings else ""
    return [*lines, f"{pluralize(len(cells), 'cell')}, {pluralize(runs, 'run')}{before}"]


def describe_time(study: Study, output: Path, report: Report) -> list[str]:
    """Return in lines the expected time of all runs; those that differ in length, size or seed are measured once.

    Runs that start from a pretraining are measured with its model, untrained.
    """
    origins = list_pretrainings(study)
    cells = {cell.directory: cell for cell in list_cells(study, output) if not (cell.is_pretraining or cell.members)}
    known: dict[str, costs.Costs | str] = {}
    unknown, seconds = Counter[str](), []
    with TemporaryDirectory() as folder:  # for a model of each size
        models = [start_from(origin, 0, output)[1].to_json_string() for origin in origins]
        left = {one.directory: Path(folder, str(models.index(x))) for one, x in zip(origins, models, strict=True)}
        recipes = [(origin.directory, origin.recipe) for origin in origins]
        for directory, cell in cells.items():
            start = {"checkpoint": str(left[cell.origin])} if cell.origin else {}
            recipes += [(directory, resolve(cell.recipe, start))] * len(cell.runs)
        earlier = [(f"{directory}/{FIRST}", make_first(recipe)) for directory, recipe in recipes]
        for directory, recipe in [*recipes, *((directory, recipe) for directory, recipe in earlier if recipe)]:
            same = merge(
                recipe.to_dict(), {"batch_size": 0, "data": {"fold": 0}, "train": dict.fromkeys(WITHOUT_COST, 0)}
            )
            if (name := json.dumps(same)) not in known:
                report(f"measuring some updates of {directory}")
                with locate_refusal(directory):
                    known[name] = costs.measure_costs(recipe, left.get(directory))
            if isinstance(measured := known[name], str):
                unknown[measured] += 1
            else:
                settled = resolve(recipe, describe_rows(recipe, measured.rows))
                seconds.append(sum(costs.estimate(settled, measured, output)[1:]) + measured.end)
    line = f"{pluralize(len(seconds), 'run')}, one after another: {describe_duration(sum(seconds))} expected here"
    return [line, *(f"{pluralize(number, 'run')}: {reason}" for reason, number in unknown.items())]
