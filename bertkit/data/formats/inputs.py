"""Inputs of a trained model, a line each, as somebody has them: JSON lines, tab-separated columns, or plain text.

A line that cannot be read is a mistake in its place, and those behind it are read all the same. Left out: what a model
needs of an input (`bertkit.inference.predictor`).
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
SHOWN = 60  # characters of a line that is wrong
LONGEST_LINE = 1_000_000  # characters; as tokens and words, each takes some hundred times its room

Input = str | Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """What a line holds, or what is wrong with it, and where it stands: the file and the number from 1."""

    value: Input | UsageError
    place: str


def check_source(source: str) -> None:
    """Nothing, or a UsageError: there is no such file, or of another kind, or standard input is closed."""
    if source == STDIN:
        if sys.stdin is None:
            raise UsageError("standard input is closed; give the inputs to it, or name a file with --input")
        return
    if not Path(source).is_file():
        raise UsageError(f"there is no file {source}; name one with --input, or - for standard input")
    if Path(source).suffix not in INPUT_SUFFIXES:
        raise UsageError(f"{source} must end in {', '.join(INPUT_SUFFIXES)}; rename it, or give its lines to --input -")


def check_output(source: str, output: Path) -> None:
    """Check that the output is not the file of the inputs, by any of its names."""
    with suppress(OSError):  # there is no such output yet, or standard input is no file
        read = sys.stdin.fileno() if source == STDIN else source
        if output.is_file() and os.path.samestat(os.stat(read), output.stat()):
            raise UsageError(f"{output} is also the input, and would be replaced; name another with --output")


def read_inputs(source: str) -> Iterator[Line]:
    """The lines that hold something, read when they are asked for.

    .jsonl: an object or a text. .tsv: columns, whose names the first line has. .txt: a text. Standard input: a line
    that begins with { or " is JSON, any other is a text. Empty lines are passed over.

    Raises:
        UsageError: a file that cannot be read, or a .tsv file without a line of names.
    """
    check_source(source)
    kind = Path(source).suffix if source != STDIN else STDIN
    try:
        with nullcontext(sys.stdin.buffer) if source == STDIN else open(source, "rb") as file:
            yield from read_columns(file, source) if kind == ".tsv" else read_lines(file, source, kind)
    except OSError as error:
        raise UsageError(f"{source} cannot be read ({error.strerror}); give a file that can") from None


def read_lines(file: BinaryIO, source: str, kind: str) -> Iterator[Line]:
    """The inputs of a file without a line of names."""
    for place, text in walk_lines(file, source):
        if isinstance(text, UsageError):
            yield Line(text, place)
        elif text.strip():
            is_json = kind == ".jsonl" or (kind == STDIN and text.lstrip()[0] in '{"')
            yield Line(parse_line(text) if is_json else text, place)


def read_columns(file: BinaryIO, source: str) -> Iterator[Line]:
    """The inputs of a file whose first line names its columns; quotes are ordinary characters."""
    names: list[str] | None = None
    for place, text in walk_lines(file, source):
        if isinstance(text, UsageError):
            if names is None:
                raise UsageError(f"{place}: {text}")
            yield Line(text, place)
        elif names is None:
            names = text.split("\t")
            if len(set(names)) < len(names) or not all(names):
                raise UsageError(f"{place}: must name every column, each once; write the names there")
        elif text:
            cells = text.split("\t")
            if len(cells) == len(names):
                yield Line(dict(zip(names, cells, strict=True)), place)
            else:
                wrong = f"has {len(cells)} columns and {len(names)} are named; make them as many"
                yield Line(UsageError(wrong), place)


def walk_lines(file: BinaryIO, source: str) -> Iterator[tuple[str, str | UsageError]]:
    """The place of each line, and its text or what is wrong; one that is too long is never held whole."""
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
    """The text of a line, without its end; a byte order mark is no part of the first one."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return UsageError("is not UTF-8; convert it")
    return text.rstrip("\r\n")


def parse_line(text: str) -> Input | UsageError:
    """The object or text of a line of JSON."""
    try:
        return msgspec.json.decode(text, type=str | dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        return UsageError(
            f"is not JSON of an object or a text ({join_lines(error)}): {text[:SHOWN]!r}; write one of them"
        )


def cut_into_chunks(inputs: Iterable[Any], most: int, enough: int) -> Iterator[list[Any]]:
    """Lists of inputs, each of `most` inputs or ending with the one that brings it to `enough` characters."""
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
    """The characters of the texts of an input, of a context once for each ending."""
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        endings = given.get("endings")
        again = max(len(endings) - 1, 0) if isinstance(endings, list) else 0  # the context goes with each of them
        return sum(map(count_characters, given.values())) + again * count_characters(given.get("context"))
    if not isinstance(given, list | tuple):
        return 0
    return sum(map(count_characters, given))
