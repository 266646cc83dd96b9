"""The part of the report page that shows a study."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertkit.analysis.places import Place, read_object, read_part, read_text
from bertkit.reports.html import EMPTY, Picture, attempt, draw_all
from bertkit.reports.tables import MISSING, Table, TableCell, make_table
from bertkit.studies.plots import grade_cells, plot_curve
from bertkit.studies.spec import STUDY_FILE
from bertkit.studies.tables import (
    AVERAGE,
    average,
    describe_size,
    explain_scores,
    find_row,
    find_shown,
    has_paper,
    head_column,
    list_columns,
    list_progress,
    name_axes,
    show_mean,
    show_value,
    shows_best,
    tabulate_pretrainings,
)
from bertkit.training.run_dir import STUDY_RESULT


def describe_study(place: Place, links: Mapping[Path, str]) -> dict[str, Any]:
    """The part of a study."""
    path, study, notes = place.path, place.study or {}, []
    read_part(read_object, path / STUDY_RESULT, notes)
    made = attempt(make_study_tables, path, study, links)
    if made is None and not notes:
        notes.append(f"{STUDY_RESULT} has another form than this version of bertkit writes; its tables are left out")
    definition, again = shlex.quote(str(path / STUDY_FILE)), shlex.quote(f"{path}-again")
    words = {
        "kind": "study",
        "id": place.id,
        "name": place.name,
        "predicted": draw_all(f"{place.id}-figure", attempt(list_study_pictures, study) or []),
        "source": read_part(read_text, path / STUDY_FILE, notes) or "",
        "file": STUDY_FILE,
        "command": f"bertkit study {definition} --output {again}",
        "notes": notes,
    }
    return EMPTY | words | (made or {})


def make_study_tables(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """The words and the tables of a study."""
    size = describe_size(study).replace(" x ", " × ")
    heads, lines = list_progress(study, limit=study["runs"] + len(study["cells"]))
    runs = [*study["pretrainings"], *(run for cell in study["cells"] for run in cell["runs"])]
    failures = {run["directory"]: run["failure"] for run in runs if run["status"] == "failed"}
    chosen = " (* chosen)" if study["chosen"] else ""

    def find_link(directory: str) -> str:
        return links.get((path / directory).resolve(), "")

    return {
        "summary": size,
        "state": "" if study["finished"] else f"unfinished, {study['over']} of {study['runs']} runs so far",
        "comments": [f"{size}.", explain_scores(study).replace("bold below", "outlined below")],
        "note": " ".join(study["definition"].get("note", "").split()),
        "scores": [make_summary(path, study, links)],
        "columns": [] if all(c["short"] for c in study["columns"].values()) else list_columns(study),
        "tables": [
            *([tabulate_pretrainings(study, find_link)] if study["pretrainings"] else []),
            *make_heatmaps(path, study, links),
        ],
        "details": [
            make_table(f"Every cell{chosen}", [*heads[:-1], "state"], lines, "quiet"),
            make_runs(path, study, links),
        ],
        "failures": list(failures.items()),
    }


def make_summary(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> Table:
    """The table like the paper's: rows by columns; in each cell ours, the paper's, and the best run of several."""
    averaged = study["definition"].get("average", [])
    columns, lines = {name: find_row(study, name) for name in study["columns"]}, []
    for name, own in study["rows"].items():
        found = find_shown(study, name)
        shown = {column: found.get(column, (None, None)) for column in columns}
        cells = [make_shown(path, study, column, *pair, own, links) for column, pair in shown.items()]
        for mean in average(columns, found, averaged):
            published = [(str(own["paper"][AVERAGE]), "the paper")] if AVERAGE in own["paper"] else []
            cells.append(TableCell(((mean, ""), *published)))
        lines.append([name or "ours", *cells])
    if not has_paper(study):
        for label in dict.fromkeys(label for row in columns.values() for label in row.paper):
            values = [row.show(row.paper[label]) if label in row.paper else MISSING for row in columns.values()]
            lines.append([f"published: {label}", *values, *[MISSING] * bool(averaged)])
    heads = [head_column(study, name) for name in study["columns"]]
    return make_table("Scores", ["", *heads, *[AVERAGE] * bool(averaged)], lines, "quiet")


def make_shown(
    path: Path,
    study: Mapping[str, Any],
    column: str,
    cell: Mapping[str, Any] | None,
    winner: Mapping[str, Any] | None,
    own: Mapping[str, Any],
    links: Mapping[Path, str],
) -> TableCell:
    """A cell of the table like the paper's."""
    row = find_row(study, column)
    mean, _, rest = (show_mean(row, cell) if cell else MISSING).partition(" ")
    lines = [(mean, rest)]
    if column in own["paper"]:
        lines.append((str(own["paper"][column]), "the paper"))
    if shows_best(study) and winner and winner["of_runs"] > 1 and winner["value"] is not None:
        lines.append((row.show(winner["value"]), f"best of {winner['of_runs']}"))
    run = winner["run"] if winner else cell["runs"][0]["directory"] if cell else ""
    return TableCell(tuple(lines), links.get((path / run).resolve(), "") if run else "")


