"""Lines of text files, their cells, and JSON: bytes -> texts, or the error in their place.

Left out: the rows of a file, whatever its form (`bertkit.data.formats.rows`).
"""

import codecs
import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from bertkit.errors import UsageError, as_usage_error, explain_missing, join_lines

FILE_REMEDY = "give the official files with --data DIR"
ARRAY_REMEDY = 'give an array of objects, as pandas writes with orient="records", or one object per line'
CONVERT = "convert the file, for Western European text with iconv -f cp1252 -t utf-8"
AGAIN = "correct it or get the file again"
UTF8, CP1252, GB18030 = "utf-8-sig", "cp1252", "gb18030"  # utf-8-sig drops a byte order mark
CHARACTERS_AT_ONCE = 1 << 16
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF8)
MARKS_UTF16 = tuple(mark.decode("utf-8", "surrogateescape") for mark in BYTE_ORDER_MARKS[:2])
# Found encoding -> its name in a report
ENCODINGS = {CP1252: "cp1252 (Western European) text", GB18030: "GB18030 (Chinese) text", "utf-16": "UTF-16 text"}
# Encoding of East Asian text -> its frequent letters, and their least share of all that are not ASCII
EAST_ASIAN = {
    GB18030: (re.compile(rb"[\xb0-\xd7][\xa1-\xfe]"), 0.9),  # level 1 of GB 2312
    "cp950": (re.compile(rb"[\xa4-\xc6][\x40-\x7e\xa1-\xfe]"), 0.9),  # level 1
    "cp932": (re.compile(rb"\x82[\x9f-\xf1]|\x83[\x40-\x96]"), 0.3),  # kana
    "euc-jp": (re.compile(rb"[\xa4\xa5][\xa1-\xf6]"), 0.3),  # kana
    "cp949": (re.compile(rb"[\xb0-\xc8][\xa1-\xfe]"), 0.9),  # Hangul
}
OTHER_NAMES = {"cp950": "cp950 (Big5)", "cp932": "cp932 (Shift-JIS)", "cp949": "cp949 (Korean)"}
# In all East Asian text; of Cyrillic and Greek only marks, among which « and » are frequent
BELOW_LETTERS = re.compile(rb"[\x80-\xaa\xac-\xba\xbc-\xbf]")
LINES_ASKED = 1_000  # for `choose_east_asian`
NOT_ASCII, NOT_UTF8 = re.compile(r"[^\0-\x7f]"), re.compile(r"[\udc80-\udcff]")
MOST_NAMES, LONGEST_QUOTED = 20, 40  # columns or keys in a message, and characters of each
NOT_CP1252 = re.compile(  # bytes without a character, UTF-8, Cyrillic or East Asian text (but not ····), Mac Roman
    rb"[\0\x81\x8d\x8f\x90\x9d]|\xc3[\x80-\xbf]|\xe2\x80|[\xc0-\xff]{4}"
    rb"|(?!([\xb0-\xff])\1{3})([\xb0-\xff][\xa1-\xff]){2}|[a-z][\x8a\x8e\x9f\xc0-\xde]"
)
NAN = re.compile(rb'("(?:[^"\\]|\\.)*")|\bNaN\b')
SEPARATORS = ",;\t|"
LONGEST_CELL = 10_000_000  # characters; a quote that is never closed must not collect a whole file
FIRST_LINES = 20  # lines from which the separator is guessed
SHOWN = 60  # characters of an invalid line quoted in a message
ROW = msgspec.json.Decoder(dict[str, Any], float_hook=str)  # a fraction keeps its digits
TYPED_ROW = msgspec.json.Decoder(dict[str, Any])
INPUT = msgspec.json.Decoder(str | dict[str, Any])
Parsed = TypeVar("Parsed")
Rows = Iterator[tuple[int, Any]]  # the number of a line or row, from 1; its cells, dict or text, or the error in it


