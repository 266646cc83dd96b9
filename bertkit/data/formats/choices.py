"""Exports of annotation programs with labels of whole texts -> tables of texts and labels, recognised by their keys.

- Label Studio: the choices of JSON, of JSON-MIN and of its CSV, as `label_studio_sdk.converter` writes them. If a text
  has several annotations, the ground truth counts, else the latest.
- Doccano: JSON lines with a list of one label; a text with an empty list is not annotated. Lists of several labels are
  a table of several labels already, and an empty one has none of them.
- Prodigy: the JSON lines of `db-out`, a label with an answer, or options of which some are accepted.

A column in which some text has several labels is one of lists, any other one of plain texts. Left out: spans
(`bertkit.data.formats.annotations`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import MsgspecError
from msgspec.json import decode

from bertkit.data.formats.annotations import FURTHER, UNANNOTATED, choose_annotation, keep_accepted, tell_left_out
from bertkit.data.formats.line import AGAIN, make_text
from bertkit.data.formats.rows import Columns, write_values
from bertkit.errors import as_usage_error
from bertkit.system.progress import Report

LABEL_COLUMN = "label"
SEVERAL_CHOICES = '{"choices"'  # the beginning of a cell with several choices

Labelled = tuple[int, dict[str, Any], dict[str, list[str]]] | str  # row, other cells and labels; or why it is left out


def read_labelled_export(rows: Columns, learned: Collection[str], report: Report) -> Columns:
    """Return an export as a table of texts and labels, and any other table as it is.

    Args:
        learned: The columns that a person has named.
    """
    names = {*rows.table.column_names}
    if {"data", "annotations"} <= names and "data" in rows.faults:
        return _choose_rows(rows, _walk_tasks(rows), report)
    if {"id", "annotator", "annotation_id"} <= names:
        return _choose_rows(rows, _walk_choices(rows), report)
    if {"text", "options", "accept", "answer"} <= names and not {"accept", "answer"} & {*learned}:
        accepted = keep_accepted(rows, learned, report)
        return _choose_rows(accepted, _walk_options(accepted), report)
    if {"id", "text", LABEL_COLUMN} <= names and LABEL_COLUMN in rows.lists:
        walked = list(_walk_lists(rows))
        if all(isinstance(row, str) or len(row[2][LABEL_COLUMN]) == 1 for row in walked):
            return _choose_rows(rows, walked, report)
    return keep_accepted(rows, learned, report)


def _walk_tasks(rows: Columns) -> Iterator[Labelled]:
    """Yield the tasks of Label Studio's JSON."""
    for row, task in enumerate(rows.walk()):
        with as_usage_error(rows.locate(row), "give a task with data and annotations"):
            texts = {name: make_text(value) for name, value in decode(task["data"], type=dict[str, Any]).items()}
            result, reasons = choose_annotation(task["annotations"])
            labels: dict[str, list[str]] = {}
            for part in result or ():
                if part.get("type") == "choices":
                    labels.setdefault(str(part.get("from_name")), []).extend(part["value"]["choices"])
        if result is not None:
            yield row, texts, labels
        yield from reasons


def _walk_choices(rows: Columns) -> Iterator[Labelled]:
    """Yield the rows of JSON-MIN or CSV, which have one for each annotation, and a text's latest first."""
    cells = {name: rows.table.column(name).to_pylist() for name in rows.table.column_names}
    several = [name for name, values in cells.items() if any(value.startswith(SEVERAL_CHOICES) for value in values)]
    seen = set()
    for number, row in enumerate(rows.walk()):
        labels = {name: _parse_choices(row.pop(name)) for name in several}
        if not row["annotation_id"]:
            yield UNANNOTATED
        elif row["id"] in seen:
            yield FURTHER
        else:
            yield number, row, labels
        seen.add(row["id"])


def _parse_choices(cell: str) -> list[str]:
    """Return the labels of a cell: one as plain text, or several as an object."""
    if cell.startswith(SEVERAL_CHOICES):
        try:
            return decode(cell, type=dict[str, list[str]])["choices"]
        except MsgspecError:
            return [cell]
    return [cell] if cell else []


def _walk_options(rows: Columns) -> Iterator[Labelled]:
    """Yield the texts of Prodigy with the options that were accepted."""
    for number, row in enumerate(rows.walk()):
        with as_usage_error(rows.locate(number), AGAIN):
            labels = decode(row.pop("accept") or "[]", type=list[str])
        others = {name: cell for name, cell in row.items() if name not in ("options", "config")}
        yield (number, others, {LABEL_COLUMN: labels}) if labels else UNANNOTATED


def _walk_lists(rows: Columns) -> Iterator[Labelled]:
    """Yield the texts of Doccano."""
    for number, row in enumerate(rows.walk()):
        with as_usage_error(rows.locate(number), AGAIN):
            labels = decode(row.pop(LABEL_COLUMN) or "[]", type=list[str])
        yield (number, row, {LABEL_COLUMN: labels}) if labels else UNANNOTATED


def _choose_rows(rows: Columns, walked: Iterable[Labelled], report: Report) -> Columns:
    """Return the rows that are kept, with their labels; report how many are left out, and why."""
    walked = list(walked)
    kept = [row for row in walked if not isinstance(row, str)]
    tell_left_out(rows, [reason for reason in walked if isinstance(reason, str)], len(kept), report)
    columns = list(dict.fromkeys(name for *_, labels in kept for name in labels))
    names = {columns[0]: LABEL_COLUMN} if len(columns) == 1 else {name: name for name in columns}
    several = {name for *_, labels in kept for name, found in labels.items() if len(found) > 1}

    def join(texts: Mapping[str, Any], labels: Mapping[str, list[str]]) -> dict[str, Any]:
        cells = dict(texts)
        for name in columns:
            found = labels.get(name, [])
            cells[names[name]] = found if name in several else next(iter(found), "")
        return cells

    table = {number: join(texts, labels) for number, texts, labels in kept}
    written = write_values(rows.source, iter(table.items()), rows.unit)
    return replace(rows.take(list(table)), table=written.table, lists=written.lists, faults=written.faults)
