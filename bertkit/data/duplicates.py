"""Rows whose texts are equal or nearly equal, within splits and between them.

Texts are compared in lower case, with every run of white space as one space. A row is its texts in order: a swapped
pair is another row. Equal rows are found by 64-bit hashes, so a million different rows have two equal hashes in one of
thirty million data sets. Nearly equal rows share at least NEAR of their different runs of five characters, or of one or
two characters of a script without spaces. MinHash proposes pairs, which are then compared: 95 % of those at this limit
are proposed, and nearly all above 0.9.

Left out: what a row's texts and answer are (`bertkit.tasks.task`), and reports (`bertkit.tasks.equal_rows`).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np

from bertkit.data.scripts import ROWS_A_CHECK, space_characters
from bertkit.errors import explain_missing

NEAR = 0.8  # Jaccard similarity
PIECE = 5  # characters of the runs that near rows share
LONGEST_COMPARED = 20_000  # characters of a row that are compared for nearness
PERMUTATIONS, BANDS = 128, 16  # rows are proposed if they agree in all 8 MinHash values of a band
MOST_TRIES = 4  # comparisons of a row that find nothing, so that texts from a template do not take hours
TRAIN_SPLIT = "train"

Texts = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SplitRepeats:
    """The repeated rows of a split, by their numbers from 0."""

    size: int  # the number of rows
    in_train: np.ndarray  # (N, 2) a row, and the first row of train with equal texts; empty for train
    repeats: np.ndarray  # (N, 2) a row, and the first row of the split with equal texts, which is not a repeat itself
    contradictory: Sequence[np.ndarray]  # the rows of each text that has different answers in the split
    contradicts_train: np.ndarray  # (N, 2) a row, and the first row of train with equal texts and another answer


# --- Equal rows -------------------------------------------------------------------------------------------------------


def fold_texts(texts: Iterable[str]) -> str:
    """Return a row's texts in lower case, white space folded, in one line each."""
    return "\n".join(" ".join(text.lower().split()) for text in texts)


def hash_rows(rows: Iterable[Texts]) -> np.ndarray:
    """Return (S,) uint64, equal for rows with equal texts."""
    digests = (blake2b(fold_texts(texts).encode("utf-8", "surrogatepass"), digest_size=8).digest() for texts in rows)
    return np.frombuffer(b"".join(digests), "<u8")


def encode_answers(answers: Iterable[Hashable], numbers: dict[Hashable, int]) -> np.ndarray:
    """Return (S,) int64, equal for equal answers; `numbers` has those of earlier calls and is extended."""
    return np.fromiter((numbers.setdefault(answer, len(numbers)) for answer in answers), np.int64)


def list_repeats(
    keys: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray | None] | None = None
) -> dict[str, SplitRepeats]:
    """Return the repeated rows of each split.

    Args:
        keys: Split -> the result of `hash_rows`.
        answers: Split -> the result of `encode_answers`; None, or a split left out, without answers.
    """
    import pandas as pd

    tables = {
        split: pd.DataFrame({"key": own, "row": np.arange(len(own)), "answer": (answers or {}).get(split)})
        for split, own in keys.items()
    }
    pair, found = ["row", "row_known"], {}
    for split, table in tables.items():
        known = table[:0] if split == TRAIN_SPLIT else tables.get(TRAIN_SPLIT, table[:0])
        groups = table.groupby("key", sort=False)
        repeats = table.assign(row_known=groups["row"].transform("first")).query("row != row_known")
        contradictory = table[groups["answer"].transform("nunique") > 1].groupby("key", sort=False)["row"]
        two = known.drop_duplicates(["key", "answer"]).groupby("key").head(2)  # one of them is another answer
        leaks = table.merge(two, on="key", suffixes=("", "_known")).sort_values(pair)
        contradicts = leaks.dropna().query("answer != answer_known")
        in_train, contradicts = (one.drop_duplicates("row")[pair].to_numpy() for one in (leaks, contradicts))
        same = [rows.to_numpy() for _, rows in contradictory]
        found[split] = SplitRepeats(len(table), in_train, repeats[pair].to_numpy(), same, contradicts)
    return found


# --- Nearly equal rows ------------------------------------------------------------------------------------------------


def pad_row(texts: Texts) -> str:
    """Return the folded and spaced texts of a row, or the beginning of long ones, of PIECE characters at least."""
    return space_characters(fold_texts(texts)[:LONGEST_COMPARED]).ljust(PIECE)


