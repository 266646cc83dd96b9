"""A person's own rows, for training and for prediction: files of tables, objects or texts, or a data set on the Hub.

One generator yields the rows of a file: each a dict, or the error in its place. For training they are collected as
texts in Arrow arrays, chunk by chunk. No text stands for a missing value: "NA", "null" and "nan" stay as they are.
Left out: types, which are decided over the whole training split, and what a model requires of an input.
"""

import difflib
import os
import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bertkit.data.formats.hub import load_hub
from bertkit.data.formats.line import (
    ARRAY_REMEDY,
    ENCODINGS,
    INPUT,
    LONGEST_QUOTED,
    MOST_NAMES,
    ROW,
    UTF8,
    Rows,
    detect_encoding,
    detect_separator,
    is_quoted,
    make_text,
    open_file,
    parse_line,
    raise_errors,
    read_json,
    split_rows,
    walk_file,
    walk_lines,
    walk_sheet,
)
from bertkit.errors import UsageError, as_usage_error, check_access, pluralize
from bertkit.system.progress import Report, ignore

# Suffix -> the unit of its rows' numbers; all except .parquet and .xlsx also with .gz, the last for prediction only.
UNITS = dict.fromkeys((".csv", ".tsv", ".jsonl"), "line") | dict.fromkeys((".json", ".parquet", ".xlsx"), "row")
SUFFIXES = tuple(UNITS)
UNITS[".txt"] = "line"
COLUMN_SUFFIXES = (".csv", ".tsv", ".parquet", ".xlsx")  # all rows of such a file have the same names
SPLIT_NAMES = {"train": ("train",), "dev": ("dev", "validation", "val", "valid"), "test": ("test",)}
SPLIT_FILE = re.compile(rf"(\w+)({'|'.join(map(re.escape, SUFFIXES))})(\.gz)?")
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of `save_to_disk`: several splits, or one
STDIN = "-"
CHUNK_ROWS = 2_000  # rows converted at a time, of which a text may have megabytes
FEATURES = b"huggingface"  # the key of the schema under which `datasets` keeps the types of its columns
TEXT = pa.large_string()  # offsets of 32 bits end at 2 GB, also for the result of `take`
SOURCES = f"a file ({', '.join(SUFFIXES)}), a folder with {{}}.csv, or a Hub data set owner/name[:config][@revision]"
TEXT_REMEDY = "name the columns of the texts with --text"
FLAT = "holds objects, or lists in some rows only; give texts, numbers or lists of these in every row"

Input = str | Mapping[str, Any]


@dataclass(frozen=True)
class LocatedInput:
    """The value of a line or row, or the error in it, and its origin."""

    value: Input | UsageError
    source: str  # the file and the unit, "line" or "row"
    number: int  # from 1
    is_row: bool = False  # whether it is a row of a table, so that all others have the same names

    @property
    def origin(self) -> str:
        """Return the file and the number."""
        return f"{self.source} {self.number}"


