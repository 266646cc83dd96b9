"""Measure sides that take turns and the memory of a call, and write what was found as Markdown rows.

A bench fills a `Record` as it goes, so one that is stopped has the rounds so far.
"""

import ctypes
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

BERTKIT = "bertkit"  # a side
CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def say(line: str) -> None:
    """Print a line at once, because a log may be read while the bench runs."""
    print(line, flush=True)


@dataclass
class Record:
    """The figures of a bench so far.

    Attributes:
        end: `time.monotonic()` after which no round begins that may not end by then.
        facts: Single figures, and others that are only for the JSON.
        rates: The rates of each side in every round so far, by title.
        columns: Further columns of a title's table: heading -> side -> text.
        tables: Tables without sides, by title: the headings, then the rows.
        failure: Why the figures are incomplete or wrong.
    """

    command: str
    environment: Mapping[str, Any]
    end: float
    facts: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    columns: dict[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    failure: str = ""

    def alternate(self, title: str, sides: Mapping[str, Callable[[], float]], rounds: int) -> None:
        """Run every side once in each round while there is time; a call of a side returns its rate per second."""
        found, longest = self.rates.setdefault(title, {}), 0.0
        for number in range(1, rounds + 1):
            start = time.monotonic()
            if number > 1 and start + longest > self.end:
                say(f"  no time for round {number} of {rounds} within --minutes")
                return
            for name, run in sides.items():
                found.setdefault(name, []).append(run())
            longest = max(longest, time.monotonic() - start)
            rates = ", ".join(f"{name} {rates[-1]:.1f}" for name, rates in found.items())
            say(f"  round {number} of {rounds}, per second: {rates}")


def tabulate(rates: Mapping[str, list[float]], columns: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Return the headings and the row of each side that has run."""
    table = [["side", "per second, median (range)", f"{BERTKIT} is", *columns]]
    for name, own in rates.items():
        pairs = zip(rates[BERTKIT], own, strict=False)  # a round may be incomplete
        ratios = [ours / theirs for ours, theirs in pairs if theirs and name != BERTKIT]
        compared = f"{median(ratios):.2f} times as fast" if ratios else ""
        rate = f"{median(own):,.1f} ({min(own):,.1f} to {max(own):,.1f})"
        table.append([name, rate, compared, *(column.get(name, "") for column in columns.values())])
    return table


def format_rows(record: Record) -> list[str]:
    """Return the Markdown of a record: the machine, the tables and the single figures."""
    machine = record.environment
    packages = ", ".join(f"{name} {machine['packages'][name]}" for name in ("torch", "transformers"))
    device = "; ".join(machine["gpus"]) or f"{machine['processor']}, {machine['threads']} threads"
    lines = [f"`{record.command}`: {device}; {packages}; commit {str(machine['commit'])[:7]}."]
    lines += [f"Failed: {record.failure}."] if record.failure else []
    tables = {title: tabulate(rates, record.columns.get(title, {})) for title, rates in record.rates.items()}
    for title, table in (tables | record.tables).items():
        lines += ["", f"{title}:", "", *format_table(table)]
    facts = [f"{key} {fact:.4g}" for key, fact in record.facts.items() if isinstance(fact, int | float)]
    return [*lines, "", "; ".join(facts)]


def format_table(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the Markdown of a table; the first row has its headings."""
    heads, *body = table
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *body)]


def time_call(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, without those of freeing its result.

    Garbage collection is off during the call, as in timeit: it would charge the running side for the input of all.
    """
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        made = call()
        seconds = time.perf_counter() - start
    finally:
        gc.enable()
    del made
    return seconds


def read_memory(key: str) -> int:
    """Return this process's memory in bytes from Linux: VmRSS is the current use, VmHWM the peak."""
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text(encoding="ascii"))
    return 1024 * int(found[1])


def measure_growth(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak memory in bytes that a call adds: the device's on CUDA, else this process's on Linux."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5", encoding="ascii")  # resets the peak (VmHWM) to the current use
    before = read_memory("VmRSS")
    call()
    return read_memory("VmHWM") - before
