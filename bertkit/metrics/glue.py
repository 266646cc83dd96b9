"""The scores of GLUE (paper section 4.1, Table 1), as functions and as a module of `evaluate`.

The names are those of `evaluate`, the values fractions as plain floats; scikit-learn and scipy do the arithmetic.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.errors import UsageError

if TYPE_CHECKING:
    import evaluate

GLUE_DESCRIPTION = "Scores of the GLUE benchmark, computed by scikit-learn and scipy."
GLUE_INPUTS = """
Args:
    predictions: a class id, or a number for pearson and spearmanr, for each example.
    references: the right one for each example, in the same order.
Returns:
    One fraction for each metric, under its name. f1 is that of class 1.
"""
GLUE_CITATION = "Wang et al. (2019). GLUE: A Multi-Task Benchmark and Analysis Platform. ICLR."


def compute_accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """The share of the predictions that equal their reference."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def compute_f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 if nothing is or was predicted to be of class 1."""
    from sklearn.metrics import f1_score

    # With one label the macro average is that label's F1; unlike average="binary" it takes other ids than 0 and 1.
    return float(f1_score(references, predictions, labels=[1], average="macro", zero_division=0))


def compute_matthews(predictions: np.ndarray, references: np.ndarray) -> float:
    """Matthews' correlation of the classes, from -1 to 1; 0 where it is undefined: one side has only one class."""
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of one class on both sides
        return float(matthews_corrcoef(references, predictions))


def correlate(name: str, predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the correlation that scipy has under a name, from -1 to 1.

    It is 0 where it is undefined: one side is constant, or there is one example.
    """
    from scipy import stats

    if len(predictions) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of input that is constant, or nearly
        value = float(getattr(stats, name)(predictions, references).statistic)
    return 0.0 if math.isnan(value) else value


# Each takes predictions and references (N,), N at least 1, finite.
GLUE_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": compute_accuracy,
    "f1": compute_f1,
    "matthews_correlation": compute_matthews,
    "pearson": partial(correlate, "pearsonr"),
    "spearmanr": partial(correlate, "spearmanr"),  # that of the ranks, equal values having the mean of theirs
}
OF_NUMBERS = frozenset({"pearson", "spearmanr"})  # the others are of class ids


def compute_scores(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Metric -> value, in the order of `names`; `predictions` and `references` (N,) are class ids or numbers.

    Raises:
        UsageError: a prediction is NaN or infinite.
    """
    predictions, references = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if len(places := np.flatnonzero(~np.isfinite(predictions))):
        raise UsageError(
            f"prediction {places[0] + 1} of {len(predictions):,} is {predictions[places[0]]}, which cannot be scored; "
            "a model whose training diverged predicts such values: try a lower learning rate"
        )
    return {name: GLUE_SCORES[name](predictions, references) for name in names}


def make_metric(*names: str) -> "evaluate.Metric":
    """Return a module of `evaluate` whose `compute` is `compute_scores` of `names`.

    It keeps what is added in memory and writes no files. It takes class ids as int64, and with `pearson` or `spearmanr`
    numbers as float64.

    Raises:
        UsageError: No metric, or an unknown one.
    """
    if not names or not GLUE_SCORES.keys() >= set(names):
        raise UsageError(f"unknown metric in {list(names)}; the metrics are {', '.join(GLUE_SCORES)}")
    import datasets
    import evaluate

    value = datasets.Value("int64" if OF_NUMBERS.isdisjoint(names) else "float64")

    class Module(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(
                description=GLUE_DESCRIPTION,
                citation=GLUE_CITATION,
                inputs_description=GLUE_INPUTS,
                # Without format="numpy", which rounds to float32.
                features=datasets.Features({"predictions": value, "references": value}),
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return compute_scores(names, predictions, references)

    # evaluate makes a folder for its files even where it writes none: in the user's cache if none is given.
    with tempfile.TemporaryDirectory() as folder:
        return Module(config_name="+".join(names), keep_in_memory=True, cache_dir=folder)
