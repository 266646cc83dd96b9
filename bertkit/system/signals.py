"""SIGTERM and Ctrl-C: the first one is noted, so that what runs comes to its own end; a later one is not held back.

Some senders send a signal twice at once: `timeout` to its child and to the group, `torchrun` beside the terminal. That
is one. Processes that help another leave signals to it, and do not outlive it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0  # seconds after the first one in which others are the same
IMPORT_PATIENCE = 1.0  # seconds for an import to end
SECONDS_BETWEEN_LOOKS = 0.02  # seconds

_obeyed: list[int] = []  # the first signals of the contexts that are open


class Interrupted(Exception):
    """Work was stopped by a signal (SIGTERM or Ctrl-C), and can be continued.

    Args:
        number: The signal's.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def note_signals(note: Callable[[int], None], again: Any = None) -> Iterator[None]:
    """In this context `note` gets the number of the first signal, wherever the main thread is.

    One that came in a context around this one, and is still to be obeyed (what a handler raises in a destructor is
    lost), counts as the first. Outside of the main thread, where signals cannot be caught, nothing happens.

    Args:
        again: the handler of a later one; None: the one that there was before.
    """
    previous: dict[int, Any] = {}
    first, noted = None, 0

    def handle(number: int, frame: Any) -> None:
        nonlocal first, noted
        if first is None:
            first, noted = time.monotonic(), number
            _obeyed.append(number)
            note(number)
        else:
            _pass_on(number, first, previous[number] if again is None else again)

    try:
        for number in STOPS:
            with suppress(ValueError):
                previous[number] = signal.signal(number, handle) or signal.SIG_DFL  # None: one that is not Python's
        if previous and _obeyed:
            handle(_obeyed[0], None)
        yield
    finally:
        if noted:
            _obeyed.remove(noted)
        for number, handler in previous.items():
            signal.signal(number, handler)


def await_note(noted: Sequence[int]) -> bool:
    """Whether a signal comes into `noted` within SAME_SIGNAL seconds: one to a group comes in any order."""
    end = time.monotonic() + SAME_SIGNAL
    while not noted and time.monotonic() < end:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return bool(noted)


def act_outside_imports(act: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """For a signal's handler that raises: `act` now, or when the import has ended that this thread is in the middle of.

    Libraries catch whatever ends an import of theirs, and modules stay half-made. An import is waited for
    IMPORT_PATIENCE seconds; then comes `otherwise`, which must not raise but end the process. Uses SIGALRM.
    """
    end = time.monotonic() + IMPORT_PATIENCE

    def look(number: int, frame: Any) -> None:
        is_late = time.monotonic() > end
        if is_late or not _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(number, signal.SIG_DFL)
            (otherwise if is_late else act)()

    if _is_importing(sys._getframe()):
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS)
    else:
        act()


def _is_importing(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def follow(parent: int | Connection) -> None:
    """From now on this process ends at once when its parent has died: nothing may write beside a command given again.

    Args:
        parent: what becomes readable then.
    """

    def wait_and_end() -> None:
        wait([parent])
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
    follow(parent_process().sentinel)


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


def await_end() -> None:
    """For the last moments of a process that a signal ends: what comes at once is the same one, a later one ends it."""
    began = time.monotonic()

    signal.setitimer(signal.ITIMER_REAL, 0)  # what `act_outside_imports` may wait for is here
    for number in STOPS:
        with suppress(ValueError):
            signal.signal(number, lambda number, frame: _pass_on(number, began, signal.SIG_DFL))


def _pass_on(number: int, first: float, handler: Any) -> None:
    """Gives a signal to a handler, unless it is the same as the one that came at the time `first`."""
    if time.monotonic() - first > SAME_SIGNAL:
        signal.signal(number, handler)
        signal.raise_signal(number)
