"""Search for the best model: tries on a part of the training data, then one training on all of it.

A try is scored on training rows that are held back (`[data] held_back`), so that the score on dev stays honest. Tries
that score badly after a ninth or a third of their updates end there (asynchronous successive halving, Li et al. 2020).
Optuna proposes the values (TPE, Bergstra et al. 2011) and keeps its state in the output directory.

With a clock, the measured cost of an update decides how long a try is and how many there are. The last training, at
least half of the time if the task's own recipe would need it, follows the clock (`bertkit.training.pace`).
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import optuna
from accelerate.utils import broadcast_object_list
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from bertkit.errors import UsageError
from bertkit.studies.cells import list_cells
from bertkit.studies.results import summarize
from bertkit.studies.spec import STUDY_FILE, TABLE, define, make_study, set_axis
from bertkit.studies.tables import show_value, write_table
from bertkit.studies.workers import State
from bertkit.system.clock import Clock
from bertkit.system.differences import find_differences, name_differences
from bertkit.system.files import atomic_write, write_json
from bertkit.system.progress import Report, describe_duration, ignore
from bertkit.tasks.task import OWN_DATA, Task
from bertkit.training.arguments import complete
from bertkit.training.budget import CLOCK_FILE, fit, measure_rows
from bertkit.training.callbacks import Progress, ScoreAt
from bertkit.training.cost import PROBE_SECONDS, measure_costs
from bertkit.training.pace import TimeLimit
from bertkit.training.prepare import Prepared, prepare
from bertkit.training.processes import join_processes
from bertkit.training.recipe import Recipe, list_decisive, merge, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import (
    METRICS_FILE,
    RECIPE_FILE,
    SEARCH,
    STUDY_RESULT,
    has_begun,
    hold_run_dir,
    read_record,
)

JOURNAL = "optuna.log"
SIZES_FILE = "sizes.json"
TRY = "try"  # the directory of the try in progress
HELD_BACK_ROWS = 1000  # rows
LEARNING_RATES = (1e-5, 1e-4)  # around those of section A.3
BATCHES = (16, 32)  # section A.3
EPOCHS = (2.0, 3.0, 4.0)  # section A.3
REDUCTION = 3  # one of three tries goes on
SCORED_AT = (1 / 9, 1 / 3)  # of a try's updates, after which it is scored
LEAST_SCORED = 50  # before a try is scored
COMPLETE_TRIES = 3  # for which there must be time
FINAL_SHARE = 0.5  # of the time, at most, is kept for the last training
FIRST_OVERHEAD = 3.0  # seconds of a try beside its updates, until it has been measured
UNDEFINED = "the score is NaN or infinite"
PROBE_SHARE = 0.02  # of the time, at most, is used for measuring


class TryOver(Exception):
    """A try has ended.

    Attributes:
        state: COMPLETE, or PRUNED before its last update.
        updates: Updates done.
        value: The last score, if there is one.
        reason: Why there is no score.
    """

    def __init__(self, state: TrialState, updates: int, value: float | None, reason: str) -> None:
        super().__init__(state)
        self.state = state
        self.updates = updates
        self.value = value
        self.reason = reason


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of a search.

    Attributes:
        rows, held: Sequences that a try is trained on, and that it is scored on.
        sequences: Sequences of a try's training; 0: its epochs decide.
        points: Shares of a try's updates after which it is scored.
        sequence_seconds, update_seconds, row_seconds: Seconds of training on a sequence, of the rest of an update, and
            of predicting a sequence; 0 without a clock.
        start_seconds: Seconds of reading the data.
        final_seconds: Seconds that are kept for the last training at most.
    """

    rows: int
    held: int
    sequences: int
    points: list[float]
    sequence_seconds: float = 0.0
    update_seconds: float = 0.0
    row_seconds: float = 0.0
    start_seconds: float = 0.0
    final_seconds: float = 0.0

    def count_updates(self, recipe: Mapping[str, Any]) -> int:
        """Return the updates of a try."""
        sequences = self.sequences or self.rows * recipe["train"]["num_train_epochs"]
        return max(ceil(sequences / recipe["batch_size"]), 1)

    def time_training(self, sequences: float, batch_size: int) -> float:
        """Return the seconds of training on some sequences."""
        return sequences * (self.sequence_seconds + self.update_seconds / batch_size)


