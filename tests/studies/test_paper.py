"""The paper's tables, typed a second time, compared with the values in the studies' recipes."""

import tomllib
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "recipes" / "studies"

# table -> its columns, and its rows in the paper's order; None: the paper has no value there
GLUE = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
PAPER = {
    "table1": (
        GLUE,
        [
            (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4),
            (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1),
        ],
    ),
    "table2": (
        ("Dev EM", "Dev F1", "Test EM", "Test F1"),
        [
            (80.8, 88.5, None, None),
            (84.1, 90.9, None, None),
            (None, None, None, None),  # a second checkpoint for the ensembles, which the paper does not list
            (85.8, 91.8, None, None),
            (84.2, 91.1, 85.1, 91.8),
            (None, None, None, None),
            (86.2, 92.2, 87.4, 93.2),
        ],
    ),
    "table3": (("Dev EM", "Dev F1", "Test EM", "Test F1"), [(78.7, 81.9, 80.0, 83.1)]),
    "table4": (("Dev", "Test"), [(81.6, None), (86.6, 86.3)]),
    "table5": (
        ("MNLI-m", "QNLI", "MRPC", "SST-2", "SQuAD F1"),
        [
            (84.4, 88.4, 86.7, 92.7, 88.5),
            (83.9, 84.9, 86.5, 92.6, 87.9),
            (82.1, 84.3, 77.5, 92.1, 77.8),
            (82.1, 84.1, 75.7, 91.6, 84.9),
        ],
    ),
    "table6": (
        ("LM (ppl)", "MNLI-m", "MRPC", "SST-2"),
        [
            (5.84, 77.9, 79.8, 88.4),
            (5.24, 80.6, 82.2, 90.7),
            (4.68, 81.9, 84.8, 91.3),
            (3.99, 84.4, 86.7, 92.9),
            (3.54, 85.7, 86.9, 93.3),
            (3.23, 86.6, 87.8, 93.7),
        ],
    ),
    "table7": (
        ("Dev F1", "Test F1"),
        [
            (96.6, 92.8),
            (96.4, 92.4),
            (91.0, None),
            (95.6, None),
            (94.9, None),
            (95.9, None),
            (96.1, None),
            (95.5, None),
        ],
    ),
    "table8": (
        ("MNLI", "NER, fine-tuned", "NER, features"),
        [
            (84.2, 95.4, 94.9),
            (84.3, 94.9, 94.0),
            (84.1, 95.2, 94.6),
            (84.4, 95.2, 94.7),
            (83.7, 94.8, 94.6),
            (83.6, 94.9, 94.6),
        ],
    ),
    "figure5": (
        ("MNLI",),
        [
            *((value,) for value in (78.6, 79.6, 80.5, 82.2, 83.2, 84.0, 84.3, 84.4)),
            *((value,) for value in (79.4, 79.8, 80.3, 81.0, 81.7, 81.9, 82.1, 82.2)),
        ],
    ),
}
THOUSANDS = (30, 50, 100, 200, 400, 600, 800, 1000)  # of updates, in figure 5
SIZES = ((3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16))  # L, H, A of table 6


def read_study(name):
    return tomllib.loads((STUDIES / f"{name}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAPER)
def test_a_studys_values_are_the_papers(name):
    columns, rows = PAPER[name]
    study = read_study(name)
    given = [column["name"] for column in study["column"]]
    assert given == list(columns[: len(given)]), "the paper has more: scores on test"
    shown = [tuple(row.get("paper", {}).get(column) for column in columns) for row in study["row"]]
    assert shown == rows
    averaged = [*columns, "Average"] if "average" in study else columns
    assert {key for values in study.get("cited", {}).values() for key in values} <= set(averaged)


LEFT_OUT = {"table2": (0, 2, 4, 5, 6), "table4": (1,), "table7": (0,)}  # small study -> numbers of the paper's rows


@pytest.mark.parametrize("name", PAPER)
def test_a_small_studys_values_are_the_papers(name):
    """Columns without data are omitted or replaced, and so are the rows in LEFT_OUT."""
    columns, rows = PAPER[name]
    study = read_study(f"small/{name}")
    replaced = {column["name"]: column["name"] for column in study["column"]}
    if "RTE (for MRPC)" in replaced:
        replaced["RTE (for MRPC)"] = "MRPC"
    kept = [row for number, row in enumerate(rows) if number not in LEFT_OUT.get(name, ())]
    assert len(study["row"]) == len(kept)
    for row, values in zip(study["row"], kept, strict=True):
        expected = dict(zip(columns, values, strict=True))
        values = {name: expected[column] for name, column in replaced.items()}
        assert row["paper"] == {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("name", ["figure5", "small/figure5"])
def test_figure_5_is_of_the_papers_shares_of_a_pretraining(name):
    study = read_study(name)
    total = study["row"][-1]["step"]
    recipe = study["pretrain"].get("train", {})  # the default is the paper's value: 1,000,000
    assert total == recipe.get("max_steps", 1_000_000)
    steps = [total * thousands // 1000 for thousands in THOUSANDS]
    assert [row["step"] for row in study["row"]] == steps * 2
    assert [row["name"].split(", ")[1] for row in study["row"]] == [f"{step:,}" for step in steps] * 2
    objectives = [row.get("pretrain", {}).get("data", {}).get("objective") for row in study["row"]]
    assert objectives == [None] * 8 + ["clm"] * 8


@pytest.mark.parametrize("name", ["table2", "small/table2"])
def test_an_ensemble_of_table_2_has_seven_systems(name):
    """They have different checkpoints and seeds; in the small study there is one checkpoint (section 4.2)."""
    ensembles = [row["ensemble"] for row in read_study(name)["row"] if "ensemble" in row]
    assert [sum(ensemble.values()) for ensemble in ensembles] == [7] * len(ensembles)
    assert {len(ensemble) for ensemble in ensembles} == {1 if name.startswith("small/") else 2}


def test_table_6_has_the_papers_sizes():
    models = [row["pretrain"]["model"] for row in read_study("table6")["row"]]
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    assert [tuple(model[key] for key in keys) for model in models] == list(SIZES)
    assert all(model["intermediate_size"] == 4 * model["hidden_size"] for model in models)


@pytest.mark.parametrize("name", ["table8", "small/table8"])
def test_table_8_masks_as_its_rows_are_called(name):
    for row in read_study(name)["row"]:
        rates = [round(100 * row["pretrain"]["data"][key]) for key in ("mask_rate", "same_rate", "random_rate")]
        assert " / ".join(map(str, rates)) == row["name"]
