"""accelerate: our heads with their weights in memory or on disk until they are used, compared with the loaded model."""

import pytest
import torch

from tests.clients.conftest import SIDES, build
from tests.conftest import HEADS, make_batch, shape_for

pytestmark = pytest.mark.clients

OURS_ALONE = (
    "BertBiLSTMForSequenceClassification",
    "BertBiLSTMForMultipleChoice",
    "BertBiLSTMForTokenClassification",
    "BertBiLSTMForQuestionAnswering",
    "BertFeaturesForTokenClassification",
)
CASES = [(head, side) for head in (*HEADS, *OURS_ALONE) for side in SIDES if side != "stock" or head in HEADS]


def keep_in_memory(model, folder):
    """Off-load all weights to memory."""
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def keep_on_disk(model, folder):
    """Off-load all weights to disk."""
    from accelerate import disk_offload

    return disk_offload(model, folder, execution_device=torch.device("cpu"))


def load_in_parts(model, folder):
    """Load a checkpoint with some parts on disk; a tied decoder has to be where the embeddings are."""
    model.save_pretrained(folder)
    prefix = "" if model.base_model is model else "bert."
    in_memory, on_disk = [f"{prefix}embeddings", f"{prefix}encoder.layer.0"], [f"{prefix}encoder.layer.1"]
    on_disk += [f"{prefix}pooler"] if model.base_model.pooler is not None else []
    if model.base_model is not model:
        above = in_memory if model.get_output_embeddings() is not None else on_disk
        above += [name for name, _ in model.named_children() if name != "bert"]
    return type(model).from_pretrained(
        folder,
        attn_implementation=model.config._attn_implementation,
        device_map=dict.fromkeys(in_memory, "cpu") | dict.fromkeys(on_disk, "disk"),
        offload_folder=folder / "offloaded",
    )


@pytest.mark.parametrize(("head", "side"), CASES)
@pytest.mark.parametrize("way", [keep_in_memory, keep_on_disk, load_in_parts])
def test_an_off_loaded_model_answers_as_the_one_at_hand(way, head, side, tmp_path):
    extra = {"feature_layers": "sum-all", "bilstm_hidden_size": 8} if "Features" in head else {}
    model = build(head, side, **extra)
    batch = shape_for(head.replace("BiLSTM", ""), make_batch([2, 9, 5, 13]))
    with torch.no_grad():
        expected = model(**batch).to_tuple()
        offloaded = way(model, tmp_path).eval()
        assert any(parameter.is_meta for parameter in offloaded.parameters())
        found = offloaded(**batch).to_tuple()
        again = offloaded(batch["input_ids"]).to_tuple()  # without a mask and segments
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, build(head, side, **extra)(batch["input_ids"]).to_tuple())
