"""SQuAD (Rajpurkar et al. 2016, 2018; paper sections 4.2 and 4.3): its official files or the Hub's copy -> questions.

A person's own questions are read in either form, from tables in any format. All sources give the same values. The
prediction files of the official scripts are read too. Left out: windows and answers in tokens (`bertkit.data.spans`),
and whether an answer is where its file says.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta, Struct

from bertkit.data.formats.entities import TEXT_COLUMN, check_span, find_columns, read_spans
from bertkit.data.formats.hub import load_splits
from bertkit.data.formats.line import AGAIN, LONGEST_QUOTED, Parsed, explain_form, read_json
from bertkit.data.formats.rows import CHUNK_ROWS, Columns, convert_dataset, find_column, read_columns, read_splits
from bertkit.data.spans import Question
from bertkit.errors import UsageError

HUB_SQUAD = {"rajpurkar/squad": "plain_text", "rajpurkar/squad_v2": "squad_v2"}  # name -> its only configuration
SQUAD_REMEDY = 'correct it or give a file in SQuAD\'s format, {"data": [{"paragraphs": …}]}'
COLUMNS_REMEDY = "name the columns question, context and answers"
ANSWERS_REMEDY = 'give answers such as {"text": ["Ada"], "answer_start": [24]}'

Id = Annotated[str, Meta(min_length=1)]


# --- Records of the fields in use, named as in the files and on the Hub -----------------------------------------------


class SquadAnswer(Struct):
    """An answer in an official file."""

    text: str
    answer_start: int = -1


class SquadQuestion(Struct):
    """A question in an official file."""

    id: Id
    question: str
    answers: list[SquadAnswer] | None = None
    is_impossible: bool | None = None


Entry = tuple[str, str, SquadQuestion, str]  # place, context, record and group of a question


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


class FormMark(Struct):
    """The part of a JSON file that tells the official form from a table."""

    data: list[msgspec.Raw]


class TableAnswer(Struct):
    """An answer in a person's own table; without a start it is where its text is, if that is only once."""

    text: str
    answer_start: int | None = None


class TableAnswers(Struct):
    """The answers in a row of a person's own table, in the Hub's form."""

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


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_squad(path: str | Path, version: int | None = None) -> list[Question]:
    """Read the questions of an official SQuAD file in order; those about one paragraph share its text.

    A missing `answer_start` is where its text is, or -1 unless that is only once; one that does not fit its
    text, an empty context and an empty question are accepted.

    Args:
        version: 1 requires an answer to every question; 2 requires `is_impossible` in some. None accepts both forms
            and goes by the answers alone, as the official scripts do. `answers` may be missing where `is_impossible`
            is true.

    Raises:
        UsageError: As `read_json`; or the file is of the other version, has a duplicate id or no question.
    """
    file = read_json(path, SquadFile, SQUAD_REMEDY)
    questions = _gather_own("train", [(Path(path), file)], version).questions
    if version == 2 and all(asked.is_impossible is None for _, _, asked, _ in _walk_questions(path, file.data)):
        raise UsageError(f"{path} looks like a SQuAD 1.1 file: no question has is_impossible; use --version 1")
    return questions


def _walk_questions(path: str | Path, articles: Sequence[SquadArticle]) -> Iterator[Entry]:
    """Yield place, context and record of every question, and the title of its article."""
    for i, article in enumerate(articles):
        for j, paragraph in enumerate(article.paragraphs):
            for k, asked in enumerate(paragraph.qas):
                yield f"{path}, data[{i}].paragraphs[{j}].qas[{k}]", paragraph.context, asked, article.title


