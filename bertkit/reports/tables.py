"""What runs look like: the curves of one, and of a study the table, the pictures, and how far it is.

A study is the plain dictionary that study.json holds (`bertkit.studies.runner.summarize`). Wherever scores of ours stand beside
published ones it is said what they are: a mean or the best of how many runs, and on which data.
"""

import itertools
import json
import math
import os
import re
import statistics
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.system.files import open_whole
from bertkit.tasks.task import Row

MISSING = "–"
MARKUP = re.compile(r"[\\\[<`|]")  # of Markdown: links, HTML, code, cells
AVERAGE = "Average"  # the head of the column that is a mean of others
MARK = " †"  # on a score of which a run is no better than knowing nothing


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
    with open_whole(path, "wb") as stream:
        figure.savefig(stream, format=path.suffix[1:], dpi=dpi)
    load_pyplot().close(figure)


def plot_log(log: Sequence[Mapping[str, float]], rows: Sequence[Row], metrics: Mapping[str, Any], path: Path) -> None:
    """Draws one panel a row of the task's table: the score while training, on held-out data, and its baselines.

    Rows whose score was never logged are left out; without any the training loss is drawn, and without one nothing. The
    suffix decides the format.
    """
    pyplot = load_pyplot()
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
    save_figure(figure, path, dpi=120)


# --- Studies in words -------------------------------------------------------------------------------------------------


def write_table(study: Mapping[str, Any]) -> str:
    """The text of table.md: the chosen scores beside the paper's, what they are, every cell, and what failed."""
    parts = [f"# {describe_size(study)}", *_write_summary(study), "", explain_scores(study)]
    if note := study["definition"].get("note"):
        parts += ["", " ".join(note.split())]
    if not _is_short(study):
        parts += ["", *(f"- {name}: {words}" for name, words in list_columns(study))]
    if study["pretrainings"]:
        parts += ["", "## Pretraining", "", *_write_pretrainings(study)]
    if study["definition"].get("grid"):
        for name in study["columns"]:
            if any(cell["column"] == name and not cell["borrowed"] for cell in study["cells"]):
                parts += ["", f"## {head_column(study, name)}", "", *_write_cells(study, [name])]
    else:
        parts += ["", "## Every cell", "", *_write_cells(study, list(study["columns"]))]
    runs = [*study["pretrainings"], *(run for cell in study["cells"] for run in cell["runs"])]
    failures = {run["directory"]: run["failure"] for run in runs if run["status"] == "failed"}
    if failures:
        lines = [f"- {directory}: {failure}" for directory, failure in failures.items()]
        parts += ["", f"## Failed: {len(failures)} of {study['runs']} runs", "", *lines]
    return "\n".join(parts) + "\n"


def describe_size(study: Mapping[str, Any]) -> str:
    """How many runs the study has, and why."""
    counts = {
        "row": len(study["rows"]),
        "task" if _is_short(study) else "column": len(study["columns"]),
        "setting": math.prod(len(values) for values in study["definition"].get("grid", {}).values()),
        "seed": len(study["definition"]["seeds"]),
    }
    if not _is_short(study) and not study["definition"].get("grid"):
        del counts["setting"]
    words = " x ".join(count(number, name) for name, number in counts.items())
    before = f", {count(len(study['pretrainings']), 'pretraining')} among them" if study["pretrainings"] else ""
    # Columns may share their runs: then the product is not how many there are.
    return (
        f"{words}{' =' if math.prod(counts.values()) == study['runs'] else ':'} {count(study['runs'], 'run')}{before}"
    )


def count(number: int, name: str, names: str = "") -> str:
    """So many of them."""
    return f"{number:,} {name if number == 1 else names or f'{name}s'}"


