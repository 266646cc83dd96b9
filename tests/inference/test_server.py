"""A served model answers as `predict` does, refuses in one line what it cannot answer, and shows no text to others."""

import asyncio
import hashlib
import http.client
import json
import logging
import re
import socket
import sys
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import uvicorn
from jsonschema import Draft202012Validator

from bertkit.errors import UsageError, name_extra
from bertkit.inference import server as module
from bertkit.inference.batching import Batcher, Busy
from bertkit.inference.predictor import Predictor
from bertkit.inference.server import bind, check_exposure, make_app
from bertkit.system.progress import ignore
from tests.inference.test_predictor import write_head

TAGS = {"id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC"]))}
SERVED = {  # name -> head, values of its configuration, two inputs
    "classes": (
        "BertForSequenceClassification",
        {"id2label": {0: "bad", 1: "so-so", 2: "good"}},
        ["good", {"text": "so"}],
    ),
    "labels": ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, ["good", "bad"]),
    "score": ("BertForSequenceClassification", {"num_labels": 1}, ["good", {"text": "so", "text_pair": "bad"}]),
    "scores": ("BertForSequenceClassification", {"num_labels": 2, "problem_type": "regression"}, ["good", "bad so"]),
    "names": ("BertForTokenClassification", TAGS, [{"text": "word1 😀 good bad"}, {"words": ["so", "word2"]}]),
    "tags": ("BertForTokenClassification", {"id2label": {0: "noun", 1: "verb"}}, ["word1 good bad", "so"]),
    "answers": ("BertForQuestionAnswering", {"num_labels": 2}, 2 * [{"question": "who?", "context": "word1 is good."}]),
    "null": (
        "BertForQuestionAnswering",
        {"num_labels": 2, "tau": 0.5},
        2 * [{"question": "who?", "context": "word1 is good."}],
    ),
    "endings": (
        "BertForMultipleChoice",
        {},
        [{"context": "so", "endings": ["good", "bad"]}, {"context": "a", "start": "so", "endings": ["good", "b", "c"]}],
    ),
    "masks": ("BertForMaskedLM", {}, ["[MASK] good", {"text": "so [MASK] [MASK]", "text_pair": "bad"}]),
    "pretraining": ("BertForPreTraining", {}, ["[MASK] good", {"text": "so", "text_pair": "bad"}]),
    "next": ("BertForNextSentencePrediction", {}, 2 * [{"text": "so", "text_pair": "bad"}]),
}
CARD = "---\nx: 1\n---\n# Card\n\n<script>alert(1)</script> [a](javascript:b) ![c](http://far.away/d.png)\n"


class Client:
    """A connection to a server on this machine."""

    def __init__(self, port):
        self.port = port
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method, path, body=None, **headers):
        """Return status, headers and content."""
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.headers, answer.read()

    def predict(self, given, **headers):
        """Return status and answer."""
        body = given if isinstance(given, bytes) else json.dumps(given).encode()
        status, _, content = self.ask("POST", "/predict", body, **{"Content-Type": "application/json"} | headers)
        return status, json.loads(content)


@contextmanager
def serving(predictor, place, hosts=frozenset(module.LOOPBACK), kind=uvicorn.Server, **options):
    """Serve a model in a thread; yield its port and application."""
    app = make_app(predictor, str(place), hosts=hosts, **options)
    server = kind(module.configure(app))
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield SimpleNamespace(port=listener.getsockname()[1], app=app)
        finally:
            server.should_exit = True
            thread.join()


def write_served(folder, name):
    """Write the model of a name in SERVED."""
    head, values, _ = SERVED[name]
    write_head(folder, head, **values)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served"), "classes")


@pytest.fixture(scope="module")
def predictor(folder):
    return Predictor(folder, precision="fp32")


@pytest.fixture(scope="module")
def served(predictor, folder):
    with serving(predictor, folder) as server:
        yield server


@pytest.fixture
def client(served):
    client = Client(served.port)
    yield client
    client.connection.close()


