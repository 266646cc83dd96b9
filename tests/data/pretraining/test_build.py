"""Building a corpus: the same bytes with any workers; after a kill, the same command finishes it."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bertkit.data.pretraining.build
from bertkit.data.pretraining import pieces, store, tokenize
from bertkit.data.pretraining.build import RECORD, build, describe_source
from bertkit.data.pretraining.sources import cut_sources, read_documents
from bertkit.data.pretraining.store import (
    MANIFEST,
    PART_FOLDER,
    SHARD_NAME,
    SHARDS,
    list_shards,
    open_corpus,
    read_manifest,
    read_shard,
)
from bertkit.data.pretraining.tokenize import choose_dtype, tokenize_documents
from bertkit.data.tokenizer import copy_backend, load_tokenizer, make_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from bertkit.system.progress import ignore
from tests.data.pretraining.test_statistics import drop_repeats
from tests.data.pretraining.test_store import list_documents
from tests.training.test_run import write_text


@pytest.fixture
def tokenizer(text):
    return make_tokenizer(train_vocabulary(text.read_text().splitlines(), size=100), cased=False)


@pytest.fixture
def text(tmp_path):
    """Write a folder of texts with repeated documents and lines, and with special tokens written out."""
    path = write_text(tmp_path / "texts.txt", documents=30)
    content = path.read_text()
    documents = content.split("\n\n")
    repeated = "\n\n".join([*documents[:4], documents[5] + "\nA [MASK] and a [SEP] here.\n" + documents[6]])
    path.write_text(content + "\n" + repeated + "\n")
    return path


@pytest.fixture
def small(monkeypatch):
    """Set pieces of some kilobytes, batches of a few documents and shards of about two batches."""
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    monkeypatch.setattr(bertkit.data.pretraining.build, "TOKENS_A_SHARD", 300)
    monkeypatch.setattr(tokenize, "CHARACTERS_A_BATCH", 500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def read_files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_every_number_of_workers_gives_the_corpus_of_one_go(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    sources = [str(text)]
    assert len(cut_sources(sources, 3000)) > 2
    expected = list_documents(tokenize_documents(read_documents(sources), tokenizer))
    made = {}
    for workers in (1, 2, 3):
        output = tmp_path / str(workers)
        statistics = build(sources, tokenizer, output, workers=workers)
        corpus = open_corpus(output)
        assert list_documents(corpus) == expected
        assert corpus.ids.dtype == np.uint16
        assert statistics["documents"] == len(expected)
        assert statistics["tokens"] == len(corpus.ids)
        assert statistics["characters"] == sum(len(s) for document in read_documents(sources) for s in document)
        made[workers] = read_files(output)
    assert made[1] == made[2] == made[3]
    assert load_tokenizer(tmp_path / "2").get_vocab() == tokenizer.get_vocab()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("small")
def test_pieces_larger_than_a_shard_have_several_parts(text, tokenizer, tmp_path):
    sources = [str(text), str(text)]
    build(sources, tokenizer, tmp_path / "made")
    parts = list_shards(tmp_path / "made" / SHARDS)
    assert len({piece for piece, _ in parts}) == len(cut_sources(sources, 3000))
    assert max(part for _, part in parts) >= 1
    notes = {key: read_shard(path).note for key, path in parts.items()}
    assert [key for key in notes if notes[key]["is_last"]] == [
        key for key in notes if (key[0], key[1] + 1) not in notes
    ]
    expected = list_documents(tokenize_documents(read_documents(sources), tokenizer))
    assert list_documents(open_corpus(tmp_path / "made")) == expected


def test_a_large_vocabulary_takes_32_bits(text, tokenizer, tmp_path):
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    large = make_tokenizer(known[:5] + [f"[unused{n}]" for n in range(1 << 16)] + known[5:], cased=False)
    build([str(text)], large, tmp_path / "made")
    corpus = open_corpus(tmp_path / "made")
    assert corpus.ids.dtype == np.uint32
    assert list_documents(corpus) == list_documents(tokenize_documents(read_documents([str(text)]), large))


def test_options_reach_the_reader(text, tokenizer, tmp_path):
    text.write_text("One. Two. Three.\nFour\n\nFive. Six.\n")
    for split, sentences in ((True, 6), (False, 3)):
        made = build([str(text)], tokenizer, tmp_path / str(split), split_sentences=split)
        assert made["sentences"] == sentences


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["documents", "lines"])
def test_repeats_are_dropped_and_what_there_was_is_told(text, tokenizer, tmp_path, unit):
    everything = list_documents(tokenize_documents(read_documents([str(text)]), tokenizer))
    expected = drop_repeats(everything, unit)
    statistics = build([str(text)], tokenizer, tmp_path / "made", deduplicate=unit)
    assert list_documents(open_corpus(tmp_path / "made")) == expected
    assert len(expected) < len(everything)
    assert statistics["documents"] == len(expected)
    assert statistics["before"]["documents"] == len(everything)
    assert statistics["before"]["repeated"]["documents"]["count"] >= 4
    assert statistics["repeated"]["documents"]["count"] == 0
    assert (statistics["repeated"]["lines"]["count"] == 0) == (unit == "lines")
    assert not (tmp_path / "made" / PART_FOLDER).exists()


# --- The same command again -------------------------------------------------------------------------------------------


def stamp(directory):
    """Return inode and modification time of each shard, which change when it is written again."""
    found = {}
    for folder, _, names in os.walk(directory):  # unlike rglob it tolerates folders that vanish
        for path in (Path(folder, name) for name in names if name.endswith(".safetensors")):
            with contextlib.suppress(FileNotFoundError):
                found[path] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def test_a_finished_corpus_is_not_built_again(text, tokenizer, tmp_path):
    first = build([str(text)], tokenizer, tmp_path / "made")
    before, lines = stamp(tmp_path / "made"), []
    assert build([str(text)], tokenizer, tmp_path / "made", report=lines.append, workers=2) == first
    assert lines == [f"{tmp_path / 'made'} is finished"]
    assert stamp(tmp_path / "made") == before


def test_another_command_is_refused_and_the_difference_is_named(text, tokenizer, tmp_path):
    made = tmp_path / "made"
    build([str(text)], tokenizer, made)
    before = read_files(made)
    with pytest.raises(UsageError, match=r'belongs to another build \(deduplicate: "" -> "lines"\); name another'):
        build([str(text)], tokenizer, made, deduplicate="lines")
    with pytest.raises(UsageError, match="split_sentences: true -> false"):
        build([str(text)], tokenizer, made, split_sentences=False)
    with pytest.raises(UsageError, match="vocabulary: "):
        build([str(text)], make_tokenizer([*tokenizer.get_vocab()], cased=True), made)
    other = write_text(tmp_path / "other.txt")
    with pytest.raises(UsageError, match=r"other.txt: \(not set\) -> \"1 file, "):
        build([str(text), str(other)], tokenizer, made)
    os.utime(text, (1, 1))
    with pytest.raises(UsageError, match=r"texts.txt: .*last changed .* -> .*last changed 1970-01-01"):
        build([str(text)], tokenizer, made)
    assert read_files(made) == before


def test_sources_in_another_order_or_number_are_another_build(text, tokenizer, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("Good words here.\nAnd bad ones.\n")
    second.write_text("So many words.\nGood ones.\n")
    build([str(first), str(second)], tokenizer, tmp_path / "corpus")
    for sources in ([second, first], [first, first, second]):
        with pytest.raises(UsageError, match=r"belongs to another build \(pieces: "):
            build(list(map(str, sources)), tokenizer, tmp_path / "corpus")


def test_a_build_without_a_shard_gives_way_to_another(text, tokenizer, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"Good words.\n\nBad \x00 ones.\n")
    with pytest.raises(UsageError, match=r"bad.txt"):
        build([str(bad)], tokenizer, tmp_path / "corpus")
    bad.write_text("Good words.\n\nBad ones.\n")
    assert build([str(bad)], tokenizer, tmp_path / "corpus")["documents"] == 2


def test_other_directories_are_left_alone(text, tokenizer, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="mine is not empty and holds no corpus; name another directory"):
        build([str(text)], tokenizer, tmp_path / "mine")
    with pytest.raises(UsageError, match="deduplicate is 'words', expected documents or lines"):
        build([str(text)], tokenizer, tmp_path / "new", deduplicate="words")
    with pytest.raises(UsageError, match=r"'missing\.txt' does not exist"):
        build(["missing.txt"], tokenizer, tmp_path / "new")
    assert read_files(tmp_path / "mine") == {"notes.txt": b"mine"}
    assert not (tmp_path / "new").exists()


def kill_at(number, before, *arguments):
    """Build in a process that kills itself with signal 9 at its file `number`, before or after renaming it."""
    rename, count = os.replace, 0

    def rename_or_die(old, new):
        nonlocal count
        count += 1
        if count == number and not before:
            rename(old, new)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    store.os.replace = rename_or_die
    build(*arguments[:3], deduplicate=arguments[3])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["", "lines"])
def test_killed_at_any_file_it_goes_on_and_ends_with_the_same_bytes(text, tokenizer, tmp_path, unit):
    """A build is killed repeatedly, each time a little further; finished files are not written again."""
    straight, made = tmp_path / "straight", tmp_path / "made"
    build([str(text)], tokenizer, straight, deduplicate=unit)
    kills = 0
    for number in range(2, 60):
        there = stamp(made)
        # In every process the record comes first, so the second file is new; then also later ones.
        process = multiprocessing.get_context("fork").Process(
            target=kill_at, args=(2 + number % 3, number % 2 == 0, [str(text)], tokenizer, made, unit)
        )
        process.start()
        process.join()
        now = stamp(made)
        finished = {path for path in there if SHARD_NAME.fullmatch(path.name)}
        assert all(now[path] == there[path] for path in finished & now.keys())
        assert all(path.parent.name == PART_FOLDER for path in finished - now.keys())
        if process.exitcode == 0:
            break
        kills += 1
        assert process.exitcode == -signal.SIGKILL
        if (made / MANIFEST).exists():
            break
    assert kills > 8
    build([str(text)], tokenizer, made, deduplicate=unit)
    assert read_files(made) == read_files(straight)


@pytest.mark.usefixtures("small")
def test_of_an_unfinished_piece_only_what_is_missing_is_tokenized(text, tokenizer, tmp_path, monkeypatch):
    straight, made = tmp_path / "straight", tmp_path / "made"
    build([str(text)], tokenizer, straight)
    build([str(text)], tokenizer, made)
    (made / MANIFEST).unlink()
    lost = next(piece for piece, part in list_shards(made / SHARDS) if part == 2)
    list_shards(made / SHARDS)[lost, 1].unlink()
    written = []
    write = store.write_shard
    monkeypatch.setattr(pieces, "write_shard", lambda *given: written.append(given[1:3]) or write(*given))
    build([str(text)], tokenizer, made)
    assert written == [(lost, 1)]
    assert read_files(made) == read_files(straight)


class Mortal:
    """Workers in this process, which die after some shards of a piece."""

    def __init__(self, shards):
        self.shards, self.deaths = shards, 0

    @contextlib.contextmanager
    def start(self, work, number):
        yield lambda job: self.do(work, pickle.loads(pickle.dumps(job)))

    def do(self, work, job):
        future, wrote = Future(), []

        def write():
            wrote.append(job)
            if len(wrote) > self.shards:
                self.deaths += 1
                raise BrokenProcessPool("terminated")

        try:
            write()
            pieces.write_piece(work, job, ignore, write)
            future.set_result([])
        except BrokenProcessPool as error:
            future.set_exception(error)
        return future


@pytest.mark.usefixtures("small")
def test_a_piece_whose_worker_has_died_goes_on_behind_its_finished_shards(text, tokenizer, tmp_path, monkeypatch):
    """Every worker dies after its first shard of a piece, also after the last one."""
    workers, lines = Mortal(shards=1), []
    build([str(text)], tokenizer, tmp_path / "straight")
    monkeypatch.setattr(pieces, "start_workers", workers.start)
    monkeypatch.setattr(pieces, "await_note", lambda noted: False)
    build([str(text)], tokenizer, tmp_path / "made", workers=2, report=lines.append)
    assert workers.deaths == len(list_shards(tmp_path / "made" / SHARDS)) > 10
    assert "a worker was lost (terminated); continuing with the pieces that are left" in lines
    assert read_files(tmp_path / "made") == read_files(tmp_path / "straight")


def test_workers_that_die_without_a_shard_end_the_build(text, tokenizer, tmp_path, monkeypatch):
    workers = Mortal(shards=0)
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    monkeypatch.setattr(pieces, "start_workers", workers.start)
    monkeypatch.setattr(pieces, "await_note", lambda noted: False)
    with pytest.raises(
        UsageError, match=r"a worker was lost \(.*\) 3 times in a row .*; the same command continues from"
    ):
        build([str(text)], tokenizer, tmp_path / "made", workers=2)
    assert workers.deaths == 3 * len(cut_sources([str(text)], 3000))


def test_a_ray_worker_needs_the_disk_of_the_corpus(text, tokenizer, tmp_path, monkeypatch):
    """It resolves relative paths as the command does."""
    build([str(text)], tokenizer, tmp_path / "made")
    whole = read_files(tmp_path / "made")
    (shard,) = list_shards(tmp_path / "made" / SHARDS).values()
    shard.unlink()
    job = pieces.PieceJob(0, replace(cut_sources([str(text)])[0], path=text.name), {})
    work = pieces.BuildWork(
        Path("made", SHARDS), copy_backend(tokenizer).to_str(), choose_dtype(len(tokenizer)), True, "en", 1000
    )
    monkeypatch.chdir("/")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    with pytest.raises(
        UsageError, match=rf"^{socket.gethostname()} does not see made; --workers ray needs a disk that"
    ):
        pieces.write_on_ray(work, job, str(tmp_path / "elsewhere"))
    assert pieces.write_on_ray(work, job, str(tmp_path)) == []
    assert read_files(tmp_path / "made") == whole


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["", "documents"])
def test_what_is_damaged_is_written_anew_by_the_same_command(text, tokenizer, tmp_path, unit):
    made = tmp_path / "made"
    statistics = build([str(text)], tokenizer, made, deduplicate=unit)
    whole = read_files(made)
    samples = [sorted(name for name in whole if name.startswith(SHARDS))[1]]
    samples += [name for name in whole if not name.startswith(SHARDS)]
    assert len(samples) == 7
    for number, name in enumerate(samples):
        content = whole[name]
        damaged = content[: len(content) // 2] if number % 2 else content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        (made / name).write_bytes(damaged)
        with pytest.raises(UsageError, match=rf"{name} is truncated|{name} is corrupted"):
            open_corpus(made)
        before, lines = stamp(made), []
        assert build([str(text)], tokenizer, made, deduplicate=unit, report=lines.append) == statistics
        assert read_files(made) == whole
        assert any(name in line for line in lines)
        after = stamp(made)
        assert {path for path in before if path.parent.name == SHARDS and after[path] != before[path]} <= {made / name}


@pytest.mark.usefixtures("small")
def test_a_damaged_shard_of_an_unfinished_build_is_written_anew(text, tokenizer, tmp_path):
    made, lines = tmp_path / "made", []
    build([str(text)], tokenizer, made)
    whole = read_files(made)
    (made / MANIFEST).unlink()
    path = list_shards(made / SHARDS)[1, 0]
    path.write_bytes(path.read_bytes()[:-1])
    build([str(text)], tokenizer, made, report=lines.append)
    assert f"{path} is truncated or corrupted and will be rewritten" in lines
    assert read_files(made) == whole


def test_a_record_that_says_something_else_is_damage_if_the_manifest_says_so(text, tokenizer, tmp_path):
    made, lines = tmp_path / "made", []
    build([str(text)], tokenizer, made)
    whole = read_files(made)
    (made / RECORD).write_bytes(whole[RECORD].replace(b'"en"', b'"eo"'))
    build([str(text)], tokenizer, made, report=lines.append)
    assert read_files(made) == whole
    assert "build.json is corrupted" in lines[0]


def test_a_damaged_record_of_an_unfinished_build_is_one_line(text, tokenizer, tmp_path):
    made = tmp_path / "made"
    build([str(text)], tokenizer, made)
    (made / MANIFEST).unlink()
    (made / RECORD).write_text("[]")
    with pytest.raises(UsageError, match=r"build.json: Expected `object`, got `array`; delete .*made and run"):
        build([str(text)], tokenizer, made)


# --- Sources ----------------------------------------------------------------------------------------------------------


def test_an_empty_source_is_refused(text, tokenizer, tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(UsageError, match=r"blank.txt holds no text; name sources with text"):
        build([str(text), str(tmp_path / "blank.txt")], tokenizer, tmp_path / "made")
    (tmp_path / "single.txt").write_text("One.\nTwo.\n")
    with pytest.raises(UsageError, match=r"needs two; put a blank line"):
        build([str(tmp_path / "single.txt")], tokenizer, tmp_path / "other")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_in_a_source_is_one_line_from_any_process(text, tokenizer, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    (tmp_path / "latin.txt").write_bytes(b"a line\ncaf\xe9\n")
    with pytest.raises(UsageError, match=r"latin.txt, line 2 is not UTF-8") as error:
        build([str(text), str(tmp_path / "latin.txt")], tokenizer, tmp_path / "made", workers=workers)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made" / MANIFEST).exists()
    assert multiprocessing.active_children() == []


def test_a_source_is_described_by_what_would_change_it(text, tmp_path, monkeypatch):
    cut = cut_sources([str(text), "docs"])
    first = describe_source(str(text), cut)
    assert first.startswith("1 file, ")
    assert describe_source(str(text), cut) == first
    text.write_text(text.read_text() + "more")
    assert describe_source(str(text), cut) != first
    installed = describe_source("docs", cut)
    assert installed.startswith("Python 3.")
    monkeypatch.setattr(bertkit.data.pretraining.build, "distributions", list)
    assert describe_source("docs", cut) != installed


def test_progress_ends_with_everything_read(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    told = []
    statistics = build([str(text)], tokenizer, tmp_path / "made", progress=lambda *news: told.append(news))
    size = text.stat().st_size
    assert told[0] == (0, size, 0)
    assert told[-1] == (size, size, statistics["tokens"])
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert read_manifest(tmp_path / "made")["statistics"] == statistics
