"""The report page's part on a study."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bertkit.analysis.doctor import list_tables
from bertkit.analysis.places import Place, read_object, read_part, read_text
from bertkit.reports.html import attempt, draw_all
from bertkit.reports.tables import INTERVAL, Table, TableCell, make_table
from bertkit.studies.plots import list_curves, tabulate_grids
from bertkit.studies.spec import STUDY_FILE
from bertkit.studies.tables import (
    describe_size,
    explain_scores,
    find_row,
    has_intervals,
    join_note,
    list_columns,
    list_failures,
    name_axes,
    show_score,
    show_value,
    tabulate_cells,
    tabulate_pretrainings,
    tabulate_summary,
)
from bertkit.training.run_dir import DOCTOR_FILE, STUDY_RESULT


def describe_study(place: Place, links: Mapping[Path, str]) -> dict[str, Any]:
    """Return the page's part on a study."""
    path, study, notes = place.path, place.study or {}, []
    read_part(read_object, path / STUDY_RESULT, notes)
    made = attempt(make_study_tables, path, study, links)
    if made is None and not notes:
        notes.append(f"{STUDY_RESULT} does not have the format of this version of bertkit, skipping its tables")
    definition, again = shlex.quote(str(path / STUDY_FILE)), shlex.quote(f"{path}-again")
    words = {
        "kind": "study",
        "id": place.id,
        "name": str(path),
        "data": attempt(list_tables, read_part(read_object, path / DOCTOR_FILE, notes)) or [],
        "predicted": draw_all(attempt(list_curves, study) or []),
        "source": read_part(read_text, path / STUDY_FILE, notes) or "",
        "file": STUDY_FILE,
        "command": f"bertkit study {definition} --output {again}",
        "notes": notes,
    }
    return words | (made or {})


def make_study_tables(path: Path, study: Mapping[str, Any], links: Mapping[Path, str]) -> dict[str, Any]:
    """Return the texts and tables of a study."""
    size = describe_size(study).replace(" x ", " × ")

    def find_link(directory: str) -> str:
        return links.get((path / directory).resolve(), "")

    pretrainings = [tabulate_pretrainings(study, find_link)] if study["pretrainings"] else []
    return {
        "summary": size,
        "state": "" if study["finished"] else f"unfinished, {study['over']} of {study['runs']} runs so far",
        "comments": [f"{size}.", explain_scores(study)],
        "note": join_note(study),
        "scores": [tabulate_summary(study, find_link)],
        "columns": list_columns(study),
        "tables": [*pretrainings, *tabulate_grids(study, find_link)],
        "details": [*tabulate_cells(study), tabulate_runs(study, find_link)],
        "failures": list(list_failures(study).items()),
    }


def tabulate_runs(study: Mapping[str, Any], find_link: Callable[[str], str]) -> Table:
    """Return the table of all runs, with links to those on the page."""
    axes, with_intervals = list(study["definition"].get("grid", {})), has_intervals(study)
    lines = []
    for cell in study["cells"]:
        row = find_row(study, cell["column"])
        for run in cell["runs"]:
            name = TableCell(((run["directory"], ""),), find_link(run["directory"]))
            settings = [show_value(cell["setting"][axis]) for axis in axes]
            metrics = run.get("metrics", {})
            figures = [show_score(row, metrics.get(row.key)), *[row.show_interval(metrics)] * with_intervals]
            lines.append([name, cell["column"], *settings, str(run["seed"]), run["status"], *figures])
    heads = ["run", "column", *name_axes(axes), "seed", "state", "score", *[INTERVAL] * with_intervals]
    return make_table("All runs", heads, lines, "quiet")
