"""Inputs of a trained model, a line each, as somebody has them: JSON lines, tab-separated columns, or plain text.

A line that cannot be read is a mistake in its place, and those behind it are read all the same. Left out: what a model
needs of an input (`bertkit.predict`).
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from bertkit.errors import UsageError

STDIN = "-"
SUFFIXES = (".jsonl", ".tsv", ".txt")
SHOWN = 60  # characters of a line that is wrong

Input = str | Mapping[str, Any]


def check_source(source: str) -> None:
    """Nothing, or a UsageError: there is no such file, or of another kind."""
    if source == STDIN:
        return
    if not Path(source).is_file():
        raise UsageError(f"there is no file {source}; name one with --input, or - for standard input")
    if Path(source).suffix not in SUFFIXES:
        raise UsageError(f"{source} must end in {', '.join(SUFFIXES)}; rename it, or give its lines to --input -")


def read_inputs(source: str) -> Iterator[Input | UsageError]:
    """What each line holds, or what is wrong with it; lines are read when they are asked for.

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


def read_lines(file: BinaryIO, source: str, kind: str) -> Iterator[Input | UsageError]:
    """The inputs of a file without a line of names."""
    for number, line in enumerate(file, 1):
        text = decode_line(line, number, source)
        if isinstance(text, UsageError):
            yield text
        elif text.strip():
            is_json = kind == ".jsonl" or (kind == STDIN and text.lstrip()[0] in '{"')
            yield parse_line(text, f"{source}, line {number}") if is_json else text


def read_columns(file: BinaryIO, source: str) -> Iterator[Input | UsageError]:
    """The inputs of a file whose first line names its columns; quotes are ordinary characters."""
    names: list[str] | None = None
    for number, line in enumerate(file, 1):
        text = decode_line(line, number, source)
        if isinstance(text, UsageError):
            if names is None:
                raise text
            yield text
        elif names is None:
            names = text.split("\t")
            if len(set(names)) < len(names) or not all(names):
                raise UsageError(f"{source}, line 1 must name every column, each once; write the names there")
        elif text:
            cells = text.split("\t")
            if len(cells) == len(names):
                yield dict(zip(names, cells, strict=True))
            else:
                yield UsageError(f"{source}, line {number} has {len(cells)} columns and {len(names)} are named")


def decode_line(line: bytes, number: int, source: str) -> str | UsageError:
    """The text of a line, without its end; a byte order mark is no part of the first one."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return UsageError(f"{source}, line {number} is not UTF-8; convert it")
    return text.rstrip("\r\n")


def parse_line(text: str, place: str) -> Input | UsageError:
    """The object or text of a line of JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return UsageError(f"{place} is not JSON: {text[:SHOWN]!r}")
    if isinstance(value, str | dict):
        return value
    return UsageError(f"{place} is neither an object nor a text: {text[:SHOWN]!r}")
