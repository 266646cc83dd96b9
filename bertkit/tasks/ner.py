"""CoNLL-2003: the names of persons, places, organisations and others in a text (paper section 5.3), as a Task.

Each word is classified by the final vector of its first sub-token, among as much of its document as fits, and without a
CRF: nothing keeps a sequence of tags well-formed, and conlleval says how it is read all the same. Any CoNLL file with
tags in IOB will do; the labels are those of its training file, matched by name.

With `features` it is the feature-based approach: the frozen encoder runs once, and a BiLSTM is trained on the
activations of each word's first sub-token, which are cached on disk (`bertkit.tasks.features`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.formats.conll import (
    DOCSTART,
    NER_CONFIG,
    NER_HUB,
    NER_HUB_SPLITS,
    TAG,
    find_conll,
    read_conll,
    read_conll_copy,
    to_iob1,
)
from bertkit.data.sequences import IGNORED, pad
from bertkit.data.tagging import ABSENT, Sentence, TaggedText, WordWindows, encode_words, split_words
from bertkit.errors import UsageError
from bertkit.metrics.ner import find_entities, score_entities
from bertkit.model.bilstm import FEATURE_LAYERS
from bertkit.model.heads import BertFeaturesForTokenClassification
from bertkit.reports.tables import ScoreRow
from bertkit.system.files import take_fingerprint
from bertkit.system.progress import Report
from bertkit.tasks.features import Features, cache_features, pad_features
from bertkit.tasks.finetuning import EVERY_EPOCH, FineTuningTask
from bertkit.tasks.option import NER_OPTIONS
from bertkit.tasks.task import DIVERGED, PredictionSettings, Result, shorten_text
from bertkit.tasks.texts import take_text

UNDECIDED = -1  # label where the logits are NaN or infinite
ENTITY_SCORES = ("precision", "recall", "f1")
NER_SCORES = {"dev": "{}", "test": "test_{}"}
NER_PAPER = {  # Table 7
    "f1": {"BERT-base, dev": 0.964, "BERT-large, dev": 0.966},
    "test_f1": {"BERT-base, test": 0.924, "BERT-large, test": 0.928},
}

# Differs from the paper: it names neither rate nor epochs for the BiLSTM. These are usual for one of this size.
FEATURE_BASED = {"train": {"learning_rate": 1e-3, "num_train_epochs": 10.0}}
BILSTM_SIZE = 768  # units a direction: section 5.3's "two-layer 768-dimensional BiLSTM"

# "text": a TaggedText; "labels": the tags of training, O first.
TaggedExamples = dict[str, Any]


@dataclass(frozen=True, eq=False)
class FeaturedWords(Features):
    """The features of a split's words.

    Attributes:
        words: The sentences of the words.
        is_renewed: Whether the features replace a damaged file.
    """

    words: WordWindows
    is_renewed: bool

    def fingerprint(self) -> str:
        """Return a fingerprint of the sentences and their features; the file's name is a hash of their inputs."""
        return take_fingerprint(self.words.fingerprint().encode(), self.path.stem.encode())


NerData = WordWindows | FeaturedWords


@dataclass(frozen=True)
class Tagged:
    """The words of a text with start and end of each, in characters, or in words if `text` is None."""

    words: Sequence[str]
    places: list[tuple[int, int]]
    text: str | None


