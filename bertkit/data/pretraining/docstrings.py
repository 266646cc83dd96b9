"""The documentation installed on this machine: the English prose of docstrings, as a corpus without a download.

The standard library and every package installed for this interpreter are read, and nothing is imported.
"""

import ast
import gc
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from bertkit.system.cluster import count_cores
from bertkit.system.signals import leave_signals_to_parent, open_pool

Paragraphs = list[str]  # a document before sentence splitting

SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"})
LARGEST_MODULE = 2_000_000  # bytes; larger ones are generated tables, and a syntax tree takes a hundred times as much
FILES_A_CHUNK = 32  # modules in one job of a worker
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_docs(workers: int | None) -> Iterator[Paragraphs]:
    """Yield one document per module with English prose in its docstrings, without repeated paragraphs.

    Docstrings are vendored, inherited and copied between classes. Without deduplication, whole documents would repeat,
    and held-out text would also be in the training data.

    Args:
        workers: Processes that parse; one per CPU by default. The consumer may stop at any time.
    """
    files = _list_modules()
    chunks = [files[start : start + FILES_A_CHUNK] for start in range(0, len(files), FILES_A_CHUNK)]
    seen: set[bytes] = set()
    with ExitStack() as stack:
        do = map
        if (workers := workers or count_cores()) > 1 and sys.platform == "linux":
            # A spawned process would run the caller's script again, and fail if that has no `__main__` guard.
            do = stack.enter_context(open_pool(workers, "fork", _begin)).map
        for paragraphs in chain.from_iterable(do(_read_docstrings, chunks)):
            digests = {blake2b(paragraph.encode(), digest_size=12).digest(): paragraph for paragraph in paragraphs}
            unseen = [paragraph for digest, paragraph in digests.items() if digest not in seen]
            seen.update(digests)
            if unseen:
                yield unseen


def _list_modules() -> list[Path]:
    """List the source files sorted by a hash of the path below their root, which mixes the packages."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    roots += [Path(entry) for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"}]
    modules: dict[bytes, Path] = {}
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                modules[blake2b(path.relative_to(root).as_posix().encode(), digest_size=16).digest()] = path
    return [modules[digest] for digest in sorted(modules)]


def _begin() -> None:
    """Initialise a forked process."""
    leave_signals_to_parent()
    gc.disable()  # a syntax tree has no cycles, and searching for them takes longer than parsing


def _read_docstrings(files: list[Path]) -> list[Paragraphs]:
    """Return the prose of each module that has some."""
    documents: list[Paragraphs] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        for file in files:
            if (tree := parse_module(file)) is None:
                continue
            paragraphs = [text for docstring in _list_docstrings(tree) for text in extract_prose(docstring)]
            if paragraphs:
                documents.append(paragraphs)
    return documents


def parse_module(file: Path) -> ast.Module | None:
    """Parse a source file; return None if it is too large or unreadable, or this Python cannot parse it."""
    try:
        return ast.parse(file.read_bytes()) if file.stat().st_size <= LARGEST_MODULE else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _list_docstrings(tree: ast.Module) -> Iterator[str]:
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node, clean=False)):
            yield docstring
        stack += [child for child in reversed(node.body) if hasattr(child, "body")]


# Docstring markup and its replacement, applied in this order. A paragraph that begins inside a block is marked by a
# blank line and \0; _BODY matches the lines that are indented deeper than the first group.
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
    """Return the English paragraphs of a docstring, one line each.

    Code, doctests, tables, titles, types and markup are removed.
    """
    text = inspect.cleandoc(docstring).encode(errors="ignore").decode()  # drops lone surrogates, which are invalid
    for pattern, replacement in STRUCTURE:
        text = pattern.sub(replacement, text)
    return [prose for paragraph in _join_lines(text) if _is_prose(prose := _strip_markup(paragraph))]


def _join_lines(text: str) -> Iterator[str]:
    """Yield paragraphs as one line each.

    A paragraph ends at a blank line or another indentation, one marked with \\0 only at a smaller indentation.
    """
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
    """Return whether a text has at least four words, mostly letters, few symbols and 10 % function words."""
    words = text.lower().split()
    return (
        len(words) >= 4
        and sum(map(len, NOT_LETTERS.findall(text))) <= 0.3 * len(text)
        and len(SYMBOL.findall(text)) <= 0.06 * len(text)
        and sum(map(FUNCTION_WORDS.__contains__, words)) >= max(1, 0.1 * len(words))
    )
