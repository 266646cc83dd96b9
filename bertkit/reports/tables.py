"""What the tables of runs share: a score with its line, and text in columns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ScoreRow:
    """One line of the table that a run ends with.

    key: of the score in metrics.json; `start_<key>` is its value before training.
    baselines: what knowing less would score: words for it -> its key.
    unit: of the value in metrics.json; tables show a fraction in percent.
    paper: the published scores in the same unit: whose and on which data -> value.
    """

    name: str
    key: str
    baselines: Mapping[str, str] = field(default_factory=dict)
    unit: Literal["", "fraction", "percent"] = ""
    paper: Mapping[str, float] = field(default_factory=dict)

    def show(self, value: float) -> str:
        """The value as tables show it."""
        scaled = 100 * value if self.unit == "fraction" else value
        return f"{scaled:.1f}" if self.unit else f"{value:.3f}"


MISSING = "–"
MARKUP = re.compile(r"[\\\[<`|]")  # of Markdown: links, HTML, code, cells


def count(number: int, name: str, names: str = "") -> str:
    """So many of them."""
    return f"{number:,} {name if number == 1 else names or f'{name}s'}"


def format_table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines in Markdown, the first one the head."""
    texts = ["| " + " | ".join(MARKUP.sub(r"\\\g<0>", text) for text in line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]
