"""torchao: our heads with int8 weights, and with int8 activations too, compared with stock."""

import pytest
import torch
import transformers

from tests.clients.conftest import SIDES, build
from tests.conftest import collect, differ, make_batch

pytestmark = pytest.mark.clients

HEADS = ("BertForMaskedLM", "BertForSequenceClassification")
KINDS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")


def make_config(kind):
    """Return torchao's configuration of that name."""
    import torchao.quantization

    return getattr(torchao.quantization, kind)()


def quantize(head, side, kind, folder):
    """Quantise a model in place."""
    from torchao.quantization import quantize_

    model = build(head, side)
    quantize_(model, make_config(kind))
    return model


def load_quantized(head, side, kind, folder):
    """Quantise a checkpoint while it is loaded."""
    model = build(head, side)
    model.save_pretrained(folder / side)
    return (
        type(model)
        .from_pretrained(
            folder / side,
            attn_implementation=model.config._attn_implementation,
            quantization_config=transformers.TorchAoConfig(make_config(kind)),
        )
        .eval()
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [quantize, load_quantized])
def test_a_quantised_model_answers_as_stock_quantised(way, kind, head, side, tmp_path):
    """Rounding of activations turns the last bit of fp32 into a step of int8, so that either side has int8's error."""
    torch.manual_seed(2)
    batch = make_batch([2, 9, 5, 13])
    mask = batch["attention_mask"]
    with torch.no_grad():
        model = way(head, side, kind, tmp_path)
        assert "int8" in type(model.bert.encoder.layer[0].attention.self.query.weight).__name__.lower()
        found = collect(model(**batch), mask)
        expected = collect(way(head, "stock", kind, tmp_path)(**batch), mask)
        exact = collect(build(head, "stock")(**batch), mask)
    for name in expected:
        error = differ(expected[name], exact[name])
        assert 1e-4 < error < 0.1
        assert differ(found[name], expected[name]) < (1e-5 if kind == "Int8WeightOnlyConfig" else 2 * error)
