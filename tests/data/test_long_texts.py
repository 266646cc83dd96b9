"""Long texts: their head and tail, and windows that hold every token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.long_texts import cut_into_windows, encode_long, keep_head_and_tail, pool_windows
from bertkit.data.sequences import pad_choices
from bertkit.data.tokenizer import make_tokenizer

WORDS = [f"w{index}" for index in range(40)]
TOKENIZER = make_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], cased=False)
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=2)


def encode(inputs, labels=None, max_length=8, long="mean", doc_stride=3):
    return encode_long(inputs, labels, TOKENIZER, max_length, long, doc_stride)


def number(counts):
    """Return texts of different tokens: those of the second follow those of the first."""
    return [np.arange(first, first + count) for first, count in zip((0, 100), counts, strict=False)]


def show(item):
    """Return the words and the segments of each window of an item."""
    return [
        (" ".join(TOKENIZER.convert_ids_to_tokens(ids.tolist())), segments.tolist())
        for ids, segments in zip(item["input_ids"], item["token_type_ids"], strict=True)
    ]


def test_the_head_and_tail_of_sun_et_al():
    """510 tokens of 1,000 are kept: the first 128 and the last 382. A text that fits stays whole."""
    ((kept,),), is_shortened = keep_head_and_tail(number([1000]), 510)
    assert kept.tolist() == [*range(128), *range(1000 - 382, 1000)]
    assert is_shortened
    ((kept,),), is_shortened = keep_head_and_tail(number([510]), 510)
    assert kept.tolist() == list(range(510))
    assert not is_shortened


def test_each_truncated_text_of_a_pair_keeps_its_head_and_tail():
    """Room for 10: the first text, of 20 tokens, keeps 7, which are 2 and 5; the second keeps its 3."""
    (pair,), _ = keep_head_and_tail(number([20, 3]), 10)
    assert [text.tolist() for text in pair] == [[0, 1, 15, 16, 17, 18, 19], [100, 101, 102]]
    data = encode([" ".join(WORDS[:20])], long="head+tail", max_length=10)
    assert TOKENIZER.convert_ids_to_tokens(data[0]["input_ids"].tolist()) == [
        *("[CLS]", "w0", "w1", "w14", "w15", "w16", "w17", "w18", "w19", "[SEP]")
    ]


def test_windows_of_a_text():
    """At most 8 tokens are room for 6; starts are 3 apart.

    The windows of 10 tokens are 0 to 5, 3 to 8 and 6 to 9: the last one ends with the text. 6 tokens are one window.
    """
    data = encode([" ".join(WORDS[:10]), " ".join(WORDS[:6]), ""], np.array([1, 0, 1]))
    assert [data.counts.tolist(), data.sequences.shortened.tolist()] == [[3, 1, 1], [False] * 3]
    assert show(data[0]) == [
        ("[CLS] w0 w1 w2 w3 w4 w5 [SEP]", [0] * 8),
        ("[CLS] w3 w4 w5 w6 w7 w8 [SEP]", [0] * 8),
        ("[CLS] w6 w7 w8 w9 [SEP]", [0] * 6),
    ]
    assert show(data[1]) == [("[CLS] w0 w1 w2 w3 w4 w5 [SEP]", [0] * 8)]
    assert show(data[2]) == [("[CLS] [SEP]", [0] * 2)]
    assert [data[index]["labels"] for index in range(len(data))] == [1, 0, 1]


def test_windows_of_a_pair_repeat_the_shorter_text():
    """Room for 7: the second text takes 2, so windows have 5 of the first's 9 tokens; 6 tokens are apart, but 5 fit."""
    data = encode([(" ".join(WORDS[:9]), "w30 w31"), ("w30 w31", " ".join(WORDS[:9]))], max_length=10, doc_stride=6)
    assert show(data[0]) == [
        ("[CLS] w0 w1 w2 w3 w4 [SEP] w30 w31 [SEP]", [0] * 7 + [1] * 3),
        ("[CLS] w5 w6 w7 w8 [SEP] w30 w31 [SEP]", [0] * 6 + [1] * 3),
    ]
    assert show(data[1]) == [
        ("[CLS] w30 w31 [SEP] w0 w1 w2 w3 w4 [SEP]", [0] * 4 + [1] * 6),
        ("[CLS] w30 w31 [SEP] w5 w6 w7 w8 [SEP]", [0] * 4 + [1] * 5),
    ]
    assert not data.sequences.shortened.any()


def test_the_shorter_text_of_a_pair_takes_half_of_the_room_at_most():
    """Room for 6: of two texts of 5 the second keeps 3, and tokens are left out; the first one has two windows."""
    windows, is_shortened = cut_into_windows(number([5, 5]), 6, 3)
    assert [[text.tolist() for text in pair] for pair in windows] == [
        [[0, 1, 2], [100, 101, 102]],
        [[3, 4], [100, 101, 102]],
    ]
    assert is_shortened


@given(COUNTS, st.integers(2, 40), st.integers(1, 45))
def test_windows_hold_every_token_and_each_adds_some(counts, room, step):
    texts = number(counts)
    windows, is_shortened = cut_into_windows(texts, room, step)
    if sum(counts) <= room:
        assert windows == [texts]
        assert not is_shortened
        return
    longer = counts.index(max(counts))
    parts = [pair[longer] for pair in windows]
    seen = 0
    for start, part in enumerate(parts):
        if start:
            assert 0 < part[0] - parts[start - 1][0] <= step
        first = part[0] - texts[longer][0]
        assert first <= seen < first + len(part)
        seen = first + len(part)
    assert seen == counts[longer]
    for pair in windows:
        assert sum(map(len, pair)) <= room
        if len(counts) == 2:
            kept = pair[1 - longer]
            assert kept.tolist() == texts[1 - longer][: room // 2].tolist()
            assert is_shortened == (len(kept) < counts[1 - longer])


def test_a_batch_of_windows_has_zeros_in_place_of_absent_ones():
    data = encode([" ".join(WORDS[:10]), "w0"], np.array([1, 0]))
    batch = pad_choices(data.__getitems__([1, 0]))
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == (2, 3, 8)
    assert batch["attention_mask"].sum(-1).tolist() == [[3, 0, 0], [8, 8, 6]]
    assert not batch["input_ids"][0, 1:].any()
    assert batch["labels"].tolist() == [0, 1]
    real = torch.cat([batch["input_ids"][row][batch["attention_mask"][row].bool()] for row in (1, 0)])
    assert real.tolist() == data.sequences.ids.tolist()


def test_scores_of_windows():
    scores = np.float32([[1, 5], [3, -1], [2, 2]])
    counts = np.array([2, 1])
    assert pool_windows(scores, counts, "mean").tolist() == [[2, 2], [2, 2]]
    assert pool_windows(scores, counts, "max").tolist() == [[3, 5], [2, 2]]
    assert pool_windows(scores, counts, "mean").dtype == np.float32
