"""Folds as a study: their definition, their mean scores, and a prediction for every row by a model without it."""

import csv
import json
import shutil
import statistics
from copy import deepcopy

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from bertkit.metrics.table import make_rows, read_facts
from bertkit.studies.folds import gather_folds, join_folds
from bertkit.studies.runner import make_study, run_study
from bertkit.studies.spec import define_folds
from bertkit.training.predictions import read_table
from bertkit.training.study_results import StudyRun
from tests.official import write_checkpoint, write_reviews, write_table

pytestmark = pytest.mark.usefixtures("here")

FOLDS = 3


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("bert"), initializer_range=0.1)


def make_recipe(bert, path, label="stars", **data):
    """Return a recipe of a few updates."""
    train = {"max_steps": 2, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"}
    data = {"dir": str(path), "text": ["body"], "label": [label], "max_length": 64} | data
    return {"checkpoint": str(bert), "batch_size": 8, "precision": "fp32", "data": data, "train": train}


def run_folds(recipe, output):
    return run_study(make_study(define_folds("classify", recipe, FOLDS)), output=output)


def read_rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def done(bert, tmp_path_factory):
    """Return the table, the directory of a finished study of folds, its results, and the table of its scores."""
    path = write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv", 60)
    output = tmp_path_factory.mktemp("folds") / "out"
    results = run_folds(make_recipe(bert, path), output)
    return path, output, results, gather_folds(results, output)


def test_the_definition_has_a_row_for_each_fold(refused):
    definition = define_folds("classify", {"batch_size": 4, "data": {"folds": 9, "group": "customer"}}, 2)
    assert definition["recipe"] == {"batch_size": 4, "data": {"folds": 2, "group": "customer"}}
    assert definition["row"] == [
        {"name": "fold 1", "recipe": {"data": {"fold": 0}}},
        {"name": "fold 2", "recipe": {"data": {"fold": 1}}},
    ]
    with refused():
        define_folds("classify", {}, 1)


def test_every_row_has_a_prediction_of_the_model_that_has_not_seen_it(done):
    path, output, results, _ = done
    rows, given = read_rows(output / "out_of_fold.csv"), read_rows(path)
    assert [{name: row[name] for name in given[0]} for row in rows] == given, "in the order of the input"
    assert next(iter(rows[0])) == "fold"
    assert {row["fold"] for row in rows} == {"1", "2", "3"}
    for number, cell in enumerate(results.cells, 1):
        own = [row for row in rows if row["fold"] == f"{number}"]
        dev = read_rows(output / cell.runs[0].directory / "predictions" / "dev.csv")
        assert own == [{"fold": f"{number}"} | row for row in dev]


def test_the_scores_are_means_over_the_folds(done):
    _, output, results, table = done
    scores = json.loads((output / "folds.json").read_text())
    values = [cell.runs[0].metrics["macro_f1"] for cell in results.cells]
    assert scores["macro_f1"] == {
        "mean": pytest.approx(statistics.mean(values)),
        "sd": pytest.approx(statistics.stdev(values)),
        "n": FOLDS,
    }
    assert "score" not in scores, "it is the macro F1"
    assert table.heads == ("score", "mean ± sd (n) over 3 folds")
    assert table.rows[0][0].lines[0][0] == "macro F1 (%)"
    assert table.rows[0][1].lines[0][0].endswith("(3)")
    rows = pd.read_parquet(output / "out_of_fold.parquet")
    found = rows.assign(right=rows.label == rows.prediction).groupby("fold").right.mean().tolist()
    assert found == pytest.approx([cell.runs[0].metrics["accuracy"] for cell in results.cells])


def swap_labels(rows):
    return [row | {"stars": {"1": "3", "3": "1"}.get(row["stars"], row["stars"])} for row in rows]


def sort_rows(rows):
    return sorted(rows, key=lambda row: row["body"])


@pytest.mark.parametrize(("change", "finished"), [(swap_labels, 1), (sort_rows, FOLDS)])
def test_folds_of_other_rows_are_neither_continued_nor_shown(done, bert, change, finished, refused):
    path, output, *_ = done
    content, hidden = path.read_bytes(), [output / f"fold-{fold + 1}" for fold in range(finished, FOLDS)]
    for folder in hidden:
        folder.rename(folder.with_name(f".{folder.name}"))
    try:
        write_table(path, change(read_rows(path)))
        with refused():
            run_folds(make_recipe(bert, path), output)
        assert not any(folder.exists() for folder in hidden)
    finally:
        path.write_bytes(content)
        for folder in hidden:
            folder.with_name(f".{folder.name}").rename(folder)


def test_the_table_of_all_rows_has_the_fold_and_names_what_the_folds_have(done):
    _, output, results, _ = done
    rows = parquet.read_table(output / "out_of_fold.parquet")
    assert rows.column("fold").to_pylist() == [int(row["fold"]) for row in read_rows(output / "out_of_fold.csv")]
    assert len(set(rows.column("key").to_pylist())) == len(rows)
    first = read_table(output / results.cells[0].runs[0].directory / "predictions" / "dev.parquet")
    assert rows.filter(pc.equal(rows.column("fold"), 1)).drop(["fold"]).equals(first)
    assert read_facts(rows) == read_facts(first)


def test_a_type_that_a_fold_lacks_is_counted_as_none():
    """A sentence has 1 place in the first fold, and 1 person in the second."""
    tables = []
    for row, kind in enumerate(("LOC", "PER"), 1):
        counts = {f"{name}_{kind}": pa.array([1], pa.int32()) for name in ("right", "found", "wanted")}
        columns = {"row": pa.array([row]), "sentence": ["a"], "label": pa.array([[f"B-{kind}"]]), **counts}
        tables.append(make_rows(columns, names=[kind], texts=["sentence"]))
    rows = join_folds(tables)
    assert read_facts(rows)["names"] == ["LOC", "PER"]
    assert [rows.column(f"right_{kind}").to_pylist() for kind in ("LOC", "PER")] == [[1, 0], [0, 1]]


def test_a_failed_fold_writes_nothing(done, tmp_path):
    _, output, results, _ = done
    shutil.copytree(output, tmp_path / "out", ignore=shutil.ignore_patterns("out_of_fold.csv", "folds.json"))
    failed = deepcopy(results)
    failed.cells[1].runs[0] = StudyRun(42, "fold-2/classify", status="failed", failure="the loss is NaN")
    assert gather_folds(failed, tmp_path / "out") is None
    assert not (tmp_path / "out" / "out_of_fold.csv").exists()
    assert not (tmp_path / "out" / "folds.json").exists()
    assert gather_folds(results, tmp_path / "out") is not None
    assert (tmp_path / "out" / "out_of_fold.csv").read_bytes() == (output / "out_of_fold.csv").read_bytes()


@pytest.mark.parametrize("name", ["dev.csv", "dev.parquet"])
def test_a_fold_that_has_lost_a_file_is_named_and_done_again(done, bert, tmp_path, name, refused):
    path, output, results, _ = done
    shutil.copytree(output, copy := tmp_path / "out")
    folder = copy / results.cells[1].runs[0].directory
    content = (folder / "predictions" / name).read_bytes()
    (folder / "predictions" / name).unlink()
    with refused():
        run_folds(make_recipe(bert, path), copy)
    with refused():
        gather_folds(results, copy)
    shutil.rmtree(folder)
    assert gather_folds(run_folds(make_recipe(bert, path), copy), copy) is not None
    assert (folder / "predictions" / name).read_bytes() == content


def test_a_label_that_some_folds_lack_leaves_undefined_scores_out_and_odd_texts_keep_their_rows(bert, tmp_path):
    """Only two texts are "c" and differ in nothing, so both are in one fold, and the others cannot rank them."""
    rows = [{"body": f"{'good' if n % 2 else 'bad'}\rword{n}", "stars": "ab"[n % 2], "fold": f"{n}"} for n in range(40)]
    rows += [{"body": "so", "stars": "c", "fold": "x"}] * 2
    rows[7]["body"] += " so" * 50_000
    output, limit = tmp_path / "out", csv.field_size_limit(131_072)  # the default
    results = run_folds(make_recipe(bert, write_table(tmp_path / "t.jsonl", rows)), output)
    for cell in results.cells:
        for name in ("roc_auc", "majority_roc_auc"):
            cell.runs[0].metrics.pop(name, None)
    results.cells[2].runs[0].metrics["roc_auc"] = 0.75
    try:
        assert gather_folds(results, output) is not None
        found = read_rows(output / "out_of_fold.csv")
    finally:
        csv.field_size_limit(limit)
    scores = json.loads((output / "folds.json").read_text())
    assert scores["roc_auc"] == {"mean": 0.75, "sd": None, "n": 1}
    assert [{name: row[name] for name in rows[0]} for row in found] == rows, "with the input's own column"
    assert {row["fold_number"] for row in found} == {"1", "2", "3"}
    assert len({row["fold_number"] for row in found[-2:]}) == 1


def test_several_labels_in_groups(bert, tmp_path):
    path, output = write_reviews(tmp_path / "reviews.csv", 60), tmp_path / "out"
    assert gather_folds(run_folds(make_recipe(bert, path, "tags", group="customer"), output), output) is not None
    rows = read_rows(output / "out_of_fold.csv")
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(60)]
    assert len({(row["customer"], row["fold"]) for row in rows}) == 8, "a customer is in one fold"
    assert "macro_f1" in json.loads((output / "folds.json").read_text())
