"""Prediction on new text equals plain transformers and the predictions of runs, in every input format."""

import io
import json
import math
import re
from operator import length_hint

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForNextSentencePrediction, pipeline

import bertkit
from bertkit.data.formats.rows import check_output, read_inputs
from bertkit.data.labels import PAIR_NAMES
from bertkit.data.tagging import split_words
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import UsageError
from bertkit.inference import predictor as module
from bertkit.inference.predictor import Predictor, take_rows
from bertkit.model import heads
from bertkit.tasks.ner import NER
from bertkit.tasks.squad import SQUAD
from bertkit.training.recipe import Recipe
from bertkit.training.run import run
from tests.official import FILLERS, list_questions, write_checkpoint, write_conll, write_squad
from tests.world import TEXTS, Exact, make_texts, write_head

# --- Classes ----------------------------------------------------------------------------------------------------------


def test_classes_are_those_of_the_stock_pipeline_in_the_order_of_the_inputs(classifier):
    texts = make_texts(70)
    stock = pipeline("text-classification", model=str(classifier), top_k=None)(texts)
    results = Exact(classifier)(texts)
    assert len({result["label"] for result in results}) > 1
    for result, expected in zip(results, stock, strict=True):
        assert result["label"] == expected[0]["label"]
        assert result["probability"] == max(result["probabilities"].values())
        scores = {found["label"]: found["score"] for found in expected}
        assert result["probabilities"] == pytest.approx(scores, abs=1e-5)


@pytest.mark.parametrize("names", PAIR_NAMES)
def test_pairs_are_those_of_the_stock_pipeline_by_any_of_their_names(names, classifier):
    pairs = list(zip(make_texts(12), make_texts(12, seed=1), strict=True))
    inputs = [dict(zip(names, pair, strict=True)) for pair in pairs]
    stock = pipeline("text-classification", model=str(classifier))
    expected = stock([{"text": first, "text_pair": second} for first, second in pairs])
    results = Exact(classifier, pairs=True)(inputs)
    assert [(x["label"], pytest.approx(x["score"], abs=1e-5)) for x in expected] == [
        (x["label"], x["probability"]) for x in results
    ]
    assert Exact(classifier)(pairs) == results, "two texts without names are a pair as well"


