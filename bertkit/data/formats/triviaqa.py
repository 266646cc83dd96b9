"""TriviaQA (Joshi et al. 2017) -> a training file in SQuAD's format, for `bertkit squad --extra-train` (paper §4.2).

The paper's footnote: "The TriviaQA data we used consists of paragraphs from TriviaQA-Wiki formed of the first 400
tokens in documents, that contain at least one of the provided possible answers." TriviaQA gives the answers but not
their positions, so every position is searched here.

Differs from the paper: it does not say what a token is; here it is a word, that is characters between white space.

Left out: the pages of web searches (`SearchResults`), and TriviaQA's own scores.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from bertkit.data.formats.line import AGAIN, read_json
from bertkit.errors import UsageError, check_access
from bertkit.system.files import atomic_open
from bertkit.system.progress import ignore

PARAGRAPH_WORDS = 400  # first words of a document that form its paragraph (§4.2)
EVIDENCE_WORD = re.compile(r"\S+")
SPACE = re.compile(r"\s")
EVIDENCE_FOLDERS = ("", "wikipedia")  # subfolders searched for a document; the download has the second
CHARACTERS_READ = 4_096  # characters of a document read first
PROGRESS = 10_000  # documents between two progress lines
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


@dataclass(frozen=True, slots=True)
class Trivia:
    """A question of TriviaQA.

    Attributes:
        answers: The usable answers, folded.
        documents: File name -> title of the Wikipedia pages.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: dict[str, str]


def convert(qa: Path, evidence: Path, output: Path, report: Callable[[str], None] = ignore) -> dict[str, int]:
    """Write the SQuAD 1.1 file `output` atomically and return counts.

    The file has one paragraph for each pair of a question and a document whose first 400 words contain an answer.

    Returns:
        `questions` in `qa` and `documents`, the number of pairs. These divide into `paragraphs`, `unanswered` (no
        answer in the first words), `missing` (not in the folder), and `unreadable` or not UTF-8.

    Raises:
        UsageError: `qa` is not a TriviaQA file with answers and Wikipedia pages, `output` exists or its folder does
            not, no document is in `evidence`, or none has an answer.
        OSError: `output` cannot be written.
    """
    if output.exists():
        raise UsageError(f"{output} already exists; delete it or name another file with --output")
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent} is not a folder; name a file in an existing folder with --output")
    if not evidence.is_dir():
        raise UsageError(f"{evidence} is not a folder; give the folder of TriviaQA's documents with --evidence DIR")
    questions = read_questions(qa)
    documents = sum(len(question.documents) for question in questions)
    if not documents:
        raise UsageError(f"{qa} names no Wikipedia pages (EntityPages); {TRIVIAQA_REMEDY}")
    report(f"{qa}: {len(questions):,} questions, {documents:,} documents")
    counts = {"questions": len(questions), "documents": documents}
    counts |= dict.fromkeys(("paragraphs", "unanswered", "missing", "unreadable"), 0)
    _write(_make_articles(questions, evidence, counts, report), output)
    report(f"{output}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}")
    return counts


# --- the questions


def read_questions(qa: Path) -> list[Trivia]:
    """Read the questions of a file of TriviaQA's reading comprehension in order.

    Raises:
        UsageError: The file has another form or no answers, an id occurs twice, or a document is outside the evidence.
    """
    questions: list[Trivia] = []
    places: dict[str, str] = {}
    for number, entry in enumerate(read_json(qa, TriviaFile, TRIVIAQA_REMEDY).data):
        place = f"{qa}, Data[{number}]"
        question = Trivia(
            entry.question_id, entry.question, _list_answers(entry.answer), _list_documents(entry.entity_pages, place)
        )
        for filename in question.documents:
            first = places.setdefault(join_id(question.id, filename), place)
            if first != place:
                raise UsageError(f"{place} repeats the QuestionId and a document of {first}; {AGAIN}")
        questions.append(question)
    return questions


def join_id(question: str, filename: str) -> str:
    """Return the id of a question about one of its documents."""
    return f"{question}--{filename}"


def _list_answers(answer: TriviaAnswer) -> tuple[str, ...]:
    """Return the distinct answers and aliases, folded, without those that have no letter or digit."""
    folded = (" ".join(fold(name).split()) for name in (answer.value, *answer.aliases))
    return tuple(dict.fromkeys(name for name in folded if any(map(str.isalnum, name))))


