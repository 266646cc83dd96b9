"""Words and tags <-> tokens, each sentence amid as much of its document as fits (paper section 5.3).

A sequence is [CLS] context, sentence, context [SEP]: as many whole neighbouring sentences of the document as there is
room for. Only the sentence's own words are labelled, each on its first sub-token; the context's are in sequences of
their own. A word that the tokenizer drops, of control characters for example, keeps its place and has no token.

Left out: files (`bertkit.data.formats.conll`) and scores (`bertkit.metrics`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.data.sequences import IGNORED, Items, Sequences
from bertkit.data.tokenizer import Words, copy_backend
from bertkit.errors import UsageError
from bertkit.system.files import take_fingerprint

ABSENT = -1  # the place of a word without a token
# What BERT's normalizer sets blanks around: each is a word.
IDEOGRAPH = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002f800-\U0002fa1f"
)
PART = rf"(?:(?![{IDEOGRAPH}])\w)+"
# A few marks inside of a word belong to it, as in "U.N" and "O'Neill's"; each other mark is a word.
WORD = re.compile(rf"[{IDEOGRAPH}]|{PART}(?:[^\w\s]{{1,3}}{PART}){{0,8}}|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Sentence:
    """Some words, the tag of each in IOB2, and the same as its file has them.

    document: how many -DOCSTART- lines come before it. line: of its first word; on the Hub its row; from 1.
    """

    words: Sequence[str]
    tags: Sequence[str]
    official: Sequence[str]
    document: int
    line: int


@dataclass(frozen=True, eq=False)
class TaggedText:
    """The sentences of a file or of a split on the Hub.

    documents: its -DOCSTART- lines; without any it does not say where documents end.
    scheme: IOB1 or IOB2. odd: how many entities begin as in the other one.
    """

    source: str
    sentences: Sequence[Sentence]
    documents: int
    scheme: str
    odd: int

    def locate(self, index: int) -> str:
        """What a message calls a sentence: the file and the line."""
        return f"{self.source}, line {self.sentences[index].line}"

    def number_documents(self) -> np.ndarray:
        """(S,) int64, rising: sentences with equal numbers are of one document. Each is alone if nothing is said."""
        if not self.documents:
            return np.arange(len(self.sentences))
        return np.array([sentence.document for sentence in self.sentences], np.int64)


@dataclass(frozen=True, eq=False)
class WordWindows(Items):
    """The sequences of S sentences of M words, put together when they are asked for.

    text: the sentences. names: of the labels.
    cls, sep: the two special tokens.
    ids, ends: (N,) tokens of all sentences, side by side, and (S,) up to where each one's go.
    firsts, word_ends: (M,) where each word's first token is in `ids`, ABSENT if it has none, and (S,) up to where each
        sentence's words go.
    labels: (M,) each word's label; that of O for a tag which is not among `names`.
    starts, stops: (S,) the tokens of `ids` that each sequence shows.
    """

    text: TaggedText
    names: Sequence[str]
    cls: int
    sep: int
    ids: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray
    word_ends: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sequence: `input_ids`, `token_type_ids` and `labels` (T,) int64, IGNORED but for words of the sentence."""
        shown = self.ids[self.starts[index] : self.stops[index]]
        ids = np.concatenate([[self.cls], shown, [self.sep]]).astype(np.int64)
        labels, places = np.full_like(ids, IGNORED), self.locate(index)
        labels[places[places != ABSENT]] = self.labels[self._find_words(index)][places != ABSENT]
        return {"input_ids": ids, "token_type_ids": np.zeros_like(ids), "labels": labels}

    def fingerprint(self) -> str:
        """What tells its sequences and labels from any others."""
        words = (self.firsts, self.word_ends, self.labels)
        return take_fingerprint(json.dumps(self.names).encode(), self.ids, self.starts, self.stops, *words)

    def locate(self, index: int) -> np.ndarray:
        """(words,) int64, where the first token of each word of the sentence is in its sequence, or ABSENT."""
        firsts = self.firsts[self._find_words(index)]
        return np.where(firsts == ABSENT, ABSENT, firsts - self.starts[index] + 1)  # behind [CLS]

    def locate_all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of words with a token: (M,) places in their sequences, (S,) how many up to each sentence, (M,) labels."""
        known = self.firsts != ABSENT
        owners = np.repeat(np.arange(len(self)), np.diff(self.word_ends, prepend=0))[known]
        places = self.firsts[known] - self.starts[owners] + 1
        return places, np.cumsum(np.bincount(owners, minlength=len(self))), self.labels[known]

    def flatten(self) -> Sequences:
        """The sequences, put together once and without labels."""
        parts = [self[index]["input_ids"].astype(np.int32) for index in range(len(self))]
        ends = np.cumsum([len(part) for part in parts])
        return Sequences(np.concatenate(parts), ends, np.zeros_like(ends), None)

    def _find_words(self, index: int) -> slice:
        """The words of a sentence among all."""
        return slice(self.word_ends[index - 1] if index else 0, self.word_ends[index])

    def name_tags(self, index: int, labels: np.ndarray) -> list[str]:
        """The tag of each word of the sentence, from the labels of those that have a token; the others are O."""
        places = self.locate(index)
        tags = np.full(len(places), "O", object)
        tags[places != ABSENT] = [self.names[label] for label in labels]
        return tags.tolist()


def split_words(text: str) -> list[tuple[int, int]]:
    """The first character and the end of each word of a text, about as CoNLL's files cut it."""
    return [found.span() for found in WORD.finditer(text)]


def encode_words(
    text: TaggedText, names: Sequence[str], tokenizer: Any, max_length: int = 512, context: bool = True
) -> WordWindows:
    """A sequence of at most `max_length` tokens for each sentence of a text.

    Special tokens written out in a text are ordinary text there, as in the reference code.

    Args:
        names: of the labels, O among them.
        context: whether neighbouring sentences of the document are shown too.

    Raises:
        UsageError: a sentence that is too long by itself.
    """
    sentences = text.sentences
    words = [word for sentence in sentences for word in sentence.words]
    ids, lengths = Words(copy_backend(tokenizer)).encode(words, np.int32)
    edges = np.append(0, np.cumsum(lengths))  # (M + 1,) tokens before each word
    word_ends = np.cumsum([len(sentence.words) for sentence in sentences])
    ends = edges[word_ends]
    check_lengths(text, np.diff(ends, prepend=0), max_length)
    documents = text.number_documents() if context else np.arange(len(sentences))
    starts, stops = fit_context(ends, documents, max_length - 2)
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers.get(tag, numbers.get("O", 0)) for sentence in sentences for tag in sentence.tags]
    return WordWindows(
        text,
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


def check_lengths(text: TaggedText, lengths: np.ndarray, max_length: int) -> None:
    """Nothing, or a UsageError: a sentence with more tokens (S,) than there is room for beside [CLS] and [SEP]."""
    if len(long := np.flatnonzero(lengths > max_length - 2)):
        raise UsageError(
            f"{text.locate(long[0])}: the sentence has {lengths[long[0]]:,} tokens and max_length {max_length} leaves "
            f"room for {max_length - 2}; raise max_length or split the sentence"
        )


def fit_context(ends: np.ndarray, documents: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """The first token and the end of what is shown with each sentence, (S,) each: whole sentences of its document.

    To the left go the sentences that fit half of the room which the sentence leaves, to the right those that fit the
    rest, and to the left again what then still fits: so a sentence stands in the middle where its document reaches far
    enough on both sides, and no neighbour more would fit on either.

    ends: (S,) the tokens up to each sentence's end, none longer than `room`. documents: (S,) rising numbers.
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
