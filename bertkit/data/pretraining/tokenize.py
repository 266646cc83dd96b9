"""Documents of sentences -> flat arrays of token ids, and the choice of held-out documents (paper §3.1).

Left out: the arrays on disk (`store.py`), pairs (`pairs.py`) and masks (`masking.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.pretraining.sources import Document
from bertkit.data.tokenizer import CachedTokenizer, get_backend, get_cached_tokenizer
from bertkit.errors import UsageError, pluralize

if TYPE_CHECKING:
    from transformers import BertTokenizerFast


CHARACTERS_A_BATCH = 1_000_000  # characters tokenized in one call
TOKENS_A_BLOCK = 1 << 24  # tokens counted in one block
Ids = Any  # a flat array of token ids: a numpy array, or several that are mapped from files (`ShardedIds`)
LEAST_DOCUMENTS = 2  # minimum per part: a random next segment comes from another document


@dataclass(frozen=True, eq=False)
class TokenizedCorpus:
    """Documents of token ids, without special tokens; no sentence and no document is empty.

    Document d has the sentences from `document_starts[d]` to `document_ends[d]`.
    """

    ids: Ids  # (N,) all tokens, concatenated; uint16 for a vocabulary of at most 65,536 tokens, else uint32
    sentence_ends: np.ndarray  # (S,) int64, the end offset of each sentence in tokens
    # document_ends, document_starts: (D,) int64 each, in the order of the corpus; `select` leaves some out
    document_ends: np.ndarray
    document_starts: np.ndarray = None  # type: ignore[assignment]
    directory: Path | None = None  # where `ids` and `sentence_ends` are mapped from; None if they are in memory
    word_offset: int = 0  # added to the ids of tokens that continue a word (`WordTokenizer`); 0: words are not known

    def __post_init__(self) -> None:
        """Let each document begin where the one before it ends, if no starts are given."""
        if self.document_starts is None:
            object.__setattr__(
                self, "document_starts", start_of(self.document_ends, np.arange(len(self.document_ends)))
            )

    @property
    def document_count(self) -> int:
        """The number of documents, D."""
        return len(self.document_ends)

    def locate_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and end offset of each document in tokens, (D,) int64 each."""
        return start_of(self.sentence_ends, self.document_starts), self.sentence_ends[self.document_ends - 1]

    def select(self, chosen: np.ndarray) -> "TokenizedCorpus":
        """Return the documents for which `chosen` (D,) is true; the tokens of the others stay in `ids`, unused."""
        return replace(self, document_starts=self.document_starts[chosen], document_ends=self.document_ends[chosen])

    def strip_words(self, ids: np.ndarray) -> np.ndarray:
        """Return ids of the vocabulary for those of this corpus, which also tell the words of the text."""
        return ids % self.word_offset if self.word_offset else ids

    def count_tokens(self, vocab_size: int) -> np.ndarray:
        """Return (V,) int64, how often each token occurs in the documents."""
        counts = np.zeros(vocab_size, np.int64)
        starts, ends = self.locate_tokens()
        # Adjacent documents are counted together.
        apart = starts[1:] != ends[:-1]
        first, last = np.append(True, apart)[: len(starts)], np.append(apart, True)[: len(starts)]
        for start, end in zip(starts[first].tolist(), ends[last].tolist(), strict=True):
            for begin in range(start, end, TOKENS_A_BLOCK):
                block = self.ids[begin : min(begin + TOKENS_A_BLOCK, end)]
                counts += np.bincount(self.strip_words(block), minlength=vocab_size)
        return counts


def start_of(ends: np.ndarray, index: np.ndarray | int) -> np.ndarray:
    """Return the start of element `index`: the end of the one before it, 0 for the first."""
    return np.where(np.asarray(index) > 0, ends[index - 1], 0)


