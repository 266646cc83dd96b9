"""Tables in Markdown."""

import re
from collections.abc import Sequence

from bertkit.reports.tables import Table, TableCell

MARKUP = re.compile(r"[\\\[<`|]")  # links, HTML, code, cells


def format_table(table: Table) -> list[str]:
    """Return the lines of a table; the words for a value stand in parentheses behind it."""
    return format_lines([table.heads, *([format_cell(cell) for cell in row] for row in table.rows)])


def format_cell(cell: TableCell) -> str:
    """Return the lines of a cell in one."""
    return ", ".join(f"{text} ({words})" if words else text for text, words in cell.lines)


def format_lines(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return texts in columns, the first line being the head."""
    texts = ["| " + " | ".join(MARKUP.sub(r"\\\g<0>", text) for text in line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]
