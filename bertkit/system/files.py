"""Files that are there whole or not at all, whenever a process is killed.

What is being written has a hidden name of its own beside the name that it will have: `.NAME.MACHINE-PID.unfinished`.
Nothing else is called so, and what a killed process has left goes when its file is written again on the same machine,
or its directory is held again (`bertkit.training.run_dir`).
"""

import errno
import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

SUFFIX = "unfinished"
STREAM = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")  # of this process


def write_json(value: Any, path: Path) -> None:
    """Writes a JSON file whole or not at all."""
    write_whole(json.dumps(value, indent=2, ensure_ascii=False) + "\n", path)


def write_whole(text: str, path: Path) -> None:
    """Writes a file so that it is never there in part."""
    with open_whole(path) as stream:
        stream.write(text)


@contextmanager
def open_whole(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file to write that is there once all of it is; what is no ordinary file (a pipe, a device) is written to.

    So is a stream of this process (/dev/stdout), behind what is in it already, wherever it leads. Text is UTF-8.
    """
    encoding = None if mode == "wb" else "utf-8"
    if found := STREAM.fullmatch(str(path.absolute())):
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
    temporary = path.with_name(f".{path.name}.{name_machine()}-{os.getpid()}.{SUFFIX}")
    try:
        with temporary.open(mode, encoding=None if mode == "wb" else "utf-8") as stream:
            yield stream, temporary
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_lost(path: Path) -> None:
    """Deletes what processes of this machine that are no more have left of a file; looks through its folder."""
    start = f".{path.name}.{name_machine()}-"
    for lost in path.parent.glob(f"{escape(start)}*.{SUFFIX}"):
        number = lost.name.removeprefix(start).removesuffix(f".{SUFFIX}")
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
    for path in folder.glob(f".*.{SUFFIX}"):
        if path.is_file():
            path.unlink()


def flush(stream: Any) -> None:
    """What has been written is on the disk: a name must not survive a power cut that its content does not."""
    stream.flush()
    os.fsync(stream.fileno())
