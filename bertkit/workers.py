"""Who does the runs of a study: this process, several on this machine, or a Ray cluster.

Every run seeds itself and starts from the same prepared data, so its result does not depend on who does it, nor on what
was done before. What may change the last bits is what does so anywhere: the number of threads (each of N processes gets
its share of this one's), the kind of processor or GPU.

A worker that dies costs only its current run, which continues from its checkpoint elsewhere. Left out: services, job
queues and schedulers; Ray has them.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import UsageError, join_lines
from bertkit.recipe import Recipe

TRIES = 3  # of a run whose workers die
GRACE = 60.0  # seconds for a worker to finish an update and write a checkpoint
LONGEST = 300  # characters of a reason


@dataclass(frozen=True)
class Job:
    """One run to do.

    task: a name in TASKS.
    recipe: complete.
    output: the run directory.
    data: the name of its prepared data; empty if the run is to prepare its own.
    """

    task: str
    recipe: Recipe
    output: str
    data: str = ""


@dataclass(frozen=True)
class State:
    """How far a run is: updates `done` of `total` and the latest `loss`; at the end its metrics, or why it failed."""

    status: Literal["waiting", "running", "finished", "failed"] = "waiting"
    done: int = 0
    total: int = 0
    loss: float | None = None
    metrics: Mapping[str, Any] | None = None
    reason: str = ""


# Takes the number of a job and its new state, or a line about it.
Handle = Callable[[int, State | str], None]


def execute(jobs: Sequence[Job], prepared: Mapping[str, Any], handle: Handle, workers: int, resources: Recipe) -> int:
    """The signal by which it was stopped, or 0 when every job is finished or failed.

    Args:
        prepared: name -> `bertkit.run.Prepared`.
        workers: how many processes; 1 is this one, 0 stands for Ray.
        resources: `num_cpus` and `num_gpus` of a job on Ray.
    """
    if not jobs:
        return 0
    if workers == 0:
        return run_on_ray(jobs, prepared, handle, **resources)
    if workers == 1:
        return run_here(jobs, prepared, handle)
    return run_in_processes(jobs, prepared, handle, min(workers, len(jobs)))


def read_workers(text: str | int) -> int:
    """The number of processes that `--workers` asks for; 0 stands for Ray.

    Raises:
        UsageError: neither a number nor "ray", several processes inside of several, or Ray is not installed.
    """
    from accelerate import PartialState

    if str(text) == "ray":
        import_ray()
        workers = 0
    elif str(text).isdecimal() and int(text) > 0:
        workers = int(text)
    else:
        raise UsageError(f"{text!r} workers; give a whole number above 0, or ray: --workers 2")
    if workers != 1 and (processes := PartialState().num_processes) > 1:
        raise UsageError(
            f"--workers {text} inside of {processes} processes that share each run; leave --workers out, or start the "
            "study without torchrun and accelerate launch"
        )
    return workers


# --- One run ----------------------------------------------------------------------------------------------------------


def do(job: Job, prepared: Any, tell: Callable[[State | str], None]) -> State:
    """How a job has ended; while it runs, `tell` gets its states and lines.

    Raises:
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
    """
    from accelerate import PartialState

    from bertkit.run import run
    from bertkit.tasks import TASKS
    from bertkit.trainer import Interrupted

    loss = None

    def advance(done: int, total: int, log: Mapping[str, float]) -> None:
        nonlocal loss
        loss = log.get("loss", loss)
        tell(State("running", done, total, loss))

    tell(State("running"))
    try:
        metrics = run(
            TASKS[job.task], job.recipe, output=job.output, report=tell, progress=advance, prepared=prepared
        )
        return State("finished", metrics=metrics)
    except Interrupted:
        raise
    except Exception as error:
        if PartialState().num_processes > 1 and not isinstance(error, UsageError):
            raise  # the other processes of this run do not know of it: to go on would be to wait for them for ever
        return State("failed", reason=explain_failure(error))
    finally:
        free_memory()


def explain_failure(error: Exception) -> str:
    """Why a run failed, as one line."""
    if isinstance(error, UsageError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)[:LONGEST]}{place}"


def free_memory() -> None:
    """Gives back what the last model has held."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- This process -----------------------------------------------------------------------------------------------------


def run_here(jobs: Sequence[Job], prepared: Mapping[str, Any], handle: Handle) -> int:
    """Does the jobs one after the other. The answer as of `execute`."""
    from bertkit.trainer import Interrupted

    for number, job in enumerate(jobs):
        try:
            handle(number, do(job, prepared.get(job.data), partial(handle, number)))
        except Interrupted as stop:
            return stop.number
    return 0


@contextlib.contextmanager
def note_signals() -> Iterator[list[int]]:
    """Fills a list with the first SIGTERM or Ctrl-C instead of dying of it; a second one is not held back."""
    noted: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(number, previous[number])

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread: there signals cannot be caught
                previous[number] = signal.signal(number, note)
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# --- Several processes ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that does jobs, seen from here.

    slot: its place among the workers.
    job: the number of its current one; None when it has nothing to do, or has not yet started.
    data: the name of the prepared data that it holds.
    """

    process: Any
    pipe: multiprocessing.connection.Connection
    slot: int
    job: int | None = None
    data: str = ""


def run_in_processes(jobs: Sequence[Job], prepared: Mapping[str, Any], handle: Handle, count: int) -> int:
    """Does the jobs in `count` spawned processes. The answer as of `execute`.

    They end by themselves when this process dies. Each gets its share of the threads, and one GPU if there are any.
    """
    import torch

    threads = max(1, torch.get_num_threads() // count)
    gpus = list_gpus()
    waiting, tries = deque(range(len(jobs))), Counter[int]()
    idle: list[Worker] = []

    def hire(slot: int) -> Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        gpu = gpus[slot % len(gpus)] if gpus else None
        process = context.Process(target=serve, args=(there, threads, gpu), name=f"bertkit worker {slot}")
        process.start()
        there.close()  # so that its end is noticed here
        return Worker(process, here, slot)

    @cache
    def pack(name: str) -> bytes:
        return pickle.dumps(prepared[name])

    def assign(worker: Worker) -> None:
        worker.job = waiting.popleft()
        job = jobs[worker.job]
        tries[worker.job] += 1
        with contextlib.suppress(OSError):  # it has just died, which the next look at its pipe will show
            worker.pipe.send(job)
            if job.data and job.data != worker.data:
                worker.pipe.send_bytes(pack(job.data))
                worker.data = job.data

    def replace(worker: Worker) -> Worker:
        worker.process.join()
        if (number := worker.job) is not None and not noted:
            if tries[number] < TRIES:
                waiting.appendleft(number)
                handle(number, f"its process died (exit code {worker.process.exitcode}); another takes it up")
                handle(number, State("waiting"))
            else:
                handle(number, State("failed", reason=explain_deaths(worker.process.exitcode)))
        return hire(worker.slot)

    crew: list[Worker] = []
    try:
        with note_signals() as noted:
            crew += [hire(slot) for slot in range(count)]
            starting = set(range(count))
            asked = False
            while True:
                while idle and waiting and not noted:
                    assign(idle.pop(0))
                busy = {worker.pipe: worker for worker in crew if worker.job is not None or worker.slot in starting}
    finally:
        dismiss(crew)
    return noted[0] if noted else 0
