"""Weights of rows in the loss, the solved head, the baselines and the scores; weights of classes of words."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import pearsonr
from sklearn import metrics as scores
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.class_weight import compute_sample_weight
from torch.nn import functional

import bertkit
from bertkit.analysis.compare import compare
from bertkit.analysis.slices import tabulate_slices
from bertkit.inference.evaluate import evaluate
from bertkit.metrics.intervals import estimate_interval
from bertkit.metrics.rows import measure_mean, measure_numbers, take_values
from bertkit.tasks.frozen import choose_head, solve
from bertkit.tasks.ner import NER
from bertkit.tasks.text import CLASSIFICATION
from bertkit.training.predictions import read_table
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_conll, write_reviews, write_table
from tests.tasks.conftest import load_examples, make_small
from tests.world import read_weights

LABELS = {  # column of labels -> what scikit-learn compares
    "stars": "label",
    "tags": "several",
    "price": "number",
}


def write_weighted(path, counts, rows=None):
    """Write reviews with a column of weights, or each as often as its weight says."""
    frame = pd.read_csv(write_reviews(path.with_suffix(".all.csv"), len(counts)), dtype=str, keep_default_na=False)
    path.with_suffix(".all.csv").unlink()
    frame["trust"] = [str(count) for count in counts]
    frame = frame.iloc[np.repeat(np.arange(len(counts)), counts)] if rows == "repeated" else frame
    return write_table(path, frame.to_dict("records"))


def make_recipe(bert, folder, label, *others, **data):
    data = {"text": ["body"], "label": [label], "max_length": 24} | data
    return Recipe.make(CLASSIFICATION, make_small(bert, folder, data, num_train_epochs=4.0), *others)


# --- The loss ---------------------------------------------------------------------------------------------------------


def draw_batch(kind, rows=8):
    torch.manual_seed(0)
    labels = {
        "single_label_classification": torch.randint(3, (rows,)),
        "multi_label_classification": torch.randint(2, (rows, 3)).float(),
        "regression": torch.randn(rows),
    }
    return {"input_ids": torch.randint(5, 12, (rows, 7)), "labels": labels[kind]}


@pytest.mark.parametrize(
    ("kind", "weighs_classes"),
    [
        ("single_label_classification", False),
        ("single_label_classification", True),
        ("multi_label_classification", False),
        ("multi_label_classification", True),
        ("regression", False),
    ],
)
def test_the_loss_is_that_of_a_plain_loop(bert, kind, weighs_classes):
    """However an update is divided; the sum of the weights divides it."""
    model = bertkit.BertForSequenceClassification.from_pretrained(
        bert, num_labels=1 if kind == "regression" else 3, problem_type=kind
    ).eval()
    factors = torch.tensor([0.5, 2.0, 1.0]) if weighs_classes else torch.ones(3)
    model.config.class_weights = factors.tolist() if weighs_classes else None
    batch, weights = draw_batch(kind), torch.tensor([0.0, 1.0, 2.0, 0.25, 1.0, 3.0, 0.0, 1.5])
    logits, labels, total, count = model(batch["input_ids"]).logits, batch["labels"], 0.0, 0.0
    for row, weight in enumerate(weights):
        if kind == "single_label_classification":
            factor = weight * factors[labels[row]]
            loss, number = functional.cross_entropy(logits[row], labels[row]), factor
        elif kind == "regression":
            loss, number, factor = (logits[row, 0] - labels[row]) ** 2, weight, weight
        else:
            given = functional.binary_cross_entropy_with_logits
            loss, number, factor = given(logits[row], labels[row], pos_weight=factors).mean(), weight, weight
        total, count = total + factor * loss, count + number
    whole = model(**batch, sample_weight=weights).loss
    torch.testing.assert_close(whole, total / count)
    parts = [{name: column[some] for name, column in batch.items()} for some in (slice(3), slice(3, None))]
    pairs = list(zip(parts, (weights[:3], weights[3:]), strict=True))
    counted = sum(model.count_labels(**part, sample_weight=some)["num_items_in_batch"] for part, some in pairs)
    losses = [model(**part, sample_weight=some, num_items_in_batch=counted).loss for part, some in pairs]
    torch.testing.assert_close(sum(losses), whole)


def test_accumulation_changes_nothing(bert, tmp_path):
    table = write_weighted(tmp_path / "reviews.csv", np.arange(40) % 4)
    for size in (8, 2):
        sizes = {"train": {"per_device_train_batch_size": size, "max_steps": 3}}
        run(make_recipe(bert, table, "stars", sizes, weight="trust"), output=tmp_path / str(size))
    one, other = (read_weights(tmp_path / str(size)) for size in (8, 2))
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("optim", ["bert_adam", "adamw_torch"])
def test_an_update_without_weights_changes_nothing(bert, tmp_path, optim):
    """Neither decay nor momentum does."""
    (tmp_path / "data").mkdir()
    write_weighted(tmp_path / "data" / "train.csv", [1] * 8 + [0] * 8)
    write_weighted(tmp_path / "data" / "dev.csv", [1] * 8)
    order = {"train_sampling_strategy": "sequential", "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    train = {"train": {"max_steps": 2, "lr_scheduler_type": "constant", "optim": optim, **order}}
    run(make_recipe(bert, tmp_path / "data", "stars", train, weight="trust"), output=tmp_path / "run")
    first, last = (read_weights(tmp_path / "run" / f"checkpoint-{update}") for update in (1, 2))
    before = bertkit.BertModel.from_pretrained(bert).state_dict()["encoder.layer.0.output.dense.weight"]
    assert not torch.equal(first["bert.encoder.layer.0.output.dense.weight"], before)
    for name in first:
        assert torch.equal(first[name], last[name])


# --- Heads and baselines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classes", "several", "numbers"])
def test_a_weight_counts_rows_as_often(kind):
    """The head and the choice by folds agree with repeated rows; scikit-learn's own weights give the same."""
    rng = np.random.default_rng(0)
    vectors, classes, counts = rng.normal(size=(80, 3)), rng.integers(0, 3, 80), rng.integers(1, 4, 80)
    vectors[:, 0] += classes
    targets = {"classes": classes, "several": np.eye(3)[classes], "numbers": classes + rng.normal(size=80)}[kind]
    rows, labels = np.repeat(np.arange(80), counts), 1 if kind == "numbers" else 3
    weighted = solve(vectors, targets, 0.5, labels, row_weights=counts.astype(float))
    for one, other in zip(weighted, solve(vectors[rows], targets[rows], 0.5, labels), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
    if kind == "classes":
        oracle = LogisticRegression(C=0.5, tol=1e-6, max_iter=1000).fit(vectors, targets, counts)
        np.testing.assert_allclose(weighted[0], oracle.coef_, atol=2e-3)
    if kind == "numbers":
        np.testing.assert_allclose(weighted[0][0], Ridge(1.0).fit(vectors, targets, counts).coef_, atol=1e-6)
    candidates = {"noise": rng.normal(size=(80, 3)), "right": vectors}
    repeated = {name: found[rows] for name, found in candidates.items()}
    found = choose_head(candidates, targets, labels, np.arange(80), row_weights=counts.astype(float))
    assert found == choose_head(repeated, targets[rows], labels, rows)


@pytest.mark.parametrize("label", LABELS)
def test_a_weight_of_0_leaves_out_and_one_of_2_repeats(bert, tmp_path, label):
    """The head that is solved, a constant answer, the baselines, and scores: as of the rows themselves."""
    counts, found = np.random.default_rng(1).integers(0, 3, 90), []
    for name in ("weighted", "repeated"):
        (tmp_path / name).mkdir()
        for split in ("train", "dev"):
            write_weighted(tmp_path / name / f"{split}.csv", counts if split == "train" else counts[::-1], name)
        weights = {"weight": "trust", "weighted_scores": True} if name == "weighted" else {}
        head = {"freeze": "encoder", "baseline": True, "strength": 1.0, "data": {"pooling": "mean"}}
        output = tmp_path / f"{name}-run"
        metrics = run(make_recipe(bert, tmp_path / name, label, head, **weights), output=output)
        found.append((metrics, read_weights(output)))
    (metrics, weights), (expected, repeated) = found
    for part in ("classifier.weight", "classifier.bias"):
        torch.testing.assert_close(weights[part], repeated[part], atol=3e-3, rtol=1e-3)
    shown = {row.key for row in CLASSIFICATION.table} | {f"{name}_score" for name in ("tfidf", "majority")}
    compared = [key for key in shown if key in expected]
    assert {"score", "tfidf_score", "majority_score"} <= {*compared}
    for key in compared:
        assert metrics[key] == pytest.approx(expected[key], abs=5e-3), key


def test_words_of_rows_of_weight_0_are_unknown_to_the_baselines(bert, tmp_path):
    found = []
    for name, rows in {"weighted": 90, "alone": 60}.items():
        (tmp_path / name).mkdir()
        write_weighted(tmp_path / name / "train.csv", [1] * 60 + [0] * (rows - 60))
        frame = pd.read_csv(tmp_path / name / "train.csv")
        frame.loc[60:, "body"] = [f"good bad so rare{number}" for number in range(rows - 60)]
        frame.to_csv(tmp_path / name / "train.csv", index=False)
        write_weighted(tmp_path / name / "dev.csv", [1] * 60)
        head = {"freeze": "encoder", "baseline": True, "data": {"pooling": "mean"}}
        recipe = make_recipe(bert, tmp_path / name, "stars", head, weight="trust")
        found.append(run(recipe, output=tmp_path / f"{name}-run"))
    assert found[0]["tfidf_fitted"] == found[1]["tfidf_fitted"] == 60
    assert found[0]["tfidf_score"] == pytest.approx(found[1]["tfidf_score"], abs=1e-6)


def test_rows_of_train_that_are_held_back_are_scored_as_dev_is(bert, tmp_path):
    """Those of a search count alike unless scores are weighted."""
    table = write_weighted(tmp_path / "reviews.csv", np.arange(100) % 3)
    for scored in (False, True):
        recipe = make_recipe(bert, table, "stars", weight="trust", weighted_scores=scored, trial_rows=20)
        held = prepare(recipe).data["dev"]
        assert 15 < len(held) <= 20
        assert (held.weights is not None) is scored


# --- Scores -----------------------------------------------------------------------------------------------------------


def finish(bert, folder, label, **data):
    folder.mkdir(exist_ok=True)
    (folder / "data").mkdir()
    write_reviews(folder / "data" / "train.csv", 160)
    draw = np.random.default_rng(3)
    frame = pd.read_csv(write_reviews(folder / "data" / "dev.csv", 70, seed=1), dtype=str, keep_default_na=False)
    frame["trust"] = draw.choice(["0", "0.5", "1", "2.25"], 70)
    (folder / "data" / "train.csv").write_text(
        pd.read_csv(folder / "data" / "train.csv", dtype=str, keep_default_na=False)
        .assign(trust="1")
        .to_csv(index=False)
    )
    frame.to_csv(folder / "data" / "dev.csv", index=False)
    recipe = make_recipe(bert, folder / "data", label, **{"weight": "trust", "weighted_scores": True} | data)
    return run(recipe, output=folder / "run")


@pytest.mark.parametrize("label", LABELS)
def test_scores_are_those_of_scikit_learn(bert, tmp_path, label):
    metrics = finish(bert, tmp_path, label)
    rows = read_table(tmp_path / "run" / "predictions" / "dev.parquet")
    frame = rows.to_pandas()
    given = {"sample_weight": frame["trust"].astype(float)}
    assert frame["weight"].tolist() == given["sample_weight"].tolist()
    gold, found = frame["label"], frame["prediction"]
    if label == "stars":
        expected = {
            "accuracy": scores.accuracy_score(gold, found, **given),
            "macro_f1": scores.f1_score(gold, found, average="macro", **given),
            "weighted_f1": scores.f1_score(gold, found, average="weighted", **given),
            "matthews_correlation": scores.matthews_corrcoef(gold, found, **given),
            "quadratic_kappa": scores.cohen_kappa_score(gold, found, weights="quadratic", **given),
            "recall_2": scores.recall_score(gold, found, labels=["2"], average="macro", **given),
        }
    elif label == "tags":
        gold, found = (
            np.array([[tag in row for tag in ("dear", "slow")] for row in column]) for column in (gold, found)
        )
        expected = {
            "macro_f1": scores.f1_score(gold, found, average="macro", **given),
            "micro_f1": scores.f1_score(gold, found, average="micro", **given),
            "exact_match": scores.accuracy_score(gold, found, **given),
        }
    else:
        repeated = np.repeat(np.arange(len(gold)), (4 * given["sample_weight"]).astype(int))
        expected = {
            "rmse": scores.root_mean_squared_error(gold, found, **given),
            "r2": scores.r2_score(gold, found, **given),
            "pearson": pearsonr(gold[repeated], found[repeated]).statistic,
        }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-9), name
        assert metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"]
    (again,) = evaluate(str(tmp_path / "run"), str(tmp_path / "data" / "dev.csv"), tmp_path / "scored")
    for name in expected:
        assert again.metrics[name] == pytest.approx(metrics[name], abs=2e-3)


