"""Load the code that this package is compared with: a file of the user's, imported without side effects on disk."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from bertkit.errors import UsageError, join_lines


def load_module(
    path: Path, function: str, *, remedy: str, beside: Mapping[str, ModuleType] | None = None
) -> ModuleType:
    """Import a file as a module, and check that it has the function.

    Args:
        remedy: The end of every error message.
        beside: Modules that replace the file's imports of these names.

    Raises:
        UsageError: The file does not exist, cannot be imported, or lacks the function.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file; {remedy}")
    module = ModuleType(f"bertkit_bench_{path.stem}")
    try:
        with put_modules(beside or {}):
            # A loader would write bytecode beside the file, in the user's folder.
            exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # the file is not ours and may raise anything
        raise UsageError(f"{path} cannot be imported ({join_lines(error)}); {remedy}") from None
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{path} has no function {function}; {remedy}")
    return module


@contextmanager
def explain_failure(function: str, remedy: str) -> Iterator[None]:
    """Turn any error of a function of the reference into a UsageError."""
    try:
        yield
    except Exception as error:  # the code is not ours and may raise anything
        raise UsageError(
            f"the reference's {function} fails ({type(error).__name__}: {join_lines(error)}); {remedy}"
        ) from None


@contextmanager
def put_modules(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Make imports of these names find these modules within the context, and restore `sys.modules` afterwards."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
