"""SQuAD (Rajpurkar et al. 2016, 2018; paper sections 4.2 and 4.3): its official files or the Hub's copy -> questions.

A person's own questions are read in either form, from tables in any format: an official file becomes such a table. The
prediction files of the official scripts are read too. Left out: windows and answers in tokens (`bertkit.data.spans`),
and whether an answer is where its file says.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta, Raw, Struct

from bertkit.data.formats.entities import TEXT_COLUMN, read_spans, select_columns
from bertkit.data.formats.hub import load_splits
from bertkit.data.formats.line import AGAIN, LONGEST_QUOTED, Parsed, read_json
from bertkit.data.formats.rows import (
    TEXT,
    Columns,
    convert_dataset,
    locate_column,
    read_columns,
    read_splits,
    write_values,
)
from bertkit.data.spans import Question
from bertkit.errors import UsageError, as_usage_error

HUB_SQUAD = {"rajpurkar/squad": "plain_text", "rajpurkar/squad_v2": "squad_v2"}  # name -> its only configuration
SQUAD_REMEDY = 'correct it or give a file in SQuAD\'s format, {"data": [{"paragraphs": …}]}'
ANSWERS_REMEDY = 'give answers such as {"text": ["Ada"], "answer_start": [24]}'


class SquadQuestion(Struct):
    """A question in an official file; its answers are read as those of a table are."""

    id: Annotated[str, Meta(min_length=1)]
    question: str
    answers: Raw = Raw(b"null")
    is_impossible: bool | None = None


class SquadParagraph(Struct):
    """A paragraph in an official file."""

    context: str
    qas: list[SquadQuestion]


class SquadArticle(Struct):
    """An article in an official file, whose title may keep its questions in the same split."""

    paragraphs: list[SquadParagraph]
    title: str = ""


class SquadFile(Struct):
    """An official file."""

    data: list[SquadArticle]


class SquadAnswer(Struct):
    """An answer; without a start it is where its text is, if that is only once."""

    text: str
    answer_start: int | None = None


class AnswerLists(Struct):
    """The answers to a question in the Hub's form."""

    text: list[str]
    answer_start: list[int | None] | None = None

    def __post_init__(self) -> None:
        self.answer_start = self.answer_start or [None] * len(self.text)
        if len(self.text) != len(self.answer_start):
            raise ValueError("text and answer_start have different lengths")


class Candidate(Struct):
    """One of the best answers in an official file of predictions."""

    text: str
    probability: Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class OwnQuestions:
    """The questions of a split."""

    source: str  # the files, or the data set and its split, for messages
    questions: list[Question]
    is_labelled: bool  # whether there are answers


# --- official files and their copy on the Hub


def read_squad(path: str | Path, version: int | None = None) -> list[Question]:
    """Read the questions of an official SQuAD file in order; those about one paragraph share its text.

    A missing `answer_start` is where its text is, or -1 unless that is only once; one that does not fit its
    text, an empty context and an empty question are accepted.

    Args:
        version: 1 requires an answer to every question; 2 requires `is_impossible` in some. None accepts both forms
            and goes by the answers alone, as the official scripts do.
    """
    rows = _read_official(Path(path))
    if version == 2 and not any(rows.find("is_impossible").unique().to_pylist()):
        raise UsageError(f"{path} looks like a SQuAD 1.1 file: no question has is_impossible; use --version 1")
    return _gather("train", [rows], version).questions


def _read_official(path: Path) -> Columns:
    """Read a file in the official form as a table."""
    file, rows = read_json(path, SquadFile, SQUAD_REMEDY), []
    for paragraph, title in [(one, article.title) for article in file.data for one in article.paragraphs]:
        for asked in paragraph.qas:
            with as_usage_error(f"{path}, question {len(rows) + 1}", AGAIN):  # answers are not decoded yet
                answers = bytes(asked.answers).decode().removeprefix("null")
            row = {"id": asked.id, "question": asked.question, "context": paragraph.context, "answers": answers}
            rows.append(row | {"is_impossible": asked.is_impossible, "title": title})
    if not rows:
        raise UsageError(f"{path} has no questions; {AGAIN}")
    return write_values(str(path), enumerate(rows, 1), "question")


def read_squad_copy(name: str, splits: Mapping[str, str]) -> dict[str, list[Question]]:
    """Read the splits of a SQuAD copy on the Hub, in the form of `read_squad`; equal contexts share one text.

    If the Hub is unreachable, the copy in the cache of `datasets` is used.

    Args:
        name: `rajpurkar/squad` (1.1) or `rajpurkar/squad_v2` (2.0).
        splits: The wanted names -> the Hub's.
    """
    return {
        split: _gather(split, [convert_dataset(source, rows)], None).questions
        for split, source, rows in load_splits(name, HUB_SQUAD[name], splits)
    }


def read_predictions(path: str | Path, form: type[Parsed]) -> dict[str, Parsed]:
    """Read an official prediction file as question id -> value, in the order of the file.

    Args:
        form: `str` for answers, where "" stands for no answer; `float` for the odds of no answer; `list[Candidate]` for
            the best answers.
    """
    return read_json(path, dict[str, form])


# --- a person's own questions


