"""Start runs as processes, a list of runs in each, and follow them by the files that they write.

A list is a file that names the saved recipes and the directories of some runs; `bertkit run-list FILE` does them in
turn. Runs of one list share the imports and, if they read the same examples, the encoded data; every run sets its own
seed, so a result does not depend on the list. A process that dies costs its current run alone: the list starts again,
finished runs are not repeated, and the current one continues from its checkpoint.

A process ends when its standard input closes, that is, when the process that started it has died. On a Ray cluster each
list is a task, and all machines share a disk.

A list has the name of its first run: `STUDY/recipes/RUN.json`, and `RUN.log` is its output. The recipe of a run
is `RUN.toml` there, and why it has failed `RUN.failed`: never in the directory of the run, which has its own recipe.
"""

import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import msgspec

from bertkit.errors import UsageError, explain_failure
from bertkit.system.cluster import POLL, Command, Remote, count_processes, list_gpus, start_command
from bertkit.system.files import atomic_write, write_json
from bertkit.system.progress import Report
from bertkit.system.signals import Interrupted, await_note, note_signals
from bertkit.tasks import TASKS
from bertkit.training.callbacks import Diverged, Progress
from bertkit.training.prepare import Prepared, name_examples, prepare
from bertkit.training.processes import ProcessLost
from bertkit.training.recipe import Recipe, load_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import LOG, METRICS_FILE, RECIPE_FILE, read_log, read_metrics, read_record

RECIPES = "recipes"  # the folder of a study with the recipes, lists and output of its runs
TRIES = 4  # for a run whose processes die without progress: it is started again at most three times
LINES_READ = 100  # at the end of a process's output; torchrun adds some to the error
GRACE = 60.0  # seconds for a process to finish an update and write a checkpoint


@dataclass(frozen=True)
class RunJob:
    """One run to do.

    Attributes:
        recipe: The recipe.
        output: The run directory.
        milestones: Updates whose checkpoints must exist at the end.
    """

    recipe: Recipe
    output: str
    milestones: tuple[int, ...] = ()


@dataclass(frozen=True)
class State:
    """The state of a run.

    Attributes:
        done: Updates done.
        total: Updates in all.
        loss: The latest training loss.
        metrics: Metrics of a finished run.
        reason: Why the run failed.
    """

    status: Literal["waiting", "running", "finished", "failed"] = "waiting"
    done: int = 0
    total: int = 0
    loss: float | None = None
    metrics: Mapping[str, Any] | None = None
    reason: str = ""


class ListedRun(msgspec.Struct, frozen=True):
    """A run in the file of a list: its saved recipe, its directory, and the updates whose checkpoints are kept."""

    recipe: str
    output: str
    milestones: tuple[int, ...] = ()


# --- A list of runs, in its own process -------------------------------------------------------------------------------


def run_list(path: Path, report: Report, progress: Progress) -> None:
    """Do the runs of a list in turn; why a run has failed is written beside its recipe.

    Raises:
        Interrupted: SIGTERM or SIGINT stopped a run after a checkpoint was written.
    """
    name, prepared = "", None
    for listed in read_record(path, list[ListedRun]):
        if (failure := locate_failure(Path(listed.recipe))).exists():  # before the process was started again
            continue
        report(f"{listed.output}:")
        try:
            recipe = load_recipe(listed.recipe)
            if not (Path(listed.output) / METRICS_FILE).exists() and name != name_examples(recipe):
                prepared = prepare(recipe, report) if TASKS[recipe.task].reusable else None
                name = name_examples(recipe)
            do_run(recipe, listed, prepared, report, progress)
        except (Interrupted, ProcessLost):
            raise
        except Exception as error:
            reason = explain_failure(error)
            report(f"failed: {reason}")
            if not failure.exists():  # the first of several processes knows the cause
                atomic_write(reason, failure)
            if count_processes() > 1 and not isinstance(error, Diverged):
                raise  # the other processes of this run do not see the error, so continuing would wait for them forever


