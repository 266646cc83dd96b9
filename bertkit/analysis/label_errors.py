"""Suspected label errors: rows whose label contradicts models that have not seen them.

A linear head on a frozen encoder's vectors predicts each fifth of the rows in seconds; the fine-tuned models of
`classify --folds` are slower and surer. From their probabilities confident learning (Northcutt et al. 2021, the library
cleanlab) estimates how many labels of each class are wrong, and which. A suspected row need not be wrong: models
contradict rare and difficult rows as well.

Shape letters: S rows, E suspected rows, L labels, H hidden.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bertkit.data.duplicates import TRAIN_SPLIT
from bertkit.data.sequences import encode_inputs
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError, explain_missing
from bertkit.metrics.table import (
    LABEL,
    PROBABILITY_PREFIX,
    add_facts,
    list_names,
    read_facts,
    read_probabilities,
)
from bertkit.model.checkpoint import find_weights
from bertkit.studies.folds import OUT_OF_FOLD, gather_folds
from bertkit.studies.results import check_all_finished
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_folds
from bertkit.system.progress import Report, ignore
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.frozen import encode, load_encoder, solve
from bertkit.tasks.kinds import SINGLE_LABEL, Gold, get_kind
from bertkit.training.predictions import ROW_NUMBER, TABLE_SUFFIX, read_table
from bertkit.training.prepare import choose_rows
from bertkit.training.recipe import Recipe, RecipePart

LABEL_ERRORS = "label_errors"  # the key in JSON, and the name of the CSV file
FROZEN_FOLDS, FROZEN_STRENGTH = 5, 1.0
MOST_JUDGED = 10_000  # rows that the frozen encoder reads


def detect_label_errors(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the rows whose labels are probably wrong, by confident learning.

    Each of several labels is a problem of two classes. A label that all rows or none have is never suspected.

    Args:
        probabilities: (S, L) of models that have not seen the row; each of several labels has its own.
        labels: (S,) classes that all occur, or (S, L) 0 or 1 for each of several labels.

    Returns:
        (E,) the suspected rows, the worst first; (S,) the probability of each row's label, or the lowest one of its
        several labels; and (E,) the class that each suspected row should have, or (E, L) 0 or 1 for each label.
    """
    if labels.ndim == 1:
        is_wrong = suspect(probabilities, labels)
        scores, suggested = probabilities[np.arange(len(labels)), labels], probabilities.argmax(axis=1)
    else:
        flags = labels.astype(int)
        columns = zip(probabilities.T, flags.T, strict=True)
        wrong = np.stack([suspect(np.stack([1 - column, column], axis=1), own) for column, own in columns], axis=1)
        is_wrong, suggested = wrong.any(axis=1), flags ^ wrong  # (S,), (S, L)
        scores = np.where(flags, probabilities, 1 - probabilities).min(axis=1)
    rows = np.flatnonzero(is_wrong)
    rows = rows[np.argsort(scores[rows], kind="stable")]
    return rows, scores, suggested[rows]


