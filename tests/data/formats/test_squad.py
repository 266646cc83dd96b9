"""A person's own questions: tables, files in SQuAD's form, several files, folders and data sets on the Hub."""

import gzip
import json

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from bertkit.data.formats import hub
from bertkit.data.formats.squad import find_only, read_own_squad, read_squad
from bertkit.data.spans import Question, is_placed
from bertkit.errors import UsageError
from tests.official import list_questions, write_questions, write_squad

CONTEXT = "Ada wrote it in 1843. Ada was 27."
FORMS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
GOOD = {"id": "a", "question": "Who wrote it?", "context": CONTEXT, "answers": {"text": ["Ada"], "answer_start": [0]}}


def read(path, version=1, group=""):
    return read_own_squad(str(path), version, group)["train"].questions


def ask(tmp_path, version=2, **row):
    """Read GOOD with other cells."""
    return read(write_questions(tmp_path / "a.jsonl", [GOOD | row]), version)[0]


@pytest.mark.parametrize("version", [1, 2])
def test_every_form_has_the_questions_of_the_official_file(tmp_path, version):
    folder = write_squad(tmp_path / "squad", version)
    official = folder / f"train-v{ {1: 1.1, 2: 2.0}[version] }.json"
    expected = read_squad(official, version)
    rows = list_questions(official)
    assert read(official, version) == expected
    for form in FORMS:
        assert read(write_questions(tmp_path / f"a{form}", rows), version) == expected, form
    (tmp_path / "b.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(official.read_bytes()))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "b.parquet")
    listed = [
        row
        | {
            "answers": [
                dict(zip(row["answers"], pair, strict=True)) for pair in zip(*row["answers"].values(), strict=True)
            ]
        }
        for row in rows
    ]
    parquet.write_table(pa.Table.from_pylist(listed), tmp_path / "c.parquet")
    write_questions(tmp_path / "c.jsonl", listed)
    for name in ("b.json", "b.jsonl.gz", "c.json.gz", "b.parquet", "c.parquet", "c.jsonl"):
        assert read(tmp_path / name, version) == expected, name
    content = json.loads(official.read_text())
    article = content["data"].pop(0)
    (tmp_path / "first.json").write_text(json.dumps(content | {"data": [article]}))
    (tmp_path / "second.json").write_text(json.dumps(content))
    write_questions(tmp_path / "second.parquet", [row for row in rows if row["title"] != article["title"]])
    for second in ("second.json", "second.parquet"):
        assert read(f"{tmp_path / 'first.json'},{tmp_path / second}", version) == expected


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path):
    assert read(write_questions(tmp_path / "a,b.jsonl", [GOOD])) == read(write_questions(tmp_path / "a.jsonl", [GOOD]))
    with pytest.raises(UsageError, match=r"b\.jsonl does not exist"):
        read(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")


def test_splits_of_a_folder_may_have_different_forms(tmp_path):
    folder = write_squad(tmp_path, 1)
    (folder / "train-v1.1.json").rename(folder / "train.json")
    rows = list_questions(folder / "dev-v1.1.json")
    write_questions(folder / "validation.parquet", rows[:9])
    write_questions(folder / "test.csv", [row | {"answers": None} for row in rows[9:]])
    found = read_own_squad(str(folder), 1)
    assert {split: len(part.questions) for split, part in found.items()} == {"train": 24, "dev": 9, "test": 15}
    assert {split: part.is_labelled for split, part in found.items()} == {"train": True, "dev": True, "test": False}
    assert all(question.answers == () for question in found["test"].questions)


@pytest.mark.parametrize("cell", ["missing", "", None])
def test_a_test_split_without_any_answers_is_unlabelled_and_another_split_is_not(tmp_path, cell):
    row = {key: value for key, value in GOOD.items() if key != "answers"} | (
        {} if cell == "missing" else {"answers": cell}
    )
    write_questions(tmp_path / "train.jsonl", [GOOD])
    write_questions(tmp_path / "test.jsonl", [row])
    assert not read_own_squad(str(tmp_path), 2)["test"].is_labelled
    write_questions(tmp_path / "test.jsonl", [row, GOOD | {"id": "b"}])
    assert [x.answers for x in read_own_squad(str(tmp_path), 2)["test"].questions] == [(), ("Ada",)]
    with pytest.raises(UsageError, match=r"test.jsonl, line 1 has no answer, .* use --version 2"):
        read_own_squad(str(tmp_path), 1)
    write_questions(tmp_path / "dev.jsonl", [row])
    with pytest.raises(UsageError, match=r"dev.jsonl(, line 1 has no answer| has no column 'answers')"):
        read_own_squad(str(tmp_path), 1)


def test_an_unlabelled_file_in_the_official_form(tmp_path):
    write_questions(tmp_path / "train.jsonl", [GOOD])
    asked = {"id": "b", "question": "Who?"}
    for extra, is_labelled in (({}, False), ({"is_impossible": True}, True)):
        content = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [asked | extra]}]}]}
        (tmp_path / "test.json").write_text(json.dumps(content))
        assert read_own_squad(str(tmp_path), 2)["test"].is_labelled == is_labelled


