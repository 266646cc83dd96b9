"""Rows with their results -> CSV, tab-separated columns or JSON lines."""

import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO, Any

from bertkit.data.formats.line import make_text
from bertkit.data.formats.rows import Columns


def write_rows(rows: Iterable[Mapping[str, Any]], names: Iterable[str], file: IO[str], form: str = ".csv") -> None:
    """Write rows as a table of text (RFC 4180) with the given columns, or each as a line of JSON."""
    if form == ".jsonl":
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return
    writer = csv.writer(file, delimiter="\t" if form == ".tsv" else ",")  # "\n" for an end would leave "\r" unquoted
    writer.writerow(names)
    writer.writerows([make_text(row.get(name)) for name in names] for row in rows)


def write_beside(
    rows: Columns, results: Sequence[Mapping[str, Any]], form: str = ".csv", decoded: Collection[str] = ()
) -> str:
    """Return rows and their results, in further columns, as `write_rows` writes them; `decoded` as for `walk`."""
    given = rows.table.column_names
    names = name_columns(given, results[0])
    walked = zip(rows.walk(decoded), results, strict=True)
    joined = (row | {names[name]: value for name, value in result.items()} for row, result in walked)
    write_rows(joined, [*given, *names.values()], file := io.StringIO(), form)
    return file.getvalue()


def name_columns(names: Iterable[str], results: Iterable[str]) -> dict[str, str]:
    """Return the columns of results, whose names get the suffix `_predicted` where a table has them."""
    taken, found = {*names}, {}
    for name in results:
        taken.add(column := name_apart(name, taken, "_predicted"))
        found[name] = column
    return found


def name_apart(name: str, names: Collection[str], suffix: str) -> str:
    """Return a name of a column, with a suffix if the table has a column of this name."""
    while name in names:
        name += suffix
    return name
