"""CoNLL-2003: the names of persons, places, organisations and others in a text (paper section 5.3), as a Task.

Each word is classified by the final vector of its first sub-token, among as much of its document as fits, and without a
CRF: nothing keeps a sequence of tags well-formed, and conlleval says how it is read all the same. Any CoNLL file or
table can be used, with spans or tags, of names or a class of each word; labels are those of training, matched by name.

With `features` it is the feature-based approach: the frozen encoder runs once, and a BiLSTM is trained on the
activations of each word's first sub-token, which are cached on disk (`bertkit.tasks.frozen`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.special import expit, logsumexp, softmax

from bertkit.data.formats.annotations import list_brat_files, read_exports
from bertkit.data.formats.conll import (
    CONLL_SUFFIXES,
    DOCSTART,
    NER_CONFIG,
    NER_FILES,
    NER_HUB,
    NER_HUB_SPLITS,
    list_conll_files,
    read_conll,
    read_conll_copy,
)
from bertkit.data.formats.entities import (
    WORD_COLUMNS,
    drop_unmarked,
    read_entities,
    read_list,
    select_columns,
)
from bertkit.data.formats.rows import choose_reader, has_splits, locate_column
from bertkit.data.labels import BALANCED, check_class_weights, match_weights
from bertkit.data.sequences import IGNORED, EncodedInputs, pad_arrays, to_tensors
from bertkit.data.splits import DROP, UNLABELLED, check_split_options, divide_train, name_split
from bertkit.data.tagging import (
    ABSENT,
    BASIC,
    Features,
    OrderedWords,
    Sentence,
    TaggedText,
    WordWindows,
    encode_words,
    split_words,
)
from bertkit.data.tags import ENTITIES, WORDS, check_kinds, from_iob2, mark_words, name_scheme
from bertkit.errors import UsageError
from bertkit.metrics.ner import choose_redaction, score_entities, score_redaction
from bertkit.metrics.rows import WeightedScore
from bertkit.reports.tables import ScoreLine
from bertkit.system.files import take_fingerprint
from bertkit.system.hub import parse_dataset
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Decisions
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.finetuning import EVERY_EPOCH, REPORT_PAGE, FineTuningTask, name_baselines
from bertkit.tasks.inputs import take_text
from bertkit.tasks.option import NER_OPTIONS
from bertkit.tasks.redaction import (
    REDACTION_SCORES,
    choose_array_types,
    choose_types,
    describe_redaction,
    read_recall,
    tag_likely,
)
from bertkit.tasks.schema import INDEX, PROBABILITY, STRING, Schema, make_array, make_object
from bertkit.tasks.tag_answers import TagAnswers, list_gold, list_tagged, write_conll, write_rows
from bertkit.tasks.task import PredictionSettings, check_finite, refuse_tuning, score_summaries

if TYPE_CHECKING:
    from torch import Tensor

    from bertkit.model.config import BertConfig

UNDECIDED = -1  # label where the logits are NaN or infinite
ENTITY_SCORES = {"precision": "precision", "recall": "recall", "f1": "F1", "strict_f1": "strict F1"}
NO_TOKEN = -1.0  # instead of a probability of a word without a token, which cannot be redacted
WORD_SCORES = {"accuracy": "accuracy", "macro_f1": "macro F1"}  # scores of words with classes
NER_PAPER = {  # Table 7
    "f1": {"BERT-base, dev": 0.964, "BERT-large, dev": 0.966},
    "test_f1": {"BERT-base, test": 0.924, "BERT-large, test": 0.928},
}

BILSTM_SIZE = 768  # units a direction: section 5.3's "two-layer 768-dimensional BiLSTM"


@dataclass(frozen=True, eq=False)
class TaggedExamples:
    """The examples of a split."""

    text: TaggedText
    labels: Sequence[str]  # the tags of training, O first
    group: str  # the column of groups, or an empty text

    def take(self, numbers: np.ndarray) -> "TaggedExamples":
        """Return some of the sentences."""
        return replace(self, text=self.text.take(numbers))


@dataclass(frozen=True, eq=False)
class FeaturedWords(Features):
    """The features of a split's words."""

    words: WordWindows  # the sentences of the words

    def fingerprint(self) -> str:
        """Return a fingerprint of the sentences and their features; the file's name is a hash of their inputs."""
        return take_fingerprint(self.words.fingerprint().encode(), self.path.stem.encode())


