"""Suspected label errors: training rows whose label contradicts models that have not seen them.

The folds of a classifier predict every training row (`bertkit.studies.folds`). From these probabilities confident
learning (Northcutt et al. 2021, the library cleanlab) estimates how many labels of each class are wrong, and which.
A suspected row need not be wrong: models contradict rare and difficult rows as well.

Shape letters: S rows, E suspected rows, L labels.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bertkit.data.formats.rows import Columns
from bertkit.data.formats.writer import write_beside
from bertkit.data.labels import REGRESSION, SEVERAL
from bertkit.errors import UsageError
from bertkit.metrics.table import (
    LABEL,
    PROBABILITY_PREFIX,
    find_kind,
    list_names,
    make_rows,
    mark_names,
    number_names,
    read_facts,
    read_probabilities,
)
from bertkit.reports.tables import Table, count, make_table
from bertkit.studies.folds import OUT_OF_FOLD, gather_folds
from bertkit.studies.results import check_all_finished
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_folds
from bertkit.system.files import atomic_open, atomic_write
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.glue import GlueTask
from bertkit.tasks.option import list_defaults
from bertkit.tasks.task import Task, shorten_text
from bertkit.tasks.text import CLASSIFICATION, TextExamples, TextTask
from bertkit.training.predictions import ROW_NUMBER, TABLE_SUFFIX, UNKNOWN_COUNT, pack_table, read_table
from bertkit.training.recipe import Recipe, RecipePart

TRAINING_ROWS = ".train.parquet"  # training rows in a form that `classify` reads; a new study may have hidden files
LABEL_ERRORS = "label_errors"  # the key in JSON, and the name of the CSV file
MOST_TABULATED = 20  # rows


# --- The rows that are suspected --------------------------------------------------------------------------------------


def find_label_errors(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the rows whose labels are probably wrong, by confident learning.

    Each of several labels is a problem of two classes. A label that all rows or none have is never suspected.

    Args:
        probabilities: (S, L) of models that have not seen the row; each of several labels has its own.
        labels: (S,) classes that all occur, or (S, L) 0 or 1 for each of several labels.

    Returns:
        (E,) the suspected rows, the worst first; (S,) the probability of each row's label, or the lowest one of its
        several labels; and (E,) the class that each suspected row should have, or (E, L) 0 or 1 for each label.
    """
    if labels.ndim == 1:
        is_wrong = suspect(probabilities, labels)
        scores, suggested = probabilities[np.arange(len(labels)), labels], probabilities.argmax(axis=1)
    else:
        flags = labels.astype(int)
        columns = zip(probabilities.T, flags.T, strict=True)
        wrong = np.stack([suspect(np.stack([1 - column, column], axis=1), own) for column, own in columns], axis=1)
        is_wrong, suggested = wrong.any(axis=1), flags ^ wrong  # (S,), (S, L)
        scores = np.where(flags, probabilities, 1 - probabilities).min(axis=1)
    rows = np.flatnonzero(is_wrong)
    rows = rows[np.argsort(scores[rows], kind="stable")]
    return rows, scores, suggested[rows]


