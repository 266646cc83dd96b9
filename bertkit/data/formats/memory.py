"""Tables in memory: DataFrames, data sets of `datasets`, Arrow tables and lists of rows -> Arrow tables.

Written as Parquet, such a table is read as one that came from a file. Class labels of `datasets` stay numbers with
their names in the schema, from which the reader of Parquet takes them.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bertkit.data.formats.rows import FEATURES
from bertkit.errors import UsageError, explain_refusal
from bertkit.system.files import atomic_open

KINDS = "a DataFrame, a Dataset, a pyarrow.Table or a list of dicts"


def convert_tables(data: Any) -> dict[str, pa.Table | Path]:
    """Convert data in memory to one table per split; a path stays one.

    Args:
        data: A table, which is train: a pandas DataFrame, a `datasets.Dataset`, a `pyarrow.Table` or a list of dicts;
            or a mapping of splits to these or to paths, such as a `datasets.DatasetDict`.

    Raises:
        UsageError: It is none of these, or a column has values of several types.
    """
    if not isinstance(data, Mapping):
        return {"train": convert_table(data)}
    return {
        split: Path(part) if isinstance(part, str | Path) else convert_table(part, f"data[{split!r}]")
        for split, part in data.items()
    }


def convert_table(data: Any, origin: str = "data") -> pa.Table:
    """Convert a table to Arrow, without an index of pandas; messages begin with `origin`."""
    with explain_refusal(origin, "give each column a name of its own and values of one type"):
        if isinstance(data, pa.Table):
            table = data
        elif hasattr(data, "iterrows"):
            table = pa.Table.from_pandas(data, preserve_index=False)
        elif hasattr(data, "with_format") and hasattr(data, "__len__"):
            table = data.with_format("arrow")[:].cast(data.features.arrow_schema)
        elif isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
            names = dict.fromkeys(chain.from_iterable(data))
            cells = ([row.get(name) for row in data] for name in names)
            table = pa.table([pa.array(each, from_pandas=True) for each in cells], [*names])  # NaN is missing
        else:
            raise UsageError(f"{origin} is of type {type(data).__name__}; give {KINDS} with at least one row")
    known = {key: value for key, value in (table.schema.metadata or {}).items() if key == FEATURES}
    return table.replace_schema_metadata(known)  # pandas' own would differ from version to version


def write_tables(tables: Mapping[str, pa.Table | Path], folder: Path) -> None:
    """Write each split to `folder` as Parquet, a file as it is; what is there must be the same.

    Raises:
        UsageError: The folder holds other data, or a file cannot be read.
    """
    files: dict[str, pa.Table | bytes] = {}
    for split, part in tables.items():
        if isinstance(part, Path):
            files["".join([split, *part.suffixes[-2 if part.suffix == ".gz" else -1 :]])] = part.read_bytes()
        else:
            files[f"{split}.parquet"] = part
    for path in folder.glob("[!.]*") if files else ():
        part = files.pop(path.name, None)
        if isinstance(part, pa.Table):  # another version may write it in other bytes
            is_equal = pq.read_table(path).equals(part)
        else:
            is_equal = path.read_bytes() == part
        if not is_equal:
            raise UsageError(f"{folder} holds other data; name another directory with --output")
    for name, part in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_open(folder / name, "wb") as file:
            file.write(part) if isinstance(part, bytes) else pq.write_table(part, file)
