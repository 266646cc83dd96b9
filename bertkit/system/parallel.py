"""One executor for the jobs of builds and studies: this process, several on this machine, or a Ray cluster.

A job tells messages, which are handled in this process, so workers need not share its disk. A worker that dies costs
only its current job, which starts again elsewhere, TRIES times at most.

Left out: services, job queues and schedulers; Ray has them.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from bertkit.errors import UsageError, join_lines
from bertkit.system.cluster import GOES_ON, LONGEST_REASON, POLL, ClusterWatch, import_ray, join_cluster
from bertkit.system.progress import ignore
from bertkit.system.signals import Interrupted, await_note, follow_parent, keep_from_interrupts, note_signals

TRIES = 3  # of a job whose workers die
GRACE = 60.0  # seconds for a worker to finish an update and write a checkpoint

Tell = Callable[[Any], None]
Handle = Callable[[int, Any], None]  # takes the number of a job, and its message
Pipe = multiprocessing.connection.Connection


class Job(Protocol):
    """What a worker gets. `data` names the entry of the shared data that it needs; empty: none."""

    data: str


@dataclass(frozen=True)
class Work:
    """What the jobs share.

    Attributes:
        do: Does a job: `do(job, data, tell)`. It raises Interrupted where a signal stopped it.
        begin: Called first in every worker process.
        num_cpus, num_gpus: Of a job on Ray.
        backlog: How many messages may wait on Ray until they are handled; 0: any number.
    """

    do: Callable[[Any, Any, Tell], None]
    begin: Callable[[], None] = ignore
    num_cpus: float = 1
    num_gpus: float = 0
    backlog: int = 0


@dataclass(frozen=True)
class Lost:
    """The message that a job's worker has died. It starts again elsewhere, unless it `is_final`."""

    cause: str
    is_final: bool


@dataclass(frozen=True)
class Done:
    """The message that a worker has ended a job, perhaps by an error."""

    error: Exception | None = None

    def check(self) -> None:
        """Raise the error."""
        if self.error is not None:
            raise self.error


