"""Scores of named entity recognition (paper section 5.3, Table 7), as functions.

Precision, recall and F1 equal those of conlleval, the official script of CoNLL-2003, as fractions.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Entity = tuple[int, int, str]  # first word, end, type


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in order, from tags in IOB1 or IOB2.

    Tags are read as by conlleval, also those that are valid in neither scheme. An entity begins at each B-, and at an
    I- that comes first, after O, or after another type. It ends before the next entity or O, or with the sentence.
    """
    entities: list[Entity] = []
    start = 0
    for place, (tag, after) in enumerate(pairwise([*tags, "O"])):
        if after[0] == "I" and after[2:] == tag[2:]:
            continue
        if tag != "O":
            entities.append((start, place + 1, tag[2:]))
        start = place + 1
    return entities


def score_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `precision`, `recall` and `f1` of all entities, and `accuracy` of the tags.

    Scores are fractions, 0 where undefined. An entity is correct if both its words and its type are; no entity
    continues across sentences.

    Args:
        gold: The correct tags of each sentence.
        predicted: The predicted tags of each sentence.
    """
    right, found, wanted = (counts.total() for counts in _count_entities(gold, predicted))
    pairs = [pair for tags in zip(gold, predicted, strict=True) for pair in zip(*tags, strict=True)]
    accuracy = sum(tag == guess for tag, guess in pairs) / max(len(pairs), 1)
    return _rate_entities(right, found, wanted) | {"accuracy": accuracy}


def score_types(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, dict[str, float]]:
    """Return `precision`, `recall` and `f1` of each entity type, in alphabetical order.

    Types come from the gold and the predicted tags. Arguments are those of `score_entities`.
    """
    right, found, wanted = _count_entities(gold, predicted)
    return {kind: _rate_entities(right[kind], found[kind], wanted[kind]) for kind in sorted(found | wanted)}


def _count_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[Counter[str], ...]:
    """Count correct, predicted and gold entities, each by type."""
    right, found, wanted = Counter(), Counter(), Counter()
    for tags, guesses in zip(gold, predicted, strict=True):
        entities, guessed = set(find_entities(tags)), set(find_entities(guesses))
        for counts, chosen in ((right, entities & guessed), (found, guessed), (wanted, entities)):
            counts.update(kind for _, _, kind in chosen)
    return right, found, wanted


def _rate_entities(right: int, found: int, wanted: int) -> dict[str, float]:
    precision, recall = right / max(found, 1), right / max(wanted, 1)
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
