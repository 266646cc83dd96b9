"""Official files: fixtures in the downloads' formats, bad files by line or place, and the Hub's copies."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.data.formats import hub
from bertkit.data.formats.line import read_json
from bertkit.data.formats.official import read_hub, read_tsv
from bertkit.data.formats.squad import Candidate, read_predictions, read_squad, read_squad_copy
from bertkit.data.formats.swag import Situation, read_swag, read_swag_copy
from bertkit.data.spans import Question
from bertkit.errors import UsageError

BOM = "\ufeff"
TOO_DEEP = "Stack overflow" if sys.version_info >= (3, 14) else "maximum recursion depth exceeded"  # as Python says it
MRPC = f"""{BOM}Quality\t#1 ID\t#2 ID\t#1 String\t#2 String
1\t702876\t702977\tHe said "it is over .\tHe said it was " over " .
0\t2108705\t2108831\t" Yucaipa owned Dominick 's\tYucaipa bought Dominick 's
"""
MRPC_COLUMNS = {"label": "Quality", "first": "#1 String", "second": "#2 String"}
QQP = """id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate
133273\t213221\t213222\tHow is the life of a math student?\tWhich level is enough?\t0
402555\t536040\t536041\tHow do I control my horny emotions?

360472\t364011\t490273\tWhat causes stool color to change?\tWhat can cause it?\t1
"""
QQP_COLUMNS = {"first": "question1", "second": "question2", "label": "is_duplicate"}
COLA = """gj04\t1\t\tOur friends won't buy this analysis.
gj04\t0\t*\tThey drank the pub the pub.
"""
STSB_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
STSB = f"""{STSB_HEADER}\tscore
0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane is taking off.\tAn air plane is taking off.\t5.000
1\tmain-captions\tMSRvid\t2012test\t0004\tnone\tnone\tA man is playing a flute.\tA man plays.\t3.800
"""
PARSES = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MNLI_ROW = "0\t63735\t63735n\tslate\t( a b )\t( c d )\t(ROOT a b)\t(ROOT c d)\tThe new rights are nice\tThey are nice"
MNLI_COLUMNS = {"first": "sentence1", "second": "sentence2", "label": "gold_label"}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- the official forms


def test_mrpc_with_byte_order_mark_and_quotes_that_nobody_closes(tmp_path):
    file = write(tmp_path / "train.tsv", MRPC)
    table = read_tsv(file, MRPC_COLUMNS)
    assert table.table.to_pydict() == {
        "label": ["1", "0"],
        "first": ['He said "it is over .', "\" Yucaipa owned Dominick 's"],
        "second": ['He said it was " over " .', "Yucaipa bought Dominick 's"],
    }
    assert list(table.lines) == [2, 3]
    assert table.locate(1) == f"{file}, line 3"


def test_qqp_with_broken_rows(tmp_path):
    file = write(tmp_path / "train.tsv", QQP)
    with pytest.raises(UsageError, match=r"train\.tsv, line 3 has 4 columns, expected 6; correct the line"):
        read_tsv(file, QQP_COLUMNS)
    said = []
    table = read_tsv(file, QQP_COLUMNS, skip_broken=True, report=said.append)
    assert table.find("label").to_pylist() == ["0", "1"]
    assert table.find("second").to_pylist() == ["Which level is enough?", "What can cause it?"]
    assert (list(table.lines), said) == ([2, 5], [f"{file}: skipping 2 broken rows"])
    assert table.locate(1) == f"{file}, line 5"


@pytest.mark.parametrize("width", [4, None])
def test_cola_without_header(tmp_path, width):
    table = read_tsv(write(tmp_path / "train.tsv", COLA), {"label": 1, "text": 3}, width=width)
    assert table.table.to_pydict() == {
        "label": ["1", "0"],
        "text": ["Our friends won't buy this analysis.", "They drank the pub the pub."],
    }
    assert list(table.lines) == [1, 2]


def test_first_row_of_a_file_without_header_can_be_the_broken_one(tmp_path):
    file = write(tmp_path / "train.tsv", "gj04\t1\n" + COLA)
    for width in (4, None):
        with pytest.raises(UsageError, match=r"line 1 has 2 columns, expected 4"):
            read_tsv(file, {"label": 1, "text": 3}, width=width)
    table = read_tsv(file, {"label": 1}, width=4, skip_broken=True)
    assert (table.find("label").to_pylist(), list(table.lines)) == (["1", "0"], [2, 3])


def test_stsb_scores_stay_texts_and_a_test_file_has_none(tmp_path):
    columns = {"first": "sentence1", "label": "score"}
    table = read_tsv(write(tmp_path / "dev.tsv", STSB), columns)
    assert table.table.to_pydict() == {
        "first": ["A plane is taking off.", "A man is playing a flute."],
        "label": ["5.000", "3.800"],
    }
    rows = [line.rpartition("\t")[0] for line in STSB.splitlines()]
    test = write(tmp_path / "test.tsv", "\n".join(rows) + "\n")
    assert read_tsv(test, {"first": "sentence1"}).table == table.table.select(["first"])
    with pytest.raises(
        UsageError, match=r"test\.tsv has no column 'score'; found 'index', .*'sentence2'.*first line must"
    ):
        read_tsv(test, columns)


@pytest.mark.parametrize("annotators", [0, 1, 5])
def test_mnli_whatever_number_of_annotators(tmp_path, annotators):
    labels = "".join(f"\tlabel{number}" for number in range(1, annotators + 1))
    header = f"{PARSES}\tsentence1\tsentence2{labels}\tgold_label"
    file = write(
        tmp_path / "dev_matched.tsv", f"{header}\n{MNLI_ROW}{annotators * chr(9) + annotators * 'n'}\tneutral\n"
    )
    if annotators > 1:  # the row above then has the right number of columns all the same
        assert file.read_text().splitlines()[1].count("\t") == header.count("\t")
    table = read_tsv(file, MNLI_COLUMNS)
    assert table.table.to_pydict() == {
        "first": ["The new rights are nice"],
        "second": ["They are nice"],
        "label": ["neutral"],
    }


ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh  "


def test_only_line_feeds_end_a_row(tmp_path):
    table = read_tsv(write(tmp_path / "a.tsv", f"{ODD}\tlabel\n {ODD}\t0\n"), {"text": ODD, "label": "label"})
    assert table.table.to_pydict() == {"text": [f" {ODD}"], "label": ["0"]}


@pytest.mark.parametrize(
    "content",
    [QQP.replace("\n", "\r\n"), QQP.rstrip(), QQP + "\n\n\r\n", BOM + QQP],
    ids=["CRLF", "no last newline", "blank lines at the end", "byte order mark"],
)
def test_forms_of_the_same_file(tmp_path, content):
    expected = read_tsv(write(tmp_path / "a.tsv", QQP), QQP_COLUMNS, skip_broken=True)
    table = read_tsv(write(tmp_path / "b.tsv", content), QQP_COLUMNS, skip_broken=True)
    assert (table.table, table.lines) == (expected.table, expected.lines)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\0"))


@given(
    rows=st.lists(st.tuples(texts, texts, texts), min_size=1),
    end=st.sampled_from(["\n", "\r\n"]),
    start=st.sampled_from(["", BOM]),
    header=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_written_is_read(tmp_path, rows, end, start, header):
    rows = [(first, second, third.rstrip("\r")) for first, second, third in rows]
    if not header:
        rows[0] = (rows[0][0].lstrip(BOM), *rows[0][1:])
    lines = [("x", "y", "z")] * header + rows
    file = write(tmp_path / "a.tsv", start + "".join("\t".join(row) + end for row in lines))
    columns = {"first": "x", "third": "z", "second": "y"} if header else {"first": 0, "third": 2, "second": 1}
    table = read_tsv(file, columns, width=None if header else 3)
    assert list(zip(*(table.find(name).to_pylist() for name in ("first", "second", "third")), strict=True)) == rows
    assert list(table.lines) == list(range(1 + header, 1 + header + len(rows)))


# --- bad files


HEADER = "sentence\tlabel\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty; download the official file again"),
        (b"\n\r\n", r"is empty; download the official file again"),
        (HEADER, r"has no rows of 2 columns; download"),
        (HEADER + "a\nb\n", r"line 2 has 1 column, expected 2; correct the line or download"),
        (HEADER + "a\t0\n\nb\t1\n", r"line 3 has 1 column, expected 2"),
        (HEADER + "a\tb\t0\n", r"line 2 has 3 columns, expected 2"),
        ("a\t0\nb\t1\n", r"has no column 'sentence'; found 'a', '0'; its first line must name the columns"),
        ("\nsentence\tlabel\na\t0\n", r"has no column 'sentence'; found ''"),
        (
            "sentence\tlabels\na\t0\n",
            r"has no column 'label'; found 'sentence', 'labels' \(nearest: 'labels'\); its first",
        ),
        (
            HEADER.encode() + b"a\t0\ncaf\xe9\t1\n",
            r"line 3 is not UTF-8 \(byte 0xe9 at position 4\); .* -f cp1252",
        ),
        (HEADER.encode() + b"a\t0\n\0\t1\n", r"line 3 has a NUL byte, .*; give text in UTF-8"),
        (HEADER.encode("utf-16"), r"line 1 has a NUL byte, .* iconv -f utf-16 -t utf-8$"),
    ],
)
def test_bad_file_is_one_line(tmp_path, content, message):
    file = write(tmp_path / "dev.tsv", content)
    with pytest.raises(UsageError, match=rf"dev\.tsv,? {message}") as raised:
        read_tsv(file, {"text": "sentence", "label": "label"})
    assert "\n" not in str(raised.value)


def test_only_broken_rows(tmp_path):
    file = write(tmp_path / "dev.tsv", HEADER + "a\nb\n")
    with pytest.raises(UsageError, match=r"dev\.tsv has no rows of 2 columns; download"):
        read_tsv(file, {"text": "sentence"}, skip_broken=True)


def test_blank_line_in_a_file_of_one_column_is_an_empty_text(tmp_path):
    table = read_tsv(write(tmp_path / "predictions.tsv", "1\n\n0\n\n"), {"label": 0}, width=1)
    assert table.table.to_pydict() == {"label": ["1", "", "0"]}


def test_long_text_instead_of_a_header_is_cut_in_the_message(tmp_path):
    file = write(tmp_path / "dev.tsv", "\t".join(["word " * 999] * 99) + "\n")
    with pytest.raises(UsageError, match="no column 'label'") as raised:
        read_tsv(file, {"label": "label"})
    assert len(str(raised.value)) < 2000


def test_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.tsv does not exist; check the folder"):
        read_tsv(tmp_path / "gone.tsv", {"text": "sentence"})
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\); name a file in it"):
        read_tsv(tmp_path, {"text": "sentence"})
    file = write(tmp_path / "a.tsv", HEADER)
    with pytest.raises(UsageError, match=r"cannot be read \(Not a directory\); check its path"):
        read_tsv(file / "b.tsv", {"text": "sentence"})


def test_unreadable_file(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        UsageError, match=r"a\.tsv cannot be read \(Permission denied\); check its path and permissions"
    ):
        read_tsv(tmp_path / "a.tsv", {"text": "sentence"})


# --- the Hub


def make_rows(labels: list[int | None]) -> datasets.Dataset:
    count = len(labels)
    features = datasets.Features(
        {
            "sentence1": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]),
            "score": datasets.Value("float32"),
            "idx": datasets.Value("int32"),
        }
    )
    scores = [-1.0 if label in (None, -1) else (5.0, 3.8, 0.067)[label] for label in labels]
    texts = [f"text {number}" for number in range(count)]
    columns = {"sentence1": texts, "label": labels, "score": scores, "idx": list(range(count))}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def _hub(monkeypatch):
    found = datasets.DatasetDict({"train": make_rows([1, 0, 2]), "validation_matched": make_rows([0])})
    found["test_matched"] = make_rows([-1, None])

    def load(name: str, config: str) -> datasets.DatasetDict:
        if (name, config) != ("nyu-mll/glue", "mnli"):
            raise ValueError(f"BuilderConfig '{config}' not found.\nAvailable: ['mnli']")
        return found

    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load)


SPLITS = {"train": "train", "dev": "validation_matched", "test": "test_matched"}
COLUMNS = {"first": "sentence1", "label": "label", "number": "score"}


@pytest.mark.usefixtures("_hub")
def test_hub_gives_texts_as_a_file_does_and_no_labels_for_a_test_set():
    tables = read_hub("nyu-mll/glue", "mnli", SPLITS, COLUMNS)
    assert list(tables) == ["train", "dev", "test"]
    assert tables["train"].table.to_pydict() == {
        "first": ["text 0", "text 1", "text 2"],
        "label": ["neutral", "entailment", "contradiction"],
        "number": ["3.8", "5.0", "0.067"],  # not the float64 3.799999952316284
    }
    assert tables["test"].table.to_pydict() == {"first": ["text 0", "text 1"]}
    assert tables["train"].locate(2) == "nyu-mll/glue:mnli, train, row 3"
    assert read_hub("nyu-mll/glue", "mnli", {"dev": "validation_matched"}, {"i": "idx"})["dev"].table.to_pydict() == {
        "i": ["0"]
    }


@pytest.mark.usefixtures("_hub")
def test_files_and_the_hub_give_equal_columns(tmp_path):
    lines = ["first\tgold", "text 0\tneutral", "text 1\tentailment", "text 2\tcontradiction"]
    file = read_tsv(write(tmp_path / "a.tsv", "\n".join(lines)), {"a": "first", "b": "gold"})
    hub = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, {"a": "sentence1", "b": "label"})["train"]
    assert file.table == hub.table


@pytest.mark.usefixtures("_hub")
def test_one_missing_label_is_an_empty_text(monkeypatch):
    rows = datasets.DatasetDict({"train": make_rows([1, -1, None])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: rows)
    table = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, {"label": "label"})["train"]
    assert table.table.to_pydict() == {"label": ["neutral", "", ""]}


@pytest.mark.usefixtures("_hub")
def test_optional_split():
    splits = SPLITS | {"dev_mismatched": "validation_mismatched"}
    assert list(read_hub("nyu-mll/glue", "mnli", splits, COLUMNS, optional={"dev_mismatched"})) == list(SPLITS)
    message = (
        r"nyu-mll/glue:mnli has no split 'validation_mismatched'; found train, validation_matched, test_matched; give"
    )
    with pytest.raises(UsageError, match=message):
        read_hub("nyu-mll/glue", "mnli", splits, COLUMNS, optional={"test"})


@pytest.mark.usefixtures("_hub")
def test_bad_hub_data_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match=r"mnli, train has no column 'sentence'; found .* \(nearest: 'sentence1'\)"):
        read_hub("nyu-mll/glue", "mnli", SPLITS, {"text": "sentence"})
    with pytest.raises(
        UsageError, match=r"glue:mnlii cannot be loaded \(BuilderConfig 'mnlii' not found.*; give"
    ) as raised:
        read_hub("nyu-mll/glue", "mnlii", SPLITS, COLUMNS)
    assert "\n" not in str(raised.value)
    empty = datasets.DatasetDict({"train": make_rows([])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: empty)
    with pytest.raises(UsageError, match=r"nyu-mll/glue:mnli, train has no rows; give"):
        read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)


def test_datasets_is_not_installed(monkeypatch):
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"glue:mnli cannot be loaded \(.*datasets.*; give the official files"):
        read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)


@pytest.fixture
def _cache(tmp_path, monkeypatch):
    """Fill the cache of `datasets` as a download does, and make the Hub unreachable."""
    make_rows([1, 0, 2]).to_parquet(tmp_path / "train.parquet")
    data_files = {"train": [str(tmp_path / "train.parquet")]}
    builder = Parquet(str(tmp_path), dataset_name="glue", config_name="mnli", hash="0123", data_files=data_files)
    builder.download_and_prepare()
    # A download from the Hub names the folder after the owner too, and not after the data files.
    cache = tmp_path / "cache"
    shutil.move(next((tmp_path / "glue").glob("mnli*")), cache / "nyu-mll___glue" / "mnli")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: "the Hub cannot be reached (ConnectError)")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the Hub"))


@pytest.mark.usefixtures("_cache")
def test_copy_in_the_cache_does_where_the_hub_cannot():
    table = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)["train"]
    assert table.find("label").to_pylist() == ["neutral", "entailment", "contradiction"]
    assert table.find("number").to_pylist() == ["3.8", "5.0", "0.067"]


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(("name", "config"), [("nyu-mll/glue", "cola"), ("nyu-mll/other", "mnli")])
def test_trouble_without_a_copy(name, config):
    with pytest.raises(
        UsageError, match=r"the Hub cannot be reached \(ConnectError\); give the official files"
    ) as raised:
        read_hub(name, config, {"train": "train"}, COLUMNS)
    assert "\n" not in str(raised.value)


def test_offline_answer_is_quick(tmp_path):
    code = (
        "from bertkit.data.formats.official import read_hub\nfrom bertkit.errors import UsageError\n"
        "try:\n    read_hub('nyu-mll/glue', 'mrpc', {'train': 'train'}, {'label': 'label'})\n"
        "except UsageError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    begin = time.monotonic()
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert time.monotonic() - begin < 30  # imports alone, unless a machine is very busy
    assert printed.stdout.startswith("the Hub cannot be reached for the dataset 'nyu-mll/glue'")
    assert printed.stdout.endswith("; give the official files with --data DIR\n")
    assert printed.stdout.count("\n") == 1


# --- SQuAD


read_answers = partial(read_predictions, form=str)
read_odds = partial(read_predictions, form=float)
read_nbest = partial(read_predictions, form=list[Candidate])

CONTEXT = "The Norse settled in Rouen. The Normans (from “Norseman”) spoke French."
DENVER = "Denver won. 😀 Café Denver lost."


def make_qa(name: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    pairs = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"What is {name}?", "answers": pairs} | more


def make_squad(*qas: dict[str, Any]) -> dict[str, Any]:
    return {"version": "1", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": list(qas)}]}]}


def save(path: Path, value: Any) -> Path:
    return write(path, json.dumps(value))


V1 = {
    "data": [
        {
            "title": "Normans",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [make_qa("a1", ("Rouen", 21), ("in Rouen", 18)), make_qa("a2", ("French", 64))],
                },
                {"context": "", "qas": []},
            ],
        },
        {"title": "Denver", "paragraphs": [{"context": DENVER, "qas": [make_qa("b1", ("Denver", 19))]}]},
        {"title": "Nothing", "paragraphs": []},
    ],
    "version": "1.1",
}
V2 = make_squad(
    make_qa("c1", ("Rouen", 21), is_impossible=False),
    make_qa("c2", is_impossible=True, plausible_answers=[{"text": "French", "answer_start": 64}]),
)


@pytest.mark.parametrize("version", [1, None])
def test_squad_1(tmp_path, version):
    questions = read_squad(save(tmp_path / "train-v1.1.json", V1), version)
    assert questions == [
        Question("a1", "What is a1?", CONTEXT, ("Rouen", "in Rouen"), (21, 18)),
        Question("a2", "What is a2?", CONTEXT, ("French",), (64,)),
        Question("b1", "What is b1?", DENVER, ("Denver",), (19,)),
    ]
    assert questions[0].context is questions[1].context
    for question in questions:
        for text, start in zip(question.answers, question.starts, strict=True):
            assert question.context[start : start + len(text)] == text


@pytest.mark.parametrize("version", [2, None])
def test_squad_2(tmp_path, version):
    assert read_squad(save(tmp_path / "train-v2.0.json", V2), version) == [
        Question("c1", "What is c1?", CONTEXT, ("Rouen",), (21,)),
        Question("c2", "What is c2?", CONTEXT, (), ()),
    ]


@pytest.mark.parametrize(
    ("version", "content", "message"),
    [
        (1, V2, r"data\[0\]\.paragraphs\[0\]\.qas\[1\] is impossible, so this looks like a SQuAD 2\.0 file; use .* 2$"),
        (1, make_squad(make_qa("a")), r"qas\[0\] has no answer, so this looks like a SQuAD 2\.0 file; use --version 2"),
        (2, V1, r" looks like a SQuAD 1\.1 file: no question has is_impossible; use --version 1$"),
        (2, make_squad(make_qa("a")), r" looks like a SQuAD 1\.1 file"),
    ],
)
def test_squad_file_of_the_other_version(tmp_path, version, content, message):
    file = save(tmp_path / "a.json", content)
    with pytest.raises(UsageError, match=r"a\.json.*" + message):
        read_squad(file, version)
    assert read_squad(file)  # without a version both forms are accepted, and the answers decide


def test_is_impossible_is_looked_at_only_where_it_counts(tmp_path):
    odd = save(tmp_path / "odd.json", make_squad(make_qa("a", ("Rouen", 21), is_impossible=True)))
    assert read_squad(odd)[0].answers == ("Rouen",)
    bare = {"id": "a", "question": "What?"}
    impossible = save(tmp_path / "impossible.json", make_squad(bare | {"is_impossible": True}))
    assert read_squad(impossible) == read_squad(impossible, 2) == [Question("a", "What?", CONTEXT, (), ())]
    with pytest.raises(UsageError, match="is impossible, so this looks like a SQuAD 2"):
        read_squad(impossible, 1)
    for content in (bare, bare | {"is_impossible": False}):
        with pytest.raises(UsageError, match=r"qas\[0\] has no list of answers; correct"):
            read_squad(save(tmp_path / "a.json", make_squad(content)))
    # 2.0 with is_impossible in one question only: the answers decide for the others
    some = make_squad(make_qa("a"), make_qa("b", ("Rouen", 21)), make_qa("c", is_impossible=True))
    assert [bool(question.answers) for question in read_squad(save(tmp_path / "b.json", some), 2)] == [
        False,
        True,
        False,
    ]


def test_starts_are_taken_as_they_are(tmp_path):
    answers = [("Rouen", 22), ("Paris", 10**400), ("Le", -7)]
    qa = make_qa("a", *answers)
    del qa["answers"][2]["answer_start"]
    question = read_squad(save(tmp_path / "a.json", make_squad(qa)), 1)[0]
    assert (question.answers, question.starts) == (("Rouen", "Paris", "Le"), (22, 10**400, -1))


def test_empty_context_and_question_are_questions(tmp_path):
    content = {"data": [{"paragraphs": [{"context": "", "qas": [make_qa("a", ("x", 0), question="")]}]}]}
    assert read_squad(save(tmp_path / "a.json", content), 1) == [Question("a", "", "", ("x",), (0,))]


QAS = "data[0].paragraphs[0].qas"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], ": Expected `object`, got `array`; correct it or give a file in SQuAD's format, {"),
        ({"Data": [], "v": 1}, ": Object missing required field `data`; correct it or give a file in SQuAD's format"),
        ({"data": []}, " has no questions; correct it or get the file again"),
        (
            {"data": [{"paragraphs": [{"qas": []}]}]},
            ": Object missing required field `context` - at `$.data[0].paragraphs[0]`",
        ),
        (make_squad(make_qa("")), f": Expected `str` of length >= 1 - at `$.{QAS}[0].id`; correct"),
        (
            make_squad(make_qa("a", answers=[{"answer_start": 1}])),
            f": Object missing required field `text` - at `$.{QAS}[0].answers[0]`",
        ),
        (
            make_squad(make_qa("a", ("b", 1)), make_qa("c", ("b", 1)), make_qa("a", ("b", 1))),
            f", {QAS}[2] has the same id 'a' as {QAS}[0]; correct it or get the file again",
        ),
    ],
)
def test_bad_squad_is_one_line(tmp_path, content, message):
    with pytest.raises(UsageError) as raised:
        read_squad(save(tmp_path / "dev.json", content))
    line = str(raised.value)
    assert line.startswith(f"{tmp_path / 'dev.json'}{message}")
    assert len(line.splitlines()) == 1


def test_long_values_are_cut_in_the_message(tmp_path):
    for content in ({"data": "no list " * 999}, make_squad(make_qa("a" * 9999), make_qa("a" * 9999))):
        with pytest.raises(UsageError) as raised:
            read_squad(save(tmp_path / "a.json", content))
        assert len(str(raised.value).removeprefix(str(tmp_path))) < 1500


# --- JSON


def test_json_with_byte_order_mark(tmp_path):
    file = write(tmp_path / "a.json", BOM + json.dumps(V1, ensure_ascii=False))
    assert read_json(file, Any) == V1
    assert read_squad(file, 1) == read_squad(save(tmp_path / "b.json", V1), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r": Input data was truncated; correct it or g"),
        (b'{"data": [\n  {"title": "a",\n}', r": JSON is malformed: .* \(byte 28\); correct"),
        (b'{"data": []}\n{"a": "c"}\n', r": JSON is malformed: trailing characters \(byte 14\); correct"),
        (b"id\tanswer\n", r": JSON is malformed: invalid character \(byte 0\); correct"),
        (b'{"a": %s}' % (b"[" * 1_000_000), f": {TOO_DEEP} .*; correct"),
    ],
)
def test_bad_json_is_one_line(tmp_path, content, message):
    file = write(tmp_path / "dev.json", content)
    for reader in (read_squad, read_answers, read_odds, read_nbest):
        with pytest.raises(UsageError, match=r"dev\.json" + message) as raised:
            reader(file)
        assert len(str(raised.value).splitlines()) == 1


def test_a_text_in_json_that_is_not_utf_8(tmp_path):
    with pytest.raises(
        UsageError, match=r"a\.json, 'q1': 'utf-8' codec can't decode byte 0xe9 in position 3: .*; convert the file"
    ):
        read_answers(write(tmp_path / "a.json", b'{"q1": "caf\xe9"}'))


# --- predictions


def test_predictions_in_the_order_of_their_file(tmp_path):
    answers = {"b": "Rouen", "a": "", "": "😀 Café"}
    found = read_answers(save(tmp_path / "predictions.json", answers))
    assert found == answers
    assert list(found) == ["b", "a", ""]
    odds = {"b": -3.25, "a": 0, "c": 10**300, "d": 1e-300, "e": -0.0}
    found = read_odds(save(tmp_path / "null_odds.json", odds))
    assert list(found.items()) == [(name, float(value)) for name, value in odds.items()]
    assert {type(value) for value in found.values()} == {float}
    nbest = {"b": [{"text": "Rouen", "probability": 0.75, "start_logit": 1.5}, {"text": "", "probability": 0}], "a": []}
    found = read_nbest(save(tmp_path / "nbest_predictions.json", nbest))
    assert list(found.items()) == [("b", [Candidate("Rouen", 0.75), Candidate("", 0.0)]), ("a", [])]
    for reader in (read_answers, read_odds, read_nbest):
        assert reader(save(tmp_path / "empty.json", {})) == {}


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (read_answers, ["Rouen"], ": Expected `object`, got `array`; correct it or get the file again"),
        (read_answers, V1, ", 'data': Expected `str`, got `array`; correct it or get the file again"),
        (read_odds, {"a": "0.5"}, ", 'a': Expected `float`, got `str`"),
        (read_odds, {"a": float("nan")}, ", 'a': Expected `float`, got `null`; correct"),
        (read_odds, {"a": 10**400}, ", 'a': Number out of range; correct"),
        (read_nbest, {"a": [{"text": "b"}]}, ", 'a': Object missing required field `probability` - at `$[0]`; correct"),
        (
            read_nbest,
            {"a": [{"text": "b", "probability": "1"}]},
            ", 'a': Expected `float`, got `str` - at `$[0].probability`",
        ),
        (
            read_nbest,
            {"a": [{"text": "b", "probability": -0.5}]},
            ", 'a': Expected `float` >= 0.0 - at `$[0].probability`; correct",
        ),
    ],
)
def test_bad_predictions_are_one_line(tmp_path, reader, content, message):
    with pytest.raises(UsageError) as raised:
        reader(save(tmp_path / "a.json", content))
    assert str(raised.value).startswith(f"{tmp_path / 'a.json'}{message}")
    assert len(str(raised.value).splitlines()) == 1


# --- what is written


good_text = st.text(st.characters(codec="utf-8"), max_size=8)
good_answers = st.lists(st.tuples(good_text.filter(str.strip), st.integers(-1)), max_size=3)
good_articles = st.lists(
    st.lists(st.tuples(good_text, st.lists(st.tuples(good_text, good_answers), max_size=3)), max_size=2), max_size=3
)


@given(articles=good_articles, ascii_only=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_squad_that_is_written_is_read(tmp_path, articles, ascii_only):
    expected: list[Question] = []
    content: dict[str, Any] = {"data": []}
    for paragraphs in articles:
        content["data"].append({"paragraphs": []})
        for context, asked in paragraphs:
            qas = []
            for question, answers in asked:
                name = str(len(expected))
                qas.append(make_qa(name, *answers, question=question, is_impossible=not answers))
                texts, starts = zip(*answers, strict=True) if answers else ((), ())
                expected.append(Question(name, question, context, tuple(texts), tuple(starts)))
            content["data"][-1]["paragraphs"].append({"context": context, "qas": qas})
    file = write(tmp_path / "a.json", json.dumps(content, ensure_ascii=ascii_only))
    versions = {
        None: bool(expected),
        1: bool(expected) and all(question.answers for question in expected),
        2: bool(expected),
    }
    for version, readable in versions.items():
        if readable:
            assert read_squad(file, version) == expected
        else:
            with pytest.raises(UsageError):
                read_squad(file, version)


# --- SQuAD on the Hub


SQUAD_SPLITS = {"train": "train", "dev": "validation"}


def make_squad_rows(content: dict[str, Any], **changed: list[Any]) -> datasets.Dataset:
    """Return the rows of the Hub's copy for the same questions."""
    columns: dict[str, list[Any]] = {name: [] for name in ("id", "title", "context", "question", "answers")}
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answers = {key: [answer[key] for answer in qa["answers"]] for key in ("text", "answer_start")}
                row = (qa["id"], article["title"], "".join(list(paragraph["context"])), qa["question"], answers)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    text, start = datasets.Value("string"), datasets.Value("int32")
    kinds = {"answers": {"text": datasets.List(text), "answer_start": datasets.List(start)}}
    features = datasets.Features({name: kinds.get(name, text) for name in columns})
    return datasets.Dataset.from_dict(columns | changed, features=features)


