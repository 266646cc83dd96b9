"""What the readers of official files share: lines, tab-separated tables, JSON.

A table looks like CSV and is not: a `"` is an ordinary character that nobody closes, and so is U+2028.
"""

import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bertkit.errors import UsageError, join_lines

FILE_REMEDY = "give the official files with --data DIR"
AGAIN = "mend it or get the file again"
NAME_REMEDY = "its first line must name the columns as the official file's does"
MOST_NAMES, LONGEST_QUOTED = 20, 40  # columns or keys in a message, and characters of each
LARGEST_NUMBER = sys.float_info.max
KINDS = {  # of values in JSON, and what a message calls them; a finite number may be whole
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}


@dataclass(frozen=True, eq=False)
class TextColumns:
    """Columns side by side: `columns[name][row]`, all texts.

    `lines[row]` is the row's line in its file, or the row itself on the Hub, from 1; `broken` are the lines that were
    passed over because they had another number of columns.
    """

    source: str
    columns: dict[str, list[str]]
    lines: Sequence[int]
    broken: Sequence[int] = ()

    def locate(self, row: int) -> str:
        """What a message calls this row: the file and the line."""
        return f"{self.source}, line {self.lines[row]}"


# --- tab-separated files


def read_tsv(
    path: str | Path,
    columns: Mapping[str, str | int],
    *,
    width: int | None = None,
    skip_broken: bool = False,
) -> TextColumns:
    """The columns of a file in UTF-8, under the names that `columns` gives them.

    Its values are the names in the file's first line or, for a file without such a line, the columns' numbers from 0;
    then `width` is the number of columns of every row (that of the first row if not given). Cells are cut at tabs and
    rows at \\n alone, and nothing is quoted; a byte order mark, \\r before \\n and blank lines at the end are dropped.
    `skip_broken` passes over rows with another number of columns, as the Hub's copy of QQP does; a blank line in the
    middle is such a row, except in a file of one column, where it is an empty text.

    Raises:
        UsageError: a file that is missing, not UTF-8 or without rows, a missing column, or a row of another width.
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
    """Put the cells of the rows into the columns of a table."""
    wanted = [(column.append, place) for column, place in zip(table.columns.values(), places, strict=True)]
    for number, cells in rows:
        if len(cells) != width:
            if not skip_broken:
                raise UsageError(
                    f"{table.source}, line {number} has {len(cells)} column{'s' * (len(cells) != 1)} and {width} were "
                    "expected; mend the line or download the official file again"
                )
            table.broken.append(number)
            continue
        table.lines.append(number)
        for append, place in wanted:
            append(cells[place])
    if not table.lines:
        skipped = f" ({len(table.broken):,} have another number)" if table.broken else ""
        raise UsageError(f"{table.source} has no rows of {width} columns{skipped}; download the official file again")


def find_column(source: str, names: Sequence[str], wanted: str, remedy: str) -> int:
    """Its place among `names`."""
    if wanted in names:
        return names.index(wanted)
    raise _name_missing(source, "column", names, wanted, remedy)


def _name_missing(source: str, kind: str, names: Sequence[str], wanted: str, remedy: str) -> UsageError:
    nearest = "".join(f" (nearest: {name!r})" for name in difflib.get_close_matches(wanted, names, n=1))
    listed = ", ".join(repr(name[:LONGEST_QUOTED]) for name in names[:MOST_NAMES])  # it can be a line of text
    return UsageError(f"{source} has no {kind} {wanted!r} but {listed or 'nothing'}{nearest}; {remedy}")


def read_lines(path: Path) -> Iterator[str]:
    """Its lines, without the blank ones at its end."""
    blank = 0
    with _explain_opening(path), path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = _decode(line, f"{path}, line {number}", "utf-8-sig" if number == 1 else "utf-8")
            if not text:
                blank += 1
                continue
            yield from [""] * blank
            blank = 0
            yield text


@contextmanager
def _explain_opening(path: Path) -> Iterator[None]:
    """A file that cannot be opened or read becomes a UsageError."""
    try:
        yield
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; check the folder and the name of the file") from None
    except OSError as error:
        remedy = "name a file in it" if path.is_dir() else "check its path and permissions"
        raise UsageError(f"{path} cannot be read ({error.strerror or error}); {remedy}") from None


def _decode(line: bytes, where: str, encoding: str) -> str:
    if b"\0" in line:
        raise UsageError(f"{where} has a NUL byte, as binary files and UTF-16 have; give text in UTF-8")
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 (byte {error.object[error.start]:#04x} in place {error.start + 1}); "
            "convert the file, for instance with iconv -f latin1 -t utf-8"
        ) from None


# --- JSON


def read_json(path: str | Path) -> Any:
    """What a JSON file in UTF-8 holds; it may begin with a byte order mark.

    Raises:
        UsageError: a file that is missing, not UTF-8, empty, or no JSON, with line and column.
    """
    path = Path(path)
    with _explain_opening(path):
        content = path.read_bytes()
    text = _decode(content, str(path), "utf-8-sig")
    if not text.strip():
        raise UsageError(f"{path} is empty; get the file again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        trouble = f"is not JSON ({join_lines(error)})"
    except RecursionError:
        trouble = "has lists or objects nested too deep to be read"
    except ValueError:
        trouble = f"has a whole number of more than {sys.get_int_max_str_digits():,} digits"
    raise UsageError(f"{path} {trouble}; {AGAIN}")


def read_objects(path: str | Path, key: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in the list that a JSON file has under `key`, each with its place in the file.

    Raises:
        UsageError: as `read_json`; the file holds something else; `remedy` ends the message if there is no such key.
    """
    content = check_kind(read_json(path), dict, str(path))
    if key not in content:
        raise _name_missing(str(path), "key", list(content), key, remedy)
    return walk_objects(content[key], f"{path}, {key}")


def walk_objects(values: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The items of what must be a list of objects, each with its place."""
    for number, value in enumerate(check_kind(values, list, place)):
        where = f"{place}[{number}]"
        yield where, check_kind(value, dict, where)


def take(holder: Mapping[str, Any], key: str, kind: type, place: str) -> Any:
    """The value under a key of the object at `place`, which must be of that kind."""
    if key not in holder:
        raise _name_missing(place, "key", list(holder), key, AGAIN)
    return check_kind(holder[key], kind, f"{place}.{key}")


def check_kind(value: Any, kind: type, place: str) -> Any:
    """The value, which must be of that kind, one of `KINDS`; a text must not hold half a surrogate pair."""
    if kind is float:
        fits = type(value) in (int, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER
    else:
        fits = type(value) is kind  # not isinstance: true is no whole number
    if not fits:
        raise UsageError(f"{place} is {_describe(value)} and {KINDS[kind]} was expected; {AGAIN}")
    if kind is str and not value.isascii():
        _check_surrogates(value, place)
    return value


def _check_surrogates(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} as character {error.start + 1}"
        raise UsageError(f"{place} has {half}, half of a surrogate pair, which no tokenizer takes; {AGAIN}") from None


def _describe(value: Any) -> str:
    """What a message calls a value of the wrong kind."""
    if isinstance(value, dict | list):
        return KINDS[type(value)]
    if isinstance(value, str):
        return repr(value[:LONGEST_QUOTED])
    return json.dumps(value, default=repr)[:LONGEST_QUOTED]
