"""Convert TriviaQA-Wiki (Joshi et al. 2017) to a training file in SQuAD's format (section 4.2).

    python recipes/squad/triviaqa.py qa/wikipedia-train.json --evidence evidence --output triviaqa.json
    bertkit squad --version 1 --data SQUAD --extra-train triviaqa.json

The paper's footnote: "The TriviaQA data we used consists of paragraphs from TriviaQA-Wiki formed of the first 400
tokens in documents, that contain at least one of the provided possible answers." TriviaQA gives the answers but not
their positions, so every position is searched here.

Differs from the paper: it does not say what a token is; here it is a word, that is characters between white space.
"""

import argparse
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import regex

PARAGRAPH_WORDS = 400  # first words of a document that form its paragraph (section 4.2)
EVIDENCE_FOLDERS = ("", "wikipedia")  # subfolders searched for a document; the download has the second
OUTSIDE_WORD = r"(?:(?<![\w\p{M}])|(?![\w\p{M}]))"  # an offset that is not inside a word; accents belong to words


def read_opening(evidence: Path, filename: str) -> str:
    """Read the first 400 words of a document, with their white space."""
    paths = [evidence / folder / filename for folder in EVIDENCE_FOLDERS]
    text = next(filter(Path.is_file, paths), paths[0]).read_bytes().decode("utf-8-sig")
    ends = [word.end() for word in islice(re.finditer(r"\S+", text), PARAGRAPH_WORDS)]
    return text[: ends[-1]] if ends else ""


def fold(text: str) -> str:
    """Lower-case a text and replace white space by spaces, one character by one, so that offsets stay valid."""
    # Only İ has a lower case of two characters. Σ becomes ς at the end of a word and σ elsewhere, so ς is folded to σ.
    return re.sub(r"\s", " ", text.replace("İ", "i").lower().replace("ς", "σ"))


def find_answers(names: list[str], context: str) -> list[dict]:
    """Find the first occurrence of each answer as whole words: the earliest first, the longest of those with one start.

    The search ignores case and kinds of white space, and answers without a letter or digit.
    """
    folded, spans = fold(context), set()
    for answer in {" ".join(fold(name).split()) for name in names if any(map(str.isalnum, name))}:
        match = regex.search(OUTSIDE_WORD + regex.escape(answer) + OUTSIDE_WORD, folded) if answer in folded else None
        if match:
            spans.add(match.span())
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    return [{"text": context[start:end], "answer_start": start} for start, end in ordered]


def make_articles(entries: list[dict], evidence: Path, counts: Counter) -> list[dict]:
    """Return an article of one paragraph for each pair of a question and a document with an answer, and count."""
    articles = []
    for entry in entries:
        names = [entry["Answer"]["Value"], *entry["Answer"]["Aliases"]]
        titles = {page["Filename"]: page["Title"] for page in entry["EntityPages"] if "Filename" in page}
        for filename, title in titles.items():
            try:
                context = read_opening(evidence, filename)
            except (OSError, UnicodeDecodeError):
                counts["documents missing"] += 1
                continue
            answers = find_answers(names, context)
            if not answers:
                counts["documents without an answer"] += 1
                continue
            asked = {"id": f"{entry['QuestionId']}--{filename}", "question": entry["Question"], "answers": answers}
            articles.append({"title": title, "paragraphs": [{"context": context, "qas": [asked]}]})
            counts["paragraphs"] += 1
    return articles


def main() -> None:
    """Convert the files named on the command line."""
    parser = argparse.ArgumentParser(description="Convert TriviaQA-Wiki to a training file in SQuAD's format.")
    parser.add_argument("qa", type=Path, help="questions with answers, such as wikipedia-train.json")
    parser.add_argument("--evidence", type=Path, required=True, help="folder of TriviaQA's documents")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    given = parser.parse_args()
    counts: Counter = Counter()
    articles = make_articles(json.loads(given.qa.read_text(encoding="utf-8"))["Data"], given.evidence, counts)
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    if not articles:
        parser.error(f"no document in {given.evidence} has an answer ({found}); name the documents of {given.qa}")
    given.output.write_text(json.dumps({"version": "1.1", "data": articles}, ensure_ascii=False), encoding="utf-8")
    print(f"{given.output}: {found}")


if __name__ == "__main__":
    main()
