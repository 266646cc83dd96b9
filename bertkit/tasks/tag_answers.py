"""The tags that a model predicts, as entities of an input, in the prediction table, and in files.

Left out: how tags come from a model (`bertkit.tasks.ner`), and what counts as an entity (`bertkit.metrics.ner`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from bertkit.data.formats.conll import DOCSTART
from bertkit.data.formats.entities import TEXT_COLUMN, list_spans
from bertkit.data.formats.writer import write_beside
from bertkit.data.tagging import Sentence, TaggedText, split_words
from bertkit.data.tags import WORDS, mark_words, name_scheme, write_cell
from bertkit.metrics.ner import Entity, count_entities, count_redacted, find_entities
from bertkit.metrics.table import LABEL, NAMES, PREDICTION, SPELLED, make_rows, read_facts
from bertkit.tasks.answers import Answers, Result
from bertkit.tasks.redaction import redact

PREDICTED_COLUMN = "predicted"  # the column of predictions in the rows of a table


@dataclass(frozen=True, eq=False)
class TagAnswers(Answers):
    """The tags of each sentence, and the entities in it if they are of a known scheme, else its words."""

    key = "tags"
    has_pipeline = True
    entity_columns = {"start": int, "end": int, "type": str, "text": str, "score": float}
    text: TaggedText
    tags: Sequence[Sequence[str]]
    likely: Sequence[Sequence[float]] | None  # the probability of each word's label; None if only tags are known
    names: Sequence[str]  # the labels
    # The probability of each word of being in a name, negative if it has no token; None: redaction does not matter
    shares: Sequence[Sequence[float]] | None = None
    threshold: float | None = None  # the probability from which words are redacted; None: the names of the tags are
    form: str | None = None  # how names are redacted in results, one of REDACTIONS; None: they are not

    @cached_property
    def rows(self) -> pa.Table:
        rows = tabulate_tags(self.text, self.tags)
        if self.threshold is None or self.shares is None or not self.text.is_labelled:
            return rows
        columns = dict(zip(rows.column_names, rows.columns, strict=True))
        columns |= count_redacted(self.shares, list_tagged(self.text), self.threshold)
        asked = {"recall": self.text.asked_recall} if self.text.asked_recall else {}
        return make_rows(columns, **read_facts(rows), decided={"redaction_threshold": self.threshold}, asked=asked)

    def list_results(self) -> list[Result]:
        scheme, results = name_scheme(self.names), []
        for number, (sentence, tags) in enumerate(zip(self.text.sentences, self.tags, strict=True)):
            entities = list_entities(sentence, mark_words(tags, scheme), self.likely[number])
            result: Result = {scheme: entities, "tags": tags}
            if sentence.content is not None:
                result["places"] = list(map(list, sentence.spans))
            if self.form is not None:
                content = list(sentence.words) if sentence.content is None else sentence.content
                result |= redact(content, entities, self.form)
                if unread := sum(share < 0 for share in self.shares[number]):
                    result["unread"] = unread
            results.append(result)
        return results

    @staticmethod
    def list_marked(result: Result) -> Sequence[Mapping[str, Any]]:
        """Return the entities of a text, or its words where each has a class of its own."""
        return result.get("entities", result.get("words", ()))

    @staticmethod
    def describe(result: Result) -> str:
        if "redacted" in result:
            return result["redacted"] if isinstance(result["redacted"], str) else " ".join(result["redacted"])
        marked = [f"{entity['text']}: {entity['type']}" for entity in TagAnswers.list_marked(result)]
        return ", ".join(marked) or "(nothing)"

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        """Return the redacted text; without one each entity is a row (`entity_columns`)."""
        return {"redacted": result["redacted"]} if "redacted" in result else {}

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        """Return entities as with an `aggregation_strategy`, and words with a class one each, in the text's words."""
        names = {"entity_group": "type", "score": "score", "word": "text", "start": "start", "end": "end"}
        return [{name: entity[key] for name, key in names.items()} for entity in TagAnswers.list_marked(result)]


