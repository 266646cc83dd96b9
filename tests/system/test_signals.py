"""The first signal is noted; one right after it counts as the same, and a later one takes effect."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bertkit.system import signals
from bertkit.system.signals import STOPS, leave_signals_to_parent, note_signals, open_pool


@pytest.fixture(autouse=True)
def default_handlers():
    """Set the handlers of a terminal's job: a background job ignores SIGINT."""
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("other", STOPS)
def test_the_first_signal_is_noted_and_a_later_one_is_not_held_back(number, other, monkeypatch):
    now, noted = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with note_signals(noted.append):
        os.kill(os.getpid(), number)
        assert noted == [number]
        now[0] += 1.0
        os.kill(os.getpid(), other)
        now[0] += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), other)
    assert noted == [number]
    assert all(signal.getsignal(each) is signal.default_int_handler for each in STOPS)


def test_what_notes_may_raise():
    with pytest.raises(ZeroDivisionError), note_signals(lambda number: 1 / 0):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_in_another_thread_nothing_is_caught_and_nothing_fails():
    def enter():
        with note_signals(print):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is signal.default_int_handler


def test_a_pool_leaves_neither_processes_nor_threads_even_at_work():
    """An exit beside a thread that removes the pool's semaphores would leave a warning of a leak."""
    before = set(threading.enumerate())
    with open_pool(2, "spawn", leave_signals_to_parent) as pool:
        futures = [pool.submit(time.sleep, 60) for _ in range(5)]
    assert set(threading.enumerate()) == before
    assert all(future.done() for future in futures)
