"""TriviaQA in its own format: the paragraphs with an answer, the answers' positions, and unusable input."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.formats import triviaqa
from bertkit.data.formats.squad import read_squad
from bertkit.data.formats.triviaqa import convert, find_answers, fold, read_opening

SINCLAIR = """Sinclair Lewis

Harry Sinclair Lewis was an American novelist. In 1930, he became the first writer from the United States to
receive the Nobel Prize in Literature."""


def make_entry(name: str, value: str, aliases: list[str], *filenames: str, **more: Any) -> dict[str, Any]:
    pages = [
        {"DocSource": "TagMe", "Filename": name, "Title": name.removesuffix(".txt").replace("_", " ")}
        for name in filenames
    ]
    answer = {"Aliases": aliases, "NormalizedValue": value.lower(), "Type": "WikipediaEntity", "Value": value}
    return {"Answer": answer, "EntityPages": pages, "Question": f"What is {name}?", "QuestionId": name} | more


def save(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"Data": list(entries), "Domain": "Wikipedia", "Version": 1.0}), encoding="utf-8")
    return path


def make_evidence(folder: Path, **documents: str | bytes) -> Path:
    """Write a folder of documents; the names are given without .txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents.items():
        (folder / f"{name}.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def find(answers: list[str], context: str) -> list[tuple[str, int]]:
    return [(answer["text"], answer["answer_start"]) for answer in find_answers(answers, context)]


def test_a_file_in_squads_form(tmp_path):
    evidence = make_evidence(
        tmp_path / "evidence" / "wikipedia",
        Sinclair_Lewis=SINCLAIR,
        Nobel_Prize="The prize is given in Stockholm.",
        Bad=b"caf\xe9 Sinclair Lewis",
        Stockholm="STOCKHOLM is the capital of Sweden. Stockholm has islands.",
    ).parent
    qa = save(
        tmp_path / "wikipedia-train.json",
        make_entry("tc_1", "Sinclair Lewis", ["Harry Lewis", "lewis"], "Sinclair_Lewis.txt", "Gone.txt"),
        make_entry("tc_2", "stockholm", [], "Nobel_Prize.txt", "Stockholm.txt", "Sinclair_Lewis.txt", "Bad.txt"),
        make_entry("tc_3", "Nothing", []),
    )
    output = tmp_path / "triviaqa.json"
    lines: list[str] = []
    counts = convert(qa, evidence, output, lines.append)
    assert counts == {"questions": 3, "documents": 6, "paragraphs": 3, "unanswered": 1, "missing": 2}
    assert lines == [f"{output}: 3 questions, 6 documents, 3 paragraphs, 1 unanswered, 2 missing"]
    questions = read_squad(output, version=1)
    assert [(question.id, question.question, question.answers, question.starts) for question in questions] == [
        ("tc_1--Sinclair_Lewis.txt", "What is tc_1?", ("Sinclair Lewis", "Lewis"), (0, 9)),
        ("tc_2--Nobel_Prize.txt", "What is tc_2?", ("Stockholm",), (22,)),
        ("tc_2--Stockholm.txt", "What is tc_2?", ("STOCKHOLM",), (0,)),
    ]
    assert questions[0].context == SINCLAIR
    content = json.loads(output.read_text(encoding="utf-8"))
    assert content["version"] == "1.1"
    assert [article["title"] for article in content["data"]] == ["Sinclair Lewis", "Nobel Prize", "Stockholm"]


def test_documents_lie_in_the_folder_or_below_and_a_page_named_twice_is_one(tmp_path):
    evidence = make_evidence(tmp_path / "evidence", A="Rouen, here")
    make_evidence(evidence / "wikipedia", A="Rouen, there", B="Rouen, below")
    entry = make_entry("q", "Rouen", [], "A.txt", "B.txt", "A.txt", "x" * 300, "a\0b", ".", "../A.txt")
    entry["EntityPages"] += [{"DocSource": "Search", "Title": "never fetched"}, {"Filename": "wikipedia"}]
    counts = convert(save(tmp_path / "qa.json", entry), evidence, tmp_path / "out.json")
    assert (counts["documents"], counts["paragraphs"], counts["missing"]) == (8, 2, 6)
    assert [question.context for question in read_squad(tmp_path / "out.json")] == ["Rouen, here", "Rouen, below"]


def test_an_answer_after_400_words_is_not_found(tmp_path):
    last, late = " ".join(["word"] * 399 + ["Rouen"]), " ".join(["word"] * 400 + ["Rouen"])
    evidence = make_evidence(tmp_path / "evidence", Last=f"{last} and more", Late=late)
    qa = save(tmp_path / "qa.json", make_entry("q", "Rouen", [], "Last.txt", "Late.txt"))
    counts = convert(qa, evidence, tmp_path / "out.json")
    assert (counts["paragraphs"], counts["unanswered"]) == (1, 1)
    (question,) = read_squad(tmp_path / "out.json")
    assert question.context == last
    assert question.starts == (399 * 5,)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ""),
        ("  a  b\r\n\nc \n", "  a  b\r\n\nc"),
        ("\ufeffa b", "a b"),
        ("a\u00a0b\u2003c\u3000d", "a\u00a0b\u2003c"),
        ("😀 é\u0301 İ d", "😀 é\u0301 İ"),
    ],
)
def test_original_spacing_is_kept(tmp_path, monkeypatch, content, expected):
    monkeypatch.setattr(triviaqa, "PARAGRAPH_WORDS", 3)
    make_evidence(tmp_path, A=content)
    assert read_opening(tmp_path, "A.txt") == expected


