"""The time of `--budget`, and how much of it is left; it imports no torch, so that a mistake is reported soon."""

import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from bertkit.errors import UsageError, as_usage_error
from bertkit.system.files import write_json
from bertkit.training.run_dir import read_record

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION_PART = r"\s*(\d+(?:\.\d+)?)\s*([smhd])"
RECORDED_EVERY = 1.0  # seconds between two records of the time used


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 20m, 1.5h or 1h30m."""
    words = text.strip().lower()
    seconds = sum(float(number) * UNIT_SECONDS[unit] for number, unit in re.findall(DURATION_PART, words))
    if not re.fullmatch(f"(?:{DURATION_PART})+", words) or not 0 < seconds < 1e9:
        raise UsageError(f"{text[:40]!r} is not a duration; write for example 90s, 20m, 1.5h or 1h30m")
    return seconds


class Clock:
    """The time that a command has left, also if it is started again.

    Args:
        limit: Seconds that all of its starts may take.
        begun: `time.monotonic()` at its start.
    """

    def __init__(self, limit: float, begun: float) -> None:
        self.limit, self.begun, self.earlier = limit, begun, 0.0

    @classmethod
    def make(cls, budget: str, given: Mapping[str, Any], begun: float) -> "Clock":
        """Return the clock of a budget, unless a person has given the number of updates too."""
        if "max_steps" in given.get("train", {}):
            raise UsageError("--budget decides the number of updates; leave out train.max_steps (or --steps)")
        return cls(parse_duration(budget), begun)

    @property
    def left(self) -> float:
        """Return the seconds left; negative if the time is over."""
        return self.limit - self.earlier - (time.monotonic() - self.begun)

    @contextmanager
    def keep(self, path: Path) -> Iterator[None]:
        """Add the time of earlier starts, and record the time used, so that a kill loses none of it."""
        with suppress(OSError, ValueError):
            self.earlier = read_record(path, float) + RECORDED_EVERY
        with as_usage_error(f"the directory {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        over = Event()

        def record() -> None:
            while not over.wait(RECORDED_EVERY):
                with suppress(OSError):  # a full disk stops the training itself
                    write_json(round(self.limit - self.left, 1), path)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(record)
            try:
                yield
            finally:
                over.set()
