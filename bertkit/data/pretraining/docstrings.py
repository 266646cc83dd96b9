"""The documentation installed on this machine: the English prose of docstrings, as a corpus without a download.

The standard library and all installed packages are read, not imported. Paragraphs with markup or code are left out.
"""

import ast
import gc
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from bertkit.system.cluster import count_cores
from bertkit.system.signals import leave_signals_to_parent, open_pool

Paragraphs = list[str]  # a document before sentence splitting
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"})
LARGEST_MODULE = 2_000_000  # bytes; larger ones are generated tables, and a syntax tree takes a hundred times as much
FILES_A_CHUNK = 32  # modules in one job of a worker
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A colon is missing because it follows names of arguments, exceptions and fields more often than it stands in prose.
PLAIN_TEXT = re.compile(r"[A-Z][A-Za-z0-9 ,;.?!'\"()/%-]*[.?!]")
PLAIN_WORD = re.compile(r"['\"(]*[A-Za-z]+(?:['-][A-Za-z]+)*['\")]*[,;.?!]*['\")]*")


def read_docs(workers: int | None) -> Iterator[Paragraphs]:
    """Yield one document per module with English prose in its docstrings, without repeated paragraphs.

    Docstrings are vendored, inherited and copied. If they repeated, held-out text would also be in the training data.

    Args:
        workers: Processes that parse; one per CPU by default. The consumer may stop at any time.
    """
    files = _list_modules()
    chunks = [files[start : start + FILES_A_CHUNK] for start in range(0, len(files), FILES_A_CHUNK)]
    seen: set[str] = set()
    with ExitStack() as stack:
        do = map
        if (workers := workers or count_cores()) > 1 and sys.platform == "linux":
            # A spawned process would run the caller's script again, and fail if that has no `__main__` guard.
            do = stack.enter_context(open_pool(workers, "fork", _begin)).map
        for paragraphs in chain.from_iterable(do(_read_docstrings, chunks)):
            if unseen := [paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph not in seen]:
                seen.update(unseen)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        trees = filter(None, map(parse_module, files))
        documents = [[text for doc in _list_docstrings(tree) for text in extract_prose(doc)] for tree in trees]
    return [document for document in documents if document]


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
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring
        stack += [child for child in reversed(node.body) if hasattr(child, "body")]


def extract_prose(docstring: str) -> Paragraphs:
    """Return the paragraphs of plain sentences in a docstring, one line each.

    A paragraph ends where the indentation changes, and at a line without letters, such as the line under a title.
    """
    blocks = groupby(docstring.splitlines(), _measure_indent)
    paragraphs = [" ".join(" ".join(lines).split()) for _, lines in blocks]
    return [paragraph for paragraph in paragraphs if _is_prose(paragraph)]


def _measure_indent(line: str) -> int:
    """Return the number of spaces before a line, or -1 for a line without letters."""
    return len(line) - len(line.lstrip()) if any(map(str.isalpha, line)) else -1


def _is_prose(paragraph: str) -> bool:
    """Return whether a text is at least four words in sentences, nine of ten without digits and symbols."""
    words = paragraph.split()
    if len(words) < 4 or not PLAIN_TEXT.fullmatch(paragraph):
        return False
    return sum(PLAIN_WORD.fullmatch(word) is not None for word in words) >= 0.9 * len(words)
