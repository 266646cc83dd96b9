"""The kinds of labels of a text: one class, several labels, or a number, with all that differs between them.

A kind is recognised by the `problem_type` of a configuration or by a prediction table. Its labels are (S,) the numbers
of classes, (S, L), 0 or 1 for each of several labels, or (S,) numbers.

Left out: the cells of a person's own table, which decide the kind first (`bertkit.data.labels`), the losses
(`bertkit.model.heads`, by `problem_type`), and linear heads, which are distinguished by their targets
(`bertkit.tasks.frozen`).

Shape letters: S rows, L labels.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.cells import normalise, parse_number, read_list
from bertkit.data.labels import REGRESSION, SEPARATOR, SEVERAL, SINGLE
from bertkit.metrics.calibration import compute_probabilities, measure_calibration
from bertkit.metrics.classification import (
    F1,
    FIXED_THRESHOLD,
    ThresholdRule,
    name_each,
    score_classes,
    score_labels,
    tune_thresholds,
)
from bertkit.metrics.rows import WeightedScore, measure_mean, measure_numbers, measure_ordinals
from bertkit.metrics.selective import choose_confidence
from bertkit.metrics.table import (
    LABEL,
    NAMES,
    PREDICTION,
    PROBABILITY_PREFIX,
    WEIGHT,
    encode_names,
    list_names,
    make_rows,
    mark_names,
    read_decided,
    read_numbers,
    read_probabilities,
)
from bertkit.reports.tables import show_number
from bertkit.tasks.answers import Answers, Decisions, Result, add_label_set, describe_set
from bertkit.tasks.finetuning import CALIBRATION_ROWS
from bertkit.tasks.schema import NUMBER_SCHEMA, PROBABILITY, Schema, make_array, make_object
from bertkit.tasks.task import check_finite

if TYPE_CHECKING:
    from torch import Tensor

    from bertkit.model.config import BertConfig

Scores = dict[str, WeightedScore | float]


@dataclass(frozen=True, eq=False)
class Gold:
    """The right answers to some rows, and how they are scored."""

    labels: np.ndarray  # the labels of a kind: (S,) or (S, L)
    weights: np.ndarray | None = None  # (S,) those of the rows in scores; None: 1
    is_soft: bool = False  # whether the labels are the likeliest ones of soft labels, with which answers only agree
    rule: ThresholdRule | None = None  # how thresholds are chosen on these rows; None: as for the kind


@dataclass(frozen=True, eq=False)
class LabelledAnswers(Answers):
    """The answers of a kind, perhaps beside the right ones."""

    has_pipeline = True
    names: Sequence[str]
    gold: Gold | None

    def tabulate(self, columns: Mapping[str, Any], spell: Callable[[np.ndarray], Any], **facts: Any) -> pa.Table:
        """Return the prediction table of some columns and of the right answers, which `spell` converts."""
        if self.gold is None:
            return make_rows(columns, **facts)
        columns = {LABEL: spell(self.gold.labels)} | dict(columns)
        if self.gold.weights is not None:
            columns[WEIGHT] = self.gold.weights
        return make_rows(columns, weighted=WEIGHT in columns or None, soft=self.gold.is_soft or None, **facts)


@dataclass(frozen=True, eq=False)
class ClassAnswers(LabelledAnswers):
    """A class for each row."""

    key = "label"
    logits: np.ndarray  # (S, L)
    probabilities: np.ndarray  # (S, L)
    thresholds: Sequence[float] | None  # (2,) that of the class that has one, and 0; None: the likeliest class is taken
    set_limit: float | None  # the highest conformity score of a label in a label set; None: no label sets
    least: float | None = None  # the probability below which there is no answer; None: all are answered
    abstention: Mapping[str, float] = field(default_factory=dict)  # how `least` was chosen on these rows

    @cached_property
    def best(self) -> np.ndarray:
        """Return (S,) the likeliest class, or the one with a threshold where its probability is above that."""
        if self.thresholds is None:
            return self.logits.argmax(1)
        label = int(np.argmax(self.thresholds))
        return np.where(self.probabilities[:, label] > self.thresholds[label], label, 1 - label)

    @cached_property
    def rows(self) -> pa.Table:
        spelled = np.array(self.names, object)
        columns = {PREDICTION: spelled[self.best]} | name_probabilities(self.probabilities, self.names)
        decided = {} if self.thresholds is None else {"thresholds": list(self.thresholds)}
        decided |= {} if self.least is None else {"least_confidence": self.least}
        facts: dict[str, Any] = {"names": list(self.names), "decided": decided}
        if self.gold is not None and (rule := self.gold.rule) is not None:
            facts["asked"] = {rule.score: rule.value}
        return self.tabulate(columns, spelled.__getitem__, **facts)

    def list_results(self) -> list[Result]:
        results: list[Result] = []
        for best, values in zip(self.best.tolist(), self.probabilities.tolist(), strict=True):
            row = dict(zip(self.names, values, strict=True))
            result = {"label": self.names[best], "probability": values[best], "probabilities": row}
            if self.least is not None and values[best] < self.least:
                result |= {"label": None, "abstained": True}
            elif self.least is not None:
                result["abstained"] = False
            results.append(add_label_set(result, row, self.set_limit))
        return results

    def abstain(self, target: float, groups: Sequence[Hashable]) -> "ClassAnswers":
        """Return the answers without those that are too uncertain for an accuracy, by the right answers to these rows.

        Args:
            groups: (S,) the group of each row.
        """
        confidences, right = self.probabilities.max(axis=1), self.best == self.gold.labels
        choice = choose_confidence(confidences, right, target, len(self.names), groups)
        facts = {"target_accuracy": target, "reached_accuracy": choice.reached, "deciding_rows": choice.rows}
        return replace(self, least=choice.least, abstention=facts)

    @staticmethod
    def describe(result: Result) -> str:
        label = f"(no answer, at most {result['probability']:.1%})"
        if result["label"] is not None:
            label = f"{result['label']}  ({result['probability']:.1%})"
        return f"{label}{describe_set(result)}"

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        row = {"label": result["label"] or "", "probability": result["probability"]} | flatten_probabilities(result)
        return row | ({"abstained": result["abstained"]} if "abstained" in result else {})

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        return {"label": result["label"], "score": result["probability"]}


@dataclass(frozen=True, eq=False)
class LabelAnswers(LabelledAnswers):
    """Any number of labels for each row: those whose probability is above their threshold."""

    key = "labels"
    probabilities: np.ndarray  # (S, L)
    thresholds: Sequence[float]  # (L,)
    is_tuned: bool  # whether rows with right answers have decided the thresholds
    set_limit: float | None  # as in ClassAnswers

    @cached_property
    def rows(self) -> pa.Table:
        spell = partial(format_marks, names=self.names)
        columns = {PREDICTION: spell(self.probabilities > np.array(self.thresholds))}
        columns |= name_probabilities(self.probabilities, self.names)
        decided = {"thresholds": list(self.thresholds)} if self.is_tuned else {}
        return self.tabulate(columns, spell, names=list(self.names), decided=decided)

    def list_results(self) -> list[Result]:
        results: list[Result] = []
        for values in self.probabilities.tolist():
            row = dict(zip(self.names, values, strict=True))
            limits = zip(self.names, values, self.thresholds, strict=True)
            labels = [name for name, value, limit in limits if value > limit]
            results.append(add_label_set({"labels": labels, "probabilities": row}, row, self.set_limit))
        return results

    @staticmethod
    def describe(result: Result) -> str:
        labels = [f"{label} ({result['probabilities'][label]:.1%})" for label in result["labels"]]
        return (", ".join(labels) or "(no label)") + describe_set(result)

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        return {"labels": SEPARATOR.join(result["labels"])} | flatten_probabilities(result)

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        scores = ({"label": label, "score": result["probabilities"][label]} for label in result["labels"])
        return sorted(scores, key=lambda entry: -entry["score"])


@dataclass(frozen=True, eq=False)
class NumberAnswers(LabelledAnswers):
    """A number for each row."""

    key = "score"
    numbers: np.ndarray  # (S, L), of which the table has the first column

    @cached_property
    def rows(self) -> pa.Table:
        return self.tabulate({PREDICTION: self.numbers[:, 0].astype(np.float64)}, np.float64)

    def list_results(self) -> list[Result]:
        return [{"score": value} for value in self.numbers[:, 0].tolist()]

    @staticmethod
    def describe(result: Result) -> str:
        return show_number(result["score"])

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        return {"prediction": result["score"]}

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        return {"label": labels[0], "score": result["score"]}


class NumbersAnswers(NumberAnswers):
    """Several numbers for each row, each with a name, as models of transformers may have."""

    key = "scores"

    def list_results(self) -> list[Result]:
        return [{"scores": dict(zip(self.names, row, strict=True))} for row in self.numbers.tolist()]

    @staticmethod
    def describe(result: Result) -> str:
        return ", ".join(f"{label} {show_number(value)}" for label, value in result["scores"].items())

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        return {f"prediction_{label}": value for label, value in result["scores"].items()}

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        return [{"label": label, "score": value} for label, value in result["scores"].items()]


class Kind:
    """A kind of label, and its answers."""

    problem_type: str  # the name in a configuration
    type: pa.DataType  # the type of the columns `label` and `prediction` of a prediction table
    scores: Mapping[str, str]  # key -> name in words; the first one is the score of a run
    has_names = True  # whether there are labels that a row can have or lack
    has_several = False  # whether a row may have more than one of them
    has_classes = False  # whether a row has exactly one of them

    def read(self, cell: str) -> Any:
        """Return the label, the labels or the number in the cell of a prediction table."""
        raise NotImplementedError

    def list_classes(self, labels: Sequence[Hashable]) -> Sequence[Hashable]:
        """Return each label of each row, from the names of `LabelSpace.format_labels`; none of numbers."""
        raise NotImplementedError

    def answer_constantly(
        self, labels: np.ndarray, names: Sequence[str], weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the logits (L,) of the best constant answer to the labels of train, with weights (S,) or without."""
        raise NotImplementedError

    def activate(self, logits: "Tensor") -> "Tensor":
        """Return the probabilities of logits (..., L); numbers as they are."""
        raise NotImplementedError

    def decode(
        self, logits: np.ndarray, names: Sequence[str], gold: Gold | None = None, decided: Decisions | None = None
    ) -> Answers:
        """Return the answers of logits (S, L).

        Args:
            gold: The right answers; None without any.
            decided: The `thresholds` (L,) of several labels, which are else tuned on the right answers by their rule or
                for the best F1, or fixed without these, those of two classes, of which one is 0, and the `set_limit` of
                label sets.
        """
        raise NotImplementedError

    def describe(self, names: Sequence[str], decided: Decisions) -> Schema:
        """Return the schema of the answers."""
        raise NotImplementedError

    def encode(self, cells: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        """Return the labels of the cells of a prediction table; an unknown class has the number L."""
        raise NotImplementedError

    def measure(self, rows: pa.Table) -> Scores:
        """Return the scores of a prediction table, then the counts and thresholds of its labels.

        Predictions that are none of the classes are wrong. Scores of probabilities need a table that has them.
        """
        raise NotImplementedError

    def mark_wrong(self, rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Return (S,) which rows are wrong, and how wrong each is."""
        raise NotImplementedError


class SingleLabel(Kind):
    """One class."""

    problem_type = SINGLE
    type = pa.string()
    has_classes = True
    scores = {
        "macro_f1": "macro F1",
        "accuracy": "accuracy",
        "weighted_f1": "weighted F1",
        "matthews_correlation": "Matthews correlation",
        "roc_auc": "area under the ROC curve",
        "average_precision": "average precision",
        "quadratic_kappa": "quadratic kappa",
        "mae": "mean absolute error",
        **{row.key: row.name for row in CALIBRATION_ROWS},
    }

    def read(self, cell: str) -> str:
        return normalise(cell)

    def list_classes(self, labels: Sequence[Hashable]) -> Sequence[Hashable]:
        return labels

    def answer_constantly(
        self, labels: np.ndarray, names: Sequence[str], weights: np.ndarray | None = None
    ) -> np.ndarray:
        return np.eye(len(names))[np.bincount(labels, weights).argmax()]

    def activate(self, logits: "Tensor") -> "Tensor":
        return logits.softmax(-1)

    def decode(
        self, logits: np.ndarray, names: Sequence[str], gold: Gold | None = None, decided: Decisions | None = None
    ) -> Answers:
        probabilities = compute_probabilities(check_finite(logits), several=False)
        known = decided or {}
        thresholds = known.get("thresholds")
        if decided is None and gold is not None and (rule := gold.rule) is not None:
            thresholds = [0.0, 0.0]
            columns = probabilities[:, [rule.label]], (gold.labels == rule.label)[:, None]
            thresholds[rule.label] = float(tune_thresholds(*columns, rule, gold.weights)[0])
        if thresholds is not None and (len(names) != 2 or 0 not in thresholds):  # those of a baseline of several labels
            thresholds = None
        limits = known.get("set_limit"), known.get("least_confidence")
        return ClassAnswers(names, gold, logits, probabilities, thresholds, *limits)

    def describe(self, names: Sequence[str], decided: Decisions) -> Schema:
        probabilities = make_object(dict.fromkeys(names, PROBABILITY))
        answer = {"label": {"enum": names}, "probability": PROBABILITY, "probabilities": probabilities}
        if "least_confidence" in decided:
            answer |= {"label": {"enum": [*names, None]}, "abstained": {"type": "boolean"}}
        return make_object(answer | ({"label_set": make_array({"enum": names})} if "set_limit" in decided else {}))

    def encode(self, cells: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        return encode_names(cells, names)

    def measure(self, rows: pa.Table) -> Scores:
        names = list_names(rows)
        predictions, labels = (encode_names(rows.column(name).to_pylist(), names) for name in (PREDICTION, LABEL))
        probabilities = read_probabilities(rows, names)
        found: Scores = dict(score_classes(predictions, labels, names, probabilities))
        if (values := list_values(names)) is not None and max(predictions, default=0) < len(names):
            found |= measure_ordinals(predictions, labels, values)
        decided = read_decided(rows)
        if (thresholds := decided.get("thresholds")) and probabilities is not None:
            usual = score_classes(probabilities.argmax(1), labels, names)
            found |= {f"fixed_{name}": score for name, score in usual.items()}
            found |= name_each("threshold", names, thresholds)
        if (least := decided.get("least_confidence")) and probabilities is not None:
            is_answered = probabilities.max(axis=1) >= least
            found["answered"] = measure_mean(is_answered)
            found["answered_accuracy"] = measure_mean(predictions == labels, is_answered)
            found["least_confidence"] = least
        found |= name_each("count", names, np.bincount(labels, minlength=len(names)).tolist())
        return found if probabilities is None else found | measure_calibration(probabilities, labels)

    def mark_wrong(self, rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        labels, predictions = (rows.column(name).to_pylist() for name in (LABEL, PREDICTION))
        is_wrong = np.array([label != found for label, found in zip(labels, predictions, strict=True)], bool)
        names = list_names(rows)
        if (probabilities := read_probabilities(rows, names)) is None:
            return is_wrong, is_wrong.astype(float)
        return is_wrong, 1 - probabilities[np.arange(len(rows)), encode_names(labels, names)]


class SeveralLabels(Kind):
    """Any number of labels, each of which is right or wrong by itself."""

    problem_type = SEVERAL
    type = NAMES
    has_several = True
    scores = {
        "macro_f1": "macro F1",
        "micro_f1": "micro F1",
        "exact_match": "exact match",
        "fixed_macro_f1": "macro F1 at 0.5",
        "fixed_micro_f1": "micro F1 at 0.5",
        **{row.key: row.name for row in CALIBRATION_ROWS},
    }

    def read(self, cell: str) -> list[str]:
        parts = read_list(cell)
        return [normalise(part) for part in (cell.split(SEPARATOR) if parts is None else parts) if part.strip()]

    def list_classes(self, labels: Sequence[Hashable]) -> Sequence[Hashable]:
        return [name for row in labels for name in row]

    def answer_constantly(
        self, labels: np.ndarray, names: Sequence[str], weights: np.ndarray | None = None
    ) -> np.ndarray:
        return np.where(np.average(labels, axis=0, weights=weights) > 0.5, 1.0, -1.0)

    def activate(self, logits: "Tensor") -> "Tensor":
        return logits.sigmoid()

    def decode(
        self, logits: np.ndarray, names: Sequence[str], gold: Gold | None = None, decided: Decisions | None = None
    ) -> Answers:
        # In 64 bits, as for the thresholds: fp32 rounds the probabilities of likely labels to 1.
        probabilities = compute_probabilities(check_finite(logits), several=True)
        known = decided or {}
        thresholds, is_tuned = known.get("thresholds"), True
        if thresholds is None and gold is not None:
            thresholds = tune_thresholds(probabilities, gold.labels, gold.rule or F1, gold.weights).tolist()
        elif thresholds is None:
            thresholds, is_tuned = [FIXED_THRESHOLD] * len(names), False
        return LabelAnswers(names, gold, probabilities, list(thresholds), is_tuned, known.get("set_limit"))

    def describe(self, names: Sequence[str], decided: Decisions) -> Schema:
        probabilities, labels = make_object(dict.fromkeys(names, PROBABILITY)), make_array({"enum": names})
        answer = {"labels": labels, "probabilities": probabilities}
        return make_object(answer | ({"label_set": labels} if "set_limit" in decided else {}))

    def encode(self, cells: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        return mark_names(cells, names)

    def measure(self, rows: pa.Table) -> Scores:
        names = list_names(rows)
        predictions, labels = (mark_names(rows.column(name).to_pylist(), names) for name in (PREDICTION, LABEL))
        probabilities = read_probabilities(rows, names)
        found: Scores = dict(score_labels(predictions, labels, names, probabilities))
        found |= name_each("count", names, labels.sum(0).tolist())
        if thresholds := read_decided(rows).get("thresholds"):
            found |= name_each("threshold", names, thresholds)
        return found if probabilities is None else found | measure_calibration(probabilities, labels)

    def mark_wrong(self, rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        labels, predictions = (list(map(sorted, rows.column(name).to_pylist())) for name in (LABEL, PREDICTION))
        is_wrong = np.array([label != found for label, found in zip(labels, predictions, strict=True)], bool)
        names = list_names(rows)
        if (probabilities := read_probabilities(rows, names)) is None:
            return is_wrong, is_wrong.astype(float)
        return is_wrong, np.abs(probabilities - mark_names(labels, names)).mean(axis=1)


class Number(Kind):
    """A number; a model of transformers may also have several, each with a name."""

    problem_type = REGRESSION
    type = pa.float64()
    has_names = False
    scores = {
        "pearson": "Pearson correlation",
        "spearmanr": "Spearman correlation",
        "rmse": "root mean squared error",
        "r2": "R²",
    }

    def read(self, cell: str) -> float:
        return float(cell)

    def list_classes(self, labels: Sequence[Hashable]) -> Sequence[Hashable]:
        return []

    def answer_constantly(
        self, labels: np.ndarray, names: Sequence[str], weights: np.ndarray | None = None
    ) -> np.ndarray:
        return np.average(labels, weights=weights, keepdims=True)

    def activate(self, logits: "Tensor") -> "Tensor":
        return logits

    def decode(
        self, logits: np.ndarray, names: Sequence[str], gold: Gold | None = None, decided: Decisions | None = None
    ) -> Answers:
        kind = NumberAnswers if len(names) == 1 else NumbersAnswers
        return kind(names, gold, check_finite(logits))

    def describe(self, names: Sequence[str], decided: Decisions) -> Schema:
        if len(names) == 1:
            return make_object({"score": NUMBER_SCHEMA})
        return make_object({"scores": make_object(dict.fromkeys(names, NUMBER_SCHEMA))})

    def encode(self, cells: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        return np.array(cells, np.float64)

    def measure(self, rows: pa.Table) -> Scores:
        return dict(measure_numbers(read_numbers(rows, PREDICTION), read_numbers(rows, LABEL)))

    def mark_wrong(self, rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        errors = np.abs(read_numbers(rows, PREDICTION) - read_numbers(rows, LABEL))
        return errors > np.sqrt(np.mean(errors**2)), errors


ONE_NUMBER, SEVERAL_LABELS, SINGLE_LABEL = Number(), SeveralLabels(), SingleLabel()
# problem_type -> kind; where answers look like several of them, the first one is meant.
LABEL_KINDS: dict[str, Kind] = {kind.problem_type: kind for kind in (ONE_NUMBER, SEVERAL_LABELS, SINGLE_LABEL)}


def get_kind(rows: pa.Table) -> Kind:
    """Return the kind of the predictions of a table, or of the labels of a table without them."""
    form = rows.schema.field(PREDICTION if PREDICTION in rows.column_names else LABEL).type
    if pa.types.is_list(form) or pa.types.is_large_list(form):
        return SEVERAL_LABELS
    return ONE_NUMBER if pa.types.is_floating(form) or pa.types.is_integer(form) else SINGLE_LABEL


def get_trained_kind(config: "BertConfig") -> Kind:
    """Return the kind of a classifier, which many configurations leave to the number of labels."""
    usual = ONE_NUMBER if config.num_labels == 1 else SINGLE_LABEL
    return LABEL_KINDS[config.problem_type] if config.problem_type else usual


def list_values(names: Sequence[str]) -> np.ndarray | None:
    """Return (L,) the numbers of three or more classes that are whole numbers in their order, else None."""
    numbers = [parse_number(name) for name in names]
    if len(names) < 3 or any(number is None or number != round(number) for number in numbers):
        return None
    return np.array(numbers) if numbers == sorted(numbers) else None


def format_marks(marks: np.ndarray, names: Sequence[str]) -> pa.Array:
    """Return the names whose mark (S, L) is not 0, for each row."""
    return pa.array([[names[label] for label in np.flatnonzero(row)] for row in marks], NAMES)


def name_probabilities(probabilities: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the columns of the probabilities (S, L) in a prediction table."""
    return {f"{PROBABILITY_PREFIX}{name}": column for name, column in zip(names, probabilities.T, strict=True)}


def flatten_probabilities(result: Result) -> dict[str, Any]:
    """Return the columns of the probabilities of a result, and its label set as one text."""
    row = {f"{PROBABILITY_PREFIX}{label}": value for label, value in result["probabilities"].items()}
    return row | ({"label_set": SEPARATOR.join(result["label_set"])} if "label_set" in result else {})