@pytest.fixture
def squad_hub(monkeypatch):
    """Replace the Hub and return the data sets that it serves, for the test to fill."""
    found: dict[tuple[str, str], datasets.DatasetDict] = {}
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: found[name, config])
    return found


@pytest.mark.parametrize(
    ("name", "config", "content"),
    [("rajpurkar/squad", "plain_text", V1), ("rajpurkar/squad_v2", "squad_v2", V2)],
)
def test_squad_files_and_the_hub_give_equal_questions(tmp_path, squad_hub, name, config, content):
    rows = make_squad_rows(content)
    squad_hub[name, config] = datasets.DatasetDict({"train": rows, "validation": rows.select([1])})
    found = read_squad_copy(name, SQUAD_SPLITS)
    assert list(found) == ["train", "dev"]
    assert found["train"] == read_squad(save(tmp_path / "a.json", content))
    assert found["dev"] == found["train"][1:2]
    assert found["train"][0].context is found["train"][1].context
    assert list(read_squad_copy(name, {"dev": "validation"})) == ["dev"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": ["a", "b", "a"]}, r"train, row 3 has the same id 'a' as row 1; correct"),
        (
            {"answers": [{"text": ["a", "b"], "answer_start": [1]}] * 3},
            r"train, row 1, answers: text and answer_start have different lengths; give",
        ),
    ],
)
def test_bad_squad_on_the_hub_is_one_line(squad_hub, changed, message):
    rows = make_squad_rows(V1, **changed)
    squad_hub["rajpurkar/squad", "plain_text"] = datasets.DatasetDict({"train": rows})
    with pytest.raises(UsageError, match=r"^rajpurkar/squad:plain_text, " + message) as raised:
        read_squad_copy("rajpurkar/squad", {"train": "train"})
    assert len(str(raised.value).splitlines()) == 1


