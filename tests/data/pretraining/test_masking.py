"""Masks: exact counts, rates, purity, quality of the hash, whole words against a naive reading of the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.pretraining.masking import check_rates, mask_tokens
from bertkit.data.pretraining.rng import draw_bits, draw_key
from tests.data.conftest import is_uniform, within

PAD, CLS, SEP, MASK = range(4)
VOCAB = 1000
PIECES = np.arange(VOCAB) >= 700  # ids from 700 on are ## pieces


def batch_of(lengths: list[int] | np.ndarray, width: int | None = None, seed: int = 0) -> np.ndarray:
    """Return padded rows (B, T), [CLS] A [SEP] B [SEP], of random words with `lengths` tokens in total."""
    lengths = np.asarray(lengths)
    columns = np.arange(lengths.max() if width is None else width)
    ids = np.random.default_rng(seed).integers(4, VOCAB, (len(lengths), len(columns)))
    ids[:, 0] = CLS
    for separator in (lengths // 2, lengths - 1):
        ids[np.arange(len(lengths)), separator] = SEP
    return np.where(columns < lengths[:, None], ids, PAD)


def mask(input_ids: np.ndarray, lengths: list[int] | np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    defaults = {"seed": 0, "epoch": 0, "index": np.arange(len(input_ids))}
    defaults |= {"special_ids": (CLS, SEP), "mask_id": MASK, "vocab_size": VOCAB}
    return mask_tokens(input_ids, np.asarray(lengths), **defaults | options)


@given(st.lists(st.integers(3, 512), min_size=1, max_size=8), st.just(0.15) | st.floats(0.001, 1))
def test_counts_are_exact_for_every_length(lengths, probability):
    _, labels = mask(batch_of(lengths), lengths, probability=probability)
    expected = [min(max(1, round(probability * length)), max(0, length - 3)) for length in lengths]
    assert (labels != -100).sum(axis=1).tolist() == expected


def test_labels_are_the_original_ids_and_nothing_else_changes():
    lengths = np.random.default_rng(1).integers(5, 129, 200)
    ids = batch_of(lengths)
    before = ids.copy()
    masked, labels = mask(ids, lengths)
    chosen = labels != -100
    np.testing.assert_array_equal(ids, before)
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    np.testing.assert_array_equal(masked[~chosen], ids[~chosen])
    assert not np.isin(ids[chosen], [PAD, CLS, SEP]).any()
    assert masked.dtype == labels.dtype == np.int64


def test_the_papers_example():
    """In "my dog is hairy" each word is chosen one time in four; hairy becomes [MASK] 80 %, any word or itself 10 %."""
    samples, hairy = 40_000, 7
    ids = np.tile([CLS, 4, 5, 6, hairy, SEP], (samples, 1))
    masked, labels = mask(ids, np.full(samples, 6))
    chosen = labels != -100
    assert np.all(chosen.sum(axis=1) == 1)
    assert is_uniform(chosen.sum(axis=0)[1:5])
    seen = masked[chosen[:, 4], 4]
    n = len(seen)
    for count, share in (
        ((seen == MASK).sum(), 0.8 + 0.1 / VOCAB),
        ((seen == hairy).sum(), 0.1 + 0.1 / VOCAB),
        ((seen != hairy).sum() - (seen == MASK).sum(), 0.1 - 0.2 / VOCAB),
    ):
        assert within(count, n * share, n * share * (1 - share))


@pytest.mark.parametrize(
    ("mask_rate", "same_rate", "random_rate"),
    [(0.8, 0.1, 0.1), (1, 0, 0), (0.8, 0, 0.2), (0.8, 0.2, 0), (0, 0.2, 0.8), (0, 0, 1)],
)
def test_rates_of_table_8(mask_rate, same_rate, random_rate):
    samples = 5_000
    ids, lengths = batch_of(np.full(samples, 64)), np.full(samples, 64)
    rates = {"mask_rate": mask_rate, "same_rate": same_rate, "random_rate": random_rate}
    masked, labels = mask(ids, lengths, vocab_size=10**9, **rates)  # a random token is never the original one
    chosen = labels != -100
    n = chosen.sum()
    assert n == samples * 10
    masks, same = (masked[chosen] == MASK).sum(), (masked[chosen] == ids[chosen]).sum()
    for count, rate in ((masks, mask_rate), (same, same_rate), (n - masks - same, random_rate)):
        assert within(count, n * rate, n * rate * (1 - rate))


@given(
    st.lists(st.integers(4, 40), min_size=1, max_size=10),
    st.integers(0, 30),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_batches_and_padding_change_nothing(lengths, padding, whole, random):
    ids, index, epochs = batch_of(lengths), np.arange(len(lengths)) + 10**10, np.arange(len(lengths)) // 2
    continues = PIECES[ids]
    masked, labels = mask(ids, lengths, index=index, epoch=epochs, seed=5, continues=continues if whole else None)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))  # some of the rows, in another order
    more = np.pad(ids[rows], ((0, 0), (0, padding)), constant_values=PAD)
    part, part_labels = mask(
        more,
        np.array(lengths)[rows],
        index=index[rows],
        epoch=epochs[rows],
        seed=5,
        continues=PIECES[more] if whole else None,
    )
    width = ids.shape[1]
    np.testing.assert_array_equal(part[:, :width], masked[rows])
    np.testing.assert_array_equal(part_labels[:, :width], labels[rows])
    assert np.all(part[:, width:] == PAD)
    assert np.all(part_labels[:, width:] == -100)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"seed": 2**40}, {"epoch": 1}, {"index": np.arange(1, 4001)}])
def test_neighbouring_seeds_epochs_and_samples_are_independent(changed):
    """Two independent choices of 10 of 61 positions share 100 / 61 on average."""
    samples = 4_000
    ids = np.tile(batch_of([64]), (samples, 1))
    lengths = np.full(samples, 64)
    (masked, labels), (other_masked, other_labels) = mask(ids, lengths), mask(ids, lengths, **changed)
    both = (labels != -100) & (other_labels != -100)
    shared = both.sum(axis=1)
    mean, variance = 10 * 10 / 61, 10 * (10 / 61) * (51 / 61) * (51 / 60)  # hypergeometric
    assert within(shared.mean(), mean, variance / samples)
    assert abs(shared.var() / variance - 1) < 0.1
    agree = (masked[both] == MASK) & (other_masked[both] == MASK)
    assert within(agree.sum(), both.sum() * 0.64, both.sum() * 0.64 * 0.36)


def reference_words(ids: list[int], epoch: int, index: int, probability: float) -> list[int]:
    """Return the positions that the reference code's loop chooses in a row, with words in the order of our draws."""
    words: list[list[int]] = []
    for position, token in enumerate(ids):
        if token in (CLS, SEP):
            continue
        if words and PIECES[token]:
            words[-1].append(position)
        else:
            words.append([position])
    order = draw_bits(draw_key(0, epoch, index), np.arange(len(ids)))
    words.sort(key=lambda word: order[word[0]])
    count = max(1, round(probability * len(ids)))
    chosen: list[int] = []
    for word in words:
        if len(chosen) + len(word) <= count:
            chosen += word
    return sorted(chosen)


