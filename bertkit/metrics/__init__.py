"""Scores of every task as pure functions, and for GLUE an `evaluate` module that needs no network.

`evaluate.load` would download each of these metrics as a script from the Hub.

Left out: the choice of metric per task (`bertkit.tasks`), reading files (`bertkit.data.formats`), precision-recall
curves of SQuAD 2.0.
"""

from bertkit.metrics.glue import make_metric

__all__ = ["make_metric"]
