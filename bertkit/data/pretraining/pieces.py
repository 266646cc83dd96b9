"""A piece of a corpus -> its parts: the job of a worker of a build."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from threading import Lock

import numpy as np

from bertkit.data.formats.line import OpenBytes, open_here
from bertkit.data.pretraining.sources import Document, Piece, read_piece
from bertkit.data.pretraining.store import Part
from bertkit.data.pretraining.tokenize import tokenize_in_parts
from bertkit.system.disk import Disk


@dataclass(frozen=True)
class BuildWork:
    """The options shared by all pieces.

    Attributes:
        backend: The tokenizer as JSON.
        shard_tokens: The number of tokens at which a part ends.
    """

    backend: str
    dtype: type[np.unsignedinteger]
    split_sentences: bool
    language: str
    shard_tokens: int


@dataclass(frozen=True)
class PieceJob:
    """A piece and its missing parts.

    Attributes:
        there: Part -> number of documents, for the shards that are finished.
        stop: No part after this one is missing; None while the number of parts is unknown.
        data: The name under which workers get the BuildWork.
    """

    number: int
    piece: Piece
    there: Mapping[int, int]
    stop: int | None = None
    data: str = "build"


TellPart = Callable[[tuple[int, Part] | str], None]


def read_parts_elsewhere(disk: Disk, job: PieceJob, work: BuildWork, tell: TellPart) -> None:
    """Read the missing parts of a piece as `read_parts` does, from the files of another machine."""
    read_parts(job, work, tell, disk.open)


def read_parts(job: PieceJob, work: BuildWork, tell: TellPart, open_bytes: OpenBytes = open_here) -> None:
    """Read the missing parts of a piece and pass them to `tell`, with their numbers, and messages about the piece.

    Args:
        open_bytes: Opens the files of the piece.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(work.backend)
    backend.encode_special_tokens = True  # not stored in the JSON
    lock = Lock()

    def send(news: tuple[int, Part] | str) -> None:
        with lock:  # a line about the Hub comes from a thread of pyarrow
            tell(news)

    options = {"split_sentences": work.split_sentences, "language": work.language}
    read = read_piece(job.piece, **options, workers=1, report=send, open_bytes=open_bytes)
    characters, is_over = 0, False

    def observe() -> Iterator[Document]:
        nonlocal characters, is_over
        for document in read:
            characters += sum(map(len, document))
            yield document
        is_over = True

    documents = observe()
    collects = gc.isenabled()
    gc.disable()  # nothing here has cycles, and searching for them takes longer than parsing documentation
    try:
        for number in count():
            if number in job.there:
                deque(islice(documents, job.there[number]), maxlen=0)
            else:
                before = characters
                corpus, size = next(tokenize_in_parts(documents, backend, work.dtype, work.shard_tokens))
                send((number, Part(corpus, size, characters - before, is_over)))
            if is_over or number == job.stop:
                return
    finally:
        if collects:
            gc.enable()


def limit_threads() -> None:
    """Limit a worker's tokenizer to one thread; the tokenizer reads these variables on first use."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