NerData = WordWindows | OrderedWords | FeaturedWords


class NerTask(FineTuningTask):
    """Words of sentences with tags, fine-tuned or from features."""

    solves_head = True
    name = command = "ner"
    title = "CoNLL-2003"
    head = "BertFeaturesForTokenClassification"
    heads: Mapping[str, Mapping[str, str]] = {"features": {"": "BertForTokenClassification"}}
    # Differs from the paper: it names neither rate nor epochs for the BiLSTM. These are usual for one of this size.
    implied: Mapping[str, Mapping[str, Any]] = {
        **FineTuningTask.implied,
        "features": {"train": {"learning_rate": 1e-3, "num_train_epochs": 10.0}},
        "order": {"train": {"train_sampling_strategy": "sequential"}},  # the data set is in order already
    }
    metric = "f1"
    baselines = ("words",)
    next_commands = (
        REPORT_PAGE,
        "bertkit predict {run} --input texts.txt --output names.csv  # names of other texts",
        "bertkit features {run} --input texts.txt --layers last --output vectors.npz  # its vectors",
    )
    long = "read in parts"
    copies: Mapping[str, tuple[str, str, str]] = {
        name: (NER_HUB, NER_CONFIG, split) for name, split in NER_HUB_SPLITS.items()
    }
    options = NER_OPTIONS

    def __init__(self) -> None:
        self.table = list_rows()
        self.recipe = self.make_recipe(
            32,  # A.3's grid also has the rate and the epochs; section 5.3 does not say which
            checkpoint="google-bert/bert-base-cased",  # section 5.3: a case-preserving WordPiece model
            num_train_epochs=3.0,
            learning_rate=5e-5,
            **EVERY_EPOCH,
        )

    # --- The data -----------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check the recipe, including the options of the feature-based approach."""
        super().check(recipe)
        check_split_options(recipe.data)
        check_class_weights(recipe.data["class_weights"])
        if recipe.data["threshold"]:
            read_recall(recipe.data["threshold"])
        if recipe.data["features"]:
            refuse_tuning(recipe, "features, which keep the encoder unchanged")
            if recipe.data["order"]:
                raise UsageError("order is for fine-tuning; remove it from a recipe for features")

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, TaggedExamples]:
        """Read the examples of train, dev and, if it is there, test; splits that are missing are taken from train."""
        names = () if config is None else tuple(config.id2label[label] for label in range(config.num_labels))
        scheme = options["scheme"] or (name_scheme(names) if names else "")
        text_words = options.get("text_words", BASIC) if config is None else config.text_words
        texts = self.read(options, report, config is None, scheme, text_words)
        known = {tag[2:] for tag in mark_words(names, scheme)}
        check_kinds(options["dir"], known.union(*(text.list_kinds() for text in texts.values())), report)
        if config is not None:
            found = {split: text for split, text in texts.items() if split != "train"} or texts
            return {split: TaggedExamples(text, names, "") for split, text in found.items() if text.is_labelled}
        for text in texts.values():
            if text.odd:
                report(f"{text.source}: the scheme is {text.scheme}, but {text.odd:,} of the tags do not follow it")
        if options["context"] and (silent := [x.source for x in texts.values() if x.rows is None and not x.documents]):
            report(f"no {DOCSTART} marks where documents end, so sentences have no context: {', '.join(silent)}")
        for split in {"train", "dev"} & texts.keys():
            if not texts[split].is_labelled:
                if options["label"] and (rows := texts[split].rows):
                    locate_column(
                        rows.source, rows.table.column_names, ", ".join(options["label"]), "name one with --label"
                    )
                raise UsageError(
                    f"{texts[split].source} has no tags or spans; name their column with --label, or give some: only a "
                    "test split may be without them"
                )
        if options["threshold"]:
            if texts["train"].scheme == WORDS:
                raise UsageError("threshold is for names, but the tags are classes of words; leave it out")
            recall = read_recall(options["threshold"])
            texts = {split: replace(text, asked_recall=recall) for split, text in texts.items()}
        train = texts["train"]
        keys = list_keys(train, options["group"])
        taken = divide_train({split: text.source for split, text in texts.items()}, keys, options, "sentence")
        texts |= {split: train.take(numbers) for split, numbers in taken.items()}
        sentences = texts["train"].sentences[: options["max_train_samples"] or None]
        texts["train"] = replace(texts["train"], sentences=sentences)
        if "test" in texts and not texts["test"].is_labelled:
            texts[UNLABELLED] = replace(texts.pop("test"), scheme=train.scheme)
        report("NER: " + ", ".join(f"{split} {len(text.sentences):,} sentences" for split, text in texts.items()))
        # The models of all folds have the same labels.
        tags = {tag for sentence in (train.sentences if options["folds"] else sentences) for tag in sentence.tags}
        if train.scheme == WORDS:
            report(f"{train.source}: tags are {len(tags):,} classes of words, such as {max(tags)} (data.scheme=words)")
        else:
            tags.add("O")
        if len(tags) < 2:
            raise UsageError(f"{train.source} has the tag {min(tags)} alone; give sentences with other tags, or spans")
        labels = tuple(sorted(tags, key=lambda tag: (tag != "O", tag)))
        return {split: TaggedExamples(text, labels, options["group"]) for split, text in texts.items()}

    def read(
        self, options: Mapping[str, Any], report: Report, needs_train: bool, scheme: str, text_words: str | None
    ) -> dict[str, TaggedText]:
        """Read the sentences of each split: CoNLL files, a person's own tables or exports, or CoNLL-2003 on the Hub.

        If train has words, the texts of other splits are divided as by `predict` with a model of words.
        """
        label, texts = ", ".join(options["label"]), {}
        if not options["dir"]:
            return read_conll_copy(label, scheme)
        source = Path(options["dir"])
        is_table = (
            source.is_file() or parse_dataset(options["dir"]) or has_splits(source) or list_brat_files(options["dir"])
        )
        if is_table and source.suffix not in CONLL_SUFFIXES:
            tables = read_exports(options["dir"], choose_reader(options, report), report, needs_train)
            if options.get("is_check") or options.get("unlabelled") == DROP:
                tables = {split: drop_unmarked(rows, report, label) for split, rows in tables.items()}
            if needs_train and select_columns(tables["train"].table.column_names, label)[0] in WORD_COLUMNS:
                text_words = None
            sources, read = tables, partial(read_entities, text_words=text_words)
        else:
            is_file = source.suffix in CONLL_SUFFIXES and not source.is_dir()
            sources = {"train": source} if is_file else list_conll_files(source, report)
            read = partial(read_conll, encoding=options.get("encoding", ""))
        for split, one in sources.items():
            texts[split] = read(one, report, label, scheme)
            scheme = scheme or (WORDS if texts[split].scheme == WORDS else ENTITIES)
        return texts

    def is_official(self, source: str) -> bool:
        """Return whether this is a folder of CoNLL-2003's files, or with such a folder, or their copy on the Hub."""
        train = NER_FILES[0][0]
        return not source or any(found for form in (train, f"*/{train}") for found in Path(source).glob(form))

    def encode(
        self, examples: TaggedExamples, tokenizer: Any, recipe: Any, split: str, report: Report = ignore
    ) -> NerData:
        """Return the sequences of a split, or their features; a window is one sequence except in training."""
        options = recipe.data
        words = encode_words(examples.text, examples.labels, tokenizer, options["max_length"], options["context"])
        report(describe_words(words, split))
        windows = words.merge()
        if not options["features"]:
            if split != "train":
                return windows
            return OrderedWords(words, recipe.batch_size, recipe.train["seed"]) if options["order"] else words
        from bertkit.tasks.frozen import cache_features

        (positions, read, _), (_, ends, labels) = windows.locate_all(), words.locate_all()
        sequences, kept = windows.flatten(), {"folder": options["features_dir"], "half": options["half_features"]}
        path = cache_features(recipe.checkpoint, options["features"], sequences, positions, read, **kept)
        report(f"{split}: features of {len(labels):,} words in {path} ({path.stat().st_size / 1e6:,.1f} MB)")
        return FeaturedWords(path, ends, labels, words)

    def tabulate_examples(self, examples: TaggedExamples) -> ExampleRows:
        """Return the words and tags of each sentence; documents, groups or equal words belong together."""
        text = examples.text
        groups: Sequence[Hashable] = range(len(text.sentences))
        if text.rows is not None:
            groups = list(list_keys(text, examples.group))
        elif text.documents > 1:
            groups = text.number_documents().tolist()
        labels = [tuple(sentence.tags) for sentence in text.sentences] if text.is_labelled else None
        classes = [kind for entities in list_gold(text) for _, _, kind in entities]
        # A space inside a word would divide it in the column.
        texts = {"sentence": [" ".join(x.replace(" ", "\u00a0") for x in words) for words in text.list_words()]}
        return ExampleRows(texts, groups, labels, classes, [x.line for x in text.sentences], text.rows, text.columns)

    def configure(self, recipe: Any, tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return the labels by name, and the sizes of the feature-based approach."""
        if tokenizer is None or examples is None:
            return {}
        train = examples["train"]
        settings = {"id2label": dict(enumerate(train.labels)), "vocab_size": len(tokenizer)}
        settings["text_words"] = train.text.text_words
        if given := recipe.data["class_weights"]:
            settings["class_weights"] = weigh_tags(train, given)
        if not (layers := recipe.data["features"]):
            return settings
        units = recipe.model.get("bilstm_hidden_size", BILSTM_SIZE)
        return settings | {"feature_layers": layers, "bilstm_hidden_size": units}

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(
        self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings | None = None
    ) -> "Tensor | np.ndarray":
        """Return (B, W, 3): label, its probability and that of not being O, of a sequence's own words with a token.

        W is the largest number of such words; others are padded with IGNORED. Labels are UNDECIDED where the logits are
        NaN or infinite. The Trainer pads batches of another W with the same -100. With settings that redact it is
        (B, W, 4), with a label of the likeliest type.
        """
        if isinstance(outputs.logits, np.ndarray):
            return summarize_arrays(outputs.logits, batch["labels"] != IGNORED, settings)
        import torch

        is_word, logits = batch["labels"] != IGNORED, outputs.logits.float()  # (B, T) and (B, T, L)
        best = outputs.logits.argmax(-1).masked_fill(~outputs.logits.isfinite().all(-1), UNDECIDED)  # (B, T)
        # The labels of training begin with O.
        outside = 0 if settings is None or "O" not in settings.labels else settings.labels.index("O")
        inside = logits.index_fill(-1, torch.tensor([outside], device=logits.device), -torch.inf).logsumexp(-1)
        # The difference from 1 would round small probabilities.
        columns = [best.float(), logits.softmax(-1).amax(-1), (inside - logits[..., outside]).sigmoid()]
        if settings is not None and settings.redact is not None:
            columns.append(choose_types(logits, settings.labels).float())
        return torch.stack([gather_words(column, is_word) for column in columns], dim=-1)

    def decode(self, summaries: np.ndarray, data: NerData, decided: Decisions | None = None) -> TagAnswers:
        """Return the tags of every sentence, and the probability of each word's label if the summaries have it."""
        words, decides = get_words(data), decided is None
        decided = decided or {}
        labels = check_decided(summaries if summaries.ndim == 2 else summaries[..., 0]).astype(np.int64)  # (S, W)
        is_word = labels != IGNORED
        tags = words.name_tags([row[known] for row, known in zip(labels, is_word, strict=True)])
        if summaries.ndim == 2:
            return TagAnswers(words.text, tags, None, words.names)
        rows = [row[known] for row, known in zip(summaries, is_word, strict=True)]  # (words, 3 or 4) each
        likely = words.join([row[:, 1].tolist() for row in rows], 1.0)
        form, threshold = decided.get("redact"), decided.get("redaction_threshold")
        recall = words.text.asked_recall if decides and words.text.is_labelled else 0.0
        if not (recall or form or threshold is not None):
            return TagAnswers(words.text, tags, likely, words.names)
        shares = words.join([row[:, 2].tolist() for row in rows], NO_TOKEN)
        if recall:
            threshold = choose_redaction(shares, list_tagged(words.text), recall)
        if form and threshold is not None:
            kinds = words.join([[words.names[int(label)][2:] for label in row[:, 3]] for row in rows], "")
            tags = [tag_likely(*row, threshold) for row in zip(shares, kinds, strict=True)]
            likely = shares
        return TagAnswers(words.text, tags, likely, words.names, shares, threshold, form)

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return precision, recall, F1 and strict F1 of entities, or accuracy and macro F1 of words, as fractions."""
        scores = score_entities(rows)
        return {name: scores[name] for name in (*WORD_SCORES, *ENTITY_SCORES) if name in scores} | score_redaction(rows)

    def score_nothing(self, train: NerData, dev: NerData) -> dict[str, float]:
        """Return the scores of tagging every word O, which are 0, or with the most frequent class of words."""
        if dev is None or get_words(dev).text.scheme != WORDS:
            return dict.fromkeys(ENTITY_SCORES, 0.0)
        usual = np.bincount(get_words(train).labels).argmax()
        return score_summaries(self, fill_summaries(get_words(dev), usual), dev)

    def format_predictions(self, answers: TagAnswers, data: NerData, split: str) -> dict[str, str]:
        """Return a file in conlleval's form: word, official tag and predicted tag, in the official file's scheme.

        Those of a table also have JSON lines with its rows and the predicted tags or spans, and only these if some of
        its spans are not whole words.
        """
        text = answers.text
        predicted = [from_iob2(tags, text.scheme) for tags in answers.tags]
        name = name_split(split)
        is_exact = text.is_labelled and all(sentence.entities is None for sentence in text.sentences)
        files = {f"{name}.conll": write_conll(text, predicted)} if is_exact else {}
        return files if text.rows is None else files | {f"{name}.jsonl": write_rows(text, predicted)}

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return also what the threshold of redaction redacts on dev."""
        return [*super().comment(metrics), *describe_redaction(metrics)]

    # --- Answers ------------------------------------------------------------------------------------------------------

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a text or its words, and of its tags and entities, or of its words with their classes.

        Entities need tags of a known scheme; `places` are only those of a text.
        """
        kinds = {"text": STRING, "words": make_array(STRING)}
        needed = {"anyOf": [{"required": [name]} for name in kinds]}
        sample = {"text": "Ada Lovelace met Charles Babbage in London."}
        given = {"type": "object", "properties": kinds, **needed, "examples": [sample]}
        texts = {"text": STRING, "type": STRING, "start": INDEX, "end": INDEX, "score": PROBABILITY}
        scheme, pair = name_scheme(settings.labels), make_array(INDEX) | {"minItems": 2, "maxItems": 2}
        tags, redacted = settings.labels, {}
        if scheme == ENTITIES:  # redaction may tag a word with either tag of a type
            tags = list(dict.fromkeys([*tags, *(mark + tag[1:] for tag in tags if tag != "O" for mark in "BI")]))
            texts, redacted = (
                texts | {"placeholder": STRING},
                {"redacted": {"type": ["string", "array"]}, "unread": INDEX},
            )
        marked = make_array(make_object(texts, optional=("placeholder",)))
        words = {"tags": make_array({"enum": tags}), "places": make_array(pair)}
        return given, make_object({scheme: marked, **words, **redacted}, optional=("places", *redacted))

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Sentence:
        """Return the words of a text, or words as they are."""
        if (name := select_columns(given)[0]) in WORD_COLUMNS:
            words = read_list(given[name], name) if isinstance(given[name], str) else given[name]
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise UsageError(f"{name} must be a list of strings; for a single string use the key text")
            content, spans = None, [(number, number + 1) for number in range(len(words))]
        else:
            content = take_text(given, "text")
            spans = split_words(content, settings.model.config.text_words)
            words = [content[start:end] for start, end in spans]
        tags = ["O"] * len(words)
        return Sentence(words, tags, tags, document=0, line=0, content=content, spans=spans)

    def encode_inputs(self, examples: Sequence[Sentence], settings: PredictionSettings) -> EncodedInputs:
        """Return a sequence for each text, or several for a long one, so that none is truncated.

        The `labels` of a batch say which words are tagged; for a head that reads words they are as `ner` gives them.
        """
        sentences = [replace(example, document=number) for number, example in enumerate(examples, 1)]
        text = TaggedText("the input", sentences, len(examples), "IOB2", 0)
        data = encode_words(text, settings.labels, settings.tokenizer, settings.max_length)
        # The BiLSTM of the feature-based approach reads the words of one part of a long text only.
        is_featured = settings.head == "BertFeaturesForTokenClassification"
        data, collate = (data, locate_words) if is_featured else (data.merge(), pad_arrays)
        return EncodedInputs(data, data.stops - data.starts + 2, [False] * len(examples), collate)


# --- Words and tags ---------------------------------------------------------------------------------------------------


def get_words(data: NerData) -> WordWindows:
    """Return the sentences of a data set."""
    return data if isinstance(data, WordWindows) else data.words


def check_decided(summaries: np.ndarray) -> np.ndarray:
    """Return the summaries (S, W)."""
    check_finite(np.where(summaries == UNDECIDED, np.nan, summaries))
    return summaries


def fill_summaries(data: WordWindows, labels: np.ndarray) -> np.ndarray:
    """Return the summaries (S, W) of a model that predicts these labels (M,), or this one, for words with a token."""
    counts = np.diff(data.locate_all()[1], prepend=0)
    summaries = np.full((len(data), max(counts.max(), 1)), IGNORED)  # (S, W)
    summaries[np.arange(summaries.shape[1]) < counts[:, None]] = labels
    return summaries


def gather_words(values: "Tensor", known: "Tensor") -> "Tensor":
    """Return (B, W): the values (B, T) at the `known` positions (B, T), padded with IGNORED."""
    import torch

    counts = known.sum(1, keepdim=True)
    is_word = torch.arange(max(int(counts.max()), 1), device=known.device) < counts  # (B, W)
    return torch.full_like(is_word, IGNORED, dtype=values.dtype).masked_scatter(is_word, values[known])


def summarize_arrays(logits: np.ndarray, is_word: np.ndarray, settings: PredictionSettings | None) -> np.ndarray:
    """Return `NerTask.summarize` of arrays: logits (B, T, L), and whether tokens are words (B, T)."""
    best = np.where(np.isfinite(logits).all(-1), logits.argmax(-1), UNDECIDED)  # (B, T)
    outside = 0 if settings is None or "O" not in settings.labels else settings.labels.index("O")
    inside = logsumexp(np.delete(logits, outside, axis=-1), axis=-1)
    columns = [best, softmax(logits, axis=-1).max(-1), expit(inside - logits[..., outside])]
    if settings is not None and settings.redact is not None:
        columns.append(choose_array_types(logits, settings.labels))
    counts = is_word.sum(1)
    kept = np.full((len(counts), max(counts.max(), 1), len(columns)), IGNORED, np.float32)  # (B, W, columns)
    kept[np.arange(kept.shape[1]) < counts[:, None]] = np.stack(columns, axis=-1)[is_word]
    return kept


def list_keys(text: TaggedText, group: str) -> Iterator[str]:
    """Yield what keeps each sentence together with others: its group, or its document, or its words."""
    if group and text.rows is None:
        raise UsageError(f"group is {group!r}, but {text.source} has no columns of that kind; remove it")
    words = list(map(" ".join, text.list_words()))
    if group:
        yield from (cell.strip() or own for cell, own in zip(text.rows.find(group).to_pylist(), words, strict=True))
    elif text.documents > 1:
        for _, found in groupby(zip(text.sentences, words, strict=True), key=lambda pair: pair[0].document):
            own = [line for _, line in found]
            yield from ["\n".join(own)] * len(own)
    else:
        yield from words


def weigh_tags(train: TaggedExamples, given: str | Mapping[str, float]) -> list[float]:
    """Return the weight of each label: that of its type, balanced over the words of train or as given."""
    types = [name_type(label, train.text.scheme) for label in train.labels]
    if given != BALANCED:
        found = dict(zip(dict.fromkeys(types), match_weights(dict.fromkeys(types), given), strict=True))
        return [found[kind] for kind in types]
    counts = Counter(name_type(tag, train.text.scheme) for sentence in train.text.sentences for tag in sentence.tags)
    total = counts.total()
    return [total / (len(counts) * max(counts[kind], 1)) for kind in types]  # limits may leave a type without words


def name_type(tag: str, scheme: str) -> str:
    """Return the type of a tag: O, that of its entity, or the class of a word."""
    return tag if scheme == WORDS or tag == "O" else tag[2:]


def locate_words(items: Sequence[dict[str, Any]]) -> dict[str, "Tensor"]:
    """Return the batch of some sequences with `word_positions` and `labels` (B, W), for a head that reads words."""
    batch = pad_arrays(items)
    is_word = batch["labels"] != IGNORED  # (B, T)
    counts = is_word.sum(1)
    there = np.arange(counts.max()) < counts[:, None]  # (B, W)
    positions = np.full(there.shape, ABSENT)
    positions[there] = is_word.nonzero()[1]
    return to_tensors(batch | {"word_positions": positions, "labels": np.where(there, 0, IGNORED)})


def describe_words(data: WordWindows, split: str) -> str:
    """Return a line on the context of sentences, and the words that cannot be predicted."""
    count = len(data.text.sentences)
    own, shown = len(data.ids) / count, (data.stops - data.starts).mean()
    line = f"{split}: {own:.1f} tokens per sentence, {shown:.1f} with context"
    if lost := int((data.firsts == ABSENT).sum()):
        line += f"; {lost:,} words have no token and are predicted as {data.absent}"
    tags = [tag for sentence in data.text.sentences for tag in sentence.tags if tag not in data.names]
    if tags and data.text.is_labelled:
        line += f"; {len(tags):,} words have a tag that is not in training data ({', '.join(sorted(set(tags)))})"
    return line


def list_rows() -> tuple[ScoreLine, ...]:
    """Return the lines of the table: each metric on each split."""
    constants = {"f1": "never tagging"} | dict.fromkeys(WORD_SCORES, "the most frequent class")
    nothing = {x: {words: f"majority_{x}"} | name_baselines(NerTask.baselines, x) for x, words in constants.items()}
    rows = []
    for split, name in NerTask.splits.items():
        for metric, word in (WORD_SCORES | ENTITY_SCORES).items():
            key, title = name.format(metric), word if split == "dev" else f"{word}, {split}"
            hidden = name.format("accuracy") if metric == "f1" else ""  # F1 of words equals their accuracy
            rows.append(ScoreLine(title, key, nothing.get(key, {}), "fraction", NER_PAPER.get(key, {}), hidden))
        for metric, what in REDACTION_SCORES.items():
            title = f"{what} redacted" if split == "dev" else f"{what} redacted, {split}"
            rows.append(ScoreLine(title, name.format(metric), {}, "fraction"))
    return tuple(rows)


NER = NerTask()
