"""Building a corpus: the same bytes with any workers; after a kill, the same command finishes it."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

import bertkit.data.pretraining.build
from bertkit.data.pretraining import tokenize
from bertkit.data.pretraining.build import RECORD, build, describe_build, write_on_ray
from bertkit.data.pretraining.sources import cut_sources, read_documents
from bertkit.data.pretraining.statistics import list_warnings
from bertkit.data.pretraining.store import (
    MANIFEST,
    PART_FOLDER,
    SHARDS,
    list_shards,
    open_corpus,
    read_manifest,
    read_shard,
)
from bertkit.data.pretraining.tokenize import tokenize_documents
from bertkit.data.tokenizer import get_backend, load_tokenizer, make_tokenizer, train_tokenizer
from bertkit.errors import UsageError
from tests.corpora import drop_repeats, list_documents, list_finished, read_files, write_divided, write_text


@pytest.fixture
def text(tmp_path):
    """Write a text with repeated documents and lines, and with special tokens written out."""
    path = write_text(tmp_path / "texts.txt", documents=30)
    documents = path.read_text().split("\n\n")
    documents += [*documents[:4], f"{documents[5]}\nA [MASK] and a [SEP] here.\n{documents[6]}\n"]
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def tokenizer(text):
    return train_tokenizer(text.read_text().splitlines(), size=100)


@pytest.fixture
def expected(text, tokenizer):
    return list_documents(tokenize_documents(read_documents([str(text)]), tokenizer))


@pytest.fixture
def small(monkeypatch):
    """Set pieces of some kilobytes, batches of a few documents and shards of about two batches."""
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    monkeypatch.setattr(bertkit.data.pretraining.build, "TOKENS_A_SHARD", 300)
    monkeypatch.setattr(tokenize, "CHARACTERS_A_BATCH", 500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_every_number_of_workers_gives_the_corpus_of_one_go(text, tokenizer, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    made = {}
    for workers in (1, 2):
        statistics = build([str(text)], tokenizer, tmp_path / str(workers), workers=workers)
        corpus = open_corpus(tmp_path / str(workers))
        assert list_documents(corpus) == expected
        assert (statistics["documents"], statistics["tokens"]) == (len(expected), len(corpus.ids))
        assert statistics["characters"] == sum(len(s) for doc in read_documents([str(text)]) for s in doc)
        made[workers] = read_files(tmp_path / str(workers))
    assert made[1] == made[2]
    assert load_tokenizer(tmp_path / "2").get_vocab() == tokenizer.get_vocab()
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("small")
def test_pieces_larger_than_a_shard_have_several_parts_and_progress_ends_with_all(text, tokenizer, expected, tmp_path):
    told = []
    statistics = build([str(text)] * 2, tokenizer, tmp_path / "made", progress=lambda *news: told.append(news))
    parts = list_shards(tmp_path / "made" / SHARDS)
    assert len({piece for piece, _ in parts}) == len(cut_sources([str(text)] * 2, 3000)) > 4
    assert max(part for _, part in parts) >= 1
    last = [key for key, path in parts.items() if read_shard(path).note["is_last"]]
    assert last == [(piece, part) for piece, part in parts if (piece, part + 1) not in parts]
    assert list_documents(open_corpus(tmp_path / "made")) == expected * 2
    size = 2 * text.stat().st_size
    assert (told[0], told[-1]) == ((0, size, 0), (size, size, statistics["tokens"]))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert read_manifest(tmp_path / "made")["statistics"] == statistics


def test_options_reach_the_reader(text, tokenizer, tmp_path):
    text.write_text("One. Two. Three.\nFour\n\nFive. Six.\n")
    for split, sentences in ((True, 6), (False, 3)):
        made = build([str(text)], tokenizer, tmp_path / str(split), split_sentences=split)
        assert made["sentences"] == sentences


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["", "lines"])
def test_a_corpus_of_text_alone_records_what_it_lacks(text, tokenizer, tmp_path, unit, refused):
    """A build that continues gives the same bytes; without the option no file mentions it."""
    text.write_text(text.read_text().replace("\n\n", "\n* An item.\n\nA heading\n\n"))
    plain = build([str(text)], tokenizer, tmp_path / "plain", deduplicate=unit)
    assert not any(b"passages" in content or b"noted" in content for content in read_files(tmp_path / "plain").values())
    how = {"passages": True, "deduplicate": unit}
    statistics = build([str(text)], tokenizer, tmp_path / "made", **how)
    breaks = text.read_text().count("* An item.")
    assert statistics["left_out"] == {
        "list items": [breaks, "* An item."],
        "short lines": [breaks, "A heading"],
    }
    documents = [(found["before"] if unit else found)["documents"] for found in (plain, statistics)]
    assert documents[0] == documents[1] + breaks
    assert read_manifest(tmp_path / "made")["build"]["passages"] is True
    whole = read_files(tmp_path / "made")
    for part in (0, 1):
        (tmp_path / "made" / MANIFEST).unlink()
        for (_, number), path in list_shards(tmp_path / "made" / SHARDS).items():
            if number == part:
                path.unlink()
        assert build([str(text)], tokenizer, tmp_path / "made", **how) == statistics
        assert read_files(tmp_path / "made") == whole
    with refused():
        build([str(text)], tokenizer, tmp_path / "made", deduplicate=unit)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["", "lines"])
def test_a_corpus_of_divided_words_has_the_tokens_of_its_text(tmp_path, unit, refused):
    """A build that continues gives the same bytes, two workers the same tokens; no file mentions an unused option."""
    text = write_divided(tmp_path / "divided.txt")
    plain = str(text.with_name("plain.txt"))
    known = Path(plain).read_text(encoding="utf-8").replace("堂", "")  # which continues words, and becomes [UNK]
    tokenizer = train_tokenizer(known.splitlines(), size=100)
    divided = tokenize_documents(read_documents([str(text)], words="spaces"), tokenizer, "spaces")
    build([plain], tokenizer, tmp_path / "plain")
    assert not any(b'"words"' in read_files(tmp_path / "plain")[name] for name in (RECORD, MANIFEST))
    how = {"words": "spaces", "deduplicate": unit}
    statistics = build([str(text)], tokenizer, tmp_path / "made", **how)
    made = open_corpus(tmp_path / "made")
    expected = list_documents(divided)
    assert list_documents(made) == (drop_repeats(expected, unit) if unit else expected)
    assert made.word_offset == len(tokenizer)
    assert (made.ids[:] >= made.word_offset).any()
    if not unit:
        whole = open_corpus(tmp_path / "plain")
        assert made.strip_words(made.ids[:]).tolist() == whole.ids[:].tolist()
        assert made.sentence_ends.tolist() == whole.sentence_ends.tolist()
        assert statistics["unknown_rate"] == read_manifest(tmp_path / "plain")["statistics"]["unknown_rate"] > 0
    files = read_files(tmp_path / "made")
    assert build([str(text)], tokenizer, tmp_path / "two", **how, workers=2) == statistics
    assert list_documents(open_corpus(tmp_path / "two")) == list_documents(made)
    (tmp_path / "made" / MANIFEST).unlink()
    max(list_shards(tmp_path / "made" / SHARDS).values()).unlink()
    assert build([str(text)], tokenizer, tmp_path / "made", **how) == statistics
    assert read_files(tmp_path / "made") == files
    for words in ("", "commas"):
        with refused():
            build([str(text)], tokenizer, tmp_path / "made", deduplicate=unit, words=words)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["documents", "lines"])
def test_repeats_are_dropped_and_what_there_was_is_told(text, tokenizer, expected, tmp_path, unit):
    statistics = build([str(text)], tokenizer, tmp_path / "made", deduplicate=unit)
    kept = drop_repeats(expected, unit)
    assert list_documents(open_corpus(tmp_path / "made")) == kept
    assert statistics["documents"] == len(kept) < len(expected)
    assert statistics["before"]["documents"] == len(expected)
    assert statistics["before"]["repeated"]["documents"]["count"] >= 4
    assert statistics["repeated"]["documents"]["count"] == 0
    assert (statistics["repeated"]["lines"]["count"] == 0) == (unit == "lines")
    assert not (tmp_path / "made" / PART_FOLDER).exists()


# --- The same command again -------------------------------------------------------------------------------------------


def test_a_finished_corpus_is_not_built_again_and_no_other_in_its_place(text, tokenizer, tmp_path, refused):
    made, lines = tmp_path / "made", []
    first = build([str(text)], tokenizer, made)
    before, finished = read_files(made), list_finished(made)
    assert build([str(text)], tokenizer, made, report=lines.append, workers=2) == first
    assert lines == [f"{made} is finished"]
    with refused():
        build([str(text)], tokenizer, made, deduplicate="lines")
    cased = make_tokenizer([*tokenizer.get_vocab()], cased=True)
    for sources, vocabulary in (([str(text)] * 2, tokenizer), ([str(text)], cased)):
        with pytest.raises(UsageError, match="made belongs to another build"):
            build(sources, vocabulary, made)
    os.utime(text, (1, 1))
    with pytest.raises(UsageError, match=r"belongs to another build \(content: "):
        build([str(text)], tokenizer, made)
    assert (read_files(made), list_finished(made)) == (before, finished)


def test_only_an_empty_or_unbegun_directory_is_taken(text, tokenizer, tmp_path, refused):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with refused():
        build([str(text)], tokenizer, tmp_path / "mine")
    with refused():
        build(["missing.txt"], tokenizer, tmp_path / "new")
    assert read_files(tmp_path / "mine") == {"notes.txt": b"mine"}
    assert not (tmp_path / "new").exists()
    text.write_bytes(b"Good words.\n\nBad \x00 ones.\n")
    with refused():
        build([str(text)], tokenizer, tmp_path / "begun")
    text.write_text("Good words.\n\nBad ones.\n")
    assert build([str(text)], tokenizer, tmp_path / "begun")["documents"] == 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("unit", ["", "documents"])
def test_what_is_damaged_is_written_anew_by_the_same_command(text, tokenizer, tmp_path, unit):
    made = tmp_path / "made"
    statistics = build([str(text)], tokenizer, made, deduplicate=unit)
    whole = read_files(made)
    samples = [sorted(name for name in whole if name.startswith(SHARDS))[1]]
    samples += [name for name in whole if not name.startswith(SHARDS) and name != RECORD]
    assert len(samples) == 6
    for number, name in enumerate(samples):
        content = whole[name]
        damaged = content[: len(content) // 2] if number % 2 else content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        (made / name).write_bytes(damaged)
        before, lines = list_finished(made), []
        assert build([str(text)], tokenizer, made, deduplicate=unit, report=lines.append) == statistics
        assert read_files(made) == whole
        assert any(name in line for line in lines)
        after = list_finished(made)
        assert {path for path in before if path.parent.name == SHARDS and after[path] != before[path]} <= {made / name}


@pytest.mark.usefixtures("small")
def test_of_an_unfinished_build_only_what_is_missing_or_damaged_is_written(text, tokenizer, tmp_path, refused):
    made, lines = tmp_path / "made", []
    build([str(text)], tokenizer, made)
    whole, before = read_files(made), list_finished(made)
    (made / MANIFEST).unlink()
    shards = list_shards(made / SHARDS)
    lost = shards[next(piece for piece, part in shards if part == 2), 1]
    lost.unlink()
    cut = shards[max(shards)]
    cut.write_bytes(cut.read_bytes()[:-1])
    build([str(text)], tokenizer, made, report=lines.append)
    assert f"{cut} is truncated or corrupted and will be rewritten" in lines
    assert read_files(made) == whole
    assert {path for path, stamp in list_finished(made).items() if before[path] != stamp} == {lost, cut}
    (made / MANIFEST).unlink()
    (made / RECORD).write_text("[]")
    with refused():
        build([str(text)], tokenizer, made)


def test_a_ray_worker_needs_the_disk_of_the_corpus(text, tokenizer, tmp_path, monkeypatch):
    """It resolves relative paths as the command does."""
    build([str(text)], tokenizer, tmp_path / "made")
    whole = read_files(tmp_path / "made")
    (shard,) = list_shards(tmp_path / "made" / SHARDS).values()
    shard.unlink()
    monkeypatch.chdir(tmp_path)
    (piece,) = cut_sources([text.name], 1 << 20)
    backend = get_backend(tokenizer, "a test").to_str()
    work = bertkit.data.pretraining.build.BuildWork(Path("made", SHARDS), backend, np.uint16, {}, 10**6)
    monkeypatch.chdir("/")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    with pytest.raises(UsageError, match=r"does not see made; --workers ray needs a disk that all machines share$"):
        write_on_ray(work, 0, piece, str(tmp_path / "elsewhere"))
    assert write_on_ray(work, 0, piece, str(tmp_path)) == []
    assert read_files(tmp_path / "made") == whole


def test_sources_without_enough_text_are_refused(text, tokenizer, tmp_path, refused):
    (tmp_path / "blank.txt").write_text("\n \n")
    with refused():
        build([str(text), str(tmp_path / "blank.txt")], tokenizer, tmp_path / "made")
    (tmp_path / "invisible.txt").write_text("\u200b\n")
    with refused():
        build([str(tmp_path / "invisible.txt")], tokenizer, tmp_path / "other")


def test_markup_is_counted_over_all_pieces(text, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 300)
    content = text.read_text()
    text.write_text(content.replace("\n\n", "\n<hr>\n\n") + "\n<b>The end.</b>\n")
    statistics = build([str(text)], tokenizer, tmp_path / "made", workers=2)
    count = content.count("\n\n") + 1
    assert statistics["markup"] == [count + 1, "<hr>", "<b>The end.</b>"]
    assert f"warning: the text has {count + 1} tags, entities or keys" in "\n".join(list_warnings(statistics))


def test_one_document_is_built_and_it_is_said_for_what_it_is_too_few(tokenizer, tmp_path):
    (tmp_path / "single.txt").write_text("One.\nTwo.\n")
    statistics = build([str(tmp_path / "single.txt")], tokenizer, tmp_path / "made")
    assert (statistics["documents"], statistics["sentences"]) == (1, 2)
    assert (
        "warning: one document is too few for next-sentence prediction; train with --set data.objective=mlm"
        in list_warnings(statistics)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_in_a_source_is_one_line_from_any_process(text, tokenizer, tmp_path, workers, monkeypatch, refused):
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 3000)
    (tmp_path / "latin.txt").write_bytes(b"a line\ncaf\xe9\n")
    with refused():
        build([str(text), str(tmp_path / "latin.txt")], tokenizer, tmp_path / "made", workers=workers)
    assert not (tmp_path / "made" / MANIFEST).exists()
    assert multiprocessing.active_children() == []


def test_the_content_of_docs_is_that_of_the_installed_packages(monkeypatch):
    pieces = cut_sources(["docs"], 3000)
    first, again = (describe_build(["docs"], pieces, "", {}) for _ in range(2))
    monkeypatch.setattr(bertkit.data.pretraining.build, "distributions", list)
    assert first == again != describe_build(["docs"], pieces, "", {})
