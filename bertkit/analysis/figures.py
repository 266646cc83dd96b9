"""Plots and tables of a split's predictions, made from its prediction table.

Shape letters: S rows, L labels.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from scipy.special import expit, logit

from bertkit.data.labels import SINGLE
from bertkit.metrics.calibration import bin_probabilities, measure_calibration
from bertkit.metrics.intervals import find_share_interval
from bertkit.metrics.ner import score_types
from bertkit.metrics.rows import take_values
from bertkit.metrics.table import (
    LABEL,
    PREDICTION,
    find_decided,
    find_kind,
    mark_names,
    number_names,
    read_facts,
    read_numbers,
    read_probabilities,
)
from bertkit.reports.html import SERIES, show_minus
from bertkit.reports.plots import Plot, Series
from bertkit.reports.tables import Table, TableCell, make_table, tabulate_types

MOST_CONFUSED = 20  # labels of a confusion matrix
MOST_TRACED = 10  # curves
TRACED_POINTS = 200  # per curve
LONGEST_LABEL = 18  # characters in a legend beside the curves
CUTS = 201  # values of tau in a curve


def draw_figures(rows: pa.Table, split: str, temperature: float | None) -> list[Plot | Table]:
    """Return the plots and tables that a prediction table has the columns for.

    Args:
        temperature: That of calibrated probabilities, which are shown beside those without it.
    """
    if "null_odds" in rows.column_names:
        return [plot_taus(rows, split)]
    if "strict_found" in rows.column_names:
        return [table] if (table := tabulate_types(score_types(rows), split)) else []
    names = read_facts(rows).get("names", [])
    if (probabilities := read_probabilities(rows, names)) is None:
        return []
    given, found = [rows.column(name).to_pylist() for name in (PREDICTION, LABEL)], []
    if find_kind(rows) == SINGLE:
        answers, labels = (number_names(values, names) for values in given)
        found.append(tabulate_confusion(answers, labels, names, split))
        predicted, correct = (numbers[:, None] == np.arange(len(names)) for numbers in (answers, labels))
    else:
        predicted, correct = (mark_names(values, names) for values in given)
        labels = correct
    found.append(plot_precision(probabilities, predicted, correct, names, split))
    return [*found, plot_reliability(probabilities, labels, temperature, split)]


def tabulate_confusion(answers: np.ndarray, labels: np.ndarray, names: Sequence[str], split: str) -> Table:
    """Return the confusion matrix, with correct labels by row; a cell's shade is its share of the row.

    Beyond the MOST_CONFUSED most frequent labels the others share a row and a column.

    Args:
        answers: (S,) predicted classes.
        labels: (S,) correct classes.
        names: The name of each class.
    """
    kept = find_frequent(np.bincount(labels, minlength=len(names)), MOST_CONFUSED)
    places = np.full(len(names), len(kept))
    places[kept] = np.arange(len(kept))
    shown = [names[label] for label in kept] + ["(others)"] * (len(kept) < len(names))
    counts = np.zeros((len(shown), len(shown)), int)
    np.add.at(counts, (places[labels], places[answers]), 1)
    lines = []
    for label, row in zip(shown, counts.tolist(), strict=True):
        total = sum(row) or 1
        cells = [TableCell(((f"{number:,}", f"{number / total:.0%}"),), share=number / total) for number in row]
        lines.append([label, *cells])
    return make_table(f"Confusion matrix, {split}", ["true ↓  predicted →", *shown], lines, "matrix")


def plot_precision(
    probabilities: np.ndarray, predicted: np.ndarray, correct: np.ndarray, names: Sequence[str], split: str
) -> Plot:
    """Return precision over recall in percent, with a curve for each of the MOST_TRACED most frequent labels.

    A curve has the best precision at TRACED_POINTS recalls at most. Labels without positives have none.

    Args:
        probabilities: (S, L).
        predicted: (S, L) bool, whether a label is predicted: the marked point of its curve.
        correct: (S, L) bool, whether a label is correct.
        names: The name of each label.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    counts = correct.sum(axis=0)
    series, averages = [], []
    for number, label in enumerate(label for label in find_frequent(counts, MOST_TRACED) if counts[label]):
        right = correct[:, label]
        precision, recall, _ = precision_recall_curve(right, probabilities[:, label])
        precision, recall = precision[-2::-1], recall[-2::-1]  # from the likeliest on, without scikit-learn's (0, 1)
        places = np.unique(np.searchsorted(recall, np.linspace(0, 1, TRACED_POINTS)))
        found = right[predicted[:, label]]
        point = (100 * found.sum() / counts[label], 100 * found.mean() if len(found) else 0.0)
        name, colour = names[label], f"C{number % len(SERIES)}"
        shown = name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"
        curve = list(zip(100 * recall[places], 100 * precision[places], strict=True))
        series += [Series(shown, curve, colour + ("--" if number >= len(SERIES) else "-"))]
        series += [Series("", [point], f"{colour}o")]
        averages.append(f"{name} {100 * average_precision_score(right, probabilities[:, label]):.1f}")
    title = f"Precision over recall, {split}"
    words = f"{title}: average precision {', '.join(averages)}; each dot is the label as predicted"
    return Plot(title, "recall (%)", series, ylabel="precision (%)", words=words, has_legend_beside=True)


