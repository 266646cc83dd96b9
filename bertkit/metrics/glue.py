"""GLUE scores (paper section 4.1, Table 1), as functions and as an `evaluate` module.

Names are those of `evaluate`, values are fractions as plain floats. scikit-learn and scipy compute them.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.errors import UsageError
from bertkit.metrics.rows import RowScore, measure_classes, measure_label, measure_mean, measure_numbers

if TYPE_CHECKING:
    import evaluate

GLUE_DESCRIPTION = "Scores of the GLUE benchmark, computed by scikit-learn and scipy."
GLUE_INPUTS = """
Args:
    predictions: a class id or a label as text, or a number for pearson and spearmanr, for each example.
    references: the correct one for each example, in the same order.
    average, pos_label: as for scikit-learn's f1_score; by default f1 is that of class 1 of two classes.
Returns:
    One fraction for each metric, keyed by its name.
"""
GLUE_CITATION = "Wang et al. (2019). GLUE: A Multi-Task Benchmark and Analysis Platform. ICLR."


def compute_accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the share of predictions that equal their reference."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def compute_f1(
    predictions: np.ndarray, references: np.ndarray, average: str = "binary", pos_label: int | str = 1
) -> float:
    """Return scikit-learn's F1: of one of two classes, by default class 1, or the average of any number of classes.

    It is 0 for a class that occurs neither in predictions nor in references.

    Raises:
        UsageError: There are other classes than the one and another, and no average is given.
    """
    from sklearn.metrics import f1_score

    classes = set(np.union1d(predictions, references).tolist())
    is_unknown = pos_label not in classes and not classes <= {0, 1}
    if average == "binary" and (len(classes) > 2 or is_unknown):
        shown = ", ".join(map(str, sorted(classes)[:5])) + (", …" if len(classes) > 5 else "")
        raise UsageError(
            f"f1 is that of one of two labels, here {pos_label}, and the labels are {shown}; give average='macro', "
            "'micro' or 'weighted' to compute, or pos_label='…' of two labels"
        )
    return float(f1_score(references, predictions, average=average, pos_label=pos_label, zero_division=0))


def compute_matthews(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the Matthews correlation of the classes, from -1 to 1.

    It is 0 where it is undefined: predictions or references contain a single class.
    """
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # raised for a single class on both sides
        return float(matthews_corrcoef(references, predictions))


def correlate(name: str, predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the scipy correlation of this name, from -1 to 1.

    It is 0 where it is undefined: one side is constant, or there is only one example.
    """
    from scipy import stats

    if len(predictions) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised for constant or nearly constant input
        value = float(getattr(stats, name)(predictions, references).statistic)
    return 0.0 if math.isnan(value) else value


# Each function takes finite predictions and references of shape (N,), N at least 1.
GLUE_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": compute_accuracy,
    "f1": compute_f1,
    "matthews_correlation": compute_matthews,
    "pearson": partial(correlate, "pearsonr"),
    "spearmanr": partial(correlate, "spearmanr"),  # Pearson correlation of the ranks; ties share their mean rank
}
OF_NUMBERS = frozenset({"pearson", "spearmanr"})  # the other metrics take class ids


def compute_scores(names: Sequence[str], predictions: Any, references: Any, **f1: Any) -> dict[str, float]:
    """Compute the named metrics and return them by name, in the order of `names`.

    Args:
        predictions: (N,) class ids, labels as texts, or numbers.
        references: (N,) the correct ones.
        f1: Arguments of `compute_f1`.

    Raises:
        UsageError: A prediction is NaN or infinite, or `f1` needs an average.
    """
    predictions, references = np.asarray(predictions), np.asarray(references)
    if predictions.dtype.kind == "f":
        predictions, references = predictions.astype(np.float64), references.astype(np.float64)
    if predictions.dtype.kind != "U" and len(places := np.flatnonzero(~np.isfinite(predictions))):
        raise UsageError(
            f"prediction {places[0] + 1} of {len(predictions):,} is {predictions[places[0]]}, which cannot be scored; "
            "a model whose training diverged predicts such values: try a lower learning rate"
        )
    return {name: GLUE_SCORES[name](predictions, references, **f1 if name == "f1" else {}) for name in names}


def measure_scores(
    names: Sequence[str], predictions: np.ndarray, references: np.ndarray, classes: int
) -> dict[str, RowScore]:
    """Return the scores of `compute_scores` as functions of the weights of the rows.

    Args:
        predictions: (N,) class ids or numbers.
        references: (N,) class ids or numbers.
        classes: The number of classes; any for numbers.
    """
    if not OF_NUMBERS.isdisjoint(names):
        found = measure_numbers(predictions, references)
    else:
        found = measure_classes(predictions, references, classes)
        found |= {"f1": measure_label(predictions == 1, references == 1)["f1"]}
        found |= {"accuracy": measure_mean(predictions == references)}
    return {name: found[name] for name in names}


def make_metric(*names: str) -> "evaluate.Metric":
    """Return an `evaluate` module that computes the named metrics.

    It keeps its examples in memory and writes no files. Values are float64 with `pearson` or `spearmanr`, otherwise
    int64 class ids or texts.

    Raises:
        UsageError: No metric is given, or one is unknown.
    """
    if not names or not GLUE_SCORES.keys() >= set(names):
        raise UsageError(f"unknown metric in {list(names)}; the metrics are {', '.join(GLUE_SCORES)}")
    import datasets
    import evaluate

    kinds = ("int64", "string") if OF_NUMBERS.isdisjoint(names) else ("float64",)
    values = map(datasets.Value, kinds)

    class Module(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(
                description=GLUE_DESCRIPTION,
                citation=GLUE_CITATION,
                inputs_description=GLUE_INPUTS,
                # No format="numpy": it rounds to float32.
                features=[datasets.Features({"predictions": value, "references": value}) for value in values],
            )

        def _compute(self, predictions: Any, references: Any, **f1: Any) -> dict[str, float]:
            return compute_scores(names, predictions, references, **f1)

    # evaluate creates a cache folder even if it writes no file, by default in the user's cache.
    with tempfile.TemporaryDirectory() as folder:
        return Module(config_name="+".join(names), keep_in_memory=True, cache_dir=folder)
