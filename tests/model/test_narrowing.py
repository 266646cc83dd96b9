"""The last layer computes only the states that a head reads, with the same outputs and gradients as all states."""

import pytest
import torch
from torch import Tensor, nn

from bertkit.model import bert
from bertkit.model.bert import BertModel
from tests.conftest import NO_DROPOUT, collect, differ, make_batch, make_labels, make_model, shape_for

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


def make_inputs(head: str, padding: str = "right") -> dict[str, Tensor]:
    """Return a batch with labels; without padding it has no mask."""
    batch = make_batch([7] * 6 if padding == "none" else LENGTHS, left=padding == "left")
    inputs = shape_for(head, batch) | make_labels(head, batch)
    return {name: x for name, x in inputs.items() if padding != "none" or name != "attention_mask"}


def give_indices(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with the indices that the Trainer's collator gives."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return inputs | model.find_indices(**inputs | {"attention_mask": mask})


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs and gradients."""
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return dict(outputs), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_nothing_changes(model: nn.Module, inputs: dict[str, Tensor], monkeypatch) -> None:
    """Compare outputs and gradients with those of a last layer that computes all states."""
    outputs, gradients = run(model, inputs)
    monkeypatch.setattr(BertModel, "narrow", lambda self, layout, *args, **kwargs: layout)
    expected, whole = run(model, inputs)
    if "TokenClassification" in type(model).__name__:
        outputs, expected = (collect(x, inputs["labels"] != -100) for x in (outputs, expected))
    assert all(differ(x, expected[name]) < 2e-6 for name, x in outputs.items())
    assert gradients.keys() == whole.keys()
    largest = max(x.abs().max() for x in whole.values())
    assert all((x - whole[name]).abs().max() <= 2e-6 * largest for name, x in gradients.items())


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", [*SENTENCE_HEADS, *TARGET_HEADS])
def test_nothing_changes(head, training, padding, narrowed, monkeypatch):
    model, inputs = make_model(head, **NO_DROPOUT).train(training), make_inputs(head, padding)
    inputs = give_indices(model, inputs)
    if head in ("BertForPreTraining", "BertForMaskedLM"):
        inputs["targets_only"] = True
    assert_nothing_changes(model, inputs, monkeypatch)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).flatten(0, -2)
    is_read, labels = mask.bool() & (mask.cumsum(1) == 1), inputs["labels"]
    assert narrowed == [int((is_read | (labels != -100) if head in TARGET_HEADS else is_read).sum())]


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForMaskedLM"])
def test_nothing_changes_without_given_indices(head, padding, narrowed, monkeypatch):
    assert_nothing_changes(make_model(head, **NO_DROPOUT).train(), make_inputs(head, padding), monkeypatch)
    assert len(narrowed) == 1


WHOLE = {  # why all states are computed -> head, its values, arguments of forward
    "hidden states": ("BertForSequenceClassification", {}, {"output_hidden_states": True}),
    "padded": ("BertForSequenceClassification", {}, {"output_attentions": True}),
    "configuration": ("BertForSequenceClassification", {"output_hidden_states": True}, {}),
    "causal": ("BertForSequenceClassification", {"is_decoder": True}, {}),
    "all logits": ("BertForMaskedLM", {}, {"targets_only": False}),
    "answers": ("BertForQuestionAnswering", {}, {}),
    "BiLSTM": ("BertBiLSTMForSequenceClassification", {}, {}),
    "no layer": ("BertForSequenceClassification", {"num_hidden_layers": 0}, {}),
    "unknown indices": ("BertForTokenClassification", {}, {}),
}


@pytest.mark.parametrize("reason", WHOLE)
def test_all_states_are_computed_where_they_are_read(reason, narrowed):
    head, values, options = WHOLE[reason]
    kernel = "eager" if reason == "padded" else "packed"
    make_model(head, kernel, **values)(**make_inputs(head), **options)
    assert not narrowed


@pytest.mark.parametrize("module", ["bert", *(f"bert.encoder{name}" for name in ("", ".layer.1", ".layer.1.output"))])
def test_a_hook_sees_all_states(module, narrowed):
    head = "BertForSequenceClassification"
    model, inputs = make_model(head), make_inputs(head)
    expected = model(**inputs).logits
    assert narrowed.pop()
    seen = []
    model.get_submodule(module).register_forward_hook(lambda module, args, out: seen.append(out))
    logits = model(**inputs).logits
    assert not narrowed
    states = seen[0] if isinstance(seen[0], Tensor) else seen[0].last_hidden_state
    assert len(states) == sum(LENGTHS)
    assert differ(logits, expected) < 2e-6
