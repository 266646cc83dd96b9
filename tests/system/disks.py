"""The disk of another machine, in this process; and a watch over the paths that this process opens itself."""

import os
import sys
from contextlib import contextmanager

from bertkit.system.disk import Disk, DiskServer

OPENING = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename")
watched = []  # folders
opened = []  # paths below them that were opened
asked = []  # calls of a server that are under way


class LocalDisk(Disk):
    """A disk whose server is called directly."""

    def ask(self, call, path, *arguments):
        server = object.__new__(DiskServer)  # its __init__ would change the working directory of this process
        asked.append(call)
        try:
            path = path if path.startswith("~") else os.path.join(self.folder, path)
            return getattr(server, "read" if call == "share" else call)(path, *arguments)
        finally:
            asked.pop()


def note(event, arguments):
    """Note a path below a watched folder, except in a call of a server."""
    if watched and not asked and event in OPENING and isinstance(arguments[0], str | bytes):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        opened.extend(path for folder in watched if path.startswith(f"{folder}{os.sep}"))


sys.addaudithook(note)  # it cannot be removed


@contextmanager
def watch(folder):
    """Yield the list of the paths below a folder that this process opens."""
    watched.append(str(folder))
    opened.clear()
    try:
        yield opened
    finally:
        watched.remove(str(folder))
