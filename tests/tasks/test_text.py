"""A person's own texts as a task: columns, splits, labels, weights, thresholds, scores, baselines and files."""

import json
from functools import cache, partial
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pytest
import transformers
from sklearn.utils.class_weight import compute_class_weight

from bertkit.data.formats import hub
from bertkit.data.labels import REGRESSION, SEVERAL, SINGLE
from bertkit.data.sequences import Sequences
from bertkit.data.splits import describe_shares
from bertkit.inference.predictor import Predictor
from bertkit.metrics.rows import take_values
from bertkit.model.checkpoint import load_config, load_model
from bertkit.model.heads import BertForSequenceClassification
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.tasks.kinds import SEVERAL_LABELS
from bertkit.tasks.task import score_summaries, shorten_text
from bertkit.tasks.text import CLASSIFICATION, TextSequences
from bertkit.training.recipe import Recipe, read_recipe
from bertkit.training.run import run
from bertkit.training.scoring import read_decided
from tests.conftest import draft
from tests.official import write_glue, write_reviews, write_table
from tests.tasks.conftest import load_examples, make_small, read_losses, read_rows
from tests.world import assert_same_bits, read_weights, stop_at

load = partial(load_examples, CLASSIFICATION)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv", 160)


def write_texts(path, labels):
    """Write a table of numbered texts with these labels."""
    return write_table(path, [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)])


def list_texts(examples, column="text"):
    return examples.rows.find(column).to_pylist()


# --- Columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "others", "said"),
    [
        (["Review"], ["id", "Stars"], "text from 'Review', label from 'Stars', guessed from the names"),
        (
            ["sentence1", "sentence2"],
            ["gold", "label"],
            "text from 'sentence1' and 'sentence2', label from 'label', guessed from the names; set --text and --label",
        ),
        (["text"], ["label", "class"], "text from 'text', label from 'label'"),
    ],
)
def test_columns_are_guessed_by_their_names_and_told(tmp_path, texts, others, said):
    rows = [dict.fromkeys(texts, f"text {n}") | dict.fromkeys(others, n % 2) for n in range(60)]
    _, lines = load(write_table(tmp_path / "t.csv", rows))
    assert lines[0].startswith(f"{tmp_path / 't.csv'}: {said}")


def test_what_is_named_is_taken_and_a_label_is_no_text(reviews, tmp_path):
    _, lines = load(reviews, text=["title", "body"], label=["tags"])
    assert lines[0] == f"{reviews}: text from 'title' and 'body', label from 'tags'"
    both = write_table(tmp_path / "t.csv", [{"title": f"{n % 2}", "text": f"text {n}"} for n in range(60)])
    assert load(both, label=["title"])[0]["train"].text == ("text",)
    both = write_table(tmp_path / "t.csv", [{"label": f"text {n}", "class": f"{n % 2}"} for n in range(60)])
    assert load(both, text=["label"])[0]["train"].space.columns == ("class",)


def test_wrong_options_are_refused(reviews, tmp_path, refused):
    table = write_table(tmp_path / "t.csv", [{"a": "1", "b": "2"}])
    for options in (
        {"text": ["titel"]},
        {"label": ["star"]},
        {"text": ["title"], "label": ["title"]},
        {"label": ["id"]},
        {"group": "client"},
        {"dir": ""},
        {"class_weights": {"1": 1.0, "2": 1.0}},
        {"label": ["price"], "class_weights": "balanced"},
    ):
        with refused():
            configure(reviews, **options)
    for text in ([], ["a"]):
        with refused():
            load(table, text=text)


def test_wrong_recipes_are_refused_before_anything_is_read(bert, refused):
    for data in (
        {"text": ["a", "b", "c"]},
        {"problem_type": "single"},
        {"dev_share": 0.5, "test_share": 0.5},
        {"dev_share": 1.0},
        {"folds": 3, "fold": 3},
        {"fold": 1},
        {"folds": 3, "tune_share": 0.5},
        {"unlabelled": "keep"},
        {"class_weights": "equal"},
        {"doc_stride": 0},
    ):
        with refused():
            Recipe.make(CLASSIFICATION, {"checkpoint": str(bert), "data": {"dir": "no.csv"} | data})


# --- Splits -----------------------------------------------------------------------------------------------------------


