"""The base class of every task, for training and prediction.

A task binds data, head, score and the paper's hyper-parameters for `bertkit.training.run`. It also reads, encodes and
answers a person's input for `bertkit.tasks.prediction`. It never builds a Trainer.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertkit.data.formats.columns import Columns
from bertkit.errors import UsageError
from bertkit.metrics.calibration import temper
from bertkit.metrics.rows import RowScore
from bertkit.reports.tables import ScoreRow, find_row
from bertkit.system.progress import Report, ignore
from bertkit.tasks.option import Options, check_range
from bertkit.tasks.schema import STRING, Schema, make_array

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bertkit.model.onnx import OnnxModel

EXAMPLES = "examples.txt"  # among the predictions of a run
FIGURES = ".figures.json"  # the same, after a split's name: data of plots and tables
LONGEST_SHOWN = 80  # characters of a text among the examples
DIVERGED = "the model's outputs are NaN or infinite: training has diverged; lower train.learning_rate"

BERT_TRAIN = {  # `[train]` of the paper in pre-training (A.2) and fine-tuning (A.3) alike
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "optim": "bert_adam",
    "seed": 42,
}
TUNE = "tune"  # the split that decides, where there is one
CHOSEN_ON_DEV = "chosen_on_dev"  # in metrics.json: choices made on the scored data

Result = dict[str, Any]


@dataclass(frozen=True)
class PredictionSettings:
    """A model with its tokenizer and the settings of prediction.

    Attributes:
        lengths: `[data]` of the run's recipe; empty without a run.
        pairs: Whether an input is a pair of texts; None: either.
        top: The number of words for each mask.
        set_limit: The highest conformity score of a label in a label set (`bertkit.metrics.calibration.find_limit`);
            None: no label sets.
    """

    model: "nn.Module | OnnxModel"
    tokenizer: Any
    lengths: Mapping[str, Any]
    pairs: bool | None
    top: int
    set_limit: float | None = None

    @cached_property
    def max_length(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        return min(self.lengths.get("max_length", 1 << 30), self.model.config.max_position_embeddings)

    @property
    def head(self) -> str:
        """Return the name of the head's class."""
        from bertkit.model.onnx import OnnxModel

        return self.model.head if isinstance(self.model, OnnxModel) else type(self.model).__name__

    @cached_property
    def labels(self) -> list[str]:
        """Return the names of the classes."""
        return [self.model.config.id2label[index] for index in range(self.model.config.num_labels)]


class RowAnswer(NamedTuple):
    """A row of `measure_rows` in words.

    Attributes:
        texts: All that the answer depends on; the first two name the row for a person.
        right: The right answer.
        answer: The model's answer.
    """

    texts: tuple[str, ...]
    right: str
    answer: str


class Comments(NamedTuple):
    """Lines about the scores of a run, and commands to try next, as a shell takes them."""

    lines: list[str]
    commands: list[str]


