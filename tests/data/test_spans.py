"""Windows, answers and decoding against slow copies of the reference code, on texts that are awkward to tokenize."""

import unicodedata
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from bertkit.data import spans
from bertkit.data.spans import (
    Answer,
    Question,
    Span,
    cut_windows,
    decode_windows,
    divide_context,
    express,
    is_placed,
    keep_top,
    locate_answer,
)
from bertkit.data.tokenizer import SPECIAL_TOKENS, make_tokenizer
from tests.official import encode_questions

LETTERS = [*"abcdehilmnopstABST129éßक中国😀", *unicodedata.normalize("NFD", "한국"), "\u0301", "\u093f"]
TOKENS = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"[].,()-?'", "the", "##st", "ab", "##cd"]
TOKENIZERS = [make_tokenizer(TOKENS, cased=cased, max_length=10**6) for cased in (False, True)]
UNCASED = TOKENIZERS[0]
AWKWARD = {
    "plain": "The best the ab, abcd (1912).",
    "no spaces": "ab-ab'ab.ab[ab]" * 3,
    "unknown words": "z zebra q " * 4,
    "accents apart": "e\u0301te\u0301 a\u0323\u0301b " * 3,
    "accents in one": "été é É " * 3,
    "accents alone": "\u0301 \u0301\u0301",
    "hangul": "한국 한 국한 " * 3,
    "devanagari": "कि किक " * 4,
    "chinese": "中国中 ab中",
    "emoji": "😀 👨\u200d👩\u200d👧 a😀b 🇰🇷 ❤\ufe0f",
    "controls": "a\x00b \x01 \u200b ab\ufeff\ufffd\x7f\x85c",
    "spaces": "\u00a0 ab\u2028ab\u3000\tab\r\n\u202fab  ",
    "longer in lower case": "İİst ẞ ﬁ",
    "special tokens": "[SEP] a [CLS][MASK]b [sep] [PAD] [UNK]",
    "empty": "",
    "only spaces": " \n ",
}
WORDS = st.sampled_from([word for text in AWKWARD.values() for word in text.split(" ") if word])
GAPS = st.sampled_from([" ", " ", " ", "", "\n", ", "])
TEXTS = st.one_of(
    st.lists(st.tuples(WORDS, GAPS), max_size=12).map(lambda pairs: "".join(word + gap for word, gap in pairs)),
    st.sampled_from(list(AWKWARD.values())),
    st.text(max_size=20),
)
LONG_TEXTS = st.lists(TEXTS, min_size=6, max_size=12).map(" ".join)
CONTEXTS = st.one_of(TEXTS, LONG_TEXTS, LONG_TEXTS)
SIZES = st.builds(
    lambda query, room, step: {"max_query_length": query, "max_length": query + 3 + room, "doc_stride": step},
    query=st.integers(1, 8),
    room=st.one_of(st.integers(1, 10), st.integers(15, 60)),
    step=st.one_of(st.integers(1, 20), st.integers(1, 70)),
)


def ask(context, *answers, question="the best?"):
    """Return a question; every answer is (its first character, its end)."""
    texts = tuple(context[start:end] for start, end in answers)
    return Question("q", question, context, texts, tuple(start for start, _ in answers))


def tokenize(tokenizer, text):
    """Ids and (first character, end) of the tokens, by plain transformers; written special tokens are ordinary text."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True)
    return found["input_ids"], found["offset_mapping"]


# --- Windows ----------------------------------------------------------------------------------------------------------


def cut_slowly(count, room, step):
    """Return the reference code's windows as (first token, tokens); an empty context has none."""
    windows, start = [], 0
    while start < count:
        length = min(count - start, room)
        windows.append((start, length))
        if start + length == count:
            break
        start += min(length, step)
    return windows


def measure_context(window, token):
    """Return the reference code's score of a window's context around a token; -1 if the token is outside."""
    start, length = window
    last = start + length - 1
    return min(token - start, last - token) + 0.01 * length if start <= token <= last else -1


def own_slowly(windows, count):
    """Return every token's window of maximum context; the first one wins a tie."""
    return [
        max(range(len(windows)), key=lambda index: measure_context(windows[index], token)) for token in range(count)
    ]


COUNTS, ROOMS, STEPS = (
    st.one_of(st.integers(least, few), st.integers(least, 650)) for least, few in ((0, 40), (1, 20), (1, 9))
)


def test_windows_of_384_advance_by_128():
    """A question of 9 tokens leaves 372 for the context."""
    assert cut_windows(372, 372, 128) == [(0, 372)]
    assert cut_windows(373, 372, 128) == [(0, 372), (128, 245)]
    assert cut_windows(700, 372, 128) == [(0, 372), (128, 372), (256, 372), (384, 316)]


