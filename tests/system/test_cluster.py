"""A Ray cluster that does not answer, or is lost."""

import itertools
import socket
from types import SimpleNamespace

import pytest

from bertkit.errors import UsageError
from bertkit.system.cluster import ClusterWatch, check_address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_one_line(address):
    with pytest.raises(UsageError, match=rf"the Ray cluster {address} does not answer \(.*\); correct RAY_ADDRESS"):
        check_address(address)
    check_address("auto")
    check_address("local")


class Cluster:
    """The part of Ray that a watch uses."""

    def __init__(self, head, raylet):
        self.gcs_address, self.raylet = head, raylet

    def get_runtime_context(self):
        return self

    def get_node_id(self):
        return "here"

    def nodes(self):
        host, _, port = self.raylet.partition(":")
        return [{"NodeID": "there"}, {"NodeID": "here", "NodeManagerAddress": host, "NodeManagerPort": int(port)}]


def test_a_cluster_that_is_lost_is_one_line(monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(
        "bertkit.system.cluster.time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    )
    dead = "127.0.0.1:1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert ClusterWatch(Cluster(address, address)).check()
        with pytest.raises(UsageError, match=r"lost this machine \(its raylet has died\); the same command continues"):
            ClusterWatch(Cluster(address, dead)).check()
        watch = ClusterWatch(Cluster(dead, address))
        assert not watch.check()  # it may come back
        with pytest.raises(UsageError, match=rf"the head .* \({dead}\) has died; the same command continues"):
            watch.check()


def test_a_cluster_that_is_reached_as_a_client_is_left_to_ray(monkeypatch):
    """Addresses inside the cluster cannot be reached, so Ray is not asked for them."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    assert ClusterWatch(ray=None).check()
