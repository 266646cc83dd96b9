"""Shared parts of the tests of tasks: checkpoints, a small recipe, examples and rows that are read."""

import csv

import pytest

from bertkit.tasks.squad import VERSIONS
from bertkit.training.run_dir import read_log
from tests.official import write_checkpoint


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A tiny BERT whose random weights are large enough to learn from quickly."""
    return write_checkpoint(tmp_path_factory.mktemp("bert"), initializer_range=0.1)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """The name of a tiny BERT with the usual random weights."""
    return str(write_checkpoint(tmp_path_factory.mktemp("start")))


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def version(request):
    return request.param


def load_examples(task, place, **options):
    """Return the examples of each split, and the lines that were reported."""
    lines = []
    return task.load(task.recipe["data"] | {"dir": str(place)} | options, lines.append), lines


def make_small(checkpoint, place, data, **train):
    """Return a recipe in fp32 without baselines, and without evaluations and checkpoints before the end."""
    train = {"learning_rate": 3e-3, "save_strategy": "no", "eval_strategy": "no"} | train
    chosen = {"checkpoint": str(checkpoint), "batch_size": 8, "precision": "fp32", "preset": "paper", "baseline": False}
    return chosen | {"data": {"dir": str(place)} | data, "train": train}


def read_rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_losses(output):
    return [entry["loss"] for entry in read_log(output) if "loss" in entry]
