"""BiLSTM heads, the frozen encoder, and features from its layers (Table 7)."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.prune import identity

from bertkit.model import bilstm, bilstm_heads
from bertkit.model.bilstm import FEATURE_LAYERS, BertBiLSTM, BertLayerMix, select_features, select_layers
from bertkit.model.config import BertConfig
from bertkit.model.packing import PACKED, lay_out
from tests.conftest import TINY, collect, differ, make_batch, make_labels, make_model, shape_for
from tests.model.inputs import KERNELS

TOPS = (
    "BertBiLSTMForSequenceClassification",
    "BertBiLSTMForMultipleChoice",
    "BertBiLSTMForTokenClassification",
    "BertBiLSTMForQuestionAnswering",
)
FINE_TUNED = (*TOPS, *(name.replace("BiLSTM", "") for name in TOPS))
LENGTHS = [17, 3, 40, 5]
FEATURES = {"feature_layers": "sum-last-four", "bilstm_hidden_size": 6, "num_hidden_layers": 4}


def prepare(head: str, lengths: list[int] = LENGTHS, **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a batch for the head, with labels."""
    plain, batch = head.replace("BiLSTM", ""), make_batch(lengths, **options)
    return shape_for(plain, batch), make_labels(plain, batch)


def make_features_model(**values) -> bilstm_heads.BertFeaturesForTokenClassification:
    """Return a tiny feature-based model with random parameters."""
    return make_model("BertFeaturesForTokenClassification", **(FEATURES | values))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bilstm_reads_each_sequence_by_itself(kernel: str) -> None:
    """A sentence is read where each direction has seen all of it."""
    module, batch = BertBiLSTM(8, 5), make_batch(LENGTHS)
    states = torch.randn(*batch["input_ids"].shape, 8)
    layout = lay_out(tuple(states.shape[:2]), batch["attention_mask"], kernel, states.device)
    packed = module(layout.pack(states), layout)
    found, sentences = layout.unpack(packed), module.read_sentence(packed, layout)  # (B, T, 10), (B, 10)
    for row, length in enumerate(LENGTHS):
        alone, (last, _) = module.lstm(states[row, :length])  # (T, 10), (4, 5): two layers in two directions
        torch.testing.assert_close(found[row, :length], alone)
        torch.testing.assert_close(sentences[row], last[2:].flatten())
        assert found[row, length:].abs().sum() == 0


def take_away(lstm: nn.LSTM) -> nn.LSTM:
    """Keep the weights elsewhere and bring them only for a call, as accelerate does."""
    weights = {name: x.data.clone() for name, x in lstm.named_parameters()}

    def place(device: str) -> None:
        for name, x in weights.items():
            lstm._parameters[name] = nn.Parameter(x.to(device), requires_grad=False)

    call = lstm.forward

    def forward(*args):
        place("cpu")
        states = call(*args)
        place("meta")
        return states

    lstm.forward = forward
    place("meta")
    return lstm


def prune(lstm: nn.LSTM) -> nn.LSTM:
    """Compute a weight in a hook, as torch's pruning does; it stays the same."""
    return identity(lstm, "weight_hh_l1")


class Subclass(nn.LSTM):
    """A class that a program puts there instead of another."""


def exchange(lstm: nn.LSTM) -> nn.LSTM:
    """Put another class in its place."""
    other = Subclass(lstm.input_size, lstm.hidden_size, num_layers=2, bidirectional=True)
    other.load_state_dict(lstm.state_dict())
    return other


