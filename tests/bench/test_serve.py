"""Latencies count from the time a request was due; the highest rate is that of a server of known speed."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from bertkit.bench import serve as module
from bertkit.bench.serve import Connections, find_rate, make_bodies, measure_load
from bertkit.data.tokenizer import load_tokenizer
from tests.official import write_checkpoint


def run_with_server(seconds, measure):
    """Return the result of `measure(port)` beside a server that answers one request at a time, each in `seconds`."""

    async def serve_and_measure():
        lock = asyncio.Lock()

        async def answer(reader, writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]))
                async with lock:
                    await asyncio.sleep(seconds)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            return await measure(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    return asyncio.run(serve_and_measure())


def test_a_latency_counts_from_the_time_at_which_the_request_was_due(monkeypatch):
    """A server of 10 requests per second that gets 40 in a second is three seconds behind at the end."""
    monkeypatch.setattr(module, "GIVING_UP", 20.0)
    monkeypatch.setattr(module, "LEAST_ARRIVALS", 40)
    load = run_with_server(0.1, lambda port: measure_load(Connections(port), [b"{}"], 40.0, 1.0))
    assert (load["arrived"], load["failed"]) == (40, 0)
    assert load["p99"] > 2000
    assert 1000 < load["p50"] < load["p99"]


@pytest.mark.slow
def test_the_highest_rate_lies_below_the_servers(monkeypatch):
    """A server of 50 requests per second keeps a p99 of 500 ms only below that rate."""
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "WARM_REQUESTS", 1)
    monkeypatch.setattr(module, "FIRST_RATE", 15.0)
    lines = []
    found = run_with_server(0.02, lambda port: find_rate(port, [b"{}"], 500.0, 3.0, lines.append))
    assert 0 < found["rate"] <= 60
    assert len(lines) == len(found["loads"]) >= 4


def test_texts_have_the_number_of_tokens(tmp_path):
    run = str(write_checkpoint(tmp_path, labels=("a", "b")))
    tokenizer = load_tokenizer(run)
    bodies = make_bodies(run, 20)
    assert len(set(bodies)) > 100
    assert {len(tokenizer(body.decode()[9:-2])["input_ids"]) for body in bodies} == {20}