# --- Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_each_head_answers_as_predict_does_and_as_its_schema_says(name, tmp_path):
    predictor = Predictor(write_served(tmp_path, name), precision="fp32")
    inputs = [*SERVED[name][2], predictor.sample]
    with serving(predictor, tmp_path) as server:
        client = Client(server.port)
        document = json.loads(client.ask("GET", "/openapi.json")[2])
        described = document["paths"]["/predict"]["post"]
        given = described["requestBody"]["content"]["application/json"]
        answer = described["responses"]["200"]["content"]["application/json"]["schema"]
        expected = json.loads(json.dumps([predictor([one])[0] for one in inputs]))
        for one, result in zip(inputs, expected, strict=True):
            status, found = client.predict(one)
            assert (status, found) == (200, result)
            Draft202012Validator(given["schema"]).validate(one)
            Draft202012Validator(answer).validate(found)
        status, found = client.predict(inputs)
        assert status == 200
        assert [found.keys() for found in found] == [result.keys() for result in expected]
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
    assert third["error"].endswith("got `int`): '5'; give one of these")
    assert (fourth["id"], fourth["label"]) == ([1], client.predict("bad")[1]["label"])
    assert client.predict([]) == (200, [])
    assert client.predict({"txt": "so", "id": 7}) == (422, second)


def test_a_truncated_input_is_marked(client):
    assert client.predict("good " * 500)[1]["cut"] is True


DEEP = b"[" * 100_000
REFUSED = [  # body, status, message
    (b"", 400, r"the request is not JSON \(Input data was truncated\); correct it"),
    (b"{", 400, "the request is not JSON"),
    (b"good", 400, "the request is not JSON"),
    (b"[1,]", 400, "the request is not JSON"),
    (b"NaN", 400, "the request is not JSON"),
    (b'{"text": 1e999}', 400, "the request is not JSON"),
    (b'"\\ud800"', 400, "the request is not JSON"),
    (b'"\xff"', 400, "the request is not UTF-8; convert it"),
    (DEEP, 400, "the request is not JSON"),
    (b'{"text": "a", "b": ' + DEEP, 400, "the request is not JSON"),
    (b"null", 422, "got NoneType; give a text as a string, or an object"),
    (b"5", 422, "got int; give"),
    (b"9" * 400, 422, "got int; give"),
    (b"9" * 5000, 400, "the request is not JSON"),
    (b'{"text": ["a"]}', 422, r"text is \"\['a'\]\", not a string; the input has text"),
    (json.dumps("a" * 20_001).encode(), 422, r"the input has 20,001 characters, expected at most 20,000; split it"),
    (json.dumps(257 * ["a"]).encode(), 422, "the request has 257 inputs, expected at most 256; send several requests"),
    (
        b'"' + b"a" * 2_000_000 + b'"',
        413,
        "the request has more than 1,048,576 bytes; send the inputs in several requests",
    ),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_is_not_an_input_is_refused_in_one_line(body, status, message, client):
    found, answer = client.predict(body)
    assert found == status, answer
    assert answer.keys() == {"error"}
    assert re.match(message, answer["error"])
    assert answer["error"].isprintable()
    assert client.predict("good")[0] == 200, "on the same connection or a new one"


@pytest.mark.parametrize("depth", [*range(100, 900, 100), *range(950, 1010, 6)])
def test_nesting_of_any_depth_has_an_answer(depth, client):
    nested = b"[" * depth + b"]" * depth
    for before, behind in ((b'{"text": "good", "id": ', b"}"), (b'{"text": ', b"}"), (b'["good", ', b"]")):
        body = before + nested + behind
        assert client.ask("POST", "/predict", body, Content_Type="application/json")[0] in (200, 400, 422)


def test_an_ending_counts_with_its_context():
    given = json.dumps({"context": "a" * 1000, "endings": 100 * ["b"]}).encode()
    ((error,), is_list) = module.read_request(given)
    assert not is_list
    assert "the input has 100,200 characters" in str(error)
    numbered = {f"ending{number}": "" for number in range(100)}
    for given in (numbered | {"sent1": "", "sent2": "b" * 1000}, {"endings": [""] * 20_001}):
        ((error,), _) = module.read_request(json.dumps(given).encode())
        assert "characters, expected at most 20,000" in str(error)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/predict", {"Content_Type": "text/plain"}, 415),
        ("POST", "/predict", {}, 415),
        ("GET", "/predict", {}, 405),
        ("DELETE", "/", {}, 405),
        ("GET", "/../etc/passwd", {}, 404),
        ("GET", "/docs", {}, 404),
        ("OPTIONS", "/predict", {"Origin": "http://far.away", "Access_Control_Request_Method": "POST"}, 405),
        ("GET", "/health", {"Host": "far.away"}, 421),
        ("GET", "/health", {"Host": "far.away:80"}, 421),
        ("GET", "/health", {"Host": "127.0.0.1.far.away"}, 421),
        ("GET", "/health", {"Host": "localhost@far.away"}, 421),
        ("GET", "/health", {"Host": ""}, 421),
        ("GET", "/health", {"Host": "LOCALHOST:1"}, 200),
        ("GET", "/health", {"Host": "[::1]:8080"}, 200),
    ],
)
def test_other_requests_are_refused_too(method, path, headers, status, client):
    found, answered, content = client.ask(method, path, b'"good"' if method == "POST" else None, **headers)
    assert found == status, content
    assert "Access-Control-Allow-Origin" not in answered
    assert answered["X-Content-Type-Options"] == "nosniff"
    if status != 200:
        assert list(json.loads(content)) == ["error"]


