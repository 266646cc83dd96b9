"""Who builds the pieces of a corpus: several processes of this machine, or a Ray cluster."""

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bertkit.data.pretraining.pieces import BuildItem, BuildWork, PieceJob, Tracker, build_piece, read_parts
from bertkit.data.pretraining.store import write_shard
from bertkit.errors import UsageError, explain_disk_error, join_lines
from bertkit.system.files import remove_unfinished
from bertkit.system.parallel import TRIES, ClusterWatch, join_cluster
from bertkit.system.signals import await_note, follow, keep_from_interrupts, note_signals

TICK = 0.5  # seconds between two looks at the workers


# --- Several processes ------------------------------------------------------------------------------------------------


def build_in_processes(
    work: BuildWork, jobs: Sequence[PieceJob], processes: int, tracker: Tracker, report: Callable[[str], None]
) -> None:
    """Builds the pieces in spawned processes, which end when this one dies or leaves.

    A signal to stop is obeyed between two looks: a handler that raised within a lock of the pool's would leave it
    locked, and the pool would never end.
    """
    noted: list[int] = []
    with note_signals(noted.append, again=signal.SIG_DFL):
        run_pool(work, jobs, processes, tracker, report, noted)
    if noted:
        signal.raise_signal(noted[0])
        raise KeyboardInterrupt  # whatever the handler has done: this build is not finished


def run_pool(
    work: BuildWork,
    jobs: Sequence[PieceJob],
    processes: int,
    tracker: Tracker,
    report: Callable[[str], None],
    noted: Sequence[int],
) -> None:
    """Has the pieces built until they are, or until `noted` holds a signal.

    Raises:
        UsageError: a worker process has died, or the disk is full.
    """
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, initializer=begin, initargs=(reader,))
    try:
        with keep_from_interrupts():
            pending = {pool.submit(serve, work, job) for job in jobs}
        while pending and not noted:
            finished, pending = wait(pending, TICK, FIRST_COMPLETED)
            for future in finished:
                for line in future.result():
                    report(line)
            tracker.look()
        if not pending:
            pool.shutdown()
    except UsageError:
        if not noted:
            raise
    except BrokenProcessPool:
        if not await_note(noted):  # the workers may have had the signal too, and before this process
            raise UsageError(
                "a worker process died (is the memory too small?); the same command continues from what is finished, "
                'with fewer --workers if need be; a script of your own needs: if __name__ == "__main__"'
            ) from None
    finally:
        writer.close()  # at which those that are left end at once
        pool.shutdown(cancel_futures=True)
        reader.close()
        remove_unfinished(work.folder)


def begin(reader: Connection) -> None:
    """What a process does first: it takes one thread, and sees to it that it does not outlive its parent."""
    limit_threads()
    follow(reader)


def limit_threads() -> None:
    """One thread for the tokenizer, which reads this when it is first used."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def serve(work: BuildWork, job: PieceJob) -> list[str]:
    """Builds a piece, in a process of its own; the lines about it."""
    lines: list[str] = []
    with explain_disk_error(work.folder.parent):
        build_piece(work, job, lines.append)
    return lines


# --- Ray --------------------------------------------------------------------------------------------------------------


def build_on_ray(work: BuildWork, jobs: Sequence[PieceJob], tracker: Tracker, report: Callable[[str], None]) -> None:
    """Builds the pieces as Ray tasks, one a CPU; their parts come back and are written here."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of parts that nobody wants after their worker was lost
    with join_cluster(1, 0) as ray:
        work_on_cluster(ray, work, jobs, tracker, report)


def work_on_cluster(
    ray: Any, work: BuildWork, jobs: Sequence[PieceJob], tracker: Tracker, report: Callable[[str], None]
) -> None:
    """Builds the pieces on the cluster that this process is connected to."""
    # Two parts of a piece may wait to be written, no more: memory is bounded here, there and in between.
    task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming", _generator_backpressure_num_objects=2)(
        read_on_ray
    )
    waiting, running, tries = deque(jobs), {}, Counter[int]()
    watch = ClusterWatch(ray)
    try:
        while waiting or running:
            if not watch.check():
                continue
            while waiting and len(running) < max(1, int(ray.cluster_resources().get("CPU", 1))):
                job = waiting.popleft()
                running[task.remote(work, job, os.getcwd())] = job
            ready, _ = ray.wait(list(running), timeout=TICK)
            watch.check()  # to take a part from a raylet that has died would end this process
            for parts in ready:
                job = running.pop(parts)
                try:
                    job = take(ray.get(next(parts)), work, job, report)
                except ray.exceptions.RayError as error:
                    tries[job.number] += 1
                    cause = f"a Ray worker was lost ({type(error).__name__})"
                    if tries[job.number] == TRIES:
                        raise UsageError(f"{cause}, as were {TRIES - 1} before: {join_lines(error)[:300]}") from None
                    report(f"{cause}; another one takes up piece {job.number}")
                    waiting.appendleft(job)
                else:
                    if job is not None:
                        running[parts] = job
            tracker.look()
    finally:
        for parts in running:
            ray.cancel(parts)


def take(item: BuildItem, work: BuildWork, job: PieceJob, report: Callable[[str], None]) -> PieceJob | None:
    """Writes a part that has come from a Ray worker, or tells its line; what is left of the piece then, if anything."""
    if isinstance(item, UsageError):
        raise item
    if isinstance(item, str):
        report(item)
        return job
    number, part = item
    write_shard(work.folder, job.number, number, part)
    is_done = part.is_last or number == job.stop
    return None if is_done else replace(job, there={**job.there, number: part.documents})


def read_on_ray(work: BuildWork, job: PieceJob, folder: str) -> Iterator[BuildItem]:
    """What a Ray worker does: the parts of a piece that are missing, and what is to be said.

    folder: the working directory of the build, which relative paths start from.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    limit_threads()
    lines: list[str] = []
    try:
        for number, part in read_parts(work, job, lines.append):
            if part.is_last:
                yield from lines
            yield number, part
    except UsageError as error:
        yield error
