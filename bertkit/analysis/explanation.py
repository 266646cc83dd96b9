"""Explain the results of texts and pairs: attribute a class, a label or a number to the words of the input.

The logits that decided a result are attributed to the token embeddings by integrated gradients (Sundararajan et al.
2017, "Axiomatic Attribution for Deep Networks"; captum): the gradient is integrated on the straight line from a
baseline, in which every token except [CLS] and [SEP] is [MASK], to the input. [MASK] is the one token that pre-training
has taught to stand for a word that is not known; [PAD] is never computed on here, so its embedding is arbitrary. A
word's attribution is the sum over its tokens. All attributions add up to the logit's rise above the baseline, except
for the error of the integral, which is reported as a share of the logit; steps are doubled until it is small.

The model runs on the padded path, in fp32. Left out: other tasks, and exports, which have no gradients.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.formats.rows import Input, LocatedInput
from bertkit.data.long_texts import choose_cut
from bertkit.data.spans import tokenize
from bertkit.data.tagging import group_tokens
from bertkit.data.tokenizer import get_pair_template
from bertkit.errors import explain_missing, raise_first
from bertkit.inference.predictor import Predictor, take_rows
from bertkit.model.attention import name_kernel
from bertkit.model.onnx_model import OnnxModel
from bertkit.tasks.answers import Result
from bertkit.tasks.option import TEXT_OPTIONS, list_defaults
from bertkit.tasks.prediction import summarize_inputs
from bertkit.tasks.task import PredictionSettings
from bertkit.tasks.text import TextTask

EXPLANATIONS = "explanations.jsonl"  # among the predictions of a run: the results for its report page
FIRST_STEPS, MOST_STEPS = 32, 512  # steps of the integral
MOST_ERROR = 0.005  # share of the logit; steps are doubled until the error is below it
LEAST_LOGIT = 1e-6  # in the denominator of the error
TOKENS_AT_ONCE = 2048  # in the batches of the integral
MOST_NAMED_WORDS = 5  # in a line
NO_WORD = -1  # the word of a special token


def explain(
    predictor: Predictor, inputs: Iterable[Input | Sequence[str] | LocatedInput], at_once: int | None = None
) -> Iterator[Result]:
    """Yield the result of each input, as `Predictor.stream` does, with the key `explanation`.

    It is a list with an entry for the predicted class, or for each predicted label or score. An entry has the explained
    `target` in words, its `logit` and that of the `baseline`, the completeness `error` (a share of the logit), and
    `words` that the model has read: each with the `field` of the input, `text`, `start` and `end` (as for the results)
    and `attribution`.
    """
    settings = predictor.settings
    troubles = {
        "an export has no gradients to explain its results by; explain the run it was made from": (
            isinstance(settings.model, OnnxModel)
        ),
        f"the results of {settings.head} cannot be explained; give a run of classify or glue": (
            not isinstance(predictor.task, TextTask)
        ),
        f"explanations need fp32, got precision {predictor.precision!r}; give fp32": predictor.precision != "fp32",
    }
    raise_first(troubles)
    with explain_missing("an explanation needs captum", "explain"):
        import captum  # noqa: F401
    inputs, again = tee(take_rows(inputs))
    for given, result in zip(again, predictor.stream(inputs, at_once), strict=True):
        if "error" not in result:
            example = predictor.read(given.value if isinstance(given, LocatedInput) else given)
            result = result | {"explanation": explain_example(predictor, example, result)}
        yield result


def explain_example(predictor: Predictor, example: Any, result: Result) -> list[dict[str, Any]]:
    """Return the explanation of an example's result."""
    task, settings = predictor.task, predictor.settings
    inputs = task.encode_inputs([example], settings)
    found = []
    with use_padded_path(settings.model):
        kept = summarize_inputs(task, inputs, settings)
        words, owners, targets = explain_labels(result, kept, example, settings)
        for target in targets:
            paths: dict[int, GradientPath] = {}
            for logit in target.logits:
                number = logit.sequence
                if number not in paths:
                    paths[number] = GradientPath(settings, inputs.data[number], owners[number] == NO_WORD)
                paths[number].logits.append(logit)
            value, baseline, error, tokens = attribute(list(paths.values()))
            read = np.concatenate([owners[number] for number in paths])
            values = np.concatenate(tokens)[read != NO_WORD]
            read = read[read != NO_WORD]
            sums = np.bincount(read, values, len(words)).tolist()
            own = [{**words[word]._asdict(), "attribution": sums[word]} for word in np.unique(read).tolist()]
            found.append({"target": target.name, "logit": value, "baseline": baseline, "error": error, "words": own})
    return found


def attribute(paths: Sequence["GradientPath"]) -> tuple[float, float, float, list[np.ndarray]]:
    """Attribute a target to the tokens of the sequences that decide it.

    Returns:
        The target's value, that at the baseline, the completeness error as a share of the value, and the attributions
        (T,) to the tokens of each sequence.
    """
    value, baseline = np.sum([path.read_ends() for path in paths], axis=0).tolist()
    steps = FIRST_STEPS
    while True:
        tokens = [path.integrate(steps) for path in paths]
        gap = sum(values.sum() for values in tokens) - (value - baseline)
        error = float(abs(gap) / max(abs(value), LEAST_LOGIT))
        if error < MOST_ERROR or steps >= MOST_STEPS:
            return value, baseline, error, tokens
        steps *= 2


