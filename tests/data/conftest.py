"""Files and data sets on the Hub for the tests of their readers, and statistics for those of random draws."""

import gzip
from pathlib import Path

import datasets
import numpy as np
import pytest

from bertkit.data.formats import hub


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed if its name ends in .gz."""
    content = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def within(count: float, expected: float, variance: float) -> bool:
    """Return whether a count is within four standard errors of its expected value."""
    return abs(count - expected) <= 4 * max(variance, 0) ** 0.5


def is_uniform(counts: np.ndarray) -> bool:
    """Return whether chi-square is as expected."""
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    freedom = counts.size - 1
    return abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def make_tagged(words: list[list[str]], tags: list[list[int]], names=("O", "B-PER", "I-PER")) -> datasets.Dataset:
    """Make a data set of words and the numbers of their tags."""
    kinds = {"tokens": datasets.Value("string"), "ner_tags": datasets.ClassLabel(names=list(names))}
    features = datasets.Features({name: datasets.List(kind) for name, kind in kinds.items()})
    return datasets.Dataset.from_dict({"tokens": words, "ner_tags": tags}, features=features)


@pytest.fixture
def served(monkeypatch):
    """Replace the Hub, and return (name, configuration) -> the splits that it serves, for the test to fill."""
    found = {}
    monkeypatch.setattr(hub, "explain_hub_trouble", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: datasets.DatasetDict(found[name]))
    return found
