"""`bertkit evaluate`: a model's scores on labelled rows, the same as those of its run, and what it got wrong."""

import json
import shutil
from functools import cache

import pandas as pd
import pyarrow.parquet as pq
import pytest

import bertkit
from bertkit.inference.evaluate import evaluate
from bertkit.inference.export import export
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe, merge
from bertkit.training.run import run
from tests.official import write_checkpoint, write_reviews, write_table
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
            other = other.drop(
                columns=[column for column in other if column.startswith("baseline_")]
            )  # not fitted again
            pd.testing.assert_frame_equal(one.to_pandas(), other, rtol=1e-5)
    assert (folder / "run" / "metrics.json").read_bytes() == metrics


@pytest.mark.parametrize("case", ["stsb", "squad2, own", "classify, several labels", "ner, features", "swag"])
def test_the_rows_of_a_run_are_known_again(case, finish):
    folder = finish(case) / "run"
    (folder / "predictions" / "dev.parquet").unlink()
    evaluate(str(folder), None, None)
    assert (folder / "predictions" / "dev.parquet").exists()


@pytest.mark.parametrize("option", ["trial_rows", "tune_share"])
def test_rows_that_were_set_apart_are_set_apart_again(option, tmp_path):
    task, make_recipe, _ = CASES["classify"]
    value = {"trial_rows": 9, "tune_share": 0.5}[option]
    run(Recipe.make(task, make_recipe(tmp_path), merge(FEW, {"data": {option: value}})), output=tmp_path / "run")
    before = pq.read_table(tmp_path / "run" / "predictions" / "dev.parquet")
    one, *_ = evaluate(str(tmp_path / "run"), None, None)
    assert one.rows.column("key") == before.column("key")


