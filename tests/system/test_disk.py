"""The disk of another machine: its files, and a mirror of them."""

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertkit.errors import UsageError
from bertkit.system import disk as disks
from bertkit.system.disk import Disk, DiskServer, RemoteFile, offer_disk, open_mirror
from bertkit.system.files import name_machine, remove_unfinished
from tests.system.disks import LocalDisk, watch

CONTENT = b"".join(b"%d\n" % (number**3) for number in range(300))


@given(st.lists(st.tuples(st.sampled_from(["read", "readline", "seek"]), st.integers(0, len(CONTENT) + 9))))
def test_a_remote_file_reads_like_a_local_one(calls):
    remote = io.BufferedReader(RemoteFile(lambda start, size: CONTENT[start : start + size]), 64)
    local = io.BytesIO(CONTENT)
    for name, number in calls:
        assert getattr(remote, name)(number) == getattr(local, name)(number)
        assert remote.tell() == local.tell()


def test_a_file_of_the_disk_is_opened_compressed_or_not_but_not_by_this_process(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT)
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT))
    disk = LocalDisk(str(tmp_path))
    with watch(tmp_path) as opened:
        with disk.open(Path("a.txt")) as stream:
            assert stream.read() == CONTENT
        with disk.open(tmp_path / "a.gz") as stream, gzip.open(stream) as content:
            assert content.read() == CONTENT
        with pytest.raises(FileNotFoundError), disk.open(Path("b.txt")) as stream:
            stream.read()
        assert opened == []
        (tmp_path / "a.txt").read_bytes()
        assert opened == [str(tmp_path / "a.txt")], "the watch sees what this process opens"


@pytest.mark.parametrize("size", [0, 1, 10, 25])
def test_files_are_sent_and_fetched_in_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(disks, "BLOCK", 10)
    monkeypatch.setattr(DiskServer.read, "__defaults__", (10,))
    disk = LocalDisk(str(tmp_path))
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "file").write_bytes(b"what was there before is longer")
    disk.send("to/file", io.BytesIO(CONTENT[:size]))
    disk.send(str(tmp_path / "a" / "new" / "file"), io.BytesIO(CONTENT[:size]))
    assert (tmp_path / "to" / "file").read_bytes() == CONTENT[:size]
    assert (tmp_path / "a" / "new" / "file").read_bytes() == CONTENT[:size]
    with open_mirror(disk) as mirror:
        assert Path(mirror.fetch("to/file")).read_bytes() == CONTENT[:size]


def test_a_mirror_has_the_same_paths_below_its_root(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    for path in ("home/texts/a.txt", "work/data/b.txt", "work/data/.hidden/c.txt", "work/data/d/e.json", "work/.f"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (work / "empty").mkdir()
    monkeypatch.setenv("HOME", str(home))
    before = os.getcwd()
    with watch(tmp_path) as opened, open_mirror(LocalDisk(str(work))) as mirror:
        assert os.getcwd() == mirror.root + str(work)
        copies = [
            mirror.fetch(path) for path in ("data", f"{work}/data", "../home/texts/a.txt", "~/texts", "no", "empty")
        ]
        there = mirror.root + str(tmp_path)
        assert copies == [
            "data",
            f"{there}/work/data",
            "../home/texts/a.txt",
            f"{there}/home/texts",
            "no",
            "empty",
        ]
        found = {str(path.relative_to(there)): path.read_text() for path in Path(there).rglob("*") if path.is_file()}
        assert found == {name: name for name in ("home/texts/a.txt", "work/data/b.txt", "work/data/d/e.json")}
        assert os.listdir("empty") == []
        mirror.fetch("data", lambda name: name.endswith(".json"), with_content=False)
        assert Path("data/d/e.json").read_text() == ""
        assert Path("data/b.txt").read_text() == "work/data/b.txt"
        assert mirror.restore(f"{copies[1]} is not {copies[0]}") == f"{work}/data is not data"
        assert opened == []
    assert os.getcwd() == before
    assert not Path(mirror.root).exists()


def test_the_mirror_of_a_killed_worker_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disks.tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"bertkit-{name_machine()}-{dead.pid}-a", f"bertkit-{name_machine()}-{os.getpid()}-b", "bertkit-other-1-c"]
    for name in names:
        (tmp_path / name).mkdir()
    with open_mirror(LocalDisk("/")) as mirror:
        assert Path(mirror.root).parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


class Cluster:
    """The part of Ray that `offer_disk` uses; its server holds the same files, or not."""

    def __init__(self, holds):
        self.answer = holds

    def remote(self, *_):
        return self

    def options(self, **_):
        return self

    @property
    def holds(self):
        return SimpleNamespace(remote=lambda path: self.answer and os.path.exists(path))

    def get(self, value):
        return value


@pytest.fixture
def _beside(monkeypatch):
    monkeypatch.setattr(disks, "stay_here", lambda ray: {})


@pytest.mark.usefixtures("_beside")
def test_a_worker_finds_the_token_on_a_shared_disk_only(tmp_path, monkeypatch):
    with offer_disk(Cluster(holds=True), str(tmp_path)) as disk:
        (token,) = tmp_path.iterdir()
        assert disk == Disk(os.getcwd(), str(token), disk.server)
        assert disk.is_shared()
        token.rename(tmp_path / "elsewhere")
        assert not disk.is_shared()
        (tmp_path / "elsewhere").rename(token)
    assert list(tmp_path.iterdir()) == []
    token.touch()  # as after kill -9
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with offer_disk(Cluster(holds=False), "") as disk:
        assert disk.is_shared(), "jobs without files"


@pytest.mark.usefixtures("_beside")
def test_a_client_whose_files_the_cluster_does_not_see_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://there:10001")
    with offer_disk(Cluster(holds=True), str(tmp_path)) as disk:
        assert disk.token
    with pytest.raises(UsageError, match=r"^the Ray cluster ray://there:10001 cannot read the files of this machine; "):
        offer_disk(Cluster(holds=False), str(tmp_path)).__enter__()
    assert list(tmp_path.iterdir()) == []