# --- files and their encodings


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends in .gz; errors of opening and reading are UsageErrors."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is not a complete gzip file ({error}); compress it again or decompress it") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the folder and the name of the file") from None
    except OSError as error:
        remedy = "name a file in it" if path.is_dir() else "check its path and permissions"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None


def is_marked(path: Path) -> bool:
    """Return whether a file begins with a byte order mark."""
    with open_file(path) as stream:
        return stream.read(3).startswith(BYTE_ORDER_MARKS)


def detect_encoding(path: Path, given: str = "", may_be_local: bool = True) -> str:
    """Return the encoding of a file: UTF-8, UTF-16, cp1252 if all of it can be Western European text, or GB18030.

    Args:
        given: The encoding of a file that is neither UTF-8 nor marked as UTF-16, if it is known.
        may_be_local: Whether cp1252 and GB18030 are among them.
    """
    try:
        if given and codecs.lookup(given).name == "utf-8":
            return UTF8
    except LookupError:
        raise UsageError(f"data.encoding is {given!r}; name one of Python's, such as utf-8 or cp1252") from None
    with open_file(path) as stream:
        found, text = UTF8, io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="\n")
        for block in iter(partial(text.read, CHARACTERS_AT_ONCE), ""):
            if block.startswith(MARKS_UTF16):
                return "utf-16"
            if not (may_be_local or given):
                return UTF8
            if other := NOT_ASCII.search(block):
                begins_as_utf8 = found == UTF8 and not NOT_UTF8.match(other[0])
                if begins_as_utf8 and is_mostly_utf8(block):
                    return UTF8
                if given or begins_as_utf8 or NOT_CP1252.search(block.encode("utf-8", "surrogateescape")):
                    return given or choose_east_asian(path)
                found = CP1252
    return given or found


def is_mostly_utf8(text: str) -> bool:
    """Return whether at least half of the characters beyond ASCII were UTF-8; the others are escaped bytes.

    About one in six of GB18030 is valid UTF-8 by chance.
    """
    return 2 * len(NOT_UTF8.findall(text)) <= len(NOT_ASCII.findall(text))


def choose_east_asian(path: Path) -> str:
    """Return GB18030 if no other encoding of East Asia fits, else UTF-8, whose reader names the line that is not."""
    with open_file(path) as stream:
        lines = islice((line for line in stream if not line.isascii()), LINES_ASKED)
        return GB18030 if list_east_asian(b"".join(lines)) == [GB18030] else UTF8


def list_east_asian(content: bytes) -> list[str]:
    """Return the encodings of East Asia in which bytes are text with mostly frequent letters."""
    found: list[str] = []
    if is_mostly_utf8(content.decode("utf-8", "surrogateescape")) or not BELOW_LETTERS.search(content):
        return found
    for encoding, (frequent, least) in EAST_ASIAN.items():
        with suppress(UnicodeError):
            letters = [x.encode(encoding) for x in content.decode(encoding) if x.isalpha() and not x.isascii()]
            if letters and sum(map(bool, map(frequent.fullmatch, letters))) >= least * len(letters):
                found.append(encoding)
    return found


# --- lines


def walk_file(path: Path, encoding: str = UTF8) -> Iterator[str | UsageError]:
    """Yield the lines of a file as `walk_lines` does."""
    with open_file(path) as stream:
        yield from walk_lines(stream, encoding)


def walk_lines(stream: BinaryIO, encoding: str = UTF8) -> Iterator[str | UsageError]:
    """Yield each line with its end, or the error in it; the stream stays open."""
    text = io.TextIOWrapper(stream, encoding, "surrogateescape", newline="\n")
    try:
        for line in text:
            fault = "" if line.isascii() and "\0" not in line else explain_fault(line, encoding)
            yield UsageError(fault) if fault else line
    except UnicodeError:  # its words differ between versions of Python
        yield UsageError(f"is not {encoding}; the lines after it are not read")
    finally:
        with suppress(ValueError):  # the stream may be closed by now
            text.detach()