class GradientPath:
    """The straight line from a sequence's baseline to the sequence, and the logits whose sum is followed along it.

    Args:
        item: A sequence of `Task.encode_inputs`.
        is_special: (T,) bool, the tokens that the baseline keeps.
    """

    def __init__(self, settings: PredictionSettings, item: Mapping[str, np.ndarray], is_special: np.ndarray) -> None:
        self.model, self.logits = settings.model, []
        self.ids, self.segments = (
            torch.from_numpy(item[name])[None].to(self.model.device) for name in ("input_ids", "token_type_ids")
        )  # (1, T) each
        keeps = torch.from_numpy(is_special).to(self.model.device)
        self.baseline = self.ids.where(keeps, settings.tokenizer.mask_token_id)  # (1, T)

    def read(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Return the weighted sum of the logits (B,) of some points of the line, as captum calls it."""
        outputs = self.model(input_ids=ids, token_type_ids=segments)
        parts = [logit.weight * outputs[logit.output][:, *logit.index] for logit in self.logits]
        return torch.stack(parts).sum(0)  # (B,)

    @torch.no_grad()
    def read_ends(self) -> list[float]:
        """Return the sum at the sequence and at its baseline."""
        return self.read(torch.cat([self.ids, self.baseline]), self.segments.expand(2, -1)).tolist()

    def integrate(self, steps: int) -> np.ndarray:
        """Return the attributions (T,) to the tokens: the integral by Gauss-Legendre, summed over each embedding."""
        from captum.attr import LayerIntegratedGradients

        follow = LayerIntegratedGradients(self.read, self.model.get_input_embeddings())
        found = follow.attribute(
            self.ids,
            baselines=self.baseline,
            additional_forward_args=(self.segments,),
            n_steps=steps,
            method="gausslegendre",
            internal_batch_size=max(TOKENS_AT_ONCE // self.ids.shape[1], 1),
        )  # (1, T, H)
        return found[0].sum(-1).double().cpu().numpy()


@contextmanager
def use_padded_path(model: nn.Module) -> Iterator[None]:
    """Run a model without packing, as in stock BERT; cuDNN has no gradients of a BiLSTM in evaluation mode."""
    usual = name_kernel(model.config)
    model.set_attn_implementation("sdpa")
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        model.set_attn_implementation(usual)


# --- The logits that decide a result, and the words of the input ------------------------------------------------------


class Word(NamedTuple):
    """A word of an input."""

    field: str  # the name of its text
    text: str
    start: int  # the first character, or its number if the input was a list of words
    end: int  # the character or the number behind it


class Logit(NamedTuple):
    """A logit of one of an input's sequences."""

    sequence: int
    output: str  # the name among the model's outputs, such as `logits`
    index: tuple[int, ...]  # the indices behind that of the batch
    weight: float = 1.0  # the factor in the explained sum


class Target(NamedTuple):
    """A part of a result, such as a label, and the logits whose weighted sum decided it."""

    name: str
    logits: Sequence[Logit]


# The words of an input, (T,) each sequence's words or NO_WORD, and the targets of its result.
Explained = tuple[list[Word], list[np.ndarray], list[Target]]


def explain_labels(
    result: Result, kept: Sequence[np.ndarray], example: Sequence[str], settings: PredictionSettings
) -> Explained:
    """Return the words of a text or a pair, and a target for each predicted label or score.

    Its logit is read in the windows that decide it: with "max" in the window with the largest logit, with "mean" in all
    windows, with equal weights.
    """
    lengths = {**list_defaults(TEXT_OPTIONS), **settings.lengths}
    words, owners = list_field_words(zip(("text", "text_pair"), example, strict=False), settings.tokenizer)
    form = get_pair_template(settings.tokenizer)
    room = settings.max_length - form.count(len(owners))
    windows, _ = choose_cut(lengths["long"], lengths["doc_stride"])(owners, room)
    if "score" in result:
        chosen = {"score": 0}
    else:
        names = result.get("labels", settings.labels)
        if "label" in result:  # None where the model gives no answer
            names = [result["label"] or max(result["probabilities"], key=result["probabilities"].get)]
        chosen = {name: settings.labels.index(name) for name in names}
    targets = []
    for name, label in chosen.items():
        sequences = range(len(kept))
        if lengths["long"] == "max":
            sequences = [max(sequences, key=lambda number: kept[number][label])]
        weight = 1 / len(sequences)
        targets.append(Target(name, [Logit(number, "logits", (label,), weight) for number in sequences]))
    return words, [join_with_specials(parts, len(form.between)) for parts in windows], targets


def list_field_words(texts: Iterable[tuple[str, str]], tokenizer: Any) -> tuple[list[Word], list[np.ndarray]]:
    """Return the words of all texts, given with the names of their fields, and for each text the word of each token."""
    words, owners = [], []
    for field, text in texts:
        _, _, offsets = tokenize([text], tokenizer)
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


# --- In words ---------------------------------------------------------------------------------------------------------


def describe_words(words: Sequence[Mapping[str, Any]]) -> str:
    """Return the words with the largest attributions, in one line."""
    largest = sorted(words, key=lambda word: -abs(word["attribution"]))[:MOST_NAMED_WORDS]
    return ", ".join(f"{' '.join(word['text'].split())} {word['attribution']:+.2f}" for word in largest)


def list_parts(words: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the parts of a line with all words: each with its share of the largest attribution, from -1 to 1.

    Words that stand apart in their text are separated by a space, texts by a bar.
    """
    most = max((abs(word["attribution"]) for word in words), default=0.0) or 1.0
    before: Mapping[str, Any] | None = None
    for word in words:
        if before is not None:
            is_same = before["field"] == word["field"]
            gap = " " if (is_same and word["start"] > before["end"]) or word["field"] == "words" else ""
            yield gap if is_same else "  |  ", 0.0
        yield " ".join(word["text"].split()), word["attribution"] / most
        before = word
