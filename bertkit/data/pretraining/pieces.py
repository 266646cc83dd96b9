"""A piece of a corpus -> its parts: the job of a worker of a build."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from bertkit.data.pretraining.sources import Document, Piece, read_piece
from bertkit.data.pretraining.store import Part
from bertkit.data.pretraining.tokenize import tokenize_in_parts


@dataclass(frozen=True)
class BuildWork:
    """What is the same for every piece. `backend` is the tokenizer as JSON."""

    backend: str
    dtype: type[np.unsignedinteger]
    split_sentences: bool
    language: str
    shard_tokens: int


@dataclass(frozen=True)
class PieceJob:
    """A piece with what is left to do of it: `there` is part -> documents of the shards that are finished.

    No part after `stop` is missing; without it, it is not known how many parts the piece has.
    """

    number: int
    piece: Piece
    there: Mapping[int, int]
    stop: int | None = None
    data: str = "build"  # the name under which workers get the BuildWork


def read_parts(job: PieceJob, work: BuildWork, tell: Callable[[tuple[int, Part] | str], None]) -> None:
    """Tell the parts of a piece that are missing, with their numbers, and lines about it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(work.backend)
    backend.encode_special_tokens = True  # which the JSON does not say
    read = read_piece(job.piece, split_sentences=work.split_sentences, language=work.language, workers=1, report=tell)
    characters, is_over = 0, False

    def observe() -> Iterator[Document]:
        nonlocal characters, is_over
        for document in read:
            characters += sum(map(len, document))
            yield document
        is_over = True

    documents = observe()
    collects = gc.isenabled()
    gc.disable()  # nothing here has cycles, and to look for some takes longer than to parse documentation
    try:
        for number in count():
            if number in job.there:
                deque(islice(documents, job.there[number]), maxlen=0)
            else:
                before = characters
                corpus, size = next(tokenize_in_parts(documents, backend, work.dtype, work.shard_tokens))
                tell((number, Part(corpus, size, characters - before, is_over)))
            if is_over or number == job.stop:
                return
    finally:
        if collects:
            gc.enable()


def limit_threads() -> None:
    """Keep a worker to one thread of the tokenizer, which reads this when it is first used."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
