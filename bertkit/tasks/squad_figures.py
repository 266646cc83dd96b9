"""The figure of SQuAD 2.0: the scores over the threshold tau."""

from collections.abc import Sequence
from typing import Any

import numpy as np

CUTS = 201  # values of tau in a curve


def trace(
    exact: np.ndarray, f1: np.ndarray, silent: np.ndarray, odds: Sequence[float], tau: float, marked: str
) -> dict[str, Any]:
    """Return the figure of the scores over tau, at quantiles of the odds and at `tau` (`list_figures`).

    The first three arguments are (Q,) the scores of each answer, and of no answer, from 0 to 1.
    """
    order = np.argsort(odds)
    ranked = np.asarray(odds)[order]
    taus = np.unique(np.append(-np.quantile(ranked, np.linspace(0, 1, CUTS), method="nearest"), tau))
    given = np.searchsorted(ranked, -taus)  # how many are answered: their odds are below -tau
    lines = {}
    for name, scores in (("exact match", exact), ("F1", f1)):
        gains = np.cumsum(np.append(0.0, (scores - silent)[order]))
        lines[name] = (100 * (silent.sum() + gains[given]) / len(odds)).round(4).tolist()
    words = {"title": "Scores over tau", "xlabel": "tau", "ylabel": "%", "mark": tau, "marked": marked}
    return {"kind": "lines", "xs": taus.tolist(), "lines": lines} | words
