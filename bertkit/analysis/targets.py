"""The logits that decide a result, and the words of an input's tokens, for `bertkit.analysis.explanation`.

Left out: tasks whose results are not explained (SWAG, masked words, next sentences), and the attributions themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertkit.data.long_texts import choose_cut
from bertkit.data.sequences import Sequences
from bertkit.data.spans import Question, Windows, cut, locate_answer, tokenize
from bertkit.data.tagging import ABSENT, WordWindows, group_tokens
from bertkit.data.tokenizer import find_form
from bertkit.tasks.ner import NerTask
from bertkit.tasks.option import TEXT_OPTIONS, list_defaults
from bertkit.tasks.squad import SquadTask
from bertkit.tasks.task import PredictionSettings, Result, Task
from bertkit.tasks.text import TextTask

NO_WORD = -1  # the word of a special token


class Word(NamedTuple):
    """A word of an input.

    Attributes:
        field: The name of its text.
        start: Its first character, or its number if the input was a list of words; `end` likewise.
    """

    field: str
    text: str
    start: int
    end: int


class Logit(NamedTuple):
    """A logit of one of an input's sequences.

    Attributes:
        output: The name among the model's outputs, such as `logits`.
        place: The indices behind that of the batch.
        weight: Its factor in the explained sum.
    """

    sequence: int
    output: str
    place: tuple[int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Target:
    """A part of a result, such as a label, and the logits whose weighted sum decided it."""

    name: str
    logits: Sequence[Logit]


Located = tuple[list[Word], list[np.ndarray]]  # the words of an input, and (T,) each sequence's words or NO_WORD


class Targets:
    """Finds the parts of a result that can be explained, and the words of its input."""

    def find(
        self, result: Result, kept: Sequence[np.ndarray], data: Any, example: Any, settings: PredictionSettings
    ) -> list[Target]:
        """Return the targets of a result; the arguments are those of `Task.answer` for a single example."""
        raise NotImplementedError

    def locate_words(self, data: Any, example: Any, settings: PredictionSettings) -> Located:
        """Return the words of an example, and for each of its sequences the word of each token."""
        raise NotImplementedError


class TextTargets(Targets):
    """The predicted class, every predicted label, or the scores of a text or a pair."""

    fields = ("text", "text_pair")

    def find(
        self,
        result: Result,
        kept: Sequence[np.ndarray],
        data: Sequences,
        example: Sequence[str],
        settings: PredictionSettings,
    ) -> list[Target]:
        """Return a target for each label or score: its logit, in the windows that decide it.

        With "max" that is the window with the largest logit, with "mean" all windows, with equal weights.
        """
        labels = settings.labels
        if "score" in result:
            chosen = {"score": 0}
        else:
            names = [result["label"]] if "label" in result else result.get("labels", labels)
            chosen = {name: labels.index(name) for name in names}
        targets = []
        for name, place in chosen.items():
            sequences = range(len(kept))
            if settings.lengths.get("long") == "max":
                sequences = [max(sequences, key=lambda number: kept[number][place])]
            weight = 1 / len(sequences)
            targets.append(Target(name, [Logit(number, "logits", (place,), weight) for number in sequences]))
        return targets

    def locate_words(self, data: Sequences, example: Sequence[str], settings: PredictionSettings) -> Located:
        """Return the words of the texts, and the word of each token of each window."""
        lengths = {**list_defaults(TEXT_OPTIONS), **settings.lengths}
        words, owners = find_words(zip(self.fields, example, strict=False), settings.tokenizer)
        form = find_form(settings.tokenizer)
        room = settings.max_length - form.count(len(owners))
        windows, _ = choose_cut(lengths["long"], lengths["doc_stride"])(owners, room)
        return words, [join_with_specials(parts, len(form.between)) for parts in windows]


class AnswerTargets(Targets):
    """The best span of a context."""

    def find(
        self,
        result: Result,
        kept: Sequence[np.ndarray],
        data: Windows,
        example: Question,
        settings: PredictionSettings,
    ) -> list[Target]:
        """Return the best span, also if it is not given as the answer: S.T_i + E.T_j in the window that decides."""
        best = result["best"]
        tokens = locate_answer(cut(data.offsets, data.context_ends, data.contexts[0]), best["start"], best["end"])
        if tokens is None:  # the context has no token
            return []
        first, last = tokens
        window = int(np.flatnonzero((data.shares[:, 0] <= first) & (first < data.shares[:, 1]))[0])
        shift = int(data.find_first()[window] - data.starts[window])
        places = {"start_logits": first, "end_logits": last}
        return [Target(best["text"], [Logit(window, name, (place + shift,)) for name, place in places.items()])]

    def locate_words(self, data: Windows, example: Question, settings: PredictionSettings) -> Located:
        """Return the words of question and context, and the word of each token of each window."""
        texts = (("question", example.question), ("context", example.context))
        words, owners = find_words(texts, settings.tokenizer)
        question, context = owners[0][: data.ends[0]], owners[1]
        windows = zip(data.starts.tolist(), data.lengths.tolist(), strict=True)
        return words, [join_with_specials([question, context[start : start + count]]) for start, count in windows]


class NameTargets(Targets):
    """The entities of a text."""

    def find(
        self,
        result: Result,
        kept: Sequence[np.ndarray],
        data: WordWindows,
        example: Any,
        settings: PredictionSettings,
    ) -> list[Target]:
        """Return the entities: the sum of the logits of the tags of their words."""
        sequences = [(number, place) for number in range(len(data)) for place in data.locate(number).tolist()]
        tags = {name: number for number, name in enumerate(settings.labels)}
        targets = []
        for entity in result.get("entities", ()):
            own = [
                number
                for number, (start, end) in enumerate(example.places)
                if entity["start"] <= start and end <= entity["end"]
            ]
            logits = [
                Logit(sequences[number][0], "logits", (sequences[number][1], tags[result["tags"][number]]))
                for number in own
                if sequences[number][1] != ABSENT
            ]
            targets.append(Target(f"{entity['text']}: {entity['type']}", logits))
        return targets

    def locate_words(self, data: WordWindows, example: Any, settings: PredictionSettings) -> Located:
        """Return the words as they were tagged, and the word of each token of each sequence."""
        field = "words" if example.text is None else "text"
        places = zip(example.words, example.places, strict=True)
        words = [Word(field, word, start, end) for word, (start, end) in places]
        known = np.flatnonzero(data.firsts != ABSENT)
        owners = known[np.searchsorted(data.firsts[known], np.arange(len(data.ids)), "right") - 1]
        shown = zip(data.starts.tolist(), data.stops.tolist(), strict=True)
        return words, [join_with_specials([owners[start:stop]]) for start, stop in shown]


TARGETS: dict[type[Task], Targets] = {TextTask: TextTargets(), SquadTask: AnswerTargets(), NerTask: NameTargets()}


def find_targets(task: Task) -> Targets | None:
    """Return the targets of a task's results; None if they cannot be explained."""
    return next((targets for kind, targets in TARGETS.items() if isinstance(task, kind)), None)


def find_words(texts: Iterable[tuple[str, str]], tokenizer: Any) -> tuple[list[Word], list[np.ndarray]]:
    """Return the words of all texts, given with the names of their fields, and for each text the word of each token."""
    words, owners = [], []
    for field, text in texts:
        _, _, offsets = tokenize([text], tokenizer, with_offsets=True)
        places, found = group_tokens(text, offsets)
        owners.append(found + len(words))
        words += [Word(field, text[start:end], start, end) for start, end in places]
    return words, owners


def join_with_specials(parts: Sequence[np.ndarray], between: int = 1) -> np.ndarray:
    """Return the words (T,) of a sequence's tokens from those of its texts: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    Args:
        between: The number of special tokens between the texts of a pair.
    """
    special = np.array([NO_WORD])
    others = (each for part in parts[1:] for each in (special.repeat(between), part))
    return np.concatenate([special, parts[0], *others, special])
