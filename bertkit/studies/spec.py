"""Define a study: rows (variants of a recipe) x columns (tasks) x settings (a grid), each with some seeds.

A study is a TOML file, or a dictionary of the same form:

    note = "RTE stands for MRPC."  # a note for the reader of the table
    average = ["RTE", "MRPC"]      # adds a last column to the table: the mean of these columns
    seeds = [42, 43, 44]           # or restarts = 3: three consecutive seeds, beginning with the recipe's
    select = "best"                # choose the setting with the best run on dev (4.1), or with the best "mean"
    keep = "chosen"                # keep the weights of the chosen run of each row and column, or of "all" runs
    num_cpus = 1                   # for each run on Ray
    num_gpus = 2                   # for each run, or a fraction; by default 1 where there are GPUs
    data_root = "data"             # holds the folder of each task, and text/ for pretrainings that name no corpus
    [recipe]                       # shared by all runs
    batch_size = 32
    [grid]                         # every combination is a setting
    "train.learning_rate" = [5e-5, 3e-5, 2e-5]
    [[column]]                     # at least one
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
    [[row]]                        # an ensemble: the answers of four finished runs of a row, of its first seeds
    name = "No NSP, four models"
    ensemble = { "No NSP" = 4 }
    [cited]                        # other systems' values; they may have columns of their own
    "human" = { "SQuAD" = 91.2 }

A run's recipe is the task's < `[recipe]` < `[column.recipe]` < `[row.recipe]` < the setting < the command line; that of
a pretraining is the task's < `[pretrain]` < `[row.pretrain]` < `pretrain` of the command line. Rows whose pretrainings
have the same recipe share one, and columns of the same task with the same recipe share their runs. If rows start from
pretrainings, a column of the task pretrain shows these and has no runs of its own.
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from bertkit.errors import UsageError, locate_refusal
from bertkit.reports.tables import ScoreLine, find_row
from bertkit.studies.tables import AVERAGE
from bertkit.system.differences import LONGEST_NAME, expand_recipe, show_toml
from bertkit.tasks import TASKS
from bertkit.tasks.task import Task
from bertkit.training.recipe import TABLES, TOP_KEYS, RecipePart, check, check_value, merge, reword

PRETRAIN = "pretrain"  # the task, the keys, and the folder of the pretrainings
# The keys that the command line reaches too.
OPTIONS = ("column", "seeds", "restarts", "select", "keep", "num_cpus", "num_gpus", "data_root", PRETRAIN)
HARDWARE = ("num_cpus", "num_gpus")  # keys that may change without making it another study
LONGEST_DIRECTORY = 150  # bytes in a directory's name; common file systems allow 255
STUDY_FILE, TABLE, PICTURE, CURVE = "study.toml", "table.md", "heatmap.png", "curve.png"
Resource = Annotated[float, msgspec.Meta(ge=0)]
Published = dict[str, Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]]  # column -> value in the table's unit


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column of the table: a metric of a task; the module's docstring explains the keys."""

    name: str
    task: str
    metric: str = ""
    paper: str = ""
    recipe: RecipePart = {}

    @property
    def key(self) -> str:
        """Return the key of the column's value in metrics.json."""
        return self.metric or "score"

    @property
    def row(self) -> ScoreLine:
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


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of the table: a variant of the recipe."""

    name: str = ""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0  # the update of the pretraining to start from; 0 means the last
    # Mapping from row to the number of its runs that this row combines; empty if it has runs of its own
    ensemble: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    paper: Published = {}  # the paper's values
    recipe: RecipePart = {}  # the row's own keys; in a study also those of the command line
    # The recipe of the pretraining that the row starts from, not yet complete; None without one
    pretrain: RecipePart | None = None


class Study(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"columns": "column", "variants": "row"},
):
    """The definition of a study; `make_study` checks one and completes it, the module's docstring explains the keys."""

    note: str = ""
    average: tuple[str, ...] = ()
    seeds: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**32)], ...] = ()
    select: Literal["best", "mean"] = "best"
    keep: Literal["chosen", "all"] = "chosen"
    num_cpus: Resource = 1.0
    num_gpus: Resource | None = None
    data_root: str = ""
    grid: dict[str, Any] = {}
    recipe: RecipePart = {}
    columns: Annotated[tuple[Column, ...], msgspec.Meta(min_length=1)]
    variants: Annotated[tuple[Variant, ...], msgspec.Meta(min_length=1)] = (Variant(),)  # the rows
    restarts: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1  # 1 once it is in `seeds`
    pretrain: RecipePart | None = None  # None once it is in `variants`
    cited: dict[str, Published] = {}

    @property
    def rows(self) -> dict[str, Variant]:
        """Return the rows by name."""
        return {row.name: row for row in self.variants}

    @property
    def pretrains(self) -> bool:
        """Return whether any row starts from a pretraining."""
        return any(row.pretrain is not None for row in self.variants)