@pytest.mark.parametrize(
    ("answers", "context", "expected"),
    [
        (["rouen"], "In ROUEN, Rouen.", [("ROUEN", 3)]),
        (["York", "New York City", "New York"], "New York City", [("New York City", 0), ("New York", 0), ("York", 4)]),
        (["York", "york", " YORK "], "a York, a york", [("York", 2)]),
        (["new  york"], "in New\nYork", [("New\nYork", 3)]),
        (["New York"], "New\u00a0York", [("New\u00a0York", 0)]),
        (["", "  ", "?!", "“”", "C"], "?! “” C", [("C", 6)]),
        (["$12"], "US$12 and $123 for $12", [("$12", 2)]),
        (["C++"], "C++11 or C++", [("C++", 0)]),
        (["हिन्द"], "हिन्दी हिन्द", [("हिन्द", 7)]),
    ],
)
def test_where_answers_stand(answers, context, expected):
    assert find(answers, context) == expected


def test_folding_keeps_every_place():
    text = "".join(map(chr, range(sys.maxunicode + 1)))
    assert len(fold(text)) == len(text), "no character becomes none"


pieces = st.lists(st.sampled_from([*"aAbİıΣςßé1_'. \n\u00a0😀", "e\u0301"]), max_size=12).map("".join)


def find_slowly(answers: list[str], context: str) -> list[tuple[str, int]]:
    """Find the answers by definition: every span of the context, from the left, longest first."""
    names = {" ".join(fold(answer).split()) for answer in answers if any(map(str.isalnum, answer))}
    found: dict[str, int] = {}
    for start in range(len(context)):
        for end in range(len(context), start, -1):
            whole = not re.match(r"[\w\u0301]{2}", context[start - 1 : start + 1] if start else "")
            whole = whole and not re.match(r"[\w\u0301]{2}", context[end - 1 : end + 1])
            if whole and (name := fold(context[start:end])) in names:
                names.discard(name)
                found.setdefault(context[start:end], start)
    return list(found.items())


@given(context=pieces, data=st.data())
def test_answers_by_their_definition(context, data):
    places = st.integers(0, len(context))
    spans = st.tuples(places, places, st.sampled_from([str, str.upper, str.lower]))
    answers = data.draw(st.lists(spans.map(lambda span: span[2](context[span[0] : span[1]])), min_size=1, max_size=4))
    assert find(answers, context) == find_slowly(answers, context)


@pytest.fixture
def convert_in_vain(tmp_path, refused):
    """Return a function that expects a refusal, and no file that is left behind."""

    def convert_in_vain(qa: Path, evidence: Path = tmp_path) -> None:
        before = sorted(tmp_path.rglob("*"))
        with refused():
            convert(qa, evidence, tmp_path / "out.json")
        assert sorted(tmp_path.rglob("*")) == before

    return convert_in_vain


@pytest.mark.parametrize(
    "entry",
    [{"QuestionId": "q", "Question": "?"}, make_entry("q\ud800", "a", [], "A.txt")],
    ids=["no answer", "surrogate"],
)
def test_file_that_is_not_triviaqas(tmp_path, entry, convert_in_vain):
    convert_in_vain(save(tmp_path / "qa.json", entry))


def test_documents_without_any_answer(tmp_path, convert_in_vain):
    evidence = make_evidence(tmp_path / "evidence", A="Nothing", C=b"\xff")
    convert_in_vain(save(tmp_path / "qa.json", make_entry("q", "Rouen", [], "A.txt", "B.txt", "C.txt")), evidence)


def test_output_is_never_overwritten(tmp_path, convert_in_vain):
    evidence = make_evidence(tmp_path / "evidence", A="Rouen")
    qa = save(tmp_path / "qa.json", make_entry("q", "Rouen", [], "A.txt"))
    (tmp_path / "out.json").write_text("mine")
    convert_in_vain(qa, evidence)
    assert (tmp_path / "out.json").read_text() == "mine"
