"""Official data files -> columns of texts: the tab-separated files of the GLUE download, and its copy on the Hub.

Both readers give the same `Table`: texts as they stand in the official files, labels by name, so that whoever reads it
need not know where it came from. The GLUE files (Wang et al. 2019; paper §4.1) look like CSV and are not: a `"` is an
ordinary character that nobody closes, and so is U+2028.

Left out: what the columns mean (`bertkit.tasks`).
"""

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.corpus import find_hub_trouble
from bertkit.errors import UsageError, join_lines

if TYPE_CHECKING:
    import datasets

REMEDY = "give the official files with --data DIR"
MOST_NAMES, LONGEST_NAME = 20, 40  # columns in a message, and characters of each


@dataclass(frozen=True, eq=False)
class Table:
    """Columns side by side: `columns[name][row]`, all texts.

    `lines[row]` is the row's line in its file, or the row itself on the Hub, from 1; `broken` are the lines that were
    passed over because they had another number of columns.
    """

    source: str
    columns: dict[str, list[str]]
    lines: Sequence[int]
    broken: Sequence[int] = ()

    def locate(self, row: int) -> str:
        """What a message calls this row: the file and the line."""
        return f"{self.source}, line {self.lines[row]}"


# --- tab-separated files


def read_tsv(
    path: str | Path,
    columns: Mapping[str, str | int],
    *,
    width: int | None = None,
    skip_broken: bool = False,
) -> Table:
    """The columns of a file in UTF-8, under the names that `columns` gives them.

    Its values are the names in the file's first line or, for a file without such a line, the columns' numbers from 0;
    then `width` is the number of columns of every row (that of the first row if not given). Cells are cut at tabs and
    rows at \\n alone, and nothing is quoted; a byte order mark, \\r before \\n and blank lines at the end are dropped.
    `skip_broken` passes over rows with another number of columns, as the Hub's copy of QQP does; a blank line in the
    middle is such a row, except in a file of one column, where it is an empty text.

    Raises:
        UsageError: a file that is missing, not UTF-8 or without rows, a missing column, or a row of another width.
    """
    lines = enumerate(_read_lines(Path(path)), 1)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty; download the official file again")
    cells = first[1].split("\t")
    if any(isinstance(column, int) for column in columns.values()):
        places = list(columns.values())
        width = width or max(len(cells), *(place + 1 for place in places))
        lines = chain([first], lines)
    else:
        remedy = "its first line must name the columns as the official file's does"
        places = [_find_column(str(path), cells, column, remedy) for column in columns.values()]
        width = len(cells)
    table = Table(str(path), {name: [] for name in columns}, [], [])
    _fill(table, lines, places, width, skip_broken)
    if not table.lines:
        skipped = f" ({len(table.broken):,} have another number)" if table.broken else ""
        raise UsageError(f"{path} has no rows of {width} columns{skipped}; download the official file again")
    return table


def _fill(table: Table, lines: Iterable[tuple[int, str]], places: list[int], width: int, skip_broken: bool) -> None:
    wanted = [(column.append, place) for column, place in zip(table.columns.values(), places, strict=True)]
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != width:
            if not skip_broken:
                raise UsageError(
                    f"{table.source}, line {number} has {len(cells)} column{'s' * (len(cells) != 1)} and {width} were "
                    "expected; mend the line or download the official file again"
                )
            table.broken.append(number)
            continue
        table.lines.append(number)
        for append, place in wanted:
            append(cells[place])


def _find_column(source: str, names: Sequence[str], wanted: str, remedy: str) -> int:
    """Its place among `names`."""
    if wanted in names:
        return names.index(wanted)
    nearest = "".join(f" (nearest: {name!r})" for name in difflib.get_close_matches(wanted, names, n=1))
    listed = ", ".join(repr(name[:LONGEST_NAME]) for name in names[:MOST_NAMES])  # it can be a line of text
    raise UsageError(f"{source} has no column {wanted!r} but {listed}{nearest}; {remedy}")


def _read_lines(path: Path) -> Iterator[str]:
    """Its lines, without the blank ones at its end."""
    blank = 0
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                text = _decode(line, f"{path}, line {number}", "utf-8-sig" if number == 1 else "utf-8")
                if not text:
                    blank += 1
                    continue
                yield from [""] * blank
                blank = 0
                yield text
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the folder and the name of the file") from None
    except OSError as error:
        remedy = "name a file in it" if path.is_dir() else "check its path and permissions"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None


def _decode(line: bytes, where: str, encoding: str) -> str:
    if b"\0" in line:
        raise UsageError(f"{where} has a NUL byte, as binary files and UTF-16 have; give text in UTF-8")
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} in place {error.start + 1}); "
            "convert the file, for instance with iconv -f latin1 -t utf-8"
        ) from None


# --- the Hugging Face Hub


def read_hub(
    name: str,
    config: str,
    splits: Mapping[str, str],
    columns: Mapping[str, str],
    *,
    optional: Container[str] = (),
) -> dict[str, Table]:
    """Split -> its columns, for a data set on the Hub; `splits` and `columns` map the wanted names to the Hub's.

    A class label becomes its name and a number its shortest text in the column's own precision: a float32 that holds
    the official file's 3.800 is "3.8". A missing value is "". A column of labels or numbers in which all are missing,
    or -1 as the Hub writes it, is left out of that split: so are the labels of GLUE's test sets. So is an `optional`
    split that the data set does not have.

    Without the Hub, the copy in the cache of `datasets` does.

    Raises:
        UsageError: the Hub cannot serve the data set and no copy is at hand, or a split or a column is missing.
    """
    source = f"{name}:{config}"
    found = _load(name, config)
    tables: dict[str, Table] = {}
    for split, hub_split in splits.items():
        if hub_split in found:
            tables[split] = _convert(found[hub_split], f"{source}, {hub_split}", columns)
        elif split not in optional:
            raise UsageError(f"the data set {source} has no split {hub_split!r} but {', '.join(found)}; {REMEDY}")
    return tables


def _load(name: str, config: str) -> "datasets.DatasetDict":
    trouble = find_hub_trouble(name, "dataset")
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache

        if not trouble:
            return datasets.load_dataset(name, config)
        # What load_dataset itself turns to in the end; without a network it would try for long before.
        copy = {"config_name": config, "version": "auto", "hash": "auto"}  # auto: the latest in the cache
        return Cache(repo_id=name, dataset_name=name.rpartition("/")[2], **copy).as_dataset()
    except Exception as error:  # also the transport's: huggingface_hub has changed its HTTP library more than once
        trouble = trouble or f"the data set {name}:{config} cannot be loaded ({join_lines(error)})"
    raise UsageError(f"{trouble}; {REMEDY}")


def _convert(rows: "datasets.Dataset", source: str, columns: Mapping[str, str]) -> Table:
    if not len(rows):
        raise UsageError(f"{source} has no rows; {REMEDY}")
    texts: dict[str, list[str]] = {}
    for name, hub_name in columns.items():
        _find_column(source, rows.column_names, hub_name, REMEDY)
        feature, values = rows.features[hub_name], rows[hub_name][:]
        if "string" in feature.dtype or any(value not in (None, -1) for value in values):
            texts[name] = _write(feature, values)
    return Table(source, texts, range(1, len(rows) + 1))


def _write(feature: Any, values: list[Any]) -> list[str]:
    """The values as an official file has them."""
    if hasattr(feature, "names"):  # of a class label
        return ["" if value in (None, -1) else feature.names[value] for value in values]
    kind = str if "string" in feature.dtype else np.dtype(feature.dtype).type
    return ["" if value is None else str(kind(value)) for value in values]
