"""Next-sentence pairs (paper §3.1 and A.2), by the algorithm of the reference code's create_pretraining_data.py.

Pairs are planned from sentence lengths alone: the sentences of a document are contiguous in one flat array of token
ids, so both segments of a pair, truncated or not, are ranges of that array.

The random numbers of a chunk are a pure function of (seed, max_length, copy, document, the chunk's first sentence).
Therefore every document can be planned independently; each chunk begins later than the one before, so none is used
twice. The end of the chunk that would begin with a sentence is computed for all sentences in one vectorised step,
before it is known which of them begin a chunk. Only the first sentence of each chunk has to be stored until its pair is
needed.

Left out: masks (`masking.py`), and the shuffling of documents and pairs, which the data set does.
"""

from dataclasses import dataclass

import numpy as np

from bertkit.data.pretraining.rng import draw_below, draw_bits, draw_key, draw_uniform
from bertkit.data.pretraining.tokenize import Ids, TokenizedCorpus, start_of

SPECIAL_TOKENS_OF_PAIR = 3  # [CLS] A [SEP] B [SEP]
DOCUMENT_DRAWS = 10  # attempts to find another document than A's
SENTENCES_PLANNED_AT_ONCE = 1 << 15  # sentences planned in one block: their arrays stay in the cache

# Counters of the random numbers of one document: its target length, then one key for each of its sentences.
SHORT_DRAW, SHORT_LENGTH, FIRST_SENTENCE = range(3)
# Counters of one chunk. From CUT on, 64-bit words of fair bits truncate A and B alternately, as many as are needed.
A_END, RANDOM_NEXT, B_SENTENCE, B_DOCUMENT = range(4)
CUT = B_DOCUMENT + DOCUMENT_DRAWS