class NerTask(FineTuningTask):
    """Words of sentences with tags, fine-tuned or from features."""

    name = command = folder = "ner"
    title = "CoNLL-2003"
    head = "BertForTokenClassification"
    metric = "f1"
    splits = NER_SCORES
    copies: Mapping[str, tuple[str, str, str]] = {
        name: (NER_HUB, NER_CONFIG, split) for name, split in NER_HUB_SPLITS.items()
    }
    options = NER_OPTIONS

    def __init__(self) -> None:
        self.table = list_rows()
        self.recipe = self.make_recipe(
            32,  # A.3's grid, as the rate and the epochs; section 5.3 does not say which
            checkpoint="google-bert/bert-base-cased",  # section 5.3: a case-preserving WordPiece model
            num_train_epochs=3.0,
            learning_rate=5e-5,
            **EVERY_EPOCH,
        )

    # --- The data -----------------------------------------------------------------------------------------------------

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Check the recipe, including the options of the feature-based approach."""
        super().check(recipe)
        if not (layers := recipe["data"]["features"]):
            return
        if layers not in FEATURE_LAYERS:
            raise UsageError(f"unknown layers {layers!r} in features; expected one of {', '.join(FEATURE_LAYERS)}")
        for key in ("freeze", "bilstm", "reinit_layers"):
            if recipe.get(key):
                raise UsageError(f"{key} is for fine-tuning, but features keep the encoder unchanged; remove {key}")

    def overrides(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the recipe changes of the feature-based approach."""
        return FEATURE_BASED if given.get("data", {}).get("features") else {}

    def choose_head(self, options: Mapping[str, Any]) -> str:
        """Return the head of either approach."""
        return "BertFeaturesForTokenClassification" if options["features"] else self.head

    def load(self, options: Mapping[str, Any], report: Report) -> dict[str, TaggedExamples]:
        """Read the examples of train, dev and, if it is there, test."""
        if options["dir"]:
            texts = {split: read_conll(path) for split, path in find_conll(options["dir"], report).items()}
        else:
            texts = read_conll_copy()
        for text in texts.values():
            if text.odd:
                report(
                    f"{text.source}: tags are {text.scheme}, but {text.odd:,} entities do not begin as in that scheme"
                )
        if options["context"] and (silent := [text.source for text in texts.values() if not text.documents]):
            report(f"no {DOCSTART} marks where documents end, so sentences have no context: {', '.join(silent)}")
        sentences = texts["train"].sentences[: options["max_train_samples"] or None]
        texts["train"] = replace(texts["train"], sentences=sentences)
        report("NER: " + ", ".join(f"{split} {len(text.sentences):,} sentences" for split, text in texts.items()))
        tags = {tag for sentence in sentences for tag in sentence.tags}
        labels = ("O", *sorted(tags - {"O"}))
        return {split: {"text": text, "labels": labels} for split, text in texts.items()}

    def encode(self, examples: TaggedExamples, tokenizer: Any, recipe: Mapping[str, Any], split: str) -> NerData:
        """Return the sequences of a split, or their features."""
        options = recipe["data"]
        words = encode_words(examples["text"], examples["labels"], tokenizer, options["max_length"], options["context"])
        if not options["features"]:
            return words
        places, ends, labels = words.locate_all()
        path, is_renewed = cache_features(
            recipe["checkpoint"],
            options["features"],
            words.flatten(),
            places,
            ends,
            folder=options["features_dir"],
            half=options["half_features"],
        )
        return FeaturedWords(path, ends, labels, words, is_renewed)

    def list_groups(self, examples: TaggedExamples) -> list[int | tuple[int]]:
        """Return the sentences' documents; where there are not several, each sentence is alone."""
        text = examples["text"]
        return [x.document if text.documents > 1 else (number,) for number, x in enumerate(text.sentences)]

    def select(self, examples: TaggedExamples, numbers: np.ndarray) -> TaggedExamples:
        """Return some of the sentences."""
        text = examples["text"]
        return {**examples, "text": replace(text, sentences=[text.sentences[number] for number in numbers.tolist()])}

    def collate(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the batch of some sequences, of either approach."""
        return pad_features(items) if "features" in items[0] else pad(items)

    def describe(self, data: NerData, split: str) -> list[str]:
        """Return lines on context and words that cannot be predicted, and the file of the features."""
        if isinstance(data, FeaturedWords):
            kept = f"{data.path} ({data.path.stat().st_size / 1e6:,.1f} MB)"
            again = ", recomputed because the checksum of the cached file was wrong" * data.is_renewed
            line = f"{split}: features of {len(data.labels):,} words in {kept}{again}"
            return [*self.describe(data.words, split), line]
        own, shown = np.diff(data.ends, prepend=0).mean(), (data.stops - data.starts).mean()
        line = f"{split}: {own:.1f} tokens per sentence, {shown:.1f} with context"
        if lost := int((data.firsts == ABSENT).sum()):
            line += f"; {lost:,} words have no token and are predicted as O"
        tags = [tag for sentence in data.text.sentences for tag in sentence.tags if tag not in data.names]
        if tags:
            line += f"; {len(tags):,} words have a tag that is not in training data ({', '.join(sorted(set(tags)))})"
        return [line]

    def configure(self, recipe: Mapping[str, Any], tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return the labels by name, and the sizes of the feature-based approach."""
        if tokenizer is None or examples is None:
            return {}
        settings = {"id2label": dict(enumerate(examples["train"]["labels"])), "vocab_size": len(tokenizer)}
        if not (layers := recipe["data"]["features"]):
            return settings
        units = recipe["model"].get("bilstm_hidden_size", BILSTM_SIZE)
        return settings | {"feature_layers": layers, "bilstm_hidden_size": units}

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (B, W): the likeliest label of each of a sentence's own words with a token, padded with IGNORED.

        W is the largest number of such words. Labels are UNDECIDED where the logits are NaN or infinite. The Trainer
        pads batches of another W with the same -100.
        """
        known = batch["labels"] != IGNORED  # (B, T)
        best = outputs.logits.argmax(-1).masked_fill(~outputs.logits.isfinite().all(-1), UNDECIDED)  # (B, T)
        counts = known.sum(1, keepdim=True)
        places = torch.arange(max(int(counts.max()), 1), device=known.device) < counts  # (B, W)
        return torch.full(places.shape, IGNORED, device=known.device).masked_scatter(places, best[known])

    def score(self, summaries: np.ndarray, data: NerData, decided: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Return precision, recall and F1 of the entities, as fractions.

        An entity of a type that training does not have counts as well.
        """
        gold = [sentence.tags for sentence in get_words(data).text.sentences]
        scores = score_entities(gold, decide(summaries, data))
        return {name: scores[name] for name in ENTITY_SCORES}

    def score_nothing(self, dev: NerData) -> dict[str, float]:
        """Return the scores of tagging every word O: 0."""
        return dict.fromkeys(ENTITY_SCORES, 0.0)

    def format_predictions(
        self, summaries: np.ndarray, data: NerData, split: str, decided: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return a file in conlleval's form: word, official tag and predicted tag, in the official file's scheme."""
        predicted, text = decide(summaries, data), get_words(data).text
        if text.scheme == "IOB1":
            predicted = [to_iob1(tags) for tags in predicted]
        return {f"{split}.conll": write_conll(text, predicted)}

    def suggest(self, output: Path, recipe: Mapping[str, Any]) -> list[str]:
        """Return commands that use the fine-tuned model."""
        vectors = f"bertkit features {quote(str(output))} --input texts.txt --layers last --output vectors.npz"
        return [*super().suggest(output, recipe), f"{vectors}  # its vectors"]

    # --- Answers ------------------------------------------------------------------------------------------------------

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Tagged:
        """Return the words of a text, or words as they are."""
        if "words" in given:
            words = given["words"]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise UsageError("words must be a list of strings; for a single string use the key text")
            tagged = take_words(words)
        else:
            text = take_text(given, "text")
            places = split_words(text)
            tagged = Tagged([text[start:end] for start, end in places], places, text)
        room = measure_room(settings)
        for word in tagged.words:
            # A character has a few tokens at most, so a short word need not be tokenized.
            if len(word) * 4 > room and (count := len(settings.words.encode([word], np.int64)[0])) > room:
                raise UsageError(f"the word {word[:20]!r}… has {count:,} tokens, but only {room:,} fit; split it")
        return tagged

    def encode_inputs(self, examples: Sequence[Tagged], settings: PredictionSettings) -> tuple[WordWindows, np.ndarray]:
        """Return a sequence for each text, and its tokens.

        A text that is too long for one gets several, each with the others as its context.
        """
        room, longest = measure_room(settings), settings.max_length - 2
        sentences = []
        for document, example in enumerate(examples, 1):
            counts = settings.words.encode(example.words, np.int64)[1].tolist()
            is_long = sum(counts) > longest
            start = used = 0
            for place, count in enumerate(counts):
                if is_long and used + count > room:
                    sentences.append(make_sentence(example.words[start:place], document))
                    start, used = place, 0
                used += count
            sentences.append(make_sentence(example.words[start:], document))
        text = TaggedText("the input", sentences, len(examples), "IOB2", 0)
        data = encode_words(text, settings.labels, settings.tokenizer, settings.max_length)
        return data, data.stops - data.starts + 2

    def collate_inputs(self, data: WordWindows, numbers: list[int], settings: PredictionSettings) -> dict[str, Tensor]:
        """Return a batch whose `labels` say which words are tagged; for a head that reads words as `ner` gives it."""
        batch = pad(data.__getitems__(numbers))
        is_featured = isinstance(settings.model, BertFeaturesForTokenClassification)
        return batch | place_words(data, numbers) if is_featured else batch

    def keep(self, outputs: Any, batch: Mapping[str, Tensor], settings: PredictionSettings) -> list[np.ndarray]:
        """Return for each sequence the labels of its own words with a token."""
        return [row[row != IGNORED] for row in check_decided(self.summarize(outputs, batch).cpu().numpy())]

    def answer(
        self, kept: Sequence[np.ndarray], data: WordWindows, examples: Sequence[Tagged], settings: PredictionSettings
    ) -> list[Result]:
        """Return the tags of each text, and its entities if the tags are IOB."""
        tags: list[list[str]] = [[] for _ in examples]
        for index, (sentence, row) in enumerate(zip(data.text.sentences, kept, strict=True)):
            tags[sentence.document - 1] += data.name_tags(index, row)
        is_iob = all(TAG.fullmatch(label) for label in settings.labels)
        results = []
        for example, found in zip(examples, tags, strict=True):
            result = {"entities": list_entities(example, found)} if is_iob else {}
            places = {} if example.text is None else {"places": [list(place) for place in example.places]}
            results.append(result | {"tags": found} | places)
        return results

    def find_truncated(self, data: WordWindows, examples: Sequence[Tagged]) -> list[bool]:
        """Return False for every text: a long one has several sequences."""
        return [False] * len(examples)

    def describe_result(self, result: Result) -> str:
        """Return the entities, or all tags."""
        return describe_entities(result["entities"]) if "entities" in result else " ".join(result["tags"])

    def format_for_pipeline(self, result: Result, settings: PredictionSettings) -> list[dict[str, Any]]:
        """Return the entities, grouped; `word` is the text as it was given."""
        return [
            {"entity_group": found["type"], "word": found["text"], "start": found["start"], "end": found["end"]}
            for found in result["entities"]
        ]

    def list_samples(self, examples: TaggedExamples, settings: PredictionSettings) -> Iterable[tuple[str, Tagged, str]]:
        """Return the sentences that have an entity and a token, and their entities."""
        for sentence in examples["text"].sentences:
            tagged = take_words(sentence.words)
            right = list_entities(tagged, sentence.tags)
            if right and len(settings.words.encode(sentence.words, np.int64)[0]):
                yield shorten_text(" ".join(sentence.words)), tagged, shorten_text(describe_entities(right))


# --- Words and tags ---------------------------------------------------------------------------------------------------


def get_words(data: NerData) -> WordWindows:
    """Return the sentences of a data set."""
    return data.words if isinstance(data, FeaturedWords) else data


def check_decided(summaries: np.ndarray) -> np.ndarray:
    """Return the summaries (S, W).

    Raises:
        UsageError: The logits were NaN or infinite, as after diverged training.
    """
    if (summaries == UNDECIDED).any():
        raise UsageError(DIVERGED)
    return summaries


def decide(summaries: np.ndarray, data: NerData) -> list[list[str]]:
    """Return the predicted tags of every sentence, from its summary (S, W)."""
    words = get_words(data)
    return [words.name_tags(index, row[row != IGNORED]) for index, row in enumerate(check_decided(summaries))]


def write_conll(text: TaggedText, predicted: Sequence[Sequence[str]]) -> str:
    """Return the lines of a text with predicted tags and -DOCSTART- lines."""
    parts, document = [], 0
    for sentence, tags in zip(text.sentences, predicted, strict=True):
        if sentence.document > document:
            parts.append(f"{DOCSTART} O O\n")
            document = sentence.document
        rows = zip(sentence.words, sentence.official, tags, strict=True)
        parts.append("".join(f"{word} {tag} {guess}\n" for word, tag, guess in rows))
    return "\n".join(parts)


def place_words(data: WordWindows, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Return `word_places` and `labels` (B, W) of some sentences, for a head that reads words."""
    places, labels = [], []
    for index in chosen:
        found = data.locate(index)
        places.append(torch.from_numpy(found[found != ABSENT]))
        labels.append(torch.zeros_like(places[-1]))
    return {
        "word_places": nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=ABSENT),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def measure_room(settings: PredictionSettings) -> int:
    """Return how many tokens of a long text one sequence tags: half of it, the other half is context."""
    return max(1, (settings.max_length - 2) // 2)


def make_sentence(words: Sequence[str], document: int) -> Sentence:
    """Return words without tags."""
    tags = ["O"] * len(words)
    return Sentence(words, tags, tags, document, 0)


def take_words(words: Sequence[str]) -> Tagged:
    """Return words that come without a text, their places being their numbers."""
    return Tagged(words, [(place, place + 1) for place in range(len(words))], None)


def list_entities(example: Tagged, tags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entities of a text, each with its text, type, start and end."""
    entities = []
    for first, behind, kind in find_entities(tags):
        start, end = example.places[first][0], example.places[behind - 1][1]
        text = " ".join(example.words[first:behind]) if example.text is None else example.text[start:end]
        entities.append({"text": text, "type": kind, "start": start, "end": end})
    return entities


def describe_entities(entities: Sequence[Mapping[str, Any]]) -> str:
    """Return entities in words."""
    return ", ".join(f"{found['text']}: {found['type']}" for found in entities) or "(nothing)"


def list_rows() -> tuple[ScoreRow, ...]:
    """Return the lines of the table: each metric on each split."""
    words = {"precision": "precision", "recall": "recall", "f1": "F1"}
    nothing = {"f1": {"never tagging": "majority_f1"}}
    rows = []
    for split, name in NER_SCORES.items():
        for metric, word in words.items():
            key, title = name.format(metric), word if split == "dev" else f"{word}, {split}"
            rows.append(ScoreRow(title, key, nothing.get(key, {}), "fraction", NER_PAPER.get(key, {})))
    return tuple(rows)


NER = NerTask()
