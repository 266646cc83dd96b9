"""Sources -> a tokenized corpus on disk (paper §3.1, "Pre-training data"), of any size and by any number of processes.

A source is cut into pieces, and one process at a time reads a piece, finds its sentences, tokenizes them and writes its
shards (`bertkit.data.pretraining.store`); then the index, the statistics and the manifest are made here. A shard is a function of
its piece alone, so who did what when changes no byte, and killed at any moment the same command goes on: finished
shards are not touched, and the documents of an unfinished piece that are in finished shards are only passed over.

Who does the pieces: this process, several spawned ones, or a Ray cluster, whose workers need not share our disk. Worker
processes load neither torch nor transformers.

Where repeats are to go, the shards of all that was read are in `parts/` until the ones without repeats are finished.
"""

import gc
import json
import os
import platform
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import distributions
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertkit.data.pretraining.pair_index import FOLDER as PLANS
from bertkit.data.pretraining.sources import PIECE_BYTES, Document, Piece, cut_sources, ignore, read_piece
from bertkit.data.pretraining.statistics import choose_kept, measure, measure_repeats, select_sentences
from bertkit.data.pretraining.store import (
    MANIFEST,
    PARTS,
    RECORD,
    SHARDS,
    Part,
    Shard,
    find_damage,
    is_corpus,
    join_shards,
    list_shards,
    map_in_threads,
    proves_whole,
    read_manifest,
    read_shard,
    write_index,
    write_manifest,
    write_shard,
)
from bertkit.data.pretraining.tokenize import TokenizedCorpus, choose_dtype, copy_backend, tokenize_in_parts
from bertkit.data.tokenizer import TOKENIZER_FILES, save_tokenizer
from bertkit.errors import UsageError, explain_full_disk, join_lines
from bertkit.studies.workers import TRIES, ClusterWatch, join_cluster
from bertkit.system.files import remove_unfinished, write_json
from bertkit.system.signals import await_note, follow, keep_from_interrupts, note_signals
from bertkit.training.recipe import find_recipe_differences, name_differences

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

TOKENS_A_SHARD = 1 << 24
DEDUPLICATE = ("", "documents", "lines")
TICK = 0.5  # seconds between two looks at the workers

# Takes the bytes that are read, those that there are (0 if unknown) and the tokens that came of them.
Progress = Callable[[int, int, int], None]
# What comes from a Ray worker: a part with its number, a line, or the user's mistake.
Item = tuple[int, Part] | str | UsageError


@dataclass(frozen=True)
class Work:
    """What is the same for every piece. `backend` is the tokenizer as JSON, `folder` where the shards go."""

    backend: str
    dtype: type[np.unsignedinteger]
    split_sentences: bool
    language: str
    shard_tokens: int
    folder: Path


@dataclass(frozen=True)
class Job:
    """A piece with what is left to do of it: `there` is part -> documents of the shards that are finished.

    No part after `stop` is missing; without it, it is not known how many parts the piece has.
    """

    number: int
    piece: Piece
    there: Mapping[int, int]
    stop: int | None = None


