"""The mean over tokens as a layer of plain BERT: what it computes, in which classes it is, and what it learns."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import bertkit
from bertkit.model.checkpoint import load_model, reinitialize
from bertkit.model.onnx import quantize, write_onnx
from bertkit.model.onnx_model import ONNX_FILE, OnnxModel
from tests.conftest import NO_DROPOUT, make_batch, make_model
from tests.world import read_weights

HEAD = "BertForSequenceClassification"
LENGTHS = [2, 9, 5, 13]
KERNELS = ("packed", "eager", "sdpa")


@pytest.fixture
def saved(tmp_path):
    """Return a model whose last layer computes the mean, its directory, and the states below that layer."""
    model, batch = make_model(HEAD), make_batch(LENGTHS)
    with torch.no_grad():
        states = model.bert(**batch).last_hidden_state
    model.bert.add_mean_layer()
    model.save_pretrained(tmp_path / "mean")
    return model.eval(), tmp_path / "mean", states, batch


def test_the_last_state_is_the_mean_over_the_real_tokens(saved):
    model, _, states, batch = saved
    with torch.no_grad():
        outputs = model.bert(**batch)
    for number, length in enumerate(LENGTHS):
        mean = nn.functional.layer_norm(states[number, :length].mean(0), states.shape[-1:])
        for token in range(length):
            assert torch.cosine_similarity(outputs.last_hidden_state[number, token], mean, dim=0) > 0.999
        pooled = torch.tanh(0.5 * outputs.last_hidden_state[number, 0])
        torch.testing.assert_close(outputs.pooler_output[number], pooled)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_and_plain_transformers_give_the_same_answers(saved, kernel):
    model, folder, _, batch = saved
    with torch.no_grad():
        expected = model(**batch).logits
        ours = getattr(bertkit, HEAD).from_pretrained(folder, attn_implementation=kernel).eval()
        torch.testing.assert_close(ours(**batch).logits, expected, rtol=0, atol=1e-5)
        if kernel != "packed":
            stock = getattr(transformers, HEAD).from_pretrained(folder, attn_implementation=kernel).eval()
            torch.testing.assert_close(stock(**batch).logits, expected, rtol=0, atol=1e-5)


def test_int8_answers_are_close(saved, tmp_path):
    model, _, _, batch = saved
    write_onnx(model, tmp_path / ONNX_FILE)
    quantize(tmp_path / ONNX_FILE, tmp_path / "int8.onnx")
    with torch.no_grad():
        expected = model(**batch).logits.softmax(-1)
    found = OnnxModel(tmp_path / "int8.onnx", model.config, is_int8=True)(**batch).logits
    assert 0 < (torch.from_numpy(found).softmax(-1) - expected).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["windows", "half", "compiled", "causal"])
def test_other_ways_to_compute_it(saved, kind, tmp_path):
    model, folder, states, batch = saved
    load = getattr(bertkit, HEAD).from_pretrained
    with torch.no_grad():
        expected = model(**batch).logits
        if kind == "windows":  # two texts of two windows
            windows = {name: x.unflatten(0, (2, 2)) for name, x in batch.items()}
            found = load(folder, window_pooling="mean").eval()(**windows).logits
            expected = expected.unflatten(0, (2, 2)).mean(1)
        elif kind == "half":
            found = load(folder, dtype=torch.float16).eval()(**batch).logits.float()
        elif kind == "compiled":
            found = torch.compile(load(folder).eval(), backend="eager")(**batch).logits
        else:
            causal = make_model(HEAD, is_decoder=True)
            below = causal.bert(**batch).last_hidden_state
            causal.bert.add_mean_layer()
            found = causal.eval().bert(**batch).pooler_output
            means = [below[n, :length].mean(0) for n, length in enumerate(LENGTHS)]
            expected = torch.tanh(0.5 * nn.functional.layer_norm(torch.stack(means), states.shape[-1:]))
    tolerance = {"half": 0.02, "causal": 0.02}.get(kind, 1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "head", ["BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering"]
)
def test_other_classes_load_without_it(saved, head):
    _, folder, states, batch = saved
    model, _ = load_model(getattr(bertkit, head), str(folder), {})
    assert (model.config.num_hidden_layers, model.config.mean_layer) == (2, None)
    with torch.no_grad():
        torch.testing.assert_close(model.eval().base_model(**batch).last_hidden_state, states, rtol=0, atol=1e-6)
    bilstm, _ = load_model(bertkit.BertBiLSTMForSequenceClassification, str(folder), {})
    assert bilstm.config.num_hidden_layers == 2


def test_a_classifier_keeps_it_and_layers_are_counted_below_it(saved):
    _, folder, _, _ = saved
    labels = {"id2label": {0: "a", 1: "b"}}
    model, _ = load_model(getattr(bertkit, HEAD), str(folder), labels)
    assert (model.config.num_hidden_layers, model.config.mean_layer) == (3, True)
    reinitialize(model, 1)
    weights = {name: x.numpy() for name, x in model.state_dict().items()}
    before = {name: x.numpy() for name, x in read_weights(folder).items()}
    changed = {
        int(name.split(".")[3]) for name in before if ".layer." in name and (before[name] != weights[name]).any()
    }
    assert changed == {1}


def test_attention_stays_uniform_while_it_learns(saved):
    model, folder, _, batch = saved
    model = getattr(bertkit, HEAD).from_pretrained(folder, **NO_DROPOUT).train()
    layer, optimizer = model.bert.encoder.layer[-1], torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        optimizer.step()
    attention = layer.attention.self
    for part in (attention.query, attention.key, layer.intermediate.dense):
        np.testing.assert_array_equal(part.weight.detach(), 0)
    assert attention.value.weight.grad.abs().max() > 0
