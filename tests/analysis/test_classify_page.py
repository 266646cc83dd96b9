"""The page of a run of `classify`: scores by label, the confusion matrix, and the worst mistakes."""

import csv
import json
import shutil

import numpy as np
import pandas as pd
import pytest

from bertkit.analysis.report import write_page
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_reviews
from tests.world import Reader, find_part, read_tables

LABELS = {"one": ["stars"], "several": ["tags"], "number": ["price"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Finished runs of each kind of problem, and their page."""
    root = tmp_path_factory.mktemp("classify")
    start = write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    table = write_reviews(root / "reviews.csv", 120)
    for name, label in LABELS.items():
        data = {"dir": str(table), "text": ["title", "body"], "label": label, "dev_share": 0.3, "max_length": 24}
        recipe = {"checkpoint": str(start), "precision": "fp32", "batch_size": 8, "data": data}
        run(
            Recipe.make(CLASSIFICATION, recipe | {"train": {"max_steps": 4, "learning_rate": 2e-2}}), output=root / name
        )
    write_page([root / name for name in LABELS], root / "report.html")
    return root


def read_run(root, name):
    """Return the metrics of a run, the rows of dev.csv by line, and the tables of its part of the page."""
    with (root / name / "predictions" / "dev.csv").open(encoding="utf-8", newline="") as file:
        rows = {str(int(row["id"][1:]) + 2): row for row in csv.DictReader(file)}
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


@pytest.mark.parametrize("name", LABELS)
def test_a_run_has_a_diagram_a_matrix_and_its_worst_mistakes(root, name):
    """Find the mistakes again in dev.csv."""
    _, rows, tables = read_run(root, name)
    captions = Reader(find_part(root / "report.html", str(root / name))).find("figcaption")
    assert any("Reliability, dev" in text for text in captions) == (name != "number")
    assert ("Confusion matrix, dev" in tables) == (name == "one")
    assert any("label" in caption for caption in tables) == (name != "number")
    (label,) = LABELS[name]
    errors = {line: find_error(name, row) for line, row in rows.items()}
    limit = np.sqrt(np.mean(np.square(list(errors.values())))) if name == "number" else 0
    wrong = sorted((error for error in errors.values() if error > limit), reverse=True)
    heads, *lines = tables["Mistakes, dev, worst first"]
    assert heads == ["row", "title", "body", "predicted", "true"]
    assert [errors[line] for line, *_ in lines] == pytest.approx(wrong[:10])
    for line, title, _, answer, right in lines:
        assert rows[line]["title"] == title
        assert sorted(right.split(" | ")) == sorted((rows[line][label] or "nothing").split("|"))
        assert name != "one" or answer == rows[line]["label"]


def test_a_table_that_pandas_wrote_is_enough(root, tmp_path):
    """Nothing of the format is left in the table, but its columns."""
    (tmp_path / "stars" / "predictions").mkdir(parents=True)
    for name in ("recipe.toml", "metrics.json"):
        shutil.copy(root / "one" / name, tmp_path / "stars" / name)
    rows = pd.read_parquet(root / "one" / "predictions" / "dev.parquet").drop(columns=["key", "group", "row"])
    rows.to_parquet(tmp_path / "stars" / "predictions" / "dev.parquet")
    write_page([tmp_path / "stars"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    wrong = rows[rows.label != rows.prediction]
    chances = [row[f"probability_{row.label}"] for _, row in wrong.iterrows()]
    worst = wrong.iloc[int(np.argmin(chances))]
    assert worst.body.replace('"', "&#34;")[:40] in page.partition("Mistakes, dev, worst first")[2]
    for count in pd.crosstab(rows.label, rows.prediction).to_numpy().ravel().tolist():
        assert f">{count}<" in page.partition("Confusion matrix")[2]


def find_error(name, row):
    """Return how wrong a row of dev.csv is; 0 if it is right."""
    if name == "number":
        return abs(float(row["prediction"]) - float(row["price"]))
    if name == "one":
        return 0 if row["label"] == row["stars"] else 1 - float(row[f"probability_{row['stars']}"])
    given, found = (set(filter(None, row[key].split("|"))) for key in ("tags", "labels"))
    gaps = [abs(float(row[f"probability_{tag}"]) - (tag in given)) for tag in ("slow", "dear")]
    return 0 if given == found else sum(gaps) / 2
