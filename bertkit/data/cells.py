"""The cells of a table's column -> labels, numbers, flags and lists, each different cell converted once."""

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np

from bertkit.data.formats.line import make_text
from bertkit.data.formats.rows import Columns
from bertkit.errors import UsageError

MARKS = {"1": True, "true": True, "0": False, "false": False}
ADJACENT = re.compile(r"""['"]\s+['"]""")  # texts that Python joins, as in numpy's ['a' 'b']
WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")  # a whole number, perhaps spelled as a float
Converted = TypeVar("Converted")


def encode_cells(table: Columns, column: str) -> tuple[np.ndarray, list[str]]:
    """Return (S,) the number of each cell's text among the column's different texts, and these texts.

    NaN among numbers is a missing value, as pyarrow and polars write it.
    """
    encoded = table.find(column).combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    filled = {value.strip().lower() for value in values} - {""}
    others = filled - {"nan"}
    has_nan = "nan" in filled and column not in table.classes  # nan is a name among classes
    if has_nan and others and all(parse_number(value) is not None for value in others):
        values = ["" if value.strip().lower() == "nan" else value for value in values]
    return encoded.indices.to_numpy(zero_copy_only=False), values


def convert_cells(
    table: Columns, column: str, convert: Callable[[str], Converted]
) -> tuple[np.ndarray, list[Converted]]:
    """Return (S,) the index of each row's cell among the different cells of a column, and these, converted."""
    codes, values = encode_cells(table, column)
    found = []
    for index, value in enumerate(values):
        try:
            found.append(convert(value))
        except UsageError as error:
            raise UsageError(f"{table.locate(int((codes == index).argmax()))}: {error}") from None
    return codes, found


def read_number(cell: str) -> float:
    """Return the number in a cell; NaN for a blank one."""
    if not cell.strip():
        return np.nan
    if (number := parse_number(cell)) is None or abs(number) > np.finfo(np.float32).max:
        raise UsageError(f"the label {cell[:40]!r} is not a number of 32 bits; correct it")
    return number


def read_flags(table: Columns, column: str) -> np.ndarray:
    """Return a column of 0 and 1, or of false and true, as (S,) float32."""

    def read(cell: str) -> bool:
        if (flag := MARKS.get(normalise(cell))) is None:
            raise UsageError(
                f"{column!r} is {cell[:40]!r}, but each of several label columns must hold 0 and 1, or shares that sum "
                "to 1; give one column, or such columns"
            )
        return flag

    codes, flags = convert_cells(table, column, read)
    return np.array(flags, np.float32)[codes]


def read_lists(table: Columns, column: str, values: Sequence[str]) -> list[list[str]]:
    """Return the lists in a column's different cells, blank ones left out; empty if not every cell is one."""
    filled = [value for value in values if value.strip()]
    lists = [found for value in filled if (found := read_list(value)) is not None]
    if len(lists) == len(filled):
        return lists
    odd = next(value for value in filled if read_list(value) is None)
    if all(value.strip()[0] + value.strip()[-1] == "[]" for value in filled) and re.search(r"[\s,]", odd):
        raise UsageError(
            f"{table.source}: {column!r} has cells such as {odd[:40]!r}, which are lists of neither JSON nor Python; "
            'write them as ["a", "b"]'
        )
    return []


def read_list(value: str) -> list[str] | None:
    """Return the items of a list of plain values as JSON or Python writes it, or None for another text."""
    text, found = value.strip(), None
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    with suppress(msgspec.MsgspecError, RecursionError):
        found = msgspec.json.decode(text)
    if found is None and not ADJACENT.search(text):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            found = ast.literal_eval(text)
    is_plain = isinstance(found, list | tuple | set) and all(isinstance(x, str | int | float | None) for x in found)
    return list(map(make_text, found)) if is_plain else None


def normalise(value: str) -> str:
    """Return the label that a text stands for: 3.0 is 3, TRUE is true, but 03 is 03."""
    value = value.strip()
    if value.lower() in ("true", "false"):
        return value.lower()
    found = WHOLE.fullmatch(value)
    return found[1] if found else value


def parse_number(text: str) -> float | None:
    """Return the finite number that a text is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) and "_" not in text else None
