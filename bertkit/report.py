"""What runs look like: the curves of one, and of a study the table, the heat map, and how far it is.

A study is the plain dictionary that study.json holds (`bertkit.study.summarize`). Wherever scores of ours stand beside
published ones it is said what they are: a mean or the best of how many runs, and on which data.
"""

import json
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.tasks.task import Row

MISSING = "–"


def plot_log(log: Sequence[Mapping[str, float]], rows: Sequence[Row], metrics: Mapping[str, Any], path: Path) -> None:
    """Draws one panel a row of the task's table: the score while training, on held-out data, and its baselines.

    Rows whose score was never logged are left out; without any the training loss is drawn, and without one nothing. The
    suffix decides the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if any(f"eval_{row.key}" in entry for entry in log)]
    rows = rows or [Row("loss", "loss")] * any("loss" in entry for entry in log)
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


# --- Studies in words -------------------------------------------------------------------------------------------------


def write_table(study: Mapping[str, Any]) -> str:
    """The text of table.md: the chosen scores beside the paper's, every cell, and what failed."""
    parts = [f"# {describe_size(study)}", *_write_summary(study), "", explain_scores(study)]
    if study["definition"].get("grid"):
        for task in study["columns"]:
            parts += ["", f"## {_head_column(study, task)}", "", *_write_cells(study, [task])]
    else:
        parts += ["", "## Every cell", "", *_write_cells(study, list(study["columns"]))]
    failures = [
        f"- {run['directory']}: {run['failure']}"
        for cell in study["cells"]
        for run in cell["runs"]
        if run["status"] == "failed"
    ]
    if failures:
        parts += ["", f"## Failed: {len(failures)} of {study['runs']} runs", "", *failures]
    return "\n".join(parts) + "\n"


def describe_size(study: Mapping[str, Any]) -> str:
    """How many runs the study has, and why."""
    counts = {
        "row": len({cell["row"] for cell in study["cells"]}),
        "task": len(study["columns"]),
        "setting": math.prod(len(values) for values in study["definition"].get("grid", {}).values()),
        "seed": len(study["definition"]["seeds"]),
    }
    words = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items()]
    return f"{' x '.join(words)} = {study['runs']} run{'s' if study['runs'] > 1 else ''}"


def explain_scores(study: Mapping[str, Any]) -> str:
    """What our scores and the published ones are, in a sentence or four."""
    seeds = study["definition"]["seeds"]
    settings = max((winner["of_settings"] for winner in study["chosen"]), default=0)
    runs = max((winner["of_runs"] for winner in study["chosen"]), default=0)
    splits = " and ".join(sorted({column["split"] for column in study["columns"].values()}))
    if len(seeds) > 1:
        many = ", ".join(map(str, seeds))
        sentences = [f"Ours: mean ± standard deviation over n finished runs (n), seeds {many}, on {splits}."]
    else:
        sentences = [f"Ours: one run (1), seed {seeds[0]}, on {splits}."]
    if settings > 1:
        rule = "best run" if study["definition"]["select"] == "best" else "mean"
        sentences.append(
            f"The setting shown (bold below) is the one whose {rule} is best of {settings} settings; it is chosen on "
            "the very data that it is scored on, so its score is optimistic."
        )
    if runs > 1:
        sentences.append(
            f"The best run is the best of all {runs} runs on that data: more optimistic still, and not to be compared "
            "with a mean or a test score."
        )
    if any(column["paper"] for column in study["columns"].values()):
        sentences.append("Whose a published value is and on which data, its line says.")
    return " ".join(sentences)


def list_progress(study: Mapping[str, Any], limit: int = 40) -> tuple[list[str], list[list[str]]]:
    """The headings and lines of the table to show while a study runs, a line a cell.

    With more cells than `limit` only those in work and those that win so far.
    """
    cells = study["cells"]
    best = {winner["cell"] for winner in study["chosen"]}
    if len(cells) > limit:
        busy = {cell["directory"] for cell in cells if any(run["status"] == "running" for run in cell["runs"])}
        cells = [cell for cell in cells if cell["directory"] in busy | best]
    axes = list(study["definition"].get("grid", {}))
    leading = {"row": [cell["row"] for cell in cells], "task": [cell["task"] for cell in cells]}
    leading = {name: column for name, column in leading.items() if len(set(column)) > 1}
    lines = []
    for place, cell in enumerate(cells):
        row = _find_row(study, cell["task"])
        mark = " *" if cell["directory"] in best else ""
        lines.append(
            [
                *(column[place] for column in leading.values()),
                *(show_value(cell["setting"][axis]) for axis in axes),
                f"{cell['n'] + cell['failed']}/{len(cell['runs'])}",
                _show_mean(row, cell) + mark,
                MISSING if cell["best"] is None else row.show(cell["best"]),
                _describe_work(cell),
            ]
        )
    return [*leading, *name_axes(axes), "runs", "mean ± sd (n)", "best", ""], lines