def test_a_data_set_on_the_hub(monkeypatch, tmp_path):
    rows = list_questions(write_squad(tmp_path, 2) / "train-v2.0.json")
    found = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in ("train", "validation")})
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: found)
    read = read_own_squad("owner/questions", 2)
    expected = read_squad(tmp_path / "train-v2.0.json", 2)
    assert {split: part.questions for split, part in read.items()} == {"train": expected, "dev": expected}
    assert read["dev"].source == "owner/questions, validation"


# --- Single rows


@pytest.mark.parametrize(
    ("context", "text", "start"),
    [
        ("an Ada", "Ada", 3),
        ("Ada, Ada", "Ada", -1),
        ("Ada", "Bob", -1),
        ("aaa", "aa", -1),
        ("a", "", -1),
        ("", "a", -1),
    ],
)
def test_a_text_is_found_where_it_is_only_once(context, text, start):
    """ "aa" is in "aaa" twice, at 0 and at 1."""
    assert find_only(context, text) == start


@pytest.mark.parametrize(
    ("answers", "starts"),
    [
        ({"text": ["1843"]}, (16,)),
        ({"text": ["1843"], "answer_start": None}, (16,)),
        ({"text": ["1843", "27"], "answer_start": [None, 30]}, (16, 30)),
        ([{"text": "1843"}, {"text": "in 1843", "answer_start": 13}], (16, 13)),
        ({"text": ["Ada"]}, (-1,)),
        ({"text": ["Ada"], "answer_start": [5]}, (5,)),
        ('{"text": ["1843"]}', (16,)),
    ],
)
def test_an_answer_without_a_start_has_the_only_place(tmp_path, answers, starts):
    """The context is "Ada wrote it in 1843. Ada was 27."; Ada is there twice, so its place is not known."""
    question = ask(tmp_path, answers=answers)
    assert question.starts == starts
    assert is_placed(question) == (question.answers[0] != "Ada")


def test_the_official_form_may_leave_out_starts_too(tmp_path):
    content = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [GOOD | {"answers": [{"text": "1843"}]}]}]}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert read(tmp_path / "a.json")[0].starts == (16,)
    assert read_squad(tmp_path / "a.json", 1)[0].starts == (16,)


@pytest.mark.parametrize("answers", [None, "", [], {"text": [], "answer_start": []}, {"text": []}])
def test_no_answers_are_for_version_2(tmp_path, answers):
    assert ask(tmp_path, answers=answers) == Question("a", "Who wrote it?", CONTEXT, (), ())
    assert ask(tmp_path, answers=answers, is_impossible=True).answers == ()
    with pytest.raises(UsageError, match=r"a.jsonl, line 1 has no answer, so this .* use --version 2"):
        ask(tmp_path, version=1, answers=answers)


def test_an_id_is_made_of_question_and_context(tmp_path):
    row = {key: GOOD[key] for key in ("question", "context", "answers")}
    rows = [row, row | {"question": "When?"}, row, row | {"id": "mine"}, row | {"id": ""}]
    first, other, second, given, third = (question.id for question in read(write_questions(tmp_path / "a.jsonl", rows)))
    assert (second, given, third) == (f"{first}-2", "mine", f"{first}-3")
    assert len({first, other}) == 2
    assert [x.id for x in read(write_questions(tmp_path / "b.csv", rows[1::-1]))] == [other, first], "not of the order"
    halves = [write_questions(tmp_path / f"{name}.jsonl", part) for name, part in (("x", rows[:2]), ("y", rows[2:]))]
    assert [x.id for x in read(",".join(map(str, halves)))] == [first, other, second, "mine", third]


