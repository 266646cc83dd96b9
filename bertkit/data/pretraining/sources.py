"""Raw text -> documents of sentences (paper §3.1, "Pre-training data").

The paper asks for "a document-level corpus rather than a shuffled sentence-level corpus", because segments are taken
from long contiguous text. A source is a text file (a sentence or a paragraph per line, a blank line between documents),
a JSONL file (a document per line, `{"text": "…"}`), a file of WikiExtractor (`<doc …>` before a document), a directory
of such files (all also as `.gz`), a data set on the Hugging Face Hub, or `docs`: the documentation installed on this
machine (`bertkit.data.pretraining.docstrings`).

Sources are divided into pieces, which many processes can read in parallel; together, the pieces hold the documents of
all sources in order. A process finds the start of its piece of a large file without reading what comes before it, and
holds one document in memory, of long ones a part.

Sentences are found by `sentencex` (Wikimedia): terminators and hand-compiled abbreviations of some 300 languages in one
small wheel, nothing to download, above 100 MB/s.

Left out: the vocabulary (`bertkit.data.tokenizer`) and the token ids (`bertkit.data.pretraining.tokenize`).
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO, Literal

import msgspec

from bertkit.data.formats.line import UTF8, Parsed, explain_fault, open_file
from bertkit.data.pretraining.docstrings import Paragraphs, read_docs
from bertkit.errors import UsageError, as_usage_error, check_access, join_lines, pluralize
from bertkit.system.hub import explain_hub_trouble, parse_hub_name
from bertkit.system.progress import Report, ignore

Document = list[str]  # the sentences of a document
# Rule of `keep_passages`, or MARKED_UP -> the number of its lines, or of marks, and the first EXAMPLES.
Noted = dict[str, list[Any]]

DOCS = "docs"
BUILT_FILES, BUILT_FOLDERS = ("build.json", "corpus.json"), ("shards", "parts")  # files and folders of a built corpus
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet")  # refused: their markup would become text
TEXT_SUFFIXES = (".txt", ".txt.gz", *JSONL_SUFFIXES)  # files read from a directory
PIECE_BYTES = 1 << 26  # bytes of a large file in one piece
SMALL = 16  # small files share a piece up to PIECE_BYTES / SMALL, so a million files do not make a million pieces
END = sys.maxsize  # stop of a piece that extends to the end of its file
LONGEST_DOCUMENT = 5_000_000  # characters; longer documents are split
# Characters passed to the sentence splitter in one call: its running time is quadratic in a paragraph's length if no
# spaces follow sentences (Chinese).
LONGEST_PARAGRAPH = 10_000
SENTENCE_END = r"(?:(?<=[.!?] )|(?<=[。！？])|\Z)"
# Parts of a paragraph, each up to the last sentence end within that length, or to the first one after it.
SHORT_PARTS = re.compile(rf"(?s:.{{1,{LONGEST_PARAGRAPH}}}{SENTENCE_END}|.+?{SENTENCE_END})")
LINES_OF_FORM = 3  # lines that tell the form of a file
DOC_LINE = re.compile(r"</?doc\b[^<>]*>$", re.IGNORECASE)  # a line of WikiExtractor
MARKED_UP = "markup"
TAGS = re.compile(
    r"<[/!?]?[A-Za-z][\w:-]*(?:\s[^<>]*)?/?>|&#?\w{2,8};|\[\[\w|\{\{"
)  # tags, entities, links and templates
JSON_KEYS = re.compile(r'"\w+"\s*:')
MOST_MARKUP = 0.01  # tags, entities or keys per sentence
JSONL_REMEDY = 'each line of JSONL must be a document, {"text": "..."}'


class TextRow(msgspec.Struct):
    """The fields of a JSONL line, or of a row on the Hub, that are read."""

    text: str


@dataclass(frozen=True)
class Piece:
    """A part of a source that one process reads; it gives the same documents every time."""

    source: str  # the source as the user gave it
    kind: Literal["text", "jsonl", "wiki", "docs", "hub"]
    path: str = ""  # the first file, or the name of a data set on the Hub
    # start, stop: Documents whose first byte is in `start` to `stop` - 1 belong to the piece. For a data set on the
    # Hub, the index of the shard and the number of shards
    start: int = 0
    stop: int = END
    size: int = 0  # the bytes to read, 0 if unknown
    more: tuple[str, ...] = ()  # files read completely after the first one

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the piece; the first may be read only in part."""
        return (self.path, *self.more) if self.kind not in ("docs", "hub") else ()


