"""Random numbers as a pure function of a key and a counter, for pairs, masks and the order of samples.

They come from a hash and not from a generator. Therefore they do not depend on the composition and order of batches,
the padding or the number of workers; a run resumes anywhere without drawing earlier numbers; and a whole batch is drawn
in one vectorised call. The hash is splitmix64 (Steele, Lea and Flood 2014).
"""

import numpy as np

ROUNDS = 6  # Feistel rounds; four are hard to tell from a random permutation, and two more cost little


def draw_bits(key: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """Return 64 random bits for every (key, counter): output number `counter` of splitmix64 seeded by `key`.

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
    """Draw uniform float64 numbers u in [0, 1) with 53 random bits; int(u * n) is uniform in 0..n-1."""
    return (draw_bits(key, counter) >> np.uint64(11)) * 2.0**-53


def draw_below(key: np.ndarray, counter: np.ndarray | int, bounds: np.ndarray | int) -> np.ndarray:
    """Draw uniform integers in 0..bounds - 1 (0 where the bound is 0)."""
    return (draw_uniform(key, counter) * bounds).astype(np.int64)


def draw_key(*numbers: int | np.ndarray) -> np.ndarray:
    """Return a uint64 key for every combination of integers, at least one-dimensional; arrays are broadcast."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = draw_bits(key, np.asarray(number, np.int64))
    return key


def permute(key: np.ndarray, positions: np.ndarray, counts: np.ndarray | int) -> np.ndarray:
    """Return (B,) int64, the images of `positions` (B,) under random permutations of 0..counts - 1.

    `key` (B,) uint64, or one for all, selects the permutation, which is never stored. It is a Feistel network over the
    smallest nearly square rectangle with at least `counts` cells, applied again to results outside of 0..counts - 1
    until they are inside (Black and Rogaway 2002).
    """
    found = np.array(positions, np.int64)
    key, counts = np.broadcast_to(key, found.shape), np.broadcast_to(counts, found.shape)
    height = np.ceil(np.sqrt(counts)).astype(np.int64)
    width = -(-counts // height)
    outside = np.arange(len(found))
    while outside.size:
        keys, sides = key[outside], (height[outside], width[outside])
        cell = list(np.divmod(found[outside], width[outside]))  # row and column
        for number in range(ROUNDS):
            moved, other = number % 2, 1 - number % 2
            # A separate counter for every number and every round.
            cell[moved] = (cell[moved] + draw_below(keys, ROUNDS * cell[other] + number, sides[moved])) % sides[moved]
        found[outside] = cell[0] * width[outside] + cell[1]
        outside = outside[found[outside] >= counts[outside]]
    return found
