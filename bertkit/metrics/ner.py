"""Scores of named entity recognition (paper section 5.3, Table 7), as functions.

Precision, recall and F1 equal those of conlleval, the official script of CoNLL-2003, as fractions. Where each word has
a class, such as its part of speech, the class is the type of an entity of one word (`bertkit.data.tags.mark_words`).
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from bertkit.data.tags import WORDS
from bertkit.metrics.classification import FIXED_THRESHOLD
from bertkit.metrics.rows import WeightedScore, measure_counts, take_values
from bertkit.metrics.table import read_decided, read_facts, read_numbers

Entity = tuple[int, int, str]  # first word, end, type
COUNTS = ("right", "found", "wanted")  # entities that are predicted and correct, predicted, and correct
REDACTED = ("redacted_names", "all_names", "redacted_others", "all_others")  # names, and words outside of names


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in order, from tags in IOB1, IOB2, IOBES or BILOU.

    Tags are read as by conlleval, also those that are valid in no scheme. An entity begins at each B-, S- and U-, and
    at another tag that comes first, after O, after another type, or after the last word of an entity. It ends before
    the next entity or O, or with the sentence.
    """
    entities: list[Entity] = []
    start = 0
    for index, (tag, after) in enumerate(pairwise([*tags, "O"])):
        if after[0] in "IEL" and after[2:] == tag[2:] and tag[0] in "BI":
            continue
        if tag != "O":
            entities.append((start, index + 1, tag[2:]))
        start = index + 1
    return entities


