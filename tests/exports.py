"""Tiny models with heads and their ONNX exports, each made once per process, because an export takes seconds."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

from bertkit.inference import export as module
from bertkit.inference.export import export
from tests.world import write_head

LABELS = {0: "bad", 1: "so-so", 2: "good"}
VALUES = {  # head -> values of its configuration
    "BertForSequenceClassification": {"id2label": LABELS, "window_pooling": "mean"},
    "BertForTokenClassification": {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "num_hidden_layers": 1},
    "BertForQuestionAnswering": {"tau": 0.25, "num_hidden_layers": 1},
}
FAST = ("BertForSequenceClassification", "BertForPreTraining")
OTHERS = (
    "BertForTokenClassification",
    "BertForQuestionAnswering",
    "BertForMultipleChoice",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
)
HEADS = [*FAST, *(pytest.param(head, marks=pytest.mark.slow) for head in OTHERS)]
FOLDER = tempfile.TemporaryDirectory()  # removed at the end of the process


@cache
def write_export(head: str, **values) -> tuple[Path, Path]:
    """Return the directories of a tiny random model with a head, and of its export; tuples stand for lists."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if "labels" in values:
        values["id2label"] = dict(enumerate(values.pop("labels")))
    run = write_head(folder / "run", head, **{"num_hidden_layers": 1} | VALUES.get(head, {}) | values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_SECONDS", 0.01)
        export(str(run), folder / "export")
    return run, folder / "export"