@given(count=COUNTS, room=ROOMS, step=STEPS)
@example(count=0, room=3, step=1)
@example(count=9, room=3, step=5)
def test_windows_are_those_of_the_reference_code(count, room, step):
    assert cut_windows(count, room, step) == (cut_slowly(count, room, step) or [(0, 0)])


def test_a_token_belongs_to_the_window_that_shows_it_in_most_context():
    """Tokens 6 and 9 have a minimum of 3 neighbours per side in two windows each: the first window gets them."""
    assert cut_windows(14, 10, 3) == [(0, 10), (3, 10), (6, 8)]
    assert divide_context([(0, 10), (3, 10), (6, 8)]) == [(0, 7), (7, 10), (10, 14)]


@given(count=COUNTS, room=ROOMS, step=STEPS)
@example(count=600, room=317, step=128)
@example(count=400, room=320, step=180)  # a hundred tokens fewer weigh as much as one of context
@example(count=119, room=118, step=101)  # a row of such ties, which rounding decides either way
def test_shares_are_those_of_the_reference_code(count, room, step):
    windows = cut_windows(count, room, step)
    shares = divide_context(windows)
    tokens = [token for start, end in shares for token in range(start, end)]
    assert tokens == list(range(count))
    owners = [index for index, (start, end) in enumerate(shares) for _ in range(start, end)]
    expected = own_slowly(windows, count)
    if min(step, room) % 101:
        assert owners == expected
    else:
        for token, pair in enumerate(zip(owners, expected, strict=True)):
            found, most = (measure_context(windows[index], token) for index in pair)
            assert found == pytest.approx(most, rel=0, abs=1e-9)


# --- Answers and tokens -----------------------------------------------------------------------------------------------


def locate_slowly(offsets, start, end):
    return [token for token, (first, last) in enumerate(offsets) if max(first, start) < min(last, end)]


def test_an_answer_within_a_token_takes_all_of_it():
    """Section 4.2 knows tokens only. The tokens: the (0, 3), ab (4, 6), ##cd (6, 8), a full stop (8, 9)."""
    offsets = np.array(tokenize(UNCASED, "The abcd.")[1])
    assert offsets.tolist() == [[0, 3], [4, 6], [6, 8], [8, 9]]
    assert locate_answer(offsets, 4, 8) == (1, 2)
    assert locate_answer(offsets, 5, 7) == (1, 2)
    assert locate_answer(offsets, 5, 6) == (1, 1)
    assert locate_answer(offsets, 3, 5) == (1, 1)
    assert locate_answer(offsets, 0, 9) == (0, 3)
    assert locate_answer(offsets, 3, 4) is None  # the space
    assert locate_answer(offsets, 5, 5) is None
    assert locate_answer(offsets, 9, 12) is None
    assert locate_answer(np.zeros((0, 2), int), 0, 3) is None


@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    context=CONTEXTS,
    sizes=SIZES,
    start=st.integers(0, 200),
    length=st.integers(1, 12),
)
def test_positions_point_at_the_answers_tokens(tokenizer, context, sizes, start, length):
    """Count over the offsets that transformers returns for each of its windows."""
    assume(context)
    start %= len(context)
    end = min(start + length, len(context))
    data = encode_questions([ask(context, (start, end), question="the")], tokenizer, **sizes)
    expected = encode_stock(tokenizer, "the", context, sizes)
    assert len(data) == len(expected["input_ids"])
    needed = len(locate_slowly(tokenize(tokenizer, context)[1], start, end))
    for window, item in enumerate(data):
        segments = expected.sequence_ids(window)
        places = [
            position
            for position in locate_slowly(expected["offset_mapping"][window], start, end)
            if segments[position] == 1
        ]
        shown = needed and len(places) == needed
        assert (item["start_positions"], item["end_positions"]) == ((places[0], places[-1]) if shown else (0, 0))


@pytest.mark.parametrize(
    ("answer", "start"),
    [(".", -1), ("ab", 3), ("", 4), ("ab", 400), ("abcd.x", 4), (" ", 3)],
    ids=["from the end", "wrong place", "empty", "behind", "over the end", "a space"],
)
def test_an_answer_that_cannot_be_found_is_the_cls_token(answer, start):
    question = Question("q", "the?", "The abcd.", (answer,), (start,))
    data = encode_questions([question], UNCASED)
    assert [(item["start_positions"], item["end_positions"]) for item in data] == [(0, 0)]
    assert is_placed(question) is (answer == " ")