def suspect(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (S,) whether each class is suspected, from probabilities (S, L) and classes (S,)."""
    if len(np.unique(labels)) < 2:
        return np.zeros(len(labels), bool)
    with explain_missing("suspected label errors need cleanlab", "doctor"):
        from cleanlab.filter import find_label_issues  # imports scikit-learn and pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # cleanlab warns of classes too rare to be suspected
        return find_label_issues(labels, probabilities, n_jobs=1)  # more jobs would start processes


def describe_label_errors(rows: pa.Table) -> dict[str, Any]:
    """Return the suspected rows of a prediction table as JSON, the worst first; the models have not seen the rows.

    Returns:
        `rows` (their number), `by` (the models) and `suspected`: `row`, `texts`, the `given` and the `suggested`
        label, their probabilities as `score` and `suggested_score`, and all `probabilities`.
    """
    facts, names, labels = read_facts(rows), list_names(rows), rows.column(LABEL).to_pylist()
    probabilities, codes = read_probabilities(rows, names), get_kind(rows).encode(labels, names)
    is_several = codes.ndim == 2
    found, scores, suggestions = detect_label_errors(probabilities, codes)
    others = [name for name in rows.column_names if name != LABEL and not name.startswith(PROBABILITY_PREFIX)]
    texts = rows.select(facts.get("texts", others)).take(pa.array(found, pa.int64())).to_pylist()
    lines = rows.column(ROW_NUMBER).to_pylist() if ROW_NUMBER in rows.column_names else range(1, len(rows) + 1)
    entries = [
        {
            "row": lines[row],
            "texts": list(own.values()),
            "given": format_label(labels[row]),
            "suggested": format_label([names[n] for n in np.flatnonzero(better)] if is_several else names[better]),
            "score": float(scores[row]),
            "suggested_score": float(1 - scores[row] if is_several else probabilities[row, better]),
            "probabilities": dict(zip(names, probabilities[row].tolist(), strict=True)),
        }
        for row, own, better in zip(found.tolist(), texts, suggestions, strict=True)
    ]
    return {"rows": len(rows), "by": facts.get("by", "other models"), "suspected": entries}


def format_label(label: str | Sequence[str]) -> str:
    """Return a label or several labels in words."""
    return label if isinstance(label, str) else ", ".join(label) or "no label"


# --- The models that have not seen the rows ---------------------------------------------------------------------------


def predict_by_vectors(
    rows: Mapping[str, ExampleRows], keys: Mapping[str, np.ndarray], recipe: Recipe, report: Report = ignore
) -> pa.Table | None:
    """Predict the rows of train's file by linear heads on frozen vectors; None unless they are single texts and labels.

    A head has seen no row with an equal text. At most MOST_JUDGED rows are predicted, those with the smallest keys.

    Args:
        rows, keys: Split -> its rows, and their hashes.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    train = rows.get(TRAIN_SPLIT)
    if train is None or not train.labels or len(train.texts) > 1 or not isinstance(train.labels[0], str):
        return None
    files = {split: one.source and one.source.source for split, one in rows.items() if one.labels}
    parts = [split for split, file in files.items() if split == TRAIN_SPLIT or (file and file == files[TRAIN_SPLIT])]
    columns = zip(*((keys[split], rows[split].lines, rows[split].labels) for split in parts), strict=True)
    hashes, lines, labels = map(np.concatenate, columns)
    kept = choose_rows(hashes, MOST_JUDGED)
    _, codes, counts = np.unique(labels[kept], return_inverse=True, return_counts=True)
    kept = kept[counts[codes] >= FROZEN_FOLDS]  # a head may lack a rarer label
    names, targets = np.unique(labels[kept], return_inverse=True)
    if len(names) < 2 or len(np.unique(hashes[kept])) < FROZEN_FOLDS:
        return None
    by = f"frozen vectors of {recipe.checkpoint}{', the first rows by key' if len(hashes) > MOST_JUDGED else ''}"
    folder = find_weights(recipe.checkpoint)
    report(f"looking for label errors by {by}: {len(kept):,} of {len(hashes):,} rows")
    chunks = [chunk for split in parts for column in rows[split].texts.values() for chunk in column.chunks]
    texts = pa.chunked_array(chunks).take(pa.array(kept)).to_pylist()
    tokenizer = load_tokenizer(folder)
    model = load_encoder(folder, "last", len(tokenizer))
    longest = min(recipe.data["max_length"], model.config.max_position_embeddings)
    vectors = encode(model, encode_inputs(texts, None, tokenizer, longest), report=report)  # (S, H)
    logits = np.empty((len(kept), len(names)))
    for fitted, held in StratifiedGroupKFold(FROZEN_FOLDS).split(vectors, targets, hashes[kept]):
        weight, bias = solve(vectors[fitted], targets[fitted], FROZEN_STRENGTH, len(names))
        logits[held] = vectors[held] @ weight.T + bias
    found = SINGLE_LABEL.decode(logits, names.tolist(), Gold(targets)).rows
    found = found.append_column(ROW_NUMBER, pa.array(lines[kept])).append_column("text", pa.array(texts))
    return add_facts(found, texts=["text"], by=by)


def predict_by_folds(
    train: ExampleRows, recipe: RecipePart, *given: RecipePart, folds: int, output: Path, **options: Any
) -> pa.Table:
    """Return the table of the out-of-fold predictions of `classify --folds`, which is run or continued in `output`.

    Args:
        train: Rows of the file whose rows are all predicted.
        recipe: A recipe or an empty one.
        given: Recipes of the command line, which override it.
        options: Those of `run_study`.
    """
    if isinstance(train.labels[0], float):
        raise UsageError(
            f"{train.source.source}: the labels are numbers; suspected errors are found among classes, so leave out "
            "--folds, or set data.problem_type"
        )
    recipe = {key: value for key, value in recipe.items() if key != "task"}
    if Path(train.source.source).is_file():  # in a folder that may also have rows for dev
        given = (*given, {"data": {"dir": train.source.source}})
    results = run_study(make_study(define_folds("classify", recipe, folds), *given), output=output, **options)
    check_all_finished(results, output)
    gather_folds(results, output)
    return add_facts(read_table(output / f"{OUT_OF_FOLD}{TABLE_SUFFIX}"), by=f"{folds} folds")
