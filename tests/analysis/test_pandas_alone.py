"""Reports, folds and exports say no more than their tables, read and written by pandas alone."""

import json

import pandas as pd
import pytest

from bertkit.analysis.report import write_page
from bertkit.inference.evaluate import evaluate
from bertkit.inference.export import export
from bertkit.studies.folds import gather_folds
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_folds
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_reviews

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Return a small recipe for reviews of one to three stars."""
    folder = tmp_path_factory.mktemp("reviews")
    data = {"dir": str(write_reviews(folder / "reviews.csv", 120)), "text": ["body"], "label": ["stars"]}
    return {
        "checkpoint": str(write_checkpoint(folder / "bert")),
        "batch_size": 16,
        "precision": "fp32",
        "data": data | {"max_length": 40, "dev_share": 0.3, "test_share": 0.0},
        "train": {"max_steps": 40, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"},
    }


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """Return a finished run."""
    output = tmp_path_factory.mktemp("runs") / "stars"
    run(Recipe.make(TASKS["classify"], recipe), output=output)
    return output


def test_a_report_shows_the_confusions_and_mistakes_of_a_table_that_pandas_wrote(finished, tmp_path):
    """Nothing of the format is left in the table, but its columns."""
    place = tmp_path / "stars"
    (place / "predictions").mkdir(parents=True)
    for name in ("recipe.toml", "metrics.json"):
        (place / name).write_bytes((finished / name).read_bytes())
    rows = pd.read_parquet(finished / "predictions" / "dev.parquet").drop(columns=["key", "group", "row"])
    rows.to_parquet(place / "predictions" / "dev.parquet")
    lines = []
    write_page([place], tmp_path / "page.html", lines.append)
    page = (tmp_path / "page.html").read_text()
    assert not [line for line in lines if "skipping" in line]
    wrong = rows[rows.label != rows.prediction]
    assert 0 < len(wrong) < len(rows)
    assert "Confusion matrix" in page
    assert "Mistakes, dev, worst first" in page
    chances = [row[f"probability_{row.label}"] for _, row in wrong.iterrows()]
    worst = wrong.iloc[min(range(len(wrong)), key=chances.__getitem__)]
    assert worst.body.replace('"', "&#34;")[:40] in page.partition("Mistakes, dev, worst first")[2]
    for count in pd.crosstab(rows.label, rows.prediction).to_numpy().ravel().tolist():
        assert f">{count}<" in page.partition("Confusion matrix")[2]


def test_the_scores_of_folds_are_those_of_their_rows(recipe, tmp_path):
    fold = {name: value for name, value in recipe.items() if name != "task"}
    fold["data"] = {name: value for name, value in recipe["data"].items() if not name.endswith("_share")}
    results = run_study(make_study(define_folds("classify", fold, 2)), output=tmp_path / "folds")
    assert gather_folds(results, tmp_path / "folds") is not None
    rows = pd.read_parquet(tmp_path / "folds" / "out_of_fold.parquet")
    assert rows.row.is_monotonic_increasing
    assert len(rows) == 120
    found = rows.assign(right=rows.label == rows.prediction).groupby("fold").right.mean().tolist()
    runs = [run for cell in results["cells"] for run in cell["runs"]]
    assert found == pytest.approx([one["metrics"]["accuracy"] for one in runs])
    assert json.loads((tmp_path / "folds" / "folds.json").read_text())["accuracy"]["mean"] == pytest.approx(
        sum(found) / 2
    )


def test_the_loss_of_an_export_is_that_of_its_rows(finished, recipe, tmp_path):
    pytest.importorskip("onnxruntime")
    record, _ = export(str(finished), tmp_path / "int8", int8=True)
    dev = pd.read_parquet(finished / "predictions" / "dev.parquet")
    everything = pd.read_csv(recipe["data"]["dir"])
    everything[everything.body.isin(dev.body)].to_csv(tmp_path / "dev.csv", index=False)
    scores = {}
    for name, place in (("run", finished), ("int8", tmp_path / "int8")):
        evaluate(str(place), str(tmp_path / "dev.csv"), tmp_path / f"scores-{name}")
        rows = pd.read_parquet(tmp_path / f"scores-{name}" / "predictions" / "dev.parquet")
        f1 = []
        for label in sorted({*rows.label, *rows.prediction}):
            right = ((rows.label == label) & (rows.prediction == label)).sum()
            f1.append(2 * right / ((rows.label == label).sum() + (rows.prediction == label).sum()))
        scores[name] = 100 * sum(f1) / len(f1)
    assert record.int8.metric == "score", "macro F1"
    assert record.int8.run_score == pytest.approx(scores["run"], abs=1e-3)
    assert record.int8.variants[0].difference == pytest.approx(scores["int8"] - scores["run"], abs=1e-3)
