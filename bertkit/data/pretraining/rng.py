"""Random numbers as a pure function of a key and a counter: those of pairs, masks and the order of samples.

They come from a hash and not from a generator, so the composition and order of batches, the padding and the number of
workers change nothing, a run resumes anywhere without drawing what came before, and a whole batch is drawn at once. The
hash is splitmix64 (Steele, Lea and Flood 2014).
"""

import numpy as np

ROUNDS = 6  # of the Feistel network; four make it hard to tell from a random permutation, and two more cost little


def draw_bits(key: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """64 random bits for every (key, counter): output number `counter` of splitmix64 seeded by `key`.

    `key` is a uint64 array; counters are not negative. The two are broadcast to at least one dimension.
    """
    bits = (np.atleast_1d(counter).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def draw_uniform(key: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """Uniform float64 numbers in [0, 1) with 53 random bits; `(u * n)` cut to an integer is uniform in 0..n-1."""
    return (draw_bits(key, counter) >> np.uint64(11)) * 2.0**-53


def draw_below(key: np.ndarray, counter: np.ndarray | int, bounds: np.ndarray | int) -> np.ndarray:
    """Uniform integers in 0..bounds - 1 (0 where the bound is 0)."""
    return (draw_uniform(key, counter) * bounds).astype(np.int64)


def draw_key(*numbers: int | np.ndarray) -> np.ndarray:
    """A uint64 key, at least one-dimensional, for every combination of integers; integer arrays are broadcast."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = draw_bits(key, np.asarray(number, np.int64))
    return key


def permute(key: np.ndarray, places: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    """(B,) int64, where random permutations of 0..counts - 1 send `places` (B,); they are never written down.

    `key` (B,) uint64, or one for all, chooses the permutation: a Feistel network over the least rectangle of nearly
    square shape with `counts` cells, walked on from what falls outside until it falls inside (Black and Rogaway 2002).
    """
    found = np.array(places, np.int64)
    key, counts = np.broadcast_to(key, found.shape), np.broadcast_to(counts, found.shape)
    height = np.ceil(np.sqrt(counts)).astype(np.int64)
    width = -(-counts // height)
    outside = np.arange(len(found))
    while outside.size:
        keys, sides = key[outside], (height[outside], width[outside])
        cell = list(np.divmod(found[outside], width[outside]))  # row and column
        for number in range(ROUNDS):
            moved, other = number % 2, 1 - number % 2
            # A counter of its own for every number and every round.
            cell[moved] = (cell[moved] + draw_below(keys, ROUNDS * cell[other] + number, sides[moved])) % sides[moved]
        found[outside] = cell[0] * width[outside] + cell[1]
        outside = outside[found[outside] >= counts[outside]]
    return found
