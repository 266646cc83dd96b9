"""Plots as values; drawing them and heat maps with matplotlib; the curves of a training log."""

import os
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from bertkit.reports.tables import ScoreLine, Table, TableCell, split_number
from bertkit.system.files import atomic_open
from bertkit.system.progress import is_notebook

SIZE = (4.6, 3.6)  # the size of a plot, in inches
DPI = 130
LOSS = ScoreLine("loss", "loss")


@dataclass(frozen=True)
class Series:
    """A series of points in a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str  # colour, marker and line as a matplotlib format string
    # The half-length of each point's error bar, or how far it reaches below and above the point
    spreads: Sequence[float] | Sequence[tuple[float, float]] = ()
    is_published: bool = False  # whether the values are published ones, which have an axis of their own


@dataclass(frozen=True)
class Plot:
    """A plot."""

    title: str
    xlabel: str
    series: Sequence[Series]
    ylabel: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)  # horizontal lines, as a mapping from label to y
    published_label: str = ""  # the label of the axis for published values
    words: str = ""  # a description for readers who cannot see the plot


# --- Drawing ----------------------------------------------------------------------------------------------------------


def load_matplotlib() -> Any:
    """Import matplotlib; outside a notebook its backend is not asked for, because it may not be installed."""
    if os.environ.get("MPLBACKEND", "").startswith("module:") and not is_notebook():
        del os.environ["MPLBACKEND"]
    import matplotlib

    return matplotlib


@contextmanager
def open_figure(lines: int, columns: int, size: tuple[float, float], stream: IO[bytes], form: str) -> Iterator[Any]:
    """Yield a figure and its axes, and write it in one of matplotlib's formats at the end.

    Without pyplot, the backend of a notebook or a program stays as it is. $ is not parsed as mathematics.
    """
    context = load_matplotlib().rc_context({"text.parse_math": False})
    from matplotlib.figure import Figure

    with context, warnings.catch_warnings():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(lines, columns, squeeze=False)
        warnings.simplefilter("ignore")  # about characters that the font lacks
        figure.savefig(stream, format=form, dpi=DPI)


def save_plots(plots: Sequence[Plot], path: Path) -> None:
    """Write plots side by side, atomically, in the format of the path's suffix; without plots, write nothing."""
    if plots:
        with atomic_open(path, "wb") as stream:
            draw_plots(plots, stream, path.suffix[1:])


def draw_plots(plots: Sequence[Plot], stream: IO[bytes], form: str) -> None:
    """Draw plots side by side in one of matplotlib's formats."""
    size = (SIZE[0] * len(plots), SIZE[1])
    with open_figure(1, len(plots), size, stream, form) as (_, axes):
        for axis, plot in zip(axes[0], plots, strict=True):
            draw_plot(axis, plot)


