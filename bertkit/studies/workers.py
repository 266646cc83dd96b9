"""The runs of a study as jobs: how a worker does one, and the messages and files that it returns.

Every run sets its own seed and starts from the same prepared data, so its result depends neither on the worker nor on
earlier runs. Only the usual causes can change the last bits: the number of threads (each of N processes gets an equal
share of this process's threads) and the type of processor or GPU. A run whose worker has died continues from its
checkpoint.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import UsageError, explain_os_error, join_lines
from bertkit.system.cluster import LONGEST_REASON
from bertkit.system.files import atomic_open
from bertkit.system.parallel import TRIES, Lost, Work, count_processes, execute, list_gpus
from bertkit.system.signals import Interrupted
from bertkit.training.recipe import Recipe


@dataclass(frozen=True)
class RunJob:
    """One run to do.

    Attributes:
        task: A name in TASKS.
        recipe: The complete recipe.
        output: The run directory.
        data: The name of its prepared data; empty if the run prepares its own.
        milestones: Updates whose checkpoints must exist at the end.
    """

    task: str
    recipe: Recipe
    output: str
    data: str = ""
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


# A message from a run's worker: its state, a line, or the files that it wrote on a disk that may not be ours.
News = State | str | Mapping[str, bytes]


def do_runs(
    jobs: Sequence[RunJob],
    prepared: Mapping[str, Any],
    handle: Callable[[int, State | str], None],
    workers: int,
    num_cpus: float = 1,
    num_gpus: float = 0,
) -> int:
    """Do the runs, and return the signal that stopped them, or 0 when all are finished or failed.

    If a worker does not share this process's disk, a run's files are sent back, except checkpoints and weights.

    Args:
        prepared: Mapping from name to `bertkit.training.prepare.Prepared`.
        workers: The number of processes; 1 means this process, 0 means Ray.
        num_cpus, num_gpus: Resources of each run on Ray.
    """

    def hear(number: int, news: News | Lost) -> None:
        if isinstance(news, Lost):
            if news.is_final:
                reason = f"{news.cause} {TRIES} times in a row; memory may be too small"
                handle(number, State("failed", reason=reason))
            else:
                handle(number, State())
                handle(number, f"{news.cause}; retrying with another worker")
        elif isinstance(news, Mapping):
            write_files(news, Path(jobs[number].output))
        else:
            handle(number, news)

    import torch

    if workers == 0:
        do, threads = do_elsewhere, max(1, int(num_cpus))
    else:
        do, threads = do_run, max(1, torch.get_num_threads() // min(workers, max(1, len(jobs))))
    gpus = list_gpus() if workers > 1 else []
    work = Work(do, partial(begin, threads), num_cpus=num_cpus, num_gpus=num_gpus)
    return execute(work, jobs, prepared, hear, workers, gpus)


# --- One run ----------------------------------------------------------------------------------------------------------


def do_run(job: RunJob, prepared: Any, tell: Callable[[News], None]) -> None:
    """Do a run, and report its states, its final state last, and its lines to `tell`.

    Raises:
        Interrupted: SIGTERM or SIGINT stopped the run after a checkpoint was written.
    """
    from bertkit.tasks import TASKS
    from bertkit.training.callbacks import Diverged
    from bertkit.training.run import run

    loss = None

    def advance(done: int, total: int, log: Mapping[str, float]) -> None:
        nonlocal loss
        loss = log.get("loss", loss)
        tell(State("running", done, total, loss))

    tell(State("running"))
    try:
        metrics = run(
            TASKS[job.task],
            job.recipe,
            output=job.output,
            report=tell,
            progress=advance,
            prepared=prepared,
            milestones=job.milestones,
        )
    except Interrupted:
        raise
    except Exception as error:
        if count_processes() > 1 and not isinstance(error, Diverged):
            raise  # the other processes of this run do not see the error, so continuing would wait for them forever
        tell(State("failed", reason=explain_failure(error)))
    else:
        tell(State("finished", metrics=metrics))
    finally:
        free_memory()


def explain_failure(error: Exception) -> str:
    """Return one line that says why a run failed."""
    if isinstance(error, UsageError):
        return str(error)
    if line := explain_os_error(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)[:LONGEST_REASON]}{place}"


def free_memory() -> None:
    """Release the memory of the last model."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def begin(threads: int) -> None:
    """Prepare a worker process: set its number of threads, and silence transformers' warnings and progress bars."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# --- On another machine -----------------------------------------------------------------------------------------------


def do_elsewhere(job: RunJob, prepared: Any, tell: Callable[[News], None]) -> None:
    """Do a run as `do_run` does, and send the files of a finished run before its final state."""

    def tell_all(news: News) -> None:
        if isinstance(news, State) and news.status == "finished":
            tell(read_files(Path(job.output)))
        tell(news)

    do_run(job, prepared, tell_all)


def read_files(output: Path) -> dict[str, bytes]:
    """Return the files of a finished run by relative path, without checkpoints and weights."""
    paths = [path for path in output.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    names = {path.relative_to(output).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith("checkpoint-")}


def write_files(files: Mapping[str, bytes], output: Path) -> None:
    """Write the files of a run done elsewhere, recipe first and metrics last, unless its metrics exist here."""
    from bertkit.training.run_dir import METRICS_FILE, RECIPE_FILE

    if METRICS_FILE in files and not (output / METRICS_FILE).exists():
        for name in sorted(files, key=lambda name: (name == METRICS_FILE, name != RECIPE_FILE)):
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path, "wb") as stream:
                stream.write(files[name])
