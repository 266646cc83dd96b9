"""Inputs for a trained model, one per row: JSON lines, JSON, CSV, tab-separated columns, Parquet, or plain text.

A row that cannot be read yields an error in its place, and the rows after it are still read. Left out: what a model
requires of an input (`bertkit.inference.predictor`).
"""

import csv
import gzip
import os
import sys
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from bertkit.data.formats.tables import check_separator, find_column, is_quoted, read_array
from bertkit.errors import UsageError, check_access, join_lines

STDIN = "-"
INPUT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")  # each but .parquet also with .gz
ROWS_AT_ONCE = 1024  # rows of a Parquet file read at a time
BEFORE_ENDINGS = ("context", "start", "sent1", "sent2")  # keys of SWAG whose texts go with each ending
SHOWN = 60  # characters of an invalid line quoted in a message
SEPARATORS = {".csv": ",", ".tsv": "\t"}  # of cells
LONGEST_LINE = 1_000_000  # characters; as tokens and words, a line takes some hundred times its size

Input = str | Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """The value of a line or row, or the error in it, and its place: file and number from 1.

    Attributes:
        is_row: Whether it is a row of a table, so that all others have the same names.
    """

    value: Input | UsageError
    place: str
    is_row: bool = False


def check_source(source: str) -> None:
    """Check that the input is a file with a known suffix, or that standard input is open.

    Raises:
        UsageError: It is not.
    """
    if source == STDIN:
        if sys.stdin is None:
            raise UsageError("standard input is closed; pipe the inputs to it or name a file with --input")
        return
    check_access(source)
    if not Path(source).is_file():
        found = f"{source} is a folder" if Path(source).is_dir() else f"there is no file {source}"
        raise UsageError(f"{found}; name a file with --input, or - for standard input")
    if find_suffix(source) not in INPUT_SUFFIXES or source.endswith(".parquet.gz"):
        raise UsageError(
            f"{source} must end in {', '.join(INPUT_SUFFIXES)} (.gz may follow, but not .parquet); rename it or pipe "
            "it to --input -"
        )


def find_suffix(source: str) -> str:
    """Return the suffix that decides the format of a file."""
    return Path(source.removesuffix(".gz")).suffix


def check_output(source: str, output: Path, option: str = "--output") -> None:
    """Check that the output is not the file of the inputs under any of its names."""
    with suppress(OSError):  # the output does not exist yet, or standard input is not a file
        read = sys.stdin.fileno() if source == STDIN else source
        if output.is_file() and os.path.samestat(os.stat(read), output.stat()):
            raise UsageError(f"{output} is also the input and would be overwritten; name another file with {option}")


def read_inputs(source: str, columns: Sequence[str] = ()) -> Iterator[Line]:
    """Yield the inputs of a file or of standard input, read lazily.

    The suffix decides the format. .jsonl: one object or string per line. .json: an array of these. .csv (RFC 4180) and
    .tsv (quoted if the whole file is, as for training): columns named by the first line. .parquet: columns. .txt: one
    text per line, which may be empty; empty lines of other files are skipped. On standard input, a line that begins
    with { or " is JSON, any other line is a text.

    Args:
        columns: The columns that a table must have.

    Raises:
        UsageError: The file cannot be read or is in UTF-16, a table does not name its columns, or one of `columns` is
            missing.
    """
    check_source(source)
    kind = find_suffix(source) if source != STDIN else STDIN
    try:
        if kind == ".parquet":
            yield from read_parquet(source, columns)
            return
        if kind == ".json":
            yield from read_objects(source)
            return
        with open_binary(source) as file:
            if kind == ".csv" or (kind == ".tsv" and has_quotes(source)):
                yield from read_table(split_csv(file, source, SEPARATORS[kind]), source, columns)
            elif kind == ".tsv":
                yield from read_table(split_tsv(file, source), source, columns)
            else:
                yield from read_lines(file, source, kind)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or join_lines(error)
        raise UsageError(f"{source} cannot be read ({reason}); give a readable file") from None


