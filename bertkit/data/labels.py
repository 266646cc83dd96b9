"""Columns of label texts -> the kind of problem, the label names and their numbers.

The kind and the names are decided once, over all of train. Left out: texts and splits.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from bertkit.data.formats.columns import Columns
from bertkit.errors import UsageError

SINGLE, SEVERAL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
MOST_NUMBERS = 20  # different whole numbers that are taken for classes
SEPARATOR = "|"  # between several labels in a cell
YES, NO = ("1", "true"), ("0", "false")
UNKNOWN_LABEL = -1
LARGEST_NUMBER = float(np.finfo(np.float32).max)
WHOLE = re.compile(r"(0|-?[1-9][0-9]*)(?:\.0*)?")  # a whole number, perhaps spelled as a float


@dataclass(frozen=True)
class LabelSpace:
    """The labels that a model learns.

    Attributes:
        kind: The `problem_type` of the configuration.
        names: The labels in the order of the logits.
        columns: The label columns.
        reason: Why it is this kind and order, for a report.
    """

    kind: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    reason: str

    @property
    def has_column_each(self) -> bool:
        """Return whether each label has a column of 0 and 1."""
        return len(self.columns) > 1

    def read(self, table: Columns) -> tuple[np.ndarray, Counter[str]]:
        """Return the labels of a table, and the count of each label that the space lacks.

        Returns:
            (S,) int64 classes, UNKNOWN_LABEL for an unknown one; (S, L) float32, 0 or 1 for each of several labels; or
            (S,) float32 numbers.

        Raises:
            UsageError: A cell is empty or cannot be read; the message names its place.
        """
        if self.kind == REGRESSION:
            return read_numbers(table, self.columns[0]), Counter()
        if self.has_column_each:
            return np.stack([read_flags(table, name) for name in self.columns], axis=1), Counter()
        codes, values = number_cells(table, self.columns[0])
        known = {name: index for index, name in enumerate(self.names)}
        if self.kind == SINGLE:
            check_filled(table, self.columns[0], codes, values)
            found = np.array([known.get(normalise(value), UNKNOWN_LABEL) for value in values], np.int64)
            counts = np.bincount(codes, minlength=len(values))
            other = {value: int(counts[place]) for place, value in enumerate(values) if found[place] == UNKNOWN_LABEL}
            return found[codes], Counter(other)
        flags, other = np.zeros((len(values), len(self.names)), np.float32), Counter()
        counts = np.bincount(codes, minlength=len(values))
        for place, value in enumerate(values):
            for label in split_cell(value, is_list=self.columns[0] in table.lists):
                if label in known:
                    flags[place, known[label]] = 1
                else:
                    other[label] += int(counts[place])
        return flags[codes], other


def find_labels(train: Columns, columns: Sequence[str], problem_type: str) -> LabelSpace:
    """Return the label space of the training rows; `problem_type` "auto" decides the kind from their values.

    Raises:
        UsageError: The columns are missing, or their values do not fit the kind.
    """
    if len(columns) > 1:
        if problem_type not in ("auto", SEVERAL):
            raise UsageError(
                f"{problem_type} has one label column, but {len(columns)} are given; give one with --label"
            )
        for name in columns:
            read_flags(train, name)  # checks the values
        return LabelSpace(SEVERAL, tuple(columns), tuple(columns), "a column of 0 and 1 for each label")
    (column,) = columns
    is_list = column in train.lists
    _, values = number_cells(train, column)
    if problem_type != "auto":
        kind, reason = problem_type, "as set"
    elif column in train.classes and not is_list:  # whatever their names
        kind, reason = SINGLE, "class labels"
    else:
        kind, reason = guess_kind(values, is_list)
    if kind == REGRESSION:
        read_numbers(train, column)  # checks the values
        return LabelSpace(REGRESSION, ("score",), (column,), reason)
    if kind == SEVERAL:
        names = {label for value in values for label in split_cell(value, is_list)}
    else:
        names = {normalise(value) for value in values if value.strip()}
    if (len(names) < 2 and kind == SINGLE) or not names:
        raise UsageError(
            f"{train.source}: the column {column!r} has {len(names)} label{'s' * (len(names) != 1)}; "
            "give a column with two or more"
        )
    if kind == SINGLE and len(names) > max(MOST_NUMBERS, len(train) // 2):
        odd = sorted(name for name in names if parse_number(name) is None)
        hint = f" ({odd[0][:40]!r} is not a number)" if len(odd) < len(names) / 2 else ""
        raise UsageError(
            f"{train.source}: the column {column!r} has {len(names):,} different texts in {len(train):,} rows"
            f"{hint}, too many for labels; choose another column with --label"
        )
    return LabelSpace(kind, tuple(sort_names(names)), (column,), reason)


def guess_kind(values: Sequence[str], is_list: bool) -> tuple[str, str]:
    """Return the kind of problem that the different values of a column mean, and the reason."""
    if is_list:
        return SEVERAL, "a column of lists"
    filled = [value.strip() for value in values if value.strip()]
    if all(value.lower() in ("true", "false") for value in filled):
        return SINGLE, "true and false"
    numbers = [parse_number(value) for value in filled]
    if all(number is not None for number in numbers):
        whole = {number for number in numbers if number.is_integer()}
        if len(whole) == len(set(numbers)) <= MOST_NUMBERS:
            return SINGLE, f"{len(whole)} different whole numbers"
        return REGRESSION, f"{len(set(numbers)):,} different numbers"
    if any(SEPARATOR in value for value in filled):
        return SEVERAL, f"labels separated by {SEPARATOR}"
    return SINGLE, "texts"


def number_cells(table: Columns, column: str) -> tuple[np.ndarray, list[str]]:
    """Return (S,) the place of each cell's text among the column's different texts, and these texts."""
    encoded = table.find(column).combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary.to_pylist()


def check_filled(table: Columns, column: str, codes: np.ndarray, values: Sequence[str]) -> None:
    """Check that no cell of a column is blank."""
    blank = [place for place, value in enumerate(values) if not value.strip()]
    if blank and len(rows := np.flatnonzero(np.isin(codes, blank))):
        raise UsageError(
            f"{table.locate(int(rows[0]))}: the label {column!r} is empty, as in {len(rows):,} of {len(codes):,} rows; "
            "give each row a label, or leave these rows out"
        )


def read_numbers(table: Columns, column: str) -> np.ndarray:
    """Return a column as (S,) float32.

    Raises:
        UsageError: A cell is not a finite number.
    """
    texts = table.find(column)
    values = np.empty(len(texts), np.float32)
    for row, text in enumerate(cell for chunk in texts.chunks for cell in chunk.to_pylist()):
        if (number := parse_number(text)) is None:
            raise UsageError(f"{table.locate(row)}: the label {text[:40]!r} is not a number; correct it")
        if abs(number) > LARGEST_NUMBER:
            raise UsageError(f"{table.locate(row)}: the label {text[:40]!r} is too large for 32 bits; scale the labels")
        values[row] = number
    return values


def read_flags(table: Columns, column: str) -> np.ndarray:
    """Return a column of 0 and 1, or of false and true, as (S,) float32.

    Raises:
        UsageError: A cell is neither.
    """
    codes, values = number_cells(table, column)
    flags = np.array([1 if flag in YES else 0 if flag in NO else np.nan for flag in map(normalise, values)], np.float32)
    found = flags[codes]
    if len(rows := np.flatnonzero(np.isnan(found))):
        raise UsageError(
            f"{table.locate(int(rows[0]))}: {column!r} is {values[codes[rows[0]]][:40]!r}, but each of several "
            "label columns must hold 0 and 1; give one column, or columns of 0 and 1"
        )
    return found


def split_cell(value: str, is_list: bool) -> list[str]:
    """Return the labels of a cell: a JSON list, or texts separated by |."""
    parts = msgspec.json.decode(value or "[]", type=list[str]) if is_list else value.split(SEPARATOR)
    return [label for part in parts if (label := normalise(part))]


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


def sort_names(names: set[str]) -> list[str]:
    """Return labels in order: numbers by value, others by their characters."""
    numbers = {name: parse_number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return sorted(names, key=lambda name: (numbers[name], name))
    return sorted(names)
