"""The corpus on disk: written data is read back, across shards, and damaged files are named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bertkit.data.pretraining.store import (
    MANIFEST,
    SHARDS,
    list_shards,
    open_corpus,
    proves_whole,
    read_manifest,
    read_shard,
    write_index,
    write_manifest,
    write_shard,
)
from bertkit.errors import UsageError
from bertkit.system.files import compute_checksum
from tests.corpora import list_documents, make_corpus

# Parts of documents of sentences of token ids; a part may be empty.
PARTS = st.lists(
    st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=4), max_size=4),
    min_size=1,
    max_size=5,
)
NOTE = {"documents": 5, "characters": 60, "is_last": True}


def write_corpus(directory, parts, dtype=np.uint16):
    """Write a finished directory whose pieces have one part each."""
    (directory / SHARDS).mkdir(parents=True)
    paths = [
        write_shard(directory / SHARDS, piece, 0, make_corpus(part, dtype), NOTE) for piece, part in enumerate(parts)
    ]
    index = write_index(directory, [read_shard(path) for path in paths])
    names = [index.name, *(f"{SHARDS}/{path.name}" for path in paths)]
    write_manifest(directory, names, {"dtype": np.dtype(dtype).name, "statistics": {"documents": 3}})
    return directory


@pytest.fixture
def made(tmp_path):
    return write_corpus(tmp_path / "corpus", [[[[1, 2], [3]], [[4]]], [[[5, 6, 7]]], [], [[[8]], [[9, 10]]]])


@settings(max_examples=20, deadline=None)
@given(parts=PARTS, dtype=st.sampled_from([np.uint16, np.uint32]), data=st.data())
def test_shards_side_by_side_are_the_corpus(tmp_path_factory, parts, dtype, data):
    directory = write_corpus(tmp_path_factory.mktemp("corpus") / "made", parts, dtype)
    corpus = open_corpus(directory)
    whole = [document for part in parts for document in part]
    assert list_documents(corpus) == whole
    assert corpus.ids.dtype == dtype
    expected = make_corpus(whole, dtype)
    assert len(corpus.ids) == len(expected.ids)
    for start in range(len(expected.ids) + 1):
        for stop in range(len(expected.ids) + 2):
            assert corpus.ids[start:stop].tolist() == expected.ids[start:stop].tolist()
            assert corpus.ids[start:stop].dtype == dtype
    if len(expected.ids):
        some = np.array(data.draw(st.lists(st.integers(0, len(expected.ids) - 1), min_size=1)))
        assert corpus.ids.take(some).tolist() == expected.ids[some].tolist()


def test_a_slice_of_one_shard_is_a_view(made):
    ids = open_corpus(made).ids
    assert not ids[0:4].flags.owndata
    assert ids[3:5].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        ids[0:2][0] = 1


def test_a_shard_is_a_safetensors_file_with_its_checksum_in_its_name(tmp_path):
    corpus = make_corpus([[[1, 2], [3]], [[4]]])
    path = write_shard(tmp_path, 7, 12, corpus, NOTE)
    assert path.name == f"00007-0012-{compute_checksum(path):08x}.safetensors"
    assert proves_whole(path)
    assert {name: array.tolist() for name, array in load_file(path).items()} == {
        "ids": [1, 2, 3, 4],
        "sentence_ends": [2, 3, 4],
        "document_ends": [2, 3],
    }
    assert read_shard(path).note == NOTE
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing temporary stays"
    content = path.read_bytes()
    path.unlink()
    assert write_shard(tmp_path, 7, 12, corpus, NOTE).read_bytes() == content


def test_shards_are_in_the_order_of_piece_and_part_however_many_there_are(tmp_path):
    numbers = [(100_000, 0), (2, 10_000), (2, 9), (11, 0), (0, 0)]
    for piece, part in numbers:
        write_shard(tmp_path, piece, part, make_corpus([[[1]]]), NOTE)
    assert list(list_shards(tmp_path)) == sorted(numbers)
    assert list(list_shards(tmp_path, 2)) == [(2, 9), (2, 10_000)]


def test_a_corpus_is_there_when_its_manifest_is(made, refused):
    lines = []
    open_corpus(made, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("checking 5 files (")
    assert read_manifest(made)["statistics"] == {"documents": 3}
    (made / MANIFEST).unlink()
    with refused():
        open_corpus(made)
    (made / "build.json").touch()
    with refused():
        open_corpus(made)


def test_flipped_bytes_and_truncations_are_found_and_their_file_is_named(made):
    """Truncated files are found even without checksums."""
    files = sorted(path for path in made.rglob("*") if path.is_file())
    assert len(files) == 6
    for path in files:
        whole = path.read_bytes()
        for index in range(0, len(whole) if path.name != MANIFEST else 0, 37):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            with pytest.raises(UsageError, match=rf"{path.name}.*; the same bertkit corpus build command rebuilds it"):
                open_corpus(made)
        for size in (0, 1, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:size])
            with pytest.raises(UsageError, match=rf"{path.name}.*; the same bertkit corpus build command"):
                open_corpus(made, verify=False)
        if path.name != MANIFEST:
            path.unlink()
            with pytest.raises(UsageError, match=rf"{path.name} is missing; the same bertkit corpus build command"):
                open_corpus(made)
        path.write_bytes(whole)
    open_corpus(made)
