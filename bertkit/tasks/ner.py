"""CoNLL-2003: the names of persons, places, organisations and others in a text (paper section 5.3), as a Task.

Each word is classified by the final vector of its first sub-token, among as much of its document as fits, and without a
CRF: nothing keeps a sequence of tags well-formed, and conlleval says how it is read all the same. Any CoNLL file with
tags in IOB will do; the labels are those of its training file, matched by name.

With `features` it is the feature-based approach: the encoder stays as it is and runs once, and a BiLSTM learns from
what it has said of each word's first sub-token, which is kept on disk (`bertkit.tasks.features`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.data.formats.conll import (
    DOCSTART,
    NER_CONFIG,
    NER_HUB,
    NER_HUB_SPLITS,
    find_conll,
    read_conll,
    read_conll_copy,
    to_iob1,
)
from bertkit.data.sequences import IGNORED
from bertkit.data.tagging import ABSENT, Sentence, TaggedText, WordWindows, encode_words, pad_words
from bertkit.errors import UsageError
from bertkit.metrics.ner import find_entities, score_entities
from bertkit.model.bilstm import FEATURE_LAYERS
from bertkit.model.heads import BertFeaturesForTokenClassification
from bertkit.reports.tables import ScoreRow
from bertkit.system.files import take_fingerprint
from bertkit.system.progress import Report
from bertkit.tasks import finetuning
from bertkit.tasks.features import Features, cache_features, pad_features
from bertkit.tasks.task import LONGEST_SHOWN, Task, repeat_run

UNDECIDED = -1  # instead of a label, where the logits are no numbers
ENTITY_SCORES = ("precision", "recall", "f1")
NER_SCORES = {"dev": "{}", "test": "test_{}"}
NER_PAPER = {  # Table 7
    "f1": {"BERT-base, dev": 0.964, "BERT-large, dev": 0.966},
    "test_f1": {"BERT-base, test": 0.924, "BERT-large, test": 0.928},
}

NER_RECIPE = finetuning.FINETUNING_RECIPE | {
    "checkpoint": "google-bert/bert-base-cased",  # section 5.3: a case-preserving WordPiece model
    "batch_size": 32,  # A.3's grid, as the three below; section 5.3 does not say which
    "data": {
        "dir": "",  # empty: the Hub's data set
        "max_length": 512,  # the longest there is: section 5.3's maximal context
        "context": True,  # whether the sentences around are shown too
        "features": "",  # the layers of the feature-based approach (Table 7); empty: fine-tuning
        "half_features": False,  # 16 bits a number on disk instead of 32
        "features_dir": "",  # where they are kept; empty: bertkit/features in the user's cache
        "max_train_samples": 0,  # the first so many sentences; 0: all
    },
    "train": finetuning.TRAIN
    | {
        "num_train_epochs": 3.0,
        "learning_rate": 5e-5,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    },
}

# Differs from the paper: it names neither rate nor epochs for the BiLSTM. These are usual for one of this size.
FEATURE_BASED = {"train": {"learning_rate": 1e-3, "num_train_epochs": 10.0}}
BILSTM_SIZE = 768  # units a direction: section 5.3's "two-layer 768-dimensional BiLSTM"

# "text": a TaggedText; "labels": the tags of training, O first; and two of `[data]`'s options.
TaggedExamples = dict[str, Any]


# --- The data ---------------------------------------------------------------------------------------------------------


def check(recipe: Mapping[str, Any]) -> None:
    """Nothing, or a UsageError about an option."""
    finetuning.check_recipe("ner", recipe, {"max_length": 3, "max_train_samples": 0})
    if not (layers := recipe["data"]["features"]):
        return
    if layers not in FEATURE_LAYERS:
        raise UsageError(f"unknown layers {layers!r} in features; expected one of {', '.join(FEATURE_LAYERS)}")
    for key in ("freeze", "bilstm", "reinit_layers"):
        if recipe.get(key):
            raise UsageError(f"{key} is for fine-tuning: features leave the encoder as it is; leave {key} out")


def overrides(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the feature-based approach changes in the recipe."""
    return FEATURE_BASED if given.get("data", {}).get("features") else {}


