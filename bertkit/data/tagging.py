"""Words and tags <-> tokens, each sentence with as much of its document as fits (paper section 5.3).

A sequence is [CLS] context, sentence, context [SEP], with as many whole neighbouring sentences of the document as fit.
Only the words of the sentence itself are labelled, each at its first sub-token; words of the context are labelled in
their own sequences. The sentences of a document that fits show the same tokens: evaluation and prediction merge them
into one sequence, training only if documents stay together (`OrderedWords`). A word that the tokenizer drops, such as
control characters, stays and has no token.

Left out: files (`bertkit.data.formats.conll`) and scores (`bertkit.metrics`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex

from bertkit.data.formats.rows import Columns
from bertkit.data.scripts import UNSPACED
from bertkit.data.sequences import IGNORED, Items, Sequences
from bertkit.data.tags import mark_words
from bertkit.data.tokenizer import get_backend, get_cached_tokenizer
from bertkit.system.files import take_fingerprint

ABSENT = -1  # position of a word without a token
NEXT_DOCUMENTS = 256  # next documents that are searched for one that fills an update
WORD_LETTER = rf"(?:(?![{UNSPACED}\p{{Cf}}])[\w\p{{N}}]|\p{{M}})"
PART = rf"{WORD_LETTER}+"
# Up to three marks inside a word belong to it, as in "U.N" and "O'Neill's"; every other mark is a word. Combining
# characters, such as vowel signs, belong to the character before them; invisible ones alone are not words.
NONWORD = r"(?:\p{Cf}|[^\w\s\p{M}\p{N}\p{Cc}])"
CHARACTER = rf"(?:(?!\p{{M}})[{UNSPACED}]|\p{{P}}|(?!\p{{Cf}}){NONWORD})\p{{M}}*"
WORD = regex.compile(rf"{PART}(?:{NONWORD}{{1,3}}{PART}){{0,8}}|{CHARACTER}")
# BERT's basic tokens, further divided at marks that are not punctuation, such as € and ´, and in unspaced scripts.
BASIC_PART = rf"(?:(?!\p{{P}}){WORD_LETTER})+"
BASIC_WORD = regex.compile(rf"{BASIC_PART}(?:\p{{Cf}}{{1,3}}{BASIC_PART})*|{CHARACTER}")
BASIC = "basic"  # `BertConfig.text_words` of a model that is trained on spans of texts


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of words with one tag per word."""

    words: Sequence[str]
    tags: Sequence[str]  # the tags in IOB2
    official: Sequence[str]  # the tags as the file has them
    document: int  # the number of -DOCSTART- lines before the sentence
    line: int  # the line of its first word, or its row on the Hub, from 1
    # The entities of the file (first word, end, type) and their texts, if its spans are not all whole words; those
    # that are not begin at ABSENT, so that no prediction equals them. None: those of the tags
    entities: Mapping[tuple[int, int, str], str] | None = None
    content: str | None = None  # the text of an input with these words; None: the input is the words alone
    spans: Sequence[tuple[int, int]] = ()  # start and end of each word of an input, in characters or in words


@dataclass(frozen=True, eq=False)
class TaggedText:
    """The sentences of a file or of a split on the Hub."""

    source: str
    sentences: Sequence[Sentence]
    documents: int  # the number of -DOCSTART- lines; 0 if the source does not mark documents
    scheme: str  # IOB1, IOB2, IOBES or BILOU; words if each tag is the class of a word, and stays as it is
    odd: int  # the number of tags that do not follow the scheme
    rows: Columns | None = None  # the rows of the sentences in a person's own table; None for CoNLL files
    columns: tuple[str, str] = ("", "")  # the columns of a table that have the words or texts, and the tags or spans
    is_labelled: bool = True  # whether the sentences have tags; all are O if not
    text_words: str | None = None  # how a table's texts were divided into words, as in `BertConfig`
    asked_recall: float = 0.0  # the recall of names that a threshold of redaction is chosen for; 0: none is

    def take(self, numbers: np.ndarray) -> "TaggedText":
        """Return some of the sentences."""
        rows = None if self.rows is None else self.rows.take(numbers)
        return replace(self, sentences=[self.sentences[number] for number in numbers.tolist()], rows=rows)

    def list_kinds(self) -> set[str]:
        """Return the types of the entities, or the classes of words."""
        tags = {tag for sentence in self.sentences for tag in sentence.tags}
        return {tag[2:] for tag in mark_words([*tags], self.scheme)}

    def list_words(self) -> list[Sequence[str]]:
        """Return the words of each sentence; those of a text do not depend on `text_words`, so that splits stay."""
        if self.text_words is None:
            return [sentence.words for sentence in self.sentences]
        texts = self.rows.find(self.columns[0]).to_pylist()[: len(self.sentences)]
        return [[text[start:end] for start, end in split_words(text)] for text in texts]

    def number_documents(self) -> np.ndarray:
        """Return (S,) int64, ascending document numbers; each sentence is its own document if the source marks none."""
        if not self.documents:
            return np.arange(len(self.sentences))
        return np.array([sentence.document for sentence in self.sentences], np.int64)


