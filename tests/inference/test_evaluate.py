"""`bertkit evaluate`: a model's scores on labelled rows, the same as those of its run, and what it got wrong."""

import json
import shutil
from functools import cache

import pandas as pd
import pyarrow.parquet as pq
import pytest

from bertkit.inference.evaluate import evaluate
from bertkit.inference.export import export
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_reviews, write_table
from tests.world import CASES, write_head

# Case -> the data that are given to evaluate, below the folder of the case; the split that they are.
GIVEN = {
    "stsb": ("glue/STS-B/dev.tsv", "dev"),
    "mnli": ("glue", "dev_matched"),
    "squad1": ("squad", "dev"),
    "squad2": ("squad/dev-v2.0.json", "dev"),
    "squad2, own": ("own/test.jsonl", "test"),
    "swag": ("swag/val.csv", "dev"),
    "classify": ("reviews/test.csv", "test"),
    "classify, several labels": ("reviews/dev.csv", "dev"),
    "ner": ("ner", "test"),
    "ner, features": ("ner", "dev"),
    "ner, words": ("treebank", "test"),
}
FEW = {"train": {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}, "precision": "fp32"}


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Return by case the folder of a finished run `run`, beside its data."""

    @cache
    def finish(name):
        folder = tmp_path_factory.mktemp("case")
        task, make_recipe, _ = CASES[name]
        run(Recipe.make(task, make_recipe(folder), FEW), output=folder / "run")
        return folder

    return finish


@pytest.mark.parametrize("case", GIVEN)
def test_the_rows_of_a_run_have_the_scores_and_the_table_of_its_end(case, finish, tmp_path):
    folder, (given, split) = finish(case), GIVEN[case]
    found = {one.name: one for one in evaluate(str(folder / "run"), str(folder / given), tmp_path)}
    one = found.get(split) or next(iter(found.values()))
    task, metrics = CASES[case][0], json.loads((folder / "run" / "metrics.json").read_text())
    for name in task.score(one.rows):
        if (key := task.splits[split].format(name)) in metrics:
            assert one.metrics[name] == pytest.approx(metrics[key], abs=1e-4), name
    written = json.loads((one.output / "metrics.json").read_text())
    assert written == json.loads(json.dumps(one.metrics))
    assert written["score"] == written[task.metric]
    assert any(name.endswith("_low") for name in written)
    before = pq.read_table(folder / "run" / "predictions" / f"{split}.parquet")
    table = pq.read_table(one.output / "predictions" / f"{one.name}.parquet")
    assert table.column("key") == before.column("key")
    if case != "stsb":  # whose numbers are those of other batches
        assert table.column("prediction") == before.column("prediction")
        files = one.output / "mistakes.csv", folder / "run" / "predictions" / f"{split}.mistakes.csv"
        found, expected = (sorted(file.read_text(encoding="utf-8").splitlines()) for file in files)
        assert found == expected


def test_without_data_the_tables_of_the_run_are_written_again(finish):
    folder = finish("classify")
    before = {path.name: path.read_bytes() for path in (folder / "run" / "predictions").iterdir()}
    for name in before:
        if name.endswith((".parquet", ".mistakes.csv")):
            (folder / "run" / "predictions" / name).unlink()
    metrics = (folder / "run" / "metrics.json").read_bytes()
    assert [one.name for one in evaluate(str(folder / "run"), None, None)] == ["dev", "test"]
    after = {path.name: path for path in (folder / "run" / "predictions").iterdir()}
    assert after.keys() == before.keys()
    for name, path in after.items():
        if name.endswith(".parquet"):
            one, other = pq.read_table(path), pd.read_parquet(pd.io.common.BytesIO(before[name]))
            pd.testing.assert_frame_equal(one.to_pandas(), other, rtol=1e-5)
    assert (folder / "run" / "metrics.json").read_bytes() == metrics


@pytest.fixture
def reviews(finish):
    """Return the run of the reviews and some rows, the first of them from its training."""
    folder = finish("classify")
    train, test = (
        pd.read_csv(folder / "reviews" / f"{split}.csv", keep_default_na=False).to_dict("records")
        for split in ("train", "test")
    )
    return folder / "run", [train[0], *test]


def test_scores_are_printed_and_kept_beside_the_run(call, reviews, tmp_path):
    folder, rows = reviews
    shutil.copytree(folder, tmp_path / "run")
    file = write_table(tmp_path / "new.csv", rows)
    code, out, err = call("evaluate", "run", "--data", file)
    assert (code, err) == (0, "")
    assert f"new, {len(rows)} rows" in out
    assert "95 % interval" in out
    assert "Scores by label, new" in out
    assert f"1 of {len(rows)} rows also occurs in train" in out
    assert "without leaks" in out
    output = tmp_path / "run" / "evaluations" / "new"
    assert {path.name for path in output.iterdir()} == {"metrics.json", "mistakes.csv", "predictions"}
    code, out, _ = call("evaluate", "run", "--data", file, "--json")
    metrics = json.loads(out)["new"]
    assert code == 0
    assert (metrics["rows"], metrics["leaks"]) == (len(rows), 1)
    table = pd.read_parquet(output / "predictions" / "new.parquet")
    assert metrics["accuracy"] == (table["label"] == table["prediction"]).mean()


def test_leaks_are_found_whatever_the_file_is_called(finish, reviews, tmp_path):
    folder, rows = reviews
    for name, given, expected in (("train", rows, 1), ("all", [rows[0]] * 2, 2)):
        (one,) = evaluate(str(folder), str(write_table(tmp_path / f"{name}.csv", given)), tmp_path / name)
        assert one.metrics["leaks"] == expected
        assert ("accuracy_without_leaks" in one.metrics) == (expected < len(given)), "nothing is left without all rows"


def test_labels_that_the_model_lacks_are_counted_and_named(reviews, tmp_path):
    folder, rows = reviews
    lines = []
    file = write_table(tmp_path / "new.csv", [*rows, rows[1] | {"stars": "none"}, rows[2] | {"stars": "none"}])
    (one,) = evaluate(str(folder), str(file), tmp_path / "x", lines.append)
    assert any("the model lacks the labels 'none' (2)" in line for line in lines)
    assert one.metrics["rows"] == len(rows)


def test_of_several_labels_rows_with_unknown_ones_are_left_out(finish, tmp_path, call):
    folder = finish("classify, several labels")
    rows = pd.read_csv(folder / "reviews" / "test.csv", keep_default_na=False).to_dict("records")[:9]
    known = rows[1:]
    assert any(row["tags"] == "" for row in known), "no label is an answer"
    file = write_table(tmp_path / "new.csv", [rows[0] | {"tags": "slow|new"}, *known])
    (one,) = evaluate(str(folder / "run"), str(file), tmp_path / "x")
    assert one.metrics["rows"] == len(known)
    _, _, err = call("predict", folder / "run", "--input", file, "--output", "out.csv", "--precision", "fp32")
    exact = f"exact match {100 * one.metrics['exact_match']:.1f} %"
    assert f"8 rows have a label (1 with labels that the model lacks left out): {exact}" in err


def test_a_model_without_a_recipe_and_an_export(reviews, tmp_path, monkeypatch):
    folder, rows = reviews
    file = write_table(tmp_path / "new.csv", [row | {"label": row["stars"]} for row in rows])
    (expected,) = evaluate(str(folder), str(file), tmp_path / "x")
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=lambda *_: ["recipe.toml", "predictions"])
    config = json.loads((plain / "config.json").read_text()) | {"problem_type": None}  # as most configurations have it
    (plain / "config.json").write_text(json.dumps(config))
    (found,) = evaluate(str(plain), str(file), tmp_path / "y")
    assert found.metrics["score"] == pytest.approx(expected.metrics["score"])
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("bertkit.inference.export.MOST_SECONDS", 0.01)
    export(str(folder), tmp_path / "export")
    (found,) = evaluate(str(tmp_path / "export"), str(file), tmp_path / "z")
    assert found.metrics["score"] == pytest.approx(expected.metrics["score"])


def test_refusals(reviews, tmp_path, refused):
    folder, rows = reviews
    with refused():
        evaluate(str(folder), str(write_table(tmp_path / "new.csv", rows)), folder)
    write_head(tmp_path / "pre", "BertForMaskedLM")
    (tmp_path / "pre" / "recipe.toml").write_text('task = "pretrain"\n')
    with refused():
        evaluate(str(tmp_path / "pre"), None, None)
    with refused():
        evaluate(str(folder), str(write_reviews(tmp_path / "no.csv", 5, labelled=False)), tmp_path / "x")


def test_predict_tells_the_scores_of_a_file_with_labels(reviews, tmp_path, call):
    folder, rows = reviews
    file = write_table(tmp_path / "new.csv", rows)
    (one,) = evaluate(str(folder), str(file), tmp_path / "x")
    code, _, err = call("predict", folder, "--input", file, "--output", "out.csv", "--precision", "fp32")
    assert code == 0
    accuracy = 100 * one.metrics["accuracy"]
    assert f"bertkit: {len(rows)} rows have a label: accuracy {accuracy:.1f} %, macro F1 " in err
    assert f"bertkit evaluate {folder} --data {file}" in err
    without = write_table(tmp_path / "texts.csv", [{name: row[name] for name in ("title", "body")} for row in rows])
    assert "have a label" not in call("predict", folder, "--input", without, "--output", "out.csv")[2]
