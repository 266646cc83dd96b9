"""Words <-> tokens: what a sequence shows, which tokens are labelled, and the amount of context."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import PreTokenizedString
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bertkit.data.tagging import (
    ABSENT,
    BASIC,
    IGNORED,
    OrderedWords,
    Sentence,
    TaggedText,
    encode_words,
    fit_context,
    group_tokens,
    order_documents,
    split_words,
)
from bertkit.data.tokenizer import make_tokenizer
from tests.official import SPECIAL

VOCABULARY = [*SPECIAL, "Jim", "Hen", "##son", "was", "a", "puppet", "##eer", "word", "##1", "##2"]
TOKENIZER = make_tokenizer(VOCABULARY, cased=True, max_length=64)
NAMES = ("O", "B-PER", "I-PER")
DROPPED = "\u200b"  # a word of a control character: the tokenizer keeps nothing of it
WORDS = ["a", "Henson", "word12", "puppeteer", "never seen", "[SEP]", DROPPED]


def make_text(*documents: list[str], tags: dict[str, str] | None = None) -> TaggedText:
    """Return a text from documents of sentences of words; a word's tag is that in `tags`, or O."""
    sentences = []
    for number, document in enumerate(documents, 1):
        for sentence in document:
            words = sentence if isinstance(sentence, list) else sentence.split()
            found = [(tags or {}).get(word, "O") for word in words]
            sentences.append(Sentence(words, found, found, number, len(sentences) + 1))
    return TaggedText("file", sentences, len(documents), "IOB2", 0)


def show(data, index):
    return TOKENIZER.convert_ids_to_tokens(data[index]["input_ids"])


def test_combining_characters_belong_to_words_and_invisible_ones_are_none():
    """Vowel signs, accents, variation selectors and zero-width joiners: each is a letter to a reader or nothing."""
    texts = {
        "दिल्ली में": ["दिल्ली", "में"],
        "Jose\u0301 lives": ["Jose\u0301", "lives"],
        "\u2764\ufe0f Ada\u200b x": ["\u2764\ufe0f", "Ada", "x"],
        "می\u200cخواهم": ["می\u200cخواهم"],
        "葛\U000e0100城": ["葛\U000e0100", "城"],
    }
    for text, words in texts.items():
        assert [text[start:end] for start, end in split_words(text)] == words


def list_basic_tokens(text):
    """Return the start and end offsets of the tokens that BERT divides into pieces."""
    parts = PreTokenizedString(text)
    parts.normalize(BertNormalizer(lowercase=False).normalize)
    BertPreTokenizer().pre_tokenize(parts)
    return [offsets for _, offsets, _ in parts.get_splits("original", "char")]


def test_words_of_spans_are_bert_s_basic_tokens():
    text = "Niels Hopper’s “trade-offs” (AT&T's U.S. a_b, 5%) in 北京大学。 José’s Straße!"
    assert [list(word) for word in split_words(text, BASIC)] == [list(token) for token in list_basic_tokens(text)]


def test_words_of_spans_are_divided_further_at_symbols_and_in_scripts_without_spaces():
    texts = {
        "50€ That´s": ["50", "€", "That", "´", "s"],
        "東京タワーへ": ["東", "京", "タ", "ワ", "ー", "へ"],
        "می\u200cخواهم_Ada\u200b": ["می\u200cخواهم", "_", "Ada"],
    }
    for text, words in texts.items():
        assert [text[start:end] for start, end in split_words(text, BASIC)] == words


# A combining mark belongs to the punctuation before it, which BERT divides from it.
@given(st.text(st.characters(exclude_categories=["M", "Cs"]), max_size=30))
def test_words_of_spans_begin_and_end_where_other_words_and_basic_tokens_do(text):
    words, tokens = split_words(text, BASIC), list_basic_tokens(text)
    assert all(sum(first < end and start < last for first, last in tokens) <= 1 for start, end in words)
    for others, own in zip(zip(*split_words(text), strict=True), zip(*words, strict=True), strict=True):
        assert {*others} <= {*own}


def test_each_word_is_labelled_on_its_first_token():
    """Jim Hen ##son was a puppet ##eer, labels B-PER I-PER X O O O X, where X is the paper's "no prediction"."""
    text = make_text(["Jim Henson was a puppeteer"], tags={"Jim": "B-PER", "Henson": "I-PER"})
    data = encode_words(text, NAMES, TOKENIZER)
    assert show(data, 0) == ["[CLS]", "Jim", "Hen", "##son", "was", "a", "puppet", "##eer", "[SEP]"]
    item = data[0]
    assert item["labels"].tolist() == [IGNORED, 1, 2, IGNORED, 0, 0, 0, IGNORED, IGNORED]
    assert item["token_type_ids"].tolist() == [0] * 9
    assert {column.dtype for column in item.values()} == {np.dtype(np.int64)}
    assert data.locate(0).tolist() == [1, 2, 4, 5, 6]
    assert data.name_tags([np.array([1, 2, 0, 0, 0])]) == [["B-PER", "I-PER", "O", "O", "O"]]


