"""A table of runs: rows (variants of a recipe) x columns (tasks) x settings (a grid), each with some seeds.

The paper's grid (section A.3) and its random restarts (section 4.1) are studies, and so is every table of ablations. A
study is a TOML file, or the dictionary that one holds:

    tasks = ["rte", "mrpc"]        # the columns
    seeds = [42, 43, 44]           # or restarts = 3: so many, from the recipe's seed on
    select = "best"                # the setting whose best run is best on dev (4.1), or whose "mean" is
    keep = "chosen"                # whose weights are kept: those of the chosen run of each row and task, or "all"
    num_cpus = 1                   # of a run on Ray
    num_gpus = 0                   # may be a fraction
    data_root = "data"             # holds the folder of each task
    [recipe]                       # what all runs share
    batch_size = 32
    [grid]                         # every combination is a setting
    "train.learning_rate" = [5e-5, 3e-5, 2e-5]
    [[row]]                        # a variant; without any there is one, without a name
    name = "stable"
    [row.recipe]
    preset = "stable"

A run's recipe is the task's < `[recipe]` < `[row.recipe]` < the setting < the command line. The directories of the runs
are the truth about what is done; `study.json` is made of them. Who does the runs is the business of `workers.py`, what
the result looks like that of `report.py`. Left out: rows that begin with a pretraining of their own.
"""

import difflib
import itertools
import json
import math
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertkit.data.corpus import ignore
from bertkit.directory import BEST, FIRST, find_finished, hold_directory, write_json
from bertkit.errors import UsageError, explain_refusal
from bertkit.recipe import (
    TABLES,
    TOP,
    Recipe,
    check,
    check_value,
    find_recipe_differences,
    merge,
    name_differences,
    read_recipe,
    save_recipe,
)
from bertkit.report import describe_size, name_axes, plot_heatmap, show_value, write_table
from bertkit.run import Prepared, complete, join_processes, make_arguments, name_data, prepare
from bertkit.tasks import TASKS
from bertkit.tasks.task import Report, Task
from bertkit.trainer import Interrupted
from bertkit.workers import Job, State, execute, read_workers

STUDY = "study.toml"
RESULT = "study.json"
TABLE = "table.md"
PICTURE = "heatmap.png"

OPTIONS = {  # the keys that the command line reaches too
    "tasks": list[str],
    "seeds": list[int],
    "restarts": int,
    "select": Literal["best", "mean"],
    "keep": Literal["chosen", "all"],
    "num_cpus": float,
    "num_gpus": float,
    "data_root": str,
}
PARTS = {"recipe": dict, "grid": dict, "row": list[dict]}
HARDWARE = ("num_cpus", "num_gpus")  # with others it is still the same study
MOST_RESTARTS = 1000
LONGEST = 150  # characters of the name of a setting's directory
SHOWN_EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Study:
    """The definition of a study, complete and checked.

    rows: name -> the recipe that its runs share, but for seeds.
    grid: axis, such as "train.learning_rate" or "batch_size" -> its values.
    select: the setting whose best run is best, or whose mean is.
    keep: whose weights are kept: those of the chosen run of each row and task, or all.
    num_cpus, num_gpus: of a run on Ray.
    data_root: holds the folder of each task; empty: the recipes say where the data are.
    """

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: Mapping[str, Recipe]
    grid: Mapping[str, tuple[Any, ...]]
    select: str = "best"
    keep: str = "chosen"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    data_root: str = ""


@dataclass(frozen=True)
class Cell:
    """A row, a task and a setting, with one run a seed.

    setting: axis -> value.
    recipe: complete, but with the first seed.
    runs: seed -> its directory below the study's.
    """

    row: str
    task: str
    setting: Mapping[str, Any]
    recipe: Recipe
    directory: str
    runs: Mapping[int, str]