def explain_fault(text: str, encoding: str = UTF8) -> str:
    """Return why a line is not text, or ""; bytes that are not in its encoding have become surrogates."""
    if "\0" in text:
        advice = "give text in UTF-8, from UTF-16 with iconv -f utf-16 -t utf-8"
        return f"has a NUL byte, as in binary files and UTF-16; {advice}"
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        name, advice = "UTF-8" if encoding == UTF8 else encoding, CONVERT
        if encoding == UTF8 and (fitting := list_east_asian(error.object)):
            names = " or ".join(OTHER_NAMES.get(found, found) for found in fitting)
            advice = (
                f"its bytes fit {names}: convert the file to UTF-8 with iconv, or, for a table, name the right one as "
                "data.encoding"
            )
        return f"is not {name} (byte {error.object[error.start]:#04x} at position {error.start + 1}); {advice}"
    return ""


def read_lines(path: Path, encoding: str = UTF8) -> Iterator[str]:
    """Yield the lines of a file without their ends, and without the blank lines at its end."""
    blank = 0
    for _, line in raise_errors(path, enumerate(walk_file(path, encoding), 1)):
        if text := line.removesuffix("\n").removesuffix("\r"):
            yield from [""] * blank
            yield text
        blank = 0 if text else blank + 1


def raise_errors(source: str | Path, rows: Rows, unit: str = "line") -> Rows:
    """Yield the rows, and raise the first error with its origin."""
    for number, row in rows:
        if isinstance(row, UsageError):
            raise UsageError(f"{source}, {unit} {number} {row}")
        yield number, row


# --- cells


def split_rows(lines: Iterator[tuple[int, str | UsageError]], separator: str, is_plain: bool = False) -> Rows:
    """Yield the number of the first line and the cells of each row; blank lines are skipped.

    A wrong row within one line is an error in its place. After a wrong row of several lines it is unknown where the
    next one begins, so its error is the last.

    Args:
        is_plain: Whether quotes are ordinary characters, and only line feeds end a row.
    """
    if is_plain:
        for number, line in lines:
            if isinstance(line, UsageError):
                yield number, line
            elif text := line.removesuffix("\n").removesuffix("\r"):
                yield number, text.split(separator)
        return
    csv.field_size_limit(LONGEST_CELL)
    last, fault = 0, None

    def take(numbered: tuple[int, str | UsageError]) -> str:
        nonlocal last, fault
        last, line = numbered
        if fault := line if isinstance(line, UsageError) else None:
            raise csv.Error
        return line

    rows = csv.reader(map(take, lines), delimiter=separator, strict=True)
    while True:
        before = last
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:  # " - " precedes advice for programmers
            trouble = fault or f"is not a valid CSV row ({str(error).partition(' - ')[0]}); check its quotes and commas"
            if last > before + 1:
                yield before + 1, UsageError(f"{trouble} (the row covers several lines; those after it are not read)")
                return
            cells = UsageError(str(trouble))
        if cells:
            yield before + 1, cells


def detect_separator(lines: Iterable[str | UsageError], usual: str, given: str = "") -> str:
    """Return the separator with which the header and the first rows have the same number of cells, the most of them.

    Where there is none, it is the usual one or, if that is not in the header, another one that is.
    """
    if len(given) > 1 or given in ('"', "\r", "\n"):
        raise UsageError(f'data.sep is {given!r}; give the character between cells, such as ";" or "\\t"')
    if given:
        return given
    first = [line for line in islice(lines, FIRST_LINES) if isinstance(line, str) and line.strip("\r\n")]
    widths: dict[str, set[int]] = {separator: set() for separator in SEPARATORS}
    for separator, found in widths.items():
        with suppress(csv.Error):  # the last row may end after the first lines
            found.update(map(len, csv.reader(first, delimiter=separator, strict=True)))
    if even := {one: max(found) for one, found in widths.items() if len(found) == 1 and found != {1}}:
        return max(even, key=lambda one: (even[one], one == usual))
    named = [one for one in SEPARATORS[1:] if first and one in first[0]]
    return usual if not named or usual in first[0] else named[0]


