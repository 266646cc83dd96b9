"""The server's page in a browser: every head, light and dark, by keyboard alone."""

import time
from types import SimpleNamespace

import pytest

from bertkit.inference.predictor import Predictor
from tests.browser import PROBLEMS
from tests.served import SERVED, serving, write_served
from tests.world import SMALL, WIDE

pytestmark = pytest.mark.slow

SHOWN = {  # name -> typed text of the first field, selectors that the answer has
    "classes": ("word1 good", ["progress", "h3"]),
    "labels": ("word1 good", ["progress", "h3"]),
    "score": ("word1 good", ["h3"]),
    "scores": ("word1 good", ["p"]),
    "names": ("😀😀 word1 good, bad 😀 so word2", ["mark small"]),
    "tags": ("word1 good", ["mark small"]),
    "answers": ("word1?", ["mark", "h3"]),
    "null": ("word1?", ["mark", "h3"]),
    "endings": ("so", ["progress", "h3"]),
    "masks": ("so [MASK] [MASK]", ["table + table progress"]),
    "pretraining": ("so [MASK]", ["progress"]),
    "next": ("so", ["progress"]),
}
KEYS = {"Tab": 9, "Enter": 13}


def press(browser, key):
    text = {"text": "\r"} if key == "Enter" else {}
    code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
    browser.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **code)


def fill(browser, text):
    """Replace the text of the field that the keyboard is in."""
    browser.ask("document.activeElement.select()")
    browser.call("Input.insertText", text=text)


def submit(browser):
    """Reach the button by keyboard, press it, and wait for another answer."""
    before = browser.ask("document.querySelectorAll('article').length")
    while not browser.ask("document.activeElement.matches('button')"):
        press(browser, "Tab")
        assert browser.ask("document.activeElement !== document.body"), "the button can be reached"
    press(browser, "Enter")
    end = time.monotonic() + 20
    while browser.ask("document.querySelectorAll('article').length") == before:
        assert time.monotonic() < end, browser.ask("document.body.innerText")
        time.sleep(0.05)


@pytest.mark.parametrize("name", SERVED)
def test_the_page_is_used_by_keyboard_alone_light_and_dark(name, browser, tmp_path):
    predictor = Predictor(write_served(tmp_path, name), precision="fp32")
    typed, selectors = SHOWN[name]
    colours = set()
    with serving(predictor, tmp_path) as port:
        address = f"http://127.0.0.1:{port}/"
        for width, scheme in ((1000, "light"), (1000, "dark"), (360, "dark")):
            browser.open(SimpleNamespace(as_uri=lambda: address), width, scheme)
            press(browser, "Tab")
            assert browser.ask("document.activeElement.matches('textarea')"), "the first field is the first stop"
            fill(browser, typed)
            submit(browser)
            submit(browser)
            assert browser.ask("document.querySelectorAll('article').length") == 2, "earlier answers stay"
            assert browser.ask("document.querySelector('[role=alert]')?.innerText ?? ''") == ""
            if name == "names":
                marks = browser.ask("[...document.querySelectorAll('mark')].map(mark => mark.firstChild.textContent)")
                (expected,) = predictor([typed])
                assert marks == 2 * [found["text"] for found in expected["entities"]] != []
            for selector in selectors:
                assert browser.ask(f"document.querySelectorAll('article {selector}').length") > 0, selector
            assert [event for event in browser.events if event["method"] in PROBLEMS] == []
            asked = {event["params"]["request"]["url"] for event in browser.events if "request" in event["params"]}
            assert {url for url in asked if not url.startswith("data:")} <= {address, f"{address}predict"}
            assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            assert browser.ask(WIDE.replace(".scroll table, pre, svg", "footer table, pre")) == []
            assert browser.ask(SMALL) == 0
            labels = "[...document.querySelectorAll('textarea')].every(field => field.labels.length === 1)"
            assert browser.ask(labels)
            colours.add((scheme, browser.ask("getComputedStyle(document.body).backgroundColor")))
    assert len(colours) == 2
