"""Durations in words, and the wall-clock time of a command over all of its starts."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
import psutil

from bertkit.errors import UsageError, explain_refusal
from bertkit.system.files import write_json

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION_PART = r"\s*(\d+(?:\.\d+)?)\s*([smhd])"
RECORDED_EVERY = 1.0  # seconds


class TimeUsed(msgspec.Struct):
    """The content of a clock's file: the seconds used so far."""

    seconds: float


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 20m, 1.5h or 1h30m.

    Raises:
        UsageError: The text is not such a duration, or it is zero.
    """
    words = text.strip().lower()
    seconds = sum(float(number) * UNIT_SECONDS[unit] for number, unit in re.findall(DURATION_PART, words))
    if not re.fullmatch(f"(?:{DURATION_PART})+", words) or not 0 < seconds < 1e9:
        raise UsageError(f"{text[:40]!r} is not a duration; write for example 90s, 20m, 1.5h or 1h30m")
    return seconds


def find_start() -> float:
    """Return the time of the command's start, in seconds since the epoch."""
    process = psutil.Process()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        process = process.parent() or process
    return process.create_time()


class Clock:
    """The time that a command has used, from the start of this process, and in earlier starts.

    Args:
        limit: Seconds that the command may take.
        begun: `time.monotonic()` at its start; None: the start of this process, or of the torchrun that started it.
    """

    def __init__(self, limit: float, begun: float | None = None) -> None:
        self.limit = limit
        self.begun = time.monotonic() - (time.time() - find_start()) if begun is None else begun
        self.earlier = 0.0

    @property
    def used(self) -> float:
        """Return the seconds used in all starts."""
        return self.earlier + time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Return the seconds left; negative if the time is over."""
        return self.limit - self.used

    @contextmanager
    def keep(self, path: Path) -> Iterator[None]:
        """Add the time of earlier starts, and record the time used, so that a kill loses none of it."""
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            self.earlier = msgspec.json.decode(path.read_bytes(), type=TimeUsed).seconds + RECORDED_EVERY
        over = Event()

        def record() -> None:
            while not over.wait(RECORDED_EVERY):
                with suppress(OSError):  # a full disk stops the training itself
                    write_json({"seconds": round(self.used, 1)}, path)

        with explain_refusal(f"the directory {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json({"seconds": round(self.used, 1)}, path)
        thread = Thread(target=record, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
