"""Tables as values, which renderers for the terminal, Markdown and HTML show, and the tables of scores."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import zip_longest
from textwrap import shorten
from typing import Any, Literal


@dataclass(frozen=True)
class ScoreLine:
    """One line of a run's final table of scores."""

    name: str
    key: str  # the key of the score in metrics.json; `start_<key>` is its value before training
    # Mapping from the description of a trivial baseline to the key of its score
    baselines: Mapping[str, str] = field(default_factory=dict)
    # The unit of the value in metrics.json; tables show fractions in percent
    unit: Literal["", "fraction", "percent"] = ""
    # Published scores in the same unit; the keys name the model and the data
    paper: Mapping[str, float] = field(default_factory=dict)
    # The key of a score in whose presence the line is not shown, because it repeats one; empty if none
    hidden_by: str = ""

    @property
    def head(self) -> str:
        """Return the name with the unit that tables use."""
        return f"{self.name} (%)" if self.unit else self.name

    def scale(self, value: float) -> float:
        """Return the value in the unit that tables use."""
        return 100 * value if self.unit == "fraction" else value

    def show(self, value: float) -> str:
        """Format the value as tables show it."""
        return f"{self.scale(value):.1f}" if self.unit else show_number(value)

    def show_mean(self, mean: float, sd: float | None, n: int) -> str:
        """Return `mean ± sd (n)`."""
        spread = "" if sd is None else f" ± {self.show(sd)}"
        return f"{self.show(mean)}{spread} ({n})"

    def show_interval(self, metrics: Mapping[str, Any]) -> str:
        """Format the interval of the score as tables show it; return an empty text if there is none."""
        limits = [metrics[name] for name in name_limits(self.key) if name in metrics]
        return " to ".join(map(self.show, limits))

    def describe(self, value: float) -> str:
        """Return name, value and unit."""
        return f"{self.name} {self.show(value)}{' %' if self.unit else ''}"


def show_number(number: float) -> str:
    """Return a number with three decimals, a very large or small one with four digits, without an exponent."""
    if number == 0 or 0.01 <= abs(number) < 10_000:
        return f"{number:.3f}"
    return f"{Decimal(f'{number:.4g}'):f}"


OWN_DATA = "own_data"  # key of metrics.json: present if the paper has no scores on the data
MISSING = "–"
INTERVAL = "95 % interval over examples"  # the heading of the column of intervals
WITHOUT_LEAKS = "_without_leaks"  # after the name of a score: of the rows that are not in train
NUMBER = re.compile(r"[-−+]?\d[\d.,:/]*(e[-+]?\d+)?( to [-−]?\d[\d.,]*)?( ± [\d.,]+)?( \(\d+\))?( [†*])*")


@dataclass(frozen=True)
class TableCell:
    """A cell of a table."""

    lines: tuple[tuple[str, str], ...] = ()  # pairs of a text and the words that explain it
    href: str = ""  # the cell's link; empty without one
    share: float | None = None  # the cell's shade, from 0 (light) to 1 (dark); None without one
    # "chosen" cells stand out from the others, "published" cells hold published values
    kind: Literal["", "chosen", "published"] = ""
    # The text in parts, each with whether it is marked; empty if none is
    parts: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Table:
    """A table."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    kind: str = ""  # "quiet" (only screen readers read the caption), "matrix", "text", or empty


def make_table(caption: str, heads: Iterable[str], lines: Iterable[Iterable[str | TableCell]], kind: str = "") -> Table:
    """Make a table; a string becomes a cell of one line."""
    rows = ((cell if isinstance(cell, TableCell) else TableCell(((cell, ""),)) for cell in line) for line in lines)
    return Table(caption, tuple(heads), tuple(map(tuple, rows)), kind)


def format_text(table: Table) -> str:
    """Return the caption and the aligned columns of a table, with each line of a cell on a line of its own."""
    lines: list[Sequence[str]] = [table.heads]
    for row in table.rows:
        cells = [[f"{text} {words}".rstrip() for text, words in cell.lines] for cell in row]
        lines += zip_longest(*cells, fillvalue="")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([table.caption, *aligned])


def find_row(table: Iterable[ScoreLine], key: str) -> ScoreLine:
    """Return the line of a table with this score."""
    return next((row for row in table if row.key == key), ScoreLine(key, key))


def list_shown(table: Sequence[ScoreLine], metric: str, metrics: Mapping[str, Any]) -> list[ScoreLine]:
    """Return the lines of a table that there are scores for, the metric's among them, with known baselines.

    Those of a person's own data have no published scores.
    """
    rows = {row.key: row for row in (*table, find_row(table, metric))}
    found = []
    for row in (row for key, row in rows.items() if key in metrics and row.hidden_by not in metrics):
        baselines = {words: known for words, known in row.baselines.items() if known in metrics}
        found.append(replace(row, baselines=baselines, paper={} if OWN_DATA in metrics else row.paper))
    return found


def find_main(rows: Sequence[ScoreLine], metric: str) -> ScoreLine:
    """Return the line of a metric, or the first one, whose score the metric of one's own classes is."""
    return next((row for row in rows if row.key == metric), rows[0])


