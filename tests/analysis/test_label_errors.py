"""Suspected label errors: planted ones come first, the choice is cleanlab's, and no row is seen by its own model."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from cleanlab.filter import find_label_issues
from cleanlab.multilabel_classification.filter import find_label_issues as find_issues_of_several
from cleanlab.rank import get_label_quality_scores
from huggingface_hub import constants
from pyarrow import parquet
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

from bertkit.analysis.doctor import examine, suspect_labels, tabulate_label_errors, write_label_errors
from bertkit.analysis.label_errors import (
    describe_label_errors,
    detect_label_errors,
    predict_by_folds,
    predict_by_vectors,
)
from bertkit.analysis.report import write_page
from bertkit.data.duplicates import hash_rows
from bertkit.data.sequences import encode_inputs
from bertkit.data.tokenizer import load_tokenizer
from bertkit.metrics.table import read_probabilities
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS
from bertkit.tasks.frozen import encode, load_encoder
from tests.official import write_checkpoint, write_glue, write_reviews, write_squad, write_table

pytestmark = pytest.mark.usefixtures("here")


def make_problem(rows, classes, turned, seed=0):
    """Return probabilities (S, L) that favour the true class, and labels (S,) of which the first ones are turned."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, classes, rows)
    logits = rng.normal(size=(rows, classes)) + 4 * np.eye(classes)[true]
    labels = np.where(np.arange(rows) < turned, (true + 1) % classes, true)
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), labels, true


@pytest.mark.parametrize("classes", [2, 5])
def test_rows_and_order_are_those_of_cleanlab_and_planted_errors_come_first(classes):
    probabilities, labels, true = make_problem(300, classes, turned=30, seed=classes)
    rows, scores, suggested = detect_label_errors(probabilities, labels)
    ranked = find_label_issues(labels, probabilities, return_indices_ranked_by="self_confidence", n_jobs=1)
    assert rows.tolist() == ranked.tolist()
    assert scores == pytest.approx(get_label_quality_scores(labels, probabilities))
    assert set(rows[:15]) <= set(range(30))
    assert (suggested == true[rows])[rows < 30].mean() > 0.9
    assert (suggested != labels[rows]).all()


def test_each_of_several_labels_is_a_problem_of_two_classes():
    rng = np.random.default_rng(3)
    true = rng.random((300, 4)) < [0.5, 0.3, 0.2, 0.0]  # nobody has the last label
    probabilities = np.where(true, rng.beta(20, 2, true.shape), rng.beta(2, 20, true.shape))
    labels = true.astype(np.float32)
    labels[:10, 1] = 1 - labels[:10, 1]
    rows, _, suggested = detect_label_errors(probabilities, labels)
    given = [np.flatnonzero(row).tolist() for row in labels]
    assert sorted(rows) == np.flatnonzero(find_issues_of_several(given, probabilities, n_jobs=1)).tolist()
    assert len(rows) >= 8
    assert set(rows[:8]) <= set(range(10))
    assert (suggested[:8] == true[rows[:8]]).all()
    assert not suggested[:, 3].any()


def test_without_an_error_nothing_is_suspected():
    labels = np.arange(20) % 2
    rows, _, suggested = detect_label_errors(np.where(np.eye(2)[labels] > 0, 0.9, 0.1), labels)
    assert len(rows) == len(suggested) == 0


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("bert"), initializer_range=0.1)


def make_reviews():
    """Return 60 rows: a word gives the label, and that of row 5, in line 7, is turned."""
    rows = [{"id": f"r{n}", "body": f"{('bad', 'good')[n % 2]} word{n}", "stars": "ab"[n % 2]} for n in range(60)]
    rows[5]["stars"] = "a"
    return rows


# --- With frozen vectors ----------------------------------------------------------------------------------------------


def check(path, bert, task="classify", **data):
    return examine(TASKS[task], {"checkpoint": str(bert), "data": {"dir": str(path), **data}}, None, ignore)


def predict(diagnosis, report=ignore):
    return predict_by_vectors(diagnosis.rows, diagnosis.checked.keys, diagnosis.recipe, report)


