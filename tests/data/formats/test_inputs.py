"""Inputs of `predict` in CSV, Parquet and gzip; the other formats are tested with the predictor."""

import csv
import gzip
import io
import math
import tracemalloc
from datetime import date
from decimal import Decimal

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from bertkit.data.formats import inputs as module
from bertkit.data.formats.columns import read_columns
from bertkit.data.formats.inputs import make_text, read_inputs, read_table, split_csv
from bertkit.errors import UsageError


@pytest.fixture
def table(tmp_path):
    return str(tmp_path / "a.csv")


def list_values(path, content, columns=()):
    """Write a file and return its values, an error being its message with the number of its line."""
    with open(path, "wb") as file:
        file.write(content)
    lines = list(read_inputs(path, columns))
    places = [line.place.rpartition(" ")[2] for line in lines]
    return [
        f"{place}: {line.value}" if isinstance(line.value, UsageError) else line.value
        for place, line in zip(places, lines, strict=True)
    ]


def test_csv_has_quotes_line_ends_in_cells_and_a_byte_order_mark(table):
    content = '\ufefftext,n\r\n"a ""q"", \r\nb",1\r\n\r\nNA,\r\n"",null'
    assert list_values(table, content.encode()) == [
        {"text": 'a "q", \r\nb', "n": "1"},
        {"text": "NA", "n": ""},
        {"text": "", "n": "null"},
    ]
    assert [line.place for line in read_inputs(table)] == [f"{table}, line {number}" for number in (2, 5, 6)]


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)  # NUL is refused


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=8))
def test_whatever_the_csv_module_writes_is_read_back(rows):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["a", "b"], *rows])
    found = [line.value for line in read_table(split_csv(io.BytesIO(text.getvalue().encode()), "x"), "x", ())]
    assert found == [{"a": first, "b": second} for first, second in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (b"a\nb,c\nd\n", ["a", "3: has 2 columns, but the header names 1; correct the line", "d"]),
        (b'a\n"b"x\nd\n', ["a", "3: is not CSV (',' expected after '\"'); correct it", "d"]),
        (b"a\n\xff\nd\n", ["a", "3: is not UTF-8; convert it", "d"]),
        (b'a\n"b\nd\n', ["a", "3: is not CSV (unexpected end of data); correct it (the row covers several lines"]),
        (b'a\n"b\nc"x\nd\n', ["a", "3: is not CSV (',' expected after '\"'); correct it (the row covers several"]),
        (
            b'a\n"b\n\xff"\nd\n',
            ["a", "3: is not UTF-8; convert it (the row covers several lines; those after"],
        ),
        (
            b'a\n"b\n' + 40 * b"word word\n",
            ["a", "3: is longer than 200 characters; close its quotes or split it ("],
        ),
        (b"a\n" + 201 * b"x" + b"\nd\n", ["a", "3: is longer than 200 characters; split it", "d"]),
        (b"a\n" + 2000 * b"x" + b"\nd\n", ["a", "3: is longer than 200 characters; split it", "d"]),
    ],
)
def test_a_wrong_row_is_an_error_in_its_place_and_the_last_if_it_is_not_clear_where_it_ends(
    rows, expected, table, monkeypatch
):
    monkeypatch.setattr(module, "LONGEST_LINE", 200)
    found = list_values(table, b"text\n" + rows)
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        assert value == {"text": wanted} or (isinstance(value, str) and value.startswith(wanted))


