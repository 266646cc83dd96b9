"""A Ray cluster that does not answer, or whose machines share no disk."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertkit.errors import UsageError
from bertkit.system.cluster import Remote, check_address, do_command


def test_a_cluster_that_does_not_answer_is_refused(refused):
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with refused():
            check_address(address)
    check_address("auto")
    check_address("local")


def test_a_machine_without_the_directory_is_one_line(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "gone" / "recipes" / "rte.log"
    assert do_command("/nowhere", ["run", "x"], log, threads=1) == socket.gethostname()
    assert Path.cwd() == tmp_path
    task = SimpleNamespace(remote=lambda *given: given)
    monkeypatch.setattr(ray, "remote", lambda **resources: lambda function: task)
    monkeypatch.setattr(ray, "wait", lambda futures, timeout: (futures, []))
    monkeypatch.setattr(ray, "get", lambda future: "node7")
    with pytest.raises(UsageError, match=rf"node7 does not see {log.parent}; --workers ray needs a disk that all"):
        Remote(ray, ["run", "x"], log, 1, 0).poll()