def read_documents(
    sources: Sequence[str],
    *,
    split_sentences: bool = True,
    language: str = "en",
    passages: bool = False,
    words: str = "",
    limit_characters: int | None = None,
    report: Report = ignore,
) -> Iterator[Document]:
    """Yield the documents of all sources in order, with only one document in memory at a time.

    A directory is searched at any depth for .txt, .txt.gz, .jsonl and .jsonl.gz files, in the order of their paths.
    Hidden files and files with other suffixes must be named themselves. A file whose first lines are JSONL or begin
    with `<doc …>` is read as that, whatever its name. A data set on the Hub (`name` or `owner/name`, also with
    `:config` and `@revision`) needs a column `text` with a document per row. A directory called docs is given as
    `./docs`.

    Documents of more than `LONGEST_DOCUMENT` characters are split before the paragraph that exceeds the limit: a file
    without a blank line would otherwise be one document of any size.

    Args:
        language: Language code for `sentencex`.
        passages: Whether to keep only the lines that `keep_passages` keeps.
        words: "spaces" if spaces are borders of words and nothing else: sentences are found without them.
        limit_characters: Stop each source after the document that reaches this number of characters. For `docs`, whose
            files are sorted by a hash, this is a fair mixture of the packages.
    """
    cut = [(source, cut_sources([source], PIECE_BYTES)) for source in sources]
    how = {"split_sentences": split_sentences, "language": language, "passages": passages, "words": words}
    read = partial(read_piece, **how, report=report)
    unit = "sentence" if split_sentences else "line"

    def stream() -> Iterator[Document]:
        for source, pieces in cut:
            counts, noted = {"document": 0, unit: 0, "character": 0}, {}
            with closing(document for piece in pieces for document in read(piece, noted=noted)) as documents:
                for document in documents:
                    yield document
                    counts["document"] += 1
                    counts[unit] += len(document)
                    counts["character"] += sum(map(len, document))
                    if counts["character"] >= (limit_characters or sys.maxsize):
                        break
            markup = noted.pop(MARKED_UP, [0])
            gone = [f"{count:,} {rule}" for rule, (count, *_) in noted.items()]
            less = "; left out " + ", ".join(gone) if gone else ""
            if not counts["document"]:
                raise UsageError(f"{source} holds no text{less}; give a corpus with text")
            report(f"{source}: " + ", ".join(pluralize(number, name) for name, number in counts.items()) + less)
            for line in warn_of_markup(markup, counts[unit]):
                report(line)

    return stream()


def cut_sources(sources: Sequence[str], piece_bytes: int) -> list[Piece]:
    """Divide all sources into pieces, in the order of the corpus.

    Large files are divided into pieces of `piece_bytes` bytes, except .gz files; adjacent small files share a piece. A
    data set on the Hub has a piece per shard; `docs` is one piece.
    """
    return [piece for source in sources for piece in _cut_source(source, piece_bytes)]


def read_piece(
    piece: Piece,
    *,
    split_sentences: bool = True,
    language: str = "en",
    passages: bool = False,
    words: str = "",
    noted: Noted | None = None,
    workers: int | None = None,
    report: Report = ignore,
) -> Iterator[Document]:
    """Yield the documents of a piece, possibly none; the other options are those of `read_documents`.

    Args:
        passages: Whether to keep only the lines that `keep_passages` keeps; those of `docs` are passages.
        noted: Gets the lines that are left out, and those that look like markup.
        workers: Processes that read `docs`; one per CPU by default.
    """
    noted = {} if noted is None else noted
    documents = read_docs(workers) if piece.kind == "docs" else _gather(piece, passages, noted, report)
    with closing(documents):
        split = split_divided if words else split_paragraphs
        for paragraphs in documents:
            yield split(paragraphs, language) if split_sentences else paragraphs


def _gather(piece: Piece, passages: bool, noted: Noted, report: Report) -> Iterator[Paragraphs]:
    """Yield the piece's documents; those of several paragraphs have at most `LONGEST_DOCUMENT` characters."""
    paragraphs: Paragraphs = []
    characters = cuts = 0
    lines = _read_hub(piece) if piece.kind == "hub" else _read_files(piece)
    for line in keep_passages(lines, noted) if passages else lines:
        text = line.strip()  # an empty line ends a document, a blank one only a paragraph
        marks = TAGS.findall(text)
        if text.startswith(("{", "[", '"')):
            marks += JSON_KEYS.findall(text)
        note_lines(noted, {MARKED_UP: [len(marks), text]})
        too_long = bool(text) and characters + len(text) > LONGEST_DOCUMENT
        if paragraphs and (too_long or not line):
            yield paragraphs
            cuts += bool(line)
            paragraphs, characters = [], 0
        if text:
            paragraphs.append(text)
            characters += len(text)
    if paragraphs:
        yield paragraphs
    if cuts:
        report(
            f"{piece.source}: documents of more than {LONGEST_DOCUMENT:,} characters were split at a paragraph, "
            f"{pluralize(cuts, 'time')}; put a blank line between documents"
        )