def name_head(options: Mapping[str, Any]) -> str:
    """The head of either approach."""
    return "BertFeaturesForTokenClassification" if options["features"] else "BertForTokenClassification"


def load(options: Mapping[str, Any], report: Report) -> dict[str, TaggedExamples]:
    """The examples of train, dev and, if it is there, test."""
    if options["dir"]:
        texts = {split: read_conll(path) for split, path in find_conll(options["dir"], report).items()}
    else:
        texts = read_conll_copy()
    for text in texts.values():
        if text.odd:
            report(f"{text.source}: tags are {text.scheme}, but {text.odd:,} entities begin as in the other scheme")
    if options["context"] and (silent := [text.source for text in texts.values() if not text.documents]):
        report(f"no {DOCSTART} says where documents end, so sentences are without context: {', '.join(silent)}")
    sentences = texts["train"].sentences[: options["max_train_samples"] or None]
    texts["train"] = replace(texts["train"], sentences=sentences)
    report("NER: " + ", ".join(f"{split} {len(text.sentences):,} sentences" for split, text in texts.items()))
    labels = list_labels(texts["train"])
    shown = {key: options[key] for key in ("max_length", "context")}
    return {split: {"text": text, "labels": labels} | shown for split, text in texts.items()}


def list_labels(text: TaggedText) -> tuple[str, ...]:
    """O and the other tags of a text in alphabetical order."""
    tags = {tag for sentence in text.sentences for tag in sentence.tags}
    return ("O", *sorted(tags - {"O"}))


@dataclass(frozen=True, eq=False)
class FeaturedWords(Features):
    """The features of a split's words, with the sentences that they are of; whether they replace a damaged file."""

    words: WordWindows
    is_renewed: bool

    def fingerprint(self) -> str:
        """What tells its sentences and their features from any others; the file is named after what made them."""
        return take_fingerprint(self.words.fingerprint().encode(), self.path.stem.encode())


def encode(
    examples: TaggedExamples, tokenizer: Any, recipe: Mapping[str, Any], split: str
) -> WordWindows | FeaturedWords:
    """The sequences of a split, or their features."""
    options = recipe["data"]
    words = encode_words(examples["text"], examples["labels"], tokenizer, options["max_length"], options["context"])
    if not options["features"]:
        return words
    path, is_renewed = cache_features(
        recipe["checkpoint"],
        options["features"],
        words.flatten(),
        *words.locate_all()[:2],
        folder=options["features_dir"],
        half=options["half_features"],
    )
    return FeaturedWords(path, *words.locate_all()[1:], words, is_renewed)


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of some sequences, of either approach."""
    return pad_features(items) if "features" in items[0] else pad_words(items)


def get_words(data: WordWindows | FeaturedWords) -> WordWindows:
    """The sentences of a data set."""
    return data.words if isinstance(data, FeaturedWords) else data


def describe(data: WordWindows | FeaturedWords, split: str) -> list[str]:
    """How much context there is, and what cannot be predicted; of features, where they are."""
    if isinstance(data, FeaturedWords):
        kept = f"{data.path} ({data.path.stat().st_size / 1e6:,.1f} MB)"
        again = ", computed again: the checksum of the cached file was wrong" * data.is_renewed
        return [*describe(data.words, split), f"{split}: features of {len(data.labels):,} words in {kept}{again}"]
    own, shown = np.diff(data.ends, prepend=0).mean(), (data.stops - data.starts).mean()
    line = f"{split}: {own:.1f} tokens a sentence, {shown:.1f} with context"
    if lost := int((data.firsts == ABSENT).sum()):
        line += f"; {lost:,} words have no token and are predicted O"
    tags = [tag for sentence in data.text.sentences for tag in sentence.tags if tag not in data.names]
    if tags:
        line += f"; {len(tags):,} words have a tag that is not in training ({', '.join(sorted(set(tags)))})"
    return [line]


def configure(
    recipe: Mapping[str, Any], tokenizer: Any, examples: Mapping[str, TaggedExamples] | None
) -> dict[str, Any]:
    """The labels by name; the vocabulary has to hold the tokenizer's tokens."""
    if tokenizer is None or examples is None:
        return {}
    settings = {"id2label": dict(enumerate(examples["train"]["labels"])), "vocab_size": len(tokenizer)}
    if not (layers := recipe["data"]["features"]):
        return settings
    units = recipe["model"].get("bilstm_hidden_size", BILSTM_SIZE)
    return settings | {"feature_layers": layers, "bilstm_hidden_size": units}


