"""Plans beside a corpus on disk: made once, mapped by all, made again if damaged or not storable."""

from dataclasses import replace

import numpy as np
import pytest

from bertkit.data.pretraining import dataset
from bertkit.data.pretraining.dataset import PLAN_FOLDER, plan_pairs
from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.tokenize import TokenizedCorpus


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "index-00000001.safetensors").touch()
    sentence_ends = np.cumsum(np.random.default_rng(0).integers(1, 20, 300))
    return TokenizedCorpus(np.arange(sentence_ends[-1]), sentence_ends, np.arange(10, 301, 10), directory=tmp_path)


@pytest.fixture
def made(monkeypatch):
    """Return the pairings whose chunks are found."""
    found, find = [], Pairing.locate_chunks
    monkeypatch.setattr(Pairing, "locate_chunks", lambda self: found.append(self) or find(self))
    return found


def plan(corpus, *options):
    """Return the chunks, as in a new process."""
    plan_pairs.cache_clear()
    return plan_pairs(corpus, *options)[1]


def test_each_plan_is_made_once_and_mapped(corpus, made):
    options = [(corpus, 32, 1, 0, 0.1), (corpus, 33, 1, 0, 0.1), (corpus, 32, 2, 0, 0.1), (corpus, 32, 1, 1, 0.1)]
    options += [(corpus, 32, 1, 0, 0.2), (corpus.select(np.arange(30) % 3 > 0), 32, 1, 0, 0.1)]
    first = [plan(*given) for given in options]
    assert len(made) == len(options)
    for given, expected in zip(options, first, strict=True):
        found = plan(*given)
        np.testing.assert_array_equal(found, expected)
        assert (found.dtype, isinstance(found, np.memmap)) == (np.uint32, True)
        np.testing.assert_array_equal(found, Pairing(*given).locate_chunks())
    assert len(made) == 2 * len(options)  # half of them were for comparison
    assert len(list((corpus.directory / PLAN_FOLDER).iterdir())) == len(options)


def test_a_corpus_that_was_built_anew_has_plans_of_its_own(corpus):
    """The index shows it, because its name has its checksum; here documents are equal but sentences differ."""
    plan(corpus, 32, 1, 0, 0.1)
    (corpus.directory / "index-00000001.safetensors").rename(corpus.directory / "index-00000002.safetensors")
    sentence_ends = np.cumsum(np.random.default_rng(1).integers(1, 20, 300))
    other = replace(corpus, ids=np.arange(sentence_ends[-1]), sentence_ends=sentence_ends)
    np.testing.assert_array_equal(plan(other, 32, 1, 0, 0.1), Pairing(other, 32, 1, 0, 0.1).locate_chunks())


@pytest.mark.parametrize("damage", [lambda content: content[:-4], lambda content: b""])
def test_a_truncated_plan_is_made_anew(corpus, damage):
    expected = plan(corpus, 32, 1, 0, 0.1)
    (file,) = (corpus.directory / PLAN_FOLDER).iterdir()
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_array_equal(plan(corpus, 32, 1, 0, 0.1), expected)
    assert np.load(file).tolist() == expected.tolist()


def test_in_memory_or_where_nothing_can_be_written_the_plan_stays_in_memory(corpus, monkeypatch):
    expected = Pairing(corpus, 32, 1, 0, 0.1).locate_chunks()
    np.testing.assert_array_equal(plan(replace(corpus, directory=None), 32, 1, 0, 0.1), expected)
    assert not (corpus.directory / PLAN_FOLDER).exists()

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(dataset, "atomic_open", refuse)
    np.testing.assert_array_equal(plan(corpus, 32, 1, 0, 0.1), expected)