def test_one_file_gives_three_splits_in_its_order(reviews):
    examples, lines = load(reviews, text=["title", "body"])
    names = {split: list_texts(found, "id") for split, found in examples.items()}
    assert list(names) == ["train", "dev", "test"]
    assert sorted(chain(*names.values()), key=lambda name: int(name[1:])) == [f"r{n}" for n in range(160)]
    assert all(found == sorted(found, key=lambda name: int(name[1:])) for found in names.values())
    assert f"{reviews}: " + ", ".join(f"{split} {len(found)}" for split, found in names.items()) in lines
    assert load(reviews, text=["title", "body"], test_share=0.0)[0].keys() == {"train", "dev"}
    assert len(load(reviews, max_train_samples=9)[0]["train"]) == 9


def test_a_data_set_on_the_hub_with_class_labels_and_an_unlabelled_test_split(monkeypatch):
    names = ["negative", "positive"]
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    splits = datasets.DatasetDict()
    for split, labels in {"train": [0, 1] * 30, "validation": [0, 1] * 10, "test": [-1] * 9}.items():
        rows = {"sentence": [f"text {number}" for number in range(len(labels))], "label": labels}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(hub, "explain_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: splits)
    found, lines = load("owner/reviews")
    assert {split: len(examples) for split, examples in found.items()} == {"train": 60, "dev": 20, "unlabelled": 9}
    assert found["train"].space.names == tuple(names)
    assert found["dev"].labels.tolist() == [0, 1] * 10
    assert lines[0].startswith("owner/reviews, train: text from 'sentence', label from 'label', guessed")


def test_files_of_every_split_win_whatever_their_formats(tmp_path, refused):
    for split, form, size in (("train", "csv", 20), ("validation", "jsonl", 6), ("test", "parquet", 4)):
        write_texts(tmp_path / "d" / f"{split}.{form}", [number % 2 for number in range(size)])
    examples, _ = load(tmp_path / "d", dev_share=0.5)
    assert {split: len(found) for split, found in examples.items()} == {"train": 20, "dev": 6, "test": 4}
    assert examples["test"].labels.tolist() == [0, 1, 0, 1]
    with refused():
        load(tmp_path / "d", folds=3)
    (tmp_path / "d" / "validation.jsonl").unlink()
    examples, _ = load(tmp_path / "d", dev_share=0.5)
    assert (len(examples["train"]) + len(examples["dev"]), len(examples["test"])) == (20, 4)


def test_rows_of_a_group_or_with_equal_texts_are_in_one_split(tmp_path):
    rows = [{"text": f"{n}", "label": f"{n % 2}", "customer": f"c{n % 25}"} for n in range(200)]
    rows += [{"text": f" {n}\n", "label": "1", "customer": f"d{n}"} for n in range(200)]
    table = write_table(tmp_path / "t.csv", rows)
    for options, column in (({}, "text"), ({"group": "customer"}, "customer")):
        examples, _ = load(table, **options)
        parts = [{cell.strip() for cell in list_texts(found, column)} for found in examples.values()]
        assert len(parts) == 3
        assert len(set.union(*parts)) == sum(map(len, parts))
        assert set(CLASSIFICATION.tabulate_examples(examples["dev"]).groups) == parts[1]


def test_a_pair_is_split_by_both_texts(tmp_path):
    rows = [{"sentence1": "the same", "sentence2": f"{n}", "label": n % 2} for n in range(100)]
    examples, _ = load(write_table(tmp_path / "t.csv", rows))
    assert {split for split, found in examples.items() if len(found)} == {"train", "dev", "test"}
    assert examples["dev"].text == ("sentence1", "sentence2")


def test_labels_come_from_train_alone_and_others_are_told_and_left_out(tmp_path, refused):
    write_texts(tmp_path / "d" / "train.csv", ["good", "bad"] * 10)
    dev = write_texts(tmp_path / "d" / "dev.csv", ["odd", "bad", "strange", "odd", "good"])
    write_texts(tmp_path / "d" / "test.csv", ["good", "odd"])
    examples, lines = load(tmp_path / "d")
    assert list_texts(examples["dev"]) == ["text 1", "text 4"]
    assert examples["dev"].labels.tolist() == [0, 1]
    assert f"{dev}, dev: train lacks the labels 'odd' (2), 'strange' (1); these rows are left out" in lines
    write_texts(dev, ["odd", "odd"])
    with refused():
        load(tmp_path / "d")
    write_texts(tmp_path / "several" / "train.csv", ["a|b", "b", ""] * 5)
    dev = write_texts(tmp_path / "several" / "dev.csv", ["a|c", "c"])
    examples, lines = load(tmp_path / "several")
    assert examples["dev"].labels.tolist() == [[1, 0], [0, 0]], "of several labels the others stay"
    assert f"{dev}, dev: train lacks the labels 'c' (2)" in lines


@pytest.mark.parametrize("change", [{"label": ""}, {}])
def test_a_test_file_without_labels_is_predicted(tmp_path, change):
    write_texts(tmp_path / "d" / "train.csv", ["good", "bad"] * 20)
    write_table(tmp_path / "d" / "test.csv", [{"text": f"new {number}"} | change for number in range(3)])
    examples, lines = load(tmp_path / "d")
    assert list(examples) == ["train", "dev", "unlabelled"]
    assert examples["unlabelled"].labels is None
    assert lines[2].endswith("test.csv, test: no labels in 'label'; predicted, not scored")
    assert lines[3].endswith("unlabelled 3")
    if change:
        write_table(tmp_path / "d" / "test.csv", [{"text": "new", "label": label} for label in ("good", "")])
        examples, lines = load(tmp_path / "d", unlabelled="drop")
        assert (len(examples["test"]), examples["test"].left_out) == (1, [3])
        assert any("1 row has no label in 'label' (first: line 3); left out" in line for line in lines)


@pytest.mark.parametrize("labels", [["good", "bad"], ["1.5", "2"]])
def test_rows_without_a_label_are_an_error_or_left_out_and_told(tmp_path, refused, labels):
    path = write_texts(tmp_path / "t.csv", ["", *labels * 30])
    with refused():
        load(path)
    examples, lines = load(path, unlabelled="drop")
    assert sum(map(len, examples.values())) == 60
    said = f"{path}: 1 row has no label in 'label' (first: line 2); left out"
    assert [line for line in lines if "no label" in line] == [said]
    assert sum(len(load(path, folds=3, fold=fold, unlabelled="drop")[0]["dev"]) for fold in range(3)) == 60


def test_missing_labels_are_counted_once_for_a_file(tmp_path):
    """They are in all three splits that are made of it."""
    path = write_texts(tmp_path / "t.csv", ["", "good", "bad"] * 40)
    _, lines = load(path, unlabelled="drop", dev_share=0.3, test_share=0.3)
    assert [line for line in lines if "no label" in line] == [
        f"{path}: 40 rows have no label in 'label' (first: line 2); left out"
    ]
    write_texts(tmp_path / "d" / "train.csv", ["good", "bad", ""] * 20)
    write_texts(tmp_path / "d" / "dev.csv", ["", "bad"] * 20)
    _, lines = load(tmp_path / "d", unlabelled="drop")
    assert [line.partition(": ")[2][:7] for line in lines if "no label" in line] == ["20 rows", "20 rows"]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([f"c{n // 2}" for n in range(60)], "30 labels have fewer than 3 rows in train, such as 'c0' (2), 'c1' (2), "),
        (["good", "bad"] * 30 + ["so"], "warning: 1 of 3 labels have fewer than 3 rows in train, such as 'so' (1)"),
        (["good", "bad"] * 30, ""),
        ([f"{n}.5" for n in range(60)], ""),
    ],
)
def test_labels_of_few_rows_are_told(tmp_path, labels, said):
    path = write_texts(tmp_path / "t.csv", labels)
    _, lines = load(path, dev_share=None)
    found = [line for line in lines if "fewer than" in line]
    assert len(found) == bool(said)
    assert all(said in line for line in found)
    assert any("is 'label' the column of the labels?" in line for line in found) == (len(set(labels)) == 30)


