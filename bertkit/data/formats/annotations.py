"""Exports of annotation programs -> tables of texts and spans, or of words and tags, recognised by their keys.

- Label Studio: JSON, and JSON-MIN with its CSV and TSV, as `label_studio_sdk.converter` writes them.
- Prodigy: the JSON lines of `db-out`, annotated in an interface of its manual that has `spans`.
- spaCy: training tuples of its version 2 as JSON, also in the object of ner-annotator.
- brat: the standoff format of its manual, `.ann` beside `.txt`; each document is a row.
- WebAnno and INCEpTION: TSV of version 3 (`bertkit.data.formats.webanno`).

Doccano's JSON lines and spaCy's `Doc.to_json` are tables with spans already (`bertkit.data.formats.entities`). The text
of a span, if the form repeats it, must be the text at its offsets. Left out: words, and spans that overlap or are
outside their text.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Raw, Struct, convert, to_builtins
from msgspec.json import decode

from bertkit.data.formats.entities import TEXT_COLUMN, MarkedSpan, check_span
from bertkit.data.formats.line import AGAIN, CONVERT, make_text, open_file, read_json, read_lines
from bertkit.data.formats.rows import SPLIT_NAMES, Columns, has_splits, read_splits, write_values
from bertkit.data.formats.webanno import is_webanno, read_webanno
from bertkit.errors import UsageError, as_usage_error
from bertkit.system.progress import Report

SPANS, FURTHER, UNANNOTATED = "spans", "further annotations of a text", "not annotated"
DECISIONS = {"accept": "", "": "", "reject": "rejected", "ignore": "ignored"}  # Prodigy's -> why a row is left out
BOUND = re.compile(r"T\d+\t(\S+) (\d+)(?: \d+(;)\d+)* (\d+)\t(.*)")  # brat: type, start, end and text of a span
REGIONS = re.compile(r'\[\{.*"labels":')
TUPLE = re.compile(rb'\[\s*"[^{]*\{')  # a text and an object
REGION_REMEDY = "give labels of a plain text, each with start, end and labels"  # a region of an image has no label
TUPLE_REMEDY = 'give tuples such as ["Ada lived.", {"entities": [[0, 3, "PER"]]}]'


class RegionResults(Struct):
    """The results of one annotator for a text in Label Studio: regions, relations, choices and others."""

    result: list[dict[str, Any]]
    was_cancelled: bool | None = None
    ground_truth: bool | None = None
    created_at: str = ""


class AnnotatorExport(Struct):
    """The key of ner-annotator's object that is read."""

    annotations: list[Raw] = []


Reader = Callable[[Path], Columns]  # reads a table
Marked = tuple[int, dict[str, str], list[MarkedSpan]] | str  # row, its other cells and spans; or why one is left out


def read_exports(source: str, read: Reader, report: Report, needs_train: bool = True) -> dict[str, Columns]:
    """Read the splits of tables or exports, as `read_splits` does, or of brat's documents; `read` reads tables."""
    if documents := list_brat_files(source):
        if needs_train and "train" not in documents:
            raise UsageError(f"{source} has no .ann files of the split train; give some")
        return {split: _read_brat(source, paths, report) for split, paths in documents.items()}
    return read_splits(source, partial(read_export, read=read, report=report), needs_train)


def read_export(path: Path, read: Reader, report: Report) -> Columns:
    """Read an export as a table with `text` and `spans`, or words and tags; return any other table as it is."""
    found: list[Raw] | AnnotatorExport = []
    if path.name.removesuffix(".gz").endswith(".json"):
        with suppress(UsageError):  # the reader of tables explains it
            found = read_json(path, list[Raw] | AnnotatorExport)
    if ".tsv" in path.suffixes and is_webanno(path):
        return read_webanno(path, report)
    listed = found.annotations if isinstance(found, AnnotatorExport) else found
    if TUPLE.match(next((bytes(one) for one in listed if bytes(one) != b"null"), b"")):
        return _read_tuples(path, listed, report)
    del found, listed  # before the file is read again
    rows = read(path)
    names = rows.table.column_names
    if {"data", "annotations"} <= {*names} and TEXT_COLUMN not in names:
        return _choose_rows(rows, _walk_tasks(rows), report)
    searched = names if "annotation_id" in names else []
    if marked := [x for x in searched if any(map(REGIONS.match, rows.table.column(x).to_pylist()))]:
        return _choose_rows(rows, _walk_regions(rows, marked), report)
    if SPANS in names and is_answered(rows):
        return _choose_rows(rows, _walk_answers(rows, report), report)
    if "tokens" in rows.faults and TEXT_COLUMN in names:  # offsets in the text, as spaCy writes them
        return replace(rows, table=rows.table.drop_columns(["tokens"]))
    return rows


