"""Define a study: rows (variants of a recipe) x columns (tasks) x settings (a grid), each with some seeds.

A study is a TOML file, or a dictionary of the same form:

    note = "RTE stands for MRPC."  # a note for the reader of the table
    tasks = ["rte", "mrpc"]        # the columns, in their short form
    average = ["rte", "mrpc"]      # adds a last column to the table: the mean of these columns
    seeds = [42, 43, 44]           # or restarts = 3: three consecutive seeds, beginning with the recipe's
    select = "best"                # choose the setting with the best run on dev (4.1), or with the best "mean"
    keep = "chosen"                # keep the weights of the chosen run of each row and column, or of "all" runs
    num_cpus = 1                   # for each run on Ray
    num_gpus = 0                   # may be a fraction
    data_root = "data"             # holds the folder of each task, and text/ for pretrainings that name no corpus
    [recipe]                       # shared by all runs
    batch_size = 32
    [grid]                         # every combination is a setting
    "train.learning_rate" = [5e-5, 3e-5, 2e-5]
    [[column]]                     # the columns, in their long form
    name = "SQuAD"                 # the column's heading
    task = "squad1"
    metric = "f1"                  # a key of metrics.json; the task's score by default
    paper = "dev"                  # a note on the paper's values
    [column.recipe]
    [pretrain]                     # the recipe of the pretraining that rows start from
    batch_size = 256
    [[row]]                        # a variant; without any, the study has one unnamed row
    name = "No NSP"
    paper = { "SQuAD" = 87.9 }     # the paper's values, in the table's unit (percent for most metrics)
    step = 30_000                  # start from this update of the pretraining instead of its end (Figure 5)
    [row.pretrain]                 # changes to this row's pretraining
    data.objective = "mlm"
    [row.recipe]                   # may name a checkpoint: then the row starts from it, not from a pretraining
    bilstm = true

A run's recipe is the task's < `[recipe]` < `[column.recipe]` < `[row.recipe]` < the setting < the command line; that of
a pretraining is the task's < `[pretrain]` < `[row.pretrain]` < `pretrain` of the command line. Rows whose pretrainings
have the same recipe share one, and columns of the same task with the same recipe share their runs. If rows start from
pretrainings, a column of the task pretrain shows these and has no runs of its own.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bertkit.errors import UsageError, make_printable
from bertkit.reports.tables import ScoreRow, find_row
from bertkit.studies.tables import AVERAGE
from bertkit.system.differences import LONGEST_NAME, LONGEST_TEXT, expand_recipe
from bertkit.tasks import TASKS
from bertkit.tasks.option import check_range
from bertkit.tasks.task import Task
from bertkit.training.recipe import TABLES, TOP_KEYS, RecipePart, check, check_value, merge

PRETRAIN = "pretrain"  # the task, the keys, and the folder of the pretrainings
OPTIONS = {  # the keys that the command line reaches too
    "tasks": list[str],
    "seeds": list[int],
    "restarts": int,
    "select": Literal["best", "mean"],
    "keep": Literal["chosen", "all"],
    "num_cpus": float,
    "num_gpus": float,
    "data_root": str,
    PRETRAIN: dict,
}
SPEC_KEYS = {"note": str, "average": list[str], "recipe": dict, "grid": dict, "column": list[dict], "row": list[dict]}
COLUMN_KEYS = {"name": str, "task": str, "metric": str, "paper": str, "recipe": dict}
ROW_KEYS = {"name": str, "step": int, "paper": dict[str, float], PRETRAIN: dict, "recipe": dict}
HARDWARE = ("num_cpus", "num_gpus")  # keys that may change without making it another study
LEAST_NUMBERS = {"restarts": 1, "num_cpus": 0, "num_gpus": 0}
MOST_RESTARTS = 1000
LONGEST_DIRECTORY = 150  # bytes in a directory's name; common file systems allow 255


@dataclass(frozen=True)
class Column:
    """A column of the table: a metric of a task.

    Attributes:
        name: The column's heading.
        metric: A key of metrics.json; empty for the task's score.
        paper: A note on the paper's values.
    """

    name: str
    task: str
    metric: str = ""
    paper: str = ""
    recipe: RecipePart = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the key of the column's value in metrics.json."""
        return self.metric or "score"

    @property
    def row(self) -> ScoreRow:
        """Return the score row that formats the column's values."""
        return find_row(TASKS[self.task].table, self.metric or TASKS[self.task].metric)

    @property
    def split(self) -> str:
        """Return the split that the values are measured on; a split named "{}_mm", for example, has accuracy_mm."""
        splits = TASKS[self.task].splits
        ends = {split: form.partition("{}") for split, form in splits.items() if form != "{}"}
        fits = (s for s, (a, _, b) in ends.items() if self.metric.startswith(a) and self.metric.endswith(b))
        return next(fits, next(iter(splits)))

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller value is better, as for a loss or a perplexity."""
        return TASKS[self.task].lower_is_better and not self.row.unit


@dataclass(frozen=True)
class Variant:
    """A row of the table: a variant of the recipe.

    Attributes:
        recipe: The row's own keys, including those of the command line.
        pretrain: The recipe of the pretraining that the row starts from, not yet complete; None without one.
        step: The update of that pretraining to start from; 0 means the last.
        paper: Mapping from column to the paper's value, in the table's unit.
    """

    recipe: RecipePart = field(default_factory=dict)
    pretrain: RecipePart | None = None
    step: int = 0
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """The checked definition of a study.

    Attributes:
        rows: Rows by name.
        grid: Mapping from axis, such as "train.learning_rate" or "batch_size", to its values.
        recipe: Keys that all runs share.
        select: Chooses the setting with the best run ("best") or with the best mean ("mean").
        keep: Keeps the weights of the chosen run of each row and column ("chosen"), or of every run ("all").
        num_cpus, num_gpus: Resources of each run on Ray.
        data_root: The folder that holds each task's folder; empty if the recipes name the data.
        average: The columns whose mean is the table's last column.
        note: A note for the reader of the table.
    """

    columns: tuple[Column, ...]
    seeds: tuple[int, ...]
    rows: Mapping[str, Variant]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    recipe: RecipePart = field(default_factory=dict)
    select: str = "best"
    keep: str = "chosen"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    data_root: str = ""
    average: tuple[str, ...] = ()
    note: str = ""

    @property
    def pretrains(self) -> bool:
        """Return whether any row starts from a pretraining."""
        return any(row.pretrain is not None for row in self.rows.values())

    @property
    def is_short(self) -> bool:
        """Return whether every column can be written in the short form, `tasks`."""
        return all(column == Column(column.task, column.task) for column in self.columns)


# --- Reading and checking ---------------------------------------------------------------------------------------------


def make_study(definition: Mapping[str, Any], *given: Mapping[str, Any], where: str = "study") -> Study:
    """Make and check the study of a definition.

    Args:
        given: Values of the command line: recipes, which override all others, and OPTIONS. A single value for an axis
            of the grid removes the axis; a list replaces its values.
        where: The beginning of the messages.

    Raises:
        UsageError: There is an unknown key, task, metric or column, a wrong type, an axis without values, a duplicate,
            seeds or columns given in two ways, or a step without a pretraining.
    """
    recipe = merge(*given)
    options = {key: recipe.pop(key) for key in OPTIONS if key in recipe}
    if options.keys() & {"seeds", "restarts"}:
        definition = {key: value for key, value in definition.items() if key not in ("seeds", "restarts")}
    options.pop(PRETRAIN, None)
    try:
        asked = merge(*(check_value(PRETRAIN, part[PRETRAIN], dict) for part in given if PRETRAIN in part))
        values = check_keys({**definition, **options})
        columns = read_columns(values)
        rows = read_rows(values, asked, columns)
        own = find_own(columns, rows) or columns
        axes, recipe = fix_axes(read_grid(values.get("grid", {})), recipe)
        shared = values.get("recipe", {})
        check_recipes({"[recipe]": shared, "the command line": recipe}, own, rows, axes, values.get("data_root", ""))
        check_average(values.get("average", []), columns)
        first = TASKS[own[0].task]
        seeds = choose_seeds(values, merge(shared, recipe), first)
        return Study(
            columns=tuple(columns),
            seeds=seeds,
            rows={name: replace(row, recipe=drop_seed(merge(row.recipe, recipe))) for name, row in rows.items()},
            grid={axis: tuple(convert(axis, value, first) for value in items) for axis, items in axes.items()},
            recipe=drop_seed(merge(shared)),
            average=tuple(values.get("average", [])),
            **{key: values[key] for key in ("select", "keep", *HARDWARE, "data_root", "note") if key in values},
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def define(study: Study) -> dict[str, Any]:
    """Return the definition from which `make_study` makes this study."""
    given = {key: getattr(study, key) for key in ("note", "average", "seeds", "select", "keep", *HARDWARE, "data_root")}
    given |= {"grid": study.grid, "recipe": study.recipe}
    if study.is_short:
        given["tasks"] = [column.task for column in study.columns]
    else:
        given["column"] = [drop_empty({key: getattr(column, key) for key in COLUMN_KEYS}) for column in study.columns]
    rows = []
    for name, row in study.rows.items():
        values = drop_empty({"step": row.step or None, "paper": row.paper, "recipe": row.recipe})
        rows.append({"name": name} | values | {PRETRAIN: row.pretrain})
    return drop_empty(given | {"row": [] if study.rows == {"": Variant()} else rows})


def drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for TOML, without None and without empty strings, lists and tables."""
    return {key: value for key, value in expand_recipe(values).items() if value not in ("", {}, [])}


