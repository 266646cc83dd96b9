"""Raw text -> documents of sentences -> flat arrays of token ids (paper §3.1, "Pre-training data").

The paper asks for "a document-level corpus rather than a shuffled sentence-level corpus", because segments are cut from
long contiguous text. A source is a text file (a sentence or a paragraph a line, a blank line between documents, `.gz`
too), a directory of them, a data set on the Hugging Face Hub, or `docs`: the docstrings of the standard library and of
every package installed for this interpreter, read without importing anything.

Sentences are found by `sentencex` (Wikimedia): terminators and hand-compiled abbreviations of some 300 languages in one
small wheel, nothing to download, above 100 MB/s. nltk's punkt has to be downloaded, spaCy is heavy, and pysbd, last
released in 2021, takes three hundred times as long to cut English in the same places.

Left out: the vocabulary (`bertkit.data.vocab`), pairs (`bertkit.data.pairs`) and masks (`bertkit.data.masking`).
"""

import ast
import gc
import gzip
import inspect
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bertkit.errors import UsageError

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

Document = list[str]  # its sentences
Paragraphs = list[str]  # a document before its sentences are split
Item = TypeVar("Item")

DOCS = "docs"
TEXT_SUFFIXES = (".txt", ".txt.gz")  # what is read of a directory
LONGEST_PARAGRAPH = 10_000  # characters that the sentence splitter is given at once
SENTENCE_ENDS = (". ", "! ", "? ", "。", "！", "？")
LONGEST_LINE = 10_000_000  # bytes without the line's end; a line of as many is refused
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # name or owner/name, :config may follow
FILE_NAME = re.compile(r"[.~].*|.*\.(bz2|csv|gz|html?|jsonl?|md|parquet|text|tsv|txt|xml|xz|zip|zst)")
HUB_TIMEOUT = 10  # seconds
LEAST_DOCUMENTS = 2  # of a part: a random next segment comes from another document
CHARACTERS_A_BATCH = 1_000_000  # tokenized at once

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"})
LARGEST_MODULE = 2_000_000  # bytes; larger ones are generated tables, and a syntax tree takes a hundred times as much
FILES_A_CHUNK = 32  # modules that a worker reads at once
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def ignore(*_: Any) -> None:
    """Report to nobody."""


def read_documents(
    sources: Sequence[str],
    *,
    split_sentences: bool = True,
    language: str = "en",
    limit_characters: int | None = None,
    workers: int | None = None,
    report: Callable[[str], None] = ignore,
) -> Iterator[Document]:
    """The documents of all sources, one after the other; only one of them is in memory at a time.

    A source is a text file, a directory (its .txt and .txt.gz files at any depth, in the order of their paths; files of
    other names have to be given themselves), `docs`, or a data set on the Hub (`name` or `owner/name`, both also with
    `:config`) whose column `text` holds a document a row. A directory that is called docs is given as `./docs`.

    Of each source come the first documents that reach `limit_characters` together; for `docs`, whose files are in the
    order of a hash, that is a fair mixture of the packages. `split_sentences=False` leaves each line as it is;
    `language` is a code that sentencex knows; `workers` processes read `docs` (one a CPU if not given).

    Raises:
        UsageError: at once if a source does not exist; while reading if a file is not UTF-8 text or a source is empty.
    """
    if not all(sources) or not sources:
        raise UsageError("no corpus given; name text files, directories, a Hub data set or docs")
    opened = [(source, _open_source(source, workers)) for source in sources]
    return _stream(opened, language if split_sentences else None, limit_characters, report)


def _open_source(source: str, workers: int | None) -> Iterator[Paragraphs]:
    """Its documents, not read yet; that it exists is checked here."""
    if source == DOCS:
        return _read_docs(workers)
    path = Path(os.path.expanduser(source))  # unlike Path's own it never fails
    if path.is_dir():
        return _read_files(_list_text_files(path))
    if path.exists():
        return _read_files([path])
    if not is_hub_name(source):
        raise UsageError(f"{source!r} does not exist; name a text file, a directory of them, a Hub data set or docs")
    return _read_hub(source)


