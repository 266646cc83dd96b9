"""One executor for the jobs of builds and studies: this process, several on this machine, or a Ray cluster.

Jobs send messages, which this process handles. Ray workers need not share its disk (`disk.py`). If a worker dies, only
its current job is lost; it starts again on another worker and is tried at most TRIES times.

Left out: services, job queues and schedulers; Ray has them.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import socket
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import bertkit
from bertkit.errors import UsageError, join_lines
from bertkit.system.cluster import (
    CONTINUES,
    LONGEST_REASON,
    POLL,
    ClusterWatch,
    join_cluster,
    keep_core,
    stay_here,
)
from bertkit.system.disk import Disk, offer_disk
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted, await_note, follow_parent, keep_from_interrupts, note_signals

TRIES = 3  # for a job whose workers die
GRACE = 60.0  # seconds for a worker to finish an update and write a checkpoint

Tell = Callable[[Any], None]
Handle = Callable[[int, Any], None]  # receives the number of a job, and its message
Pipe = multiprocessing.connection.Connection


class Job(Protocol):
    """A job for a worker; `data` names the shared data that it needs, and is empty without any."""

    data: str


@dataclass(frozen=True)
class Work:
    """The settings that all jobs share.

    Attributes:
        do: Does a job: `do(job, data, tell)`. It raises Interrupted when a signal stops it.
        begin: Called first in every worker process.
        do_elsewhere: Does a job in a Ray worker that does not share this process's disk: `do_elsewhere(disk, job, data,
            tell)`.
        folder: A directory of this process, in which workers look whether they share the disk; empty if jobs use no
            files.
        num_cpus, num_gpus: Resources of a job on Ray.
        backlog: The number of unhandled messages that may wait on Ray; 0 for no limit.
    """

    do: Callable[[Any, Any, Tell], None]
    begin: Callable[[], None] = ignore
    do_elsewhere: Callable[[Disk, Any, Any, Tell], None] | None = None
    folder: str = ""
    num_cpus: float = 1
    num_gpus: float = 0
    backlog: int = 0


@dataclass(frozen=True)
class Lost:
    """A message: a job's worker has died. The job starts again on another worker, unless `is_final`."""

    cause: str
    is_final: bool


@dataclass(frozen=True)
class Done:
    """A message: a worker has ended a job, possibly with an error."""

    error: Exception | None = None

    def check(self) -> None:
        """Raise the error, if any."""
        if self.error is not None:
            raise self.error


def execute(
    work: Work, jobs: Sequence[Job], data: Mapping[str, Any], handle: Handle, workers: int, gpus: Sequence[str] = ()
) -> int:
    """Do the jobs, and return the signal that stopped them, or 0.

    Args:
        jobs: Each try uses the current entry, which `handle` may have replaced.
        data: Shared data by name; a worker holds one entry at a time.
        handle: Receives the messages of jobs, and a `Lost` for each lost worker.
        workers: The number of processes; 1 means this process, 0 means Ray.
        gpus: Names of the GPUs, one per process, used in turn.

    Raises:
        UsageError: A job or `handle` raised it, workers cannot start, or the Ray cluster is lost.
    """
    if workers == 0 and jobs:
        noted: list[int] = []
        cluster = join_cluster(work.num_cpus, work.num_gpus)
        with note_signals(noted.append), cluster as ray, offer_disk(ray, work.folder) as disk:
            execute_on_ray(ray, disk, work, jobs, data, handle, noted)
        return noted[0] if noted else 0
    if workers > 1:
        return WorkerPool(work, jobs, data, handle, min(workers, len(jobs)), gpus).execute()
    for number, job in enumerate(jobs):
        try:
            work.do(job, data.get(job.data), partial(handle, number))
        except Interrupted as stop:
            return stop.number
    return 0


def attempt(work: Work, job: Job, data: Any, tell: Tell) -> Done:
    """Do a job in a worker, and return its outcome.

    Raises:
        Interrupted: A signal stopped the job.
    """
    try:
        work.do(job, data, tell)
    except Interrupted:
        raise
    except UsageError as error:
        return Done(error)
    except Exception:  # formatted here, because it may not be picklable
        return Done(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
    return Done()


def pack(data: Mapping[str, Any], name: str) -> bytes:
    """Return the pickled entry of the shared data; without a name, None is pickled."""
    return pickle.dumps(data[name] if name else None)


def lose(lost: Counter[int], number: int, cause: str, handle: Handle) -> bool:
    """Count and report that a job has lost its worker, and return whether the job starts again."""
    lost[number] += 1
    is_final = lost[number] == TRIES
    handle(number, Lost(cause, is_final))
    return not is_final


# --- Several processes ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker process, as the parent sees it.

    Attributes:
        slot: Its index among the workers.
        job: The number of its current job.
        data: The name of the data that it holds.
        began: Whether it has ever asked for a job.
    """

    process: multiprocessing.process.BaseProcess
    slot: int
    job: int | None = None
    data: str = ""
    began: bool = False


@dataclass(eq=False)
class WorkerPool:
    """A pool of spawned processes and the waiting jobs; the processes end when this process dies.

    Attributes:
        noted: The signal to stop, once it has arrived.
    """

    work: Work
    jobs: Sequence[Job]
    data: Mapping[str, Any]
    handle: Handle
    count: int
    gpus: Sequence[str]
    workers: dict[Pipe, Worker] = field(default_factory=dict)
    started: list[multiprocessing.process.BaseProcess] = field(default_factory=list)
    noted: list[int] = field(default_factory=list)
    lost: Counter[int] = field(default_factory=Counter)
    failed_starts: int = 0

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.jobs)))
        self.pack = cache(partial(pack, self.data))

    def execute(self) -> int:
        """Do the jobs, and return as `execute` does; after a signal, workers only write their checkpoints."""
        told = False
        try:
            with note_signals(self.noted.append):
                for slot in range(self.count):
                    self.hire(slot)
                while self.workers:
                    if self.noted and not told:
                        told = True
                        for worker in self.workers.values():
                            worker.process.terminate()
                    for pipe in multiprocessing.connection.wait(list(self.workers), timeout=0.5):
                        self.hear(pipe)
        finally:
            dismiss(self.started)
        return self.noted[0] if self.noted else 0

    def hear(self, pipe: Pipe) -> None:
        """Handle a worker's message; None asks for a job, and releases the worker if there is none."""
        worker = self.workers[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            self.release(pipe)
            self.handle_death(worker)
            return
        worker.began = True
        if isinstance(message, Done):
            message.check()
            worker.job = None
        elif message is not None:
            self.handle(worker.job, message)
        elif self.waiting and not self.noted:
            self.assign(worker, pipe)
        else:
            self.release(pipe)

    def hire(self, slot: int) -> None:
        """Start a worker process."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        process = context.Process(target=serve, args=(there, self.work, gpu))
        with keep_from_interrupts():
            process.start()
        self.started.append(process)
        there.close()  # so that the worker's death closes the pipe
        self.workers[here] = Worker(process, slot)

    def release(self, pipe: Pipe) -> None:
        """Close a worker's pipe, which ends the worker."""
        pipe.close()
        del self.workers[pipe]

    def assign(self, worker: Worker, pipe: Pipe) -> None:
        """Send a worker the next job, and its data unless the worker holds them."""
        worker.job = self.waiting.popleft()
        job = self.jobs[worker.job]
        with contextlib.suppress(OSError):  # the worker has just died; the next read of its pipe shows that
            pipe.send(job)
            if job.data != worker.data:
                pipe.send_bytes(self.pack(job.data))
                worker.data = job.data

    def handle_death(self, worker: Worker) -> None:
        """Give a dead worker's job to another one, unless too many workers have died of it.

        Raises:
            UsageError: Workers die before they ask for a job.
        """
        worker.process.join()
        if await_note(self.noted):  # a signal to the group may have reached the worker first
            return
        code = worker.process.exitcode
        self.failed_starts += not worker.began
        if self.failed_starts == TRIES:
            raise UsageError(
                f"worker processes exit before they start work (exit code {code}); use --workers 1, or guard your own "
                'script with: if __name__ == "__main__"'
            )
        cause = f"its process died (exit code {code})"
        if worker.job is not None and lose(self.lost, worker.job, cause, self.handle):
            self.waiting.appendleft(worker.job)
        if self.waiting:
            self.hire(worker.slot)


def serve(pipe: Pipe, work: Work, gpu: str | None) -> None:
    """Ask for jobs through the pipe by sending None, and do them until the pipe is closed."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used
    follow_parent()
    work.begin()
    name, data = "", None
    with contextlib.suppress(EOFError, OSError, Interrupted):
        while True:
            pipe.send(None)
            job = pipe.recv()
            if job.data != name:
                name, data = job.data, pickle.loads(pipe.recv_bytes())
            pipe.send(attempt(work, job, data, pipe.send))


def dismiss(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """End the processes; those that train write a checkpoint first, within GRACE seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


# --- Ray --------------------------------------------------------------------------------------------------------------


def execute_on_ray(
    ray: Any,
    disk: Disk,
    work: Work,
    jobs: Sequence[Job],
    data: Mapping[str, Any],
    handle: Handle,
    noted: Sequence[int],
) -> None:
    """Do the jobs as Ray tasks on the cluster that this process is connected to, until `noted` holds a signal."""
    from ray.util.queue import Queue

    queue = Queue(work.backlog, actor_options=stay_here(ray))
    put = cache(lambda name: ray.put(pack(data, name)))
    task = ray.remote(num_cpus=work.num_cpus, num_gpus=work.num_gpus, max_retries=0)(do_on_ray)
    lost, running = Counter[int](), {}

    def submit(number: int) -> None:
        job = jobs[number]
        running[task.remote(number, job, work, put(job.data), queue, disk, bertkit.__version__)] = number

    def take(future: Any) -> None:
        number = running.pop(future)
        try:
            ray.get(future).check()
        except ray.exceptions.RayError as error:
            cause = f"its worker was lost ({type(error).__name__}: {join_lines(error)[:LONGEST_REASON]})"
            if not noted and lose(lost, number, cause, handle):
                submit(number)

    watch, told = ClusterWatch(ray), False
    try:
        for number in range(len(jobs)):
            submit(number)
        while running:
            if not watch.check():
                continue
            if noted and not told:
                told = True
                for future in running:
                    ray.cancel(future)  # as Ctrl-C would
            finished, _ = ray.wait(list(running), timeout=POLL)
            watch.check()  # taking a result from a dead raylet would end this process
            while messages := queue.get_nowait_batch(queue.qsize()):
                for number, message in messages:
                    handle(number, message)
            for future in finished:
                take(future)
    except ray.exceptions.RayActorError:
        raise UsageError(f"the Ray cluster has lost the queue of this command's messages; {CONTINUES}") from None
    finally:
        for future in running:
            ray.cancel(future)


def do_on_ray(number: int, job: Job, work: Work, data: bytes, queue: Any, disk: Disk, version: str) -> Done:
    """Do one job in a Ray worker, with the paths of `disk` if it is shared.

    Args:
        version: The version of bertkit that the worker must have.
    """
    if bertkit.__version__ != version:
        there = f"{socket.gethostname()} has bertkit {bertkit.__version__}"
        return Done(UsageError(f"{there}, expected {version} as on this machine; install the same version on both"))
    if not disk.is_shared():
        work = replace(work, do=partial(work.do_elsewhere, disk))
    elif Path(disk.folder).is_dir():
        os.chdir(disk.folder)
    work.begin()
    return attempt(work, job, pickle.loads(data), lambda message: keep_core(queue.put, (number, message)))
