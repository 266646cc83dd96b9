"""Faults from outside a build: dead workers, signals, a full disk, kill -9, much text, lost Ray tasks."""

import contextlib
import ctypes
import io
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bertkit.data.pretraining.build
import bertkit.data.pretraining.pieces
from bertkit.data.pretraining.build import build
from bertkit.data.pretraining.store import SHARD_NAME, SHARDS, is_corpus, open_corpus
from bertkit.data.tokenizer import make_tokenizer, save_tokenizer, train_vocabulary
from bertkit.errors import UsageError
from tests.data.pretraining.test_build import read_files, stamp
from tests.official import write_checkpoint, write_glue
from tests.runs import is_running, list_children, wait_until
from tests.training.test_run import write_text

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
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
ENVIRONMENT.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with texts.txt, a vocabulary in vocab/, and the command in script.py."""
    folder = tmp_path_factory.mktemp("faults")
    content = write_text(folder / "texts.txt", documents=400).read_text()
    (folder / "texts.txt").write_text(content + "\n" + content[:2000])
    tokens = train_vocabulary(content.splitlines(), size=100)
    save_tokenizer(make_tokenizer(tokens, cased=False), folder / "vocab")
    (folder / "script.py").write_text(SCRIPT.format(piece_bytes=8000, shard_tokens=600, batch=1000))
    return folder


@pytest.fixture
def tokenizer(place):
    return make_tokenizer((place / "vocab" / "vocab.txt").read_text().splitlines(), cased=False)


def list_command(place, output, *options):
    text, vocab = str(place / "texts.txt"), str(place / "vocab")
    return [sys.executable, str(place / "script.py"), "corpus", "build", text, "--vocab", vocab, *options,
            "--output", str(output)]  # fmt: skip


def start(place, output, *options):
    return subprocess.Popen(
        list_command(place, output, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


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


def list_finished(output):
    """Return the complete shards of a build."""
    return {path: value for path, value in stamp(output).items() if SHARD_NAME.fullmatch(path.name)}


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 1000])
def test_a_dead_worker_costs_nothing_that_is_finished(place, tokenizer, tmp_path, monkeypatch, deaths):
    """Another worker retries its piece; if all die, the error is one line, and the same command continues."""
    monkeypatch.setattr(bertkit.data.pretraining.build, "PIECE_BYTES", 8000)
    monkeypatch.setattr(bertkit.data.pretraining.pieces, "LOOK", 0.01)
    texts, made, killed, lines = [str(place / "texts.txt")], tmp_path / "made", [], []

    def kill_one(done, total, tokens):
        if done and len(killed) < deaths and (workers := multiprocessing.active_children()):
            killed.append(workers[0].pid)
            workers[0].kill()

    build_it = partial(build, texts, tokenizer, made, workers=2)
    if deaths == 1:
        build_it(progress=kill_one, report=lines.append)
        assert sum("; continuing with the pieces that are left" in line for line in lines) <= 1
    else:
        with pytest.raises(UsageError, match=r"^a worker was lost \(.*\) 3 times in a row") as error:
            build_it(progress=kill_one)
        assert "\n" not in str(error.value)
        there = list_finished(made)
        build_it()
        assert there.items() <= list_finished(made).items()
    assert multiprocessing.active_children() == []
    build(texts, tokenizer, tmp_path / "straight")
    assert read_files(made) == read_files(tmp_path / "straight")


@contextlib.contextmanager
def limit_files(size):
    """Limit the file size in this process and its children: the system then reports "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("workers", "unit"), [(1, ""), (2, ""), (1, "lines")])
def test_a_full_disk_is_one_line_and_the_build_goes_on_when_there_is_room(place, tokenizer, tmp_path, workers, unit):
    """The tokenizer and the shard of a small text fit on the disk, that of a large text does not."""
    write_text(tmp_path / "small.txt", documents=20)
    texts, made = [str(tmp_path / "small.txt"), str(place / "texts.txt")], tmp_path / "made"
    with limit_files(20_000), pytest.raises(UsageError, match=r"made cannot be written to: the disk is full") as error:
        build(texts, tokenizer, made, workers=workers, deduplicate=unit)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("free some space and run the command again")
    assert list(made.rglob(".*")) == []
    there = list_finished(made)
    assert len(there) == 1 or workers == 2
    build(texts, tokenizer, made, workers=workers, deduplicate=unit)
    if not unit:
        assert there.items() <= list_finished(made).items()
    build(texts, tokenizer, tmp_path / "straight", deduplicate=unit)
    assert read_files(made) == read_files(tmp_path / "straight")


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
    texts = ["--no-split-sentences", str(tmp_path / "texts.txt")]
    with start(place, made, *texts, "--workers", "2") as process:
        assert wait_until(lambda: len(list_finished(made)) > 2)
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


