"""Sources -> a tokenized corpus on disk (paper §3.1, "Pre-training data"), of any size, by any number of processes.

Sources are divided into pieces. One process at a time reads a piece, finds its sentences, tokenizes them and writes its
shards (`pieces.py`); then this process writes the index, the statistics and the manifest. A shard is a function of its
piece alone, so the schedule changes no byte. After a kill, the same command resumes: finished shards are not touched,
and the documents of an unfinished piece that are in finished shards are skipped.

If repeats are to be removed, the shards of all text are in `parts/` until the shards without repeats are finished.
"""

import os
import platform
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.formats.line import read_json
from bertkit.data.pretraining.pair_index import PLAN_FOLDER
from bertkit.data.pretraining.pieces import BuildWork, PieceJob, write_in_workers, write_piece
from bertkit.data.pretraining.sources import PIECE_BYTES, Piece, cut_sources
from bertkit.data.pretraining.statistics import choose_kept, measure, measure_repeats, select_sentences
from bertkit.data.pretraining.store import (
    MANIFEST,
    PART_FOLDER,
    RECORD,
    SHARDS,
    Part,
    Shard,
    find_damage,
    is_corpus,
    join_shards,
    list_shards,
    proves_whole,
    read_manifest,
    read_shard,
    write_index,
    write_manifest,
    write_shard,
)
from bertkit.data.pretraining.tokenize import TokenizedCorpus, choose_dtype
from bertkit.data.tokenizer import TOKENIZER_FILES, find_backend, save_tokenizer
from bertkit.errors import UsageError, explain_disk_error
from bertkit.system.differences import refuse_other
from bertkit.system.files import hold_directory, map_in_threads, remove_unfinished, write_json
from bertkit.system.progress import Report, ignore

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

TOKENS_A_SHARD = 1 << 24
DEDUPLICATE = ("", "documents", "lines")

# Called with the bytes read, the total bytes (0 if unknown) and the number of tokens written.
BuildProgress = Callable[[int, int, int], None]


def build(
    sources: Sequence[str],
    tokenizer: "BertTokenizerFast",
    output: str | Path,
    *,
    split_sentences: bool = True,
    language: str = "en",
    deduplicate: str = "",
    workers: int = 1,
    report: Report = ignore,
    progress: BuildProgress = ignore,
) -> dict[str, Any]:
    """Build the corpus in `output`, continuing where an earlier build stopped, and return its statistics.

    Args:
        sources, split_sentences, language: As in `bertkit.data.pretraining.sources.read_documents`.
        deduplicate: "documents" drops documents that occurred before, "lines" also every such sentence; "" drops none.
        workers: Number of processes; 1 is this process, 0 uses Ray.

    Raises:
        UsageError: A source cannot be read or is empty, `output` holds another build or something else, the disk is
            full, or worker processes died.
    """
    if deduplicate not in DEDUPLICATE:
        raise UsageError(f"deduplicate is {deduplicate!r}, expected documents or lines; correct it or leave it out")
    backend = find_backend(tokenizer, "a built corpus").to_str()
    output, pieces = Path(output), cut_sources(sources, PIECE_BYTES)
    options = {"split_sentences": split_sentences, "language": language, "deduplicate": deduplicate}
    asked = describe_build(pieces, backend, options)
    with hold_directory(output), explain_disk_error(output):
        if (finished := find_finished(output, asked, report)) is not None:
            return finished
        write_json(asked, output / RECORD)
        save_tokenizer(tokenizer, output)
        shutil.rmtree(output / PLAN_FOLDER, ignore_errors=True)  # plans of an earlier corpus
        folder = output / (PART_FOLDER if deduplicate else SHARDS)
        folder.mkdir(exist_ok=True)
        work = BuildWork(folder, backend, choose_dtype(len(tokenizer)), split_sentences, language, TOKENS_A_SHARD)
        build_pieces(work, pieces, workers, report, progress)
        return finish(output, folder, pieces, tokenizer, asked, report)


