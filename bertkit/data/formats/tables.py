"""Lines, tab-separated tables and JSON: the shared code of the readers of official files.

Tables are not parsed as CSV: `"` is an ordinary character that need not be closed, and U+2028 does not end a line.
"""

import csv
import difflib
import gzip
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from bertkit.errors import UsageError, join_lines

FILE_REMEDY = "give the official files with --data DIR"
CONVERT = "convert the file, for Western European text with iconv -f cp1252 -t utf-8"
AGAIN = "correct it or get the file again"
NAME_REMEDY = "its first line must name the columns as in the official file"
LONGEST_CELL = 10_000_000  # characters; a quote that is never closed must not collect a whole file
MOST_NAMES, LONGEST_QUOTED = 20, 40  # columns or keys in a message, and characters of each
Parsed = TypeVar("Parsed")
OpenBytes = Callable[[Path], BinaryIO]


@dataclass(frozen=True, eq=False)
class TextColumns:
    """Columns of texts side by side.

    Attributes:
        columns: `columns[name][row]`.
        lines: `lines[row]` is the row's line in its file, or its number on the Hub, from 1.
        broken: The lines that were skipped because they had another number of columns.
    """

    source: str
    columns: dict[str, list[str]]
    lines: Sequence[int]
    broken: Sequence[int] = ()

    def locate(self, row: int) -> str:
        """Return the file and line of a row, for messages."""
        return f"{self.source}, line {self.lines[row]}"


# --- tab-separated files


def read_tsv(
    path: str | Path, columns: Mapping[str, str | int], *, width: int | None = None, skip_broken: bool = False
) -> TextColumns:
    """Read columns of a tab-separated file in UTF-8.

    Cells are separated by tabs and rows by \\n only, and nothing is quoted. A byte order mark, \\r before \\n and blank
    lines at the end are dropped.

    Args:
        columns: New name -> name in the file's first line or, for a file without a header line, the column's number
            from 0.
        width: The number of columns of a file without a header line; that of the first row if not given.
        skip_broken: Whether to skip rows with another number of columns, as the Hub's copy of QQP does. A blank line in
            the middle is such a row, except in a file of one column, where it is an empty text.

    Raises:
        UsageError: The file is missing, not UTF-8 or without rows, a column is missing, or a row has another number of
            columns.
    """
    lines = enumerate(read_lines(Path(path)), 1)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty; download the official file again")
    cells = first[1].split("\t")
    if any(isinstance(column, int) for column in columns.values()):
        places = list(columns.values())
        width = width or max(len(cells), *(place + 1 for place in places))
        lines = chain([first], lines)
    else:
        places = [find_column(str(path), cells, column, NAME_REMEDY) for column in columns.values()]
        width = len(cells)
    table = TextColumns(str(path), {name: [] for name in columns}, [], [])
    fill(table, ((number, line.split("\t")) for number, line in lines), places, width, skip_broken)
    return table


def fill(
    table: TextColumns, rows: Iterable[tuple[int, list[str]]], places: list[int], width: int, skip_broken: bool = False
) -> None:
    """Append the cells of the rows to the columns of a table."""
    wanted = [(column.append, place) for column, place in zip(table.columns.values(), places, strict=True)]
    for number, cells in rows:
        if len(cells) != width:
            if not skip_broken:
                raise UsageError(
                    f"{table.source}, line {number} has {len(cells)} column{'s' * (len(cells) != 1)}, expected "
                    f"{width}; correct the line or download the official file again"
                )
            table.broken.append(number)
            continue
        table.lines.append(number)
        for append, place in wanted:
            append(cells[place])
    if not table.lines:
        skipped = f" ({len(table.broken):,} rows have a different number)" if table.broken else ""
        raise UsageError(f"{table.source} has no rows of {width} columns{skipped}; download the official file again")


def find_column(source: str, names: Sequence[str], wanted: str, remedy: str) -> int:
    """Return the index of a column in `names`."""
    if wanted in names:
        return names.index(wanted)
    nearest = "".join(f" (nearest: {name!r})" for name in difflib.get_close_matches(wanted, names, n=1))
    listed = ", ".join(repr(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMES])  # a name can be a whole line of text
    raise UsageError(f"{source} has no column {wanted!r}; found {listed or 'none'}{nearest}; {remedy}")


def convert_labels(table: TextColumns, read: Callable[[str], float], expected: str, what: str = "label") -> list[float]:
    """Convert the column `label` with `read`.

    Raises:
        UsageError: There is no such column, or `read` rejects a text (KeyError, ValueError).
    """
    if "label" not in table.columns:
        raise UsageError(f"{table.source} has no labels; only splits with labels can be trained on or scored")
    values = []
    for row, text in enumerate(table.columns["label"]):
        try:
            values.append(read(text))
        except (KeyError, ValueError):
            label = text[:LONGEST_QUOTED]
            raise UsageError(f"{table.locate(row)}: {what} {label!r} must be {expected}; correct the line") from None
    return values


