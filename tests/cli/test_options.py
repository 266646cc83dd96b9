"""The options that every command that trains has, the keys of `--set` in other words, and the panels of `--help`."""

import tomllib

import pytest
import typer

from bertkit.cli import PANELS
from bertkit.cli.options import app
from bertkit.tasks.option import TOP_LEVEL
from bertkit.training.recipe import TOP_KEYS
from tests.corpora import write_text
from tests.official import write_checkpoint, write_conll, write_glue, write_reviews, write_squad, write_swag

KEYS = {
    "--learning-rate": ("train", "learning_rate"),
    "--epochs": ("train", "num_train_epochs"),
    "--steps": ("train", "max_steps"),
    "--batch-size": ("batch_size",),
    "--seed": ("train", "seed"),
    "--max-length": ("data", "max_length"),
}
GIVEN = {"--learning-rate": 3e-4, "--epochs": 1.5, "--batch-size": 4, "--seed": 7, "--max-length": 40}
PRETRAINING = {"--steps" if option == "--epochs" else option: value for option, value in GIVEN.items()} | {"--steps": 9}
COMMANDS = {
    "pretrain": ("--corpus", "text.txt", "--set", "data.vocab_size=100"),
    "classify": ("--data", "reviews.csv", "--model", "bert"),
    "glue": ("--task", "rte", "--data", "glue", "--model", "bert"),
    "squad": ("--version", 1, "--data", "squad", "--model", "bert", "--set", "data.max_query_length=16"),
    "swag": ("--data", "swag", "--model", "bert"),
    "ner": ("--data", "conll", "--model", "bert"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write small data for each command, and a tiny BERT."""
    folder = tmp_path_factory.mktemp("options")
    write_text(folder / "text.txt")
    write_reviews(folder / "reviews.csv", 120)
    write_glue(folder / "glue")
    write_squad(folder / "squad", 1)
    write_swag(folder / "swag")
    write_conll(folder / "conll")
    write_checkpoint(folder / "bert")
    return folder


@pytest.fixture
def files(call, folder, monkeypatch):
    """Go to the data; leave out the costs of a dry run, which take seconds."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("bertkit.training.costs.describe_cost", lambda *_: [])
    monkeypatch.setattr("bertkit.studies.cells.describe_time", lambda *_: [])


def list_words(given):
    return [word for pair in given.items() for word in pair]


@pytest.mark.parametrize("command", COMMANDS)
def test_five_options_are_names_of_keys_and_win_over_set(finish, files, command):
    given = PRETRAINING if command == "pretrain" else GIVEN
    overridden = ("--set", "train.seed=3", "--set", "batch_size=2")
    out = finish(command, *COMMANDS[command], *list_words(given), *overridden, "--dry-run")
    recipe = tomllib.loads(out.partition("the recipe:\n")[2])
    for option, value in given.items():
        *table, key = KEYS[option]
        assert (recipe[table[0]] if table else recipe)[key] == value, option


@pytest.mark.parametrize(
    ("command", "study"), [("classify", ("--folds", 2)), ("squad", ("--grid",)), ("ner", ("--restarts", 2))]
)
def test_the_five_options_reach_the_runs_of_a_study(finish, files, monkeypatch, command, study):
    made = []
    monkeypatch.setattr("bertkit.studies.cells.describe_plan", lambda study: made.append(study) or [])
    finish(command, *COMMANDS[command], *list_words(GIVEN), *study, "--dry-run")
    assert made[0].seeds == ((7, 8) if "--restarts" in study else (7,))
    assert made[0].grid == {}, "a value replaces an axis"
    for row in made[0].rows.values():
        assert row.recipe["train"] == {"learning_rate": 3e-4, "num_train_epochs": 1.5}
        assert (row.recipe["batch_size"], row.recipe["data"]["max_length"]) == (4, 40)


@pytest.mark.parametrize("words", ["--text title --text body", "--text title,body"])
def test_text_may_be_repeated(finish, files, words):
    out = finish("classify", *COMMANDS["classify"], *words.split(), "--dry-run")
    assert tomllib.loads(out.partition("the recipe:\n")[2])["data"]["text"] == ["title", "body"]


def test_help_lists_every_top_level_key_and_every_command_in_one_panel(call):
    assert TOP_LEVEL.keys() == TOP_KEYS.keys()
    out = call("classify", "--help")[1]
    assert all(f"\n {key}: " in out for key in TOP_KEYS)
    listed = [name for names in PANELS.values() for name in names.split()]
    commands = typer.main.get_command(app).commands
    assert sorted(listed) == sorted(name for name, command in commands.items() if not command.hidden)
    out = call("--help")[1]
    places = [out.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert "─ Commands ─" not in out
