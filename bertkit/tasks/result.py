"""The texts of an input, and results in words and as rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import softmax

from bertkit.data.labels import PAIR_NAMES, SEPARATOR, TEXT_NAMES, guess_texts
from bertkit.errors import UsageError, make_printable
from bertkit.reports.tables import show_number
from bertkit.tasks.schema import STRING, Schema, make_input
from bertkit.tasks.task import PredictionSettings, Result

if TYPE_CHECKING:
    pass

LONGEST_NAMES = 100  # characters of the names of an input, in a message


class MissingText(UsageError):
    """An input does not have the texts that a model reads, under any of their names."""


# --- Inputs -----------------------------------------------------------------------------------------------------------


def take_text(given: Mapping[str, Any], name: str) -> str:
    """Return a text of an input."""
    if not isinstance(text := given.get(name), str):
        has = "is missing" if name not in given else f"is {str(text)[:40]!r}, not a string"
        kind = MissingText if name not in given else UsageError
        raise kind(f"{name} {has}; the input has {list_names(given)}: give {name} as a string")
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
        kind = UsageError if any(given.keys() >= set(pair) for pair in PAIR_NAMES) else MissingText
        raise kind(f"the input has {list_names(given)}; this model takes two texts: give text and text_pair")
    return (take_text(given, next(iter(guess_texts(given)), TEXT_NAMES[0])),)


# --- Schemas ----------------------------------------------------------------------------------------------------------


def describe_texts(sample: Sequence[str], settings: PredictionSettings) -> Schema:
    """Return the schema of a text or two, of which the second may be optional."""
    one, two = (dict(zip(PAIR_NAMES[0][:count], sample, strict=False)) for count in (1, 2))
    return make_input(dict.fromkeys(one if settings.pairs is False else two, STRING), two if settings.pairs else one)


# --- Results ----------------------------------------------------------------------------------------------------------


def add_label_set(result: Result, probabilities: Mapping[Any, float], set_limit: float | None) -> Result:
    """Return a result with the label set: the labels that are likely enough, in their order; None adds none."""
    if set_limit is None:
        return result
    return result | {"label_set": [label for label, value in probabilities.items() if 1 - value <= set_limit]}


def describe_result(result: Result) -> str:
    """Return a result in words, with endings numbered from 1."""
    likely = (str(label + 1) if isinstance(label, int) else label for label in result.get("label_set", ()))
    sets = f"  set: {', '.join(likely) or '(empty)'}" if "label_set" in result else ""
    if "label" in result:
        return f"{result['label']}  ({result['probability']:.1%}){sets}"
    if "labels" in result:
        found = (f"{label} ({result['probabilities'][label]:.1%})" for label in result["labels"])
        return (", ".join(found) or "(no label)") + sets
    if "scores" in result:
        return ", ".join(f"{label} {show_number(value)}" for label, value in result["scores"].items())
    if "score" in result:
        return show_number(result["score"])
    if "ending" in result:
        return f"ending {result['ending'] + 1}  ({result['probabilities'][result['ending']]:.1%}){sets}"
    if "answer" in result:
        text, best = result["answer"] or "(no answer)", result["best"]
        if "tau" not in result:
            return f"{text}  (score {best['score']:.2f})"
        margin = best["score"] - result["null_score"] - result["tau"]
        rejected = "" if result["answer"] else f", best span {best['text']!r}"
        return f"{text}  ({abs(margin):.2f} {'above' if margin > 0 else 'below'} the threshold{rejected})"
    if "tags" in result:
        found = (f"{one['text']}: {one['type']}" for one in list_marked(result))
        return ", ".join(found) or "(nothing)"
    masks = (mask["words"] for mask in result.get("masks", ()))
    parts = [", ".join(f"{word['word']!r} {word['probability']:.0%}" for word in words) for words in masks]
    if "next_sentence" in result:
        parts.append(f"follows: {result['next_sentence']:.1%}")
    return "; ".join(parts)


def list_marked(result: Result) -> Sequence[Mapping[str, Any]]:
    """Return the entities of a text, or its words where each has a class of its own."""
    return result.get("entities", result.get("words", ()))


def flatten_result(result: Result) -> dict[str, Any]:
    """Return a result as a row, with several labels joined by "|"; empty if it forms none."""
    if "score" in result:
        return {"prediction": result["score"]}
    if "scores" in result:
        return {f"prediction_{label}": value for label, value in result["scores"].items()}
    if "next_sentence" in result and "masks" not in result:
        return {"next_sentence": result["next_sentence"]}
    if "label" not in result and "labels" not in result:
        return {}
    row = {f"probability_{label}": value for label, value in result["probabilities"].items()}
    if "label_set" in result:
        row["label_set"] = SEPARATOR.join(result["label_set"])
    if "labels" in result:
        return {"labels": SEPARATOR.join(result["labels"])} | row
    return {"label": result["label"], "probability": result["probability"]} | row


def judge_pair(logits: np.ndarray) -> float:
    """Return the probability that the second text follows the first, of next-sentence logits (2,)."""
    return float(softmax(logits)[0])
