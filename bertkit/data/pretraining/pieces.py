"""A piece of a corpus -> its shards, written here, by several processes, or by tasks on a Ray cluster.

A worker writes the shards to the disk that it shares with this process, and only returns lines for the user. Worker
processes load neither torch nor transformers.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.data.pretraining.sources import Document, Piece, read_piece
from bertkit.data.pretraining.store import RECORD, Part, read_shard, write_shard
from bertkit.data.pretraining.tokenize import tokenize_in_parts
from bertkit.errors import LONGEST_REASON, UsageError, join_lines
from bertkit.system.cluster import join_cluster
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import await_note, keep_from_interrupts, leave_signals_to_parent, note_signals, open_pool

LOOK = 1.0  # seconds between two looks at the workers and their files
MOST_LOSSES = 3  # losses of workers in a row, without a new shard


@dataclass(frozen=True)
class BuildWork:
    """The options shared by all pieces.

    Attributes:
        folder: Where the shards are written.
        backend: The tokenizer as JSON.
        shard_tokens: The number of tokens at which a part ends.
    """

    folder: Path
    backend: str
    dtype: type[np.unsignedinteger]
    split_sentences: bool
    language: str
    shard_tokens: int


@dataclass(frozen=True)
class PieceJob:
    """A piece and what is finished of it.

    Attributes:
        notes: Part -> the note of its shard.
    """

    number: int
    piece: Piece
    notes: dict[int, Mapping[str, Any]]

    def is_whole(self) -> bool:
        """Return whether all parts are finished."""
        return any(note["is_last"] and len(self.notes) > part for part, note in self.notes.items())

    def count_read(self) -> int:
        """Return about how many bytes have been read."""
        characters = sum(note["characters"] for note in self.notes.values())
        return self.piece.size if self.is_whole() else min(characters, self.piece.size)


def write_piece(work: BuildWork, job: PieceJob, report: Report, wrote: Callable[[], None] = ignore) -> None:
    """Write the missing shards of a piece.

    Args:
        wrote: Called after each shard.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(work.backend)
    backend.encode_special_tokens = True  # not stored in the JSON
    read = read_piece(job.piece, split_sentences=work.split_sentences, language=work.language, workers=1, report=report)
    characters, is_over = 0, False

    def observe() -> Iterator[Document]:
        nonlocal characters, is_over
        for document in read:
            characters += sum(map(len, document))
            yield document
        is_over = True

    documents = observe()
    for number in count():
        if number in job.notes:
            deque(islice(documents, job.notes[number]["documents"]), maxlen=0)
        else:
            before = characters
            corpus, size = next(tokenize_in_parts(documents, backend, work.dtype, work.shard_tokens))
            part = Part(corpus, size, characters - before, is_over)
            job.notes[number] = read_shard(write_shard(work.folder, job.number, number, part)).note
            wrote()
        if job.is_whole():
            return


# --- Workers ----------------------------------------------------------------------------------------------------------

Submit = Callable[[PieceJob], Future[list[str]]]  # gives a piece to a worker


def write_apart(work: BuildWork, job: PieceJob) -> list[str]:
    """Write the missing shards of a piece in a worker, and return lines for the user."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read when the tokenizer is first used
    os.environ["RAYON_NUM_THREADS"] = "1"
    lines: list[str] = []
    write_piece(work, job, lines.append)
    return lines


def write_on_ray(work: BuildWork, job: PieceJob, directory: str) -> list[str]:
    """Write the missing shards of a piece in a Ray worker, and return lines for the user.

    Args:
        directory: The working directory of the command, to which paths may be relative.

    Raises:
        UsageError: This machine does not see the directory of the corpus.
    """
    with suppress(OSError):
        os.chdir(directory)
    output = work.folder.parent
    if not (output / RECORD).exists():
        raise UsageError(
            f"{socket.gethostname()} does not see {output}; --workers ray needs a disk that all machines share"
        )
    return write_apart(work, job)


@contextmanager
def start_workers(work: BuildWork, number: int) -> Iterator[Submit]:
    """Start processes, or join a Ray cluster if `number` is 0, and yield a function that submits a piece."""
    if number:
        with open_pool(number, "spawn", leave_signals_to_parent) as pool:
            yield partial(pool.submit, write_apart, work)
    else:
        with join_cluster() as ray:
            task, shared, directory = ray.remote(max_retries=0)(write_on_ray), ray.put(work), os.getcwd()
            yield lambda job: task.remote(shared, job, directory).future()


def write_in_workers(work: BuildWork, workers: int, look: Callable[[], list[PieceJob]], report: Report) -> int:
    """Write the missing shards with workers, and return the signal that stopped them, or 0.

    If workers die, others continue with the pieces that are left.

    Args:
        workers: The number of processes; 0 uses Ray.
        look: Looks for new shards, and returns the pieces with missing ones.

    Raises:
        UsageError: A source cannot be read, workers died MOST_LOSSES times in a row, or the Ray cluster is lost.
    """
    noted: list[int] = []
    jobs, failures = look(), 0
    with note_signals(noted.append):
        while jobs:
            with start_workers(work, min(workers, len(jobs))) as submit:
                lost = follow(submit, jobs, look, report, noted)
            if noted or (lost and await_note(noted)):  # a signal to the group may reach a worker first
                return noted[0]
            before, jobs = jobs, look()
            failures = failures + 1 if jobs == before else 0
            if failures == MOST_LOSSES:
                raise UsageError(
                    f"{lost or 'shards did not appear'} {MOST_LOSSES} times in a row (out of memory?); the same "
                    "command continues from the finished shards; use fewer --workers if needed"
                )
            if lost:
                report(f"{lost}; continuing with the pieces that are left")
    return 0


def follow(
    submit: Submit, jobs: Sequence[PieceJob], look: Callable[[], object], report: Report, noted: Sequence[int]
) -> str:
    """Let workers do the jobs until `noted` holds a signal, and return why a worker was lost, if any."""
    lost, waiting = "", set[Future[list[str]]]()
    with keep_from_interrupts(), suppress(BrokenProcessPool):  # a process may die before all jobs are given
        waiting.update(map(submit, jobs))
    while waiting and not noted:
        done, waiting = wait(waiting, LOOK)
        for future in done:
            error = future.exception()
            cause = getattr(error, "cause", error)  # Ray's error of a job has one
            if error is None:
                for line in future.result():
                    report(line)
            elif isinstance(cause, UsageError | OSError):
                raise cause
            elif cause is error and type(error).__module__ in ("concurrent.futures.process", "ray.exceptions"):
                lost = f"a worker was lost ({join_lines(error)[:LONGEST_REASON]})"
            else:
                raise error
        look()
    return lost
