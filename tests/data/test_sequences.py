"""Texts and pairs as the paper packs them, truncated as in the reference code, and batches that lose nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.sequences import IGNORED, Groups, Sequences, encode_inputs, pad, pad_choices, stack_summaries
from bertkit.data.tokenizer import SPECIAL_TOKENS, copy_backend, make_tokenizer

WORDS = ["my", "dog", "is", "cute", "he", "likes", "play", "##ing", "a", "b", "mask", "sep", "[", "]", ".", ",", "##s"]
TOKENIZER = make_tokenizer([*SPECIAL_TOKENS, *WORDS], cased=False)
TEXTS = st.lists(st.sampled_from(["my", "dogs", "Playing", "cute.", "É", "a, b", "he\u2028likes", "[x]"])).map(" ".join)


def encode(*texts, labels=None, max_length=64):
    """Return the sequences of one text or pair, or of columns of them."""
    columns = [[text] if isinstance(text, str) else list(text) for text in texts]
    inputs = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    return encode_inputs(inputs, labels, TOKENIZER, max_length)


def show(item):
    return TOKENIZER.convert_ids_to_tokens(item["input_ids"].tolist()), item["token_type_ids"].tolist()


def test_the_pair_of_figure_2():
    """Figure 2: [CLS] and the first [SEP] belong to A, the last [SEP] to B."""
    tokens, segments = show(encode("my dog is cute", "he likes playing")[0])
    assert " ".join(tokens) == "[CLS] my dog is cute [SEP] he likes play ##ing [SEP]"
    assert segments == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def truncate(first, second, limit):
    """The reference code's rule: B loses a token unless A is longer."""
    while first + second > limit:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


@given(st.lists(st.one_of(TEXTS, st.tuples(TEXTS, TEXTS)), min_size=1, max_size=8), st.integers(5, 24))
def test_sequences_are_those_of_tokenizers(inputs, max_length):
    backend = copy_backend(TOKENIZER)
    backend.enable_truncation(max_length, strategy="longest_first")
    expected = [(one.ids, one.type_ids, bool(one.overflowing)) for one in backend.encode_batch(inputs)]
    data = encode_inputs(inputs, None, TOKENIZER, max_length)
    found = [(item["input_ids"].tolist(), item["token_type_ids"].tolist()) for item in data]
    assert [(*item, cut) for item, cut in zip(found, data.shortened.tolist(), strict=True)] == expected
    for one, item in zip(inputs, found, strict=True):
        columns = [[text] for text in ([one] if isinstance(one, str) else one)]
        stock = TOKENIZER(*columns, truncation=True, max_length=max_length)
        assert item == (stock["input_ids"][0], stock["token_type_ids"][0])


