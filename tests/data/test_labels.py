"""Labels of a person's own table: the kind of problem, the names in order, and the numbers of the cells."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.cells import normalise
from bertkit.data.formats.rows import Columns
from bertkit.data.labels import REGRESSION, SEVERAL, SINGLE, UNKNOWN_LABEL, make_label_space
from bertkit.errors import UsageError
from tests.world import make_columns


def find(cells, problem_type="auto"):
    return make_label_space(make_columns(y=cells), ["y"], problem_type)


def count_up(number):
    return list(map(str, range(number))) * 2


KINDS = [  # the cells of train -> kind, names
    ([" good", "bad ", "good"], SINGLE, ("bad", "good")),
    (["NA", "null", "None"], SINGLE, ("NA", "None", "null")),
    (["True", "FALSE", "true"], SINGLE, ("false", "true")),
    (["3.0", "1.0", "3", "-1"], SINGLE, ("-1", "1", "3")),
    (["01", "1", "001"], SINGLE, ("001", "01", "1")),
    (["10", "9", "best"], SINGLE, ("10", "9", "best")),
    (count_up(20), SINGLE, tuple(map(str, range(20)))),
    (count_up(21), REGRESSION, ("score",)),
    (["0.5", "1", "2"], REGRESSION, ("score",)),
    (["1_0", "2_0"], SINGLE, ("1_0", "2_0")),
    (["nan", "good"], SINGLE, ("good", "nan")),
    (["a|b", "b", ""], SEVERAL, ("a", "b")),
    (["3|10", "1"], SEVERAL, ("1", "3", "10")),
    ([["b", "a"], [], ["c"]], SEVERAL, ("a", "b", "c")),
    (['["b", "a", null]', "['c']", "[]", "('d',)"], SEVERAL, ("a", "b", "c", "d")),
    (["['b']", "c"], SINGLE, ("['b']", "c")),
    ([[1, 0, 1], [0, 0, 0]], SEVERAL, ("0", "1", "2")),
    (["[True, False]", "[false, true]"], SEVERAL, ("0", "1")),
    ([[1, 0], [0]], SEVERAL, ("0", "1")),
    ([["3.8", "3.9"], ["3.9", "3.10"]], SEVERAL, ("3.10", "3.8", "3.9")),
    ([["0.5"], ["0.5", "0.25"]], SEVERAL, ("0.25", "0.5")),
    (["bad;home", "bad"], SINGLE, ("bad", "bad;home")),
    (["3,5", "1", "2,25"], SINGLE, ("1", "2,25", "3,5")),
]


@pytest.mark.parametrize(("cells", "kind", "names"), KINDS)
def test_the_kind_and_the_order_of_the_labels(cells, kind, names):
    space = find(cells)
    assert (space.kind, space.names, space.columns) == (kind, names, ("y",))
    assert space.reason


@pytest.mark.parametrize(
    ("cells", "kind", "names"),
    [
        (count_up(21), SINGLE, tuple(map(str, range(21)))),
        (["1", "2", "2"], REGRESSION, ("score",)),
        (["a|b", "b"], SINGLE, ("a|b", "b")),
        (["bad;home, sweet", "bad"], SEVERAL, ("bad", "home, sweet")),
        (["C#", "Java"], SEVERAL, ("C#", "Java")),
        ([["bad"], ["good"], []], SINGLE, ("bad", "good")),
    ],
)
def test_a_kind_that_is_set_decides(cells, kind, names):
    space = find(cells, kind)
    assert (space.kind, space.names, space.reason) == (kind, names, "as set")


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        (["b", " a", "b"], [1, 0, 1]),
        (["2.0", "10", "2"], [0, 1, 0]),
        (["TRUE", "false"], [1, 0]),
        (["a|b", "b", "", "b|b|"], [[1, 1], [0, 1], [0, 0], [0, 1]]),
        ([["1.0", "2"], ["1"], ["2.0"]], [[1, 1], [1, 0], [0, 1]]),
        (["0.5", " 2", "-1e-1"], [0.5, 2.0, -0.1]),
        ([[1, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 1]]),
        (["[True, False]", "", "['0', '1']"], [[1, 0], [0, 0], [0, 1]]),
    ],
)
def test_cells_become_the_numbers_of_their_labels(cells, labels):
    found, _, _, other = find(cells).read(make_columns(y=cells))
    assert found.tolist() == pytest.approx(np.array(labels, np.float32)) or found.tolist() == labels
    assert found.dtype == (np.int64 if isinstance(labels[0], int) else np.float32)
    assert other == Counter()


def test_class_labels_are_one_label_whatever_their_names():
    for cells in (count_up(21), ["a|b", "c"]):
        table = replace(make_columns(y=cells), classes={"y": sorted(set(cells))})
        assert make_label_space(table, ["y"], "auto").kind == SINGLE
    assert make_label_space(replace(make_columns(y=[["a"], ["b"]]), classes={"y": "ab"}), ["y"], "auto").kind == SEVERAL


@pytest.mark.parametrize(
    "cells", [["[7]", "(7,)"], ["NAN", "3"], ["Yes", "yes ", " Yes"], ["2", "2.0"], ["a|b", "True"]]
)
def test_class_labels_are_not_changed_and_cells_of_other_tables_are_found_as_they_are(cells):
    space = make_label_space(replace(make_columns(y=cells * 2), classes={"y": cells}), ["y"], "auto")
    assert (space.kind, set(space.names)) == (SINGLE, {*cells})
    assert not [remark for remark in space.remarks if "one label" in remark]
    other = [cell for cell in cells if cell != "NAN"]  # in other columns NaN among numbers is a missing value
    labels, is_blank, _, _ = space.read(make_columns(y=other))
    assert [space.names[number] for number in labels] == other
    assert not is_blank.any()


def test_positions_and_a_separator_as_given():
    table = make_columns(y=[[0, 1, 1], [0, 0, 1]])
    space = make_label_space(table, ["y"], "auto", ["slow", "dear", "bad"])
    assert (space.names, space.read(table)[0].tolist()) == (("slow", "dear", "bad"), [[0, 1, 1], [0, 0, 1]])
    table = make_columns(y=["a, b; c", "c", ""])
    for label_sep, names in ((";", ("a, b", "c")), (",", ("a", "b; c", "c"))):
        assert make_label_space(table, ["y"], "auto", label_sep=label_sep).names == names
    assert make_label_space(table, ["y"], "auto", label_sep=";").read(table)[0].tolist() == [[1, 1], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("cells", "problem_type", "remarks"),
    [
        (["C#", "Java"], "auto", []),
        (["1", "2.0", " 2"], "auto", ["cells such as '2' and '2.0' are one label"]),
        (["caf\u00e9", "cafe\u0301", "no"], "auto", [r"the labels 'cafe\u0301', 'caf\xe9' differ only in case"]),
        (["Negative", "negative", "cafe", "café"], "auto", ["'Negative', 'negative' differ", "'cafe', 'café' differ"]),
        (["very good", "very  good", "Verygood"], "auto", ["'Verygood', 'very  good', 'very good' differ"]),
        (["Hardware, software", "C#"], "auto", ["such as 'Hardware, software' are one label each; data.label_sep="]),
        (["Hardware, software", "C#"], SINGLE, []),
        (["3,5", "0,0", "2"], "auto", ["the labels are numbers with a decimal comma, learned as classes"]),
    ],
)
def test_labels_that_look_odd_are_told(cells, problem_type, remarks):
    found = find(cells, problem_type).remarks
    assert len(found) == len(remarks)
    assert all(words in remark for words, remark in zip(remarks, found, strict=True))


@pytest.mark.parametrize(
    ("cells", "problem_type"),
    [
        (["[0 1]", "[1 1]"], "auto"),
        (["['a' 'b']", "['a']"], "auto"),
        ([["a"], ["a", "b"]], SINGLE),
        (["a", "a"], "auto"),
        ([[], []], "auto"),
        ([f"text {n}" for n in range(40)], "auto"),
        ([f"{n}.5" for n in range(40)] + ["N/A"], "auto"),
        (["1", "inf"], REGRESSION),
        (["[0.9, 0.7, 0.1]", "[0, 0.2, 1]"], SEVERAL),
        ([[80, 20], [35.5, 64.5]], "auto"),
        (["good", '{"choices": ["good", "dear"]}'], "auto"),
        (["{'good': 0.8, 'bad': 'low'}", "{'good': 0.1, 'bad': 0.9}"], "auto"),
        (['[{"rating": 4}]', '[{"rating": 2}]'], SINGLE),
    ],
    ids=[
        *("numbers of numpy", "texts of numpy", "two labels", "one", "none", "texts", "N/A", "inf"),
        *("probabilities", "percent", "choices", "shares and words", "ratings"),
    ],
)
def test_a_column_that_holds_no_labels_is_one_line(cells, problem_type, refused):
    with refused():
        find(cells, problem_type).read(make_columns(y=cells))


def test_labels_that_do_not_fit_are_one_line_each(refused):
    lists, flags = make_columns(y=[[1, 0], [0, 1]]), make_columns(slow=["1", "0", "maybe"], dear=["0", "1", "1"])
    with refused():
        make_label_space(lists, ["y"], "auto", ["a"])
    for cell in ("[1]", "b"):
        with refused():
            find(["[1, 0]", "[0, 0]"]).read(make_columns(y=["[1, 1]", cell]))
    for columns, kind in ((["stars"], "auto"), (["slow", "dear"], "auto"), (["slow", "dear"], REGRESSION)):
        with refused():
            make_label_space(flags, columns, kind)


@pytest.mark.parametrize(
    ("cells", "is_blank"),
    [
        (["a", " ", "b"], [0, 1, 0]),
        (["1.5", "nan", "", "NaN"], [0, 1, 1, 1]),  # as pyarrow and polars write it
        ([["a", "b"], []], [0, 0]),
    ],
)
def test_rows_without_their_only_label_are_found(cells, is_blank):
    assert find(cells).read(make_columns(y=cells))[1].tolist() == is_blank


def test_columns_of_0_and_1_are_several_labels_in_the_given_order():
    table = make_columns(slow=["1", "0", "true"], dear=["0.0", "FALSE", "1.0"])
    space = make_label_space(table, ["slow", "dear"], "auto")
    assert (space.kind, space.names, space.columns) == (SEVERAL, ("slow", "dear"), ("slow", "dear"))
    assert space.read(table)[0].tolist() == [[1, 0], [0, 0], [1, 1]]


def test_a_table_in_parts_and_a_part_of_a_table_are_read_the_same():
    """Columns of several chunks have one dictionary; labels of rows that are left out count nowhere."""
    table = make_columns(y=["a", "b", "c", "a"])
    chunks = pa.concat_tables([table.table.slice(0, 2), table.table.slice(2)])
    space = make_label_space(Columns("t.csv", chunks, frozenset(), range(4)), ["y"], "auto")
    assert space.read(Columns("t.csv", chunks, frozenset(), range(4)))[0].tolist() == [0, 1, 2, 0]
    part = table.take(np.array([3, 1]))
    assert make_label_space(part, ["y"], "auto").names == ("a", "b")
    assert find(["a", "b"]).read(part)[0].tolist() == [0, 1]


@given(st.integers(-(10**20), 10**20), st.integers(0, 3))
def test_whole_numbers_are_one_label_however_they_are_spelled(number, zeros):
    assert normalise(f" {number}.{'0' * zeros}") == str(number)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=20))  # more may be too many for labels
def test_reading_is_the_inverse_of_naming(cells):
    """Each cell's number leads back to its label, whatever the kind is; an empty cell has none."""
    try:
        space = find(cells, SINGLE)
        labels, _, _, other = space.read(make_columns(y=cells))
    except UsageError:
        assert len({normalise(cell) for cell in cells if cell.strip()}) < 2
        return
    names = ("", *space.names)
    assert [names[label - UNKNOWN_LABEL] for label in labels] == [normalise(cell) for cell in cells]
    assert not other
