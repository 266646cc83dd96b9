"""Plots and tables of a split's predictions, made from its prediction table.

Shape letters: S rows, L labels.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from bertkit.data.labels import SINGLE
from bertkit.metrics.calibration import bin_probabilities, measure_calibration
from bertkit.metrics.intervals import find_share_interval
from bertkit.metrics.ner import score_types
from bertkit.metrics.rows import take_values
from bertkit.metrics.table import (
    LABEL,
    PREDICTION,
    find_kind,
    mark_names,
    number_names,
    read_facts,
    read_probabilities,
)
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import Table, TableCell, make_table, tabulate_types

MOST_CONFUSED = 20  # labels of a confusion matrix


def draw_figures(rows: pa.Table, split: str) -> list[Plot | Table]:
    """Return the plots and tables that a prediction table has the columns for."""
    if "strict_found" in rows.column_names:
        return [table] if (table := tabulate_types(score_types(rows), split)) else []
    names = read_facts(rows).get("names", [])
    if (probabilities := read_probabilities(rows, names)) is None:
        return []
    if find_kind(rows) != SINGLE:
        return [plot_reliability(probabilities, mark_names(rows.column(LABEL).to_pylist(), names), split)]
    answers, labels = (number_names(rows.column(name).to_pylist(), names) for name in (PREDICTION, LABEL))
    return [tabulate_confusion(answers, labels, names, split), plot_reliability(probabilities, labels, split)]


def tabulate_confusion(answers: np.ndarray, labels: np.ndarray, names: Sequence[str], split: str) -> Table:
    """Return the confusion matrix, with correct labels by row; a cell's shade is its share of the row.

    Beyond the MOST_CONFUSED most frequent labels the others share a row and a column.

    Args:
        answers: (S,) predicted classes.
        labels: (S,) correct classes.
        names: The name of each class.
    """
    counts = np.bincount(labels, minlength=len(names))
    kept = sorted(np.argsort(-counts, kind="stable")[:MOST_CONFUSED].tolist())
    lines_of = np.full(len(names), len(kept))
    lines_of[kept] = np.arange(len(kept))
    shown = [names[label] for label in kept] + ["(others)"] * (len(kept) < len(names))
    counts = np.zeros((len(shown), len(shown)), int)
    np.add.at(counts, (lines_of[labels], lines_of[answers]), 1)
    lines = []
    for label, row in zip(shown, counts.tolist(), strict=True):
        total = sum(row) or 1
        cells = [TableCell(((f"{number:,}", f"{number / total:.0%}"),), share=number / total) for number in row]
        lines.append([label, *cells])
    return make_table(f"Confusion matrix, {split}", ["true ↓  predicted →", *shown], lines, "matrix")


def plot_reliability(probabilities: np.ndarray, labels: np.ndarray, split: str) -> Plot:
    """Return how often labels of a probability are right: below the diagonal probabilities are too high.

    Args:
        probabilities: (S, L).
        labels: (S,) classes, or (S, L) several labels.
    """
    stated, right, counts = bin_probabilities(probabilities, labels)
    spreads = [find_reach(*pair) for pair in zip(right, counts.tolist(), strict=True)]
    lowest = 100 * min(stated.min(), right.min())
    diagonal = Series("as often as stated", [(lowest, lowest), (100, 100)], "k:")
    curve = Series("this model", list(zip(100 * stated, 100 * right, strict=True)), "C0o--", spreads)
    title, error = f"Reliability, {split}", take_values(measure_calibration(probabilities, labels))["ece"]
    words = f"{title}: calibration error {100 * error:.1f} %; bars are 95 % intervals"
    return Plot(title, "probability (%)", [diagonal, curve], ylabel="how often right (%)", words=words)


def find_reach(share: float, count: int) -> tuple[float, float]:
    """Return how far the 95 % interval of a share of `count` rows reaches below and above it, in percent."""
    interval = find_share_interval(round(share * count), count, 100.0)
    return 100 * share - interval.low, interval.high - 100 * share