def name_axes(axes: Sequence[str]) -> list[str]:
    """The axes without their tables, where they can be told apart so."""
    short = [axis.rpartition(".")[2] for axis in axes]
    return short if len(set(short)) == len(short) else list(axes)


def show_value(value: Any) -> str:
    """A value of an axis, on one line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        value = int(value)  # 3 epochs, not 3.0
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _describe_work(cell: Mapping[str, Any]) -> str:
    """What goes on in a cell, or what went wrong."""
    for run in cell["runs"]:
        if run["status"] == "running" and not run["updates"]:
            return f"seed {run['seed']}: begins"
        if run["status"] == "running":
            loss = "" if run["loss"] is None else f", loss {run['loss']:.3f}"
            return f"seed {run['seed']}: update {run['update']:,} of {run['updates']:,}{loss}"
    reasons = [run["failure"] for run in cell["runs"] if run["status"] == "failed"]
    if reasons:
        return textwrap.shorten(f"{len(reasons)} failed: {reasons[0]}", 70, placeholder=" …")
    if cell["at_or_below_majority"]:
        return f"{cell['at_or_below_majority']} at or below the majority class"
    return "" if cell["n"] else "waiting"


def _find_row(study: Mapping[str, Any], task: str) -> Row:
    """How a task's scores are shown."""
    column = study["columns"][task]
    return Row(column["name"], column["metric"], unit=column["unit"], paper=column["paper"])


def _head_column(study: Mapping[str, Any], task: str) -> str:
    """A task with its metric."""
    column = study["columns"][task]
    return f"{task}: {column['name']}{' (%)' if column['unit'] else ''}"


def _show_mean(row: Row, cell: Mapping[str, Any]) -> str:
    """A cell's `mean ± sd (n)`."""
    if cell["mean"] is None:
        return MISSING
    spread = "" if cell["sd"] is None else f" ± {row.show(cell['sd'])}"
    return f"{row.show(cell['mean'])}{spread} ({cell['n']})"


def _write_summary(study: Mapping[str, Any]) -> list[str]:
    """The lines of the table like the paper's: rows by tasks, then the published values."""
    names = dict.fromkeys(cell["row"] for cell in study["cells"])
    cells = {cell["directory"]: cell for cell in study["cells"]}
    winners = {(winner["row"], winner["task"]): winner for winner in study["chosen"]}
    rows = {task: _find_row(study, task) for task in study["columns"]}
    lines = [["", *(_head_column(study, task) for task in rows)]]
    for name in names:
        found = {task: winners.get((name, task)) for task in rows}
        means = [_show_mean(rows[task], cells[winner["cell"]]) if winner else MISSING for task, winner in found.items()]
        lines.append([name or "ours", *means])
        if any(winner and winner["of_runs"] > 1 for winner in found.values()):
            bests = [
                f"{rows[task].show(winner['score'])} (best of {winner['of_runs']})" if winner else MISSING
                for task, winner in found.items()
            ]
            lines.append([f"{name or 'ours'}, best run", *bests])
    for label in dict.fromkeys(label for row in rows.values() for label in row.paper):
        published = [row.show(row.paper[label]) if label in row.paper else MISSING for row in rows.values()]
        lines.append([f"published: {label}", *published])
    return ["", *_format_table(lines)]