def do_run(recipe: Recipe, listed: ListedRun, prepared: Prepared | None, report: Report, progress: Progress) -> None:
    """Do one run, and release its memory."""
    import gc

    import torch

    news = {"report": report, "progress": progress}
    try:
        run(recipe, output=listed.output, prepared=prepared, milestones=listed.milestones, **news)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def follow_starter() -> None:
    """Kill this process as soon as its standard input closes, so that it cannot write beside a restarted command."""

    def wait_and_end() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=wait_and_end, daemon=True).start()


# --- Starting lists ---------------------------------------------------------------------------------------------------


def write_list(folder: Path, name: str, jobs: Sequence[RunJob]) -> Path:
    """Write the recipes of some runs and the file of their list, and return its path.

    Args:
        folder: The directory that the paths of the runs are below.
    """
    listed = []
    for job in jobs:
        recipe = locate_recipe(folder, job)
        recipe.parent.mkdir(parents=True, exist_ok=True)
        save_recipe(job.recipe.to_dict(), recipe)
        locate_failure(recipe).unlink(missing_ok=True)
        listed.append(ListedRun(str(recipe), job.output, job.milestones))
    path = folder / RECIPES / f"{name}.json"
    write_json(msgspec.to_builtins(listed), path)
    return path


def locate_recipe(folder: Path, job: RunJob) -> Path:
    """Return the path of a run's recipe, which is not in the directory of the run."""
    place = Path(job.output).relative_to(folder)
    return folder / RECIPES / place.with_name(f"{place.name}.toml")


def locate_failure(recipe: Path) -> Path:
    """Return the path of the file that says why a run has failed."""
    return recipe.with_suffix(".failed")


def launch(path: Path, threads: int, gpus: Sequence[str] | None = None) -> Command:
    """Start a process that does a list as `start_command` does, and that writes its output beside the list."""
    return start_command(["run-list", str(path)], path.with_suffix(".log"), threads, gpus)


def launch_on_ray(ray: Any, path: Path, num_cpus: float, num_gpus: float) -> Remote:
    """Start a Ray task that does a list as `launch` does, where the cluster has room for it."""
    return Remote(ray, ["run-list", str(path)], path.with_suffix(".log"), num_cpus, num_gpus)


def share_gpus(slots: int, num_gpus: float | None) -> list[list[str]]:
    """Return the names of the GPUs of each slot, in turn.

    Args:
        num_gpus: The GPUs of a slot; a fraction shares one. None: one where there are GPUs.

    Raises:
        UsageError: This machine has fewer.
    """
    gpus = list_gpus()
    number = min(len(gpus), 1) if num_gpus is None else num_gpus
    if number > len(gpus):
        raise UsageError(f"num_gpus is {number:g}, but this machine has {len(gpus)}; lower it, or use --workers ray")
    each = range(math.ceil(number))
    return [[gpus[(int(slot * number) + place) % len(gpus)] for place in each] for slot in range(slots)]