def open_binary(source: str) -> Any:
    """Open a file, decompressed if its name ends in .gz, or standard input, which stays open."""
    if source == STDIN:
        return nullcontext(sys.stdin.buffer)
    return gzip.open(source) if source.endswith(".gz") else open(source, "rb")


def has_quotes(source: str) -> bool:
    """Return whether a TSV file is quoted; one with a line that cannot be read is not."""
    with open_binary(source) as file:

        def walk() -> Iterator[str]:
            for _, text in walk_lines(file, source, keep_ends=True):
                if isinstance(text, UsageError):
                    raise text
                yield text

        return is_quoted(walk())


def read_lines(file: BinaryIO, source: str, kind: str) -> Iterator[Line]:
    """Yield the inputs of a file without a header line."""
    for place, text in walk_lines(file, source):
        if isinstance(text, UsageError):
            yield Line(text, place)
        elif text.strip() or kind != ".jsonl":
            is_json = kind == ".jsonl" or (kind == STDIN and text.lstrip()[:1] in ("{", '"'))
            yield Line(parse_line(text) if is_json else text, place)


def read_table(
    rows: Iterable[tuple[str, list[str] | UsageError]], source: str, columns: Sequence[str]
) -> Iterator[Line]:
    """Yield the inputs of rows of cells, the first of which names the columns; a row without cells is skipped."""
    names: list[str] | None = None
    for place, cells in rows:
        if isinstance(cells, UsageError):
            if names is None:
                raise UsageError(f"{place} {cells}")
            yield Line(cells, place)
        elif names is None:
            check_separator(source, names := cells)
            check_names(names, place, source, columns)
        elif len(cells) == len(names):
            yield Line(dict(zip(names, cells, strict=True)), place, is_row=True)
        elif cells:
            found = f"{len(cells)} column{'s' * (len(cells) != 1)}"
            yield Line(UsageError(f"has {found}, but the header names {len(names)}; correct the line"), place)


def check_names(names: Sequence[str], place: str, source: str, columns: Sequence[str]) -> None:
    """Check that each column has a name of its own, and that there are the wanted columns.

    Raises:
        UsageError: They are not so.
    """
    if not names or len(set(names)) < len(names) or not all(names):
        raise UsageError(f"{place}: the header must name every column exactly once; correct it")
    for name in columns:
        find_column(source, names, name, "name the columns of the texts with --text")


def split_tsv(file: BinaryIO, source: str) -> Iterator[tuple[str, list[str] | UsageError]]:
    """Yield the place and the cells of each line; quotes are ordinary characters."""
    for place, text in walk_lines(file, source):
        yield place, text if isinstance(text, UsageError) else text.split("\t") if text else []


def split_csv(file: BinaryIO, source: str, separator: str = ",") -> Iterator[tuple[str, list[str] | UsageError]]:
    """Yield the place and the cells of each row.

    A wrong row within one line is an error in its place. After a wrong row of several lines it is unknown where the
    next one begins, so its error is the last.
    """
    csv.field_size_limit(sys.maxsize)  # of the process; `take_row` limits rows
    lines = walk_lines(file, source, keep_ends=True)
    for place, text in lines:
        if isinstance(text, UsageError):
            yield place, text
            continue
        taken = [text]
        try:
            yield place, take_row(taken, lines, separator)
        except UsageError as error:
            if len(taken) > 1:
                yield place, UsageError(f"{error} (the row covers several lines; those after it are not read)")
                return
            yield place, error


def take_row(taken: list[str], lines: Iterator[tuple[str, str | UsageError]], separator: str) -> list[str]:
    """Return the cells of the row that begins with the line in `taken`, and append the lines that it continues on.

    Raises:
        UsageError: The row is not CSV, or too long, or one of its lines cannot be read.
    """

    def feed() -> Iterator[str]:
        yield taken[0]
        size = len(taken[0])
        for _, text in lines:
            taken.append("" if isinstance(text, UsageError) else text)
            if isinstance(text, UsageError):
                raise text
            size += len(text)
            if size > LONGEST_LINE:
                raise UsageError(f"is longer than {LONGEST_LINE:,} characters; close its quotes or split it")
            yield text

    try:
        return next(csv.reader(feed(), delimiter=separator, strict=True))
    except csv.Error as error:
        raise UsageError(f"is not CSV ({join_lines(error)}); correct it") from None