def read_lines(path: Path, *, keep_ends: bool = False) -> Iterator[str]:
    """Yield the lines of a file, without the blank lines at its end."""
    blank: list[str] = []
    with open_file(path) as stream:
        for number, line in enumerate(stream, 1):
            if not keep_ends:
                line = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                text = decode_line(line, is_first=number == 1)
            except UsageError as error:
                raise UsageError(f"{path}, line {number} {error}") from None
            if text in ("", "\n", "\r\n"):
                blank.append(text)
                continue
            yield from blank
            blank.clear()
            yield text


def read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the cells of each row of a CSV file (RFC 4180), without blank lines.

    Raises:
        UsageError: The file cannot be read, is not UTF-8, or a row is not valid CSV.
    """
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(read_lines(path, keep_ends=True), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            trouble = join_lines(error).partition(" - ")[0]  # advice for programmers follows
            raise UsageError(
                f"{path}, line {number} is not a valid CSV row ({trouble}); check its quotes and commas"
            ) from None
        if cells is None:
            return
        if cells:
            yield number, cells


def check_separator(source: str | Path, names: Sequence[str]) -> None:
    """Check that the only cell of a header does not hold another separator.

    Raises:
        UsageError: It does.
    """
    if len(names) == 1 and (separator := next((one for one in ";\t|" if one in names[0]), None)):
        raise UsageError(f"{source} has cells separated by {separator!r}; save it with commas, or as .tsv with tabs")


def is_quoted(lines: Iterable[str]) -> bool:
    """Return whether the quotes of a TSV file are those of CSV: all its lines are well-formed that way.

    Where some quotes enclose line ends, though each line has a cell for each of several columns, the quotes are there
    by chance and would join rows.
    """
    csv.field_size_limit(LONGEST_CELL)
    by_line: Counter[int] = Counter()

    def feed() -> Iterator[str]:
        for line in lines:
            if line.strip("\r\n"):
                by_line[line.count("\t") + 1] += 1
            yield line

    try:
        by_row = Counter(len(cells) for cells in csv.reader(feed(), delimiter="\t", strict=True) if cells)
    except (UsageError, csv.Error):
        return False
    (width, rows), *others = by_row.items() or [(0, 0)]
    return bool(rows) and not others and (width == 1 or by_line != {width: by_line[width]} or by_line[width] == rows)


def open_here(path: Path) -> BinaryIO:
    """Open a file on the disk of this process for reading bytes."""
    return path.open("rb")


@contextmanager
def open_file(path: Path, open_bytes: OpenBytes = open_here) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if its name ends in .gz; errors of opening and reading are UsageErrors.

    Args:
        open_bytes: Opens the file; by default on the disk of this process.
    """
    try:
        with open_bytes(path) as content, gzip.open(content) if path.suffix == ".gz" else content as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is not a complete gzip file ({error}); compress it again or decompress it") from None
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the folder and the name of the file") from None
    except OSError as error:
        remedy = "name a file in it" if path.is_dir() else "check its path and permissions"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None


def decode_line(line: bytes, *, is_first: bool) -> str:
    """Decode a line; a byte order mark is dropped from the first one.

    Raises:
        UsageError: The line has a NUL byte or is not UTF-8; the message does not name its place.
    """
    is_marked = is_first and line.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    if is_marked or b"\0" in line:
        order = "" if is_marked else "le" if line.find(b"\0") % 2 else "be"
        raise UsageError(
            "has a NUL byte or byte order mark, as in binary files and UTF-16; give text in UTF-8, from UTF-16 with "
            f"iconv -f utf-16{order} -t utf-8"
        )
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"is not UTF-8 (byte {error.object[error.start]:#04x} at position {error.start + 1}); " + CONVERT
        ) from None


# --- JSON


def read_array(path: Path) -> list[msgspec.Raw]:
    """Return the JSON texts of the values in a file: an array, or an object whose only key holds one.

    Raises:
        UsageError: As for `read_json`, or there is no array.
    """
    remedy = "give an array of objects, or name the file .jsonl if it has one object per line"
    found = read_json(path, list[msgspec.Raw] | dict[str, msgspec.Raw], remedy)
    if isinstance(found, list):
        return found
    if len(found) != 1:
        raise UsageError(f"{path} is an object with {len(found)} keys, expected only one, with an array; {remedy}")
    with explain_form(str(path), remedy):
        return msgspec.json.decode(*found.values(), type=list[msgspec.Raw])


def read_json(path: str | Path, form: type[Parsed], remedy: str = AGAIN) -> Parsed:
    """Read a JSON file in UTF-8, with or without a byte order mark, into a msgspec type.

    Raises:
        UsageError: The file is missing, not UTF-8, not JSON, or of another form; `remedy` ends the message.
    """
    path = Path(path)
    with open_file(path) as stream:
        content = stream.read()
    with explain_form(str(path), remedy):
        try:
            return msgspec.json.decode(content.removeprefix(BOM_UTF8), type=form)
        except msgspec.DecodeError:
            try:
                decode_line(content, is_first=True)  # UTF-16 has a remedy of its own
            except UsageError as error:
                raise UsageError(f"{path} {error}") from None
            raise


@contextmanager
def explain_form(place: str, remedy: str = AGAIN) -> Iterator[None]:
    """Turn msgspec's error about a value at `place` into a UsageError."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        remedy = CONVERT if isinstance(error, UnicodeDecodeError) else remedy
        raise UsageError(f"{place}: {join_lines(error)}; {remedy}") from None
