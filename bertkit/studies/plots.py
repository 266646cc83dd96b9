"""The pictures of a study: a heat map of its cells, and scores along its checkpoints."""

import itertools
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.reports.plots import load_pyplot, save_figure
from bertkit.reports.tables import MISSING
from bertkit.studies.tables import (
    find_row,
    find_shown,
    has_paper,
    head_column,
    name_axes,
    name_splits,
    scale,
    show_value,
)

# --- Studies in a picture ---------------------------------------------------------------------------------------------


def plot_heatmap(study: Mapping[str, Any], path: Path) -> None:
    """Draws the mean scores of a grid, one panel a row and task; without a grid, rows by tasks. Nothing for one cell.

    The learning rate, or else the first axis, goes one way, all others together the other way.
    """
    pyplot = load_pyplot()
    if len(study["cells"]) == 1:
        return
    panels = _list_panels(study) if study["definition"].get("grid") else [_make_overview(study)]
    across = min(len(panels), 3 if len(panels) != 4 else 2)
    down = math.ceil(len(panels) / across)
    height = max(0.62 * len(panel["ys"]) for panel in panels) + 1.3
    width = max(1.05 * len(panel["xs"]) + 0.085 * max(map(len, panel["ys"])) for panel in panels) + 0.9
    size = (max(width * across, 4.5), height * down + 0.6)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel(textwrap.fill(_caption(study), int(size[0] * 15)), fontsize="small", color="0.35")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks
        save_figure(figure, path, dpi=130)


def _caption(study: Mapping[str, Any]) -> str:
    """What the squares are."""
    seeds = study["definition"]["seeds"]
    spread = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    rule = "best run" if study["definition"]["select"] == "best" else "mean"
    outline = f"; outlined: the setting whose {rule} is best" if study["definition"].get("grid") else ""
    return f"{spread}, on {name_splits(study)}{outline}"


