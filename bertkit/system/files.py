"""Atomic writes: a killed process never leaves a partial file; locks and checksums.

What is being written has a hidden name of its own beside the name that it will have: `.NAME.MACHINE-PID.unfinished`.
Nothing else is called so, and what a killed process has left goes when its file is written again on the same machine,
or its directory is held again (`hold_directory`).
"""

import errno
import fcntl
import json
import os
import platform
import re
import time
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

from bertkit.errors import UsageError, explain_refusal, make_printable

UNFINISHED_SUFFIX = "unfinished"
OWN_STREAM = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")  # of this process


def write_json(value: Any, path: Path) -> None:
    """Writes a JSON file whole or not at all."""
    atomic_write(json.dumps(value, indent=2, ensure_ascii=False) + "\n", path)


def atomic_write(text: str, path: Path) -> None:
    """Writes a file so that it is never there in part."""
    with atomic_open(path) as stream:
        stream.write(text)


@contextmanager
def atomic_open(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file to write that is there once all of it is; what is no ordinary file (a pipe, a device) is written to.

    So is a stream of this process (/dev/stdout), behind what is in it already, wherever it leads. Text is UTF-8.
    """
    encoding = None if mode == "wb" else "utf-8"
    if found := OWN_STREAM.fullmatch(str(path.absolute())):
        number = {"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2])
        with open(os.dup(number), mode, encoding=encoding) as stream:
            yield stream
        return
    with suppress(RuntimeError):  # a link to itself; from Python 3.13 on it is left as it is
        path = path.resolve()  # a link stays one
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
    """A file to write, and its hidden name, which the caller changes when it is whole; else it is removed again."""
    temporary = path.with_name(f".{path.name}.{name_machine()}-{os.getpid()}.{UNFINISHED_SUFFIX}")
    try:
        with temporary.open(mode, encoding=None if mode == "wb" else "utf-8") as stream:
            yield stream, temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_lost(path: Path) -> None:
    """Deletes what processes of this machine that are no more have left of a file; looks through its folder."""
    start = f".{path.name}.{name_machine()}-"
    for lost in path.parent.glob(f"{escape(start)}*.{UNFINISHED_SUFFIX}"):
        number = lost.name.removeprefix(start).removesuffix(f".{UNFINISHED_SUFFIX}")
        if number.isdecimal() and not _is_alive(int(number)):
            with suppress(OSError):  # somebody else's
                lost.unlink()


@cache
def name_machine() -> str:
    """Eight digits for this machine, or the container: where the number of a process means what it does here."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        space = ""
    return blake2b(f"{platform.node()} {space}".encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def remove_unfinished(folder: Path) -> None:
    """Deletes what was being written in a folder when a process was killed; nobody may be writing there."""
    for path in folder.glob(f".*.{UNFINISHED_SUFFIX}"):
        if path.is_file():
            path.unlink()


def flush(stream: Any) -> None:
    """What has been written is on the disk: a name must not survive a power cut that its content does not."""
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def hold_directory(output: Path, patience: float = 5.0, check: Callable[[Path], None] | None = None) -> Iterator[None]:
    """Makes a directory, unless it is there, and keeps other processes out of it; what stays empty is removed again.

    So is what a process that was killed had begun to write there.

    The system lets go of it when a process dies. Where it cannot hold any (some network disks), nothing is held.

    Args:
        patience: seconds to wait for another one that may be about to end.
        check: raises a UsageError for what may not be there; `refuse_links` by default.

    Raises:
        UsageError: another process has it, or it has what it may not have.
    """
    made = [path for path in (output, *output.parents) if not path.exists()]
    with explain_refusal(f"the directory {output}"):
        output.mkdir(parents=True, exist_ok=True)
    handle = os.open(output, os.O_RDONLY)
    _held.add(handle)
    try:
        _lock(handle, output, patience)
        (check or refuse_links)(output)
        remove_unfinished(output)
        yield
    finally:
        if handle in _held:
            _held.remove(handle)
            os.close(handle)
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def refuse_links(folder: Path, own: tuple[str, ...] = ()) -> None:
    """Check that nothing that is written in a directory goes through a link.

    The directory itself may be a link. Folders of other programs are not looked into, nor are hidden links of theirs.

    Args:
        own: how the names of folders begin that are ours.

    Raises:
        UsageError: A file or a folder is a link.
    """
    for path in folder.iterdir():
        is_own = path.name.startswith(own)
        inside = path.rglob("*") if is_own and path.is_dir() and not path.is_symlink() else ()
        checked = (path, *inside) if is_own or not path.name.startswith(".") else ()
        if link := next((each for each in checked if each.is_symlink()), None):
            raise UsageError(
                f"{make_printable(str(link))} is a link, and what it leads to would be overwritten; put a copy in its "
                "place, or delete it"
            )


# Handles of the directories that this process keeps others out of. Only a process that is forked needs to know them:
# the system ties the hold to the open file, which that one would share.
_held: set[int] = set()


def _let_go() -> None:
    """In a forked process: a directory is its parent's alone, and free as soon as that one lets go of it or dies."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def _lock(handle: int, output: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise UsageError(
                    f"{output} is in use by another process; wait for it, or name another directory with --output"
                ) from None
            time.sleep(0.1)
        except OSError:
            return


BYTES_A_READ = 1 << 20


def find_checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(BYTES_A_READ):
            checksum = zlib.crc32(content, checksum)
    return checksum


def map_in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`map` by a few threads, for what waits for the disk or lets others run."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, items))


def take_fingerprint(*parts: np.ndarray | bytes | None) -> str:
    """What tells data from others: a CRC-32 of their parts one after the other, eight hexadecimal digits."""
    found = 0
    for part in parts:
        if part is not None and len(part):
            found = zlib.crc32(part if isinstance(part, bytes) else np.ascontiguousarray(part), found)
    return f"{found:08x}"
