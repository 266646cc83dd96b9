"""The logits that decide a result, and the words of an input's tokens, for `bertkit.analysis.explanation`.

Left out: tasks whose results are not explained (SWAG, masked words, next sentences), and the attributions themselves.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertkit.data.long_texts import choose_cut
from bertkit.data.sequences import Sequences
from bertkit.data.spans import Question, Windows, cut, locate_answer, tokenize
from bertkit.data.tagging import ABSENT, WordWindows, group_tokens
from bertkit.data.tokenizer import find_form
from bertkit.tasks.ner import NerTask, Tagged
from bertkit.tasks.option import TEXT_OPTIONS, list_defaults
from bertkit.tasks.squad import SquadTask
from bertkit.tasks.task import PredictionSettings, Result, Task
from bertkit.tasks.text import TextTask

NO_WORD = -1  # the word of a special token


class Word(NamedTuple):
    """A word of an input.

    Attributes:
        field: The name of its text.
        start: Its first character, or its number if the input was a list of words.
        end: The character or the number behind it.
    """

    field: str
    text: str
    start: int
    end: int


class Logit(NamedTuple):
    """A logit of one of an input's sequences.

    Attributes:
        output: The name among the model's outputs, such as `logits`.
        index: The indices behind that of the batch.
        weight: Its factor in the explained sum.
    """

    sequence: int
    output: str
    index: tuple[int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Target:
    """A part of a result, such as a label, and the logits whose weighted sum decided it."""

    name: str
    logits: Sequence[Logit]


# The words of an input, (T,) each sequence's words or NO_WORD, and the targets of its result.
Explained = tuple[list[Word], list[np.ndarray], list[Target]]


def explain_labels(
    result: Result, kept: Sequence[np.ndarray], data: Sequences, example: Sequence[str], settings: PredictionSettings
) -> Explained:
    """Return the words of a text or a pair, and a target for each predicted label or score.

    Its logit is read in the windows that decide it: with "max" in the window with the largest logit, with "mean" in all
    windows, with equal weights.
    """
    lengths = {**list_defaults(TEXT_OPTIONS), **settings.lengths}
    words, owners = find_words(zip(("text", "text_pair"), example, strict=False), settings.tokenizer)
    form = find_form(settings.tokenizer)
    room = settings.max_length - form.count(len(owners))
    windows, _ = choose_cut(lengths["long"], lengths["doc_stride"])(owners, room)
    if "score" in result:
        chosen = {"score": 0}
    else:
        names = [result["label"]] if "label" in result else result.get("labels", settings.labels)
        chosen = {name: settings.labels.index(name) for name in names}
    targets = []
    for name, label in chosen.items():
        sequences = range(len(kept))
        if lengths["long"] == "max":
            sequences = [max(sequences, key=lambda number: kept[number][label])]
        weight = 1 / len(sequences)
        targets.append(Target(name, [Logit(number, "logits", (label,), weight) for number in sequences]))
    return words, [join_with_specials(parts, len(form.between)) for parts in windows], targets


def explain_answer(
    result: Result, kept: Sequence[np.ndarray], data: Windows, example: Question, settings: PredictionSettings
) -> Explained:
    """Return the words of question and context, and the best span, also if it is not given as the answer.

    The span's target is S.T_i + E.T_j in the window that decides; a context without a token has none.
    """
    words, owners = find_words((("question", example.question), ("context", example.context)), settings.tokenizer)
    question, context = owners[0][: data.ends[0]], owners[1]
    windows = zip(data.starts.tolist(), data.lengths.tolist(), strict=True)
    shown = [join_with_specials([question, context[start : start + count]]) for start, count in windows]
    best = result["best"]
    tokens = locate_answer(cut(data.offsets, data.context_ends, data.contexts[0]), best["start"], best["end"])
    if tokens is None:
        return words, shown, []
    first, last = tokens
    window = int(np.flatnonzero((data.shares[:, 0] <= first) & (first < data.shares[:, 1]))[0])
    shift = int(data.find_first()[window] - data.starts[window])
    logits = [Logit(window, "start_logits", (first + shift,)), Logit(window, "end_logits", (last + shift,))]
    return words, shown, [Target(best["text"], logits)]


def explain_names(
    result: Result, kept: Sequence[np.ndarray], data: WordWindows, example: Tagged, settings: PredictionSettings
) -> Explained:
    """Return the words as they were tagged, and the entities: the sum of the logits of the tags of their words."""
    field = "words" if example.text is None else "text"
    pairs = zip(example.words, example.spans, strict=True)
    words = [Word(field, word, start, end) for word, (start, end) in pairs]
    known = np.flatnonzero(data.firsts != ABSENT)
    owners = known[np.searchsorted(data.firsts[known], np.arange(len(data.ids)), "right") - 1]
    shown = zip(data.starts.tolist(), data.stops.tolist(), strict=True)
    positions = [(number, position) for number in range(len(data)) for position in data.locate(number).tolist()]
    tags = {name: number for number, name in enumerate(settings.labels)}
    targets = []
    for entity in result.get("entities", ()):
        own = [n for n, word in enumerate(words) if entity["start"] <= word.start and word.end <= entity["end"]]
        logits = [
            Logit(positions[n][0], "logits", (positions[n][1], tags[result["tags"][n]]))
            for n in own
            if positions[n][1] != ABSENT
        ]
        targets.append(Target(f"{entity['text']}: {entity['type']}", logits))
    return words, [join_with_specials([owners[start:stop]]) for start, stop in shown], targets


EXPLAINERS: dict[type[Task], Callable[..., Explained]] = {
    TextTask: explain_labels,
    SquadTask: explain_answer,
    NerTask: explain_names,
}


def find_explainer(task: Task) -> Callable[..., Explained] | None:
    """Return the function that explains a task's results; None if they cannot be explained.

    Its arguments are a result, and those of `Task.answer` for a single example.
    """
    return next((explain for kind, explain in EXPLAINERS.items() if isinstance(task, kind)), None)


def find_words(texts: Iterable[tuple[str, str]], tokenizer: Any) -> tuple[list[Word], list[np.ndarray]]:
    """Return the words of all texts, given with the names of their fields, and for each text the word of each token."""
    words, owners = [], []
    for field, text in texts:
        _, _, offsets = tokenize([text], tokenizer, with_offsets=True)
        spans, found = group_tokens(text, offsets)
        owners.append(found + len(words))
        words += [Word(field, text[start:end], start, end) for start, end in spans]
    return words, owners


def join_with_specials(parts: Sequence[np.ndarray], between: int = 1) -> np.ndarray:
    """Return the words (T,) of a sequence's tokens from those of its texts: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    Args:
        between: The number of special tokens between the texts of a pair.
    """
    special = np.array([NO_WORD])
    others = (each for part in parts[1:] for each in (special.repeat(between), part))
    return np.concatenate([special, parts[0], *others, special])
