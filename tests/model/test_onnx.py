"""Graphs in ONNX, in fp32 and in int8; `tests/inference/test_export.py` compares their answers with those of a run."""

from collections import Counter

import numpy as np
import pytest
import torch

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.config import BertConfig
from bertkit.model.onnx import EMBEDDINGS, HEAD, ONNX_FILE, OnnxModel, list_layers, name_layer, quantize, write_onnx
from tests.conftest import TINY, make_batch
from tests.exports import FAST, write_export


def test_windows_of_a_text_are_pooled_as_by_the_head():
    model, exported = (Predictor(folder, precision="fp32").settings.model for folder in write_export(FAST[0]))
    batch = {name: x.unflatten(0, (2, 3)) for name, x in make_batch([9, 4, 6, 5, 2, 9], vocab_size=15).items()}
    for values in batch.values():  # (B, W, T); the second text has one window
        values[1, 1:] = 0
    with torch.inference_mode():
        expected = model(**batch).logits
    torch.testing.assert_close(exported(**batch).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_bilstm_cannot_be_exported(tmp_path):
    model = bertkit.BertBiLSTMForTokenClassification(BertConfig(**TINY))
    with pytest.raises(UsageError, match="BertBiLSTMForTokenClassification has a BiLSTM, which cannot be exported"):
        write_onnx(model, tmp_path / ONNX_FILE)
    assert not list(tmp_path.iterdir())


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
    import onnx

    _, folder = write_export(FAST[0])
    quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE, exempt)
    nodes = onnx.load(str(tmp_path / ONNX_FILE)).graph.node
    products = Counter(name_layer(node.name) for node in nodes if node.op_type == "MatMulInteger")
    expected = {0: 6, HEAD: 2}  # query, key, value, output, and two of the feed-forward part; pooler, classifier
    assert products == {layer: count for layer, count in expected.items() if layer not in exempt}
    assert sum(node.op_type == "DequantizeLinear" for node in nodes) == (0 if EMBEDDINGS in exempt else 3)


def test_int8_answers_are_close_and_closer_with_exempt_layers(tmp_path):
    _, folder = write_export(FAST[0])
    exact = Predictor(folder).settings.model
    batch = make_batch(list(range(2, 40)), vocab_size=15)
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
