"""Start runs as processes, one for each, and follow them by the files that they write.

`STUDY/recipes/RUN.toml` is the recipe of a run, and `RUN.log` there is the output of its process: never in the
directory of the run, which has its own recipe. A process that dies is started again, and its run continues from the
last checkpoint.

A process ends when its standard input closes, that is, when the process that started it has died. On a Ray cluster each
run is a task, and all machines share a disk.
"""

import math
import os
import re
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from bertkit.errors import UsageError, explain_failure
from bertkit.system.cluster import POLL, Command, Remote, list_gpus
from bertkit.system.progress import Report
from bertkit.system.signals import Interrupted, await_note, note_signals
from bertkit.training.callbacks import Progress
from bertkit.training.processes import ProcessLost
from bertkit.training.recipe import Recipe, load_recipe, read_recipe, save_recipe
from bertkit.training.run import run
from bertkit.training.run_dir import BEST, FIRST, LOG, METRICS_FILE, RECIPE_FILE, START, read_log, read_metrics

RECIPES = "recipes"  # the folder of a study with the recipes of its runs and the output of their processes
TRIES = 4  # for a run whose processes die without progress: it is started again at most three times
LINES_READ = 100  # at the end of a process's output; torchrun adds some to the error
GRACE = 60.0  # seconds for a process to finish an update and write a checkpoint
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has only SIGTERM, which ends a process there at once


@dataclass(frozen=True)
class RunJob:
    """One run to do."""

    recipe: Recipe  # the recipe
    output: str  # the run directory
    milestones: tuple[int, ...] = ()  # updates whose checkpoints must exist at the end


@dataclass(frozen=True)
class State:
    """The state of a run."""

    status: Literal["waiting", "running", "finished", "failed"] = "waiting"
    done: int = 0  # updates done
    total: int = 0  # updates in all
    loss: float | None = None  # the latest training loss
    metrics: Mapping[str, Any] | None = None  # metrics of a finished run
    reason: str = ""  # why the run failed


# --- A run in its own process -----------------------------------------------------------------------------------------


def do_run(recipe: Path, output: Path, milestones: Collection[int], report: Report, progress: Progress) -> None:
    """Do a run of a study; every error except the loss of another process becomes one line.

    Raises:
        ProcessLost: Another process of the run was lost.
        Interrupted: SIGTERM or SIGINT stopped the run after a checkpoint was written.
    """
    try:
        run(load_recipe(recipe), output=output, milestones=milestones, report=report, progress=progress)
    except (Interrupted, ProcessLost):
        raise
    except Exception as error:
        failure = UsageError(explain_failure(error))
        failure.speaks = True  # the reason is shown, whichever process of the run has failed
        raise failure from error


def follow_starter() -> None:
    """Kill this process as soon as its standard input closes, so that it cannot write beside a restarted command."""

    def wait_and_end() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), KILL)

    Thread(target=wait_and_end, daemon=True).start()


# --- Starting runs ----------------------------------------------------------------------------------------------------


def locate(folder: Path, output: str, suffix: str) -> Path:
    """Return the path of a run's recipe (.toml) or of its process's output (.log), outside the run's directory.

    Args:
        folder: The directory that those of the runs are below.
    """
    run = Path(output).relative_to(folder)
    return folder / RECIPES / run.with_name(f"{run.name}{suffix}")


