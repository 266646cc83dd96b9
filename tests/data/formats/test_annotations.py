"""Exports of annotation programs, each written as its program writes it; all of them hold the same sentences."""

import json
from functools import partial

import pytest

from bertkit.data.formats.annotations import keep_accepted, read_export, read_exports
from bertkit.data.formats.entities import read_entities
from bertkit.data.formats.rows import read_columns
from bertkit.data.formats.squad import read_own_squad
from bertkit.tasks.ner import NER
from bertkit.tasks.option import NER_OPTIONS, list_defaults
from tests.official import write_table

ADA = "Ada Lovelace lived in London."
NONE = "Nobody lives here."
SPANS = [(0, 12, "PER", "Ada Lovelace"), (22, 28, "LOC", "London")]
TAGS = [["B-PER", "I-PER", "O", "O", "B-LOC", "O"], ["O"] * 4]


def mark_region(start, end, label, text):
    value = {"start": start, "end": end, "text": text, "labels": [label]}
    return {"value": value, "id": "bZ1", "type": "labels", "origin": "manual"}


def make_annotation(*spans, **values):
    relation = {"from_id": "bZ1", "to_id": "bZ2", "type": "relation", "direction": "right"}
    result = [*(mark_region(*span) for span in spans), relation]
    facts = {"id": 9, "was_cancelled": False, "ground_truth": False, "created_at": "2026-03-09T22:16:08.728353Z"}
    return facts | {"result": result} | values


def make_task(number, text, *annotations, **data):
    return {"id": number, "annotations": list(annotations), "data": {"text": text} | data, "meta": {}}


def make_label_studio():
    wrong = (0, 3, "LOC", "Ada")
    older, newest = {"created_at": "2025-01-01T00:00:00.0Z"}, {"created_at": "2026-12-31T00:00:00.0Z"}
    chosen = make_annotation(*SPANS, ground_truth=True)
    return [
        make_task(1, ADA, make_annotation(wrong, **newest), chosen, make_annotation(wrong, **older), page=3),
        make_task(2, "Ada was skipped.", make_annotation(wrong, was_cancelled=True)),
        make_task(3, "Ada was not read."),
        make_task(4, NONE, make_annotation(), page=4),
    ]


def make_json_min():
    first = {"review": ADA, "id": 1, "label": [mark_region(*span)["value"] for span in SPANS], "annotation_id": 5}
    other = first | {"label": [mark_region(0, 3, "LOC", "Ada")["value"]], "annotation_id": 4}
    unread = {"review": "Ada was not read.", "id": 2, "annotation_id": None}
    return [first, other, unread, {"review": NONE, "id": 3, "annotation_id": 6}]


def make_prodigy():
    tokens = [{"text": word, "start": ADA.find(word), "end": ADA.find(word) + len(word)} for word in ADA[:-1].split()]
    tokens = [token | {"id": number, "ws": True, "disabled": False} for number, token in enumerate(tokens)]
    spans = [{"start": start, "end": end, "token_start": 0, "token_end": 1, "label": x} for start, end, x, _ in SPANS]
    return [
        {"text": ADA, "tokens": tokens, "spans": spans, "answer": "accept"},
        {"text": ADA, "spans": spans[:1], "answer": "reject"},
        {"text": ADA, "answer": "ignore"},
        {"text": NONE, "tokens": [], "spans": [], "answer": "accept"},
    ]


def make_doccano():
    offsets = [{"id": 7, "label": label, "start_offset": start, "end_offset": end} for start, end, label, _ in SPANS]
    facts = {"relations": [], "Comments": []}
    return [{"id": 1, "text": ADA, "entities": offsets} | facts, {"id": 2, "text": NONE, "entities": []} | facts]


def make_docs():
    """Return documents as `Doc.to_json` of spaCy writes them."""
    tokens = [{"id": 0, "start": 0, "end": 3, "tag": "NNP", "pos": "PROPN", "dep": "nsubj", "head": 1}]
    ents = [{"start": start, "end": end, "label": label, "kb_id": ""} for start, end, label, _ in SPANS]
    group = {"sc": [{"start": 0, "end": 3, "label": "X", "kb_id": ""}]}
    first = {
        "text": ADA,
        "ents": ents,
        "sents": [{"start": 0, "end": 29}],
        "cats": {},
        "tokens": tokens,
        "spans": group,
    }
    return [first, {"text": NONE, "ents": [], "tokens": tokens}]


