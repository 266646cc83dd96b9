"""The runs of a study as jobs: how a worker does one, and the messages and files that it returns.

Every run sets its own seed and starts from the same prepared data, so its result depends neither on the worker nor on
earlier runs. Only the usual causes can change the last bits: the number of threads (each of N processes gets an equal
share of this process's threads) and the type of processor or GPU. A run whose worker has died continues from its
checkpoint. On a machine without this process's disk it works in a private folder and starts again from the beginning
after a loss.
"""

import io
import os
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bertkit.data.tokenizer import TOKENIZER_FILES
from bertkit.errors import UsageError, explain_disk_error, explain_os_error, join_lines
from bertkit.system.cluster import LONGEST_REASON, count_processes, list_gpus
from bertkit.system.disk import Disk, Mirror, open_mirror
from bertkit.system.parallel import TRIES, Lost, Work, execute
from bertkit.system.signals import Interrupted
from bertkit.tasks import TASKS
from bertkit.training.recipe import Recipe
from bertkit.training.run_dir import BEST, FIRST, METRICS_FILE, RECEIVED, RECIPE_FILE


@dataclass(frozen=True)
class RunJob:
    """One run to do.

    Attributes:
        recipe: The recipe.
        output: The run directory.
        data: The name of its prepared data; empty if the run prepares its own.
        milestones: Updates whose checkpoints must exist at the end.
    """

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


News = State | str  # a message from a run's worker: its state, or a line


def do_runs(
    jobs: Sequence[RunJob],
    prepared: Mapping[str, Any],
    handle: Callable[[int, State | str], None],
    workers: int,
    num_cpus: float = 1,
    num_gpus: float = 0,
    folder: str = "",
) -> int:
    """Do the runs, and return the signal that stopped them, or 0 when all are finished or failed.

    Args:
        prepared: Mapping from name to `bertkit.training.prepare.Prepared`.
        workers: The number of processes; 1 means this process, 0 means Ray.
        num_cpus, num_gpus: Resources of each run on Ray.
        folder: A directory in which Ray workers look whether they share the disk.
    """
    for job in jobs:
        shutil.rmtree(Path(job.output, RECEIVED), ignore_errors=True)  # of a killed process

    def hear(number: int, news: News | Lost) -> None:
        output = Path(jobs[number].output)
        if isinstance(news, Lost):
            shutil.rmtree(output / RECEIVED, ignore_errors=True)
            if news.is_final:
                reason = f"{news.cause} {TRIES} times in a row; memory may be too small"
                handle(number, State("failed", reason=reason))
            else:
                handle(number, State())
                handle(number, f"{news.cause}; retrying with another worker")
        else:
            if isinstance(news, State) and news.status == "finished":
                accept_files(output)
            handle(number, news)

    import torch

    share = torch.get_num_threads() // max(1, min(workers, len(jobs)))
    threads = max(1, int(num_cpus) if workers == 0 else share)
    gpus = list_gpus() if workers > 1 else []
    work = Work(do_run, partial(begin, threads), do_elsewhere, folder, num_cpus, num_gpus)
    return execute(work, jobs, prepared, hear, workers, gpus)


# --- One run ----------------------------------------------------------------------------------------------------------


def do_run(job: RunJob, prepared: Any, tell: Callable[[News], None]) -> None:
    """Do a run, and report its states, its final state last, and its lines to `tell`.

    Raises:
        Interrupted: SIGTERM or SIGINT stopped the run after a checkpoint was written.
    """
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


# --- On a machine without this disk -----------------------------------------------------------------------------------


def do_elsewhere(disk: Disk, job: RunJob, prepared: Any, tell: Callable[[News], None]) -> None:
    """Do a run as `do_run` does, in a mirror of the disk, and send its files before its final state."""
    with open_mirror(disk) as mirror:
        output = mirror.locate(job.output)

        def tell_all(news: News) -> None:
            if isinstance(news, str):
                news = mirror.restore(news)
            else:
                news = replace(news, reason=mirror.restore(news.reason))
                if news.status == "finished":
                    send_files(mirror, Path(output), job)
            tell(news)

        try:
            recipe = fetch_inputs(mirror, job)
            prepared = prepared and prepared.move_files(lambda path: Path(mirror.fetch(str(path))))
        except OSError as error:  # the disk of this machine is full, or a file has vanished
            tell(State("failed", reason=explain_failure(error)))
        else:
            do_run(replace(job, recipe=recipe, output=output), prepared, tell_all)


def fetch_inputs(mirror: Mirror, job: RunJob) -> Recipe:
    """Fetch the files that a run reads, and return the recipe that names the copies.

    If the run's data are prepared, their files exist in the mirror but are empty: only their names are still read.
    """
    task = TASKS[job.recipe.task]
    reads_data = not job.data or bool(task.pretrain_on(job.recipe))

    def fetch(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [fetch(name, item) for item in value]
        is_wanted = CHOOSERS.get(name, bool)
        if "," in value:  # the name of one file, or several
            mirror.fetch(value, is_wanted, reads_data)
        return ",".join(mirror.fetch(path, is_wanted, reads_data or name in CHOOSERS) for path in value.split(","))

    inputs = [name for name, option in task.options.items() if option.is_input and job.recipe.data[name]]
    data = {name: fetch(name, job.recipe.data[name]) for name in inputs}
    start = {"checkpoint": fetch("checkpoint", job.recipe.checkpoint)} if job.recipe.checkpoint else {}
    return job.recipe.override(data=data, **start)


def is_model_file(name: str) -> bool:
    """Return whether a file of a checkpoint belongs to its model, tokenizer or card."""
    return "/" not in name and name.endswith((".json", ".md", ".safetensors", ".txt", ".toml"))


# The files of a folder to fetch, by the key of the recipe that names it; all of them for other keys.
CHOOSERS: Mapping[str, Callable[[str], bool]] = {"checkpoint": is_model_file, "vocab": TOKENIZER_FILES.__contains__}


def send_files(mirror: Mirror, output: Path, job: RunJob) -> None:
    """Send the files of a finished run with the paths of the other machine.

    Checkpoints are left out, except the models of milestones, and so are the models that a study does not keep.
    """
    models = [path for update in job.milestones for path in list_model(output / f"checkpoint-{update}")]
    for path in [path for path in output.rglob("*") if path.is_file()]:
        name = path.relative_to(output).as_posix()
        if name.startswith(("checkpoint-", f"{FIRST}/", f"{BEST}/")) and path not in models:
            continue
        names_paths = path.suffix in (".json", ".jsonl", ".md", ".toml", ".yaml")
        text = mirror.restore(path.read_bytes().decode()) if names_paths else ""
        with explain_disk_error(job.output), io.BytesIO(text.encode()) if names_paths else path.open("rb") as stream:
            mirror.disk.send(f"{job.output}/{RECEIVED}/{name}", stream)


def list_model(folder: Path) -> list[Path]:
    """Return the files of a model in a folder: its configuration, and its weights in safetensors."""
    return [path for path in (folder / "config.json", *folder.glob("model*.safetensors*")) if path.exists()]


def accept_files(output: Path) -> None:
    """Move the files of a run that have arrived into its directory, the recipe first and the metrics last."""
    received = output / RECEIVED
    files = [path for path in received.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path == received / METRICS_FILE, path != received / RECIPE_FILE)):
        target = output / path.relative_to(received)
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        path.replace(target)
    shutil.rmtree(received, ignore_errors=True)