def test_rows_without_their_weights_are_scored_alike(bert, tmp_path):
    finish(bert, tmp_path, "stars")
    table = tmp_path / "bare.csv"
    pd.read_csv(tmp_path / "data" / "dev.csv").drop(columns="trust").to_csv(table, index=False)
    lines = []
    (found,) = evaluate(str(tmp_path / "run"), str(table), tmp_path / "scored", lines.append)
    frame = found.rows.to_pandas()
    assert any("has no column 'trust', so all its rows count alike" in line for line in lines)
    rows = read_table(tmp_path / "run" / "predictions" / "dev.parquet")
    weighted = json.loads((tmp_path / "run" / "metrics.json").read_text())["accuracy"]
    shown = [cell.lines[0][0] for cell in tabulate_slices(rows, CLASSIFICATION.table[0], "dev").rows[0]]
    assert shown[:3] == ["all", "70", f"{100 * weighted:.1f}"]
    assert found.metrics["accuracy"] == pytest.approx((frame["label"] == frame["prediction"]).mean())


@pytest.mark.parametrize("grouped", [False, True])
def test_an_interval_is_that_of_the_weighted_rows(grouped):
    """Equal weights change nothing, and a row of weight 0 is none."""
    rng = np.random.default_rng(0)
    right, weights = rng.random(120) < 0.7, np.repeat([1.0, 0.0], [90, 30])
    groups = [number // 3 for number in range(120)] if grouped else None
    score = replace(measure_mean(right), row_weights=weights)
    whole = replace(measure_mean(right), row_weights=np.full(120, 2.0))
    assert take_values({"": score})[""] == pytest.approx(right[:90].mean())
    few, all_rows = (estimate_interval(one, groups) for one in (score, whole))
    assert all_rows.low < right.mean() < all_rows.high
    assert few.high - few.low > all_rows.high - all_rows.low
    numbers = measure_numbers(rng.normal(size=120), rng.normal(size=120))["pearson"]
    alone, weighted = numbers.take(np.arange(90)), replace(numbers, row_weights=weights)
    assert take_values({"": weighted})[""] == pytest.approx(take_values({"": alone})[""])


def test_models_whose_scores_weigh_rows_differently_are_not_compared(bert, tmp_path, refused):
    finish(bert, tmp_path / "one", "stars")
    finish(bert, tmp_path / "other", "stars", weighted_scores=False)
    with refused():
        compare([tmp_path / "one" / "run", tmp_path / "other" / "run"])
    (same,) = compare([tmp_path / "one" / "run", tmp_path / "one" / "run"])
    assert same.contrast.value == 0


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["-1", "", "nan", "much"])
def test_a_weight_that_is_none_is_one_line(bert, tmp_path, weight, refused):
    frame = pd.read_csv(write_weighted(tmp_path / "reviews.csv", [1] * 40), dtype=str)
    frame.loc[3, "trust"] = weight
    frame.to_csv(tmp_path / "reviews.csv", index=False)
    with refused():
        load_examples(CLASSIFICATION, tmp_path / "reviews.csv", text=["body"], label=["stars"], weight="trust")


