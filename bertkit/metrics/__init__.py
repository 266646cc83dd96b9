"""GLUE, SQuAD and NER scores: pure functions, and `evaluate.Metric` modules over them that need no network.

`evaluate.load` would fetch the same functions from the Hub, a script each.

Left out: which task has which metric (`bertkit.tasks`), the files (`bertkit.data.formats`), precision-recall curves of
SQuAD 2.0.
"""

from bertkit.metrics.glue import make_metric
from bertkit.metrics.ner import make_ner_metric
from bertkit.metrics.squad import make_squad_metric

__all__ = ["make_metric", "make_ner_metric", "make_squad_metric"]
