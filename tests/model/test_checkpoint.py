"""Loading a checkpoint into another head: reused and randomly initialised weights, and damaged checkpoints."""

import json
import re

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from bertkit import BertForMultipleChoice, BertForSequenceClassification
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import find_file, fold_targets, load_config, load_model
from bertkit.model.precision import cast_weights, use_precision
from bertkit.system.hub import explain_trouble
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
    assert BertForSequenceClassification.from_pretrained(had).config.class_weights == [1.0, 2.0, 3.0]


def test_a_regression_is_brought_to_other_numbers_and_back_and_its_answers_stay(tmp_path):
    """Loss by hand: the mean square of (answer - label) / deviation."""
    numbers = {"id2label": {0: "price"}, "target_scale": [1950.0, 20.0], "problem_type": "regression"}
    inputs = {"input_ids": torch.tensor([[1, 5, 2], [1, 7, 2]]), "labels": torch.tensor([1990.0, 1900.0])}
    given = write_checkpoint(tmp_path / "given", labels=("price",))
    expected = BertForSequenceClassification.from_pretrained(given).eval()(inputs["input_ids"]).logits
    model, new = load_model(BertForSequenceClassification, str(given), numbers)
    assert new == []
    outputs = model.eval()(**inputs)
    assert torch.allclose(outputs.logits, expected, atol=1e-3)  # fp32 has seven digits of 1,950
    assert outputs.loss.item() == pytest.approx(((expected[:, 0] - inputs["labels"]) / 20).square().mean().item(), 1e-4)

    model.save_pretrained(tmp_path / "inside")  # as a checkpoint inside a training
    assert load_config(str(tmp_path / "inside")).target_scale == [1950.0, 20.0]
    inside = BertForSequenceClassification.from_pretrained(tmp_path / "inside").eval()
    assert torch.equal(inside(inputs["input_ids"]).logits, outputs.logits)
    folded, _ = load_model(BertForSequenceClassification, str(tmp_path / "inside"), {})
    assert folded.config.target_scale is None
    assert torch.allclose(folded.eval()(inputs["input_ids"]).logits, outputs.logits, atol=1e-3)
    fold_targets(model)
    model.save_pretrained(tmp_path / "finished")
    stars = numbers | {"target_scale": [3.0, 2.0]}
    brought, new = load_model(BertForSequenceClassification, str(tmp_path / "finished"), stars)
    assert new == []
    deviations = (outputs.logits - 1950) / 20
    assert torch.allclose((brought.eval()(inputs["input_ids"]).logits - 3) / 2, deviations, atol=1e-3)
    other, _ = load_model(BertForMultipleChoice, str(tmp_path / "inside"), {})
    assert other.config.target_scale is None

    fresh, new = load_model(BertForSequenceClassification, str(given), numbers | {"id2label": {0: "views"}})
    assert new == CLASSIFIER
    assert fresh.classifier.weight.abs().max() <= 0.04, "a new classifier learns deviations"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_beyond_the_largest_of_fp16_stay_finite(dtype, tmp_path):
    model = BertForSequenceClassification.from_pretrained(write_checkpoint(tmp_path / "bert", labels=("price",)))
    model.classifier.bias.data.fill_(250_000.0)
    model.save_pretrained(tmp_path / "prices")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "prices", dtype=dtype).eval()
    assert again(torch.tensor([[1, 5, 2]])).logits.item() == pytest.approx(250_000, abs=1)


def test_a_number_is_not_rounded_to_16_bits_under_autocast(tmp_path):
    model = BertForSequenceClassification.from_pretrained(write_checkpoint(tmp_path / "bert", labels=("year",))).eval()
    model.classifier.bias.data.fill_(1990.3)
    cast_weights(model, "bf16")
    with use_precision("bf16", torch.device("cpu")):
        answer = model(torch.tensor([[1, 5, 2]])).logits.item()
    assert answer == pytest.approx(1990.3, abs=1)
    assert answer % 8, "bf16 has 8 bits: near 1990 only multiples of 8"