def test_probabilities_are_those_of_scikit_learn_with_equal_texts_in_one_fold(bert, tmp_path):
    rows = make_reviews()
    rows += [{**row, "stars": "ba"[n % 2]} for n, row in enumerate(rows[:10])]
    rare = [{"id": "r", "body": f"so word{n}", "stars": "c"} for n in range(4)]
    found = predict(check(write_table(tmp_path / "rows.csv", [*rows, *rare]), bert))
    assert sorted(found.column("row").to_pylist()) == list(range(2, 72)), "without the label of four rows"
    texts, tokenizer = found.column("text").to_pylist(), load_tokenizer(bert)
    vectors = encode(load_encoder(str(bert), "last"), encode_inputs(texts, None, tokenizer, 128))
    expected = cross_val_predict(
        LogisticRegression(max_iter=1000),
        vectors,
        found.column("label").to_pylist(),
        groups=hash_rows((text,) for text in texts),
        cv=StratifiedGroupKFold(5),
        method="predict_proba",
    )
    assert read_probabilities(found, ["a", "b"]) == pytest.approx(expected, abs=2e-3)


def test_of_many_rows_the_first_by_key_are_judged_and_said(bert, tmp_path, monkeypatch):
    monkeypatch.setattr("bertkit.analysis.label_errors.MOST_JUDGED", 30)
    rows, lines = make_reviews(), []
    found = predict(check(write_table(tmp_path / "rows.csv", rows), bert), lines.append)
    keys = hash_rows((row["body"],) for row in rows)
    assert sorted(found.column("row").to_pylist()) == sorted((np.argsort(keys)[:30] + 2).tolist())
    by = f"frozen vectors of {bert}, the first rows by key"
    assert lines == [f"looking for label errors by {by}: 30 of 60 rows"]
    assert tabulate_label_errors(describe_label_errors(found)).caption.startswith(f"Suspected label errors by {by}: ")


def test_vectors_of_many_rows_say_how_far_they_are(bert, tmp_path, monkeypatch):
    monkeypatch.setattr("bertkit.system.progress.SECONDS_OF_SILENCE", 0)
    monkeypatch.setattr("bertkit.tasks.frozen.batch_by_length", lambda lengths: np.array_split(np.arange(40), 4))
    monkeypatch.setattr("bertkit.tasks.frozen.locate_cache", lambda: tmp_path / "cache")
    rows = [{"body": f"word{n}", "stars": "ab"[n % 2]} for n in range(40)]
    lines = []
    predict(check(write_table(tmp_path / "rows.csv", rows), bert, dev_share=0.1), lines.append)
    shares = [int(re.fullmatch(r"  (\d+)% of the tokens read, \d+ s left", line)[1]) for line in lines[1:]]
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert shares[-1] == 100


def test_only_train_is_judged_where_dev_is_another_file(bert, tmp_path):
    write_table(tmp_path / "data" / "train.csv", make_reviews())
    write_table(tmp_path / "data" / "dev.csv", make_reviews()[:20])
    assert len(predict(check(tmp_path / "data", bert))) == 60
    assert len(predict(check(write_glue(tmp_path / "glue"), bert, "cola"))) == len(
        (tmp_path / "glue/CoLA/train.tsv").read_text(encoding="utf-8").splitlines()
    )


def test_other_data_need_no_model(bert, tmp_path, monkeypatch):
    monkeypatch.setattr("bertkit.analysis.label_errors.find_weights", pytest.fail)
    reviews = write_reviews(tmp_path / "reviews.csv")
    for split in ("train", "dev"):
        rows = [{"text": f"text {n}", "label": f"l{n // 4}"} for n in range(20)]
        write_table(tmp_path / "rare" / f"{split}.csv", rows)
    for task, path, data in (
        ("classify", reviews, {"text": ["title", "body"], "label": ["stars"]}),
        ("classify", reviews, {"text": ["title"], "label": ["slow", "dear"]}),
        ("classify", reviews, {"text": ["title"], "label": ["price"]}),
        ("classify", tmp_path / "rare", {}),
        ("squad2", write_squad(tmp_path / "squad"), {}),
    ):
        assert predict(check(path, bert, task, **data)) is None, (task, data)


