"""Splits and folds by a hash of each row's text, and the share of each label in them.

New rows do not change the split of the old ones, and rows with equal texts are always in the same split. Left out: what
is hashed.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from bertkit.errors import UsageError, list_some, raise_first

UNLABELLED = "unlabelled"  # a test split without labels
DROP = "drop"  # a value of the option `unlabelled`: rows without a label are left out
LEAVE_OUT = f"--set data.unlabelled={DROP}"  # for messages
MOST_SHOWN = 20  # labels whose shares are shown
MOST_ERRORS = 3.0  # standard errors between the shares of a label in two splits, before a warning


class EmptySplitError(UsageError):
    """Train has too few different texts or groups to be divided."""


def name_split(split: str) -> str:
    """Return the name of a split in files of predictions."""
    return "test" if split == UNLABELLED else split


def check_split_options(options: Mapping[str, Any]) -> None:
    """Check that shares and folds fit together, and what is done with rows without a label."""
    folds, fold = options["folds"], options["fold"]
    unlabelled = options.get(UNLABELLED, DROP)
    troubles = {
        "dev_share and test_share leave no rows to train on; lower them": (
            options["dev_share"] + options["test_share"] >= 1
        ),
        f"fold {fold} of {folds} folds; give at least 2 folds, and a fold below them": (
            folds == 1 or not 0 <= fold < max(folds, 1)
        ),
        "tune_share leaves rows of each fold without a prediction; leave out tune_share or folds": (
            folds and options["tune_share"]
        ),
        f"unknown unlabelled {unlabelled!r} in [data]; expected error or {DROP}": unlabelled not in ("error", DROP),
    }
    raise_first(troubles)


def divide_train(
    given: Mapping[str, str], keys: Iterable[str], options: Mapping[str, Any], unit: str = "row"
) -> dict[str, np.ndarray]:
    """Return the training rows of each split that is taken from train: train, dev, and test if train is given alone.

    Nothing is taken from train, and the result is empty, if dev is given or `dev_share` is None.

    Args:
        given: Split -> source of the given splits, train among them.
        keys: The text or group of each training row, which decides its split.
        options: `dev_share`, `test_share`, `folds`, `fold` and `group`.
        unit: The name of a row, for messages.

    Raises:
        EmptySplitError: Train or dev is empty.
    """
    folds, fold = options["folds"], options["fold"]
    if folds and "dev" in given:
        raise UsageError(f"folds take dev from train, but {given['dev']} is given; leave out one of them")
    if "dev" in given or options["dev_share"] is None:
        return {}
    hashes = hash_keys(keys)
    if folds:
        rows = split_fold(hashes, folds, fold)
    else:
        rows = split_rows(hashes, options["dev_share"], 0.0 if "test" in given else options["test_share"])
    if empty := [split for split in ("train", "dev") if not len(rows.get(split, ()))]:
        remedy = f"fewer folds than {folds}" if folds else f"another share or a file for {empty[0]}"
        different = f"different {'groups' if options['group'] else 'texts'}: {len(np.unique(hashes)):,}"
        raise EmptySplitError(
            f"{given['train']} has {len(hashes):,} {unit}s ({different}) and none for {empty[0]}; give more {unit}s, "
            f"{remedy}"
        )
    return {split: numbers for split, numbers in rows.items() if len(numbers)}


def hash_keys(keys: Iterable[str]) -> np.ndarray:
    """Return (S,) float64 in [0, 1), equal for equal keys and uniform over different ones."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in keys)
    numbers = np.fromiter((int.from_bytes(digest) >> 11 for digest in digests), np.int64)
    return numbers / 2.0**53  # 53 bits: no sum is rounded to 1


def split_rows(hashes: np.ndarray, dev_share: float, test_share: float) -> dict[str, np.ndarray]:
    """Return the rows of train, dev and test, from `hash_keys`; a share of 0 leaves its split out."""
    is_test = hashes < test_share
    is_dev = ~is_test & (hashes >= 1 - dev_share)
    rows = (
        {"train": ~is_test & ~is_dev}
        | ({"dev": is_dev} if dev_share else {})
        | ({"test": is_test} if test_share else {})
    )
    return {split: np.flatnonzero(is_in) for split, is_in in rows.items()}


def split_fold(hashes: np.ndarray, folds: int, fold: int) -> dict[str, np.ndarray]:
    """Return the rows of train and dev of a fold, from 0; each row is in dev of exactly one fold."""
    is_dev = (hashes * folds).astype(int) == fold
    return {"train": np.flatnonzero(~is_dev), "dev": np.flatnonzero(is_dev)}


# --- Shares of labels -------------------------------------------------------------------------------------------------


def describe_shares(counts: Mapping[str, np.ndarray], sizes: Mapping[str, int], names: Sequence[str]) -> list[str]:
    """Return a line with the share of each label in train, and a warning for each other split where some differ.

    A share differs if it is more than three standard errors away from that of train.

    Args:
        counts: Split -> (L,) the rows with each label.
        sizes: Split -> the number of rows.
    """
    lines = []
    for split, found in counts.items():
        shares = found / sizes[split]
        pooled = (counts["train"] + found) / (sizes["train"] + sizes[split])
        errors = np.sqrt(pooled * (1 - pooled) * (1 / sizes["train"] + 1 / sizes[split]))
        is_odd = abs(counts["train"] / sizes["train"] - shares) > MOST_ERRORS * errors
        is_shown = is_odd | (split == "train")
        shown = [f"{name} {share:.1%}" for name, share in compress(zip(names, shares, strict=True), is_shown)]
        head = f"  {split}"
        if split != "train":
            head = f"warning: shares in {split} that differ from those in train by more than three standard errors"
        if shown:
            lines.append(f"{head}: {list_some(shown, MOST_SHOWN)}")
    return lines
