"""`UsageError`, the exception for mistakes the user can fix, and the translation of library and system errors into it.

Everything below the command line raises it with a one-line message that says what was got, what was expected and the
next step; `bertkit.cli` prints that line and exits with code 2. A bug stays an ordinary exception with a traceback.
"""

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_MESSAGE = 500  # characters of a library's message
LONGEST_REASON = 300  # characters of why one of many runs or workers has failed
# HTTP libraries; huggingface_hub has switched between them more than once.
TRANSPORTS = ("aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")

# The name of a file while it is being written (`bertkit.system.files`).
UNFINISHED = re.compile(r"\.([^/]+)\.[0-9a-f]{8}-\d+\.unfinished$")
DENIED = "change its permissions or those of the folders above it, or name another path"
PATHS = {  # errno of an unusable path -> the next step
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.ENAMETOOLONG: "give each name in the path at most 220 bytes, and the whole path at most 4,000",
    errno.ENOTDIR: "a file is where a folder is expected; move it away or name another path",
    errno.EEXIST: "a file or a broken link is where a folder is expected; move it away or name another path",
    errno.EISDIR: "a folder is where a file is expected; move it away or name another path",
    errno.ELOOP: "its links form a loop; remove them or name another path",
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
        ("No space left", "File too large", "inline_container", "PytorchStreamWriter", "quota exceeded"),
    ),
)


class UsageError(ValueError):
    """A wrong file, option, recipe or text; the message is one line that names the problem and the remedy."""


def name_extra(extra: str) -> str:
    """Return how to install the packages of an extra; the name bertkit is not on PyPI."""
    return f"run pip install -e '.[{extra}]' in the checkout of bertkit"


@contextmanager
def explain_damage(path: str | os.PathLike, output: str | os.PathLike) -> Iterator[None]:
    """Convert any error with a file that bertkit has written below `output` into a UsageError.

    An unusable disk or path is named as such.
    """
    try:
        yield
    except Exception as error:  # libraries assume that nobody has changed their files
        if line := explain_os_error(error, f"the file {path}"):
            raise UsageError(line) from None
        found = join_lines(error)[:LONGEST_MESSAGE] or type(error).__name__
        raise UsageError(f"{path} is lost or damaged ({found}); delete {output} to start again") from None


@contextmanager
def explain_refusal(what: str, remedy: str = "") -> Iterator[None]:
    """Convert a library error, a system error or a broken download into a UsageError about `what`.

    Args:
        remedy: The next step for an unusable path, replacing the default of this module.
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
        from safetensors import SafetensorError
        from yaml import YAMLError

        known = (ValueError, TypeError, ArithmeticError, ImportError, RuntimeError, OSError)
        if not isinstance(error, (*known, SafetensorError, StrictDataclassError, YAMLError)):
            raise
        found = join_lines(error.__cause__ or error).rstrip(".")
        raise UsageError(f"{what} cannot be used: {found}{'' if '; ' in found else '; correct it'}") from None


def find_broken_download(error: BaseException | None) -> BaseException | None:
    """Return the first network error in an exception's chain of causes, or None."""
    while error is not None:
        if type(error).__name__ == "HfHubHTTPError" or type(error).__module__.partition(".")[0] in TRANSPORTS:
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@contextmanager
def explain_disk_error(where: object) -> Iterator[None]:
    """Convert the errors of a full, read-only or failing disk into a UsageError about `where`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if line := explain_disk(error, str(where)):
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
        remedy: The next step, replacing the default of this module.
    """
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error) and isinstance(error.__context__, OSError):
        error = error.__context__  # a loop of symbolic links, as pathlib reports it before Python 3.13
    if not isinstance(error, OSError):
        return None
    path = find_path(error)
    is_folder = error.errno == errno.EEXIST and os.path.isdir(path)  # then the path is not at fault
    if error.errno in PATHS and path and not is_folder:
        return f"{what or path} cannot be used: {describe_reason(error, what or path)}; {remedy or PATHS[error.errno]}"
    return explain_disk(error, what or path, remedy)


def explain_disk(error: BaseException, where: str, remedy: str = "") -> str | None:
    """Return a one-line message about a full, read-only or failing disk, or None for any other error."""
    number = getattr(error, "errno", None)
    for state, step, codes, words in DISKS:
        if number in codes or (number is None and any(word in str(error) for word in words)):
            use = "read or written" if state == "failing" else "written to"
            subject = f"{where} cannot be {use}: " if where else ""
            return f"{subject}the disk is {state} ({describe_reason(error, where)}); {remedy or step}"
    return None


def describe_reason(error: BaseException, where: str) -> str:
    """Return the system's message, followed by the path unless `where` contains it."""
    path = find_path(error)
    reason = getattr(error, "strerror", None) or join_lines(error)[:80]
    return reason if path in where else f"{reason}: {path}"


def find_path(error: BaseException) -> str:
    """Return the path that an operating system error names, or an empty string."""
    name = getattr(error, "filename", None)
    is_path = isinstance(name, str | bytes | os.PathLike)
    return make_printable(UNFINISHED.sub(r"\1", os.fsdecode(name))) if is_path else ""


def explain_failure(error: Exception) -> str:
    """Return one line that says why a run failed."""
    if isinstance(error, UsageError):
        return str(error)
    if line := explain_os_error(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {join_lines(error)[:LONGEST_REASON]}{place}"


def join_lines(error: BaseException) -> str:
    """Return an exception's message as one printable line, truncated to LONGEST_MESSAGE characters."""
    return make_printable(str(error))[:LONGEST_MESSAGE]


def make_printable(text: str) -> str:
    """Return an untrusted text as one printable line, without terminal control characters."""
    return "".join(filter(str.isprintable, " ".join(text.split())))