def test_rows_without_a_text_are_left_out_and_told_or_refused_if_they_are_many(tmp_path, refused):
    """One of two texts may be missing, as titles are."""
    blank = {"text": " ", "text_pair": None}
    rows = [{"text": f"text {n}", "text_pair": ""} | (blank if n < 3 else {}) | {"label": n % 2} for n in range(60)]
    path = write_table(tmp_path / "t.jsonl", rows)
    examples, lines = load(path)
    assert sum(map(len, examples.values())) == 57
    assert f"warning: {path}: 3 rows have no text in 'text' or 'text_pair' (first: line 1); left out" in lines
    told = f"{path}: 57 rows have no text in 'text_pair' (first: line 4); the other text is read"
    assert [line for line in lines if line.endswith("is read")] == [told]
    write_table(path, [{"text": " "}, *rows])
    with refused():
        load(path)
    assert sum(map(len, load(path, is_check=True)[0].values())) == 60


def test_the_kind_the_labels_and_their_shares_are_told(tmp_path):
    """20 of 80 against 10 of 10: pooled 1/3, so 3 standard errors are 3 sqrt(2/9 (1/80 + 1/10)) = 0.47 < 0.75."""
    write_texts(tmp_path / "d" / "train.csv", ["a"] * 20 + ["b"] * 60)
    write_texts(tmp_path / "d" / "dev.csv", ["a"] * 10)
    _, lines = load(tmp_path / "d")
    assert lines[1] == "single label classification (texts), 2 labels: a, b; data.problem_type changes it"
    assert lines[-2:] == [
        "  train: a 25.0%, b 75.0%",
        "warning: shares in dev that differ from those in train by more than three standard errors: a 100.0%, b 0.0%",
    ]
    for count, is_odd in ((10, True), (7, False)):  # 0.7 - 0.25 = 0.45; 3 sqrt(0.21 (1/80 + 1/10)) = 0.461
        first, *lines = describe_shares(
            {"train": np.array([20]), "dev": np.array([count])}, {"train": 80, "dev": 10}, ["a"]
        )
        assert "warning" not in first
        assert len(lines) == is_odd
        assert all("warning" in line for line in lines)
    write_texts(tmp_path / "d" / "train.csv", ["0.5", "1.5"] * 5)
    write_texts(tmp_path / "d" / "dev.csv", ["2.25", "2.25"])
    _, lines = load(tmp_path / "d")
    assert lines[1] == "regression (2 different numbers), numbers; data.problem_type changes it"
    assert lines[-2:] == ["  train: mean 1.000, sd 0.500", "  dev: mean 2.250, sd 0.000"]


