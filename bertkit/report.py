"""What a finished run looks like: curves of its training log.

Left out for now: tables of several runs and the page that holds them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.tasks.task import Row


def plot_log(log: Sequence[Mapping[str, float]], rows: Sequence[Row], metrics: Mapping[str, Any], path: Path) -> None:
    """Draws one panel a row of the task's table: the score while training, on held-out data, and its baselines.

    Rows whose score was never logged are left out; without any nothing is drawn. The suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if any(f"eval_{row.key}" in entry for entry in log)]
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