def test_weights_that_make_no_sense_are_one_line(bert, tmp_path, refused):
    table = write_weighted(tmp_path / "reviews.csv", [0] * 40)
    load = partial(load_examples, CLASSIFICATION, table, text=["body"], label=["stars"])
    for data in ({"weight": "trust"}, {"weight": "trusted"}):
        with refused():
            load(**data)
    for data in ({"weighted_scores": True}, {"weight": "trust", "weighted_scores": True, "target_accuracy": 0.9}):
        with refused():
            CLASSIFICATION.check(make_recipe(bert, table, "stars", **data))


# --- The estimator ----------------------------------------------------------------------------------------------------


def fit(bert, texts, labels, weights=None):
    settings = {"freeze": "encoder", "dev_share": 0.2, "pooling": "mean", "strength": 1.0}
    made = bertkit.BertClassifier(model=bert, max_length=24, settings=settings)
    return made.fit(texts, labels, sample_weight=weights)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return pd.read_csv(write_reviews(tmp_path_factory.mktemp("reviews") / "reviews.csv", 60))


class NotAnArray:
    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, NotAnArray])
def test_the_estimator_takes_weights_of_any_kind(bert, reviews, kind):
    """By the rules of scikit-learn's checks: the argument stays as it is, and the same weights give the same model."""
    values = [0.5, 1.0, 2.0] * 20
    weights = kind(values)
    found = fit(bert, reviews.body.tolist(), reviews.stars.tolist(), weights).predict_proba(reviews.body)
    expected = fit(bert, reviews.body.tolist(), reviews.stars.tolist(), np.array(values)).predict_proba(reviews.body)
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(weights, float).tolist() == values


