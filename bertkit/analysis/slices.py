"""Slices of a run's scored rows, the worst first: by length, unknown tokens, label, and columns with few values.

A slice's score has a 95 % interval, because small slices differ by chance; they are sorted by the interval's better
end, so that a slice that is surely worse comes before one that may be. Slices below LEAST_ROWS rows are left out, and
so is whatever does not tell rows apart. The rows come from the file that the run has written
(`bertkit.training.scored_rows`): neither data nor model is read.

The score is the share of right rows where rows have labels (of several, all must be right), because Matthews
correlation or F1 of a slice with a single label is undefined; the root mean squared error for numbers, because a slice
of similar numbers has a low correlation; otherwise the task's metric. Left out: labels of NER, whose entity types have
a table, and combinations of slices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertkit.metrics.intervals import Interval, find_interval
from bertkit.metrics.rows import COUNT_SCORES, NUMBER_RATES, RowScore, measure_mean
from bertkit.reports.tables import MISSING, ScoreRow, Table, make_table
from bertkit.tasks.task import shorten_text
from bertkit.training.scored_rows import TOKEN_COUNTS, UNKNOWN_COUNTS, ScoredRows

LEAST_ROWS = 20  # of a slice
SLICES_SHOWN = 12
LENGTH_SLICES = 4  # slices by length, of about equal size


def tabulate_slices(found: ScoredRows, row: ScoreRow, split: str) -> Table | None:
    """Return the table of the worst slices after a line for all rows; None if there are no slices.

    Args:
        row: The line of the task's metric.
    """
    row, score = choose_score(row, found)
    sign = -1 if row.key == "rmse" else 1
    slices = []
    for name, places in list_slices(found.columns):
        if LEAST_ROWS <= len(places) < len(found.keys):
            slices.append((name, *rate_slice(score.take(places))))
    if not slices:
        return None
    slices.sort(key=lambda found: sign * (found[-1] or (found[2], found[2]))[sign > 0])
    lines = [
        [name, f"{rows:,}", row.show(value), " to ".join(map(row.show, limits)) if limits else MISSING]
        for name, rows, value, limits in [("all", *rate_slice(score)), *slices[:SLICES_SHOWN]]
    ]
    return make_table(f"Slices, {split}, worst first", ["slice", "rows", row.head, "95 % interval"], lines)


def choose_score(row: ScoreRow, found: ScoredRows) -> tuple[ScoreRow, RowScore]:
    """Return the score that is compared between slices, and its line in a table."""
    if found.score.rate in NUMBER_RATES:
        return ScoreRow("RMSE", "rmse"), replace(found.score, rate="rmse", points=1.0)
    if found.score.rate not in COUNT_SCORES:
        return row, found.score
    judged = found.score.judge_rows()
    if found.score.rate != "labels_f1" and not np.isin(judged, (0, 1)).all():  # entities
        return row, found.score
    return ScoreRow("right rows", "right", unit="fraction"), measure_mean((judged == 1).astype(float))


def rate_slice(score: RowScore) -> tuple[int, float, Interval | None]:
    """Return the number of rows, the score, and its interval."""
    value = float(score.score(np.ones((1, len(score))))[0])
    return len(score), value, find_interval(score)


def list_slices(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the rows of each slice."""
    for name, values in columns.items():
        if name == TOKEN_COUNTS:
            yield from divide_lengths(np.asarray(values))
        elif name == UNKNOWN_COUNTS:
            counts = np.asarray(values)
            yield "without unknown tokens", np.flatnonzero(counts == 0)
            yield "with unknown tokens", np.flatnonzero(counts > 0)
        else:
            cells = np.asarray(values, object)
            for kind in sorted(set(values)):
                yield f"{name}: {shorten_text(kind) or '(empty)'}", np.flatnonzero(cells == kind)


def divide_lengths(tokens: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield slices of about equal size, by the number of tokens (S,)."""
    edges = np.unique(np.quantile(tokens, np.arange(1, LENGTH_SLICES + 1) / LENGTH_SLICES, method="lower"))
    least = tokens.min()
    for edge in edges.tolist():
        span = f"{least:,} to {edge:,}" if least < edge else f"{edge:,}"
        yield f"{span} tokens", np.flatnonzero((least <= tokens) & (tokens <= edge))
        least = edge + 1