def test_the_context_is_of_the_same_document_and_balanced():
    """Room for 6 tokens: the sentence has one, half of the other five to its left, the rest to its right."""
    text = make_text(["a"] * 9, ["was"] * 3)
    data = encode_words(text, NAMES, TOKENIZER, max_length=8)
    shown = [int(stop - start) for start, stop in zip(data.starts, data.stops, strict=True)]
    assert shown == [6] * 9 + [3] * 3
    own = [int(data.locate(index)[0]) for index in range(12)]
    # Sentences 0 to 8: 0, 1, then 2 precede the sentence; near the end enough to fill the room.
    assert own == [1, 2, 3, 3, 3, 3, 4, 5, 6, 1, 2, 3]
    assert show(data, 9) == ["[CLS]", "was", "was", "was", "[SEP]"]


def test_only_whole_neighbours_are_shown():
    """Room for 7: `word ##1 ##2` (3) fits to the left only where half of what the sentence leaves holds it."""
    text = make_text(["word12", "a", "was was was was", "a a"])
    data = encode_words(text, NAMES, TOKENIZER, max_length=9)
    # The second sentence leaves 6: 3 to the left, then 3 where the four of the third do not fit.
    assert show(data, 1) == ["[CLS]", "word", "##1", "##2", "a", "[SEP]"]
    # The third leaves 3: one half of it, 1, takes `a`, and 2 are left for `a a`.
    assert show(data, 2) == ["[CLS]", "a", "was", "was", "was", "was", "a", "a", "[SEP]"]
    # The last leaves 5, 2 for the left, where 4 are; nothing follows, so all 5 go to the left: `was was was was a`.
    assert show(data, 3) == ["[CLS]", "a", "was", "was", "was", "was", "a", "a", "[SEP]"]


def test_a_sentence_that_is_too_long_has_several_sequences():
    """Room for 6 of 7 tokens: parts of 3, 3 and 1, each with the whole parts that fit; the second sentence is alone."""
    text = make_text(["a was Jim a was Jim a"], ["was"])
    assert len(encode_words(text, NAMES, TOKENIZER, max_length=9)) == 2
    for context in (True, False):
        data = encode_words(text, NAMES, TOKENIZER, max_length=8, context=context)
        assert data.documents.tolist() == ([1, 1, 1, 2] if context else [0, 0, 0, 1])
        assert show(data, 0) == ["[CLS]", "a", "was", "Jim", "a", "was", "Jim", "[SEP]"]
        assert show(data, 1) == show(data, 2) == ["[CLS]", "a", "was", "Jim", "a", "[SEP]"]
        assert show(data, 3) == ["[CLS]", "was", "[SEP]"]
        assert [data.locate(number).tolist() for number in range(4)] == [[1, 2, 3], [1, 2, 3], [4], [1]]
        rows = [np.array(row) for row in ([0, 0, 1], [0, 0, 2], [0], [1])]
        assert data.name_tags(rows) == [["O", "O", "B-PER", "O", "O", "I-PER", "O"], ["B-PER"]]
        assert data.join([[1, 2, 3], [4, 5, 6], [7], [8]], None) == [[1, 2, 3, 4, 5, 6, 7], [8]]
        windows = data.merge()
        assert windows.word_ends.tolist() == [3, 7, 8], "the last two parts show the same tokens"
        assert windows.join([[1, 2, 3], [4, 5, 6, 7], [8]], None) == [[1, 2, 3, 4, 5, 6, 7], [8]]


def test_a_word_that_is_too_long_is_truncated():
    """word1…1 has 9 tokens; room for 6 takes six of them, and its own sequence has no other word."""
    text = make_text(["a word11111111 Jim"])
    data = encode_words(text, NAMES, TOKENIZER, max_length=8)
    assert [show(data, number) for number in range(3)] == [
        ["[CLS]", "a", "[SEP]"],
        ["[CLS]", "word", *["##1"] * 5, "[SEP]"],
        ["[CLS]", "Jim", "[SEP]"],
    ]
    assert [data.locate(number).tolist() for number in range(3)] == [[1], [1], [1]]


documents = st.lists(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), min_size=1, max_size=6), min_size=1, max_size=3
)


