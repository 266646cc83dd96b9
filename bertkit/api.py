"""The Python door: train a task on data in memory or in files, open what was trained, and use it.

    run = bertkit.train("classify", data=frame, text="review", label="stars", output="runs/stars")
    run.predict(frame)

It is the command line with keywords instead of options, and makes the same directories. Left out: printing. Lines
and progress go to callbacks; without them what matters is a `BertkitWarning`, and a notebook shows one bar.
"""

import difflib
import inspect
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bertkit.analysis.doctor import examine, expect_scores
from bertkit.data.formats.dataframes import convert_table, convert_tables, write_tables
from bertkit.data.formats.rows import SPLIT_NAMES
from bertkit.errors import BertkitWarning, UsageError, as_usage_error
from bertkit.inference.evaluate import evaluate, list_tables, load_predictor
from bertkit.inference.predictor import Predictor, flatten_result
from bertkit.model.checkpoint import load_config
from bertkit.reports.html import show_table
from bertkit.reports.tables import Table, find_main, format_text, list_shown, tabulate_scores
from bertkit.reports.verdict import describe_verdict
from bertkit.studies.folds import gather_folds
from bertkit.studies.results import check_all_finished
from bertkit.studies.runner import run_study
from bertkit.studies.search import search_or_train
from bertkit.studies.spec import STUDY_FILE, define_runs, make_study, propose
from bertkit.system.hub import find_file
from bertkit.system.progress import Report, ignore, is_notebook, show_bar
from bertkit.system.python_state import leave_as_found
from bertkit.tasks import TASKS
from bertkit.tasks.finetuning import GAIN
from bertkit.tasks.pretraining import choose_starter
from bertkit.tasks.task import Task
from bertkit.training.callbacks import Progress
from bertkit.training.clock import Clock
from bertkit.training.predictions import TABLE_SUFFIX, read_first_table, read_table
from bertkit.training.push import push
from bertkit.training.recipe import Recipe, check_inputs, merge, read_recipe
from bertkit.training.run_dir import (
    DATA,
    METRICS_FILE,
    PREDICTIONS,
    RECIPE_FILE,
    SEARCH,
    has_begun,
    read_metrics,
)

WARNING = "warning: "
DATA_OPTIONS = {"dir", "corpus"}  # options of tasks that `data` stands for
KEYWORDS = (
    *("data", "model", "output", "text", "label", "weight", "budget", "search", "folds", "restarts", "workers"),
    *("private", "redact", "least", "epochs", "seed"),
)
TRAIN_KEYWORDS = {"epochs": "num_train_epochs", "learning_rate": "learning_rate", "seed": "seed"}  # in `[train]`
PYTHON_WORDS = {  # patterns in messages for the command line and recipes -> the words of a call in Python
    rf"--({'|'.join(KEYWORDS)})\b(?: [A-Z]+\b)?": r"\1=",
    r"--set (?:data\.)?": "",
    r"^recipe: ": "",
    r"^\[(?:data|train|model)\] (?=\w+ = )": "",
    r"at the top level|(?<=belongs )in \[data\]": "among the keywords",
    r" in \[data\]": "",
    r"\[train\]": "train=",
    r"\[model\]": "config=",
    r"(?:the )?\[\[phase\]\](?: tables)?": "phase=",
}


def warn(line: str) -> None:
    """Issue a warning at the line of the caller outside of bertkit, if the line is one."""
    if not line.startswith(WARNING):
        return
    line = name_as_keywords(line.removeprefix(WARNING))
    frame, level = inspect.currentframe().f_back, 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "bertkit":
        frame, level = frame.f_back, level + 1
    warnings.warn(line, BertkitWarning, stacklevel=level)


