"""One golden file of refusals: the line of each `UsageError` that a test provokes.

    python -m pytest --numprocesses 0 --write-refusals [TEST ...]

runs the tests that refuse and writes their lines to `tests/refusals.json` (`make docs` does it for all).
A test says `with refused(): call()`; a directory of pytest's is written as DIR. Hypothesis takes no such fixture.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bertkit.errors import UsageError

GOLDEN = Path(__file__).with_name("refusals.json")
OPTION = "--write-refusals"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="run the tests that refuse, and write their lines")


def pytest_configure(config: pytest.Config) -> None:
    config.refusals = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION):
        others = [item for item in items if "refused" not in item.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption(OPTION):
        text = json.dumps(session.config.refusals, indent=1, ensure_ascii=False, sort_keys=True)
        GOLDEN.write_text(text + "\n")


@pytest.fixture
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Return a context that ends in a refusal; all lines of the test are those in the golden file."""
    name = request.node.nodeid.removeprefix("tests/")
    folder = re.compile(re.escape(str(tmp_path_factory.getbasetemp())) + r"/[\w.-]*\w")
    lines = []

    @contextmanager
    def refused():
        with pytest.raises(UsageError) as error:
            yield error
        lines.append(folder.sub("DIR", str(error.value)))
        if not request.config.getoption(OPTION):
            assert lines[-1:] == request.config.refusals.get(name, [])[len(lines) - 1 : len(lines)]

    yield refused
    if request.config.getoption(OPTION):
        request.config.refusals[name] = lines
