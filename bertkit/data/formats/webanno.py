"""WebAnno's and INCEpTION's TSV, version 3 -> a table of words and tags.

A line has the numbers of its sentence and word, offsets, the word, and a cell for each feature of each layer. Lines
with # may be missing. An annotation of several words, or one of several at a word, has a number: PER[1]. Where a column
has no numbers, neighbours of one value are one entity; where it has a value for each word, this is the word's class.

Left out: annotations of parts of words, and several annotations at a word.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from bertkit.data.formats.entities import TAG_COLUMNS, WORD_COLUMNS
from bertkit.data.formats.line import AGAIN, LONGEST_QUOTED, detect_encoding, read_lines, walk_file
from bertkit.data.formats.rows import Columns, write_values
from bertkit.errors import UsageError
from bertkit.system.progress import Report

LINE = re.compile(r"(\d+)-\d+(\.\d+)?\t\d+-\d+\t[^\t]+.*")  # the sentence, and the part of a word
WORD_INDEX, COLUMNS_BEFORE = 2, 3  # the word, and the columns before those of features
NOTHING = "_"  # a word without an annotation; * is one without a value
ANNOTATION = re.compile(r"((?:\\.|[^\\|])*?)(\[\d+\])?")  # several at a word have | between them
ESCAPED = re.compile(r"\\(.)")
NAMED_ENTITY = ".NamedEntity|value"  # layer and feature of entities in the header


def is_webanno(path: Path) -> bool:
    """Return whether the first line without # is a word of such a file."""
    lines = (line for line in walk_file(path) if isinstance(line, str) and line.strip() and line[0] != "#")
    return LINE.match(next(lines, "")) is not None


def read_webanno(path: Path, report: Report) -> Columns:
    """Read the sentences of a file, with the tags of its named entities or of its only column with annotations.

    All columns with annotations are also called by their numbers, from 1.
    """
    features: list[str] = []
    words: list[tuple[int, tuple[str, int], list[str]]] = []  # line, sentence, cells
    parts = breaks = 0
    for number, line in enumerate(read_lines(path, detect_encoding(path)), 1):
        if line.startswith("#T_"):
            layer, *names = line.split("|")
            features += [f"{layer}|{name}" for name in names]
        if not line.strip() or line.startswith("#"):
            breaks += 1
        elif not (form := LINE.fullmatch(line)):
            raise UsageError(f"{path}, line {number} is {line[:LONGEST_QUOTED]!r}, expected a word of WebAnno; {AGAIN}")
        elif form[2]:
            parts += 1
        else:
            words.append((number, (form[1], breaks), line.rstrip("\t").split("\t")))
    if parts:
        report(f"{path}: annotations of parts of words are left out ({parts:,} lines)")
    width = len(words[0][2])
    if odd := [number for number, _, cells in words if len(cells) != width]:
        raise UsageError(f"{path}, line {odd[0]} has not {width} columns as the first word; {AGAIN}")
    tags = _read_tags(path, [cells for *_, cells in words], features, report)
    rows, end = {}, 0
    for _, sentence in groupby(words, key=lambda word: word[1]):
        lines, _, cells = zip(*sentence, strict=True)
        start, end = end, end + len(cells)
        own = {name: found[start:end] for name, found in tags.items()}
        rows[lines[0]] = {WORD_COLUMNS[0]: [ESCAPED.sub(r"\1", row[WORD_INDEX]) for row in cells]} | own
    return write_values(str(path), iter(rows.items()), "line")


def _read_tags(
    path: Path, rows: Sequence[Sequence[str]], features: Sequence[str], report: Report
) -> dict[str, list[str]]:
    """Return the tags of all words in each column with annotations, by its name in the table."""
    columns = dict(enumerate(zip(*rows, strict=True), 1))
    annotated = [x for x, cells in columns.items() if x > COLUMNS_BEFORE and {*cells} != {NOTHING}]
    valued = [x for x in annotated if any(cell[:1] not in "_*" for cell in columns[x])] or annotated
    entities = [x for x, name in enumerate(features, COLUMNS_BEFORE + 1) if name.endswith(NAMED_ENTITY) and x in valued]
    tags = {str(x): _mark(columns[x]) for x in valued}
    if len(chosen := entities or valued) == 1:
        tags[TAG_COLUMNS[0]] = tags[str(chosen[0])]
    elif valued:
        report(f"{path}: annotations are in the columns {', '.join(tags)}; name one with --label")
    return tags


def _mark(cells: Sequence[str]) -> list[str]:
    """Return the tags of a column's cells; where several annotations are at a word, they stay as they are."""
    found = [ANNOTATION.fullmatch(cell) for cell in cells]
    is_numbered = any(one and one[2] for one in found)
    if not is_numbered and NOTHING not in cells:
        return [ESCAPED.sub(r"\1", cell) for cell in cells]
    tags = []
    for before, cell, one in zip([NOTHING, *cells], cells, found, strict=False):
        if cell == NOTHING or one is None:
            tags.append("O" if cell == NOTHING else cell)
            continue
        continues = not is_numbered or (one[2] is not None and before == cell)
        tags.append(f"{'I' if continues else 'B'}-" + ESCAPED.sub(r"\1", one[1]))
    return tags
