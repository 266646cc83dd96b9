"""What every bench measures with: seconds of sides that take turns, their ratio, and the memory of a call.

Left out: what is measured, and rates, which each bench has in units of its own.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bertkit.system.memory import read_memory, trim_memory
from bertkit.system.progress import ignore

if TYPE_CHECKING:
    import torch

BERTKIT, REFERENCE = "bertkit", "reference"  # sides
CLEAR = Path("/proc/self/clear_refs")


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    repeats: int,
    report: Callable[[str], None] = ignore,
    take: Callable[[str, Any], None] = ignore,
    measure: Callable[[Callable[[], Any], Callable[[Any], None]], float] | None = None,
) -> dict[str, list[float]]:
    """Side -> its seconds in each of `repeats` rounds; in a round every side runs once.

    `take` is given a side's name and what it made, each time, off the clock. `measure` is `measure_seconds`, unless
    sides have a clock of their own.
    """
    measure = measure or measure_seconds
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1, repeats + 1):
        for name, call in sides.items():
            seconds[name].append(measure(call, lambda made, name=name: take(name, made)))
        figures = ", ".join(f"{name} {found[-1]:.2f} s" for name, found in seconds.items())
        report(f"  round {number} of {repeats}: {figures}")
    return seconds


def measure_seconds(call: Callable[[], Any], take: Callable[[Any], None] = ignore) -> float:
    """How long a call takes; what it made is given to `take` and freed off the clock.

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
    take(made)
    return seconds


def measure_peak(call: Callable[[], Any]) -> int:
    """The most bytes at a time that a call itself asked for: Python's and numpy's, not torch's. It runs slower."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_growth(call: Callable[[], Any], device: "torch.device") -> int | None:
    """The most bytes at a time that a call adds to what is there; None where that cannot be seen.

    Of an accelerator its own memory, else all memory of this process, which Linux tells.
    """
    import torch

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


def compare(seconds: Mapping[str, Sequence[float]], side: str = BERTKIT) -> float:
    """How many times as fast as the reference a side is: the median of the rounds' ratios."""
    return median(slow / fast for slow, fast in zip(seconds[REFERENCE], seconds[side], strict=True))
