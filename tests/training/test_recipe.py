"""Recipes: worked examples of every error, of merging and of saving, and every file under recipes/."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import UsageError
from bertkit.tasks import TASKS
from bertkit.training.budget import limit_updates
from bertkit.training.recipe import (
    RESERVED,
    TABLES,
    Recipe,
    _list_fields,
    check,
    load_recipe,
    merge,
    parse_setting,
    read_recipe,
    resolve,
    save_recipe,
    split_batch,
)
from tests.official import write_checkpoint
from tests.world import replace_values, vary

TASK = TASKS["pretrain"]
ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted(ROOT.glob("recipes/**/*.toml")) if "studies" not in path.parts]
PRETRAIN = {path.stem: path for path in RECIPES if path.parent.name == "pretrain"}


def check_one(text: str) -> dict[str, Any]:
    """Return the checked recipe of one `--set`."""
    return check(parse_setting(text), TASK)


def typed(value: Any) -> Any:
    """Return the value with explicit types, because in Python 1 == 1.0 == True."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value).__name__, value)


# Reading and --set


def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, refused: Any) -> None:
    for content in (b"a = 1\nb = two\n", b"a = 1\na = 2\n", b"b = '\xe9'\n"):
        (tmp_path / "broken.toml").write_bytes(content)
        with refused():
            read_recipe(tmp_path / "broken.toml")
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with refused():
            read_recipe(path)
    (tmp_path / "date.toml").write_text("checkpoint = 2024-01-01\n")
    with refused():
        check(read_recipe(tmp_path / "date.toml"), TASK)


@pytest.mark.parametrize("seconds", [0, 10**14])
def test_a_timeout_that_no_clock_can_count_is_refused(seconds: int, refused: Any) -> None:
    with refused():
        check({"train": {"ddp_timeout": seconds}}, TASK)
    assert check({"train": {"ddp_timeout": 86_400}}, TASK) == {"train": {"ddp_timeout": 86_400}}


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("train.learning_rate=1e-4", {"train": {"learning_rate": 1e-4}}),
        (" batch_size = 16 ", {"batch_size": 16}),
        ('data.corpus=["a","b=c"]', {"data": {"corpus": ["a", "b=c"]}}),
        ("checkpoint=google-bert/bert-base-cased", {"checkpoint": "google-bert/bert-base-cased"}),
        ("checkpoint=2024-01-01", {"checkpoint": "2024-01-01"}),
        ("checkpoint=", {"checkpoint": ""}),
        ("checkpoint=1\nbatch_size = 2", {"checkpoint": "1\nbatch_size = 2"}),
        ("phase=[{share=1.0, max_length=64}]", {"phase": [{"share": 1.0, "max_length": 64}]}),
    ],
)
def test_a_setting_is_toml_or_else_text(text: str, recipe: dict[str, Any]) -> None:
    assert typed(parse_setting(text)) == typed(recipe)


@pytest.mark.parametrize("text", ["batch_size", "=5", "train.=5", ".x=5", "train.a.b=5", ""])
def test_a_setting_of_another_form_is_refused_with_an_example(text: str, refused: Any) -> None:
    with refused():
        parse_setting(text)


# Merging


def test_later_recipes_win_and_tables_merge_key_by_key() -> None:
    paper = {"batch_size": 256, "data": {"corpus": ["a", "b"], "cased": False}, "train": {"optim_args": {"a": 2}}}
    file = {"data": {"corpus": ["c"], "cased": None}, "train": {"optim_args": {"b": 2}}, "checkpoint": None}
    before = copy.deepcopy(file)
    merged = merge(paper, file, {"batch_size": 8})
    table = {"corpus": ["c"], "cased": False}
    assert merged == {"batch_size": 8, "data": table, "train": {"optim_args": {"b": 2}}}
    merged["data"]["corpus"].append("d")
    assert file == before
    assert merge({"train": 5}, {"train": {"seed": 1}}) == {"train": {"seed": 1}}


