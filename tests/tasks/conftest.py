"""Checkpoints that the tests of several tasks start from."""

import pytest

from tests.official import write_checkpoint


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A tiny BERT whose random weights are large enough to learn from quickly."""
    return write_checkpoint(tmp_path_factory.mktemp("bert"), initializer_range=0.1)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """The name of a tiny BERT with the usual random weights."""
    return str(write_checkpoint(tmp_path_factory.mktemp("start")))
