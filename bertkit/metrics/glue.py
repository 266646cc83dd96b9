"""GLUE scores (paper section 4.1, Table 1), as functions and as an `evaluate` module.

Names are those of `evaluate`, values are fractions as plain floats.
"""

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.errors import UsageError
from bertkit.metrics.rows import measure_classes, measure_mean, measure_numbers, take_values

if TYPE_CHECKING:
    import evaluate

GLUE_INPUTS = """
Args:
    predictions: a class id or a label as text, or a number for pearson and spearmanr, for each example.
    references: the correct one for each example, in the same order.
    average, pos_label: as for scikit-learn's f1_score; by default f1 is that of class 1 of two classes.
"""
OF_NUMBERS = frozenset({"pearson", "spearmanr"})  # all metrics but these take class ids


def compute_scores(names: Sequence[str], predictions: Any, references: Any, **f1: Any) -> dict[str, float]:
    """Compute the named metrics and return them by name, in the order of `names`.

    Correlations are 0 where undefined: one side is constant, or has a single class.

    Args:
        predictions: (N,) class ids, labels as texts, or numbers.
        references: (N,) the correct ones.
        f1: Arguments of scikit-learn's f1_score, such as `average` and `pos_label`.
    """
    predictions, references = np.asarray(predictions), np.asarray(references)
    if predictions.dtype.kind != "U" and len(wrong := np.flatnonzero(~np.isfinite(predictions))):
        raise UsageError(
            f"prediction {wrong[0] + 1} of {len(predictions):,} is {predictions[wrong[0]]}, which cannot be scored; "
            "a model whose training diverged predicts such values: try a lower learning rate"
        )
    if not OF_NUMBERS.isdisjoint(names):
        found = measure_numbers(predictions, references)
    else:
        classes, numbers = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        found = measure_classes(*np.split(numbers, 2), len(classes))
        found["accuracy"] = measure_mean(predictions == references)
        if "f1" in names:
            from sklearn.metrics import f1_score

            found["f1"] = float(f1_score(references, predictions, zero_division=0.0, **f1))
    return take_values({name: found[name] for name in names})


def make_metric(*names: str) -> "evaluate.Metric":
    """Return an `evaluate` module that computes the named metrics.

    It keeps its examples in memory and writes no files. Values are float64 with `pearson` or `spearmanr`, otherwise
    int64 class ids or texts.
    """
    import datasets
    import evaluate

    kinds = ("int64", "string") if OF_NUMBERS.isdisjoint(names) else ("float64",)
    values = map(datasets.Value, kinds)

    class Module(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(
                description="Scores of the GLUE benchmark (Wang et al. 2019), each a fraction under its name.",
                citation="",
                inputs_description=GLUE_INPUTS,
                # No format="numpy": it rounds to float32.
                features=[datasets.Features({"predictions": value, "references": value}) for value in values],
            )

        def _compute(self, predictions: Any, references: Any, **f1: Any) -> dict[str, float]:
            return compute_scores(names, predictions, references, **f1)

    # evaluate creates a cache folder even if it writes no file, by default in the user's cache.
    with tempfile.TemporaryDirectory() as folder:
        return Module(config_name="+".join(names), keep_in_memory=True, cache_dir=folder)