def test_a_home_is_expanded_wherever_a_recipe_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    (tmp_path / "recipe.toml").write_text('corpus = ["~/a", "b~", "~nobody-at-all/c", "$HOME"]\n')
    assert read_recipe(tmp_path / "recipe.toml") == {"corpus": ["/home/ada/a", "b~", "~nobody-at-all/c", "$HOME"]}
    assert merge(parse_setting("data.vocab=~/v")) == {"data": {"vocab": "/home/ada/v"}}


# Checking


MISTAKES = [
    # Unknown keys: the nearest one, where it belongs, or the list.
    "train.learning_rat=1",
    "batchsize=1",
    "learning_rate=1e-4",
    "train.batch_size=8",
    "zzz=1",
    "data.zzz=1",
    "model.zzz=1",
    # Keys that bertkit sets itself.
    "train.output_dir=x",
    "train.ignore_data_skip=true",
    # Types.
    "train.learning_rate='2e-5'",
    "batch_size=true",
    "train.learning_rate=nan",
    "train.max_steps=1e6",
    "data.corpus=wiki",
    "train.lr_scheduler_kwargs=3",
    "train=5",
    # Choices and ranges.
    "precision=BF16",
    "preset=stabel",
    "train.eval_strategy=never",
    "batch_size=0",
    # Phases.
    "phase=[{share=1.0}]",
    "phase=[{share=1.0, length=1}]",
    "phase=[{share=1.0, max_length=4}]",
    "phase=[{share=nan, max_length=64}]",
]


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_is_one_line_with_the_remedy(text: str, refused: Any) -> None:
    with refused() as caught:
        check_one(text)
    assert "\n" not in str(caught.value)


def test_a_mistake_names_the_choices_of_the_library() -> None:
    with pytest.raises(UsageError, match=r"expected one of constant, .*, linear"):
        check_one("train.lr_scheduler_type=greedy")


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("train.num_train_epochs=3", {"train": {"num_train_epochs": 3.0}}),
        ("model.attn_implementation=eager", {"model": {"attn_implementation": "eager"}}),
        ("data.mask_rate=inf", {"data": {"mask_rate": math.inf}}),
        ("train.max_steps=-1", {"train": {"max_steps": -1}}),
        ("train.optim=bert_adam", {"train": {"optim": "bert_adam"}}),
        ("train.lr_scheduler_type=cosine", {"train": {"lr_scheduler_type": "cosine"}}),
        ('train.report_to=["none"]', {"train": {"report_to": ["none"]}}),
        ("train.report_to=none", {"train": {"report_to": "none"}}),
        ("train.lr_scheduler_kwargs={num_cycles=3}", {"train": {"lr_scheduler_kwargs": {"num_cycles": 3}}}),
        ("phase=[]", {"phase": []}),
        ("phase=[{share=1, max_length=5}]", {"phase": [{"share": 1.0, "max_length": 5}]}),
    ],
)
def test_a_right_value_comes_back_in_its_type(text: str, recipe: dict[str, Any]) -> None:
    assert typed(check_one(text)) == typed(recipe)


def test_every_default_of_the_libraries_passes() -> None:
    """The types are read from annotations; a default that fails would mean that one was read wrongly."""
    from transformers import TrainingArguments

    from bertkit.model.config import BertConfig

    fields = {table: _list_fields(table, TASK) for table in TABLES}
    assert {"learning_rate", "warmup_steps", "optim", "per_device_train_batch_size"} <= fields["train"].keys()
    assert not fields["train"].keys() & RESERVED.keys()
    config = BertConfig()
    stock = {
        "model": {key: getattr(config, key) for key in fields["model"] if key != "attn_implementation"},
        "data": TASK.recipe["data"],
        "train": {key: getattr(TrainingArguments, key, None) for key in fields["train"]},
    }
    stock["train"] = {key: getattr(value, "value", value) for key, value in stock["train"].items()}  # of enumerations
    checked = check(stock, TASK)
    assert checked == merge(stock)
    assert len(checked["model"]) >= 15
    assert len(checked["train"]) >= 50


# The recipe of a run


