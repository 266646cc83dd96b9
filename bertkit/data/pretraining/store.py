"""A tokenized corpus on disk (paper §3.1): shards of token ids, an index over them, and a manifest with checksums.

    corpus.json                            the manifest: every file with its size and checksum, and the statistics
    build.json                             the options of the build (`bertkit.data.pretraining.build`)
    vocab.txt, tokenizer.json, …           the tokenizer
    index-CCCCCCCC.safetensors             `sentence_ends` (S,) and `document_ends` (D,) of the whole corpus
    shards/PPPPP-NNNN-CCCCCCCC.safetensors `ids`, `sentence_ends` and `document_ends` of part N of piece P

C is the CRC-32 of the file in hexadecimal digits, so that every shard can be verified by itself. The corpus is its
shards in the order of piece and part. Writes are atomic, and the manifest is written last: its presence means that the
corpus is complete. The arrays are mapped into memory instead of being read.

Left out: the source of the tokens and the order of writing (`bertkit.data.pretraining.build`).
"""

import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from bertkit.data.formats.line import read_json
from bertkit.data.pretraining.sources import BUILT_FILES, BUILT_FOLDERS, is_built
from bertkit.data.pretraining.tokenize import TokenizedCorpus
from bertkit.errors import UsageError
from bertkit.system.files import atomic_open, compute_checksum, map_in_threads, take_fingerprint, write_json
from bertkit.system.progress import ignore

RECORD, MANIFEST = BUILT_FILES
SHARDS, PART_FOLDER = BUILT_FOLDERS  # PART_FOLDER has the shards before repeats are removed
PLAN_FOLDER = "plans"  # a cache of `dataset.py`, which may be deleted at any time
CORPUS_INDEX = "index"
SHARD_SUFFIX = ".safetensors"
SHARD_NAME = re.compile(r"(\d{5,})-(\d{4,})-([0-9a-f]{8})\.safetensors")
STORED_DTYPES = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8")}  # safetensors' names
BUILD_REMEDY = "the same bertkit corpus build command rebuilds it"


@dataclass(frozen=True)
class Shard:
    """A file of arrays."""

    path: Path
    arrays: Mapping[str, tuple[np.dtype, int, int]]  # name -> data type, offset in bytes and length
    note: Mapping[str, Any]  # metadata stored beside the arrays

    def map(self, name: str) -> np.ndarray:
        """Map an array from the file."""
        dtype, offset, length = self.arrays[name]
        # An empty array cannot be mapped. A plain array is sliced in a fraction of the time that np.memmap takes.
        return np.asarray(np.memmap(self.path, dtype, "r", offset, (length,))) if length else np.empty(0, dtype)

    def count(self, name: str) -> int:
        """Return the length of an array."""
        return self.arrays[name][2]


class ShardedIds:
    """The token ids of shards as one flat array (`bertkit.data.pretraining.tokenize.Ids`).

    A slice within a shard is a view of the mapped file; a slice across shards is concatenated.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self.dtype, self.shards = np.dtype(dtype), shards
        self.maps = [shard.map("ids") for shard in shards if shard.count("ids")]
        self.ends = list(accumulate(map(len, self.maps)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tokens: another process maps the same files."""
        return ShardedIds, (self.shards, self.dtype)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        if start >= stop:
            return np.empty(0, self.dtype)
        pieces = []
        for number in range(bisect_right(self.ends, start), bisect_left(self.ends, stop) + 1):
            before = self.ends[number - 1] if number else 0
            pieces.append(self.maps[number][max(start - before, 0) : stop - before])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at `positions` (M,), in any order."""
        owners = np.searchsorted(self.ends, positions, side="right")
        found = np.empty(len(positions), self.dtype)
        for number in np.flatnonzero(np.bincount(owners)).tolist():
            rows = owners == number
            before = self.ends[number - 1] if number else 0
            found[rows] = self.maps[number].take(positions[rows] - before)
        return found


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_arrays(folder: Path, stem: str, arrays: Mapping[str, np.ndarray], note: Mapping[str, Any]) -> Path:
    """Write arrays atomically to `stem`-CCCCCCCC.safetensors in `folder` and return the path."""
    content = save(dict(arrays), {"bertkit": json.dumps(note)})
    path = folder / f"{stem}-{zlib.crc32(content):08x}{SHARD_SUFFIX}"
    with atomic_open(path, "wb") as stream:
        stream.write(content)
    return path


def write_shard(folder: Path, piece: int, part: int, corpus: TokenizedCorpus, note: Mapping[str, Any]) -> Path:
    """Write part `part` of piece `piece` and return its path.

    Args:
        note: `documents` and `characters` that were read for it, with those documents that have no token and are not in
            the corpus, any lines `noted`, and `is_last`, whether it is the last part of its piece.
    """
    arrays = {
        "sentence_ends": corpus.sentence_ends,
        "document_ends": corpus.document_ends,
        "ids": corpus.ids[0 : len(corpus.ids)],
    }
    return write_arrays(folder, f"{piece:05d}-{part:04d}", arrays, note)


def write_index(directory: Path, shards: Sequence[Shard]) -> Path:
    """Write the ends of all sentences and documents to one file, and delete any other index."""
    for other in directory.glob(f"{CORPUS_INDEX}-*"):
        other.unlink()
    arrays = {}
    for name, of in (("sentence_ends", "ids"), ("document_ends", "sentence_ends")):
        arrays[name] = np.zeros(sum(shard.count(name) for shard in shards), np.int64)
        start = before = 0
        for shard in shards:
            arrays[name][start : start + shard.count(name)] = shard.map(name) + before
            start, before = start + shard.count(name), before + shard.count(of)
    return write_arrays(directory, CORPUS_INDEX, arrays, {"shards": len(shards)})


def write_manifest(directory: Path, names: Iterable[str], content: Mapping[str, Any]) -> None:
    """Write the manifest: `content`, and the sizes and checksums of the named files."""
    paths = [directory / name for name in names]
    sizes = [path.stat().st_size for path in paths]
    files = {
        path.relative_to(directory).as_posix(): [size, f"{checksum:08x}"]
        for path, size, checksum in zip(paths, sizes, map_in_threads(compute_checksum, paths), strict=True)
    }
    write_json({**content, "files": files}, directory / MANIFEST)


# --- Reading ----------------------------------------------------------------------------------------------------------


def is_corpus(path: str | Path) -> bool:
    """Return whether the directory holds a finished corpus."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Read corpus.json."""
    path = Path(directory) / MANIFEST
    if not path.is_file() and is_built(directory):
        raise UsageError(f"the corpus {directory} is not finished; the same bertkit corpus build command finishes it")
    if not path.is_file():
        raise UsageError(f"{directory} holds no corpus (no {MANIFEST}); make one with bertkit corpus build")
    return read_json(path, dict[str, Any], BUILD_REMEDY)


