"""The repeated rows of a task's data: leaks between splits, repeats and contradictions, as a line or as JSON.

It is the part of the doctor (`bertkit.analysis.doctor`) that every fine-tuning does, because it takes seconds.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bertkit.data.duplicates import TRAIN_SPLIT, SplitRepeats, encode_answers, hash_rows, list_repeats
from bertkit.errors import pluralize
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.task import Task


@dataclass(frozen=True, eq=False)
class CheckedRows:
    """The repeated rows of each split, train first, and the line of each row in its file."""

    splits: Mapping[str, SplitRepeats] = field(default_factory=dict)
    lines: Mapping[str, Sequence[int]] = field(default_factory=dict)
    keys: Mapping[str, np.ndarray] = field(default_factory=dict)  # split -> the hashes of the rows

    def list_leaks(self, split: str) -> np.ndarray:
        """Return the numbers of the rows that also occur in train; empty if all of them do."""
        found = self.splits.get(split)
        return found.in_train[:, 0] if found and len(found.in_train) < found.size else np.empty(0, np.int64)

    def mark_contradictory(self, split: str) -> np.ndarray:
        """Return (S,) whether the text of each row has different labels in its split, or in another one and train."""
        wrong = [self.keys[name][rows] for name, one in self.splits.items() for rows in one.contradictory]
        wrong += [self.keys[name][one.contradicts_train[:, 0]] for name, one in self.splits.items()]
        return np.isin(self.keys[split], np.concatenate(wrong))

    def summarize(self) -> str:
        """Return the counts of all splits with findings in one line; empty without any."""
        parts = [f"{split}: {', '.join(found)}" for split, one in self.splits.items() if (found := _count_words(one))]
        return "; ".join(parts)

    def format(self) -> dict[str, dict[str, Any]]:
        """Return for each split the counts and rows of its findings, for JSON."""
        formatted = {}
        for split, found in self.splits.items():
            listed = {
                "in_train": self.pair_lines(split, TRAIN_SPLIT, found.in_train),
                "repeats": self.pair_lines(split, split, found.repeats),
                "contradictory": [[self.lines[split][row] for row in group.tolist()] for group in found.contradictory],
                "contradicts_train": self.pair_lines(split, TRAIN_SPLIT, found.contradicts_train),
            }
            if split == TRAIN_SPLIT:
                del listed["in_train"], listed["contradicts_train"]
            formatted[split] = {"rows": found.size, **count_rows(**listed)}
        return formatted

    def pair_lines(self, split: str, other: str, pairs: np.ndarray) -> list[list[int]]:
        """Return the lines of pairs (N, 2) of a row of a split and a row of another."""
        return [[self.lines[split][row], self.lines[other][partner]] for row, partner in pairs.tolist()]


def count_rows(**found: Sequence[Any]) -> dict[str, Any]:
    """Return the number of rows of each finding, and the rows as `<name>_rows`, for JSON."""
    return {name: len(rows) for name, rows in found.items()} | {f"{name}_rows": rows for name, rows in found.items()}


def tabulate_splits(task: Task, examples: Mapping[str, Any]) -> dict[str, ExampleRows]:
    """Return the rows of each split, train first; empty without texts before encoding.

    Groups may hold all texts: those of train become integers, and the others are left out.
    """
    rows = {}
    for split in sorted(examples, key=lambda split: split != TRAIN_SPLIT):
        if (found := task.tabulate_examples(examples[split])) is None:
            return {}
        numbers: dict[Hashable, int] = {}
        groups = [numbers.setdefault(group, len(numbers)) for group in found.groups] if split == TRAIN_SPLIT else []
        rows[split] = replace(found, groups=groups)
    return rows


def check_rows(rows: Mapping[str, ExampleRows]) -> CheckedRows:
    """Return the repeated rows of each split."""
    numbers: dict[Any, int] = {}
    keys = {split: hash_rows(found.walk_texts()) for split, found in rows.items()}
    answers = {
        split: encode_answers(found.labels, numbers) for split, found in rows.items() if found.labels is not None
    }
    return CheckedRows(list_repeats(keys, answers), {split: found.lines for split, found in rows.items()}, keys)


def _count_words(found: SplitRepeats) -> list[str]:
    """Return the counts of a split's findings in words."""
    words = []
    if leaks := len(found.in_train):
        words.append(f"{leaks:,} of {pluralize(found.size, 'row')} also {'occurs' if leaks == 1 else 'occur'} in train")
    if repeats := len(found.repeats):
        words.append(f"{pluralize(repeats, 'row repeats', 'rows repeat')} others")
    if texts := len(found.contradictory):
        words.append(f"{pluralize(texts, 'text has', 'texts have')} different labels")
    if others := len(found.contradicts_train):
        words.append(f"{pluralize(others, 'row has', 'rows have')} a different label in train")
    return words
