"""Sources -> a tokenized corpus on disk (paper §3.1, "Pre-training data"), of any size, by any number of processes.

Sources are divided into pieces. A process reads a piece, finds its sentences, tokenizes them and writes its shards;
then this process writes the index, the statistics and the manifest. A shard is a function of its piece alone, so the
schedule changes no byte. After a kill, the same command resumes: finished shards are not touched, and the documents of
an unfinished piece that are in finished shards are skipped.

Pieces are written here, by several processes, or by tasks on a Ray cluster. A worker writes the shards to the disk that
it shares with this process, and only returns lines for the user. It loads neither torch nor transformers.

If repeats are to be removed, the shards of all text are in `parts/` until the shards without repeats are finished.
"""

import os
import platform
import shutil
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import distributions
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.formats.line import read_json
from bertkit.data.pretraining.sources import (
    MARKED_UP,
    PIECE_BYTES,
    Document,
    Noted,
    Piece,
    cut_sources,
    note_lines,
    read_piece,
)
from bertkit.data.pretraining.statistics import choose_kept, measure, measure_repeats, select_sentences
from bertkit.data.pretraining.store import (
    MANIFEST,
    PART_FOLDER,
    PLAN_FOLDER,
    RECORD,
    SHARDS,
    Shard,
    is_corpus,
    join_shards,
    list_shards,
    open_corpus,
    proves_whole,
    read_manifest,
    read_shard,
    write_index,
    write_manifest,
    write_shard,
)
from bertkit.data.pretraining.tokenize import TokenizedCorpus, WordTokenizer, choose_dtype, tokenize_part
from bertkit.data.tokenizer import TOKENIZER_FILES, CachedTokenizer, get_backend, save_tokenizer
from bertkit.errors import LONGEST_REASON, UsageError, explain_disk_error, join_lines, pluralize
from bertkit.system.cluster import join_cluster
from bertkit.system.differences import refuse_other
from bertkit.system.files import check_empty, hold_directory, map_in_threads, remove_unfinished, write_json
from bertkit.system.progress import Report, ignore
from bertkit.system.signals import keep_from_interrupts, leave_signals_to_parent, open_pool

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

TOKENS_A_SHARD = 1 << 24
LOSSES = 3  # losses of local workers that end a build
LOOK = 1.0  # seconds between two looks at the workers and their files
LOST = ("concurrent.futures.process", "ray.exceptions")  # modules of the errors of a worker that has died
DEDUPLICATE = ("", "documents", "lines")
BORDERS = ("", "spaces")  # values of `words`

# Called with the bytes read, the total bytes (0 if unknown) and the number of tokens written.
BuildProgress = Callable[[int, int, int], None]


def build(
    sources: Sequence[str],
    tokenizer: "BertTokenizerFast",
    output: str | Path,
    *,
    split_sentences: bool = True,
    language: str = "en",
    passages: bool = False,
    words: str = "",
    deduplicate: str = "",
    workers: int = 1,
    report: Report = ignore,
    progress: BuildProgress = ignore,
) -> dict[str, Any]:
    """Build the corpus in `output`, continuing where an earlier build stopped, and return its statistics.

    Args:
        sources, split_sentences, language, passages, words: As in
            `bertkit.data.pretraining.sources.read_documents`.
        deduplicate: "documents" drops documents that occurred before, "lines" also every such sentence; "" drops none.
        workers: Number of processes; 1 is this process, 0 uses Ray.
    """
    if deduplicate not in DEDUPLICATE:
        raise UsageError(f"deduplicate is {deduplicate!r}, expected documents or lines; correct it or leave it out")
    if words not in BORDERS:
        raise UsageError(f"words is {words!r}, expected spaces; correct it or leave it out")
    backend = get_backend(tokenizer, "a built corpus").to_str()
    output, pieces = Path(output), cut_sources(sources, PIECE_BYTES)
    reading = {"split_sentences": split_sentences, "language": language}
    later = {"passages": passages, "words": words}
    options = reading | {"deduplicate": deduplicate}
    options |= {name: value for name, value in later.items() if value}  # old records have none of these
    asked = describe_build(sources, pieces, backend, options)
    dtype = choose_dtype(len(tokenizer) * 2 if words else len(tokenizer))
    with hold_directory(output), explain_disk_error(output):
        if (finished := read_finished(output, asked, report)) is not None:
            return finished
        write_json(asked, output / RECORD)
        (output / MANIFEST).unlink(missing_ok=True)  # after the record: one of them tells what the directory is
        save_tokenizer(tokenizer, output)
        shutil.rmtree(output / PLAN_FOLDER, ignore_errors=True)  # plans of an earlier corpus
        folder = output / (PART_FOLDER if deduplicate else SHARDS)
        folder.mkdir(exist_ok=True)
        work = BuildWork(folder, backend, dtype, reading | later, TOKENS_A_SHARD)
        build_pieces(work, pieces, workers, report, progress)
        return finish(output, work, pieces, tokenizer, asked, report)


