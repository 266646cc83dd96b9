"""A person's own tables: CSV, TSV, JSON lines, JSON, Parquet or a data set on the Hub -> columns of texts.

Every cell is read as text, and no text stands for a missing value: "NA", "null" and "nan" stay as they are. Cells are
moved into Arrow arrays chunk by chunk, so a table needs little more memory than its texts.

Left out: types, which are decided over the whole training split (`bertkit.tasks`).
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bertkit.data.formats.hub import load_hub
from bertkit.data.formats.inputs import make_text
from bertkit.data.formats.tables import (
    LONGEST_QUOTED,
    MOST_NAMES,
    check_separator,
    explain_form,
    find_column,
    is_quoted,
    open_file,
    read_array,
    read_csv,
    read_lines,
)
from bertkit.errors import UsageError, check_access, join_lines
from bertkit.system.hub import find_dataset

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")  # all except the last also with .gz
SPLIT_NAMES = {"train": ("train",), "dev": ("dev", "validation", "val", "valid"), "test": ("test",)}
SPLIT_FILE = re.compile(rf"(\w+)({'|'.join(map(re.escape, SUFFIXES))})(\.gz)?")
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of `save_to_disk`: several splits, or one
CHUNK_CHARACTERS = 1_000_000  # cells held as Python strings; each cell counts one more
CHUNK_ROWS = 10_000  # rows of a Parquet file or a Hub data set converted at a time
TEXT = pa.large_string()  # offsets of 32 bits end at 2 GB, also for the result of `take`
PLACES = "a file (.csv, .tsv, .jsonl, .json, .parquet), a folder with train.csv, or a Hub data set owner/name[:config]"
PLAIN = "a text, a number, true, false, null or a list of these"
ROW = msgspec.json.Decoder(dict[str, Any], float_hook=str)  # a fraction keeps its digits


@dataclass(frozen=True, eq=False)
class Columns:
    """A table of texts.

    Attributes:
        source: The file, or the data set and its split, for messages.
        table: S rows of `large_string` columns without nulls, in the file's order; a missing value is "".
        lists: The columns whose cells are lists. Each cell is the JSON text of a list of texts, or "" if missing.
        lines: The row's first line in its file, or its number from 1.
        unit: The unit of `lines`, "line" or "row".
        classes: The columns of class labels of Hugging Face data sets -> their names.
        faults: Column -> why its cells are neither texts nor lists of texts; they are JSON texts.
        records: The row's number in its file from 1, which differs from `lines` where a row has several lines.
    """

    source: str
    table: pa.Table
    lists: frozenset[str]
    lines: Sequence[int]
    unit: str = "line"
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
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

    def find(self, name: str, nested: Collection[str] = ()) -> pa.ChunkedArray:
        """Return a column.

        Args:
            nested: Columns whose cells may be JSON texts of any form.

        Raises:
            UsageError: There is no such column, and the message names the others; or it is among the `faults`.
        """
        column = find_column(self.source, self.table.column_names, name, "name one of its columns")
        if name in self.faults and name not in nested:
            raise UsageError(self.faults[name])
        return self.table.column(column)


def name_apart(name: str, names: Collection[str], suffix: str) -> str:
    """Return a name of a column, with a suffix if the table has a column of this name."""
    while name in names:
        name += suffix
    return name


# --- files and splits


def read_splits(place: str, read: Callable[[Path], Any] | None = None, needs_train: bool = True) -> dict[str, Any]:
    """Read the splits of a person's data as tables: train, and dev and test where they are given.

    Args:
        place: A file, which is train; a folder with train, dev (or validation, val, valid) and test as files with one
            of the SUFFIXES, or written by `save_to_disk`; or a data set on the Hub, owner/name or owner/name:config,
            with splits of these names.
        read: A reader of files other than `read_columns`, for further formats.
        needs_train: Whether several splits without train are an error.

    Raises:
        UsageError: There is no such place or no train in it, two files are for one split, or as `read_columns`.
    """
    path, read = Path(place), read or read_columns
    try:
        check_access(path)
        if saved := next((name for name in SAVED if (path / name).is_file()), None):
            import datasets

            found = datasets.load_from_disk(place)
            return _convert_splits(place, found if saved == SAVED[0] else {"train": found}, needs_train)
        if path.is_dir():
            matched = _match_splits(place, _list_stems(path), needs_train)
            return {split: read(path / name) for split, name in matched.items()}
        if path.exists():
            return {"train": read(path)}
    except OSError as error:
        raise UsageError(f"{place} cannot be read ({error.strerror}); check its path and permissions") from None
    if (dataset := find_dataset(place)) is None:
        raise UsageError(f"{place!r} does not exist; give {PLACES}")
    found = load_hub(*dataset, f"give {PLACES}")
    return _convert_splits(place, found, needs_train)


def _convert_splits(place: str, found: Mapping[str, Any], needs_train: bool) -> dict[str, Columns]:
    """Return the splits of a `datasets.DatasetDict` as tables."""
    return {
        split: _convert(f"{place}, {name}", found[name].features.arrow_schema, _walk_hub(found[name]))
        for split, name in _match_splits(place, dict(zip(found, found, strict=True)), needs_train).items()
    }


def has_splits(folder: str) -> bool:
    """Return whether a folder has a file with the name of a split, or was written by `save_to_disk`."""
    return bool(list_split_files(Path(folder))) or any(Path(folder, name).is_file() for name in SAVED)


def list_split_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that have the name of a split; empty if it cannot be listed."""
    try:
        stems = _list_stems(folder)
    except OSError:
        return []
    return [name for name, stem in stems.items() if any(stem in names for names in SPLIT_NAMES.values())]


