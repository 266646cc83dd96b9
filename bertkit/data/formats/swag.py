"""SWAG (Zellers et al. 2018; paper section 4.4): its official files, or the Hub -> questions with four endings."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bertkit.data.formats.official import convert_labels, pick_columns, read_hub
from bertkit.data.formats.rows import Columns, read_columns
from bertkit.errors import UsageError

HUB_SWAG = ("allenai/swag", "regular")  # configuration with four endings and a label, like the official files
ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = {"context": "sent1", "start": "sent2"} | {name: name for name in ENDINGS}


@dataclass(frozen=True)
class Situation:
    """A question of SWAG: which of four endings continues the text."""

    context: str  # a sentence
    start: str  # the first words of the next sentence
    endings: tuple[str, ...]  # four ways to complete the next sentence
    answer: int | None  # the index of the right ending, 0 to 3; None in a split without labels
    line: int = field(default=0, compare=False)  # the line in the file, or its number on the Hub


def read_swag(path: str | Path, labelled: bool = True) -> list[Situation]:
    """Read the questions of an official SWAG file in order; columns are found by name.

    Args:
        path: train.csv, val.csv or test.csv.
        labelled: Whether labels are required; if not, as for test.csv, a label column is ignored.
    """
    rows = read_columns(Path(path), sep=",", encoding="utf-8")
    return _make_situations(pick_columns(rows, SWAG_COLUMNS | ({"label": "label"} if labelled else {})), labelled)


def _make_situations(table: Columns, labelled: bool) -> list[Situation]:
    labels = [None] * len(table)
    if labelled:
        numbers = {str(number): number for number in range(len(ENDINGS))}
        labels = convert_labels(table, numbers.__getitem__, "one of 0, 1, 2, 3")
    texts = zip(*(table.table.column(name).to_pylist() for name in SWAG_COLUMNS), strict=True)
    situations = []
    for row, ((context, start, *endings), label) in enumerate(zip(texts, labels, strict=True)):
        for name, ending in zip(ENDINGS, endings, strict=True):
            if not ending.strip():
                raise UsageError(f"{table.locate(row)}: {name} is empty, expected four endings; correct the line")
        situations.append(Situation(context, start, tuple(endings), label, table.lines[row]))
    return situations


def read_swag_copy(splits: Mapping[str, str], unlabelled: Container[str] = ()) -> dict[str, list[Situation]]:
    """Read the splits of SWAG's copy on the Hub, in the form of `read_swag`.

    If the Hub is unreachable, the copy in the cache of `datasets` is used.

    Args:
        splits: The wanted names -> the Hub's.
        unlabelled: Splits without labels; they may be missing.
    """
    tables = read_hub(*HUB_SWAG, splits, SWAG_COLUMNS | {"label": "label"}, optional=unlabelled)
    return {split: _make_situations(table, split not in unlabelled) for split, table in tables.items()}
