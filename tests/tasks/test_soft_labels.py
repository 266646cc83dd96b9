"""Soft labels: how they are read, learned, solved and scored, and a small model that learns from a large one's."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional

import bertkit
from bertkit.analysis.report import write_page
from bertkit.data.labels import SEVERAL, SINGLE, make_label_space
from bertkit.inference.evaluate import evaluate
from bertkit.model.checkpoint import load_model
from bertkit.tasks.frozen import encode_sentences
from bertkit.tasks.text import CLASSIFICATION, list_targets
from bertkit.training.predictions import read_table
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import write_reviews
from tests.tasks.conftest import load_examples, make_small
from tests.world import find_part, make_columns, read_weights

NAMES = ("bad", "so", "good")
SHARES = np.array([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.3, 0.3, 0.4]])


def write_soft(path, count=120, seed=0, certainty=0.8):
    """Write reviews with shares of their stars, of which those of the right number are highest nearly always."""
    frame = pd.read_csv(write_reviews(path, count, seed))
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet([0.6] * 3, count) * (1 - certainty)
    shares[np.arange(count), frame.stars - 1] += certainty
    for number, name in enumerate(NAMES):
        frame[f"probability_{name}"] = shares[:, number].round(6)
    frame["gold"] = np.array(NAMES)[frame.stars - 1]
    frame.to_csv(path, index=False)
    return frame


def make_recipe(bert, place, *others, **data):
    data = {"text": ["title", "body"], "label": ["probability_*"], "max_length": 24} | data
    return Recipe.make(CLASSIFICATION, make_small(bert, place, data, num_train_epochs=4.0), *others)


# --- How they are read ------------------------------------------------------------------------------------------------


def find_space(cells, columns=("y",), labels=(), kind="auto"):
    table = make_columns(**cells) if isinstance(cells, dict) else make_columns(y=cells)
    space = make_label_space(table, list(columns), kind, list(labels))
    return space, table


@pytest.mark.parametrize("write", [json.dumps, str, lambda row: row], ids=["JSON", "Python", "values"])
@pytest.mark.parametrize("by_name", [True, False])
def test_lists_and_objects_are_read(write, by_name):
    rows = [dict(zip(NAMES, row, strict=True)) if by_name else row for row in SHARES.tolist()]
    if by_name and write is not str:
        write = json.dumps  # as the readers of files give objects
    space, table = find_space([write(row) for row in rows], labels=() if by_name else NAMES)
    assert (space.kind, space.names, space.is_soft) == (SINGLE, NAMES, True)
    np.testing.assert_allclose(space.read_shares(table), SHARES, atol=1e-7)
    labels, is_blank, _, _ = space.read(table)
    assert (labels.tolist(), is_blank.any()) == ([0, 1, 2], False)


def test_a_column_for_each_label_is_read():
    cells = {f"p_{name}": [str(share) for share in column] for name, column in zip(NAMES, SHARES.T, strict=True)}
    space, table = find_space(cells, tuple(cells), NAMES)
    assert (space.names, space.columns, space.is_soft) == (NAMES, tuple(cells), True)
    np.testing.assert_allclose(space.read_shares(table), SHARES, atol=1e-7)
    assert "soft 3 labels" in space.describe()


def test_a_row_without_shares_has_no_label():
    space, table = find_space(["[0.25, 0.75]", "", "[1, 0]"])
    labels, is_blank, _, _ = space.read(table)
    assert (labels.tolist(), is_blank.tolist()) == ([1, -1, 0], [False, True, False])
    assert np.isnan(space.read_shares(table)[1]).all()


def test_columns_of_0_and_1_are_several_labels_unless_one_is_asked_for():
    cells = {"is_a": ["1", "0", "0"], "is_b": ["0", "1", "1"]}
    assert find_space(cells, cells)[0].kind == SEVERAL
    space, table = find_space(cells, cells, ["a", "b"])
    assert (space.kind, space.is_soft, space.read(table)[0].tolist()) == (SINGLE, True, [0, 1, 1]), "named by a *"
    cells["is_b"][0] = "1"
    assert find_space(cells, cells, ["a", "b"])[0].kind == SEVERAL


def test_columns_are_named_by_a_pattern(bert, tmp_path):
    write_soft(tmp_path / "soft.csv")
    examples, lines = load_examples(CLASSIFICATION, tmp_path / "soft.csv", text=["body"], label=["probability_*"])
    assert examples["train"].space.names == NAMES
    assert any("label from 'probability_bad', 'probability_so', 'probability_good'" in line for line in lines)
    train = examples["train"]
    expected = pd.DataFrame({name: train.rows.find(f"probability_{name}").to_pylist() for name in NAMES}).astype(float)
    np.testing.assert_allclose(train.shares, expected, atol=2e-6)
    assert train.labels.tolist() == expected.to_numpy().argmax(1).tolist()
    assert examples["dev"].shares is None


def test_several_labels_are_named_by_a_pattern(tmp_path):
    frame = pd.read_csv(write_reviews(tmp_path / "reviews.csv"))
    frame.rename(columns={"slow": "is_slow", "dear": "is_dear"}).to_csv(tmp_path / "reviews.csv", index=False)
    examples, _ = load_examples(CLASSIFICATION, tmp_path / "reviews.csv", text=["body"], label=["is_*"])
    assert (examples["train"].space.kind, examples["train"].space.names) == (SEVERAL, ("slow", "dear"))


# --- How they are learned ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
def test_the_loss_is_the_cross_entropy_of_the_shares(bert, weights):
    model = bertkit.BertForSequenceClassification.from_pretrained(
        bert, num_labels=3, problem_type="single_label_classification"
    ).eval()
    model.config.class_weights = weights
    factors = torch.tensor(weights or [1.0] * 3)
    torch.manual_seed(0)
    ids, shares, rows = torch.randint(5, 12, (3, 7)), torch.tensor(SHARES).float(), torch.tensor([1.0, 0.0, 2.5])
    found = model(ids, labels=shares, sample_weight=rows)
    each = factors * shares * rows[:, None]
    expected = -(each * functional.log_softmax(found.logits, -1)).sum() / each.sum()
    torch.testing.assert_close(found.loss, expected)
    parts = [(ids[part], shares[part], rows[part]) for part in (slice(1), slice(1, None))]
    counts = [model.count_labels(labels=y, sample_weight=w)["num_items_in_batch"] for _, y, w in parts]
    losses = [model(x, labels=y, sample_weight=w, num_items_in_batch=sum(counts)).loss for x, y, w in parts]
    torch.testing.assert_close(sum(losses), expected)


def test_shares_of_1_are_the_labels_themselves(bert, tmp_path):
    frame = write_soft(tmp_path / "soft.csv")
    for number, name in enumerate(NAMES):
        frame[f"probability_{name}"] = (frame.stars == number + 1).astype(int)
    frame.to_csv(tmp_path / "soft.csv", index=False)
    fixed = {"problem_type": SINGLE}
    run(make_recipe(bert, tmp_path / "soft.csv", **fixed), output=tmp_path / "soft")
    run(make_recipe(bert, tmp_path / "soft.csv", label=["stars"], **fixed), output=tmp_path / "hard")
    soft, hard = (read_weights(tmp_path / name) for name in ("soft", "hard"))
    for name in soft:
        torch.testing.assert_close(soft[name], hard[name], atol=1e-5, rtol=1e-4)


def test_the_solved_head_reads_each_row_once_for_each_class(bert, tmp_path):
    """As scikit-learn with the shares as weights; the constant answer and the baselines read the same rows."""
    write_soft(tmp_path / "soft.csv", certainty=0.3)
    given = {"freeze": "encoder", "strength": 0.5, "baseline": True, "data": {"pooling": "mean"}}
    recipe = make_recipe(bert, tmp_path / "soft.csv", given)
    metrics = run(recipe, output=tmp_path / "run")
    train = prepare(recipe).data["train"]
    model, _ = load_model(bertkit.BertForSequenceClassification, str(bert), {})
    vectors = encode_sentences(model.bert.eval(), train.__getitems__(range(len(train))))["mean"]
    rows, classes = np.nonzero(train.shares >= 1e-3)
    assert len(rows) > 1.5 * len(train)
    oracle = LogisticRegression(C=0.5, tol=1e-6, max_iter=2000).fit(vectors[rows], classes, train.shares[rows, classes])
    saved = read_weights(tmp_path / "run")
    np.testing.assert_allclose(saved["classifier.weight"], oracle.coef_, atol=5e-3)
    assert metrics["tfidf_fitted"] == len(train)
    places, targets, weights = list_targets(train, np.array([3, 1]))
    assert set(places) == {0, 1}
    np.testing.assert_allclose(np.bincount(places, weights), 1, atol=2e-3)
    assert targets.max() == 2


# --- How they are scored ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(bert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("soft")
    write_soft(folder / "soft.csv", 160)
    given = {"baseline": True}
    metrics = run(make_recipe(bert, folder / "soft.csv", given), output=folder / "agreement")
    judged = run(make_recipe(bert, folder / "soft.csv", given, gold="gold"), output=folder / "judged")
    return folder, metrics, judged


def test_without_right_labels_a_score_is_an_agreement(finished):
    folder, metrics, _ = finished
    frame = read_table(folder / "agreement" / "predictions" / "dev.parquet").to_pandas()
    likeliest = frame[[f"probability_{name}_input" for name in NAMES]].astype(float).to_numpy().argmax(1)
    assert frame["label"].tolist() == np.array(NAMES)[likeliest].tolist()
    agreement = (frame["label"] == frame["prediction"]).mean()
    assert metrics["score"] == metrics["agreement"] == pytest.approx(agreement)
    assert {"majority_agreement", "tfidf_agreement", "agreement_low", "test_agreement"} <= metrics.keys()
    assert not [key for key in metrics if "accuracy" in key or "f1" in key or "matthews" in key]
    card = (folder / "agreement" / "README.md").read_text()
    assert "agreement with the soft labels" in card
    assert "| accuracy" not in card


def test_with_right_labels_scores_compare_with_them(finished):
    folder, _, metrics = finished
    frame = read_table(folder / "judged" / "predictions" / "dev.parquet").to_pandas()
    assert frame["label"].tolist() == frame["gold"].tolist()
    assert metrics["accuracy"] == pytest.approx((frame["gold"] == frame["prediction"]).mean())
    assert "agreement" not in metrics
    one, other = (read_weights(folder / name) for name in ("agreement", "judged"))
    assert all(torch.equal(one[name], other[name]) for name in one), "right labels only score"


def test_no_page_calls_an_agreement_an_accuracy(finished, tmp_path):
    """Nor label sets right, nor rows mistakes."""
    folder, *_ = finished
    write_page([folder / "agreement", folder / "judged"], tmp_path / "page.html")
    for name in ("agreement", "judged"):
        part = find_part(tmp_path / "page.html", str(folder / name))
        words = ("Confusion matrix", "Mistakes, dev", "Accuracy of the surest")
        assert [word in part for word in words] == [name == "judged"] * len(words)
        assert (folder / name / "calibration.json").exists() is (name == "judged")


def test_rows_of_train_that_are_held_back_are_scored_by_right_labels(bert, finished):
    folder, *_ = finished
    for gold in ("gold", ""):
        held = prepare(make_recipe(bert, folder / "soft.csv", gold=gold, trial_rows=20)).data["dev"]
        expected = held.rows.find("gold").to_pylist() if gold else None
        assert held.space.is_soft is (not gold)
        assert held.shares is None
        assert not gold or held.space.format_labels(held.labels) == expected


@pytest.mark.parametrize("name", ["agreement", "judged"])
def test_evaluation_scores_as_the_run_does(finished, name):
    folder, *_ = finished
    frame = write_soft(folder / "more.csv", 60, seed=5)
    scored = evaluate(str(folder / name), str(folder / "more.csv"), folder / f"{name}-scored")
    results = bertkit.load(folder / name).predict(frame[["title", "body"]])
    expected = (
        frame.gold if name == "judged" else np.array(NAMES)[frame.filter(like="probability").to_numpy().argmax(1)]
    )
    key = "accuracy" if name == "judged" else "agreement"
    assert scored[0].metrics[key] == pytest.approx((results["label"] == expected).mean())
    frame.rename(columns={"gold": "verdict"}).to_csv(folder / "verdicts.csv", index=False)
    (other,) = evaluate(str(folder / name), str(folder / "verdicts.csv"), folder / f"{name}-gold", label=["verdict"])
    assert other.metrics["accuracy"] == pytest.approx((results["label"] == frame.gold).mean())


def test_a_small_model_learns_from_a_large_one(bert, call, tmp_path):
    """The two commands; the shares that are read are the probabilities that were written."""
    write_reviews(tmp_path / "labelled.csv", 120)
    pd.read_csv(write_reviews(tmp_path / "rest.csv", 90, seed=1)).drop(columns="stars").to_csv(
        tmp_path / "rest.csv", index=False
    )
    quick = ["--no-baseline", "--epochs", "2", "--learning-rate", "3e-3", "--max-length", "24", "--model", bert]
    texts = ["--text", "title,body"]
    call(
        "classify", "--data", tmp_path / "labelled.csv", *texts, "--label", "stars", *quick, "--output", tmp_path / "a"
    )
    call("predict", tmp_path / "a", "--input", tmp_path / "rest.csv", "--output", tmp_path / "soft.parquet")
    soft = ["--data", tmp_path / "soft.parquet", *texts, "--label", "probability_*"]
    _, said, _ = call("classify", *soft, *quick, "--output", tmp_path / "b")
    assert "agreement" in said
    written = pd.read_parquet(tmp_path / "soft.parquet")
    table = read_table(tmp_path / "b" / "predictions" / "dev.parquet").to_pandas()
    assert table["label"].isin(written["label"]).all()
    assert "agreement" in json.loads((tmp_path / "b" / "metrics.json").read_text())
    call("predict", tmp_path / "a", "--input", tmp_path / "rest.csv", "--output", tmp_path / "soft.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "soft.jsonl").read_text().splitlines()]
    frame = pd.DataFrame(lines)[["probabilities"]].join(pd.read_csv(tmp_path / "rest.csv"))
    frame.to_json(tmp_path / "objects.jsonl", orient="records", lines=True)
    examples, _ = load_examples(
        CLASSIFICATION, tmp_path / "objects.jsonl", text=["title", "body"], label=["probabilities"]
    )
    assert examples["train"].space.is_soft
    assert examples["train"].shares.sum(1) == pytest.approx(1)


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.5, 0.4, 0.2), (-0.1, 0.6, 0.5), (0.5, "", 0.5), (0.5, "high", 0.5)])
def test_what_are_no_shares_is_one_line(tmp_path, shares, refused):
    frame = write_soft(tmp_path / "soft.csv").astype(object)
    frame.loc[2, [f"probability_{name}" for name in NAMES]] = shares
    frame.to_csv(tmp_path / "soft.csv", index=False)
    with refused():
        load_examples(CLASSIFICATION, tmp_path / "soft.csv", text=["body"], label=["probability_*"])


def test_what_needs_right_labels_is_one_line_without_them(bert, tmp_path, refused):
    write_soft(tmp_path / "soft.csv")
    for data in ({"target_accuracy": 0.9}, {"gold": "gold", "label": ["stars"]}):
        with refused():
            load_examples(
                CLASSIFICATION, tmp_path / "soft.csv", **{"text": ["body"], "label": ["probability_*"]} | data
            )
    recipe = make_recipe(bert, tmp_path / "soft.csv", {"calibrate": True})
    examples, _ = load_examples(
        CLASSIFICATION, tmp_path / "soft.csv", **dict(recipe.data) | {"dir": str(tmp_path / "soft.csv")}
    )
    with refused():
        CLASSIFICATION.configure(recipe, [0] * 30, examples)


def test_objects_of_other_labels_are_one_line(refused):
    space, _ = find_space(['{"a": 0.5, "b": 0.5}', '{"a": 1.0, "b": 0.0}'])
    for cell in ('{"a": 0.5, "c": 0.5}', "[1]", "a"):
        with refused():
            space.read_shares(make_columns(y=[cell]))
