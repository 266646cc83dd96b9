"""Suspected label errors: training rows whose label contradicts models that have not seen them.

The folds of a classifier predict every training row (`bertkit.studies.folds`). From these probabilities confident
learning (Northcutt et al. 2021, the library cleanlab) estimates how many labels of each class are wrong, and which.
A suspected row need not be wrong: models contradict rare and difficult rows as well.

Shape letters: S rows, E suspected rows, L labels.
"""

import csv
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bertkit.data.formats.columns import Columns, read_columns, read_splits
from bertkit.data.labels import REGRESSION, LabelSpace
from bertkit.data.splits import describe_keys, hash_keys, split_fold
from bertkit.errors import UsageError
from bertkit.reports.tables import Table, count, make_table
from bertkit.studies.cells import list_cells
from bertkit.studies.folds import OUT_OF_FOLD, define_folds, gather_folds
from bertkit.studies.runner import make_study, run_study
from bertkit.system.files import atomic_open, atomic_write
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.tasks.classification import (
    ClassificationTask,
    choose_columns,
    drop_blank,
    find_space,
    iterate_keys,
    spell,
    write_rows,
)
from bertkit.tasks.glue import GlueTask
from bertkit.tasks.option import list_defaults
from bertkit.tasks.repeats import name_command
from bertkit.tasks.task import Task, shorten_text
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import STUDY_RESULT

TRAINING_ROWS = ".train.jsonl"  # training rows in a form that `classify` reads; a new study may have hidden files
LABEL_ERRORS = "label_errors"  # the key in JSON, and the name of the CSV file
MOST_TABULATED = 20  # rows


# --- The rows that are suspected --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """The suspected label errors of some rows.

    Attributes:
        rows: (E,) the suspected rows, the worst first.
        scores: (S,) the probability of each row's label, or the lowest one of its several labels; small is suspicious.
        suggested: (E,) the class that each suspected row should have, or (E, L) 0 or 1 for each of several labels.
    """

    rows: np.ndarray
    scores: np.ndarray
    suggested: np.ndarray


def find_label_errors(probabilities: np.ndarray, labels: np.ndarray) -> LabelErrors:
    """Find the rows whose labels are probably wrong, by confident learning.

    Each of several labels is a problem of two classes. A label that all rows or none have is never suspected.

    Args:
        probabilities: (S, L) of models that have not seen the row; each of several labels has its own.
        labels: (S,) classes that all occur, or (S, L) 0 or 1 for each of several labels.
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
    return LabelErrors(rows, scores, suggested[rows])


