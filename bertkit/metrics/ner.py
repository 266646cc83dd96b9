"""Scores of named entity recognition (paper section 5.3, Table 7), as functions.

Precision, recall and F1 equal those of conlleval, the official script of CoNLL-2003, as fractions.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from bertkit.metrics.rows import RowScore, measure_counts

Entity = tuple[int, int, str]  # first word, end, type


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in order, from tags in IOB1, IOB2, IOBES or BILOU.

    Tags are read as by conlleval, also those that are valid in no scheme. An entity begins at each B-, S- and U-, and
    at another tag that comes first, after O, after another type, or after the last word of an entity. It ends before
    the next entity or O, or with the sentence.
    """
    entities: list[Entity] = []
    start = 0
    for place, (tag, after) in enumerate(pairwise([*tags, "O"])):
        if after[0] in "IEL" and after[2:] == tag[2:] and tag[0] in "BI":
            continue
        if tag != "O":
            entities.append((start, place + 1, tag[2:]))
        start = place + 1
    return entities


def find_strict(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in order, from tags in IOB2 that are read strictly.

    An entity begins at B- only; an I- that does not continue one is ignored, as in seqeval's strict mode.
    """
    return [found for found in find_entities(tags) if tags[found[0]][0] == "B"]


def score_entities(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    entities: Sequence[Collection[Entity]] | None = None,
) -> dict[str, float]:
    """Return `precision`, `recall` and `f1` of all entities, the same as `strict_…`, and `accuracy` of the tags.

    Scores are fractions, 0 where undefined. An entity is correct if both its words and its type are; no entity
    continues across sentences. The strict scores count only predicted entities that are well-formed in IOB2.

    Args:
        gold: The correct tags of each sentence.
        predicted: The predicted tags of each sentence.
        entities: The correct entities of each sentence, where those of the tags only come near them.
    """
    entities = list(map(find_entities, gold)) if entities is None else entities
    scores, strict = (
        _rate_entities(*(counts.total() for counts in _count_entities(entities, map(find, predicted))))
        for find in (find_entities, find_strict)
    )
    pairs = [pair for tags in zip(gold, predicted, strict=True) for pair in zip(*tags, strict=True)]
    accuracy = sum(tag == guess for tag, guess in pairs) / max(len(pairs), 1)
    return scores | {f"strict_{name}": value for name, value in strict.items()} | {"accuracy": accuracy}


def measure_entities(
    gold: Sequence[Collection[Entity]], predicted: Sequence[Sequence[str]], groups: Sequence[Hashable]
) -> dict[str, RowScore]:
    """Return the scores of `score_entities`, except `accuracy`, as functions of the weights of the groups.

    Args:
        gold: The correct entities of each sentence.
        predicted: The predicted tags of each sentence.
        groups: The group of each sentence, such as its document.
    """
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    scores = {}
    for prefix, find_predicted in (("", find_entities), ("strict_", find_strict)):
        counts = []
        for numbers in members.values():
            guessed = (find_predicted(predicted[number]) for number in numbers)
            counts.append([found.total() for found in _count_entities([gold[number] for number in numbers], guessed)])
        right, found, wanted = np.array(counts).T[:, :, None]  # (S, 1) each
        for name in ("precision", "recall", "f1"):
            scores[f"{prefix}{name}"] = measure_counts(right, found, wanted, name)
    return scores


def score_types(
    gold: Iterable[Collection[Entity]], predicted: Iterable[Collection[Entity]]
) -> dict[str, dict[str, float]]:
    """Return `precision`, `recall` and `f1` of each type of the correct or predicted entities, in alphabetical order.

    Both are given for each sentence.
    """
    right, found, wanted = _count_entities(gold, predicted)
    return {kind: _rate_entities(right[kind], found[kind], wanted[kind]) for kind in sorted(found | wanted)}


def _count_entities(
    gold: Iterable[Collection[Entity]], predicted: Iterable[Collection[Entity]]
) -> tuple[Counter[str], ...]:
    """Count correct, predicted and gold entities, each by type."""
    right, found, wanted = Counter(), Counter(), Counter()
    for entities, guessed in zip(map(set, gold), map(set, predicted), strict=True):
        for counts, chosen in ((right, entities & guessed), (found, guessed), (wanted, entities)):
            counts.update(kind for _, _, kind in chosen)
    return right, found, wanted


def _rate_entities(right: int, found: int, wanted: int) -> dict[str, float]:
    precision, recall = right / max(found, 1), right / max(wanted, 1)
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
