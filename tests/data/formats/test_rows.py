"""A person's own rows, for training and prediction: every form, wrong files by line, splits, memory."""

import csv
import json
import subprocess
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.data.formats import hub
from bertkit.data.formats import rows as module
from bertkit.data.formats.rows import SUFFIXES, Columns, read_columns, read_inputs, read_splits
from bertkit.errors import UsageError
from tests.data.conftest import write


def write_sheet(path: Path, rows: list, *more: str) -> Path:
    """Write an Excel file with the rows in its first sheet."""
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    for title in more:
        book.create_sheet(title)
    book.save(path)
    return path


def show(table: Columns) -> dict[str, list[str]]:
    """Return the table as lists, after checking what holds for every table."""
    assert all(kind == pa.large_string() for kind in table.table.schema.types)
    assert not any(column.null_count for column in table.table.columns)
    assert len(table) == len(table.lines) > 0
    return table.table.to_pydict()


ROWS = {"text": ["good", 'so "bad"', "NA", ""], "label": ["1", "null", "nan", "None"]}
OBJECTS = [dict(zip(ROWS, cells, strict=True)) for cells in zip(*ROWS.values(), strict=True)]
CSV = 'text,label\ngood,1\n"so ""bad""",null\nNA,nan\n,None\n'
FORMS = {
    ".csv": CSV,
    ".tsv": 'text\tlabel\ngood\t1\nso "bad"\tnull\nNA\tnan\n\tNone\n',
    ".jsonl": "".join(f"{json.dumps(row)}\n" for row in OBJECTS),
    ".json": json.dumps(OBJECTS),
}


@pytest.mark.parametrize("suffix", [*SUFFIXES, *(f"{suffix}.gz" for suffix in FORMS)])
def test_every_format_gives_the_same_texts_and_nothing_becomes_missing(suffix, tmp_path):
    path, said = tmp_path / f"a{suffix}", []
    if suffix == ".parquet":
        pq.write_table(pa.table(ROWS), path)
    elif suffix == ".xlsx":
        write_sheet(path, [list(ROWS), *zip(*ROWS.values(), strict=True)])
    else:
        write(path, FORMS[suffix.removesuffix(".gz")])
    table = read_columns(path, report=said.append)
    assert show(table) == ROWS
    assert (table.source, table.lists) == (str(path), frozenset())
    places = {".csv": "line 2", ".tsv": "line 2", ".jsonl": "line 1", ".xlsx": "row 2"}
    first = f"{path}, {places.get(suffix.removesuffix('.gz'), 'row 1')}"
    assert table.locate(0) == first
    lines = list(read_inputs(str(path), ["text"], report=said.append))
    assert [line.value for line in lines] == OBJECTS
    assert (lines[0].origin, said) == (first, [])


# --- CSV and TSV


def test_csv_with_byte_order_mark_line_ends_in_cells_and_blank_lines(tmp_path):
    """The second row begins in line 5: its predecessor takes lines 2 and 3, and line 4 is blank."""
    content = '\ufefftext,label\r\n"one\r\ntwo, ""three""",a\r\n\r\n"\u2028\n\rx",b\r\n\r\n'
    table = read_columns(write(tmp_path / "a.csv", content))
    assert show(table) == {"text": ['one\r\ntwo, "three"', "\u2028\n\rx"], "label": ["a", "b"]}
    assert list(table.lines) == [2, 5]
    assert table.take(np.array([1])).locate(0).endswith("a.csv, line 5 (record 2)")


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".csv", "a,b\n1,2\n\n1,2,3\n"),
        (".csv", "a,b\r1,2\r"),
        (".csv", "a,b\n1,2\na,b\n"),
        (".csv", b"a,b\n1,\0\n"),
        (".csv", "a,b\n"),
        (".csv", "a, \n1,2\n"),
        (".tsv", "a\ta\n1\t2\n"),
        (".xlsx", "a,b"),
        (".docx", "a,b"),
        (".parquet.gz", "a,b"),
        (".parquet", "a,b"),
        (".jsonl", '{"a": 1}\n["a"]\n'),
        (".json", '[{"a": "é"}]'.encode("cp1252")),
        (".jsonl", '{"": 1}\n'),
        (".json", '{"a": 1}'),
    ],
)
def test_wrong_file_is_one_line(suffix, content, tmp_path, refused):
    with refused() as error:
        read_columns(write(tmp_path / f"a{suffix}", content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('a\tb\n"x\ny"\t"say ""so"""\n"t\tu"\t2\n', {"a": ["x\ny", "t\tu"], "b": ['say "so"', "2"]}),
        ('a\tb\r\n"x"\t"say ""so"""\r\n\r\n" he said\t2\r\n', {"a": ['"x"', '" he said'], "b": ['"say ""so"""', "2"]}),
        ('a\tb\n" he\t1\nshe "\t2\n', {"a": ['" he', 'she "'], "b": ["1", "2"]}),
        ('a\tb\n"he\t1\n\nshe"\t2\n', {"a": ['"he', 'she"'], "b": ["1", "2"]}),
        ('a\tb\n"he\t1\nshe"\t2\n"x\ny"\t3\n', {"a": ["he\t1\nshe", "x\ny"], "b": ["2", "3"]}),
        ('a\n"he\nshe"\n', {"a": ["he\nshe"]}),
    ],
)
def test_tsv_is_quoted_only_if_the_whole_file_is_and_no_quotes_join_complete_rows(content, expected, tmp_path):
    """A quote of the second file is never closed; the others are well-formed, but lines of two have all cells."""
    assert show(read_columns(write(tmp_path / "a.tsv", content))) == expected


CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(CELL, CELL), min_size=1), delimiter=st.sampled_from(",\t"), size=st.integers(1, 4))
def test_what_csv_writes_is_read_back_in_chunks_of_any_size(rows, delimiter, size, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", size)
    path = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    table = show(read_columns(path))
    assert list(zip(table["a"], table["b"], strict=True)) == rows


def test_json_lines_keep_texts_and_numbers_as_they_are(tmp_path):
    lines = (
        '{"text": "a\\nb", "label": 3, "tags": ["x", 2, 1.50], "more": NaN}',
        "",
        '{"label": 2.50, "text": null, "more": true}',
        '{"text": " NaN ", "label": 123456789012345678901234567890, "tags": [], "more": false}',
        "{}",
    )
    table = read_columns(write(tmp_path / "a.jsonl", "\ufeff" + "\n".join(lines)))
    assert show(table) == {
        "text": ["a\nb", "", " NaN "],
        "label": ["3", "2.50", "123456789012345678901234567890"],
        "tags": ['["x","2","1.50"]', "", "[]"],
        "more": ["", "true", "false"],
    }
    assert table.lists == {"tags"}
    assert list(table.lines) == [1, 3, 4]


def test_json_is_an_array_of_objects(tmp_path):
    whole = read_columns(write(tmp_path / "a.json", '[{"a": "x"}, {"b": [true]}]'))
    assert show(whole) == {"a": ["x", ""], "b": ["", '["true"]']}
    assert whole.locate(1) == f"{tmp_path / 'a.json'}, row 2"


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([1, {"c": 1.50}], ["1", '{"c":"1.50"}']),
        ([None, [[1]]], ["", "[[1]]"]),
        ([[1], "x"], ['["1"]', "x"]),
    ],
)
def test_a_nested_column_is_refused_only_where_it_is_used(values, cells, tmp_path, refused):
    lines = [f'{{"a": "x", "b": {json.dumps(value).replace("1.5", "1.50")}}}' for value in values]
    table = read_columns(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert show(table) == {"a": ["x"] * len(cells), "b": cells}
    assert (table.find("a").to_pylist(), table.lists) == (["x"] * len(cells), frozenset())
    with refused():
        table.find("b")


# --- Parquet


def test_parquet_types_become_texts(tmp_path):
    table = pa.table(
        {
            "float": pa.array([1.0, None, float("nan")]),
            "bool": [True, None, False],
            "day": [date(2026, 1, 2), None, None],
            "raw": [b"\xff", None, b"y"],
            "tags": [["a", None], None, []],
            "pair": pa.array([[1, 2], [0, 1], [3, 4]], pa.list_(pa.int8(), 2)),
            "struct": [{"x": 1}, None, {"x": None}],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = read_columns(tmp_path / "a.parquet")
    assert show(found) == {
        "float": ["1.0", "", ""],
        "bool": ["true", "", "false"],
        "day": ["2026-01-02", "", ""],
        "raw": ["\ufffd", "", "y"],
        "tags": ['["a",""]', "", "[]"],
        "pair": ['["1","2"]', '["0","1"]', '["3","4"]'],
        "struct": ['{"x":1}', "", '{"x":null}'],
    }
    assert found.lists == {"tags", "pair"}
    assert found.faults == {"struct"}
    assert found.locate(2) == f"{tmp_path / 'a.parquet'}, row 3"


def make_reviews(count: int) -> datasets.Dataset:
    """Make rows of a text, a class label and a list of class labels; the third has neither."""
    stars = datasets.ClassLabel(names=["bad", "good"])
    features = {"text": datasets.Value("string"), "stars": stars, "topics": datasets.List(stars)}
    rows = {"text": REVIEWS["text"], "stars": [1, 0, -1], "topics": [[0, 1], [1], []]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features)).select(range(count))


REVIEWS = {
    "text": ["text 0", "text 1", "text 2"],
    "stars": ["good", "bad", ""],
    "topics": ['["bad","good"]', '["good"]', "[]"],
}


def test_class_labels_of_parquet_are_names(tmp_path):
    path = tmp_path / "a.parquet"
    make_reviews(3).to_parquet(path)
    assert show(read_columns(path)) == REVIEWS
    assert read_columns(path).classes == {"stars": ["bad", "good"], "topics": ["bad", "good"]}


# --- splits


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.csv", b"text;label\nso, good;1\n", 'cells separated by ";"'),
        ("a.csv", b'a, b;text;label\n1, 2;"so\n, good";1\n', 'cells separated by ";"'),
        ("a.tsv", b"text,label\ngood,1\n", 'cells separated by ","'),
        ("a.csv.gz", "text,label\nVor Straßen; größte Spaß,café".encode("cp1252"), "cp1252 (Western European) text"),
        ("a.csv", "text,label\n¿¿¿¿Qué pasó???? ····,1\n".encode("cp1252"), "cp1252 (Western European) text"),
        ("a.csv", "text\tlabel\n文 本\t1\n".encode("utf-16"), "cells separated by tabs, UTF-16 text"),
        ("a.csv", "text,label\n我今天非常高兴\ue5e5,1\n".encode("gb18030"), "GB18030 (Chinese) text"),
        (
            "a.csv",
            "text;label\n一家安静的小店，咖啡很香。;好\n".encode("gbk"),
            'cells separated by ";", GB18030 (Chinese) text',
        ),
        ("a.jsonl", '{"text": "é", "label": 1}\n'.encode("utf-16"), "UTF-16 text"),
        ("a.json", '[{"text": "é", "label": 1}]'.encode("utf-16"), "UTF-16 text"),
        ("a.json", b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n', ""),
        ("a.csv", b",text,label\n0,good,1\n1,bad,0\n", "pandas' index column ignored"),
        ("a.csv", b"\xef\xbb\xbftext,label\n\xc3\xa9;x|y,1\n", ""),
        ("a.csv", b"text,label;x\ngood,1\nbad;y,2\n", ""),
    ],
)
def test_files_as_people_have_them_are_read_and_said(name, content, found, tmp_path):
    path, said = write(tmp_path / name, content), []
    table = read_columns(path, report=said.append)
    assert table.table.column_names[-2:-1] == ["text"]
    assert said == [f"{path}: {found}"] * bool(found)
    assert "\ufffd" not in str(show(table))
    lines = list(read_inputs(str(path), ["text"], report=said.append))
    assert [line.value["text"] for line in lines] == table.find("text").to_pylist()
    assert said == [f"{path}: {found}"] * 2 * bool(found)


@pytest.mark.parametrize(
    "content",
    [
        "Привет".encode("cp1251"),
        "ПРИВЕТ".encode("cp1251"),
        "我今天非常高興".encode("big5"),
        "好不好".encode("gbk"),
        "今日はとても①いい天気です".encode("cp932"),
        "今日はとてもいい天気です".encode("euc-jp"),
        "오늘은날씨가아주좋아요".encode("cp949"),
        "It is good,好评".encode("gbk"),
        "café".encode("mac-roman"),
        b"caf\xe9 \xc3\xa9",
        b"\xe9t\xe9 " + "été déjà passé, très agréable".encode(),
    ],
    ids=[
        "Cyrillic",
        "capitals",
        "Big5",
        "Chinese or Korean",
        "Shift-JIS",
        "EUC-JP",
        "Korean",
        "two Chinese characters",
        "Mac",
        "UTF-8 in part",
        "UTF-8 for the most part",
    ],
)
def test_what_is_not_western_text_is_refused(content, tmp_path, refused):
    path = write(tmp_path / "a.csv", b'text;label\n"' + content + b'";1\n')
    with refused():
        read_columns(path)
    assert show(read_columns(path, encoding="latin-1"))["text"] == [content.decode("latin-1")]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("一家店，我今天很高兴", "gb18030"),  # begins with a character that UTF-8 has, too
        ("我今天非常高興", "big5"),
        ("今日はとてもいい天気です", "shift_jis"),
        ("오늘은날씨가아주좋아요", "cp949"),
    ],
)
def test_an_encoding_of_east_asia_is_read_as_named(text, encoding, tmp_path):
    path = write(tmp_path / "a.csv", f"text,label\n{text},1\n".encode(encoding))
    assert show(read_columns(path, encoding=encoding))["text"] == [text]
    rows = [line.value for line in read_inputs(str(path), encoding=encoding)]
    assert rows == [{"text": text, "label": "1"}]


