"""`python -m tests.elsewhere COMMAND …`: a command of bertkit as on a system that is not Linux.

Only the modules of bertkit lack the modules and names that only POSIX systems have, and processes
can only be spawned. Left out: paths, line ends and locks of such a system.
"""

import builtins
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

LACKING = ("fcntl", "grp", "pwd", "resource", "termios")  # modules
HIDDEN = {  # module -> its names that Windows lacks
    "os": ("fork", "getpgid", "getuid", "killpg", "sched_getaffinity", "setsid", "statvfs"),
    "signal": ("SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer", "sigtimedwait"),
    "sys": (),
    "multiprocessing": (),
}
import_module = builtins.__import__


class Elsewhere(ModuleType):
    """A module without some of its names."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.module, self.hidden = module, HIDDEN[module.__name__]

    def __getattr__(self, name: str) -> Any:
        """Return a value of the module that is not hidden."""
        if name in self.hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if (self.__name__, name) == ("sys", "platform"):
            return "win32"
        if (self.__name__, name) == ("multiprocessing", "get_context"):
            return spawn
        return getattr(self.module, name)


def spawn(method: str | None = None) -> Any:
    """Return the context of spawned processes, and refuse every other."""
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context("spawn")


def import_elsewhere(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import a module as `__import__` does; bertkit's modules get what there is elsewhere."""
    module = import_module(name, globals, locals, fromlist, level)
    importer = str((globals or {}).get("__name__", "")).partition(".")[0]
    if importer != "bertkit" or level:
        return module
    if name in LACKING:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return Elsewhere(module) if name in HIDDEN else module


def main() -> None:
    """Run the command line with the names hidden."""
    for module in (os, signal):
        missing = set(HIDDEN[module.__name__]).difference(dir(module))
        assert not missing, f"{module.__name__} has no {missing}"
    multiprocessing.set_start_method("spawn")
    from bertkit import cli

    cli.main()


if __name__ in ("__main__", "__mp_main__"):  # the latter in spawned processes
    builtins.__import__ = import_elsewhere
if __name__ == "__main__":
    main()
