"""A server under load, at its end and over a long time."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from bertkit.inference.predictor import Predictor
from bertkit.inference.server import HEAD_DUE, UNREAD
from tests.inference.test_predictor import make_texts
from tests.inference.test_server import Client, read_metrics, serving, write_served

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


def test_64_clients_get_the_answers_of_predict(folder):
    predictor = Predictor(folder, precision="fp32")
    requests = [make_texts(1 + number % 5, seed=number) for number in range(20 * CLIENTS)]
    requests = [texts[0] if len(texts) == 1 else texts for texts in requests]
    expected = [predictor([given])[0] if isinstance(given, str) else predictor(given) for given in requests]
    with serving(predictor, folder) as server, ThreadPoolExecutor(CLIENTS) as pool:

        def ask_some(first):
            client = Client(server.port)
            return [client.predict(given) for given in requests[first::CLIENTS]]

        found = list(pool.map(ask_some, range(CLIENTS)))
        batches = read_metrics(Client(server.port))
    assert batches["bertkit_batch_inputs_sum"] == sum(1 if isinstance(given, str) else len(given) for given in requests)
    assert batches["bertkit_batch_inputs_count"] < len(requests), "clients shared batches"
    for number, right in enumerate(expected):
        status, answer = found[number % CLIENTS][number // CLIENTS]
        assert status == 200
        pair = ([value] if isinstance(value, dict) else value for value in (answer, right))
        for one, other in zip(*pair, strict=True):
            assert one["label"] == other["label"]
            assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_accepted_request(number, folder):
    program, stop = Program(folder), threading.Event()
    answered, refused, lost = [], [], []

    def ask_on(seed):
        client, texts = Client(program.port), make_texts(50, seed=seed)
        while not stop.is_set():
            try:
                client.connection.connect()
            except OSError:  # the server accepts no more
                refused.append(seed)
                return
            for text in texts:
                body = json.dumps(text)
                try:
                    status, headers, _ = client.ask("POST", "/predict", body, Content_Type="application/json")
                except OSError as error:
                    lost.append(repr(error))
                    return
                answered.append(status)
                if headers.get("Connection") == "close":
                    break
            client.connection.close()

    threads = [threading.Thread(target=ask_on, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    while len(answered) < 500:
        time.sleep(0.05)
        assert program.process.poll() is None
    code, output, errors = program.end(number)
    stop.set()
    for thread in threads:
        thread.join()
    assert lost == []
    assert set(answered) == {200}
    assert len(refused) == 16
    assert (code, errors) == (128 + number, "bertkit: stopped; every accepted request was answered\n")
    assert output == "", "nothing is logged"


def test_a_connection_without_complete_headers_is_closed(folder):
    program = Program(folder)
    with socket.create_connection(("127.0.0.1", program.port)) as idle:
        idle.settimeout(3 * HEAD_DUE)
        idle.sendall(b"GET /health HTTP/1.1\r\n")
        assert idle.recv(1) == b""
    assert program.end()[0] == 128 + signal.SIGTERM


def test_clients_that_send_or_read_no_further_do_not_hold_up_the_end(tmp_path):
    program = Program(write_served(tmp_path, "masks"))
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    body = json.dumps(["[MASK] " * 120] * 256).encode()
    with (
        socket.create_connection(("127.0.0.1", program.port)) as half,
        socket.create_connection(("127.0.0.1", program.port)) as deaf,
    ):
        half.sendall(head % 60 + b'"go')
        deaf.sendall(head % len(body) + body)
        while read_metrics(Client(program.port))["bertkit_inputs_total"] < 256:
            time.sleep(0.1)
        began = time.monotonic()
        assert program.end()[0] == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2 * UNREAD
        assert half.recv(1000).startswith(b"HTTP/1.1 408")


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
