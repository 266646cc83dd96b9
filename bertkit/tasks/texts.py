"""Classification and regression of one text or a pair (section 4.1), for GLUE's tasks and any such model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.special import expit, softmax

from bertkit.data.labels import REGRESSION, SEPARATOR, SEVERAL, SINGLE
from bertkit.data.long_texts import LONG, POOLED, WindowedTexts, encode_long, pool_windows
from bertkit.data.sequences import EncodedInputs, Sequences, pad, pad_choices
from bertkit.errors import UsageError, make_printable
from bertkit.metrics.calibration import find_probabilities
from bertkit.metrics.classification import FIXED_THRESHOLD, tune_thresholds
from bertkit.metrics.table import LABEL, NAMES, PREDICTION, PROBABILITY_PREFIX, make_rows
from bertkit.system.progress import Report
from bertkit.tasks.finetuning import FineTuningTask
from bertkit.tasks.option import TEXT_OPTIONS, list_defaults
from bertkit.tasks.schema import NUMBER_SCHEMA, PROBABILITY, STRING, Schema, make_array, make_input, make_object
from bertkit.tasks.task import PredictionSettings, Result, check_finite

if TYPE_CHECKING:
    from torch import Tensor

    from bertkit.model.config import BertConfig

MOST_TOKENS = 512  # of the published BERTs
LONGEST_NAMES = 100  # characters of the names of an input, in a message
PAIR_NAMES = (  # names of two texts that belong together: ours, which are transformers', and GLUE's
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
TEXT_NAMES = ("text", "sentence", "review", "content", "comment", "message", "tweet", "body", "description", "title")
SAMPLE_PAIR = ("The man went to the store.", "He bought a gallon of milk.")  # as in section A.2


class MissingText(UsageError):
    """An input does not have the texts that a model reads, under any of their names."""


class TextTask(FineTuningTask):
    """Predict classes or scores of texts or pairs; the configuration's `problem_type` says which."""

    head = "BertForSequenceClassification"
    pipeline = "text-classification"

    def check(self, recipe: Any) -> None:
        """Check the recipe, including the way to read long texts."""
        super().check(recipe)
        if (long := recipe.data["long"]) not in LONG:
            raise UsageError(f"unknown long {long!r} in [data]; expected one of {', '.join(LONG)}")

    def configure(self, recipe: Any, tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return how the scores of a text's windows are combined, if it has several."""
        long = recipe.data["long"]
        return super().configure(recipe, tokenizer, examples) | ({"window_pooling": long} if long in POOLED else {})

    def encode_split(
        self,
        inputs: Sequence[str | tuple[str, ...]],
        labels: np.ndarray | None,
        tokenizer: Any,
        data: Mapping[str, Any],
    ) -> Sequences | WindowedTexts:
        """Return the sequences of texts and pairs, or their windows, as `data` (the recipe's) says."""
        return encode_long(inputs, labels, tokenizer, **{name: data[name] for name in TEXT_OPTIONS})

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, "Tensor"]:
        """Return the padded batch of some sequences (B, T), or of texts with windows (B, W, T)."""
        return pad_choices(items) if isinstance(items[0]["input_ids"], list) else pad(items)

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> tuple[str, ...]:
        """Return a text, or two."""
        return read_texts(given, settings.pairs)

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a sentence or two, and of what `name_results` returns."""
        given = describe_texts(SAMPLE_PAIR, settings)
        labels, kind = settings.labels, settings.model.config.problem_type
        label, probabilities = {"enum": labels}, make_object(dict.fromkeys(labels, PROBABILITY))
        sets = {} if settings.set_limit is None else {"label_set": make_array(label)}
        if kind == SEVERAL:
            return given, make_object({"labels": make_array(label), "probabilities": probabilities} | sets)
        if len(labels) == 1:
            return given, make_object({"score": NUMBER_SCHEMA})
        if kind == REGRESSION:
            return given, make_object({"scores": make_object(dict.fromkeys(labels, NUMBER_SCHEMA))})
        found = {"label": label, "probability": PROBABILITY, "probabilities": probabilities}
        return given, make_object(found | sets)

    def encode_inputs(self, examples: Sequence[tuple[str, ...]], settings: PredictionSettings) -> EncodedInputs:
        """Return the sequences of texts and pairs, or of all their windows."""
        lengths = {**list_defaults(TEXT_OPTIONS), **settings.lengths, "max_length": settings.max_length}
        data = self.encode_split(examples, None, settings.tokenizer, lengths)
        if isinstance(data, WindowedTexts):
            data = data.sequences
        return EncodedInputs(data, np.diff(data.ends, prepend=0), data.shortened)

    def answer(
        self, kept: Sequence[np.ndarray], data: Any, examples: Any, settings: PredictionSettings
    ) -> list[Result]:
        """Return the class of each example or its several labels, with a label set if asked for, or its scores."""
        config, logits = settings.model.config, np.stack(kept)
        if (long := settings.lengths.get("long")) in POOLED:
            logits = pool_windows(logits, data.counts, long)
        return name_results(logits, settings.labels, config.problem_type, config.thresholds, settings.set_limit)

    def describe_result(self, result: Result) -> str:
        """Return the class or the labels and how likely they are, or the scores."""
        sets = describe_label_set(result["label_set"]) if "label_set" in result else ""
        if "label" in result:
            return f"{result['label']}  ({result['probability']:.1%}){sets}"
        if "labels" in result:
            found = (f"{label} ({result['probabilities'][label]:.1%})" for label in result["labels"])
            return (", ".join(found) or "(no label)") + sets
        if "scores" in result:
            return ", ".join(f"{label} {value:.3f}" for label, value in result["scores"].items())
        return f"{result['score']:.3f}"


class NextSentenceTask(TextTask):
    """Tell whether the second text follows the first, with that head alone; it is never trained by itself."""

    head = "BertForNextSentencePrediction"
    pipeline = ""
    pairs = True

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of two sentences and of a probability."""
        return describe_texts(SAMPLE_PAIR, settings), make_object({"next_sentence": PROBABILITY})

    def answer(
        self, kept: Sequence[np.ndarray], data: Any, examples: Any, settings: PredictionSettings
    ) -> list[Result]:
        """Return whether the second text of each example follows the first."""
        return [{"next_sentence": judge_pair(row)} for row in kept]

    def describe_result(self, result: Result) -> str:
        """Return how likely the second text follows."""
        return describe_pair(result)


