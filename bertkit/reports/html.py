"""Render tables and plots in HTML."""

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from typing import Any

import bertkit
from bertkit.reports.plots import Plot, draw_plots, load_matplotlib
from bertkit.reports.tables import MISSING, NUMBER, Table, split_number

TABLE_TEMPLATE, PAGE_TEMPLATE = "table.html.jinja", "page.html.jinja"
LINES_SHOWN = 30  # longer lists are folded
XML_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # not allowed in XML

# Colours of plots, which stand out from white and from the dark theme's paper, by 3 : 1 at least.
SERIES = ("#2f7fc9", "#cf5f1c", "#2f8f4e", "#d9455f", "#8a68d0", "#94714a")
GREY = "#7a7a7a"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.6,
    "axes.prop_cycle": f"cycler(color={[*SERIES, GREY]})",
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "figure.constrained_layout.w_pad": 0.0,  # the picture begins at the edge of the text
    "font.size": 13,  # two pictures stand side by side
    "grid.alpha": 0.3,
    "grid.color": GREY,
    "grid.linewidth": 0.6,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bertkit",
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def load_template(*names: str, package: str = "bertkit.reports") -> Any:
    """Return the template that these files of a package make together; it escapes everything."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"digest": digest, "columns": style_columns}
    environment.globals["split_number"] = split_number
    folder = files(package)
    return environment.from_string("".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names))


def show_table(table: Table) -> str:
    """Return the HTML of a table alone, as a notebook shows it."""
    return str(load_template(TABLE_TEMPLATE).module.show_table(table))


def digest(text: str) -> str:
    """Return the SHA-256 of a text in Base64."""
    return b64encode(sha256(text.encode()).digest()).decode()


def render(parts: Sequence[Mapping[str, Any]], overview: Sequence[Table] = ()) -> str:
    """Return the HTML of the page; everything is escaped, and lone surrogates become question marks.

    Args:
        overview: Tables of several parts, at the top.
        parts: Texts, tables, pictures (`draw_all`) and pairs of name and text; missing entries are left out.
    """
    page = load_template(TABLE_TEMPLATE, PAGE_TEMPLATE).render(
        parts=parts,
        overview=overview,
        title=parts[0]["name"] if len(parts) == 1 else "Runs and studies",
        made=f"{datetime.now(UTC):%Y-%m-%d} by bertkit {bertkit.__version__}",
        lines_shown=LINES_SHOWN,
    )
    return page.encode(errors="replace").decode()


# --- Pictures ---------------------------------------------------------------------------------------------------------


def draw_all(plots: Iterable[Plot]) -> list[dict[str, str]]:
    """Draw the plots, each with its description."""
    return [{"label": plot.words, "address": draw(plot)} for plot in plots]


def draw(plot: Plot) -> str:
    """Return the SVG of a plot as a data address."""
    stream = BytesIO()
    with load_matplotlib().rc_context(STYLE):
        draw_plots([plot], stream, "svg")
    svg = XML_CONTROLS.sub("", stream.getvalue().decode())
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


# --- Tables -----------------------------------------------------------------------------------------------------------


def style_columns(table: Table) -> list[dict[str, str]]:
    """Return the heading and the style of each column.

    A column is numeric if most of its lines are numbers; these may have words beside them.
    """
    columns = []
    for number, head in enumerate(table.heads):
        found = [line for row in table.rows for line in row[number].lines if line[0] not in ("", MISSING)]
        numbers = sum(NUMBER.fullmatch(text) is not None for text, _ in found)
        is_worded = any(split_number(*line)[1] for line in found)
        style = ""
        if number and 2 * numbers > len(found):
            style = "worded" if is_worded else "number"
        columns.append({"head": head, "style": style})
    return columns