def tabulate_scores(
    rows: Sequence[ScoreLine], metrics: Mapping[str, float], label: str, others: Sequence[Mapping[str, Any]] = ()
) -> Table:
    """Return the table of a run's scores, in the column `label`.

    Other columns have baselines, the interval of each score, other seeds, and the paper's scores.
    Columns without a value are left out.

    Args:
        others: The metrics of the runs with all seeds, this run included.
    """

    def show(row: ScoreLine, key: str) -> list[tuple[str, str]]:
        return [(row.show(metrics[key]), "")] if key in metrics else []

    columns: dict[str, Callable[[ScoreLine], list[tuple[str, str]]]] = {
        "baseline": lambda row: [(row.show(metrics[key]), words) for words, key in row.baselines.items()],
        "before training": lambda row: show(row, f"start_{row.key}"),
        label: lambda row: show(row, row.key),
        INTERVAL: lambda row: [(text, "") for text in [row.show_interval(metrics)] if text],
        "without leaks": lambda row: show(row, f"{row.key}{WITHOUT_LEAKS}"),
    }
    if len(others) > 1:
        columns[f"mean ± sd over {len(others)} seeds"] = lambda row: [(show_spread(row, others), "")]
    columns["the paper"] = lambda row: [(row.show(value), words) for words, value in row.paper.items()]
    cells = {head: [TableCell(tuple(make(row))) for row in rows] for head, make in columns.items()}
    cells = {head: column for head, column in cells.items() if any(cell.lines for cell in column)}
    lines = zip([row.head for row in rows], *cells.values(), strict=True)
    return make_table("Scores on held-out data", ["held out", *cells], lines, "quiet")


LABEL_WIDTH = 80  # characters of a label
LABEL_SCORES = {  # the score of a label in metrics.json -> its column
    "precision": "precision (%)",
    "recall": "recall (%)",
    "f1": "F1 (%)",
    "count": "count",
    "threshold": "threshold",
}


def tabulate_labels(metrics: Mapping[str, float], split: str, pattern: str = "{}") -> Table | None:
    """Return the table of the scores of each label of a split; None if metrics.json has none.

    Args:
        pattern: The name pattern of the split's scores.
    """
    start = pattern.format("count_")
    names = [key.removeprefix(start) for key in metrics if key.startswith(start)]
    scores = [{key: metrics.get(pattern.format(f"{key}_{name}")) for key in LABEL_SCORES} for name in names]
    keys = [key for key in LABEL_SCORES if any(found[key] is not None for found in scores)]
    lines = [
        [shorten(name, LABEL_WIDTH, placeholder="…"), *(_show_label_score(key, found[key]) for key in keys)]
        for name, found in zip(names, scores, strict=True)
    ]
    heads = ["label", *(LABEL_SCORES[key] for key in keys)]
    return make_table(f"Scores by label, {split}", heads, lines) if lines else None


def _show_label_score(key: str, value: float | None) -> str:
    if value is None:
        return MISSING
    if key == "count":
        return f"{value:,.0f}"
    return f"{value:.3f}" if key == "threshold" else f"{100 * value:.1f}"


def tabulate_types(scores: Mapping[str, Mapping[str, float]], split: str) -> Table | None:
    """Return the table of precision, recall and F1 of each type of entity or class of words; None without any."""
    lines = [
        [kind, *(f"{100 * found[key]:.1f}" for key in ("precision", "recall", "f1"))] for kind, found in scores.items()
    ]
    heads = ["type", "precision", "recall", "F1"]
    return make_table(f"Scores by type, {split} (%)", heads, lines) if lines else None


def name_limits(key: str) -> tuple[str, str]:
    """Return the names of the limits of a score's interval in metrics.json."""
    return f"{key}_low", f"{key}_high"


def show_spread(row: ScoreLine, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return `mean ± sd (n)` of a score over runs."""
    values = [scores[row.key] for scores in runs if row.key in scores]
    if not values:
        return MISSING
    sd = statistics.stdev(values) if len(values) > 1 else None
    return row.show_mean(statistics.fmean(values), sd, len(values))


def split_number(text: str, words: str) -> tuple[str, str]:
    """Split a number from its spread and count, which are put before its words; return other texts unchanged."""
    if not NUMBER.fullmatch(text) or " to " in text:
        return text, words
    number, _, rest = text.partition(" ")
    return number, f"{rest} {words}".strip()