# --- Scores -----------------------------------------------------------------------------------------------------------


def summarize(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, W) the likeliest label of each of a sentence's own words that have a token, W the most; then IGNORED.

    UNDECIDED where the logits are no numbers. The Trainer fills up batches of another W with the same -100.
    """
    known = batch["labels"] != IGNORED  # (B, T)
    best = outputs.logits.argmax(-1).masked_fill(~outputs.logits.isfinite().all(-1), UNDECIDED)  # (B, T)
    counts = known.sum(1, keepdim=True)
    places = torch.arange(max(int(counts.max()), 1), device=known.device) < counts  # (B, W)
    return torch.full(places.shape, IGNORED, device=known.device).masked_scatter(places, best[known])


def decide(kept: np.ndarray, data: WordWindows | FeaturedWords) -> list[list[str]]:
    """The predicted tags of every sentence, from its summary (S, W).

    Raises:
        UsageError: the logits were no numbers, as those of a model that has diverged.
    """
    if (kept == UNDECIDED).any():
        raise UsageError(finetuning.DIVERGED)
    words = get_words(data)
    return [words.name_tags(index, row[row != IGNORED]) for index, row in enumerate(kept)]


def list_tags(data: WordWindows | FeaturedWords) -> list[Sequence[str]]:
    """The right tags of every sentence."""
    return [sentence.tags for sentence in get_words(data).text.sentences]


def score(kept: np.ndarray, data: WordWindows | FeaturedWords) -> dict[str, float]:
    """Precision, recall and F1 of the entities, as fractions; a UsageError as `decide`.

    An entity of a type that training does not have counts as well.
    """
    scores = score_entities(list_tags(data), decide(kept, data))
    return {name: scores[name] for name in ENTITY_SCORES}


def baseline(train: WordWindows | FeaturedWords, dev: WordWindows | FeaturedWords) -> dict[str, float]:
    """What never tagging anything, which is O for most words, scores on the dev set: `majority_…`."""
    scores = score_entities(list_tags(dev), [["O"] * len(tags) for tags in list_tags(dev)])
    return {f"majority_{name}": scores[name] for name in ENTITY_SCORES} | {"majority_score": scores["f1"]}


def diagnose(metrics: Mapping[str, Any]) -> list[str]:
    """A warning where never tagging anything scores as much."""
    if metrics["f1"] > metrics["majority_f1"]:
        return []
    return [
        "warning: no entity is found. Likely causes: too few sentences or updates, a learning rate that is too low or "
        "too high, or an unlucky seed (try --set preset=stable or --set train.num_train_epochs=10)"
    ]


# --- Files ------------------------------------------------------------------------------------------------------------


def predict(kept: np.ndarray, data: WordWindows | FeaturedWords, split: str) -> dict[str, str]:
    """A file in conlleval's form: word, official tag and predicted tag, in the scheme of the official file."""
    predicted, text = decide(kept, data), get_words(data).text
    if text.scheme == "IOB1":
        predicted = [to_iob1(tags) for tags in predicted]
    return {f"{split}.conll": write_conll(text, predicted)}


def write_conll(text: TaggedText, predicted: Sequence[Sequence[str]]) -> str:
    """The lines of a text with predicted tags, and its -DOCSTART- lines."""
    parts, document = [], 0
    for sentence, tags in zip(text.sentences, predicted, strict=True):
        if sentence.document > document:
            parts.append(f"{DOCSTART} O O\n")
            document = sentence.document
        rows = zip(sentence.words, sentence.official, tags, strict=True)
        parts.append("".join(f"{word} {tag} {guess}\n" for word, tag, guess in rows))
    return "\n".join(parts)