def test_squad_on_the_hub_without_a_split_a_column_or_rows(squad_hub):
    rows = make_squad_rows(V1)
    for served, message in (
        (
            {"train": rows},
            r"rajpurkar/squad:plain_text has no split 'validation'; found train; give the official",
        ),
        (
            {"validation": rows, "train": rows.remove_columns("context")},
            r"train has no column 'context'; found .*; name the columns",
        ),
        (
            {"validation": rows, "train": rows.select([])},
            r"rajpurkar/squad:plain_text, train has no rows;",
        ),
    ):
        squad_hub["rajpurkar/squad", "plain_text"] = datasets.DatasetDict(served)
        with pytest.raises(UsageError, match=message):
            read_squad_copy("rajpurkar/squad", SQUAD_SPLITS)


# --- SWAG


SWAG_HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
SWAG = (
    SWAG_HEADER
    + """0,anetv_1,7,He sits. He,He sits.,He,gold,stands up.,"eats, then drinks.","says ""no"".",'s asleep.,3
1,anetv_1,8,It rains. She,It rains.,She,gold,a b,c d,e f,g h,0
"""
)
SITUATIONS = [
    Situation("He sits.", "He", ("stands up.", "eats, then drinks.", 'says "no".', "'s asleep."), 3),
    Situation("It rains.", "She", ("a b", "c d", "e f", "g h"), 0),
]
SWAG_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def drop_cell(text: str, place: int) -> str:
    """Remove one cell from every line of SWAG."""
    rows = list(csv.reader(text.splitlines()))
    return "".join(
        ",".join(f'"{x.replace(chr(34), chr(34) * 2)}"' for i, x in enumerate(row) if i != place) + "\n" for row in rows
    )


