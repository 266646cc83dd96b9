"""The base class of every task, for training and prediction.

A task binds data, head, score and the paper's hyper-parameters for `bertkit.training.run`. It also reads, encodes and
answers a person's input for `bertkit.tasks.prediction`. It never builds a Trainer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertkit.data.sequences import EncodedInputs
from bertkit.errors import UsageError
from bertkit.metrics.rows import WeightedScore, take_values
from bertkit.reports.tables import ScoreLine, find_row
from bertkit.system.progress import Report, ignore
from bertkit.tasks.answers import DECIDED_VALUES, Answers, Decisions
from bertkit.tasks.examples import ExampleRows
from bertkit.tasks.option import Options, check_range
from bertkit.tasks.schema import Schema

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bertkit.model.config import BertConfig
    from bertkit.model.onnx_model import OnnxModel

LONGEST_SHOWN = 80  # characters of a text in a line

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


@dataclass(frozen=True)
class PredictionSettings:
    """A model with its tokenizer and the settings of prediction."""

    model: "nn.Module | OnnxModel"
    tokenizer: Any
    lengths: Mapping[str, Any]  # `[data]` of the run's recipe; empty without a run
    pairs: bool | None  # whether an input is a pair of texts; None: either
    top: int  # the number of words for each mask
    # The highest conformity score of a label in a label set (`bertkit.metrics.calibration.choose_limit`); None: no
    # label sets
    set_limit: float | None = None
    redact: str | None = None  # how names are redacted (`bertkit.tasks.redaction`); None: they are not
    least: float | None = None  # replaces the model's `redaction_threshold`; None: that one
    # The same model as an export, which answers a sequence of at most `most_exported` tokens, or several of together
    # half as many, padding included
    exported: "OnnxModel | None" = None
    most_exported: int = 0

    @cached_property
    def max_length(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        return min(self.lengths.get("max_length", 1 << 30), self.model.config.max_position_embeddings)

    @property
    def head(self) -> str:
        """Return the name of the head's class."""
        return getattr(self.model, "head", None) or type(self.model).__name__

    @property
    def decided(self) -> Decisions:
        """Return the values that other data have decided."""
        values = {name: getattr(self.model.config, name) for name in DECIDED_VALUES} | {"set_limit": self.set_limit}
        values |= {"redact": self.redact} | ({} if self.least is None else {"redaction_threshold": self.least})
        return {name: value for name, value in values.items() if value is not None}

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
        heads: Option of `[data]` -> some of its values -> the heads that they ask for instead of `head`.
        solves_head: Whether a linear head can be solved on the vectors that its head reads.
        options: The options of `[data]`.
        recipe: The paper's complete recipe; its `[data]` table has the defaults of `options`.
        stable: The changes that `preset = "stable"` makes to the recipe.
        implied: Option of `[data]` or key of the recipe -> the changes to the recipe that it makes where it is given.
        metric: The key of the score that the paper reports, which metrics.json repeats as `score`. Empty for data
            without labels, which are only predicted.
        lower_is_better: Whether a smaller `metric` is better.
        table: The scores to show at the end.
        splits: Evaluated split -> name pattern of its scores, with "{}" for the score's name. The first split is also
            evaluated during training unless other rows decide.
        unlabelled: Splits that are only predicted, at the end.
        copies: Split -> data set, configuration and split of its copy on the Hub.
        command: The command that runs it, after `bertkit`.
        next_commands: Commands to try after a run; `{run}` is its directory, `{objective}` an option of `[data]`.
        pairs: Whether an input is a pair of texts; None if the task does not determine it.
        long: The treatment of texts longer than `max_length`, in words.
        reusable: Whether encoded data can be shared by runs with the same `[data]`, `[model]` and checkpoint.
        is_combinable: Whether the answers of several runs can be combined (`bertkit.inference.ensemble`).
        evaluation_options: Arguments of the head's `forward` in evaluation.
        is_classifier: Whether it predicts classes or several labels of a whole input, so that `calibrate` applies.
        baselines: The names of the baselines that `bertkit.training.baselines` fits.
    """

    name: str
    title = "held-out text"
    head: str
    heads: Mapping[str, Mapping[str, str]] = {}
    solves_head = False
    options: Options
    recipe: Mapping[str, Any]
    stable: Mapping[str, Any] = {}
    implied: Mapping[str, Mapping[str, Any]] = {}
    metric = ""
    lower_is_better = False
    table: tuple[ScoreLine, ...] = ()
    splits: Mapping[str, str] = {"dev": "{}"}
    unlabelled: tuple[str, ...] = ()
    copies: Mapping[str, tuple[str, str, str]] = {}
    command: str
    next_commands: tuple[str, ...] = ()
    pairs: bool | None = None
    long = "truncated"
    reusable = True
    is_combinable = False
    evaluation_options: Mapping[str, Any] = {}
    is_classifier = False
    baselines: tuple[str, ...] = ()

    # --- The recipe ---------------------------------------------------------------------------------------------------

    def check(self, recipe: Any) -> None:
        """Check a recipe (`bertkit.training.recipe.Recipe`, as in all methods) before anything is read."""
        if recipe.calibrate and not self.is_classifier:
            raise UsageError(
                f"calibrate is for classes and labels of whole texts, which {self.name} does not predict; remove it"
            )
        for key, option in self.options.items():
            value = recipe.data[key]
            if option.choices and value not in option.choices:
                expected = ", ".join(filter(None, option.choices))
                raise UsageError(f"unknown {key} {value!r} in [data]; expected one of {expected}")
            if option.least is not None:
                check_range(f"{key} is {value} in [data]", value, option.least, option.below)

    # --- The data -----------------------------------------------------------------------------------------------------

    def load(self, options: Mapping[str, Any], report: Report, config: "BertConfig | None" = None) -> dict[str, Any]:
        """Read the examples of every split there is, by name.

        "train" is among them, unless the task is only predicted, and the first of `splits`. Three options are set by
        the program alone: `is_check` keeps rows that training leaves out, `is_forecast` asks for enough text to
        forecast a run's cost, and `text_words` is that of a trained model's configuration.

        Args:
            config: That of a trained model, which knows the labels: the data are only scored, so that a file is one
                split, and of several splits those are read that are evaluated.
        """
        raise NotImplementedError

    def is_official(self, source: str) -> bool:
        """Return whether `[data] dir` names official files or, if it is empty, their copy on the Hub."""
        return bool(self.copies)

    def tokenize(self, recipe: Any, examples: Mapping[str, Any], report: Report) -> Any:
        """Return the tokenizer."""
        raise NotImplementedError

    def configure(self, recipe: Any, tokenizer: Any, examples: Any) -> dict[str, Any]:
        """Return values for BertConfig beside those of `[model]`, such as labels.

        Tokenizer and examples are None in a dry run.
        """
        return {} if tokenizer is None else {"vocab_size": len(tokenizer)}  # the model needs a row for each token

    def encode(self, examples: Any, tokenizer: Any, recipe: Any, split: str, report: Report = ignore) -> Any:
        """Return a split's map-style data set, whose columns are arguments of the head's `forward`.

        Its `fingerprint()` is a text that tells it from other data. Truncated texts and the like are reported.
        """
        raise NotImplementedError

    def tabulate_examples(self, examples: Any) -> ExampleRows | None:
        """Return the rows of a split's examples; None if the task has no examples before encoding."""
        return None

    # --- Scores -------------------------------------------------------------------------------------------------------

    def summarize(self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings | None = None) -> Any:
        """Return the values (B, ...) that `decode` needs of each sequence.

        Args:
            settings: Those of a prediction, whose results may show more than scores need.
        """
        raise NotImplementedError

    def decode(self, summaries: Any, data: Any, decided: Decisions | None = None) -> Answers:
        """Return the answers to a split's examples, or to inputs.

        Args:
            summaries: (S, ...) of the sequences in order.
            data: Their data set.
            decided: Values that other data have decided; None: these data decide.
        """
        raise NotImplementedError

    def score(self, rows: pa.Table) -> dict[str, WeightedScore | float]:
        """Return the scores by name, from the prediction table or some of its rows, with counts and thresholds."""
        raise NotImplementedError

    def baseline(self, train: Any, dev: Any) -> dict[str, float]:
        """Return the baseline scores by name."""
        return {}

    def format_predictions(self, answers: Answers, data: Any, split: str) -> dict[str, str]:
        """Return the files of the answers to a split: name below `predictions/` -> text."""
        return {}

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return lines about the scores of a run."""
        return [*warn_of_choice(metrics, self.options), *describe_temperature(metrics, self.table)]

    # --- Answers ------------------------------------------------------------------------------------------------------

    def read_input(self, given: Mapping[str, Any], settings: PredictionSettings) -> Any:
        """Return the example of an input."""
        raise NotImplementedError

    def schema(self, settings: PredictionSettings) -> tuple[Schema, Schema]:
        """Return the JSON schemas of an input, with a sample, and of a result without `id` and `truncated`.

        The sample has the texts that can be given without names, in order; one that is a list takes all the rest.
        """
        raise NotImplementedError

    def encode_inputs(self, examples: Sequence[Any], settings: PredictionSettings) -> EncodedInputs:
        """Return the sequences of the examples."""
        raise NotImplementedError


def score_summaries(task: Task, summaries: Any, data: Any, decided: Decisions | None = None) -> dict[str, float]:
    """Return the values of a split's scores; arguments are those of `Task.decode`."""
    return take_values(task.score(task.decode(summaries, data, decided).rows))