def read_objects(source: str) -> Iterator[Line]:
    """Yield the inputs of a JSON file, which is read as a whole."""
    for number, content in enumerate(read_array(Path(source)), 1):
        text = decode_line(bytes(content), number)
        if isinstance(text, str):
            text = refuse_length() if len(text) > LONGEST_LINE else parse_line(text)
        yield Line(text, f"{source}, row {number}")


def read_parquet(source: str, columns: Sequence[str]) -> Iterator[Line]:
    """Yield the inputs of a Parquet file; dates, decimals and bytes are texts, NaN and null are None."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    numbers = count(1)
    try:
        with ParquetFile(source) as file:
            check_names(file.schema_arrow.names, source, source, columns)
            for batch in file.iter_batches(ROWS_AT_ONCE):
                rows = msgspec.json.decode(msgspec.json.encode(batch.to_pylist(), enc_hook=str))
                for row in rows:
                    is_long = count_characters(row) > LONGEST_LINE
                    place = f"{source}, row {next(numbers)}"
                    yield Line(refuse_length() if is_long else row, place, is_row=True)
    except UsageError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UsageError(f"{source} is not a readable Parquet file ({join_lines(error)}); write it again") from None


def walk_lines(file: BinaryIO, source: str, *, keep_ends: bool = False) -> Iterator[tuple[str, str | UsageError]]:
    """Yield the place of each line, and its text or the error in it.

    An overlong line is never held in memory completely.

    Raises:
        UsageError: The first line is in UTF-16 or has a NUL byte.
    """
    name = "standard input" if source == STDIN else source
    most = 4 * LONGEST_LINE + len("\ufeff\r\n".encode())  # bytes
    for number in count(1):
        if not (line := file.readline(most + 1)):
            return
        if number == 1 and (b"\0" in line or line.startswith((BOM_UTF16_LE, BOM_UTF16_BE))):
            raise UsageError(f"{name} is in UTF-16 or binary; save it as text in UTF-8")
        is_cut = len(line) > most
        while is_cut and line and not line.endswith(b"\n"):
            line = file.readline(most)
        text = decode_line(line, number) if not is_cut else ""
        if is_cut or (isinstance(text, str) and len(text.rstrip("\r\n")) > LONGEST_LINE):
            text = refuse_length()
        yield f"{name}, line {number}", text if keep_ends or isinstance(text, UsageError) else text.rstrip("\r\n")


def refuse_length() -> UsageError:
    """Return the error of an overlong line or row."""
    return UsageError(f"is longer than {LONGEST_LINE:,} characters; split it")


def decode_line(line: bytes, number: int) -> str | UsageError:
    """Decode a line; a byte order mark is dropped from the first one."""
    if b"\0" in line:
        return UsageError("has a NUL byte, as in binary files and UTF-16; give text in UTF-8")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return UsageError("is not UTF-8; convert it")


def parse_line(text: str) -> Input | UsageError:
    """Parse JSON into an object or a string."""
    try:
        return msgspec.json.decode(text, type=str | dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        return UsageError(f"is not a JSON object or string ({join_lines(error)}): {text[:SHOWN]!r}; give one of these")


def make_text(value: Any) -> str:
    """Return the text of a cell: null and NaN are empty, and any other value that is not a text is its JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None or value != value else msgspec.json.encode(value).decode()


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
    """Count the characters of an input's texts, and one more for each element of a list.

    The texts that all endings of SWAG have in common count once per ending.
    """
    if isinstance(given, str):
        return len(given)
    if isinstance(given, Mapping):
        listed = given.get("endings")
        endings = len(listed) if isinstance(listed, list) else sum(str(name).startswith("ending") for name in given)
        shared = sum(count_characters(given.get(name)) for name in BEFORE_ENDINGS)
        return sum(map(count_characters, given.values())) + max(endings - 1, 0) * shared
    if not isinstance(given, list | tuple):
        return 0
    return sum(map(count_characters, given)) + len(given)