@pytest.mark.parametrize("max_length", [5, 6, 9, 10, 13])
def test_long_pairs_are_cut_as_in_the_reference_code(max_length):
    """Except for the odd token between two long texts, as the docstring says."""
    sizes = [(first, second) for first in range(1, 13) for second in range(1, 13)]
    data = encode(["a " * first for first, _ in sizes], ["b " * second for _, second in sizes], max_length=max_length)
    room, ties = max_length - 3, 0
    for (first, second), item in zip(sizes, data, strict=True):
        tokens, segments = show(item)
        found = tokens.count("a"), tokens.count("b")
        assert tokens == ["[CLS]", *["a"] * found[0], "[SEP]", *["b"] * found[1], "[SEP]"]
        assert segments.count(1) == found[1] + 1
        expected = truncate(first, second, room)
        if room % 2 and min(first, second) > room // 2 and first <= second:
            assert expected == (room // 2 + 1, room // 2)
            expected = expected[::-1]
            ties += 1
        assert found == expected
    assert (ties > 0) == (room % 2 == 1)


def test_special_tokens_written_out_are_letters():
    tokens, segments = show(encode("[MASK] my [SEP]", "[CLS] dog")[0])
    assert " ".join(tokens) == "[CLS] [ mask ] my [ sep ] [SEP] [ [UNK] ] dog [SEP]"
    assert sum(segments) == 5


def test_the_callers_tokenizer_stays_as_it_is():
    TOKENIZER(["a", "a b my"], padding="max_length", max_length=30, truncation=True)  # it remembers
    before = TOKENIZER.backend_tokenizer.to_str()
    assert [len(item["input_ids"]) for item in encode(["a", "a b my dog is"], max_length=5)] == [3, 5]
    assert TOKENIZER.backend_tokenizer.to_str() == before
    assert TOKENIZER("[MASK]")["input_ids"] == TOKENIZER.convert_tokens_to_ids(["[CLS]", "[MASK]", "[SEP]"])


def make_sequences(shapes, labels):
    """Return random tokens; `shapes` are (number of tokens, number of these in segment B)."""
    lengths, seconds = np.array(shapes).T
    ids = np.random.default_rng(0).integers(1, 99, lengths.sum()).astype(np.int32)
    return Sequences(ids, np.cumsum(lengths), seconds, labels)


@given(
    shapes=st.lists(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1),
    kind=st.sampled_from([None, np.int64, np.float32]),
)
def test_a_padded_batch_holds_every_sequence_and_nothing_else(shapes, kind):
    labels = None if kind is None else np.arange(len(shapes)).astype(kind)
    data = make_sequences(shapes, labels)
    items = data.__getitems__(range(len(data)))
    batch = pad(items)
    longest = max(length for length, _ in shapes)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask"} | ({"labels"} if kind else set())
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert batch[name].shape == (len(shapes), longest)
        assert batch[name].dtype == torch.int64
    for row, (length, second) in enumerate(shapes):
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (longest - length)
        assert batch["input_ids"][row, :length].tolist() == items[row]["input_ids"].tolist()
        assert batch["token_type_ids"][row, :length].tolist() == [0] * (length - second) + [1] * second
        assert not batch["input_ids"][row, length:].any()
        assert not batch["token_type_ids"][row, length:].any()
    if kind is not None:
        assert batch["labels"].tolist() == list(range(len(shapes)))
        assert batch["labels"].dtype == (torch.int64 if kind is np.int64 else torch.float32)


@given(
    lengths=st.lists(st.lists(st.integers(2, 9), min_size=3, max_size=3), min_size=1, max_size=5),
    labelled=st.booleans(),
)
def test_a_batch_of_choices_holds_every_sequence_in_its_place(lengths, labelled):
    """Three sequences per question, padded to the longest of all."""
    flat = make_sequences([(length, length // 2) for question in lengths for length in question], None)
    labels = np.arange(len(lengths)) % 3 if labelled else None
    data = Groups(flat, labels, np.full(len(lengths), 3))
    assert len(data) == len(lengths)
    batch = pad_choices(data.__getitems__(range(len(data))))
    expected = pad(flat.__getitems__(range(len(flat))))
    longest = max(map(max, lengths))
    assert set(batch) == set(expected) | ({"labels"} if labelled else set())
    for name, column in expected.items():
        assert batch[name].shape == (len(lengths), 3, longest)
        assert batch[name].dtype == torch.int64
        assert torch.equal(batch[name].flatten(0, 1), column)
    assert batch["attention_mask"].sum(dim=2).tolist() == lengths
    if labelled:
        assert torch.equal(batch["labels"], torch.from_numpy(labels))


def test_summaries_of_different_sizes_are_padded_with_ignored():
    found = stack_summaries([np.array([1, 2]), np.array([0])])
    assert found.tolist() == [[1, 2], [0, IGNORED]]


def test_more_texts_than_are_tokenized_at_once(monkeypatch):
    texts = [["a " * (index % 5 + 1) for index in range(10)], ["b " * (index % 3 + 1) for index in range(10)]]
    whole = encode(*texts, max_length=7)
    monkeypatch.setattr("bertkit.data.sequences.TEXTS_A_BATCH", 3)
    for one, other in zip(whole, encode(*texts, max_length=7), strict=True):
        assert show(one) == show(other)
