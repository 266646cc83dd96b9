"""The preset `auto`: what it decides, what a person's own values leave of it, and that its run is repeated."""

import pytest

from bertkit.tasks import TASKS
from bertkit.training.facts import describe_rows
from bertkit.training.recipe import ADAPTED, Recipe, list_settled, load_recipe, make_first, resolve, save_recipe
from bertkit.training.run import run
from tests.official import write_checkpoint, write_glue, write_reviews
from tests.world import assert_same_bits, read_weights

CLASSIFY = TASKS["classify"]


@pytest.fixture
def given(tmp_path):
    """Return the recipe of a run on a table of 120 rows with a tiny model."""
    table, model = write_reviews(tmp_path / "reviews.csv", 120), write_checkpoint(tmp_path / "bert", hidden_size=32)
    data = {"dir": str(table), "text": ["title", "body"], "label": ["stars"]}
    return {"checkpoint": str(model), "precision": "fp32", "batch_size": 32, "data": data}


def settle(recipe, rows):
    """Return a recipe with what follows from the number of training rows."""
    return resolve(recipe, describe_rows(recipe, rows))


@pytest.mark.parametrize(
    ("rows", "hidden", "rate", "epochs"),
    [(100, 384, 7.8e-5, 20), (1000, 384, 7.8e-5, 10), (3000, 768, 3.9e-5, 4), (100_000, 1024, 2.9e-5, 3)],
)
def test_rate_and_epochs_follow_from_the_rows_and_the_model(given, monkeypatch, rows, hidden, rate, epochs):
    """300 updates of 32 rows are 9,600 rows: 96, 9.6, 3.2 and 0.1 epochs, of which 20 are the most and 3 the least."""
    monkeypatch.setattr("bertkit.training.facts.load_config", lambda _: type("", (), {"hidden_size": hidden}))
    recipe = Recipe.make(CLASSIFY, given)
    assert not recipe.train.keys() & set(ADAPTED)
    lines = []
    train = resolve(recipe, describe_rows(recipe, rows, lines.append)).train
    assert [train[key] for key in ADAPTED] == ["adamw_torch", rate, epochs]
    assert lines[0].startswith(f"preset auto, for {rows:,} training sequences and a hidden size of {hidden}: ")
    own = settle(Recipe.make(CLASSIFY, given, {"train": {"learning_rate": 1e-3}}), rows).train
    assert (own["learning_rate"], own["num_train_epochs"]) == (1e-3, epochs)


def test_own_data_have_it_and_the_paper_s_have_the_paper_s(given, tmp_path, refused):
    presets = {name: Recipe.make(CLASSIFY, given, {"preset": name}).preset for name in ("paper", "stable")}
    assert presets == {name: name for name in presets}
    official = {**given, "data": {"dir": str(write_glue(tmp_path / "glue"))}}
    assert Recipe.make(TASKS["rte"], official).preset == "paper"
    assert settle(Recipe.make(TASKS["rte"], official), 10).train["learning_rate"] == 2e-5
    assert Recipe.make(TASKS["ner"], fits_model=False).preset == "paper"
    own = {"data": {"dir": str(tmp_path / "own")}}
    for name in ("ner", "squad1"):
        assert Recipe.make(TASKS[name], own, fits_model=False).preset == "auto"
    with refused():
        Recipe.make(TASKS["pretrain"], {"preset": "auto"}, fits_model=False)


def test_an_open_recipe_is_saved_open_and_a_settled_one_repeats(given, tmp_path):
    recipe = Recipe.make(CLASSIFY, given)
    save_recipe(recipe.to_dict(), tmp_path / "open.toml")
    assert load_recipe(tmp_path / "open.toml") == recipe
    settled = settle(recipe, 1000)
    save_recipe(settled.to_dict(), tmp_path / "settled.toml")
    again = load_recipe(tmp_path / "settled.toml")
    assert again == settled == settle(again, 5) == resolve(recipe, list_settled(settled))


def test_a_run_records_its_values_and_its_command_continues_it(given, tmp_path):
    recipe, lines = Recipe.make(CLASSIFY, given, {"train": {"num_train_epochs": 1.0}}), []
    metrics = run(recipe, output=tmp_path / "run", report=lines.append)
    written = load_recipe(tmp_path / "run" / "recipe.toml")
    assert written.train["learning_rate"] == settle(recipe, 96).train["learning_rate"]
    assert sum(line.startswith("preset auto") for line in lines) == 1
    assert run(recipe, output=tmp_path / "run", report=lines.append) == metrics
    assert lines[-1].startswith(f"{tmp_path / 'run'} is finished")
    assert run(written, output=tmp_path / "again") == metrics
    assert_same_bits(read_weights(tmp_path / "again"), read_weights(tmp_path / "run"))


def test_a_value_that_was_given_is_not_taken_for_a_settled_one(given, tmp_path, refused):
    """A run with a person's rate is another run than one that leaves the rate open."""
    settled = settle(Recipe.make(CLASSIFY, given, {"train": {"learning_rate": 1e-3}}), 96)
    assert settled.settled == ["optim", "num_train_epochs"]
    assert resolve(settled, {"learning_rate": 7.8e-5}) == settled
    (tmp_path / "run").mkdir()
    save_recipe(settled.to_dict(), tmp_path / "run" / "recipe.toml")
    (tmp_path / "run" / "training_log.jsonl").touch()  # it has begun
    with refused():
        run(Recipe.make(CLASSIFY, given), output=tmp_path / "run")


def test_a_training_before_is_settled_by_its_own_rows(tmp_path):
    data = {"dir": str(tmp_path / "own"), "extra_train": "more.json"}
    recipe = Recipe.make(TASKS["squad1"], {"data": data, "train": {"learning_rate": 1e-3}}, fits_model=False)
    found = {"optim": "adamw_torch", "num_train_epochs": 20.0}
    earlier = make_first(resolve(recipe, found))
    assert earlier.train == recipe.train
