"""GLUE (Wang et al. 2019; paper section 4.1): its official files, or the copy on the Hub -> texts and labels by name.

Both sources give the same values. A `Benchmark` names the files and columns of a data set; the table of them is in
`bertkit.tasks.glue`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bertkit.data.formats.official import convert_labels, read_hub, read_tsv
from bertkit.data.formats.rows import Columns
from bertkit.errors import UsageError, check_access
from bertkit.system.progress import Report, ignore

GLUE_HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Split:
    """One file of a task."""

    file: str  # path below the folder of the download
    hub: tuple[str, str]  # the Hub's configuration and split
    needed: bool = False  # whether the split is required
    scores: str = ""  # the name pattern of its scores, with "{}" for the metric; empty if it is not evaluated
    submission: str = ""  # the leaderboard's file of its predictions; such a split has no labels


@dataclass(frozen=True)
class Benchmark:
    """A row of the table in `bertkit.tasks.glue`."""

    name: str
    title: str
    texts: Mapping[str, str | int]  # the Hub's name of a column -> its name in the official files
    labels: Mapping[str, str]  # official spelling -> the Hub's name, in the Hub's order; empty for a score from 0 to 5
    splits: Mapping[str, Split]
    label: str | int = "label"  # the official name of the label column
    metrics: tuple[str, ...] = ("accuracy",)  # names in `bertkit.metrics`; the first one is the paper's
    # Metric -> model and split -> the published score
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bare: int = 0  # the number of columns of train and dev if they have no header line; columns then go by number
    # Whether to skip rows with another number of columns; the official file has a few, the Hub's has none
    broken: bool = False


def read_folder(row: Benchmark, folder: Path, report: Report = ignore) -> dict[str, Columns]:
    """Read the official files below a folder."""
    check_access(folder)
    if not folder.is_dir():
        first = next(iter(row.splits.values())).file
        raise UsageError(f"{folder} is not a folder; give the folder that holds {first}")
    return {
        name: read_split(row, name, folder / split.file, report)
        for name, split in row.splits.items()
        if split.needed or (folder / split.file).exists()
    }


def read_split(row: Benchmark, name: str, path: Path, report: Report = ignore) -> Columns:
    """Read the texts of an official file, and `label` unless the split has none.

    A file without labels has a header line.
    """
    if row.splits[name].submission:
        return read_tsv(path, {text: text if row.bare else column for text, column in row.texts.items()})
    columns = {**row.texts, "label": row.label}
    return read_tsv(path, columns, width=row.bare, skip_broken=row.broken, report=report)


def read_copy(row: Benchmark, report: Report) -> dict[str, Columns]:
    """Read the splits of the Hub's copy."""
    tables: dict[str, Columns] = {}
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


def read_labels(row: Benchmark, table: Columns) -> np.ndarray:
    """Return the column `label` as (S,) int64 label indices, or float32 scores."""
    read = parse_score if not row.labels else index_labels(row).__getitem__
    expected = f"one of {', '.join(row.labels)}" if row.labels else "a score from 0 to 5"
    values = convert_labels(table, read, expected)
    return np.array(values, np.int64 if row.labels else np.float32)


def index_labels(row: Benchmark) -> dict[str, int]:
    """Map each label, in the official spelling and by name, to its index."""
    return {text: index for index, (spelling, name) in enumerate(row.labels.items()) for text in (spelling, name)}


def parse_score(text: str) -> float:
    """Parse a similarity from 0 to 5."""
    if not 0 <= (value := float(text)) <= 5:
        raise ValueError(text)
    return value