def check_keys(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Check that every key is known and every value has its type and is in its range; return the definition."""
    for key in definition:
        if key in TABLES or key in TOP_KEYS:
            raise UsageError(f"unknown key {key!r}; it belongs in [recipe]")
    values = check_table(definition, OPTIONS | SPEC_KEYS)
    for key, least in LEAST_NUMBERS.items():
        if key in values:
            check_range(f"{key} is {values[key]:g}", values[key], least)
    return values


def check_table(values: Mapping[str, Any], kinds: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Check that a table's keys are known and its values have their types; return the table.

    `place` is for the messages and is empty at the top level.
    """
    for key in values:
        if key not in kinds:
            home = f" in {place}" if place else ""
            raise UsageError(f"unknown key {key[:LONGEST_NAME]!r}{home}; {propose(key, kinds)}")
    return {key: check_value(key, value, kinds[key], place and f"{place} ") for key, value in values.items()}


def read_tables(key: str, tables: Sequence[Mapping[str, Any]], kinds: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the [[column]] or [[row]] tables, and return them by place.

    Each table must have a name of its own and no seed.
    """
    if not tables:
        raise UsageError(f"{key} = [] is empty; leave it out")
    found = {}
    for number, table in enumerate(tables, start=1):
        place = f"[[{key}]] {number}"
        found[place] = checked = check_table(table, kinds, place)
        if "name" not in checked:
            raise UsageError(f"{place} has no name; each one needs its own")
        train = checked.get("recipe", {}).get("train")
        if isinstance(train, dict) and "seed" in train:
            raise UsageError(f"{place} sets train.seed; seeds belong to the study: write seeds above the tables")
    check_names([table["name"] for table in found.values()], f"[[{key}]]")
    return found


def propose(name: str, names: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest of these names, or all of them."""
    names = list(names)
    nearest = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"expected {', '.join(names)}"


def check_names(names: Sequence[str], place: str) -> None:
    """Check that every name gives a valid directory name, and that no two give the same one."""
    directories = [name_directory(name) for name in names]
    if len(names) > 1 and not all(directories):
        raise UsageError(f"a {place} has a name without letters or digits, which its directory needs; change it")
    for name, directory in zip(names, directories, strict=True):
        if (size := len(directory.encode())) > LONGEST_DIRECTORY:
            raise UsageError(
                f"the name {name[:40]!r}… of a {place} has {size} bytes; shorten it to {LONGEST_DIRECTORY}, the limit "
                "for the name of a directory"
            )
    if twice := find_twice(directories):
        raise UsageError(f"two of the {place} tables are called {twice[0]!r}; give each its own name")


def find_twice(items: Sequence[Any]) -> list[Any]:
    """Return the items that occur in the sequence more than once."""
    counts = Counter(json.dumps(item, default=str, sort_keys=True) for item in items)
    return [item for item in items if counts[json.dumps(item, default=str, sort_keys=True)] > 1]


# --- Columns ----------------------------------------------------------------------------------------------------------


def read_columns(values: Mapping[str, Any]) -> list[Column]:
    """Read the columns, in their short or long form."""
    if "tasks" in values and "column" in values:
        raise UsageError("both tasks and [[column]] are given; leave one out")
    if "column" not in values:
        names = values.get("tasks", [])
        if not names:
            raise UsageError(f'no tasks; write for example tasks = ["{next(iter(TASKS))}"]')
        if twice := find_twice(names):
            raise UsageError(f"tasks has {twice[0]!r} twice; leave one out")
        return [Column(name, check_task(name, "tasks")) for name in names]
    columns = []
    for place, checked in read_tables("column", values["column"], COLUMN_KEYS).items():
        if "task" not in checked:
            raise UsageError(f"{place} has no task; each column needs one")
        task = TASKS[check_task(checked["task"], place)]
        known = dict.fromkeys([task.metric, *(row.key for row in task.table)])
        if (metric := checked.get("metric", task.metric)) not in known:
            raise UsageError(f"unknown metric {metric!r} in {place}; {task.name} has {', '.join(known)}")
        columns.append(Column(**checked))
    return columns


def check_task(name: str, place: str) -> str:
    """Check that a task exists and has a score, and return its name.

    Raises:
        UsageError: There is no such task, or it has no score.
    """
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r} in {place}; {propose(name, TASKS)}")
    if not TASKS[name].metric:
        raise UsageError(f"{name} has no labels and so no score to compare; leave it out of {place}")
    return name


def find_own(columns: Sequence[Column], rows: Mapping[str, Variant]) -> list[Column]:
    """Return the columns that have runs of their own instead of showing the rows' pretrainings.

    Raises:
        UsageError: A column that shows the pretrainings has a recipe, or it would have to show a step's score.
    """
    if all(row.pretrain is None for row in rows.values()):
        return list(columns)
    stepped = next((name for name, row in rows.items() if row.step), None)
    for column in columns:
        if column.task == PRETRAIN and column.recipe:
            raise UsageError(f"the column {column.name!r} shows the rows' pretrainings; leave its recipe out")
        if column.task == PRETRAIN and stepped is not None:
            raise UsageError(
                f"the column {column.name!r} shows the end of each pretraining, and the row {stepped!r} starts from a "
                "step of it; leave one of the two out"
            )
    return [column for column in columns if column.task != PRETRAIN]


def check_average(names: Sequence[str], columns: Sequence[Column]) -> None:
    """Check that the average is over at least two different columns, all in percent."""
    known = {column.name: column for column in columns}
    for name in names:
        if name not in known:
            raise UsageError(f"average names {name!r}, which is not a column; {propose(name, known)}")
        if not known[name].row.unit:
            raise UsageError(f"average names {name!r}, which is not in percent; leave it out")
    if names and AVERAGE in known:
        raise UsageError(f"a column is called {AVERAGE!r}, the name of the average; rename it")
    if len(names) == 1 or find_twice(names):
        raise UsageError(f"average = {json.dumps(names)} must name at least two columns, each once")


# --- Rows -------------------------------------------------------------------------------------------------------------


def read_rows(values: Mapping[str, Any], asked: RecipePart, columns: Sequence[Column]) -> dict[str, Variant]:
    """Read the rows by name; `asked` is the command line's recipe for their pretrainings."""
    tables = read_tables("row", values.get("row", [{"name": ""}]), ROW_KEYS)
    rows = {table["name"]: read_row(table, place, values.get(PRETRAIN), asked) for place, table in tables.items()}
    begun = [name for name, row in rows.items() if row.pretrain is not None]
    if not begun and (asked or PRETRAIN in values):
        raise UsageError("pretrain is given, but no row starts with a pretraining; leave it out")
    tops = rows if len(rows) > 1 else [column.name for column in columns if column.task != PRETRAIN]
    if begun and PRETRAIN in map(name_directory, tops):
        kind = "[[row]]" if len(rows) > 1 else "[[column]]"
        raise UsageError(f"a {kind} is called {PRETRAIN!r}, the folder of the pretrainings; rename it")
    known = [column.name for column in columns] + [AVERAGE] * bool(values.get("average"))
    for name, row in rows.items():
        for column, value in row.paper.items():
            if column not in known:
                raise UsageError(f"paper of the row {name!r} names {column!r}, not a column; {propose(column, known)}")
            if not math.isfinite(value):
                raise UsageError(f"paper of the row {name!r} has {value} for {column!r}; give a number or leave it out")
    return rows


def read_row(table: Mapping[str, Any], place: str, shared: RecipePart | None, asked: RecipePart) -> Variant:
    """Read one row; `shared` is the table `[pretrain]`, or None without it."""
    recipe, own, step = table.get("recipe", {}), table.get(PRETRAIN), table.get("step")
    if own is not None and "checkpoint" in recipe:
        raise UsageError(f"{place} has both a pretraining and a checkpoint to start from; leave one out")
    begins = own is not None or (shared is not None and "checkpoint" not in recipe)
    pretrain = merge(shared or {}, own or {}, asked) if begins else None
    if pretrain is not None:
        where = {"[pretrain]": shared, f"[row.pretrain] of {table['name']!r}": own, "command line, pretrain": asked}
        for name, part in where.items():
            check(part or {}, TASKS[PRETRAIN], name)
    if step is not None and pretrain is None:
        raise UsageError(f"{place} has a step but no pretraining; write [row.pretrain], or leave step out")
    if step is not None:
        last = merge(TASKS[PRETRAIN].recipe, pretrain)["train"]["max_steps"]
        if not 1 <= step <= last:
            raise UsageError(
                f"{place} has step = {step}, but its pretraining has max_steps = {last}; "
                "give a step from 1 to max_steps"
            )
    return Variant(recipe, pretrain, step or 0, table.get("paper", {}))


def drop_seed(recipe: RecipePart) -> RecipePart:
    """Return the recipe without its seed."""
    train = {key: value for key, value in recipe.get("train", {}).items() if key != "seed"}
    rest = {key: value for key, value in recipe.items() if key != "train"}
    return rest | ({"train": train} if train else {})


# --- The grid and the seeds -------------------------------------------------------------------------------------------


def read_grid(grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each axis; `train.learning_rate` may be written with or without quotes."""
    axes: dict[str, Any] = {}
    for key, values in grid.items():
        nested = key in TABLES and isinstance(values, dict)
        axes |= {f"{key}.{name}": items for name, items in values.items()} if nested else {key: values}
    for axis, values in axes.items():
        if axis in TABLES:
            raise UsageError(
                f'[grid] {axis} is a table, not an axis; name one of its keys, such as "train.learning_rate"'
            )
        if axis in ("train.seed", "task"):
            raise UsageError(f"[grid] {axis} is not an axis; write {axis.rpartition('.')[2]}s above the tables")
        check_axis(axis, values)
    return axes


def check_axis(axis: str, values: Any) -> None:
    """Check that an axis has a list of values without duplicates, and at least one."""
    name = make_printable(axis)[:LONGEST_NAME]
    if not isinstance(values, list) or not values:
        shown = json.dumps(values, default=str)[:LONGEST_TEXT]
        raise UsageError(f"[grid] {name} = {shown} must be a list with at least one value")
    if twice := find_twice(values):
        raise UsageError(f"[grid] {name} has {json.dumps(twice[0], default=str)[:LONGEST_TEXT]} twice; leave one out")


def fix_axes(axes: Mapping[str, list[Any]], given: RecipePart) -> tuple[dict[str, list[Any]], RecipePart]:
    """Apply the command line's values to the axes.

    A list replaces an axis' values; a single value removes the axis and stays in the recipe.

    Returns:
        The remaining axes, and the rest of the command line's recipe.
    """
    left, rest = dict(axes), merge(given)
    for axis, values in axes.items():
        table, _, key = axis.rpartition(".")
        home = rest.get(table, {}) if table else rest
        if not isinstance(home, dict) or key not in home:
            continue
        value = home[key]
        if isinstance(value, list) and (not isinstance(values[0], list) or any(isinstance(x, list) for x in value)):
            check_axis(axis, value)
            left[axis] = home.pop(key)
        else:
            del left[axis]
    return left, rest


def set_axis(axis: str, value: Any) -> RecipePart:
    """Return the recipe in which an axis has a value."""
    table, _, key = axis.rpartition(".")
    return {table: {key: value}} if table else {key: value}


def convert(axis: str, value: Any, task: Task) -> Any:
    """Convert a value of an axis to the recipe's type: 1 becomes 1.0 for a float."""
    table, _, key = axis.rpartition(".")
    recipe = check(set_axis(axis, value), task, "[grid]")
    return recipe[table][key] if table else recipe[key]


def choose_seeds(values: Mapping[str, Any], shared: RecipePart, task: Task) -> tuple[int, ...]:
    """Return the seeds of every cell: those given, or `restarts` consecutive ones from the recipe's seed on."""
    first = shared.get("train", {}).get("seed")
    if "seeds" in values and ("restarts" in values or first is not None):
        other = "restarts" if "restarts" in values else "train.seed"
        raise UsageError(f"both seeds and {other} are given; leave one out")
    if first is None:
        first = task.recipe["train"]["seed"]
    if values.get("restarts", 1) > MOST_RESTARTS:
        raise UsageError(f"restarts is {values['restarts']:,}; it must be at most {MOST_RESTARTS:,}")
    seeds = values.get("seeds", list(range(first, first + values.get("restarts", 1))))
    if not seeds or find_twice(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise UsageError(f"seeds = {seeds} must be different whole numbers, at least one, each below 2**32")
    return tuple(seeds)


# --- Conflicts between recipes ----------------------------------------------------------------------------------------


def check_recipes(
    shared: Mapping[str, RecipePart],
    columns: Sequence[Column],
    rows: Mapping[str, Variant],
    axes: Mapping[str, Sequence[Any]],
    data_root: str,
) -> None:
    """Check that the tasks know every key, that every value has its type, and that the recipes do not conflict.

    Args:
        shared: The recipes of all runs, by their names in messages.
    """
    of_rows = {f"[row.recipe] of {name!r}": row.recipe for name, row in rows.items()}
    of_columns = {f"[column.recipe] of {column.name!r}": column.recipe for column in columns}
    for column, (name, recipe) in zip(columns, of_columns.items(), strict=True):
        task = TASKS[column.task]
        for where, part in {**shared, name: recipe, **of_rows}.items():
            check(part, task, where)
        for axis, values in axes.items():
            for value in values:
                convert(axis, value, task)
    begun = next((name for name, row in rows.items() if row.pretrain is not None), None)
    for where, part in {**shared, "[grid]": axes, **of_columns}.items():
        if begun is not None and "checkpoint" in part:
            name = f"the row {begun!r}" if begun else "the study"
            raise UsageError(f"{where} gives a checkpoint, but {name} starts with a pretraining; leave one out")
    parts = [*shared.values(), *of_columns.values(), *of_rows.values()]
    if data_root and ("data.dir" in axes or any("dir" in part.get("data", {}) for part in parts)):
        raise UsageError("both the root of all data (--data, data_root) and data.dir are given; leave one out")


def name_directory(name: str) -> str:
    """Return the directory name of a row's or a column's name."""
    return re.sub(r"[^\w+-]+", "-", name).rstrip("-").lstrip("+-").lower()


STUDY_FILE = "study.toml"
TABLE = "table.md"
PICTURE = "heatmap.png"
CURVE = "curve.png"