@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    context=TEXTS,
    places=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=3),
    longest=st.integers(1, 6),
)
def test_a_nearest_text_covers_its_answer_unless_it_is_too_long(tokenizer, context, places, longest):
    assume(context)
    places = [(start % len(context), start % len(context) + length) for start, length in places]
    data = encode_questions([ask(context, *places)], tokenizer, max_answer_length=longest)
    _, offsets = tokenize(tokenizer, context)
    expected = []
    for start, end in places:
        if found := locate_slowly(offsets, start, min(end, len(context))):
            expected.append(context[offsets[found[0]][0] : offsets[found[:longest][-1]][1]])
    assert express(data, 0) == expected


# --- Sequences --------------------------------------------------------------------------------------------------------


def encode_stock(tokenizer, question, context, sizes):
    """Return the windows of transformers, whose stride is the overlap, for a short enough question."""
    room = sizes["max_length"] - len(tokenize(tokenizer, question)[0]) - 3
    return tokenizer(
        question,
        context or " ",  # has no token either; an empty text would count as no context
        truncation="only_second",
        max_length=sizes["max_length"],
        stride=room - min(sizes["doc_stride"], room),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        split_special_tokens=True,
    )


def test_the_question_is_segment_a_and_the_window_segment_b():
    """Section 4.2: "we represent the input question and passage as a single packed sequence"."""
    data = encode_questions(
        [ask("The abcd, best.", (4, 8), question="The ab?")], UNCASED, max_length=10, doc_stride=2, max_query_length=8
    )
    assert [" ".join(UNCASED.convert_ids_to_tokens(item["input_ids"].tolist())) for item in data] == [
        "[CLS] the ab ? [SEP] the ab ##cd , [SEP]",
        "[CLS] the ab ? [SEP] ##cd , b ##e [SEP]",
        "[CLS] the ab ? [SEP] b ##e ##st . [SEP]",
    ]
    assert data[0]["token_type_ids"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [(item["start_positions"], item["end_positions"]) for item in data] == [(6, 7), (0, 0), (0, 0)]


@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    contexts=st.lists(CONTEXTS, min_size=1, max_size=2),
    pairs=st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=4),
    sizes=SIZES,
)
def test_sequences_are_those_of_transformers(tokenizer, contexts, pairs, sizes):
    """[CLS] question [SEP] window [SEP] for every window, by hand, and by transformers for short questions."""
    questions = [ask(contexts[index % len(contexts)], question=text) for text, index in pairs]
    data = encode_questions(questions, tokenizer, **sizes)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    long, place = 0, 0
    for number, question in enumerate(questions):
        query = tokenize(tokenizer, question.question)[0]
        long += len(query) > sizes["max_query_length"]
        short = len(query) <= sizes["max_query_length"]
        stock = encode_stock(tokenizer, question.question, question.context, sizes) if short else None
        query = query[: sizes["max_query_length"]]
        context = tokenize(tokenizer, question.context)[0]
        windows = cut_slowly(len(context), sizes["max_length"] - len(query) - 3, sizes["doc_stride"]) or [(0, 0)]
        if short:
            assert len(stock["input_ids"]) == len(windows)
        for index, (start, length) in enumerate(windows):
            ids, segments = data[place]["input_ids"], data[place]["token_type_ids"]
            assert ids.dtype == segments.dtype == np.int64
            assert ids.tolist() == [cls, *query, sep, *context[start : start + length], sep]
            assert segments.tolist() == [0] * (len(query) + 2) + [1] * (length + 1)
            assert len(ids) <= sizes["max_length"]
            assert data.owners[place] == number
            assert data.locate_first()[place] == len(query) + 2
            if short:
                assert ids.tolist() == stock["input_ids"][index]
                assert segments.tolist() == stock["token_type_ids"][index]
            place += 1
    assert len(data) == place
    assert data.shortened.sum() == long


def test_a_context_is_kept_once():
    contexts = ["The best ab. " * 5, "abcd " * 7]
    data = encode_questions([ask(contexts[index % 2]) for index in range(10)], UNCASED)
    assert len(data.context_ids) == len(data.offsets) == sum(len(tokenize(UNCASED, text)[0]) for text in contexts)
    assert data.contexts.tolist() == [0, 1] * 5


# --- Decoding ---------------------------------------------------------------------------------------------------------


def rank(scores):
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:20]