def train(
    task: str,
    data: Any = None,
    *,
    output: str | Path | None = None,
    model: str | Path | None = None,
    train: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    phase: Sequence[Mapping[str, Any]] | None = None,
    budget: str | None = None,
    search: int = 0,
    folds: int = 0,
    restarts: int = 1,
    workers: int | str = 1,
    report: Report | None = warn,
    progress: Progress | None = None,
    **settings: Any,
) -> "Run | list[Run]":
    """Train a task, and return its run; the same call continues an unfinished run and does not repeat a finished one.

    Seeds, signal handlers, logging and threads are left as they were.

    >>> run = bertkit.train("classify", data=frame, text=["title", "body"], label="stars", output="runs/stars")

    Args:
        task: classify, ner, squad1, squad2, swag, pretrain, or a task of GLUE, such as mnli.
        data: A path or a Hub data set; a pandas DataFrame, a `datasets.Dataset`, a `pyarrow.Table` or a list of dicts;
            or a dict of splits (train, dev, test) to tables or paths. Tables are written to `OUTPUT/data`. None: the
            task's own data set.
        output: The run directory (default: one in runs/).
        model: The checkpoint or run to start from.
        train, config, phase: The tables `[train]`, `[model]` and `[[phase]]` of the recipe.
        budget: The time for everything, such as "20m".
        search: The number of settings that are compared on held-back training rows.
        folds: The number of folds, each of which is predicted by a model that has not seen it.
        restarts: The number of runs with seeds of their own.
        workers: The number of folds or restarts at once, each in a process, or "ray".
        report: Called with a line of text now and then, such as `print`. By default warnings of the command line are
            issued as `BertkitWarning`; None: nothing is said.
        progress: Called after every logged update with the updates done, all updates and the latest losses.
        settings: The task's options by their names in `[data]`, top-level keys of a recipe, such as `batch_size`, and
            `epochs`, `learning_rate` and `seed`.

    Returns:
        The run; with folds or restarts a list of runs, of which only the best keeps its weights.

    Raises:
        Interrupted: SIGTERM or SIGINT was received; a checkpoint was saved.
    """
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}; {propose(str(task), TASKS)}")
    kind, is_warned, report = TASKS[task], report is warn, report or ignore
    output = Path(os.path.expanduser(output or Path("runs", task)))
    named = {TRAIN_KEYWORDS[name]: settings.pop(name) for name in TRAIN_KEYWORDS if name in settings}
    if named and (train is None or isinstance(train, Mapping)):
        train = named | dict(train or {})
    tables = {"checkpoint": model, "train": train, "model": config, "phase": phase}
    given = merge(make_plain(tables) | sort_settings(kind, make_plain(settings)))
    with ExitStack() as stack:
        stack.enter_context(name_keywords())
        stack.enter_context(leave_as_found())
        definition = define_runs([task], folds=folds, restarts=restarts, budget=budget, search=search)
        option, kept = name_data(kind, data, output)
        given = merge(given, {"data": option})
        if not kept:
            check_inputs(kind, given["data"])
        starter = {} if "dir" in kind.options else choose_starter(given)
        recipe = Recipe.make(kind, starter, given)
        stack.enter_context(hold_tables(kept, output))
        if progress is None:
            progress = stack.enter_context(show_bar()) if is_notebook() else ignore
        if definition:
            study = make_study(definition, merge(starter, given), where="train")
            news = {"report": report, "progress": lambda found: progress(found.over, found.runs, {})}
            results = run_study(study, output=output, workers=workers, **news)
            check_all_finished(results, output)
            if folds:
                gather_folds(results, output)
            return [Run(str(output / each.directory)) for cell in results.cells for each in cell.runs]
        clock = Clock.make(budget, given, time.monotonic()) if budget else None
        search_or_train(recipe, output=output, trials=search, clock=clock, report=report, progress=progress)
    found = Run(str(output))
    if is_warned:
        lines = kind.comment(found.metrics)
        if found.metrics.get(GAIN, 1.0) <= 0:
            lines.append(f"{WARNING}not better than the best baseline: {found.verdict}")
        for line in lines:
            warn(line)
    return found


def expect(
    data: Any,
    *,
    task: str = "classify",
    model: str | Path | Sequence[str | Path] | None = None,
    report: Report = ignore,
    **settings: Any,
) -> dict[str, Any] | None:
    """Return what simple baselines score on the training rows, and what twice as many rows would bring.

    >>> bertkit.expect(frame, text="review", label="stars", model=["bert-base-uncased", "runs/pretrained"])

    Args:
        data, settings: As for `train`.
        model: A checkpoint, or several to compare (default: the task's, if its weights are on this disk).

    Returns:
        See `bertkit.analysis.expected.measure_expected`; None where no baseline applies.

    Raises:
        UsageError: A keyword, the data or a checkpoint is wrong.
    """
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}; {propose(str(task), TASKS)}")
    kind, models = TASKS[task], list(map(str, [model] if isinstance(model, str | Path) else model or []))
    with name_keywords(), leave_as_found(), tempfile.TemporaryDirectory() as folder:
        option, kept = name_data(kind, data, Path(folder))
        write_tables(kept, Path(folder) / DATA)
        given = merge(sort_settings(kind, make_plain(settings)), {"data": option})
        if models:
            given = merge(given, {"checkpoint": models[0]})
        diagnosis = examine(kind, given, models[0] if models else None, report)
        return expect_scores(diagnosis, models, report)


