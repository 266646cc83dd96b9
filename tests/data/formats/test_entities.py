"""Named entities in a person's own tables: words with tags, texts with spans, and what does not fit, by its place."""

import json

import pytest

from bertkit.data.formats.entities import list_spans, read_entities
from bertkit.data.formats.rows import read_columns
from bertkit.data.tagging import ABSENT, BASIC, split_words
from bertkit.metrics.ner import find_entities
from tests.data.conftest import make_tagged
from tests.official import write_table

ADA = {"text": "Ada Lovelace lived in London.", "spans": [[0, 12, "PER"], {"start": 22, "end": 28, "label": "LOC"}]}
WORDS = ["Ada", "Lovelace", "lived", "in", "London", "."]
TAGS = ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]


def read(path):
    lines = []
    return read_entities(read_columns(path), lines.append), lines


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_words_and_tags_of_every_format(tmp_path):
    row = {"id": 7, "tokens": WORDS, "ner_tags": ["B-PER", "E-PER", "O", "O", "S-LOC", "O"]}
    names = sorted({*row["ner_tags"]})
    classes = tmp_path / "classes.parquet"
    make_tagged([WORDS], [[names.index(tag) for tag in row["ner_tags"]]], names).to_parquet(classes)
    spaced = {"tokens": " ".join(WORDS), "ner_tags": " ".join(row["ner_tags"])}
    paths = [
        write_lines(tmp_path / "a.jsonl", row),
        write_table(tmp_path / "a.csv", [{name: json.dumps(value) for name, value in row.items()}]),
        write_table(tmp_path / "spaced.tsv", [spaced]),
        classes,
    ]
    for path in paths:
        text, lines = read(path)
        (sentence,) = text.sentences
        assert (sentence.words, sentence.tags, sentence.official) == (WORDS, TAGS, row["ner_tags"]), path
        assert (text.scheme, text.odd, text.documents, text.is_labelled, lines) == ("IOBES", 0, 0, True, [])


def test_texts_and_spans_of_every_format(tmp_path):
    objects = [
        {"start": 0, "end": 12, "type": "PER", "entity_group": ""},
        {"start": 22, "end": 28, "type": "", "entity_group": "LOC"},
    ]
    lists = {"start": [0, 22], "end": [12, 28], "label": ["PER", "LOC"]}
    paths = [
        write_lines(tmp_path / "a.jsonl", ADA),
        write_table(tmp_path / "a.csv", [{"text": ADA["text"], "spans": json.dumps(ADA["spans"])}]),
        write_table(tmp_path / "a.parquet", [{"text": ADA["text"], "entities": objects}]),
        write_lines(tmp_path / "b.jsonl", ADA | {"spans": lists}),
        write_lines(tmp_path / "c.jsonl", {"text": ADA["text"], "labels": ADA["spans"]}),
    ]
    for path in paths:
        text, lines = read(path)
        (sentence,) = text.sentences
        assert (sentence.words, sentence.tags, text.scheme, lines) == (WORDS, TAGS, "IOB2", []), path


def test_labels_may_have_several_words_and_a_span_may_be_given_twice(tmp_path):
    spans = [[0, 12, "Name of\u00a0a  person "], [22, 28, "LOC"], [22, 28, "LOC"]]
    text, lines = read(write_lines(tmp_path / "a.jsonl", ADA | {"spans": spans}))
    expected = ["B-Name of a person", "I-Name of a person", "O", "O", "B-LOC", "O"]
    assert (text.sentences[0].tags, lines) == (expected, [])


def test_spans_that_do_not_end_at_words_are_extended_and_counted(tmp_path):
    """ "ove" and " in " are fitted to a word, "U" and "A" are parts of one word, and a span has no word."""
    row = {
        "text": "Lovelace in UxA  now",
        "spans": [[1, 4, "PER"], [8, 12, "X"], [12, 13, "LOC"], [14, 15, "LOC"], [15, 17, "GAP"], [17, 20, "X"]],
    }
    text, lines = read(write_lines(tmp_path / "a.jsonl", row))
    assert text.sentences[0].words == ["Lovelace", "in", "UxA", "now"]
    assert text.sentences[0].tags == ["B-PER", "B-X", "B-LOC", "B-X"]
    assert text.sentences[0].entities == {
        (ABSENT, 1, "PER"): "ove",
        (ABSENT, 8, "X"): " in ",
        (ABSENT, 12, "LOC"): "U",
        (ABSENT, 14, "LOC"): "A",
        (ABSENT, 15, "GAP"): "  ",
        (3, 4, "X"): "now",
    }
    path = tmp_path / "a.jsonl"
    assert lines == [
        f"{path}: 5 spans begin or end within a word, or with a space, and are fitted to whole words of their own, if "
        f"there are some; they count as missed in scores (first: {path}, line 1, 'ove')"
    ]