@dataclass(frozen=True, eq=False)
class Pairing:
    """The plan of one copy of a corpus: how it is divided into pairs."""

    corpus: TokenizedCorpus  # at least two documents
    max_length: int  # tokens of a pair with special tokens, at least 5
    seed: int
    copy: int = 0  # the index of the copy, as the reference code makes several copies of its data
    short_seq_prob: float = 0.1

    @property
    def budget(self) -> int:
        """Maximum number of tokens of both segments together."""
        return self.max_length - SPECIAL_TOKENS_OF_PAIR

    def locate_chunks(self) -> np.ndarray:
        """Return (P,) the first sentence of each chunk, in the order of the corpus; each chunk gives one pair.

        The data type is uint32, or int64 for a corpus of more than 4 billion sentences.
        """
        sizes = np.cumsum(self.corpus.document_ends - self.corpus.document_starts)
        dtype = np.uint32 if len(self.corpus.sentence_ends) < 1 << 32 else np.int64
        first, chunks = 0, []
        while first < len(sizes):
            full = np.searchsorted(sizes, start_of(sizes, first) + SENTENCES_PLANNED_AT_ONCE, side="right")
            stop = max(first + 1, int(full))
            chunks.append(self._find_in_block(np.arange(first, stop)).astype(dtype))
            first = stop
        return np.concatenate(chunks)

    def _find_in_block(self, documents: np.ndarray) -> np.ndarray:
        """Find the chunks of some consecutive documents, as `locate_chunks` does."""
        starts, ends = self.corpus.document_starts[documents], self.corpus.document_ends[documents]
        sizes = ends - starts
        owner = np.repeat(np.arange(len(documents)), sizes)  # (S,) of this block
        stops = np.cumsum(sizes)[owner]  # where the sentence's document ends within the block
        indices = np.arange(len(owner))
        offsets = indices - (stops - sizes[owner])  # within the document
        sentences = starts[owner] + offsets
        token_ends, token_starts = self.corpus.sentence_ends[sentences], start_of(self.corpus.sentence_ends, sentences)
        keys, targets = self._draw_targets(documents)
        # For every sentence: the end of the chunk that begins with it, and the first sentence of the next chunk.
        full = np.searchsorted(token_ends, token_starts + targets[owner]) + 1
        chunk_stops = np.minimum(full, stops)
        _, a_sizes, random_next = draw_chunks(keys[owner], offsets, chunk_stops - indices)
        return sentences[follow(np.where(random_next, indices + a_sizes, chunk_stops))]

    def _draw_targets(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the key of each document (K,), and the target length of its chunks in tokens (K,)."""
        keys = draw_bits(draw_key(self.seed, self.max_length, self.copy), documents)
        short = draw_uniform(keys, SHORT_DRAW) < self.short_seq_prob
        return keys, np.where(short, 2 + draw_below(keys, SHORT_LENGTH, self.budget - 1), self.budget)

    def draw_pairs(self, chunks: np.ndarray) -> np.ndarray:
        """Draw the pairs of chunks (P,), which are some of those of `locate_chunks` in any order and integer type.

        Returns:
            (P, 5) int64: a_start, a_stop, b_start, b_stop (token offsets) and random_next (0 or 1).
        """
        sentence_ends = self.corpus.sentence_ends
        chunks = chunks.astype(np.int64)
        documents = np.searchsorted(self.corpus.document_starts, chunks, side="right") - 1
        document_keys, targets = self._draw_targets(documents)
        a_start = start_of(sentence_ends, chunks)
        full = np.searchsorted(sentence_ends, a_start + targets) + 1
        chunk_stops = np.minimum(full, self.corpus.document_ends[documents])
        offsets = chunks - self.corpus.document_starts[documents]
        keys, a_sizes, random_next = draw_chunks(document_keys, offsets, chunk_stops - chunks)

        a_stop = sentence_ends[chunks + a_sizes - 1]
        b_start, b_stop = a_stop.copy(), sentence_ends[chunk_stops - 1]
        wanted = (targets - (a_stop - a_start))[random_next]
        b_start[random_next], b_stop[random_next] = draw_segments(
            self.corpus, keys[random_next], documents[random_next], wanted
        )

        # Tokens are removed one by one from the longer side, B in a tie: B keeps half of the budget, or what A leaves.
        kept_b = np.minimum(b_stop - b_start, np.maximum(self.budget - (a_stop - a_start), self.budget // 2))
        a_start, a_stop = cut(a_start, a_stop, self.budget - kept_b, keys, CUT)
        b_start, b_stop = cut(b_start, b_stop, kept_b, keys, CUT + 1)
        return np.stack([a_start, a_stop, b_start, b_stop, random_next], axis=1)


def draw_chunks(
    document_keys: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the random numbers of chunks that begin `offsets` (P,) sentences into their documents.

    Args:
        sizes: (P,) the number of sentences in each chunk.

    Returns:
        The keys, the number of sentences in A, and whether B is random, (P,) each.
    """
    keys = draw_bits(document_keys, FIRST_SENTENCE + offsets)
    return keys, 1 + draw_below(keys, A_END, sizes - 1), (sizes == 1) | (draw_uniform(keys, RANDOM_NEXT) < 0.5)


def follow(following: np.ndarray) -> np.ndarray:
    """Return the path 0, following[0], following[following[0]] and so on, until it leaves `following`."""
    following = following.tolist()
    visited, current = [], 0
    while current < len(following):
        visited.append(current)
        current = following[current]
    return np.array(visited, np.int64)


def draw_segments(
    corpus: TokenizedCorpus, keys: np.ndarray, own: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a random B for each pair: sentences of a document other than `own` (P,) until `wanted` (P,) tokens.

    B has at least one sentence and ends at the latest with its document. If all ten draws hit the own document, it is
    used.

    Returns:
        Start and stop of B in tokens, (P,) each.
    """
    document = own.copy()
    for attempt in range(DOCUMENT_DRAWS):
        again = np.flatnonzero(document == own)
        document[again] = draw_below(keys[again], B_DOCUMENT + attempt, corpus.document_count)
    document_start, document_end = corpus.document_starts[document], corpus.document_ends[document]
    first = document_start + draw_below(keys, B_SENTENCE, document_end - document_start)
    start = start_of(corpus.sentence_ends, first)
    last = np.maximum(first, np.searchsorted(corpus.sentence_ends, start + wanted))
    return start, corpus.sentence_ends[np.minimum(last, document_end - 1)]


def cut(
    start: np.ndarray, stop: np.ndarray, kept: np.ndarray, keys: np.ndarray, counter: int
) -> tuple[np.ndarray, np.ndarray]:
    """Truncate ranges to `kept` (P,) tokens.

    For each surplus token, a fair bit decides whether it is removed at the front or at the back.
    """
    surplus = np.maximum(stop - start - kept, 0)
    words = -(-surplus // 64)  # number of 64-bit words
    pair = np.repeat(np.arange(len(start)), words)
    word = np.arange(len(pair)) - np.repeat(np.cumsum(words) - words, words)
    bits = draw_bits(keys[pair], counter + 2 * word)
    bits >>= (64 - np.minimum(surplus[pair] - 64 * word, 64)).astype(np.uint64)  # the last word has surplus bits
    front = np.bincount(pair, np.bitwise_count(bits), len(start)).astype(np.int64)
    return start + front, stop - (surplus - front)


def assemble_pairs(ids: Ids, pairs: np.ndarray, *, cls_id: int, sep_id: int, pad_id: int) -> dict[str, np.ndarray]:
    """Assemble [CLS] A [SEP] B [SEP] of `pairs` (B, 5), padded at the end to the longest row.

    Args:
        ids: All tokens, concatenated, of any integer type; only the ranges in use are read.

    Returns:
        `input_ids`, `token_type_ids` and `attention_mask` (B, T) int64, and `lengths` (B,).
    """
    a_start, a_stop, b_start, b_stop = pairs[:, :4].T
    a_sep = 1 + a_stop - a_start
    b_sep = a_sep + 1 + b_stop - b_start
    lengths = b_sep + 1
    columns = np.arange(lengths.max())  # (T,)
    in_a = (columns > 0) & (columns < a_sep[:, None])  # (B, T)
    in_b = (columns > a_sep[:, None]) & (columns < b_sep[:, None])
    positions = np.where(
        in_a, a_start[:, None] + columns - 1, b_start[:, None] + columns - a_sep[:, None] - 1
    )  # in `ids`
    is_text = in_a | in_b
    input_ids = np.full(is_text.shape, pad_id, np.int64)
    input_ids[is_text] = ids.take(positions[is_text])
    input_ids[:, 0] = cls_id
    input_ids[np.arange(len(pairs)), a_sep] = sep_id
    input_ids[np.arange(len(pairs)), b_sep] = sep_id
    attention_mask = (columns < lengths[:, None]).astype(np.int64)
    token_type_ids = attention_mask * (columns > a_sep[:, None])
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "lengths": lengths,
    }
