"""Read files of predictions for a comparison: tables of `predict` and `classify`, CoNLL files, answers to SQuAD.

Rows are matched by content: the columns that all tables have, the words of a sentence, the question. Left out: JSON
lines without the inputs, rankings and probabilities.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bertkit.data.formats.columns import Columns, read_columns
from bertkit.data.formats.conll import CONLL_SUFFIXES, read_conll
from bertkit.data.formats.squad import read_predictions, read_squad
from bertkit.data.labels import (
    REGRESSION,
    SEPARATOR,
    SEVERAL,
    SINGLE,
    LabelSpace,
    find_labels,
    guess_kind,
    number_cells,
)
from bertkit.errors import UsageError
from bertkit.metrics.ner import find_entities, measure_entities
from bertkit.metrics.rows import RowScore, measure_classes, measure_counts, measure_mean, measure_numbers
from bertkit.metrics.squad import score_answers
from bertkit.reports.tables import ScoreRow, find_row
from bertkit.tasks.classification import CLASSIFICATION, SCORES, spell
from bertkit.tasks.ner import NER
from bertkit.tasks.ner_files import name_entities, number_rows
from bertkit.tasks.squad import collect_answers, find_squad
from bertkit.tasks.task import RowAnswer, shorten_text
from bertkit.training.scored_rows import ScoredRows, gather_rows

PREDICTED = ("prediction", "label", "labels")  # columns that `predict` writes
APART = "_predicted"  # after the name where the input has this column
RESULTS = ("probability", "label_set", "error", "cut", "probabilities", "scores")  # the other columns
CLASS_PROBABILITY = "probability_"  # and then a class


def read_files(paths: Sequence[Path], label: str | None, data: Path | None) -> tuple[str, ScoreRow, list[ScoredRows]]:
    """Return the task, its score, and the scored rows of each file.

    Args:
        label: The column of the right labels in tables; for several labels perhaps one for each, with commas.
        data: The file that answers to SQuAD are about.

    Raises:
        UsageError: A file cannot be read, has no predictions or right answers, or has no use for `label`.
    """
    are_tagged = all(path.suffix in CONLL_SUFFIXES for path in paths)
    if label is not None and (data is not None or are_tagged):
        raise UsageError("--label names a column of tables (.csv, .jsonl, …); leave it out with other files")
    if data is not None:
        return read_answer_files(paths, data)
    if are_tagged:
        return NER.name, find_row(NER.table, NER.metric), [read_tag_file(path) for path in paths]
    tables = [read_columns(path) for path in paths]
    labels = (label or find_gold(tables[0])).split(",")
    predicted = [find_predicted(table, labels) for table in tables]
    space = find_space(tables, labels, predicted)
    common = set.intersection(*(set(table.table.column_names) for table in tables)) - {*predicted, *labels}
    common = common.difference(*(table.faults for table in tables))
    texts = [name for name in tables[0].table.column_names if name in common and not is_result(name)]
    if not texts:
        raise UsageError(f"{paths[0]} has no column of inputs that all files have; give files with the same inputs")
    rows = [read_table(*each, texts, space) for each in zip(tables, predicted, strict=True)]
    return CLASSIFICATION.name, find_row(CLASSIFICATION.table, next(iter(SCORES[space.kind]))), rows


# --- Tables -----------------------------------------------------------------------------------------------------------


def is_result(name: str) -> bool:
    """Return whether a column belongs to the results of `predict`, beside the predictions."""
    return name.startswith(CLASS_PROBABILITY) or name.removesuffix(APART) in RESULTS


def find_predicted(table: Columns, labels: Sequence[str]) -> str:
    """Return the column of the predictions, which is none of `labels`, those of the right labels.

    Raises:
        UsageError: There is none.
    """
    names = set(table.table.column_names).difference(labels)
    wanted = (*(f"{name}{APART}" for name in PREDICTED), *PREDICTED)
    if found := next((name for name in wanted if name in names), None):
        return found
    beside = "".join(f" beside {label!r}" for label in labels if label in PREDICTED)
    raise UsageError(
        f"{table.source} has no column {', '.join(PREDICTED)}{beside}; give a table that predict has written"
    )


def find_gold(table: Columns) -> str:
    """Return the column of the right labels: the predictions' name without its ending, or `label` beside `prediction`.

    Raises:
        UsageError: There is no such column.
    """
    predicted = find_predicted(table, ())
    if predicted.endswith(APART):
        return predicted.removesuffix(APART)
    if predicted == "prediction" and "label" in table.table.column_names:
        return "label"
    raise UsageError(f"{table.source} has no column of right labels beside {predicted!r}; name it with --label")


def find_space(tables: Sequence[Columns], labels: Sequence[str], predicted: Sequence[str]) -> LabelSpace:
    """Return the right labels; of several labels also those that are predicted only, which are wrong in every row.

    Predicted numbers with fractions mean a regression, even if the right ones are whole.
    """
    guessed = (
        guess_kind(number_cells(*each)[1], each[1] in each[0].lists)[0] for each in zip(tables, predicted, strict=True)
    )
    kind = REGRESSION if len(labels) == 1 and REGRESSION in guessed else "auto"
    space = find_labels(tables[0], labels, kind)
    if space.kind != SEVERAL:
        return space
    others = {name for each in zip(tables, predicted, strict=True) for name in read_predicted(*each, space)[1]}
    return replace(space, names=(*space.names, *sorted(others)))


def read_predicted(table: Columns, predicted: str, space: LabelSpace) -> tuple[np.ndarray, Counter[str]]:
    """Return the predictions, and the labels among them that are unknown; see `LabelSpace.read`."""
    return replace(space, columns=(predicted,), separator=SEPARATOR, positions=()).read(table)


def read_table(table: Columns, predicted: str, texts: Sequence[str], space: LabelSpace) -> ScoredRows:
    """Return the rows of a table with right and predicted labels or numbers."""
    right, unknown = space.read(table)
    if unknown:
        some = ", ".join(repr(shorten_text(name)) for name in list(unknown)[:3])
        raise UsageError(f"{table.source} has labels that the first file lacks ({some}); give files of the same rows")
    found, _ = read_predicted(table, predicted, space)
    if space.kind == SINGLE and (found < 0).all():
        raise UsageError(
            f"{table.source}: no {predicted!r} is one of the right labels; name the column of these with --label"
        )
    if space.kind == SEVERAL:
        right = np.pad(right, [(0, 0), (0, len(space.names) - right.shape[1])])
    score = measure_table(right, found, space)
    words = zip(*(table.find(name).to_pylist() for name in texts), strict=True)
    given = table.find(predicted).to_pylist()
    rows = [RowAnswer(own, spell(value, space), answer) for own, value, answer in zip(words, right, given, strict=True)]
    return gather_rows(score, rows)


def measure_table(right: np.ndarray, found: np.ndarray, space: LabelSpace) -> RowScore:
    """Return the first score of SCORES of right and predicted labels; an unknown class is never right."""
    name, classes = next(iter(SCORES[space.kind])), len(space.names)
    if space.kind == REGRESSION:
        return measure_numbers(found, right)[name]
    if space.kind == SINGLE:
        return measure_classes(np.where(found < 0, classes, found), right, classes + 1)[name]
    found, right = found > 0, right > 0
    return measure_counts(found & right, found, right, "labels_f1")


# --- Tags and answers -------------------------------------------------------------------------------------------------


def read_tag_file(path: Path) -> ScoredRows:
    """Return the documents or sentences of a CoNLL file whose last two columns are right and predicted tags."""
    gold, predicted = (read_conll(path, column) for column in (-2, -1))
    numbers = number_rows(gold)
    tags = [sentence.tags for sentence in predicted.sentences]
    entities = [[find_entities(sentence.tags) for sentence in text.sentences] for text in (gold, predicted)]
    members: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        members.setdefault(number, []).append(place)
    rows = []
    for places in members.values():
        sentences = [gold.sentences[place] for place in places]
        words = " ".join(word for sentence in sentences for word in sentence.words)
        rows.append(RowAnswer((words,), *(name_entities(sentences, [found[x] for x in places]) for found in entities)))
    return gather_rows(measure_entities(entities[0], tags, numbers)["f1"], rows)


def read_answer_files(paths: Sequence[Path], data: Path) -> tuple[str, ScoreRow, list[ScoredRows]]:
    """Return the task, its score, and the questions of files of answers (question id -> answer)."""
    questions = read_squad(data)
    gold = collect_answers(questions)
    task = find_squad(1 if all(gold.values()) else 2)
    found = []
    for path in paths:
        answers = read_predictions(path, str)
        if not gold.keys() & answers:
            raise UsageError(f"{path} has no answer to a question of {data}; give the file that it is about")
        _, f1 = score_answers(gold, answers, task.version.number)
        rows = [
            RowAnswer((one.question, one.context), " | ".join(dict.fromkeys(one.answers)), answers.get(one.id, ""))
            for one in questions
        ]
        found.append(gather_rows(measure_mean(np.array(list(f1.values())), percent=True), rows))
    return task.name, find_row(task.table, task.metric), found
