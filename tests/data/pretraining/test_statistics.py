"""Statistics of a corpus: computed by hand for a tiny one, and compared with a naive count on random ones."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data.pretraining import statistics
from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.statistics import (
    choose_kept,
    describe,
    list_rows,
    list_warnings,
    measure,
    measure_pairs,
    measure_repeats,
    select_sentences,
)
from tests.corpora import drop_repeats, list_documents, make_corpus

# Few different tokens, so that lines and documents repeat, also with other boundaries.
DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=12
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Use blocks so small that a unit spans several of them."""
    monkeypatch.setattr(statistics, "TOKENS_A_HASH", 4)
    monkeypatch.setattr(statistics, "PAIRS_A_BLOCK", 2)


@given(documents=DOCUMENTS, unit=st.sampled_from(["documents", "lines"]))
def test_repeats_go_as_a_naive_count_says(documents, unit):
    corpus = make_corpus(documents)
    assert list_documents(select_sentences(corpus, choose_kept(corpus, unit))) == drop_repeats(documents, unit)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("unit", ["documents", "lines"])
@pytest.mark.parametrize("seed", range(2))
def test_block_by_block_the_same_repeats_go(unit, seed):
    draw = np.random.default_rng(seed)
    sizes = [draw.integers(1, 9, draw.integers(1, 4)) for _ in range(30)]
    documents = [[draw.integers(0, 2, size).tolist() for size in document] for document in sizes]
    documents += [documents[index] for index in draw.integers(0, 30, 10)]
    corpus = make_corpus(documents)
    expected = drop_repeats(documents, unit)
    assert len(expected) < len(documents)
    assert list_documents(select_sentences(corpus, choose_kept(corpus, unit))) == expected


@given(documents=DOCUMENTS)
def test_repeats_are_counted_as_a_naive_count_does(documents):
    corpus = make_corpus(documents)
    found = measure_repeats(corpus)
    for unit, items in (
        ("documents", [tuple(chain(*document)) for document in documents]),
        ("lines", [tuple(line) for document in documents for line in document]),
    ):
        later = [item for index, item in enumerate(items) if item in items[:index]]
        share = sum(map(len, later)) / len(corpus.ids)
        assert found[unit] == {"count": len(later), "token_share": pytest.approx(share)}


def test_lengths_worked_by_hand():
    """1, 1, 2, 3, 4, 5, 8, 9, 16, 100: half are at most 4, 90 % at most 16, 99 % at most 100."""
    found = describe(np.cumsum([9, 1, 3, 2, 100, 1, 8, 16, 4, 5]))
    assert found == {"mean": 14.9, "median": 4, "p90": 16, "p99": 100, "longest": 100}
    assert describe(np.empty(0, np.int64))["longest"] == 0


def test_a_tiny_corpus_worked_by_hand():
    """Three documents; the third equals the first, and the line 1 2 occurs three times. [UNK] is 9."""
    corpus = make_corpus([[[1, 2], [3]], [[9], [1, 2], [4, 5, 6, 7]], [[1, 2], [3]]])
    found = measure(corpus, unknown_id=9)
    assert (found["documents"], found["sentences"], found["tokens"]) == (3, 7, 13)
    assert found["unknown_rate"] == 1 / 13
    assert found["sentence_tokens"]["median"] == 2
    assert found["document_sentences"] == {"mean": 7 / 3, "median": 2, "p90": 3, "p99": 3, "longest": 3}
    assert found["repeated"] == {
        "documents": {"count": 1, "token_share": 3 / 13},
        "lines": {"count": 3, "token_share": 5 / 13},
    }
    # Every document fits into one pair of 128 tokens, and so it is of 512.
    for length in ("128", "512"):
        assert found["pairs"][length]["pairs"] >= 3
        assert 0.8 < found["pairs"][length]["padding"] < 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("max_length", [16, 128])
def test_padding_is_that_of_the_planned_pairs(max_length):
    draw = np.random.default_rng(1)
    documents = [[[1] * draw.integers(1, 30) for _ in range(draw.integers(1, 20))] for _ in range(30)]
    corpus = make_corpus(documents)
    pairing = Pairing(corpus, max_length=max_length, seed=0)
    pairs = pairing.draw_pairs(pairing.locate_chunks())
    tokens = (pairs[:, 1] - pairs[:, 0] + pairs[:, 3] - pairs[:, 2] + 3).sum()
    assert measure_pairs(corpus, max_length) == {
        "pairs": len(pairs),
        "padding": 1 - tokens / (len(pairs) * max_length),
        "random_next": pairs[:, 4].mean(),
    }


def make_statistics(unknown=0.0, lines=0.0, documents=0, random_next=0.5):
    corpus = make_corpus([[[1, 2], [3]], [[9], [1, 2], [4, 5, 6, 7]]])
    found = measure(corpus, unknown_id=99) | {"characters": 40, "vocab_size": 1000, "unknown_rate": unknown}
    found["repeated"] = {
        "documents": {"count": documents, "token_share": 0.0},
        "lines": {"count": 1, "token_share": lines},
    }
    found["pairs"]["128"]["random_next"] = random_next
    return found | {"documents": 100}


def test_what_is_unusual_is_said_with_its_remedy():
    for usual in ({}, {"unknown": 0.05, "lines": 0.1, "documents": 1, "random_next": 0.75}):
        assert list(list_warnings(make_statistics(**usual))) == []
    unusual = ({"unknown": 0.06}, {"lines": 0.11, "documents": 2}, {"documents": 2}, {"random_next": 0.76})
    lines = [line for values in unusual for line in list_warnings(make_statistics(**values))]
    assert lines == [
        "warning: 6.0% of the tokens are [UNK]; train a vocabulary on this text (bertkit vocab) or name one for its "
        "language with --vocab",
        "warning: repeated lines hold 11.0% of the tokens; drop them with --deduplicate lines",
        "warning: 2.0% of the documents are repeats; drop them with --deduplicate documents",
        "warning: 76% of the next sentences are random instead of half, as documents have one sentence or very long "
        "ones; put blank lines between whole documents only, or train with --set data.objective=mlm",
    ]


def test_the_table_says_everything_in_words():
    found = make_statistics()
    before = {"documents": 9, "sentences": 8, "tokens": 7777, "repeated": found["repeated"]}
    left_out = {"headings": [1234, "== See also ==", "== Notes =="]}
    rows = dict(list_rows(found | {"before": before, "left_out": left_out}))
    assert rows["before removal: tokens"] == "7,777"
    assert rows["left out: headings"] == "1,234: == See also ==; == Notes =="
    assert rows["sentences"] == "5"
    assert rows["unknown tokens"] == "0.000%"
    assert rows["tokens per document"] == "mean 5.0, median 3, p90 7, p99 7, longest 7"
    assert "random next" in rows["pairs of 512 tokens"]
