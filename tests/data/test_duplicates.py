"""Equal and nearly equal rows, against brute force over small data."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.duplicates import (
    NEAR,
    PIECE,
    encode_answers,
    fold_texts,
    hash_bands,
    hash_rows,
    is_near,
    list_near_repeats,
    list_repeats,
    pad_row,
)

TEXTS = st.sampled_from(["a b", "A  b", "a\tb\n", "ab", "", " ", "ß", "ẞ", "a\0b", "猫"])
ROWS = st.lists(st.tuples(st.tuples(TEXTS, TEXTS), st.integers(0, 2)), max_size=12)


@given(train=ROWS, dev=ROWS)
def test_repeats_are_those_of_brute_force(train, dev):
    splits = {"train": train, "dev": dev}
    folded = {split: [(fold_texts(texts), answer) for texts, answer in rows] for split, rows in splits.items()}
    keys = {split: hash_rows(texts for texts, _ in rows) for split, rows in splits.items()}
    numbers = {}
    answers = {split: encode_answers((one for _, one in rows), numbers) for split, rows in splits.items()}
    found = list_repeats(keys, answers)
    for split, rows in folded.items():
        texts = [text for text, _ in rows]
        repeats = [(row, texts.index(text)) for row, text in enumerate(texts) if text in texts[:row]]
        assert found[split].repeats.tolist() == [list(pair) for pair in repeats]
        groups = {}
        for row, (text, answer) in enumerate(rows):
            groups.setdefault(text, []).append((row, answer))
        expected = [[row for row, _ in group] for group in groups.values() if len({one for _, one in group}) > 1]
        assert [group.tolist() for group in found[split].contradictory] == expected
    known = [text for text, _ in folded["train"]]
    leaks = [[row, known.index(text)] for row, (text, _) in enumerate(folded["dev"]) if text in known]
    assert found["dev"].in_train.tolist() == leaks
    others = []
    for row, one in enumerate(folded["dev"]):
        places = [place for place, other in enumerate(folded["train"]) if other[0] == one[0] and other[1] != one[1]]
        others += [[row, places[0]]] if places else []
    assert found["dev"].contradicts_train.tolist() == others
    assert not len(found["train"].in_train)


def test_texts_are_compared_without_case_and_white_space_but_in_order_and_with_their_border():
    one, same, *others = hash_rows(
        [("The  cat\n", "sat"), ("the cat", " SAT"), ("sat", "the cat"), ("the", "cat sat"), ("the cat sat", "")]
    )
    assert one == same
    assert len({one, *others}) == 4


def test_splits_without_answers_have_leaks_but_no_contradictions():
    keys = {"train": hash_rows([("a",), ("b",)]), "test": hash_rows([("b",), ("c",)])}
    found = list_repeats(keys, {"train": np.array([0, 1])})
    assert found["test"].in_train.tolist() == [[0, 1]]
    assert not len(found["test"].contradictory)


def change_words(rng, text, words):
    """Return the text with another word at a random place."""
    parts = text.split()
    parts[rng.integers(len(parts))] = words[rng.integers(len(words))]
    return " ".join(parts)


def make_near_rows():
    """Return train and dev of random sentences, some of which differ from others in a word."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), size)) for size in rng.integers(2, 9, 500)]
    train = [" ".join(rng.choice(words, size)) for size in rng.integers(8, 25, 150)]
    dev = [change_words(rng, text, words) for text in train[:60]] + [" ".join(rng.choice(words, 12)) for _ in range(20)]
    train += [change_words(rng, text, words) for text in train[100:150]] + [train[0].upper()]
    return {"train": [(text,) for text in train], "dev": [*((text,) for text in dev), (train[5],)]}


def find_all(splits):
    keys = {split: hash_rows(rows) for split, rows in splits.items()}
    bands = {split: hash_bands(rows) for split, rows in splits.items()}
    return list_near_repeats(keys, bands, lambda split, numbers: [splits[split][number] for number in numbers])


def list_pieces(row):
    return {row[start : start + PIECE] for start in range(len(row) - PIECE + 1)}


def compare_by_force(splits, split, other):
    """Return the rows of a split that nearly equal an (earlier) row of another, but equal none."""
    rows, others = ([pad_row(row) for row in splits[name]] for name in (split, other))
    pieces, found = [list_pieces(row) for row in others], set()
    for number, row in enumerate(rows):
        before = range(number if split == other else len(others))
        if row in [others[place] for place in before]:
            continue
        own = list_pieces(row)
        if any(len(own & pieces[place]) >= NEAR * len(own | pieces[place]) for place in before):
            found.add(number)
    return found


def test_near_rows_are_those_of_brute_force_except_a_few_at_the_limit():
    splits = make_near_rows()
    found = find_all(splits)
    leaks, repeats = found["dev"][0], found["train"][1]
    for ours, expected in (
        (leaks, compare_by_force(splits, "dev", "train")),
        (repeats, compare_by_force(splits, "train", "train")),
    ):
        numbers = set(ours[:, 0].tolist())
        assert numbers <= expected
        assert len(numbers) >= 0.9 * len(expected) > 20
    for row, partner in leaks.tolist():
        assert is_near(pad_row(splits["dev"][row]), pad_row(splits["train"][partner]))


def test_short_empty_and_huge_rows_have_no_near_rows_unless_they_share_pieces():
    rows = [("",), ("a",), ("ab",), ("\0",), ("x" * 1_000_000,), ("xyz " * 300_000,), ("xyz " * 300_001,)]
    found = find_all({"train": rows})
    assert found["train"][1].tolist() == [[6, 5]]


def test_one_character_of_many_is_a_small_change_in_a_script_without_spaces():
    long, short = "这家酒店离车站很近，房间也很干净，下次还会来住", "服务态度很好"
    rows = [(text,) for text in (long, long.replace("近", "远"), short, short.replace("好", "差"), long[::-1])]
    found = find_all({"train": rows})
    assert found["train"][1].tolist() == [[1, 0]]
    assert compare_by_force({"train": rows}, "train", "train") == {1}


def test_a_template_costs_a_few_comparisons_for_each_row():
    rows = [(f"please find the invoice number {number:06} of this month in the attachment",) for number in range(3000)]
    calls = []

    def read(split, numbers):
        calls.append(len(numbers))
        return [rows[number] for number in numbers]

    list_near_repeats({"train": hash_rows(rows)}, {"train": hash_bands(rows)}, read)
    assert sum(calls) < 2 * 8 * len(rows)
