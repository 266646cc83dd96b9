"""Next-sentence pairs (paper §3.1 and A.2), by the algorithm of the reference code's create_pretraining_data.py.

Pairs are planned from the lengths of sentences alone: the sentences of a document lie side by side in one flat array of
token ids, so both segments of a pair, cut or not, are ranges of that array, and a plan is five integers a pair.

The random numbers of a chunk are a pure function of (seed, max_length, copy, document, the chunk's first sentence). So
every document can be planned apart; each chunk begins later than the one before, so no number is used twice; and where
the chunk of a sentence ends and the next begins is worked out for all sentences at once, before it is known which of
them begin a chunk.

Left out: masks (`bertkit.data.masking`), and the shuffling of documents and pairs, which is the data set's work.
"""

import numpy as np

from bertkit.data.masking import draw_bits, draw_key, draw_uniform
from bertkit.errors import UsageError

SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
DOCUMENT_DRAWS = 10  # attempts to find another document than A's
BLOCK = 1 << 15  # sentences that are planned at once: their arrays stay in the cache

# What a random number decides. Counters of one document: its target length, then one key for each of its sentences.
SHORT, SHORT_LENGTH, FIRST_SENTENCE = range(3)
# Counters of one chunk. The words of fair bits that cut A and B alternate from CUT on, as many as are needed.
A_END, RANDOM_NEXT, B_SENTENCE, B_DOCUMENT = range(4)
CUT = B_DOCUMENT + DOCUMENT_DRAWS


def plan_pairs(
    sentence_ends: np.ndarray,
    document_ends: np.ndarray,
    *,
    max_length: int,
    short_seq_prob: float = 0.1,
    seed: int,
    copy: int = 0,
    documents: range | None = None,
) -> np.ndarray:
    """(P, 5) int64, a pair a row: a_start, a_stop, b_start, b_stop (offsets of tokens) and random_next (0 or 1).

    `sentence_ends` (S,) int64 are the tokens up to each sentence's end, `document_ends` (D,) the sentences up to each
    document's end; both grow strictly, for no sentence and no document is empty. Pairs are in the order of the corpus.
    `documents`, a range of step 1, plans the pairs of these alone: the same pairs as in the plan of all.

    Raises:
        UsageError: fewer than two documents, `max_length` below 5, or a `short_seq_prob` outside 0..1.
    """
    sentence_ends, document_ends = np.asarray(sentence_ends, np.int64), np.asarray(document_ends, np.int64)
    total = len(document_ends)
    if total < 2:
        raise UsageError(
            f"the corpus has {total} document{'s' * (total != 1)}; "
            "next-sentence prediction needs at least two documents; separate documents by a blank line"
        )
    if max_length < SPECIAL_TOKENS + 2:
        raise UsageError(f"max_length is {max_length}; a pair with its three special tokens needs at least 5")
    if not 0 <= short_seq_prob <= 1:
        raise UsageError(
            f"short_seq_prob is {short_seq_prob}; a probability from 0 to 1 was expected (the paper's is 0.1)"
        )
    if np.any(start_of(document_ends, np.arange(total)) >= document_ends) or document_ends[-1] != len(sentence_ends):
        raise ValueError("document_ends must grow strictly and end with the number of sentences")

    documents = range(total) if documents is None else documents
    if documents != range(total)[documents.start : documents.stop]:
        raise ValueError(f"{documents} is not a range of step 1 within {total} documents")
    key = draw_key(seed, max_length, copy)
    plans = [np.empty((0, 5), np.int64)]
    first = documents.start
    while first < documents.stop:
        full = np.searchsorted(document_ends, start_of(document_ends, first) + BLOCK, side="right")
        stop = min(max(first + 1, int(full)), documents.stop)
        plans.append(plan_block(sentence_ends, document_ends, first, stop, key, max_length, short_seq_prob))
        first = stop
    return np.concatenate(plans)


