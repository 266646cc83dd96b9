"""A piece of a corpus -> its shards: the work that any process can do by itself."""

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np

from bertkit.data.pretraining.sources import Document, Piece, read_piece
from bertkit.data.pretraining.store import Part, list_shards, read_shard, write_shard
from bertkit.data.pretraining.tokenize import tokenize_in_parts
from bertkit.errors import UsageError
from bertkit.system.progress import ignore

# Takes the bytes that are read, those that there are (0 if unknown) and the tokens that came of them.
BuildProgress = Callable[[int, int, int], None]
# What comes from a Ray worker: a part with its number, a line, or the user's mistake.
BuildItem = tuple[int, Part] | str | UsageError


@dataclass(frozen=True)
class BuildWork:
    """What is the same for every piece. `backend` is the tokenizer as JSON, `folder` where the shards go."""

    backend: str
    dtype: type[np.unsignedinteger]
    split_sentences: bool
    language: str
    shard_tokens: int
    folder: Path


@dataclass(frozen=True)
class PieceJob:
    """A piece with what is left to do of it: `there` is part -> documents of the shards that are finished.

    No part after `stop` is missing; without it, it is not known how many parts the piece has.
    """

    number: int
    piece: Piece
    there: Mapping[int, int]
    stop: int | None = None


class Tracker:
    """How far a build is, by the shards that are there: the bytes of text, and the tokens since its start."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], progress: BuildProgress) -> None:
        self.folder, self.pieces, self.progress = folder, pieces, progress
        self.total = 0 if any(not piece.size for piece in pieces) else sum(piece.size for piece in pieces)
        self.read = Counter[int]()
        self.tokens = 0
        self.seen: set[tuple[int, int]] = set()
        self.look()
        self.tokens = 0

    def look(self) -> None:
        """Takes in the shards that are new, and tells."""
        shards = list_shards(self.folder)
        for number, part in shards.keys() - self.seen:
            shard = read_shard(shards[number, part])
            size = self.pieces[number].size
            self.read[number] = (
                size if shard.note["is_last"] else min(self.read[number] + shard.note["characters"], size)
            )
            self.tokens += shard.count("ids")
            self.seen.add((number, part))
        self.progress(self.read.total(), self.total, self.tokens)


def read_parts(work: BuildWork, job: PieceJob, report: Callable[[str], None] = ignore) -> Iterator[tuple[int, Part]]:
    """The parts of a piece that are missing, with their numbers."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(work.backend)
    backend.encode_special_tokens = True  # which the JSON does not say
    read = read_piece(job.piece, split_sentences=work.split_sentences, language=work.language, workers=1, report=report)
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
                yield number, Part(corpus, size, characters - before, is_over)
            if is_over or number == job.stop:
                return
    finally:
        if collects:
            gc.enable()


def build_piece(
    work: BuildWork, job: PieceJob, report: Callable[[str], None] = ignore, written: Callable[[], None] = ignore
) -> None:
    """Writes the shards of a piece that are missing; `written` is called after each."""
    for number, part in read_parts(work, job, report):
        write_shard(work.folder, job.number, number, part)
        written()