# --- passages

SHORT_LINES, SHORT = "short lines", 100  # the rule of lines without a mark, and their most characters
EXAMPLES, LONGEST_EXAMPLE = 3, 40  # examples of each rule, and their characters
CAPTION = r"(?:[\w-]{3,}(?:\s*=[^|]*)?|\d*x?\d+\s?px)\|"  # a picture on Wikipedia: thumb|, upright=1.2|, 200px|
NAMESPACES = "Category|Kategorie|Catégorie|Categoría|Categoria|Categorie"
RULES = {  # rule -> its lines, in Wikipedia's plain text from the Hub, WikiExtractor and the API
    "headings": re.compile(r"=.*=$|Section::::"),
    "list items": re.compile(r"[*#;:•]+(?:\s|$)|BULLET::::"),
    "table rows": re.compile(r"\{?\||!\s|!.*(?:!!|\|)"),
    "links": re.compile(
        rf"\[\[[^]|]+:.*\]\]$|(?:{NAMESPACES}):\S|{CAPTION}|[^|]+\.(?i:jpe?g|png|svg|gif|tiff?|webp)\||"
        r"\[?https?://\S+$|</?doc\b.*>$"
    ),
}


def keep_passages(lines: Iterable[str], noted: Noted) -> Iterator[str]:
    """Yield the lines of text and the blank ones, as 3.1 asks for ("ignore lists, tables, and headers").

    Lines that fit a rule are left out, and so is a run of short lines if none begins with a small letter or ends with a
    punctuation mark, and a blank, a long or a left-out line follows; other runs may be verses or wrapped paragraphs.
    """
    run: list[str] = []
    for line in chain(lines, [""]):
        text = line.strip()
        rule = next((name for name, pattern in RULES.items() if pattern.match(text)), "")
        is_short = not rule and 0 < len(text) <= SHORT
        if is_short and text.rstrip(")]")[-1:].isalnum() and not text[0].islower():
            run.append(line)
            continue
        if is_short:
            yield from run
        else:
            note_lines(noted, {SHORT_LINES: [len(run), *run], rule: [1, text]})
        run = []
        if not rule:
            yield line


def warn_of_markup(noted: Sequence[Any], sentences: int) -> Iterator[str]:
    """Yield a line with the remedy if a corpus has much markup, as `Noted` counts it."""
    count, *examples = noted
    if count > MOST_MARKUP * sentences:
        yield (
            f"warning: the text has {count:,} tags, entities or keys of markup, first in {examples[0]!r}; "
            "they are trained as words; give plain text"
        )


def note_lines(total: Noted, more: Noted) -> None:
    """Add numbers of lines, and the first different lines up to EXAMPLES a rule, to those of `total`."""
    for rule, (count, *examples) in more.items():
        if rule and count:
            found = total.setdefault(rule, [0])
            found[0] += count
            news = dict.fromkeys(line.strip()[:LONGEST_EXAMPLE] for line in examples)
            found += [line for line in news if line not in found][: 1 + EXAMPLES - len(found)]


# --- sentences


def split_paragraphs(paragraphs: Paragraphs, language: str = "en") -> Document:
    """Split paragraphs into sentences, without surrounding spaces.

    Two kinds of splits are undone: at a full stop without a following space, as in `torch.nn.Linear`, and next to a
    piece without a letter or digit, such as an unusual closing quote.
    """
    from sentencex import segment

    sentences: Document = []
    for paragraph in paragraphs:
        pieces: list[str] = []
        for piece in chain.from_iterable(segment(language, part) for part in SHORT_PARTS.findall(paragraph)):
            if pieces and (pieces[-1].endswith(".") or not (_has_word(piece) and _has_word(pieces[-1]))):
                pieces[-1] += piece
            else:
                pieces.append(piece)
        sentences += map(str.strip, pieces)
    return sentences


