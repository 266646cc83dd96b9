"""TriviaQA (Joshi et al. 2017) -> a training file in SQuAD's format, for `bertkit squad --extra-train` (paper §4.2).

The paper's footnote: "The TriviaQA data we used consists of paragraphs from TriviaQA-Wiki formed of the first 400
tokens in documents, that contain at least one of the provided possible answers." TriviaQA gives the answers but not
their positions, so every position is searched here.

Differs from the paper: it does not say what a token is; here it is a word, that is characters between white space.

Left out: the pages of web searches (`SearchResults`), and TriviaQA's own scores.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import regex
from msgspec import Struct

from bertkit.data.formats.line import read_json
from bertkit.errors import UsageError
from bertkit.system.files import atomic_open
from bertkit.system.progress import Report, ignore

PARAGRAPH_WORDS = 400  # first words of a document that form its paragraph (§4.2)
EVIDENCE_WORD = re.compile(r"\S+")
SPACE = re.compile(r"\s")
EVIDENCE_FOLDERS = ("", "wikipedia")  # subfolders searched for a document; the download has the second
OUTSIDE_WORD = r"(?:(?<![\w\p{M}])|(?![\w\p{M}]))"  # an offset that is not inside a word; accents belong to words
TRIVIAQA_REMEDY = "give a TriviaQA-Wiki file with answers, such as wikipedia-train.json"


class TriviaAnswer(Struct, rename="pascal"):
    """The fields of an answer in TriviaQA's file that are read."""

    value: str
    aliases: list[str]


class TriviaPage(Struct, rename="pascal"):
    """The fields of a page in TriviaQA's file that are read; unfetched pages have no file name."""

    filename: str = ""
    title: str = ""


class TriviaEntry(Struct, rename="pascal"):
    """The fields of a question in TriviaQA's file that are read."""

    question_id: str
    question: str
    answer: TriviaAnswer
    entity_pages: list[TriviaPage] = []


class TriviaFile(Struct, rename="pascal"):
    """The fields of TriviaQA's file that are read."""

    data: list[TriviaEntry]


def convert(qa: Path, evidence: Path, output: Path, report: Report = ignore) -> dict[str, int]:
    """Write the SQuAD 1.1 file `output` atomically and return counts.

    The file has one paragraph for each pair of a question and a document whose first 400 words contain an answer.

    Returns:
        `questions` in `qa` and `documents`, the number of pairs. These divide into `paragraphs`, `unanswered` (no
        answer in the first words) and `missing` (not a text file in the folder).

    Raises:
        OSError: `output` cannot be written.
    """
    if output.exists():
        raise UsageError(f"{output} already exists; delete it or name another file with --output")
    questions = read_json(qa, TriviaFile, TRIVIAQA_REMEDY).data
    counts = Counter(questions=len(questions), documents=0, paragraphs=0, unanswered=0, missing=0)
    articles = list(make_articles(questions, evidence, counts))
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    if not articles:
        raise UsageError(f"no document in {evidence} has an answer: {found}; {TRIVIAQA_REMEDY}, and its own documents")
    with atomic_open(output) as stream:
        json.dump({"version": "1.1", "data": articles}, stream, ensure_ascii=False)
    report(f"{output}: {found}")
    return dict(counts)


def make_articles(questions: Sequence[TriviaEntry], evidence: Path, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield SQuAD articles of one paragraph each, and update `counts`."""
    for question in questions:
        names = [question.answer.value, *question.answer.aliases]
        titles: dict[str, str] = {}
        for page in question.entity_pages:
            titles.setdefault(page.filename, page.title or page.filename)
        for filename, title in titles.items():
            counts["documents"] += 1
            try:
                context = read_opening(evidence, filename)
            except (OSError, ValueError):  # a ValueError: it is not UTF-8, or its name has a NUL
                counts["missing"] += 1
                continue
            found = find_answers(names, context)
            counts["paragraphs" if found else "unanswered"] += 1
            if found:
                asked = {"id": f"{question.question_id}--{filename}", "question": question.question, "answers": found}
                yield {"title": title, "paragraphs": [{"context": context, "qas": [asked]}]}


def read_opening(evidence: Path, filename: str) -> str:
    """Read the first 400 words of a document, unchanged.

    Raises:
        OSError, ValueError: There is no such file, or it cannot be read.
    """
    if Path(filename).is_absolute() or ".." in Path(filename).parts:
        raise ValueError(f"{filename} is not in the evidence")
    paths = [evidence / folder / filename for folder in EVIDENCE_FOLDERS]
    text = next(filter(Path.is_file, paths), paths[0]).read_bytes().decode("utf-8-sig")
    ends = [word.end() for word in islice(EVIDENCE_WORD.finditer(text), PARAGRAPH_WORDS)]
    return text[: ends[-1]] if ends else ""


def find_answers(names: Iterable[str], context: str) -> list[dict[str, Any]]:
    """Find the first occurrence of each answer as whole words, in SQuAD's form.

    The earliest answer comes first, the longest of those with one start. The texts are slices of the original context;
    the search ignores case and kinds of white space, and answers without a letter or digit.
    """
    folded, spans = fold(context), set()
    for answer in {" ".join(fold(name).split()) for name in names if any(map(str.isalnum, name))}:
        if answer in folded and (found := regex.search(OUTSIDE_WORD + regex.escape(answer) + OUTSIDE_WORD, folded)):
            spans.add(found.span())
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    return [{"text": context[start:end], "answer_start": start} for start, end in ordered]


def fold(text: str) -> str:
    """Lower-case a text and replace white space by spaces, one character by one, so that offsets stay valid."""
    # Only İ has a lower case of two characters. Σ becomes ς at the end of a word and σ elsewhere, so ς is folded to σ.
    return SPACE.sub(" ", text.replace("İ", "i").lower().replace("ς", "σ"))