def is_quoted(lines: Iterable[str | UsageError]) -> bool:
    """Return whether the quotes of a tab-separated file are those of CSV: all its lines are well-formed that way.

    Where some quotes enclose line ends, though each line has a cell for each of several columns, the quotes are there
    by chance and would join rows, unless the header has quotes, too.
    """
    csv.field_size_limit(LONGEST_CELL)
    by_line: Counter[int] = Counter()
    has_quotes = False

    def feed() -> Iterator[str]:
        nonlocal has_quotes
        for _, line in raise_errors("", enumerate(lines)):
            if line.strip("\r\n"):
                has_quotes |= not by_line and line.startswith('"')
                by_line[line.count("\t") + 1] += 1
            yield line

    try:
        by_row = Counter(len(cells) for cells in csv.reader(feed(), delimiter="\t", strict=True) if cells)
    except (UsageError, csv.Error):
        return False
    return len(by_row) == 1 and (has_quotes or 1 in by_row or by_line.keys() != by_row.keys() or by_line == by_row)


def walk_sheet(path: Path, notes: list[str]) -> Rows:
    """Yield the number and the cells of each row of the first sheet that is not blank; dates are in ISO form."""
    with explain_missing(f"{path} must be saved as .csv, or needs openpyxl", "excel"):
        import openpyxl
    with open_file(path) as stream:
        try:
            book = openpyxl.load_workbook(stream, read_only=True, data_only=True)
            sheet = book.worksheets[0]
            if len(book.worksheets) > 1:
                notes.append(f"the first of {len(book.worksheets)} sheets")
            sheet.reset_dimensions()  # some programs write wrong ones
            width = 0
            for number, values in enumerate(sheet.iter_rows(values_only=True), 1):
                cells = [make_text(value).removesuffix("T00:00:00") for value in values]
                while len(cells) > width and not cells[-1]:
                    cells.pop()
                if any(cells):
                    width = width or len(cells)
                    yield number, cells + [""] * (width - len(cells))
        except Exception as error:  # of zipfile, of the XML parser and of openpyxl
            raise UsageError(f"{path} cannot be read as Excel ({join_lines(error)}); save it again") from None


# --- JSON


def decode_json(decoder: msgspec.json.Decoder[Parsed], text: str | bytes) -> Parsed:
    """Decode a JSON text in which NaN, as Python and pandas write it, stands for null.

    Raises:
        UnicodeDecodeError: with the place of the first byte that is not UTF-8, which msgspec's errors lack.
    """
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = text.encode() if isinstance(text, str) else text
        content.decode()
        if b"NaN" not in content:
            raise
        return decoder.decode(NAN.sub(lambda found: found[1] or b"null", content))


def read_json(path: str | Path, form: type[Parsed], remedy: str = AGAIN, encoding: str = UTF8) -> Parsed:
    """Read a JSON file, with or without a byte order mark, into a msgspec type."""
    path = Path(path)
    with open_file(path) as stream:
        content = stream.read()
    with as_usage_error(str(path), remedy):
        try:
            if encoding != UTF8:
                content = content.decode(encoding).encode()
            return decode_json(msgspec.json.Decoder(form), content.removeprefix(codecs.BOM_UTF8))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} cannot be used: {join_lines(error)}; {CONVERT}") from None


def parse_line(text: str | bytes, decoder: msgspec.json.Decoder = INPUT) -> Any:
    """Parse JSON into an object or, if the decoder takes it, a string; or return the error in it."""
    try:
        return decode_json(decoder, text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text.rstrip("\r\n")
        kind = "object or string" if decoder is INPUT else "object"
        remedy = 'give one, such as {"text": "good", "label": 1}'
        return UsageError(f"is not a JSON {kind} ({join_lines(error)}): {text[:SHOWN]!r}; {remedy}")


def make_text(value: Any) -> str:
    """Return the text of a cell: null and NaN are empty; other values are as in JSON, dates without quotes."""
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return ""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return msgspec.json.decode(text) if text.startswith('"') else text
