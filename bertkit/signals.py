"""SIGTERM and Ctrl-C: the first one is noted, so that what runs comes to its own end; a later one is not held back.

Some senders send a signal twice at once: `timeout` to its child and to the group, `torchrun` beside the terminal. That
is one.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds after the first one in which others are the same


@contextmanager
def note_signals(note: Callable[[int], None], again: Any = None) -> Iterator[None]:
    """In this context `note` gets the number of the first signal, wherever the main thread is.

    Outside of the main thread, where signals cannot be caught, nothing happens.

    Args:
        again: the handler of a later one; None: the one that there was before.
    """
    previous: dict[int, Any] = {}
    first = None

    def handle(number: int, frame: Any) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            note(number)
        else:
            _pass_on(number, first, previous[number] if again is None else again)

    try:
        for number in STOPS:
            with suppress(ValueError):
                previous[number] = signal.signal(number, handle)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def await_end() -> None:
    """For the last moments of a process that a signal ends: what comes at once is the same one, a later one ends it."""
    began = time.monotonic()

    for number in STOPS:
        with suppress(ValueError):
            signal.signal(number, lambda number, frame: _pass_on(number, began, signal.SIG_DFL))


def _pass_on(number: int, first: float, handler: Any) -> None:
    """Gives a signal to a handler, unless it is the same as the one that came at the time `first`."""
    if time.monotonic() - first > SAME:
        signal.signal(number, handler)
        signal.raise_signal(number)