def describe_build(
    sources: Sequence[str], pieces: Sequence[Piece], backend: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that determines the bytes of a corpus; files are described by size and modification time."""
    content = list(map(repr, pieces))
    for file in sorted({file for piece in pieces for file in piece.files}):
        status = os.stat(file)
        content.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    if any(piece.kind == "docs" for piece in pieces):
        packages = sorted(f"{package.name} {package.version}" for package in distributions())
        content += [f"Python {platform.python_version()}", *packages]
    return {
        "sources": list(sources),
        "content": sha256("\n".join(content).encode(errors="surrogateescape")).hexdigest()[:16],
        "vocabulary": sha256(backend.encode()).hexdigest()[:16],
        **options,
        "piece_bytes": PIECE_BYTES,
        "shard_tokens": TOKENS_A_SHARD,
    }


# --- The directory ----------------------------------------------------------------------------------------------------


def read_finished(output: Path, asked: Mapping[str, Any], report: Report) -> dict[str, Any] | None:
    """Return the statistics of a finished and undamaged corpus, or None if work remains."""
    if (output / RECORD).exists() or is_corpus(output):
        has_begun = is_corpus(output) or any(any((output / name).glob("[!.]*")) for name in (SHARDS, PART_FOLDER))
        if has_begun:  # before the first shard there is nothing to lose
            remedy = f"delete {output} and run the same command again"
            known = read_json(output / RECORD, dict[str, Any], remedy)
            refuse_other(f"{output} belongs to another build", known, asked)
    else:
        check_empty(output, "corpus")
    if not is_corpus(output):
        return None
    try:
        open_corpus(output)
    except UsageError as error:
        report(str(error))
        return None
    shutil.rmtree(output / PART_FOLDER, ignore_errors=True)  # left if the last process was killed just before
    report(f"{output} is finished")
    return read_manifest(output)["statistics"]


def keep_whole(folder: Path, report: Report) -> dict[tuple[int, int], Shard]:
    """Return (piece, part) -> shard; files whose checksum differs from their name are deleted."""
    shards = list_shards(folder)
    whole: dict[tuple[int, int], Shard] = {}
    for (key, path), proven in zip(shards.items(), map_in_threads(proves_whole, list(shards.values())), strict=True):
        if proven:
            whole[key] = read_shard(path)
        else:
            report(f"{path} is truncated or corrupted and will be rewritten")
            path.unlink()
    return whole


# --- The pieces -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuildWork:
    """The options shared by all pieces."""

    folder: Path  # where the shards are written
    backend: str  # the tokenizer as JSON
    dtype: type[np.unsignedinteger]
    reading: Mapping[str, Any]  # options of `read_piece`
    shard_tokens: int  # the number of tokens at which a part ends


def is_whole(shards: Mapping[int, Shard]) -> bool:
    """Return whether the shards of a piece, by part, are all there."""
    return any(shard.note["is_last"] and len(shards) > part for part, shard in shards.items())


def write_piece(work: BuildWork, number: int, piece: Piece, report: Report, wrote: Callable[[], None] = ignore) -> None:
    """Write the missing shards of a piece; those that are in the folder are whole.

    Args:
        number: The piece's index among all.
        wrote: Called after each shard.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(work.backend)
    backend.encode_special_tokens = True  # not stored in the JSON
    words = WordTokenizer(backend) if work.reading.get("words") else CachedTokenizer(backend)
    shards = {part: read_shard(path) for (_, part), path in list_shards(work.folder, number).items()}
    noted: Noted = {}
    read = read_piece(piece, **work.reading, noted=noted, workers=1, report=report)
    characters, is_over = 0, False

    def observe() -> Iterator[Document]:
        nonlocal characters, is_over
        for document in read:
            characters += sum(map(len, document))
            yield document
        is_over = True

    documents = observe()
    for part in count():
        if part in shards:
            deque(islice(documents, shards[part].note["documents"]), maxlen=0)
        else:
            before = characters
            corpus, size = tokenize_part(documents, words, work.dtype, work.shard_tokens)
            note = {"documents": size, "characters": characters - before, "is_last": is_over}
            note |= {"noted": noted} if noted else {}
            shards[part] = read_shard(write_shard(work.folder, number, part, corpus, note))
            wrote()
        noted.clear()
        if is_whole(shards):
            return


def build_pieces(
    work: BuildWork, pieces: Sequence[Piece], workers: int, report: Report, progress: BuildProgress
) -> None:
    """Write the missing shards, and follow their files for the progress."""
    found = keep_whole(work.folder, report)
    total = sum(piece.size for piece in pieces)
    before = sum(shard.count("ids") for shard in found.values())
    written = 0

    def look() -> dict[int, Piece]:
        """Look for new shards, and return the pieces with missing ones."""
        nonlocal written
        os.utime(work.folder)  # a network disk then lists the files that other machines have written
        found.update({key: read_shard(path) for key, path in list_shards(work.folder).items() if key not in found})
        written = sum(shard.count("ids") for shard in found.values()) - before
        shards: list[dict[int, Shard]] = [{} for _ in pieces]
        for (number, part), shard in found.items():
            shards[number][part] = shard
        missing = {number: piece for number, piece in enumerate(pieces) if not is_whole(shards[number])}
        done = sum(piece.size for number, piece in enumerate(pieces) if number not in missing)
        for number, piece in missing.items():  # about one byte for a character
            done += min(sum(shard.note["characters"] for shard in shards[number].values()), piece.size)
        progress(done, total if all(piece.size for piece in pieces) else 0, written)
        return missing

    missing = look()
    if not missing:
        return
    there = f", {len(pieces) - len(missing)} of them finished" if len(missing) < len(pieces) else ""
    report(f"{pluralize(len(pieces), 'piece')} ({total / 1e6:,.0f} MB){there}")
    start = time.monotonic()
    try:
        if min(workers, len(missing)) == 1:  # a process of its own for one piece would only start more slowly
            for number, piece in missing.items():
                write_piece(work, number, piece, report, look)
        else:
            write_in_workers(work, missing, min(workers, len(missing)), look, report)
    finally:
        remove_unfinished(work.folder)  # dead workers leave unfinished files
    if late := look():
        raise UsageError(
            f"{work.folder} lacks shards of {len(late)} pieces, which workers have written; run the same command again"
        )
    seconds = time.monotonic() - start
    report(f"{written:,} tokens in {seconds:,.1f} s: {written / seconds:,.0f} tokens/s")


# --- Workers ----------------------------------------------------------------------------------------------------------

Submit = Callable[[int, Piece], Future[list[str]]]  # gives a piece to a worker


def write_apart(work: BuildWork, number: int, piece: Piece) -> list[str]:
    """Write the missing shards of a piece in a worker, and return lines for the user."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read when the tokenizer is first used
    os.environ["RAYON_NUM_THREADS"] = "1"
    lines: list[str] = []
    write_piece(work, number, piece, lines.append)
    return lines


def write_on_ray(work: BuildWork, number: int, piece: Piece, directory: str) -> list[str]:
    """Write the missing shards of a piece in a Ray worker, and return lines for the user.

    Args:
        directory: The working directory of the command, to which paths may be relative.
    """
    with suppress(OSError):
        os.chdir(directory)
    output = work.folder.parent
    if not (output / RECORD).exists():
        raise UsageError(
            f"{socket.gethostname()} does not see {output}; --workers ray needs a disk that all machines share"
        )
    return write_apart(work, number, piece)


@contextmanager
def start_workers(work: BuildWork, workers: int) -> Iterator[Submit]:
    """Start processes, or join a Ray cluster if `workers` is 0, and yield a function that submits a piece.

    Ray repeats a task whose worker is lost, at most three times.
    """
    if workers:
        with open_pool(workers, "spawn", leave_signals_to_parent) as pool:
            yield partial(pool.submit, write_apart, work)
    else:
        with join_cluster(num_cpus=1, num_gpus=0) as ray:
            task, shared, directory = ray.remote(max_retries=3)(write_on_ray), ray.put(work), os.getcwd()
            yield lambda number, piece: task.remote(shared, number, piece, directory).future()


def write_in_workers(
    work: BuildWork, pieces: Mapping[int, Piece], workers: int, look: Callable[[], Mapping[int, Piece]], report: Report
) -> None:
    """Write the missing shards of the numbered pieces with workers; what a lost process had to do is done again.

    Args:
        workers: The number of processes; 0 uses Ray.
        look: Called every LOOK seconds, looks for new shards, and returns the pieces that lack some.
    """
    with explain_worker():
        for losses in range(1, LOSSES + 1):
            try:
                with start_workers(work, workers) as submit:
                    with keep_from_interrupts():
                        waiting = {submit(number, piece) for number, piece in pieces.items()}
                    while waiting:
                        done, waiting = wait(waiting, LOOK)
                        for line in (line for future in done for line in future.result()):
                            report(line)
                        look()
                return
            except BrokenProcessPool:
                if losses == LOSSES:
                    raise
                report("a worker was lost; continuing with the missing shards")
                remove_unfinished(work.folder)
                pieces = look()


@contextmanager
def explain_worker() -> Iterator[None]:
    """Convert the error of a worker into its cause, and the loss of a worker into a UsageError."""
    try:
        yield
    except Exception as error:
        cause = getattr(error, "cause", error)  # Ray's error of a task has one
        if isinstance(cause, UsageError | OSError):
            raise cause from None
        if type(error).__module__ not in LOST or cause is not error:
            raise
        raise UsageError(
            f"a worker was lost ({join_lines(error)[:LONGEST_REASON]}); the same command continues from the finished "
            "shards; use fewer --workers if memory is too small"
        ) from None


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    output: Path,
    work: BuildWork,
    pieces: Sequence[Piece],
    tokenizer: "BertTokenizerFast",
    asked: Mapping[str, Any],
    report: Report,
) -> dict[str, Any]:
    """Drop repeats if requested, write the index and the manifest, and return the statistics."""
    folder = work.folder
    raw = {key: read_shard(path) for key, path in list_shards(folder).items()}
    read, noted = Counter[str](), {}
    for (number, _), shard in raw.items():
        read[pieces[number].source] += shard.note["documents"]
        note_lines(noted, shard.note.get("noted", {}))
    if empty := [piece.source for piece in pieces if not read[piece.source]]:
        raise UsageError(f"{empty[0]} holds no text; name sources with text and another --output")
    dtype, before = np.dtype(work.dtype), {}
    if asked["deduplicate"]:
        report(f"dropping repeated {asked['deduplicate']}")
        corpus = join_shards(list(raw.values()), write_index(folder, list(raw.values())), dtype)
        before = {"before": drop_repeats(output / SHARDS, corpus, raw, asked["deduplicate"], report)}
    shards = [read_shard(path) for path in list_shards(output / SHARDS).values()]
    index = write_index(output, shards)
    report("measuring")
    corpus = replace(join_shards(shards, index, dtype), word_offset=len(tokenizer) if asked.get("words") else 0)
    statistics = {
        **measure(corpus, tokenizer.unk_token_id),
        **before,
        "characters": sum(shard.note["characters"] for shard in raw.values()),
        "vocab_size": len(tokenizer),
        **({MARKED_UP: noted.pop(MARKED_UP)} if MARKED_UP in noted else {}),
        **({"left_out": noted} if asked.get("passages") else {}),
    }
    written = [RECORD, *(name for name in TOKENIZER_FILES if (output / name).exists()), index.name]
    names = [*written, *(f"{SHARDS}/{shard.path.name}" for shard in shards)]
    write_manifest(output, names, {"dtype": dtype.name, "build": asked, "statistics": statistics})
    shutil.rmtree(output / PART_FOLDER, ignore_errors=True)
    return statistics


def drop_repeats(
    folder: Path, corpus: TokenizedCorpus, raw: Mapping[tuple[int, int], Shard], unit: Any, report: Report
) -> dict[str, Any]:
    """Write the missing shards without repeats, and return the statistics from before the removal.

    Args:
        corpus: The corpus of the shards in `raw`.
    """
    folder.mkdir(exist_ok=True)
    kept, there, start = choose_kept(corpus, unit), keep_whole(folder, report), 0
    for key, shard in raw.items():
        start, chosen = start + shard.count("sentence_ends"), kept[start : start + shard.count("sentence_ends")]
        if key not in there:
            read = TokenizedCorpus(*map(shard.map, ("ids", "sentence_ends", "document_ends")))
            write_shard(folder, *key, select_sentences(read, chosen), shard.note)
    return {
        "documents": corpus.document_count,
        "sentences": len(corpus.sentence_ends),
        "tokens": len(corpus.ids),
        "repeated": measure_repeats(corpus),
    }
