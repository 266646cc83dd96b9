"""Labels of texts from annotation programs: Label Studio, Doccano and Prodigy, in the forms that they export."""

import csv
import json

import pytest

from bertkit.data.formats.choices import read_labelled_export
from bertkit.data.formats.rows import read_columns

SECOND = {"from_name": "mood", "to_name": "text", "type": "choices", "value": {"choices": ["calm"]}}


def make_annotation(*choices, **facts):
    result = {"from_name": "topic", "to_name": "text", "type": "choices", "value": {"choices": [*choices]}}
    return {"result": [result], "was_cancelled": False, "ground_truth": False, "created_at": "2024"} | facts


def make_tasks(*annotations):
    """Return tasks of Label Studio, each with these annotations."""
    return [
        {"id": number, "data": {"text": f"text {number}"}, "annotations": list(own)}
        for number, own in enumerate(annotations)
    ]


def make_rows(*cells, repeated=()):
    """Return rows of JSON-MIN, one for each annotation; `repeated` are second ones of a text."""
    rows = [(number, cell) for number, cell in enumerate(cells)] + list(repeated)
    facts = {"annotator": 1, "created_at": "2024", "lead_time": 1.5}
    return [
        {"text": f"text {number}", "id": number, "topic": cell, "annotation_id": "" if cell == "" else place} | facts
        for place, (number, cell) in enumerate(rows, 1)
    ]


def read(path, rows, learned=()):
    """Return columns by name, the lines of the rows that are kept, and what is said."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    lines = []
    found = read_labelled_export(read_columns(path), learned, lines.append)
    return found, [line.removeprefix(f"{path}: ") for line in lines]


def test_choices_of_label_studio_s_json_are_labels(tmp_path):
    tasks = make_tasks(
        [make_annotation("good")],
        [make_annotation("good", was_cancelled=True)],
        [],
        [make_annotation("bad", created_at="2025"), make_annotation("good", created_at="2024")],
        [make_annotation("bad", ground_truth=True), make_annotation("good", created_at="2026")],
    )
    rows, lines = read(tmp_path / "a.json", tasks)
    assert rows.find("text").to_pylist() == ["text 0", "text 3", "text 4"]
    assert rows.find("label").to_pylist() == ["good", "bad", "bad"]
    assert lines == ["left out: 1 skipped, 1 not annotated, 2 further annotations of a text"]


def test_several_choices_are_a_column_of_lists_and_two_questions_two_columns(tmp_path):
    two = make_annotation("good")
    two["result"].append(SECOND)
    rows, _ = read(tmp_path / "a.json", make_tasks([make_annotation("good", "new")], [two]))
    assert rows.find("topic").to_pylist() == ['["good","new"]', '["good"]']
    assert rows.find("mood").to_pylist() == ["", "calm"]
    assert (rows.lists, rows.faults) == ({"topic"}, frozenset())


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_json_min_and_csv_have_a_row_for_each_annotation(tmp_path, suffix):
    made = make_rows("good", {"choices": ["good", "new"]}, "", repeated=[(0, "bad")])
    rows, lines = read(tmp_path / f"a{suffix}", made)
    assert rows.find("label").to_pylist() == ['["good"]', '["good","new"]']
    assert lines == ["left out: 1 not annotated, 1 further annotations of a text"]
    rows, _ = read(tmp_path / f"b{suffix}", make_rows("good", "bad", repeated=[(1, "good")]))
    assert rows.find("topic").to_pylist() == ["good", "bad"], "one choice is plain text, in its own column"


def test_doccano_s_list_of_one_label_is_a_label_and_an_empty_one_none(tmp_path):
    made = [{"id": 1, "text": "a", "label": ["good"]}, {"id": 2, "text": "b", "label": []}]
    rows, lines = read(tmp_path / "a.jsonl", made)
    assert (rows.find("label").to_pylist(), rows.lists) == (["good"], frozenset())
    assert lines == ["left out: 1 not annotated"]
    rows, lines = read(tmp_path / "b.jsonl", [*made, {"id": 3, "text": "c", "label": ["good", "bad"]}])
    assert (len(rows), lines) == (3, []), "where texts have several labels, an empty list has none"


def test_options_of_prodigy_that_are_accepted_are_labels(tmp_path):
    options = [{"id": "good", "text": "Good"}, {"id": "bad", "text": "Bad"}]
    answers = [(["good"], "accept"), (["bad"], "ignore"), ([], "accept"), (["bad"], "accept")]
    made = [
        {"text": f"text {n}", "options": options, "accept": accept, "answer": answer, "config": {"choice_style": "x"}}
        for n, (accept, answer) in enumerate(answers)
    ]
    rows, lines = read(tmp_path / "a.jsonl", made)
    assert rows.find("label").to_pylist() == ["good", "bad"]
    assert rows.find("text").to_pylist() == ["text 0", "text 3"]
    assert lines == ["left out: 1 ignored", "left out: 1 not annotated"]
    made[0]["accept"] = ["good", "bad"]
    rows, _ = read(tmp_path / "b.jsonl", made)
    assert rows.find("label").to_pylist() == ['["good","bad"]', '["bad"]']


def test_a_person_s_own_columns_stay(tmp_path):
    made = [{"text": "a", "label": "x", "answer": "accept"}, {"text": "b", "label": "y", "answer": "reject"}]
    rows, lines = read(tmp_path / "a.jsonl", made, learned=("answer",))
    assert (len(rows), lines) == (2, [])
