"""Slices of scored rows: their sizes, scores and order, and what is left out."""

from dataclasses import replace

import numpy as np
import pytest

from bertkit.analysis.page import list_slices as read_slices
from bertkit.analysis.slices import divide_lengths, tabulate_slices
from bertkit.metrics.classification import measure_label_scores
from bertkit.metrics.rows import RowScore, measure_classes, measure_mean, measure_numbers
from bertkit.reports.html import render
from bertkit.reports.tables import find_row
from bertkit.tasks import TASKS
from bertkit.tasks.task import RowAnswer
from bertkit.training.scored_rows import LABEL, TOKEN_COUNTS, UNKNOWN_COUNTS, gather_rows, pack_rows

LENGTHS = np.tile(np.arange(1, 11), 20)  # 200 rows, each length 20 times
SST2 = find_row(TASKS["sst2"].table, "accuracy")


def make_rows(score, **columns):
    rows = [RowAnswer((f"text {number}",), "a", "b") for number in range(len(score))]
    return replace(gather_rows(score, rows), columns={name: list(values) for name, values in columns.items()})


def read(table):
    return {row[0].lines[0][0]: [cell.lines[0][0] for cell in row[1:]] for row in table.rows}


def test_slices_have_rows_scores_and_intervals_and_the_worst_is_first():
    """Rows of 10 tokens are wrong: the last slice of lengths has half of its 40 rows right, the others all."""
    genres = np.where(np.arange(200) < 19, "rare", "usual")
    columns = {TOKEN_COUNTS: LENGTHS, UNKNOWN_COUNTS: np.zeros(200, int), "genre": genres, "same": ["x"] * 200}
    table = tabulate_slices(make_rows(measure_mean(LENGTHS < 10), **columns), SST2, "dev")
    found = read(table)
    assert table.heads == ("slice", "rows", "accuracy (%)", "95 % interval")
    assert list(found)[:2] == ["all", "9 to 10 tokens"]
    assert found["all"][:2] == ["200", "90.0"]
    assert found["9 to 10 tokens"][:2] == ["40", "50.0"]
    low, high = map(float, found["9 to 10 tokens"][2].split(" to "))
    assert 30 < low < 50 < high < 70
    assert found["1 to 3 tokens"][:2] == ["60", "100.0"]
    assert sum(int(found[name][0]) for name in found if name.endswith("tokens")) == 200
    assert "genre: usual" in found
    assert not {"genre: rare", "same: x", "without unknown tokens"} & set(found), "too few rows, or all"


def test_slices_of_classes_compare_the_share_of_right_rows():
    """In a slice with a single label the Matthews correlation is 0, whatever the model answers."""
    labels = np.repeat([0, 1], 50)
    answers = np.where(np.arange(100) % 5 == 0, 1 - labels, labels)
    score = measure_classes(answers, labels, 2)["matthews_correlation"]
    names = np.where(labels == 1, "good", "bad")
    row = find_row(TASKS["cola"].table, "matthews_correlation")
    table = tabulate_slices(make_rows(score, **{LABEL: names}), row, "dev")
    assert table.heads[2] == "right rows (%)"
    assert {name: cells[:2] for name, cells in read(table).items()} == {
        "all": ["100", "80.0"],
        "label: bad": ["50", "80.0"],
        "label: good": ["50", "80.0"],
    }


def test_a_row_with_several_labels_is_right_if_all_of_them_are():
    """Rows 0 to 9 have one right label of two, the others both: 75 % of the rows are right, and F1 is higher."""
    logits, labels = np.full((40, 2), 3.0), np.ones((40, 2), int)
    logits[:10, 1] = -3.0
    score = measure_label_scores(logits, labels, ["a", "b"], np.full(2, 0.5))["macro_f1"]
    row = find_row(TASKS["classify"].table, "macro_f1")
    table = tabulate_slices(make_rows(score, kind=["a", "b"] * 20), row, "dev")
    assert table.heads[2] == "right rows (%)"
    assert read(table)["all"][1] == "75.0"


def test_slices_of_entities_compare_f1_whatever_a_column_is_called():
    counts = np.array([[[1], [2], [2]], [[2], [2], [2]]] * 20)  # of 40 sentences with two names each
    score = RowScore(counts.astype(float), "f1")
    row = find_row(TASKS["ner"].table, "f1")
    table = tabulate_slices(make_rows(score, **{LABEL: ["a", "b"] * 20}), row, "dev")
    assert (table.heads[2], read(table)["all"][1]) == ("F1 (%)", "75.0")


def test_slices_of_numbers_compare_errors_of_which_the_largest_is_worst():
    rng = np.random.default_rng(0)
    labels, wide = rng.normal(size=200), np.arange(200) < 100
    values = labels + rng.normal(size=200) * np.where(wide, 1.0, 0.1)
    score = measure_numbers(values, labels)["spearmanr"]
    kinds = np.where(wide, "wide", "narrow")
    row = find_row(TASKS["stsb"].table, "spearmanr")
    table = tabulate_slices(make_rows(score, kind=kinds), row, "dev")
    found = read(table)
    assert (table.heads[2], list(found)) == ("RMSE", ["all", "kind: wide", "kind: narrow"])
    assert float(found["kind: wide"][1]) == pytest.approx(np.std(values[:100] - labels[:100]), abs=0.05)


def test_equal_lengths_are_one_slice_which_is_not_shown():
    assert [name for name, _ in divide_lengths(np.full(30, 7))] == ["7 tokens"]
    assert tabulate_slices(make_rows(measure_mean(np.ones(30)), **{TOKEN_COUNTS: [7] * 30}), SST2, "dev") is None


def test_the_page_shows_the_slices_that_a_run_has_written(tmp_path):
    found = make_rows(measure_mean(LENGTHS < 9), **{TOKEN_COUNTS: LENGTHS, UNKNOWN_COUNTS: LENGTHS > 5})
    (tmp_path / "predictions").mkdir()
    file, notes = tmp_path / "predictions" / "dev.rows.npz", []
    file.write_bytes(pack_rows(replace(found, columns={name: list(map(int, x)) for name, x in found.columns.items()})))
    (table,) = read_slices(tmp_path, TASKS["sst2"], notes)
    assert "with unknown tokens" in read(table)
    assert "Slices" in render([{"name": "a", "kind": "run", "id": "run-1", "slices": [table]}])
    file.write_bytes(b"no archive")
    assert list(read_slices(tmp_path, TASKS["sst2"], notes)) == []
    assert len(notes) == 1
    assert list(read_slices(tmp_path, None, notes)) == []