@pytest.mark.slow
def test_workers_end_when_their_build_is_killed(place, tmp_path):
    write_text(tmp_path / "texts.txt", documents=5000)
    made = tmp_path / "made"
    with start(place, made, str(tmp_path / "texts.txt"), "--workers", "2") as process:
        assert wait_until(lambda: len(list_finished(made)) > 2)
        children = list_children(process.pid)
        assert len(children) >= 2
        process.kill()
        assert wait_until(lambda: not any(map(is_running, children)), seconds=10)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["", "documents", "lines"])
def test_killed_twenty_times_at_random_it_ends_with_the_same_bytes(place, tmp_path, unit):
    options = ["--workers", "2", *(["--deduplicate", unit] if unit else [])]
    began = time.monotonic()
    code, _, err = run(place, tmp_path / "straight", *options)
    assert (code, err) == (0, "")
    seconds, made = min(time.monotonic() - began, 20), tmp_path / "made"
    draw, killed = random.Random(7), 0
    for _ in range(20):
        there = list_finished(made)
        with start(place, made, *options) as process:
            # After a random time, and sometimes as soon as there is a new file.
            new = draw.randint(1, 4) if draw.random() < 0.7 else 10**9
            wait_until(
                lambda there=there, new=new: len(list_finished(made)) >= len(there) + new,
                draw.uniform(0.3, 1) * seconds,
            )
            killed += process.poll() is None
            process.kill()
        now = list_finished(made)
        assert all(now[path] == there[path] for path in there.keys() & now.keys())
        assert all(path.parent.name != SHARDS for path in there.keys() - now.keys())
    assert killed >= 5
    code, _, err = run(place, made, *options)
    assert (code, err) == (0, "")
    assert read_files(made) == read_files(tmp_path / "straight")


# --- Memory -----------------------------------------------------------------------------------------------------------


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
    """Return the largest resident memory in MB of a process and each of its descendants."""
    peaks = {}
    while process.poll() is None:
        for pid in [process.pid, *list_children(process.pid)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if found := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()):
                    peaks[pid] = int(found[1]) / 1024
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


# --- Ray --------------------------------------------------------------------------------------------------------------


def list_tasks(process):
    """Return the descendants of a process that run one of our Ray tasks."""
    found = []
    for child in list_children(process.pid):
        with contextlib.suppress(OSError):
            if re.match(rb"ray::(write_on_ray|do_command)", Path(f"/proc/{child}/cmdline").read_bytes()):
                found.append(child)
    return found


@pytest.mark.slow
def test_on_ray_a_lost_worker_costs_nothing_that_is_finished(place, tmp_path):
    """Pieces have several parts and one worker is killed; the corpus equals that of one process."""
    (tmp_path / "script.py").write_text(SCRIPT.format(piece_bytes=5_000_000, shard_tokens=600, batch=1_000_000))
    (tmp_path / "vocab").symlink_to(place / "vocab")
    write_large(tmp_path / "texts.txt", 10)
    code, _, err = run(tmp_path, tmp_path / "straight", "--workers", "1")
    assert (code, err) == (0, "")
    made = tmp_path / "made"
    with start(tmp_path, made, "--workers", "ray") as process:
        assert wait_until(lambda: (list_finished(made) and list_tasks(process)) or process.poll() is not None, 400)
        there = list_finished(made)
        os.kill(list_tasks(process)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert out.count("a worker was lost") == 1
    assert there.items() <= list_finished(made).items()
    assert read_files(made) == read_files(tmp_path / "straight")


@pytest.mark.slow
def test_the_same_command_goes_on_after_ray_has_lost_its_head(place, tmp_path):
    """Ray notices the loss after a minute, and ends the process unless the work is done."""
    (tmp_path / "script.py").write_text(SCRIPT.format(piece_bytes=5_000_000, shard_tokens=600, batch=1_000_000))
    (tmp_path / "vocab").symlink_to(place / "vocab")
    write_large(tmp_path / "texts.txt", 10)
    made = tmp_path / "made"
    with start(tmp_path, made, "--workers", "ray") as process:
        assert wait_until(lambda: (list_finished(made) and list_tasks(process)) or process.poll() is not None, 400)
        assert process.poll() is None, process.stderr.read()
        (number,) = [
            child
            for child in list_children(process.pid)
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/gcs_server")
        ]
        os.kill(number, signal.SIGKILL)
        process.communicate(timeout=300)
    assert process.returncode in (0, 1)
    there = list_finished(made)
    assert run(tmp_path, made, "--workers", "2")[0] == 0
    assert there.items() <= list_finished(made).items()


# --- Paths and disks --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mount_disk(folder):
    """Mount a disk at the folder and yield a function that makes it read-only or writable."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a disk")

    def change(mode):
        command = ["mount", "-o", f"remount,{mode}", str(folder)]
        # Remounting fails while a file is being written.
        assert wait_until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, 60)

    try:
        yield change
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def drop_rights():
    """Remove root's right to bypass the permissions of files."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the structure, this process
    ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())


def call_apart(arguments, folder):
    """Return exit code and standard error of the command, run in a forked process without root's rights."""
    from bertkit import cli

    with (folder / "err").open("w+") as err:
        if not (child := os.fork()):
            code = 1
            try:
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = io.StringIO(), os.fdopen(2, "w", closefd=False)
                os.chdir(folder)
                sys.argv = ["bertkit", *map(str, arguments)]
                os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has no threads of the pool
                drop_rights()
                cli.main()
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        err.seek(0)
        return code, err.read()


