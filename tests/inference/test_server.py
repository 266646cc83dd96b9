"""A served model answers as `predict` does, refuses in one line what it cannot answer, and shows no text to others."""

import asyncio
import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")  # the extra `serve`

from jsonschema import Draft202012Validator

from bertkit.data.saved_tokenizer import SavedTokenizer
from bertkit.inference import server as module
from bertkit.inference.batching import Batcher
from bertkit.inference.predictor import Predictor
from tests.official import write_checkpoint
from tests.served import SERVED, Client, serving, write_served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served"), "classes")


@pytest.fixture(scope="module")
def predictor(folder):
    return Predictor(folder, precision="fp32")


@pytest.fixture(scope="module")
def port(predictor, folder):
    with serving(predictor, folder) as port:
        yield port


@pytest.fixture
def client(port):
    return Client(port)


# --- Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_each_head_answers_as_predict_does_and_as_its_schema_says(name, tmp_path):
    predictor = Predictor(write_served(tmp_path, name), precision="fp32")
    inputs = [*SERVED[name][2], predictor.sample]
    with serving(predictor, tmp_path) as port:
        client = Client(port)
        document = json.loads(client.ask("GET", "/openapi.json")[2])
        described = document["paths"]["/predict"]["post"]
        given = described["requestBody"]["content"]["application/json"]
        answer = described["responses"]["200"]["content"]["application/json"]["schema"]
        expected = json.loads(json.dumps([predictor([one])[0] for one in inputs]))
        for one, result in zip(inputs, expected, strict=True):
            assert client.predict(one) == (200, result)
            Draft202012Validator(given["schema"]).validate(one)
            Draft202012Validator(answer).validate(result)
        status, found = client.predict(inputs)
        assert (status, [one.keys() for one in found]) == (200, [result.keys() for result in expected])
        Draft202012Validator(answer).validate(found)
        for example in given["examples"].values():
            Draft202012Validator(given["schema"]).validate(example["value"])
            assert client.predict(example["value"])[0] == 200
        assert not Draft202012Validator(given["schema"]).is_valid({"txt": "so"})
        assert not Draft202012Validator(answer).is_valid({"labels": 3})


def test_an_invalid_input_of_a_list_has_its_error_in_its_place(client):
    status, (first, second, third, fourth) = client.predict(
        ["good", {"txt": "so", "id": 7}, 5, {"text": "bad", "id": [1]}]
    )
    assert status == 200
    assert first.keys() == {"label", "probability", "probabilities"}
    assert second == {"id": 7, "error": "text is missing; the input has txt, id: give text as a string"}
    assert third == {"error": "got int; give a text as a string, or an object"}
    assert (fourth["id"], fourth["label"]) == ([1], client.predict("bad")[1]["label"])
    assert client.predict([]) == (200, [])
    assert client.predict({"txt": "so", "id": 7}) == (422, second)
    assert client.predict("good " * 500)[1]["truncated"] is True


REFUSED = [  # body, status, message
    (b"", 400, r"the request is not JSON \(Input data was truncated\); correct it"),
    (b'"\xff"', 400, "the request is not JSON"),
    (b"[" * 100_000, 400, "the request is not JSON"),
    (json.dumps("a" * 20_001).encode(), 422, r"the input has 20,001 characters, expected at most 20,000; split it"),
    (json.dumps(257 * ["a"]).encode(), 422, "the request has 257 inputs, expected at most 256; send several requests"),
    (b'"' + b"a" * 2_000_000 + b'"', 413, "the request has more than 1,048,576 bytes; send several requests"),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_an_input_is_refused_in_one_line(body, status, message, client):
    found, answer = client.predict(body)
    assert found == status, answer
    assert answer.keys() == {"error"}
    assert re.match(message, answer["error"])
    assert answer["error"].isprintable()
    assert client.predict("good")[0] == 200, "on the same connection or a new one"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/predict", {"Content_Type": "text/plain"}, 415),
        ("GET", "/predict", {}, 405),
        ("GET", "/docs", {}, 404),
        ("OPTIONS", "/predict", {"Origin": "http://far.away", "Access_Control_Request_Method": "POST"}, 405),
        ("GET", "/health", {"Host": "far.away"}, 400),
        ("GET", "/health", {"Host": "127.0.0.1.far.away:80"}, 400),
        ("GET", "/health", {"Host": "LOCALHOST:1"}, 200),
        ("GET", "/health", {"Host": "[::1]:8080"}, 200),
    ],
)
def test_other_requests_are_refused_too(method, path, headers, status, client):
    found, answered, content = client.ask(method, path, b'"good"' if method == "POST" else None, **headers)
    assert found == status, content
    assert "Access-Control-Allow-Origin" not in answered
    assert answered["X-Content-Type-Options"] == "nosniff"
    if status > 400:
        assert list(json.loads(content)) == ["error"]


# --- Limits -----------------------------------------------------------------------------------------------------------


