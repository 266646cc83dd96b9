"""Memory of a process on a CPU: the C library keeps blocks for the next update, and returns unused gaps.

This needs glibc and Linux; elsewhere nothing happens. Left out: the memory of accelerators, which torch manages.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
UPDATES_BETWEEN_LOOKS = 20
GROWTH = 1.25  # factor by which the memory in use grows before the heap is trimmed


class Heap:
    """A watch on the heap that trims it when it has grown.

    Batches of varying lengths leave gaps, which are most of the heap after hundreds of updates. The system has to clear
    returned pages again, so the heap is not trimmed for less growth.
    """

    def __init__(self) -> None:
        self.usual = 0  # bytes in use some updates after the heap was trimmed

    def look(self) -> None:
        """Trim the heap if it has grown enough; otherwise this takes a tenth of a millisecond."""
        used = read_memory("VmRSS")
        if not self.usual:
            self.usual = used
        elif used > GROWTH * self.usual:
            trim_memory()
            self.usual = 0


def read_memory(key: str) -> int:
    """Return this process's memory in bytes from Linux: VmRSS is the current use, VmHWM the peak; 0 if unknown."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return 1024 * int(line.split()[1])
    return 0


def keep_memory() -> None:
    """Make the C library keep the blocks that an update frees for the next one, however large.

    Otherwise it returns each large block immediately, and the system clears its pages again for the next use.
    """
    call_library("mallopt", -4, 0)  # M_MMAP_MAX: all blocks come from the heap
    call_library("mallopt", -1, -1)  # M_TRIM_THRESHOLD: never


def trim_memory() -> None:
    """Return the free pages of the heap to the system."""
    call_library("malloc_trim", 0)


def call_library(name: str, *arguments: int) -> None:
    """Call a function of glibc; do nothing with another C library."""
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)
