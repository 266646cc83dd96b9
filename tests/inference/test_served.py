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

from bertkit.inference.predictor import Predictor
from tests.served import Client, serving, write_served
from tests.world import make_texts

pytestmark = pytest.mark.slow
CLIENTS = 64
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


def test_many_clients_get_the_answers_of_predict(folder):
    predictor = Predictor(folder, precision="fp32")
    requests = [make_texts(1 + number % 5, seed=number) for number in range(20 * CLIENTS)]
    expected = [predictor(texts) for texts in requests]
    with serving(predictor, folder) as port, ThreadPoolExecutor(CLIENTS) as pool:
        before = Client(port).read_metrics()
        found = list(pool.map(lambda texts: Client(port).predict(texts), requests))
        after = Client(port).read_metrics()
    names = ("bertkit_batch_inputs_sum", "bertkit_batch_inputs_count")
    inputs, batches = (after[name] - before[name] for name in names)
    assert (inputs, batches < len(requests)) == (sum(map(len, requests)), True), "clients shared batches"
    for (status, answer), right in zip(found, expected, strict=True):
        assert status == 200
        for one, other in zip(answer, right, strict=True):
            assert one["label"] == other["label"]
            assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


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
