"""Served models, one for each head, and a client of their server."""

import http.client
import json
import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")  # the extra `serve`; without it files that import this one are skipped

import uvicorn

from bertkit.inference.address import bind
from bertkit.inference.server import UVICORN, Application
from tests.world import write_head

TAGS = {"id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC"]))}
CLASSES = {"id2label": {0: "bad", 1: "so-so", 2: "good"}}
QUESTION = {"question": "who?", "context": "word1 is good."}
SERVED = {  # name -> head, values of its configuration, two inputs
    "classes": ("BertForSequenceClassification", CLASSES, ["good", {"text": "so"}]),
    "labels": ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, ["good", "bad"]),
    "score": ("BertForSequenceClassification", {"num_labels": 1}, ["good", {"text": "so", "text_pair": "bad"}]),
    "scores": ("BertForSequenceClassification", {"num_labels": 2, "problem_type": "regression"}, ["good", "bad so"]),
    "names": ("BertForTokenClassification", TAGS, [{"text": "word1 😀 good bad"}, {"words": ["so", "word2"]}]),
    "tags": ("BertForTokenClassification", {"id2label": {0: "noun", 1: "verb"}}, ["word1 good bad", "so"]),
    "answers": ("BertForQuestionAnswering", {"num_labels": 2}, 2 * [QUESTION]),
    "null": ("BertForQuestionAnswering", {"num_labels": 2, "tau": 0.5}, 2 * [QUESTION]),
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

    def count_waiting(self):
        """Return the number of inputs that wait."""
        return json.loads(self.ask("GET", "/health")[2])["waiting"]

    def read_metrics(self):
        """Return our samples of /metrics by name and labels."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith("bertkit_"))
        return {name: float(value) for name, _, value in pairs}


@contextmanager
def serving(predictor, place, **options):
    """Serve a model in a thread; yield its port."""
    server = uvicorn.Server(uvicorn.Config(Application(predictor, str(place), **options), **UVICORN))
    with bind("127.0.0.1", 0, "") as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


def write_served(folder, name):
    """Write the model of a name in SERVED."""
    head, values, _ = SERVED[name]
    write_head(folder, head, **values)
    (folder / "README.md").write_text(CARD)
    return folder
