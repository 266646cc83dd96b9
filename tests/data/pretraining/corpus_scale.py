"""Measure a build of gigabytes of text: its rate from first to last, memory, two kills, and the first batch.

The text is a given one, repeated with a share of its words replaced by other words of the same text. Words are drawn in
proportion to their counts, and capitals stay where they are, so the statistics of the vocabulary and the ends of
sentences stay those of the given text, but no two repetitions are equal.

The build has two workers. It is killed twice (SIGKILL) and continued; finished shards must not change, and the shards
of the first pieces must equal those of an undisturbed build of the beginning of the text.

$ python -m tests.data.pretraining.corpus_scale TEXT VOCAB FOLDER [GIGABYTES]   # FOLDER gets text and corpora
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bertkit.data.pretraining.sources import PIECE_BYTES
from bertkit.data.pretraining.store import is_corpus, list_shards, proves_whole, read_shard
from bertkit.data.pretraining.tokenize import CHARACTERS_A_BATCH
from tests.data.pretraining.test_build_faults import SCRIPT
from tests.runs import is_running, list_children, wait_until

SHARE = 0.15  # of the words, replaced
WORKERS = 2
KILLS = (0.3, 0.65)  # shares of the pieces after which the build is killed
LEAST_PIECES = 20  # a small text has smaller pieces, so that there is something to kill
SMALL_PIECES = 6  # of the undisturbed build
MEMORY = re.compile(r"VmHWM:\s+(\d+)")
FIRST_BATCH = """
import resource, sys, time
from bertkit.data.pretraining.dataset import Phase, PretrainingData
from bertkit.data.pretraining.store import open_corpus
from bertkit.data.tokenizer import load_tokenizer
from bertkit.tasks.option import PRETRAINING_OPTIONS, list_defaults
import torch

tokenizer, seconds = load_tokenizer(sys.argv[1]), []

def measure(action):
    start = time.perf_counter()
    result = action()
    seconds.append(time.perf_counter() - start)
    return result

def take_first(corpus):
    data = PretrainingData(corpus, tokenizer, [Phase(256_000, 128)], list_defaults(PRETRAINING_OPTIONS), seed=0)
    assert len(data.__getitems__(range(256))["input_ids"]) == 256

measure(lambda: open_corpus(sys.argv[1]))
corpus = measure(lambda: open_corpus(sys.argv[1], verify=False))
measure(lambda: take_first(corpus))
measure(lambda: take_first(corpus))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("open: {:.2f} s with checksums, {:.3f} s without".format(*seconds[:2]))
print("first batch of 256 pairs: {:.2f} s, {:.2f} s when the pairs are planned".format(*seconds[2:]))
print(f"memory: {memory / 1e9:.2f} GB, mapped pages included")
"""


# --- The text ---------------------------------------------------------------------------------------------------------


def list_texts(source):
    return sorted(source.rglob("*.txt")) if source.is_dir() else [source]


def write_varied(source, path, size, seed=0):
    """Write at least `size` bytes of text, up to the end of a document."""
    rng = np.random.default_rng(seed)
    parts = re.split(r"([^\W\d_]+)", "\n\n".join(file.read_text(encoding="utf-8") for file in list_texts(source)))
    gaps, words = np.array(parts[::2], object), np.array(parts[1::2], object)
    capital = np.array([word[0].isupper() for word in words])
    kinds = [np.flatnonzero(capital == kind) for kind in (False, True)]
    written = 0
    with path.open("wb") as stream:
        while written < size:
            drawn = words.copy()
            for kind in kinds:
                chosen = kind[rng.random(len(kind)) < SHARE]
                drawn[chosen] = words[rng.choice(kind, len(chosen))]
            varied = np.empty(len(parts), object)
            varied[::2], varied[1::2] = gaps, drawn
            content = f"{''.join(varied.tolist()).rstrip()}\n\n".encode()
            if written + len(content) > size:
                content = content[: content.index(b"\n\n", size - written) + 2]
            written += stream.write(content)


# --- The build --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A start of the build: when each shard appeared, and the largest memory of its processes in bytes.

    Attributes:
        shards: (seconds since the start, piece, part, number of tokens) of each shard.
        finishing: Seconds from the last shard to the end.
    """

    shards: list[tuple[float, int, int, int]] = field(default_factory=list)
    parent: int = 0
    workers: dict[int, int] = field(default_factory=dict)
    finishing: float = 0.0


def stamp(corpus):
    """Return the shards with inode and modification time."""
    found = {}
    for key, path in list_shards(corpus / "shards").items():
        status = path.stat()
        found[key] = path.name, status.st_ino, status.st_mtime_ns
    return found


def read_memory(pid):
    with contextlib.suppress(OSError):
        if found := MEMORY.search(Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) * 1024
    return 0


