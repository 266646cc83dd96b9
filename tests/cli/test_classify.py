"""`bertkit classify` from the command line: a run, folds, a grid, predictions of the same table, and mistakes."""

import csv
import json

import pytest

from bertkit.errors import UsageError
from bertkit.studies.cells import locate_data
from tests.official import write_checkpoint, write_reviews, write_table

NAMED = ["--text", "title,body", "--label", "stars"]


@pytest.fixture
def small(tmp_path, capsys):
    """Write reviews.csv and a tiny BERT to the current directory; return the options of a run of a few updates."""
    write_reviews(tmp_path / "reviews.csv", 120)
    write_checkpoint(tmp_path / "bert", initializer_range=0.1)
    capsys.readouterr()
    settings = ("precision=fp32", "preset=paper", "batch_size=8", "train.learning_rate=3e-3")
    return ["--data", "reviews.csv", "--model", "bert", *(word for setting in settings for word in ("--set", setting))]


def read_rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_becomes_a_classifier_that_predicts_the_table(finish, call, small, tmp_path):
    out = finish("classify", *small, *NAMED, "--output", "runs/stars")
    for words in (
        "reviews.csv: text from 'title' and 'body', label from 'stars'",
        "single label classification (3 different whole numbers), 3 labels: 1, 2, 3",
        "scores: macro F1 ",
        "accuracy, test ",
        "a constant answer",
        "bertkit predict runs/stars --input FILE.csv",
    ):
        assert words in out
    assert "micro F1" not in out, "it is the accuracy"
    run = tmp_path / "runs" / "stars"
    assert (run / "curves.png").exists()
    code, _, err = call("predict", "runs/stars", "--input", "reviews.csv", "--output", "all.csv", "--precision", "fp32")
    assert (code, err) == (0, "")
    rows = {row["id"]: row for row in read_rows(tmp_path / "all.csv")}
    assert len(rows) == 120
    for split in ("dev", "test"):
        for row in read_rows(run / "predictions" / f"{split}.csv"):
            found = rows[row["id"]]
            assert list(found) == list(row)
            assert {key: found[key] for key in found if not key.startswith("prob")} == {
                key: row[key] for key in row if not key.startswith("prob")
            }
            assert float(found["probability"]) == pytest.approx(float(row["probability"]), abs=1e-5)
    out = finish("classify", *small, *NAMED, "--output", "runs/stars")
    assert "runs/stars is finished" in out
    code, _, err = call("classify", *small, "--label", "tags", "--output", "runs/stars")
    assert code == 2
    assert "belongs to another run" in err


def test_a_run_with_many_labels_prints_25_lines_without_a_terminal(finish, small, tmp_path):
    labels = [f"label {number % 77}" for number in range(77 * 6)] + ["rare"]
    write_table(tmp_path / "many.csv", [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)])
    settings = ["--set", "precision=fp32", "--set", "train.max_steps=3"]
    out = finish("classify", "--data", "many.csv", "--model", "bert", *settings, "--output", "runs/many")
    lines = out.splitlines()
    assert len(lines) <= 25
    assert lines[-4].startswith("Results: runs/many: metrics.json")
    assert any(line.startswith("warning: 2 of 78 labels have fewer than 3 rows in train, such as ") for line in lines)
    shares = next(line for line in lines if line.startswith("  train: label 0 "))
    assert shares.count("%") == 20
    assert shares.endswith(", …")


def test_folds_print_their_scores_and_predict_every_row(finish, small, tmp_path):
    settings = ["--set", "train.max_steps=2", "--set", "data.class_weights=balanced"]
    out = finish("classify", *small, *NAMED, "--folds", "2", *settings, "--output", "runs/f")
    assert "mean ± sd (n) over 2 folds" in out
    assert len(read_rows(tmp_path / "runs" / "f" / "out_of_fold.csv")) == 120
    assert "macro_f1" in json.loads((tmp_path / "runs" / "f" / "folds.json").read_text())
    recipe = "runs/f/fold-1/classify/recipe.toml"  # its own fold and number of folds are replaced
    out = finish("classify", "--recipe", recipe, "--folds", "3", "--dry-run")
    assert "3 runs" in out


def test_a_search_before_the_run(finish, small, tmp_path, here):
    out = finish("classify", *small, *NAMED, "--search", "1", "--output", "runs/stars")
    for words in (
        "searching num_train_epochs: 1 trial, scored on held-back rows of train",
        "trial 1: num_train_epochs 3: score ",
        "the best of 1 trial: ",
        "scores: macro F1 ",
    ):
        assert words in out
    assert (tmp_path / "runs/stars/search/trials.md").exists()
    finish("predict", "runs/stars", "A title", "A fine film.")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--text", "headline"], "no column 'headline'"),
        (["--text", "headline", "--set", "freeze=encoder"], "no column 'headline'"),
        ([*NAMED, "--output", "other"], "other is not empty and holds no run"),
        (["--text", "headline", "--folds", "2"], "no column 'headline'"),
        ([*NAMED, "--folds", "2", "--output", "other"], "other is not empty and holds no study"),
        ([*NAMED, "--folds", "2", "--workers", "many"], "--workers is 'many'"),
    ],
)
def test_a_dry_run_of_what_training_refuses_is_refused(call, small, tmp_path, options, refusal):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    code, _, err = call("classify", *small, *options, "--dry-run")
    assert (code, err.count("\n")) == (2, 1)
    assert refusal in err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_first_what_is_read_and_what_it_costs(finish, small):
    out = finish("classify", *small, *NAMED, "--dry-run")
    parts = ("3 labels: 1, 2, 3", "reviews.csv: train ", "expected here", "dry run: nothing was", "task = ", "[train]")
    places = [out.index(part) for part in parts]
    assert places == sorted(places)


def test_a_study_takes_a_file_for_the_columns_that_read_one(finish, small, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[column]]\nname = "own"\ntask = "classify"\n'
        '[recipe]\nbatch_size = 8\n[recipe.data]\ntext = ["title"]\nlabel = ["stars"]\n'
    )
    words = ["study", "mine.toml", "--data", "reviews.csv", "--model", "bert", "--set", "train.max_steps=2"]
    assert "1 run, one after another" in finish(*words, "--dry-run")
    printed = finish(*words, "--set", "seeds=[1, 2]", "--output", "runs/own")
    assert "always giving the same answer scores" in " ".join(printed.split()), "long lines are wrapped"
    runs = [json.loads((tmp_path / f"runs/own/own/seed-{seed}/metrics.json").read_text()) for seed in (1, 2)]
    table = (tmp_path / "runs/own/table.md").read_text().splitlines()
    assert "|  | own | TF-IDF | frozen vectors |" in table
    line = next(line for line in table if line.startswith("| ours | "))
    found = [[run[key] for run in runs if key in run] for key in ("tfidf_macro_f1", "frozen_macro_f1")]
    assert line.endswith(" (2) | " + " | ".join(f"{100 * sum(x) / len(x):.1f}" for x in found) + " |")
    assert any(line.startswith("- own: macro F1 in percent; classify, dev; always giving the same") for line in table)
    file = str(tmp_path / "reviews.csv")
    assert locate_data(file, "ner", "ner", {}) == {"data": {"dir": file}}
    assert locate_data(file, "", "classify", {"data": {"dir": "other.csv"}}) == {}
    with pytest.raises(UsageError, match=r"there is no folder .*reviews\.csv/glue for rte"):
        locate_data(file, "glue", "rte", {})
