"""Atomic writes, and the removal of unfinished files."""

import os
import signal
import subprocess
import sys

import pytest

from bertkit.system.files import atomic_open, atomic_write, hold_directory, remove_unfinished

KILLED = """
import os, signal, sys
from pathlib import Path
from bertkit.system.files import atomic_open

with atomic_open(Path(sys.argv[1])) as stream:
    stream.write("half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_what_is_ours_is_removed_from_a_directory(tmp_path):
    """A run's directory may contain hidden files and folders of other programs."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "model.json")], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.read_text() == "half"
    kept = [tmp_path / name for name in (".env.1", ".notes.2024", ".vimrc.7~", "a.3.unfinished")]
    for path in kept:
        path.write_text("mine")
    (tmp_path / ".cache.1").mkdir()
    (tmp_path / ".cache.1.unfinished").mkdir()
    with hold_directory(tmp_path):
        assert not left.exists()
    remove_unfinished(tmp_path)
    assert all(path.read_text() == "mine" for path in kept)
    assert (tmp_path / ".cache.1").is_dir()
    assert (tmp_path / ".cache.1.unfinished").is_dir()


def test_a_device_is_written_to_and_stays_one(tmp_path):
    (tmp_path / "nothing").symlink_to(os.devnull)
    atomic_write("a", tmp_path / "nothing")
    assert (tmp_path / "nothing").is_char_device()
    assert os.listdir(tmp_path) == ["nothing"]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    atomic_write("old", tmp_path / "a.txt")
    with pytest.raises(TypeError), atomic_open(tmp_path / "a.txt") as stream:
        stream.writelines(["new", 5])  # it fails after the first one
    assert os.listdir(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"
