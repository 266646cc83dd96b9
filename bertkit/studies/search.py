"""Search for the best model: trials on a part of the training data, then one training on all of it.

Each trial is a run in a process of its own, scored on training rows that are held back (`[data] trial_rows`), so that
the score on dev stays honest. The search reads the trial's log and passes its scores to Optuna, which proposes values
(TPE, Bergstra et al. 2011), says which trials to end, and keeps all in a journal. A trial that a kill has interrupted
keeps its values and its directory.

With a clock, half of the time is for trials, which are whole trainings. None begins if one with the preset's values is
expected to take longer than what is left of the half, and one at work when that is over is stopped and does not count.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from bertkit.errors import UsageError, as_usage_error, explain_disk_error, explain_missing, pluralize
from bertkit.reports.tables import find_row
from bertkit.studies.results import fail_if_not_finite
from bertkit.studies.run_processes import RunJob, Runs, State, drop_checkpoints, drop_weights
from bertkit.studies.spec import check_searchable, set_axis
from bertkit.studies.tables import show_value
from bertkit.system.cluster import Command, count_processes, start_command
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, hold_directory
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.system.signals import Interrupted, note_signals
from bertkit.tasks import TASKS
from bertkit.tasks.examples import MOST_TRIAL_ROWS
from bertkit.training import budget, costs
from bertkit.training.callbacks import Progress
from bertkit.training.clock import Clock
from bertkit.training.facts import describe_rows
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, RecipePart, list_settled, load_recipe, read_recipe, resolve, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import LOG, RECIPE_FILE, SEARCH, has_begun, identify, read_log

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

JOURNAL, TRIALS_FILE = "optuna.log", "trials.md"
HELD_ROWS = 1000  # rows; the standard error of an accuracy of 80 % is 1.3 points then
LEARNING_RATES = (1e-5, 2e-4)  # around those of section A.3, and higher for small models
BATCH_CHOICES = (16, 32)  # section A.3
SHORTEST, LONGEST = 0.5, 2.0  # times the epochs of the first trial
TRIAL_SCORES = 4  # in each trial
START_SECONDS = 10.0  # before the first update of a process
WORSE = "worse than the median of the other trials"
TRIAL_ONLY = {"eval_strategy": "steps", "eval_steps": 1 / TRIAL_SCORES, "save_strategy": "no"}
TRIAL_ONLY |= {"eval_on_start": False, "load_best_model_at_end": False}


def search_or_train(
    recipe: Recipe,
    *,
    output: Path,
    trials: int = 0,
    clock: Clock | None = None,
    report: Report = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Train and return the scores: after a search if trials are asked for or a clock allows them, else once.

    Values that a person gave are not searched. A search that was stopped continues.

    Args:
        trials: The number of trials; 0: as many as the clock allows.
        clock: The time for everything; None: no limit.
    """
    keeps = clock and join_processes(recipe).is_main_process
    with explain_disk_error(output), clock.keep(output / budget.CLOCK_FILE) if keeps else nullcontext():
        if trials or (clock and "trial_rows" in TASKS[recipe.task].options):
            recipe, prepared = Search(recipe, output, trials, clock, report, progress).choose()
        else:
            prepared = None
        news = {"output": output, "report": report, "progress": progress, "prepared": prepared}
        return budget.train_within(recipe, clock=clock, **news) if clock else run(recipe, **news)