def open_corpus(directory: str | Path, report: Callable[[str], None] = ignore, verify: bool = True) -> TokenizedCorpus:
    """Open the corpus of a finished directory, mapped from its files.

    Args:
        verify: Whether to compare the checksums first, which reads every file; sizes are always compared.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    files = manifest["files"]
    if verify:
        report(f"checking {len(files)} files ({sum(size for size, _ in files.values()) / 1e6:,.0f} MB) in {directory}")

    def examine(name: str) -> str:
        path, (size, checksum) = directory / name, files[name]
        found = path.stat().st_size if path.is_file() else -1
        if found != size:
            return "missing" if found < 0 else f"truncated or corrupted ({found:,} bytes, not {size:,})"
        is_whole = not verify or f"{compute_checksum(path):08x}" == checksum
        return "" if is_whole else "corrupted (its checksum differs)"

    for name, trouble in zip(files, map_in_threads(examine, list(files)), strict=True):
        if trouble:
            raise UsageError(f"{directory / name} is {trouble}; {BUILD_REMEDY}")
    shards = [read_shard(directory / name) for name in files if name.startswith(f"{SHARDS}/")]
    index = next(directory / name for name in files if name.startswith(CORPUS_INDEX))
    word_offset = manifest["statistics"]["vocab_size"] if manifest.get("build", {}).get("words") else 0
    corpus = join_shards(shards, index, np.dtype(manifest["dtype"]))
    return replace(corpus, directory=directory, word_offset=word_offset)


def fingerprint_files(directory: Path) -> str:
    """Return a fingerprint of the tokens of a finished corpus, from the checksums of their files."""
    files = read_manifest(directory)["files"]
    return take_fingerprint(
        json.dumps({name: files[name] for name in sorted(files) if name.endswith(SHARD_SUFFIX)}).encode()
    )


def join_shards(shards: Sequence[Shard], index: Path, dtype: np.dtype) -> TokenizedCorpus:
    """Return the corpus of shards, given in order, and their index."""
    ends = read_shard(index)
    return TokenizedCorpus(ShardedIds(shards, dtype), ends.map("sentence_ends"), ends.map("document_ends"))


def list_shards(folder: Path, piece: int | None = None) -> dict[tuple[int, int], Path]:
    """Return (piece, part) -> file, sorted, of all pieces or of one."""
    names = "*" if piece is None else f"{piece:05d}-*"
    found = [(match, path) for path in folder.glob(names) if (match := SHARD_NAME.fullmatch(path.name))]
    return dict(sorted(((int(match[1]), int(match[2])), path) for match, path in found))


def proves_whole(path: Path) -> bool:
    """Return whether a file has the checksum in its name."""
    return f"{compute_checksum(path):08x}" == path.stem.rpartition("-")[2]


def read_shard(path: Path) -> Shard:
    """Read the header of a file of arrays; the arrays themselves are not read."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    note = json.loads(header.pop("__metadata__")["bertkit"])
    arrays = {
        name: (STORED_DTYPES[array["dtype"]], 8 + size + array["data_offsets"][0], array["shape"][0])
        for name, array in header.items()
    }
    return Shard(path, arrays, note)
