"""Search for the best model: trials on a part of the training data, then one training on all of it.

A trial is scored on training rows that are held back (`[data] held_back`), so that the score on dev stays honest. After
a ninth and a third of its updates it ends, unless it is among the best third so far (asynchronous successive halving,
Li et al. 2020). Optuna proposes the values (TPE, Bergstra et al. 2011).

With a clock, measured costs decide how long a trial is and how many there are (`search_sizes.py`). The last training
follows the clock (`bertkit.training.pace`); up to half of the time is kept for it.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from bertkit.errors import UsageError, explain_damage, explain_disk_error
from bertkit.reports.tables import OWN_DATA, find_row
from bertkit.studies.cells import list_cells
from bertkit.studies.results import summarize
from bertkit.studies.search_sizes import Sizes
from bertkit.studies.spec import STUDY_FILE, TABLE, define, make_study, set_axis
from bertkit.studies.start import State
from bertkit.studies.tables import show_value, write_table
from bertkit.studies.trials import Trials
from bertkit.system.clock import Clock
from bertkit.system.differences import refuse_other
from bertkit.system.files import atomic_write, write_json
from bertkit.system.progress import Report, ignore
from bertkit.tasks import TASKS
from bertkit.training.budget import CLOCK_FILE, describe_time, fit, scale_warmup, time_row, train_within
from bertkit.training.callbacks import Diverged, Progress, ScoreAt, TrainingEnded
from bertkit.training.cost import PROBE_SECONDS, measure_costs
from bertkit.training.pace import TooShort
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import join_processes, take_first
from bertkit.training.recipe import Recipe, RecipePart, list_decisive, load_recipe, merge, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import (
    METRICS_FILE,
    RECIPE_FILE,
    SEARCH,
    STUDY_RESULT,
    has_begun,
    hold_run_dir,
    read_record,
    write_environment,
)

SIZES_FILE = "sizes.json"
TRIAL_FOLDER = "trial"  # the directory of the trial in progress
HOLD_BACK = {"data": {"held_back": 1000}}  # the standard error of an accuracy of 80 % is 1.3 points then
LEARNING_RATES = (1e-5, 1e-4)  # around those of section A.3
BATCH_CHOICES = (16, 32)  # section A.3
EPOCH_CHOICES = (2.0, 3.0, 4.0)  # section A.3
PROBE_SHARE = 0.02  # of the time, at most, is used for measuring
FIRST_START = 3.0  # seconds of a trial before its first update, until they have been measured


class TrialEnded(TrainingEnded):
    """A trial has ended.

    Attributes:
        state: COMPLETE, PRUNED before its last update, or FAIL without a score.
        updates: Updates done.
        value: The last score, if there is one.
        reason: Why it has ended, unless it is complete.
    """

    def __init__(self, state: TrialState, updates: int, value: float | None, reason: str = "") -> None:
        super().__init__(state)
        self.state = state
        self.updates = updates
        self.value = value
        self.reason = reason


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

    Raises:
        UsageError: As for `run`, or the time is too short.
        Interrupted: As for `run`.
    """
    if trials or (clock and "held_back" in TASKS[recipe.task].options):
        return Search(recipe, output, trials, clock, report, progress).run()
    news = {"output": output, "report": report, "progress": progress}
    return train_within(recipe, clock=clock, **news) if clock else run(recipe, **news)


def describe_search(recipe: Recipe, output: Path, trials: int, clock: Clock | None) -> list[str]:
    """Return in lines what a search or a clock allows.

    Raises:
        UsageError: The time is too short.
    """
    if "held_back" not in TASKS[recipe.task].options:
        return describe_time(recipe, output, clock)
    new = Search(recipe, output, trials, clock)
    new.sizes = new.choose_sizes()
    return new.describe()