class Task:
    """One task of the paper. Optional methods return an empty value here.

    Attributes:
        name: The name in `recipe.task` and on the command line.
        title: The name of its data.
        examples_title: The heading of the examples of predictions.
        head: The name of a class in `bertkit.model`.
        heads: Option of `[data]` -> some of its values -> the heads that they ask for in place of `head`.
        options: The options of `[data]`.
        recipe: The paper's complete recipe; its `[data]` table has the defaults of `options`.
        stable: The changes that `preset = "stable"` makes to the recipe.
        implied: Option of `[data]` -> the changes to the recipe that it makes where it is given.
        metric: The key of the score that the paper reports, which metrics.json repeats as `score`. Empty for data
            without labels, which are only predicted.
        lower_is_better: Whether a smaller `metric` is better.
        table: The scores to show at the end.
        splits: Evaluated split -> name pattern of its scores, with "{}" for the score's name. The first split is also
            evaluated during training unless other rows decide.
        unlabelled: Splits that are only predicted, at the end.
        copies: Split -> data set, configuration and split of its copy on the Hub.
        command: The command that runs it, after `bertkit`.
        folder: The folder of its data below a study's root.
        pairs: Whether an input is a pair of texts; None if the task does not determine it.
        choices: The number of last texts of an example that are in sequences of their own, after the others; 0: none.
        long: The treatment of texts longer than `max_length`, in words.
        reusable: Whether encoded data can be shared by runs with the same `[data]`, `[model]` and checkpoint.
        evaluation_options: Arguments of the head's `forward` in evaluation.
        is_classifier: Whether it predicts classes or several labels of a whole input, so that `calibrate` applies.
        pipeline: The name of transformers' pipeline for the same results; empty if there is none.
        row_files: Files among the predictions with a row, a line or a block for each example of dev; one is written.
    """

    name: str
    title = "held-out text"
    examples_title = "Predictions on held-out text"
    head: str
    heads: Mapping[str, Mapping[str, str]] = {}
    options: Options
    recipe: Mapping[str, Any]
    stable: Mapping[str, Any] = {}
    implied: Mapping[str, Mapping[str, Any]] = {}
    metric = ""
    lower_is_better = False
    table: tuple[ScoreRow, ...] = ()
    splits: Mapping[str, str] = {"dev": "{}"}
    unlabelled: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, str, str]] = {}
    command: str
    folder = ""
    pairs: bool | None = None
    choices = 0
    long = "truncated"
    reusable = True
    evaluation_options: Mapping[str, Any] = {}
    is_classifier = False
    pipeline = ""
    row_files: tuple[str, ...] = ()

    # --- The recipe ---------------------------------------------------------------------------------------------------

    def check(self, recipe: Mapping[str, Any]) -> None:
        """Check a complete recipe before anything is read.

        Raises:
            UsageError: Options are inconsistent, or a number is out of its range.
        """
        if recipe.get("calibrate") and not self.is_classifier:
            raise UsageError(
                f"calibrate is for classes and labels of whole texts, which {self.name} does not predict; remove it"
            )
        for key, option in self.options.items():
            if option.least is not None:
                value = recipe["data"][key]
                check_range(f"{key} is {value} in [data]", value, option.least, option.below)

    def pretrain_on(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe of a preceding training that supplies the checkpoint; empty if there is none."""
        return {}

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(self, options: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Read the examples of every split there is, by name.

        "train" is among them, unless the task is only predicted, and the first of `splits`. Two options are set by the
        program alone: `is_check` keeps rows that training leaves out, `is_forecast` asks for enough text to forecast a
        run's cost.

        Raises:
            UsageError: Files are wrong or missing.
        """
        raise NotImplementedError

    def is_official(self, place: str) -> bool:
        """Return whether `[data] dir` names official files or, if it is empty, their copy on the Hub."""
        return bool(self.copies)

    def tokenize(self, recipe: Mapping[str, Any], examples: Mapping[str, Any], report: Report) -> Any:
        """Return the tokenizer."""
        raise NotImplementedError

    def configure(self, recipe: Mapping[str, Any], tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return values for BertConfig beside those of `[model]`, such as labels.

        Tokenizer and examples are None in a dry run.
        """
        return {} if tokenizer is None else {"vocab_size": len(tokenizer)}  # which has to hold all tokens

    def encode(
        self, examples: Any, tokenizer: Any, recipe: Mapping[str, Any], split: str, report: Report = ignore
    ) -> Any:
        """Return a split's map-style data set, whose columns are arguments of the head's `forward`.

        Its `fingerprint()` is a text that tells it from other data. Truncated texts and the like are reported.
        """
        raise NotImplementedError

    def collate(self, items: Any) -> dict[str, "Tensor"]:
        """Return the batch of a list of items, or of the result of the data set's `__getitems__`."""
        raise NotImplementedError

    def divide(self, examples: Any, share: float, source: str = "tune_share of dev") -> tuple[Any, Any]:
        """Divide a split's examples into a share that decides, and the others.

        The division is the same for every seed. Examples of one group (`list_groups`) stay together.

        Args:
            source: The option and the split, for the message.

        Raises:
            UsageError: One of the two parts is empty.
        """
        groups = self.list_groups(examples)
        names = list(dict.fromkeys(groups))
        count = round(share * len(names))
        if not 0 < count < len(names):
            raise UsageError(
                f"{source}: a share of {share:g} of {len(names):,} texts or documents leaves one part empty; change it"
            )
        chosen = {names[place] for place in np.random.default_rng(0).permutation(len(names))[:count]}
        decides = np.array([name in chosen for name in groups])
        return self.select(examples, np.flatnonzero(decides)), self.select(examples, np.flatnonzero(~decides))

    def place_rows(self, options: Mapping[str, Any]) -> np.ndarray:
        """Return (S,) the places in [0, 1) of a person's own training rows, which decide their folds."""
        raise NotImplementedError

    def list_groups(self, examples: Any) -> Sequence[Hashable]:
        """Return the group of each of a split's examples, such as a shared text or document."""
        raise NotImplementedError

    def select(self, examples: Any, numbers: np.ndarray) -> Any:
        """Return some of a split's examples, by their numbers."""
        return [examples[number] for number in numbers.tolist()]

    def list_texts(self, examples: Any) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each of a split's examples; empty if the task has no examples before encoding."""
        return iter(())

    def list_answers(self, examples: Any) -> Sequence[Hashable] | None:
        """Return the right answer of each of a split's examples; None if they have no answers."""
        return None

    def list_labels(self, examples: Any) -> Iterable[str]:
        """Yield the labels of a split's examples, one or several of each; empty for numbers and without labels."""
        return ()

    def list_lines(self, examples: Any) -> Sequence[int]:
        """Return the line of each of a split's examples in its file, or its number from 1."""
        return range(1, sum(1 for _ in self.list_texts(examples)) + 1)

    def find_rows(self, examples: Any) -> tuple[Columns, Collection[str]] | None:
        """Return the rows of a split in a person's own table, and the columns that the task reads; None without one."""
        return None

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(self, outputs: Any, batch: Mapping[str, "Tensor"]) -> "Tensor":
        """Return the values (B, ...) that `score` needs of each sequence."""
        raise NotImplementedError

    def score(self, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Return the scores by name, from the summaries (S, ...) of a split in order, and its data set.

        Args:
            decided: The `tuned_config` from the scores of other data; None: these data decide.

        Raises:
            UsageError: The model's outputs are NaN.
        """
        raise NotImplementedError

    def measure_rows(
        self, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None
    ) -> dict[str, RowScore]:
        """Return the scores of `score` as functions of the weights of the rows; arguments are the same.

        Values that the evaluation decides, such as tau, are fixed. Counts and these values have none.
        """
        return {}

    def measure_examples(
        self, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None
    ) -> dict[str, RowScore]:
        """Return the scores of `measure_rows` with a weight for each example, where its rows are groups of them."""
        return self.measure_rows(summaries, data, decided)

    def score_without(
        self, rows: np.ndarray, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Return the scores of `measure_rows` without some examples, by their numbers."""
        found = {}
        for name, score in self.measure_examples(summaries, data, decided).items():
            weights = np.ones((1, len(score)))
            weights[0, rows] = 0
            found[name] = float(score.score(weights)[0])
        return found

    def describe_rows(
        self, summaries: np.ndarray, data: Any, examples: Any, decided: Mapping[str, Any] | None = None
    ) -> Iterable[RowAnswer]:
        """Return the rows of `measure_rows` in words; `examples` are those of the split as loaded."""
        return ()

    def find_classes(self, data: Any) -> np.ndarray | None:
        """Return the correct classes (S,) of a split, or (S, L), 0 or 1 for each of several labels; None without."""
        return None

    def list_row_columns(self, data: Any) -> dict[str, list[str]]:
        """Return the columns of a person's own table by which a report may slice the rows of `measure_rows`."""
        return {}

    def baseline(self, train: Any, dev: Any) -> dict[str, float]:
        """Return the baseline scores by name."""
        return {}

    def tuned_config(self, metrics: Mapping[str, Any], data: Any) -> dict[str, Any]:
        """Return values for BertConfig that the evaluation of a data set decides, from its scores in any order."""
        return {}

    def format_predictions(
        self, summaries: np.ndarray, data: Any, split: str, decided: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return the files of a split's predictions: name below `predictions/` -> text; `decided` as for `score`."""
        return {}

    def comment(self, metrics: Mapping[str, Any], output: Path | None = None, recipe: Any = None) -> Comments:
        """Return lines about the scores, and commands to try after the run in `output` with its recipe, if given."""
        return Comments([*warn_of_choice(metrics, self.options), *describe_temperature(metrics, self.table)], [])

    # --- Answers ------------------------------------------------------------------------------------------------------

    def list_fields(self, settings: PredictionSettings) -> tuple[str, ...]:
        """Return the names of an input's texts, in order; a last one that ends in "…" takes all the rest."""
        return ("text", "text_pair") if settings.pairs else ("text",)

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Any:
        """Return the example of an input.

        Raises:
            UsageError: The input lacks what this task needs.
        """
        raise NotImplementedError

    def make_sample(self, settings: PredictionSettings) -> dict[str, Any]:
        """Return an input that a person can try, with the names of `list_fields`."""
        raise NotImplementedError

    def describe_input(self, settings: PredictionSettings) -> Schema:
        """Return the JSON schema of an input; other keys are allowed and ignored."""
        fields = self.list_fields(settings)
        kinds = {name.rstrip("…"): make_array(STRING) if name.endswith("…") else STRING for name in fields}
        return {"type": "object", "properties": kinds, "required": list(kinds)}

    def describe_output(self, settings: PredictionSettings) -> Schema:
        """Return the JSON schema of a result without the keys `id` and `cut`."""
        raise NotImplementedError

    def encode_inputs(self, examples: Sequence[Any], settings: PredictionSettings) -> tuple[Any, np.ndarray]:
        """Return a data set of the examples' sequences, and (S,) the tokens of each."""
        raise NotImplementedError

    def collate_inputs(self, data: Any, numbers: list[int], settings: PredictionSettings) -> dict[str, "Tensor"]:
        """Return the batch of some sequences of such a data set."""
        return self.collate(data.__getitems__(numbers))

    def keep(self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings) -> Sequence[Any]:
        """Return the values that `answer` needs of each sequence of the batch.

        Raises:
            UsageError: The model's outputs are NaN.
        """
        summaries = check_finite(self.summarize(outputs, batch).cpu().numpy())
        return temper(summaries, settings.model.config.temperature)

    def answer(
        self, kept: Sequence[Any], data: Any, examples: Sequence[Any], settings: PredictionSettings
    ) -> list[Result]:
        """Return the result of each example, from the values that `keep` returned for each sequence."""
        raise NotImplementedError

    def find_truncated(self, data: Any, examples: Sequence[Any]) -> Sequence[bool]:
        """Return which of the examples were truncated."""
        return data.shortened

    def describe_result(self, result: Result) -> str:
        """Return a result in words."""
        raise NotImplementedError

    def list_columns(self, settings: PredictionSettings) -> Mapping[str, type]:
        """Return the columns of a table of results: name -> type; empty if the results do not form a table."""
        return {}

    def flatten_result(self, result: Result) -> dict[str, Any]:
        """Return the values of these columns for a result."""
        raise NotImplementedError

    def format_for_pipeline(self, result: Result, settings: PredictionSettings) -> Any:
        """Return a result in the form of transformers' `pipeline`, without the keys that the result lacks."""
        raise NotImplementedError

    def list_samples(self, examples: Any, settings: PredictionSettings) -> Iterable[tuple[str, Any, str]]:
        """Yield samples of a split as returned by `load`.

        Each has a shortened text, the example in the form of `read_input`, and the correct answer in words.
        """
        return ()


def check_finite(values: np.ndarray) -> np.ndarray:
    """Return the values of a model.

    Raises:
        UsageError: Some are NaN or infinite, as after diverged training.
    """
    if not np.isfinite(values).all():
        raise UsageError(DIVERGED)
    return values


def warn_of_choice(metrics: Mapping[str, Any], options: Options) -> list[str]:
    """Return a warning if the scored data have also decided (tau, best checkpoint)."""
    if not (chosen := metrics.get(CHOSEN_ON_DEV)):
        return []
    remedy = "; with --set data.tune_share=0.5 other rows are used" if "tune_share" in options else ""
    return [f"the scores are optimistic because the same data were used to choose {chosen}{remedy}"]


def describe_temperature(metrics: Mapping[str, Any], table: Iterable[ScoreRow]) -> list[str]:
    """Return the temperature of calibrated probabilities, and the calibration error with and without it."""
    if "temperature" not in metrics:
        return []
    row, temperature = find_row(table, "ece"), metrics["temperature"]
    errors = (row.show(metrics[key]) for key in ("ece", "uncalibrated_ece"))
    if temperature == 1:
        return [
            f"the temperature stays 1 (calibration error {next(errors)} %): the rows that decide are too few, all "
            "right or calibrated already, so that no other is known to be better"
        ]
    return [
        "probabilities of bertkit are those of logits divided by the temperature {:.3g} (calibration error {} %, "
        "without it {} %); plain transformers does not divide".format(temperature, *errors)
    ]


def shorten_text(text: str) -> str:
    """Return a text in one line of at most LONGEST_SHOWN characters."""
    return shorten(text, LONGEST_SHOWN, placeholder="…")


def repeat_run(output: Path, ending: str, *settings: str) -> str:
    """Return the options that repeat a run with changed settings, in a sibling directory with this ending."""
    given = "".join(f" --set {quote(setting)}" for setting in settings)
    return f"--recipe {quote(f'{output}/recipe.toml')}{given} --output {quote(f'{output}-{ending}')}"


def use_transformers(program: str) -> str:
    """Return the shell command for a line of Python that loads a run's model with plain transformers."""
    return f"python -c {quote(program)}  # with plain transformers"