# --- Common definitions -----------------------------------------------------------------------------------------------


def define_runs(
    tasks: Sequence[str],
    *,
    folds: int = 0,
    grid: Mapping[str, Any] | None = None,
    restarts: int = 1,
    budget: str | None = None,
    search: int = 0,
    together: bool = False,
) -> dict[str, Any] | None:
    """Return the definition of the study that some options ask for; None for a single run.

    Args:
        together: Whether the tasks are a study even without other options.
    """
    kinds = {
        "--budget and --search": budget or search,
        "--folds": folds,
        "--grid, --restarts and --task all": grid or restarts > 1 or together,
    }
    if len(given := [kind for kind, is_given in kinds.items() if is_given]) > 1:
        raise UsageError(f"{given[0]} cannot be combined with {given[1]}; leave one out")
    if folds:
        return define_folds(tasks[0], {}, folds)
    if budget or search or not given:
        return None
    return {"column": define_columns(*tasks), "restarts": restarts, "recipe": {}, "grid": grid or {}}


def define_columns(*tasks: str) -> list[dict[str, str]]:
    """Return the columns of a study that shows each of these tasks under its own name."""
    return [{"name": task, "task": task} for task in tasks]


def check_searchable(task: Task, data: Mapping[str, Any]) -> None:
    """Check that a search can be made for a task with these options of `[data]`."""
    others = [key for key in ("features", "extra_train", "trial_rows") if data.get(key)]
    if not task.metric:
        others.append(f"--task {task.name}")
    if others:
        raise UsageError(f"--search and --budget cannot be combined with {others[0]}; leave it out")


def define_folds(task: str, recipe: RecipePart, folds: int) -> dict[str, Any]:
    """Return the definition of a study of a task with a row for each fold."""
    if folds < 2:
        raise UsageError(f"--folds is {folds}; give at least 2")
    rows = [{"name": f"fold {fold + 1}", "recipe": {"data": {"fold": fold}}} for fold in range(folds)]
    return {"column": define_columns(task), "recipe": merge(recipe, {"data": {"folds": folds}}), "row": rows}


# --- Reading and checking ---------------------------------------------------------------------------------------------


def make_study(definition: Mapping[str, Any], *given: Mapping[str, Any], where: str = "study") -> Study:
    """Make and check the study of a definition.

    Args:
        given: Values of the command line: recipes, which override all others, and OPTIONS. A single value for an axis
            of the grid removes the axis; a list replaces its values.
        where: The beginning of the messages.
    """
    recipe = merge(*given)
    options = {key: recipe.pop(key) for key in OPTIONS if key in recipe}
    if options.keys() & {"seeds", "restarts"}:
        definition = {key: value for key, value in definition.items() if key not in ("seeds", "restarts")}
    options.pop(PRETRAIN, None)
    with locate_refusal(where):
        asked = merge(*(check_value(PRETRAIN, part[PRETRAIN], dict) for part in given if PRETRAIN in part))
        study = read_definition({**definition, **options})
        check_columns(study)
        study = replace(study, variants=read_rows(study, asked))
        own = [column for column in study.columns if not (study.pretrains and column.task == PRETRAIN)] or study.columns
        axes, recipe = fix_axes(read_grid(study.grid), recipe)
        check_recipes(study, own, recipe, axes)
        first = TASKS[own[0].task]
        rows = tuple(replace(row, recipe=drop_seed(merge(row.recipe, recipe))) for row in study.variants)
        made = replace(
            study,
            restarts=1,
            pretrain=None,
            variants=rows,
            seeds=choose_seeds(study, merge(study.recipe, recipe), first),
            grid={axis: tuple(convert(axis, value, first) for value in items) for axis, items in axes.items()},
            recipe=drop_seed(merge(study.recipe)),
        )
        check_ensembles(made)
        return made


