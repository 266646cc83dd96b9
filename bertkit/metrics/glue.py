"""The scores of GLUE (paper section 4.1, Table 1), as functions and as a module of `evaluate`.

The names are those of `evaluate`, the values fractions as plain floats; scikit-learn and scipy do the arithmetic.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
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
GLUE_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}
"""


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


def compute_pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Pearson's correlation, from -1 to 1; 0 where it is undefined: one side is constant, or there is one example."""
    from scipy.stats import pearsonr

    return _correlate(pearsonr, predictions, references)


def compute_spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal values having the mean of theirs."""
    from scipy.stats import spearmanr

    return _correlate(spearmanr, predictions, references)


def _correlate(function: Callable[..., Any], predictions: np.ndarray, references: np.ndarray) -> float:
    if len(predictions) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of input that is constant, or nearly
        value = float(function(predictions, references).statistic)
    return 0.0 if math.isnan(value) else value


# Each takes predictions and references (N,), N at least 1, finite; `compute_scores` checks that.
GLUE_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": compute_accuracy,
    "f1": compute_f1,
    "matthews_correlation": compute_matthews,
    "pearson": compute_pearson,
    "spearmanr": compute_spearman,
}
OF_NUMBERS = frozenset({"pearson", "spearmanr"})  # the others are of class ids


def compute_scores(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Metric -> value, in the order of `names`; `predictions` and `references` (N,) are class ids or numbers.

    Raises:
        UsageError: an unknown metric, no example, another number of predictions than of references, a NaN or an
            infinity, or a class id that is not whole.
    """
    _check_names(names)
    predictions, references = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if predictions.ndim != 1 or predictions.shape != references.shape:
        shapes = f"{describe_shape(predictions)} and references {describe_shape(references)}"
        raise UsageError(f"predictions {shapes} do not fit; give one prediction for each reference")
    if not len(predictions):
        raise UsageError("there are no predictions to score; give at least one, with its reference")
    for what, values in (("prediction", predictions), ("reference", references)):
        if len(places := np.flatnonzero(~np.isfinite(values))):
            raise UsageError(
                f"{what} {places[0] + 1} of {len(values):,} is {values[places[0]]}, which cannot be scored; "
                "a model whose training diverged predicts such values: try a lower learning rate"
            )
        if not OF_NUMBERS.issuperset(names) and len(places := np.flatnonzero(values % 1)):
            raise UsageError(
                f"{what} {places[0] + 1} of {len(values):,} is {values[places[0]]}, which is no class id; "
                "give whole numbers, or score with pearson or spearmanr"
            )
    return {name: GLUE_SCORES[name](predictions, references) for name in names}


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in GLUE_SCORES:
            raise UsageError(f"unknown metric {name!r}; the metrics are {', '.join(GLUE_SCORES)}")


def describe_shape(values: np.ndarray) -> str:
    """Return the shape as messages show it."""
    return f"({', '.join(map(str, values.shape))})"


def make_metric(*names: str) -> "evaluate.Metric":
    """A module of `evaluate` whose `compute` is `compute_scores` of `names`; it keeps what is added in memory.

    It takes class ids as int64, and with `pearson` or `spearmanr` numbers as float64.

    Raises:
        UsageError: no metric or an unknown one.
    """
    _check_names(names)
    if not names:
        raise UsageError(f"no metric given; the metrics are {', '.join(GLUE_SCORES)}")
    import datasets
    import evaluate

    class Glue(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            value = datasets.Value("int64" if OF_NUMBERS.isdisjoint(names) else "float64")
            # Without format="numpy", which rounds to float32.
            return evaluate.MetricInfo(
                description=GLUE_DESCRIPTION,
                citation=GLUE_CITATION,
                inputs_description=GLUE_INPUTS,
                features=datasets.Features({"predictions": value, "references": value}),
            )

        def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
            return compute_scores(names, predictions, references)

    return make_quiet(Glue, "+".join(names))


def make_quiet(module: type["evaluate.Metric"], name: str) -> "evaluate.Metric":
    """Return a metric that writes no files."""
    # evaluate makes a folder for its files even where it writes none: in the user's cache if none is given.
    with tempfile.TemporaryDirectory() as folder:
        return module(config_name=name, keep_in_memory=True, cache_dir=folder)
