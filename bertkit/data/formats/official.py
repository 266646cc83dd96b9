"""Official tables, whose columns are known: tab-separated files and the Hub's copies -> texts.

Tab-separated files are not parsed as CSV: `"` is an ordinary character that need not be closed, and U+2028 does not end
a line.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa

from bertkit.data.formats.hub import load_splits
from bertkit.data.formats.line import FILE_REMEDY, LONGEST_QUOTED, raise_errors, split_rows, walk_file
from bertkit.data.formats.rows import Columns, convert_dataset, gather, locate_column, name_cells
from bertkit.errors import UsageError
from bertkit.system.progress import Report, ignore

NAME_REMEDY = "its first line must name the columns as in the official file"


def read_tsv(
    path: str | Path,
    columns: Mapping[str, str | int],
    *,
    width: int = 0,
    skip_broken: bool = False,
    report: Report = ignore,
) -> Columns:
    """Read columns of a tab-separated file in UTF-8.

    Cells are separated by tabs and rows by \n only, and nothing is quoted. A byte order mark, \r before \n and blank
    lines are dropped.

    Args:
        columns: New name -> name in the file's first line or, for a file without a header line, the column's number
            from 0.
        width: The number of columns of a file without a header line.
        skip_broken: Whether to skip rows with another number of columns, as the Hub's copy of QQP does, and report
            their number.
    """
    path, wanted = Path(path), {new: str(old) for new, old in columns.items()}
    rows = split_rows(raise_errors(path, enumerate(walk_file(path), 1)), "\t", is_plain=True)
    if width:
        rows = chain([(0, list(map(str, range(width))))], rows)
    broken = 0

    def walk() -> Iterator[tuple[int, dict[str, str]]]:
        nonlocal broken
        for number, row in name_cells(path, rows, list(wanted.values()), NAME_REMEDY):
            if skip_broken and isinstance(row, UsageError):
                broken += 1
            else:
                yield number, row if isinstance(row, UsageError) else {new: row[old] for new, old in wanted.items()}

    table, lines = gather(str(path), raise_errors(path, walk()))
    if broken:
        report(f"{path}: skipping {broken:,} broken rows")
    return Columns(str(path), table, frozenset(), lines)


def read_hub(
    name: str, config: str, splits: Mapping[str, str], columns: Mapping[str, str], *, optional: Container[str] = ()
) -> dict[str, Columns]:
    """Read the splits of a data set on the Hub; `splits` and `columns` map the wanted names to the Hub's.

    A class label becomes its name and a number its shortest text in the column's own precision: a float32 that holds
    the official file's 3.800 is "3.8". A missing value is "". A column of labels or numbers with only missing values
    (-1 on the Hub), such as the labels of GLUE's test sets, is left out of that split. An `optional` split that the
    data set does not have is left out too.

    If the Hub is unreachable, the copy in the cache of `datasets` is used.
    """
    tables = {}
    for split, source, rows in load_splits(name, config, splits, optional):
        for column in columns.values():
            locate_column(source, rows.column_names, column, FILE_REMEDY)
        found = pick_columns(convert_dataset(source, rows.select_columns([*columns.values()])), columns)
        others = [new for new, old in columns.items() if rows.features[old].dtype != "string"]
        empty = [new for new in others if {*found.find(new).unique().to_pylist()} <= {"", "-1", "-1.0"}]
        tables[split] = replace(found, table=found.table.drop_columns(empty))
    return tables


def pick_columns(rows: Columns, columns: Mapping[str, str]) -> Columns:
    """Return some columns of texts; `columns` maps the wanted names to those in the table."""
    for name in columns.values():
        locate_column(rows.source, rows.table.column_names, name, NAME_REMEDY)
    return replace(rows, table=pa.table({new: rows.find(old) for new, old in columns.items()}), classes={})


def convert_labels(table: Columns, read: Callable[[str], float], expected: str) -> list[float]:
    """Convert the column `label` with `read`."""
    if "label" not in table.table.column_names:
        raise UsageError(f"{table.source} has no labels; only splits with labels can be trained on or scored")
    values = []
    for row, text in enumerate(table.table.column("label").to_pylist()):
        try:
            values.append(read(text))
        except (KeyError, ValueError):
            label = text[:LONGEST_QUOTED]
            raise UsageError(f"{table.locate(row)}: label {label!r} must be {expected}; correct the line") from None
    return values
