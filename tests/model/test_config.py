"""The configuration: BERT-base by default, refuses what does not fit together, and is transformers' own JSON."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import bertkit
from bertkit import BertForSequenceClassification
from bertkit.model.bert import BertModel
from bertkit.model.config import BertConfig
from tests.conftest import TINY, make_batch, make_model, make_twin


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({}, 109_482_240),
        (
            {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
            335_141_888,
        ),
    ],
    ids=["base", "large"],
)
def test_sizes_give_the_published_number_of_parameters(sizes: dict[str, int], count: int) -> None:
    """The paper rounds to 110 M and 340 M; the exact numbers are those of the released uncased checkpoints."""
    with torch.device("meta"):
        model = BertModel(BertConfig(**sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_every_default_is_transformers_own() -> None:
    stock = transformers.BertConfig().to_dict()
    assert {key: BertConfig().to_dict().get(key) for key in stock} == stock


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size 30 is not divisible by num_attention_heads 4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be at least 0 and at most 1000"),
        ({"hidden_dropout_prob": 1.1}, "hidden_dropout_prob is 1.1; it must be at least 0 and at most 1"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02; it must be at least 0"),
        ({"initializer_range": math.nan}, "initializer_range is nan; it must be at least 0"),
        ({"layer_norm_eps": -1e-12}, "layer_norm_eps is -1e-12; it must be at least 0"),
        ({"hidden_act": "gellu"}, "hidden_act 'gellu' is unknown; the paper uses 'gelu'"),
        ({"hidden_size": "768"}, "hidden_size"),
        ({"class_weights": [1.0, math.nan]}, "weights must be finite"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(StrictDataclassError) as error:
        BertConfig(**values)
    assert message in f"{error.value} {error.value.__cause__}"


@pytest.mark.parametrize(
    "values",
    [{"initializer_range": 1e-7}, {"initializer_range": 0.0}, {"layer_norm_eps": 0.0}, {"num_hidden_layers": 0}],
)
def test_what_transformers_takes_is_taken_and_trains(values: dict, tmp_path: Path) -> None:
    BertForSequenceClassification(BertConfig(**TINY | values)).save_pretrained(tmp_path)
    for library in (transformers, bertkit):
        loaded = library.BertForSequenceClassification.from_pretrained(tmp_path).train()
        loss = loaded(**make_batch([3, 7]), labels=torch.tensor([0, 1])).loss
        loss.backward()
        assert loss.isfinite()


@pytest.mark.parametrize("deviation", [1e-7, 0.0])
def test_the_smallest_deviations_give_weights_within_them(deviation: float) -> None:
    model = BertModel(BertConfig(**TINY, initializer_range=deviation))
    weight = model.encoder.layer[0].output.dense.weight
    assert weight.abs().max() <= 2 * deviation
    assert bool(weight.any()) == bool(deviation)


@pytest.mark.parametrize("kernel", ["packed", "eager"])
def test_a_rate_of_one_drops_all_as_in_transformers(kernel: str) -> None:
    """Nothing but biases reaches the output, the same for every text."""
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 1.0)
    model = make_model("BertForSequenceClassification", kernel, **rates)
    batch = make_batch([3, 7])
    twin = make_twin(model).train()
    logits = model.train()(**batch).logits
    torch.testing.assert_close(logits, twin(**batch).logits)
    torch.testing.assert_close(logits[0], model.classifier.bias)
    logits.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())


def test_transformers_json_round_trips(tmp_path: Path) -> None:
    values = TINY | {"is_decoder": True, "classifier_dropout": 0.3, "id2label": {0: "no", 1: "yes"}}
    transformers.BertConfig(**values, use_cache=False).save_pretrained(tmp_path / "stock")
    config = BertConfig.from_pretrained(tmp_path / "stock")
    config.save_pretrained(tmp_path / "ours")
    stock, mine = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "ours"))
    assert mine == stock
    back = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert type(back) is transformers.BertConfig
    assert back.id2label == config.id2label == {0: "no", 1: "yes"}


def test_thresholds_are_kept_and_written_only_if_set(tmp_path: Path) -> None:
    BertConfig(**TINY, thresholds=[0.25, 1]).save_pretrained(tmp_path)
    assert BertConfig.from_pretrained(tmp_path).thresholds == [0.25, 1]
    assert "thresholds" not in BertConfig(**TINY).to_dict()


def test_keys_of_other_programs_survive(tmp_path: Path) -> None:
    old = TINY | {"model_type": "bert", "position_embedding_type": "absolute", "transformers_version": "4.8.2"}
    old |= {"gradient_checkpointing": False, "_name_or_path": "somewhere/else", "my_key": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    BertConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["position_embedding_type"] == "absolute"
    assert written["my_key"] == [1, 2]
    assert {key: written[key] for key in TINY} == TINY
    assert written["model_type"] == "bert"
