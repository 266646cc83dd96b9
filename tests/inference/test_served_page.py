"""The server's page in a browser: every head, light and dark, by keyboard alone."""

import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from bertkit.inference.predictor import Predictor
from tests.analysis.test_page import SMALL, WIDE
from tests.browser import PROBLEMS
from tests.inference.test_server import SERVED, serving, write_served

pytestmark = pytest.mark.slow

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
            assert browser.ask(WIDE.replace(".scroll table, pre", ".card table, pre")) == []
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