def _stream(
    opened: list[tuple[str, Iterator[Paragraphs]]],
    language: str | None,
    limit_characters: int | None,
    report: Callable[[str], None],
) -> Iterator[Document]:
    for source, documents in opened:
        count = sentences = characters = 0
        with closing(documents):
            for paragraphs in documents:
                document = split_paragraphs(paragraphs, language) if language else paragraphs
                yield document
                count, sentences = count + 1, sentences + len(document)
                characters += sum(map(len, document))
                if limit_characters and characters >= limit_characters:
                    break
        if not count:
            raise UsageError(f"{source} holds no text; give a corpus of at least two documents")
        report(f"{source}: {count:,} documents, {sentences:,} sentences, {characters:,} characters")


def split_paragraphs(paragraphs: Paragraphs, language: str = "en") -> Document:
    """The sentences, without surrounding blanks.

    Two kinds of cut are undone: at a full stop without a blank, as in `torch.nn.Linear`, and beside a piece without a
    letter or digit, such as a closing quote of unusual form.
    """
    from sentencex import segment

    sentences: Document = []
    for paragraph in paragraphs:
        pieces: list[str] = []
        for piece in chain.from_iterable(segment(language, part) for part in _cut(paragraph)):
            if pieces and (pieces[-1].endswith(".") or not (_has_word(piece) and _has_word(pieces[-1]))):
                pieces[-1] += piece
            else:
                pieces.append(piece)
        sentences += map(str.strip, pieces)
    return sentences


def _cut(paragraph: str) -> Iterator[str]:
    """A paragraph in parts of about `LONGEST_PARAGRAPH` characters, each cut after what ends a sentence.

    The time of sentencex grows with the square of a paragraph's length where no blanks follow sentences (Chinese).
    """
    while len(paragraph) > LONGEST_PARAGRAPH:
        before = [(paragraph.rfind(end, 0, LONGEST_PARAGRAPH), len(end)) for end in SENTENCE_ENDS]
        after = [(paragraph.find(end, LONGEST_PARAGRAPH - 1), len(end)) for end in SENTENCE_ENDS]
        stop = max((place + length for place, length in before if place >= 0), default=0)
        stop = stop or min((place + length for place, length in after if place >= 0), default=len(paragraph))
        yield paragraph[:stop]
        paragraph = paragraph[stop:]
    if paragraph:
        yield paragraph


def _has_word(text: str) -> bool:
    return any(map(str.isalnum, text))


# --- text files


def _list_text_files(directory: Path) -> list[Path]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    texts = [file for file in files if file.name.endswith(TEXT_SUFFIXES) and not file.name.startswith(".")]
    if not texts:
        raise UsageError(
            f"none of the {len(files)} files in {directory} is .txt or .txt.gz; rename the texts or name each of them"
        )
    return texts


def _read_files(files: list[Path]) -> Iterator[Paragraphs]:
    for file in files:
        paragraphs: Paragraphs = []
        for line in _read_lines(file):
            if line:
                paragraphs.append(line)
            elif paragraphs:
                yield paragraphs
                paragraphs = []
        if paragraphs:
            yield paragraphs


def _read_lines(file: Path) -> Iterator[str]:
    """Its lines without surrounding blanks; at most `LONGEST_LINE` bytes are read at once."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            number = 0
            while line := stream.readline(LONGEST_LINE):
                number += 1
                yield _decode(line, f"{file}, line {number}", "utf-8-sig" if number == 1 else "utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{file} is no complete gzip file ({error}); compress it again or give plain text") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror or error}); check its permissions") from None


def _decode(line: bytes, where: str, encoding: str) -> str:
    if b"\0" in line:
        raise UsageError(f"{where} has a NUL byte, as binary files and UTF-16 have; give text in UTF-8")
    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
        raise UsageError(f"{where} has {LONGEST_LINE:,} bytes or more; put a sentence or a paragraph on a line")
    try:
        return line.decode(encoding).strip()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} in place {error.start + 1}); "
            "convert the file, for instance with iconv -f latin1 -t utf-8"
        ) from None


# --- the Hugging Face Hub


def is_hub_name(source: str) -> bool:
    """Whether it can be a name on the Hub, rather than the path of a file that does not exist."""
    return bool(HUB_NAME.fullmatch(source)) and not FILE_NAME.fullmatch(source)


def find_hub_trouble(name: str, kind: str) -> str | None:
    """Why the Hub cannot serve the `kind` ("dataset" or "model") `name`; None if it can.

    Asked once before `datasets` and `transformers` are: without a network they try again and again, for 23 seconds and
    for more than two minutes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        return f"the {kind} {name!r} on the Hub is open to approved users only"
    except (RepositoryNotFoundError, HFValidationError):
        return f"the Hub has no {kind} {name!r}"
    except HfHubHTTPError as error:
        return f"the Hub does not serve the {kind} {name!r} ({_join_words(error)})"
    except Exception as error:  # the transport's: huggingface_hub has changed its HTTP library more than once
        return f"the Hub cannot be reached for the {kind} {name!r} ({type(error).__name__})"
    return None