def test_answers_do_not_wait_for_acknowledgements():
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # without it asyncio leaves Nagle's algorithm on: 40 ms an answer


def test_the_name_of_the_host_is_checked_also_where_all_addresses_are_served(predictor, folder):
    gate = make_app(predictor, str(folder), hosts=None, token="s")
    names = {
        "192.168.1.7:8080": True,
        "[fe80::1]": True,
        socket.gethostname(): True,
        "localhost": True,
        "far.away": False,
    }
    assert {name: gate.is_allowed(name) for name in names} == names


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
    with serving(slow, folder) as server, ThreadPoolExecutor() as pool:
        late = pool.submit(Client(server.port).predict, "good")
        assert slow.began.wait(30)
        also = pool.submit(Client(server.port).predict, ["good", "bad"])
        while json.loads(Client(server.port).ask("GET", "/health")[2])["waiting"] < 2:
            time.sleep(0.01)
        client = Client(server.port)
        status, headers, content = client.ask("POST", "/predict", b'"so"', **{"Content-Type": "application/json"})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(content)["error"] == (
            "2 inputs are waiting and the request has 1, at most 2 may wait; try again in a second"
        )
        for future in (late, also):
            message = {"error": "no answer within 1 seconds; send fewer or shorter inputs"}
            assert future.result() == (504, message)
        slow.go.set()
        assert client.predict("good")[0] == 200, "what was given up is not answered first"
        count = read_metrics(client)
        assert count['bertkit_requests_total{status="504"}'] == 2
        assert count["bertkit_inputs_total"] == 2, "the two that waited too long were dropped"


def test_the_inputs_of_a_client_that_has_left_are_dropped(predictor, folder):
    slow = SlowPredictor(predictor)
    with serving(slow, folder) as server, ThreadPoolExecutor() as pool:
        first = pool.submit(Client(server.port).predict, "good")
        assert slow.began.wait(30)
        leaving = Client(server.port)
        leaving.connection.request("POST", "/predict", b'["good", "bad"]', {"Content-Type": "application/json"})
        for waiting in (2, 0):
            while json.loads(Client(server.port).ask("GET", "/health")[2])["waiting"] != waiting:
                time.sleep(0.01)
            leaving.connection.close()
        slow.go.set()
        assert first.result()[0] == 200
        assert read_metrics(Client(server.port))["bertkit_inputs_total"] == 1


def test_a_model_that_fails_says_so_without_the_text(predictor, folder):
    said = []
    broken = SimpleNamespace(**vars(predictor))

    def stream(inputs, note):
        if any(given == "secret" for given in inputs):
            raise RuntimeError("secret")
        return predictor.stream(inputs, note=note)

    broken.stream = stream
    with serving(broken, folder, report=said.append) as server:
        client = Client(server.port)
        assert client.predict("secret") == (500, {"error": "an internal error; the server's output has its name"})
        assert client.predict(["good", "secret"])[0] == 500
        assert client.predict("good")[0] == 200
    assert set(said) == {"RuntimeError"}


