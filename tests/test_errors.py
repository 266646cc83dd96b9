"""Errors of the operating system about a path or a disk are one line with the remedy; bugs stay exceptions."""

import errno
import os
import re
import zipfile

import pytest

from bertkit.errors import UsageError, as_usage_error, check_access, explain_disk_error, explain_os_error

LONG = "n" * 300


def make_error(number, path=None):
    return OSError(number, os.strerror(number), path)


def test_a_path_that_the_system_refuses_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for act, reason in (((tmp_path / LONG).stat, "File name too long"), ((tmp_path / "file").mkdir, "File exists")):
        with pytest.raises(OSError, match=reason) as error:
            act()
        assert explain_os_error(error.value).endswith(f" cannot be used: {reason}; name another path")
    denied = "/theirs/x cannot be used: Permission denied; change its permissions or those of the folders above it, or"
    assert explain_os_error(make_error(errno.EACCES, "/theirs/x")).startswith(denied)
    assert "\n" not in explain_os_error(make_error(errno.EACCES, b"a\nb\xff\x1b[31m"))


def test_a_path_that_cannot_be_looked_at_is_not_called_absent(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"File name too long"):
        check_access(tmp_path / LONG)
    for absent in (tmp_path / "gone", tmp_path / "file" / "x", "a\0b"):
        check_access(absent)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full (No space left on device); free some space and run the command again"),
        (errno.EROFS, "the disk is read-only (Read-only file system); make it writable, and the same command"),
        (errno.EIO, "the disk is failing (Input/output error); repair or replace it, and the same command continues"),
    ],
)
def test_a_disk_that_cannot_be_written_to_is_one_line(number, words):
    assert explain_os_error(make_error(number)).startswith(words)
    use = "read or written" if number == errno.EIO else "written to"
    for explain in (explain_disk_error, as_usage_error):
        with pytest.raises(UsageError, match=re.escape(f"a.html cannot be {use}: {words}")), explain("a.html"):
            raise make_error(number)


def test_a_damaged_file_has_its_own_remedy_and_a_full_disk_too(refused):
    with refused(), as_usage_error("a/b", "delete a to start again"):
        raise ValueError("x")
    with refused(), as_usage_error("a/b", "delete a to start again"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with refused(), explain_disk_error("a"):
        raise RuntimeError("PytorchStreamWriter failed: Read-only file system")  # an error without a number


def test_the_path_is_named_once_and_as_the_file_will_be_called():
    line = "runs/a cannot be written to: the disk is read-only (Read-only file system: runs/a/model.json); "
    with pytest.raises(UsageError, match=re.escape(line)), explain_disk_error("runs/a"):
        raise make_error(errno.EROFS, "runs/a/.model.json.0123456789abcdef.unfinished")
    line = explain_os_error(make_error(errno.EACCES, "a/b"), "the directory a/b")
    assert line.startswith("the directory a/b cannot be used: Permission denied; ")
    assert explain_os_error(make_error(errno.EACCES, "a/b"), "the directory a", "name another").endswith(
        "cannot be used: Permission denied: a/b; name another"
    )


def make_bug():
    """Make an error that was raised while another one about a path was handled."""
    error = RuntimeError("a bug")
    error.__context__ = make_error(errno.EACCES, "a")
    return error


@pytest.mark.parametrize(
    "error",
    [
        make_error(errno.EPERM, 3),  # of a process, not of a path
        make_error(errno.ENOENT, "a"),
        make_error(errno.EEXIST, os.getcwd()),
        make_bug(),
        zipfile.BadZipFile("no zip"),
    ],
    ids=repr,
)
def test_a_bug_is_not_explained(error):
    assert explain_os_error(error) is None
    with pytest.raises(type(error)), explain_disk_error("runs/a"):
        raise error
    with pytest.raises(KeyError), as_usage_error("runs/a"):
        raise KeyError("a bug")
