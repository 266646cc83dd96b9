"""Statistics of a tokenized corpus: sizes, lengths, unknown tokens, repeats, and the padding of its pairs.

Repeated text is the usual cause of a pretraining with a good loss and a bad model, and padding determines the cost of
the paper's phase 1 (A.2). All values are exact and computed block by block: only some of the tokens are in memory, some
50 bytes per sentence and four bytes per pair. The first occurrence of repeated text in the corpus is kept.

Repeats are found by 64-bit hashes of token ids: among 200 million lines, two different ones have the same hash with a
probability of 0.1 %.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from bertkit.data.pretraining.pairs import SPECIAL_TOKENS_OF_PAIR, Pairing
from bertkit.data.pretraining.rng import draw_bits
from bertkit.data.pretraining.sources import MARKED_UP, warn_of_markup
from bertkit.data.pretraining.tokenize import LEAST_DOCUMENTS, Ids, TokenizedCorpus, check_documents, start_of

TOKENS_A_HASH = 1 << 18  # tokens counted and hashed in one block: their arrays stay in the cache
PAIRS_A_BLOCK = 1 << 16  # pairs drawn in one block
PHASE_LENGTHS = (128, 512)  # tokens per sequence in the paper's phases (A.2)
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
LENGTHS = {
    "sentence_tokens": "tokens per sentence",
    "document_sentences": "sentences per document",
    "document_tokens": "tokens per document",
}
MOST_UNKNOWN = 0.05  # share of the tokens above which a warning is given
MOST_RANDOM = 0.75  # share of random next sentences: Wikipedia has 0.53, documents of two sentences have 0.68
MOST_REPEATED = {"documents": 0.01, "lines": 0.10}  # share of the documents; share of the tokens

Unit = Literal["documents", "lines"]


def measure(corpus: TokenizedCorpus, unknown_id: int) -> dict[str, Any]:
    """Compute the statistics of a whole corpus.

    Rates and shares are fractions. `padding` is the share of [PAD] among all tokens of the pairs of copy 0, seed 0.
    """
    check_documents(corpus.document_count, has_pairs=False)
    ids = corpus.ids
    blocks = (ids[start : start + TOKENS_A_HASH] for start in range(0, len(ids), TOKENS_A_HASH))
    unknown = sum(int(np.count_nonzero(corpus.strip_words(block) == unknown_id)) for block in blocks)
    return {
        "documents": corpus.document_count,
        "sentences": len(corpus.sentence_ends),
        "tokens": len(ids),
        "unknown_rate": unknown / max(len(ids), 1),
        "sentence_tokens": describe(corpus.sentence_ends),
        "document_sentences": describe(corpus.document_ends),
        "document_tokens": describe(corpus.locate_tokens()[1]),
        "repeated": measure_repeats(corpus),
        "pairs": {str(length): measure_pairs(corpus, length) for length in PHASE_LENGTHS},
    }


def describe(ends: np.ndarray) -> dict[str, Any]:
    """Return mean, quantiles and maximum of the lengths of units that end at `ends` (U,).

    A quantile is the smallest length that this share of the units does not exceed.
    """
    counts = np.bincount(np.diff(ends, prepend=0))
    shares = np.cumsum(counts) / max(len(ends), 1)
    return {
        "mean": float(ends[-1] / len(ends)) if len(ends) else 0.0,
        **{name: int(np.searchsorted(shares, share - 1e-12)) for name, share in QUANTILES.items()},
        "longest": max(len(counts) - 1, 0),
    }


# --- Repeats ----------------------------------------------------------------------------------------------------------


def measure_repeats(corpus: TokenizedCorpus) -> dict[str, Any]:
    """Count the documents and lines that occurred before, and their share of all tokens.

    A line is a sentence of the corpus; lines of repeated documents count too.
    """
    found: dict[str, Any] = {}
    for unit, ends in (("documents", corpus.locate_tokens()[1]), ("lines", corpus.sentence_ends)):
        repeated = mark_repeats(hash_units(corpus.ids, ends))
        tokens = int(np.diff(ends, prepend=0)[repeated].sum())
        found[unit] = {"count": int(np.count_nonzero(repeated)), "token_share": tokens / max(len(corpus.ids), 1)}
    return found


def choose_kept(corpus: TokenizedCorpus, unit: Unit) -> np.ndarray:
    """Return (S,) bool, the sentences that remain when repeats are removed.

    "documents" removes documents whose tokens occurred before. "lines" also removes each remaining sentence whose
    tokens occurred before.
    """
    repeated = mark_repeats(hash_units(corpus.ids, corpus.locate_tokens()[1]))
    kept = np.repeat(~repeated, np.diff(corpus.document_ends, prepend=0))
    if unit == "lines":
        kept[kept] = ~mark_repeats(hash_units(corpus.ids, corpus.sentence_ends)[kept])
    return kept


def select_sentences(corpus: TokenizedCorpus, kept: np.ndarray) -> TokenizedCorpus:
    """Return the corpus of the sentences for which `kept` (S,) is true; documents without any are left out."""
    lengths = np.diff(corpus.sentence_ends, prepend=0)
    owners = np.repeat(np.arange(corpus.document_count), np.diff(corpus.document_ends, prepend=0))
    counts = np.bincount(owners[kept], minlength=corpus.document_count)
    ids = corpus.ids[0 : len(corpus.ids)]
    return TokenizedCorpus(ids[np.repeat(kept, lengths)], np.cumsum(lengths[kept]), np.cumsum(counts[counts > 0]))


def hash_units(ids: Ids, ends: np.ndarray) -> np.ndarray:
    """Return (U,) uint64, a hash of the tokens of each unit that ends at `ends` (U,).

    The hash is the sum of a random number for each (token, position), mixed with the length. Equal units have equal
    hashes.
    """
    hashes = np.zeros(len(ends), np.uint64)
    for start in range(0, len(ids), TOKENS_A_HASH):
        block = ids[start : start + TOKENS_A_HASH]
        first = np.searchsorted(ends, start, side="right")  # the unit of the block's first token
        stop = np.searchsorted(ends, start + len(block) - 1, side="right") + 1
        begins = start_of(ends, np.arange(first, stop)) - start  # below 0 where the unit began in an earlier block
        inside = np.maximum(begins, 0)
        positions = np.arange(len(block)) - np.repeat(begins, np.diff(inside, append=len(block)))
        hashes[first:stop] += np.add.reduceat(draw_bits(block.astype(np.uint64), positions), inside)
    return draw_bits(hashes, np.diff(ends, prepend=0))


def mark_repeats(hashes: np.ndarray) -> np.ndarray:
    """Return (U,) bool, the units whose hash occurred before."""
    order = np.argsort(hashes, kind="stable")  # equal hashes stay in the order of the corpus
    ordered, repeated = hashes[order], np.zeros(len(hashes), bool)
    repeated[order[1:][ordered[1:] == ordered[:-1]]] = True
    return repeated


# --- Pairs ------------------------------------------------------------------------------------------------------------


def measure_pairs(corpus: TokenizedCorpus, max_length: int) -> dict[str, Any]:
    """Return the number of pairs of copy 0 at this length, their share of padding, and of random next segments."""
    pairing = Pairing(corpus, max_length=max_length, seed=0)
    chunks = pairing.locate_chunks()
    tokens = random_next = 0
    for start in range(0, len(chunks), PAIRS_A_BLOCK):
        a_start, a_stop, b_start, b_stop, is_random = pairing.draw_pairs(chunks[start : start + PAIRS_A_BLOCK]).T
        tokens += int((a_stop - a_start + b_stop - b_start + SPECIAL_TOKENS_OF_PAIR).sum())
        random_next += int(is_random.sum())
    return {
        "pairs": len(chunks),
        "padding": 1 - tokens / (len(chunks) * max_length),
        "random_next": random_next / len(chunks),
    }


# --- Text -------------------------------------------------------------------------------------------------------------


def list_warnings(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line with the remedy for each unusual property of a corpus."""
    if (rate := statistics["unknown_rate"]) > MOST_UNKNOWN:
        yield (
            f"warning: {rate:.1%} of the tokens are [UNK]; train a vocabulary on this text (bertkit vocab) or name one "
            "for its language with --vocab"
        )
    yield from warn_of_markup(statistics.get(MARKED_UP, [0]), statistics["sentences"])
    documents = statistics["repeated"]["documents"]["count"] / max(statistics["documents"], 1)
    if statistics["documents"] < LEAST_DOCUMENTS:
        yield "warning: one document is too few for next-sentence prediction; train with --set data.objective=mlm"
    yield from warn_of_random(statistics["pairs"][str(PHASE_LENGTHS[0])]["random_next"])
    lines = statistics["repeated"]["lines"]["token_share"]
    if lines > MOST_REPEATED["lines"]:
        yield f"warning: repeated lines hold {lines:.1%} of the tokens; drop them with --deduplicate lines"
    elif documents > MOST_REPEATED["documents"]:
        yield f"warning: {documents:.1%} of the documents are repeats; drop them with --deduplicate documents"


