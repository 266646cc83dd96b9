"""Synthetic text for benchmarks without data: the frequency of the n-th word is proportional to 1 / n."""

from string import ascii_lowercase

import numpy as np

TEXT_SEED = 0


def make_words(count: int) -> np.ndarray:
    """Return (count,) different words of 2 to 9 letters, the same in every run."""
    random = np.random.default_rng(TEXT_SEED)
    letters = random.choice(list(ascii_lowercase), (2 * count, 9))
    lengths = random.integers(2, 10, 2 * count)
    words = dict.fromkeys("".join(row[:length]) for row, length in zip(letters, lengths, strict=True))
    return np.array(list(words)[:count])


def draw_words(words: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Draw (count,) of the words, with frequencies as in text."""
    shares = 1 / np.arange(1, len(words) + 1)
    return random.choice(words, count, p=shares / shares.sum())
