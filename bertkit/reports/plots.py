"""Curves of a training log."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.reports.tables import ScoreRow
from bertkit.system.files import atomic_open


def load_pyplot() -> Any:
    """matplotlib's pyplot, without a window, and with a $ in a name being a $."""
    os.environ["MPLBACKEND"] = "Agg"  # that of a notebook may not be installed here, and then the import fails
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes a figure in the format that the suffix says, whole or not at all, and closes it."""
    with atomic_open(path, "wb") as stream:
        figure.savefig(stream, format=path.suffix[1:], dpi=dpi)
    load_pyplot().close(figure)


def plot_log(
    log: Sequence[Mapping[str, float]], rows: Sequence[ScoreRow], metrics: Mapping[str, Any], path: Path
) -> None:
    """Draws one panel a row of the task's table: the score while training, on held-out data, and its baselines.

    Rows whose score was never logged are left out; without any the training loss is drawn, and without one nothing. The
    suffix decides the format.
    """
    pyplot = load_pyplot()
    rows = [row for row in rows if any(f"eval_{row.key}" in entry for entry in log)]
    rows = rows or [ScoreRow("loss", "loss")] * any("loss" in entry for entry in log)
    if not rows:
        return
    figure, axes = pyplot.subplots(1, len(rows), figsize=(4.6 * len(rows), 3.6), squeeze=False, layout="constrained")
    for row, axis in zip(rows, axes[0], strict=True):
        scale = 100 if row.unit == "fraction" else 1
        for key, name, style in ((row.key, "training", "C0-"), (f"eval_{row.key}", "held out", "C1o-")):
            points = [(entry["step"], scale * entry[key]) for entry in log if key in entry]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=name, markersize=4)
        for number, (name, key) in enumerate(row.baselines.items()):
            axis.axhline(scale * metrics[key], color="0.5", linestyle=("--", ":")[number % 2], label=name)
        axis.set(title=row.name + (" (%)" if row.unit else ""), xlabel="update")
        axis.legend(fontsize="small", frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, dpi=120)