def suspect(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (S,) whether each class is suspected, from probabilities (S, L) and classes (S,)."""
    if len(np.unique(labels)) < 2:
        return np.zeros(len(labels), bool)
    from cleanlab.filter import find_label_issues  # imports scikit-learn and pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of classes too rare to be suspected
        return find_label_issues(labels, probabilities, n_jobs=1)  # otherwise it starts processes


def describe_label_errors(rows: pa.Table) -> dict[str, Any]:
    """Return the suspected rows of a prediction table as JSON, the worst first; the models have not seen the rows.

    Texts, labels and probabilities are enough.

    Returns:
        `rows` (their number), `unit` (of `row`), and `suspected`: `row`, `texts`, `given`, `suggested`, `score` and
        `probabilities` of each suspected row.
    """
    facts, names, labels = read_facts(rows), list_names(rows), rows.column(LABEL).to_pylist()
    probabilities = read_probabilities(rows, names)
    is_several = find_kind(rows) == SEVERAL
    codes = mark_names(labels, names) if is_several else number_names(labels, names)
    found, scores, suggestions = find_label_errors(probabilities, codes)
    others = [name for name in rows.column_names if name != LABEL and not name.startswith(PROBABILITY_PREFIX)]
    texts = rows.select(facts.get("texts", others)).take(pa.array(found, pa.int64())).to_pylist()
    lines = rows.column(ROW_NUMBER).to_pylist() if ROW_NUMBER in rows.column_names else range(1, len(rows) + 1)
    entries = []
    for number, own, suggested in zip(found.tolist(), texts, suggestions, strict=True):
        better = [names[label] for label in np.flatnonzero(suggested)] if is_several else names[suggested]
        entries.append(
            {
                "row": lines[number],
                "texts": list(own.values()),
                "given": spell(labels[number]),
                "suggested": spell(better),
                "score": float(scores[number]),
                "probabilities": dict(zip(names, probabilities[number].tolist(), strict=True)),
            }
        )
    return {"rows": len(rows), "unit": facts.get("unit", "row"), "suspected": entries}


def spell(label: str | Sequence[str]) -> str:
    """Return a label or several labels in words."""
    return label if isinstance(label, str) else ", ".join(label) or "no label"


def diagnose_labels(
    task: Task, recipe: RecipePart, *given: Mapping[str, Any], output: Path, report: Report = ignore, **options: Any
) -> dict[str, Any]:
    """Find the suspected label errors of a task's training rows, write them to `output`, and return them as JSON.

    Arguments are those of `predict_out_of_fold`; the result is that of `describe_label_errors`.
    """
    rows = predict_out_of_fold(task, recipe, *given, output=output, report=report, **options)
    described, path = describe_label_errors(rows), output / f"{LABEL_ERRORS}.csv"
    write_label_errors(described, rows, path)
    if number := len(described["suspected"]):
        report(f"{count(number, 'suspected label error')}, the worst first: {path}")
    return described


# --- The training rows, and their probabilities -----------------------------------------------------------------------


def predict_out_of_fold(
    task: Task,
    recipe: RecipePart,
    *given: Mapping[str, Any],
    folds: int,
    output: Path,
    workers: int | str = 1,
    report: Report = ignore,
    progress: Callable[[dict[str, Any]], None] = ignore,
) -> pa.Table:
    """Train one classifier per fold, and return the prediction table of all training rows, by models without them.

    The folds are a study in `output`, which continues if it was stopped.

    Args:
        task: `classify`, or a GLUE task with classes, whose training rows are copied to `output`.
        recipe: A recipe or an empty one.
        given: Recipes of the command line, which override it.

    Raises:
        UsageError: The labels are numbers, the training rows are limited, a fold has no rows or has failed, or as for
            `run_study`.
    """
    check_folds(task, folds)
    recipe = {key: value for key, value in recipe.items() if key != "task"}
    options = Recipe.make(CLASSIFICATION, recipe, *given).data
    if limit := options["max_train_samples"]:
        raise UsageError(f"data.max_train_samples is {limit}, but --folds predicts all training rows; leave it out")
    train, source = read_rows(task, options, output)
    space = train.space
    if space.kind == REGRESSION:
        raise UsageError(
            f"{source}: the labels in {space.columns[0]!r} are numbers; suspected errors are found among classes, so "
            "leave out --folds, or set data.problem_type"
        )
    data = {"dir": source, "text": list(train.text), "label": list(space.columns), "problem_type": space.kind}
    study = make_study(define_folds("classify", recipe, folds), *given, {"data": data}, where=task.name)
    results = run_study(study, output=output, workers=workers, report=report, progress=progress)
    check_all_finished(results, output)
    gather_folds(results, output)
    rows = read_table(output / f"{OUT_OF_FOLD}{TABLE_SUFFIX}")
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns[ROW_NUMBER] = pa.array(train.rows.lines, pa.int64())
    return make_rows(columns, **read_facts(rows), unit=train.rows.unit)


def check_folds(task: Task, folds: int) -> None:
    """Check that a task learns classes of texts, and the number of folds.

    Raises:
        UsageError: It does not, or there are fewer than two folds.
    """
    define_folds("classify", {}, folds)
    _, *known = (one.name for one in TASKS.values() if isinstance(one, TextTask) and one.is_classifier)
    if not isinstance(task, TextTask) or not task.is_classifier:
        raise UsageError(
            f"--folds finds label errors of classifiers, not of {task.name}; give a table of texts and labels, or one "
            f"of {', '.join(known)} with --task"
        )


def read_rows(task: Task, options: Mapping[str, Any], output: Path) -> tuple[TextExamples, str]:
    """Return the training rows, and the file that `classify` reads them from.

    Rows that are not in a table of their own are copied to `output`.
    """
    options, copy = {**options, "folds": 0, "dev_share": None}, output / TRAINING_ROWS
    if isinstance(task, GlueTask):
        rows = task.tabulate(task.load({**list_defaults(task.options), "dir": options["dir"]}, ignore)["train"])
        write_copy(pa.table({**rows.texts, LABEL: rows.labels}), copy)
        train = CLASSIFICATION.load(options | {"dir": str(copy)}, ignore)["train"]
        lines = [rows.lines[line - 1] for line in train.rows.lines]
        return replace(train, rows=replace(train.rows, lines=lines, unit="line")), str(copy)
    train = CLASSIFICATION.load(options, ignore)["train"]
    if Path(train.rows.source).is_file():
        return train, train.rows.source
    write_copy(pa.Table.from_pylist(list(train.rows.walk(train.rows.lists))), copy)
    return train, str(copy)


def write_copy(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(path, "wb") as file:
        file.write(pack_table(table))


# --- Tables and files -------------------------------------------------------------------------------------------------


def tabulate_label_errors(described: Mapping[str, Any], most: int = MOST_TABULATED) -> Table:
    """Return the table of the first suspected rows of `describe_label_errors`."""
    entries = described["suspected"]
    lines = [
        [
            str(entry["row"]),
            "  |  ".join(map(shorten_text, entry["texts"])),
            entry["given"],
            entry["suggested"],
            f"{entry['score']:.3f}",
        ]
        for entry in entries[:most]
    ]
    shown = f", the first {most}" if len(entries) > most else ""
    caption = f"Suspected label errors: {len(entries):,} of {described['rows']:,} rows{shown}"
    return make_table(caption, [described["unit"], "text", "given", "suggested", "probability of the given"], lines)


def write_label_errors(described: Mapping[str, Any], rows: pa.Table, path: Path) -> None:
    """Write the suspected rows as CSV: the input's columns, then number, labels and probabilities.

    Without suspected rows there is no file.
    """
    if not (entries := described["suspected"]):
        path.unlink(missing_ok=True)
        return
    names = rows.column_names
    names = names[names.index(UNKNOWN_COUNT) + 1 : names.index(LABEL)]  # the columns of the input
    numbers = pc.index_in(pa.array([entry["row"] for entry in entries]), rows.column(ROW_NUMBER))
    results = [
        {name: entry[name] for name in ("row", "given", "suggested", "score")}
        | {f"{PROBABILITY_PREFIX}{name}": value for name, value in entry["probabilities"].items()}
        for entry in entries
    ]
    suspected = Columns("", rows.select(names).take(numbers), frozenset(), ())
    atomic_write(write_beside(suspected, results), path)
