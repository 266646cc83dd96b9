"""What every bench measures with: sides that take turns, their medians, rates, ratios and table, and a call's memory.

Left out: what the sides are, what is counted of them, and what is reported besides, which each bench says itself.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bertkit.reports.tables import MISSING, Table, make_table
from bertkit.system.memory import read_memory, trim_memory
from bertkit.system.progress import Report, ignore
from bertkit.training.run_dir import describe_environment

BERTKIT, REFERENCE = "bertkit", "reference"  # sides
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Timed:
    """One run of a side: how long it took, and what is kept of what it made."""

    seconds: float
    made: Any = None


@dataclass(frozen=True)
class Measurement:
    """What sides did in rounds in each of which every side ran once.

    seconds: side -> of every round. amounts: side -> what it did in each round, counted in the bench's unit.
    """

    seconds: Mapping[str, list[float]]
    amounts: Mapping[str, float]

    @property
    def medians(self) -> dict[str, float]:
        """Return the median seconds of each side."""
        return {name: median(found) for name, found in self.seconds.items()}

    @property
    def rates(self) -> dict[str, float]:
        """Return what each side did in a second, by its median."""
        return {name: self.amounts[name] / middle for name, middle in self.medians.items()}

    def compare(self, other: str) -> float:
        """Return how many times as fast as another side this package is: the median of the rounds' ratios."""
        ratios = (slow / fast for slow, fast in zip(self.seconds[other], self.seconds[BERTKIT], strict=True))
        return median(ratios) * self.amounts[BERTKIT] / self.amounts[other]

    def find_fastest(self, names: Iterable[str]) -> str:
        """Return that of some sides whose median is least."""
        return min(names, key=self.medians.__getitem__)

    def tabulate(
        self, caption: str, unit: str, heads: Sequence[str] = (), cells: Mapping[str, Sequence[str]] | None = None
    ) -> Table:
        """Return the table of the sides; `cells` holds what each side has in further columns, under `heads`."""
        lines = []
        for name, rate in self.rates.items():
            ratio = MISSING if name == BERTKIT else f"{self.compare(name):.2f}"
            lines.append([name, f"{self.medians[name]:.2f}", f"{rate:,.1f}", ratio, *(cells[name] if cells else ())])
        caption = f"{caption}; ratio: how many times as fast {BERTKIT} is"
        return make_table(caption, ["", "seconds", f"{unit} a second", "ratio", *heads], lines)


def alternate(
    sides: Mapping[str, Callable[[], Timed]], repeats: int, report: Report
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Run every side once in each of `repeats` rounds; return side -> its seconds, and side -> what was kept."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    made: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(1, repeats + 1):
        for name, run in sides.items():
            timed = run()
            seconds[name].append(timed.seconds)
            made[name].append(timed.made)
        figures = ", ".join(f"{name} {found[-1]:.2f} s" for name, found in seconds.items())
        report(f"  round {number} of {repeats}: {figures}")
    return seconds, made


def time_call(call: Callable[[], Any], keep: Callable[[Any], Any] = ignore) -> Timed:
    """Return how long a call takes, and what `keep` makes of its result, which is freed; both off the clock.

    Garbage collection is off meanwhile, as in timeit: it would bill the side that runs for the input of both.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        made = call()
        seconds = time.perf_counter() - start
    finally:
        if was_on:
            gc.enable()
    return Timed(seconds, keep(made))


def note_machine(report: Report) -> dict[str, Any]:
    """Report what the figures are measured on, and return it as the results hold it."""
    machine = describe_environment()
    named = [machine["processor"], f"{machine['instructions']}, {machine['threads']} threads", *machine["gpus"]]
    report(f"on {'; '.join(named)}; torch {machine['packages']['torch']}, commit {machine['commit']}")
    return machine


def measure_peak(call: Callable[[], Any]) -> int:
    """The most bytes at a time that a call itself asked for: Python's and numpy's, not torch's. It runs slower."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_growth(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes at a time that a call adds to what is there; None where that cannot be seen.

    Of an accelerator its own memory, else all memory of this process, which Linux tells.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    trim_memory()
    try:
        CLEAR.write_text("5", encoding="ascii")  # the most so far is what it is now
    except OSError:
        return None
    before = read_memory("VmRSS")
    call()
    return read_memory("VmHWM") - before