def test_a_run_whose_data_have_changed_keeps_its_tables(tmp_path, refused):
    """The rows of dev are in reverse, then one of them has another label; train is not scored."""
    task, make_recipe, _ = CASES["classify"]
    run(Recipe.make(task, make_recipe(tmp_path), FEW), output=tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    dev, train = tmp_path / "reviews" / "dev.csv", tmp_path / "reviews" / "train.csv"
    rows = pd.read_csv(dev, keep_default_na=False).to_dict("records")
    other = next(row["stars"] for row in rows if row["stars"] != rows[0]["stars"])
    for changed in (rows[::-1], [rows[0] | {"stars": other}, *rows[1:]]):
        write_table(dev, changed)
        with refused():
            evaluate(str(tmp_path / "run"), None, None)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    write_table(dev, rows)
    write_table(train, pd.read_csv(train, keep_default_na=False).to_dict("records")[::-1])
    assert evaluate(str(tmp_path / "run"), None, None)[0].metrics["rows"] == len(rows)


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


def test_columns_of_other_names(reviews, tmp_path, call, refused):
    folder, rows = reviews
    (expected,) = evaluate(str(folder), str(write_table(tmp_path / "new.csv", rows)), tmp_path / "x")
    names = {"title": "heading", "body": "comment", "stars": "rating"}
    renamed = [{names.get(name, name): value for name, value in row.items()} for row in rows]
    file = write_table(tmp_path / "theirs.csv", renamed)
    columns = "--text", "heading,comment", "--label", "rating"
    code, out, _ = call("evaluate", folder, "--data", file, *columns, "--output", tmp_path / "y", "--json")
    assert code == 0
    scores = json.loads(out)["theirs"]
    assert {name: scores[name] for name in ("score", "rows", "leaks")} == {
        name: expected.metrics[name] for name in ("score", "rows", "leaks")
    }
    found = bertkit.load(folder).evaluate(pd.DataFrame(renamed), text=["heading", "comment"], label="rating")
    assert found["score"] == scores["score"]
    for given in ({}, {"text": ["heading", "comment"]}, {"text": ["comment"], "label": ["rating"]}):
        with refused():
            evaluate(str(folder), str(file), tmp_path / "z", **given)
    with refused():
        evaluate(str(folder), None, None, label=["rating"])


def test_a_task_with_names_of_its_own_takes_no_columns(finish, tmp_path, refused):
    folder = finish("squad1")
    with refused():
        evaluate(str(folder / "run"), str(folder / "squad"), tmp_path, text=["question"])


def test_several_label_columns_are_matched_by_name(tmp_path, refused):
    """The names of a model's labels are columns of 0 and 1, in any order."""
    rows = [{"body": f"word{n} {'good' if n % 2 else 'bad'}", "a": n % 2, "b": 1 - n % 2} for n in range(40)]
    data = {"dir": str(write_table(tmp_path / "train.csv", rows)), "text": ["body"], "label": ["a", "b"]}
    recipe = {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "data": data | {"max_length": 16}}
    run(Recipe.make(TASKS["classify"], recipe, FEW), output=tmp_path / "run")
    file = str(write_table(tmp_path / "new.csv", [row | {"c": 1} for row in rows[:9]]))
    one, other = (
        evaluate(str(tmp_path / "run"), file, tmp_path / name, label=label)[0]
        for name, label in (("x", None), ("y", ["b", "a"]))
    )
    assert one.metrics == other.metrics
    for label in (["a", "c"], ["a", "b", "c"]):
        with refused():
            evaluate(str(tmp_path / "run"), file, tmp_path / "z", label=label)


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


def test_of_several_labels_rows_with_unknown_ones_are_left_out(finish, tmp_path):
    folder = finish("classify, several labels")
    rows = pd.read_csv(folder / "reviews" / "test.csv", keep_default_na=False).to_dict("records")[:9]
    known = rows[1:]
    assert any(row["tags"] == "" for row in known), "no label is an answer"
    file = write_table(tmp_path / "new.csv", [rows[0] | {"tags": "slow|new"}, *known])
    (one,) = evaluate(str(folder / "run"), str(file), tmp_path / "x")
    assert one.metrics["rows"] == len(known)


@pytest.mark.parametrize("cells", [["News, local"], ["Sport", "News, local;Sport"], ['["News, local"]', '["Sport"]']])
def test_the_names_of_the_model_tell_the_separator(cells, tmp_path):
    """The comma divides nothing, as it is part of a name; the forms of the cells may differ from those of train."""
    names = ("News, local", "Sport")
    rows = [{"body": f"word{n} good", "label": "|".join(names[: n % 2 + 1])} for n in range(40)]
    data = {"dir": str(write_table(tmp_path / "train.csv", rows)), "text": ["body"], "max_length": 16}
    recipe = {"checkpoint": str(write_checkpoint(tmp_path / "bert")), "data": data}
    run(Recipe.make(TASKS["classify"], recipe, FEW), output=tmp_path / "run")
    lines, file = [], write_table(tmp_path / "new.csv", [{"body": f"so {cell}", "label": cell} for cell in cells])
    (one,) = evaluate(str(tmp_path / "run"), str(file), tmp_path / "x", lines.append)
    assert one.metrics["rows"] == len(cells)
    assert not any("lacks" in line for line in lines)
    found = [name for row in one.rows.column("label").to_pylist() for name in row]
    assert sorted(found) == sorted(name for cell in cells for name in names if name in cell)


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


@pytest.mark.parametrize("case", ["squad2", "swag", "classify, several labels", "ner"])
def test_the_table_of_a_run_has_its_scores(case, finish):
    folder = finish(case) / "run"
    (one,) = evaluate(str(folder / "predictions" / "dev.parquet"), None, None)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {key: metrics[key] for key in one.metrics.keys() - {"rows"}} == pytest.approx(
        {key: value for key, value in one.metrics.items() if key != "rows"}
    )


def test_a_table_of_another_program_is_scored(call, tmp_path):
    """Two of four are right; of class 1, two of three were found and two of three answers are right."""
    answers = ["1", "1", "1", "0"]
    rows = [{"index": n, "label": label, "prediction": answers[n]} for n, label in enumerate("1011")]
    file = write_table(tmp_path / "answers.csv", rows)
    code, out, err = call("evaluate", file, "--output", tmp_path / "scores")
    assert (code, err) == (0, "")
    assert "answers, 4 rows" in out
    assert f"2 mistakes, the worst first, and scores: {tmp_path / 'scores'}" in out
    assert {path.name for path in (tmp_path / "scores").iterdir()} == {"metrics.json", "mistakes.csv", "predictions"}
    code, out, _ = call("evaluate", file, "--json")
    metrics = json.loads(out)["answers"]
    assert metrics == json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert (metrics["accuracy"], metrics["f1_1"], metrics["rows"]) == (0.5, pytest.approx(2 / 3), 4)
    assert metrics["score_low"] < metrics["score"] == metrics["macro_f1"] < metrics["score_high"]
    own = [{"index": row["index"], "label": row["label"], "label_predicted": row["prediction"]} for row in rows]
    assert evaluate(str(write_table(tmp_path / "own.csv", own)), None, None)[0].metrics == metrics


def test_refusals(reviews, tmp_path, refused):
    folder, rows = reviews
    with refused():
        evaluate(str(write_table(tmp_path / "new.csv", rows)), None, None)
    with refused():
        evaluate(str(tmp_path / "new.csv"), str(tmp_path / "new.csv"), None)
    with refused():
        evaluate(str(folder), str(write_table(tmp_path / "new.csv", rows)), folder)
    write_head(tmp_path / "pre", "BertForMaskedLM")
    (tmp_path / "pre" / "recipe.toml").write_text('task = "pretrain"\n')
    with refused():
        evaluate(str(tmp_path / "pre"), None, None)
    with refused():
        evaluate(str(folder), str(write_reviews(tmp_path / "no.csv", 5, labelled=False)), tmp_path / "x")