def read_own_squad(
    source: str,
    version: int,
    group: str = "",
    needs_train: bool = True,
    read: Callable[[Path], Columns] = read_columns,
) -> dict[str, OwnQuestions]:
    """Read the splits of a person's own questions: train, and dev and test where they are given.

    Each file has either the official form or that of a table with the columns `question`, `context`, `answers` and, if
    wanted, `id` and `is_impossible`, or is an export with a `question` whose answers are spans of a text. Equal
    contexts share one text. Only test may be without answers.

    Args:
        source: As for `read_splits`, or several files joined by commas, all of train.
        version: 1 requires an answer to every question; with 2 a question without answers has none in its context.
        group: The column (in the official form: `title`) that becomes the questions' `group`.
        needs_train: As for `read_splits`.
        read: The reader of tables.
    """
    if "," in source and not os.path.exists(source):
        found = {"train": [_read_own(read, Path(os.path.expanduser(part))) for part in source.split(",")]}
    else:
        splits = read_splits(source, partial(_read_own, read), needs_train)
        found = {split: [part] for split, part in splits.items()}
    return {split: _gather(split, parts, version, group) for split, parts in found.items()}


def _read_own(read: Callable[[Path], Columns], path: Path) -> Columns:
    """Read a table, or a file in the official form."""
    is_official = False
    if path.name.removesuffix(".gz").endswith(".json"):
        with suppress(UsageError, msgspec.MsgspecError, LookupError):  # the reader of tables explains it
            data = read_json(path, dict[str, Raw])["data"]
            is_official = "paragraphs" in msgspec.json.decode(data, type=list[dict[str, Raw]])[0]
    return _read_official(path) if is_official else _take_spans(read(path))


def _take_spans(rows: Columns) -> Columns:
    """Return a table whose spans of a text answer its question with `context` and `answers`; any other as it is."""
    names = rows.table.column_names
    given, marked = select_columns(names)
    if given != TEXT_COLUMN or not marked or {"question", "context", "answers"} & {*names} != {"question"}:
        return rows
    answers = []
    for row, (text, cell) in enumerate(zip(*(rows.table.column(x).to_pylist() for x in (given, marked)), strict=True)):
        found = [
            {"text": text[start:end], "answer_start": start}
            for start, end, _ in read_spans(cell, text, rows.locate(row), marked)
        ]
        answers.append(msgspec.json.encode(found).decode())
    table = rows.table.set_column(names.index(marked), marked, pa.array(answers, TEXT))
    renamed = {given: "context", marked: "answers"}
    return replace(rows, table=table.rename_columns([renamed.get(name, name) for name in names]))


def _gather(split: str, parts: Sequence[Columns], version: int | None, group: str = "") -> OwnQuestions:
    """Return the questions of the tables of a split, and check their ids."""
    source = ",".join(part.source for part in parts)
    is_labelled = split != "test" or any(
        row.get("answers") or row.get("is_impossible") == "true" for part in parts for row in part.walk()
    )
    needed = ("question", "context", *(["answers"] if is_labelled else []))
    questions: list[Question] = []
    contexts: dict[str, str] = {}
    origins: dict[str, str] = {}
    names: Counter[str] = Counter()
    for part in parts:
        for name in needed:
            locate_column(part.source, part.table.column_names, name, "name the columns question, context and answers")
        for name in ("question", "context", *([group] if group else [])):
            part.find(name)  # refuses objects, which answers may be
        for row, cells in enumerate(part.walk()):
            origin, context = part.locate(row), contexts.setdefault(cells["context"], cells["context"])
            answers = _read_answers(cells, context, origin, version) if is_labelled else []
            name = cells.get("id") or _name_question(cells["question"], context, names)
            if (first := origins.setdefault(name, origin)) != origin:
                first = first.removeprefix(f"{source}, ")
                raise UsageError(f"{origin} has the same id {name[:LONGEST_QUOTED]!r} as {first}; {AGAIN}")
            texts, starts = zip(*answers, strict=True) if answers else ((), ())
            member = cells.get(group, "").strip()
            questions.append(Question(name, cells["question"], context, texts, starts, member, len(questions) + 1))
    return OwnQuestions(source, questions, is_labelled)


def _read_answers(cells: Mapping[str, str], context: str, origin: str, version: int | None) -> list[tuple[str, int]]:
    """Return text and start of each answer in a row; an empty cell, list or text is none."""
    with as_usage_error(f"{origin}, answers", ANSWERS_REMEDY):
        found = msgspec.json.decode(cells["answers"].strip() or "[]", type=AnswerLists | list[SquadAnswer])
    if isinstance(found, AnswerLists):
        found = map(SquadAnswer, found.text, found.answer_start)
    answers = [(one.text, one.answer_start) for one in found if one.text.strip()]  # "" is how some write no answer
    answers = [(text, locate_only(context, text) if start in (None, -1) else start) for text, start in answers]
    is_impossible = cells.get("is_impossible", "").lower() in ("true", "1")
    if version == 1 and (is_impossible or not answers):
        trouble = "is impossible" if is_impossible else "has no answer"
        raise UsageError(f"{origin} {trouble}, so this looks like a SQuAD 2.0 file; use --version 2")
    return answers


def locate_only(context: str, text: str) -> int:
    """Return where a text begins in the context; -1 if it is empty or does not occur exactly once."""
    first = context.find(text) if text else -1
    return first if context.find(text, first + 1) == -1 else -1


def _name_question(question: str, context: str, names: Counter[str]) -> str:
    """Return an id for a question without one, which does not depend on other questions unless they are equal."""
    name = hashlib.blake2b(f"{question}\0{context}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    names[name] += 1
    return name if names[name] == 1 else f"{name}-{names[name]}"