def _read_hub(source: str) -> Iterator[Paragraphs]:
    name, _, config = source.partition(":")
    remedy = "give a text file, a directory of them or docs instead"
    if trouble := find_hub_trouble(name, "dataset"):
        raise UsageError(f"{trouble}; {remedy}")
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"the data set {source!r} cannot be loaded ({_join_words(error)}); {remedy}") from None
    return _read_rows(source, rows)


def _read_rows(source: str, rows: Iterable[dict[str, Any]]) -> Iterator[Paragraphs]:
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise UsageError(f"the data set {source!r} has the columns {', '.join(row)}; choose one with a column text")
        if paragraphs := [line for line in map(str.strip, row["text"].splitlines()) if line]:
            yield paragraphs


def _join_words(error: Exception) -> str:
    return " ".join(str(error).split())


# --- the documentation installed on this machine


def _read_docs(workers: int | None) -> Iterator[Paragraphs]:
    """A document for each module with English prose in its docstrings; a paragraph comes only once.

    Docstrings are vendored, inherited and copied from class to class: whole documents would come again, and what is
    held out would be among what is trained on.
    """
    files = _list_modules()
    chunks = [files[start : start + FILES_A_CHUNK] for start in range(0, len(files), FILES_A_CHUNK)]
    seen: set[bytes] = set()
    for documents in _map_in_order(_read_docstrings, chunks, workers):
        for paragraphs in documents:
            unseen: Paragraphs = []
            for paragraph in paragraphs:
                digest = blake2b(paragraph.encode(), digest_size=12).digest()
                if digest not in seen:
                    seen.add(digest)
                    unseen.append(paragraph)
            if unseen:
                yield unseen


