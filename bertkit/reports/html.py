"""Tables and pictures in HTML, with the colours of the reader's theme."""

import re
import tempfile
import warnings
import xml.etree.ElementTree as ET
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import bertkit
from bertkit.reports.plots import load_pyplot
from bertkit.reports.tables import MISSING, Table

TEMPLATE = "page.html.jinja"
SIZE = (4.6, 3.6)  # inches, as `bertkit.reports.plots.plot_log` draws a panel
LINES_SHOWN = 30  # of a list that can be folded; a longer one is
XML_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # which no XML can have
NUMBER = re.compile(r"[-−+]?\d[\d.,:/]*(e[-+]?\d+)?( ± [\d.,]+)?( \(\d+\))?( [†*])*")

# What a plot is drawn with -> what the page colours it with.
COLOURS = {
    "#0d0d01": "var(--c0)",
    "#0d0d02": "var(--c1)",
    "#0d0d03": "var(--c2)",
    "#0d0d04": "var(--c3)",
    "#0d0d05": "var(--c4)",
    "#0d0d06": "var(--c5)",
    "#0d0d07": "var(--muted)",
    "#0d0d08": "var(--line)",
    "#0d0d09": "var(--ink)",
    "#000000": "var(--ink)",
    "#808080": "var(--muted)",  # the greys that `bertkit.reports.plots` draws with
    "#666666": "var(--muted)",
}
SERIES, MUTED, LINE, INK = list(COLOURS)[:6], "#0d0d07", "#0d0d08", "#0d0d09"
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
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}

# What a part of the page has: words, tables (`make_table`), pictures (`draw_all`) and pairs of a name and a text.
EMPTY: dict[str, Any] = {
    "is_part": False,
    "state": "",
    "summary": "",
    "notes": [],
    "facts": [],
    "note": "",
    "scores": [],
    "comments": [],
    "columns": [],
    "curves": [],
    "lengths": [],
    "tables": [],
    "predicted": [],
    "details": [],
    "failures": [],
}


def render(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page; whatever is no picture is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["digest"] = lambda text: b64encode(sha256(text.encode()).digest()).decode()
    environment.filters |= {"columns": style_columns, "minus": show_minus}
    template = environment.from_string(files("bertkit.reports").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        parts=parts,
        title=parts[0]["name"] if len(parts) == 1 else "Runs and studies",
        made=f"{datetime.now(UTC):%Y-%m-%d} by bertkit {bertkit.__version__}",
        lines_shown=LINES_SHOWN,
    )


def attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` makes; None of values that have another form, as files of another version may."""
    try:
        return make(*arguments)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


# --- Pictures ---------------------------------------------------------------------------------------------------------

Picture = tuple[str, Callable[..., None], tuple[Any, ...]]  # what it shows, in words; the plot; its arguments


def plot_lines(split: str, found: Mapping[str, Any], path: Path) -> None:
    """Draws the lines of a figure, and a mark on them."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
    for number, (name, ys) in enumerate(found["lines"].items()):
        axis.plot(found["xs"], ys, color=f"C{number}", label=name, linewidth=1.4)
        marked = [(x, y) for x, y in zip(found["xs"], ys, strict=True) if x == found["mark"]]
        axis.plot(*zip(*marked, strict=True), "o", color=f"C{number}", markersize=5)
    axis.axvline(found["mark"], color=MUTED, linestyle="--", linewidth=1, label=found["marked"])
    finish_plot(figure, axis, f"{found['title']}, {split}", found["xlabel"], found["ylabel"], path)


def finish_plot(figure: Any, axis: Any, title: str, xlabel: str, ylabel: str, path: Path) -> None:
    """Writes a plot, with its words."""
    pyplot = load_pyplot()
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize="small", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def draw_all(prefix: str, pictures: Iterable[Picture]) -> list[dict[str, Any]]:
    """The pictures that could be drawn, with what they show in words."""
    drawn = [(label, draw(f"{prefix}-{number}-", *rest)) for number, (label, *rest) in enumerate(pictures)]
    return [{"label": label, "svg": svg} for label, svg in drawn if svg]


def draw(prefix: str, plot: Callable[..., None], arguments: Sequence[Any]) -> str | None:
    """The SVG of a plot, its ids beginning with `prefix`; None if there was nothing to draw."""
    context = load_pyplot().rc_context(STYLE)
    with tempfile.TemporaryDirectory() as folder, context, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: the page's font is another
        path = Path(folder) / "picture.svg"
        attempt(plot, *arguments, path)
        return clean(path.read_text(encoding="utf-8"), prefix) if path.exists() else None


def clean(svg: str, prefix: str) -> str:
    """A picture fit to stand in a page: no names of its own but those used in it, colours of the page, no address."""
    root = ET.fromstring(XML_CONTROLS.sub("", svg))
    for parent in root.iter():
        for child in [child for child in parent if child.tag.rpartition("}")[2] in ("metadata", "style")]:
            parent.remove(child)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        values = {name.rpartition("}")[2]: value for name, value in element.items()}
        if values.get("id") not in used:
            values.pop("id", None)
        element.attrib.clear()
        element.attrib.update({name: restyle(name, value, prefix) for name, value in values.items()})
    width, height = root.get("viewBox").split()[2:]
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    # As wide as it was drawn, or narrower; pt -> px.
    root.attrib |= {"aria-hidden": "true", "style": f"max-width: {float(width) * 4 / 3:.0f}px"}
    root.attrib["viewBox"] = f"0 0 {float(width):g} {float(height):g}"
    return ET.tostring(root, encoding="unicode")


def restyle(name: str, value: str, prefix: str) -> str:
    """The value of an attribute in the page's names and colours."""
    if name == "id":
        return prefix + value
    if name == "href":
        return value.replace("#", f"#{prefix}", 1)
    value = value.replace("url(#", f"url(#{prefix}")
    if name == "style":
        value = re.sub("#[0-9a-f]{6}", lambda found: COLOURS.get(found[0], found[0]), value)
        # Of a font the size alone: the family is the page's. Older matplotlibs write both in one.
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"font-family: [^;]*;? ?", "", value)
    return value


# --- Tables -----------------------------------------------------------------------------------------------------------


def style_columns(table: Table) -> list[dict[str, str]]:
    """Return the head of each column, and how it looks.

    A column of which most lines are numbers is one of numbers; it may have words beside them.
    """
    columns = []
    for place, head in enumerate(table.heads):
        found = [line for row in table.rows for line in row[place].lines if line[0] not in ("", MISSING)]
        numbers = sum(NUMBER.fullmatch(text) is not None for text, _ in found)
        style = ("worded" if any(words for _, words in found) else "number") if 2 * numbers > len(found) else ""
        columns.append({"head": head, "style": style if place else ""})
    return columns


def show_minus(text: str) -> str:
    """A number with a minus sign instead of a hyphen."""
    return text.replace("-", "−", 1) if text.startswith("-") and NUMBER.fullmatch(text) else text