@pytest.mark.parametrize(
    ("had", "wanted", "order"),
    [
        (("entailment", "neutral"), ("NEUTRAL", "Entailment"), [1, 0]),
        (("O", "B-PER", "B-per"), ("B-per", "O", "B-PER"), [2, 0, 1]),
        (("O", "B-PER", "B-per"), ("o", "b-per", "B-per"), None),  # the choice between the two is ambiguous
    ],
)
def test_labels_keep_their_weights_in_any_order_and_in_another_spelling_if_it_is_clear(had, wanted, order, tmp_path):
    folder = str(write_checkpoint(tmp_path, labels=had))
    old = BertForSequenceClassification.from_pretrained(folder).classifier.weight
    model, new = load_model(BertForSequenceClassification, folder, {"id2label": dict(enumerate(wanted))})
    assert new == ([] if order else CLASSIFIER)
    assert not order or torch.equal(model.classifier.weight, old[order])


# --- What is damaged --------------------------------------------------------------------------------------------------


def write_config(folder, **values):
    """Write a checkpoint whose config.json has these values; None removes a key."""
    path = write_checkpoint(folder, labels=("yes", "no")) / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 2**31},
        {"position_embedding_type": "relative_key"},
        {"model_type": "\x1b[31m"},
        {"model_type": None, "architectures": ["RobertaModel"]},
        {"model_type": None, "architectures": None, "type_vocab_size": None},
    ],
)
def test_a_configuration_that_is_no_bert_s_is_refused(tmp_path, values, refused):
    with refused():
        load_config(write_config(tmp_path, **values))


@pytest.mark.parametrize("architectures", [None, ["BertForMaskedLM"]])
def test_a_configuration_without_a_type_is_that_of_a_bert_where_it_is_certain(tmp_path, architectures):
    folder = write_config(tmp_path, model_type=None, architectures=architectures)
    load_model(BertForSequenceClassification, folder, {})


def test_pairs_need_two_token_types(tmp_path):
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"), type_vocab_size=1)
    message = r"the model has 1 token type \(type_vocab_size\), but pairs.* need 2; use single texts, or"
    with pytest.raises(UsageError, match=message):
        Predictor(folder)([("good", "word1")])
    assert Predictor(folder)(["good word1"])
    data = {"dir": str(write_glue(tmp_path / "glue")), "max_length": 16}
    with pytest.raises(UsageError, match=message):
        run(Recipe.make(TASKS["rte"], {"checkpoint": str(folder), "data": data}), output=tmp_path / "run")


@pytest.mark.parametrize("name", ["recipe.toml", "study.json"])
def test_an_unfinished_run_and_a_study_are_no_checkpoints(tmp_path, name, refused):
    (tmp_path / name).touch()
    with refused():
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    "values", [{"vocab_size": 256}, {"hidden_size": 64}, {"num_hidden_layers": 3}, {"num_hidden_layers": 1}]
)
def test_weights_of_other_sizes_than_the_configuration_are_refused(tmp_path, values, refused):
    with refused():
        load_model(BertForSequenceClassification, write_config(tmp_path, **values), {})


# --- From the Hub -----------------------------------------------------------------------------------------------------

LOADERS = {
    "config.json": lambda: load_config("ada/bert").to_dict(),
    "model.safetensors": lambda: load_model(BertForSequenceClassification, "ada/bert", {})[0].state_dict(),
    "tokenizer.json": lambda: load_tokenizer("ada/bert").get_vocab(),
}
FAULTS = {"cut off": {"sent": 10}, "silent": {"sent": 10, "stall": 1.0}, "in trouble": {"status": 503}}