@pytest.mark.parametrize("passes", [0, 1, 2])  # since the first connection: asyncio accepts and makes one in two
def test_what_has_connected_before_the_end_is_answered_and_told_to_leave_after_it(passes, predictor, folder):
    connections, told = [], []

    class BusyServer(module.Server):
        """A server that receives a request over a new connection in each pass of its loop, until it stops listening."""

        async def shutdown(self, sockets):
            address, loop = sockets[0].getsockname(), asyncio.get_running_loop()

            def connect():
                try:
                    connections.append(socket.create_connection(address, timeout=5))
                except ConnectionRefusedError:
                    return
                connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                told.append(self.config.loaded_app.is_leaving)
                loop.call_soon(connect)

            connect()
            for _ in range(passes):
                await asyncio.sleep(0)
            await super().shutdown(sockets)

    with serving(predictor, folder, kind=lambda config: BusyServer(config, ignore)):
        pass
    assert told
    assert not any(told), "a client that is told to leave too early connects again and is reset"
    for connection in connections:
        with connection, connection.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            answer = file.readlines()
    assert b"connection: close\r\n" in answer, "the last is told to leave"


# --- Metrics and logs -------------------------------------------------------------------------------------------------


def read_metrics(client):
    """Return the samples of /metrics by name and labels."""
    status, headers, content = client.ask("GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    lines = [line for line in content.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_count_inputs_and_tokens_and_hold_no_text(predictor, folder, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with serving(predictor, folder) as server:
        client = Client(server.port)
        assert client.predict(["good", "good bad so"])[0] == 200
        assert client.predict("good")[0] == 200
        assert client.predict(b'{"secret')[0] == 400
        client.ask("GET", "/predict?secret=secret")
        found = read_metrics(client)
        assert "secret" not in client.ask("GET", "/metrics")[2].decode()
    requests = {name: value for name, value in found.items() if name.startswith("bertkit_requests_total")}
    assert requests == {
        f'bertkit_requests_total{{status="{status}"}}': count for status, count in ((200, 2), (400, 1), (405, 1))
    }
    assert found["bertkit_inputs_total"] == 3
    assert found["bertkit_tokens_total"] == 3 + 5 + 3, "with [CLS] and [SEP]"
    assert found["bertkit_request_seconds_count"] == 4
    assert found["bertkit_batch_inputs_sum"] == 3
    assert found["bertkit_waiting_inputs"] == 0
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


# --- The token and the page -------------------------------------------------------------------------------------------


def test_with_a_token_nothing_else_is_answered(predictor, folder):
    with serving(predictor, folder, token="right") as server:
        client = Client(server.port)
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic right"},
            {"Authorization": "right"},
        ):
            status, answer = client.predict("good", **headers)
            assert (status, list(answer)) == (401, ["error"])
            for path in ("/metrics", "/openapi.json", "/nothing"):
                assert client.ask("GET", path, **headers)[0] == 401
            assert client.ask("GET", "/health", **headers)[0] == 200
            page = client.ask("GET", "/", **headers)[2].decode()
            assert '<input id="token"' in page
            assert "Card" not in page
            assert folder.name not in page
        assert client.predict("good", Authorization="Bearer right")[0] == 200
        assert client.predict("good", Authorization="bearer  right")[0] == 200
        assert "Card" in client.ask("GET", "/", Authorization="Bearer right")[2].decode()


def test_the_page_loads_nothing_and_runs_only_its_own_script(client):
    _, headers, content = client.ask("GET", "/")
    page, policy = content.decode(), headers["Content-Security-Policy"]
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "&lt;script&gt;alert(1)" in page
    assert 'href="javascript' not in page
    assert "<img" not in page
    assert re.findall(r"(?:src|href)=\"(?!data:,|http)", page) == []
    for field in re.findall(r'<textarea id="([^"]+)"', page):
        assert f'<label for="{field}">' in page


# --- The queue --------------------------------------------------------------------------------------------------------


