"""Runs with `calibrate = true`: where the temperature is applied, what it leaves unchanged, and label sets of runs."""

import csv
import json
import math
import shutil

import numpy as np
import pytest
import transformers

from bertkit import Predictor
from bertkit.inference import export as export_module
from bertkit.inference.export import export
from bertkit.metrics.calibration import fit_temperature
from bertkit.model.checkpoint import load_config
from bertkit.tasks import TASKS
from bertkit.tasks.kinds import SINGLE_LABEL
from bertkit.tasks.task import describe_temperature
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from bertkit.training.run_dir import CALIBRATION_FILE
from tests.official import write_checkpoint, write_reviews, write_swag

LABELS = {"one": ["stars"], "several": ["tags"]}
SMALL = {
    "precision": "fp32",
    "start": "random",
    "batch_size": 8,
    "baseline": False,
    "train": {"max_steps": 40, "learning_rate": 1e-2},
}


def make_recipe(root, name, tune_share=0.5):
    data = {"dir": str(root / "reviews.csv"), "text": ["title", "body"], "dev_share": 0.4, "max_length": 24}
    return SMALL | {"checkpoint": str(root / "bert"), "data": data | {"label": LABELS[name], "tune_share": tune_share}}


@pytest.fixture(scope="module", autouse=True)
def _fitted():
    """Keep every fitted temperature: these runs are too small for a gain that holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertkit.training.calibration.choose_temperature", fit_temperature)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs of one label and of several, each with a temperature and without."""
    root = tmp_path_factory.mktemp("calibrated")
    write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    write_reviews(root / "reviews.csv", 200)
    for name in LABELS:
        for ending, given in (("", {"calibrate": True}), ("-plain", {})):
            run(Recipe.make(TASKS["classify"], make_recipe(root, name), given), output=root / f"{name}{ending}")
    return root


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_dev(run):
    """Return the rows of dev with their predictions."""
    with (run / "predictions" / "dev.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", LABELS)
