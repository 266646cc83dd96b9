"""Mistakes that the user can mend: the one exception for them, and how a library's refusal becomes it.

Everything below the command line raises it with a message of one line that says what was got, what was expected and the
next step; `bertkit.cli` turns it into that line and exit code 2. A bug stays an ordinary exception with a traceback.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 500  # characters of what a library says
# Libraries that carry bytes over a network; huggingface_hub has changed from one to another more than once.
TRANSPORTS = ("aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3")


class UsageError(ValueError):
    """A wrong file, option, recipe or text; its message is one line that names the thing and the remedy."""


@contextmanager
def explain_refusal(what: str) -> Iterator[None]:
    """A refusal by a library, or a download that has failed, becomes a UsageError about `what`."""
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
def explain_full_disk(where: object) -> Iterator[None]:
    """A file below `where` that could not be written becomes a UsageError; what was complete stays so."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        # torch and safetensors write with code of their own, whose errors have words and no number.
        words = ("No space left", "File too large", "inline_container", "PytorchStreamWriter", "quota exceeded")
        if getattr(error, "errno", None) not in codes and not any(word in str(error) for word in words):
            raise
        raise UsageError(
            f"{where} cannot be written to: the disk is full ({join_lines(error)[:80]}); "
            "free some space and give the command again"
        ) from None


def join_lines(error: BaseException) -> str:
    """An exception's message as one line that can be printed, at most LONGEST characters of it."""
    return make_printable(str(error))[:LONGEST]


def make_printable(text: str) -> str:
    """A text of unknown origin as one line that can be printed, without what moves a terminal's cursor or colours."""
    return "".join(filter(str.isprintable, " ".join(text.split())))