POSSESSIVES = {
    "text": "Ada’s “Lovelace-Byron” met AT&T's J.P. Doe/Roe, née O'Hara_x.",
    "spans": [
        [0, 3, "PER"],
        [7, 15, "PER"],
        [16, 21, "PER"],
        [27, 31, "ORG"],
        [34, 42, "PER"],
        [43, 46, "PER"],
        [52, 58, "PER"],
    ],
}
CHINESE = {"text": "爱达·洛芙莱斯的“伦敦”和北京。", "spans": [[0, 7, "PER"], [9, 11, "LOC"], [13, 15, "LOC"]]}


@pytest.mark.parametrize("row", [POSSESSIVES, CHINESE])
def test_spans_beside_marks_are_whole_words(row, tmp_path):
    text, lines = read(write_lines(tmp_path / "a.jsonl", row))
    (sentence,) = text.sentences
    assert (lines, sentence.entities, text.text_words) == ([], None, BASIC)
    found = list_spans(split_words(row["text"], BASIC), find_entities(sentence.tags))
    assert [[span["start"], span["end"], span["label"]] for span in found] == row["spans"]


def test_a_model_of_words_divides_texts_as_conll_files_do(tmp_path):
    lines = []
    rows = read_columns(write_lines(tmp_path / "a.jsonl", POSSESSIVES))
    text = read_entities(rows, lines.append, text_words=None)
    words = ["Ada’s", "“", "Lovelace-Byron", "”", "met", "AT&T's", "J.P", ".", "Doe/Roe", ",", "née", "O'Hara_x", "."]
    assert text.sentences[0].words == words
    assert "7 spans begin or end within a word" in lines[0]


def test_rows_without_words_are_left_out_and_those_without_marks_are_unlabelled(tmp_path):
    path = tmp_path / "a.jsonl"
    text, lines = read(write_lines(path, {"tokens": [], "tags": []}, {"tokens": ["a"], "tags": ["O"]}))
    assert lines == [f"{path}: 1 rows have no words in 'tokens' and are left out"]
    assert [(sentence.words, sentence.line) for sentence in text.sentences] == [(["a"], 2)]
    assert len(text.rows) == 1
    for rows in ([{"words": ["a", "b"]}], [{"words": ["a", "b"], "tags": None}]):
        text, _ = read(write_lines(tmp_path / "b.jsonl", *rows))
        assert (text.is_labelled, text.sentences[0].tags) == (False, ["O", "O"])
    text, _ = read(write_lines(tmp_path / "c.jsonl", {"text": "so"}))
    assert not text.is_labelled


@pytest.mark.parametrize(
    "rows",
    [
        [{"body": "a"}],
        [{"tokens": ["a"], "tags": ["O", "O"]}],
        [{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["b"]}],
        [{"text": "a", "spans": []}, {"text": "b"}],
        [{"tokens": "[1, 2]", "tags": "[]"}],
        [{"text": "a b", "spans": [[0, 1, "X"], [0, 3, "Y"]]}],
        [{"text": "a", "spans": [[0, 2, "X"]]}],
        [{"text": "a", "spans": [{"start": 0}]}],
        [{"text": "a", "spans": [{"start": 0, "end": 1}]}],
        [{"text": "a", "spans": [{"start": 0, "end": 1, "label": " \t"}]}],
        [{"text": "a", "spans": {"start": [0], "end": [], "label": ["X"]}}],
    ],
    ids=json.dumps,
)
def test_what_does_not_fit_is_one_line(rows, tmp_path, refused):
    with refused() as error:
        read(write_lines(tmp_path / "a.jsonl", *rows))
    assert "\n" not in str(error.value)