def _list_answers(asked: SquadQuestion, place: str, version: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return texts and starts of the answers to a question."""
    answers = [answer for answer in asked.answers or [] if answer.text.strip()]  # "" is how some write no answer
    if asked.answers is None and not asked.is_impossible:
        raise UsageError(f"{place} has no list of answers; {AGAIN}")
    if version == 1 and (asked.is_impossible or not answers):
        trouble = "is impossible" if asked.is_impossible else "has no answer"
        raise UsageError(f"{place} {trouble}, so this looks like a SQuAD 2.0 file; use --version 2")
    return tuple(answer.text for answer in answers), tuple(answer.answer_start for answer in answers)


def read_predictions(path: str | Path, form: type[Parsed]) -> dict[str, Parsed]:
    """Read an official prediction file as question id -> value, in the order of the file.

    Args:
        form: `str` for answers, where "" stands for no answer; `float` for the odds of no answer; `list[Candidate]` for
            the best answers.

    Raises:
        UsageError: As `read_json`; also for a number that is NaN or infinite, or a negative probability.
    """
    found = {}
    for name, value in read_json(path, dict[str, msgspec.Raw]).items():
        with explain_form(f"{path}, {name[:LONGEST_QUOTED]!r}"):  # one by one, so that the message names the question
            found[name] = msgspec.json.decode(value, type=form)
    return found


def read_squad_copy(name: str, splits: Mapping[str, str]) -> dict[str, list[Question]]:
    """Read the splits of a SQuAD copy on the Hub, in the form of `read_squad`; equal contexts share one text.

    If the Hub is unreachable, the copy in the cache of `datasets` is used.

    Args:
        name: `rajpurkar/squad` (1.1) or `rajpurkar/squad_v2` (2.0).
        splits: The wanted names -> the Hub's.

    Raises:
        UsageError: The Hub cannot serve the data set and no copy is cached, a split or a column is missing, or an id
            occurs twice.
    """
    return {
        split: _gather_own(split, [convert_dataset(source, rows)], None).questions
        for split, source, rows in load_splits(name, HUB_SQUAD[name], splits)
    }


# --- A person's own questions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnQuestions:
    """The questions of a split.

    Attributes:
        source: The files, or the data set and its split, for messages.
        is_labelled: Whether there are answers.
    """

    source: str
    questions: list[Question]
    is_labelled: bool


def read_own_squad(
    place: str,
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
        place: As for `read_splits`, or several files joined by commas, all of train.
        version: 1 requires an answer to every question; with 2 a question without answers has none in its context.
        group: The column (in the official form: `title`) that becomes the questions' `group`.
        needs_train: As for `read_splits`.
        read: The reader of tables.

    Raises:
        UsageError: As `read_splits`; or a column is missing, a value has another form, or an id occurs twice.
    """
    if "," in place and not os.path.exists(place):
        found = {"train": [_read_own(read, Path(os.path.expanduser(part))) for part in place.split(",")]}
    else:
        splits = read_splits(place, partial(_read_own, read), needs_train)
        found = {split: [part] for split, part in splits.items()}
    return {split: _gather_own(split, parts, version, group) for split, parts in found.items()}


def _read_own(read: Callable[[Path], Columns], path: Path) -> Columns | tuple[Path, SquadFile]:
    """Read a table, or the articles of a file in the official form."""
    is_official = False
    if path.name.removesuffix(".gz").endswith(".json"):
        with suppress(UsageError, msgspec.MsgspecError):  # the reader of tables explains it
            first = next(iter(read_json(path, FormMark).data), b"{}")
            is_official = "paragraphs" in msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    return (path, read_json(path, SquadFile, SQUAD_REMEDY)) if is_official else _take_spans(read(path))


def _take_spans(rows: Columns) -> Columns:
    """Return a table whose spans of a text answer its question with `context` and `answers`; any other as it is."""
    names = rows.table.column_names
    given, marked = find_columns(names)
    if given != TEXT_COLUMN or not marked or {"question", "context", "answers"} & {*names} != {"question"}:
        return rows
    answers = []
    for row, (text, cell) in enumerate(zip(*(rows.table.column(x).to_pylist() for x in (given, marked)), strict=True)):
        spans = read_spans(cell, place := rows.locate(row), marked)
        for start, end, _ in spans:
            check_span(start, end, text, place)
        found = {"text": [text[start:end] for start, end, _ in spans], "answer_start": [start for start, *_ in spans]}
        answers.append(msgspec.json.encode(found).decode())
    table = rows.table.set_column(names.index(marked), marked, pa.array(answers, pa.large_string()))
    renamed = {given: "context", marked: "answers"}
    return replace(rows, table=table.rename_columns([renamed.get(name, name) for name in names]))


def _gather_own(
    split: str, parts: Sequence[Columns | tuple[Path, SquadFile]], version: int | None, group: str = ""
) -> OwnQuestions:
    """Return the questions of the files of a split, and check their ids."""
    source = ",".join(part.source if isinstance(part, Columns) else str(part[0]) for part in parts)
    is_labelled = split != "test" or any(map(_has_answers, parts))
    questions: list[Question] = []
    contexts: dict[str, str] = {}
    places: dict[str, str] = {}
    names: Counter[str] = Counter()
    for part in parts:
        walked = _walk_table(part, group, is_labelled) if isinstance(part, Columns) else _walk_own(*part, group)
        for place, context, asked, member in walked:
            answers, starts = _list_answers(asked, place, version) if is_labelled else ((), ())
            pairs = zip(answers, starts, strict=True)
            starts = tuple(find_only(context, answer) if start == -1 else start for answer, start in pairs)
            name = asked.id or _name_question(asked.question, context, names)
            if (first := places.setdefault(name, place)) != place:
                first = first.removeprefix(f"{source}, ")
                raise UsageError(f"{place} has the same id {name[:LONGEST_QUOTED]!r} as {first}; {AGAIN}")
            context = contexts.setdefault(context, context)
            questions.append(Question(name, asked.question, context, answers, starts, member, len(questions) + 1))
    if not questions:
        raise UsageError(f"{source} has no questions; {AGAIN}")
    return OwnQuestions(source, questions, is_labelled)


def _has_answers(part: Columns | tuple[Path, SquadFile]) -> bool:
    if isinstance(part, Columns):
        return "answers" in part.table.column_names and any(part.table.column("answers").unique().to_pylist())
    found = _walk_questions(part[0], part[1].data)
    return any(asked.answers is not None or asked.is_impossible is not None for _, _, asked, _ in found)


def _walk_own(path: Path, file: SquadFile, group: str) -> Iterator[Entry]:
    """Yield the questions of a file in the official form."""
    if group not in ("", "title"):
        raise UsageError(f"{path} has no column {group!r}; a file in SQuAD's format has the group title only")
    for place, context, asked, title in _walk_questions(path, file.data):
        yield place, context, asked, title.strip() if group else ""


def _walk_table(table: Columns, group: str, is_labelled: bool) -> Iterator[Entry]:
    """Yield the questions of a table."""
    names = table.table.column_names
    for name in ("question", "context", *(["answers"] if is_labelled else [])):
        find_column(table.source, names, name, COLUMNS_REMEDY)
    for name in ("question", "context", *([group] if group else [])):
        table.find(name)  # refuses objects, which answers may be
    wanted = {"id", "question", "context", "answers", "is_impossible", group}
    batches = table.table.select([name for name in names if name in wanted]).to_batches(CHUNK_ROWS)
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
        place = table.locate(number)
        asked = SquadQuestion(row.get("id", ""), row["question"])
        if is_labelled:
            asked.answers = _read_answers(row["answers"], place)
            asked.is_impossible = row.get("is_impossible", "").lower() in ("true", "1")
        yield place, row["context"], asked, row.get(group, "").strip()


def _read_answers(cell: str, place: str) -> list[SquadAnswer]:
    """Return the answers in a cell; an empty one has none."""
    if not cell.strip():
        return []
    with explain_form(f"{place}, answers", ANSWERS_REMEDY):
        found = msgspec.json.decode(cell, type=TableAnswers | list[TableAnswer])
    if isinstance(found, list):
        pairs = [(answer.text, answer.answer_start) for answer in found]
    else:
        pairs = list(zip(found.text, found.answer_start, strict=True))
    return [SquadAnswer(text, -1 if start is None else start) for text, start in pairs]


def find_only(context: str, text: str) -> int:
    """Return where a text begins in the context; -1 if it is empty or does not occur exactly once."""
    first = context.find(text) if text else -1
    return first if context.find(text, first + 1) == -1 else -1


def _name_question(question: str, context: str, names: Counter[str]) -> str:
    """Return an id for a question without one, which does not depend on other questions unless they are equal."""
    name = hashlib.blake2b(f"{question}\0{context}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    names[name] += 1
    return name if names[name] == 1 else f"{name}-{names[name]}"
