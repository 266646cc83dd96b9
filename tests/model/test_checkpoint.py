"""Loading a checkpoint into another head: reused and randomly initialised weights, and damaged checkpoints."""

import json
import re

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, load_file, save_file

from bertkit import BertForMultipleChoice, BertForSequenceClassification
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import find_trouble, load_config, load_model
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.hub import Repo
from tests.official import write_checkpoint, write_glue

CLASSIFIER = ["classifier.bias", "classifier.weight"]


@pytest.mark.parametrize("labels", [("yes", "no"), ("similarity",)])
def test_a_classifier_does_not_become_the_vector_that_scores_endings(labels, tmp_path):
    had = write_checkpoint(tmp_path, labels=labels)
    model, new = load_model(BertForMultipleChoice, str(had), {})
    assert new == CLASSIFIER
    old = BertForSequenceClassification.from_pretrained(had).state_dict()
    assert model.classifier.weight.shape == (1, 32)
    assert not torch.equal(model.classifier.weight[0], old["classifier.weight"][0])
    assert 0 < model.classifier.weight.abs().max() <= 0.04  # the truncated normal of a new model
    for name, value in model.state_dict().items():
        assert name in CLASSIFIER or torch.equal(value, old[name]), name


def test_the_type_of_a_problem_belongs_to_its_labels(tmp_path):
    """Otherwise a regression model used as a classifier would train with the squared error."""
    model, _ = load_model(BertForSequenceClassification, str(write_checkpoint(tmp_path / "bert", labels=("a",))), {})
    ids = torch.tensor([[1, 5, 2]])
    model(ids, labels=torch.tensor([0.5]))
    model.save_pretrained(tmp_path / "scores")
    labels = {"id2label": {0: "yes", 1: "no"}}
    again, _ = load_model(BertForSequenceClassification, str(tmp_path / "scores"), labels)
    assert again.config.problem_type is None
    again(ids, labels=torch.tensor([1]))
    assert again.config.problem_type == "single_label_classification"
    assert load_config(str(tmp_path / "scores")).problem_type == "regression"


def test_class_weights_belong_to_a_training_run_and_its_labels(tmp_path):
    had = write_checkpoint(tmp_path, labels=("a", "b", "c"), class_weights=[1.0, 2.0, 3.0])
    assert load_model(BertForSequenceClassification, str(had), {})[0].config.class_weights is None
    labels = {"id2label": dict(enumerate(["c", "b", "a", "d"]))}
    assert load_model(BertForSequenceClassification, str(had), labels)[0].config.class_weights is None
    given = labels | {"class_weights": [4.0, 3.0, 2.0, 1.0]}
    assert load_model(BertForSequenceClassification, str(had), given)[0].config.class_weights == [4.0, 3.0, 2.0, 1.0]
    with pytest.raises(UsageError, match=r"class_weights cannot be used: .*3 weights for 4 labels; give one for each"):
        load_model(BertForSequenceClassification, str(had), given | {"class_weights": [1.0, 2.0, 3.0]})
    assert BertForSequenceClassification.from_pretrained(had).config.class_weights == [1.0, 2.0, 3.0]


def test_labels_that_differ_in_case_keep_their_own_weights(tmp_path):
    had = str(write_checkpoint(tmp_path, labels=("O", "B-PER", "B-per")))
    old = BertForSequenceClassification.from_pretrained(had).classifier.weight
    same, new = load_model(BertForSequenceClassification, had, {"id2label": {0: "B-per", 1: "O", 2: "B-PER"}})
    assert new == []
    assert torch.equal(same.classifier.weight, old[[2, 0, 1]])
    _, new = load_model(BertForSequenceClassification, had, {"id2label": {0: "o", 1: "b-per", 2: "B-per"}})
    assert new == CLASSIFIER, "the choice between the two is ambiguous"


# --- What is damaged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648; it must be at least 0 and at most 1000"),
        ({"num_labels": 2**31}, r"is damaged \(.*`\$.num_labels`.*\); give a directory"),
        ({"id2label": ["yes", "no"]}, r"is damaged \(.*`\$.id2label`.*\); give a directory"),
        ({"architectures": {"0": "BertModel"}}, r"is damaged \(.*`\$.architectures`.*\); give a directory"),
        ({"architectures": ["\ud800"]}, r"is damaged \(.*`\$.architectures\[.*\); give a directory"),
        ({"dtype": "-"}, r"is damaged \(.*\); give a directory"),
        ({"dtype": float("-inf")}, r"is damaged \(.*\); give a directory"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; expected 'absolute'"),
        ({"model_type": "\x1b[31m"}, r"is a model of type '\\x1b\[31m', not bert; give a directory"),
    ],
)
def test_a_damaged_configuration_is_one_line(tmp_path, values, message):
    path = write_checkpoint(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UsageError, match=message):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, None),
        ({"architectures": ["BertForMaskedLM"]}, None),
        ({"architectures": ["RobertaModel"]}, "has no model_type; if the model is a BERT, add"),
        ({"architectures": None, "type_vocab_size": None}, "has no model_type; if the model is a BERT, add"),
    ],
)
def test_a_configuration_without_a_type_is_that_of_a_bert_where_it_is_certain(tmp_path, values, message):
    path = write_checkpoint(tmp_path) / "config.json"
    content = {"architectures": None} | json.loads(path.read_text()) | values
    path.write_text(
        json.dumps({key: value for key, value in content.items() if key != "model_type" and value is not None})
    )
    if message is None:
        load_model(BertForSequenceClassification, str(tmp_path), {})
    else:
        with pytest.raises(UsageError, match=message):
            load_config(str(tmp_path))


