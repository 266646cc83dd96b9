"""Plans beside a corpus on disk: made once, mapped by all, made again if damaged or not storable."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from bertkit.data.pretraining import pair_index
from bertkit.data.pretraining.pair_index import PLAN_FOLDER, find_chunks
from bertkit.data.pretraining.pairs import Pairing
from bertkit.data.pretraining.tokenize import TokenizedCorpus


@pytest.fixture
def corpus(tmp_path):
    sentence_ends = np.cumsum(np.random.default_rng(0).integers(1, 20, 300))
    return TokenizedCorpus(np.arange(sentence_ends[-1]), sentence_ends, np.arange(10, 301, 10), directory=tmp_path)


def count_makes(monkeypatch):
    """Record the calls of the real function."""
    calls = []
    real = Pairing.find_chunks
    monkeypatch.setattr(Pairing, "find_chunks", lambda self: calls.append(self) or real(self))
    return calls


def test_a_plan_is_made_once_and_mapped(corpus, monkeypatch):
    expected = Pairing(corpus, 32, seed=1).find_chunks()
    calls = count_makes(monkeypatch)
    for _ in range(3):
        found = find_chunks(Pairing(corpus, 32, seed=1))
        np.testing.assert_array_equal(found, expected)
        assert (found.dtype, isinstance(found, np.memmap)) == (np.uint32, True)
    assert len(calls) == 1
    assert len(list((corpus.directory / PLAN_FOLDER).glob("*.npy"))) == 1


def test_each_plan_has_its_own_file(corpus, monkeypatch):
    calls = count_makes(monkeypatch)
    pairings = [Pairing(corpus, 32, seed=1), Pairing(corpus, 33, seed=1), Pairing(corpus, 32, seed=2)]
    pairings += [Pairing(corpus, 32, seed=1, copy=1), Pairing(corpus, 32, seed=1, short_seq_prob=0.2)]
    pairings += [Pairing(corpus.select(np.arange(30) % 3 > 0), 32, seed=1)]
    for pairing in [*pairings, *pairings]:
        np.testing.assert_array_equal(find_chunks(pairing), pairing.find_chunks())
    assert len(list((corpus.directory / PLAN_FOLDER).glob("*.npy"))) == len(pairings)
    assert len(calls) == 3 * len(pairings)  # each made once, and compared twice here


def test_a_corpus_that_was_built_anew_has_plans_of_its_own(corpus):
    """The index shows it, because its name has its checksum; here documents are equal but sentences differ."""
    (corpus.directory / "index-00000001.safetensors").touch()
    find_chunks(Pairing(corpus, 32, seed=1))
    (corpus.directory / "index-00000001.safetensors").rename(corpus.directory / "index-00000002.safetensors")
    sentence_ends = np.cumsum(np.random.default_rng(1).integers(1, 20, 300))
    other = Pairing(replace(corpus, ids=np.arange(sentence_ends[-1]), sentence_ends=sentence_ends), 32, seed=1)
    np.testing.assert_array_equal(find_chunks(other), other.find_chunks())


def test_in_memory_nothing_is_kept(corpus):
    found = find_chunks(Pairing(replace(corpus, directory=None), 32, seed=1))
    assert not isinstance(found, np.memmap)
    assert not (corpus.directory / PLAN_FOLDER).exists()


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-4], lambda data: data[:-2] + b"\x07" + data[-1:], lambda data: b""]
)
def test_a_damaged_plan_is_made_anew(corpus, damage):
    expected = np.array(find_chunks(Pairing(corpus, 32, seed=1)))
    (file,) = (corpus.directory / PLAN_FOLDER).glob("*.npy")
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_array_equal(find_chunks(Pairing(corpus, 32, seed=1)), expected)
    assert np.load(file).tolist() == expected.tolist()


def test_where_nothing_can_be_written_the_plan_stays_in_memory(corpus, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pair_index, "write_array", refuse)
    found = find_chunks(Pairing(corpus, 32, seed=1))
    np.testing.assert_array_equal(found, Pairing(corpus, 32, seed=1).find_chunks())


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from bertkit.data.pretraining.pair_index import keep_array
folder = Path(sys.argv[1])
def make():
    with (folder / "made").open("a") as stream:
        stream.write("x")
    time.sleep(0.5)
    return np.arange(5)
print(keep_array(folder / "plans", "name", make).tolist())
"""


def test_of_several_processes_one_makes_it(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["[0, 1, 2, 3, 4]"] * 3
    assert (tmp_path / "made").read_text() == "x"
