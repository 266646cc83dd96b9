"""SQuAD: official files and predictions, the Hub's copies, and a person's own questions in every form."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from bertkit.data.formats.squad import (
    HUB_SQUAD,
    Candidate,
    read_own_squad,
    read_predictions,
    read_squad,
    read_squad_copy,
)
from bertkit.data.spans import Question, is_placed
from tests.official import list_questions, write_questions, write_squad

NORMANS = "The Norse settled in Rouen. The Normans (from “Norseman”) spoke French."
DENVER = "Denver won. 😀 Café Denver lost."


def make_qa(name: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    pairs = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"What is {name}?", "answers": pairs} | more


def make_squad(*qas: dict[str, Any], context: str = NORMANS) -> dict[str, Any]:
    return {"version": "1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def save(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


V1 = make_squad(make_qa("a1", ("Rouen", 21), ("in Rouen", 18)), make_qa("a2", ("French", 64)))
V1["data"] += make_squad(make_qa("b1", ("Denver", 19)), context=DENVER)["data"]
V2 = make_squad(
    make_qa("c1", ("Rouen", 21), is_impossible=False),
    make_qa("c2", is_impossible=True, plausible_answers=[{"text": "French", "answer_start": 64}]),
)


def test_starts_and_texts_are_taken_as_they_are(tmp_path):
    """A missing start is that of the only occurrence; the answers decide whatever `is_impossible` says."""
    qa = make_qa("a", ("Rouen", 22), ("Paris", 10**18), ("Le", -7), is_impossible=True)
    del qa["answers"][2]["answer_start"]
    content = make_squad(qa, make_qa("b", ("x", 0), question=""), {"id": "c", "question": "?", "is_impossible": True})
    found = read_squad(save(tmp_path / "a.json", content), 2)
    assert [one.answers for one in found] == [("Rouen", "Paris", "Le"), ("x",), ()]
    assert [one.starts for one in found] == [(22, 10**18, -1), (0,), ()]


@pytest.mark.parametrize(
    "content",
    [
        {"Data": [], "v": 1},
        {"data": []},
        make_squad(make_qa("")),
        make_squad(make_qa("a", answers=[{"answer_start": 1}])),
        make_squad(make_qa("a", ("b", 1)), make_qa("c", ("b", 1)), make_qa("a", ("b", 1))),
    ],
    ids=["Data", "nothing", "id", "answer", "twice"],
)
def test_bad_squad_is_one_line(tmp_path, content, refused):
    with refused():
        read_squad(save(tmp_path / "dev.json", content))


# --- predictions

read_answers = partial(read_predictions, form=str)
read_odds = partial(read_predictions, form=float)
read_nbest = partial(read_predictions, form=list[Candidate])


def test_predictions_in_the_order_of_their_file(tmp_path):
    answers = {"b": "Rouen", "a": "", "": "😀 Café"}
    assert list(read_answers(save(tmp_path / "predictions.json", answers)).items()) == list(answers.items())
    odds = {"b": -3.25, "a": 0, "c": 10**300, "d": 1e-300, "e": -0.0}
    found = read_odds(save(tmp_path / "null_odds.json", odds))
    assert list(found.items()) == [(name, float(value)) for name, value in odds.items()]
    nbest = {"b": [{"text": "Rouen", "probability": 0.75, "start_logit": 1.5}, {"text": "", "probability": 0}], "a": []}
    found = read_nbest(save(tmp_path / "nbest_predictions.json", nbest))
    assert list(found.items()) == [("b", [Candidate("Rouen", 0.75), Candidate("", 0.0)]), ("a", [])]


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_answers, ["Rouen"]),
        (read_odds, {"a": float("nan")}),
        (read_nbest, {"a": [{"text": "b", "probability": -0.5}]}),
    ],
    ids=["list", "nan", "negative"],
)
def test_bad_predictions_are_one_line(tmp_path, read, content, refused):
    with refused():
        read(save(tmp_path / "a.json", content))


@pytest.mark.parametrize(
    "content",
    [b"", b"id\tanswer\n", b'{"q1": "caf\xe9"}'],
)
def test_bad_json_is_one_line(tmp_path, content, refused):
    (tmp_path / "dev.json").write_bytes(content)
    with refused():
        read_answers(tmp_path / "dev.json")


# --- the Hub


@pytest.mark.parametrize(("name", "content"), [("rajpurkar/squad", V1), ("rajpurkar/squad_v2", V2)], ids=["1", "2"])
def test_official_files_and_the_hub_give_equal_questions(tmp_path, served, name, content):
    rows = list_questions(save(tmp_path / "a.json", content))
    text, start = datasets.Value("string"), datasets.Value("int32")
    kinds = {"answers": {"text": datasets.List(text), "answer_start": datasets.List(start)}}
    features = datasets.Features({name: kinds.get(name, text) for name in rows[0]})
    train = datasets.Dataset.from_list(rows, features=features)
    served[name, HUB_SQUAD[name]] = {"train": train, "validation": train.select([1])}
    found = read_squad_copy(name, {"train": "train", "dev": "validation"})
    assert list(found) == ["train", "dev"]
    assert found["train"] == read_squad(tmp_path / "a.json")
    assert found["dev"] == found["train"][1:2]
    assert found["train"][0].context is found["train"][1].context


def test_a_data_set_on_the_hub(served, tmp_path):
    train = datasets.Dataset.from_list(list_questions(write_squad(tmp_path, 2) / "train-v2.0.json"))
    served["owner/questions", None] = {"train": train, "validation": train}
    found = read_own_squad("owner/questions", 2)
    expected = read_squad(tmp_path / "train-v2.0.json", 2)
    assert {split: part.questions for split, part in found.items()} == {"train": expected, "dev": expected}
    assert found["dev"].source == "owner/questions, validation"


# --- a person's own questions

CONTEXT = "Ada wrote it in 1843. Ada was 27."
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
    for form in (".csv", ".tsv", ".json", ".jsonl", ".parquet"):
        assert read(write_questions(tmp_path / f"a{form}", rows), version) == expected, form
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(official.read_bytes()))
    pairs = [zip(*row["answers"].values(), strict=True) for row in rows]
    listed = [
        row | {"answers": [{"text": text, "answer_start": start} for text, start in found]}
        for row, found in zip(rows, pairs, strict=True)
    ]
    parquet.write_table(pa.Table.from_pylist(listed), tmp_path / "c.parquet")
    for name in ("c.json.gz", "c.parquet"):
        assert read(tmp_path / name, version) == expected, name
    content = json.loads(official.read_text())
    article = content["data"].pop(0)
    first = save(tmp_path / "first.json", content | {"data": [article]})
    others = [row for row in rows if row["title"] != article["title"]]
    for second in (save(tmp_path / "second.json", content), write_questions(tmp_path / "second.parquet", others)):
        assert read(f"{first},{second}", version) == expected


def test_a_file_whose_name_has_a_comma_is_one_file(tmp_path, refused):
    assert read(write_questions(tmp_path / "a,b.jsonl", [GOOD])) == read(write_questions(tmp_path / "a.jsonl", [GOOD]))
    with refused():
        read(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")


@pytest.mark.parametrize("cells", [{}, {"answers": ""}], ids=["missing", "empty"])
def test_a_test_split_without_any_answers_is_unlabelled_and_another_split_is_not(tmp_path, cells, refused):
    row = {key: value for key, value in GOOD.items() if key != "answers"} | cells
    write_questions(tmp_path / "train.jsonl", [GOOD])
    write_questions(tmp_path / "test.jsonl", [row])
    assert not read_own_squad(str(tmp_path), 2)["test"].is_labelled
    write_questions(tmp_path / "test.jsonl", [row, GOOD | {"id": "b"}])
    assert [x.answers for x in read_own_squad(str(tmp_path), 2)["test"].questions] == [(), ("Ada",)]
    with refused():
        read_own_squad(str(tmp_path), 1)
    write_questions(tmp_path / "dev.jsonl", [row])
    with refused():
        read_own_squad(str(tmp_path), 1)


def test_an_unlabelled_file_in_the_official_form(tmp_path):
    write_questions(tmp_path / "train.jsonl", [GOOD])
    asked = {"id": "b", "question": "Who?"}
    for extra, is_labelled in (({}, False), ({"is_impossible": True}, True)):
        content = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [asked | extra]}]}]}
        (tmp_path / "test.json").write_text(json.dumps(content))
        assert read_own_squad(str(tmp_path), 2)["test"].is_labelled == is_labelled


@pytest.mark.parametrize(
    ("answers", "context", "starts"),
    [
        ({"text": ["1843"]}, CONTEXT, (16,)),
        ({"text": ["1843", "27"], "answer_start": [None, 30]}, CONTEXT, (16, 30)),
        ([{"text": "1843"}, {"text": "in 1843", "answer_start": 13}], CONTEXT, (16, 13)),
        ({"text": ["Ada"]}, CONTEXT, (-1,)),
        ({"text": ["aa"]}, "aaa", (-1,)),
    ],
)
def test_an_answer_without_a_start_has_the_only_place(tmp_path, answers, context, starts):
    """Ada is in the context twice, and "aa" in "aaa", so their places are not known."""
    question = ask(tmp_path, answers=answers, context=context)
    assert question.starts == starts
    assert is_placed(question) == (starts != (-1,))


@pytest.mark.parametrize("answers", [None, "", [], {"text": []}, {"text": ["", " "], "answer_start": [-1, 0]}])
def test_no_answers_are_for_version_2(tmp_path, answers, refused):
    assert ask(tmp_path, answers=answers) == Question("a", "Who wrote it?", CONTEXT, (), ())
    assert ask(tmp_path, answers=answers, is_impossible=True).answers == ()
    with refused():
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


def test_a_column_groups_questions_and_the_title_does_so_in_the_official_form(tmp_path, refused):
    official = write_squad(tmp_path / "squad", 1) / "train-v1.1.json"
    table = write_questions(tmp_path / "a.csv", list_questions(official))
    groups = [question.group for question in read(table, group="title")]
    assert groups == [question.group for question in read(official, group="title")]
    assert set(groups) == {"Article_0", "Article_1"}
    assert {question.group for question in read(table)} == {""}
    for path in (table, official):
        with refused():
            read(path, group="customer")


@pytest.mark.parametrize(
    "row",
    [
        {"answers": "Ada"},
        {"answers": {"text": ["Ada"], "answer_start": [0, 1]}},
        {"answers": [{"answer_start": 0}]},
    ],
    ids=["text", "lengths", "no text"],
)
def test_a_wrong_row_is_named(tmp_path, row, refused):
    with refused():
        ask(tmp_path, **row)


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"paragraphs": [{"context": 1}]}]},
        {"version": 1, "data": [{"question": "x"}]},
    ],
    ids=["official", "two keys"],
)
def test_which_form_a_json_file_has_is_decided_by_its_content(tmp_path, content, refused):
    with refused():
        read(save(tmp_path / "a.json", content))
