"""The first sentences of a corpus's pairs, cached beside the corpus so that they are computed only once.

A plan takes four bytes per pair. For a corpus on disk, the first process that needs the plan writes it to `plans/` in
the corpus, and all others map it. This is a cache and may be deleted at any time. If it cannot be written, the plan
stays in memory.
"""

import os
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock

from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.store import CORPUS_INDEX
from bertkit.system.files import LOCK, open_unfinished, remove_unfinished

PLAN_FOLDER = "plans"
# Version of the algorithm in `pairs.py`: a different algorithm must not reuse these plans.
PLAN_VERSION = 1


def find_chunks(pairing: Pairing) -> np.ndarray:
    """Return (P,) `pairing.find_chunks()`, from the cache if possible."""
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
    """Return the named array in a folder, mapped; create it with `make` if it is missing or damaged.

    The file name ends with the array's checksum. One of several processes creates the file while the others wait.
    """
    if (found := read_array(folder, name)) is not None:
        return found
    try:
        folder.mkdir(exist_ok=True)
        with alone(folder):
            if (found := read_array(folder, name)) is None:
                write_array(folder, name, make())
                found = read_array(folder, name)
    except OSError:  # a full or read-only disk
        found = None
    return make() if found is None else found


@contextmanager
def alone(folder: Path):
    """Hold an exclusive lock on the folder."""
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    with suppress(OSError):  # some network disks cannot lock; then several processes do the same work
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_array(folder: Path, name: str) -> np.ndarray | None:
    """Return the named array, mapped; None if there is no undamaged file."""
    for path in folder.glob(f"{name}.*.npy"):
        with suppress(OSError, ValueError, EOFError):
            found = np.load(path, mmap_mode="r")
            if f"{zlib.crc32(found):08x}" == path.suffixes[-2][1:]:
                return found
    return None


def write_array(folder: Path, name: str, array: np.ndarray) -> None:
    """Write an array atomically, in a folder that this process has locked."""
    remove_unfinished(folder)
    with open_unfinished(folder / name, "wb") as (stream, temporary):
        np.save(stream, array)
        stream.flush()
        os.replace(temporary, folder / f"{name}.{zlib.crc32(array):08x}.npy")
