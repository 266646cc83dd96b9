"""The examples of a split as rows, whatever the task: what checks, divisions and the prediction table read of them."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.formats.rows import Columns
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.tasks.task import Task

TEXTS_A_PART = 10_000  # texts converted from Arrow at a time
MOST_TRIAL_ROWS = 0.25  # share of the training rows


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """The rows of a split, one for each unit that is sampled: a text or pair, a question, a sentence."""

    texts: Mapping[str, Sequence[str] | pa.ChunkedArray]  # name -> the column of texts (S,)
    # The group of each row (a document, a context, a first text), which is drawn and divided as a whole
    groups: Sequence[Hashable]
    # The right answer of each row: a name, several names or a number; None without answers
    labels: Sequence[Hashable] | None
    classes: Sequence[str]  # the classes that occur, one or several for each row, for counts; empty for numbers
    lines: Sequence[int]  # the line of each row in its file, or its number from 1
    source: Columns | None = None  # the rows of a person's own table; None for other files
    used: Collection[str] = ()  # the columns of `source` that the task reads
    choices: int = 0  # the number of last texts that are in sequences of their own, after the others; 0: none

    def __len__(self) -> int:
        return len(self.lines)

    def walk_texts(self, numbers: np.ndarray | None = None) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each row, or of the rows with some numbers."""
        columns = list(self.texts.values())
        if numbers is not None:
            columns = [
                column.take(numbers) if isinstance(column, pa.ChunkedArray) else [column[n] for n in numbers.tolist()]
                for column in columns
            ]
        for start in range(0, len(columns[0]), TEXTS_A_PART):
            parts = (column[start : start + TEXTS_A_PART] for column in columns)
            yield from zip(*(part if isinstance(part, list) else part.to_pylist() for part in parts), strict=True)


def select(examples: Any, numbers: np.ndarray) -> Any:
    """Return some of a split's examples, by their numbers."""
    if isinstance(examples, list):
        return [examples[number] for number in numbers.tolist()]
    return examples.take(numbers)


def divide(task: "Task", examples: Any, share: float, source: str = "tune_share of dev") -> tuple[Any, Any]:
    """Divide a split's examples into a share that decides, and the others.

    The division is the same for every seed. Examples of one group stay together.

    Args:
        source: The option and the split, for the message.
    """
    groups = task.tabulate_examples(examples).groups
    names = list(dict.fromkeys(groups))
    count = round(share * len(names))
    if not 0 < count < len(names):
        raise UsageError(
            f"{source}: a share of {share:g} of {len(names):,} texts or documents leaves one part empty; change it"
        )
    chosen = {names[index] for index in np.random.default_rng(0).permutation(len(names))[:count]}
    decides = np.array([name in chosen for name in groups])
    return select(examples, np.flatnonzero(decides)), select(examples, np.flatnonzero(~decides))