# --- Weights ----------------------------------------------------------------------------------------------------------


def configure(place, **options):
    return CLASSIFICATION.configure(draft(CLASSIFICATION, {"data": options}), [], load(place, **options)[0])


def test_balanced_weights_are_those_of_scikit_learn(tmp_path):
    table = write_texts(tmp_path / "t.csv", ["a"] * 60 + ["b"] * 30 + ["c"] * 10)
    found = configure(table, class_weights="balanced", dev_share=0.2)
    train = load(table, dev_share=0.2)[0]["train"].labels
    weights = compute_class_weight("balanced", classes=np.arange(3), y=train)
    assert found["class_weights"] == pytest.approx(weights.tolist())
    assert (found["id2label"], found["problem_type"]) == ({0: "a", 1: "b", 2: "c"}, SINGLE)


def test_balanced_weights_of_several_labels_are_negatives_per_positive(tmp_path):
    """a has 3 of 4 rows, b 1 of 4."""
    write_texts(tmp_path / "d" / "train.csv", ["a", "a|b", "a", ""] * 5)
    write_texts(tmp_path / "d" / "dev.csv", ["a"])
    found = configure(tmp_path / "d", class_weights="balanced")
    assert found["class_weights"] == pytest.approx([1 / 3, 3.0])
    assert found["problem_type"] == SEVERAL
    write_texts(tmp_path / "d" / "train.csv", ["a", "a|b"] * 5)
    assert configure(tmp_path / "d", class_weights="balanced")["class_weights"] == pytest.approx([0.1, 1.0])


def test_given_weights_are_in_the_order_of_the_labels_and_none_are_left_out(reviews):
    assert configure(reviews, class_weights={"3": 3.0, "1": 1, "2": 0.5})["class_weights"] == [1.0, 0.5, 3.0]
    assert "class_weights" not in configure(reviews)
    assert configure(reviews, label=["price"])["problem_type"] == REGRESSION


# --- Scores -----------------------------------------------------------------------------------------------------------


def make_data(labels, place, **options):
    """Return a data set with these labels, in the label space of a table."""
    space = load(place, **options)[0]["train"].space
    empty = np.zeros(len(labels), int)
    return TextSequences(Sequences(empty, empty, empty, np.array(labels)), space)


