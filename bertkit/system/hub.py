"""The Hugging Face Hub: its names, a check that it can be reached, and explanations of its errors."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten
from typing import NamedTuple

from bertkit.errors import UsageError, join_lines
from bertkit.system.progress import Report

# name or owner/name; :config and @revision may follow: a branch, a tag, a commit, or refs/pr/1
HUB_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?(?:@((?:refs/\w+/)?[\w.-]+))?")
FILE_NAME = re.compile(r"[.~].*|.*\.(bz2|csv|gz|html?|jsonl?|md|parquet|text|tsv|txt|xml|xz|zip|zst)")
METADATA_TIMEOUT = 10  # seconds
PINNED: dict[str, str] = {}  # model, or datasets/owner/name -> the commit that is read, whatever revision is named
READ: dict[str, str] = {}  # datasets/owner/name -> the commit at which it was last read


class HubName(NamedTuple):
    """The parts of the name of a model or data set on the Hub."""

    name: str
    config: str | None
    revision: str | None


def parse_hub_name(source: str) -> HubName | None:
    """Return the parts of `name[:config][@revision]`; None for a path that exists, and for the path of a file."""
    found = HUB_NAME.fullmatch(source)
    return None if not found or FILE_NAME.fullmatch(source) or os.path.exists(source) else HubName(*found.groups())


def find_dataset(place: str) -> HubName | None:
    """Return the parts of the name of a data set on the Hub; None if the place is or may be a path."""
    return parse_hub_name(place) if "/" in place.partition("@")[0] else None


def split_revision(checkpoint: str) -> tuple[str, str]:
    """Return the name and the revision of a model on the Hub, or a path as it is."""
    found = parse_hub_name(checkpoint)
    if found is None or found.config:
        return checkpoint, "main"
    return found.name, PINNED.get(found.name) or found.revision or "main"


@contextmanager
def pin(commits: Mapping[str, str]) -> Iterator[None]:
    """Read these models and data sets at these commits, whatever revision is named."""
    PINNED.update(commits)
    try:
        yield
    finally:
        PINNED.clear()


def find_hub_trouble(name: str, kind: str, revision: str | None = None) -> str | None:
    """Return why the Hub cannot serve the `kind` ("dataset" or "model") `name`; None if it can.

    This is checked before `datasets` and `transformers` are called: without a network they retry for 23 seconds and for
    more than two minutes.
    """
    from huggingface_hub import HfApi, errors

    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=METADATA_TIMEOUT)
    except errors.GatedRepoError:
        return f"the {kind} {name!r} on the Hub is open to approved users only"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return f"the Hub has no {kind} {name!r}"
    except errors.RevisionNotFoundError:
        return f"the {kind} {name!r} on the Hub has no revision {revision!r}"
    except errors.HfHubHTTPError as error:
        return f"the Hub does not serve the {kind} {name!r} ({join_lines(error)})"
    except Exception as error:  # errors of the transport: huggingface_hub has changed its HTTP library more than once
        return f"the Hub cannot be reached for the {kind} {name!r} ({type(error).__name__})"
    return None


# --- Streaming --------------------------------------------------------------------------------------------------------

STREAM_TRIES = 10  # of datasets, five seconds apart; in each, huggingface_hub tries six times in 23 seconds
STREAM_WAIT = 5.0  # seconds between two tries
LONGEST_OUTAGE = "5 to 15 minutes"  # of these tries: connections are refused, or each one is silent for ten seconds


class OutageReport(logging.Handler):
    """Reports the first retry of an outage as one line; other messages go to the handlers that were there before."""

    def __init__(self, what: str, report: Report, others: list[logging.Handler]) -> None:
        super().__init__()
        self.what, self.report, self.others = what, report, others
        self.is_outage = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "etry" in text:  # Retrying in 1s, before retry
            self.begin()
        elif "thrown while requesting" not in text:  # comes before each retry
            for other in self.others:
                other.handle(record)

    def begin(self) -> None:
        """Report the outage unless that is done."""
        if not self.is_outage:
            self.is_outage = True
            self.report(f"{self.what}: the Hub does not answer; trying again for {LONGEST_OUTAGE}")

    def end(self) -> None:
        """Note that the Hub has answered."""
        self.is_outage = False


@contextmanager
def report_outages(what: str, report: Report) -> Iterator[OutageReport]:
    """Let `datasets` retry for LONGEST_OUTAGE, with one line per outage instead of its messages."""
    from datasets import config

    config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = STREAM_TRIES
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.handlers for logger in loggers]
    outage = OutageReport(what, report, before[0])
    for logger in loggers:
        logger.handlers = [outage]
    try:
        yield outage
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers = handlers


# --- Models -----------------------------------------------------------------------------------------------------------

CARD = "README.md"
UPLOAD_TIMEOUT = 30.0  # seconds without an answer from the Hub
LOGIN = "hf auth login --force"
REMEDIES = (  # HTTP status -> remedy
    ((400,), f"correct what it names; the card is {CARD} in the run's directory"),
    ((401,), f"log in again: {LOGIN}"),
    ((402, 403), f"name a repository of your own, or log in with a token that has write access: {LOGIN}"),
    ((404,), f"check its name, or log in with a token that has access: {LOGIN}"),
    ((429,), "wait a few minutes, then run the same command again"),
)


# --- Errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def explain_hub(what: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into a UsageError that begins with `what`, and silence its retry messages.

    Each answer is awaited for at most UPLOAD_TIMEOUT seconds.
    """
    from huggingface_hub.utils import get_session, logging

    verbosity, session = logging.get_verbosity(), get_session()
    timeout, session.timeout = session.timeout, UPLOAD_TIMEOUT
    logging.set_verbosity_error()
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # also of the transport: huggingface_hub has changed its HTTP library more than once
        raise UsageError(f"{what}: {explain_failure(error)}") from None
    finally:
        session.timeout = timeout
        logging.set_verbosity(verbosity)


def explain_failure(error: BaseException) -> str:
    """Return the reason for an error and its remedy."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    while not hasattr(error, "response") and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token; log in with hf auth login, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    words = getattr(error, "server_message", None) or join_lines(error)
    reason = shorten(" ".join(words.split()), 200, placeholder="…")
    if "xet-write-token" in words and "404" in words:
        return "this server has no xet storage, which huggingface_hub uses; set HF_HUB_DISABLE_XET=1"
    # Errors of xet have no response, only a message.
    found = re.search(r"\b([45]\d\d) [A-Z]", words)
    status = getattr(getattr(error, "response", None), "status_code", None) or int(found[1] if found else 0)
    for statuses, remedy in REMEDIES:
        if status in statuses:
            return f"{reason} ({status}); {remedy}"
    if status:
        return f"{reason} ({status}); run the same command again"
    return f"{reason} ({type(error).__name__}); check the network, then run the same command again"