def parse_strict(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence in order, from tags in IOB2 that are read strictly.

    An entity begins at B- only; an I- that does not continue one is ignored, as in seqeval's strict mode.
    """
    return [found for found in find_entities(tags) if tags[found[0]][0] == "B"]


def count_entities(gold: Sequence[Collection[Entity]], predicted: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Return columns (S,) of counts, from the correct entities and the predicted tags of each sentence.

    An entity is right if both its words and its type are; no entity continues across sentences.

    Returns:
        `right_T`, `found_T` and `wanted_T` for each type T: predicted and correct, predicted, and correct entities;
        `strict_right` and `strict_found` of all types, which count only what is well-formed in IOB2.
    """
    counts: dict[str, np.ndarray] = {}
    wanted = list(map(set, gold))
    found, strict = ([set(find(tags)) for tags in predicted] for find in (find_entities, parse_strict))
    right, strict_right = (list(map(set.intersection, wanted, sets)) for sets in (found, strict))
    sides = {"right": right, "found": found, "wanted": wanted}
    kinds = {name: list(map(count_kinds, sets)) for name, sets in sides.items()}
    for kind in sorted(set().union(*kinds["found"], *kinds["wanted"])):
        counts |= {f"{name}_{kind}": np.array([x[kind] for x in own], np.int32) for name, own in kinds.items()}
    for name, sets in (("right", strict_right), ("found", strict)):
        counts[f"strict_{name}"] = np.array(list(map(len, sets)), np.int32)
    return counts


def count_kinds(entities: Collection[Entity]) -> Counter[str]:
    """Return how many entities of each type there are."""
    return Counter(kind for *_, kind in entities)


def measure_entities(right: np.ndarray, found: np.ndarray, wanted: np.ndarray) -> dict[str, WeightedScore]:
    """Return `precision`, `recall` and `f1` from the counts of each sentence, (S,) each."""
    columns = [counts[:, None] for counts in (right, found, wanted)]
    return {name: measure_counts(*columns, name) for name in ("precision", "recall", "f1")}


def score_entities(rows: pa.Table) -> dict[str, WeightedScore]:
    """Return `precision`, `recall`, `f1`, and these as `strict_…`; or of words `accuracy`, `macro_f1` and `f1`."""
    counts = sum_types(rows)
    scores = measure_entities(*counts)
    if read_facts(rows).get("scheme") == WORDS:
        each = np.stack(list(read_types(rows).values()), axis=2)  # (3, S, L)
        return {"accuracy": scores["f1"], "macro_f1": measure_counts(*each, "macro_f1"), "f1": scores["f1"]}
    strict = measure_entities(*(read_numbers(rows, f"strict_{name}") for name in ("right", "found")), counts[2])
    return scores | {f"strict_{name}": score for name, score in strict.items()}


def score_types(rows: pa.Table) -> dict[str, dict[str, float]]:
    """Return `precision`, `recall` and `f1` of each type, from `count_entities`, in alphabetical order."""
    return {kind: take_values(measure_entities(*counts)) for kind, counts in read_types(rows).items()}


def read_types(rows: pa.Table) -> dict[str, np.ndarray]:
    """Return how many entities of each type are right, found and wanted in each sentence (3, S)."""
    names = read_facts(rows).get("names", [])
    return {kind: np.stack([read_numbers(rows, f"{name}_{kind}") for name in COUNTS]) for kind in names}


def sum_types(rows: pa.Table) -> np.ndarray:
    """Return (3, S) the sum over all types of what `read_types` returns."""
    return np.sum(list(read_types(rows).values()) or np.zeros((1, len(COUNTS), len(rows))), axis=0)


# --- Redaction --------------------------------------------------------------------------------------------------------


def choose_redaction(shares: Sequence[Sequence[float]], gold: Sequence[Collection[Entity]], recall: float) -> float:
    """Return the highest threshold that redacts a share of the names; if none does, the one that redacts most.

    A name is redacted if each of its words is. Below the lowest of these probabilities the threshold is midway to the
    next one of any word, so that rounding changes nothing. Without names it is FIXED_THRESHOLD.

    Args:
        shares: The probability of each word of each sentence of being in a name; negative: it cannot be redacted.
        gold: The right names of each sentence.
        recall: The share of names, above 0 and below 1.
    """
    pairs = zip(shares, gold, strict=True)
    lowest = np.sort([min(own[first:end]) for own, names in pairs for first, end, _ in names])[::-1]  # of each name
    possible = lowest[lowest >= 0]
    if not len(possible):
        return FIXED_THRESHOLD
    is_enough = np.arange(1, len(possible) + 1) / len(lowest) >= recall
    chosen = possible[is_enough.argmax() if is_enough.any() else -1]
    words = np.concatenate(list(map(np.asarray, shares)))
    return float(chosen + words[words < chosen].clip(0).max(initial=0.0)) / 2


def count_redacted(
    shares: Sequence[Sequence[float]], gold: Sequence[Collection[Entity]], threshold: float
) -> dict[str, np.ndarray]:
    """Return columns (S,) of the names and of the other words of each sentence, and of those that are redacted.

    Args:
        shares, gold: As for `choose_redaction`.
    """
    counts = []
    for own, names in zip(shares, gold, strict=True):
        is_redacted, is_other = np.array(own) >= threshold, np.ones(len(own), bool)
        for first, end, _ in names:
            is_other[first:end] = False
        right = sum(is_redacted[first:end].all() for first, end, _ in names)
        counts.append((right, len(names), (is_redacted & is_other).sum(), is_other.sum()))
    columns = np.array(counts, np.int32).reshape(-1, len(REDACTED)).T
    return dict(zip(REDACTED, columns, strict=True))


def score_redaction(rows: pa.Table) -> dict[str, WeightedScore | float]:
    """Return the shares of names and of other words that a threshold redacts, and it; empty if the table has none."""
    threshold = read_decided(rows).get("redaction_threshold")
    if threshold is None or not {*REDACTED} <= {*rows.column_names}:
        return {}
    columns = [read_numbers(rows, name) for name in REDACTED]
    names, others = np.stack(columns[:2], axis=1), np.stack(columns[2:], axis=1)  # (S, 2) each
    scores = {"redaction_recall": WeightedScore(names, "mean"), "redaction_others": WeightedScore(others, "mean")}
    asked = {f"asked_{name}": value for name, value in read_facts(rows).get("asked", {}).items()}
    return scores | {"redaction_threshold": threshold} | asked
