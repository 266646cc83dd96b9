"""How inputs become batches, and outputs become answers, for every head that predicts.

`USES` maps the name of a head to a `HeadUse`: how an input is read and encoded, what is kept of the outputs, and what
the answer is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from scipy.special import expit, softmax
from torch import Tensor

from bertkit.data.formats.conll import TAG
from bertkit.data.sequences import IGNORED, Sequences, encode_inputs, pad
from bertkit.data.spans import Question, Windows, encode_questions, find_best, keep_top
from bertkit.data.tagging import Sentence, TaggedText, WordWindows, encode_words, pad_words
from bertkit.errors import UsageError
from bertkit.inference.inputs import (
    PAIR_NAMES,
    SINGLES,
    PredictionSettings,
    Tagged,
    measure_room,
    read_choice,
    read_masked,
    read_question,
    read_texts,
    read_words,
)
from bertkit.metrics.ner import find_entities
from bertkit.model import heads
from bertkit.tasks.finetuning import DIVERGED
from bertkit.tasks.ner import UNDECIDED, place_words, summarize

# Of questions, where no run says otherwise.
QUESTION_LENGTHS = {"max_length": 384, "doc_stride": 128, "max_query_length": 64, "max_answer_length": 30}
Result = dict[str, Any]


@dataclass(frozen=True)
class HeadUse:
    """What a head is for.

    fields: what the texts of one input are, as the command line takes them.
    read: (input, setting) -> an example. Raises UsageError for an input that is none.
    encode: (examples, setting) -> a data set of sequences, and (S,) the tokens of each.
    keep: (outputs, batch, setting) -> what `conclude` needs of each sequence.
    conclude: (what was kept of each sequence, the data set, the examples, setting) -> a result an example.
    describe: a result in words.
    find_shortened: (the data set, the examples) -> (examples,) bool, which of them lost their end.
    collate: (the data set, numbers of its sequences, setting) -> a batch of tensors.
    options: more arguments for the head.
    """

    fields: Callable[[PredictionSettings], tuple[str, ...]]
    read: Callable[[Mapping[str, Any], PredictionSettings], Any]
    encode: Callable[[Sequence[Any], PredictionSettings], tuple[Any, np.ndarray]]
    keep: Callable[[Any, Mapping[str, Tensor], PredictionSettings], Sequence[Any]]
    conclude: Callable[[Sequence[Any], Any, Sequence[Any], PredictionSettings], list[Result]]
    describe: Callable[[Result], str]
    find_shortened: Callable[[Any, Sequence[Any]], Sequence[bool]] = lambda _, examples: [False] * len(examples)
    collate: Callable[[Any, list[int], PredictionSettings], dict[str, Tensor]] = lambda data, numbers, _: pad(
        data.__getitems__(numbers)
    )
    options: Mapping[str, Any] = field(default_factory=dict)


# --- Encoding ---------------------------------------------------------------------------------------------------------


def measure(data: Sequences) -> np.ndarray:
    """(S,) the tokens of each sequence."""
    return np.diff(data.ends, prepend=0)


def encode_examples(examples: Sequence[tuple[str, ...]], setting: PredictionSettings) -> tuple[Sequences, np.ndarray]:
    """The sequences of texts and pairs."""
    inputs = [texts if len(texts) == 2 else texts[0] for texts in examples]
    data = encode_inputs(inputs, None, setting.tokenizer, setting.max_length)
    return data, measure(data)


def encode_choices(
    examples: Sequence[tuple[str, list[str]]], setting: PredictionSettings
) -> tuple[Sequences, np.ndarray]:
    """A sequence for each ending of each example, in order."""
    return encode_examples([(context, ending) for context, endings in examples for ending in endings], setting)


def encode_contexts(examples: Sequence[Question], setting: PredictionSettings) -> tuple[Windows, np.ndarray]:
    """The windows of the questions."""
    lengths = {name: setting.lengths.get(name, value) for name, value in QUESTION_LENGTHS.items()}
    lengths["max_length"] = min(lengths["max_length"], setting.model.config.max_position_embeddings)
    lengths["max_query_length"] = min(lengths["max_query_length"], lengths["max_length"] // 2)
    data = encode_questions(examples, setting.tokenizer, **lengths)
    return data, data.find_first() + data.lengths + 1


def encode_masks(examples: Sequence[dict[str, np.ndarray]], setting: PredictionSettings) -> tuple[Any, np.ndarray]:
    """The sequences of texts with masks, which `read_masked` has made."""
    return examples, np.array([len(example["input_ids"]) for example in examples])


def collate_masks(
    data: Sequence[dict[str, np.ndarray]], numbers: list[int], setting: PredictionSettings
) -> dict[str, Tensor]:
    """A batch whose `labels` (B, T) mark the masks, so that only these are decoded."""
    return pad_words([data[number] for number in numbers])


def collate_choices(data: Sequences, numbers: list[int], setting: PredictionSettings) -> dict[str, Tensor]:
    """A batch (B, 1, T) of single endings."""
    return {name: column[:, None] for name, column in pad(data.__getitems__(numbers)).items()}


def encode_tagged(examples: Sequence[Tagged], setting: PredictionSettings) -> tuple[WordWindows, np.ndarray]:
    """A sequence for each text; of a text that is too long for one, several, each with the others as its context."""
    room, longest = measure_room(setting), setting.max_length - 2
    sentences = []
    for document, example in enumerate(examples, 1):
        counts = setting.words.encode(example.words, np.int64)[1].tolist()
        is_long = sum(counts) > longest
        start = used = 0
        for place, count in enumerate(counts):
            if is_long and used + count > room:
                sentences.append(make_sentence(example.words[start:place], document))
                start, used = place, 0
            used += count
        sentences.append(make_sentence(example.words[start:], document))
    text = TaggedText("the input", sentences, len(examples), "IOB2", 0)
    data = encode_words(text, setting.labels, setting.tokenizer, setting.max_length)
    return data, data.stops - data.starts + 2


def make_sentence(words: Sequence[str], document: int) -> Sentence:
    """Words without tags."""
    tags = ["O"] * len(words)
    return Sentence(words, tags, tags, document, 0)


def collate_words(data: WordWindows, numbers: list[int], setting: PredictionSettings) -> dict[str, Tensor]:
    """A batch whose `labels` say where the words are that are tagged; for a head that reads words as `ner` gives it."""
    batch = pad_words(data.__getitems__(numbers))
    is_featured = isinstance(setting.model, heads.BertFeaturesForTokenClassification)
    return batch | place_words(data, numbers) if is_featured else batch


# --- What is said -----------------------------------------------------------------------------------------------------


def check_finite(logits: np.ndarray) -> np.ndarray:
    """The logits.

    Raises:
        UsageError: some are no numbers, as those of a model that has diverged.
    """
    if not np.isfinite(logits).all():
        raise UsageError(DIVERGED)
    return logits


def keep_logits(outputs: Any, batch: Mapping[str, Tensor], setting: PredictionSettings) -> np.ndarray:
    """(B, L), or (B, C) of choices."""
    return check_finite(outputs.logits.float().cpu().numpy())


def conclude_classes(kept: Sequence[np.ndarray], data: Any, examples: Any, setting: PredictionSettings) -> list[Result]:
    """Return the class of each example, its several labels, or its scores, as the `problem_type` says."""
    logits = np.stack(kept)  # (S, L)
    kind = setting.model.config.problem_type
    if kind == "multi_label_classification":
        results = [dict(zip(setting.labels, row, strict=True)) for row in expit(logits).tolist()]
        return [
            {"labels": [label for label, value in row.items() if value > 0.5], "probabilities": row} for row in results
        ]
    if len(setting.labels) == 1:
        return [{"score": value} for value in logits[:, 0].tolist()]
    if kind == "regression":
        return [{"scores": dict(zip(setting.labels, row, strict=True))} for row in logits.tolist()]
    return [
        {
            "label": setting.labels[best],
            "probability": row[best],
            "probabilities": dict(zip(setting.labels, row, strict=True)),
        }
        for best, row in zip(logits.argmax(1).tolist(), softmax(logits, axis=1).tolist(), strict=True)
    ]


def describe_class(result: Result) -> str:
    """Return the class or the labels and how likely they are, or the scores."""
    if "label" in result:
        return f"{result['label']}  ({result['probability']:.1%})"
    if "labels" in result:
        found = (f"{label} ({result['probabilities'][label]:.1%})" for label in result["labels"])
        return ", ".join(found) or "(no label)"
    if "scores" in result:
        return ", ".join(f"{label} {value:.3f}" for label, value in result["scores"].items())
    return f"{result['score']:.3f}"


def conclude_choices(
    kept: Sequence[np.ndarray], data: Any, examples: Sequence[tuple[str, list[str]]], setting: PredictionSettings
) -> list[Result]:
    """The likeliest ending of each example."""
    results, scores = [], iter(np.concatenate(kept))
    for _, endings in examples:
        logits = np.fromiter(islice(scores, len(endings)), np.float64)
        results.append({"ending": int(logits.argmax()), "probabilities": softmax(logits).tolist()})
    return results


def find_shortened_choices(data: Sequences, examples: Sequence[tuple[str, list[str]]]) -> list[bool]:
    """Of each example whether the context with any of its endings was cut."""
    flags = iter(data.shortened.tolist())
    return [any(list(islice(flags, len(endings)))) for _, endings in examples]


def describe_choice(result: Result) -> str:
    """The number of the ending, from 1, and how likely it is."""
    return f"ending {result['ending'] + 1}  ({result['probabilities'][result['ending']]:.1%})"


def keep_spans(outputs: Any, batch: Mapping[str, Tensor], setting: PredictionSettings) -> np.ndarray:
    """(B, 4 * N_BEST + 2), as `decode` needs it."""
    kept = keep_top(outputs.start_logits, outputs.end_logits).cpu().numpy()
    check_finite(kept[:, -2:])
    return kept


def conclude_answers(
    kept: Sequence[np.ndarray], data: Windows, examples: Sequence[Question], setting: PredictionSettings
) -> list[Result]:
    """The answer to each question, given if its best span is good enough (section 4.3)."""
    tau = setting.model.config.tau
    results = []
    columns = (column.tolist() for column in find_best(np.stack(kept), data))
    for question, start, end, score, null in zip(examples, *columns, strict=True):
        text = question.context[start:end]
        is_answer = tau is None or null - score < -tau
        result = {
            "answer": text if is_answer else "",
            "best": {"text": text, "start": start, "end": end, "score": score},
        }
        results.append(result if tau is None else result | {"null_score": null, "tau": tau})
    return results


def describe_answer(result: Result) -> str:
    """The answer, and how far it is from none."""
    text = result["answer"] or "(no answer)"
    if "tau" not in result:
        return f"{text}  (score {result['best']['score']:.2f})"
    margin = result["best"]["score"] - result["null_score"] - result["tau"]
    best = "" if result["answer"] else f", best span {result['best']['text']!r}"
    return f"{text}  ({abs(margin):.2f} {'above' if margin > 0 else 'below'} the threshold{best})"


def keep_tags(outputs: Any, batch: Mapping[str, Tensor], setting: PredictionSettings) -> list[np.ndarray]:
    """Of each sequence the labels of its own words that have a token."""
    rows = summarize(outputs, batch).cpu().numpy()
    if (rows == UNDECIDED).any():
        raise UsageError(DIVERGED)
    return [row[row != IGNORED] for row in rows]


def conclude_tags(
    kept: Sequence[np.ndarray], data: WordWindows, examples: Sequence[Tagged], setting: PredictionSettings
) -> list[Result]:
    """The tags of each text, and its entities if the tags are IOB."""
    tags: list[list[str]] = [[] for _ in examples]
    for index, (sentence, row) in enumerate(zip(data.text.sentences, kept, strict=True)):
        tags[sentence.document - 1] += data.name_tags(index, row)
    is_iob = all(TAG.fullmatch(label) for label in setting.labels)
    results = []
    for example, found in zip(examples, tags, strict=True):
        result = {"entities": list_entities(example, found)} if is_iob else {}
        places = {} if example.text is None else {"places": [list(place) for place in example.places]}
        results.append(result | {"tags": found} | places)
    return results


def list_entities(example: Tagged, tags: Sequence[str]) -> list[dict[str, Any]]:
    """The entities of a text: what they are, and where."""
    entities = []
    for first, behind, kind in find_entities(tags):
        start, end = example.places[first][0], example.places[behind - 1][1]
        text = " ".join(example.words[first:behind]) if example.text is None else example.text[start:end]
        entities.append({"text": text, "type": kind, "start": start, "end": end})
    return entities


def describe_tags(result: Result) -> str:
    """The entities, or all tags."""
    if "entities" not in result:
        return " ".join(result["tags"])
    return ", ".join(f"{found['text']}: {found['type']}" for found in result["entities"]) or "(nothing)"


def keep_masks(outputs: Any, batch: Mapping[str, Tensor], setting: PredictionSettings) -> list[tuple[Any, Any, Any]]:
    """Of each sequence the likeliest tokens of its masks, their probabilities, and what follows: None, or (2,)."""
    logits = outputs.logits if "logits" in outputs else outputs.prediction_logits  # (M, V)
    chances = logits.float().softmax(-1)[:, : len(setting.tokenizer)]  # the model may have room for more
    best = chances.topk(min(setting.top, chances.shape[-1]))  # (M, top)
    check_finite(best.values.cpu().numpy())
    counts = (batch["labels"] != IGNORED).sum(1).tolist()
    tokens, chances = best.indices.cpu().split(counts), best.values.cpu().split(counts)
    follows = outputs.get("seq_relationship_logits")
    pairs = [None] * len(counts) if follows is None else check_finite(follows.float().cpu().numpy())
    return list(zip(tokens, chances, pairs, strict=True))


def conclude_masks(
    kept: Sequence[tuple[Any, Any, Any]], data: Any, examples: Any, setting: PredictionSettings
) -> list[Result]:
    """The likeliest words of each mask, and of two texts the probability that one follows the other."""
    results = []
    for (tokens, chances, pair), example in zip(kept, examples, strict=True):
        masks = [
            {
                "words": [
                    {"word": word, "probability": chance}
                    for word, chance in zip(setting.tokenizer.convert_ids_to_tokens(row), found, strict=True)
                ]
            }
            for row, found in zip(tokens.tolist(), chances.tolist(), strict=True)
        ]
        follows = {} if pair is None or not example["token_type_ids"].any() else {"next_sentence": judge(pair)}
        results.append({"masks": masks} | follows)
    return results


def judge(logits: np.ndarray) -> float:
    """The probability that the second text follows the first, of next-sentence logits (2,)."""
    return float(softmax(logits)[0])


def conclude_pairs(kept: Sequence[np.ndarray], data: Any, examples: Any, setting: PredictionSettings) -> list[Result]:
    """Whether the second text of each example follows the first."""
    return [{"next_sentence": judge(row)} for row in kept]


def describe_masks(result: Result) -> str:
    """The words of each mask, and whether a text follows."""
    parts = [
        ", ".join(f"{found['word']} {found['probability']:.0%}" for found in mask["words"])
        for mask in result.get("masks", [])
    ]
    if "next_sentence" in result:
        parts.append(f"follows: {result['next_sentence']:.1%}")
    return "; ".join(parts)


# --- The heads --------------------------------------------------------------------------------------------------------


def name_pair(setting: PredictionSettings) -> tuple[str, ...]:
    """One text or two, as the run's task has it."""
    return PAIR_NAMES[0] if setting.pairs else SINGLES[:1]