def warn_of_random(share: float) -> Iterator[str]:
    """Yield a line with the remedy if this share of random next sentences is far above half (3.1)."""
    if share > MOST_RANDOM:
        yield (
            f"warning: {share:.0%} of the next sentences are random instead of half, as documents have one sentence or "
            "very long ones; put blank lines between whole documents only, or train with --set data.objective=mlm"
        )


def list_rows(statistics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and formatted values, for a table."""
    yield from _list_sizes(statistics)
    if before := statistics.get("before"):
        yield from ((f"before removal: {name}", value) for name, value in _list_sizes(before))
    for rule, (count, *examples) in statistics.get("left_out", {}).items():
        yield f"left out: {rule}", f"{count:,}: {'; '.join(examples)}"
    yield "characters read", f"{statistics['characters']:,}"
    yield "vocabulary", f"{statistics['vocab_size']:,} tokens"
    yield "unknown tokens", f"{statistics['unknown_rate']:.3%}"
    for key, name in LENGTHS.items():
        lengths = statistics[key]
        quantiles = ", ".join(f"{quantile} {lengths[quantile]:,}" for quantile in QUANTILES)
        yield name, f"mean {lengths['mean']:,.1f}, {quantiles}, longest {lengths['longest']:,}"
    for length, pairs in statistics["pairs"].items():
        yield (
            f"pairs of {length} tokens",
            f"{pairs['pairs']:,}, {pairs['padding']:.1%} padding, {pairs['random_next']:.1%} random next",
        )


def _list_sizes(statistics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("documents", "sentences", "tokens"):
        yield key, f"{statistics[key]:,}"
    for unit, repeated in statistics["repeated"].items():
        yield f"repeated {unit}", f"{repeated['count']:,} ({repeated['token_share']:.2%} of the tokens)"
