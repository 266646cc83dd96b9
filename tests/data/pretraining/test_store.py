"""The corpus on disk: written data is read back, across shards, and damaged files are named."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bertkit.data.pretraining.store import (
    MANIFEST,
    SHARDS,
    Part,
    ShardedIds,
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
from bertkit.data.pretraining.tokenize import TokenizedCorpus, choose_dtype
from bertkit.errors import UsageError
from bertkit.system.files import find_checksum

# Parts of documents of sentences of token ids; a part may be empty.
PARTS = st.lists(
    st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=4), max_size=4),
    min_size=1,
    max_size=5,
)
FEW = settings(max_examples=20, deadline=None)  # each writes files


def make_corpus(documents, dtype=np.uint16):
    sentences = [sentence for document in documents for sentence in document]
    return TokenizedCorpus(
        np.array([token for sentence in sentences for token in sentence], dtype),
        np.cumsum([len(sentence) for sentence in sentences], dtype=np.int64),
        np.cumsum([len(document) for document in documents], dtype=np.int64),
    )


def list_documents(corpus):
    """Return the documents as lists of sentences of token ids."""
    ids = corpus.ids[0 : len(corpus.ids)].tolist()
    ends = corpus.sentence_ends.tolist()
    sentences = [ids[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    ends = corpus.document_ends.tolist()
    return [sentences[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def write_corpus(directory, parts, dtype=np.uint16):
    """Write a finished directory whose pieces have one part each."""
    (directory / SHARDS).mkdir(parents=True)
    paths = [
        write_shard(directory / SHARDS, piece, 0, Part(make_corpus(part, dtype), len(part), 0, True))
        for piece, part in enumerate(parts)
    ]
    index = write_index(directory, [read_shard(path) for path in paths])
    names = [index.name, *(f"{SHARDS}/{path.name}" for path in paths)]
    write_manifest(directory, names, {"dtype": np.dtype(dtype).name, "statistics": {"documents": 3}})
    return directory


@pytest.fixture
def made(tmp_path):
    return write_corpus(tmp_path / "corpus", [[[[1, 2], [3]], [[4]]], [[[5, 6, 7]]], [], [[[8]], [[9, 10]]]])


@FEW
@given(parts=PARTS, dtype=st.sampled_from([np.uint16, np.uint32]), mapped=st.booleans())
def test_shards_side_by_side_are_the_corpus(tmp_path_factory, parts, dtype, mapped):
    directory = write_corpus(tmp_path_factory.mktemp("corpus") / "made", parts, dtype)
    corpus = open_corpus(directory)
    corpus = replace(corpus, ids=ShardedIds(corpus.ids.shards, corpus.ids.dtype, mapped))
    whole = [document for part in parts for document in part]
    assert list_documents(corpus) == whole
    assert corpus.ids.dtype == dtype
    expected = make_corpus(whole, dtype)
    assert len(corpus.ids) == len(expected.ids)
    for start in range(len(expected.ids) + 1):
        for stop in range(len(expected.ids) + 2):
            assert corpus.ids[start:stop].tolist() == expected.ids[start:stop].tolist()
            assert corpus.ids[start:stop].dtype == dtype


def test_a_slice_of_one_shard_is_a_view(made):
    ids = open_corpus(made).ids
    assert ids[0:4].base is not None
    assert not ids[0:4].flags.owndata
    assert ids[3:5].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        ids[0:2][0] = 1


def test_the_ids_are_handed_over_by_the_names_of_their_files(made):
    ids = open_corpus(made).ids
    packed = pickle.dumps(ids)
    assert pickle.loads(packed)[0:10].tolist() == list(range(1, 11))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_large_ids_come_back(tmp_path, vocab_size, dtype):
    assert choose_dtype(vocab_size) == dtype
    documents = [[[vocab_size - 1, 0]], [[1], [2, vocab_size - 1]]]
    corpus = open_corpus(write_corpus(tmp_path / "large", [documents], dtype))
    assert list_documents(corpus) == documents


def test_a_shard_is_a_safetensors_file_with_its_checksum_in_its_name(tmp_path):
    corpus = make_corpus([[[1, 2], [3]], [[4]]])
    path = write_shard(tmp_path, 7, 12, Part(corpus, 5, 60, False))
    assert path.name == f"00007-0012-{find_checksum(path):08x}.safetensors"
    assert proves_whole(path)
    loaded = load_file(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {
        "ids": [1, 2, 3, 4],
        "sentence_ends": [2, 3, 4],
        "document_ends": [2, 3],
    }
    assert read_shard(path).note == {"documents": 5, "characters": 60, "is_last": False}
    assert list_shards(tmp_path) == {(7, 12): path}
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing temporary stays"


def test_shards_are_in_the_order_of_piece_and_part_however_many_there_are(tmp_path):
    part = Part(make_corpus([[[1]]]), 1, 1, True)
    numbers = [(100_000, 0), (2, 10_000), (2, 9), (11, 0), (0, 0)]
    for piece, number in numbers:
        write_shard(tmp_path, piece, number, part)
    assert list(list_shards(tmp_path)) == sorted(numbers)


def test_the_same_content_is_the_same_bytes(tmp_path):
    part = Part(make_corpus([[[1, 2]], [[3]]]), 2, 9, True)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name, 0, 0, part)
    first, second = (next((tmp_path / name).iterdir()) for name in ("a", "b"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_a_corpus_is_there_when_its_manifest_is(made):
    assert is_corpus(made)
    assert read_manifest(made)["statistics"] == {"documents": 3}
    (made / MANIFEST).unlink()
    assert not is_corpus(made)
    with pytest.raises(UsageError, match=r"holds no corpus \(no corpus.json\); make one with bertkit corpus build"):
        open_corpus(made)


def list_files(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_every_flipped_byte_is_found_and_its_file_is_named(made):
    for name in list_files(made):
        path = made / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if len(whole) < 300 else 37):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(UsageError, match=rf"{name} (is truncated or )?(is )?corrupted") as error:
                open_corpus(made)
            assert "\n" not in str(error.value)
        path.write_bytes(whole)
    open_corpus(made)


def test_every_truncated_file_is_found_and_named_even_without_checksums(made):
    for name in list_files(made):
        path = made / name
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:size])
            with pytest.raises(UsageError, match=rf"{name} is truncated .*; the same bertkit corpus build command"):
                open_corpus(made, verify=False)
        path.write_bytes(whole)
        if name != MANIFEST:
            path.unlink()
            with pytest.raises(UsageError, match=rf"{name} is missing; the same bertkit corpus build command"):
                open_corpus(made)
            path.write_bytes(whole)


def test_a_corpus_without_tokens_can_be_mapped(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "empty", [[], []]))
    assert (len(corpus.ids), corpus.document_count, corpus.ids[0:5].tolist()) == (0, 0, [])


def test_what_is_opened_says_what_it_checks(made):
    lines = []
    open_corpus(made, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("checking 5 files (")
    shards = [read_shard(path) for path in list_shards(made / SHARDS).values()]
    assert len(join_shards(shards, next(made.glob("index-*")), np.dtype(np.uint16)).ids) == 10