def plot_reliability(probabilities: np.ndarray, labels: np.ndarray, temperature: float | None, split: str) -> Plot:
    """Return how often labels of a probability are right: below the diagonal probabilities are too high.

    Args:
        probabilities: (S, L).
        labels: (S,) classes, or (S, L) several labels.
        temperature: As for `draw_figures`.
    """
    shown = {"this model": probabilities}
    if temperature is not None:
        shown = {
            "calibrated": probabilities,
            "as trained": undo_temperature(probabilities, temperature, labels.ndim == 2),
        }
    curves, errors = [], []
    for number, (name, values) in enumerate(shown.items()):
        stated, right, counts = bin_probabilities(values, labels)
        spreads = [find_reach(*pair) for pair in zip(right, counts.tolist(), strict=True)] if number == 0 else ()
        curve = list(zip(100 * stated, 100 * right, strict=True))
        curves.append(Series(name, curve, f"C{number}o{'--' if number else '-'}", spreads))
        errors.append(f"{name} {100 * take_values(measure_calibration(values, labels))['ece']:.1f} %")
    lowest = min(value for series in curves for point in series.points for value in point)
    diagonal = Series("as often as stated", [(lowest, lowest), (100, 100)], "C6:")
    title = f"Reliability, {split}"
    words = f"{title}: calibration error: {', '.join(errors)}; bars are 95 % intervals"
    return Plot(title, "probability (%)", [diagonal, *curves[::-1]], ylabel="how often right (%)", words=words)


def undo_temperature(probabilities: np.ndarray, temperature: float, several: bool) -> np.ndarray:
    """Return the probabilities (S, L) of the logits before their division by a temperature."""
    if several:
        with np.errstate(divide="ignore"):
            return expit(temperature * logit(probabilities))
    powers = probabilities**temperature
    return powers / powers.sum(axis=1, keepdims=True)


def find_reach(share: float, count: int) -> tuple[float, float]:
    """Return how far the 95 % interval of a share of `count` rows reaches below and above it, in percent."""
    interval = find_share_interval(round(share * count), count, 100.0)
    return 100 * share - interval.low, interval.high - 100 * share


def plot_taus(rows: pa.Table, split: str) -> Plot:
    """Return the scores of SQuAD 2.0 over the threshold tau, at quantiles of the odds and at the chosen tau."""
    odds, tau = read_numbers(rows, "null_odds"), find_decided(rows)["tau"]
    order = np.argsort(odds)
    taus = np.unique(np.append(-np.quantile(odds, np.linspace(0, 1, CUTS), method="nearest"), tau))
    given = np.searchsorted(odds[order], -taus)  # how many are answered: their odds are below -tau
    chosen = np.searchsorted(taus, tau)
    series, values, percent = [], [], np.zeros(len(taus))
    for number, (name, key) in enumerate({"exact match": "em", "F1": "f1"}.items()):
        best, none = (read_numbers(rows, f"{answer}_{key}") for answer in ("best", "none"))
        percent = 100 * (none.sum() + np.append(0.0, np.cumsum((best - none)[order]))[given]) / len(odds)
        series.append(Series(name, list(zip(taus, percent, strict=True)), f"C{number}-"))
        series.append(Series("", [(tau, percent[chosen])], f"C{number}o"))
        values.append(f"{name} {percent[chosen]:.1f}")
    marked = "the best tau" if np.isclose(percent[chosen], percent.max()) else "tau"  # that of F1
    title = f"Scores over tau, {split}"
    words = f"{title}: at {marked}, tau = {show_minus(f'{tau:.3f}')}, {', '.join(values)}"
    return Plot(title, "tau", series, ylabel="%", marks={marked: tau}, words=words)


def find_frequent(counts: np.ndarray, most: int) -> list[int]:
    """Return the places of the largest counts, in their order; of equal ones the first."""
    return sorted(np.argsort(-counts, kind="stable")[:most].tolist())
