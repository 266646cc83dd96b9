"""Predicted tags in files: CoNLL lines, the rows of a table."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from bertkit.data.formats.conll import DOCSTART
from bertkit.data.formats.entities import SPAN_COLUMNS, TEXT_COLUMN, find_columns, list_spans
from bertkit.data.formats.rows import Columns
from bertkit.data.formats.writer import write_beside
from bertkit.data.tagging import Sentence, TaggedText, split_words
from bertkit.metrics.ner import Entity, find_entities

PREDICTED_COLUMN = "predicted"  # the column of predictions in the rows of a table
BLANK = re.compile(r"[ \t\r\n]")  # separates columns and lines of CoNLL files


def number_rows(text: TaggedText) -> Sequence[int]:
    """Return the row of each sentence: its document, or without documents the sentence itself."""
    return text.number_documents().tolist() if text.documents > 1 else range(len(text.sentences))


def find_gold(sentence: Sentence) -> Collection[Entity]:
    """Return the entities of a sentence as its file has them."""
    return find_entities(sentence.tags) if sentence.entities is None else sentence.entities.keys()


def write_rows(rows: Columns, predicted: Sequence[Sequence[str]]) -> str:
    """Return JSON lines with the rows of a table and `predicted`: tags, or the spans of a text."""
    given, marked = find_columns(rows.table.column_names)
    decoded = rows.lists | ({marked} if marked in SPAN_COLUMNS else set())
    found: Sequence[Any] = list(map(list, predicted))
    if given == TEXT_COLUMN:
        pairs = zip(rows.find(given).to_pylist(), predicted, strict=True)
        found = [list_spans(split_words(text), find_entities(tags)) for text, tags in pairs]
    return write_beside(rows, [{PREDICTED_COLUMN: one} for one in found], ".jsonl", decoded)


def write_conll(text: TaggedText, predicted: Sequence[Sequence[str]]) -> str:
    """Return the lines of a text with predicted tags and -DOCSTART- lines."""
    parts, document = [], 0
    for sentence, tags in zip(text.sentences, predicted, strict=True):
        if sentence.document > document:
            parts.append(f"{DOCSTART} O O\n")
            document = sentence.document
        rows = zip(sentence.words, sentence.official, tags, strict=True)
        parts.append("".join(f"{BLANK.sub('_', word) or '_'} {tag} {guess}\n" for word, tag, guess in rows))
    return "\n".join(parts)
