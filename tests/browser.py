"""Headless Chromium for the tests that open a page; the fixture `browser` in conftest.py starts it."""

import contextlib
import json
import os
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROBLEMS = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.loadingFailed")


class Browser:
    """Headless Chromium, controlled through its DevTools pipe: JSON messages that end with a NUL."""

    def __init__(self, executable, folder):
        theirs, self.sink = os.pipe()
        self.source, ours = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        move = f'exec "$0" "$@" 3</dev/fd/{theirs} 4>/dev/fd/{ours}'  # to the descriptors where Chromium expects them
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["sh", "-c", move, executable, *flags], pass_fds=(theirs, ours), **quiet)
        os.close(theirs)
        os.close(ours)
        self.rest, self.number, self.events, self.session = b"", 0, [], {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def receive(self):
        while b"\0" not in self.rest:
            data = os.read(self.source, 1 << 20)
            assert data, "Chromium has ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | self.session
        os.write(self.sink, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, scheme):
        self.events = []
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def ask(self, expression):
        """Evaluate an expression, as if the reader had just clicked."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self):
        self.session = {}
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self.process.wait(30)
        os.close(self.sink)
        os.close(self.source)
