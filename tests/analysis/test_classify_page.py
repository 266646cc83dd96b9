"""The page of a run of `classify`: scores by label, curves, and the rows with the highest loss."""

import csv
import json
import math

import pytest

from bertkit.analysis.page import write_page
from bertkit.tasks.classification import CLASSIFICATION
from bertkit.training.run import run
from tests.analysis.test_page import Reader, find_part, read_tables
from tests.official import write_checkpoint, write_reviews

LABELS = {"one": ["stars"], "several": ["tags"], "number": ["price"]}
HARDEST = "Predictions with the highest loss on dev"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Finished runs of each kind of problem, and their page."""
    root = tmp_path_factory.mktemp("classify")
    start = write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    table = write_reviews(root / "reviews.csv", 120)
    for name, label in LABELS.items():
        data = {"dir": str(table), "text": ["title", "body"], "label": label, "dev_share": 0.3, "max_length": 24}
        recipe = {"checkpoint": str(start), "precision": "fp32", "batch_size": 8, "data": data}
        run(CLASSIFICATION, recipe | {"train": {"max_steps": 4, "learning_rate": 2e-2}}, output=root / name)
    write_page([root / name for name in LABELS], root / "report.html")
    return root


def read_run(root, name):
    """Return the metrics of a run, the rows of dev.csv by line, and the tables of its part of the page."""
    with (root / name / "predictions" / "dev.csv").open(encoding="utf-8", newline="") as file:
        rows = {f"line {int(row['id'][1:]) + 2}": row for row in csv.DictReader(file)}
    metrics = json.loads((root / name / "metrics.json").read_text())
    return metrics, rows, read_tables(find_part(root / "report.html", str(root / name)))


@pytest.mark.parametrize(("name", "labels"), [("one", ["1", "2", "3"]), ("several", ["dear", "slow"])])
def test_each_label_has_its_scores(root, name, labels):
    metrics, _, tables = read_run(root, name)
    for split, start in (("dev", ""), ("test", "test_")):
        heads, *rows = tables[f"Scores by label, {split}"]
        thresholds = ["threshold"] * (name == "several")
        assert heads == ["label", "precision (%)", "recall (%)", "F1 (%)", "count", *thresholds]
        assert [row[0] for row in rows] == labels
        for label, precision, recall, f1, count, *threshold in rows:
            scores = [f"{100 * metrics[f'{start}{key}_{label}']:.1f}" for key in ("precision", "recall", "f1")]
            assert [precision, recall, f1] == scores
            assert int(count) == metrics[f"{start}count_{label}"]
            assert threshold == [f"{metrics[f'threshold_{label}']:.3f}" for _ in threshold]
    assert not any("label" in caption for caption in read_run(root, "number")[2])


@pytest.mark.parametrize(("name", "labels"), [("one", ["1", "2", "3"]), ("several", ["dear", "slow"]), ("number", [])])
def test_precision_is_drawn_over_recall(root, name, labels):
    part = Reader(find_part(root / "report.html", str(root / name)))
    captions = [text for text in part.find("figcaption") if "Precision over recall, dev" in text]
    assert len(captions) == bool(labels)
    assert all(label in captions[0] for label in labels)
    assert ("Confusion matrix, dev" in read_run(root, name)[2]) == (name == "one")


def test_the_rows_with_the_highest_loss_are_shown(root):
    """Compute the losses again from the probabilities in dev.csv."""
    for name in LABELS:
        _, rows, tables = read_run(root, name)
        losses = {place: find_loss(name, row) for place, row in rows.items()}
        heads, *lines = tables[HARDEST]
        assert heads == ["input", "predicted", "true"]
        places = [line[0].partition(":")[0] for line in lines]
        assert len(places) == min(len(rows), 10)
        assert [losses[place] for place in places] == pytest.approx(sorted(losses.values())[: -len(places) - 1 : -1])
        for place, (text, answer, right) in zip(places, lines, strict=True):
            assert rows[place]["title"] in text
            assert right == (rows[place][LABELS[name][0]].replace("slow|dear", "dear, slow") or "no label")
            if name == "one":
                assert answer == f"{rows[place]['label']} ({float(rows[place]['probability']):.1%})"


def find_loss(name, row):
    """Return the loss of a row of dev.csv."""
    if name == "number":
        return (float(row["prediction"]) - float(row["price"])) ** 2
    if name == "one":
        return -math.log(float(row[f"probability_{row['stars']}"]))
    chances = {label: float(row[f"probability_{label}"]) for label in ("slow", "dear")}
    return -sum(math.log(p if label in row["tags"] else 1 - p) for label, p in chances.items()) / 2