def tabulate_logits(
    logits: np.ndarray,
    labels: np.ndarray | None,
    names: Sequence[str],
    kind: str,
    thresholds: Sequence[float] | None = None,
) -> pa.Table:
    """Return the right and the predicted class, labels or number of each row, and its probabilities.

    Args:
        logits: (S, L).
        labels: (S,) classes or numbers, or (S, L), 0 or 1 for each of several labels; None without answers.
        thresholds: (L,) of several labels; None: tuned on `labels`, or fixed without these.

    Raises:
        UsageError: The logits are NaN or infinite.
    """
    logits, facts = check_finite(logits), {}
    if kind == REGRESSION:
        given = (labels, logits[:, 0])
        columns = [None if values is None else values.astype(np.float64) for values in given]
        probabilities = np.empty((len(logits), 0))
    elif kind == SEVERAL:
        probabilities = find_probabilities(logits, several=True)
        if thresholds is None and labels is not None:
            thresholds = tune_thresholds(probabilities, labels).tolist()
        predicted = probabilities > np.array(thresholds or [FIXED_THRESHOLD] * len(names))
        columns = [None if marks is None else spell_marks(marks, names) for marks in (labels, predicted)]
        facts = {"decided": {"thresholds": list(thresholds)}} if thresholds else {}
    else:
        probabilities = find_probabilities(logits, several=False)
        spelled = np.array(names, object)
        columns = [None if labels is None else spelled[labels], spelled[logits.argmax(axis=1)]]
    found = {name: column for name, column in zip((LABEL, PREDICTION), columns, strict=True) if column is not None}
    found |= {f"{PROBABILITY_PREFIX}{name}": row for name, row in zip(names, probabilities.T, strict=False)}
    return make_rows(found, names=[] if kind == REGRESSION else list(names), **facts)


def find_problem_type(config: "BertConfig") -> str:
    """Return the kind of problem of a classifier, which many configurations leave to the number of labels."""
    return config.problem_type or (REGRESSION if config.num_labels == 1 else SINGLE)


def spell_marks(marks: np.ndarray, names: Sequence[str]) -> pa.Array:
    """Return the names whose mark (S, L) is not 0, for each row."""
    return pa.array([[names[place] for place in np.flatnonzero(row)] for row in marks], NAMES)


def report_long(data: Sequences | WindowedTexts, report: Report) -> None:
    """Report how many training texts are truncated, or have several windows."""
    is_windowed = isinstance(data, WindowedTexts)  # then only the shorter text of a pair is truncated
    sequences = data.sequences if is_windowed else data
    count = f"of {len(data):,} training texts"
    if several := int((sequences.counts > 1).sum()):
        report(f"{several:,} {count} have several windows, {len(sequences):,} windows in all")
    if truncated := int(sequences.shortened.sum()):
        length = int(np.diff(sequences.ends, prepend=0).max())
        ways = [f"data.max_length (up to {MOST_TOKENS})"] * (length < MOST_TOKENS)
        ways += ["data.long=mean"] * (not is_windowed)
        remedy = f"; {' or '.join(ways)} reads more of them" if ways else ""
        what = "have a pair's shorter text truncated" if is_windowed else f"are truncated to {length} tokens"
        report(f"{truncated:,} {count} {what}{remedy}")


