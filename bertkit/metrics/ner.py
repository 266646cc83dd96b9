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
from bertkit.metrics.rows import WeightedScore, measure_counts, take_values
from bertkit.metrics.table import read_facts, read_numbers

Entity = tuple[int, int, str]  # first word, end, type
COUNTS = ("right", "found", "wanted")  # entities that are predicted and correct, predicted, and correct


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
