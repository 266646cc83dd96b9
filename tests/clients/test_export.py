"""torch.export and torch.onnx: graphs of our heads, of any batch size and length, beside stock."""

import pytest
import torch

from tests.clients.conftest import SIDES, build, check_same
from tests.conftest import HEADS, collect, make_batch, shape_for

pytestmark = pytest.mark.clients

EXAMPLE = [2, 9, 5, 13]
OTHERS = ([7, 7], [3, 40, 17, 2, 64, 11], [30, 8])  # lengths of other batches than the example


def make_inputs(head, lengths):
    """Return a batch as the head takes it."""
    return shape_for(head, make_batch(lengths))


def make_dynamic(batch):
    """Return for each input which of its dimensions vary: the batch, and the tokens, which are last."""
    return {name: {0: torch.export.Dim.DYNAMIC, x.dim() - 1: torch.export.Dim.DYNAMIC} for name, x in batch.items()}


def predict(model, batch):
    """Return the outputs at real tokens."""
    with torch.no_grad():
        return collect(model(**batch), batch["attention_mask"])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", HEADS)
def test_an_exported_program_answers_at_any_batch_size_and_length(head, side, tmp_path):
    model, example = build(head, side), make_inputs(head, EXAMPLE)
    program = torch.export.export(model, (), kwargs=example, dynamic_shapes=make_dynamic(example))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    stock = build(head, "stock")
    for lengths in (EXAMPLE, *OTHERS):
        batch = make_inputs(head, lengths)
        expected = predict(stock, batch)
        check_same(predict(program.module(), batch), expected)
        check_same(predict(loaded.module(), batch), expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", HEADS)
def test_onnxruntime_runs_an_export_at_any_batch_size_and_length(head, side, tmp_path):
    import onnxruntime

    model, example = build(head, side), make_inputs(head, EXAMPLE)
    model.config.return_dict = False  # a graph gives tensors
    names = list(predict(build(head, "stock"), example))
    torch.onnx.export(
        model,
        (),
        tmp_path / "model.onnx",
        kwargs=example,
        input_names=list(example),
        output_names=names,
        dynamic_shapes=make_dynamic(example),
        dynamo=True,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    stock = build(head, "stock")
    for lengths in (EXAMPLE, *OTHERS):
        batch = make_inputs(head, lengths)
        answers = session.run(names, {name: x.numpy() for name, x in batch.items()})
        found = dict(zip(names, map(torch.from_numpy, answers), strict=True))
        check_same(collect(found, batch["attention_mask"]), predict(stock, batch))