def suspect(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (S,) whether each class is suspected, from probabilities (S, L) and classes (S,)."""
    if len(np.unique(labels)) < 2:
        return np.zeros(len(labels), bool)
    from cleanlab.filter import find_label_issues  # imports scikit-learn and pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of classes too rare to be suspected
        return find_label_issues(labels, probabilities, n_jobs=1)  # otherwise it starts processes


def diagnose_labels(
    task: Task,
    recipe: Recipe,
    *given: Mapping[str, Any],
    output: Path,
    report: Report = ignore,
    **options: Any,
) -> dict[str, Any]:
    """Find the suspected label errors of a task's training rows, write them to `output`, and return them as JSON.

    Arguments are those of `predict_out_of_fold`; the result is that of `describe_label_errors`.
    """
    rows = predict_out_of_fold(task, recipe, *given, output=output, report=report, **options)
    found = find_label_errors(rows.probabilities, rows.labels)
    described = describe_label_errors(found, rows)
    path = output / f"{LABEL_ERRORS}.csv"
    write_label_errors(described, found, rows, path)
    if len(found.rows):
        report(f"{count(len(found.rows), 'suspected label error')}, the worst first: {path}")
    return described


# --- The training rows, and their probabilities -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """The training rows of a classifier with the probabilities of models that have not seen them.

    Attributes:
        text: One or two columns of `rows`.
        labels: As `LabelSpace.read` returns them.
        probabilities: (S, L).
    """

    rows: Columns
    text: Sequence[str]
    space: LabelSpace
    labels: np.ndarray
    probabilities: np.ndarray


def predict_out_of_fold(
    task: Task,
    recipe: Recipe,
    *given: Mapping[str, Any],
    folds: int,
    output: Path,
    workers: int | str = 1,
    report: Report = ignore,
    progress: Callable[[dict[str, Any]], None] = ignore,
) -> OutOfFold:
    """Train one classifier per fold, and return the probabilities of every training row.

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
    few = make_study(define_folds("classify", recipe, 2), *given, where=task.name)  # thousands take seconds
    options = {**list_cells(few)[0].recipe["data"], "folds": folds}
    if limit := options["max_train_samples"]:
        raise UsageError(f"data.max_train_samples is {limit}, but --folds predicts all training rows; leave it out")
    rows, place, lines = find_rows(task, options["dir"], output)
    text, label = choose_columns(rows, options["text"], options["label"])
    rows = drop_blank(replace(rows, lines=lines), text)
    space = find_space(rows, label, options)
    if space.kind == REGRESSION:
        raise UsageError(
            f"{rows.source}: the labels in {label[0]!r} are numbers; suspected errors are found among classes, so "
            "leave out --folds, or set data.problem_type"
        )
    labels, _ = space.read(rows)
    data = {"dir": place, "text": text, "label": label, "problem_type": space.kind}
    check_sizes(rows, options | data, folds)
    study = make_study(define_folds("classify", recipe, folds), *given, {"data": data}, where=task.name)
    hint = name_command(TASKS["classify"], options | data)  # to the doctor, which runs already

    def say(line: str) -> None:
        if hint not in line:
            report(line)

    results = run_study(study, output=output, workers=workers, report=say, progress=progress)
    if gather_folds(results, output) is None:
        raise UsageError(
            f"{results['failed']:,} of {folds} folds failed; {output / STUDY_RESULT} gives the reasons, and the same "
            "command retries them"
        )
    probabilities = read_probabilities(output / f"{OUT_OF_FOLD}.csv", len(space.names))
    return OutOfFold(rows, text, space, labels, probabilities)


def check_folds(task: Task, folds: int) -> None:
    """Check that a task learns classes of texts, and the number of folds.

    Raises:
        UsageError: It does not, or there are fewer than two folds.
    """
    define_folds("classify", {}, folds)
    known = [task for task in TASKS.values() if isinstance(task, GlueTask) and task.row.labels and task.metric]
    if not isinstance(task, ClassificationTask) and task not in known:
        raise UsageError(
            f"--folds finds label errors of classifiers, not of {task.name}; give a table of texts and labels, or one "
            f"of {', '.join(task.name for task in known)} with --task"
        )


def check_sizes(rows: Columns, options: Mapping[str, Any], folds: int) -> None:
    """Check that each fold has rows to predict.

    Raises:
        UsageError: One has none.
    """
    places = hash_keys(iterate_keys(rows, options))
    if any(not len(split_fold(places, folds, fold)["dev"]) for fold in range(folds)):
        found = describe_keys(places, "row", options["group"])
        raise UsageError(f"{rows.source} has {found} a fold of {folds:,} without rows; give fewer with --folds")


def find_rows(task: Task, place: str, output: Path) -> tuple[Columns, str, Sequence[int]]:
    """Return the training rows, the file that `classify` reads them from, and their lines in the user's file.

    Rows that are not in a table of their own are copied to `output`.
    """
    path = output / TRAINING_ROWS
    if isinstance(task, GlueTask):
        examples = task.load({**list_defaults(task.options), "dir": place}, ignore)["train"]
        cells = zip(task.list_texts(examples), task.list_labels(examples), strict=True)
        write_objects((dict(zip((*task.row.texts, "label"), (*row, name), strict=True)) for row, name in cells), path)
        return read_columns(path), str(path), task.list_lines(examples)
    rows = read_splits(place)["train"]
    if Path(rows.source).is_file():
        return rows, rows.source, rows.lines
    write_objects(walk_objects(rows), path)
    return read_columns(path), str(path), rows.lines


def walk_objects(rows: Columns) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; lists become lists again."""
    for batch in rows.table.to_batches():
        for row in batch.to_pylist():
            yield {
                name: msgspec.json.decode(cell or "[]") if name in rows.lists else cell for name, cell in row.items()
            }


def write_objects(objects: Iterator[Mapping[str, Any]], path: Path) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(path) as file:
        for one in objects:
            file.write(msgspec.json.encode(one).decode() + "\n")


def read_probabilities(path: Path, labels: int) -> np.ndarray:
    """Return the probabilities (S, L) in the last L columns of the predictions of all rows."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return np.array([[float(cell) for cell in row[-labels:]] for row in rows])


# --- Tables and files -------------------------------------------------------------------------------------------------


def describe_label_errors(found: LabelErrors, rows: OutOfFold) -> dict[str, Any]:
    """Return the suspected rows as JSON, the worst first.

    Returns:
        `rows` (their number), `unit` (of `row`), and `suspected`: `row`, `texts`, `given`, `suggested`, `score` and
        `probabilities` of each suspected row.
    """
    entries = []
    texts = list(zip(*(rows.rows.find(name).take(found.rows).to_pylist() for name in rows.text), strict=True))
    for number, own, suggested in zip(found.rows.tolist(), texts, found.suggested, strict=True):
        entries.append(
            {
                "row": int(rows.rows.lines[number]),
                "texts": list(own),
                "given": spell(rows.labels[number], rows.space),
                "suggested": spell(suggested, rows.space),
                "score": float(found.scores[number]),
                "probabilities": dict(zip(rows.space.names, rows.probabilities[number].tolist(), strict=True)),
            }
        )
    return {"rows": len(rows.labels), "unit": rows.rows.unit, "suspected": entries}


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


def write_label_errors(described: Mapping[str, Any], found: LabelErrors, rows: OutOfFold, path: Path) -> None:
    """Write the suspected rows as CSV: the input's columns, then number, labels and probabilities.

    Without suspected rows there is no file.
    """
    if not len(found.rows):
        path.unlink(missing_ok=True)
        return
    results = [
        {name: entry[name] for name in ("row", "given", "suggested", "score")}
        | {f"probability_{name}": value for name, value in entry["probabilities"].items()}
        for entry in described["suspected"]
    ]
    atomic_write(write_rows(rows.rows.take(found.rows), results), path)
