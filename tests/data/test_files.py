"""Official files as they are: fixtures in the GLUE download's forms, bad files by line, and the Hub's copy."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.data import files
from bertkit.data.files import Table, read_hub, read_tsv
from bertkit.errors import UsageError

BOM = "\ufeff"
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
    assert table.columns == {
        "label": ["1", "0"],
        "first": ['He said "it is over .', "\" Yucaipa owned Dominick 's"],
        "second": ['He said it was " over " .', "Yucaipa bought Dominick 's"],
    }
    assert (table.lines, table.broken) == ([2, 3], [])
    assert table.locate(1) == f"{file}, line 3"


def test_qqp_with_broken_rows(tmp_path):
    file = write(tmp_path / "train.tsv", QQP)
    with pytest.raises(UsageError, match=r"train\.tsv, line 3 has 4 columns and 6 were expected; mend the line"):
        read_tsv(file, QQP_COLUMNS)
    table = read_tsv(file, QQP_COLUMNS, skip_broken=True)
    assert table.columns["label"] == ["0", "1"]
    assert table.columns["second"] == ["Which level is enough?", "What can cause it?"]
    assert (table.lines, table.broken) == ([2, 5], [3, 4])
    assert table.locate(1) == f"{file}, line 5"


@pytest.mark.parametrize("width", [4, None])
def test_cola_without_header(tmp_path, width):
    table = read_tsv(write(tmp_path / "train.tsv", COLA), {"label": 1, "text": 3}, width=width)
    assert table.columns == {
        "label": ["1", "0"],
        "text": ["Our friends won't buy this analysis.", "They drank the pub the pub."],
    }
    assert table.lines == [1, 2]


def test_first_row_of_a_file_without_header_can_be_the_broken_one(tmp_path):
    file = write(tmp_path / "train.tsv", "gj04\t1\n" + COLA)
    for width in (4, None):
        with pytest.raises(UsageError, match=r"line 1 has 2 columns and 4 were expected"):
            read_tsv(file, {"label": 1, "text": 3}, width=width)
    table = read_tsv(file, {"label": 1}, width=4, skip_broken=True)
    assert (table.columns["label"], table.broken) == (["1", "0"], [1])


def test_stsb_scores_stay_texts_and_a_test_file_has_none(tmp_path):
    columns = {"first": "sentence1", "label": "score"}
    table = read_tsv(write(tmp_path / "dev.tsv", STSB), columns)
    assert table.columns == {
        "first": ["A plane is taking off.", "A man is playing a flute."],
        "label": ["5.000", "3.800"],
    }
    rows = [line.rpartition("\t")[0] for line in STSB.splitlines()]
    test = write(tmp_path / "test.tsv", "\n".join(rows) + "\n")
    assert read_tsv(test, {"first": "sentence1"}).columns == {"first": table.columns["first"]}
    with pytest.raises(
        UsageError, match=r"test\.tsv has no column 'score' but 'index', .*'sentence2'.*first line must"
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
    assert table.columns == {
        "first": ["The new rights are nice"],
        "second": ["They are nice"],
        "label": ["neutral"],
    }


ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh  "


def test_only_line_feeds_end_a_row(tmp_path):
    table = read_tsv(write(tmp_path / "a.tsv", f"{ODD}\tlabel\n {ODD}\t0\n"), {"text": ODD, "label": "label"})
    assert table.columns == {"text": [f" {ODD}"], "label": ["0"]}


@pytest.mark.parametrize(
    "content",
    [QQP.replace("\n", "\r\n"), QQP.rstrip(), QQP + "\n\n\r\n", BOM + QQP],
    ids=["CRLF", "no last newline", "blank lines at the end", "byte order mark"],
)
def test_forms_of_the_same_file(tmp_path, content):
    expected = read_tsv(write(tmp_path / "a.tsv", QQP), QQP_COLUMNS, skip_broken=True)
    table = read_tsv(write(tmp_path / "b.tsv", content), QQP_COLUMNS, skip_broken=True)
    assert (table.columns, table.lines, table.broken) == (expected.columns, expected.lines, expected.broken)


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
    assert list(zip(*(table.columns[name] for name in ("first", "second", "third")), strict=True)) == rows
    assert table.lines == list(range(1 + header, 1 + header + len(rows)))


# --- bad files


HEADER = "sentence\tlabel\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty; download the official file again"),
        (b"\n\r\n", r"is empty; download the official file again"),
        (HEADER, r"has no rows of 2 columns; download"),
        (HEADER + "a\nb\n", r"line 2 has 1 column and 2 were expected; mend the line or download"),
        (HEADER + "a\t0\n\nb\t1\n", r"line 3 has 1 column and 2 were expected"),
        (HEADER + "a\tb\t0\n", r"line 2 has 3 columns and 2 were expected"),
        ("a\t0\nb\t1\n", r"has no column 'sentence' but 'a', '0'; its first line must name the columns"),
        ("\nsentence\tlabel\na\t0\n", r"has no column 'sentence' but ''"),
        (
            "sentence\tlabels\na\t0\n",
            r"has no column 'label' but 'sentence', 'labels' \(nearest: 'labels'\); its first",
        ),
        (HEADER.encode() + b"a\t0\ncaf\xe9\t1\n", r"line 3 is not UTF-8 \(byte 0xe9 in place 4\); convert .*iconv"),
        (HEADER.encode() + b"a\t0\n\0\t1\n", r"line 3 has a NUL byte, .*; give text in UTF-8"),
        (HEADER.encode("utf-16"), r"line 1 has a NUL byte"),
    ],
)
def test_bad_file_is_one_line(tmp_path, content, message):
    file = write(tmp_path / "dev.tsv", content)
    with pytest.raises(UsageError, match=rf"dev\.tsv,? {message}") as raised:
        read_tsv(file, {"text": "sentence", "label": "label"})
    assert "\n" not in str(raised.value)


def test_only_broken_rows(tmp_path):
    file = write(tmp_path / "dev.tsv", HEADER + "a\nb\n")
    with pytest.raises(UsageError, match=r"dev\.tsv has no rows of 2 columns \(2 have another number\)"):
        read_tsv(file, {"text": "sentence"}, skip_broken=True)


def test_blank_line_in_a_file_of_one_column_is_an_empty_text(tmp_path):
    table = read_tsv(write(tmp_path / "predictions.tsv", "1\n\n0\n\n"), {"label": 0}, width=1)
    assert table.columns == {"label": ["1", "", "0"]}


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

    monkeypatch.setattr(files, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load)


SPLITS = {"train": "train", "dev": "validation_matched", "test": "test_matched"}
COLUMNS = {"first": "sentence1", "label": "label", "number": "score"}


@pytest.mark.usefixtures("_hub")
def test_hub_gives_texts_as_a_file_does_and_no_labels_for_a_test_set():
    tables = read_hub("nyu-mll/glue", "mnli", SPLITS, COLUMNS)
    assert list(tables) == ["train", "dev", "test"]
    assert tables["train"].columns == {
        "first": ["text 0", "text 1", "text 2"],
        "label": ["neutral", "entailment", "contradiction"],
        "number": ["3.8", "5.0", "0.067"],  # not the float64 3.799999952316284
    }
    assert tables["test"].columns == {"first": ["text 0", "text 1"]}
    assert (list(tables["train"].lines), list(tables["train"].broken)) == ([1, 2, 3], [])
    assert tables["train"].locate(2) == "nyu-mll/glue:mnli, train, line 3"
    assert read_hub("nyu-mll/glue", "mnli", {"dev": "validation_matched"}, {"i": "idx"})["dev"].columns == {"i": ["0"]}


@pytest.mark.usefixtures("_hub")
def test_files_and_the_hub_give_equal_columns(tmp_path):
    lines = ["first\tgold", "text 0\tneutral", "text 1\tentailment", "text 2\tcontradiction"]
    file = read_tsv(write(tmp_path / "a.tsv", "\n".join(lines)), {"a": "first", "b": "gold"})
    hub = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, {"a": "sentence1", "b": "label"})["train"]
    assert isinstance(file, Table)
    assert isinstance(hub, Table)
    assert file.columns == hub.columns


@pytest.mark.usefixtures("_hub")
def test_one_missing_label_is_an_empty_text(monkeypatch):
    rows = datasets.DatasetDict({"train": make_rows([1, -1, None])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: rows)
    table = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, {"label": "label"})["train"]
    assert table.columns == {"label": ["neutral", "", ""]}


@pytest.mark.usefixtures("_hub")
def test_optional_split():
    splits = SPLITS | {"dev_mismatched": "validation_mismatched"}
    assert list(read_hub("nyu-mll/glue", "mnli", splits, COLUMNS, optional={"dev_mismatched"})) == list(SPLITS)
    message = (
        r"nyu-mll/glue:mnli has no split 'validation_mismatched' but train, validation_matched, test_matched; give"
    )
    with pytest.raises(UsageError, match=message):
        read_hub("nyu-mll/glue", "mnli", splits, COLUMNS, optional={"test"})


@pytest.mark.usefixtures("_hub")
def test_bad_hub_data_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match=r"mnli, train has no column 'sentence' but .* \(nearest: 'sentence1'\); give"):
        read_hub("nyu-mll/glue", "mnli", SPLITS, {"text": "sentence"})
    with pytest.raises(
        UsageError, match=r"glue:mnlii cannot be loaded \(BuilderConfig 'mnlii' not found.*; give"
    ) as raised:
        read_hub("nyu-mll/glue", "mnlii", SPLITS, COLUMNS)
    assert "\n" not in str(raised.value)
    empty = datasets.DatasetDict({"train": make_rows([])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: empty)
    with pytest.raises(
        UsageError, match=r"nyu-mll/glue:mnli, train has no rows; give the official files with --data DIR"
    ):
        read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)


def test_datasets_is_not_installed(monkeypatch):
    monkeypatch.setattr(files, "find_hub_trouble", lambda *_: None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"glue:mnli cannot be loaded \(.*datasets.*; give the official files"):
        read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)


@pytest.fixture
def _cache(tmp_path, monkeypatch):
    """The cache of `datasets` as a download leaves it, and a Hub out of reach."""
    make_rows([1, 0, 2]).to_parquet(tmp_path / "train.parquet")
    data_files = {"train": [str(tmp_path / "train.parquet")]}
    builder = Parquet(str(tmp_path), dataset_name="glue", config_name="mnli", hash="0123", data_files=data_files)
    builder.download_and_prepare()
    # A download from the Hub names the folder after the owner too, and not after the data files.
    cache = tmp_path / "cache"
    shutil.move(next((tmp_path / "glue").glob("mnli*")), cache / "nyu-mll___glue" / "mnli")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(files, "find_hub_trouble", lambda *_: "the Hub cannot be reached (ConnectError)")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the Hub"))


@pytest.mark.usefixtures("_cache")
def test_copy_in_the_cache_does_where_the_hub_cannot():
    table = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, COLUMNS)["train"]
    assert table.columns["label"] == ["neutral", "entailment", "contradiction"]
    assert table.columns["number"] == ["3.8", "5.0", "0.067"]


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(("name", "config"), [("nyu-mll/glue", "cola"), ("nyu-mll/other", "mnli"), ("glue", "mnli")])
def test_trouble_without_a_copy(name, config):
    with pytest.raises(
        UsageError, match=r"the Hub cannot be reached \(ConnectError\); give the official files"
    ) as raised:
        read_hub(name, config, {"train": "train"}, COLUMNS)
    assert "\n" not in str(raised.value)


def test_offline_answer_is_quick(tmp_path):
    code = (
        "from bertkit.data.files import read_hub\nfrom bertkit.errors import UsageError\n"
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
