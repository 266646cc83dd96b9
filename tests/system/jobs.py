"""Jobs for the tests of the executor, in a module of their own: workers import it, and it imports no torch."""

import os
import signal
import sys
from dataclasses import dataclass

from bertkit.errors import UsageError
from bertkit.system.signals import Interrupted


@dataclass(frozen=True)
class Sum:
    """A job: adds its numbers to that of the data."""

    numbers: tuple[int, ...]
    data: str = ""


def add_up(job, data, tell):
    """Tell every sum."""
    value = data or 0
    for number in job.numbers:
        value += number
        tell(value)


def fail(job, data, tell):
    if job.numbers == (1,):
        raise UsageError("one is wrong; give two")
    raise KeyError("two")


def die_at_one(job, data, tell):
    """End the worker if the job's last number is 1."""
    tell("begun")
    if job.numbers[-1] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(sum(job.numbers))


def stop(job, data, tell):
    raise Interrupted("stopped", signal.SIGTERM)


def end_at_once():
    sys.exit(1)