@dataclass(frozen=True, eq=False)
class WordWindows(Items):
    """The S sequences of some sentences of M words, built on access; a long sentence has several."""

    text: TaggedText  # the sentences
    documents: np.ndarray  # (S,) ascending, the number of each sequence's document
    names: Sequence[str]  # the label names
    cls: int  # cls, sep: The ids of the two special tokens
    sep: int
    ids: np.ndarray  # (N,) tokens of all sentences, concatenated
    ends: np.ndarray  # (S,) the end offset of each sequence's own words in `ids`
    firsts: np.ndarray  # (M,) the index of each word's first token in `ids`, ABSENT if it has none
    word_ends: np.ndarray  # (S,) the end offset of each sequence's own words among all words
    labels: np.ndarray  # (M,) each word's label; that of O for a tag that is not among `names`
    starts: np.ndarray  # starts, stops: (S,) the range of `ids` that each sequence shows
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sequence: `input_ids`, `token_type_ids` and `labels` (T,) int64.

        Labels are IGNORED except at the first tokens of the sequence's own words.
        """
        shown = self.ids[self.starts[index] : self.stops[index]]
        ids = np.concatenate([[self.cls], shown, [self.sep]]).astype(np.int64)
        labels, positions = np.full_like(ids, IGNORED), self.locate(index)
        labels[positions[positions != ABSENT]] = self.labels[self._find_words(index)][positions != ABSENT]
        return {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "labels": labels}

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels."""
        words = (self.firsts, self.word_ends, self.labels)
        return take_fingerprint(json.dumps(self.names).encode(), self.ids, self.starts, self.stops, *words)

    def merge(self) -> "WordWindows":
        """Return the windows: adjacent sequences that show the same tokens are one, with the words of all of them."""
        is_last = np.append(np.diff(self.starts) | np.diff(self.stops), 1) != 0
        names = ("documents", "ends", "word_ends", "starts", "stops")
        return replace(self, **{name: getattr(self, name)[is_last] for name in names})

    def locate(self, index: int) -> np.ndarray:
        """Return (words,) int64, the position of each word's first token in the sequence, or ABSENT."""
        firsts = self.firsts[self._find_words(index)]
        return np.where(firsts == ABSENT, ABSENT, firsts - self.starts[index] + 1)  # after [CLS]

    def locate_all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Locate all words that have a token.

        Returns:
            (M,) positions in their sequences, (S,) cumulative number of words up to each sequence, and (M,) labels.
        """
        known = self.firsts != ABSENT
        owners = np.repeat(np.arange(len(self)), np.diff(self.word_ends, prepend=0))[known]
        positions = self.firsts[known] - self.starts[owners] + 1
        return positions, np.cumsum(np.bincount(owners, minlength=len(self))), self.labels[known]

    def flatten(self) -> Sequences:
        """Return all sequences in flat arrays, without labels."""
        parts = [self[index]["input_ids"].astype(np.int32) for index in range(len(self))]
        ends = np.cumsum([len(part) for part in parts])
        return Sequences(np.concatenate(parts), ends, np.zeros_like(ends), None)

    def _find_words(self, index: int) -> slice:
        """Return the slice of a sequence's own words among all words."""
        return slice(self.word_ends[index - 1] if index else 0, self.word_ends[index])

    def join(self, rows: Sequence[Sequence[Any]], absent: Any) -> list[list[Any]]:
        """Return the value of each word of every sentence.

        Args:
            rows: For each sequence the values of its own words with a token.
            absent: The value of words without a token.
        """
        values = chain.from_iterable(rows)
        words = iter([absent if first == ABSENT else next(values) for first in self.firsts.tolist()])
        return [list(islice(words, len(sentence.words))) for sentence in self.text.sentences]

    @property
    def absent(self) -> str:
        """Return the tag of a word without a token."""
        return "O" if "O" in self.names else self.names[0]

    def name_tags(self, rows: Sequence[np.ndarray]) -> list[list[str]]:
        """Return the tags of every sentence, from labels as for `join`; words without a token are O or the first."""
        return self.join([[self.names[label] for label in row] for row in rows], self.absent)


