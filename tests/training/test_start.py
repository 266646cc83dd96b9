"""The solved head of a frozen encoder: what is solved, chosen and said, and the model at work, here and in stock."""

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import bertkit
from bertkit.data.labels import SINGLE, LabelSpace
from bertkit.data.long_texts import encode_long
from bertkit.data.sequences import collate
from bertkit.data.tokenizer import load_tokenizer
from bertkit.inference.predictor import Predictor
from bertkit.model.checkpoint import load_model
from bertkit.tasks import TASKS
from bertkit.tasks.finetuning import FROZEN_RATE
from bertkit.tasks.frozen import choose_head, encode_sentences, solve
from bertkit.tasks.task import list_commands
from bertkit.tasks.text import CLASSIFICATION, TextSequences
from bertkit.training import costs
from bertkit.training.predictions import read_table
from bertkit.training.prepare import prepare
from bertkit.training.recipe import Recipe, load_recipe, read_recipe, save_recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_conll, write_glue, write_reviews
from tests.world import assert_same_bits, read_weights


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("solved")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "initializer_range": 0.5}
    write_checkpoint(root / "bert", **sizes)
    write_checkpoint(root / "causal", **sizes, is_decoder=True)
    write_checkpoint(root / "bare", **sizes)
    bertkit.BertModel.from_pretrained(root / "bert", add_pooling_layer=False).save_pretrained(root / "bare")
    write_reviews(root / "reviews.csv", 160)
    return root


def make_recipe(root, label, *others, freeze="encoder", **data):
    """Return the recipe of a head that is solved on pairs of texts."""
    data = {"dir": str(root / "reviews.csv"), "text": ["title", "body"], "label": [label], "max_length": 24} | data
    given = {"checkpoint": str(root / "bert"), "precision": "fp32", "freeze": freeze, "baseline": False}
    return Recipe.make(CLASSIFICATION, given, {"data": data}, *others)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("checkpoint", ["bert", "causal"])
