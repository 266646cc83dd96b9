"""The long form of a study: columns, rows that start with a pretraining or a step of it, the paper's values."""

import math

import pytest
from msgspec.structs import replace

from bertkit.errors import UsageError
from bertkit.studies.cells import describe_plan, list_cells, list_pretrainings
from bertkit.studies.spec import Column, define, make_study
from bertkit.training.recipe import merge, read_recipe, save_recipe
from tests.official import write_checkpoint

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


def test_rows_with_the_same_pretraining_share_it_and_columns_with_the_same_recipe_their_runs():
    study = make_study(TABLE5)
    one, two = list_pretrainings(study)
    assert (one.rows, one.directory) == (("BERT-base",), "pretrain/bert-base")
    assert (two.rows, two.directory) == (("LTR & No NSP", "+ BiLSTM"), "pretrain/ltr-no-nsp")
    assert [origin.recipe.data["objective"] for origin in (one, two)] == ["mlm+nsp", "clm"]
    assert one.recipe.model["hidden_size"] == 32
    cells = list_cells(study, "out")
    assert [(cell.row, cell.column.name) for cell in cells[:4]] == [
        ("BERT-base", "MNLI-m"),
        ("BERT-base", "MNLI-mm"),
        ("BERT-base", "SQuAD"),
        ("LTR & No NSP", "MNLI-m"),
    ]
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


def test_a_column_of_pretraining_shows_the_rows_own():
    column = {"name": "Perplexity", "task": "pretrain"}
    study = make_study(TABLE5 | {"column": [column, *COLUMNS]})
    shown = [cell for cell in list_cells(study) if cell.borrowed]
    assert [cell.runs for cell in shown] == [
        {42: "pretrain/bert-base"},
        {42: "pretrain/ltr-no-nsp"},
        {42: "pretrain/ltr-no-nsp"},
    ]
    assert shown[0].column.lower_is_better
    assert not Column("accuracy", "pretrain", "mlm_accuracy").lower_is_better
    assert not list_pretrainings(make_study({"tasks": ["pretrain"]})), "without [pretrain] it is a task like others"


def test_steps_are_kept_but_for_the_last():
    rows = [{"name": f"MLM, {step}", "step": step} for step in (300, 30, 1000)]
    study = make_study({"tasks": ["rte"], "pretrain": PRETRAIN, "row": [*rows, {"name": "end"}]})
    (origin,) = list_pretrainings(study)
    assert origin.steps == (30, 300)
    assert [cell.recipe.checkpoint for cell in list_cells(study, "out")] == [
        "out/pretrain/mlm-300/step-300",
        "out/pretrain/mlm-300/step-30",
        "out/pretrain/mlm-300",
        "out/pretrain/mlm-300",
    ]


def test_a_row_may_begin_with_a_checkpoint_instead(tmp_path):
    bert = str(write_checkpoint(tmp_path / "bert"))
    rows = [{"name": "ours"}, {"name": "theirs", "recipe": {"checkpoint": bert}}]
    study = make_study({"tasks": ["rte"], "pretrain": PRETRAIN, "row": rows})
    assert [cell.recipe.checkpoint for cell in list_cells(study)] == ["pretrain/ours", bert]
    assert [cell.origin for cell in list_cells(study)] == ["pretrain/ours", ""]


def test_the_command_line_reaches_the_pretrainings():
    study = make_study(TABLE5, {"pretrain": {"train": {"max_steps": 5}}}, {"pretrain": {"batch_size": 4}})
    for origin in list_pretrainings(study):
        assert (origin.recipe.train["max_steps"], origin.recipe.batch_size) == (5, 4)
        assert origin.recipe.data["corpus"] == ["some.txt"]
    assert {cell.recipe.batch_size for cell in list_cells(study)} == {8, 16, 4}


