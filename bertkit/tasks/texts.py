"""Classification and regression of one text or a pair (section 4.1), for GLUE's tasks and any such model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from bertkit.data.sequences import Sequences, encode_inputs
from bertkit.errors import UsageError, make_printable
from bertkit.tasks.finetuning import FineTuningTask
from bertkit.tasks.task import PredictionSettings, Result

LONGEST_NAMES = 100  # characters of the names of an input, in a message
PAIR_NAMES = (  # names of two texts that belong together: ours, which are transformers', and GLUE's
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
SINGLES = ("text", "sentence")


class TextTask(FineTuningTask):
    """Predict classes or scores of texts or pairs; the configuration's `problem_type` says which."""

    head = "BertForSequenceClassification"

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> tuple[str, ...]:
        """Return a text, or two."""
        return read_texts(given, settings.pairs)

    def encode_inputs(
        self, examples: Sequence[tuple[str, ...]], settings: PredictionSettings
    ) -> tuple[Sequences, np.ndarray]:
        """Return the sequences of texts and pairs, and their tokens."""
        inputs = [texts if len(texts) == 2 else texts[0] for texts in examples]
        data = encode_inputs(inputs, None, settings.tokenizer, settings.max_length)
        return data, np.diff(data.ends, prepend=0)

    def answer(
        self, kept: Sequence[np.ndarray], data: Any, examples: Any, settings: PredictionSettings
    ) -> list[Result]:
        """Return the class of each example, its several labels, or its scores."""
        logits, labels = np.stack(kept), settings.labels  # (S, L)
        kind = settings.model.config.problem_type
        if kind == "multi_label_classification":
            results = [dict(zip(labels, row, strict=True)) for row in expit(logits).tolist()]
            return [
                {"labels": [label for label, value in row.items() if value > 0.5], "probabilities": row}
                for row in results
            ]
        if len(labels) == 1:
            return [{"score": value} for value in logits[:, 0].tolist()]
        if kind == "regression":
            return [{"scores": dict(zip(labels, row, strict=True))} for row in logits.tolist()]
        return [
            {"label": labels[best], "probability": row[best], "probabilities": dict(zip(labels, row, strict=True))}
            for best, row in zip(logits.argmax(1).tolist(), softmax(logits, axis=1).tolist(), strict=True)
        ]

    def describe_result(self, result: Result) -> str:
        """Return the class or the labels and how likely they are, or the scores."""
        if "label" in result:
            return f"{result['label']}  ({result['probability']:.1%})"
        if "labels" in result:
            found = (f"{label} ({result['probabilities'][label]:.1%})" for label in result["labels"])
            return ", ".join(found) or "(no label)"
        if "scores" in result:
            return ", ".join(f"{label} {value:.3f}" for label, value in result["scores"].items())
        return f"{result['score']:.3f}"


class NextSentenceTask(TextTask):
    """Tell whether the second text follows the first, with that head alone; it is never trained by itself."""

    head = "BertForNextSentencePrediction"
    pairs = True

    def answer(
        self, kept: Sequence[np.ndarray], data: Any, examples: Any, settings: PredictionSettings
    ) -> list[Result]:
        """Return whether the second text of each example follows the first."""
        return [{"next_sentence": judge_pair(row)} for row in kept]

    def describe_result(self, result: Result) -> str:
        """Return how likely the second text follows."""
        return describe_pair(result)


def judge_pair(logits: np.ndarray) -> float:
    """Return the probability that the second text follows the first, of next-sentence logits (2,)."""
    return float(softmax(logits)[0])


def describe_pair(result: Result) -> str:
    """Return the probability of a result that the second text follows, in words."""
    return f"follows: {result['next_sentence']:.1%}"


def take_text(given: Mapping[str, Any], name: str) -> str:
    """Return a text of an input.

    Raises:
        UsageError: It is missing, or not text.
    """
    if not isinstance(text := given.get(name), str):
        has = "is missing" if name not in given else f"is {str(text)[:40]!r}, not a string"
        raise UsageError(f"{name} {has}; the input has {list_names(given)}: give {name} as a string")
    return text


def list_names(given: Mapping[str, Any]) -> str:
    """Return the names in an input, for a message."""
    return make_printable(", ".join(map(str, given)))[:LONGEST_NAMES] or "nothing"


def read_texts(given: Mapping[str, Any], pairs: bool | None) -> tuple[str, ...]:
    """Return one text, or two if `pairs`; None: as many as the input has."""
    for first, second in PAIR_NAMES:
        if given.get(first) is not None and given.get(second) is not None:
            if pairs is False:
                raise UsageError(f"unexpected {second}; this model takes one text: remove it")
            return take_text(given, first), take_text(given, second)
    if pairs:
        raise UsageError(f"the input has {list_names(given)}; this model takes two texts: give text and text_pair")
    return (take_text(given, next((name for name in SINGLES if name in given), SINGLES[0])),)
