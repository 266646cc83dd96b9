"""The answers of a model: files, tables and results are views of them.

`Task.decode` returns the answers to the sequences of a split, or of a person's inputs. Their views are the prediction
table with the right answers beside them (`rows`), and results, which are JSON objects (`list_results`). A result in
words, as a row of a table, and as transformers' `pipeline` returns it, are views of a result, found by its key among
`bertkit.tasks.FORMS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import softmax

Result = dict[str, Any]
# Values that other data have decided: those of DECIDED_VALUES, as in `BertConfig`, and the `set_limit` of label sets;
# and the form in which names are to be redacted, `redact`
Decisions = Mapping[str, Any]
DECIDED_VALUES = ("tau", "thresholds", "least_confidence", "redaction_threshold")


class Answers:
    """The answers to the rows of a split, or to inputs, in order."""

    key: str  # the key that results of this form have, and those of no later one in FORMS
    has_pipeline = False  # whether transformers has a pipeline for the same results
    # The columns of a table with a row for each entity, for results without `flatten`: name -> type
    entity_columns: Mapping[str, type] = {}
    # The right and the predicted answers, and the numbers that scores are made of: the columns of the prediction table
    # without those of `Task.tabulate_examples`
    rows: pa.Table

    def list_results(self) -> list[Result]:
        """Return the answer to each input."""
        raise NotImplementedError

    @staticmethod
    def describe(result: Result) -> str:
        """Return a result in words."""
        raise NotImplementedError

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        """Return a result as a row of a table; empty if such results form none."""
        return {}

    @staticmethod
    def convert(result: Result, labels: Sequence[str]) -> Any:
        """Return a result in the form of transformers' `pipeline`, without the keys that it lacks."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Sums(Answers):
    """The summed losses of a language model, which are only scored."""

    rows: pa.Table


@dataclass(frozen=True, eq=False)
class PairAnswers(Answers):
    """Whether the second text of each pair follows the first."""

    key = "next_sentence"
    follows: np.ndarray  # (S,) the probabilities

    def list_results(self) -> list[Result]:
        return [{"next_sentence": value} for value in self.follows.tolist()]

    @staticmethod
    def describe(result: Result) -> str:
        return f"follows: {result['next_sentence']:.1%}"

    @staticmethod
    def flatten(result: Result) -> dict[str, Any]:
        return {"next_sentence": result["next_sentence"]}


def judge_pairs(logits: np.ndarray) -> np.ndarray:
    """Return (S,) the probabilities that a text follows the other, of next-sentence logits (S, 2)."""
    return softmax(logits, axis=1)[:, 0]


def add_label_set(result: Result, probabilities: Mapping[Any, float], set_limit: float | None) -> Result:
    """Return a result with the label set: the labels that are likely enough, in their order; None adds none."""
    if set_limit is None:
        return result
    return result | {"label_set": [label for label, value in probabilities.items() if 1 - value <= set_limit]}


def describe_set(result: Result) -> str:
    """Return the label set of a result in words, with endings numbered from 1; empty if it has none."""
    if "label_set" not in result:
        return ""
    likely = [str(label + 1) if isinstance(label, int) else label for label in result["label_set"]]
    return f"  set: {', '.join(likely) or '(empty)'}"