def explain_scores(study: Mapping[str, Any]) -> str:
    """What our scores and the published ones are, in a sentence or six."""
    seeds = study["definition"]["seeds"]
    settings = max((winner["of_settings"] for winner in study["chosen"]), default=0)
    runs = max((winner["of_runs"] for winner in study["chosen"]), default=0)
    on = f", on {_name_splits(study)}" if _is_short(study) else ""
    if len(seeds) > 1:
        many = ", ".join(map(str, seeds))
        sentences = [f"Ours: mean ± standard deviation over n finished runs (n), seeds {many}{on}."]
    else:
        sentences = [f"Ours: one run (1), seed {seeds[0]}{on}."]
    if settings > 1:
        rule = "best run" if study["definition"]["select"] == "best" else "mean"
        sentences.append(
            f"The setting shown (bold below) is the one whose {rule} is best of {settings} settings; it is chosen on "
            "the very data that it is scored on, so its score is optimistic."
        )
    if runs > 1 and shows_best(study):
        sentences.append(
            f"The best run is the best of all {runs} runs on that data: more optimistic still, and not to be compared "
            "with a mean or a test score."
        )
    if has_paper(study):
        sentences.append("In italics: the paper's value for the row above.")
    elif any(column["published"] for column in study["columns"].values()):
        sentences.append("Whose a published value is and on which data, its line says.")
    if names := study["definition"].get("average"):
        sentences.append(f"{AVERAGE}: of {', '.join(names)}.")
    if any(cell["at_or_below_majority"] for cell in study["cells"]):
        sentences.append(f"{MARK.strip()} At least one run is no better than always giving the same answer.")
    return " ".join(sentences)


def _name_splits(study: Mapping[str, Any]) -> str:
    """The data that the columns are measured on."""
    return " and ".join(sorted({column["split"] for column in study["columns"].values()}))


def _is_short(study: Mapping[str, Any]) -> bool:
    """Whether the columns are tasks and no more."""
    return all(column["short"] for column in study["columns"].values())


def has_paper(study: Mapping[str, Any]) -> bool:
    """Whether the study says what the paper has in its place."""
    return any(row["paper"] for row in study["rows"].values())


def shows_best(study: Mapping[str, Any]) -> bool:
    """Whether the best runs have lines of their own; not where means stand beside the paper's means."""
    return study["definition"]["select"] == "best" or not has_paper(study)


def list_progress(study: Mapping[str, Any], limit: int = 40) -> tuple[list[str], list[list[str]]]:
    """The headings and lines of the table to show while a study runs, a line a cell.

    With more cells than `limit` only those in work and those that win so far.
    """
    cells = [_show_as_cell(origin) for origin in study["pretrainings"]]
    cells += [cell for cell in study["cells"] if not cell["borrowed"]]
    best = {winner["cell"] for winner in study["chosen"]}
    if len(cells) > limit:
        busy = {cell["directory"] for cell in cells if any(run["status"] == "running" for run in cell["runs"])}
        cells = [cell for cell in cells if cell["directory"] in busy | best]
    axes = list(study["definition"].get("grid", {}))
    kind = "task" if _is_short(study) else "column"
    leading = {"row": [cell["row"] for cell in cells], kind: [cell["column"] for cell in cells]}
    leading = {name: column for name, column in leading.items() if len(set(column)) > 1}
    lines = []
    for place, cell in enumerate(cells):
        row = find_row(study, cell["column"])
        mark = " *" if cell["directory"] in best else ""
        lines.append(
            [
                *(column[place] for column in leading.values()),
                *_show_setting(cell, axes),
                f"{cell['n'] + cell['failed']}/{len(cell['runs'])}",
                show_mean(row, cell, MISSING) + mark,
                MISSING if cell["best"] is None else row.show(cell["best"]),
                _describe_work(cell),
            ]
        )
    return [*leading, *name_axes(axes), "runs", "mean ± sd (n)", "best", ""], lines


def _show_as_cell(origin: Mapping[str, Any]) -> dict[str, Any]:
    """A pretraining as a cell without a column."""
    values = [score["value"] for score in origin["scores"][:1]]
    value = values[0] if values else None
    figures = {"n": len(values), "mean": value, "sd": None, "best": value, "at_or_below_majority": None}
    run = {"seed": "pretraining"} | {key: origin[key] for key in origin if key not in ("rows", "steps", "scores")}
    words = {"row": origin["directory"], "column": "", "setting": {}, "directory": origin["directory"]}
    return words | figures | {"failed": int(origin["status"] == "failed"), "runs": [run]}


def name_axes(axes: Sequence[str]) -> list[str]:
    """The axes without their tables, where they can be told apart so."""
    short = [axis.rpartition(".")[2] for axis in axes]
    return short if len(set(short)) == len(short) else list(axes)


def show_value(value: Any) -> str:
    """A value of an axis, on one line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        value = int(value)  # 3 epochs, not 3.0
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_setting(cell: Mapping[str, Any], axes: Sequence[str]) -> list[str]:
    """The values of a cell's axes."""
    return [show_value(cell["setting"][axis]) if axis in cell["setting"] else MISSING for axis in axes]


def _name_seed(run: Mapping[str, Any]) -> str:
    """Which of a cell's runs it is."""
    return run["seed"] if isinstance(run["seed"], str) else f"seed {run['seed']}"