def test_the_score_of_a_run_and_the_baselines_of_each_kind(reviews):
    """The most frequent label of train is 2 (index 1), which is right in one of three."""
    train, dev = make_data([1, 1, 0], reviews), make_data([0, 1, 2], reviews)
    scores = score_summaries(CLASSIFICATION, np.eye(3), dev)
    assert scores["score"] == scores["macro_f1"] == scores["accuracy"] == 1
    found = CLASSIFICATION.baseline(train, dev)
    assert found["majority_accuracy"] == pytest.approx(1 / 3)
    assert found["majority_score"] == found["majority_macro_f1"] == pytest.approx(0.5 / 3)  # F1 of 2 * 1 / (3 + 1)
    several = {"label": ["tags"]}
    train = make_data([[1, 0], [1, 0], [0, 1]], reviews, **several)
    dev = make_data([[1, 0], [1, 1], [0, 0]], reviews, **several)
    found = CLASSIFICATION.baseline(train, dev)
    assert found["majority_exact_match"] == pytest.approx(1 / 3)
    assert found["majority_score"] == pytest.approx((4 / 5 + 0) / 2)
    number = {"label": ["price"]}
    train, dev = make_data([1.0, 2.0], reviews, **number), make_data([1.0, 3.0], reviews, **number)
    found = CLASSIFICATION.baseline(train, dev)
    assert found["majority_score"] == found["majority_pearson"] == 0
    assert found["majority_r2"] == pytest.approx(-0.25)  # 1 - (0.25 + 2.25) / 2
    assert "majority_rmse" not in found, "lower is better"


def test_a_score_that_may_be_below_its_baseline_is_no_warning():
    """Weights may lower accuracy below that of the majority on purpose; a smaller error is better."""
    weighted = {"macro_f1": 0.4, "majority_macro_f1": 0.3, "accuracy": 0.7, "majority_accuracy": 0.9}
    numbers = {"pearson": 0.9, "majority_pearson": 0.0, "rmse": 0.1, "r2": 0.5, "majority_r2": 0.0}
    assert CLASSIFICATION.comment(weighted) == CLASSIFICATION.comment(numbers) == []


def test_thresholds_in_the_order_of_the_labels_decide_other_data(reviews):
    data = make_data([[1, 0], [1, 1], [0, 0], [0, 1]], reviews, label=["tags"])
    logits = np.array([[-1.0, 3.0], [-1.5, 4.0], [-3.0, 3.0], [-3.0, 4.0]])
    rows = CLASSIFICATION.decode(logits, data).rows
    scores = take_values(CLASSIFICATION.score(rows))
    assert scores["macro_f1"] == 1
    assert scores["fixed_macro_f1"] < 1
    tuned = read_decided(rows)
    assert tuned == {"thresholds": [scores["threshold_dear"], scores["threshold_slow"]]}
    again = score_summaries(CLASSIFICATION, logits - 9.0, data, tuned)
    assert (again["macro_f1"], again["threshold_dear"]) == (0.0, scores["threshold_dear"])


# --- Runs -------------------------------------------------------------------------------------------------------------