def test_settings_of_reading(tmp_path, refused):
    """UTF-8 that has more than ASCII is certain, as is a byte order mark; other files have the given encoding."""
    path = write(tmp_path / "a.csv", "text|x;label\ngood|y;1\n")
    assert show(read_columns(path, sep="|")) == {"text": ["good"], "x;label": ["y;1"]}
    for reading in ({"sep": "tab"}, {"encoding": "ansi"}, {"encoding": "utf-16"}):
        with refused():
            read_columns(path, **reading)
    for encoding in ("cp1250", "utf-8", "utf-8-sig", "utf-16"):
        write(path, "text,label\nzłoty,1\n".encode(encoding))
        assert show(read_columns(path, encoding="cp1250"))["text"] == ["złoty"]


def test_sheets_of_excel(tmp_path):
    """The first column has no name, as the index of pandas, and the third row is blank."""
    times = datetime(2026, 1, 2), datetime(2026, 1, 2, 3)
    rows = [[None, "text", "day", "x"], [0, "so", times[0], 1.5], [], [1, True, times[1], None]]
    path, said = write_sheet(tmp_path / "a.xlsx", rows, "notes"), []
    table = read_columns(path, report=said.append)
    assert show(table) == {"text": ["so", "true"], "day": ["2026-01-02", "2026-01-02T03:00:00"], "x": ["1.5", ""]}
    assert table.locate(1) == f"{path}, row 4 (record 2)"
    assert said == [f"{path}: the first of 2 sheets, pandas' index column ignored"]