@dataclass
class Search:
    """A search in a directory; see `search_or_train`."""

    recipe: Recipe
    output: Path
    most: int  # trials; 0: as many as the clock allows
    clock: Clock | None
    report: Report
    progress: Progress = ignore
    signals: list[int] = field(default_factory=list)  # signals that were received

    def __post_init__(self) -> None:
        self.task, self.folder = TASKS[self.recipe.task], self.output / SEARCH

    def choose(self) -> tuple[Recipe, Prepared | None]:
        """Do or continue the search, and return the recipe of the last training and its inputs if they are read."""
        check_searchable(self.task, self.recipe.data)
        if not self.searched:
            self.report("the recipe leaves nothing to search: training with its values")
            return self.recipe, None
        if count_processes() > 1:
            launcher = "torchrun or accelerate launch"
            raise UsageError(f"--search and --budget cannot be combined with {launcher}; leave it out")
        if "preset" not in self.recipe.given:
            self.recipe = Recipe.make(self.task, self.recipe.given, {"preset": "auto"})
        identity = identify(self.recipe.to_dict()) | {"searched": self.searched, "clock": bool(self.clock)}
        path = self.folder / RECIPE_FILE
        if path.exists():
            refuse_other(f"{self.folder} belongs to another search", read_recipe(path), identity)
        elif has_begun(self.output):
            raise UsageError(f"{self.output} has a run without a search; name another directory with --output")
        if has_begun(self.output):  # the last training
            return load_recipe(self.output / RECIPE_FILE), None
        prepared = prepare(self.recipe, self.report)
        facts = describe_rows(self.recipe, len(prepared.data["train"]), self.report, prepared.pairs)
        self.recipe = resolve(self.recipe, facts)
        with hold_directory(self.folder):
            save_recipe(identity, path)
            best = self.make_recipe(self.run_trials(prepared))
            # Another batch size may order the data in another way.
            return best, prepared if best.batch_size == self.recipe.batch_size else None

    def run_trials(self, prepared: Prepared) -> dict[str, Any]:
        """Do the trials that are left, and return the best values; empty if no trial is complete."""
        self.open_study()
        expected = self.expect_seconds(prepared) if self.clock else 0.0
        about = f"trials of about {describe_duration(expected)} until half of the time is over"
        many = pluralize(self.most, "trial") if self.most else about
        self.report(f"searching {', '.join(map(name_key, self.searched))}: {many}, scored on held-back rows of train")
        with note_signals(self.signals.append):
            while len(self.list_done()) < (self.most or math.inf) and self.count_left() >= expected:
                self.do_trial()
        if not self.study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE]):
            reason = "no trial was completed" if self.list_done() else "no trial fits into half of the time"
            self.report(f"{reason}: training with the values of the preset")
            return {}
        best, done = self.study.best_trial, len(self.list_done())
        self.report(f"the best of {pluralize(done, 'trial')}: {describe_values(best.params)}; training on all of train")
        return best.params

    def count_left(self) -> float:
        """Return the seconds that are left for trials."""
        return self.clock.left - self.clock.limit / 2 if self.clock else math.inf

    def expect_seconds(self, prepared: Prepared) -> float:
        """Return the expected seconds of a trial with the values of the preset."""
        self.report("measuring some updates")
        measured = budget.measure_again(self.recipe, prepared, self.clock, self.output)
        held = int(min(HELD_ROWS, MOST_TRIAL_ROWS * measured.rows))
        measured = msgspec.structs.replace(measured, rows=measured.rows - held, evaluated=held, predicted=held)
        _, training, evaluation = costs.estimate(self.make_trial({}), measured, self.folder)
        return START_SECONDS + training + evaluation + measured.end

    @cached_property
    def searched(self) -> list[str]:
        """Return the names of the values that are searched: those that a person left open."""
        if self.recipe.is_solved:
            return []
        known = self.recipe.given.keys() | self.recipe.given.get("train", {}).keys()
        known |= {"num_train_epochs"} if "max_steps" in known else set()
        axes = ("train.learning_rate", "batch_size", "train.num_train_epochs")
        return [axis for axis in axes if name_key(axis) not in known]

    @property
    def usual(self) -> dict[str, Any]:
        """Return the values of the preset for what is searched."""
        recipe = self.recipe.to_dict()
        return {axis: reduce(getitem, axis.split("."), recipe) for axis in self.searched}

    def make_recipe(self, params: Mapping[str, Any], *others: RecipePart) -> Recipe:
        """Make the recipe with some values of the axes, and others."""
        values = [set_axis(axis, value) for axis, value in params.items()]
        return resolve(Recipe.make(self.task, self.recipe.given, *values, *others), list_settled(self.recipe))

    def make_trial(self, params: Mapping[str, Any]) -> Recipe:
        """Make the recipe of a trial."""
        short = {"data": {"trial_rows": HELD_ROWS}, "train": TRIAL_ONLY, "patience": 0}
        return self.make_recipe(params, short, {"calibrate": False, "baseline": False})

    def open_study(self) -> None:
        """Open the journal and the study in it."""
        with explain_missing("a search needs Optuna", "search"):
            import optuna
        self.optuna, path = optuna, self.folder / JOURNAL
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        Path(f"{path}.lock").unlink(missing_ok=True)  # a killed process may have left it
        # With few trials, halving would end all except the best third after one noisy score; the median ends the worse
        # half in the middle of their training, once three are complete.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=TRIAL_SCORES // 2 - 1)
        way = "minimize" if self.task.lower_is_better else "maximize"
        journals = optuna.storages.journal
        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):  # a power cut ended the last line
            os.truncate(path, content.rfind(b"\n") + 1)
        with as_usage_error(str(path), f"delete {self.folder} to start again"):
            backend = journals.JournalFileBackend(str(path), journals.JournalFileOpenLock(str(path)))
            self.storage = optuna.storages.JournalStorage(backend)
            kept = {"storage": self.storage, "study_name": SEARCH, "load_if_exists": True}
            self.study = optuna.create_study(direction=way, pruner=pruner, **kept)

    def list_done(self) -> list["FrozenTrial"]:
        """Return the trials that are over."""
        return [trial for trial in self.study.trials if trial.state.is_finished()]

    def begin_trial(self) -> "Trial":
        """Begin a trial with values around those of the preset, or open the one at which the search was stopped."""
        trials = self.study.trials
        if not trials:
            self.study.enqueue_trial(self.usual)
        if trials and trials[-1].state == self.optuna.trial.TrialState.RUNNING:
            study = self.storage.get_study_id_from_name(SEARCH)
            known = self.storage.get_trial_id_from_study_id_trial_number(study, trials[-1].number)
            trial = self.optuna.trial.Trial(self.study, known)
        else:
            trial = self.study.ask()
        # By the number: a stopped search then proposes the same values as one without a stop.
        draw = np.random.SeedSequence([self.recipe.train["seed"], trial.number + 1]).generate_state(1)
        self.study.sampler = self.optuna.samplers.TPESampler(seed=int(draw[0]))
        for axis, value in self.usual.items():
            if axis == "batch_size":
                trial.suggest_categorical(axis, sorted({*BATCH_CHOICES, value}))
            elif axis == "train.learning_rate":
                trial.suggest_float(axis, min(*LEARNING_RATES, value), max(*LEARNING_RATES, value), log=True)
            else:
                trial.suggest_float(axis, value * SHORTEST, value * LONGEST, log=True)
        return trial

    def do_trial(self) -> None:
        """Do the next trial, and record the outcome."""
        trial = self.begin_trial()
        number = trial.number + 1
        job = RunJob(self.make_trial(trial.params), str(self.folder / f"trial-{number}"))

        def on_state(output: str, news: State | str) -> None:
            if isinstance(news, str):
                self.report(f"trial {number}: {news}")
            elif news.total:
                self.progress(news.done, news.total, {"loss": news.loss})

        def begin(words: Sequence[str], log: Path, slot: int) -> Command:
            return start_command(words, log, torch.get_num_threads())

        def should_stop(job: RunJob) -> str:
            if self.is_worse(job, trial):
                return WORSE
            return "half of the time is over" if self.count_left() < 0 else ""

        self.report(f"starting trial {number}: {describe_values(trial.params)}")
        runs = Runs(self.folder, [job], on_state, begin, 1, should_stop, self.signals)
        if runs.execute():
            raise Interrupted(f"stopped after {number - 1} trials; the same command continues", self.signals[0])
        found, states = runs.known.get(job.output, State()), self.optuna.trial.TrialState
        if "end_score" in (found.metrics or {}):  # trainings are compared, also where a run delivers its start
            found = replace(found, metrics={**found.metrics, "score": found.metrics["end_score"]})
        found = fail_if_not_finite(found)
        value, state, reason = None, states.FAIL, found.reason
        if self.is_worse(job, trial):  # by its last scores: it may have ended before they were read
            state, reason = states.PRUNED, WORSE
        elif found.status == "finished":
            value, state = found.metrics["score"], states.COMPLETE
        elif job.output in runs.ended:
            state, reason = states.PRUNED, runs.ended[job.output]
        elif "the disk is" in reason or not (found.metrics or self.study.get_trials(states=[states.COMPLETE])):
            raise UsageError(f"{job.output}: {reason}")  # the others would probably fail too
        drop_checkpoints(Path(job.output))
        drop_weights(Path(job.output))
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, value, state)
        lines = list(map(self.describe, self.list_done()))
        atomic_write("".join(f"- {line}\n" for line in lines), self.folder / TRIALS_FILE)
        self.report(lines[-1])

    def is_worse(self, job: RunJob, trial: "Trial") -> bool:
        """Pass the new scores of a trial to Optuna except the last one, and return whether the trial should end."""
        log = read_log(Path(job.output)) if Path(job.output, LOG).exists() else []
        scores = [entry[key] for entry in log if (key := f"eval_{self.task.metric}") in entry and entry["step"]]
        known = len(self.study.trials[-1].intermediate_values)
        for step, score in enumerate(scores[: TRIAL_SCORES - 1]):
            if step >= known:
                trial.report(score, step)
            if trial.should_prune():
                return True
        return False

    def describe(self, trial: "FrozenTrial") -> str:
        """Return a trial, its score and why it ended early in words."""
        score = [] if trial.value is None else [find_row(self.task.table, self.task.metric).describe(trial.value)]
        words = "; ".join(filter(None, [*score, trial.user_attrs["reason"]]))
        return f"trial {trial.number + 1}: {describe_values(trial.params)}: {words}"


def name_key(axis: str) -> str:
    """Return the key of an axis, without its table."""
    return axis.rpartition(".")[2]


def describe_values(params: Mapping[str, Any]) -> str:
    """Return values in words, such as learning_rate 2e-05, batch_size 32."""
    shown = {axis: f"{value:.3g}" if isinstance(value, float) else show_value(value) for axis, value in params.items()}
    return ", ".join(f"{name_key(axis)} {value}" for axis, value in shown.items())