def _list_panels(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each row's and task's title, labels and squares: (place down, place across) -> cell."""
    axes = list(study["definition"]["grid"])
    names = dict(zip(axes, name_axes(axes), strict=True))
    first = "train.learning_rate" if "train.learning_rate" in axes else axes[0]
    others = [axis for axis in axes if axis != first]
    best = {winner["cell"] for winner in study["chosen"]}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in study["cells"]:
        if not cell["borrowed"]:
            groups.setdefault((cell["row"], cell["column"]), []).append(cell)
    panels = []
    for (name, column), cells in groups.items():
        xs, ys, squares = {}, {}, {}
        for cell in cells:
            x = show_value(cell["setting"][first])
            y = ", ".join(f"{names[axis]} {show_value(cell['setting'][axis])}" for axis in others)
            place = ys.setdefault(y, len(ys)), xs.setdefault(x, len(xs))
            squares[place] = cell
        title = head_column(study, column) + (f", {name}" if name else "")
        labels = {"title": title, "xlabel": names[first], "xs": list(xs), "ys": list(ys)}
        panels.append(labels | _grade(study, squares, [squares]) | {"chosen": find_chosen(squares, best)})
    return panels


def _make_overview(study: Mapping[str, Any]) -> dict[str, Any]:
    """The one panel of a study without a grid; each column has colours of its own."""
    names = list(study["columns"])
    rows = list(dict.fromkeys(cell["row"] for cell in study["cells"]))
    squares = {(rows.index(cell["row"]), names.index(cell["column"])): cell for cell in study["cells"]}
    columns = [{place: cell for place, cell in squares.items() if place[1] == x} for x in range(len(names))]
    labels = {"title": "", "xlabel": "", "xs": [head_column(study, name) for name in names], "ys": rows}
    return labels | _grade(study, squares, columns) | {"chosen": []}


def _grade(
    study: Mapping[str, Any],
    squares: Mapping[tuple[int, int], Mapping[str, Any]],
    groups: Sequence[Mapping[tuple[int, int], Mapping[str, Any]]],
) -> dict[str, Any]:
    """The texts of the squares, and their colours: 0 for the worst of its group to 1; None where there is no score."""
    texts, colours = {}, {}
    for place, cell in squares.items():
        row = find_row(study, cell["column"])
        spread = "" if cell["sd"] is None else f"\n± {row.show(cell['sd'])}"
        lost = f"\n{cell['failed']} failed" if cell["failed"] and cell["n"] else ""
        empty = "failed" if cell["failed"] else MISSING
        texts[place] = empty if cell["mean"] is None else f"{row.show(cell['mean'])}{spread}{lost}"
        colours[place] = None
    for group in groups:
        grades = grade_cells(study, list(group.values()))
        colours |= {place: grades[cell["directory"]] for place, cell in group.items() if cell["directory"] in grades}
    return {"texts": texts, "colours": colours}


def grade_cells(study: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Directory -> 0 for the worst mean of some cells of one column to 1 for the best; none where there is no mean."""
    means = {cell["directory"]: cell["mean"] for cell in cells if cell["mean"] is not None}
    if not means:
        return {}
    least, most = min(means.values()), max(means.values())
    grades = {name: (mean - least) / (most - least) if most > least else 0.5 for name, mean in means.items()}
    is_turned = study["columns"][cells[0]["column"]]["lower_is_better"]
    return {name: 1 - grade for name, grade in grades.items()} if is_turned else grades


def _draw_panel(axis: Any, panel: Mapping[str, Any]) -> None:
    """Draws squares with their scores in them; failed ones hatched, the chosen one outlined."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shades = colormaps["YlGnBu"]
    for (y, x), grade in panel["colours"].items():
        colour = "0.93" if grade is None else shades(0.08 + 0.72 * grade)
        corner = (x - 0.5, y - 0.5)
        hatch = "////" if grade is None else None
        axis.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=2, hatch=hatch))
        dark = grade is not None and grade > 0.62
        ink = "0.45" if grade is None else "white" if dark else "0.1"
        first, _, rest = panel["texts"][y, x].partition("\n")
        axis.text(x, y, first, ha="center", va="bottom" if rest else "center", color=ink, fontsize=10)
        axis.text(x, y + 0.02, rest, ha="center", va="top", color=ink, fontsize=7)
    for y, x in panel["chosen"]:
        axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="C3", linewidth=2.5))
    # Of a long text, a path for example, the end tells most.
    xs, ys = ([textwrap.fill(t if len(t) <= 50 else f"…{t[-49:]}", 18) for t in panel[key]] for key in ("xs", "ys"))
    axis.set(xlim=(-0.5, len(xs) - 0.5), ylim=(len(ys) - 0.5, -0.5), xlabel=panel["xlabel"])
    axis.set_xticks(range(len(xs)), xs, fontsize=9)
    axis.set_yticks(range(len(ys)), ys, fontsize=9)
    axis.set_title(textwrap.fill(panel["title"], 34), fontsize=11)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


# --- Scores after so many updates of a pretraining (Figure 5) ---------------------------------------------------------


def plot_curve(study: Mapping[str, Any], path: Path) -> None:
    """Draws one panel a column: the scores of rows that start from steps of a pretraining, a line for each pretraining.

    The paper's values are dashed, on an axis of their own: models of other sizes are compared by their shape. Nothing
    for a study without steps.
    """
    pyplot = load_pyplot()
    lines = _list_lines(study)
    names = [name for name in study["columns"] if any(_list_points(study, name, rows)[0] for rows in lines.values())]
    if not names:
        return
    size = (5.6 * len(names), 4.0)
    figure, axes = pyplot.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        paper = axis.twinx() if has_paper(study) else None
        for number, (label, rows) in enumerate(lines.items()):
            ours, published = _list_points(study, name, rows)
            style = {"color": f"C{number}", "marker": "o", "markersize": 4}
            xs, means, spreads = zip(*ours, strict=True) if ours else ((), (), ())
            axis.errorbar(xs, means, yerr=spreads, label=label, capsize=2, **style)
            if paper is not None and published:
                paper.plot(
                    *zip(*published, strict=True), "--", color=f"C{number}", alpha=0.6, label=f"{label}: the paper"
                )
        _finish_curve(axis, paper, head_column(study, name), bool(study["columns"][name]["unit"]))
    save_figure(figure, path, dpi=130)


def _list_lines(study: Mapping[str, Any]) -> dict[str, list[str]]:
    """What the rows of a pretraining with steps have in common in their names -> these rows, by step."""
    lines: dict[str, list[str]] = {}
    for origin in study["pretrainings"]:
        rows = [name for name in origin["rows"] if study["rows"][name]["step"]]
        if rows:
            same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*rows, strict=False))
            label = "".join(letters[0] for letters in same).rstrip(" 0123456789_,.;:-–(")
            lines[label if label and label not in lines else origin["directory"]] = sorted(
                rows, key=lambda name: study["rows"][name]["step"]
            )
    return lines


def _list_points(
    study: Mapping[str, Any], name: str, rows: Sequence[str]
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """A column's (step, mean, sd) over some rows, and the paper's (step, value)."""
    ours, paper = [], []
    for row in rows:
        step, published = study["rows"][row]["step"], study["rows"][row]["paper"]
        cell = find_shown(study, row).get(name, ({"mean": None}, None))[0]
        if cell["mean"] is not None:
            shown = find_row(study, name)
            ours.append((step, scale(shown, cell["mean"]), scale(shown, cell["sd"] or 0.0)))
        if name in published:
            paper.append((step, published[name]))
    return ours, paper


def _finish_curve(axis: Any, paper: Any, title: str, percent: bool) -> None:
    """Titles, axes and a legend for both axes of a panel."""
    unit = ", %" if percent else ""
    axis.set(title=title, xlabel="updates of the pretraining", ylabel=f"ours{unit}")
    axis.spines["top"].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    if paper is not None:
        paper.set_ylabel(f"the paper{unit} (dashed)", color="0.4")
        paper.spines["top"].set_visible(False)
        more = paper.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axis.legend(handles, labels, fontsize="small", frameon=False, loc="lower right")


def find_chosen(squares: Mapping[tuple[int, int], Mapping[str, Any]], best: set[str]) -> list[tuple[int, int]]:
    """Where the chosen cells are."""
    return [place for place, cell in squares.items() if cell["directory"] in best]
