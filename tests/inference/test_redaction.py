"""Redacted names at work: alike in Python, in an export, on the command line and served; tables, and refusals."""

import csv
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import bertkit
from bertkit.inference.predictor import Predictor
from tests.exports import write_export
from tests.served import Client, serving
from tests.world import make_texts, place_between, write_head

ROWS = 200
HEAD = "BertForTokenClassification"
LABELS = ("O", "B-PER", "I-PER", "B-LOC")
LOST = "\ufffd"  # a character that BERT's tokenizer drops
EXTRA = ["", "word1", f"good {LOST} bad {LOST}", "word1 Word1 WORD1 so"]


@pytest.fixture(scope="module")
def made():
    """Return the directories of a tiny random model of names and of its export."""
    return write_export(HEAD, labels=LABELS)


def compute(predictor, text):
    """Return the place of each word of a text, and its labels' probabilities, None without a token, by a plain loop."""
    tokenizer, model = predictor.settings.tokenizer, predictor.settings.model
    (result,) = predictor([text])
    pieces = [tokenizer.encode(text[start:end], add_special_tokens=False) for start, end in result["places"]]
    ids = [tokenizer.cls_token_id, *(token for piece in pieces for token in piece), tokenizer.sep_token_id]
    with torch.inference_mode():
        shares = model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)).logits[0].softmax(-1)
    firsts, words = np.cumsum([1, *map(len, pieces)]), []
    for place, first, piece in zip(result["places"], firsts, pieces, strict=False):
        words.append((place, shares[first].tolist() if piece else None))
    return words


def redact_by_hand(text, words, least):
    """Return a text whose likely words are replaced by numbers, and the number of those without a token."""
    spans, before = [], None
    for (start, end), shares in words:
        kind = None
        if shares is not None and 1 - shares[0] >= least:
            kind = "PER" if shares[1] + shares[2] >= shares[3] else "LOC"
        if kind and kind == before:
            spans[-1][1] = end
        elif kind:
            spans.append([start, end, kind])
        before = kind
    found, behind, known = "", 0, {"PER": [], "LOC": []}
    for start, end, kind in spans:
        name = text[start:end].casefold()
        if name not in known[kind]:
            known[kind].append(name)
        found += text[behind:start] + f"[{kind}-{known[kind].index(name) + 1}]"
        behind = end
    return found + text[behind:], sum(shares is None for _, shares in words)