def draw_plot(axis: Any, plot: Plot) -> None:
    """Draw a plot; published values use the right axis.

    The axes have their own scales, because curves of models of different sizes are compared by shape.
    """
    right = axis.twinx() if any(series.is_published for series in plot.series) else None
    for series in plot.series:
        xs, ys = zip(*series.points, strict=True)
        home, alpha = (right, 0.6) if series.is_published else (axis, 1)
        home.plot(xs, ys, series.style, label=series.name, markersize=4, alpha=alpha)
        if series.spreads:
            home.errorbar(xs, ys, yerr=np.transpose(series.spreads), fmt="none", ecolor=series.style[:2], capsize=2)
    for number, (name, y) in enumerate(plot.levels.items()):
        axis.axhline(y, color="0.5", linestyle=("--", ":")[number % 2], label=name)
    axis.set(title=plot.title, xlabel=plot.xlabel, ylabel=plot.ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    if right is not None:
        right.set_ylabel(plot.published_label, color="0.5")
        right.spines["top"].set_visible(False)
        published = right.get_legend_handles_labels()
        handles, labels = handles + published[0], labels + published[1]
    axis.legend(handles, labels, fontsize="small", frameon=False, loc="best" if right is None else "lower right")


# --- Heat maps --------------------------------------------------------------------------------------------------------


def save_matrices(tables: Sequence[Table], caption: str, path: Path) -> None:
    """Write tables as heat maps, atomically, in the format of the path's suffix."""
    columns = 2 if len(tables) == 4 else min(len(tables), 3)
    lines = -(-len(tables) // columns)
    height = max(0.62 * len(table.rows) for table in tables) + 1.3
    width = max(1.05 * len(table.heads[1:]) + 0.085 * max(map(len, list_heads(table))) for table in tables) + 0.9
    size = (max(width * columns, 4.5), height * lines + 0.6)
    with (
        atomic_open(path, "wb") as stream,
        open_figure(lines, columns, size, stream, path.suffix[1:]) as (figure, axes),
    ):
        for axis in axes.flat[len(tables) :]:
            axis.set_visible(False)
        for axis, table in zip(axes.flat, tables, strict=False):
            draw_matrix(axis, table)
        figure.supxlabel(textwrap.fill(caption, int(size[0] * 15)), fontsize="small", color="0.35")


def list_heads(table: Table) -> list[str]:
    """Return the headings of the rows."""
    return [row[0].lines[0][0] for row in table.rows]


def draw_matrix(axis: Any, table: Table) -> None:
    """Draw a table as a heat map; a cell without lines has no square."""
    for y, row in enumerate(table.rows):
        for x, cell in enumerate(row[1:]):
            if cell.lines:
                draw_square(axis, x, y, cell)
    across, down = shorten(table.heads[1:]), shorten(list_heads(table))
    axis.set(xlim=(-0.5, len(across) - 0.5), ylim=(len(down) - 0.5, -0.5), xlabel=table.heads[0])
    axis.set_xticks(range(len(across)), across, fontsize=9)
    axis.set_yticks(range(len(down)), down, fontsize=9)
    axis.set_title(textwrap.fill(table.caption, 34), fontsize=11)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def shorten(texts: Iterable[str]) -> list[str]:
    """Wrap texts; of long ones, for example paths, only the end is kept, which tells most."""
    return [textwrap.fill(text if len(text) <= 50 else f"…{text[-49:]}", 18) for text in texts]


def draw_square(axis: Any, x: int, y: int, cell: TableCell) -> None:
    """Draw a square with its number in large and the rest in small type; without a shade it is hatched."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    face, ink, hatch = "0.93", "0.45", "////"
    if cell.share is not None:
        face, ink, hatch = colormaps["YlGnBu"](0.08 + 0.72 * cell.share), "white" if cell.share > 0.62 else "0.1", None
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=2, hatch=hatch))
    number, words = split_number(*cell.lines[0])
    rest = "\n".join([*([words] if words else []), *(f"{text} {words}".strip() for text, words in cell.lines[1:])])
    axis.text(x, y, number, ha="center", va="bottom" if rest else "center", color=ink, fontsize=10)
    axis.text(x, y + 0.02, rest, ha="center", va="top", color=ink, fontsize=7)
    if cell.kind == "chosen":
        axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="C3", linewidth=2.5))


# --- Curves of a training log -----------------------------------------------------------------------------------------


def plot_log(
    log: Sequence[Mapping[str, float]], rows: Sequence[ScoreLine], metrics: Mapping[str, Any], path: Path
) -> None:
    """Draw a plot of the training loss and one of each score: in training, on held-out data, and its baselines.

    A score that was never logged is left out.
    """
    save_plots([trace(log, row, metrics) for row in list_logged(log, [LOSS, *rows])], path)


def list_logged(log: Sequence[Mapping[str, float]], rows: Iterable[ScoreLine]) -> list[ScoreLine]:
    """Return the rows that were logged: scores on held-out data, and the loss in training."""
    keys = {key for entry in log for key in entry}
    return [row for row in rows if (row.key if row is LOSS else f"eval_{row.key}") in keys]


def trace(log: Sequence[Mapping[str, float]], row: ScoreLine, metrics: Mapping[str, Any]) -> Plot:
    """Return the plot of a logged score, with a curve for training and one for held-out data."""
    series = []
    for key, name, style in ((row.key, "training", "C0-"), (f"eval_{row.key}", "held out", "C1o-")):
        if points := [(entry["step"], row.scale(entry[key])) for entry in log if key in entry]:
            series.append(Series(name, points, style))
    levels = {name: row.scale(metrics[key]) for name, key in row.baselines.items()}
    (first, start), (last, end) = series[-1].points[0], series[-1].points[-1]
    digits = ".1f" if row.unit else ".3f"
    words = f"{row.name} during training: {start:{digits}} at update {first:,}, {end:{digits}} at {last:,}"
    return Plot(row.head, "update", series, levels=levels, words=words)
