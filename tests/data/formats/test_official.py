"""Official files of GLUE and SWAG: what is written is read, bad files by line, and the Hub's copies."""

import shutil
from typing import Any

import datasets
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertkit.data.formats import hub
from bertkit.data.formats.official import read_hub, read_tsv
from bertkit.data.formats.swag import Situation, read_swag, read_swag_copy
from tests.data.conftest import write

BOM = "\ufeff"
HEADER = "sentence\tlabel\n"
QQP = """id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate
133273\t213221\t213222\tHow is the life of a math student?\tWhich level is enough?\t0
402555\t536040\t536041\tHow do I control my horny emotions?

360472\t364011\t490273\tWhat causes stool color to change?\tWhat can cause it?\t1
"""


@pytest.mark.parametrize("content", [QQP.rstrip(), QQP + "\n\n\r\n"], ids=["no last newline", "blank lines at the end"])
def test_qqp_with_broken_rows(content, tmp_path):
    file, said = write(tmp_path / "train.tsv", content), []
    table = read_tsv(file, {"second": "question2", "label": "is_duplicate"}, skip_broken=True, report=said.append)
    assert table.find("label").to_pylist() == ["0", "1"]
    assert table.find("second").to_pylist() == ["Which level is enough?", "What can cause it?"]
    assert (list(table.lines), said) == ([2, 5], [f"{file}: skipping 1 broken rows"])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\0"), max_size=20)


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=10),
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
    table = read_tsv(file, columns, width=0 if header else 3)
    assert list(zip(*(table.find(name).to_pylist() for name in ("first", "second", "third")), strict=True)) == rows
    assert list(table.lines) == list(range(1 + header, 1 + header + len(rows)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        HEADER,
        HEADER + "a\tb\t0\n",
        "sentence\tlabels\na\t0\n",
        "\t".join(f"{number} {'word ' * 99}" for number in range(99)) + "\n",
    ],
    ids=["nothing", "no row", "cells", "names", "long texts"],
)
def test_bad_file_is_one_line(tmp_path, content, refused):
    with refused() as error:
        read_tsv(write(tmp_path / "dev.tsv", content), {"text": "sentence", "label": "label"})
    assert len(str(error.value)) < 2000


def test_file_that_cannot_be_opened(tmp_path, refused):
    file = write(tmp_path / "a.tsv", HEADER)
    for path in (tmp_path / "gone.tsv", tmp_path, file / "b.tsv"):
        with refused():
            read_tsv(path, {"text": "sentence"})


FEATURES = {
    "sentence1": datasets.Value("string"),
    "label": datasets.ClassLabel(names=["entailment", "neutral", "contradiction"]),
    "score": datasets.Value("float32"),
}
CELLS = {"sentence1": ["a", "b", "c"], "label": [1, -1, 2], "score": [3.8, 5.0, 0.067]}
ROWS = datasets.Dataset.from_dict(CELLS, features=datasets.Features(FEATURES))


def test_bad_data_on_the_hub(served, refused):
    served["nyu-mll/glue", "mnli"] = {"train": ROWS, "none": ROWS.select([])}
    for split, column in (("train", "sentence"), ("none", "sentence1")):
        with refused():
            read_hub("nyu-mll/glue", "mnli", {"train": split}, {"text": column})