@pytest.mark.parametrize("change", [take_away, prune, exchange])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", [TOPS[0], TOPS[2], "features"])
def test_an_lstm_with_a_hook_or_of_another_class_is_called(head: str, kernel: str, change) -> None:
    model = make_model(head, kernel) if head in TOPS else make_features_model()
    batch, calls = make_batch(LENGTHS), []
    with torch.no_grad():
        expected = model(**batch).logits
        model.bilstm.lstm = change(model.bilstm.lstm)
        call = model.bilstm.lstm.forward
        model.bilstm.lstm.forward = lambda *args: calls.append(1) or call(*args)
        torch.testing.assert_close(model(**batch).logits, expected)
    assert calls == [1]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [LENGTHS, [6], [4, 4, 4], [1, 1], [9, 1, 8, 2, 7, 3, 6, 4, 5, 11]])
def test_a_sequence_has_the_states_and_gradients_that_it_has_alone(lengths, layers):
    mask, lstm = make_batch(lengths)["attention_mask"], nn.LSTM(6, 5, num_layers=layers, bidirectional=True)
    tokens = torch.randn(sum(lengths), 6, requires_grad=True)
    packed = bilstm.run_bilstm(lstm, tokens, lay_out(tuple(mask.shape), mask, PACKED, mask.device))
    alone = torch.cat([lstm(part)[0] for part in tokens.split(lengths)])
    inputs = [tokens, *lstm.parameters()]
    found, expected = ([x, *torch.autograd.grad(x.cos().sum(), inputs)] for x in (packed, alone))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("head", TOPS)
def test_kernels_agree(head: str, left: bool) -> None:
    batch, labels = prepare(head, left=left)
    model = make_model(head)
    expected = model(**batch, **labels)
    for kernel in KERNELS[1:]:
        model.set_attn_implementation(kernel)
        found = collect(model(**batch, **labels), batch["attention_mask"])
        for name, value in collect(expected, batch["attention_mask"]).items():
            assert differ(found[name], value) < 1e-5, (kernel, name)


@pytest.mark.parametrize("head", TOPS)
def test_it_is_saved_and_loaded_and_stock_transformers_has_the_encoder(head: str, tmp_path: Path) -> None:
    batch, _ = prepare(head)
    model = make_model(head)
    model.save_pretrained(tmp_path)
    assert f'"{head}"' in (tmp_path / "config.json").read_text()
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    for name, value in model(**batch).items():
        torch.testing.assert_close(again.eval()(**batch)[name], value)
    flat = {name: column.view(-1, column.shape[-1]) for name, column in batch.items()}
    stock = transformers.AutoModel.from_pretrained(tmp_path).eval()(**flat).last_hidden_state
    real = flat["attention_mask"].bool()
    assert differ(stock[real], model.bert(**flat).last_hidden_state[real]) < 1e-5


@pytest.mark.parametrize("head", FINE_TUNED)
def test_a_frozen_encoder_does_not_learn_and_what_is_above_does(head: str) -> None:
    batch, labels = prepare(head)
    model = make_model(head)
    model.freeze_encoder()
    model.train()(**batch, **labels).loss.backward()
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith(("bert.embeddings.", "bert.encoder."))
        assert parameter.requires_grad != is_frozen, name
        assert (parameter.grad is None) == is_frozen, name
        shifts_all = head.endswith("ForMultipleChoice") and name == "classifier.bias"  # every choice alike
        assert is_frozen or shifts_all or parameter.grad.abs().sum() > 0, name


