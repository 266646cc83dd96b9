"""Who does the runs of a study: this process, several on this machine, or a Ray cluster.

Every run seeds itself and starts from the same prepared data, so its result does not depend on who does it, nor on what
was done before. What may change the last bits is what does so anywhere: the number of threads (each of N processes gets
its share of this one's), the kind of processor or GPU.

A worker that dies costs only its current run, which continues from its checkpoint elsewhere. Left out: services, job
queues and schedulers; Ray has them.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import UsageError, explain_os_error, join_lines
from bertkit.system.files import atomic_open
from bertkit.system.parallel import LONGEST_REASON, POLL, TRIES, ClusterWatch, count_processes, join_cluster, list_gpus
from bertkit.system.signals import follow, keep_from_interrupts, note_signals
from bertkit.training.recipe import Recipe

GRACE = 60.0  # seconds for a worker to finish an update and write a checkpoint


@dataclass(frozen=True)
class RunJob:
    """One run to do.

    task: a name in TASKS.
    recipe: complete.
    output: the run directory.
    data: the name of its prepared data; empty if the run is to prepare its own.
    milestones: the updates whose checkpoints are to be there at the end.
    """

    task: str
    recipe: Recipe
    output: str
    data: str = ""
    milestones: tuple[int, ...] = ()


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


def execute(
    jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle, workers: int, resources: Recipe
) -> int:
    """The signal by which it was stopped, or 0 when every job is finished or failed.

    Args:
        prepared: name -> `bertkit.training.run.Prepared`.
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


# --- One run ----------------------------------------------------------------------------------------------------------


def do(job: RunJob, prepared: Any, tell: Callable[[State | str], None]) -> State:
    """How a job has ended; while it runs, `tell` gets its states and lines.

    Raises:
        Interrupted: by SIGTERM or SIGINT, after a checkpoint.
    """
    from bertkit.tasks import TASKS
    from bertkit.training.callbacks import Diverged, Interrupted
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
        return State("finished", metrics=metrics)
    except Interrupted:
        raise
    except Exception as error:
        if count_processes() > 1 and not isinstance(error, Diverged):
            raise  # the other processes of this run do not know of it: to go on would be to wait for them for ever
        return State("failed", reason=explain_failure(error))
    finally:
        free_memory()


def explain_failure(error: Exception) -> str:
    """Why a run failed, as one line."""
    if isinstance(error, UsageError):
        return str(error)
    if line := explain_os_error(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)[:LONGEST_REASON]}{place}"


