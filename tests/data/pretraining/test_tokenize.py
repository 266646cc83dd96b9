"""Token arrays and held-out documents: worked examples, and every token is in its sentence's place."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.data import tokenizer
from bertkit.data.pretraining import tokenize
from bertkit.data.pretraining.tokenize import choose_dtype, choose_held_out, start_of, tokenize_documents, tokenize_part
from bertkit.data.tokenizer import SPECIAL_TOKENS, CachedTokenizer, copy_backend, make_tokenizer
from tests.corpora import list_documents, make_corpus

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", "mask", "my", "dog", "is", "hair", "##y", "."]


def test_token_arrays_of_the_papers_example():
    documents = [["My dog is hairy.", "\u200b", "[MASK] dog"], [" "], ["Is dog."]]
    tokenized = tokenize_documents(documents, make_tokenizer(VOCABULARY, cased=False))
    assert tokenized.ids.tolist() == [8, 9, 10, 11, 12, 13, 5, 7, 6, 9, 10, 9, 13]
    assert tokenized.ids.dtype == np.uint16
    assert tokenized.sentence_ends.tolist() == [6, 10, 13]
    assert tokenized.document_ends.tolist() == [2, 3]
    assert tokenized.document_starts.tolist() == [0, 2]
    assert tokenized.sentence_ends.dtype == tokenized.document_ends.dtype == tokenized.document_starts.dtype == np.int64


def test_spaces_are_borders_of_words_and_nothing_else():
    """The text is read as 中国的首都是ab12, in which the tokenizer finds 中 国 的 首 都 是 ab ##1 ##2.

    国 and 都 continue their words, ##2 the word 12; ##1 begins it. Their ids are larger by the size of the vocabulary.
    A token belongs to the word in which it begins: of a|b1, read as ab1, ab begins in a and ##1 in b1.
    """
    vocabulary = [*SPECIAL_TOKENS, *"中国的首都是", "ab", "##1", "##2"]
    tokenizer = make_tokenizer(vocabulary, cased=False)
    size = len(vocabulary)
    tokenized = tokenize_documents([["中国 的 首都\u3000是  ab 12 ", "a b1"], [" "]], tokenizer, "spaces")
    plain = tokenize_documents([["中国的首都是ab12", "ab1"]], tokenizer)
    marks = [0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert tokenized.ids.tolist() == (plain.ids + size * np.array(marks)).tolist()
    assert tokenized.word_offset == size
    assert tokenized.strip_words(tokenized.ids).tolist() == plain.ids.tolist()
    assert tokenized.sentence_ends.tolist() == plain.sentence_ends.tolist() == [9, 11]
    assert tokenized.count_tokens(size).tolist() == plain.count_tokens(size).tolist()


characters_of_words = st.text(st.sampled_from("aB9é中文ß\u0301\u200b.-"), max_size=4)


@given(st.lists(st.lists(characters_of_words, max_size=8), max_size=6))
def test_divided_texts_have_the_tokens_of_the_same_texts_without_spaces(sentences):
    pieces = [*dict.fromkeys("ab9se中文.-"), "##a", "##b", "##9", "##s", "##e", "ab"]
    tokenizer = make_tokenizer([*SPECIAL_TOKENS, *pieces], cased=False)
    divided = tokenize_documents([list(map(" ".join, sentences))], tokenizer, "spaces")
    plain = tokenize_documents([list(map("".join, sentences))], tokenizer)
    assert divided.strip_words(divided.ids).tolist() == plain.ids.tolist()
    assert divided.sentence_ends.tolist() == plain.sentence_ends.tolist()
    starts = start_of(divided.sentence_ends, np.arange(len(divided.sentence_ends)))
    assert (divided.ids[starts] < divided.word_offset).all()


words = st.sampled_from(["my", "dog", "hairy", "unknown", ".", "[MASK]", "", "\u200b"])
texts = st.lists(st.lists(st.lists(words, max_size=6).map(" ".join), max_size=5), max_size=6)


@given(texts, st.integers(1, 40), st.integers(1, 30))
def test_parts_side_by_side_are_the_tokens_of_each_sentence_and_no_document_lies_in_two(documents, characters, most):
    tokenizer = make_tokenizer(VOCABULARY, cased=False)
    options = {"add_special_tokens": False, "split_special_tokens": True}
    expected = [[tokenizer(sentence, **options)["input_ids"] for sentence in document] for document in documents]
    expected = [list(filter(None, document)) for document in expected]
    parts, counts, rest = [], [], iter(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "CHARACTERS_A_BATCH", characters)
        assert list_documents(tokenize_documents(iter(documents), tokenizer)) == list(filter(None, expected))
        while sum(counts) < len(documents):
            corpus, count = tokenize_part(rest, CachedTokenizer(copy_backend(tokenizer)), np.uint16, most)
            # A part holds the tokens of the documents that were read for it: a resumed build continues at this count.
            start = sum(counts)
            assert list_documents(corpus) == list(filter(None, expected[start : start + count]))
            assert (corpus.ids.dtype, corpus.sentence_ends.dtype, corpus.document_ends.dtype) == (
                np.uint16,
                np.int64,
                np.int64,
            )
            parts.append(corpus)
            counts.append(count)
    assert all(len(part.ids) >= most for part in parts[:-1])
    assert tokenize_part(rest, CachedTokenizer(copy_backend(tokenizer)), np.uint16)[1] == 0


def test_large_vocabularies_need_wider_ids():
    assert (choose_dtype(65_536), choose_dtype(65_537)) == (np.uint16, np.uint32)
    vocabulary = [*VOCABULARY, *(f"t{i}" for i in range(65_536 - len(VOCABULARY))), "last"]
    last = tokenize_documents([["last dog"]], make_tokenizer(vocabulary, cased=False)).ids
    assert (last.dtype, last.tolist()) == (np.uint32, [65_536, 9])


numbers = st.lists(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=6), min_size=1, max_size=4), max_size=8)


@given(numbers, st.data())
def test_a_selection_has_the_chosen_documents_and_their_counts(documents, data):
    corpus = make_corpus(documents)
    assert start_of(np.array([3, 5, 9]), np.arange(3)).tolist() == [0, 3, 5]
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))), bool)
    part = corpus.select(chosen)
    kept = [document for document, keep in zip(documents, chosen, strict=True) if keep]
    assert list_documents(corpus) == documents
    assert list_documents(part) == kept
    assert part.ids is corpus.ids  # nothing is copied
    flat = [i for document in kept for sentence in document for i in sentence]
    starts, ends = part.locate_tokens()
    assert [part.ids[a:b].tolist() for a, b in zip(starts, ends, strict=True)] == [list(chain(*d)) for d in kept]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "TOKENS_A_BLOCK", data.draw(st.integers(1, 10)))
        assert part.count_tokens(9).tolist() == [flat.count(i) for i in range(9)]
    again = data.draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))
    expected = [document for document, keep in zip(kept, again, strict=True) if keep]
    assert list_documents(part.select(np.array(again, bool))) == expected


characters = "abAB9 .-'ßİıΣσς́é中文\u00a0\u3000\u2028\x00\x1c\t\n\r\u200b\ufffd😀[]MASK#"
nasty = st.lists(st.text(st.sampled_from(characters), max_size=20) | st.text(max_size=10), max_size=8)


@given(st.lists(nasty, max_size=4), st.booleans(), st.integers(0, 30))
def test_remembered_words_give_what_whole_sentences_give(batches, cased, most):
    """Texts have control characters, all kinds of blanks, combining accents, and letters with two lower cases."""
    pieces = [*dict.fromkeys("abAB9.-'ßσςse中文[]mask#i"), "##a", "##b", "##s", "##e", "##'", "ab", "##ss"]
    backend = copy_backend(make_tokenizer([*SPECIAL_TOKENS, *pieces], cased=cased))
    remembering = CachedTokenizer(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "WORDS_REMEMBERED", most)
        for texts in batches:
            ids, lengths = remembering.encode(texts, np.uint16)
            plain = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
            assert ids.tolist() == list(chain(*plain))
            assert lengths.tolist() == list(map(len, plain))
    assert len(remembering.ids) <= most + sum(len(text.split(" ")) for batch in batches[-1:] for text in batch)


@given(st.integers(2, 60), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_held_out_documents_are_a_share_and_two_at_least(count, share, seed):
    chosen = choose_held_out(count, share, seed)
    assert (chosen.dtype, chosen.shape) == (bool, (count,))
    assert chosen.tolist() == choose_held_out(count, share, seed).tolist()
    size = int(chosen.sum())
    if share == 0 or count < 4:
        assert size == 0
    else:
        assert 2 <= size <= count - 2
        assert size in (2, count - 2, round(share * count))


def test_which_documents_are_held_out_depends_on_the_seed_and_stays():
    assert np.flatnonzero(choose_held_out(20, 0.1, seed=0)).tolist() == [4, 19]
    assert choose_held_out(100, 0.1, seed=0).tolist() != choose_held_out(100, 0.1, seed=1).tolist()