def test_every_probability_is_divided_and_no_output_of_the_model(root, name):
    """The run's own predictions, those of `Predictor` and of plain transformers divided by hand are the same."""
    folder = root / name
    metrics, temperature = read_json(folder / "metrics.json"), load_config(str(folder)).temperature
    assert temperature == metrics["temperature"] != 1
    rows = read_dev(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    cut = {"padding": True, "truncation": True, "max_length": 24, "return_tensors": "pt"}
    batch = tokenizer([row["title"] for row in rows], [row["body"] for row in rows], **cut)
    expected = model(**batch).logits.detach().numpy().astype(np.float64) / temperature
    expected = np.exp(expected) if name == "one" else 1 / (1 + np.exp(-expected))
    expected = expected / expected.sum(1, keepdims=True) if name == "one" else expected
    columns = [column for column in rows[0] if column.startswith("probability_")]
    found = np.array([[float(row[column]) for column in columns] for row in rows])
    assert found == pytest.approx(expected, abs=1e-5)
    results = Predictor(folder, precision="fp32")(rows)
    assert np.array([list(result["probabilities"].values()) for result in results]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", LABELS)
def test_a_temperature_changes_probabilities_only(root, name):
    """The run without one has the same weights, the same labels and the scores that the other calls uncalibrated."""
    plain, calibrated = (read_json(root / f"{name}{ending}" / "metrics.json") for ending in ("-plain", ""))
    for key in ("ece", "brier", "test_ece", "test_brier"):
        assert calibrated[f"uncalibrated_{key}"] == pytest.approx(plain[key], abs=1e-7)
        assert calibrated[key] != plain[key]
    kept = [key for key in plain if key.startswith(("accuracy", "macro", "micro", "exact", "f1", "recall", "test_f1"))]
    assert {key: calibrated[key] for key in kept} == pytest.approx({key: plain[key] for key in kept}, abs=1e-12)
    assert "temperature" not in plain
    assert load_config(str(root / f"{name}-plain")).temperature is None
    column = "label" if name == "one" else "labels"
    answers, others = ([row[column] for row in read_dev(root / folder)] for folder in (name, f"{name}-plain"))
    assert answers == others
    assert len(set(answers)) > 1


def test_the_table_and_the_card_say_how_good_probabilities_are(root):
    metrics, card = read_json(root / "one" / "metrics.json"), (root / "one" / "README.md").read_text(encoding="utf-8")
    (line,) = describe_temperature(metrics, TASKS["classify"].table)
    before, after = (f"{100 * metrics[key]:.1f} %" for key in ("uncalibrated_ece", "ece"))
    assert f"temperature {metrics['temperature']:.3g} (calibration error {after}, without it {before})" in line
    assert f"- {line[0].upper()}{line[1:]}." in card


def test_an_export_takes_the_temperature_and_the_sets_along(root, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(export_module, "MOST_SECONDS", 0.01)
    export(str(root / "one"), tmp_path / "export")
    rows = read_dev(root / "one")[:8]
    places = (root / "one", tmp_path / "export")
    exact, exported = (Predictor(place, precision="fp32", coverage=0.8) for place in places)
    assert exported.settings.set_limit == exact.settings.set_limit
    for one, other in zip(exported(rows), exact(rows), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
        assert one["label_set"] == other["label_set"]


# --- Which rows decide, and for which tasks ---------------------------------------------------------------------------


def test_a_temperature_fitted_on_dev_is_marked(root, tmp_path):
    recipe = make_recipe(root, "several", tune_share=0.0) | {"calibrate": True}
    run(Recipe.make(TASKS["classify"], recipe, {"train": {"max_steps": 1}}), output=tmp_path / "run")
    for output, marked in ((root / "several", None), (tmp_path / "run", "thresholds and temperature")):
        found = read_json(output / CALIBRATION_FILE)
        assert read_json(output / "metrics.json").get("chosen_on_dev") == marked
        assert found["split"] == ("dev" if marked else "tune")
        assert (len(found["scores"]) == len(read_dev(output))) == bool(marked)


def test_swag_has_it_too(tmp_path):
    write_checkpoint(tmp_path / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    data = {"dir": str(write_swag(tmp_path / "data")), "max_length": 24}
    recipe = SMALL | {"checkpoint": str(tmp_path / "bert"), "data": data, "train": {"max_steps": 2}}
    metrics = run(Recipe.make(TASKS["swag"], recipe, {"calibrate": True}), output=tmp_path / "run")
    assert metrics["chosen_on_dev"] == "temperature"
    assert metrics["uncalibrated_ece"] != metrics["ece"]
    predictor = Predictor(tmp_path / "run", precision="fp32", coverage=0.8)
    (result,) = predictor([predictor.sample])
    limit = 1 - predictor.settings.set_limit
    assert result["label_set"] == [number for number, chance in enumerate(result["probabilities"]) if chance >= limit]
    assert "  set: " in predictor.describe(result)


def test_a_task_without_classes_refuses_it_before_anything_is_read(root, tmp_path, refused):
    with refused():
        Recipe.make(TASKS["stsb"], {"checkpoint": "no/checkpoint", "calibrate": True})
    recipe = make_recipe(root, "one")
    recipe["data"]["label"] = ["price"]
    with refused():
        run(Recipe.make(TASKS["classify"], recipe, {"calibrate": True}), output=tmp_path / "run")


# --- Label sets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LABELS)
def test_a_set_has_the_labels_that_are_likely_enough(root, name):
    rows = read_dev(root / name)
    scores = read_json(root / name / CALIBRATION_FILE)["scores"]
    predictor = Predictor(root / name, precision="fp32", coverage=0.8)
    limit = scores[math.ceil(0.8 * (len(scores) + 1)) - 1]
    results = predictor(rows)
    sets = [result["label_set"] for result in results]
    chances = [result["probabilities"].items() for result in results]
    assert sets == [[label for label, chance in each if 1 - chance <= limit] for each in chances]
    assert len(set(map(tuple, sets))) > 1


def test_a_set_has_the_labels_at_its_limit():
    """The limit is the score of a row that decided it, so this row has its label in the set."""
    (result,) = SINGLE_LABEL.decode(np.zeros((1, 2)), ["a", "b"], decided={"set_limit": 0.5}).list_results()
    assert result["label_set"] == ["a", "b"]


def test_sets_that_cannot_be_given_are_refused(root, tmp_path, refused):
    shutil.copytree(root / "one", tmp_path / "run")
    with refused():  # more rows would have to decide
        Predictor(tmp_path / "run", coverage=0.999)
    with refused():
        Predictor(tmp_path / "run", coverage=0.9).check_format(None, True)
    (tmp_path / "run" / CALIBRATION_FILE).write_text("{")
    with refused():
        Predictor(tmp_path / "run", coverage=0.9)
    (tmp_path / "run" / CALIBRATION_FILE).unlink()
    with refused():
        Predictor(tmp_path / "run", coverage=0.9)
