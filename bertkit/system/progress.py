"""Reporting the progress of long work."""

from collections.abc import Callable
from typing import Any


def ignore(*_: Any) -> None:
    """Ignore all arguments; the default for callbacks."""


Report = Callable[[str], None]  # receives one line for the user


def describe_duration(seconds: float) -> str:
    """Format seconds for a person: 42 s, 5 min 40 s, 3 h 12 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