def test_folders_of_save_to_disk(tmp_path):
    rows = make_reviews(3)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "more")
    assert module.has_splits(str(tmp_path / "one"))
    assert module.has_splits(str(tmp_path / "more"))
    splits = read_splits(str(tmp_path / "one")) | read_splits(str(tmp_path / "more"))
    assert {split: show(table) for split, table in splits.items()} == {"train": REVIEWS, "dev": REVIEWS}
    assert splits["dev"].locate(0) == f"{tmp_path / 'more'}, validation, row 1"


def test_file_and_folder(tmp_path, refused):
    write(tmp_path / "train.csv", CSV)
    write(tmp_path / "validation.jsonl.gz", '{"text": "x"}\n')
    write(tmp_path / "test.tsv", "text\ny\n")
    for name in ("train.txt", "tests.csv", "notes.csv"):
        write(tmp_path / name, "not read")
    assert list(read_splits(str(tmp_path / "train.csv"))) == ["train"]
    splits = read_splits(str(tmp_path))
    assert {split: len(table) for split, table in splits.items()} == {"train": 4, "dev": 1, "test": 1}
    assert splits["dev"].locate(0) == f"{tmp_path / 'validation.jsonl.gz'}, line 1"
    write(tmp_path / "val.csv", CSV)
    with refused():
        read_splits(str(tmp_path))
    (tmp_path / "train.csv").unlink()
    (tmp_path / "val.csv").unlink()
    with refused():
        read_splits(str(tmp_path))