def decode_slowly(question, tokenizer, sizes, longest, starts, ends):
    """(text, start's score, end's score) of the best 20 spans, as the reference code finds them, and the null scores.

    starts, ends: a list of scores for each window of the question, over all positions of a padded batch.
    """
    query = tokenize(tokenizer, question.question)[0][: sizes["max_query_length"]]
    offsets = tokenize(tokenizer, question.context)[1]
    windows = cut_slowly(len(offsets), sizes["max_length"] - len(query) - 3, sizes["doc_stride"])
    owners = own_slowly(windows, len(offsets))
    rows = []
    for place, (begin, length) in enumerate(windows):
        shift = begin - len(query) - 2  # of the positions in the sequence to the tokens of the context
        for i in rank(starts[place]):
            for j in rank(ends[place]):
                if not begin <= i + shift <= j + shift < begin + length:
                    continue  # in the question, a special token or padding, or an end before its start
                if owners[i + shift] != place or j - i + 1 > longest:
                    continue
                text = question.context[offsets[i + shift][0] : offsets[j + shift][1]]
                rows.append((text, starts[place][i], ends[place][j]))
    best = {}
    for row in sorted(rows, key=lambda row: -(row[1] + row[2])):  # stable
        best.setdefault(row[0], row)
    pairs = [(start[0], end[0]) for start, end in zip(starts, ends, strict=True)]
    return list(best.values())[:20], min(pairs, key=sum)


def draw_scores(seed, shape):
    """Return start and end scores (W, T), exact in float32; scores in a row differ, but sums of two may be equal."""
    draw = np.random.default_rng(seed)
    return [
        torch.from_numpy(draw.permuted(np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1) / 4).float() for _ in "SE"
    ]


@given(
    tokenizer=st.sampled_from(TOKENIZERS),
    texts=st.lists(st.tuples(CONTEXTS, TEXTS), min_size=1, max_size=4),
    sizes=SIZES,
    longest=st.integers(1, 8),
    padding=st.integers(0, 4),
    seed=st.integers(0, 2**32),
    chunk=st.integers(1, 4),
)
def test_decoding_is_that_of_the_reference_code(tokenizer, texts, sizes, longest, padding, seed, chunk):
    questions = [ask(context, question=question) for context, question in texts]
    data = encode_questions(questions, tokenizer, max_answer_length=longest, **sizes)
    width = max(len(item["input_ids"]) for item in data) + padding
    starts, ends = draw_scores(seed, (len(data), width))
    kept = keep_top(starts, ends).numpy()
    answers = decode_windows(kept, data)
    assert len(answers) == len(questions)
    for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        rows = [scores[torch.from_numpy(data.owners == index)].tolist() for scores in (starts, ends)]
        expected, null = decode_slowly(question, tokenizer, sizes, longest, *rows)
        assert [span[:3] for span in answer.spans] == expected
        assert all(question.context[span.first : span.last] == span.text for span in answer.spans)
        assert answer.null == null
    with mock.patch.object(spans, "WINDOWS_A_CHUNK", chunk):
        assert decode_windows(kept, data) == answers


def test_positions_stay_exact_where_scores_are_coarse():
    """Scores in bfloat16, which cannot represent 383."""
    scores = torch.arange(384).to(torch.bfloat16).expand(2, 3, 384).clone()
    scores[:, :, 383] = 500.0
    kept = keep_top(*scores)
    assert kept.dtype == torch.float32
    for start in (0, 40):  # of the starts and of the ends
        values, places = kept[:, start : start + 20], kept[:, start + 20 : start + 40].long()
        assert (places[:, 0] == 383).all()
        assert values.tolist() == scores[0].float().gather(1, places).tolist()
        assert len(set(places[0].tolist())) == 20
        assert keep_top(*scores[:, :, :19])[:, start + 19].tolist() == [-torch.inf] * 3, "there is no twentieth"


def test_the_best_answer_and_how_much_rather_there_is_none():
    answer = Answer([Span("ab", 3.0, 1.5), Span("the", 2.0, 2.0)], (1.0, -0.25))
    assert answer.best[:3] == ("ab", 3.0, 1.5)
    assert answer.odds == 0.75 - 4.5
    assert Answer([], (1.0, -0.25)).best == ("", 0.0, 0.0, 0, 0)
    assert Answer([], (1.0, -0.25)).odds == 0.75


def test_more_texts_than_are_tokenized_at_once(monkeypatch):
    questions = [ask("The best ab. " * (index % 4), (4, 8), question="the " * (index % 5)) for index in range(11)]
    whole = encode_questions(questions, UNCASED, max_length=12, doc_stride=3, max_query_length=4)
    monkeypatch.setattr(spans, "CONTEXTS_A_BATCH", 3)
    again = encode_questions(questions, UNCASED, max_length=12, doc_stride=3, max_query_length=4)
    assert len(whole) == len(again) > 11
    for one, other in zip(whole, again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys())