def test_a_frozen_encoder_has_no_dropout_and_the_head_keeps_its_own() -> None:
    batch, _ = prepare("BertForTokenClassification")
    model = make_model("BertForTokenClassification", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    model.freeze_encoder()
    model.train()
    states = [model.bert(**batch).last_hidden_state for _ in range(2)]
    assert torch.equal(*states)
    assert not torch.equal(*(model(**batch).logits for _ in range(2)))
    model.eval()
    assert torch.equal(*(model(**batch).logits for _ in range(2)))


def test_the_six_rows_of_table_7_name_these_layers() -> None:
    states = tuple(torch.full((1, 2, 3), float(number)) for number in range(13))  # the embeddings and twelve layers
    found = {name: select_features(states, name)[0, 0, :, 0].tolist() for name in FEATURE_LAYERS}
    assert found == {
        "embeddings": [0],
        "second-to-last": [11],
        "last": [12],
        "sum-last-four": [9, 10, 11, 12],
        "concat-last-four": [9, 10, 11, 12],
        "sum-all": [*range(1, 13)],
    }


def test_any_layers_are_named_by_number() -> None:
    names = {"3": [3], "-3": [10], "0": [0], "1,5,9": [1, 5, 9], "-1, 1": [12, 1], "all": [*range(1, 13)]}
    assert {name: select_layers(name, 12) for name in names} == {
        name: (numbers, "concatenation") for name, numbers in names.items()
    }
    states = tuple(torch.full((1, 2, 3), float(number)) for number in range(13))
    assert select_features(states, "9,-3")[0, 0, :, 0].tolist() == [9, 10]
    for name in ("", "first", "13", "-14", "1,,2", "1.5", "1,all"):
        with pytest.raises(ValueError, match=f"unknown layers '{name}'; .*all, or numbers from -13 to 12 joined by"):
            select_layers(name, 12)
    for name, least in {"sum-last-four": 4, "second-to-last": 2}.items():
        with pytest.raises(ValueError, match=f"{name} needs {least} layers, but the model has {least - 1}"):
            make_features_model(feature_layers=name, num_hidden_layers=least - 1)


def test_layers_are_mixed_as_named() -> None:
    features = torch.arange(24.0).view(2, 4, 3)  # two tokens, four layers, H = 3
    values = TINY | FEATURES | {"hidden_size": 3, "num_attention_heads": 3}
    joined = BertLayerMix(BertConfig(**values | {"feature_layers": "concat-last-four"}))
    assert joined(features).tolist() == features.flatten(-2).tolist()
    total = BertLayerMix(BertConfig(**values))
    torch.testing.assert_close(total(features), features.mean(dim=1))  # equal weights at first
    total.weights.data.copy_(torch.tensor([0.0, 100.0, 0.0, 0.0]))
    torch.testing.assert_close(total(features), features[:, 1])
    assert (joined.size, total.size) == (12, 3)


@pytest.mark.parametrize("layers", FEATURE_LAYERS)
def test_features_that_were_computed_before_give_the_same(layers: str) -> None:
    model = make_features_model(feature_layers=layers)
    batch = make_batch(LENGTHS)
    positions = torch.tensor([[1, 4, 7], [1, 2, -1], [5, 6, 30], [2, -1, -1]])
    labels = torch.tensor([[0, 1, 2], [1, 1, -100], [2, 0, 1], [2, -100, -100]])
    expected = model(**batch, word_positions=positions, labels=labels)
    states = model.bert(**batch, output_hidden_states=True).hidden_states
    chosen = select_features(states, layers)[torch.arange(4)[:, None], positions.clamp(min=0)]  # (B, W, K, H)
    found = model(features=chosen, attention_mask=(positions >= 0).long(), labels=labels)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    assert expected.logits[positions < 0].abs().sum() == 0


def test_the_encoder_of_a_feature_based_model_is_frozen_and_the_rest_learns(tmp_path: Path) -> None:
    make_model("BertModel", num_hidden_layers=4).save_pretrained(tmp_path)
    model = bilstm_heads.BertFeaturesForTokenClassification.from_pretrained(tmp_path, **FEATURES, num_labels=3)
    assert model.mix.weights.tolist() == [0.0] * 4
    batch = make_batch(LENGTHS)
    labels = torch.randint(3, batch["input_ids"].shape).masked_fill(batch["attention_mask"] == 0, -100)
    model.train()(**batch, labels=labels).loss.backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if not name.startswith("bert.")}
    model.save_pretrained(tmp_path / "trained")
    again = type(model).from_pretrained(tmp_path / "trained")
    torch.testing.assert_close(again.eval()(**batch).logits, model.eval()(**batch).logits, rtol=0, atol=0)
    assert again.is_frozen
