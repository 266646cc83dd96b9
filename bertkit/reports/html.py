"""Render tables and plots in HTML, in the colours of the reader's theme."""

import re
import xml.etree.ElementTree as ET
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

# Colours that plots are drawn with, and the page's colours that replace them.
SERIES = [f"#0d0d0{number}" for number in range(6)]
MUTED, LINE, INK = "#808080", "#0d0d06", "#000000"
COLOURS = {colour: f"var(--c{number})" for number, colour in enumerate(SERIES)} | {
    MUTED: "var(--muted)",
    "#666666": "var(--muted)",  # the other grey of `bertkit.reports.plots`
    LINE: "var(--line)",
    INK: "var(--ink)",
}
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.prop_cycle": f"cycler(color={SERIES})",
    "axes.titlesize": 13,
    "font.size": 13,  # three pictures stand side by side, each at two thirds of its size
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bertkit",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def make_environment() -> Any:
    """Return jinja's environment for a page, which escapes everything."""
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


def load_template(*names: str) -> Any:
    """Return the template that these files make together."""
    environment = make_environment()
    environment.filters |= {"digest": digest, "columns": style_columns, "minus": show_minus}
    environment.globals["split_number"] = split_number
    folder = files("bertkit.reports")
    return environment.from_string("".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names))


def show_table(table: Table) -> str:
    """Return the HTML of a table alone, as a notebook shows it."""
    return str(load_template(TABLE_TEMPLATE).module.show_table(table))


def digest(text: str) -> str:
    """Return the SHA-256 of a text in Base64."""
    return b64encode(sha256(text.encode()).digest()).decode()


def render(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the page; everything except pictures is escaped, and lone surrogates become question marks.

    Args:
        parts: Texts, tables, pictures (`draw_all`) and pairs of name and text; missing entries are left out.
    """
    page = load_template(TABLE_TEMPLATE, PAGE_TEMPLATE).render(
        parts=parts,
        title=parts[0]["name"] if len(parts) == 1 else "Runs and studies",
        made=f"{datetime.now(UTC):%Y-%m-%d} by bertkit {bertkit.__version__}",
        lines_shown=LINES_SHOWN,
    )
    return page.encode(errors="replace").decode()


# --- Pictures ---------------------------------------------------------------------------------------------------------


def draw_all(prefix: str, plots: Iterable[Plot]) -> list[dict[str, Any]]:
    """Draw the plots as SVG, each with its description."""
    return [{"label": plot.words, "svg": draw(f"{prefix}-{number}-", plot)} for number, plot in enumerate(plots)]


def draw(prefix: str, plot: Plot) -> str:
    """Return the SVG of a plot whose ids begin with `prefix`."""
    stream = BytesIO()
    with load_matplotlib().rc_context(STYLE):
        draw_plots([plot], stream, "svg")
    return clean(stream.getvalue().decode(), prefix)


def clean(svg: str, prefix: str) -> str:
    """Prepare an SVG for embedding: prefix its ids, use the page's colours, and remove namespaces and metadata."""
    root = ET.fromstring(XML_CONTROLS.sub("", svg))
    for parent in root.iter():
        for child in [child for child in parent if child.tag.rpartition("}")[2] in ("metadata", "style")]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        values = {name.rpartition("}")[2]: value for name, value in element.items()}
        element.attrib.clear()
        element.attrib.update({name: restyle(name, value, prefix) for name, value in values.items()})
    width, height = root.get("viewBox").split()[2:]
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    # At most as wide as it was drawn; converted from pt to px.
    root.attrib |= {"aria-hidden": "true", "style": f"max-width: {float(width) * 4 / 3:.0f}px"}
    root.attrib["viewBox"] = f"0 0 {float(width):g} {float(height):g}"
    return ET.tostring(root, encoding="unicode")


def restyle(name: str, value: str, prefix: str) -> str:
    """Return the value of an attribute with the page's ids and colours."""
    if name == "id":
        return prefix + value
    if name == "href":
        return value.replace("#", f"#{prefix}", 1)
    value = value.replace("url(#", f"url(#{prefix}")
    if name == "style":
        value = re.sub("#[0-9a-f]{6}", lambda found: COLOURS.get(found[0], found[0]), value)
        # Keep only the font's size: the page sets the family. Older versions of matplotlib write both in one property.
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
    return value


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
        style = ("worded" if is_worded else "number") if 2 * numbers > len(found) else ""
        columns.append({"head": head, "style": style if number else ""})
    return columns


def show_minus(text: str) -> str:
    """Replace the hyphen of a negative number, or of the limits of an interval, by a minus sign."""
    return re.sub("(^| )-", r"\1−", text) if NUMBER.fullmatch(text) else text