def free_memory() -> None:
    """Gives back what the last model has held."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- This process -----------------------------------------------------------------------------------------------------


def run_here(jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle) -> int:
    """Does the jobs one after the other. The answer as of `execute`."""
    from bertkit.training.callbacks import Interrupted

    for number, job in enumerate(jobs):
        try:
            handle(number, do(job, prepared.get(job.data), partial(handle, number)))
        except Interrupted as stop:
            return stop.number
    return 0


# --- Several processes ------------------------------------------------------------------------------------------------

Pipe = multiprocessing.connection.Connection


@dataclass
class Worker:
    """A process that does jobs, seen from here.

    slot: its place among the others.
    job: the number of its current one.
    data: the name of the prepared data that it holds.
    began: whether it has ever asked for a job.
    """

    process: multiprocessing.process.BaseProcess
    slot: int
    job: int | None = None
    data: str = ""
    began: bool = False


def run_in_processes(jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle, count: int) -> int:
    """Does the jobs in `count` spawned processes. The answer as of `execute`.

    They end by themselves when this process dies. Each gets its share of the threads, and one GPU if there are any.
    """
    pool = WorkerPool(jobs, prepared, handle, count)
    try:
        with note_signals(pool.noted.append):
            pool.work()
    finally:
        dismiss(pool.started)
    return pool.noted[0] if pool.noted else 0


class WorkerPool:
    """The processes that do the jobs, and the jobs that wait.

    noted: the signal to stop, once it has come.
    """

    def __init__(self, jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle, count: int) -> None:
        import torch

        self.jobs = jobs
        self.handle = handle
        self.count = count
        self.threads = max(1, torch.get_num_threads() // count)
        self.gpus = list_gpus()
        self.pack = cache(lambda name: pickle.dumps(prepared[name]))
        self.waiting = deque(range(len(jobs)))
        self.tries = Counter[int]()
        self.workers: dict[Pipe, Worker] = {}
        self.started: list[multiprocessing.process.BaseProcess] = []
        self.noted: list[int] = []
        self.failed_starts = 0

    def work(self) -> None:
        """Does the jobs; after a signal, only what a checkpoint needs."""
        for slot in range(self.count):
            self.hire(slot)
        told = False
        while self.workers:
            if self.noted and not told:
                told = True
                for worker in self.workers.values():
                    worker.process.terminate()
            for pipe in multiprocessing.connection.wait(list(self.workers), timeout=0.5):
                self.hear(pipe)

    def hear(self, pipe: Pipe) -> None:
        """Takes in a worker's message; None asks for a job, and without any the worker is let go."""
        worker = self.workers[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            pipe.close()
            del self.workers[pipe]
            self.handle_death(worker)
            return
        worker.began = True
        if message is not None:
            self.handle(worker.job, message)
            if isinstance(message, State) and message.status in ("finished", "failed"):
                worker.job = None
        elif self.waiting and not self.noted:
            self.assign(worker, pipe)
        else:
            pipe.close()  # with which it ends
            del self.workers[pipe]

    def hire(self, slot: int) -> None:
        """Starts a process."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
        process = context.Process(target=serve, args=(there, self.threads, gpu))
        with keep_from_interrupts():
            process.start()
        self.started.append(process)
        there.close()  # so that its death closes the pipe
        self.workers[here] = Worker(process, slot)

    def assign(self, worker: Worker, pipe: Pipe) -> None:
        """Gives a worker the next job, and its data unless it has them."""
        worker.job = self.waiting.popleft()
        self.tries[worker.job] += 1
        job = self.jobs[worker.job]
        with contextlib.suppress(OSError):  # it has just died; the next look at its pipe says so
            pipe.send(job)
            if job.data and job.data != worker.data:
                pipe.send_bytes(self.pack(job.data))
                worker.data = job.data

    def handle_death(self, worker: Worker) -> None:
        """After a worker's death: its job goes to another one, unless too many have died of it.

        Raises:
            UsageError: they die before they ask for a job.
        """
        worker.process.join()
        if self.noted:
            return
        self.failed_starts += not worker.began
        if self.failed_starts == TRIES:
            raise UsageError(
                f"worker processes end before they begin (exit code {worker.process.exitcode}); use one worker, or, in "
                'a script of your own, start the study below: if __name__ == "__main__"'
            )
        if (number := worker.job) is not None:
            cause = f"its process died (exit code {worker.process.exitcode})"
            if self.tries[number] == TRIES:
                reason = f"{cause}, as did {TRIES - 1} before; is the memory too small?"
                self.handle(number, State("failed", reason=reason))
            else:
                self.handle(number, State())
                self.handle(number, f"{cause}; another one takes it up")
                self.waiting.appendleft(number)
        if self.waiting:
            self.hire(worker.slot)


def serve(pipe: Pipe, threads: int, gpu: str | None) -> None:
    """What a worker does: the jobs that come through the pipe, until that is closed. By None it asks for the next."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is used
    follow(multiprocessing.parent_process().sentinel)
    import torch

    from bertkit.training.callbacks import Interrupted

    torch.set_num_threads(threads)
    silence_libraries()
    name, prepared = "", None
    with contextlib.suppress(EOFError, OSError, Interrupted):
        while True:
            pipe.send(None)
            job = pipe.recv()
            if job.data and job.data != name:
                name, prepared = job.data, pickle.loads(pipe.recv_bytes())
            pipe.send(do(job, prepared if job.data else None, pipe.send))


def dismiss(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Ends the processes; those that train write a checkpoint first."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()


def silence_libraries() -> None:
    """No progress bars and warnings of transformers: a worker reports through its study."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


# --- Ray --------------------------------------------------------------------------------------------------------------


def run_on_ray(
    jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle, num_cpus: float, num_gpus: float
) -> int:
    """Does the jobs as Ray tasks. The answer as of `execute`.

    Where a worker does not share our disk, what a run has written comes back, but for checkpoints and weights.
    """
    with join_cluster(num_cpus, num_gpus) as ray:
        return work_on_cluster(ray, jobs, prepared, handle, num_cpus, num_gpus)


def work_on_cluster(
    ray: Any, jobs: Sequence[RunJob], prepared: Mapping[str, Any], handle: Handle, num_cpus: float, num_gpus: float
) -> int:
    """Does the jobs on the cluster that this process is connected to. The answer as of `execute`."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    pack = cache(lambda name: ray.put(pickle.dumps(prepared[name])))
    task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(do_on_ray)  # `take` tries again
    tries, running, noted = Counter[int](), {}, []

    def submit(number: int) -> None:
        tries[number] += 1
        job = jobs[number]
        data = pack(job.data) if job.data else b""
        running[task.remote(number, job, data, queue, os.getcwd(), max(1, int(num_cpus)))] = number

    def take(future: Any) -> None:
        number = running.pop(future)
        try:
            state, files = ray.get(future)
        except ray.exceptions.RayError as error:
            cause = f"its worker was lost ({type(error).__name__})"
            if not noted and tries[number] == TRIES:
                handle(number, State("failed", reason=f"{cause}: {join_lines(error)[:LONGEST_REASON]}"))
            elif not noted:
                handle(number, State())
                handle(number, f"{cause}; another one takes it up")
                submit(number)
        else:
            write_files(files, Path(jobs[number].output))
            handle(number, state)

    watch = ClusterWatch(ray)
    with note_signals(noted.append):
        for number in range(len(jobs)):
            submit(number)
        told = False
        while running:
            if not watch.check():
                continue
            if noted and not told:
                told = True
                for future in running:
                    ray.cancel(future)  # as Ctrl-C would
            finished, _ = ray.wait(list(running), timeout=POLL)
            watch.check()  # to take a result from a raylet that has died would end this process
            with contextlib.suppress(ray.exceptions.RayError):  # without its queue the study only looks idle
                for number, message in queue.get_nowait_batch(queue.qsize()):
                    handle(number, message)
            for future in finished:
                take(future)
    return noted[0] if noted else 0


def do_on_ray(
    number: int, job: RunJob, data: bytes, queue: Any, folder: str, threads: int
) -> tuple[State, dict[str, bytes]]:
    """What a Ray worker does: one job, with the prepared data `data`; how it ended, and the files that it has written.

    folder: the working directory of the study, which relative paths start from.
    """
    import torch

    from bertkit.training.callbacks import Interrupted

    if Path(folder).is_dir():
        os.chdir(folder)
    torch.set_num_threads(threads)
    silence_libraries()

    def tell(message: State | str) -> None:
        with contextlib.suppress(Exception):  # the queue may be lost with its machine; the run is worth more
            queue.put((number, message))

    try:
        state = do(job, pickle.loads(data) if data else None, tell)
    except Interrupted:
        return State(), {}
    return state, read_files(Path(job.output)) if state.status == "finished" else {}


def read_files(output: Path) -> dict[str, bytes]:
    """What a finished run has written but for checkpoints and weights, by path."""
    paths = [path for path in output.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    names = {path.relative_to(output).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith("checkpoint-")}


def write_files(files: Mapping[str, bytes], output: Path) -> None:
    """Writes what a run has written elsewhere, its recipe first and its metrics last; nothing if they are here."""
    from bertkit.training.run_dir import METRICS_FILE, RECIPE_FILE

    if METRICS_FILE in files and not (output / METRICS_FILE).exists():
        for name in sorted(files, key=lambda name: (name == METRICS_FILE, name != RECIPE_FILE)):
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path, "wb") as stream:
                stream.write(files[name])