def build(
    sources: Sequence[str],
    tokenizer: "BertTokenizerFast",
    output: str | Path,
    *,
    split_sentences: bool = True,
    language: str = "en",
    deduplicate: str = "",
    workers: int = 1,
    report: Callable[[str], None] = ignore,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """The statistics of the corpus that is in `output` afterwards; what is finished there already is not done again.

    Args:
        sources, split_sentences, language: as of `bertkit.data.pretraining.sources.read_documents`.
        deduplicate: "documents" drops those that came before, "lines" also every sentence that did; "" none.
        workers: how many processes; 1 is this one, 0 stands for Ray.

    Raises:
        UsageError: a source cannot be read or is empty, `output` holds another build or something else, the disk is
            full, or a worker process died.
    """
    if deduplicate not in DEDUPLICATE:
        raise UsageError(f"deduplicate is {deduplicate!r}; give documents or lines, or leave it out")
    output, pieces, backend = Path(output), cut_sources(sources, PIECE_BYTES), copy_backend(tokenizer).to_str()
    options = {"split_sentences": split_sentences, "language": language, "deduplicate": deduplicate}
    asked = describe_build(pieces, backend, options)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a directory with --output")
    from bertkit.training.run_dir import hold_directory

    with hold_directory(output), explain_full_disk(output):
        if (finished := find_finished(output, asked, report)) is not None:
            return finished
        write_json(asked, output / RECORD)
        save_tokenizer(tokenizer, output)
        shutil.rmtree(output / PLANS, ignore_errors=True)  # of what was there before
        folder = output / (PARTS if deduplicate else SHARDS)
        folder.mkdir(exist_ok=True)
        work = Work(backend, choose_dtype(len(tokenizer)), split_sentences, language, TOKENS_A_SHARD, folder)
        build_pieces(work, pieces, workers, report, progress)
        return finish(output, work, pieces, tokenizer, asked, report)


def describe_build(pieces: Sequence[Piece], backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What decides every byte of a corpus; what it was made of is described by the files' sizes and times."""
    return {
        "sources": {source: describe_source(source, pieces) for source in dict.fromkeys(p.source for p in pieces)},
        "pieces": f"{len(pieces)} in this order, {_digest([repr(piece) for piece in pieces])}",
        "vocabulary": sha256(backend.encode()).hexdigest()[:16],
        **options,
        "piece_bytes": PIECE_BYTES,
        "shard_tokens": TOKENS_A_SHARD,
    }


def describe_source(source: str, pieces: Sequence[Piece]) -> str:
    """In words that change when what would be read does."""
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


def find_finished(output: Path, asked: Mapping[str, Any], report: Callable[[str], None]) -> dict[str, Any] | None:
    """The statistics of a finished corpus, or None if there is work to do; what is damaged is deleted.

    Raises:
        UsageError: the directory holds another build or something else.
    """
    if (output / RECORD).exists() or is_corpus(output):
        differences = find_recipe_differences(read_record(output), asked)
        has_begun = is_corpus(output) or any(any((output / name).glob("[!.]*")) for name in (SHARDS, PARTS))
        if differences and has_begun:  # before the first shard there is nothing to lose
            raise UsageError(
                f"{output} belongs to another build ({name_differences(differences)}); name another directory with "
                "--output"
            )
    elif any(not path.name.startswith(".") for path in output.iterdir()):
        raise UsageError(f"{output} is not empty and holds no corpus; name another directory with --output")
    for folder in (output, output / SHARDS, output / PARTS):
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
        shutil.rmtree(output / PARTS, ignore_errors=True)  # if the last process was killed just before
        report(f"{output} is finished")
        return manifest["statistics"]
    write_json(asked, output / RECORD)  # first: without it and the manifest nobody would know the directory
    (output / MANIFEST).unlink()
    for name, trouble in damaged.items():
        if trouble:
            report(f"{output / name} is {trouble} and is written anew")
        if name != RECORD:
            (output / name).unlink(missing_ok=True)
    return None


def read_record(output: Path) -> dict[str, Any]:
    """What the corpus in a directory was asked to be: the manifest says it too, and proves itself whole.

    Raises:
        UsageError: there is no manifest yet, and the file is damaged.
    """
    with suppress(UsageError):
        return read_manifest(output)["build"]
    try:
        record = json.loads((output / RECORD).read_bytes())
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(
            f"{output / RECORD} is damaged ({error}); delete {output}, and the same command builds it"
        ) from None
    return record


def keep_whole(folder: Path, report: Callable[[str], None]) -> dict[tuple[int, int], Shard]:
    """(piece, part) -> shard; those that are not as their names say are deleted."""
    shards = list_shards(folder)
    whole: dict[tuple[int, int], Shard] = {}
    for (key, path), is_whole in zip(shards.items(), map_in_threads(proves_whole, list(shards.values())), strict=True):
        if is_whole:
            whole[key] = read_shard(path)
        else:
            report(f"{path} is truncated or corrupted and is written anew")
            path.unlink()
    return whole


def list_jobs(pieces: Sequence[Piece], shards: Mapping[tuple[int, int], Shard]) -> list[Job]:
    """What is left to do."""
    there: dict[int, dict[int, int]] = {}
    last: dict[int, int] = {}
    for (number, part), shard in shards.items():
        there.setdefault(number, {})[part] = shard.note["documents"]
        if shard.note["is_last"]:
            last[number] = part
    jobs = []
    for number, piece in enumerate(pieces):
        parts = there.get(number, {})
        missing = set(range(last[number])) - parts.keys() if number in last else None
        if missing != set():
            jobs.append(Job(number, piece, parts, max(missing) if missing else None))
    return jobs


# --- The pieces -------------------------------------------------------------------------------------------------------


def build_pieces(
    work: Work, pieces: Sequence[Piece], workers: int, report: Callable[[str], None], progress: Progress
) -> None:
    """Writes the shards that are missing."""
    jobs = list_jobs(pieces, keep_whole(work.folder, report))
    total = sum(piece.size for piece in pieces)
    done = len(pieces) - len(jobs)
    finished = f"; {done} of them {'is' if done == 1 else 'are'} finished" if done else ""
    report(f"{len(pieces)} piece{'s' * (len(pieces) != 1)} of {total / 1e6:,.0f} MB{finished}")
    start = time.monotonic()
    tracker = Tracker(work.folder, pieces, progress)
    if workers == 0:
        build_on_ray(work, jobs, tracker, report)
    elif workers == 1 or len(jobs) == 1:
        for job in jobs:
            build_piece(work, job, report, tracker.look)
    elif jobs:
        build_in_processes(work, jobs, min(workers, len(jobs)), tracker, report)
    tracker.look()
    if jobs:
        seconds = time.monotonic() - start
        report(f"{tracker.tokens:,} tokens in {seconds:,.1f} s: {tracker.tokens / seconds:,.0f} tokens/s")


class Tracker:
    """How far a build is, by the shards that are there: the bytes of text, and the tokens since its start."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], progress: Progress) -> None:
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


def read_parts(work: Work, job: Job, report: Callable[[str], None] = ignore) -> Iterator[tuple[int, Part]]:
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
    work: Work, job: Job, report: Callable[[str], None] = ignore, written: Callable[[], None] = ignore
) -> None:
    """Writes the shards of a piece that are missing; `written` is called after each."""
    for number, part in read_parts(work, job, report):
        write_shard(work.folder, job.number, number, part)
        written()


# --- Several processes ------------------------------------------------------------------------------------------------


def build_in_processes(
    work: Work, jobs: Sequence[Job], processes: int, tracker: Tracker, report: Callable[[str], None]
) -> None:
    """Builds the pieces in spawned processes, which end when this one dies or leaves.

    A signal to stop is obeyed between two looks: a handler that raised within a lock of the pool's would leave it
    locked, and the pool would never end.
    """
    noted: list[int] = []
    with note_signals(noted.append, again=signal.SIG_DFL):
        run_pool(work, jobs, processes, tracker, report, noted)
    if noted:
        signal.raise_signal(noted[0])
        raise KeyboardInterrupt  # whatever the handler has done: this build is not finished


def run_pool(
    work: Work,
    jobs: Sequence[Job],
    processes: int,
    tracker: Tracker,
    report: Callable[[str], None],
    noted: Sequence[int],
) -> None:
    """Has the pieces built until they are, or until `noted` holds a signal.

    Raises:
        UsageError: a worker process has died, or the disk is full.
    """
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, initializer=begin, initargs=(reader,))
    try:
        with keep_from_interrupts():
            pending = {pool.submit(serve, work, job) for job in jobs}
        while pending and not noted:
            finished, pending = wait(pending, TICK, FIRST_COMPLETED)
            for future in finished:
                for line in future.result():
                    report(line)
            tracker.look()
        if not pending:
            pool.shutdown()
    except UsageError:
        if not noted:
            raise
    except BrokenProcessPool:
        if not await_note(noted):  # the workers may have had the signal too, and before this process
            raise UsageError(
                "a worker process died (is the memory too small?); the same command continues from what is finished, "
                'with fewer --workers if need be; a script of your own needs: if __name__ == "__main__"'
            ) from None
    finally:
        writer.close()  # at which those that are left end at once
        pool.shutdown(cancel_futures=True)
        reader.close()
        remove_unfinished(work.folder)


def begin(reader: Connection) -> None:
    """What a process does first: it takes one thread, and sees to it that it does not outlive its parent."""
    limit_threads()
    follow(reader)


def limit_threads() -> None:
    """One thread for the tokenizer, which reads this when it is first used."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def serve(work: Work, job: Job) -> list[str]:
    """Builds a piece, in a process of its own; the lines about it."""
    lines: list[str] = []
    with explain_full_disk(work.folder.parent):
        build_piece(work, job, lines.append)
    return lines


# --- Ray --------------------------------------------------------------------------------------------------------------


def build_on_ray(work: Work, jobs: Sequence[Job], tracker: Tracker, report: Callable[[str], None]) -> None:
    """Builds the pieces as Ray tasks, one a CPU; their parts come back and are written here."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of parts that nobody wants after their worker was lost
    with join_cluster(1, 0) as ray:
        work_on_cluster(ray, work, jobs, tracker, report)


def work_on_cluster(ray: Any, work: Work, jobs: Sequence[Job], tracker: Tracker, report: Callable[[str], None]) -> None:
    """Builds the pieces on the cluster that this process is connected to."""
    # Two parts of a piece may wait to be written, no more: memory is bounded here, there and in between.
    task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming", _generator_backpressure_num_objects=2)(
        read_on_ray
    )
    waiting, running, tries = deque(jobs), {}, Counter[int]()
    watch = ClusterWatch(ray)
    try:
        while waiting or running:
            if not watch.check():
                continue
            while waiting and len(running) < max(1, int(ray.cluster_resources().get("CPU", 1))):
                job = waiting.popleft()
                running[task.remote(work, job, os.getcwd())] = job
            ready, _ = ray.wait(list(running), timeout=TICK)
            watch.check()  # to take a part from a raylet that has died would end this process
            for parts in ready:
                job = running.pop(parts)
                try:
                    job = take(ray.get(next(parts)), work, job, report)
                except ray.exceptions.RayError as error:
                    tries[job.number] += 1
                    cause = f"a Ray worker was lost ({type(error).__name__})"
                    if tries[job.number] == TRIES:
                        raise UsageError(f"{cause}, as were {TRIES - 1} before: {join_lines(error)[:300]}") from None
                    report(f"{cause}; another one takes up piece {job.number}")
                    waiting.appendleft(job)
                else:
                    if job is not None:
                        running[parts] = job
            tracker.look()
    finally:
        for parts in running:
            ray.cancel(parts)


def take(item: Item, work: Work, job: Job, report: Callable[[str], None]) -> Job | None:
    """Writes a part that has come from a Ray worker, or tells its line; what is left of the piece then, if anything."""
    if isinstance(item, UsageError):
        raise item
    if isinstance(item, str):
        report(item)
        return job
    number, part = item
    write_shard(work.folder, job.number, number, part)
    is_done = part.is_last or number == job.stop
    return None if is_done else replace(job, there={**job.there, number: part.documents})


def read_on_ray(work: Work, job: Job, folder: str) -> Iterator[Item]:
    """What a Ray worker does: the parts of a piece that are missing, and what is to be said.

    folder: the working directory of the build, which relative paths start from.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    limit_threads()
    lines: list[str] = []
    try:
        for number, part in read_parts(work, job, lines.append):
            if part.is_last:
                yield from lines
            yield number, part
    except UsageError as error:
        yield error


# --- The end ----------------------------------------------------------------------------------------------------------


def finish(
    output: Path,
    work: Work,
    pieces: Sequence[Piece],
    tokenizer: "BertTokenizerFast",
    asked: Mapping[str, Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Drops the repeats if asked to, then writes the index and the manifest; the statistics."""
    raw = {key: read_shard(path) for key, path in list_shards(work.folder).items()}
    check_sources(pieces, raw)
    before = {}
    if asked["deduplicate"]:
        (output / SHARDS).mkdir(exist_ok=True)
        report(f"dropping repeated {asked['deduplicate']}")
        before = {"before": drop_repeats(output, work, raw, asked["deduplicate"], report)}
    shards = [read_shard(path) for path in list_shards(output / SHARDS).values()]
    index = renew_index(output, shards)
    report("measuring")
    corpus = join_shards(shards, index, np.dtype(work.dtype), mapped=False)
    statistics = {
        **measure(corpus, tokenizer.unk_token_id, output),
        **before,
        "characters": sum(shard.note["characters"] for shard in raw.values()),
        "vocab_size": len(tokenizer),
    }
    written = [RECORD, *(name for name in TOKENIZER_FILES if (output / name).exists()), index.name]
    names = [*written, *(f"{SHARDS}/{shard.path.name}" for shard in shards)]
    content = {"dtype": np.dtype(work.dtype).name, "build": asked, "statistics": statistics}
    write_manifest(output, names, content)
    shutil.rmtree(output / PARTS, ignore_errors=True)
    return statistics


def check_sources(pieces: Sequence[Piece], shards: Mapping[tuple[int, int], Shard]) -> None:
    """Nothing, or a UsageError: a source has no document."""
    documents = Counter[str]()
    for (number, _), shard in shards.items():
        documents[pieces[number].source] += shard.note["documents"]
    for piece in pieces:
        if not documents[piece.source]:
            raise UsageError(f"{piece.source} holds no text; name sources that do, and another --output")


def drop_repeats(
    output: Path, work: Work, raw: Mapping[tuple[int, int], Shard], unit: Any, report: Callable[[str], None]
) -> dict[str, Any]:
    """Writes the shards without repeats that are not there yet; the statistics of what there was before."""
    corpus = join_shards(list(raw.values()), renew_index(work.folder, list(raw.values())), np.dtype(work.dtype), False)
    kept = choose_kept(corpus, unit, output)
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
        "repeated": measure_repeats(corpus, output),
    }


def renew_index(folder: Path, shards: Sequence[Shard]) -> Path:
    """The index of the shards, in place of any other."""
    index = write_index(folder, shards)
    for other in folder.glob("index-*"):
        if other != index:
            other.unlink()
    return index
