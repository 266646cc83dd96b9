"""int8 exports: half of dev chooses the layers, the other half decides, and only what is proved is written."""

import numpy as np
import onnx
import pytest

from bertkit import Predictor
from bertkit.errors import UsageError
from bertkit.inference import export as module
from bertkit.inference import quantization
from bertkit.inference.export import explain_proof, export
from bertkit.inference.export_record import find_export
from bertkit.inference.quantization import prove
from bertkit.model.onnx import ONNX_FILE, find_matrices, write_onnx
from bertkit.model.onnx import quantize as quantize_exactly
from bertkit.tasks import TASKS
from bertkit.training.run import run
from tests.official import write_checkpoint, write_glue

pytest.importorskip("onnxruntime")
UPDATES = 150


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """Train a run that has learned RTE's rule."""
    folder = tmp_path_factory.mktemp("rte")
    recipe = {
        "checkpoint": str(write_checkpoint(folder / "bert")),
        "batch_size": 8,
        "precision": "fp32",
        "data": {"dir": str(write_glue(folder / "glue")), "max_length": 32},
        "train": {"max_steps": UPDATES, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"},
    }
    metrics = run(TASKS["rte"], recipe, output=folder / "run")
    assert metrics["accuracy"] > 0.8
    return folder / "run"


@pytest.fixture(scope="module")
def exact(rte, tmp_path_factory):
    """Write the run's graph in fp32."""
    path = tmp_path_factory.mktemp("exact") / ONNX_FILE
    write_onnx(Predictor(rte, precision="fp32").settings.model, path)
    return path


def test_int8_is_written_where_it_is_proved(rte, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    lines = []
    record, _ = export(str(rte), tmp_path / "x", lines.append, int8=True, max_loss=100.0)
    assert (record.precision, record.int8.verdict, record.int8.metric) == ("int8", "proved", "accuracy")
    assert "proved: that int8 loses at most 100 points of accuracy" in lines
    assert [len(variant.exempt) for variant in record.int8.variants] == [0, 1, 2]
    assert record.int8.variants[0].size < record.int8.variants[2].size
    assert find_export(str(tmp_path / "x")) == record
    assert "int8 in all layers" in (tmp_path / "x" / "README.md").read_text()
    graph = onnx.load(tmp_path / "x" / ONNX_FILE).graph
    assert any(node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul") for node in graph.node)
    texts = [("good", "good"), ("bad word1", "so")]
    expected, found = (
        Predictor(place, precision=how)(texts) for place, how in ((rte, "fp32"), (tmp_path / "x", "auto"))
    )
    for one, other in zip(expected, found, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=0.1)


def test_a_few_rows_prove_nothing(rte, exact, tmp_path):
    """Even if no row differs: with N rows a loss of about 3.7 / N would go unnoticed."""
    proof, _ = prove(str(rte), Predictor(rte, precision="fp32").settings, exact, tmp_path, 0.5)
    assert proof.verdict == "undecidable"
    assert proof.low < -0.5
    assert proof.needed is None or proof.needed > proof.rows
    line = explain_proof(proof)
    assert line.startswith(f"undecidable with {proof.rows} rows; ")
    assert line.endswith("that int8 loses at most 0.5 points of accuracy; the export is in fp32")


def test_a_model_that_int8_ruins_is_refused(rte, exact, tmp_path, monkeypatch):
    """The weights of every variant are random."""

    def ruin(path, output, exempt=()):
        quantize_exactly(path, output, list(find_matrices(path).values()))  # all of them stay in fp32
        model, rng = onnx.load(output), np.random.default_rng(0)
        for tensor in model.graph.initializer:
            if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT:
                values = rng.normal(size=list(tensor.dims)).astype(np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, output)

    monkeypatch.setattr(quantization, "quantize", ruin)
    proof, _ = prove(str(rte), Predictor(rte, precision="fp32").settings, exact, tmp_path, 5.0)
    assert proof.verdict == "refused"


def test_without_a_recipe_there_is_nothing_to_prove(tmp_path):
    start = write_checkpoint(tmp_path / "bert")
    with pytest.raises(UsageError, match="is not a fine-tuned run, so there is no score that int8 could lose"):
        quantization.load_halves(str(start), None)