def test_equal_weights_of_the_estimator_change_nothing_and_0_leaves_out(bert, reviews):
    texts, labels = reviews.body.tolist(), reviews.stars.tolist()
    plain, one = fit(bert, texts, labels).predict_proba(texts), fit(bert, texts, labels, 1).predict_proba(texts)
    np.testing.assert_allclose(one, plain, atol=1e-6)
    counts = np.random.default_rng(0).integers(0, 3, 60)
    weighted = fit(bert, texts, labels, counts).predict_proba(texts)
    rows = np.repeat(np.arange(60), counts)
    repeated = fit(bert, [texts[row] for row in rows], [labels[row] for row in rows]).predict_proba(texts)
    np.testing.assert_allclose(weighted, repeated, atol=5e-3)
    assert np.abs(weighted - plain).max() > 0.02


@pytest.mark.parametrize("weights", [[1.0] * 59, np.ones((60, 2)), ["much"] * 60, [-1.0] * 60])
def test_wrong_weights_of_the_estimator_are_refused(bert, reviews, weights):
    with pytest.raises(ValueError, match=r"samples|1d array|float|weight"):
        fit(bert, reviews.body.tolist(), reviews.stars.tolist(), weights)


# --- Words ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conll(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conll")
    return write_conll(folder)


def test_class_weights_of_tags_are_those_of_their_types(bert, conll):
    examples, _ = load_examples(NER, conll)
    train = examples["train"]
    given = {"checkpoint": str(bert), "data": {"dir": str(conll), "class_weights": "balanced"}}
    settings = NER.configure(Recipe.make(NER, given), [0] * 30, examples)
    types = [tag[2:] or tag for sentence in train.text.sentences for tag in sentence.tags]
    expected = dict(zip(types, compute_sample_weight("balanced", types), strict=True))
    assert settings["class_weights"] == pytest.approx([expected[label[2:] or label] for label in train.labels])
    table = {kind: number + 0.5 for number, kind in enumerate(sorted(expected))}
    given["data"]["class_weights"] = table
    settings = NER.configure(Recipe.make(NER, given), [0] * 30, examples)
    assert settings["class_weights"] == [table[label[2:] or label] for label in train.labels]


