"""Linear layers in oneDNN's order give the numbers of plain ones, and are plain wherever more is asked of them."""

import copy
import platform

import pytest
import torch
from torch import nn

from bertkit.model.cpu import OrderedLinear, order_weights
from bertkit.model.precision import cast_weights, use_precision
from tests.conftest import HEADS, collect, differ, make_batch, make_model, shape_for

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 only")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_predictions_do_not_change(head, precision):
    model, batch = make_model(head), shape_for(head, make_batch([3, 9, 5, 13]))
    cast_weights(model, precision)
    with use_precision(precision, torch.device("cpu")):
        expected = collect(model(**batch), batch["attention_mask"])
        order_weights(model)
        found = collect(model(**batch), batch["attention_mask"])
    orders = precision == "fp32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (sum(isinstance(module, OrderedLinear) for module in model.modules()) > 10) is orders
    tolerance = 2e-6 if precision == "fp32" else 2e-2
    assert all(x.dtype == expected[name].dtype for name, x in found.items())
    assert all(differ(x.float(), expected[name].float()) < tolerance for name, x in found.items())


def test_gradients_and_changed_weights_are_those_of_a_plain_layer():
    plain, x = nn.Linear(8, 5), torch.randn(3, 8, requires_grad=True)
    layer = copy.deepcopy(nn.Sequential(plain))
    order_weights(layer)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(*(torch.autograd.grad(each(x).sum(), x)[0] for each in (layer, plain)))
    assert list(layer.state_dict()) == ["0.weight", "0.bias"]
    for each in (plain, layer[0]):
        each.load_state_dict({name: values + 1 for name, values in each.state_dict().items()})
    with torch.inference_mode():
        assert torch.equal(layer(x), plain(x))
    plain.weight = layer[0].weight = nn.Parameter(torch.randn(5, 8))
    with torch.inference_mode():
        assert torch.equal(layer(x), plain(x))


def test_a_tied_decoder_and_other_types_stay_as_they_are():
    model, layer = make_model("BertForMaskedLM"), nn.Linear(8, 5, dtype=torch.float64)
    order_weights(model)
    order_weights(layer)
    assert type(model.cls.predictions.decoder) is type(layer) is nn.Linear