@torch.no_grad()
def show_examples(
    model: nn.Module, tokenizer: Any, examples: Mapping[str, TaggedExamples], count: int = 5
) -> list[str]:
    """The first sentences of the dev set that have an entity, with those that the model finds and the right ones."""
    text, names, longest, context = (examples["dev"][key] for key in ("text", "labels", "max_length", "context"))
    data = encode_words(text, names, tokenizer, longest, context)
    shown = (index for index, tags in enumerate(list_tags(data)) if find_entities(tags))
    chosen = list(islice((index for index in shown if (data.locate(index) != ABSENT).any()), count))
    if not chosen:
        return []
    batch = pad_words(data.__getitems__(chosen))
    if isinstance(model, BertFeaturesForTokenClassification):
        batch |= place_words(data, chosen)
    outputs = model(**{name: column.to(model.device) for name, column in batch.items()})
    lines = []
    for index, row in zip(chosen, summarize(outputs, batch).cpu().numpy(), strict=True):
        sentence, tags = text.sentences[index], data.name_tags(index, row[row != IGNORED])
        found, right = list_entities(sentence, tags), list_entities(sentence, sentence.tags)
        lines.append(f"{shorten(' '.join(sentence.words), LONGEST_SHOWN, placeholder='…')}  →  {found}  ({right})")
    return lines


def place_words(data: WordWindows, chosen: Sequence[int]) -> dict[str, Tensor]:
    """`word_places` and `labels` (B, W) of some sentences, for a head that reads words."""
    places, labels = [], []
    for index in chosen:
        found = data.locate(index)
        places.append(torch.from_numpy(found[found != ABSENT]))
        labels.append(torch.zeros_like(places[-1]))
    return {
        "word_places": nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=ABSENT),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def list_entities(sentence: Sentence, tags: Sequence[str]) -> str:
    """The entities of a sentence as a person reads them."""
    found = [f"{' '.join(sentence.words[start:end])}: {kind}" for start, end, kind in find_entities(tags)]
    return shorten(", ".join(found), LONGEST_SHOWN, placeholder="…") or "nothing"


def suggest(output: Path, recipe: Mapping[str, Any]) -> list[str]:
    """What to do with a fine-tuned model."""
    again = repeat_run(output, "43", "train.seed=43")
    return [
        f"bertkit ner {again}  # another seed",
        f"bertkit features {quote(str(output))} --input texts.txt --layers last --output vectors.npz  # its vectors",
    ]


# --- The task ---------------------------------------------------------------------------------------------------------


def list_rows() -> tuple[ScoreRow, ...]:
    """The lines of the table: each metric on each split."""
    words = {"precision": "precision", "recall": "recall", "f1": "F1"}
    nothing = {"f1": {"never tagging": "majority_f1"}}
    rows = []
    for split, name in NER_SCORES.items():
        for metric, word in words.items():
            key, title = name.format(metric), word if split == "dev" else f"{word}, {split}"
            rows.append(ScoreRow(title, key, nothing.get(key, {}), "fraction", NER_PAPER.get(key, {})))
    return tuple(rows)


NER = Task(
    name="ner",
    recipe={"task": "ner"} | NER_RECIPE,
    stable=finetuning.STABLE,
    metric="f1",
    check=check,
    head=name_head,
    overrides=overrides,
    load=load,
    tokenize=finetuning.tokenize,
    configure=configure,
    encode=encode,
    describe=describe,
    collate=collate,
    summarize=summarize,
    score=score,
    baseline=baseline,
    table=list_rows(),
    examples=show_examples,
    diagnose=diagnose,
    suggest=suggest,
    splits=NER_SCORES,
    predict=predict,
    title="CoNLL-2003",
    copies={name: (NER_HUB, NER_CONFIG, split) for name, split in NER_HUB_SPLITS.items()},
    folder="ner",
)
