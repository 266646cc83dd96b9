"""Search for the best model: trials on a part of the training data, then one training on all of it.

Each trial is a run in a process of its own, scored on training rows that are held back (`[data] held_back`), so that
the score on dev stays honest. The search reads the trial's log and passes its scores to Optuna, which proposes values
(TPE, Bergstra et al. 2011) and says which trials to end. With a clock, half of the time is for trials. For texts and
pairs a solved head on the frozen encoder is scored on the same rows, and is chosen if it is better than all trials.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from bertkit.errors import UsageError, explain_disk_error, explain_missing, explain_refusal
from bertkit.reports.tables import count, find_row
from bertkit.studies.results import judge
from bertkit.studies.spec import check_searchable, set_axis
from bertkit.studies.start import RECIPES, RunJob, Runs, State, drop_checkpoints, drop_weights
from bertkit.studies.tables import show_value
from bertkit.system.cluster import Command, count_processes, start_command
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, hold_directory, write_json
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import Interrupted, note_signals
from bertkit.tasks import TASKS
from bertkit.tasks.examples import MOST_HELD_BACK
from bertkit.tasks.finetuning import BASELINES, BEST_BASELINE, GAIN
from bertkit.training import budget, costs
from bertkit.training.callbacks import Progress
from bertkit.training.clock import Clock
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.preset import settle
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, list_decisive, load_recipe, merge, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import (
    LOG,
    METRICS_FILE,
    RECIPE_FILE,
    SEARCH,
    has_begun,
    read_log,
    read_metrics,
    read_record,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

JOURNAL, TRIALS_FILE, PLAN_FILE = "optuna.log", "trials.md", "plan.json"
HELD_ROWS = 1000  # rows; the standard error of an accuracy of 80 % is 1.3 points then
LEARNING_RATES = (1e-5, 2e-4)  # around those of section A.3, and higher for small models
BATCH_CHOICES = (16, 32)  # section A.3
SHORTEST, LONGEST = 0.5, 2.0  # times the epochs of the first trial
FROZEN = {"freeze": "encoder"}  # the change to a recipe whose head is solved
TRIAL_SCORES = 4  # in each trial
LEAST_TRIALS = 2  # for which a clock must have time; one is enough beside a solved head
START_SECONDS = 10.0  # before the first update of a process, or around a solved head
RESERVE = 1.2  # the measured seconds count this many times
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
        if trials or (clock and "held_back" in TASKS[recipe.task].options):
            recipe, prepared = Search(recipe, output, trials, clock, report, progress).choose()
        else:
            prepared = None
        news = {"output": output, "report": report, "progress": progress, "prepared": prepared}
        return budget.train_within(recipe, clock=clock, **news) if clock else run(recipe, **news)


class Plan(msgspec.Struct):
    """How the time of a clock is divided.

    Attributes:
        longest: The highest number of epochs, times that of the first trial.
        last, trial: Seconds of the last training, and of a trial at most.
        measured: The costs of a trial.
    """

    longest: float
    last: float
    trial: float
    measured: costs.Measured


@dataclass
class Search:
    """A search in a directory; see `search_or_train`.

    Attributes:
        most: The number of trials; 0: as many as the clock allows.
        plan: How a clock's time is divided.
        noted: Signals that were received.
        is_worse: Whether the present trial ends early, or would have.
    """

    recipe: Recipe
    output: Path
    most: int
    clock: Clock | None
    report: Report
    progress: Progress = ignore
    plan: Plan | None = None
    noted: list[int] = field(default_factory=list)
    is_worse: bool = False

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
            self.recipe = self.recipe.changed(preset="auto")
        identity = list_decisive(self.recipe.to_dict()) | {"searched": self.searched, "clock": bool(self.clock)}
        path = self.folder / RECIPE_FILE
        if path.exists():
            refuse_other(f"{self.folder} belongs to another search", read_recipe(path), identity)
        elif has_begun(self.output):
            raise UsageError(f"{self.output} has a run without a search; name another directory with --output")
        if has_begun(self.output):  # the last training
            return load_recipe(self.output / RECIPE_FILE), None
        prepared = prepare(self.recipe, self.report)
        self.recipe = settle(self.recipe, len(prepared.data["train"]), self.report)
        with hold_directory(self.folder):
            save_recipe(identity, path)
            best = self.make_recipe(self.find_best(prepared))
            return best, prepared if best.batch_size == self.recipe.batch_size else None  # it may order the data

    def find_best(self, prepared: Prepared) -> dict[str, Any]:
        """Do the trials that are left, and return the best values; empty if no trial is complete."""
        if self.clock and not self.read_plan(prepared):
            self.report("the time is too short for trials: training with the values of the preset")
            return {}
        frozen = self.score_frozen()
        names, many = map(name_key, self.searched), count(self.most, "trial") if self.most else "trials"
        self.report(f"searching {', '.join(names)}: {many}, scored on held-back rows of train")
        self.open_journal()
        with note_signals(self.noted.append):
            while (done := len(self.study.trials)) < self.most or not self.most:
                if self.clock and self.clock.left < self.plan.last + self.plan.trial * bool(done):
                    break
                self.do_trial(done + 1)
        if not self.study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE]):
            has_head = not math.isnan(frozen)
            rest = "solving the head on all of train" if has_head else "training with the values of the preset"
            self.report(f"no trial was completed: {rest}")
            return FROZEN if has_head else {}
        best = self.study.best_trial
        for line in self.describe_baseline(read_metrics(self.folder / name_trial(best.number + 1) / METRICS_FILE)):
            self.report(line)
        if frozen > best.value:
            self.report(
                f"the solved head is better than the best of {count(done, 'trial')}: solving it on all of train"
            )
            return FROZEN
        self.report(f"the best of {count(done, 'trial')}: {describe_values(best.params)}; training on all of train")
        return best.params

    def score_frozen(self) -> float:
        """Return the score of a solved head on the frozen encoder, on the held-back rows; NaN if none competes."""
        is_long = self.plan and self.plan.measured.rows * self.plan.measured.row > self.plan.trial
        if not self.solves_head or is_long:
            return math.nan
        self.report("solving a head on the frozen encoder")
        recipe = self.make_recipe(FROZEN).override(data={"held_back": HELD_ROWS}, calibrate=False)
        score = run(recipe, output=self.folder / "frozen")["score"]
        drop_weights(self.folder / "frozen")
        row = find_row(self.task.table, self.task.metric)
        self.report(f"a solved head on the frozen encoder, beside the trials: {row.describe(score)}")
        return score

    def describe_baseline(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the best baseline of a trial in words, and whether the trial is better than it."""
        if not (name := metrics.get(BEST_BASELINE)):
            return []
        score = find_row(self.task.table, self.task.metric).describe(metrics[f"{name}_score"])
        lines = [f"{BASELINES[name]}{', which a search does not choose' * (name != 'frozen')}: {score}"]
        if metrics[f"{GAIN}_low"] <= 0:
            lines.append(f"the best trial is not better than {BASELINES[name]} by the interval of the difference")
        return lines

    # --- What is searched, and how long -------------------------------------------------------------------------------

    @cached_property
    def optuna(self) -> Any:
        """Return the library, which need not be installed."""
        with explain_missing("a search needs Optuna", "search"):
            import optuna
        return optuna

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
    def solves_head(self) -> bool:
        """Return whether a solved head on the frozen encoder competes with the trials."""
        decided = self.recipe.given.keys() & {*FROZEN, "bilstm", "reinit_layers"} or self.recipe.preset != "auto"
        return bool(self.task.solved) and not decided

    @property
    def axes(self) -> dict[str, "BaseDistribution"]:
        """Return the values that are searched, around those of the first trial."""
        rate, epochs = self.recipe.train["learning_rate"], self.recipe.train.get("num_train_epochs", 1.0)
        longest = self.plan.longest if self.plan else LONGEST
        rates, kinds = (min(*LEARNING_RATES, rate), max(*LEARNING_RATES, rate)), self.optuna.distributions
        axes: dict[str, BaseDistribution] = {
            "train.learning_rate": kinds.FloatDistribution(*rates, log=True),
            "batch_size": kinds.CategoricalDistribution(sorted({*BATCH_CHOICES, self.recipe.batch_size})),
            "train.num_train_epochs": kinds.FloatDistribution(epochs * SHORTEST, epochs * longest, log=True),
        }
        return {axis: axes[axis] for axis in self.searched}

    def read_plan(self, prepared: Prepared) -> bool:
        """Divide the time, unless an earlier start has planned trials, and return whether it is enough for them."""
        path = self.folder / PLAN_FILE
        if path.exists():
            self.plan = read_record(path, Plan)
        elif not self.divide_time(prepared):
            return False
        write_json(msgspec.to_builtins(self.plan), path)
        return True

    def divide_time(self, prepared: Prepared) -> bool:
        """Divide the time between trials and the last training, and return whether it is enough for trials."""
        self.report("measuring some updates")
        probe, least = budget.PROBE_SHARE * self.clock.limit, LEAST_TRIALS - self.solves_head
        measured, recipe = costs.measure(self.recipe, prepared, probe), budget.leave_out_evaluations(self.recipe)
        left = self.clock.left - self.solves_head * (START_SECONDS + measured.rows * measured.row)

        def find_seconds(length: float, scores: int = 0, reserve: float = RESERVE) -> float:
            _, training, evaluation = costs.expect(recipe, measured, self.output)
            during = length * (training + evaluation) + scores * measured.evaluation
            return START_SECONDS + reserve * (during + measured.end) + probe

        def find_least(length: float) -> float:
            return least * find_seconds(length, TRIAL_SCORES) + find_seconds(length)

        # Shorter trials cost the last training half of its updates: without a solved head to compare with, a training
        # that fits without the reserve is not shortened for them.
        if find_seconds(1.0, reserve=RESERVE if self.solves_head else 1.0) <= left < find_least(1.0):
            return False
        is_longer = "train.num_train_epochs" in self.searched and find_least(LONGEST) <= left
        longest = LONGEST if is_longer else 1.0
        last, held = min(find_seconds(longest), left / 2), int(min(HELD_ROWS, MOST_HELD_BACK * measured.rows))
        trial = min(find_seconds(longest, TRIAL_SCORES), (left - last) / least)
        measured = msgspec.structs.replace(measured, rows=measured.rows - held, evaluated=held, predicted=held)
        self.plan = Plan(longest, last, trial, measured)
        try:
            return bool(self.make_trial(self.recipe.override(batch_size=max(*BATCH_CHOICES, self.recipe.batch_size))))
        except budget.TooShort:
            return False

    def make_recipe(self, params: Mapping[str, Any]) -> Recipe:
        """Make the recipe with some values."""
        values = (set_axis(axis, value) for axis, value in params.items())
        return self.recipe.changed(**merge(*values)).adopt(self.recipe)

    def make_trial(self, recipe: Recipe) -> Recipe:
        """Return the recipe of a trial, which is as long as the time allows."""
        made = recipe.override(data={"held_back": HELD_ROWS}, train=TRIAL_ONLY, patience=0, calibrate=False)
        if not self.plan:
            return made
        clock = Clock(self.plan.trial - START_SECONDS, time.monotonic())
        return budget.fit(made, self.plan.measured, clock, self.folder).override(train=TRIAL_ONLY)

    # --- The trials ---------------------------------------------------------------------------------------------------

    def open_journal(self) -> None:
        """Open the journal, and give its trials to a study in memory; a trial enters the journal when it is over."""
        optuna, path = self.optuna, self.folder / JOURNAL
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        Path(f"{path}.lock").unlink(missing_ok=True)  # a killed process may have left it
        # With few trials, halving would end all except the best third after one noisy score; the median ends the worse
        # half in the middle of their training, once three are complete.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=TRIAL_SCORES // 2 - 1)
        way = {"direction": "minimize" if self.task.lower_is_better else "maximize"}
        self.study = optuna.create_study(pruner=pruner, **way)
        journals = optuna.storages.journal
        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):  # a power cut ended the last line
            os.truncate(path, content.rfind(b"\n") + 1)  # its trial has its own directory
        with explain_refusal(str(path), f"delete {self.folder} to start again"):
            backend = journals.JournalFileBackend(str(path), journals.JournalFileOpenLock(str(path)))
            storage = optuna.storages.JournalStorage(backend)
            self.journal = optuna.create_study(storage=storage, study_name=SEARCH, load_if_exists=True, **way)
            self.study.add_trials(self.journal.trials)

    def do_trial(self, number: int) -> None:
        """Train with some values, and record the outcome."""
        self.is_worse = False
        saved = self.folder / RECIPES / f"{name_trial(number)}.toml"
        begun = load_recipe(saved) if saved.exists() else None  # the search was stopped in this trial
        if begun or number == 1:
            values = (begun or self.recipe).to_dict()
            self.study.enqueue_trial({axis: reduce(getitem, axis.split("."), values) for axis in self.axes})
        draw = np.random.SeedSequence([self.recipe.train["seed"], number]).generate_state(1)
        self.study.sampler = self.optuna.samplers.TPESampler(seed=int(draw[0]))
        trial = self.study.ask(self.axes)
        job = RunJob(begun or self.make_trial(self.make_recipe(trial.params)), str(self.folder / saved.stem))

        def hear(output: str, news: State | str) -> None:
            if isinstance(news, str):
                self.report(f"trial {number}: {news}")
            elif news.total:
                self.progress(news.done, news.total, {"loss": news.loss})

        def begin(words: Sequence[str], log: Path, slot: int) -> Command:
            return start_command(words, log, torch.get_num_threads())

        self.report(f"starting trial {number}: {describe_values(trial.params)}")
        runs = Runs(self.folder, [job], hear, begin, 1, lambda job: self.find_reason(job, trial), self.noted)
        if runs.execute():
            raise Interrupted(f"stopped after {number - 1} trials; the same command continues", self.noted[0])
        self.find_reason(job, trial)  # by its last scores: it may have ended before they were read
        found, states = judge(runs.known.get(job.output, State())), self.optuna.trial.TrialState
        value, state, reason = None, states.FAIL, found.reason
        if self.is_worse:
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
        over = self.study.tell(trial, value, state)
        lines = list(map(self.describe, self.study.trials))
        atomic_write("".join(f"- {line}\n" for line in lines), self.folder / TRIALS_FILE)
        self.journal.add_trial(over)
        self.report(lines[-1])

    def find_reason(self, job: RunJob, trial: "Trial") -> str:
        """Pass the new scores of a trial to Optuna, and return why it should end; empty if it goes on."""
        log = read_log(Path(job.output)) if Path(job.output, LOG).exists() else []
        scores = [entry[key] for entry in log if (key := f"eval_{self.task.metric}") in entry]
        for step in range(len(self.study.trials[-1].intermediate_values), len(scores)):
            trial.report(scores[step], step)
            self.is_worse |= step + 1 < TRIAL_SCORES and trial.should_prune()
        if self.is_worse:
            return WORSE
        return "the time is over" if self.clock and self.clock.left < self.plan.last else ""

    def describe(self, trial: "FrozenTrial") -> str:
        """Return a trial, its score and why it ended early in words."""
        score = [] if trial.value is None else [find_row(self.task.table, self.task.metric).describe(trial.value)]
        words = "; ".join(filter(None, [*score, trial.user_attrs["reason"]]))
        return f"trial {trial.number + 1}: {describe_values(trial.params)}: {words}"


def name_key(axis: str) -> str:
    """Return the key of an axis, without its table."""
    return axis.rpartition(".")[2]


def name_trial(number: int) -> str:
    """Return the name of the directory of a trial, from 1."""
    return f"trial-{number}"


def describe_values(params: Mapping[str, Any]) -> str:
    """Return values in words, such as learning_rate 2e-05, batch_size 32."""
    shown = {axis: f"{value:.3g}" if isinstance(value, float) else show_value(value) for axis, value in params.items()}
    return ", ".join(f"{name_key(axis)} {value}" for axis, value in shown.items())