def test_the_vectors_are_those_that_the_head_reads(root, pooling, checkpoint):
    """Packed and padded; a text in windows has their mean."""
    tokenizer = load_tokenizer(str(root / checkpoint))
    texts = [("good word1", "bad"), ("so", "word2 good . ? bad word3 word1 good bad so so . word1"), ("word4", "good")]
    sequences = encode_long(texts, None, tokenizer, max_length=10, long="mean", doc_stride=2)
    assert len(sequences.sequences) > len(texts)
    items = TextSequences(sequences, LabelSpace(SINGLE, ("a", "b"), (), "")).__getitems__(range(3))
    for kernel in ("packed", "sdpa"):
        settings = {"window_pooling": "mean", "attn_implementation": kernel}
        model, _ = load_model(bertkit.BertForSequenceClassification, str(root / checkpoint), settings)
        model.classifier = nn.Identity()
        found = encode_sentences(copy.deepcopy(model.bert).eval(), items)
        if pooling == "mean":
            model.bert.add_mean_layer()
            assert list(encode_sentences(copy.deepcopy(model.bert).eval(), items)) == ["mean"]
        with torch.no_grad():
            expected = model.eval()(**collate(items)).logits.numpy()
        np.testing.assert_allclose(found[pooling], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("label", "data"),
    [("stars", {"class_weights": "balanced"}), ("tags", {}), ("price", {"long": "mean", "max_length": 8})],
)
def test_a_frozen_encoder_has_the_head_that_folds_choose(root, tmp_path, label, data):
    """Classes, several labels, numbers, and texts in windows; dev decides nothing."""
    recipe, lines = make_recipe(root, label, **data), []
    metrics = run(recipe, output=tmp_path / "run", report=lines.append)
    prepared, written = prepare(recipe), load_recipe(tmp_path / "run" / "recipe.toml")
    train = prepared.data["train"]
    start, _ = load_model(bertkit.BertForSequenceClassification, str(root / "bert"), {})
    vectors = encode_sentences(start.bert.eval(), train.__getitems__(range(len(train))))
    targets, number = train.labels, len(train.space.names)
    if label == "price":
        targets = (targets - targets.mean(dtype=float)) / targets.std(dtype=float)
    weights = prepared.settings.get("class_weights")
    pooling, strength = choose_head(vectors, targets, number, prepared.groups, weights)
    assert (written.data["pooling"], written.strength, written.settled) == (pooling, strength, ["pooling", "strength"])
    weight, bias = solve(vectors[pooling], targets, strength, number, weights)
    if label == "price":
        weight, bias = weight * train.labels.std(dtype=float), bias * train.labels.std(dtype=float)
        bias += train.labels.mean(dtype=float)
    saved = read_weights(tmp_path / "run")
    np.testing.assert_allclose(saved["classifier.weight"], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(saved["classifier.bias"], bias, rtol=1e-4, atol=1e-5)
    assert (metrics["updates"], metrics["kept"]) == (0, "start")
    assert "the start" not in metrics.get("chosen_on_dev", "")
    assert not any("unused" in line or "randomly initialised" in line for line in lines)


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
    assert "not forecast for a frozen encoder" in costs.measure_costs(make_recipe(root, "stars"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_run_answers_as_it_was_scored_and_stock_answers_alike(root, tmp_path, pooling):
    output = tmp_path / "run"
    metrics = run(make_recipe(root, "stars", pooling=pooling), output=output)
    rows = read_table(output / "predictions" / "dev.parquet")
    pairs = list(zip(rows.column("title").to_pylist(), rows.column("body").to_pylist(), strict=True))
    found = Predictor(output, precision="fp32")(pairs)
    assert [row["label"] for row in found] == rows.column("prediction").to_pylist()
    assert len(set(rows.column("prediction").to_pylist())) > 1
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
    recipes = [partial(Recipe.make, TASKS[name], fits_model=False) for name in ("squad1", "squad2", "swag")]
    for make in [*recipes, partial(Recipe.make, TASKS["rte"], glue)]:
        assert make(frozen).train["learning_rate"] == FROZEN_RATE != make().train["learning_rate"]
        assert make(frozen, given).train["learning_rate"] == 1e-5
        assert not make(frozen).is_solved
    assert Recipe.make(TASKS["rte"], glue, frozen, {"bilstm": False}).is_solved
    assert Recipe.make(TASKS["ner"], frozen, fits_model=False).is_solved


def test_what_only_a_trained_head_has_is_refused(root, refused):
    with refused():
        make_recipe(root, "stars", long="max")


# --- A training that starts from a solved head ------------------------------------------------------------------------


def train(root, output, label="stars", *others, report=None, **data):
    """Train from a solved head with a few updates, and return the scores; of pairs it is not the default."""
    changes = {"start": "solved", "baseline": True, "batch_size": 8}
    changes |= {"train": {"max_steps": 6, "learning_rate": 1e-3}}
    recipe = make_recipe(root, label, changes, *others, freeze=None, **data)
    return run(recipe, output=output, report=report or (lambda line: None))


def answer_stock(output, texts):
    """Return the logits of plain transformers for some pairs of texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    batch = tokenizer(*zip(*texts, strict=True), max_length=24, truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        return transformers.AutoModelForSequenceClassification.from_pretrained(output).eval()(**batch).logits


@pytest.mark.parametrize("label", ["stars", "tags", "price"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "auto"])
def test_it_starts_from_the_solved_head_and_the_better_one_is_delivered(root, tmp_path, label, pooling):
    output = tmp_path / "run"
    metrics = train(root, output, label, pooling=pooling)
    frozen = run(make_recipe(root, label, pooling=pooling), output=tmp_path / "frozen")
    assert metrics["start_score"] == pytest.approx(frozen["score"], rel=1e-5)
    assert metrics["score"] == pytest.approx(metrics[f"{metrics['kept']}_score"], rel=1e-6)
    if metrics["start_gain_low"] > 0 or metrics["start_gain_high"] < 0:
        assert metrics["kept"] == ("start" if metrics["start_gain"] < 0 else "end")
    assert metrics["start_gain"] == pytest.approx(metrics["end_score"] - metrics["start_score"])
    assert metrics["start_gain_low"] <= metrics["start_gain"] <= metrics["start_gain_high"]
    assert metrics["updates"] == 6
    assert "the start or the end of the training" in metrics["chosen_on_dev"]
    said = [line for line in CLASSIFICATION.comment(metrics) if "before the first update" in line]
    assert len(said) == 1
    assert said[0].startswith(f"the {metrics['kept']} of the training is delivered: ")
    assert not {"start", "best"} & {path.name for path in output.iterdir()}
    written = load_recipe(output / "recipe.toml")
    assert written.strength > 0
    assert written.data["pooling"] in (("mean", "cls") if pooling == "auto" else (pooling,))
    rows = read_table(output / "predictions" / "dev.parquet")
    pairs = list(zip(rows.column("title").to_pylist(), rows.column("body").to_pylist(), strict=True))
    found, logits = Predictor(output, precision="fp32")(pairs), answer_stock(output, pairs)
    if label == "price":
        np.testing.assert_allclose([row["score"] for row in found], logits[:, 0], rtol=1e-5)
    else:
        shares = logits.softmax(1) if label == "stars" else logits.sigmoid()
        np.testing.assert_allclose([list(row["probabilities"].values()) for row in found], shares, atol=1e-5)


def test_a_start_that_is_better_is_delivered_with_its_weights(root, tmp_path):
    """A rate far too high destroys the model."""
    worse = {"train": {"learning_rate": 1.0}}
    metrics = train(root, tmp_path / "run", "stars", worse)
    frozen = run(make_recipe(root, "stars"), output=tmp_path / "frozen")
    assert (metrics["kept"], metrics["score"]) == ("start", frozen["score"])
    assert metrics["end_score"] < metrics["start_score"]
    assert not any(name.startswith("frozen") for name in metrics), "the model is the baseline"
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "frozen"))
    assert any(line.startswith("the start of the training is delivered: ") for line in CLASSIFICATION.comment(metrics))


def test_with_a_tune_split_its_rows_decide(root, tmp_path):
    metrics = train(root, tmp_path / "run", tune_share=0.3)
    assert "chosen_on_dev" not in metrics
    assert metrics["tune_score"] == pytest.approx(metrics[f"{metrics['kept']}_score"])
    assert metrics["tune_score"] != metrics["score"]


def test_words_start_from_a_solved_head_too(root, tmp_path):
    write_conll(root / "ner")
    given = {"checkpoint": str(root / "bert"), "precision": "fp32", "preset": "auto", "batch_size": 8}
    given |= {"data": {"dir": str(root / "ner"), "max_length": 40}, "train": {"max_steps": 4}}
    recipe, lines = Recipe.make(TASKS["ner"], given), []
    assert (recipe.start, recipe.data["order"]) == ("auto", "documents")
    metrics = run(recipe, output=tmp_path / "run", report=lines.append)
    assert load_recipe(tmp_path / "run" / "recipe.toml").start == "solved"
    assert any(line.startswith("the head is solved on vectors of ") and "words: C = " in line for line in lines)
    assert metrics["kept"] in ("start", "end")
    assert metrics["start_score"] > 0


def test_the_classifier_of_a_checkpoint_for_these_labels_is_kept(root, tmp_path):
    """A model whose last layer computes the mean keeps it, and gets no second one."""
    first = train(root, tmp_path / "first", pooling="mean")
    lines = []
    given = {"checkpoint": str(tmp_path / "first")}
    second = train(root, tmp_path / "second", "stars", given, report=lines.append)
    assert any("starts from the classifier of the checkpoint" in line for line in lines)
    assert second["start_score"] == first["score"]
    assert not any("frozen" in name for name in second)
    again, _ = load_model(bertkit.BertForSequenceClassification, str(tmp_path / "second"), {})
    assert (again.config.num_hidden_layers, again.config.mean_layer) == (2, True)
    train(root, tmp_path / "third", "tags", given)
    again, _ = load_model(bertkit.BertForSequenceClassification, str(tmp_path / "third"), {})
    assert again.config.num_hidden_layers == 2


@pytest.mark.parametrize("stopped", ["before the start is saved", "before the first checkpoint", "after it"])
def test_a_run_that_was_stopped_becomes_the_same_run(root, tmp_path, monkeypatch, stopped):
    """Before the first checkpoint the head is solved again, to the same weights."""

    class Stopped(Exception):
        pass

    def stop(*args, **kwargs):
        raise Stopped

    saves = {"train": {"save_strategy": "steps", "save_steps": 2}}
    straight = train(root, tmp_path / "straight", "stars", saves)
    replaced = {"before the start is saved": "save_start", "before the first checkpoint": "train", "after it": "finish"}
    with monkeypatch.context() as patch:
        patch.setattr(f"bertkit.training.run.{replaced[stopped]}", stop)
        with pytest.raises(Stopped):
            train(root, tmp_path / "run", "stars", saves)
    if stopped == "after it":
        monkeypatch.setattr("bertkit.training.facts.solve_start", stop)
    metrics = train(root, tmp_path / "run", "stars", saves)
    assert metrics == straight
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "straight"))


def test_a_start_needs_a_head_that_can_be_solved(root, refused):
    assert make_recipe(root, "stars", {"bilstm": True}, freeze=None).start == "random"
    assert make_recipe(root, "stars", {"reinit_layers": 1}, freeze=None).start == "random"
    with refused():
        make_recipe(root, "stars", {"bilstm": True, "start": "solved"}, freeze=None)
    with refused():
        Recipe.make(TASKS["swag"], {"start": "solved"}, fits_model=False)
    with refused():
        Recipe.make(TASKS["swag"], {"start": "auto"}, fits_model=False)


@pytest.mark.parametrize(
    ("columns", "label", "start", "reason"),
    [
        (["title", "body"], "stars", "random", "the vectors of pairs tell little before a training"),
        (["title"], "chance", "random", "the vectors explain 0.0% of the loss of a constant answer"),
        (["title"], "stars", "solved", ""),
    ],
)
def test_an_open_start_is_solved_where_the_vectors_tell_something(root, tmp_path, columns, label, start, reason):
    """A run that decides its start has the weights of one with the same given start, and continues as it was begun.

    The checkpoint has no pooler: a random start has a random one, a solved start one that changes nothing.
    """
    table, rng = write_reviews(tmp_path / "reviews.jsonl", 160), np.random.default_rng(0)
    rows = [json.loads(line) | {"chance": rng.choice(["a", "b"])} for line in table.read_text("utf-8").splitlines()]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data, lines, bare = {"dir": str(table), "text": columns}, [], {"checkpoint": str(root / "bare")}
    metrics = train(root, tmp_path / "run", label, bare, {"start": "auto"}, report=lines.append, **data)
    assert [line for line in lines if line.startswith("the head starts at random")] == (
        [f"the head starts at random: {reason}"] if reason else []
    )
    written = load_recipe(tmp_path / "run" / "recipe.toml")
    assert (written.start, "start" in written.settled, "kept" in metrics) == (start, True, start == "solved")
    train(root, tmp_path / "given", label, bare, {"start": start}, **data)
    assert_same_bits(read_weights(tmp_path / "run"), read_weights(tmp_path / "given"))
    assert run(written, output=tmp_path / "again") == metrics
    assert train(root, tmp_path / "run", label, bare, {"start": "auto"}, **data) == metrics, "nothing is repeated"


def test_planned_checkpoints_are_left_out_in_a_short_training(root, tmp_path):
    """A fifth of ten minutes lies between two of them, unless a person has asked for others."""
    train(root, tmp_path / "run", "stars", {"train": {"save_total_limit": 0}})
    saves = {"train": {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 0}}
    train(root, tmp_path / "more", "stars", saves)
    updates = [sorted(int(x.name.split("-")[1]) for x in (tmp_path / n).glob("checkpoint-*")) for n in ("run", "more")]
    assert updates == [[6], [2, 4, 6]]


def test_a_strength_that_was_given_is_taken_and_the_command_repeats(root, tmp_path):
    given = {"strength": 0.5}
    metrics, lines = train(root, tmp_path / "run", "stars", given, pooling="auto"), []
    written = load_recipe(tmp_path / "run" / "recipe.toml")
    assert (written.strength, metrics["solved_strength"]) == (0.5, 0.5)
    assert "strength" not in written.settled
    assert train(root, tmp_path / "run", "stars", given, pooling="auto", report=lines.append) == metrics
    assert lines[-1].startswith(f"{tmp_path / 'run'} is finished")


def test_another_pooling_than_a_checkpoint_s_own_solves_the_head_anew_or_is_refused(root, tmp_path, refused):
    train(root, tmp_path / "cls", pooling="cls")
    train(root, tmp_path / "mean", "stars", {"checkpoint": str(tmp_path / "cls")}, pooling="mean")
    frozen = run(
        make_recipe(root, "stars", {"checkpoint": str(tmp_path / "cls")}, pooling="mean"), output=tmp_path / "f"
    )
    metrics = json.loads((tmp_path / "mean" / "metrics.json").read_text())
    assert metrics["start_score"] == pytest.approx(frozen["score"], rel=1e-5)
    with refused():
        train(root, tmp_path / "other", "stars", {"checkpoint": str(tmp_path / "mean")}, pooling="cls")


def test_a_recipe_of_an_earlier_version_starts_as_it_did(root, tmp_path):
    """It has no start, a pooling that only a frozen encoder had, and another name for the rows of trials."""
    saved = make_recipe(root, "stars", freeze=None).to_dict()
    del saved["start"]
    saved["data"]["held_back"] = saved["data"].pop("trial_rows")
    saved["data"]["pooling"] = "mean"
    save_recipe(saved, tmp_path / "old.toml")
    assert (load_recipe(tmp_path / "old.toml").start, read_recipe(tmp_path / "old.toml")["start"]) == (
        "random",
        "random",
    )
    assert load_recipe(tmp_path / "old.toml").data["pooling"] == "auto"