def _list_stems(folder: Path) -> dict[str, str]:
    """Return the names of the tables in a folder, in order, and each one's name without suffixes."""
    names = sorted(file.name for file in folder.iterdir())
    return {name: found[1] for name in names if (found := SPLIT_FILE.fullmatch(name))}


def _match_splits(place: str, stems: Mapping[str, str], needs_train: bool) -> dict[str, str]:
    """Return split -> name of its file or its name on the Hub; `stems` maps that name to what should be a split's."""
    matched = {}
    for split, allowed in SPLIT_NAMES.items():
        names = [name for name, stem in stems.items() if stem in allowed]
        if len(names) > 1:
            raise UsageError(f"{place} has {' and '.join(names)} for the split {split}; keep one of them")
        if names:
            matched[split] = names[0]
    if "train" not in matched and (needs_train or not matched):
        listed = ", ".join(list(stems)[:MOST_NAMES]) or "none"
        raise UsageError(f"{place} has no split train (found: {listed}); give {PLACES}")
    return matched


def read_columns(path: Path) -> Columns:
    """Read a table; its suffix decides the format.

    CSV is read by RFC 4180. TSV is read by the same rules if the whole file follows them; otherwise nothing is quoted.
    JSON lines has one object per line; JSON is an array of objects, or an object whose only key holds one. In Parquet,
    class labels of Hugging Face data sets become their names. Blank lines are skipped.

    Raises:
        UsageError: The file cannot be read, is not in the format, or has no rows; a row has more or fewer cells than
            the header or repeats it; or a column has no name or that of another.
    """
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "csv":
        return _read_rows(path, read_csv(path))
    if kind == "tsv":
        return _read_tsv(path)
    if kind == "jsonl":
        lines = enumerate(read_lines(path), 1)
        return _read_objects(path, "line", ((number, line) for number, line in lines if line.strip()))
    if kind == "json":
        return _read_objects(path, "row", enumerate(read_array(path), 1))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise UsageError(f"{path} has an unknown suffix; expected {', '.join(SUFFIXES)}, all but .parquet also with .gz")


def _check_names(place: str, names: Sequence[str]) -> None:
    wrong = [f"column {number} has no name" for number, name in enumerate(names, 1) if not name.strip()]
    counts = Counter(filter(str.strip, names))
    wrong += [f"{name[:LONGEST_QUOTED]!r} names {count} columns" for name, count in counts.items() if count > 1]
    if wrong:
        raise UsageError(f"{place}: {', '.join(wrong[:MOST_NAMES])}; give every column a name of its own")


# --- CSV, TSV and JSON


