"""A server under load, at its end and over a long time."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.served import Client, write_served
from tests.world import make_texts

pytestmark = pytest.mark.slow
REQUESTS = 100_000
FLAT = 8 << 20  # bytes by which the process may grow over the second half of the requests
READY = re.compile(r"answers at http://127\.0\.0\.1:(\d+); end it with Ctrl-C")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served"), "classes")


class Program:
    """`bertkit serve` as a process."""

    def __init__(self, folder, *options):
        command = [sys.executable, "-m", "bertkit", "serve", str(folder), "--port", "0", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.port = int(READY.search(self.process.stdout.readline())[1])

    def measure(self):
        """Return the resident bytes of the process."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1])

    def end(self, number=signal.SIGTERM):
        """Send a signal and return exit code, standard output and standard error."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_that_have_begun_be_answered(number, tmp_path):
    program = Program(write_served(tmp_path, "masks"))
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(Client(program.port).predict, ["[MASK] " * 100] * 200) for _ in range(5)]
        while Client(program.port).count_waiting() < 700:
            assert program.process.poll() is None
            time.sleep(0.01)
        code, output, errors = program.end(number)
    assert [future.result()[0] for future in begun] == [200] * 5
    assert (code, output, errors.count("\n")) == (128 + number, "", 1), "nothing is logged"


@pytest.mark.timeout(7200)
def test_memory_is_flat_over_many_requests(folder):
    program, sizes = Program(folder), []
    texts = [json.dumps(text) for text in make_texts(1000)]

    def ask_many(count):
        client = Client(program.port)
        for number in range(count):
            path = "/predict" if number % 10 else f"/{number}"  # paths must not add up either
            client.ask("POST", path, texts[number % 1000], Content_Type="application/json", X_Number=str(number))

    with ThreadPoolExecutor(16) as pool:
        for _ in range(10):
            list(pool.map(ask_many, 16 * [REQUESTS // 160]))
            sizes.append(program.measure())
    assert program.end()[0] == 128 + signal.SIGTERM
    print([f"{size / 1e6:.1f} MB" for size in sizes])
    assert sizes[-1] - sizes[4] < FLAT