def load(run: str | Path) -> "Run":
    """Open a finished run, an export, or a fine-tuned model on the Hub.

    >>> bertkit.load("runs/stars").predict([["A fine film", "It is never too long."]])
    """
    name = os.path.expanduser(run)
    with name_keywords(), leave_as_found():
        load_config(name)
    return Run(name)


@dataclass(frozen=True)
class Run:
    """A finished run, an export or a model on the Hub, at work."""

    source: str  # the directory, or its name on the Hub

    def __post_init__(self) -> None:
        """Make a directory's path absolute, so that it is found after a change of the working directory."""
        if os.path.isdir(self.source):
            object.__setattr__(self, "source", os.path.abspath(self.source))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy, whose model is loaded from `source` again."""
        return {"source": self.source}

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the scores of metrics.json; `score` is the task's metric. Empty without this file."""
        path = find_file(self.source, METRICS_FILE)
        return {} if path is None else read_metrics(path)

    @property
    def verdict(self) -> str:
        """Return the score on held-out rows beside the baselines in one sentence; empty without scores."""
        path = find_file(self.source, RECIPE_FILE)
        task, metrics = None if path is None else TASKS[read_recipe(path)["task"]], self.metrics
        if task is None or not (rows := list_shown(task.table, task.metric, metrics)):
            return ""
        predicted = read_first_table(task, Path(self.source))
        return describe_verdict(find_main(rows, task.metric), metrics, 0 if predicted is None else len(predicted))

    @cached_property
    def predictor(self) -> Predictor:
        """Return the model as a function from inputs to results, in the precision of its training."""
        with name_keywords(), leave_as_found():
            return load_predictor(self.source)

    def predictions(self, split: str = "dev") -> pa.Table:
        """Return the prediction table of a split; `.to_pandas()` makes a DataFrame of it."""
        return read_table(Path(self.source, PREDICTIONS, f"{split}{TABLE_SUFFIX}"))

    def predict(self, data: Any, redact: str | None = None, least: float | None = None) -> Any:
        """Return the result of each input, in order.

        >>> frame.assign(predicted=run.predict(frame)["label"])

        Args:
            data: A list of texts or of other inputs (`bertkit.Predictor`), a DataFrame, a Dataset or a pyarrow.Table.
            redact, least: How names are redacted, as for `bertkit.Predictor`; None: they are not.

        Returns:
            A DataFrame with the same index for a DataFrame, otherwise a list of dicts.
        """
        with name_keywords():
            predictor = self.predictor.with_redaction(redact, least)
            results = predictor(data)
        if not hasattr(data, "iterrows"):
            return results
        import pandas as pd

        columns = predictor.columns
        rows = list(map(flatten_result, results)) if columns else results
        return pd.DataFrame(rows, index=data.index, columns=None if rows else columns)

    def evaluate(
        self,
        data: Any,
        report: Report = ignore,
        text: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
    ) -> "ShownScores":
        """Return the scores on labelled rows that the model has not seen, with intervals and baselines.

        >>> run.evaluate(frame)["score"]

        Args:
            data: The path of a file, or a table as for `train`.
            report: Receives a line about rows that are left out, such as those with a label that the model lacks.
            text: The columns of the texts; None: as in training.
            label: The columns of the labels; None: as in training.
        """
        with name_keywords(), leave_as_found(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "data.parquet")
            if isinstance(data, str | Path):
                file = Path(os.path.expanduser(data))
            else:
                pq.write_table(convert_table(data), file)
            given = {"text": text, "label": label}
            columns = {name: format_names(make_plain(value), []) for name, value in given.items()}
            found = evaluate(self.source, str(file), Path(folder, "scores"), report, **columns)
            if len(found) > 1:
                raise UsageError(f"{file} has {len(found)} splits; give the file of one of them")
            return ShownScores(found[0].metrics, next(list_tables(found[0])))

    def push(self, repo: str, private: bool = False, report: Report = ignore) -> str:
        """Upload the run to the Hugging Face Hub, and return its URL; data and predictions stay here.

        Args:
            repo: owner/name, or a name under your own account.
            private: Make the repository private.
        """
        with name_keywords(), leave_as_found():
            return push(Path(self.source), repo, private=private, report=report)

    def __repr__(self) -> str:
        """Return where the run is, seen from the working directory: a kept notebook names no machine."""
        source = os.path.relpath(self.source) if os.path.isdir(self.source) else self.source
        return f"Run(source={source!r})"

    def _repr_html_(self) -> str | None:
        """Return the table of scores, for a notebook; None without scores."""
        path = find_file(self.source, RECIPE_FILE)
        if path is None or not (metrics := self.metrics):
            return None
        task = TASKS[read_recipe(path)["task"]]
        return show_table(tabulate_scores(list_shown(task.table, task.metric, metrics), metrics, "score"))