def is_answered(rows: Columns) -> bool:
    """Return whether a table has Prodigy's answers to the proposals for texts."""
    names = {TEXT_COLUMN, "answer"} & {*rows.table.column_names}
    answers = {*rows.table.column("answer").to_pylist()} if len(names) == 2 else {""}
    return answers != {""} and answers <= DECISIONS.keys()


def keep_accepted(rows: Columns, learned: Collection[str], report: Report) -> Columns:
    """Return the rows of a table that are not rejected or ignored in Prodigy; answers that are learned stay."""
    if "answer" in learned or not is_answered(rows):
        return rows
    reasons = [DECISIONS[answer] for answer in rows.table.column("answer").to_pylist()]
    accepted = rows.take(np.flatnonzero([not reason for reason in reasons]))
    tell_left_out(rows, filter(None, reasons), len(accepted), report)
    if "label" in accepted.table.column_names and len(accepted.table.column("label").unique()) == 1:
        report(f"{rows.source}: all proposals are one label; --label answer learns whether it is accepted")
    return accepted


def list_brat_files(source: str) -> dict[str, list[Path]]:
    """Return the .ann files of each split; those outside folders or files with the name of a split are train's."""
    root = Path(source)
    if root.suffix == ".ann" and root.is_file():
        return {"train": [root]}
    found: dict[str, list[Path]] = {split: [] for split in SPLIT_NAMES}
    for path in [] if has_splits(source) else sorted([*root.glob("*.ann"), *root.glob("*/*.ann")]):
        parts = {*path.relative_to(root).with_suffix("").parts}
        found[next((split for split, names in SPLIT_NAMES.items() if parts & {*names}), "train")].append(path)
    return {split: paths for split, paths in found.items() if paths}


def _read_brat(folder: str, paths: Sequence[Path], report: Report) -> Columns:
    """Read brat's documents; a span in several places with other words between them is left out and counted."""
    rows, lost = [], 0
    for path in paths:
        with open_file(source := path.with_suffix(".txt")) as stream, as_usage_error(str(source), CONVERT):
            text, spans = stream.read().decode(), []  # line ends are characters
        marks = []
        for bound in filter(None, map(BOUND.fullmatch, read_lines(path))):  # not relations, events and notes
            label, start, several, end, piece = bound.groups()
            marks.append((MarkedSpan(int(start), int(end), label=label, text=piece), several is not None))
        # Texts from Windows: brat counts CR LF as two characters or, as some programs that write its form, as one.
        forms = [text, text.replace("\r\n", "\n")]
        text = next((x for x in forms if all(is_several or span.fits(x) for span, is_several in marks)), text)
        for span, is_several in marks:
            lost += (is_apart := is_several and not span.fits(text))
            if not is_apart:
                check_span(span, text, str(path))
            spans += [] if is_apart else [span]
        rows.append({"document": path.stem, TEXT_COLUMN: text, SPANS: to_builtins(spans)})
    if lost:
        report(f"{folder}: {lost:,} spans are in several places with other words between them and are left out")
    return write_values(folder, enumerate(rows, 1), "document")


def _read_tuples(path: Path, tuples: Sequence[Raw], report: Report) -> Columns:
    """Read spaCy's tuples; ner-annotator has null for a text that was skipped."""
    rows = {}
    for number, content in enumerate(tuples, 1):
        with as_usage_error(f"{path}, row {number}", TUPLE_REMEDY):
            if found := decode(content, type=tuple[str, dict[str, Any]] | None):
                rows[number] = {TEXT_COLUMN: found[0], SPANS: found[1].get("entities", [])}
    if skipped := len(tuples) - len(rows):
        report(f"{path}: left out: {skipped:,} skipped")
    return write_values(str(path), iter(rows.items()), "row")