def _write_cells(study: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    """The lines of the table of some tasks' cells; in a grid the chosen ones are bold."""
    cells = [cell for cell in study["cells"] if cell["task"] in tasks]
    axes = list(study["definition"].get("grid", {}))
    best = {winner["cell"] for winner in study["chosen"]}
    counted = any(cell["at_or_below_majority"] is not None for cell in cells)
    leading = {"row": [cell["row"] for cell in cells]} if len({cell["row"] for cell in cells}) > 1 else {}
    if not axes:
        leading["task"] = [_head_column(study, cell["task"]) for cell in cells]
    statistics = ["mean", "sd", "best", "n", "failed", *["at or below majority"] * counted]
    lines = [[*leading, *name_axes(axes), *statistics]]
    for place, cell in enumerate(cells):
        row = _find_row(study, cell["task"])
        scores = [MISSING if cell[key] is None else row.show(cell[key]) for key in ("mean", "sd", "best")]
        poor = MISSING if cell["at_or_below_majority"] is None else str(cell["at_or_below_majority"])
        line = [column[place] for column in leading.values()] + [show_value(cell["setting"][axis]) for axis in axes]
        line += [*scores, str(cell["n"]), str(cell["failed"]), *[poor] * counted]
        lines.append([f"**{text}**" for text in line] if axes and cell["directory"] in best else line)
    return _format_table(lines)


def _format_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines in Markdown, the first one the head."""
    texts = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]


# --- Studies in a picture ---------------------------------------------------------------------------------------------


def plot_heatmap(study: Mapping[str, Any], path: Path) -> None:
    """Draws the mean scores of a grid, one panel a row and task; without a grid, rows by tasks. Nothing for one cell.

    The learning rate, or else the first axis, goes one way, all others together the other way.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
        figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _caption(study: Mapping[str, Any]) -> str:
    """What the squares are."""
    seeds = study["definition"]["seeds"]
    splits = " and ".join(sorted({column["split"] for column in study["columns"].values()}))
    spread = f"mean ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    rule = "best run" if study["definition"]["select"] == "best" else "mean"
    outline = f"; outlined: the setting whose {rule} is best" if study["definition"].get("grid") else ""
    return f"{spread}, on {splits}{outline}"


def _list_panels(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each row's and task's title, labels and squares: (place down, place across) -> cell."""
    axes = list(study["definition"]["grid"])
    names = dict(zip(axes, name_axes(axes), strict=True))
    first = "train.learning_rate" if "train.learning_rate" in axes else axes[0]
    others = [axis for axis in axes if axis != first]
    best = {winner["cell"] for winner in study["chosen"]}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in study["cells"]:
        groups.setdefault((cell["row"], cell["task"]), []).append(cell)
    panels = []
    for (name, task), cells in groups.items():
        xs, ys, squares = {}, {}, {}
        for cell in cells:
            x = show_value(cell["setting"][first])
            y = ", ".join(f"{names[axis]} {show_value(cell['setting'][axis])}" for axis in others)
            place = ys.setdefault(y, len(ys)), xs.setdefault(x, len(xs))
            squares[place] = cell
        title = _head_column(study, task) + (f", {name}" if name else "")
        labels = {"title": title, "xlabel": names[first], "xs": list(xs), "ys": list(ys)}
        panels.append(labels | _grade(study, squares, [squares]) | {"chosen": _find_chosen(squares, best)})
    return panels


def _make_overview(study: Mapping[str, Any]) -> dict[str, Any]:
    """The one panel of a study without a grid; each task has colours of its own."""
    tasks = list(study["columns"])
    rows = list(dict.fromkeys(cell["row"] for cell in study["cells"]))
    squares = {(rows.index(cell["row"]), tasks.index(cell["task"])): cell for cell in study["cells"]}
    columns = [{place: cell for place, cell in squares.items() if place[1] == x} for x in range(len(tasks))]
    labels = {"title": "", "xlabel": "", "xs": [_head_column(study, task) for task in tasks], "ys": rows}
    return labels | _grade(study, squares, columns) | {"chosen": []}


def _find_chosen(squares: Mapping[tuple[int, int], Mapping[str, Any]], best: set[str]) -> list[tuple[int, int]]:
    """Where the chosen cells are."""
    return [place for place, cell in squares.items() if cell["directory"] in best]


def _grade(
    study: Mapping[str, Any],
    squares: Mapping[tuple[int, int], Mapping[str, Any]],
    groups: Sequence[Mapping[tuple[int, int], Mapping[str, Any]]],
) -> dict[str, Any]:
    """The texts of the squares, and their colours: 0 for the worst of its group to 1; None where there is no score."""
    texts, colours = {}, {}
    for place, cell in squares.items():
        row = _find_row(study, cell["task"])
        spread = "" if cell["sd"] is None else f"\n± {row.show(cell['sd'])}"
        lost = f"\n{cell['failed']} failed" if cell["failed"] and cell["n"] else ""
        empty = "failed" if cell["failed"] else MISSING
        texts[place] = empty if cell["mean"] is None else f"{row.show(cell['mean'])}{spread}{lost}"
        colours[place] = None
    for group in groups:
        scored = {place: cell["mean"] for place, cell in group.items() if cell["mean"] is not None}
        least, most = min(scored.values(), default=0), max(scored.values(), default=0)
        for place, mean in scored.items():
            grade = (mean - least) / (most - least) if most > least else 0.5
            colours[place] = 1 - grade if study["columns"][group[place]["task"]]["lower_is_better"] else grade
    return {"texts": texts, "colours": colours}


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