def test_data_are_found_below_the_root(tmp_path):
    study = make_study({"tasks": ["rte", "squad1"], "pretrain": SMALL}, {"data_root": str(tmp_path)})
    for folder, message in (("text", "pretrain"), ("glue", "rte"), ("squad", "squad1")):
        with pytest.raises(UsageError, match=rf"there is no folder .*{folder} for {message}; .*--data ROOT"):
            list_cells(study)
        (tmp_path / folder).mkdir()
    one, two = list_cells(study)
    assert one.recipe.data["dir"] == str(tmp_path / "glue")
    assert two.recipe.data["dir"] == str(tmp_path / "squad")
    assert list_pretrainings(study)[0].recipe.data["corpus"] == [str(tmp_path / "text")]


def test_mistakes_that_only_the_model_to_come_shows_are_found_before_it_is_there():
    too_long = {"data": {"max_length": 64}}
    model = SMALL["model"] | {"max_position_embeddings": 32}
    short = {**PRETRAIN, "model": model, "data": {"max_length": 32}}
    study = make_study({"tasks": ["rte"], "pretrain": short, "recipe": too_long})
    with pytest.raises(UsageError, match=r"rte: max_length 64 exceeds the model's 32 positions"):
        list_cells(study)
    study = make_study({"tasks": ["rte"], "pretrain": merge(PRETRAIN, {"model": {"num_attention_heads": 5}})})
    with pytest.raises(UsageError, match=r"pretrain: \[model\] cannot be used: .*32 is not divisible"):
        list_cells(study)


def test_the_definition_that_is_written_makes_the_same_study(tmp_path):
    definition = TABLE5 | {"average": ["MNLI-m", "MNLI-mm"], "note": "small", "keep": "all", "data_root": "r"}
    definition["row"] = [*definition["row"], {"name": "step", "step": 7, "paper": {"Average": 1}}]
    study = make_study(definition, {"precision": "fp32", "pretrain": {"batch_size": 4}})
    assert make_study(define(study)) == study
    save_recipe(define(study), tmp_path / "study.toml")
    assert make_study(read_recipe(tmp_path / "study.toml")) == study
    assert list_cells(replace(study, data_root=""))[0].recipe.precision == "fp32"


def test_the_plan_counts_what_is_shared_once():
    rows = [{"name": "half", "step": 500}, {"name": "whole"}]
    study = make_study({"column": COLUMNS[:2], "seeds": [1, 2], "pretrain": PRETRAIN, "row": rows})
    assert describe_plan(study) == [
        "pretrain/half: 1,000 updates, kept after 500, for half; whole",
        "half/mnli-m, seeds 1, 2, from pretrain/half/step-500",
        "whole/mnli-m, seeds 1, 2, from pretrain/half",
        "4 cells, 5 runs, 1 of them pretrainings",
    ]