def search(
    task: Task,
    *recipes: Mapping[str, Any],
    output: Path,
    tries: int = 0,
    clock: Clock | None = None,
    report: Report = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Search for the best values, train with them in `output`, and return the scores of this run.

    Values that the recipes set are not searched. A search that was stopped continues.

    Args:
        tries: The number of tries; 0: as many as the clock allows.
        clock: The time for everything; None: no limit.

    Raises:
        UsageError: As for `run`, or the time is too short.
        Interrupted: As for `run`.
    """
    found = Search(task, merge(*recipes), output, tries, clock, report, progress)
    is_main = join_processes(found.recipe).is_main_process
    folder = output / SEARCH
    if (output / METRICS_FILE).exists() or "pace" in found.begun:  # trained, if not yet scored
        found.check_same()
        return run(task, found.begun, output=output, report=report, progress=progress)
    kept = clock.keep(folder / CLOCK_FILE) if clock and is_main else nullcontext()
    with hold_run_dir(folder) if is_main else nullcontext(), kept:
        found.check_same()
        if not found.begun:
            found.do_tries()
        return found.train_best()


class Search:
    """A search in a directory; see `search`."""

    def __init__(
        self,
        task: Task,
        given: Recipe,
        output: Path,
        tries: int,
        clock: Clock | None,
        report: Report = ignore,
        progress: Progress = ignore,
    ) -> None:
        self.task = task
        self.given = given
        self.recipe = complete(task, given)
        if self.recipe["data"].get("features"):
            raise UsageError("--search and --budget are not for the feature-based approach; leave out features")
        if self.recipe["data"]["held_back"]:
            raise UsageError("--search and --budget hold rows back themselves; leave out held_back")
        self.output = output
        self.folder = output / SEARCH
        self.tries = tries
        self.clock = clock
        self.report = report
        self.progress = progress
        self.processes = join_processes(self.recipe)
        self.is_main = self.processes.is_main_process
        self.begun = read_recipe(output / RECIPE_FILE) if has_begun(output) else {}  # the last training
        self.prepared: Prepared | None = None
        self.overhead = FIRST_OVERHEAD  # seconds of a try, beside updates

    # --- The directory --------------------------------------------------------------------------------------------

    def check_same(self) -> None:
        """Check that the directory is empty or has this search, and write what it is a search of.

        Raises:
            UsageError: It has another search or another run.
        """
        path = self.folder / RECIPE_FILE
        new = list_decisive(self.recipe) | {"searched": sorted(self.list_axes())}
        if path.exists():
            if differences := find_differences(read_recipe(path), new):
                raise UsageError(
                    f"{self.folder} belongs to another search ({name_differences(differences)}); name another "
                    "directory with --output"
                )
            return
        if self.begun or (self.output / RECIPE_FILE).exists():
            raise UsageError(f"{self.output} has a run without a search; name another directory with --output")
        if self.is_main:
            save_recipe(new, path)

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes of the search: those of its first start, or new ones."""
        path = self.folder / SIZES_FILE
        found = share(read_record(path, Sizes) if self.is_main and path.exists() else None)
        if found is None:
            found = share(self.choose_sizes())
            if self.is_main:
                write_json(msgspec.to_builtins(found), path)
        return found

    @cached_property
    def study(self) -> optuna.Study:
        """Return Optuna's study; only in the first process."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = self.folder / JOURNAL
        cut_last_line(path)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        direction = "minimize" if self.task.lower_is_better else "maximize"
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
        return optuna.create_study(
            storage=storage, study_name=SEARCH, direction=direction, pruner=pruner, load_if_exists=True
        )

    # --- What is searched -----------------------------------------------------------------------------------------

    def list_axes(self, epochs: bool = True) -> dict[str, BaseDistribution]:
        """Return the values that are searched: those that the given recipe leaves open.

        Raises:
            UsageError: It leaves none open.
        """
        train = self.recipe["train"]
        rate = train["learning_rate"]
        axes: dict[str, BaseDistribution] = {
            "train.learning_rate": FloatDistribution(min(*LEARNING_RATES, rate), max(*LEARNING_RATES, rate), log=True),
            "batch_size": CategoricalDistribution(sorted({*BATCHES, self.recipe["batch_size"]})),
            "preset": CategoricalDistribution(("paper", "stable")),
        }
        if epochs and train.get("max_steps", -1) <= 0:
            axes["train.num_train_epochs"] = CategoricalDistribution(sorted({*EPOCHS, train["num_train_epochs"]}))
        names = {axis: axis.rpartition(".") for axis in axes}
        fixed = [
            axis
            for axis, (table, _, key) in names.items()
            if key in (self.given.get(table, {}) if table else self.given)
        ]
        if len(fixed) == len(axes):
            raise UsageError(f"the recipe sets all that would be searched ({', '.join(axes)}); leave one open")
        return {axis: values for axis, values in axes.items() if axis not in fixed}

    @property
    def axes(self) -> dict[str, BaseDistribution]:
        """Return what is searched: no epochs if tries are too short for whole ones."""
        return self.list_axes(epochs=not self.sizes.sequences)

    def find_value(self, axis: str) -> Any:
        """Return the value of an axis in the task's own recipe."""
        table, _, key = axis.rpartition(".")
        return self.recipe[table][key] if table else self.recipe[key]

    def make_recipe(self, params: Mapping[str, Any]) -> Recipe:
        """Return the complete recipe with some values."""
        return complete(self.task, self.given, *(set_axis(axis, value) for axis, value in params.items()))

    def make_try(self, params: Mapping[str, Any]) -> Recipe:
        """Return the complete recipe of a try."""
        recipe = self.make_recipe(params)
        train = {
            "max_steps": self.sizes.count_updates(recipe),
            "eval_strategy": "no",
            "eval_on_start": False,
            "save_strategy": "no",
            "load_best_model_at_end": False,
        }
        return merge(recipe, {"patience": 0, "calibrate": False, "data": {"held_back": HELD_BACK_ROWS}, "train": train})

    # --- Time -----------------------------------------------------------------------------------------------------

    def choose_sizes(self) -> Sizes:
        """Return the sizes of a new search, with a clock from measured costs.

        Raises:
            UsageError: The time is too short.
        """
        recipe, began = merge(self.recipe, {"data": {"held_back": HELD_BACK_ROWS}}), time.monotonic()
        self.prepared = prepare(self.task, recipe, self.report)
        start = time.monotonic() - began
        split = next(iter(self.task.splits))
        sizes = Sizes(len(self.prepared.data["train"]), len(self.prepared.data[split]), 0, list(SCORED_AT))
        if self.clock:
            self.report("measuring some updates")
            seconds = min(PROBE_SECONDS, PROBE_SHARE * self.clock.limit)
            costs = measure_costs(self.task, recipe, self.prepared, seconds)
            part = costs.parts[0]
            sizes = msgspec.structs.replace(
                sizes,
                sequence_seconds=part.seconds / self.processes.num_processes,
                update_seconds=part.fixed,
                row_seconds=measure_rows(costs, split),
                start_seconds=start,
            )
            sizes = self.fit_sizes(sizes)
        batch = max(self.find_choices("batch_size", self.list_axes()))
        epochs = min(self.find_choices("train.num_train_epochs", self.list_axes()))
        fewest = (sizes.sequences or sizes.rows * epochs) / batch
        return msgspec.structs.replace(sizes, points=[x for x in SCORED_AT if x * fewest >= LEAST_SCORED])

    def fit_sizes(self, sizes: Sizes) -> Sizes:
        """Return the sizes that fit into the time.

        Raises:
            UsageError: The time is too short for any training.
        """
        left = self.clock.left - sizes.start_seconds - self.make_limit(sizes).reserve(sizes.held)
        batch = self.recipe["batch_size"]
        if left < LEAST_SCORED * sizes.time_training(batch, batch):
            least = self.clock.limit - left + LEAST_SCORED * sizes.time_training(batch, batch)
            raise UsageError(
                f"the time is too short: reading, evaluation and {LEAST_SCORED} updates take about "
                f"{ceil(least)} s here; give --budget {ceil(least / 30) + 1}m or more"
            )
        epochs = self.recipe["train"]["num_train_epochs"]
        final = min(FINAL_SHARE * left, sizes.time_training((sizes.rows + sizes.held) * epochs, batch))
        longest = (left - final) / COMPLETE_TRIES - sizes.held * sizes.row_seconds  # of a try
        choices = self.find_choices("train.num_train_epochs", self.list_axes())
        whole = sizes.time_training(sizes.rows * max(choices), min(self.find_choices("batch_size", self.list_axes())))
        sequences = 0 if whole <= longest else max(int(longest / sizes.time_training(1, batch)), 1)
        return msgspec.structs.replace(sizes, sequences=sequences, final_seconds=FINAL_SHARE * left)

    def find_choices(self, axis: str, axes: Mapping[str, BaseDistribution]) -> Sequence[Any]:
        """Return the choices of an axis, or the recipe's value if it is not searched."""
        return axes[axis].choices if axis in axes else [self.find_value(axis)]

    def make_limit(self, sizes: Sizes) -> TimeLimit:
        """Return the limit of the last training."""
        return TimeLimit(self.clock, {0: 1.0}, sizes.row_seconds)

    def time_end(self) -> float:
        """Return the seconds that the last training and the end of the run need."""
        sizes, recipe = self.sizes, self.make_recipe(self.find_best())
        epochs = recipe["train"]["num_train_epochs"]
        training = sizes.time_training((sizes.rows + sizes.held) * epochs, recipe["batch_size"])
        reserve = self.make_limit(sizes).reserve(sizes.held)
        return self.overhead + sizes.start_seconds + min(training, sizes.final_seconds) + reserve

    # --- The tries ------------------------------------------------------------------------------------------------

    def do_tries(self) -> None:
        """Try values until the number of tries is reached, or the time is over."""
        self.report(self.describe())
        if self.is_main:
            self.restart_try()
        while (params := share(self.ask() if self.is_main else None)) is not None:
            self.do_try(params)

    def describe(self) -> str:
        """Return in a line what is searched, and how."""
        sizes, names = self.sizes, ", ".join(axis.rpartition(".")[2] for axis in self.axes)
        length = f"{sizes.sequences:,} sequences" if sizes.sequences else "all its epochs"
        points = ", ".join(f"{point:.0%}" for point in sizes.points)
        early = f"; bad ones end after {points}" if points else ""
        many = f"{self.tries} tries" if self.tries else "tries"
        return f"searching {names}: {many} of {length}, scored on {sizes.held:,} held-back sequences of train{early}"

    def describe_plan(self) -> list[str]:
        """Return in lines what a new search would do.

        Raises:
            UsageError: The time is too short.
        """
        sizes = self.sizes = self.choose_sizes()
        if not self.clock:
            return [self.describe()]
        left, end = self.clock.left, self.time_end()
        batch, reserve = self.recipe["batch_size"], self.make_limit(sizes).reserve(sizes.held)
        one = sizes.time_training(sizes.count_updates(self.recipe) * batch, batch) + sizes.held * sizes.row_seconds
        parts = np.diff([0.0, *sizes.points, 1.0])
        share_done = float(parts @ float(REDUCTION) ** -np.arange(len(parts)))  # of a try, on average
        count = 1 + max(int((left - end - one) / (one * share_done)), 0) if left - end > one else 0
        training = left - reserve - count * one * share_done - sizes.start_seconds
        updates = int(training / sizes.time_training(batch, batch))
        return [
            self.describe(),
            f"{describe_duration(self.clock.limit)} allow about {count} such tries, then a training of about "
            f"{updates:,} updates in {describe_duration(training)}; {describe_duration(reserve)} are for evaluation "
            "and saving",
        ]

    def restart_try(self) -> None:
        """Put the try of a killed process first in the queue, or the task's own values in a new search."""
        lost = self.study.get_trials(states=(TrialState.RUNNING,))
        for trial in lost:
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)
        if not self.study.trials:
            self.study.enqueue_trial({axis: self.find_value(axis) for axis in self.axes})

    def list_done(self) -> list[FrozenTrial]:
        """Return the tries that are over; those of killed processes are not among them."""
        over = self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        return [trial for trial in over if "updates" in trial.user_attrs]

    def ask(self) -> dict[str, Any] | None:
        """Return the values of the next try; None if there is none."""
        done = self.list_done()
        if self.tries and len(done) >= self.tries:
            return None
        if self.clock:
            sizes = self.sizes
            updates = sizes.count_updates(self.recipe) * (sizes.points[0] if sizes.points else 1.0)
            first = sizes.time_training(updates * self.recipe["batch_size"], self.recipe["batch_size"])
            if self.clock.left - self.time_end() < self.overhead + first + sizes.held * sizes.row_seconds:
                return None
        # With a seed for each try, a search that was killed proposes the same values.
        seed = self.recipe["train"]["seed"] + len(done)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed)
        self.trial: Trial = self.study.ask(self.axes)
        return self.trial.params

    def do_try(self, params: Mapping[str, Any]) -> None:
        """Train with some values, and record the outcome."""
        if self.prepared is None:
            self.prepared = prepare(self.task, merge(self.recipe, {"data": {"held_back": HELD_BACK_ROWS}}), self.report)
        recipe = self.make_try(params)
        updates = recipe["train"]["max_steps"]
        points = {max(round(updates * point), 1): REDUCTION**number for number, point in enumerate(self.sizes.points)}
        end = self.time_end() if self.clock and self.is_main else 0.0
        value: float | None = None
        began, sizes = time.monotonic(), self.sizes

        def look(update: int) -> None:
            if self.clock and share(self.is_main and self.clock.left < end):
                raise TryOver(TrialState.PRUNED, update, value, "the time was over")

        def hear(update: int, score: float) -> None:
            nonlocal value
            value = score if isfinite(score) else None
            if update >= updates:
                raise TryOver(TrialState.FAIL if value is None else TrialState.COMPLETE, update, value, UNDEFINED)
            if share(self.is_main and self.is_bad(points[update], score)):
                raise TryOver(TrialState.PRUNED, update, value, UNDEFINED)

        watch = ScoreAt((*points, updates), self.task.metric, hear, look)
        folder = self.folder / TRY
        if (folder / RECIPE_FILE).exists() and list_decisive(read_recipe(folder / RECIPE_FILE)) != list_decisive(
            recipe
        ):
            self.remove_try()
        try:
            run(self.task, recipe, output=folder, prepared=self.prepared, callbacks=[watch])
        except TryOver as over:
            self.record(over.state, over.updates, over.value, over.reason)
            spent = sizes.time_training(over.updates * recipe["batch_size"], recipe["batch_size"])
            self.overhead = max(time.monotonic() - began - spent, 0.0)
        except UsageError as error:  # NaN, or too little memory for these values
            if not self.list_done() if self.is_main else False:
                raise
            self.record(TrialState.FAIL, 0, None, str(error))
        self.remove_try()

    def is_bad(self, step: int, score: float) -> bool:
        """Return whether a try is to end after a score."""
        self.trial.report(score, step)
        return self.trial.should_prune()

    def remove_try(self) -> None:
        """Remove the directory of a try."""
        if self.is_main:
            shutil.rmtree(self.folder / TRY, ignore_errors=True)
        self.processes.wait_for_everyone()

    def record(self, state: TrialState, updates: int, value: float | None, reason: str) -> None:
        """Record the outcome of a try, and write the table of all tries."""
        if not self.is_main:
            return
        self.trial.set_user_attr("updates", updates)
        self.trial.set_user_attr("value", value)
        self.trial.set_user_attr("reason", reason)
        self.study.tell(self.trial, value if state == TrialState.COMPLETE else None, state)
        self.write()
        done = self.list_done()
        score = reason if value is None else self.task.find_row(self.task.metric).describe(value)
        early = "" if state == TrialState.COMPLETE else f", ended after {updates:,} updates"
        self.report(f"try {len(done)}: {describe_values(self.trial.params)}: {score}{early}")

    def write(self) -> None:
        """Write the tries as a study."""
        done = self.list_done()
        rows, states = [], {}
        for number, trial in enumerate(done, start=1):
            words = trial.user_attrs
            early = "" if trial.state == TrialState.COMPLETE else f", ended after {words['updates']} updates"
            name = f"{number}: {describe_values(trial.params)}{early}"
            rows.append({"name": name, "recipe": merge(*(set_axis(*item) for item in trial.params.items()))})
        given = {
            key: value
            for key, value in merge(self.given, {"data": {"held_back": HELD_BACK_ROWS}}).items()
            if key != "task"
        }
        column = {"name": f"{self.task.name}, held-back rows", "task": self.task.name}
        definition = {"column": [column], "note": self.explain(), "recipe": given, "row": rows}
        study = make_study(definition, where=str(self.folder))
        cells = list_cells(study, self.folder)
        for cell, trial in zip(cells, done, strict=True):
            words = trial.user_attrs
            metrics = {
                "score": words["value"],
                self.task.metric: words["value"],
                "updates": words["updates"],
                OWN_DATA: True,
            }
            state = (
                State("failed", reason=words["reason"])
                if words["value"] is None
                else State("finished", metrics=metrics)
            )
            states |= dict.fromkeys(cell.runs.values(), state)
        results = summarize(study, [], cells, states)
        save_recipe(define(study), self.folder / STUDY_FILE)
        write_json(results, self.folder / STUDY_RESULT)
        atomic_write(write_table(results), self.folder / TABLE)

    def explain(self) -> str:
        """Return the note of the table."""
        return (
            f"Tries of a search, scored on {self.sizes.held:,} rows of train that are held back, not on dev. The best "
            "of those that were trained to their end is trained again on all of train."
        )

    # --- The last training ----------------------------------------------------------------------------------------

    def find_best(self) -> dict[str, Any]:
        """Return the values of the best complete try; empty without one, and in all processes but the first."""
        if not self.is_main or not (self.folder / JOURNAL).exists():
            return {}
        done = [trial for trial in self.list_done() if trial.state == TrialState.COMPLETE]
        sign = 1 if self.task.lower_is_better else -1
        return min(done, key=lambda trial: sign * trial.value).params if done else {}

    def train_best(self) -> dict[str, Any]:
        """Train with the best values on all of train, and return the scores of this run."""
        if not (recipe := self.begun):
            best = share(self.find_best())
            recipe = self.make_recipe(best)
            count = share(len(self.list_done()) if self.is_main else 0)
            self.report(
                f"the best of {count} tries: {describe_values(best)}; training on all of train"
                if best
                else "no try was trained to its end; training with the task's own values"
            )
        self.prepared = None
        limit = None
        if self.clock:
            sizes, batch = self.sizes, recipe["batch_size"]
            seconds = sizes.time_training(batch, batch)
            limit = TimeLimit(self.clock, {0: seconds}, sizes.row_seconds)
            if not self.begun:
                left = self.clock.left - self.overhead - sizes.start_seconds - limit.reserve(sizes.held)
                recipe = fit(self.task, recipe, max(share(int(left / seconds)), 1))
        return run(self.task, recipe, output=self.output, report=self.report, progress=self.progress, limit=limit)


def share(value: Any) -> Any:
    """Return the first process's value in all processes, which must call this together."""
    return broadcast_object_list([value])[0]


def describe_values(params: Mapping[str, Any]) -> str:
    """Return values in words, such as learning_rate 2e-05, batch_size 32."""
    return ", ".join(f"{axis.rpartition('.')[2]} {show_number(value)}" for axis, value in params.items())


def show_number(value: Any) -> str:
    """Return a value with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else show_value(value)


def cut_last_line(path: Path) -> None:
    """Remove the end of a journal that a killed process has not written completely, and its lock."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        if kept := content[: content.rfind(b"\n") + 1]:
            if kept != content:
                path.write_bytes(kept)
        else:
            path.unlink()
