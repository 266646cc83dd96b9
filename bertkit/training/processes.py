"""The processes that share a run: how they join, and the messages when one is lost or stops."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread

import torch
from accelerate import PartialState
from torch import distributed

from bertkit.errors import UsageError
from bertkit.system.signals import leave_signals_to_parent
from bertkit.training.recipe import Recipe

SECONDS_OF_WAITING = 60.0  # before a stopped process is reported
LOOKS = 20  # checks in that time


def join_processes(recipe: Recipe) -> PartialState:
    """Join the processes started by torchrun or accelerate launch, if any, and return this one's state.

    Processes wait for each other up to `[train] ddp_timeout` seconds. The default is two hours, because the others wait
    while the first one trains a vocabulary.
    """
    timeout = timedelta(seconds=recipe["train"].get("ddp_timeout", 7200))
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)


def leave_processes() -> None:
    """Close the connection to the other processes, if any; otherwise one may abort while others are still ending."""
    PartialState().destroy_process_group()


class ProcessLost(UsageError):
    """Another process of the run has ended; raised in each of the remaining ones."""


def begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    """Initialise a data worker: leave signals to its parent, then call the loader's own function."""
    leave_signals_to_parent()
    if begin is not None:
        begin(number)


@contextmanager
def explain_lost_process(processes: int) -> Iterator[None]:
    """Convert the errors that the end of another process causes in this one to ProcessLost."""
    try:
        yield
    except RuntimeError as error:
        if processes == 1 or not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        raise ProcessLost(
            "another process of this run was lost; the same command continues from its last checkpoint"
        ) from error


@contextmanager
def name_stopped_processes() -> Iterator[None]:
    """Log one line when a process of the run is stopped while the others wait for it.

    Every process writes a heartbeat to a shared store; one that the system has stopped does not. The first of the
    others logs the line.
    """
    over = Event()
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        Thread(target=_watch_others, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch_others(over: Event) -> None:
    """Write heartbeats to the store and check those of the others, until `over` is set or the store is gone."""
    rank, ranks = distributed.get_rank(), range(distributed.get_world_size())
    own, seen, still = f"{os.getpid()} {socket.gethostname()}", {}, {}
    with suppress(distributed.DistError):
        # A separate connection, because operations waiting on the run's own would block it.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(address, port, timeout=timedelta(seconds=SECONDS_OF_WAITING))
        while not over.wait(SECONDS_OF_WAITING / LOOKS):
            store.set(f"bertkit/{rank}", f"{time.monotonic()} {own}")
            for other in set(ranks) - {rank}:
                name = f"bertkit/{other}"
                found = store.get(name).decode() if store.check([name]) else ""
                if found != seen.setdefault(other, found):
                    seen[other], still[other] = found, 0
                elif other in still:  # it has sent a heartbeat since this process began to check
                    still[other] += 1
            stopped = [other for other, looks in still.items() if looks >= LOOKS]
            for other in stopped:
                if still[other] == LOOKS and rank == min(set(ranks).difference(stopped)):
                    _, number, host = seen[other].split()
                    logging.getLogger("bertkit").warning(
                        f"bertkit: process {other} (pid {number} on {host}) has not responded for "
                        f"{SECONDS_OF_WAITING:.0f} s and the others wait; resume it (kill -CONT {number}) or end it: "
                        "the same command continues from the last checkpoint"
                    )
