"""SIGTERM and Ctrl-C: the first signal is noted, so that work can end by itself; a later one takes effect.

Some senders send a signal twice within moments: `timeout` to its child and to the group, `torchrun` beside the
terminal. These count as one signal. Helper processes leave signals to their parent, and do not outlive it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from threading import Thread
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0  # seconds after the first signal in which others count as the same
LOOK_AT_PARENT = 0.05  # seconds between two looks of a helper process at its parent
MOMENT = 0.2  # seconds in which the thread of a pool sees that it shall end


class Interrupted(Exception):
    """Work was stopped by a signal (SIGTERM or Ctrl-C), and can be continued.

    Args:
        number: The number of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def note_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with the number of the first signal that arrives in this context.

    A later signal goes to the previous handler. Outside the main thread, where signals cannot be caught, this does
    nothing.
    """
    previous: dict[int, Any] = {}
    first = None

    def handle(number: int, frame: Any) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            note(number)
        elif time.monotonic() - first > SAME_SIGNAL:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    try:
        for number in STOPS:
            with suppress(ValueError):
                previous[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def await_note(noted: Sequence[int]) -> bool:
    """Return whether `noted` gets a signal within SAME_SIGNAL seconds.

    A signal to a group reaches its processes in any order.
    """
    end = time.monotonic() + SAME_SIGNAL
    while not noted and time.monotonic() < end:
        time.sleep(0.02)
    return bool(noted)


def leave_signals_to_parent() -> None:
    """Make this helper process end with its parent or at its SIGTERM, and ignore signals of others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # on macOS, which lacks it, SIGTERM ends the process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # threads that already exist do not block it
    Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    """End this process at a SIGTERM from its parent, or when that has died.

    It must not write while the command that replaces the dead one writes.
    """
    while parent_process().is_alive():
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(LOOK_AT_PARENT)
            continue
        found = signal.sigtimedwait({signal.SIGTERM}, LOOK_AT_PARENT)
        if found is not None and found.si_pid == parent_process().pid:
            break
    os._exit(0)


@contextmanager
def keep_from_interrupts() -> Iterator[None]:
    """Block Ctrl-C from the start in processes that are spawned in this context; their parent handles it."""
    resource_tracker.ensure_running()  # started in this context it would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def open_pool(number: int, method: str, begin: Callable[[], None]) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of helper processes, which are killed at the end, even at work.

    Args:
        method: How they start: "spawn" or "fork".
        begin: Called first in each of them.
    """
    others = active_children()
    pool = ProcessPoolExecutor(number, get_context(method), initializer=begin)
    try:
        yield pool
    finally:
        # The pool's thread also removes its semaphores: an exit in the middle of that would leave a warning.
        ending = Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(MOMENT)  # killed earlier, the processes would leave errors to what has not begun
        for process in set(active_children()).difference(others):
            process.kill()  # one may wait forever for a lock that a dead one held
            process.join()
        ending.join()