CLASSES = HeadUse(
    name_pair,
    read_texts,
    encode_examples,
    keep_logits,
    conclude_classes,
    describe_class,
    find_shortened=lambda data, _: data.shortened,
)
MASKS = HeadUse(
    name_pair,
    partial(read_masked, with_pair=False),
    encode_masks,
    keep_masks,
    conclude_masks,
    describe_masks,
    collate=collate_masks,
    options={"targets_only": True},
)
TAGS = HeadUse(
    lambda setting: ("text",),
    read_words,
    encode_tagged,
    keep_tags,
    conclude_tags,
    describe_tags,
    collate=collate_words,
)
USES = {
    "BertForSequenceClassification": CLASSES,
    "BertForNextSentencePrediction": replace(
        CLASSES,
        fields=lambda setting: PAIR_NAMES[0],
        read=lambda given, setting: read_texts(given, replace(setting, pairs=True)),
        conclude=conclude_pairs,
        describe=describe_masks,
    ),
    "BertForPreTraining": replace(MASKS, read=partial(read_masked, with_pair=True)),
    "BertForMaskedLM": MASKS,
    "BertForTokenClassification": TAGS,
    "BertFeaturesForTokenClassification": TAGS,
    "BertForQuestionAnswering": HeadUse(
        lambda setting: ("question", "context"),
        read_question,
        encode_contexts,
        keep_spans,
        conclude_answers,
        describe_answer,
        find_shortened=lambda data, _: data.shortened,
    ),
    "BertForMultipleChoice": HeadUse(
        lambda setting: ("context", "endings…"),
        read_choice,
        encode_choices,
        keep_logits,
        conclude_choices,
        describe_choice,
        find_shortened=find_shortened_choices,
        collate=collate_choices,
    ),
}
