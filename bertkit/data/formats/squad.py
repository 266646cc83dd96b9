"""SQuAD (Rajpurkar et al. 2016, 2018; paper sections 4.2 and 4.3): its official files or the Hub's copy -> questions.

Both sources give the same values. The prediction files of the official scripts are read too. Left out: windows and
answers in tokens (`bertkit.data.spans`), and whether an answer is where its file says.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from bertkit.data.formats.hub import ROWS_A_BATCH, load_splits
from bertkit.data.formats.tables import AGAIN, FILE_REMEDY, LONGEST_QUOTED, Parsed, explain_form, read_json
from bertkit.data.spans import Question
from bertkit.errors import UsageError

if TYPE_CHECKING:
    import datasets

HUB_SQUAD = {"rajpurkar/squad": "plain_text", "rajpurkar/squad_v2": "squad_v2"}  # name -> its only configuration
SQUAD_REMEDY = 'correct it or give a file in SQuAD\'s format, {"data": [{"paragraphs": …}]}'

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


class SquadParagraph(Struct):
    """A paragraph in an official file."""

    context: str
    qas: list[SquadQuestion]


class SquadArticle(Struct):
    """An article in an official file."""

    paragraphs: list[SquadParagraph]


class SquadFile(Struct):
    """An official file."""

    data: list[SquadArticle]


class HubAnswers(Struct):
    """The answers in a row on the Hub."""

    text: list[str]
    answer_start: list[int]


class HubRow(Struct):
    """A row on the Hub."""

    id: Id
    question: str
    context: str
    answers: HubAnswers


class Candidate(Struct):
    """One of the best answers in an official file of predictions."""

    text: str
    probability: Annotated[float, Meta(ge=0)]


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_squad(path: str | Path, version: int | None = None) -> list[Question]:
    """Read the questions of an official SQuAD file in order; those about one paragraph share its text.

    A missing `answer_start` becomes -1; one that does not fit its text, an empty context and an empty question are
    accepted.

    Args:
        version: 1 requires an answer to every question; 2 requires a correct `is_impossible`. None accepts both forms
            and goes by the answers alone, as the official scripts do. `answers` may be missing where `is_impossible`
            is true.

    Raises:
        UsageError: As `read_json`; or the file is of the other version, has a duplicate id or no question.
    """
    found = list(_walk_questions(path, read_json(path, SquadFile, SQUAD_REMEDY).data))
    entries = (
        (place, Question(asked.id, asked.question, context, *_list_answers(asked, place, version)))
        for place, context, asked in found
    )
    questions = _gather(str(path), entries)
    if version == 2 and all(asked.is_impossible is None for _, _, asked in found):
        raise UsageError(f"{path} looks like a SQuAD 1.1 file: no question has is_impossible; use --version 1")
    return questions


def _walk_questions(path: str | Path, articles: Sequence[SquadArticle]) -> Iterator[tuple[str, str, SquadQuestion]]:
    """Yield place, context and record of every question."""
    for i, article in enumerate(articles):
        for j, paragraph in enumerate(article.paragraphs):
            for k, asked in enumerate(paragraph.qas):
                yield f"{path}, data[{i}].paragraphs[{j}].qas[{k}]", paragraph.context, asked


def _gather(source: str, entries: Iterable[tuple[str, Question]]) -> list[Question]:
    """Collect the questions and check their ids; messages name a question by its place."""
    questions: list[Question] = []
    places: dict[str, str] = {}
    for place, question in entries:
        if (first := places.setdefault(question.id, place)) != place:
            first = first.removeprefix(f"{source}, ")
            raise UsageError(f"{place} has the same id {question.id[:LONGEST_QUOTED]!r} as {first}; {AGAIN}")
        questions.append(question)
    if not questions:
        raise UsageError(f"{source} has no questions; {AGAIN}")
    return questions


def _list_answers(asked: SquadQuestion, place: str, version: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return texts and starts of the answers to a question."""
    answers = asked.answers or []
    if asked.answers is None and not asked.is_impossible:
        raise UsageError(f"{place} has no list of answers; {AGAIN}")
    if version == 1 and (asked.is_impossible or not answers):
        trouble = "is impossible" if asked.is_impossible else "has no answer"
        raise UsageError(f"{place} {trouble}, so this looks like a SQuAD 2.0 file; use --version 2")
    if version == 2 and asked.is_impossible is not None and asked.is_impossible == bool(answers):
        says, has = ("true", "answers") if answers else ("false", "no answer")
        raise UsageError(f"{place} has {has}, but its is_impossible is {says}; {AGAIN}")
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
    found = load_splits(name, HUB_SQUAD[name], splits)
    return {split: _gather(source, _walk_rows(source, rows)) for split, source, rows in found}


def _walk_rows(source: str, rows: "datasets.Dataset") -> Iterator[tuple[str, Question]]:
    """Yield place and question of every row."""
    contexts: dict[str, str] = {}
    batches = rows.with_format("arrow").iter(ROWS_A_BATCH)
    for number, cells in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
        place = f"{source}[{number}]"
        with explain_form(place, FILE_REMEDY):
            row = msgspec.convert(cells, HubRow)
        texts, starts = tuple(row.answers.text), tuple(row.answers.answer_start)
        if len(texts) != len(starts):
            raise UsageError(f"{place}.answers has {len(texts)} texts but {len(starts)} starts; {FILE_REMEDY}")
        yield place, Question(row.id, row.question, contexts.setdefault(row.context, row.context), texts, starts)
