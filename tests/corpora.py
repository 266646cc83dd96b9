"""Corpora of the tests: texts, token ids in memory, and the files of built ones."""

import contextlib
import os
import resource
from itertools import pairwise
from pathlib import Path

import numpy as np

from bertkit.data.pretraining.store import SHARD_NAME
from bertkit.data.pretraining.tokenize import TokenizedCorpus

# The command with small pieces and shards; code above the guard also runs in the worker processes.
SCRIPT = """
import sys
from bertkit.data.pretraining import build, tokenize
build.PIECE_BYTES, build.TOKENS_A_SHARD = {piece_bytes}, {shard_tokens}
tokenize.CHARACTERS_A_BATCH = {batch}
if __name__ == "__main__":
    from bertkit.cli import main
    main()
"""


def write_text(path, documents=40, seed=0):
    """Write a corpus whose documents each have a few words of their own, so that there is something to learn."""
    draw = np.random.default_rng(seed)
    words = ["".join(draw.choice(list("abcdefghij"), 4)) for _ in range(80)]
    texts = []
    for _ in range(documents):
        own = draw.choice(words, 6, replace=False)
        lines = [" ".join(draw.choice(own, draw.integers(4, 9))).capitalize() + "." for _ in range(draw.integers(4, 9))]
        texts.append("\n".join(lines))
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def write_divided(path, documents=30, seed=0):
    """Write a text whose words are divided by spaces, and beside it, as `plain.txt`, the same text without them."""
    draw = np.random.default_rng(seed)
    words = ["中", "国", "的", "人民", "日报", "新年", "大会堂", "中国人民", "ab", "b", "12"]
    texts = []
    for _ in range(documents):
        sentences = [" ".join([*draw.choice(words, draw.integers(3, 12)), "。"]) for _ in range(draw.integers(2, 9))]
        texts.append(" ".join(sentences))
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    path.with_name("plain.txt").write_text("\n\n".join(texts).replace(" ", "") + "\n", encoding="utf-8")
    return path


def make_corpus(documents, dtype=np.uint16):
    """Return a corpus of documents of sentences of token ids."""
    sentences = [sentence for document in documents for sentence in document]
    return TokenizedCorpus(
        np.array([token for sentence in sentences for token in sentence], dtype),
        np.cumsum([len(sentence) for sentence in sentences], dtype=np.int64),
        np.cumsum([len(document) for document in documents], dtype=np.int64),
    )


def list_documents(corpus):
    """Return the documents as lists of sentences of token ids, by walking over the arrays."""
    sentences = [corpus.ids[start:end].tolist() for start, end in pairwise([0, *corpus.sentence_ends.tolist()])]
    bounds = zip(corpus.document_starts.tolist(), corpus.document_ends.tolist(), strict=True)
    return [sentences[start:end] for start, end in bounds]


def drop_repeats(documents, unit):
    """Return the documents that remain without repeats, by a naive search."""
    seen, kept = set(), []
    for document in documents:
        tokens = tuple(token for sentence in document for token in sentence)
        if tokens not in seen:
            seen.add(tokens)
            kept.append(document)
    if unit == "documents":
        return kept
    lines, cleaned = set(), []
    for document in kept:
        rest = []
        for line in map(tuple, document):
            if line not in lines:
                lines.add(line)
                rest.append(list(line))
        if rest:
            cleaned.append(rest)
    return cleaned


# --- Files


def read_files(directory):
    """Return name -> bytes of all files in a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def list_finished(directory):
    """Return each complete shard with inode and modification time, which change when it is written again."""
    found = {}
    for folder, _, names in os.walk(directory):  # unlike rglob it tolerates folders that vanish
        for path in (Path(folder, name) for name in names if SHARD_NAME.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):
                found[path] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@contextlib.contextmanager
def limit_files(size):
    """Limit the file size in this process and its children: the system then reports "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