def _describe_work(cell: Mapping[str, Any]) -> str:
    """What goes on in a cell, or what went wrong."""
    for run in cell["runs"]:
        if run["status"] == "running" and not run["updates"]:
            return f"{_name_seed(run)}: begins"
        if run["status"] == "running":
            loss = "" if run["loss"] is None else f", loss {run['loss']:.3f}"
            return f"{_name_seed(run)}: update {run['update']:,} of {run['updates']:,}{loss}"
    reasons = [run["failure"] for run in cell["runs"] if run["status"] == "failed"]
    if reasons:
        return textwrap.shorten(f"{len(reasons)} failed: {reasons[0]}", 70, placeholder=" …")
    if cell["at_or_below_majority"]:
        return f"{cell['at_or_below_majority']} at or below the majority class"
    return "" if cell["n"] else "waiting"


def find_row(study: Mapping[str, Any], name: str) -> Row:
    """How a column's scores are shown; those of pretrainings stand in none."""
    column = study["columns"].get(name) or {"name": "", "metric": "", "unit": "", "published": {}}
    return Row(column["name"], column["metric"], unit=column["unit"], paper=column["published"])


def head_column(study: Mapping[str, Any], name: str) -> str:
    """A column's name; of a task that stands for itself also its metric."""
    column = study["columns"][name]
    return f"{name}: {column['name']}{' (%)' if column['unit'] else ''}" if column["short"] else name


def show_mean(row: Row, cell: Mapping[str, Any], empty: str = "failed") -> str:
    """A cell's `mean ± sd (n)`."""
    if cell["mean"] is None:
        return empty if cell["failed"] else MISSING
    spread = "" if cell["sd"] is None else f" ± {row.show(cell['sd'])}"
    return f"{row.show(cell['mean'])}{spread} ({cell['n']}){MARK if cell['at_or_below_majority'] else ''}"


def find_shown(study: Mapping[str, Any], name: str) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Column -> the cell that the summary shows of a row, and how it was chosen: None if there is only that one."""
    winners = {winner["column"]: winner for winner in study["chosen"] if winner["row"] == name}
    found = {}
    for column in study["columns"]:
        cells = [cell for cell in study["cells"] if cell["row"] == name and cell["column"] == column]
        winner = winners.get(column)
        chosen = [cell for cell in cells if winner and cell["directory"] == winner["cell"]] or cells[:1]
        if chosen:
            found[column] = (chosen[0], winner)
    return found


def _write_summary(study: Mapping[str, Any]) -> list[str]:
    """The lines of the table like the paper's: rows by columns, below each row the paper's values if there are any.

    Without any, the scores that the tasks know as published come last.
    """
    rows = {name: find_row(study, name) for name in study["columns"]}
    averaged = study["definition"].get("average", [])
    lines = [["", *(head_column(study, name) for name in rows), *[AVERAGE] * bool(averaged)]]
    for name, own in study["rows"].items():
        found = find_shown(study, name)
        means = [show_mean(rows[column], found[column][0]) if column in found else MISSING for column in rows]
        lines.append([name or "ours", *means, *average(rows, found, averaged)])
        if own["paper"]:
            heads = [*rows, *[AVERAGE] * bool(averaged)]
            lines.append(
                ["*the paper*", *(f"*{own['paper'][head]}*" if head in own["paper"] else "" for head in heads)]
            )
        winners = {column: winner for column, (_, winner) in found.items() if winner and winner["value"] is not None}
        if shows_best(study) and any(winner["of_runs"] > 1 for winner in winners.values()):
            bests = [
                f"{rows[column].show(winners[column]['value'])} (best of {winners[column]['of_runs']})"
                if column in winners
                else MISSING
                for column in rows
            ]
            lines.append([f"{name or 'ours'}, best run", *bests, *[MISSING] * bool(averaged)])
    if not has_paper(study):
        for label in dict.fromkeys(label for row in rows.values() for label in row.paper):
            published = [row.show(row.paper[label]) if label in row.paper else MISSING for row in rows.values()]
            lines.append([f"published: {label}", *published, *[MISSING] * bool(averaged)])
    return ["", *_format_table(lines)]


def average(
    rows: Mapping[str, Row], found: Mapping[str, tuple[Mapping[str, Any], Any]], names: Sequence[str]
) -> list[str]:
    """The mean of some of a row's means in percent, if any are named; none if one of them is missing."""
    if not names:
        return []
    means = [found[name][0]["mean"] if name in found else None for name in names]
    if any(mean is None for mean in means):
        return [MISSING]
    return [f"{statistics.fmean(_scale(rows[name], mean) for name, mean in zip(names, means, strict=True)):.1f}"]


