"""SWAG: which of four endings follows a sentence and the first words of the next one (paper section 4.4), as a Task.

A question has four sequences [CLS] context [SEP] start and ending [SEP]. One vector scores the C of each, followed by a
softmax over the four; the bias that transformers adds is the same for all and has no effect. Left out: the files
train_full.csv and val_full.csv, and scoring predictions of other programs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.special import softmax

from bertkit.data.formats.swag import ENDINGS, HUB_SWAG, Situation, read_swag, read_swag_copy
from bertkit.data.sequences import Batch, EncodedInputs, Groups, encode_inputs, pad_arrays
from bertkit.errors import UsageError
from bertkit.metrics.glue import compute_scores
from bertkit.metrics.rows import WeightedScore
from bertkit.reports.tables import ScoreLine
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import Answers, Decisions, Result, add_label_set, describe_set
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.finetuning import CALIBRATION_ROWS, EVERY_EPOCH, FineTuningTask
from bertkit.tasks.inputs import take_text
from bertkit.tasks.kinds import SINGLE_LABEL, Gold
from bertkit.tasks.option import SWAG_OPTIONS
from bertkit.tasks.schema import INDEX, PROBABILITY, STRING, Schema, make_array, make_input, make_object
from bertkit.tasks.task import PredictionSettings, check_finite

if TYPE_CHECKING:
    from bertkit.model.config import BertConfig

SWAG_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}
SWAG_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
SWAG_PAPER = {"BERT-base, dev": 0.816, "BERT-large, dev": 0.866, "BERT-large, test": 0.863}  # Table 4
ACCURACY = ScoreLine("accuracy", "accuracy", {"the majority ending": "majority_accuracy"}, "fraction", SWAG_PAPER)
CHOICES = tuple(f"ending {index + 1}" for index in range(len(ENDINGS)))
NUMBERED_ENDING = re.compile(r"ending\d+")

Continuations = tuple[str, list[str]]  # a context and its possible continuations


class SwagTask(FineTuningTask):
    """A context, the first words of the next sentence, and four endings."""

    name = command = "swag"
    title = "SWAG"
    head = "BertForMultipleChoice"
    metric = "accuracy"
    table = (ACCURACY, *CALIBRATION_ROWS)
    is_classifier = True
    splits: Mapping[str, str] = {"dev": "{}"}
    unlabelled = ("test",)
    copies: Mapping[str, tuple[str, str, str]] = {name: (*HUB_SWAG, split) for name, split in SWAG_SPLITS.items()}
    options = SWAG_OPTIONS

    def __init__(self) -> None:
        self.recipe = self.make_recipe(16, num_train_epochs=3.0, learning_rate=2e-5, **EVERY_EPOCH)  # section 4.4

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(
        self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None
    ) -> dict[str, list[Situation]]:
        """Read the questions of train, dev and test, and report a missing test set."""
        folder = Path(options["dir"])
        if config is not None:
            return {"dev": read_swag(folder / SWAG_FILES["dev"] if folder.is_dir() else folder)}
        if options["dir"]:
            files = {name: folder / file for name, file in SWAG_FILES.items()}
            found = [name for name, file in files.items() if name not in self.unlabelled or file.exists()]
            examples = {name: read_swag(files[name], labelled=name not in self.unlabelled) for name in found}
        else:
            examples = read_swag_copy(SWAG_SPLITS, self.unlabelled)
        for name, file in SWAG_FILES.items():
            if name not in examples:
                report(f"SWAG: {folder / file if options['dir'] else name} not found, skipping")
        examples["train"] = examples["train"][: options["max_train_samples"] or None]
        report("SWAG: " + ", ".join(f"{name} {len(found):,}" for name, found in examples.items()))
        return examples

    def encode(
        self, examples: list[Situation], tokenizer: Any, recipe: Any, split: str, report: Report = ignore
    ) -> Groups:
        """Return the questions of a split, four sequences each: A is the context, B the start and one ending."""
        pairs = [(one.context, f"{one.start} {ending}") for one in examples for ending in one.endings]
        answers = [one.answer for one in examples]
        sequences = encode_inputs(pairs, None, tokenizer, recipe.data["max_length"])
        labels = None if None in answers else np.array(answers, np.int64)
        return Groups(sequences, labels, np.full(len(examples), len(ENDINGS)))

    def tabulate_examples(self, examples: Sequence[Situation]) -> ExampleRows:
        """Return the context, the start and the endings of each question."""
        endings = zip(*(one.endings for one in examples), strict=True)
        texts = {"context": [one.context for one in examples], "start": [one.start for one in examples]}
        texts |= dict(zip(ENDINGS, map(list, endings), strict=True))
        answers = [one.answer for one in examples]
        labels = None if None in answers else [CHOICES[answer] for answer in answers]
        lines = [one.line for one in examples]
        return ExampleRows(texts, texts["context"], labels, labels or [], lines, choices=len(ENDINGS))

    # --- Scores -------------------------------------------------------------------------------------------------------

    def decode(self, summaries: Sequence[np.ndarray], data: Any, decided: Decisions | None = None) -> Answers:
        """Return the likeliest ending of each context, whose number of endings is that of its logits (C,)."""
        labels = data.labels if isinstance(data, Groups) else None
        return EndingAnswers(summaries, labels, (decided or {}).get("set_limit"))

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return the accuracy and the errors of the probabilities."""
        found = SINGLE_LABEL.measure(rows)
        return {row.key: found[row.key] for row in self.table if row.key in found}

    def score_nothing(self, train: Groups, dev: Groups) -> dict[str, float]:
        """Return the accuracy of always choosing the dev set's most frequent right ending."""
        return compute_scores(("accuracy",), np.full(len(dev), np.bincount(dev.labels).argmax()), dev.labels)

    def format_predictions(self, answers: Answers, data: Groups, split: str) -> dict[str, str]:
        """Return a file named as the split's, the number of each question and of its ending as CSV."""
        rows = "".join(f"{number},{logits.argmax()}\n" for number, logits in enumerate(answers.logits))
        return {SWAG_FILES[split]: f"index,pred\n{rows}"}

    # --- Answers ------------------------------------------------------------------------------------------------------

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the schemas of a context with endings, which may have their first words in common, and of a result.

        A result has the index of an ending and all probabilities, and may have a label set.
        """
        endings = ["She takes a bow and leaves the stage.", "The piano eats the notes of the song."]
        sample = {"context": "A girl plays the last notes of a song on the piano.", "endings": endings}
        kinds = {"context": STRING, "start": STRING, "endings": make_array(STRING) | {"minItems": 2}}
        sets = {} if settings.set_limit is None else {"label_set": make_array(INDEX)}
        result = make_object({"ending": INDEX, "probabilities": make_array(PROBABILITY)} | sets)
        return make_input(kinds, sample), result

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Continuations:
        """Return a context and its possible continuations; SWAG's column names are accepted, too."""
        context = take_text(given, "sent1" if "sent1" in given and "context" not in given else "context")
        start = given.get("start", given.get("sent2")) or ""
        endings = given.get("endings", [given[name] for name in given if NUMBERED_ENDING.fullmatch(str(name))])
        if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(x, str) for x in (start, *endings)):
            raise UsageError("endings must be a list of at least two strings, and start must be a string; correct them")
        return context, [f"{start} {ending}".strip() for ending in endings]

    def encode_inputs(self, examples: Sequence[Continuations], settings: PredictionSettings) -> EncodedInputs:
        """Return a sequence for each ending of each example, in order; any of them may be truncated."""
        pairs = [(context, ending) for context, endings in examples for ending in endings]
        data = encode_inputs(pairs, None, settings.tokenizer, settings.max_length)
        flags = iter(data.shortened.tolist())
        truncated = [any(list(islice(flags, len(endings)))) for _, endings in examples]
        join = partial(join_endings, counts=[len(endings) for _, endings in examples])
        return EncodedInputs(data, np.diff(data.ends, prepend=0), truncated, pad_endings, join)