def choose_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the data type of token ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class WordTokenizer:
    """A tokenizer of texts whose spaces are borders of words and nothing else, as in segmented Chinese.

    A text is tokenized without its spaces. A token belongs to the word in which it begins.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.offset = backend.get_vocab_size()

    def encode(self, texts: list[str], dtype: type[np.unsignedinteger]) -> tuple[np.ndarray, np.ndarray]:
        """Return what `CachedTokenizer.encode` returns; the ids of tokens that continue a word are larger by V."""
        words = [text.split() for text in texts]
        encodings = self.backend.encode_batch(["".join(text) for text in words], add_special_tokens=False)
        ids = [np.empty(0, dtype)]
        for text, encoding in zip(words, encodings, strict=True):
            owners = np.repeat(np.arange(len(text)), np.array([len(word) for word in text], int))  # word of a character
            begins = owners[np.array([start for start, _ in encoding.offsets], int)]  # (N,) word of a token
            continues = np.diff(begins, prepend=-1) == 0
            ids.append((np.array(encoding.ids, int) + self.offset * continues).astype(dtype))
        return np.concatenate(ids), np.array([len(encoding) for encoding in encodings], np.int64)


def tokenize_documents(
    documents: Iterable[Document], tokenizer: "BertTokenizerFast", words: str = ""
) -> TokenizedCorpus:
    """Tokenize documents; sentences without tokens and documents without sentences are left out.

    A special token written out in the text, such as `[MASK]` in the documentation of tokenizers, is tokenized as
    ordinary text, as in the reference code; transformers would treat it as a mask.

    Args:
        words: "spaces" if spaces are borders of words and nothing else.
    """
    if not words:
        return tokenize_part(documents, get_cached_tokenizer(tokenizer), choose_dtype(len(tokenizer)))[0]
    encoder = WordTokenizer(get_backend(tokenizer, "data.words"))
    corpus, _ = tokenize_part(documents, encoder, choose_dtype(2 * encoder.offset))
    return replace(corpus, word_offset=encoder.offset)


def tokenize_part(
    documents: Iterable[Document],
    words: CachedTokenizer | WordTokenizer,
    dtype: type[np.unsignedinteger],
    most_tokens: float = float("inf"),
) -> tuple[TokenizedCorpus, int]:
    """Tokenize documents as `tokenize_documents` does until they have `most_tokens` tokens.

    Returns:
        The corpus, and the number of documents read for it.
    """
    ids, lengths, sizes, count = [np.empty(0, dtype)], [np.empty(0, np.int64)], [], 0
    for batch in batch_documents(documents):
        encoded = words.encode([sentence for document in batch for sentence in document], dtype)
        ids.append(encoded[0])
        lengths.append(encoded[1])
        sizes += map(len, batch)
        count += len(encoded[0])
        if count >= most_tokens:
            break
    tokens, owners = np.concatenate(lengths), np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount(owners[tokens > 0])
    corpus = TokenizedCorpus(np.concatenate(ids), np.cumsum(tokens[tokens > 0]), np.cumsum(counts[counts > 0]))
    return corpus, len(sizes)


def batch_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents that together have at least `CHARACTERS_A_BATCH` characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document))
        if characters >= CHARACTERS_A_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def choose_held_out(count: int, share: float, seed: int) -> np.ndarray:
    """Draw the held-out documents from the seed and return them as (count,) bool.

    At least two documents are held out and two are not, as next-sentence prediction needs two. With fewer than four
    documents, none is held out.
    """
    size = min(max(round(share * count), LEAST_DOCUMENTS), count - LEAST_DOCUMENTS) if share and count >= 4 else 0
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(seed).permutation(count)[:size]] = True
    return chosen


def check_documents(count: int, has_pairs: bool = True) -> None:
    """Check that a corpus has enough documents.

    Args:
        has_pairs: Whether next sentences are predicted.
    """
    if has_pairs and count < LEAST_DOCUMENTS:
        raise UsageError(
            f"the corpus has {pluralize(count, 'document')}, but next-sentence prediction needs two; put a "
            "blank line between documents, name more sources, or leave it out with --set data.objective=mlm"
        )
    if not count:
        raise UsageError("the corpus has no text that the vocabulary knows; name sources with text")
