"""Baselines that scikit-learn fits to a run's own training rows, and how far fine-tuning is above them on dev.

TF-IDF and a frozen encoder's vectors for texts, words and their neighbours for tags. They change nothing in the run:
the first process fits them before training, and the cache of features keeps them for other runs.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit import __version__
from bertkit.data.splits import name_split
from bertkit.data.tagging import ABSENT
from bertkit.metrics.baseline import TERM_LISTS, rotate, vectorize_texts, vectorize_words
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.intervals import compare_methods
from bertkit.metrics.rows import take_values
from bertkit.metrics.table import BASELINE, BASELINE_PROBABILITY, PREDICTION, list_names, read_probabilities
from bertkit.reports.tables import name_limits
from bertkit.system.progress import Report
from bertkit.tasks.finetuning import BASELINES, BEST_BASELINE, GAIN
from bertkit.tasks.frozen import choose_head, encode_items, keep_array, load_encoder, solve
from bertkit.tasks.kinds import get_kind
from bertkit.tasks.ner import fill_summaries, get_words
from bertkit.tasks.task import Task
from bertkit.tasks.text import TextSequences, list_targets
from bertkit.training.predictions import GROUP, TABLE_SUFFIX, pack_table
from bertkit.training.prepare import FITTED_ROWS, Prepared, choose_rows
from bertkit.training.recipe import Recipe

FROZEN_ROWS = 2_000  # rows of each split that the frozen encoder reads
CHOOSING_ROWS = 2_000  # training texts whose folds choose; 15 classes of 5,000 would take half a minute
# Folds choose 1 by the log-loss of words, which nearly all are tagged O: with 10, F1 on WNUT-17 is 3.5 higher.
WORDS_STRENGTH = 10.0


@dataclass(frozen=True, eq=False)
class Baseline:
    """The answers of a baseline."""

    summaries: np.ndarray  # (S, ...) of dev, as `Task.decode` takes them
    numbers: np.ndarray  # (R,) the rows of dev that have an answer
    fitted: int  # the number of training rows


def fit_baselines(task: Task, recipe: Recipe, prepared: Prepared, report: Report) -> dict[str, Baseline]:
    """Return the answers of the task's baselines by name; none without a split to fit or to score."""
    dev = next(iter(task.splits), "")
    if not recipe.baseline or not {"train", dev} <= prepared.data.keys():
        return {}
    # A head that was solved is the baseline of its own training.
    names = [name for name in task.baselines if name != "frozen" or not recipe.starts_solved]
    if names:
        report(f"fitting the baselines: {', '.join(BASELINES[name] for name in names)}")
    return {name: FITTERS[name](task, recipe, prepared, dev) for name in names}


def fit_texts(task: Task, recipe: Recipe, prepared: Prepared, dev: str) -> Baseline:
    """Return the answers of a linear head on the TF-IDF of words or of characters, for all rows of dev."""
    others = list(task.tabulate_examples(prepared.examples[dev]).walk_texts())
    train, labels = prepared.data["train"], len(prepared.settings["id2label"])
    rows = choose_rows(prepared.checked.keys["train"], FITTED_ROWS)
    is_counted = mark_counted(train, rows)
    rows, texts = rows[is_counted], list(compress(prepared.texts, is_counted))
    chooses = choose_rows(prepared.checked.keys["train"][rows], CHOOSING_ROWS)
    groups, weights = prepared.groups[rows], None if train.weights is None else train.weights[rows]

    def compute() -> np.ndarray:
        places, targets, row_weights = list_targets(train, rows[chooses])
        some, some_weights = [texts[number] for number in chooses.tolist()], None
        if weights is not None:
            some_weights = weights[chooses]
        candidates = {
            unit: rotate(vectorize_texts(some, some[:1], unit, some_weights)[0])[places] for unit in TERM_LISTS
        }
        of_places = groups[chooses][places]
        unit, strength = choose_head(candidates, targets, labels, of_places, row_weights=row_weights)
        places, targets, row_weights = list_targets(train, rows)
        vectors, asked = vectorize_texts(texts, others, unit, weights)
        return answer(vectors[places], asked, targets, strength, labels, row_weights)

    columns = (train.labels, train.shares, train.weights)
    fitted = [None if column is None else column[rows].tolist() for column in columns]
    logits = keep_answers("tfidf", [texts, others, *fitted, groups.tolist(), labels], compute)
    return Baseline(logits, np.arange(len(others)), len(rows))


def mark_counted(train: TextSequences, rows: np.ndarray) -> np.ndarray:
    """Return (R,) whether training rows with these numbers have a weight above 0."""
    return np.ones(len(rows), bool) if train.weights is None else train.weights[rows] > 0


def fit_frozen(task: Task, recipe: Recipe, prepared: Prepared, dev: str) -> Baseline:
    """Return the answers of a linear head on a frozen encoder's vectors, for the first rows of dev by key."""
    train, data = prepared.data["train"], prepared.data[dev]
    rows, numbers = (choose_rows(prepared.checked.keys[split], FROZEN_ROWS) for split in ("train", dev))
    rows = rows[mark_counted(train, rows)]
    items = [part[number] for part, found in ((train, rows), (data, numbers)) for number in found.tolist()]
    vectors = encode_items(load_encoder(recipe.checkpoint, "last", len(prepared.tokenizer)), items)  # (S, H)
    places, targets, row_weights = list_targets(train, rows)
    given, asked, groups = vectors[: len(rows)][places], vectors[len(rows) :], prepared.groups[rows][places]
    labels = len(prepared.settings["id2label"])
    _, strength = choose_head({"mean": given}, targets, labels, groups, row_weights=row_weights)
    logits = answer(given, asked, targets, strength, labels, row_weights)
    summaries = np.zeros((len(data), logits.shape[1]))
    summaries[numbers] = logits
    return Baseline(summaries, numbers, len(rows))


