"""The base class of all fine-tuning tasks.

It has the common part of the recipe (paper A.3) and its check, the checkpoint's tokenizer, and the baselines of a
constant answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.splits import UNLABELLED
from bertkit.data.tokenizer import load_tokenizer
from bertkit.errors import raise_first
from bertkit.reports.tables import OWN_DATA, ScoreLine, find_main, list_shown, name_limits
from bertkit.system.progress import Report
from bertkit.tasks.option import list_defaults
from bertkit.tasks.task import BERT_TRAIN, PredictionSettings, Task

if TYPE_CHECKING:
    from torch import Tensor

TRAIN = BERT_TRAIN | {  # A.3; batch size, learning rate and epochs are set by each task
    "warmup_steps": 0.1,  # a share of all updates
    "save_total_limit": 1,
    "logging_steps": 0.01,  # a share of all updates
}
CALIBRATION_ROWS = (  # every classifier has these; see `bertkit.metrics.calibration.measure_calibration`
    ScoreLine("calibration error", "ece", {}, "fraction"),
    ScoreLine("Brier score", "brier"),
)
BASELINES = {"tfidf": "TF-IDF", "frozen": "frozen vectors", "words": "words alone"}
BEST_BASELINE = "best_baseline"  # in metrics.json: its name
GAIN = "baseline_gain"  # in metrics.json: how far the metric is above that of the best baseline
LOSS_FALLS = "loss_falls"  # in metrics.json: the training loss was still falling at the end
IS_LEARNED = "is_learned"  # in metrics.json: the training loss has become a small part of that at the start
SEARCHED = "searched"  # in metrics.json: a search chose the values
ENOUGH_UPDATES = 300  # fewer are often too few: see `bertkit.training.facts`
ANOTHER_SEED = "bertkit {command} --recipe {run}/recipe.toml --set train.seed=43 --output {run}-43  # another seed"
REPORT_PAGE = "bertkit report {run} --output {run}.html  # the page of this run"
FROZEN_RATE = 1e-3  # A.3's rates are for a whole encoder, and hardly move the few weights above a frozen one
SOLVED = "solved_strength"  # in metrics.json: the strength of a head that was solved, as `tasks.frozen.solve` takes it
KEPT = "kept"  # in metrics.json: "start" or "end" of a training that started from a solved head
START_GAIN = "start_gain"  # in metrics.json: how far the metric at the end is above that at the start
EVERY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}


class FineTuningTask(Task):
    """A task that starts from a checkpoint."""

    # Mosbach et al. 2021: bias correction and more epochs prevent runs that keep predicting the majority class.
    stable: Mapping[str, Any] = {"train": {"optim": "adamw_torch", "num_train_epochs": 20.0, "learning_rate": 2e-5}}
    implied: Mapping[str, Mapping[str, Any]] = {"freeze": {"train": {"learning_rate": FROZEN_RATE}}}
    splits: Mapping[str, str] = {"dev": "{}", "test": "test_{}"}
    unlabelled: tuple[str, ...] = (UNLABELLED,)
    next_commands: tuple[str, ...] = (REPORT_PAGE, ANOTHER_SEED)
    start = "a BERT to fine-tune"  # the required checkpoint, for messages
    compared: tuple[str, ...] = ()  # the scores that must exceed their baselines; empty: all of the table

    def make_recipe(self, batch_size: int, checkpoint: str = "google-bert/bert-base-uncased", **train: Any) -> dict:
        """Return the task's recipe: the common part with its own batch size, checkpoint and keys of `[train]`."""
        return {
            "task": self.name,
            "checkpoint": checkpoint,
            "precision": "auto",
            "model": {},
            "batch_size": batch_size,
            "data": list_defaults(self.options),
            "train": TRAIN | train,
        } | ({"baseline": True} if self.baselines else {})

    def check(self, recipe: Any) -> None:
        """Check that there is a checkpoint, no option of other tasks, and every number in its range."""
        steps, epochs = recipe.train.get("max_steps", -1), recipe.train.get("num_train_epochs", 1.0)
        troubles = {
            f"{self.name} needs {self.start}; give one with --model": not recipe.checkpoint,
            "freeze would leave the layers of reinit_layers randomly initialised; remove one of the two": (
                recipe.freeze and recipe.reinit_layers
            ),
            f"start is for texts and words, without bilstm and reinit_layers; remove it from {self.name}": (
                recipe.start != "random" and (not self.solves_head or recipe.bilstm or recipe.reinit_layers)
            ),
            f"[[phase]] is for pretraining; remove it from a recipe for {self.name}": recipe.phase,
            f"num_train_epochs is {epochs:g} in [train]; it must be above 0": steps <= 0 and epochs <= 0,
        }
        raise_first(troubles)
        super().check(recipe)

    def summarize(
        self, outputs: Any, batch: Mapping[str, "Tensor"], settings: PredictionSettings | None = None
    ) -> "Tensor | np.ndarray":
        """Return the logits (B, L), or (B, C) for multiple choice."""
        return outputs.logits if isinstance(outputs.logits, np.ndarray) else outputs.logits.float()

    def baseline(self, train: Any, dev: Any) -> dict[str, float]:
        """Return the scores of `score_nothing` as `majority_…`, and the metric's also as `majority_score`."""
        scores = self.score_nothing(train, dev)
        found = {f"majority_{name}": value for name, value in scores.items()}
        return found | {"majority_score": scores[self.metric]} if scores else {}

    def score_nothing(self, train: Any, dev: Any) -> dict[str, float]:
        """Return the scores of a constant answer; empty if there is no such answer."""
        raise NotImplementedError

    def comment(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return also a warning if a score is not above a baseline's, and whether the loss was still falling."""
        lines, rows = super().comment(metrics), list_shown(self.table, self.metric, metrics)
        is_solved, is_learned = metrics.get(KEPT) == "start" and SOLVED in metrics, IS_LEARNED in metrics
        compared = [row for row in rows if row.key in (self.compared or metrics)]
        pairs = [(row, words, key) for row in compared for words, key in row.baselines.items() if "majority_" in key]
        for row, words, key in [pair for pair in pairs if metrics[pair[0].key] <= metrics[pair[2]]][:1]:
            lines.append(
                f"warning: {row.name} ({row.show(metrics[row.key])}) is not above {words} ({row.show(metrics[key])})"
            )
            if self.copies and not (OWN_DATA in metrics or is_solved or is_learned or SEARCHED in metrics):
                lines[-1] += "; on few rows, try --set preset=auto"  # the default for one's own data
        if START_GAIN in metrics:
            row = find_main(rows, self.metric)
            gain, low, high = (row.show(metrics[key]) for key in (START_GAIN, *name_limits(START_GAIN)))
            before, after = (row.show(metrics[f"{name}_score"]) for name in ("start", "end"))
            lines.append(
                f"the {metrics[KEPT]} of the training is delivered: {row.name} {before} before the first update, "
                f"{after} at its end; the difference is {gain} ({low} to {high})"
            )
            if metrics[KEPT] == "end" and metrics[START_GAIN] < 0:
                lines[-1] += ", which may be chance"
        if metrics.get(f"{GAIN}_low", math.inf) <= 0:
            row = find_main(rows, self.metric)
            gain, low, high = (row.show(metrics[key]) for key in (GAIN, *name_limits(GAIN)))
            best, updates = BASELINES[metrics[BEST_BASELINE]], metrics.get("updates", ENOUGH_UPDATES)
            is_above = metrics[GAIN] > 0
            lines.append(
                f"{'the solved head' if is_solved else 'fine-tuning'} is {'perhaps' if is_above else 'not'} better "
                f"than {best}: the difference in {row.name} is {gain} ({low} to {high})"
            )
            if is_learned:
                remedy = "use them (--set freeze=encoder), or read" if metrics[BEST_BASELINE] == "frozen" else "read"
                lines[-1] += f"; the loss is near 0, so that longer training will not help: {remedy} the mistakes"
            elif updates < ENOUGH_UPDATES and not (KEPT in metrics or SEARCHED in metrics):
                lines[-1] += f"; {updates:,} updates are few, and more time may help (--epochs, or a longer --budget)"
        if metrics.get(LOSS_FALLS):
            more = "" if SEARCHED in metrics else "; more time may help (--epochs, or a longer --budget)"
            lines.append(f"the training loss was still falling at the end{more}")
        return lines

    def tokenize(self, recipe: Any, examples: Mapping[str, Any], report: Report) -> Any:
        """Return the checkpoint's tokenizer."""
        return load_tokenizer(recipe.checkpoint, report=report)


def add_test_rows(rows: Sequence[ScoreLine]) -> tuple[ScoreLine, ...]:
    """Return the lines of dev, and the same of a test split, which has neither baselines nor published scores."""
    tests = (replace(row, name=f"{row.name}, test", key=f"test_{row.key}", baselines={}, paper={}) for row in rows)
    return (*rows, *tests)


def name_baselines(names: Sequence[str], key: str) -> dict[str, str]:
    """Return the description of each trained baseline with the key of its score, for a line of a table."""
    return {BASELINES[name]: f"{name}_{key}" for name in names}