def test_texts_and_pairs_may_stand_side_by_side_unless_the_task_says_which(classifier):
    texts, pairs = make_texts(5), list(zip(make_texts(5), make_texts(5, seed=2), strict=True))
    mixed = Exact(classifier)([x for both in zip(texts, pairs, strict=True) for x in both])
    for one, other in zip(mixed[::2], Exact(classifier)(texts), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    with pytest.raises(UsageError, match="input 1: unexpected text_pair; this model takes one text"):
        Exact(classifier, pairs=False)([texts[0], pairs[0]])
    with pytest.raises(UsageError, match=r"input 0: expected 2 texts \(text and text_pair\), got 1;"):
        Exact(classifier, pairs=True)(texts)


def test_a_stream_is_read_a_chunk_at_a_time(classifier, monkeypatch):
    monkeypatch.setattr(module, "INPUTS_A_CHUNK", 4)
    waiting = iter(make_texts(100))
    results = Exact(classifier).stream(waiting)
    for count in range(1, 10):
        next(results)
        assert length_hint(waiting) == 100 + 4 * (-count // 4)


# --- Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", SQUAD.values(), ids=SQUAD)
def test_answers_are_those_of_the_run_with_its_tau(task, tmp_path):
    data, folder = write_squad(tmp_path, task.version.number), tmp_path / "run"
    start = write_checkpoint(tmp_path / "bert")
    options = {"dir": str(data), "max_length": 48, "doc_stride": 16, "max_query_length": 12}
    recipe = {"checkpoint": str(start), "batch_size": 8, "precision": "fp32", "data": options}
    run(Recipe.make(task, recipe, {"train": {"max_steps": 30, "learning_rate": 3e-3}}), output=folder)
    questions, may_be_silent = list_questions(data / task.name_file("dev")), task.version.unanswerable
    results = Exact(folder)(questions)
    expected = json.loads((folder / "predictions" / "predictions.json").read_text())
    assert {result["id"]: result["answer"] for result in results} == expected
    assert len(set(expected.values())) > 1
    for question, result in zip(questions, results, strict=True):
        best = result["best"]
        assert question["context"][best["start"] : best["end"]] == best["text"]
        assert result["answer"] in ("", best["text"])
        assert ("tau" in result) == may_be_silent
    if may_be_silent:
        odds = json.loads((folder / "predictions" / "null_odds.json").read_text())
        found = {result["id"]: result["null_score"] - result["best"]["score"] for result in results}
        assert found == pytest.approx(odds, abs=1e-3)
        assert [bool(result["answer"]) for result in results] == [found[x["id"]] < -x["tau"] for x in results]
        assert {bool(result["answer"]) for result in results} == {True, False}


# --- Tags -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["", "sum-all"])
def ner_run(request, tmp_path_factory):
    """Return a run's directory."""
    folder = tmp_path_factory.mktemp("ner")
    data, start = write_conll(folder / "data"), write_checkpoint(folder / "start")
    options = {"dir": str(data), "max_length": 40, "features": request.param, "features_dir": str(folder / "kept")}
    recipe = {"checkpoint": str(start), "batch_size": 8, "precision": "fp32", "data": options | {"context": False}}
    if request.param:
        recipe["model"] = {"bilstm_hidden_size": 16}
    train = {"max_steps": 45, "learning_rate": 1e-2 if request.param else 3e-3}
    run(Recipe.make(NER, recipe, {"train": train}), output=folder / "run")
    return folder / "run"


def test_tags_of_words_are_those_of_the_run(ner_run):
    blocks = (ner_run / "predictions" / "dev.conll").read_text().split("\n\n")
    rows = [[line.split(" ") for line in block.splitlines() if not line.startswith("-DOC")] for block in blocks]
    rows = [block for block in rows if block]
    results = Exact(ner_run)([{"words": [row[0] for row in block]} for block in rows])
    kinds = [[tag[2:] or tag for tag in result["tags"]] for result in results]
    assert kinds == [[row[2][2:] or row[2] for row in block] for block in rows]
    assert len({kind for found in kinds for kind in found}) > 1


def test_entities_stand_where_they_say(ner_run):
    text = "good, word-bad.  so (good)"
    given = [text[start:end] for start, end in split_words(text)]
    found, empty = Exact(ner_run)([text, ""])
    assert empty == {"entities": [], "tags": [], "places": []}
    assert all(text[x["start"] : x["end"]] == x["text"] for x in found["entities"])
    assert [text[start:end] for start, end in found["places"]] == given
    (words,) = Exact(ner_run)([{"words": given}])
    assert "places" not in words
    assert words["tags"] == found["tags"]
    assert len(words["entities"]) == len(found["entities"]) > 0
    assert all(" ".join(given[x["start"] : x["end"]]) == x["text"] for x in words["entities"])


# --- Endings, masks, next sentences -----------------------------------------------------------------------------------


def test_endings_are_scored_as_by_the_model_whatever_their_number(tmp_path):
    folder = write_head(tmp_path, "BertForMultipleChoice")
    model, tokenizer = heads.BertForMultipleChoice.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    endings = make_texts(6, 12)
    inputs = [
        {"context": FILLERS[0], "start": FILLERS[1], "endings": endings[:4]},
        {"sent1": FILLERS[0], "sent2": FILLERS[1], **{f"ending{number}": x for number, x in enumerate(endings[:4])}},
        [FILLERS[2], *endings],
    ]
    results = Exact(folder)(inputs)
    assert results[0] == results[1]
    texts = [(FILLERS[0], FILLERS[1], endings[:4]), (FILLERS[2], "", endings)]
    for result, (context, start, given) in zip(results[1:], texts, strict=True):
        pairs = [[context] * len(given), [f"{start} {ending}".strip() for ending in given]]
        batch = tokenizer(*pairs, padding=True, return_tensors="pt")
        logits = model(**{name: column[None] for name, column in batch.items()}).logits[0]
        assert result["probabilities"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
        assert result["ending"] == int(logits.argmax())


@pytest.mark.parametrize("head", ["BertForNextSentencePrediction", "BertForPreTraining"])
def test_next_sentences_are_judged_as_by_stock_transformers(head, tmp_path):
    folder = write_head(tmp_path, head)
    pairs = list(zip(make_texts(6, 9), make_texts(6, 9, seed=1), strict=True))
    model = AutoModelForNextSentencePrediction.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder))
    expected = [model(**tokenizer(*pair, return_tensors="pt")).logits.softmax(-1)[0, 0].item() for pair in pairs]
    results = Exact(folder)(pairs)
    assert [result["next_sentence"] for result in results] == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 0.01


def test_what_cannot_be_filled_or_judged_is_said(tmp_path):
    folder = write_head(tmp_path, "BertForPreTraining")
    results = list(Exact(folder).stream(["good", "[MASK] " + " ".join(FILLERS * 40), "good [MASK]", ("a", "b")]))
    assert "there is no [MASK] to fill in and no text_pair; give two texts (predict --pair), or" in results[0]["error"]
    assert "tokens, but the model takes at most 128; shorten it" in results[1]["error"]
    assert "next_sentence" not in results[2]
    assert results[3].keys() == {"masks", "next_sentence"}
    assert results[3]["masks"] == []


# --- Invalid models and inputs ----------------------------------------------------------------------------------------


def test_a_model_that_cannot_predict_is_refused(tmp_path, refused):
    """It has no head, lacks the weights of its head, or its vocabulary is too small."""
    folder = write_checkpoint(tmp_path / "bert")
    with refused():
        Exact(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with refused():
        Exact(folder)
    with refused():
        Exact(write_head(tmp_path / "small", "BertForSequenceClassification", vocab_size=10))


@pytest.mark.parametrize(
    ("head", "given"),
    [
        ("BertForSequenceClassification", "good"),
        ("BertForQuestionAnswering", ("who?", "good")),
        ("BertForMaskedLM", "[MASK] good"),
    ],
)
def test_a_model_that_has_diverged_says_so(head, given, tmp_path, refused):
    folder = write_head(tmp_path, head)
    assert Exact(folder)([given])
    model = getattr(bertkit, head).from_pretrained(folder)
    model.bert.encoder.layer[1].output.dense.bias.data.fill_(float("nan"))
    model.save_pretrained(folder)
    with refused():
        Exact(folder)([given])


INVALID = {  # head -> inputs that do not fit it
    "BertForSequenceClassification": [{"txt": "good"}, {"text": 3}, {}, [], ["a", "b", "c"], 3, b"good"],
    "BertForMultipleChoice": [{"context": "so", "endings": ["good"]}, {"context": "so", "endings": ["good", 3]}],
    "BertForTokenClassification": [{"words": 3}, {"words": ["good", 3]}],
    "BertForQuestionAnswering": [{"question": "who?", "context": " "}],
}


@pytest.mark.parametrize("head", INVALID)
def test_an_input_that_does_not_fit_is_named(head, tmp_path, refused):
    predictor = Exact(write_head(tmp_path, head))
    for given in INVALID[head]:
        with refused():
            predictor([given])


# --- Files ------------------------------------------------------------------------------------------------------------


def test_standard_input_is_text_but_for_lines_that_begin_as_json(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b'good\n\n{"text": "bad"}\n"so"\n[so]\n{so}\n'))
    monkeypatch.setattr("sys.stdin", stdin)
    lines = list(read_inputs("-"))
    assert [line.value for line in lines[:5]] == ["good", "", {"text": "bad"}, "so", "[so]"]
    assert "is not a JSON" in str(lines[5].value)
    assert [line.origin for line in lines] == [f"standard input, line {number}" for number in range(1, 7)]


def test_an_output_that_is_the_input_is_refused(tmp_path, refused):
    (tmp_path / "a.txt").write_text("good\n")
    with refused():
        check_output(str(tmp_path / "a.txt"), tmp_path / "a.txt")


BAD = [
    ("a.jsonl", b'"x"\n{"id": NaN}\n\xff\n[', {1: "line 2: text is missing", 2: "line 3 is not", 3: "line 4 is not a"}),
    ("a.tsv", b"text\tid\nx\t1\ny\nz\t2\t3\nw\t4\n", {1: "line 3 has 1 cell, expected 2", 2: "line 4 has 3"}),
    ("a.txt", b"x\ny\0\nz\nw\n", {1: "line 2 has a NUL byte"}),
]


@pytest.mark.parametrize(("name", "content", "wrong"), BAD)
def test_a_bad_line_is_named_and_does_not_stop_the_others(name, content, wrong, tmp_path, classifier):
    (tmp_path / name).write_bytes(content)
    lines = []
    Exact(classifier).write(read_inputs(str(tmp_path / name)), tmp_path / "out.jsonl", lines.append)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["error" in result for result in found] == [number in wrong for number in range(4)]
    assert [found[number]["error"] for number in wrong] == lines[:-1]
    assert all(words in found[number]["error"] for number, words in wrong.items())
    assert all(result["label"] for number, result in enumerate(found) if number not in wrong)


def test_what_is_cut_says_so_and_what_just_fits_does_not(classifier):
    room = 128  # tokens; each word is one, and [CLS] and [SEP] are two, or three of a pair
    predictor = Exact(classifier)
    fits, over = " ".join(["good"] * (room - 2)), " ".join(["good"] * (room - 1))
    pair = [" ".join(["good"] * 60), " ".join(["bad"] * 65)]
    results = predictor(["good", fits, over, pair, [pair[0], pair[1] + " bad"]])
    assert ["truncated" in result for result in results] == [False, False, True, False, True]


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_answers_texts_in_words(call, classifier):
    code, out, err = call("predict", classifier, "good", "bad bad")
    expected = [f"{x['label']}  ({x['probability']:.1%})" for x in Predictor(classifier)(["good", "bad bad"])]
    assert (code, out.splitlines(), err) == (0, expected, "")


def test_the_command_answers_a_file_line_by_line_and_counts_what_is_wrong_and_cut(call, classifier, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"id": 7, "text": "good"}\n\n{"txt": "x"}\n' + json.dumps("good " * 200) + "\n")
    code, out, err = call("predict", classifier, "--input", source)
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [sorted(result) for result in results] == [
        ["id", "label", "probabilities", "probability"],
        ["error"],
        ["label", "probabilities", "probability", "truncated"],
    ]
    assert err.splitlines() == [
        f"bertkit: {source}, line 3: text is missing; the input has txt: give text as a string",
        "bertkit: 1 of 3 inputs are too long for this model and were truncated: number 3",
        "bertkit: 1 input cannot be predicted; the output gives the reason for each",
    ]
    code, out, _ = call("predict", classifier, "--input", source, "--output", tmp_path / "out.jsonl")
    assert code == 2
    assert out.splitlines()[-1] == f"2 results in {tmp_path / 'out.jsonl'}, 1 invalid input"
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == results


def test_the_command_reads_standard_input(call, classifier, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"good\nbad\n")))
    code, out, err = call("predict", classifier, "--input", "-")
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == Predictor(classifier)(["good", "bad"])