def make_runs(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> Table:
    """The table of every run, with links to those on the page."""
    axes = list(study["definition"].get("grid", {}))
    lines = []
    for cell in study["cells"]:
        row = find_row(study, cell["column"])
        for run in cell["runs"]:
            value = run.get("metrics", {}).get(row.key)
            settings = [show_value(cell["setting"][axis]) for axis in axes]
            name = TableCell(((run["directory"], ""),), links.get((path / run["directory"]).resolve(), ""))
            score = MISSING if value is None else row.show(value)
            lines.append([name, cell["column"], *settings, str(run["seed"]), run["status"], score])
    return make_table("Every run", ["run", "column", *name_axes(axes), "seed", "state", "score"], lines, "quiet")


def make_heatmaps(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> list[Table]:
    """The heat map of each row and column of a grid: the learning rate, or else the first axis, goes across."""
    axes = list(study["definition"].get("grid", {}))
    if not axes:
        return []
    first = "train.learning_rate" if "train.learning_rate" in axes else axes[0]
    names = dict(zip(axes, name_axes(axes), strict=True))
    groups = dict.fromkeys((cell["row"], cell["column"]) for cell in study["cells"] if not cell["borrowed"])
    tables = []
    for group in groups:
        squares: dict[str, dict[str, Mapping[str, Any]]] = {}
        for cell in study["cells"]:
            if (cell["row"], cell["column"]) == group:
                down = ", ".join(f"{names[axis]} {show_value(cell['setting'][axis])}" for axis in axes if axis != first)
                squares.setdefault(down, {})[show_value(cell["setting"][first])] = cell
        across = list(dict.fromkeys(value for line in squares.values() for value in line))
        shades = grade_cells(study, [cell for line in squares.values() for cell in line.values()])
        best = find_shown(study, group[0]).get(group[1], (None, None))[1]
        lines = [
            [down, *(make_square(study, line.get(value), shades, best, path, links) for value in across)]
            for down, line in squares.items()
        ]
        title = head_column(study, group[1]) + (f", {group[0]}" if group[0] else "")
        tables.append(make_table(f"Grid: {title}", [f"{names[first]} →", *across], lines, "matrix"))
    return tables


def make_square(
    study: Mapping[str, Any],
    cell: Mapping[str, Any] | None,
    shades: Mapping[str, float],
    best: Mapping[str, Any] | None,
    path: Path,
    links: Mapping[Path, str],
) -> TableCell:
    """A square of a heat map; the chosen one leads to its best run."""
    if cell is None:
        return TableCell(((MISSING, ""),))
    mean, _, rest = show_mean(find_row(study, cell["column"]), cell).partition(" ")
    lost = [("", f"{cell['failed']} failed")] if cell["failed"] and cell["n"] else []
    is_chosen = best is not None and best["cell"] == cell["directory"]
    link = links.get((path / best["run"]).resolve(), "") if best and is_chosen else ""
    return TableCell(((mean, rest), *lost), link, shades.get(cell["directory"]), is_chosen)


def list_study_pictures(study: Mapping[str, Any]) -> list[Picture]:
    """A curve for each column, if rows start from steps of a pretraining."""
    return [
        (
            f"{head_column(study, name)} over the updates of the pretraining",
            plot_curve,
            ({**study, "columns": {name: column}},),
        )
        for name, column in study["columns"].items()
    ]
