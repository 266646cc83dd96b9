"""Tables of results beside their inputs, in every format, and in the form of transformers' pipelines."""

import csv
import gzip
import json
import tracemalloc

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from transformers import pipeline

from bertkit.data.formats.rows import read_inputs
from bertkit.errors import UsageError
from bertkit.inference.tables import write_joined
from bertkit.system.files import atomic_open
from tests.official import write_table
from tests.world import Exact, make_texts, write_head

LABELS = {0: "bad", 1: "so-so", 2: "good"}
LIMITS = {"bad": 0.2, "so-so": 0.5, "good": 0.9}
CLASSES = ["label", "probability", "probability_bad", "probability_so-so", "probability_good"]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory):
    """Return a model for several labels with thresholds of its own."""
    values = {"problem_type": "multi_label_classification", "id2label": LABELS, "thresholds": [*LIMITS.values()]}
    return write_head(tmp_path_factory.mktemp("tagger"), "BertForSequenceClassification", **values)


def read_back(path):
    """Return the rows of a table; cells of CSV and TSV are texts."""
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True))


def predict_file(model, source, output, **values):
    return Exact(model, **values).write(read_inputs(str(source)), output)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_has_the_columns_of_the_inputs_and_then_the_label_and_all_probabilities(suffix, classifier, tmp_path):
    rows = [{"id": str(number), "text": f'{text}\r\n"x", \t'} for number, text in enumerate(make_texts(9))]
    output = tmp_path / f"out{suffix}"
    counts = predict_file(classifier, write_table(tmp_path / "in.csv", rows), output)
    assert (counts.count, counts.errors) == (9, 0)
    found = read_back(output)
    assert list(found[0]) == ["id", "text", *CLASSES]
    for row, given, result in zip(found, rows, Exact(classifier)([row["text"] for row in rows]), strict=True):
        assert {name: row[name] for name in given} == given
        assert row["label"] == result["label"]
        assert float(row["probability"]) == pytest.approx(result["probability"], abs=1e-5)
        for label, value in result["probabilities"].items():
            assert float(row[f"probability_{label}"]) == pytest.approx(value, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", output.name], "the temporary file is gone"


def test_errors_stand_in_their_column_and_names_of_the_input_keep_theirs(classifier, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"text": "good", "label": 3}\n{"txt": "good", "label": null}\n"bad"\n\n{"text": 1, "label_predicted": [2]}\n['
    )
    said = []
    counts = Exact(classifier).write(read_inputs(str(tmp_path / "in.jsonl")), tmp_path / "out.csv", said.append)
    assert (counts.count, counts.errors, len(said)) == (5, 3, 4)
    rows = read_back(tmp_path / "out.csv")
    names = ["text", "label", "txt", "label_predicted", "label_predicted_predicted", *CLASSES[1:], "error"]
    assert list(rows[0]) == names
    assert [[row[name] for name in names[:4]] for row in rows] == [
        ["good", "3", "", ""],
        ["", "", "good", ""],
        ["bad", "", "", ""],
        ["1", "", "", "[2]"],
        ["", "", "", ""],
    ]
    assert [bool(row["label_predicted_predicted"]) for row in rows] == [True, False, True, False, False]
    assert [row["error"] for row in rows] == ["", said[0], "", *said[1:3]]


def test_parquet_keeps_the_types_of_simple_columns(classifier, tmp_path):
    columns = {
        "text": ["good", None],
        "id": [1, 2**62],
        "mixed": [1.5, None],
        "yes": [True, False],
        "words": [["a"], []],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    predict_file(classifier, tmp_path / "in.parquet", tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet")
    types = ["string", "int64", "double", "bool", "string", "string", *["double"] * 4, "string"]
    assert [str(kind) for kind in found.schema.types] == types
    rows = found.to_pylist()
    assert [row["id"] for row in rows] == columns["id"]
    assert [row["words"] for row in rows] == ['["a"]', "[]"]
    assert (rows[0]["error"], rows[1]["label"]) == (None, None)
    assert "text is 'None', not a string" in rows[1]["error"]


def test_numbers_have_the_column_prediction(tmp_path):
    one = write_head(tmp_path / "one", "BertForSequenceClassification", num_labels=1, problem_type="regression")
    two = write_head(tmp_path / "two", "BertForSequenceClassification", num_labels=2, problem_type="regression")
    (tmp_path / "in.txt").write_text("good\n")
    for folder, names in ((one, ["prediction"]), (two, ["prediction_LABEL_0", "prediction_LABEL_1"])):
        predict_file(folder, tmp_path / "in.txt", tmp_path / "out.parquet")
        (row,) = read_back(tmp_path / "out.parquet")
        (result,) = Exact(folder)(["good"])
        assert list(row) == ["text", *names]
        expected = result["scores"].values() if "scores" in result else [result["score"]]
        assert [row[name] for name in names] == [*expected]


def test_several_labels_are_those_above_the_thresholds_of_the_configuration(tagger, tmp_path):
    texts = make_texts(12)
    results = Exact(tagger)(texts)
    fixed = [[name for name, value in result["probabilities"].items() if value > 0.5] for result in results]
    assert [result["labels"] for result in results] != fixed
    (tmp_path / "in.txt").write_text("\n".join(texts))
    predict_file(tagger, tmp_path / "in.txt", tmp_path / "out.csv")
    rows = read_back(tmp_path / "out.csv")
    assert list(rows[0]) == ["text", "labels", *CLASSES[2:]]
    assert [row["labels"] for row in rows] == ["|".join(result["labels"]) for result in results]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_of_names_has_a_row_for_each_with_the_line_of_its_text(suffix, tmp_path):
    values = {"id2label": {0: "O", 1: "B-PER", 2: "B-LOC"}, "seed": 4}
    model = write_head(tmp_path / "model", "BertForTokenClassification", **values)
    texts = [*make_texts(8), '"good"\r\nbad,', "", *make_texts(1)]
    source = write_table(tmp_path / "in.csv", [{"id": str(number), "text": text} for number, text in enumerate(texts)])
    output = tmp_path / f"out{suffix}"
    counts = predict_file(model, source, output)
    assert (counts.count, counts.errors) == (11, 0)
    results = Exact(model)(texts)
    expected = [
        {"line": line, "start": one["start"], "end": one["end"], "type": one["type"], "text": one["text"]}
        # The header is line 1; a line break in a cell is counted
        for line, result in zip([*range(2, 11), 12, 13], results, strict=True)
        for one in result["entities"]
    ]
    found = read_back(output)
    assert list(found[0]) == ["line", "start", "end", "type", "text", "score"]
    scores = [float(row.pop("score")) for row in found]
    assert [{name: str(value) for name, value in row.items()} for row in found] == [
        {name: str(value) for name, value in row.items()} for row in expected
    ]
    assert np.allclose(scores, [one["score"] for result in results for one in result["entities"]], atol=1e-5)
    assert {row["type"] for row in expected} == {"PER", "LOC"}
    assert [] in [result["entities"] for result in results]


def test_a_table_of_names_says_what_cannot_be_read_and_has_its_columns_without_any_name(tmp_path):
    model = write_head(tmp_path / "model", "BertForTokenClassification", id2label={0: "O", 1: "B-PER"})
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n{"txt": "good"}\n')
    said = []
    counts = Exact(model).write(read_inputs(str(tmp_path / "in.jsonl")), tmp_path / "out.csv", said.append)
    assert (counts.count, counts.errors) == (2, 1)
    (row,) = read_back(tmp_path / "out.csv")
    assert (row["line"], row["type"], row["error"]) == ("2", "", said[0])
    (tmp_path / "in.txt").write_text("\n")
    predict_file(model, tmp_path / "in.txt", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "line,start,end,type,text,score\n"


def test_a_table_of_classes_of_words_has_a_row_for_each_word(tmp_path):
    model = write_head(tmp_path / "model", "BertForTokenClassification", id2label={0: "noun", 1: "verb"})
    (tmp_path / "in.jsonl").write_text('{"words": ["good", "bad"]}\n')
    predict_file(model, tmp_path / "in.jsonl", tmp_path / "out.csv")
    found = [(row["line"], row["start"], row["text"]) for row in read_back(tmp_path / "out.csv")]
    assert found == [("1", "0", "good"), ("1", "1", "bad")]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_takes_little_memory(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr("bertkit.inference.tables.CHARACTERS_A_GROUP", 100_000)
    rows = (({"text": "x" * 2_000, "id": number}, {"prediction": 0.5}) for number in range(4_000))
    output = tmp_path / f"out{suffix}"
    tracemalloc.start()
    with atomic_open(output, "wb" if suffix == ".parquet" else "w") as file:
        write_joined(rows, {"prediction": float}, output, file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6, "of 8 MB"  # bytes
    assert [int(row["id"]) for row in read_back(output)] == list(range(4_000))


# --- Columns of the texts ---------------------------------------------------------------------------------------------


def test_a_table_beside_one_with_a_byte_order_mark_has_one(call, classifier, tmp_path):
    (tmp_path / "in.csv").write_text("text;n\ngood;1\n", encoding="utf-8-sig")
    for suffix in (".csv", ".tsv"):
        output = tmp_path / f"out{suffix}"
        code, _, err = call("predict", classifier, "--input", tmp_path / "in.csv", "--output", output)
        assert (code, err.count('in.csv: cells separated by ";"\n')) == (0, 1)
        assert output.read_text(encoding="utf-8").startswith("\ufefftext")


def test_the_texts_are_the_columns_that_are_asked_for(classifier, tmp_path):
    rows = [{"title": "good", "body": None, "text": "so"}, {"title": "bad", "body": 3, "text": "so"}, {"title": "x"}]
    expected = Exact(classifier)([("good", ""), ("bad", "3")])
    *found, wrong = Exact(classifier, text=["title", "body"]).stream(rows)
    assert found == expected
    assert wrong["error"] == "the input has title, but not body; give it"
    assert Exact(classifier, text=["title"])(rows) == Exact(classifier)(["good", "bad", "x"])
    with pytest.raises(UsageError, match=r"input 0: title is '\[1\]', not a string"):
        Exact(classifier, text=["title"])([{"title": [1]}])


def test_the_texts_are_the_columns_of_the_training_table_or_have_the_usual_names(classifier, tmp_path):
    folder = write_head(tmp_path, "BertForSequenceClassification", id2label=LABELS, text_columns=["title", "body"])
    predictor = Exact(folder)
    rows = [{"title": "good", "body": "bad", "text": "so"}, {"text": "good", "text_pair": "bad", "title": "so"}]
    one, other, wrong = predictor.stream([*rows, {"title": "good", "text": "so", "sentence": "bad"}])
    assert [one, other] == predictor([["good", "bad"]] * 2)  # a batch of one rounds in another order
    assert wrong["error"] == "the input has title, text, sentence, but not body; give it"
    assert predictor.group(["a", "b"]) == [["a", "b"]]
    assert Exact(folder, text=["text", "title"])([{"text": "good", "title": "bad", "body": "so"}] * 2)[0] == one


def test_a_table_without_columns_of_texts_is_refused_as_a_whole(call, classifier, tmp_path):
    """In JSON lines each object is judged by itself."""
    (tmp_path / "in.csv").write_text("name,stars\ngood,1\nbad,2\n")
    (tmp_path / "in.jsonl").write_text('{"name": "good"}\n{"text": "bad"}\n')
    command = ["predict", classifier, "--output", tmp_path / "out.csv", "--input"]
    code, out, err = call(*command, tmp_path / "in.csv")
    assert (code, out) == (2, "")
    assert err.endswith(
        "in.csv, line 2: text is missing; the input has name, stars: give text as a string, or name the "
        "columns of the texts with --text\n"
    )
    assert not (tmp_path / "out.csv").exists()
    call(*command, tmp_path / "in.jsonl")
    assert [bool(row["error"]) for row in read_back(tmp_path / "out.csv")] == [True, False]


# --- The form of pipelines --------------------------------------------------------------------------------------------


def test_classes_have_the_form_of_the_stock_pipeline(classifier, tagger):
    texts = make_texts(8)
    ours, stock = Exact(classifier), pipeline("text-classification", model=str(classifier))
    for result, expected in zip(ours(texts), stock(texts), strict=True):
        assert ours.format_for_pipeline(result) == {**expected, "score": pytest.approx(expected["score"], abs=1e-5)}
    ours, stock = Exact(tagger), pipeline("text-classification", model=str(tagger), top_k=None)
    for result, expected in zip(ours(texts), stock(texts), strict=True):
        chosen = [entry for entry in expected if entry["score"] > LIMITS[entry["label"]]]
        exact = [{**entry, "score": pytest.approx(entry["score"], abs=1e-5)} for entry in chosen]
        assert ours.format_for_pipeline(result) == exact
    assert ours.format_for_pipeline({"error": "x"}) == {"error": "x"}


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForPreTraining"])
def test_words_of_masks_are_those_of_the_stock_pipeline(head, tmp_path):
    """A bare pretraining checkpoint is a masked LM to the pipeline."""
    ours = Exact(write_head(tmp_path, head), top=3)
    stock = pipeline("fill-mask", model=str(tmp_path), top_k=3)
    texts = ["good [MASK]", "[MASK] good [MASK]"]
    one, two = (ours.format_for_pipeline(result) for result in ours(texts))
    (first, *others) = (stock(text) for text in texts)
    for found, expected in ((one, first), *zip(two, *others, strict=True)):
        assert [entry["token_str"] for entry in found] == [entry["token_str"] for entry in expected]
        assert np.allclose([entry["score"] for entry in found], [entry["score"] for entry in expected], atol=1e-5)
        assert all(entry.keys() <= other.keys() for entry, other in zip(found, expected, strict=True))


def test_answers_have_the_names_of_the_stock_pipeline(tmp_path):
    answers = Exact(write_head(tmp_path / "squad", "BertForQuestionAnswering"))
    (result,) = answers([("who?", "good bad")])
    best = result["best"]
    expected = {"answer": best["text"], "score": best["score"], "start": best["start"], "end": best["end"]}
    assert answers.format_for_pipeline(result) == expected
    silent = {"answer": "", "best": best, "null_score": 2.5, "tau": 0.0}
    assert answers.format_for_pipeline(silent) == {"answer": "", "score": 2.5, "start": 0, "end": 0}


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_reads_and_writes_tables(call, classifier, tmp_path):
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress(b'review,stars\n"good,\nbad",5\nso,1\n'))
    command = ["predict", classifier, "--input", tmp_path / "in.csv.gz", "--text", "review"]
    code, out, err = call(*command, "--output", tmp_path / "out.tsv")
    assert (code, out, err) == (0, f"2 results in {tmp_path / 'out.tsv'}\n", "")
    assert [list(row.values())[:2] for row in read_back(tmp_path / "out.tsv")] == [["good,\nbad", "5"], ["so", "1"]]
    code, out, err = call(*command, "--format", "pipeline")
    assert (code, err) == (0, "")
    printed = [json.loads(line) for line in out.splitlines()]
    assert [sorted(result) for result in printed] == [["label", "score"]] * 2
    code, _, _ = call(*command, "--format", "pipeline", "--output", tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == printed
    call("predict", classifier, "--pair", "so", "good", "--output", tmp_path / "out.csv")
    assert list(read_back(tmp_path / "out.csv")[0].items())[:2] == [("text", "so"), ("text_pair", "good")]
    code, out, _ = call("predict", classifier, "so", "--format", "pipeline")
    assert json.loads(out)["label"] == printed[1]["label"]
