"""SIGTERM and Ctrl-C: the first one is noted, so that what runs comes to its own end; a later one is not held back.

Some senders send a signal twice at once: `timeout` to its child and to the group, `torchrun` beside the terminal. That
is one. Processes that help another leave signals to it, and do not outlive it.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0  # seconds after the first one in which others are the same
SECONDS_BETWEEN_LOOKS = 0.02  # seconds


class Interrupted(Exception):
    """Work was stopped by a signal (SIGTERM or Ctrl-C), and can be continued.

    Args:
        number: The signal's.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def note_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with the number of the first signal, wherever the main thread is in this context.

    A later one goes to the handler that there was before. Outside of the main thread, where signals cannot be caught,
    nothing happens.
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
                previous[number] = signal.signal(number, handle) or signal.SIG_DFL  # None: one that is not Python's
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_importing() -> bool:
    """Return whether an import is under way in this thread."""
    return any(frame.f_code.co_filename == "<frozen importlib._bootstrap>" for frame, _ in traceback.walk_stack(None))


def await_note(noted: Sequence[int]) -> bool:
    """Whether a signal comes into `noted` within SAME_SIGNAL seconds: one to a group comes in any order."""
    end = time.monotonic() + SAME_SIGNAL
    while not noted and time.monotonic() < end:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return bool(noted)


def follow_parent() -> None:
    """End this process at once when its parent has died: nothing may write beside a command that is given again."""

    def wait_and_end() -> None:
        wait([parent_process().sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=wait_and_end, daemon=True).start()


def leave_signals_to_parent() -> None:
    """For a process that helps another: signals to all of a group are that one's business; it ends when that one dies.

    That one ends it by SIGTERM too, which it obeys where the system says who has sent it.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_obey_parent, daemon=True).start()
    for number in STOPS:  # SIGTERM for threads that were there before
        signal.signal(number, signal.SIG_IGN)
    follow_parent()


def _obey_parent() -> None:
    """Ends this process at a SIGTERM from the one that has asked for it, and at no other."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent_process().pid:
        pass
    os._exit(0)


@contextmanager
def keep_from_interrupts() -> Iterator[None]:
    """Processes that are spawned in this context never get Ctrl-C, which is their parent's business, from the first."""
    resource_tracker.ensure_running()  # would else be started here, and unblocks what it blocks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
