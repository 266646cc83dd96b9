"""Text of made-up words, for benches without data: the n-th word is as frequent as 1 / n."""

from string import ascii_lowercase

import numpy as np

TEXT_SEED = 0


def make_words(count: int) -> np.ndarray:
    """(count,) different words of 2 to 9 letters, the same in every run."""
    random = np.random.default_rng(TEXT_SEED)
    letters = random.choice(list(ascii_lowercase), (2 * count, 9))
    lengths = random.integers(2, 10, 2 * count)
    words = dict.fromkeys("".join(row[:length]) for row, length in zip(letters, lengths, strict=True))
    return np.array(list(words)[:count])


def draw_words(words: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """(count,) of the words, as text has them."""
    shares = 1 / np.arange(1, len(words) + 1)
    return random.choice(words, count, p=shares / shares.sum())