def name_results(
    logits: np.ndarray,
    labels: Sequence[str],
    kind: str | None,
    thresholds: Sequence[float] | None,
    set_limit: float | None = None,
) -> list[Result]:
    """Return the class, the several labels, or the numbers of each row of logits (S, L).

    Args:
        set_limit: As in `PredictionSettings`.
    """
    if kind == SEVERAL:
        limits = dict(zip(labels, thresholds or [FIXED_THRESHOLD] * len(labels), strict=True))
        probabilities = expit(logits.astype(np.float64))  # as for the thresholds: fp32 rounds likely labels to 1
        rows = [dict(zip(labels, row, strict=True)) for row in probabilities.tolist()]
        return [
            add_label_set(
                {"labels": [label for label, value in row.items() if value > limits[label]], "probabilities": row},
                row,
                set_limit,
            )
            for row in rows
        ]
    if len(labels) == 1:
        return [{"score": value} for value in logits[:, 0].tolist()]
    if kind == REGRESSION:
        return [{"scores": dict(zip(labels, row, strict=True))} for row in logits.tolist()]
    results = []
    for best, row in zip(logits.argmax(1).tolist(), softmax(logits, axis=1).tolist(), strict=True):
        probabilities = dict(zip(labels, row, strict=True))
        result = {"label": labels[best], "probability": row[best], "probabilities": probabilities}
        results.append(add_label_set(result, probabilities, set_limit))
    return results


def add_label_set(result: Result, probabilities: Mapping[Any, float], set_limit: float | None) -> Result:
    """Return a result with the label set: the labels that are likely enough, in their order; None adds none."""
    if set_limit is None:
        return result
    return result | {"label_set": [label for label, value in probabilities.items() if 1 - value <= set_limit]}


def describe_label_set(names: Sequence[str]) -> str:
    """Return a label set in words."""
    return f"  set: {', '.join(names) or '(empty)'}"


def flatten_result(result: Result) -> dict[str, Any]:
    """Return a result as a row, with several labels joined by "|"; empty if it forms none."""
    if "score" in result:
        return {"prediction": result["score"]}
    if "scores" in result:
        return {f"prediction_{label}": value for label, value in result["scores"].items()}
    if "next_sentence" in result and "masks" not in result:
        return {"next_sentence": result["next_sentence"]}
    if "label" not in result and "labels" not in result:
        return {}
    row = {f"probability_{label}": value for label, value in result["probabilities"].items()}
    if "label_set" in result:
        row["label_set"] = SEPARATOR.join(result["label_set"])
    if "labels" in result:
        return {"labels": SEPARATOR.join(result["labels"])} | row
    return {"label": result["label"], "probability": result["probability"]} | row


def judge_pair(logits: np.ndarray) -> float:
    """Return the probability that the second text follows the first, of next-sentence logits (2,)."""
    return float(softmax(logits)[0])


def describe_pair(result: Result) -> str:
    """Return the probability of a result that the second text follows, in words."""
    return f"follows: {result['next_sentence']:.1%}"


def take_text(given: Mapping[str, Any], name: str) -> str:
    """Return a text of an input.

    Raises:
        UsageError: It is missing, or not text.
    """
    if not isinstance(text := given.get(name), str):
        has = "is missing" if name not in given else f"is {str(text)[:40]!r}, not a string"
        kind = MissingText if name not in given else UsageError
        raise kind(f"{name} {has}; the input has {list_names(given)}: give {name} as a string")
    return text


def list_names(given: Mapping[str, Any]) -> str:
    """Return the names in an input, for a message."""
    return make_printable(", ".join(map(str, given)))[:LONGEST_NAMES] or "nothing"


def describe_texts(sample: Sequence[str], settings: PredictionSettings) -> Schema:
    """Return the schema of a text or two, of which the second may be optional."""
    one, two = (dict(zip(PAIR_NAMES[0][:count], sample, strict=False)) for count in (1, 2))
    return make_input(dict.fromkeys(one if settings.pairs is False else two, STRING), two if settings.pairs else one)


def read_texts(given: Mapping[str, Any], pairs: bool | None) -> tuple[str, ...]:
    """Return one text, or two if `pairs`; None: as many as the input has."""
    for first, second in PAIR_NAMES:
        if given.get(first) is not None and given.get(second) is not None:
            if pairs is False:
                raise UsageError(f"unexpected {second}; this model takes one text: remove it")
            return take_text(given, first), take_text(given, second)
    if pairs:
        kind = UsageError if any(given.keys() >= set(pair) for pair in PAIR_NAMES) else MissingText
        raise kind(f"the input has {list_names(given)}; this model takes two texts: give text and text_pair")
    return (take_text(given, next(iter(guess_texts(given)), TEXT_NAMES[0])),)


def guess_texts(names: Iterable[str]) -> list[str]:
    """Return the names, in upper or lower case, of a text or of two that belong together; empty if none is usual."""
    spelled = {str(name).lower(): name for name in names}
    pair = next((pair for pair in PAIR_NAMES if spelled.keys() >= set(pair)), ())
    return [spelled[name] for name in pair or [name for name in TEXT_NAMES if name in spelled][:1]]