def hash_bands(rows: Iterable[Texts]) -> np.ndarray:
    """Return (S, BANDS) uint64: nearly equal rows probably agree in one band."""
    with explain_missing("nearly equal rows need rensa", "doctor"):
        from rensa import RMinHash

    # Odd multipliers mix the values of a band; equal results of different values only cost a comparison.
    mixers = np.random.default_rng(0).integers(1 << 63, size=PERMUTATIONS // BANDS, dtype=np.uint64) | np.uint64(1)
    folded, found = map(pad_row, rows), []
    while batch := list(islice(folded, ROWS_A_CHECK)):
        pieces, offsets = _hash_pieces(batch)
        digests = RMinHash.digest_matrix_from_flat_token_hashes(pieces, offsets, PERMUTATIONS, 0).to_rows()
        values = np.array(digests, np.uint64).reshape(len(batch), BANDS, -1)  # (S, BANDS, 8)
        found.append((values * mixers).sum(axis=2, dtype=np.uint64))  # (S, BANDS)
    return np.concatenate(found) if found else np.empty((0, BANDS), np.uint64)


def _hash_pieces(rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the pieces of some rows (P,) uint64, and the offsets (S + 1,) between the rows."""
    lengths = np.array(list(map(len, rows)))
    characters = np.frombuffer("".join(rows).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    hashes = np.zeros(len(characters) - PIECE + 1, np.uint64)
    for start in range(PIECE):
        hashes = hashes * np.uint64(0x100000001B3) + characters[start : start + len(hashes)]
    hashes ^= hashes >> np.uint64(29)  # mixed, because MinHash takes uniform hashes
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    ends = np.cumsum(lengths)
    is_inside = np.ones(len(characters), bool)
    for start in range(1, PIECE):
        is_inside[ends - start] = False  # pieces that reach into the next row
    return hashes[is_inside[: len(hashes)]], np.concatenate([[0], np.cumsum(lengths - PIECE + 1)])


def is_near(*rows: str) -> bool:
    """Return whether two padded rows are nearly equal."""
    one, other = ({row[start : start + PIECE] for start in range(len(row) - PIECE + 1)} for row in rows)
    return len(one & other) >= NEAR * len(one | other)


def list_near_repeats(
    keys: Mapping[str, np.ndarray],
    bands: Mapping[str, np.ndarray],
    read: Callable[[str, np.ndarray], Iterable[Texts]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the rows of each split that nearly equal a row of train or an earlier row, but equal none.

    A row is compared with the first row of train and of its split, and with the row before it, among those that agree
    with it in a band. Therefore the time is proportional to the number of rows.

    Args:
        keys: Split -> the result of `hash_rows`, train first.
        bands: Split -> the result of `hash_bands`.
        read: Returns some rows of a split by their numbers.

    Returns:
        (N, 2) rows of a split, each with a similar row of train, and (N, 2) rows with a similar row before them.
    """
    splits = list(keys)
    rows = [np.sort(np.unique(own, return_index=True)[1]) for own in keys.values()]  # the first row of each key
    owners = np.repeat(np.arange(len(splits)), list(map(len, rows)))  # (M,)
    numbers = np.concatenate(rows)
    partners = np.full((2, len(numbers)), -1)  # the partner in train, and the one in the own split
    tries = np.zeros((2, len(numbers)), np.uint8)
    train = keys.get(TRAIN_SPLIT, np.empty(0, np.uint64))
    is_known = [np.isin(keys[split][own], train) for split, own in zip(splits, rows, strict=True)]
    tries[0, np.concatenate(is_known)] = MOST_TRIES  # a row of train, or one equal to it, has no partner to find

    def compare(kind: int, ours: np.ndarray, others: np.ndarray) -> None:
        is_open = (partners[kind, ours] < 0) & (tries[kind, ours] < MOST_TRIES)
        ours, others = ours[is_open], others[is_open]
        for start in range(0, len(ours), ROWS_A_CHECK):
            pair = ours[start : start + ROWS_A_CHECK], others[start : start + ROWS_A_CHECK]
            found = np.fromiter(map(is_near, *(fetch(side) for side in pair)), bool)
            partners[kind, pair[0][found]] = pair[1][found]
            tries[kind, pair[0][~found]] += 1

    def fetch(indices: np.ndarray) -> list[str]:
        texts = np.empty(len(indices), object)
        for owner in np.unique(owners[indices]).tolist():
            chosen = owners[indices] == owner
            texts[chosen] = list(map(pad_row, read(splits[owner], numbers[indices[chosen]])))
        return texts.tolist()

    for band in range(BANDS):
        values = np.concatenate([bands[split][own, band] for split, own in zip(splits, rows, strict=True)])
        order = np.argsort(values, kind="stable")  # rows of train come first
        is_new = np.diff(values[order], prepend=~values[order[:1]]) != 0
        is_first = is_new | (np.diff(owners[order], prepend=-1) != 0)
        indices = np.arange(len(order))
        first, own = (order[np.maximum.accumulate(np.where(starts, indices, 0))] for starts in (is_new, is_first))
        leaks = (owners[order] > 0) & (owners[first] == 0)
        compare(0, order[leaks], first[leaks])
        compare(1, order[~is_first], own[~is_first])
        compare(1, order[1:][~is_first[1:]], order[:-1][~is_first[1:]])
    found = {}
    for owner, split in enumerate(splits):
        pairs = []
        for kind in (0, 1):
            indices = np.flatnonzero((owners == owner) & (partners[kind] >= 0))
            pairs.append(np.stack([numbers[indices], numbers[partners[kind, indices]]], axis=1))
        found[split] = tuple(pairs)
    return found
