"""GLUE, SQuAD and NER scores: pure functions, and for GLUE a module of `evaluate` that needs no network.

`evaluate.load` would fetch the same functions from the Hub, a script each.

Left out: which task has which metric (`bertkit.tasks`), the files (`bertkit.data.formats`), precision-recall curves of
SQuAD 2.0.
"""

from bertkit.metrics.glue import make_metric

__all__ = ["make_metric"]
