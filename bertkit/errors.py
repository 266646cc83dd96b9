"""`UsageError`, the exception for mistakes the user can fix, and the translation of library and system errors into it.

Everything below the command line raises it with a one-line message that says what was got, what was expected and the
next step; `bertkit.cli` prints that line and exits with code 2. Any function may raise it, so that docstrings name only
other exceptions. A bug stays an ordinary exception with a traceback.
"""

import errno
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_MESSAGE = 500  # characters of a library's message
LONGEST_REASON = 300  # characters of why one of many runs or workers has failed
# HTTP libraries; huggingface_hub has switched between them more than once.
TRANSPORTS = ("aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")

# The name of a file while it is being written (`bertkit.system.files`).
UNFINISHED = re.compile(r"\.([^/]+)\.[0-9a-f]{16}\.unfinished$")
DENIED = "change its permissions or those of the folders above it, or name another path"
PATHS = {  # errno of an unusable path -> the next step
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP), "name another path"),
}
# State of a disk, next step, errno codes, and message fragments. The fragments match errors without an errno, raised by
# libraries that write files with their own code (torch, safetensors).
DISKS = (
    (
        "read-only",
        "make it writable, and the same command continues, or name another path",
        (errno.EROFS,),
        ("Read-only file system",),
    ),
    (
        "failing",
        "repair or replace it, and the same command continues from what is finished",
        (errno.EIO, errno.ESTALE),
        ("Input/output error",),
    ),
    (
        "full",
        "free some space and run the command again",
        (errno.ENOSPC, errno.EFBIG, errno.EDQUOT),
        (
            "No space left",
            "File too large",
            "inline_container",
            "PytorchStreamWriter",
            "iostream error",
            "quota exceeded",
        ),
    ),
)


class BertkitWarning(UserWarning):
    """Something to know about a call in Python that has done what it was asked for."""


class UsageError(ValueError):
    """A wrong file, option, recipe or text; the message is one line that names the problem and the remedy."""


def raise_first(troubles: Mapping[str, object]) -> None:
    """Refuse by the first message whose condition is true."""
    for message, is_there in troubles.items():
        if is_there:
            raise UsageError(message)


@contextmanager
def explain_missing(what: str, extra: str) -> Iterator[None]:
    """Convert the ImportError of an extra's package into a UsageError that says how to install it.

    Args:
        what: The beginning of the message.
    """
    try:
        yield
    except ImportError:  # the name bertkit is not on PyPI
        raise UsageError(f"{what}; run pip install -e '.[{extra}]' in the checkout of bertkit") from None


@contextmanager
def locate_refusal(where: str) -> Iterator[None]:
    """Begin the message of a UsageError with the file, directory or table that it is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


@contextmanager
def as_usage_error(what: str, remedy: str = "") -> Iterator[None]:
    """Convert a library error, a system error or a broken download into a UsageError about `what`.

    Args:
        remedy: The next step, replacing the default of this module.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if broken := find_broken_download(error):
            raise UsageError(
                f"{what} could not be downloaded from the Hub ({type(broken).__name__}: {join_lines(broken)[:160]}); "
                "the same command tries again and keeps what has been downloaded"
            ) from None
        if line := explain_os_error(error, what, remedy):
            raise UsageError(line) from None
        from huggingface_hub.errors import StrictDataclassError
        from msgspec import MsgspecError
        from safetensors import SafetensorError
        from yaml import YAMLError

        known = (ValueError, TypeError, ArithmeticError, ImportError, RuntimeError, OSError)
        if not isinstance(error, (*known, MsgspecError, SafetensorError, StrictDataclassError, YAMLError)):
            raise
        found = join_lines(error.__cause__ or error).rstrip(".")
        step = remedy or ("" if "; " in found else "correct it")
        if step:
            found = f"{found}; {step}"
        raise UsageError(f"{what} cannot be used: {found}") from None


def find_broken_download(error: BaseException | None) -> BaseException | None:
    """Return the first network error in an exception's chain of causes, or None."""
    while error is not None:
        if type(error).__name__ == "HfHubHTTPError" or type(error).__module__.partition(".")[0] in TRANSPORTS:
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@contextmanager
def explain_disk_error(where: object) -> Iterator[None]:
    """Convert the errors of an unusable path or disk into a UsageError about `where`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if line := explain_os_error(error, str(where)):
            raise UsageError(line) from None
        raise


def check_access(path: str | Path) -> None:
    """Raise the system error that keeps a path from being looked at; an absent path passes.

    From Python 3.14 on, `Path.exists` and its like call a path absent that is too long or behind closed permissions.
    """
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        os.stat(path)


def explain_os_error(error: BaseException, what: str = "", remedy: str = "") -> str | None:
    """Return a one-line message about an unusable path or disk, or None for any other error.

    Args:
        what: The thing that could not be read or written; the path if not given.
        remedy: The next step for an unusable path, replacing the default of this module.
    """
    name, number = getattr(error, "filename", None), getattr(error, "errno", None)
    is_path = isinstance(name, str | bytes | os.PathLike)
    path = make_printable(UNFINISHED.sub(r"\1", os.fsdecode(name))) if is_path else ""
    what = what or path
    reason = getattr(error, "strerror", None) or join_lines(error)[:80]
    reason = reason if path in what else f"{reason}: {path}"
    is_folder = number == errno.EEXIST and os.path.isdir(path)  # the path of an existing folder is not at fault
    if number in PATHS and path and not is_folder:
        return f"{what} cannot be used: {reason}; {remedy or PATHS[number]}"
    for state, step, codes, words in DISKS:
        if number in codes or (number is None and any(word in str(error) for word in words)):
            use = "read or written" if state == "failing" else "written to"
            subject = f"{what} cannot be {use}: " if what else ""
            return f"{subject}the disk is {state} ({reason}); {step}"
    return None


def explain_failure(error: Exception) -> str:
    """Return one line that says why a run failed."""
    if line := str(error) if isinstance(error, UsageError) else explain_os_error(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)[:LONGEST_REASON]}{line}"


def join_lines(error: BaseException) -> str:
    """Return an exception's message as one printable line, truncated to LONGEST_MESSAGE characters."""
    return make_printable(str(error))[:LONGEST_MESSAGE]


def make_printable(text: str) -> str:
    """Return an untrusted text as one printable line, without terminal control characters."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def pluralize(number: int, name: str, names: str = "") -> str:
    """Format a number with its noun in the singular or plural."""
    return f"{number:,} {name if number == 1 else names or f'{name}s'}"


def list_some(names: Sequence[str], most: int) -> str:
    """Return the first names, and a mark if there are others."""
    listed = ", ".join(names[:most])
    return f"{listed}, …" if len(names) > most else listed
