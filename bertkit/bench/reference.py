"""The code that this package is compared with: a file that the user brings, imported without leaving a trace."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from bertkit.errors import UsageError, join_lines


def load_module(path: Path, *functions: str, remedy: str, beside: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """The module that a file holds, with these functions; what it imports by a name in `beside` is what stands there.

    Raises:
        UsageError: there is no such file, it cannot be imported, or it lacks a function; each with the remedy.
    """
    if not path.is_file():
        raise UsageError(f"{path} is no file; {remedy}")
    loader = SourceFileLoader(f"bertkit_bench_{path.stem}", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    try:
        with put_modules(beside or {}), write_no_bytecode():
            loader.exec_module(module)
    except Exception as error:  # whatever another's file may do
        raise UsageError(f"{path} cannot be imported ({join_lines(error)}); {remedy}") from None
    for name in functions:
        if not callable(getattr(module, name, None)):
            raise UsageError(f"{path} has no function {name}; {remedy}")
    return module


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


@contextmanager
def write_no_bytecode() -> Iterator[None]:
    """Meanwhile an import writes nothing beside the file that it reads: the folder is the user's."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
