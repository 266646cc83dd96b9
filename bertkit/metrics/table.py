"""The prediction table in memory: Arrow columns with a row for each text, question, sentence or sequence.

A score is computed from these columns alone, so that any program can compute it again, on any subset. The columns and
the file are described in recipes/data/README.md; `bertkit.training.predictions` writes and reads the file. The facts
about a table are JSON in the metadata of its schema, each under `bertkit.` and its name:

    names: the classes, in the order of the logits
    decided: values that an evaluation has decided, such as tau and thresholds
    texts: the columns of texts, by which rows are matched
    weighted: whether scores weigh the rows by the column `weight`
    soft: whether `label` is the likeliest of soft labels, with which predictions only agree

Shape letters: S rows, L labels.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

LABEL, PREDICTION, PROBABILITY_PREFIX, WEIGHT = "label", "prediction", "probability_", "weight"
BASELINE, BASELINE_PROBABILITY = "baseline_prediction", "baseline_probability"  # the class of a baseline, if it has one
SPELLED = "_spans"  # ends the names of columns with the spans of label and prediction, as their text spells them
# Columns by whose presence a table's kind is recognised.
KIND_COLUMNS = {"em", "f1", "strict_right", "strict_found", f"{LABEL}{SPELLED}", f"{PREDICTION}{SPELLED}"}
FACTS = "bertkit."
NAMES = pa.list_(pa.string())  # several labels, tags, right answers


def make_rows(columns: Mapping[str, Any], **facts: Any) -> pa.Table:
    """Return a table of columns; an empty or missing fact is left out."""
    metadata = {f"{FACTS}{name}": json.dumps(value) for name, value in facts.items() if value not in (None, {}, [])}
    return pa.table(dict(columns), metadata=metadata)


def read_facts(rows: pa.Table) -> dict[str, Any]:
    """Return the facts about a table."""
    found = {name.decode(): value for name, value in (rows.schema.metadata or {}).items()}
    return {name.removeprefix(FACTS): json.loads(value) for name, value in found.items() if name.startswith(FACTS)}


def read_decided(rows: pa.Table) -> dict[str, Any]:
    """Return the values of BertConfig that the evaluation of a table has decided, such as tau."""
    return read_facts(rows).get("decided", {})


def add_facts(rows: pa.Table, **facts: Any) -> pa.Table:
    """Return a table with further facts."""
    return make_rows(dict(zip(rows.column_names, rows.columns, strict=True)), **read_facts(rows) | facts)


def list_names(rows: pa.Table) -> list[str]:
    """Return the classes of a table, or those that occur in one without facts."""
    if names := read_facts(rows).get("names"):
        return names
    found: set[str] = set()
    for column in {LABEL, PREDICTION} & set(rows.column_names):
        for value in rows.column(column).to_pylist():
            found.update(value if isinstance(value, list) else [value])
    return sorted(found - {None, ""})


def encode_names(values: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return (S,) the index of each value among the names; that behind the last one for another value."""
    indices = {name: index for index, name in enumerate(names)}
    return np.array([indices.get(value, len(names)) for value in values], np.int64)


def mark_names(values: Iterable[Sequence[str]], names: Sequence[str]) -> np.ndarray:
    """Return (S, L) whether each name is among the values of each row."""
    return np.array([[name in row for name in names] for row in map(set, values)], bool).reshape(-1, len(names))


def read_probabilities(rows: pa.Table, names: Sequence[str]) -> np.ndarray | None:
    """Return the probabilities (S, L) of the classes; None from a table without them."""
    columns = [f"{PROBABILITY_PREFIX}{name}" for name in names]
    if not columns or not set(columns) <= set(rows.column_names):
        return None
    return np.stack([read_numbers(rows, name) for name in columns], axis=1)


def read_numbers(rows: pa.Table, name: str) -> np.ndarray:
    """Return a column of numbers as (S,) float64."""
    return rows.column(name).to_numpy().astype(np.float64)