def test_swag_with_commas_and_quotes(tmp_path):
    assert read_swag(write(tmp_path / "train.csv", SWAG)) == SITUATIONS


def test_swag_columns_go_by_name(tmp_path):
    rows = [row[:1] + row[:0:-1] for row in csv.reader(SWAG.splitlines())]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert read_swag(tmp_path / "train.csv") == SITUATIONS


def test_a_test_file_of_swag_has_no_labels(tmp_path):
    unlabelled = [Situation(x.context, x.start, x.endings, None) for x in SITUATIONS]
    file = write(tmp_path / "test.csv", drop_cell(SWAG, 11))
    assert read_swag(file, labelled=False) == unlabelled
    assert read_swag(write(tmp_path / "other.csv", SWAG.replace(",3\n", ",-1\n")), labelled=False) == unlabelled
    with pytest.raises(UsageError, match=r"test\.csv has no column 'label'; found .*; its first line must"):
        read_swag(file)


LINE = "2,v,9,A. B,A.,B,gold,a b,c d,e f,g h,1\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r" has no rows; give a table with a header and at least one row"),
        (
            SWAG.replace("sent1", "sent"),
            r" has no column 'sent1'; found .* \(nearest: 'sent'\); its first line must",
        ),
        (SWAG.replace("label", "gold"), r" has no column 'label'; found "),
        (drop_cell(SWAG, 10), r" has no column 'ending3'; found .*; its first line must"),
        (SWAG + LINE.replace(",g h", ""), r", line 4 has 11 cells, but the header 12; correct the line"),
        (SWAG + LINE.replace("e f", ""), r", line 4: ending2 is empty, expected four endings; correct the line"),
        (SWAG + LINE.replace(",1\n", ",4\n"), r", line 4: label '4' must be one of 0, 1, 2, 3; correct the line"),
        (SWAG + LINE.replace(",1\n", ",\n"), r", line 4: label '' must be one of"),
        # a row of several lines is located by its first one
        (
            SWAG + LINE.replace("c d", '"c\n\nd"') + LINE.replace(",1\n", ",x\n"),
            r", line 7 \(record 4\): label 'x' ",
        ),
    ],
)
def test_bad_swag_is_one_line(tmp_path, content, message):
    with pytest.raises(UsageError, match=r"dev\.csv" + message) as raised:
        read_swag(write(tmp_path / "dev.csv", content))
    assert len(str(raised.value).splitlines()) == 1
    assert len(str(raised.value)) < len(str(tmp_path)) + 400


