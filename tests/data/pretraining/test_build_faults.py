"""Faults from outside a build: dead workers, signals, a full disk, kill -9, much text, lost Ray tasks."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bertkit.data.pretraining.build
from bertkit.data.pretraining.build import build
from bertkit.data.pretraining.store import is_corpus, open_corpus
from bertkit.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from bertkit.errors import UsageError
from tests.corpora import SCRIPT, limit_files, list_finished, read_files, write_text
from tests.runs import is_running, list_children, list_tasks, wait_until

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
ENVIRONMENT.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with texts.txt, a vocabulary in vocab/, and the command in script.py."""
    folder = tmp_path_factory.mktemp("faults")
    content = write_text(folder / "texts.txt", documents=400).read_text()
    (folder / "texts.txt").write_text(content + "\n" + content[:2000])
    save_tokenizer(train_tokenizer(content.splitlines(), size=100), folder / "vocab")
    (folder / "script.py").write_text(SCRIPT.format(piece_bytes=8000, shard_tokens=600, batch=1000))
    return folder


@pytest.fixture
def tokenizer(place):
    return load_tokenizer(place / "vocab")


def start(place, output, *options):
    words = ["script.py", "corpus", "build", "texts.txt", "--vocab", "vocab", *options, "--output", output]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=place, env=ENVIRONMENT, **streams)


def run(place, output, *options):
    process = start(place, output, *options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_for(process):
    """Wait up to a minute for the end of the process and return its standard error."""
    try:
        return process.communicate(timeout=60)[1]
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 1000])
def test_a_dead_worker_costs_nothing_that_is_finished(place, tokenizer, tmp_path, monkeypatch, deaths):
    """Its work is done again; if all die, the error is one line, and the same command continues."""
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 8000)
    monkeypatch.setattr(bertkit.data.pretraining.build, "LOOK", 0.01)
    texts, made, killed, lines = [str(place / "texts.txt")], tmp_path / "made", [], []

    def kill_one(done, total, tokens):
        if done and len(killed) < deaths and (workers := multiprocessing.active_children()):
            killed.append(workers[0].pid)
            workers[0].kill()

    build_it = partial(build, texts, tokenizer, made, workers=2)
    if deaths == 1:
        build_it(progress=kill_one, report=lines.append)
        assert lines.count("a worker was lost; continuing with the missing shards") <= 1
    else:
        with pytest.raises(UsageError, match=r"^a worker was lost \(.*\); the same command continues") as error:
            build_it(progress=kill_one)
        assert "\n" not in str(error.value)
        there = list_finished(made)
        build_it()
        assert there.items() <= list_finished(made).items()
    assert multiprocessing.active_children() == []
    build(texts, tokenizer, tmp_path / "straight")
    assert read_files(made) == read_files(tmp_path / "straight")


@pytest.mark.parametrize(("workers", "unit"), [(2, ""), (1, "lines")])
def test_a_full_disk_is_one_line_and_the_build_goes_on_when_there_is_room(place, tokenizer, tmp_path, workers, unit):
    """The tokenizer and the shard of a small text fit on the disk, that of a large text does not."""
    write_text(tmp_path / "small.txt", documents=20)
    texts, made = [str(tmp_path / "small.txt"), str(place / "texts.txt")], tmp_path / "made"
    with limit_files(20_000), pytest.raises(UsageError, match=r"made cannot be written to: the disk is full .*again$"):
        build(texts, tokenizer, made, workers=workers, deduplicate=unit)
    assert list(made.rglob(".*")) == []
    there = list_finished(made)
    build(texts, tokenizer, made, workers=workers, deduplicate=unit)
    if not unit:
        assert there.items() <= list_finished(made).items()
    build(texts, tokenizer, tmp_path / "straight", deduplicate=unit)
    assert read_files(made) == read_files(tmp_path / "straight")


def ignores(pid, number):
    """Return whether a process ignores a signal; a worker does as soon as it works."""
    ignored = int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return ignored >> (number - 1) & 1