@dataclass(frozen=True, eq=False)
class EndingAnswers(Answers):
    """The likeliest of several endings."""

    key = "ending"
    logits: Sequence[np.ndarray]  # (C,) for each of the S contexts
    labels: np.ndarray | None  # (S,) the right endings
    set_limit: float | None  # as in `PredictionSettings`

    @cached_property
    def rows(self) -> pa.Table:
        gold = None if self.labels is None else Gold(self.labels)
        return SINGLE_LABEL.decode(np.stack(self.logits), CHOICES, gold).rows

    def list_results(self) -> list[Result]:
        results: list[Result] = []
        for logits in self.logits:
            probabilities = softmax(check_finite(logits).astype(np.float64)).tolist()
            result = {"ending": int(logits.argmax()), "probabilities": probabilities}
            results.append(add_label_set(result, dict(enumerate(probabilities)), self.set_limit))
        return results

    @staticmethod
    def describe(result: Result) -> str:
        best = result["ending"]
        return f"ending {best + 1}  ({result['probabilities'][best]:.1%}){describe_set(result)}"


def join_endings(logits: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
    """Return the logits (C,) of each context from those (1,) of each ending."""
    return np.split(np.concatenate(logits), np.cumsum(counts)[:-1])


def pad_endings(items: Sequence[dict[str, Any]]) -> Batch:
    """Return a batch (B, 1, T) of single endings."""
    return {name: column[:, None] for name, column in pad_arrays(items).items()}


SWAG = SwagTask()