@given(documents, st.integers(11, 40), st.booleans(), st.data())
def test_what_every_sequence_keeps_to(found, max_length, context, draw):
    """No sentence has more than 9 tokens: three words of three. Training lacks the tag B-Z."""
    text = make_text(*found)
    names = ("O", "B-X", "I-X", "B-Y")
    for sentence in text.sentences:
        count = len(sentence.words)
        sentence.tags[:] = draw.draw(st.lists(st.sampled_from((*names, "B-Z")), min_size=count, max_size=count))
    data = encode_words(text, names, TOKENIZER, max_length, context)
    own = [TOKENIZER.tokenize(" ".join(x.words), split_special_tokens=True) for x in text.sentences]
    rows, tags = [], []
    for index, sentence in enumerate(text.sentences):
        item, positions = data[index], data.locate(index)
        tokens = show(data, index)
        assert len(tokens) <= max_length
        assert tokens[0] == "[CLS]"
        assert tokens[-1] == "[SEP]"
        # Each own word with a token is labelled exactly once, on its first token, and nothing else is labelled.
        has_token = [word != DROPPED for word in sentence.words]
        assert (positions != ABSENT).tolist() == has_token
        assert np.flatnonzero(item["labels"] != IGNORED).tolist() == positions[positions != ABSENT].tolist()
        for word, position in zip(sentence.words, positions, strict=True):
            pieces = TOKENIZER.tokenize(word, split_special_tokens=True)
            assert position == ABSENT or tokens[position : position + len(pieces)] == pieces
        rows.append(item["labels"][item["labels"] != IGNORED])
        tags.append([tag if has and tag in names else "O" for tag, has in zip(sentence.tags, has_token, strict=True)])
        assert context or tokens[1:-1] == own[index]
    assert data.name_tags(rows) == tags


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(6, 40), st.data())
def test_context_is_as_balanced_as_the_document_allows(lengths, room, draw):
    """Fit the context by definition, by sentence: half of the spare room left, the rest right, the rest left."""
    documents = np.sort(draw.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    starts, stops = fit_context(np.cumsum(lengths), documents, room)

    def fill(budget: int, sentences: list[int]) -> int:
        total = 0
        for sentence in sentences:
            if total + lengths[sentence] > budget:
                break
            total += lengths[sentence]
        return total

    for index, length in enumerate(lengths):
        same = [other for other in range(len(lengths)) if documents[other] == documents[index]]
        before, after = [x for x in same if x < index][::-1], [x for x in same if x > index]
        spare = room - length
        right = fill(spare - fill(spare // 2, before), after)
        left = fill(spare - right, before)
        begin = sum(lengths[:index])
        assert (starts[index], stops[index]) == (begin - left, begin + length + right)


# --- The order of documents -------------------------------------------------------------------------------------------


def test_documents_that_fill_an_update_stay_whole():
    """Documents of 1, 2, 3 and 2 sentences in updates of 4: 3 and 1, 2 and 2, whatever comes first."""
    documents = np.repeat([0, 1, 4, 7], [1, 2, 3, 2])
    for seed in range(5):
        order = order_documents(documents, 4, np.random.default_rng(seed))
        assert {tuple(np.unique(documents[part])) for part in (order[:4], order[4:])} == {(0, 4), (1, 7)}


def test_the_sequences_of_a_window_are_one_item_with_all_their_labels():
    text = make_text(["Jim a", "Henson"], ["was", "a", "Jim"], tags={"Jim": "B-PER", "Henson": "I-PER"})
    words = encode_words(text, NAMES, TOKENIZER)
    data = OrderedWords(words, 5, 0)
    assert len(data) == 5
    first, second = sorted(data.__getitems__(range(5)), key=lambda item: len(item["labels"]), reverse=True)
    assert first["labels"].tolist() == [IGNORED, 1, 0, 2, IGNORED, IGNORED]
    assert second["labels"].tolist() == [IGNORED, 0, 0, 1, IGNORED]
    assert words[0]["labels"].tolist() == [IGNORED, 1, 0, IGNORED, IGNORED, IGNORED], "the sequences are as before"
    orders = []
    for epoch in (*range(8), 0):
        data.set_epoch(epoch)
        orders.append(data.order.tolist())
    assert orders[0] == orders[-1]
    assert len(set(map(tuple, orders))) > 1


# --- Words of tokens --------------------------------------------------------------------------------------------------


def test_words_that_share_a_token_are_one_and_a_token_outside_all_words_is_one():
    text = "ab 🙂🙂 c\u00ad!"
    offsets = np.array([(0, 1), (1, 2), (3, 5), (6, 7), (7, 8), (8, 9)])
    words, owners = group_tokens(text, offsets)
    assert [text[start:end] for start, end in words] == ["ab", "🙂🙂", "c", "\u00ad", "!"]
    assert owners.tolist() == [0, 0, 1, 2, 3, 4]
    assert group_tokens("", np.zeros((0, 2), np.int32))[0] == []


@given(st.text(max_size=30), st.lists(st.integers(0, 30), max_size=20))
def test_every_token_lies_in_one_word_and_no_word_of_the_text_is_divided(text, edges):
    edges = sorted({edge for edge in edges if edge <= len(text)})
    offsets = np.array(list(pairwise(edges)), np.int64).reshape(-1, 2)
    words, owners = group_tokens(text, offsets)
    assert all(start < end for start, end in words)
    assert all(before[1] <= after[0] for before, after in pairwise(words))
    for (start, end), owner in zip(offsets.tolist(), owners.tolist(), strict=True):
        assert words[owner][0] <= start
        assert end <= words[owner][1]
    for start, end in split_words(text):
        assert any(first <= start and end <= last for first, last in words)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 99))
def test_each_update_divides_at_most_one_document_that_would_fit(lengths, size, seed):
    documents = np.repeat(np.arange(len(lengths)), lengths)
    order = order_documents(documents, size, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(documents)))
    updates = [order[start : start + size] for start in range(0, len(order), size)]
    parts = sum(len(np.flatnonzero(np.diff(part) != 1)) + 1 for part in updates)
    assert parts <= sum(-(-length // size) for length in lengths) + len(updates)