class ShownScores(dict[str, Any]):
    """Scores by their names in metrics.json, which `print` and a notebook show as a short table.

    Args:
        table: The scores as they are shown.
    """

    def __init__(self, metrics: Mapping[str, Any], table: Table) -> None:
        super().__init__(metrics)
        self.table = table

    def __repr__(self) -> str:
        """Return the table as text."""
        return format_text(self.table)

    def _repr_html_(self) -> str:
        """Return the table, for a notebook."""
        return show_table(self.table)


# --- A call -----------------------------------------------------------------------------------------------------------


def sort_settings(task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as a recipe: options of the task in `[data]`, the others at the top level."""
    options = {name: option.default for name, option in task.options.items() if name not in DATA_OPTIONS}
    recipe: dict[str, Any] = {"data": {}}
    for name, value in settings.items():
        if name in options:
            recipe["data"][name] = format_names(value, options[name])
        elif nearest := difflib.get_close_matches(name, TRAIN_KEYWORDS, n=1, cutoff=0.8):
            raise UsageError(f"unknown keyword {name!r}; did you mean {nearest[0]!r}?")
        else:
            recipe[name] = value  # the check of the recipe names an unknown key
    return recipe


def format_names(value: Any, default: Any) -> Any:
    """Return the value of an option with names of columns as texts, as in Arrow; one name is a list if need be."""
    if isinstance(value, list) and isinstance(default, list):
        return [format_names(each, "") for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(default, str | list):
        value = str(value)
    return [value] if isinstance(value, str) and isinstance(default, list) else value


def make_plain(value: Any) -> Any:
    """Return a value with the types of TOML: paths as texts, tuples as lists, numbers of numpy as Python's."""
    if isinstance(value, Mapping):
        return {key: make_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(make_plain, value))
    if isinstance(value, Path):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def name_as_keywords(message: str) -> str:
    """Return a message with keywords instead of options and tables of a recipe."""
    for pattern, words in PYTHON_WORDS.items():
        message = re.sub(pattern, words, message)
    return message


def name_data(task: Task, data: Any, output: Path) -> tuple[dict[str, Any], dict[str, pa.Table | Path]]:
    """Return the option of `[data]` that names the data, and the tables that are written there, if any."""
    (key,) = DATA_OPTIONS & task.options.keys()
    if key == "corpus" and isinstance(data, list | tuple):
        return {key: make_plain(data)}, {}
    if data is None or isinstance(data, str | Path):
        return {key: [str(data)] if key == "corpus" and data else data and str(data)}, {}
    if key == "corpus":
        raise UsageError(f"{task.name} reads texts, got {type(data).__name__}; give paths of text files, or a data set")
    names, tables = sum(SPLIT_NAMES.values(), ()), convert_tables(data)
    unknown = [str(split) for split in tables if split not in names]
    if unknown and not hasattr(data, "column_names"):  # further splits of a DatasetDict are left out, as on the Hub
        raise UsageError(f"unknown split {unknown[0]!r} in data; {propose(unknown[0], names)}")
    return {key: str(output / DATA)}, {split: part for split, part in tables.items() if split in names}


@contextmanager
def hold_tables(tables: Mapping[str, pa.Table | Path], output: Path) -> Iterator[None]:
    """Write tables to `output/data`, unless they are there; they go again if the run fails before it begins."""
    folder = output / DATA
    is_new = bool(tables) and not folder.exists()
    try:
        with as_usage_error(f"the directory {folder}"):
            write_tables(tables, folder)
        yield
    except BaseException:
        if is_new and not any((has_begun(output), (output / STUDY_FILE).exists(), (output / SEARCH).exists())):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                output.rmdir()
        raise


@contextmanager
def name_keywords() -> Iterator[None]:
    """Name keywords in messages that name options of the command line or tables of a recipe."""
    try:
        yield
    except UsageError as error:
        error.args = (name_as_keywords(str(error)),)
        raise
