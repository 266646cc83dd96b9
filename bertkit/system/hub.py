"""The Hugging Face Hub: its names, a check that it can be reached, and explanations of its errors."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from bertkit.errors import UsageError, as_usage_error, check_access, join_lines

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


def parse_dataset(source: str) -> HubName | None:
    """Return the parts of the name of a data set on the Hub; None for what may be a path."""
    return parse_hub_name(source) if "/" in source.partition("@")[0] else None


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


def explain_hub_trouble(name: str, kind: str, revision: str | None = None) -> str | None:
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


@lru_cache(maxsize=8)  # a study calls it for each of its cells
def explain_trouble(checkpoint: str) -> str | None:
    """Return why the Hub cannot serve a checkpoint that is not a local path, or None if it can.

    If it cannot, callers use only the cache, which may hold a copy downloaded before.
    """
    name, revision = split_revision(checkpoint)
    return None if Path(checkpoint).exists() else explain_hub_trouble(name, "model", revision)


def find_file(checkpoint: str, name: str) -> Path | None:
    """Return a file of a checkpoint, local, cached or from the Hub; None if the checkpoint lacks it."""
    if Path(checkpoint).exists():
        return path if (path := Path(checkpoint, name)).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with as_usage_error(f"{name} of {checkpoint}"):
        model, revision = split_revision(checkpoint)
        is_offline = explain_trouble(checkpoint) is not None
        try:
            return Path(hf_hub_download(model, name, revision=revision, local_files_only=is_offline))
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) and not is_offline:  # the Hub did not answer
                raise
    return None


def find_cached(checkpoint: str, name: str) -> Path | None:
    """Return a file of a checkpoint on the Hub from the cache, without asking the Hub; None if the cache lacks it."""
    from huggingface_hub import try_to_load_from_cache

    model, revision = split_revision(checkpoint)
    found = try_to_load_from_cache(model, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


# --- Before torch is imported -----------------------------------------------------------------------------------------


def check_path(source: str | None, form: str = "") -> None:
    """Check that a path, if given, exists, or that several joined by commas do.

    Args:
        form: The form of a name on the Hub that may be given instead: "owner/name", "name", or none. Where there is a
            folder `owner`, owner/name is a path.
    """
    if not source or os.path.exists(source):
        return
    for path in source.split(","):
        check_access(path)
        found = parse_dataset(path) if form == "owner/name" else form and parse_hub_name(path)
        if not os.path.exists(path) and (not found or os.path.isdir(os.path.dirname(path))):
            other = f", or name a data set on the Hub ({form})" if form else ""
            raise UsageError(f"there is no file or folder {path}; correct the path{other}")


def check_checkpoint(checkpoint: str | None) -> None:
    """Check that a model, if given, is a path that exists, or is on the Hub or in its cache."""
    if not checkpoint or os.path.exists(checkpoint):
        return
    check_access(checkpoint)
    is_name = parse_hub_name(checkpoint) is not None
    if is_name and find_cached(checkpoint, "config.json"):
        return
    remedy = "give the folder of a run or of a BERT checkpoint"
    if not is_name or os.path.isdir(os.path.dirname(checkpoint)):
        raise UsageError(f"there is no folder {checkpoint}; {remedy}")
    if trouble := explain_trouble(checkpoint):
        raise UsageError(f"there is no folder {checkpoint}, and {trouble}; {remedy}")


# --- Models -----------------------------------------------------------------------------------------------------------

CARD = "README.md"
UPLOAD_TIMEOUT = 30.0  # seconds without an answer from the Hub
LOGIN = "hf auth login --force"
REMEDIES: dict[int | str, str] = {  # HTTP status or class of an error -> remedy
    400: f"correct what it names; the card is {CARD} in the run's directory",
    "LocalTokenNotFoundError": f"log in: {LOGIN}",
}
REMEDIES |= dict.fromkeys((401, 402, 403, 404), f"check its name, or log in with a token that has access: {LOGIN}")


@contextmanager
def explain_hub(what: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into a UsageError that begins with `what`.

    Each answer is awaited for at most UPLOAD_TIMEOUT seconds.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    timeout, session.timeout = session.timeout, UPLOAD_TIMEOUT
    try:
        yield
    except UsageError:
        raise
    except (
        Exception
    ) as error:  # errors of the transport too: huggingface_hub has changed its HTTP library more than once
        reason = getattr(error, "server_message", None) or join_lines(error)
        status = getattr(getattr(error, "response", None), "status_code", type(error).__name__)
        remedy = "correct it" if isinstance(error, ValueError) else "run the same command again"
        words = shorten(" ".join(reason.split()), 200, placeholder="…")
        raise UsageError(f"{what}: {words} ({status}); {REMEDIES.get(status, remedy)}") from None
    finally:
        session.timeout = timeout
