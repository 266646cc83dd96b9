"""Mistakes that the user can mend: the one exception for them, and how a library's refusal becomes it.

Everything below the command line raises it with a message of one line that says what was got, what was expected and the
next step; `bertkit.cli` turns it into that line and exit code 2. A bug stays an ordinary exception with a traceback.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_MESSAGE = 500  # characters of what a library says
# Libraries that carry bytes over a network; huggingface_hub has changed from one to another more than once.
TRANSPORTS = ("aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")

# A file's name while it is written (`bertkit.system.files`).
UNFINISHED = re.compile(r"\.([^/]+)\.[0-9a-f]{8}-\d+\.unfinished$")
DENIED = "change its permissions or those of the folders above it, or name another path"
PATHS = {  # what the system says of a path -> the next step
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.ENAMETOOLONG: "give each name in the path at most 220 bytes, and the whole path at most 4,000",
    errno.ENOTDIR: "a file is where a folder has to be; move it away or name another path",
    errno.EEXIST: "a file or a broken link is where a folder has to be; move it away or name another path",
    errno.EISDIR: "a folder is where a file has to be; move it away or name another path",
    errno.ELOOP: "its links lead in a circle; remove them or name another path",
}
# What is wrong with a disk, the next step, and what says so: the system's numbers, and words of libraries that have
# code of their own to write with (torch, safetensors), whose errors have no number.
DISKS = (
    (
        "read-only",
        "make it writable, and the same command goes on, or name another place",
        (errno.EROFS,),
        ("Read-only file system",),
    ),
    (
        "failing",
        "repair or replace it, and the same command goes on from what is finished",
        (errno.EIO, errno.ESTALE),
        ("Input/output error",),
    ),
    (
        "full",
        "free some space and give the command again",
        (errno.ENOSPC, errno.EFBIG, errno.EDQUOT),
        ("No space left", "File too large", "inline_container", "PytorchStreamWriter", "quota exceeded"),
    ),
)


class UsageError(ValueError):
    """A wrong file, option, recipe or text; its message is one line that names the thing and the remedy."""


@contextmanager
def explain_refusal(what: str, remedy: str = "") -> Iterator[None]:
    """Turn a refusal by a library or the system, or a broken download, into a UsageError about `what`.

    Args:
        remedy: The next step for a path that cannot be used, where the caller knows a better one.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if broken := find_broken_download(error):
            raise UsageError(
                f"{what} did not come from the Hub ({type(broken).__name__}: {join_lines(broken)[:160]}); the same "
                "command tries again, and has what has come already"
            ) from None
        if line := explain_os_error(error, what, remedy):
            raise UsageError(line) from None
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError
        from yaml import YAMLError

        known = (ValueError, TypeError, ArithmeticError, ImportError, RuntimeError, OSError)
        if not isinstance(error, (*known, SafetensorError, StrictDataclassError, YAMLError)):
            raise
        raise UsageError(f"{what} is refused: {join_lines(error.__cause__ or error)}; correct it") from None


def find_broken_download(error: BaseException | None) -> BaseException | None:
    """What a network library has said, among an exception and those that led to it; None if none has."""
    while error is not None:
        if type(error).__name__ == "HfHubHTTPError" or type(error).__module__.partition(".")[0] in TRANSPORTS:
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@contextmanager
def explain_disk_error(where: object) -> Iterator[None]:
    """Turn the errors of a full, read-only or failing disk into a UsageError about `where`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if line := explain_disk(error, str(where)):
            raise UsageError(line) from None
        raise


def explain_os_error(error: BaseException, what: str = "", remedy: str = "") -> str | None:
    """Return one line on a path that cannot be used, or None for any other error.

    Args:
        what: What could not be read or written; the path alone if not given.
        remedy: The next step, where the caller knows a better one than this module.
    """
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error) and isinstance(error.__context__, OSError):
        error = error.__context__  # a circle of links, as pathlib reports it before Python 3.13
    if not isinstance(error, OSError):
        return None
    path = find_path(error)
    is_folder = error.errno == errno.EEXIST and os.path.isdir(path)  # then it is no mistake in the path
    if error.errno in PATHS and path and not is_folder:
        return f"{what or path} is refused: {describe_reason(error, what or path)}; {remedy or PATHS[error.errno]}"
    return explain_disk(error, what or path, remedy)


def explain_disk(error: BaseException, where: str, remedy: str = "") -> str | None:
    """Return one line on a disk that cannot be written to, or None for any other error."""
    number = getattr(error, "errno", None)
    for state, step, codes, words in DISKS:
        if number in codes or (number is None and any(word in str(error) for word in words)):
            use = "read or written" if state == "failing" else "written to"
            subject = f"{where} cannot be {use}: " if where else ""
            return f"{subject}the disk is {state} ({describe_reason(error, where)}); {remedy or step}"
    return None


def describe_reason(error: BaseException, where: str) -> str:
    """Return the system's words, with the path unless `where` names it."""
    path = find_path(error)
    reason = getattr(error, "strerror", None) or join_lines(error)[:80]
    return reason if path in where else f"{reason}: {path}"


def find_path(error: BaseException) -> str:
    """Return the path of an operating system's error; empty without one."""
    name = getattr(error, "filename", None)
    is_path = isinstance(name, str | bytes | os.PathLike)
    return make_printable(UNFINISHED.sub(r"\1", os.fsdecode(name))) if is_path else ""


def join_lines(error: BaseException) -> str:
    """An exception's message as one line that can be printed, at most LONGEST_MESSAGE characters of it."""
    return make_printable(str(error))[:LONGEST_MESSAGE]


def make_printable(text: str) -> str:
    """A text of unknown origin as one line that can be printed, without what moves a terminal's cursor or colours."""
    return "".join(filter(str.isprintable, " ".join(text.split())))
