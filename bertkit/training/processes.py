"""The processes that share a run: how they are joined, and what is said when one is lost or stops."""

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

SECONDS_OF_WAITING = 60.0  # for a process that stands still, until it is named
LOOKS = 20  # in that time


def join_processes(recipe: Recipe) -> PartialState:
    """This process among those that torchrun or accelerate launch have started; alone if there are no others.

    They wait for each other up to `[train] ddp_timeout` seconds; two hours if not given, for the others wait while the
    first one trains a vocabulary.
    """
    timeout = timedelta(seconds=recipe["train"].get("ddp_timeout", 7200))
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)


def leave_processes() -> None:
    """Ends the connection to the other processes, if there are any: without it one may abort while others still end."""
    PartialState().destroy_process_group()


class ProcessLost(UsageError):
    """Another process of the run has ended; each of those that are left sees it."""


def begin_worker(begin: Callable[[int], None] | None, number: int) -> None:
    """What a data worker does first."""
    leave_signals_to_parent()
    if begin is not None:
        begin(number)


@contextmanager
def explain_lost_process(processes: int) -> Iterator[None]:
    """What a process sees when another one of several has ended becomes a ProcessLost."""
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
    """Log one line in this context when a process of the run stands still, for which all others wait.

    Every process counts in a store that they share; one that the system has stopped does not count. Of those that do,
    the first one speaks.
    """
    over = Event()
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        Thread(target=_watch_others, args=(over,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch_others(over: Event) -> None:
    """Count in the store, and look whether the others do, until it is over or the store is gone."""
    rank, ranks = distributed.get_rank(), range(distributed.get_world_size())
    own, seen, still = f"{os.getpid()} {socket.gethostname()}", {}, {}
    with suppress(distributed.DistError):
        # A connection of its own: what waits at the run's would hold it.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(address, port, timeout=timedelta(seconds=SECONDS_OF_WAITING))
        while not over.wait(SECONDS_OF_WAITING / LOOKS):
            store.set(f"bertkit/{rank}", f"{time.monotonic()} {own}")
            for other in set(ranks) - {rank}:
                name = f"bertkit/{other}"
                found = store.get(name).decode() if store.check([name]) else ""
                if found != seen.setdefault(other, found):
                    seen[other], still[other] = found, 0
                elif other in still:  # it has counted while this one looked
                    still[other] += 1
            stopped = [other for other, looks in still.items() if looks >= LOOKS]
            for other in stopped:
                if still[other] == LOOKS and rank == min(set(ranks).difference(stopped)):
                    _, number, host = seen[other].split()
                    logging.getLogger("bertkit").warning(
                        f"bertkit: process {other} (pid {number} on {host}) has stood still for "
                        f"{SECONDS_OF_WAITING:.0f} s and the others wait for it; continue it (kill -CONT {number}), or "
                        "end it: the same command continues from the last checkpoint"
                    )