def _read_rows(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Columns:
    """Read rows of which the first has the names."""
    number, names = next(rows, (0, []))
    if names[:1] == [""] and len(names) > 1:
        names = ["Unnamed: 0", *names[1:]]  # as pandas calls its own index, which has no name in the file
    if names:
        check_separator(path, names)
        _check_names(f"{path}, line {number}", names)

    def walk() -> Iterator[tuple[int, dict[str, str]]]:
        for number, cells in rows:
            if len(cells) != len(names):
                count = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
                raise UsageError(f"{path}, line {number} has {count}, but the header {len(names)}; correct the line")
            if cells[1:] == names[1:] != [] and cells[0].removeprefix("\ufeff") == names[0]:
                raise UsageError(f"{path}, line {number} repeats the header, as in joined files; delete the line")
            yield number, dict(zip(names, cells, strict=True))

    table, lines = _gather(str(path), walk())
    is_plain = lines[-1] == len(lines) + 1  # one line for each row
    return Columns(str(path), table, frozenset(), lines, records=() if is_plain else range(1, len(lines) + 1))


def _read_tsv(path: Path) -> Columns:
    """Read the whole file as quoted if it is well-formed that way, otherwise as unquoted."""
    if is_quoted(read_lines(path, keep_ends=True)):
        return _read_rows(path, read_csv(path, "\t"))
    lines = enumerate(read_lines(path), 1)
    return _read_rows(path, ((number, line.split("\t")) for number, line in lines if line))


def _read_objects(path: Path, unit: str, rows: Iterable[tuple[int, str | msgspec.Raw]]) -> Columns:
    """Read the JSON texts of objects."""
    is_list: dict[str, bool] = {}
    faults: dict[str, str] = {}

    def walk() -> Iterator[tuple[int, dict[str, str]]]:
        for number, text in rows:
            place = f"{path}, {unit} {number}"
            with explain_form(place, 'give an object, such as {"text": "good", "label": 1}'):
                row = ROW.decode(text)
            for key, value in row.items():
                if key not in faults and (fault := _find_fault(value, is_list, key)):
                    faults[key] = f"{place}: {key[:LONGEST_QUOTED]!r} {fault}"
            yield number, {key: _write_value(value) for key, value in row.items()}

    table, lines = _gather(str(path), walk())
    _check_names(str(path), table.column_names)
    lists = frozenset(key for key, found in is_list.items() if found) - faults.keys()
    return Columns(str(path), table, lists, lines, unit, faults=faults)


def _find_fault(value: Any, is_list: dict[str, bool], key: str) -> str:
    """Return why a value of JSON is not a cell, or ""; `is_list` says for each key what its values were before."""
    if value is None:
        return ""
    items = value if isinstance(value, list) else [value]
    if _is_nested(value):
        kind = "an object" if isinstance(value, dict) else "a list of objects or lists"
        return f"holds {kind}, expected {PLAIN}; flatten it"
    if is_list.setdefault(key, items is value) != (items is value):
        kinds = ("a list", "not in rows before") if items is value else ("not a list", "one in rows before")
        return f"is {', but '.join(kinds)}; give lists in every row or none"
    return ""


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict | list) for x in value))


def _write_value(value: Any) -> str:
    """Return a value of JSON as a cell; one that is nested as its JSON text."""
    if _is_nested(value):
        return make_text(value)
    return _write_list(list(map(_write_plain, value))) if isinstance(value, list) else _write_plain(value)


def _write_plain(value: str | float | None) -> str:
    """Return a text as it is, another value as its JSON text, and null as an empty text."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _write_list(texts: list[str]) -> str:
    return msgspec.json.encode(texts).decode()


def _gather(source: str, rows: Iterable[tuple[int, dict[str, str]]]) -> tuple[pa.Table, array]:
    """Return the rows as a table, and their lines."""
    tables, lines, pending, size = [], array("q"), [], 0

    def flush() -> None:
        names = dict.fromkeys(chain.from_iterable(pending))
        tables.append(pa.Table.from_pylist(pending, pa.schema([(name, TEXT) for name in names])))
        pending.clear()

    for number, row in rows:
        if not row:
            raise UsageError(f"{source}: the object {number} is empty; give it a key or delete it")
        lines.append(number)
        pending.append(row)
        size += len(row) + sum(map(len, row.values()))
        if size >= CHUNK_CHARACTERS:
            flush()
            size = 0
    if pending:
        flush()
    return _join(source, tables), lines


def _join(source: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Return one table; a cell that is null or whose column is not in all tables is an empty text."""
    table = pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
    if not table.num_rows:
        raise UsageError(f"{source} has no rows; give a table with a header and at least one row")
    filled = [column.fill_null("") if column.null_count else column for column in table.columns]
    return pa.table(filled, table.column_names)


