"""int8 exports: half of dev chooses the layers, the other half decides, and only what is proved is written."""

import numpy as np
import onnx
import pytest
import torch

from bertkit import Predictor
from bertkit.errors import UsageError
from bertkit.inference import export as module
from bertkit.inference import quantization
from bertkit.inference.export import explain_proof, export, make_batch
from bertkit.inference.export_record import find_export
from bertkit.inference.quantization import load_halves, prove
from bertkit.model.onnx import ONNX_FILE, OnnxModel, find_matrices, write_onnx
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
    assert "int8 loses at most 100 points of accuracy: proved" in lines
    assert [len(variant.exempt) for variant in record.int8.variants] == [0, 1, 2]
    assert record.int8.variants[0].size < record.int8.variants[2].size
    assert list(record.timings) == ["run", "fp32", "int8"]
    assert record.timings["int8"].size == record.int8.variants[record.int8.chosen].size < record.timings["fp32"].size
    proof = record.int8
    assert proof.score - proof.run_scores[1] == pytest.approx(proof.difference, abs=1e-3)
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


def prove_run(run, exact, folder, max_loss):
    """Return the proof of a run's int8 variants."""
    settings = Predictor(run, precision="fp32").settings
    return prove(*load_halves(str(run), settings), settings.model, exact, folder, max_loss)[0]


def test_a_few_rows_prove_nothing(rte, exact, tmp_path):
    """Even if no row differs: with N rows a loss of about 3.7 / N would go unnoticed."""
    proof = prove_run(rte, exact, tmp_path, 0.5)
    assert proof.verdict == "undecidable"
    assert proof.low < -0.5
    assert proof.needed is None or proof.needed > proof.rows
    line = explain_proof(proof)
    assert line.startswith(f"int8 loses at most 0.5 points of accuracy: undecidable with {proof.rows} rows; ")
    assert line.endswith("; the export is in fp32")


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
    assert prove_run(rte, exact, tmp_path, 5.0).verdict == "refused"


def test_the_layer_that_int8_ruins_is_the_first_to_stay_in_fp32(rte, tmp_path):
    """One unit of the attention's values is 1e5 times as large, so that int8 activations round all others to 0."""
    settings = Predictor(rte, precision="fp32").settings
    attention = settings.model.bert.encoder.layer[1].attention
    with torch.no_grad():
        for weight in (attention.self.value.weight, attention.self.value.bias):
            weight[0] *= 1e5
        attention.output.dense.weight[:, 0] /= 1e5  # so the model is the same
    write_onnx(settings.model, tmp_path / ONNX_FILE)
    proof, _ = prove(*load_halves(str(rte), settings), settings.model, tmp_path / ONNX_FILE, tmp_path, 10.0)
    assert proof.variants[1].exempt == [1]


def test_int8_answers_do_not_depend_on_the_batch(rte, tmp_path):
    model = Predictor(rte, precision="fp32").settings.model
    write_onnx(model, tmp_path / "fp32.onnx")
    quantize_exactly(tmp_path / "fp32.onnx", tmp_path / ONNX_FILE)
    exported = OnnxModel(tmp_path / ONNX_FILE, model.config, is_int8=True)
    lengths = [2, 31, 7, 12]
    batch = make_batch(model.config, lengths, chooses=False)
    together = exported(**batch).logits
    for place, length in enumerate(lengths):
        alone = exported(**{name: column[place : place + 1, :length] for name, column in batch.items()}).logits
        assert torch.equal(alone[0], together[place])


def test_without_a_recipe_there_is_nothing_to_prove(tmp_path):
    start = write_checkpoint(tmp_path / "bert")
    with pytest.raises(UsageError, match="is not a fine-tuned run, so there is no score that int8 could lose"):
        load_halves(str(start), None)