def end_all(processes: Sequence[Command | Remote]) -> None:
    """End processes that are left; those that train write a checkpoint first, within GRACE seconds."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + GRACE
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(POLL)
    for process in processes:
        if process.poll() is None and isinstance(process, Command):
            process.kill()
            process.communicate()


# --- Following them ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Lists:
    """The lists of a study, waiting and at work.

    Args:
        folder: The study's directory.
        lists: Name -> the runs of a list.
        hear: Receives the output directory of a run, and its new state or a line.
        start: Starts the process of a list, in the slot of the given number.
        slots: The number of processes at once.
    """

    folder: Path
    lists: Mapping[str, Sequence[RunJob]]
    hear: Callable[[str, State | str], None]
    start: Callable[[Path, int], Command | Remote]
    slots: int

    def execute(self) -> int:
        """Do all lists, and return the signal that stopped them, or 0 when all runs are finished or failed."""
        self.noted: list[int] = []
        self.lost, self.done = Counter[str](), Counter[str]()  # by run: processes without progress, and updates
        self.known: dict[str, State] = {}
        self.waiting, self.running = deque(self.lists), {}
        free, told = deque(range(self.slots)), False
        try:
            with note_signals(self.noted.append):
                while self.running or (self.waiting and not self.noted):
                    while self.waiting and free and not self.noted:
                        name, slot = self.waiting.popleft(), free.popleft()
                        path = write_list(self.folder, name, self.list_left(name))
                        self.running[self.start(path, slot)] = name, slot
                    if self.noted and not told:
                        told = True
                        for process in self.running:
                            process.terminate()
                    time.sleep(POLL)
                    for process, (name, slot) in list(self.running.items()):
                        code, current = process.poll(), next(iter(self.list_left(name)), None)
                        self.look(name)
                        if code is not None:
                            del self.running[process]
                            free.append(slot)
                            self.take_end(name, code, current)
        finally:
            end_all(list(self.running))
        return self.noted[0] if self.noted else 0

    def list_left(self, name: str) -> list[RunJob]:
        """Return the runs of a list that are neither finished nor failed."""
        over = ("finished", "failed")
        return [job for job in self.lists[name] if self.known.get(job.output, State()).status not in over]

    def look(self, name: str) -> None:
        """Pass on the new states of the runs of a list."""
        for job in self.list_left(name):
            state = read_state(self.folder, job)
            if state != self.known.get(job.output, State()):
                self.change(job, state)
            if state.status in ("waiting", "running"):
                return  # the later ones wait

    def change(self, job: RunJob, state: State) -> None:
        """Pass on the state of a run."""
        if state.done > self.done[job.output]:
            self.done[job.output], self.lost[job.output] = state.done, 0
        self.known[job.output] = state
        self.hear(job.output, state)

    def take_end(self, name: str, code: int, current: RunJob | None) -> None:
        """Start a list again whose process was lost; a run that has lost too many has failed.

        Args:
            current: The first of the runs that were left before the end was seen.
        """
        if current in self.list_left(name):  # it has neither finished nor failed
            if self.noted or await_note(self.noted):  # a signal to the group may reach the process first
                return
            self.lost[current.output] += 1
            reason = f"its process has ended ({describe_death(code)})"
            if self.lost[current.output] < TRIES:
                self.change(current, State())
                self.hear(current.output, f"{reason}; starting it again")
            else:
                last = f"{reason} {TRIES} times; memory may be too small"
                log = self.folder / RECIPES / f"{name}.log"
                self.change(current, State("failed", reason=last if is_death(code) else read_end(log)))
        if self.list_left(name) and not self.noted:
            self.waiting.appendleft(name)


def is_death(code: int) -> bool:
    """Return whether an exit code tells of a signal."""
    return code < 0 or code > 128


def describe_death(code: int) -> str:
    """Return the name of the signal in an exit code, or the code."""
    with suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128).name
    return f"exit code {code}"


def read_state(folder: Path, job: RunJob) -> State:
    """Return the state of a run as the files of its directory and its recipe tell it."""
    output, failure = Path(job.output), locate_failure(locate_recipe(folder, job))
    if (output / METRICS_FILE).exists():
        return State("finished", metrics=read_metrics(output / METRICS_FILE))
    if failure.exists():
        return State("failed", reason=failure.read_text(encoding="utf-8"))
    if not (output / RECIPE_FILE).exists():  # its data are read, or it waits for others
        return State()
    log = output / LOG
    if not log.exists() or not (last := find_loss(output, log.stat().st_mtime_ns)):
        return State("running")
    train = job.recipe.train
    total = train["max_steps"] if train.get("max_steps", -1) > 0 else 0
    if not total and last["epoch"]:
        total = math.ceil(last["step"] / last["epoch"] * train["num_train_epochs"])
    return State("running", int(last["step"]), total, last["loss"])


@lru_cache
def find_loss(output: Path, changed: int) -> Mapping[str, float]:
    """Return the last entry of a run's log with a loss, which is read again when it has changed; empty without one."""
    return next((entry for entry in reversed(read_log(output)) if "loss" in entry), {})


def read_end(log: Path) -> str:
    """Return the last error in a process's output, or else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    lines = [line for line in lines[-LINES_READ:] if line.strip()]
    errors = [line.removeprefix("bertkit: ") for line in lines if line.startswith("bertkit: ")]
    return (errors or lines or ["it wrote nothing"])[-1]