def make(given: dict[str, Any]) -> Recipe:
    """Return a recipe without a look at its model."""
    return Recipe.make(TASK, given, fits_model=False)


def test_what_a_timing_tells_is_filled_in(tmp_path: Path) -> None:
    """A warm-up keeps its share, and phases keep theirs."""
    phases = [{"share": 0.5, "max_length": 16}, {"share": 0.5, "max_length": 32}]
    recipe = make({"phase": phases, "train": {"max_steps": 200, "warmup_steps": 20}})
    found = resolve(recipe, limit_updates(recipe, 401, 200))
    assert found.phase == recipe.phase
    keys = ("max_steps", "warmup_steps", "eval_steps", "save_steps", "logging_steps")
    assert [found.train[key] for key in keys] == [401, 0.1, 81, 81, 5]
    given = make({"train": {"max_steps": 200, "eval_steps": 50, "save_steps": 500}})
    assert [resolve(given, limit_updates(given, 401, 200)).train[key] for key in keys[2:]] == [50, 81, 5]
    stopped = replace_values(found, stop_after=300)
    save_recipe(stopped.to_dict(), tmp_path / "recipe.toml")
    assert load_recipe(tmp_path / "recipe.toml") == stopped


def test_a_recipe_of_an_earlier_version_is_read_with_the_defaults_of_newer_options(tmp_path: Path) -> None:
    """Its checkpoint is gone, and it has a key that budgets had."""
    (tmp_path / "recipe.toml").write_text(
        'task = "rte"\ncheckpoint = "gone"\npace = [[0.0, 0.0, 0.1]]\n[data]\nmax_length = 64\n'
    )
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert (recipe.data["max_length"], recipe.data["tune_share"], recipe.patience) == (64, 0.0, 0)


# Lengths that a checkpoint decides


@pytest.mark.parametrize("name", ["classify", "rte", "squad2", "swag", "ner", "pretrain"])
def test_a_length_that_nobody_gave_is_at_most_the_model_s(name: str, tmp_path: Path) -> None:
    """One that is given stays, and is refused if it is longer; the saved recipe has the value."""
    task, data = TASKS[name], {} if name == "pretrain" else {"dir": str(tmp_path)}
    given = {"checkpoint": str(write_checkpoint(tmp_path / "bert", max_position_embeddings=40)), "data": data}
    question = {"max_query_length": 9} if name == "squad2" else {}
    recipe = Recipe.make(task, given)
    assert recipe.data["max_length"] == 40
    assert vary(recipe, train={"seed": 7}).data == recipe.data
    save_recipe(recipe.to_dict(), tmp_path / "recipe.toml")
    assert load_recipe(tmp_path / "recipe.toml") == recipe
    assert Recipe.make(task, given, {"data": {"max_length": 36, **question}}).data["max_length"] == 36
    with pytest.raises(UsageError, match="max_length 41 exceeds the model's 40 positions; lower it"):
        Recipe.make(task, given, {"data": {"max_length": 41, **question}})


def test_a_question_leaves_room_in_a_model_with_few_positions(tmp_path: Path) -> None:
    given = {"checkpoint": str(write_checkpoint(tmp_path / "bert", max_position_embeddings=40))}
    assert Recipe.make(TASKS["squad1"], given).data["max_query_length"] == 20
    assert Recipe.make(TASKS["squad1"], given, {"data": {"max_query_length": 30}}).data["max_query_length"] == 30
    with pytest.raises(UsageError, match=r"max_length 40 leaves no room for the context beside .* max_query_length 37"):
        Recipe.make(TASKS["squad1"], given, {"data": {"max_query_length": 37}})
    given["checkpoint"] = str(write_checkpoint(tmp_path / "large", max_position_embeddings=384))
    assert [Recipe.make(TASKS["squad1"], given).data[key] for key in ("max_length", "max_query_length")] == [384, 64]


# Saving and comparing


