"""A server under load, at its end and over a long time, and its page in a browser."""

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
from tests.analysis.test_page import SMALL, WIDE
from tests.browser import PROBLEMS
from tests.inference.test_predictor import make_texts
from tests.inference.test_server import SERVED, Client, read_metrics, serving, write_served

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


# --- In a browser -----------------------------------------------------------------------------------------------------

SHOWN = {  # name -> typed text of the first field, selectors that the answer has
    "classes": ("word1 good", [".bars li", ".main"]),
    "labels": ("word1 good", [".bars li"]),
    "score": ("word1 good", [".main"]),
    "scores": ("word1 good", [".bars li"]),
    "names": ("😀 word1 good bad so", [".text mark small"]),
    "tags": ("word1 good", [".text mark small"]),
    "answers": ("word1?", [".text mark", ".main"]),
    "null": ("word1?", [".text mark", ".main"]),
    "endings": ("so", [".bars .wide", ".main"]),
    "masks": ("so [MASK] [MASK]", [".masks .bars li", ".masks h3"]),
    "pretraining": ("so [MASK]", [".masks .bars li"]),
    "next": ("so", [".bars li", ".main"]),
}
KEYS = {"Tab": 9, "Enter": 13}
ANSWERED = "!!document.querySelector('#answer details, #answer [role=alert]')"


class Page:
    """The address of a served page, in the form that `Browser.open` takes."""

    def __init__(self, port):
        self.port = port

    def as_uri(self):
        return f"http://127.0.0.1:{self.port}/"


def press(browser, key, modifiers=0):
    """Press a key, as a person does; 2 is Ctrl and 8 is Shift."""
    text = {"text": "\r"} if key == "Enter" else {}
    code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **code)


def wait_for(browser, expression):
    """Wait until an expression is true in the page."""
    end = time.monotonic() + 20
    while not browser.ask(expression):
        assert time.monotonic() < end, browser.ask("document.body.innerText")
        time.sleep(0.05)


@pytest.mark.parametrize("name", SERVED)
def test_the_page_is_used_by_keyboard_alone_light_and_dark(name, browser, tmp_path):
    predictor = Predictor(write_served(tmp_path, name), precision="fp32")
    typed, selectors = SHOWN[name]
    colours = set()
    with serving(predictor, tmp_path) as server:
        page = Page(server.port)
        for width, scheme in ((1000, "light"), (1000, "dark"), (360, "dark")):
            browser.open(page, width, scheme)
            press(browser, "Tab")
            assert browser.ask("document.activeElement.matches('#form textarea')"), "the first field is the first stop"
            browser.ask("document.activeElement.select()")
            browser.call("Input.insertText", text=typed)
            press(browser, "Enter", modifiers=2)
            wait_for(browser, ANSWERED)
            assert browser.ask("document.querySelector('[role=alert]')?.innerText ?? ''") == ""
            for selector in selectors:
                assert browser.ask(f"document.querySelectorAll('#answer {selector}').length") > 0, selector
            while not browser.ask("document.activeElement.matches('#last button')"):
                assert browser.ask("document.activeElement !== document.body"), "every control can be reached"
                press(browser, "Tab")
            press(browser, "Enter")
            assert browser.ask("document.activeElement.value") == typed
            assert browser.ask("document.querySelectorAll('#last li').length") == 1
            assert [event for event in browser.events if event["method"] in PROBLEMS] == []
            asked = {event["params"]["request"]["url"] for event in browser.events if "request" in event["params"]}
            assert {url for url in asked if not url.startswith("data:")} <= {page.as_uri(), f"{page.as_uri()}predict"}
            assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert browser.ask(WIDE.replace(".scroll table, pre, svg", ".card table, pre")) == []
            assert browser.ask(SMALL) == 0
            labels = "[...document.querySelectorAll('textarea')].every(field => field.labels.length === 1)"
            assert browser.ask(labels)
            colours.add((scheme, browser.ask("getComputedStyle(document.body).backgroundColor")))
    assert len(colours) == 2


def test_marked_names_are_those_of_the_answer_also_after_an_emoji(browser, tmp_path):
    predictor = Predictor(write_served(tmp_path, "names"), precision="fp32")
    text = "😀😀 word1 good, bad 😀 so word2"
    (expected,) = predictor([text])
    with serving(predictor, tmp_path) as server:
        browser.open(Page(server.port), 1000, "light")
        browser.ask(f"document.querySelector('textarea').value = {json.dumps(text)}")
        browser.ask("document.querySelector('#form').requestSubmit()")
        wait_for(browser, ANSWERED)
        marks = browser.ask("[...document.querySelectorAll('#answer mark')].map(mark => mark.firstChild.textContent)")
    assert marks == [found["text"] for found in expected["entities"]] != []


def test_an_error_is_shown_and_the_token_is_asked_for(browser, tmp_path):
    predictor = Predictor(write_served(tmp_path, "masks"), precision="fp32")
    with serving(predictor, tmp_path, token="right") as server:
        browser.open(Page(server.port), 1000, "light")
        for token, expression in (("wrong", ANSWERED), ("right", "!!document.querySelector('#form')")):
            browser.ask("document.querySelector('#token').select()")
            browser.call("Input.insertText", text=token)
            press(browser, "Enter")
            wait_for(browser, expression)
        assert browser.ask("document.activeElement.matches('#form textarea')")
        browser.ask("document.activeElement.select()")
        browser.call("Input.insertText", text="nothing to fill ")
        press(browser, "Enter", modifiers=2)
        wait_for(browser, "!!document.querySelector('[role=alert]')")
        said = browser.ask("document.querySelector('[role=alert]').innerText")
        assert said.startswith("there is no [MASK] to fill in")
        browser.ask("document.querySelector('#mask').click()")
        assert browser.ask("document.activeElement.value") == "nothing to fill [MASK]"
        press(browser, "Enter", modifiers=2)
        wait_for(browser, "!!document.querySelector('#answer details')")
        assert [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"] == []
