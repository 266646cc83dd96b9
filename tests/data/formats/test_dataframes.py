"""Tables in memory: what Parquet has no type for, names that are not texts, and tables that were written before."""

import datetime

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertkit.data.formats.dataframes import convert_table, convert_tables, list_rows, write_tables
from bertkit.data.formats.rows import read_columns
from bertkit.errors import UsageError

DAY = np.datetime64("2024-05-06", "s")
CLOCK = pa.array([datetime.time(1, 2, 3), None], pa.time32("s"))
TABLES = {
    "categories": pandas.DataFrame({"a": pandas.Categorical(["x", None], ["x", "y"])}),
    "Arrow": pa.table({"a": [1.5, float("nan")], "b": [[float("nan")], None], "c": [None, 2.0]}),
    "Dataset": datasets.Dataset.from_dict({"a": [0.5, float("nan")], "b": [{"c": float("nan")}, None]}),
    "seconds": pandas.DataFrame({"a": np.array([DAY, "NaT"], "datetime64[s]")}),
    "time32": pa.table({"a": CLOCK}),
    "intervals": pandas.DataFrame({"a": pandas.cut([1, 9], 2)}),
    "mixed": [{"a": 1, "b": {}}, {"a": "x", "b": {}}],
    "classes": datasets.Dataset.from_dict(
        {"a": [0, 1]}, datasets.Features({"a": datasets.ClassLabel(names=["x", "y"])})
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_an_equal_table_is_what_was_written(name, tmp_path):
    for _ in range(2):
        write_tables(convert_tables(TABLES[name]), tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    table = convert_table(TABLES[name])
    for other in (table.slice(0, 1), table.take([1, 0]), table.rename_columns(["z", *table.column_names[1:]])):
        with pytest.raises(UsageError, match="holds other data; name another directory"):
            write_tables({"train": other}, tmp_path)
    assert file.read_bytes() == content


def test_other_names_of_the_same_classes_are_other_data(tmp_path):
    write_tables(convert_tables(TABLES["classes"]), tmp_path)
    other = TABLES["classes"].cast(datasets.Features({"a": datasets.ClassLabel(names=["x", "z"])}))
    with pytest.raises(UsageError, match="holds other data"):
        write_tables(convert_tables(other), tmp_path)


COLUMNS = {  # what Parquet has no type for -> its texts
    "intervals": (pandas.cut([1, 9, np.nan], [0, 5, 10]), ["(0.0, 5.0]", "(5.0, 10.0]", ""]),
    "mixed": ([7, "x7", None], ["7", "x7", ""]),
    "mixed categories": (pandas.Categorical([1.5, "a", None]), ["1.5", "a", ""]),
    "dicts": ([{"a": 1}, {"a": "b"}, pandas.NA], ["{'a': 1}", "{'a': 'b'}", ""]),
    "empty dicts": ([{}, {}, {}], ["{}"] * 3),
    "numbers as keys": ([{1: 2}, None, {}], ["{1: 2}", "", "{}"]),
    "complex": (np.array([1j, 2, 3]), ["1j", "(2+0j)", "(3+0j)"]),
    "sparse": (pandas.arrays.SparseArray([0, 0, 4]), ["0", "0", "4"]),
    "huge": ([2**80, 1, 2], [str(2**80), "1", "2"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_what_parquet_has_no_type_for_becomes_texts(name, tmp_path):
    cells, texts = COLUMNS[name]
    frame = pandas.DataFrame({0: ["a", "b", "c"], "odd": pandas.Series(cells)})
    write_tables(convert_tables(frame), tmp_path)
    read = read_columns(tmp_path / "train.parquet")
    assert read.table.to_pydict() == {"0": ["a", "b", "c"], "odd": texts}
    assert [row["odd"] or "" for row in list_rows(frame)] == texts
    (tmp_path / "train.parquet").unlink()
    write_tables(convert_tables([{0: "a", "odd": cell} for cell in frame["odd"]]), tmp_path)
    assert pq.read_table(tmp_path / "train.parquet").column_names == ["0", "odd"]


def test_an_arrow_column_without_a_type_in_parquet_becomes_texts():
    column = pa.array([pa.MonthDayNano((1, 2, 3)), None])
    table = convert_table(pa.table({"a": column, "b": [1, 2]}))
    assert table.column("a").to_pylist() == ["MonthDayNano(months=1, days=2, nanoseconds=3)", None]
    assert table.column("b").to_pylist() == [1, 2]


def test_two_columns_of_one_name_are_refused(tmp_path):
    frame = pandas.DataFrame([["a", "b"]], columns=["1", 1])
    with pytest.raises(UsageError, match="data, train: '1' names 2 columns; give every column a name of its own"):
        write_tables(convert_tables(frame), tmp_path)
