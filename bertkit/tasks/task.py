"""The base class of every task, for training and prediction.

A task binds data, head, score and the paper's hyper-parameters for `bertkit.training.run`. It also reads, encodes and
answers a person's input for `bertkit.tasks.prediction`. It never builds a Trainer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.errors import UsageError
from bertkit.metrics.calibration import temper
from bertkit.metrics.rows import RowScore, take_values
from bertkit.reports.tables import ScoreRow
from bertkit.system.progress import Report
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.option import Options, check_range
from bertkit.tasks.schema import STRING, Schema, make_array

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bertkit.model.onnx import OnnxModel

EXAMPLES = "examples.txt"  # among the predictions of a pretraining
LONGEST_SHOWN = 80  # characters of a text in a line
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
OWN_DATA = "own_data"  # the same: present if the paper has no scores on these data

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


class Task:
    """One task of the paper. Optional methods return an empty value here.

    Attributes:
        name: The name in `recipe.task` and on the command line.
        title: The name of its data.
        head: The name of a class in `bertkit.model`.
        options: The options of `[data]`.
        recipe: The paper's complete recipe; its `[data]` table has the defaults of `options`.
        stable: The changes that `preset = "stable"` makes to the recipe.
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
        reusable: Whether encoded data can be shared by runs with the same `[data]`, `[model]` and checkpoint.
        evaluation_options: Arguments of the head's `forward` in evaluation.
        is_classifier: Whether it predicts classes or several labels of a whole input, so that `calibrate` applies.
        pipeline: The name of transformers' pipeline for the same results; empty if there is none.
        row_files: Files among the predictions with a row, a line or a block for each example of dev; one is written.
    """

    name: str
    title = "held-out text"
    head: str
    options: Options
    recipe: Mapping[str, Any]
    stable: Mapping[str, Any] = {}
    metric = ""
    lower_is_better = False
    table: tuple[ScoreRow, ...] = ()
    splits: Mapping[str, str] = {"dev": "{}"}
    unlabelled: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, str, str]] = {}
    command: str
    folder = ""
    pairs: bool | None = None
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

    def overrides(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return changes to the task's recipe that the given part implies, such as another learning rate."""
        return {}

    def pretrain_on(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe of a preceding training that supplies the checkpoint; empty if there is none."""
        return {}

    def starter(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the laptop-sized recipe that is used if none is named; empty for the task's own."""
        return {}

    def set_updates(self, recipe: Mapping[str, Any], updates: int) -> dict[str, Any]:
        """Return a recipe that ends after `updates` updates, and is the same until then."""
        return {**recipe, "train": recipe["train"] | {"max_steps": updates}}

    def choose_head(self, options: Mapping[str, Any]) -> str:
        """Return the name of the head that `[data]` asks for."""
        return self.head

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(self, options: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Read the examples of every split there is, by name.

        "train" is among them, unless the task is only predicted, and the first of `splits`.

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

    def encode(self, examples: Any, tokenizer: Any, recipe: Mapping[str, Any], split: str) -> Any:
        """Return a split's map-style data set, whose columns are arguments of the head's `forward`.

        Its `fingerprint()` is a text that tells it from other data.
        """
        raise NotImplementedError

    def shorten(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options under which enough data are read to forecast a run's cost."""
        return options

    def list_parts(self, data: Any) -> list[range]:
        """Return the parts of a training data set whose sequences have lengths of their own."""
        return [range(len(data))]

    def collate(self, items: Any) -> dict[str, "Tensor"]:
        """Return the batch of a list of items, or of the result of the data set's `__getitems__`."""
        raise NotImplementedError

    def tabulate(self, examples: Any) -> ExampleRows | None:
        """Return the rows of a split's examples; None if the task has no examples before encoding."""
        return None

    def measure_lengths(self, tokens: np.ndarray) -> np.ndarray:
        """Return (S,) the tokens of the longest sequence of each row, from the tokens (S, texts) of its texts."""
        return tokens.sum(1) + 1 + tokens.shape[1]  # [CLS], and [SEP] after each text

    def describe_long(self, options: Mapping[str, Any]) -> str:
        """Return what happens to sequences longer than max_length."""
        return "truncated"

    def describe(self, data: Any, split: str) -> list[str]:
        """Return lines about the encoding of a split's examples."""
        return []

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(self, outputs: Any, batch: Mapping[str, "Tensor"]) -> "Tensor":
        """Return the values (B, ...) that `score` needs of each sequence."""
        raise NotImplementedError

    def rows(self, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None) -> pa.Table:
        """Return the right and predicted answers of a split, and the numbers that its scores are made of.

        The columns are those of the prediction table without what `tabulate` returns.

        Args:
            summaries: (S, ...) of a split in order.
            data: Its data set.
            decided: Values that other data have decided, such as tau and thresholds; None: these data decide.

        Raises:
            UsageError: The model's outputs are NaN.
        """
        raise NotImplementedError

    def score(self, rows: pa.Table) -> dict[str, RowScore | float]:
        """Return the scores by name, from the prediction table or some of its rows, with counts and thresholds."""
        raise NotImplementedError

    def baseline(self, train: Any, dev: Any) -> dict[str, float]:
        """Return the baseline scores by name."""
        return {}

    def format_predictions(
        self, summaries: np.ndarray, data: Any, split: str, decided: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return the files of a split's predictions: name below `predictions/` -> text; `decided` as for `score`."""
        return {}

    def diagnose(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return lines to print below the table of scores."""
        return []

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return `diagnose`'s lines, after those about the data that have decided and about the temperature."""
        return [*self.mark(metrics), *self.describe_temperature(metrics), *self.diagnose(metrics)]

    def mark(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return a warning if the scored data have also decided (tau, best checkpoint)."""
        if not (chosen := metrics.get(CHOSEN_ON_DEV)):
            return []
        remedy = "; with --set data.tune_share=0.5 other rows are used" if "tune_share" in self.options else ""
        return [f"the scores are optimistic because the same data were used to choose {chosen}{remedy}"]

    def describe_temperature(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the temperature of calibrated probabilities, and the calibration error with and without it."""
        if "temperature" not in metrics:
            return []
        row, temperature = self.find_row("ece"), metrics["temperature"]
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

    def suggest(self, output: Path, recipe: Mapping[str, Any]) -> list[str]:
        """Return commands to try after a run, as a shell takes them."""
        return []

    def find_row(self, key: str) -> ScoreRow:
        """Return the line of the table with this score."""
        return next((row for row in self.table if row.key == key), ScoreRow(key, key))

    def list_rows(self, metrics: Mapping[str, Any]) -> list[ScoreRow]:
        """Return the lines of the table that there are scores for, the metric's among them, with known baselines.

        Those of a person's own data have no published scores.
        """
        rows = {row.key: row for row in self.table}
        if self.metric:
            rows.setdefault(self.metric, self.find_row(self.metric))
        found = []
        for row in (row for key, row in rows.items() if key in metrics):
            baselines = {words: known for words, known in row.baselines.items() if known in metrics}
            found.append(replace(row, baselines=baselines, paper={} if OWN_DATA in metrics else row.paper))
        return found

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


def score_summaries(
    task: Task, summaries: np.ndarray, data: Any, decided: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return the values of a split's scores; arguments are those of `Task.rows`."""
    return take_values(task.score(task.rows(summaries, data, decided)))


def check_finite(values: np.ndarray) -> np.ndarray:
    """Return the values of a model.

    Raises:
        UsageError: Some are NaN or infinite, as after diverged training.
    """
    if not np.isfinite(values).all():
        raise UsageError(DIVERGED)
    return values


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
