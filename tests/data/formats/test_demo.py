"""Data sets made from documentation: the questions can be answered, and the tasks can read the files."""

import csv
import re
from collections import Counter

import pytest

from bertkit.data.formats import demo
from bertkit.data.formats.demo import (
    Function,
    Parameter,
    make_articles,
    make_pairs,
    make_topics,
    parse_parameters,
    write_samples,
)
from bertkit.data.formats.official import read_tsv
from bertkit.data.formats.squad import read_squad
from bertkit.system.progress import ignore
from bertkit.tasks import TASKS

DOCSTRING = """Average something.

    Parameters
    ----------
    a : array_like, optional
        The numbers. They may be of any kind.
    axis : {0, 1}, default: 0
        Along which of `a`'s axes,
        in :class:`numpy.ndarray` order.
    *args : tuple of int
    x, y : float
        Two at once.
    out
        No type.
    dtype : str or None, (optional, default=None)
        Type of the *result*.

    Returns
    -------
    mean : float
        The average.
    """


def test_parameters_are_what_numpydoc_means():
    """Defaults and markup are removed; parameters without a type or a description are left out."""
    assert list(parse_parameters(DOCSTRING)) == [
        Parameter("a", "array_like", "The numbers."),
        Parameter("axis", "{0, 1}", "Along which of a's axes, in numpy.ndarray order."),
        Parameter("dtype", "str or None", "Type of the result."),
    ]
    assert list(parse_parameters("Average.\n\nReturns\n-------\na : int\n    One.")) == []


def make_functions(count):
    return [
        Function(
            f"p.f{number}",
            tuple(Parameter(f"n{place}", f"t{number}", f"d{place}.") for place in range(number % 3 + 1)),
        )
        for number in range(count)
    ]


def test_questions_of_another_function_have_no_answer_and_the_others_have_theirs():
    functions = {function.name: function for function in make_functions(40)}
    counts = Counter()
    for article in make_articles(list(functions.values()), 1000):
        (paragraph,), title = article["paragraphs"], article["title"]
        context = paragraph["context"]
        assert context.startswith(f"{title} has")
        for question in paragraph["qas"]:
            name, asked = re.fullmatch(r"\w+ type is the parameter (n\d) of (p\.f\d+)\?", question["question"]).groups()
            counts[question["is_impossible"]] += 1
            assert name in [parameter.name for parameter in functions[asked].parameters]
            assert context.startswith(f"{asked} has") != question["is_impossible"]
            assert bool(question["answers"]) != question["is_impossible"]
            for answer in question["answers"]:
                start = answer["answer_start"]
                assert context[start:].startswith(answer["text"])
                assert context[:start].endswith(f"{name} is ")
    assert counts[True] / counts.total() == pytest.approx(1 / 3, abs=0.1)
    articles = make_articles(list(functions.values()), 10)
    assert sum(len(article["paragraphs"][0]["qas"]) for article in articles) == 10


def test_a_sentence_answers_the_question_or_is_of_another_parameter():
    rows = make_pairs(make_functions(40), 60)
    assert Counter(label for *_, label in rows) == {"entailment": 30, "not_entailment": 30}
    for question, sentence, label in rows:
        name, asked = re.search(r"parameter (n\d) of p\.f(\d+)\?", question).groups()
        assert sentence.startswith(f"In p.f{asked}, {name} is t{asked}: ") == (label == "entailment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make data sets from two installed packages."""
    folder = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "DOCUMENTED_PACKAGES", ("numpy", "pandas"))
        write_samples(folder, 1000)
    return folder


def test_the_files_are_what_the_tasks_read(folder):
    questions = {split: read_squad(folder / "squad" / f"{split}-v2.0.json", 2) for split in ("train", "dev")}
    assert {split: len(found) for split, found in questions.items()} == {"train": 1000, "dev": 100}
    for found in questions.values():
        assert all(question.context.startswith(answer, start) for question in found for answer, start in zip(
            question.answers, question.starts, strict=True
        ))  # fmt: skip
        assert 0.2 < sum(not question.answers for question in found) / len(found) < 0.45
    contexts = [{question.context for question in found} for found in questions.values()]
    assert not contexts[0] & contexts[1], "no function is in both"
    for split in ("train", "dev"):
        table = read_tsv(folder / "glue" / "QNLI" / f"{split}.tsv", {"label": "label"})
        assert set(table.find("label").to_pylist()) == {"entailment", "not_entailment"}
    examples = TASKS["qnli"].load(TASKS["qnli"].recipe["data"] | {"dir": str(folder / "glue")}, ignore)
    assert len(examples["train"].labels) == 1000
    rows = {}
    for split in ("train", "dev"):
        rows[split] = list(csv.DictReader((folder / "topics" / f"{split}.csv").open(encoding="utf-8")))
        counts = Counter(row["topic"] for row in rows[split])
        assert {"files", "tables", "text"} <= counts.keys() <= {"linear algebra", "files", "tables", "text", "plots"}
        assert max(counts.values()) == 30
        assert len({row["topic"] for row in rows[split][:20]}) > 2, "the topics are mixed"
    texts, functions = ([row[name] for found in rows.values() for row in found] for name in ("text", "function"))
    assert len(set(texts)) == len(texts)
    assert len(set(functions)) == len(functions), "no function is in both"


def test_the_first_sentence_about_a_function_has_the_field_of_its_module():
    docstrings = {
        "scipy.linalg.solve": "Solve the equation `a @ x = b`.\n\n    Not this.",
        "scipy.linalg.again": "Solve the equation a @ x = b. A sentence that is there already.",
        "scipy.linalg.short": "Three words only.",
        "scipy.linalgebra.other": "A module whose name begins alike.",
        "pandas.io.excel.read": "Read a sheet of\nan Excel file. And more.",
    }
    rows = make_topics(docstrings)
    assert sorted(rows["train"]) == [
        ("Read a sheet of an Excel file.", "files", "pandas.io.excel.read"),
        ("Solve the equation a @ x = b.", "linear algebra", "scipy.linalg.solve"),
    ]
    assert rows["dev"] == []
    many = {f"scipy.stats.f{number}": f"This is sentence number {number}." for number in range(50)}
    assert {split: len(found) for split, found in make_topics(many).items()} == {"train": 30, "dev": 20}


def test_what_is_there_is_not_replaced(tmp_path, refused):
    (tmp_path / "squad").mkdir()
    with refused():
        write_samples(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["squad"]
