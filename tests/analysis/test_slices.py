"""Slices of prediction tables: their sizes, scores and order, and what is left out."""

import numpy as np
import pyarrow as pa
import pytest

from bertkit.analysis.slices import tabulate_slices
from bertkit.metrics.table import make_rows
from bertkit.reports.tables import find_row
from bertkit.tasks import TASKS

LENGTHS = np.tile(np.arange(1, 11), 20)  # 200 rows, each length 20 times


def tabulate(task, count, inputs=None, names=None, **columns):
    """Return the table of slices of rows that have an input of equal length if nothing else is given."""
    given = {"group": np.arange(count), "tokens": np.full(count, 7), "unknown_tokens": np.zeros(count, int)}
    facts = {"inputs": list(inputs or {})} | ({"names": names} if names else {})
    rows = make_rows(given | (inputs or {}) | columns, **facts)
    return tabulate_slices(rows, find_row(TASKS[task].table, TASKS[task].metric), "dev")


def read(table):
    return {row[0].lines[0][0]: [cell.lines[0][0] for cell in row[1:]] for row in table.rows}


def answer(is_right, labels):
    """Return the right and the predicted class of each row, of "bad" and "good"."""
    names = np.array(["bad", "good"])
    return {"label": names[labels], "prediction": names[np.where(is_right, labels, 1 - labels)]}


def test_slices_have_rows_scores_and_intervals_and_the_worst_is_first():
    """Rows of 10 tokens are wrong: the last slice of lengths has half of its 40 rows right, the others all."""
    inputs = {
        "genre": np.where(np.arange(200) < 19, "rare", "usual"),
        "same": ["x"] * 200,
        "many": [str(number % 13) for number in range(200)],
    }
    table = tabulate("sst2", 200, inputs, tokens=LENGTHS, **answer(LENGTHS < 10, np.zeros(200, int)))
    found = read(table)
    assert table.heads == ("slice", "rows", "accuracy (%)", "95 % interval")
    assert list(found)[:2] == ["all", "9 to 10 tokens"]
    assert found["all"][:2] == ["200", "90.0"]
    assert found["9 to 10 tokens"][:2] == ["40", "50.0"]
    low, high = map(float, found["9 to 10 tokens"][2].split(" to "))
    assert 30 < low < 50 < high < 70
    assert found["1 to 3 tokens"][:2] == ["60", "100.0"]
    lengths = {name for name in found if name.endswith("tokens")}
    assert sum(int(found[name][0]) for name in lengths) == 200
    assert found.keys() - lengths == {"all", "genre: usual"}, "others: too few rows, all of them, or too many values"


def test_slices_of_classes_compare_the_share_of_right_rows():
    """In a slice with a single label the Matthews correlation is 0, whatever the model answers."""
    labels = np.repeat([0, 1], 50)
    unknown = np.arange(100) % 2
    table = tabulate("cola", 100, unknown_tokens=unknown, **answer(np.arange(100) % 5 > 0, labels))
    assert table.heads[2] == "right rows (%)"
    found = {name: cells[:2] for name, cells in read(table).items()}
    halves = ("label: bad", "label: good", "without unknown tokens", "with unknown tokens")
    assert found == {"all": ["100", "80.0"]} | {name: ["50", "80.0"] for name in halves}


def test_slices_of_sentences_compare_f1():
    """Every sentence has two names and a prediction of two, in every second one of them a single one is right."""
    tags = pa.array([["B-PER", "B-PER"]] * 40)
    counts = {"right_PER": [1, 2] * 20, "found_PER": [2] * 40, "wanted_PER": [2] * 40}
    strict = {"strict_right": [1, 2] * 20, "strict_found": [2] * 40}
    table = tabulate("ner", 40, {"kind": ["a", "b"] * 20}, ["PER"], label=tags, prediction=tags, **counts, **strict)
    assert table.heads[2] == "F1 (%)"
    found = [(name, cells[1]) for name, cells in read(table).items()]
    assert found == [("all", "75.0"), ("kind: a", "50.0"), ("kind: b", "100.0")]


def test_slices_of_questions_tell_those_without_an_answer_apart_and_draw_contexts():
    """All questions on a context are right or wrong: of four contexts, two are right."""
    columns = {"label": pa.array([["x"], []] * 40), "prediction": ["x", ""] * 40, "em": [1.0, 0.0] * 40}
    f1 = np.repeat([1.0, 0.0, 1.0, 0.0], 20)
    widths = {}
    for size in (1, 20):
        found = read(tabulate("squad2", 80, group=np.arange(80) // size, f1=f1, **columns))
        assert list(found) == ["all", "has an answer: no", "has an answer: yes"]
        assert found["has an answer: yes"][:2] == ["40", "50.0"]
        low, high = map(float, found["all"][2].split(" to "))
        widths[size] = high - low
    assert widths[20] > 2 * widths[1]


def test_slices_of_numbers_compare_errors_of_which_the_largest_is_worst():
    rng = np.random.default_rng(0)
    labels, wide = rng.normal(size=200), np.arange(200) < 100
    values = labels + rng.normal(size=200) * np.where(wide, 1.0, 0.1)
    table = tabulate("stsb", 200, {"kind": np.where(wide, "wide", "narrow")}, label=labels, prediction=values)
    found = read(table)
    assert (table.heads[2], list(found)) == ("RMSE", ["all", "kind: wide", "kind: narrow"])
    assert float(found["kind: wide"][1]) == pytest.approx(np.std(values[:100] - labels[:100]), abs=0.05)
