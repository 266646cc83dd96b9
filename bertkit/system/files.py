"""Atomic writes: a killed process never leaves a partial file; locks and checksums.

A file is written under a hidden name beside its own, `.NAME.MACHINE-PID.unfinished`, which nothing else uses. The
leftovers of a killed process are removed when the file is written again on the same machine, or when its directory is
locked again (`hold_directory`).
"""

import errno
import json
import os
import platform
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from bertkit.errors import UsageError, explain_refusal, make_printable

UNFINISHED_SUFFIX = "unfinished"
LOCK = ".lock"  # names the process that uses a directory
LOCK_PATIENCE = 5.0  # seconds to wait for the lock of a process that may be about to end
OWN_STREAM = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")  # of this process


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

    Special files (a pipe, a device) are written directly. So are streams of this process (/dev/stdout), after what they
    already contain, wherever they lead.
    """
    encoding = None if mode == "wb" else "utf-8"
    if found := OWN_STREAM.fullmatch(str(path.absolute())):
        number = {"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2])
        with open(os.dup(number), mode, encoding=encoding) as stream:
            yield stream
        return
    with suppress(RuntimeError):  # a link to itself; from Python 3.13 on, resolve() returns it unchanged
        path = path.resolve()  # so that a link remains a link
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if path.exists() and not path.is_file():
        with path.open(mode, encoding=encoding) as stream:
            yield stream
        return
    remove_lost(path)
    with open_unfinished(path, mode) as (stream, temporary):
        yield stream
        flush(stream)
        os.replace(temporary, path)


@contextmanager
def open_unfinished(path: Path, mode: Literal["w", "wb"]) -> Iterator[tuple[IO[Any], Path]]:
    """Yield a file to write and its hidden path, which the caller renames when complete; otherwise it is removed."""
    temporary = path.with_name(f".{path.name}.{name_machine()}-{os.getpid()}.{UNFINISHED_SUFFIX}")
    try:
        with temporary.open(mode, encoding=None if mode == "wb" else "utf-8") as stream:
            yield stream, temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_lost(path: Path) -> None:
    """Delete unfinished versions of a file that dead processes of this machine left in its folder."""
    start = f".{path.name}.{name_machine()}-"
    for lost in path.parent.glob(f"{escape(start)}*.{UNFINISHED_SUFFIX}"):
        number = lost.name.removeprefix(start).removesuffix(f".{UNFINISHED_SUFFIX}")
        if number.isdecimal() and not is_alive(int(number)):
            with suppress(OSError):  # another user's file
                lost.unlink()


@cache
def name_machine() -> str:
    """Return eight hexadecimal digits for this machine or container, within which process numbers are unique."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        space = ""
    return blake2b(f"{platform.node()} {space}".encode(), digest_size=4).hexdigest()


def is_alive(process: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def remove_unfinished(folder: Path) -> None:
    """Delete the unfinished files of a folder; no process may be writing there."""
    for path in folder.glob(f".*.{UNFINISHED_SUFFIX}"):
        if path.is_file():
            path.unlink()


def flush(stream: Any) -> None:
    """Flush a file to disk: after a power cut, a name must not exist without its content."""
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def hold_directory(output: Path, check: Callable[[Path], None] | None = None) -> Iterator[None]:
    """Lock a directory against other processes, creating it if necessary.

    Unfinished files of killed processes are deleted at the start, and created directories that stay empty at the end.
    The system releases the lock when a process dies. File systems without locks (some network disks) are not locked.

    Args:
        check: Raises a UsageError for content that is not allowed; `refuse_links` by default.

    Raises:
        UsageError: Another process has locked the directory, or its content is not allowed.
    """
    made = [path for path in (output, *output.parents) if not path.exists()]
    with explain_refusal(f"the directory {output}"):
        output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK, timeout=LOCK_PATIENCE, fallback_to_soft=False)
    try:
        take_lock(lock, output)
        (check or refuse_links)(output)
        remove_unfinished(output)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (output / LOCK).unlink()  # before another process can lock it
            lock.release()
        for path in made:
            with suppress(OSError):  # the directory is not empty
                path.rmdir()


def take_lock(lock: FileLock, output: Path) -> None:
    """Take the lock of a directory and write this process into its file; do nothing without locks in the file system.

    Raises:
        UsageError: Another process keeps it.
    """
    path = output / LOCK
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


def refuse_links(folder: Path, own: tuple[str, ...] = ()) -> None:
    """Check that a directory contains no link through which a file could be overwritten.

    The directory itself may be a link. The folders and the hidden links of other programs are not checked.

    Args:
        own: Prefixes of the names of our own folders.

    Raises:
        UsageError: A file or a folder is a link.
    """
    for path in folder.iterdir():
        is_own = path.name.startswith(own)
        inside = path.rglob("*") if is_own and path.is_dir() and not path.is_symlink() else ()
        checked = (path, *inside) if is_own or not path.name.startswith(".") else ()
        if link := next((each for each in checked if each.is_symlink()), None):
            raise UsageError(
                f"{make_printable(str(link))} is a link, and its target would be overwritten; replace it with a copy "
                "or delete it"
            )


BYTES_A_READ = 1 << 20


def find_checksum(path: Path) -> int:
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