def test_weights_are_looked_for_on_this_disk_only(tmp_path, monkeypatch):
    monkeypatch.setattr("bertkit.system.hub.explain_hub_trouble", pytest.fail)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    path = write_table(tmp_path / "rows.csv", make_reviews())
    cached = tmp_path / "cache" / "models--ada--tiny"
    write_checkpoint(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    for name in ("ada/tiny", "ada/tiny@abc"):
        assert suspect_labels(check(path, name), ignore).findings["label_errors"]["by"] == f"frozen vectors of {name}"
    (cached / "snapshots" / "abc" / "model.safetensors").unlink()
    for name in ("ada/tiny", cached / "snapshots" / "abc", "ada/other"):
        findings = suspect_labels(check(path, name), ignore).findings
        assert "label_errors" not in findings
        reason = f"suspected label errors: the weights of {name} are not on this disk; name a folder that has some"
        assert findings["left_out"][-1].startswith(reason)


# --- With folds -------------------------------------------------------------------------------------------------------


TRAIN = {"max_steps": 30, "learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"}


def train_folds(bert, path, folds=2, data=None, **options):
    """Return what `predict_by_folds` does for the training rows, with a few updates."""
    data = {"dir": str(path)} | (data or {})
    recipe = {"checkpoint": str(bert), "batch_size": 8, "precision": "fp32", "data": data, "train": TRAIN}
    train = examine(TASKS["classify"], recipe, None, ignore).rows["train"]
    return predict_by_folds(train, recipe, folds=folds, **options)


@pytest.fixture(scope="module")
def done(bert, tmp_path_factory):
    """Return the predictions of `make_reviews` in a folder with train and dev."""
    root = tmp_path_factory.mktemp("doctor")
    folder, output, rows = root / "data", root / "out", make_reviews()
    write_table(folder / "train.csv", rows)
    write_table(folder / "dev.csv", rows[:4])
    return train_folds(bert, folder, output=output), rows, output


def test_a_turned_label_is_found_by_models_that_have_not_seen_it(done, tmp_path):
    rows, given, _ = done
    assert rows.column("id").to_pylist() == [row["id"] for row in given]
    assert read_probabilities(rows, ["a", "b"]).sum(axis=1) == pytest.approx(1, abs=1e-5)
    described = describe_label_errors(rows)
    first = described["suspected"][0]
    assert [first[key] for key in ("row", "texts", "given", "suggested")] == [7, [given[5]["body"]], "a", "b"]
    assert first["score"] == first["probabilities"]["a"] == pytest.approx(1 - first["suggested_score"], abs=1e-5)
    assert json.loads(json.dumps(described)) == described
    table = tabulate_label_errors(described, most=1)
    shown = [f"a ({first['score']:.3f})", f"b ({first['suggested_score']:.3f})"]
    assert table.caption.startswith("Suspected label errors by 2 folds: ")
    assert [cell.lines[0][0] for cell in table.rows[0]] == ["7", given[5]["body"], *shown]
    write_label_errors(described, rows, tmp_path / "errors.csv")
    written = pd.read_csv(tmp_path / "errors.csv")
    assert len(written) == len(described["suspected"])
    assert written.loc[0, ["id", "stars", "row", "given", "suggested"]].tolist() == ["r5", "a", 7, "a", "b"]
    assert written.probability_b[0] == pytest.approx(first["probabilities"]["b"])


def test_a_table_of_pandas_is_enough(tmp_path):
    probabilities, labels, _ = make_problem(200, 3, turned=10)
    names = np.array(["bad", "good", "so"])
    table = pd.DataFrame(probabilities, columns=[f"probability_{name}" for name in names])
    table.assign(text=[f"text {n}" for n in range(200)], label=names[labels]).to_parquet(tmp_path / "rows.parquet")
    rows, _, suggested = detect_label_errors(probabilities, labels)
    found = describe_label_errors(parquet.read_table(tmp_path / "rows.parquet"))["suspected"]
    assert [(one["row"], one["texts"], one["given"], one["suggested"]) for one in found] == [
        (row + 1, [f"text {row}"], names[labels[row]], names[place])
        for row, place in zip(rows.tolist(), suggested, strict=True)
    ]


def test_finished_folds_are_not_trained_again_nor_taken_for_other_rows(done, bert, refused):
    rows, given, output = done
    said, path = [], output.parent / "data" / "train.csv"
    options = {"output": output, "report": said.append}
    again = train_folds(bert, path.parent, **options)
    assert again.equals(rows, check_metadata=True)
    assert any("2 of them finished" in line for line in said)
    try:
        write_table(path, sorted([{**given[0], "stars": "b"}, *given[1:]], key=lambda row: row["body"]))
        with refused():
            train_folds(bert, path.parent, **options)
    finally:
        write_table(path, given)


def test_the_command_continues_drops_suspected_rows_and_reports_them(done, bert, call, tmp_path):
    """The folder of `done` has finished folds, so nothing is trained."""
    rows, given, output = done
    data, settings = output.parent / "data", []
    for key, value in {**TRAIN, "precision": "fp32", "batch_size": 8}.items():
        settings += ["--set", f"train.{key}={value}" if key in TRAIN else f"{key}={value}"]
    options = ["--model", bert, "--folds", 2, "--output", output, *settings]
    files = ["--json", tmp_path / "found.json", "--write", tmp_path / "clean", "--drop", "label-errors"]
    code, printed, trouble = call("doctor", data, *options, *files)
    assert (code, trouble) == (0, "")
    assert "2 of them finished" in printed
    assert "Suspected label errors" in printed
    found = json.loads((tmp_path / "found.json").read_text())["label_errors"]
    assert found == describe_label_errors(rows)
    dropped = {given[entry["row"] - 2]["id"] for entry in found["suspected"]}
    train, dev = (pd.read_csv(tmp_path / "clean" / f"{split}.csv").id.tolist() for split in ("train", "dev"))
    assert train == [row["id"] for row in given if row["id"] not in dropped]
    assert len(dev) == 4
    write_page([output], tmp_path / "page.html")
    assert f"Suspected label errors by 2 folds: {len(dropped)} of 60 rows" in (tmp_path / "page.html").read_text()


def test_the_command_drops_the_rows_that_frozen_vectors_suspect(bert, call, tmp_path):
    rows = [{"id": str(n), "text": f"{['bad', 'good'][n % 2]} word{n}", "label": "ny"[n % 2]} for n in range(100)]
    rows[7]["label"], rows[30]["label"] = "n", "y"
    write_table(tmp_path / "reviews.csv", rows)
    words = ["doctor", "reviews.csv", "--drop", "label-errors", "--write", "clean.csv"]
    code, _, trouble = call(*words, "--model", bert, "--json", "found.json")
    assert (code, trouble) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())["label_errors"]["suspected"]
    dropped = {rows[entry["row"] - 2]["id"] for entry in found}
    assert {"7", "30"} <= dropped
    left = pd.read_csv(tmp_path / "clean.csv", dtype=str).id.tolist()
    assert left == [row["id"] for row in rows if row["id"] not in dropped]
    (tmp_path / "clean.csv").unlink()
    code, _, trouble = call(*words, "--model", shutil.copytree(bert, tmp_path / "other", ignore=ignore_weights))
    assert code == 2
    assert "there was no search for label errors; add --folds 5, or leave --drop label-errors out" in trouble
    assert not (tmp_path / "clean.csv").exists()


ignore_weights = shutil.ignore_patterns("*.safetensors")


def test_what_has_no_label_errors_is_refused(bert, tmp_path, refused):
    write_reviews(tmp_path / "reviews.csv", 30)
    write_table(tmp_path / "few.csv", [{"text": f"text {n // 20}", "label": n // 20 % 2} for n in range(60)])
    for name, folds, data in (
        ("reviews.csv", 2, {"text": ["body"], "label": ["price"]}),
        ("few.csv", 9, {}),
    ):
        with refused():
            train_folds(bert, tmp_path / name, folds, data, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
