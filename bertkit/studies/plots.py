"""Plots of a study: a heat map of its cells, and scores over the updates of a pretraining."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from bertkit.reports.plots import Plot, Series, save_matrices, save_plots
from bertkit.reports.tables import Table, TableCell, make_table
from bertkit.studies.tables import (
    MARK,
    choose_shown,
    name_axes,
    name_splits,
    show_mean,
    show_value,
    take_score_row,
)
from bertkit.training.study_results import StudyCell, StudyResults

SHADES = "shades: from the best mean to the worst; means 3 median deviations below the median count as the worst"

# --- Studies in a picture ---------------------------------------------------------------------------------------------


def plot_heatmap(study: StudyResults, path: Path) -> None:
    """Draw the mean scores as heat maps: a panel per row and task of a grid, else rows by tasks.

    Nothing is drawn for a single cell.
    """
    if len(study.cells) > 1:
        seeds, rule = study.definition["seeds"], study.definition["select"]
        spread = f"mean ± standard deviation over {len(seeds)} seeds (n)" if len(seeds) > 1 else f"seed {seeds[0]}"
        outline = "; outlined: the setting whose {} is best".format("best run" if rule == "best" else "mean")
        grids = tabulate_grids(study)
        is_poor = any(cell.at_or_below_majority for cell in study.cells)
        poor = f";{MARK} a run is no better than always giving the same answer" if is_poor else ""
        caption = f"{spread}, on {name_splits(study)}{outline if grids else ''}; {SHADES}{poor}"
        save_matrices(grids or [tabulate_overview(study)], caption, path)


def tabulate_grids(study: StudyResults, find_link: Callable[[str], str] = lambda directory: "") -> list[Table]:
    """Return a heat map for each row and column of a grid.

    The learning rate, or else the first axis, runs horizontally; all other axes together run vertically.

    Args:
        find_link: Returns the link of a run's directory, which the chosen squares get.
    """
    axes = list(study.definition.get("grid", {}))
    if not axes:
        return []
    first = "train.learning_rate" if "train.learning_rate" in axes else axes[0]
    names = dict(zip(axes, name_axes(axes), strict=True))
    chosen = {winner.cell: find_link(winner.run) for winner in study.chosen}
    groups: dict[tuple[str, str], list[StudyCell]] = {}
    for cell in study.cells:
        if not cell.is_pretraining:
            groups.setdefault((cell.row, cell.column), []).append(cell)
    tables = []
    for (name, column), cells in groups.items():
        shades = grade_cells(study, cells)
        squares: dict[str, dict[str, TableCell]] = {}
        for cell in cells:
            down = ", ".join(f"{names[axis]} {show_value(cell.setting[axis])}" for axis in axes if axis != first)
            square = make_square(study, cell, shades, chosen)
            squares.setdefault(down, {})[show_value(cell.setting[first])] = square
        across = list(dict.fromkeys(value for line in squares.values() for value in line))
        lines = [[down, *(line.get(value, TableCell()) for value in across)] for down, line in squares.items()]
        title = f"{column}, {name}" if name else column
        tables.append(make_table(title, [f"{names[first]} →", *across], lines, "matrix"))
    return tables


def tabulate_overview(study: StudyResults) -> Table:
    """Return the heat map of a study without a grid; each column has its own colour scale."""
    squares = {}
    for name in study.columns:
        cells = [cell for cell in study.cells if cell.column == name]
        shades = grade_cells(study, cells)
        squares |= {(cell.row, name): make_square(study, cell, shades, {}) for cell in cells}
    rows = dict.fromkeys(cell.row for cell in study.cells)
    lines = [[row, *(squares.get((row, name), TableCell()) for name in study.columns)] for row in rows]
    return make_table("", ["", *study.columns], lines, "matrix")


def make_square(
    study: StudyResults, cell: StudyCell, shades: Mapping[str, float], chosen: Mapping[str, str]
) -> TableCell:
    """Return one square of a heat map; `chosen` maps the directories of chosen cells to their links."""
    lost = [("", f"{cell.failed} failed")] if cell.failed and cell.n else []
    lines = ((show_mean(take_score_row(study, cell.column), cell), ""), *lost)
    directory = cell.directory
    return TableCell(lines, chosen.get(directory, ""), shades.get(directory), "chosen" if directory in chosen else "")


def grade_cells(study: StudyResults, cells: Sequence[StudyCell]) -> dict[str, float]:
    """Return the grade of each cell of one column by directory, from 0 (worst mean) to 1 (best mean).

    Means far below the median are graded 0 as well, so a run that failed to learn does not make the others alike.
    Cells without a mean are left out.
    """
    sign = -1 if study.columns[cells[0].column].lower_is_better else 1
    means = {cell.directory: sign * cell.mean for cell in cells if cell.mean is not None}
    if not means:
        return {}
    middle, most = median(means.values()), max(means.values())
    spread = median(abs(mean - middle) for mean in means.values()) or math.inf
    least = max(min(means.values()), middle - 3 * spread)
    if least == most:
        return dict.fromkeys(means, 0.5)
    return {name: max(0.0, (mean - least) / (most - least)) for name, mean in means.items()}


# --- Scores over the updates of a pretraining (Figure 5) --------------------------------------------------------------


def plot_curve(study: StudyResults, path: Path) -> None:
    """Draw the plots of `list_curves` side by side; a study without steps has none."""
    save_plots(list_curves(study), path)


def list_curves(study: StudyResults) -> list[Plot]:
    """Return one plot per column: scores over the steps that rows start from, one line per pretraining.

    The paper's values are dashed. A line is named after its first row, without the step.
    """
    lines: dict[str, list[str]] = {}
    for origin in study.pretrainings:
        steps = {name: study.rows[name].step for name in origin.rows if study.rows[name].step}
        if rows := sorted(steps, key=steps.get):
            label = rows[0].rstrip(" 0123456789_,.;:-–(")
            lines[label if label and label not in lines else origin.directory] = rows
    plots = []
    for name, column in study.columns.items():
        shown, series = take_score_row(study, name), []
        for number, (label, rows) in enumerate(lines.items()):
            steps = {row: study.rows[row].step for row in rows}
            cells = {row: choose_shown(study, row)[name][0] for row in rows if name in choose_shown(study, row)}
            cells = {row: cell for row, cell in cells.items() if cell.mean is not None}
            ours = [(steps[row], shown.scale(cell.mean)) for row, cell in cells.items()]
            spreads = [shown.scale(cell.sd or 0.0) for cell in cells.values()]
            papers = {row: study.rows[row].paper for row in rows}
            published = [(steps[row], paper[name]) for row, paper in papers.items() if name in paper]
            series += [Series(label, ours, f"C{number}o-", spreads)] if ours else []
            series += [Series(f"{label}: the paper", published, f"C{number}--", is_published=True)] if published else []
        if any(not line.is_published for line in series):
            unit = ", %" if column.unit else ""
            published_label, words = f"the paper{unit} (dashed)", f"{name} over pretraining updates"
            labels = {"ylabel": f"ours{unit}", "published_label": published_label, "words": words}
            plots.append(Plot(name, "pretraining updates", series, **labels))
    return plots
