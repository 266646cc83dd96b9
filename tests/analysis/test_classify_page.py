"""The page of a run of `classify`: scores by label, the confusion matrix, and the worst mistakes."""

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import confusion_matrix

from bertkit.analysis.report import (
    LEAST_ANSWERED,
    MOST_CONFUSED,
    plot_reliability,
    plot_selective,
    tabulate_confusion,
    write_page,
)
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_reviews
from tests.world import Reader, find_part, read_tables

LABELS = {"one": ["stars"], "several": ["tags"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Finished runs with one label and with several, and their page."""
    root = tmp_path_factory.mktemp("classify")
    start = write_checkpoint(root / "bert", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    table = write_reviews(root / "reviews.csv", 120)
    for name, label in LABELS.items():
        data = {"dir": str(table), "text": ["title", "body"], "label": label, "dev_share": 0.3, "max_length": 24}
        recipe = {"checkpoint": str(start), "precision": "fp32", "batch_size": 8, "data": data}
        recipe |= {"train": {"max_steps": 4, "learning_rate": 2e-2}}
        run(Recipe.make(CLASSIFICATION, recipe), output=root / name)
    write_page([root / name for name in LABELS], root / "report.html")
    return root


@pytest.mark.parametrize(("name", "labels"), [("one", ["1", "2", "3"]), ("several", ["dear", "slow"])])
def test_each_label_has_its_scores_and_a_run_its_figures(root, name, labels):
    metrics = json.loads((root / name / "metrics.json").read_text())
    part = find_part(root / "report.html", str(root / name))
    tables = read_tables(part)
    captions = Reader(part).find("figcaption")
    assert any("Reliability, dev" in text for text in captions)
    assert any("Accuracy of the surest answers, dev" in text for text in captions) is (name == "one")
    assert ("Confusion matrix, dev; shades: percent of the true class" in tables) == (name == "one")
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


def test_rare_labels_share_a_row_and_a_column():
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.repeat(np.arange(MOST_CONFUSED + 2), 9), [0, 5] * 2])
    labels = labels[(labels != 3) | (np.arange(len(labels)) % 2 == 0)]  # 3 has fewer rows, and 20 and 21 come last
    answers = rng.permutation(labels)
    table = tabulate_confusion(answers, labels, [f"n{n}" for n in range(MOST_CONFUSED + 2)], "dev")
    counts = np.array([[int(cell.lines[0][0]) for cell in row[1:]] for row in table.rows])
    kept = [*range(3), *range(4, MOST_CONFUSED + 1)]
    assert [*table.heads[1:]] == [*(f"n{label}" for label in kept), "(others)"]
    assert counts.sum() == len(labels)
    assert np.array_equal(counts[:-1, :-1], confusion_matrix(labels, answers)[np.ix_(kept, kept)])


def test_the_accuracy_of_the_surest_answers_is_that_of_a_plain_loop():
    """The model answers all rows, a baseline those that it has read; equal probabilities are answered together."""
    draw = np.random.default_rng(0)
    probabilities, right = draw.choice([0.5, 0.6, 0.75, 0.8, 0.97], 120), draw.random(120) < 0.7
    read = draw.random(120) < 0.5
    known = [str(label) if is_read else None for label, is_read in zip(right.astype(int), read, strict=True)]
    baseline = pa.array(probabilities[::-1], mask=~read)
    rows = pa.table({"label": ["1"] * 120, "baseline_prediction": known, "baseline_probability": baseline})
    model, other = plot_selective(rows, right, probabilities, "dev").series
    for series, values, answers in (
        (model, probabilities, right),
        (other, probabilities[::-1][read], right[read]),
    ):
        expected = []
        for least in sorted(set(values), reverse=True):
            answered = values >= least
            if answered.sum() >= LEAST_ANSWERED:
                expected.append((100 * answered.mean(), 100 * answers[answered].mean()))
        np.testing.assert_allclose(series.points, expected)
    assert len(plot_selective(rows.select(["label"]), right, probabilities, "dev").series) == 1


def test_reliability_bars_stay_between_0_and_100_percent():
    """A single row that is right says little: its interval is from 2.5 to 100 %."""
    stated = np.array([0.65] * 3 + [0.75] + [0.99] * 40)
    labels = np.array([1] * 3 + [0] + [0] * 39 + [1])
    series = plot_reliability(np.stack([stated, 1 - stated], axis=1), labels, "dev").series[-1]
    limits = [(y - below, y + above) for (_, y), (below, above) in zip(series.points, series.spreads, strict=True)]
    assert limits[1] == pytest.approx((2.5, 100), abs=0.01)
    assert all(0 <= low <= y <= high <= 100 for (_, y), (low, high) in zip(series.points, limits, strict=True))
