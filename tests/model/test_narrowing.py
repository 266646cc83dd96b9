"""The last layer computes only the states that a head reads, and the head gives the same."""

import pytest
import torch
from torch import Tensor

from bertkit.model import bert
from bertkit.model.bert import BertModel
from tests.conftest import NO_DROPOUT, differ, make_batch, make_labels, make_model, shape_for
from tests.model.inputs import make_inputs

LENGTHS = [3, 9, 5, 13, 1, 9]
SENTENCE_HEADS = ("BertForSequenceClassification", "BertForMultipleChoice", "BertForNextSentencePrediction")
TARGET_HEADS = ("BertForPreTraining", "BertForMaskedLM", "BertForTokenClassification")


@pytest.fixture
def narrowed(monkeypatch) -> list[int]:
    """Record the number of states that each narrowed forward pass reads."""
    found = []

    def spy(*args):
        layout = narrow(*args)
        found.append(int(layout.offsets[-1]))
        return layout

    narrow = bert.narrow
    monkeypatch.setattr(bert, "narrow", spy)
    return found


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("head", "has_indices"),
    [*((head, True) for head in (*SENTENCE_HEADS, *TARGET_HEADS)), *((head, False) for head in TARGET_HEADS[:2])],
)
def test_only_what_is_read_is_computed_and_the_loss_stays(head, has_indices, training, padding, narrowed, monkeypatch):
    """The Trainer's collator gives the indices; without padding the batch has no mask."""
    batch = make_batch([7] * 6 if padding == "none" else LENGTHS, left=padding == "left")
    inputs, model = shape_for(head, batch) | make_labels(head, batch), make_model(head, **NO_DROPOUT).train(training)
    inputs |= model.index_tokens(**inputs) if has_indices else {}
    inputs |= {"targets_only": True} if head in TARGET_HEADS[:2] else {}
    mask, labels = batch["attention_mask"], inputs["labels"]
    inputs |= {"attention_mask": None} if padding == "none" else {}
    loss = model(**inputs).loss
    is_read = mask.bool() & (mask.cumsum(1) == 1)
    assert narrowed == [int((is_read | (labels != -100) if head in TARGET_HEADS else is_read).sum())]
    monkeypatch.setattr(BertModel, "narrow", lambda self, layout, *args, **kwargs: layout)
    torch.testing.assert_close(model(**inputs).loss, loss)


WHOLE = {  # why all states are computed, where no parity test sees it -> head, its values, arguments of forward
    "configuration": ("BertForSequenceClassification", {"output_hidden_states": True}, {}),
    "all logits": ("BertForMaskedLM", {}, {"targets_only": False}),
    "unknown indices": ("BertForTokenClassification", {}, {}),
}


@pytest.mark.parametrize("reason", WHOLE)
def test_all_states_are_computed_where_they_are_read(reason, narrowed):
    head, values, options = WHOLE[reason]
    make_model(head, **values)(**make_inputs(head, LENGTHS), **options)
    assert not narrowed


@pytest.mark.parametrize("module", ["bert", *(f"bert.encoder{name}" for name in ("", ".layer.1", ".layer.1.output"))])
def test_a_hook_sees_all_states(module, narrowed):
    head = "BertForSequenceClassification"
    model, inputs = make_model(head), make_inputs(head, LENGTHS)
    expected = model(**inputs).logits
    assert narrowed.pop()
    seen = []
    model.get_submodule(module).register_forward_hook(lambda module, args, out: seen.append(out))
    logits = model(**inputs).logits
    assert not narrowed
    states = seen[0] if isinstance(seen[0], Tensor) else seen[0].last_hidden_state
    assert len(states) == (len(LENGTHS) if module == "bert" else sum(LENGTHS))  # (B, T, H) or (N, H)
    assert differ(logits, expected) < 2e-6