def refuse_tuning(recipe: Any, what: str) -> None:
    """Check that a recipe has no options for fine-tuning an encoder, else raise a UsageError that names `what`."""
    for key in ("freeze", "bilstm", "reinit_layers"):
        if getattr(recipe, key):
            raise UsageError(f"{key} is for fine-tuning; remove it from a recipe for {what}")


def check_finite(values: np.ndarray) -> np.ndarray:
    """Return the values of a model."""
    if not np.isfinite(values).all():
        raise UsageError("the model's outputs are NaN or infinite: training has diverged; lower train.learning_rate")
    return values


def warn_of_choice(metrics: Mapping[str, Any], options: Options) -> list[str]:
    """Return a warning if the scored data have also decided (tau, best checkpoint)."""
    if not (chosen := metrics.get(CHOSEN_ON_DEV)):
        return []
    remedy = "; with --set data.tune_share=0.5 other rows are used" if "tune_share" in options else ""
    return [f"the scores are optimistic because the same data were used to choose {chosen}{remedy}"]


def describe_temperature(metrics: Mapping[str, Any], table: Iterable[ScoreLine]) -> list[str]:
    """Return the temperature of calibrated probabilities, and the calibration error with and without it."""
    if "temperature" not in metrics:
        return []
    row = find_row(table, "ece")
    errors = (row.show(metrics[key]) for key in ("ece", "uncalibrated_ece"))
    return [
        "probabilities of bertkit are those of logits divided by the temperature {:.3g} (calibration error {} %, "
        "without it {} %); plain transformers does not divide".format(metrics["temperature"], *errors)
    ]


def list_advice(task: Task, metrics: Mapping[str, Any]) -> list[str]:
    """Return the lines about the scores of a run, warnings first."""
    return sorted(task.comment(metrics), key=lambda line: not line.startswith("warning"))


def shorten_text(text: str, most: int = LONGEST_SHOWN) -> str:
    """Return a text in one line of at most `most` characters, cut at a space if one is near."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    words = line[:most].rpartition(" ")[0]
    shown = words if len(words) > most * 3 // 4 else line[: most - 1]  # some languages have no spaces
    return f"{shown}…"


def list_commands(task: Task, output: Path, recipe: Any) -> list[str]:
    """Return the commands to try after the run of a recipe in `output`, as a shell takes them."""
    given = {"command": task.command, "run": quote(str(output))}
    useful = [command for command in task.next_commands if not (recipe.is_solved and "train.seed" in command)]
    return [command.format(**{**recipe.data, **given}) for command in useful]