class StudyInterrupted(Interrupted):
    """The study was asked to stop (SIGTERM or Ctrl-C); its runs have written checkpoints, and it can be continued."""

    def __init__(self, number: int, over: int, runs: int) -> None:
        Exception.__init__(self, f"stopped with {over} of {runs} runs over; the same command continues")
        self.number = number


# --- The definition ---------------------------------------------------------------------------------------------------


def read_study(path: str | Path, *given: Mapping[str, Any]) -> Study:
    """The study in a TOML file, with what the command line gave.

    Raises:
        UsageError: as `make_study`, or the file cannot be read.
    """
    return make_study(read_recipe(path), *given, where=str(path))


def make_study(definition: Mapping[str, Any], *given: Mapping[str, Any], where: str = "study") -> Study:
    """The study of a definition, with what the command line gave: recipes, which win over all others, and OPTIONS.

    A given value for an axis of the grid takes the axis' place; a list of values replaces its own.

    Args:
        where: what the messages begin with.

    Raises:
        UsageError: an unknown key or task, a wrong type, an axis without values, something twice, seeds said twice.
    """
    recipe = merge(*given)
    options = {key: recipe.pop(key) for key in OPTIONS if key in recipe}
    if options.keys() & {"seeds", "restarts"}:
        definition = {key: value for key, value in definition.items() if key not in ("seeds", "restarts")}
    try:
        values = check_keys({**definition, **options})
        check_tasks(values.get("tasks", []))
        rows = read_rows(values.get("row", [{"name": ""}]))
        axes, recipe = fix_axes(read_grid(values.get("grid", {})), recipe)
        shared = values.get("recipe", {})
        parts = {"[recipe]": shared, "command line": recipe}
        check_recipes(values["tasks"], parts | {f"[row.recipe] of {name!r}": row for name, row in rows.items()}, axes)
        named = [merge(shared, row, recipe).get("data", {}) for row in rows.values()]
        if values.get("data_root") and ("data.dir" in axes or any("dir" in options for options in named)):
            raise UsageError("both the root of all data (--data, data_root) and data.dir are given; leave one out")
        return Study(
            tasks=tuple(values["tasks"]),
            seeds=choose_seeds(values, merge(shared, recipe), rows),
            rows={name: drop_seed(merge(shared, row, recipe)) for name, row in rows.items()},
            grid=convert_axes(axes, TASKS[values["tasks"][0]]),
            **{key: values[key] for key in ("select", "keep", *HARDWARE, "data_root") if key in values},
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def define(study: Study) -> dict[str, Any]:
    """The definition that `make_study` makes the study of."""
    options = {key: getattr(study, key) for key in ("select", "keep", *HARDWARE, "data_root")}
    rows = [{"name": name, "recipe": recipe} for name, recipe in study.rows.items()]
    parts = {"recipe": rows[0]["recipe"]} if list(study.rows) == [""] else {"row": rows}
    grid = {axis: list(values) for axis, values in study.grid.items()}
    given = {"tasks": list(study.tasks), "seeds": list(study.seeds)} | options | {"grid": grid} | parts
    return {key: value for key, value in given.items() if value not in ("", {})}


def check_keys(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition with every key known and every value of its type and in its range."""
    kinds = OPTIONS | PARTS
    for key in definition:
        if key not in kinds:
            nearest = difflib.get_close_matches(key, kinds, n=1)
            belongs = key in TABLES or key in TOP
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"expected {', '.join(kinds)}"
            raise UsageError(f"unknown key {key!r}; {'it belongs in [recipe]' if belongs else remedy}")
    values = {key: check_value(key, value, kinds[key]) for key, value in definition.items()}
    for key, least in (("restarts", 1), ("num_cpus", 0), ("num_gpus", 0)):
        if values.get(key, least) < least:
            raise UsageError(f"{key} is {values[key]:g}; it must be at least {least}")
    return values


def check_tasks(names: Sequence[str]) -> None:
    """Nothing, or a UsageError: no task, one twice, one that does not exist, or one without a score."""
    if not names:
        raise UsageError(f'no tasks; write for example tasks = ["{next(iter(TASKS))}"]')
    if twice := find_twice(names):
        raise UsageError(f"tasks has {twice[0]!r} twice; leave one out")
    for name in names:
        if name not in TASKS:
            nearest = difflib.get_close_matches(name.lower(), TASKS, n=1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"the tasks are {', '.join(TASKS)}"
            raise UsageError(f"unknown task {name!r} in tasks; {remedy}")
        if not TASKS[name].metric:
            raise UsageError(f"{name} has no labels and so no score to compare; leave it out of tasks")


def read_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Recipe]:
    """Name -> recipe."""
    named: dict[str, Recipe] = {}
    for number, row in enumerate(rows, start=1):
        if unknown := row.keys() - {"name", "recipe"}:
            raise UsageError(f"unknown key {min(unknown)!r} in [[row]] {number}; expected 'name' and [row.recipe]")
        if "name" not in row:
            raise UsageError(f"[[row]] {number} has no name; each row needs one")
        named[check_value("name", row["name"], str, f"[[row]] {number} ")] = check_value(
            "recipe", row.get("recipe", {}), dict, f"[[row]] {number} "
        )
        train = row.get("recipe", {}).get("train")
        if isinstance(train, dict) and "seed" in train:
            raise UsageError(f"[[row]] {number} sets train.seed; seeds are the study's: write seeds above the tables")
    if not named:
        raise UsageError("row = [] has no rows; leave it out")
    if len(rows) > 1 and not all(map(name_row, named)):
        raise UsageError("a [[row]] has a name without letters and digits, of which its directory is made; change it")
    if twice := find_twice([name_row(row["name"]) for row in rows]):
        raise UsageError(f"two of the [[row]] tables are called {twice[0]!r}; give each its own name")
    return named


def read_grid(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Axis -> its values; `train.learning_rate` may be written with quotes or without."""
    axes: dict[str, Any] = {}
    for key, values in grid.items():
        nested = key in TABLES and isinstance(values, dict)
        axes |= {f"{key}.{name}": items for name, items in values.items()} if nested else {key: values}
    for axis, values in axes.items():
        if axis in TABLES:
            raise UsageError(f'[grid] {axis} is a table, no axis; name a key in it, such as "train.learning_rate"')
        if axis in ("train.seed", "task"):
            raise UsageError(f"[grid] {axis} is no axis; write {axis.rpartition('.')[2]}s above the tables")
        check_axis(axis, values)
    return axes


def check_axis(axis: str, values: Any) -> None:
    """Nothing, or a UsageError: no list, an empty one, or something twice in it."""
    if not isinstance(values, list) or not values:
        raise UsageError(f"[grid] {axis} = {json.dumps(values, default=str)} must be a list with at least one value")
    if twice := find_twice(values):
        raise UsageError(f"[grid] {axis} has {json.dumps(twice[0], default=str)} twice; leave one out")


def fix_axes(axes: Mapping[str, list[Any]], given: Recipe) -> tuple[dict[str, list[Any]], Recipe]:
    """The axes that the command line leaves, with its values if it gives lists, and the rest of what it gives."""
    left, rest = dict(axes), merge(given)
    for axis, values in axes.items():
        table, _, key = axis.rpartition(".")
        home = rest.get(table, {}) if table else rest
        if not isinstance(home, dict) or key not in home:
            continue
        value = home[key]
        if isinstance(value, list) and not (isinstance(values[0], list) and not any(type(x) is list for x in value)):
            check_axis(axis, value)
            left[axis] = home.pop(key)
        else:
            del left[axis]
    return left, rest


def set_axis(axis: str, value: Any) -> Recipe:
    """The recipe in which an axis has a value."""
    table, _, key = axis.rpartition(".")
    return {table: {key: value}} if table else {key: value}


def convert_axes(axes: Mapping[str, Sequence[Any]], task: Task) -> dict[str, tuple[Any, ...]]:
    """The axes with their values in the types of the recipe: 1 for a float is 1.0."""
    converted = {}
    for axis, values in axes.items():
        table, _, key = axis.rpartition(".")
        recipes = [check(set_axis(axis, value), data_defaults=task.recipe["data"]) for value in values]
        converted[axis] = tuple(recipe[table][key] if table else recipe[key] for recipe in recipes)
    return converted


def check_recipes(tasks: Sequence[str], parts: Mapping[str, Recipe], axes: Mapping[str, Sequence[Any]]) -> None:
    """Nothing, or a UsageError about a part of the definition: a key that a task does not know, or a wrong type."""
    for name in tasks:
        options = TASKS[name].recipe["data"]
        for where, part in parts.items():
            check(part, data_defaults=options, where=where)
        for axis, values in axes.items():
            for value in values:
                check(set_axis(axis, value), data_defaults=options, where="[grid]")


def choose_seeds(values: Mapping[str, Any], shared: Recipe, rows: Mapping[str, Recipe]) -> tuple[int, ...]:
    """The seeds of every cell: as given, or `restarts` ones from the recipe's seed on."""
    first = shared.get("train", {}).get("seed")
    if "seeds" in values and ("restarts" in values or first is not None):
        other = "restarts" if "restarts" in values else "train.seed"
        raise UsageError(f"both seeds and {other} are given; leave one out")
    if first is None:
        first = TASKS[values["tasks"][0]].recipe["train"]["seed"]
    if values.get("restarts", 1) > MOST_RESTARTS:
        raise UsageError(f"restarts is {values['restarts']:,}; it must be at most {MOST_RESTARTS:,}")
    seeds = values.get("seeds", list(range(first, first + values.get("restarts", 1))))
    if not seeds or find_twice(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise UsageError(f"seeds = {seeds} must be different whole numbers, at least one, each below 2**32")
    return tuple(seeds)


def drop_seed(recipe: Recipe) -> Recipe:
    """The recipe without its seed."""
    recipe.get("train", {}).pop("seed", None)
    return recipe


def find_twice(items: Sequence[Any]) -> list[Any]:
    """The items that stand in the sequence more than once."""
    counts = Counter(json.dumps(item, default=str, sort_keys=True) for item in items)
    return [item for item in items if counts[json.dumps(item, default=str, sort_keys=True)] > 1]


# --- The cells --------------------------------------------------------------------------------------------------------


def list_cells(study: Study) -> list[Cell]:
    """Every cell, rows first, then tasks, then settings with the last axis changing fastest.

    Raises:
        UsageError: a recipe that cannot be, or a task's folder is missing.
    """
    settings = [dict(zip(study.grid, values, strict=True)) for values in itertools.product(*study.grid.values())]
    names = name_settings(settings)
    cells = []
    for (row, shared), name in itertools.product(study.rows.items(), study.tasks):
        data = locate_data(study.data_root, TASKS[name])
        for setting, setting_name in zip(settings, names, strict=True):
            parts = [name_row(row) if len(study.rows) > 1 else "", name, setting_name]
            directory = "/".join(part for part in parts if part)
            axes = [set_axis(axis, value) for axis, value in setting.items()]
            try:
                recipe = complete(TASKS[name], shared, *axes, {"train": {"seed": study.seeds[0]}}, data)
            except UsageError as error:
                raise UsageError(f"{directory}: {error}") from None
            runs = {seed: f"{directory}/seed-{seed}" for seed in study.seeds}
            if len(study.seeds) == 1:
                runs = dict.fromkeys(study.seeds, directory)
            cells.append(Cell(row, name, setting, recipe, directory, runs))
    return cells


def locate_data(root: str, task: Task) -> Recipe:
    """The recipe that names a task's folder below the root.

    Raises:
        UsageError: it is not there.
    """
    if not root or not task.folder:
        return {}
    folder = Path(root) / task.folder
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} for {task.name}; name the folder that holds it: --data ROOT")
    return {"data": {"dir": str(folder)}}


def name_row(name: str) -> str:
    """A row's name as that of a directory."""
    return re.sub(r"[^\w+-]+", "-", name).strip("-").lower()


def name_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The directory of each setting, such as `learning_rate-5e-05_batch_size-16`; numbers where that would not do."""
    keys = name_axes(list(settings[0]))
    words = [
        [re.sub(r"[^\w.+-]+", "-", show_value(value)).lower() for value in setting.values()] for setting in settings
    ]
    names = ["_".join(f"{key}-{word}" for key, word in zip(keys, some, strict=True)) for some in words]
    if len(set(names)) < len(names) or max(map(len, names)) > LONGEST:
        return [f"setting-{number}" for number in range(1, len(names) + 1)]
    return names


# --- The runs ---------------------------------------------------------------------------------------------------------


def run_study(
    study: Study,
    *,
    output: str | Path,
    workers: int | str = 1,
    report: Report = ignore,
    progress: Callable[[dict[str, Any]], None] = ignore,
) -> dict[str, Any]:
    """The results of all runs, as written to `output/study.json`; see `summarize`. What is finished is not repeated.

    Recipes and data are checked first; until then nothing is written. A run that fails is recorded, the others go on,
    and the same command tries it again.

    Args:
        output: new, empty, or of the same study, which then continues.
        workers: 1: this process; more: so many processes; "ray": the cluster of RAY_ADDRESS, or else a local one.
        report: gets one line now and then.
        progress: gets the results so far, a new dictionary each time.

    Raises:
        UsageError: a mistake in the study, the data or the directory.
        StudyInterrupted: by SIGTERM or SIGINT.
    """
    output, count = Path(output), read_workers(workers)
    cells = list_cells(study)
    processes = join_processes(cells[0].recipe)
    if not processes.is_main_process:
        report = progress = ignore
    check_directory(study, output)
    states, jobs = find_states(cells, output)
    report(f"{describe_size(summarize(study, cells, states))}, {len(states) - len(jobs)} of them finished")
    if count:  # a cluster may have what this machine lacks
        check_arguments(jobs)
    jobs, prepared = prepare_data(jobs, report)
    processes.wait_for_everyone()  # all have to find the same directories
    board = Board(study, cells, states, output, report, progress, is_main=processes.is_main_process)
    directories = list(jobs)
    resources = {"num_cpus": study.num_cpus, "num_gpus": study.num_gpus}
    with hold_directory(output) if processes.is_main_process else nullcontext():
        board.start()
        number = execute(
            list(jobs.values()), prepared, lambda place, news: board.take(directories[place], news), count, resources
        )
        return board.finish(number)


class Board:
    """What is known of the runs while they are done; everything it hears is shown, and what matters written.

    states: directory of a run below the study's -> how far it is.
    is_main: of several processes that share each run the one that writes.
    """

    def __init__(
        self,
        study: Study,
        cells: Sequence[Cell],
        states: dict[str, State],
        output: Path,
        report: Report,
        progress: Callable[[dict[str, Any]], None],
        is_main: bool,
    ) -> None:
        self.study = study
        self.cells = cells
        self.states = states
        self.output = output
        self.report = report
        self.progress = progress
        self.is_main = is_main
        self.shown = 0.0  # when progress was last told

    def start(self) -> None:
        """Begins the directory."""
        if self.is_main:
            with explain_refusal(f"the directory {self.output}"):
                self.output.mkdir(parents=True, exist_ok=True)
            save_recipe(define(self.study), self.output / STUDY)
            for group in group_cells(self.cells):
                prune(self.study, group, self.states, self.output)
        self.save()

    def take(self, directory: str, news: State | str) -> None:
        """Takes in what a run says: its state, or a line."""
        if isinstance(news, str):
            self.report(f"{directory}: {news}")
            return
        state = judge(replace(news, reason=news.reason.replace(str(self.output / directory), directory)))
        self.states[directory] = state
        if state.status in ("finished", "failed"):
            cell = next(cell for cell in self.cells if directory in cell.runs.values())
            if self.is_main:
                group = next(group for group in group_cells(self.cells) if cell in group)
                prune(self.study, group, self.states, self.output)
            self.save()
            outcome = f"failed: {state.reason}" if state.status == "failed" else describe_score(cell.task, state)
            over = sum(state.status in ("finished", "failed") for state in self.states.values())
            self.report(f"{directory}: {outcome} ({over} of {len(self.states)} runs over)")
        elif time.monotonic() - self.shown > SHOWN_EVERY or state.done == 0:
            self.shown = time.monotonic()
            self.progress(summarize(self.study, self.cells, self.states))

    def save(self) -> dict[str, Any]:
        """The results so far, written and shown."""
        results = summarize(self.study, self.cells, self.states)
        if self.is_main:
            write_json(results, self.output / RESULT)
        self.progress(results)
        return results

    def finish(self, number: int) -> dict[str, Any]:
        """The results; writes the tables, unless a signal (its number, or 0) came before the end.

        Raises:
            StudyInterrupted: it did.
        """
        for directory, state in self.states.items():
            if state.status == "running":
                self.states[directory] = State()
        results = self.save()
        if number and not results["finished"]:
            over = sum(state.status != "waiting" for state in self.states.values())
            raise StudyInterrupted(number, over, len(self.states))
        if self.is_main:
            (self.output / TABLE).write_text(write_table(results), encoding="utf-8")
            plot_heatmap(results, self.output / PICTURE)
        return results


def check_directory(study: Study, output: Path) -> None:
    """Nothing, or a UsageError: the directory holds another study, or something else."""
    if not (output / STUDY).exists():
        # A hidden file may be what is left of a study that was killed in its first moment.
        if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
            raise UsageError(f"{output} is not empty and holds no study; name another directory with --output")
        return
    parts = []
    for some in (make_study(read_recipe(output / STUDY), where=str(output / STUDY)), study):
        definition = {key: value for key, value in define(some).items() if key not in (*HARDWARE, "recipe", "row")}
        parts.append({"": definition} | {f"{name or 'recipe'}: ": recipe for name, recipe in some.rows.items()})
    old, new = parts
    differences = [
        f"{place}{difference}"
        for place in old | new
        for difference in find_recipe_differences(old.get(place, {}), new.get(place, {}))
    ]
    if list(old) != list(new) and not differences:
        differences = ["the order of the rows"]
    if differences:
        raise UsageError(
            f"{output} holds another study ({name_differences(differences)}); name another directory with --output"
        )


def find_states(cells: Sequence[Cell], output: Path) -> tuple[dict[str, State], dict[str, Job]]:
    """How far every run is, and the jobs that are left, by the run's directory below the study's.

    Raises:
        UsageError: a directory holds something else, or its metrics are damaged.
    """
    states, jobs = {}, {}
    for cell in cells:
        for seed, directory in cell.runs.items():
            recipe = merge(cell.recipe, {"train": {"seed": seed}})
            metrics = find_finished(output / directory, recipe)
            states[directory] = State() if metrics is None else judge(State("finished", metrics=metrics))
            if metrics is None:
                jobs[directory] = Job(cell.task, recipe, str(output / directory))
    return states, jobs


def judge(state: State) -> State:
    """The state, failed if it has finished with a score that is no number."""
    if state.status == "finished" and not math.isfinite(state.metrics["score"]):
        return replace(state, status="failed", reason=f"the score is {state.metrics['score']}")
    return state


def check_arguments(jobs: Mapping[str, Job]) -> None:
    """Nothing, or a UsageError about what the Trainer would refuse."""
    for directory, job in jobs.items():
        try:
            make_arguments(TASKS[job.task], job.recipe, Path(job.output))
        except UsageError as error:
            raise UsageError(f"{directory}: {error}") from None


def prepare_data(jobs: Mapping[str, Job], report: Report) -> tuple[dict[str, Job], dict[str, Prepared]]:
    """The jobs with the names of their data, those with the same data together, and the data by name.

    Every data set is read and encoded once. Where the data depend on more of the recipe (pretraining: seed, length of
    the run), this is a rehearsal, for mistakes to come to light now, and each run prepares its own.

    Raises:
        UsageError: wrong or missing files, or a tokenizer that cannot be loaded.
    """
    seen: dict[str, int] = {}
    prepared: dict[str, Prepared] = {}
    ordered: list[tuple[int, str, Job]] = []
    for directory, job in jobs.items():
        task = TASKS[job.task]
        name = name_data(replace(task, reusable=True), job.recipe)
        if name not in seen:
            seen[name] = len(seen)
            data = prepare(task, job.recipe, report)
            if task.reusable:
                prepared[name] = data
        ordered.append((seen[name], directory, replace(job, data=name if task.reusable else "")))
    ordered.sort(key=lambda entry: entry[0])
    return {directory: job for _, directory, job in ordered}, prepared


# --- Which run wins ---------------------------------------------------------------------------------------------------


def group_cells(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each row and task."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row, cell.task), []).append(cell)
    return list(groups.values())


def list_scores(cell: Cell, states: Mapping[str, State]) -> dict[str, float]:
    """Directory -> score of the cell's finished runs."""
    done = {directory: states[directory] for directory in cell.runs.values()}
    return {directory: state.metrics["score"] for directory, state in done.items() if state.status == "finished"}


def choose(study: Study, group: Sequence[Cell], states: Mapping[str, State]) -> tuple[Cell, str] | None:
    """The winner among the cells of a row and task, with its best run's directory; None if no run has finished.

    Of equals the first wins, so that the order in which runs finish decides nothing.
    """
    sign = -1 if group and TASKS[group[0].task].lower_is_better else 1
    summary = max if study.select == "best" else statistics.fmean
    winner, most = None, -math.inf
    for cell in group:
        scores = {directory: sign * score for directory, score in list_scores(cell, states).items()}
        if scores and (value := summary(scores.values())) > most:
            winner, most = (cell, max(scores, key=scores.__getitem__)), value
    return winner


def prune(study: Study, group: Sequence[Cell], states: Mapping[str, State], output: Path) -> None:
    """Removes what the finished runs of a row and task need no more, and the weights of those that can win no more.

    Where means are compared, a cell with a run to come, or to be tried again, can still win with its best run.
    """
    runs = [directory for cell in group for directory in cell.runs.values()]
    ended = [directory for directory in runs if states[directory].metrics is not None]
    for directory in ended:
        for model in (
            *(output / directory).glob("checkpoint-*"),
            output / directory / FIRST,
            output / directory / BEST,
        ):
            shutil.rmtree(model, ignore_errors=True)
    if study.keep == "all":
        return
    waits = [cell for cell in group if study.select == "mean" and len(list_scores(cell, states)) < len(cell.runs)]
    rivals = [[cell for cell in group if cell not in waits], *([cell] for cell in waits)]
    winners = {found[1] for rival in rivals if (found := choose(study, rival, states))}
    for directory in ended:
        if directory not in winners:
            for weights in (output / directory).glob("model*.safetensors*"):
                weights.unlink(missing_ok=True)


# --- The results ------------------------------------------------------------------------------------------------------


def summarize(study: Study, cells: Sequence[Cell], states: Mapping[str, State]) -> dict[str, Any]:
    """What study.json holds: plain values that repeat exactly, without times and hardware.

    definition: as in study.toml.
    finished: whether every run is finished or failed; runs, failed: how many there are, and how many have failed.
    columns: task -> its metric, the metric's name and unit, the data it is measured on, the paper's values.
    cells: row, task, setting, directory; runs: each with seed, directory, status and metrics, failure, or update,
        updates and loss; over the finished ones n, failed, mean, sd (n - 1), best and at_or_below_majority, null where
        there is none.
    chosen: for each row and task the winning cell and run, and of how many settings and runs it is the best.
    """
    winners = [(group, choose(study, group, states)) for group in group_cells(cells)]
    status = [state.status for state in states.values()]
    return {
        "definition": define(study),
        "finished": all(name in ("finished", "failed") for name in status),
        "runs": len(status),
        "failed": status.count("failed"),
        "columns": {name: describe_column(TASKS[name]) for name in study.tasks},
        "cells": [summarize_cell(cell, states) for cell in cells],
        "chosen": [describe_winner(group, *winner, states) for group, winner in winners if winner],
    }


def describe_column(task: Task) -> dict[str, Any]:
    """What the head of a task's column says."""
    row = task.find_row(task.metric)
    return {
        "metric": task.metric,
        "name": row.name,
        "unit": row.unit,
        "lower_is_better": task.lower_is_better,
        "split": next(iter(task.splits)),
        "paper": dict(row.paper),
    }


def summarize_cell(cell: Cell, states: Mapping[str, State]) -> dict[str, Any]:
    """A cell with its runs and the statistics over those that have finished."""
    runs = [{"seed": seed, "directory": path} | describe_state(states[path]) for seed, path in cell.runs.items()]
    done = [states[path] for path in cell.runs.values() if states[path].status == "finished"]
    scores = [state.metrics["score"] for state in done]
    lower = TASKS[cell.task].lower_is_better
    poor = [is_poor(state.metrics) for state in done if "majority_score" in state.metrics]
    return {
        "row": cell.row,
        "task": cell.task,
        "setting": dict(cell.setting),
        "directory": cell.directory,
        "runs": runs,
        "n": len(scores),
        "failed": sum(states[path].status == "failed" for path in cell.runs.values()),
        "mean": statistics.fmean(scores) if scores else None,
        "sd": statistics.stdev(scores) if len(scores) > 1 else None,
        "best": (min(scores) if lower else max(scores)) if scores else None,
        "at_or_below_majority": sum(poor) if poor else None,
    }


def is_poor(metrics: Mapping[str, Any]) -> bool:
    """Whether one of a run's scores is no better than what the majority class has (`majority_…`)."""
    least = {key.removeprefix("majority_"): value for key, value in metrics.items() if key.startswith("majority_")}
    return any(metrics[key] <= value for key, value in least.items())


def describe_state(state: State) -> dict[str, Any]:
    """A run's state as study.json has it."""
    if state.status == "finished":
        return {"status": state.status, "metrics": dict(state.metrics)}
    if state.status == "failed":
        return {"status": state.status, "failure": state.reason}
    if state.status == "running":
        return {"status": state.status, "update": state.done, "updates": state.total, "loss": state.loss}
    return {"status": state.status}


def describe_winner(group: Sequence[Cell], cell: Cell, run: str, states: Mapping[str, State]) -> dict[str, Any]:
    """The chosen cell and run of a row and task, and what they were chosen from."""
    scored = [scores for other in group if (scores := list_scores(other, states))]
    return {
        "row": cell.row,
        "task": cell.task,
        "setting": dict(cell.setting),
        "cell": cell.directory,
        "run": run,
        "seed": next(seed for seed, directory in cell.runs.items() if directory == run),
        "score": states[run].metrics["score"],
        "of_settings": len(scored),
        "of_runs": sum(map(len, scored)),
    }


def describe_score(name: str, state: State) -> str:
    """A finished run's score in words."""
    row = TASKS[name].find_row(TASKS[name].metric)
    return f"{row.name} {row.show(state.metrics['score'])}{' %' if row.unit else ''}"
