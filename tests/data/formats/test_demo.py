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
    make_descriptions,
    make_pairs,
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
    rows = list(csv.DictReader((folder / demo.DESCRIPTIONS).open(encoding="utf-8")))
    assert Counter(row["library"] for row in rows) == {"numpy": 166, "pandas": 166}
    assert len({row["text"] for row in rows}) == len(rows)
    assert 30 < sum(row["library"] == "numpy" for row in rows[:100]) < 70, "the libraries are mixed"


def test_a_description_of_several_functions_is_one_row():
    same = (Parameter("axis", "int", "The axis."), Parameter("n", "int", "The size."))
    functions = [Function(f"{library}.f{number}", same) for library in ("numpy", "scipy") for number in range(2)]
    rows = make_descriptions([*functions, Function("pandas.g", (Parameter("n", "float", "The size."),))], 40)
    assert sorted(text for text, *_ in rows) == [
        "axis is int: The axis.",
        "n is float: The size.",
        "n is int: The size.",
    ]
    assert all(function.startswith(library) for _, library, function in rows)


def test_what_is_there_is_not_replaced(tmp_path, refused):
    (tmp_path / "squad").mkdir()
    with refused():
        write_samples(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["squad"]