PAIRS = [[ADA, {"entities": [span[:3] for span in SPANS]}], [NONE, {"entities": []}]]
TUPLES = [{"text": text, "label": marks["entities"]} for text, marks in PAIRS]
ANNOTATOR = {"classes": ["PER", "LOC"], "annotations": [PAIRS[0], None, PAIRS[1]]}
FURTHER = "further annotations of a text"
FORMS = [
    pytest.param("a.jsonl", TUPLES, "", id="doccano-labels"),
    pytest.param("a.jsonl", make_doccano(), "", id="doccano-entities"),
    pytest.param("a.json", make_label_studio(), f"2 {FURTHER}, 1 skipped, 1 not annotated", id="label-studio-json"),
    pytest.param("a.json", make_json_min(), f"1 {FURTHER}, 1 not annotated", id="label-studio-json-min"),
    pytest.param("a.csv", make_json_min(), f"1 {FURTHER}, 1 not annotated", id="label-studio-csv"),
    pytest.param("a.jsonl", make_prodigy(), "1 rejected, 1 ignored", id="prodigy"),
    pytest.param("a.json", PAIRS, "", id="spacy"),
    pytest.param("a.json", make_docs(), "", id="spacy-docs"),
    pytest.param("a.jsonl", make_docs(), "", id="spacy-docs-lines"),
    pytest.param("a.json", ANNOTATOR, "1 skipped", id="ner-annotator"),
]
MARKS = [f"T{number}\t{label} {start} {end}\t{text}" for number, (start, end, label, text) in enumerate(SPANS, 1)]
MARKS += ["R1\tLives Arg1:T1 Arg2:T2", "A1\tSure T1", "#1\tAnnotatorNotes T1\tx"]
BRAT = {"letters": (f"{ADA}\n", "\n".join(MARKS)), "none": (NONE, "")}


def dump(cell):
    return cell if isinstance(cell, str) else "" if cell is None else json.dumps(cell)


