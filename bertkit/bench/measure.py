"""Measurements for all benchmarks: alternating sides, their medians, rates, ratios and table, and a call's memory.

Left out: the sides, their counts and other reports, which each benchmark defines itself.
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
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig

from bertkit.model.precision import DTYPES, find_device
from bertkit.reports.tables import MISSING, Table, make_table
from bertkit.system.memory import read_memory, trim_memory
from bertkit.system.progress import Report, ignore
from bertkit.tasks.task import Task
from bertkit.training.run_dir import describe_environment

BERTKIT, REFERENCE = "bertkit", "reference"  # sides
CLEAR = Path("/proc/self/clear_refs")
MATMUL_SECONDS = 1.0  # for which large matrix products are measured


@dataclass(frozen=True)
class Timed:
    """One run of a side: its duration, and the part of its result that is kept."""

    seconds: float
    made: Any = None


@dataclass(frozen=True)
class Measurement:
    """The measurements of rounds in each of which every side ran once.

    Attributes:
        seconds: Mapping from side to the seconds of every round.
        amounts: Mapping from side to the amount done per round, in the benchmark's unit.
    """

    seconds: Mapping[str, list[float]]
    amounts: Mapping[str, float]

    @property
    def medians(self) -> dict[str, float]:
        """Return the median seconds of each side."""
        return {name: median(found) for name, found in self.seconds.items()}

    @property
    def rates(self) -> dict[str, float]:
        """Return the amount that each side does per second, from its median."""
        return {name: self.amounts[name] / middle for name, middle in self.medians.items()}

    def compare(self, other: str) -> float:
        """Return how many times as fast as another side this package is: the median of the rounds' ratios."""
        ratios = (slow / fast for slow, fast in zip(self.seconds[other], self.seconds[BERTKIT], strict=True))
        return median(ratios) * self.amounts[BERTKIT] / self.amounts[other]

    def find_fastest(self, names: Iterable[str]) -> str:
        """Return the name of the side with the smallest median among `names`."""
        return min(names, key=self.medians.__getitem__)

    def tabulate(
        self, caption: str, unit: str, heads: Sequence[str] = (), cells: Mapping[str, Sequence[str]] | None = None
    ) -> Table:
        """Return the table of the sides; `cells` holds each side's texts for further columns, with headings `heads`."""
        lines = []
        for name, rate in self.rates.items():
            ratio = MISSING if name == BERTKIT else f"{self.compare(name):.2f}"
            lines.append([name, f"{self.medians[name]:.2f}", f"{rate:,.1f}", ratio, *(cells[name] if cells else ())])
        caption = f"{caption}; ratio: the speedup of {BERTKIT}"
        return make_table(caption, ["", "seconds", f"{unit} per second", "ratio", *heads], lines)


def alternate(
    sides: Mapping[str, Callable[[], Timed]], repeats: int, report: Report
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Run every side once in each of `repeats` rounds, and return the seconds and the kept results by side."""
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
    """Time a call, and keep what `keep` returns for its result; that and freeing the result are not timed.

    Garbage collection is off during the call, as in timeit: it would charge the running side for the input of both.
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
    """Report the machine, and return its description for the results."""
    machine = describe_environment()
    named = [machine["processor"], f"{machine['instructions']}, {machine['threads']} threads", *machine["gpus"]]
    report(f"on {'; '.join(named)}; torch {machine['packages']['torch']}, commit {machine['commit']}")
    return machine


def measure_peak(call: Callable[[], Any]) -> int:
    """Return the peak bytes that a call allocates in Python and NumPy, not in torch; the call runs slower."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_growth(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the peak memory in bytes that a call adds, or None if it cannot be measured.

    On CUDA this is the device's memory, otherwise all memory of this process, as Linux reports it.
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
        CLEAR.write_text("5", encoding="ascii")  # resets the peak (VmHWM) to the current use
    except OSError:
        return None
    before = read_memory("VmRSS")
    call()
    return read_memory("VmHWM") - before


# --- Operations -------------------------------------------------------------------------------------------------------


def count_tokens(task: Task, rows: Any, batch_size: int) -> tuple[Tensor, int]:
    """Return the lengths (S,) of all sequences, without padding, and the number of labelled tokens."""
    lengths, targets = [], 0
    for batch in DataLoader(rows, batch_size, collate_fn=task.collate):
        lengths.append(batch["attention_mask"].sum(-1).flatten())
        if (labels := batch.get("labels")) is not None and labels.dim() == 2:  # (B, T)
            targets += int((labels >= 0).sum())
    return torch.cat(lengths), targets


def count_flops(config: PreTrainedConfig, lengths: Tensor, targets: int) -> float:
    """Return the floating-point operations of training on sequences of lengths (S,), with `targets` decoded tokens.

    Only matrix products count, with one multiplication and one addition each; the backward pass takes twice the
    operations of the forward pass. The pooler is counted, heads with a few classes are not.
    """
    hidden, lengths = config.hidden_size, lengths.double()
    layer = 8 * hidden**2 + 4 * hidden * config.intermediate_size  # per token: query, key, value, output; both dense
    scores = 4 * hidden * float((lengths**2).sum())  # query times key, and probabilities times value
    encoder = config.num_hidden_layers * (layer * float(lengths.sum()) + scores)
    decoder = targets * (2 * hidden**2 + 2 * hidden * config.vocab_size)
    return 3.0 * (encoder + decoder + len(lengths) * 2 * hidden**2)


def measure_matmul_rate(precision: str) -> float:
    """Return the floating-point operations per second of products of large square matrices, from the median time."""
    from torch.utils.benchmark import Timer  # looks for a CUDA toolkit, and logs what it misses

    device = find_device()
    size = 8192 if device.type == "cuda" else 2048
    one, two = torch.randn(2, size, size, device=device, dtype=DTYPES.get(precision, torch.float32))
    timer = Timer("one @ two", globals={"one": one, "two": two}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=MATMUL_SECONDS).median
