"""Inputs for a trained model, one per line: JSON lines, tab-separated columns, or plain text.

A line that cannot be read yields an error in its place, and the lines after it are still read. Left out: what a model
requires of an input (`bertkit.inference.predictor`).
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bertkit.errors import UsageError, join_lines

STDIN = "-"
INPUT_SUFFIXES = (".jsonl", ".tsv", ".txt")
SHOWN = 60  # characters of an invalid line quoted in a message
LONGEST_LINE = 1_000_000  # characters; as tokens and words, a line takes some hundred times its size

Input = str | Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """The value of a line, or the error in it, and its place: file and line number from 1."""

    value: Input | UsageError
    place: str


def check_source(source: str) -> None:
    """Check that the input is a file with a known suffix, or that standard input is open.

    Raises:
        UsageError: It is not.
    """
    if source == STDIN:
        if sys.stdin is None:
            raise UsageError("standard input is closed; pipe the inputs to it or name a file with --input")
        return
    if not Path(source).is_file():
        raise UsageError(f"there is no file {source}; name one with --input, or - for standard input")
    if Path(source).suffix not in INPUT_SUFFIXES:
        raise UsageError(f"{source} must end in {', '.join(INPUT_SUFFIXES)}; rename it or pipe it to --input -")


def check_output(source: str, output: Path) -> None:
    """Check that the output is not the file of the inputs under any of its names."""
    with suppress(OSError):  # the output does not exist yet, or standard input is not a file
        read = sys.stdin.fileno() if source == STDIN else source
        if output.is_file() and os.path.samestat(os.stat(read), output.stat()):
            raise UsageError(f"{output} is also the input and would be overwritten; name another file with --output")


def read_inputs(source: str) -> Iterator[Line]:
    """Yield the non-empty lines of a file or of standard input, read lazily.

    The suffix decides the format. .jsonl: one object or string per line. .tsv: columns named by the first line.
    .txt: one text per line. On standard input, a line that begins with { or " is JSON, any other line is a text.

    Raises:
        UsageError: The file cannot be read, or the first line of a .tsv file does not name its columns.
    """
    check_source(source)
    kind = Path(source).suffix if source != STDIN else STDIN
    try:
        with nullcontext(sys.stdin.buffer) if source == STDIN else open(source, "rb") as file:
            yield from read_columns(file, source) if kind == ".tsv" else read_lines(file, source, kind)
    except OSError as error:
        raise UsageError(f"{source} cannot be read ({error.strerror}); give a readable file") from None


def read_lines(file: BinaryIO, source: str, kind: str) -> Iterator[Line]:
    """Yield the inputs of a file without a header line."""
    for place, text in walk_lines(file, source):
        if isinstance(text, UsageError):
            yield Line(text, place)
        elif text.strip():
            is_json = kind == ".jsonl" or (kind == STDIN and text.lstrip()[0] in '{"')
            yield Line(parse_line(text) if is_json else text, place)


def read_columns(file: BinaryIO, source: str) -> Iterator[Line]:
    """Yield the inputs of a file whose first line names its columns; quotes are ordinary characters."""
    names: list[str] | None = None
    for place, text in walk_lines(file, source):
        if isinstance(text, UsageError):
            if names is None:
                raise UsageError(f"{place}: {text}")
            yield Line(text, place)
        elif names is None:
            names = text.split("\t")
            if len(set(names)) < len(names) or not all(names):
                raise UsageError(f"{place}: the header must name every column exactly once; correct it")
        elif text:
            cells = text.split("\t")
            if len(cells) == len(names):
                yield Line(dict(zip(names, cells, strict=True)), place)
            else:
                columns = f"{len(cells)} column{'s' * (len(cells) != 1)}"
                wrong = f"has {columns}, but the header names {len(names)}; correct the line"
                yield Line(UsageError(wrong), place)


def walk_lines(file: BinaryIO, source: str) -> Iterator[tuple[str, str | UsageError]]:
    """Yield the place of each line, and its text or the error in it.

    An overlong line is never held in memory completely.
    """
    name = "standard input" if source == STDIN else source
    most = 4 * LONGEST_LINE + len("\ufeff\r\n".encode())  # bytes
    for number in count(1):
        if not (line := file.readline(most + 1)):
            return
        is_cut = len(line) > most
        while is_cut and line and not line.endswith(b"\n"):
            line = file.readline(most)
        text = decode_line(line, number) if not is_cut else ""
        if is_cut or (isinstance(text, str) and len(text) > LONGEST_LINE):
            text = UsageError(f"is longer than {LONGEST_LINE:,} characters; split it")
        yield f"{name}, line {number}", text


def decode_line(line: bytes, number: int) -> str | UsageError:
    """Decode a line without its line ending; a byte order mark is dropped from the first one."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return UsageError("is not UTF-8; convert it")
    return text.rstrip("\r\n")


def parse_line(text: str) -> Input | UsageError:
    """Parse a line of JSON into an object or a string."""
    try:
        return msgspec.json.decode(text, type=str | dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        return UsageError(f"is not a JSON object or string ({join_lines(error)}): {text[:SHOWN]!r}; give one of these")


def cut_into_chunks(inputs: Iterable[Any], most: int, enough: int) -> Iterator[list[Any]]:
    """Yield lists of inputs; a list ends at `most` inputs, or when it reaches `enough` characters."""
    chunk, characters = [], 0
    for given in inputs:
        chunk.append(given)
        characters += count_characters(given.value if isinstance(given, Line) else given)
        if len(chunk) == most or characters >= enough:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def count_characters(given: Any) -> int:
    """Count the characters of an input's texts; a context counts once per ending."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        endings = given.get("endings")
        again = max(len(endings) - 1, 0) if isinstance(endings, list) else 0  # the context goes with each of them
        return sum(map(count_characters, given.values())) + again * count_characters(given.get("context"))
    if not isinstance(given, list | tuple):
        return 0
    return sum(map(count_characters, given))