def _list_modules() -> list[Path]:
    """The source files in an order that mixes the packages: a hash of the path below its root."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    roots += [Path(entry) for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}]
    modules: dict[bytes, Path] = {}
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                modules[blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).digest()] = path
    return [modules[digest] for digest in sorted(modules)]


def _map_in_order(function: Callable[[Any], Item], arguments: Iterable[Any], workers: int | None) -> Iterator[Item]:
    """`map` by forked processes, a few arguments ahead of the consumer, who may stop at any time.

    Forked, because a spawned process runs the caller's script again and fails where that has no `__main__` guard.
    """
    workers = workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
    if workers == 1 or sys.platform != "linux":
        yield from map(function, arguments)
        return
    # Without the garbage collector: a syntax tree has no cycles, and looking for some takes longer than parsing.
    pool = ProcessPoolExecutor(workers, get_context("fork"), initializer=gc.disable)
    try:
        pending: deque[Future[Item]] = deque()
        for argument in arguments:
            pending.append(pool.submit(function, argument))
            if len(pending) > 4 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_docstrings(files: list[Path]) -> list[Paragraphs]:
    """The prose of each module that has some; a file that this Python cannot parse is passed over."""
    documents: list[Paragraphs] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        for file in files:
            try:
                if file.stat().st_size > LARGEST_MODULE:
                    continue
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            paragraphs = [text for docstring in _list_docstrings(tree) for text in extract_prose(docstring)]
            if paragraphs:
                documents.append(paragraphs)
    return documents


def _list_docstrings(tree: ast.Module) -> Iterator[str]:
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node, clean=False)):
            yield docstring
        stack += [child for child in reversed(node.body) if hasattr(child, "body")]


# Docstring markup and what becomes of it, in this order. A paragraph that begins inside a block is set off by a blank
# line and \0; _BODY are the lines that are indented deeper than the first group.
_SET_OFF = "\n\n\\1\0"
_BODY = r"(?:\n(?:\1 +\S.*| *(?=\n|\Z)))*"
_ADMONITION = "admonition|attention|caution|danger|hint|important|note|seealso|tip|topic|warning"
_VERSION = "deprecated|versionadded|versionchanged"
_FIELD = "arg|argument|cvar|exc|except|exception|ivar|key|keyword|kwarg|note|param|parameter|raises?|returns?|yields?"
_STRUCTURE = (
    (r" +$", ""),
    (r"^ *(```|~~~)(?s:.*?)(?:\1|\Z)", ""),  # fenced code
    (r"^ *(?:>>>|In \[\d).*(?:\n *\S.*)*", ""),  # a doctest and its output
    (rf"^( *)\.\. (?:{_ADMONITION}):: *", _SET_OFF),
    (rf"^( *)\.\. (?:{_VERSION}):: *\S*", _SET_OFF),
    (rf"^( *)\.\.(?: .*)?${_BODY}", ""),  # any other directive, a comment, a target, a citation
    (rf"^( *)(\S.*)?::${_BODY}", "\\1\\2:\n"),  # a literal block
    (r"^(?:References?|See [Aa]lso)\n([-=])\1{2,}$(?s:.*?)(?=^\S.*\n[-=]{3,}$|\Z)", ""),
    (r"^.*\n *([-=~^\"'#*+`:.<>_])\1{2,}$", ""),  # a title and the line under it
    (r"^ *=+(?: +=+)+$(?:\n *\S.*)*", ""),  # a table
    (r"^ *(?:[-=~^\"'#*+`:.<>_ ]+|\|.*|\+[-=].*)$", ""),  # rules, tables with bars
    (rf"^( *)[:@](?:{_FIELD})\b[^:\n]*:", _SET_OFF),  # :param x:
    (rf"^( *)[:@]\w+(?: [^:\n]*)?:(?: .*)?${_BODY}", ""),  # :type x: and other fields without prose
    (r"^ *[`*\\]{0,3}[\w.]+[\w.`*\\,{}\[\]/| ]{0,80} : .*$", "\n"),  # numpydoc's name : type
    (r"^( *)(?:[-*+•‣]|\(?(?:\d{1,2}|[a-zA-Z]|#)[.)]) +", _SET_OFF),  # an item of a list
    (r"^( *\0?)[`*]{0,3}[\w.]+[`*]{0,3} ?\(.*\) ?:(?= |$)", _SET_OFF),  # Google's name (type):
    (r"^(?<![^.:)\n]\n)( *\0?)[`*]{0,3}[\w.]+(?:\[.*\])?[`*]{0,3}:(?= |$)", _SET_OFF),  # name: after a full stop
)
_INLINE = (
    (r":[a-zA-Z][\w.+-]*(?::[\w.+-]+)*:(?=`)", ""),  # the role of :role:`text`
    (r"\[(`[^`]+`)\](?:\([^)\s]*\))?", r"\1"),  # [`text`] and [`text`](target)
    (r"!?\[([^\]\[]+)\]\([^)\s]+\)", r"\1"),  # [text](target)
    (r"`+~(?:[\w.]*\.)?([^`.]+)`+", r"\1"),  # `~package.name` shows the name
    (r"`+[!.]?([^`]+?)(?:\s*<[^`<>]+>)?`+_{0,2}", r"\1"),  # ``text``, `text <target>`_
    (r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])", r"\1"),  # *text*, **text**
    (r" ?\[[\w#*]+\]_", ""),  # a footnote's mark
    (r"\|(\w+)\|", r"\1"),
    (r"</?[A-Za-z][^<>]{0,80}>", " "),  # HTML
    (r"\\([^\w\s])", r"\1"),
)
STRUCTURE = [(re.compile(pattern, re.MULTILINE), replacement) for pattern, replacement in _STRUCTURE]
INLINE = [(re.compile(pattern), replacement) for pattern, replacement in _INLINE]

NOT_LETTERS = re.compile(r"[^A-Za-z]+")
SYMBOL = re.compile(r"[=(){}\[\]<>_;\\/|@#$%^&*+~`]")
_FUNCTION_WORDS = """
    a all an and any are as at be but by can does each for from has have if in into is it its may must no not of on only
    or should than that the their then this to up was we when where whether which will with you
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


def extract_prose(docstring: str) -> Paragraphs:
    """Its paragraphs of English, a line each, without code, doctests, tables, titles, types and markup."""
    text = inspect.cleandoc(docstring).encode(errors="ignore").decode()  # without lone surrogates, which are no text
    for pattern, replacement in STRUCTURE:
        text = pattern.sub(replacement, text)
    return [prose for paragraph in _join_lines(text) if _is_prose(prose := _strip_markup(paragraph))]


