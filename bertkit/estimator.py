"""The estimator for scikit-learn: `bertkit.train` and `Run.predict` behind `fit` and `predict`."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, Features, Value
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted

from bertkit.api import Run, train
from bertkit.data.cells import normalise
from bertkit.data.labels import PAIR_NAMES
from bertkit.errors import UsageError, as_usage_error, pluralize
from bertkit.training.run_dir import RUN_FILES

WEIGHT_COLUMN = "sample_weight"  # the column of weights


class BertClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of texts or pairs of texts for scikit-learn.

    A tenth of the training rows is held out, and gives the scores in `run_.metrics`.

    >>> BertClassifier(num_train_epochs=5).fit(texts, labels).predict(texts)

    Args:
        model: As for `train`.
        output: The directory of one fit; None: a temporary one for each, as cross-validation needs. A pickle has the
            files too.
        max_length, batch_size, learning_rate, num_train_epochs: Keys of the recipe; None: the task's defaults.
        random_state: The seed.
        settings: Further keywords of `train`.

    Attributes:
        classes_: The labels, sorted.
        run_: The `Run`.
    """

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        output: str | Path | None = None,
        max_length: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        num_train_epochs: float | None = None,
        random_state: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.output = output
        self.max_length = max_length
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.num_train_epochs = num_train_epochs
        self.random_state = random_state
        self.settings = settings

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BertClassifier":
        """Fine-tune on texts and their labels.

        Args:
            X: A list, an array or a Series of texts; a list, an array or a DataFrame of pairs, or a DataFrame of texts.
            y: One label per text.
            sample_weight: A weight of at least 0 per text, or one for all; None: 1.
        """
        texts, labels = read_texts(X), read_labels(y)
        check_consistent_length(texts, labels)
        with as_usage_error("y", "give labels of one type"):
            classes, numbers = np.unique(labels, return_inverse=True)
            names = ClassLabel(names=name_classes(classes))
        columns = dict(zip(PAIR_NAMES[0], map(list, zip(*texts, strict=True)), strict=False))
        features = Features(dict.fromkeys(columns, Value("large_string")) | {"label": names})
        table = Dataset.from_dict(columns | {"label": numbers}, features)
        fixed = {"test_share": 0.0, "problem_type": "single_label_classification", "baseline": False}
        if sample_weight is not None:
            weights = np.asarray(sample_weight, np.float64)
            weights = column_or_1d(np.full(len(labels), weights) if weights.ndim == 0 else weights)
            check_consistent_length(texts, weights)
            table = table.add_column(WEIGHT_COLUMN, weights.tolist())
            fixed["weight"] = WEIGHT_COLUMN
        own = {key: getattr(self, key) for key in ("model", "max_length", "batch_size")}
        rates = {key: getattr(self, key) for key in ("learning_rate", "num_train_epochs")} | {"seed": self.random_state}
        own, rates = ({key: value for key, value in part.items() if value is not None} for part in (own, rates))
        given = fixed | dict(self.settings or {}) | own
        given["train"] = {**given.get("train", {}), **rates}
        output = self.output or self._make_directory()
        self.run_ = train("classify", table, text=list(columns), label="label", output=output, **given)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (S, L) of the labels in the order of `classes_`."""
        check_is_fitted(self)
        found = self.run_.predict([row if len(row) > 1 else row[0] for row in read_texts(X)])
        names = name_classes(self.classes_)
        return np.array([[result["probabilities"].get(name, 0.0) for name in names] for result in found])  # (S, L)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each text."""
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]

    def _make_directory(self) -> Path:
        """Return a new directory that is removed with this object."""
        folder = tempfile.mkdtemp(prefix="bertkit-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, with the files of the run instead of its path."""
        state = dict(super().__getstate__())
        if isinstance(found := state.get("run_"), Run):
            files = [path for path in Path(found.source).iterdir() if path.name in RUN_FILES]
            state["run_"] = {path.name: path.read_bytes() for path in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a pickle; the files of the run go to a temporary directory."""
        if files := state.get("run_"):
            folder = self._make_directory()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            state = state | {"run_": Run(str(folder))}
        super().__setstate__(state)


def read_texts(given: Any) -> list[tuple[str, ...]]:
    """Return the one or two texts of each row; a missing text is empty."""
    rows = given.to_numpy() if hasattr(given, "to_numpy") else given
    rows = rows.tolist() if isinstance(rows, np.ndarray) else rows
    if isinstance(rows, str | bytes | Mapping):
        raise UsageError(f"X is of type {type(rows).__name__}; give a list of texts, such as [text]")
    texts = [tuple(row) if isinstance(row, list | tuple) else (row,) for row in rows]
    if (sizes := set(map(len, texts))) not in ({1}, {2}):
        raise UsageError(f"X has rows of {sorted(sizes) or 'no'} texts; give one text per row, or two in every row")
    table = pd.DataFrame(texts, columns=getattr(given, "columns", None), dtype=object)
    for name, column in table.items():
        is_text = column.isna() | column.map(lambda cell: isinstance(cell, str))
        if not is_text.all():
            row = int((~is_text).argmax())
            raise UsageError(
                f"X has {column[row]!r:.40} in row {row} of the column {name!r}, which is not a text; leave the column "
                "out, or convert it with astype(str)"
            )
    return list(table.where(table.notna(), "").itertuples(index=False, name=None))


def read_labels(given: Any) -> np.ndarray:
    """Return the label of each row (S,); a missing one is a UsageError."""
    missing = np.flatnonzero(pd.isna(np.asarray(given, object)))
    if len(missing):
        rows = pluralize(len(missing), "row")
        raise UsageError(f"y has no label in {rows} (first: {missing[0]}); leave such rows out")
    return column_or_1d(given)


def name_classes(classes: np.ndarray) -> list[str]:
    """Return the name of each class in the model and its files: a text as it is, or in quotes if it is blank."""
    names = [each if isinstance(each, str) else normalise(str(each)) for each in classes]
    return [str(name) if name.strip() else repr(str(name)) for name in names]