def test_texts_one_after_the_other_are_inputs_of_the_model(classifier, tmp_path):
    assert Exact(classifier).group(["a", "b"]) == [["a"], ["b"]]
    assert Exact(classifier, pairs=True).group(["a", "b", "c", "d"]) == [["a", "b"], ["c", "d"]]
    choice = write_head(tmp_path, "BertForMultipleChoice")
    assert Exact(choice).group(["c", "a", "b", "d"]) == [["c", "a", "b", "d"]]


QUESTION = ["who?", "good"]


@pytest.mark.parametrize(
    ("head", "values", "given", "words"),
    [
        ("BertForMultipleChoice", {}, ["good", "bad", "so"], r"ending [12]  \(\d+\.\d%\)"),
        ("BertForPreTraining", {}, ["good [MASK]", "bad"], r"\S+ \d+%, \S+ \d+%; follows: \d+\.\d%"),
        ("BertForNextSentencePrediction", {}, ["good", "bad"], r"follows: \d+\.\d%"),
        ("BertForQuestionAnswering", {}, QUESTION, r"good  \(score -?\d+\.\d\d\)"),
        ("BertForQuestionAnswering", {"tau": -1e3}, QUESTION, r"good  \(\d+\.\d\d above the threshold\)"),
        ("BertForQuestionAnswering", {"tau": 1e3}, QUESTION, r"\(no answer\)  \(.* below .*, best span 'good'\)"),
        ("BertForTokenClassification", {"id2label": {0: "B-A", 1: "B-B"}}, "good so", "good: [AB], so: [AB]"),
    ],
)
def test_every_kind_of_result_has_words(head, values, given, words, tmp_path):
    predictor = Exact(write_head(tmp_path, head, **values), top=2)
    assert re.fullmatch(words, predictor.describe(predictor([given])[0]))
    assert predictor.describe({"error": "x"}) == "error: x"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_precision_is_that_of_training_unless_another_is_asked_for(classifier, has_bf16, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    predictor, exact = Predictor(classifier), Exact(classifier)
    assert (predictor.precision, exact.precision) == ("bf16" if has_bf16 else "fp32", "fp32")
    found, expected = ([x["probability"] for x in side(TEXTS)] for side in (predictor, exact))
    assert found == pytest.approx(expected, abs=0.05)
    assert (found == expected) is not has_bf16


def test_the_rows_of_a_frame_are_inputs_whose_texts_are_the_columns_of_the_run(tmp_path):
    """A DataFrame by itself is a sequence of the names of its columns."""
    folder = write_head(tmp_path, "BertForSequenceClassification", text_columns=["body"])
    frame = pandas.DataFrame({"title": "bad", "body": ["good", math.nan, "bad so"], "stars": [1, 2, 3]})
    predictor = Exact(folder)
    expected = predictor(["good", "", "bad so"])
    assert predictor(frame) == expected
    assert predictor(pa.Table.from_pandas(frame)) == expected
    assert predictor(frame["body"]) == predictor(frame["body"].astype("category")) == expected
    numbered = frame.set_axis([3, 4, 5], axis=1)
    assert Exact(folder, text=[4])(numbered) == expected
    assert Exact(folder, text=["4"])(numbered.to_dict("records")) == expected
    with pytest.raises(UsageError, match="input 0: the input has title, stars, but not body; give it"):
        predictor(frame.drop(columns="body"))
    with pytest.raises(UsageError, match="inputs must be a list, got dict"):
        predictor(frame.to_dict("list"))


SERIES = [  # the values of a Series -> the inputs
    (pandas.Series([2, None, 10], dtype="Int64"), ["2", "", "10"]),
    (pandas.Series(["b", math.nan, "a"], dtype="category"), ["b", "", "a"]),
    (pandas.Series([True, None], dtype="boolean"), ["true", ""]),
    (pandas.Series(["a", None], dtype="string"), ["a", ""]),
    (pandas.Series([0.1, math.nan], dtype="float32"), ["0.1", ""]),
    (pandas.Series(["a", 7, None], dtype=object), ["a", "7", ""]),
    (pandas.Series(pandas.to_datetime(["2024-05-06", None])), ["2024-05-06T00:00:00", ""]),
    (pandas.Series([("a", "b"), ["c", "d"]]), [["a", "b"], ["c", "d"]]),
    (pandas.Index(["a", "b"]), ["a", "b"]),
]


@pytest.mark.parametrize(("series", "inputs"), SERIES, ids=[str(series.dtype) for series, _ in SERIES])
def test_the_values_of_a_series_are_inputs_of_which_missing_ones_are_empty(series, inputs):
    assert take_rows(series) == inputs


def test_a_pretraining_s_model_takes_texts_as_long_as_its_longest_phase(tmp_path):
    folder = write_head(tmp_path / "run", "BertForMaskedLM")
    phases = "[[phase]]\nshare = 0.9\nmax_length = 16\n[[phase]]\nshare = 0.1\nmax_length = 48\n"
    (folder / "recipe.toml").write_text(f'task = "pretrain"\n[data]\nmax_length = 128\n{phases}')
    predictor = Exact(folder)
    assert len(predictor(["[MASK]" + " good" * 45])[0]["masks"]) == 1
    with pytest.raises(UsageError, match="the input has 49 tokens, but the model takes at most 48; shorten it"):
        predictor(["[MASK]" + " good" * 46])