def split_words(text: str, text_words: str | None = None) -> list[tuple[int, int]]:
    """Return the start and end offsets of each word of a text; `text_words` is as in `BertConfig`."""
    return [found.span() for found in (WORD if text_words is None else BASIC_WORD).finditer(text)]


def group_tokens(text: str, offsets: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the start and end offsets of each word of a text, and (n,) the word of each of its tokens.

    Words are those of `split_words`; words that share a token, such as a row of unknown emoji, are one. A token outside
    all words is a word.

    Args:
        offsets: (n, 2) start and end character of each token.
    """
    spans = sorted(split_words(text) + list(map(tuple, offsets.tolist())))
    words: list[tuple[int, int]] = []
    for start, end in spans:
        if words and start < words[-1][1]:
            words[-1] = words[-1][0], max(words[-1][1], end)
        else:
            words.append((start, end))
    starts = [start for start, _ in words]
    return words, np.searchsorted(starts, offsets[:, 0], "right") - 1


def encode_words(
    text: TaggedText, names: Sequence[str], tokenizer: Any, max_length: int = 512, context: bool = True
) -> WordWindows:
    """Encode each sentence of a text as one sequence of at most `max_length` tokens.

    A sentence that does not fit by itself has several sequences: each has a part of it, at most half of the room, and
    the rest of the sentence as context. A word that does not fit is truncated.

    Args:
        names: The label names, O among them.
        context: Whether to include neighbouring sentences of the document.
    """
    get_backend(tokenizer, "tagging")  # entities are characters of a text
    sentences, room = text.sentences, max_length - 2
    words = [word for sentence in sentences for word in sentence.words]
    ids, lengths = get_cached_tokenizer(tokenizer).encode(words, np.int32)
    if (lengths > room).any():
        edges = np.append(0, np.cumsum(lengths))
        lengths = np.minimum(lengths, room)
        ids = np.concatenate([ids[start : start + kept] for start, kept in zip(edges, lengths, strict=False)])
    edges = np.append(0, np.cumsum(lengths))  # (M + 1,) tokens before each word
    word_ends, owners = divide_long(np.cumsum([len(sentence.words) for sentence in sentences]), edges, room)
    ends = edges[word_ends]
    documents = (text.number_documents() if context else np.arange(len(sentences)))[owners]
    starts, stops = fit_context(ends, documents, room)
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers.get(tag, numbers.get("O", 0)) for sentence in sentences for tag in sentence.tags]
    return WordWindows(
        text,
        documents,
        names,
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        ids=ids,
        ends=ends,
        firsts=np.where(lengths > 0, edges[:-1], ABSENT),
        word_ends=word_ends,
        labels=np.array(labels, np.int64),
        starts=starts,
        stops=stops,
    )


def divide_long(ends: np.ndarray, edges: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the words of sentences longer than `room` into parts of at most half of it, or of one longer word.

    Args:
        ends: (sentences,) the end offset of each sentence's words.
        edges: (M + 1,) tokens before each word.

    Returns:
        (S,) the end offset of each part's words, and (S,) the part's sentence.
    """
    parts, owners = [], []
    for sentence, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        most = room // 2 if edges[end] - edges[start] > room else room
        while start < end or owners[-1:] != [sentence]:
            reached = int(np.searchsorted(edges, edges[start] + most, "right")) - 1
            start = min(max(reached, start + 1), end)
            parts.append(start)
            owners.append(sentence)
    return np.array(parts), np.array(owners)


def fit_context(ends: np.ndarray, documents: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens to show with each sentence: the sentence and whole neighbouring sentences of its document.

    Sentences to the left may fill half of the free room, sentences to the right the rest, and sentences to the left
    again what is then still free. The sentence is therefore in the middle if its document reaches far enough on both
    sides, and no further neighbour would fit on either side.

    Args:
        ends: (S,) the end offset of each sentence in tokens; no sentence is longer than `room`.
        documents: (S,) ascending document numbers.

    Returns:
        The first token and the end of the range, (S,) each.
    """
    edges = np.append(0, ends)  # (S + 1,)
    begin, end = edges[:-1], edges[1:]
    first, last = (np.searchsorted(documents, documents, side) for side in ("left", "right"))

    def reach_left(budget: np.ndarray) -> np.ndarray:
        return edges[np.maximum(np.searchsorted(edges, begin - budget, "left"), first)]

    def reach_right(budget: np.ndarray) -> np.ndarray:
        return edges[np.minimum(np.searchsorted(edges, end + budget, "right") - 1, last)]

    spare = room - (end - begin)
    stops = reach_right(spare - (begin - reach_left(spare // 2)))
    return reach_left(spare - (stops - end)), stops


@dataclass(eq=False)
class OrderedWords:
    """The S sequences of some sentences for training, document after document, in another order in every epoch."""

    words: WordWindows  # the sequences
    size: int  # the number of sequences in an update
    seed: int  # decides the orders

    def __post_init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the order of an epoch, from 0; accelerate's data loader calls it."""
        self.order = order_documents(self.words.documents, self.size, np.random.default_rng((self.seed, epoch)))

    def __len__(self) -> int:
        return len(self.words)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the sequences at some positions; those that show the same tokens are one, with all their labels."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for number in self.order[indices]:
            item = self.words[number]
            window = found.setdefault((self.words.starts[number], self.words.stops[number]), item)
            np.maximum(window["labels"], item["labels"], out=window["labels"])  # IGNORED is less than any label
        return list(found.values())

    def fingerprint(self) -> str:
        """Return a fingerprint of the sequences and labels."""
        return self.words.fingerprint()


def order_documents(documents: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    """Return (S,) the numbers of sequences in a random order of documents (S,), few of which are divided by updates.

    An update begins with the next document, then takes the longest of NEXT_DOCUMENTS that fits, and if none does, a
    part of the next one. Documents longer than an update are divided first.
    """
    bounds = pairwise([0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)])
    parts = [range(first, min(first + size, end)) for start, end in bounds for first in range(start, end, size)]
    waiting, order = [parts[number] for number in draw.permutation(len(parts))], []
    while waiting:
        free = size - len(order) % size
        near = waiting[: NEXT_DOCUMENTS if free < size else 1]
        chosen = max((part for part in near if len(part) <= free), key=len, default=near[0])
        waiting.remove(chosen)
        order += chosen[:free]
        if rest := chosen[free:]:
            waiting.insert(0, rest)
    return np.array(order)


@dataclass(frozen=True, eq=False)
class Features(Items):
    """S sequences of words with the activations of each word's first token, on disk."""

    path: Path  # a .npy file (M, K, H)
    ends: np.ndarray  # (S,) the number of words up to each sequence's end
    labels: np.ndarray  # (M,) the labels of the words

    @cached_property
    def values(self) -> np.ndarray:
        """Return the activations (M, K, H), memory-mapped from the file."""
        return np.load(self.path, mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory map, which every process opens itself."""
        return {name: value for name, value in self.__dict__.items() if name != "values"}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return one sequence: `features` (W, K, H) and `labels` (W,)."""
        words = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return {"features": self.values[words], "labels": self.labels[words]}
