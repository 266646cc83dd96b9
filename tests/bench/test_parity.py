"""The parity of an update with stock transformers: heads that agree, and one that does not."""

import json

from bertkit.bench import parity
from bertkit.bench.parity import PARITY_HEADS, compare_heads

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}
LENGTHS = [2, 9, 5, 13]


def test_every_head_agrees_with_stock_in_every_precision():
    found = compare_heads(SMALL, LENGTHS)
    assert "failure" not in found
    assert json.loads(json.dumps(found)) == found
    assert tuple(found["heads"]) == PARITY_HEADS
    for by_precision in found["heads"].values():
        errors = [by_precision[precision]["gradients"]["bertkit"] for precision in ("fp32", "fp16", "bf16")]
        assert 0 < errors[0] < 1e-5 < errors[1] < errors[2] < 5e-2


def test_another_model_does_not_agree(monkeypatch):
    make_head = parity.make_head

    def make_wrong_head(*arguments):
        model = make_head(*arguments)
        model.bert.embeddings.LayerNorm.eps = 1e-3
        return model

    monkeypatch.setattr(parity, "make_head", make_wrong_head)
    monkeypatch.setattr(parity, "PARITY_HEADS", ["BertForMaskedLM"])
    lines = []
    found = compare_heads(SMALL, LENGTHS, lines.append)
    assert found["failure"].startswith("other losses or gradients than stock: BertForMaskedLM in fp32")
    assert lines[-1].endswith(", does not agree")