class Echo:
    """A model that returns its inputs and remembers the batches; the first waits until it may go on."""

    def __init__(self, **options):
        self.batches, self.said, self.go = [], [], threading.Event()
        options = {"most_tokens": 1000, "most_waiting": 100} | options
        self.batcher = Batcher(self.answer, **options, note=lambda inputs, tokens: None, report=self.said.append)

    def answer(self, inputs):
        self.batches.append(inputs)
        assert self.go.wait(30)
        if "bad" in inputs:
            raise ValueError
        return [{"text": given} for given in inputs], sum(len(given) for given in inputs) // 4

    def run(self, *requests):
        """Return the answers to the first request and, while it is answered, to the others."""

        async def ask_all():
            self.batcher.start()
            tasks = []
            for request in requests:
                tasks.append(asyncio.create_task(self.batcher.answer(request)))
                while not self.batches:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0)
            self.go.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        try:
            return asyncio.run(ask_all())
        finally:
            self.batcher.close()


def test_inputs_that_wait_are_answered_together_each_request_in_turn():
    echo = Echo(most_tokens=2)  # eight characters of English
    found = echo.run(["0"], ["a1", "a2", "a3", "a4", "a5"], ["b1", "b2"], ["c1"])
    assert found == [
        [{"text": text} for text in texts] for texts in (["0"], ["a1", "a2", "a3", "a4", "a5"], ["b1", "b2"], ["c1"])
    ]
    assert echo.batches == [["0"], ["a1", "b1", "c1", "a2"], ["b2", "a3", "a4", "a5"]]


def test_an_input_above_the_limit_is_a_batch_of_its_own_and_the_estimate_follows_the_tokens():
    echo = Echo(most_tokens=2)
    echo.run(["0"], ["a" * 99, "b", "c"])
    assert echo.batches == [["0"], ["a" * 99], ["b", "c"]]
    echo = Echo(most_tokens=4)
    echo.answer = echo.batcher.answer_batch = lambda inputs: ([{}] * len(inputs), sum(map(len, inputs)))
    echo.go.set()
    echo.batches = [None]
    echo.run(*(["word"] for _ in range(50)))
    assert 1 <= echo.batcher.characters_a_token < 4, "a token per character"


def test_an_input_that_fails_spoils_no_other():
    echo = Echo()
    first, good, bad = echo.run(["0"], ["a", "b"], ["bad"])
    assert (first, good) == ([{"text": "0"}], [{"text": "a"}, {"text": "b"}])
    assert isinstance(bad, ValueError)
    assert echo.said == ["ValueError"]


def test_a_full_queue_refuses():
    echo = Echo(most_waiting=3)
    _, two, again, one = echo.run(["0"], ["a", "b"], ["c", "d"], ["e"])
    assert isinstance(again, Busy)
    assert (two, one) == ([{"text": "a"}, {"text": "b"}], [{"text": "e"}])
    assert echo.batcher.waiting == 0


# --- The command ------------------------------------------------------------------------------------------------------


def test_other_machines_need_a_token():
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "::1"):
        check_exposure(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.7", "example.org"):
        check_exposure(host, "s")
        with pytest.raises(UsageError, match="lets other machines use the model; give a --token that they must send"):
            check_exposure(host, None)
    for token in ("", "a b", "é", "a\n"):
        with pytest.raises(UsageError, match="--token must be printable ASCII characters without spaces; give another"):
            check_exposure("127.0.0.1", token)


def test_an_address_that_cannot_be_used_is_named(call):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, _, said = call("serve", "nowhere", "--port", port)
        assert (code, said) == (
            2,
            f"bertkit: 127.0.0.1:{port} cannot be used (Address already in use); give another --port or --host\n",
        )
    code, _, said = call("serve", "nowhere", "--host", "no.such.host.invalid", "--token", "s")
    assert (code, said.count("\n")) == (2, 1)
    assert "is not an address of this machine" in said


def test_an_absent_extra_is_named(call, monkeypatch):
    monkeypatch.delitem(sys.modules, "bertkit.inference.server", raising=False)
    monkeypatch.delattr("bertkit.inference.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, said = call("serve", "nowhere")
    assert (code, said) == (2, f"bertkit: bertkit serve needs packages that are not installed; {name_extra('serve')}\n")
