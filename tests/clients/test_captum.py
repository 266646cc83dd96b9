"""captum: attributions of a class to embeddings and layers, with padding in the batch, compared with stock."""

import pytest
import torch

from tests.clients.conftest import SIDES, build, check_as_stock
from tests.conftest import make_batch

pytestmark = pytest.mark.clients

HEAD = "BertForSequenceClassification"
EMBEDDINGS = ("bert.embeddings", "bert.embeddings.word_embeddings")
STEPS = 20


def get_logits(model):
    """Return a function of positional arguments, as captum calls it, that gives the logits."""

    def forward(given, mask, segments):
        name = "inputs_embeds" if given.is_floating_point() else "input_ids"
        return model(**{name: given}, attention_mask=mask, token_type_ids=segments).logits  # (B, L)

    return forward


def attribute_to_layer(side, layer):
    """Return LayerIntegratedGradients' attributions to a layer's output, and the mask of the batch."""
    from captum.attr import LayerIntegratedGradients

    model, batch = build(HEAD, side), make_batch([2, 9, 5, 13])
    ids, rest = batch["input_ids"], (batch["attention_mask"], batch["token_type_ids"])
    explain = LayerIntegratedGradients(get_logits(model), model.get_submodule(layer))
    attributions = explain.attribute(
        ids, baselines=torch.zeros_like(ids), additional_forward_args=rest, target=1, n_steps=STEPS
    )
    return attributions, batch["attention_mask"].bool()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layer", EMBEDDINGS)
def test_layer_integrated_gradients_of_embeddings_are_those_of_stock(layer, side):
    def measure(side):
        attributions, mask = attribute_to_layer(side, layer)  # (B, T, H)
        assert not attributions[~mask].any()
        return {"attributions": attributions}

    check_as_stock(measure, side)


@pytest.mark.parametrize("side", SIDES)
def test_layer_integrated_gradients_of_an_encoder_layer_are_those_of_stock(side):
    """Under packed attention a hook on an encoder layer sees the real tokens alone, (N, H)."""

    def measure(side):
        attributions, mask = attribute_to_layer(side, "bert.encoder.layer.0")
        return {"attributions": attributions if side == "packed" else attributions[mask]}  # (N, H)

    check_as_stock(measure, side)


@pytest.mark.parametrize("side", SIDES)
def test_integrated_gradients_of_input_embeddings_are_those_of_stock(side):
    from captum.attr import IntegratedGradients

    def measure(side):
        model, batch = build(HEAD, side), make_batch([2, 9, 5, 13])
        embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
        rest = (batch["attention_mask"], batch["token_type_ids"])
        attributions, delta = IntegratedGradients(get_logits(model)).attribute(
            embedded, additional_forward_args=rest, target=1, n_steps=STEPS, return_convergence_delta=True
        )
        assert not attributions[batch["attention_mask"] == 0].any()
        return {"attributions": attributions, "delta": delta}

    check_as_stock(measure, side)
