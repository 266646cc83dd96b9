"""Reporting the progress of long work."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def ignore(*_: Any) -> None:
    """Ignore all arguments; the default for callbacks."""


Report = Callable[[str], None]  # receives one line for the user
SECONDS_OF_SILENCE = 15  # minimum before the first line on long work; it doubles with each line


def describe_duration(seconds: float) -> str:
    """Format seconds for a person: 42 s, 5 min 40 s, 3 h 12 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class ShareDone:
    """Reports in words which share of long work is done, and the time left.

    Args:
        verb: The verb for a part that is done, such as "predicted".
    """

    def __init__(self, report: Report, verb: str) -> None:
        self.report, self.verb = report, verb
        self.first = self.begun = self.said = 0.0
        self.silence = SECONDS_OF_SILENCE

    def note(self, done: float, total: float) -> None:
        """Note how much is done; the first part is not timed, because it takes longer than the others."""
        now = time.monotonic()
        if not self.begun:
            self.first, self.begun, self.said = done, now, now
        elif now - self.said >= self.silence:
            self.said, self.silence = now, 2 * self.silence
            left = (now - self.begun) / (done - self.first) * (total - done)
            self.report(f"  {done / total:.0%} {self.verb}, {describe_duration(left)} left")


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


@contextmanager
def show_bar() -> Iterator[Callable[[int, int, Mapping[str, float]], None]]:
    """Yield a function that moves one progress bar: the amount done, the whole amount, and the latest losses."""
    from accelerate.utils import tqdm

    with tqdm(total=0) as bar:

        def move(done: int, total: int, losses: Mapping[str, float]) -> None:
            if (done, total) < (bar.n, bar.total) or total != bar.total:  # another training has begun
                bar.reset(total)
            bar.update(done - bar.n)
            bar.set_postfix({name: value for name, value in losses.items() if name.endswith("loss")})

        yield move
