"""Benchmark `bertkit serve` against the pipeline of plain transformers behind FastAPI, with requests of one text each.

The load is open-loop: requests arrive at random times (a Poisson process) at a given rate, whether or not the earlier
ones are answered, and a latency counts from the time at which the request was due. The figure of a side is the highest
rate at which the 99th percentile stays below a limit. Every server is a process of its own; the load generator runs on
the same cores.

Left out: requests with several inputs, and other heads.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch

from bertkit.bench.measure import BERTKIT, note_machine
from bertkit.bench.synthetic_text import TEXT_SEED, make_words
from bertkit.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, make_tokenizer, save_tokenizer
from bertkit.errors import UsageError
from bertkit.inference.export_record import find_export
from bertkit.model.config import BertConfig
from bertkit.model.heads import BertForSequenceClassification
from bertkit.model.precision import choose_precision
from bertkit.reports.tables import Table, make_table
from bertkit.system.progress import Report, ignore

SIDES = {  # name -> arguments after `python -m`, which are filled in
    BERTKIT: ("bertkit", "serve", "{run}", "--port", "{port}", "--precision", "{precision}"),
    "FastAPI, threads": ("bertkit.bench.stock_server", "{run}", "{port}", "threads", "{precision}"),
    "FastAPI, loop": ("bertkit.bench.stock_server", "{run}", "{port}", "loop", "{precision}"),
}
SERVED_SIZES = {  # of MiniLM-L6
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
SERVED_WORDS = 8_000  # different words
SERVED_TEXTS = 256  # different texts
STARTING = 180.0  # seconds until a server must answer
WARM_REQUESTS = 20
FIRST_RATE = 16.0  # requests per second
LEAST_ARRIVALS = 100  # requests at each rate: the 99th percentile of fewer is their worst one
STEPS = 4  # halvings of the interval between the last good rate and the first bad one
GIVING_UP = 5.0  # seconds after the last arrival; requests without an answer by then count with this latency


def bench_serve(
    run: str | None = None, tokens: int = 64, limit: float = 50.0, seconds: float = 10.0, *, report: Report = ignore
) -> tuple[dict[str, Any], list[Table]]:
    """Measure the highest rate of each side at which the 99th percentile of the latency stays below a limit.

    All sides run in fp32, and again in the precision in which the hardware is fastest. An export has only ours.

    Args:
        run: A text classifier or its export; None uses one of MiniLM's size with random weights.
        tokens: Tokens of a text.
        limit: Milliseconds.
        seconds: Duration of the load at each rate, longer for fewer than LEAST_ARRIVALS requests.

    Raises:
        UsageError: A server does not start.
    """
    environment = note_machine(report)
    with TemporaryDirectory() as folder:
        name = run or make_served(Path(folder))
        bodies = make_bodies(name, tokens)
        exported = find_export(name)
        precisions = (exported.precision,) if exported else dict.fromkeys(("fp32", choose_precision("auto")))
        found: dict[str, dict[str, Any]] = {}
        for precision in precisions:
            sides = found.setdefault(precision, {})
            for side in (BERTKIT,) if exported else SIDES:
                with start_server(side, name, precision) as port:
                    sides[side] = asyncio.run(find_rate(port, bodies, limit, seconds, lambda line: report(f"  {line}")))
                report(f"{side}, {precision}: {sides[side]['rate']:.1f} requests per second at p99 below {limit:g} ms")
    lines = [
        [precision, side, f"{load['rate']:.1f}", f"{load['arrived']:,}", f"{load['p50']:.1f}", f"{load['p99']:.1f}"]
        for precision, sides in found.items()
        for side, one in sides.items()
        for load in one["loads"]
    ]
    heads = ["", "", "requests per second", "requests", "p50 ms", "p99 ms"]
    ratios = {precision: compare_rates(sides) for precision, sides in found.items()}
    figures = {"sides": found, "ratios": ratios, "tokens": tokens, "limit": limit, "seconds": seconds}
    figures |= {"run": run or "MiniLM's size, random weights", "environment": environment}
    return figures, [make_table("Latency at each rate", heads, lines)]


def compare_rates(sides: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return bertkit's rate divided by the best of the others; None if these have none."""
    best = max((found["rate"] for side, found in sides.items() if side != BERTKIT), default=0.0)
    return sides[BERTKIT]["rate"] / best if best else None


def make_served(folder: Path) -> str:
    """Write a classifier of MiniLM's size with random weights, and return the directory."""
    tokenizer = make_tokenizer([*SPECIAL_TOKENS, *make_words(SERVED_WORDS).tolist()], cased=False)
    torch.manual_seed(TEXT_SEED)
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **SERVED_SIZES)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)