def test_copy_in_the_cache_does_where_the_hub_cannot(tmp_path, monkeypatch, refused):
    ROWS.to_parquet(tmp_path / "train.parquet")
    data_files = {"train": [str(tmp_path / "train.parquet")]}
    builder = Parquet(str(tmp_path), dataset_name="glue", config_name="mnli", hash="0123", data_files=data_files)
    builder.download_and_prepare()
    # A download from the Hub names the folder after the owner too, and not after the data files.
    cache = tmp_path / "cache"
    shutil.move(next((tmp_path / "glue").glob("mnli*")), cache / "nyu-mll___glue" / "mnli")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(hub, "explain_hub_trouble", lambda *_: "the Hub cannot be reached (ConnectError)")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the Hub"))
    columns = {"first": "sentence1", "label": "label", "number": "score"}
    table = read_hub("nyu-mll/glue", "mnli", {"train": "train"}, columns)["train"]
    assert table.table.to_pydict() == {
        "first": ["a", "b", "c"],
        "label": ["neutral", "", "contradiction"],
        "number": ["3.8", "5.0", "0.067"],  # not the float64 3.799999952316284
    }
    for name, config in (("nyu-mll/glue", "cola"), ("nyu-mll/other", "mnli")):
        with refused():
            read_hub(name, config, {"train": "train"}, columns)


# --- SWAG

SWAG = """,video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label
0,anetv_1,7,He sits. He,He sits.,He,gold,stands up.,"eats, then drinks.","says ""no"".",'s asleep.,3
1,anetv_1,8,It rains. She,It rains.,She,gold,a b,c d,e f,g h,0
"""
SITUATIONS = [
    Situation("He sits.", "He", ("stands up.", "eats, then drinks.", 'says "no".', "'s asleep."), 3),
    Situation("It rains.", "She", ("a b", "c d", "e f", "g h"), 0),
]
UNLABELLED = [Situation(x.context, x.start, x.endings, None) for x in SITUATIONS]
LINE = "2,v,9,A. B,A.,B,gold,a b,c d,e f,g h,1\n"


def test_swag_has_labels_unless_it_is_the_test_file(tmp_path):
    assert read_swag(write(tmp_path / "train.csv", SWAG)) == SITUATIONS
    assert read_swag(write(tmp_path / "test.csv", SWAG.replace(",3\n", ",-1\n")), labelled=False) == UNLABELLED


@pytest.mark.parametrize(
    "content",
    [
        SWAG.replace("label", "gold"),
        SWAG + LINE.replace("e f", ""),
        SWAG + LINE.replace(",1\n", ",4\n"),
        SWAG + LINE.replace("c d", '"c\n\nd"') + LINE.replace(",1\n", ",\n"),
    ],
    ids=["label", "empty", "4", "lines"],
)
def test_bad_swag_is_one_line(tmp_path, content, refused):
    with refused():
        read_swag(write(tmp_path / "dev.csv", content))


def make_swag_rows(found: list[Situation], **changed: list[Any]) -> datasets.Dataset:
    """Return the rows of the Hub's copy; a test set has the label -1."""
    columns = {"sent1": [x.context for x in found], "sent2": [x.start for x in found]}
    columns |= {f"ending{number}": [x.endings[number] for x in found] for number in range(4)}
    features = dict.fromkeys(columns, datasets.Value("string")) | {"label": datasets.ClassLabel(names=list("0123"))}
    columns["label"] = [-1 if x.answer is None else x.answer for x in found]
    return datasets.Dataset.from_dict(columns | changed, features=datasets.Features(features))


def test_swag_on_the_hub_has_the_questions_of_the_files(served, refused):
    splits, name = {"train": "train", "dev": "validation", "test": "test"}, ("allenai/swag", "regular")
    served[name] = {"train": make_swag_rows(SITUATIONS), "validation": make_swag_rows(SITUATIONS[1:])}
    found = {"train": SITUATIONS, "dev": SITUATIONS[1:]}
    assert read_swag_copy(splits, ["test"]) == found
    served[name]["test"] = make_swag_rows(UNLABELLED)
    assert read_swag_copy(splits, ["test"]) == found | {"test": UNLABELLED}
    for changed in ({"label": [-1, -1]}, {"label": [1, -1]}, {"ending1": ["a", None]}):
        served[name] = {"train": make_swag_rows(SITUATIONS, **changed)}
        with refused():
            read_swag_copy({"train": "train"})
    served[name] = {"train": make_swag_rows(SITUATIONS)}
    with refused():
        read_swag_copy(splits, ["test"])
