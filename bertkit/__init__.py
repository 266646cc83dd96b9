"""bertkit: pretrain BERT on your own text, fine-tune it on everything the paper did, and know how far to trust it.

Public names are imported on first use: `import bertkit` alone loads neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"  # pyproject.toml reads it; a checkout works without being installed

_HOMES = {
    "bertkit.api": ("Run", "expect", "load", "train"),
    "bertkit.estimator": ("BertClassifier",),
    "bertkit.model.config": ("BertConfig",),
    "bertkit.errors": ("BertkitWarning", "UsageError"),
    "bertkit.model.bert": ("BertModel",),
    "bertkit.model.heads": (
        "BertForMultipleChoice",
        "BertForQuestionAnswering",
        "BertForSequenceClassification",
        "BertForTokenClassification",
    ),
    "bertkit.model.bilstm_heads": (
        "BertBiLSTMForMultipleChoice",
        "BertBiLSTMForQuestionAnswering",
        "BertBiLSTMForSequenceClassification",
        "BertBiLSTMForTokenClassification",
        "BertFeaturesForTokenClassification",
    ),
    "bertkit.model.packing": ("Packed", "Padded"),
    "bertkit.model.pretraining_heads": (
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
        "BertForPreTraining",
        "BertLMHeadModel",
    ),
    "bertkit.model.optim": ("BertAdam",),
    "bertkit.inference.predictor": ("Predictor",),
    "bertkit.training.recipe": ("read_recipe",),
    "bertkit.tasks": ("TASKS", "Task"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'bertkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
