"""Render tables in Markdown."""

import re

from bertkit.reports.tables import Table, TableCell

MARKUP = re.compile(r"[\\\[<`|]")  # links, HTML, code, cells
EMPHASIS = {"": "", "chosen": "**", "published": "*"}


def format_table(table: Table) -> list[str]:
    """Return the lines of a table; the words for a value follow it in parentheses."""
    lines = [table.heads, *([format_cell(cell) for cell in row] for row in table.rows)]
    texts = ["| " + " | ".join(MARKUP.sub(r"\\\g<0>", text) for text in line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(table.heads), *texts[1:]]


def format_cell(cell: TableCell) -> str:
    """Return the lines of a cell joined into one."""
    text = ", ".join(f"{text} ({words})" if words else text for text, words in cell.lines)
    mark = EMPHASIS[cell.kind] if text else ""
    return f"{mark}{text}{mark}"
