"""Atomic writes: a killed process never leaves a partial file; locks and checksums.

A file is written under a hidden name beside its own, `.NAME.TOKEN.unfinished`, which nothing else uses. The
leftovers of a killed process are removed when their directory is locked again (`hold_directory`), those among cached
features by a later run, and others by nobody.
"""

import json
import os
import platform
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from bertkit.errors import UsageError, as_usage_error

UNFINISHED_SUFFIX = "unfinished"
LOCK = ".lock"  # names the process that uses a directory
LOCK_PATIENCE = 5.0  # seconds to wait for the lock of a process that may be about to end
BYTES_A_READ = 1 << 20


def write_json(value: Any, path: Path) -> None:
    """Write a JSON file atomically."""
    atomic_write(json.dumps(value, indent=2, ensure_ascii=False) + "\n", path)


def atomic_write(text: str, path: Path) -> None:
    """Write a text file atomically."""
    with atomic_open(path) as stream:
        stream.write(text)


@contextmanager
def atomic_open(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that appears under its name only when it is complete; text is UTF-8.

    Special files (a pipe, a device, /dev/stdout on a terminal) are written directly.
    """
    if path.exists() and not path.is_file():
        with path.open(mode, encoding=None if mode == "wb" else "utf-8") as stream:
            yield stream
        return
    path = path.resolve()  # a link remains a link
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.{UNFINISHED_SUFFIX}")
    try:
        with temporary.open(mode, encoding=None if mode == "wb" else "utf-8") as stream:
            yield stream
            flush(stream)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path, older: float = 0.0) -> None:
    """Delete the unfinished files in a folder and below, which no process may be writing.

    Args:
        older: Seconds since they were last written.
    """
    for path in folder.rglob(f".*.{UNFINISHED_SUFFIX}"):
        if path.is_file() and time.time() - path.stat().st_mtime >= older:
            path.unlink(missing_ok=True)


def flush(stream: Any) -> None:
    """Flush a file to disk: after a power cut, a name must not exist without its content."""
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def hold_directory(output: Path) -> Iterator[None]:
    """Lock a directory against other processes, creating it if necessary.

    Unfinished files of killed processes are deleted at the start, and created directories that stay empty at the end.
    The system releases the lock when a process dies. File systems without locks (some network disks) are not locked.
    """
    made = [path for path in (output, *output.parents) if not path.exists()]
    with as_usage_error(f"the directory {output}"):
        output.mkdir(parents=True, exist_ok=True)
    path = output / LOCK
    lock = FileLock(path, timeout=LOCK_PATIENCE, fallback_to_soft=False)
    try:
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    except Timeout:
        holder = path.read_text(encoding="utf-8") or "another process"
        raise UsageError(
            f"{output} is in use by {holder}; wait for it, or name another directory with --output"
        ) from None
    except OSError:  # the file system has no locks, or a later write tells what it lacks
        pass
    try:
        remove_unfinished(output)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink()  # before another process can lock it
            lock.release()
        for path in made:
            with suppress(OSError):  # the directory is not empty
                path.rmdir()


def check_empty(output: Path, kind: str, *known: str) -> None:
    """Check that a directory, if there is one, holds nothing that a command of this kind has not made.

    A command that is killed right after its start may leave hidden files.

    Args:
        kind: The thing that the directory could hold, such as "run".
        known: Names of files and folders that may be there.
    """
    with as_usage_error(f"the directory {output}", "name another directory with --output"):
        names = [path.name for path in output.iterdir()] if output.exists() else []
    if any(not name.startswith(".") and name not in known for name in names):
        raise UsageError(f"{output} is not empty and holds no {kind}; name another directory with --output")


def compute_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(BYTES_A_READ):
            checksum = zlib.crc32(content, checksum)
    return checksum


def map_in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Map a function over items in four threads, for work that waits for the disk or releases the GIL."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, items))


def take_fingerprint(*parts: np.ndarray | bytes | None) -> str:
    """Return a fingerprint of data: the CRC-32 of its parts in order, eight hexadecimal digits."""
    found = 0
    for part in parts:
        if part is not None and len(part):
            found = zlib.crc32(part if isinstance(part, bytes) else np.ascontiguousarray(part), found)
    return f"{found:08x}"
