"""The job of a worker of a build, also without the disk of the sources."""

import gzip
import json
import os

import pytest

from bertkit.data.pretraining.pieces import BuildWork, PieceJob, read_parts, read_parts_elsewhere
from bertkit.data.pretraining.sources import Piece, cut_sources
from bertkit.data.pretraining.tokenize import choose_dtype
from bertkit.data.tokenizer import copy_backend, make_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.system import disk as disks
from tests.system.disks import LocalDisk, watch
from tests.training.test_run import write_text


@pytest.fixture
def work(tmp_path):
    """Write a text, the same as .gz and as JSONL, and return the options of a build."""
    text = write_text(tmp_path / "texts.txt", documents=60).read_text()
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    rows = [json.dumps({"text": document}) for document in text.split("\n\n")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    tokenizer = make_tokenizer(train_vocabulary(text.splitlines(), size=100), cased=False)
    return BuildWork(copy_backend(tokenizer).to_str(), choose_dtype(len(tokenizer)), True, "en", 300)


def show(parts):
    """Return the parts as plain values."""
    return [
        (number, part.corpus.ids.tolist(), part.corpus.sentence_ends.tolist(), part.documents, part.is_last)
        for number, part in parts
    ]


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_worker_without_the_disk_reads_the_same_parts(work, tmp_path, monkeypatch, is_relative):
    """Pieces begin in the middle of a file, and blocks in the middle of a line."""
    monkeypatch.setattr(disks, "BLOCK", 1000)
    monkeypatch.chdir(tmp_path)
    place = "." if is_relative else str(tmp_path)
    pieces = cut_sources([f"{place}/{name}" for name in ("texts.txt", "packed.txt.gz", "rows.jsonl")], 3000)
    assert len(pieces) > 6
    for piece in pieces:
        here, there, job = [], [], PieceJob(0, piece, {})
        read_parts(job, work, here.append)
        os.chdir("/")
        with watch(tmp_path) as opened:
            read_parts_elsewhere(LocalDisk(str(tmp_path)), job, work, there.append)
            assert opened == []
        os.chdir(tmp_path)
        assert show(there) == show(here)
        assert here


def test_a_mistake_is_named_by_its_line_without_the_disk_too(work, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"one line\n\n" * 1000 + b"caf\xe9\n")
    last = cut_sources([str(tmp_path / "latin.txt")], 3000)[-1]
    disk = LocalDisk(str(tmp_path))
    with pytest.raises(UsageError, match=rf"^{tmp_path}/latin.txt, line 2001 is not UTF-8 "), watch(tmp_path) as opened:
        read_parts_elsewhere(disk, PieceJob(0, last, {}), work, [].append)
    assert opened == []
    with pytest.raises(UsageError, match=r"gone.txt does not exist; check the folder and the name of the file"):
        read_parts_elsewhere(disk, PieceJob(0, Piece("gone.txt", "text", "gone.txt"), {}), work, [].append)
