"""Tasks keep the same of an export's outputs, arrays, as of tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bertkit.data.sequences import IGNORED
from bertkit.tasks import ANSWERING
from bertkit.tasks.task import PredictionSettings

NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = [f"word{number}" for number in range(30)]


class Tokenizer:
    """Knows some words by their numbers."""

    def __len__(self):
        return len(WORDS)

    def convert_ids_to_tokens(self, ids):
        return [WORDS[number] for number in ids]


def summarize_both(head, outputs, labels, redact=None):
    """Return what a task keeps of outputs as tensors and as arrays."""
    config = SimpleNamespace(id2label=dict(enumerate(NAMES)), num_labels=len(NAMES))
    model = SimpleNamespace(config=config, head=head)
    settings = PredictionSettings(model, Tokenizer(), {}, None, 3, redact=redact)
    found = []
    for convert in (torch.from_numpy, np.asarray):
        given = {name: convert(values) for name, values in outputs.items()}
        given = type("Outputs", (dict,), {"__getattr__": dict.__getitem__})(given)
        found.append(ANSWERING[head].summarize(given, {"labels": convert(labels)}, settings))
    assert isinstance(found[1], np.ndarray | list)
    return found


def draw(*shape):
    """Return random numbers in fp32, some of them equal."""
    return np.random.default_rng(0).normal(scale=3, size=shape).round(1).astype(np.float32)


@pytest.mark.parametrize("redact", [None, "types"])
def test_tags(redact):
    labels = np.where(draw(4, 9) > 0, 0, IGNORED)
    labels[1] = IGNORED  # a sequence without a word of its own
    logits = np.random.default_rng(1).normal(size=(4, 9, len(NAMES))).astype(np.float32)
    logits[0, labels[0].argmax()] = np.nan
    exact, found = summarize_both("BertForTokenClassification", {"logits": logits}, labels, redact)
    assert found.shape[2] == (3 if redact is None else 4)
    np.testing.assert_allclose(found, exact.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [7, 64])
def test_spans_with_equal_scores(length):
    outputs = {"start_logits": draw(5, length), "end_logits": draw(5, length)[::-1].copy()}
    exact, found = summarize_both("BertForQuestionAnswering", outputs, np.zeros((5, length)))
    np.testing.assert_array_equal(found, exact.numpy())


def test_masks():
    labels = np.full((3, 6), IGNORED)
    labels[0, 2] = labels[2, 1] = labels[2, 4] = 7
    logits = np.random.default_rng(0).normal(size=(3, len(WORDS) + 2)).astype(np.float32)  # (M, V)
    outputs = {"prediction_logits": logits, "seq_relationship_logits": draw(3, 2)}
    exact, found = summarize_both("BertForPreTraining", outputs, labels)
    for (words, pair), (others, other) in zip(exact, found, strict=True):
        np.testing.assert_array_equal(pair, other)
        for one, another in zip(words, others, strict=True):
            assert [word for word, _ in one] == [word for word, _ in another]
            np.testing.assert_allclose([p for _, p in one], [p for _, p in another], rtol=1e-5)
    assert [len(words) for words, _ in found] == [1, 0, 2]


def test_classes_and_endings():
    for head in ("BertForSequenceClassification", "BertForMultipleChoice"):
        exact, found = summarize_both(head, {"logits": draw(4, 5)}, np.zeros(4))
        np.testing.assert_array_equal(found, exact.numpy())
