"""Splits and folds by a hash: what keeps rows together, what moves them, and how large the parts are."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.splits import divide_train, hash_keys, split_fold, split_rows

TEXTS = st.lists(st.text(max_size=4), min_size=1, max_size=40)
SHARES = st.floats(0, 0.49)
MANY = hash_keys(f"row {number}" for number in range(20_000))


def list_splits(places, dev_share=0.2, test_share=0.2):
    rows = split_rows(places, dev_share, test_share)
    found = {number: split for split, numbers in rows.items() for number in numbers.tolist()}
    assert sorted(found) == list(range(len(places))), "each row is in one split"
    assert sum(map(len, rows.values())) == len(places)
    return [found[number] for number in range(len(places))]


@given(TEXTS, TEXTS, SHARES, SHARES)
def test_added_rows_move_no_others(texts, more, dev_share, test_share):
    before = list_splits(hash_keys(texts), dev_share, test_share)
    assert list_splits(hash_keys(texts + more), dev_share, test_share)[: len(texts)] == before


@given(TEXTS, SHARES, SHARES)
def test_equal_texts_are_on_one_side_and_the_order_does_not_matter(texts, dev_share, test_share):
    found = list_splits(hash_keys(texts + texts[::-1]), dev_share, test_share)
    assert found == found[::-1]


@given(TEXTS, st.integers(2, 12))
def test_folds_are_a_partition(texts, folds):
    parts = [split_fold(hash_keys(texts), folds, fold) for fold in range(folds)]
    for part in parts:
        assert sorted([*part["train"], *part["dev"]]) == list(range(len(texts)))
    assert sorted(number for part in parts for number in part["dev"]) == list(range(len(texts)))


@pytest.mark.parametrize(("keys", "group"), [("a" * 1000, ""), ("abb", "writer")])
def test_an_empty_split_is_explained(keys, group, refused):
    options = {"dev_share": 0.0, "test_share": 0.0, "folds": 0, "fold": 0, "group": group}
    with refused():
        divide_train({"train": "t.csv"}, keys, options)


def test_hashes_and_splits_are_fixed_forever():
    """The first 53 bits of BLAKE2b of the text in UTF-8: a later version of bertkit splits a table the same way."""
    digest = hashlib.blake2b("gut, größer".encode(), digest_size=8).digest()
    assert hash_keys(["gut, größer"]).tolist() == [(int.from_bytes(digest, "big") >> 11) / 2**53]
    assert hash_keys(["a", "\ud800"]).tolist() == [0.2537936105758485, 0.2579417374386034]
    assert hash_keys([]).tolist() == []
    sizes = {split: len(rows) for split, rows in split_rows(MANY, 0.1, 0.2).items()}
    assert sizes == {"train": 14005, "dev": 2115, "test": 3880}
    assert split_rows(MANY, 0.0, 0.0).keys() == {"train"}
    assert [len(split_fold(MANY, 5, fold)["dev"]) for fold in range(5)] == [3880, 3900, 4008, 4035, 4177]