def split_divided(paragraphs: Paragraphs, language: str) -> Document:
    """Split paragraphs into the sentences that they have without spaces, and keep the spaces, as borders of words."""
    sentences: Document = []
    for paragraph in paragraphs:
        characters = iter(re.findall(r"\s*\S", paragraph))  # each with the spaces before it
        for sentence in split_paragraphs(["".join(paragraph.split())], language):
            sentences.append("".join(islice(characters, len(sentence))).strip())
    return sentences


def _has_word(text: str) -> bool:
    return any(map(str.isalnum, text))


# --- sources and pieces


def _cut_source(source: str, piece_bytes: int) -> list[Piece]:
    """Check that a source exists and divide it into pieces."""
    if source == DOCS:
        return [Piece(source, "docs")]
    path = os.path.expanduser(source)  # unlike Path's methods, these functions never fail
    if is_built(path):
        raise UsageError(f"{source} is a built corpus, not text; name the text it was built from")
    with as_usage_error(source):
        check_access(path)
        if os.path.exists(path):
            if os.path.isfile(path) and path.removesuffix(".gz").endswith(TABLE_SUFFIXES):
                raise UsageError(f'{source} is a table; give its texts, one per line, or as JSON lines {{"text": "…"}}')
            return _cut_files(source, _list_files(path) if os.path.isdir(path) else [path], piece_bytes)
    if parse_hub_name(source) is None:
        raise UsageError(
            f"{source!r} does not exist; name a text or JSONL file, a directory of them, a Hub data set, docs, or what "
            "bertkit corpus build has made"
        )
    count = _load_hub(source).num_shards
    return [Piece(source, "hub", source, number, count) for number in range(count)]


def is_built(path: str | Path) -> bool:
    """Return whether a directory holds a corpus that `bertkit corpus build` has built or is building, not text."""
    files, folders = (Path(path, name) for name in BUILT_FILES), (Path(path, name) for name in BUILT_FOLDERS)
    return any(map(os.path.isfile, files)) and any(map(os.path.isdir, folders))


def _list_files(directory: str) -> list[str]:
    """List the text files at any depth, sorted by the parts of their paths.

    Hidden files and folders, and corpora built inside the directory, are skipped. The paths are strings, as there may
    be millions of files.

    Raises:
        OSError: A folder cannot be accessed.
    """

    def refuse(error: OSError) -> None:
        raise error  # `os.walk` would leave the folder out

    texts = []
    for folder, folders, names in os.walk(directory, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and not is_built(os.path.join(folder, name))]
        texts += [os.path.join(folder, name) for name in names if name.endswith(TEXT_SUFFIXES) and name[0] != "."]
    texts = sorted(filter(os.path.isfile, texts), key=lambda file: file.replace(os.sep, "\0"))
    if not texts:
        raise UsageError(
            f"no file in {directory} ends in {', '.join(TEXT_SUFFIXES[:-1])} or {TEXT_SUFFIXES[-1]}; rename the text "
            "files or name each of them"
        )
    return texts


