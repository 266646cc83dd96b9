"""CoNLL files, and the Hub's copy of CoNLL-2003 -> sentences of words and tags, in documents (paper section 5.3).

A file has one word per line, the word in its first column (or, after its number, in the second) and the tag in its
last, a blank line between sentences, and a line that begins with -DOCSTART- before each document (in CoNLL-U with
# newdoc). The scheme is detected from the tags, and tags of entities become IOB2.

Left out: the tokens of words (`bertkit.data.tagging`), and scores (`bertkit.metrics`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, repeat
from pathlib import Path

from bertkit.data.formats.entities import gather_sentences, read_entities
from bertkit.data.formats.hub import load_splits
from bertkit.data.formats.line import AGAIN, ENCODINGS, UTF8, detect_encoding, read_lines
from bertkit.data.formats.rows import convert_dataset, locate_column
from bertkit.data.formats.webanno import is_webanno, read_webanno
from bertkit.data.tagging import TaggedText
from bertkit.data.tags import ENTITIES, TAG, check_tag, choose_scheme
from bertkit.errors import UsageError, check_access
from bertkit.system.progress import Report, ignore

DOCSTART = "-DOCSTART-"
NER_SPLITS = ("train", "dev", "test")
NER_FILES = (  # file names of the splits, in the order of preference
    ("eng.train", "eng.testa", "eng.testb"),
    ("train.conll", "dev.conll", "test.conll"),
    ("train.txt", "dev.txt", "test.txt"),
    ("*train.conllu", "*dev.conllu", "*test.conllu"),  # as en_ewt-ud-train.conllu of Universal Dependencies
)
CONLLU = ".conllu"
MISC = "MISC"
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", MISC)
WORD_NUMBER = re.compile(r"[0-9]{1,9}")
WORD_RANGE = re.compile(r"[0-9]+[-.][0-9]+")  # CoNLL-U's contracted or omitted words, beside the words themselves
CONLL_SUFFIXES = (".conll", ".txt", CONLLU)
REMEDY = (
    "give a CoNLL file (.conll, .conllu, .txt), a table (.csv, .tsv, .jsonl, .json, .parquet), a Hub data set "
    "owner/name, or a folder that holds eng.train and eng.testa, train.conll, train.conllu, train.txt or a table train"
)
# The Hub's first copy, eriktks/conll2003, is a script, which `datasets` no longer runs; this one holds it as parquet.
NER_HUB, NER_CONFIG = "lhoestq/conll2003", "default"
NER_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


# --- Files ------------------------------------------------------------------------------------------------------------


def list_conll_files(folder: str | Path, report: Report = ignore) -> dict[str, Path]:
    """Find the file of each split in a folder, or in a folder in it, by the first names of NER_FILES that are there.

    The test file may be missing, and the dev file too unless the files have CoNLL-2003's names.
    """
    folder = Path(folder)
    check_access(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; {REMEDY}")
    wanted = [(below + names[0], names) for below in ("", "*/") for names in NER_FILES]
    kinds = [(found, names) for pattern, names in wanted if (found := sorted(folder.glob(pattern)))]
    if not kinds and any(map(is_webanno, folder.rglob("*.tsv"))):
        raise UsageError(
            f"{folder} has a TSV of WebAnno for each document; join them into one file (cat {folder}/*/*.tsv > "
            "all.tsv) and name that"
        )
    if not kinds or len(kinds[0][0]) > 1:
        has = f"several data sets ({', '.join(map(str, kinds[0][0]))})" if kinds else "no CoNLL files and no tables"
        raise UsageError(f"{folder} has {has}; {REMEDY}")
    ((train,), names), paths = kinds[0], {}
    if others := [str(path) for found, _ in kinds[1:] for path in found]:
        report(f"using the files named like {train}, not like {', '.join(others)}")
    for split, name in zip(NER_SPLITS, names, strict=True):
        path = min(train.parent.glob(name), default=train.with_name(name))
        if path.is_file():
            paths[split] = path
        elif split == "dev" and names is NER_FILES[0]:
            raise UsageError(f"{train.parent} has no {name}; {REMEDY}")
        else:
            report(f"{path} not found, " + ("dev is taken from train" if split == "dev" else "skipping"))
    return paths


def read_conll(
    path: Path, report: Report = ignore, label: str = "", scheme: str = "", encoding: str = ""
) -> TaggedText:
    """Read the sentences of a CoNLL file; columns are separated by spaces and tabs only.

    If each line has a tab, only tabs separate. A -DOCSTART- line may have any columns. If the first column counts the
    words of each sentence, the second has the words, and a line that begins with # is a comment, as in CoNLL-U.

    Args:
        label: The column of the tags: its number, from 1, or its name in CoNLL-U; "": UPOS there, else the last one.
        scheme: entities or words; "": guessed from the tags.
        encoding: "": UTF-8, UTF-16, cp1252 or GB18030, as the file is.
    """
    if is_webanno(path):
        return read_entities(read_webanno(path, report), report, label, scheme)
    is_conllu = path.suffix == CONLLU
    label = label.upper()
    if is_conllu and not label:
        label = "UPOS"
    found = detect_encoding(path, encoding)
    if found != UTF8 and not encoding:
        report(f"{path}: {ENCODINGS[found]}")
    lines = list(read_lines(path, found))
    rows = _divide([DOCSTART * line.startswith("# newdoc") if line.startswith("#") else line for line in lines])
    word = int(is_conllu or _is_numbered(rows))
    rows = rows if word else _divide(lines)
    names = CONLLU_COLUMNS if is_conllu else [str(number + 1) for number in range(max(map(len, rows), default=0))]
    column = locate_column(str(path), names, label, "give one of them with --label") if label else -1
    if word and not label:
        # GermEval has the inner tags of nested entities behind those of its entities.
        are_tags = all(TAG.fullmatch(x[2]) for x in rows if x and x[0] != DOCSTART)
        column = 2 if are_tags else column
        report(
            f"{path}: the first column counts the words, so the second is read as the words and the "
            f"{'third' if are_tags else 'last'} as their tags"
        )
    sentences, found = list(_walk_sentences(path, rows, column, word)), []
    if not sentences:
        raise UsageError(f"{path} has no sentences; {AGAIN}")
    words = [cells for _, lines in sentences for _, cells in lines]
    if not word and all(WORD_RANGE.fullmatch(cells[0]) for cells in words):
        raise UsageError(f"{path}: the first column has numbers of words, as in WebAnno's TSV 2; export WebAnno TSV 3")
    if names[column] == MISC:
        _read_misc(path, words, column, report)
    scheme = choose_scheme(scheme, {cells[column] for _, lines in sentences for _, cells in lines})
    for document, lines in sentences:
        tags = [check_tag(cells[column], f"{path}, line {line}", scheme) for line, cells in lines]
        found.append(([cells[word] for _, cells in lines], tags, document, lines[0][0], None))
    return gather_sentences(str(path), found, scheme)


def _divide(lines: Sequence[str]) -> list[list[str]]:
    """Return the cells of each line."""
    is_tabbed = all("\t" in line for line in lines if line.strip(" ") and not line.startswith(DOCSTART))
    return [
        [cell for cell in map(str.strip, line.split("\t"), repeat(" ")) if cell]
        if is_tabbed and not line.startswith(DOCSTART)
        else [cell for cell in line.replace("\t", " ").split(" ") if cell]
        for line in lines
    ]


def _read_misc(path: Path, words: Sequence[list[str]], column: int, report: Report) -> None:
    """Replace cells such as name=B-PER|SpaceAfter=No by the value of the only key with tags of entities, or O."""
    pairs: list[dict[str, str]] = []
    values: dict[str, set[str]] = {}
    for cells in words:
        parts = [part.rpartition("=") for part in cells[column].split("|")]
        pairs.append({key: value for key, _, value in parts})
        for key, value in pairs[-1].items():
            values.setdefault(key, set()).update({value} - {"_"})
    keys = [key for key, tags in values.items() if tags and all(map(TAG.fullmatch, tags))]
    if len(keys) != 1:
        has = f"tags in {' and '.join(keys)}" if keys else f"no tags of entities, but {', '.join(filter(None, values))}"
        raise UsageError(f"{path}: MISC has {has}; give one key whose values are tags, such as name=B-PER")
    if keys[0]:
        report(f"{path}: the tags are the values of {keys[0]} in the column {MISC}")
    for cells, pair in zip(words, pairs, strict=True):
        tag = pair.get(keys[0], "_")
        cells[column] = "O" if tag == "_" else tag


def _is_numbered(rows: Sequence[list[str]]) -> bool:
    """Return whether the first of at least three columns counts the words of each sentence."""
    steps, before = set(), ""
    for cells in rows:
        number = cells[0] if cells and cells[0] != DOCSTART else ""
        if number and (len(cells) < 3 or not WORD_NUMBER.fullmatch(number)):
            if WORD_RANGE.fullmatch(number):
                continue
            return False
        if number and before:
            steps.add(int(number) - int(before))
        before = number
    return steps == {1}


def _walk_sentences(
    path: Path, rows: Sequence[list[str]], column: int, word: int
) -> Iterator[tuple[int, list[tuple[int, list[str]]]]]:
    """Yield for each sentence with words the number of -DOCSTART- lines before it, and its words' numbers and cells."""
    width, document, least = 0, 0, max(column + 1, 2)
    for is_break, group in groupby(enumerate(rows, 1), lambda row: row[1][:1] in ([], [DOCSTART])):
        lines = list(group)
        if is_break:
            document += sum(bool(cells) for _, cells in lines)
            continue
        width = width or max(len(lines[0][1]), least)
        for number, cells in lines:
            if len(cells) != width:
                raise UsageError(f"{path}, line {number} has {len(cells)} columns, expected {width}; {AGAIN}")
        if words := [line for line in lines if not (word and WORD_RANGE.fullmatch(line[1][0]))]:
            yield document, words


# --- The Hub ----------------------------------------------------------------------------------------------------------


def read_conll_copy(label: str = "", scheme: str = "") -> dict[str, TaggedText]:
    """Read the splits of CoNLL-2003's copy on the Hub, in the form of `read_conll`; it has no documents.

    If the Hub is unreachable, the copy in the cache of `datasets` is used. test may be missing.
    """
    found = load_splits(NER_HUB, NER_CONFIG, NER_HUB_SPLITS, optional=("test",))
    scheme = scheme or ENTITIES * (not label)
    texts = {x: read_entities(convert_dataset(source, rows), ignore, label, scheme) for x, source, rows in found}
    return {split: replace(text, rows=None) for split, text in texts.items()}