def test_a_long_cell_is_read_and_an_unclosed_quote_takes_little_memory(table, monkeypatch):
    assert list_values(table, b"text\n" + 900_000 * b"x") == [{"text": 900_000 * "x"}]
    monkeypatch.setattr(module, "LONGEST_LINE", 10_000)
    with open(table, "wb") as file:
        file.write(b'text\n"' + 500_000 * b"word word\n")
    tracemalloc.start()
    (line,) = read_inputs(table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "is longer than 10,000 characters" in str(line.value)
    assert peak < 1e6  # bytes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,text\n", r"line 1: the header must name every column exactly once; correct it"),
        ("a.csv", b"\ntext\na\n", r"line 1: the header must name every column exactly once; correct it"),
        ("a.csv", b'"text\na\n', r"line 1 is not CSV \(unexpected end of data\); correct it"),
        ("a.csv", b"title,body\n", r"a.csv has no column 'text'; found 'title', 'body'; name the columns of the texts"),
        (
            "a.tsv.gz",
            gzip.compress(b"txt\n", mtime=0),
            r"has no column 'text'; found 'txt' \(nearest: 'txt'\); name the columns",
        ),
        ("a.csv.gz", b"text\na\n", r"a.csv.gz cannot be read \(Not a gzipped file \(b'te'\)\); give a readable file"),
        (
            "a.csv.gz",
            gzip.compress(b"text\na\n", mtime=0)[:-4],
            r"a.csv.gz cannot be read \(Compressed file ended before the",
        ),
        (
            "a.csv.gz",
            gzip.compress(b"text\na\n", mtime=0)[:10] + b"\xff" * 9,
            r"a.csv.gz cannot be read \(Error -3 while",
        ),
        (
            "a.parquet",
            b"text\nabcd\n",
            r"a.parquet is not a readable Parquet file \(Parquet magic bytes .*\); write it",
        ),
        (
            "a.json",
            b"{}",
            r"a.json is an object with 0 keys, expected only one, with an array; give an array of objects",
        ),
        (
            "a.parquet.gz",
            b"",
            r"must end in .jsonl, .json, .csv, .tsv, .txt, .parquet \(.gz may follow, but not .parquet\)",
        ),
    ],
)
def test_a_wrong_table_is_one_line(name, content, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        list_values(str(tmp_path / name), content, ("text",))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt"])
def test_text_formats_may_be_compressed(name, tmp_path):
    content = {"a.jsonl": b'{"text": "good"}\n{"text": "bad"}\n', "a.txt": b"good\nbad\n"}.get(
        name, b"text\ngood\nbad\n"
    )
    plain = list_values(str(tmp_path / name), content)
    assert list_values(str(tmp_path / f"{name}.gz"), gzip.compress(content)) == plain
    assert len(plain) == 2


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_tsv_is_read_as_for_training(name, tmp_path):
    """Files that follow the rules of CSV as a whole are quoted, others are not."""
    for content in (
        'text\tid\n"x\ny"\t"say ""so"""\nz\t2\n',
        'text\tid\n"x"\t"say ""so"""\n" he said\t2\n',
        'text\tid\n" he\t1\nshe "\t2\n',
    ):
        data = content.encode()
        path = tmp_path / name
        found = list_values(str(path), gzip.compress(data) if name.endswith("gz") else data)
        assert found == read_columns(path).table.to_pylist()


def test_json_is_an_array_of_objects_and_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 30)
    content = b'{"data": [{"text": "good", "id": 1}, "bad", 3, {"text": "%s"}, "\xff"]}' % (b"x" * 30)
    path = tmp_path / "a.json"
    path.write_bytes(content)
    one, two, *wrong = read_inputs(str(path))
    assert (one.value, one.place, two.value) == ({"text": "good", "id": 1}, f"{path}, row 1", "bad")
    assert [line.place.rpartition(" ")[2] for line in wrong] == ["3", "4", "5"]
    messages = [str(line.value) for line in wrong]
    assert messages[0].startswith("is not a JSON object or string (Expected `str | object`, got `int`): '3'")
    assert messages[1:] == ["is longer than 30 characters; split it", "is not UTF-8; convert it"]
    assert list_values(f"{path}.gz", gzip.compress(b'["a"]')) == ["a"]


def test_an_overlong_line_of_tsv_is_an_error_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 20)
    path = tmp_path / "a.tsv"
    path.write_text(f'text\n"a"\n{"x" * 21}\nb\n')
    values = [line.value for line in read_inputs(str(path))]
    assert (values[0], str(values[1]), values[2]) == ({"text": '"a"'}, str(module.refuse_length()), {"text": "b"})


def test_parquet_is_read_in_batches_with_values_as_in_json(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 2)
    columns = {
        "text": ["a", None, "NA"],
        "id": [1, 2, 2**60],
        "share": [0.5, float("nan"), None],
        "day": [date(2020, 1, 2)] * 3,
        "price": [Decimal("1.10")] * 3,
        "words": [["x", "y"], [], None],
    }
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    lines = list(read_inputs(path, ("text",)))
    assert [line.place for line in lines] == [f"{path}, row {number}" for number in (1, 2, 3)]
    first = {"text": "a", "id": 1, "share": 0.5, "day": "2020-01-02", "price": "1.10", "words": ["x", "y"]}
    assert lines[0].value == first
    assert [line.value["text"] for line in lines] == ["a", None, "NA"]
    assert [line.value["share"] for line in lines] == [0.5, None, None]
    with pytest.raises(UsageError, match=r"has no column 'txt'; found 'text', 'id', .*nearest: 'text'"):
        list(read_inputs(path, ("txt",)))
    monkeypatch.setattr(module, "LONGEST_LINE", 3)
    assert "is longer than 3 characters; split it" in str(next(read_inputs(path)).value)


def test_a_cell_is_text():
    assert [make_text(value) for value in ("a", None, math.nan, 1, 0.1, ["a"])] == ["a", "", "", "1", "0.1", '["a"]']
