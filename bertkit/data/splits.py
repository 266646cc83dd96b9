"""Splits and folds by a hash of each row's text.

Added rows move no others, and rows with equal texts are always in the same split. Left out: which column is hashed.
"""

import hashlib
from collections.abc import Iterable

import numpy as np


def hash_keys(keys: Iterable[str]) -> np.ndarray:
    """Return (S,) float64 in [0, 1), equal for equal keys and uniform over different ones."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in keys)
    numbers = np.fromiter((int.from_bytes(digest) >> 11 for digest in digests), np.int64)
    return numbers / 2.0**53  # 53 bits: no sum is rounded to 1


def split_rows(places: np.ndarray, dev_share: float, test_share: float) -> dict[str, np.ndarray]:
    """Return the rows of train, dev and test, from `hash_keys`; a share of 0 leaves its split out."""
    is_test = places < test_share
    is_dev = ~is_test & (places >= 1 - dev_share)
    rows = (
        {"train": ~is_test & ~is_dev}
        | ({"dev": is_dev} if dev_share else {})
        | ({"test": is_test} if test_share else {})
    )
    return {split: np.flatnonzero(is_in) for split, is_in in rows.items()}


def split_fold(places: np.ndarray, folds: int, fold: int) -> dict[str, np.ndarray]:
    """Return the rows of train and dev of a fold, from 0; each row is in dev of exactly one fold."""
    is_dev = (places * folds).astype(int) == fold
    return {"train": np.flatnonzero(~is_dev), "dev": np.flatnonzero(is_dev)}
