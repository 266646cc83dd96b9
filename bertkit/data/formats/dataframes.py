"""Tables in memory: DataFrames, data sets of `datasets`, Arrow tables and lists of rows -> Arrow tables.

Written as Parquet, such a table is read as one that came from a file. Class labels of `datasets` stay numbers with
their names in the schema, from which the reader of Parquet takes them.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from bertkit.data.formats.rows import CHUNK_ROWS, FEATURES, check_names, read_class_names, walk_batches
from bertkit.errors import UsageError, as_usage_error
from bertkit.system.files import atomic_open

KINDS = "a DataFrame, a Dataset, a pyarrow.Table or a list of dicts"


def convert_tables(data: Any) -> dict[str, pa.Table | Path]:
    """Convert data in memory to one table per split; a path stays one.

    Args:
        data: A table, which is train: a pandas DataFrame, a `datasets.Dataset`, a `pyarrow.Table` or a list of dicts;
            or a mapping of splits to these or to paths, such as a `datasets.DatasetDict`.
    """
    if not isinstance(data, Mapping):
        return {"train": convert_table(data)}
    return {
        split: Path(part) if isinstance(part, str | Path) else convert_table(part, f"data[{split!r}]")
        for split, part in data.items()
    }


def convert_table(data: Any, origin: str = "data") -> pa.Table:
    """Convert a table to Arrow, without an index of pandas; messages begin with `origin`."""
    known: dict[bytes, bytes] = {}  # pandas' own metadata would differ from version to version
    with as_usage_error(origin, "give texts, numbers, dates, or lists of these"):
        if hasattr(data, "iterrows"):
            names, columns = data.columns, [data.iloc[:, number] for number in range(data.shape[1])]
        elif isinstance(data, pa.Table) or (hasattr(data, "with_format") and hasattr(data, "__len__")):
            table = data
            if not isinstance(data, pa.Table):
                table = data.with_format("arrow")[:].cast(data.features.arrow_schema)
            names, columns = table.column_names, table.columns
            known = {key: value for key, value in (table.schema.metadata or {}).items() if key == FEATURES}
        elif isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
            names = dict.fromkeys(chain.from_iterable(data))
            columns = [[row.get(name) for row in data] for name in names]
        else:
            raise UsageError(f"{origin} is of type {type(data).__name__}; give {KINDS} with at least one row")
        return pa.table(list(map(convert_column, columns)), list(map(str, names)), metadata=known)


def convert_column(cells: Any) -> pa.Array | pa.ChunkedArray:
    """Convert a column to Arrow; cells become texts if Parquet has no type for them, or they are of several types."""
    try:
        column = cells if isinstance(cells, pa.ChunkedArray) else pa.array(cells, from_pandas=True)  # NaN is missing
        pq.write_table(pa.table([column[:0]], ["column"]), pa.BufferOutputStream())
    except Exception:  # types of pandas and objects of any class have errors of their own
        import pandas as pd

        values = pd.Series(cells.to_pylist() if isinstance(cells, pa.ChunkedArray) else list(cells), dtype=object)
        column = pa.array(values.where(values.isna(), values.map(str)), from_pandas=True)
    return column


def list_rows(data: Any) -> list[dict[str, Any]]:
    """Return the rows of a table in memory, for prediction, with the values that training reads."""
    batches = convert_table(data).to_batches(CHUNK_ROWS)
    return [msgspec.to_builtins(row, enc_hook=str) for row in walk_batches(batches)]


def write_tables(tables: Mapping[str, pa.Table | Path], folder: Path) -> None:
    """Write each split to `folder` as Parquet, a file as it is; what is there must be the same."""
    files: dict[str, pa.Table | bytes] = {}
    for split, part in tables.items():
        if isinstance(part, Path):
            files["".join([split, *part.suffixes[-2 if part.suffix == ".gz" else -1 :]])] = part.read_bytes()
        else:
            check_names(f"data, {split}", part.column_names)
            files[f"{split}.parquet"] = part
    for path in folder.glob("[!.]*") if files else ():
        part = files.pop(path.name, None)
        if isinstance(part, pa.Table):  # another version may write it in other bytes
            before, now = pq.read_table(path), pq.read_table(pa.BufferReader(pack(part)))
            is_equal = pack(before) == pack(now) and read_class_names(before.schema) == read_class_names(part.schema)
        else:
            is_equal = path.read_bytes() == part
        if not is_equal:
            raise UsageError(f"{folder} holds other data; name another directory with --output")
    for name, part in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_open(folder / name, "wb") as file:
            file.write(part) if isinstance(part, bytes) else pq.write_table(part, file)


def pack(table: pa.Table) -> pa.Buffer:
    """Return a table as Parquet, without its metadata."""
    pq.write_table(table.combine_chunks().replace_schema_metadata(), buffer := pa.BufferOutputStream())
    return buffer.getvalue()