class Search:
    """A search in a directory; see `search_or_train`."""

    def __init__(
        self,
        recipe: Recipe,
        output: Path,
        trials: int,
        clock: Clock | None,
        report: Report = ignore,
        progress: Progress = ignore,
    ) -> None:
        self.task = TASKS[recipe.task]
        if not self.task.metric:
            raise UsageError(f"{recipe.task} has no training data, so there is nothing to search")
        self.given = {key: value for key, value in recipe.given.items() if key != "pace"}
        if clock and "max_steps" in self.given.get("train", {}):
            self.given["train"] = {key: value for key, value in self.given["train"].items() if key != "max_steps"}
        self.recipe = recipe if self.given == recipe.given else Recipe.make(self.task, self.given)
        for key in ("features", "extra_train", "held_back"):
            if self.recipe.data.get(key):
                raise UsageError(f"--search and --budget cannot be combined with {key}; leave it out")
        self.output = output
        self.folder = output / SEARCH
        self.most = trials
        self.clock = clock
        self.report = report
        self.progress = progress
        self.processes = join_processes(self.recipe)
        self.is_main = self.processes.is_main_process
        self.begun = load_recipe(output / RECIPE_FILE) if has_begun(output) else None  # the last training
        self.trials: Trials | None = None  # only in the first process
        self.whole: Prepared | None = None
        self.parts: Prepared | None = None
        self.start = FIRST_START

    def run(self) -> dict[str, Any]:
        """Do or continue the search and the last training, and return the scores."""
        self.check_same()
        if (self.output / METRICS_FILE).exists() or (self.begun and self.begun.pace):  # trained, if not yet scored
            return run(self.begun, output=self.output, report=self.report, progress=self.progress)
        kept = self.clock.keep(self.folder / CLOCK_FILE) if self.clock and self.is_main else nullcontext()
        try:
            with explain_disk_error(self.output), hold_run_dir(self.folder) if self.is_main else nullcontext(), kept:
                if not self.begun:
                    self.do_trials()
                return self.train_best()
        except TooShort:
            if self.is_main and not has_begun(self.output):  # so that it can start again with more time
                shutil.rmtree(self.folder, ignore_errors=True)
                with suppress(OSError):
                    self.output.rmdir()
            raise

    # --- The directory ------------------------------------------------------------------------------------------------

    def describe_search(self) -> RecipePart:
        """Return the values that identify a search."""
        kind = "budget" if self.clock else "search"
        return list_decisive(self.recipe.to_dict()) | {
            "searched": sorted(self.list_axes()),
            "kind": kind,
        }

    def check_same(self) -> None:
        """Check that the directory is empty or has this search.

        Raises:
            UsageError: It has another search or another run.
        """
        path = self.folder / RECIPE_FILE
        if path.exists():
            refuse_other(f"{self.folder} belongs to another search", read_recipe(path), self.describe_search())
        elif (self.output / RECIPE_FILE).exists():
            raise UsageError(f"{self.output} has a run without a search; name another directory with --output")

    def prepare_data(self) -> None:
        """Read and encode the data of the trials and of the last training."""
        self.whole = prepare(self.recipe, self.report)
        self.parts = prepare(self.recipe.override(**HOLD_BACK))

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes of the search: those of its first start, or new ones."""
        path = self.folder / SIZES_FILE
        found = None
        if self.is_main and path.exists():
            with explain_damage(path, self.output):
                found = read_record(path, Sizes)
                if self.clock and not found.time_training(1, 1):
                    raise ValueError("it has no times")
        found = take_first(found)
        if found is None:
            found = self.choose_sizes()
            if self.is_main:
                write_json(msgspec.to_builtins(found), path)
        return found

    # --- What is searched ---------------------------------------------------------------------------------------------

    def list_axes(self, epochs: bool = True) -> dict[str, BaseDistribution]:
        """Return the values that are searched: those that a person left open.

        Raises:
            UsageError: It leaves none open, and there is no clock either.
        """
        train = self.recipe.train
        rate = train["learning_rate"]
        axes: dict[str, BaseDistribution] = {
            "train.learning_rate": FloatDistribution(min(*LEARNING_RATES, rate), max(*LEARNING_RATES, rate), log=True),
            "batch_size": CategoricalDistribution(sorted({*BATCH_CHOICES, self.recipe.batch_size})),
            "preset": CategoricalDistribution(("paper", "stable")),
        }
        if epochs and train.get("max_steps", -1) <= 0:
            axes["train.num_train_epochs"] = CategoricalDistribution(
                sorted({*EPOCH_CHOICES, train["num_train_epochs"]})
            )
        tables = {axis: axis.rpartition(".") for axis in axes}
        given = [
            axis
            for axis, (table, _, key) in tables.items()
            if key in (self.given.get(table, {}) if table else self.given)
        ]
        if len(given) == len(axes) and not self.clock:
            raise UsageError(f"the recipe sets all that would be searched ({', '.join(axes)}); leave one open")
        return {axis: values for axis, values in axes.items() if axis not in given}

    @property
    def axes(self) -> dict[str, BaseDistribution]:
        """Return what is searched: no epochs if trials are too short for them."""
        return self.list_axes(epochs=not self.sizes.sequences)

    @property
    def has_trials(self) -> bool:
        """Return whether something is searched, and there is time for it."""
        return bool(self.axes) and self.sizes.has_trials(self.recipe)

    def find_value(self, axis: str) -> Any:
        """Return the value of an axis in the task's own recipe."""
        table, _, key = axis.rpartition(".")
        return getattr(self.recipe, table)[key] if table else getattr(self.recipe, key)

    def find_choices(self, axis: str) -> Sequence[Any]:
        """Return the choices of an axis, or the recipe's value if it is not searched."""
        axes = self.list_axes()
        return axes[axis].choices if axis in axes else [self.find_value(axis)]

    def make_recipe(self, params: Mapping[str, Any]) -> Recipe:
        """Make the recipe with some values."""
        return self.recipe.changed(**merge(*(set_axis(axis, value) for axis, value in params.items())))

    def make_trial(self, params: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a trial."""
        recipe = self.make_recipe(params)
        updates = self.sizes.count_updates(recipe)
        train = {
            "max_steps": updates,
            "warmup_steps": scale_warmup(recipe, updates),
            "eval_strategy": "no",
            "eval_on_start": False,
            "save_strategy": "no",
            "load_best_model_at_end": False,
        }
        return recipe.override(**HOLD_BACK, patience=0, calibrate=False, baseline=False, train=train)

    # --- Time ---------------------------------------------------------------------------------------------------------

    def choose_sizes(self) -> Sizes:
        """Return the sizes of a new search, with a clock from measured costs; the same in all processes.

        Raises:
            UsageError: The time is too short.
        """
        self.prepare_data()
        split = next(iter(self.task.splits))
        counts = {name: len(data) for name, data in self.whole.data.items()}
        end = sum(counts.values()) - counts["train"]
        sizes = Sizes(len(self.parts.data["train"]), len(self.parts.data[split]), counts["train"], end)
        if self.clock:
            self.report("measuring some updates")
            seconds = min(PROBE_SECONDS, PROBE_SHARE * self.clock.limit)
            costs = measure_costs(self.recipe.override(**HOLD_BACK), self.parts, seconds, is_best=True)
            part = costs.parts[0]
            sizes = take_first(
                msgspec.structs.replace(
                    sizes,
                    sequence_seconds=part.seconds / self.processes.num_processes,
                    update_seconds=part.fixed,
                    row_seconds=time_row(costs, split),
                )
            )
            epochs, size = max(self.find_choices("train.num_train_epochs")), min(self.find_choices("batch_size"))
            sizes = take_first(self.fit_sizes(sizes, epochs, size))
            if isinstance(sizes, TooShort):
                raise sizes
        return sizes.set_stages(min(self.find_choices("train.num_train_epochs")), max(self.find_choices("batch_size")))

    def fit_sizes(self, sizes: Sizes, epochs: float, batch_size: int) -> Sizes | TooShort:
        """Return the sizes that fit into the time of this process, or the error."""
        try:
            return sizes.fit(self.clock, self.recipe, epochs, batch_size)
        except TooShort as error:
            return error

    def time_end(self) -> float:
        """Return the seconds that the last training and the end of the run need."""
        recipe = self.make_recipe(self.trials.find_best())
        reserve = self.sizes.limit(self.clock, recipe.batch_size).reserve(self.sizes.end_rows)
        return self.start + self.sizes.time_final(recipe) + reserve

    def describe(self) -> list[str]:
        """Return in lines what is searched, and what the time allows."""
        sizes = self.sizes
        if not self.axes:
            return ["the recipe leaves nothing to search: training with its values"]
        if not self.has_trials:
            return ["the time is too short for trials: training with the task's own values"]
        names = ", ".join(axis.rpartition(".")[2] for axis in self.axes)
        length = f"{sizes.sequences:,} sequences" if sizes.sequences else "all updates"
        early = f"; the best third goes on after {', '.join(f'{x:.0%}' for x in sizes.stages)}" if sizes.stages else ""
        many = f"{self.most} trials" if self.most else "trials"
        line = f"searching {names}: {many} of {length}, scored on {sizes.held:,} held-back sequences of train{early}"
        return [line, *([sizes.describe_time(self.clock, self.recipe)] if self.clock else [])]

    # --- The trials ---------------------------------------------------------------------------------------------------

    def do_trials(self) -> None:
        """Make trials until their number is reached, or the time is over."""
        if self.is_main:
            save_recipe(self.describe_search(), self.folder / RECIPE_FILE)
            self.trials = Trials(self.folder, self.task.lower_is_better, self.recipe.train["seed"])
        for line in self.describe():  # with the sizes
            self.report(line)
        if self.parts is None:
            self.prepare_data()
        if self.is_main:  # refuses other data than those of the earlier trials
            write_environment(self.folder, self.whole.fingerprints, "", self.whole.commits, goes_on=True)
        while (params := take_first(self.ask() if self.is_main else None)) is not None:
            self.do_trial(params)

    def ask(self) -> dict[str, Any] | None:
        """Return the values of the next trial; None if there is none."""
        if (self.most and len(self.trials.done) >= self.most) or not self.has_trials:
            return None
        if self.clock:
            one = self.start + self.sizes.time_trial(self.recipe)
            if self.clock.left - self.time_end() < one:
                return None
        return self.trials.ask(self.axes, {axis: self.find_value(axis) for axis in self.axes})

    def do_trial(self, params: Mapping[str, Any]) -> None:
        """Train with some values, and record the outcome."""
        recipe = self.make_trial(params)
        updates = recipe.train["max_steps"]
        stages = {max(round(updates * share), 1): stage for stage, share in enumerate(self.sizes.stages)}
        began, end = time.monotonic(), self.time_end() if self.clock and self.is_main else 0.0
        value: float | None = None

        def on_update(update: int) -> None:
            if update == 0:
                self.start = time.monotonic() - began
            if self.clock and take_first(self.is_main and self.clock.left < end):
                raise TrialEnded(TrialState.PRUNED, update, value, "the time is over")

        def on_score(update: int, score: float) -> None:
            nonlocal value
            if not isfinite(score):
                raise TrialEnded(TrialState.FAIL, update, None, f"the score is {score}")
            value = score
            if update >= updates:
                raise TrialEnded(TrialState.COMPLETE, update, value)
            if take_first(self.is_main and self.trials.is_bad(stages[update], score)):
                raise TrialEnded(TrialState.PRUNED, update, value, "others are better")

        watch = ScoreAt((*stages, updates), self.task.metric, on_score, on_update)
        self.remove_trial()  # of a killed process
        try:
            run(recipe, output=self.folder / TRIAL_FOLDER, prepared=self.parts, callbacks=[watch])
        except TrialEnded as ended:
            self.record(ended)
        except Diverged as error:
            self.record(TrialEnded(TrialState.FAIL, 0, None, str(error)))
        self.remove_trial()

    def remove_trial(self) -> None:
        """Remove the directory of a trial."""
        if self.is_main:
            shutil.rmtree(self.folder / TRIAL_FOLDER, ignore_errors=True)
        self.processes.wait_for_everyone()

    def record(self, ended: TrialEnded) -> None:
        """Record the outcome of a trial, and write the table of all trials."""
        if not self.is_main:
            return
        trial = self.trials.end(ended.state, ended.value, ended.updates, ended.reason)
        self.write()
        score = [] if ended.value is None else [find_row(self.task.table, self.task.metric).describe(ended.value)]
        words = "; ".join([*score, *([f"{ended.reason}, after {ended.updates:,} updates"] if ended.reason else [])])
        self.report(f"trial {len(self.trials.done)}: {describe_values(trial.params)}: {words}")

    def write(self) -> None:
        """Write the trials as a study."""
        rows = []
        for number, trial in enumerate(self.trials.done, start=1):
            early = f", ended after {trial.user_attrs['updates']} updates" if trial.user_attrs["reason"] else ""
            recipe = merge(*(set_axis(axis, value) for axis, value in trial.params.items()))
            rows.append({"name": f"{number}: {describe_values(trial.params)}{early}", "recipe": recipe})
        shared = {key: value for key, value in self.given.items() if key != "task"}
        definition = {
            "column": [{"name": f"{self.task.name}, held-back rows", "task": self.task.name}],
            "note": (
                f"Trials of a search, scored on {self.sizes.held:,} rows of train that are held back, not on dev. The "
                "best of the completed ones gives the values of the last training, on all of train."
            ),
            "recipe": merge(shared, HOLD_BACK),
            "row": rows,
        }
        study = make_study(definition, where=str(self.folder))
        cells = list_cells(study, self.folder)
        states = {}
        for cell, trial in zip(cells, self.trials.done, strict=True):
            score, words = trial.user_attrs["score"], trial.user_attrs
            metrics = {"score": score, self.task.metric: score, "updates": words["updates"], OWN_DATA: True}
            state = State("failed", reason=words["reason"]) if score is None else State("finished", metrics=metrics)
            states |= dict.fromkeys(cell.runs.values(), state)
        results = summarize(study, [], cells, states)
        save_recipe(define(study), self.folder / STUDY_FILE)
        write_json(results, self.folder / STUDY_RESULT)
        atomic_write(write_table(results), self.folder / TABLE)

    # --- The last training --------------------------------------------------------------------------------------------

    def train_best(self) -> dict[str, Any]:
        """Train with the best values on all of train, and return the scores of this run."""
        recipe, limit, whole = self.begun, None, self.whole
        if not recipe:
            best = take_first(self.trials.find_best() if self.is_main else None)
            count = take_first(len(self.trials.done) if self.is_main else 0)
            recipe = self.make_recipe(best)
            if best:
                self.report(f"the best of {count} trials: {describe_values(best)}; training on all of train")
            elif self.has_trials:
                self.report("no trial was completed: training with the task's own values")
        self.whole = self.parts = None
        if self.clock:
            limit = self.sizes.limit(self.clock, recipe.batch_size)
            if not self.begun:
                left = self.clock.left - self.start - limit.reserve(self.sizes.end_rows)
                recipe = fit(recipe, max(take_first(int(left / limit.expect(0))), 1))
        news = {"report": self.report, "progress": self.progress}
        return run(recipe, output=self.output, prepared=whole, limit=limit, **news)


def describe_values(params: Mapping[str, Any]) -> str:
    """Return values in words, such as learning_rate 2e-05, batch_size 32."""
    shown = {axis: f"{value:.3g}" if isinstance(value, float) else show_value(value) for axis, value in params.items()}
    return ", ".join(f"{axis.rpartition('.')[2]} {value}" for axis, value in shown.items())