def define(study: Study) -> dict[str, Any]:
    """Return the definition from which `make_study` makes this study."""
    definition = expand_recipe({**msgspec.to_builtins(study), "restarts": None})
    return {key: value for key, value in definition.items() if value not in ("", {}, [], [{}])}


def read_definition(values: Mapping[str, Any]) -> Study:
    """Return a study whose keys and values have their names and types, and nothing more."""
    known = Study.__struct_encode_fields__
    for key in values:
        if key not in known:
            remedy = "it belongs in [recipe]" if key in (*TABLES, *TOP_KEYS) else propose(key, known)
            raise UsageError(f"unknown key {key[:LONGEST_NAME]!r}; {remedy}")
    try:
        return msgspec.convert(values, Study)
    except msgspec.ValidationError as error:
        raise UsageError(f"{reword(error)}; correct it there") from None


def propose(name: str, names: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the nearest of these names, or all of them."""
    names = list(names)
    nearest = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"expected {', '.join(names)}"


def check_names(tables: Sequence[Column | Variant], kind: str) -> None:
    """Check that the name of each table gives a directory of its own."""
    name, number = Counter(name_directory(table.name) for table in tables).most_common(1)[0]
    if number > 1:
        raise UsageError(f"two {kind} tables are called {name!r}; leave one out, or rename it")


# --- Columns and rows -------------------------------------------------------------------------------------------------


def check_columns(study: Study) -> None:
    """Check the tasks, metrics and names of the columns, and the names of those that are averaged."""
    scored = {name: task for name, task in TASKS.items() if task.metric}
    for column in study.columns:
        if column.task not in scored:
            raise UsageError(f"unknown task {column.task!r}; {propose(column.task, scored)}")
        task = scored[column.task]
        known = dict.fromkeys([task.metric, *(row.key for row in task.table)])
        if column.metric and column.metric not in known:
            raise UsageError(f"unknown metric {column.metric!r}; {task.name} has {', '.join(known)}")
    check_names(study.columns, "[[column]]")
    known = {column.name: column for column in study.columns if column.row.unit}
    for name in study.average:
        if name not in known:
            raise UsageError(f"average names {name!r}, which is not a column in percent; {propose(name, known)}")


def read_rows(study: Study, asked: RecipePart) -> tuple[Variant, ...]:
    """Read the rows; `asked` is the command line's recipe for their pretrainings."""
    check_names(study.variants, "[[row]]")
    rows = tuple(read_row(row, study.pretrain, asked) for row in study.variants)
    if (asked or study.pretrain is not None) and all(row.pretrain is None for row in rows):
        raise UsageError("pretrain is given, but no row starts with a pretraining; leave it out")
    known = [column.name for column in study.columns]
    if study.average:
        known.append(AVERAGE)
    known += [name for values in study.cited.values() for name in values]
    for row in rows:
        if unknown := [name for name in row.paper if name not in known]:
            raise UsageError(
                f"paper of the row {row.name!r} names {unknown[0]!r}, not a column; {propose(unknown[0], known)}"
            )
    return rows


def read_row(row: Variant, shared: RecipePart | None, asked: RecipePart) -> Variant:
    """Return a row with its pretraining; `shared` is the table `[pretrain]`, or None without it."""
    last = 0
    if row.pretrain is not None or (shared is not None and "checkpoint" not in row.recipe and not row.ensemble):
        row = replace(row, pretrain=merge(shared or {}, row.pretrain or {}, asked))
        check(row.pretrain, TASKS[PRETRAIN], f"pretrain of the row {row.name!r}")
        last = merge(TASKS[PRETRAIN].recipe, row.pretrain)["train"]["max_steps"]
    if row.step > max(last, 0):
        found = f"its pretraining has max_steps = {last}" if last else "it has no pretraining"
        raise UsageError(f"the row {row.name!r} has step = {row.step}, but {found}; give a step up to max_steps")
    return row


def check_ensembles(study: Study) -> None:
    """Check that ensembles combine runs of the study, and of tasks whose answers can be combined."""
    known, most = [row.name for row in study.variants if not row.ensemble], len(study.seeds)
    for row, column in itertools.product(study.variants, study.columns):
        if row.ensemble and not TASKS[column.task].is_combinable:
            raise UsageError(f"the row {row.name!r} is an ensemble, but {column.task} has none; leave one of them out")
        for name, number in row.ensemble.items():
            if name not in known:
                raise UsageError(f"ensemble of the row {row.name!r} names {name!r}, not a row; {propose(name, known)}")
            if number > most:
                raise UsageError(f"the row {row.name!r} takes {number} runs of {name!r}, not {most}; give more seeds")


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
        if axis in (*TABLES, "train.seed", "task"):
            raise UsageError(f"[grid] {axis} is not an axis; name a key of recipes, and write seeds above the tables")
        check_axis(axis, values)
    return axes


def check_axis(axis: str, values: Any) -> None:
    """Check that an axis has a list of values."""
    if not isinstance(values, list) or not values:
        raise UsageError(f"[grid] {axis} = {show_toml(values)} must be a list with at least one value")


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


def choose_seeds(study: Study, shared: RecipePart, task: Task) -> tuple[int, ...]:
    """Return the seeds of every cell: those given, or `restarts` consecutive ones from the recipe's seed on."""
    first = shared.get("train", {}).get("seed")
    if study.seeds and (study.restarts > 1 or first is not None):
        raise UsageError("seeds are given, and restarts or train.seed too; leave one out")
    first = task.recipe["train"]["seed"] if first is None else first
    return study.seeds or tuple(range(first, first + study.restarts))


# --- Conflicts between recipes ----------------------------------------------------------------------------------------


def check_recipes(
    study: Study, columns: Sequence[Column], given: RecipePart, axes: Mapping[str, Sequence[Any]]
) -> None:
    """Check that the tasks know every key, that every value has its type, and that the recipes do not conflict.

    Args:
        columns: Those with runs of their own.
        given: The recipe of the command line.
    """
    shared = {"[recipe]": study.recipe, "the command line": given}
    of_rows = {f"[row.recipe] of {row.name!r}": row.recipe for row in study.variants}
    of_columns = {f"[column.recipe] of {column.name!r}": column.recipe for column in columns}
    for column, own in zip(columns, of_columns, strict=True):
        for where, part in {**shared, own: column.recipe, **of_rows}.items():
            check(part, TASKS[column.task], where)
    for where, part in {**of_columns, **of_rows}.items():
        if "seed" in part.get("train", {}):
            raise UsageError(f"{where} sets train.seed; write seeds above the tables")
    started = {f"[row.recipe] of {row.name!r}": row.recipe for row in study.variants if row.pretrain is not None}
    for where, part in {**shared, "[grid]": axes, **of_columns, **started}.items():
        if study.pretrains and "checkpoint" in part:
            raise UsageError(f"{where} gives a checkpoint, but a row starts with a pretraining; leave one out")


def name_directory(name: str) -> str:
    """Return the directory name of a row's or a column's name."""
    return re.sub(r"[^\w+-]+", "-", name).rstrip("-").lstrip("+-").lower()
