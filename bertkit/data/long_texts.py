"""Texts longer than a sequence: truncated, their head and tail, or windows whose scores are combined.

With "truncate" and "head+tail" a text or pair is one sequence (`bertkit.data.sequences`); with "mean" and "max" it is
one for each window, and the classifier's scores are the mean or the maximum over the windows. Left out: what the model
does (`BertForSequenceClassification`), and windows of answers and tags (`bertkit.data.spans`, `bertkit.data.tagging`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bertkit.data.sequences import Cut, Groups, Pieces, Sequences, cut_longest, encode_inputs, truncate
from bertkit.data.spans import cut_windows

HEAD_TAIL = "head+tail"
POOLED = {"mean": np.add, "max": np.maximum}  # what combines the scores of windows
LONG = ("truncate", HEAD_TAIL, *POOLED)


def encode_long(
    inputs: Sequence[str | tuple[str, str]],
    labels: np.ndarray | None,
    tokenizer: Any,
    max_length: int,
    long: str,
    doc_stride: int,
) -> Sequences | Groups:
    """Encode S texts and pairs; `long` is one of LONG and says how those longer than `max_length` tokens are read.

    Args:
        doc_stride: The step between the starts of two windows, in tokens.
    """
    cut = choose_cut(long, doc_stride)
    if long in POOLED:
        sequences = encode_inputs(inputs, None, tokenizer, max_length, cut)
        return Groups(sequences, labels, sequences.counts)
    return encode_inputs(inputs, labels, tokenizer, max_length, cut)


def choose_cut(long: str, doc_stride: int) -> Cut:
    """Return the function that makes one of LONG's sequences of an input; see `encode_inputs`."""
    if long in POOLED:
        return partial(cut_into_windows, step=doc_stride)
    return keep_head_and_tail if long == HEAD_TAIL else truncate


def keep_head_and_tail(texts: Pieces, room: int) -> tuple[list[Pieces], bool]:
    """Return the start and the end of a text or two, and whether tokens between them were left out.

    A text keeps as many tokens as with "truncate", the first quarter from its start, the others from its end: 128 and
    382 of 510 (Sun et al. 2019, "How to Fine-Tune BERT for Text Classification").
    """
    lengths = list(map(len, texts))
    kept = cut_longest(lengths, room)
    heads = [-(-count // 4) for count in kept]
    parts = [
        np.concatenate([text[:head], text[len(text) - count + head :]]) if count < len(text) else text
        for text, count, head in zip(texts, kept, heads, strict=True)
    ]
    return [parts], kept != lengths


def cut_into_windows(texts: Pieces, room: int, step: int) -> tuple[list[Pieces], bool]:
    """Return the windows of a text or a pair that is too long, and whether tokens are in none.

    The longer text of a pair, the first if both are equally long, is divided. Each window repeats the other, of which
    at most half of the room is kept.

    Example:
        Two texts of 5 and 2 tokens in a room of 5, in steps of 2: the windows have the tokens 0 to 2 and 2 to 4 of the
        first text, and both of the second.
    """
    lengths = list(map(len, texts))
    if sum(lengths) <= room:
        return [texts], False
    longer = lengths.index(max(lengths))
    others = [text[: room // 2] for number, text in enumerate(texts) if number != longer]
    windows = cut_windows(lengths[longer], room - sum(map(len, others)), step)
    parts = [texts[longer][start : start + count] for start, count in windows]
    is_shortened = sum(map(len, others)) + lengths[longer] < sum(lengths)
    return [[*others[:longer], part, *others[longer:]] for part in parts], is_shortened


def pool_windows(scores: np.ndarray, counts: np.ndarray, pooling: str) -> np.ndarray:
    """Return the scores (E, L) of texts from those of all their windows, side by side.

    Args:
        counts: (E,) the number of windows of each text.
        pooling: "mean" or "max".
    """
    found = POOLED[pooling].reduceat(scores, np.cumsum(counts) - counts)  # (E, L)
    return found / counts[:, None].astype(found.dtype) if pooling == "mean" else found


def join_windows(scores: Sequence[np.ndarray], counts: np.ndarray, pooling: str) -> np.ndarray:
    """Return `pool_windows` of the scores (L,) of each window."""
    return pool_windows(np.stack(scores), counts, pooling)