def list_commands(place, path):
    """Return every command that takes a path, with this path in each of these places."""
    text, vocab, bert, glue = (place / name for name in ("texts.txt", "vocab", "bert", "glue"))
    rte = ["glue", "--task", "rte", "--set", "train.max_steps=2", "--set", "precision=fp32"]
    pretrain = ["pretrain", "--set", "train.max_steps=2", "--set", "precision=fp32"]
    built = ["corpus", "build", "--workers", "1"]
    (place / "study.toml").write_text('tasks = ["rte"]\n')
    (place / "qa.json").write_text('{"Data": []}')
    return [
        ["vocab", text, "--output", path],
        ["vocab", path, "--output", "new"],
        [*pretrain, "--corpus", text, "--vocab", vocab, "--output", path],
        [*pretrain, "--corpus", path, "--vocab", vocab, "--output", "new"],
        [*pretrain, "--corpus", text, "--vocab", path, "--output", "new"],
        [*rte, "--data", glue, "--model", bert, "--output", path],
        [*rte, "--data", path, "--model", bert, "--output", "new"],
        [*rte, "--data", glue, "--model", path, "--output", "new"],
        ["squad", "--version", "2", "--data", path, "--model", bert],
        ["squad", "--version", "2", "--ensemble", path, path, "--output", "new"],
        ["study", path],
        ["study", place / "study.toml", "--data", place, "--model", bert, "--output", path],
        ["report", path],
        [*built, text, "--vocab", vocab, "--output", path],
        [*built, path, "--vocab", vocab, "--output", "new"],
        [*built, text, "--vocab", path, "--output", "new"],
        ["corpus", "stats", path],
        ["features", path, "--input", text, "--output", "new.npz"],
        ["features", bert, "--input", text, "--output", f"{path}.npz"],
        ["predict", path, "good"],
        ["predict", bert, "--input", f"{path}.txt"],
        ["score", "glue", "--task", "rte", path, path],
        ["score", "squad", "--version", "2", path, path],
        ["push", path, "ada/bert"],
        ["reproduce", path],
        ["triviaqa", path, "--evidence", place, "--output", "new.json"],
        ["triviaqa", place / "qa.json", "--evidence", path, "--output", "new.json"],
        ["sample", path],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of somebody else", "too long", "read-only"])
def test_a_path_that_cannot_be_used_is_one_line_in_every_command(place, tmp_path, kind):
    write_glue(place / "glue")
    write_checkpoint(place / "bert")
    with contextlib.ExitStack() as stack:
        path = tmp_path / "disk" / "x"
        if kind == "of somebody else":
            path.mkdir(parents=True)
            path.parent.chmod(0)
            stack.callback(path.parent.chmod, 0o700)
        elif kind == "too long":
            path = tmp_path / ("n" * 300)
        else:
            stack.enter_context(mount_disk(path.parent))("ro")
        for number, arguments in enumerate(list_commands(place, path)):
            folder = tmp_path / str(number)
            folder.mkdir()
            code, err = call_apart(arguments, folder)
            assert (code, err.count("\n")) == (2, 1), f"{arguments}: {err}"
            assert err.startswith("bertkit: ")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["corpus build", "glue"])
def test_a_disk_that_turns_read_only_is_one_line_and_the_same_command_goes_on(place, tmp_path, command):
    write_large(tmp_path / "texts.txt", 3)
    write_glue(place / "glue")
    write_checkpoint(place / "bert")
    with mount_disk(tmp_path / "disk") as change:
        made = tmp_path / "disk" / "made"
        words = list_command(place, made, str(tmp_path / "texts.txt"), "--workers", "2")
        if command == "glue":
            settings = ["precision=fp32", "train.max_steps=300", "train.save_steps=5", "batch_size=8"]
            rte = ["glue", "--task", "rte", "--data", place / "glue", "--model", place / "bert", "--output", made]
            rte += [word for setting in settings for word in ("--set", setting)]
            words = [sys.executable, "-m", "bertkit", *map(str, rte)]
        with subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as process:
            assert wait_until(lambda: list_finished(made) or list(made.glob("checkpoint-*/complete")), 100)
            change("ro")
            err = wait_for(process)
        assert process.returncode == 2
        assert re.fullmatch(r"bertkit: \S+made cannot be written to: the disk is read-only .*\n", err)
        assert "the same command continues" in err
        change("rw")
        assert subprocess.run(words, capture_output=True, env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.slow
def test_on_ray_a_mistake_in_a_source_is_one_line(place, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"a line\ncaf\xe9\n")
    code, _, err = run(place, tmp_path / "made", str(tmp_path / "latin.txt"), "--workers", "ray")
    assert code == 2
    assert re.fullmatch(r"bertkit: \S+latin.txt, line 2 is not UTF-8 .*\n", err)
