"""A training whose layers are compiled."""

from types import SimpleNamespace

import pytest
import torch

from bertkit.model.config import BertConfig
from bertkit.model.heads import BertForSequenceClassification
from bertkit.tasks import TASKS
from bertkit.training import network
from bertkit.training.recipe import Recipe
from tests.tools.bench import arithmetic

LONG = 7_000  # updates of BERT-base


@pytest.fixture
def model():
    """A small model that says that it has the size of BERT-base."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=20))
    model.config = BertConfig()
    return model


def compile_if_long(model, monkeypatch, updates=LONG, device="cuda", processes=1, **train):
    """Return whether the layers are compiled, and the lines that say so."""
    monkeypatch.setattr(network, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(network.shutil, "which", lambda name: name == "gcc")
    recipe = Recipe.make(TASKS["pretrain"], {"batch_size": 256, "phase": [{"share": 1.0, "max_length": 128}]})
    recipe = Recipe.make(TASKS["pretrain"], recipe.to_dict(), {"train": train})
    compiles = train.get("torch_compile", False)
    args = SimpleNamespace(device=torch.device(device), world_size=processes, torch_compile=compiles)
    lines = []
    network.compile_if_long(recipe, args, model, updates, lines.append)
    return [layer._compiled_call_impl is not None for layer in model.bert.encoder.layer], lines


def test_a_long_training_on_cuda_compiles_its_layers(model, monkeypatch):
    names = list(model.state_dict())
    compiled, (line,) = compile_if_long(model, monkeypatch)
    assert compiled == [True, True]
    assert "torch_compile=false" in line
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    "other",
    [
        {"updates": 6_000},
        {"device": "cpu"},
        {"processes": 2},
        {"torch_compile": False},
        {"torch_compile": True},  # the Trainer compiles
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_other_trainings_stay_as_they_are(model, monkeypatch, other):
    assert compile_if_long(model, monkeypatch, **other) == ([False, False], [])


def test_the_bound_is_that_of_the_arithmetic():
    """A value of a token moves at the assumed bandwidth, and compiling takes the assumed time."""
    seconds = (arithmetic.EAGER - arithmetic.FUSED) / (arithmetic.BANDWIDTH * arithmetic.OF_BANDWIDTH)
    assert pytest.approx(arithmetic.COMPILING, rel=0.01) == network.PAID_BACK * seconds
