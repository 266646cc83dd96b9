"""TriviaQA (Joshi et al. 2017) -> a training file in SQuAD's form, for `bertkit squad --extra-train` (paper §4.2).

The paper's footnote: "The TriviaQA data we used consists of paragraphs from TriviaQA-Wiki formed of the first 400
tokens in documents, that contain at least one of the provided possible answers." TriviaQA says what the answers are but
not where they stand, so every place is found here.

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

from bertkit.data.formats.tables import AGAIN, read_json
from bertkit.errors import UsageError
from bertkit.system.files import atomic_open
from bertkit.system.progress import ignore

PARAGRAPH_WORDS = 400  # of a document that make its paragraph (§4.2)
EVIDENCE_WORD = re.compile(r"\S+")
SPACE = re.compile(r"\s")
EVIDENCE_FOLDERS = ("", "wikipedia")  # of the evidence in which a document may lie; the download has the second
CHARACTERS_READ = 4_096  # of a document, read at first
PROGRESS = 10_000  # documents between two lines of the report
TRIVIAQA_REMEDY = "give one of TriviaQA-Wiki with answers, such as wikipedia-train.json"


class TriviaAnswer(Struct, rename="pascal"):
    """What is used of an answer in TriviaQA's file."""

    value: str
    aliases: list[str]


class TriviaPage(Struct, rename="pascal"):
    """What is used of a page in TriviaQA's file; one that was never fetched has no file name."""

    filename: str = ""
    title: str = ""


class TriviaEntry(Struct, rename="pascal"):
    """What is used of a question in TriviaQA's file."""

    question_id: str
    question: str
    answer: TriviaAnswer
    entity_pages: list[TriviaPage] = []


class TriviaFile(Struct, rename="pascal"):
    """What is used of TriviaQA's file."""

    data: list[TriviaEntry]


@dataclass(frozen=True, slots=True)
class Trivia:
    """A question of TriviaQA.

    answers: the usable ones, folded. documents: file name -> title of the Wikipedia pages.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    documents: dict[str, str]


def convert(qa: Path, evidence: Path, output: Path, report: Callable[[str], None] = ignore) -> dict[str, int]:
    """Writes the SQuAD 1.1 file `output`, at once or not at all, and returns how many there were of what.

    The file has one paragraph for each pair of a question and a document whose first 400 words hold an answer. Of the
    counts, `questions` is what `qa` has and `documents` are the pairs: those that became `paragraphs`, those
    `unanswered` in their first words, `missing` in the folder, and `unreadable` or not UTF-8.

    Raises:
        UsageError: `qa` is no file of TriviaQA with answers and Wikipedia pages, `output` exists or its folder does
            not, no document is in `evidence`, or none has an answer.
        OSError: `output` cannot be written.
    """
    if output.exists():
        raise UsageError(f"{output} exists already; delete it or name another file with --output")
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent} is not a folder; name a file in one that is there with --output")
    if not evidence.is_dir():
        raise UsageError(f"{evidence} is not a folder; give that of TriviaQA's documents: --evidence DIR")
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
    """The questions of a file of TriviaQA's reading comprehension, in its order.

    Raises:
        UsageError: the file has another form, no answers, an id twice, or a document outside of the evidence.
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
                raise UsageError(f"{place} has the QuestionId and a document of {first}; {AGAIN}")
        questions.append(question)
    return questions


def join_id(question: str, filename: str) -> str:
    """The id of a question about one of its documents."""
    return f"{question}--{filename}"


def _list_answers(answer: TriviaAnswer) -> tuple[str, ...]:
    """The answers in their original spellings, folded, but for those without a letter or digit."""
    folded = (" ".join(fold(name).split()) for name in (answer.value, *answer.aliases))
    return tuple(dict.fromkeys(name for name in folded if any(map(str.isalnum, name))))


def _list_documents(pages: Iterable[TriviaPage], place: str) -> dict[str, str]:
    """File name -> title of the Wikipedia pages; the name of one that was never fetched is ""."""
    documents: dict[str, str] = {}
    for page in pages:
        if page.filename.startswith("/") or ".." in PurePosixPath(page.filename).parts:
            raise UsageError(f"{place} names {page.filename[:80]!r}, which leads out of the evidence; {AGAIN}")
        documents.setdefault(page.filename, page.title or page.filename)
    return documents


# --- the paragraphs


def _make_articles(
    questions: Iterable[Trivia], evidence: Path, counts: dict[str, int], report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """SQuAD's articles of one paragraph; adds to `counts`."""
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
        raise UsageError(f"{evidence} has none of the {counts['documents']:,} documents; give the folder that has them")
    if not counts["paragraphs"]:
        raise UsageError(
            f"no document in {evidence} has an answer in its first {PARAGRAPH_WORDS} words ({counts['missing']:,} of "
            f"{counts['documents']:,} are missing, {counts['unreadable']:,} unreadable); give TriviaQA's own documents"
        )


def read_opening(evidence: Path, filename: str) -> str:
    """The first 400 words of a document as they stand there; no more is read than a few thousand characters.

    Raises:
        OSError, UnicodeDecodeError: there is no such file (FileNotFoundError), or it cannot be read.
    """
    path = next((path for folder in EVIDENCE_FOLDERS if (path := evidence / folder / filename).is_file()), None)
    if path is None:
        raise FileNotFoundError(filename)
    text = ""
    ends: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as stream:
        # The 400th word has come to its end only where another one follows, or nothing.
        while len(ends) <= PARAGRAPH_WORDS and (more := stream.read(len(text) or CHARACTERS_READ)):
            text += more
            ends = [word.end() for word in islice(EVIDENCE_WORD.finditer(text), PARAGRAPH_WORDS + 1)]
    return text[: ends[:PARAGRAPH_WORDS][-1]] if ends else ""


def find_answers(answers: Iterable[str], context: str) -> list[dict[str, Any]]:
    """The first place of each folded answer as whole words, as SQuAD has it: the earliest first, of equals the longest.

    Texts are the context's own characters; upper and lower case are one, and so are all kinds of white space.
    """
    folded = fold(context)
    places = {(start, -len(answer)) for answer in answers if (start := _find_words(answer, folded)) >= 0}
    spans = [(start, start - negative) for start, negative in sorted(places)]
    return [{"text": context[start:end], "answer_start": start} for start, end in spans]


def fold(text: str) -> str:
    """The text in lower case with blanks for all white space, character for character, so that places stay."""
    # İ alone has a lower case of two characters; ς is σ at the end of a word, but not if a text is cut there.
    return SPACE.sub(" ", text.replace("İ", "i").lower().replace("ς", "σ"))


def _find_words(answer: str, text: str) -> int:
    """The first place that cuts no word; -1 if there is none."""
    start = text.find(answer)
    while start >= 0 and (_cuts_word(text, start) or _cuts_word(text, start + len(answer))):
        start = text.find(answer, start + 1)
    return start


def _cuts_word(text: str, place: int) -> bool:
    """Whether the characters on both sides of a place belong to one word."""
    return 0 < place < len(text) and _is_in_word(text[place - 1]) and _is_in_word(text[place])


def _is_in_word(character: str) -> bool:
    # Accents and vowel signs that combine with a letter are no letters to Python.
    return character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")


def _write(articles: Iterable[dict[str, Any]], output: Path) -> None:
    """Writes the file, at once or not at all; one article is in memory at a time."""
    with atomic_open(output) as stream:
        stream.write('{"version": "1.1", "data": [')
        for number, article in enumerate(articles):
            stream.write((",\n" if number else "\n") + json.dumps(article, ensure_ascii=False))
        stream.write("\n]}\n")
