"""The processes that share a run: how they join, and the messages when one is lost or stops."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import distributed

from bertkit.errors import UsageError
from bertkit.system.cluster import count_processes
from bertkit.system.signals import leave_signals_to_parent
from bertkit.training.recipe import Recipe

SECONDS_OF_WAITING = 60.0  # before a stopped process is reported
LOOKS = 20  # checks in that time
SECONDS_OF_STARTING = 300.0  # in which all processes of a run must have joined


class ProcessLost(UsageError):
    """Another process of the run has ended; raised in each of the remaining ones.

    Attributes:
        speaks: Whether this process prints the message; one of them does.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.speaks = claim_message()


# --- Joining and leaving ----------------------------------------------------------------------------------------------


def join_processes(recipe: Recipe) -> PartialState:
    """Join the processes started by torchrun or accelerate launch, if any, and return this one's state.

    Processes wait for each other up to `[train] ddp_timeout` seconds. The default is two hours, because the others wait
    while the first one trains a vocabulary.

    Raises:
        ProcessLost: Another process has not joined in SECONDS_OF_STARTING seconds.
    """
    timeout = timedelta(seconds=recipe.train.get("ddp_timeout", 7200))
    group = {}
    if not PartialState._shared_state and uses_agent_store():
        with explain_lost_process(count_processes()):
            store = open_store()
        store.set_timeout(timeout)
        group = {"store": store, "rank": int(os.environ["RANK"]), "world_size": count_processes()}
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout, **group)


def take_first(value: Any) -> Any:
    """Return the first process's value, of any type, in all processes, which must call this together."""
    return broadcast_object_list([value])[0]


def leave_processes() -> None:
    """Close the connection to the other processes, if any; otherwise one may abort while others are still ending."""
    PartialState().destroy_process_group()


def uses_agent_store() -> bool:
    """Return whether several processes share a store that torchrun's agent keeps when it restarts them."""
    return count_processes() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def open_store() -> distributed.Store:
    """Connect to the store of this start of the processes.

    torchrun's agent keeps its store over restarts (torch 2.13), with the addresses of dead processes, to which the new
    ones would try to connect. So each start has its own prefix.
    """
    store = connect(SECONDS_OF_STARTING)
    return distributed.PrefixStore(name_start(store), store) if uses_agent_store() else store


def connect(seconds: float) -> distributed.Store:
    """Return a new connection to the launcher's store, whose operations wait up to `seconds`."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return distributed.TCPStore(address, port, timeout=timedelta(seconds=seconds))


def name_start(store: distributed.Store) -> str:
    """Return a prefix that the processes of this start share, and that no earlier start has used.

    The first process chooses it and answers the requests of the others. Requests of dead processes are answered too,
    but nobody reads the answers.
    """
    rank, own = int(os.environ["RANK"]), f"bertkit/{uuid4().hex}"
    if rank > 0:
        store.set(f"bertkit/request/{rank}", own)
        name = store.get(f"{own}/answer").decode()
        store.set(f"{name}/joined/{rank}", "")
        return name
    missing, end = set(range(1, count_processes())), time.monotonic() + SECONDS_OF_STARTING
    while missing:
        for other in missing:
            if store.check([f"bertkit/request/{other}"]):
                store.set(f"{store.get(f'bertkit/request/{other}').decode()}/answer", own)
        missing = {other for other in missing if not store.check([f"{own}/joined/{other}"])}
        if missing and time.monotonic() > end:
            listed = ", ".join(map(str, sorted(missing)[:8]))
            raise ProcessLost(
                f"the processes of rank {listed} have not joined in {SECONDS_OF_STARTING:.0f} s; see their output, and "
                "run the same command again"
            )
        time.sleep(0.05)
    return own


# --- Lost and stopped processes ---------------------------------------------------------------------------------------


def claim_message() -> bool:
    """Return whether this process is the first of the run to call this; without a store, whether of its node."""
    if distributed.is_initialized():
        with suppress(distributed.DistError):
            return open_store().add("bertkit/lost", 1) == 1
    return os.environ.get("LOCAL_RANK", "0") == "0"


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
    # After a restart the store still has the heartbeats of dead processes.
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with suppress(distributed.DistError):
        # A separate connection, because operations waiting on the run's own would block it.
        store = connect(SECONDS_OF_WAITING)
        while not over.wait(SECONDS_OF_WAITING / LOOKS):
            store.set(f"bertkit/{rank}", f"{time.monotonic()} {own}")
            for other in set(ranks) - {rank}:
                name = f"bertkit/{other}"
                found = store.get(name).decode() if store.check([name]) else ""
                if found != seen.setdefault(other, found):
                    seen[other], still[other] = found, 0
                elif other in still or (found and not is_restarted):
                    still[other] = still.get(other, 0) + 1
            stopped = [other for other, looks in still.items() if looks >= LOOKS]
            for other in stopped:
                if still[other] == LOOKS and rank == min(set(ranks).difference(stopped)):
                    _, number, host = seen[other].split()
                    logging.getLogger("bertkit").warning(
                        f"bertkit: process {other} (pid {number} on {host}) has not responded for "
                        f"{SECONDS_OF_WAITING:.0f} s and the others wait; resume it (kill -CONT {number}) or end it: "
                        "the same command continues from the last checkpoint"
                    )