# --- Parquet and the Hub


def _read_parquet(path: Path) -> Columns:
    with open_file(path) as stream:
        try:
            file = pq.ParquetFile(stream)
            return _convert(str(path), file.schema_arrow, file.iter_batches(CHUNK_ROWS))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read as Parquet ({join_lines(error)}); write it again") from None


def _walk_hub(rows: Any) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a `datasets.Dataset`."""
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.to_batches()


def _convert(source: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Columns:
    """Convert columns of any types to texts."""
    _check_names(source, schema.names)
    classes = _find_classes(schema)
    tables = []
    for batch in batches:
        columns = [_write_array(column, classes.get(name)) for name, column in zip(schema.names, batch, strict=True)]
        tables.append(pa.table(columns, schema.names))
        tables[-1].validate(full=True)  # readers of Parquet do not check that texts are UTF-8
    table = _join(source, tables)
    lists = frozenset(one.name for one in schema if _is_list(one.type))
    nested = [one for one in schema if one.name not in lists and pa.types.is_nested(one.type)]
    faults = {one.name: f"{source}: {one.name!r} holds {one.type}, expected {PLAIN}; flatten it" for one in nested}
    return Columns(source, table, lists, range(1, len(table) + 1), "row", classes, faults)


def _find_classes(schema: pa.Schema) -> dict[str, list[str]]:
    """Return column -> names of the class labels of `datasets` in it or in its lists."""
    classes = {}
    wrong = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError)
    with suppress(*wrong):  # the columns can be read without their features
        for name, feature in msgspec.json.decode(schema.metadata[b"huggingface"])["info"]["features"].items():
            while isinstance(feature, list) or "feature" in feature:
                feature = feature[0] if isinstance(feature, list) else feature["feature"]
            if feature["_type"] == "ClassLabel":
                classes[name] = feature["names"]
    return classes


def _is_list(kind: pa.DataType) -> bool:
    """Return whether the type is a list of plain values."""
    kind = getattr(kind, "storage_type", kind)
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests) and not types.is_nested(kind.value_type)


def _write_array(values: pa.Array, names: Sequence[str] | None) -> pa.Array:
    """Return the values as texts, nulls as nulls; `names` are those of class labels."""
    values = getattr(values, "storage", values)  # of an extension type
    if pa.types.is_dictionary(values.type):
        return _write_array(values.dictionary_decode(), names)
    if _is_list(values.type):
        texts = iter(_write_array(values.flatten(), names).fill_null("").to_pylist())
        lengths = pc.list_value_length(values).to_pylist()
        return pa.array([None if n is None else _write_list(list(islice(texts, n))) for n in lengths], TEXT)
    if names is not None and pa.types.is_integer(values.type):
        return pa.array(names, TEXT).take(pc.if_else(pc.less(values, 0), None, values))
    if pa.types.is_floating(values.type):  # as Python and JSON write them: 1.0, where Arrow has 1
        texts = pa.array(map(str, values.fill_null(0).to_numpy(zero_copy_only=False)), TEXT)
        return pc.if_else(pc.is_null(values, nan_is_null=True), None, texts)  # pyarrow and polars write NaN for null
    try:
        return values.cast(TEXT)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # a structure, or bytes that are not UTF-8
        return pa.array(map(_write_other, values.to_pylist()), TEXT)


def _write_other(value: Any) -> str | None:
    if value is None:
        return None
    return (value if isinstance(value, bytes) else msgspec.json.encode(value, enc_hook=str)).decode(errors="replace")