def _join_lines(text: str) -> Iterator[str]:
    """Paragraphs: to a blank line or another indentation; those set off by \\0 to a smaller one."""
    for block in re.split(r"\n *\n", text):
        lines: list[str] = []
        start, set_off = 0, False
        for line in filter(str.strip, block.split("\n")):
            words = line.lstrip(" ")
            indent = len(line) - len(words)
            if lines and (indent < start if set_off else indent != start):
                yield " ".join(lines)
                lines = []
            if not lines:
                start, set_off = indent, words.startswith("\0")
            lines.append(words)
        if lines:
            yield " ".join(lines)


def _strip_markup(paragraph: str) -> str:
    text = " ".join(paragraph.replace("\0", "").split())
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _is_prose(text: str) -> bool:
    """Whether it has at least four words, mostly letters, few symbols, and a function word for every ten words."""
    words = text.lower().split()
    return (
        len(words) >= 4
        and sum(map(len, NOT_LETTERS.findall(text))) <= 0.3 * len(text)
        and len(SYMBOL.findall(text)) <= 0.06 * len(text)
        and sum(map(FUNCTION_WORDS.__contains__, words)) >= max(1, 0.1 * len(words))
    )


# --- token ids


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """All tokens of all documents side by side, without special tokens; no sentence and no document is empty.

    `ids` (N,) is uint16 for a vocabulary of at most 65,536 tokens, else uint32; `sentence_ends` (S,) int64 are the
    tokens up to each sentence's end, `document_ends` (D,) int64 the sentences up to each document's end.
    """

    ids: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray

    @property
    def token_count(self) -> int:
        return len(self.ids)

    @property
    def sentence_count(self) -> int:
        return len(self.sentence_ends)

    @property
    def document_count(self) -> int:
        return len(self.document_ends)


def copy_backend(tokenizer: Any) -> Any:
    """A copy of its `tokenizers.Tokenizer`, so that the caller's stays as it is: without padding and truncation.

    Special tokens written out in a text are ordinary text for it.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend


def tokenize_documents(documents: Iterable[Document], tokenizer: "BertTokenizerFast") -> TokenizedCorpus:
    """The token ids of the documents; sentences without a token and documents without a sentence are left out.

    A special token that is written out in the text, as `[MASK]` is in the documentation of tokenizers, becomes the ids
    of its letters, as in the reference code; transformers would take it for a mask.
    """
    backend = copy_backend(tokenizer)
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    ids, sentence_ends, document_ends = bytearray(), bytearray(), bytearray()  # these grow in place
    tokens = sentences = 0
    for batch in _batch(documents):
        texts = [sentence for document in batch for sentence in document]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids += np.fromiter((i for encoding in encodings for i in encoding.ids), dtype, lengths.sum()).tobytes()
        owners = np.repeat(
            np.arange(len(batch)), [len(document) for document in batch]
        )  # the document of each sentence
        counts = np.bincount(owners[lengths > 0])
        sentence_ends += (tokens + np.cumsum(lengths[lengths > 0])).tobytes()
        document_ends += (sentences + np.cumsum(counts[counts > 0])).tobytes()
        tokens, sentences = tokens + int(lengths.sum()), sentences + int(counts.sum())
    return TokenizedCorpus(
        np.frombuffer(ids, dtype), np.frombuffer(sentence_ends, np.int64), np.frombuffer(document_ends, np.int64)
    )


def _batch(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of `CHARACTERS_A_BATCH` together, or a little more."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document))
        if characters >= CHARACTERS_A_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def hold_out(documents: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """Training and held-out documents, both in their order; which are held out is drawn from the seed.

    At least two in each part, as next-sentence prediction needs; so of fewer than four, none is held out.

    Raises:
        UsageError: fewer than two documents, or a share outside [0, 1).
    """
    count = len(documents)
    if count < LEAST_DOCUMENTS:
        raise UsageError(
            f"the corpus has {count} document{'s' * (count != 1)} and next-sentence prediction needs two; "
            "put a blank line between documents or name more sources"
        )
    if not 0 <= share < 1:
        raise UsageError(f"the held-out share is {share}; give 0 or more and less than 1")
    size = min(max(round(share * count), LEAST_DOCUMENTS), count - LEAST_DOCUMENTS) if share and count >= 4 else 0
    held_out = set(np.random.default_rng(seed).permutation(count)[:size].tolist())
    return (
        [document for index, document in enumerate(documents) if index not in held_out],
        [document for index, document in enumerate(documents) if index in held_out],
    )