def make_swag_rows(found: list[Situation], labels: list[int] | None = None, **changed: list[Any]) -> datasets.Dataset:
    """Return the rows of the Hub's copy; a test set has the label -1."""
    texts = {"sent1": [x.context for x in found], "sent2": [x.start for x in found]}
    texts |= {f"ending{place}": [x.endings[place] for x in found] for place in range(4)}
    features = {name: datasets.Value("string") for name in ("video-id", *texts)}
    features["label"] = datasets.ClassLabel(names=list("0123"))
    columns = {"video-id": ["anetv_1"] * len(found)} | texts
    columns["label"] = [-1 if x.answer is None else x.answer for x in found] if labels is None else labels
    return datasets.Dataset.from_dict(columns | changed, features=datasets.Features(features))


@pytest.fixture
def swag_hub(monkeypatch):
    """Replace the Hub and return the data sets that it serves, for the test to fill."""
    found = datasets.DatasetDict()
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: {("allenai/swag", "regular"): found}[name])
    return found


def test_swag_files_and_the_hub_give_equal_questions(tmp_path, swag_hub):
    train = read_swag(write(tmp_path / "train.csv", SWAG))
    test = read_swag(write(tmp_path / "test.csv", SWAG), labelled=False)
    swag_hub |= {"train": make_swag_rows(train), "validation": make_swag_rows(train[1:])}
    assert read_swag_copy(SWAG_SPLITS, ["test"]) == {"train": train, "dev": train[1:]}
    swag_hub["test"] = make_swag_rows(test)
    assert read_swag_copy(SWAG_SPLITS, ["test"]) == {"train": train, "dev": train[1:], "test": test}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": [-1, -1]}, r"allenai/swag:regular, train has no labels; only splits with labels can be trained on"),
        ({"labels": [1, -1]}, r"allenai/swag:regular, train, row 2: label '' must be one of 0, 1, 2, 3"),
        ({"ending1": ["a", None]}, r"allenai/swag:regular, train, row 2: ending1 is empty"),
    ],
)
def test_bad_swag_on_the_hub_is_one_line(swag_hub, changed, message):
    swag_hub["train"] = make_swag_rows(SITUATIONS, **changed)
    with pytest.raises(UsageError, match=message) as raised:
        read_swag_copy({"train": "train"})
    assert len(str(raised.value).splitlines()) == 1


def test_swag_on_the_hub_without_a_split_or_a_column(swag_hub):
    swag_hub["train"] = make_swag_rows(SITUATIONS)
    with pytest.raises(
        UsageError, match=r"allenai/swag:regular has no split 'validation'; found train; give the official"
    ):
        read_swag_copy(SWAG_SPLITS, ["test"])
    swag_hub["train"] = swag_hub["train"].remove_columns("ending3")
    with pytest.raises(
        UsageError, match=r"allenai/swag:regular, train has no column 'ending3'; found .*; give the official"
    ):
        read_swag_copy({"train": "train"})