def make_recipe(checkpoint, place, epochs=8.0, **data):
    """48 rows of training are 48 updates."""
    return make_small(checkpoint, place, {"max_length": 64} | data, num_train_epochs=epochs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    for seed, (split, size) in enumerate({"train": 48, "dev": 24, "test": 16}.items()):
        write_reviews(place / f"{split}.csv", size, seed)
    return place


@pytest.fixture(scope="module")
def finish(bert, folder, tmp_path_factory):
    """Return a finished run on a label, made once: its directory and metrics."""

    @cache
    def finish(label):
        output = tmp_path_factory.mktemp("run") / "run"
        recipe = make_recipe(bert, folder, text=["title", "body"], label=[label])
        return output, run(Recipe.make(CLASSIFICATION, recipe), output=output)

    return finish


def test_a_run_writes_rows_labels_and_probabilities(finish, folder):
    output, metrics = finish("stars")
    assert metrics["score"] == metrics["macro_f1"] > 0.8 > metrics["majority_score"]
    for split, prefix in (("dev", ""), ("test", "test_")):
        for name in ("micro_f1", "weighted_f1", "matthews_correlation", "roc_auc", "average_precision"):
            assert 0.5 < metrics[f"{prefix}{name}"] <= 1
        given = read_rows(folder / f"{split}.csv")
        found = read_rows(output / "predictions" / f"{split}.csv")
        added = ["label", "probability", "probability_1", "probability_2", "probability_3"]
        assert list(found[0]) == [*given[0], *added]
        assert [{name: row[name] for name in given[0]} for row in found] == given, "the rows of the input, in order"
        right = [row["label"] == row["stars"] for row in found]
        assert np.mean(right) == pytest.approx(metrics[f"{prefix}accuracy"])
        for row in found:
            each = [float(row[f"probability_{star}"]) for star in "123"]
            assert sum(each) == pytest.approx(1)
            assert float(row["probability"]) == max(each) == each[int(row["label"]) - 1]
    assert read_recipe(output / "recipe.toml")["data"]["label"] == ["stars"]
    assert "official" not in (output / "README.md").read_text(), "there are no official files to compare with"
    assert load_config(str(output)).text_columns == ["title", "body"]
    again, _ = load_model(BertForSequenceClassification, str(output), {})
    assert again.config.text_columns is None, "a further run has columns of its own"


def test_several_labels_are_tuned_on_dev_and_used_on_test(finish):
    output, metrics = finish("tags")
    config = json.loads((output / "config.json").read_text())
    assert config["problem_type"] == SEVERAL
    assert config["thresholds"] == [metrics["threshold_dear"], metrics["threshold_slow"]]
    assert metrics["chosen_on_dev"] == "thresholds"
    assert metrics["test_threshold_dear"] == metrics["threshold_dear"]
    assert {"exact_match", "fixed_macro_f1", "fixed_micro_f1", "test_exact_match"} <= set(metrics)


@pytest.mark.parametrize("label", ["stars", "tags", "price"])
def test_plain_transformers_and_predict_give_the_same_answers(finish, folder, label):
    output, _ = finish(label)
    rows = read_rows(output / "predictions" / "test.csv")
    columns = [name for name in rows[0] if name.startswith(("probability_", "prediction"))]
    expected = np.array([[float(row[name]) for name in columns] for row in rows])
    classify = transformers.pipeline("text-classification", str(output))
    pairs = [{"text": row["title"], "text_pair": row["body"]} for row in rows]
    scores = [{one["label"]: one["score"] for one in classify(pair, top_k=None)} for pair in pairs]
    names = ["score"] if label == "price" else [name.removeprefix("probability_") for name in columns]
    assert np.array([[found[name] for name in names] for found in scores]) == pytest.approx(expected, abs=1e-5)
    predictor = Predictor(str(output), precision="fp32")
    found = predictor(pairs)
    if label == "price":
        assert [one["score"] for one in found] == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    else:
        key = "label" if label == "stars" else "labels"
        assert ["|".join(one[key]) if key == "labels" else one[key] for one in found] == [row[key] for row in rows]


@pytest.fixture(scope="module")
def priced(bert, tmp_path_factory):
    """The recipe of a regression of prices between 200,000 and 700,000, which one word of a text decides."""
    place = tmp_path_factory.mktemp("priced")
    for seed, (split, size) in enumerate({"train": 48, "dev": 24}.items()):
        rows = read_rows(write_reviews(place / "reviews.csv", size, seed))
        table = [{"text": row["title"], "price": 200_000 * float(row["price"])} for row in rows]
        write_table(place / f"{split}.csv", table)
    (place / "reviews.csv").unlink()
    return make_recipe(bert, place, label=["price"])


def test_prices_are_learned_as_deviations_and_answered_as_prices(priced, tmp_path):
    metrics = run(Recipe.make(CLASSIFICATION, priced), output=tmp_path / "run")
    assert metrics["r2"] > 0.5
    assert metrics["majority_r2"] <= 0 < metrics["rmse"] < 200_000
    assert read_losses(tmp_path / "run")[0] < 5, "in deviations"
    assert "target_scale" not in json.loads((tmp_path / "run" / "config.json").read_text())
    rows = read_rows(tmp_path / "run" / "predictions" / "dev.csv")
    classify = transformers.pipeline("text-classification", str(tmp_path / "run"))
    found = [classify(row["text"])[0]["score"] for row in rows]
    assert found == pytest.approx([float(row["prediction"]) for row in rows], rel=1e-5)


def test_a_stopped_regression_continues_to_the_same_bits(priced, tmp_path):
    priced = priced | {"train": priced["train"] | {"save_strategy": "steps", "save_steps": 8}}
    run(Recipe.make(CLASSIFICATION, priced), output=tmp_path / "straight")
    with pytest.raises(Interrupted):
        run(Recipe.make(CLASSIFICATION, priced), output=tmp_path / "run", progress=stop_at(20))
    inside = load_config(str(tmp_path / "run" / "checkpoint-20"))
    prices = [float(row["price"]) for row in read_rows(Path(priced["data"]["dir"]) / "train.csv")]
    assert inside.target_scale == pytest.approx([np.mean(prices), np.std(prices)], rel=1e-6)
    run(Recipe.make(CLASSIFICATION, priced), output=tmp_path / "run")
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "straight"))


