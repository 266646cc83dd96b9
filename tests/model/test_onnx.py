"""Models in ONNX take the place of their heads, in fp32 and in int8."""

import numpy as np
import pytest
import torch

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model import onnx as module
from bertkit.model.config import BertConfig
from bertkit.model.loss import IGNORE_INDEX
from bertkit.model.onnx import (
    CHOOSES,
    EMBEDDINGS,
    HEAD,
    ONNX_FILE,
    OnnxModel,
    list_layers,
    quantize,
    write_onnx,
)
from tests.conftest import NO_DROPOUT, TINY
from tests.exports import FAST, HEADS, write_export

SMALL = {**TINY, **NO_DROPOUT, "initializer_range": 0.3}


def make_batch(head, lengths, seed=0):
    """Return a batch of random tokens with padding, with two choices if the head has choices."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), *[2] * (head == CHOOSES), max(lengths))
    mask = torch.arange(shape[-1]) < torch.tensor(lengths).view(-1, *[1] * (len(shape) - 1))
    mask = mask.expand(shape)
    ids, segments = (torch.randint(0, most, shape, generator=draw) * mask for most in (15, 2))
    return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": segments}


def load_sides(head):
    """Return the run's model and that of its export."""
    return [Predictor(folder, precision="fp32").settings.model for folder in write_export(head)]


@pytest.mark.parametrize("head", HEADS)
def test_outputs_are_those_of_the_head_at_any_batch_size_and_length(head):
    model, exported = load_sides(head)
    assert (exported.head, exported.device.type) == (head, "cpu")
    for lengths in ([2], [128], [7, 3, 12, 5, 2]):
        batch = make_batch(head, lengths)
        with torch.inference_mode():
            expected = model(**batch)
        found = exported(**batch)
        assert list(found) == list(expected)
        real = batch["attention_mask"].bool()
        for name, values in found.items():
            same = expected[name]
            if values.dim() > real.dim():
                values, same = values[real], same[real]
            assert values.shape == same.shape
            torch.testing.assert_close(values, same, atol=1e-4, rtol=1e-4)


def test_only_the_logits_of_targets_are_returned():
    model, exported = load_sides("BertForPreTraining")
    batch = make_batch("BertForPreTraining", [9, 4, 6, 9, 2])
    labels = torch.full_like(batch["input_ids"], IGNORE_INDEX)
    labels[0, [2, 5]] = labels[2, 1] = labels[4, 1] = 7
    with torch.inference_mode():
        expected = model(**batch, labels=labels, targets_only=True)
    found = exported(**batch, labels=labels, targets_only=True)
    assert found.prediction_logits.shape == (4, exported.config.vocab_size)
    torch.testing.assert_close(found.prediction_logits, expected.prediction_logits, atol=1e-4, rtol=1e-4)
    assert found.seq_relationship_logits.shape == (5, 2)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_windows_of_a_text_are_pooled_as_by_the_head(pooling):
    model, exported = load_sides("BertForSequenceClassification")
    model.config.window_pooling = exported.config.window_pooling = pooling
    batch = {name: x.unflatten(0, (2, 3)) for name, x in make_batch("", [9, 4, 6, 5, 2, 9]).items()}  # (B, W, T)
    for values in batch.values():
        values[1, 1:] = 0  # the second text has one window
    with torch.inference_mode():
        expected = model(**batch).logits
    torch.testing.assert_close(exported(**batch).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_bilstm_cannot_be_exported(tmp_path):
    model = bertkit.BertBiLSTMForTokenClassification(BertConfig(**SMALL))
    with pytest.raises(UsageError, match="BertBiLSTMForTokenClassification has a BiLSTM, which cannot be exported"):
        write_onnx(model, tmp_path / ONNX_FILE)
    assert not list(tmp_path.iterdir())


# --- int8 -------------------------------------------------------------------------------------------------------------


def count_int8(path):
    """Return how many matrices of each layer are int8, and the number of int8 tables of embeddings."""
    import onnx

    graph = onnx.load(str(path)).graph
    products = [module.name_layer(node.name) for node in graph.node if node.op_type == "MatMulInteger"]
    tables = sum(node.op_type == "DequantizeLinear" for node in graph.node)
    return {layer: products.count(layer) for layer in products}, tables


def test_a_graph_names_its_axes_and_its_layers_and_no_file_of_this_machine():
    import onnx

    _, folder = write_export(FAST[0])
    graph = onnx.load(str(folder / ONNX_FILE)).graph
    for value in graph.input:
        assert [size.dim_param for size in value.type.tensor_type.shape.dim] == ["batch", "length"]
    assert list_layers(folder / ONNX_FILE) == [EMBEDDINGS, 0, HEAD]
    assert {node.domain for node in graph.node} == {""}, "standard operators only"
    assert b".py" not in (folder / ONNX_FILE).read_bytes()


@pytest.mark.parametrize("exempt", [(), (0,), (EMBEDDINGS,), (EMBEDDINGS, HEAD)])
def test_all_matrices_become_int8_except_those_of_exempt_layers(exempt, tmp_path):
    _, folder = write_export(FAST[0])
    quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE, exempt)
    products, tables = count_int8(tmp_path / ONNX_FILE)
    expected = {0: 6, HEAD: 2}  # query, key, value, output, and two of the feed-forward part; pooler, classifier
    assert products == {layer: count for layer, count in expected.items() if layer not in exempt}
    assert tables == (0 if EMBEDDINGS in exempt else 3)


def test_int8_answers_are_close_and_closer_with_exempt_layers(tmp_path):
    _, folder = write_export(FAST[0])
    exact = Predictor(folder).settings.model
    batch = make_batch(FAST[0], list(range(2, 40)))
    expected = exact(**batch).logits.softmax(-1)
    apart = {}
    for exempt in ((), (EMBEDDINGS, HEAD), (EMBEDDINGS, 0, HEAD)):
        quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE, exempt)
        found = OnnxModel(tmp_path / ONNX_FILE, exact.config, is_int8=True)(**batch).logits.softmax(-1)
        apart[len(exempt)] = float((found - expected).abs().mean())
    assert apart[3] < 1e-6 < apart[2] < apart[0] < 0.05


@pytest.mark.parametrize(("flag", "bits"), [("avx2", 7), ("avx512_vnni", 8)])
def test_weights_have_seven_bits_where_products_saturate(flag, bits, tmp_path, monkeypatch):
    import onnx
    from onnx import numpy_helper

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True})
    _, folder = write_export(FAST[0])
    quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE, [EMBEDDINGS])
    tensors = map(numpy_helper.to_array, onnx.load(str(tmp_path / ONNX_FILE)).graph.initializer)
    largest = max(int(np.abs(x.astype(int)).max()) for x in tensors if x.dtype == np.int8 and x.ndim == 2)
    assert 2 ** (bits - 2) < largest <= 2 ** (bits - 1)