def _walk_tasks(rows: Columns) -> Iterator[Marked]:
    """Yield the tasks of Label Studio's JSON, each with its ground truth or else its latest annotation."""
    for row, task in enumerate(rows.walk()):
        with as_usage_error(rows.locate(row), REGION_REMEDY):
            texts = {name: make_text(value) for name, value in decode(task["data"], type=dict[str, Any]).items()}
            result, reasons = choose_annotation(task["annotations"])
            marks = [one for one in result or () if str(one.get("type")).endswith("labels")]
            spans = convert([one.get("value") for one in marks], list[MarkedSpan])
        if result is not None:
            yield row, texts, spans
        yield from reasons


def choose_annotation(annotations: str) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the results of the annotation of a task that counts, and why others are left out; None without one."""
    found = decode(annotations or "[]", type=list[RegionResults])
    kept = sorted((x for x in found if not x.was_cancelled), key=lambda x: (bool(x.ground_truth), x.created_at))
    if not kept:
        return None, ["skipped" if found else UNANNOTATED]
    return kept[-1].result, [FURTHER] * len(kept[1:])


def _walk_regions(rows: Columns, marked: Sequence[str]) -> Iterator[Marked]:
    """Yield the rows of JSON-MIN, which has one for each annotation, and a text's latest first."""
    seen = set()
    for number, row in enumerate(rows.walk()):
        with as_usage_error(rows.locate(number), REGION_REMEDY):
            spans = [span for name in marked for span in decode(row.pop(name) or "[]", type=list[MarkedSpan])]
        marks = FURTHER if (key := row.get("id", number)) in seen else (number, row, spans)
        seen.add(key)
        yield marks if row["annotation_id"] else UNANNOTATED


def _walk_answers(rows: Columns, report: Report) -> Iterator[Marked]:
    """Yield the accepted texts of Prodigy, whose tokens repeat the text; a text may have a row for each span."""
    texts: dict[tuple[str, ...], tuple[int, dict[str, str], list[MarkedSpan]]] = {}
    repeated = 0
    for number, row in enumerate(rows.walk()):
        with as_usage_error(origin := rows.locate(number), AGAIN):
            spans, tokens = (decode(row.pop(name, "") or "[]", type=list[MarkedSpan]) for name in (SPANS, "tokens"))
        for token in tokens:
            check_span(token, row[TEXT_COLUMN], origin)
        if reason := DECISIONS[row["answer"]]:
            yield reason
            continue
        key = row[TEXT_COLUMN], row.get("question", "")  # the spans of a text can answer several questions
        repeated += key in texts
        texts.setdefault(key, (number, row, []))[2].extend(spans)
    if repeated:
        report(f"{rows.source}: {repeated:,} accepted rows are joined with an earlier one of their text")
    yield from texts.values()


def tell_left_out(rows: Columns, reasons: Iterable[str], kept: int, report: Report) -> None:
    """Report how many rows or annotations are left out, and why; none that are kept are a UsageError."""
    if left := Counter(reasons):
        report(f"{rows.source}: left out: " + ", ".join(f"{count:,} {reason}" for reason, count in left.items()))
    if not kept:
        raise UsageError(f"{rows.source} has no annotated text; annotate at least one")


def _choose_rows(rows: Columns, walked: Iterable[Marked], report: Report) -> Columns:
    """Return the rows that are kept, with their text and spans; report how many are left out, and why."""
    marked = list(walked)
    found = [row for row in marked if not isinstance(row, str)]
    left = [reason for reason in marked if isinstance(reason, str)]
    tell_left_out(rows, left, len(found), report)
    names = dict.fromkeys(name for _, texts, _ in found for name in texts)
    fitting = [x for x in names if all(span.fits(texts.get(x, "")) for _, texts, spans in found for span in spans)]
    key = fitting[0] if len(fitting) == 1 else ""
    if TEXT_COLUMN in (fitting or names):
        key = TEXT_COLUMN
    if not key:
        raise UsageError(f"{rows.source}: the spans fit {fitting or 'none'} of {list(names)}; name the texts text")
    kept = {row: texts | {TEXT_COLUMN: texts.pop(key, ""), SPANS: to_builtins(spans)} for row, texts, spans in found}
    table = write_values(rows.source, iter(kept.items()), rows.unit).table
    return replace(rows.take([*kept]), table=table, lists=rows.lists & {*table.column_names})
