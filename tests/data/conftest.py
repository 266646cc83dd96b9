"""Files, and data sets on the Hub, for the tests of their readers."""

import gzip
from pathlib import Path

import datasets
import pytest

from bertkit.data.formats import hub


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name ends in .gz."""
    content = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def served(monkeypatch):
    """Replace the Hub, and return (name, configuration) -> the splits that it serves, for the test to fill."""
    found = {}
    monkeypatch.setattr(hub, "find_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: datasets.DatasetDict(found[name]))
    return found
