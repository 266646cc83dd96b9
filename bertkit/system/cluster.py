"""Join or start a Ray cluster, and start commands of this program as processes, here or on the cluster."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

from bertkit.errors import LONGEST_REASON, UsageError, explain_missing

POLL = 0.2  # seconds between two looks at a process
QUIET = {  # environment variable -> value
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports to Ray's developers
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no messages about lost workers, which we report
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # errors of cancelled tasks, which nobody asks for
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no notice that this becomes the default
}


def import_ray() -> Any:
    """Import Ray, without its usage reports and notices."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with explain_missing("Ray is not installed", "ray"):
        import ray
    return ray


def check_address(address: str) -> None:
    """Check that something listens at a cluster's address, because Ray itself would retry for twelve minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"the Ray cluster {address} does not answer ({error}); correct RAY_ADDRESS, or unset it for a cluster on "
            "this machine"
        ) from None


@contextlib.contextmanager
def join_cluster(num_cpus: float, num_gpus: float) -> Iterator[Any]:
    """Yield Ray, connected to the cluster that RAY_ADDRESS names, or to a new one on this machine alone."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    alone = {"include_dashboard": False} if address == "local" else {}
    check_address(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **alone)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[-1]  # the lines before are a traceback of Ray
        raise UsageError(
            f"the Ray cluster {address} cannot be joined: {reason[:LONGEST_REASON]}; check RAY_ADDRESS, RAY_AUTH_MODE "
            "and RAY_AUTH_TOKEN"
        ) from None
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
        there = ray.cluster_resources() if address == "local" else {"CPU": inf, "GPU": inf}
        for kind, asked in (("CPU", num_cpus), ("GPU", num_gpus)):
            if asked > there.get(kind, 0):
                raise UsageError(
                    f"num_{kind.lower()}s is {asked:g}, but this machine has {there.get(kind, 0):g}; lower it, "
                    "or name a cluster in RAY_ADDRESS"
                )
        yield ray
    finally:
        ray.shutdown()


# --- Commands in processes of their own, here and on a cluster --------------------------------------------------------


class Command(subprocess.Popen):
    """A command of this program in its own process, which ends with this one, because its input is a pipe from here."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it works."""
        if (code := super().poll()) is not None:
            self.stdin.close()
        return code


def start_command(words: Sequence[str], log: Path, threads: int, gpus: Sequence[str] | None = None) -> Command:
    """Start a command of this program as a process, or one for each of several GPUs, which share its run.

    Args:
        words: The command line without the program.
        log: Receives the output.
        gpus: Names of its GPUs, as in CUDA_VISIBLE_DEVICES; None: those of this process.
    """
    surroundings = {"OMP_NUM_THREADS": str(threads)}
    command = ["-m", "bertkit", *words]
    if gpus is not None:
        surroundings["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if gpus and len(gpus) > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}", *command]
    with log.open("wb") as stream:
        return Command(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | surroundings,
            start_new_session=True,  # signals of the terminal go to this process, which passes them on
        )


class Remote:
    """A command as a Ray task; `poll` and `terminate` are those of a process."""

    def __init__(self, ray: Any, words: Sequence[str], log: Path, num_cpus: float, num_gpus: float) -> None:
        self.ray, self.log = ray, log
        task = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(do_command)
        self.future = task.remote(os.getcwd(), words, log, max(1, int(num_cpus)))

    def poll(self) -> int | None:
        """Return the exit code, that of SIGKILL if Ray has lost the task; None while it works."""
        if not self.ray.wait([self.future], timeout=0)[0]:
            return None
        try:
            found = self.ray.get(self.future)
        except self.ray.exceptions.RayTaskError as error:  # bertkit may be missing there
            reason = str(error).strip().splitlines()[-1][:LONGEST_REASON]
            raise UsageError(f"a Ray worker cannot start a process ({reason})") from None
        except self.ray.exceptions.RayError:
            return -signal.SIGKILL
        if isinstance(found, str):
            raise UsageError(
                f"{found} does not see {self.log.parent}; --workers ray needs a disk that all machines share"
            )
        return found

    def terminate(self) -> None:
        """Ask the command to write a checkpoint and end."""
        self.ray.cancel(self.future)


def do_command(folder: str, words: Sequence[str], log: Path, threads: int) -> int | str:
    """Do a command in a Ray worker; return its exit code, or the machine's name without the log's folder.

    Args:
        folder: The working directory, if it exists here.
    """
    import ray

    with contextlib.suppress(OSError):
        os.chdir(folder)
    if not log.parent.is_dir():
        return socket.gethostname()
    process = start_command(words, log, threads, [str(gpu) for gpu in ray.get_gpu_ids()])
    try:
        while process.poll() is None:
            time.sleep(POLL)  # `wait` would not let Ray interrupt this thread
    except KeyboardInterrupt:  # Ray's `cancel`
        process.terminate()
    return process.wait()


# --- Numbers of processes, GPUs and cores -----------------------------------------------------------------------------


def read_workers(text: str | int) -> int:
    """Return the number of processes that `--workers` asks for; 0 means Ray."""
    if str(text) == "ray":
        import_ray()
        return 0
    if str(text).isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--workers is {text!r}; give a whole number above 0, or ray")


def count_processes() -> int:
    """Return the number of processes that share each run, as set by torchrun or accelerate launch; 1 by default."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def list_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    import torch

    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