def test_the_loss_of_words_is_weighted_by_their_classes(bert):
    model = bertkit.BertForTokenClassification.from_pretrained(bert, num_labels=3).eval()
    model.config.class_weights = [0.25, 1.0, 4.0]
    torch.manual_seed(0)
    ids, labels = torch.randint(5, 12, (4, 7)), torch.randint(3, (4, 7))
    labels[:, ::3] = -100
    found = model(ids, labels=labels)
    expected = functional.cross_entropy(
        found.logits.flatten(0, 1), labels.flatten(), torch.tensor(model.config.class_weights), ignore_index=-100
    )
    torch.testing.assert_close(found.loss, expected)
    halves = [(ids[some], labels[some]) for some in (slice(1), slice(1, None))]
    count = sum(model.count_labels(labels=part)["num_items_in_batch"] for _, part in halves)
    parts = [model(some, labels=part, num_items_in_batch=count).loss for some, part in halves]
    torch.testing.assert_close(sum(parts), expected)


def test_names_are_tagged_more_often_with_a_higher_weight(bert, conll, tmp_path):
    """Trained, and with a head that is solved; recipe.toml repeats the weights."""
    found = {}
    for freeze in ("", "encoder"):
        for weight in (1.0, 30.0):
            output = tmp_path / f"{freeze}{weight}"
            given = make_small(bert, conll, {}, max_steps=12, learning_rate=1e-3)
            given["data"]["class_weights"] = {"O": 1.0, **dict.fromkeys(("LOC", "PER"), weight)}
            run(Recipe.make(NER, given, {"freeze": freeze} if freeze else {}), output=output)
            tags = read_table(output / "predictions" / "dev.parquet").column("prediction").to_pylist()
            found[freeze, weight] = sum(tag != "O" for sentence in tags for tag in sentence)
            assert len(json.loads((output / "config.json").read_text())["class_weights"]) > 3
        assert found[freeze, 30.0] > found[freeze, 1.0]


def test_wrong_class_weights_of_tags_are_one_line(bert, conll, refused):
    examples, _ = load_examples(NER, conll)
    for weights in ("even", {"PER": 2.0, "O": 1.0}):
        given = {"checkpoint": str(bert), "data": {"dir": str(conll), "class_weights": weights}}
        with refused():
            NER.configure(Recipe.make(NER, given), [0] * 30, examples)
