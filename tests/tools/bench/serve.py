"""Serve texts here and by the pipeline of plain transformers behind FastAPI: the highest rate at a bounded latency.

    python -m tests.tools.bench serve RUN --words 62 --limit 100

Requests of one text arrive at random times (a Poisson process) whether or not earlier ones are answered, and a latency
counts from the time at which its request was due. The rate of a side is the highest one found at which the 99th
percentile stays below the limit; 0 if there is none. The servers of all sides run at once, each in
its own process, and get their load in turn; the load generator runs on the same cores. An export is served alone.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import torch
import uvicorn
from fastapi import Body, FastAPI
from transformers import pipeline

from bertkit.errors import UsageError
from bertkit.inference.predictor import read_export_record
from bertkit.model.precision import DTYPES, choose_precision
from tests.tools.bench.measure import BERTKIT, Record, say
from tests.tools.bench.model import SEED, SIZES, make_texts, write_classifier

CHECKOUT = Path(__file__).parents[3]
SERVERS = {  # side -> arguments after `python -m`
    BERTKIT: "bertkit serve {run} --port {port} --precision {precision}",
    "FastAPI, threads": "tests.tools.bench.serve {run} {port} {precision} threads",
    "FastAPI, loop": "tests.tools.bench.serve {run} {port} {precision} loop",
}
TEXTS = 256  # different texts
STARTING = 180.0  # seconds until a server must answer
FIRST_RATE = 16.0  # requests per second
GIVING_UP = 5.0  # seconds without an answer, which count as the latency
TINY = {"size": "tiny", "seconds": 1.0, "limit": 4000.0, "rates": 1, "repeats": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="text classifier or export (default: random weights)")
    parser.add_argument("--size", choices=SIZES, default="minilm", help="of random weights (default: %(default)s)")
    parser.add_argument("--words", type=int, default=62, help="of a text (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=100.0, help="milliseconds at p99 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load at each rate (default: %(default)s)")
    parser.add_argument("--rates", type=int, default=6, help="that are tried in a round (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")


def bench(given: argparse.Namespace, record: Record) -> None:
    """Measure serving."""
    with TemporaryDirectory() as folder, ExitStack() as servers:
        run = str(Path(given.run).absolute()) if given.run else write_classifier(folder, given.size)
        exported = read_export_record(run)
        precision = exported.precision if exported else choose_precision("auto")
        sides = {}
        for name in [BERTKIT] if exported else SERVERS:
            address = servers.enter_context(start_server(name, run, precision))
            sides[name] = partial(find_rate, address, make_texts([given.words] * TEXTS), given)
        title = f"Requests in {precision}, p99 below {given.limit:g} ms"
        record.alternate(title, sides, given.repeats)


# --- The servers ------------------------------------------------------------------------------------------------------


@contextmanager
def start_server(name: str, run: str, precision: str) -> Iterator[str]:
    """Start the server of a side; yield the address that answers texts.

    Raises:
        UsageError: It does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.format(run=run, port=port, precision=precision) for word in SERVERS[name].split()]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=CHECKOUT, **quiet)
    try:
        end = time.monotonic() + STARTING
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise UsageError(f"the server of {name} does not start; try python -m {' '.join(words)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/predict"
    finally:
        process.terminate()
        process.wait()


def serve_stock(run: str, port: str, precision: str, kind: str) -> None:
    """Serve the pipeline as its users do: in FastAPI's threads (`def`), or one request at a time (`async def`)."""
    classify = pipeline("text-classification", model=run, top_k=None, dtype=DTYPES.get(precision, torch.float32))
    app = FastAPI()

    def answer(text: str = Body(embed=True)) -> Any:
        return classify(text, truncation=True)

    async def answer_in_turn(text: str = Body(embed=True)) -> Any:
        return answer(text)

    app.post("/predict")(answer if kind == "threads" else answer_in_turn)
    uvicorn.run(app, port=int(port), log_level="critical", access_log=False)


# --- The load ---------------------------------------------------------------------------------------------------------


def find_rate(address: str, texts: list[str], given: argparse.Namespace) -> float:
    """Return the highest good rate: doubled until one is bad, or halved until one is good, then between the two."""
    good, bad, rate = 0.0, 0.0, FIRST_RATE
    for _ in range(given.rates):
        p50, p99 = asyncio.run(measure_load(address, texts, rate, given.seconds))
        say(f"    {rate:.1f} requests per second: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        good, bad = (rate, bad) if p99 < given.limit else (good, rate)
        rate = (good + bad) / 2 if bad else 2 * good
    return good


async def measure_load(address: str, texts: list[str], rate: float, seconds: float) -> list[float]:
    """Return two percentiles of the latency in milliseconds at a rate; a request that fails counts as given up."""
    dues = np.random.default_rng(SEED).exponential(1 / rate, max(round(rate * seconds), 1)).cumsum()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(GIVING_UP)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as client:

        async def ask(text: str, due: float) -> float:
            await asyncio.sleep(due - time.monotonic())
            with suppress(aiohttp.ClientError, TimeoutError):
                async with client.post(address, json={"text": text}) as answer:
                    await answer.read()
                return time.monotonic() - due
            return GIVING_UP

        await ask(texts[0], 0.0)  # warms up, or waits for the rest of an earlier load
        dues += time.monotonic()
        latencies = await asyncio.gather(*map(ask, cycle(texts), dues.tolist()))
    return np.percentile(1000 * np.array(latencies), [50, 99]).tolist()


if __name__ == "__main__":
    serve_stock(*sys.argv[1:])
