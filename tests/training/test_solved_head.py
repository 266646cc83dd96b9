"""The solved head of a frozen encoder: what is solved, chosen and said, and the model at work, here and in stock."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import bertkit
from bertkit.data.labels import SINGLE, LabelSpace
from bertkit.data.long_texts import encode_long
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import load_model
from bertkit.tasks import TASKS
from bertkit.tasks.finetuning import FROZEN_RATE, SOLVED
from bertkit.tasks.frozen import encode_items, solve
from bertkit.tasks.task import list_commands, score_summaries
from bertkit.tasks.text import CLASSIFICATION, TextSequences
from bertkit.training import costs
from bertkit.training.predictions import read_table
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe, load_recipe
from bertkit.training.run import run
from bertkit.training.solved_head import TRIED_STRENGTHS
from tests.official import write_checkpoint, write_glue, write_reviews
from tests.world import assert_same_bits, read_weights


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("solved")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.5}
    write_checkpoint(root / "bert", **sizes)
    write_checkpoint(root / "causal", **sizes, is_decoder=True)
    write_reviews(root / "reviews.csv", 160)
    return root


def make_recipe(root, label, *others, **data):
    """Return the recipe of a head that is solved on pairs of texts."""
    data = {"dir": str(root / "reviews.csv"), "text": ["title", "body"], "label": [label], "max_length": 24} | data
    given = {"checkpoint": str(root / "bert"), "precision": "fp32", "freeze": "encoder", "baseline": False}
    return Recipe.make(CLASSIFICATION, given, {"data": data}, *others)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("checkpoint", ["bert", "causal"])
def test_the_vectors_are_those_that_the_head_reads(root, pooling, checkpoint):
    """Packed and padded; a text in windows has their mean."""
    tokenizer = load_tokenizer(str(root / checkpoint))
    texts = [("good word1", "bad"), ("so", "word2 good . ? bad word3 word1 good bad so so . word1"), ("word4", "good")]
    sequences = encode_long(texts, None, tokenizer, max_length=10, long="mean", doc_stride=2)
    assert len(sequences.sequences) > len(texts)
    data = TextSequences(sequences, LabelSpace(SINGLE, ("a", "b"), (), ""))
    head = getattr(bertkit, CLASSIFICATION.solved[pooling])
    for kernel in ("packed", "sdpa"):
        settings = {"window_pooling": "mean", "attn_implementation": kernel}
        model, _ = load_model(head, str(root / checkpoint), settings)
        model.classifier = nn.Identity()
        items = data.__getitems__(range(3))
        with torch.no_grad():
            found = model.eval()(**CLASSIFICATION.collate(items)).logits.numpy()
        np.testing.assert_allclose(encode_items(model.bert, items, pooling), found, atol=2e-6)


@pytest.mark.parametrize(
    ("label", "data"),
    [
        ("stars", {"class_weights": "balanced", "pooling": "cls"}),
        ("tags", {"tune_share": 0.5}),
        ("price", {"long": "mean", "max_length": 8}),
    ],
)
def test_the_head_is_the_best_solution_on_the_rows_that_choose(root, tmp_path, label, data):
    """Classes, several labels, numbers, and texts in windows."""
    recipe, lines = make_recipe(root, label, **data), []
    metrics = run(recipe, output=tmp_path / "run", report=lines.append)
    prepared = prepare(recipe)
    train, chooses = prepared.data["train"], prepared.data["tune" if "tune_share" in data else "dev"]
    model, _ = load_model(getattr(bertkit, CLASSIFICATION.solved[recipe.data["pooling"]]), str(tmp_path / "run"), {})
    vectors = partial(encode_items, model.bert, pooling=recipe.data["pooling"])
    one, other = (vectors(part.__getitems__(range(len(part)))) for part in (train, chooses))
    heads, scores = [], []
    for strength in TRIED_STRENGTHS:
        weights = prepared.settings.get("class_weights")
        heads.append(solve(one, train.labels, strength, len(train.space.names), weights))
        scores.append(score_summaries(CLASSIFICATION, other @ heads[-1][0].T + heads[-1][1], chooses)["score"])
    best = int(np.argmax(scores))
    assert len(set(scores)) > 1
    assert metrics[SOLVED] == TRIED_STRENGTHS[best]
    np.testing.assert_array_equal(model.classifier.weight.detach(), heads[best][0].astype(np.float32))
    np.testing.assert_array_equal(model.classifier.bias.detach(), heads[best][1].astype(np.float32))
    assert metrics["updates"] == 0
    assert ("the regularisation" in metrics.get("chosen_on_dev", "")) == ("tune_share" not in data)
    assert metrics["score" if "tune_share" not in data else "tune_score"] == pytest.approx(scores[best], rel=1e-5)
    assert not any("unused" in line or "randomly initialised: classifier" in line for line in lines)


def test_class_weights_count_rows_as_often():
    """A weight of 2 is that of rows that are there twice."""
    rng = np.random.default_rng(0)
    vectors, targets = rng.normal(size=(60, 3)), rng.integers(0, 3, 60)
    rows = np.concatenate([np.arange(60), np.flatnonzero(targets == 1)])
    weighted, repeated = solve(vectors, targets, 1.0, 3, [1.0, 2.0, 1.0]), solve(vectors[rows], targets[rows], 1.0, 3)
    np.testing.assert_allclose(weighted[0], repeated[0], atol=1e-3)
    several = np.stack([targets == 1, targets == 2], axis=1).astype(np.float32)
    pair = solve(vectors, several, 1.0, 2, [2.0, 1.0])
    np.testing.assert_allclose(pair[0][0], solve(vectors[rows], several[rows], 1.0, 2)[0][0], atol=1e-3)
    np.testing.assert_allclose(pair[0][1], solve(vectors, several, 1.0, 2)[0][1], atol=1e-3)


def test_a_seed_changes_nothing_and_keys_of_a_training_are_named(root, tmp_path):
    lines, train = [], {"train": {"seed": 7, "learning_rate": 1e-4, "num_train_epochs": 9.0}, "patience": 2}
    one = run(make_recipe(root, "stars"), output=tmp_path / "one")
    other = run(make_recipe(root, "stars", train), output=tmp_path / "other", report=lines.append)
    assert one == other
    assert_same_bits(read_weights(tmp_path / "one"), read_weights(tmp_path / "other"))
    said = "unused, because the head of a frozen encoder is solved and not trained: patience, learning_rate, "
    assert f"{said}num_train_epochs" in lines
    assert not any(line.startswith("preset auto") for line in lines)
    lines.clear()
    again = run(load_recipe(tmp_path / "one" / "recipe.toml"), output=tmp_path / "again", report=lines.append)
    assert not any("unused" in line for line in lines), "nobody gave a key of a training"
    assert again == one
    (warning,) = [line for line in CLASSIFICATION.comment(one | {"majority_macro_f1": 1.0}) if "warning" in line]
    assert warning.endswith("is not above a constant answer (100.0)")
    lost = {"best_baseline": "tfidf", "baseline_gain": -0.1, "baseline_gain_low": -0.2, "baseline_gain_high": 0.0}
    (line,) = [line for line in CLASSIFICATION.comment(one | lost) if "TF-IDF" in line]
    assert line.startswith("the solved head is not better than TF-IDF: ")
    assert line.endswith("(-20.0 to 0.0)"), "nothing is known to be better"
    assert not any("train.seed" in line for line in list_commands(CLASSIFICATION, tmp_path, make_recipe(root, "stars")))
    assert "not forecast for a frozen encoder" in costs.find_costs(make_recipe(root, "stars"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_run_answers_as_it_was_scored_and_stock_loads_what_it_has(root, tmp_path, pooling):
    output = tmp_path / "run"
    metrics = run(make_recipe(root, "stars", pooling=pooling), output=output)
    rows = read_table(output / "predictions" / "dev.parquet")
    pairs = list(zip(rows.column("title").to_pylist(), rows.column("body").to_pylist(), strict=True))
    found = Predictor(output, precision="fp32")(pairs)
    assert [row["label"] for row in found] == rows.column("prediction").to_pylist()
    assert len(set(rows.column("prediction").to_pylist())) > 1
    stock = transformers.AutoModel.from_pretrained(output).state_dict()
    kept = {name: weight for name, weight in stock.items() if pooling == "cls" or not name.startswith("pooler.")}
    saved = {name.removeprefix("bert."): weight for name, weight in read_weights(output).items()}
    assert_same_bits(kept, {name: saved[name] for name in kept})
    if pooling == "cls":
        tokenizer = transformers.AutoTokenizer.from_pretrained(output)
        batch = tokenizer(*zip(*pairs, strict=True), max_length=24, truncation=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = transformers.AutoModelForSequenceClassification.from_pretrained(output).eval()(**batch).logits
        probabilities = [list(row["probabilities"].values()) for row in found]
        np.testing.assert_allclose(logits.softmax(1).numpy(), probabilities, atol=1e-5)
    assert metrics["score"] > metrics["majority_macro_f1"]


def test_what_is_trained_above_a_frozen_encoder_has_a_rate_of_its_own(tmp_path, root):
    frozen, given = {"freeze": "encoder"}, {"train": {"learning_rate": 1e-5}}
    glue = {"checkpoint": str(root / "bert"), "bilstm": True, "data": {"dir": str(write_glue(tmp_path / "glue"))}}
    recipes = [partial(Recipe.make, TASKS[name], fits_model=False) for name in ("squad1", "squad2", "swag", "ner")]
    for make in [*recipes, partial(Recipe.make, TASKS["rte"], glue)]:
        assert make(frozen).train["learning_rate"] == FROZEN_RATE != make().train["learning_rate"]
        assert make(frozen, given).train["learning_rate"] == 1e-5
        assert not make(frozen).is_solved
    assert Recipe.make(TASKS["rte"], glue, frozen, {"bilstm": False}).is_solved


def test_what_only_a_trained_or_only_a_solved_head_has_is_refused(root, refused):
    with refused():
        make_recipe(root, "stars", long="max")
    with refused():
        make_recipe(root, "stars", {"bilstm": True, "freeze": None}, pooling="cls")
