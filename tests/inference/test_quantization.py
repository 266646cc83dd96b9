"""int8 exports: what they lose on dev, and the layers that stay in fp32 for a bound."""

import numpy as np
import onnx
import pytest
import torch

from bertkit import Predictor
from bertkit.errors import UsageError
from bertkit.inference import export as module
from bertkit.inference import quantization
from bertkit.inference.evaluate import open_scored
from bertkit.inference.export import export, make_batch
from bertkit.inference.export_record import find_export
from bertkit.inference.quantization import choose_int8, load_dev, tabulate_int8
from bertkit.model.onnx import ONNX_FILE, OnnxModel, find_matrices, write_onnx
from bertkit.model.onnx import quantize as quantize_exactly
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_glue

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers.exporters")
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
    metrics = run(Recipe.make(TASKS["rte"], recipe), output=folder / "run")
    assert metrics["accuracy"] > 0.8
    return folder / "run"


@pytest.fixture(scope="module")
def exact(rte, tmp_path_factory):
    """Write the run's graph in fp32."""
    path = tmp_path_factory.mktemp("exact") / ONNX_FILE
    write_onnx(Predictor(rte, precision="fp32").settings.model, path)
    return path


def test_int8_is_written_with_what_it_loses(rte, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    lines = []
    record, _ = export(str(rte), tmp_path / "x", lines.append, int8=True)
    found, (variant,) = record.int8, record.int8.variants
    assert (record.precision, found.metric, found.max_loss, variant.exempt) == ("int8", "accuracy", None, [])
    assert variant.score - found.run_score == pytest.approx(variant.difference, abs=1e-3)
    assert variant.low <= variant.difference <= variant.high
    assert any(line.startswith("int8 in all layers: ") and f" with {found.rows} rows of dev" in line for line in lines)
    assert list(record.timings) == ["run", "fp32", "int8"]
    assert record.timings["int8"]["size"] == variant.size < record.timings["fp32"]["size"]
    assert find_export(str(tmp_path / "x")) == record
    assert "int8 in all layers" in (tmp_path / "x" / "README.md").read_text()
    graph = onnx.load(tmp_path / "x" / ONNX_FILE).graph
    assert any(node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul") for node in graph.node)
    texts = [("good", "good"), ("bad word1", "so")]
    expected, found = (
        Predictor(source, precision=how)(texts) for source, how in ((rte, "fp32"), (tmp_path / "x", "auto"))
    )
    for one, other in zip(expected, found, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=0.1)


def choose(run, exact, folder, max_loss, settings=None):
    """Return the record of a run's int8 variants."""
    predictor = Predictor(run, precision="fp32")
    predictor.settings = settings or predictor.settings
    dev = load_dev(open_scored(str(run), predictor))
    return choose_int8(dev, predictor.settings.model, exact, folder, max_loss)[0]


def test_a_model_that_int8_ruins_is_an_error_with_a_bound_only(rte, exact, tmp_path, monkeypatch):
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
    for folder in ("free", "bound"):
        (tmp_path / folder).mkdir()
    assert choose(rte, exact, tmp_path / "free", None).variants[0].difference < -10
    with pytest.raises(UsageError, match=r"^int8 loses .* even if only .* is int8, more than --max-loss 5; raise it"):
        choose(rte, exact, tmp_path / "bound", 5.0)


def test_the_layer_that_int8_ruins_is_the_first_to_stay_in_fp32(rte, tmp_path):
    """One unit of the attention's values is 1e5 times as large, so that int8 activations round all others to 0."""
    settings = Predictor(rte, precision="fp32").settings
    attention = settings.model.bert.encoder.layer[1].attention
    with torch.no_grad():
        for weight in (attention.self.value.weight, attention.self.value.bias):
            weight[0] *= 1e5
        attention.output.dense.weight[:, 0] /= 1e5  # so the model is the same
    write_onnx(settings.model, tmp_path / ONNX_FILE)
    found = choose(rte, tmp_path / ONNX_FILE, tmp_path, 2.0, settings)
    assert [variant.exempt for variant in found.variants] == [[], [1]]
    assert found.variants[0].difference < -2.0 <= found.variants[1].difference
    assert tabulate_int8(found).caption.endswith("; the layers were chosen on the same rows")


def test_int8_answers_do_not_depend_on_the_batch(rte, tmp_path):
    model = Predictor(rte, precision="fp32").settings.model
    write_onnx(model, tmp_path / "fp32.onnx")
    quantize_exactly(tmp_path / "fp32.onnx", tmp_path / ONNX_FILE)
    exported = OnnxModel(tmp_path / ONNX_FILE, model.config, is_int8=True)
    lengths = [2, 31, 7, 12]
    batch = make_batch(model.config, lengths, chooses=False)
    together = exported(**batch).logits
    for row, length in enumerate(lengths):
        alone = exported(**{name: column[row : row + 1, :length] for name, column in batch.items()}).logits
        assert torch.equal(alone[0], together[row])