def test_equal_contexts_share_one_text(tmp_path):
    rows = [GOOD | {"id": str(number)} for number in range(3)]
    assert len({id(question.context) for question in read(write_questions(tmp_path / "a.jsonl", rows))}) == 1


def test_a_column_groups_questions_and_the_title_does_so_in_the_official_form(tmp_path):
    official = write_squad(tmp_path / "squad", 1) / "train-v1.1.json"
    table = write_questions(tmp_path / "a.csv", list_questions(official))
    groups = [question.group for question in read(table, group="title")]
    assert groups == [question.group for question in read(official, group="title")]
    assert set(groups) == {"Article_0", "Article_1"}
    assert {question.group for question in read(table)} == {""}
    for path in (table, official):
        with pytest.raises(UsageError, match="no column 'customer'"):
            read(path, group="customer")


WRITTEN = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.tuples(WRITTEN, WRITTEN, WRITTEN.filter(str.strip), st.integers(-2, 9)), min_size=1))
def test_any_texts_are_read_as_they_are_written(rows):
    import tempfile
    from pathlib import Path

    found = [
        {
            "id": str(number),
            "question": question,
            "context": context,
            "answers": {"text": [text], "answer_start": [start]},
        }
        for number, (question, context, text, start) in enumerate(rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for form in (".jsonl", ".parquet"):
            questions = read(write_questions(Path(folder) / f"a{form}", found))
            for question, row in zip(questions, rows, strict=True):
                start = find_only(row[1], row[2]) if row[3] == -1 else row[3]
                assert (question.question, question.context, question.answers[0], question.starts[0]) == (
                    *row[:3],
                    start,
                )


@pytest.mark.parametrize("start", [0, -1, None])
def test_an_empty_answer_is_none(tmp_path, start):
    answers = {"text": ["", " "], "answer_start": [start, start]}
    assert ask(tmp_path, answers=answers).answers == ()
    assert ask(tmp_path, answers=answers, is_impossible=True).starts == ()
    qa = {"id": "a", "question": "Who?", "is_impossible": True, "answers": [{"text": "", "answer_start": -1}]}
    official = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [qa]}]}]}
    (tmp_path / "a.json").write_text(json.dumps(official))
    assert read(tmp_path / "a.json", 2)[0].answers == read_squad(tmp_path / "a.json", 2)[0].answers == ()
    with pytest.raises(UsageError, match=r"line 1 has no answer, so this looks like a SQuAD 2\.0 file"):
        ask(tmp_path, version=1, answers=answers)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answers": "Ada"}, "line 1, answers: JSON is malformed.* give answers such as"),
        ({"answers": {"text": "Ada"}}, "Expected `array`, got `str`"),
        ({"answers": {"text": ["Ada"], "answer_start": [1.5]}}, "Expected `int"),
        ({"answers": {"text": ["Ada"], "answer_start": [0, 1]}}, "text and answer_start have different lengths"),
        ({"answers": [{"answer_start": 0}]}, "missing required field `text`"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, words):
    with pytest.raises(UsageError, match=words) as error:
        ask(tmp_path, **row)
    assert "a.jsonl, line 1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["question", "context", "answers"])
def test_a_missing_column_is_named(tmp_path, name):
    path = write_questions(tmp_path / "a.csv", [{key: cell for key, cell in GOOD.items() if key != name}])
    with pytest.raises(
        UsageError, match=rf"a.csv has no column '{name}'; found .*; name the columns question, context"
    ):
        read(path)


def test_an_id_that_occurs_twice_is_named_with_both_places(tmp_path):
    first, second = (write_questions(tmp_path / f"{name}.jsonl", [GOOD]) for name in "xy")
    with pytest.raises(UsageError, match=r"y.jsonl, line 1 has the same id 'a' as .*x.jsonl, line 1"):
        read(f"{first},{second}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"data": [{"paragraphs": [{"context": 1}]}]}', r"a.json: Expected `str`.*\{\"data\": \[\{\"paragraphs\""),
        ('{"data": [{"paragraphs": []}]}', "a.json has no questions"),
        ('{"data": []}', "a.json has no rows"),
        ('{"data": 1}', "a.json"),
        ("{", "a.json"),
        ('{"version": 1, "data": [{"question": "x"}]}', "is an object with 2 keys"),
    ],
)
def test_which_form_a_json_file_has_is_decided_by_its_content(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        read(tmp_path / "a.json")
