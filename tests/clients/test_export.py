"""torch.onnx, which begins with torch.export: graphs of our heads, of any batch size and length, and stock's."""

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


def predict(model, batch):
    """Return the outputs at real tokens."""
    with torch.no_grad():
        return collect(model(**batch), batch["attention_mask"])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("head", HEADS)
def test_onnxruntime_runs_an_export_at_any_batch_size_and_length(head, side, tmp_path):
    import onnxruntime

    model, example = build(head, side), make_inputs(head, EXAMPLE)
    model.config.return_dict = False  # a graph gives tensors
    dynamic = torch.export.Dim.DYNAMIC
    names = list(predict(build(head, "stock"), example))
    torch.onnx.export(
        model,
        (),
        tmp_path / "model.onnx",
        kwargs=example,
        input_names=list(example),
        output_names=names,
        dynamic_shapes={name: {0: dynamic, x.dim() - 1: dynamic} for name, x in example.items()},
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