def plan_block(
    sentence_ends: np.ndarray,
    document_ends: np.ndarray,
    first: int,
    stop: int,
    key: np.ndarray,
    max_length: int,
    short_seq_prob: float,
) -> np.ndarray:
    """The pairs of documents `first` to `stop`, as in `plan_pairs`."""
    documents = np.arange(first, stop)
    document_starts = start_of(document_ends, documents)
    begin, end = document_starts[0], document_ends[stop - 1]
    ends = sentence_ends[begin:end]  # (S,), of this block
    starts = start_of(sentence_ends, np.arange(begin, end))
    if np.any(starts >= ends):
        raise ValueError("sentence_ends must grow strictly: a sentence has no token")

    budget = max_length - SPECIAL_TOKENS
    document_keys = draw_bits(key, documents)
    short = draw_uniform(document_keys, SHORT) < short_seq_prob
    short_target = 2 + draw_below(document_keys, SHORT_LENGTH, budget - 1)
    targets = np.where(short, short_target, budget)

    # For every sentence: the chunk that begins with it, and the sentence that the next chunk begins with.
    owner = np.repeat(np.arange(stop - first), document_ends[first:stop] - document_starts)
    sentences = np.arange(end - begin)
    keys = draw_bits(document_keys[owner], FIRST_SENTENCE + begin + sentences - document_starts[owner])
    full = np.searchsorted(ends, starts + targets[owner]) + 1
    chunk_stops = np.minimum(full, document_ends[documents[owner]] - begin)
    sizes = chunk_stops - sentences
    a_stops = sentences + 1 + draw_below(keys, A_END, sizes - 1)
    random_next = (sizes == 1) | (draw_uniform(keys, RANDOM_NEXT) < 0.5)
    chunks = follow(np.where(random_next, a_stops, chunk_stops))  # (P,), a document's end is the start of the next

    keys, random_next, owner = keys[chunks], random_next[chunks], owner[chunks]
    a_start, a_stop = starts[chunks], ends[a_stops[chunks] - 1]
    b_start, b_stop = a_stop.copy(), ends[chunk_stops[chunks] - 1]
    wanted = targets[owner] - (a_stop - a_start)
    b_start[random_next], b_stop[random_next] = draw_segments(
        sentence_ends, document_ends, keys[random_next], documents[owner[random_next]], wanted[random_next]
    )

    # One token at a time from the longer side, a tie from B: B keeps its half of the budget, or what A leaves free.
    kept_b = np.minimum(b_stop - b_start, np.maximum(budget - (a_stop - a_start), budget // 2))
    a_start, a_stop = cut(a_start, a_stop, budget - kept_b, keys, CUT)
    b_start, b_stop = cut(b_start, b_stop, kept_b, keys, CUT + 1)
    return np.stack([a_start, a_stop, b_start, b_stop, random_next], axis=1)


def follow(following: np.ndarray) -> np.ndarray:
    """The path 0, following[0], following[following[0]] and so on, as far as `following` reaches."""
    following = following.tolist()
    visited, current = [], 0
    while current < len(following):
        visited.append(current)
        current = following[current]
    return np.array(visited, np.int64)


def draw_segments(
    sentence_ends: np.ndarray, document_ends: np.ndarray, keys: np.ndarray, own: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop (P,) of a random B: sentences of another document than `own` (P,) until `wanted` (P,) tokens.

    At least one sentence, and no more than the document has. All ten draws may hit the own document; then it serves.
    """
    document = own.copy()
    for attempt in range(DOCUMENT_DRAWS):
        again = np.flatnonzero(document == own)
        document[again] = draw_below(keys[again], B_DOCUMENT + attempt, len(document_ends))
    document_start = start_of(document_ends, document)
    first = document_start + draw_below(keys, B_SENTENCE, document_ends[document] - document_start)
    start = start_of(sentence_ends, first)
    last = np.maximum(first, np.searchsorted(sentence_ends, start + wanted))
    return start, sentence_ends[np.minimum(last, document_ends[document] - 1)]


def cut(
    start: np.ndarray, stop: np.ndarray, kept: np.ndarray, keys: np.ndarray, counter: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of at most `kept` (P,) tokens: for each surplus token a fair bit says whether front or back loses it."""
    surplus = np.maximum(stop - start - kept, 0)
    words = -(-surplus // 64)  # draws of 64 bits
    pair = np.repeat(np.arange(len(start)), words)
    word = np.arange(len(pair)) - np.repeat(np.cumsum(words) - words, words)
    bits = draw_bits(keys[pair], counter + 2 * word)
    bits >>= (64 - np.minimum(surplus[pair] - 64 * word, 64)).astype(np.uint64)  # the last word has more than needed
    front = np.bincount(pair, np.bitwise_count(bits), len(start)).astype(np.int64)
    return start + front, stop - (surplus - front)


def draw_below(keys: np.ndarray, counter: int, bounds: np.ndarray | int) -> np.ndarray:
    """Uniform integers in 0..bounds - 1 (0 where the bound is 0)."""
    return (draw_uniform(keys, counter) * bounds).astype(np.int64)


def start_of(ends: np.ndarray, index: np.ndarray | int) -> np.ndarray:
    """Where element `index` starts: the end of the one before it, 0 for the first."""
    return np.where(np.asarray(index) > 0, ends[index - 1], 0)


def assemble_pairs(
    ids: np.ndarray, pairs: np.ndarray, *, cls_id: int, sep_id: int, pad_id: int, pad_to: int | None = None
) -> dict[str, np.ndarray]:
    """[CLS] A [SEP] B [SEP] of `pairs` (B, 5), padded at the end to the longest row or to `pad_to` tokens.

    `input_ids`, `token_type_ids` and `attention_mask` are (B, T) int64, `lengths` (B,). `ids` is the flat array of all
    tokens, of any integer type; only the ranges in use are read, so it may be a memory map.
    """
    a_start, a_stop, b_start, b_stop = pairs[:, :4].T
    a_sep = 1 + a_stop - a_start
    b_sep = a_sep + 1 + b_stop - b_start
    lengths = b_sep + 1
    rows, columns = np.arange(len(pairs)), np.arange(lengths.max() if pad_to is None else pad_to)
    input_ids = np.full((len(rows), len(columns)), pad_id, np.int64)
    input_ids[:, 0] = cls_id
    input_ids[rows, a_sep] = sep_id
    input_ids[rows, b_sep] = sep_id
    ids = np.asarray(ids)
    ranges = zip(input_ids, pairs[:, :4].tolist(), a_sep.tolist(), b_sep.tolist(), strict=True)
    for row, (a_first, a_end, b_first, b_end), a_end_column, b_end_column in ranges:
        row[1:a_end_column] = ids[a_first:a_end]
        row[a_end_column + 1 : b_end_column] = ids[b_first:b_end]
    attention_mask = (columns < lengths[:, None]).astype(np.int64)
    token_type_ids = attention_mask * (columns > a_sep[:, None])
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "lengths": lengths,
    }