@dataclass(frozen=True, eq=False)
class Columns:
    """A table of texts."""

    source: str  # the file, or the data set and its split, for messages
    table: pa.Table  # S rows of `large_string` columns without nulls, in the file's order; a missing value is ""
    # The columns whose cells are lists. Each cell is the JSON text of a list of texts, or "" if missing
    lists: frozenset[str]
    lines: Sequence[int]  # the row's first line in its file, or its number from 1
    unit: str = "line"  # the unit of `lines`, "line" or "row"
    # The columns of class labels of Hugging Face data sets -> their names
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The columns whose cells are neither texts nor lists of texts; they are JSON texts
    faults: frozenset[str] = frozenset()
    # The row's number in its file from 1, which differs from `lines` where a row has several lines
    records: Sequence[int] = ()

    def __len__(self) -> int:
        """Return the number of rows S."""
        return self.table.num_rows

    def locate(self, row: int) -> str:
        """Return the file and line of a row, for messages."""
        return f"{self.source}, {self.name_row(row)}"

    def name_row(self, row: int) -> str:
        """Return the line of a row, and where a sheet shows another number the number of the record."""
        line = f"{self.unit} {self.lines[row]}"
        return f"{line} (record {self.records[row]})" if len(self.records) else line

    def take(self, rows: np.ndarray) -> "Columns":
        """Return the given rows in the given order."""
        lines = array("q", np.asarray(self.lines)[rows].tolist())
        records = array("q", np.asarray(self.records)[rows].tolist()) if len(self.records) else ()
        return replace(self, table=self.table.take(pa.array(rows, pa.int64())), lines=lines, records=records)

    def find(self, name: str) -> pa.ChunkedArray:
        """Return a column of texts or of lists of texts; an absent one or one of the `faults` is a UsageError."""
        column = locate_column(self.source, self.table.column_names, name, "name one of its columns")
        if name in self.faults:
            raise UsageError(f"{self.source}: {name[:LONGEST_QUOTED]!r} {FLAT}")
        return self.table.column(column)

    def walk(self, decoded: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the rows; `decoded` are columns of JSON texts, whose values take their place."""
        for batch in self.table.to_batches(CHUNK_ROWS):
            for row in batch.to_pylist():
                yield row | {name: msgspec.json.decode(row[name] or "[]") for name in decoded}


def locate_column(source: str, names: Sequence[str], wanted: str, remedy: str) -> int:
    """Return the index of a column in `names`."""
    if wanted in names:
        return names.index(wanted)
    nearest = "".join(f" (nearest: {name!r})" for name in difflib.get_close_matches(wanted, names, n=1))
    listed = ", ".join(repr(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMES])  # a name can be a whole line of text
    raise UsageError(f"{source} has no column {wanted!r}; found {listed or 'none'}{nearest}; {remedy}")


# --- files and splits


def read_splits(source: str, read: Callable[[Path], Any] | None = None, needs_train: bool = True) -> dict[str, Any]:
    """Read the splits of a person's data as tables: train, and dev and test where they are given.

    Args:
        source: A file, which is train; a folder with files named by SPLIT_NAMES and SUFFIXES, or written by
            `save_to_disk`; or a data set on the Hub with splits of these names.
        read: A reader of files other than `read_columns`, for further formats or settings.
        needs_train: Whether several splits without train are an error.
    """
    path, read = Path(source), read or read_columns
    try:
        check_access(path)
        if path.exists() and not path.is_dir():
            return {"train": read(path)}
        if path.is_dir() and not _is_saved(path):
            matched = _match_splits(source, _list_stems(path), needs_train)
            return {split: read(path / name) for split, name in matched.items()}
        if path.is_dir():
            import datasets

            loaded = datasets.load_from_disk(source)
            found = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        else:
            found = load_hub(source, f"give {SOURCES.format('train')}")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{source} cannot be read ({reason}); check its path and permissions") from None
    matched = _match_splits(source, dict(zip(found, found, strict=True)), needs_train)
    return {split: convert_dataset(f"{source}, {name}", found[name]) for split, name in matched.items()}


def has_splits(folder: str | Path) -> bool:
    """Return whether a folder has a file with the name of a split, or was written by `save_to_disk`."""
    allowed = {*chain(*SPLIT_NAMES.values())}
    with suppress(OSError):
        return _is_saved(Path(folder)) or not allowed.isdisjoint(_list_stems(Path(folder)).values())
    return False


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _list_stems(folder: Path) -> dict[str, str]:
    """Return the names of the tables in a folder, in order, and each one's name without suffixes."""
    names = sorted(file.name for file in folder.iterdir())
    return {name: found[1] for name in names if (found := SPLIT_FILE.fullmatch(name))}


def _match_splits(source: str, stems: Mapping[str, str], needs_train: bool) -> dict[str, str]:
    """Return split -> name of its file or its name on the Hub; `stems` maps that name to what should be a split's."""
    matched = {}
    for split, allowed in SPLIT_NAMES.items():
        names = [name for name, stem in stems.items() if stem in allowed]
        if len(names) > 1:
            raise UsageError(f"{source} has {' and '.join(names)} for the split {split}; keep one of them")
        if names:
            matched[split] = names[0]
    if "train" not in matched and (needs_train or not matched):
        listed = ", ".join(list(stems)[:MOST_NAMES]) or "none"
        wanted = "train" if needs_train else "test"
        raise UsageError(f"{source} has no split {wanted} (found: {listed}); give {SOURCES.format(wanted)}")
    return matched


def check_suffix(source: str | Path, allowed: Sequence[str] = SUFFIXES) -> str:
    """Return the suffix that decides the format of a file; another than those allowed is a UsageError."""
    suffix = Path(str(source).removesuffix(".gz")).suffix
    if suffix not in allowed or str(source).endswith((".parquet.gz", ".xlsx.gz")):
        listed = f"{', '.join(allowed)}; .gz may follow, but not .parquet or .xlsx"
        raise UsageError(f"{source} has an unknown suffix (expected {listed}); rename or convert it")
    return suffix


# --- rows for training


def read_columns(path: Path, **reading: Any) -> Columns:
    """Read a table as texts; class labels of Hugging Face data sets in Parquet become their names.

    Args:
        reading: `sep`, `encoding` and `report` of `walk_rows`.
    """
    kind, source = check_suffix(path), str(path)
    if kind == ".parquet":
        with open_parquet(path) as file:
            return convert(source, file.schema_arrow, file.iter_batches(CHUNK_ROWS))
    unit, is_json = UNITS[kind], kind in (".json", ".jsonl")
    rows = raise_errors(path, walk_rows(path, **reading), unit)
    if is_json:
        return write_values(source, rows, unit)
    table, lines = gather(source, rows)
    is_plain = lines[-1] == len(lines) + 1  # one line for each row
    return Columns(source, table, frozenset(), lines, unit, records=() if is_plain else range(1, len(lines) + 1))


def choose_reader(options: Mapping[str, Any], report: Report) -> Callable[[Path], Columns]:
    """Return `read_columns` with the settings in a task's options."""
    return partial(read_columns, sep=options.get("sep", ""), encoding=options.get("encoding", ""), report=report)


def gather(source: str, rows: Iterator[tuple[int, Mapping[str, str]]]) -> tuple[pa.Table, array]:
    """Return rows of texts as a table, and their lines; a cell that a row lacks is an empty text."""
    tables, lines = [], array("q")
    while chunk := list(islice(rows, CHUNK_ROWS)):
        lines.extend(number for number, _ in chunk)
        schema = pa.schema([(name, TEXT) for name in dict.fromkeys(chain.from_iterable(row for _, row in chunk))])
        tables.append(pa.Table.from_pylist([row for _, row in chunk], schema))
    if not tables:
        raise UsageError(f"{source} has no rows; give a table with a header and at least one row")
    table = pa.concat_tables(tables, promote_options="default")
    check_names(source, table.column_names)
    filled = [column.fill_null("") if column.null_count else column for column in table.columns]
    return pa.table(filled, table.column_names), lines


def write_values(source: str, rows: Rows, unit: str, classes: Mapping[str, Sequence[str]] | None = None) -> Columns:
    """Return rows of any values as texts, and lists of plain values as JSON of texts."""
    shapes: dict[str, set[str]] = {}  # column -> the kinds of its values

    def walk() -> Iterator[tuple[int, dict[str, str]]]:
        for number, row in rows:
            for key, value in row.items():
                is_list = isinstance(value, list)
                is_nested = any(isinstance(item, dict | list) for item in (value if is_list else [value]))
                if value is not None:
                    shape = "lists" if is_list else "plain values"
                    if is_nested:
                        shape = "objects"
                    shapes.setdefault(key, set()).add(shape)
                row[key] = make_text(list(map(make_text, value)) if is_list and not is_nested else value)
            if row:
                yield number, row

    table, lines = gather(source, walk())
    faults = frozenset(key for key, found in shapes.items() if len(found) > 1 or "objects" in found)
    lists = frozenset(key for key, found in shapes.items() if found == {"lists"})
    return Columns(source, table, lists, lines, unit, classes or {}, faults)


# --- rows for prediction


def read_inputs(source: str, columns: Sequence[str] = (), **reading: Any) -> Iterator[LocatedInput]:
    """Yield the inputs of a file or of standard input, read lazily.

    The suffix decides the format. On standard input, a line that begins with { or " is JSON, any other line is a text.

    Args:
        columns: The columns that a table must have.
        reading: `sep`, `encoding` and `report` of `walk_rows`.
    """
    check_source(source)
    if source == STDIN:
        for number, line in enumerate(walk_lines(sys.stdin.buffer), 1):
            text = line if isinstance(line, UsageError) else line.rstrip("\r\n")
            is_json = isinstance(text, str) and text.lstrip()[:1] in ("{", '"')
            yield LocatedInput(parse_line(text) if is_json else text, "standard input, line", number)
        return
    kind, texts = check_suffix(source, tuple(UNITS)), {}
    for number, row in walk_rows(Path(source), columns=columns, decoder=INPUT, **reading):
        if isinstance(row, dict) and kind not in COLUMN_SUFFIXES:  # a row without a text has empty ones, as in a table
            texts |= {name: "" for name, value in row.items() if isinstance(value, str)}
            row = row if any(isinstance(value, str | list | dict) for value in row.values()) else texts | row
        yield LocatedInput(row, f"{source}, {UNITS[kind]}", number, kind in COLUMN_SUFFIXES)


def check_source(source: str) -> None:
    """Check that the input is standard input or a file with a known suffix."""
    if Path(source).is_file():
        check_suffix(source, tuple(UNITS))
    elif source != STDIN:
        check_access(source)
        found = f"{source} is a folder" if Path(source).is_dir() else f"there is no file {source}"
        raise UsageError(f"{found}; name a file with --input, or - for standard input")


def check_output(source: str, output: Path, option: str = "--output") -> None:
    """Check that the output is not the file of the inputs under any of its names."""
    with suppress(OSError):  # the output does not exist yet, or standard input is not a file
        read = sys.stdin.fileno() if source == STDIN else source
        if output.is_file() and os.path.samestat(os.stat(read), output.stat()):
            raise UsageError(f"{output} is also the input and would be overwritten; name another file with {option}")


# --- the rows of a file


def walk_rows(
    path: Path,
    *,
    sep: str = "",
    encoding: str = "",
    report: Report = ignore,
    columns: Sequence[str] = (),
    decoder: msgspec.json.Decoder = ROW,
) -> Rows:
    """Yield the rows of a file; one that cannot be read is an error in its place, and those after it are still read.

    .csv (RFC 4180) and .tsv: columns named by the first line; where tabs separate, quotes are those of CSV only if the
    whole file follows its rules. .xlsx: the first sheet. .jsonl: one object per line. .json: an array of objects.
    .parquet: columns. .txt: a text per line. Blank lines of others are skipped.

    Args:
        sep: The separator of cells; "": found from the header and the first rows.
        encoding: "": UTF-8, UTF-16 or, except for JSON, cp1252 or GB18030, as the file is.
        report: Receives a line about a form that is not the usual one.
        columns: Columns that a table must have.
    """
    kind, notes = check_suffix(path, tuple(UNITS)), []
    if kind == ".parquet":
        return _parse(_walk_parquet(path, columns), decoder)
    if kind == ".xlsx":
        return name_cells(path, walk_sheet(path, notes), columns, notes=notes, report=report)
    found = detect_encoding(path, encoding, may_be_local=kind not in (".jsonl", ".json"))
    if not encoding and found != UTF8:
        notes.append(ENCODINGS[found])
    lines = enumerate(walk_file(path, found), 1)
    if kind in COLUMN_SUFFIXES:
        usual = "\t" if kind == ".tsv" else ","
        mark = detect_separator(walk_file(path, found), usual, sep)
        if mark not in (usual, sep):
            notes.insert(0, "cells separated by tabs" if mark == "\t" else f'cells separated by "{mark}"')
        is_plain = mark == "\t" and not is_quoted(walk_file(path, found))
        return name_cells(path, split_rows(lines, mark, is_plain), columns, notes=notes, report=report)
    if notes:
        report(f"{path}: {', '.join(notes)}")
    # Many name JSON lines .json: the first two lines are an object each.
    if kind == ".json":
        first = [parse_line(line) for line in islice(walk_file(path, found), 2) if isinstance(line, str)]
        if list(map(type, first)) != [dict, dict]:
            lines = enumerate(map(bytes, read_json(path, list[msgspec.Raw], ARRAY_REMEDY, found)), 1)
    return _parse(lines, None if kind == ".txt" else decoder)


def _parse(contents: Iterable[tuple[int, str | bytes | UsageError]], decoder: msgspec.json.Decoder | None) -> Rows:
    """Yield the values of JSON texts, or without a decoder the texts, and the errors in their place."""
    for number, content in contents:
        if isinstance(content, UsageError):
            yield number, content
        elif decoder is None:
            yield number, content.rstrip("\r\n")
        elif content.strip():
            yield number, parse_line(content, decoder)


def name_cells(
    path: Path,
    rows: Rows,
    columns: Sequence[str] = (),
    remedy: str = TEXT_REMEDY,
    notes: Sequence[str] = (),
    report: Report = ignore,
) -> Rows:
    """Yield rows of cells as dicts; the first row has the names, among them those of `columns`.

    Args:
        notes: Remarks on the form of the file, for `report`.
    """
    number, names = next(rows, (1, []))
    origin = f"{path}, {UNITS.get(path.suffix, 'line')} {number}"
    if isinstance(names, UsageError):
        raise UsageError(f"{origin} {names}")
    first = int(len(names) > 1 and not names[0].strip())  # pandas gives its index no name
    if first:
        notes = [*notes, "pandas' index column ignored"]
    if notes:
        report(f"{path}: {', '.join(notes)}")
    check_names(origin, names[first:])
    for name in columns:
        locate_column(str(path), names, name, remedy)
    for number, cells in rows:
        if isinstance(cells, UsageError):
            yield number, cells
        elif len(cells) != len(names):
            if any(cells):  # a line of separators alone is left out, as a blank one is
                count = pluralize(len(cells), "cell")
                yield number, UsageError(f"has {count}, expected {len(names)}; correct the line")
        elif cells == names and len(names) > 1:
            yield number, UsageError("repeats the header, as in joined files; delete the line")
        else:
            yield number, dict(zip(names[first:], cells[first:], strict=True))


def check_names(origin: str, names: Sequence[str]) -> None:
    """Check that each column has a name of its own."""
    for number, name in enumerate(names, 1):
        if not name.strip() or names.count(name) > 1:
            has = f"{name[:LONGEST_QUOTED]!r} names {names.count(name)} columns"
            trouble = has if name.strip() else f"column {number} has no name"
            raise UsageError(f"{origin}: {trouble}; give every column a name of its own")


# --- Arrow: Parquet and the Hub


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; errors of opening and reading are UsageErrors."""
    with open_file(path) as stream, as_usage_error(str(path), "write it again as Parquet"):
        yield pq.ParquetFile(stream)


def _walk_parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a Parquet file as JSON; dates and decimals are texts, NaN is null."""
    with open_parquet(path) as file:
        check_names(str(path), file.schema_arrow.names)
        for name in columns:
            locate_column(str(path), file.schema_arrow.names, name, TEXT_REMEDY)
        for number, row in enumerate(walk_batches(file.iter_batches(CHUNK_ROWS)), 1):
            yield number, msgspec.json.encode(row, enc_hook=str)


def convert_dataset(source: str, rows: Any) -> Columns:
    """Convert a `datasets.Dataset` to texts."""
    tables = rows.with_format("arrow").iter(CHUNK_ROWS)
    return convert(source, rows.features.arrow_schema, chain.from_iterable(table.to_batches() for table in tables))


def convert(source: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Columns:
    """Convert columns of any types to texts; class labels become their names."""
    check_names(source, schema.names)
    classes = read_class_names(schema)
    return write_values(source, enumerate(walk_batches(batches, classes), 1), "row", classes)


def walk_batches(
    batches: Iterable[pa.RecordBatch], classes: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Yield the rows of Arrow's columns; class labels become their names."""

    def name_class(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [name_class(item, names) for item in value]
        if not isinstance(value, int):
            return value
        return names[value] if value >= 0 else None

    for batch in batches:
        columns = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.type == pa.float32():  # 3.8 is not 3.799999952316284
                column = column.cast(pa.string()).cast(pa.float64())
            if pa.types.is_timestamp(column.type):  # datetime has microseconds
                column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
            values = column.to_pylist()
            if name in classes:
                values = [name_class(value, classes[name]) for value in values]
            columns.append([value.decode(errors="replace") if isinstance(value, bytes) else value for value in values])
        yield from (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def read_class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return column -> names of the class labels of `datasets` in it or in its lists."""
    classes = {}
    wrong = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError)
    with suppress(*wrong):  # the columns can be read without their features
        for name, feature in msgspec.json.decode(schema.metadata[FEATURES])["info"]["features"].items():
            while isinstance(feature, list) or "feature" in feature:
                feature = feature[0] if isinstance(feature, list) else feature["feature"]
            if feature["_type"] == "ClassLabel":
                classes[name] = feature["names"]
    return classes