def _scale(row: Row, value: float) -> float:
    """A value in the unit of the table."""
    return 100 * value if row.unit == "fraction" else value


def list_columns(study: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, what it is) of each column: metric, task and data, what knowing nothing scores, the paper's data."""
    found = []
    for name, column in study["columns"].items():
        row = find_row(study, name)
        runs = [run for cell in study["cells"] if cell["column"] == name for run in cell["runs"]]
        metrics = next((run["metrics"] for run in runs if run["status"] == "finished"), {})
        parts = [f"{column['name']}{' in percent' if column['unit'] else ''}; {column['task']}, {column['split']}"]
        if "heldout_pairs" in metrics:
            parts.append(f" ({metrics['heldout_pairs']:,} pairs)")
        if (least := metrics.get(f"majority_{column['metric']}")) is not None:
            parts.append(f"; always the same answer has {row.show(least)}")
        parts += [f"; the paper: {column['paper']}"] if column["paper"] else []
        found.append((name, "".join(parts)))
    return found


def _write_pretrainings(study: Mapping[str, Any]) -> list[str]:
    """The lines of the table of the pretrainings' own scores on held-out text."""
    heads: dict[str, str] = {}
    for origin in study["pretrainings"]:
        heads |= {score["name"]: f"{score['name']}{' (%)' if score['unit'] else ''}" for score in origin["scores"]}
    lines = [["pretraining", "of", "updates", *heads.values()]]
    for origin in study["pretrainings"]:
        shown = {score["name"]: Row("", "", unit=score["unit"]).show(score["value"]) for score in origin["scores"]}
        updates = f"{origin['metrics']['updates']:,}" if origin["status"] == "finished" else origin["status"]
        rows = "; ".join(origin["rows"]) or "ours"
        lines.append([origin["directory"], rows, updates, *(shown.get(name, MISSING) for name in heads)])
    return _format_table(lines)


def _write_cells(study: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The lines of the table of some columns' cells; in a grid the chosen ones are bold."""
    cells = [cell for cell in study["cells"] if cell["column"] in names]
    axes = list(study["definition"].get("grid", {}))
    best = {winner["cell"] for winner in study["chosen"]}
    counted = any(cell["at_or_below_majority"] is not None for cell in cells)
    leading = {"row": [cell["row"] for cell in cells]} if len({cell["row"] for cell in cells}) > 1 else {}
    if not axes:
        kind = "task" if _is_short(study) else "column"
        leading[kind] = [head_column(study, cell["column"]) for cell in cells]
    figures = ["mean", "sd", "best", "n", "failed", *["at or below majority"] * counted]
    lines = [[*leading, *name_axes(axes), *figures]]
    for place, cell in enumerate(cells):
        row = find_row(study, cell["column"])
        scores = [MISSING if cell[key] is None else row.show(cell[key]) for key in ("mean", "sd", "best")]
        poor = MISSING if cell["at_or_below_majority"] is None else str(cell["at_or_below_majority"])
        line = [column[place] for column in leading.values()] + _show_setting(cell, axes)
        line += [*scores, str(cell["n"]), str(cell["failed"]), *[poor] * counted]
        lines.append([f"**{text}**" for text in line] if axes and cell["directory"] in best else line)
    return _format_table(lines)


def _format_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines in Markdown, the first one the head."""
    texts = ["| " + " | ".join(MARKUP.sub(r"\\\g<0>", text) for text in line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]


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
    return f"{spread}, on {_name_splits(study)}{outline}"


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
        panels.append(labels | _grade(study, squares, [squares]) | {"chosen": _find_chosen(squares, best)})
    return panels


def _make_overview(study: Mapping[str, Any]) -> dict[str, Any]:
    """The one panel of a study without a grid; each column has colours of its own."""
    names = list(study["columns"])
    rows = list(dict.fromkeys(cell["row"] for cell in study["cells"]))
    squares = {(rows.index(cell["row"]), names.index(cell["column"])): cell for cell in study["cells"]}
    columns = [{place: cell for place, cell in squares.items() if place[1] == x} for x in range(len(names))]
    labels = {"title": "", "xlabel": "", "xs": [head_column(study, name) for name in names], "ys": rows}
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
            ours.append((step, _scale(shown, cell["mean"]), _scale(shown, cell["sd"] or 0.0)))
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
