"""What a person gives a model -> the inputs of its head: a text, a pair, a question, endings, words."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from bertkit.data.sequences import IGNORED
from bertkit.data.spans import Question
from bertkit.data.tagging import split_words
from bertkit.data.tokenizer import Words, copy_backend
from bertkit.errors import UsageError, make_printable

LONGEST_NAMES = 100  # characters of the names of an input, in a message
MASK = "[MASK]"
PAIR_NAMES = (  # names of two texts that belong together: ours, which are transformers', and GLUE's
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
SINGLES = ("text", "sentence")
ENDING = re.compile(r"ending\d+")


@dataclass(frozen=True)
class PredictionSettings:
    """A model and what belongs to it.

    lengths: `[data]` of the run's recipe; empty without a run. pairs: whether an input is a pair of texts; None: either
    will do. top: words for each mask.
    """

    model: nn.Module
    tokenizer: Any
    lengths: Mapping[str, Any]
    pairs: bool | None
    top: int

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.lengths.get("max_length", 1 << 30), self.model.config.max_position_embeddings)

    @cached_property
    def labels(self) -> list[str]:
        """The names of the classes."""
        return [self.model.config.id2label[index] for index in range(self.model.config.num_labels)]

    @cached_property
    def words(self) -> Words:
        """The tokenizer of single texts."""
        return Words(copy_backend(self.tokenizer))


def check_encodable(given: Any) -> None:
    """Nothing, or a UsageError: half of a surrogate pair, which JSON can write and no text has."""
    try:
        json.dumps(given, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        raise UsageError("it has half of a surrogate pair, which is no character; write it whole") from None


def name_texts(texts: Sequence[str], fields: Sequence[str]) -> dict[str, Any]:
    """The mapping of texts that come without names; the last field takes all that is left if it ends in …."""
    if fields[-1].endswith("…"):
        head = len(fields) - 1
        return dict(zip(fields, texts[:head], strict=False)) | {fields[-1].rstrip("…"): list(texts[head:])}
    if len(texts) == 2 and fields == ("text",):
        fields = PAIR_NAMES[0]
    if len(texts) != len(fields):
        raise UsageError(f"{len(texts)} texts where {' and '.join(fields)} are expected; give as many")
    return dict(zip(fields, texts, strict=True))


def take_text(given: Mapping[str, Any], name: str) -> str:
    """A text of an input.

    Raises:
        UsageError: it is missing, or no text.
    """
    if not isinstance(text := given.get(name), str):
        has = "is missing" if name not in given else f"is {str(text)[:40]!r}, which is no text"
        raise UsageError(f"{name} {has}; the input has {list_names(given)}: name it so")
    return text


def list_names(given: Mapping[str, Any]) -> str:
    """The names in an input as a message has them."""
    return make_printable(", ".join(map(str, given)))[:LONGEST_NAMES] or "nothing"


def read_texts(given: Mapping[str, Any], setting: PredictionSettings) -> tuple[str, ...]:
    """A text, or two."""
    for first, second in PAIR_NAMES:
        if given.get(first) is not None and given.get(second) is not None:
            if setting.pairs is False:
                raise UsageError(f"{second} is one text too many; this model takes one: leave it out")
            return take_text(given, first), take_text(given, second)
    if setting.pairs:
        raise UsageError(f"the input has {list_names(given)}; this model takes two: give text and text_pair")
    return (take_text(given, next((name for name in SINGLES if name in given), SINGLES[0])),)


def read_question(given: Mapping[str, Any], setting: PredictionSettings) -> Question:
    """A question about a context."""
    question, context = take_text(given, "question"), take_text(given, "context")
    if not context.strip():
        raise UsageError("context is empty, so there is no answer in it; give the text to search")
    return Question("", question, context, (), ())


def read_choice(given: Mapping[str, Any], setting: PredictionSettings) -> tuple[str, list[str]]:
    """A context, and what may follow it; also by SWAG's names of columns."""
    context = take_text(given, "sent1" if "sent1" in given and "context" not in given else "context")
    start = given.get("start", given.get("sent2")) or ""
    numbered = sorted((name for name in given if ENDING.fullmatch(str(name))), key=lambda name: int(name[6:]))
    endings = given.get("endings", [given[name] for name in numbered])
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(x, str) for x in (start, *endings)):
        raise UsageError("endings must be two texts or more, and start a text, if there is one; give a list")
    return context, [f"{start} {ending}".strip() for ending in endings]


def read_masked(given: Mapping[str, Any], setting: PredictionSettings, with_pair: bool) -> dict[str, np.ndarray]:
    """The sequence of one or two texts with masks, `labels` (T,) being IGNORED but for the masks.

    with_pair: whether the head says of two texts if one follows the other.
    """
    texts = read_texts(given, setting)
    if not any(MASK in text for text in texts) and not (with_pair and len(texts) == 2):
        also = ", and no text_pair to follow" if with_pair else ""
        raise UsageError(f"there is no {MASK} to fill in{also}; write one where a word is missing")
    if setting.tokenizer.mask_token_id is None:
        raise UsageError(f"this model's tokenizer has no mask; name {MASK} as mask_token in its tokenizer_config.json")
    parts = [[*encode_masked(text, setting), setting.tokenizer.sep_token_id] for text in texts]
    ids = [setting.tokenizer.cls_token_id, *(token for part in parts for token in part)]
    if len(ids) > setting.max_length:
        raise UsageError(f"the input has {len(ids):,} tokens and the model takes {setting.max_length:,}; shorten it")
    tokens = np.array(ids, np.int64)
    segments = np.zeros_like(tokens)
    segments[len(parts[0]) + 1 :] = 1
    labels = np.where(tokens == setting.tokenizer.mask_token_id, tokens, IGNORED)
    return {"input_ids": tokens, "token_type_ids": segments, "labels": labels}


@dataclass(frozen=True)
class Tagged:
    """The words of a text, and where each begins and ends: in characters, or in words if they came as words."""

    words: list[str]
    places: list[tuple[int, int]]
    text: str | None


def read_words(given: Mapping[str, Any], setting: PredictionSettings) -> Tagged:
    """The words of a text, or words as they are."""
    if "words" in given:
        words = given["words"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UsageError("words must be a list of texts; for one text use the name text")
        tagged = Tagged(words, [(place, place + 1) for place in range(len(words))], None)
    else:
        text = take_text(given, "text")
        places = split_words(text)
        tagged = Tagged([text[start:end] for start, end in places], places, text)
    room = measure_room(setting)
    for word in tagged.words:
        # A character is a few tokens at most, so a short word need not be counted.
        if len(word) * 4 > room and (count := len(setting.words.encode([word], np.int64)[0])) > room:
            raise UsageError(f"the word {word[:20]!r}… has {count:,} tokens and there is room for {room:,}; split it")
    return tagged


def encode_masked(text: str, setting: PredictionSettings) -> list[int]:
    """The tokens of a text, [MASK] being the mask; other special tokens written out are ordinary text."""
    ids: list[int] = []
    for number, piece in enumerate(text.split(MASK)):
        ids += [setting.tokenizer.mask_token_id] * bool(number)
        ids += setting.words.encode([piece], np.int64)[0].tolist()
    return ids


def measure_room(setting: PredictionSettings) -> int:
    """How many tokens of a text that is too long are tagged at once: half of a sequence, the rest is context."""
    return max(1, (setting.max_length - 2) // 2)
