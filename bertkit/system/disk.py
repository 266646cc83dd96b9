"""The disk of the process that hands out jobs, for Ray workers on machines that may not share it.

That process writes a token, an empty file, into its output directory. A worker that finds the token has the same disk
and uses the same paths. Any other worker reads and writes the files through a server on the first machine, block by
block, so memory stays bounded everywhere; a run works in a mirror, a private folder for copies of the files.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from bertkit.errors import UsageError
from bertkit.system.cluster import is_client, keep_core, stay_here
from bertkit.system.files import UNFINISHED_SUFFIX, is_alive, name_machine

BLOCK = 1 << 23  # bytes of a file in one message
READERS = 8  # blocks that the server reads or writes at once
MIRROR_PREFIX = "bertkit-"


class DiskServer:
    """A Ray actor that reads and writes files for workers without this disk.

    Attributes:
        shared: Blocks in Ray's object store by path and offset, from which a machine fetches each one once.
    """

    def __init__(self, folder: str) -> None:
        with suppress(OSError):  # the server of a client's cluster may be on another machine
            os.chdir(folder)
        self.shared: dict[tuple[str, int], Any] = {}

    def holds(self, path: str) -> bool:
        """Return whether a path exists."""
        return os.path.exists(path)

    def expand(self, path: str) -> str:
        """Return the path with `~` replaced by the home of this process's user."""
        return os.path.expanduser(path)

    def list_files(self, path: str) -> dict[str, int] | None:
        """Return the sizes of the files in a folder by relative path, without hidden ones.

        The name of a file itself is empty. None means that the path does not exist.
        """
        if os.path.isfile(path):
            return {"": os.path.getsize(path)}
        if not os.path.isdir(path):
            return None
        found = {}
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if name[0] != "."]
            files = [os.path.join(folder, name) for name in names if name[0] != "."]
            found |= {os.path.relpath(file, path): os.path.getsize(file) for file in files if os.path.isfile(file)}
        return found

    def read(self, path: str, start: int, size: int = BLOCK) -> bytes:
        """Return the bytes of a file from `start`, at most `size`."""
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read(size)

    def share(self, path: str, start: int) -> list[Any]:
        """Return a reference to a block in the object store, in a list because Ray would resolve it."""
        import ray

        if (path, start) not in self.shared:
            self.shared[path, start] = ray.put(self.read(path, start))
        return [self.shared[path, start]]

    def write(self, path: str, start: int, content: bytes) -> None:
        """Write a block of a file; the first one replaces the file."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "r+b" if start else "wb") as stream:
            stream.seek(start)
            stream.write(content)


@dataclass(frozen=True)
class Disk:
    """The disk of the process that hands out jobs, as a worker reaches it.

    Attributes:
        folder: The working directory of that process.
        token: The path of the token; without one, all workers share the disk.
        server: The handle of the DiskServer.
    """

    folder: str
    token: str = ""
    server: Any = None

    def is_shared(self) -> bool:
        """Return whether this process has the same disk."""
        return not self.token or os.path.exists(self.token)

    def ask(self, call: str, *arguments: Any) -> Any:
        """Call a method of the server and return its result, or raise its error."""
        import ray

        try:
            found = keep_core(ray.get, getattr(self.server, call).remote(*arguments))
            return keep_core(ray.get, found[0]) if call == "share" else found
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading; a file that does not exist is an error of the first read."""
        return io.BufferedReader(RemoteFile(partial(self.ask, "read", str(path))), BLOCK)

    def send(self, target: str, stream: BinaryIO) -> None:
        """Write the content of a stream to a file of the disk."""
        start = 0
        while (content := stream.read(BLOCK)) or not start:
            self.ask("write", target, start, content)
            if not content:
                return
            start += len(content)


class RemoteFile(io.RawIOBase):
    """A file that is read through a function of offset and size."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self.read_block, self.place = read, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the start or from the current place."""
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        """Read bytes into the buffer and return their number."""
        content = self.read_block(self.place, len(buffer))
        buffer[: len(content)] = content
        self.place += len(content)
        return len(content)


@contextmanager
def offer_disk(ray: Any, folder: str) -> Iterator[Disk]:
    """Yield the disk of this process for the workers of a cluster.

    Args:
        folder: Where to write the token; empty if the jobs use no files.

    Raises:
        UsageError: The server is on a machine that does not have this disk.
    """
    if not folder:
        yield Disk(os.getcwd())
        return
    name = f".disk-{uuid4().hex}.{name_machine()}-{os.getpid()}.{UNFINISHED_SUFFIX}"  # removed by `hold_directory`
    token = Path(os.path.abspath(folder), name)
    token.touch()
    try:
        actor = ray.remote(DiskServer).options(max_concurrency=READERS, **stay_here(ray))
        server = actor.remote(os.getcwd())
        if is_client() and not ray.get(server.holds.remote(str(token))):
            raise UsageError(
                f"the Ray cluster {os.environ.get('RAY_ADDRESS')} cannot read the files of this machine; start the "
                "command on a machine of the cluster (ray job submit), or name an --output on a disk that all share"
            )
        yield Disk(os.getcwd(), str(token), server)
    finally:
        token.unlink(missing_ok=True)


# --- Mirrors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mirror:
    """A private folder with copies of another machine's files, each at its absolute path below `root`.

    Relative paths therefore remain as they are, and removing `root` from a text restores its absolute paths.
    """

    root: str
    disk: Disk

    def locate(self, path: str) -> str:
        """Return the path of the copy, relative if `path` is."""
        return self.root + path if os.path.isabs(path) else path

    def fetch(self, path: str, is_wanted: Callable[[str], bool] = bool, with_content: bool = True) -> str:
        """Copy a file, or the files of a folder, if the path exists, and return the path of the copy.

        Args:
            is_wanted: Chooses the files of a folder by relative path.
            with_content: Whether to copy the content; otherwise the copies are empty.
        """
        path = self.disk.ask("expand", path) if path.startswith("~") else path
        copy, sizes = self.locate(path), self.disk.ask("list_files", path)
        if sizes is not None and "" not in sizes:
            os.makedirs(copy, exist_ok=True)
        for name, size in (sizes or {}).items():
            if not name or is_wanted(name):
                source, target = (os.path.join(place, name) if name else place for place in (path, copy))
                os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
                with open(target, "wb") as stream:
                    for start in range(0, size if with_content else 0, BLOCK):
                        stream.write(self.disk.ask("share", source, start))
        return copy

    def restore(self, text: str) -> str:
        """Return the text with the paths of the other machine."""
        return text.replace(self.root, "")


@contextmanager
def open_mirror(disk: Disk) -> Iterator[Mirror]:
    """Yield a new mirror, and work in its copy of the working directory; the mirror is removed at the end."""
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    own = f"{MIRROR_PREFIX}{name_machine()}-"
    for lost in temporary.glob(f"{own}*"):
        if (process := lost.name.removeprefix(own).partition("-")[0]).isdecimal() and not is_alive(int(process)):
            shutil.rmtree(lost, ignore_errors=True)  # left by a killed worker
    before = os.getcwd()
    root = tempfile.mkdtemp(prefix=f"{own}{os.getpid()}-", dir=temporary)
    try:
        os.makedirs(root + disk.folder, exist_ok=True)
        os.chdir(root + disk.folder)
        yield Mirror(root, disk)
    finally:
        os.chdir(before)
        shutil.rmtree(root, ignore_errors=True)
