"""Named entities in a person's own tables -> sentences of words and tags.

A row has a list of words and one of their tags, or a text and a list of spans: objects with `start`, `end` (characters,
end exclusive) and `label`, lists of these three, or one object with three lists, as `datasets` writes sequences of
objects. The words of a text are those of prediction.

Left out: files and cells (`bertkit.data.formats.rows`), CoNLL files (`bertkit.data.formats.conll`), and exports of
annotation programs that are not such tables (`bertkit.data.formats.annotations`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from sys import intern
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from bertkit.data.formats.line import LONGEST_QUOTED, MOST_NAMES
from bertkit.data.formats.rows import Columns
from bertkit.data.splits import LEAVE_OUT
from bertkit.data.tagging import ABSENT, BASIC, Sentence, TaggedText, split_words
from bertkit.data.tags import ENTITIES, WORDS, check_tag, choose_scheme, detect_scheme, to_iob2
from bertkit.errors import UsageError, as_usage_error
from bertkit.system.progress import Report

WORD_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("ner_tags", "tags")
TEXT_COLUMN = "text"
SPAN_COLUMNS = ("ents", "spans", "entities", "label", "labels")  # ents: spaCy; label, labels: doccano
SPAN_REMEDY = 'give spans such as {"start": 0, "end": 3, "label": "PER"}'

Offset = Annotated[int, Meta(ge=0)]


class MarkedSpan(Struct, omit_defaults=True):
    """A span of a text with its label or labels: other programs call it otherwise, and some repeat its text."""

    start: Offset = -1
    end: Offset = -1
    start_offset: Offset = -1
    end_offset: Offset = -1
    label: str = ""
    type: str = ""
    entity_group: str = ""
    labels: list[str] | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        self.start, self.end = max(self.start, self.start_offset), max(self.end, self.end_offset)
        if min(self.start, self.end) < 0:
            raise ValueError(f"Object missing required field `{'start' if self.start < 0 else 'end'}`")

    def fits(self, text: str) -> bool:
        """Return whether its own text is at its offsets, except for white space, which some programs change."""
        return not self.text or text[self.start : self.end].split() == self.text.split()


class SpanLists(Struct):
    """The spans of a text, one after the other in three lists."""

    start: list[Offset]
    end: list[Offset]
    label: list[str]

    def __post_init__(self) -> None:
        if not len(self.start) == len(self.end) == len(self.label):
            raise ValueError("start, end and label have different lengths")


def read_entities(
    rows: Columns, report: Report, label: str = "", scheme: str = "", text_words: str | None = BASIC
) -> TaggedText:
    """Read the sentences of a table; rows without a word are left out. Label and scheme are as for `read_conll`.

    Texts are divided into words as `split_words` does.

    Without a column of tags or spans, or with empty cells alone, the sentences have no tags. A span that is not whole
    words is extended to them in the tags, but not in the entities; such spans are counted and reported.
    """
    names = rows.table.column_names
    given, marked = select_columns(names, label)
    if not given:
        listed = ", ".join(map(repr, names[:MOST_NAMES]))
        raise UsageError(f"{rows.source} has the columns {listed}; expected tokens and ner_tags, or text and spans")
    is_text = given == TEXT_COLUMN
    cells = rows.find(given).to_pylist()
    find = rows.table.column if is_text else rows.find  # spans are nested
    marks = find(marked).to_pylist() if marked else [""] * len(rows)
    is_labelled = any(marks)
    lists = [] if is_text else [read_list(mark, f"{rows.locate(row)}: {marked}") for row, mark in enumerate(marks)]
    scheme = ENTITIES if is_text else choose_scheme(scheme, {*chain.from_iterable(lists)})
    odd: list[str] = []
    found = []
    for row, (cell, mark) in enumerate(zip(cells, marks, strict=True)):
        origin = rows.locate(row)
        if is_labelled and not mark:
            remedy = "give [] if there is no entity" if is_text else "give one tag per word"
            raise UsageError(f"{origin} has no {marked}; {remedy}, or leave such rows out with {LEAVE_OUT}")
        entities = None
        if is_text:
            offsets = split_words(cell, text_words)
            words = [cell[start:end] for start, end in offsets]
            tags, entities = _tag_words(cell, offsets, read_spans(mark, cell, origin, marked), origin, odd)
        else:
            words = read_list(cell, f"{origin}: {given}")
            tags = lists[row] if is_labelled else ["O"] * len(words)
            tags = [check_tag(tag, f"{origin}: {marked}", scheme) for tag in tags]
            if len(tags) != len(words):
                raise UsageError(f"{origin} has {len(words)} {given} and {len(tags)} {marked}; give one tag per word")
        if words:
            found.append((row, words, tags, entities))
    if not found:
        raise UsageError(f"{rows.source} has no words in {given!r}; give at least one text")
    if len(found) < len(rows):
        report(f"{rows.source}: {len(rows) - len(found):,} rows have no words in {given!r} and are left out")
    if odd:
        report(
            f"{rows.source}: {len(odd):,} spans begin or end within a word, or with a space, and are fitted to whole "
            f"words of their own, if there are some; they count as missed in scores (first: {odd[0]})"
        )
    kept = rows.take([row for row, *_ in found])
    gathered = [(words, tags, 0, rows.lines[row], entities) for row, words, tags, entities in found]
    text = gather_sentences(rows.source, gathered, scheme)
    text_words = text_words if is_text else None
    return replace(text, rows=kept, columns=(given, marked), is_labelled=is_labelled, text_words=text_words)


def gather_sentences(
    source: str, found: Sequence[tuple[list[str], list[str], int, int, Any]], scheme: str
) -> TaggedText:
    """Return a text from the words, official tags, document, line and, if they are spans, entities of its sentences."""
    is_words, sentences = scheme == WORDS, []
    scheme, odd = (scheme, 0) if is_words else detect_scheme([tags for _, tags, *_ in found])
    for words, official, document, line, entities in found:
        tags = official if is_words else to_iob2(official)
        sentences.append(Sentence(words, tags, tags if tags == official else official, document, line, entities))
    return TaggedText(source, sentences, sentences[-1].document, scheme, odd)


def drop_unmarked(rows: Columns, report: Report, label: str = "") -> Columns:
    """Return the rows that have tags or spans, or all if none has; the others are counted and reported."""
    _, marked = select_columns(rows.table.column_names, label)
    has_marks = np.array([bool(cell) for cell in rows.table.column(marked).to_pylist()] if marked else [])
    if not has_marks.any() or has_marks.all():
        return rows
    first = rows.name_row(int(has_marks.argmin()))
    report(f"{rows.source}: {(~has_marks).sum():,} rows have no {marked} and are left out (first: {first})")
    return rows.take(np.flatnonzero(has_marks))


def select_columns(names: Container[str], label: str = "") -> tuple[str, str]:
    """Return the columns of words and tags, or of a text and its spans, if there are both; "" for a missing one."""
    forms = [(name, TAG_COLUMNS) for name in WORD_COLUMNS] + [(TEXT_COLUMN, SPAN_COLUMNS)]
    usual = ((given, [label] if label else marks) for given, marks in forms if given in names)
    found = [(given, next((x for x in marks if x in names), "")) for given, marks in usual]
    return max(found, key=lambda columns: bool(columns[1]), default=("", ""))


def read_list(cell: str, origin: str) -> list[str]:
    """Read a cell as a JSON list of texts, or as texts separated by white space."""
    if not cell.startswith("["):
        return cell.split()
    with as_usage_error(origin, 'give a list of texts, such as ["Ada", "lived"]'):
        return msgspec.json.decode(cell, type=list[str])


def read_spans(cell: str, text: str, origin: str, column: str) -> list[tuple[int, int, str]]:
    """Return the spans of a text in order."""
    with as_usage_error(f"{origin}: {column}", SPAN_REMEDY):
        read = msgspec.json.decode(cell or "[]", type=list[MarkedSpan | tuple[Offset, Offset, str]] | SpanLists)
    if isinstance(read, SpanLists):
        read = zip(read.start, read.end, read.label, strict=True)
    spans = []
    for span in (span if isinstance(span, MarkedSpan) else MarkedSpan(*span[:2], label=span[2]) for span in read):
        check_span(span, text, origin)
        for label in span.labels or [span.label or span.type or span.entity_group]:
            if not (words := label.split()):
                raise UsageError(f"{origin}: the span {span.start} to {span.end} has no label; {SPAN_REMEDY}")
            spans.append((span.start, span.end, " ".join(words)))
    return sorted({*spans})  # a program may write a span twice


def check_span(span: MarkedSpan, text: str, origin: str) -> None:
    """Check that a span has characters of its text, and its own text there."""
    where = f"{origin}: the span {span.start} to {span.end}"
    if not span.start < span.end <= len(text):
        raise UsageError(f"{where} is not within the {len(text):,} characters; correct it")
    if not span.fits(text):
        found, given = (x[:LONGEST_QUOTED] for x in (text[span.start : span.end], span.text))
        remedy = "count characters, an emoji as one and CR LF as two"
        raise UsageError(f"{where} is {found!r}, but has the text {given!r}; {remedy}")


def _tag_words(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, str]], origin: str, odd: list[str]
) -> tuple[list[str], dict[tuple[int, int, str], str] | None]:
    """Return the IOB2 tags of the words at these offsets, and `Sentence.entities`; `odd` gets spans of half words."""
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    tags, entities, before = ["O"] * len(offsets), {}, len(odd)
    for (other, until, _), (start, end, label) in pairwise([(0, 0, ""), *spans]):
        if start < until:
            raise UsageError(f"{origin}: the spans {other} to {until} and {start} to {end} overlap; keep one of them")
        piece = text[start:end]
        inner, outer = start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
        first, last = bisect_right(ends, inner), bisect_left(starts, outer)
        is_whole = first < last and (starts[first], ends[last - 1]) == (start, end)
        entities[(first, last, label) if is_whole else (ABSENT, start, label)] = piece
        if not is_whole:
            odd.append(f"{origin}, {piece[:LONGEST_QUOTED]!r}")
        while first < last and tags[first] != "O":  # keeps the words of an earlier span
            first += 1
        for word in range(first, last):
            tags[word] = intern(f"{'I' if word > first else 'B'}-{label}")
    return tags, None if len(odd) == before else entities


def list_spans(offsets: Sequence[tuple[int, int]], entities: Iterable[tuple[int, int, str]]) -> list[dict[str, object]]:
    """Return entities, each first word, end and type, as spans of the text whose words are at these offsets."""
    return [
        {"start": offsets[first][0], "end": offsets[behind - 1][1], "label": kind} for first, behind, kind in entities
    ]