def _cut_files(source: str, files: list[str], piece_bytes: int) -> list[Piece]:
    small = max(piece_bytes // SMALL, 1)
    sizes = [os.path.getsize(file) for file in files]  # 0 for a pipe

    def find_group(item: tuple[str, int, int]) -> tuple[str, bool, int]:
        file, size, before = item
        return detect_form(file), size > small, before // small

    pieces: list[Piece] = []
    for (kind, large, _), items in groupby(zip(files, sizes, accumulate(sizes, initial=0), strict=False), find_group):
        group = [(file, size) for file, size, _ in items]  # a large file is alone in its group
        file, size = group[0]
        if large and not file.endswith(".gz"):  # a .gz file cannot be read from the middle
            starts = range(0, size, piece_bytes)
            for start, stop in zip(starts, [*starts[1:], END], strict=True):
                pieces.append(Piece(source, kind, file, start, stop, min(stop, size) - start))
        else:
            total = sum(size for _, size in group)
            pieces.append(Piece(source, kind, file, size=total, more=tuple(file for file, _ in group[1:])))
    return pieces


def detect_form(file: str) -> Literal["text", "jsonl", "wiki"]:
    """Return the form of a file: by its suffix, else by its first lines, as WikiExtractor's files have none."""
    if file.endswith(JSONL_SUFFIXES):
        return "jsonl"
    if not os.path.isfile(file):  # a pipe can be read only once
        return "text"
    with open_file(Path(file)) as stream:
        lines = (line.decode(UTF8, "replace").strip() for line in stream)
        first = list(islice(filter(None, lines), LINES_OF_FORM))
    if first and all(map(_is_row, first)):
        return "jsonl"
    return "wiki" if first and DOC_LINE.match(first[0]) else "text"


# --- text and JSONL files


def _read_files(piece: Piece) -> Iterator[str]:
    parse = _parse_wiki if piece.kind == "wiki" else str.strip
    read = _read_jsonl if piece.kind == "jsonl" else partial(_read_text, parse=parse)
    yield from read(piece.path, piece.start, piece.stop)
    for path in piece.more:
        yield ""
        yield from read(path, 0, END)


def _read_text(path: str, start: int, stop: int, parse: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines of the documents that begin in `start` to `stop` - 1, with empty lines between documents."""
    inside = mine = False  # whether a line is inside a document, and inside one of this piece
    for offset, line in _read_lines(path, start, parse):
        if not (inside and line):
            mine = bool(line) and start <= offset < stop
        inside = bool(line)
        if mine or not line:
            yield line
        if offset >= stop and not mine:
            return


def _read_jsonl(path: str, start: int, stop: int) -> Iterator[str]:
    """Yield the lines of the documents whose rows begin in `start` to `stop` - 1."""
    for offset, text in _read_lines(path, start, _parse_row):
        if offset >= stop:
            return
        if offset >= start:
            yield from _list_lines(text)


def _parse_wiki(line: str) -> str:
    """Return a line of WikiExtractor: empty around documents, and a space for a blank one within a document."""
    text = line.strip()
    return "" if DOC_LINE.match(text) else text or " "


def _is_row(line: str) -> bool:
    with suppress(UsageError):
        _parse_row(line)
        return True
    return False


def _parse_row(line: str) -> str:
    if not line.strip():
        return ""
    try:
        text = msgspec.convert(json.loads(line), TextRow).text
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"is not a document ({join_lines(error)}); {JSONL_REMEDY}") from None
    return text.encode(errors="ignore").decode()  # without halves of characters


def _list_lines(text: str) -> list[str]:
    """Return the lines of a document, none of them empty but the last, which ends it."""
    return [*(line or " " for line in text.splitlines()), ""]


def _read_lines(path: str, start: int, parse: Callable[[str], Parsed]) -> Iterator[tuple[int, Parsed]]:
    """Yield the offset of each line and its parsed value, beginning with the line that holds the byte before `start`.

    The caller therefore sees the line before `start`.
    """
    with open_file(Path(path)) as stream:
        first = offset = _seek_line(stream, start) if start else 0
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8" if offset else UTF8, "surrogateescape")
                if fault := explain_fault(text):
                    raise UsageError(fault)
                parsed = parse(text)
            except UsageError as error:
                raise UsageError(f"{path}, line {_count_lines(path, first) + number} {error}") from None
            yield offset, parsed
            offset += len(line)


def _seek_line(stream: BinaryIO, start: int) -> int:
    """Move the stream to the start of the line that holds the byte before `start`, and return this offset."""
    with mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
        return stream.seek(content.rfind(b"\n", 0, start - 1) + 1)  # a newline before `start` ends the line itself


def _count_lines(path: str, stop: int) -> int:
    """Count the lines that end before the byte `stop`."""
    number = 0
    if stop:  # a pipe cannot be opened again
        with open(path, "rb") as stream:
            while stream.tell() < stop:
                stream.readline()
                number += 1
    return number


@lru_cache(maxsize=1)  # called for each shard of a data set
def _load_hub(source: str) -> Any:
    """Return the rows as an `IterableDataset` that has not begun to read."""
    name, config, revision = parse_hub_name(source)
    remedy = "give a text or JSONL file, a directory of them or docs instead"
    if not (trouble := explain_hub_trouble(name, "dataset", revision)):
        import datasets

        # The default lock has a semaphore, about which Python warns where a worker process is ended.
        datasets.utils.tqdm.set_lock(RLock())
        try:
            return datasets.load_dataset(name, config, split="train", streaming=True, revision=revision)
        except Exception as error:  # includes HTTP errors
            trouble = f"the data set {source!r} cannot be loaded ({join_lines(error)})"
    raise UsageError(f"{trouble}; {remedy}")


def _read_hub(piece: Piece) -> Iterator[str]:
    what = f"the data set {piece.source!r}"
    try:
        for row in _load_hub(piece.source).shard(num_shards=piece.stop, index=piece.start):
            with as_usage_error(what, "choose one with a column named text"):
                text = msgspec.convert(row, TextRow).text
            yield from _list_lines(text)
    except UsageError:
        raise
    except Exception as error:  # HTTP errors; datasets has already retried many times
        raise UsageError(f"{what} cannot be read ({join_lines(error)}); run the same command again") from None
