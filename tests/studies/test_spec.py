"""The definition of a study: what wins over what, its cells and directories, its pretrainings, and its mistakes."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bertkit.studies.cells import describe_plan, list_cells, list_pretrainings, name_settings
from bertkit.studies.spec import Column, Study, Variant, define, define_columns, make_study
from bertkit.training.recipe import merge, read_recipe, save_recipe
from tests.official import write_checkpoint

PAPER_GRID = {
    "train.learning_rate": [5e-5, 4e-5, 3e-5, 2e-5],
    "batch_size": [16, 32],
    "train.num_train_epochs": [2, 3, 4],
}
SMALL = {"model": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}}
PRETRAIN = SMALL | {"data": {"corpus": ["some.txt"]}, "train": {"max_steps": 1000}}
COLUMNS = [
    {"name": "MNLI-m", "task": "mnli"},
    {"name": "MNLI-mm", "task": "mnli", "metric": "accuracy_mm"},
    {"name": "SQuAD", "task": "squad1", "metric": "f1", "recipe": {"batch_size": 16}},
]
TABLE5 = {
    "column": COLUMNS,
    "pretrain": PRETRAIN,
    "seeds": [1, 2],
    "recipe": {"batch_size": 8, "train": {"weight_decay": 0.1}},
    "row": [
        {"name": "BERT-base", "paper": {"MNLI-m": 84.4, "SQuAD": 88.5}},
        {"name": "LTR & No NSP", "pretrain": {"data": {"objective": "clm"}}},
        {"name": "+ BiLSTM", "pretrain": {"data": {"objective": "clm"}}, "recipe": {"bilstm": True, "batch_size": 4}},
    ],
}
SQUAD = [{"name": "a", "task": "squad1"}]
TWO = [{"name": "a", "task": "rte"}, {"name": "b", "task": "cola"}]


# --- The grid, the rows and the command line --------------------------------------------------------------------------


def test_the_grid_of_the_paper_has_24_cells(fake):
    """A.3: every combination of four learning rates, two batch sizes and three numbers of epochs."""
    cells = list_cells(make_study({"column": define_columns("fake"), "grid": PAPER_GRID, "restarts": 2}))
    assert len(cells) == len({cell.directory for cell in cells}) == 24
    assert tuple(cells[0].setting.values()) == (5e-5, 16, 2)
    assert tuple(cells[1].setting.values()) == (5e-5, 16, 3)
    assert tuple(cells[23].setting.values()) == (2e-5, 32, 4)
    assert cells[3].directory == "fake/learning_rate-5e-05_batch_size-32_num_train_epochs-2"
    assert cells[3].runs == {42: f"{cells[3].directory}/seed-42", 43: f"{cells[3].directory}/seed-43"}
    for cell in cells:
        train = cell.recipe.train
        values = (train["learning_rate"], cell.recipe.batch_size, train["num_train_epochs"])
        assert values == tuple(cell.setting.values())
        assert train["optim"] == "bert_adam", "keys that are not set have the task's values"


def test_the_command_line_wins_over_the_grid_over_the_row_over_the_recipe(fake):
    definition = {
        "column": define_columns("fake"),
        "recipe": {"batch_size": 1, "train": {"max_grad_norm": 1.0, "weight_decay": 0.1, "adam_epsilon": 0.1}},
        "row": [
            {"name": "one", "recipe": {"batch_size": 2, "train": {"weight_decay": 0.2, "adam_epsilon": 0.2}}},
            {"name": "two", "recipe": {"preset": "stable"}},
        ],
        "grid": {"batch_size": [3, 4], "train.weight_decay": [0.3]},
    }
    cells = list_cells(make_study(definition, {"train": {"adam_epsilon": 0.4}}))
    keys = ("max_grad_norm", "weight_decay", "adam_epsilon")
    values = [(c.row, c.recipe.batch_size, *(c.recipe.train[key] for key in keys)) for c in cells]
    assert values == [(row, size, 1.0, 0.3, 0.4) for row in ("one", "two") for size in (3, 4)]
    assert [cell.recipe.train["optim"] for cell in cells] == ["bert_adam"] * 2 + ["adamw_torch"] * 2


def test_the_command_line_fixes_an_axis_or_replaces_its_values(fake):
    definition = {
        "column": define_columns("fake"),
        "grid": {"train.learning_rate": [1.0, 2.0], "batch_size": [7, 8]},
    }
    cells = list_cells(make_study(definition, {"train": {"learning_rate": [3, 4.0]}, "batch_size": 5}))
    assert [cell.setting for cell in cells] == [{"train.learning_rate": 3.0}, {"train.learning_rate": 4.0}]
    assert {cell.recipe.batch_size for cell in cells} == {5}


def test_the_command_line_reaches_the_options_of_the_study_and_the_pretrainings(fake):
    definition = {"column": define_columns("pretrain"), "seeds": [1, 2], "select": "best"}
    study = make_study(
        definition,
        {"column": define_columns("fake")},
        {"restarts": 3, "train": {"seed": 7}},
        {"num_gpus": 0.5},
    )
    assert study == Study(columns=(Column("fake", "fake"),), seeds=(7, 8, 9), variants=(Variant(),), num_gpus=0.5)
    assert make_study(definition, {"seeds": [5]}).seeds == (5,)
    study = make_study(TABLE5, {"pretrain": {"train": {"max_steps": 5}}}, {"pretrain": {"batch_size": 4}})
    for origin in list_pretrainings(study):
        assert (origin.recipe.train["max_steps"], origin.recipe.batch_size) == (5, 4)
        assert origin.recipe.data["corpus"] == ["some.txt"]
    assert {cell.recipe.batch_size for cell in list_cells(study)} == {8, 16, 4}


@pytest.mark.parametrize(
    ("parts", "directories"),
    [
        ({}, ["fake"]),
        ({"seeds": [1, 2]}, ["fake/seed-1", "fake/seed-2"]),
        ({"grid": {"batch_size": [8]}, "row": [{"name": "Only one"}]}, ["fake/batch_size-8"]),
        ({"row": [{"name": "A row, named"}, {"name": "b"}]}, ["a-row-named/fake", "b/fake"]),
        (
            {"column": define_columns("fake", "pretrain")},
            ["fake", "pretrain"],
        ),
    ],
)
def test_directories_name_only_what_there_is_more_of_than_one(fake, parts, directories):
    cells = list_cells(make_study({"column": define_columns("fake"), **parts}))
    assert [directory for cell in cells for directory in cell.runs.values()] == directories


VALUES = st.one_of(st.text("ab/ .é", max_size=4), st.integers(-2, 2), st.floats(0, 1), st.booleans())


@given(
    st.dictionaries(st.sampled_from(["train.a", "data.a", "b"]), st.lists(VALUES, min_size=1, max_size=3), max_size=3)
)
def test_every_setting_has_a_directory_of_its_own(grid):
    settings = [{}]
    for axis, values in grid.items():
        settings = [setting | {axis: value} for setting in settings for value in dict.fromkeys(map(repr, values))]
    names = name_settings(settings)
    assert len(set(names)) == len(settings)
    assert all("/" not in name and len(name) <= 200 for name in names)


@given(
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    rates=st.lists(st.floats(0, 1), max_size=3, unique=True),
    rows=st.lists(st.sampled_from(["a", "b b", "C"]), max_size=3, unique=True),
    select=st.sampled_from(["best", "mean"]),
)
@settings(max_examples=25, deadline=None)
def test_the_definition_that_is_written_makes_the_same_study(seeds, rates, rows, select):
    definition = {
        "column": define_columns("pretrain"),
        "seeds": seeds,
        "select": select,
        "recipe": {"batch_size": 8},
    }
    definition |= {"grid": {"train.learning_rate": rates}} if rates else {}
    definition |= {"row": [{"name": name, "recipe": {"data": {"vocab": name}}} for name in rows]} if rows else {}
    check_written(make_study(definition, {"train": {"max_steps": 3}}))


def check_written(study):
    assert make_study(define(study)) == study
    with tempfile.TemporaryDirectory() as folder:
        save_recipe(define(study), Path(folder) / "study.toml")
        assert make_study(read_recipe(Path(folder) / "study.toml")) == study


def test_every_key_is_written_and_unquoted_axes_are_understood(fake, tmp_path):
    definition = TABLE5 | {"average": ["MNLI-m", "MNLI-mm"], "note": "small", "keep": "all", "data_root": "r"}
    definition["row"] = [*definition["row"], {"name": "step", "step": 7, "paper": {"Average": 1, "Test": 91.2}}]
    definition["cited"] = {"Human": {"SQuAD": 91.2, "Test": 92.0}}
    study = make_study(definition, {"precision": "fp32", "pretrain": {"batch_size": 4}})
    check_written(study)
    assert list_cells(replace(study, data_root=""))[0].recipe.precision == "fp32"
    (tmp_path / "study.toml").write_text(
        'column = [{ name = "fake", task = "fake" }]\n[grid]\ntrain.learning_rate = [1e-4, 1]\nbatch_size = [8]'
    )
    grid = make_study(read_recipe(tmp_path / "study.toml")).grid
    assert grid == {"train.learning_rate": (1e-4, 1.0), "batch_size": (8,)}


# --- Columns, and rows that start from a pretraining ------------------------------------------------------------------


def test_rows_with_the_same_pretraining_share_it_and_columns_with_the_same_recipe_their_runs():
    study = make_study(TABLE5)
    one, two = list_pretrainings(study)
    assert (one.rows, one.directory) == (("BERT-base",), "pretrain/bert-base")
    assert (two.rows, two.directory) == (("LTR & No NSP", "+ BiLSTM"), "pretrain/ltr-no-nsp")
    assert [origin.recipe.data["objective"] for origin in (one, two)] == ["mlm+nsp", "clm"]
    assert one.recipe.model["hidden_size"] == 32
    cells = list_cells(study, "out")
    names = [(cell.row, cell.column.name) for cell in cells[:4]]
    assert names == [*(("BERT-base", name) for name in ("MNLI-m", "MNLI-mm", "SQuAD")), ("LTR & No NSP", "MNLI-m")]
    matched, mismatched, squad = cells[:3]
    assert matched.runs == mismatched.runs == {seed: f"bert-base/mnli-m/seed-{seed}" for seed in (1, 2)}
    assert (mismatched.column.key, mismatched.column.split) == ("accuracy_mm", "dev_mismatched")
    assert (matched.column.key, matched.column.split) == ("score", "dev_matched")
    assert squad.recipe.checkpoint == "out/pretrain/bert-base"
    assert [cell.recipe.batch_size for cell in cells if cell.column.name == "SQuAD"] == [16, 16, 4]
    assert {cell.recipe.train["weight_decay"] for cell in cells} == {0.1}
    assert [cell.origin for cell in cells[3:]] == ["pretrain/ltr-no-nsp"] * 6
    assert cells[-1].recipe.bilstm
    assert cells[-1].directory == "bilstm/squad"


def test_a_column_with_a_recipe_of_its_own_has_runs_of_its_own():
    columns = [COLUMNS[0], {"name": "frozen", "task": "mnli", "recipe": {"freeze": "encoder"}}]
    plain = TABLE5 | {"column": columns, "row": [{"name": "x"}]}
    assert [cell.directory for cell in list_cells(make_study(plain))] == ["mnli-m", "frozen"]
    same = plain | {"row": [{"name": "x", "recipe": {"freeze": "encoder"}}]}
    assert [cell.directory for cell in list_cells(make_study(same))] == ["mnli-m", "mnli-m"], "the row's wins"


def test_a_column_of_pretraining_shows_the_ends_of_the_rows_own():
    rows = [*TABLE5["row"], {"name": "after 30", "step": 30}]
    study = make_study(TABLE5 | {"column": [{"name": "Perplexity", "task": "pretrain"}, *COLUMNS], "row": rows})
    shown = [cell for cell in list_cells(study) if cell.is_pretraining]
    names = ("bert-base", "ltr-no-nsp", "ltr-no-nsp")
    assert [cell.runs for cell in shown] == [{42: f"pretrain/{name}"} for name in names]
    assert shown[0].column.lower_is_better
    assert not Column("accuracy", "pretrain", "mlm_accuracy").lower_is_better
    assert not list_pretrainings(make_study({"column": define_columns("pretrain")})), (
        "without [pretrain] it is a task like others"
    )


def test_rows_start_from_steps_the_end_or_a_checkpoint(tmp_path):
    bert = str(write_checkpoint(tmp_path / "bert"))
    rows = [{"name": f"MLM, {step}", "step": step} for step in (300, 30, 1000)]
    rows += [{"name": "end"}, {"name": "theirs", "recipe": {"checkpoint": bert}}]
    study = make_study({"column": define_columns("rte"), "pretrain": PRETRAIN, "row": rows})
    (origin,) = list_pretrainings(study)
    assert origin.steps == (30, 300)
    cells, start = list_cells(study, "out"), "out/pretrain/mlm-300"
    assert [cell.recipe.checkpoint for cell in cells] == [f"{start}/step-300", f"{start}/step-30", start, start, bert]
    assert cells[-1].origin == ""


def test_data_are_found_below_the_root_unless_a_recipe_names_them(tmp_path, refused):
    definition = {"column": define_columns("rte", "squad1"), "pretrain": SMALL}
    study = make_study(definition, {"data_root": str(tmp_path)})
    for folder in ("text", "glue", "squad"):
        with refused():
            list_cells(study)
        (tmp_path / folder).mkdir()
    one, two = list_cells(study)
    assert one.recipe.data["dir"] == str(tmp_path / "glue")
    assert two.recipe.data["dir"] == str(tmp_path / "squad")
    assert list_pretrainings(study)[0].recipe.data["corpus"] == [str(tmp_path / "text")]
    own = make_study(definition, {"data_root": str(tmp_path), "data": {"dir": "mine"}})
    assert {cell.recipe.data["dir"] for cell in list_cells(own)} == {"mine"}


def test_the_plan_counts_what_is_shared_once():
    rows = [{"name": "half", "step": 500}, {"name": "whole"}]
    study = make_study({"column": COLUMNS[:2], "seeds": [1, 2], "pretrain": PRETRAIN, "row": rows})
    assert describe_plan(study) == [
        "pretrain/half: 1,000 updates, kept after 500, for half; whole",
        "half/mnli-m, seeds 1, 2, from pretrain/half/step-500",
        "whole/mnli-m, seeds 1, 2, from pretrain/half",
        "4 cells, 5 runs, 1 of them pretrainings",
    ]


def test_an_ensemble_has_the_runs_of_the_first_seeds_of_its_rows_with_its_setting():
    """A row that has a checkpoint does not start from the pretraining, and neither does an ensemble."""
    rows = [{"name": "one"}, {"name": "two"}, {"name": "Both", "ensemble": {"two": 1, "one": 3}}]
    study = make_study(
        {
            "column": define_columns("squad1"),
            "pretrain": PRETRAIN,
            "row": rows,
            "seeds": [1, 2, 3],
            "grid": {"batch_size": [8, 16]},
        }
    )
    check_written(study)
    assert list_pretrainings(study)[0].rows == ("one", "two")
    *_, small, large = list_cells(study)
    for cell, size in ((small, 8), (large, 16)):
        place = f"squad1/batch_size-{size}"
        assert (cell.row, cell.runs, cell.origin) == ("Both", {1: f"both/{place}"}, "")
        assert cell.members == (f"two/{place}/seed-1", *(f"one/{place}/seed-{seed}" for seed in (1, 2, 3)))
        assert cell.setting == {"batch_size": size}


# --- Mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_in_a_definition_are_one_line(refused):
    for parts in (
        {"column": []},
        {"column": define_columns("nonsense")},
        {"column": define_columns("ax")},
        {"column": define_columns("pretrain", "pretrain")},
        {"gird": {}},
        {"batch_size": 8},
        {"select": "worst"},
        {"restarts": 2, "seeds": [1]},
        {"seeds": [1], "recipe": {"train": {"seed": 2}}},
        {"grid": {"batch_size": []}},
        {"grid": {"batch_size": ["8"]}},
        {"grid": {"train.learning_rat": [1.0]}},
        {"grid": {"train.seed": [1]}},
        {"recipe": {"batch_sise": 8}},
        {"row": [{"name": "a"}, {"name": "A"}]},
        {"row": [{"name": "a", "recipe": {"precison": "fp32"}}]},
        {"row": [{"name": "a", "recipe": {"train": {"seed": 1}}}]},
    ):
        with refused() as error:
            make_study({"column": define_columns("pretrain")} | parts, where="my.toml")
        assert "\n" not in str(error.value)


def test_mistakes_in_columns_and_rows_are_one_line(refused):
    for parts in (
        {"column": [{"name": "a", "task": "rtee"}]},
        {"column": [{"name": "a", "task": "mrpc", "metric": "f2"}]},
        {"column": [TWO[0], {"name": "A", "task": "cola"}]},
        {"column": [TWO[0] | {"recipe": {"batch_sise": 1}}]},
        {"column": [TWO[0] | {"recipe": {"train": {"seed": 1}}}]},
        {"average": ["a", "c"]},
        {"average": ["a", "p"], "column": [*TWO, {"name": "p", "task": "pretrain"}]},
        {"row": [{"name": "x", "paper": {"c": 1.0}}]},
        {"row": [{"name": "x", "paper": {"a": math.inf}}]},
        {"row": [{"name": "x", "step": 5}]},
        {"row": [{"name": "x"}, {"name": "y", "ensemble": {"x": 1}}]},
        {"column": SQUAD, "row": [{"name": "x"}, {"name": "y", "ensemble": {"z": 1}}]},
        {"column": SQUAD, "row": [{"name": "x"}, {"name": "y", "ensemble": {"x": 2}}]},
        {"row": [{"name": "x", "step": 1001}], "pretrain": PRETRAIN},
        {"row": [{"name": "x", "step": 1}], "pretrain": PRETRAIN | {"train": {"max_steps": -1}}},
        {"row": [{"name": "x", "pretrain": {}, "recipe": {"checkpoint": "y"}}]},
        {"pretrain": PRETRAIN, "recipe": {"checkpoint": "y"}},
        {"pretrain": PRETRAIN, "row": [{"name": "x"}], "grid": {"checkpoint": ["y", "z"]}},
        {"pretrain": {"data": {"corpuss": []}}},
        {"pretrain": PRETRAIN, "row": [{"name": "x", "recipe": {"checkpoint": "y"}}]},
    ):
        with refused():
            make_study({"column": TWO} | parts, where="my.toml")
    for change in ({"checkpoint": "y"}, {"pretrain": {"train": {"max_step": 1}}}):
        with refused():
            make_study(TABLE5, change)


def test_mistakes_of_a_cell_name_it_also_if_only_the_model_to_come_shows_them(refused):
    model = SMALL["model"] | {"max_position_embeddings": 32}
    short = {**PRETRAIN, "model": model, "data": {"max_length": 32}}
    for definition in (
        {"column": define_columns("rte"), "pretrain": PRETRAIN, "grid": {"data.max_length": [64, 999]}},
        {"column": define_columns("rte"), "pretrain": short, "recipe": {"data": {"max_length": 64}}},
        {
            "column": define_columns("rte"),
            "pretrain": merge(PRETRAIN, {"model": {"num_attention_heads": 5}}),
        },
    ):
        with refused():
            list_cells(make_study(definition))