def make_bodies(run: str, tokens: int) -> list[bytes]:
    """Return requests with texts of that number of tokens, made of words that are a token each."""
    words = sorted(word for word in load_tokenizer(run).get_vocab() if word.isalpha() and word.isascii())
    random = np.random.default_rng(TEXT_SEED)
    texts = (" ".join(random.choice(words, max(tokens - 2, 1))) for _ in range(SERVED_TEXTS))
    return [msgspec.json.encode({"text": text}) for text in texts]


# --- The servers ------------------------------------------------------------------------------------------------------


@contextmanager
def start_server(side: str, run: str, precision: str) -> Iterator[int]:
    """Start the server of a side; yield its port.

    Raises:
        UsageError: It does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [part.format(run=run, port=port, precision=precision) for part in SIDES[side]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {name: value for name, value in os.environ.items() if name != "BERTKIT_TOKEN"}
    process = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, **quiet)
    try:
        end = time.monotonic() + STARTING
        while not is_listening(port):
            if process.poll() is not None or time.monotonic() > end:
                raise UsageError(f"the server of {side} does not start; give a text classifier as RUN")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    """Return whether a server accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


# --- The load ---------------------------------------------------------------------------------------------------------


class Connections:
    """Connections to a server that are kept open; a request takes a free one or opens another."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.free: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()

    async def ask(self, body: bytes) -> None:
        """Send a request and read the answer; if the server has closed the free connection, on another one.

        Raises:
            OSError: The server refuses the request.
        """
        while self.free:
            with suppress(ConnectionError, EOFError):
                await self.send(body, *self.free.pop())
                return
        await self.send(body, *await asyncio.open_connection("127.0.0.1", self.port))

    async def send(self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a request over a connection, and read the answer."""
        head = (
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        answered = await reader.readuntil(b"\r\n\r\n")
        size = int(answered.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        if not answered.startswith(b"HTTP/1.1 200 "):
            raise OSError(answered.split(b"\r\n")[0].decode())
        self.free.append((reader, writer))


async def find_rate(port: int, bodies: Sequence[bytes], limit: float, seconds: float, report: Report) -> dict[str, Any]:
    """Return the highest good rate and all measured loads: doubled until one is bad, then by halving the interval."""
    connections, loads = Connections(port), []
    for body in bodies[:WARM_REQUESTS]:
        try:
            await connections.ask(body)
        except OSError as error:
            raise UsageError(f"the server answers a text with {error}; give a classifier of single texts") from None

    async def is_good(rate: float) -> bool:
        load = await measure_load(connections, bodies, rate, seconds)
        report(f"{rate:.1f} requests per second: p50 {load['p50']:.1f} ms, p99 {load['p99']:.1f} ms")
        loads.append(load)
        return load["p99"] < limit

    good, rate = 0.0, FIRST_RATE
    while await is_good(rate):
        good, rate = rate, 2 * rate
    for _ in range(STEPS):
        middle = (good + rate) / 2
        if await is_good(middle):
            good = middle
        else:
            rate = middle
    return {"rate": good, "loads": sorted(loads, key=lambda load: load["rate"])}


async def measure_load(
    connections: Connections, bodies: Sequence[bytes], rate: float, seconds: float
) -> dict[str, Any]:
    """Return the percentiles of the latency in milliseconds at a rate; a request that fails has the worst one."""
    random = np.random.default_rng(TEXT_SEED)
    arrivals = np.cumsum(random.exponential(1 / rate, max(round(rate * seconds), LEAST_ARRIVALS)))
    latencies = np.full(len(arrivals), 1000 * (arrivals[-1] + GIVING_UP))
    loop, source = asyncio.get_running_loop(), cycle(bodies)
    start = loop.time()

    async def send(number: int, body: bytes) -> None:
        await connections.ask(body)
        latencies[number] = 1000 * (loop.time() - start - arrivals[number])

    tasks = []
    for number, due in enumerate(arrivals.tolist()):
        await asyncio.sleep(start + due - loop.time())
        tasks.append(asyncio.create_task(send(number, next(source))))
    done, late = await asyncio.wait(tasks, timeout=GIVING_UP)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    failed = len(late) + sum(task.exception() is not None for task in done)
    p50, p99 = np.percentile(latencies, [50, 99]).tolist()
    return {"rate": rate, "arrived": len(arrivals), "failed": failed, "p50": p50, "p99": p99}