@pytest.mark.parametrize("source", ["reviews.csv", "/nowhere", "a b/c"])
def test_missing_place_names_file_folder_and_hub(source, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    with refused():
        read_splits(source)


def test_hub(served, monkeypatch, refused):
    others = {"valid": make_reviews(1), "unsupervised": make_reviews(1)}
    served["owner/name", "small"] = {"train": make_reviews(3)} | others
    splits = read_splits("owner/name:small")
    assert {split: len(table) for split, table in splits.items()} == {"train": 3, "dev": 1}
    assert show(splits["train"]) == REVIEWS
    assert splits["train"].lists == {"topics"}
    assert splits["dev"].locate(0) == "owner/name:small, valid, row 1"
    monkeypatch.setattr(hub, "explain_hub_trouble", lambda *_: "the Hub has no dataset 'owner/other'")
    with refused():
        read_splits("owner/other")


# --- prediction: errors in their place


def list_values(path, content, columns=()):
    """Write a file and return its values, an error being its message with the number of its line."""
    lines = list(read_inputs(str(write(path, content)), columns))
    places = [line.origin.rpartition(" ")[2] for line in lines]
    return [
        f"{place}: {line.value}" if isinstance(line.value, UsageError) else line.value
        for place, line in zip(places, lines, strict=True)
    ]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (b"a\nb,c\nd\n", ["a", "3: has 2 cells, expected 1; correct the line", "d"]),
        (b"a\n,,\nd\n,\n", ["a", "d"]),  # as spreadsheets write empty rows
        (b'a\n"b"x\nd\n', ["a", "3: is not a valid CSV row (',' expected after '\"'); check", "d"]),
        (b"a\n\x81\nd\n", ["a", "3: is not UTF-8 (byte 0x81 at position 1); convert the file, ", "d"]),
        (b'a\n"b\nd\n', ["a", "3: is not a valid CSV row (unexpected end of data); check its quotes and commas ("]),
        (b'a\n"b\n\x81"\nd\n', ["a", "3: is not UTF-8 (byte 0x81 at position 1); convert the file, "]),
    ],
)
def test_a_wrong_row_is_an_error_in_its_place_and_the_last_if_it_is_not_clear_where_it_ends(rows, expected, tmp_path):
    found = list_values(tmp_path / "a.csv", b"text\n" + rows)
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        assert value == {"text": wanted} or (isinstance(value, str) and value.startswith(wanted))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", b'"text\na\n'), ("a.csv", b"title,body\n"), ("a.tsv.gz", b"txt\n"), ("a.parquet.gz", b"")],
)
def test_an_input_that_is_not_a_table_is_one_line(name, content, tmp_path, refused):
    with refused():
        list_values(tmp_path / name, content, ("text",))


def test_a_truncated_archive_ends_the_table(tmp_path, refused):
    text = "text,label\nä,1\n" + "".join(f"{'word ' * 20}{n},1\n" for n in range(5000))
    path = write(tmp_path / "t.csv.gz", text)
    path.write_bytes(path.read_bytes()[:-2000])
    with refused():
        list(read_inputs(str(path)))


def test_json_may_hold_texts_for_prediction(tmp_path):
    found = list_values(tmp_path / "a.json", b'[{"text": "good", "id": 1}, "bad", 3, "\xff"]')
    assert found[:2] == [{"text": "good", "id": 1}, "bad"]
    for number, line in enumerate(found[2:], 3):
        assert line.startswith(f"{number}: is not a JSON object or string (")


def test_parquet_is_read_in_batches_with_values_as_in_json(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(module, "CHUNK_ROWS", 2)
    columns = {"text": ["a", None, "NA"], "share": [0.5, float("nan"), None], "words": [["x", "y"], [], None]}
    columns |= {"day": [date(2020, 1, 2)] * 3, "price": [Decimal("1.10")] * 3}
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), path)
    lines = list(read_inputs(path, ("text",)))
    assert [line.origin for line in lines] == [f"{path}, row {number}" for number in (1, 2, 3)]
    same = {"day": "2020-01-02", "price": "1.10"}
    assert [line.value for line in lines] == [
        {"text": "a", "share": 0.5, "words": ["x", "y"]} | same,
        {"text": None, "share": None, "words": []} | same,
        {"text": "NA", "share": None, "words": None} | same,
    ]
    with refused():
        list(read_inputs(path, ("txt",)))


PEAK = """
import sys
from pathlib import Path
from bertkit.data.formats.rows import read_columns
rows = len(read_columns(Path(sys.argv[1])))
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]  # ru_maxrss begins with the parent's
print(rows, 1024 * int(peak))
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_million_rows_need_little_more_memory_than_their_texts(suffix, tmp_path):
    """Their texts and labels take 61 MB, offsets 16 MB and lines 8 MB."""
    form = "{:060},{}\n" if suffix == ".csv" else '{{"text": "{:060}", "label": {}}}\n'
    peaks = []
    for count in (100_000, 1_000_000):
        path = tmp_path / f"{count}{suffix}"
        path.write_text(
            "text,label\n" * (suffix == ".csv") + "".join(form.format(row, row % 5) for row in range(count))
        )
        printed = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True).stdout
        rows, peak = map(int, printed.split())
        assert rows == count
        peaks.append(peak / 1e6)
    assert peaks[1] - peaks[0] <= 150
