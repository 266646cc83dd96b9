"""Slices of a prediction table, the worst first: by length, unknown tokens, label, and input columns with few values.

A slice's score has a 95 % interval, because small slices differ by chance; they are sorted by the interval's better
end, so a slice that is surely worse comes before one that may be. Slices below LEAST_ROWS rows are left out, and so
are columns with one value for all rows.

The score is the share of right rows where rows have labels (of several, all must be right), because Matthews
correlation or F1 of a slice with a single label is undefined; the root mean squared error for numbers, because a slice
of similar numbers has a low correlation; otherwise the task's metric. Left out: labels of NER, whose entity types have
a table, and combinations of slices.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from bertkit.metrics.intervals import Interval, estimate_interval
from bertkit.metrics.ner import score_entities
from bertkit.metrics.rows import WeightedScore, measure_mean, measure_numbers
from bertkit.metrics.squad import measure_questions
from bertkit.metrics.table import LABEL, PREDICTION, WEIGHT, read_facts, read_numbers
from bertkit.reports.tables import MISSING, ScoreLine, Table, make_table
from bertkit.tasks.kinds import get_kind
from bertkit.tasks.task import shorten_text
from bertkit.training.predictions import GROUP, TOKEN_COUNT, UNKNOWN_COUNT, format_cells, mark_wrong

LEAST_ROWS = 20  # a slice with fewer rows is left out
SLICES_SHOWN = 12
LENGTH_SLICES = 4  # slices by length, of about equal size
FEW_VALUES = 12  # a column with more values gives no slices


def tabulate_slices(rows: pa.Table, row: ScoreLine, split: str) -> Table | None:
    """Return the table of the worst slices after a line for all rows; None if there are no slices.

    Args:
        rows: The prediction table of a run.
        row: The line of the task's metric.
    """
    if LABEL not in rows.column_names:
        return None
    row, score = choose_score(row, rows)
    if read_facts(rows).get("weighted"):
        score = replace(score, row_weights=read_numbers(rows, WEIGHT))
    groups, slices = rows.column(GROUP).to_numpy(), []
    for name, numbers in list_slices(rows):
        if LEAST_ROWS <= len(numbers) < len(rows):
            slices.append((name, *rate_slice(score.take(numbers), groups[numbers])))
    if not slices:
        return None
    sign = -1 if row.key == "rmse" else 1
    slices.sort(key=lambda found: sign * (found[-1] or (found[2], found[2]))[sign > 0])
    lines = [
        [name, f"{count:,}", row.show(value), " to ".join(map(row.show, limits)) if limits else MISSING]
        for name, count, value, limits in [("all", *rate_slice(score, groups)), *slices[:SLICES_SHOWN]]
    ]
    return make_table(f"Slices, {split}, worst first", ["slice", "rows", row.head, "95 % interval"], lines)


def choose_score(row: ScoreLine, rows: pa.Table) -> tuple[ScoreLine, WeightedScore]:
    """Return the score that is compared between slices, and its line in a table."""
    if "strict_found" in rows.column_names:  # tags
        scores = score_entities(rows)
        return ScoreLine("accuracy", "accuracy", unit="fraction") if "accuracy" in scores else row, scores["f1"]
    if "f1" in rows.column_names:  # answers to questions
        return row, measure_questions(*(read_numbers(rows, name) for name in ("em", "f1")))["f1"]
    if not get_kind(rows).has_names:
        return ScoreLine("RMSE", "rmse"), measure_numbers(*(read_numbers(rows, x) for x in (PREDICTION, LABEL)))["rmse"]
    row = row if row.key == "accuracy" else ScoreLine("right rows", "right", unit="fraction")
    return row, measure_mean(~mark_wrong(rows)[0])


def rate_slice(score: WeightedScore, groups: np.ndarray) -> tuple[int, float, Interval | None]:
    """Return the number of rows, the score, and its interval."""
    value = float(score.score(np.ones((1, len(score))))[0])
    return len(score), value, estimate_interval(score, groups.tolist())


def list_slices(rows: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the numbers of the rows of each slice."""
    columns = {name: rows.column(name).to_pylist() for name in read_facts(rows).get("inputs", [])}
    if "f1" in rows.column_names:
        columns["has an answer"] = ["yes" if answers else "no" for answers in rows.column(LABEL).to_pylist()]
    elif get_kind(rows).has_names and "strict_found" not in rows.column_names:
        columns[LABEL] = format_cells(rows, LABEL)
    for name, values in columns.items():
        cells, kinds = np.asarray(values, object), sorted(set(values))
        for kind in kinds if len(kinds) <= FEW_VALUES else ():
            yield f"{name}: {shorten_text(kind) or '(empty)'}", np.flatnonzero(cells == kind)
    yield from divide_lengths(rows.column(TOKEN_COUNT).to_numpy())
    unknown = rows.column(UNKNOWN_COUNT).to_numpy()
    yield "without unknown tokens", np.flatnonzero(unknown == 0)
    yield "with unknown tokens", np.flatnonzero(unknown > 0)


def divide_lengths(tokens: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield slices of about equal size, by the number of tokens (S,)."""
    edges = np.unique(np.quantile(tokens, np.arange(1, LENGTH_SLICES + 1) / LENGTH_SLICES, method="lower"))
    least = tokens.min()
    for edge in edges.tolist():
        span = f"{least:,} to {edge:,}" if least < edge else f"{edge:,}"
        yield f"{span} tokens", np.flatnonzero((least <= tokens) & (tokens <= edge))
        least = edge + 1