@pytest.mark.parametrize("decision", ["tags", "threshold", "least"])
def test_all_ways_redact_alike(made, tmp_path, call, decision):
    texts = [*EXTRA[1:], *make_texts(ROWS - len(EXTRA) + 1)]
    plain = Predictor(made[0], precision="fp32")
    words = [compute(plain, text) for text in texts]
    least = place_between(np.array([1 - shares[0] for row in words for _, shares in row if shares]), 0.6)
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in made]
    if decision == "threshold":
        for folder in folders:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"redaction_threshold": least}))
    given, option = ({"least": least}, ["--least", least]) if decision == "least" else ({}, [])
    run, exported = folders
    predictor = Predictor(run, precision="fp32", redact="numbered", **given)
    results = predictor(texts)
    expected = [result["redacted"] for result in results]
    if decision != "tags":
        both = [redact_by_hand(text, row, least) for text, row in zip(texts, words, strict=True)]
        assert expected == [redacted for redacted, _ in both]
        assert [result.get("unread", 0) for result in results] == [unread for _, unread in both]
    assert sum(redacted != text for redacted, text in zip(expected, texts, strict=True)) > ROWS / 2
    for text, result in zip(texts, results, strict=True):
        restored = result["redacted"]
        for entity in result["entities"]:
            behind = entity["start"] + len(entity["placeholder"])
            restored = restored[: entity["start"]] + entity["text"] + restored[behind:]
        assert restored == text

    assert [x["redacted"] for x in Predictor(str(exported), redact="numbered", **given)(texts)] == expected
    frame = pd.DataFrame({"text": texts}, index=range(5, 5 + ROWS))
    found = bertkit.load(run).predict(frame, redact="numbered", **given)
    assert (found.columns.tolist(), found.index[0]) == (["redacted"], 5)
    with serving(Predictor(run, precision="fp32"), run) as port:
        client = Client(port)
        asked = "/predict?redact=numbered" + "".join(f"&{name}={value}" for name, value in given.items())
        status, _, content = client.ask("POST", asked, json.dumps(texts), Content_Type="application/json")
        assert (status, [x["redacted"] for x in json.loads(content)]) == (200, expected)
        status, answers = client.predict(texts)
        assert (status, {tuple(answer) for answer in answers}) == (200, {("entities", "tags", "places")})
        assert [answer["tags"] for answer in answers] == [result["tags"] for result in plain(texts)]
        client.connection.close()
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    files = ["--input", tmp_path / "texts.txt", "--output", tmp_path / "a.jsonl", "--precision", "fp32"]
    code, _, errors = call("predict", run, *files, "--redact", "numbered", *option)
    assert code == 0
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == results
    assert "2 words without a token cannot be redacted" in errors
    for form in (["--redact"], ["--redact", "types"]) if decision == "tags" else ():
        assert call("predict", run, *files, *form, *option)[0] == 0
        written = [json.loads(line)["redacted"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert written == [x["redacted"] for x in Predictor(run, precision="fp32", redact="types", **given)(texts)]


def test_an_option_without_a_value_leaves_the_text_behind_it(made, call):
    run, text = made[0], "word1 good bad"
    for words in (["--redact", text], [text, "--redact"], ["--redact", "types", text], [text, "--redact=types"]):
        code, said, _ = call("predict", run, *words, "--precision", "fp32", "--least", "0")
        assert (code, said.count("[")) == (0, said.count("]"))
        assert said.strip() == Predictor(run, precision="fp32", redact="types", least=0)([text])[0]["redacted"]
    assert call("predict", run, text, "--redact", "numbered", "--precision", "fp32", "--least", "0")[1].startswith("[")


def test_an_empty_text_and_words_without_a_token(made):
    predictor = Predictor(made[0], precision="fp32", redact="types", least=0.0)
    results = predictor(EXTRA)
    assert results[0] == {"entities": [], "tags": [], "places": [], "redacted": ""}
    assert results[2]["unread"] == 2
    assert results[2]["redacted"].count(LOST) == 2
    assert "unread" not in results[1]
    assert all(word not in result["redacted"] for word in ("word1", "good") for result in results)
    (listed,) = predictor([{"words": ["good", LOST, "bad"]}])
    assert listed["redacted"][1] == LOST
    assert len(listed["redacted"]) == 3


def test_a_long_text_is_read_in_windows(made):
    text = " ".join(make_texts(40))
    predictor = Predictor(made[0], precision="fp32", redact="types", least=0.0)
    assert len(predictor.settings.tokenizer.encode(text)) > 2 * predictor.settings.max_length
    (result,) = predictor([text])
    assert set(result["redacted"].replace("[PER]", "").replace("[LOC]", "")) <= {" "}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_has_the_redacted_text_in_the_place_of_the_text(made, tmp_path, call, suffix):
    texts = make_texts(30)
    frame = pd.DataFrame({"id": range(30), "letter": texts, "note": [f"nr. {x}" for x in range(30)]})
    frame.to_csv(tmp_path / "in.csv", index=False)
    output = tmp_path / f"out{suffix}"
    words = ["predict", made[0], "--input", tmp_path / "in.csv", "--text", "letter", "--precision", "fp32"]
    assert call(*words, "--output", output, "--redact", "numbered", "--least", "0.5")[0] == 0
    if suffix == ".csv":
        with output.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = pq.read_table(output).to_pylist()
    expected = Predictor(made[0], precision="fp32", redact="numbered", least=0.5)(texts)
    assert [row["redacted"] for row in rows] == [result["redacted"] for result in expected]
    assert list(rows[0]) == ["id", "note", "redacted"]
    for name in ("id", "note"):
        assert [str(row[name]) for row in rows] == frame[name].astype(str).tolist()


def test_texts_alone_are_printed_and_written_to_a_text_file(made, tmp_path, call):
    texts = make_texts(12)
    (tmp_path / "letters.txt").write_text("".join(f"{text}\n" for text in texts))
    expected = [result["redacted"] for result in Predictor(made[0], precision="fp32", redact="types")(texts)]
    assert sum(text != redacted for text, redacted in zip(texts, expected, strict=True)) > 3
    given = ["--input", tmp_path / "letters.txt", "--precision", "fp32", "--redact"]
    _, said, _ = call("predict", made[0], *given)
    assert said.splitlines() == expected
    call("predict", made[0], *given, "--output", tmp_path / "safe.txt")
    assert (tmp_path / "safe.txt").read_text().splitlines() == expected


def test_without_redaction_nothing_changes(made):
    plain, redacted = Predictor(made[0], precision="fp32"), Predictor(made[0], precision="fp32", redact="types")
    texts = make_texts(20)
    for one, other in zip(plain(texts), redacted(texts), strict=True):
        assert other["tags"] == one["tags"]
        assert [{k: x[k] for k in x if k != "placeholder"} for x in other["entities"]] == one["entities"]
        assert set(one) == {"entities", "tags", "places"}
        assert Counter(x["type"] for x in one["entities"]) == Counter(
            {kind: count for kind in ("PER", "LOC") if (count := other["redacted"].count(f"[{kind}]"))}
        )


def test_what_cannot_be_redacted_is_refused(made, classifier, tmp_path, refused):
    tagger = write_head(tmp_path / "words", HEAD, id2label={0: "noun", 1: "verb"})
    for run, given in (
        (classifier, {"redact": "types"}),
        (tagger, {"redact": "numbered"}),
        (made[0], {"redact": "names"}),
        (made[0], {"least": 0.3}),
        (made[0], {"redact": "types", "least": 1.5}),
        (made[0], {"redact": "types", "least": float("nan")}),
    ):
        with refused():
            Predictor(run, **given)
    with refused():
        Predictor(made[0], redact="types").check_format(None, True)
    with refused():
        bertkit.load(classifier).predict(["good"], redact="types")


def test_the_server_says_what_it_redacts(made, classifier):
    for run, form, message in (
        (made[0], "all", "redact is 'all', expected types or numbered"),
        (made[0], "types&least=9", "least is 9.0; it must be from 0 to 1"),
        (classifier, "types", "redact is for a model of names, but BertForSequenceClassification finds none"),
    ):
        with serving(Predictor(run, precision="fp32"), run) as port:
            client = Client(port)
            status, _, content = client.ask("POST", f"/predict?redact={form}", '"a"', Content_Type="application/json")
            assert (status, json.loads(content)["error"].startswith(message)) == (422, True)
            described = json.loads(client.ask("GET", "/openapi.json")[2])["paths"]["/predict"]["post"]
            page = client.ask("GET", "/")[2].decode()
            client.connection.close()
        is_named = run == made[0]
        assert ("parameters" in described) == ('id="redact"' in page) == is_named
        if is_named:
            forms, least = described["parameters"]
            assert (forms["name"], forms["schema"]["enum"]) == ("redact", ["types", "numbered"])
            assert (least["name"], least["schema"]["maximum"]) == ("least", 1)


@pytest.mark.slow
def test_the_page_has_a_switch(made, browser):
    predictor, text = Predictor(made[0], precision="fp32"), "word1 good bad word1 so"
    expected = Predictor(made[0], precision="fp32", redact="numbered")([text])[0]["redacted"]
    assert "[" in expected
    with serving(predictor, made[0]) as port:
        browser.open(SimpleNamespace(as_uri=lambda: f"http://127.0.0.1:{port}/"), 1000, "light")
        shown = """(async () => {
          document.querySelector("textarea").value = %s;
          if (document.querySelector("#redact").checked !== %s) document.querySelector("#redact").click();
          const before = document.querySelectorAll("article").length;
          document.querySelector("button").click();
          while (document.querySelectorAll("article").length === before) await new Promise(go => setTimeout(go, 20));
          return document.querySelector("article p").innerText;
        })()"""
        assert browser.ask(shown % (json.dumps(text), "true")) == expected
        assert "[" not in browser.ask(shown % (json.dumps(text), "false"))