def test_a_saved_recipe_reads_well(tmp_path: Path) -> None:
    recipe = {
        "train": {"learning_rate": 1e-4, "lr_scheduler_kwargs": {"num_cycles": 3}, "run_name": None},
        "phase": [{"share": 0.9, "max_length": 128}, {"share": 0.1, "max_length": 512}],
        "data": {"max_length": 8},
        "batch_size": 256,
        "checkpoint": None,
    }
    save_recipe(recipe, tmp_path / "recipe.toml")
    assert (tmp_path / "recipe.toml").read_text() == (
        "batch_size = 256\n\n[data]\nmax_length = 8\n\n"
        "[[phase]]\nshare = 0.9\nmax_length = 128\n\n"
        "[[phase]]\nshare = 0.1\nmax_length = 512\n\n"
        "[train]\nlearning_rate = 0.0001\n\n[train.lr_scheduler_kwargs]\nnum_cycles = 3\n"
    )


# Batches


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_a_batch_is_split_without_remainder(per_device: int, processes: int, steps: int) -> None:
    size = per_device * processes * steps
    assert split_batch(size, processes=processes, per_device=per_device) == (per_device, steps)
    assert split_batch(size, processes=processes) == (per_device * steps, 1)


def test_the_shares_of_the_phases_add_up(refused: Any) -> None:
    phases = [{"share": 0.9, "max_length": 16}, {"share": 0.2, "max_length": 32}]
    with refused():
        make({"phase": phases})


def test_a_remainder_names_the_nearest_sizes(refused: Any) -> None:
    for processes, per_device in ((3, None), (1, 5), (2, 64)):
        with refused():
            split_batch(32, processes=processes, per_device=per_device)


# The files


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_file_has_a_note_and_is_the_same_after_it_was_saved(path: Path, tmp_path: Path) -> None:
    """A recipe of a pretraining has a lab note, and a sentence for every value."""
    recipe = read_recipe(path)
    save_recipe(recipe, tmp_path / "recipe.toml")
    assert typed(read_recipe(tmp_path / "recipe.toml")) == typed(recipe)
    note, _, body = path.read_text(encoding="utf-8").partition("\n\n")
    assert note.startswith("# ")
    if path in PRETRAIN.values():
        assert set(re.findall(r"^# (\w+) ", note, re.MULTILINE)) >= {"Command", "Hardware", "Time", "Expected"}
        values = [line for line in body.splitlines() if re.match(r"\w+ = ", line)]
        assert len(values) >= 15
        assert [line for line in values if not re.search(r" # \S", line)] == []


@pytest.mark.parametrize("name", ["base", "large"])
def test_the_paper_values(name: str) -> None:
    """Section 3.1 and A.2, and the epsilon, the clipping and the data of the reference code."""
    recipe = read_recipe(PRETRAIN[name])
    sizes = [recipe["model"][f"num_{key}"] for key in ("hidden_layers", "attention_heads")]
    assert [*sizes, recipe["model"]["hidden_size"]] == {"base": [12, 12, 768], "large": [24, 16, 1024]}[name]
    assert recipe["batch_size"] == 256
    assert recipe["phase"] == [{"share": 0.9, "max_length": 128}, {"share": 0.1, "max_length": 512}]
    paper = {
        "max_steps": 1_000_000,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10_000,
        "optim": "bert_adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    assert {key: recipe["train"][key] for key in paper} == paper
    data = recipe["data"]
    assert [data[key] for key in ("masked_lm_prob", "mask_rate", "random_rate", "same_rate")] == [0.15, 0.8, 0.1, 0.1]
    assert (data["short_seq_prob"], data["dupe_factor"]) == (0.1, 10)


def test_the_schedule_differs_by_the_stated_factor() -> None:
    """base.toml: after the warm-up transformers' linear rate is 100 / 99 of the reference's, at every step."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    train = read_recipe(PRETRAIN["base"])["train"]
    total, warmup = train["max_steps"], train["warmup_steps"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rate = get_linear_schedule_with_warmup(optimizer, warmup, total).lr_lambdas[0]
    for step in (warmup, 500_000, total - 1):
        assert rate(step) / (1 - step / total) == pytest.approx(100 / 99)
    assert rate(warmup - 1) == pytest.approx((warmup - 1) / warmup)
