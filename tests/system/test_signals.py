"""The first signal to stop is noted; what comes at once is the same one, and a later one is not held back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from bertkit.system import signals
from bertkit.system.signals import STOPS, note_signals


@pytest.fixture(autouse=True)
def default_handlers():
    """Of a terminal: a background job has SIGINT ignored."""
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


def test_what_a_later_one_does_can_be_chosen(monkeypatch):
    now, noted, later = [0.0], [], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with note_signals(noted.append, again=lambda number, frame: later.append(number)):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 0.6
    assert (noted, later) == ([signal.SIGTERM], [signal.SIGTERM])


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("later", STOPS)
def test_a_process_that_a_signal_ends_takes_the_same_one_no_second_time(number, later):
    """Not even in its last moments; one that comes a second later ends it all the same."""
    code = f"""
import atexit, os, sys, time
from bertkit import cli
from bertkit.system import signals

def linger():
    os.kill(os.getpid(), {int(later)})
    print("lingering", flush=True)
    if len(sys.argv) > 1:
        time.sleep(signals.SAME_SIGNAL + 0.1)
        os.kill(os.getpid(), {int(later)})
    print("done", flush=True)

atexit.register(linger)
cli.app = lambda **options: os.kill(os.getpid(), {int(number)})
cli.main()
"""
    for late, status, printed in (([], 128 + number, "lingering\ndone\n"), (["late"], -later, "lingering\n")):
        done = subprocess.run([sys.executable, "-c", code, *late], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, printed)
        assert done.stderr == "bertkit: stopped; what is finished is kept, and the same command goes on\n"


def test_what_notes_may_raise(monkeypatch):
    def note(number):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), note_signals(note):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_one_whose_exit_was_lost_is_noted_by_what_comes_next():
    """As that of a handler that Python calls in a destructor: it prints the exception, and goes on."""
    noted = []

    class Careless:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    def leave(number):
        noted.append(number)
        raise SystemExit(number)

    with note_signals(leave):
        before, sys.unraisablehook = sys.unraisablehook, lambda _: None
        Careless()
        sys.unraisablehook = before
        with note_signals(lambda number: noted.append(-number)):
            assert noted == [signal.SIGTERM, -signal.SIGTERM]
    with note_signals(noted.append):
        assert len(noted) == 2, "that one has been obeyed"


def test_a_handler_that_is_not_pythons_is_no_obstacle(monkeypatch):
    """`signal.signal` gives None for one that a C library has set."""
    set_handler = signal.signal
    with monkeypatch.context() as patch:
        patch.setattr(signals.signal, "signal", lambda *given: set_handler(*given) and None)
        with note_signals(lambda number: None):
            patch.undo()
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in STOPS)


def test_in_another_thread_nothing_is_caught_and_nothing_fails():
    entered = []

    def enter():
        with note_signals(entered.append):
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]