def fit_words(task: Task, recipe: Recipe, prepared: Prepared, dev: str) -> Baseline:
    """Return the answers of a linear head on the words and their neighbours, for all sentences of dev."""
    train, others = (get_words(prepared.data[split]) for split in ("train", dev))
    given, asked = ([sentence.words for sentence in data.text.sentences] for data in (train, others))
    lengths = np.array(list(map(len, given)))
    order = np.argsort(prepared.checked.keys["train"], kind="stable")
    kept = np.sort(order[: max(int((np.cumsum(lengths[order]) <= FITTED_ROWS).sum()), 1)])
    given = [given[number] for number in kept.tolist()]
    targets = train.labels[np.repeat(np.isin(np.arange(len(lengths)), kept), lengths)]  # (M,)
    labels = len(prepared.settings["id2label"])

    def compute() -> np.ndarray:
        return answer(*vectorize_words(given, asked), targets, WORDS_STRENGTH, labels)

    logits = keep_answers("words", [WORDS_STRENGTH, given, asked, targets.tolist(), labels], compute)
    summaries = fill_summaries(others, logits.argmax(1)[others.firsts != ABSENT])
    return Baseline(summaries, np.arange(len(asked)), len(given))


FITTERS: Mapping[str, Callable[[Task, Recipe, Prepared, str], Baseline]] = {
    "tfidf": fit_texts,
    "frozen": fit_frozen,
    "words": fit_words,
}


def show_baseline(task: Task, baseline: Baseline | None, data: Any, rows: pa.Table | None) -> dict[str, bytes]:
    """Return the file of the prediction table of dev with the classes of a baseline and their probabilities.

    Both are missing in rows that the baseline has not read. Without a baseline of one class a row, there is no file.
    """
    if baseline is None or rows is None or not task.is_classifier or not get_kind(rows).has_classes:
        return {}
    answers = task.decode(baseline.summaries, data, {}).rows
    probabilities = read_probabilities(answers, list_names(answers)).max(axis=1)
    is_read = np.isin(np.arange(len(rows)), baseline.numbers)
    predicted = pa.array(answers.column(PREDICTION).to_numpy(), pa.string(), mask=~is_read)
    rows = rows.append_column(BASELINE, predicted)
    rows = rows.append_column(BASELINE_PROBABILITY, pa.array(probabilities, mask=~is_read))
    return {f"{name_split(next(iter(task.splits)))}{TABLE_SUFFIX}": pack_table(rows)}


def answer(
    train: Any,
    others: Any,
    targets: np.ndarray,
    strength: float,
    labels: int,
    row_weights: np.ndarray | None = None,
) -> np.ndarray:
    """Return the logits (S, L) of other vectors (S, H), from a head that is fitted to those of train."""
    weight, bias = solve(train, targets, strength, labels, row_weights=row_weights)
    return others @ weight.T + bias


def keep_answers(name: str, facts: Sequence[Any], compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the logits (S, L) that are computed from some facts, or those in the cache."""
    key = hashlib.sha256(json.dumps([name, __version__, *facts]).encode()).hexdigest()[:32]
    return keep_array(key, compute)


def score_baselines(task: Task, baselines: Mapping[str, Baseline], data: Any, rows: pa.Table | None) -> dict[str, Any]:
    """Return the scores of the baselines on dev, and how far the model is above the best one.

    Args:
        data: The data set of dev.
        rows: The prediction table of the model on dev, which is compared on the rows that the best one has answered.
    """
    found: dict[str, Any] = {}
    if rows is None or not baselines:
        return found
    scores = {}
    for name, baseline in baselines.items():
        # Thresholds are tuned on a whole dev, as those of the model.
        is_whole = len(baseline.numbers) == len(baseline.summaries)
        decided = None if is_whole else {"thresholds": [FIXED_THRESHOLD] * baseline.summaries.shape[1]}
        answers = task.decode(baseline.summaries, data, decided)
        measured = task.score(answers.rows.take(pa.array(baseline.numbers)))
        values, scores[name] = take_values(measured), measured[task.metric]
        shown = [row.key for row in task.table if f"{name}_{row.key}" in row.baselines.values() and row.key in values]
        found |= {f"{name}_{key}": values[key] for key in shown} | {f"{name}_score": values[task.metric]}
        found |= {f"{name}_fitted": baseline.fitted, f"{name}_scored": len(baseline.numbers)}
    best = max(scores, key=lambda name: found[f"{name}_score"])
    common = rows.take(pa.array(baselines[best].numbers))
    groups = common.column(GROUP).to_pylist() if GROUP in common.column_names else None
    own = task.score(common)[task.metric]
    contrast = compare_methods([scores[best]], [own], groups)
    limits = (contrast.value, contrast.low, contrast.high)
    gains = zip((GAIN, *name_limits(GAIN)), limits, strict=True)
    return found | {BEST_BASELINE: best} | {key: value / own.points for key, value in gains}
