"""The processes that share a run: how they join, and the message when one is lost; torchrun restarts them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from bertkit.errors import UsageError
from bertkit.system.signals import leave_signals_to_parent
from bertkit.training.recipe import Recipe


class ProcessLost(UsageError):
    """Another process of the run has ended; raised in each of the remaining ones.

    Attributes:
        speaks: All of them print the message, because the first one may be the lost one.
    """

    speaks = True


def join_processes(recipe: Recipe) -> PartialState:
    """Join the processes started by torchrun or accelerate launch, if any, and return this one's state.

    Processes wait for each other up to `[train] ddp_timeout` seconds. The default is two hours, because the others wait
    while the first one trains a vocabulary.
    """
    timeout = timedelta(seconds=recipe.train.get("ddp_timeout", 7200))
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timeout)


def take_first(value: Any) -> Any:
    """Return the first process's value, of any type, in all processes, which must call this together."""
    return broadcast_object_list([value])[0]


def leave_processes() -> None:
    """Close the connection to the other processes, if any; otherwise one may abort while others are still ending."""
    PartialState().destroy_process_group()


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