def list_entities(sentence: Sentence, tags: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the entities of an input, each with its text, type, start and end, and the mean score of its words."""
    entities = []
    for first, behind, kind in find_entities(tags):
        start, end = sentence.spans[first][0], sentence.spans[behind - 1][1]
        words = sentence.words[first:behind]
        text = " ".join(words) if sentence.content is None else sentence.content[start:end]
        score = sum(scores[first:behind]) / (behind - first)
        entities.append({"text": text, "type": kind, "start": start, "end": end, "score": score})
    return entities


def tabulate_tags(text: TaggedText, predicted: Sequence[Sequence[str]]) -> pa.Table:
    """Return the right and the predicted tags in IOB2, and the counts of entities of each type.

    An entity of a type that training does not have counts as well, and a span that is not whole words as missed.
    """
    columns: dict[str, Any] = {PREDICTION: pa.array(predicted, NAMES)}
    if text.columns[0] == TEXT_COLUMN:
        columns |= format_spans(text, predicted)
    if not text.is_labelled:
        return make_rows(columns)
    counts = count_entities(list_gold(text), [mark_words(tags, text.scheme) for tags in predicted])
    types = [name.removeprefix("wanted_") for name in counts if name.startswith("wanted_")]
    labels = pa.array([sentence.tags for sentence in text.sentences], NAMES)
    scheme = WORDS if text.scheme == WORDS else None
    return make_rows({LABEL: labels} | columns | counts, names=types, scheme=scheme)


def list_gold(text: TaggedText) -> list[Collection[Entity]]:
    """Return the entities of each sentence as its file has them, or its words with their classes."""
    marked = ((mark_words(sentence.tags, text.scheme), sentence.entities) for sentence in text.sentences)
    return [find_entities(tags) if entities is None else entities.keys() for tags, entities in marked]


def list_tagged(text: TaggedText) -> list[Collection[Entity]]:
    """Return the right entities of each sentence in whole words, as its tags have them."""
    return [find_entities(mark_words(sentence.tags, text.scheme)) for sentence in text.sentences]


def locate_spans(text: TaggedText, predicted: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each text of a table with the spans of its predicted tags."""
    for content, tags in zip(text.rows.find(TEXT_COLUMN).to_pylist(), predicted, strict=True):
        yield content, list_spans(split_words(content, text.text_words), find_entities(tags))


def format_spans(text: TaggedText, predicted: Sequence[Sequence[str]]) -> dict[str, pa.Array]:
    """Return columns with the predicted and the right spans of a table's texts, as the texts spell them."""
    tags = {PREDICTION: predicted} | ({LABEL: [one.tags for one in text.sentences]} if text.is_labelled else {})
    columns = {}
    for name, rows in tags.items():
        columns[name] = []
        for own, spans in locate_spans(text, rows):
            columns[name].append([f"{own[x['start'] : x['end']]}: {x['label']}" for x in spans])
    for number, sentence in enumerate(text.sentences):
        if sentence.entities is not None:  # a span does not fit the words of the tags
            columns[LABEL][number] = [f"{piece}: {kind}" for (*_, kind), piece in sentence.entities.items()]
    return {f"{name}{SPELLED}": pa.array(cells, NAMES) for name, cells in columns.items()}


def write_rows(text: TaggedText, predicted: Sequence[Sequence[str]]) -> str:
    """Return JSON lines with the rows of a table and `predicted`: tags, or the spans of a text."""
    rows, (given, marked) = text.rows, text.columns
    decoded = rows.lists | ({marked} if marked and given == TEXT_COLUMN else set())
    found: Sequence[Any] = list(map(list, predicted))
    if given == TEXT_COLUMN:
        found = [spans for _, spans in locate_spans(text, predicted)]
    return write_beside(rows, [{PREDICTED_COLUMN: one} for one in found], ".jsonl", decoded)


def write_conll(text: TaggedText, predicted: Sequence[Sequence[str]]) -> str:
    """Return the lines of a text with predicted tags and -DOCSTART- lines."""
    parts, document = [], 0
    for sentence, tags in zip(text.sentences, predicted, strict=True):
        if sentence.document > document:
            parts.append(f"{DOCSTART} O O\n")
            document = sentence.document
        rows = zip(sentence.words, sentence.official, tags, strict=True)
        parts.append("".join(" ".join(map(write_cell, row)) + "\n" for row in rows))
    return "\n".join(parts)
