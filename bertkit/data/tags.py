"""Schemes of tags: IOB1, IOB2, IOBES and BILOU for named entities, or a class for each word.

In IOB2 each entity begins with B- and continues with I-; in IOB1 it begins with B- only directly after another of its
type. IOBES also marks the last of several words with E- and an entity of one word with S-; BILOU calls them L- and U-.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from sys import intern

from bertkit.data.formats.line import LONGEST_QUOTED
from bertkit.errors import UsageError
from bertkit.system.progress import Report

TAG = re.compile(r"O|[BIESLU]-\S(.*\S)?")
NO_CLASS = re.compile(r"[BIESLU]-.*|\d+", re.IGNORECASE)  # tags that are not guessed to be classes of words
BLANK = re.compile(r"[ \t\r\n]")  # separates columns and lines of CoNLL files
ENTITIES, WORDS = "entities", "words"  # kinds of scheme; with words, each tag is the class of a word
ENDS = {"IOBES": "ES", "BILOU": "LU"}  # scheme -> the marks of a last word and of an only word


def choose_scheme(given: str, tags: Collection[str]) -> str:
    """Return the given kind of scheme, or else guess it: words if no tag looks like an entity's, and not all are O."""
    return given or (WORDS if {*tags} - {"O"} and not any(map(NO_CLASS.fullmatch, tags)) else ENTITIES)


def name_scheme(labels: Sequence[str]) -> str:
    """Return the kind of scheme of a model's labels."""
    return ENTITIES if all(map(TAG.fullmatch, labels)) else WORDS


def check_tag(tag: str, origin: str, scheme: str = ENTITIES) -> str:
    """Return a tag of a known scheme, interned, because a file repeats few tags; any other is a UsageError."""
    if scheme == ENTITIES and not TAG.fullmatch(tag):
        raise UsageError(
            f"{origin}: the tag {tag[:LONGEST_QUOTED]!r} is not of IOB, IOBES or BILOU (O, or B-, I-, E-, S-, L- or U- "
            "and a type); correct it, or read tags as classes of words with --set data.scheme=words"
        )
    return intern(tag)


def check_kinds(source: str, kinds: Collection[str], report: Report) -> None:
    """Check that types or classes stay different in CoNLL files, where each space of a name is written as _."""
    known: dict[str, str] = {}
    for kind in sorted({*kinds} - {""}):  # the kind of O is empty
        if (other := known.setdefault(write_cell(kind), kind)) != kind:
            raise UsageError(f"{source}: the labels {other!r} and {kind!r} differ only by space and _; rename one")
    if spaced := [f"{kind!r} as {cell}" for cell, kind in known.items() if cell != kind]:
        report(f"{source}: CoNLL files have no spaces in labels; they are written with _, such as {spaced[0]}")


def write_cell(text: str) -> str:
    """Return a word or a tag as a cell of a CoNLL file, which blanks and line ends would divide."""
    return BLANK.sub("_", text) or "_"


def mark_words(tags: Sequence[str], scheme: str) -> Sequence[str]:
    """Return classes of words as tags in IOB2, in which each word is an entity; return other tags as they are."""
    return [f"B-{tag}" for tag in tags] if scheme == WORDS else tags


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert tags of any scheme to IOB2, with the same entities.

    As in conlleval, a tag that does not continue an entity of its type begins one.
    """
    found = []
    for before, tag in pairwise(["O", *tags]):
        continues = tag[0] in "IEL" and before[0] in "BI" and before[2:] == tag[2:]
        if tag != "O":
            tag = f"{'I' if continues else 'B'}{tag[1:]}"
        found.append(tag)
    return found


def from_iob2(tags: Sequence[str], scheme: str) -> list[str]:
    """Convert tags from IOB2 to a scheme, with the same entities.

    Ill-formed tags are unchanged in IOB2 and, where possible, in IOB1.
    """
    if scheme in ("IOB2", WORDS):
        return list(tags)
    if scheme == "IOB1":
        pairs = pairwise(["O", *tags])
        return ["I" + tag[1:] if tag[0] == "B" and before[2:] != tag[2:] else tag for before, tag in pairs]
    last, only = ENDS[scheme]
    found = []
    for tag, after in pairwise([*to_iob2(tags), "O"]):
        mark = tag[0]
        if tag != "O" and after[0] != "I":
            mark = only if mark == "B" else last
        found.append(mark + tag[1:])
    return found


def detect_scheme(sequences: Sequence[Sequence[str]]) -> tuple[str, int]:
    """Return the scheme of some sequences of tags, and how many of the tags do not follow it.

    IOB1 and IOB2 are distinguished by entities that do not follow one of their type.
    """
    marks = Counter(tag[0] for tag in chain.from_iterable(sequences))
    by_mark = {scheme: sum(marks[mark] for mark in ends) for scheme, ends in ENDS.items()}
    if any(by_mark.values()):
        scheme = max(by_mark, key=by_mark.__getitem__)
        pairs = chain.from_iterable(zip(tags, from_iob2(tags, scheme), strict=True) for tags in sequences)
        return scheme, sum(tag != expected for tag, expected in pairs)
    first = Counter(
        tag[0] for tags in sequences for before, tag in pairwise(["O", *tags]) if tag != "O" and before[2:] != tag[2:]
    )
    return ("IOB1" if first["I"] > first["B"] else "IOB2"), min(first["I"], first["B"])
