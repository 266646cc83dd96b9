"""The texts of an input by their names, and their schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from bertkit.data.labels import PAIR_NAMES, TEXT_NAMES, guess_texts
from bertkit.errors import UsageError, make_printable
from bertkit.tasks.schema import STRING, Schema, make_input
from bertkit.tasks.task import PredictionSettings

LONGEST_NAMES = 100  # characters of the names of an input, in a message


class MissingText(UsageError):
    """An input does not have the texts that a model reads, under any of their names."""


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


def describe_texts(sample: Sequence[str], settings: PredictionSettings) -> Schema:
    """Return the schema of a text or two, of which the second may be optional."""
    one, two = (dict(zip(PAIR_NAMES[0][:count], sample, strict=False)) for count in (1, 2))
    return make_input(dict.fromkeys(one if settings.pairs is False else two, STRING), two if settings.pairs else one)