def write_command(folder: Path, job: RunJob) -> list[str]:
    """Write the recipe of a run, and return the words of the command that does it."""
    recipe = locate(folder, job.output, ".toml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    save_recipe(job.recipe.to_dict(), recipe)
    kept = [word for update in job.milestones for word in ("--keep-step", str(update))]
    return ["run", "--recipe", str(recipe), "--output", job.output, *kept]


def share_gpus(slots: int, num_gpus: float | None) -> list[list[str]]:
    """Return the names of the GPUs of each slot, in turn.

    Args:
        num_gpus: The GPUs of a slot; a fraction shares one. None: one where there are GPUs.
    """
    gpus = list_gpus()
    number = min(len(gpus), 1) if num_gpus is None else num_gpus
    if number > len(gpus):
        raise UsageError(f"num_gpus is {number:g}, but this machine has {len(gpus)}; lower it, or use --workers ray")
    each = range(math.ceil(number))
    return [[gpus[(int(slot * number) + index) % len(gpus)] for index in each] for slot in range(slots)]


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


def drop_checkpoints(run: Path) -> None:
    """Remove all models from a finished run's directory except the last."""
    for model in (*run.glob("checkpoint-*"), run / FIRST, run / START, run / BEST):
        shutil.rmtree(model, ignore_errors=True)


def drop_weights(run: Path) -> None:
    """Remove the last model's weights from a finished run's directory."""
    for weights in run.glob("model*.safetensors*"):
        weights.unlink(missing_ok=True)


# --- Following them ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Runs:
    """The runs of a study, waiting and at work.

    Args:
        folder: The study's directory.
        jobs: The runs.
        on_state: Receives the output directory of a run, and its new state or a line.
        start: Starts a process: the words of its command, the file of its output, and the number of its slot.
        slots: The number of processes at once.
        should_stop: Returns why the process of a run should end, empty if it should not.
        signals: Receives the signal that stops all.
    """

    folder: Path
    jobs: Sequence[RunJob]
    on_state: Callable[[str, State | str], None]
    start: Callable[[Sequence[str], Path, int], Command | Remote]
    slots: int
    should_stop: Callable[[RunJob], str] = lambda job: ""
    signals: list[int] = field(default_factory=list)
    known: dict[str, State] = field(default_factory=dict)  # the states of the runs by output directory
    # Why processes had to end, by output directory; they are not started again
    ended: dict[str, str] = field(default_factory=dict)

    def execute(self) -> int:
        """Do all runs, and return the signal that stopped them, or 0 when all are finished, failed or ended."""
        self.lost, self.done = Counter[str](), Counter[str]()  # run -> processes without progress, and run -> updates
        waiting, free = deque(self.jobs), deque(range(self.slots))
        running: dict[Command | Remote, tuple[RunJob, int]] = {}
        try:
            with note_signals(self.signals.append):
                while running or (waiting and not self.signals):
                    while waiting and free and not self.signals:
                        job, slot = waiting.popleft(), free.popleft()
                        words = write_command(self.folder, job)
                        running[self.start(words, locate(self.folder, job.output, ".log"), slot)] = job, slot
                    time.sleep(POLL)
                    for process, (job, slot) in list(running.items()):
                        code = process.poll()
                        self.look(job)
                        if code is not None:
                            del running[process]
                            free.append(slot)
                            if self.must_repeat(job, code):
                                waiting.appendleft(job)
                        elif job.output not in self.ended:
                            reason = "stopped" if self.signals else self.should_stop(job)
                            if reason:
                                self.ended[job.output] = reason
                                process.terminate()
        finally:
            end_all(list(running))
        return self.signals[0] if self.signals else 0

    def look(self, job: RunJob) -> None:
        """Pass on the state of a run if it is new."""
        state = read_state(job)
        if state != self.known.get(job.output, State()):
            self.change(job, state)

    def change(self, job: RunJob, state: State) -> None:
        """Pass on the state of a run."""
        if state.done > self.done[job.output]:
            self.done[job.output], self.lost[job.output] = state.done, 0
        self.known[job.output] = state
        self.on_state(job.output, state)

    def must_repeat(self, job: RunJob, code: int) -> bool:
        """Return whether a run whose process has ended starts again; if its process gave a reason, it has failed."""
        if self.known.get(job.output, State()).status == "finished" or job.output in self.ended:
            return False
        # A signal to the group may have come to the process first.
        if is_death(code) and (self.signals or await_note(self.signals)):
            return False
        message, last = read_end(locate(self.folder, job.output, ".log"))
        if message and not is_death(code):
            self.change(job, State("failed", reason=message))
            return False
        self.lost[job.output] += 1
        reason = f"its process has ended ({describe_death(code)})"
        if self.lost[job.output] < TRIES:
            self.change(job, State())
            self.on_state(job.output, f"{reason}; starting it again")
            return True
        often = f"{reason} {TRIES} times; memory may be too small"
        self.change(job, State("failed", reason=often if is_death(code) else last))
        return False


def is_death(code: int) -> bool:
    """Return whether an exit code tells of a signal."""
    return code < 0 or code > 128


def describe_death(code: int) -> str:
    """Return the name of the signal in an exit code, or the code."""
    with suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128).name
    return f"exit code {code}"


def read_state(job: RunJob) -> State:
    """Return the state of a run as the files of its directory tell it; they do not tell of a failure."""
    output = Path(job.output)
    if (output / METRICS_FILE).exists():
        return State("finished", metrics=read_metrics(output / METRICS_FILE))
    if not (output / RECIPE_FILE).exists():  # the data of such a run are read first
        return State()
    log = output / LOG
    if not log.exists() or not (last := read_loss(output, log.stat().st_mtime_ns)):
        return State("running")
    train = {**read_recipe(output / RECIPE_FILE).get("train", {}), **job.recipe.train}  # with what the rows decide
    total = train["max_steps"] if train.get("max_steps", -1) > 0 else 0
    if not total and last["epoch"]:
        total = math.ceil(last["step"] / last["epoch"] * train["num_train_epochs"])
    return State("running", int(last["step"]), total, last["loss"])


@lru_cache
def read_loss(output: Path, changed: int) -> Mapping[str, float]:
    """Return the last entry of a run's log with a loss, which is read again when it has changed; empty without one."""
    return next((entry for entry in reversed(read_log(output)) if "loss" in entry), {})


def read_end(log: Path) -> tuple[str, str]:
    """Return why a run has failed, from bertkit's last message in an output, or nothing, and the last line.

    A process that had to stop says so too, because another one of its run was lost.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    lines = [line for line in lines[-LINES_READ:] if line.strip()] or ["it wrote nothing"]
    messages = [line.removeprefix("bertkit: ") for line in lines if re.match(r"bertkit: (?!stopped)", line)]
    return messages[-1] if messages else "", lines[-1]