TWO = [{"name": "a", "task": "rte"}, {"name": "b", "task": "cola"}]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tasks": ["rte"]}, r"both tasks and \[\[column\]\] are given; leave one out"),
        ({"column": [{"task": "rte"}]}, r"table missing required field name - at \$.column\[0\]; correct it"),
        ({"column": [{"name": "a", "task": "rtee"}]}, r"unknown task 'rtee'; did you mean 'rte'\?"),
        ({"column": [{"name": "a", "task": "rte", "metrics": "f1"}]}, r"table contains unknown field metrics - at"),
        (
            {"column": [{"name": "a", "task": "mrpc", "metric": "f2"}]},
            r"unknown metric 'f2'; mrpc has f1, accuracy, ece, brier$",
        ),
        (
            {"column": [{"name": "a", "task": "rte", "y" * 999: 1}]},
            r"unknown field y{100,200}; correct",
        ),
        ({"z" * 999: 1, "column": TWO}, rf"unknown key '{'z' * 40}'; expected note, "),
        ({"column": TWO, "grid": {"\x1b[31m": "x" * 999}}, rf'\[grid\] \[31m = "{"x" * 99} must be a list'),
        ({"column": [TWO[0], {"name": "A", "task": "cola"}]}, r"two \[\[column\]\] tables are called 'a'"),
        ({"column": [TWO[0], {"name": "?", "task": "cola"}]}, r"a \[\[column\]\] has a name without letters"),
        (
            {"column": [TWO[0] | {"recipe": {"batch_sise": 1}}]},
            r"\[column.recipe\] of 'a': unknown key 'batch_sise' at the top level; did you mean 'batch_size'\?",
        ),
        ({"column": [TWO[0] | {"recipe": {"train": {"seed": 1}}}]}, r"the \[\[column\]\] 'a' sets train.seed"),
        ({"average": ["a", "c"]}, r"average names 'c', which is not a column; expected a, b"),
        (
            {"average": ["a", "p"], "column": [*TWO, {"name": "p", "task": "pretrain"}]},
            r"average names 'p', which is not in percent",
        ),
        ({"row": [{"name": "x", "paper": {"c": 1.0}}]}, r"paper of the row 'x' names 'c', not a column; expected a, b"),
        ({"row": [{"name": "x", "paper": {"a": math.inf}}]}, r"expected float <= 1000000000.0 - at \$.row\[0\].paper"),
        ({"row": [{"name": "x", "step": 5}]}, r"the row 'x' has a step but no pretraining"),
        ({"row": [{"name": "x", "step": -1}], "pretrain": PRETRAIN}, r"expected int >= 0 - at \$.row\[0\].step"),
        (
            {"row": [{"name": "x", "step": 1001}], "pretrain": PRETRAIN},
            r"step = 1001, but its pretraining has max_steps = 1000; give a step",
        ),
        (
            {"row": [{"name": "x", "pretrain": {}, "recipe": {"checkpoint": "y"}}]},
            r"the row 'x' has both a pretraining and a checkpoint",
        ),
        (
            {"pretrain": PRETRAIN, "recipe": {"checkpoint": "y"}},
            r"\[recipe\] gives a checkpoint, but a row starts with a pretraining",
        ),
        (
            {"pretrain": PRETRAIN, "row": [{"name": "x"}], "grid": {"checkpoint": ["y", "z"]}},
            r"\[grid\] gives a checkpoint, but a row starts with a pretraining",
        ),
        ({"pretrain": {"data": {"corpuss": []}}}, r"pretrain of the row '': unknown key 'corpuss' in \[data\]"),
        (
            {"row": [{"name": "x", "pretrain": {"batch_size": "1"}}]},
            r"pretrain of the row 'x': batch_size = \"1\"; expected int",
        ),
        (
            {"pretrain": PRETRAIN, "row": [{"name": "x", "recipe": {"checkpoint": "y"}}]},
            r"pretrain is given, but no row starts with a pretraining",
        ),
        ({"pretrain": PRETRAIN, "row": [{"name": "x"}, {"name": "Pretrain"}]}, r"a row or column is called 'pretrain'"),
        (
            {"pretrain": PRETRAIN, "column": [{"name": "Pretrain", "task": "rte"}]},
            r"a row or column is called 'pretrain', the folder of the pretrainings",
        ),
        (
            {"pretrain": PRETRAIN | {"train": {"max_steps": -1}}, "row": [{"name": "x", "step": 1}]},
            r"the row 'x' has step = 1, but its pretraining has max_steps = -1; give a step",
        ),
        (
            {
                "column": [*TWO, {"name": "p", "task": "pretrain"}],
                "pretrain": PRETRAIN,
                "row": [{"name": "x", "step": 1}],
            },
            r"the column 'p' shows the end of each pretraining, and a row starts from a step",
        ),
    ],
)
def test_a_mistake_in_the_long_form_is_one_line(parts, message):
    with pytest.raises(UsageError, match=message) as error:
        make_study({"column": TWO} | parts, where="my.toml")
    assert str(error.value).startswith("my.toml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"checkpoint": "y"},
            r"the command line gives a checkpoint, but a row starts with a",
        ),
        (
            {"pretrain": {"train": {"max_step": 1}}},
            r"pretrain of the row 'BERT-base': unknown key 'max_step'",
        ),
        ({"pretrain": 5}, r"pretrain = 5; expected table, got int"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(given, message):
    with pytest.raises(UsageError, match=message):
        make_study(TABLE5, given)
