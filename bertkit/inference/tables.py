"""Tables of results beside the columns of the inputs: CSV, tab-separated columns and Parquet.

Left out: JSON lines (`bertkit.inference.predictor`), and a result as a row (`bertkit.tasks.answers`).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from bertkit.data.formats.line import make_text
from bertkit.data.formats.writer import name_columns, write_rows
from bertkit.inference.batching import cut_into_chunks
from bertkit.tasks.answers import Result

ROWS_A_GROUP, CHARACTERS_A_GROUP = 10_000, 10_000_000  # limits of a row group of Parquet
ARROW_NAMES = {str: "string", bool: "bool", int: "int64", float: "float64"}  # any other value becomes its JSON text
LARGEST_INT = 2**63 - 1
Row = tuple[Mapping[str, Any], Result]  # the columns of an input, and those of its result or its `error`


def write_joined(rows: Iterable[Row], columns: Mapping[str, type], output: Path, file: IO[Any]) -> None:
    """Write a table in the format of the suffix: the columns of the inputs, those of the results, and errors if any.

    A column of the results with the name of one of the inputs gets the suffix `_predicted`. The rows pass through a
    temporary file, because the last one may have another column, so memory is bounded.

    Args:
        columns: Columns of the results: name -> type.
        output: The name of `file`, in whose folder the temporary file is.
    """
    types: dict[str, set[type]] = {}  # types in the columns of the inputs, without missing values
    with TemporaryFile(dir=output.parent) as kept:
        for given, found in rows:
            for name, value in given.items():
                kinds = types.setdefault(name, set())
                if value is not None:
                    is_huge = isinstance(value, int) and abs(value) > LARGEST_INT
                    kinds.add(type(value) if type(value) in ARROW_NAMES and not is_huge else str)
            if "error" in found:
                columns = {**columns, "error": str}
            kept.write(msgspec.json.encode((given, found)) + b"\n")
        kept.seek(0)
        schema = {}
        for name, kinds in types.items():
            schema[name] = kinds.pop() if len(kinds) == 1 else str
            if kinds == {int, float}:
                schema[name] = float
        names = name_columns(schema, columns)
        schema |= {names[name]: kind for name, kind in columns.items()}
        pairs = map(msgspec.json.decode, kept)
        joined = (given | {names[name]: value for name, value in found.items()} for given, found in pairs)
        WRITERS[output.suffix](joined, schema, file)


def write_parquet(rows: Iterable[dict[str, Any]], schema: Mapping[str, type], file: IO[bytes]) -> None:
    """Write a table as Parquet; a missing value is null, and in a column of texts any other value is its JSON text."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    fields = pyarrow.schema([(name, ARROW_NAMES[kind]) for name, kind in schema.items()])
    with ParquetWriter(file, fields) as writer:
        for group in cut_into_chunks(rows, ROWS_A_GROUP, CHARACTERS_A_GROUP):
            columns = []
            for name, kind in schema.items():
                values = (row.get(name) for row in group)
                columns.append([make_text(x) if kind is str and x is not None else x for x in values])
            writer.write_table(pyarrow.table(columns, schema=fields))


WRITERS = {
    ".csv": write_rows,
    ".tsv": partial(write_rows, form=".tsv"),
    ".parquet": write_parquet,
}
