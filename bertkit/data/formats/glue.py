"""GLUE (Wang et al. 2019; paper section 4.1): its official files, or the copy on the Hub -> texts and labels by name.

Both sources give the same values. Files of predictions are read as well. A `Benchmark` says what a data set's files and
columns are called; the table of them is in `bertkit.tasks.glue`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from bertkit.data.formats.hub import read_hub
from bertkit.data.formats.tables import TextColumns, convert_labels, read_tsv
from bertkit.errors import UsageError
from bertkit.system.progress import Report

GLUE_HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Split:
    """One file of a task.

    file: below the folder of the download.
    hub: the Hub's configuration and split.
    needed: whether there is nothing to do without it.
    scores: how its scores are called, "{}" standing for the score's name; empty if it is not evaluated.
    submission: the leaderboard's file of its predictions; such a split has no labels.
    rows: how many the leaderboard expects.
    """

    file: str
    hub: tuple[str, str]
    needed: bool = False
    scores: str = ""
    submission: str = ""
    rows: int = 0


@dataclass(frozen=True)
class Benchmark:
    """A row of the table in `bertkit.tasks.glue`.

    texts: the Hub's name of a column -> its name in the official files.
    label: the official name of the labels' column.
    labels: official spelling -> the Hub's name, in the Hub's order; empty for a score from 0 to 5.
    metrics: as `bertkit.metrics` names them; the first one is the paper's.
    paper: metric -> whose, on what -> the published score.
    majority: what a submission holds where there is no model: the most frequent label in training, or the mean score.
    bare: whether train and dev have no line of names, so that columns go by number, and how many there are.
    broken: whether rows of another width are passed over; a few are in the official file and not in the Hub's.
    submits_majority: whether the paper submits that, whatever the model says.
    note: what a score that is no better than the majority's may also mean.
    """

    name: str
    title: str
    texts: Mapping[str, str | int]
    labels: Mapping[str, str]
    splits: Mapping[str, Split]
    majority: str
    label: str | int = "label"
    metrics: tuple[str, ...] = ("accuracy",)
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bare: int = 0
    broken: bool = False
    submits_majority: bool = False
    note: str = ""


SentenceExamples = dict[str, Any]  # "texts": one or two columns of S texts; "labels": (S,) numbers, or None


def read_folder(row: Benchmark, folder: Path) -> dict[str, TextColumns]:
    """The official files below a folder."""
    if not folder.is_dir():
        first = next(iter(row.splits.values())).file
        raise UsageError(f"{folder} is no folder; give the one that holds {first}: --data DIR")
    files = [Path(split.file) for split in row.splits.values()]
    own = any((folder / file.name).exists() and folder.resolve().name == str(file.parent) for file in files)
    if own and not any((folder / file).exists() for file in files):
        raise UsageError(
            f"{folder} is {row.title}'s own folder; give the one above: --data {quote(str(folder.resolve().parent))}"
        )
    return {
        name: read_split(row, name, folder / split.file)
        for name, split in row.splits.items()
        if split.needed or (folder / split.file).exists()
    }


def read_split(row: Benchmark, name: str, path: Path) -> TextColumns:
    """An official file: its texts, and `label` unless the split has none; without labels it has a line of names."""
    if row.splits[name].submission:
        return read_tsv(path, {text: text if row.bare else column for text, column in row.texts.items()})
    return read_tsv(path, {**row.texts, "label": row.label}, width=row.bare or None, skip_broken=row.broken)


def read_copy(row: Benchmark, report: Report) -> dict[str, TextColumns]:
    """The splits of the Hub's copy."""
    tables: dict[str, TextColumns] = {}
    columns = {text: text for text in row.texts} | {"label": "label"}
    for config in dict.fromkeys(split.hub[0] for split in row.splits.values()):
        splits = {name: split for name, split in row.splits.items() if split.hub[0] == config}
        optional = [name for name, split in splits.items() if not split.needed]
        try:
            found = {name: split.hub[1] for name, split in splits.items()}
            tables |= read_hub(GLUE_HUB, config, found, columns, optional=optional)
        except UsageError as error:
            if len(optional) < len(splits):
                raise
            report(f"{row.title}: {error}")
    return tables


def read_examples(row: Benchmark, table: TextColumns, labelled: bool) -> SentenceExamples:
    """The texts and the labels of a table."""
    texts = [table.columns[text] for text in row.texts]
    return {"texts": texts, "labels": read_labels(row, table) if labelled else None}


def read_labels(row: Benchmark, table: TextColumns) -> np.ndarray:
    """(S,) the column `label`: int64 places among the labels, or float32 scores.

    Raises:
        UsageError: there is none, or one that the task does not have.
    """
    read = parse_score if not row.labels else index_labels(row).__getitem__
    expected = f"one of {', '.join(row.labels)}" if row.labels else "a score from 0 to 5"
    values = convert_labels(table, read, expected)
    return np.array(values, np.int64 if row.labels else np.float32)


def index_labels(row: Benchmark) -> dict[str, int]:
    """Label, in the official spelling or by name -> its place."""
    return {text: index for index, (spelling, name) in enumerate(row.labels.items()) for text in (spelling, name)}


def parse_score(text: str) -> float:
    """A similarity from 0 to 5."""
    if not 0 <= (value := float(text)) <= 5:
        raise ValueError(text)
    return value


def read_answers(row: Benchmark, path: Path) -> np.ndarray:
    """(S,) the answers of a file in the leaderboard's form, in the order of their index, or of one an answer a line."""
    try:
        table = read_tsv(path, {"index": "index", "label": "prediction"})
    except UsageError as error:
        try:
            table = read_tsv(path, {"label": 0}, width=1)
        except UsageError:
            raise error from None
    read = float if not row.labels else index_labels(row).__getitem__
    expected = f"one of {', '.join(index_labels(row))}" if row.labels else "a number"
    answers = convert_labels(table, read, expected, "the answer")
    if "index" not in table.columns:
        return np.array(answers)
    places = {text: place for place, text in enumerate(table.columns["index"])}
    try:
        return np.array([answers[places[str(number)]] for number in range(len(answers))])
    except KeyError as error:
        raise UsageError(
            f"{path} has no answer with the index {error.args[0]}; number them from 0 without gaps"
        ) from None
