"""A process's memory on a CPU: the C library keeps what the next update needs, and gives back what only gaps hold.

It is glibc that is asked, and Linux; with others nothing happens. Left out: the memory of accelerators, which torch
keeps by itself.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")
UPDATES_BETWEEN_LOOKS = 20
GROWTH = 1.25  # of the memory in use, before it is trimmed


class Heap:
    """Trims the heap when it has grown: batches of ever other lengths leave gaps, most of it after hundreds of updates.

    What is handed back the system has to clear again, page by page, so it is not done for less.
    """

    def __init__(self) -> None:
        self.usual = 0  # bytes in use some updates after it was trimmed

    def look(self) -> None:
        """Trims if there is reason to; takes a tenth of a millisecond if there is none."""
        used = read_memory("VmRSS")
        if not self.usual:
            self.usual = used
        elif used > GROWTH * self.usual:
            trim_memory()
            self.usual = 0


def read_memory(key: str) -> int:
    """Bytes of this process that Linux tells under a name: VmRSS now, VmHWM the most; 0 where nobody tells."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return 1024 * int(line.split()[1])
    return 0


def keep_memory() -> None:
    """Has the C library keep the blocks that an update frees for the next one, however large.

    Otherwise it hands each large one back at once, and the system clears its pages anew when it is needed again.
    """
    call_library("mallopt", -4, 0)  # M_MMAP_MAX: all are of the heap
    call_library("mallopt", -1, -1)  # M_TRIM_THRESHOLD: never


def restore_memory() -> None:
    """Has it do again what it does by itself once large blocks have come and gone: for what is measured beside us."""
    call_library("mallopt", -4, 65_536)  # M_MMAP_MAX: as it begins
    call_library("mallopt", -3, 32 << 20)  # M_MMAP_THRESHOLD: the highest that it chooses
    call_library("mallopt", -1, 64 << 20)  # M_TRIM_THRESHOLD: twice that
    trim_memory()


def trim_memory() -> None:
    """Hands the free pages of the heap back to the system."""
    call_library("malloc_trim", 0)


def call_library(name: str, *arguments: int) -> None:
    """Call a function of glibc; nothing happens with another C library."""
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)
