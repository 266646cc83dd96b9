"""Redact the names of a text: each is replaced by its type, or by its type and a number for each name.

Left out: which words are names (`bertkit.tasks.ner`), and what a threshold redacts of right names
(`bertkit.metrics.ner`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import logsumexp

from bertkit.errors import UsageError
from bertkit.metrics.classification import ThresholdRule
from bertkit.reports.tables import ScoreLine
from bertkit.tasks.option import NUMBERED
from bertkit.tasks.task import CHOSEN_ON_DEV

if TYPE_CHECKING:
    from torch import Tensor

REDACTION_SCORES = {"redaction_recall": "names", "redaction_others": "other words"}  # the shares that are redacted


def redact(content: str | Sequence[str], entities: Sequence[Mapping[str, Any]], form: str) -> dict[str, Any]:
    """Return `redacted`, a text or list of words without its names, and `entities` with the `placeholder` of each.

    The rest stays as it is. Names are the same if type and spelling are, without case; each type counts from 1.

    Args:
        entities: The names in order, with `text`, `type`, `start` and `end`.
        form: One of REDACTIONS.
    """
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    redacted, behind, replaced = content[:0], 0, []
    for entity in entities:
        known = numbers[entity["type"]]
        number = known.setdefault(entity["text"].casefold(), len(known) + 1)
        placeholder = f"[{entity['type']}-{number}]" if form == NUMBERED else f"[{entity['type']}]"
        redacted += content[behind : entity["start"]]
        redacted += placeholder if isinstance(content, str) else [placeholder]
        behind = entity["end"]
        replaced.append({**entity, "placeholder": placeholder})
    return {"redacted": redacted + content[behind:], "entities": replaced}


def tag_likely(shares: Sequence[float], kinds: Sequence[str], threshold: float) -> list[str]:
    """Return tags in IOB2 of the words of a text that are likely enough in a name; neighbours of a type are one name.

    Args:
        shares: The probability of each word of being in a name; negative: it stays.
        kinds: The likeliest type of each word.
    """
    tags, before = [], ""
    for share, kind in zip(shares, kinds, strict=True):
        kind = kind if share >= threshold else ""
        mark = "I" if kind == before else "B"
        tags.append(f"{mark}-{kind}" if kind else "O")
        before = kind
    return tags


def read_recall(threshold: str) -> float:
    """Return the recall that a threshold of redaction is asked for, as `[data]` has it."""
    rule = ThresholdRule.parse(threshold)
    if rule.score != "recall":
        raise UsageError(f"threshold is {threshold!r} in [data]; for names it is a recall, such as recall=0.99")
    return rule.value


def choose_types(logits: "Tensor", names: Sequence[str]) -> "Tensor":
    """Return (B, T) the first label of the likeliest type but O, a type having the probabilities of its labels.

    Args:
        logits: (B, T, L).
        names: The L labels.
    """
    import torch

    labels = group_types(names)
    sums = torch.stack([logits[..., own].logsumexp(-1) for own in labels], dim=-1)  # (B, T, types)
    return torch.tensor([own[0] for own in labels], device=logits.device)[sums.argmax(-1)]


def choose_array_types(logits: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return `choose_types` of an array."""
    labels = group_types(names)
    sums = np.stack([logsumexp(logits[..., own], axis=-1) for own in labels], axis=-1)  # (B, T, types)
    return np.array([own[0] for own in labels])[sums.argmax(-1)]


def group_types(names: Sequence[str]) -> list[list[int]]:
    """Return the labels of each type but O, in the order of the first of them."""
    labels: dict[str, list[int]] = {}
    for label, name in enumerate(names):
        if name != "O":
            labels.setdefault(name[2:], []).append(label)
    return list(labels.values())


def describe_redaction(metrics: Mapping[str, Any]) -> list[str]:
    """Return lines on what a threshold redacts of the scored names and of other words; none without a threshold."""
    if (threshold := metrics.get("redaction_threshold")) is None:
        return []
    shown = []
    for key, what in REDACTION_SCORES.items():
        row = ScoreLine(what, key, unit="fraction")
        limits = row.show_interval(metrics)
        shown.append(f"{row.show(metrics[key])} %{f' ({limits})' if limits else ''} of the {what}")
    lines = [
        f"redaction replaces words with a probability of at least {threshold:.3g} of being in a name: "
        f"{' and '.join(shown)}; it does not guarantee that a text is anonymous"
    ]
    reached = metrics["redaction_recall"]
    is_chosen = "redaction_threshold" in metrics.get(CHOSEN_ON_DEV, "")  # else other rows have chosen
    if is_chosen and (asked := metrics.get("asked_recall", 0.0)) > reached:
        lines.append(f"no threshold redacts {asked:.1%} of the names: the nearest redacts {reached:.1%}")
    return lines
