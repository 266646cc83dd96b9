"""The columns of a person's own table beside texts and labels: empty, constant, or giving the label away."""

from collections.abc import Collection
from typing import Any

import numpy as np

from bertkit.data.formats.rows import Columns
from bertkit.data.labels import number_cells, parse_number

MOST_GROUPS = 100  # different numbers of a column; more are divided into ranges with equally many rows
GIVEN_AWAY = 0.95  # share of the label's variance that a column explains


def check_columns(rows: Columns, used: Collection[str], answers: np.ndarray) -> dict[str, Any]:
    """Return the empty and the constant columns, and how well each column that gives the label away explains it.

    Args:
        used: The columns of texts and labels, which do not give labels away.
        answers: (S,) int64 classes or float numbers.
    """
    found: dict[str, Any] = {"empty": [], "constant": [], "gives_label_away": {}}
    for name in (name for name in rows.table.column_names if name not in rows.faults):
        codes, values = number_cells(rows, name)
        if not any(value.strip() for value in values):
            found["empty"].append(name)
        elif len(values) == 1:
            found["constant"].append(name)
        elif name not in used:
            share = explain_answers(divide_numbers(codes, values), answers)
            if share >= GIVEN_AWAY:
                found["gives_label_away"][name] = round(share, 4)
    return found


def divide_numbers(codes: np.ndarray, values: list[str]) -> np.ndarray:
    """Return (S,) the ranges of a column of many numbers; unchanged `codes`, its different values, of any other."""
    numbers = [parse_number(value) if value.strip() else 0.0 for value in values]
    if len(values) <= MOST_GROUPS or None in numbers:
        return codes
    cells = np.array(numbers)[codes]
    return np.searchsorted(np.quantile(cells, np.linspace(0, 1, MOST_GROUPS + 1)[1:-1]), cells)


def explain_answers(codes: np.ndarray, answers: np.ndarray) -> float:
    """Return the share of the answers' variance that the groups `codes` (S,) explain, at most 1.

    A row's answer is predicted by the mean of the other rows of its group, or of all rows if it is alone, so a column
    of names that never repeat explains nothing. For classes it is the mean over indicators of the classes (the tau of
    Goodman and Kruskal).
    """
    _, groups, sizes = np.unique(codes, return_inverse=True, return_counts=True)
    others = sizes[groups] - 1.0  # (S,)
    if answers.dtype.kind == "f":
        values = answers.astype(np.float64)
        total = ((values - values.mean()) ** 2).sum()
        sums = np.bincount(groups, values)[groups] - values
        errors = (values - np.where(others > 0, sums / np.maximum(others, 1), values.mean())) ** 2
        return 1 - errors.sum() / total if total > 0 else 0.0
    _, classes, counts = np.unique(answers, return_inverse=True, return_counts=True)
    shares = counts / len(answers)
    total = len(answers) * (1 - (shares**2).sum())
    pairs, indices, together = np.unique(groups * len(counts) + classes, return_inverse=True, return_counts=True)
    squares = np.bincount(pairs // len(counts), together.astype(np.float64) ** 2, len(sizes))[groups]
    same = together[indices]  # (S,) rows of the group with the class of the row, the row included
    by = np.maximum(others, 1)
    errors = 1 - 2 * (same - 1) / by + (squares - 2 * same + 1) / by**2
    errors = np.where(others > 0, errors, 1 - 2 * shares[classes] + (shares**2).sum())
    return 1 - errors.sum() / total if total > 0 else 0.0