def describe_build(pieces: Sequence[Piece], backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that determines the bytes of a corpus; files are described by size and modification time."""
    return {
        "sources": {source: describe_source(source, pieces) for source in dict.fromkeys(p.source for p in pieces)},
        "pieces": f"{len(pieces)} in this order, {_digest([repr(piece) for piece in pieces])}",
        "vocabulary": sha256(backend.encode()).hexdigest()[:16],
        **options,
        "piece_bytes": PIECE_BYTES,
        "shard_tokens": TOKENS_A_SHARD,
    }


def describe_source(source: str, pieces: Sequence[Piece]) -> str:
    """Describe a source in a text that changes when its content does."""
    own = [piece for piece in pieces if piece.source == source]
    files = sorted({file for piece in own for file in piece.files})
    if own[0].kind == "docs":
        packages = sorted(f"{package.name} {package.version}" for package in distributions())
        return f"Python {platform.python_version()}, {len(packages)} packages {_digest(packages)}"
    if not files:
        return f"{len(own)} shards of a data set"
    found = [os.stat(file) for file in files]
    size = sum(status.st_size for status in found)
    changed = datetime.fromtimestamp(max(status.st_mtime for status in found), UTC).isoformat(" ")
    digest = _digest(
        [f"{file} {status.st_size} {status.st_mtime_ns}" for file, status in zip(files, found, strict=True)]
    )
    return f"{len(files)} file{'s' * (len(files) != 1)}, {size:,} bytes, last changed {changed}, {digest}"


def _digest(lines: Sequence[str]) -> str:
    return sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:8]


# --- The directory ----------------------------------------------------------------------------------------------------


def find_finished(output: Path, asked: Mapping[str, Any], report: Report) -> dict[str, Any] | None:
    """Return the statistics of a finished corpus, or None if work remains; damaged files are deleted.

    Raises:
        UsageError: The directory holds another build or something else.
    """
    if (output / RECORD).exists() or is_corpus(output):
        before = read_build(output)
        has_begun = is_corpus(output) or any(any((output / name).glob("[!.]*")) for name in (SHARDS, PART_FOLDER))
        if has_begun:  # before the first shard there is nothing to lose
            refuse_other(f"{output} belongs to another build", before, asked)
    elif any(not path.name.startswith(".") for path in output.iterdir()):
        raise UsageError(f"{output} is not empty and holds no corpus; name another directory with --output")
    for folder in (output, output / SHARDS, output / PART_FOLDER):
        remove_unfinished(folder)
    if not is_corpus(output):
        return None
    try:
        manifest = read_manifest(output)
        damaged = find_damage(output, manifest)
    except UsageError as error:
        report(str(error))
        manifest, damaged = {}, {MANIFEST: ""}
    if not damaged:
        shutil.rmtree(output / PART_FOLDER, ignore_errors=True)  # left if the last process was killed just before
        report(f"{output} is finished")
        return manifest["statistics"]
    write_json(asked, output / RECORD)  # first: without it and the manifest, the directory is not recognised
    (output / MANIFEST).unlink()
    for name, trouble in damaged.items():
        if trouble:
            report(f"{output / name} is {trouble} and will be rewritten")
        if name != RECORD:
            (output / name).unlink(missing_ok=True)
    return None


def read_build(output: Path) -> dict[str, Any]:
    """Read the options of the corpus in a directory, from the manifest if it is intact.

    Raises:
        UsageError: There is no manifest yet, and the file is missing or damaged.
    """
    with suppress(UsageError):
        return read_manifest(output)["build"]
    return read_json(output / RECORD, dict[str, Any], f"delete {output} and run the same command again")


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


def build_pieces(
    work: BuildWork, pieces: Sequence[Piece], workers: int, report: Report, progress: BuildProgress
) -> None:
    """Write the missing shards, and follow their files for the progress."""
    shards = keep_whole(work.folder, report)
    total = 0 if any(not piece.size for piece in pieces) else sum(piece.size for piece in pieces)
    before = sum(shard.count("ids") for shard in shards.values())
    written = 0

    def look() -> list[PieceJob]:
        nonlocal written
        os.utime(work.folder)  # a network disk then lists the files that other machines have written
        for key, path in list_shards(work.folder).items():
            if key not in shards:
                shards[key] = read_shard(path)
        jobs = [PieceJob(number, piece, {}) for number, piece in enumerate(pieces)]
        for (number, part), shard in shards.items():
            jobs[number].notes[part] = shard.note
        written = sum(shard.count("ids") for shard in shards.values()) - before
        progress(sum(job.count_read() for job in jobs), total, written)
        return [job for job in jobs if not job.is_whole()]

    jobs = look()
    finished = f", {len(pieces) - len(jobs)} of them finished" if len(jobs) < len(pieces) else ""
    size = sum(piece.size for piece in pieces)
    report(f"{len(pieces)} piece{'s' * (len(pieces) != 1)} ({size / 1e6:,.0f} MB){finished}")
    start = time.monotonic()
    if len(jobs) == 1:
        workers = min(workers, 1)  # a separate process would only start more slowly
    try:
        if workers == 1:
            for job in jobs:
                write_piece(work, job, report, look)
        elif number := write_in_workers(work, workers, look, report):
            signal.raise_signal(number)
            raise KeyboardInterrupt  # whatever the signal handler did: this build is not finished
    finally:
        remove_unfinished(work.folder)  # dead workers leave unfinished files
    if jobs:
        seconds = time.monotonic() - start
        report(f"{written:,} tokens in {seconds:,.1f} s: {written / seconds:,.0f} tokens/s")


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    output: Path,
    folder: Path,
    pieces: Sequence[Piece],
    tokenizer: "BertTokenizerFast",
    asked: Mapping[str, Any],
    report: Report,
) -> dict[str, Any]:
    """Drop the repeats in `folder` if requested, write the index and the manifest, and return the statistics."""
    raw = {key: read_shard(path) for key, path in list_shards(folder).items()}
    read = Counter[str]()
    for (number, _), shard in raw.items():
        read[pieces[number].source] += shard.note["documents"]
    if empty := [piece.source for piece in pieces if not read[piece.source]]:
        raise UsageError(f"{empty[0]} holds no text; name sources with text and another --output")
    dtype, before = np.dtype(choose_dtype(len(tokenizer))), {}
    if asked["deduplicate"]:
        (output / SHARDS).mkdir(exist_ok=True)
        report(f"dropping repeated {asked['deduplicate']}")
        corpus = join_shards(list(raw.values()), renew_index(folder, list(raw.values())), dtype, mapped=False)
        before = {"before": drop_repeats(output, corpus, raw, asked["deduplicate"], report)}
    shards = [read_shard(path) for path in list_shards(output / SHARDS).values()]
    index = renew_index(output, shards)
    report("measuring")
    corpus = join_shards(shards, index, dtype, mapped=False)
    statistics = {
        **measure(corpus, tokenizer.unk_token_id),
        **before,
        "characters": sum(shard.note["characters"] for shard in raw.values()),
        "vocab_size": len(tokenizer),
    }
    written = [RECORD, *(name for name in TOKENIZER_FILES if (output / name).exists()), index.name]
    names = [*written, *(f"{SHARDS}/{shard.path.name}" for shard in shards)]
    content = {"dtype": dtype.name, "build": asked, "statistics": statistics}
    write_manifest(output, names, content)
    shutil.rmtree(output / PART_FOLDER, ignore_errors=True)
    return statistics


def drop_repeats(
    output: Path, corpus: TokenizedCorpus, raw: Mapping[tuple[int, int], Shard], unit: Any, report: Report
) -> dict[str, Any]:
    """Write the missing shards without repeats, and return the statistics from before the removal.

    Args:
        corpus: The corpus of the shards in `raw`.
    """
    kept = choose_kept(corpus, unit)
    there = keep_whole(output / SHARDS, report)
    start = 0
    for key, shard in raw.items():
        start, chosen = start + shard.count("sentence_ends"), kept[start : start + shard.count("sentence_ends")]
        if key not in there:
            read = TokenizedCorpus(*map(shard.map, ("ids", "sentence_ends", "document_ends")))
            write_shard(output / SHARDS, *key, Part(select_sentences(read, chosen), **shard.note))
    return {
        "documents": corpus.document_count,
        "sentences": len(corpus.sentence_ends),
        "tokens": len(corpus.ids),
        "repeated": measure_repeats(corpus),
    }


def renew_index(folder: Path, shards: Sequence[Shard]) -> Path:
    """Write the index of the shards and delete any other."""
    index = write_index(folder, shards)
    for other in folder.glob("index-*"):
        if other != index:
            other.unlink()
    return index