def _list_documents(pages: Iterable[TriviaPage], place: str) -> dict[str, str]:
    """Map file names of the Wikipedia pages to titles; a page that was never fetched has the name ""."""
    documents: dict[str, str] = {}
    for page in pages:
        if page.filename.startswith("/") or ".." in PurePosixPath(page.filename).parts:
            raise UsageError(f"{place} names {page.filename[:80]!r}, which is outside the evidence folder; {AGAIN}")
        documents.setdefault(page.filename, page.title or page.filename)
    return documents


# --- the paragraphs


def _make_articles(
    questions: Iterable[Trivia], evidence: Path, counts: dict[str, int], report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield SQuAD articles of one paragraph each, and update `counts`."""
    pairs = ((question, *document) for question in questions for document in question.documents.items())
    for number, (question, filename, title) in enumerate(pairs, 1):
        if number % PROGRESS == 0:
            report(f"{number:,} of {counts['documents']:,} documents, {counts['paragraphs']:,} paragraphs")
        try:
            context = read_opening(evidence, filename)
        except (OSError, UnicodeDecodeError) as error:
            counts["missing" if isinstance(error, FileNotFoundError) else "unreadable"] += 1
            continue
        answers = find_answers(question.answers, context)
        counts["paragraphs" if answers else "unanswered"] += 1
        if answers:
            asked = {"id": join_id(question.id, filename), "question": question.question, "answers": answers}
            yield {"title": title, "paragraphs": [{"context": context, "qas": [asked]}]}
    if counts["missing"] == counts["documents"]:
        raise UsageError(
            f"{evidence} has none of the {counts['documents']:,} documents; give the folder that holds them"
        )
    if not counts["paragraphs"]:
        raise UsageError(
            f"no document in {evidence} has an answer in its first {PARAGRAPH_WORDS} words ({counts['missing']:,} of "
            f"{counts['documents']:,} are missing, {counts['unreadable']:,} unreadable); give TriviaQA's own documents"
        )


def read_opening(evidence: Path, filename: str) -> str:
    """Read the first 400 words of a document unchanged; only a few thousand characters are read.

    Raises:
        FileNotFoundError: There is no such file.
        OSError, UnicodeDecodeError: It cannot be read.
    """
    for folder in EVIDENCE_FOLDERS:
        path = evidence / folder / filename
        check_access(path)
        if path.is_file():
            break
    else:
        raise FileNotFoundError(filename)
    text = ""
    ends: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as stream:
        # The 400th word is complete only if another word or the end of the file follows.
        while len(ends) <= PARAGRAPH_WORDS and (more := stream.read(len(text) or CHARACTERS_READ)):
            text += more
            ends = [word.end() for word in islice(EVIDENCE_WORD.finditer(text), PARAGRAPH_WORDS + 1)]
    return text[: ends[:PARAGRAPH_WORDS][-1]] if ends else ""


def find_answers(answers: Iterable[str], context: str) -> list[dict[str, Any]]:
    """Find the first occurrence of each folded answer as whole words, in SQuAD's form.

    The earliest answer comes first, the longest of those at one place. The texts are slices of the original context;
    the search ignores case and kinds of white space.
    """
    folded = fold(context)
    places = {(start, -len(answer)) for answer in answers if (start := _find_words(answer, folded)) >= 0}
    spans = [(start, start - negative) for start, negative in sorted(places)]
    return [{"text": context[start:end], "answer_start": start} for start, end in spans]


def fold(text: str) -> str:
    """Lower-case a text and replace white space by spaces, one character by one, so that offsets stay valid."""
    # Only İ has a lower case of two characters. Σ becomes ς at the end of a word and σ elsewhere, so ς is folded to σ.
    return SPACE.sub(" ", text.replace("İ", "i").lower().replace("ς", "σ"))


def _find_words(answer: str, text: str) -> int:
    """Return the first offset of the answer as whole words, or -1."""
    start = text.find(answer)
    while start >= 0 and (_cuts_word(text, start) or _cuts_word(text, start + len(answer))):
        start = text.find(answer, start + 1)
    return start


def _cuts_word(text: str, place: int) -> bool:
    """Return whether the characters on both sides of an offset belong to one word."""
    return 0 < place < len(text) and _is_in_word(text[place - 1]) and _is_in_word(text[place])


def _is_in_word(character: str) -> bool:
    # Python does not count combining accents and vowel signs as letters.
    return character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")


def _write(articles: Iterable[dict[str, Any]], output: Path) -> None:
    """Write the file atomically, with one article in memory at a time."""
    with atomic_open(output) as stream:
        stream.write('{"version": "1.1", "data": [')
        for number, article in enumerate(articles):
            stream.write((",\n" if number else "\n") + json.dumps(article, ensure_ascii=False))
        stream.write("\n]}\n")
