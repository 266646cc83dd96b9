"""Graphs in ONNX, in fp32 and in int8; `tests/inference/test_export.py` compares their answers with those of a run."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

import bertkit
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.config import BertConfig
from bertkit.model.onnx import quantize, write_onnx
from bertkit.model.onnx_model import ONNX_FILE, OnnxModel
from tests.conftest import TINY, make_batch
from tests.exports import FAST, write_export


def test_windows_of_a_text_are_pooled_as_by_the_head():
    model, exported = (Predictor(folder, precision="fp32").settings.model for folder in write_export(FAST[0]))
    batch = {name: x.unflatten(0, (2, 3)) for name, x in make_batch([9, 4, 6, 5, 2, 9], vocab_size=15).items()}
    for values in batch.values():  # (B, W, T); the second text has one window
        values[1, 1:] = 0
    with torch.inference_mode():
        expected = model(**batch).logits
    found = torch.from_numpy(exported(**batch).logits)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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
    layers = {node.name.partition(".layer.")[2].split(".")[0] for node in graph.node if ".layer." in node.name}
    assert layers == {"0"}
    assert {node.domain for node in graph.node} == {""}, "standard operators only"
    assert b".py" not in (folder / ONNX_FILE).read_bytes()


def test_all_matrices_become_int8_and_answers_are_close(tmp_path):
    import onnx

    _, folder = write_export(FAST[0])
    quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE)
    types = [node.op_type for node in onnx.load(str(tmp_path / ONNX_FILE)).graph.node]
    # query, key, value, output, two of the feed-forward part, pooler and classifier; three tables of embeddings
    assert (types.count("MatMulInteger"), types.count("DequantizeLinear")) == (8, 3)
    exact = Predictor(folder).settings.model
    batch = make_batch(list(range(2, 40)), vocab_size=15)
    expected = softmax(exact(**batch).logits, -1)
    found = softmax(OnnxModel(tmp_path / ONNX_FILE, exact.config, is_int8=True)(**batch).logits, -1)
    assert 0 < np.abs(found - expected).mean() < 0.05


@pytest.mark.parametrize(("flag", "bits"), [("avx2", 7), ("avx512_vnni", 8)])
def test_weights_have_seven_bits_where_products_saturate(flag, bits, tmp_path, monkeypatch):
    import onnx
    from onnx import numpy_helper

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True})
    _, folder = write_export(FAST[0])
    quantize(folder / ONNX_FILE, tmp_path / ONNX_FILE)
    graph = onnx.load(str(tmp_path / ONNX_FILE)).graph
    factors = {node.input[1] for node in graph.node if node.op_type == "MatMulInteger"}
    tensors = [numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in factors]
    largest = max(int(np.abs(x.astype(int)).max()) for x in tensors)
    assert 2 ** (bits - 2) < largest <= 2 ** (bits - 1)