@pytest.mark.parametrize(
    ("number", "to_workers"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_build_and_its_workers_within_seconds(place, tmp_path, number, to_workers):
    """The signal may also go to the whole group, as from a service manager, and reach the workers first."""
    write_text(tmp_path / "texts.txt", documents=3000)
    made = tmp_path / "made"
    texts = ["--no-split-sentences", *[str(tmp_path / "texts.txt")] * 20]  # more than a second of work
    with start(place, made, *texts, "--workers", "2") as process:
        assert wait_until(lambda: len(list_finished(made)) > 2)
        assert wait_until(lambda: all(ignores(child, signal.SIGTERM) for child in list_children(process.pid)))
        children = list_children(process.pid)
        if to_workers:
            for child in children:
                os.kill(child, number)
            time.sleep(0.3)
        process.send_signal(number)
        began = time.monotonic()
        err = wait_for(process)
        assert time.monotonic() - began < 10
    assert process.returncode == 128 + number
    assert err == "bertkit: stopped; finished work is kept, and the same command continues\n"
    assert wait_until(lambda: not any(map(is_running, children)), seconds=10)
    assert not is_corpus(made)


def write_large(path, megabytes, single=0):
    """Write documents of some kilobytes, after one of `single` megabytes without a blank line."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefghijklmnop"), draw.integers(2, 9))) for _ in range(5000)]
    with path.open("w") as stream:
        for size, blank in ((single, ""), (megabytes - single, "\n")):
            written = 0
            while written < size * 1_000_000:
                lines = [" ".join(draw.choice(words, 2000)) for _ in range(5)]
                text = "".join(f"{line[:60]}. {line[60:]}.\n" for line in lines) * 8 + blank
                stream.write(text)
                written += len(text)
        stream.write("\nThe end.\n")


def measure_peaks(process):
    """Return the largest memory in MB of a process and each of its descendants, without pages of mapped files."""
    peaks = {}
    while process.poll() is None:
        for pid in [process.pid, *list_children(process.pid)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if found := re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
                    peaks[pid] = max(peaks.get(pid, 0), int(found[1]) / 1024)
        time.sleep(0.2)
    return sorted(peaks.values())


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_corpus(place, tmp_path):
    """With 100 MB and 300 MB of text, 60 MB of it one document, every process stays below 1 GB and does not grow."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "script.py").write_text("from bertkit.cli import main\nif __name__ == '__main__':\n    main()\n")
    (folder / "vocab").symlink_to(place / "vocab")
    peaks = {}
    for megabytes in (100, 300):
        write_large(folder / "texts.txt", megabytes, single=60)
        with start(folder, tmp_path / str(megabytes), "--workers", "2") as process:
            peaks[megabytes] = measure_peaks(process)
            assert process.wait() == 0, process.stderr.read()
    assert peaks[300][-1] < 1000, peaks
    assert peaks[300][-1] < peaks[100][-1] + 100, peaks
    assert len(open_corpus(tmp_path / "300").ids) > 30_000_000


@pytest.fixture
def building(place, tmp_path):
    """Start a build on Ray, and return its folder, process and finished shards once tasks are at work."""
    (tmp_path / "script.py").write_text(SCRIPT.format(piece_bytes=5_000_000, shard_tokens=600, batch=1_000_000))
    (tmp_path / "vocab").symlink_to(place / "vocab")
    write_large(tmp_path / "texts.txt", 10)
    made = tmp_path / "made"
    with start(tmp_path, made, "--workers", "ray") as process:
        there = lambda: list_finished(made) and list_tasks(process.pid)  # noqa: E731
        assert wait_until(lambda: there() or process.poll() is not None, 400)
        assert process.poll() is None, process.stderr.read()
        yield tmp_path, process, list_finished(made)


@pytest.mark.slow
def test_on_ray_a_lost_worker_costs_nothing_that_is_finished(building):
    """Pieces have several parts and one worker is killed; the corpus equals that of one process."""
    folder, process, there = building
    os.kill(list_tasks(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert there.items() <= list_finished(folder / "made").items()
    assert run(folder, folder / "straight", "--workers", "1")[0] == 0
    assert read_files(folder / "made") == read_files(folder / "straight")


@pytest.mark.slow
def test_the_same_command_goes_on_after_ray_has_lost_its_head(building):
    """Ray notices the loss after a minute, and ends the process unless the work is done."""
    folder, process, _ = building
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in list_children(process.pid)}
    (head,) = [child for child, words in commands.items() if words.split(b"\0")[0].endswith(b"/gcs_server")]
    os.kill(head, signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode in (0, 1)
    there = list_finished(folder / "made")
    assert run(folder, folder / "made", "--workers", "2")[0] == 0
    assert there.items() <= list_finished(folder / "made").items()
