"""What of a checkpoint becomes the model of another head, and what is drawn anew."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertkit import BertForMultipleChoice, BertForSequenceClassification
from bertkit.checkpoint import load_model
from bertkit.errors import UsageError
from tests.official import write_checkpoint

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


def test_the_same_head_keeps_its_classifier(tmp_path):
    torch.manual_seed(1)
    first, _ = load_model(BertForMultipleChoice, str(write_checkpoint(tmp_path / "bert")), {})
    first.save_pretrained(tmp_path / "swag")
    again, new = load_model(BertForMultipleChoice, str(tmp_path / "swag"), {})
    assert new == []
    assert torch.equal(again.classifier.weight, first.classifier.weight)


def test_an_encoder_of_another_size_than_its_configuration_says_is_damaged(tmp_path):
    path = write_checkpoint(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["encoder.layer.0.output.dense.weight"] = torch.zeros(32, 63)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"is damaged: bert.encoder.layer.0.output.dense.weight is not of the size"):
        load_model(BertForMultipleChoice, str(tmp_path), {})


def test_labels_that_differ_in_case_keep_their_own_weights(tmp_path):
    had = str(write_checkpoint(tmp_path, labels=("O", "B-PER", "B-per")))
    old = BertForSequenceClassification.from_pretrained(had).classifier.weight
    same, new = load_model(BertForSequenceClassification, had, {"id2label": {0: "B-per", 1: "O", 2: "B-PER"}})
    assert new == []
    assert torch.equal(same.classifier.weight, old[[2, 0, 1]])
    _, new = load_model(BertForSequenceClassification, had, {"id2label": {0: "o", 1: "b-per", 2: "B-per"}})
    assert new == CLASSIFIER, "which of the two is meant, nobody can tell"


def test_labels_in_another_spelling_are_the_same(tmp_path):
    had = str(write_checkpoint(tmp_path, labels=("entailment", "neutral")))
    old = BertForSequenceClassification.from_pretrained(had).classifier.weight
    model, new = load_model(BertForSequenceClassification, had, {"id2label": {0: "NEUTRAL", 1: "Entailment"}})
    assert new == []
    assert torch.equal(model.classifier.weight, old[[1, 0]])
