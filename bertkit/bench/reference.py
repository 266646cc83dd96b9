"""The code that this package is compared with: a file that the user brings, imported without leaving a trace."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from bertkit.errors import UsageError, join_lines


def load_module(
    path: Path, function: str, *, remedy: str, beside: Mapping[str, ModuleType] | None = None
) -> ModuleType:
    """The module that a file holds, with this function; what it imports by a name in `beside` is what stands there.

    Raises:
        UsageError: there is no such file, it cannot be imported, or it lacks the function; each with the remedy.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file; {remedy}")
    module = ModuleType(f"bertkit_bench_{path.stem}")
    try:
        with put_modules(beside or {}):
            # Not by a loader, which would write bytecode beside the file: the folder is the user's.
            exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # whatever another's file may do
        raise UsageError(f"{path} cannot be imported ({join_lines(error)}); {remedy}") from None
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{path} has no function {function}; {remedy}")
    return module


@contextmanager
def explain_failure(function: str, remedy: str) -> Iterator[None]:
    """Turn whatever a function of the reference does wrong into a UsageError."""
    try:
        yield
    except Exception as error:  # another's code
        raise UsageError(
            f"the reference's {function} fails ({type(error).__name__}: {join_lines(error)}); {remedy}"
        ) from None


@contextmanager
def put_modules(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Meanwhile an import of these names finds these modules; afterwards `sys.modules` has under them what it had."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