def build(folder, text, vocab, corpus, kill_after=None):
    """Build a corpus, or kill the build as soon as it has a number of shards."""
    measured, before = Measured(), stamp(corpus)
    words = [folder / "script.py", "corpus", "build", text, "--vocab", vocab, "--output", corpus, "--workers", WORKERS]
    began = time.monotonic()
    with (folder / "out").open("a") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *map(str, words)], stdout=out, env=environment)
    children, ended = [], False
    try:
        while not ended:
            ended = process.poll() is not None  # then look once more
            now = stamp(corpus)
            for key in now.keys() - before.keys() - {(piece, part) for _, piece, part, _ in measured.shards}:
                shard = read_shard(corpus / "shards" / now[key][0])
                measured.shards.append((time.monotonic() - began, *key, shard.count("ids")))
            children = list_children(process.pid)
            measured.parent = max(measured.parent, read_memory(process.pid))
            for child in children:
                measured.workers[child] = max(measured.workers.get(child, 0), read_memory(child))
            if kill_after is not None and len(now) >= kill_after:
                break
            time.sleep(0.1)
    finally:
        process.kill()
    code = process.wait()
    measured.finishing = time.monotonic() - began - (measured.shards[-1][0] if measured.shards else 0)
    if kill_after is None:
        assert code == 0, f"the build failed with exit code {code}; its output is in {folder / 'out'}"
        return measured
    assert ended is False, "the build ended before it was killed"
    assert wait_until(lambda: not any(map(is_running, children)), 10), "the workers outlive the killed build"
    now = stamp(corpus)
    assert not is_corpus(corpus)
    assert before.items() <= now.items(), "a finished shard has changed"
    return measured


def list_rates(starts, piece_bytes):
    """Return (gigabyte of the text, tokens, tokens per second).

    The first shards of a start are left out: its workers begin together, and the time is that of loading Python too.
    """
    tokens, seconds = {}, {}
    for start in starts:
        for (earlier, *_), (later, piece, _, count) in zip(
            start.shards[WORKERS - 1 :], start.shards[WORKERS:], strict=False
        ):
            gigabyte = int(piece * piece_bytes // 1e9) + 1
            tokens[gigabyte] = tokens.get(gigabyte, 0) + count
            seconds[gigabyte] = seconds.get(gigabyte, 0.0) + later - earlier
    return [(gigabyte, tokens[gigabyte], tokens[gigabyte] / seconds[gigabyte]) for gigabyte in sorted(tokens)]


def compare(large, small, pieces):
    """Check that the shards of the first pieces are equal and whole, and return how many they are."""
    found = [
        {key: path for key, path in list_shards(corpus / "shards").items() if key[0] < pieces}
        for corpus in (large, small)
    ]
    assert {path.name for path in found[0].values()} == {path.name for path in found[1].values()}
    assert all(proves_whole(path) for shards in found for path in shards.values())
    return len(found[0])


def main(source, vocab, folder, gigabytes="5"):
    """Print the rates, the memory, the kills and the times."""
    source, vocab, folder, size = Path(source), Path(vocab), Path(folder), int(float(gigabytes) * 1e9)
    folder.mkdir(parents=True)
    text, corpus = folder / "text.txt", folder / "corpus"
    start = time.perf_counter()
    write_varied(source, text, size)
    print(f"{text.stat().st_size / 1e9:.3f} GB of text in {time.perf_counter() - start:.0f} s", flush=True)

    piece_bytes = min(PIECE_BYTES, size // LEAST_PIECES)
    (folder / "script.py").write_text(
        SCRIPT.format(piece_bytes=piece_bytes, shard_tokens=1 << 24, batch=CHARACTERS_A_BATCH)
    )
    pieces = -(-text.stat().st_size // piece_bytes)
    start, starts = time.perf_counter(), []
    for share in KILLS:
        starts.append(build(folder, text, vocab, corpus, kill_after=int(share * pieces)))
        print(f"killed with {len(stamp(corpus))} of {pieces} pieces finished", flush=True)
    before = stamp(corpus)
    starts.append(build(folder, text, vocab, corpus))
    assert before.items() <= stamp(corpus).items(), "a finished shard has changed"
    print(f"finished in {time.perf_counter() - start:.0f} s, {starts[-1].finishing:.0f} s of them after the last shard")

    print("| gigabyte | tokens | tokens per second |\n|---|---|---|")
    for gigabyte, tokens, rate in list_rates(starts, piece_bytes):
        print(f"| {gigabyte} | {tokens:,} | {rate:,.0f} |")
    peaks = [f"{memory / 1e6:,.0f}" for one in starts for memory in sorted(one.workers.values())[-WORKERS:]]
    print(f"memory in MB: workers {', '.join(peaks)}; parent {max(one.parent for one in starts) / 1e6:,.0f}")
    print(f"{len(before)} shards finished before the kills are unchanged", flush=True)

    with text.open("rb") as stream:
        content = stream.read(SMALL_PIECES * piece_bytes)
        content += b"".join(iter(stream.readline, b"\n")) + b"\n"  # to the end of the document
    (folder / "small.txt").write_bytes(content)
    build(folder, folder / "small.txt", vocab, folder / "small")
    same = compare(corpus, folder / "small", SMALL_PIECES)
    print(f"{same} shards equal those of an undisturbed build of the first {len(content) / 1e9:.3f} GB", flush=True)
    subprocess.run([sys.executable, "-c", FIRST_BATCH, str(corpus)], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
