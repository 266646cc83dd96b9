"""int8 exports: what they lose on dev, and the layers that stay in fp32 for a bound."""

import pytest
import torch

from bertkit import Predictor
from bertkit.errors import UsageError
from bertkit.inference import export as module
from bertkit.inference.evaluate import open_scored
from bertkit.inference.export import export, make_batch
from bertkit.inference.export_record import find_export
from bertkit.inference.quantization import choose_int8, load_dev, tabulate_int8
from bertkit.model.checkpoint import load_config
from bertkit.model.onnx import ONNX_FILE, OnnxModel, quantize, write_onnx
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_glue

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """Train a run that has learned RTE's rule."""
    folder = tmp_path_factory.mktemp("rte")
    recipe = {
        "checkpoint": str(write_checkpoint(folder / "bert")),
        "batch_size": 8,
        "precision": "fp32",
        "data": {"dir": str(write_glue(folder / "glue")), "max_length": 32},
        "train": {"max_steps": 150, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"},
    }
    metrics = run(Recipe.make(TASKS["rte"], recipe), output=folder / "run")
    assert metrics["accuracy"] > 0.8
    return folder / "run"


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
    texts = [("good", "good"), ("bad word1", "so")]
    expected, found = (
        Predictor(source, precision=how)(texts) for source, how in ((rte, "fp32"), (tmp_path / "x", "auto"))
    )
    for one, other in zip(expected, found, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=0.1)


@pytest.fixture(scope="module")
def exact(rte, tmp_path_factory):
    """Write the run's graph in fp32."""
    path = tmp_path_factory.mktemp("exact") / ONNX_FILE
    write_onnx(Predictor(rte, precision="fp32").settings.model, path)
    return path


def choose(run, predictor, exact, folder, max_loss):
    """Return the record of the int8 variants of a run's model."""
    dev = load_dev(open_scored(str(run), predictor))
    return choose_int8(dev, predictor.settings.model, exact, folder, max_loss)[0]


def test_a_loss_above_the_bound_in_every_variant_is_an_error(rte, exact, tmp_path):
    """Nothing gains 100 points."""
    with pytest.raises(UsageError, match=r"^int8 loses .* even if only .* is int8, more than --max-loss -100; raise"):
        choose(rte, Predictor(rte, precision="fp32"), exact, tmp_path, -100.0)


def test_the_layer_that_int8_ruins_is_the_first_to_stay_in_fp32(rte, tmp_path):
    """One unit of the attention's values is 1e5 times as large, so that int8 activations round all others to 0."""
    predictor = Predictor(rte, precision="fp32")
    attention = predictor.settings.model.bert.encoder.layer[1].attention
    with torch.no_grad():
        for weight in (attention.self.value.weight, attention.self.value.bias):
            weight[0] *= 1e5
        attention.output.dense.weight[:, 0] /= 1e5  # so the model is the same
    write_onnx(predictor.settings.model, tmp_path / ONNX_FILE)
    found = choose(rte, predictor, tmp_path / ONNX_FILE, tmp_path, 2.0)
    assert [variant.exempt for variant in found.variants] == [[], [1]]
    assert found.variants[0].difference < -2.0 <= found.variants[1].difference
    assert tabulate_int8(found).caption.endswith("; the layers were chosen on the same rows")


def test_int8_answers_do_not_depend_on_the_batch(rte, exact, tmp_path):
    quantize(exact, tmp_path / ONNX_FILE)
    config, lengths = load_config(str(rte)), [2, 31, 7, 12]
    exported, batch = OnnxModel(tmp_path / ONNX_FILE, config, is_int8=True), make_batch(config, lengths, chooses=False)
    together = exported(**batch).logits
    for row, length in enumerate(lengths):
        alone = exported(**{name: column[row : row + 1, :length] for name, column in batch.items()}).logits
        assert torch.equal(alone[0], together[row])