def execute(
    work: Work, jobs: Sequence[Job], data: Mapping[str, Any], handle: Handle, workers: int, gpus: Sequence[str] = ()
) -> int:
    """Do the jobs, and return the signal by which they were stopped, or 0.

    Args:
        jobs: A try starts from the entry as it is then; `handle` may have replaced it.
        data: Name -> what the jobs that name it get; a worker holds one entry at a time.
        handle: Gets what jobs tell, and their `Lost`.
        workers: How many processes; 1 is this one, 0 stands for Ray.
        gpus: Names of the GPUs that the processes share, each process one.

    Raises:
        UsageError: A job or `handle` raised it, workers cannot begin, or the Ray cluster is lost.
    """
    if workers == 0 and jobs:
        noted: list[int] = []
        with note_signals(noted.append), join_cluster(work.num_cpus, work.num_gpus) as ray:
            execute_on_ray(ray, work, jobs, data, handle, noted)
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
    """Do a job in a worker.

    Raises:
        Interrupted: A signal stopped it.
    """
    try:
        work.do(job, data, tell)
    except Interrupted:
        raise
    except UsageError as error:
        return Done(error)
    except Exception:  # which may refuse to be pickled
        return Done(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
    return Done()


def pack(data: Mapping[str, Any], name: str) -> bytes:
    """Return an entry of the shared data as it is handed over; of None without a name."""
    return pickle.dumps(data[name] if name else None)


def lose(lost: Counter[int], number: int, cause: str, handle: Handle) -> bool:
    """Count that a job has lost its worker, handle it, and return whether the job is to start again."""
    lost[number] += 1
    is_final = lost[number] == TRIES
    handle(number, Lost(cause, is_final))
    return not is_final


# --- Several processes ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that does jobs, seen from here.

    Attributes:
        slot: Its place among the others.
        job: The number of its current one.
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
    """Spawned processes that do the jobs, and the jobs that wait. They end when this process dies.

    Attributes:
        noted: The signal to stop, once it has come.
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
        """Do the jobs, after a signal only what a checkpoint needs, and return as `execute` does."""
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
        """Handle a worker's message. By None it asks for a job, and is let go if there is none."""
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
        """Start a process."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        process = context.Process(target=serve, args=(there, self.work, gpu))
        with keep_from_interrupts():
            process.start()
        self.started.append(process)
        there.close()  # so that its death closes the pipe
        self.workers[here] = Worker(process, slot)

    def release(self, pipe: Pipe) -> None:
        """Close a worker's pipe, with which it ends."""
        pipe.close()
        del self.workers[pipe]

    def assign(self, worker: Worker, pipe: Pipe) -> None:
        """Give a worker the next job, and its data unless it has them."""
        worker.job = self.waiting.popleft()
        job = self.jobs[worker.job]
        with contextlib.suppress(OSError):  # it has just died; the next look at its pipe says so
            pipe.send(job)
            if job.data != worker.data:
                pipe.send_bytes(self.pack(job.data))
                worker.data = job.data

    def handle_death(self, worker: Worker) -> None:
        """Give a dead worker's job to another one, unless too many have died of it.

        Raises:
            UsageError: They die before they ask for a job.
        """
        worker.process.join()
        if await_note(self.noted):  # a signal to the group may have reached the worker first
            return
        code = worker.process.exitcode
        self.failed_starts += not worker.began
        if self.failed_starts == TRIES:
            raise UsageError(
                f"worker processes end before they begin (exit code {code}); use --workers 1, or, in a script of your "
                'own, start below: if __name__ == "__main__"'
            )
        cause = f"its process died (exit code {code})"
        if worker.job is not None and lose(self.lost, worker.job, cause, self.handle):
            self.waiting.appendleft(worker.job)
        if self.waiting:
            self.hire(worker.slot)


def serve(pipe: Pipe, work: Work, gpu: str | None) -> None:
    """Do the jobs that come through the pipe until it is closed, asking for each by None."""
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
    """End the processes; those that train write a checkpoint first."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


# --- Ray --------------------------------------------------------------------------------------------------------------


def execute_on_ray(
    ray: Any, work: Work, jobs: Sequence[Job], data: Mapping[str, Any], handle: Handle, noted: Sequence[int]
) -> None:
    """Do the jobs as Ray tasks on the cluster that this process is connected to, until `noted` holds a signal."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(work.backlog, actor_options={"num_cpus": 0, "scheduling_strategy": here})
    put = cache(lambda name: ray.put(pack(data, name)))
    task = ray.remote(num_cpus=work.num_cpus, num_gpus=work.num_gpus, max_retries=0)(do_on_ray)
    lost, running = Counter[int](), {}

    def submit(number: int) -> None:
        job = jobs[number]
        running[task.remote(number, job, work, put(job.data), queue, os.getcwd())] = number

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
            watch.check()  # to take a result from a raylet that has died would end this process
            while messages := queue.get_nowait_batch(queue.qsize()):
                for number, message in messages:
                    handle(number, message)
            for future in finished:
                take(future)
    except ray.exceptions.RayActorError:
        raise UsageError(f"the Ray cluster has lost the queue of this command's messages; {GOES_ON}") from None
    finally:
        for future in running:
            ray.cancel(future)


def do_on_ray(number: int, job: Job, work: Work, data: bytes, queue: Any, folder: str) -> Done:
    """Do one job in a Ray worker. Relative paths start from `folder`, where it is there."""
    if Path(folder).is_dir():
        os.chdir(folder)
    work.begin()
    return attempt(work, job, pickle.loads(data), lambda message: queue.put((number, message)))


# --- How many ---------------------------------------------------------------------------------------------------------


def read_workers(text: str | int) -> int:
    """Return the number of processes that `--workers` asks for; 0 stands for Ray.

    Raises:
        UsageError: neither a number nor "ray", several processes inside of several, or Ray is not installed.
    """
    if str(text) == "ray":
        import_ray()
        workers = 0
    elif str(text).isdecimal() and int(text) > 0:
        workers = int(text)
    else:
        raise UsageError(f"{text!r} workers; give a whole number above 0, or ray: --workers 2")
    if workers != 1 and (processes := count_processes()) > 1:
        raise UsageError(
            f"--workers {text} inside of {processes} processes that share each run; leave --workers out, or start "
            "without torchrun and accelerate launch"
        )
    return workers


def count_processes() -> int:
    """How many processes share each run, as torchrun and accelerate launch say; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def list_gpus() -> list[str]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
