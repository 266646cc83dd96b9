"""Thresholds and least confidences decide alike in Python, in an export, on the command line and served."""

import json
import shutil

import numpy as np
import pytest

from bertkit.inference.predictor import Predictor
from tests.exports import write_export
from tests.served import Client, serving
from tests.world import make_texts, place_between

ROWS = 200
HEAD = "BertForSequenceClassification"


@pytest.mark.parametrize("decision", ["thresholds", "least_confidence"])
def test_all_ways_decide_alike(tmp_path, call, decision):
    labels = ("no", "yes") if decision == "thresholds" else ("bad", "so-so", "good")
    made = write_export(HEAD, window_pooling=None, labels=labels)
    texts, folders = make_texts(ROWS), []
    probabilities = [list(result["probabilities"].values()) for result in Predictor(made[0], precision="fp32")(texts)]
    probabilities = np.array(probabilities)
    if decision == "thresholds":
        value = [0.0, place_between(probabilities[:, 1], 0.4)]
        expected = [labels[int(row[1] > value[1])] for row in probabilities]
    else:
        value = place_between(probabilities.max(axis=1), 0.4)
        expected = [labels[int(row.argmax())] if row.max() >= value else None for row in probabilities]
    assert len(set(expected)) > 1
    for folder in made:
        folders.append(shutil.copytree(folder, tmp_path / folder.name))
        config = json.loads((folders[-1] / "config.json").read_text())
        (folders[-1] / "config.json").write_text(json.dumps(config | {decision: value}))
    run, exported = folders
    predictor = Predictor(run, precision="fp32")
    results = predictor(texts)
    assert [result["label"] for result in results] == expected
    assert [result["label"] for result in Predictor(str(exported))(texts)] == expected
    with serving(predictor, run) as port:
        status, served = Client(port).predict(texts)
    assert (status, [result["label"] for result in served]) == (200, expected)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    files = ["--input", tmp_path / "texts.txt", "--output", tmp_path / "a.jsonl"]
    call("predict", run, "--precision", "fp32", *files)
    written = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [result["label"] for result in written] == expected
    assert [result.get("abstained", False) for result in written] == [label is None for label in expected]
