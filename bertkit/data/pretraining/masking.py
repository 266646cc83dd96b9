"""The choice and replacement of masked positions (paper §3.1 and A.1).

The masks of a sample are a pure function of (seed, epoch, sample number): see `bertkit.data.pretraining.rng`.

Left out: the static masks of the reference code (its ten copies of the data keep theirs for the whole run).
"""

from collections.abc import Sequence

import numpy as np

from bertkit.data.pretraining.rng import draw_below, draw_bits, draw_key, draw_uniform
from bertkit.data.sequences import IGNORED
from bertkit.errors import UsageError

# Streams of random numbers. The counters of one sample are position + stream * MASK_STREAM.
ORDER, REPLACEMENT, RANDOM_TOKEN = range(3)
MASK_STREAM = 1 << 32
POSITION_BITS = np.uint64(24)  # a row has at most 2 ** 24 tokens


def mask_tokens(
    input_ids: np.ndarray,
    lengths: np.ndarray,
    *,
    seed: int,
    epoch: int | np.ndarray,
    index: np.ndarray,
    special_ids: Sequence[int],
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    mask_rate: float = 0.8,
    random_rate: float = 0.1,
    same_rate: float = 0.1,
    continues: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask a batch and return the model's input ids and the labels, both (B, T) int64.

    Exactly max(1, round(probability * length)) positions of a row are chosen, with [CLS] and [SEP] counted in its
    length, or all candidates if there are fewer. The reference code's max_predictions_per_seq (20 for 128 tokens, 77
    for 512) is left out, as no row reaches it. Labels are -100 except at the chosen positions.
    `mask_rate` of them become [MASK], `random_rate` a token drawn from the whole vocabulary, special tokens included,
    and `same_rate` stay unchanged (80, 10 and 10 % in §3.1; Table 8 tries others).

    The paper's example, "my dog is hairy", has 6 tokens with [CLS] and [SEP], so max(1, round(0.9)) = 1 is chosen, any
    of the four words with equal chance. If it is hairy, the model sees "my dog is [MASK]" 80 % of the time, a random
    word as in "my dog is apple" 10 %, and "my dog is hairy" 10 %; the label is hairy each time.

    Args:
        input_ids: (B, T) tokens, then padding.
        lengths: (B,) tokens in each row.
        epoch: One number, or (B,) for a batch in which one epoch ends and the next begins.
        index: (B,) the sample numbers.
        special_ids: [CLS] and [SEP], which are never chosen.
        continues: (B, T) bool, true for the pieces that continue a word. If given, whole words are chosen: a token and
            the pieces after it. As in the reference code, a piece belongs to the candidate before it even across a
            [SEP], a word that would exceed the count is skipped, so that fewer may be chosen, and every piece draws its
            own replacement.
    """
    input_ids = np.asarray(input_ids, np.int64)
    lengths = np.asarray(lengths)
    positions = np.arange(input_ids.shape[1])  # (T,)
    candidates = positions < lengths[:, None]  # (B, T)
    for special_id in special_ids:
        candidates &= input_ids != special_id
    counts = np.maximum(1, np.rint(probability * lengths)).astype(np.int64)  # (B,), half to even as Python's round

    keys = draw_key(seed, epoch, index)  # (B,)
    order = draw_bits(keys[:, None], positions + ORDER * MASK_STREAM)  # (B, T)
    # The position in the lowest bits makes the numbers of a row distinct, so that sorting gives the exact count.
    order = (order >> POSITION_BITS << POSITION_BITS) | positions.astype(np.uint64)
    if continues is None:
        chosen = choose_pieces(order, candidates, counts)  # (B, T)
    else:
        chosen = choose_words(order, candidates, counts, continues)  # (B, T)

    rows, columns = np.nonzero(chosen)
    originals = input_ids[rows, columns]
    replacement = draw_uniform(keys[rows], columns + REPLACEMENT * MASK_STREAM)
    random_tokens = draw_below(keys[rows], columns + RANDOM_TOKEN * MASK_STREAM, vocab_size)
    kept_or_random = np.where(replacement >= 1 - same_rate, originals, random_tokens)
    masked_ids = input_ids.copy()
    masked_ids[rows, columns] = np.where(replacement < mask_rate, mask_id, kept_or_random)
    return masked_ids, np.where(chosen, input_ids, IGNORED)


def check_rates(probability: float, mask_rate: float, random_rate: float, same_rate: float) -> None:
    """Check that `mask_tokens` can use these rates."""
    rates = (mask_rate, random_rate, same_rate)
    if not 0 < probability <= 1 or min(rates) < 0 or not abs(sum(rates) - 1) <= 1e-6:
        raise UsageError(
            f"the masking probability is {probability} and the mask, random and same rates are {mask_rate}, "
            f"{random_rate} and {same_rate}; the first must be above 0 and at most 1, the others must not be negative "
            "and must sum to 1 (the paper's are 0.15, 0.8, 0.1 and 0.1)"
        )


def choose_pieces(order: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Choose in each row the `counts` (B,) candidates that come first in the random `order` (B, T) uint64.

    The numbers of a row are distinct, and `counts` is at least 1.

    Returns:
        (B, T) bool.
    """
    ranks = np.sort(np.where(candidates, order, np.iinfo(np.uint64).max), axis=1)
    last = np.minimum(counts, candidates.sum(axis=1)).clip(1) - 1
    return candidates & (order <= np.take_along_axis(ranks, last[:, None], axis=1))


def choose_words(order: np.ndarray, candidates: np.ndarray, counts: np.ndarray, continues: np.ndarray) -> np.ndarray:
    """Choose whole words in the random order of their first tokens, skipping those that would exceed `counts`.

    Args:
        continues: (B, T) true for a token that belongs to the word of the candidate before it.

    Returns:
        (B, T) bool.
    """
    batch, length = order.shape
    first = candidates & (np.cumsum(candidates, axis=1) == 1)
    starts = first | (candidates & ~continues)  # (B, T), first tokens of words
    word = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)  # (B, T), start of the token's word
    flat = (word + length * np.arange(batch)[:, None])[candidates]
    sizes = np.bincount(flat, minlength=batch * length).reshape(batch, length)

    sizes = np.where(starts, sizes, length + 1)  # only the first token of a word can be drawn
    turns = np.argsort(np.where(starts, order, np.iinfo(np.uint64).max), axis=1)
    taken = np.zeros((batch, length), bool)
    rows, room = np.arange(batch), counts.copy()
    for turn in turns.T[: starts.sum(axis=1).max(initial=0)]:
        size = sizes[rows, turn]
        fits = size <= room
        taken[rows, turn] = fits
        room -= size * fits
        if not room.any():
            break
    return np.take_along_axis(taken, word, axis=1) & candidates