@pytest.fixture
def served(hub, tmp_path, monkeypatch):
    """Return a Hub with the model ada/bert and a timeout of a third of a second."""
    folder = write_checkpoint(tmp_path / "bert", labels=("yes", "no"))
    hub.repos["ada/bert"] = Repo(files={path.name: path.read_bytes() for path in folder.iterdir()})
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    explain_trouble.cache_clear()
    yield hub
    explain_trouble.cache_clear()


@pytest.mark.parametrize(
    ("name", "fault"),
    [*(("model.safetensors", fault) for fault in FAULTS), ("config.json", "cut off"), ("tokenizer.json", "cut off")],
)
def test_a_download_that_breaks_is_one_line_and_the_next_one_succeeds(served, name, fault):
    served.fail("GET", f"/{name}$", times=100, **FAULTS[fault])
    with pytest.raises(UsageError, match=r"could not be downloaded from the Hub \(|cannot be downloaded \(") as error:
        LOADERS[name]()
    assert "ada/bert" in str(error.value)
    assert "\n" not in str(error.value)
    served.faults.clear()
    assert LOADERS[name]()


def test_a_file_is_missing_only_if_the_hub_says_so(served):
    assert find_file("ada/bert", "recipe.toml") is None
    served.fail("HEAD", "/vocab.txt$", times=100, status=503)
    with pytest.raises(UsageError, match=r"^vocab\.txt of ada/bert"):
        find_file("ada/bert", "vocab.txt")
    served.faults.clear()
    assert find_file("ada/bert", "vocab.txt").is_file()


OTHER_NAMES = {  # program -> the part of a name that it writes otherwise, and how
    "DataParallel and NVIDIA's code": (r"^(.*(intermediate|pooler)\.dense)?", r"module.\1"),
    "torch.compile": ("^", "_orig_mod."),
    "torch.compile, in DataParallel": ("^", "module._orig_mod."),
    "torch.compile of each layer": (r"(layer\.\d+)\.", r"\1._orig_mod."),
    "torch.compile of the encoder": (r"^bert\.", "bert._orig_mod."),
    "PEFT without an adapter": ("^", "base_model.model."),
    "PEFT, compiled": ("^", "_orig_mod.base_model.model."),
}


@pytest.mark.parametrize("program", OTHER_NAMES)
def test_weights_under_the_names_of_other_programs_are_read_and_saved_under_the_hub_s(tmp_path, program):
    write_checkpoint(tmp_path, labels=("yes", "no"))
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(*OTHER_NAMES[program], name, count=1): weights[name] for name in weights}
    if "NVIDIA" in program:
        renamed = {re.sub(r"(intermediate|pooler)\.dense", r"\1.dense_act", name): renamed[name] for name in renamed}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    model, new = load_model(BertForSequenceClassification, str(tmp_path), {})
    assert new == []
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


ADAPTER = r"is an adapter of PEFT, not a whole model; merge it into its model first \(merge_and_unload\), save that"


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_called_one(tmp_path, has_config):
    folder = write_checkpoint(tmp_path, labels=("yes", "no"))
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    if not has_config:
        (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=ADAPTER):
        Predictor(folder)


def test_an_adapter_beside_the_weights_that_it_changes_is_called_one(tmp_path):
    folder = write_checkpoint(tmp_path, labels=("yes", "no"))
    weights = load_file(folder / "model.safetensors")
    adapted = {re.sub(r"\.(query|value)\.", r".\1.base_layer.", name): weights[name] for name in weights}
    adapted |= {"bert.encoder.layer.0.attention.self.query.lora_A.default.weight": torch.zeros(4, 32)}
    save_file({f"base_model.model.{name}": adapted[name] for name in adapted}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=ADAPTER):
        load_model(BertForSequenceClassification, str(folder), {})


def test_an_adapter_on_the_hub_is_called_one(served):
    del served.repos["ada/bert"].files["config.json"]
    served.repos["ada/bert"].files["adapter_config.json"] = b"{}"
    with pytest.raises(UsageError, match=f"^ada/bert {ADAPTER}"):
        load_config("ada/bert")