def write(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
        return path
    if path.suffix == ".csv":
        rows = [{name: dump(row.get(name)) for name in rows[0]} for row in rows]
    return write_table(path, rows)


def write_brat(folder, documents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (text, marks) in documents.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        (folder / f"{name}.ann").write_text(marks, encoding="utf-8")
    return folder


def read(place):
    lines = []
    return read_entities(read_exports(str(place), read_columns, lines.append)["train"], lines.append), lines


@pytest.mark.parametrize(("name", "rows", "left"), FORMS)
def test_each_form_has_the_same_sentences(name, rows, left, tmp_path):
    path = write(tmp_path / name, rows)
    text, lines = read(path)
    assert [sentence.tags for sentence in text.sentences] == TAGS
    assert lines == [f"{path}: left out: {left}"] * bool(left)


def test_brat_s_documents_are_rows_and_folders_are_splits(tmp_path):
    text, lines = read(write_brat(tmp_path / "all", BRAT))
    assert ([sentence.tags for sentence in text.sentences], lines) == (TAGS, [])
    assert text.rows.find("document").to_pylist() == ["letters", "none"]
    assert read(tmp_path / "all" / "letters.ann")[0].sentences[0].tags == TAGS[0]
    write_brat(tmp_path / "split" / "train", BRAT)
    write_brat(tmp_path / "split", {"dev": BRAT["letters"]})
    found = read_exports(str(tmp_path / "split"), read_columns, print)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 2, "dev": 1}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_brat_s_texts_from_windows_count_a_line_end_as_their_spans_do(end, tmp_path):
    shift = len(f"{NONE}{end}")
    (tmp_path / "a.txt").write_bytes(f"{NONE}\r\n{ADA}\r\n".encode())
    marks = [f"T1\t{label} {start + shift} {stop + shift}\t{text}\n" for start, stop, label, text in SPANS]
    (tmp_path / "a.ann").write_text("".join(marks))
    text, lines = read(tmp_path / "a.ann")
    assert (text.sentences[0].tags, lines) == (TAGS[1] + TAGS[0], [])


def test_prodigy_s_rows_of_one_text_are_joined(tmp_path):
    """A text has a row for each name that was proposed, among them one twice, and a text with a rejected one only."""
    first, second = ({"start": start, "end": end, "label": label} for start, end, label, _ in SPANS)
    rows = [
        {"text": ADA, "spans": [second], "answer": "accept", "_input_hash": 5, "meta": {"score": 0.4}},
        {"text": NONE, "spans": [], "answer": "accept", "_input_hash": 6},
        {"text": ADA, "spans": [{"start": 13, "end": 18, "label": "LOC"}], "answer": "reject", "_input_hash": 5},
        {"text": ADA, "spans": [first, second], "_input_hash": 5},
        {"text": "London calling", "spans": [{"start": 0, "end": 6, "label": "PER"}], "answer": "reject"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    text, lines = read(path)
    assert [(sentence.tags, sentence.line) for sentence in text.sentences] == [(TAGS[0], 1), (TAGS[1], 2)]
    assert lines == [
        f"{path}: 1 accepted rows are joined with an earlier one of their text",
        f"{path}: left out: 2 rejected",
    ]


def test_texts_of_prodigy_are_the_accepted_ones(tmp_path, refused):
    made = [
        ("a", "X", "accept"),
        ("b", "X", "reject"),
        ("a", "Y", "accept"),
        ("c", "X", "ignore"),
        ("d", "Y", "reject"),
    ]
    rows = read_columns(
        write(tmp_path / "a.jsonl", [dict(zip(("text", "label", "answer"), row, strict=True)) for row in made])
    )
    lines = []
    kept = keep_accepted(rows, (), lines.append)
    assert (kept.find("label").to_pylist(), list(kept.lines)) == (["X", "Y"], [1, 3])
    assert lines == [f"{rows.source}: left out: 2 rejected, 1 ignored"]
    assert keep_accepted(rows, ("answer",), lines.append) is rows, "the answers are learned"
    keep_accepted(rows.take([0, 1]), (), lines.append)
    assert lines[-1] == f"{rows.source}: all proposals are one label; --label answer learns whether it is accepted"
    with refused():
        keep_accepted(rows.take([1, 3]), (), lines.append)


def test_brat_s_spans_in_several_places_are_joined_over_a_line_end_or_left_out(tmp_path):
    marks = "T1\tPER 0 3;4 12\tAda Lovelace\nT2\tLOC 13 18;22 28\tlived London\n"
    text, lines = read(write_brat(tmp_path, {"a": (ADA.replace("Ada ", "Ada\n"), marks)}))
    assert text.sentences[0].tags == ["B-PER", "I-PER", "O", "O", "O", "O"]
    assert lines == [f"{tmp_path}: 1 spans are in several places with other words between them and are left out"]


def test_documents_of_spacy_without_entities_are_texts_without_spans(tmp_path):
    text, lines = read(write(tmp_path / "a.jsonl", [{"text": ADA, "tokens": make_docs()[0]["tokens"]}]))
    assert (text.columns, text.is_labelled, len(text.sentences[0].words), lines) == (("text", ""), False, 6, [])


BLUE = "\U0001f499 Ada lived."  # where JavaScript counts two


@pytest.mark.parametrize(
    "rows",
    [
        [make_task(1, BLUE, make_annotation((3, 6, "PER", "Ada")))],
        [make_task(1, ADA)],
        [make_task(1, ADA, {"result": [{"type": "hypertextlabels", "value": {}}]})],
        [{"data": {"a": ADA, "b": ADA}, "annotations": [make_annotation(*SPANS)]}],
        [["a", {}], ["b"]],
        [make_prodigy()[3] | {"tokens": [{"text": "No", "start": 1, "end": 3}]}],
    ],
    ids=["emoji", "nothing", "no offsets", "two texts", "no tuple", "token"],
)
def test_what_does_not_fit_is_one_line(rows, tmp_path, refused):
    with refused() as error:
        read(write(tmp_path / "a.json", rows))
    assert "\n" not in str(error.value)


def test_ner_trains_on_an_export(tmp_path):
    tasks = [make_task(n, f"{ADA} {n}", make_annotation(*SPANS)) for n in range(40)]
    path = write(tmp_path / "a.json", [*tasks, *make_label_studio()[1:3]])
    lines = []
    found = NER.load(list_defaults(NER_OPTIONS) | {"dir": str(path)}, lines.append)
    assert sum(len(examples.text.sentences) for examples in found.values()) == 40
    assert found["train"].labels == ("O", "B-LOC", "B-PER", "I-PER")
    assert lines[0] == f"{path}: left out: 1 skipped, 1 not annotated"


def test_spans_of_a_text_answer_its_question(tmp_path):
    asked = "Who lived in London?"
    answer = (*SPANS[0][:2], "Answer", SPANS[0][3])
    task = make_task(1, ADA, make_annotation(answer), question=asked)
    skipped = make_task(2, ADA, make_annotation(was_cancelled=True), question="Why?")
    path, lines = write(tmp_path / "a.json", [task, skipped]), []
    read = partial(read_export, read=read_columns, report=lines.append)
    (found,) = read_own_squad(str(path), 1, read=read)["train"].questions
    assert (found.question, found.context, found.answers, found.starts) == (asked, ADA, (answer[3],), (0,))
    assert lines == [f"{path}: left out: 1 skipped"]


def test_brat_needs_train_and_the_text_of_each_document(tmp_path, refused):
    with refused():
        read(write_brat(tmp_path / "dev", {"dev": BRAT["none"]}))
    (tmp_path / "a.ann").write_text("")
    with refused():
        read(tmp_path / "a.ann")