class SlowPredictor:
    """A predictor whose answers wait for an event."""

    def __init__(self, predictor):
        vars(self).update(vars(predictor))
        self.predictor, self.began, self.go = predictor, threading.Event(), threading.Event()

    def stream(self, inputs, note):
        self.began.set()
        assert self.go.wait(30)
        return self.predictor.stream(inputs, note=note)


def test_a_full_queue_and_a_deadline_are_told(predictor, folder, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    monkeypatch.setattr(module, "DEADLINE", 1.0)
    slow = SlowPredictor(predictor)
    with serving(slow, folder) as port, ThreadPoolExecutor() as pool:
        client = Client(port)
        before = client.read_metrics()
        late = pool.submit(Client(port).predict, "good")
        assert slow.began.wait(30)
        also = pool.submit(Client(port).predict, ["good", "bad"])
        while client.count_waiting() < 2:
            time.sleep(0.01)
        status, headers, content = client.ask("POST", "/predict", b'"so"', **{"Content-Type": "application/json"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(content)["error"] == (
            "2 inputs are waiting and the request has 1, at most 2 may wait; try again in a second"
        )
        for future in (late, also):
            assert future.result() == (504, {"error": "no answer within 1 seconds; send less at a time"})
        slow.go.set()
        while client.count_waiting():
            time.sleep(0.01)
        assert client.predict("good")[0] == 200
        found = client.read_metrics()
    name = 'bertkit_requests_total{status="504"}'
    assert found[name] - before.get(name, 0) == 2
    assert found["bertkit_inputs_total"] - before["bertkit_inputs_total"] == 2, "the two that waited were dropped"


def test_the_inputs_of_a_client_that_has_left_are_dropped(predictor, folder):
    slow = SlowPredictor(predictor)
    with serving(slow, folder) as port, ThreadPoolExecutor() as pool:
        client, leaving = Client(port), Client(port)
        before = client.read_metrics()
        first = pool.submit(Client(port).predict, "good")
        assert slow.began.wait(30)
        leaving.connection.request("POST", "/predict", b'["good", "bad"]', {"Content-Type": "application/json"})
        while client.count_waiting() < 2:
            time.sleep(0.01)
        leaving.connection.close()
        name = 'bertkit_requests_total{status="499"}'
        while client.read_metrics().get(name, 0) == before.get(name, 0):
            time.sleep(0.01)
        slow.go.set()
        assert first.result()[0] == 200
        assert client.read_metrics()["bertkit_inputs_total"] - before["bertkit_inputs_total"] == 1


def test_metrics_count_inputs_and_tokens_and_hold_no_text(predictor, folder, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with serving(predictor, folder) as port:
        client = Client(port)
        before = client.read_metrics()
        assert client.predict(["good", "good bad so"])[0] == 200
        assert client.predict("good")[0] == 200
        assert client.predict(b'{"secret')[0] == 400
        client.ask("GET", "/predict?secret=secret")
        after = client.read_metrics()
        assert "secret" not in client.ask("GET", "/metrics")[2].decode()
    grown = {name: value - before.get(name, 0) for name, value in after.items() if not name.endswith("_created")}
    requests = {name: count for name, count in grown.items() if name.startswith("bertkit_requests_total") and count}
    assert requests == {
        f'bertkit_requests_total{{status="{status}"}}': count for status, count in ((200, 2), (400, 1), (405, 1))
    }
    assert grown["bertkit_inputs_total"] == grown["bertkit_batch_inputs_sum"] == 3
    assert grown["bertkit_tokens_total"] == 3 + 5 + 3, "with [CLS] and [SEP]"
    assert grown["bertkit_request_seconds_count"] == 4
    assert after["bertkit_waiting_inputs"] == 0
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


# --- The token and the page -------------------------------------------------------------------------------------------


def test_with_a_token_nothing_else_is_answered(predictor, folder):
    with serving(predictor, folder, token="right") as port:
        client = Client(port)
        for given in (None, "Bearer wrong", "Basic right", "right"):
            headers = {"Authorization": given} if given else {}
            status, answer = client.predict("good", **headers)
            assert (status, list(answer)) == (401, ["error"])
            for path in ("/metrics", "/openapi.json"):
                assert client.ask("GET", path, **headers)[0] == 401
        assert client.ask("GET", "/health")[0] == 200
        page = client.ask("GET", "/")[2].decode()
        assert '<input id="token"' in page
        assert "Card" not in page
        assert folder.name not in page
        assert client.predict("good", Authorization="Bearer right", Host="proxy.example.org")[0] == 200
        described = json.loads(client.ask("GET", "/openapi.json", Authorization="bearer right")[2])
        assert described["paths"]["/predict"]["post"]["security"]


def test_the_page_loads_nothing_and_runs_only_its_own_script(client):
    page = client.ask("GET", "/")[2].decode()
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    (policy,) = re.findall('Content-Security-Policy" content="(.*?)"', page, re.DOTALL)
    assert f"script-src 'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert 'href="/card"' in page
    card = client.ask("GET", "/card")[2].decode()
    assert "&lt;script&gt;alert(1)" in card
    assert "<script" not in card
    assert "default-src 'none'" in card
    for each in (page, card):
        assert 'href="javascript' not in each
        assert re.findall(r"(?:src|href)=\"(?!data:,|http)", each) in (['href="'], []), "a link to the other page"
    assert re.findall(r'href="(/[^"]*)"', page + card) == ["/card", "/"]


def test_a_chinese_vocabulary_has_chinese_examples(tmp_path):
    texts = [one["text"] for one in module.CHINESE_INPUTS["BertForSequenceClassification"]]
    write_checkpoint(tmp_path, labels=("good", "bad"), characters="".join(texts))
    predictor = Predictor(tmp_path, precision="fp32")
    for tokenizer in (predictor.settings.tokenizer, SavedTokenizer(tmp_path)):  # of a run and of an export
        predictor.settings = replace(predictor.settings, tokenizer=tokenizer)
        page = module.render_page(predictor, "reviews", str(tmp_path), asks_token=False)
        assert re.findall(r"<textarea.*?>\s*(.*?)</textarea>", page, re.DOTALL)[0] == texts[0]
        for text in texts:
            assert text in page
        assert "The man went" not in page


# --- The queue --------------------------------------------------------------------------------------------------------


class Echo:
    """A model that returns its inputs and remembers the batches; the first waits until it may go on."""

    def __init__(self, most_tokens=1000, most_waiting=100):
        self.batches, self.go = [], threading.Event()
        self.batcher = Batcher(self.answer, most_tokens, most_waiting)

    def answer(self, inputs):
        self.batches.append(inputs)
        assert self.go.wait(30)
        if "bad" in inputs:
            raise ValueError
        return [{"text": given} for given in inputs]

    def run(self, *requests):
        """Return the answers to the first request and, while it is answered, to the others."""

        async def ask_all():
            self.batcher.thread.start()
            first = asyncio.create_task(self.batcher.answer(requests[0]))
            while not self.batches:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(self.batcher.answer(request)) for request in requests[1:]]
            await asyncio.sleep(0)
            self.go.set()
            return await asyncio.gather(first, *others, return_exceptions=True)

        try:
            return asyncio.run(ask_all())
        finally:
            self.batcher.close()


def test_inputs_that_wait_are_answered_together_each_request_in_turn():
    echo = Echo(most_tokens=2)  # eight characters of English
    requests = [["0"], ["a1", "a2", "a3", "a4", "a5"], ["b1", "b2"], ["c1"]]
    assert echo.run(*requests) == [[{"text": text} for text in texts] for texts in requests]
    assert echo.batches == [["0"], ["a1", "b1", "c1", "a2"], ["b2", "a3", "a4", "a5"]]


def test_an_input_above_the_limit_is_a_batch_of_its_own():
    echo = Echo(most_tokens=2)
    echo.run(["0"], ["a" * 99, "b", "c"])
    assert echo.batches == [["0"], ["a" * 99], ["b", "c"]]


def test_an_input_that_fails_spoils_no_other_and_a_full_queue_refuses():
    echo = Echo(most_waiting=3)
    first, good, full, bad = echo.run(["0"], ["a", "b"], ["c", "d"], ["bad"])
    assert (first, good) == ([{"text": "0"}], [{"text": "a"}, {"text": "b"}])
    assert isinstance(full, asyncio.QueueFull)
    assert isinstance(bad, ValueError)
    assert echo.batcher.waiting == 0


def test_an_address_that_cannot_be_used_is_named(call):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, _, said = call("serve", "nowhere", "--port", port)
    line = f"bertkit: 127.0.0.1:{port} cannot be used (Address already in use); give another --port or --host\n"
    assert (code, said) == (2, line)
    code, _, said = call("serve", "nowhere", "--host", "no.such.host.invalid", "--token", "s")
    assert (code, said.count("\n")) == (2, 1)
    assert "no.such.host.invalid:8080 cannot be used" in said
    code, _, said = call("serve", "nowhere", "--host", "0.0.0.0", "--port", "0")
    line = "bertkit: --host 0.0.0.0 lets other machines use the model; give a --token that they must send\n"
    assert (code, said) == (2, line)


# --- The process ------------------------------------------------------------------------------------------------------


READY = re.compile(r"answers at http://127\.0\.0\.1:(\d+); end it with Ctrl-C")


class Program:
    """`bertkit serve` as a process."""

    def __init__(self, folder, *options):
        command = [sys.executable, "-m", "bertkit", "serve", str(folder), "--port", "0", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        found = filter(None, map(READY.search, iter(self.process.stdout.readline, "")))  # the export is said before
        self.port = int(next(found)[1])

    def end(self, number=signal.SIGTERM):
        """Send a signal and return exit code, standard output and standard error."""
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


@pytest.mark.slow
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
