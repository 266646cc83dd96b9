"""SQuAD (Rajpurkar et al. 2016, 2018; paper sections 4.2 and 4.3): its official files or
the copy on the Hub -> questions.

Both sources give the same values. The files of predictions that the official scripts take are read too. Left out:
windows and answers in tokens (`bertkit.data.spans`), and whether an answer stands where its file says.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.data.formats.hub import ROWS_A_BATCH, load_splits
from bertkit.data.formats.tables import (
    AGAIN,
    FILE_REMEDY,
    LONGEST_QUOTED,
    check_kind,
    find_column,
    read_json,
    read_objects,
    take,
    walk_objects,
)
from bertkit.data.spans import Question
from bertkit.errors import UsageError

if TYPE_CHECKING:
    import datasets

HUB_SQUAD = {"rajpurkar/squad": "plain_text", "rajpurkar/squad_v2": "squad_v2"}  # its one configuration


def read_squad(path: str | Path, version: int | None = None) -> list[Question]:
    """The questions of an official SQuAD file in its order; those about one paragraph share its text.

    version: 1 wants an answer to every question; 2 wants the file to say `is_impossible`, and truly. None takes both
        forms and goes by the answers alone, as the official scripts do. `answers` may be missing where `is_impossible`
        is true.

    An `answer_start` that is missing becomes -1; one that does not fit its text, an empty context and an empty question
    are taken as they are.

    Raises:
        UsageError: as `read_json`; the file has another form, the other version's, an id twice, or no question.
    """
    remedy = 'give a file in SQuAD\'s form, {"data": [{"paragraphs": …}]}'
    entries = _walk_paragraphs(read_objects(path, "data", remedy))
    return _gather(str(path), entries, version)


def _walk_paragraphs(articles: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, context and the object of every question."""
    for article_place, article in articles:
        paragraphs = take(article, "paragraphs", list, article_place)
        for place, paragraph in walk_objects(paragraphs, f"{article_place}.paragraphs"):
            context = take(paragraph, "context", str, place)
            for qa_place, qa in walk_objects(take(paragraph, "qas", list, place), f"{place}.qas"):
                yield qa_place, context, qa


def _gather(source: str, entries: Iterable[tuple[str, str, dict[str, Any]]], version: int | None) -> list[Question]:
    questions: list[Question] = []
    places: dict[str, str] = {}
    says_impossible = False
    for place, context, qa in entries:
        name, question = take(qa, "id", str, place), take(qa, "question", str, place)
        if not name:
            raise UsageError(f"{place}.id is empty; {AGAIN}")
        if name in places:
            first = places[name].removeprefix(f"{source}, ")
            raise UsageError(f"{place} has the same id {name[:LONGEST_QUOTED]!r} as {first}; {AGAIN}")
        places[name] = place
        questions.append(Question(name, question, context, *_list_answers(qa, place, version)))
        says_impossible = says_impossible or "is_impossible" in qa
    if not questions:
        raise UsageError(f"{source} has no questions; {AGAIN}")
    if version == 2 and not says_impossible:
        raise UsageError(f"{source} looks like a SQuAD 1.1 file: no question says is_impossible; use --version 1")
    return questions


def _list_answers(qa: dict[str, Any], place: str, version: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and starts of the answers to a question."""
    impossible = None
    if "is_impossible" in qa and (version or "answers" not in qa):
        impossible = take(qa, "is_impossible", bool, place)
    answers: list[tuple[str, int]] = []
    if "answers" in qa or not impossible:
        for where, answer in walk_objects(take(qa, "answers", list, place), f"{place}.answers"):
            start = take(answer, "answer_start", int, where) if "answer_start" in answer else -1
            answers.append((take(answer, "text", str, where), start))
    if version == 1 and (impossible or not answers):
        trouble = "is impossible" if impossible else "has no answer"
        raise UsageError(f"{place} {trouble}, so this looks like a SQuAD 2.0 file; use --version 2")
    if version == 2 and impossible is not None and impossible == bool(answers):
        says, has = ("true", "answers") if impossible else ("false", "no answer")
        raise UsageError(f"{place} has {has} and its is_impossible is {says}; {AGAIN}")
    return tuple(text for text, _ in answers), tuple(start for _, start in answers)


def read_answers(path: str | Path) -> dict[str, str]:
    """Question's id -> answer, from an official file of predictions in its order; "" is no answer.

    Raises:
        UsageError: as `read_json`, or the file has another form.
    """
    return {name: check_kind(text, str, place) for place, name, text in _walk_ids(path)}


def read_odds(path: str | Path) -> dict[str, float]:
    """Question's id -> how much speaks against any answer, from an official file of odds in its order.

    Raises:
        UsageError: as `read_json`, or the file has another form or a number that is not finite.
    """
    return {name: check_kind(odds, float, place) for place, name, odds in _walk_ids(path)}


def read_nbest(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """Question's id -> its candidates as the file has them, each at least with `text` and `probability` >= 0.

    Raises:
        UsageError: as `read_json`, or the file has another form.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for place, name, entries in _walk_ids(path):
        found[name] = []
        for where, entry in walk_objects(entries, place):
            take(entry, "text", str, where)
            if take(entry, "probability", float, where) < 0:
                raise UsageError(f"{where}.probability is below 0; {AGAIN}")
            found[name].append(entry)
    return found


def _walk_ids(path: str | Path) -> Iterator[tuple[str, str, Any]]:
    """Place, id and value of every entry of a file of predictions."""
    for name, value in check_kind(read_json(path), dict, str(path)).items():
        place = f"{path}, {name[:LONGEST_QUOTED]!r}"
        yield place, check_kind(name, str, place), value


def read_squad_copy(name: str, splits: Mapping[str, str]) -> dict[str, list[Question]]:
    """Split -> its questions, as `read_squad` gives them, for SQuAD's copies on the Hub; equal contexts are one text.

    name: `rajpurkar/squad` (1.1) or `rajpurkar/squad_v2` (2.0). `splits` maps the wanted names to the Hub's.

    Without the Hub, the copy in the cache of `datasets` does.

    Raises:
        UsageError: the Hub cannot serve the data set and no copy is at hand, a split or a column is missing, or an id
            is there twice.
    """
    found = load_splits(name, HUB_SQUAD[name], splits)
    return {split: _gather(source, _walk_rows(source, rows), None) for split, source, rows in found}


def _walk_rows(source: str, rows: "datasets.Dataset") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, context and question of every row, in the official file's form."""
    columns = ("id", "question", "context", "answers")
    for column in columns:
        find_column(source, rows.column_names, column, FILE_REMEDY)
    contexts: dict[str, str] = {}
    batches = rows.select_columns(list(columns)).iter(ROWS_A_BATCH)
    values = chain.from_iterable(zip(*(batch[column] for column in columns), strict=True) for batch in batches)
    for number, (name, question, context, answers) in enumerate(values):
        place = f"{source}[{number}]"
        check_kind(answers, dict, f"{place}.answers")
        texts, starts = (take(answers, key, list, f"{place}.answers") for key in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise UsageError(f"{place}.answers has {len(texts)} texts and {len(starts)} starts; {FILE_REMEDY}")
        pairs = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        context = check_kind(context, str, f"{place}.context")
        yield place, contexts.setdefault(context, context), {"id": name, "question": question, "answers": pairs}