def test_equal_numbers_are_learned_too(bert, tmp_path):
    rows = [{"text": f"word {n}", "price": 1.5e6} for n in range(60)]
    recipe = make_recipe(bert, write_table(tmp_path / "t.csv", rows), 1.0, label=["price"], problem_type=REGRESSION)
    metrics = run(Recipe.make(CLASSIFICATION, recipe), output=tmp_path / "run")
    assert metrics["rmse"] < 5, "the deviation counts as 1"


@pytest.mark.parametrize(
    ("name", "form", "text", "label"),
    [("rte", "jsonl", ["sentence1", "sentence2"], "label")],
)
def test_a_glue_task_as_a_table_trains_the_same_weights(bert, tmp_path, name, form, text, label):
    """The labels entailment and not_entailment are in the same order in both; STS-B's are numbers."""
    task, folder = TASKS[name], write_glue(tmp_path / "glue")
    expected = run(Recipe.make(task, make_recipe(bert, folder, 2.0)), output=tmp_path / "official")
    for split in ("train", "dev"):
        file = folder / task.row.splits[split].file
        heads, *rows = [line.split("\t") for line in file.read_text(encoding="utf-8-sig").splitlines()]
        write_table(tmp_path / "mine" / f"{split}.{form}", [dict(zip(heads, row, strict=True)) for row in rows])
    recipe = make_recipe(bert, tmp_path / "mine", 2.0, text=text, label=[label])
    metrics = run(Recipe.make(CLASSIFICATION, recipe), output=tmp_path / "run")
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "official"))
    for score in task.row.metrics:
        assert metrics[score] == pytest.approx(expected[score], rel=1e-6)  # labels in 32 or 64 bits


def test_a_threshold_between_very_likely_labels_divides_predictions_too(reviews):
    """In fp32 both probabilities of a label are 1."""
    logits = np.array([[20.0, -1.0], [21.0, 1.0]], np.float32)
    data = make_data([[0, 0], [1, 1]], reviews, label=["tags"])
    rows = CLASSIFICATION.decode(logits, data).rows
    assert take_values(CLASSIFICATION.score(rows))["exact_match"] == 1
    results = SEVERAL_LABELS.decode(logits, ["dear", "slow"], decided=read_decided(rows)).list_results()
    assert [result["labels"] for result in results] == [[], ["dear", "slow"]]


def test_a_label_at_its_threshold_is_not_given():
    """The sigmoid of 0 is 0.5, the threshold without rows that decide."""
    answers = SEVERAL_LABELS.decode(np.array([[0.0, 0.1]]), ["dear", "slow"])
    assert answers.rows.column("prediction").to_pylist() == [["slow"]]
    assert [result["labels"] for result in answers.list_results()] == [["slow"]]


def test_a_test_file_with_some_of_several_label_columns_is_not_taken_for_unlabelled(tmp_path, refused):
    rows = [{"text": f"text {number}", "x": number % 2, "y": 1} for number in range(40)]
    write_table(tmp_path / "d" / "train.csv", rows)
    write_table(tmp_path / "d" / "test.csv", [{"text": "new", "x": 1}])
    with refused():
        load(tmp_path / "d", label=["x", "y"])


def test_a_long_text_is_cut_between_words_and_one_without_spaces_anywhere():
    assert shorten_text("很好" * 50) == "很好" * 39 + "很…"
    assert shorten_text("a good " * 50) == "a good " * 11 + "a…"
    assert shorten_text("回复 " + "很好" * 50) == "回复 " + "很好" * 38 + "…"
    assert shorten_text("很好 ") == "很好"
