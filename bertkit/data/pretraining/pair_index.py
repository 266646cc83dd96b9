"""Which sentences begin the pairs of a large corpus, kept beside it so that it is worked out once.

A plan is four bytes a pair. That of a corpus on disk is written there, in `plans/`, by the first process that needs it,
and mapped by all others: a cache, which may be deleted at any time. Where it cannot be written it stays in memory.
"""

import fcntl
import os
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.store import CORPUS_INDEX
from bertkit.system.files import open_unfinished, remove_lost

PLAN_FOLDER = "plans"
# Of the algorithm in `pairs.py`: another one must not find the plans of this one.
PLAN_VERSION = 1


def find_chunks(pairing: Pairing) -> np.ndarray:
    """(P,) `pairing.find_chunks()`, from the cache if it is there."""
    directory = pairing.corpus.directory
    if directory is None:
        return pairing.find_chunks()
    index = "".join(
        path.stem.rpartition("-")[2] for path in directory.glob(f"{CORPUS_INDEX}-*")
    )  # the corpus's checksum
    documents = zlib.crc32(pairing.corpus.document_ends, zlib.crc32(pairing.corpus.document_starts))
    options = f"{pairing.max_length}-{pairing.short_seq_prob}-{pairing.seed}-{pairing.copy}"
    return keep_array(directory / PLAN_FOLDER, f"{PLAN_VERSION}-{index}-{documents:08x}-{options}", pairing.find_chunks)


def keep_array(folder: Path, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array of this name in a folder, mapped; what `make` gives, if it is not there or not whole.

    The file's name ends with its checksum. Of several processes one makes it, and the others wait.
    """
    if (found := read_array(folder, name)) is not None:
        return found
    try:
        folder.mkdir(exist_ok=True)
        with alone(folder):
            if (found := read_array(folder, name)) is None:
                write_array(folder, name, make())
                found = read_array(folder, name)
    except OSError:  # a full disk, or one that is only read
        found = None
    return make() if found is None else found


@contextmanager
def alone(folder: Path):
    """One process at a time is in this context."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot; then several do the same work
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_array(folder: Path, name: str) -> np.ndarray | None:
    """The array of this name, mapped; None if there is none that is whole."""
    for path in folder.glob(f"{name}.*.npy"):
        with suppress(OSError, ValueError, EOFError):
            found = np.load(path, mmap_mode="r")
            if f"{zlib.crc32(found):08x}" == path.suffixes[-2][1:]:
                return found
    return None


def write_array(folder: Path, name: str, array: np.ndarray) -> None:
    """Writes an array at once or not at all."""
    remove_lost(folder / name)
    with open_unfinished(folder / name, "wb") as (stream, temporary):
        np.save(stream, array)
        stream.flush()
        os.replace(temporary, folder / f"{name}.{zlib.crc32(array):08x}.npy")