def test_weights_of_data_parallel_and_of_nvidia_are_read(tmp_path):
    write_checkpoint(tmp_path, labels=("yes", "no"))
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        "module." + re.sub("(intermediate|pooler).dense", r"\1.dense_act", name): weights[name] for name in weights
    }
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    model, new = load_model(BertForSequenceClassification, str(tmp_path), {})
    assert new == []
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items() if name in weights)


def test_pairs_need_two_token_types(tmp_path):
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"), type_vocab_size=1)
    message = r"the model has 1 token type \(type_vocab_size\), but pairs.* need 2; use single texts, or"
    with pytest.raises(UsageError, match=message):
        Predictor(folder)([("good", "word1")])
    assert Predictor(folder)(["good word1"])
    data = {"dir": str(write_glue(tmp_path / "glue")), "max_length": 16}
    with pytest.raises(UsageError, match=message):
        run(Recipe.make(TASKS["rte"], {"checkpoint": str(folder), "data": data}), output=tmp_path / "run")


def test_a_run_that_is_not_finished_is_no_checkpoint_yet(tmp_path):
    (tmp_path / "recipe.toml").touch()
    with pytest.raises(UsageError, match=r"^the run in .* is not finished; repeat the command that started it$"):
        load_config(str(tmp_path))
    write_checkpoint(tmp_path)
    assert load_config(str(tmp_path)).hidden_size == 32


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"vocab_size": 256}, "embeddings.word_embeddings.weight"),
        ({"hidden_size": 64}, "embeddings.LayerNorm.bias"),
        ({"num_hidden_layers": 3}, "encoder.layer.2.attention.output.LayerNorm.bias"),
        ({"num_hidden_layers": 1}, "encoder.layer.1.attention.output.LayerNorm.bias"),
    ],
)
def test_weights_of_other_sizes_than_the_configuration_are_refused(tmp_path, values, named):
    path = write_checkpoint(tmp_path, labels=("yes", "no")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UsageError, match=rf"is damaged: its weights do not fit .* \(bert.{named}\); restore"):
        load_model(BertForSequenceClassification, str(tmp_path), {})


# --- From the Hub -----------------------------------------------------------------------------------------------------

LOADERS = {
    "config.json": lambda: load_config("ada/bert").to_dict(),
    "model.safetensors": lambda: load_model(BertForSequenceClassification, "ada/bert", {})[0].state_dict(),
    "tokenizer.json": lambda: load_tokenizer("ada/bert").get_vocab(),
}
FAULTS = {
    "cut off": {"sent": 10},
    "silent": {"sent": 10, "stall": 1.0},
    "in trouble": {"status": 503},
}


@pytest.fixture
def served(hub, tmp_path, monkeypatch):
    """Return a Hub with the model ada/bert and a timeout of a third of a second."""
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"))
    hub.repos["ada/bert"] = Repo(files={path.name: path.read_bytes() for path in folder.iterdir()})
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    find_trouble.cache_clear()
    yield hub
    find_trouble.cache_clear()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if name == "model.safetensors" or fault == "cut off" else pytest.mark.slow)
        for name in LOADERS
        for fault in FAULTS
    ],
)
def test_a_download_that_breaks_is_one_line_and_the_next_one_succeeds(served, name, fault):
    served.fail("GET", f"/{name}$", times=100, **FAULTS[fault])
    with pytest.raises(UsageError, match=r"could not be downloaded from the Hub \(|cannot be downloaded \(") as error:
        LOADERS[name]()
    assert "ada/bert" in str(error.value)
    assert "\n" not in str(error.value)
    served.faults.clear()
    assert LOADERS[name]()


def test_a_download_that_breaks_once_goes_on_where_it_was(served):
    served.fail("GET", "/model.safetensors$", sent=5000)
    found = LOADERS["model.safetensors"]()
    whole = load(served.repos["ada/bert"].files["model.safetensors"])
    assert whole
    assert all(torch.equal(found[name], weight) for name, weight in whole.items())
    asked = [one for one in served.asked if one.startswith("GET ") and one.endswith("/model.safetensors")]
    assert len(asked) >= 2