@given(st.lists(st.integers(3, 100), min_size=1, max_size=6), st.integers(0, 5), st.floats(0.01, 1))
def test_whole_words_follow_the_reference_code(lengths, epoch, probability):
    ids = batch_of(lengths, seed=epoch)
    _, labels = mask(ids, lengths, epoch=epoch, probability=probability, continues=PIECES[ids])
    for row, length in enumerate(lengths):
        expected = reference_words(ids[row, :length].tolist(), epoch, row, probability)
        assert np.flatnonzero(labels[row] != -100).tolist() == expected


def test_each_piece_of_a_chosen_word_is_replaced_by_its_own_draw():
    lengths = np.full(500, 64)
    ids = batch_of(lengths)
    masked, labels = mask(ids, lengths, continues=PIECES[ids])
    chosen, kept = labels != -100, masked == ids
    continued = chosen[:, 1:] & chosen[:, :-1] & PIECES[ids[:, 1:]]
    assert (kept[:, 1:] != kept[:, :-1])[continued].any()


def test_a_piece_after_a_separator_belongs_to_the_word_before_it():
    """[CLS] 5 [SEP] ##700 [SEP]: as in the reference code one word, which exceeds the count of one, so none is chosen.

    [CLS] ##700 [SEP] [SEP]: a piece without a candidate before it starts a word.
    """
    ids = np.array([[CLS, 5, SEP, 700, SEP], [CLS, 700, SEP, SEP, PAD]])
    _, labels = mask(ids, [5, 4], continues=PIECES[ids])
    assert labels.tolist() == [[-100] * 5, [-100, 700, -100, -100, -100]]


def test_rates_that_cannot_be_are_refused(refused):
    rates = {"probability": 0.15, "mask_rate": 0.8, "random_rate": 0.1, "same_rate": 0.1}
    check_rates(**rates | {"random_rate": 0.1 + 5e-7})  # may be off by rounding
    for options in ({"mask_rate": 1.1, "random_rate": -0.2}, {"mask_rate": float("nan")}, {"probability": 15}):
        with refused():
            check_rates(**rates | options)


def test_position_kind_and_random_token_are_independent():
    samples, vocab = 40_000, 8
    lengths = np.full(samples, 11)  # two of eight candidates
    ids = np.tile([CLS, *range(4, 8), SEP, *range(8, 12), SEP], (samples, 1))
    rates = {"mask_rate": 0.5, "random_rate": 0.5, "same_rate": 0}
    masked, labels = mask(ids, lengths, mask_id=99, vocab_size=vocab, **rates)
    position, kind = labels[labels != -100] - 4, masked[labels != -100]
    table = np.zeros((8, 2))
    np.add.at(table, (position, (kind == 99).astype(int)), 1)
    assert is_uniform(table)
    table = np.zeros((8, vocab))
    np.add.at(table, (position[kind != 99], kind[kind != 99]), 1)
    assert is_uniform(table)
